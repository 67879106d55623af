//! Executes one load. Reads are sent in the order of the plan, and enough of them are in flight to keep the
//! disk busy. Their bytes are read directly into their place, or other threads move them there. Loads to the
//! host and to a GPU differ in the memory to which reads write, and in the threads that move bytes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use super::ahead::Populator;
use super::message::{LoadMessage, Times};
use super::{Loader, Progress, ReadEvent, Report, Stats, span_of, stopped};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::io::{
    Budget, Buffer, Effort, Engine, Fetch, Priority, Read, ReadBuffer, ReadTarget, Region,
    Reservation, memory_for,
};
use crate::plan::{Chunk, ChunkTarget, Move, PAGE, Plan};
use crate::strided::{RunRange, copy_run};
use crate::sync::Mutex;

/// Maximum number of threads that move bytes.
const MOVERS_MAX: usize = 8;

/// Interval at which a load calls `progress` to ask whether it may continue.
pub(super) const ASK: Duration = Duration::from_millis(50);

/// Bytes to move: number of their chunk, time of their arrival, and the bytes. `None` ends the thread.
pub(super) type MoveJob = Option<(usize, Instant, ReadBuffer)>;

/// The memory to which the reads of a load write.
pub(super) trait ReadDestination {
    /// Memory for a read, or `None` if it has to wait for other reads. `alone` says that no read of this load
    /// is in flight.
    fn target(&self, chunk: &Chunk, alone: bool) -> Option<ReadTarget>;

    /// Whether the bytes are moved to their place after the read.
    fn is_moved(&self, chunk: &Chunk) -> bool;

    /// Whether the memory belongs to the caller.
    fn is_given(&self, chunk: &Chunk) -> bool;
}

impl Loader {
    /// Executes `plan` into `regions`. There must be one region for each region of the plan, and each must be
    /// at least as long.
    ///
    /// After a success, no read writes to the regions any more. After a failure, reads may still be in flight,
    /// and each of them has a clone of its region. If they write to memory of the caller, `fill` returns only
    /// when they have ended or are overdue. An overdue read may write there at any later time.
    ///
    /// # Errors
    /// The first failure. The bytes of the regions are then undefined.
    ///
    /// # Safety
    /// The plan is an unchanged result of `Loader::plan` for this checkpoint. No two regions share a byte that
    /// the plan uses. No other code reads or writes a region until this call returns. After a failure, this
    /// applies until no read has a clone of the region.
    pub unsafe fn fill(
        &self,
        checkpoint: &Checkpoint,
        plan: &Plan,
        regions: &[Arc<Region>],
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Report> {
        let fits = |(region, &len): (&Arc<Region>, &u64)| region.len() as u64 >= len;
        assert!(
            regions.len() == plan.regions.len() && regions.iter().zip(&plan.regions).all(fits),
            "the plan's regions"
        );
        run(self, checkpoint, plan, regions, progress)
    }
}

/// The state that all threads of a load to the host share.
struct HostLoad<'a> {
    plan: &'a Plan,
    checkpoint: &'a Checkpoint,
    regions: &'a [Arc<Region>],
    /// The budget for reads whose bytes do not go directly to their place.
    budget: Budget,
    peak: AtomicU64,
    /// Time spent moving bytes, in nanoseconds.
    moving: AtomicU64,
    ahead: Populator<'a>,
}

