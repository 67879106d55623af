//! The ranges that are planned for one stream at a time.

use std::ops::Range;

use super::given::Given;
use super::stream::ReadStream;
use super::{PAGE, PATH_MAX, STEP_UNIT};
use crate::order::TensorSpan;

/// Ranges to read ahead for a stream, while they are chosen.
#[derive(Debug)]
pub(super) struct PlannedRanges {
    pub(super) ranges: Vec<Range<u64>>,
    /// Number of the first of them, which belong to the tensor that the stream reads.
    pub(super) in_tensor: usize,
    /// Where the next range may begin.
    pub(super) from: u64,
    /// Bytes that may be added.
    pub(super) room: u64,
    /// Maximum number of ranges.
    most: usize,
}

impl PlannedRanges {
    /// No ranges yet, of `room` bytes at most, after the last read of `stream`.
    pub(super) fn after(stream: &ReadStream, room: u64) -> PlannedRanges {
        let most = PATH_MAX.saturating_sub(stream.path.len());
        PlannedRanges { ranges: Vec::new(), in_tensor: 0, from: stream.next, room, most }
    }

    pub(super) fn is_full(&self) -> bool {
        self.room == 0 || self.ranges.len() >= self.most
    }

    /// Number of their bytes.
    pub(super) fn len(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Adds the bytes before `end` that are not in `given`.
    pub(super) fn fill(&mut self, given: &Given, end: u64, window: u64) {
        while !self.is_full() {
            // A gap far ahead, behind bytes that another reader has read, is not for this stream.
            let gap = given.gap(&(self.from..end));
            let Some(gap) = gap.filter(|gap| gap.start - self.from <= window) else { break };
            let part = gap.start..gap.end.min(gap.start + self.room);
            self.room -= part.end - part.start;
            self.from = part.end;
            match self.ranges.last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => self.ranges.push(part),
            }
        }
    }

    /// Goes on with `tensor`.
    pub(super) fn go_to(&mut self, tensor: &TensorSpan) {
        // The tensor that follows in the file may have been read in part.
        let Range { start, end } = tensor.range;
        if self.from < start || self.from >= end.next_multiple_of(PAGE) {
            self.from = start / PAGE * PAGE;
        }
    }
}

/// Bytes to add to the `ahead` ones of a window, in whole units where they are many: the last bytes would be a
/// short read of their own.
pub(super) fn refill(window: u64, ahead: u64) -> u64 {
    let room = window - ahead;
    if ahead > 0 && room > STEP_UNIT { room / STEP_UNIT * STEP_UNIT } else { room }
}
