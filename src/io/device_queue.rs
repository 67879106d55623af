//! The reads of one device, and the threads that carry them out.

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

/// Reads shorter than this are answered by the ring's thread: waking another thread takes longer
/// than the answer.
const ANSWERED_HERE_MAX: usize = 64 << 10;

/// Bounds of the number of threads that answer reads of a ring; in between it is the number of
/// processors. The lower bound is two, so that one blocked callback does not block all answers.
const ANSWERING: (usize, usize) = (2, 8);

/// The reads of one disk or network mount, as `status` reports them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueStatus {
    /// The device.
    pub device: String,
    /// Its file system.
    pub file_system: Option<String>,
    /// Whether that waits for no other machine or program.
    pub local: bool,
    /// `io_uring`, `pread` or `not started`.
    pub backend: String,
    /// Why it is `pread`.
    pub why: Option<String>,
    /// The setting of O_DIRECT.
    pub direct: String,
    /// Whether the file system refuses O_DIRECT.
    pub direct_refused: bool,
    /// Its threads.
    pub threads: usize,
    /// Reads that wait for their turn.
    pub queued: usize,
    /// Reads under way.
    pub in_flight: usize,
    /// Reads past their deadline that the kernel has not returned.
    pub stuck: usize,
}

/// Sets up a ring on the calling thread and carries out the reads of a queue there, until it is
/// closed. Fails where there is no ring, or none any more.
pub(super) type RingDriver = fn(&Arc<DeviceQueue>) -> io::Result<()>;

/// Wakes the thread that waits in a ring.
pub(super) struct Waker(EventFd);

impl Waker {
    pub(super) fn new() -> io::Result<Waker> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Waker(EventFd::from_value_and_flags(0, flags)?))
    }

    fn wake(&self) {
        // It fails only where 2^64 - 2 calls wait: then the thread is awake anyway.
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
    /// Name of the store of sources that are no local files.
    store: Option<String>,
    /// The file system of local files.
    file_system: Option<FileSystem>,
    pub(super) settings: Settings,
    pub(super) counters: Arc<Counters>,
    deadlines: Deadlines,
    /// Carries out reads in a ring, on the thread that calls it.
    driver: RingDriver,
    /// Whether the file system has refused O_DIRECT.
    direct_refused: AtomicBool,
    /// Maximum number of threads that answer reads of `State::over` at a time.
    answering_max: usize,
    pub(super) state: Mutex<State>,
    /// Wakes threads of the pool when there is work or the queue is closed.
    work: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) queue: FetchQueue,
    /// Set when the engine is gone.
    pub(super) closed: bool,
    ring: RingState,
    /// Reads that the ring's thread leaves to the pool.
    handed: VecDeque<(u64, Transfer)>,
    /// Completed reads that the pool answers. Their deadlines run until then.
    pub(super) over: VecDeque<CompletedRead>,
    /// Number of threads that answer reads of `over`.
    answering: usize,
    /// Number of threads, including the ring's thread.
    threads: usize,
    /// Number of threads with a job, until they request the next.
    busy: usize,
    /// Number of threads that wait for work, and how many of them were notified but have not woken
    /// up yet.
    idle: usize,
    called: usize,
    /// Reason why the last start of a thread failed.
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
    /// A read that the ring's thread has begun and left to the pool.
    Handed(u64, Transfer),
    /// A completed read, to be answered.
    CompletedRead(CompletedRead),
    /// Nothing now; only for the thread of a ring.
    None,
    End,
}

