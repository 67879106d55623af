//! Reads the bytes that gates compare with checksums, for all files of a mount. Jobs take turns, with a few
//! steps each. So a large tensor does not delay small tensors, and a stalled shard does not delay other
//! shards.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::error::{Error, Result};
use crate::io::{
    Budget, Buffer, Deadlines, Effort, Engine, EngineStatus, Fetch, PerSourceLimiter, Priority,
    ReadBuffer, SourceKey,
};
use crate::source::{Source, release_unpinned};
use crate::sync::Mutex;

use super::job::{ChecksumJob, JobOutcome, STEP_LEN, Step};

/// Maximum number of steps that are read concurrently, in total and of one source.
const STEPS_MAX: usize = 8;
const SOURCE_STEPS_MAX: u64 = 4;

/// Time after which a running step no longer counts for `STEPS_MAX`, because its source may never answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Maximum number of running steps, including slow ones.
const SLOW_STEPS_MAX: u64 = 64;

/// Maximum memory of a step in bytes. A step may begin and end inside a page.
const STEP_MEMORY: u64 = STEP_LEN + (64 << 10);

/// Maximum memory of all steps in bytes, while sources answer.
pub const MEMORY: u64 = STEPS_MAX as u64 * STEP_MEMORY;

/// Time between two checks for overdue jobs.
const TICK: Duration = Duration::from_millis(250);

/// The state of a checker, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CheckerStatus {
    /// The engine of the checker.
    #[serde(flatten)]
    pub engine: EngineStatus,
    /// Number of jobs that have not ended.
    pub jobs: usize,
}

/// Reads the bytes that gates compare. Clones share the work.
#[derive(Clone)]
pub struct Checker(Arc<CheckerInner>);

struct CheckerInner {
    engine: Engine,
    budget: Budget,
    counters: Arc<Counters>,
    /// Maximum time that a job may go without progress.
    timeout: Option<Duration>,
    deadlines: Deadlines,
    state: Mutex<CheckerState>,
}

struct CheckerState {
    /// Jobs with further steps. The first job has the next turn.
    queue: VecDeque<Arc<ChecksumJob>>,
    /// All jobs that have not ended.
    jobs: Vec<Arc<ChecksumJob>>,
    /// Start times of the running steps.
    running: Vec<Instant>,
    /// Number of running steps by source. The steps keep their sources alive.
    steps: PerSourceLimiter<SourceKey>,
}

impl Default for CheckerState {
    fn default() -> CheckerState {
        CheckerState {
            queue: VecDeque::new(),
            jobs: Vec::new(),
            running: Vec::new(),
            steps: PerSourceLimiter::new(SOURCE_STEPS_MAX, SLOW_STEPS_MAX),
        }
    }
}

impl Drop for CheckerInner {
    fn drop(&mut self) {
        self.deadlines.wake();
    }
}

impl Checker {
    /// Creates a checker that reads with `engine`. A job without progress for `timeout` fails.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        engine: Engine,
        counters: Arc<Counters>,
        timeout: Option<Duration>,
    ) -> io::Result<Checker> {
        let budget = Budget::new(SLOW_STEPS_MAX * STEP_MEMORY, counters.clone());
        let (deadlines, state) = (Deadlines::default(), Mutex::default());
        let inner = Arc::new(CheckerInner { engine, budget, counters, timeout, deadlines, state });
        inner.deadlines.start_ticks(
            "checksums",
            Arc::downgrade(&inner),
            TICK,
            CheckerInner::tick,
        )?;
        Ok(Checker(inner))
    }

    /// The state of the checker, for `status`.
    pub fn status(&self) -> CheckerStatus {
        CheckerStatus { engine: self.0.engine.status(), jobs: self.0.state.lock().jobs.len() }
    }

    /// Queues a job. Never waits.
    pub(super) fn submit(&self, job: Arc<ChecksumJob>) {
        let mut state = self.0.state.lock();
        state.jobs.push(job.clone());
        state.queue.push_back(job.clone());
        drop(state);
        job.end_if_empty();
        self.0.deadlines.added();
        self.0.dispatch();
    }
}

