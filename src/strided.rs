//! A box as equal runs of bytes in two row-major boxes that hold it, by arithmetic: a piece in its
//! shard and in its tensor, or a part in a piece and in memory.
//!
//! Both sides are row-major, so the runs stand in the same order in both.
//! The module is pure: it has no I/O.

use std::ops::Range;

use crate::error::{ErrorKind, Fault};

/// One dimension over which runs are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stride {
    /// Number of steps.
    pub count: u64,
    /// Bytes of the source per step.
    pub from: u64,
    /// Bytes of the target per step.
    pub to: u64,
}

/// Equal runs of bytes, at strides in a source and in a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedCopy {
    /// Byte of the source at which the first run begins.
    from: u64,
    /// Byte of the target at which the first run begins.
    to: u64,
    /// Length of each run in bytes of the source.
    run_len: u64,
    /// Dimensions, outermost first; empty for one run.
    strides: Vec<Stride>,
}

/// A box that holds another one.
#[derive(Clone, Copy, Debug)]
pub struct OuterBox<'a> {
    /// Its extent in each dimension.
    pub shape: &'a [u64],
    /// Where the other one begins in it.
    pub offset: &'a [u64],
}

impl StridedCopy {
    /// The runs of a box of extent `size`, which holds at least one element. `bits` are the widths
    /// of an element in the source and in the target.
    ///
    /// # Errors
    /// A run of sub-byte elements that does not begin and end on a byte.
    pub fn new(
        from: OuterBox<'_>,
        to: OuterBox<'_>,
        size: &[u64],
        bits: (u64, u64),
    ) -> Result<StridedCopy, Fault> {
        let (mut from_start, mut to_start, mut run) = (0, 0, bits.0);
        let (mut from_stride, mut to_stride) = bits;
        let mut strides = Vec::new();
        // From the innermost dimension outwards: one run grows while the box spans whole
        // dimensions of both sides; the first dimension that it does not span ends the run.
        let mut spanned = true;
        for dim in (0..size.len()).rev() {
            from_start += from.offset[dim] * from_stride;
            to_start += to.offset[dim] * to_stride;
            if spanned {
                run *= size[dim];
                spanned = size[dim] == from.shape[dim] && size[dim] == to.shape[dim];
            } else if size[dim] > 1 {
                strides.push(Stride { count: size[dim], from: from_stride, to: to_stride });
            }
            from_stride *= from.shape[dim];
            to_stride *= to.shape[dim];
        }
        strides.reverse();
        let steps = strides.iter().flat_map(|stride| [stride.from, stride.to]);
        if !steps.chain([from_start, to_start, run]).all(|bits| bits.is_multiple_of(8)) {
            return Err(Fault::new(
                ErrorKind::Misaligned,
                format!(
                    "a part of shape {size:?} at {:?} of shape {:?} has rows of {run} bits that do \
                     not begin and end on bytes",
                    to.offset, to.shape
                ),
            ));
        }
        for stride in &mut strides {
            (stride.from, stride.to) = (stride.from / 8, stride.to / 8);
        }
        Ok(StridedCopy { from: from_start / 8, to: to_start / 8, run_len: run / 8, strides })
    }

    /// The runs of a piece, which follow each other in the source, in its tensor: the piece is the
    /// box at `offset` of extent `piece` in a tensor of extent `tensor`.
    ///
    /// # Errors
    /// The errors of `new`.
    pub fn of_piece(
        tensor: &[u64],
        offset: &[u64],
        piece: &[u64],
        bits: u64,
    ) -> Result<StridedCopy, Fault> {
        let from = OuterBox { shape: piece, offset: &vec![0; piece.len()] };
        StridedCopy::new(from, OuterBox { shape: tensor, offset }, piece, (bits, bits))
    }

    /// One run of `len` bytes, which begins at byte `from` of the source.
    pub(crate) fn one_run(from: u64, len: u64) -> StridedCopy {
        StridedCopy { from, to: 0, run_len: len, strides: Vec::new() }
    }

    /// The same runs in a source that has `before` more bytes in front.
    pub(crate) fn behind(self, before: u64) -> StridedCopy {
        StridedCopy { from: self.from + before, ..self }
    }

    /// Length of each run in bytes of the source.
    pub fn run_len(&self) -> u64 {
        self.run_len
    }

    /// Number of runs.
    pub fn count(&self) -> u64 {
        self.strides.iter().map(|stride| stride.count).product()
    }

    /// The innermost dimension over which the runs are spread; `None` for one run.
    pub fn innermost(&self) -> Option<Stride> {
        self.strides.last().copied()
    }

    /// Bytes of source and target at which run `k` begins.
    pub fn run(&self, mut k: u64) -> (u64, u64) {
        let (mut from, mut to) = (self.from, self.to);
        for stride in self.strides.iter().rev() {
            from += k % stride.count * stride.from;
            to += k % stride.count * stride.to;
            k /= stride.count;
        }
        (from, to)
    }

    /// Byte of the target at which run `k` begins.
    fn target(&self, k: u64) -> u64 {
        self.run(k).1
    }

    /// The bytes of the source from the first run to the last.
    pub fn source_span(&self) -> Range<u64> {
        self.from..self.run(self.count() - 1).0 + self.run_len
    }

    /// The bytes of the target from the first run to the last, for elements of the same width.
    pub fn target_span(&self) -> Range<u64> {
        self.to..self.target(self.count() - 1) + self.run_len
    }

    /// The runs inside bytes `range` of the target, of a source whose runs follow each other: they
    /// are one range of it.
    pub fn inside(&self, range: &Range<u64>) -> Option<RunRange> {
        let first = self.first_run(|start| start + self.run_len > range.start);
        let end = self.first_run(|start| start >= range.end);
        if first >= end {
            return None;
        }
        let (first_start, last_start) = (self.target(first), self.target(end - 1));
        let skipped = range.start.saturating_sub(first_start);
        let cut = (last_start + self.run_len).saturating_sub(range.end);
        let bytes = first * self.run_len + skipped..end * self.run_len - cut;
        Some(RunRange { runs: first..end, bytes, target: first_start + skipped })
    }

    /// The first run whose start in the target satisfies `holds`, which holds from some run on.
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

    /// Calls `visit` for each run of `part`: its bytes, counted from the first byte of the part, and
    /// its first byte in the target.
    pub fn each_run(&self, part: &RunRange, mut visit: impl FnMut(Range<u64>, u64)) {
        let len = part.bytes.end - part.bytes.start;
        let mut within = part.bytes.start - part.runs.start * self.run_len;
        let mut done = 0;
        for run in part.runs.clone() {
            let next = (done + self.run_len - within).min(len);
            visit(done..next, self.target(run) + within);
            (done, within) = (next, 0);
        }
    }

    /// Copies `bytes`, the bytes `part.bytes` of the source, to their places in `target`, which
    /// holds the bytes of the target from `target_start` on.
    pub fn scatter(&self, part: &RunRange, bytes: &[u8], target: &mut [u8], target_start: u64) {
        self.each_run(part, |run, place| {
            let row = &bytes[run.start as usize..run.end as usize];
            target[(place - target_start) as usize..][..row.len()].copy_from_slice(row);
        });
    }
}

/// The runs that a byte range of the target needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRange {
    /// Their numbers.
    pub runs: Range<u64>,
    /// Their bytes of the source.
    pub bytes: Range<u64>,
    /// Offset in the target of the first byte.
    pub target: u64,
}

impl RunRange {
    /// Whether its bytes follow each other in the target too.
    pub fn is_contiguous(&self) -> bool {
        self.runs.end - self.runs.start == 1
    }
}
