//! The tensorizer file: a fixed head, an area with an entry for each tensor, and then the tensors. Each tensor is a
//! header with the data right behind it.
//!
//! A meta tensor has a shape and no data. Its elements are zeros, at offsets behind the end of the
//! file.
//!
//! The entries are compared with the headers of the tensors. The reference implementation
//! (tensorizer 2.12) trusts the headers. A file in which entries and headers differ can therefore
//! be read in two ways, and is refused.

pub mod crypt;
pub mod decryptor;
pub mod encode;
mod entries;
mod fields;
mod header;
pub mod keys;
mod names;
mod salsa;
pub mod secretbox;

use std::io;
use std::ops::Range;

use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault};
use crate::zeros::{ZEROS_LEN_MAX, ZEROS_START};

use self::crypt::{Encryption, SECTIONS_LEN_MAX};
use self::decryptor::EncryptedTensor;
use self::entries::ListedTensor;
use self::header::HeaderExtras;
use super::description::ShardDescription;
use super::range_reader::{RangeReader, ReadResult, told};

/// First bytes of a file.
const MAGIC: &[u8; 5] = b"|TZR|";

/// Length of the fixed head in bytes. The area of entries follows it.
pub const HEAD_LEN: u64 = 73;

/// Maximum length of the area of entries in bytes. The reference implementation writes 256 KiB.
pub const ENTRIES_LEN_MAX: u64 = 16 << 20;

/// Maximum length of the header of a tensor in bytes. The fields of a header have lengths of 8 and
/// 16 bits.
const TENSOR_HEADER_LEN_MAX: u64 = 256 << 10;

/// The zeros of a meta tensor begin at an offset that is a multiple of this number of bytes.
const ZEROS_ALIGN: u64 = 64;

/// Number of bytes in front of the value of a hash: one for its type and one for its length.
const HASH_PREFIX_LEN: u64 = 2;

/// Length in bytes of the mark after the last tensor.
const END_MARK_LEN: u64 = 8;

/// Feature flag: the data of tensors is encrypted. It has no meaning in versions before
/// `FLAGS_SINCE`.
const ENCRYPTED: u8 = 1;

/// Feature flag: each entry begins with its version.
const VERSIONED: u8 = 2;

/// First version whose files have feature flags, and may have tensors without data.
const FLAGS_SINCE: u32 = 4;

/// First version of a file in which entries may have a version of their own.
const VERSIONED_SINCE: u32 = 5;

/// A file of this version is encrypted, although it has no feature flags.
const ENCRYPTED_VERSION: u32 = 3;

/// A tensor of a file with the places of its header and its data.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StoredTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    header: Range<u64>,
    data: Range<u64>,
    /// Offset of the first zero of a meta tensor, behind the end of the file. A meta tensor has a shape and no data.
    /// `None` for other tensors.
    zeros: Option<u64>,
    /// The hashes in the header. Empty if the hashes are not kept.
    hashes: KeptHashes,
    /// `None` if its data is not encrypted.
    encryption: Option<Encryption>,
    /// The bytes of the header that describe the encryption of its data. Empty in a file without
    /// encryption.
    encryption_bytes: Range<u64>,
}

/// The tensors of a file in the order of their bytes, and the mark behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StoredFile {
    /// Whether the file says that its tensors are encrypted.
    encrypted: bool,
    tensors: Vec<StoredTensor>,
    /// The bytes of the end mark. The range is shorter than a mark, or empty, if the file ends early. If another file
    /// follows, the range has the magic of that file.
    end_mark: Range<u64>,
    /// Offset of the first byte of the next tensorizer file, if one follows in place of the end
    /// mark.
    next_file: Option<u64>,
}

