//! The sets of a folder, and the proof that the last pieces of a set are there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::Catalog;
use crate::error::{Error, Fault, Result, shown_path};
use crate::format::manifest::{self, Reference};
use crate::open_options::OpenOptions;

use super::discover::SetKind;
use super::load::read_reference;
use super::tree::Folder;
use super::{Checkpoint, Tail};

/// One set of a folder.
#[derive(Debug)]
pub struct Set {
    /// Name of the file that it is shown as.
    pub name: String,
    /// What makes its files a set.
    pub kind: SetKind,
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
    /// What became of the index, where indexes are kept.
    pub index: Option<IndexState>,
}

impl Proved {
    /// Whether the index said so, and no header was read.
    pub fn from_index(&self) -> bool {
        self.index.as_ref().is_some_and(|index| index.origin == Origin::Index)
    }
}

/// What became of the index of a folder.
#[derive(Clone, Debug)]
pub struct IndexState {
    /// Its file.
    pub path: PathBuf,
    /// Length of the file in bytes, where it is there.
    pub len: Option<u64>,
    /// When the files of the folder were looked at for it, in seconds since 1970.
    pub made: i64,
    /// Where the sets come from.
    pub origin: Origin,
}

/// Where the sets of a folder come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From the index.
    Index,
    /// From the headers, and the index was written: what spoke against the one that was there.
    Headers(Option<String>),
    /// From the headers, and no index is kept, for this reason.
    NotKept(String),
}

/// A set, as far as the proof of its last pieces needs it.
pub(super) struct TailEvidence<'a> {
    /// Name of the file that it is shown as.
    pub(super) name: &'a str,
    pub(super) kind: SetKind,
    /// What its weight map says of the bytes of all tensors.
    pub(super) total_size: Option<u64>,
    /// Whether a shard has a sharding note.
    pub(super) noted: bool,
    /// Whether `expect-shards` and `reference` are about it.
    pub(super) judged: bool,
    /// Where the manifest beside it is known to agree: whether it knows all shapes.
    pub(super) manifest: Option<bool>,
}

/// Compares the catalog with what is known from outside the shards. Also returns whether the
/// manifest beside it, where that was compared, knows all shapes.
pub(super) fn check_completeness(
    folder: &Folder,
    catalog: &Catalog,
    options: &OpenOptions,
    set: &TailEvidence<'_>,
) -> Result<(Tail, Option<bool>)> {
    let refused = |fault: Fault| Error::refused(&folder.path, fault);
    // Files with a sharding note may be pieces that lack what comes after them, also where all
    // of them begin at 0.
    let total_fits = || set.total_size.is_some_and(|total| total == catalog.data_len());
    let mut proven =
        !set.noted || catalog.shapes_recorded || (set.kind == SetKind::WeightMap && total_fits());
    let compare = |path: &Path, hint: &str| -> Result<bool> {
        let known = read_reference(path)?;
        check_reference(catalog, &known, path, hint).map_err(refused)?;
        // Names alone do not show that a tensor has lost its end.
        Ok(known.total_size.is_some() || known.tensors.values().all(Option::is_some))
    };
    let mut manifest = None;
    if let Some(path) = options.reference.as_deref().filter(|_| set.judged) {
        proven |= compare(path, "")?;
    } else if let Some(file) = folder.file(&manifest::file_name(set.name)) {
        let hint = "; if the checkpoint was saved anew, remove the manifest and write a new one";
        let knows_all = match set.manifest {
            Some(known) => known,
            None => compare(&file.path, hint)?,
        };
        manifest = Some(knows_all);
        proven |= knows_all;
    }
    if let Some(expected) = options.expect_shards.filter(|_| set.judged) {
        catalog.check_shards(expected).map_err(refused)?;
        proven = true;
    }
    Ok((if proven { Tail::Proven } else { Tail::Unproven }, manifest))
}

fn check_reference(
    catalog: &Catalog,
    known: &Reference,
    path: &Path,
    hint: &str,
) -> std::result::Result<(), Fault> {
    catalog.check_reference(known).map_err(|fault| Fault {
        message: format!("{} (reference: {}{hint})", fault.message, shown_path(path)),
        ..fault
    })
}
