//! The headers of the shards of a folder, stored in columns: a few large vectors for all headers. A
//! million tensors take little more memory than their names, and the memory is freed at once.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::dtype::TensorFacts;
use crate::error::Fault;
use crate::format::dcp;
use crate::format::deepspeed::{ZeroPart, slice_fault};
use crate::format::safetensors::Header;
use crate::format::{FileRank, PiecePlace, ShardDescription, TensorDescription};
use crate::sync::Mutex;

/// Stands for a field that a sharding note does not have.
const NONE: u32 = u32::MAX;

/// Headers to which several threads add, until the first tensor is looked up.
#[derive(Debug)]
pub struct Heads {
    /// The columns that are being filled. `None` after the first look-up.
    filling: Mutex<Option<HeadColumns>>,
    filled: OnceLock<HeadColumns>,
    /// Whether the text of a sharding note is kept. The text is needed if the file is shown alone,
    /// because the note is then part of the metadata of the shown file.
    keeps_notes: bool,
}

/// Lists of numbers. Equal lists are stored once.
#[derive(Debug, Default)]
struct NumberPool {
    numbers: Vec<u64>,
    ends: Vec<u64>,
    known: HashMap<Vec<u64>, u32>,
}

/// Strings that are stored one after another.
#[derive(Debug, Default)]
struct TextPool {
    bytes: String,
    ends: Vec<u64>,
}

#[derive(Debug, Default)]
struct HeadColumns {
    names: TextPool,
    facts: Vec<TensorFacts>,
    /// For each tensor, the index of its shape in `lists`.
    shapes: Vec<u32>,
    /// For each tensor, the offset of its first byte in the shard.
    starts: Vec<u64>,
    /// The index of each tensor that has strides, ascending, with the index of the strides in
    /// `lists`.
    strided: Vec<(usize, u32)>,
    lists: NumberPool,
    /// One entry for each tensor of the files that have a sharding note.
    places: Vec<NotePlace>,
    logical_names: TextPool,
}

/// The place of a tensor according to a sharding note. The fields are indexes into `lists` and
/// `logical_names`, or `NONE`.
#[derive(Clone, Copy, Debug)]
struct NotePlace {
    offset: u32,
    whole_shape: u32,
    logical_name: u32,
}

/// The header of one shard.
#[derive(Clone, Debug)]
pub struct Head {
    /// The columns that have its tensors. Empty if they are not needed any more.
    heads: Arc<Heads>,
    tensors: Range<usize>,
    /// The metadata of the file, which are strings by name. `None` if the file has no metadata.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The byte ranges of the shard that describe its tensors, ascending.
    pub described: Vec<Range<u64>>,
    /// Offset of the first byte of another shard in the same file, which is not shown.
    pub next_file: Option<u64>,
    /// Text for people about values of the file that are not shown.
    pub left_out: Option<String>,
    /// The rank that saved the file, if the file records it.
    pub rank: Option<FileRank>,
    /// The CRC of each tensor, in the order of the tensors, if it is the file of a rank. It is 0
    /// for a tensor without a CRC.
    pub(super) crcs: Vec<u32>,
    /// The facts about ranges of tensors, if it is a file of DeepSpeed.
    pub zero: Option<Arc<ZeroPart>>,
    note: Option<Result<Note, Fault>>,
}

/// A valid sharding note.
#[derive(Clone, Copy, Debug)]
struct Note {
    /// Index in `places` of its first tensor.
    first_place: usize,
    is_whole: bool,
    records_shapes: bool,
}

/// The tensors of one header, which can be looked up.
#[derive(Clone, Copy)]
pub(super) struct HeadTensors<'a> {
    columns: &'a HeadColumns,
    first: usize,
    len: usize,
    first_place: usize,
}

/// A tensor, or a piece of a tensor, that a shard has.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) name: &'a str,
    pub(super) facts: TensorFacts,
    pub(super) shape: &'a [u64],
    /// Offset of its first byte, from the beginning of the file.
    pub(super) start: u64,
    /// Its strides in elements. `None` if its elements follow each other.
    pub(super) strides: Option<&'a [u64]>,
}