/// A tensor of a file and the hashes in its header. The hashes cover the header and the data of the
/// tensor, with zeros in place of the values of the hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashedTensor {
    /// Its name.
    pub name: String,
    /// The bytes of the file that the hashes cover. The hashes are those of the bytes before encryption.
    pub range: Range<u64>,
    /// Bytes in `range` that the hashes do not cover, because they describe the encryption of the tensor.
    pub left_out: Range<u64>,
    /// The hashes.
    pub hashes: KeptHashes,
    /// Whether the tensor is an entry of a zip archive, whose CRC is stored outside `range`.
    pub is_entry: bool,
}

/// The hashes in the header of a tensor, with one value of each kind. A header may have up to 255
/// hashes, and may repeat a hash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptHashes {
    /// CRC32, little-endian.
    pub crc32: Option<[u8; 4]>,
    /// SHA-256.
    pub sha256: Option<[u8; 32]>,
    /// The kinds of all hashes, in the order of their bytes.
    kinds: Box<[HashKind]>,
    /// Offset in the file of the first byte of the first hash, which is its type.
    start: u64,
}

impl KeptHashes {
    /// A CRC32 that lies outside the bytes that it covers.
    pub fn of_crc32(crc32: u32) -> KeptHashes {
        KeptHashes { crc32: Some(crc32.to_le_bytes()), ..KeptHashes::default() }
    }

    /// The byte ranges of the file that hold the values of all hashes, in the order of the hashes.
    pub fn places(&self) -> impl Iterator<Item = Range<u64>> {
        let mut end = self.start;
        self.kinds.iter().map(move |kind| {
            let start = end + HASH_PREFIX_LEN;
            end = start + kind.value_len() as u64;
            start..end
        })
    }

    /// Whether there are no hashes.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }
}

/// The kind of a hash in the header of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HashKind {
    /// CRC32 as zlib computes it.
    Crc32,
    /// SHA-256.
    Sha256,
}

impl HashKind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            HashKind::Crc32 => "CRC32",
            HashKind::Sha256 => "SHA-256",
        }
    }

    /// Length in bytes of a value.
    fn value_len(self) -> usize {
        match self {
            HashKind::Crc32 => 4,
            HashKind::Sha256 => 32,
        }
    }
}

/// The fixed head of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileHead {
    version: u32,
    versioned: bool,
    encrypted: bool,
    count: u64,
    entries_len: u64,
}

/// Whether a file that begins with `sniff` is a tensorizer file.
pub fn is_tensorizer(sniff: &[u8]) -> bool {
    sniff.starts_with(MAGIC)
}

/// Length in bytes of the head and the area of entries of a tensorizer file, which is the byte range `file` of the file
/// that is read. `sniff` has the first `HEAD_LEN` bytes of this range, or the whole range if it is shorter.
///
/// # Errors
/// Why these bytes are no tensorizer file that can be read.
pub fn description_len(sniff: &[u8], file: &Range<u64>) -> Result<u64, Fault> {
    FileHead::parse(sniff, file).map(|head| HEAD_LEN + head.entries_len)
}

/// Whether a file that begins with `sniff` says that its tensors are encrypted. `description_len` must have returned
/// a length for it.
pub fn is_encrypted(sniff: &[u8], file: &Range<u64>) -> bool {
    FileHead::parse(sniff, file).is_ok_and(|head| head.encrypted)
}

/// A tensor of the list of tensors, with the places of its header and its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPlace {
    /// Its name in the bytes that the file stores.
    pub stored_name: Vec<u8>,
    /// The bytes of its header.
    pub header: Range<u64>,
    /// The bytes of its data.
    pub data: Range<u64>,
}

