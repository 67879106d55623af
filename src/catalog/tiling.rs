//! Proves that boxes fill a shape: each element is in exactly one box.
//!
//! The proof counts corners. Each corner of a box has a weight of 1 or -1. The weight is 1 if an
//! even number of the corner's coordinates are ends of the box, and -1 otherwise. The number of
//! boxes that contain an element is the sum of the weights of all corners of which no coordinate is
//! larger than the same coordinate of the element. So the boxes fill the shape exactly if the
//! corners of all boxes have the same weights as the corners of the shape itself.
//!
//! Corners are computed one dimension after another, and sorted after each dimension. Where boxes
//! meet, most corners cancel out. For n boxes of a fixed number of dimensions the proof takes O(n
//! log n), no matter how the boxes are nested.

use std::cmp::Ordering;

use super::tensors::BoxSlice;

/// Maximum number of corners in memory, 12 bytes each: `CORNERS_MIN` plus `CORNERS_PER_BOX_MAX` per
/// box, and at most `CORNERS_MAX`. If boxes fill a shape, most of their corners cancel out.
const CORNERS_MAX: usize = 1 << 23;
const CORNERS_PER_BOX_MAX: usize = 16;
const CORNERS_MIN: usize = 1 << 16;

/// Maximum number of boxes that are compared in pairs, if they have too many corners.
const PAIRS_BOXES_MAX: usize = 4096;

/// The reason why boxes do not fill a shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// This element is in at least two boxes.
    Overlap(Vec<u64>),
    /// An element is in no box. It is the first such element in row-major order, or `None` if
    /// unknown.
    Hole(Option<Vec<u64>>),
    /// There are too many boxes with too many dimensions for a decision.
    TooMany,
}

/// A corner of a box, in the dimensions that were processed so far.
#[derive(Clone, Copy)]
struct Corner {
    /// Index of the box. The shape itself has the index after all boxes.
    of: u32,
    /// Bit n is set if the corner is at the end of the box in the n-th processed dimension.
    ends: u32,
    weight: i32,
}

/// The boxes, the shape, and the dimensions that have to be processed.
struct Boxes<'a> {
    boxes: &'a [BoxSlice],
    shape: &'a [u64],
    /// Dimensions in which not every box has the whole extent.
    dims: Vec<usize>,
}

/// The first flaw of `boxes`, `None` if they fill `shape`. No box may be empty, and all have to lie
/// in `shape`. Adds the number of compared pairs of corners or boxes to `steps`.
pub(super) fn flaw(boxes: &[BoxSlice], shape: &[u64], steps: &mut u64) -> Option<Flaw> {
    let is_cut = |dim: &usize| boxes.iter().any(|piece| piece.shape[*dim] != shape[*dim]);
    let dims: Vec<usize> = (0..shape.len()).filter(is_cut).collect();
    let all = Boxes { boxes, shape, dims };
    match all.corners(steps) {
        Some(corners) => all.flaw_at(corners.first()?),
        None => all.flaw_by_pairs(steps),
    }
}

