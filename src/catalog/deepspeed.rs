//! The catalog of a checkpoint of DeepSpeed ZeRO. Its tensors are joined from the ranges of elements that each rank
//! saved.
//!
//! A file of optimizer states does not record its rank, so the rank is taken from its name. The facts about ranges in
//! all files have to agree with the ranks, and the ranges have to cover each tensor completely. The module
//! `universal` handles universal checkpoints.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::build::{empty_catalog, of_whole_tensors, sorted};
use super::coverage::{self, Covered, FoundPiece};
use super::flat_range::boxes_of;
use super::heads::Stored;
use super::tensors::{BoxSlice, Builder, ROWS_MAX};
use super::{Catalog, ShardHeader, ShardId, named_some};
use crate::dtype::{Dtype, TensorFacts};
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::deepspeed::{FlatRun, StateFile, ZeroModel, ZeroParam, ZeroPart, ZeroPartition};

/// The files of a checkpoint by their kind, each with its index among the shards. The index of a file in its vector
/// is its rank.
struct ZeroFiles<'a> {
    models: Vec<(ShardId, &'a ZeroModel)>,
    partitions: Vec<(ShardId, &'a ZeroPartition)>,
    names: Vec<&'a str>,
}

/// Elements of a tensor that follow each other in a shard.
pub(super) struct FlatPiece {
    pub(super) shard: ShardId,
    /// Offset of the first byte in the shard.
    pub(super) start: u64,
    /// The range of elements of the tensor.
    pub(super) range: Range<u64>,
}

/// A tensor that consists of ranges of elements.
pub(super) struct FlatTensor {
    pub(super) facts: TensorFacts,
    pub(super) shape: Vec<u64>,
    pub(super) pieces: Vec<FlatPiece>,
}

/// Where a tensor of a model is stored: whole in one shard, or in ranges of several shards.
pub(super) enum ModelSource<'a> {
    Whole(Stored<'a>, ShardId),
    Flat(FlatTensor),
}

/// The tensors of a model by name.
pub(super) type ModelSources<'a> = BTreeMap<String, ModelSource<'a>>;

impl ModelSource<'_> {
    fn shape(&self) -> &[u64] {
        match self {
            ModelSource::Whole(stored, _) => stored.shape,
            ModelSource::Flat(tensor) => &tensor.shape,
        }
    }
}

pub(super) fn wrong(kind: ErrorKind, message: String) -> Fault {
    kind.fault(message)
}

/// The number of elements of a tensor.
pub(super) fn numel_of(param: &ZeroParam) -> Result<u64, Fault> {
    let numel = Dtype::F64.bits_of(&param.shape).map(|bits| bits / Dtype::F64.bits());
    numel.ok_or_else(|| {
        let message = format!("{:?} has 2^64 bits or more", param.shape);
        wrong(ErrorKind::Overflow, message).tensor(&param.name)
    })
}

pub(super) fn of_deepspeed(shards: &[&ShardHeader]) -> Result<Catalog, Fault> {
    for shard in shards {
        shard.header.check_slices().map_err(|fault| fault.in_file(&shard.name))?;
    }
    if let [one] = shards
        && !one.header.is_zero_part()
    {
        return of_whole_tensors(shards, None);
    }
    let shards = sorted(shards);
    let files = ZeroFiles::of(&shards)?;
    let mut sources = tensors_in(&shards, files.models[0].0);
    let mut joined = BTreeSet::new();
    for (name, tensor) in files.trained()?.into_iter().chain(files.frozen()?) {
        join(&mut sources, &mut joined, name, tensor)?;
    }
    let ties = ties_of(shards[files.models[0].0.0 as usize], &joined);
    catalog_of(&shards, files.model(), &sources, &JoinedNames { names: &joined, ties })
}

/// The names of tensors whose elements come from other files than the model states.
pub(super) struct JoinedNames<'a> {
    pub(super) names: &'a BTreeSet<String>,
    /// Pairs of names: an additional name for such a tensor, and the name of the tensor.
    pub(super) ties: Vec<(&'a str, &'a str)>,
}

