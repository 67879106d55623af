//! A strict reader of zip archives in the form that `torch.save` writes: uncompressed entries in
//! one folder.
//!
//! The central directory lists the entries, and the header in front of each entry has to agree with it. An archive
//! that can be read in two ways is refused. Examples are two entries of one name, entries that overlap, and bytes
//! behind the end record.

use std::collections::HashMap;
use std::ops::Range;

use super::{ReadResult, ReadStop, TORCHSCRIPT, le};
use crate::error::{ErrorKind, quoted};
use crate::format::range_reader::RangeReader;

/// Signature of the header in front of an entry. An archive begins with it.
pub(super) const LOCAL_MAGIC: &[u8; 4] = b"PK\x03\x04";
const CENTRAL_MAGIC: &[u8; 4] = b"PK\x01\x02";
const END_MAGIC: &[u8; 4] = b"PK\x05\x06";
const ZIP64_END_MAGIC: &[u8; 4] = b"PK\x06\x06";
const ZIP64_LOCATOR_MAGIC: &[u8; 4] = b"PK\x06\x07";

/// Lengths in bytes of the fixed parts of the records.
const LOCAL_LEN: u64 = 30;
const CENTRAL_LEN: usize = 46;
const END_LEN: u64 = 22;
const ZIP64_END_LEN: u64 = 56;
const ZIP64_LOCATOR_LEN: u64 = 20;

/// Maximum length of a central directory in bytes. It is enough for about a million entries.
const DIRECTORY_LEN_MAX: u64 = 64 << 20;

/// General purpose flags. `SIZES_FOLLOW`: sizes follow the data. `ENCRYPTED`: one of three kinds of
/// encryption.
const SIZES_FOLLOW: u16 = 1 << 3;
const ENCRYPTED: u16 = 1 | 1 << 6 | 1 << 13;

/// The attribute with which DOS marks a folder.
const FOLDER_ATTRIBUTE: u64 = 1 << 4;

/// The identifier of the extra field that has numbers of 64 bits.
const ZIP64_EXTRA: u16 = 1;

/// The directory of an archive.
#[derive(Debug)]
pub(super) struct Archive {
    /// Offset of the first byte of the archive in its file.
    start: u64,
    /// Offset of the central directory in the file.
    pub(super) directory: u64,
    entries: Vec<ZipEntry>,
    /// The name of the folder that contains all entries, with a slash at its end.
    folder: String,
    /// Indexes of entries, by their names in the folder.
    by_name: HashMap<String, u32>,
}

/// An entry of the central directory.
#[derive(Debug)]
struct ZipEntry {
    /// Offset of its header in the file.
    header: u64,
    /// The entry must end before this offset, at which the next header or the central directory
    /// begins.
    limit: u64,
    size: u64,
    crc: u32,
    flags: u16,
    /// The compression method. It is 0 if the entry is not compressed, and then `size` is also the size of the entry in
    /// the archive.
    method: u16,
}

fn bad(what: impl std::fmt::Display) -> ReadStop {
    let message = format!("is a zip archive that is not valid: {what}; save or fetch it again");
    ErrorKind::HeaderDecode.stop(message)
}

fn compressed(name: &str, method: u16) -> ReadStop {
    ErrorKind::HeaderDecode.stop(format!(
        "has the entry {} compressed by method {method}; torch.save does not compress: write the archive \
         again without compression (`zip -0`)",
        quoted(name)
    ))
}

/// Numbers of the end record: the number of entries, and the length and offset of the central
/// directory.
#[derive(Debug, PartialEq)]
struct End {
    count: u64,
    len: u64,
    offset: u64,
}

