//! Finds the bytes of a tensor from the calls in a pickle that make the tensor.

use std::collections::HashMap;
use std::ops::Range;

use super::globals::{Rebuild, StorageType, dtype};
use super::values::{Node, NodeId, Values};
use super::zip::Archive;
use super::{ReadResult, wrong};
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::range_reader::RangeReader;
use crate::strides::{are_nested, is_row_major, reach};

/// Maximum number of dimensions of a tensor, as in torch.
const DIMS_MAX: usize = 64;

/// Maximum length in bytes of a tensor that repeats its elements. It is limited, because a file of
/// a few bytes may have any size in its shape.
const EXPANDED_LEN_MAX: u64 = 64 << 30;

/// Maximum number of nested calls that wrap a tensor.
const WRAPS_MAX: usize = 8;

/// The folder in an archive that has the storages.
const STORAGES: &str = "data/";

/// Number of parts of the persistent id of a storage, in archives and in the form before torch 1.6. The sixth part
/// describes views before torch 0.4, and has to be `None`.
const ENTRY_ID_LEN: usize = 5;
pub(super) const LISTED_ID_LEN: usize = 6;

/// A tensor with its place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorPlace {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// Offset of its first byte in the file.
    pub(super) start: u64,
    /// Its strides in elements. `None` if its elements follow each other.
    pub(super) strides: Option<Vec<u64>>,
    /// Whether it is a placeholder without elements for a tensor whose elements are in the files of
    /// all ranks.
    pub(super) is_placeholder: bool,
}

/// A storage, described by its persistent id in a pickle.
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

impl TensorPlace {
    /// Sets the shape of a part without elements to the shape that follows from its place. With tensor parallelism,
    /// FSDP2 saves such parts with other extents.
    pub(super) fn take_empty_shape(&mut self, shape: &[u64]) {
        let is_empty = |shape: &[u64]| shape.contains(&0);
        if is_empty(&self.shape) && is_empty(shape) && self.shape.len() == shape.len() {
            (self.shape, self.strides) = (shape.to_vec(), None);
        }
    }
}

/// Where the data of the storages is.
pub(super) enum StorageData<'a, 'r> {
    /// The data is in entries of an archive. The header of an entry is read when its storage is first used.
    Entries { reader: &'r mut dyn RangeReader, archive: &'a Archive },
    /// The data follows the pickles of a file. The map has the byte range of each storage by its key.
    Listed(HashMap<String, Range<u64>>),
}

/// The storages that tensors use.
pub(super) struct Storages<'a, 'r> {
    pub(super) values: &'a Values<'a>,
    data: StorageData<'a, 'r>,
    used: HashMap<String, (StorageType, Range<u64>)>,
    /// Length and CRC of each used storage that has a CRC, by the offset of its first byte.
    crcs: HashMap<u64, (u64, u32)>,
    /// Bytes of storages that were read, because the places of tensors depend on them.
    read: Vec<Range<u64>>,
}

impl<'a, 'r> Storages<'a, 'r> {
    pub(super) fn new(values: &'a Values<'a>, data: StorageData<'a, 'r>) -> Storages<'a, 'r> {
        Storages { values, data, used: HashMap::new(), crcs: HashMap::new(), read: Vec::new() }
    }

    /// The bytes of the file that affect only the elements of tensors, and not their description. These are all bytes
    /// of the unused storages, and the data of the used storages, except the bytes that `read` has read.
    pub(super) fn undescribed(mut self) -> Vec<Range<u64>> {
        let read = joined(std::mem::take(&mut self.read));
        let is_used = |key: &str| self.used.contains_key(key);
        let mut all = match &self.data {
            StorageData::Entries { archive, .. } => {
                archive.spans_of_others(|name| name.strip_prefix(STORAGES).is_none_or(is_used))
            }
            StorageData::Listed(ranges) => {
                let others = ranges.iter().filter(|(key, _)| !is_used(key));
                others.map(|(_, range)| range.clone()).collect()
            }
        };
        let data = self.used.into_values().map(|(_, range)| range);
        all.extend(data.flat_map(|data| without(data, &read)));
        all
    }

