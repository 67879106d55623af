//! The tree of folders and files of a source, as the scan found them. Single folders are updated
//! when they are examined again.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result, shown_path};
use crate::open_options::{Links, OpenOptions};
use crate::store::Store;
use crate::store::resolve::LinkBounds;
use crate::sync::RwLock;
use crate::version::{FileId, Version};
use crate::view::View;

use super::folder::{File, Folder, FolderId, is_twin};
use super::folders::{Folders, LIMITS, Weight};
use super::hub;
use super::scan::{Graft, LeftOut, Scan};

/// A scanned source. The content of each folder is proved separately. The names in a folder stay as
/// they were scanned until `list_again` is called for the folder.
#[derive(Debug)]
pub struct Tree {
    /// The absolute path of the source, without symbolic links. If the source is one file, the path
    /// ends with the name that the user gave.
    pub source: PathBuf,
    /// The absolute path that the user gave. It may have symbolic links.
    pub given: PathBuf,
    /// The options with which it is opened.
    pub options: OpenOptions,
    /// The name of the file, if the source is one file. Then only the set of that file is used.
    pub only: Option<String>,
    /// The names that the scan left out.
    pub left_out: LeftOut,
    /// All folders. A folder is replaced as a whole when it is examined again, so that a change in
    /// one folder requires work for that folder only.
    pub(super) folders: RwLock<Folders>,
    pub(super) bounds: LinkBounds,
    /// If there are several views: the path of the folder of each view in the tree, and its
    /// options. With `OpenOptions::hub`: the options for the snapshots, with an empty path.
    views: Vec<(PathBuf, OpenOptions)>,
    /// An empty folder, which is returned for each folder that is gone.
    nothing: Arc<Folder>,
}

impl Tree {
    /// Scans `source`, which is a folder with its subfolders, or one file.
    pub fn scan(source: &Path, options: &OpenOptions) -> Result<Tree> {
        let open_error = |e| Error::io(source, "open", e);
        let store = Store::for_options(source, options);
        let root = store.real_path(source).map_err(open_error)?;
        let version = store.version_behind_links(&root).map_err(open_error)?;
        let follow = options
            .follow
            .iter()
            .map(|folder| store.real_path(folder).map_err(|e| Error::io(folder, "open", e)))
            .collect::<Result<Vec<_>>>()?;
        let mut tree = Tree {
            source: root.clone(),
            given: store.absolute(source).map_err(open_error)?,
            options: options.clone(),
            only: None,
            left_out: LeftOut::default(),
            folders: RwLock::default(),
            nothing: Arc::default(),
            bounds: LinkBounds::new(store, root.clone(), follow, options.links),
            views: views_of(options),
        };
        if version.is_folder() {
            tree.scan_folders(root)?;
        } else if version.is_file() {
            tree.scan_one_file(source)?;
        } else {
            let source = shown_path(source);
            return Err(Error::usage(format!("{source}: neither a folder nor a regular file")));
        }
        tree.check_config()?;
        Ok(tree)
    }

    /// The store for the file at `path`, with the disk cache of this tree.
    pub fn store_of(&self, path: &Path) -> Store {
        Store::for_options(path, &self.options)
    }

    /// Scans the folder of one file. The file keeps the name that the user gave. In a hub cache
    /// this is the name of the link, and not the name of the blob.
    fn scan_one_file(&mut self, file: &Path) -> Result<()> {
        let shown = shown_path(file);
        if self.options.hub {
            return Err(Error::usage(format!("{shown}: layout=hub needs a folder of models")));
        }
        let name = file
            .file_name()
            .and_then(OsStr::to_str)
            .ok_or_else(|| Error::usage(format!("{shown}: the file name is not UTF-8")))?;
        let parent = match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let folder = self.store().real_path(parent).map_err(|e| Error::io(parent, "open", e))?;
        self.source = folder.join(name);
        self.only = Some(name.to_owned());
        self.bounds.set_root(folder.clone());
        self.scan_folders(folder)?;
        // In the list of folders, the folder of the first view comes after the folders that lead to
        // it.
        let own = self.folder(self.views.first().map_or(0, |(path, _)| path.components().count()));
        if own.file(name).is_none() {
            let why = match self.options.links {
                Links::Inside => {
                    "a link out of its folder; allow its target with -o follow=DIR".to_owned()
                }
                Links::Anywhere => "not a regular file".to_owned(),
            };
            return Err(Error::usage(format!("{shown}: {why}")));
        }
        Ok(())
    }

