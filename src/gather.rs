//! Where the bytes of one piece lie in its tensor, by arithmetic: the piece is a number of
//! equal runs, consecutive in the shard, spread at fixed strides in the tensor.
//!
//! Both sides are row-major, so runs stand in the same order in the tensor and in the shard:
//! the part of a piece that falls into any byte range of the tensor is one range of the shard.
//! Pure: no I/O.

use std::ops::Range;

use crate::error::{ErrorKind, Fault};

/// A piece of a tensor as runs of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Offset in the tensor of the first run.
    base: u64,
    /// Length of each run.
    run_len: u64,
    /// Number of runs.
    n_runs: u64,
    /// Dimensions over which the runs are spread, outermost first: number of steps and bytes
    /// of the tensor per step.
    steps: Vec<(u64, u64)>,
}

impl Runs {
    /// The runs of the box at `offset` of extent `piece`, in a tensor of extent `whole` with
    /// elements of `bits` bits. The box lies inside the tensor and holds at least one element.
    ///
    /// Fails where a run of sub-byte elements does not begin and end on a byte.
    pub fn new(whole: &[u64], offset: &[u64], piece: &[u64], bits: u64) -> Result<Runs, Fault> {
        // From the innermost dimension outwards: while the piece spans whole dimensions, one
        // run grows; the first dimension that it does not span ends it.
        let mut stride = bits;
        let mut run = bits;
        let mut base = 0;
        let mut steps = Vec::new();
        let mut spanned = true;
        for dim in (0..whole.len()).rev() {
            base += offset[dim] * stride;
            if spanned {
                run *= piece[dim];
                spanned = piece[dim] == whole[dim];
            } else if piece[dim] > 1 {
                steps.push((piece[dim], stride));
            }
            stride *= whole[dim];
        }
        steps.reverse();
        let aligned = |bits: &u64| bits.is_multiple_of(8);
        if !(aligned(&run) && aligned(&base) && steps.iter().all(|(_, stride)| aligned(stride))) {
            return Err(Fault::new(
                ErrorKind::Misaligned,
                format!(
                    "a piece of shape {piece:?} at {offset:?} of shape {whole:?} has rows of {run} \
                     bits that do not begin and end on bytes"
                ),
            ));
        }
        steps.iter_mut().for_each(|(_, stride)| *stride /= 8);
        let n_runs = steps.iter().map(|(count, _)| count).product();
        Ok(Runs { base: base / 8, run_len: run / 8, n_runs, steps })
    }

    /// Length of each run in bytes.
    pub fn run_len(&self) -> u64 {
        self.run_len
    }

    /// Number of runs.
    pub fn n_runs(&self) -> u64 {
        self.n_runs
    }

    /// The bytes of the tensor from the first to the last of the piece.
    pub fn span(&self) -> Range<u64> {
        self.base..self.run_start(self.n_runs - 1) + self.run_len
    }

    /// Offset in the tensor of run `k`.
    fn run_start(&self, mut k: u64) -> u64 {
        let mut start = self.base;
        for (count, stride) in self.steps.iter().rev() {
            start += k % count * stride;
            k /= count;
        }
        start
    }

    /// The part of the piece inside bytes `range` of the tensor, as bytes of the piece.
    pub fn part(&self, range: &Range<u64>) -> Option<Part> {
        let first = self.first_run(|start| start + self.run_len > range.start);
        let end = self.first_run(|start| start >= range.end);
        if first >= end {
            return None;
        }
        let (first_start, last_start) = (self.run_start(first), self.run_start(end - 1));
        let skipped = range.start.saturating_sub(first_start);
        let cut = (last_start + self.run_len).saturating_sub(range.end);
        let bytes = first * self.run_len + skipped..end * self.run_len - cut;
        Some(Part { runs: first..end, bytes, at: first_start + skipped })
    }

    /// The first run whose start satisfies `holds`, which holds from some run on.
    fn first_run(&self, holds: impl Fn(u64) -> bool) -> u64 {
        let (mut low, mut high) = (0, self.n_runs);
        while low < high {
            let middle = low + (high - low) / 2;
            if holds(self.run_start(middle)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low
    }

    /// Copies `bytes`, the bytes `part.bytes` of the piece, to their places in `target`, which
    /// holds the bytes of the tensor from `target_start` on.
    pub fn scatter(&self, part: &Part, bytes: &[u8], target: &mut [u8], target_start: u64) {
        let mut rest = bytes;
        let mut within = part.bytes.start - part.runs.start * self.run_len;
        for run in part.runs.clone() {
            let start = self.run_start(run) + within - target_start;
            let len = (self.run_len - within).min(rest.len() as u64);
            let (row, after) = rest.split_at(len as usize);
            target[start as usize..][..row.len()].copy_from_slice(row);
            rest = after;
            within = 0;
        }
    }
}

/// The part of a piece that a byte range of the tensor needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The runs touched.
    pub runs: Range<u64>,
    /// The bytes of the piece.
    pub bytes: Range<u64>,
    /// Offset in the tensor of the first byte.
    pub at: u64,
}

impl Part {
    /// Whether its bytes are consecutive in the tensor too.
    pub fn is_contiguous(&self) -> bool {
        self.runs.end - self.runs.start == 1
    }
}
