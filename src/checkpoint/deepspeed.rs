//! The files of a checkpoint of DeepSpeed in its folder, according to their names.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{ErrorKind, Fault};
use crate::format::deepspeed::{StateFile, UniversalFile, ZeroModel, ZeroPart};
use crate::open_options::ZeroWeights;

/// Stem of the file name under which a checkpoint is shown.
pub(super) const STEM: &str = "model";

/// The files of a checkpoint of DeepSpeed in one folder, according to their names.
#[derive(Debug, Default)]
pub(super) struct StateFiles<'a> {
    model: Option<&'a str>,
    /// Files of model states and of optimizer states, by rank.
    models: BTreeMap<u64, &'a str>,
    optimizers: BTreeMap<u64, &'a str>,
    /// Files of tensors of a universal checkpoint.
    tensors: Vec<&'a str>,
    /// Files of a model that is split by layers or tensors, or has experts.
    others: Vec<(StateFile, &'a str)>,
    /// Two files of the same rank, if there are any.
    double: Option<[&'a str; 2]>,
}

impl<'a> StateFiles<'a> {
    /// The files of a checkpoint in a folder that has files of these names. `None` if no name is
    /// that of a file of DeepSpeed.
    pub(super) fn of(names: impl Iterator<Item = &'a str>) -> Option<StateFiles<'a>> {
        let mut found = StateFiles::default();
        for name in names {
            if UniversalFile::of(name).is_some() {
                found.tensors.push(name);
                continue;
            }
            let before = match StateFile::of(name) {
                Some(StateFile::Model { slice: 0 }) => found.model.replace(name),
                Some(StateFile::ModelOfRank { rank, slice: 0 }) => found.models.insert(rank, name),
                Some(StateFile::Optimizer { rank, slice: 0 }) => {
                    found.optimizers.insert(rank, name)
                }
                Some(other) => {
                    found.others.push((other, name));
                    None
                }
                None => None,
            };
            found.double = found.double.or(before.map(|before| [before, name]));
        }
        let is_empty = found.model.is_none()
            && found.tensors.is_empty()
            && found.others.is_empty()
            && found.models.is_empty()
            && found.optimizers.is_empty();
        (!is_empty).then_some(found)
    }

    /// Names of the files that have the weights.
    pub(super) fn members(&self, zero: ZeroWeights) -> BTreeSet<String> {
        let mut members: BTreeSet<&str> = self.model.into_iter().collect();
        if !self.tensors.is_empty() {
            let slices = self.others.iter().filter(|(file, _)| is_model_of_slice(*file));
            members.extend(self.models.values().chain(&self.tensors));
            members.extend(slices.map(|(_, name)| name));
            return members.into_iter().map(str::to_owned).collect();
        }
        if zero == ZeroWeights::Fp32 || !self.models.is_empty() {
            members.extend(self.models.values().chain(self.optimizers.values()));
        }
        if members.is_empty() {
            members
                .extend(self.optimizers.values().chain(self.others.iter().map(|(_, name)| name)));
        }
        members.into_iter().map(str::to_owned).collect()
    }

    /// The reason why these files are no checkpoint that can be read, according to their names.
    pub(super) fn fault(&self, zero: ZeroWeights) -> Option<Fault> {
        let fault =
            |name: &str, kind: ErrorKind, message: String| Some(kind.fault(message).in_file(name));
        let merge = "make one file of the checkpoint with the tools of DeepSpeed";
        let is_universal = !self.tensors.is_empty();
        let is_unread =
            |(file, _): &&(StateFile, &str)| !(is_universal && is_model_of_slice(*file));
        if let Some((other, name)) = self.others.iter().find(is_unread) {
            let what = match other {
                StateFile::Layer => "one layer of a model that is cut in layers (pipeline)",
                StateFile::Expert => "one expert of a model",
                _ => "a part of a model that is cut in tensors",
            };
            let message = format!("holds {what}, which tensorfs does not join; {merge}");
            return fault(name, ErrorKind::TensorMissing, message);
        }
        if let Some([first, second]) = self.double {
            let message =
                format!("is of the same rank as {first}; remove the files of the other run");
            return fault(second, ErrorKind::DuplicateTensor, message);
        }
        let first = self.optimizers.values().next().copied();
        if let Some(name) = self.tensors.first().filter(|_| self.model.is_none()) {
            // The number of ranks is not checked here. It is compared later with the number in the
            // files.
            let message = "no model states are beside `zero`, as mp_rank_00_model_states.pt, which tell \
                           which tensors there are; fetch or copy them too";
            return self
                .models
                .is_empty()
                .then(|| fault(name, ErrorKind::ShardMissing, message.to_owned()))
                .flatten();
        }
        if self.models.is_empty() {
            if let (None, Some(name)) = (self.model, first) {
                let message = "the optimizer states are here, but no mp_rank_00_model_states.pt; fetch \
                               or copy it too";
                return fault(name, ErrorKind::ShardMissing, message.to_owned());
            }
            if let (Some(model), None, ZeroWeights::Fp32) = (self.model, first, zero)
                && !is_universal
            {
                let message = "no optimizer states are beside it, which hold the weights in F32; leave \
                               zero=fp32 out for those of the model";
                return fault(model, ErrorKind::ShardMissing, message.to_owned());
            }
            return None;
        }
        if let Some(model) = self.model {
            let message = "lies beside model states of ZeRO-3, which are of another run; remove the old \
                           files";
            return fault(model, ErrorKind::DuplicateTensor, message.to_owned());
        }
        let last = self.models.keys().chain(self.optimizers.keys()).max().copied().unwrap_or(0);
        let name = self.models.values().next().copied().unwrap_or_default();
        for (files, what) in [(&self.models, "model"), (&self.optimizers, "optimizer")] {
            if let Some(rank) = (0..=last).find(|rank| !files.contains_key(rank)) {
                let message = format!(
                    "{} {what} states found, those of rank {rank} are missing; the ranks may have saved \
                     them on other machines: copy all into one folder",
                    files.len()
                );
                return fault(name, ErrorKind::ShardMissing, message);
            }
        }
        None
    }

    /// Names of the files of a model that is split by layers or tensors, or has experts. None of these files is a
    /// checkpoint by itself.
    pub(super) fn others(&self) -> BTreeSet<String> {
        self.others.iter().map(|(_, name)| (*name).to_owned()).collect()
    }

    /// A note for a set that has only the model states. `zero` are the facts in them.
    ///
    /// # Errors
    /// There are optimizer states of more ranks than the model states record, so some files come
    /// from another run.
    pub(super) fn note_of_model(&self, zero: Option<&ZeroPart>) -> Result<String, Fault> {
        let shown = "the weights of `module` are shown";
        let found = self.optimizers.len() as u64;
        match zero {
            Some(ZeroPart::Model(ZeroModel { ranks: Some(ranks), .. })) if *ranks < found => {
                Err(ErrorKind::DuplicateTensor.fault(format!(
                    "is of {ranks} ranks, and optimizer states of {found} are here, some of them of another \
                     run; restore the files, or remove those of the others"
                )))
            }
            Some(ZeroPart::Model(ZeroModel { ranks: Some(ranks), .. })) if *ranks != found => {
                Ok(format!(
                    "{shown}; they are of {ranks} ranks, and optimizer states of {found} are here, \
                     which zero=fp32 would refuse"
                ))
            }
            _ => Ok(format!("{shown}; zero=fp32 shows those of the optimizer states")),
        }
    }
}

/// Whether the file has the model states of one tensor-parallel rank.
fn is_model_of_slice(file: StateFile) -> bool {
    matches!(file, StateFile::Model { .. })
}
