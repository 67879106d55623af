//! Reads one block of a virtual file without waiting: plans its reads of sources, and puts their
//! bytes into place as they arrive.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::Reader;
use crate::coalesce::coalesce;
use crate::error::Result;
use crate::io::{
    Buffer, Effort, Engine, Fetch, Priority, ReadBuffer, Reservation, Ticket, guarded,
};
use crate::layout::Extent;
use crate::source::Source;
use crate::strided::{RunRange, StridedCopy};
use crate::sync::Mutex;

/// Most bytes of a source between two wanted ranges that are read rather than skipped.
const GAP_MAX: u64 = 64 << 10;

/// Longest read that wanted ranges are merged into.
const MERGED_LEN_MAX: u64 = 8 << 20;

/// Usual length of a block.
const BLOCK_LEN: u64 = 1 << 20;

/// Longest block, if many shards have a part in it.
const BLOCK_LEN_MAX: u64 = 8 << 20;

/// Shortest read of a shard that is worth its own disk access.
const PART_LEN: u64 = 1 << 20;

/// The bytes of a block.
#[derive(Debug)]
pub enum Block {
    /// The bytes of one read.
    Read(ReadBuffer),
    /// Bytes gathered from several reads.
    Gathered(Buffer),
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Block::Read(filled) => filled,
            Block::Gathered(buffer) => buffer,
        }
    }
}

/// Called with the outcome of a block.
pub type Done = Box<dyn FnOnce(Result<Block>) + Send>;

/// The reads that a block takes.
#[derive(Debug)]
pub struct BlockPlan {
    /// Length of the block.
    len: u64,
    /// Bytes of the header: offset in the block, and range in the header.
    header: Option<(u64, Range<u64>)>,
    fetches: Vec<Planned>,
}

/// One read of a source and the uses of its bytes.
#[derive(Debug)]
struct Planned {
    source: Arc<Source>,
    range: Range<u64>,
    uses: Vec<BlockUse>,
}

/// Some bytes of a source, `range`, and their place in a block.
#[derive(Debug)]
struct BlockUse {
    range: Range<u64>,
    place: BlockPlace,
}

#[derive(Debug)]
enum BlockPlace {
    /// Contiguous bytes from this offset in the block on.
    Run(u64),
    /// Bytes spread over the block, which begins `before` bytes before the tensor, or `after` bytes
    /// after its start.
    Scatter { before: u64, after: u64, runs: StridedCopy, part: RunRange },
}

impl BlockPlan {
    /// Memory that the reads take, in bytes.
    pub fn memory(&self) -> u64 {
        let reads: u64 = self.fetches.iter().map(|fetch| Buffer::len_for(&fetch.range)).sum();
        if self.is_one_read() { reads } else { reads + self.len }
    }

    /// Whether the bytes of the block are those of one read.
    fn is_one_read(&self) -> bool {
        let [Planned { range, uses, .. }] = self.fetches.as_slice() else { return false };
        let [BlockUse { place: BlockPlace::Run(0), .. }] = uses.as_slice() else { return false };
        range.end - range.start == self.len
    }

    /// The sources and how many bytes of each are read.
    pub fn sources(&self) -> impl Iterator<Item = (&Arc<Source>, u64)> {
        self.fetches.iter().map(|fetch| (&fetch.source, fetch.range.end - fetch.range.start))
    }

    /// Whether the kernel's page cache holds all its bytes.
    pub fn is_cached(&self, engine: &Engine) -> bool {
        self.fetches.iter().all(|fetch| engine.is_cached(&fetch.source, &fetch.range))
    }
}

impl Reader {
    /// A good length for a block that begins at `offset`.
    pub fn block_len(&self, offset: u64) -> u64 {
        let Some(layout) = &self.layout else { return BLOCK_LEN };
        // Number and bytes of the shards' parts that are spread over a block of usual length.
        let (mut parts, mut bytes) = (0, 0);
        layout.extents(offset..offset + BLOCK_LEN, &mut |extent| {
            if let Extent::Scatter { range, .. } = extent {
                parts += 1;
                bytes += range.end - range.start;
            }
        });
        if bytes < BLOCK_LEN / 2 {
            return BLOCK_LEN;
        }
        (parts * PART_LEN).next_multiple_of(BLOCK_LEN).min(BLOCK_LEN_MAX)
    }

