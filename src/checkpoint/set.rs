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
    /// Name of the file that it is shown as.
    pub name: String,
    /// The fact that makes its files a set.
    pub kind: SetKind,
    /// Its files, weight map included.
    pub files: BTreeSet<String>,
    /// The checkpoint, or why it is refused.
    pub outcome: Result<Arc<Checkpoint>>,
    /// The file of the parent folder with the same tensors, which is shown instead. `None` if there
    /// is none.
    pub shown_at_parent: Option<String>,
}

/// The sets of one folder.
#[derive(Debug, Default)]
pub struct Proved {
    /// Sets that are shown, or refused.
    pub sets: Vec<Set>,
    /// Weight files and weight maps of the folder, which are only shown as part of a set.
    pub weights: BTreeSet<String>,
    /// Notes on unusual but valid input, a line each.
    pub notes: Vec<String>,
    /// State of the index, `None` if no indexes are kept.
    pub index: Option<IndexState>,
}

impl Proved {
    /// Whether the sets come from the index, and no header was read.
    pub fn from_index(&self) -> bool {
        self.index.as_ref().is_some_and(|index| index.origin == Origin::Index)
    }
}

/// The state of the index of a folder.
#[derive(Clone, Debug)]
pub struct IndexState {
    /// Its file.
    pub path: PathBuf,
    /// Length of the file in bytes, `None` if there is none.
    pub len: Option<u64>,
    /// Time at which the files of the folder were examined for it, in seconds since 1970.
    pub made: i64,
    /// Origin of the sets.
    pub origin: Origin,
}

/// The origin of the sets of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The index.
    Index,
    /// The headers, and the index was written. The string is the reason why the previous index was
    /// not used.
    Headers(Option<String>),
    /// The headers, and no index is kept, for this reason.
    NotKept(String),
}

/// The facts about a set that the proof of its last pieces needs.
pub(super) struct TailEvidence<'a> {
    /// Name of the file that it is shown as.
    pub(super) name: &'a str,
    pub(super) kind: SetKind,
    /// Bytes of all tensors by its weight map, `None` if unknown.
    pub(super) total_size: Option<u64>,
    /// Whether a shard has a sharding note.
    pub(super) noted: bool,
    /// Whether `expect-shards` and `reference` apply to it.
    pub(super) judged: bool,
    /// Whether the manifest beside it has all shapes, `None` if it is not compared yet.
    pub(super) manifest: Option<bool>,
}

/// Compares the catalog with the references outside the shards. Also returns whether the manifest
/// beside it has all shapes, `None` if no manifest was compared.
pub(super) fn check_completeness(
    folder: &Folder,
    catalog: &Catalog,
    options: &OpenOptions,
    set: &TailEvidence<'_>,
) -> Result<(Tail, Option<bool>)> {
    // Files with a sharding note may be pieces whose following pieces are missing, even if all of
    // them begin at 0.
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

/// Compares the catalog of a set in `folder` with the reference and the number of shards that
/// `options` demand. Returns whether they prove its last pieces.
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

/// Compares the catalog of a set in `folder` with a reference. Returns whether it proves the last
/// pieces.
fn compare(
    folder: &Path,
    catalog: &Catalog,
    path: &Path,
    hint: &str,
    options: &OpenOptions,
) -> Result<bool> {
    let known = read_reference(path, options)?;
    check_reference(catalog, &known, path, hint).map_err(|fault| Error::refused(folder, fault))?;
    // Names alone do not show that a tensor has lost its end.
    Ok(known.total_size.is_some() || known.tensors.values().all(Option::is_some))
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