    fn scan_folders(&mut self, root: PathBuf) -> Result<()> {
        // If the source is one file, folders beside it are not scanned.
        let scan = Scan::new(&self.bounds, LIMITS, self.only.is_none());
        let (scanned, left_out) = scan.run(root, Graft::default())?;
        if self.options.hub {
            let folders = hub::as_hub(&scanned, Some(0));
            self.folders.write().graft(None, folders);
        } else if self.views.is_empty() {
            self.folders.write().graft(None, scanned);
        } else {
            self.graft_views(scanned)?;
        }
        // If the source is one file, left-out names beside it are not reported.
        self.left_out = if self.only.is_none() { left_out } else { LeftOut::default() };
        Ok(())
    }

    /// Shows the folders of the source once for each view, below a folder with the name of the
    /// view.
    ///
    /// # Errors
    /// The folders of all views together exceed a limit.
    fn graft_views(&self, scanned: Vec<Folder>) -> Result<()> {
        let Some(source) = scanned.first() else { return Ok(()) };
        let root = Folder {
            store: source.store.clone(),
            path: source.path.clone(),
            version: source.version,
            listed: source.listed,
            made: true,
            ..Folder::default()
        };
        let count = self.views.len();
        let mut weight = Weight { entries: count, ..Weight::default() };
        scanned.iter().for_each(|folder| weight.add(Weight::of(folder).times(count)));
        weight
            .check(count, LIMITS)
            .map_err(|why| Error::usage(format!("{}: {why}", shown_path(&self.source))))?;
        let mut folders = self.folders.write();
        let mut leading =
            BTreeMap::from([(PathBuf::new(), folders.graft(None, vec![root.clone()]))]);
        for (view, (path, _)) in self.views.iter().enumerate() {
            let mut parent = leading[Path::new("")];
            let above: Vec<&Path> = path.ancestors().skip(1).collect();
            for above in above.into_iter().rev() {
                parent = *leading.entry(above.to_owned()).or_insert_with(|| {
                    let made = Folder { relative: above.to_owned(), ..root.clone() };
                    graft_child(&mut folders, parent, above, vec![made])
                });
            }
            let placed = scanned.iter().map(|folder| Folder {
                relative: in_folder(path, &folder.relative),
                view: Some(view),
                ..folder.clone()
            });
            graft_child(&mut folders, parent, path, placed.collect());
        }
        Ok(())
    }

    /// The store of the source.
    pub fn store(&self) -> &Store {
        self.bounds.store()
    }

    /// Number of views that each show all folders. It is 0 if the options have only one view.
    pub(super) fn view_count(&self) -> usize {
        if self.options.hub { 0 } else { self.views.len() }
    }

    /// The options for the sets of `folder`.
    pub fn options_of(&self, folder: &Folder) -> &OpenOptions {
        folder.view.and_then(|view| self.views.get(view)).map_or(&self.options, |(_, own)| own)
    }

    /// The options for the sets in the folder at `path` in the tree. The folder may be gone.
    pub fn options_at(&self, path: &Path) -> &OpenOptions {
        let view = self.views.iter().find(|(folder, _)| path.starts_with(folder));
        view.map_or(&self.options, |(_, own)| own)
    }

