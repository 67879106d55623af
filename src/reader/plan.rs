//! The reads for a part of a virtual file. They are planned once. After that, the bytes are copied from the
//! kernel's page cache, or read on the calling thread or by the engine.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use super::block::{Block, BlockAssembly, BlockPlace, BlockUse, Done};
use crate::coalesce::coalesce;
use crate::error::Result;
use crate::io::{
    Buffer, CachedPages, Effort, Engine, Fetch, Priority, Read, ReadBuffer, Reservation, Ticket,
    memory_for,
};
use crate::layout::{Extent, GAP_MAX, Layout};
use crate::source::Source;

/// Maximum number of parts of shards that are planned at a time. Each takes at least one page of memory if it
/// is read separately.
pub(super) const PARTS_MAX: u64 = 8 << 10;

/// Maximum gap in bytes between two ranges that are read together, in a file with gathered tensors.
const GATHER_GAP_MAX: u64 = 4 << 10;

/// Maximum length in bytes of a read of several ranges.
const MERGED_LEN_MAX: u64 = 8 << 20;

/// Maximum number of bytes that a thread spreads at a time. They go through a buffer that the thread keeps.
pub(super) const SPREAD_LEN_MAX: u64 = 16 << 20;

/// Number of bytes that are spread at a time. They fit into the cache of a CPU core.
const STREAMED_LEN: u64 = 1 << 20;

/// Usual length of a block in bytes.
pub(super) const BLOCK_LEN: u64 = 1 << 20;

/// Blocks of a store are usually longer than `BLOCK_LEN` only if at least this number of them has room in the cache.
pub(super) const BLOCKS_MIN: u64 = 16;

/// Maximum usual length of a block of a store.
pub(super) const STORE_BLOCK_LEN_MAX: u64 = 4 << 20;

/// Maximum length in bytes of a block, if many shards have parts in it.
const BLOCK_LEN_MAX: u64 = 8 << 20;

/// Length in bytes of the reads for a block whose rows have gaps, and minimum length of such a block.
const SPARSE_READ_LEN: u64 = 4 << 20;
const SPARSE_LEN_MIN: u64 = 64 << 10;

/// Minimum length in bytes of a read of a shard that is worth a disk access of its own.
const PART_LEN: u64 = 1 << 20;

