//! Where symbolic links may lead: inside the source, into the blobs of the same hub folder, or
//! into folders that the user named; for a library, to any file that its caller may read.

use std::ffi::OsString;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;

use crate::format::names;
use crate::open_options::Links;
use crate::source::{Identity, Version};

use super::Store;

/// The folders into which links of one source may lead.
#[derive(Clone, Debug)]
pub struct LinkBounds {
    root: PathBuf,
    follow: Vec<PathBuf>,
    links: Links,
    /// The device of the mount of this source, 0 if there is none.
    own: Arc<AtomicU64>,
}

/// Why a name is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unusable {
    /// A link whose target is not there.
    Nowhere,
    /// A link that leads back to itself.
    Loop,
    /// A link that leads out of the source.
    Outside,
    /// A link to a folder outside of the source, while links to files may lead anywhere.
    FolderOutside,
    /// A name that the operating system does not let the caller look at.
    Denied,
    /// Neither a file nor a folder: a FIFO, a socket or a device.
    Special,
    /// A weight file whose name is not UTF-8.
    NotUtf8,
    /// A link to a folder that it lies in.
    Above,
    /// A folder in too many folders.
    TooDeep,
    /// A folder that cannot be read.
    Unreadable,
    /// A folder from which links lead to too much.
    TooManyLinks,
    /// A folder of too many files.
    TooManyFiles,
    /// A part of the mount of this source.
    Mount,
}

impl Unusable {
    /// The fault of the name, as the end of `NAME is ...`.
    pub fn text(self) -> &'static str {
        match self {
            Unusable::Nowhere => "a link that leads nowhere",
            Unusable::Loop => "a link that leads back to itself",
            Unusable::Outside => "a link that leads out of the source",
            Unusable::FolderOutside => "a link to a folder outside this one",
            Unusable::Denied => "a link that leads where permission is denied",
            Unusable::Special => "neither a file nor a folder",
            Unusable::NotUtf8 => "a weight file whose name is not UTF-8",
            Unusable::Above => "a link to a folder that it lies in",
            Unusable::TooDeep => "a folder in too many others",
            Unusable::Unreadable => "a folder that cannot be read",
            Unusable::TooManyLinks => "one of too many folders that links lead to",
            Unusable::TooManyFiles => "a folder of too many files",
            Unusable::Mount => "a part of the mount itself",
        }
    }

    /// Text for `count` names.
    pub fn counted(self, count: usize) -> String {
        let (one, more) = match self {
            Unusable::Nowhere => ("link leads nowhere", "links lead nowhere"),
            Unusable::Loop => ("link leads back to itself", "links lead back to themselves"),
            Unusable::Outside => ("link leads out of the source", "links lead out of the source"),
            Unusable::FolderOutside => (
                "link leads to a folder outside this one",
                "links lead to folders outside this one",
            ),
            Unusable::Denied => {
                ("link leads where permission is denied", "links lead where permission is denied")
            }
            Unusable::Special => {
                ("is neither a file nor a folder", "are neither files nor folders")
            }
            Unusable::NotUtf8 => {
                ("weight file is not named in UTF-8", "weight files are not named in UTF-8")
            }
            Unusable::Above => {
                ("link leads to a folder that it lies in", "links lead to folders that they lie in")
            }
            Unusable::TooDeep => {
                ("folder lies in too many others", "folders lie in too many others")
            }
            Unusable::Unreadable => ("folder cannot be read", "folders cannot be read"),
            Unusable::TooManyLinks => (
                "folder is one of too many that links lead to",
                "folders are among too many that links lead to",
            ),
            Unusable::TooManyFiles => {
                ("folder holds too many files", "folders hold too many files")
            }
            Unusable::Mount => {
                ("name leads into the mount itself", "names lead into the mount itself")
            }
        };
        format!("{count} {}", if count == 1 { one } else { more })
    }

    /// Advice to the user.
    pub fn advice(self) -> &'static str {
        match self {
            Unusable::Nowhere | Unusable::Loop => "put the target back, or remove the link",
            Unusable::Outside => "allow the target with -o follow=DIR",
            Unusable::FolderOutside => "open the folder that the link leads to",
            Unusable::Denied => "let the user of this process read the target",
            Unusable::Special => "put a regular file there",
            Unusable::NotUtf8 => "rename the file",
            Unusable::Above => "remove the link",
            Unusable::TooDeep => "mount a smaller part",
            Unusable::Unreadable => "let the user of this process read it",
            Unusable::TooManyLinks => "remove links between folders, or mount a smaller part",
            Unusable::TooManyFiles => "mount a smaller part",
            Unusable::Mount => "remove the link, or mount somewhere else",
        }
    }
}

impl LinkBounds {
    /// LinkBounds of the source at `root`; both it and `follow` are absolute and without links.
    pub fn new(root: PathBuf, follow: Vec<PathBuf>, links: Links) -> LinkBounds {
        LinkBounds { root, follow, links, own: Arc::default() }
    }

