//! Lists a folder of a tree again, and finds the names in this folder that are new, changed or gone.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::libc;

use crate::error::{Error, Result, shown_path};
use crate::format::deepspeed::{LATEST, LATEST_UNIVERSAL, StateFile};
use crate::format::{manifest, names};
use crate::store::resolve::Unusable;
use crate::version::{FileId, QueueKey};

use super::away::FolderVersion;
use super::folder::{File, Folder, FolderId};
use super::folders::{LIMITS, ScanLimits, Weight};
use super::scan::{Graft, Listing, Scan, Subfolder, left_out, read};
use super::small_files::CONFIG;
use super::tree::Tree;

/// The changes that were found when a folder was listed again, at all places of the folder in the tree.
#[derive(Debug, Default)]
pub struct TreeChange {
    /// Folders whose entries have changed.
    pub changed: Vec<FolderChange>,
    /// Folders that are new, parents before children.
    pub added: Vec<FolderId>,
    /// Folders that are gone.
    pub removed: Vec<FolderId>,
    /// Real paths of other folders whose links depend on entries of the listed folder. These folders may have changed
    /// too.
    pub leading_here: BTreeSet<PathBuf>,
    /// Real paths of folders whose changes affect the tree from now on.
    pub to_watch: BTreeSet<PathBuf>,
    /// Real paths of folders whose changes do not affect the tree any more.
    pub to_leave: BTreeSet<PathBuf>,
}

/// The difference between two listings of one folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FolderChange {
    /// The folder.
    pub id: FolderId,
    /// Whether its subfolders have changed.
    pub folders: bool,
    /// Whether files that can be part of a set have changed.
    pub weights: bool,
    /// Names of the other files that are new, changed or gone.
    pub plain: Vec<OsString>,
}

impl TreeChange {
    fn note_removed(&mut self, removed: Vec<(FolderId, Arc<Folder>)>) {
        for (id, folder) in removed {
            self.removed.push(id);
            self.to_leave.extend(folder.targets.iter().chain([&folder.path]).cloned());
        }
    }
}

impl FolderChange {
    fn is_empty(&self) -> bool {
        !self.folders && !self.weights && self.plain.is_empty()
    }
}

impl Tree {
    /// The real paths of all folders whose changes affect the tree.
    pub fn paths(&self) -> BTreeSet<PathBuf> {
        self.folders.read().paths()
    }

    /// Whether changes of the folder at the real path `path` affect the tree.
    pub fn matters(&self, path: &Path) -> bool {
        self.folders.read().matters(path)
    }

    /// The device of the folder at the real path `path`. `None` if the tree does not have the folder.
    pub fn device(&self, path: &Path) -> Option<QueueKey> {
        let folders = self.folders.read();
        let folder = folders.at(path).first().and_then(|&id| folders.get(id))?;
        folder.version.map(|version| version.queue_key())
    }

    /// The devices that are accessed when the folder at the real path `path` is listed: its own device, and the
    /// devices of the files and folders to which its links lead, as far as the tree knows them.
    pub fn devices(&self, path: &Path) -> BTreeSet<QueueKey> {
        let folders = self.folders.read();
        let all = |path: &Path| -> Vec<Arc<Folder>> {
            let places = folders.at(path).iter();
            places.filter_map(|&id| folders.get(id).cloned()).collect()
        };
        let places = all(path);
        let own = places.iter().filter_map(|folder| folder.version);
        let children = places
            .iter()
            .flat_map(|folder| folder.children.iter())
            .filter_map(|(_, child)| folders.get(*child)?.version);
        // A folder outside of the tree may have files to which links lead.
        let leading: Vec<_> =
            folders.leading_into(path).iter().flat_map(|path| all(path)).collect();
        let behind = leading
            .iter()
            .flat_map(|folder| folder.files.iter())
            .filter(|file| file.path.parent() == Some(path));
        let files = places
            .iter()
            .flat_map(|folder| folder.files.iter())
            .chain(behind)
            .map(|file| file.version);
        own.chain(children).chain(files).map(|version| version.queue_key()).collect()
    }

