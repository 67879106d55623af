//! Blocking calls to a source, which may never answer. Each call runs on a thread of its own, and
//! the reply that waits for it has a deadline.
//!
//! A thread that waits for the source cannot be interrupted. It runs until its call returns, and a
//! late result is dropped. The number of threads is bounded, for each file and in total. If no
//! thread is free, a call waits in a queue until its deadline. If all threads are past their
//! deadlines, the call fails at once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorfs::Secret;
use tensorfs::internal::counters::Counters;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::io::{Deadlines, NextLook, PerSourceLimiter};
use tensorfs::internal::sync::Mutex;
use tracing::Span;

use super::in_flight::{InFlight, Unanswered};

/// Maximum number of threads for one file, so that a stalled file does not take all threads.
const PLACE_MAX: u64 = 4;

/// Maximum number of threads in total.
const THREADS_MAX: u64 = 64;

/// Maximum number of paths in `State::told`. When it is full, stalls of further paths are not logged.
const TOLD_MAX: usize = 1024;

/// A reply that can fail.
pub(crate) trait Fail: Send + 'static {
    /// Replies with an error.
    fn fail(self);
}

/// The blocking calls of one mount.
#[derive(Clone)]
pub(crate) struct BlockingPool(Arc<PoolShared>);

struct PoolShared {
    in_flight: InFlight,
    timeout: Option<Duration>,
    counters: Arc<Counters>,
    /// The secret of the source. If the derivation of a key delays a call, the log names this
    /// derivation as the reason.
    secret: Option<Arc<Secret>>,
    state: Mutex<State>,
    deadlines: Deadlines,
}

impl Drop for PoolShared {
    fn drop(&mut self) {
        self.deadlines.wake();
    }
}

struct State {
    next: u64,
    /// The replies that have a deadline, by number. The reply with the lowest number is due first.
    due: BTreeMap<u64, Due>,
    /// Number of threads that work for each path.
    threads: PerSourceLimiter<PathBuf>,
    /// Number of threads for each path that are past their deadline.
    held: PerSourceLimiter<PathBuf>,
    /// Numbers of failed replies whose threads are still blocked.
    late: BTreeSet<u64>,
    queue: VecDeque<BlockingJob>,
    /// Paths whose last call passed its deadline. No call about them has ended since.
    told: BTreeSet<PathBuf>,
}

impl Default for State {
    fn default() -> State {
        State {
            next: 0,
            due: BTreeMap::new(),
            threads: PerSourceLimiter::new(PLACE_MAX, THREADS_MAX),
            held: PerSourceLimiter::new(PLACE_MAX, THREADS_MAX),
            late: BTreeSet::new(),
            queue: VecDeque::new(),
            told: BTreeSet::new(),
        }
    }
}

struct Due {
    deadline: Instant,
    /// Whether a thread works on the request.
    asked: bool,
    place: PathBuf,
    reply: Arc<dyn Late>,
}

struct BlockingJob {
    place: PathBuf,
    /// Number of the reply. `None` if no reply waits for the work.
    number: Option<u64>,
    work: Box<dyn FnOnce() + Send>,
}

/// A reply that may have been sent already.
trait Late: Send + Sync {
    /// Fails the reply. Returns false if it was sent already.
    fn fail(&self) -> bool;
}

impl<R: Fail> Late for Mutex<Option<(R, Unanswered)>> {
    fn fail(&self) -> bool {
        let reply = self.lock().take();
        // The request counts as unanswered until the reply has failed.
        reply.map(|(reply, _unanswered)| reply.fail()).is_some()
    }
}

/// A reply that is neither sent nor past its deadline.
pub(crate) struct PendingReply<R: Fail> {
    pool: BlockingPool,
    number: u64,
    place: PathBuf,
    reply: Arc<Mutex<Option<(R, Unanswered)>>>,
    /// Keeps the request counted as unanswered from the call of `take` until the reply is sent.
    taken: Mutex<Option<Unanswered>>,
}

impl<R: Fail> PendingReply<R> {
    /// The reply. `None` after the deadline. The request counts as answered when this
    /// `PendingReply` is dropped, so the caller keeps it until the reply is sent.
    pub(crate) fn take(&self) -> Option<R> {
        let (reply, unanswered) = self.reply.lock().take()?;
        *self.taken.lock() = Some(unanswered);
        Some(reply)
    }
}

