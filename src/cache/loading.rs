//! Bytes under way by source: none may take all the memory.

use std::collections::HashMap;
use std::sync::Arc;

use crate::reader::BlockPlan;
use crate::source::Source;

/// By the address of the source, which its reads keep alive.
#[derive(Default)]
pub(super) struct Loading(HashMap<usize, u64>);

/// Names a source.
pub(super) fn key(source: &Arc<Source>) -> usize {
    Arc::as_ptr(source) as usize
}

impl Loading {
    /// The first source of `plan` that has too many bytes under way already: one that stalls
    /// must leave memory to the others.
    pub(super) fn refusing(&self, plan: &BlockPlan, limit: u64) -> Option<usize> {
        let mut sources = plan.sources().map(|(source, len)| (key(source), len));
        let refusing = sources.find(|(source, len)| {
            let under_way = self.0.get(source).copied().unwrap_or(0);
            under_way > 0 && under_way + len > limit / 2
        });
        refusing.map(|(source, _)| source)
    }

    pub(super) fn add(&mut self, plan: &BlockPlan) {
        for (source, len) in plan.sources() {
            *self.0.entry(key(source)).or_default() += len;
        }
    }

    pub(super) fn remove(&mut self, charges: &[(Arc<Source>, u64)]) {
        for (source, len) in charges {
            let source = key(source);
            if let Some(under_way) = self.0.get_mut(&source) {
                *under_way -= len;
                if *under_way == 0 {
                    self.0.remove(&source);
                }
            }
        }
    }
}
