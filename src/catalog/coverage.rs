//! Proves that the pieces of a tensor cover each of its elements exactly once.
//!
//! The proof compares the corners of boxes (see `tiling`). It needs no buffer of the size of the
//! tensor, so a small file that claims terabytes is refused at once.

use std::collections::HashMap;

use super::tensors::BoxSlice;
use super::tiling::{Flaw, contains, flaw, hole_end};
use super::{ShardId, Tensor, named_some};
use crate::dtype::{Dtype, TensorFacts};
use crate::error::{ErrorKind, Fault};

/// A piece of a tensor, in the form in which its shard describes it.
pub(super) struct FoundPiece {
    pub(super) facts: TensorFacts,
    pub(super) box_id: BoxSlice,
    /// The shape of the whole tensor, if the shard records it.
    pub(super) whole_shape: Option<Vec<u64>>,
}

/// A tensor for which it is proved that its pieces cover it.
pub(super) struct Covered {
    pub(super) facts: TensorFacts,
    pub(super) shape: Vec<u64>,
    /// Whether a shard records the shape. If no shard does, the shape is inferred from the pieces.
    pub(super) shape_recorded: bool,
    /// Pieces, sorted by shard and offset.
    pub(super) pieces: Vec<BoxSlice>,
    pub(super) replicas: Vec<BoxSlice>,
}

/// Proves that the pieces `found` cover a tensor, and returns the tensor. `found` has at least one
/// piece, and is in the order of the shards.
pub(super) fn prove<'a>(
    found: Vec<FoundPiece>,
    shard_name: impl Fn(ShardId) -> &'a str,
) -> Result<Covered, Fault> {
    let facts = found[0].facts;
    agree(&found, &shard_name)?;
    let recorded = recorded_shape(&found, &shard_name)?;
    let mut pieces: Vec<BoxSlice> = found.into_iter().map(|found| found.box_id).collect();
    let first_shard = shard_name(pieces[0].shard);
    let reached = reach(&pieces);
    let shape_recorded = recorded.is_some();
    let shape = recorded.unwrap_or_else(|| reached.clone());
    let Some(bits) = facts.dtype.bits_of(&shape) else {
        let message = format!("{facts} {shape:?} has 2^64 bits or more");
        return Err(ErrorKind::Overflow.fault(message).in_file(first_shard));
    };
    pieces.sort_by_key(|piece| (piece.shard, piece.range.start));
    if bits == 0 {
        pieces.truncate(1);
        let whole = vec![BoxSlice {
            offset: vec![0; shape.len()],
            shape: shape.clone(),
            ..pieces.remove(0)
        }];
        return Ok(Covered { facts, shape, shape_recorded, pieces: whole, replicas: Vec::new() });
    }
    let shards: Vec<ShardId> = pieces.iter().map(|piece| piece.shard).collect();
    pieces.retain(|piece| !piece.shape.contains(&0));
    let replicas = split_replicas(&mut pieces, &shard_name)?;
    if let Some(flaw) = flaw(&pieces, &shape, &mut 0) {
        return Err(match flaw {
            Flaw::Overlap(place) => overlap_fault(&shape, &pieces, &place, &shard_name),
            Flaw::Hole(place) => hole_fault(&shape, &reached, &pieces, place, shards, &shard_name),
            Flaw::TooMany => {
                let (count, dims) = (pieces.len(), shape.len());
                let message = format!("{count} pieces of {dims} dimensions are too many to prove");
                ErrorKind::Overflow.fault(message).in_file(first_shard)
            }
        });
    }
    if bits % 8 != 0 {
        let message = format!("{facts} {shape:?} has {bits} bits, not whole bytes");
        return Err(ErrorKind::Misaligned.fault(message));
    }
    Ok(Covered { facts, shape, shape_recorded, pieces, replicas })
}

