//! From the sets of a folder to checkpoints, each proved or refused.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use crate::catalog::{Catalog, Tensor};
use crate::error::{Class, Error, Fault, Result};
use crate::format::manifest::{self, Reference};
use crate::format::names;
use crate::layout::Layout;
use crate::source::Source;
use crate::view::{Arrangement, View};

use super::discover::{Candidate, Discovered, Kind, Weights, discover, is_noted, open_weights};
use super::load::{Loaded, read_reference};
use super::tree::{Folder, FolderId, Tree};
use super::{Checkpoint, Tail};

/// One set of a folder.
#[derive(Debug)]
pub struct Set {
    /// Name of the file that it is shown as.
    pub name: String,
    /// What makes its files a set.
    pub kind: Kind,
    /// Its files, weight map included.
    pub files: BTreeSet<String>,
    /// The checkpoint, or why it is refused.
    pub outcome: Result<Arc<Checkpoint>>,
    /// Where its parent folder holds the same tensors: the parent's file, which is shown.
    pub shown_at_parent: Option<String>,
}

/// The sets of one folder.
#[derive(Debug, Default)]
pub struct Proved {
    /// Sets that are shown, or refused.
    pub sets: Vec<Set>,
    /// Weight files and weight maps of the folder, which are only shown as part of a set.
    pub weights: BTreeSet<String>,
    /// What is unusual but not wrong, a line each.
    pub notes: Vec<String>,
}

impl Tree {
    /// Proves the sets of the family of folders of which `head` is the top.
    pub fn prove(&self, head: FolderId) -> Vec<(FolderId, Proved)> {
        let members = self.family(head);
        let mut family: Vec<(FolderId, Proved)> =
            members.into_iter().map(|id| (id, self.prove_folder(id))).collect();
        for at in 1..family.len() {
            let parent = self.folders[family[at].0].parent;
            let Some(above) = family.iter().position(|(id, _)| Some(*id) == parent) else {
                continue;
            };
            let (before, after) = family.split_at_mut(at);
            hide_twins(&before[above].1, &mut after[0].1);
        }
        family
    }

    fn prove_folder(&self, id: FolderId) -> Proved {
        let folder = &self.folders[id];
        let only = self.only.as_deref();
        let weights = open_weights(folder, only);
        let Discovered { mut winners, losers, notes } =
            discover(folder, &weights, self.view.prefer);
        let mut proved = Proved { notes, ..Proved::default() };
        let names = winners.iter().chain(&losers).flat_map(Candidate::files);
        proved.weights = names.chain(weights.keys()).cloned().collect();
        if let Some(only) = only {
            winners.retain(|set| set.files().any(|file| file == only));
            // Of a set that loses its name, one file was named: that settles the name.
            if winners.is_empty() {
                winners = losers.into_iter().filter(|set| set.files().any(|f| f == only)).collect();
            }
            proved.notes.clear();
        }
        let alone = winners.iter().all(|set| set.kind == Kind::Single);
        for candidate in winners {
            let files = candidate.files().cloned().collect();
            let (name, kind) = (candidate.output.clone(), candidate.kind);
            let judged = alone || kind != Kind::Single;
            let outcome = prove_set(folder, &weights, candidate, &self.view, judged);
            if let Ok(checkpoint) = &outcome {
                proved
                    .notes
                    .extend(checkpoint.catalog.notes.iter().map(|n| format!("{name}: {n}")));
            }
            let outcome = outcome.map(Arc::new);
            proved.sets.push(Set { name, kind, files, outcome, shown_at_parent: None });
        }
        proved
    }
}

/// Marks the sets of `child` that hold the tensors of a set of `parent`.
fn hide_twins(parent: &Proved, child: &mut Proved) {
    for set in &mut child.sets {
        let Ok(checkpoint) = &set.outcome else { continue };
        let twin = parent.sets.iter().find(|other| {
            let same = |o: &Arc<Checkpoint>| o.catalog.same_tensors(&checkpoint.catalog);
            other.outcome.as_ref().is_ok_and(same)
        });
        if let Some(twin) = twin {
            set.shown_at_parent = Some(twin.name.clone());
            child.notes.push(format!("{}: the parent folder holds the same tensors", set.name));
        }
    }
}

