//! The tensors of a catalog, stored in columns: a few large vectors instead of several allocations
//! per tensor. A checkpoint may have a million tensors.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use super::ShardId;
use super::heads::Stored;
use crate::cast::Cast;
use crate::dtype::{Dtype, TensorFacts};
use crate::strides::reach;
use crate::zeros::are_zeros;

/// Index of a list in `Lists`.
pub(crate) type ListId = u32;

/// Stands for a piece that is its whole tensor.
pub(crate) const WHOLE: u32 = u32::MAX;

/// Stands for the strides of a box whose elements follow each other in its shard.
pub(crate) const ROW_MAJOR: ListId = u32::MAX;

/// Maximum of `Builder::rows`, which counts tensors, pieces and the numbers of their boxes. Indexes have 32 bits.
pub(super) const ROWS_MAX: usize = (u32::MAX / 2) as usize;

/// Lists of numbers, which are shapes and offsets of boxes. Equal lists are stored once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lists {
    /// All lists, one after another.
    pub(crate) numbers: Vec<u64>,
    /// End of each list in `numbers`.
    pub(crate) ends: Vec<u32>,
}

impl Lists {
    /// The list `id`.
    #[inline]
    pub(crate) fn get(&self, id: ListId) -> &[u64] {
        let index = id as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.numbers[start as usize..self.ends[index] as usize]
    }

    /// Number of lists.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }
}

/// A piece: its place in a shard, and its box in the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceRow {
    pub(crate) shard: ShardId,
    /// Index of its box, or `WHOLE`.
    pub(crate) box_id: u32,
    /// Offset of its first byte in the shard.
    pub(crate) start: u64,
}

/// The columns. The tensors are sorted by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TensorColumns {
    /// All names, one after another.
    pub(crate) names: String,
    /// End of each name in `names`.
    pub(crate) name_ends: Vec<u64>,
    pub(crate) dtypes: Vec<Dtype>,
    /// The dtype of each tensor in the shards. Empty if all are equal to `dtypes`.
    pub(crate) stored: Vec<Dtype>,
    pub(crate) shapes: Vec<ListId>,
    /// For each tensor, the end of its pieces in `pieces`.
    pub(crate) piece_ends: Vec<u32>,
    pub(crate) pieces: Vec<PieceRow>,
    /// Replicas of pieces, each with the index of its tensor, sorted by this index.
    pub(crate) replicas: Vec<(u32, PieceRow)>,
    /// The boxes: index of the offset and index of the shape in `lists`.
    pub(crate) boxes: Vec<(ListId, ListId)>,
    /// For each box, the index of its strides in its shard, or `ROW_MAJOR`. Empty if all are
    /// `ROW_MAJOR`.
    pub(crate) strides: Vec<ListId>,
    pub(crate) lists: Lists,
    /// As many zeros as the longest shape has dimensions. They are the offset of whole pieces.
    pub(crate) zeros: Vec<u64>,
}

/// One tensor of a catalog.
///
/// ```
/// use tensorfs::Checkpoint;
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// for tensor in checkpoint.catalog().tensors() {
///     println!("{} {} {:?}", tensor.name, tensor.dtype, tensor.shape);
/// }
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Name.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Element type in the shards. It differs from `dtype` if a view casts the tensor.
    pub stored: Dtype,
    /// Extent of each dimension, outermost first.
    pub shape: &'a [u64],
    /// Length in bytes.
    pub len: u64,
    columns: &'a TensorColumns,
    index: u32,
}

