//! The read-ahead planner of one file. It gets the offset and the length of each read, and returns the ranges to read
//! ahead.
//!
//! Reads are sorted into streams. A stream is a series of reads that move forward through the file. The planner reads a
//! number of bytes ahead for each stream. This number is the window of the stream, which grows while the reader has to
//! wait. The ranges to read ahead also depend on the tensors: a reader that begins a tensor mostly reads it to its end,
//! and then begins another tensor. The planner learns the order of the tensors from those that the reader has begun so
//! far. The module is pure: it has no I/O, no clock (the time is an argument) and no threads.

use std::collections::VecDeque;
use std::ops::Range;

use self::given::Given;
use self::passed::PassedRanges;
use self::planned::{PlannedRanges, refill};
pub use self::reach::Reach;
pub use self::request::{Advice, Request, StreamId};
use self::seen::SeenTensors;
use self::storm::Storms;
use self::stream::ReadStream;
use self::touches::{Around, Touches, reads_around, touched};
use crate::order::{Order, ReadLearner, SMALL, TensorMap, TensorSpan};

mod given;
mod passed;
mod planned;
mod reach;
mod request;
mod seen;
mod storm;
mod stream;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests;
mod touches;

/// Maximum number of streams of one file. If there are more, a new stream replaces the least recently used one.
const STREAMS_MAX: usize = 16;

/// Maximum number of readers of one file whose orders are remembered.
const READERS_MAX: usize = 16;

/// Minimum window in bytes. It is also the first window for a file of this machine.
const WINDOW_MIN: u64 = 2 << 20;

/// A window is refilled when this number of bytes of it has been read, or half of the window if that is less. If it
/// were refilled later, a distant server would have no requests for some time.
const STEP_MAX: u64 = 8 << 20;

/// A window is refilled by a multiple of this number of bytes.
const STEP_UNIT: u64 = 1 << 20;

/// Maximum window in bytes, unless the server needs more bytes in flight.
const WINDOW_MAX: u64 = 64 << 20;

/// Maximum window in bytes, whatever number of bytes the server needs in flight.
const FAR_WINDOW_MAX: u64 = 256 << 20;

/// A read continues a stream if its distance from the expected place is at most this number of bytes, because the reads
/// of the kernel's readahead arrive in any order.
const SLACK: u64 = 4 << 20;

/// A read at most this number of bytes before the end of a stream may be an overtaken read of the stream. Reads are
/// overtaken if the thread that answers them has to wait for a processor.
const OVERTAKEN_MAX: u64 = 32 << 20;

/// Number of consecutive small reads after which they count as a stream.
const SMALL_RUN: u32 = 4;

/// Minimum number of read-ahead bytes from which the share of used bytes is judged.
const JUDGED_FROM: u64 = 32 << 20;

/// A stream counts as abandoned if this number of reads has arrived since its last read. The number is `LEFT_READS`,
/// multiplied by one more than the number of streams. If a reader follows a predicted order, it is
/// `LEFT_READS_FORETOLD`.
const LEFT_READS: u64 = 4;
const LEFT_READS_FORETOLD: u64 = 256;

/// Number of consecutive reads of a stream outside its planned ranges after which the stream gives up these ranges.
const ELSEWHERE_READS: u32 = 32;

/// Maximum number of requested or planned ranges that are remembered.
const GIVEN_MAX: usize = 1 << 11;

/// Maximum number of planned ranges of one stream.
const PATH_MAX: usize = 64;

/// Maximum number of tensors that are planned at a time, because there may be many tiny ones.
const STEPS_MAX: usize = 4096;

/// Bytes of a page: the kernel requests whole pages.
const PAGE: u64 = 4096;

/// A handle through which the file is read.
#[derive(Debug)]
struct FileReader {
    id: u64,
    learner: ReadLearner,
    touches: Touches,
    /// Number of its last read.
    last: u64,
}

