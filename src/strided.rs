//! Describes a box as runs of bytes of equal length in two larger boxes that contain it, the source and the target. If
//! the box is a piece, the source is its shard and the target is its tensor. If the box is a part of a piece, the
//! source is the piece and the target is memory. All positions are computed by arithmetic.
//!
//! The target is row-major. The source is mostly row-major too, and the runs then have the same order in both.
//! `gather` is for a source with other strides, such as those of a transposed tensor. The module is pure: it
//! has no I/O.

mod gather;
mod tiles;

use std::cmp::Reverse;
use std::ops::Range;

pub use self::gather::Gather;

use crate::error::{ErrorKind, Fault};

/// A dimension over which the runs are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stride {
    /// Number of steps.
    pub count: u64,
    /// Bytes of the source per step.
    pub from: u64,
    /// Bytes of the target per step.
    pub to: u64,
}

/// Runs of bytes of equal length, at strides in a source and in a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedCopy {
    /// Byte of the source at which the first run begins.
    from: u64,
    /// Byte of the target at which the first run begins.
    to: u64,
    /// Length of each run in bytes of the source.
    run_len: u64,
    /// The dimensions over which the runs are spread, outermost first; empty if there is one run.
    strides: Vec<Stride>,
    /// Whether the runs have the same order in the source as in the target, and no byte of the source belongs to two
    /// runs.
    ascending: bool,
}

/// A box of the source that contains another box.
#[derive(Clone, Copy, Debug)]
pub struct SourceBox<'a> {
    /// Extent of the box in each dimension.
    pub shape: &'a [u64],
    /// Number of elements from one index of a dimension to the next; `None` if the box is row-major.
    pub strides: Option<&'a [u64]>,
    /// Position in this box at which the other box begins.
    pub offset: &'a [u64],
}

/// A row-major box that contains another box.
#[derive(Clone, Copy, Debug)]
pub struct OuterBox<'a> {
    /// Extent of the box in each dimension.
    pub shape: &'a [u64],
    /// Position in this box at which the other box begins.
    pub offset: &'a [u64],
}

impl StridedCopy {
    /// The runs of a box of extent `size`, which contains at least one element. `bits` is the width of an
    /// element in the source and in the target.
    ///
    /// # Errors
    /// If elements are smaller than a byte, and a run of them does not begin and end on a byte.
    pub fn new(
        from: SourceBox<'_>,
        to: OuterBox<'_>,
        size: &[u64],
        bits: (u64, u64),
    ) -> Result<StridedCopy, Fault> {
        let (mut from_start, mut to_start) = (0, 0);
        // Length of the run in bits, in the source and in the target.
        let mut run = bits;
        let (mut from_row, mut to_row) = bits;
        let mut strides: Vec<Stride> = Vec::new();
        // The loop goes from the innermost dimension outwards. The run grows over a dimension as long as the elements
        // at the next index are adjacent to it both in the source and in the target.
        for dim in (0..size.len()).rev() {
            let from_step = from.strides.map_or(from_row, |strides| strides[dim] * bits.0);
            from_start += from.offset[dim] * from_step;
            to_start += to.offset[dim] * to_row;
            let count = size[dim];
            if count > 1 {
                match strides.last_mut() {
                    None if (from_step, to_row) == run => run = (run.0 * count, run.1 * count),
                    Some(inner) if inner.is_continued_by(from_step, to_row) => inner.count *= count,
                    _ => strides.push(Stride { count, from: from_step, to: to_row }),
                }
            }
            from_row *= from.shape[dim];
            to_row *= to.shape[dim];
        }
        strides.reverse();
        let steps = strides.iter().flat_map(|stride| [stride.from, stride.to]);
        if !steps.chain([from_start, to_start, run.0]).all(|bits| bits.is_multiple_of(8)) {
            let run = run.0;
            return Err(ErrorKind::Misaligned.fault(format!(
                "a part of shape {size:?} at {:?} of shape {:?} has rows of {run} bits that do \
                 not begin and end on bytes",
                to.offset, to.shape
            )));
        }
        for stride in &mut strides {
            (stride.from, stride.to) = (stride.from / 8, stride.to / 8);
        }
        let run_len = run.0 / 8;
        let ascending = is_ascending(&strides, run_len);
        Ok(StridedCopy { from: from_start / 8, to: to_start / 8, run_len, strides, ascending })
    }

