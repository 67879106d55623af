//! Makes checkpoints from the sets of a folder: proves or refuses each set.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::catalog::{Catalog, Head, ShardHeader, Tensor, named_some};
use crate::error::{Error, ErrorKind, Fault, Result, quoted};
use crate::format::deepspeed::StateFile;
use crate::format::tensorizer::keys::Secret;
use crate::format::{InputFormat, TrainingState, names};
use crate::open_options::OpenOptions;
use crate::source::Source;

use super::config::with_config_of;
use super::discover::{Candidate, Discovered, SetKind, Weights, discover, is_noted, open_weights};
use super::folder::{Folder, FolderId};
use super::indexed::FolderIndex;
use super::load::OpenShard;
use super::runs::{Latest, older_checkpoint_of_run, refuse_run};
use super::set::{Proved, Set, TailEvidence, check_completeness};
use super::tree::Tree;
use super::universal::part_of;
use super::virtual_file::present;
use super::{Checkpoint, ProvedSet};

impl Tree {
    /// Proves the sets of all folders in the family whose top folder is `top`.
    pub fn prove(&self, top: FolderId) -> Vec<(FolderId, Proved)> {
        let members = self.family(top);
        // The checkpoint that is shown for each run of DeepSpeed.
        let latest: HashMap<FolderId, Latest> = members
            .iter()
            .filter_map(|&id| Some((id, self.latest_of(&self.folder(id))?)))
            .collect();
        let proved = |id: FolderId| match self.folder(id).parent.and_then(|run| latest.get(&run)) {
            Some(Ok(named)) if *named != id && self.folder(id).state_files().is_some() => {
                let folder = self.folder(id);
                let run = folder.parent.map(|run| self.folder(run)).unwrap_or_default();
                older_checkpoint_of_run(&run, &folder)
            }
            Some(Err(_)) if self.folder(id).state_files().is_some() => Proved::default(),
            _ => self.prove_folder(id),
        };
        let mut family: Vec<(FolderId, Proved)> = Vec::with_capacity(members.len());
        for id in members {
            let folder = self.folder(id);
            let one = match self.universal_of(&folder) {
                Some(top) => {
                    let found = family.iter().find(|(id, _)| *id == top);
                    part_of(found.map(|(_, proved)| proved), &folder)
                }
                None => proved(id),
            };
            family.push((id, one));
        }
        for (id, run) in &mut family {
            if let Some(Err(error)) = latest.get(id) {
                refuse_run(&self.folder(*id), run, error);
            }
        }
        for position in 1..family.len() {
            let parent = self.folder(family[position].0).parent;
            let Some(above) = family.iter().position(|(id, _)| Some(*id) == parent) else {
                continue;
            };
            let (before, after) = family.split_at_mut(position);
            hide_twins(&before[above].1, &mut after[0].1);
            let (run, child) = (before[above].0, after[0].0);
            let is_latest =
                latest.get(&run).is_some_and(|latest| matches!(latest, Ok(id) if *id == child));
            if self.options.hub || is_latest {
                show_at_parent(&mut before[above].1, &mut after[0].1);
            }
        }
        family
    }

    fn prove_folder(&self, id: FolderId) -> Proved {
        let folder = &*self.with_tensor_files(id);
        // Folders without weight files need no index. The index is not used if there is a secret
        // for one file, because the index does not say whether that file is encrypted.
        let secret = self.options.secret.as_deref();
        let one_secret = secret.filter(|secret| self.only.is_some() && !secret.optional);
        let only = self.only.as_deref();
        let index = FolderIndex::of(self, folder).filter(FolderIndex::has_files);
        let usable = index.as_ref().filter(|_| one_secret.is_none());
        let doubt = match usable.map(FolderIndex::load) {
            Some(Ok(proved)) => return proved,
            Some(Err(doubt)) => doubt,
            None => None,
        };
        let texts = index.as_ref().map(FolderIndex::texts).unwrap_or_default();
        let (mut weights, _headers) = open_weights(folder, only, &self.options);
        if let (Some(secret), Some(only)) = (secret, only) {
            refuse_misfit(folder, &mut weights, only, secret);
        }
        let Discovered { mut winners, losers, notes } =
            discover(folder, only, &weights, &self.options);
        let mut proved = Proved { notes, ..Proved::default() };
        let names = winners.iter().chain(&losers).flat_map(Candidate::files);
        proved.weights = names.chain(weights.keys()).cloned().collect();
        if let Some(only) = only {
            winners.retain(|set| set.files().any(|file| file == only));
            // The user named a file of a set that is not shown, because another set is shown under the same name. So
            // the set of the named file is used.
            if winners.is_empty() {
                winners = losers.into_iter().filter(|set| set.files().any(|f| f == only)).collect();
            }
            proved.notes.clear();
        }
        let mut judged = prove_sets(folder, &weights, winners, self.options_of(folder));
        // Files of torch that are refused are shown unchanged, because no program would take them
        // for a model.
        for set in judged.iter().filter(|set| set.is_torch && set.outcome.is_err()) {
            proved.weights.retain(|name| !set.files.contains(name));
        }
        // The catalogs now have all the facts. The headers are freed before the layouts are made,
        // because a layout is as large as the headers.
        for loaded in weights.values_mut().flatten() {
            loaded.shard.header = Arc::new(loaded.shard.header.without_tensors());
        }
        lay_out(&mut judged);
        for Judged { name, kind, files, outcome, .. } in judged {
            if let Ok(checkpoint) = &outcome {
                proved.notes.extend(notes_of(checkpoint).map(|note| format!("{name}: {note}")));
            }
            let outcome = outcome.map(Arc::new);
            proved.sets.push(Set { name, kind, files, outcome, shown_at_parent: None });
        }
        if self.options.state == TrainingState::All && only.is_none() {
            proved.notes.extend(unread_states(folder));
        }
        proved.index = index.map(|index| index.keep(doubt, &texts, &weights, &proved));
        proved
    }
}

