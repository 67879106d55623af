//! Reads of blocks that are in the cache. Each block is compared with its checksum before a reader gets it.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use nix::libc;

use super::object::{BlockReach, CachedObject};
use crate::source::page_cache::{ALIGN, CachedPages, cached_pages, copy_cached};

/// The outcome of a read of blocks.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// The runs of blocks that are not in the cache.
    pub(super) missing: Vec<Range<u64>>,
    /// The runs of blocks that are not in the page cache, if the read may use only the page cache (see `BlockReach`).
    pub(super) unread: Vec<Range<u64>>,
    /// Number of blocks whose bytes were copied.
    pub(super) found: u64,
    /// Number of blocks whose bytes do not match their checksum.
    pub(super) damaged: u64,
}

impl Taken {
    /// Notes that the checksums of the blocks `run` cannot be read.
    fn give_up(&mut self, run: Range<u64>, reach: BlockReach) {
        match reach {
            BlockReach::Memory => self.unread.push(run),
            BlockReach::Disk => self.missing.push(run),
        }
    }
}

/// The destination of a read: memory whose first byte is byte `offset` of the object.
struct BlockTarget<'a> {
    offset: u64,
    buf: &'a mut [u8],
}

impl BlockTarget<'_> {
    fn end(&self) -> u64 {
        self.offset + self.buf.len() as u64
    }

    /// The part of the memory for the bytes `range` of the object, which lie inside the destination.
    fn place(&mut self, range: &Range<u64>) -> &mut [u8] {
        &mut self.buf[(range.start - self.offset) as usize..(range.end - self.offset) as usize]
    }
}

impl CachedObject {
    /// Copies those blocks of `run` that are in the cache to `buf`, whose first byte is byte `offset` of the object.
    pub(super) fn take(
        &self,
        run: &Range<u64>,
        offset: u64,
        buf: &mut [u8],
        reach: BlockReach,
    ) -> Taken {
        let mut taken = Taken::default();
        let Ok(sums) = self.sums(run, reach) else {
            taken.give_up(run.clone(), reach);
            return taken;
        };
        let mut wanted = BlockTarget { offset, buf };
        let mut index = run.start;
        while index < run.end {
            let there = |index: u64| sums[(index - run.start) as usize] != [0; 16];
            let end = (index..run.end).find(|at| there(*at) != there(index)).unwrap_or(run.end);
            let sums = &sums[(index - run.start) as usize..];
            if !there(index) {
                add_run(&mut taken.missing, index..end);
            } else if reach == BlockReach::Disk {
                self.take_run(&(index..end), sums, &mut wanted, &mut taken);
            } else if self.take_cached_run(&(index..end), sums, &mut wanted) {
                taken.found += end - index;
            } else {
                add_run(&mut taken.unread, index..end);
            }
            index = end;
        }
        taken
    }

    /// Copies the wanted bytes of the blocks `run` from the page cache, and compares the blocks with the checksums
    /// `sums`. Returns whether the page cache had all blocks and all of them match.
    fn take_cached_run(
        &self,
        run: &Range<u64>,
        sums: &[[u8; 16]],
        wanted: &mut BlockTarget<'_>,
    ) -> bool {
        if !cached_pages(&self.data, &self.bytes_of(run)).is_some_and(CachedPages::is_all) {
            return false;
        }
        let whole = self.whole_blocks(run, wanted);
        let bytes = self.bytes_of(&whole);
        if !whole.is_empty() && !copy_cached(&self.data, bytes.start, wanted.place(&bytes)) {
            return false;
        }
        let mut edge = Vec::new();
        run.clone().zip(sums).all(|(block, sum)| {
            let bytes = self.bytes_of(&(block..block + 1));
            let is_right = if whole.contains(&block) {
                self.sum_of(block, [&*wanted.place(&bytes)]) == *sum
            } else {
                self.take_block(block, *sum, wanted, &mut edge, BlockReach::Memory)
            };
            if is_right {
                self.known.add(block);
            }
            is_right
        })
    }

