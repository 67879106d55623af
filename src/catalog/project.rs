//! Makes catalogs from a proved catalog. A tensor of a new catalog is a tensor of the proved one, under the same or
//! another name, or is joined from parts of such tensors.

use std::ops::Range;
use std::sync::Arc;

use super::Catalog;
use super::heads::Stored;
use super::tensors::{BoxSlice, Builder, Piece, ROWS_MAX, Tensor};
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault};
use crate::strided::{OuterBox, StridedCopy};
use crate::strides::{is_row_major, row_major};

/// A tensor of the new catalog.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projected<'a> {
    /// Its name.
    pub(crate) name: &'a str,
    /// Where its elements come from in the original catalog.
    pub(crate) from: ProjectedFrom<'a>,
    /// Its element type. If it differs from the type in the shards, the elements are cast.
    pub(crate) dtype: Dtype,
}

/// Where the elements of a projected tensor come from in the original catalog.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProjectedFrom<'a> {
    /// All elements of the tensor at this index.
    Whole(u32),
    /// Parts of one or more tensors.
    Parts(&'a TensorParts),
}

/// Parts of tensors that are joined along one dimension. The tensors have the same dtype, the same
/// number of dimensions, and the same extent in all other dimensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorParts {
    /// The dimension along which the tensors are cut and joined.
    pub(crate) dim: usize,
    /// At least one part: the index of its tensor, and the range of indices of the dimension.
    pub(crate) parts: Vec<(u32, Range<u64>)>,
}

impl Catalog {
    /// Makes the catalog of `tensors`. They must be sorted by name, and no name may occur twice.
    ///
    /// The new catalog is proved because this catalog is proved. The pieces of each tensor of this
    /// catalog cover the tensor once. So the intersections of the pieces with a part cover the part
    /// once, and the parts of a new tensor follow each other.
    ///
    /// # Errors
    /// `misaligned` if rows of sub-byte elements do not begin and end at whole bytes. `overflow` if
    /// a tensor is too large, or if there are too many pieces.
    pub(crate) fn project<'a>(
        &self,
        tensors: impl ExactSizeIterator<Item = Projected<'a>> + Clone,
    ) -> Result<Catalog, Fault> {
        let mut columns = Builder::with_room(tensors.clone().map(|tensor| tensor.name.len()));
        let dtypes = tensors.clone().map(|tensor| tensor.dtype).collect();
        for Projected { name, from, dtype } in tensors {
            let position = match from {
                ProjectedFrom::Whole(position) => position,
                ProjectedFrom::Parts(parts) => parts.parts[0].0,
            };
            let tensor = self.tensor_at(position as usize);
            let parts = match from {
                ProjectedFrom::Whole(_) => {
                    push_whole(&mut columns, name, &tensor);
                    continue;
                }
                ProjectedFrom::Parts(parts) => parts,
            };
            let joined = self.joined(parts).map_err(|fault| fault.tensor(name))?;
            if dtype.bits_of(&joined.shape).is_none() {
                let message = format!("shape {:?} as {dtype} passes 2^64 bits", joined.shape);
                return Err(ErrorKind::Overflow.fault(message).tensor(name));
            }
            let facts = tensor.facts();
            if joined.pieces.is_empty() {
                let Piece { shard, range: Range { start, .. }, .. } = tensor.first_piece();
                let shape = &joined.shape;
                columns.push_stored(Stored { name, facts, shape, start, strides: None }, shard);
            } else {
                columns.push(name, facts, &joined.shape, &joined.pieces, &joined.replicas);
            }
            if columns.rows() > ROWS_MAX {
                let message = "the view has more tensors and pieces than a catalog can have";
                return Err(ErrorKind::Overflow.fault(message).tensor(name));
            }
        }
        Ok(Catalog {
            shards: self.shards.clone(),
            columns: Arc::new(columns.finish_cast(dtypes)),
            metadata: self.metadata.clone(),
            shapes_recorded: self.shapes_recorded,
            notes: self.notes.clone(),
        })
    }

    /// Shape, pieces and replicas of a tensor that is joined from `parts`.
    fn joined(&self, TensorParts { dim, parts }: &TensorParts) -> Result<Joined, Fault> {
        let first = self.tensor_at(parts[0].0 as usize);
        let mut shape = first.shape.to_vec();
        shape[*dim] = parts.iter().fold(0, |sum, (_, range)| sum + (range.end - range.start));
        let mut joined = Joined { shape, pieces: Vec::new(), replicas: Vec::new() };
        let mut start = 0;
        for (position, range) in parts {
            let tensor = self.tensor_at(*position as usize);
            let place = PartPlace { dim: *dim, range, start, bits: tensor.stored.bits() };
            for piece in tensor.pieces() {
                joined.pieces.extend(place.of_piece(&piece)?);
            }
            for replica in tensor.replicas() {
                joined.replicas.extend(place.of_piece(&replica)?);
            }
            start += range.end - range.start;
        }
        joined.pieces.sort_by_key(|piece| (piece.shard, piece.range.start));
        if !first.stored.bits().is_multiple_of(8) {
            joined.check_bytes(first.stored.bits())?;
        }
        Ok(joined)
    }
}

