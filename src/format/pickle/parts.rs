//! Tensors of which the file of a rank holds one part: DTensors, and ShardedTensors of older versions of torch.
//!
//! The file of a DTensor does not record where its part begins. The place follows from the mesh of ranks, from the
//! position of this rank in the mesh, and from the placement of the tensor on each axis of the mesh.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use super::globals::dtype;
use super::tensors::{Storages, TensorPlace, plain_tuple, tensor_call, typed_call};
use super::values::{Node, NodeId, Part, PickleSteps, Values};
use super::{ReadResult, wrong};
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault};
use crate::format::description::FileRank;

/// Maximum number of ranks of a mesh, of axes of a mesh, and of index ranges while the place of a
/// part is computed.
pub(super) const RANKS_MAX: u64 = 1 << 20;
const AXES_MAX: usize = 64;
const RUNS_MAX: usize = 1 << 16;

/// Maximum number of attributes that are read per byte of the pickle. The attributes are counted because many tensors
/// may use the same object.
const STEPS_OF_BYTE: usize = 16;

/// A part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorPart {
    pub(super) place: TensorPlace,
    /// First index of the part in each dimension of the tensor.
    pub(super) offset: Vec<u64>,
    /// Extent of the whole tensor in each dimension.
    pub(super) whole: Vec<u64>,
}

/// A grid of ranks, and the position of one rank in it.
#[derive(Debug)]
struct Mesh {
    /// Whether the mesh has only some axes of a larger mesh. Then other ranks of the larger mesh
    /// have the same parts.
    is_part: bool,
    /// Number of ranks of the mesh, or of the larger mesh if `is_part` is set.
    ranks: u64,
    sizes: Vec<u64>,
    at: Vec<u64>,
    rank: u64,
}

/// How a tensor is placed on one axis of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    Replicate,
    /// Cut along this dimension.
    Shard(usize),
    /// Cut along this dimension twice: first into this number of pieces, and then each piece is cut among the ranks.
    StridedShard(usize, u64),
}

/// Finds the parts of tensors in one file.
pub(super) struct RankParts<'s, 'a, 'r> {
    values: &'a Values<'a>,
    pub(super) storages: &'s mut Storages<'a, 'r>,
    /// The rank that saved the file, if one of its tensors records it.
    pub(super) rank: Option<FileRank>,
    /// Whether one of the tensors is a ShardedTensor, which FSDP1 saves.
    pub(super) has_sharded_tensors: bool,
    meshes: HashMap<NodeId, Rc<Mesh>>,
    steps: PickleSteps,
}

fn unknown(what: &str) -> Fault {
    wrong(format!(
        "its {what} has a form that tensorfs does not know; make one file of the ranks' files with the \
         tools of the framework that saved them"
    ))
}