/// Proves one set. `judged`: whether `expect-shards` and `reference` are about it.
fn prove_set(
    folder: &Folder,
    weights: &Weights,
    candidate: Candidate,
    view: &View,
    judged: bool,
) -> Result<Checkpoint> {
    if let Some(error) = candidate.refused {
        return Err(error);
    }
    let refused = |fault: Fault| Error::refused(&folder.path, fault);
    let mut loaded: Vec<&Loaded> = Vec::with_capacity(candidate.members.len());
    for name in &candidate.members {
        match weights.get(name) {
            Some(Ok(file)) => loaded.push(file),
            Some(Err(error)) => return Err(copy_of(error)),
            None => {
                let message = "is named by the weight map but is not a weight file";
                return Err(refused(Fault::new(Class::ShardMissing, message).in_file(name)));
            }
        }
    }
    let headers = loaded.iter().map(|file| file.shard.clone()).collect();
    let map = candidate.map.as_ref().map(|(_, map)| map);
    let catalog = match candidate.kind {
        Kind::Dcp => Catalog::of_dcp_shards(headers, map),
        Kind::WeightMap | Kind::Numbered | Kind::Single => Catalog::of_whole_tensors(headers, map),
    };
    let catalog = catalog.map_err(refused)?;
    refuse_doubles(&candidate, &catalog).map_err(refused)?;
    let noted = loaded.iter().any(|file| is_noted(file));
    let tail = prove_tail(folder, &candidate, &catalog, view, judged, noted)?;
    let mut layout = None;
    if candidate.kind != Kind::Single && view.arrangement == Arrangement::Single {
        // A checkpoint that cannot be laid out is refused here, not when it is first read.
        layout = Some(Arc::new(Layout::single(&catalog).map_err(refused)?));
    }
    let by_name: HashMap<&str, &Arc<Source>> =
        loaded.iter().map(|file| (file.shard.name.as_str(), &file.source)).collect();
    // The catalog has the shards of `loaded`, sorted.
    let sources = catalog.shards.iter().map(|shard| by_name[shard.name.as_str()].clone());
    Ok(Checkpoint {
        name: candidate.output,
        kind: candidate.kind,
        directory: folder.path.clone(),
        tail,
        sources: sources.collect(),
        catalog,
        layout,
        map: candidate.map,
    })
}

/// Refuses files that merely carry a sharding note, hold whole tensors, and hold the same ones:
/// they are two checkpoints, not one saved with replicas.
fn refuse_doubles(candidate: &Candidate, catalog: &Catalog) -> std::result::Result<(), Fault> {
    let named = candidate.members.iter().any(|name| names::is_dcp_shard(name));
    let whole = |tensor: &Tensor| tensor.pieces.iter().all(|piece| piece.shape == tensor.shape);
    if candidate.kind != Kind::Dcp || named || !catalog.tensors.iter().all(whole) {
        return Ok(());
    }
    let double = catalog.tensors.iter().find(|tensor| !tensor.replicas.is_empty());
    double.map_or(Ok(()), |tensor| {
        let first = &catalog.shard(tensor.pieces[0].shard).name;
        let second = &catalog.shard(tensor.replicas[0].shard).name;
        let message = format!("lies whole in {first} and in {second}; are these two checkpoints?");
        Err(Fault::new(Class::DuplicateTensor, message).tensor(&tensor.name).in_file(second))
    })
}

/// Compares the catalog with what is known from outside the shards.
fn prove_tail(
    folder: &Folder,
    candidate: &Candidate,
    catalog: &Catalog,
    view: &View,
    judged: bool,
    noted: bool,
) -> Result<Tail> {
    let refused = |fault: Fault| Error::refused(&folder.path, fault);
    // Files with a sharding note may be pieces that lack what comes after them, also where all
    // of them begin at 0.
    let total_size = candidate.map.as_ref().and_then(|(_, map)| map.metadata.get("total_size"));
    let total_fits = total_size.and_then(Value::as_u64) == Some(catalog.data_len());
    let mut proven = !noted || (candidate.kind == Kind::WeightMap && total_fits);
    let mut compare = |path: &Path, hint: &str| -> Result<()> {
        let known = read_reference(path)?;
        check_reference(catalog, &known, path, hint).map_err(refused)?;
        // Names alone do not show that a tensor has lost its end.
        proven |= known.total_size.is_some() || known.tensors.values().all(Option::is_some);
        Ok(())
    };
    let beside = manifest::file_name(&candidate.output);
    if let Some(path) = view.reference.as_deref().filter(|_| judged) {
        compare(path, "")?;
    } else if let Some(file) = folder.file(&beside) {
        let hint = "; if the checkpoint was saved anew, remove the manifest and write a new one";
        compare(&file.path, hint)?;
    }
    if let Some(expected) = view.expect_shards.filter(|_| judged) {
        catalog.check_shards(expected).map_err(refused)?;
        proven = true;
    }
    Ok(if proven { Tail::Proven } else { Tail::Unproven })
}

fn check_reference(
    catalog: &Catalog,
    known: &Reference,
    path: &Path,
    hint: &str,
) -> std::result::Result<(), Fault> {
    catalog.check_reference(known).map_err(|fault| Fault {
        message: format!("{} (reference: {}{hint})", fault.message, path.display()),
        ..fault
    })
}

/// The error of a shard again, for each set that the shard belongs to.
fn copy_of(error: &Error) -> Error {
    match error {
        Error::Refused { path, fault } => {
            Error::Refused { path: path.clone(), fault: fault.clone() }
        }
        Error::Io { path, action, source } => {
            let source = match source.raw_os_error() {
                Some(errno) => std::io::Error::from_raw_os_error(errno),
                None => std::io::Error::new(source.kind(), source.to_string()),
            };
            Error::Io { path: path.clone(), action, source }
        }
        Error::Changed { path, detail } => {
            Error::Changed { path: path.clone(), detail: detail.clone() }
        }
        Error::Usage { message } => Error::Usage { message: message.clone() },
    }
}
