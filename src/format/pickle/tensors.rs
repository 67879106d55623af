//! The bytes of a tensor, by the calls that make it in a pickle.

use std::collections::HashMap;
use std::ops::Range;

use super::ReadStop;
use super::globals::{Rebuild, StorageType, dtype};
use super::values::{Node, NodeId, Values};
use super::zip::Archive;
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::range_reader::RangeReader;

/// Most dimensions of a tensor: those of torch.
const DIMS_MAX: usize = 64;

/// Calls that may wrap a tensor, one in another.
const WRAPS_MAX: usize = 8;

/// Number of parts of an id that names a storage: the last one of a listed storage is `None`, and tells
/// of views before torch 0.4.
const ENTRY_ID_LEN: usize = 5;
pub(super) const LISTED_ID_LEN: usize = 6;

/// A tensor with its place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorPlace {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// First byte in the file.
    pub(super) start: u64,
    /// Whether it has no elements and stands for a tensor that lies in the files of all ranks.
    pub(super) is_placeholder: bool,
}

/// A tensor as boxes of it, each of which has its elements one after another in the file.
#[derive(Debug)]
pub(super) struct BoxedTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) boxes: Vec<TensorBox>,
}

/// A box of a tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TensorBox {
    /// First index in each dimension, and extent.
    pub(super) offset: Vec<u64>,
    pub(super) shape: Vec<u64>,
    /// First byte in the file.
    pub(super) start: u64,
}

/// A storage as a pickle names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StorageId<'v> {
    pub(super) key: &'v str,
    pub(super) kind: StorageType,
    pub(super) numel: u64,
}

impl StorageId<'_> {
    /// Length of its data in bytes, `None` if it is 2^64 or more.
    pub(super) fn data_len(&self) -> Option<u64> {
        self.numel.checked_mul(self.kind.item_len())
    }
}

/// Where the data of storages lies.
pub(super) enum StorageData<'a, 'r> {
    /// In entries of an archive, whose headers are read when they are asked for.
    Entries { reader: &'r mut dyn RangeReader, archive: &'a Archive },
    /// Behind the pickles of a file, by the keys of the storages.
    Listed(HashMap<String, Range<u64>>),
}

/// The storages that tensors use.
pub(super) struct Storages<'a, 'r> {
    data: StorageData<'a, 'r>,
    used: HashMap<String, (StorageType, Range<u64>)>,
}

impl<'a, 'r> Storages<'a, 'r> {
    pub(super) fn new(data: StorageData<'a, 'r>) -> Storages<'a, 'r> {
        Storages { data, used: HashMap::new() }
    }

    /// The data of the storages that were asked for.
    pub(super) fn used(self) -> Vec<Range<u64>> {
        self.used.into_values().map(|(_, range)| range).collect()
    }

    /// Fills `buf` with the bytes of the file from `start` on.
    pub(super) fn read(&mut self, start: u64, buf: &mut [u8]) -> Result<(), ReadStop> {
        match &mut self.data {
            StorageData::Entries { reader, .. } => Ok(reader.read_exact_at(start, buf)?),
            StorageData::Listed(_) => {
                let message = "is a part of a tensor in a file of torch before 1.6, which had none";
                Err(wrong(message.to_owned()).into())
            }
        }
    }

    /// Number of parts of an id that names a storage.
    fn id_len(&self) -> usize {
        match self.data {
            StorageData::Entries { .. } => ENTRY_ID_LEN,
            StorageData::Listed(_) => LISTED_ID_LEN,
        }
    }

    fn get(&mut self, id: StorageId<'_>) -> Result<Range<u64>, ReadStop> {
        let StorageId { key, kind, numel } = id;
        if let Some((known, range)) = self.used.get(key) {
            if *known != kind || id.data_len() != Some(range.end - range.start) {
                return Err(wrong(format!("the storage {} has two types", quoted(key))).into());
            }
            return Ok(range.clone());
        }
        let range = match &mut self.data {
            StorageData::Listed(ranges) => ranges.get(key).cloned(),
            StorageData::Entries { reader, archive } => {
                if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
                    let message =
                        format!("its storage is called {}, which is no number", quoted(key));
                    return Err(wrong(message).into());
                }
                archive.data(*reader, &format!("data/{key}"))?
            }
        };
        let Some(range) = range else {
            let message =
                format!("its data, the storage {}, is missing from the file", quoted(key));
            return Err(Fault::new(ErrorKind::TensorMissing, message).into());
        };
        let len = range.end - range.start;
        if id.data_len() != Some(len) {
            let message = format!(
                "its storage has {numel} elements of {} bytes, its data has {len} bytes",
                kind.item_len()
            );
            return Err(Fault::new(ErrorKind::SizeMismatch, message).into());
        }
        self.used.insert(key.to_owned(), (kind, range.clone()));
        Ok(range)
    }
}