/// Executes `plan`. The conditions for the regions are those of `Loader::fill`.
pub(super) fn run(
    loader: &Loader,
    checkpoint: &Checkpoint,
    plan: &Plan,
    regions: &[Arc<Region>],
    progress: &mut dyn FnMut(Progress) -> bool,
) -> Result<Report> {
    let _span = span_of(checkpoint, plan).entered();
    let started = Instant::now();
    let before = (loader.counters.source_reads.get(), loader.counters.source_reads_direct.get());
    // The budget must have room for the longest read, which would wait for ever otherwise.
    let is_moved = |chunk: &&Chunk| place_of(plan, checkpoint, chunk).is_none();
    let moved: Vec<&Chunk> = plan.chunks.iter().filter(is_moved).collect();
    let is_staged =
        |chunk: &&Chunk| matches!(chunk.target, ChunkTarget::Unaligned { .. }) || is_moved(chunk);
    let staged = plan.chunks.iter().filter(is_staged);
    let longest = staged.map(|chunk| memory_of(checkpoint, chunk)).max();
    let staging = loader.config.staging.max(longest.unwrap_or(0));
    let budget = Budget::new(staging, Arc::default());
    let shared = HostLoad {
        plan,
        checkpoint,
        regions,
        budget,
        peak: AtomicU64::new(0),
        moving: AtomicU64::new(0),
        ahead: Populator::new(loader, plan, regions),
    };
    if plan.read <= loader.config.inline_max_bytes
        && let Some(report) = shared.copy_cached(loader, checkpoint, started)?
    {
        let goes_on = progress(Progress { read: plan.read, total: plan.read });
        return if goes_on { Ok(report) } else { Err(stopped()) };
    }
    let events = std::thread::scope(|scope| {
        let (jobs, todo) = channel::<MoveJob>();
        let (back, returned) = channel::<LoadMessage>();
        let todo = Arc::new(Mutex::new(todo));
        // The number of cores is queried only if needed: the query takes as long as a short read.
        let shares = !moved.is_empty() || shared.ahead.has_parts();
        let cores = if shares { available_parallelism().map_or(1, |n| n.get()) } else { 1 };
        let movers = cores.min(MOVERS_MAX).min(moved.len());
        // Reads for which the load does not wait also hold senders of jobs, so the channel may stay open after the
        // load.
        let end = StopMovers(jobs.clone(), movers);
        for _ in 0..movers {
            let (todo, back, shared) = (todo.clone(), back.clone(), &shared);
            let mover = std::thread::Builder::new().name("tensorfs-move".to_owned());
            let started = mover.spawn_scoped(scope, move || shared.work(&todo, &back));
            started.map_err(|e| Error::io(&checkpoint.directory, "load: start a thread", e))?;
        }
        let over = StopPopulating(&shared.ahead);
        shared.ahead.spawn_populators(scope, cores, &back);
        let load = Load { plan, landing: &shared, checkpoint, engine: &loader.engine, jobs, back };
        let done = load.go(&returned, loader.config.depth.max(1), started, progress);
        drop(end);
        drop(over);
        done
    })?;
    let placed = |chunk: &&Chunk| !shared.is_moved(chunk);
    let stats = Stats {
        wanted: plan.wanted,
        read: plan.read,
        reads: loader.counters.source_reads.get() - before.0,
        reads_direct: loader.counters.source_reads_direct.get() - before.1,
        placed: plan.chunks.iter().filter(placed).map(|c| c.range.end - c.range.start).sum(),
        plan: Duration::ZERO,
        load: started.elapsed(),
        moving: Duration::from_nanos(shared.moving.load(Ordering::Relaxed)),
        staging_peak: shared.peak.load(Ordering::Relaxed),
        memory: shared.ahead.stats(),
        device: None,
    };
    tracing::debug!(read = stats.read, took = ?stats.load, "loaded");
    Ok(Report { stats, events })
}

/// Number of bytes of memory that the read of `chunk` takes.
pub(super) fn memory_of(checkpoint: &Checkpoint, chunk: &Chunk) -> u64 {
    memory_for(&checkpoint.sources()[chunk.shard.0 as usize], &chunk.range)
}

/// The region and the byte at which `chunk` is read. `None` if the bytes of the chunk are read into other memory and
/// moved there afterwards, which has one of two reasons. If the memory belongs to the caller and the file system is
/// remote, a late answer could arrive after the load has failed, when the caller uses the memory for something else. If
/// the chunk has only a part of an encrypted piece, the whole piece is decrypted in other memory.
fn place_of(plan: &Plan, checkpoint: &Checkpoint, chunk: &Chunk) -> Option<(u32, u64)> {
    let (ChunkTarget::Place { region, offset } | ChunkTarget::Unaligned { region, offset }) =
        chunk.target
    else {
        return None;
    };
    let source = &checkpoint.sources()[chunk.shard.0 as usize];
    let is_direct = !plan.given[region as usize] || !source.may_block();
    (is_direct && source.cover(&chunk.range) == chunk.range).then_some((region, offset))
}

