//! The blocks of an object whose bytes this process knows to be right, and whether all of them have
//! reached the disk.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// States of the bytes on the disk.
const UNSYNCED: u8 = 0;
const SYNCING: u8 = 1;
const SYNCED: u8 = 2;

/// Known blocks. Each was compared with its checksum, or came from the server.
#[derive(Debug)]
pub(super) struct KnownBlocks {
    bits: Vec<AtomicU64>,
    /// Blocks that are not known.
    unknown: AtomicU64,
    state: AtomicU8,
}

impl KnownBlocks {
    /// No block of `blocks` ones is known.
    pub(super) fn new(blocks: u64) -> KnownBlocks {
        let words = blocks.div_ceil(64) as usize;
        KnownBlocks {
            bits: std::iter::repeat_with(AtomicU64::default).take(words).collect(),
            unknown: AtomicU64::new(blocks),
            state: AtomicU8::new(UNSYNCED),
        }
    }

    pub(super) fn add(&self, block: u64) {
        let (word, bit) = (&self.bits[(block / 64) as usize], 1 << (block % 64));
        // A block mostly stays known, and a load does not take the cache line from other threads.
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
        self.state.store(UNSYNCED, Ordering::SeqCst);
    }

    /// Whether all blocks are known and have reached the disk.
    pub(super) fn are_synced(&self) -> bool {
        self.state.load(Ordering::SeqCst) == SYNCED && self.are_all()
    }

    fn are_all(&self) -> bool {
        self.unknown.load(Ordering::SeqCst) == 0
    }

    /// Whether the caller has to bring all blocks to the disk: they are known, and nobody else does so.
    pub(super) fn begin_sync(&self) -> bool {
        self.are_all() && self.change(UNSYNCED, SYNCING)
    }

    /// Notes the end of what `begin_sync` began.
    pub(super) fn end_sync(&self, is_done: bool) {
        self.change(SYNCING, if is_done { SYNCED } else { UNSYNCED });
    }

    /// Whether somebody brings all blocks to the disk now.
    #[cfg(test)]
    pub(super) fn is_syncing(&self) -> bool {
        self.state.load(Ordering::SeqCst) == SYNCING
    }

    fn change(&self, before: u8, after: u8) -> bool {
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
            assert!(!known.begin_sync());
            known.add(block);
            if block == 69 {
                break;
            }
        }
        assert!(!known.are_synced() && known.begin_sync() && !known.begin_sync());
        known.end_sync(false);
        assert!(!known.are_synced() && known.begin_sync());
        known.end_sync(true);
        assert!(known.are_synced());
        known.remove(69);
        assert!(!known.are_synced() && !known.begin_sync());
        known.add(69);
        assert!(!known.are_synced() && known.begin_sync());
        // Damage that is found meanwhile counts.
        known.remove(3);
        known.add(3);
        known.end_sync(true);
        assert!(!known.are_synced());
    }
}