/// Proves the sets in their order. If several sets are links to one file, the first of them is
/// proved first.
fn prove_sets(
    folder: &Folder,
    weights: &Weights,
    candidates: Vec<Candidate>,
    options: &OpenOptions,
) -> Vec<Judged> {
    let alone = candidates.iter().all(|set| set.kind.is_one_file());
    let mut links = FirstLinks::new();
    let mut judged: Vec<Judged> = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        let files = candidate.files().cloned().collect();
        let name = names::in_format(&candidate.output, options.view.format);
        let kind = candidate.kind;
        let is_torch = candidate.format() == InputFormat::Torch;
        let header = header_of(weights, &candidate).map(Arc::as_ptr);
        let link = header.and_then(|header| links.get(&header)).copied();
        let linked = link.and_then(|position| judged[position].outcome.as_ref().ok());
        let is_judged = alone || !kind.is_one_file();
        let outcome = prove_set(folder, weights, candidate, linked, options, is_judged);
        if let (Some(header), Ok(_)) = (header, &outcome) {
            links.entry(header).or_insert(judged.len());
        }
        judged.push(Judged { name, kind, is_torch, files, outcome, link });
    }
    judged
}

/// Makes the layouts of the proved sets. A set that is another link to a file reuses the layouts of
/// the first link.
fn lay_out(judged: &mut [Judged]) {
    for position in 0..judged.len() {
        let layouts =
            |position: usize| Some(judged[position].outcome.as_ref().ok()?.known_layouts());
        let linked = judged[position].link.and_then(layouts).unwrap_or_default();
        let laid_out = match &judged[position].outcome {
            Ok(checkpoint) => checkpoint.lay_out(&linked),
            Err(_) => Ok(()),
        };
        if let Err(error) = laid_out {
            judged[position].outcome = Err(error);
        }
    }
}

/// Refuses the file `only` if it is not encrypted, but `secret` was given for it.
fn refuse_misfit(folder: &Folder, weights: &mut Weights, only: &str, secret: &Secret) {
    if let Some(Ok(shard)) = weights.get(only)
        && let Some(fault) = secret.misfit(shard.source.is_encrypted())
    {
        let refused = Error::refused(&folder.path, fault.in_file(only));
        weights.insert(only.to_owned(), Err(refused));
    }
}

/// The index of the first checkpoint of each file. The key is the header, which all links to a file
/// share.
type FirstLinks = HashMap<*const Head, usize>;

/// A set that is refused, or that is proved and has no layouts yet.
struct Judged {
    name: String,
    kind: SetKind,
    is_torch: bool,
    files: BTreeSet<String>,
    outcome: Result<Checkpoint>,
    /// Index of an earlier set that is another link to the same file.
    link: Option<usize>,
}

/// The header of a candidate. `None` if the candidate has several files.
fn header_of<'a>(weights: &'a Weights, candidate: &Candidate) -> Option<&'a Arc<Head>> {
    let mut members = candidate.members.iter().filter(|_| candidate.kind.is_one_file());
    let loaded = weights.get(members.next()?)?.as_ref().ok()?;
    Some(&loaded.shard.header)
}