/// The part of a tensor that one shard has. It is a box of the tensor. Its elements follow each other in the shard,
/// or have strides.
///
/// ```
/// use tensorfs::Checkpoint;
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let catalog = checkpoint.catalog();
/// for piece in catalog.tensor_at(0).pieces() {
///     println!("{}: bytes {:?}", catalog.shard(piece.shard).name, piece.range);
/// }
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The shard that has it.
    pub shard: ShardId,
    /// Range in the shard file from the first byte of the piece to its last byte. If the piece has strides, some
    /// bytes in this range may not belong to it. A range from 2^63 on, where no file has bytes, means that all
    /// elements are zeros: see `is_zeros`.
    pub range: Range<u64>,
    /// First index of the box in each dimension of the tensor.
    pub offset: &'a [u64],
    /// Extent of the box in each dimension.
    pub shape: &'a [u64],
    /// For each dimension, the number of elements in the shard from one index to the next. It is 0 for a dimension
    /// that repeats its elements. `None` if the bytes of the piece follow each other.
    pub strides: Option<&'a [u64]>,
    /// Number of bytes that belong to the piece.
    len: u64,
}

impl Piece<'_> {
    /// Number of bytes that belong to the piece. Bytes between its elements are not counted.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether its elements are zeros that are not stored in the shard. An example is a tensor of
    /// which a tensorizer file has only the shape.
    pub fn is_zeros(&self) -> bool {
        are_zeros(self.range.start)
    }

    /// Whether its bytes follow each other.
    pub fn is_contiguous(&self) -> bool {
        self.strides.is_none()
    }
}

impl TensorColumns {
    pub(crate) fn len(&self) -> usize {
        self.name_ends.len()
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> Tensor<'_> {
        let (dtype, shape) = (self.dtypes[index], self.lists.get(self.shapes[index]));
        Tensor {
            name: self.name(index),
            dtype,
            stored: self.stored.get(index).copied().unwrap_or(dtype),
            shape,
            len: len(dtype, shape),
            columns: self,
            index: index as u32,
        }
    }

    /// The sum for `Catalog::data_len`. No tensor has 2^64 bits or more: see `Dtype::bits_of`.
    pub(super) fn data_len(&self) -> u64 {
        // Many tensors have the same shape, so each product is computed once. Some lists are
        // offsets, whose product may overflow, so the products saturate.
        let product = |product: u64, &number: &u64| product.saturating_mul(number);
        let counts: Vec<u64> = (0..self.lists.len())
            .map(|id| self.lists.get(id as ListId).iter().fold(1, product))
            .collect();
        let lens = self
            .dtypes
            .iter()
            .zip(&self.shapes)
            .map(|(dtype, &shape)| counts[shape as usize] * dtype.bits() / 8);
        lens.fold(0, u64::saturating_add)
    }

    #[inline]
    pub(crate) fn name(&self, index: usize) -> &str {
        let start = if index == 0 { 0 } else { self.name_ends[index - 1] };
        &self.names[start as usize..self.name_ends[index] as usize]
    }

    /// Index of the tensor called `name`.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.name(middle).cmp(name) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Equal => return Some(middle),
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }
}

impl<'a> Tensor<'a> {
    /// Its index in the catalog.
    pub fn position(&self) -> usize {
        self.index as usize
    }

    /// The facts that the shards record about the tensor.
    pub(crate) fn facts(&self) -> TensorFacts {
        TensorFacts { dtype: self.stored }
    }