/// The streams of one file.
#[derive(Debug)]
pub struct Planner {
    /// Length of the file.
    len: u64,
    reach: Reach,
    streams: Vec<ReadStream>,
    readers: Vec<FileReader>,
    /// Tensors that were read.
    seen: SeenTensors,
    /// Number of reads so far.
    reads: u64,
    /// Window of the stream whose window grew last. New streams begin with it.
    window: u64,
    /// Maximum window in bytes. It depends on the number of bytes that the server needs in flight.
    longest: u64,
    /// Number of read-ahead bytes that were requested, and number of read-ahead bytes that were dropped before a
    /// request.
    used: u64,
    wasted: u64,
    storms: Storms,
    /// Requested or planned bytes, which are not planned again.
    given: Given,
    passed: PassedRanges,
    /// Planned ranges that were given up since the last read, because their readers read elsewhere.
    left: Vec<Range<u64>>,
}

impl Planner {
    /// A planner for a file of `len` bytes.
    pub fn new(len: u64, reach: Reach) -> Planner {
        Planner {
            len,
            reach,
            streams: Vec::new(),
            readers: Vec::new(),
            seen: SeenTensors::default(),
            reads: 0,
            window: reach.first,
            longest: WINDOW_MAX,
            used: 0,
            wasted: 0,
            storms: Storms::default(),
            given: Given::default(),
            passed: PassedRanges::default(),
            left: Vec::new(),
        }
    }

    /// Notes how many bytes have to be in flight, if that was measured. Windows may then have up to twice this number
    /// of bytes, because bytes arrive in any order, and bytes that arrive early stay in the window until the bytes
    /// before them arrive.
    pub fn need_in_flight(&mut self, wanted: Option<u64>) {
        let longest = wanted.unwrap_or(0).saturating_mul(2);
        self.longest = longest.clamp(WINDOW_MAX, FAR_WINDOW_MAX);
        self.window = self.window.min(self.longest);
    }

    /// Notes a read, and returns the actions that follow from it. The read-ahead bytes of all streams together are at
    /// most `most`.
    pub fn observe(&mut self, request: &Request, most: u64, tensors: &dyn TensorMap) -> Advice {
        self.reads += 1;
        let push = self.storms.push(request, tensors);
        // A second request for the same bytes means that the kernel has dropped them from its page cache.
        if self.given.gap(&request.range).is_none() && !self.is_planned(&request.range) {
            self.forget();
        }
        let reader = self.reader_of(request.reader);
        let touches = &mut self.readers[reader].touches;
        let (only_touched, was_pass) = (touches.expected().is_some(), touches.is_pass());
        touches.read(&request.range, tensors);
        let loads_now = only_touched && touches.expected().is_none();
        let index = self.stream_of(request, reader, tensors);
        if let Some(index) = index.filter(|_| loads_now) {
            if was_pass {
                // The reader may load the tensors in another order than the order in which it read their starts.
                self.readers[reader].learner = ReadLearner::default();
            }
            self.pass_starts(index);
        }
        self.strike(&request.range);
        self.given.add(&request.range);
        let ahead = index.and_then(|index| {
            self.enter(index, reader, tensors);
            self.plan(index, reader, most, tensors)
        });
        if self.seen.add(&request.range, tensors) || self.given.count() > GIVEN_MAX {
            self.forget();
            self.given.add(&request.range);
        }
        while let Some(oldest) = self.passed.pop_excess() {
            self.given.remove(&oldest);
        }
        let left = std::mem::take(&mut self.left);
        left.iter().for_each(|range| self.given.remove(range));
        Advice { ahead, left, push }
    }

    /// Forgets the bytes in `given` except planned bytes, because the kernel has dropped them or because there are too
    /// many ranges.
    fn forget(&mut self) {
        self.given.clear();
        let planned = self.streams.iter().flat_map(|stream| &stream.path);
        planned.chain(self.passed.iter()).for_each(|range| self.given.add(range));
    }

    /// The parts of `range` that are planned and not read yet.
    fn planned_in(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let Range { start, end } = *range;
        let planned = self.streams.iter().flat_map(|stream| &stream.path).chain(self.passed.iter());
        planned.map(move |part| part.start.max(start)..part.end.min(end)).filter(|p| !p.is_empty())
    }