impl Archive {
    /// Reads the directory of the archive that fills the bytes `range` of the file.
    pub(super) fn read(reader: &mut dyn RangeReader, range: Range<u64>) -> ReadResult<Archive> {
        let (end, directory_end) = read_end(reader, &range)?;
        let directory = range
            .start
            .checked_add(end.offset)
            .filter(|at| at.checked_add(end.len) == Some(directory_end))
            .ok_or_else(|| bad("the central directory does not end at its end record"))?;
        if end.len > DIRECTORY_LEN_MAX {
            return Err(ErrorKind::HeaderTooLarge.stop(format!(
                "has a central directory of {} bytes, tensorfs reads up to {DIRECTORY_LEN_MAX}",
                end.len
            )));
        }
        // The number of entries is checked before memory is allocated for the entries.
        if end.count > end.len / CENTRAL_LEN as u64 {
            return Err(bad(format_args!("{} entries in {} bytes", end.count, end.len)));
        }
        let mut bytes = vec![0; end.len as usize];
        reader.read_exact_at(directory, &mut bytes)?;
        let mut archive = Archive {
            start: range.start,
            directory,
            entries: Vec::new(),
            folder: String::new(),
            by_name: HashMap::new(),
        };
        archive.add_entries(&bytes, end.count)?;
        archive.limit_entries()?;
        archive.check_stored()?;
        Ok(archive)
    }

    /// Refuses compressed entries. In archives of TorchScript the programs are compressed, so such archives are
    /// refused because of their programs.
    fn check_stored(&self) -> ReadResult<()> {
        let all = self.by_name.iter().map(|(name, &index)| (name, &self.entries[index as usize]));
        let of_file =
            all.filter(|(_, entry)| entry.method != 0).min_by_key(|(_, entry)| entry.header);
        match of_file {
            Some((name, entry)) if !self.has(TORCHSCRIPT) => {
                Err(compressed(&self.whole_name(name), entry.method))
            }
            _ => Ok(()),
        }
    }

    fn add_entries(&mut self, bytes: &[u8], count: u64) -> ReadResult<()> {
        let mut rest = bytes;
        for number in 0..count {
            let short = || bad("the central directory ends within an entry");
            let fixed = rest.get(..CENTRAL_LEN).ok_or_else(short)?;
            if !fixed.starts_with(CENTRAL_MAGIC) {
                return Err(bad("the central directory has an entry that is none"));
            }
            let lens = [28, 30, 32].map(|at| le(&fixed[at..at + 2]) as usize);
            let len = CENTRAL_LEN + lens.iter().sum::<usize>();
            let name_end = CENTRAL_LEN + lens[0];
            let all = rest.get(..len).ok_or_else(short)?;
            rest = &rest[len..];
            let name = std::str::from_utf8(&all[CENTRAL_LEN..name_end])
                .map_err(|_| bad("the name of an entry is not UTF-8"))?;
            let entry = self.entry(name, fixed, &all[name_end..name_end + lens[1]])?;
            let folder = name.find('/').map_or("", |slash| &name[..=slash]);
            if number == 0 {
                folder.clone_into(&mut self.folder);
            }
            if folder.len() < 2 || folder != self.folder {
                let message =
                    format_args!("the entry {} is not in the folder of the first", quoted(name));
                return Err(bad(message));
            }
            let inner = &name[folder.len()..];
            // Programs other than torch write entries for folders.
            let is_folder = inner.is_empty() || inner.ends_with('/');
            if is_folder && entry.size > 0 {
                return Err(bad(format_args!("the folder {} has data", quoted(name))));
            }
            let index = self.entries.len() as u32;
            if self.by_name.insert(inner.to_owned(), index).is_some() {
                return Err(bad(format_args!("two entries are called {}", quoted(name))));
            }
            self.entries.push(entry);
        }
        if !rest.is_empty() {
            return Err(bad("the central directory has other entries than its end record counts"));
        }
        Ok(())
    }