/// Ends the population of memory when the load ends, successfully or not.
struct StopPopulating<'a>(&'a Populator<'a>);

impl Drop for StopPopulating<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// When the load ends, successfully or not, tells this number of movers that no more bytes come.
pub(super) struct StopMovers(pub(super) Sender<MoveJob>, pub(super) usize);

impl Drop for StopMovers {
    fn drop(&mut self) {
        (0..self.1).for_each(|_| drop(self.0.send(None)));
    }
}

/// The reads of a load.
pub(super) struct Load<'a> {
    pub(super) plan: &'a Plan,
    pub(super) landing: &'a dyn ReadDestination,
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) engine: &'a Engine,
    pub(super) jobs: Sender<MoveJob>,
    pub(super) back: Sender<LoadMessage>,
}

impl Load<'_> {
    /// Sends all reads and waits for them. The first failure ends the load, but this still waits for reads in
    /// flight that write to memory of the caller. Returns the event of each read.
    pub(super) fn go(
        self,
        returned: &Receiver<LoadMessage>,
        depth: usize,
        started: Instant,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Vec<ReadEvent>> {
        let chunks = &self.plan.chunks;
        let total = self.plan.read;
        let (mut next, mut read) = (0, 0);
        let mut failed: Option<Error> = None;
        let mut events = Vec::with_capacity(chunks.len());
        // Reads in flight. Each has its slot and the time at which it was sent.
        let mut sent: HashMap<usize, (usize, Instant)> = HashMap::new();
        let mut slots: Vec<usize> = (0..depth).rev().collect();
        loop {
            while failed.is_none() && next < chunks.len() && sent.len() < depth {
                let alone = sent.is_empty();
                let Some(target) = self.landing.target(&chunks[next], alone) else { break };
                sent.insert(next, (slots.pop().unwrap_or(depth), Instant::now()));
                self.send(next, target);
                next += 1;
            }
            let is_given = |&chunk: &usize| self.landing.is_given(&chunks[chunk]);
            match failed {
                None if sent.is_empty() && next == chunks.len() => return Ok(events),
                Some(e) if !sent.keys().any(is_given) => return Err(e),
                _ => {}
            }
            match returned.recv_timeout(ASK) {
                Ok(LoadMessage::More(outcome)) => failed = failed.or(outcome.err()),
                Ok(LoadMessage::Read { chunk, outcome }) => {
                    let (slot, sent_at) = sent.remove(&chunk).unwrap_or((depth, started));
                    slots.push(slot);
                    match outcome {
                        Ok(times) => {
                            let Chunk { shard, range, .. } = &chunks[chunk];
                            read += range.end - range.start;
                            events.push(times.event(*shard, range, slot, sent_at, started));
                        }
                        Err(e) => failed = failed.or(Some(e)),
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // This cannot occur, because each read and `self` hold a sender.
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal("a thread of the load ended"));
                }
            }
            if failed.is_none() && !progress(Progress { read, total }) {
                failed = Some(stopped());
            }
        }
    }

    fn send(&self, number: usize, target: ReadTarget) {
        let chunk = &self.plan.chunks[number];
        let source = self.checkpoint.sources()[chunk.shard.0 as usize].clone();
        let back = self.back.clone();
        let done: crate::io::FetchCallback = match self.landing.is_moved(chunk) {
            false => Box::new(move |outcome: Result<ReadBuffer>| {
                // The memory of the read is released before the load counts the read as complete.
                let outcome = outcome.map(|filled| filled.began);
                let times = |began| Times { began, came: Instant::now(), moved: None };
                let _ = back.send(LoadMessage::Read { chunk: number, outcome: outcome.map(times) });
            }),
            true => {
                let jobs = self.jobs.clone();
                Box::new(move |outcome: Result<ReadBuffer>| {
                    let sent = match outcome {
                        Ok(filled) => jobs
                            .send(Some((number, Instant::now(), filled)))
                            .map_err(|_| Error::internal("a thread of the load ended")),
                        Err(e) => Err(e),
                    };
                    if let Err(e) = sent {
                        let _ = back.send(LoadMessage::Read { chunk: number, outcome: Err(e) });
                    }
                })
            }
        };
        let range = chunk.range.clone();
        // The bytes of an unaligned read may have to be copied to their place by the callback.
        let effort = match chunk.target {
            ChunkTarget::Unaligned { .. } => Effort::Long,
            _ => Effort::Short,
        };
        let (cached, priority, stored) = (None, Priority::Demand, false);
        let fetch = Fetch { source, range, cached, priority, effort, stored, target, done };
        self.engine.submit(fetch);
    }
}