    /// The path in the tree of the folder of the view that presents `folder`. `None` if the source has only one view.
    pub fn view_folder(&self, folder: &Folder) -> Option<&Path> {
        let view = folder.view.and_then(|view| self.views.get(view));
        view.map(|(path, _)| path.as_path()).filter(|path| !path.as_os_str().is_empty())
    }

    /// The folder that the user named and that contains the real path `path`: the source, or a folder into which links
    /// may lead. `/` if none of them contains `path`.
    pub fn base_of(&self, path: &Path) -> PathBuf {
        self.bounds.base_of(path)
    }

    /// The real path of the folder that the root shows.
    pub fn root(&self) -> PathBuf {
        self.bounds.root()
    }

    /// The folders of the tree that show the folder at the real path `path`, except folders behind links.
    pub fn shown_without_links(&self, path: &Path) -> Vec<Arc<Folder>> {
        let folders = self.folders.read();
        let found = folders.at(path).iter().filter_map(|&id| folders.get(id));
        found.filter(|folder| !folder.linked && !folder.made).cloned().collect()
    }

    /// Whether `folder` shows the source itself.
    pub(super) fn is_source(&self, folder: &Folder) -> bool {
        match folder.parent {
            None => true,
            Some(parent) => self.folder(parent).made,
        }
    }

    /// The numbers of all folders, parents before children.
    pub fn ids(&self) -> Vec<FolderId> {
        self.folders.read().ids().collect()
    }

    /// Whether the tree has the folder `id`.
    pub fn contains(&self, id: FolderId) -> bool {
        self.folders.read().get(id).is_some()
    }

    /// The folder `id`, as it was last examined. For a folder that is gone, the result is empty and
    /// has no path.
    pub fn folder(&self, id: FolderId) -> Arc<Folder> {
        self.folders.read().get(id).unwrap_or(&self.nothing).clone()
    }

    /// Examines the files of the family of `top` again. The names stay as they were scanned: a
    /// missing file is remembered, because it may return. Other threads can use the tree meanwhile.
    /// A caller that already has a folder of the family keeps the previous state of the folder.
    pub fn rescan(&self, top: FolderId) {
        for id in self.family(top) {
            while !self.rescan_folder(id) {}
        }
    }

    /// Examines the files of folder `id` again. Returns false if another thread replaced the folder
    /// in the meantime.
    fn rescan_folder(&self, id: FolderId) -> bool {
        let before = self.folder(id);
        let mut folder = Folder::clone(&before);
        if let Ok(now) = self.store().version_behind_links(&folder.path)
            && folder.version.replace(now) != Some(now)
        {
            // The folder has new times, but its names were listed earlier. So the time of its
            // listing is not valid any more.
            folder.listed = 0;
        }
        let mut names: Vec<&OsString> =
            before.files.iter().map(|file| &file.name).chain(&before.gone).collect();
        names.sort();
        let mut files = Vec::with_capacity(names.len());
        folder.gone.clear();
        for name in names {
            match look_at(&self.bounds, &folder.path.join(name)) {
                Some((path, version)) => {
                    files.push(File {
                        name: name.clone(),
                        store: self.store().clone(),
                        path,
                        version,
                    });
                }
                None => folder.gone.push(name.clone()),
            }
        }
        folder.files = files.into();
        let mut folders = self.folders.write();
        let Some(now) = folders.get(id) else { return true };
        let same = Arc::ptr_eq(now, &before);
        if same {
            folders.replace(id, folder);
        }
        same
    }

    /// Whether a file of the family of `folder` has changed: it is missing, has returned, or was
    /// replaced.
    pub fn is_stale(&self, folder: FolderId) -> bool {
        let family = self.family(self.family_of(folder));
        let mut folders = family.into_iter().map(|id| self.folder(id));
        folders.any(|folder| {
            let now = |name: &OsStr| look_at(&self.bounds, &folder.path.join(name));
            folder.gone.iter().any(|name| now(name).is_some())
                || folder.files.iter().any(|file| {
                    !now(&file.name).is_some_and(|(_, id)| id.content() == file.version.content())
                })
        })
    }

