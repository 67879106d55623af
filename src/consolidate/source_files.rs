//! The files of a source, which are never replaced.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::checkpoint::Tree;
use crate::error::{Error, ErrorKind, Fault, Result, is_url};
use crate::format::names;
use crate::mount_origin::{MountOrigin, resolve_bytes};
use crate::store::Store;
use crate::version::FileId;

/// Maximum number of mounts of which each is the source of the next.
const MOUNTS_MAX: usize = 8;

/// The files of a source: also of checkpoints that a mount does not show, and of the source behind a
/// mount.
#[derive(Clone, Debug, Default)]
pub struct SourceFiles {
    ids: HashSet<FileId>,
    /// The path that was scanned.
    path: PathBuf,
}

impl SourceFiles {
    /// The files that the scan of `tree` has found, or the file that is its source.
    pub fn of(tree: &Tree) -> SourceFiles {
        SourceFiles::named(tree, &|name| tree.only.as_deref().is_none_or(|only| name == only))
    }

    /// The files of `of`. If the source is one file, also `config.json` and all files with weights beside it,
    /// which may belong to it.
    pub fn and_beside(tree: &Tree) -> SourceFiles {
        SourceFiles::named(tree, &|name| {
            let is_other = |only| name != only && name != "config.json";
            !tree.only.as_deref().is_some_and(is_other) || names::is_of_weights(Path::new(name))
        })
    }

    /// The files of `tree` with the names that count.
    fn named(tree: &Tree, counts: &dyn Fn(&OsStr) -> bool) -> SourceFiles {
        let mut ids = HashSet::new();
        for id in tree.ids() {
            let folder = tree.folder(id);
            let files = folder.files.iter().filter(|file| counts(&file.name));
            ids.extend(files.map(|file| file.version.file()));
            // Files whose names no checkpoint has are files of the source all the same.
            let misfits = folder.misfits.iter().filter(|misfit| counts(&misfit.name));
            ids.extend(misfits.filter_map(|misfit| id_of(&folder.path.join(&misfit.name))));
        }
        let given = tree.all_config_files();
        ids.extend(given.iter().map(|file| file.version.file()));
        SourceFiles { ids, path: tree.source.clone() }
    }

    /// The files behind the mount that `path` may lie on; none if it does not.
    ///
    /// # Errors
    /// The errors of `with_origin`.
    pub fn behind(path: &Path) -> Result<SourceFiles> {
        SourceFiles { path: path.to_owned(), ..SourceFiles::default() }.with_origin()
    }

    /// With the files behind the mount that the source may lie on. Scans them.
    ///
    /// # Errors
    /// If the source behind the mount is not known, or cannot be scanned.
    pub fn with_origin(&self) -> Result<SourceFiles> {
        let mut all = self.clone();
        for _ in 0..MOUNTS_MAX {
            let MountOrigin { path, options, .. } = match resolve_bytes(&all.path) {
                None => break,
                Some(Ok(origin)) => origin,
                Some(Err(why)) => {
                    let message = format!("{why}, so no file that is there already is replaced");
                    return Err(Error::refused(&all.path, Fault::new(ErrorKind::Usage, message)));
                }
            };
            let behind = SourceFiles::and_beside(&Tree::scan(&path, &options)?);
            all.ids.extend(behind.ids);
            // A mount may hide its own source.
            if std::mem::replace(&mut all.path, behind.path) == all.path {
                break;
            }
        }
        Ok(all)
    }

    /// With the files at `paths`.
    #[must_use]
    pub fn with<'a>(mut self, paths: impl IntoIterator<Item = &'a Path>) -> SourceFiles {
        self.ids.extend(paths.into_iter().filter_map(id_of));
        self
    }

    /// Whether `path` leads to one of the files.
    pub fn contains(&self, path: &Path) -> bool {
        id_of(path).is_some_and(|id| self.ids.contains(&id))
    }

    /// Refuses to replace `target` if it is one of the files.
    ///
    /// # Errors
    /// The refusal.
    pub fn keep(&self, target: &Path) -> Result<()> {
        if !self.contains(target) {
            return Ok(());
        }
        let message = "is a file of the source; write somewhere else";
        Err(Error::refused(target, Fault::new(ErrorKind::Usage, message)))
    }
}

/// Refuses a URL where results are written.
///
/// # Errors
/// The refusal.
pub fn refuse_url(target: &Path) -> Result<()> {
    if !is_url(target) {
        return Ok(());
    }
    let message = "is a URL; only local files are written";
    Err(Error::refused(target, Fault::new(ErrorKind::Usage, message)))
}

fn id_of(path: &Path) -> Option<FileId> {
    // No file of this machine is one of a remote source.
    if is_url(path) {
        return None;
    }
    Store::of(path).version_behind_links(path).map(|version| version.file()).ok()
}