    /// Whether some bytes of `range` are planned and not read yet.
    pub fn is_planned(&self, range: &Range<u64>) -> bool {
        self.planned_in(range).next().is_some()
    }

    /// Forgets the planned bytes of `range`, because they are not read ahead now or were dropped.
    fn withdraw(&mut self, range: &Range<u64>) {
        let parts: Vec<Range<u64>> = self.planned_in(range).collect();
        parts.iter().for_each(|part| self.given.remove(part));
        self.strike(range);
    }

    /// Removes bytes that a reader has read from all planned ranges.
    fn strike(&mut self, read: &Range<u64>) {
        self.streams.iter_mut().for_each(|stream| stream.strike(read));
        self.passed.strike(read);
    }

    /// If a tensor is requested page by page, returns its range, or 1 GiB of it. `observe` does this too. This function
    /// is for reads that are answered without bytes of the source.
    pub fn storm(&mut self, request: &Request, tensors: &dyn TensorMap) -> Option<Range<u64>> {
        self.storms.push(request, tensors)
    }

    /// Notes that the bytes `refused` are not read yet, because enough bytes of their source are in flight.
    pub fn put_off(&mut self, refused: &[Range<u64>]) {
        refused.iter().for_each(|range| self.withdraw(range));
    }

    /// Notes that the cache has no memory for the bytes `refused`. Each of these ranges is the last part of a range
    /// that was planned for the stream.
    pub fn cut_short(&mut self, stream: StreamId, refused: &[Range<u64>]) {
        self.put_off(refused);
        if let Some(found) = self.streams.iter_mut().find(|other| other.id == stream) {
            found.halve(WINDOW_MIN);
        }
    }

    /// Returns ranges to evict so that `stream` gets memory: the oldest range that a reader skipped, or the ranges of
    /// the stream that was abandoned longest ago. `None` if all other streams continue.
    pub fn choose_evictions(&mut self, stream: StreamId) -> Option<Vec<Range<u64>>> {
        if let Some(passed) = self.passed.pop_old(self.reads) {
            self.given.remove(&passed);
            return Some(vec![passed]);
        }
        let patience = match self.readers.iter().any(|reader| reader.learner.trust > 1) {
            true => LEFT_READS_FORETOLD,
            false => self.patience(),
        };
        let is_left = |s: &ReadStream| s.id != stream && s.last + patience < self.reads;
        let streams = self.streams.iter().enumerate();
        let left = streams.filter(|(_, s)| !s.path.is_empty() && is_left(s));
        let (index, _) = left.min_by_key(|(_, s)| s.last)?;
        let left: Vec<Range<u64>> = self.streams.swap_remove(index).path.into();
        left.iter().for_each(|range| self.given.remove(range));
        Some(left)
    }

    fn patience(&self) -> u64 {
        LEFT_READS * (self.streams.len() as u64 + 1)
    }

    /// Notes that the bytes `range` are no longer held, and that `wasted` of them were never
    /// requested.
    pub fn dropped(&mut self, range: &Range<u64>, wasted: u64) {
        if wasted > 0 {
            // The reader is slower than expected. With the same window, as many bytes would be dropped again.
            let planned = self.streams.iter_mut().filter(|s| s.has_planned(range));
            planned.for_each(|s| s.halve(self.reach.first));
        }
        self.withdraw(range);
        self.judge(0, wasted);
    }

    /// Counts read-ahead bytes that were used or wasted.
    pub fn judge(&mut self, used: u64, wasted: u64) {
        self.used += used;
        self.wasted += wasted;
        // Readers do not always finish a tensor that they begin.
        if self.wasted > self.used / 8 {
            self.window = (self.window / 2).max(self.reach.first);
        }
        // Older numbers count less than recent ones.
        if self.used + self.wasted > 8 * JUDGED_FROM {
            self.used /= 2;
            self.wasted /= 2;
        }
    }

    /// Whether less than half of the read-ahead bytes were used.
    fn is_wasteful(&self) -> bool {
        self.used + self.wasted >= JUDGED_FROM && self.wasted > self.used
    }