/// A tensor that is joined from parts of other tensors. It has no pieces if it has no elements.
struct Joined {
    shape: Vec<u64>,
    pieces: Vec<BoxSlice>,
    replicas: Vec<BoxSlice>,
}

impl Joined {
    /// Refuses rows that do not begin and end at whole bytes, for elements of `bits` bits.
    fn check_bytes(&self, bits: u64) -> Result<(), Fault> {
        for piece in self.pieces.iter().chain(&self.replicas) {
            let to = OuterBox { shape: &self.shape, offset: &piece.offset };
            StridedCopy::of_piece(piece.strides.as_deref(), to, &piece.shape, bits)?;
        }
        Ok(())
    }
}

/// A part of a tensor: the indices `range` of dimension `dim`. In the new tensor they begin at
/// index `start`.
struct PartPlace<'a> {
    dim: usize,
    range: &'a Range<u64>,
    start: u64,
    /// Width in bits of an element in the shards.
    bits: u64,
}

impl PartPlace<'_> {
    /// The elements of `piece` that belong to the part. `None` if there are none.
    fn of_piece(&self, piece: &Piece<'_>) -> Result<Option<BoxSlice>, Fault> {
        let (dim, own) = (self.dim, piece.offset[self.dim]);
        let first = self.range.start.max(own);
        let end = self.range.end.min(own + piece.shape[dim]);
        let (mut offset, mut shape) = (piece.offset.to_vec(), piece.shape.to_vec());
        shape[dim] = end.saturating_sub(first);
        if shape.contains(&0) {
            return Ok(None);
        }
        offset[dim] = self.start + (first - self.range.start);
        let steps = piece.strides.map_or_else(|| row_major(piece.shape), <[u64]>::to_vec);
        let skipped = (first - own) * steps[dim] * self.bits;
        if !skipped.is_multiple_of(8) {
            return Err(ErrorKind::Misaligned.fault(format!(
                "index {first} of dimension {dim} begins inside a byte: elements have {} bits",
                self.bits
            )));
        }
        let strides = (!is_row_major(&shape, &steps)).then_some(steps);
        // Columns store only the first byte of a piece. The last byte follows from its shape.
        let range = piece.range.start + skipped / 8..piece.range.end;
        Ok(Some(BoxSlice { shard: piece.shard, range, offset, shape, strides }))
    }
}

/// Adds the whole of `tensor` under the name `name`.
fn push_whole(columns: &mut Builder, name: &str, tensor: &Tensor<'_>) {
    let facts = tensor.facts();
    let mut pieces = tensor.pieces();
    let mut replicas = tensor.replicas().peekable();
    match (pieces.len(), pieces.next()) {
        (1, Some(Piece { shard, range, shape, strides, .. }))
            if shape == tensor.shape && replicas.peek().is_none() =>
        {
            columns.push_stored(Stored { name, facts, shape, start: range.start, strides }, shard);
        }
        _ => {
            let pieces: Vec<BoxSlice> = tensor.pieces().map(slice).collect();
            let replicas: Vec<BoxSlice> = replicas.map(slice).collect();
            columns.push(name, facts, tensor.shape, &pieces, &replicas);
        }
    }
}

