//! The headers of the shards of a folder, in columns: a few large vectors for all of them, so that
//! a million tensors take little more than their names, and give it back at once.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::dtype::Dtype;
use crate::error::Fault;
use crate::format::dcp::{self, Placement};
use crate::format::flat::Flat;
use crate::format::safetensors::{Header, PREFIX_LEN};
use crate::sync::Mutex;

/// Marks what a note does not say.
const NONE: u32 = u32::MAX;

/// Headers that are read by several threads, until the first one is looked at.
#[derive(Debug)]
pub struct Heads {
    /// None once they are looked at.
    filling: Mutex<Option<Columns>>,
    filled: OnceLock<Columns>,
    /// Whether the text of a sharding note stays, as the metadata of a file that is shown alone.
    keeps_notes: bool,
}

/// Lists of numbers, each kept once.
#[derive(Debug, Default)]
struct Pool {
    numbers: Vec<u64>,
    ends: Vec<u64>,
    known: HashMap<Vec<u64>, u32>,
}

/// Strings one after another.
#[derive(Debug, Default)]
struct Texts {
    bytes: String,
    ends: Vec<u64>,
}

#[derive(Debug, Default)]
struct Columns {
    names: Texts,
    dtypes: Vec<Dtype>,
    /// Numbers of lists in `lists`.
    shapes: Vec<u32>,
    /// First bytes, from the end of the header on.
    starts: Vec<u64>,
    lists: Pool,
    /// Of files with a sharding note.
    places: Vec<Place>,
    logical_names: Texts,
}

/// What a sharding note says of one tensor: numbers in `lists` and `logical_names`, or `NONE`.
#[derive(Clone, Copy, Debug)]
struct Place {
    offset: u32,
    whole_shape: u32,
    logical_name: u32,
}

/// The header of one shard.
#[derive(Clone, Debug)]
pub struct Head {
    /// Where its tensors are; none where they are no longer needed.
    heads: Arc<Heads>,
    tensors: Range<usize>,
    /// The free-form strings, where the file has any.
    pub metadata: Option<BTreeMap<String, String>>,
    /// Length of the header with its padding; data begins at `8 + header_len`.
    pub header_len: u64,
    note: Option<Result<Note, Fault>>,
}

/// What a good sharding note says.
#[derive(Clone, Copy, Debug)]
struct Note {
    /// Where in `places` its tensors begin.
    first_place: usize,
    is_whole: bool,
    records_shapes: bool,
}

/// The tensors of a header, to be looked at.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    columns: &'a Columns,
    first: usize,
    len: usize,
    first_place: usize,
    data_start: u64,
}

/// A tensor, or a piece of one, as a shard holds it.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [u64],
    /// First byte in the shard, absolute.
    pub(super) start: u64,
}

/// What a sharding note says of a piece.
#[derive(Clone, Copy)]
pub(super) struct Placed<'a> {
    pub(super) logical_name: Option<&'a str>,
    pub(super) offset: &'a [u64],
    pub(super) whole_shape: Option<&'a [u64]>,
}

impl Pool {
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

impl Texts {
    fn push(&mut self, text: &str) {
        self.bytes.push_str(text);
        self.ends.push(self.bytes.len() as u64);
    }

    #[inline]
    fn get(&self, at: usize) -> &str {
        &self.bytes[range_of(&self.ends, at)]
    }
}

#[inline]
fn range_of(ends: &[u64], at: usize) -> Range<usize> {
    let start = if at == 0 { 0 } else { ends[at - 1] };
    start as usize..ends[at] as usize
}

impl Heads {
    /// For the shards of a folder: a plain note is not kept once it is read.
    pub fn without_notes() -> Heads {
        Heads { keeps_notes: false, ..Heads::default() }
    }

    /// Adds a header.
    pub fn add(self: &Arc<Self>, header: Header) -> Head {
        let placed = dcp::is_shard(header.metadata.as_ref()).then(|| dcp::placements(&header));
        let mut flat = Flat::from(&header);
        flat.metadata = header.metadata;
        self.push(flat, placed)
    }