    /// Moves the stream to which `request` belongs forward, and returns its index. If there is none, begins a stream.
    /// Two kinds of reads begin no stream, and the result is `None`. The first kind has the bytes that the kernel reads
    /// in front of a requested page, up to the start of the tensor of that page. The second kind was overtaken by later
    /// reads.
    fn stream_of(
        &mut self,
        request: &Request,
        reader: usize,
        tensors: &dyn TensorMap,
    ) -> Option<usize> {
        let Range { start, end } = request.range;
        let continues = |s: &ReadStream| s.next.abs_diff(start) <= SLACK;
        let distance = |s: &ReadStream| s.next.abs_diff(start);
        let (reads, wasteful) = (self.reads, self.is_wasteful());
        let candidates = self.streams.iter_mut().enumerate().filter(|(_, s)| continues(s));
        if let Some((index, stream)) = candidates.min_by_key(|(_, s)| distance(s)) {
            stream.last = reads;
            stream.run = stream.run.saturating_add(1);
            stream.strike(&request.range);
            let passed = stream.move_on(end);
            // The window grows at most once for all late reads within one window.
            if request.late && !wasteful && stream.grown >= stream.window {
                stream.grown = 0;
                stream.window = (stream.window * 2).min(self.longest);
                self.window = stream.window;
            }
            self.passed.add(passed, self.reads);
            self.take_over(index);
            return Some(index);
        }
        let only_touches = self.readers[reader].touches.expected().is_some();
        let (planned, window) = self.planned_for(request, only_touches);
        if planned.is_empty()
            && (reads_around(request, tensors) || self.is_overtaken(&request.range))
        {
            return None;
        }
        let touched_now = self.readers[reader].touches.tensor();
        let tensor = touched_now.unwrap_or_else(|| touched(request, tensors));
        // If a reader begins at the start of a tensor, it mostly reads the tensor to its end.
        let at_start = tensor.range.start + PAGE > start && tensor.range.start < end;
        let window = match window {
            Some(window) => window,
            None if wasteful => self.reach.first,
            None if at_start => self.window,
            None => (self.window / 2).max(self.reach.first),
        };
        let hesitates = end - start < SMALL || wasteful;
        let run = if hesitates && planned.is_empty() { 0 } else { SMALL_RUN };
        let id = StreamId(reads);
        let mut stream = ReadStream {
            id,
            next: end,
            path: planned,
            window,
            run,
            elsewhere: 0,
            began: start,
            grown: end - start,
            tensor,
            last: reads,
        };
        stream.strike(&request.range);
        let passed = stream.move_on(end);
        self.passed.add(passed, self.reads);
        if self.streams.len() < STREAMS_MAX {
            self.streams.push(stream);
            return Some(self.streams.len() - 1);
        }
        let oldest =
            (0..self.streams.len()).min_by_key(|&index| self.streams[index].last).unwrap_or(0);
        let before = std::mem::replace(&mut self.streams[oldest], stream);
        self.left.extend(before.path);
        Some(oldest)
    }

    /// Whether later reads of a stream have overtaken the read of `range`, so that the stream has skipped these bytes.
    fn is_overtaken(&self, range: &Range<u64>) -> bool {
        let has_passed = |s: &ReadStream| {
            s.began <= range.start && range.end <= s.next && s.next - range.start <= OVERTAKEN_MAX
        };
        self.passed.iter().any(|passed| passed.contains(&range.start))
            && self.streams.iter().any(has_passed)
    }

    /// Counts the planned starts of other tensors as skipped, because the reader of stream `index` loads a tensor now.
    fn pass_starts(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        let next = stream.next;
        let path = std::mem::take(&mut stream.path).into_iter();
        let (here, elsewhere): (Vec<_>, Vec<_>) = path.partition(|range| range.contains(&next));
        stream.path = here.into();
        self.passed.add(elsewhere, self.reads);
    }