fn wrong(message: String) -> Fault {
    Fault::new(ErrorKind::HeaderDecode, message)
}

/// The call that makes a tensor: the function, and the numbers of its arguments.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorCall {
    rebuild: Rebuild,
    function: NodeId,
    args: NodeId,
    is_changed: bool,
    /// Whether a state says that the tensor is one of DeepSpeed ZeRO-3.
    is_of_zero: bool,
}

/// The call that makes the tensor `id`, `None` if it is none.
pub(super) fn tensor_call(values: &Values<'_>, id: NodeId) -> Option<TensorCall> {
    let (function, args) = values.call(id)?;
    let (module, name) = values.global(function)?;
    let rebuild = Rebuild::of(module, name)?;
    let is_changed = values.parts(id).next().is_some();
    Some(TensorCall { rebuild, function, args, is_changed, is_of_zero: false })
}

/// Function, class, arguments and state of the tensor `id`, if its call names its class.
pub(super) fn typed_call(values: &Values<'_>, id: NodeId) -> Option<[NodeId; 4]> {
    let call = tensor_call(values, id)?;
    let is_typed = call.rebuild == Rebuild::FromType && !call.is_changed;
    values.array::<4>(call.args).filter(|_| is_typed)
}

impl TensorCall {
    /// The place of the tensor.
    pub(super) fn place(
        self,
        values: &Values<'_>,
        storages: &mut Storages<'_, '_>,
    ) -> Result<TensorPlace, ReadStop> {
        Ok(self.found(values, storages)?.place()?)
    }

    /// The tensor as at most `max` boxes.
    pub(super) fn boxes(
        self,
        values: &Values<'_>,
        storages: &mut Storages<'_, '_>,
        max: usize,
    ) -> Result<BoxedTensor, ReadStop> {
        Ok(self.found(values, storages)?.boxes(max)?)
    }

    fn found(
        mut self,
        values: &Values<'_>,
        storages: &mut Storages<'_, '_>,
    ) -> Result<StridedTensor, ReadStop> {
        for _ in 0..WRAPS_MAX {
            if self.is_changed {
                let message = "its pickle changes it after it is made".to_owned();
                return Err(wrong(message).into());
            }
            match self.rebuild {
                Rebuild::Tensor | Rebuild::TensorOfDtype => {
                    let tensor = self.stored(values, storages)?;
                    let is_placeholder = self.is_of_zero && tensor.shape.contains(&0);
                    return Ok(StridedTensor { is_placeholder, ..tensor });
                }
                Rebuild::Other => return Err(self.unread(values).into()),
                Rebuild::Parameter => {
                    let mut args = values.tuple(self.args).into_iter().flatten();
                    let inner = args.next().and_then(|inner| tensor_call(values, inner));
                    self = inner.ok_or_else(|| self.unread(values))?;
                }
                Rebuild::FromType => self = self.of_type(values)?,
            }
        }
        Err(wrong("is made by too many calls".to_owned()).into())
    }

    fn unread(&self, values: &Values<'_>) -> Fault {
        let message = format!(
            "is made by {}, which tensorfs does not read; make it an ordinary tensor and save it \
             again",
            values.global_name(self.function)
        );
        wrong(message)
    }

    fn of_type(&self, values: &Values<'_>) -> Result<TensorCall, Fault> {
        let Some([function, kind, args, state]) = values.array::<4>(self.args) else {
            return Err(self.unread(values));
        };
        let known = [
            ("torch", "Tensor"),
            ("torch._tensor", "Tensor"),
            ("torch.nn.parameter", "Parameter"),
            ("torch.nn", "Parameter"),
        ];
        if !values.global(kind).is_some_and(|kind| known.contains(&kind)) {
            let message = format!(
                "is of the class {}, which tensorfs does not read; make it an ordinary tensor and \
                 save it again",
                values.global_name(kind)
            );
            return Err(wrong(message));
        }
        let named = values.global(function);
        let rebuild = named.and_then(|(module, name)| Rebuild::of(module, name));
        let rebuild = rebuild.ok_or_else(|| self.unread(values))?;
        if !matches!(values.node(args), Node::Tuple(_)) {
            return Err(self.unread(values));
        }
        let is_of_zero = self.is_of_zero || has_zero_id(values, state);
        Ok(TensorCall { rebuild, function, args, is_changed: false, is_of_zero })
    }

