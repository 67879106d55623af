//! Planned bytes that a reader skipped.

use std::collections::VecDeque;
use std::ops::Range;

use super::{SMALL, WINDOW_MIN, strike};

/// Number of reads after which requests for skipped bytes are no longer expected.
const PASSED_READS: u64 = 64;

/// Maximum number of ranges that are remembered.
pub(super) const PASSED_MAX: usize = 256;

/// Planned ranges that a reader skipped, each with the number of the read that skipped it, the oldest first. Another
/// reader, or a read that was overtaken, may still request them.
#[derive(Debug, Default)]
pub(super) struct PassedRanges(VecDeque<(Range<u64>, u64)>);

impl PassedRanges {
    /// Notes ranges that read number `now` has skipped. A program that reads half of each row skips many ranges, so
    /// ranges that are near each other are joined.
    pub(super) fn add(&mut self, ranges: Vec<Range<u64>>, now: u64) {
        for range in ranges {
            let is_near = |(near, _): &&mut (Range<u64>, u64)| {
                near.end <= range.start
                    && range.start - near.end < SMALL
                    && range.end - near.start <= WINDOW_MIN
            };
            match self.0.iter_mut().rev().find(is_near) {
                Some((near, since)) => (near.end, *since) = (range.end, now),
                None => self.0.push_back((range, now)),
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Range<u64>> {
        self.0.iter().map(|(range, _)| range)
    }

    /// Removes bytes that a reader has read.
    pub(super) fn strike(&mut self, read: &Range<u64>) {
        let meets = |range: &Range<u64>| range.start < read.end && read.start < range.end;
        if !self.iter().any(meets) {
            return;
        }
        for (range, since) in std::mem::take(&mut self.0) {
            let mut rest = VecDeque::from([range]);
            strike(&mut rest, read);
            self.0.extend(rest.into_iter().map(|range| (range, since)));
        }
    }

    /// Removes and returns the oldest range, if requests for its bytes are no longer expected at read number `now`.
    pub(super) fn pop_old(&mut self, now: u64) -> Option<Range<u64>> {
        let is_old = self.0.front().is_some_and(|(_, since)| since + PASSED_READS < now);
        is_old.then(|| self.0.pop_front()).flatten().map(|(range, _)| range)
    }

    /// Removes and returns the oldest range, if there are too many.
    pub(super) fn pop_excess(&mut self) -> Option<Range<u64>> {
        let excess = self.0.len() > PASSED_MAX;
        excess.then(|| self.0.pop_front()).flatten().map(|(range, _)| range)
    }
}
