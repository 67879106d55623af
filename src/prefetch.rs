//! What to read before it is asked for: (offset, length) of the reads of one file in, ranges to
//! fetch out.
//!
//! Reads are sorted into streams, each moving forward through the file. A stream is read ahead
//! of by a window, which grows while its reader has to wait. Tensors bound it: who begins to
//! read a tensor mostly reads it to its end, and who has gone from one into the next goes on.
//! Pure: no I/O, no clock (the time is an argument), no threads.

use std::collections::VecDeque;
use std::ops::Range;

/// Streams of one file at most: more readers than that share them.
const STREAMS_MAX: usize = 16;

/// First window, in bytes.
const WINDOW_MIN: u64 = 2 << 20;

/// Largest window, in bytes.
const WINDOW_MAX: u64 = 64 << 20;

/// How far a read may be from the place where a stream is expected to go on: reads that the
/// kernel sends ahead arrive in any order.
const SLACK: u64 = 4 << 20;

/// A read shorter than this says little about the next one.
const SMALL: u64 = 64 << 10;

/// Small reads that have to follow each other before they are taken for a stream.
const SMALL_RUN: u32 = 4;

/// Read-ahead bytes after which it is judged whether they are of use.
const JUDGED_FROM: u64 = 32 << 20;

/// A storm of page faults: so many reads of a few pages in one tensor within so short a time.
const STORM_READS: u32 = 32;
/// Milliseconds.
const STORM_TIME: u64 = 250;
/// How long a tensor that was pushed is not pushed again, in milliseconds.
const PUSHED_TIME: u64 = 10_000;
/// Pushed tensors remembered.
const PUSHED_MAX: usize = 16;
/// Largest read that counts for a storm.
const STORM_READ_LEN: u64 = 16 << 10;

/// One read of a file.
#[derive(Clone, Debug)]
pub struct Request {
    /// The bytes asked for; not empty.
    pub range: Range<u64>,
    /// Whether they are being read ahead, but not there yet.
    pub late: bool,
    /// Milliseconds since any fixed moment.
    pub now: u64,
}

/// What to do after a read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// Bytes to read ahead, with the stream that they are for.
    pub ahead: Option<(StreamId, Range<u64>)>,
    /// Bytes to put into the kernel's page cache, because they are asked for page by page.
    pub push: Option<Range<u64>>,
}

/// Names a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(u64);

/// Reads that move forward through the file.
#[derive(Clone, Debug)]
struct Stream {
    id: StreamId,
    /// End of the furthest read.
    next: u64,
    /// End of what was read ahead.
    planned: u64,
    window: u64,
    /// Reads that continued it.
    run: u32,
    /// Start of its first read.
    began: u64,
    /// `next` when the window grew last.
    grown: u64,
    /// Start of the tensor that its last read lies in.
    tensor: u64,
    /// Number of the last read of it.
    last: u64,
}

/// Small reads of one tensor, close together in time.
#[derive(Clone, Debug)]
struct Storm {
    tensor: Range<u64>,
    since: u64,
    reads: u32,
}

/// The streams of one file.
#[derive(Debug)]
pub struct Planner {
    /// Length of the file.
    len: u64,
    streams: Vec<Stream>,
    /// Reads so far.
    reads: u64,
    /// Window of the stream that grew last: what this source needs.
    window: u64,
    /// Read-ahead bytes that were asked for, and that were thrown away.
    used: u64,
    wasted: u64,
    storm: Option<Storm>,
    /// Tensors that were pushed, and when.
    pushed: VecDeque<(Range<u64>, u64)>,
    /// How often a stream went from one tensor into the next, and how often one began
    /// somewhere else.
    onward: u32,
    elsewhere: u32,
}

impl Planner {
    /// A planner for a file of `len` bytes.
    pub fn new(len: u64) -> Planner {
        Planner {
            len,
            streams: Vec::new(),
            reads: 0,
            window: WINDOW_MIN,
            used: 0,
            wasted: 0,
            storm: None,
            pushed: VecDeque::new(),
            onward: 0,
            elsewhere: 0,
        }
    }

    /// Takes note of a read, and says what to do. `tensor_at` gives the bytes of the tensor
    /// that an offset lies in; at most `most` bytes are to be held for one stream.
    pub fn observe(
        &mut self,
        request: &Request,
        most: u64,
        tensor_at: &dyn Fn(u64) -> Range<u64>,
    ) -> Advice {
        self.reads += 1;
        let at = self.stream_of(request);
        let ahead = self.plan(at, most, tensor_at);
        let push = self.storm(request, tensor_at);
        Advice { ahead, push }
    }

