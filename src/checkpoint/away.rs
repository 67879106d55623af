//! Handles a source, or a folder of the source, that is missing: reports what is missing, and where
//! the path that the user gave leads now.

use std::io;
use std::path::{Path, PathBuf};

use crate::index::{SETTLED, now};
use crate::store::Store;
use crate::version::Version;

use super::folder::{File, Folder, FolderId};
use super::tree::{Tree, in_folder, look_at};

/// The state of a folder at the time at which it was examined.
#[derive(Clone, Copy, Debug)]
pub struct FolderVersion {
    /// `None` if the folder was not there, or could not be reached.
    pub(super) version: Option<Version>,
    /// Time in seconds since 1970. It is read before the folder is examined.
    pub(super) asked: i64,
}

impl FolderVersion {
    /// The current state of the folder at `path`, as its server reports it.
    pub(super) fn at(store: &Store, path: &Path) -> FolderVersion {
        let asked = now();
        let found = store.fresh_version(path);
        let version = found.ok();
        FolderVersion { version, asked }
    }

    /// Whether the folder was there.
    pub fn is_there(&self) -> bool {
        self.version.is_some()
    }

    /// Whether the folder certainly has the same names in the state `now` as in this state. It is not certain if the
    /// folder was changed so shortly before this state was read that a later change may have the same modification
    /// time.
    pub fn is_settled_as(&self, now: &FolderVersion) -> bool {
        let (Some(then), Some(now)) = (self.version, now.version) else {
            return self.version.is_none() && now.version.is_none();
        };
        let last = now.changed().map_or(i64::MAX, |(seconds, _)| seconds);
        let state = |version: Version| (version.file, version.modified, version.changed);
        state(now) == state(then) && last < self.asked.saturating_sub(SETTLED)
    }
}

impl Tree {
    /// The current path of the source: the path of the scan, or the path that `follow_given` has
    /// found since.
    pub fn source_now(&self) -> PathBuf {
        let root = self.bounds.root();
        self.only.as_ref().map_or(root.clone(), |name| root.join(name))
    }

    /// Why the source is not at its path. Accesses the file system.
    pub fn source_error(&self) -> Option<io::Error> {
        self.store().fresh_version(&self.source_now()).err()
    }

    /// The source to which the path of the user leads now, if it is another source because a link
    /// on the way was switched. Accesses the file system.
    pub fn leads_elsewhere(&self) -> Option<PathBuf> {
        let now = match &self.only {
            None => self.store().real_path(&self.given),
            // If the source is a link to a file, the link counts as one of the links in its folder,
            // so only the path of the folder is resolved.
            Some(name) => {
                self.store().real_path(self.given.parent()?).map(|folder| folder.join(name))
            }
        };
        now.ok().filter(|now| *now != self.source_now())
    }

    /// If the source is gone from its path, and the path of the user leads to another folder, that
    /// folder becomes the source. Returns its path. The caller has to list the folder to find its
    /// entries.
    pub fn follow_given(&self) -> Option<PathBuf> {
        let before = self.bounds.root();
        if self.store().fresh_version(&before).is_ok() {
            return None;
        }
        let target = self.leads_elsewhere()?;
        let now = if self.only.is_some() { target.parent()?.to_owned() } else { target };
        let version = self.store().fresh_version(&now).ok()?;
        if !version.is_folder() || self.bounds.leaves_out(&version) {
            return None;
        }
        self.bounds.set_root(now.clone());
        for id in self.ids() {
            let folder = self.folder(id);
            // The folders of a hub cache are moved too, because listing the source again would not
            // find them.
            let Ok(below) = folder.path.strip_prefix(&before) else { continue };
            let is_source = below.as_os_str().is_empty() && self.is_source(&folder);
            if is_source || self.options.hub {
                let moved = Folder { path: in_folder(&now, below), ..Folder::clone(&folder) };
                self.folders.write().replace(id, moved);
            }
        }
        Some(now)
    }

    /// The current state of the folder `id` at its path, as its server reports it.
    pub fn version_of(&self, id: FolderId) -> FolderVersion {
        FolderVersion::at(self.store(), &self.folder(id).path)
    }

    /// Whether the folder `id` is still at its path, is the same folder, and is still reached
    /// through the link that led to it. Accesses the file system.
    pub fn is_there(&self, id: FolderId) -> bool {
        let folder = self.folder(id);
        let now = || FolderVersion::at(self.store(), &folder.path).version;
        folder.made
            || (folder
                .version
                .is_some_and(|then| now().is_some_and(|now| then.file() == now.file()))
                && self.is_reached_from_parent(&folder))
    }

