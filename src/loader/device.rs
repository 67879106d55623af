//! Loads to a GPU. Reads write to pinned memory, and the GPU copies the bytes from there.
//!
//! One thread submits the copies of a read to a stream as soon as its bytes have arrived. Another thread waits until
//! the copies are complete. After that, the memory is free for the next read. The allocation of pinned memory and of
//! GPU memory takes time, so further threads allocate while reads are in flight. Elements that have to be cast go
//! through a bounded buffer on the GPU. The work alternates between two streams, so that one stream copies while the
//! other stream casts.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use super::cufile::{CuFileCell, CuFileInput};
use super::message::{LoadMessage, Times};
use super::run::{Load, MoveJob, ReadDestination, StopMovers, memory_of};
use super::{DeviceStats, Loader, Progress, ReadEvent, Report, Stats, span_of};
use crate::cast::Cast;
use crate::checkpoint::Checkpoint;
use crate::device::{
    CudaStream, DeviceMemory, DeviceRegion, Entered, ForeignStream, Gpu, Kernels, PinnedPool,
    PitchedRows, Sending, SentCopies,
};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::io::{Budget, ReadBuffer, ReadTarget};
use crate::plan::{
    self, Chunk, ChunkTarget, Move, Plan, PlanLimits, TensorPlacement, TensorRequest,
};
use crate::strided::StridedCopy;
use crate::sync::Mutex;

/// Alignment in bytes of the parts of a buffer for casts.
const ALIGN: u64 = 256;

/// The state that a loader keeps for each GPU, and for cuFile.
#[derive(Debug, Default)]
pub(super) struct Gpus(Mutex<HashMap<u32, Arc<Kept>>>, CuFileCell);

#[derive(Debug)]
struct Kept {
    pool: PinnedPool,
    kernels: Mutex<Option<Arc<Kernels>>>,
}

impl Gpus {
    fn get(&self, gpu: &Gpu) -> Arc<Kept> {
        let mut gpus = self.0.lock();
        let kept = gpus.entry(gpu.ordinal()).or_insert_with(|| {
            Arc::new(Kept { pool: PinnedPool::new(gpu.clone()), kernels: Mutex::default() })
        });
        kept.clone()
    }
}

impl Kept {
    fn kernels(&self, gpu: &Gpu) -> Result<Arc<Kernels>> {
        let mut kernels = self.kernels.lock();
        if let Some(kernels) = &*kernels {
            return Ok(kernels.clone());
        }
        Ok(kernels.insert(Kernels::load(gpu)?).clone())
    }
}

/// Tensors loaded to a GPU.
///
/// ```no_run
/// use tensorfs::{Checkpoint, Gpu, Loader, LoaderConfig, TensorRequest};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let loader = Loader::new(LoaderConfig::device());
/// let loaded = loader.load_device(&Gpu::open(0)?, &checkpoint, &[TensorRequest::whole(0)], &mut |_| true)?;
/// assert_eq!(loaded.bytes(0)?.len(), 36 * 4);
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Debug)]
pub struct LoadedDevice {
    regions: Vec<DeviceRegion>,
    placements: Vec<TensorPlacement>,
    /// Report of the load.
    pub report: Report,
}

impl LoadedDevice {
    /// The memory of request `number`. Clones keep the memory alive. Other tensors may be in the same allocation.
    pub fn place(&self, number: usize) -> DeviceRegion {
        let placement = &self.placements[number];
        let region = &self.regions[placement.region as usize];
        let (memory, offset) = (region.memory.clone(), region.offset + placement.offset);
        DeviceRegion { memory, offset, len: placement.len }
    }

