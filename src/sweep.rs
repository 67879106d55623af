//! Reads many ranges on several threads in bounded memory, and passes them on in order.
//!
//! Bytes that are in memory or in the page cache are copied by the thread that needs them. The engine reads all other
//! bytes. Each read of the engine has a deadline. When the sweep is stopped, it no longer waits for any read.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use crate::counters::Counters;
use crate::error::{Error, Result};
use crate::io::{
    Backend, Budget, Buffer, DirectIo, Effort, Engine, Fetch, Priority, Read, ReadBuffer,
    Reservation, Settings, memory_for, read_all, read_all_stored,
};
use crate::parallel::in_parallel;
use crate::reader::{GatherWindows, Reader};
use crate::source::Source;

/// Maximum length of a range, in bytes.
pub const RANGE_MAX: u64 = 4 << 20;

/// Number of threads that read ranges. `AHEAD` is the maximum number of ranges that are read and not yet passed on.
const THREADS: usize = 4;
const AHEAD: u64 = 8;

/// Maximum memory in bytes for the reads of a range. A range whose reads need more is read in parts.
const PLAN_MAX: u64 = 24 << 20;

/// Maximum memory in bytes for tensors whose elements have another order in their shard.
const GATHER_MAX: u64 = 128 << 20;

/// A range of at most this number of bytes is not divided further for the engine.
const PART_MIN: usize = 4096;

/// Interval at which a thread that waits for a read checks `Sweep::stopped`.
const STOP_LOOK: Duration = Duration::from_millis(50);

/// Reads ranges. All its reads share an engine and a limit of memory.
pub struct Sweep {
    engine: Engine,
    budget: Budget,
    windows: GatherWindows,
    threads: usize,
    ahead: u64,
    stopped: Arc<AtomicBool>,
}

impl Sweep {
    /// A sweep that reads with `settings`.
    pub fn new(settings: Settings) -> Sweep {
        Sweep::for_readers(settings, THREADS)
    }

    /// Like `new`, for up to `readers` threads that read.
    pub(crate) fn for_readers(settings: Settings, readers: usize) -> Sweep {
        Sweep::with(settings, THREADS, AHEAD, AHEAD * RANGE_MAX + readers as u64 * PLAN_MAX)
    }

    /// A sweep on `threads` threads that reads through the page cache, so that the next reader finds the bytes
    /// there. Only the time limit of `settings` is used. Each thread may have two reads in flight.
    pub fn cached(settings: Settings, threads: usize) -> Sweep {
        let settings = Settings { backend: Backend::Pread, direct: DirectIo::Never, ..settings };
        let ahead = 2 * threads as u64;
        // An encrypted piece is read as a whole, so a read may need `PLAN_MAX`.
        Sweep::with(settings, threads, ahead, (ahead + 2) * PLAN_MAX)
    }

    fn with(settings: Settings, threads: usize, ahead: u64, limit: u64) -> Sweep {
        let counters: Arc<Counters> = Arc::default();
        let budget = Budget::new(limit, counters.clone());
        let engine = Engine::start(settings, counters);
        let memory = Budget::new(GATHER_MAX, Arc::default());
        let windows = GatherWindows::new(memory, GATHER_MAX, true);
        Sweep { engine, budget, windows, threads, ahead, stopped: Arc::default() }
    }

    /// A flag that ends all waits for a source when it is set. The function that receives the results must then
    /// fail as well.
    pub fn stopped(&self) -> Arc<AtomicBool> {
        self.stopped.clone()
    }

    /// Calls `work`, which reads, with each number below `count`, on several threads. Calls `each` with the
    /// results in order, on the calling thread.
    ///
    /// # Errors
    /// The error of the lowest number that failed, or the error of `each`.
    pub fn in_order<T: Send>(
        &self,
        count: u64,
        work: &(dyn Fn(u64) -> Result<T> + Sync),
        each: &mut dyn FnMut(T) -> Result<()>,
    ) -> Result<()> {
        in_parallel(count, self.threads, self.ahead, work, each)
    }

