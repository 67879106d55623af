//! Bytes that are being read, by source. The limit keeps one source from taking all the memory.

use std::sync::Arc;

use crate::io::{PerSourceLimiter, SourceKey};
use crate::reader::BlockPlan;
use crate::source::Source;

/// Number of bytes that are being read, by source. The reads keep their sources alive.
#[derive(Default)]
pub(super) struct Loading(PerSourceLimiter<SourceKey>);

impl Loading {
    /// The first source of `plan` that would have more than half of `limit` bytes in progress with this plan,
    /// and has some in progress already. This leaves memory for other sources if one stalls.
    pub(super) fn refusing(&self, plan: &BlockPlan, limit: u64) -> Option<SourceKey> {
        let mut sources = plan.sources().map(|(source, len)| (SourceKey::of(source), len));
        let refusing = sources.find(|(source, len)| {
            let under_way = self.0.held(source);
            under_way > 0 && under_way + len > limit / 2
        });
        refusing.map(|(source, _)| source)
    }

    pub(super) fn add(&mut self, plan: &BlockPlan) {
        for (source, len) in plan.sources() {
            self.0.take(SourceKey::of(source), len);
        }
    }

    pub(super) fn remove(&mut self, charges: &[(Arc<Source>, u64)]) {
        for (source, len) in charges {
            self.0.give_back(&SourceKey::of(source), *len);
        }
    }
}
