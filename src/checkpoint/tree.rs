//! A source as a tree of folders and files, as it stands when it is scanned.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result, shown_path};
use crate::format::names;
use crate::source::Identity;
use crate::source::resolve::Bounds;
use crate::view::View;

/// Deepest folder entered: links could make a tree without end.
const DEPTH_MAX: usize = 40;

/// Most files and folders of one source.
const ENTRIES_MAX: usize = 4_000_000;

/// Most folders entered through links: few links to each other's folders make many paths.
const LINKED_FOLDERS_MAX: usize = 10_000;

/// Children that hold another form of what their parent holds.
const TWIN_FOLDERS: [&str; 2] = ["sharded", "consolidated"];

/// Position of a folder in its tree.
pub type FolderId = usize;

/// A regular file of the source.
#[derive(Clone, Debug)]
pub struct File {
    /// Name in its folder.
    pub name: OsString,
    /// Where its bytes really are, symbolic links resolved.
    pub path: PathBuf,
    /// What it was when the tree was scanned.
    pub identity: Identity,
}

/// A folder of the source.
#[derive(Clone, Debug)]
pub struct Folder {
    /// Path below the source, empty for the source itself.
    pub relative: PathBuf,
    /// Where it really is.
    pub path: PathBuf,
    /// What it was when the tree was scanned.
    pub identity: Identity,
    /// The folder that it lies in.
    pub parent: Option<FolderId>,
    /// Folders in it, by name.
    pub children: Vec<(OsString, FolderId)>,
    /// Files in it, by name.
    pub files: Vec<File>,
    /// Names that lead to no file that may be read: broken links, folders, devices.
    pub unusable: Vec<OsString>,
    /// Names of files that were there when the tree was scanned and are not now.
    gone: Vec<OsString>,
}

/// A scanned source. Names are fixed from here on; contents are proved folder by folder.
#[derive(Clone, Debug)]
pub struct Tree {
    /// The source, absolute and without symbolic links; the file itself where it is one.
    pub source: PathBuf,
    /// How it is looked at.
    pub view: View,
    /// Where the source is one file: its name. Only the set that it belongs to counts.
    pub only: Option<String>,
    /// Folders, parents before children.
    pub folders: Vec<Folder>,
    /// What was left out, a line each.
    pub skipped: Vec<String>,
    bounds: Bounds,
}

impl Tree {
    /// Scans `source`: a folder, a tree of them, or one file.
    pub fn scan(source: &Path, view: &View) -> Result<Tree> {
        let open_error = |e| Error::io(source, "open", e);
        let root = std::fs::canonicalize(source).map_err(open_error)?;
        let meta = std::fs::metadata(&root).map_err(open_error)?;
        let follow = view
            .follow
            .iter()
            .map(|folder| std::fs::canonicalize(folder).map_err(|e| Error::io(folder, "open", e)));
        let follow = follow.collect::<Result<Vec<_>>>()?;
        let mut tree = Tree {
            source: root.clone(),
            view: view.clone(),
            only: None,
            folders: Vec::new(),
            skipped: Vec::new(),
            bounds: Bounds::new(root.clone(), follow),
        };
        if meta.is_dir() {
            let mut scan = Scan::new(&mut tree);
            scan.folder(PathBuf::new(), root, None, &mut Vec::new())?;
        } else if meta.is_file() {
            tree.scan_one_file(source)?;
        } else {
            return Err(Error::usage(format!(
                "{}: neither a folder nor a regular file",
                source.display()
            )));
        }
        Ok(tree)
    }

    /// Scans the folder of one file, which keeps the name that the user gave: in a hub cache
    /// that is the name of the link, not of the blob.
    fn scan_one_file(&mut self, file: &Path) -> Result<()> {
        let name = file.file_name().and_then(OsStr::to_str).ok_or_else(|| {
            Error::usage(format!("{}: the file name is not UTF-8", file.display()))
        })?;
        let folder = match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let folder = std::fs::canonicalize(folder).map_err(|e| Error::io(folder, "open", e))?;
        self.source = folder.join(name);
        self.only = Some(name.to_owned());
        self.bounds.set_root(folder.clone());
        let mut scan = Scan::new(self);
        scan.folder(PathBuf::new(), folder, None, &mut Vec::new())?;
        if self.folders[0].file(name).is_none() {
            return Err(Error::usage(format!(
                "{}: a link out of its folder; allow its target with -o follow=DIR",
                file.display()
            )));
        }
        Ok(())
    }