impl ReadDestination for HostLoad<'_> {
    fn target(&self, chunk: &Chunk, alone: bool) -> Option<ReadTarget> {
        match place_of(self.plan, self.checkpoint, chunk) {
            None => self.reserve(chunk, alone).map(ReadTarget::from),
            Some((region, offset)) => {
                let end = offset + (chunk.range.end - chunk.range.start);
                if !self.ahead.are_populated(region, end as usize) {
                    return None;
                }
                if matches!(chunk.target, ChunkTarget::Unaligned { .. }) {
                    let staging = self.reserve(chunk, alone)?;
                    let region = &self.regions[region as usize];
                    // SAFETY: the plan assigns these bytes to this chunk only, each chunk is sent once, and the
                    // region is read after all reads have completed.
                    return Some(unsafe {
                        region.unaligned(offset as usize..end as usize, staging)
                    });
                }
                let before = chunk.range.start % PAGE;
                let start = offset - before;
                let len = Buffer::len_for(&chunk.range);
                let none = self.budget.try_reserve(0)?;
                let region = &self.regions[region as usize];
                // SAFETY: the plan assigns the pages around a chunk to this chunk only, each chunk is sent
                // once, and the region is read after all reads have completed.
                Some(unsafe { region.target(start as usize..(start + len) as usize, none) })
            }
        }
    }

    fn is_moved(&self, chunk: &Chunk) -> bool {
        place_of(self.plan, self.checkpoint, chunk).is_none()
    }

    fn is_given(&self, chunk: &Chunk) -> bool {
        let place = place_of(self.plan, self.checkpoint, chunk);
        place.is_some_and(|(region, _)| self.plan.given[region as usize])
    }
}

