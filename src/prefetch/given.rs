//! Bytes of a file that need not be read ahead.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes that were requested or are read ahead, as ranges by their start. No two ranges are
/// adjacent.
#[derive(Debug, Default)]
pub(super) struct Given(BTreeMap<u64, u64>);

impl Given {
    /// End of the range that contains byte `offset`.
    fn end_at(&self, offset: u64) -> Option<u64> {
        let before = self.0.range(..=offset).next_back();
        before.map(|(_, &end)| end).filter(|&end| end > offset)
    }

    /// The first part of `range` that is in none of these ranges.
    pub(super) fn gap(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let start = self.end_at(range.start).unwrap_or(range.start);
        let end = self.0.range(start..).next().map_or(range.end, |(&next, _)| next);
        let gap = start..end.min(range.end);
        (!gap.is_empty()).then_some(gap)
    }

    pub(super) fn add(&mut self, range: &Range<u64>) {
        let Range { mut start, mut end } = range.clone();
        while let Some((&from, &to)) = self.0.range(..=end).next_back() {
            if to < start {
                break;
            }
            (start, end) = (start.min(from), end.max(to));
            self.0.remove(&from);
        }
        self.0.insert(start, end);
    }

    pub(super) fn remove(&mut self, range: &Range<u64>) {
        while let Some((&from, &to)) = self.0.range(..range.end).next_back() {
            if to <= range.start {
                break;
            }
            self.0.remove(&from);
            if to > range.end {
                self.0.insert(range.end, to);
            }
            if from < range.start {
                self.0.insert(from, range.start);
            }
        }
    }

    /// Number of ranges.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_where_they_meet_and_part_where_bytes_are_taken_out() {
        let mut given = Given::default();
        [10..20, 30..40, 20..25, 50..60].iter().for_each(|range| given.add(range));
        assert_eq!(given.0, BTreeMap::from([(10, 25), (30, 40), (50, 60)]));
        assert_eq!(given.gap(&(12..100)), Some(25..30));
        assert_eq!(given.gap(&(12..25)), None);
        given.add(&(24..55));
        given.remove(&(15..30));
        assert_eq!(given.0, BTreeMap::from([(10, 15), (30, 60)]));
    }
}
