//! The proof that the pieces of a tensor cover each of its elements exactly once.
//!
//! Equal volume and no overlap prove it; neither needs a buffer of the size of the tensor, so
//! a small file that claims terabytes is refused at once.

use super::tensors::Cut;
use super::{ShardId, Tensor, named_some};
use crate::dtype::Dtype;
use crate::error::{Class, Fault};
use crate::format::safetensors::Entry;

/// A tensor whose pieces cover it.
pub(super) struct Covered {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// By shard and offset.
    pub(super) pieces: Vec<Cut>,
    pub(super) replicas: Vec<Cut>,
}

/// Proves that `found` (in shard order, at least one) is a tensor, and makes it.
pub(super) fn prove<'a>(
    found: Vec<(&Entry, Cut)>,
    shard_name: impl Fn(ShardId) -> &'a str,
) -> Result<Covered, Fault> {
    let dtype = found[0].0.dtype;
    agree(&found, &shard_name)?;
    let mut pieces: Vec<Cut> = found.into_iter().map(|(_, piece)| piece).collect();
    let shape = whole_shape(&pieces);
    let Some(bits) = dtype.bits_of(&shape) else {
        let message = format!("{dtype} {shape:?} has 2^64 bits or more");
        return Err(Fault::new(Class::Overflow, message));
    };
    pieces.sort_by_key(|piece| (piece.shard, piece.range.start));
    if bits == 0 {
        pieces.truncate(1);
        let whole =
            vec![Cut { offset: vec![0; shape.len()], shape: shape.clone(), ..pieces.remove(0) }];
        return Ok(Covered { dtype, shape, pieces: whole, replicas: Vec::new() });
    }
    pieces.retain(|piece| !piece.shape.contains(&0));
    let replicas = split_replicas(&mut pieces);
    if let Some((a, b)) = overlap(&pieces) {
        let shared: Vec<_> = intersection(&bounds(a), &bounds(b)).unwrap_or_default();
        return Err(Fault::new(
            Class::DcpOverlap,
            format!(
                "elements {} of shape {shape:?} lie in {} (box {}) and in {} (box {})",
                shown(&shared),
                shard_name(a.shard),
                shown(&bounds(a)),
                shard_name(b.shard),
                shown(&bounds(b)),
            ),
        ));
    }
    let covered: u64 = pieces.iter().map(|piece| piece.shape.iter().product::<u64>()).sum();
    let elements: u64 = shape.iter().product();
    if covered != elements {
        return Err(hole(&shape, &pieces, elements - covered, &shard_name));
    }
    if bits % 8 != 0 {
        let message = format!("{dtype} {shape:?} has {bits} bits, not whole bytes");
        return Err(Fault::new(Class::Misaligned, message));
    }
    Ok(Covered { dtype, shape, pieces, replicas })
}

/// Refuses `tensor` where it is not the `dtype` and `shape` that a reference knows.
pub(super) fn check_known<'a>(
    tensor: &Tensor<'_>,
    dtype: Dtype,
    shape: &[u64],
    shard_name: impl Fn(ShardId) -> &'a String,
) -> Result<(), Fault> {
    let fault = |class, message| Err(Fault::new(class, message).tensor(tensor.name));
    if tensor.dtype != dtype {
        let message = format!("{} in the shards, {dtype} in the reference", tensor.dtype);
        return fault(Class::DcpDtype, message);
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
    fault(Class::DcpHole, message)
}

fn agree<'a>(
    found: &[(&Entry, Cut)],
    shard_name: &impl Fn(ShardId) -> &'a str,
) -> Result<(), Fault> {
    let (first, first_piece) = &found[0];
    let first_shard = shard_name(first_piece.shard);
    for (entry, piece) in &found[1..] {
        let shard = shard_name(piece.shard);
        if entry.shape.len() != first.shape.len() {
            return Err(Fault::new(
                Class::DcpRank,
                format!(
                    "{} dimensions in {first_shard}, {} in {shard}",
                    first.shape.len(),
                    entry.shape.len()
                ),
            )
            .in_file(shard));
        }
        if entry.dtype != first.dtype {
            return Err(Fault::new(
                Class::DcpDtype,
                format!("{} in {first_shard}, {} in {shard}", first.dtype, entry.dtype),
            )
            .in_file(shard));
        }
    }
    Ok(())
}

/// The smallest shape that holds all pieces; nothing in the shards records the real one.
fn whole_shape(pieces: &[Cut]) -> Vec<u64> {
    let ends = |piece: &Cut| -> Vec<u64> {
        // No overflow: `dcp::offsets` has checked each sum.
        piece.offset.iter().zip(&piece.shape).map(|(o, size)| o + size).collect()
    };
    let mut shape = ends(&pieces[0]);
    for piece in &pieces[1..] {
        shape.iter_mut().zip(ends(piece)).for_each(|(max, end)| *max = end.max(*max));
    }
    shape
}

