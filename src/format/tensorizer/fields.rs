//! The fields of entries and of tensor headers, and the comparison of both.

use std::ops::Range;

use crate::error::{ErrorKind, Fault};

use super::crypt::Encryption;
use super::entries::ListedTensor;
use super::{HashKind, KeptHashes};

/// Shortest header of a tensor in bytes: its length, module, type, a name and a dtype of one byte
/// each, no dimensions, no hashes, the length of the data.
pub(super) const TENSOR_HEADER_LEN_MIN: u64 = 8 + 2 + 1 + 3 + 2 + 1 + 3 + DATA_LEN_LEN;

/// Bytes of the length of the data, the last field of a header.
const DATA_LEN_LEN: u64 = 8;

/// Reads fields one after another, never beyond their end.
pub(super) struct Fields<'a> {
    bytes: &'a [u8],
    /// Number of bytes read so far.
    read: usize,
    /// Offset of the first byte in the file.
    start: u64,
}

impl<'a> Fields<'a> {
    pub(super) fn new(bytes: &'a [u8], start: u64) -> Fields<'a> {
        Fields { bytes, read: 0, start }
    }

    /// A fault at the current place.
    pub(super) fn bad(&self, what: &str) -> Fault {
        let offset = self.start + self.read as u64;
        let message = format!(
            "not a tensorizer file: before byte {offset}: {what}; save the checkpoint again"
        );
        Fault::new(ErrorKind::HeaderDecode, message)
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], Fault> {
        let left = self.bytes.get(self.read..).unwrap_or_default();
        let Some(taken) = left.get(..len) else {
            return Err(self.bad(&format!(
                "{what} takes {len} bytes, {} of this header are left",
                left.len()
            )));
        };
        self.read += len;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        let bytes = self.take(N, what)?;
        Ok(std::array::from_fn(|index| bytes[index]))
    }

    pub(super) fn u8(&mut self, what: &str) -> Result<u8, Fault> {
        self.array(what).map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self, what: &str) -> Result<u16, Fault> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Bytes after their length in 8 bits.
    pub(super) fn bytes_8(&mut self, what: &str) -> Result<&'a [u8], Fault> {
        let len = self.u8(what)?;
        self.take(len.into(), what)
    }

    /// Bytes after their length in 16 bits.
    pub(super) fn bytes_16(&mut self, what: &str) -> Result<&'a [u8], Fault> {
        let len = self.u16(what)?;
        self.take(len.into(), what)
    }

    /// The fields in the bytes after their length in 64 bits.
    pub(super) fn section_64(&mut self, what: &str) -> Result<Fields<'a>, Fault> {
        let len = self.u64(what)?;
        // More than the memory of the machine is more than is left.
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let start = self.start + self.read as u64;
        self.take(len, what).map(|bytes| Fields::new(bytes, start))
    }

    /// Refuses bytes behind the last field.
    pub(super) fn end(&self, what: &str) -> Result<(), Fault> {
        match self.bytes.len() - self.read {
            0 => Ok(()),
            left => Err(self.bad(&format!("{left} bytes follow the last field of {what}"))),
        }
    }

    /// A shape with dimensions of 64 bits if `is_long`, or of 32.
    pub(super) fn shape(&mut self, is_long: bool) -> Result<Vec<u64>, Fault> {
        let what = "a dimension";
        let rank = self.u8("the number of dimensions")?;
        let mut shape = Vec::with_capacity(rank.into());
        for _ in 0..rank {
            shape.push(if is_long { self.u64(what)? } else { self.u32(what)?.into() });
        }
        Ok(shape)
    }
}

/// The fields of a header that its entry does not have.
pub(super) struct HeaderExtras {
    pub(super) hashes: KeptHashes,
    pub(super) encryption: Option<Encryption>,
    /// The bytes of the file that say how the tensor is encrypted.
    pub(super) encryption_bytes: Range<u64>,
}

/// Compares the header of a tensor with its entry, and returns the other fields. `encrypted`: the file
/// is.
pub(super) fn compare(
    entry: &ListedTensor<'_>,
    header: &[u8],
    encrypted: bool,
) -> Result<HeaderExtras, Fault> {
    let mut fields = Fields::new(header, entry.header_start);
    let len = fields.u64("the length of a header")?;
    if len != header.len() as u64 {
        let message = format!(
            "its header says that it has {len} bytes, {} are between its start and its data; \
             save the checkpoint again",
            header.len()
        );
        return Err(Fault::new(ErrorKind::HeaderDecode, message));
    }
    fields.u16("the number of a module")?;
    let differs = |what: &str, found: &str, expected: &str| {
        let message = format!(
            "its header has the {what} {found}, the list of tensors has {expected}, so the file \
             can be read in two ways; save the checkpoint again"
        );
        Err(Fault::new(ErrorKind::HeaderDecode, message))
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
    let encryption_start = fields.start + fields.read as u64;
    let encryption = if encrypted { Encryption::read(&mut fields, entry.data_len)? } else { None };
    let encryption_bytes = encryption_start..fields.start + fields.read as u64;
    let data_len = fields.u64("the length of the data")?;
    if data_len != entry.data_len {
        // Negative lengths are reserved.
        let found = data_len.cast_signed().to_string();
        return differs("data length", &found, &entry.data_len.to_string());
    }
    if fields.read != header.len() {
        let message = format!("{} bytes follow the last field", header.len() - fields.read);
        return Err(fields.bad(&message));
    }
    Ok(HeaderExtras { hashes, encryption, encryption_bytes })
}

fn hashes_of(fields: &mut Fields<'_>) -> Result<KeptHashes, Fault> {
    let start = fields.start + fields.read as u64 + 2;
    let section = fields.bytes_16("the hashes")?;
    let mut parts = Fields::new(section, start);
    let count = parts.u8("the number of hashes")?;
    let mut hashes = KeptHashes { start: start + parts.read as u64, ..KeptHashes::default() };
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
    if parts.read != section.len() {
        let message = format!("{} bytes follow the last hash", section.len() - parts.read);
        return Err(parts.bad(&message));
    }
    hashes.kinds = kinds.into();
    Ok(hashes)
}

/// Keeps the first value of a kind of hash. Returns whether `value` is equal to it.
fn keep_one<const N: usize>(kept: &mut Option<[u8; N]>, value: &[u8]) -> bool {
    let Ok(value) = value.try_into() else { return false };
    *kept.get_or_insert(value) == value
}