    /// The CRC of a tensor that fills a whole storage, 0 if there is no such CRC.
    pub(super) fn crc_of(&self, place: &TensorPlace) -> u32 {
        let len = place.dtype.bits_of(&place.shape).map(|bits| bits / 8);
        let known = self.crcs.get(&place.start).filter(|_| place.strides.is_none());
        known.filter(|(own, _)| Some(*own) == len).map_or(0, |(_, crc)| *crc)
    }

    /// Fills `buf` with the bytes of the file from `start` on, and records the range as read.
    pub(super) fn read(&mut self, start: u64, buf: &mut [u8]) -> ReadResult<()> {
        match &mut self.data {
            StorageData::Entries { reader, .. } => {
                reader.read_exact_at(start, buf)?;
                self.read.push(start..start + buf.len() as u64);
                Ok(())
            }
            StorageData::Listed(_) => Err(ErrorKind::HeaderDecode
                .stop("is a part of a tensor in a file of torch before 1.6, which had none")),
        }
    }

    /// Number of parts of the persistent id of a storage.
    fn id_len(&self) -> usize {
        match self.data {
            StorageData::Entries { .. } => ENTRY_ID_LEN,
            StorageData::Listed(_) => LISTED_ID_LEN,
        }
    }

    fn get(&mut self, id: StorageId<'_>) -> ReadResult<Range<u64>> {
        let StorageId { key, kind, numel } = id;
        if let Some((known, range)) = self.used.get(key) {
            if *known != kind || id.data_len() != Some(range.end - range.start) {
                return Err(ErrorKind::HeaderDecode
                    .stop(format!("the storage {} has two types", quoted(key))));
            }
            return Ok(range.clone());
        }
        let range = match &mut self.data {
            StorageData::Listed(ranges) => ranges.get(key).cloned(),
            StorageData::Entries { reader, archive } => {
                if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
                    let message =
                        format!("its storage is called {}, which is no number", quoted(key));
                    return Err(ErrorKind::HeaderDecode.stop(message));
                }
                let entry = format!("{STORAGES}{key}");
                let range = archive.data(*reader, &entry)?;
                if let (Some(range), Some(crc)) = (&range, archive.crc_of(&entry)) {
                    self.crcs.insert(range.start, (range.end - range.start, crc));
                }
                range
            }
        };
        let Some(range) = range else {
            return Err(ErrorKind::TensorMissing
                .stop(format!("its data, the storage {}, is missing from the file", quoted(key))));
        };
        let len = range.end - range.start;
        if id.data_len() != Some(len) {
            return Err(ErrorKind::SizeMismatch.stop(format!(
                "its storage has {numel} elements of {} bytes, its data has {len} bytes",
                kind.item_len()
            )));
        }
        self.used.insert(key.to_owned(), (kind, range.clone()));
        Ok(range)
    }
}

/// The ranges in ascending order. Ranges that touch or overlap are joined.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => joined.push(range),
        }
    }
    joined
}

/// The parts of `range` that are in none of `others`, which ascend and do not overlap.
fn without(range: Range<u64>, others: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut rest = Vec::new();
    let mut at = range.start;
    let first = others.partition_point(|other| other.end <= range.start);
    for other in others[first..].iter().take_while(|other| other.start < range.end) {
        if other.start > at {
            rest.push(at..other.start);
        }
        at = other.end;
    }
    if at < range.end {
        rest.push(at..range.end);
    }
    rest
}

/// The call that makes a tensor. Function and arguments are numbers of values.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorCall {
    rebuild: Rebuild,
    function: NodeId,
    args: NodeId,
    is_changed: bool,
    /// Whether a state in the call says that DeepSpeed ZeRO-3 manages the tensor.
    is_of_zero: bool,
}

/// The call that makes the tensor `id`. `None` if the value `id` is not a tensor.
pub(super) fn tensor_call(values: &Values<'_>, id: NodeId) -> Option<TensorCall> {
    let (function, args) = values.call(id)?;
    let (module, name) = values.global(function)?;
    let rebuild = Rebuild::of(module, name)?;
    let is_changed = values.parts(id).next().is_some();
    Some(TensorCall { rebuild, function, args, is_changed, is_of_zero: false })
}

