//! Reads that wait for memory, and which of them goes first.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::ReadRequest;
use crate::io::SourceKey;
use crate::reader::BlockPlan;

/// How long a read lets others overtake it that need less.
const PATIENCE: Duration = Duration::from_secs(1);

/// The reads, oldest first.
#[derive(Default)]
pub(super) struct WaitQueue(VecDeque<QueuedRead>);

/// A read that waits, and for what.
pub(super) struct QueuedRead {
    pub(super) request: ReadRequest,
    pub(super) reason: WaitReason,
}

/// Why a read could not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitReason {
    /// There is too little memory for it.
    Memory,
    /// This source has too much of it under way.
    SourceQuota(SourceKey),
    /// Others go first.
    Fairness,
}

impl WaitQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Puts a read in its place.
    pub(super) fn insert(&mut self, waiting: QueuedRead) {
        let place = self.0.partition_point(|other| other.request.since <= waiting.request.since);
        self.0.insert(place, waiting);
    }

    /// Takes out the read at `place`.
    pub(super) fn take(&mut self, place: usize) -> Option<ReadRequest> {
        self.0.remove(place).map(|waiting| waiting.request)
    }

    /// Takes out a read that began to wait `timeout` ago or before.
    pub(super) fn take_overdue(&mut self, timeout: Duration) -> Option<ReadRequest> {
        let is_overdue = |waiting: &QueuedRead| waiting.request.since.elapsed() >= timeout;
        self.0.front().is_some_and(is_overdue).then(|| self.take(0)).flatten()
    }

    /// Whether a read that asked at `since`, and takes memory for `plan`, has to wait because
    /// an older one would never get what it needs if all others took theirs at once.
    pub(super) fn holds_back(&self, since: Instant, plan: &BlockPlan) -> bool {
        let mut older = self.0.iter().take_while(|waiting| waiting.request.since < since);
        older.any(|QueuedRead { request, reason }| {
            let waits = request.since.elapsed();
            waits >= PATIENCE
                && match reason {
                    // Every other second: what a source that stalls has may not come back for
                    // long, and meanwhile the others are to get on with the rest.
                    WaitReason::Memory => waits.as_secs() % 2 == 1,
                    WaitReason::SourceQuota(of) => {
                        plan.sources().any(|(source, _)| SourceKey::of(source) == *of)
                    }
                    WaitReason::Fairness => false,
                }
        })
    }

    /// Makes the oldest read one that has waited for so long.
    #[cfg(test)]
    pub(super) fn age_oldest(&mut self, waits: Duration) {
        if let Some(waiting) = self.0.front_mut() {
            waiting.request.since = Instant::now().checked_sub(waits).unwrap();
        }
    }
}