/// The places of all tensors in the order of their bytes. `description` is the head and the area of
/// entries.
///
/// # Errors
/// Why `description` is not the whole beginning of a tensorizer file.
pub fn places(description: &[u8]) -> Result<Vec<StoredPlace>, Fault> {
    let head = FileHead::parse(description, &(0..description.len() as u64))?;
    let area = &description[HEAD_LEN as usize..][..head.entries_len as usize];
    let mut entries = entries::decode(area, &head)?;
    entries.sort_by_key(|entry| entry.header_start);
    let place = |entry: ListedTensor<'_>| {
        check_header_len(&entry, &head).map_err(|fault| fault.tensor(&entry.name.joined))?;
        let ListedTensor { header_start, data_start, data_len, .. } = entry;
        let data_end = data_start.checked_add(data_len);
        let Some(data_end) = data_end else {
            let message = "its data passes 2^64; save the checkpoint again";
            let fault = ErrorKind::Overflow.fault(message);
            return Err(fault.tensor(&entry.name.joined));
        };
        let (header, data) = (header_start..data_start, data_start..data_end);
        Ok(StoredPlace { stored_name: entry.stored_name.to_vec(), header, data })
    };
    entries.into_iter().map(place).collect()
}

/// Parses a whole file that is already in memory.
///
/// # Errors
/// The fault of the file.
pub fn parse_file(bytes: &[u8]) -> Result<ShardDescription, Fault> {
    // If the parser reads past the end of the bytes, that is an error of the parser and not of the
    // file.
    parse(&mut &*bytes).unwrap_or_else(|e| Err(ErrorKind::Io.fault(e.to_string())))
}

/// Parses a file: its head, its entries and the header of each tensor.
///
/// # Errors
/// The outer error is a failed read, the inner one is the fault of the file.
pub fn parse(reader: &mut dyn RangeReader) -> io::Result<Result<ShardDescription, Fault>> {
    let start = reader.start();
    let read = match told(read_tensors(reader, false))? {
        Ok(file) => file,
        Err(fault) => return Ok(Err(fault)),
    };
    let StoredFile { encrypted, tensors, end_mark, next_file } = read;
    let first = tensors.first().map_or(start + HEAD_LEN, |tensor| tensor.header.start);
    let names_len = tensors.iter().map(|tensor| tensor.name.len()).sum();
    let mut description = ShardDescription::with_room(first, tensors.len(), names_len);
    let mut described: Vec<Range<u64>> = Vec::with_capacity(tensors.len() + 1);
    described.push(start..first);
    for StoredTensor { name, dtype, shape, header, data, zeros, .. } in &tensors {
        description.add(name, (*dtype).into(), shape, zeros.unwrap_or(data.start));
        append(&mut described, header);
    }
    if !end_mark.is_empty() {
        append(&mut described, &end_mark);
    }
    if encrypted {
        let with_encryption =
            tensors.into_iter().filter_map(|StoredTensor { name, data, encryption, .. }| {
                Some(EncryptedTensor { name, range: data, encryption: encryption? })
            });
        // A tensor without data needs no decryption, and has no piece on which a key could be
        // checked.
        let with_data = with_encryption.filter(|tensor| !tensor.range.is_empty());
        description.encrypted = Some(with_data.collect());
    }
    description.described = described;
    description.next_file = next_file;
    Ok(Ok(description))
}

/// Appends `range`. If the last range ends where `range` begins, extends the last range instead.
fn append(ranges: &mut Vec<Range<u64>>, range: &Range<u64>) {
    match ranges.last_mut().filter(|before| before.end == range.start) {
        Some(before) => before.end = range.end,
        None => ranges.push(range.clone()),
    }
}

/// Parses a file as `parse` does, and returns the tensors that have hashes, in the order of their bytes.
///
/// # Errors
/// The errors of `parse`.
pub fn hashes(reader: &mut dyn RangeReader) -> io::Result<Result<Vec<HashedTensor>, Fault>> {
    let tensors = match told(read_tensors(reader, true))? {
        Ok(file) => file.tensors,
        Err(fault) => return Ok(Err(fault)),
    };
    let hashed =
        tensors.into_iter().filter(|tensor| !tensor.hashes.is_empty()).map(|tensor| HashedTensor {
            name: tensor.name,
            range: tensor.header.start..tensor.data.end,
            left_out: tensor.encryption_bytes,
            hashes: tensor.hashes,
            is_entry: false,
        });
    Ok(Ok(hashed.collect()))
}

