//! Splits ranges of elements of a row-major tensor into boxes.
//!
//! A range of elements begins with a part of a row, continues with whole rows, and ends with a part of a row. The
//! same holds for each further dimension. Each of these parts is a box. The bytes of such a box follow each other in
//! the range and in the tensor.

use std::ops::Range;

/// A box: the first index and the extent in each dimension.
pub(super) type FlatBox = (Vec<u64>, Vec<u64>);

/// The boxes of the elements `range` of a tensor with this shape, in order. There are at most two boxes for each
/// dimension.
pub(super) fn boxes_of(shape: &[u64], range: Range<u64>) -> Vec<FlatBox> {
    // For each dimension, the number of elements from one index to the next.
    let mut steps = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        steps[dim - 1] = steps[dim] * shape[dim];
    }
    let mut boxes = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let left = range.end - at;
        // The outermost dimension in which the next box may have several indices.
        let Some(dim) = steps.iter().position(|&step| at.is_multiple_of(step) && step <= left)
        else {
            // A tensor without dimensions has exactly one element.
            boxes.push((Vec::new(), Vec::new()));
            break;
        };
        let offset: Vec<u64> =
            steps.iter().zip(shape).map(|(step, size)| at / step % size).collect();
        let count = (left / steps[dim]).min(shape[dim] - offset[dim]);
        let mut size = vec![1; shape.len()];
        size[dim] = count;
        size[dim + 1..].copy_from_slice(&shape[dim + 1..]);
        boxes.push((offset, size));
        at += count * steps[dim];
    }
    boxes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_range_is_the_end_of_a_row_whole_rows_and_the_beginning_of_one() {
        let boxes = boxes_of(&[7, 6], 5..20);
        let expected =
            [(vec![0, 5], vec![1, 1]), (vec![1, 0], vec![2, 6]), (vec![3, 0], vec![1, 2])];
        assert_eq!(boxes, expected);
        assert_eq!(boxes_of(&[], 0..1), [(vec![], vec![])]);
        assert_eq!(boxes_of(&[2, 3], 0..6), [(vec![0, 0], vec![2, 3])]);
        assert_eq!(boxes_of(&[0, 3], 0..0), []);
    }

    proptest! {
        #[test]
        fn boxes_hold_the_elements_of_the_range_once_and_in_order(
            shape in prop::collection::vec(1_u64..5, 0..5),
            ends in (0_u64..700, 0_u64..700),
        ) {
            let count: u64 = shape.iter().product();
            let (first, end) = (ends.0.min(ends.1).min(count), ends.0.max(ends.1).min(count));
            let boxes = boxes_of(&shape, first..end);
            prop_assert!(boxes.len() <= (2 * shape.len()).max(1));
            let mut at = first;
            for (offset, size) in boxes {
                let flat = offset.iter().zip(&shape).fold(0, |flat, (index, size)| flat * size + index);
                prop_assert_eq!(flat, at);
                // The elements of a box follow each other if the box has the whole extent in all dimensions after the
                // first dimension with several indices.
                let cut = size.iter().position(|&size| size > 1).unwrap_or(size.len());
                for dim in cut + 1..shape.len() {
                    prop_assert_eq!(size[dim], shape[dim]);
                }
                prop_assert!(offset.iter().zip(&size).zip(&shape).all(|((o, n), s)| o + n <= *s));
                at += size.iter().product::<u64>();
            }
            prop_assert_eq!(at, end);
        }
    }
}