    /// The tensor of a storage.
    fn stored(
        &self,
        values: &Values<'_>,
        storages: &mut Storages<'_, '_>,
    ) -> Result<StridedTensor, ReadStop> {
        let args: Vec<NodeId> = values.tuple(self.args).into_iter().flatten().take(10).collect();
        let of_dtype = self.rebuild == Rebuild::TensorOfDtype;
        let (dtype_at, metadata_at) = if of_dtype { (Some(6), 7) } else { (None, 6) };
        let shape = |at: usize| args.get(at).and_then(|&id| numbers(values, id));
        let offset = args.get(1).and_then(|&id| values.int(id));
        let (Some(&storage), Some(offset), Some(sizes), Some(strides)) =
            (args.first(), offset, shape(2), shape(3))
        else {
            return Err(self.unread(values).into());
        };
        let metadata = args.get(metadata_at).copied();
        let is_plain = metadata.is_none_or(|id| {
            values.node(id) == Node::Null
                || matches!(values.node(id), Node::Dict(_)) && values.parts(id).next().is_none()
        });
        if args.len() > metadata_at + 1 || !is_plain {
            let message = "has marks, such as that it is to be conjugated or negated when it is \
                           read; save `tensor.resolve_conj().resolve_neg()`";
            return Err(wrong(message.to_owned()).into());
        }
        let id = storage_id(values, storage, storages.id_len())?;
        let data = storages.get(id)?;
        let dtype = match (id.kind, dtype_at.map(|at| args.get(at).copied())) {
            (StorageType::Typed(dtype), None) => Some(dtype),
            (StorageType::Untyped, Some(Some(id))) => {
                let named = values.global(id);
                let found = named.and_then(|(module, name)| dtype(module, name));
                if found.is_none() {
                    let message = format!(
                        "has the dtype {}, which safetensors does not have",
                        values.global_name(id)
                    );
                    return Err(Fault::new(ErrorKind::UnknownDtype, message).into());
                }
                found
            }
            _ => None,
        };
        let dtype = dtype.ok_or_else(|| self.unread(values))?;
        Ok(StridedTensor::new(data, dtype, offset, &[sizes, strides])?)
    }
}

/// Whether the state of a tensor says that it is one of DeepSpeed ZeRO-3.
fn has_zero_id(values: &Values<'_>, state: NodeId) -> bool {
    use super::values::Part;
    let is_mark = |part| matches!(part, Part::Pair(key, _) if values.text(key) == Some("ds_id"));
    values.parts(state).any(is_mark)
}

/// The integers of a tuple.
pub(super) fn numbers(values: &Values<'_>, id: NodeId) -> Option<Vec<i64>> {
    // A `torch.Size` is one of a tuple.
    let tuple = match values.call(id) {
        Some((class, args)) if values.global(class) == Some(("torch", "Size")) => {
            let [inner] = values.array::<1>(args)?;
            inner
        }
        _ => id,
    };
    let mut all = Vec::new();
    for item in values.tuple(tuple)? {
        if all.len() == DIMS_MAX {
            return None;
        }
        all.push(values.int(item)?);
    }
    Some(all)
}

/// The storage that the persistent id `id` of `len` parts names.
pub(super) fn storage_id<'v>(
    values: &Values<'v>,
    id: NodeId,
    len: usize,
) -> Result<StorageId<'v>, Fault> {
    let Node::Persistent(key) = values.node(id) else {
        return Err(wrong("has no storage".to_owned()));
    };
    let unknown = || wrong("has a storage of an unknown form".to_owned());
    let parts: Vec<NodeId> = values.tuple(key).into_iter().flatten().take(len + 1).collect();
    let [tag, class, key, location, numel, rest @ ..] = parts.as_slice() else {
        return Err(unknown());
    };
    let is_known = parts.len() == len
        && values.text(*tag) == Some("storage")
        && rest.iter().all(|&view| values.node(view) == Node::Null);
    if !is_known {
        return Err(unknown());
    }
    if values.text(*location) == Some("meta") {
        let message = "was on the device `meta` and has no data; save the model after its weights are \
                       loaded";
        return Err(wrong(message.to_owned()));
    }
    let kind = values.global(*class).and_then(|(module, name)| StorageType::of(module, name));
    let Some(kind) = kind else {
        let message = format!(
            "has a storage {}, whose elements safetensors does not have",
            values.global_name(*class)
        );
        return Err(Fault::new(ErrorKind::UnknownDtype, message));
    };
    match (values.text(*key), values.natural(*numel), values.text(*location)) {
        (Some(key), Some(numel), Some(_)) => Ok(StorageId { key, kind, numel }),
        _ => Err(unknown()),
    }
}