    /// From now on, leaves out all folders and files on the device `queue`. This is used for the device of the mount,
    /// because the mount would otherwise contain itself.
    pub fn leave_out(&self, queue: QueueKey) {
        self.bounds.leave_out(queue);
    }

    /// Whether the names in the folder at the real path `path` may have changed since it was listed. Accesses the
    /// source. The result is also true if the folder changed so shortly before its listing that a later change may
    /// have the same time. It is also true if a name is missing, because the name may return without new times of the
    /// folder, for example if a folder above was moved.
    pub fn may_have_changed(&self, path: &Path) -> bool {
        let folders = self.folders.read();
        let Some(known) = folders.at(path).first().and_then(|&id| folders.get(id)).cloned() else {
            return true;
        };
        drop(folders);
        let then = FolderVersion { version: known.version, asked: known.listed };
        known.partial
            || !known.gone.is_empty()
            || !then.is_settled_as(&FolderVersion::at(self.store(), path))
    }

    /// Lists the folder at the real path `path` again, and scans its new subfolders.
    ///
    /// # Errors
    /// The folder cannot be read. Then it stays as it was. A folder that is gone, or that may not be read any more,
    /// is no error: it is removed from the tree, unless it is the source.
    pub fn list_again(&self, path: &Path) -> Result<TreeChange> {
        let mut change = TreeChange::default();
        loop {
            let places = self.places(path);
            let listing = match read(&self.bounds, path) {
                _ if places.is_empty() => None,
                Ok(listing) => Some(listing),
                Err(error)
                    if is_gone(&error) && !places.iter().any(|(_, at)| self.is_source(at)) =>
                {
                    None
                }
                Err(error) => return Err(error),
            };
            let done = match &listing {
                Some(listing) => {
                    places.iter().all(|(id, before)| self.update(*id, before, listing, &mut change))
                }
                None => {
                    places.iter().for_each(|(id, before)| self.take_out(*id, before, &mut change));
                    true
                }
            };
            if done {
                self.settle(path, &mut change);
                return Ok(change);
            }
        }
    }

    /// All places in the tree of the folder at the real path `path`.
    fn places(&self, path: &Path) -> Vec<(FolderId, Arc<Folder>)> {
        let folders = self.folders.read();
        let places = folders.at(path).iter();
        places.filter_map(|&id| Some((id, folders.get(id)?.clone()))).collect()
    }

    /// Adds the effects on other folders to the change of the folder at `path`.
    fn settle(&self, path: &Path, change: &mut TreeChange) {
        change.changed.retain(|change| !change.is_empty());
        let folders = self.folders.read();
        // For a folder outside of the tree, it is not known whether something has changed.
        if !change.changed.is_empty() || folders.at(path).is_empty() {
            change.leading_here = folders.leading_into(path);
            change.leading_here.remove(path);
        }
        change.to_watch.retain(|path| folders.matters(path));
        change.to_leave.retain(|path| !folders.matters(path));
    }

    /// Removes a folder from the tree, and from its parent.
    fn take_out(&self, id: FolderId, before: &Folder, change: &mut TreeChange) {
        let mut folders = self.folders.write();
        change.note_removed(folders.remove(id));
        let Some(parent) = before.parent else { return };
        let Some(mut above) = folders.get(parent).map(|above| Folder::clone(above)) else { return };
        above.children.retain(|(_, child)| *child != id);
        folders.replace(parent, above);
        change.changed.push(FolderChange { id: parent, folders: true, ..FolderChange::default() });
    }