/// Function, class, arguments and state of the tensor `id`, if its call has a class as an argument.
pub(super) fn typed_call(values: &Values<'_>, id: NodeId) -> Option<[NodeId; 4]> {
    let call = tensor_call(values, id)?;
    let is_typed = call.rebuild == Rebuild::FromType && !call.is_changed;
    values.array::<4>(call.args).filter(|_| is_typed)
}

impl TensorCall {
    /// The place of a tensor, which is refused if its elements do not follow each other.
    pub(super) fn run(self, storages: &mut Storages<'_, '_>) -> ReadResult<TensorPlace> {
        let place = self.place(storages)?;
        match &place.strides {
            None => Ok(place),
            Some(strides) => Err(ErrorKind::HeaderDecode.stop(format!(
                "has the strides {strides:?} for the shape {:?}, which it may not have; save \
                 `tensor.contiguous()`",
                place.shape
            ))),
        }
    }

    /// The place of the tensor.
    pub(super) fn place(mut self, storages: &mut Storages<'_, '_>) -> ReadResult<TensorPlace> {
        let values = storages.values;
        for _ in 0..WRAPS_MAX {
            if self.is_changed {
                return Err(ErrorKind::HeaderDecode.stop("its pickle changes it after it is made"));
            }
            match self.rebuild {
                Rebuild::Tensor | Rebuild::TensorOfDtype => {
                    let tensor = self.stored(storages)?;
                    let is_placeholder = self.is_of_zero && tensor.shape.contains(&0);
                    return Ok(TensorPlace { is_placeholder, ..tensor });
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
        Err(ErrorKind::HeaderDecode.stop("is made by too many calls"))
    }

    fn unread(&self, values: &Values<'_>) -> Fault {
        wrong(format!(
            "is made by {}, which tensorfs does not read; make it an ordinary tensor and save it \
             again",
            values.global_name(self.function)
        ))
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
            return Err(wrong(format!(
                "is of the class {}, which tensorfs does not read; make it an ordinary tensor and \
                 save it again",
                values.global_name(kind)
            )));
        }
        let named = values.global(function);
        let rebuild = named
            .and_then(|(module, name)| Rebuild::of(module, name))
            .ok_or_else(|| self.unread(values))?;
        if !matches!(values.node(args), Node::Tuple(_)) {
            return Err(self.unread(values));
        }
        let is_of_zero = self.is_of_zero || has_zero_id(values, state);
        Ok(TensorCall { rebuild, function, args, is_changed: false, is_of_zero })
    }

    /// The place of a tensor in its storage.
    fn stored(&self, storages: &mut Storages<'_, '_>) -> ReadResult<TensorPlace> {
        let values = storages.values;
        let args: Vec<NodeId> = values.tuple(self.args).into_iter().flatten().take(10).collect();
        let of_dtype = self.rebuild == Rebuild::TensorOfDtype;
        let (dtype_at, metadata_at) = if of_dtype { (Some(6), 7) } else { (None, 6) };
        let shape = |at: usize| args.get(at).and_then(|&id| numbers(values, id));
        let offset = args.get(1).and_then(|&id| values.int(id));
        if args.iter().skip(2).take(2).any(|&id| has_many_dims(values, id)) {
            return Err(ErrorKind::HeaderDecode.stop(format!(
                "has more than {DIMS_MAX} dimensions, which tensorfs does not read; save it with fewer, \
                 as `tensor.flatten()` has"
            )));
        }
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
            return Err(ErrorKind::HeaderDecode.stop(message));
        }
        let id = storage_id(values, storage, storages.id_len())?;
        let data = storages.get(id)?;
        let found = match (id.kind, dtype_at.map(|at| args.get(at).copied())) {
            (StorageType::Typed(dtype), None) => Some(dtype),
            (StorageType::Untyped, Some(Some(id))) => {
                let named = values.global(id);
                let found = named.and_then(|(module, name)| dtype(module, name));
                if found.is_none() {
                    return Err(ErrorKind::UnknownDtype.stop(format!(
                        "has the dtype {}, which safetensors does not have",
                        values.global_name(id)
                    )));
                }
                found
            }
            _ => None,
        };
        let dtype = found.ok_or_else(|| self.unread(values))?;
        Ok(place_of(data, dtype, offset, &[sizes, strides])?)
    }
}

/// Whether the state of a tensor says that DeepSpeed ZeRO-3 manages the tensor.
fn has_zero_id(values: &Values<'_>, state: NodeId) -> bool {
    use super::values::Part;
    let is_mark = |part| matches!(part, Part::Pair(key, _) if values.text(key) == Some("ds_id"));
    values.parts(state).any(is_mark)
}

/// The tuple inside a `torch.Size`. Otherwise `id` itself.
pub(super) fn plain_tuple(values: &Values<'_>, id: NodeId) -> NodeId {
    let size =
        values.call(id).filter(|(class, _)| values.global(*class) == Some(("torch", "Size")));
    size.and_then(|(_, args)| values.array::<1>(args)).map_or(id, |[inner]| inner)
}

/// Whether `id` is a shape, or strides, with more than `DIMS_MAX` dimensions.
fn has_many_dims(values: &Values<'_>, id: NodeId) -> bool {
    let tuple = values.tuple(plain_tuple(values, id));
    tuple.is_some_and(|items| items.take(DIMS_MAX + 1).count() > DIMS_MAX)
}

/// The integers of a tuple.
pub(super) fn numbers(values: &Values<'_>, id: NodeId) -> Option<Vec<i64>> {
    let mut all = Vec::new();
    for item in values.tuple(plain_tuple(values, id))? {
        if all.len() == DIMS_MAX {
            return None;
        }
        all.push(values.int(item)?);
    }
    Some(all)
}

/// The storage that the persistent id `id` describes. The persistent id has to have `len` parts.
pub(super) fn storage_id<'v>(
    values: &Values<'v>,
    id: NodeId,
    len: usize,
) -> Result<StorageId<'v>, Fault> {
    let Node::Persistent(key) = values.node(id) else {
        return Err(wrong("has no storage"));
    };
    let unknown = || wrong("has a storage of an unknown form");
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
        return Err(ErrorKind::UnknownDtype.fault(format!(
            "has a storage {}, whose elements safetensors does not have",
            values.global_name(*class)
        )));
    };
    match (values.text(*key), values.natural(*numel), values.text(*location)) {
        (Some(key), Some(numel), Some(_)) => Ok(StorageId { key, kind, numel }),
        _ => Err(unknown()),
    }
}

