//! The allowed targets of symbolic links. Links may lead inside the source, into the blobs of the same hub folder, or
//! into folders that the user named. In a library, a link may lead to any file that the caller can read.

use std::ffi::OsString;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, OnceLock};

use nix::libc;

use crate::format::names;
use crate::open_options::Links;
use crate::sync::RwLock;
use crate::version::{QueueKey, Version};

use super::Store;

/// The folders into which links of one source may lead.
#[derive(Clone, Debug)]
pub struct LinkBounds {
    store: Store,
    /// Root folder of the source. Clones share it, because the source may be moved.
    root: Arc<RwLock<PathBuf>>,
    follow: Vec<PathBuf>,
    links: Links,
    /// The read queue of the mount of this source, if it is mounted.
    own: Arc<OnceLock<QueueKey>>,
}

/// The reason why a name is left out.
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
    /// A name that the operating system does not let this process access.
    Denied,
    /// Neither a file nor a folder: a FIFO, a socket or a device.
    Special,
    /// A weight file whose name is not UTF-8.
    NotUtf8,
    /// A link to a folder that contains the link.
    Above,
    /// A folder that is nested too deeply.
    TooDeep,
    /// A folder that cannot be read.
    Unreadable,
    /// A folder whose links lead to too many folders.
    TooManyLinks,
    /// A folder with too many files.
    TooManyFiles,
    /// A file or folder of the mount of this source.
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
            Unusable::TooDeep => "a folder that is nested too deeply",
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
            Unusable::TooDeep => ("folder is nested too deeply", "folders are nested too deeply"),
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
    /// The bounds for the source at `root` of `store`. `root` and `follow` are absolute and without symbolic links.
    pub fn new(store: Store, root: PathBuf, follow: Vec<PathBuf>, links: Links) -> LinkBounds {
        LinkBounds { store, root: Arc::new(RwLock::new(root)), follow, links, own: Arc::default() }
    }

    /// The store of the source.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Root folder of the source.
    pub fn root(&self) -> PathBuf {
        self.root.read().clone()
    }

    /// The folder that contains `path` and whose own path may contain links without a check: the root of the source or
    /// a folder that the user named. `/` if none of them contains `path`.
    pub fn base_of(&self, path: &Path) -> PathBuf {
        let mut bases = [self.root()].into_iter().chain(self.follow.iter().cloned());
        bases.find(|base| path.starts_with(base)).unwrap_or_else(|| PathBuf::from("/"))
    }

    /// From now on, leaves out every file and folder whose reads belong to `queue`.
    pub fn leave_out(&self, queue: QueueKey) {
        let _ = self.own.set(queue);
    }

    /// Whether the file or folder is left out because of its queue.
    pub fn leaves_out(&self, version: &Version) -> bool {
        self.own.get() == Some(&version.queue_key())
    }

    /// Replaces the root of the source.
    pub fn set_root(&self, root: PathBuf) {
        *self.root.write() = root;
    }

    /// Resolves `path`, which lies in the source, to its real path and its version.
    ///
    /// # Errors
    /// The reason why the target may not be read.
    pub fn resolve(&self, path: &Path) -> Result<(PathBuf, Version), Unusable> {
        let real = self.store.real_path(path).map_err(|e| reason(&e))?;
        let version = self.store.version(&real).map_err(|e| reason(&e))?;
        if self.allows(path, &real) || (self.links == Links::Anywhere && version.is_file()) {
            return Ok((real, version));
        }
        Err(match self.links {
            Links::Inside => Unusable::Outside,
            Links::Anywhere if version.is_folder() => Unusable::FolderOutside,
            Links::Anywhere => Unusable::Special,
        })
    }

    fn allows(&self, link: &Path, real: &Path) -> bool {
        let inside = real.starts_with(&*self.root.read())
            || self.follow.iter().any(|folder| real.starts_with(folder));
        inside || self.store.is_own_blob(link, real)
    }
}

/// Maximum number of links that are followed one after another. The kernel has the same limit.
const LINKS_MAX: usize = 40;

impl Store {
    /// The real paths of the folders whose entries decide where the link at `link` leads. `link` is a path in a
    /// folder without symbolic links, and `real` is the path to which it leads. The folder of `link` itself may
    /// be among the results.
    pub fn folders_on_the_way(&self, link: &Path, real: Option<&Path>) -> Vec<PathBuf> {
        let Some(folder) = link.parent().filter(|_| self.is_local()) else { return Vec::new() };
        let Ok(target) = std::fs::read_link(link) else { return Vec::new() };
        // Most links lead directly to their target, without further links.
        if let Some(real) = real.filter(|real| without_dots(&folder.join(&target)) == **real) {
            return real.parent().map(Path::to_owned).into_iter().collect();
        }
        let Steps { links, last } = steps(folder, &target);
        let folders = links.iter().filter_map(|link| link.parent().map(Path::to_owned));
        folders.chain(last).collect()
    }

    /// The real paths of the further links that are followed from the link at `link`, whose folder is a real path.
    pub fn links_on_the_way(&self, link: &Path) -> Vec<PathBuf> {
        let target = std::fs::read_link(link).ok().filter(|_| self.is_local());
        let steps = link.parent().zip(target).map(|(folder, target)| steps(folder, &target));
        steps.map_or_else(Vec::new, |steps| steps.links)
    }

    /// Whether `real` lies in `blobs/` of the `models--*` hub folder that `link` lies in.
    pub fn is_own_blob(&self, link: &Path, real: &Path) -> bool {
        let Some(folder) = hub_folder(link) else { return false };
        let Ok(folder) = self.real_path(folder) else { return false };
        real.strip_prefix(folder).is_ok_and(|rest| {
            matches!(rest.components().next(), Some(Component::Normal(first)) if first == "blobs")
        })
    }
}

/// The links that were followed after one link.
struct Steps {
    /// The real paths of the further links.
    links: Vec<PathBuf>,
    /// The real path of the folder that contains the final target, if it was reached.
    last: Option<PathBuf>,
}

/// Follows a link in the real path `folder` to `target`.
fn steps(folder: &Path, target: &Path) -> Steps {
    let mut steps = Steps { links: Vec::new(), last: None };
    let mut here = folder.to_owned();
    let mut left: Vec<OsString> = names_of(target);
    while let Some(name) = left.pop() {
        if name == "/" {
            here = PathBuf::from("/");
        } else if name == ".." {
            here.pop();
        } else {
            let next = here.join(&name);
            let found = std::fs::symlink_metadata(&next).ok();
            if found.as_ref().is_some_and(std::fs::Metadata::is_symlink)
                && steps.links.len() < LINKS_MAX
            {
                left.extend(std::fs::read_link(&next).iter().flat_map(|target| names_of(target)));
                steps.links.push(next);
                continue;
            }
            if left.is_empty() || found.is_none() {
                steps.last = Some(here);
                break;
            }
            here = next;
        }
    }
    steps
}

/// The names in a path, the last name first.
fn names_of(path: &Path) -> Vec<OsString> {
    let names = path.components().filter(|part| !matches!(part, Component::CurDir));
    names.rev().map(|part| part.as_os_str().to_owned()).collect()
}

/// `path` with each `..` removed together with the name before it. If the removed name is a symbolic link, the result
/// is not the path that the kernel resolves.
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

/// The nearest ancestor named `models--*`.
fn hub_folder(path: &Path) -> Option<&Path> {
    path.ancestors().skip(1).find(|folder| {
        let name = folder.file_name().and_then(|name| name.to_str());
        name.is_some_and(names::is_hub_model)
    })
}