    /// The bytes of request `number`, copied back to the host.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn bytes(&self, number: usize) -> Result<Vec<u8>> {
        let place = self.place(number);
        let mut bytes = vec![0; place.len as usize];
        if !bytes.is_empty() {
            place.memory.read(place.offset, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Size of request `number` in each dimension.
    pub fn shape(&self, number: usize) -> &[u64] {
        &self.placements[number].shape
    }

    /// Element type of request `number`.
    pub fn dtype(&self, number: usize) -> Dtype {
        self.placements[number].dtype
    }
}

/// Maximum number of runs of one tensor that share bytes of its shard. Each such run is copied to the GPU separately.
const REPEATS_MAX: u64 = 1 << 14;

/// Refuses tensors that repeat their elements more than `REPEATS_MAX` times, because each copy takes a driver call.
fn check_repeats(plan: &Plan) -> Result<()> {
    let repeats = |one: &Move| {
        let copy = one.copy.map(|number| &plan.copies[number as usize]);
        let row = copy.and_then(StridedCopy::innermost);
        one.runs > REPEATS_MAX && row.is_some_and(|row| row.from < one.run_len)
    };
    if plan.moves.iter().any(repeats) {
        return Err(Error::usage(format!(
            "a tensor repeats its elements more than {REPEATS_MAX} times, as `expand` makes it: load it to \
             the CPU, or save `tensor.contiguous()`"
        )));
    }
    Ok(())
}

impl Loader {
    /// Loads `requests` of `checkpoint` into memory of `gpu`. Calls `progress` several times a second. If it
    /// returns `false`, the load stops.
    ///
    /// # Errors
    /// The first failure. Nothing remains on the GPU then.
    ///
    /// # Panics
    /// If a request has a destination. Such requests are for `fill_device`.
    pub fn load_device(
        &self,
        gpu: &Gpu,
        checkpoint: &Checkpoint,
        requests: &[TensorRequest],
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<LoadedDevice> {
        gpu.check_room(&[plan::min_new_memory(checkpoint.catalog(), requests)])?;
        let started = Instant::now();
        let mut limits = self.config.limits;
        if limits.in_place {
            let PlanLimits { in_place, align, dedicated_min_bytes, slab, .. } =
                PlanLimits::device();
            limits = PlanLimits {
                in_place,
                align,
                dedicated_min_bytes,
                slab,
                moved: limits.chunk,
                ..limits
            };
        }
        let plan = self.plan_by(checkpoint, requests, &limits)?;
        let planned = started.elapsed();
        assert!(!plan.given.contains(&true), "requests with a destination are for `fill_device`");
        gpu.check_room(&plan.regions)?;
        let (regions, mut report) =
            self.fill_regions(gpu, checkpoint, &plan, None, None, progress)?;
        report.stats.plan = planned;
        Ok(LoadedDevice { regions, placements: plan.placements, report })
    }

    /// Executes `plan` into `regions` of `gpu`, after all earlier work of the stream `after` is complete. There
    /// must be one region for each region of the plan, and each must be at least as long.
    ///
    /// When this returns, the load no longer uses the regions, and the work of any stream sees their bytes.
    ///
    /// # Errors
    /// The first failure. The bytes of the regions are then undefined. An overdue read of cuFile keeps its
    /// region alive, and may write there at any later time.
    #[doc(hidden)]
    pub fn fill_device(
        &self,
        gpu: &Gpu,
        checkpoint: &Checkpoint,
        plan: &Plan,
        regions: &[DeviceRegion],
        after: Option<ForeignStream>,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Report> {
        let fits = |(region, &len): (&DeviceRegion, &u64)| {
            region.len >= len && region.memory.gpu().ordinal() == gpu.ordinal()
        };
        assert!(
            regions.len() == plan.regions.len() && regions.iter().zip(&plan.regions).all(fits),
            "the plan's regions, on this GPU"
        );
        let filled = self.fill_regions(gpu, checkpoint, plan, Some(regions), after, progress);
        filled.map(|(_, report)| report)
    }

    /// Fills the regions `given`, or new regions if it is `None`.
    fn fill_regions(
        &self,
        gpu: &Gpu,
        checkpoint: &Checkpoint,
        plan: &Plan,
        given: Option<&[DeviceRegion]>,
        after: Option<ForeignStream>,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<(Vec<DeviceRegion>, Report)> {
        let _span = span_of(checkpoint, plan).entered();
        check_repeats(plan)?;
        let started = Instant::now();
        let before = (self.counters.source_reads.get(), self.counters.source_reads_direct.get());
        let kept = self.gpus.get(gpu);
        kept.pool.taken();
        let lines = Line::all(gpu, plan, &kept, after)?;
        let stream = &lines[0].stream;
        let beginning = CuFileInput { gpu, checkpoint, plan, given, stream, started };
        let early = self.read_early(&self.gpus.1, &beginning, progress)?;
        let given = early.regions.as_deref().or(given);
        let copies = Copies::new(gpu, early.rest.as_ref().unwrap_or(plan), &lines);
        let mut progress = |so_far: Progress| {
            progress(Progress { read: early.read + so_far.read, total: plan.read })
        };
        let (regions, others) =
            self.carry_out(checkpoint, &copies, &kept.pool, given, started, &mut progress)?;
        let taken = kept.pool.taken();
        let allocating = Duration::from_nanos(copies.allocating.load(Ordering::Relaxed));
        let stats = Stats {
            wanted: plan.wanted,
            read: plan.read,
            reads: self.counters.source_reads.get() - before.0,
            reads_direct: self.counters.source_reads_direct.get() - before.1,
            load: started.elapsed(),
            staging_peak: taken.peak,
            device: Some(DeviceStats {
                allocate: early.allocate + allocating,
                pinned: taken.pinned,
                pinning: taken.how.name(),
                pin: taken.pinning,
                copy: Duration::from_nanos(copies.copying.load(Ordering::Relaxed)),
                copies: copies.number.load(Ordering::Relaxed),
                cufile: early.bytes,
                cufile_unused: early.unused,
            }),
            ..Stats::default()
        };
        let events = early.events.into_iter().chain(others).collect();
        Ok((regions, Report { stats, events }))
    }

    /// Unpins and frees the memory that is kept for the next load to a GPU.
    pub fn release(&self) {
        let gpus = self.gpus.0.lock();
        gpus.values().for_each(|kept| kept.pool.release());
    }

    fn carry_out(
        &self,
        checkpoint: &Checkpoint,
        copies: &Copies<'_>,
        pool: &PinnedPool,
        given: Option<&[DeviceRegion]>,
        started: Instant,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<(Vec<DeviceRegion>, Vec<ReadEvent>)> {
        let no_thread = |e| Error::io(&checkpoint.directory, "load: start a thread", e);
        std::thread::scope(|scope| {
            let (jobs, todo) = channel::<MoveJob>();
            let (back, returned) = channel::<LoadMessage>();
            let (sent, waiting) = channel();
            // Reads for which the load does not wait also hold senders of jobs, so the channel may stay open after the
            // load.
            let end = StopMovers(jobs.clone(), 1);
            let mut regions = Regions { there: Vec::new(), coming: None };
            match given {
                Some(given) => regions.there.extend_from_slice(given),
                None => {
                    let (region, coming) = channel();
                    regions.coming = Some(coming);
                    let returns = back.clone();
                    let allocator = Builder::new().name("tensorfs-allocate".to_owned());
                    allocator
                        .spawn_scoped(scope, move || copies.allocate(&region, &returns))
                        .map_err(no_thread)?;
                }
            }
            let returns = back.clone();
            let copier = Builder::new()
                .name("tensorfs-copy".to_owned())
                .spawn_scoped(scope, move || copies.work(regions, &todo, &sent, &returns))
                .map_err(no_thread)?;
            let returns = back.clone();
            let waiter = Builder::new().name("tensorfs-wait".to_owned());
            waiter
                .spawn_scoped(scope, move || copies.finish(&waiting, &returns))
                .map_err(no_thread)?;
            let landing = PinnedDestination::new(self, checkpoint, copies.plan, pool, scope, &back);
            let engine = &self.engine;
            let load = Load {
                plan: copies.plan,
                landing: &landing,
                checkpoint,
                engine,
                jobs,
                back: back.clone(),
            };
            let done = load.go(&returned, self.config.depth.max(1), started, progress);
            copies.over.store(true, Ordering::Relaxed);
            drop(end);
            let joined = copier.join();
            let events = done?;
            let lost = |_| Error::internal("a thread of the load ended");
            let mut regions = joined.map_err(lost)?;
            // Regions without a read may still be unallocated, so this waits for the last region.
            if let Some(last) = copies.plan.regions.len().checked_sub(1) {
                regions.get(last as u32)?;
            }
            Ok((regions.there, events))
        })
    }
}

/// The regions of a plan, in order. Some may not be allocated yet.
struct Regions {
    there: Vec<DeviceRegion>,
    coming: Option<Receiver<DeviceRegion>>,
}

impl Regions {
    /// Region `number`. Waits until it is allocated.
    fn get(&mut self, number: u32) -> Result<&DeviceRegion> {
        while self.there.len() <= number as usize {
            let next = self.coming.as_ref().and_then(|coming| coming.recv().ok());
            // The allocating thread has reported the reason already.
            let ended = || Error::internal("the memory of the GPU was not allocated");
            self.there.push(next.ok_or_else(ended)?);
        }
        Ok(&self.there[number as usize])
    }
}

/// The pinned memory to which reads write.
struct PinnedDestination<'scope, 'env> {
    checkpoint: &'env Checkpoint,
    pool: &'env PinnedPool,
    /// Maximum number of bytes of pinned memory.
    limit: u64,
    /// Number of bytes that the reads of the load would take if all of them were in flight at once.
    wanted: u64,
    /// A budget without bytes. Nothing is reserved for reads, because the pinned memory exists already.
    none: Budget,
    scope: &'scope Scope<'scope, 'env>,
    back: Sender<LoadMessage>,
}

impl<'scope, 'env> PinnedDestination<'scope, 'env> {
    fn new(
        loader: &Loader,
        checkpoint: &'env Checkpoint,
        plan: &Plan,
        pool: &'env PinnedPool,
        scope: &'scope Scope<'scope, 'env>,
        back: &Sender<LoadMessage>,
    ) -> Self {
        let lens = plan.chunks.iter().map(|chunk| memory_of(checkpoint, chunk));
        let wanted = lens.fold(0u64, u64::saturating_add);
        let none = Budget::new(0, Arc::default());
        PinnedDestination {
            checkpoint,
            pool,
            limit: loader.config.staging,
            wanted,
            none,
            scope,
            back: back.clone(),
        }
    }
}

impl ReadDestination for PinnedDestination<'_, '_> {
    fn target(&self, chunk: &Chunk, alone: bool) -> Option<ReadTarget> {
        let len = memory_of(self.checkpoint, chunk);
        let target = self.pool.target(len, self.none.try_reserve(0)?);
        if target.is_none() && self.pool.begins_to_grow(self.limit, alone) {
            let (pool, limit, wanted) = (self.pool, self.limit, self.wanted);
            let back = self.back.clone();
            let grow = move || drop(back.send(LoadMessage::More(pool.grow(len, limit, wanted))));
            let pinner = Builder::new().name("tensorfs-pin".to_owned());
            if pinner.spawn_scoped(self.scope, grow.clone()).is_err() {
                grow();
            }
        }
        target
    }

    fn is_moved(&self, _: &Chunk) -> bool {
        true
    }

    fn is_given(&self, _: &Chunk) -> bool {
        false
    }
}

/// A stream, and its buffer on the GPU for casts.
struct Line {
    stream: Arc<CudaStream>,
    /// The buffer has the elements before the cast. If there are several runs, the elements after the cast
    /// follow them.
    scratch: Option<(Arc<DeviceMemory>, Arc<Kernels>)>,
}

impl Line {
    fn all(gpu: &Gpu, plan: &Plan, kept: &Kept, after: Option<ForeignStream>) -> Result<Vec<Line>> {
        let rooms = plan.moves.iter().filter(|one| one.cast.is_some()).map(|one| {
            let after = if one.runs > 1 { one.runs * one.placed_len() } else { 0 };
            (one.runs * one.run_len).next_multiple_of(ALIGN) + after
        });
        let room = rooms.max();
        let kernels = room.map(|_| kept.kernels(gpu)).transpose()?;
        let line = |_| {
            let stream = CudaStream::new(gpu)?;
            if let Some(after) = after {
                stream.wait_for(after)?;
            }
            let scratch =
                room.zip(kernels.clone()).map(|(room, kernels)| Ok((gpu.allocate(room)?, kernels)));
            Ok(Line { stream, scratch: scratch.transpose()? })
        };
        (0..if room.is_some() { 2 } else { 1 }).map(line).collect()
    }
}

/// The copies of a load.
struct Copies<'a> {
    gpu: &'a Gpu,
    plan: &'a Plan,
    lines: &'a [Line],
    /// Whether the load has ended, successfully or not.
    over: AtomicBool,
    /// Time in which copies were in progress, in nanoseconds.
    copying: AtomicU64,
    /// Number of copies from the host so far.
    number: AtomicU64,
    /// Time spent on the allocation of GPU memory, in nanoseconds.
    allocating: AtomicU64,
}

/// Copies in progress: number of their chunk, start and end of its read, and start of the copies.
struct UnderWay {
    chunk: usize,
    began: Instant,
    came: Instant,
    started: Instant,
    sent: SentCopies,
}

impl<'a> Copies<'a> {
    fn new(gpu: &'a Gpu, plan: &'a Plan, lines: &'a [Line]) -> Self {
        let (over, copying, number, allocating) = Default::default();
        Copies { gpu, plan, lines, over, copying, number, allocating }
    }

    /// Allocates the regions in the order in which they are filled, while reads are in flight.
    fn allocate(&self, region: &Sender<DeviceRegion>, back: &Sender<LoadMessage>) {
        let mut started = Instant::now();
        let allocated = self.gpu.each_region(&self.plan.regions, &mut |one| {
            self.allocating.fetch_add(nanos(started.elapsed()), Ordering::Relaxed);
            started = Instant::now();
            // If the load has ended, there is no receiver, and allocation stops.
            region.send(one).is_ok()
        });
        if let Err(e) = allocated {
            let _ = back.send(LoadMessage::More(Err(e)));
        }
    }

    /// Binds the GPU's context to a thread of the load. Otherwise each call would bind it.
    fn bound(&self) -> Option<Entered<'_>> {
        self.lines.first()?.stream.enter().ok()
    }

    /// Submits copies to the streams until no more reads can arrive.
    fn work(
        &self,
        mut regions: Regions,
        todo: &Receiver<MoveJob>,
        sent: &Sender<UnderWay>,
        back: &Sender<LoadMessage>,
    ) -> Regions {
        let _bound = self.bound();
        let mut lines = self.lines.iter().cycle();
        while let (Ok(Some((chunk, came, filled))), Some(line)) = (todo.recv(), lines.next()) {
            if self.over.load(Ordering::Relaxed) {
                continue;
            }
            let (began, started) = (filled.began, Instant::now());
            match self.send(&mut regions, line, chunk, filled) {
                Ok(copies) => {
                    let _ = sent.send(UnderWay { chunk, began, came, started, sent: copies });
                }
                Err(e) => {
                    let _ = back.send(LoadMessage::Read { chunk, outcome: Err(e) });
                }
            }
        }
        regions
    }

    /// Waits for copies, the oldest first, until no more can come.
    fn finish(&self, waiting: &Receiver<UnderWay>, back: &Sender<LoadMessage>) {
        let _bound = self.bound();
        let mut last: Option<Instant> = None;
        for UnderWay { chunk, began, came, started, sent } in waiting {
            let waited = sent.wait();
            let ended = Instant::now();
            let alone_since = last.map_or(started, |last| last.max(started));
            self.copying.fetch_add(nanos(ended - alone_since), Ordering::Relaxed);
            last = Some(ended);
            let outcome = waited.map(|()| Times { began, came, moved: Some(started..ended) });
            let _ = back.send(LoadMessage::Read { chunk, outcome });
        }
    }

    fn send(
        &self,
        regions: &mut Regions,
        line: &Line,
        chunk: usize,
        filled: ReadBuffer,
    ) -> Result<SentCopies> {
        let len = filled.len() as u64;
        let mut sending = line.stream.send(filled);
        match &self.plan.chunks[chunk].target {
            ChunkTarget::Place { region, offset } | ChunkTarget::Unaligned { region, offset } => {
                self.copy_run(&mut sending, 0, len, regions.get(*region)?, *offset)?;
            }
            ChunkTarget::Spread(moves) => {
                for one in &self.plan.moves[moves.start as usize..moves.end as usize] {
                    let region = regions.get(one.region)?;
                    if one.is_plain() {
                        self.copy_run(&mut sending, one.from, one.run_len, region, one.offset)?;
                    } else {
                        self.spread(&mut sending, line, one, region)?;
                    }
                }
            }
        }
        sending.commit()
    }

    /// Submits the copy of one run of bytes from the host, and counts it.
    fn copy_run(
        &self,
        sending: &mut Sending,
        from: u64,
        len: u64,
        region: &DeviceRegion,
        offset: u64,
    ) -> Result<()> {
        self.number.fetch_add(1, Ordering::Relaxed);
        sending.copy(from, len, &region.memory, region.offset + offset)
    }

    /// Copies runs that have to be cast or spread. All runs of the innermost dimension are copied with one call.
    fn spread(
        &self,
        sending: &mut Sending,
        line: &Line,
        one: &Move,
        region: &DeviceRegion,
    ) -> Result<()> {
        let copy = one.copy.map(|number| &self.plan.copies[number as usize]);
        let place = |k| copy.map_or((0, 0), |copy| copy.run(k));
        let (from0, to0) = place(one.first);
        // Rows that share bytes are copied one by one.
        let inner = copy.and_then(StridedCopy::innermost).filter(|row| row.from >= one.run_len);
        let mut k = one.first;
        while k < one.first + one.runs {
            let (from, to) = place(k);
            let left = one.first + one.runs - k;
            let count = inner.map_or(1, |inner| (inner.count - k % inner.count).min(left));
            let rows = PitchedRows {
                from: one.from + (from - from0),
                from_pitch: inner.map_or(one.run_len, |inner| inner.from),
                to: region.offset + one.offset + (to - to0),
                to_pitch: inner.map_or(one.run_len, |inner| inner.to),
                width: one.run_len,
                count,
            };
            self.number.fetch_add(1, Ordering::Relaxed);
            match (one.cast, &line.scratch) {
                (Some(cast), Some((scratch, kernels))) => {
                    cast_rows(sending, scratch, kernels, cast, rows, &region.memory)?;
                }
                _ => sending.copy_rows(rows, &region.memory)?,
            }
            k += count;
        }
        Ok(())
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Casts rows of elements with the buffer `scratch`.
fn cast_rows(
    sending: &mut Sending,
    scratch: &Arc<DeviceMemory>,
    kernels: &Arc<Kernels>,
    cast: Cast,
    rows: PitchedRows,
    to: &Arc<DeviceMemory>,
) -> Result<()> {
    let (len, width) = (rows.count * rows.width, cast.len_after(rows.width));
    let elements = len * 8 / cast.from().bits();
    if rows.count == 1 {
        sending.copy(rows.from, len, scratch, 0)?;
        return sending.cast(kernels, cast, (scratch, 0), (to, rows.to), elements);
    }
    let after = len.next_multiple_of(ALIGN);
    sending.copy_rows(PitchedRows { to: 0, to_pitch: rows.width, ..rows }, scratch)?;
    sending.cast(kernels, cast, (scratch, 0), (scratch, after), elements)?;
    sending.spread(scratch, PitchedRows { from: after, from_pitch: width, width, ..rows }, to)
}