/// Pairs of names in the model states for the same tensor: the additional name, and the name of the joined tensor.
/// DeepSpeed before 0.9.2 did not record such pairs in `shared_params`, but its model states place both names at the
/// same bytes.
pub(super) fn ties_of<'a>(
    model: &'a ShardHeader,
    joined: &'a BTreeSet<String>,
) -> Vec<(&'a str, &'a str)> {
    let tensors = model.header.tensors();
    let all = || (0..tensors.len()).map(|index| tensors.get(index));
    let with_bytes = || all().filter(|stored| !stored.shape.contains(&0));
    let place = |stored: &Stored<'a>| (stored.start, stored.facts, stored.shape, stored.strides);
    let by_place: HashMap<_, &str> = with_bytes()
        .filter(|stored| joined.contains(stored.name))
        .map(|stored| (place(&stored), stored.name))
        .collect();
    with_bytes()
        .filter(|stored| !joined.contains(stored.name))
        .filter_map(|stored| Some((stored.name, *by_place.get(&place(&stored))?)))
        .collect()
}

/// Adds a tensor that is joined from ranges of elements.
pub(super) fn join(
    sources: &mut ModelSources<'_>,
    joined: &mut BTreeSet<String>,
    name: String,
    tensor: FlatTensor,
) -> Result<(), Fault> {
    if !joined.insert(name.clone()) {
        let message = "stands twice in the shapes of the model states".to_owned();
        return Err(wrong(ErrorKind::DuplicateTensor, message).tensor(&name));
    }
    if let Some(ModelSource::Whole(Stored { shape, .. }, _)) = sources.get(&name)
        && *shape != tensor.shape
    {
        let message = format!(
            "has the shape {:?} in `param_shapes` and {shape:?} in `module`; restore the files of \
             this checkpoint",
            tensor.shape
        );
        return Err(wrong(ErrorKind::SizeMismatch, message).tensor(&name));
    }
    sources.insert(name, ModelSource::Flat(tensor));
    Ok(())
}

/// The tensors that the shard `shard` has whole.
pub(super) fn tensors_in<'a>(shards: &[&'a ShardHeader], shard: ShardId) -> ModelSources<'a> {
    let tensors = shards[shard.0 as usize].header.tensors();
    let all = (0..tensors.len()).map(|index| tensors.get(index));
    all.map(|stored| (stored.name.to_owned(), ModelSource::Whole(stored, shard))).collect()
}

/// The catalog of the tensors in `sources`, under all names that `model` has for them.
pub(super) fn catalog_of(
    shards: &[&ShardHeader],
    model: &ZeroModel,
    sources: &ModelSources<'_>,
    joined: &JoinedNames<'_>,
) -> Result<Catalog, Fault> {
    let mut catalog = empty_catalog(shards)?;
    let names = names_of(model, sources, joined)?;
    catalog.notes.extend(short_floats(&names, sources));
    let mut columns = Builder::with_room(names.iter().map(|(name, _)| name.len()));
    for (name, source) in &names {
        match &sources[*source] {
            ModelSource::Whole(stored, shard) => {
                columns.push_stored(Stored { name, ..*stored }, *shard);
            }
            ModelSource::Flat(tensor) => {
                let found = tensor.found();
                let shard_name = |id: ShardId| shards[id.0 as usize].name.as_str();
                let covered =
                    coverage::prove(found, shard_name).map_err(|fault| fault.tensor(name))?;
                let Covered { facts, shape, pieces, replicas, .. } = &covered;
                columns.push(name, *facts, shape, pieces, replicas);
            }
        }
        if columns.rows() > ROWS_MAX {
            let message = "has too many tensors and ranges".to_owned();
            return Err(wrong(ErrorKind::Overflow, message));
        }
    }
    catalog.columns = Arc::new(columns.finish());
    catalog.shapes_recorded = true;
    Ok(catalog)
}

