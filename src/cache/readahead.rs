//! Reading ahead: what the planner of a file asks for, as far as there is room.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::blocks::{CachedBlock, Data};
use super::{CacheInner, CachedFile, Hole, State};
use crate::io::{Priority, Reservation};
use crate::prefetch::{Advice, Request, StreamId};

/// Blocks that are looked at to find one that makes way.
const LOOKED_AT_MAX: usize = 128;

/// How long a file has to be left alone until what was read ahead of it makes way.
const STALE_TIME: Duration = Duration::from_secs(2);

/// Why a range is not read ahead to its end.
struct Refused {
    /// The first offset that is not read.
    from: u64,
    /// Because enough of its source is on its way; otherwise because there is no room.
    is_put_off: bool,
}

impl CacheInner {
    /// Notices where a tensor in the source's page cache is asked for page by page.
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

    /// Memory for what is read ahead, at most: the rest is for readers who wait.
    fn ahead_max(&self) -> u64 {
        self.budget.limit() / 4 * 3
    }

    /// Reads ahead what is likely to be asked for next.
    pub(super) fn look_ahead(
        self: &Arc<Self>,
        file: &Arc<CachedFile>,
        reader: u64,
        range: &Range<u64>,
        late: bool,
    ) {
        // Before the planner is locked, for which others wait.
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

    /// Reads `ranges` ahead, as far as there is room.
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

    /// Reads `range` ahead, as far as that goes.
    fn read_ahead(
        self: &Arc<Self>,
        file: &Arc<CachedFile>,
        stream: StreamId,
        range: Range<u64>,
    ) -> Result<(), Refused> {
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
            let mut state = self.state.lock();
            if let Some(over) = state.of(file).want(&(at..end)) {
                at = over;
                continue;
            }
            // Enough of the source is on its way: memory is not what lacks.
            let is_put_off = state.loading.refusing(&plan, self.ahead_max()).is_some();
            let may = state.queue.is_empty() && !is_put_off;
            let reservation =
                may.then(|| self.reserve_ahead(&mut state, file, stream, need)).flatten();
            let reservation = reservation.ok_or(Refused { from: at, is_put_off })?;
            let data = Data::Loading { waiters: Vec::new(), tickets: Vec::new() };
            let block = CachedBlock { end, asked: 0, ahead: true, left: false, data };
            state.of(file).blocks.insert(at, block);
            state.loading.add(&plan);
            drop(state);
            self.counters.prefetched_bytes.add(end - at);
            self.fetch(file, Hole { start: at, plan, reservation }, Priority::Prefetch);
            at = end;
        }
        Ok(())
    }

    /// Memory of `need` bytes for what nobody asked for yet. Blocks make way for it that were
    /// read ahead of a reader who went elsewhere, and those that nobody has asked for lately.
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

    /// Drops the blocks in `range` of which nothing is planned any more; those that are being
    /// read, once they are there.
    pub(super) fn leave(&self, state: &mut State, file: &CachedFile, range: &Range<u64>) {
        let State { files, idle, .. } = state;
        let Some(blocks) = files.get_mut(&file.id).map(|file| &mut file.blocks) else { return };
        let mut dropped = Vec::new();
        let before = blocks.range(..range.start).next_back();
        let first = before.filter(|(_, block)| block.end > range.start).map(|(&start, _)| start);
        let planner = file.planner.lock();
        for (&start, block) in blocks.range_mut(first.unwrap_or(range.start)..range.end) {
            match &block.data {
                // Another reader may still come to its other part.
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

    /// Drops a block that nobody has asked for since `age`, if there is one among the oldest.
    /// Blocks that were read ahead stay longer while their file is read.
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
