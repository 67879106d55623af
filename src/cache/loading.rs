//! Bytes under way by source: none may take all the memory.

use std::collections::HashMap;
use std::sync::Arc;

use crate::reader::BlockPlan;
use crate::source::Source;

/// By the address of the source, which its reads keep alive.
#[derive(Default)]
pub(super) struct Loading(HashMap<usize, u64>);

/// Names a source.
fn key(source: &Arc<Source>) -> usize {
    Arc::as_ptr(source) as usize
}

impl Loading {
    /// Whether the sources of `plan` have few enough bytes under way: one that stalls must
    /// leave memory to the others.
    pub(super) fn may_add(&self, plan: &BlockPlan, limit: u64) -> bool {
        plan.sources().all(|(source, len)| {
            let under_way = self.0.get(&key(source)).copied().unwrap_or(0);
            under_way == 0 || under_way + len <= limit / 2
        })
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