/// All names of the checkpoint, each with the name of its tensor in `sources`. Several names of tied weights lead to
/// one tensor.
fn names_of<'s>(
    model: &'s ZeroModel,
    sources: &'s ModelSources<'_>,
    joined: &JoinedNames<'s>,
) -> Result<Vec<(&'s str, &'s str)>, Fault> {
    let is_joined = |name: &str| joined.names.contains(name);
    let shape = |name: &str| sources.get(name).map(ModelSource::shape);
    let mut names: BTreeMap<&str, &str> =
        sources.keys().map(|name| (name.as_str(), name.as_str())).collect();
    let same = joined.ties.iter().filter(|(name, of)| shape(name) == shape(of));
    names.extend(same.copied());
    for (name, of) in &model.shared {
        if !is_joined(of) || is_joined(name) {
            continue;
        }
        if shape(name).is_some_and(|own| Some(own) != shape(of)) {
            let message = format!("has another shape than {}, whose elements it has", quoted(of));
            return Err(wrong(ErrorKind::SizeMismatch, message).tensor(name));
        }
        names.insert(name, of);
    }
    match model.placeholders.iter().find(|name| !names.contains_key(name.as_str())) {
        Some(name) => {
            let message = "has no elements in the model states, and no rank has a range of it";
            Err(wrong(ErrorKind::TensorMissing, message.to_owned()).tensor(name))
        }
        None => Ok(names.into_iter().collect()),
    }
}

/// A note about the tensors that come from the model states as 16-bit floats.
fn short_floats(names: &[(&str, &str)], sources: &ModelSources<'_>) -> Option<String> {
    let is_short = |source: &ModelSource<'_>| {
        let (ModelSource::Whole(Stored { facts, .. }, _)
        | ModelSource::Flat(FlatTensor { facts, .. })) = source;
        matches!(facts.dtype, Dtype::F16 | Dtype::Bf16)
    };
    let short: Vec<&str> =
        names.iter().filter(|(_, of)| is_short(&sources[*of])).map(|(name, _)| *name).collect();
    let come = if short.len() == 1 { "comes" } else { "come" };
    (!short.is_empty()).then(|| {
        let named = named_some(short.iter().copied());
        format!(
            "{named} {come} from the model states, in 16 bits, because the optimizer states have no such \
             weights"
        )
    })
}

/// The tensors of ZeRO stage 3 that are not trained. Each rank has a range of their elements in its
/// model states.
pub(super) fn frozen_of(
    models: &[(ShardId, &ZeroModel)],
    names: &[&str],
) -> Result<Vec<(String, FlatTensor)>, Fault> {
    let ranks = models.len() as u64;
    let others: Vec<_> = models.iter().map(|(_, model)| frozen_by_name(model)).collect();
    let mut all = Vec::new();
    for (param, _) in &models[0].1.frozen {
        let numel = numel_of(param)?;
        let each = numel.div_ceil(ranks);
        let mut pieces = Vec::new();
        let mut first_dtype = None;
        for (rank, ((id, _), frozen)) in (0..).zip(models.iter().zip(&others)) {
            let found = frozen.get(param.name.as_str());
            let run = found
                .filter(|found| found.0.shape == param.shape)
                .and_then(|found| found.1)
                .filter(|run| {
                    run.numel == each && *first_dtype.get_or_insert(run.dtype) == run.dtype
                });
            let Some(run) = run else {
                let message = format!(
                    "rank {rank} does not have its {each} elements of {:?}, as a tensor that is not \
                     trained",
                    param.shape
                );
                let fault = wrong(ErrorKind::TensorMissing, message);
                return Err(fault.tensor(&param.name).in_file(names[id.0 as usize]));
            };
            let first = (rank * each).min(numel);
            pieces.extend(pieces_in(&[(*id, run)], 0, first..(first + each).min(numel)));
        }
        let dtype = first_dtype.unwrap_or(Dtype::F32);
        all.push((param.name.clone(), flat_tensor(dtype, param, pieces)));
    }
    Ok(all)
}

fn frozen_by_name(model: &ZeroModel) -> HashMap<&str, &(ZeroParam, Option<FlatRun>)> {
    model.frozen.iter().map(|frozen| (frozen.0.name.as_str(), frozen)).collect()
}