    /// Looks again at what the files of the family of `head` are. Names stay as they were
    /// scanned: a file that is gone is remembered, and may return.
    pub fn look_again(&mut self, head: FolderId) {
        for id in self.family(head) {
            let folder = &mut self.folders[id];
            if let Ok(meta) = std::fs::metadata(&folder.path) {
                folder.identity = Identity::of(&meta);
            }
            let names = folder.files.drain(..).map(|file| file.name);
            let mut names: Vec<OsString> = names.chain(folder.gone.drain(..)).collect();
            names.sort();
            for name in names {
                match look_at(&self.bounds, &folder.path.join(&name)) {
                    Some((path, identity)) => folder.files.push(File { name, path, identity }),
                    None => folder.gone.push(name),
                }
            }
        }
    }

    /// The file `name` of `folder` as it is now, where it is one that may be read.
    pub fn file_now(&self, folder: FolderId, name: &OsStr) -> Option<File> {
        let (path, identity) = look_at(&self.bounds, &self.folders[folder].path.join(name))?;
        Some(File { name: name.to_owned(), path, identity })
    }

    /// Whether a file of the family of `folder` is no longer what it was: gone, back, or
    /// another one.
    pub fn differs(&self, folder: FolderId) -> bool {
        let family = self.family(self.family_of(folder));
        let mut folders = family.into_iter().map(|id| &self.folders[id]);
        folders.any(|folder| {
            let now = |name: &OsStr| look_at(&self.bounds, &folder.path.join(name));
            folder.gone.iter().any(|name| now(name).is_some())
                || folder.files.iter().any(|file| {
                    !now(&file.name).is_some_and(|(_, id)| id.same_bytes(&file.identity))
                })
        })
    }

    /// Whether anything in the tree lies at or below `path`, or is the folder `inode`.
    pub fn reaches(&self, path: &Path, inode: (u64, u64)) -> bool {
        self.folders.iter().any(|folder| {
            (folder.identity.dev, folder.identity.ino) == inode
                || folder.path.starts_with(path)
                || folder.files.iter().any(|file| file.path.starts_with(path))
        })
    }

    /// Folders that have to be looked at together, by the one at the top: a folder and its
    /// `sharded/` or `consolidated/` child. Only those with weight files.
    pub fn families(&self) -> Vec<FolderId> {
        let with_weights = (0..self.folders.len()).filter(|&id| self.folders[id].has_weights(self));
        let heads: BTreeSet<FolderId> = with_weights.map(|id| self.family_of(id)).collect();
        heads.into_iter().collect()
    }

    /// The top of the family that `folder` belongs to.
    pub fn family_of(&self, mut folder: FolderId) -> FolderId {
        while let Some(parent) = self.folders[folder].parent {
            let name = self.folders[folder].relative.file_name();
            if !name.is_some_and(is_twin) {
                break;
            }
            folder = parent;
        }
        folder
    }

    /// The members of the family of which `head` is the top, parents before children.
    pub fn family(&self, head: FolderId) -> Vec<FolderId> {
        let mut members = vec![head];
        let mut next = 0;
        while let Some(&id) = members.get(next) {
            let twins = self.folders[id].children.iter().filter(|(name, _)| is_twin(name));
            members.extend(twins.map(|&(_, child)| child));
            next += 1;
        }
        members
    }
}

/// The regular file at `path` or where its links lead, if that is allowed.
fn look_at(bounds: &Bounds, path: &Path) -> Option<(PathBuf, Identity)> {
    let real = bounds.resolve(path)?;
    let meta = std::fs::symlink_metadata(&real).ok()?;
    meta.is_file().then(|| (real, Identity::of(&meta)))
}

fn is_weight_file(name: &OsStr) -> bool {
    let suffixes = [names::SUFFIX].into_iter().chain(names::BINTENSORS_SUFFIXES);
    suffixes.into_iter().any(|suffix| name.as_encoded_bytes().ends_with(suffix.as_bytes()))
}

fn is_twin(name: &OsStr) -> bool {
    TWIN_FOLDERS.iter().any(|twin| name == *twin)
}

impl Folder {
    /// The file of this name.
    pub fn file(&self, name: &str) -> Option<&File> {
        let at = self.files.binary_search_by(|file| file.name.as_os_str().cmp(OsStr::new(name)));
        at.ok().map(|at| &self.files[at])
    }

    /// The latest modification time of the folder and its files.
    pub fn newest(&self) -> (i64, i64) {
        let times = self.files.iter().map(|file| file.identity.mtime);
        times.chain([self.identity.mtime]).max().unwrap_or_default()
    }

