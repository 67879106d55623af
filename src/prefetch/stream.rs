//! One stream: reads that move forward, and the ranges that are read ahead for them.

use std::collections::VecDeque;
use std::ops::Range;

use super::{SLACK, StreamId, strike};
use crate::order::TensorSpan;

/// Reads that move forward through the file.
#[derive(Clone, Debug)]
pub(super) struct ReadStream {
    pub(super) id: StreamId,
    /// End of the furthest read.
    pub(super) next: u64,
    /// Ranges that are read ahead and not requested yet, in the expected order.
    pub(super) path: VecDeque<Range<u64>>,
    pub(super) window: u64,
    /// Number of reads that continued the stream.
    pub(super) run: u32,
    /// Number of consecutive reads outside the planned ranges of the stream.
    pub(super) elsewhere: u32,
    /// Start of its first read.
    pub(super) began: u64,
    /// Number of bytes that were read since the window grew.
    pub(super) grown: u64,
    /// The tensor of its last read.
    pub(super) tensor: TensorSpan,
    /// Number of its last read.
    pub(super) last: u64,
}

impl ReadStream {
    /// Number of bytes that are read ahead for the stream and not requested yet.
    pub(super) fn ahead(&self) -> u64 {
        let left = |range: &Range<u64>| range.end - range.start;
        self.path.iter().map(left).sum()
    }

    /// Whether the bytes right after its last read are read ahead.
    pub(super) fn goes_on(&self) -> bool {
        self.path.front().is_some_and(|range| range.contains(&self.next))
    }

    /// Whether some bytes of `range` are read ahead for the stream.
    pub(super) fn has_planned(&self, range: &Range<u64>) -> bool {
        self.path.iter().any(|planned| planned.start < range.end && range.start < planned.end)
    }

    /// Halves the window, but not to less than `least` bytes.
    pub(super) fn halve(&mut self, least: u64) {
        self.window = (self.window / 2).max(least);
    }

    /// Moves the stream forward to `end`. Removes the planned bytes before `end`, and returns them.
    /// They were skipped, because bytes that were read are already removed.
    pub(super) fn move_on(&mut self, end: u64) -> Vec<Range<u64>> {
        self.grown += end.saturating_sub(self.next);
        let before = self.next;
        self.next = before.max(end);
        let mut passed = Vec::new();
        while let Some(range) = self.path.front_mut() {
            // The range lies elsewhere in the file.
            if range.start >= self.next || range.end + SLACK < before {
                break;
            }
            passed.push(range.start..self.next.min(range.end));
            range.start = self.next.min(range.end);
            if range.start < range.end {
                break;
            }
            self.path.pop_front();
        }
        passed
    }

    /// Removes `read` from the path.
    pub(super) fn strike(&mut self, read: &Range<u64>) {
        strike(&mut self.path, read);
    }

    /// Removes and returns the planned bytes from `start` to the end of their range.
    pub(super) fn take(&mut self, start: u64) -> Option<Range<u64>> {
        let holds = |range: &Range<u64>| range.contains(&start);
        let index = self.path.iter().position(holds)?;
        let range = &mut self.path[index];
        let taken = start..range.end;
        range.end = start;
        if range.start == range.end {
            self.path.remove(index);
        }
        Some(taken)
    }

    /// Appends `range` to the path. If it begins where the last range ends, the two become one
    /// range.
    pub(super) fn plan(&mut self, range: Range<u64>) {
        match self.path.back_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.path.push_back(range),
        }
    }
}