    /// If bytes of `request` are planned for a stream, removes these bytes and the planned ranges after them from that
    /// stream, and returns them for a new stream. Also returns the window of the stream for which they were planned.
    fn planned_for(
        &mut self,
        request: &Request,
        only_touches: bool,
    ) -> (VecDeque<Range<u64>>, Option<u64>) {
        let Range { start, end } = request.range;
        let meets = |range: &Range<u64>| range.start < end && start < range.end;
        let planned = self.streams.iter().position(|s| s.path.iter().any(meets));
        let Some(index) = planned else { return (VecDeque::new(), None) };
        let stream = &mut self.streams[index];
        let met = stream.path.iter().position(meets).unwrap_or(0);
        let taken = stream.take(start.max(stream.path[met].start));
        let mut planned: VecDeque<Range<u64>> = taken.into_iter().collect();
        let window = stream.window;
        // The reader has finished one tensor and begins the next one.
        if !stream.goes_on() {
            let mut rest = self.streams.swap_remove(index).path;
            if only_touches {
                // The reader has skipped these tensors.
                let passed = rest.drain(..met).collect();
                self.passed.add(passed, self.reads);
            }
            planned.extend(rest);
        }
        (planned, Some(window))
    }

    /// If the bytes right after the last read of stream `index` are planned for another stream, moves them to stream
    /// `index`.
    fn take_over(&mut self, index: usize) {
        let next = self.streams[index].next;
        if self.streams[index].goes_on() {
            return;
        }
        if let Some(taken) = self.streams.iter_mut().find_map(|other| other.take(next)) {
            self.streams[index].path.push_front(taken);
        }
    }

    /// The index of the reader called `id`. A new reader begins with the order that was learned from the reader with
    /// the latest read.
    fn reader_of(&mut self, id: u64) -> usize {
        let found = self.readers.iter().position(|reader| reader.id == id);
        let index = found.unwrap_or_else(|| {
            let latest = self.readers.iter().max_by_key(|reader| reader.last);
            let learner = latest.map_or_else(ReadLearner::default, |r| r.learner.follower());
            if self.readers.len() == READERS_MAX {
                let last = |index: &usize| self.readers[*index].last;
                let oldest = (0..READERS_MAX).min_by_key(last).unwrap_or(0);
                self.readers.swap_remove(oldest);
            }
            self.readers.push(FileReader { id, learner, touches: Touches::default(), last: 0 });
            self.readers.len() - 1
        });
        self.readers[index].last = self.reads;
        index
    }

    /// Notes the tensor that stream `index` has reached.
    fn enter(&mut self, index: usize, reader: usize, tensors: &dyn TensorMap) {
        let stream = &self.streams[index];
        let is_new = stream.last == stream.id.0;
        let mut tensor = stream.tensor.clone();
        if !is_new {
            let here = tensors.at(stream.next - 1);
            // The kernel reads a little more than the program requests.
            let is_begun = stream.goes_on() || stream.next >= tensor.range.end + SLACK;
            let is_before = stream.next <= tensor.range.start;
            if here.place == tensor.place || !is_begun || is_before {
                return;
            }
            tensor = here;
        }
        let mut state = std::mem::take(&mut self.readers[reader].learner);
        let stream = &self.streams[index];
        let passed = |t: &TensorSpan| self.seen.contains(t.place) || self.is_busy(t, index);
        if is_new {
            state.begins(&tensor, tensors, &passed);
        } else {
            state.goes_on(&stream.tensor, &tensor, tensors);
        }
        self.readers[reader].learner = state;
        self.streams[index].tensor = tensor;
    }

    /// Whether the reader of `stream` may still be active.
    fn is_recent(&self, stream: &ReadStream) -> bool {
        stream.last + LEFT_READS_FORETOLD >= self.reads
    }

    /// Whether a stream other than `index` reads the tensor.
    fn is_busy(&self, tensor: &TensorSpan, index: usize) -> bool {
        let others = self.streams.iter().enumerate().filter(|(other, _)| *other != index);
        others.map(|(_, s)| s).any(|s| s.tensor.place == tensor.place && self.is_recent(s))
    }