/// Marks the sets of `child` whose tensors equal those of a set of `parent`.
fn hide_twins(parent: &Proved, child: &mut Proved) {
    for set in &mut child.sets {
        let Ok(checkpoint) = &set.outcome else { continue };
        let twin = parent.sets.iter().find(|other| {
            let same = |o: &Arc<Checkpoint>| o.proved.same_tensors(&checkpoint.proved);
            other.outcome.as_ref().is_ok_and(same)
        });
        if let Some(twin) = twin {
            set.shown_at_parent = Some(twin.name.clone());
            child.notes.push(format!("{}: the parent folder holds the same tensors", set.name));
        }
    }
}

/// Moves the only checkpoint of `child` to `parent`, if `parent` has no weights. Users of a hub cache look for
/// weights in the folder of the model itself.
fn show_at_parent(parent: &mut Proved, child: &mut Proved) {
    let has_weights = !parent.sets.is_empty() || !parent.weights.is_empty();
    let [set] = child.sets.as_mut_slice() else { return };
    let Ok(checkpoint) = &set.outcome else { return };
    // Files that are shown unchanged stay in their folder.
    if has_weights || checkpoint.files.is_empty() {
        return;
    }
    parent.sets.push(Set {
        name: set.name.clone(),
        kind: set.kind,
        files: set.files.clone(),
        outcome: Ok(checkpoint.clone()),
        shown_at_parent: None,
    });
    set.shown_at_parent = Some(set.name.clone());
}

/// Proves one set, or reuses the catalog of another link to the same file. `judged` says whether
/// `expect-shards` and `reference` apply to the set.
fn prove_set(
    folder: &Folder,
    weights: &Weights,
    candidate: Candidate,
    linked: Option<&Checkpoint>,
    options: &OpenOptions,
    judged: bool,
) -> Result<Checkpoint> {
    if let Some(error) = candidate.refused {
        return Err(error);
    }
    let one_file = candidate.members.first().filter(|_| candidate.kind.is_one_file());
    let refused = |fault: Fault| {
        let named = match one_file {
            Some(name) => fault.in_file(name),
            None => fault,
        };
        Error::refused(&folder.path, named)
    };
    let mut loaded: Vec<&OpenShard> = Vec::with_capacity(candidate.members.len());
    for name in &candidate.members {
        match weights.get(name) {
            Some(Ok(file)) => loaded.push(file),
            Some(Err(error)) => return Err(error.copied()),
            None => {
                let message = "is named by the weight map but is not a weight file";
                return Err(refused(ErrorKind::ShardMissing.fault(message).in_file(name)));
            }
        }
    }
    refuse_plain(loaded.iter().copied()).map_err(refused)?;
    let headers: Vec<&ShardHeader> = loaded.iter().map(|file| &file.shard).collect();
    let map = candidate.map.as_ref().map(|(_, map)| map);
    let mut catalog = match (candidate.kind, &linked) {
        (_, Some(linked)) => Ok(linked.proved.of_link(headers[0])),
        (SetKind::Dcp | SetKind::Distributed, None) => Catalog::of_dcp_shards(&headers, map),
        (SetKind::Ranks, None) => Catalog::of_rank_files(&headers),
        (SetKind::DeepSpeed, None) => deepspeed_catalog(folder, &headers),
        (_, None) => Catalog::of_whole_tensors(&headers, map),
    }
    .map_err(refused)?;
    let bintensors = candidate.kind == SetKind::Bintensors;
    if bintensors && linked.is_none() {
        // No program saves pieces in the bintensors format, so such metadata keys are not sharding
        // notes and are kept.
        catalog.metadata = loaded[0].shard.header.metadata.clone().map(Arc::new);
    }
    refuse_doubles(&candidate, &catalog).map_err(refused)?;
    let total_size = map.and_then(|map| map.metadata.get("total_size")?.as_u64());
    let set = TailEvidence {
        name: &candidate.output,
        kind: candidate.kind,
        total_size,
        noted: !bintensors && loaded.iter().any(|file| is_noted(file)),
        judged,
        manifest: None,
    };
    let (tail, manifest) = check_completeness(folder, &catalog, options, &set)?;
    let by_name: HashMap<&str, &Arc<Source>> =
        loaded.iter().map(|file| (file.shard.name.as_str(), &file.source)).collect();
    // The catalog has the shards of `loaded`, sorted by name.
    let sources = catalog.shards.iter().map(|shard| by_name[shard.name.as_str()].clone()).collect();
    let (kind, view) = (candidate.kind, &options.view);
    let name = names::in_format(&candidate.output, view.format);
    let presented =
        with_config_of(folder, options, |config| present(catalog, kind, &name, view, config))
            .map_err(refused)?;
    let set = ProvedSet {
        name,
        kind,
        format: view.format,
        directory: folder.path.clone(),
        tail,
        sources,
        map: candidate.map.map(|(name, map)| (name, map.metadata)),
        manifest,
    };
    Ok(Checkpoint::new(set, presented))
}

