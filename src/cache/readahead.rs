//! Readahead: reads the ranges that a file's planner returns, as far as memory allows.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::blocks::{CachedBlock, Data};
use super::{CacheInner, CachedFile, Hole, State};
use crate::io::{Priority, Reservation};
use crate::prefetch::{Advice, Request, StreamId};

/// Most blocks that are examined to find one to evict.
const LOOKED_AT_MAX: usize = 128;

/// Time without reads of a file after which its blocks that were read ahead may be evicted.
const STALE_TIME: Duration = Duration::from_secs(2);

/// Where and why reading a range ahead stops.
struct Refused {
    /// The first offset that is not read.
    from: u64,
    /// Whether the reason is that enough of its source is under way; otherwise memory is short.
    is_put_off: bool,
}

impl CacheInner {
    /// Notices if a tensor in the source's page cache is requested page by page.
    pub(super) fn watch_storm(&self, file: &Arc<CachedFile>, range: Range<u64>) {
        let Some(on_storm) = &file.on_storm else { return };
        let request = Request { range, reader: 0, late: false, now: self.now() };
        let push = file.planner.lock().storm(&request, &file.reader);
        if let Some(range) = push {
            on_storm(file, range);
        }
    }

    /// Milliseconds since the cache was started.
    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Most memory for readahead; the rest is for waiting readers.
    fn ahead_max(&self) -> u64 {
        self.budget.limit() / 4 * 3
    }

    /// Reads ahead the ranges that are likely to be requested next.
    pub(super) fn look_ahead(
        self: &Arc<Self>,
        file: &Arc<CachedFile>,
        reader: u64,
        range: &Range<u64>,
        late: bool,
    ) {
        // The orders are sorted before the planner is locked, because other reads wait for its
        // lock.
        file.reader.sort_orders();
        let request = Request { range: range.clone(), reader, late, now: self.now() };
        let most = self.ahead_max();
        let advice = file.planner.lock().observe(&request, most, &file.reader);
        let Advice { ahead, left, push } = advice;
        if !left.is_empty() {
            let mut state = self.state.lock();
            left.iter().for_each(|range| self.leave(&mut state, file, range));
        }
        if let Some((stream, ranges)) = ahead {
            self.read_all_ahead(file, stream, ranges);
        }
        if let (Some(range), Some(on_storm)) = (push, &file.on_storm) {
            on_storm(file, range);
        }
    }

    /// Reads `ranges` ahead, as far as memory allows.
    fn read_all_ahead(
        self: &Arc<Self>,
        file: &Arc<CachedFile>,
        stream: StreamId,
        mut ranges: Vec<Range<u64>>,
    ) {
        for index in 0..ranges.len() {
            let Err(refused) = self.read_ahead(file, stream, ranges[index].clone()) else {
                continue;
            };
            ranges[index].start = refused.from;
            let mut planner = file.planner.lock();
            if refused.is_put_off {
                return planner.put_off(&ranges[index..]);
            }
            self.counters.prefetch_cuts.add(1);
            return planner.cut_short(stream, &ranges[index..]);
        }
    }

    /// Reads `range` ahead, as far as possible.
    fn read_ahead(
        self: &Arc<Self>,
        file: &Arc<CachedFile>,
        stream: StreamId,
        range: Range<u64>,
    ) -> Result<(), Refused> {
        let mut offset = range.start;
        while offset < range.end {
            let mut plan = file.reader.plan_first_block(offset..range.end);
            let end = offset + plan.len();
            // The read itself copies these bytes from the page cache, with one copy less.
            if plan.is_cached(&self.engine) {
                offset = end;
                continue;
            }
            let need = plan.memory();
            let mut state = self.state.lock();
            if let Some(over) = state.of(file).want(&(offset..end)) {
                offset = over;
                continue;
            }
            // If enough of the source is under way, memory is not the limit.
            let is_put_off = state.loading.refusing(&plan, self.ahead_max()).is_some();
            let may = state.queue.is_empty() && !is_put_off;
            let reservation =
                may.then(|| self.reserve_ahead(&mut state, file, stream, need)).flatten();
            let reservation = reservation.ok_or(Refused { from: offset, is_put_off })?;
            let data = Data::Loading { waiters: Vec::new(), tickets: Vec::new() };
            let block = CachedBlock { end, asked: 0, ahead: true, left: false, data };
            state.of(file).blocks.insert(offset, block);
            state.loading.add(&plan);
            drop(state);
            self.counters.prefetched_bytes.add(end - offset);
            self.fetch(file, Hole { start: offset, plan, reservation }, Priority::Prefetch);
            offset = end;
        }
        Ok(())
    }

    /// Reserves `need` bytes for readahead. If necessary, evicts blocks that were read ahead of
    /// readers that went elsewhere, and blocks without recent requests.
    fn reserve_ahead(
        &self,
        state: &mut State,
        file: &CachedFile,
        stream: StreamId,
        need: u64,
    ) -> Option<Reservation> {
        let others = self.ahead_max().checked_sub(need)?;
        while self.budget.used() > others {
            let left = file.planner.lock().make_way(stream);
            match left {
                Some(left) => left.iter().for_each(|range| self.leave(state, file, range)),
                None => self.evict_stale(state, STALE_TIME).then_some(())?,
            }
        }
        self.budget.try_reserve(need)
    }

    /// Drops the blocks in `range` without planned bytes. Blocks that are being read are dropped
    /// once they are loaded.
    pub(super) fn leave(&self, state: &mut State, file: &CachedFile, range: &Range<u64>) {
        let State { files, idle, .. } = state;
        let Some(blocks) = files.get_mut(&file.id).map(|file| &mut file.blocks) else { return };
        let mut dropped = Vec::new();
        let before = blocks.range(..range.start).next_back();
        let first = before.filter(|(_, block)| block.end > range.start).map(|(&start, _)| start);
        let planner = file.planner.lock();
        for (&start, block) in blocks.range_mut(first.unwrap_or(range.start)..range.end) {
            match &block.data {
                // Another reader may still need the other part of the block.
                _ if planner.is_planned(&(start..block.end)) => {}
                Data::Ready(..) => dropped.push(start),
                Data::Loading { waiters, .. } => block.left = waiters.is_empty(),
            }
        }
        drop(planner);
        for start in dropped {
            idle.pop(&(file.id, start));
            if let Some(block) = blocks.remove(&start) {
                self.waste(&file.planner, start, &block);
            }
        }
    }

    /// Evicts a block without requests for `age`, if there is one among the oldest. Blocks that
    /// were read ahead stay longer while their file is read.
    pub(super) fn evict_stale(&self, state: &mut State, age: Duration) -> bool {
        let State { files, idle, .. } = state;
        let is_stale = |(&(id, start), since): (&(u64, u64), &Instant)| {
            let Some(file) = files.get(&id) else { return true };
            let is_partly_read = file.blocks.get(&start).is_none_or(|block| block.asked > 0);
            let is_left = file.last_read.elapsed() >= age || since.elapsed() >= 5 * age;
            since.elapsed() >= age && (is_partly_read || is_left)
        };
        let stale = idle.iter().rev().take(LOOKED_AT_MAX).find(|&entry| is_stale(entry));
        let Some(key) = stale.map(|(key, _)| *key) else { return false };
        self.evict_block(state, key);
        true
    }
}