impl FlatTensor {
    /// The boxes of its pieces. There is at least one.
    fn found(&self) -> Vec<FoundPiece> {
        let FlatTensor { facts, shape, pieces } = self;
        let item_len = facts.dtype.bits() / 8;
        let mut found = Vec::new();
        let mut add = |shard, start: u64, (offset, size): (Vec<u64>, Vec<u64>)| {
            let len = size.iter().product::<u64>() * item_len;
            let box_id =
                BoxSlice { shard, range: start..start + len, offset, shape: size, strides: None };
            found.push(FoundPiece { facts: *facts, box_id, whole_shape: Some(shape.clone()) });
            start + len
        };
        for piece in pieces {
            let mut start = piece.start;
            for part in boxes_of(shape, piece.range.clone()) {
                start = add(piece.shard, start, part);
            }
        }
        if shape.contains(&0) {
            let shard = pieces.first().map_or(ShardId(0), |piece| piece.shard);
            add(shard, 0, (vec![0; shape.len()], shape.clone()));
        }
        found
    }
}

impl<'a> ZeroFiles<'a> {
    /// Assigns the files to kinds and ranks, and checks that no rank is missing.
    fn of(shards: &[&'a ShardHeader]) -> Result<ZeroFiles<'a>, Fault> {
        let mut models = BTreeMap::new();
        let mut partitions = BTreeMap::new();
        for (index, shard) in shards.iter().enumerate() {
            let id = ShardId(index as u32);
            let rank = match StateFile::of(&shard.name) {
                Some(StateFile::Model { .. }) => Some(0),
                Some(StateFile::ModelOfRank { rank, .. } | StateFile::Optimizer { rank, .. }) => {
                    Some(rank)
                }
                _ => None,
            };
            match (rank, shard.header.zero.as_deref()) {
                (Some(rank), Some(ZeroPart::Model(model))) => {
                    models.insert(rank, (id, model));
                }
                (Some(rank), Some(ZeroPart::Partition(partition))) => {
                    partitions.insert(rank, (id, partition));
                }
                _ => {
                    let message = "does not tell of ranges of tensors, as a file of DeepSpeed ZeRO of \
                                   this name does";
                    let fault = wrong(ErrorKind::HeaderDecode, message.to_owned());
                    return Err(fault.in_file(&shard.name));
                }
            }
        }
        let names = shards.iter().map(|shard| shard.name.as_str()).collect();
        let of_ranks = |ranks: Vec<u64>, what: &str| {
            let missing = (0..).zip(&ranks).find(|(want, rank)| want != *rank);
            match missing {
                Some((want, _)) => {
                    let message = format!("the {what} of rank {want} are missing");
                    Err(wrong(ErrorKind::ShardMissing, message))
                }
                None => Ok(()),
            }
        };
        of_ranks(models.keys().copied().collect(), "model states")?;
        of_ranks(partitions.keys().copied().collect(), "optimizer states")?;
        let files = ZeroFiles {
            models: models.into_values().collect(),
            partitions: partitions.into_values().collect(),
            names,
        };
        files.check_counts()?;
        Ok(files)
    }

    fn name(&self, id: ShardId) -> &'a str {
        self.names[id.0 as usize]
    }

    /// Compares the number of files with the numbers of ranks that the files record.
    fn check_counts(&self) -> Result<(), Fault> {
        let (Some((_, first)), Some((model_id, model))) =
            (self.partitions.first(), self.models.first())
        else {
            let message = "has no model states or no optimizer states of DeepSpeed".to_owned();
            return Err(wrong(ErrorKind::ShardMissing, message));
        };
        let found = self.partitions.len() as u64;
        for (id, partition) in &self.partitions {
            if partition.stage != first.stage || partition.groups.len() != first.groups.len() {
                let message = format!(
                    "is of stage {} with {} groups, {} of stage {} with {}; restore the files of this \
                     checkpoint",
                    partition.stage,
                    partition.groups.len(),
                    self.name(self.partitions[0].0),
                    first.stage,
                    first.groups.len()
                );
                return Err(wrong(ErrorKind::ShardMissing, message).in_file(self.name(*id)));
            }
            if partition.ranks != found {
                let message = format!(
                    "is of {} ranks, optimizer states of {found} are here; restore or remove the files \
                     of the others",
                    partition.ranks
                );
                return Err(wrong(ErrorKind::ShardMissing, message).in_file(self.name(*id)));
            }
            if let Some(group) = partition.groups.iter().find(|group| group.dtype != Dtype::F32) {
                let message = format!("has a group of {}, not of F32", group.dtype);
                return Err(wrong(ErrorKind::DcpDtype, message).in_file(self.name(*id)));
            }
        }
        if !(1..=3).contains(&first.stage) {
            let message = format!("is of stage {} of ZeRO, tensorfs reads 1 to 3", first.stage);
            return Err(wrong(ErrorKind::HeaderDecode, message));
        }
        let models = if first.stage == 3 { found } else { 1 };
        if self.models.len() as u64 != models {
            let message = format!(
                "model states of {} ranks are here, {models} have to be",
                self.models.len()
            );
            return Err(wrong(ErrorKind::ShardMissing, message));
        }
        if let Some((id, _)) = self.models.iter().find(|(_, other)| other.groups != model.groups) {
            let message = format!("has other `param_shapes` than {}", self.name(*model_id));
            return Err(wrong(ErrorKind::ShardMissing, message).in_file(self.name(*id)));
        }
        if let Some(ranks) = model.ranks.filter(|&ranks| ranks != found) {
            let message = format!("is of {ranks} ranks, optimizer states of {found} are here");
            return Err(wrong(ErrorKind::ShardMissing, message).in_file(self.name(*model_id)));
        }
        Ok(())
    }

    fn stage(&self) -> u64 {
        self.partitions.first().map_or(0, |(_, partition)| partition.stage)
    }

    fn model(&self) -> &'a ZeroModel {
        self.models[0].1
    }

