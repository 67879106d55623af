//! Where symbolic links may lead: inside the source, into the blobs of the same hub folder, or
//! into folders that the user named.

use std::path::{Component, Path, PathBuf};

/// The folders into which links of one source may lead.
#[derive(Clone, Debug)]
pub struct Bounds {
    root: PathBuf,
    follow: Vec<PathBuf>,
}

impl Bounds {
    /// Bounds of the source at `root`; both it and `follow` are absolute and without links.
    pub fn new(root: PathBuf, follow: Vec<PathBuf>) -> Bounds {
        Bounds { root, follow }
    }

    /// The source.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Moves the bounds to another source.
    pub fn set_root(&mut self, root: PathBuf) {
        self.root = root;
    }

    /// Where `path`, which lies in the source, really is; `None` where it leads nowhere or out
    /// of bounds.
    pub fn resolve(&self, path: &Path) -> Option<PathBuf> {
        let real = std::fs::canonicalize(path).ok()?;
        self.allows(path, &real).then_some(real)
    }

    fn allows(&self, link: &Path, real: &Path) -> bool {
        let inside = real.starts_with(&self.root)
            || self.follow.iter().any(|folder| real.starts_with(folder));
        inside || is_own_blob(link, real)
    }
}

/// Whether `real` lies in `blobs/` of the `models--*` hub folder that `link` lies in.
fn is_own_blob(link: &Path, real: &Path) -> bool {
    let Some(folder) = hub_folder(link) else { return false };
    let Ok(folder) = std::fs::canonicalize(folder) else { return false };
    real.strip_prefix(folder).is_ok_and(|rest| {
        matches!(rest.components().next(), Some(Component::Normal(first)) if first == "blobs")
    })
}

/// The nearest ancestor named `models--*`.
fn hub_folder(path: &Path) -> Option<&Path> {
    path.ancestors().skip(1).find(|folder| {
        let name = folder.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("models--"))
    })
}