/// A tensor in the data of its storage, which holds it.
struct StridedTensor {
    dtype: Dtype,
    /// Extents and strides in items.
    shape: Vec<u64>,
    strides: Vec<u64>,
    /// First byte in the file, and bytes of an item.
    start: u64,
    item_len: u64,
    /// Whether its items lie one after another.
    is_contiguous: bool,
    /// Whether it has no elements and stands for a tensor that lies in the files of all ranks.
    is_placeholder: bool,
}

impl StridedTensor {
    /// The tensor of these sizes and strides at item `offset` of `data`.
    fn new(
        data: Range<u64>,
        dtype: Dtype,
        offset: i64,
        [sizes, strides]: &[Vec<i64>; 2],
    ) -> Result<StridedTensor, Fault> {
        if sizes.len() != strides.len() {
            let message = format!("has {} sizes and {} strides", sizes.len(), strides.len());
            return Err(wrong(message));
        }
        let natural = |numbers: &[i64]| -> Option<Vec<u64>> {
            numbers.iter().map(|&number| u64::try_from(number).ok()).collect()
        };
        let (Some(shape), Some(strides), Ok(offset)) =
            (natural(sizes), natural(strides), u64::try_from(offset))
        else {
            return Err(wrong("has a negative size, stride or offset".to_owned()));
        };
        // Two elements of this dtype are one item.
        let item_len = if dtype == Dtype::F4 { 1 } else { dtype.bits() / 8 };
        let items = (data.end - data.start) / item_len;
        let count = shape.iter().try_fold(1_u64, |count, &size| count.checked_mul(size));
        let count = count.ok_or_else(overflow)?;
        let mut extent = 0_u128;
        // The strides of rows one after another.
        let (mut row, mut contiguous) = (1_u64, true);
        for (&size, &stride) in shape.iter().zip(&strides).rev() {
            if size > 1 {
                contiguous &= stride == row;
                let last = u128::from(size - 1) * u128::from(stride);
                extent = extent.checked_add(last).ok_or_else(overflow)?;
            }
            row = row.saturating_mul(size);
        }
        let end = u128::from(offset) + extent + 1;
        if count > 0 && end > u128::from(items) {
            let message = format!("ends at item {end} of its storage, which has {items}");
            return Err(Fault::new(ErrorKind::DataTruncated, message));
        }
        // A tensor without elements may begin anywhere.
        let start = data.start + if count > 0 { offset * item_len } else { 0 };
        let is_contiguous = contiguous || count == 0;
        let tensor = StridedTensor {
            dtype,
            shape,
            strides,
            start,
            item_len,
            is_contiguous,
            is_placeholder: false,
        };
        dtype.bits_of(&tensor.elements()?).ok_or_else(overflow)?;
        Ok(tensor)
    }

    /// Its shape in elements.
    fn elements(&self) -> Result<Vec<u64>, Fault> {
        let mut shape = self.shape.clone();
        if self.dtype == Dtype::F4 {
            let last = shape.last_mut();
            let last = last.ok_or_else(|| wrong("is packed and has no dimension".to_owned()))?;
            *last = last.checked_mul(2).ok_or_else(overflow)?;
        }
        Ok(shape)
    }

    fn not_contiguous(&self) -> Fault {
        wrong(format!(
            "is not contiguous, its strides are {:?} for the shape {:?}, which tensorfs does not read \
             yet; save `tensor.contiguous()`",
            self.strides, self.shape
        ))
    }

    fn place(&self) -> Result<TensorPlace, Fault> {
        if !self.is_contiguous {
            return Err(self.not_contiguous());
        }
        Ok(TensorPlace {
            dtype: self.dtype,
            shape: self.elements()?,
            start: self.start,
            is_placeholder: self.is_placeholder,
        })
    }