    /// The trained tensors, joined from ranges of elements.
    fn trained(&self) -> Result<Vec<(String, FlatTensor)>, Fault> {
        if self.stage() == 3 { self.trained_in_partitions() } else { self.trained_in_groups() }
    }

    /// Stages 1 and 2: each group is one flat tensor, which is cut into one partition per rank.
    fn trained_in_groups(&self) -> Result<Vec<(String, FlatTensor)>, Fault> {
        let groups = &self.model().groups;
        if groups.len() != self.partitions[0].1.groups.len() {
            let message = format!(
                "the model states have {} groups, the optimizer states {}",
                groups.len(),
                self.partitions[0].1.groups.len()
            );
            return Err(wrong(ErrorKind::ShardMissing, message));
        }
        let mut all = Vec::new();
        for (number, group) in groups.iter().enumerate() {
            let runs: Vec<(ShardId, FlatRun)> = self
                .partitions
                .iter()
                .map(|(id, partition)| (*id, partition.groups[number]))
                .collect();
            let paddings = self.partitions[0].1.paddings.get(number);
            let mut at = 0_u64;
            for (position, param) in group.iter().enumerate() {
                let numel = numel_of(param)?;
                let pieces = pieces_in(&runs, at, 0..numel);
                let padding = paddings.and_then(|list| list.get(position)).copied().unwrap_or(0);
                at = at.saturating_add(numel).saturating_add(padding);
                all.push((param.name.clone(), flat_tensor(Dtype::F32, param, pieces)));
            }
            let total = runs.iter().map(|(_, run)| run.numel).fold(0, u64::saturating_add);
            // The end of a group is padded, so that all ranks get the same number of elements.
            let unit = 2 * runs.len() as u64;
            if at.div_ceil(unit) != total.div_ceil(unit) {
                let message = format!(
                    "group {number} has {total} elements in the optimizer states and {at} by \
                     `param_shapes`; restore the files of this checkpoint"
                );
                return Err(wrong(ErrorKind::SizeMismatch, message));
            }
            self.check_slices(number, &all[all.len() - group.len()..])?;
        }
        Ok(all)
    }

