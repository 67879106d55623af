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
use serde_json::{Value, json};

use super::queue::{Failed, FetchQueue, ReadJob};
use super::transfer::{Next, Transfer};
use super::{Backend, Deadlines, Fetch, FetchCallback, ReadBuffer, Settings};
use crate::counters::Counters;
use crate::error::{Error, Result, shown_path};
use crate::source::{FileSystem, QueueKey, Source};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How long a thread without work stays.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// Reads shorter than this are answered by the ring's thread: to call another one for them takes
/// longer than the answer.
const ANSWERED_HERE_MAX: usize = 64 << 10;

/// Fewest and most threads that give the answers of a ring, one for each processor in between.
/// Two, so that one that is held up is not all.
const ANSWERING: (usize, usize) = (2, 8);

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
    file_system: FileSystem,
    pub(super) settings: Settings,
    pub(super) counters: Arc<Counters>,
    deadlines: Deadlines,
    /// Carries out reads in a ring, on the thread that calls it.
    driver: RingDriver,
    /// Whether the file system has refused O_DIRECT.
    direct_refused: AtomicBool,
    /// Most threads that give answers.
    answering_max: usize,
    pub(super) state: Mutex<State>,
    /// For threads of the pool: there is work, or the end.
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
    /// Reads that are over: the pool gives the answers. Their deadlines go on until then.
    pub(super) over: VecDeque<CompletedRead>,
    /// Threads that give answers of those.
    answering: usize,
    /// Threads, that of the ring included.
    threads: usize,
    /// Threads with a job, until they ask for the next.
    busy: usize,
    /// Threads that wait for work, and how many of them were called and have not come yet.
    idle: usize,
    called: usize,
    /// Why no thread could be started when one was needed last.
    no_thread: Option<String>,
}

/// A read that is over, and how it ended.
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
    /// It will be, from the first fetch on.
    Wanted,
    /// Its thread sets it up.
    Starting,
    /// It is; `asleep` while its thread waits and was not called.
    On { waker: Arc<Waker>, asleep: bool },
    /// It is not, for this reason.
    Off(String),
    /// It never would be.
    #[default]
    Never,
}

