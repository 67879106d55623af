//! The safetensors header: 8 bytes of length, then one JSON object. The data of all tensors follows
//! without gap or overlap.
//!
//! Accepts the same headers as the reference implementation (0.8), except those with duplicate
//! names. The specification of safetensors forbids duplicate names, and a file that has them can be
//! read in two ways.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufReader, Read};
use std::ops::Range;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};

use crate::dtype::{Dtype, TensorFacts, UNKNOWN_DTYPE};
use crate::error::{ErrorKind, Fault};
use crate::format::json::{UniqueMap, duplicate, kind_of};

/// Maximum length of a header, read or written, in bytes. It is the limit of the reference
/// implementation.
pub const HEADER_LEN_MAX: u64 = 100_000_000;

/// Length in bytes of the number in front of the header, which is the length of the header.
pub const PREFIX_LEN: u64 = 8;

/// Number of first bytes of a file that `header_len` needs.
pub const SNIFF_LEN: usize = PREFIX_LEN as usize;

/// Headers up to this length in bytes are parsed from memory. Longer headers are parsed as a
/// stream, so that a huge header that is refused does not need memory of its size.
pub const SLICE_LEN_MAX: u64 = 8 << 20;

/// Key of the metadata object in the header.
pub const METADATA: &str = "__metadata__";

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name, which may be any string.
    pub name: String,
    /// Its facts, such as its element type.
    pub facts: TensorFacts,
    /// Extent of each dimension, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Range of its bytes, relative to the end of the header.
    pub data_offsets: Range<u64>,
}

/// A valid header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The metadata of the file, which are strings by name. `None` if the file has no metadata.
    pub metadata: Option<BTreeMap<String, String>>,
    /// Tensors in data order: each begins at the end of the previous one.
    pub tensors: Vec<Entry>,
    /// Length of the header with its padding; data begins at `8 + header_len`.
    pub header_len: u64,
}

impl Header {
    /// Offset in the file at which tensor data begins.
    pub fn data_start(&self) -> u64 {
        PREFIX_LEN + self.header_len
    }

    /// Bytes of tensor data.
    pub fn data_len(&self) -> u64 {
        self.tensors.last().map_or(0, |last| last.data_offsets.end)
    }

    pub(super) fn of_valid_file(bytes: &[u8]) -> Result<Header, Fault> {
        let file_len = bytes.len() as u64;
        let len = header_len(&bytes[..bytes.len().min(SNIFF_LEN)], file_len)?;
        // The slice is in range, because `header_len` compared `len` with the length of `bytes`.
        Header::parse(&bytes[8..8 + len as usize], file_len)
    }

    /// Parses the header text of a file of `file_len` bytes.
    pub fn parse(text: &[u8], file_len: u64) -> Result<Header, Fault> {
        let header_len = text.len() as u64;
        let text = std::str::from_utf8(text).map_err(|e| {
            ErrorKind::HeaderUtf8
                .fault(format!("the header is not UTF-8 at its byte {}", e.valid_up_to()))
        })?;
        let mut json = serde_json::Deserializer::from_str(text);
        let raw = parse_json(&mut json)?;
        validate(raw, header_len, file_len)
    }

    /// Parses a file in memory that may end with its header, such as a file that only describes
    /// tensors.
    pub fn of_description(bytes: &[u8]) -> Result<Header, Fault> {
        match Header::of_file(bytes) {
            Err(fault) if fault.kind == ErrorKind::DataTruncated => {}
            other => return other,
        }
        let len = header_len(&bytes[..bytes.len().min(SNIFF_LEN)], bytes.len() as u64)?;
        let text = &bytes[8..8 + len as usize];
        // The first parse has shown that it is UTF-8 and JSON.
        let raw = parse_json(&mut serde_json::Deserializer::from_slice(text))?;
        let end = raw.tensors.iter().map(|entry| entry.data_offsets.end).max().unwrap_or(0);
        validate(raw, len, (PREFIX_LEN + len).saturating_add(end))
    }

    /// Parses the header text of a file of `file_len` bytes while `reader` yields it.
    ///
    /// `reader` ends after `header_len` bytes. An error of `reader` is the outer error of the
    /// result.
    pub fn parse_stream(
        reader: impl Read,
        header_len: u64,
        file_len: u64,
    ) -> std::io::Result<Result<Header, Fault>> {
        let bad_utf8 = Cell::new(false);
        let io_error = Cell::new(None);
        let checked =
            Utf8Reader { inner: reader, tail: Vec::new(), bad: &bad_utf8, failed: &io_error };
        let mut json = serde_json::Deserializer::from_reader(BufReader::new(checked));
        let parsed = parse_json(&mut json);
        if let Some(error) = io_error.take() {
            return Err(error);
        }
        if bad_utf8.get() {
            return Ok(Err(ErrorKind::HeaderUtf8.fault("the header is not UTF-8")));
        }
        Ok(parsed.and_then(|raw| validate(raw, header_len, file_len)))
    }
}

