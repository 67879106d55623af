//! The queue of reads that wait for memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::ReadRequest;
use crate::io::SourceKey;
use crate::reader::BlockPlan;

/// Waiting time up to which newer reads may overtake a read if they need less memory.
const PATIENCE: Duration = Duration::from_secs(1);

/// The waiting reads, the oldest first.
#[derive(Default)]
pub(super) struct WaitQueue(VecDeque<QueuedRead>);

/// A waiting read and the reason why it waits.
pub(super) struct QueuedRead {
    pub(super) request: ReadRequest,
    pub(super) reason: WaitReason,
}

/// The reason why a read has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitReason {
    /// Too little memory is free for the read.
    Memory,
    /// Too many bytes of this source are being read already.
    SourceQuota(SourceKey),
    /// Other reads have precedence.
    Fairness,
}

impl WaitQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Inserts a read at the position that corresponds to its age.
    pub(super) fn insert(&mut self, waiting: QueuedRead) {
        let place = self.0.partition_point(|other| other.request.since <= waiting.request.since);
        self.0.insert(place, waiting);
    }

    /// Removes the read at position `place`.
    pub(super) fn take(&mut self, place: usize) -> Option<ReadRequest> {
        self.0.remove(place).map(|waiting| waiting.request)
    }

    /// Removes a read that has waited for `timeout` or longer.
    pub(super) fn take_overdue(&mut self, timeout: Duration) -> Option<ReadRequest> {
        let is_overdue = |waiting: &QueuedRead| waiting.request.since.elapsed() >= timeout;
        self.0.front().is_some_and(is_overdue).then(|| self.take(0)).flatten()
    }

    /// Whether a read that arrived at `since` and needs memory for `plan` has to wait, because it could keep an older
    /// read waiting for ever.
    pub(super) fn holds_back(&self, since: Instant, plan: &BlockPlan) -> bool {
        let mut older = self.0.iter().take_while(|waiting| waiting.request.since < since);
        older.any(|QueuedRead { request, reason }| {
            let waits = request.since.elapsed();
            waits >= PATIENCE
                && match reason {
                    // The older read has precedence only in every other second. So newer reads progress even if a
                    // stalled source holds memory for a long time.
                    WaitReason::Memory => waits.as_secs() % 2 == 1,
                    WaitReason::SourceQuota(of) => {
                        plan.sources().any(|(source, _)| SourceKey::of(source) == *of)
                    }
                    WaitReason::Fairness => false,
                }
        })
    }

    /// Makes the oldest read look as if it had waited for `waits`.
    #[cfg(test)]
    pub(super) fn age_oldest(&mut self, waits: Duration) {
        if let Some(waiting) = self.0.front_mut() {
            waiting.request.since = Instant::now().checked_sub(waits).unwrap();
        }
    }
}
