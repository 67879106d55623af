//! Reads that wait for memory, and which of them goes first.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Ask;
use crate::io::SourceKey;
use crate::reader::BlockPlan;

/// How long a read lets others overtake it that need less.
const PATIENCE: Duration = Duration::from_secs(1);

/// The reads, oldest first.
#[derive(Default)]
pub(super) struct Queue(VecDeque<Waiting>);

/// A read that waits, and for what.
pub(super) struct Waiting {
    pub(super) ask: Ask,
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

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Puts a read in its place.
    pub(super) fn insert(&mut self, waiting: Waiting) {
        let place = self.0.partition_point(|other| other.ask.since <= waiting.ask.since);
        self.0.insert(place, waiting);
    }

    /// Takes out the read at `place`.
    pub(super) fn take(&mut self, place: usize) -> Option<Ask> {
        self.0.remove(place).map(|waiting| waiting.ask)
    }

    /// Takes out a read that began to wait `timeout` ago or before.
    pub(super) fn take_overdue(&mut self, timeout: Duration) -> Option<Ask> {
        let is_overdue = |waiting: &Waiting| waiting.ask.since.elapsed() >= timeout;
        self.0.front().is_some_and(is_overdue).then(|| self.take(0)).flatten()
    }

    /// Whether a read that asked at `since`, and takes memory for `plan`, has to wait because
    /// an older one would never get what it needs if all others took theirs at once.
    pub(super) fn holds_back(&self, since: Instant, plan: &BlockPlan) -> bool {
        let mut older = self.0.iter().take_while(|waiting| waiting.ask.since < since);
        older.any(|Waiting { ask, reason }| {
            let waits = ask.since.elapsed();
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
            waiting.ask.since = Instant::now().checked_sub(waits).unwrap();
        }
    }
}