    /// Takes note that only the bytes before `to` of what was planned last for a stream are
    /// read ahead: there was no room for more.
    pub fn cut_short(&mut self, stream: StreamId, to: u64) {
        if let Some(stream) = self.streams.iter_mut().find(|other| other.id == stream) {
            stream.planned = stream.planned.min(to).max(stream.next);
            stream.window = (stream.window / 2).max(WINDOW_MIN);
        }
    }

    /// Takes note of what became of bytes that were read ahead.
    pub fn judge(&mut self, used: u64, wasted: u64) {
        self.used += used;
        self.wasted += wasted;
        // Old experience counts less.
        if self.used + self.wasted > 8 * JUDGED_FROM {
            self.used /= 2;
            self.wasted /= 2;
        }
    }

    /// Whether less than half of what was read ahead was of use.
    fn is_wasteful(&self) -> bool {
        self.used + self.wasted >= JUDGED_FROM && self.wasted > self.used
    }

    /// The stream that `request` belongs to, moved on by it.
    fn stream_of(&mut self, request: &Request) -> usize {
        let Range { start, end } = request.range;
        let continues = |s: &Stream| {
            start >= s.next.saturating_sub(SLACK) && start <= s.planned.max(s.next) + SLACK
        };
        let distance = |s: &Stream| s.next.abs_diff(start);
        let (reads, wasteful) = (self.reads, self.is_wasteful());
        let candidates = self.streams.iter_mut().enumerate().filter(|(_, s)| continues(s));
        if let Some((at, stream)) = candidates.min_by_key(|(_, s)| distance(s)) {
            stream.last = reads;
            stream.run = stream.run.saturating_add(1);
            stream.next = stream.next.max(end);
            // Once for all reads that came while one window was under way.
            if request.late && !wasteful && stream.next >= stream.grown + stream.window {
                stream.grown = stream.next;
                stream.window = (stream.window * 2).min(WINDOW_MAX);
                self.window = stream.window;
            }
            return at;
        }
        self.elsewhere += u32::from(!self.streams.is_empty());
        let window = if wasteful { WINDOW_MIN } else { (self.window / 2).max(WINDOW_MIN) };
        let small = end - start < SMALL;
        let stream = Stream {
            id: StreamId(reads),
            next: end,
            planned: end,
            window,
            run: if small || wasteful { 0 } else { SMALL_RUN },
            began: start,
            grown: start,
            tensor: start,
            last: reads,
        };
        if self.streams.len() < STREAMS_MAX {
            self.streams.push(stream);
            return self.streams.len() - 1;
        }
        let oldest = (0..self.streams.len()).min_by_key(|&at| self.streams[at].last).unwrap_or(0);
        self.streams[oldest] = stream;
        oldest
    }

    /// What to read ahead for a stream.
    fn plan(
        &mut self,
        at: usize,
        most: u64,
        tensor_at: &dyn Fn(u64) -> Range<u64>,
    ) -> Option<(StreamId, Range<u64>)> {
        let wasteful = self.is_wasteful();
        let limit = self.limit(at, tensor_at);
        let stream = &mut self.streams[at];
        let window = stream.window.min(most);
        stream.planned = stream.planned.max(stream.next);
        let needed = if wasteful { 4 * SMALL_RUN } else { SMALL_RUN };
        // Little by little would be many small reads: half a window at a time.
        if stream.run < needed || stream.planned - stream.next > window / 2 {
            return None;
        }
        let limit = limit.min(stream.next + window);
        if limit <= stream.planned {
            return None;
        }
        let ahead = stream.planned..limit;
        stream.planned = limit;
        Some((stream.id, ahead))
    }

    /// Where reading ahead for a stream has to end.
    fn limit(&mut self, at: usize, tensor_at: &dyn Fn(u64) -> Range<u64>) -> u64 {
        let Stream { next, began, tensor: before, .. } = self.streams[at];
        let tensor = tensor_at(next - 1);
        if tensor.start > before {
            self.streams[at].tensor = tensor.start;
            self.onward += 1;
        }
        if self.onward + self.elsewhere > 64 {
            self.onward /= 2;
            self.elsewhere /= 2;
        }
        // What another reader began with has been read.
        let others = self.streams.iter().filter(|s| s.began >= next && s.next - s.began > SLACK);
        let limit = others.map(|s| s.began).min().unwrap_or(self.len);
        let near_end = next - tensor.start >= (tensor.end - tensor.start) / 4 * 3;
        // Whoever has read the tensor before from its start goes through them in order.
        let in_order = || tensor.start > 0 && tensor_at(tensor.start - 1).start >= began;
        let goes_on = (near_end && self.onward >= self.elsewhere) || in_order();
        if goes_on { limit } else { limit.min(tensor.end) }
    }