impl<R: Fail> Drop for PendingReply<R> {
    fn drop(&mut self) {
        let mut state = self.pool.0.state.lock();
        let due = state.due.remove(&self.number);
        if due.is_some() && !state.told.is_empty() {
            state.told.remove(&self.place);
        }
        drop(state);
    }
}

/// Runs a handler. If the handler panics, its reply is dropped, which answers EIO.
pub(crate) fn guarded(handler: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(handler)).is_err() {
        tracing::error!("a request failed by a bug in tensorfs and was answered with EIO");
    }
}

/// The span of the current request. If requests are not traced, the only cost is one check.
pub(crate) fn current_span() -> Span {
    if tracing::enabled!(tracing::Level::TRACE) { Span::current() } else { Span::none() }
}

/// Runs `work` on a thread of its own. `work` must not access the source, but may wait. If no
/// thread starts, `work` is dropped. Returns whether it runs.
pub(crate) fn offload(work: impl FnOnce() + Send + 'static) -> bool {
    let thread = std::thread::Builder::new().name("offload".to_owned());
    let started = thread.spawn(move || guarded(work));
    if let Err(e) = &started {
        tracing::error!("cannot start a thread: {e}");
    }
    started.is_ok()
}

impl BlockingPool {
    /// Starts the thread that keeps the deadlines.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start(
        timeout: Option<Duration>,
        counters: Arc<Counters>,
        secret: Option<Arc<Secret>>,
    ) -> std::io::Result<BlockingPool> {
        let (state, deadlines) = (Mutex::default(), Deadlines::default());
        let in_flight = InFlight::default();
        let shared =
            Arc::new(PoolShared { in_flight, timeout, counters, secret, state, deadlines });
        if let Some(timeout) = timeout {
            let weak = Arc::downgrade(&shared);
            let expire =
                move || weak.upgrade().map_or(NextLook::Never, |shared| shared.expire(timeout));
            shared.deadlines.start("deadlines", expire)?;
        }
        Ok(BlockingPool(shared))
    }

    /// The requests that are not answered yet.
    pub(crate) fn in_flight(&self) -> &InFlight {
        &self.0.in_flight
    }

    /// Makes a pending reply about `place`, a path in the mount. Its deadline starts now.
    pub(crate) fn pending<R: Fail>(&self, place: &Path, reply: R) -> PendingReply<R> {
        let unanswered = self.0.in_flight.begin();
        let (place, reply) = (place.to_owned(), Arc::new(Mutex::new(Some((reply, unanswered)))));
        let mut state = self.0.state.lock();
        let number = state.next;
        state.next += 1;
        if let Some(timeout) = self.0.timeout {
            let deadline = Instant::now() + timeout;
            let due = Due { deadline, asked: false, place: place.clone(), reply: reply.clone() };
            state.due.insert(number, due);
        }
        drop(state);
        self.0.deadlines.added();
        PendingReply { pool: self.clone(), number, place, reply, taken: Mutex::default() }
    }

    /// Runs `work`, which accesses the source for a reply, on a thread of its own. If the deadline
    /// passes before a thread is free, `work` does not run. If no thread starts, the reply fails.
    pub(crate) fn spawn<R: Fail>(
        &self,
        pending: PendingReply<R>,
        work: impl FnOnce(PendingReply<R>) + Send + 'static,
    ) {
        let (place, number) = (pending.place.clone(), Some(pending.number));
        let span = current_span();
        let asked = (!span.is_disabled()).then(Instant::now);
        let work = move || {
            let _span = span.entered();
            if let Some(asked) = asked {
                tracing::trace!(waited_us = asked.elapsed().as_micros() as u64, "begun");
            }
            work(pending);
        };
        self.run(BlockingJob { place, number, work: Box::new(work) });
    }

    /// Runs `work` on a thread of its own. No reply waits for the work, so it has no deadline.
    pub(crate) fn spawn_detached(&self, place: &Path, work: impl FnOnce() + Send + 'static) {
        self.run(BlockingJob { place: place.to_owned(), number: None, work: Box::new(work) });
    }

    fn run(&self, job: BlockingJob) {
        let mut state = self.0.state.lock();
        if let Some(number) = job.number.filter(|_| self.0.timeout.is_some()) {
            let gone = !state.due.contains_key(&number);
            if gone || state.is_stuck(&job.place) {
                let due = state.due.remove(&number);
                drop(state);
                if let Some(due) = due {
                    due.reply.fail();
                }
                return;
            }
        }
        if !state.has_room(&job.place) {
            return state.queue.push_back(job);
        }
        state.begin(&job);
        drop(state);
        let (pool, number, place) = (self.clone(), job.number, job.place.clone());
        let thread = std::thread::Builder::new().name("ask".to_owned());
        if let Err(e) = thread.spawn(move || pool.work(job)) {
            tracing::error!("cannot start a thread: {e}");
            self.give_up(number, place);
        }
    }

    /// Drops the jobs that could begin now, because no thread starts for them.
    fn give_up(&self, mut number: Option<u64>, mut place: PathBuf) {
        loop {
            let next = self.0.state.lock().ended(number, &place);
            let Some(job) = next else { return };
            (number, place) = (job.number, job.place.clone());
        }
    }

    /// The body of a thread: runs `job` and then jobs from the queue.
    fn work(&self, job: BlockingJob) {
        let mut next = Some(job);
        while let Some(BlockingJob { place, number, work }) = next {
            guarded(work);
            next = self.0.state.lock().ended(number, &place);
        }
    }
}

