//! The reads of one device and the threads that execute them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use serde::{Deserialize, Serialize};

use super::queue::{Failed, FetchQueue, FinishedFetch, ReadJob};
use super::transfer::{AGAIN_PAUSE, Next, Transfer};
use super::{Backend, Deadlines, Fetch, FetchCallback, ReadBuffer, Settings};
use crate::counters::Counters;
use crate::error::{Error, Result, shown_path};
use crate::source::{FileSystem, ReadQueue, release_unpinned};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::version::QueueKey;

/// Idle time after which a thread ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// The thread of the ring itself answers reads shorter than this number of bytes, because waking another thread takes
/// longer than the answer.
const ANSWERED_HERE_MAX: usize = 64 << 10;

/// Minimum and maximum number of threads that answer reads of a ring. Between these limits, the number of threads is
/// the number of processors. The minimum is two, so that one blocked callback does not block all answers.
const ANSWERING: (usize, usize) = (2, 8);

/// The reads of one disk, network mount or store, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueStatus {
    /// The device, or the name of the store.
    pub device: String,
    /// The name of the file system. `None` for a store.
    pub file_system: Option<String>,
    /// Whether the file system answers without another machine or process.
    pub local: bool,
    /// `io_uring`, `pread` or `not started`.
    pub backend: String,
    /// The reason, if `backend` is `pread`.
    pub why: Option<String>,
    /// The setting for O_DIRECT.
    pub direct: String,
    /// Whether the file system refuses O_DIRECT.
    pub direct_refused: bool,
    /// Number of threads.
    pub threads: usize,
    /// Reads that wait for their turn.
    pub queued: usize,
    /// Reads in flight.
    pub in_flight: usize,
    /// Reads past their deadline that the kernel has not completed.
    pub stuck: usize,
}

/// Sets up a ring on the calling thread and executes the reads of a queue there, until the queue is closed.
/// Fails if no ring can be set up, or if the ring fails later.
pub(super) type RingDriver = fn(&Arc<DeviceQueue>) -> io::Result<()>;

/// Wakes the thread that waits in a ring.
pub(super) struct Waker(EventFd);

impl Waker {
    pub(super) fn new() -> io::Result<Waker> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Waker(EventFd::from_value_and_flags(0, flags)?))
    }

    fn wake(&self) {
        // A write fails only if the thread has not read 2^64 - 2 calls yet. In this case the thread is awake anyway.
        let _ = self.0.write(1);
    }

    pub(super) fn clear(&self) {
        let _ = self.0.read();
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// The reads of one device.
pub(super) struct DeviceQueue {
    key: QueueKey,
    /// Name of the store, for sources that are not local files.
    store: Option<String>,
    /// The file system, for local files.
    file_system: Option<FileSystem>,
    pub(super) settings: Settings,
    pub(super) counters: Arc<Counters>,
    deadlines: Deadlines,
    /// Executes reads in a ring on the calling thread.
    driver: RingDriver,
    /// Whether the file system has refused O_DIRECT.
    direct_refused: AtomicBool,
    /// Maximum number of threads that may answer reads of `State::over` at the same time.
    answering_max: usize,
    pub(super) state: Mutex<State>,
    /// Wakes threads of the pool when there is work or the queue is closed.
    work: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) queue: FetchQueue,
    /// Whether the queue is closed, because the engine was dropped.
    pub(super) closed: bool,
    ring: RingState,
    /// Reads that the thread of the ring has handed to the pool.
    handed: VecDeque<(u64, Transfer)>,
    /// Completed reads that the pool has to answer. The deadline of a read runs until it is answered.
    pub(super) over: VecDeque<CompletedRead>,
    /// Number of threads that are answering reads of `over`.
    answering: usize,
    /// Number of threads, including the thread of the ring.
    threads: usize,
    /// Number of threads with a task. A thread counts until it requests the next one.
    busy: usize,
    /// Number of threads that wait for work. `called` is the number of those that were notified but have not
    /// woken up yet.
    idle: usize,
    called: usize,
    /// Error of the last thread that could not be started.
    no_thread: Option<String>,
}

/// A completed read and its result.
pub(super) struct CompletedRead {
    id: u64,
    transfer: Transfer,
    result: Result<()>,
}

/// The next task of a thread.
pub(super) enum NextWork {
    ReadJob(ReadJob),
    /// A read that the thread of the ring has begun and handed to the pool.
    Handed(u64, Transfer),
    /// A completed read that has to be answered.
    CompletedRead(CompletedRead),
    /// No task now. Returned only to the thread of a ring.
    None,
    End,
}

