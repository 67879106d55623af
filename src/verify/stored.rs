//! The parts of a shard, by their offsets.

use std::ops::Range;

use crate::catalog::{Catalog, Shard};
use crate::index::BlockBoundaries;

/// The part of a shard to which bytes belong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardPlace {
    /// The bytes that describe the tensors.
    Header,
    /// The tensor of this name.
    Tensor(String),
    /// No tensor uses the bytes, because a weight map assigns their tensor to another shard.
    Unused,
}

/// A piece in a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredPiece {
    /// Its byte range in the shard.
    pub(crate) range: Range<u64>,
    /// Index of its tensor in the catalog.
    pub(crate) tensor: u32,
}

/// For each shard, its pieces and replicas sorted by offset. Pieces without bytes in the shard are
/// left out.
pub(crate) fn by_shard(catalog: &Catalog) -> Vec<Vec<StoredPiece>> {
    let mut stored: Vec<Vec<StoredPiece>> = vec![Vec::new(); catalog.shards.len()];
    for tensor in catalog.tensors() {
        let pieces = tensor.pieces().chain(tensor.replicas());
        for piece in pieces.filter(|piece| !piece.is_empty() && !piece.is_zeros()) {
            let (range, tensor) = (piece.range, tensor.position() as u32);
            stored[piece.shard.0 as usize].push(StoredPiece { range, tensor });
        }
    }
    stored.iter_mut().for_each(|pieces| pieces.sort_by_key(|piece| piece.range.start));
    stored
}

/// How a shard is cut for its checksums: into its description, each stored piece, and the bytes
/// that belong to none of them.
pub(crate) fn boundaries(shard: &Shard, stored: &[StoredPiece]) -> Option<BlockBoundaries> {
    let pieces = stored.iter().map(|piece| &piece.range);
    let mut ranges: Vec<&Range<u64>> = shard.described.iter().chain(pieces).collect();
    ranges.sort_by_key(|range| range.start);
    let (mut lens, mut end) = (Vec::with_capacity(2 * ranges.len() + 1), 0);
    for range in ranges {
        lens.push(range.start.saturating_sub(end));
        end = end.max(range.start);
        lens.push(range.end.saturating_sub(end));
        end = end.max(range.end);
    }
    lens.push(shard.file_len.saturating_sub(end));
    BlockBoundaries::new(lens)
}

/// A shard with the facts that are needed to name its bytes.
pub(crate) struct Named<'a> {
    pub(crate) shard: &'a Shard,
    pub(crate) stored: &'a [StoredPiece],
    pub(crate) name_of: &'a dyn Fn(u32) -> String,
}

impl Named<'_> {
    /// The part that contains the first byte of `bytes`.
    pub(crate) fn place(&self, bytes: &Range<u64>) -> ShardPlace {
        if self.shard.is_description(&(bytes.start..bytes.start + 1)) {
            return ShardPlace::Header;
        }
        let index = self.stored.partition_point(|piece| piece.range.end <= bytes.start);
        match self.stored.get(index).filter(|piece| piece.range.start < bytes.end) {
            Some(piece) => ShardPlace::Tensor((self.name_of)(piece.tensor)),
            None => ShardPlace::Unused,
        }
    }
}