impl CheckerInner {
    /// Begins steps until the maximum number is running.
    fn dispatch(self: &Arc<Self>) {
        loop {
            let next = self.state.lock().next();
            let Some((job, step, source, begun)) = next else { return };
            let memory = Buffer::len_for(&step.range);
            let Some(reservation) = self.budget.try_reserve(memory) else {
                // When a running step ends, it returns its memory and calls this function again.
                job.put_back(step);
                let mut state = self.state.lock();
                state.ended(&source, begun);
                state.queue.retain(|other| !Arc::ptr_eq(other, &job));
                state.queue.push_front(job);
                return;
            };
            let (this, of, range) = (self.clone(), source.clone(), step.range.clone());
            let done = move |outcome| this.step_done(&job, &step, &of, begun, outcome);
            let target = reservation.into();
            let (priority, effort, done) = (Priority::Demand, Effort::Long, Box::new(done));
            self.engine.submit(Fetch {
                source,
                range,
                cached: None,
                priority,
                effort,
                // The checksums were computed from the stored bytes.
                stored: true,
                target,
                done,
            });
        }
    }

    fn step_done(
        self: &Arc<Self>,
        job: &Arc<ChecksumJob>,
        step: &Step,
        source: &Arc<Source>,
        begun: Instant,
        outcome: Result<ReadBuffer>,
    ) {
        let failed = match outcome {
            Ok(bytes) => {
                // A job that has ended does not need the bytes.
                if !job.has_ended() {
                    job.compare(step, &bytes);
                    self.counters.checked_bytes.add(bytes.len() as u64);
                }
                None
            }
            Err(error) => Some(error),
        };
        self.state.lock().ended(source, begun);
        if let Some(outcome) = job.step_ended(failed) {
            self.end(job, outcome);
            let mut state = self.state.lock();
            state.jobs.retain(|other| !Arc::ptr_eq(other, job));
            state.queue.retain(|other| !Arc::ptr_eq(other, job));
            drop(state);
            // The job may have opened sources again after the file of the request was closed.
            release_unpinned(&job.sources());
        }
        self.dispatch();
    }

    /// Answers the requests that wait for a job. The counters change before that.
    fn end(&self, job: &Arc<ChecksumJob>, outcome: JobOutcome) {
        self.counters.checksum_mismatches.add(outcome.bad.len() as u64);
        job.end(outcome);
    }

    /// Ends overdue jobs. Returns whether jobs or steps are left.
    fn tick(self: &Arc<Self>) -> bool {
        let jobs = self.state.lock().jobs.clone();
        if let Some(timeout) = self.timeout
            && let Some(before) = Instant::now().checked_sub(timeout)
        {
            for job in jobs {
                let late = |source: &Source| late(source, timeout);
                if let Some(outcome) = job.expire(before, late) {
                    self.counters.source_timeouts.add(1);
                    self.end(&job, outcome);
                    release_unpinned(&job.sources());
                }
            }
        }
        let mut state = self.state.lock();
        state.jobs.retain(|job| !job.has_ended());
        state.queue.retain(|job| !job.has_ended());
        let busy = !state.jobs.is_empty() || !state.running.is_empty();
        drop(state);
        self.dispatch();
        if !busy {
            self.budget.trim();
        }
        busy
    }
}

impl CheckerState {
    /// Takes the next step from the first job whose source has fewer than `SOURCE_STEPS_MAX` running steps.
    /// This job is then moved to the end of the queue.
    fn next(&mut self) -> Option<(Arc<ChecksumJob>, Step, Arc<Source>, Instant)> {
        let now = Instant::now();
        let quick = self.running.iter().filter(|begun| now - **begun < PATIENCE).count();
        if quick >= STEPS_MAX || !self.steps.has_room() {
            return None;
        }
        let mut index = 0;
        while let Some(job) = self.queue.get(index).cloned() {
            let Some(source) = job.next_source() else {
                self.queue.remove(index);
                continue;
            };
            if !self.steps.has_room_for(&SourceKey::of(&source)) {
                index += 1;
                continue;
            }
            self.queue.remove(index);
            let Some(step) = job.begin() else { continue };
            self.running.push(now);
            self.steps.take(SourceKey::of(&source), 1);
            self.queue.push_back(job.clone());
            return Some((job, step, source, now));
        }
        None
    }

    /// Notes that the step of `source` that began at `begun` has ended.
    fn ended(&mut self, source: &Arc<Source>, begun: Instant) {
        let index = self.running.iter().position(|other| *other == begun);
        index.map(|index| self.running.swap_remove(index));
        self.steps.give_back(&SourceKey::of(source), 1);
    }
}

/// The error if bytes are not compared in time.
fn late(source: &Source, timeout: Duration) -> Error {
    let seconds = timeout.as_secs_f64();
    let message =
        format!("its bytes to compare with the checksums did not come within {seconds} s");
    Error::io(source.uri(), "read", io::Error::new(io::ErrorKind::TimedOut, message))
}