/// The state of the ring, if io_uring is used.
#[derive(Default)]
enum RingState {
    /// The first fetch will set up the ring.
    Wanted,
    /// The ring's thread is setting it up.
    Starting,
    /// The ring is in use. `asleep` is true while its thread waits and nobody has woken it.
    On { waker: Arc<Waker>, asleep: bool },
    /// The ring is not available, for the reason in the string.
    Off(String),
    /// The queue never uses a ring.
    #[default]
    Never,
}

impl DeviceQueue {
    pub(super) fn new(
        of_source: ReadQueue,
        store: Option<String>,
        settings: Settings,
        counters: Arc<Counters>,
        deadlines: Deadlines,
        driver: RingDriver,
    ) -> DeviceQueue {
        let mut state = State::default();
        if !of_source.may_block && settings.backend != Backend::Pread {
            state.ring = RingState::Wanted;
        }
        state.queue.has_spare = store.is_some();
        DeviceQueue {
            key: of_source.key,
            store,
            file_system: of_source.file_system,
            settings,
            counters,
            deadlines,
            driver,
            direct_refused: AtomicBool::new(false),
            answering_max: available_parallelism()
                .map_or(ANSWERING.0, |n| n.get().clamp(ANSWERING.0, ANSWERING.1)),
            state: Mutex::new(state),
            work: Condvar::new(),
        }
    }

    /// Queues a fetch and returns its number.
    pub(super) fn submit(self: &Arc<Self>, fetch: Fetch) -> u64 {
        let wanted = fetch.source.wanted_in_flight();
        let mut state = self.state.lock();
        state.queue.limit_prefetches(wanted);
        let id = state.queue.push(fetch, Instant::now());
        self.wake_from(state);
        id
    }

    pub(super) fn promote(self: &Arc<Self>, id: u64) {
        let mut state = self.state.lock();
        if state.queue.promote(id, Instant::now()) {
            // The limit for prefetches may have held the fetch back, and it no longer applies to the fetch.
            self.wake_from(state);
        }
    }

    /// Wakes or starts a thread if there is work that can be done now.
    pub(super) fn wake(self: &Arc<Self>) {
        self.wake_from(self.state.lock());
    }

    fn wake_from(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let (mut start, mut pool, mut to_wake) = (false, false, None);
        let has_work = state.queue.has_work();
        match &mut state.ring {
            _ if !has_work => {}
            RingState::Starting | RingState::On { asleep: false, .. } => {}
            RingState::On { waker, asleep } => {
                *asleep = false;
                to_wake = Some(waker.clone());
            }
            ring @ RingState::Wanted => {
                *ring = RingState::Starting;
                start = true;
            }
            RingState::Off(_) | RingState::Never => pool = true,
        }
        state.threads += usize::from(start);
        pool |= !state.handed.is_empty() || state.may_answer(self.answering_max);
        // The lock is released first, because the woken thread needs it at once.
        drop(state);
        if let Some(waker) = to_wake {
            waker.wake();
        }
        if start {
            let queue = self.clone();
            self.start_thread(move || queue.work());
        }
        if pool {
            self.call_pool();
        }
    }

    /// Wakes a thread of the pool, or starts one. Returns whether a thread will take the work.
    fn call_pool(self: &Arc<Self>) -> bool {
        {
            let mut state = self.state.lock();
            if state.idle > state.called {
                state.called += 1;
                self.work.notify_one();
                return true;
            }
            // A thread that is about to request its next task takes this work, and wakes further threads.
            if state.busy < state.threads {
                return true;
            }
            state.threads += 1;
        }
        let queue = self.clone();
        self.start_thread(move || queue.work_in_pool())
    }

    /// Starts a thread that is already included in `State::threads`.
    fn start_thread(&self, work: impl FnOnce() + Send + 'static) -> bool {
        let thread = std::thread::Builder::new().name("tensorfs-read".to_owned());
        let started = thread.spawn(work);
        if let Err(e) = &started {
            self.thread_failed(e);
        }
        started.is_ok()
    }