    /// Compares the ranges of the tensors of a group with the ranges that each rank records for
    /// itself.
    fn check_slices(&self, group: usize, tensors: &[(String, FlatTensor)]) -> Result<(), Fault> {
        for (id, partition) in &self.partitions {
            let Some(slices) = partition.slices.as_ref().and_then(|slices| slices.get(group))
            else {
                continue;
            };
            let run = partition.groups[group];
            let told: BTreeSet<(&str, u64, u64)> = slices
                .iter()
                .filter(|slice| slice.numel > 0)
                .map(|slice| (slice.name.as_str(), slice.start, slice.numel))
                .collect();
            let found: BTreeSet<(&str, u64, u64)> = tensors
                .iter()
                .flat_map(|(name, tensor)| {
                    let own = tensor.pieces.iter().filter(|piece| piece.shard == *id);
                    own.map(|piece| {
                        let start = (piece.start - run.start) / (Dtype::F32.bits() / 8);
                        (name.as_str(), start, piece.range.end - piece.range.start)
                    })
                })
                .collect();
            if let Some((name, start, numel)) = told.symmetric_difference(&found).next() {
                let message = format!(
                    "tells other ranges of its tensors than its name and `param_shapes`: {numel} \
                     elements of {} from {start} on; it may be the file of another rank or run",
                    quoted(name)
                );
                return Err(wrong(ErrorKind::DcpOffsets, message).in_file(self.name(*id)));
            }
        }
        Ok(())
    }

    /// Stage 3: each rank has the same number of elements of each tensor. In its partition, the
    /// tensors of all groups follow each other.
    fn trained_in_partitions(&self) -> Result<Vec<(String, FlatTensor)>, Fault> {
        let ranks = self.partitions.len() as u64;
        let mut all = Vec::new();
        let mut at = 0_u64;
        for param in self.model().groups.iter().flatten() {
            let numel = numel_of(param)?;
            let each = numel.div_ceil(ranks);
            let mut pieces = Vec::new();
            for (rank, (id, partition)) in (0..).zip(&self.partitions) {
                let runs: Vec<(ShardId, FlatRun)> =
                    partition.groups.iter().map(|run| (*id, *run)).collect();
                let first = (rank * each).min(numel);
                let own = first..(first + each).min(numel);
                pieces.extend(pieces_in(&runs, at, own));
            }
            at = at.saturating_add(each);
            all.push((param.name.clone(), flat_tensor(Dtype::F32, param, pieces)));
        }
        for (id, partition) in &self.partitions {
            let total = partition.groups.iter().map(|run| run.numel).fold(0, u64::saturating_add);
            if total != at {
                let message = format!(
                    "has {total} elements, {at} by `param_shapes`; restore the files of this checkpoint"
                );
                return Err(wrong(ErrorKind::SizeMismatch, message).in_file(self.name(*id)));
            }
        }
        Ok(all)
    }

    /// The tensors of stage 3 that are not trained. In other stages, the model states have them
    /// whole.
    fn frozen(&self) -> Result<Vec<(String, FlatTensor)>, Fault> {
        if self.stage() != 3 {
            return Ok(Vec::new());
        }
        frozen_of(&self.models, &self.names)
    }
}

fn flat_tensor(dtype: Dtype, param: &ZeroParam, pieces: Vec<FlatPiece>) -> FlatTensor {
    FlatTensor { facts: dtype.into(), shape: param.shape.clone(), pieces }
}

/// The pieces for the elements `own` of a tensor. `runs` follow each other as one sequence of elements, in which
/// `own` begins at element `at`. Elements behind the last run are left out. The proof of the tensor then reports them
/// as missing.
fn pieces_in(runs: &[(ShardId, FlatRun)], at: u64, own: Range<u64>) -> Vec<FlatPiece> {
    let mut pieces = Vec::new();
    let wanted = at..at.saturating_add(own.end - own.start);
    let mut begin = 0_u64;
    for (shard, run) in runs {
        let end = begin.saturating_add(run.numel);
        let inside = wanted.start.max(begin)..wanted.end.min(end);
        if !inside.is_empty() {
            let start = run.start + (inside.start - begin) * (run.dtype.bits() / 8);
            let first = own.start + (inside.start - wanted.start);
            let range = first..first + (inside.end - inside.start);
            pieces.push(FlatPiece { shard: *shard, start, range });
        }
        begin = end;
    }
    pieces
}
