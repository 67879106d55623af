//! The ranges that are planned for one stream at a time.

use std::ops::Range;

use super::given::Given;
use super::stream::ReadStream;
use super::{PAGE, PATH_MAX, STEP_UNIT};
use crate::order::TensorSpan;

/// The ranges to read ahead for a stream, while they are being chosen.
#[derive(Debug)]
pub(super) struct PlannedRanges {
    pub(super) ranges: Vec<Range<u64>>,
    /// Number of ranges at the front that belong to the tensor that the stream reads.
    pub(super) in_tensor: usize,
    /// The first offset at which the next range may begin.
    pub(super) from: u64,
    /// Number of bytes that may still be added.
    pub(super) room: u64,
    /// Maximum number of ranges.
    most: usize,
}

impl PlannedRanges {
    /// An empty list for ranges after the last read of `stream`, which may have `room` bytes in all.
    pub(super) fn after(stream: &ReadStream, room: u64) -> PlannedRanges {
        let most = PATH_MAX.saturating_sub(stream.path.len());
        PlannedRanges { ranges: Vec::new(), in_tensor: 0, from: stream.next, room, most }
    }

    pub(super) fn is_full(&self) -> bool {
        self.room == 0 || self.ranges.len() >= self.most
    }

    /// Number of bytes in all ranges.
    pub(super) fn len(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Adds the bytes from `from` to `end` that are not in `given`, as far as there is room.
    pub(super) fn fill(&mut self, given: &Given, end: u64, window: u64) {
        while !self.is_full() {
            // A gap that is more than a window away is left to another stream, whose reader has read the bytes in front
            // of the gap.
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

    /// Continues with `tensor`.
    pub(super) fn go_to(&mut self, tensor: &TensorSpan) {
        // If `from` lies in the tensor, the bytes of the tensor before it were read or planned.
        let Range { start, end } = tensor.range;
        if self.from < start || self.from >= end.next_multiple_of(PAGE) {
            self.from = start / PAGE * PAGE;
        }
    }
}

/// Number of bytes to add to a window in which `ahead` bytes are read ahead. A large number is rounded down to whole
/// units, because its last bytes would otherwise be a short read of their own.
pub(super) fn refill(window: u64, ahead: u64) -> u64 {
    let room = window - ahead;
    if ahead > 0 && room > STEP_UNIT { room / STEP_UNIT * STEP_UNIT } else { room }
}