impl FileHead {
    fn parse(sniff: &[u8], file: &Range<u64>) -> Result<FileHead, Fault> {
        if !is_tensorizer(sniff) {
            if sniff.len() < MAGIC.len() && MAGIC.starts_with(sniff) {
                return Err(too_short(file));
            }
            let message = "does not begin with `|TZR|`, as tensorizer files do; if it has another \
                           format, give it the suffix of that format";
            return Err(ErrorKind::HeaderDecode.fault(message));
        }
        let Some(head) = sniff.first_chunk::<{ HEAD_LEN as usize }>() else {
            return Err(too_short(file));
        };
        let number = |start: usize| u64::from_le_bytes(std::array::from_fn(|i| head[start + i]));
        let version = u32::from_le_bytes(std::array::from_fn(|i| head[MAGIC.len() + i]));
        if !(1..=VERSIONED_SINCE).contains(&version) {
            return Err(ErrorKind::HeaderDecode.fault(format!(
                "has the data version {version}, tensorfs reads 1 to 5; save it with tensorizer 2"
            )));
        }
        let flags = &head[9..41];
        let unknown = flags[0] > ENCRYPTED | VERSIONED || flags[1..].iter().any(|&byte| byte != 0);
        let versioned = flags[0] & VERSIONED != 0;
        if unknown || (versioned && version < VERSIONED_SINCE) {
            return Err(ErrorKind::HeaderDecode.fault(format!(
                "has feature flags beginning {:#x} that its data version {version} does not have; \
                 save the checkpoint again",
                number(9)
            )));
        }
        let flagged = version >= FLAGS_SINCE && flags[0] & ENCRYPTED != 0;
        let encrypted = version == ENCRYPTED_VERSION || flagged;
        let (count, entries_len) = (number(57), number(65));
        if count == 0 {
            let message = "lists no tensors; the program that saved it may have been stopped";
            return Err(ErrorKind::HeaderDecode.fault(message));
        }
        let entries_start = file.start + HEAD_LEN;
        if entries_len > file.end.saturating_sub(entries_start) {
            return Err(ErrorKind::HeaderLength.fault(format!(
                "the list of tensors takes {entries_len} bytes from byte {entries_start} on, but the \
                 file has {} bytes; the download may be incomplete",
                file.end
            )));
        }
        if entries_len > ENTRIES_LEN_MAX {
            return Err(ErrorKind::HeaderTooLarge.fault(format!(
                "the list of tensors takes {entries_len} bytes, tensorfs reads up to \
                 {ENTRIES_LEN_MAX}; save the tensors in several files"
            )));
        }
        Ok(FileHead { version, versioned, encrypted, count, entries_len })
    }
}

fn too_short(file: &Range<u64>) -> Fault {
    let behind = if file.start > 0 { format!(" from byte {}", file.start) } else { String::new() };
    ErrorKind::TooShort.fault(format!(
        "the file has {} bytes, the head of a tensorizer file takes 73{behind}; the download may be \
         incomplete",
        file.end
    ))
}

