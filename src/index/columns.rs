//! The tensors of a catalog in the form that an index stores.
//!
//! The form is small. It is decoded in a few passes over numbers, which are read without being copied. A name is stored
//! without the prefix that it shares with the previous name. Tensors of the same dtype and shape have the same number.
//! A piece is expected to begin at the end of the previous piece in its shard, and only its distance from that end is
//! stored.

use std::borrow::Cow;
use std::collections::HashMap;

use bincode::{BorrowDecode, Encode};

use crate::cast::Cast;
use crate::catalog::tensors::{Lists, PieceRow, ROW_MAJOR, TensorColumns, WHOLE};
use crate::catalog::{Shard, ShardId};
use crate::dtype::Dtype;
use crate::strides::{are_nested, reach};
use crate::zeros::{ZEROS_LEN_MAX, ZEROS_START, are_zeros};

use super::frame::{List, Numbers};

/// The version of the columns, which has to be increased with every change of them. It is a part of the version of
/// each kind of file that has columns.
pub(super) const VERSION: u32 = 1;

/// Maximum number of bytes that a name can share with the previous name. It is limited, so that the
/// decoded names do not need many times the memory of the index.
const SHARED_MAX: usize = 250;

/// The reason why columns are not a valid catalog.
type Doubt = &'static str;

/// A dtype, a shape (index of a list), and the length in bytes of a tensor with both.
type KindOf = (Dtype, u32, u64);

/// All columns, in the order in which they are encoded.
#[derive(BorrowDecode, Encode)]
pub(super) struct Columns<'a> {
    /// Number of tensors.
    len: u64,
    /// Number of pieces of all tensors.
    pieces_len: u64,
    /// Length of all names together.
    names_len: u64,
    /// Number of bytes that each name shares with the previous name.
    shared: Numbers<'a>,
    /// Number of bytes of each name after the shared prefix.
    own: Numbers<'a>,
    /// The bytes of all names after the shared prefixes.
    text: Cow<'a, [u8]>,
    /// Names of the dtypes.
    dtypes: List<&'a str>,
    /// Length of each list.
    list_lens: List<u32>,
    /// Numbers of all lists.
    numbers: List<u64>,
    /// Combinations of dtype and shape. A shape is the index of a list.
    kinds: List<(u32, u32)>,
    /// For each tensor, the index of its combination of dtype and shape.
    kind_of: Numbers<'a>,
    /// Boxes: offset and shape, which are indexes of lists.
    boxes: List<(u32, u32)>,
    /// Number of pieces of each tensor. Empty if each tensor has one piece.
    piece_counts: Numbers<'a>,
    /// The shard of each piece.
    shards: Numbers<'a>,
    /// Box of each piece: 0 if it is a whole tensor, otherwise the index of the box plus one. Empty
    /// if all pieces are whole tensors.
    piece_boxes: Numbers<'a>,
    /// For each piece, the distance in bytes from the end of the previous piece in this shard, in
    /// zigzag coding. For the first piece it is the distance from the end of the description.
    distances: Numbers<'a>,
    /// Replicas: tensor, shard, box as in `piece_boxes`, and offset of the first byte.
    replicas: List<(u32, u32, u32, u64)>,
}

/// The columns of a view, in which tensors may be cast, and pieces may be parts of larger boxes that the shards store.
#[derive(BorrowDecode, Encode)]
pub(super) struct ViewColumns<'a> {
    columns: Columns<'a>,
    /// Names of the dtypes in the shards.
    stored_dtypes: List<&'a str>,
    /// The dtype of each tensor in the shards, as an index into `stored_dtypes`. Empty if no tensor
    /// is cast.
    stored: Numbers<'a>,
    /// The strides of each box: index of a list plus one, or 0 if its elements follow each other. Empty if the
    /// elements of all boxes follow each other.
    strides: List<u32>,
}