    /// Replaces the entries of the folder `id` by those of `listing`. Returns false if another thread has replaced
    /// the folder, so that it is not `before` any more.
    fn update(
        &self,
        id: FolderId,
        before: &Arc<Folder>,
        listing: &Listing,
        change: &mut TreeChange,
    ) -> bool {
        let mut folder = Folder {
            relative: before.relative.clone(),
            path: before.path.clone(),
            parent: before.parent,
            linked: before.linked,
            view: before.view,
            ..listing.folder()
        };
        let left = self.limits_without(before);
        let entries = if before.linked { left.linked_entries } else { left.entries };
        let mut subfolders: &[Arc<Subfolder>] = &listing.folders;
        if listing.len > entries {
            let linked = before.linked;
            let why = if linked { Unusable::TooManyLinks } else { Unusable::TooManyFiles };
            (folder.files, folder.misfits) = Default::default();
            folder.lacks.push(self.left_out("this folder", why));
            subfolders = &[];
        }
        let (kept, new) = self.compare_children(before, subfolders);
        let mut grafts = Vec::new();
        let above = if new.is_empty() { Vec::new() } else { self.folder_and_ancestors(before) };
        for child in new {
            match self.scan_child(before, child, above.clone()) {
                Ok(found) => grafts.push((child.name.clone(), found)),
                Err(Some(lack)) => folder.lacks.push(lack),
                Err(None) => {}
            }
        }
        let mut found = compare(before, &folder, self.only.as_deref());
        if self.options_of(before).view.shard.is_some()
            && found.plain.iter().any(|name| name == CONFIG)
        {
            // `config.json` determines how tensors are split among ranks.
            found.weights = true;
        }
        found.id = id;
        let mut folders = self.folders.write();
        match folders.get(id) {
            // The folder was removed in the meantime, with everything in it.
            None => return true,
            Some(now) if !Arc::ptr_eq(now, before) => return false,
            Some(_) => {}
        }
        for (name, child) in &before.children {
            if kept.contains(name) {
                folder.children.push((name.clone(), *child));
            } else {
                found.folders = true;
                change.note_removed(folders.remove(*child));
            }
        }
        for (name, scanned) in grafts {
            found.folders = true;
            let paths = scanned.iter().flat_map(|new| new.targets.iter().chain([&new.path]));
            change.to_watch.extend(paths.cloned());
            let len = scanned.len();
            let first = folders.graft(Some(id), scanned);
            folder.children.push((name, first));
            change.added.extend(first..first + len);
        }
        folder.children.sort();
        change.to_watch.extend(folder.targets.iter().cloned());
        change.to_leave.extend(before.targets.iter().cloned());
        let misfits = folder.misfits.clone();
        folders.replace(id, folder);
        drop(folders);
        for new in misfits.iter().filter(|new| !before.misfits.contains(new)) {
            let path = shown_path(&before.relative.join(&new.name));
            tracing::warn!("{path}: not shown: {}; {}", new.why.text(), new.why.advice());
        }
        change.changed.push(found);
        true
    }

    /// The limits for `folder` and its new entries: the limits of a source, minus the numbers of the rest of the tree.
    fn limits_without(&self, folder: &Folder) -> ScanLimits {
        let folders = self.folders.read();
        let Weight { entries, linked, linked_entries } = folders.weight;
        let own = folder.files.len() + folder.misfits.len() + folder.children.len();
        let (own_entries, own_linked) = if folder.linked { (0, own) } else { (own, 0) };
        ScanLimits {
            depth: LIMITS.depth,
            entries: LIMITS.entries.saturating_sub(entries - own_entries),
            linked: LIMITS.linked.saturating_sub(linked),
            linked_entries: LIMITS.linked_entries.saturating_sub(linked_entries - own_linked),
        }
    }