/// Reads the list of tensors, which may have any order, and the header of each tensor. Refuses
/// files with bytes between the tensors. The form of the hashes is checked in all headers. The
/// hashes are kept if `keep_hashes` is set.
fn read_tensors(reader: &mut dyn RangeReader, keep_hashes: bool) -> ReadResult<StoredFile> {
    let (start, file_len) = (reader.start(), reader.file_len());
    let mut sniff = vec![0; HEAD_LEN.min(file_len.saturating_sub(start)) as usize];
    reader.read_exact_at(start, &mut sniff)?;
    let head = FileHead::parse(&sniff, &(start..file_len))?;
    let mut area = vec![0; head.entries_len as usize];
    reader.read_exact_at(start + HEAD_LEN, &mut area)?;
    let mut entries = entries::decode(&area, &head)?;
    for entry in &entries {
        check_inside(entry, file_len).map_err(|fault| fault.tensor(&entry.name.joined))?;
    }
    entries.sort_by_key(|entry| entry.header_start);
    let mut end = start + HEAD_LEN + head.entries_len;
    let mut before = "the list of tensors";
    let mut zeros_end = ZEROS_START;
    let mut tensors = Vec::with_capacity(entries.len());
    let mut header = Vec::new();
    let mut sections_len = 0;
    for entry in entries {
        let name = entry.name.joined.clone();
        let named = |fault: Fault| fault.tensor(&name);
        let len = header_len(&entry, before, end, &head).map_err(named)?;
        header.resize(len as usize, 0);
        reader.read_exact_at(entry.header_start, &mut header)?;
        let mut tensor = stored(entry, &header, &head).map_err(named)?;
        if !keep_hashes {
            tensor.hashes = KeptHashes::default();
        }
        if tensor.is_meta() {
            zeros_end = tensor.give_zeros(zeros_end).map_err(named)?;
        }
        sections_len += tensor.encryption_bytes.end - tensor.encryption_bytes.start;
        check_sections(sections_len).map_err(named)?;
        end = tensor.data.end;
        before = "the data of the tensor before";
        tensors.push(tensor);
    }
    let (end_mark, next_file) = read_end_mark(reader, end, file_len)?;
    Ok(StoredFile { encrypted: head.encrypted, tensors, end_mark, next_file })
}

/// Refuses the file if its encryption sections exceed their limit. `sections_len` is their length
/// in bytes.
fn check_sections(sections_len: u64) -> Result<(), Fault> {
    if sections_len <= SECTIONS_LEN_MAX {
        return Ok(());
    }
    Err(ErrorKind::HeaderTooLarge.fault(format!(
        "the encryption of the tensors up to this one takes {sections_len} bytes of headers, \
         tensorfs reads up to {SECTIONS_LEN_MAX}; save the tensors in several files, or in longer \
         pieces"
    )))
}

/// Refuses a tensor that extends past the end of the file.
fn check_inside(entry: &ListedTensor<'_>, file_len: u64) -> Result<(), Fault> {
    let &ListedTensor { header_start, data_start, data_len, .. } = entry;
    let data_end = data_start.checked_add(data_len);
    if header_start <= file_len && data_end.is_some_and(|end| end <= file_len) {
        return Ok(());
    }
    Err(ErrorKind::DataTruncated.fault(format!(
        "its header begins at byte {header_start} and its data takes {data_len} bytes from byte \
         {data_start} on, but the file has {file_len} bytes; the download or the save may be \
         incomplete"
    )))
}

/// Length of the header of a tensor. The header has to begin at `previous_end`, the end of the
/// tensor `before`.
fn header_len(
    entry: &ListedTensor<'_>,
    before: &str,
    previous_end: u64,
    head: &FileHead,
) -> Result<u64, Fault> {
    let header_start = entry.header_start;
    if header_start != previous_end {
        let (kind, place) = if header_start < previous_end {
            (ErrorKind::OffsetOverlap, "before")
        } else {
            (ErrorKind::OffsetGap, "after")
        };
        return Err(kind.fault(format!(
            "its header begins at byte {header_start}, {place} byte {previous_end}, where \
             {before} ends; save the checkpoint again"
        )));
    }
    check_header_len(entry, head)
}

/// Length of the header of a tensor according to the list of tensors, if this length is possible.
fn check_header_len(entry: &ListedTensor<'_>, head: &FileHead) -> Result<u64, Fault> {
    let &ListedTensor { header_start, data_start, data_len, .. } = entry;
    let len = data_start.saturating_sub(header_start);
    let encryption = if head.encrypted { Encryption::section_len_max(data_len) } else { 0 };
    let most = TENSOR_HEADER_LEN_MAX.saturating_add(encryption);
    if !(header::TENSOR_HEADER_LEN_MIN..=most).contains(&len) {
        return Err(ErrorKind::HeaderDecode.fault(format!(
            "its header begins at byte {header_start} and its data at byte {data_start}, {} to \
             {most} bytes expected between them; save the checkpoint again",
            header::TENSOR_HEADER_LEN_MIN
        )));
    }
    Ok(len)
}

