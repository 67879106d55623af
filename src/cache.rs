//! A bounded cache of blocks of virtual files. It has blocks that were read ahead, blocks that are being read,
//! and the reads that wait for them.
//!
//! No function here waits. A read whose bytes are in memory is answered at once. Otherwise the callback of the read is
//! stored with the blocks that the read needs, and the thread that completes the last of these blocks calls it. If
//! there is no free memory, the read waits in a queue, and uses no memory there.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lru::LruCache;

use self::blocks::{CachedBlock, Cover, Data, FileBlocks, Pending, ReadPiece, Waiter};
pub use self::file::{CachedFile, OnStorm};
use self::loading::Loading;
use self::queue::{QueuedRead, WaitQueue, WaitReason};
use self::readahead::Readahead;
use self::uncached::UncachedRead;
use crate::counters::{Counter, Counters};
use crate::error::{Error, Result};
use crate::io::{Budget, Deadlines, Engine, Priority, Reservation};
use crate::prefetch::Planner;
use crate::reader::{Block, BlockPlan, GatherWindows, Reader};
use crate::source::Source;
use crate::sync::{Mutex, MutexGuard};

mod blocks;
mod file;
mod loading;
mod queue;
mod readahead;
#[cfg(test)]
mod tests;
mod uncached;
pub mod verify_on_read;

/// Time between two checks for overdue reads and idle blocks.
const TICK: Duration = Duration::from_millis(250);

/// Time without a request after which a block is dropped.
const IDLE_TIME: Duration = Duration::from_secs(5);

/// Number of ticks without a reservation of memory after which free memory is returned to the system. Keeping the
/// memory for this time is cheaper than getting new memory from the system.
const QUIET_TICKS: u32 = 20;

/// Maximum number of blocks that are examined to find one to evict.
const LOOKED_AT_MAX: usize = 128;

/// Smallest budget in bytes. It has room for a few of the largest blocks.
pub const BUDGET_MIN: u64 = 16 << 20;

/// The callback of a read. It is called once, with the bytes or the error.
pub type Answer = Box<dyn FnOnce(Result<&[u8], &Error>) + Send>;

/// The blocks of all open files of a mount.
#[derive(Clone)]
pub struct Cache(Arc<CacheInner>);

struct CacheInner {
    engine: Engine,
    budget: Budget,
    windows: GatherWindows,
    counters: Arc<Counters>,
    /// Maximum time that a read may wait for memory.
    timeout: Option<Duration>,
    started: Instant,
    next_file: AtomicU64,
    state: Mutex<State>,
    /// Number of ticks since memory was last reserved.
    quiet: AtomicU32,
    deadlines: Deadlines,
}

struct State {
    files: HashMap<u64, FileBlocks>,
    /// Loaded blocks by file and start, with the time of the last request for each.
    idle: LruCache<(u64, u64), Instant>,
    /// Reads that wait for memory.
    queue: WaitQueue,
    /// Reads without blocks that are in progress.
    uncached: Vec<UncachedRead>,
    loading: Loading,
}

/// A read that has to be answered.
struct ReadRequest {
    file: Arc<CachedFile>,
    reader: u64,
    range: Range<u64>,
    since: Instant,
    answer: Answer,
}

/// A part of a read that no block covers, with the plan and the memory for reading it.
struct Hole {
    start: u64,
    plan: BlockPlan,
    reservation: Reservation,
}