    fn has_weights(&self, tree: &Tree) -> bool {
        self.files.iter().filter_map(|file| file.name.to_str()).any(|name| {
            names::is_weights(name)
                || names::weight_map_output(name).is_some()
                || tree.only.as_deref() == Some(name)
        })
    }
}

/// A scan in progress.
struct Scan<'a> {
    tree: &'a mut Tree,
    entries: usize,
    /// Whether the folder that is scanned was reached through a link.
    linked: bool,
    linked_folders: usize,
}

impl Scan<'_> {
    fn new(tree: &mut Tree) -> Scan<'_> {
        Scan { tree, entries: 0, linked: false, linked_folders: 0 }
    }

    /// Adds the folder at `path`; `above` are the inodes of the folders that it lies in.
    fn folder(
        &mut self,
        relative: PathBuf,
        path: PathBuf,
        parent: Option<FolderId>,
        above: &mut Vec<(u64, u64)>,
    ) -> Result<FolderId> {
        let read_error = |e| Error::io(&path, "read", e);
        let meta = std::fs::metadata(&path).map_err(read_error)?;
        let identity = Identity::of(&meta);
        let entries = std::fs::read_dir(&path).map_err(read_error)?;
        let mut found = entries
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<std::io::Result<Vec<OsString>>>()
            .map_err(read_error)?;
        found.sort();
        self.entries += found.len();
        self.linked_folders += usize::from(self.linked);
        if self.entries > ENTRIES_MAX || self.linked_folders > LINKED_FOLDERS_MAX {
            return Err(Error::usage(format!(
                "{}: more than {ENTRIES_MAX} files and folders, or {LINKED_FOLDERS_MAX} folders \
                 behind links; mount a smaller part",
                shown_path(self.tree.bounds.root())
            )));
        }
        let id = self.tree.folders.len();
        let folder = Folder {
            relative: relative.clone(),
            path: path.clone(),
            identity,
            parent,
            children: Vec::new(),
            files: Vec::new(),
            unusable: Vec::new(),
            gone: Vec::new(),
        };
        self.tree.folders.push(folder);
        above.push((identity.dev, identity.ino));
        for name in found {
            self.entry(id, &relative.join(&name), &path.join(&name), name, above)?;
        }
        above.pop();
        Ok(id)
    }

    fn entry(
        &mut self,
        parent: FolderId,
        relative: &Path,
        path: &Path,
        name: OsString,
        above: &mut Vec<(u64, u64)>,
    ) -> Result<()> {
        let Ok(meta) = std::fs::symlink_metadata(path) else { return Ok(()) };
        let is_link = meta.is_symlink();
        let (real, meta) = if is_link {
            let Some(real) = self.tree.bounds.resolve(path) else {
                self.skip(relative, "a link that leads nowhere or out of the source");
                self.tree.folders[parent].unusable.push(name);
                return Ok(());
            };
            let Ok(meta) = std::fs::symlink_metadata(&real) else { return Ok(()) };
            (real, meta)
        } else {
            (path.to_owned(), meta)
        };
        let identity = Identity::of(&meta);
        if meta.is_file() && name.to_str().is_none() && is_weight_file(&name) {
            self.skip(relative, "a weight file whose name is not UTF-8");
        } else if meta.is_file() {
            self.tree.folders[parent].files.push(File { name, path: real, identity });
        } else if !meta.is_dir() {
            self.skip(relative, "neither a file nor a folder");
            self.tree.folders[parent].unusable.push(name);
        } else if self.tree.only.is_some() {
            // One file was named: folders beside it do not matter.
        } else if above.contains(&(identity.dev, identity.ino)) {
            self.skip(relative, "a link to a folder that it lies in");
        } else if above.len() >= DEPTH_MAX {
            self.skip(relative, "too deep");
        } else {
            let outer = self.linked;
            self.linked |= is_link;
            let child = self.folder(relative.to_owned(), real, Some(parent), above);
            self.linked = outer;
            match child {
                Ok(child) => self.tree.folders[parent].children.push((name, child)),
                Err(error @ Error::Usage { .. }) => return Err(error),
                Err(error) => self.skip(relative, &error.to_string()),
            }
        }
        Ok(())
    }

    fn skip(&mut self, relative: &Path, why: &str) {
        self.tree.skipped.push(format!("{}: not shown: {why}", shown_path(relative)));
    }
}
