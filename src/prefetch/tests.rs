//! Tests of the planner with made-up reads.

use super::passed::PASSED_MAX;
use super::*;

mod recorded;

const MIB: u64 = 1 << 20;

/// A file of 40 tensors of 64 MiB, whose orders are all the same.
struct Even;

impl TensorMap for Even {
    fn at(&self, offset: u64) -> TensorSpan {
        let range = tensor_at(offset);
        TensorSpan { place: (range.start / (64 * MIB)) as u32 + 1, range }
    }

    fn after(&self, place: u32, _: Order) -> Option<TensorSpan> {
        (place < 40).then(|| self.at(u64::from(place) * 64 * MIB))
    }
}

fn planner() -> Planner {
    Planner::new(40 * 64 * MIB, Reach::NEAR)
}

fn tensor_at(offset: u64) -> Range<u64> {
    let start = offset / (64 * MIB) * (64 * MIB);
    start..start + 64 * MIB
}

fn request(start: u64, len: u64, late: bool) -> Request {
    Request { range: start..start + len, reader: 0, late, now: 0 }
}

fn read(planner: &mut Planner, start: u64, len: u64, late: bool) -> Vec<Range<u64>> {
    let advice = planner.observe(&request(start, len, late), u64::MAX, &Even);
    advice.ahead.map_or_else(Vec::new, |(_, ranges)| ranges)
}