    /// Plans the ranges to read ahead for a stream.
    fn plan(
        &mut self,
        index: usize,
        reader: usize,
        most: u64,
        tensors: &dyn TensorMap,
    ) -> Option<(StreamId, Vec<Range<u64>>)> {
        let touched = self.readers[reader].touches.expected();
        let window = self.window_of(index, touched.is_some(), most);
        self.drop_path_if_reader_is_elsewhere(index, window);
        let needed = if self.is_wasteful() { 4 * SMALL_RUN } else { SMALL_RUN };
        let stream = &self.streams[index];
        // Ranges are planned only if many bytes of the window are free, to avoid many small reads.
        if stream.run < needed || stream.ahead() > window - (window / 2).min(STEP_MAX) {
            return None;
        }
        let planned = match touched {
            Some(around) => self.starts_ahead(index, reader, window, around, tensors),
            None => self.ranges_ahead(index, reader, window, tensors),
        };
        planned.ranges.iter().for_each(|range| self.given.add(range));
        let (in_tensor, beyond) = planned.ranges.split_at(planned.in_tensor);
        let stream = &mut self.streams[index];
        in_tensor.iter().rev().for_each(|range| stream.path.push_front(range.clone()));
        beyond.iter().for_each(|range| stream.plan(range.clone()));
        // The range that contains the next expected byte becomes the first one again.
        let next = stream.next;
        if let Some(taken) = stream.take(next) {
            stream.path.push_front(taken);
        }
        (!planned.ranges.is_empty()).then_some((stream.id, planned.ranges))
    }

    /// Maximum number of bytes that stream `index` reads ahead, if all streams together hold at
    /// most `most`.
    fn window_of(&self, index: usize, only_touches: bool, most: u64) -> u64 {
        // A stream that has no planned ranges, or had no read recently, needs no memory.
        let is_live = |s: &&ReadStream| {
            s.id != self.streams[index].id
                && !s.path.is_empty()
                && s.last + self.patience() >= self.reads
        };
        let live = self.streams.iter().filter(is_live).count() as u64 + 1;
        let least = if only_touches { self.reach.trial } else { 0 };
        let window = self.streams[index].window.max(least);
        let share = if self.longest > WINDOW_MAX { most / 8 * 7 } else { most / 3 * 2 };
        window.min(share).min(self.longest).min(most / live).max(WINDOW_MIN.min(most))
    }

    /// Gives up the planned ranges of stream `index` after `ELSEWHERE_READS` consecutive reads elsewhere.
    fn drop_path_if_reader_is_elsewhere(&mut self, index: usize, window: u64) {
        let stream = &mut self.streams[index];
        let is_full = stream.ahead() > window / 2 || stream.path.len() >= PATH_MAX;
        let is_elsewhere = !stream.goes_on() && is_full;
        stream.elsewhere = if is_elsewhere { stream.elsewhere + 1 } else { 0 };
        if stream.elsewhere == ELSEWHERE_READS {
            stream.elsewhere = 0;
            self.left.extend(stream.path.drain(..));
        }
    }

    /// The ranges to read ahead for stream `index`, tensor by tensor. They start at the end of its last read, so the
    /// rest of the current tensor comes before the tensors after it.
    fn ranges_ahead(
        &self,
        index: usize,
        reader: usize,
        window: u64,
        tensors: &dyn TensorMap,
    ) -> PlannedRanges {
        let stream = &self.streams[index];
        let ahead = stream.ahead();
        let beyond = self.beyond(stream, &self.readers[reader].learner);
        let mut planned = PlannedRanges::after(stream, refill(window, ahead));
        let mut tensor = stream.tensor.clone();
        // Only a learned order may lead back to a tensor that was visited. In the other orders, visited tensors are not
        // recorded, because there may be many tiny ones.
        let may_lead_back = self.readers[reader].learner.order() == Order::Layers;
        let mut visited = Vec::new();
        for _ in 0..STEPS_MAX {
            if planned.is_full() || visited.contains(&tensor.place) {
                break;
            }
            visited.extend(may_lead_back.then_some(tensor.place));
            let end = tensor.range.end.next_multiple_of(PAGE).min(self.len);
            let end_here = end.min(self.read_by_others(stream, planned.from));
            planned.fill(&self.given, end_here, window);
            if tensor.place == stream.tensor.place {
                planned.in_tensor = planned.ranges.len();
            }
            if self.given.gap(&(planned.from..end_here)).is_some() || end_here < end {
                break;
            }
            planned.from = planned.from.max(end);
            let Some(next) = self.next_tensor(index, reader, &tensor, tensors) else { break };
            planned.room = planned.room.min(beyond.saturating_sub(ahead + planned.len()));
            planned.go_to(&next);
            tensor = next;
        }
        planned
    }