impl PoolShared {
    /// Fails the replies whose deadline has passed.
    fn expire(&self, timeout: Duration) -> NextLook {
        let (late, unasked) = self.state.lock().expired(Instant::now());
        let failed: Vec<Due> = late.into_iter().filter(|due| due.reply.fail()).collect();
        failed.into_iter().for_each(|due| self.note_late(due, timeout));
        drop(unasked);
        let next = self.state.lock().due.first_key_value().map(|(_, due)| due.deadline);
        next.map_or(NextLook::WhenCalled, NextLook::At)
    }

    /// Counts a reply that has failed. Logs the first failed reply of a stall.
    fn note_late(&self, due: Due, timeout: Duration) {
        self.counters.source_timeouts.add(1);
        let mut state = self.state.lock();
        if state.told.len() < TOLD_MAX && state.told.insert(due.place.clone()) {
            drop(state);
            let root = due.place.as_os_str().is_empty();
            let path = shown_path(if root { Path::new(".") } else { &due.place });
            let seconds = timeout.as_secs_f64();
            let why = match &self.secret {
                Some(secret) if secret.is_deriving() => format!(
                    "the keys of the source have not been derived from the passphrase within \
                     {seconds} seconds"
                ),
                _ => format!("the source has not answered within {seconds} seconds"),
            };
            tracing::error!(file = path, "{path}: {why}");
        }
    }
}

impl State {
    fn has_room(&self, place: &Path) -> bool {
        self.threads.has_room_for(place)
    }

    /// Whether all threads that `place` may use are past their deadlines.
    fn is_stuck(&self, place: &Path) -> bool {
        !self.held.has_room_for(place)
    }

    fn begin(&mut self, job: &BlockingJob) {
        self.threads.take(job.place.clone(), 1);
        if let Some(due) = job.number.and_then(|number| self.due.get_mut(&number)) {
            due.asked = true;
        }
    }

    /// Notes the end of a job, and returns the next job for its thread.
    fn ended(&mut self, number: Option<u64>, place: &Path) -> Option<BlockingJob> {
        self.threads.give_back(place, 1);
        if number.is_some_and(|number| self.late.remove(&number)) {
            self.held.give_back(place, 1);
        }
        let index = self.queue.iter().position(|job| self.has_room(&job.place))?;
        let job = self.queue.remove(index)?;
        self.begin(&job);
        Some(job)
    }