/// Length of the header, from the first bytes of a file. `sniff` has `SNIFF_LEN` bytes, or the
/// whole file if the file is shorter.
pub fn header_len(sniff: &[u8], file_len: u64) -> Result<u64, Fault> {
    let Some(prefix) = sniff.first_chunk::<8>() else {
        return Err(ErrorKind::TooShort.fault(format!(
            "the file has {file_len} bytes, the length of its header alone takes 8"
        )));
    };
    let len = u64::from_le_bytes(*prefix);
    if len > HEADER_LEN_MAX {
        return Err(ErrorKind::HeaderTooLarge.fault(format!(
            "announces a header of {len} bytes, the format allows {HEADER_LEN_MAX}"
        )));
    }
    if PREFIX_LEN + len > file_len {
        return Err(ErrorKind::HeaderLength.fault(format!(
            "the header ends at byte {} but the file has {file_len} bytes; the download may \
             be incomplete",
            PREFIX_LEN + len
        )));
    }
    Ok(len)
}

/// The JSON of one tensor. Unknown keys are ignored, as in the reference implementation.
#[derive(Deserialize)]
struct EntryJson {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A header as parsed, not yet validated.
struct Raw {
    metadata: Option<BTreeMap<String, String>>,
    tensors: Vec<Entry>,
}

fn parse_json<'de, R: serde_json::de::Read<'de>>(
    json: &mut serde_json::Deserializer<R>,
) -> Result<Raw, Fault> {
    let mut current = None;
    let parsed = HeaderSeed { current: &mut current }.deserialize(&mut *json);
    let raw = parsed.and_then(|raw| {
        current = None;
        json.end().map(|()| raw)
    });
    raw.map_err(|e| {
        let message = e.to_string();
        let kind = if message.starts_with(UNKNOWN_DTYPE) {
            ErrorKind::UnknownDtype
        } else {
            kind_of(&e, ErrorKind::HeaderJson)
        };
        Fault { kind, file: None, tensor: current, message: format!("invalid header: {message}") }
    })
}

/// Reads the header object. `current` is the name of the tensor that is being read, for error
/// messages.
struct HeaderSeed<'a> {
    current: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Raw;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let mut metadata = None;
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                if metadata.is_some() {
                    return Err(duplicate(METADATA));
                }
                metadata = Some(map.next_value::<Option<UniqueMap<String>>>()?);
                continue;
            }
            *self.current = Some(name);
            let EntryJson { dtype, shape, data_offsets } = map.next_value()?;
            let name = self.current.take().unwrap_or_default();
            let data_offsets = Range { start: data_offsets.0, end: data_offsets.1 };
            tensors.push(Entry { name, facts: dtype.into(), shape, data_offsets });
        }
        Ok(Raw { metadata: metadata.flatten().map(|map| map.0), tensors })
    }
}

/// Checks the rules of the format, in the same order as the reference implementation.
fn validate(raw: Raw, header_len: u64, file_len: u64) -> Result<Header, Fault> {
    let Raw { metadata, mut tensors } = raw;
    tensors.sort_by(|a, b| {
        let key = |e: &Entry| (e.data_offsets.start, e.data_offsets.end);
        key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
    });
    check_tensors(&tensors, header_len, file_len)?;
    Ok(Header { metadata, tensors, header_len })
}

/// Refuses duplicate names, and tensors that leave gaps between the end of the header and the end
/// of the file, or that overlap.
pub(super) fn check_tensors(
    tensors: &[Entry],
    header_len: u64,
    file_len: u64,
) -> Result<(), Fault> {
    refuse_duplicate_names(tensors)?;
    let mut end = 0;
    for entry in tensors {
        check_entry(entry, end).map_err(|fault| fault.tensor(&entry.name))?;
        end = entry.data_offsets.end;
    }
    let data_start = PREFIX_LEN + header_len;
    match end.checked_add(data_start) {
        Some(expected) if expected == file_len => {}
        Some(expected) if expected < file_len => {
            return Err(ErrorKind::DataTrailing.fault(format!(
                "tensor data ends at byte {expected} but the file has {file_len} bytes ({} \
                 too many)",
                file_len - expected
            )));
        }
        expected => {
            let expected = expected.map_or("2^64 or more".to_owned(), |e| e.to_string());
            return Err(ErrorKind::DataTruncated.fault(format!(
                "tensor data ends at byte {expected} but the file has {file_len} bytes; the \
                 download or the save may be incomplete"
            )));
        }
    }
    Ok(())
}