/// Refuses `tensor` unless it has the `dtype` and `shape` of the reference.
pub(super) fn check_known<'a>(
    tensor: &Tensor<'_>,
    dtype: Dtype,
    shape: &[u64],
    shard_name: impl Fn(ShardId) -> &'a String,
) -> Result<(), Fault> {
    let fault = |kind: ErrorKind, message| Err(kind.fault(message).tensor(tensor.name));
    if tensor.dtype != dtype {
        let message = format!("{} in the shards, {dtype} in the reference", tensor.dtype);
        return fault(ErrorKind::DcpDtype, message);
    }
    if tensor.shape == shape {
        return Ok(());
    }
    let message = format!(
        "{dtype} {:?} in the shards ({}), {shape:?} in the reference; the last shards may be \
         missing",
        tensor.shape,
        named_some(tensor.pieces().map(|piece| shard_name(piece.shard).as_str())),
    );
    fault(ErrorKind::DcpHole, message)
}

fn agree<'a>(found: &[FoundPiece], shard_name: &impl Fn(ShardId) -> &'a str) -> Result<(), Fault> {
    let (first, first_shard) = (&found[0], shard_name(found[0].box_id.shard));
    for other in &found[1..] {
        let shard = shard_name(other.box_id.shard);
        let (rank, first_rank) = (other.box_id.shape.len(), first.box_id.shape.len());
        if rank != first_rank {
            let message = format!("{first_rank} dimensions in {first_shard}, {rank} in {shard}");
            return Err(ErrorKind::DcpRank.fault(message).in_file(shard));
        }
        if other.facts != first.facts {
            let (own, first) = (other.facts, first.facts);
            let message = format!("{first} in {first_shard}, {own} in {shard}");
            return Err(ErrorKind::DcpDtype.fault(message).in_file(shard));
        }
    }
    Ok(())
}

/// The shape that the shards record for the whole tensor. `None` if no shard records it. Refuses
/// recorded shapes that differ from each other, and pieces that extend past the recorded shape.
fn recorded_shape<'a>(
    found: &[FoundPiece],
    shard_name: &impl Fn(ShardId) -> &'a str,
) -> Result<Option<Vec<u64>>, Fault> {
    let mut recorded = found.iter().filter_map(|f| Some((f.whole_shape.as_ref()?, f.box_id.shard)));
    let Some((shape, first)) = recorded.next() else { return Ok(None) };
    if let Some((other, shard)) = recorded.find(|(other, _)| *other != shape) {
        let (first, shard) = (shard_name(first), shard_name(shard));
        let message = format!("global_shape is {shape:?} in {first}, {other:?} in {shard}");
        return Err(ErrorKind::DcpInfo.fault(message).in_file(shard));
    }
    let outside = |box_id: &BoxSlice| ends(box_id).zip(shape).any(|(end, size)| end > *size);
    if let Some(piece) = found.iter().map(|found| &found.box_id).find(|box_id| outside(box_id)) {
        let (first, shard) = (shard_name(first), shard_name(piece.shard));
        let place = shown(&bounds(piece));
        let message = format!("box {place} in {shard} passes global_shape {shape:?} of {first}");
        return Err(ErrorKind::DcpOffsets.fault(message).in_file(shard));
    }
    Ok(Some(shape.clone()))
}

/// The end index of a piece in each dimension.
fn ends(piece: &BoxSlice) -> impl Iterator<Item = u64> {
    // The sum cannot overflow, because `dcp::placements` has checked it.
    piece.offset.iter().zip(&piece.shape).map(|(first, size)| first + size)
}

/// The smallest shape that contains all pieces. It is the shape of the tensor, unless its last
/// pieces are missing.
fn reach(pieces: &[BoxSlice]) -> Vec<u64> {
    let mut shape: Vec<u64> = ends(&pieces[0]).collect();
    for piece in &pieces[1..] {
        shape.iter_mut().zip(ends(piece)).for_each(|(max, end)| *max = end.max(*max));
    }
    shape
}