    /// `tensor`, unless it was pushed a short while ago and is on its way.
    fn push_once(&mut self, tensor: Range<u64>, now: u64) -> Option<Range<u64>> {
        self.pushed.retain(|(_, at)| now.saturating_sub(*at) < PUSHED_TIME);
        if self.pushed.iter().any(|(pushed, _)| *pushed == tensor) {
            return None;
        }
        if self.pushed.len() == PUSHED_MAX {
            self.pushed.pop_front();
        }
        self.pushed.push_back((tensor.clone(), now));
        Some(tensor)
    }

    /// The tensor that is asked for page by page, when that is noticed first. `observe` does
    /// this too; by itself it is for reads that take nothing from the source.
    pub fn storm(
        &mut self,
        request: &Request,
        tensor_at: &dyn Fn(u64) -> Range<u64>,
    ) -> Option<Range<u64>> {
        let Range { start, end } = request.range;
        if end - start > STORM_READ_LEN {
            return None;
        }
        match &mut self.storm {
            Some(storm)
                if storm.tensor.contains(&start)
                    && request.now.saturating_sub(storm.since) <= STORM_TIME =>
            {
                storm.reads += 1;
                if storm.reads == STORM_READS {
                    let tensor = storm.tensor.clone();
                    return self.push_once(tensor, request.now);
                }
            }
            storm => {
                let tensor = tensor_at(start);
                *storm = Some(Storm { tensor, since: request.now, reads: 1 });
            }
        }
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A file of 40 tensors of 64 MiB.
    fn planner() -> Planner {
        Planner::new(40 * 64 * MIB)
    }

    fn tensor_at(offset: u64) -> Range<u64> {
        let start = offset / (64 * MIB) * (64 * MIB);
        start..start + 64 * MIB
    }

    fn read(planner: &mut Planner, start: u64, len: u64, late: bool) -> Option<Range<u64>> {
        let request = Request { range: start..start + len, late, now: 0 };
        planner.observe(&request, u64::MAX, &tensor_at).ahead.map(|(_, range)| range)
    }

    #[test]
    fn a_reader_in_order_is_read_ahead_of_without_a_gap() {
        let mut planner = planner();
        let (mut at, mut planned) = (0, None);
        while at < 2000 * MIB {
            if let Some(ahead) = read(&mut planner, at, MIB, true) {
                let before = planned.unwrap_or(at + MIB);
                assert_eq!(ahead.start, before, "planned without gap and without overlap");
                assert!(ahead.end - at <= WINDOW_MAX + MIB);
                planned = Some(ahead.end);
            }
            at += MIB;
            assert!(planned.unwrap_or(0) >= at.min(tensor_at(at - 1).end), "it stays ahead");
        }
    }

    #[test]
    fn the_window_grows_only_while_the_reader_waits() {
        let (mut waiting, mut served) = (planner(), planner());
        let mut longest = [0, 0];
        for at in 0..200 {
            for (which, planner, late) in [(0, &mut waiting, true), (1, &mut served, false)] {
                if let Some(ahead) = read(planner, at * MIB, MIB, late) {
                    longest[which] = longest[which].max(ahead.end - (at + 1) * MIB);
                }
            }
        }
        assert_eq!(longest, [WINDOW_MAX, WINDOW_MIN]);
    }

    #[test]
    fn the_first_touch_of_a_tensor_plans_to_its_end_and_no_further() {
        let mut planner = planner();
        for tensor in [7, 3, 20, 11] {
            let (mut at, end) = (tensor * 64 * MIB, (tensor + 1) * 64 * MIB);
            let mut furthest = 0;
            while at < tensor * 64 * MIB + 40 * MIB {
                if let Some(ahead) = read(&mut planner, at, MIB, true) {
                    furthest = ahead.end.max(furthest);
                }
                at += MIB;
            }
            assert!(furthest <= end, "tensor {tensor}: {furthest} is past {end}");
        }
    }

    #[test]
    fn whoever_goes_through_the_tensors_in_order_gets_the_next_one_ahead() {
        let mut planner = planner();
        let mut across = false;
        for at in 0..130 {
            if let Some(ahead) = read(&mut planner, at * MIB, MIB, true) {
                across |= tensor_at(ahead.end - 1).start > tensor_at(at * MIB).start;
            }
        }
        assert!(across);
    }

    #[test]
    fn small_reads_at_random_places_are_not_read_ahead_of() {
        let mut planner = planner();
        let mut seed = 1u64;
        for _ in 0..1000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            let at = (seed >> 20) % (2500 * MIB);
            assert_eq!(read(&mut planner, at, 4096, true), None);
        }
    }