thread_local! {
    /// Buffer for bytes that are copied from the kernel's page cache to an answer.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Cache {
    /// Creates a cache that reads with `engine` into memory of `budget`. A read fails if it waits for memory
    /// for longer than `timeout`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        engine: Engine,
        budget: Budget,
        counters: Arc<Counters>,
        timeout: Option<Duration>,
    ) -> io::Result<Cache> {
        let state = State {
            files: HashMap::new(),
            idle: LruCache::unbounded(),
            queue: WaitQueue::default(),
            uncached: Vec::new(),
            loading: Loading::default(),
        };
        let windows = GatherWindows::new(budget.clone(), budget.limit() / 2, false);
        let inner = Arc::new(CacheInner {
            engine,
            budget,
            windows,
            counters,
            timeout,
            started: Instant::now(),
            next_file: AtomicU64::new(0),
            state: Mutex::new(state),
            quiet: AtomicU32::new(0),
            deadlines: Deadlines::default(),
        });
        inner.deadlines.start_ticks("cache", Arc::downgrade(&inner), TICK, CacheInner::tick)?;
        Ok(Cache(inner))
    }

    /// Opens a file that is read through the cache.
    pub fn open(&self, reader: Reader, on_storm: Option<OnStorm>) -> Arc<CachedFile> {
        let id = self.0.next_file.fetch_add(1, Ordering::Relaxed);
        let planner = Arc::new(Mutex::new(Planner::new(reader.len(), reader.reach())));
        let cache = Arc::downgrade(&self.0);
        Arc::new(CachedFile {
            id,
            reader,
            planner,
            cache,
            bytes_served: Counter::default(),
            on_storm,
        })
    }

    /// Reads the bytes `range` of `file`, as far as the file has them. Never waits. `answer` is called on this
    /// thread if the bytes are in memory, and otherwise on the thread that reads the last of them. `answer` must not
    /// wait for another read. `reader` identifies the open handle of the file, because each handle may read the tensors
    /// in another order.
    pub fn read(&self, file: &Arc<CachedFile>, reader: u64, range: Range<u64>, answer: Answer) {
        let inner = &self.0;
        inner.counters.reads.add(1);
        let range = range.start..range.end.min(file.reader.len());
        if range.is_empty() {
            return answer(Ok(&[]));
        }
        let request =
            ReadRequest { file: file.clone(), reader, range, since: Instant::now(), answer };
        let known = inner.state.lock().of(file).end_of_overlap(&request.range).is_some();
        let range = request.range.clone();
        let left =
            if known { Some((request, None)) } else { inner.answer_from_page_cache(request) };
        let Some((request, plan)) = left else {
            return Readahead { cache: inner, file }.watch_storm(range);
        };
        if let Some(waiting) = inner.admit(request, plan) {
            inner.enqueue(waiting);
        }
    }

    /// The limit of the memory and the memory in use, in bytes.
    pub fn memory(&self) -> (u64, u64) {
        (self.0.budget.limit(), self.0.budget.used())
    }
}

impl Drop for CacheInner {
    fn drop(&mut self) {
        self.deadlines.wake();
    }
}

impl CacheInner {
    /// Milliseconds since the cache was started.
    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Maximum number of bytes for readahead. The rest is for reads of waiting readers.
    fn ahead_max(&self) -> u64 {
        self.budget.limit() / 4 * 3
    }

    /// Answers a read if its bytes are in the kernel's page cache. Otherwise returns the read, and its plan if
    /// one was made.
    fn answer_from_page_cache(
        &self,
        request: ReadRequest,
    ) -> Option<(ReadRequest, Option<BlockPlan>)> {
        let reader = &request.file.reader;
        if reader.is_encrypted() || reader.is_scattered(&request.range) {
            return Some((request, None));
        }
        let mut plan = request.file.reader.plan_block(request.range.clone());
        BUFFER.with_borrow_mut(|buffer| {
            let len = (request.range.end - request.range.start) as usize;
            if buffer.len() < len {
                buffer.resize(len, 0);
            }
            let bytes = &mut buffer[..len];
            match plan.read_cached(&self.engine, bytes) {
                Ok(true) => {
                    self.counters.hits.add(1);
                    self.counters.bytes_from_page_cache.add(len as u64);
                    self.answer(request, Ok(bytes));
                    None
                }
                Ok(false) => Some((request, Some(plan))),
                Err(error) => {
                    self.answer(request, Err(&error));
                    None
                }
            }
        })
    }

    /// Answers a read and counts it.
    fn answer(&self, request: ReadRequest, outcome: Result<&[u8], &Error>) {
        match outcome {
            Ok(bytes) => {
                self.counters.bytes_served.add(bytes.len() as u64);
                request.file.bytes_served.add(bytes.len() as u64);
            }
            Err(_) => self.counters.read_errors.add(1),
        }
        (request.answer)(outcome);
    }