/// Encodes the tensors of a view. `shards` are the shards to which they refer.
pub(super) fn encode_view(tensors: &TensorColumns, shards: &[Shard]) -> ViewColumns<'static> {
    let mut dtypes: Vec<Dtype> = Vec::new();
    let stored = tensors.stored.iter().map(|&dtype| {
        let index = dtypes.iter().position(|other| *other == dtype).unwrap_or_else(|| {
            dtypes.push(dtype);
            dtypes.len() - 1
        });
        index as u64
    });
    ViewColumns {
        stored: stored.collect(),
        stored_dtypes: dtypes.iter().map(|dtype| dtype.name()).collect(),
        strides: List(tensors.strides.iter().map(|&list| strides_code(list)).collect()),
        columns: encode(tensors, shards),
    }
}

/// Encodes tensors. `shards` are the shards to which they refer.
fn encode(tensors: &TensorColumns, shards: &[Shard]) -> Columns<'static> {
    let mut dtypes: Vec<Dtype> = Vec::new();
    let mut known: HashMap<(Dtype, u32), u64> = HashMap::new();
    let mut kinds = Vec::new();
    let mut number_of = |(&dtype, &shape): (&Dtype, &u32)| {
        let index = dtypes.iter().position(|other| *other == dtype).unwrap_or_else(|| {
            dtypes.push(dtype);
            dtypes.len() - 1
        });
        *known.entry((dtype, shape)).or_insert_with(|| {
            kinds.push((index as u32, shape));
            kinds.len() as u64 - 1
        })
    };
    let kind_of = tensors.dtypes.iter().zip(&tensors.shapes).map(&mut number_of).collect();
    let (shared, text) = encode_names(tensors);
    let lists = &tensors.lists;
    let counts = || differences(&tensors.piece_ends);
    let single = counts().all(|count| count == 1);
    let piece_boxes = || tensors.pieces.iter().map(|row| u64::from(box_code(row.box_id)));
    let all_whole = piece_boxes().all(|box_id| box_id == 0);
    let none = || std::iter::empty().collect();
    Columns {
        len: tensors.len() as u64,
        pieces_len: tensors.pieces.len() as u64,
        names_len: tensors.names.len() as u64,
        own: name_lens(tensors).zip(&shared).map(|(len, shared)| len - shared).collect(),
        shared: shared.into_iter().collect(),
        text: text.into(),
        dtypes: dtypes.iter().map(|dtype| dtype.name()).collect(),
        list_lens: (0..lists.len()).map(|id| lists.get(id as u32).len() as u32).collect(),
        numbers: List(lists.numbers.clone()),
        kinds: List(kinds),
        kind_of,
        // Only views have casts, and pieces that are parts of larger stored boxes: see `ViewColumns`.
        boxes: List(tensors.boxes.clone()),
        piece_counts: if single { none() } else { counts().collect() },
        shards: tensors.pieces.iter().map(|row| u64::from(row.shard.0)).collect(),
        piece_boxes: if all_whole { none() } else { piece_boxes().collect() },
        distances: encode_starts(tensors, shards),
        replicas: tensors
            .replicas
            .iter()
            .map(|(tensor, row)| (*tensor, row.shard.0, box_code(row.box_id), row.start))
            .collect(),
    }
}

fn name_lens(tensors: &TensorColumns) -> impl Iterator<Item = u64> {
    (0..tensors.len()).map(|index| tensors.name(index).len() as u64)
}

/// The number of bytes that each name shares with the previous name, and the other bytes of all
/// names.
fn encode_names(tensors: &TensorColumns) -> (Vec<u64>, Vec<u8>) {
    let (mut shared, mut text) = (Vec::new(), Vec::new());
    let mut before: &[u8] = &[];
    for index in 0..tensors.len() {
        let name = tensors.name(index).as_bytes();
        let same = name.iter().zip(before).take_while(|(a, b)| a == b).count().min(SHARED_MAX);
        shared.push(same as u64);
        text.extend_from_slice(&name[same..]);
        before = name;
    }
    (shared, text)
}

