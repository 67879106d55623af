//! Parses the header of a tensor, and compares it with the entry of the tensor.

use std::ops::Range;

use crate::error::{ErrorKind, Fault};

use super::crypt::Encryption;
use super::entries::ListedTensor;
use super::fields::Fields;
use super::{HashKind, KeptHashes};

/// Minimum length of the header of a tensor in bytes: its length, module, kind, a name and a dtype
/// of one byte each, no dimensions, no hashes, and the length of the data.
pub(super) const TENSOR_HEADER_LEN_MIN: u64 = 8 + 2 + 1 + 3 + 2 + 1 + 3 + DATA_LEN_LEN;

/// Length in bytes of the last field of a header, which has the length of the data.
const DATA_LEN_LEN: u64 = 8;

/// The fields of a header that the entry does not have.
pub(super) struct HeaderExtras {
    pub(super) hashes: KeptHashes,
    pub(super) encryption: Option<Encryption>,
    /// The bytes of the file that describe the encryption of the tensor.
    pub(super) encryption_bytes: Range<u64>,
}

/// Compares the header of a tensor with its entry, and returns the other fields. `encrypted` says whether the file is
/// encrypted.
pub(super) fn compare(
    entry: &ListedTensor<'_>,
    header: &[u8],
    encrypted: bool,
) -> Result<HeaderExtras, Fault> {
    let mut fields = Fields::new(header, entry.header_start);
    let len = fields.u64("the length of a header")?;
    if len != header.len() as u64 {
        return Err(ErrorKind::HeaderDecode.fault(format!(
            "its header says that it has {len} bytes, {} are between its start and its data; \
             save the checkpoint again",
            header.len()
        )));
    }
    fields.u16("the number of a module")?;
    let differs = |what: &str, found: &str, expected: &str| {
        Err(ErrorKind::HeaderDecode.fault(format!(
            "its header has the {what} {found}, the list of tensors has {expected}, so the file \
             can be read in two ways; save the checkpoint again"
        )))
    };
    let text = |bytes: &[u8]| crate::error::quoted(&String::from_utf8_lossy(bytes));
    let kind = fields.u8("the type of a tensor")?;
    if kind != entry.kind {
        return differs("type", &kind.to_string(), &entry.kind.to_string());
    }
    let name = fields.bytes_16("the name of a tensor")?;
    if name != entry.stored_name {
        return differs("name", &text(name), &text(entry.stored_name));
    }
    let dtype = fields.bytes_8("a dtype")?;
    if dtype != entry.dtype {
        return differs("dtype", &text(dtype), &text(entry.dtype));
    }
    let shape = fields.shape(entry.is_long)?;
    if shape != entry.shape {
        return differs("shape", &format!("{shape:?}"), &format!("{:?}", entry.shape));
    }
    let hashes = hashes_of(&mut fields)?;
    let encryption_start = fields.offset();
    let encryption = if encrypted { Encryption::read(&mut fields, entry.data_len)? } else { None };
    let encryption_bytes = encryption_start..fields.offset();
    let data_len = fields.u64("the length of the data")?;
    if data_len != entry.data_len {
        // Negative lengths are reserved by the format.
        let found = data_len.cast_signed().to_string();
        return differs("data length", &found, &entry.data_len.to_string());
    }
    if fields.left() > 0 {
        return Err(fields.bad(&format!("{} bytes follow the last field", fields.left())));
    }
    Ok(HeaderExtras { hashes, encryption, encryption_bytes })
}

fn hashes_of(fields: &mut Fields<'_>) -> Result<KeptHashes, Fault> {
    let start = fields.offset() + 2;
    let section = fields.bytes_16("the hashes")?;
    let mut parts = Fields::new(section, start);
    let count = parts.u8("the number of hashes")?;
    let mut hashes = KeptHashes { start: parts.offset(), ..KeptHashes::default() };
    let mut kinds = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let code = parts.u8("the type of a hash")?;
        let value = parts.bytes_8("a hash")?;
        let (kind, is_same) = match (code, value.len()) {
            (0, 4) => (HashKind::Crc32, keep_one(&mut hashes.crc32, value)),
            (1, 32) => (HashKind::Sha256, keep_one(&mut hashes.sha256, value)),
            (_, len) => {
                let message = format!(
                    "a hash has the type {code} and {len} bytes, 0 with 4 or 1 with 32 expected"
                );
                return Err(parts.bad(&message));
            }
        };
        if !is_same {
            return Err(parts.bad(&format!("a second {} has another value", kind.name())));
        }
        kinds.push(kind);
    }
    if parts.left() > 0 {
        return Err(parts.bad(&format!("{} bytes follow the last hash", parts.left())));
    }
    hashes.kinds = kinds.into();
    Ok(hashes)
}

/// Keeps the first value of a kind of hash. Returns whether `value` equals the kept value.
fn keep_one<const N: usize>(kept: &mut Option<[u8; N]>, value: &[u8]) -> bool {
    let Ok(value) = value.try_into() else { return false };
    *kept.get_or_insert(value) == value
}