    /// The tensor as at most `max` boxes whose items lie one after another.
    fn boxes(&self, max: usize) -> Result<BoxedTensor, Fault> {
        let shape = self.elements()?;
        let dims = shape.len();
        let mut own = shape.clone();
        if !self.is_contiguous {
            own = self.box_shape().ok_or_else(|| self.not_contiguous())?;
        }
        let counts: Vec<u64> =
            shape.iter().zip(&own).map(|(size, own)| if own == size { 1 } else { *size }).collect();
        let count = counts.iter().try_fold(1_u64, |all, &count| all.checked_mul(count));
        if count.is_none_or(|count| count > max as u64) {
            return Err(self.not_contiguous());
        }
        let mut boxes = Vec::new();
        let (mut offset, mut item) = (vec![0; dims], 0);
        loop {
            let start = self.start + item * self.item_len;
            boxes.push(TensorBox { offset: offset.clone(), shape: own.clone(), start });
            // The next index, the last dimension first.
            let mut dim = dims;
            loop {
                let Some(before) = dim.checked_sub(1) else {
                    return Ok(BoxedTensor { dtype: self.dtype, shape, boxes });
                };
                dim = before;
                if offset[dim] + 1 < counts[dim] {
                    offset[dim] += 1;
                    item += self.strides[dim];
                    break;
                }
                item -= offset[dim] * self.strides[dim];
                offset[dim] = 0;
            }
        }
    }

    /// The extent of the largest box that begins with a row of items one after another. `None` if there
    /// are no such rows, or if rows share items.
    fn box_shape(&self) -> Option<Vec<u64>> {
        let is_long = |dim: &usize| self.shape[*dim] > 1;
        let inner = (0..self.shape.len()).find(|dim| is_long(dim) && self.strides[*dim] == 1)?;
        let shares = (0..self.shape.len()).any(|dim| is_long(&dim) && self.strides[dim] == 0);
        if shares || self.dtype == Dtype::F4 {
            return None;
        }
        let mut own = vec![1; self.shape.len()];
        own[inner] = self.shape[inner];
        let mut row = self.shape[inner];
        for dim in (0..inner).rev().filter(is_long) {
            if self.strides[dim] == row {
                own[dim] = self.shape[dim];
                row *= self.shape[dim];
            }
        }
        Some(own)
    }
}

fn overflow() -> Fault {
    Fault::new(ErrorKind::Overflow, "has 2^64 elements or more")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    fn boxes(sizes: &[i64], strides: &[i64], max: usize) -> Result<BoxedTensor, Fault> {
        let of = &[sizes.to_vec(), strides.to_vec()];
        StridedTensor::new(100..1100, Dtype::U8, 3, of).unwrap().boxes(max)
    }

    /// The bytes of the elements in row-major order: those of the boxes.
    fn by_boxes(tensor: &BoxedTensor) -> Vec<Option<u64>> {
        let count = tensor.shape.iter().product::<u64>() as usize;
        let mut found = vec![None; count];
        for one in &tensor.boxes {
            for number in 0..one.shape.iter().product::<u64>() {
                let (mut rest, mut at, mut step) = (number, 0, 1);
                for dim in (0..tensor.shape.len()).rev() {
                    at += (one.offset[dim] + rest % one.shape[dim]) * step;
                    rest /= one.shape[dim];
                    step *= tensor.shape[dim];
                }
                assert_eq!(found[at as usize].replace(one.start + number), None);
            }
        }
        found
    }

    fn by_strides(sizes: &[i64], strides: &[i64]) -> Vec<Option<u64>> {
        (0..sizes.iter().product::<i64>())
            .map(|mut number| {
                let mut item = 3;
                for (size, stride) in sizes.iter().zip(strides).rev() {
                    item += number % size * stride;
                    number /= size;
                }
                Some(100 + item as u64)
            })
            .collect()
    }

    #[test]
    fn a_tensor_of_any_strides_is_cut_into_boxes_of_neighbours() {
        for (sizes, strides, count) in [
            (&[4, 3][..], &[3, 1][..], 1),
            (&[4, 3], &[1, 4], 3),
            (&[4, 3], &[8, 1], 4),
            (&[4, 3], &[8, 2], 0),
            (&[2, 3, 4, 5], &[60, 1, 15, 3], 40),
            (&[2, 3, 4], &[3, 1, 6], 4),
            (&[2, 3, 4], &[1, 8, 2], 12),
            (&[1, 3, 1, 4], &[7, 1, 7, 3], 4),
            (&[3, 4], &[0, 1], 0),
            (&[], &[], 1),
            (&[0, 4], &[1, 9], 1),
        ] {
            let found = boxes(sizes, strides, 100);
            assert_eq!(found.as_ref().map_or(0, |tensor| tensor.boxes.len()), count, "{strides:?}");
            if let Ok(tensor) = found {
                assert_eq!(by_boxes(&tensor), by_strides(sizes, strides), "{sizes:?} {strides:?}");
            }
        }
        let fault = boxes(&[4, 3], &[1, 4], 2).unwrap_err();
        assert!(fault.message.contains("its strides are [1, 4] for the shape [4, 3]"), "{fault}");
    }
}
