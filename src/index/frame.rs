//! The frame around the content of the files in this module: magic, version, length and checksum.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..8 | magic, by kind of file |
//! | 8..12 | version of the content, u32 little-endian |
//! | 12..16 | zero |
//! | 16..24 | length of the content, u64 little-endian |
//! | 24..40 | XXH3 with 128 bits, big-endian, of bytes 0..24 and the content |
//! | 40.. | the content: bincode 2, standard configuration |

use std::borrow::Cow;

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use bincode::de::BorrowDecoder;
use bincode::de::read::Reader;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{BorrowDecode, Encode};

use crate::hash::{Digest, Hasher};

/// Length of the frame in bytes. The content follows it.
const FRAME_LEN: usize = 40;

/// Maximum length of a content that is written or read, in bytes.
const CONTENT_LEN_MAX: usize = 1 << 30;

/// Maximum length of a file in bytes.
pub(super) const FILE_LEN_MAX: u64 = (FRAME_LEN + CONTENT_LEN_MAX) as u64;

/// Maximum memory of the decoded content in bytes, according to the count of bincode.
const MEMORY_MAX: usize = 2 << 30;

/// Largest number that bincode encodes as one byte.
const SINGLE_BYTE_MAX: u8 = 250;

/// Maximum size in bytes of an item for which a list reserves memory before it is decoded.
const RESERVED_ITEM_MAX: usize = 32;

const CONFIG: Configuration<LittleEndian, Varint, Limit<MEMORY_MAX>> =
    bincode::config::standard().with_limit::<MEMORY_MAX>();

/// A kind of file: its magic and its version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileKind {
    pub(crate) magic: &'static [u8; 8],
    pub(crate) version: u32,
}

/// Encodes a file of `kind` with this content. `None` if the content cannot be encoded or is too
/// long.
pub(crate) fn wrap(kind: FileKind, content: impl Encode) -> Option<Vec<u8>> {
    let mut bytes = vec![0; FRAME_LEN];
    bincode::encode_into_std_write(content, &mut bytes, CONFIG).ok()?;
    let len = bytes.len() - FRAME_LEN;
    if len > CONTENT_LEN_MAX {
        return None;
    }
    bytes[..8].copy_from_slice(kind.magic);
    bytes[8..12].copy_from_slice(&kind.version.to_le_bytes());
    bytes[16..24].copy_from_slice(&(len as u64).to_le_bytes());
    let sum = checksum(&bytes);
    bytes[24..FRAME_LEN].copy_from_slice(&sum.0);
    Some(bytes)
}

/// Decodes the content of a file of `kind`. The error is the reason why the file is invalid.
pub(crate) fn unwrap<'a, T>(kind: FileKind, bytes: &'a [u8]) -> Result<T, &'static str>
where
    T: BorrowDecode<'a, ()>,
{
    if bytes.len() < FRAME_LEN || bytes[..8] != *kind.magic {
        return Err("has another magic number");
    }
    if bytes[8..12] != kind.version.to_le_bytes() {
        return Err("was written by another version");
    }
    let len = (bytes.len() - FRAME_LEN) as u64;
    if bytes[12..16] != [0; 4] || bytes[16..24] != len.to_le_bytes() {
        return Err("has another length than its frame says");
    }
    if bytes[24..FRAME_LEN] != checksum(bytes).0 {
        return Err("does not match its checksum");
    }
    content(&bytes[FRAME_LEN..])
}

/// Splits `bytes` into the first of several files that follow each other, and the rest. `None` if they do not begin
/// with a complete file.
pub(crate) fn split_first(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let len = u64::from_le_bytes(bytes.get(16..24)?.try_into().ok()?);
    bytes.split_at_checked(FRAME_LEN.checked_add(usize::try_from(len).ok()?)?)
}

/// The checksum in the frame of `bytes`. `None` if `bytes` is shorter than a frame.
pub(crate) fn recorded_checksum(bytes: &[u8]) -> Option<Digest> {
    Some(Digest(bytes.get(24..FRAME_LEN)?.try_into().ok()?))
}

