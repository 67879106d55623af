//! A job: units of a file that are compared together.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::coalesce::coalesce;
use crate::error::Error;
use crate::hash::Digest;
use crate::index::ChecksumChunk;
use crate::source::Source;
use crate::sync::Mutex;

use super::{ChecksumGate, WaitingRead};

/// Maximum number of bytes that are read at a time.
pub(super) const STEP_LEN: u64 = 4 << 20;

/// Units that are compared together, because they belong to the same request.
pub(super) struct ChecksumJob {
    gate: Arc<ChecksumGate>,
    pub(super) units: Vec<u32>,
    state: Mutex<JobState>,
    /// Changed only while the lock of the gate is held.
    waiters: Mutex<Vec<Arc<WaitingRead>>>,
}

struct JobState {
    /// The steps that were not begun, in reverse order.
    left: Vec<Step>,
    in_flight: usize,
    /// Time of the last progress.
    since: Instant,
    outcome: JobOutcome,
    ended: bool,
}

/// The result of a job.
#[derive(Default)]
#[must_use]
pub(super) struct JobOutcome {
    /// The error of each unit that differs.
    pub(super) bad: HashMap<u32, Arc<Error>>,
    /// The error, if bytes of the job could not be read.
    pub(super) failed: Option<Arc<Error>>,
}

/// One step of a job: consecutive chunks of a shard.
pub(super) struct Step {
    pub(super) shard: u32,
    pub(super) range: Range<u64>,
}

impl ChecksumJob {
    pub(super) fn new(gate: &Arc<ChecksumGate>, units: Vec<u32>) -> ChecksumJob {
        let mut left = steps(gate, &units);
        left.reverse();
        let (since, outcome) = (Instant::now(), JobOutcome::default());
        let state = JobState { left, in_flight: 0, since, outcome, ended: false };
        ChecksumJob {
            gate: gate.clone(),
            units,
            state: Mutex::new(state),
            waiters: Mutex::default(),
        }
    }

    pub(super) fn add_waiter(&self, waiting: Arc<WaitingRead>) {
        self.waiters.lock().push(waiting);
    }

    pub(super) fn take_waiters(&self) -> Vec<Arc<WaitingRead>> {
        std::mem::take(&mut *self.waiters.lock())
    }

    /// The source of the next step, if there is one.
    pub(super) fn next_source(&self) -> Option<Arc<Source>> {
        let state = self.state.lock();
        state.left.last().map(|step| self.gate.source(step.shard).clone())
    }

    /// Takes the next step.
    pub(super) fn begin(&self) -> Option<Step> {
        let mut state = self.state.lock();
        let step = state.left.pop()?;
        state.in_flight += 1;
        Some(step)
    }

    /// Puts back a step for which there is no memory.
    pub(super) fn put_back(&self, step: Step) {
        let mut state = self.state.lock();
        state.in_flight -= 1;
        if !state.ended {
            state.left.push(step);
        }
    }

    /// Compares the bytes that a step has read.
    pub(super) fn compare(&self, step: &Step, bytes: &[u8]) {
        let sums = &self.gate.sums[step.shard as usize];
        for chunk in sums.boundaries.chunks_of(step.range.clone()) {
            let within = chunk.range.start - step.range.start..chunk.range.end - step.range.start;
            let found = Digest::of(&bytes[within.start as usize..within.end as usize]);
            if found != sums.digests[chunk.number] {
                self.differs(step.shard, &chunk, found);
            }
        }
    }

