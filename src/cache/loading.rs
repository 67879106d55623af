//! Bytes that are being read, by source. The limit keeps one source from taking all the memory.

use std::sync::Arc;

use crate::io::{PerSourceLimiter, SourceKey};
use crate::reader::BlockPlan;
use crate::source::Source;

/// Number of bytes that are being read, by source. The reads keep their sources alive.
#[derive(Default)]
pub(super) struct Loading(PerSourceLimiter<SourceKey>);

impl Loading {
    /// The first source of `plan` that already has bytes in progress, and would exceed its share of `limit` bytes with
    /// this plan. The shares leave memory for other sources if one source stalls. The share of a source is a half, or
    /// up to seven eighths if the source needs more bytes in flight.
    pub(super) fn refusing(&self, plan: &BlockPlan, limit: u64) -> Option<SourceKey> {
        let refusing = plan.sources().find(|(source, len)| {
            let under_way = self.0.held(&SourceKey::of(source));
            let wanted = || source.wanted_in_flight().unwrap_or(0).min(limit / 8 * 7);
            under_way > 0 && under_way + len > limit / 2 && under_way + len > wanted()
        });
        refusing.map(|(source, _)| SourceKey::of(source))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::Reader;
    use crate::source::MeasuredStore;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_source_may_have_half_of_the_memory_and_up_to_seven_eighths_if_it_needs_more() {
        for (wanted, share) in [(None, 8), (Some(1), 8), (Some(10 * MIB), 10), (Some(1 << 40), 14)]
        {
            let source = MeasuredStore::file(wanted);
            let reader = Reader::whole(source.clone());
            let mut loading = Loading::default();
            for number in 0..share {
                let plan = reader.plan_block(number * MIB..(number + 1) * MIB);
                assert_eq!(loading.refusing(&plan, 16 * MIB), None, "{number} of {share}");
                loading.add(&plan);
            }
            let over = reader.plan_block(20 * MIB..21 * MIB);
            assert_eq!(loading.refusing(&over, 16 * MIB), Some(SourceKey::of(&source)));
            loading.remove(&[(source, MIB)]);
            assert_eq!(loading.refusing(&over, 16 * MIB), None);
        }
    }
}
