//! Boxes as runs of bytes.

use std::ops::Range;

use crate::catalog::{ShardId, Tensor};
use crate::error::{ErrorKind, Fault};

/// How runs are spread: dimensions, outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strides(pub Vec<Stride>);

/// One dimension of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stride {
    /// Number of steps.
    pub count: u64,
    /// Bytes of the source per step.
    pub from: u64,
    /// Bytes of the region per step.
    pub to: u64,
}

impl Strides {
    /// How many runs there are.
    pub(crate) fn count(&self) -> u64 {
        self.0.iter().map(|stride| stride.count).product()
    }

    /// Where run `k` begins, in source and region, from the first run of all.
    pub fn run(&self, mut k: u64) -> (u64, u64) {
        let (mut from, mut to) = (0, 0);
        for stride in self.0.iter().rev() {
            from += k % stride.count * stride.from;
            to += k % stride.count * stride.to;
            k /= stride.count;
        }
        (from, to)
    }
}

/// A box that holds another one: its extent, and where the other one begins in it.
pub(super) struct Whole {
    pub(super) shape: Vec<u64>,
    pub(super) offset: Vec<u64>,
}

/// A box as runs, in two boxes that hold it.
pub(super) struct Spread {
    /// Byte at which the first run begins in each.
    pub(super) from: u64,
    pub(super) to: u64,
    /// In the first.
    pub(super) run_len: u64,
    pub(super) strides: Strides,
}

impl Spread {
    /// The runs of a box of extent `size`, with elements of `bits` bits in each.
    pub(super) fn new(
        from: &Whole,
        to: &Whole,
        size: &[u64],
        bits: (u64, u64),
    ) -> Result<Spread, Fault> {
        let (mut from_at, mut to_at, mut run) = (0, 0, bits.0);
        let (mut from_stride, mut to_stride) = bits;
        let mut strides = Vec::new();
        let mut spanned = true;
        for dim in (0..size.len()).rev() {
            from_at += from.offset[dim] * from_stride;
            to_at += to.offset[dim] * to_stride;
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
        if !steps.chain([from_at, to_at, run]).all(|bits| bits.is_multiple_of(8)) {
            return Err(Fault::new(
                ErrorKind::Misaligned,
                format!("a part of shape {size:?} does not begin and end on bytes"),
            ));
        }
        for stride in &mut strides {
            (stride.from, stride.to) = (stride.from / 8, stride.to / 8);
        }
        let strides = Strides(strides);
        Ok(Spread { from: from_at / 8, to: to_at / 8, run_len: run / 8, strides })
    }
}

/// A part of a tensor that is one piece: runs of bytes of its shard, which follow each other in
/// the part.
pub(crate) struct Rows {
    /// The shard.
    pub(crate) shard: ShardId,
    /// Byte of the shard at which the first run begins.
    pub(crate) start: u64,
    /// Length of each run; at least one byte.
    pub(crate) run_len: u64,
    /// How they are spread.
    pub(crate) strides: Strides,
}

impl Rows {
    /// The runs of the indices `part` of a tensor, or of all of it: if it is one piece, and they
    /// lie in it, are some, and begin and end on bytes.
    pub(crate) fn of(tensor: &Tensor<'_>, part: Option<&[Range<u64>]>) -> Option<Rows> {
        let mut pieces = tensor.pieces();
        let (Some(piece), None) = (pieces.next(), pieces.next()) else { return None };
        let Some(part) = part else {
            let (shard, start, run_len) = (piece.shard, piece.range.start, piece.len());
            return (run_len > 0).then_some(Rows {
                shard,
                start,
                run_len,
                strides: Strides(vec![]),
            });
        };
        let some =
            |(wanted, &size): (&Range<u64>, &u64)| wanted.start < wanted.end && wanted.end <= size;
        if part.len() != tensor.shape.len() || !part.iter().zip(tensor.shape).all(some) {
            return None;
        }
        if let Some((skipped, run_len)) = one_run(part, tensor.shape, tensor.dtype.bits()) {
            let start = piece.range.start + skipped;
            return Some(Rows { shard: piece.shard, start, run_len, strides: Strides(vec![]) });
        }
        let size: Vec<u64> = part.iter().map(|wanted| wanted.end - wanted.start).collect();
        let offset = part.iter().map(|wanted| wanted.start).collect();
        let from = Whole { shape: tensor.shape.to_vec(), offset };
        let to = Whole { shape: size.clone(), offset: vec![0; size.len()] };
        let bits = tensor.dtype.bits();
        let Spread { from, run_len, strides, .. } =
            Spread::new(&from, &to, &size, (bits, bits)).ok()?;
        let start = piece.range.start + from;
        (run_len > 0).then_some(Rows { shard: piece.shard, start, run_len, strides })
    }