    /// The blocks of `run` that lie wholly inside the wanted bytes.
    fn whole_blocks(&self, run: &Range<u64>, wanted: &BlockTarget<'_>) -> Range<u64> {
        let bytes = self.bytes_of(run);
        let first = run.start + u64::from(bytes.start < wanted.offset);
        let end = run.end - u64::from(bytes.end > wanted.end());
        if first < end { first..end } else { first..first }
    }

    /// Copies the wanted bytes of the blocks `run`, and compares the blocks with the checksums `sums`.
    fn take_run(
        &self,
        run: &Range<u64>,
        sums: &[[u8; 16]],
        wanted: &mut BlockTarget<'_>,
        taken: &mut Taken,
    ) {
        let whole = self.whole_blocks(run, wanted);
        let is_read = !whole.is_empty() && {
            let bytes = self.bytes_of(&whole);
            self.read_bytes(bytes.start, wanted.place(&bytes)).is_ok()
        };
        let mut edge = Vec::new();
        for block in run.clone() {
            let sum = sums[(block - run.start) as usize];
            let bytes = self.bytes_of(&(block..block + 1));
            let is_right = is_read
                && whole.contains(&block)
                && self.sum_of(block, [&*wanted.place(&bytes)]) == sum;
            // If the read of the whole run failed, each block is read by itself. Only blocks that fail again
            // are missing.
            if is_right || self.take_block(block, sum, wanted, &mut edge, BlockReach::Disk) {
                self.known.add(block);
                taken.found += 1;
            } else {
                add_run(&mut taken.missing, block..block + 1);
                taken.damaged += u64::from(self.forget(block));
            }
        }
    }

    /// Fills `place` with the bytes of the data file from `at` on. If the page cache does not have most of
    /// these bytes, the read goes past the page cache.
    fn read_bytes(&self, at: u64, place: &mut [u8]) -> io::Result<()> {
        let cached = cached_pages(&self.data, &(at..at + place.len() as u64));
        let aligned = place.len() / ALIGN as usize * ALIGN as usize;
        let (most, rest) = place.split_at_mut(aligned);
        if !cached.is_some_and(CachedPages::is_most)
            && self.direct.read(&self.data, &self.data_path, at, most)
        {
            return self.data.read_exact_at(rest, at + aligned as u64);
        }
        if !cached.is_some_and(CachedPages::is_all) {
            self.read_ahead(at, place.len());
        }
        self.data.read_exact_at(place, at)
    }

    /// Advises the kernel to read these bytes ahead, so that it reads them with large requests.
    fn read_ahead(&self, start: u64, len: usize) {
        let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_WILLNEED;
        let (start, len) = (start as libc::off_t, len as libc::off_t);
        let _ = nix::fcntl::posix_fadvise(&self.data, start, len, advice);
    }

    /// Copies the wanted bytes of one block, if the block matches the checksum `sum`.
    fn take_block(
        &self,
        block: u64,
        sum: [u8; 16],
        wanted: &mut BlockTarget<'_>,
        edge: &mut Vec<u8>,
        reach: BlockReach,
    ) -> bool {
        let bytes = self.bytes_of(&(block..block + 1));
        edge.resize((bytes.end - bytes.start) as usize, 0);
        let is_read = match reach {
            BlockReach::Memory => copy_cached(&self.data, bytes.start, edge),
            BlockReach::Disk => self.data.read_exact_at(edge, bytes.start).is_ok(),
        };
        if !is_read || self.sum_of(block, [edge.as_slice()]) != sum {
            return false;
        }
        let copied = bytes.start.max(wanted.offset)..bytes.end.min(wanted.end());
        let from = (copied.start - bytes.start) as usize;
        let len = (copied.end - copied.start) as usize;
        wanted.place(&copied).copy_from_slice(&edge[from..from + len]);
        true
    }
}

/// Appends `run` to `runs`. If it begins where the last run ends, the two become one run.
pub(super) fn add_run(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    match runs.last_mut() {
        Some(last) if last.end == run.start => last.end = run.end,
        _ => runs.push(run),
    }
}