/// The place of a tensor with these sizes and strides. Its first element is item `offset` of
/// `data`, and `data` has to contain the whole tensor.
fn place_of(
    data: Range<u64>,
    dtype: Dtype,
    offset: i64,
    [sizes, strides]: &[Vec<i64>; 2],
) -> Result<TensorPlace, Fault> {
    if sizes.len() != strides.len() {
        return Err(wrong(format!("has {} sizes and {} strides", sizes.len(), strides.len())));
    }
    let natural = |numbers: &[i64]| -> Option<Vec<u64>> {
        numbers.iter().map(|&number| u64::try_from(number).ok()).collect()
    };
    let (Some(mut shape), Some(strides), Ok(offset)) =
        (natural(sizes), natural(strides), u64::try_from(offset))
    else {
        return Err(wrong("has a negative size, stride or offset"));
    };
    // Two F4 elements are one item of the storage.
    let item_len = if dtype == Dtype::F4 { 1 } else { dtype.bits() / 8 };
    let items = (data.end - data.start) / item_len;
    let count = shape
        .iter()
        .try_fold(1_u64, |count, &size| count.checked_mul(size))
        .ok_or_else(overflow)?;
    let reach = reach(&shape, &strides).ok_or_else(overflow)?;
    let end = u128::from(offset) + u128::from(reach);
    if count > 0 && end > u128::from(items) {
        let message = format!("ends at item {end} of its storage, which has {items}");
        return Err(ErrorKind::DataTruncated.fault(message));
    }
    let is_run = is_row_major(&shape, &strides);
    if !is_run {
        check_strides(dtype, &shape, &strides)?;
    }
    if dtype == Dtype::F4 {
        let last = shape.last_mut().ok_or_else(|| wrong("is packed and has no dimension"))?;
        *last = last.checked_mul(2).ok_or_else(overflow)?;
    }
    let bits = dtype.bits_of(&shape).ok_or_else(overflow)?;
    if !is_run && bits / 8 > EXPANDED_LEN_MAX.max(data.end - data.start) {
        return Err(wrong(format!(
            "has {} bytes by repeating what its storage of {} bytes holds, tensorfs reads up to \
             {EXPANDED_LEN_MAX}; save what it repeats",
            bits / 8,
            data.end - data.start
        )));
    }
    // A tensor without elements may have any offset, so the offset is ignored.
    let start = data.start + if count > 0 { offset * item_len } else { 0 };
    // In a dimension of size 1 the stride has no meaning.
    let steps = shape.iter().zip(strides).map(|(&size, step)| if size > 1 { step } else { 0 });
    let strides = (!is_run).then(|| steps.collect());
    Ok(TensorPlace { dtype, shape, start, strides, is_placeholder: false })
}