    /// Reads bytes `range` of `reader`.
    ///
    /// # Errors
    /// Errors of the sources, including reads that exceed their deadline.
    pub fn read(&self, reader: &Reader, range: &Range<u64>) -> Result<Buffer> {
        let mut bytes = self.buffer(range)?;
        self.fill(reader, range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the bytes of `reader` from `start` on into `target`.
    ///
    /// # Errors
    /// The same errors as those of `read`.
    pub(crate) fn fill(&self, reader: &Reader, start: u64, target: &mut [u8]) -> Result<()> {
        let range = start..start + target.len() as u64;
        let in_memory = reader.sources().iter().all(|source| source.is_in_memory());
        if reader.is_scattered(&range) {
            return self.windows.read_at(reader, start, target).map(drop);
        }
        if in_memory {
            return reader.read_at(start, target).map(drop);
        }
        let mut plan = reader.plan_block(range);
        if plan.read_cached(&self.engine, target)? {
            return Ok(());
        }
        let memory = plan.memory();
        if memory > PLAN_MAX {
            // The range covers thousands of small tensors, each of which needs its own read.
            if target.len() <= PART_MIN {
                return reader.read_at(start, target).map(drop);
            }
            let (first, second) = target.split_at_mut(target.len() / 2);
            self.fill(reader, start, first)?;
            return self.fill(reader, start + first.len() as u64, second);
        }
        let reserved = self.reserve(memory)?;
        let (sender, answer) = channel();
        let done = Box::new(move |block| drop(sender.send(block)));
        plan.fetch(&self.engine, Priority::Demand, reserved, done);
        target.copy_from_slice(&self.wait(&answer)?);
        Ok(())
    }

    /// Begins to read bytes `range` of `source` while the caller continues. If `stored` is true, encrypted
    /// bytes are not decrypted.
    ///
    /// # Errors
    /// If more reads are in flight than the sweep has memory for.
    pub fn begin<'a>(
        &'a self,
        source: &'a Arc<Source>,
        range: Range<u64>,
        stored: bool,
    ) -> Result<PendingRead<'a>> {
        let mut read = PendingRead { sweep: self, source, range, stored, answer: None };
        // If the bytes are in memory or in the page cache, the thread that needs them copies them itself, so that they
        // are in the caches of its processor.
        if !source.is_in_memory() && !self.engine.is_cached(source, &read.range) {
            read.answer = Some(read.fetch()?);
        }
        Ok(read)
    }

    /// Allocates memory for bytes `range`.
    pub(crate) fn buffer(&self, range: &Range<u64>) -> Result<Buffer> {
        let reserved = self.reserve(Buffer::len_for(range))?;
        Ok(Buffer::new((range.end - range.start) as usize, reserved))
    }

    fn reserve(&self, len: u64) -> Result<Reservation> {
        let reserved = self.budget.try_reserve(len);
        reserved.ok_or_else(|| Error::internal("the sweep ran out of its memory"))
    }

    fn wait<T>(&self, answer: &Receiver<Result<T>>) -> Result<T> {
        loop {
            match answer.recv_timeout(STOP_LOOK) {
                Ok(read) => return read,
                Err(RecvTimeoutError::Timeout) if !self.stopped.load(Ordering::Relaxed) => {}
                Err(RecvTimeoutError::Timeout) => return Err(Error::cancelled("interrupted")),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal("a read ended without an answer"));
                }
            }
        }
    }
}

/// A read that has begun.
pub struct PendingRead<'a> {
    sweep: &'a Sweep,
    source: &'a Arc<Source>,
    range: Range<u64>,
    stored: bool,
    /// `None` if the bytes are in memory or in the page cache.
    answer: Option<Receiver<Result<ReadBuffer>>>,
}

impl PendingRead<'_> {
    /// The range that is read.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Waits for the bytes and returns them.
    ///
    /// # Errors
    /// Errors of the source, including a deadline that has passed.
    pub fn wait(self) -> Result<ReadBuffer> {
        if let Some(answer) = &self.answer {
            return self.sweep.wait(answer);
        }
        let mut bytes = self.sweep.buffer(&self.range)?;
        let (source, offset) = (self.source, self.range.start);
        let mut reads = [Read { source, offset, target: &mut bytes }];
        let is_read = match (source.is_in_memory(), self.stored) {
            (true, true) => read_all_stored(&mut reads).map(|()| true)?,
            (true, false) => read_all(&mut reads).map(|()| true)?,
            (false, _) => self.sweep.engine.copy_reads(&mut reads)?,
        };
        if is_read {
            let len = bytes.len();
            return Ok(ReadBuffer::new(bytes, 0..len));
        }
        // The page cache has dropped the bytes in the meantime.
        drop(bytes);
        self.sweep.wait(&self.fetch()?)
    }

    fn fetch(&self) -> Result<Receiver<Result<ReadBuffer>>> {
        let (source, range, stored) = (self.source.clone(), self.range.clone(), self.stored);
        let target = self.sweep.reserve(memory_for(&source, &range))?.into();
        let (sender, answer) = channel();
        let done = Box::new(move |read| drop(sender.send(read)));
        let (cached, priority, effort) = (None, Priority::Demand, Effort::Short);
        let fetch = Fetch { source, range, cached, priority, effort, stored, target, done };
        self.sweep.engine.submit(fetch);
        Ok(answer)
    }
}
