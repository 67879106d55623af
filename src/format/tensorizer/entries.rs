//! The area of entries: name, kind, dtype, shape and place of each tensor.

use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, quoted};

use super::fields::Fields;
use super::names::{TensorName, check_distinct};
use super::{FileHead, HEAD_LEN};

/// Valid kinds of tensors: parameter, buffer, and value of a state dict.
const KINDS: std::ops::RangeInclusive<u8> = 0..=2;

/// The kind of a value of a state dict. Only such a value may have a path as its name.
pub(super) const STATE_DICT: u8 = 2;

/// Version of an entry with dimensions of 32 bits, and version of an entry with dimensions of 64
/// bits.
pub(super) const SHORT: u32 = 1;
pub(super) const LONG: u32 = 5;

/// Minimum length of an entry in bytes: a name and a dtype of one byte each, no dimensions, and
/// three places.
const ENTRY_LEN_MIN: u64 = 31;

/// Element types by the type codes of numpy.
pub(super) const DTYPES: [(&str, Dtype); 13] = [
    ("|b1", Dtype::Bool),
    ("|u1", Dtype::U8),
    ("|i1", Dtype::I8),
    ("<u2", Dtype::U16),
    ("<i2", Dtype::I16),
    ("<f2", Dtype::F16),
    ("<u4", Dtype::U32),
    ("<i4", Dtype::I32),
    ("<f4", Dtype::F32),
    ("<c8", Dtype::C64),
    ("<u8", Dtype::U64),
    ("<i8", Dtype::I64),
    ("<f8", Dtype::F64),
];

/// Number of F4 values in one element of torch's packed type.
pub(super) const F4_PACKED: u64 = 2;

/// The entry of a tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ListedTensor<'a> {
    pub(super) name: TensorName,
    /// The bytes of its name in the file.
    pub(super) stored_name: &'a [u8],
    pub(super) kind: u8,
    pub(super) dtype: &'a [u8],
    pub(super) shape: Vec<u64>,
    /// Whether its dimensions have 64 bits, in the entry and in its header.
    pub(super) is_long: bool,
    pub(super) header_start: u64,
    pub(super) data_start: u64,
    pub(super) data_len: u64,
}

/// Decodes the entries of a file, in the order in which they are stored.
pub(super) fn decode<'a>(area: &'a [u8], head: &FileHead) -> Result<Vec<ListedTensor<'a>>, Fault> {
    if head.count > head.entries_len / ENTRY_LEN_MIN {
        return Err(ErrorKind::HeaderDecode.fault(format!(
            "lists {} tensors in {} bytes, an entry takes at least {ENTRY_LEN_MIN}; \
             save the checkpoint again",
            head.count, head.entries_len
        )));
    }
    let mut fields = Fields::new(area, HEAD_LEN);
    let mut entries = Vec::new();
    for _ in 0..head.count {
        entries.push(entry(&mut fields, head.versioned)?);
    }
    check_distinct(entries.iter().map(|entry| &entry.name))?;
    Ok(entries)
}

fn entry<'a>(fields: &mut Fields<'a>, versioned: bool) -> Result<ListedTensor<'a>, Fault> {
    let version = if versioned { fields.u32("the version of an entry")? } else { SHORT };
    if version != SHORT && version != LONG {
        return Err(fields.bad(&format!("an entry has the version {version}, 1 or 5 expected")));
    }
    let stored_name = fields.bytes_16("the name of a tensor")?;
    let name = TensorName::decode(stored_name)?;
    let mut entry =
        ListedTensor { name, stored_name, is_long: version == LONG, ..ListedTensor::default() };
    match details(fields, &mut entry) {
        Ok(()) => Ok(entry),
        Err(fault) => Err(fault.tensor(&entry.name.joined)),
    }
}

/// Decodes the fields that follow the name.
fn details<'a>(fields: &mut Fields<'a>, entry: &mut ListedTensor<'a>) -> Result<(), Fault> {
    entry.kind = fields.u8("the type of a tensor")?;
    if !KINDS.contains(&entry.kind) {
        let message = format!("the type of a tensor is {}, 0 to 2 expected", entry.kind);
        return Err(fields.bad(&message));
    }
    if entry.name.is_path() && entry.kind != STATE_DICT {
        let message = format!("its name is a path, so its type is 2, not {}", entry.kind);
        return Err(fields.bad(&message));
    }
    entry.dtype = fields.bytes_8("a dtype")?;
    entry.shape = fields.shape(entry.is_long)?;
    entry.header_start = fields.u64("the start of a header")?;
    entry.data_start = fields.u64("the start of data")?;
    entry.data_len = fields.u64("the length of data")?;
    Ok(())
}

/// The element type and the shape that a tensor has in other formats.
pub(super) fn element_type(entry: &ListedTensor<'_>) -> Result<(Dtype, Vec<u64>), Fault> {
    let ListedTensor { dtype: code, shape, .. } = entry;
    let unknown = |why: &str| {
        let text = quoted(&String::from_utf8_lossy(code));
        let message = format!("dtype {text} {why}; save the tensor in another type");
        ErrorKind::UnknownDtype.fault(message)
    };
    let text = std::str::from_utf8(code).map_err(|_| unknown("is no text"))?;
    let Some((storage, name)) = text.split_once('\0') else {
        let known = DTYPES.iter().find(|(known, _)| *known == text);
        let (_, dtype) = known.ok_or_else(|| unknown("is none of safetensors"))?;
        return Ok((*dtype, shape.clone()));
    };
    // Types that numpy has must be stored with the codes of numpy.
    let dtype = name
        .strip_prefix("torch.")
        .and_then(Dtype::from_torch)
        .filter(|dtype| !DTYPES.iter().any(|(_, known)| known == dtype))
        .ok_or_else(|| unknown("is none of safetensors"))?;
    let packed = if dtype == Dtype::F4 { F4_PACKED } else { 1 };
    let width = dtype.bits() * packed / 8;
    if storage != format!("<V{width}") && storage != format!("|V{width}") {
        return Err(unknown(&format!("has another width than the {width} bytes of {dtype}")));
    }
    let mut shape = shape.clone();
    if packed > 1 {
        let Some(last) = shape.last_mut() else {
            let message = "is one element of 4 bits, no whole bytes; save it in another type";
            return Err(ErrorKind::Misaligned.fault(message));
        };
        *last = last.checked_mul(packed).ok_or_else(|| {
            ErrorKind::Overflow.fault(format!(
                "the dimension {last} times 2 passes 2^64; save the checkpoint again"
            ))
        })?;
    }
    Ok((dtype, shape))
}