fn encode_starts(tensors: &TensorColumns, shards: &[Shard]) -> Numbers<'static> {
    let mut ends: Vec<u64> = shards.iter().map(Shard::description_end).collect();
    let pieces = (0..tensors.len()).flat_map(|index| tensors.get(index).pieces());
    let distances = pieces.map(|piece| {
        let end = &mut ends[piece.shard.0 as usize];
        let distance = piece.range.start.wrapping_sub(*end) as i64;
        *end = piece.range.end;
        (distance << 1 ^ distance >> 63) as u64
    });
    distances.collect()
}

fn strides_code(list: u32) -> u32 {
    if list == ROW_MAJOR { 0 } else { list + 1 }
}

fn box_code(box_id: u32) -> u32 {
    if box_id == WHOLE { 0 } else { box_id + 1 }
}

fn differences(ends: &[u32]) -> impl Iterator<Item = u64> {
    let before = std::iter::once(&0).chain(ends);
    ends.iter().zip(before).map(|(end, before)| u64::from(end - before))
}

/// Decodes the tensors of `view`. `shards` are the shards to which they refer. Checks every
/// property on which readers depend, with one exception. It does not check that the pieces of a
/// tensor cover the tensor without overlap, but only that the sum of their sizes is the size of the
/// tensor.
pub(super) fn decode_view(view: ViewColumns<'_>, shards: &[Shard]) -> Result<TensorColumns, Doubt> {
    let columns = &view.columns;
    // The bytes limit the number of items for which memory is reserved.
    if !columns.shared.may_be(columns.len) || !columns.shards.may_be(columns.pieces_len) {
        return Err("has fewer tensors than it says");
    }
    let len = columns.len as usize;
    let (names, name_ends) = decode_names(columns, len)?;
    let lists = decode_lists(columns)?;
    let kinds = decode_kinds(columns, &lists)?;
    if !columns.boxes.iter().all(|&(a, b)| a.max(b) < lists.len() as u32) {
        return Err("has a box without an extent");
    }
    let strides: Vec<u32> = view.strides.0.iter().map(|code| code.wrapping_sub(1)).collect();
    if !(strides.is_empty() || strides.len() == columns.boxes.len())
        || !strides.iter().all(|&list| list == ROW_MAJOR || list < lists.len() as u32)
    {
        return Err("has a box without strides");
    }
    let mut tensors = TensorColumns {
        names,
        name_ends,
        dtypes: Vec::with_capacity(len),
        shapes: Vec::with_capacity(len),
        piece_ends: decode_ends(columns, len)?,
        lists,
        strides,
        ..TensorColumns::default()
    };
    let mut kind_of = columns.kind_of.reader();
    let mut rank = 0;
    for _ in 0..len {
        let kind = kind_of.next_u32().and_then(|kind| kinds.get(kind as usize));
        let &(dtype, shape, _) = kind.ok_or("has a tensor without a shape")?;
        rank = rank.max(tensors.lists.get(shape).len());
        tensors.dtypes.push(dtype);
        tensors.shapes.push(shape);
    }
    if !kind_of.is_done() {
        return Err("has shapes without a tensor");
    }
    tensors.stored = decode_stored(&view, &tensors)?;
    tensors.zeros = vec![0; rank];
    tensors.boxes.clone_from(&columns.boxes.0);
    tensors.pieces = decode_rows(columns, &tensors, &kinds, shards)?;
    tensors.replicas = decode_replicas(columns, &tensors, shards)?;
    Ok(tensors)
}

