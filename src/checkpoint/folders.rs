//! The folders of a tree. Two indexes find the folders that a change affects: by real path, and by
//! the folders that links pass through.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::folder::{Folder, FolderId};

/// Limits for the scan of one source.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScanLimits {
    /// Maximum depth of a folder that is scanned. Links could make an endless tree.
    pub(super) depth: usize,
    /// Maximum number of files and folders in one source.
    pub(super) entries: usize,
    /// Maximum number of folders behind links. Otherwise a few folders that link to each other
    /// would give a huge number of paths.
    pub(super) linked: usize,
    /// Maximum number of files and folders in folders behind links.
    pub(super) linked_entries: usize,
}

/// The limits of every source.
pub(super) const LIMITS: ScanLimits =
    ScanLimits { depth: 40, entries: 4_000_000, linked: 20_000, linked_entries: 1_000_000 };

/// The folders of a tree. Their numbers are never reused, so that a late result about a removed
/// folder finds no folder.
#[derive(Debug, Default)]
pub(super) struct Folders {
    by_id: BTreeMap<FolderId, Arc<Folder>>,
    /// Folders by their real path. A folder to which several links lead has several places in the
    /// tree.
    by_path: HashMap<PathBuf, Vec<FolderId>>,
    /// Folders whose links depend on entries of another folder, by the real path of the other
    /// folder.
    by_target: HashMap<PathBuf, BTreeSet<FolderId>>,
    /// For each folder `zero` of a universal checkpoint, by its path in the tree: the number of its subfolders that
    /// have the weights of a tensor.
    masters: HashMap<PathBuf, usize>,
    next: FolderId,
    pub(super) weight: Weight,
}

/// The numbers in a tree that have limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Weight {
    /// Number of entries of folders in the source itself.
    pub(super) entries: usize,
    /// Number of folders behind links.
    pub(super) linked: usize,
    /// Number of entries of folders behind links.
    pub(super) linked_entries: usize,
}

impl Weight {
    pub(super) fn of(folder: &Folder) -> Weight {
        let entries = folder.files.len() + folder.misfits.len() + folder.children.len();
        match folder.linked {
            true => Weight { entries: 0, linked: 1, linked_entries: entries },
            false => Weight { entries, ..Weight::default() },
        }
    }

    pub(super) fn add(&mut self, other: Weight) {
        self.entries += other.entries;
        self.linked += other.linked;
        self.linked_entries += other.linked_entries;
    }

    pub(super) fn times(self, count: usize) -> Weight {
        Weight {
            entries: self.entries * count,
            linked: self.linked * count,
            linked_entries: self.linked_entries * count,
        }
    }

    /// Refuses these numbers, which are those of `views` views together, if they exceed `limits`. The error is the
    /// reason.
    pub(super) fn check(self, views: usize, limits: ScanLimits) -> Result<(), String> {
        let counts = [
            (self.entries, limits.entries, "files and folders"),
            (self.linked, limits.linked, "folders behind links"),
            (self.linked_entries, limits.linked_entries, "files and folders behind links"),
        ];
        match counts.into_iter().find(|(found, max, _)| found > max) {
            None => Ok(()),
            Some((found, max, of)) => {
                Err(format!("{views} views have {found} {of}, at most {max} can be shown"))
            }
        }
    }

    fn take(&mut self, other: Weight) {
        self.entries -= other.entries;
        self.linked -= other.linked;
        self.linked_entries -= other.linked_entries;
    }
}