    /// Hands a read from the thread of the ring to the pool. The thread of the ring serves all reads of the queue, so
    /// it must not wait. A read through the page cache may wait and copies bytes, and a read that the kernel postpones
    /// has to wait too.
    pub(super) fn hand_over(self: &Arc<Self>, id: u64, transfer: Transfer) {
        self.state.lock().handed.push_back((id, transfer));
        if !self.call_pool() {
            let handed = self.state.lock().handed.pop_front();
            if let Some((id, transfer)) = handed {
                self.carry(id, || self.read(transfer));
            }
        }
    }

    /// Answers a completed read of the ring. Long answers are left to the pool: copying many bytes takes longer
    /// than reading them, and one thread serves all reads of the ring.
    pub(super) fn over(self: &Arc<Self>, id: u64, transfer: Transfer, result: Result<()>) {
        let over = CompletedRead { id, transfer, result };
        let call = {
            let mut state = self.state.lock();
            let is_long = state.queue.is_long(id) && over.transfer.len() >= ANSWERED_HERE_MAX;
            if !is_long && !over.transfer.decrypts {
                drop(state);
                return self.answer_over(over);
            }
            state.over.push_back(over);
            state.may_answer(self.answering_max)
        };
        // If no thread is woken here, a thread that is answering takes this read next.
        if call && !self.call_pool() {
            let over = self.state.lock().over.pop_front();
            if let Some(over) = over {
                self.answer_over(over);
            }
        }
    }

    fn answer_over(self: &Arc<Self>, CompletedRead { id, transfer, result }: CompletedRead) {
        self.carry(id, || result.and_then(|()| transfer.finish()));
    }

    /// Executes a read with `pread(2)`, however long the kernel takes.
    fn read(&self, mut transfer: Transfer) -> Result<ReadBuffer> {
        if transfer.fill_zeros() {
            return transfer.finish();
        }
        loop {
            let Some((file, offset, target)) = transfer.next() else {
                let result = transfer.read_stored(self.settings.timeout);
                self.counters.source_reads.add(1);
                self.counters.source_bytes.add(if result.is_ok() {
                    transfer.len() as u64
                } else {
                    0
                });
                return result.and_then(|()| transfer.finish());
            };
            let result = file.read_at(target, offset);
            self.count_read(&transfer, &result);
            match transfer.advance(result) {
                Next::Read => {}
                Next::ReadLater => std::thread::sleep(AGAIN_PAUSE),
                Next::End(result) => return result.and_then(|()| transfer.finish()),
            }
        }
    }

    /// Runs `read` and answers the fetch with its result.
    fn carry(self: &Arc<Self>, id: u64, read: impl FnOnce() -> Result<ReadBuffer>) {
        self.finish(id, guarded(read));
    }

    /// The first thread of the queue: executes all reads in a ring. If there is no ring, it becomes a thread of
    /// the pool.
    fn work(self: &Arc<Self>) {
        if let Err(e) = (self.driver)(self) {
            let reason = format!("io_uring is unavailable: {e}");
            if self.settings.backend == Backend::Uring {
                tracing::warn!("{reason}; reading with threads instead");
            } else {
                tracing::info!("{reason}; reading with threads instead");
            }
            self.state.lock().ring = RingState::Off(reason);
            self.work_in_pool();
        } else {
            self.state.lock().threads -= 1;
        }
    }

    /// Notes that the ring is set up and that `waker` wakes its thread. From now on, reads go to the ring.
    pub(super) fn ring_begins(&self, waker: Arc<Waker>) {
        // Only one thread has this name, so `tensorfs bench` can show its CPU time separately from the CPU time
        // of the pool.
        let _ = nix::sys::prctl::set_name(c"tensorfs-ring");
        let mut state = self.state.lock();
        state.ring = RingState::On { waker, asleep: false };
        state.busy += 1;
    }

    /// Notes that the thread executes no more reads in the ring.
    pub(super) fn ring_ends(&self) {
        let _ = nix::sys::prctl::set_name(c"tensorfs-read");
        self.state.lock().busy -= 1;
    }

    /// The next task for the thread of the ring. If there is none, the thread counts as asleep from now on.
    /// `drained` says whether the kernel has no reads of the ring.
    pub(super) fn next_for_ring(&self, drained: bool) -> NextWork {
        let mut state = self.state.lock();
        if state.closed && drained {
            return NextWork::End;
        }
        if let Some(job) = state.queue.pick(Instant::now()) {
            self.counters.source_reads_now.add(1);
            return NextWork::ReadJob(job);
        }
        if let RingState::On { asleep, .. } = &mut state.ring {
            *asleep = true;
        }
        NextWork::None
    }