    /// Adds a header. None where its sharding note is not plain: it is for `add`.
    pub fn add_flat(self: &Arc<Self>, mut flat: Flat) -> Option<Head> {
        let placed = match dcp::is_shard(flat.metadata.as_ref()) {
            true => Some(Ok(dcp::plain_placements(&flat)?)),
            false => None,
        };
        if !self.keeps_notes {
            forget_note(&mut flat.metadata);
        }
        Some(self.push(flat, placed))
    }

    fn push(self: &Arc<Self>, flat: Flat, placed: Option<Result<Vec<Placement>, Fault>>) -> Head {
        let mut filling = self.filling.lock();
        let Some(columns) = filling.as_mut() else {
            drop(filling);
            // These are being looked at already.
            return Arc::new(Heads::default()).push(flat, placed);
        };
        let tensors = columns.push(&flat);
        let note = placed.map(|placed| {
            placed.map(|places| Note {
                is_whole: dcp::are_whole(
                    &places,
                    flat.tensors().map(|(n, _, shape, _)| (n, shape)),
                ),
                records_shapes: places.iter().all(|place| place.whole_shape.is_some()),
                first_place: columns.push_places(&places),
            })
        });
        let Flat { metadata, header_len, .. } = flat;
        Head { heads: self.clone(), tensors, metadata, header_len, note }
    }

    fn columns(&self) -> &Columns {
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
            filling: Mutex::new(Some(Columns::default())),
            filled: OnceLock::new(),
            keeps_notes: true,
        }
    }
}

impl Columns {
    fn push(&mut self, flat: &Flat) -> Range<usize> {
        let first = self.starts.len();
        let mut before: (&[u64], u32) = (&[], NONE);
        for (name, dtype, shape, start) in flat.tensors() {
            self.names.push(name);
            self.dtypes.push(dtype);
            if before.1 == NONE || before.0 != shape {
                before = (shape, self.lists.add(shape));
            }
            self.shapes.push(before.1);
            self.starts.push(start);
        }
        first..self.starts.len()
    }

    fn push_places(&mut self, places: &[Placement]) -> usize {
        let first = self.places.len();
        for Placement { logical_name, offset, whole_shape } in places {
            let logical_name = logical_name.as_ref().map_or(NONE, |name| {
                self.logical_names.push(name);
                self.logical_names.ends.len() as u32 - 1
            });
            let offset = self.lists.add(offset);
            let whole_shape = whole_shape.as_ref().map_or(NONE, |shape| self.lists.add(shape));
            self.places.push(Place { offset, whole_shape, logical_name });
        }
        first
    }
}

/// Leaves of a sharding note that it was there.
fn forget_note(metadata: &mut Option<BTreeMap<String, String>>) {
    if let Some(note) = metadata.as_mut().and_then(|map| map.get_mut(dcp::SHARDING_INFO)) {
        *note = String::new();
    }
}

impl From<Header> for Arc<Head> {
    fn from(header: Header) -> Arc<Head> {
        Arc::new(Arc::new(Heads::default()).add(header))
    }
}

impl Head {
    /// Offset in the file at which tensor data begins.
    pub fn data_start(&self) -> u64 {
        PREFIX_LEN + self.header_len
    }

    /// Number of tensors and pieces.
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

    /// Whether a file with a sharding note holds whole tensors, as far as the note tells.
    pub fn is_whole(&self) -> bool {
        matches!(&self.note, Some(Ok(note)) if note.is_whole)
    }

    /// Whether the note of the file says the whole shape of every tensor.
    pub fn records_shapes(&self) -> bool {
        matches!(&self.note, Some(Ok(note)) if note.records_shapes)
    }

    /// The same without its tensors and what the note says, which a proved checkpoint no longer
    /// needs.
    pub fn without_tensors(&self) -> Head {
        let mut metadata = self.metadata.clone();
        forget_note(&mut metadata);
        let header_len = self.header_len;
        Head { heads: Arc::default(), tensors: 0..0, metadata, header_len, note: None }
    }