    fn differs(&self, shard: u32, chunk: &ChecksumChunk, found: Digest) {
        let touches = |unit: &u32| {
            let overlap = |(other, bytes): &(u32, Range<u64>)| {
                *other == shard && bytes.start < chunk.range.end && chunk.range.start < bytes.end
            };
            self.gate.bytes_of(*unit).iter().any(overlap)
        };
        let known = |unit: &u32| self.state.lock().outcome.bad.contains_key(unit);
        let units: Vec<u32> =
            self.units.iter().copied().filter(touches).filter(|unit| !known(unit)).collect();
        if units.is_empty() {
            return;
        }
        let error = Arc::new(self.gate.mismatch(shard, chunk, found));
        let mut state = self.state.lock();
        state.outcome.bad.extend(units.into_iter().map(|unit| (unit, error.clone())));
        if state.outcome.bad.len() == self.units.len() {
            // All units differ, so no further bytes are needed.
            state.left.clear();
        }
        drop(state);
        tracing::error!("{error}; reads of it through the mount fail");
    }

    /// Notes that a step has ended, with its error if its bytes could not be read. If this ends the job,
    /// returns the outcome for `end`.
    pub(super) fn step_ended(&self, failed: Option<Error>) -> Option<JobOutcome> {
        let mut state = self.state.lock();
        state.in_flight -= 1;
        state.since = Instant::now();
        if let Some(error) = failed {
            state.left.clear();
            state.outcome.failed.get_or_insert(Arc::new(error));
        }
        let done = state.left.is_empty() && state.in_flight == 0;
        let ended = done || state.outcome.failed.is_some();
        if state.ended || !ended {
            return None;
        }
        state.ended = true;
        Some(std::mem::take(&mut state.outcome))
    }

    /// Ends a job that had no progress since `before`, with an error. Returns the outcome for `end`.
    pub(super) fn expire(
        &self,
        before: Instant,
        late: impl FnOnce(&Source) -> Error,
    ) -> Option<JobOutcome> {
        let mut state = self.state.lock();
        if state.ended || state.since > before {
            return None;
        }
        state.ended = true;
        state.left.clear();
        let mut outcome = std::mem::take(&mut state.outcome);
        drop(state);
        let shard = self.units.first().and_then(|&unit| Some(self.gate.bytes_of(unit).first()?.0));
        let source = self.gate.source(shard.unwrap_or(0));
        outcome.failed = Some(Arc::new(late(source)));
        Some(outcome)
    }

    /// Whether the job has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().ended
    }

    /// Ends a job that has nothing to read.
    pub(super) fn end_if_empty(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.left.is_empty() && state.in_flight == 0 && !state.ended {
            state.ended = true;
            let outcome = std::mem::take(&mut state.outcome);
            drop(state);
            self.end(outcome);
        }
    }

    /// Answers the requests that wait for the job.
    pub(super) fn end(self: &Arc<Self>, outcome: JobOutcome) {
        self.gate.ended(self, outcome);
    }

    /// The sources of the job.
    pub(super) fn sources(&self) -> Vec<Arc<Source>> {
        let mut shards: Vec<u32> = self
            .units
            .iter()
            .flat_map(|&unit| self.gate.bytes_of(unit))
            .map(|(shard, _)| shard)
            .collect();
        shards.sort_unstable();
        shards.dedup();
        shards.into_iter().map(|shard| self.gate.source(shard).clone()).collect()
    }
}

/// The chunks of `units`. Consecutive chunks become one step.
fn steps(gate: &ChecksumGate, units: &[u32]) -> Vec<Step> {
    let mut chunks: Vec<(u32, ChecksumChunk)> = Vec::new();
    for (shard, range) in units.iter().flat_map(|&unit| gate.bytes_of(unit)) {
        let sums = &gate.sums[shard as usize];
        chunks.extend(sums.boundaries.chunks_of(range).map(|chunk| (shard, chunk)));
    }
    chunks.sort_unstable_by_key(|(shard, chunk)| (*shard, chunk.number));
    chunks.dedup();
    let same_shard = |first: &(u32, ChecksumChunk), next: &(u32, ChecksumChunk)| first.0 == next.0;
    let steps = coalesce(&chunks, |(_, chunk)| &chunk.range, same_shard, 0, STEP_LEN);
    steps.map(|(range, group)| Step { shard: group[0].0, range }).collect()
}
