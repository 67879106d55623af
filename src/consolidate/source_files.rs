//! The files of a source, which are never replaced.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::outline::is_weights;
use crate::checkpoint::Tree;
use crate::error::{Error, ErrorKind, Fault, Result};
use crate::mount_origin::{MountOrigin, resolve_bytes};

/// Device and inode number.
type Inode = (u64, u64);

/// Most mounts of which each is the source of the next.
const MOUNTS_MAX: usize = 8;

/// The files of a source: also of checkpoints that a mount does not show, and of the source behind a
/// mount.
#[derive(Clone, Debug, Default)]
pub struct SourceFiles {
    inodes: HashSet<Inode>,
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
            !tree.only.as_deref().is_some_and(is_other) || is_weights(Path::new(name))
        })
    }

    /// The files of `tree` with the names that count.
    fn named(tree: &Tree, counts: &dyn Fn(&OsStr) -> bool) -> SourceFiles {
        let mut inodes = HashSet::new();
        for id in tree.ids() {
            let folder = tree.folder(id);
            let files = folder.files.iter().filter(|file| counts(&file.name));
            inodes.extend(files.map(|file| (file.identity.dev, file.identity.ino)));
            // Files whose names no checkpoint has are files of the source all the same.
            let misfits = folder.misfits.iter().filter(|misfit| counts(&misfit.name));
            inodes.extend(misfits.filter_map(|misfit| inode(&folder.path.join(&misfit.name))));
        }
        SourceFiles { inodes, path: tree.source.clone() }
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
            all.inodes.extend(behind.inodes);
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
        self.inodes.extend(paths.into_iter().filter_map(inode));
        self
    }

    /// Whether `path` leads to one of the files.
    pub fn contains(&self, path: &Path) -> bool {
        inode(path).is_some_and(|inode| self.inodes.contains(&inode))
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

fn inode(path: &Path) -> Option<Inode> {
    std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok()
}