/// The entry of a piece in a sharding note.
#[derive(Clone, Copy)]
pub(super) struct DcpEntry<'a> {
    pub(super) logical_name: Option<&'a str>,
    pub(super) offset: &'a [u64],
    pub(super) whole_shape: Option<&'a [u64]>,
}

impl NumberPool {
    fn add(&mut self, list: &[u64]) -> u32 {
        if let Some(&id) = self.known.get(list) {
            return id;
        }
        self.numbers.extend_from_slice(list);
        self.ends.push(self.numbers.len() as u64);
        let id = self.ends.len() as u32 - 1;
        self.known.insert(list.to_vec(), id);
        id
    }

    fn get(&self, id: u32) -> &[u64] {
        &self.numbers[range_of(&self.ends, id as usize)]
    }
}

impl TextPool {
    fn push(&mut self, text: &str) {
        self.bytes.push_str(text);
        self.ends.push(self.bytes.len() as u64);
    }

    #[inline]
    fn get(&self, index: usize) -> &str {
        &self.bytes[range_of(&self.ends, index)]
    }
}

#[inline]
fn range_of(ends: &[u64], index: usize) -> Range<usize> {
    let start = if index == 0 { 0 } else { ends[index - 1] };
    start as usize..ends[index] as usize
}

impl Heads {
    /// Columns for the shards of a folder. The text of sharding notes is not kept if the fast
    /// parser can read them.
    pub fn without_notes() -> Heads {
        Heads { keeps_notes: false, ..Heads::default() }
    }

    /// Adds the description of a shard in a format that has no sharding notes. A metadata key with
    /// the name of such a note is an ordinary key of the user. The description itself says which of
    /// its tensors are pieces.
    pub fn add_without_note(self: &Arc<Self>, mut shard: ShardDescription) -> Head {
        let places = shard.places.take();
        self.push(shard, places.map(Ok))
    }

    /// Adds the description of a shard, with its sharding note if it has one.
    pub fn add(self: &Arc<Self>, mut shard: ShardDescription) -> Head {
        let placed = dcp::is_shard(shard.metadata.as_ref()).then(|| {
            let plain = dcp::plain_placements(&shard);
            if plain.is_some() && !self.keeps_notes {
                forget_note(&mut shard.metadata);
            }
            plain.map_or_else(|| dcp::placements(&shard), Ok)
        });
        self.push(shard, placed)
    }

    fn push(
        self: &Arc<Self>,
        shard: ShardDescription,
        placed: Option<Result<Vec<PiecePlace>, Fault>>,
    ) -> Head {
        let mut filling = self.filling.lock();
        let Some(columns) = filling.as_mut() else {
            drop(filling);
            // Look-ups have begun, so nothing can be added to these columns any more. The shard
            // gets columns of its own.
            return Arc::new(Heads::default()).push(shard, placed);
        };
        let tensors = columns.push(&shard);
        let note = placed.map(|placed| {
            placed.map(|places| Note {
                is_whole: dcp::are_whole(&places, shard.tensors().map(|t| (t.name, t.shape))),
                records_shapes: places.iter().all(|place| place.whole_shape.is_some()),
                first_place: columns.push_places(&places),
            })
        });
        let ShardDescription { metadata, described, next_file, left_out, rank, crcs, zero, .. } =
            shard;
        let heads = self.clone();
        Head { heads, tensors, metadata, described, next_file, left_out, rank, crcs, zero, note }
    }

    fn columns(&self) -> &HeadColumns {
        self.filled.get_or_init(|| {
            let mut filling = self.filling.lock();
            let mut columns = filling.take().unwrap_or_default();
            columns.lists.known = HashMap::new();
            columns
        })
    }
}

impl Default for Heads {
    fn default() -> Heads {
        Heads {
            filling: Mutex::new(Some(HeadColumns::default())),
            filled: OnceLock::new(),
            keeps_notes: true,
        }
    }
}