    /// Removes the replies whose deadline has passed, and the jobs whose replies are gone. Dropping
    /// them takes the lock of the state, so the caller drops them after it has released the lock.
    fn expired(&mut self, now: Instant) -> (Vec<Due>, Vec<BlockingJob>) {
        let mut late = Vec::new();
        while let Some(first) = self.due.first_entry().filter(|first| first.get().deadline <= now) {
            let (number, due) = first.remove_entry();
            if due.asked {
                self.late.insert(number);
                self.held.take(due.place.clone(), 1);
            }
            late.push(due);
        }
        let waits =
            |job: &BlockingJob| job.number.is_none_or(|number| self.due.contains_key(&number));
        let (queue, unasked) = std::mem::take(&mut self.queue).into_iter().partition(waits);
        self.queue = queue;
        (late, unasked.into_iter().collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Sends whether the reply is an answer (true) or an error (false).
    struct TestReply(Sender<bool>);

    impl Fail for TestReply {
        fn fail(self) {
            let _ = self.0.send(false);
        }
    }

    /// The timeout is long enough that a busy machine is not taken for a stalled source.
    const TIMEOUT: Duration = Duration::from_millis(1500);

    fn pool() -> (BlockingPool, Arc<Counters>) {
        let counters = Arc::new(Counters::default());
        (BlockingPool::start(Some(TIMEOUT), counters.clone(), None).unwrap(), counters)
    }

    /// Sends a request about `place` to a source that answers once `held` is dropped.
    fn ask(pool: &BlockingPool, place: &str, held: &Arc<Mutex<()>>) -> Receiver<bool> {
        let (send, receive) = channel();
        let pending = pool.pending(Path::new(place), TestReply(send));
        let held = held.clone();
        pool.spawn(pending, move |pending| {
            drop(held.lock());
            if let Some(TestReply(send)) = pending.take() {
                let _ = send.send(true);
            }
        });
        receive
    }

    fn wait_for(condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_reply_in_time_is_given_and_one_that_is_late_fails_once() {
        let (pool, counters) = pool();
        let (free, stalled) = (Arc::default(), Arc::new(Mutex::new(())));
        assert!(ask(&pool, "a", &free).recv().unwrap());
        let held = stalled.lock();
        let start = Instant::now();
        let late = ask(&pool, "b", &stalled);
        assert!(!late.recv().unwrap());
        assert!(start.elapsed() >= TIMEOUT);
        // The counter changes just after the reply is sent.
        wait_for(|| counters.source_timeouts.get() == 1);
        drop(held);
        // The sender is dropped and has sent no second reply.
        assert!(late.recv().is_err());
        wait_for(|| pool.0.state.lock().threads.total() == 0);
        assert!(ask(&pool, "b", &stalled).recv().unwrap());
        wait_for(|| pool.0.state.lock().told.is_empty());
    }

    #[test]
    fn a_place_that_stalls_takes_few_threads_and_keeps_no_other_waiting() {
        let (pool, counters) = pool();
        let (free, stalled) = (Arc::default(), Arc::new(Mutex::new(())));
        let held = stalled.lock();
        let late: Vec<_> = (0..50).map(|_| ask(&pool, "b", &stalled)).collect();
        let start = Instant::now();
        assert!(ask(&pool, "a", &free).recv().unwrap());
        assert!(start.elapsed() < TIMEOUT);
        assert!(late.iter().all(|late| !late.recv().unwrap()));
        wait_for(|| counters.source_timeouts.get() == 50);
        wait_for(|| pool.0.state.lock().queue.is_empty());
        assert_eq!(pool.0.state.lock().threads.total(), PLACE_MAX);
        // All threads of this path are past their deadlines, so further calls fail without waiting.
        let start = Instant::now();
        assert!(!ask(&pool, "b", &stalled).recv().unwrap());
        assert!(start.elapsed() < TIMEOUT);
        assert_eq!(pool.0.state.lock().threads.total(), PLACE_MAX);
        drop(held);
        wait_for(|| pool.0.state.lock().threads.total() == 0);
        assert!(pool.0.state.lock().held.total() == 0 && pool.0.state.lock().late.is_empty());
    }

    #[test]
    fn threads_are_bounded_and_what_waits_for_one_gets_it_or_fails() {
        let (pool, _) = pool();
        let (free, stalled) = (Arc::default(), Arc::new(Mutex::new(())));
        let held = stalled.lock();
        let places = (0..THREADS_MAX).map(|n| ask(&pool, &n.to_string(), &stalled));
        let late: Vec<_> = places.collect();
        let (send, done) = channel();
        pool.spawn_detached(Path::new("proof"), move || send.send(()).unwrap());
        assert!(!ask(&pool, "a", &free).recv().unwrap());
        assert!(late.iter().all(|late| !late.recv().unwrap()));
        assert_eq!(pool.0.state.lock().threads.total(), THREADS_MAX);
        assert!(done.try_recv().is_err());
        drop(held);
        done.recv().unwrap();
        assert!(ask(&pool, "a", &free).recv().unwrap());
    }

    #[test]
    fn a_panic_ends_neither_the_count_nor_those_who_wait() {
        let (pool, _) = pool();
        for _ in 0..PLACE_MAX + 1 {
            pool.spawn_detached(Path::new("a"), || panic!("on purpose"));
        }
        wait_for(|| {
            pool.0.state.lock().threads.total() == 0 && pool.0.state.lock().queue.is_empty()
        });
    }
}