    /// The names of subfolders in `before` that are unchanged, and the subfolders that are new or replaced.
    fn compare_children<'a>(
        &self,
        before: &Folder,
        now: &'a [Arc<Subfolder>],
    ) -> (BTreeSet<OsString>, Vec<&'a Subfolder>) {
        let known: BTreeMap<&OsStr, FolderId> =
            before.children.iter().map(|(name, id)| (name.as_os_str(), *id)).collect();
        let (mut kept, mut new) = (BTreeSet::new(), Vec::new());
        for subfolder in now.iter().filter(|_| self.only.is_none()) {
            let child = known.get(subfolder.name.as_os_str()).map(|id| self.folder(*id));
            let same = |child: &Folder| {
                let inode = child.version.is_some_and(|id| id.file() == subfolder.version.file());
                inode && child.path == subfolder.real
            };
            if child.is_some_and(|child| same(&child)) {
                kept.insert(subfolder.name.clone());
            } else {
                new.push(&**subfolder);
            }
        }
        (kept, new)
    }

    /// Scans the folder `child`, which is new in `parent`. `above` has `parent` and all folders above it. The error is
    /// the line that says why the folder is left out, if there is such a line.
    fn scan_child(
        &self,
        parent: &Folder,
        child: &Subfolder,
        above: Vec<FileId>,
    ) -> Result<Vec<Folder>, Option<String>> {
        let relative = parent.relative.join(&child.name);
        let shown = shown_path(&relative);
        if above.contains(&child.version.file()) || above.len() >= LIMITS.depth {
            let is_above = above.len() < LIMITS.depth;
            let why = if is_above { Unusable::Above } else { Unusable::TooDeep };
            tracing::debug!("{shown}: not shown: {}; {}", why.text(), why.advice());
            return Err(None);
        }
        let linked = parent.linked || child.is_link;
        let limits = self.limits_without(&Folder::default());
        if linked && limits.linked == 0 {
            return Err(Some(
                self.left_out(&shown_path(child.name.as_ref()), Unusable::TooManyLinks),
            ));
        }
        let scan = Scan::new(&self.bounds, limits, true);
        match scan.run(child.real.clone(), Graft { relative, above, linked }) {
            Ok((mut folders, left_out)) => {
                folders.iter_mut().for_each(|folder| folder.view = parent.view);
                left_out.lines.iter().for_each(|line| tracing::warn!("{line}"));
                Ok(folders)
            }
            Err(error @ Error::Usage { .. }) => {
                tracing::warn!("{error}");
                Err(Some(self.left_out(&shown_path(child.name.as_ref()), Unusable::TooManyFiles)))
            }
            Err(error) => {
                tracing::warn!("{shown}: not shown: {error}");
                Err(None)
            }
        }
    }

    /// The line that says why `name` is left out. If there are several views, it says that all files count for each
    /// view.
    fn left_out(&self, name: &str, why: Unusable) -> String {
        let line = left_out(name, why);
        match self.view_count() {
            0 | 1 => line,
            views => format!("{line}, or show fewer views: all files count in each of {views}"),
        }
    }

    /// `folder` and all folders above it. Accesses the source, because a new folder may have the inode number of a
    /// removed one.
    fn folder_and_ancestors(&self, folder: &Folder) -> Vec<FileId> {
        let mut paths = vec![folder.path.clone()];
        let mut next = folder.parent;
        while let Some(id) = next {
            let folder = self.folder(id);
            paths.push(folder.path.clone());
            next = folder.parent;
        }
        let found = paths.iter().filter_map(|path| FolderVersion::at(self.store(), path).version);
        found.map(|version| version.file()).collect()
    }
}

/// Whether a listing failed because the folder is gone, or because the caller may not read it any more.
fn is_gone(error: &Error) -> bool {
    let Error::Io { source, .. } = error else { return false };
    let gone = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
    let is_link = source.raw_os_error() == Some(libc::ELOOP);
    is_link || gone.contains(&source.kind()) || source.kind() == io::ErrorKind::PermissionDenied
}

/// The changes of files between two listings of one folder.
fn compare(before: &Folder, now: &Folder, only: Option<&str>) -> FolderChange {
    let mut change = FolderChange::default();
    let same_misfits = before.misfits == now.misfits;
    change.weights = !same_misfits || before.lacks != now.lacks;
    let known: BTreeMap<&OsStr, &File> =
        before.files.iter().map(|file| (file.name.as_os_str(), file)).collect();
    let mut changed = |name: &OsString| {
        if is_of_sets(name, only) {
            change.weights = true;
        } else {
            change.plain.push(name.clone());
        }
    };
    let mut left = known.len();
    for file in now.files.iter() {
        match known.get(file.name.as_os_str()) {
            Some(known) => {
                left -= 1;
                if known.path != file.path || known.version.content() != file.version.content() {
                    changed(&file.name);
                }
            }
            None => changed(&file.name),
        }
    }
    if left > 0 {
        let names: BTreeSet<&OsStr> = now.files.iter().map(|file| file.name.as_os_str()).collect();
        let gone = before.files.iter().filter(|file| !names.contains(file.name.as_os_str()));
        gone.for_each(|file| changed(&file.name));
    }
    change
}