    /// The pieces that cover it once, sorted by shard and offset. Empty pieces are left out, unless
    /// the tensor is empty.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = Piece<'a>> + Clone + use<'a> {
        let tensor = *self;
        self.rows().iter().map(move |row| tensor.piece(row))
    }

    /// The cast of its elements. `None` if the shards store the elements in the same type.
    #[doc(hidden)]
    pub fn cast(&self) -> Option<Cast> {
        Cast::new(self.stored, self.dtype)
    }

    /// Whether no shard stores any of its elements, so that they are zeros before a cast. Cast zeros of `F8_E8M0` are
    /// not zeros, because they stand for 2^-127.
    #[doc(hidden)]
    pub fn is_stored_zeros(&self) -> bool {
        self.pieces().all(|piece| piece.is_zeros())
    }

    /// Its first piece.
    pub fn first_piece(&self) -> Piece<'a> {
        self.piece(&self.rows()[0])
    }

    #[inline]
    fn rows(&self) -> &'a [PieceRow] {
        let (columns, index) = (self.columns, self.index as usize);
        let start = if index == 0 { 0 } else { columns.piece_ends[index - 1] };
        &columns.pieces[start as usize..columns.piece_ends[index] as usize]
    }

    /// Replicas of its pieces, which should have the same bytes as the pieces.
    pub fn replicas(&self) -> impl ExactSizeIterator<Item = Piece<'a>> + Clone + use<'a> {
        let all = &self.columns.replicas;
        let start = all.partition_point(|(tensor, _)| *tensor < self.index);
        let end = start + all[start..].partition_point(|(tensor, _)| *tensor == self.index);
        let tensor = *self;
        all[start..end].iter().map(move |(_, row)| tensor.piece(row))
    }

    #[inline]
    fn piece(&self, row: &PieceRow) -> Piece<'a> {
        let columns = self.columns;
        let (offset, shape) = match columns.boxes.get(row.box_id as usize) {
            Some(&(offset, shape)) => (columns.lists.get(offset), columns.lists.get(shape)),
            None => (&columns.zeros[..self.shape.len()], self.shape),
        };
        let len = len(self.stored, shape);
        let list = columns.strides.get(row.box_id as usize).filter(|list| **list != ROW_MAJOR);
        let strides = list.map(|list| columns.lists.get(*list));
        let span = strides.map_or(len, |strides| span(self.stored, shape, strides));
        let range = row.start..row.start + span;
        Piece { shard: row.shard, range, offset, shape, strides, len }
    }
}

/// Number of bytes from the first element of a box to its last. The strides must have been checked.
pub(crate) fn span(dtype: Dtype, shape: &[u64], strides: &[u64]) -> u64 {
    reach(shape, strides).unwrap_or(0) * dtype.bits() / 8
}

/// Number of bytes of a box. The box must have been checked, so that no product overflows.
#[inline]
fn len(dtype: Dtype, shape: &[u64]) -> u64 {
    shape.iter().product::<u64>() * dtype.bits() / 8
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tensor { name, dtype, shape, .. } = self;
        write!(f, "{name:?} {dtype} {shape:?}")
    }
}

/// A piece in the form in which a header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BoxSlice {
    pub(super) shard: ShardId,
    /// The byte range in the shard file, from the beginning of the file.
    pub(super) range: Range<u64>,
    pub(super) offset: Vec<u64>,
    pub(super) shape: Vec<u64>,
    /// Its strides in the shard. `None` if its bytes follow each other.
    pub(super) strides: Option<Vec<u64>>,
}

impl BoxSlice {
    /// The piece `stored` of `shard`, from the index `offset` of its tensor on.
    pub(super) fn of(stored: Stored<'_>, shard: ShardId, offset: &[u64]) -> BoxSlice {
        let Stored { facts, shape, start, strides, .. } = stored;
        // The header was checked, so the piece ends within its file.
        let len = match strides {
            Some(strides) => span(facts.dtype, shape, strides),
            None => facts.dtype.bits_of(shape).unwrap_or(0) / 8,
        };
        BoxSlice {
            shard,
            range: start..start + len,
            offset: offset.to_vec(),
            shape: shape.to_vec(),
            strides: strides.map(<[u64]>::to_vec),
        }
    }
}

/// Builder of the columns.
#[derive(Default)]
pub(super) struct Builder {
    columns: TensorColumns,
    known_lists: HashMap<Vec<u64>, ListId>,
    known_boxes: HashMap<(ListId, ListId, ListId), u32>,
}

impl Builder {
    /// A builder that reserves memory for tensors whose names have these lengths.
    pub(super) fn with_room(lens: impl Iterator<Item = usize>) -> Builder {
        let (count, bytes) = lens.fold((0, 0), |(count, bytes), len| (count + 1, bytes + len));
        let mut builder = Builder::default();
        let columns = &mut builder.columns;
        columns.names.reserve_exact(bytes);
        columns.name_ends.reserve_exact(count);
        columns.dtypes.reserve_exact(count);
        columns.shapes.reserve_exact(count);
        columns.piece_ends.reserve_exact(count);
        builder
    }