    /// Its tensors, in data order.
    pub(super) fn tensors(&self) -> Tensors<'_> {
        let first_place = match &self.note {
            Some(Ok(note)) => note.first_place,
            _ => 0,
        };
        let (first, len) = (self.tensors.start, self.tensors.len());
        let columns = self.heads.columns();
        Tensors { columns, first, len, first_place, data_start: self.data_start() }
    }

    /// Its tensors, each with what the note says of it.
    pub(super) fn pieces(&self) -> Result<Tensors<'_>, Fault> {
        match &self.note {
            None => Err(dcp::no_note()),
            Some(Err(fault)) => Err(fault.clone()),
            Some(Ok(_)) => Ok(self.tensors()),
        }
    }
}

impl<'a> Tensors<'a> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn name(&self, at: usize) -> &'a str {
        self.columns.names.get(self.first + at)
    }

    pub(super) fn get(&self, at: usize) -> Stored<'a> {
        let row = self.first + at;
        Stored {
            name: self.name(at),
            dtype: self.columns.dtypes[row],
            shape: self.columns.lists.get(self.columns.shapes[row]),
            // In range: the header was validated against the length of its file.
            start: self.data_start + self.columns.starts[row],
        }
    }

    /// How many numbers the shape at `at` has.
    pub(super) fn rank(&self, at: usize) -> usize {
        self.columns.lists.get(self.columns.shapes[self.first + at]).len()
    }

    pub(super) fn place(&self, at: usize) -> Placed<'a> {
        let columns = self.columns;
        let Place { offset, whole_shape, logical_name } = columns.places[self.first_place + at];
        Placed {
            logical_name: (logical_name != NONE)
                .then(|| columns.logical_names.get(logical_name as usize)),
            offset: columns.lists.get(offset),
            whole_shape: (whole_shape != NONE).then(|| columns.lists.get(whole_shape)),
        }
    }

    /// The name of the tensor that the piece at `at` belongs to.
    #[inline]
    pub(super) fn tensor_name(&self, at: usize) -> &'a str {
        let number = self.columns.places[self.first_place + at].logical_name;
        if number == NONE { self.name(at) } else { self.columns.logical_names.get(number as usize) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(name: &str) -> Flat {
        let text =
            format!("{{\"{name}\":{{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}}}");
        let len = PREFIX_LEN + text.len() as u64 + 2;
        Flat::parse(text.as_bytes(), len).unwrap_or_default()
    }

    #[test]
    fn a_header_that_comes_after_the_first_look_is_kept_apart_and_none_is_lost() {
        let heads = Arc::new(Heads::default());
        let add = |name| heads.add_flat(flat(name)).map(|head| (name, head));
        let mut all: Vec<(&str, Head)> = ["a", "b"].into_iter().filter_map(add).collect();
        assert_eq!(all[1].1.tensors().name(0), "b");
        all.extend(add("c"));
        assert_eq!(all.len(), 3);
        for (name, head) in &all {
            let stored = head.tensors().get(0);
            assert_eq!(
                (stored.name, stored.shape, stored.start),
                (*name, &[2][..], head.data_start())
            );
            assert!(head.without_tensors().is_empty() && !head.is_empty());
        }
    }

    #[test]
    fn of_a_plain_note_that_is_not_kept_it_stays_known_that_it_was_there() {
        let noted = || {
            let note = r#"{"a":{"saved_offsets":[0],"global_shape":[2]}}"#;
            let metadata = BTreeMap::from([(dcp::SHARDING_INFO.to_owned(), note.to_owned())]);
            let mut flat = flat("a");
            flat.metadata = Some(metadata);
            flat
        };
        for (heads, len) in [(Heads::default(), 46), (Heads::without_notes(), 0)] {
            let Some(head) = Arc::new(heads).add_flat(noted()) else { unreachable!() };
            assert!(head.is_noted() && head.is_whole() && head.records_shapes());
            assert_eq!(head.metadata.as_ref().map(|map| map[dcp::SHARDING_INFO].len()), Some(len));
            assert!(head.without_tensors().is_noted());
        }
    }
}
