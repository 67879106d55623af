//! Copies runs whose order differs between the source and the target, for example the runs of a transposed tensor. The
//! copy proceeds in tiles, so that each cache line is read and written once, and not once for each of its elements.

use std::ops::Range;

use super::{RunRange, Stride, StridedCopy};

/// Number of runs along each side of a tile.
const TILE: usize = 32;

/// The two dimensions that are divided into tiles.
struct Plane {
    /// The dimension whose runs are near each other in the source.
    across: Stride,
    /// The dimension whose runs are adjacent in the target.
    along: Stride,
    /// Length of a run in the target, in bytes.
    placed_len: u64,
}

impl StridedCopy {
    /// Calls `visit` for groups of bytes that are adjacent in the target, with the byte of the target at which
    /// each group begins. Together they are the runs of `part`. A run has `placed_len` bytes in the target.
    /// `bytes` holds bytes `part.bytes` of the source.
    pub fn each_row(
        &self,
        part: &RunRange,
        placed_len: u64,
        bytes: &[u8],
        visit: &mut impl FnMut(&[u8], u64),
    ) {
        let follows = |stride: &Stride| stride.to == placed_len;
        let width = match self.run_len {
            width @ (1 | 2 | 4 | 8 | 16) if !self.ascending => width,
            _ => 0,
        };
        if width == 0 || !self.strides.iter().any(follows) {
            return self.each_run(part, |run, place| {
                visit(&bytes[run.start as usize..run.end as usize], place);
            });
        }
        self.each_box(part.runs.clone(), &mut |one| {
            let start = (one.from, part.bytes.start);
            one.each_plane(placed_len, &mut |plane, from, to| {
                let from = &bytes[(start.0 + from - start.1) as usize..];
                match width {
                    1 => plane.each_row::<1>(from, to, visit),
                    2 => plane.each_row::<2>(from, to, visit),
                    4 => plane.each_row::<4>(from, to, visit),
                    8 => plane.each_row::<8>(from, to, visit),
                    _ => plane.each_row::<16>(from, to, visit),
                }
            });
        });
    }

    /// Calls `visit` for each plane of the runs with three values: the plane, the distance in bytes of its
    /// first run from the first of all runs in the source, and the byte of the target at which it begins.
    fn each_plane(&self, placed_len: u64, visit: &mut dyn FnMut(&Plane, u64, u64)) {
        let one = Stride { count: 1, from: 0, to: 0 };
        let mut outer = self.strides.clone();
        let follows = |stride: &Stride| stride.to == placed_len;
        let along = outer.iter().position(follows).map_or(one, |place| outer.remove(place));
        let nearest = (0..outer.len()).min_by_key(|&dim| outer[dim].from);
        let across = nearest.map_or(one, |place| outer.remove(place));
        let plane = Plane { across, along, placed_len };
        let planes = StridedCopy { from: 0, to: self.to, strides: outer, ..*self };
        for number in 0..planes.count() {
            let (from, to) = planes.run(number);
            visit(&plane, from, to);
        }
    }

    /// Number of bytes of the source that should be read together, so that tiles are whole, if the runs are
    /// visited in the order of the source.
    pub fn tile_span(&self) -> u64 {
        let dense = self.strides.iter().rev().try_fold(self.run_len, |len, stride| {
            if stride.from == len { Ok(len.saturating_mul(stride.count)) } else { Err(len) }
        });
        dense.unwrap_or_else(|row| row.saturating_mul(TILE as u64))
    }

    /// The runs of `count` parts like `part`, whose bytes are adjacent in a source and which are `step` bytes
    /// apart in the target. `None` if the runs of the part do not form a box.
    pub fn stacked(&self, part: &RunRange, count: u64, step: u64) -> Option<StridedCopy> {
        let Range { start, end } = part.runs;
        let mut inner = Vec::new();
        let mut unit = 1;
        for stride in self.strides.iter().rev() {
            let steps = (end - start) / unit;
            if steps == 1 {
                break;
            }
            let whole = steps.min(stride.count);
            let fits = start / unit % stride.count + whole <= stride.count;
            if !(end - start).is_multiple_of(unit * whole) || !start.is_multiple_of(unit) || !fits {
                return None;
            }
            inner.push(Stride { count: whole, ..*stride });
            unit *= whole;
        }
        let from = part.bytes.end - part.bytes.start;
        let outer = std::iter::once(Stride { count, from, to: step });
        let all = outer.chain(inner.into_iter().rev());
        let strides = all.filter(|stride| stride.count > 1).collect();
        let is_whole = unit == end - start;
        is_whole.then_some(StridedCopy { from: 0, to: part.target, strides, ..*self })
    }
}

impl Plane {
    /// Calls `visit` for the bytes of each part of a row. `from` begins with the first run, which is placed at
    /// byte `to` of the target.
    fn each_row<const WIDTH: usize>(
        &self,
        from: &[u8],
        to: u64,
        visit: &mut impl FnMut(&[u8], u64),
    ) {
        let Plane { across, along, placed_len } = self;
        let mut tile = [[[0; WIDTH]; TILE]; TILE];
        let mut rows = [[0; WIDTH]; TILE * TILE];
        let rows_follow = along.count <= TILE as u64 && across.to == along.count * placed_len;
        for first in (0..across.count).step_by(TILE) {
            let lines = (across.count - first).min(TILE as u64) as usize;
            for column in (0..along.count).step_by(TILE) {
                let columns = (along.count - column).min(TILE as u64) as usize;
                let start = (first * across.from + column * along.from) as usize;
                for (number, runs) in tile[..columns].iter_mut().enumerate() {
                    let from = &from[start + number * along.from as usize..];
                    take_runs(from, across.from as usize, &mut runs[..lines]);
                }
                let place = to + first * across.to + column * along.to;
                for line in 0..lines {
                    let row = &mut rows[line * columns..][..columns];
                    for (run, taken) in row.iter_mut().zip(&tile) {
                        *run = taken[line];
                    }
                    if !rows_follow {
                        visit(row.as_flattened(), place + line as u64 * across.to);
                    }
                }
                if rows_follow {
                    visit(rows[..lines * columns].as_flattened(), place);
                }
            }
        }
    }
}