/// Decodes the dtype of each tensor in the shards. Empty if no tensor is cast.
fn decode_stored(view: &ViewColumns<'_>, tensors: &TensorColumns) -> Result<Vec<Dtype>, Doubt> {
    if view.stored.is_empty() {
        return Ok(Vec::new());
    }
    let known = view
        .stored_dtypes
        .iter()
        .map(|d| Dtype::from_name(d))
        .collect::<Option<Vec<Dtype>>>()
        .ok_or("has a dtype that is not known")?;
    let mut stored_of = view.stored.reader();
    let next = |&dtype: &Dtype| {
        let stored = *known.get(stored_of.next_u32()? as usize)?;
        (stored == dtype || Cast::new(stored, dtype).is_some()).then_some(stored)
    };
    let stored: Vec<Dtype> = tensors
        .dtypes
        .iter()
        .map(next)
        .collect::<Option<_>>()
        .ok_or("has a cast that is not known")?;
    if stored_of.is_done() { Ok(stored) } else { Err("has casts without a tensor") }
}

/// Decodes the combinations of dtype and shape, each with the length in bytes of such a tensor.
fn decode_kinds(columns: &Columns<'_>, lists: &Lists) -> Result<Vec<KindOf>, Doubt> {
    let known: Option<Vec<Dtype>> = columns.dtypes.iter().map(|d| Dtype::from_name(d)).collect();
    let dtypes = known.ok_or("has a dtype that is not known")?;
    let kind = |&(dtype, shape): &(u32, u32)| {
        let dtype = *dtypes.get(dtype as usize)?;
        let list = ((shape as usize) < lists.len()).then(|| lists.get(shape))?;
        Some((dtype, shape, len_of(dtype, list)?))
    };
    let kinds: Option<Vec<KindOf>> = columns.kinds.iter().map(kind).collect();
    kinds.ok_or("has a tensor without a length")
}

/// Decodes the places of all pieces. Refuses pieces that do not fill their tensors.
fn decode_rows(
    columns: &Columns<'_>,
    tensors: &TensorColumns,
    kinds: &[KindOf],
    shards: &[Shard],
) -> Result<Vec<PieceRow>, Doubt> {
    const PLACELESS: Doubt = "has a piece without a place";
    let mut kind_of = columns.kind_of.reader();
    let mut shard_of = columns.shards.reader();
    let mut box_of = (!columns.piece_boxes.is_empty()).then(|| columns.piece_boxes.reader());
    let mut distances = columns.distances.reader();
    let mut ends: Vec<u64> = shards.iter().map(Shard::description_end).collect();
    let mut check = Check { tensors, shards, lens: HashMap::new() };
    let mut rows: Vec<PieceRow> = Vec::with_capacity(columns.pieces_len as usize);
    let mut total = 0u64;
    for (index, &pieces_end) in tensors.piece_ends.iter().enumerate() {
        let (mut dtype, shape, mut len) = kinds[kind_of.next_u32().ok_or(PLACELESS)? as usize];
        total = total.checked_add(len).ok_or("has more bytes than there can be")?;
        if let Some(&stored) = tensors.stored.get(index) {
            len =
                len_of(stored, tensors.lists.get(shape)).ok_or("has a tensor without a length")?;
            dtype = stored;
        }
        let mut covered = 0u64;
        for _ in rows.len()..pieces_end as usize {
            let shard = shard_of.next_u32().ok_or(PLACELESS)?;
            let box_id =
                box_of.as_mut().map_or(Some(0), |boxes| boxes.next_u32()).ok_or(PLACELESS)?;
            let code = distances.next().ok_or(PLACELESS)?;
            let distance = (code >> 1) as i64 ^ -((code & 1) as i64);
            let end = ends.get_mut(shard as usize).ok_or("has a piece in no shard")?;
            let start = end.wrapping_add_signed(distance);
            let row = PieceRow { shard: ShardId(shard), box_id: box_id.wrapping_sub(1), start };
            let (piece_len, span) = check.len(&row, dtype, shape, len)?;
            if piece_len == 0 && len > 0 {
                return Err("has a piece without bytes");
            }
            *end = start + span;
            covered = covered.saturating_add(piece_len);
            rows.push(row);
        }
        if covered != len {
            return Err("has a tensor that its pieces do not fill");
        }
    }
    let done = shard_of.is_done() && distances.is_done() && box_of.is_none_or(|c| c.is_done());
    if done { Ok(rows) } else { Err("has places without a piece") }
}