    /// Answers a read, or makes it wait for blocks that are being read. Returns the read if it has to wait in the
    /// queue. `plan` is the plan of the read, if one was made already.
    fn admit(
        self: &Arc<Self>,
        request: ReadRequest,
        plan: Option<BlockPlan>,
    ) -> Option<QueuedRead> {
        let (file, reader, range) = (request.file.clone(), request.reader, request.range.clone());
        self.drop_outdated(&file, &range);
        if file.reader.is_scattered(&range) {
            return UncachedRead::begin(self, self.state.lock(), request);
        }
        let (mut state, covers, plans) = self.plan(&file, &range, plan);
        let mut holes = Vec::new();
        for (start, plan) in plans {
            let need = plan.memory();
            if need > self.budget.limit() / 2 {
                return UncachedRead::begin(self, state, request);
            }
            match self.reserve_in_turn(&mut state, &request, &plan) {
                Ok(reservation) => holes.push(Hole { start, plan, reservation }),
                Err(reason) => return Some(QueuedRead { request, reason }),
            }
        }
        let (pending, late) = self.wait_for(&mut state, request, &covers);
        for hole in &holes {
            state.loading.add(&hole.plan);
        }
        let complete = pending.lock().left == 0;
        drop(state);
        if complete {
            self.counters.hits.add(1);
            self.finish(&pending);
        } else {
            self.counters.misses.add(1);
        }
        for hole in holes {
            self.fetch(&file, hole, Priority::Demand);
        }
        Readahead { cache: self, file: &file }.look_ahead(reader, &range, late);
        None
    }

    /// Drops the blocks in `range` of which a source has changed since they were read, as far as this is known without
    /// waiting. The next read of these bytes then reads the source and fails. Without this, the old bytes would hide
    /// the change.
    ///
    /// A block may have parts of thousands of shards, so these checks are done without the lock. Bytes that
    /// arrive during these checks are checked on arrival.
    fn drop_outdated(&self, file: &CachedFile, range: &Range<u64>) {
        let ready = self.state.lock().of(file).ready(range);
        for (start, bytes, sources) in ready {
            if sources.iter().any(|source| source.is_changed_now()) {
                let mut state = self.state.lock();
                if state.of(file).remove_ready(start, &bytes) {
                    state.idle.pop(&(file.id, start));
                }
            }
        }
    }

    /// Returns the blocks and holes that cover `range`, and the plan of each hole by its start. `known` is the plan for
    /// the whole range if all of it is one hole. Holes are planned without the lock. If the holes have changed
    /// meanwhile, they are planned again.
    fn plan(
        &self,
        file: &CachedFile,
        range: &Range<u64>,
        known: Option<BlockPlan>,
    ) -> (MutexGuard<'_, State>, Vec<Cover>, Vec<(u64, BlockPlan)>) {
        let mut planned = Vec::from_iter(known.is_some().then(|| range.clone()));
        let mut plans = Vec::from_iter(known.map(|plan| (range.start, plan)));
        loop {
            let mut state = self.state.lock();
            let covers = state.of(file).covers(range, |hole| file.reader.cover(hole));
            let holes: Vec<_> = covers.iter().filter_map(Cover::hole).cloned().collect();
            if holes == planned {
                return (state, covers, plans);
            }
            drop(state);
            let plan = |hole: &Range<u64>| (hole.start, file.reader.plan_block(hole.clone()));
            plans = holes.iter().map(plan).collect();
            planned = holes;
        }
    }