    /// The runs of a piece in its tensor. The piece is the box at `to.offset` of extent `piece` in a tensor of
    /// extent `to.shape`. `strides` are those of the piece in its shard. The source begins with the first
    /// element of the piece.
    ///
    /// # Errors
    /// The same errors as those of `new`.
    pub fn of_piece(
        strides: Option<&[u64]>,
        to: OuterBox<'_>,
        piece: &[u64],
        bits: u64,
    ) -> Result<StridedCopy, Fault> {
        let from = SourceBox { shape: piece, strides, offset: &vec![0; piece.len()] };
        StridedCopy::new(from, to, piece, (bits, bits))
    }

    /// One run of `len` bytes, which begins at byte `from` of the source.
    pub(crate) fn one_run(from: u64, len: u64) -> StridedCopy {
        StridedCopy { from, to: 0, run_len: len, strides: Vec::new(), ascending: true }
    }

    /// The same runs in a source that begins `before` bytes earlier.
    pub(crate) fn behind(self, before: u64) -> StridedCopy {
        StridedCopy { from: self.from + before, ..self }
    }

    /// Length of each run in bytes of the source.
    pub fn run_len(&self) -> u64 {
        self.run_len
    }

    /// Whether the runs have the same order in the source, and no byte of the source belongs to two runs. The
    /// functions for parts of the runs require this. `gather` is for all other copies.
    pub fn is_ascending(&self) -> bool {
        self.ascending
    }

    /// The same runs in the order of the source. If bytes of the source belong to several runs, these runs
    /// follow each other.
    pub fn in_source_order(&self) -> StridedCopy {
        let mut strides = self.strides.clone();
        strides.sort_by_key(|stride| Reverse(stride.from));
        StridedCopy { strides, ..*self }
    }

    /// Number of runs.
    pub fn count(&self) -> u64 {
        self.strides.iter().map(|stride| stride.count).product()
    }

    /// The innermost dimension over which the runs are spread; `None` if there is one run.
    pub fn innermost(&self) -> Option<Stride> {
        self.strides.last().copied()
    }

    /// The bytes of the source and of the target at which run `k` begins.
    pub fn run(&self, mut k: u64) -> (u64, u64) {
        let (mut from, mut to) = (self.from, self.to);
        for stride in self.strides.iter().rev() {
            from += k % stride.count * stride.from;
            to += k % stride.count * stride.to;
            k /= stride.count;
        }
        (from, to)
    }

    /// The byte of the target at which run `k` begins.
    fn target(&self, k: u64) -> u64 {
        self.run(k).1
    }

    /// The range of the source from the first byte of the first run to the last byte of the last run.
    pub fn source_span(&self) -> Range<u64> {
        self.from..self.run(self.count() - 1).0 + self.run_len
    }

    /// The range of the target from the first run to the last run, if elements have the same width in source
    /// and target.
    pub fn target_span(&self) -> Range<u64> {
        self.to..self.target(self.count() - 1) + self.run_len
    }

    /// The parts of the runs that lie in bytes `range` of the target.
    pub fn inside(&self, range: &Range<u64>) -> Option<RunRange> {
        let first = self.first_run(|start| start + self.run_len > range.start);
        let end = self.first_run(|start| start >= range.end);
        if first >= end {
            return None;
        }
        let ((from, first_start), (last, last_start)) = (self.run(first), self.run(end - 1));
        let skipped = range.start.saturating_sub(first_start);
        let cut = (last_start + self.run_len).saturating_sub(range.end);
        let bytes = from + skipped..last + self.run_len - cut;
        Some(RunRange { runs: first..end, bytes, target: first_start + skipped })
    }

    /// Calls `visit` once for each group of runs of `part` that one read should fetch. Runs are read together if at
    /// most `gap` bytes of the source lie between them and the read then has at most `max` bytes. If all runs are
    /// adjacent in the source, they are one group of any length.
    pub fn each_read(&self, part: RunRange, gap: u64, max: u64, visit: &mut dyn FnMut(RunRange)) {
        let dense_len = self.strides.iter().rev().try_fold(self.run_len, |len, stride| {
            (stride.from == len).then_some(len * stride.count)
        });
        if dense_len.is_some() || part.is_contiguous() {
            return visit(part);
        }
        let mut group = RunRange { runs: part.runs.start..part.runs.start, ..part.clone() };
        for run in part.runs {
            let (from, target) = self.run(run);
            let bytes = from.max(part.bytes.start)..(from + self.run_len).min(part.bytes.end);
            if group.runs.is_empty() {
                group.bytes = bytes.clone();
            } else if bytes.start - group.bytes.end > gap || bytes.end - group.bytes.start > max {
                visit(group.clone());
                group = RunRange { runs: run..run, bytes: bytes.clone(), target };
            }
            group.runs.end = run + 1;
            group.bytes.end = bytes.end;
        }
        visit(group);
    }