fn decode_replicas(
    columns: &Columns<'_>,
    tensors: &TensorColumns,
    shards: &[Shard],
) -> Result<Vec<(u32, PieceRow)>, Doubt> {
    let mut check = Check { tensors, shards, lens: HashMap::new() };
    let mut replicas: Vec<(u32, PieceRow)> = Vec::with_capacity(columns.replicas.len());
    for &(tensor, shard, box_id, start) in &*columns.replicas {
        if tensor as usize >= tensors.len() {
            return Err("has a copy of no tensor");
        }
        let whole = tensors.get(tensor as usize);
        let row = PieceRow { shard: ShardId(shard), box_id: box_id.wrapping_sub(1), start };
        let len = len_of(whole.stored, whole.shape).ok_or("has a tensor without a length")?;
        check.len(&row, whole.stored, tensors.shapes[tensor as usize], len)?;
        if replicas.last().is_some_and(|(before, _)| *before > tensor) {
            return Err("has copies out of order");
        }
        replicas.push((tensor, row));
    }
    Ok(replicas)
}

/// Checks that pieces are inside their shard and their tensor.
struct Check<'a> {
    tensors: &'a TensorColumns,
    shards: &'a [Shard],
    /// Length and span of each box that is inside its tensor. The key is the box, and dtype and
    /// shape of the tensor.
    lens: HashMap<(u32, Dtype, u32), (u64, u64)>,
}

impl Check<'_> {
    /// The length in bytes of the piece at `row`, and the number of bytes from its first to its
    /// last byte. The tensor has the stored dtype `dtype`, the shape `shape` (index of a list) and
    /// the length `len`. Refuses a piece outside its shard or its tensor.
    #[inline]
    fn len(
        &mut self,
        row: &PieceRow,
        dtype: Dtype,
        shape: u32,
        len: u64,
    ) -> Result<(u64, u64), Doubt> {
        let found = if row.box_id == WHOLE {
            Some((len, len))
        } else {
            self.box_len(row.box_id, dtype, shape)
        };
        let (len, span) = found.ok_or("has a box outside its tensor")?;
        let shard = self.shards.get(row.shard.0 as usize).ok_or("has a piece in no shard")?;
        let end_max =
            if are_zeros(row.start) { ZEROS_START + ZEROS_LEN_MAX } else { shard.file_len };
        let end = row.start.checked_add(span).filter(|&end| end <= end_max);
        if end.is_none_or(|end| shard.is_description(&(row.start..end))) {
            return Err("has a piece outside its shard");
        }
        Ok((len, span))
    }

    fn box_len(&mut self, box_id: u32, dtype: Dtype, shape: u32) -> Option<(u64, u64)> {
        if let Some(&found) = self.lens.get(&(box_id, dtype, shape)) {
            return Some(found);
        }
        let lists = &self.tensors.lists;
        let &(offset, extent) = self.tensors.boxes.get(box_id as usize)?;
        let (offset, extent, whole) = (lists.get(offset), lists.get(extent), lists.get(shape));
        let inside = offset.len() == whole.len()
            && extent.len() == whole.len()
            && (0..whole.len()).all(|dim| {
                offset[dim].checked_add(extent[dim]).is_some_and(|end| end <= whole[dim])
            });
        let len = len_of(dtype, extent).filter(|_| inside)?;
        let span =
            match self.tensors.strides.get(box_id as usize).filter(|&&list| list != ROW_MAJOR) {
                None => len,
                Some(&strides) => {
                    let strides = lists.get(strides);
                    let fits = strides.len() == extent.len()
                        && strides.iter().all(|stride| stride.checked_mul(dtype.bits()).is_some())
                        && are_nested(extent, strides);
                    dtype.bits_of(&[reach(extent, strides).filter(|_| fits)?])? / 8
                }
            };
        self.lens.insert((box_id, dtype, shape), (len, span));
        Some((len, span))
    }
}