    /// Whether anything in the tree is at or below `path`, or is the folder `id`.
    pub fn reaches(&self, path: &Path, id: FileId) -> bool {
        let folders = self.folders.read();
        folders.all().any(|folder| {
            folder.version.is_some_and(|version| version.file() == id)
                || folder.path.starts_with(path)
                || folder.files.iter().any(|file| file.path.starts_with(path))
        })
    }

    /// The top folders of all families with weight files. A family is a folder with its `sharded/` or `consolidated/`
    /// subfolder, or the folder of a run of DeepSpeed with the folders of its checkpoints, or the folder of a
    /// universal checkpoint with the folders of its tensors. The folders of a family are proved together.
    pub fn families(&self) -> Vec<FolderId> {
        let only = self.only.as_deref();
        let with_weights = self.ids().into_iter().filter(|&id| self.folder(id).has_weights(only));
        let tops: BTreeSet<FolderId> = with_weights.map(|id| self.family_of(id)).collect();
        tops.into_iter().collect()
    }

    /// The top folder of the family to which `folder` belongs.
    pub fn family_of(&self, mut folder: FolderId) -> FolderId {
        loop {
            let now = self.folder(folder);
            let is_of = |parent: &FolderId| {
                now.relative.file_name().is_some_and(is_twin)
                    || now.is_of_run(&self.folder(*parent))
                    || self.universal_of(&now).is_some()
            };
            match now.parent.filter(is_of) {
                Some(parent) => folder = parent,
                None => return folder,
            }
        }
    }

    /// The folders of the family whose top folder is `top`, parents before children.
    pub fn family(&self, top: FolderId) -> Vec<FolderId> {
        let mut members = vec![top];
        let mut next = 0;
        while let Some(&id) = members.get(next) {
            let folder = self.folder(id);
            let is_of = |(name, child): &&(OsString, FolderId)| {
                let child = self.folder(*child);
                is_twin(name) || child.is_of_run(&folder) || self.universal_of(&child).is_some()
            };
            members.extend(folder.children.iter().filter(is_of).map(|&(_, child)| child));
            next += 1;
        }
        members
    }
}

/// The regular file at `path`, or at the target of its links, with its version. `None` if the links
/// may not be followed.
pub(super) fn look_at(bounds: &LinkBounds, path: &Path) -> Option<(PathBuf, Version)> {
    let (real, _) = bounds.resolve(path).ok()?;
    let now = bounds.store().fresh_version(&real).ok()?;
    now.is_file().then_some((real, now))
}

/// The options of each view in `options.views`, and of `layout=hub`.
fn views_of(options: &OpenOptions) -> Vec<(PathBuf, OpenOptions)> {
    let views = options.views.iter().flat_map(|views| views.iter());
    let options_of =
        |view: &View| OpenOptions { view: view.clone(), views: None, ..options.clone() };
    let named = views.map(|(name, view)| (name.into(), options_of(view)));
    let snapshots = OpenOptions { hub: false, ..options.clone() };
    named.chain(options.hub.then(|| (PathBuf::new(), snapshots))).collect()
}

/// Adds `scanned` below `parent`, which gets an entry with the last name of `path`. Returns the
/// number of the new folder.
fn graft_child(
    folders: &mut Folders,
    parent: FolderId,
    path: &Path,
    scanned: Vec<Folder>,
) -> FolderId {
    let id = folders.graft(Some(parent), scanned);
    if let (Some(above), Some(name)) = (folders.get(parent), path.file_name()) {
        let mut above = Folder::clone(above);
        above.children.push((name.to_owned(), id));
        folders.replace(parent, above);
    }
    id
}

/// The path `relative` in `folder`. An empty path is not joined, because that would add a slash.
pub(super) fn in_folder(folder: &Path, relative: &Path) -> PathBuf {
    if relative.as_os_str().is_empty() { folder.to_owned() } else { folder.join(relative) }
}
