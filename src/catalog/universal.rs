//! The catalog of a universal checkpoint of DeepSpeed, which has a file for each tensor beside its
//! model states.
//!
//! The files of tensors do not say whether one of them is missing. `param_shapes` in the model states lists all
//! tensors. If a model was split among tensor-parallel ranks, the file of a tensor has the merged tensor.

use std::collections::{BTreeMap, BTreeSet};

use super::deepspeed::{
    FlatPiece, FlatTensor, JoinedNames, ModelSource, ModelSources, catalog_of, frozen_of, join,
    numel_of, tensors_in, ties_of, wrong,
};
use super::heads::Stored;
use super::{Catalog, ShardHeader, ShardId, named_some};
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, counted};
use crate::format::deepspeed::{
    MASTER, StateFile, UNIVERSAL, UniversalFile, UniversalTensor, ZeroModel, ZeroParam, ZeroPart,
};

/// A file that has one state of one tensor.
struct UniversalPart<'a> {
    id: ShardId,
    file: UniversalFile<'a>,
    facts: UniversalTensor,
    stored: Stored<'a>,
}

/// The files of a checkpoint, by their kind.
struct UniversalFiles<'a> {
    /// The model states of each tensor-parallel rank, or of each rank of ZeRO-3.
    models: Vec<(ShardId, &'a ZeroModel)>,
    /// Whether the model states are those of the ranks of ZeRO-3.
    is_of_ranks: bool,
    parts: Vec<UniversalPart<'a>>,
    names: Vec<&'a str>,
}

/// Whether the shard has one tensor of a universal checkpoint.
pub(super) fn is_universal(shard: &ShardHeader) -> bool {
    matches!(shard.header.zero.as_deref(), Some(ZeroPart::Universal(_)))
}

/// The catalog of these shards, which are sorted by name with numbers as numbers.
pub(super) fn of_universal(shards: &[&ShardHeader]) -> Result<Catalog, Fault> {
    let files = UniversalFiles::of(shards)?;
    files.check_counts()?;
    let params = files.params();
    files.check_names(&params)?;
    let model = files.models[0].1;
    let mut sources = tensors_in(shards, files.models[0].0);
    let mut joined = BTreeSet::new();
    for part in &files.parts {
        let of = &params[part.file.param];
        let source = part.source(of).map_err(|fault| fault.in_file(files.name(part.id)))?;
        let name = part.file.tensor_name();
        if !joined.insert(name.clone()) {
            let message = "is the state of one tensor and the name of another one".to_owned();
            let fault = wrong(ErrorKind::DuplicateTensor, message);
            return Err(fault.tensor(&name).in_file(files.name(part.id)));
        }
        sources.insert(name, source);
    }
    if files.is_of_ranks {
        for (name, tensor) in frozen_of(&files.models, &files.names)? {
            join(&mut sources, &mut joined, name, tensor)?;
        }
    }
    let left_out = files.drop_slices(&mut sources, &joined)?;
    let ties = ties_of(shards[files.models[0].0.0 as usize], &joined);
    let mut catalog = catalog_of(shards, model, &sources, &JoinedNames { names: &joined, ties })?;
    catalog.notes.extend(left_out);
    if files.parts.iter().all(|part| part.file.is_master()) {
        let note = format!(
            "the weights in F32 of {} are shown; state=all shows the state of the optimizer too",
            counted(files.parts.len(), "file")
        );
        catalog.notes.push(note);
    }
    Ok(catalog)
}