/// Copies runs that are `step` bytes apart in `from`.
fn take_runs<const WIDTH: usize>(from: &[u8], step: usize, runs: &mut [[u8; WIDTH]]) {
    if step == WIDTH {
        let bytes = runs.as_flattened_mut();
        return bytes.copy_from_slice(&from[..bytes.len()]);
    }
    for (number, run) in runs.iter_mut().enumerate() {
        run.copy_from_slice(&from[number * step..][..WIDTH]);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::OuterBox;
    use super::super::gather::tests::{items, tensor};
    use super::*;

    /// The runs of a tensor with these strides, and the bytes of a source that has these strides.
    fn stored(shape: &[u64], strides: &[u64], width: u64) -> (StridedCopy, Vec<u8>) {
        let zeros = vec![0; shape.len()];
        let to = OuterBox { shape, offset: &zeros };
        let copy = StridedCopy::of_piece(Some(strides), to, shape, 8 * width).unwrap();
        let len = copy.source_span().end;
        (copy, (0..len).map(|byte| (byte ^ ((byte >> 8) * 31)) as u8).collect())
    }

    fn right(shape: &[u64], strides: &[u64], width: u64, source: &[u8]) -> Vec<u8> {
        let items = items(shape, strides).into_iter();
        items
            .flat_map(|item| source[(item * width) as usize..][..width as usize].to_vec())
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn tiles_copy_the_bytes_that_single_runs_copy(
            (shape, strides) in tensor(),
            width in prop::sample::select(vec![1_u64, 2, 4, 8, 16]),
            max in prop::sample::select(vec![1_u64, 40, 1000, 1 << 20]),
        ) {
            let (copy, source) = stored(&shape, &strides, width);
            let right = right(&shape, &strides, width, &source);
            let mut target = vec![0; right.len()];
            let ordered = copy.in_source_order();
            ordered.each_group(max, max.max(ordered.tile_span()), &mut |part| {
                let bytes = &source[part.bytes.start as usize..part.bytes.end as usize];
                ordered.scatter(&part, bytes, &mut target, 0);
            });
            prop_assert!(target == right);
        }

        #[test]
        fn parts_that_are_alike_are_copied_at_once(
            (rows, columns) in (1_u64..80, 1_u64..80),
            (batch, first, more) in (1_u64..4, 0_u64..80, 1_u64..80),
            width in prop::sample::select(vec![1_u64, 2, 4]),
        ) {
            let shape = [batch, rows, columns];
            let (copy, source) = stored(&shape, &[rows * columns, 1, rows], width);
            let right = right(&shape, &[rows * columns, 1, rows], width, &source);
            // The range consists of whole rows of the first matrix.
            let (first, end) = (first.min(rows - 1), (first + more).min(rows));
            let row = columns * width;
            let gather = copy.gather(&(first * row..end * row), width);
            let mut parts: Vec<(Arc<StridedCopy>, RunRange)> = Vec::new();
            gather.each_read((end - first) * width, &mut |runs, part| {
                if let Some(runs) = runs {
                    parts.push((runs.clone(), part));
                }
            });
            let (Some((runs, part)), true) = (parts.first().cloned(), parts.len() > 1) else {
                return Ok(());
            };
            let step = parts[1].1.target - part.target;
            let stack = runs.stacked(&part, parts.len() as u64, step).unwrap();
            let taken = |part: &RunRange| source[part.bytes.start as usize..part.bytes.end as usize].to_vec();
            let bytes: Vec<u8> = parts.iter().flat_map(|(_, part)| taken(part)).collect();
            let all = RunRange { runs: 0..stack.count(), bytes: 0..bytes.len() as u64, target: part.target };
            let mut target = vec![0; (end * row) as usize];
            stack.scatter(&all, &bytes, &mut target, 0);
            prop_assert!(target[(first * row) as usize..] == right[(first * row) as usize..(end * row) as usize]);
        }
    }

    #[test]
    fn large_tiles_and_those_at_the_edges_are_right() {
        for shape in [[70, 33, 3], [1, 64, 65], [5, 200, 1]] {
            for order in [[0, 1, 2], [0, 2, 1], [2, 1, 0], [1, 0, 2], [1, 2, 0], [2, 0, 1]] {
                let mut strides = [0; 3];
                order.iter().rev().fold(1, |step, &dim: &usize| {
                    strides[dim] = step;
                    step * shape[dim]
                });
                let (copy, source) = stored(&shape, &strides, 2);
                let mut target = vec![0; source.len()];
                let all = copy.in_source_order();
                let part = RunRange { runs: 0..all.count(), bytes: all.source_span(), target: 0 };
                all.scatter(&part, &source, &mut target, 0);
                assert_eq!(target, right(&shape, &strides, 2, &source), "{shape:?} {order:?}");
            }
        }
    }
}