    /// Notes that the thread of the ring is awake, so nobody has to wake it.
    pub(super) fn ring_is_awake(&self) {
        if let RingState::On { asleep, .. } = &mut self.state.lock().ring {
            *asleep = false;
        }
    }

    /// Counts one read system call, whether it succeeded or failed.
    pub(super) fn count_read(&self, transfer: &Transfer, result: &io::Result<usize>) {
        self.counters.source_reads.add(1);
        self.counters.source_reads_direct.add(u64::from(transfer.is_direct()));
        if transfer.refused {
            self.direct_refused.store(true, Ordering::Relaxed);
        }
        self.counters.source_bytes.add(*result.as_ref().unwrap_or(&0) as u64);
    }

    /// Handles the error of a thread that could not be started. If the queue has another thread, the other thread does
    /// the work.
    fn thread_failed(&self, e: &io::Error) {
        let mut state = self.state.lock();
        state.threads -= 1;
        if matches!(state.ring, RingState::Starting) {
            state.ring = RingState::Wanted;
        }
        state.no_thread = Some(e.to_string());
        let last = state.threads == 0;
        drop(state);
        tracing::warn!("cannot start a thread to read with: {e}");
        if last {
            self.deadlines.wake();
        }
    }

    /// The loop of a pool thread. It ends after `IDLE_MAX` without work.
    fn work_in_pool(self: &Arc<Self>) {
        let mut busy = false;
        loop {
            let work = self.next_for_pool(busy);
            busy = true;
            match work {
                NextWork::ReadJob(job) => {
                    // There may be work for further threads.
                    self.wake();
                    self.carry(job.id, || self.read(Transfer::begin(job, self.settings.direct)?));
                }
                NextWork::Handed(id, transfer) => {
                    self.wake();
                    self.carry(id, || self.read(transfer));
                }
                NextWork::CompletedRead(over) => {
                    self.wake();
                    self.answer_over(over);
                    self.state.lock().answering -= 1;
                }
                NextWork::None | NextWork::End => return,
            }
        }
    }

    /// Waits for the next task. `busy` says whether this thread has just completed one.
    fn next_for_pool(&self, busy: bool) -> NextWork {
        let mut state = self.state.lock();
        state.busy -= usize::from(busy);
        loop {
            if let Some((id, transfer)) = state.handed.pop_front() {
                state.busy += 1;
                return NextWork::Handed(id, transfer);
            }
            if state.may_answer(self.answering_max)
                && let Some(over) = state.over.pop_front()
            {
                state.busy += 1;
                state.answering += 1;
                return NextWork::CompletedRead(over);
            }
            if state.closed {
                state.threads -= 1;
                return NextWork::End;
            }
            let for_pool = matches!(state.ring, RingState::Off(_) | RingState::Never);
            if for_pool && let Some(job) = state.queue.pick(Instant::now()) {
                self.counters.source_reads_now.add(1);
                state.busy += 1;
                return NextWork::ReadJob(job);
            }
            state.idle += 1;
            let since = Instant::now();
            state = self.work.wait_timeout(state, IDLE_MAX);
            state.idle -= 1;
            if state.called > 0 {
                state.called -= 1;
            } else if since.elapsed() >= IDLE_MAX {
                state.threads -= 1;
                return NextWork::End;
            }
        }
    }

    /// Answers a completed fetch, unless it has already been answered.
    pub(super) fn finish(self: &Arc<Self>, id: u64, result: Result<ReadBuffer>) {
        let (finished, ring_waits) = {
            let mut state = self.state.lock();
            let finished = state.queue.finish(id);
            let asleep = matches!(state.ring, RingState::On { asleep: true, .. });
            (finished, asleep && state.queue.has_work())
        };
        // A pool thread takes the next read by itself. The thread of the ring does not notice that the pool has
        // completed a read, so it is woken.
        if ring_waits {
            self.wake();
        }
        let done = match finished {
            Some(FinishedFetch::Unanswered(done)) => done,
            Some(FinishedFetch::Late(source)) => {
                drop(result);
                // The read may have opened the file after the last reader had closed it.
                release_unpinned(&[source]);
                self.counters.source_stuck_now.sub(1);
                self.wake();
                return;
            }
            None => return,
        };
        self.counters.source_reads_now.sub(1);
        if result.is_err() {
            self.counters.source_errors.add(1);
        }
        answer(done, result);
    }