impl<'s, 'a, 'r> RankParts<'s, 'a, 'r> {
    pub(super) fn new(storages: &'s mut Storages<'a, 'r>) -> RankParts<'s, 'a, 'r> {
        let (values, meshes) = (storages.values, HashMap::new());
        let too_many = "its pickle has too many tensors for the same values";
        let steps = PickleSteps::of(values, STEPS_OF_BYTE, too_many);
        RankParts { values, storages, rank: None, has_sharded_tensors: false, meshes, steps }
    }

    /// The parts of the tensor `id` in this file. `None` if the tensor is not split among ranks.
    pub(super) fn of(&mut self, id: NodeId) -> ReadResult<Option<Vec<TensorPart>>> {
        let values = self.values;
        let Some([function, class, args, state]) = typed_call(values, id) else { return Ok(None) };
        let is_sharded = match values.global(class) {
            Some(("torch.distributed.tensor" | "torch.distributed._tensor.api", "DTensor")) => {
                false
            }
            Some(("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")) => true,
            _ => return Ok(None),
        };
        let args: Vec<NodeId> = values.tuple(args).into_iter().flatten().take(4).collect();
        let [same_class, element, size, _] = args.as_slice() else {
            return Err(unknown("call").into());
        };
        let is_wrapper =
            values.global(function) == Some(("torch._utils", "_rebuild_wrapper_subclass"));
        let whole = self.integers(*size)?;
        let (true, true, Some(whole)) =
            (is_wrapper, values.global(*same_class) == values.global(class), whole)
        else {
            return Err(unknown("call").into());
        };
        let named = values.global(*element).and_then(|(module, name)| dtype(module, name));
        let Some(element) = named.filter(|&element| element != Dtype::F4) else {
            let name = values.global_name(*element);
            let message = format!("has the dtype {name}, of which tensorfs joins no parts");
            return Err(ErrorKind::UnknownDtype.stop(message));
        };
        self.has_sharded_tensors |= is_sharded;
        let parts = if is_sharded {
            self.sharded(state, element, &whole)?
        } else {
            vec![self.dtensor(state, element, &whole)?]
        };
        Ok(Some(parts))
    }

    /// The numbers of a tuple, a list or a `torch.Size`, which must not be negative. `None` if the
    /// value is none of these.
    fn integers(&mut self, id: NodeId) -> Result<Option<Vec<u64>>, Fault> {
        let values = self.values;
        let list = plain_tuple(values, id);
        if !matches!(values.node(list), Node::Tuple(_) | Node::List(_)) {
            return Ok(None);
        }
        let mut numbers = Vec::new();
        for part in values.parts(list) {
            self.steps.spend(1)?;
            let Part::Item(item) = part else { return Ok(None) };
            let Some(number) = values.natural(item) else { return Ok(None) };
            numbers.push(number);
        }
        Ok(Some(numbers))
    }

    /// An attribute of an object. If several states set it, the last one is used.
    fn attribute(&mut self, object: NodeId, name: &str) -> Result<Option<NodeId>, Fault> {
        let mut found = None;
        for part in self.values.parts(object) {
            self.steps.spend(1)?;
            if let Part::State(state) = part {
                found = self.attribute_in(state, name)?.or(found);
            }
        }
        Ok(found)
    }

    /// An attribute in the state of an object. The state of an object with slots is a tuple of
    /// `None` and its attributes.
    fn attribute_in(&mut self, state: NodeId, name: &str) -> Result<Option<NodeId>, Fault> {
        let values = self.values;
        let pairs = values.array::<2>(state).map_or(state, |[_, slots]| slots);
        let mut found = None;
        for pair in values.parts(pairs) {
            self.steps.spend(1)?;
            if let Part::Pair(key, value) = pair
                && values.text(key) == Some(name)
            {
                found = Some(value);
            }
        }
        Ok(found)
    }

    fn needed(&mut self, object: NodeId, name: &str) -> Result<NodeId, Fault> {
        let found = self.attribute(object, name)?;
        found.ok_or_else(|| unknown(&format!("`{name}`")))
    }

    /// Whether `id` is an object of the class `class` of `torch.distributed`.
    fn is_object(&self, id: NodeId, class: &str) -> bool {
        let named = self.values.call(id).and_then(|(callable, _)| self.values.global(callable));
        named.is_some_and(|(module, name)| {
            name == class && module.split('.').take(2).eq(["torch", "distributed"])
        })
    }

    /// The local tensor `id`, which must have the dtype of the whole tensor.
    fn local(&mut self, id: NodeId, element: Dtype) -> ReadResult<TensorPlace> {
        let call = tensor_call(self.values, id).ok_or_else(|| unknown("local tensor"))?;
        let place = call.place(self.storages)?;
        if place.dtype != element {
            let message = format!("has the dtype {element}, its part in this file {}", place.dtype);
            return Err(ErrorKind::DcpDtype.stop(message));
        }
        Ok(place)
    }

    fn dtensor(&mut self, state: NodeId, element: Dtype, whole: &[u64]) -> ReadResult<TensorPart> {
        let local = self.attribute_in(state, "_local_tensor")?.ok_or_else(|| unknown("state"))?;
        let spec = self.attribute_in(state, "_spec")?.ok_or_else(|| unknown("state"))?;
        if !self.is_object(spec, "DTensorSpec") {
            return Err(unknown("`_spec`").into());
        }
        let mesh_id = self.needed(spec, "mesh")?;
        let mesh = self.mesh(mesh_id)?;
        let placements = self.placements(spec, whole.len())?;
        if placements.len() != mesh.sizes.len() {
            return Err(ErrorKind::HeaderDecode.stop(format!(
                "has {} placements on a mesh of {} axes",
                placements.len(),
                mesh.sizes.len()
            )));
        }
        self.check_order(spec)?;
        self.note_rank(FileRank { rank: mesh.rank, ranks: mesh.ranks })?;
        let mut place = self.local(local, element)?;
        let (offset, shape) = box_of(&mesh, &placements, whole)?;
        place.take_empty_shape(&shape);
        if mesh.is_part && !shape.contains(&0) && self.storages.crc_of(&place) == 0 {
            return Err(wrong(
                "is cut over some axes of a mesh, and nothing tells whether the ranks of the others have \
                 the same, since its storage has no CRC or is larger than its part; save \
                 `full_tensor()`"
                    .to_owned(),
            )
            .into());
        }
        if place.shape != shape {
            return Err(ErrorKind::DcpOffsets.stop(format!(
                "its part has the shape {:?}, and {shape:?} by the mesh and the placements of rank {}",
                place.shape, mesh.rank
            )));
        }
        Ok(TensorPart { place, offset, whole: whole.to_vec() })
    }

    fn note_rank(&mut self, found: FileRank) -> Result<(), Fault> {
        match self.rank {
            Some(known) if known.rank != found.rank => {
                let (one, other) = (known.rank, found.rank);
                Err(wrong(format!("is of rank {other}, and others in this file are of rank {one}")))
            }
            Some(known) => {
                let ranks = known.ranks.max(found.ranks);
                self.rank = Some(FileRank { ranks, ..known });
                Ok(())
            }
            None => {
                self.rank = Some(found);
                Ok(())
            }
        }
    }

    fn placements(&mut self, spec: NodeId, dims: usize) -> Result<Vec<Placement>, Fault> {
        let list = self.needed(spec, "placements")?;
        let mut placements = Vec::new();
        for item in self.values.tuple(list).ok_or_else(|| unknown("`placements`"))? {
            self.steps.spend(1)?;
            if placements.len() == AXES_MAX {
                return Err(unknown("`placements`"));
            }
            placements.push(self.placement(item, dims)?);
        }
        Ok(placements)
    }

    fn placement(&mut self, id: NodeId, dims: usize) -> Result<Placement, Fault> {
        if self.is_object(id, "Replicate") {
            return Ok(Placement::Replicate);
        }
        let is_strided = self.is_object(id, "_StridedShard");
        if !is_strided && !self.is_object(id, "Shard") {
            let class = self.values.call(id).map_or(id, |(class, _)| class);
            return Err(wrong(format!(
                "has the placement {}, of which no rank holds a plain part",
                self.values.global_name(class)
            )));
        }
        let dim = self.needed(id, "dim")?;
        let within = self.values.natural(dim).filter(|&dim| dim < dims as u64);
        let Some(dim) = within.and_then(|dim| usize::try_from(dim).ok()) else {
            return Err(wrong(format!(
                "is cut in a dimension that it does not have; it has {dims}"
            )));
        };
        if !is_strided {
            return Ok(Placement::Shard(dim));
        }
        let factor = self.needed(id, "split_factor")?;
        match self.values.natural(factor).filter(|factor| (1..=RUNS_MAX as u64).contains(factor)) {
            Some(factor) => Ok(Placement::StridedShard(dim, factor)),
            None => Err(unknown("`split_factor`")),
        }
    }

    /// Refuses a dimension that is cut by several axes of the mesh in another order than that of
    /// the axes.
    fn check_order(&mut self, spec: NodeId) -> Result<(), Fault> {
        let Some(order) = self.attribute(spec, "shard_order")? else { return Ok(()) };
        if self.values.node(order) == Node::Null {
            return Ok(());
        }
        for entry in self.values.tuple(order).ok_or_else(|| unknown("`shard_order`"))? {
            self.steps.spend(1)?;
            let call = self.values.call(entry).filter(|_| self.is_object(entry, "ShardOrderEntry"));
            let args = call.and_then(|(_, args)| self.values.array::<2>(args));
            let [_, axes] = args.ok_or_else(|| unknown("`shard_order`"))?;
            let axes = self.integers(axes)?.ok_or_else(|| unknown("`shard_order`"))?;
            if !axes.is_sorted() {
                return Err(wrong(format!(
                    "is cut by the axes {axes:?} of the mesh in this order, which tensorfs does not \
                     read; make one file of the ranks' files with the tools of the framework that \
                     saved them"
                )));
            }
        }
        Ok(())
    }

    fn mesh(&mut self, id: NodeId) -> ReadResult<Rc<Mesh>> {
        if let Some(known) = self.meshes.get(&id) {
            return Ok(known.clone());
        }
        if !self.is_object(id, "DeviceMesh") {
            return Err(unknown("mesh").into());
        }
        // Since torch 2.10 a mesh has a list of ranks and a separate layout of its axes. Before, it
        // has a grid of ranks.
        let list = self.attribute(id, "_rank_map")?;
        let (ranks, axes) = match list {
            Some(list) => {
                let layout = self.needed(id, "_layout")?;
                (self.ranks(list)?.0, self.axes(layout)?)
            }
            None => {
                let grid = self.needed(id, "mesh")?;
                let (ranks, sizes) = self.ranks(grid)?;
                let mut stride = ranks.len() as u64;
                let mut axes = Vec::with_capacity(sizes.len());
                for size in sizes {
                    stride /= size.max(1);
                    axes.push(vec![(size, stride)]);
                }
                (ranks, axes)
            }
        };
        let at = self.needed(id, "_coordinate_on_dim")?;
        let Some(at) = self.integers(at)? else {
            return Err(ErrorKind::HeaderDecode.stop("was saved by a rank that is not in its mesh"));
        };
        let sizes: Option<Vec<u64>> = axes
            .iter()
            .map(|axis| axis.iter().try_fold(1_u64, |all, &(size, _)| all.checked_mul(size)))
            .collect();
        let count = sizes
            .as_ref()
            .and_then(|sizes| sizes.iter().try_fold(1_u64, |all, &size| all.checked_mul(size)));
        let (Some(sizes), Some(count @ 1..=RANKS_MAX)) = (sizes, count) else {
            return Err(unknown("mesh").into());
        };
        if at.len() != sizes.len() || at.iter().zip(&sizes).any(|(at, size)| at >= size) {
            let message = format!("its mesh of {sizes:?} ranks has no place {at:?}");
            return Err(ErrorKind::HeaderDecode.stop(message));
        }
        let counted = axes.iter().zip(&at).try_fold(0_u64, |index, (axis, &at)| {
            let mut left = at;
            axis.iter().rev().try_fold(index, |index, &(size, stride)| {
                let own = (left % size).checked_mul(stride)?;
                left /= size;
                index.checked_add(own)
            })
        });
        let index = counted.ok_or_else(|| unknown("mesh"))?;
        let own = match self.attribute(id, "_rank")? {
            Some(own) => Some(self.values.natural(own).ok_or_else(|| unknown("mesh"))?),
            None => None,
        };
        // If the mesh has only some axes of a larger mesh, its list of ranks is that of the larger mesh. `begin` is the
        // position in this list of the rank with index 0 on all axes of the mesh.
        let begin = own
            .filter(|_| count < ranks.len() as u64)
            .and_then(|own| ranks.iter().position(|&rank| rank == own))
            .and_then(|place| (place as u64).checked_sub(index))
            .filter(|begin| {
                let mut steps = axes.iter().flatten();
                steps.all(|&(size, stride)| stride > 0 && (begin / stride).is_multiple_of(size))
            });
        let rank = begin
            .unwrap_or(0)
            .checked_add(index)
            .and_then(|place| ranks.get(usize::try_from(place).ok()?).copied())
            .ok_or_else(|| unknown("mesh"))?;
        if let Some(own) = own.filter(|&own| own != rank) {
            let message = format!("is of rank {own}, and of rank {rank} by its place in the mesh");
            return Err(ErrorKind::HeaderDecode.stop(message));
        }
        let is_part = begin.is_some();
        let ranks = if is_part { ranks.len() as u64 } else { count };
        let mesh = Rc::new(Mesh { is_part, ranks, sizes, at, rank });
        self.meshes.insert(id, mesh.clone());
        Ok(mesh)
    }

    /// The numbers of a tensor that holds ranks, and its shape.
    fn ranks(&mut self, id: NodeId) -> ReadResult<(Vec<u64>, Vec<u64>)> {
        let call = tensor_call(self.values, id).ok_or_else(|| unknown("mesh"))?;
        let TensorPlace { dtype, shape, start, .. } = call.run(self.storages)?;
        let width = match dtype {
            Dtype::I32 => 4,
            Dtype::I64 => 8,
            _ => return Err(unknown("mesh").into()),
        };
        let count = shape.iter().try_fold(1_u64, |count, &size| count.checked_mul(size));
        let Some(count @ 1..=RANKS_MAX) = count else { return Err(unknown("mesh").into()) };
        let mut bytes = vec![0; count as usize * width];
        self.storages.read(start, &mut bytes)?;
        Ok((bytes.chunks_exact(width).map(super::le).collect(), shape))
    }

    /// The axes of a mesh from its layout. Each axis has a list of sizes and strides. The list has several entries if
    /// the axis was joined from several axes.
    fn axes(&mut self, layout: NodeId) -> Result<Vec<Vec<(u64, u64)>>, Fault> {
        if !self.is_object(layout, "_MeshLayout") {
            return Err(unknown("mesh"));
        }
        let mut axes = Vec::new();
        if let Some(list) = self.attribute(layout, "axes")? {
            for axis in self.values.tuple(list).ok_or_else(|| unknown("mesh"))?.take(AXES_MAX + 1) {
                let sizes = self.needed(axis, "shape")?;
                let strides = self.needed(axis, "stride")?;
                axes.push(self.axis(sizes, strides)?);
            }
        } else {
            let sizes = self.needed(layout, "shape")?;
            let strides = self.needed(layout, "stride")?;
            let values = self.values;
            let [sizes, strides] = [sizes, strides].map(|list| values.tuple(list));
            let (Some(sizes), Some(strides)) = (sizes, strides) else {
                return Err(unknown("mesh"));
            };
            for (size, stride) in sizes.zip(strides).take(AXES_MAX + 1) {
                axes.push(self.axis(size, stride)?);
            }
        }
        if axes.len() > AXES_MAX {
            return Err(unknown("mesh"));
        }
        Ok(axes)
    }

    /// The sizes and strides of one axis. Each of both is a number or a tuple of numbers.
    fn axis(&mut self, sizes: NodeId, strides: NodeId) -> Result<Vec<(u64, u64)>, Fault> {
        let mut both = [Vec::new(), Vec::new()];
        for (list, id) in both.iter_mut().zip([sizes, strides]) {
            let numbers = match self.values.natural(id) {
                Some(number) => Some(vec![number]),
                None => self.integers(id)?,
            };
            *list = numbers.ok_or_else(|| unknown("mesh"))?;
        }
        let [sizes, strides] = both;
        if sizes.len() != strides.len() || sizes.contains(&0) {
            return Err(unknown("mesh"));
        }
        Ok(sizes.into_iter().zip(strides).collect())
    }

    fn sharded(
        &mut self,
        state: NodeId,
        element: Dtype,
        whole: &[u64],
    ) -> ReadResult<Vec<TensorPart>> {
        let values = self.values;
        let parts: Vec<NodeId> = values.tuple(state).into_iter().flatten().take(4).collect();
        let [shards, metadata, group, _] = parts.as_slice() else {
            return Err(unknown("state").into());
        };
        let size = self.needed(*metadata, "size")?;
        let is_known = self.is_object(*metadata, "ShardedTensorMetadata")
            && self.is_object(*group, "ProcessGroupState")
            && matches!(values.node(*shards), Node::List(_));
        if !is_known || self.integers(size)?.as_deref() != Some(whole) {
            return Err(unknown("state").into());
        }
        let mut rank = [0; 2];
        for (number, name) in rank.iter_mut().zip(["global_rank", "global_world_size"]) {
            let value = self.needed(*group, name)?;
            *number = values.natural(value).ok_or_else(|| unknown("process group"))?;
        }
        self.note_rank(FileRank { rank: rank[0], ranks: rank[1] })?;
        let mut found = Vec::new();
        for shard in values.parts(*shards) {
            self.steps.spend(1)?;
            let Part::Item(shard) = shard else { return Err(unknown("state").into()) };
            if !self.is_object(shard, "Shard") {
                return Err(unknown("shard").into());
            }
            let tensor = self.needed(shard, "tensor")?;
            let metadata = self.needed(shard, "metadata")?;
            let offset_id = self.needed(metadata, "shard_offsets")?;
            let offset = self.integers(offset_id)?.ok_or_else(|| unknown("`shard_offsets`"))?;
            let sizes_id = self.needed(metadata, "shard_sizes")?;
            let sizes = self.integers(sizes_id)?.ok_or_else(|| unknown("`shard_sizes`"))?;
            let place = self.local(tensor, element)?;
            let ends = offset.iter().zip(&sizes).map(|(first, size)| first.checked_add(*size));
            let inside = ends.zip(whole).all(|(end, size)| end.is_some_and(|end| end <= *size));
            if place.shape != sizes || offset.len() != whole.len() || !inside {
                return Err(ErrorKind::DcpOffsets.stop(format!(
                    "its part at {offset:?} has the shape {:?}, {sizes:?} in its list of parts, of \
                     {whole:?}",
                    place.shape
                )));
            }
            found.push(TensorPart { place, offset, whole: whole.to_vec() });
        }
        if found.is_empty() {
            // The rank lists the tensor, but has no part of it.
            let mut shape = whole.to_vec();
            let first = shape.first_mut().ok_or_else(|| unknown("shape"))?;
            *first = 0;
            let (dtype, start, strides) = (element, 0, None);
            let place = TensorPlace { dtype, shape, start, strides, is_placeholder: false };
            found.push(TensorPart { place, offset: vec![0; whole.len()], whole: whole.to_vec() });
        }
        Ok(found)
    }
}

/// The offset and the shape of the part that a rank has.
fn box_of(
    mesh: &Mesh,
    placements: &[Placement],
    whole: &[u64],
) -> Result<(Vec<u64>, Vec<u64>), Fault> {
    let mut runs: Vec<Vec<Range<u64>>> =
        whole.iter().map(|&size| joined(std::iter::once(0..size))).collect();
    for ((placement, &ranks), &at) in placements.iter().zip(&mesh.sizes).zip(&mesh.at) {
        match *placement {
            Placement::Replicate => {}
            Placement::Shard(dim) => runs[dim] = cut(&runs[dim], ranks, at),
            Placement::StridedShard(dim, factor) => {
                let own = &runs[dim];
                let pieces = (0..factor).map(|piece| cut(&cut(own, factor, piece), ranks, at));
                runs[dim] = joined(pieces.flatten());
            }
        }
        if runs.iter().any(|runs| runs.len() > RUNS_MAX) {
            return Err(wrong("is cut in too many pieces"));
        }
    }
    let mut offset = Vec::with_capacity(whole.len());
    let mut shape = Vec::with_capacity(whole.len());
    for runs in &runs {
        let run = match runs.as_slice() {
            [] => 0..0,
            [run] => run.clone(),
            _ => {
                return Err(wrong(format!(
                    "its part is not one block: the indices {runs:?} of a dimension; tensorfs does not \
                     read such parts"
                )));
            }
        };
        offset.push(run.start);
        shape.push(run.end - run.start);
    }
    Ok((offset, shape))
}

/// Part number `at` when the indices in `runs` are cut into `count` parts. The lengths are those of `torch.chunk`:
/// the quotient rounded up for all parts, except that the last parts may be shorter or empty.
fn cut(runs: &[Range<u64>], count: u64, at: u64) -> Vec<Range<u64>> {
    let total: u64 = runs.iter().map(|run| run.end - run.start).sum();
    let each = total.div_ceil(count);
    let first = at.saturating_mul(each).min(total);
    let end = first.saturating_add(each).min(total);
    let mut before = 0;
    let own = runs.iter().map(|run| {
        let begin = before;
        before += run.end - run.start;
        let inside = first.clamp(begin, before) - begin..end.clamp(begin, before) - begin;
        run.start + inside.start..run.start + inside.end
    });
    joined(own)
}

/// The ranges without empty ones. Adjacent ranges are joined.
fn joined(runs: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut all: Vec<Range<u64>> = Vec::new();
    for run in runs.filter(|run| !run.is_empty()) {
        match all.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => all.push(run),
        }
    }
    all
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests;