    /// Whether the name of `folder` in its parent folder leads to it.
    fn is_reached_from_parent(&self, folder: &Folder) -> bool {
        let (Some(parent), Some(name)) = (folder.parent, folder.relative.file_name()) else {
            return true;
        };
        let parent = self.folder(parent);
        let name = parent.path.join(name);
        // A folder that the tree has made has entries whose names differ from those in the source.
        parent.made
            || name == folder.path
            || self.bounds.resolve(&name).is_ok_and(|(now, _)| now == folder.path)
    }

    /// Whether the folder `id` shows the source itself.
    pub fn shows_source(&self, id: FolderId) -> bool {
        self.is_source(&self.folder(id))
    }

    /// Whether the folder `id` has lost an entry since it was last examined: a name is missing, a link leads to
    /// another place, or another folder took the place of this folder or of one of its subfolders. Accesses the file
    /// system.
    pub fn has_lost(&self, id: FolderId) -> bool {
        let folder = self.folder(id);
        if folder.made {
            return false;
        }
        let is_empty = folder.files.is_empty() && folder.children.is_empty();
        if is_empty || !folder.gone.is_empty() || !self.is_there(id) {
            return true;
        }
        let Ok(names) = self.store().names(&folder.path) else { return true };
        // Only the names are listed, so that a file whose server does not answer does not block
        // this check.
        let is_away = |file: &File| {
            let path = folder.path.join(&file.name);
            names.binary_search(&file.name).is_err()
                || (file.path != path
                    && look_at(&self.bounds, &path).is_none_or(|(now, _)| now != file.path))
        };
        folder.files.iter().any(is_away)
            || folder.children.iter().any(|(_, child)| !self.is_there(*child))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::open_options::OpenOptions;

    #[test]
    fn the_source_is_followed_through_a_link_only_once_it_is_gone() {
        let temporary = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(temporary.path()).unwrap();
        for version in ["v1", "v2"] {
            fs::create_dir_all(root.join(version).join("sub")).unwrap();
            fs::write(root.join(version).join(version), "").unwrap();
        }
        symlink("v1", root.join("link")).unwrap();
        let tree = Tree::scan(&root.join("link"), &OpenOptions::default()).unwrap();
        assert!(tree.source_error().is_none() && !tree.has_lost(0));
        fs::remove_file(root.join("link")).unwrap();
        symlink("v2", root.join("link")).unwrap();
        assert_eq!(tree.leads_elsewhere(), Some(root.join("v2")));
        assert_eq!(tree.follow_given(), None, "the old folder is there");
        fs::rename(root.join("v1"), root.join("away")).unwrap();
        assert!(tree.source_error().is_some() && tree.has_lost(0));
        assert_eq!(tree.follow_given(), Some(root.join("v2")));
        assert_eq!(tree.leads_elsewhere(), None);
        let change = tree.list_again(&root.join("v2")).unwrap();
        assert_eq!((change.added.len(), change.removed.len()), (1, 1));
        let files: Vec<_> = tree.folder(0).files.iter().map(|file| file.path.clone()).collect();
        assert_eq!(files, [root.join("v2/v2")]);
        assert!(!tree.has_lost(0));
    }

    #[test]
    fn a_folder_has_lost_what_is_gone_and_what_was_replaced() {
        let temporary = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(temporary.path()).unwrap();
        fs::create_dir(root.join("a")).unwrap();
        fs::write(root.join("x"), "").unwrap();
        let tree = Tree::scan(&root, &OpenOptions::default()).unwrap();
        fs::write(root.join("y"), "").unwrap();
        assert!(!tree.has_lost(0), "a new name is no loss");
        fs::rename(root.join("a"), root.join("b")).unwrap();
        fs::create_dir(root.join("a")).unwrap();
        assert!(tree.has_lost(0));
        tree.list_again(&root).unwrap();
        assert!(!tree.has_lost(0));
        fs::remove_file(root.join("x")).unwrap();
        assert!(tree.has_lost(0));
        tree.rescan(0);
        assert!(tree.has_lost(0), "it is remembered");
        fs::write(root.join("x"), "").unwrap();
        assert!(tree.may_have_changed(&root), "a look would find it");
    }
}