/// Whether a file of this name can be part of a set, or affects a set.
fn is_of_sets(name: &OsStr, only: Option<&str>) -> bool {
    let Some(name) = name.to_str() else { return false };
    names::is_weights_or_map(name)
        || names::is_of_torch(name)
        || names::is_of_distcp(name)
        || StateFile::of(name).is_some()
        || matches!(name, LATEST | LATEST_UNIVERSAL)
        || name.ends_with(manifest::SUFFIX)
        || only == Some(name)
}

#[cfg(test)]
mod tests {
    use super::super::Misfit;
    use super::*;
    use crate::open_options::OpenOptions;
    use crate::view::{TensorParallel, View};

    struct Store(tempfile::TempDir);

    impl Store {
        fn new(files: &[&str]) -> (Store, Tree) {
            let store = Store(tempfile::tempdir().unwrap());
            files.iter().for_each(|file| store.write(file));
            let tree = Tree::scan(store.0.path(), &OpenOptions::default()).unwrap();
            (store, tree)
        }

        fn path(&self, name: &str) -> PathBuf {
            std::fs::canonicalize(self.0.path()).unwrap().join(name)
        }

        fn write(&self, name: &str) {
            let path = self.path(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        }

        fn link(&self, to: &str, name: &str) {
            std::os::unix::fs::symlink(to, self.path(name)).unwrap();
        }
    }

    /// The paths of all folders, each with the names of its files.
    fn shape(tree: &Tree) -> Vec<String> {
        let mut lines: Vec<String> = tree
            .ids()
            .into_iter()
            .map(|id| {
                let folder = tree.folder(id);
                let names: Vec<&str> =
                    folder.files.iter().map(|file| file.name.to_str().unwrap()).collect();
                format!("{}: {}", folder.relative.display(), names.join(" "))
            })
            .collect();
        lines.sort();
        lines
    }

    /// Asserts that an updated tree equals a new scan, and that every folder agrees with its parent.
    fn assert_as_scanned(store: &Store, tree: &Tree) {
        let scanned = Tree::scan(store.0.path(), &OpenOptions::default()).unwrap();
        assert_eq!(shape(tree), shape(&scanned));
        assert_eq!(tree.folders.read().weight, scanned.folders.read().weight);
        assert_eq!(tree.paths(), scanned.paths());
        for id in tree.ids() {
            let folder = tree.folder(id);
            let child = |(_, child): &(OsString, FolderId)| tree.folder(*child).parent == Some(id);
            assert!(folder.children.iter().all(child) && folder.children.is_sorted());
            let known = |parent| tree.folder(parent).children.iter().any(|(_, at)| *at == id);
            assert!(folder.parent.is_none_or(known));
        }
    }

    #[test]
    fn a_look_at_a_folder_finds_what_a_new_scan_finds() {
        let (store, tree) = Store::new(&["a/x", "a/deep/y", "b/z"]);
        let a = tree.ids().into_iter().find(|&id| tree.folder(id).relative == Path::new("a"));
        store.write("new/in/here");
        std::fs::remove_dir_all(store.path("b")).unwrap();
        std::fs::remove_file(store.path("a/x")).unwrap();
        let change = tree.list_again(&store.path("")).unwrap();
        assert_eq!((change.added.len(), change.removed.len()), (2, 1));
        let root = FolderChange { folders: true, ..FolderChange::default() };
        assert_eq!(change.changed, [root]);
        let change = tree.list_again(&store.path("a")).unwrap();
        let expected =
            FolderChange { id: a.unwrap(), plain: vec!["x".into()], ..change.changed[0].clone() };
        assert_eq!(change.changed, [expected]);
        assert_as_scanned(&store, &tree);
        assert!(tree.list_again(&store.path("")).unwrap().changed.is_empty());
    }

