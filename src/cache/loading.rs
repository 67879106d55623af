//! Bytes under way by source: no source may take all the memory.

use std::sync::Arc;

use crate::io::{PerSourceLimiter, SourceKey};
use crate::reader::BlockPlan;
use crate::source::Source;

/// Bytes under way, by source; its reads keep the source alive.
#[derive(Default)]
pub(super) struct Loading(PerSourceLimiter<SourceKey>);

impl Loading {
    /// The first source of `plan` that has more than half of `limit` bytes under way already,
    /// with those of the plan: a source that stalls must leave memory to the others.
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