impl HeadColumns {
    fn push(&mut self, shard: &ShardDescription) -> Range<usize> {
        let first = self.starts.len();
        let mut before: (&[u64], u32) = (&[], NONE);
        for TensorDescription { name, facts, shape, start } in shard.tensors() {
            self.names.push(name);
            self.facts.push(facts);
            if before.1 == NONE || before.0 != shape {
                before = (shape, self.lists.add(shape));
            }
            self.shapes.push(before.1);
            self.starts.push(start);
        }
        for (number, strides) in &shard.strided {
            let list = self.lists.add(strides);
            self.strided.push((first + *number as usize, list));
        }
        first..self.starts.len()
    }

    fn push_places(&mut self, places: &[PiecePlace]) -> usize {
        let first = self.places.len();
        for PiecePlace { logical_name, offset, whole_shape } in places {
            let logical_name = logical_name.as_ref().map_or(NONE, |name| {
                self.logical_names.push(name);
                self.logical_names.ends.len() as u32 - 1
            });
            let offset = self.lists.add(offset);
            let whole_shape = whole_shape.as_ref().map_or(NONE, |shape| self.lists.add(shape));
            self.places.push(NotePlace { offset, whole_shape, logical_name });
        }
        first
    }

    #[inline]
    fn strides(&self, row: usize) -> Option<&[u64]> {
        if self.strided.is_empty() {
            return None;
        }
        let found = self.strided.binary_search_by_key(&row, |(row, _)| *row).ok()?;
        Some(self.lists.get(self.strided[found].1))
    }
}

/// Replaces the text of the sharding note by an empty text, and keeps its key.
fn forget_note(metadata: &mut Option<BTreeMap<String, String>>) {
    if let Some(note) = metadata.as_mut().and_then(|map| map.get_mut(dcp::SHARDING_INFO)) {
        *note = String::new();
    }
}

impl From<Header> for Arc<Head> {
    fn from(header: Header) -> Arc<Head> {
        Arc::new(Arc::new(Heads::default()).add(header.into()))
    }
}

impl Head {
    /// Length of its description in bytes.
    pub fn description_len(&self) -> u64 {
        self.described.iter().map(|range| range.end - range.start).sum()
    }

    /// Number of tensors, including pieces.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether it has no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Whether the file has a sharding note.
    pub fn is_noted(&self) -> bool {
        dcp::is_shard(self.metadata.as_ref())
    }

    /// Whether a file with a sharding note holds only whole tensors, according to the note.
    pub fn is_whole(&self) -> bool {
        matches!(&self.note, Some(Ok(note)) if note.is_whole)
    }

    /// Whether the note of the file records the whole shape of every tensor.
    pub fn records_shapes(&self) -> bool {
        matches!(&self.note, Some(Ok(note)) if note.records_shapes)
    }

    /// Refuses the file if DeepSpeed records in it that several ranks share each tensor.
    pub(super) fn check_slices(&self) -> Result<(), Fault> {
        match self.zero.as_deref() {
            Some(ZeroPart::Model(model)) if model.slices > 1 => {
                Err(slice_fault(model.slices, "mp_world_size"))
            }
            _ => Ok(()),
        }
    }

    /// Whether the file needs other files of DeepSpeed: some of its tensors have their elements in
    /// other files, or it has ranges of elements whose tensors other files describe.
    pub fn is_zero_part(&self) -> bool {
        match self.zero.as_deref() {
            Some(ZeroPart::Model(model)) => !model.placeholders.is_empty(),
            Some(ZeroPart::Partition(_) | ZeroPart::Universal(_)) => true,
            None => false,
        }
    }

    /// A copy without tensors and sharding note. A proved checkpoint does not need them any more.
    pub fn without_tensors(&self) -> Head {
        let mut metadata = self.metadata.clone();
        forget_note(&mut metadata);
        Head {
            heads: Arc::default(),
            tensors: 0..0,
            metadata,
            described: self.described.clone(),
            next_file: self.next_file,
            left_out: None,
            rank: self.rank,
            crcs: Vec::new(),
            zero: None,
            note: None,
        }
    }