    /// Calls `visit` for groups of all runs. Consecutive runs of a group have at most `gap` bytes between them. A
    /// group covers at most `max` bytes, or one run if that is longer.
    pub fn each_near(&self, gap: u64, max: u64, visit: &mut dyn FnMut(RunRange)) {
        let total = self.count();
        let mut first = 0;
        while first < total {
            let (from, target) = self.run(first);
            let (mut end, mut next) = (from + self.run_len, first + 1);
            while next < total {
                let (following, _) = self.run(next);
                if following - end > gap || following + self.run_len - from > max {
                    break;
                }
                (end, next) = (following + self.run_len, next + 1);
            }
            visit(RunRange { runs: first..next, bytes: from..end, target });
            first = next;
        }
    }

    /// Estimates by arithmetic how many groups `each_read` forms of `part` if their length is not limited.
    pub fn reads_in(&self, part: &RunRange, gap: u64) -> u64 {
        let (mut len, mut joined) = (self.run_len, 1);
        for stride in self.strides.iter().rev() {
            if stride.from - len > gap {
                break;
            }
            len += (stride.count - 1) * stride.from;
            joined *= stride.count;
        }
        (part.runs.end - part.runs.start).div_ceil(joined)
    }

    /// The first run whose start in the target satisfies `holds`. `holds` must be false up to some run, and
    /// true for all later runs.
    fn first_run(&self, holds: impl Fn(u64) -> bool) -> u64 {
        let (mut low, mut high) = (0, self.count());
        while low < high {
            let middle = low + (high - low) / 2;
            if holds(self.target(middle)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low
    }

    /// Calls `visit` for each run of `part` with the bytes of the run, counted from the first byte of the part,
    /// and the first byte of the run in the target.
    pub fn each_run(&self, part: &RunRange, mut visit: impl FnMut(Range<u64>, u64)) {
        let RunRange { runs, bytes, .. } = part;
        let inner = self.innermost().unwrap_or(Stride { count: 1, from: 0, to: 0 });
        let mut run = runs.start;
        while run < runs.end {
            let (mut from, mut target) = self.run(run);
            let row = (inner.count - run % inner.count).min(runs.end - run);
            for _ in 0..row {
                let start = from.max(bytes.start);
                let end = (from + self.run_len).min(bytes.end);
                visit(start - bytes.start..end - bytes.start, target + (start - from));
                (from, target) = (from + inner.from, target + inner.to);
            }
            run += row;
        }
    }

    /// Copies `bytes`, which are bytes `part.bytes` of the source, to their places in `target`. `target` holds
    /// the bytes of the target from `target_start` on.
    pub fn scatter(&self, part: &RunRange, bytes: &[u8], target: &mut [u8], target_start: u64) {
        self.each_row(part, self.run_len, bytes, &mut |row, place| {
            copy_run(row, &mut target[(place - target_start) as usize..]);
        });
    }
}

/// The runs that are needed for a byte range of the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRange {
    /// The numbers of the runs.
    pub runs: Range<u64>,
    /// The bytes of the source from the first to the last of these runs.
    pub bytes: Range<u64>,
    /// Offset in the target of the first of these bytes.
    pub target: u64,
}

impl RunRange {
    /// Whether these bytes are adjacent in the target too.
    pub fn is_contiguous(&self) -> bool {
        self.runs.end - self.runs.start == 1
    }
}

impl Stride {
    /// Whether the next dimension continues the runs of this dimension with the same steps. `from` and `to` are the
    /// steps of the next dimension, in bits.
    fn is_continued_by(&self, from: u64, to: u64) -> bool {
        from == self.count * self.from && to == self.count * self.to
    }
}

/// Copies a run to the beginning of `to`. A run that is a single element is copied without a function call.
#[inline]
pub(crate) fn copy_run(run: &[u8], to: &mut [u8]) {
    if let Ok(element) = <[u8; 2]>::try_from(run) {
        to[..2].copy_from_slice(&element);
    } else if let Ok(element) = <[u8; 4]>::try_from(run) {
        to[..4].copy_from_slice(&element);
    } else {
        to[..run.len()].copy_from_slice(run);
    }
}

/// Whether runs at these strides have the same order in the source, and no byte of the source belongs to two runs.
fn is_ascending(strides: &[Stride], run_len: u64) -> bool {
    let mut end = run_len;
    strides.iter().rev().all(|stride| {
        let passes = stride.from >= end;
        end = end.saturating_add((stride.count - 1).saturating_mul(stride.from));
        passes
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::strides::row_major;

    /// A piece of extent `size` in a stored box and in a tensor, for tests.
    #[derive(Debug)]
    struct Case {
        size: Vec<u64>,
        stored: Vec<u64>,
        offset: Vec<u64>,
        tensor: Vec<u64>,
    }

    /// The last dimension of each box is even, so that elements of 4 bits begin and end on bytes.
    fn case() -> impl Strategy<Value = Case> {
        let dim = (1_u64..5, 0_u64..3, 0_u64..3, 0_u64..3);
        (prop::collection::vec(dim.clone(), 0..4), dim).prop_map(|(outer, last)| {
            let (size, more, before, after) = last;
            let dims: Vec<_> =
                outer.into_iter().chain([(2 * size, 2 * more, 2 * before, 2 * after)]).collect();
            Case {
                size: dims.iter().map(|dim| dim.0).collect(),
                stored: dims.iter().map(|dim| dim.0 + dim.1).collect(),
                offset: dims.iter().map(|dim| dim.2).collect(),
                tensor: dims.iter().map(|dim| dim.2 + dim.0 + dim.3).collect(),
            }
        })
    }

    /// The bits of the source and of the target at which each element begins.
    fn elements(case: &Case, bits: u64) -> Vec<(u64, u64)> {
        let mut all = vec![(0, 0)];
        for dim in 0..case.size.len() {
            let index = |(from, to): (u64, u64)| {
                (0..case.size[dim]).map(move |index| {
                    let to_index = case.offset[dim] + index;
                    (from * case.stored[dim] + index, to * case.tensor[dim] + to_index)
                })
            };
            all = all.into_iter().flat_map(index).collect();
        }
        all.into_iter().map(|(from, to)| (from * bits, to * bits)).collect()
    }

    proptest! {
        #[test]
        fn the_reads_of_any_range_bring_each_byte_of_a_piece_in_it_to_its_place_once(
            case in case(),
            bits in prop::sample::select(vec![4_u64, 8, 16]),
            (start, len) in (0_u64..40, 1_u64..400),
            gap in 0_u64..9,
            max in 1_u64..60,
        ) {
            let to = OuterBox { shape: &case.tensor, offset: &case.offset };
            let strides = row_major(&case.stored);
            let copy = StridedCopy::of_piece(Some(&strides), to, &case.size, bits).unwrap();
            prop_assert!(copy.is_ascending());
            let wanted = start..start + len;
            let bytes = |element: u64| element / 8..(element + bits).div_ceil(8);
            let mut right: Vec<(u64, u64)> = elements(&case, bits)
                .into_iter()
                .flat_map(|(from, to)| bytes(from).zip(bytes(to)))
                .filter(|(_, to)| wanted.contains(to))
                .collect();
            right.dedup();
            let mut found = Vec::new();
            let mut reads: Vec<RunRange> = Vec::new();
            if let Some(part) = copy.inside(&wanted) {
                copy.each_read(part, gap, max, &mut |part| {
                    let mut ends: Vec<u64> = Vec::new();
                    copy.each_run(&part, |run, place| {
                        let run = part.bytes.start + run.start..part.bytes.start + run.end;
                        assert!(ends.last().is_none_or(|end| run.start - end <= gap));
                        ends.push(run.end);
                        found.extend(run.clone().zip(place..));
                    });
                    assert_eq!(ends.last(), Some(&part.bytes.end));
                    reads.push(part);
                });
            }
            if let Some(part) = copy.inside(&wanted) {
                let counted = copy.reads_in(&part, gap);
                let mut right = 0;
                copy.each_read(part, gap, u64::MAX, &mut |_| right += 1);
                prop_assert!(right <= counted + 1, "{} counted as {}", right, counted);
            }
            prop_assert_eq!(found, right);
            for pair in reads.windows(2) {
                let between = pair[1].bytes.start - pair[0].bytes.end;
                let first_len = copy.run_len().min(pair[1].bytes.end - pair[1].bytes.start);
                let joined = pair[1].bytes.start + first_len - pair[0].bytes.start;
                prop_assert!(between > gap || joined > max, "two reads where one would do");
            }
            if case.stored == case.size {
                prop_assert!(reads.len() <= 1, "bytes that follow each other are one read");
            }
        }
    }

    #[test]
    fn rows_of_half_bytes_are_refused() {
        let to = OuterBox { shape: &[2, 4], offset: &[0, 1] };
        let error = StridedCopy::of_piece(None, to, &[2, 2], 4).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Misaligned);
    }
}