impl<'a> UniversalFiles<'a> {
    /// Assigns the files to kinds and ranks.
    fn of(shards: &[&'a ShardHeader]) -> Result<UniversalFiles<'a>, Fault> {
        let (mut slices, mut ranks, mut parts) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for (index, shard) in shards.iter().enumerate() {
            let id = ShardId(index as u32);
            let by_name = StateFile::of(&shard.name);
            let file = UniversalFile::of(&shard.name);
            match (shard.header.zero.as_deref(), by_name, file) {
                (Some(ZeroPart::Model(model)), Some(StateFile::Model { slice }), _) => {
                    slices.insert(slice, (id, model));
                }
                (Some(ZeroPart::Model(model)), Some(StateFile::ModelOfRank { rank, .. }), _) => {
                    // With ZeRO-3, parts of tensors of several tensor-parallel ranks are not
                    // joined.
                    shard.header.check_slices().map_err(|fault| fault.in_file(&shard.name))?;
                    ranks.insert(rank, (id, model));
                }
                (Some(ZeroPart::Universal(facts)), _, Some(file)) => {
                    let stored = shard.header.tensors().get(0);
                    parts.push(UniversalPart { id, file, facts: *facts, stored });
                }
                _ => {
                    let message =
                        "does not hold what a file of this name of a universal checkpoint \
                                   of DeepSpeed does; restore it"
                            .to_owned();
                    let fault = wrong(ErrorKind::HeaderDecode, message);
                    return Err(fault.in_file(&shard.name));
                }
            }
        }
        let is_of_ranks = slices.is_empty();
        let models = if is_of_ranks { ranks } else { slices };
        if let Some((want, _)) = (0..).zip(models.keys()).find(|(want, found)| want != *found) {
            let message =
                format!("the model states of rank {want} are missing; fetch or copy them too");
            return Err(wrong(ErrorKind::ShardMissing, message));
        }
        let names = shards.iter().map(|shard| shard.name.as_str()).collect();
        Ok(UniversalFiles { models: models.into_values().collect(), is_of_ranks, parts, names })
    }

    fn name(&self, id: ShardId) -> &'a str {
        self.names[id.0 as usize]
    }

    /// Compares the number of files of model states with the numbers that the files record.
    fn check_counts(&self) -> Result<(), Fault> {
        let Some((_, first)) = self.models.first() else {
            let message = "has no model states of DeepSpeed, which tell which tensors there are";
            return Err(wrong(ErrorKind::ShardMissing, message.to_owned()));
        };
        let found = self.models.len() as u64;
        for (id, model) in &self.models {
            let told = if self.is_of_ranks { model.ranks } else { Some(model.slices) };
            let fault =
                |message| Err(wrong(ErrorKind::ShardMissing, message).in_file(self.name(*id)));
            if let Some(told) = told.filter(|&told| told != found) {
                return fault(format!("is of {told} ranks, model states of {found} are here"));
            }
            if self.is_of_ranks && model.groups != first.groups {
                let first = self.name(self.models[0].0);
                return fault(format!("has other `param_shapes` than {first}"));
            }
        }
        Ok(())
    }

    /// The trained tensors by name. Each has the parts that the tensor-parallel ranks record.
    fn params(&self) -> BTreeMap<&'a str, Vec<&'a ZeroParam>> {
        let models = if self.is_of_ranks { &self.models[..1] } else { &self.models[..] };
        let mut params: BTreeMap<&str, Vec<&ZeroParam>> = BTreeMap::new();
        for param in models.iter().flat_map(|(_, model)| model.groups.iter().flatten()) {
            params.entry(&param.name).or_default().push(param);
        }
        params
    }

    /// Compares the names of the files of tensors with the names in the model states.
    fn check_names(&self, params: &BTreeMap<&str, Vec<&ZeroParam>>) -> Result<(), Fault> {
        let model = self.name(self.models[0].0);
        if let Some(part) = self.parts.iter().find(|part| !params.contains_key(part.file.param)) {
            let message =
                format!("is the file of a tensor that `param_shapes` of {model} does not name");
            let fault = wrong(ErrorKind::TensorUnlisted, message).tensor(part.file.param);
            return Err(fault.in_file(self.name(part.id)));
        }
        let masters: BTreeSet<&str> = self
            .parts
            .iter()
            .filter(|part| part.file.is_master())
            .map(|part| part.file.param)
            .collect();
        match params.keys().find(|name| !masters.contains(*name)) {
            None => Ok(()),
            Some(name) => {
                let message = format!(
                    "`param_shapes` of {model} names it, and {UNIVERSAL}/{name}/{MASTER} is missing; \
                     fetch or copy it too"
                );
                Err(wrong(ErrorKind::TensorMissing, message).tensor(name))
            }
        }
    }

    /// Removes from `sources` the tensors of which the model states have only the part of one rank. Returns a note
    /// about them.
    fn drop_slices(
        &self,
        sources: &mut ModelSources<'_>,
        joined: &BTreeSet<String>,
    ) -> Result<Option<String>, Fault> {
        if self.is_of_ranks || self.models.len() == 1 {
            return Ok(None);
        }
        let mut frozen =
            self.models.iter().filter_map(|(id, model)| Some((*id, model.frozen.first()?)));
        if let Some((id, (param, _))) = frozen.next() {
            let message = "is not trained, and each tensor-parallel rank has a part of it, which \
                           tensorfs does not join"
                .to_owned();
            let fault = wrong(ErrorKind::TensorMissing, message).tensor(&param.name);
            return Err(fault.in_file(self.name(id)));
        }
        let dropped: Vec<String> =
            sources.keys().filter(|name| !joined.contains(*name)).cloned().collect();
        for name in &dropped {
            sources.remove(name);
        }
        let named = named_some(dropped.iter().map(String::as_str));
        let is_some = !dropped.is_empty();
        Ok(is_some.then(|| {
            format!(
                "{named} of the model states are of one of several ranks each, and are not shown"
            )
        }))
    }
}

impl<'a> UniversalPart<'a> {
    /// Makes the tensor of the file. `of` has the parts of the tensor that the tensor-parallel
    /// ranks record.
    fn source(&self, of: &[&ZeroParam]) -> Result<ModelSource<'a>, Fault> {
        let Stored { facts, shape, start, strides, .. } = self.stored;
        let dtype = facts.dtype;
        let fault = |kind, message| Err(wrong(kind, message).tensor(self.file.param));
        if self.file.is_master() && dtype != Dtype::F32 {
            return fault(ErrorKind::DcpDtype, format!("has the dtype {dtype}, not F32"));
        }
        let param = of[0];
        let numel = numel_of(&ZeroParam { name: param.name.clone(), shape: shape.to_vec() })?;
        let mut total = 0_u64;
        for param in of {
            total = total.saturating_add(numel_of(param)?);
        }
        let is_run = strides.is_none() && dtype.bits().is_multiple_of(8);
        // In files of ZeRO-3, and of parameters with several parts, the elements have another shape
        // than the tensor.
        let is_reshaped = self.facts.is_flat || shape != param.shape;
        if of.len() == 1 && numel == total && is_reshaped && is_run {
            let pieces = vec![FlatPiece { shard: self.id, start, range: 0..numel }];
            let shape = param.shape.clone();
            return Ok(ModelSource::Flat(FlatTensor { facts, shape, pieces }));
        }
        let is_flat = self.facts.is_flat;
        let of_slices = of.len() > 1 && (numel == total || shape == param.shape);
        if !is_flat && (shape == param.shape || of_slices || self.is_cut_vocabulary(of)) {
            return Ok(ModelSource::Whole(self.stored, self.id));
        }
        let told: Vec<&[u64]> = of.iter().map(|param| param.shape.as_slice()).collect();
        let message = format!(
            "has the shape {shape:?} in its file and {told:?} in `param_shapes` of the model states; \
             restore the files of this checkpoint"
        );
        fault(ErrorKind::SizeMismatch, message)
    }

    /// Whether it is a vocabulary from whose end the padding was removed.
    fn is_cut_vocabulary(&self, of: &[&ZeroParam]) -> bool {
        let (Some((rows, columns)), Some((_, told))) =
            (self.stored.shape.split_first(), of[0].shape.split_first())
        else {
            return false;
        };
        let all = of.iter().filter_map(|param| param.shape.first());
        let most = all.fold(0_u64, |sum, rows| sum.saturating_add(*rows));
        self.facts.is_vocabulary && columns == told && *rows <= most
    }
}
