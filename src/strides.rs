//! Strides of boxes. A stride is the number of elements from one index of a dimension to the next.

/// The strides of a row-major box.
pub(crate) fn row_major(shape: &[u64]) -> Vec<u64> {
    let mut step = 1_u64;
    let mut strides: Vec<u64> = shape
        .iter()
        .rev()
        .map(|&size| {
            let own = step;
            step = step.saturating_mul(size);
            own
        })
        .collect();
    strides.reverse();
    strides
}

/// Whether the elements of a box with these strides are adjacent and in row-major order.
pub(crate) fn is_row_major(shape: &[u64], strides: &[u64]) -> bool {
    let dims = shape.iter().zip(strides).zip(row_major(shape));
    shape.contains(&0) || dims.into_iter().all(|((&size, &own), right)| size == 1 || own == right)
}

/// Whether each stride is larger than the distance from the first to the last element of the inner dimensions.
/// Then no two elements overlap, except that a stride of 0 repeats elements.
pub(crate) fn are_nested(shape: &[u64], strides: &[u64]) -> bool {
    let long = shape.iter().zip(strides).filter(|&(&size, &stride)| size > 1 && stride > 0);
    let mut dims: Vec<(u64, u64)> = long.map(|(&size, &stride)| (stride, size)).collect();
    dims.sort_unstable();
    let mut last = 0_u128;
    dims.into_iter().all(|(stride, size)| {
        let passes = u128::from(stride) > last;
        last = last.saturating_add(u128::from(size - 1).saturating_mul(u128::from(stride)));
        passes
    })
}

/// Number of elements from the first to the last element of a box, including both; 0 if the box is empty.
/// `None` if the number is 2^64 or more.
pub(crate) fn reach(shape: &[u64], strides: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    let mut steps = shape.iter().zip(strides);
    let last = steps.try_fold(0_u64, |last, (size, stride)| {
        last.checked_add((size - 1).checked_mul(*stride)?)
    })?;
    last.checked_add(1)
}