    fn entry(&self, name: &str, fixed: &[u8], extra: &[u8]) -> ReadResult<ZipEntry> {
        let flags = le(&fixed[8..10]) as u16;
        if flags & ENCRYPTED != 0 {
            return Err(bad(format_args!("the entry {} is encrypted", quoted(name))));
        }
        let method = le(&fixed[10..12]) as u16;
        let mut numbers = [&fixed[24..28], &fixed[20..24], &fixed[42..46]].map(le);
        long_numbers(&mut numbers, extra)
            .ok_or_else(|| bad(format_args!("the long sizes of {} are missing", quoted(name))))?;
        let [size, packed, offset] = numbers;
        if size != packed && method == 0 {
            return Err(bad(format_args!(
                "the entry {} is stored, but has {packed} bytes of {size}",
                quoted(name)
            )));
        }
        // torch would not read the bytes of such an entry, so the tensor would have the previous
        // content of its memory.
        let is_folder = le(&fixed[38..42]) & FOLDER_ATTRIBUTE != 0 || name.ends_with('/');
        if is_folder && size != 0 {
            return Err(bad(format_args!(
                "the entry {} is marked as a folder, but has {size} bytes",
                quoted(name)
            )));
        }
        if le(&fixed[34..36]) != 0 {
            return Err(bad("an entry lies on another disk"));
        }
        let least = LOCAL_LEN + name.len() as u64;
        let header = self
            .start
            .checked_add(offset)
            .filter(|header| {
                let end = header.checked_add(least).and_then(|data| data.checked_add(packed));
                end.is_some_and(|end| end <= self.directory)
            })
            .ok_or_else(|| bad(format_args!("the entry {} ends past its end", quoted(name))))?;
        let crc = le(&fixed[16..20]) as u32;
        // The limit is too low by the length of extra fields. `limit_entries` raises it to the
        // offset of the next entry.
        let limit = header + least + packed;
        Ok(ZipEntry { header, limit, size: packed, crc, flags, method })
    }

    /// Sets the limit of every entry to the header of the next entry. Refuses entries that overlap.
    fn limit_entries(&mut self) -> ReadResult<()> {
        let mut order: Vec<u32> = (0..self.entries.len() as u32).collect();
        order.sort_unstable_by_key(|&index| self.entries[index as usize].header);
        if order.first().is_none_or(|&first| self.entries[first as usize].header != self.start) {
            return Err(bad("no entry begins at its first byte"));
        }
        for (position, &index) in order.iter().enumerate() {
            let following = order.get(position + 1);
            let next = following.map_or(self.directory, |&at| self.entries[at as usize].header);
            let entry = &mut self.entries[index as usize];
            if entry.limit > next {
                return Err(bad("two entries share bytes"));
            }
            entry.limit = next;
        }
        Ok(())
    }

