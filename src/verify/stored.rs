//! What stands where in a shard, by offset.

use std::ops::Range;

use crate::catalog::{Catalog, Shard};
use crate::index::Cuts;

use super::mismatch::Place;

/// A piece as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredPiece {
    /// Its bytes in the shard.
    pub(super) range: Range<u64>,
    /// Position of its tensor in the catalog.
    pub(super) tensor: u32,
}

/// The pieces and replicas with bytes, by shard and offset.
pub(super) fn by_shard(catalog: &Catalog) -> Vec<Vec<StoredPiece>> {
    let mut stored: Vec<Vec<StoredPiece>> = vec![Vec::new(); catalog.shards.len()];
    for tensor in catalog.tensors() {
        for piece in tensor.pieces().chain(tensor.replicas()).filter(|piece| !piece.is_empty()) {
            let (range, tensor) = (piece.range, tensor.position() as u32);
            stored[piece.shard.0 as usize].push(StoredPiece { range, tensor });
        }
    }
    stored.iter_mut().for_each(|pieces| pieces.sort_by_key(|piece| piece.range.start));
    stored
}

/// How a shard is cut for its checksums: what stands before the data, each stored piece, and
/// what no tensor uses.
pub(super) fn cuts(shard: &Shard, stored: &[StoredPiece]) -> Option<Cuts> {
    let mut lens = vec![shard.data_start];
    let mut at = shard.data_start;
    for StoredPiece { range, .. } in stored {
        lens.push(range.start.saturating_sub(at));
        at = at.max(range.start);
        lens.push(range.end.saturating_sub(at));
        at = at.max(range.end);
    }
    lens.push(shard.file_len.saturating_sub(at));
    Cuts::new(lens)
}

/// A shard whose bytes can be named.
pub(super) struct Named<'a> {
    pub(super) shard: &'a Shard,
    pub(super) stored: &'a [StoredPiece],
    pub(super) name_of: &'a dyn Fn(u32) -> String,
}

impl Named<'_> {
    /// What has the first of `bytes`.
    pub(super) fn place(&self, bytes: &Range<u64>) -> Place {
        if bytes.start < self.shard.data_start {
            return Place::Header;
        }
        let at = self.stored.partition_point(|piece| piece.range.end <= bytes.start);
        match self.stored.get(at).filter(|piece| piece.range.start < bytes.end) {
            Some(piece) => Place::Tensor((self.name_of)(piece.tensor)),
            None => Place::Unused,
        }
    }
}