/// The catalog of a checkpoint of DeepSpeed, with a note about the weights that are not shown.
fn deepspeed_catalog(folder: &Folder, headers: &[&ShardHeader]) -> Result<Catalog, Fault> {
    let mut catalog = Catalog::of_deepspeed(headers)?;
    if let ([model], Some(states)) = (headers, folder.state_files()) {
        let note = states.note_of_model(model.header.zero.as_deref());
        catalog.notes.push(note.map_err(|fault| fault.in_file(&model.name))?);
    }
    Ok(catalog)
}

/// A note about files of `folder` that have the state of a training and from which nothing is
/// shown.
fn unread_states(folder: &Folder) -> Option<String> {
    let is_model = |name: &str| matches!(StateFile::of(name), Some(StateFile::ModelOfRank { .. }));
    let is_state = |name: &&str| names::is_torch_state(name) && !is_model(name);
    let unread: Vec<&str> = folder.names().filter(is_state).collect();
    (!unread.is_empty() && folder.has_pickles(None)).then(|| {
        let named = named_some(unread.into_iter());
        format!("the state of the training in {named} is not shown, also by state=all")
    })
}

/// Refuses a plain file among encrypted files. Somebody who can write to the folder may have
/// replaced an encrypted file by it.
pub(super) fn refuse_plain<'a>(
    loaded: impl IntoIterator<Item = &'a OpenShard>,
) -> Result<(), Fault> {
    let (encrypted, plain): (Vec<&OpenShard>, Vec<&OpenShard>) =
        loaded.into_iter().partition(|file| file.source.is_encrypted());
    let (Some(encrypted), Some(plain)) = (encrypted.first(), plain.first()) else { return Ok(()) };
    let message = format!(
        "is not encrypted, but {} of the same checkpoint is; restore the file from a good copy, or \
         encrypt all files of the checkpoint",
        encrypted.shard.name
    );
    Err(ErrorKind::NotEncrypted.fault(message).in_file(&plain.shard.name))
}

/// The notes about a proved set.
fn notes_of(checkpoint: &Checkpoint) -> impl Iterator<Item = String> {
    checkpoint.catalog.notes.iter().cloned().chain(unprotected_zeros(checkpoint))
}

/// A note about tensors of encrypted files that have no data. No MAC protects their zeros.
fn unprotected_zeros(checkpoint: &Checkpoint) -> Option<String> {
    checkpoint.sources.iter().find(|source| source.is_encrypted())?;
    let is_unprotected = |tensor: &Tensor<'_>| tensor.len > 0 && tensor.is_stored_zeros();
    let mut zeros = checkpoint.proved.tensors().filter(is_unprotected);
    let first = zeros.next()?;
    let name = quoted(first.name);
    Some(match zeros.count() {
        0 => format!(
            "tensor {name} of an encrypted file has no data and is read as zeros, which no MAC covers"
        ),
        others => format!(
            "{} tensors of encrypted files have no data and are read as zeros, which no MAC covers: \
             {name}, ...",
            others + 1
        ),
    })
}

/// Refuses files that have a sharding note and the same whole tensors, but not the name of a DCP
/// shard. They are two checkpoints, and not one checkpoint with replicas.
fn refuse_doubles(candidate: &Candidate, catalog: &Catalog) -> Result<(), Fault> {
    let named = candidate.members.iter().any(|name| names::is_dcp_shard(name));
    let whole = |tensor: Tensor<'_>| tensor.pieces().all(|piece| piece.shape == tensor.shape);
    if candidate.kind != SetKind::Dcp || named || !catalog.tensors().all(whole) {
        return Ok(());
    }
    let double = catalog.tensors().find_map(|tensor| Some((tensor, tensor.replicas().next()?)));
    double.map_or(Ok(()), |(tensor, replica)| {
        let first = &catalog.shard(tensor.first_piece().shard).name;
        let second = &catalog.shard(replica.shard).name;
        let message = format!("lies whole in {first} and in {second}; are these two checkpoints?");
        Err(ErrorKind::DuplicateTensor.fault(message).tensor(tensor.name).in_file(second))
    })
}