    /// Adds a tensor with its pieces, which must cover it. The caller must add tensors in the order
    /// of their names, and at most `ROWS_MAX` tensors and pieces in all.
    pub(super) fn push(
        &mut self,
        name: &str,
        facts: TensorFacts,
        shape: &[u64],
        pieces: &[BoxSlice],
        replicas: &[BoxSlice],
    ) {
        let index = self.columns.len() as u32;
        for box_id in pieces {
            let row = self.row(box_id, shape);
            self.columns.pieces.push(row);
        }
        for box_id in replicas {
            let row = self.row(box_id, shape);
            self.columns.replicas.push((index, row));
        }
        self.push_head(name, facts, shape);
    }

    /// Number of tensors, pieces, replicas and boxes, plus the total length of all lists.
    pub(super) fn rows(&self) -> usize {
        let columns = &self.columns;
        let pieces = columns.pieces.len() + columns.replicas.len() + columns.boxes.len();
        columns.len() + pieces + columns.lists.numbers.len()
    }

    /// Adds a tensor that is the single piece `stored` of `shard`.
    pub(super) fn push_stored(&mut self, stored: Stored<'_>, shard: ShardId) {
        let Stored { name, facts, shape, start, strides } = stored;
        if strides.is_some() {
            let piece = BoxSlice::of(stored, shard, &vec![0; shape.len()]);
            return self.push(name, facts, shape, &[piece], &[]);
        }
        self.columns.pieces.push(PieceRow { shard, box_id: WHOLE, start });
        self.push_head(name, facts, shape);
    }

    fn push_head(&mut self, name: &str, facts: TensorFacts, shape: &[u64]) {
        let TensorFacts { dtype } = facts;
        let shape_id = self.list(shape);
        let columns = &mut self.columns;
        columns.names.push_str(name);
        columns.name_ends.push(columns.names.len() as u64);
        columns.dtypes.push(dtype);
        columns.shapes.push(shape_id);
        columns.piece_ends.push(columns.pieces.len() as u32);
        if columns.zeros.len() < shape.len() {
            columns.zeros.resize(shape.len(), 0);
        }
    }

    /// Finishes the columns. Each tensor is cast to its dtype in `dtypes`.
    pub(super) fn finish_cast(self, dtypes: Vec<Dtype>) -> TensorColumns {
        if dtypes == self.columns.dtypes {
            return self.columns;
        }
        TensorColumns { stored: self.columns.dtypes, dtypes, ..self.columns }
    }

    pub(super) fn finish(self) -> TensorColumns {
        self.columns
    }

    fn row(&mut self, box_id: &BoxSlice, whole: &[u64]) -> PieceRow {
        PieceRow {
            shard: box_id.shard,
            box_id: self.box_id(box_id, whole),
            start: box_id.range.start,
        }
    }

    fn box_id(&mut self, box_id: &BoxSlice, whole: &[u64]) -> u32 {
        if box_id.shape == whole && box_id.strides.is_none() {
            return WHOLE;
        }
        let (offset, shape) = (self.list(&box_id.offset), self.list(&box_id.shape));
        let strides = box_id.strides.as_ref().map_or(ROW_MAJOR, |list| self.list(list));
        let columns = &mut self.columns;
        *self.known_boxes.entry((offset, shape, strides)).or_insert_with(|| {
            if strides != ROW_MAJOR && columns.strides.is_empty() {
                columns.strides.resize(columns.boxes.len(), ROW_MAJOR);
            }
            if strides != ROW_MAJOR || !columns.strides.is_empty() {
                columns.strides.push(strides);
            }
            columns.boxes.push((offset, shape));
            columns.boxes.len() as u32 - 1
        })
    }

    fn list(&mut self, list: &[u64]) -> ListId {
        if let Some(&id) = self.known_lists.get(list) {
            return id;
        }
        let lists = &mut self.columns.lists;
        lists.numbers.extend_from_slice(list);
        lists.ends.push(lists.numbers.len() as u32);
        let id = lists.len() as u32 - 1;
        self.known_lists.insert(list.to_vec(), id);
        id
    }
}
