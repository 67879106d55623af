//! Copies indexed parts of tensors from the page cache, in one call from Python.

use std::ops::Range;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PySlice, PyTuple};
use tensorfs::internal::loader::CachedPart;

use crate::checkpoint::Checkpoint;
use crate::loading::Loader;

/// The part that an index selects: first index and end in each dimension, and the shape of the result.
type Part = (Vec<Range<u64>>, Vec<u64>);

/// The part of the tensor at `position` that `index` selects. `make` gets a shape, and returns a new tensor and its
/// address. `None` if the index has items other than plain numbers and slices, if it selects the whole tensor, or if
/// the page cache does not hold the part.
///
/// # Errors
/// Fails if the shard has changed, or if `make` fails.
#[pyfunction]
pub(crate) fn load_indexed<'py>(
    py: Python<'py>,
    loader: &Loader,
    checkpoint: &Checkpoint,
    position: usize,
    index: &Bound<'py, PyAny>,
    make: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let checkpoint = checkpoint.own();
    let catalog = checkpoint.catalog();
    if position >= catalog.len() {
        return Ok(None);
    }
    let tensor = catalog.tensor_at(position);
    let Some((part, shape)) = part_of(index, tensor.shape)? else { return Ok(None) };
    let extents = part.iter().map(|range| range.end - range.start);
    if extents.clone().eq(tensor.shape.iter().copied()) {
        return Ok(None);
    }
    // The part lies in the tensor, so its length in bits cannot overflow.
    let bits = extents.product::<u64>() * tensor.dtype.bits();
    if !bits.is_multiple_of(8) {
        return Ok(None);
    }
    // This check comes before `make`, so that no unused tensor is made.
    let Some(part) = CachedPart::of(&checkpoint, position, Some(&part)) else { return Ok(None) };
    let made = make.call1((PyTuple::new(py, shape)?,))?;
    // The new tensor has the dtype and the shape of the part, and no other code has a reference to it yet.
    let (made, address): (Bound<'py, PyAny>, usize) = made.extract()?;
    let len = (bits / 8) as usize;
    let copied = loader.copy_part(py, &checkpoint, position, &part, address, len)?;
    Ok(copied.then_some(made))
}

/// Parses an index of plain numbers and slices. `None` for any other index, which may be valid too.
fn part_of(index: &Bound<'_, PyAny>, sizes: &[u64]) -> PyResult<Option<Part>> {
    let several = index.cast_exact::<PyTuple>().ok();
    let given = several.map_or(1, |items| items.len());
    if given > sizes.len() {
        return Ok(None);
    }
    let mut part = Vec::with_capacity(sizes.len());
    let mut shape = Vec::with_capacity(sizes.len());
    for (number, &size) in sizes.iter().enumerate() {
        let (start, end, single) = match several {
            _ if number >= given => (0, size, false),
            Some(items) => match bounds(&items.get_item(number)?, size)? {
                Some(found) => found,
                None => return Ok(None),
            },
            None => match bounds(index, size)? {
                Some(found) => found,
                None => return Ok(None),
            },
        };
        if start >= end || end > size {
            return Ok(None);
        }
        part.push(start..end);
        if !single {
            shape.push(end - start);
        }
    }
    Ok(Some((part, shape)))
}

/// First index and end in one dimension, and whether the index removes this dimension from the result. `None` unless
/// the item is a number, or a slice without a step.
fn bounds(item: &Bound<'_, PyAny>, size: u64) -> PyResult<Option<(u64, u64, bool)>> {
    let py = item.py();
    if let Ok(slice) = item.cast_exact::<PySlice>() {
        if !slice.getattr(intern!(py, "step"))?.is_none() {
            return Ok(None);
        }
        let start = bound(&slice.getattr(intern!(py, "start"))?, 0);
        let stop = bound(&slice.getattr(intern!(py, "stop"))?, size);
        return Ok(start.zip(stop).map(|(start, stop)| (start, stop, false)));
    }
    if !item.is_exact_instance_of::<PyInt>() {
        return Ok(None);
    }
    let number = item.extract::<u64>().ok().filter(|&number| number < size);
    Ok(number.map(|number| (number, number + 1, true)))
}

fn bound(given: &Bound<'_, PyAny>, none: u64) -> Option<u64> {
    if given.is_none() {
        return Some(none);
    }
    given.is_exact_instance_of::<PyInt>().then(|| given.extract().ok()).flatten()
}