    #[test]
    fn a_folder_that_is_replaced_has_a_new_number_and_the_old_one_is_empty() {
        let (store, tree) = Store::new(&["a/x", "b/y"]);
        let id = |tree: &Tree| tree.folder(0).children[0].1;
        let before = id(&tree);
        std::fs::rename(store.path("a"), store.path("away")).unwrap();
        std::fs::rename(store.path("b"), store.path("a")).unwrap();
        tree.list_again(&store.path("")).unwrap();
        assert_ne!(id(&tree), before);
        assert!(!tree.contains(before) && tree.folder(before).files.is_empty());
        assert!(tree.prove(before).iter().all(|(_, proved)| proved.sets.is_empty()));
        assert_as_scanned(&store, &tree);
    }

    #[test]
    fn a_file_takes_the_place_of_a_folder_and_gives_it_back() {
        let (store, tree) = Store::new(&["a/x"]);
        std::fs::remove_dir_all(store.path("a")).unwrap();
        store.write("a");
        // The folder is listed before its parent, because its events arrive first.
        tree.list_again(&store.path("a")).unwrap();
        tree.list_again(&store.path("")).unwrap();
        assert_as_scanned(&store, &tree);
        std::fs::remove_file(store.path("a")).unwrap();
        store.write("a/x");
        tree.list_again(&store.path("")).unwrap();
        assert_as_scanned(&store, &tree);
    }

    #[test]
    fn links_name_the_folders_that_decide_where_they_lead() {
        let (store, tree) = Store::new(&["blobs/1", "v1/w", "v2/w", "model/config"]);
        store.link("../blobs/1", "model/direct");
        store.link("../current/w", "model/chain");
        store.link("../nowhere/w", "model/broken");
        store.link("v1", "current");
        tree.list_again(&store.path("")).unwrap();
        tree.list_again(&store.path("model")).unwrap();
        assert_as_scanned(&store, &tree);
        let leads = |name: &str| tree.folders.read().leading_into(&store.path(name));
        let model = BTreeSet::from([store.path("model")]);
        assert_eq!(leads("blobs"), model);
        assert_eq!(leads("v1"), model);
        assert!(leads("v2").is_empty());
        assert!(leads("").is_superset(&model));
        // The link is switched to another folder.
        store.link("v2", "next");
        std::fs::rename(store.path("next"), store.path("current")).unwrap();
        let change = tree.list_again(&store.path("")).unwrap();
        assert!(change.leading_here.contains(&store.path("model")));
        let change = tree.list_again(&store.path("model")).unwrap();
        assert_eq!(change.changed[0].plain, ["chain"]);
        assert_as_scanned(&store, &tree);
        store.write("nowhere/w");
        assert!(
            tree.list_again(&store.path("")).unwrap().leading_here.contains(&store.path("model"))
        );
        assert!(tree.list_again(&store.path("model")).unwrap().changed[0].weights);
        assert_as_scanned(&store, &tree);
    }

    #[test]
    fn a_folder_with_several_places_changes_in_all_of_them() {
        let (store, tree) = Store::new(&["real/x"]);
        store.link("real", "one");
        store.link("real", "two");
        tree.list_again(&store.path("")).unwrap();
        store.write("real/sub/y");
        let change = tree.list_again(&store.path("real")).unwrap();
        assert_eq!((change.changed.len(), change.added.len()), (3, 3));
        assert_as_scanned(&store, &tree);
        std::fs::remove_dir_all(store.path("real")).unwrap();
        tree.list_again(&store.path("real")).unwrap();
        tree.list_again(&store.path("")).unwrap();
        assert_as_scanned(&store, &tree);
        assert_eq!(tree.folders.read().weight, Weight { entries: 2, ..Weight::default() });
    }