thread_local! {
    /// Buffer for the bytes of column pieces before they are copied to their places.
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// The plan of the reads for a block.
#[derive(Debug)]
pub struct BlockPlan {
    /// Length of the block.
    len: u64,
    /// Whether encrypted bytes are returned without decryption.
    stored: bool,
    header: Option<HeaderUse>,
    fetches: Vec<Planned>,
}

/// The bytes `range` of the header. Their place in the block is at `offset`.
#[derive(Debug)]
struct HeaderUse {
    offset: u64,
    range: Range<usize>,
    layout: Arc<Layout>,
}

/// One read of a source and the uses of its bytes.
#[derive(Debug)]
struct Planned {
    source: Arc<Source>,
    range: Range<u64>,
    /// The part of the range that is in the page cache, if that was checked.
    cached: Option<CachedPages>,
    uses: Vec<BlockUse>,
}

impl Planned {
    /// Memory that the read takes, in bytes.
    fn memory(&self) -> u64 {
        memory_for(&self.source, &self.range)
    }
}

/// A function that executes reads of sources. Returns `false` if it did not execute them, because they would have to
/// read from the disk.
type Carry<'a> = &'a dyn Fn(&mut [Read<'_>]) -> Result<bool>;

impl BlockPlan {
    /// The plan for the bytes `range` of an unchanged file.
    pub(super) fn of_source(source: &Arc<Source>, range: Range<u64>) -> BlockPlan {
        let len = range.end - range.start;
        let uses = vec![BlockUse { range: range.clone(), place: BlockPlace::Run(0) }];
        let fetch = Planned { source: source.clone(), range, cached: None, uses };
        BlockPlan { len, stored: true, header: None, fetches: vec![fetch] }
    }

    /// The plan for the bytes `range` of a virtual file, whose shards are `sources`.
    pub(super) fn of_layout(
        layout: &Arc<Layout>,
        sources: &[Arc<Source>],
        range: Range<u64>,
    ) -> BlockPlan {
        let mut wanted = WantedBytes::new(layout, &range);
        layout.extents(range, &mut |extent| wanted.add(extent));
        wanted.plan(sources)
    }

    /// Calls `carry_out` with several plans, whose reads together fill the block for the bytes `range`. Each
    /// plan takes little memory, however far apart the bytes are in the source.
    ///
    /// # Errors
    /// The first error of `carry_out`.
    pub(super) fn in_parts(
        layout: &Arc<Layout>,
        sources: &[Arc<Source>],
        range: Range<u64>,
        carry_out: &mut dyn FnMut(BlockPlan) -> Result<()>,
    ) -> Result<()> {
        let mut wanted = WantedBytes::new(layout, &range);
        let mut done = Ok(());
        layout.extents(range, &mut |extent| {
            if done.is_err() {
                return;
            }
            wanted.add(extent);
            if wanted.is_long() {
                done = carry_out(wanted.plan(sources));
            }
        });
        done?;
        carry_out(wanted.plan(sources))
    }

    /// Length of the block.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// A suitable length for a block with the same start as this block, whose length is the usual length `usual`.
    pub(super) fn good_len(&self, usual: u64) -> u64 {
        let uses = self.fetches.iter().flat_map(|fetch| &fetch.uses);
        let scattered = uses.filter(|one| match &one.place {
            BlockPlace::Run(_) => false,
            BlockPlace::Scatter { .. } => true,
            BlockPlace::Cast(_, place) => place.is_spread(),
        });
        let (parts, rows) = scattered.fold((0, 0), |(parts, bytes), one| {
            (parts + 1, bytes + (one.range.end - one.range.start))
        });
        // Runs that are far apart take at least one page of memory each.
        let whole = |one: &BlockUse| matches!(one.place, BlockPlace::Run(_));
        let runs = self.fetches.iter().filter(|fetch| fetch.uses.iter().all(whole));
        let bytes = runs.map(Planned::memory).sum::<u64>().max(rows);
        if bytes > 2 * self.len && bytes >= BLOCK_LEN / 2 {
            // The rows belong to larger boxes and are read together with the bytes between them. So the block is made
            // shorter, to limit the memory for its reads.
            let len = u128::from(self.len) * u128::from(SPARSE_READ_LEN) / u128::from(bytes);
            return (len as u64 / SPARSE_LEN_MIN * SPARSE_LEN_MIN).clamp(SPARSE_LEN_MIN, BLOCK_LEN);
        }
        if rows < BLOCK_LEN / 2 {
            return usual;
        }
        (parts * PART_LEN).next_multiple_of(BLOCK_LEN).clamp(usual, BLOCK_LEN_MAX)
    }

    /// Number of bytes of memory that the reads take.
    pub fn memory(&self) -> u64 {
        let reads: u64 = self.fetches.iter().map(Planned::memory).sum();
        if self.is_one_read() { reads } else { reads + self.len }
    }

    /// Number of bytes that go through the buffer of the thread that fills the block.
    pub(super) fn spread_len(&self) -> u64 {
        let uses = self.fetches.iter().flat_map(|fetch| &fetch.uses);
        let spread = uses.filter(|one| !matches!(one.place, BlockPlace::Run(_)));
        spread.map(|one| one.range.end - one.range.start).sum()
    }

    /// Whether the block is the result of a single read.
    fn is_one_read(&self) -> bool {
        let [Planned { range, uses, .. }] = self.fetches.as_slice() else { return false };
        let [BlockUse { place: BlockPlace::Run(0), .. }] = uses.as_slice() else { return false };
        range.end - range.start == self.len
    }

    /// The sources, and the number of bytes that are read of each.
    pub fn sources(&self) -> impl Iterator<Item = (&Arc<Source>, u64)> {
        self.fetches.iter().map(|fetch| (&fetch.source, fetch.range.end - fetch.range.start))
    }

    /// Checks for each read whether the page cache has its bytes, and stops at the first that it does not have.
    /// Returns whether it has all of them. The results are stored for the execution of the reads.
    pub fn is_cached(&mut self, engine: &Engine) -> bool {
        self.fetches.iter_mut().all(|fetch| {
            fetch.cached = engine.cached_pages(&fetch.source, &fetch.range);
            fetch.cached.is_some_and(CachedPages::is_all)
        })
    }

    /// Fills `block` from the kernel's page cache. Never waits. Returns `false` if bytes are missing there, or
    /// if rows would take too much memory of the thread.
    ///
    /// # Errors
    /// The errors of the sources. The content of `block` is then undefined.
    pub fn read_cached(&mut self, engine: &Engine, block: &mut [u8]) -> Result<bool> {
        let is_small = self.spread_len() <= BLOCK_LEN_MAX;
        Ok(is_small
            && self.is_cached(engine)
            && self.fill(block, &|reads| engine.copy_reads(reads))?)
    }

    /// Fills `block` with bytes that `carry` reads. Runs are read directly to their places. The bytes of column
    /// pieces and of casts go through a buffer of this thread.
    pub(super) fn fill(&self, block: &mut [u8], carry: Carry<'_>) -> Result<bool> {
        self.put_header(block);
        let uses = self.fetches.iter().flat_map(|fetch| {
            let source = &fetch.source;
            fetch.uses.iter().map(move |one| (source, one))
        });
        let (mut runs, mut scattered) = (Vec::new(), Vec::new());
        for (source, one) in uses {
            match &one.place {
                BlockPlace::Run(offset) => runs.push((*offset, source, &one.range)),
                BlockPlace::Scatter { .. } | BlockPlace::Cast(..) => scattered.push((source, one)),
            }
        }
        let len = |range: &Range<u64>| (range.end - range.start) as usize;
        let scratch_len = scattered.iter().map(|(_, one)| len(&one.range)).sum();
        let mut scratch = SCRATCH.take();
        // The buffer never shrinks, because new memory costs more than the copies through the buffer.
        if scratch.len() < scratch_len {
            scratch.resize(scratch_len, 0);
        }
        let mut reads = Vec::with_capacity(runs.len() + scattered.len());
        runs.sort_unstable_by_key(|(offset, ..)| *offset);
        let (mut rest, mut end) = (&mut block[..], 0);
        for (offset, source, range) in runs {
            let (_, from) = std::mem::take(&mut rest).split_at_mut((offset - end) as usize);
            let (target, after) = from.split_at_mut(len(range));
            (rest, end) = (after, offset + target.len() as u64);
            reads.push(Read { source, offset: range.start, target });
        }
        let mut free = scratch.as_mut_slice();
        for (source, one) in &scattered {
            let (target, after) = free.split_at_mut(len(&one.range));
            free = after;
            reads.push(Read { source, offset: one.range.start, target });
        }
        let there = reads.is_empty() || carry(&mut reads)?;
        if there {
            let uses: Vec<&BlockUse> = scattered.into_iter().map(|(_, one)| one).collect();
            spread(&uses, &scratch, block);
        }
        SCRATCH.set(scratch);
        Ok(there)
    }

    fn put_header(&self, block: &mut [u8]) {
        if let Some(HeaderUse { offset, range, layout }) = &self.header {
            let bytes = &layout.header()[range.clone()];
            block[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Reads the block without waiting. `done` is called with all its bytes, or with the first error.
    /// `reservation` has the memory that the plan takes.
    pub fn fetch(
        mut self,
        engine: &Engine,
        priority: Priority,
        mut reservation: Reservation,
        done: Done,
    ) -> Vec<Ticket> {
        if self.is_one_read()
            && let Some(Planned { source, range, cached, .. }) = self.fetches.pop()
        {
            let target = reservation.split(reservation.len()).into();
            let (effort, done) = (
                Effort::AsAwaited,
                Box::new(move |outcome: Result<ReadBuffer>| done(outcome.map(Block::Read))),
            );
            let stored = self.stored;
            let fetch = Fetch { source, range, cached, priority, effort, stored, target, done };
            return vec![engine.submit(fetch)];
        }
        let mut buffer = Buffer::new(self.len as usize, reservation.split(self.len));
        if self.fetches.iter().any(|fetch| fetch.source.is_encrypted()) {
            buffer.wipe_on_drop();
        }
        self.put_header(&mut buffer);
        if self.fetches.is_empty() {
            done(Ok(Block::Gathered(buffer)));
            return Vec::new();
        }
        let block = BlockAssembly::new(buffer, self.fetches.len(), done);
        let submit = |Planned { source, range, cached, uses }: Planned| {
            let target = reservation.split(memory_for(&source, &range)).into();
            let (block, start) = (block.clone(), range.start);
            let done = Box::new(move |outcome| BlockAssembly::add(&block, outcome, start, uses));
            let (effort, stored) = (Effort::Long, self.stored);
            engine.submit(Fetch { source, range, cached, priority, effort, stored, target, done })
        };
        self.fetches.into_iter().map(submit).collect()
    }
}

/// Copies the bytes of `uses` to their places in `block`. They are consecutive in `bytes`.
fn spread(mut uses: &[&BlockUse], mut bytes: &[u8], block: &mut [u8]) {
    while let Some(first) = uses.first() {
        let count = first.copy_with(&uses[1..], bytes, block);
        let len = first.range.end - first.range.start;
        bytes = &bytes[count * len as usize..];
        uses = &uses[count..];
    }
}

/// The bytes of a block for which reads will be planned.
struct WantedBytes<'a> {
    layout: &'a Arc<Layout>,
    /// The range of the block in the file.
    block: Range<u64>,
    header: Option<HeaderUse>,
    /// Numbers of shards, and uses of their bytes.
    bytes: Vec<(usize, BlockUse)>,
    /// Total length of the ranges whose bytes are spread over the block.
    spread_len: u64,
}

impl<'a> WantedBytes<'a> {
    fn new(layout: &'a Arc<Layout>, block: &Range<u64>) -> WantedBytes<'a> {
        let (block, bytes) = (block.clone(), Vec::new());
        WantedBytes { layout, block, header: None, bytes, spread_len: 0 }
    }

    fn add(&mut self, extent: Extent) {
        let start = self.block.start;
        let (shard, range, place) = match extent {
            Extent::Header { offset, bytes } => {
                let range = offset as usize..offset as usize + bytes.len();
                let layout = self.layout.clone();
                self.header = Some(HeaderUse { offset: offset - start, range, layout });
                return;
            }
            Extent::Run { offset, shard, range } => (shard, range, BlockPlace::Run(offset - start)),
            Extent::Scatter { tensor_at, shard, range, runs, part } => {
                let before = tensor_at.saturating_sub(start);
                let after = start.saturating_sub(tensor_at);
                (shard, range, BlockPlace::Scatter { before, after, runs, part })
            }
            Extent::Cast { shard, range, place } => (shard, range, BlockPlace::Cast(start, place)),
        };
        if !matches!(place, BlockPlace::Run(_)) {
            self.spread_len += range.end - range.start;
        }
        self.bytes.push((shard.0 as usize, BlockUse { range, place }));
    }

    /// Whether the reads of the added bytes take the maximum memory that a thread should use at a time.
    fn is_long(&self) -> bool {
        self.spread_len >= STREAMED_LEN || self.bytes.len() as u64 >= PARTS_MAX
    }

    /// The reads of the bytes that were added since the last call.
    fn plan(&mut self, sources: &[Arc<Source>]) -> BlockPlan {
        let mut wanted = std::mem::take(&mut self.bytes);
        self.spread_len = 0;
        let len = self.block.end - self.block.start;
        let header = self.header.take();
        let mut plan = BlockPlan { len, stored: false, header, fetches: Vec::new() };
        wanted.sort_by_key(|(shard, wanted)| (*shard, wanted.range.start));
        // For gathers, the layout has merged close ranges already.
        let gap = if self.layout.has_gathers { GATHER_GAP_MAX } else { GAP_MAX };
        let same_shard = |first: &(usize, BlockUse), next: &(usize, BlockUse)| first.0 == next.0;
        let reads: Vec<_> = coalesce(&wanted, |one| &one.1.range, same_shard, gap, MERGED_LEN_MAX)
            .map(|(range, group)| (group[0].0, range, group.len()))
            .collect();
        let mut all_uses = wanted.into_iter().map(|(_, wanted)| wanted);
        for (shard, range, count) in reads {
            let mut uses = Vec::new();
            all_uses.by_ref().take(count).for_each(|wanted| add_use(&mut uses, wanted));
            let source = sources[shard].clone();
            plan.fetches.push(Planned { source, range, cached: None, uses });
        }
        plan
    }
}

/// Adds bytes to `uses`. If they follow the last ones both in the file and in the source, the two become one use.
fn add_use(uses: &mut Vec<BlockUse>, wanted: BlockUse) {
    if let (Some(last), BlockPlace::Run(offset)) = (uses.last_mut(), &wanted.place)
        && let BlockPlace::Run(before) = last.place
        && last.range.end == wanted.range.start
        && before + (last.range.end - last.range.start) == *offset
    {
        last.range.end = wanted.range.end;
        return;
    }
    uses.push(wanted);
}