    /// Registers a read with the blocks from which it takes its bytes. Also returns whether one of these blocks is
    /// still being read ahead.
    fn wait_for(
        &self,
        state: &mut State,
        request: ReadRequest,
        covers: &[Cover],
    ) -> (Arc<Mutex<Pending>>, bool) {
        let (id, planner, now) = (request.file.id, request.file.planner.clone(), request.since);
        let pending =
            Arc::new(Mutex::new(Pending { request: Some(request), pieces: Vec::new(), left: 0 }));
        let mut this = pending.lock();
        let (mut late, mut used) = (false, 0);
        let State { files, idle, .. } = state;
        let file = files.entry(id).or_insert_with(|| FileBlocks::new(planner));
        file.last_read = now;
        for (piece, cover) in covers.iter().enumerate() {
            let waiter = || Waiter { pending: pending.clone(), piece };
            let (start, part, there) = match cover {
                Cover::CachedBlock(start, part, ready) => (*start, part, ready.clone()),
                Cover::Hole(part, Range { start, end }) => {
                    let data = Data::Loading { waiters: Vec::new(), tickets: Vec::new() };
                    let block =
                        CachedBlock { end: *end, asked: 0, ahead: false, left: false, data };
                    file.blocks.insert(*start, block);
                    (*start, part, None)
                }
            };
            let within = (part.start - start) as usize..(part.end - start) as usize;
            let Some(block) = file.blocks.get_mut(&start) else {
                // An earlier part of this read has removed the block.
                this.pieces.push(ReadPiece { block: there, within });
                continue;
            };
            let fresh =
                (part.end - part.start).min((block.end - start).saturating_sub(block.asked));
            block.asked += part.end - part.start;
            if block.ahead {
                used += fresh;
            }
            let ready = match &mut block.data {
                Data::Ready(loaded, _) => {
                    self.counters.bytes_from_cache.add(within.len() as u64);
                    Some(loaded.clone())
                }
                Data::Loading { waiters, tickets } => {
                    self.counters.bytes_from_source.add(within.len() as u64);
                    tickets.drain(..).for_each(|ticket| self.engine.promote(&ticket));
                    late |= block.ahead;
                    waiters.push(waiter());
                    this.left += 1;
                    None
                }
            };
            if ready.is_some() {
                if block.asked >= block.end - start {
                    // As many bytes of the block were requested as it has, and the kernel caches requested bytes. So
                    // this cache drops the block.
                    file.blocks.remove(&start);
                    idle.pop(&(id, start));
                } else {
                    idle.put((id, start), now);
                }
            }
            this.pieces.push(ReadPiece { block: ready, within });
        }
        if used > 0 {
            self.counters.prefetch_used_bytes.add(used);
            file.planner.lock().judge(used, 0);
        }
        drop(this);
        (pending, late)
    }

    /// Answers a read whose pieces are all loaded.
    fn finish(&self, pending: &Mutex<Pending>) {
        let mut this = pending.lock();
        let Some(request) = this.request.take() else { return };
        let pieces = std::mem::take(&mut this.pieces);
        drop(this);
        let bytes = |piece: &ReadPiece| -> Arc<Block> {
            piece.block.clone().expect("all pieces are there")
        };
        match pieces.as_slice() {
            [piece] => self.answer(request, Ok(&bytes(piece)[piece.within.clone()])),
            pieces => {
                let len = (request.range.end - request.range.start) as usize;
                let mut joined = Vec::with_capacity(len);
                for piece in pieces {
                    joined.extend_from_slice(&bytes(piece)[piece.within.clone()]);
                }
                self.answer(request, Ok(&joined));
            }
        }
    }

    /// Reads a block, and passes it to the reads that wait for it.
    fn fetch(self: &Arc<Self>, file: &Arc<CachedFile>, hole: Hole, priority: Priority) {
        let Hole { start, plan, reservation, .. } = hole;
        let charges: Vec<(Arc<Source>, u64)> =
            plan.sources().map(|(source, len)| (source.clone(), len)).collect();
        let (this, of) = (self.clone(), file.clone());
        let done = Box::new(move |outcome| this.loaded(&of, start, outcome, charges));
        let tickets = plan.fetch(&self.engine, priority, reservation, done);
        if matches!(priority, Priority::Prefetch) {
            let mut state = self.state.lock();
            let block = state.files.get_mut(&file.id).and_then(|f| f.blocks.get_mut(&start));
            if let Some(CachedBlock { data: Data::Loading { tickets: kept, waiters }, .. }) = block
            {
                if waiters.is_empty() {
                    *kept = tickets;
                } else {
                    tickets.iter().for_each(|ticket| self.engine.promote(ticket));
                }
            }
        }
    }

