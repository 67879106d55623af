//! The known blocks of an object: those whose bytes this process knows to be right. Also whether the bytes of
//! all blocks have reached the disk.

use std::sync::atomic::{AtomicU64, Ordering};

/// The low two bits of `state` say whether the bytes have reached the disk. The higher bits count the removed blocks.
/// So the end of a sync has no effect if a block was removed after the sync began.
const UNSYNCED: u64 = 0;
const SYNCING: u64 = 1;
const SYNCED: u64 = 2;
const STATE_MASK: u64 = 3;
const ONE_REMOVED: u64 = 4;

/// The known blocks. Each was compared with its checksum, or came from the server.
#[derive(Debug)]
pub(super) struct KnownBlocks {
    bits: Vec<AtomicU64>,
    /// Number of blocks that are not known.
    unknown: AtomicU64,
    state: AtomicU64,
}

impl KnownBlocks {
    /// The state of an object of `blocks` blocks, none of which is known.
    pub(super) fn new(blocks: u64) -> KnownBlocks {
        let words = blocks.div_ceil(64) as usize;
        KnownBlocks {
            bits: std::iter::repeat_with(AtomicU64::default).take(words).collect(),
            unknown: AtomicU64::new(blocks),
            state: AtomicU64::new(UNSYNCED),
        }
    }

    pub(super) fn add(&self, block: u64) {
        let (word, bit) = (&self.bits[(block / 64) as usize], 1 << (block % 64));
        // Most blocks are known already. A plain load then avoids a write, which would take the cache line from
        // other threads.
        if word.load(Ordering::SeqCst) & bit == 0 && word.fetch_or(bit, Ordering::SeqCst) & bit == 0
        {
            self.unknown.fetch_sub(1, Ordering::SeqCst);
        }
    }

    pub(super) fn remove(&self, block: u64) {
        let (word, bit) = (&self.bits[(block / 64) as usize], 1 << (block % 64));
        if word.fetch_and(!bit, Ordering::SeqCst) & bit != 0 {
            self.unknown.fetch_add(1, Ordering::SeqCst);
        }
        let removed = |state: u64| Some((state & !STATE_MASK).wrapping_add(ONE_REMOVED) | UNSYNCED);
        let _ = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, removed);
    }

    /// Whether all blocks are known and have reached the disk.
    pub(super) fn are_synced(&self) -> bool {
        self.state() == SYNCED && self.are_all()
    }

    fn are_all(&self) -> bool {
        self.unknown.load(Ordering::SeqCst) == 0
    }

    /// Begins a sync of the data file and returns its state, which the caller passes to `end_sync`. `None` if a
    /// block is not known, or if the bytes are being synced or were synced already.
    pub(super) fn begin_sync(&self) -> Option<u64> {
        let before = self.state.load(Ordering::SeqCst);
        let syncing = before | SYNCING;
        let may = self.are_all() && before & STATE_MASK == UNSYNCED;
        (may && self.change(before, syncing)).then_some(syncing)
    }

    /// Ends the sync that has the state `syncing`.
    pub(super) fn end_sync(&self, syncing: u64, is_done: bool) {
        self.change(syncing, (syncing & !STATE_MASK) | if is_done { SYNCED } else { UNSYNCED });
    }

    fn state(&self) -> u64 {
        self.state.load(Ordering::SeqCst) & STATE_MASK
    }

    /// Whether a thread is bringing the bytes of all blocks to the disk.
    #[cfg(test)]
    pub(super) fn is_syncing(&self) -> bool {
        self.state() == SYNCING
    }

    fn change(&self, before: u64, after: u64) -> bool {
        self.state.compare_exchange(before, after, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_blocks_are_known_and_synced_before_they_count_and_a_damaged_one_ends_that() {
        let known = KnownBlocks::new(70);
        for block in (0..70).chain(0..70) {
            assert_eq!(known.begin_sync(), None);
            known.add(block);
            if block == 69 {
                break;
            }
        }
        let sync = known.begin_sync().unwrap();
        assert!(!known.are_synced() && known.begin_sync().is_none());
        known.end_sync(sync, false);
        let sync = known.begin_sync().unwrap();
        assert!(!known.are_synced());
        known.end_sync(sync, true);
        assert!(known.are_synced());
        known.remove(69);
        assert!(!known.are_synced() && known.begin_sync().is_none());
        known.add(69);
        let sync = known.begin_sync().unwrap();
        // Damage that is found during a sync makes the result of this sync invalid, even if the next sync has begun
        // since.
        known.remove(3);
        known.add(3);
        let next = known.begin_sync().unwrap();
        known.end_sync(sync, true);
        assert!(!known.are_synced());
        known.end_sync(next, true);
        assert!(known.are_synced());
    }
}
