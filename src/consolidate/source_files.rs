//! The files of a source, which are never replaced.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::checkpoint::Tree;
use crate::error::{Error, ErrorKind, Result, expect_local_path, is_url};
use crate::format::names;
use crate::mount_origin::{MountOrigin, resolve_bytes};
use crate::store::Store;
use crate::version::FileId;

/// Maximum length of a chain of mounts in which each is the source of the next.
const MOUNTS_MAX: usize = 8;

/// The files of a source. They include the files of checkpoints that the mount does not show. If the source
/// lies on a mount, they also include the files of the source of this mount.
#[derive(Clone, Debug, Default)]
pub struct SourceFiles {
    ids: HashSet<FileId>,
    /// The path that was scanned.
    path: PathBuf,
}

impl SourceFiles {
    /// All files that the scan of `tree` has found. If the source is a single file, only that file.
    pub fn of(tree: &Tree) -> SourceFiles {
        SourceFiles::named(tree, &|name| tree.only.as_deref().is_none_or(|only| name == only))
    }

    /// Like `of`. If the source is a single file, also `config.json` and all weight files next to it, because
    /// they may belong to it.
    pub fn and_beside(tree: &Tree) -> SourceFiles {
        SourceFiles::named(tree, &|name| {
            let is_other = |only| name != only && name != "config.json";
            !tree.only.as_deref().is_some_and(is_other) || names::is_of_weights(Path::new(name))
        })
    }

    /// The files of `tree` whose names satisfy `counts`.
    fn named(tree: &Tree, counts: &dyn Fn(&OsStr) -> bool) -> SourceFiles {
        let mut ids = HashSet::new();
        for id in tree.ids() {
            let folder = tree.folder(id);
            let files = folder.files.iter().filter(|file| counts(&file.name));
            ids.extend(files.map(|file| file.version.file()));
            // Files whose names do not fit a checkpoint are files of the source as well.
            let misfits = folder.misfits.iter().filter(|misfit| counts(&misfit.name));
            ids.extend(misfits.filter_map(|misfit| id_of(&folder.path.join(&misfit.name))));
        }
        let given = tree.all_config_files();
        ids.extend(given.iter().map(|file| file.version.file()));
        SourceFiles { ids, path: tree.source.clone() }
    }

    /// The files of the source of the mount that contains `path`. Empty if `path` is not on a mount.
    ///
    /// # Errors
    /// The errors of `with_origin`.
    pub fn behind(path: &Path) -> Result<SourceFiles> {
        SourceFiles { path: path.to_owned(), ..SourceFiles::default() }.with_origin()
    }

    /// Adds the files of the source of the mount on which this source lies, if there is one. Scans that source.
    ///
    /// # Errors
    /// If the source of the mount is unknown or cannot be scanned.
    pub fn with_origin(&self) -> Result<SourceFiles> {
        let mut all = self.clone();
        for _ in 0..MOUNTS_MAX {
            let MountOrigin { path, options, .. } = match resolve_bytes(&all.path) {
                None => break,
                Some(Ok(origin)) => origin,
                Some(Err(why)) => {
                    let message = format!("{why}, so no file that is there already is replaced");
                    return Err(Error::refused(&all.path, ErrorKind::Usage.fault(message)));
                }
            };
            let behind = SourceFiles::and_beside(&Tree::scan(&path, &options)?);
            all.ids.extend(behind.ids);
            // A mount may cover its own source. Then the path is the same again, and the search ends.
            if std::mem::replace(&mut all.path, behind.path) == all.path {
                break;
            }
        }
        Ok(all)
    }

    /// Adds the files at `paths`.
    #[must_use]
    pub fn with<'a>(mut self, paths: impl IntoIterator<Item = &'a Path>) -> SourceFiles {
        self.ids.extend(paths.into_iter().filter_map(id_of));
        self
    }

    /// Whether `path` leads to one of the files.
    pub fn contains(&self, path: &Path) -> bool {
        id_of(path).is_some_and(|id| self.ids.contains(&id))
    }

    /// Refuses to replace `target` if it is one of these files.
    ///
    /// # Errors
    /// The refusal.
    pub fn keep(&self, target: &Path) -> Result<()> {
        if !self.contains(target) {
            return Ok(());
        }
        let message = "is a file of the source; write somewhere else";
        Err(Error::refused(target, ErrorKind::Usage.fault(message)))
    }
}

/// Refuses a URL as the target of results.
///
/// # Errors
/// The refusal.
pub fn refuse_url(target: &Path) -> Result<()> {
    if expect_local_path(target).is_ok() {
        return Ok(());
    }
    let message = "is a URL; only local files are written";
    Err(Error::refused(target, ErrorKind::Usage.fault(message)))
}

fn id_of(path: &Path) -> Option<FileId> {
    // A file of this machine is never a file of a remote source.
    if is_url(path) {
        return None;
    }
    Store::of(path).version_behind_links(path).map(|version| version.file()).ok()
}