/// The state of the ring, if io_uring is used.
#[derive(Default)]
enum RingState {
    /// The first fetch sets it up.
    Wanted,
    /// The ring's thread is setting it up.
    Starting,
    /// The ring is in use; `asleep` while its thread waits and has not been woken.
    On { waker: Arc<Waker>, asleep: bool },
    /// The ring is unavailable, for this reason.
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
        let mut state = self.state.lock();
        let id = state.queue.push(fetch, Instant::now());
        self.wake_from(state);
        id
    }

    pub(super) fn promote(&self, id: u64) {
        self.state.lock().queue.promote(id, Instant::now());
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
        // The thread that wakes up needs the lock at once.
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
            // A thread that is about to ask for work takes it, and wakes further threads.
            if state.busy < state.threads {
                return true;
            }
            state.threads += 1;
        }
        let queue = self.clone();
        self.start_thread(move || queue.work_in_pool())
    }

    /// Starts a thread that `State::threads` already counts.
    fn start_thread(&self, work: impl FnOnce() + Send + 'static) -> bool {
        let thread = std::thread::Builder::new().name("tensorfs-read".to_owned());
        let started = thread.spawn(work);
        if let Err(e) = &started {
            self.thread_failed(e);
        }
        started.is_ok()
    }

    /// Hands a read of the ring's thread to the pool. A read through the page cache waits and
    /// copies, one that the kernel puts off waits as well, and the ring's thread serves all reads
    /// of the queue.
    pub(super) fn hand_over(self: &Arc<Self>, id: u64, transfer: Transfer) {
        self.state.lock().handed.push_back((id, transfer));
        if !self.call_pool() {
            let handed = self.state.lock().handed.pop_front();
            if let Some((id, transfer)) = handed {
                self.carry(id, || self.read(transfer));
            }
        }
    }

    /// Answers a completed read of the ring. The pool gives long answers: copying many bytes takes
    /// longer than reading them, and one thread serves all reads of the ring.
    pub(super) fn over(self: &Arc<Self>, id: u64, transfer: Transfer, result: Result<()>) {
        let over = CompletedRead { id, transfer, result };
        let call = {
            let mut state = self.state.lock();
            let is_long = state.queue.is_long(id) && over.transfer.len() >= ANSWERED_HERE_MAX;
            if !is_long && !over.transfer.decrypts() {
                drop(state);
                return self.answer_over(over);
            }
            state.over.push_back(over);
            state.may_answer(self.answering_max)
        };
        // If no thread is woken, a thread that is answering takes it next.
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

    /// Carries out a read with `pread(2)`, however long the kernel takes.
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

    /// The first thread: carries out all reads in a ring, or serves as a thread of the pool
    /// where there is no ring.
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

    /// The ring is set up, and `waker` wakes its thread: reads go there from now on.
    pub(super) fn ring_begins(&self, waker: Arc<Waker>) {
        // This thread exists once: `tensorfs bench` tells its processor time from the pool's.
        let _ = nix::sys::prctl::set_name(c"tensorfs-ring");
        let mut state = self.state.lock();
        state.ring = RingState::On { waker, asleep: false };
        state.busy += 1;
    }

    /// The thread of the ring carries out no more reads there.
    pub(super) fn ring_ends(&self) {
        let _ = nix::sys::prctl::set_name(c"tensorfs-read");
        self.state.lock().busy -= 1;
    }

    /// The next job for the ring's thread. If there is none, the thread counts as asleep from now
    /// on. `drained` is true if the kernel has no reads of the ring.
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

    /// Notes that the ring's thread is awake and needs no wake-up.
    pub(super) fn ring_is_awake(&self) {
        if let RingState::On { asleep, .. } = &mut self.state.lock().ring {
            *asleep = false;
        }
    }

    /// Counts one system call that reads, whether it succeeded or failed.
    pub(super) fn count_read(&self, transfer: &Transfer, result: &io::Result<usize>) {
        self.counters.source_reads.add(1);
        self.counters.source_reads_direct.add(u64::from(transfer.is_direct()));
        if transfer.is_refused() {
            self.direct_refused.store(true, Ordering::Relaxed);
        }
        self.counters.source_bytes.add(*result.as_ref().unwrap_or(&0) as u64);
    }

    /// Handles a thread that could not be started. If the queue has another thread, that does the
    /// work.
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

    /// A thread of the pool: works until there is nothing to do for a while.
    fn work_in_pool(self: &Arc<Self>) {
        let mut busy = false;
        loop {
            let work = self.next_for_pool(busy);
            busy = true;
            match work {
                NextWork::ReadJob(job) => {
                    // Further threads may find work as well.
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

    /// Waits for work; `busy` says whether this thread has just done some.
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
        // A thread of the pool goes on by itself. The ring's thread does not know that the pool
        // made room.
        if ring_waits {
            self.wake();
        }
        let done = match finished {
            Some(FinishedFetch::Unanswered(done)) => done,
            Some(FinishedFetch::Late(source)) => {
                drop(result);
                // It may have opened the file after the last reader had closed it.
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

    /// Answers overdue fetches with an error. Returns when the next fetch will be overdue.
    pub(super) fn expire(&self, now: Instant) -> Option<Instant> {
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
            // The store still has what the disk of a local copy does not give.
            if self.file_system.is_some() {
                source.leave_copy();
            }
        }
        // Readers are answered first, because logging may have to wait.
        for (source, offset) in stalled {
            let path = shown_path(source.path());
            tracing::error!(
                "{path}: the bytes at {offset} did not come within {seconds} s; reads that wait \
                 so long fail"
            );
        }
        oldest?.checked_add(timeout)
    }

    /// Ends the queue: its threads end, and waiting reads get an error.
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

    /// State and settings of the queue, for people.
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

/// Runs `work`; a panic in it fails only this read.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(Error::internal("reading failed by an error in tensorfs: see the log for the panic"))
    })
}

/// Calls back. A panic in the callback does not end the thread.
pub(super) fn answer(done: FetchCallback, result: Result<ReadBuffer>) {
    if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
        tracing::error!("a reader's callback panicked");
    }
}