    /// Whether there is an entry of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// The names of its entries.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// The names of its entries in the order of their bytes. Reading them in this order is cheap.
    pub(super) fn names_in_order(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.by_name.iter().collect();
        names.sort_unstable_by_key(|(_, index)| self.entries[**index as usize].header);
        names.into_iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The bytes, headers and data, of the entries for whose names `is_used` returns false.
    pub(super) fn spans_of_others(&self, is_used: impl Fn(&str) -> bool) -> Vec<Range<u64>> {
        let others = self.by_name.iter().filter(|(name, _)| !is_used(name));
        let entries = others.map(|(_, &index)| &self.entries[index as usize]);
        entries.map(|entry| entry.header..entry.limit).collect()
    }

    /// The CRC of the entry called `name`. `None` if the entry has none: an option of torch makes
    /// it write 0 as the CRC.
    pub(super) fn crc_of(&self, name: &str) -> Option<u32> {
        let index = *self.by_name.get(name)?;
        Some(self.entries[index as usize].crc).filter(|&crc| crc != 0)
    }

    /// The name of an entry, including the folder.
    pub(super) fn whole_name(&self, name: &str) -> String {
        format!("{}{name}", self.folder)
    }

    /// Length of the entry called `name` in bytes, from the directory alone. `None` if there is no
    /// such entry.
    pub(super) fn len_of(&self, name: &str) -> Option<u64> {
        let index = *self.by_name.get(name)?;
        Some(self.entries[index as usize].size)
    }

    /// The byte range of the data of the entry called `name`. The header of the entry is compared with the directory
    /// first. `None` if there is no such entry.
    pub(super) fn data(
        &self,
        reader: &mut dyn RangeReader,
        name: &str,
    ) -> ReadResult<Option<Range<u64>>> {
        let Some(&index) = self.by_name.get(name) else { return Ok(None) };
        let entry = &self.entries[index as usize];
        let differs = |what: &str| {
            bad(format_args!("the header in front of {} has another {what}", quoted(name)))
        };
        // `limit_entries` has checked that the fixed part of the header and the name end before the
        // limit.
        let name_len = self.folder.len() + name.len();
        let mut head = vec![0; LOCAL_LEN as usize + name_len];
        reader.read_exact_at(entry.header, &mut head)?;
        if !head.starts_with(LOCAL_MAGIC) {
            return Err(bad(format_args!("no header is in front of {}", quoted(name))));
        }
        let same_name = le(&head[26..28]) as usize == name_len
            && head[LOCAL_LEN as usize..]
                .strip_prefix(self.folder.as_bytes())
                .is_some_and(|inner| inner == name.as_bytes());
        if !same_name {
            return Err(differs("name"));
        }
        if le(&head[6..8]) as u16 != entry.flags {
            return Err(differs("set of flags"));
        }
        if le(&head[8..10]) as u16 != entry.method {
            return Err(differs("method"));
        }
        if entry.method != 0 {
            return Err(compressed(&self.whole_name(name), entry.method));
        }
        let extra_len = le(&head[28..30]);
        let data = entry.header + head.len() as u64 + extra_len;
        let range = data..data + entry.size;
        if range.end > entry.limit {
            return Err(bad("two entries share bytes"));
        }
        let mut sizes = [&head[22..26], &head[18..22]].map(le);
        if sizes.contains(&u64::from(u32::MAX)) {
            let mut extra = vec![0; extra_len as usize];
            reader.read_exact_at(entry.header + head.len() as u64, &mut extra)?;
            long_numbers(&mut sizes, &extra).ok_or_else(|| differs("size"))?;
        }
        let crc = le(&head[14..18]) as u32;
        let follow = entry.flags & SIZES_FOLLOW != 0;
        if sizes != [entry.size; 2] && !(follow && sizes == [0; 2]) {
            return Err(differs("size"));
        }
        if crc != entry.crc && !(follow && crc == 0) {
            return Err(differs("CRC"));
        }
        Ok(Some(range))
    }
}

/// Replaces the numbers that do not fit into 32 bits by the numbers of the ZIP64 extra field, in
/// their order. `None` if the field lacks a number.
fn long_numbers(numbers: &mut [u64], extra: &[u8]) -> Option<()> {
    const LONG: u64 = u32::MAX as u64;
    if !numbers.contains(&LONG) {
        return Some(());
    }
    let mut rest = extra;
    let mut long = loop {
        let (id, len) = (le(rest.get(..2)?), le(rest.get(2..4)?) as usize);
        let field = rest.get(4..4 + len)?;
        if id == u64::from(ZIP64_EXTRA) {
            break field;
        }
        rest = &rest[4 + len..];
    };
    for number in numbers.iter_mut().filter(|number| **number == LONG) {
        *number = le(long.get(..8)?);
        long = &long[8..];
    }
    Some(())
}

/// Offset of the first byte of the archive that ends at `end`, according to its end record. `None` if no archive ends
/// there.
pub(super) fn archive_start(reader: &mut dyn RangeReader, end: u64) -> ReadResult<Option<u64>> {
    let Some(at) = end.checked_sub(END_LEN) else { return Ok(None) };
    let mut bytes = [0; END_LEN as usize];
    reader.read_exact_at(at, &mut bytes)?;
    if !bytes.starts_with(END_MAGIC) || le(&bytes[20..22]) != 0 {
        return Ok(None);
    }
    let mut locator = [0; ZIP64_LOCATOR_LEN as usize];
    if let Some(before) = at.checked_sub(ZIP64_LOCATOR_LEN) {
        reader.read_exact_at(before, &mut locator)?;
        if locator.starts_with(ZIP64_LOCATOR_MAGIC) {
            let record = before.checked_sub(ZIP64_END_LEN);
            return Ok(record.and_then(|place| place.checked_sub(le(&locator[8..16]))));
        }
    }
    let [len, offset] = [12, 16].map(|at| le(&bytes[at..at + 4]));
    Ok(at.checked_sub(len).and_then(|directory| directory.checked_sub(offset)))
}

/// The end record of the archive in the bytes `range`, and the offset at which its central
/// directory has to end.
fn read_end(reader: &mut dyn RangeReader, range: &Range<u64>) -> ReadResult<(End, u64)> {
    let missing = || {
        let message = "is a zip archive whose end is missing or has a comment: the download or copy \
                       may be incomplete; save or fetch it again";
        ReadStop::from(ErrorKind::DataTruncated.fault(message))
    };
    let mut at = range.end.checked_sub(END_LEN).ok_or_else(missing)?;
    if at < range.start {
        return Err(missing());
    }
    let mut bytes = [0; END_LEN as usize];
    reader.read_exact_at(at, &mut bytes)?;
    if !bytes.starts_with(END_MAGIC) || le(&bytes[20..22]) != 0 {
        return Err(missing());
    }
    let [disk, directory_disk, on_disk, count] = [4, 6, 8, 10].map(|at| le(&bytes[at..at + 2]));
    let [len, offset] = [12, 16].map(|at| le(&bytes[at..at + 4]));
    let several = || bad("it is one of several disks");
    if disk != 0 || directory_disk != 0 {
        return Err(several());
    }
    let is_short = [on_disk, count].iter().all(|&number| number < 0xffff)
        && [len, offset].iter().all(|&number| number < 0xffff_ffff);
    let short = End { count, len, offset };
    if on_disk != count {
        return Err(bad("its end record has two counts of entries"));
    }
    let mut locator = [0; ZIP64_LOCATOR_LEN as usize];
    let before = at.checked_sub(ZIP64_LOCATOR_LEN).filter(|before| *before >= range.start);
    if let Some(before) = before {
        reader.read_exact_at(before, &mut locator)?;
        at = if locator.starts_with(ZIP64_LOCATOR_MAGIC) { before } else { at };
    }
    if !locator.starts_with(ZIP64_LOCATOR_MAGIC) {
        return if is_short { Ok((short, at)) } else { Err(bad("its long end record is missing")) };
    }
    let place = at
        .checked_sub(ZIP64_END_LEN)
        .filter(|place| *place >= range.start)
        .ok_or_else(|| bad("its long end record is missing"))?;
    let mut bytes = [0; ZIP64_END_LEN as usize];
    reader.read_exact_at(place, &mut bytes)?;
    let told = range.start.checked_add(le(&locator[8..16]));
    let is_record = bytes.starts_with(ZIP64_END_MAGIC) && le(&bytes[4..12]) == ZIP64_END_LEN - 12;
    if told != Some(place) || !is_record {
        return Err(bad("its long end record is not where its locator says"));
    }
    let disks = [&bytes[16..20], &bytes[20..24], &locator[4..8]].map(le);
    if disks != [0; 3] || le(&locator[16..20]) > 1 {
        return Err(several());
    }
    let [on_disk, count, len, offset] = [24, 32, 40, 48].map(|at| le(&bytes[at..at + 8]));
    let agrees = |short: u64, long: u64, all: u64| short == long || short == all;
    let same = agrees(short.count, count, 0xffff)
        && agrees(short.len, len, 0xffff_ffff)
        && agrees(short.offset, offset, 0xffff_ffff);
    if !same || on_disk != count {
        return Err(bad("its two end records differ"));
    }
    Ok((End { count, len, offset }, place))
}