    /// Handles a block that was read or could not be read.
    fn loaded(
        self: &Arc<Self>,
        file: &CachedFile,
        start: u64,
        outcome: Result<Block>,
        charges: Vec<(Arc<Source>, u64)>,
    ) {
        let outcome = outcome.map(Arc::new);
        let mut state = self.state.lock();
        state.loading.remove(&charges);
        let State { files, idle, .. } = &mut *state;
        let blocks = files.get_mut(&file.id).map(|file| &mut file.blocks);
        let Some(blocks) = blocks else { return };
        let Some(block) = blocks.get_mut(&start) else { return };
        let Data::Loading { waiters, .. } = &mut block.data else { return };
        let waiters = std::mem::take(waiters);
        let is_left = block.left && block.asked == 0;
        match &outcome {
            Ok(_) if is_left => {
                if let Some(block) = blocks.remove(&start) {
                    self.waste(&file.planner, start, &block);
                }
            }
            Ok(loaded) if block.asked < block.end - start => {
                let sources = charges.into_iter().map(|(source, _)| source).collect();
                block.data = Data::Ready(loaded.clone(), sources);
                idle.put((file.id, start), Instant::now());
            }
            Ok(_) | Err(_) => drop(blocks.remove(&start)),
        }
        drop(state);
        self.deadlines.added();
        let loaded = outcome;
        let outcome = loaded.as_ref();
        for waiter in waiters {
            self.bring(&waiter, outcome);
        }
        if let Err(error) = outcome {
            tracing::debug!("{error}");
        }
        // This frees the memory of the block for waiting reads.
        drop(loaded);
        self.pump();
    }

    /// Passes a piece to a read.
    fn bring(&self, waiter: &Waiter, outcome: Result<&Arc<Block>, &Error>) {
        let mut this = waiter.pending.lock();
        let since = this.request.as_ref().map(|request| request.since);
        match outcome {
            Ok(loaded) => {
                if let Some(piece) = this.pieces.get_mut(waiter.piece) {
                    piece.block = Some(loaded.clone());
                }
                this.left -= 1;
                let complete = this.left == 0;
                drop(this);
                if complete {
                    self.finish(&waiter.pending);
                }
            }
            Err(error) => {
                let request = this.request.take();
                this.pieces.clear();
                drop(this);
                if let Some(request) = request {
                    self.answer(request, Err(error));
                }
            }
        }
        if let Some(since) = since {
            self.counters.wait.add(since.elapsed());
        }
    }

    /// Reserves memory for a read, or returns the reason why it has to wait.
    fn reserve_in_turn(
        &self,
        state: &mut State,
        request: &ReadRequest,
        plan: &BlockPlan,
    ) -> Result<Reservation, WaitReason> {
        if state.queue.holds_back(request.since, plan) {
            return Err(WaitReason::Fairness);
        }
        if let Some(source) = state.loading.refusing(plan, self.budget.limit()) {
            return Err(WaitReason::SourceQuota(source));
        }
        self.reserve(state, plan.memory()).ok_or(WaitReason::Memory)
    }

    /// Reserves `need` bytes of memory. If necessary, evicts loaded blocks.
    fn reserve(&self, state: &mut State, need: u64) -> Option<Reservation> {
        loop {
            if let Some(reservation) = self.budget.try_reserve(need) {
                return Some(reservation);
            }
            (self.evict(state) || self.windows.drop_idle(Duration::ZERO)).then_some(())?;
        }
    }

    /// Evicts the least recently requested block. Returns whether there was one.
    fn evict(&self, state: &mut State) -> bool {
        let Some(key) = state.idle.peek_lru().map(|(key, _)| *key) else { return false };
        self.evict_block(state, key.0, key.1);
        true
    }

    fn evict_block(&self, state: &mut State, id: u64, start: u64) {
        state.idle.pop(&(id, start));
        let Some(file) = state.files.get_mut(&id) else { return };
        if let Some(block) = file.blocks.remove(&start) {
            self.waste(&file.planner, start, &block);
        }
    }

    /// Evicts one of the oldest blocks, if one was not requested for `age`. Blocks that were read ahead stay
    /// longer while their file is being read.
    fn evict_stale(&self, state: &mut State, age: Duration) -> bool {
        let State { files, idle, .. } = state;
        let is_stale = |(&(id, start), since): (&(u64, u64), &Instant)| {
            let Some(file) = files.get(&id) else { return true };
            let is_partly_read = file.blocks.get(&start).is_none_or(|block| block.asked > 0);
            let is_left = file.last_read.elapsed() >= age || since.elapsed() >= 5 * age;
            since.elapsed() >= age && (is_partly_read || is_left)
        };
        let stale = idle.iter().rev().take(LOOKED_AT_MAX).find(|&entry| is_stale(entry));
        let Some(key) = stale.map(|(key, _)| *key) else { return false };
        self.evict_block(state, key.0, key.1);
        true
    }

