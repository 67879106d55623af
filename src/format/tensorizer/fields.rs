//! Reads the fields of entries and of tensor headers.

use crate::error::{ErrorKind, Fault};

/// Reads fields one after another, and never past their end.
pub(super) struct Fields<'a> {
    bytes: &'a [u8],
    /// Number of bytes read so far.
    read: usize,
    /// Offset in the file of the first byte of the fields.
    start: u64,
}

impl<'a> Fields<'a> {
    pub(super) fn new(bytes: &'a [u8], start: u64) -> Fields<'a> {
        Fields { bytes, read: 0, start }
    }

    /// Offset in the file of the next field.
    pub(super) fn offset(&self) -> u64 {
        self.start + self.read as u64
    }

    /// Number of bytes that are not read yet.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.read
    }

    /// A fault with the offset of the current field.
    pub(super) fn bad(&self, what: &str) -> Fault {
        let offset = self.offset();
        ErrorKind::HeaderDecode.fault(format!(
            "not a tensorizer file: before byte {offset}: {what}; save the checkpoint again"
        ))
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

    /// Bytes that follow their length, which has 8 bits.
    pub(super) fn bytes_8(&mut self, what: &str) -> Result<&'a [u8], Fault> {
        let len = self.u8(what)?;
        self.take(len.into(), what)
    }

    /// Bytes that follow their length, which has 16 bits.
    pub(super) fn bytes_16(&mut self, what: &str) -> Result<&'a [u8], Fault> {
        let len = self.u16(what)?;
        self.take(len.into(), what)
    }

    /// A reader for the fields in a section. The section follows its length, which has 64 bits.
    pub(super) fn section_64(&mut self, what: &str) -> Result<Fields<'a>, Fault> {
        // A length that does not fit into `usize` is larger than the rest, so `take` refuses it.
        let len = usize::try_from(self.u64(what)?).unwrap_or(usize::MAX);
        let start = self.offset();
        self.take(len, what).map(|bytes| Fields::new(bytes, start))
    }

    /// Refuses bytes after the last field.
    pub(super) fn end(&self, what: &str) -> Result<(), Fault> {
        match self.left() {
            0 => Ok(()),
            left => Err(self.bad(&format!("{left} bytes follow the last field of {what}"))),
        }
    }

    /// A shape. Its dimensions have 64 bits if `is_long` is set, else 32 bits.
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