impl Folders {
    pub(super) fn get(&self, id: FolderId) -> Option<&Arc<Folder>> {
        self.by_id.get(&id)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = FolderId> {
        self.by_id.keys().copied()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Folder>> {
        self.by_id.values()
    }

    /// The places in the tree of the folder at the real path `path`.
    pub(super) fn at(&self, path: &Path) -> &[FolderId] {
        self.by_path.get(path).map_or(&[], Vec::as_slice)
    }

    /// The real paths of the folders whose links depend on entries of the folder `path`.
    pub(super) fn leading_into(&self, path: &Path) -> BTreeSet<PathBuf> {
        let ids = self.by_target.get(path).into_iter().flatten();
        ids.filter_map(|id| self.get(*id)).map(|folder| folder.path.clone()).collect()
    }

    /// Real paths of all folders whose changes affect the tree: the folders of the tree, and the
    /// folders on which its links depend.
    pub(super) fn paths(&self) -> BTreeSet<PathBuf> {
        self.by_path.keys().chain(self.by_target.keys()).cloned().collect()
    }

    /// Whether changes of the folder `path` affect the tree.
    pub(super) fn matters(&self, path: &Path) -> bool {
        self.by_path.contains_key(path) || self.by_target.contains_key(path)
    }

    /// Whether the folder `zero` at this path in the tree has subfolders with the weights of
    /// tensors.
    pub(super) fn has_masters(&self, zero: &Path) -> bool {
        self.masters.contains_key(zero)
    }

    /// Adds `folders` below `parent`. In `folders`, parents come before their children and are
    /// referred to by index. Returns the number of the first folder.
    pub(super) fn graft(&mut self, parent: Option<FolderId>, folders: Vec<Folder>) -> FolderId {
        let first = self.next;
        self.next += folders.len();
        for (position, mut folder) in folders.into_iter().enumerate() {
            folder.parent = folder.parent.map(|position| first + position).or(parent);
            folder.children.iter_mut().for_each(|(_, child)| *child += first);
            self.insert(first + position, folder);
        }
        first
    }

    fn insert(&mut self, id: FolderId, folder: Folder) {
        self.weight.add(Weight::of(&folder));
        if !folder.made {
            self.by_path.entry(folder.path.clone()).or_default().push(id);
        }
        for target in folder.targets.iter() {
            self.by_target.entry(target.clone()).or_default().insert(id);
        }
        if let Some(zero) = folder.zero_folder_of_tensor() {
            *self.masters.entry(zero.to_owned()).or_default() += 1;
        }
        self.by_id.insert(id, Arc::new(folder));
    }

    /// Replaces the folder `id`, unless it is gone.
    pub(super) fn replace(&mut self, id: FolderId, folder: Folder) {
        if self.unlink(id).is_some() {
            self.insert(id, folder);
        }
    }

    /// Removes the folder `id` and everything below it. Returns the removed folders, parents before
    /// children.
    pub(super) fn remove(&mut self, id: FolderId) -> Vec<(FolderId, Arc<Folder>)> {
        let mut removed = Vec::new();
        let mut next = vec![id];
        while let Some(id) = next.pop() {
            if let Some(folder) = self.unlink(id) {
                next.extend(folder.children.iter().map(|&(_, child)| child));
                removed.push((id, folder));
            }
        }
        removed
    }

    fn unlink(&mut self, id: FolderId) -> Option<Arc<Folder>> {
        let folder = self.by_id.remove(&id)?;
        self.weight.take(Weight::of(&folder));
        if let Some(places) = self.by_path.get_mut(&folder.path) {
            places.retain(|place| *place != id);
            if places.is_empty() {
                self.by_path.remove(&folder.path);
            }
        }
        for target in folder.targets.iter() {
            let Some(leading) = self.by_target.get_mut(target) else { continue };
            leading.remove(&id);
            if leading.is_empty() {
                self.by_target.remove(target);
            }
        }
        if let Some(zero) = folder.zero_folder_of_tensor()
            && let Some(count) = self.masters.get_mut(zero)
        {
            *count -= 1;
            if *count == 0 {
                self.masters.remove(zero);
            }
        }
        Some(folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::folder::File;
    use crate::store::Store;
    use crate::version::{QueueKey, Version};

    /// A folder at this path in the tree with files of these names, ascending.
    fn with_names(relative: &str, names: &[&str]) -> Folder {
        let file = |name: &&str| File {
            name: (*name).into(),
            store: Store::default(),
            path: relative.into(),
            version: Version::of_tagged_object(QueueKey::Store(1), [7, 1], 1, None),
        };
        let files = names.iter().map(file).collect();
        Folder { relative: relative.into(), files, ..Folder::default() }
    }

    #[test]
    fn a_folder_zero_has_masters_as_long_as_one_of_its_folders_has() {
        let zero = Path::new("step/zero");
        let master = || with_names("step/zero/a.weight", &["fp32.pt", "step.pt"]);
        let empty = || with_names("step/zero/b.weight", &["step.pt"]);
        let mut folders = Folders::default();
        let top = folders.graft(None, vec![with_names("step/zero", &["fp32.pt"]), empty()]);
        assert!(!folders.has_masters(zero) && !folders.has_masters(Path::new("step")));
        let [first, second] = [0, 1].map(|_| folders.graft(Some(top), vec![master()]));
        folders.replace(first, empty());
        assert!(folders.has_masters(zero));
        folders.remove(second);
        assert!(!folders.has_masters(zero));
        folders.replace(first, master());
        folders.replace(first, master());
        assert!(folders.has_masters(zero));
        folders.remove(first);
        assert!(!folders.has_masters(zero) && folders.masters.is_empty());
        folders.graft(Some(top), vec![with_names("step/zeros/a", &["fp32.pt"])]);
        assert!(folders.masters.is_empty());
    }

    #[test]
    fn views_whose_folders_are_above_any_limit_are_refused_with_their_number() {
        let limits = ScanLimits { depth: 40, entries: 60, linked: 10, linked_entries: 40 };
        let one = Weight { entries: 12, linked: 2, linked_entries: 8 };
        assert_eq!(one.times(5).check(5, limits), Ok(()));
        for (heavy, said) in [
            (Weight { entries: 13, ..one }, "5 views have 65 files and folders, at most 60"),
            (Weight { linked: 3, ..one }, "5 views have 15 folders behind links, at most 10"),
            (Weight { linked_entries: 9, ..one }, "have 45 files and folders behind links"),
        ] {
            let why = heavy.times(5).check(5, limits).unwrap_err();
            assert!(why.contains(said), "{why}");
        }
    }
}