impl HostLoad<'_> {
    /// Reserves memory for a read whose bytes do not go directly to their place.
    fn reserve(&self, chunk: &Chunk, alone: bool) -> Option<Reservation> {
        let reservation = self.budget.try_reserve(memory_of(self.checkpoint, chunk));
        debug_assert!(reservation.is_some() || !alone, "a chunk fits into the budget");
        self.peak.fetch_max(self.budget.used(), Ordering::Relaxed);
        reservation
    }

    /// Executes the plan on this thread if all bytes that it reads are in the page cache.
    fn copy_cached(
        &self,
        loader: &Loader,
        checkpoint: &Checkpoint,
        started: Instant,
    ) -> Result<Option<Report>> {
        let chunks = &self.plan.chunks;
        let mut staging: Vec<Vec<u8>> = Vec::new();
        let len = |chunk: &Chunk| (chunk.range.end - chunk.range.start) as usize;
        let spread = chunks.iter().filter(|chunk| matches!(chunk.target, ChunkTarget::Spread(_)));
        staging.extend(spread.map(|chunk| vec![0; len(chunk)]));
        let mut staged = staging.iter_mut();
        let read_of = |chunk: &Chunk| {
            let target = match chunk.target {
                ChunkTarget::Place { region, offset }
                | ChunkTarget::Unaligned { region, offset } => {
                    let region = &self.regions[region as usize];
                    // SAFETY: the plan assigns these bytes to this chunk only, and the region is read after the load.
                    unsafe { region.bytes(offset as usize, len(chunk)) }
                }
                ChunkTarget::Spread(_) => staged.next()?.as_mut_slice(),
            };
            let source = &checkpoint.sources()[chunk.shard.0 as usize];
            Some(Read { source, offset: chunk.range.start, target })
        };
        let mut reads: Vec<Read<'_>> = chunks.iter().filter_map(read_of).collect();
        if !loader.engine.read_cached(&mut reads)? {
            return Ok(None);
        }
        let came = Instant::now();
        let mut staged = staging.iter();
        let mut stats = Stats {
            wanted: self.plan.wanted,
            read: self.plan.read,
            reads: chunks.len() as u64,
            staging_peak: staging.iter().map(|bytes| bytes.len() as u64).sum(),
            ..Stats::default()
        };
        for chunk in chunks {
            match &chunk.target {
                ChunkTarget::Place { .. } | ChunkTarget::Unaligned { .. } => {
                    stats.placed += len(chunk) as u64;
                }
                ChunkTarget::Spread(moves) => {
                    let bytes = staged.next().map_or(&[][..], Vec::as_slice);
                    let moves = &self.plan.moves[moves.start as usize..moves.end as usize];
                    moves.iter().for_each(|one| self.carry_out(one, bytes));
                }
            }
        }
        stats.moving = came.elapsed();
        stats.load = started.elapsed();
        let times = |moved| Times { began: started, came, moved };
        let ended = Instant::now();
        let events = chunks.iter().map(|chunk| {
            let moved = matches!(chunk.target, ChunkTarget::Spread(_)).then_some(came..ended);
            times(moved).event(chunk.shard, &chunk.range, 0, started, started)
        });
        Ok(Some(Report { stats, events: events.collect() }))
    }

    /// Moves the bytes of reads until no more reads can arrive.
    fn work(&self, todo: &Mutex<Receiver<MoveJob>>, back: &Sender<LoadMessage>) {
        loop {
            let job = todo.lock().recv();
            let Ok(Some((chunk, came, filled))) = job else { return };
            let started = Instant::now();
            match &self.plan.chunks[chunk].target {
                ChunkTarget::Spread(moves) => {
                    for one in &self.plan.moves[moves.start as usize..moves.end as usize] {
                        self.carry_out(one, &filled);
                    }
                }
                ChunkTarget::Place { region, offset }
                | ChunkTarget::Unaligned { region, offset } => {
                    let region = &self.regions[*region as usize];
                    // SAFETY: the plan assigns these bytes to this chunk only, and the region is read after the load.
                    unsafe { region.bytes(*offset as usize, filled.len()) }
                        .copy_from_slice(&filled);
                }
            }
            let began = filled.began;
            drop(filled);
            let ended = Instant::now();
            let nanos = u64::try_from((ended - started).as_nanos()).unwrap_or(u64::MAX);
            self.moving.fetch_add(nanos, Ordering::Relaxed);
            let outcome = Ok(Times { began, came, moved: Some(started..ended) });
            let _ = back.send(LoadMessage::Read { chunk, outcome });
        }
    }

    fn carry_out(&self, one: &Move, bytes: &[u8]) {
        let region = &self.regions[one.region as usize];
        let put = |from: &[u8], offset: u64| {
            let len = one.cast.map_or(from.len() as u64, |cast| cast.len_after(from.len() as u64));
            // SAFETY: no two moves of a plan share a byte of a region, and the region is read after all of them.
            let to = unsafe { region.bytes(offset as usize, len as usize) };
            match one.cast {
                Some(cast) => cast.convert(from, to),
                None => copy_run(from, to),
            }
        };
        let from = &bytes[one.from as usize..];
        let Some(copy) = one.copy.map(|number| &self.plan.copies[number as usize]) else {
            return put(&from[..one.run_len as usize], one.offset);
        };
        let runs = one.first..one.first + one.runs;
        let (start, target) = copy.run(runs.start);
        let part = RunRange { bytes: start..copy.run(runs.end - 1).0 + one.run_len, runs, target };
        copy.each_row(&part, one.placed_len(), from, &mut |row, place| {
            put(row, one.offset + (place - target));
        });
    }
}