#[test]
fn a_reader_in_order_is_read_ahead_of_without_a_gap() {
    let mut planner = planner();
    let (mut at, mut planned) = (0, None);
    while at < 2000 * MIB {
        for ahead in read(&mut planner, at, MIB, true) {
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
    for at in 0..500 {
        for (which, planner, late) in [(0, &mut waiting, true), (1, &mut served, false)] {
            for ahead in read(planner, at * MIB, MIB, late) {
                longest[which] = longest[which].max(ahead.end - (at + 1) * MIB);
            }
        }
    }
    assert_eq!(longest, [WINDOW_MAX, WINDOW_MIN]);
}

#[test]
fn a_full_window_is_refilled_in_steps_of_whole_units_and_long_before_it_is_half_empty() {
    let mut planner = planner();
    let mut planned = 0;
    for at in 0..600 {
        let (start, len) = (at * MIB, MIB - (at % 2) * 4096);
        let ahead = read(&mut planner, start, len, true);
        if at > 300 {
            assert!(ahead.iter().all(|range| (range.end - range.start).is_multiple_of(STEP_UNIT)));
            assert!(
                planned >= start + WINDOW_MAX - STEP_MAX - 2 * MIB,
                "{} at {at}",
                planned / MIB
            );
        }
        planned = ahead.last().map_or(planned, |range| range.end);
    }
}

#[test]
fn a_distant_file_is_read_further_ahead_before_its_reader_is_known() {
    let ahead_at = |reach: Reach, at: u64| {
        let mut planner = Planner::new(40 * 64 * MIB, reach);
        let mut end = 0;
        for start in 0..=at {
            let planned = read(&mut planner, start * MIB, MIB, false);
            end = planned.last().map_or(end, |range| range.end);
        }
        end - (at + 1) * MIB
    };
    let [near, far] = [Reach::NEAR, Reach::FAR];
    assert!(ahead_at(near, 0) == near.first && ahead_at(far, 0) == far.first);
    // At the end of the first tensor, it is not known whether the reader wants the next tensor.
    assert!(ahead_at(near, 63) <= near.first && ahead_at(far, 63) > near.first);
    // At the end of the third tensor, two predictions were right.
    assert!(ahead_at(far, 191) <= far.trial);
}

#[test]
fn the_first_touch_of_a_tensor_plans_to_its_end_and_no_further() {
    let mut planner = planner();
    for tensor in [7, 3, 20, 11] {
        let (mut at, end) = (tensor * 64 * MIB, (tensor + 1) * 64 * MIB);
        let mut furthest = 0;
        while at < tensor * 64 * MIB + 40 * MIB {
            for ahead in read(&mut planner, at, MIB, true) {
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
        for ahead in read(&mut planner, at * MIB, MIB, true) {
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
        assert_eq!(read(&mut planner, at, 4096, true), []);
    }
}

#[test]
fn small_reads_at_many_places_take_little_memory() {
    let mut planner = planner();
    for page in 0..40_000 {
        read(&mut planner, page * 16 * PAGE, PAGE, false);
    }
    assert!(planner.given.count() <= GIVEN_MAX);
}

#[test]
fn reading_ahead_in_vain_ends_until_reads_follow_each_other_for_long() {
    let mut planner = planner();
    planner.judge(0, 100 * MIB);
    for (count, at) in (0..10u64).map(|n| (n, n * 200 * MIB)) {
        assert_eq!(read(&mut planner, at % (2500 * MIB), MIB, true), [], "read {count}");
    }
    let reads = (0..40).flat_map(|at| read(&mut planner, 400 * MIB + at * MIB, MIB, true));
    assert!(reads.count() > 0);
}

#[test]
fn four_readers_at_once_are_four_streams() {
    let mut planner = planner();
    let mut planned = [0; 4];
    for at in 0..100 {
        for (reader, planned) in planned.iter_mut().enumerate() {
            let start = reader as u64 * 600 * MIB + at * MIB;
            for ahead in read(&mut planner, start, MIB, true) {
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
    let mut ends: Vec<u64> = ahead.iter().filter(|a| a.start < 61 * MIB).map(|a| a.end).collect();
    ends.sort();
    assert_eq!(ends.last(), Some(&(61 * MIB)));
}

#[test]
fn tensors_in_any_order_are_read_ahead_of_to_their_ends_only() {
    let mut planner = planner();
    let mut past = 0;
    for tensor in [7, 3, 20, 11, 30, 1, 25, 9, 16, 5] {
        for at in 0..64 {
            for ahead in read(&mut planner, (tensor * 64 + at) * MIB, MIB, true) {
                past += ahead.end - ahead.start.max((tensor + 1) * 64 * MIB).min(ahead.end);
            }
        }
    }
    assert!(past <= 2 * Reach::NEAR.trial, "{past} bytes for nothing");
}

#[test]
fn what_there_was_no_room_for_is_planned_again() {
    let mut planner = planner();
    let advice = planner.observe(&request(0, MIB, false), u64::MAX, &Even);
    let (stream, ahead) = advice.ahead.unwrap();
    let refused = ahead[0].start + MIB..ahead[0].end;
    planner.cut_short(stream, &[refused]);
    let next = read(&mut planner, MIB, MIB, false);
    assert_eq!(next[0].start, ahead[0].start + MIB);
}

#[test]
fn what_waits_for_its_source_is_planned_again_and_costs_no_window() {
    let mut planner = planner();
    let advice = planner.observe(&request(0, MIB, false), u64::MAX, &Even);
    let ahead = advice.ahead.unwrap().1;
    let window = planner.streams[0].window;
    let waiting = ahead[0].start + MIB..ahead[0].end;
    planner.put_off(std::slice::from_ref(&waiting));
    assert_eq!(planner.streams[0].window, window);
    let next = read(&mut planner, MIB, MIB, false);
    assert_eq!(next[0].start, ahead[0].start + MIB);
}

#[test]
fn a_read_that_others_overtake_begins_no_read_ahead_of_its_own() {
    let mut planner = Planner::new(40 * 64 * MIB, Reach::FAR);
    let mut read_to = 0;
    for number in 0..1000_u64 {
        // Every tenth read arrives after the next nine.
        let number = match number % 10 {
            0 if number > 0 => continue,
            9 if number > 9 => vec![number, number - 9],
            _ => vec![number],
        };
        for number in number {
            let planned = read(&mut planner, number * MIB, MIB, true);
            read_to = read_to.max(number * MIB + MIB);
            let furthest = planned.iter().map(|range| range.end).max().unwrap_or(0);
            assert!(furthest <= read_to + planner.longest, "{furthest} at {read_to}");
        }
    }
    assert_eq!(planner.streams.len(), 1);
}

// An earlier version had a bug: if a reader was so slow that blocks were dropped unread, each read fetched 64 MiB.
#[test]
fn what_is_dropped_again_and_again_is_read_ahead_less_and_less() {
    let mut planner = planner();
    (0..64).for_each(|at| drop(read(&mut planner, at * MIB, MIB, true)));
    assert!(planner.streams[0].window >= 32 * MIB);
    let mut planned = 0;
    for at in 64..104 {
        let ahead = read(&mut planner, at * MIB, MIB, false);
        planned += ahead.iter().map(|range| range.end - range.start).sum::<u64>();
        let kept = planner.streams[0].path.clone();
        kept.iter().for_each(|range| planner.dropped(range, range.end - range.start));
    }
    assert!(planned <= 5 * 40 * MIB, "{planned}");
}

#[test]
fn what_was_read_ahead_of_a_stream_that_was_left_makes_way_and_no_other() {
    let mut planner = planner();
    let first = planner.observe(&request(0, MIB, false), u64::MAX, &Even).ahead.unwrap();
    let second = planner.observe(&request(640 * MIB, MIB, false), u64::MAX, &Even).ahead.unwrap();
    assert_eq!(planner.choose_evictions(second.0), None, "it was read a moment ago");
    for at in 1..30 {
        read(&mut planner, (640 + at) * MIB, MIB, false);
    }
    assert_eq!(planner.choose_evictions(second.0), Some(first.1));
    assert_eq!(planner.choose_evictions(second.0), None, "once");
}

#[test]
fn what_the_kernel_has_forgotten_is_read_ahead_again() {
    let mut planner = planner();
    let mut planned = [0; 2];
    for planned in &mut planned {
        for tensor in [9, 10, 11, 3, 4, 5, 20, 21, 22] {
            for at in 0..64 {
                let ahead = read(&mut planner, (tensor * 64 + at) * MIB, MIB, true);
                *planned += ahead.iter().map(|range| range.end - range.start).sum::<u64>();
            }
        }
    }
    assert!(planned[1] >= 500 * MIB && planned[1] >= planned[0] / 10 * 9, "{planned:?}");
}

/// A file of tensors of a few bytes each. It counts the calls of `after`.
struct Tiny {
    each: u64,
    steps: std::cell::Cell<u64>,
}

impl TensorMap for Tiny {
    fn at(&self, offset: u64) -> TensorSpan {
        let start = offset / self.each * self.each;
        TensorSpan { place: (offset / self.each) as u32 + 1, range: start..start + self.each }
    }

    fn after(&self, place: u32, _: Order) -> Option<TensorSpan> {
        self.steps.set(self.steps.get() + 1);
        let start = u64::from(place) * self.each;
        (start < 1 << 30).then(|| self.at(start))
    }
}

// An earlier version had a bug: a window was limited to 2 MiB, or to the number of tensors that can be visited one by
// one.
#[test]
fn tiny_tensors_are_read_ahead_of_by_whole_windows_in_a_few_steps() {
    for each in [64, 1024] {
        let tensors = Tiny { each, steps: Default::default() };
        let (mut planner, mut deepest, mut most_steps) = (Planner::new(1 << 30, Reach::NEAR), 0, 0);
        for at in (0..1 << 30).step_by(1 << 17) {
            let advice = planner.observe(&request(at, 1 << 17, true), u64::MAX, &tensors);
            let planned = advice.ahead.into_iter().flat_map(|(_, ranges)| ranges);
            deepest = planned.map(|range| range.end - at).max().unwrap_or(0).max(deepest);
            most_steps = tensors.steps.take().max(most_steps);
        }
        assert!(deepest >= WINDOW_MAX && most_steps < 4096, "{each}: {deepest} in {most_steps}");
    }
}

/// A file of 20 GiB with unknown tensors.
struct Whole;

const WHOLE: u64 = 20 << 30;

impl TensorMap for Whole {
    fn at(&self, _: u64) -> TensorSpan {
        TensorSpan { place: 1, range: 0..WHOLE }
    }

    fn after(&self, _: u32, _: Order) -> Option<TensorSpan> {
        None
    }
}

/// Reads a MiB that is not in the page cache. Returns the number of bytes that are planned near it, and far from it.
fn read_whole(planner: &mut Planner, start: u64, reader: u64) -> [u64; 2] {
    let request = Request { reader, ..request(start, MIB, true) };
    let advice = planner.observe(&request, u64::MAX, &Whole);
    assert_eq!(advice.left, [], "bytes are dropped at {start}");
    let mut planned = [0; 2];
    for range in advice.ahead.into_iter().flat_map(|(_, ranges)| ranges) {
        let is_far = range.start < start || range.start > start + 2 * WINDOW_MAX;
        planned[usize::from(is_far)] += range.end - range.start;
    }
    planned
}

// An earlier version had a bug: bytes that were read once were never read ahead again, but the bytes beyond them were
// read ahead repeatedly.
#[test]
fn a_part_of_a_tensor_that_is_read_again_is_read_ahead_again_and_nothing_beyond_it() {
    let mut planner = Planner::new(WHOLE, Reach::NEAR);
    for _ in 0..3 {
        let (mut near, mut far) = (0, 0);
        for at in 0..1000 {
            let planned = read_whole(&mut planner, at * MIB, 0);
            (near, far) = (near + planned[0], far + planned[1]);
        }
        assert!((900 * MIB..1100 * MIB).contains(&near) && far == 0, "{near}, {far}");
    }
}

#[test]
fn a_reader_that_follows_another_one_without_a_page_cache_is_read_ahead_of_too() {
    let mut planner = Planner::new(WHOLE, Reach::NEAR);
    let mut planned = [0; 2];
    for at in 0..2000 {
        for (reader, behind) in [(0, 0), (1, 100)].into_iter().filter(|(_, b)| *b <= at) {
            let [near, far] = read_whole(&mut planner, (at - behind) * MIB, reader);
            assert_eq!(far, 0, "at {at}");
            planned[reader as usize] += near;
        }
    }
    assert!(planned.iter().all(|bytes| *bytes >= 1700 * MIB), "{planned:?}");
}

// An earlier version had a bug: it dropped rows that another reader was about to request.
#[test]
fn what_a_reader_of_half_of_each_row_passes_over_stays_until_there_is_no_room() {
    for (half, found) in [(2 * PAGE, 90 * MIB), (32 * PAGE, 20 * MIB)] {
        let mut planner = planner();
        for at in (0..100 * MIB).step_by(2 * half as usize) {
            let advice = planner.observe(&request(at, half, true), u64::MAX, &Even);
            assert_eq!(advice.left, [], "at {at}");
            assert!(planner.streams.iter().all(|s| s.path.len() <= 4), "at {at}");
        }
        assert!(planner.passed.iter().count() <= PASSED_MAX && planner.given.count() <= GIVEN_MAX);
        let left = std::iter::from_fn(|| planner.choose_evictions(StreamId(1))).flatten();
        assert!(left.map(|range| range.end - range.start).sum::<u64>() >= found);
    }
}

// An earlier version had a bug: for a second reader of such bytes, nothing was read ahead.
#[test]
fn what_was_dropped_before_anybody_asked_for_it_is_planned_again() {
    let mut planner = planner();
    let ahead = read(&mut planner, 0, MIB, false);
    assert_eq!(ahead.first(), Some(&(MIB..3 * MIB)));
    planner.dropped(&(0..3 * MIB), 2 * MIB);
    assert!(!planner.is_planned(&(0..64 * MIB)));
    assert_eq!(read(&mut planner, MIB / 2, MIB / 2, false)[0].start, MIB);
}

// An earlier version had a bug: such bytes stayed planned if another stream had taken them over, or if the stream had
// ended.
#[test]
fn bytes_without_room_are_withdrawn_from_whichever_stream_has_them_and_no_others() {
    let mut planner = planner();
    let (stream, _) = planner.observe(&request(0, MIB, false), u64::MAX, &Even).ahead.unwrap();
    planner.streams[0].path[0].end = 9 * MIB;
    planner.streams[0].id = StreamId(u64::MAX);
    planner.given.add(&(0..9 * MIB));
    let refused = 2 * MIB..3 * MIB;
    planner.cut_short(stream, std::slice::from_ref(&refused));
    assert_eq!(planner.streams[0].path, [MIB..2 * MIB, 3 * MIB..9 * MIB]);
    assert_eq!(planner.given.gap(&(0..9 * MIB)), Some(refused));
}

// An earlier version had a bug: after the last tensor of its order was planned, nothing more was planned for a stream.
#[test]
fn the_rest_of_a_tensor_that_is_read_is_planned_whatever_else_is() {
    let mut planner = planner();
    read(&mut planner, 0, MIB, false);
    planner.streams[0].path.clear();
    planner.streams[0].path.push_back(39 * 64 * MIB..40 * 64 * MIB - MIB);
    planner.forget();
    planner.need_in_flight(Some(WINDOW_MAX));
    planner.streams[0].window = 2 * WINDOW_MAX;
    assert_eq!(read(&mut planner, MIB, MIB, false).first().unwrap().start, 2 * MIB);
}

// An earlier version had a bug: if a new stream replaced another stream, the read-ahead bytes of the old stream had no
// owner.
#[test]
fn bytes_that_are_read_ahead_have_a_stream_until_they_are_read_or_left() {
    let mut planner = planner();
    let (mut held, mut twice) = (given::Given::default(), 0);
    let mut seed = 1u64;
    for _ in 0..3000 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
        let start = (seed >> 20) % (2500 * MIB) / MIB * MIB;
        for at in 0..(seed >> 60) + 1 {
            let read = request((start + at * MIB).min(2559 * MIB), MIB, true);
            let advice = planner.observe(&read, u64::MAX, &Even);
            held.remove(&read.range);
            advice.left.iter().for_each(|range| held.remove(range));
            for range in advice.ahead.into_iter().flat_map(|(_, ranges)| ranges) {
                let mut gap = range.start;
                while let Some(new) = held.gap(&(gap..range.end)) {
                    twice += new.start - gap;
                    gap = new.end;
                }
                twice += range.end - gap;
                held.add(&range);
            }
        }
    }
    planner.streams.iter().flat_map(|s| &s.path).for_each(|range| held.remove(range));
    planner.passed.iter().for_each(|range| held.remove(range));
    assert_eq!(held.gap(&(0..2560 * MIB)), Some(0..2560 * MIB), "all of it has an owner");
    assert_eq!(twice, 0, "nothing is planned while it is planned");
}

#[test]
fn a_storm_of_page_faults_in_one_tensor_is_answered_with_the_tensor_once() {
    let mut planner = planner();
    let mut pushed = Vec::new();
    // The second half of the requests comes later, while the tensor is being pushed.
    for n in 0..200u64 {
        let at = 64 * MIB * 5 + (n * 7919 * 4096) % (64 * MIB);
        let now = if n < 100 { n / 4 } else { 300 + n / 4 };
        let request = Request { now, ..request(at, 4096, false) };
        pushed.extend(planner.observe(&request, u64::MAX, &Even).push);
    }
    assert_eq!(pushed, [tensor_at(64 * MIB * 5)]);
    let slow = |n: u64| Request { now: n * 100, ..request(n * MIB, 4096, false) };
    let mut planner = Planner::new(2500 * MIB, Reach::NEAR);
    assert!((0..60).all(|n| planner.observe(&slow(n), u64::MAX, &Even).push.is_none()));
}

#[test]
fn a_storm_of_page_faults_in_a_long_tensor_is_answered_with_the_gibibyte_that_has_them() {
    let mut planner = Planner::new(WHOLE, Reach::NEAR);
    let mut pushed = Vec::new();
    for n in 0..400u64 {
        let start = if n < 100 { 3 << 30 } else { 20 << 30 };
        let at = start - (n % 100 + 1) * 4096;
        pushed.extend(planner.storm(&Request { now: n, ..request(at, 4096, false) }, &Whole));
    }
    assert_eq!(pushed, [2 << 30..3 << 30, 19 << 30..WHOLE]);
}

/// The reads for a mapped page at the start of tensor `number`. The kernel reads as many bytes before the page as after
/// it.
fn touch(planner: &mut Planner, number: u64) -> Vec<Range<u64>> {
    let first = number * 64 * MIB - 2 * MIB;
    (0..4).flat_map(|part| read(planner, first + part * MIB, MIB, true)).collect()
}

// `from_pretrained` reads the start of each tensor before it loads a tensor. An earlier version had a bug: each start
// cost a round trip, and 8 MiB of each tensor were read ahead too early.
#[test]
fn only_the_starts_of_tensors_are_read_ahead_of_a_reader_that_requests_nothing_else() {
    let mut planner = Planner::new(40 * 64 * MIB, Reach::FAR);
    let mut planned: Vec<Range<u64>> = Vec::new();
    for number in 1..30 {
        let start = number * 64 * MIB;
        let around = start - 2 * MIB..start + 2 * MIB;
        assert!(planned.contains(&around) || number < 5, "{number} is not read ahead: {planned:?}");
        let ahead = touch(&mut planner, number);
        planned.extend(ahead.into_iter().filter(|_| number > 3));
    }
    let outside = |range: &&Range<u64>| {
        let start = (range.start + 2 * MIB) / (64 * MIB) * 64 * MIB;
        range.start + 2 * MIB < start || range.end > start + 2 * MIB
    };
    assert_eq!(planned.iter().find(outside), None);
    // Then the reader loads the first tensor, and all of its bytes after the first few MiB are read ahead.
    let mut at = 66 * MIB;
    let mut ahead: Vec<Range<u64>> = Vec::new();
    while at < 126 * MIB {
        let is_foreseen = ahead.iter().any(|range| range.contains(&at));
        assert!(is_foreseen || at < 72 * MIB, "{} MiB", at / MIB);
        ahead.extend(read(&mut planner, at, MIB, true));
        at += MIB;
    }
}

/// Tensors of this many MiB.
struct EvenOf(u64);

impl TensorMap for EvenOf {
    fn at(&self, offset: u64) -> TensorSpan {
        let place = offset / (self.0 * MIB);
        TensorSpan {
            place: place as u32 + 1,
            range: place * self.0 * MIB..(place + 1) * self.0 * MIB,
        }
    }

    fn after(&self, place: u32, _: Order) -> Option<TensorSpan> {
        Some(self.at(u64::from(place) * self.0 * MIB))
    }
}

/// Several threads load tensors of `len` MiB. Returns the percentage of reads at which they are taken for a reader that
/// reads only starts. The threads take turns, at random if there is a seed.
fn taken_for_touches(threads: u64, len: u64, mut seed: Option<u64>) -> u64 {
    let (tensors, mut touches) = (EvenOf(len), Touches::default());
    let mut at: Vec<u64> = (0..threads).map(|thread| thread * len * MIB).collect();
    let (mut next, mut touching) = (threads, 0);
    let reads = 64 * len * 8;
    for read in 0..reads {
        let turn = seed.as_mut().map_or(read, |seed| {
            *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *seed >> 33
        });
        let at = &mut at[(turn % threads) as usize];
        touches.read(&(*at..*at + MIB / 8), &tensors);
        touching += u64::from(touches.expected().is_some());
        assert!(!touches.is_pass(), "{threads} threads, tensors of {len} MiB");
        *at += MIB / 8;
        if at.is_multiple_of(len * MIB) {
            *at = next * len * MIB;
            next += 1;
        }
    }
    touching * 100 / reads
}

// An earlier version had a bug: if several threads load tensors, they read ends and starts of tensors in turns, and
// these reads were taken for reads of starts only.
#[test]
fn threads_that_load_tensors_pass_for_a_reader_of_starts_in_few_of_their_reads() {
    for (threads, len) in [(2, 8), (4, 8), (8, 8), (4, 12), (4, 16), (8, 16), (2, 32), (4, 64)] {
        let share = taken_for_touches(threads, len, Some(1));
        assert!(share <= 8, "{threads} threads, tensors of {len} MiB: {share} % of the reads");
    }
    for (threads, len) in [(2, 16), (4, 20), (8, 12), (8, 20), (6, 16), (5, 32)] {
        let share = taken_for_touches(threads, len, None);
        assert!(share <= 25, "{threads} threads in turns, {len} MiB: {share} % of the reads");
    }
}

/// Tensors of 8 KiB and of 64 MiB in turns.
struct Norms;

impl TensorMap for Norms {
    fn at(&self, offset: u64) -> TensorSpan {
        let start = offset / (64 * MIB) * (64 * MIB);
        let (small, place) = (start + (8 << 10), (start / (64 * MIB)) as u32 * 2 + 1);
        match offset < small {
            true => TensorSpan { place, range: start..small },
            false => TensorSpan { place: place + 1, range: small..start + 64 * MIB },
        }
    }

    fn after(&self, place: u32, _: Order) -> Option<TensorSpan> {
        let number = u64::from(place - 1) / 2;
        let next =
            if place % 2 == 1 { number * 64 * MIB + (8 << 10) } else { (number + 1) * 64 * MIB };
        (place < 80).then(|| self.at(next))
    }
}

#[test]
fn starts_that_lie_close_together_are_planned_once() {
    let mut planner = Planner::new(40 * 64 * MIB, Reach::FAR);
    let mut planned: Vec<Range<u64>> = Vec::new();
    for number in 1..30 {
        for part in 0..4 {
            let at = number * 64 * MIB - 2 * MIB + part * MIB;
            let advice = planner.observe(&request(at, MIB, true), u64::MAX, &Norms);
            let ahead = advice.ahead.map_or_else(Vec::new, |(_, ranges)| ranges);
            planned.extend(ahead.into_iter().filter(|_| number > 5));
        }
    }
    planned.sort_by_key(|range| range.start);
    assert!(planned.len() > 10 && planned.is_sorted_by(|a, b| a.end <= b.start), "{planned:?}");
}

// An earlier version had a bug: if a reader read fewer bytes of each start than before, the unread rest of the planned
// starts filled the window.
#[test]
fn starts_that_are_passed_over_do_not_end_the_read_ahead_of_others() {
    let mut planner = Planner::new(40 * 64 * MIB, Reach::FAR);
    (1..4).for_each(|number| drop(touch(&mut planner, number)));
    let mut ahead: Vec<Range<u64>> = Vec::new();
    for number in 4..36 {
        let start = number * 64 * MIB;
        let is_foreseen = ahead.iter().any(|range| range.contains(&start));
        assert!(is_foreseen || number < 6, "{number}");
        ahead.extend(read(&mut planner, start, MIB / 2, true));
    }
}