    /// The reads that bytes `range` take; the range lies inside the file.
    pub fn plan_block(&self, range: Range<u64>) -> BlockPlan {
        let mut plan =
            BlockPlan { len: range.end - range.start, header: None, fetches: Vec::new() };
        let mut wanted: Vec<(usize, BlockUse)> = Vec::new();
        let Some(layout) = &self.layout else {
            let source = self.sources[0].clone();
            let uses = vec![BlockUse { range: range.clone(), place: BlockPlace::Run(0) }];
            plan.fetches.push(Planned { source, range, uses });
            return plan;
        };
        let start = range.start;
        layout.extents(range, &mut |extent| match extent {
            Extent::Header { offset, bytes } => {
                plan.header = Some((offset - start, offset..offset + bytes.len() as u64));
            }
            Extent::Run { offset, shard, range } => {
                wanted.push((
                    shard.0 as usize,
                    BlockUse { range, place: BlockPlace::Run(offset - start) },
                ));
            }
            Extent::Scatter { tensor_at, shard, range, runs, part } => {
                let before = tensor_at.saturating_sub(start);
                let after = start.saturating_sub(tensor_at);
                let place = BlockPlace::Scatter { before, after, runs: runs.clone(), part };
                wanted.push((shard.0 as usize, BlockUse { range, place }));
            }
        });
        wanted.sort_by_key(|(shard, wanted)| (*shard, wanted.range.start));
        let same_shard = |first: &(usize, BlockUse), next: &(usize, BlockUse)| first.0 == next.0;
        let reads = coalesce(&wanted, |one| &one.1.range, same_shard, GAP_MAX, MERGED_LEN_MAX);
        let reads: Vec<_> = reads.map(|(range, group)| (group[0].0, range, group.len())).collect();
        let mut wanted = wanted.into_iter().map(|(_, wanted)| wanted);
        for (shard, range, count) in reads {
            let mut uses = Vec::new();
            wanted.by_ref().take(count).for_each(|wanted| add_use(&mut uses, wanted));
            plan.fetches.push(Planned { source: self.sources[shard].clone(), range, uses });
        }
        plan
    }

