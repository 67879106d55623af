//! One block of a virtual file. The bytes of its reads are copied to their places as they arrive.

use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::error::Result;
use crate::io::{Buffer, ReadBuffer, guarded};
use crate::layout::CastPlace;
use crate::strided::{RunRange, StridedCopy};
use crate::sync::Mutex;

/// The bytes of a block.
#[derive(Debug)]
pub enum Block {
    /// The bytes of one read.
    Read(ReadBuffer),
    /// Bytes that were gathered from several reads.
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

/// Called with the block, or with its error.
pub type Done = Box<dyn FnOnce(Result<Block>) + Send>;

/// The bytes `range` of a source, and their place in a block.
#[derive(Debug)]
pub(super) struct BlockUse {
    pub(super) range: Range<u64>,
    pub(super) place: BlockPlace,
}

#[derive(Debug)]
pub(super) enum BlockPlace {
    /// Consecutive bytes of the block, from this offset on.
    Run(u64),
    /// Bytes spread over the block. The block begins `before` bytes before the start of the tensor, or `after`
    /// bytes after it.
    Scatter { before: u64, after: u64, runs: Arc<StridedCopy>, part: RunRange },
    /// Elements that are cast into the block. The block begins at this byte of the file.
    Cast(u64, CastPlace),
}

/// A block whose bytes are still arriving.
pub(super) struct BlockAssembly {
    /// `None` while a thread copies into the buffer.
    buffer: Option<Buffer>,
    /// Number of reads whose bytes were not copied to the buffer yet.
    left: usize,
    /// Reads that have completed but were not copied yet.
    come: Vec<CompletedPart>,
    /// The callback. It is taken when all bytes are copied, or by the first read that fails.
    done: Option<Done>,
}

/// The bytes of one read, which begins at byte `start` of its source, and their places.
struct CompletedPart {
    bytes: ReadBuffer,
    start: u64,
    uses: Vec<BlockUse>,
}

impl BlockAssembly {
    /// A block in `buffer` that waits for the bytes of `reads` reads.
    pub(super) fn new(buffer: Buffer, reads: usize, done: Done) -> Arc<Mutex<BlockAssembly>> {
        let (buffer, done) = (Some(buffer), Some(done));
        Arc::new(Mutex::new(BlockAssembly { buffer, left: reads, come: Vec::new(), done }))
    }

    /// Copies the bytes of one read to their places. Only one thread copies at a time. Other threads leave
    /// their bytes to it and return.
    pub(super) fn add(
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
                this.come.push(CompletedPart { bytes, start, uses });
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

impl CompletedPart {
    fn copy(self, buffer: &mut [u8]) -> Result<()> {
        self.uses.iter().for_each(|part| part.copy(&self.bytes, self.start, buffer));
        Ok(())
    }
}

impl BlockUse {
    /// Copies the bytes of this use, which are at the start of `bytes`. The bytes of `others` follow them. Uses
    /// that have the same form are copied together, for example the columns of a transposed tensor. Returns the
    /// number of copied uses.
    pub(super) fn copy_with(&self, others: &[&BlockUse], bytes: &[u8], block: &mut [u8]) -> usize {
        if let BlockPlace::Scatter { before, after, runs, part } = &self.place
            && !runs.is_ascending()
            && let Some(step) = others.first().and_then(|next| self.step_to(next))
        {
            let pairs = [self].into_iter().chain(others.iter().copied()).zip(others);
            let count = 1 + pairs.take_while(|(one, next)| one.step_to(next) == Some(step)).count();
            if let Some(stack) = runs.stacked(part, count as u64, step) {
                let all = RunRange {
                    runs: 0..stack.count(),
                    bytes: 0..count as u64 * (self.range.end - self.range.start),
                    target: part.target,
                };
                stack.scatter(&all, bytes, &mut block[*before as usize..], *after);
                return count;
            }
        }
        self.copy(bytes, self.range.start, block);
        1
    }

    /// Distance in the block between these runs and the runs of `next`, if both have the same form.
    fn step_to(&self, next: &BlockUse) -> Option<u64> {
        let BlockPlace::Scatter { runs, part, .. } = &self.place else { return None };
        let BlockPlace::Scatter { runs: others, part: other, .. } = &next.place else {
            return None;
        };
        let number = |part: &RunRange| part.runs.end - part.runs.start;
        let is_alike = Arc::ptr_eq(runs, others)
            && number(part) == number(other)
            && self.range.end - self.range.start == next.range.end - next.range.start;
        other.target.checked_sub(part.target).filter(|_| is_alike)
    }

    /// Copies the bytes from the result of a read that began at byte `start` of the source.
    pub(super) fn copy(&self, read: &[u8], start: u64, block: &mut [u8]) {
        let Range { start: from, end } = self.range;
        let bytes = &read[(from - start) as usize..(end - start) as usize];
        match &self.place {
            BlockPlace::Run(offset) => {
                block[*offset as usize..][..bytes.len()].copy_from_slice(bytes)
            }
            BlockPlace::Scatter { before, after, runs, part } => {
                runs.scatter(part, bytes, &mut block[*before as usize..], *after);
            }
            BlockPlace::Cast(start, place) => place.convert(bytes, block, *start),
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

    /// A block of `PARTS` parts of one page each. Its outcome arrives at the receiver.
    fn block(budget: &Budget) -> (Arc<Mutex<BlockAssembly>>, Receiver<Result<Block>>) {
        let (send, receive) = channel();
        let reservation = budget.try_reserve((PARTS << 12) as u64).unwrap();
        let buffer = Buffer::new(PARTS << 12, reservation);
        let done: Done = Box::new(move |outcome| drop(send.send(outcome)));
        (BlockAssembly::new(buffer, PARTS, done), receive)
    }

    /// Adds part `n`. All its bytes are `n`.
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