    /// Its tensors, in data order.
    pub(super) fn tensors(&self) -> HeadTensors<'_> {
        let first_place = match &self.note {
            Some(Ok(note)) => note.first_place,
            _ => 0,
        };
        let (first, len) = (self.tensors.start, self.tensors.len());
        let columns = self.heads.columns();
        HeadTensors { columns, first, len, first_place }
    }

    /// Its tensors, with their places from the sharding note. Fails if there is no valid note.
    pub(super) fn pieces(&self) -> Result<HeadTensors<'_>, Fault> {
        match &self.note {
            None => Err(dcp::no_note()),
            Some(Err(fault)) => Err(fault.clone()),
            Some(Ok(_)) => Ok(self.tensors()),
        }
    }
}

impl<'a> HeadTensors<'a> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn name(&self, index: usize) -> &'a str {
        self.columns.names.get(self.first + index)
    }

    pub(super) fn get(&self, index: usize) -> Stored<'a> {
        let row = self.first + index;
        Stored {
            name: self.name(index),
            facts: self.columns.facts[row],
            shape: self.columns.lists.get(self.columns.shapes[row]),
            start: self.columns.starts[row],
            strides: self.columns.strides(row),
        }
    }

    /// Number of dimensions of the tensor at `index`.
    pub(super) fn rank(&self, index: usize) -> usize {
        self.columns.lists.get(self.columns.shapes[self.first + index]).len()
    }

    pub(super) fn place(&self, index: usize) -> DcpEntry<'a> {
        let columns = self.columns;
        let NotePlace { offset, whole_shape, logical_name } =
            columns.places[self.first_place + index];
        DcpEntry {
            logical_name: (logical_name != NONE)
                .then(|| columns.logical_names.get(logical_name as usize)),
            offset: columns.lists.get(offset),
            whole_shape: (whole_shape != NONE).then(|| columns.lists.get(whole_shape)),
        }
    }

    /// The name of the tensor to which the piece at `index` belongs.
    #[inline]
    pub(super) fn tensor_name(&self, index: usize) -> &'a str {
        let number = self.columns.places[self.first_place + index].logical_name;
        if number == NONE {
            self.name(index)
        } else {
            self.columns.logical_names.get(number as usize)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::format::safetensors::Entry;

    fn shard(name: &str) -> ShardDescription {
        let entry = Entry {
            name: name.to_owned(),
            facts: Dtype::U8.into(),
            shape: vec![2],
            data_offsets: 0..2,
        };
        Header { metadata: None, tensors: vec![entry], header_len: 40 }.into()
    }

    #[test]
    fn a_header_that_comes_after_the_first_look_is_kept_apart_and_none_is_lost() {
        let heads = Arc::new(Heads::default());
        let add = |name| (name, heads.add(shard(name)));
        let mut all: Vec<(&str, Head)> = ["a", "b"].into_iter().map(add).collect();
        assert_eq!(all[1].1.tensors().name(0), "b");
        all.push(add("c"));
        assert_eq!(all.len(), 3);
        for (name, head) in &all {
            let stored = head.tensors().get(0);
            assert_eq!((stored.name, stored.shape, stored.start), (*name, &[2][..], 48));
            assert!(head.without_tensors().is_empty() && !head.is_empty());
        }
    }

    #[test]
    fn of_a_plain_note_that_is_not_kept_it_stays_known_that_it_was_there() {
        let noted = || {
            let note = r#"{"a":{"saved_offsets":[0],"global_shape":[2]}}"#;
            let metadata = BTreeMap::from([(dcp::SHARDING_INFO.to_owned(), note.to_owned())]);
            let mut shard = shard("a");
            shard.metadata = Some(metadata);
            shard
        };
        for (heads, len) in [(Heads::default(), 46), (Heads::without_notes(), 0)] {
            let head = Arc::new(heads).add(noted());
            assert!(head.is_noted() && head.is_whole() && head.records_shapes());
            assert_eq!(head.metadata.as_ref().map(|map| map[dcp::SHARDING_INFO].len()), Some(len));
            assert!(head.without_tensors().is_noted());
        }
    }
}
