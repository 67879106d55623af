//! Files of `torch.save` before torch 1.6. They have several pickles one after another. Then the data of each storage
//! follows, with the number of its elements in front.

use std::collections::HashMap;
use std::ops::Range;

use super::machine::{PICKLE_LEN_MAX, run_first};
use super::tensors::{LISTED_ID_LEN, StorageData, StorageId, storage_id};
use super::values::{Node, Part, Values};
use super::{ReadResult, TrainingState, describe, le, wrong};
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::description::ShardDescription;
use crate::format::range_reader::RangeReader;

/// The first pickle after its protocol: a magic number of torch.
pub(super) const MAGIC: [u8; 13] =
    [0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];

/// Maximum length of the first pickle in bytes.
pub(super) const FIRST_PICKLE_LEN_MAX: usize = 2 + 9 + MAGIC.len();

/// The value of the second pickle.
const PROTOCOL: i64 = 1001;

/// Number of bytes that are read first for the pickles. If these are too few, the number is
/// multiplied by `WINDOW_GROWTH`.
const WINDOW_LEN: u64 = 64 << 10;
const WINDOW_GROWTH: u64 = 4;

/// Whether a file that begins with `first` has this old form.
pub(super) fn is_legacy(first: &[u8]) -> bool {
    first_pickle_len(first).is_some()
}

/// The length of the first pickle, including its protocol and, since protocol 4, its frame.
fn first_pickle_len(bytes: &[u8]) -> Option<usize> {
    let magic = match bytes {
        [0x80, 2 | 3, magic @ ..] => magic,
        [0x80, 4 | 5, 0x95, 13, 0, 0, 0, 0, 0, 0, 0, magic @ ..] => magic,
        _ => return None,
    };
    magic.starts_with(&MAGIC).then(|| bytes.len() - magic.len() + MAGIC.len())
}

/// The pickles of a file that are used.
struct Pickles<'a> {
    object: Values<'a>,
    /// The keys of the storages in the order of their data.
    keys: Vec<&'a str>,
    /// Offset of the first byte behind the pickles.
    end: usize,
}

impl<'a> Pickles<'a> {
    /// Interprets the pickles at the beginning of `bytes`, which is the beginning of a file.
    fn of(bytes: &'a [u8]) -> Result<Pickles<'a>, Fault> {
        let first = first_pickle_len(bytes);
        let mut end = first.ok_or_else(|| wrong("does not begin as such a file"))?;
        let mut next = || {
            let values = run_first(&bytes[end..])?;
            end += values.pickle_len();
            Ok::<Values<'a>, Fault>(values)
        };
        let protocol = next()?;
        if protocol.int(protocol.root) != Some(PROTOCOL) {
            return Err(wrong(format!("its second pickle is not the number {PROTOCOL}")));
        }
        let machine = next()?;
        check_machine(&machine)?;
        let object = next()?;
        let list = next()?;
        let key = |part| match part {
            Part::Item(item) => list.text(item),
            _ => None,
        };
        let keys = match list.node(list.root) {
            Node::List(_) => list.parts(list.root).map(key).collect::<Option<Vec<&'a str>>>(),
            _ => None,
        }
        .ok_or_else(|| wrong("its fifth pickle is no list of keys"))?;
        Ok(Pickles { object, keys, end })
    }
}

/// Checks the third pickle, which describes the machine that saved the file: it must be
/// little-endian.
fn check_machine(machine: &Values<'_>) -> Result<(), Fault> {
    let little_endian = machine.parts(machine.root).find_map(|part| match part {
        Part::Pair(key, value) if machine.text(key) == Some("little_endian") => {
            Some(machine.node(value))
        }
        _ => None,
    });
    match little_endian {
        Some(Node::Bool(true)) => Ok(()),
        Some(Node::Bool(false)) => Err(wrong(
            "was saved by a big-endian machine; load it with torch and save it again on another one"
                .to_owned(),
        )),
        _ => Err(wrong(
            "does not say whether its bytes are little-endian; save it again".to_owned(),
        )),
    }
}

/// The bytes of the pickles of a file.
pub(super) fn read_pickles(reader: &mut dyn RangeReader) -> ReadResult<Vec<u8>> {
    let longest = reader.file_len().min(PICKLE_LEN_MAX);
    let mut len = WINDOW_LEN.min(longest);
    loop {
        let mut bytes = vec![0; len as usize];
        reader.read_exact_at(0, &mut bytes)?;
        match Pickles::of(&bytes).map(|pickles| pickles.end) {
            Ok(end) => {
                bytes.truncate(end);
                return Ok(bytes);
            }
            // The window may be too short. The error counts only if the window has reached its
            // maximum.
            Err(fault) if len == longest => return Err(fault.into()),
            Err(_) => len = len.saturating_mul(WINDOW_GROWTH).min(longest),
        }
    }
}

/// Parses a file of this old form.
pub(super) fn parse(
    reader: &mut dyn RangeReader,
    state: TrainingState,
) -> ReadResult<ShardDescription> {
    let bytes = read_pickles(reader)?;
    let pickles = Pickles::of(&bytes)?;
    let ranges = find_data(reader, &pickles)?;
    describe(&pickles.object, StorageData::Listed(ranges), &(0..reader.file_len()), state)
}

/// The storages that the pickle of the saved object uses, by their keys.
fn storages<'a>(object: &Values<'a>) -> Result<HashMap<&'a str, StorageId<'a>>, Fault> {
    let mut found = HashMap::new();
    for id in object.ids().filter(|&id| matches!(object.node(id), Node::Persistent(_))) {
        let storage = storage_id(object, id, LISTED_ID_LEN)?;
        let known = found.insert(storage.key, storage);
        if known.is_some_and(|known| known != storage) {
            return Err(wrong(format!("the storage {} has two types", quoted(storage.key))));
        }
    }
    Ok(found)
}

/// Finds the data of all storages. The data of each storage follows the data of the previous one.
fn find_data(
    reader: &mut dyn RangeReader,
    pickles: &Pickles<'_>,
) -> ReadResult<HashMap<String, Range<u64>>> {
    let storages = storages(&pickles.object)?;
    let file_len = reader.file_len();
    let mut ranges = HashMap::with_capacity(pickles.keys.len());
    let mut at = pickles.end as u64;
    for &key in &pickles.keys {
        let Some(storage) = storages.get(key) else {
            let message = format!("has data of the storage {}, which no tensor uses", quoted(key));
            return Err(ErrorKind::HeaderDecode.stop(message));
        };
        let start = at + 8;
        let end = storage.data_len().and_then(|len| start.checked_add(len));
        let Some(end) = end.filter(|&end| end <= file_len) else {
            return Err(ErrorKind::DataTruncated.stop(format!(
                "ends within the storage {} of {} elements: it has {file_len} bytes; fetch or copy it \
                 again",
                quoted(key),
                storage.numel
            )));
        };
        let mut numel = [0; 8];
        reader.read_exact_at(at, &mut numel)?;
        if le(&numel) != storage.numel {
            return Err(ErrorKind::SizeMismatch.stop(format!(
                "the storage {} has {} elements by its pickle and {} by its data",
                quoted(key),
                storage.numel,
                le(&numel)
            )));
        }
        if ranges.insert(key.to_owned(), start..end).is_some() {
            return Err(
                ErrorKind::HeaderDecode.stop(format!("has the storage {} twice", quoted(key)))
            );
        }
        at = end;
    }
    if at != file_len {
        let message = format!("has {} bytes behind its last storage", file_len - at);
        return Err(ErrorKind::DataTrailing.stop(message));
    }
    Ok(ranges)
}