impl Boxes<'_> {
    /// First index and end index of a box in a dimension.
    fn span(&self, of: u32, dim: usize) -> (u64, u64) {
        match self.boxes.get(of as usize) {
            Some(piece) => (piece.offset[dim], piece.offset[dim] + piece.shape[dim]),
            None => (0, self.shape[dim]),
        }
    }

    fn coordinate(&self, corner: &Corner, nth: usize) -> u64 {
        let (start, end) = self.span(corner.of, self.dims[nth]);
        if corner.ends >> nth & 1 == 0 { start } else { end }
    }

    /// Compares corners by their coordinates in the first `done` dimensions, and then by the extent
    /// of their boxes in the other dimensions.
    fn compare(&self, a: &Corner, b: &Corner, done: usize) -> Ordering {
        let by_place = (0..done).map(|nth| self.coordinate(a, nth).cmp(&self.coordinate(b, nth)));
        let rest = &self.dims[done..];
        let by_extent = rest.iter().map(|&dim| self.span(a.of, dim).cmp(&self.span(b.of, dim)));
        by_place.chain(by_extent).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
    }

    /// The corners at which the weights of boxes and shape differ, sorted by place, with the
    /// differences as weights. `None` if there are too many corners in between.
    fn corners(&self, steps: &mut u64) -> Option<Vec<Corner>> {
        if self.dims.len() > u32::BITS as usize {
            return None;
        }
        let count = u32::try_from(self.boxes.len()).ok()?;
        let wanted = CORNERS_PER_BOX_MAX.saturating_mul(self.boxes.len()) + CORNERS_MIN;
        let most = wanted.min(CORNERS_MAX);
        let mut corners: Vec<Corner> =
            (0..count).map(|of| Corner { of, ends: 0, weight: 1 }).collect();
        corners.push(Corner { of: count, ends: 0, weight: -1 });
        self.cancel(&mut corners, 0, steps);
        for nth in 0..self.dims.len() {
            if corners.len() > most / 2 {
                return None;
            }
            let starts = corners.clone().into_iter();
            let ends = starts.map(|c| Corner { ends: c.ends | 1 << nth, weight: -c.weight, ..c });
            corners.extend(ends);
            self.cancel(&mut corners, nth + 1, steps);
        }
        Some(corners)
    }

    /// Sorts the corners, merges corners at the same place, and removes corners whose weights
    /// cancel.
    fn cancel(&self, corners: &mut Vec<Corner>, done: usize, steps: &mut u64) {
        corners.sort_unstable_by(|a, b| {
            *steps += 1;
            self.compare(a, b, done)
        });
        corners.dedup_by(|next, kept| {
            *steps += 1;
            let same = self.compare(next, kept, done).is_eq();
            if same {
                kept.weight += next.weight;
            }
            same
        });
        corners.retain(|corner| corner.weight != 0);
    }

    /// The flaw at the first corner that remains. Each other remaining corner has at least one
    /// larger coordinate. So the weight of the first corner is the number of boxes at its place
    /// minus one.
    fn flaw_at(&self, corner: &Corner) -> Option<Flaw> {
        let mut place = vec![0; self.shape.len()];
        for (nth, &dim) in self.dims.iter().enumerate() {
            place[dim] = self.coordinate(corner, nth);
        }
        Some(if corner.weight > 0 { Flaw::Overlap(place) } else { Flaw::Hole(Some(place)) })
    }

    /// Compares each pair of boxes. Also compares the sum of their sizes with the size of the
    /// shape.
    fn flaw_by_pairs(&self, steps: &mut u64) -> Option<Flaw> {
        // If the sum is smaller than the size of the shape, there is a hole, but its place is
        // unknown.
        let mut sizes = self.boxes.iter().map(|piece| piece.shape.iter().product::<u64>());
        let filled = sizes.try_fold(0_u64, u64::checked_add);
        let elements: u64 = self.shape.iter().product();
        if filled.is_some_and(|filled| filled < elements) {
            return Some(Flaw::Hole(None));
        }
        if self.boxes.len() > PAIRS_BOXES_MAX {
            return Some(Flaw::TooMany);
        }
        for (index, a) in self.boxes.iter().enumerate() {
            for b in &self.boxes[..index] {
                *steps += 1;
                let starts = a.offset.iter().zip(&b.offset).map(|(a, b)| *a.max(b));
                let meet: Vec<u64> = starts.collect();
                if contains(a, &meet) && contains(b, &meet) {
                    return Some(Flaw::Overlap(meet));
                }
            }
        }
        None
    }
}

/// Whether the element `place` is in `piece`.
pub(super) fn contains(piece: &BoxSlice, place: &[u64]) -> bool {
    let mut dims = piece.offset.iter().zip(&piece.shape).zip(place);
    dims.all(|((first, size), place)| first <= place && place - first < *size)
}

