//! Groups ranges of a file that are worth one read.

use std::ops::Range;

/// Long reads of a store end at multiples of this number of bytes if possible. The disk cache of remote sources
/// stores blocks of this length. If a block belongs to two reads, it is read twice.
pub const CUT: u64 = 16 << 10;

/// Maximum gap in bytes between two reads that are sent to a server as one request. The bytes of the gap arrive sooner
/// than the answer to a second request would.
pub const REQUEST_GAP: u64 = 256 << 10;

/// If the maximum length of a read is less than `2 * CUT`, reads end at multiples of this number of bytes if possible.
/// So a read does not exceed its maximum length when it is extended to whole pages.
const PAGE: u64 = 4096;

/// If a read of the maximum length would leave fewer bytes of a range than the maximum length divided by this number,
/// the range is split into two reads of about the same length instead.
const REST_PART: u64 = 8;

/// The end of the first read of `range`. The pages that this read covers have at most `most` bytes. `most` is
/// at least a page.
pub fn first_read_end(range: &Range<u64>, most: u64) -> u64 {
    let end_of = |len: u64, cut: u64| range.start.saturating_add(len) / cut * cut;
    let last = end_of(most, PAGE);
    if range.end <= last {
        range.end
    } else if most < 2 * CUT {
        last
    } else if range.end - last < most / REST_PART {
        end_of((range.end - range.start) / 2, CUT)
    } else {
        end_of(most, CUT)
    }
}

/// Groups items into reads. The items in `sorted` are sorted by file and by first byte.
///
/// An item joins the previous group on three conditions: `together` returns true for the first item of the group and
/// this item, at most `gap` bytes lie between the group and the item, and the read then has at most `max` bytes. Each
/// group is returned with the range that covers it. An item that is longer than `max` is a group of its own.
pub fn coalesce<T>(
    sorted: &[T],
    range_of: impl Fn(&T) -> &Range<u64>,
    together: impl Fn(&T, &T) -> bool,
    gap: u64,
    max: u64,
) -> impl Iterator<Item = (Range<u64>, &[T])> {
    let mut rest = sorted;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let mut read = range_of(first).clone();
        let mut len = 1;
        for item in &rest[1..] {
            let range = range_of(item);
            let end = read.end.max(range.end);
            let fits = together(first, item)
                && range.start <= read.end.saturating_add(gap)
                && end - read.start <= max;
            if !fits {
                break;
            }
            read.end = end;
            len += 1;
        }
        let (group, after) = rest.split_at(len);
        rest = after;
        Some((read, group))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Item = (u32, Range<u64>);

    /// The ranges of the reads of `items`, with the number of items in each.
    fn reads(items: &[Item], gap: u64, max: u64) -> Vec<(Range<u64>, usize)> {
        let groups = coalesce(items, |item| &item.1, |a, b| a.0 == b.0, gap, max);
        groups.map(|(range, group)| (range, group.len())).collect()
    }

    #[test]
    fn reads_end_where_blocks_of_the_disk_cache_do_and_a_short_rest_is_no_read_of_its_own() {
        let lens = |mut range: Range<u64>, most| {
            let mut lens = Vec::new();
            while !range.is_empty() {
                lens.push(first_read_end(&range, most) - range.start);
                range.start += lens.last().unwrap();
            }
            lens
        };
        let long = 64 * CUT;
        assert_eq!(lens(0..long, long), [long]);
        assert_eq!(lens(100..long, long), [long - 100]);
        assert_eq!(lens(100..long + 100, long), [long / 2 - 100, long / 2 + 100]);
        assert_eq!(lens(100..2 * long + 9 * CUT, long), [long - 100, long, 9 * CUT]);
        assert_eq!(lens(100..3 * PAGE, PAGE), [PAGE - 100, PAGE, PAGE]);
    }

    #[test]
    fn neighbours_of_one_file_are_read_together_up_to_the_gap_and_the_limit() {
        let items = [(0, 0..10), (0, 10..20), (0, 25..30), (1, 30..40), (1, 46..50)];
        assert_eq!(reads(&items, 0, 100), [(0..20, 2), (25..30, 1), (30..40, 1), (46..50, 1)]);
        assert_eq!(reads(&items, 5, 100), [(0..30, 3), (30..40, 1), (46..50, 1)]);
        assert_eq!(reads(&items, 5, 20), [(0..20, 2), (25..30, 1), (30..40, 1), (46..50, 1)]);
        assert_eq!(reads(&[], 5, 20), []);
    }

    #[test]
    fn an_item_inside_the_read_joins_it_and_one_longer_than_the_limit_stands_alone() {
        assert_eq!(reads(&[(0, 0..10), (0, 2..5), (0, 4..12)], 0, 12), [(0..12, 3)]);
        assert_eq!(reads(&[(0, 0..99), (0, 99..100)], 0, 12), [(0..99, 1), (99..100, 1)]);
        assert_eq!(reads(&[(0, 0..1), (0, u64::MAX - 1..u64::MAX)], u64::MAX, 9).len(), 2);
    }
}