/// Decodes content without a frame. The content may be any bytes.
pub(crate) fn content<'a, T: BorrowDecode<'a, ()>>(bytes: &'a [u8]) -> Result<T, &'static str> {
    match bincode::borrow_decode_from_slice(bytes, CONFIG) {
        Ok((content, read)) if read == bytes.len() => Ok(content),
        _ => Err("cannot be decoded"),
    }
}

fn checksum(bytes: &[u8]) -> Digest {
    let mut hasher = Hasher::new();
    hasher.update(&bytes[..24]);
    hasher.update(&bytes[FRAME_LEN..]);
    hasher.finish()
}

/// A list that bincode encodes like a `Vec`. Decoding it reserves no memory for more items than the
/// remaining bytes can have.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

impl<T> std::ops::Deref for List<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T> FromIterator<T> for List<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> List<T> {
        List(items.into_iter().collect())
    }
}

impl<T: Encode> Encode for List<T> {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.0.encode(encoder)
    }
}

impl<'a, C, T: BorrowDecode<'a, C>> BorrowDecode<'a, C> for List<T> {
    fn borrow_decode<D>(decoder: &mut D) -> Result<List<T>, DecodeError>
    where
        D: BorrowDecoder<'a, Context = C>,
    {
        let len = usize::borrow_decode(decoder)?;
        // Every item takes at least one byte.
        if decoder.reader().peek_read(len).is_none() {
            return Err(DecodeError::UnexpectedEnd { additional: len });
        }
        let small = size_of::<T>() <= RESERVED_ITEM_MAX;
        let mut items = Vec::with_capacity(if small { len } else { 0 });
        for _ in 0..len {
            items.push(T::borrow_decode(decoder)?);
        }
        Ok(List(items))
    }
}

/// Numbers in a byte string, each in the encoding of bincode. They are decoded when they are read,
/// and need no memory of their own.
#[derive(BorrowDecode, Encode)]
pub(super) struct Numbers<'a>(Cow<'a, [u8]>);

impl<'a> Numbers<'a> {
    /// A reader that begins at the first number.
    pub(super) fn reader(&self) -> NumberReader<'_> {
        NumberReader(&self.0)
    }

    /// Whether there are no numbers.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the string is long enough for `count` numbers. Each number has at least one byte.
    pub(super) fn may_be(&self, count: u64) -> bool {
        count <= self.0.len() as u64
    }
}

impl FromIterator<u64> for Numbers<'_> {
    fn from_iter<I: IntoIterator<Item = u64>>(numbers: I) -> Self {
        let mut bytes = Vec::new();
        for number in numbers {
            // Every number can be encoded, and writing to a `Vec` cannot fail.
            let _ = bincode::encode_into_std_write(number, &mut bytes, CONFIG);
        }
        Numbers(bytes.into())
    }
}

/// Reads numbers one after another.
pub(super) struct NumberReader<'a>(&'a [u8]);

impl NumberReader<'_> {
    /// The next number. `None` at the end, or if only a part of a number is left.
    #[inline]
    pub(super) fn next(&mut self) -> Option<u64> {
        match self.0.split_first() {
            Some((&byte, rest)) if byte <= SINGLE_BYTE_MAX => {
                self.0 = rest;
                Some(u64::from(byte))
            }
            _ => self.next_long(),
        }
    }

    fn next_long(&mut self) -> Option<u64> {
        let (number, len) = bincode::decode_from_slice(self.0, CONFIG).ok()?;
        self.0 = &self.0[len..];
        Some(number)
    }

    /// The next number, if it fits into 32 bits.
    #[inline]
    pub(super) fn next_u32(&mut self) -> Option<u32> {
        self.next()?.try_into().ok()
    }

    /// Whether all numbers were read.
    pub(super) fn is_done(&self) -> bool {
        self.0.is_empty()
    }
}