impl DeviceQueue {
    pub(super) fn new(
        source: &Source,
        settings: Settings,
        counters: Arc<Counters>,
        deadlines: Deadlines,
        driver: RingDriver,
    ) -> DeviceQueue {
        let Source::Local(local) = source;
        let mut state = State::default();
        if !source.may_block() && settings.backend != Backend::Pread {
            state.ring = RingState::Wanted;
        }
        DeviceQueue {
            key: source.queue_key(),
            file_system: local.file_system(),
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

    /// Takes a fetch in; its number.
    pub(super) fn submit(self: &Arc<Self>, fetch: Fetch) -> u64 {
        let mut state = self.state.lock();
        let id = state.queue.push(fetch, Instant::now());
        self.wake_from(state);
        id
    }

    pub(super) fn promote(&self, id: u64) {
        self.state.lock().queue.promote(id, Instant::now());
    }

    /// Sees to it that someone takes the work that can be done now, if there is any.
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

    /// Calls a thread of the pool, or starts one. Returns whether one comes.
    fn call_pool(self: &Arc<Self>) -> bool {
        {
            let mut state = self.state.lock();
            if state.idle > state.called {
                state.called += 1;
                self.work.notify_one();
                return true;
            }
            // A thread on its way to the queue takes it, and calls further ones.
            if state.busy < state.threads {
                return true;
            }
            state.threads += 1;
        }
        let queue = self.clone();
        self.start_thread(move || queue.work_in_pool())
    }

    /// Starts a thread, which is counted already.
    fn start_thread(&self, work: impl FnOnce() + Send + 'static) -> bool {
        let thread = std::thread::Builder::new().name("tensorfs-read".to_owned());
        let started = thread.spawn(work);
        if let Err(e) = &started {
            self.thread_failed(e);
        }
        started.is_ok()
    }

    /// Leaves a read to the pool, on behalf of the ring's thread: one through the page cache
    /// waits and copies, and this thread is there for all.
    pub(super) fn hand_over(self: &Arc<Self>, id: u64, transfer: Transfer) {
        self.state.lock().handed.push_back((id, transfer));
        if !self.call_pool() {
            let handed = self.state.lock().handed.pop_front();
            if let Some((id, transfer)) = handed {
                self.carry(id, || self.read(transfer));
            }
        }
    }

    /// Answers a read of the ring's thread that is over. To copy many bytes to where they belong,
    /// and to the readers, takes longer than to read them: that is done by the pool, because
    /// there is one thread of the ring for all.
    pub(super) fn over(self: &Arc<Self>, id: u64, transfer: Transfer, result: Result<()>) {
        let over = CompletedRead { id, transfer, result };
        let call = {
            let mut state = self.state.lock();
            if over.transfer.len() < ANSWERED_HERE_MAX || !state.queue.is_long(id) {
                drop(state);
                return self.answer_over(over);
            }
            state.over.push_back(over);
            state.may_answer(self.answering_max)
        };
        // Without a call one of those that give answers takes it next.
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
        loop {
            let (file, offset, target) = transfer.next();
            let result = file.read_at(target, offset);
            self.count_read(&transfer, &result);
            match transfer.advance(result) {
                Next::Read => {}
                Next::End(result) => return result.and_then(|()| transfer.finish()),
            }
        }
    }

    /// Reads and answers.
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
        let mut state = self.state.lock();
        state.ring = RingState::On { waker, asleep: false };
        state.busy += 1;
    }

    /// The thread of the ring carries out no more reads there.
    pub(super) fn ring_ends(&self) {
        self.state.lock().busy -= 1;
    }

    /// The next job for the thread of the ring. With none, the thread waits in the kernel from
    /// now on; `drained` says whether nothing is there to come back.
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

    /// The thread of the ring has come back from the kernel: it needs no call.
    pub(super) fn ring_is_awake(&self) {
        if let RingState::On { asleep, .. } = &mut self.state.lock().ring {
            *asleep = false;
        }
    }

    /// Counts one system call that read, or failed to.
    pub(super) fn count_read(&self, transfer: &Transfer, result: &io::Result<usize>) {
        self.counters.source_reads.add(1);
        self.counters.source_reads_direct.add(u64::from(transfer.is_direct()));
        if transfer.is_refused() {
            self.direct_refused.store(true, Ordering::Relaxed);
        }
        self.counters.source_bytes.add(*result.as_ref().unwrap_or(&0) as u64);
    }

    /// A thread could not be started. While there is another one, that does the work.
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
            self.deadlines.call();
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
                    // Others may be able to go as well.
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

    /// Waits for something to do; `busy` says whether this thread had something.
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

    /// Answers a fetch that has come back, unless it was answered already.
    pub(super) fn finish(self: &Arc<Self>, id: u64, result: Result<ReadBuffer>) {
        let (done, ring_waits) = {
            let mut state = self.state.lock();
            let done = state.queue.finish(id);
            let asleep = matches!(state.ring, RingState::On { asleep: true, .. });
            (done, asleep && state.queue.has_work())
        };
        // A thread of the pool goes on by itself. The ring's thread does not know that the pool
        // made room.
        if ring_waits {
            self.wake();
        }
        let Some(done) = done else {
            self.counters.source_stuck_now.sub(1);
            drop(result);
            self.wake();
            return;
        };
        self.counters.source_reads_now.sub(1);
        if result.is_err() {
            self.counters.source_errors.add(1);
        }
        answer(done, result);
    }

    /// Answers fetches that are overdue with an error. When the next one will be.
    pub(super) fn expire(&self, now: Instant) -> Option<Instant> {
        let no_thread = {
            let mut state = self.state.lock();
            if state.threads > 0 { None } else { state.no_thread.take() }
        };
        if let Some(reason) = no_thread {
            let failed = self.state.lock().queue.fail_queued();
            for Failed { source, done, .. } in failed {
                let e = io::Error::other(format!("no thread can be started: {reason}"));
                answer(done, Err(Error::io(source.path(), "read", e)));
            }
        }
        let timeout = self.settings.timeout?;
        let (overdue, oldest) = {
            let mut state = self.state.lock();
            let stuck = state.queue.stuck();
            let overdue = state.queue.expire(now, timeout);
            let stuck = (state.queue.stuck() - stuck) as u64;
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
            answer(done, Err(Error::io(source.path(), "read", e)));
        }
        // Readers first: who logs may have to wait for the log.
        for (source, offset) in stalled {
            let path = shown_path(source.path());
            tracing::error!(
                "{path}: the bytes at {offset} did not come within {seconds} s; reads that wait \
                 so long fail"
            );
        }
        oldest?.checked_add(timeout)
    }

    /// Ends the queue: its threads go, and whoever waits gets an error.
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
            answer(done, Err(Error::io(source.path(), "read", e)));
        }
    }

    /// State and settings of the queue, for people.
    pub(super) fn describe(&self) -> Value {
        let state = self.state.lock();
        let (backend, why) = match &state.ring {
            RingState::On { .. } => ("io_uring", None),
            RingState::Wanted | RingState::Starting => ("not started", None),
            RingState::Off(reason) => ("pread", Some(reason.clone())),
            RingState::Never if self.settings.backend == Backend::Pread => {
                ("pread", Some("asked for".to_owned()))
            }
            RingState::Never => ("pread", Some("the file system may wait for others".to_owned())),
        };
        let threads = state.threads;
        json!({
            "device": self.key.to_string(),
            "file_system": self.file_system.name(),
            "local": self.file_system.is_local(),
            "backend": backend,
            "why": why,
            "direct": self.settings.direct.as_str(),
            "direct_refused": self.direct_refused.load(Ordering::Relaxed),
            "threads": threads,
            "queued": state.queue.queued(),
            "in_flight": state.queue.in_flight(),
            "stuck": state.queue.stuck(),
        })
    }
}

impl State {
    /// Whether a thread of the pool may take a read that is over.
    fn may_answer(&self, most: usize) -> bool {
        self.answering < most && !self.over.is_empty()
    }
}

/// Does `work`; a panic in it fails one read, and no more.
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