/// Takes pieces whose box stands earlier in the list out of it.
fn split_replicas(pieces: &mut Vec<Cut>) -> Vec<Cut> {
    let mut seen = std::collections::HashSet::new();
    let mut replicas = Vec::new();
    pieces.retain(|piece| {
        let first = seen.insert((piece.offset.clone(), piece.shape.clone()));
        if !first {
            replicas.push(piece.clone());
        }
        first
    });
    replicas
}

/// A box as (first, end) per dimension.
type Bounds = Vec<(u64, u64)>;

fn bounds(piece: &Cut) -> Bounds {
    piece.offset.iter().zip(&piece.shape).map(|(&o, &size)| (o, o + size)).collect()
}

fn intersection(a: &Bounds, b: &Bounds) -> Option<Bounds> {
    let both = a.iter().zip(b).map(|(a, b)| (a.0.max(b.0), a.1.min(b.1)));
    let both: Bounds = both.collect();
    both.iter().all(|(first, end)| first < end).then_some(both)
}

/// A box as Python slices it: `[0:4, 2:6]`.
fn shown(bounds: &Bounds) -> String {
    let dims: Vec<String> = bounds.iter().map(|(first, end)| format!("{first}:{end}")).collect();
    format!("[{}]", dims.join(", "))
}

/// Two pieces that share an element.
///
/// Sweeps along the dimension in which the pieces begin at the most different places, so that
/// few are open at a time: in a grid each piece meets one row of the others, not all.
fn overlap(pieces: &[Cut]) -> Option<(&Cut, &Cut)> {
    let rank = pieces.first()?.offset.len();
    let starts = |dim: usize| {
        let mut starts: Vec<u64> = pieces.iter().map(|piece| piece.offset[dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let Some(dim) = (0..rank).max_by_key(|&dim| starts(dim)) else {
        // Scalars: every box is the same one.
        return pieces.get(1).map(|second| (&pieces[0], second));
    };
    let mut order: Vec<&Cut> = pieces.iter().collect();
    order.sort_by_key(|piece| piece.offset[dim]);
    let mut open: Vec<&Cut> = Vec::new();
    for piece in order {
        open.retain(|other| other.offset[dim] + other.shape[dim] > piece.offset[dim]);
        let here = bounds(piece);
        let hit = open.iter().find(|other| intersection(&bounds(other), &here).is_some());
        if let Some(other) = hit {
            return Some((other, piece));
        }
        open.push(piece);
    }
    None
}

fn hole<'a>(
    shape: &[u64],
    pieces: &[Cut],
    missing: u64,
    shard_name: &impl Fn(ShardId) -> &'a str,
) -> Fault {
    let whole: Bounds = shape.iter().map(|&size| (0, size)).collect();
    let boxes: Vec<Bounds> = pieces.iter().map(bounds).collect();
    let all: Vec<&Bounds> = boxes.iter().collect();
    let mut steps = HOLE_STEPS_MAX;
    let place = match uncovered(&whole, &all, &mut steps) {
        Some(gap) => format!("elements {} lie in no shard", shown(&gap)),
        None => "some elements lie in no shard".to_owned(),
    };
    let mut shards: Vec<ShardId> = pieces.iter().map(|piece| piece.shard).collect();
    shards.dedup();
    Fault::new(
        Class::DcpHole,
        format!(
            "{place} ({missing} elements of shape {shape:?} missing); pieces found in {}; a \
             shard may be missing",
            named_some(shards.into_iter().map(shard_name)),
        ),
    )
}

/// Bound on the search for the place of a hole, which serves the message only.
const HOLE_STEPS_MAX: usize = 100_000;

/// A box inside `region` that none of `boxes` (which do not overlap) touches.
fn uncovered(region: &Bounds, boxes: &[&Bounds], steps: &mut usize) -> Option<Bounds> {
    *steps = steps.checked_sub(boxes.len() + 1)?;
    let inside: Vec<&Bounds> =
        boxes.iter().copied().filter(|b| intersection(region, b).is_some()).collect();
    let Some((first, rest)) = inside.split_first() else { return Some(region.clone()) };
    // What is left of the region around the first box: a slab below and one above in each
    // dimension, the dimensions before clipped to the box.
    let mut core = region.clone();
    for dim in 0..region.len() {
        let (from, to) = core[dim];
        let (first_from, first_to) = first[dim];
        for slab in [(from, first_from.max(from)), (first_to.min(to), to)] {
            if slab.0 < slab.1 {
                let mut part = core.clone();
                part[dim] = slab;
                if let Some(gap) = uncovered(&part, rest, steps) {
                    return Some(gap);
                }
            }
        }
        core[dim] = (from.max(first_from), to.min(first_to));
    }
    None
}