    /// Reads a block; `done` is called with all its bytes, or with the first error. `reservation`
    /// holds the memory that the plan takes.
    pub fn fetch_block(
        &self,
        engine: &Engine,
        plan: BlockPlan,
        priority: Priority,
        mut reservation: Reservation,
        done: Done,
    ) -> Vec<Ticket> {
        if plan.is_one_read() {
            let done = Box::new(move |outcome: Result<ReadBuffer>| done(outcome.map(Block::Read)));
            let fetch =
                plan.fetches.into_iter().map(|Planned { source, range, .. }| (source, range));
            let fetch = fetch.map(|(source, range)| {
                (source, range, reservation.split(reservation.len()).into())
            });
            let mut done = Some(done);
            let submitted = fetch.filter_map(|(source, range, target)| {
                let done: Box<dyn FnOnce(Result<ReadBuffer>) + Send> = done.take()?;
                let effort = Effort::AsAwaited;
                Some(engine.submit(Fetch { source, range, priority, effort, target, done }))
            });
            return submitted.collect();
        }
        let mut buffer = Buffer::new(plan.len as usize, reservation.split(plan.len));
        if let (Some((offset, range)), Some(layout)) = (plan.header, &self.layout) {
            let bytes = &layout.header()[range.start as usize..range.end as usize];
            buffer[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        if plan.fetches.is_empty() {
            done(Ok(Block::Gathered(buffer)));
            return Vec::new();
        }
        let left = plan.fetches.len();
        let block =
            BlockAssembly { buffer: Some(buffer), left, come: Vec::new(), done: Some(done) };
        let block = Arc::new(Mutex::new(block));
        let submit = |Planned { source, range, uses }: Planned| {
            let target = reservation.split(Buffer::len_for(&range)).into();
            let (block, start) = (block.clone(), range.start);
            let done = Box::new(move |outcome| BlockAssembly::add(&block, outcome, start, uses));
            engine.submit(Fetch { source, range, priority, effort: Effort::Long, target, done })
        };
        plan.fetches.into_iter().map(submit).collect()
    }
}

/// Adds bytes to `uses`. If they follow the last ones in the file as in the source, both are one.
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

/// A block that is being put together.
struct BlockAssembly {
    /// `None` while a thread copies into it.
    buffer: Option<Buffer>,
    /// Reads whose bytes are not in the buffer.
    left: usize,
    /// Reads that have come and are not copied yet.
    come: Vec<Come>,
    /// Callback, taken once all bytes are copied, or by the first read that fails.
    done: Option<Done>,
}

/// The bytes of one read, which began at `start` of its source, and their places.
struct Come {
    bytes: ReadBuffer,
    start: u64,
    uses: Vec<BlockUse>,
}

impl BlockAssembly {
    /// Copies the bytes of one read to their places. One thread copies at a time; other threads
    /// leave their bytes to it, and go on.
    fn add(
        block: &Mutex<BlockAssembly>,
        outcome: Result<ReadBuffer>,
        start: u64,
        uses: Vec<BlockUse>,
    ) {
        let lock = || block.lock();
        let mut this = lock();
        if this.done.is_none() {
            return;
        }
        let finished = match outcome {
            Ok(bytes) => {
                this.come.push(Come { bytes, start, uses });
                let Some(mut buffer) = this.buffer.take() else { return };
                let mut failed = None;
                while let Some(come) = this.come.pop() {
                    drop(this);
                    failed = failed.or(guarded(|| come.copy(&mut buffer)).err());
                    this = lock();
                    this.left -= 1;
                }
                match failed {
                    Some(error) => Err(error),
                    None if this.left > 0 => {
                        this.buffer = this.done.is_some().then_some(buffer);
                        return;
                    }
                    None => Ok(buffer),
                }
            }
            Err(error) => {
                this.buffer = None;
                this.come.clear();
                Err(error)
            }
        };
        let done = this.done.take();
        drop(this);
        if let Some(done) = done {
            done(finished.map(Block::Gathered));
        }
    }
}

impl Come {
    fn copy(self, buffer: &mut [u8]) -> Result<()> {
        self.uses.iter().for_each(|part| part.copy(&self.bytes, self.start, buffer));
        Ok(())
    }
}

impl BlockUse {
    /// Copies the bytes out of a read that began at `start` of the source.
    fn copy(&self, read: &[u8], start: u64, block: &mut [u8]) {
        let Range { start: from, end } = self.range;
        let bytes = &read[(from - start) as usize..(end - start) as usize];
        match &self.place {
            BlockPlace::Run(offset) => {
                block[*offset as usize..][..bytes.len()].copy_from_slice(bytes)
            }
            BlockPlace::Scatter { before, after, runs, part } => {
                runs.scatter(part, bytes, &mut block[*before as usize..], *after);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::error::Error;
    use crate::io::Budget;

    const PARTS: usize = 64;

    /// A block of as many parts as `PARTS`, a page each. Its outcome arrives at the receiver.
    fn block(budget: &Budget) -> (Arc<Mutex<BlockAssembly>>, Receiver<Result<Block>>) {
        let (send, receive) = channel();
        let reservation = budget.try_reserve((PARTS << 12) as u64).unwrap();
        let buffer = Some(Buffer::new(PARTS << 12, reservation));
        let done: Done = Box::new(move |outcome| drop(send.send(outcome)));
        let block = BlockAssembly { buffer, left: PARTS, come: Vec::new(), done: Some(done) };
        (Arc::new(Mutex::new(block)), receive)
    }

    /// Brings part `n`, whose bytes are all `n`.
    fn add(block: &Mutex<BlockAssembly>, budget: &Budget, n: usize) {
        let mut buffer = Buffer::new(4096, budget.try_reserve(4096).unwrap());
        buffer.fill(n as u8);
        let start = 7 * n as u64;
        let uses =
            vec![BlockUse { range: start..start + 4096, place: BlockPlace::Run((n << 12) as u64) }];
        BlockAssembly::add(block, Ok(ReadBuffer::new(buffer, 0..4096)), start, uses);
    }

    #[test]
    fn parts_that_come_on_many_threads_at_a_time_all_lie_in_their_places() {
        let budget = Budget::new(1 << 20, Arc::default());
        for _ in 0..50 {
            let (block, outcome) = block(&budget);
            std::thread::scope(|scope| {
                for first in 0..4 {
                    let (block, budget) = (&block, &budget);
                    let mine = (0..PARTS).rev().filter(move |n| n % 4 == first);
                    scope.spawn(move || mine.for_each(|n| add(block, budget, n)));
                }
            });
            let loaded = outcome.recv().unwrap().unwrap();
            assert!(loaded.chunks(4096).enumerate().all(|(n, part)| part == [n as u8; 4096]));
            assert!(outcome.recv().is_err(), "a second answer");
        }
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_part_that_fails_answers_at_once_and_those_that_come_later_hold_no_memory() {
        let budget = Budget::new(1 << 20, Arc::default());
        let (block, outcome) = block(&budget);
        (0..3).for_each(|n| add(&block, &budget, n));
        BlockAssembly::add(&block, Err(Error::usage("as the test wants it")), 0, Vec::new());
        assert!(outcome.recv().unwrap().is_err());
        (3..6).for_each(|n| add(&block, &budget, n));
        BlockAssembly::add(&block, Err(Error::usage("as the test wants it")), 0, Vec::new());
        assert_eq!(budget.used(), 0);
        drop(block);
        assert!(outcome.recv().is_err(), "a second answer");
    }
}
