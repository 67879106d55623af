//! Reading ahead: what the planner of a file asks for, as far as there is room.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::blocks::{Block, Data};
use super::{CachedFile, Hole, Inner, State, lock};
use crate::io::{Class, Lease};
use crate::prefetch::{Advice, Request, StreamId};

/// How old a block has to be to make way for one that is read ahead.
const STALE_TIME: Duration = Duration::from_secs(2);

impl Inner {
    /// Notices where a tensor in the source's page cache is asked for page by page.
    pub(super) fn watch_storm(&self, file: &Arc<CachedFile>, range: Range<u64>) {
        let Some(on_storm) = &file.on_storm else { return };
        let request = Request { range, late: false, now: self.now() };
        let tensor_at = |offset| file.reader.tensor_at(offset);
        let push = lock(&file.planner).storm(&request, &tensor_at);
        if let Some(range) = push {
            on_storm(file, range);
        }
    }

    /// Milliseconds since the cache was started.
    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Reads ahead what is likely to be asked for next.
    pub(super) fn look_ahead(
        self: &Arc<Self>,
        file: &Arc<CachedFile>,
        range: &Range<u64>,
        late: bool,
    ) {
        let request = Request { range: range.clone(), late, now: self.now() };
        let most = self.budget.limit() / 8 * 3;
        let tensor_at = |offset| file.reader.tensor_at(offset);
        let Advice { ahead, push } = lock(&file.planner).observe(&request, most, &tensor_at);
        if let Some((stream, ahead)) = ahead {
            self.read_ahead(file, stream, ahead);
        }
        if let (Some(range), Some(on_storm)) = (push, &file.on_storm) {
            on_storm(file, range);
        }
    }

    fn read_ahead(self: &Arc<Self>, file: &Arc<CachedFile>, stream: StreamId, range: Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let end = (at + file.reader.block_len(at)).min(range.end);
            let plan = file.reader.plan_block(at..end);
            // From there the read itself takes it, with one copy less.
            if plan.is_cached(&self.engine) {
                at = end;
                continue;
            }
            let need = plan.memory();
            let mut state = lock(&self.state);
            if let Some(over) = state.of(file).end_of_overlap(&(at..end)) {
                at = over;
                continue;
            }
            let most = self.budget.limit() / 4 * 3;
            let may = state.queue.is_empty() && state.loading.refusing(&plan, most).is_none();
            let lease = may.then(|| self.lease_ahead(&mut state, need, most)).flatten();
            let Some(lease) = lease else {
                drop(state);
                return lock(&file.planner).cut_short(stream, at);
            };
            let data = Data::Loading { waiters: Vec::new(), tickets: Vec::new() };
            let block = Block { end, asked: 0, ahead: true, data };
            state.of(file).blocks.insert(at, block);
            state.loading.add(&plan);
            drop(state);
            self.counters.prefetched_bytes.add(end - at);
            self.fetch(file, Hole { start: at, plan, lease }, Class::Prefetch, false);
            at = end;
        }
    }

    /// Memory of `need` bytes for what nobody asked for yet, which leaves the rest over `most`
    /// to readers who wait. Blocks make way for it that nobody has asked for lately.
    fn lease_ahead(&self, state: &mut State, need: u64, most: u64) -> Option<Lease> {
        let others = most.checked_sub(need)?;
        while self.budget.used() > others {
            self.evict(state, STALE_TIME).then_some(())?;
        }
        self.budget.try_lease(need)
    }
}
