//! The bintensors header: 8 bytes of length, then the header in the encoding of the bincode crate.
//! The data of all tensors follows without gap or overlap.
//!
//! Accepts the same headers as the reference implementation (crate 0.1, PyPI 0.2), except those
//! with a duplicate metadata key. Also accepts the older layout, which the 0.0 releases of the
//! reference implementation wrote. A file does not say which layout it has, so the parser tries the
//! older layout if the newer one does not fit.
//!
//! This module has a decoder of its own for two reasons. The errors of bincode do not name the
//! offset and the tensor. And bincode allocates memory for the announced number of items before it
//! knows that the items exist.

use std::collections::BTreeMap;
use std::collections::btree_map;
use std::io::{self, BufReader, Read};

use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::range_reader::{ReadResult, ReadStop, told};
use crate::format::safetensors::{
    Entry, HEADER_LEN_MAX, Header, PREFIX_LEN, SNIFF_LEN, check_entry, check_tensors, header_len,
};

/// The data of tensors begins at a multiple of this number of bytes in the file.
const DATA_ALIGN: u64 = 8;

/// Element types by their number in a header.
const DTYPES: [Dtype; 15] = [
    Dtype::Bool,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8E5M2,
    Dtype::F8E4M3,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

/// Minimum length of a header entry in bytes: one byte each for the length of the name, the dtype,
/// the number of dimensions, and the two offsets.
const ENTRY_LEN_MIN: u64 = 5;

/// Minimum length of a metadata key with its value in bytes.
const PAIR_LEN_MIN: u64 = 2;

/// Maximum memory that a decoded header may take, in bytes: the limit of the reference
/// implementation, about 1,388,888 tensors.
const MEMORY_MAX: u64 = 100_000_000;

/// First bytes of integers that are longer than one byte. The value follows in 2, 4 or 8 bytes.
const MARKER_U16: u8 = 251;
const MARKER_U32: u8 = 252;
const MARKER_U64: u8 = 253;

/// Number of an element type in a header, `None` if the format does not have it. Tensors in a file
/// are sorted by this number, highest first, then by name.
pub fn number_of(dtype: Dtype) -> Option<u8> {
    DTYPES.iter().position(|known| *known == dtype).map(|code| code as u8)
}

/// Parses a whole file that is already in memory.
pub fn parse_file(bytes: &[u8]) -> Result<Header, Fault> {
    let file_len = bytes.len() as u64;
    let len = header_len(&bytes[..bytes.len().min(SNIFF_LEN)], file_len)?;
    // The slice is in range, because `header_len` compared `len` with the length of `bytes`.
    parse(&bytes[8..8 + len as usize], file_len)
}

/// Parses the header of a file of `file_len` bytes.
pub fn parse(header: &[u8], file_len: u64) -> Result<Header, Fault> {
    let parsed = parse_stream(|| header, header.len() as u64, file_len);
    // A read from memory does not fail.
    parsed.unwrap_or_else(|e| Err(ErrorKind::Io.fault(e.to_string())))
}

/// Parses the header of a file of `file_len` bytes while it is read. The reader that `open` returns
/// begins at the start of the header and ends after `header_len` bytes.
///
/// # Errors
/// The outer error is a failed read, the inner error is a fault of the header.
pub fn parse_stream<R: Read>(
    mut open: impl FnMut() -> R,
    header_len: u64,
    file_len: u64,
) -> io::Result<Result<Header, Fault>> {
    let mut read = |decode: fn(&mut Decoder<BufReader<R>>) -> ReadResult<Decoded>| {
        let reader = BufReader::new(open());
        let memory = MemoryCount { now: 1 };
        let mut decoder = Decoder { reader, header_len, left: header_len, memory };
        let (metadata, tensors) = decode(&mut decoder)?;
        check_tensors(&tensors, header_len, file_len)?;
        Ok(Header { metadata, tensors, header_len })
    };
    match told(read(Decoder::current))? {
        Ok(header) => Ok(Ok(header)),
        Err(fault) => Ok(told(read(Decoder::older))?.map_err(|_| fault)),
    }
}

type Metadata = Option<BTreeMap<String, String>>;
type Decoded = (Metadata, Vec<Entry>);

/// Reads the values of a header, never beyond its end.
struct Decoder<R> {
    reader: R,
    header_len: u64,
    /// Number of header bytes that are not read yet.
    left: u64,
    memory: MemoryCount,
}

impl<R: Read> Decoder<R> {
    /// The current layout: each tensor with its name.
    fn current(&mut self) -> ReadResult<Decoded> {
        let metadata = self.metadata()?;
        let mut tensors = Vec::new();
        let mut end = 0;
        for _ in 0..self.list("tensors", ENTRY_LEN_MIN, ENTRY_MEMORY)? {
            self.memory.begin(ENTRY_MEMORY);
            let name = self.string("the name of a tensor")?;
            let entry = self.description(end).map_err(|stop| stop.tensor(&name))?;
            end = entry.data_offsets.end;
            tensors.push(Entry { name, ..entry });
        }
        // The rest of the header is padding, which readers ignore.
        Ok((metadata, tensors))
    }

    /// The layout of the 0.0 releases: all tensors, then all names, each with the position of its
    /// tensor.
    fn older(&mut self) -> ReadResult<Decoded> {
        let metadata = self.metadata()?;
        let mut tensors = Vec::new();
        let mut end = 0;
        for _ in 0..self.list("tensors", ENTRY_LEN_MIN - 1, OLDER_ENTRY_MEMORY)? {
            self.memory.begin(OLDER_ENTRY_MEMORY);
            let entry = self.description(end)?;
            end = entry.data_offsets.end;
            tensors.push(entry);
        }
        let mut named = vec![false; tensors.len()];
        let names = self.list("names", PAIR_LEN_MIN, POSITION_MEMORY)?;
        if names != tensors.len() as u64 {
            return Err(self.bad(&format!("{names} names for {} tensors", tensors.len())));
        }
        for _ in 0..names {
            self.memory.begin(POSITION_MEMORY);
            self.memory.add(NUMBER_MEMORY)?;
            let name = self.string("the name of a tensor")?;
            let index = self.uint("the position of a tensor")?;
            match usize::try_from(index).ok().and_then(|index| named.get_mut(index)) {
                Some(slot) if !*slot => *slot = true,
                _ => return Err(self.bad(&format!("{index} is the position of no other tensor"))),
            }
            tensors[index as usize].name = name;
        }
        Ok((metadata, tensors))
    }

    fn metadata(&mut self) -> ReadResult<Metadata> {
        match self.bytes::<1>("the mark of metadata")?[0] {
            0 => return Ok(None),
            1 => {}
            mark => {
                return Err(self.bad(&format!("the mark of metadata is {mark}, 0 or 1 expected")));
            }
        }
        let mut map = BTreeMap::new();
        for _ in 0..self.list("metadata strings", PAIR_LEN_MIN, PAIR_MEMORY)? {
            self.memory.begin(PAIR_MEMORY);
            let key = self.string("a metadata key")?;
            let value = self.string("a metadata value")?;
            match map.entry(key) {
                btree_map::Entry::Vacant(place) => drop(place.insert(value)),
                btree_map::Entry::Occupied(place) => {
                    let key = quoted(place.key());
                    let message = format!(
                        "the metadata key {key} stands twice in the header, so the file can be \
                         read in two ways"
                    );
                    return Err(ErrorKind::DuplicateKey.fault(message).into());
                }
            }
        }
        Ok(Some(map))
    }

    /// Reads a tensor without its name. The data of the tensor has to begin at `previous_end`. Each
    /// tensor is checked at once, so that a header of invalid tensors is refused at the first
    /// tensor.
    fn description(&mut self, previous_end: u64) -> ReadResult<Entry> {
        let (marker, number) = self.marked_uint("a dtype")?;
        if marker == MARKER_U64 {
            return Err(self.bad("a dtype is written as an integer of 64 bits, 32 expected"));
        }
        let Some(&dtype) = usize::try_from(number).ok().and_then(|index| DTYPES.get(index)) else {
            let message = format!("unknown dtype {number}, the format has 0 to 14");
            return Err(ErrorKind::UnknownDtype.fault(message).into());
        };
        let mut shape = Vec::new();
        for _ in 0..self.list("dimensions", 1, NUMBER_MEMORY)? {
            shape.push(self.uint("a dimension")?);
        }
        self.memory.add(PLACE_MEMORY)?;
        let start = self.uint("the start of a tensor")?;
        let end = self.uint("the end of a tensor")?;
        let entry =
            Entry { name: String::new(), facts: dtype.into(), shape, data_offsets: start..end };
        check_entry(&entry, previous_end)?;
        Ok(entry)
    }

    /// Reads a number of items. Refuses the number if this many items of at least `item_len` bytes
    /// each do not fit into the rest of the header.
    fn count(&mut self, what: &str, item_len: u64) -> ReadResult<u64> {
        let count = self.uint("a count")?;
        if count > self.left / item_len {
            let left = self.left;
            let message =
                format!("{count} {what} announced, but {left} bytes of the header are left");
            return Err(self.bad(&message));
        }
        Ok(count)
    }

    /// Reads the number of items of a list, and counts the memory that the items take.
    fn list(&mut self, what: &str, item_len: u64, item_memory: u64) -> ReadResult<u64> {
        let count = self.count(what, item_len)?;
        self.memory.list(count, item_memory)?;
        Ok(count)
    }

    fn string(&mut self, what: &str) -> ReadResult<String> {
        let len = self.list("bytes of text", 1, 1)?;
        let mut bytes = Vec::new();
        (&mut self.reader).take(len).read_to_end(&mut bytes)?;
        if (bytes.len() as u64) < len {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        self.left -= len;
        String::from_utf8(bytes).map_err(|e| {
            let at = self.at() - len + e.utf8_error().valid_up_to() as u64;
            let message = format!("{what} is not UTF-8 at byte {at} of the header");
            ErrorKind::HeaderUtf8.fault(message).into()
        })
    }

    fn uint(&mut self, what: &str) -> ReadResult<u64> {
        self.marked_uint(what).map(|(_, value)| value)
    }

    /// An integer and its first byte. Encodings that are longer than necessary are accepted.
    fn marked_uint(&mut self, what: &str) -> ReadResult<(u8, u64)> {
        let [marker] = self.bytes(what)?;
        let value = match marker {
            MARKER_U16 => u16::from_le_bytes(self.bytes(what)?).into(),
            MARKER_U32 => u32::from_le_bytes(self.bytes(what)?).into(),
            MARKER_U64 => u64::from_le_bytes(self.bytes(what)?),
            0..MARKER_U16 => marker.into(),
            _ => {
                let message = format!("{what} begins with {marker}, which begins no integer");
                return Err(self.bad(&message));
            }
        };
        Ok((marker, value))
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> ReadResult<[u8; N]> {
        if self.left < N as u64 {
            return Err(self.bad(&format!("it ends within {what}")));
        }
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        self.left -= N as u64;
        Ok(bytes)
    }

    /// Number of bytes read so far.
    fn at(&self) -> u64 {
        self.header_len - self.left
    }

    fn bad(&self, what: &str) -> ReadStop {
        let message = format!("not a bintensors header: before its byte {}: {what}", self.at());
        ErrorKind::HeaderDecode.fault(message).into()
    }
}

/// Writes the 8 bytes of length and the header, as the reference implementation does: tensors
/// in the order given, with offsets that follow each other from 0.
///
/// # Errors
/// `unknown_dtype` for a dtype that the format does not have, `header_too_large` if no reader would
/// accept the header.
pub fn encode<'a, 'm>(
    metadata: impl Into<Option<&'m BTreeMap<String, String>>>,
    tensors: impl ExactSizeIterator<Item = (&'a str, Dtype, &'a [u64], u64)>,
) -> Result<Vec<u8>, Fault> {
    let mut out = vec![0; PREFIX_LEN as usize];
    let mut memory = MemoryCount { now: 1 };
    let metadata = metadata.into();
    out.push(u8::from(metadata.is_some()));
    if let Some(metadata) = metadata {
        push_uint(&mut out, metadata.len() as u64);
        memory.list(metadata.len() as u64, PAIR_MEMORY)?;
        for (key, value) in metadata {
            memory.begin(PAIR_MEMORY);
            for text in [key, value] {
                push_string(&mut out, text);
                memory.list(text.len() as u64, 1)?;
            }
        }
    }
    push_uint(&mut out, tensors.len() as u64);
    memory.list(tensors.len() as u64, ENTRY_MEMORY)?;
    let mut start = 0u64;
    for (name, dtype, shape, len) in tensors {
        let Some(number) = number_of(dtype) else {
            let message = format!(
                "bintensors has no dtype {dtype}; keep the checkpoint as safetensors, or leave the \
                 tensor out with exclude="
            );
            return Err(ErrorKind::UnknownDtype.fault(message).tensor(name));
        };
        push_string(&mut out, name);
        out.push(number);
        push_uint(&mut out, shape.len() as u64);
        shape.iter().for_each(|dim| push_uint(&mut out, *dim));
        push_uint(&mut out, start);
        let message = "the file would have 2^64 bytes or more";
        start = start.checked_add(len).ok_or_else(|| ErrorKind::Overflow.fault(message))?;
        push_uint(&mut out, start);
        memory.begin(ENTRY_MEMORY);
        memory.list(name.len() as u64, 1)?;
        memory.list(shape.len() as u64, NUMBER_MEMORY)?;
        memory.add(PLACE_MEMORY)?;
    }
    out.resize((out.len() as u64).next_multiple_of(DATA_ALIGN) as usize, b' ');
    let len = out.len() as u64 - PREFIX_LEN;
    if len > HEADER_LEN_MAX {
        let message =
            format!("a bintensors header of {len} bytes, the format allows {HEADER_LEN_MAX}");
        return Err(ErrorKind::HeaderTooLarge.fault(message));
    }
    out[..PREFIX_LEN as usize].copy_from_slice(&len.to_le_bytes());
    Ok(out)
}

/// Memory in bytes that the reference implementation counts: for an integer, for the dtype and the
/// two offsets of a tensor, for two strings, for a tensor, for a tensor in the older layout, and
/// for a name with the position of its tensor in the older layout.
const NUMBER_MEMORY: u64 = 8;
const PLACE_MEMORY: u64 = 20;
const PAIR_MEMORY: u64 = 48;
const ENTRY_MEMORY: u64 = 72;
const OLDER_ENTRY_MEMORY: u64 = 48;
const POSITION_MEMORY: u64 = 32;

/// The memory that the reference implementation counts against its limit while it decodes. At the
/// beginning of a list it counts all items. When it decodes an item, it counts the parts of the
/// item in place of the item. It refuses files that exceed the limit, so tensorfs refuses to read
/// them, and does not write them.
struct MemoryCount {
    now: u64,
}

impl MemoryCount {
    /// Counts all items of a list, at the beginning of the list.
    fn list(&mut self, len: u64, item: u64) -> Result<(), Fault> {
        self.add(len.saturating_mul(item).saturating_add(NUMBER_MEMORY))
    }

    /// Removes the count of an item whose parts are decoded next, because the parts are counted
    /// instead.
    fn begin(&mut self, item: u64) {
        self.now = self.now.saturating_sub(item);
    }

    fn add(&mut self, bytes: u64) -> Result<(), Fault> {
        self.now = self.now.saturating_add(bytes);
        if self.now <= MEMORY_MAX {
            return Ok(());
        }
        Err(ErrorKind::HeaderTooLarge.fault(format!(
            "a bintensors header that takes {} bytes or more once it is decoded, the bintensors \
             package allows {MEMORY_MAX}; keep these tensors as safetensors",
            self.now
        )))
    }
}

fn push_string(out: &mut Vec<u8>, text: &str) {
    push_uint(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

/// Writes an integer in the shortest form.
fn push_uint(out: &mut Vec<u8>, value: u64) {
    if let Ok(byte) = u8::try_from(value)
        && byte < MARKER_U16
    {
        out.push(byte);
    } else if let Ok(value) = u16::try_from(value) {
        out.push(MARKER_U16);
        out.extend_from_slice(&value.to_le_bytes());
    } else if let Ok(value) = u32::try_from(value) {
        out.push(MARKER_U32);
        out.extend_from_slice(&value.to_le_bytes());
    } else {
        out.push(MARKER_U64);
        out.extend_from_slice(&value.to_le_bytes());
    }
}
