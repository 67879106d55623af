//! Readahead: reads the ranges that the planner of a file returns, as far as memory allows.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::blocks::{CachedBlock, Data};
use super::{CacheInner, CachedFile, Hole, State};
use crate::io::{Priority, Reservation};
use crate::prefetch::{Advice, Request, StreamId};

/// Time without reads of a file after which its read-ahead blocks may be evicted.
const STALE_TIME: Duration = Duration::from_secs(2);

/// The offset at which a readahead was refused, and the reason.
struct Refused {
    /// The first offset that was not read.
    from: u64,
    /// Whether the read was refused because enough bytes of the source are being read already. Otherwise it
    /// was refused because of too little memory.
    is_put_off: bool,
}

/// The readahead of one file.
#[derive(Clone, Copy)]
pub(super) struct Readahead<'a> {
    pub(super) cache: &'a Arc<CacheInner>,
    pub(super) file: &'a Arc<CachedFile>,
}

impl Readahead<'_> {
    /// Detects that a tensor in the page cache is requested page by page.
    pub(super) fn watch_storm(self, range: Range<u64>) {
        let Readahead { cache, file } = self;
        let Some(on_storm) = &file.on_storm else { return };
        let request = Request { range, reader: 0, late: false, now: cache.now() };
        let push = file.planner.lock().storm(&request, &file.reader);
        if let Some(range) = push {
            on_storm(file, range);
        }
    }

    /// Reads ahead the ranges that are likely to be requested next.
    pub(super) fn look_ahead(self, reader: u64, range: &Range<u64>, late: bool) {
        let Readahead { cache, file } = self;
        // The orders are sorted before the planner is locked, because other reads wait for that lock.
        file.reader.sort_orders();
        let request = Request { range: range.clone(), reader, late, now: cache.now() };
        let most = cache.ahead_max();
        let source = file.reader.first_source(range);
        let wanted = source.and_then(|source| source.wanted_in_flight());
        let mut planner = file.planner.lock();
        planner.need_in_flight(wanted);
        let advice = planner.observe(&request, most, &file.reader);
        drop(planner);
        let Advice { ahead, left, push } = advice;
        if !left.is_empty() {
            let mut state = cache.state.lock();
            left.iter().for_each(|range| cache.leave(&mut state, file, range));
        }
        if let Some((stream, ranges)) = ahead {
            self.read_all(stream, ranges);
        }
        if let (Some(range), Some(on_storm)) = (push, &file.on_storm) {
            on_storm(file, range);
        }
    }

    /// Reads `ranges` ahead, as far as memory allows.
    fn read_all(self, stream: StreamId, mut ranges: Vec<Range<u64>>) {
        for index in 0..ranges.len() {
            let Err(refused) = self.read(stream, ranges[index].clone()) else {
                continue;
            };
            ranges[index].start = refused.from;
            let mut planner = self.file.planner.lock();
            if refused.is_put_off {
                return planner.put_off(&ranges[index..]);
            }
            self.cache.counters.prefetch_cuts.add(1);
            return planner.cut_short(stream, &ranges[index..]);
        }
    }

    /// Reads `range` ahead, up to the limits.
    fn read(self, stream: StreamId, range: Range<u64>) -> Result<(), Refused> {
        let Readahead { cache, file } = self;
        let mut offset = range.start;
        while offset < range.end {
            if file.reader.gathers_far(offset..range.end) {
                // Each block of such a tensor would be gathered from all bytes of the tensor.
                return Ok(());
            }
            let mut plan = file.reader.plan_first_block(offset..range.end, cache.ahead_max());
            let end = offset + plan.len();
            // Bytes in the page cache are not read ahead, because a regular read copies them from there with one copy
            // less.
            if plan.is_cached(&cache.engine) {
                offset = end;
                continue;
            }
            let need = plan.memory();
            let mut state = cache.state.lock();
            if let Some(over) = state.of(file).want(&(offset..end)) {
                offset = over;
                continue;
            }
            // If this is true, the limit for the bytes of the source stops the readahead, and not the lack of memory.
            let is_put_off = state.loading.refusing(&plan, cache.ahead_max()).is_some();
            let may = state.queue.is_empty() && !is_put_off;
            let reservation = may
                .then(|| self.reserve(&mut state, stream, need))
                .flatten()
                .ok_or(Refused { from: offset, is_put_off })?;
            let data = Data::Loading { waiters: Vec::new(), tickets: Vec::new() };
            let block = CachedBlock { end, asked: 0, ahead: true, left: false, data };
            state.of(file).blocks.insert(offset, block);
            state.loading.add(&plan);
            drop(state);
            cache.counters.prefetched_bytes.add(end - offset);
            cache.fetch(file, Hole { start: offset, plan, reservation }, Priority::Prefetch);
            offset = end;
        }
        Ok(())
    }

    /// Reserves `need` bytes for readahead. If necessary, evicts blocks whose readers continued elsewhere,
    /// and blocks without recent requests.
    fn reserve(self, state: &mut State, stream: StreamId, need: u64) -> Option<Reservation> {
        let Readahead { cache, file } = self;
        let others = cache.ahead_max().checked_sub(need)?;
        while cache.budget.used() > others {
            let left = file.planner.lock().choose_evictions(stream);
            match left {
                Some(left) => left.iter().for_each(|range| cache.leave(state, file, range)),
                None => cache.evict_stale(state, STALE_TIME).then_some(())?,
            }
        }
        cache.budget.try_reserve(need)
    }
}
