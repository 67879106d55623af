//! Catalogs made from a proved catalog: some of its tensors, under the same or other names.

use std::sync::Arc;

use super::Catalog;
use super::tensors::{BoxSlice, Builder, Piece};
use crate::dtype::Dtype;

/// A tensor of a catalog that is made from another one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projected<'a> {
    /// Its name.
    pub(crate) name: &'a str,
    /// Its position in the other catalog.
    pub(crate) position: u32,
    /// Its element type. If it is another one, there is a cast from the one in the shards.
    pub(crate) dtype: Dtype,
}

impl Catalog {
    /// The catalog of these tensors, which come in the order of their names, none of them twice.
    ///
    /// It is proved because this one is: each tensor keeps all its pieces.
    pub(crate) fn project<'a>(
        &self,
        tensors: impl ExactSizeIterator<Item = Projected<'a>> + Clone,
    ) -> Catalog {
        let mut columns = Builder::with_room(tensors.clone().map(|tensor| tensor.name.len()));
        let mut stored = Vec::with_capacity(tensors.len());
        let mut is_cast = false;
        for Projected { name, position, dtype } in tensors {
            let tensor = self.tensor_at(position as usize);
            stored.push(tensor.stored);
            is_cast |= tensor.stored != dtype;
            let mut pieces = tensor.pieces();
            let mut replicas = tensor.replicas().peekable();
            match (pieces.len(), pieces.next()) {
                (1, Some(one)) if one.shape == tensor.shape && replicas.peek().is_none() => {
                    let place = (one.shard, one.range.start);
                    columns.push_whole(name, dtype, tensor.shape, place);
                }
                _ => {
                    let pieces: Vec<BoxSlice> = tensor.pieces().map(slice).collect();
                    let replicas: Vec<BoxSlice> = replicas.map(slice).collect();
                    columns.push(name, dtype, tensor.shape, &pieces, &replicas);
                }
            }
        }
        Catalog {
            shards: self.shards.clone(),
            columns: Arc::new(columns.finish_cast(if is_cast { stored } else { Vec::new() })),
            metadata: self.metadata.clone(),
            shapes_recorded: self.shapes_recorded,
            notes: self.notes.clone(),
        }
    }
}

fn slice(piece: Piece<'_>) -> BoxSlice {
    let Piece { shard, range, offset, shape } = piece;
    BoxSlice { shard, range, offset: offset.to_vec(), shape: shape.to_vec() }
}