fn len_of(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let bits = dtype.bits_of(shape)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Decodes all names, and the end of each name. Refuses names that are out of order or occur twice.
fn decode_names(columns: &Columns<'_>, len: usize) -> Result<(String, Vec<u64>), Doubt> {
    let total = columns.names_len as usize;
    if total > columns.text.len() + len * SHARED_MAX {
        return Err("has no names");
    }
    let mut names: Vec<u8> = Vec::with_capacity(total);
    let mut ends = Vec::with_capacity(len);
    let (mut shared_of, mut own_of) = (columns.shared.reader(), columns.own.reader());
    let mut text = &*columns.text;
    let mut before = 0..0;
    for _ in 0..len {
        let (shared, own) = shared_of.next_u32().zip(own_of.next_u32()).ok_or("has no names")?;
        let (shared, own) = (shared as usize, own as usize);
        if shared > before.len().min(SHARED_MAX)
            || own > text.len()
            || names.len() + shared + own > total
        {
            return Err("has a name that does not end");
        }
        let (own, after) = text.split_at(own);
        // The previous name has to be smaller. Both names share a prefix, so only the bytes after
        // the prefix are compared. In most cases the first of these bytes decides. The first name
        // has no previous name.
        let rest_before = &names[before.start + shared..before.end];
        let first_tells = matches!((rest_before.first(), own.first()), (Some(a), Some(b)) if a < b);
        if !first_tells && !ends.is_empty() && rest_before >= own {
            return Err("has names out of order");
        }
        let start = names.len();
        names.extend_from_within(before.start..before.start + shared);
        names.extend_from_slice(own);
        text = after;
        before = start..names.len();
        ends.push(names.len() as u64);
    }
    if names.len() != total || !(text.is_empty() && shared_of.is_done() && own_of.is_done()) {
        return Err("has names of another length");
    }
    let joined = String::from_utf8(names).map_err(|_| "has a name that is no text")?;
    if ends.iter().all(|&end| joined.is_char_boundary(end as usize)) {
        Ok((joined, ends))
    } else {
        Err("has a name that is no text")
    }
}

fn decode_lists(columns: &Columns<'_>) -> Result<Lists, Doubt> {
    let mut end = 0u32;
    let next = |len: &u32| {
        end = end.checked_add(*len)?;
        Some(end)
    };
    let ends: Vec<u32> =
        columns.list_lens.iter().map(next).collect::<Option<_>>().ok_or("has lists too long")?;
    if end as usize != columns.numbers.len() {
        return Err("has lists of another length");
    }
    Ok(Lists { numbers: columns.numbers.to_vec(), ends })
}

/// Decodes the end of the pieces of each of `len` tensors.
fn decode_ends(columns: &Columns<'_>, len: usize) -> Result<Vec<u32>, Doubt> {
    let total = u32::try_from(columns.pieces_len).map_err(|_| "has too many pieces")?;
    if columns.piece_counts.is_empty() && len == total as usize {
        return Ok((1..=total).collect());
    }
    let mut counts = columns.piece_counts.reader();
    let mut end = 0u32;
    let next = |_| {
        let count = counts.next_u32().filter(|&count| count > 0)?;
        end = end.checked_add(count)?;
        Some(end)
    };
    let ends: Vec<u32> =
        (0..len).map(next).collect::<Option<_>>().ok_or("has a tensor without pieces")?;
    if end != total || !counts.is_done() {
        return Err("has pieces without a tensor");
    }
    Ok(ends)
}