    /// The bytes around the starts of the next tensors, for a reader that reads no other bytes.
    fn starts_ahead(
        &self,
        index: usize,
        reader: usize,
        window: u64,
        around: Around,
        tensors: &dyn TensorMap,
    ) -> PlannedRanges {
        let stream = &self.streams[index];
        let ahead = stream.ahead();
        let beyond = self.beyond(stream, &self.readers[reader].learner);
        let room = refill(window, ahead).min(beyond.saturating_sub(ahead));
        let mut planned = PlannedRanges::after(stream, room);
        let mut tensor = stream.tensor.clone();
        for _ in 0..PATH_MAX {
            let next = self.next_tensor(index, reader, &tensor, tensors);
            let Some(next) = next.filter(|_| !planned.is_full()) else { break };
            let page = next.range.start / PAGE * PAGE;
            let Range { start, end } = around.of(page, self.len);
            // Ranges around earlier starts may already contain the bytes from `start` on.
            let reached = planned.ranges.iter().filter(|range| range.start < end).map(|r| r.end);
            planned.from = reached.max().unwrap_or(0).max(start);
            planned.fill(&self.given, end, window);
            tensor = next;
        }
        planned
    }

    /// The first offset, from byte `from` on, at which another stream has begun to read. The bytes after this offset
    /// have been read.
    fn read_by_others(&self, stream: &ReadStream, from: u64) -> u64 {
        let has_read =
            |s: &ReadStream| s.id != stream.id && self.is_recent(s) && s.next - s.began > SLACK;
        let others = self.streams.iter().filter(|s| s.began >= from && has_read(s));
        others.map(|s| s.began).min().unwrap_or(self.len)
    }

    /// Maximum number of bytes to read ahead if some of them lie beyond the current tensor.
    fn beyond(&self, stream: &ReadStream, reader: &ReadLearner) -> u64 {
        match reader.trust {
            // A reader that has read most of a tensor may continue with the next tensor.
            0 | 1 if !reader.is_mistaken() => {
                let Range { start, end } = stream.tensor.range;
                let read = stream.next.saturating_sub(stream.began.max(start));
                if read >= (end - start) / 4 * 3 { self.reach.first } else { 0 }
            }
            0 | 1 => 0,
            2 | 3 => self.reach.trial,
            _ => u64::MAX,
        }
    }

    /// The tensor that the reader of stream `index` is likely to begin after `tensor`.
    fn next_tensor(
        &self,
        index: usize,
        reader: usize,
        tensor: &TensorSpan,
        tensors: &dyn TensorMap,
    ) -> Option<TensorSpan> {
        let passed = |t: &TensorSpan| self.seen.contains(t.place) || self.is_busy(t, index);
        let reader = &self.readers[reader].learner;
        let next = reader.next(tensor, tensors, &passed)?;
        if reader.order() != Order::File || next.range.end - next.range.start >= SMALL {
            return Some(next);
        }
        // There may be many tiny tensors, so in the order of the file they are planned together.
        let beyond = tensors.at((next.range.start + SMALL).min(self.len - 1));
        let is_more = beyond.place > next.place + 1;
        let range = next.range.start..beyond.range.start;
        Some(if is_more { TensorSpan { place: beyond.place - 1, range } } else { next })
    }
}

/// Removes `read` from `path`.
fn strike(path: &mut VecDeque<Range<u64>>, read: &Range<u64>) {
    let meets = |range: &Range<u64>| range.start < read.end && read.start < range.end;
    while let Some(index) = path.iter().position(meets) {
        let Some(range) = path.remove(index) else { return };
        for rest in [read.end..range.end, range.start..read.start] {
            if !rest.is_empty() {
                path.insert(index, rest);
            }
        }
    }
}