    /// How many they are.
    pub(crate) fn count(&self) -> u64 {
        self.strides.count()
    }

    /// The bytes of the shard from the first to the last.
    pub(crate) fn span(&self) -> Range<u64> {
        let last = self.strides.run(self.count() - 1).0;
        self.start..self.start + last + self.run_len
    }
}

/// First byte and length of a part, which is not empty and lies in `shape`, if it is one run of
/// whole bytes: that is found out sooner than how several are spread.
fn one_run(part: &[Range<u64>], shape: &[u64], bits: u64) -> Option<(u64, u64)> {
    let len = |range: &Range<u64>| range.end - range.start;
    // Before this dimension there is one index each, and after it all.
    let cut = part.iter().position(|range| len(range) > 1).unwrap_or(part.len());
    let after = part.iter().zip(shape).skip(cut + 1);
    if after.into_iter().any(|(range, &size)| len(range) != size) {
        return None;
    }
    let offset =
        part.iter().zip(shape).fold(0, |offset, (range, &size)| offset * size + range.start);
    let (from, run) = (offset * bits, part.iter().map(len).product::<u64>() * bits);
    (from.is_multiple_of(8) && run.is_multiple_of(8)).then_some((from / 8, run / 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits of a part, one after the other, as they lie in a tensor of this shape.
    fn bits_of(part: &[Range<u64>], shape: &[u64], bits: u64) -> Vec<u64> {
        let mut elements = vec![0];
        for (range, size) in part.iter().zip(shape) {
            let next = |element: u64| range.clone().map(move |index| element * size + index);
            elements = elements.into_iter().flat_map(next).collect();
        }
        elements.into_iter().flat_map(|element| element * bits..(element + 1) * bits).collect()
    }

    #[test]
    fn a_part_is_one_run_where_its_bits_follow_each_other_on_whole_bytes() {
        let shape = [3, 2, 4];
        let ranges = |size: u64| (0..size).flat_map(move |a| (a + 1..=size).map(move |b| a..b));
        let mut runs = 0;
        for (x, y, z) in ranges(3).flat_map(|x| {
            ranges(2).flat_map(move |y| {
                let x = x.clone();
                ranges(4).map(move |z| (x.clone(), y.clone(), z))
            })
        }) {
            for bits in [4, 16] {
                let part = [x.clone(), y.clone(), z.clone()];
                let right = bits_of(&part, &shape, bits);
                let is_run = right.windows(2).all(|pair| pair[1] == pair[0] + 1);
                let is_whole = right[0].is_multiple_of(8) && right.len().is_multiple_of(8);
                let right = (right[0] / 8, right.len() as u64 / 8);
                let found = one_run(&part, &shape, bits);
                assert_eq!(found, (is_run && is_whole).then_some(right), "{part:?} {bits}");
                runs += u32::from(found.is_some());
            }
        }
        assert!(runs > 50, "{runs}");
        assert_eq!(one_run(&[], &[], 16), Some((0, 2)));
    }
}