    /// Drops the blocks in `range` that contain no planned bytes. Blocks that are being read are dropped when
    /// they are loaded.
    fn leave(&self, state: &mut State, file: &CachedFile, range: &Range<u64>) {
        let State { files, idle, .. } = state;
        let Some(blocks) = files.get_mut(&file.id).map(|file| &mut file.blocks) else { return };
        let mut dropped = Vec::new();
        let before = blocks.range(..range.start).next_back();
        let first = before.filter(|(_, block)| block.end > range.start).map(|(&start, _)| start);
        let planner = file.planner.lock();
        for (&start, block) in blocks.range_mut(first.unwrap_or(range.start)..range.end) {
            match &block.data {
                // Another part of the block is planned, so another reader may still need it.
                _ if planner.is_planned(&(start..block.end)) => {}
                Data::Ready(..) => dropped.push(start),
                Data::Loading { waiters, .. } => block.left = waiters.is_empty(),
            }
        }
        drop(planner);
        for start in dropped {
            idle.pop(&(file.id, start));
            if let Some(block) = blocks.remove(&start) {
                self.waste(&file.planner, start, &block);
            }
        }
    }

    /// Counts the bytes of a block that were read ahead but not requested.
    fn waste(&self, planner: &Mutex<Planner>, start: u64, block: &CachedBlock) {
        let wasted = (block.end - start).saturating_sub(block.asked);
        if block.ahead && wasted > 0 {
            self.counters.prefetch_wasted_bytes.add(wasted);
            planner.lock().dropped(&(start..block.end), wasted);
        }
    }

    fn enqueue(&self, waiting: QueuedRead) {
        self.counters.reads_queued_now.add(1);
        self.state.lock().queue.insert(waiting);
        self.deadlines.added();
    }

    /// Admits waiting reads, if memory is free now.
    fn pump(self: &Arc<Self>) {
        let mut index = 0;
        while self.budget.used() < self.budget.limit() {
            let Some(request) = self.state.lock().queue.take(index) else { return };
            match self.admit(request, None) {
                None => self.counters.reads_queued_now.sub(1),
                // A read of another source may still be admitted.
                Some(waiting) => {
                    self.state.lock().queue.insert(waiting);
                    index += 1;
                }
            }
        }
    }

    /// Answers reads that have waited too long for memory with an error, and evicts idle blocks. Returns
    /// whether further ticks are needed.
    fn tick(self: &Arc<Self>) -> bool {
        let mut late = Vec::new();
        let mut state = self.state.lock();
        while self.evict_stale(&mut state, IDLE_TIME) {}
        self.windows.drop_idle(IDLE_TIME);
        if let Some(timeout) = self.timeout {
            late.extend(std::iter::from_fn(|| state.queue.take_overdue(timeout)));
        }
        drop(state);
        for request in late {
            self.counters.reads_queued_now.sub(1);
            let reason = "no memory for it within the deadline: other reads hold all of it";
            let error = too_late(&request, reason);
            self.answer(request, Err(&error));
        }
        let uncached = self.state.lock().uncached.clone();
        uncached.iter().for_each(|read| read.expire(self));
        self.pump();
        let state = self.state.lock();
        let waits = !state.queue.is_empty() || !state.uncached.is_empty();
        if waits || !state.idle.is_empty() || self.budget.used() > 0 {
            self.quiet.store(0, Ordering::Relaxed);
            return true;
        }
        drop(state);
        if self.quiet.fetch_add(1, Ordering::Relaxed) < QUIET_TICKS {
            return true;
        }
        self.budget.trim();
        self.quiet.store(0, Ordering::Relaxed);
        false
    }
}

/// The error of a read that is not answered in time.
fn too_late(request: &ReadRequest, reason: &str) -> Error {
    let uri = request.file.reader.sources()[0].uri();
    Error::io(uri, "read", io::Error::new(io::ErrorKind::TimedOut, reason))
}

impl State {
    /// The blocks of `file`.
    fn of(&mut self, file: &CachedFile) -> &mut FileBlocks {
        self.files.entry(file.id).or_insert_with(|| FileBlocks::new(file.planner.clone()))
    }
}
