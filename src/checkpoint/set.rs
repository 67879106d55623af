//! The sets of a folder, and the proof that the last pieces of a set are there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::Catalog;
use crate::error::{Error, Fault, Result, shown_path};
use crate::format::manifest::{self, Reference};
use crate::open_options::OpenOptions;

use super::discover::SetKind;
use super::folder::Folder;
use super::load::read_reference;
use super::{Checkpoint, Tail};

/// One set of a folder.
#[derive(Debug)]
pub struct Set {
    /// Name of the file under which it is shown.
    pub name: String,
    /// The reason why its files form a set.
    pub kind: SetKind,
    /// Names of its files, including its weight maps.
    pub files: BTreeSet<String>,
    /// The checkpoint, or the error that refuses it.
    pub outcome: Result<Arc<Checkpoint>>,
    /// Name of the file in the parent folder that has the same tensors and is shown instead. `None`
    /// if there is no such file.
    pub shown_at_parent: Option<String>,
}

/// The sets of one folder.
#[derive(Debug, Default)]
pub struct Proved {
    /// Sets that are shown, and sets that are refused.
    pub sets: Vec<Set>,
    /// Names of the weight files and weight maps of the folder. They are shown only as part of a
    /// set.
    pub weights: BTreeSet<String>,
    /// Notes about unusual but valid input, one line each.
    pub notes: Vec<String>,
    /// State of the index. `None` if no indexes are written.
    pub index: Option<IndexState>,
}

impl Proved {
    /// Whether the sets were loaded from the index, without reading a header.
    pub fn from_index(&self) -> bool {
        self.index.as_ref().is_some_and(|index| index.origin == Origin::Index)
    }
}

/// The state of the index of a folder.
#[derive(Clone, Debug)]
pub struct IndexState {
    /// Path of the index file.
    pub path: PathBuf,
    /// Length of the index file in bytes. `None` if there is no file.
    pub len: Option<u64>,
    /// Time at which the files of the folder were examined for the index, in seconds since 1970.
    pub made: i64,
    /// Where the sets come from.
    pub origin: Origin,
}

/// Where the sets of a folder come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The index.
    Index,
    /// The headers. The index was then written. The string is the reason why the previous index was
    /// not used.
    Headers(Option<String>),
    /// The headers. The index was not written, and the string is the reason.
    NotKept(String),
}

/// The facts about a set that are needed for the proof of its last pieces.
pub(super) struct TailEvidence<'a> {
    /// Name of the file under which it is shown.
    pub(super) name: &'a str,
    pub(super) kind: SetKind,
    /// Length in bytes of all tensors according to its weight map. `None` if unknown.
    pub(super) total_size: Option<u64>,
    /// Whether a shard has a sharding note.
    pub(super) noted: bool,
    /// Whether `expect-shards` and `reference` apply to it.
    pub(super) judged: bool,
    /// Whether the manifest beside it has the shapes of all tensors. `None` if it was not compared
    /// yet.
    pub(super) manifest: Option<bool>,
}

/// Compares the catalog with the manifest and the references. Also returns whether the manifest
/// beside the set has the shapes of all tensors. `None` if no manifest was compared.
pub(super) fn check_completeness(
    folder: &Folder,
    catalog: &Catalog,
    options: &OpenOptions,
    set: &TailEvidence<'_>,
) -> Result<(Tail, Option<bool>)> {
    // If a file has a sharding note, its tensors may lack their last pieces, even if all pieces in
    // the file begin at 0.
    let total_fits = || set.total_size.is_some_and(|total| total == catalog.data_len());
    let mut proven =
        !set.noted || catalog.shapes_recorded || (set.kind == SetKind::WeightMap && total_fits());
    let mut manifest = None;
    let has_reference = set.judged && options.reference.is_some();
    if let Some(file) = folder.file(&manifest::file_name(set.name)).filter(|_| !has_reference) {
        let hint = "; if the checkpoint was saved anew, remove the manifest and write a new one";
        let knows_all = match set.manifest {
            Some(known) => known,
            None => compare(&folder.path, catalog, &file.path, hint, options)?,
        };
        manifest = Some(knows_all);
        proven |= knows_all;
    }
    if set.judged {
        proven |= check_demands(&folder.path, catalog, options)?;
    }
    Ok((if proven { Tail::Proven } else { Tail::Unproven }, manifest))
}

/// Compares the catalog of a set in `folder` with the reference and the number of shards in
/// `options`. Returns whether these prove that no last piece is missing.
pub(super) fn check_demands(
    folder: &Path,
    catalog: &Catalog,
    options: &OpenOptions,
) -> Result<bool> {
    let mut proven = match &options.reference {
        Some(path) => compare(folder, catalog, path, "", options)?,
        None => false,
    };
    if let Some(expected) = options.expect_shards {
        catalog.check_shards(expected).map_err(|fault| Error::refused(folder, fault))?;
        proven = true;
    }
    Ok(proven)
}

/// Compares the catalog of a set in `folder` with a reference. Returns whether the reference proves
/// that no last piece is missing.
fn compare(
    folder: &Path,
    catalog: &Catalog,
    path: &Path,
    hint: &str,
    options: &OpenOptions,
) -> Result<bool> {
    let known = read_reference(path, options)?;
    check_reference(catalog, &known, path, hint).map_err(|fault| Error::refused(folder, fault))?;
    // A list of names without shapes does not show that a tensor has lost its end.
    Ok(known.total_size.is_some() || known.tensors.values().all(Option::is_some))
}

fn check_reference(
    catalog: &Catalog,
    known: &Reference,
    path: &Path,
    hint: &str,
) -> Result<(), Fault> {
    catalog.check_reference(known).map_err(|fault| Fault {
        message: format!("{} (reference: {}{hint})", fault.message, shown_path(path)),
        ..fault
    })
}