    /// Answers overdue fetches with an error. Returns the time at which the next fetch becomes overdue.
    pub(super) fn expire(self: &Arc<Self>, now: Instant) -> Option<Instant> {
        let no_thread = {
            let mut state = self.state.lock();
            if state.threads > 0 { None } else { state.no_thread.take() }
        };
        if let Some(reason) = no_thread {
            let failed = self.state.lock().queue.fail_queued();
            for Failed { source, done, .. } in failed {
                let e = io::Error::other(format!("no thread can be started: {reason}"));
                answer(done, Err(Error::io(source.uri(), "read", e)));
            }
        }
        let timeout = self.settings.timeout?;
        let (overdue, oldest) = {
            let mut state = self.state.lock();
            let stuck_before = state.queue.stuck();
            let overdue = state.queue.expire(now, timeout);
            let stuck = (state.queue.stuck() - stuck_before) as u64;
            self.counters.source_stuck_now.add(stuck);
            self.counters.source_reads_now.sub(stuck);
            (overdue, state.queue.oldest())
        };
        let seconds = timeout.as_secs_f64();
        let mut stalled = Vec::new();
        for Failed { source, offset, done } in overdue {
            self.counters.source_timeouts.add(1);
            if !source.set_stalled(true) {
                stalled.push((source.clone(), offset));
            }
            let message = format!("the bytes at {offset} did not come within {seconds} s");
            let e = io::Error::new(io::ErrorKind::TimedOut, message);
            answer(done, Err(Error::io(source.uri(), "read", e)));
            // If the disk of a local copy does not answer, the next reads go to the store.
            if self.file_system.is_some() {
                source.leave_copy();
            }
        }
        // Overdue prefetches no longer count against the limit, so other prefetches may be sent.
        self.wake();
        // Readers are answered before the log is written, because logging may have to wait.
        for (source, offset) in stalled {
            let path = shown_path(source.path());
            tracing::error!(
                "{path}: the bytes at {offset} did not come within {seconds} s; reads that wait \
                 so long fail"
            );
        }
        oldest?.checked_add(timeout)
    }

    /// Closes the queue: its threads end, and waiting readers get an error.
    pub(super) fn close(&self) {
        let (failed, stuck) = {
            let mut state = self.state.lock();
            state.closed = true;
            let stuck = state.queue.stuck();
            let failed = state.queue.fail_all();
            (failed, (state.queue.stuck() - stuck) as u64)
        };
        self.counters.source_stuck_now.add(stuck);
        self.counters.source_reads_now.sub(stuck);
        if let RingState::On { waker, .. } = &self.state.lock().ring {
            waker.wake();
        }
        self.work.notify_all();
        for Failed { source, done, .. } in failed {
            let e = io::Error::other("the reader was closed");
            answer(done, Err(Error::io(source.uri(), "read", e)));
        }
    }

    /// State and settings of the queue, for `status`.
    pub(super) fn status(&self) -> QueueStatus {
        let state = self.state.lock();
        let (backend, why) = match &state.ring {
            RingState::On { .. } => ("io_uring", None),
            RingState::Wanted | RingState::Starting => ("not started", None),
            RingState::Off(reason) => ("pread", Some(reason.clone())),
            RingState::Never if self.settings.backend == Backend::Pread => {
                ("pread", Some("requested".to_owned()))
            }
            RingState::Never => ("pread", Some("the file system may wait for others".to_owned())),
        };
        QueueStatus {
            device: self.store.clone().unwrap_or_else(|| self.key.to_string()),
            file_system: self.file_system.map(FileSystem::name),
            local: self.file_system.is_some_and(FileSystem::is_local),
            backend: backend.to_owned(),
            why,
            direct: self.settings.direct.to_string(),
            direct_refused: self.direct_refused.load(Ordering::Relaxed),
            threads: state.threads,
            queued: state.queue.queued(),
            in_flight: state.queue.in_flight(),
            stuck: state.queue.stuck(),
        }
    }
}

impl State {
    /// Whether a thread of the pool may take a completed read.
    fn may_answer(&self, most: usize) -> bool {
        self.answering < most && !self.over.is_empty()
    }
}

/// Runs `work`. If it panics, only this read fails.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(Error::internal("reading failed by an error in tensorfs: see the log for the panic"))
    })
}

/// Calls `done` with `result`. A panic in `done` does not end the thread.
pub(super) fn answer(done: FetchCallback, result: Result<ReadBuffer>) {
    if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
        tracing::error!("a reader's callback panicked");
    }
}