    #[test]
    fn reading_ahead_in_vain_ends_until_reads_follow_each_other_for_long() {
        let mut planner = planner();
        planner.judge(0, 100 * MIB);
        for (count, at) in (0..10u64).map(|n| (n, n * 200 * MIB)) {
            assert_eq!(read(&mut planner, at % (2500 * MIB), MIB, true), None, "read {count}");
        }
        let mut ahead = None;
        for at in 0..40 {
            ahead = ahead.or(read(&mut planner, 400 * MIB + at * MIB, MIB, true));
        }
        assert!(ahead.is_some());
    }

    #[test]
    fn four_readers_at_once_are_four_streams() {
        let mut planner = planner();
        let mut planned = [0; 4];
        for at in 0..100 {
            for (reader, planned) in planned.iter_mut().enumerate() {
                let start = reader as u64 * 600 * MIB + at * MIB;
                if let Some(ahead) = read(&mut planner, start, MIB, true) {
                    assert!(tensor_at(ahead.start).start.abs_diff(start) <= 128 * MIB);
                    *planned += ahead.end - ahead.start;
                }
            }
        }
        assert!(planned.iter().all(|&planned| planned >= 90 * MIB), "{planned:?}");
    }

    #[test]
    fn where_another_reader_began_there_is_nothing_to_read_ahead() {
        let mut planner = planner();
        let mut ahead = Vec::new();
        for at in 0..60 {
            ahead.extend(read(&mut planner, at * MIB, MIB, true));
            ahead.extend(read(&mut planner, (61 + at) * MIB, MIB, true));
        }
        let mut ends: Vec<u64> =
            ahead.iter().filter(|a| a.start < 61 * MIB).map(|a| a.end).collect();
        ends.sort();
        assert_eq!(ends.last(), Some(&(61 * MIB)));
    }

    #[test]
    fn tensors_in_any_order_are_read_ahead_of_to_their_ends_only() {
        let mut planner = planner();
        let mut past = 0;
        for tensor in [7, 3, 20, 11, 30, 1, 25, 9, 16, 5] {
            for at in 0..64 {
                if let Some(ahead) = read(&mut planner, (tensor * 64 + at) * MIB, MIB, true) {
                    past += ahead.end.saturating_sub((tensor + 1) * 64 * MIB);
                }
            }
        }
        assert!(past <= 2 * WINDOW_MAX, "{past} bytes for nothing");
    }

    #[test]
    fn what_there_was_no_room_for_is_planned_again() {
        let mut planner = planner();
        let request = Request { range: 0..MIB, late: false, now: 0 };
        let advice = planner.observe(&request, u64::MAX, &tensor_at);
        let (stream, ahead) = advice.ahead.unwrap();
        planner.cut_short(stream, ahead.start + MIB);
        let next = read(&mut planner, MIB, MIB, false).unwrap();
        assert_eq!(next.start, ahead.start + MIB);
    }

    #[test]
    fn a_storm_of_page_faults_in_one_tensor_is_answered_with_the_tensor_once() {
        let mut planner = planner();
        let mut pushed = Vec::new();
        // The second half comes later, while the tensor is being pushed.
        for n in 0..200u64 {
            let at = 64 * MIB * 5 + (n * 7919 * 4096) % (64 * MIB);
            let now = if n < 100 { n / 4 } else { 300 + n / 4 };
            let request = Request { range: at..at + 4096, late: false, now };
            pushed.extend(planner.observe(&request, u64::MAX, &tensor_at).push);
        }
        assert_eq!(pushed, [tensor_at(64 * MIB * 5)]);
        let slow = |n: u64| Request { range: n * MIB..n * MIB + 4096, late: false, now: n * 100 };
        let mut planner = Planner::new(2500 * MIB);
        assert!((0..60).all(|n| planner.observe(&slow(n), u64::MAX, &tensor_at).push.is_none()));
    }
}