/// Refuses strides with which elements overlap. A dimension with the stride 0, which repeats its
/// elements, is accepted.
fn check_strides(dtype: Dtype, shape: &[u64], strides: &[u64]) -> Result<(), Fault> {
    if dtype != Dtype::F4 && are_nested(shape, strides) {
        return Ok(());
    }
    let why = match dtype {
        Dtype::F4 => "and two of its elements share a byte",
        _ => "by which parts of it overlap",
    };
    Err(wrong(format!(
        "has the strides {strides:?} for the shape {shape:?}, {why}; save `tensor.contiguous()`"
    )))
}

fn overflow() -> Fault {
    ErrorKind::Overflow.fault("has 2^64 elements or more")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_were_read_are_cut_out_of_the_data_of_storages() {
        let read = joined(vec![30..40, 10..20, 15..18, 20..22, 90..99]);
        assert_eq!(read, [10..22, 30..40, 90..99]);
        for (data, rest) in [
            (0..50, vec![0..10, 22..30, 40..50]),
            (12..95, vec![22..30, 40..90]),
            (30..40, vec![]),
            (50..50, vec![]),
        ] {
            assert_eq!(without(data.clone(), &read), rest, "{data:?}");
        }
    }

    fn place(dtype: Dtype, sizes: &[i64], strides: &[i64]) -> Result<TensorPlace, Fault> {
        place_of(100..1100, dtype, 3, &[sizes.to_vec(), strides.to_vec()])
    }

    #[test]
    fn strides_are_kept_unless_the_elements_follow_each_other() {
        for (sizes, strides, kept) in [
            (&[4, 3][..], &[3, 1][..], false),
            (&[4, 3], &[1, 4], true),
            (&[4, 3], &[8, 2], true),
            (&[4, 1], &[1, 7], false),
            (&[1, 3, 1, 4], &[7, 4, 9, 1], false),
            (&[3, 4], &[0, 1], true),
            (&[1000, 1000], &[0, 0], true),
            (&[1, 4], &[0, 1], false),
            (&[], &[], false),
            (&[0, 4], &[1, 9], false),
        ] {
            let found = place(Dtype::U8, sizes, strides).unwrap();
            let right = strides.iter().map(|&stride| stride as u64).collect();
            assert_eq!(found.strides, kept.then_some(right), "{sizes:?} {strides:?}");
            assert_eq!(found.start, if sizes.contains(&0) { 100 } else { 103 });
        }
    }

    #[test]
    fn strides_by_which_elements_overlap_or_pass_the_storage_are_refused() {
        for (sizes, strides, hint) in [
            (&[4, 3][..], &[1, 1][..], "overlap"),
            (&[2, 3], &[3, 2], "overlap"),
            (&[2, 400], &[399, 1], "overlap"),
            (&[2, 500], &[500, 1], "ends at item 1003"),
            (&[2, 2], &[i64::MAX, i64::MAX], "ends at item"),
            (&[2, i64::MAX], &[1, 2], "ends at item"),
            (&[1 << 40, 1], &[0, 0], "repeating"),
            (&[2, 2], &[-1, 1], "negative"),
        ] {
            let fault = place(Dtype::U8, sizes, strides).unwrap_err();
            assert!(fault.message.contains(hint), "{fault}");
        }
        let fault = place(Dtype::F4, &[4, 3], &[1, 4]).unwrap_err();
        assert!(fault.message.contains("share a byte"), "{fault}");
    }
}