fn slice(piece: Piece<'_>) -> BoxSlice {
    let strides = piece.strides.map(<[u64]>::to_vec);
    let Piece { shard, range, offset, shape, .. } = piece;
    BoxSlice { shard, range, offset: offset.to_vec(), shape: shape.to_vec(), strides }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::super::{Catalog, Shard, ShardId};
    use super::*;

    /// The shard and the byte of each element of a tensor, in row-major order.
    type Places = Vec<(u32, u64)>;

    fn indices(shape: &[u64]) -> Vec<Vec<u64>> {
        let mut all = vec![Vec::new()];
        for &size in shape {
            let longer =
                |index: Vec<u64>| (0..size).map(move |last| [&index[..], &[last]].concat());
            all = all.into_iter().flat_map(longer).collect();
        }
        all
    }

    fn position(index: &[u64], shape: &[u64]) -> u64 {
        index.iter().zip(shape).fold(0, |position, (index, size)| position * size + index)
    }

    /// The place of each element of a tensor of two-byte elements, from the pieces of the tensor.
    fn places(tensor: &Tensor<'_>) -> Places {
        let mut found = HashMap::new();
        for piece in tensor.pieces() {
            let mut end = piece.range.start;
            for index in indices(piece.shape) {
                let own: Vec<u64> = index.iter().zip(piece.offset).map(|(a, b)| a + b).collect();
                let strides = piece.strides.map_or_else(|| row_major(piece.shape), <[u64]>::to_vec);
                let item: u64 = index.iter().zip(&strides).map(|(index, step)| index * step).sum();
                let byte = piece.range.start + 2 * item;
                let before = found.insert(position(&own, tensor.shape), (piece.shard.0, byte));
                assert_eq!(before, None, "an element that two pieces hold");
                end = end.max(byte + 2);
            }
            assert_eq!(piece.range.end, end);
            let is_contiguous = end - piece.range.start == piece.len();
            assert_eq!(piece.is_contiguous(), is_contiguous);
        }
        let count: u64 = tensor.shape.iter().product();
        (0..count).map(|element| found[&element]).collect()
    }

    /// Cuts the box at `offset` into two boxes repeatedly.
    fn cut(offset: Vec<u64>, shape: Vec<u64>, choices: &[(u8, u8)]) -> Vec<(Vec<u64>, Vec<u64>)> {
        let Some(((dim, at), rest)) = choices.split_first() else { return vec![(offset, shape)] };
        let dim = usize::from(*dim) % shape.len();
        if shape[dim] < 2 {
            return cut(offset, shape, rest);
        }
        let at = 1 + u64::from(*at) % (shape[dim] - 1);
        let (mut low, mut high, mut behind) = (shape.clone(), shape, offset.clone());
        low[dim] = at;
        high[dim] -= at;
        behind[dim] += at;
        let (left, right) = rest.split_at(rest.len() / 2);
        cut(offset, low, left).into_iter().chain(cut(behind, high, right)).collect()
    }

    /// The shape of a tensor, and the choices where it is cut.
    type TensorChoice = (Vec<u64>, Vec<(u8, u8)>);

    /// A catalog of tensors with these shapes. They are cut into boxes, and each box is in one of
    /// three shards.
    fn catalog(tensors: &[TensorChoice]) -> Catalog {
        let mut ends = [8_u64; 3];
        let mut columns = Builder::default();
        for (number, (shape, choices)) in tensors.iter().enumerate() {
            let boxes = cut(vec![0; shape.len()], shape.clone(), choices);
            let piece = |(at, (offset, shape)): (usize, (Vec<u64>, Vec<u64>))| {
                let shard = (number + at) % 3;
                let start = ends[shard];
                ends[shard] += 2 * shape.iter().product::<u64>() + 4;
                let range = start..ends[shard] - 4;
                BoxSlice { shard: ShardId(shard as u32), range, offset, shape, strides: None }
            };
            let mut pieces: Vec<BoxSlice> = boxes.into_iter().enumerate().map(piece).collect();
            pieces.sort_by_key(|piece| (piece.shard, piece.range.start));
            let replicas = [pieces[0].clone()];
            columns.push(&format!("{number}"), Dtype::Bf16.into(), shape, &pieces, &replicas);
        }
        let shard = |end: &u64| Shard { name: end.to_string(), file_len: *end, described: vec![] };
        Catalog {
            shards: ends.iter().map(shard).collect(),
            columns: Arc::new(columns.finish()),
            metadata: None,
            shapes_recorded: true,
            notes: Vec::new(),
        }
    }

    fn source() -> impl Strategy<Value = Catalog> {
        let choices = || prop::collection::vec((any::<u8>(), any::<u8>()), 0..6);
        (prop::collection::vec(1_u64..5, 1..4), prop::collection::vec(choices(), 1..4)).prop_map(
            |(shape, choices)| {
                let tensors: Vec<_> = choices.into_iter().map(|one| (shape.clone(), one)).collect();
                catalog(&tensors)
            },
        )
    }

    /// The choice of a tensor, and of the indices of a part of a joined tensor.
    type PartChoice = (prop::sample::Index, u64, u64);

    fn parts_of(catalog: &Catalog, dim: usize, choices: &[PartChoice]) -> TensorParts {
        let part = |(which, a, b): &PartChoice| {
            let position = which.index(catalog.len());
            let size = catalog.tensor_at(position).shape[dim];
            let (a, b) = (a % (size + 1), b % (size + 1));
            (position as u32, a.min(b)..a.max(b))
        };
        TensorParts { dim, parts: choices.iter().map(part).collect() }
    }

    /// The elements of the joined tensor, one after another.
    fn joined_naively(catalog: &Catalog, TensorParts { dim, parts }: &TensorParts) -> Places {
        let first = catalog.tensor_at(parts[0].0 as usize);
        let mut shape = first.shape.to_vec();
        let rows: Vec<(u32, u64)> = parts
            .iter()
            .flat_map(|(tensor, range)| range.clone().map(|row| (*tensor, row)))
            .collect();
        shape[*dim] = rows.len() as u64;
        let element = |mut index: Vec<u64>| {
            let (tensor, row) = rows[index[*dim] as usize];
            index[*dim] = row;
            let tensor = catalog.tensor_at(tensor as usize);
            places(&tensor)[position(&index, tensor.shape) as usize]
        };
        indices(&shape).into_iter().map(element).collect()
    }

    proptest! {
        #[test]
        fn parts_of_tensors_in_any_boxes_are_joined_as_a_loop_over_their_elements_joins_them(
            source in source(),
            first in (any::<prop::sample::Index>(), prop::collection::vec(any::<PartChoice>(), 1..4)),
            second in (any::<prop::sample::Index>(), prop::collection::vec(any::<PartChoice>(), 1..3)),
        ) {
            let mut catalog = source;
            for (dim, choices) in [first, second] {
                let dim = dim.index(catalog.tensor_at(0).shape.len());
                let parts = parts_of(&catalog, dim, &choices);
                let from = ProjectedFrom::Parts(&parts);
                let joined = catalog
                    .project([Projected { name: "joined", from, dtype: Dtype::Bf16 }].into_iter())
                    .unwrap();
                prop_assert_eq!(places(&joined.tensor_at(0)), joined_naively(&catalog, &parts));
                for replica in joined.tensor_at(0).replicas() {
                    let same = |piece: Piece<'_>| (piece.shard, piece.range.start) == (replica.shard, replica.range.start);
                    prop_assert!(joined.tensor_at(0).pieces().any(same));
                }
                catalog = joined;
            }
            // A projection that changes nothing keeps boxes that lie inside larger stored boxes.
            let one = Projected { name: "same", from: ProjectedFrom::Whole(0), dtype: Dtype::Bf16 };
            let same = catalog.project([one].into_iter()).unwrap();
            prop_assert_eq!(places(&same.tensor_at(0)), places(&catalog.tensor_at(0)));
        }
    }
}