    #[test]
    fn a_folder_that_makes_place_for_a_link_is_not_listed_through_the_link() {
        let (store, tree) = Store::new(&["a/deep/x", "b/y"]);
        let outside = Store::new(&["secret", "deep/secret"]).0;
        std::fs::rename(store.path("a"), store.path("away")).unwrap();
        store.link(outside.path("").to_str().unwrap(), "a");
        // The folders are listed before their parent.
        let change = tree.list_again(&store.path("a/deep")).unwrap();
        assert_eq!((change.added.len(), change.removed.len()), (0, 1));
        let change = tree.list_again(&store.path("a")).unwrap();
        assert_eq!((change.added.len(), change.removed.len()), (0, 1));
        tree.list_again(&store.path("")).unwrap();
        assert_as_scanned(&store, &tree);
        assert!(!shape(&tree).iter().any(|line| line.contains("secret")));
    }

    #[test]
    fn a_source_that_moves_and_leaves_a_link_is_still_listed() {
        let (store, tree) = Store::new(&["root/a/x"]);
        drop(tree);
        let tree = Tree::scan(&store.path("root"), &OpenOptions::default()).unwrap();
        std::fs::rename(store.path("root"), store.path("moved")).unwrap();
        store.link("moved", "root");
        store.write("moved/a/y");
        assert_eq!(tree.list_again(&store.path("root/a")).unwrap().changed[0].plain, ["y"]);
        assert!(tree.list_again(&store.path("root")).unwrap().changed.is_empty());
    }

    #[test]
    fn a_source_that_moves_into_the_folder_in_its_place_is_found_there() {
        let (store, tree) = Store::new(&["root/x"]);
        drop(tree);
        let tree = Tree::scan(&store.path("root"), &OpenOptions::default()).unwrap();
        std::fs::rename(store.path("root"), store.path("moved")).unwrap();
        std::fs::create_dir(store.path("root")).unwrap();
        std::fs::rename(store.path("moved"), store.path("root/sub")).unwrap();
        assert_eq!(tree.list_again(&store.path("root")).unwrap().added.len(), 1);
    }

    #[test]
    fn a_link_into_a_folder_above_is_left_out() {
        let (store, tree) = Store::new(&["a/b/x"]);
        store.link("..", "a/b/up");
        tree.list_again(&store.path("a/b")).unwrap();
        assert_eq!(tree.ids().len(), 3);
        store.link("../a", "a/self");
        tree.list_again(&store.path("a")).unwrap();
        assert_eq!(tree.ids().len(), 3);
    }

    #[test]
    fn only_names_that_sets_are_made_of_ask_for_a_new_proof() {
        let (store, tree) = Store::new(&["config.json"]);
        store.write("config.json.new");
        let change = tree.list_again(&store.path("")).unwrap();
        assert!(!change.changed[0].weights && change.changed[0].plain == ["config.json.new"]);
        store.write("model.safetensors");
        assert!(tree.list_again(&store.path("")).unwrap().changed[0].weights);
        store.write("model.safetensors.index.json");
        assert!(tree.list_again(&store.path("")).unwrap().changed[0].weights);
        assert!(tree.list_again(&store.path("")).unwrap().changed.is_empty());
    }

    #[test]
    fn a_limit_of_several_views_is_told_with_their_number() {
        let (store, tree) = Store::new(&["a/x.safetensors"]);
        assert!(!tree.left_out("x", Unusable::TooManyLinks).contains("views"));
        let shard = Some(TensorParallel { ranks: 2, rank: None, rules: None });
        let mut options = OpenOptions { view: View { shard, ..View::default() }, ..tree.options };
        options.show_all_ranks().unwrap();
        let tree = Tree::scan(store.0.path(), &options).unwrap();
        let line = tree.left_out("x", Unusable::TooManyLinks);
        assert!(line.ends_with("or show fewer views: all files count in each of 2"), "{line}");
    }

    #[test]
    fn misfits_are_compared_by_name_and_reason() {
        let misfit = |why| Folder {
            misfits: [Misfit { name: "a".into(), why }].into(),
            ..Folder::default()
        };
        let (nowhere, special) = (misfit(Unusable::Nowhere), misfit(Unusable::Special));
        assert!(compare(&nowhere, &special, None).weights);
        assert!(compare(&nowhere, &nowhere, None).is_empty());
    }
}