fn refuse_duplicate_names(tensors: &[Entry]) -> Result<(), Fault> {
    let mut names: Vec<&str> = tensors.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(ErrorKind::DuplicateKey
            .fault("stands twice in the header, so the file can be read in two ways")
            .tensor(pair[0])),
        None => Ok(()),
    }
}

/// Checks one entry, which must begin at the end of the previous one.
pub(super) fn check_entry(entry: &Entry, previous_end: u64) -> Result<(), Fault> {
    let Range { start, end } = entry.data_offsets;
    if start < previous_end && end > start {
        return Err(ErrorKind::OffsetOverlap.fault(format!(
                "data_offsets [{start}, {end}] begin before {previous_end}, where the tensor before ends"
            )));
    }
    if start != previous_end || end < start {
        return Err(ErrorKind::OffsetGap.fault(format!(
                "data_offsets [{start}, {end}] do not begin at {previous_end}, where the tensor before ends"
            )));
    }
    let Entry { facts, shape, .. } = entry;
    let Some(bits) = facts.dtype.bits_of(shape) else {
        return Err(ErrorKind::Overflow.fault(format!("{facts} {shape:?} has 2^64 bits or more")));
    };
    if bits % 8 != 0 {
        return Err(ErrorKind::Misaligned
            .fault(format!("{facts} {shape:?} has {bits} bits, not whole bytes")));
    }
    if bits / 8 != end - start {
        return Err(ErrorKind::SizeMismatch.fault(format!(
            "{facts} {shape:?} needs {} bytes, its data_offsets [{start}, {end}] hold {}",
            bits / 8,
            end - start
        )));
    }
    Ok(())
}

/// Writes the 8 bytes of length and the header text, padded with spaces so that data begins
/// at a multiple of `align`.
///
/// Tensors are written in the given order. Their `data_offsets` follow each other from 0. If the
/// header would exceed `HEADER_LEN_MAX`, the error is its length. The caller has to refuse tensors
/// whose offsets would exceed `u64::MAX`.
pub fn encode<'a, 'm>(
    metadata: impl Into<Option<&'m BTreeMap<String, String>>>,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64], u64)>,
    align: u64,
) -> Result<Vec<u8>, u64> {
    let mut text = vec![0; PREFIX_LEN as usize];
    text.push(b'{');
    if let Some(metadata) = metadata.into() {
        push_json(&mut text, METADATA);
        text.push(b':');
        push_json(&mut text, metadata);
    }
    let mut start = 0u64;
    for (name, dtype, shape, len) in tensors {
        if text.len() > PREFIX_LEN as usize + 1 {
            text.push(b',');
        }
        push_json(&mut text, name);
        text.extend_from_slice(br#":{"dtype":""#);
        text.extend_from_slice(dtype.name().as_bytes());
        text.extend_from_slice(br#"","shape":"#);
        push_json(&mut text, shape);
        text.extend_from_slice(br#","data_offsets":"#);
        let end = start.saturating_add(len);
        push_json(&mut text, &[start, end]);
        text.push(b'}');
        start = end;
        if text.len() as u64 > PREFIX_LEN + HEADER_LEN_MAX {
            return Err(text.len() as u64 - PREFIX_LEN);
        }
    }
    text.push(b'}');
    text.resize((text.len() as u64).next_multiple_of(align) as usize, b' ');
    let len = text.len() as u64 - PREFIX_LEN;
    if len > HEADER_LEN_MAX {
        return Err(len);
    }
    text[..PREFIX_LEN as usize].copy_from_slice(&len.to_le_bytes());
    Ok(text)
}

fn push_json<T: serde::Serialize + ?Sized>(text: &mut Vec<u8>, value: &T) {
    // Strings, integers and maps of strings can always be serialised, and writing to a `Vec` cannot
    // fail.
    let written = serde_json::to_writer(text, value);
    debug_assert!(written.is_ok());
}

/// A reader that records bytes that are not UTF-8, because the JSON parser would report them as a
/// syntax error. It also records a failed read, because the parser would hide it in its own error.
struct Utf8Reader<'a, R> {
    inner: R,
    /// First bytes of a character that the end of the last chunk has cut.
    tail: Vec<u8>,
    bad: &'a Cell<bool>,
    failed: &'a Cell<Option<std::io::Error>>,
}

impl<R: Read> Read for Utf8Reader<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let n = match self.inner.read(buf) {
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => return Err(e),
            Err(e) => {
                self.failed.set(Some(e));
                return Err(std::io::Error::other("read failed"));
            }
        };
        self.tail.extend_from_slice(&buf[..n]);
        match std::str::from_utf8(&self.tail) {
            Ok(_) => self.tail.clear(),
            Err(e) if e.error_len().is_none() && n > 0 => {
                self.tail.drain(..e.valid_up_to());
            }
            Err(_) => {
                self.bad.set(true);
                return Err(std::io::Error::other("not UTF-8"));
            }
        }
        Ok(n)
    }
}