/// Removes pieces whose box also occurs earlier in the list, and returns them as replicas. The list
/// is sorted by shard. Savers write a box once per file. A box that occurs twice in a file is
/// refused, because it is unknown which of the two is valid.
fn split_replicas<'a>(
    pieces: &mut Vec<BoxSlice>,
    shard_name: &impl Fn(ShardId) -> &'a str,
) -> Result<Vec<BoxSlice>, Fault> {
    let mut last_shard = HashMap::new();
    let mut replicas = Vec::new();
    let mut doubled = None;
    pieces.retain(|piece| {
        let before = last_shard.insert((piece.offset.clone(), piece.shape.clone()), piece.shard);
        if before == Some(piece.shard) {
            doubled.get_or_insert_with(|| piece.clone());
        }
        if before.is_some() {
            replicas.push(piece.clone());
        }
        before.is_none()
    });
    let Some(piece) = doubled else { return Ok(replicas) };
    let shard = shard_name(piece.shard);
    let message = format!("box {} lies twice in {shard}", shown(&bounds(&piece)));
    Err(ErrorKind::DcpOverlap.fault(message).in_file(shard))
}

/// The bounds of a box: first index and end index in each dimension.
type BoxBounds = Vec<(u64, u64)>;

fn bounds(piece: &BoxSlice) -> BoxBounds {
    piece.offset.iter().copied().zip(ends(piece)).collect()
}

/// A box in the slice syntax of Python, such as `[0:4, 2:6]`.
fn shown(bounds: &BoxBounds) -> String {
    let dims: Vec<String> = bounds.iter().map(|(first, end)| format!("{first}:{end}")).collect();
    format!("[{}]", dims.join(", "))
}

/// The fault of the element `place`, which lies in two of `pieces`.
fn overlap_fault<'a>(
    shape: &[u64],
    pieces: &[BoxSlice],
    place: &[u64],
    shard_name: &impl Fn(ShardId) -> &'a str,
) -> Fault {
    let mut holders = pieces.iter().filter(|piece| contains(piece, place));
    let (Some(a), Some(b)) = (holders.next(), holders.next()) else {
        return ErrorKind::DcpOverlap.fault(format!("pieces of shape {shape:?} overlap"));
    };
    let both: BoxBounds =
        bounds(a).into_iter().zip(bounds(b)).map(|(a, b)| (a.0.max(b.0), a.1.min(b.1))).collect();
    ErrorKind::DcpOverlap.fault(format!(
        "elements {} of shape {shape:?} lie in {} (box {}) and in {} (box {})",
        shown(&both),
        shard_name(a.shard),
        shown(&bounds(a)),
        shard_name(b.shard),
        shown(&bounds(b)),
    ))
}

/// The error for the element `place`, which lies in no piece. `reached` is the smallest shape that
/// contains all pieces. `shards` are the shards that have pieces, in order.
fn hole_fault<'a>(
    shape: &[u64],
    reached: &[u64],
    pieces: &[BoxSlice],
    place: Option<Vec<u64>>,
    mut shards: Vec<ShardId>,
    shard_name: &impl Fn(ShardId) -> &'a str,
) -> Fault {
    let gap = match place {
        Some(place) => {
            let end = hole_end(pieces, shape, &place);
            format!("elements {} lie in no shard", shown(&place.into_iter().zip(end).collect()))
        }
        None => "some elements lie in no shard".to_owned(),
    };
    let elements = |shape: &[u64]| shape.iter().product::<u64>();
    // Pieces may also overlap, so the sum of their sizes may exceed the size of the tensor.
    let held = pieces.iter().map(|piece| elements(&piece.shape)).fold(0, u64::saturating_add);
    let count = match elements(shape).checked_sub(held).filter(|missing| *missing > 0) {
        Some(missing) => format!("{missing} elements of shape {shape:?} missing"),
        None => format!("of shape {shape:?}"),
    };
    let tail = if shape == reached {
        String::new()
    } else {
        format!("; global_shape is {shape:?}, the pieces reach {reached:?}")
    };
    shards.dedup();
    let files = named_some(shards.into_iter().map(shard_name));
    ErrorKind::DcpHole
        .fault(format!("{gap} ({count}{tail}); pieces found in {files}; a shard may be missing"))
}