/// End of a box of elements that are in none of `boxes`. The box begins at `place`, which is the
/// first such element.
pub(super) fn hole_end(boxes: &[BoxSlice], shape: &[u64], place: &[u64]) -> Vec<u64> {
    let mut end: Vec<u64> = place.iter().map(|first| first + 1).collect();
    for dim in (0..shape.len()).rev() {
        let in_the_way = boxes.iter().filter(|piece| {
            piece.offset[dim] > place[dim]
                && (0..shape.len()).filter(|other| *other != dim).all(|other| {
                    let (first, size) = (piece.offset[other], piece.shape[other]);
                    first < end[other] && place[other] < first + size
                })
        });
        let first = in_the_way.map(|piece| piece.offset[dim]).min();
        end[dim] = first.unwrap_or(shape[dim]);
    }
    end
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ShardId;
    use super::*;

    fn piece(offset: &[u64], shape: &[u64]) -> BoxSlice {
        let (offset, shape) = (offset.to_vec(), shape.to_vec());
        BoxSlice { shard: ShardId(0), range: 0..0, offset, shape, strides: None }
    }

    /// For each element of `shape` in row-major order, the number of boxes that contain it.
    fn counts(boxes: &[BoxSlice], shape: &[u64]) -> Vec<(Vec<u64>, usize)> {
        let mut places = vec![Vec::new()];
        for &size in shape {
            let longer = |place: &Vec<u64>| {
                let place = place.clone();
                (0..size).map(move |index| [&place[..], &[index]].concat())
            };
            places = places.iter().flat_map(longer).collect();
        }
        let count = |place: &Vec<u64>| boxes.iter().filter(|piece| contains(piece, place)).count();
        places.into_iter().map(|place| (place.clone(), count(&place))).collect()
    }

    /// Boxes that result from cutting a shape repeatedly. Some of them are changed afterwards.
    fn boxes() -> impl Strategy<Value = (Vec<u64>, Vec<BoxSlice>)> {
        let shape = prop::collection::vec(1u64..5, 0..5);
        let cuts = prop::collection::vec((any::<u8>(), any::<u8>(), any::<u8>()), 0..12);
        let spoilt = prop::collection::vec((any::<u8>(), any::<u8>(), 0u8..4), 0..3);
        (shape, cuts, spoilt).prop_map(|(shape, cuts, spoilt)| {
            let mut boxes = vec![piece(&vec![0; shape.len()], &shape)];
            for (which, dim, place) in cuts {
                let which = which as usize % boxes.len();
                let Some(dim) = (dim as usize).checked_rem(shape.len()) else { continue };
                let size = boxes[which].shape[dim];
                if size > 1 {
                    let cut = 1 + u64::from(place) % (size - 1);
                    let mut rest = boxes[which].clone();
                    boxes[which].shape[dim] = cut;
                    rest.offset[dim] += cut;
                    rest.shape[dim] -= cut;
                    boxes.push(rest);
                }
            }
            for (which, dim, how) in spoilt {
                if boxes.is_empty() {
                    break;
                }
                let which = which as usize % boxes.len();
                let dim = (dim as usize).checked_rem(shape.len());
                let (here, size) = (&mut boxes[which], |dim: usize| shape[dim]);
                match (how, dim) {
                    (0, _) => drop(boxes.swap_remove(which)),
                    (1, _) => boxes.push(boxes[which].clone()),
                    (2, Some(dim)) if here.offset[dim] + here.shape[dim] < size(dim) => {
                        here.shape[dim] += 1;
                    }
                    (3, Some(dim)) if here.offset[dim] > 0 => here.offset[dim] -= 1,
                    _ => {}
                }
            }
            (shape, boxes)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_proof_says_what_counting_every_element_says((shape, boxes) in boxes()) {
            let counted = counts(&boxes, &shape);
            let first = counted.into_iter().find(|(_, count)| *count != 1);
            let expected = first.clone().map(|(place, count)| {
                if count == 0 { Flaw::Hole(Some(place)) } else { Flaw::Overlap(place) }
            });
            prop_assert_eq!(&flaw(&boxes, &shape, &mut 0), &expected);
            if let Some(Flaw::Hole(Some(place))) = expected {
                let end = hole_end(&boxes, &shape, &place);
                let size: Vec<u64> = end.iter().zip(&place).map(|(end, from)| end - from).collect();
                let hole = piece(&place, &size);
                let inside = counts(&boxes, &shape).into_iter().filter(|(point, _)| contains(&hole, point));
                prop_assert!(inside.into_iter().all(|(_, count)| count == 0));
            }
            // The comparison in pairs, which is used for boxes of many dimensions, finds a flaw in
            // the same cases.
            let dims = (0..shape.len()).collect();
            let by_pairs = Boxes { boxes: &boxes, shape: &shape, dims }.flaw_by_pairs(&mut 0);
            prop_assert_eq!(by_pairs.is_some(), first.is_some());
        }
    }

    /// `side` pairs of boxes: an upright strip, and the rest of the row beside it. All strips
    /// overlap in one dimension, and all rows overlap in the other dimension.
    fn staircase(side: u64) -> Vec<BoxSlice> {
        let strip = |n| piece(&[n, n], &[side - n, 1]);
        let row = |n| piece(&[n, n + 1], &[1, side - n - 1]);
        (0..side).map(strip).chain((0..side - 1).map(row)).collect()
    }

    // A box whose corners do not cancel has 2^n corners in n dimensions.
    #[test]
    fn boxes_that_do_not_meet_are_refused_in_few_steps() {
        for (dims, size) in [(12_u64, 30), (30, 4)] {
            let far = |n: u64| {
                (0..dims).map(move |dim| (n * (dim + 3) + n / 7) % (size - 1)).collect::<Vec<_>>()
            };
            let boxes: Vec<BoxSlice> =
                (0..4000).map(|n| piece(&far(n), &vec![1; dims as usize])).collect();
            let mut steps = 0;
            assert!(flaw(&boxes, &vec![size; dims as usize], &mut steps).is_some());
            assert!(steps < 20_000_000, "{steps} steps");
        }
    }

    #[test]
    fn nested_staircases_are_proved_in_n_log_n_steps() {
        for side in [1_000, 4_000, 16_000] {
            let (boxes, mut steps) = (staircase(side), 0);
            assert_eq!(flaw(&boxes, &[side, side], &mut steps), None);
            let n = boxes.len() as u64;
            let bound = 16 * n * u64::from(n.ilog2());
            assert!(steps < bound, "{steps} steps for {n} boxes, {bound} at most");
        }
    }

    #[test]
    fn nested_staircases_of_three_dimensions_and_grids_are_proved_in_n_log_n_steps() {
        let side = 3_000;
        let deep = staircase(side).into_iter().flat_map(|flat| {
            let halves = |z, depth| {
                piece(&[flat.offset[0], flat.offset[1], z], &[flat.shape[0], flat.shape[1], depth])
            };
            let cut = 1 + flat.offset[0] % 5;
            [halves(0, cut), halves(cut, 8 - cut)]
        });
        let grid = (0..100 * 100).map(|n| piece(&[n / 100, n % 100, 0], &[1, 1, 8]));
        for (boxes, shape) in
            [(deep.collect::<Vec<_>>(), [side, side, 8]), (grid.collect::<Vec<_>>(), [100, 100, 8])]
        {
            let (mut steps, n) = (0, boxes.len() as u64);
            assert_eq!(flaw(&boxes, &shape, &mut steps), None);
            let bound = 32 * n * u64::from(n.ilog2());
            assert!(steps < bound, "{steps} steps for {n} boxes, {bound} at most");
        }
    }

    #[test]
    fn one_box_too_short_in_a_staircase_is_found_with_its_place() {
        let mut boxes = staircase(5_000);
        boxes[4_000].shape[0] -= 1;
        let hole = flaw(&boxes, &[5_000, 5_000], &mut 0);
        assert_eq!(hole, Some(Flaw::Hole(Some(vec![4_999, 4_000]))));
        boxes[4_000].shape[0] += 1;
        boxes[3_000].offset[1] -= 1;
        let overlap = flaw(&boxes, &[5_000, 5_000], &mut 0);
        assert_eq!(overlap, Some(Flaw::Overlap(vec![3_000, 2_999])));
    }

    #[test]
    fn boxes_of_many_dimensions_are_proved_pair_by_pair_or_not_at_all() {
        // Each box is cut off along another dimension, so that there are 2^40 corners.
        let dims = 40;
        let shape = vec![2; dims];
        let mut boxes: Vec<BoxSlice> = Vec::new();
        let mut rest = piece(&vec![0; dims], &shape);
        for dim in 0..dims {
            let mut half = rest.clone();
            half.shape[dim] = 1;
            boxes.push(half);
            rest.offset[dim] = 1;
            rest.shape[dim] = 1;
        }
        assert_eq!(flaw(&boxes, &shape, &mut 0), Some(Flaw::Hole(None)));
        boxes.push(rest.clone());
        assert_eq!(flaw(&boxes, &shape, &mut 0), None);
        boxes.push(rest);
        assert_eq!(flaw(&boxes, &shape, &mut 0), Some(Flaw::Overlap(vec![1; dims])));
        let many = vec![boxes[0].clone(); PAIRS_BOXES_MAX + 1];
        let spread = many.into_iter().chain(boxes).collect::<Vec<_>>();
        assert_eq!(flaw(&spread, &shape, &mut 0), Some(Flaw::TooMany));
    }
}