    /// Root folder of the source.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of the user that `path` lies in: the links on the way to it are the user's own.
    pub fn base_of(&self, path: &Path) -> &Path {
        let bases = [&self.root].into_iter().chain(&self.follow);
        bases.map(PathBuf::as_path).find(|base| path.starts_with(base)).unwrap_or(Path::new("/"))
    }

    /// Leaves out everything on the device `dev`.
    pub fn leave_out_device(&self, dev: u64) {
        self.own.store(dev, Ordering::Relaxed);
    }

    /// Whether the file or folder lies on the device that is left out.
    pub fn leaves_out(&self, identity: &Identity) -> bool {
        identity.dev != 0 && identity.dev == self.own.load(Ordering::Relaxed)
    }

    /// Moves the bounds to another source.
    pub fn set_root(&mut self, root: PathBuf) {
        self.root = root;
    }

    /// Resolves `path`, which lies in the source, to its real path and metadata.
    ///
    /// # Errors
    /// The reason why the target may not be read.
    pub fn resolve(&self, path: &Path) -> Result<(PathBuf, Identity), Unusable> {
        let real = Store::Local.real_path(path).map_err(|e| reason(&e))?;
        let version = Store::Local.version(&real);
        let Version::Inode(identity) = version.map_err(|e| reason(&e))?;
        if self.allows(path, &real) || (self.links == Links::Anywhere && identity.is_file()) {
            return Ok((real, identity));
        }
        Err(match self.links {
            Links::Inside => Unusable::Outside,
            Links::Anywhere if identity.is_folder() => Unusable::FolderOutside,
            Links::Anywhere => Unusable::Special,
        })
    }

    fn allows(&self, link: &Path, real: &Path) -> bool {
        let inside = real.starts_with(&self.root)
            || self.follow.iter().any(|folder| real.starts_with(folder));
        inside || is_own_blob(link, real)
    }
}

/// Most links on the way of one link, as the kernel follows.
const LINKS_MAX: usize = 40;

impl Store {
    /// The real paths of the folders whose entries decide where the link at `link` leads. `real` is
    /// the path that it leads to. The folder of `link`, which is a real path, may be among them.
    pub fn folders_on_the_way(self, link: &Path, real: Option<&Path>) -> Vec<PathBuf> {
        let Store::Local = self;
        let Some(folder) = link.parent() else { return Vec::new() };
        let Ok(target) = std::fs::read_link(link) else { return Vec::new() };
        // Most links lead straight to their target.
        if let Some(real) = real.filter(|real| without_dots(&folder.join(&target)) == **real) {
            return real.parent().map(Path::to_owned).into_iter().collect();
        }
        let mut folders = Vec::new();
        let mut here = folder.to_owned();
        let mut left: Vec<OsString> = names_of(&target);
        let mut links = 0;
        while let Some(name) = left.pop() {
            if name == "/" {
                here = PathBuf::from("/");
            } else if name == ".." {
                here.pop();
            } else {
                let next = here.join(&name);
                let found = std::fs::symlink_metadata(&next).ok();
                if found.as_ref().is_some_and(std::fs::Metadata::is_symlink) && links < LINKS_MAX {
                    links += 1;
                    folders.push(here.clone());
                    left.extend(
                        std::fs::read_link(&next).iter().flat_map(|target| names_of(target)),
                    );
                    continue;
                }
                if left.is_empty() || found.is_none() {
                    folders.push(here);
                    break;
                }
                here = next;
            }
        }
        folders
    }
}

/// The names of a path, the last one first.
fn names_of(path: &Path) -> Vec<OsString> {
    let names = path.components().filter(|part| !matches!(part, Component::CurDir));
    names.rev().map(|part| part.as_os_str().to_owned()).collect()
}

/// `path` with each `..` taken for the folder above, which is wrong behind links.
fn without_dots(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

fn reason(error: &io::Error) -> Unusable {
    match error.raw_os_error() {
        Some(libc::ELOOP) => Unusable::Loop,
        Some(libc::EACCES | libc::EPERM) => Unusable::Denied,
        _ => Unusable::Nowhere,
    }
}

/// Whether `real` lies in `blobs/` of the `models--*` hub folder that `link` lies in.
fn is_own_blob(link: &Path, real: &Path) -> bool {
    let Some(folder) = hub_folder(link) else { return false };
    let Ok(folder) = Store::Local.real_path(folder) else { return false };
    real.strip_prefix(folder).is_ok_and(|rest| {
        matches!(rest.components().next(), Some(Component::Normal(first)) if first == "blobs")
    })
}

/// The nearest ancestor named `models--*`.
fn hub_folder(path: &Path) -> Option<&Path> {
    path.ancestors().skip(1).find(|folder| {
        let name = folder.file_name().and_then(|name| name.to_str());
        name.is_some_and(names::is_hub_model)
    })
}