/// The tensor of the entry `entry`. `header` has the bytes of its header.
fn stored(entry: ListedTensor<'_>, header: &[u8], head: &FileHead) -> Result<StoredTensor, Fault> {
    let HeaderExtras { hashes, encryption, encryption_bytes } =
        header::compare(&entry, header, head.encrypted)?;
    let (dtype, shape) = entries::element_type(&entry)?;
    let Some(bits) = dtype.bits_of(&shape) else {
        let message =
            format!("the bits of shape {shape:?} of {dtype} pass 2^64; save the checkpoint again");
        return Err(ErrorKind::Overflow.fault(message));
    };
    if bits % 8 != 0 {
        return Err(ErrorKind::Misaligned.fault(format!(
            "shape {shape:?} of {dtype} takes {bits} bits, no whole bytes; save it in another type"
        )));
    }
    let ListedTensor { header_start, data_start, data_len, .. } = entry;
    let is_meta = data_len == 0 && head.version >= FLAGS_SINCE;
    if data_len != bits / 8 && !is_meta {
        return Err(ErrorKind::SizeMismatch.fault(format!(
            "takes {data_len} bytes, but shape {shape:?} of {dtype} takes {}; \
             save the checkpoint again",
            bits / 8
        )));
    }
    Ok(StoredTensor {
        name: entry.name.joined,
        dtype,
        shape,
        header: header_start..data_start,
        data: data_start..data_start + data_len,
        zeros: None,
        hashes,
        encryption,
        encryption_bytes,
    })
}

impl StoredTensor {
    /// Length of the data in bytes, by dtype and shape.
    fn len(&self) -> u64 {
        self.dtype.bits_of(&self.shape).map_or(0, |bits| bits / 8)
    }

    /// Whether the file has only the shape of the tensor, and no data.
    fn is_meta(&self) -> bool {
        self.data.is_empty() && self.len() > 0
    }

    /// Assigns zeros behind the file to the tensor, after the zeros that end at `zeros_end`.
    /// Returns the end of its zeros.
    fn give_zeros(&mut self, zeros_end: u64) -> Result<u64, Fault> {
        // At a multiple of `ZEROS_ALIGN`, elements of any type are aligned.
        let start = zeros_end.next_multiple_of(ZEROS_ALIGN);
        self.zeros = Some(start);
        start.checked_add(self.len()).filter(|end| end - ZEROS_START <= ZEROS_LEN_MAX).ok_or_else(
            || {
                ErrorKind::Overflow.fault(format!(
                    "is a meta tensor of shape {:?}, with which the tensors without data pass \
                     {ZEROS_LEN_MAX} bytes; save them in several files",
                    self.shape
                ))
            },
        )
    }
}

/// The place of the end mark, and the offset of the next file. Refuses bytes after the last tensor
/// that are neither a mark nor another file. A file may end without a mark.
///
/// If a program writes several files into one file object, the reference implementation overwrites
/// the end mark with the next file.
fn read_end_mark(
    reader: &mut dyn RangeReader,
    end: u64,
    file_len: u64,
) -> ReadResult<(Range<u64>, Option<u64>)> {
    let mut room = [0; END_MARK_LEN as usize];
    let mark = &mut room[..END_MARK_LEN.min(file_len - end) as usize];
    reader.read_exact_at(end, mark)?;
    if mark.iter().all(|&byte| byte == 0) {
        return Ok((end..end + mark.len() as u64, None));
    }
    if is_tensorizer(mark) {
        return Ok((end..end + MAGIC.len() as u64, Some(end)));
    }
    let message = format!(
        "the last tensor that the file lists ends at byte {end}, and no end mark follows; the \
         program that saved it may have been stopped"
    );
    Err(ErrorKind::DataTrailing.stop(message))
}
