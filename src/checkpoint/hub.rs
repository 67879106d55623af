//! The folders of `layout=hub`: a tree of models as a cache of the Hugging Face hub.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result, shown_path};
use crate::format::names;
use crate::hash::Digest;

use super::tree::{Folder, is_twin};

/// Longest name of a model or of its organization.
const NAME_LEN_MAX: usize = 96;

/// The folders of a cache in which each model of `scanned` is one snapshot. `scanned` is a whole
/// source, parents before children, whose folders refer to each other by position; so does the
/// result. Models of a cache keep their snapshots, and have no blobs. Folders that show a folder of
/// the source get `view`.
///
/// # Errors
/// `Error::Usage` if two folders are the same model.
pub(super) fn as_hub(scanned: &[Folder], view: Option<usize>) -> Result<Vec<Folder>> {
    let Some(source) = scanned.first() else { return Ok(Vec::new()) };
    let mut hub = Hub { scanned, view, folders: Vec::new(), models: BTreeSet::new() };
    let root = hub.make(None, OsStr::new(""), source);
    let has_models = || named(source).any(|(_, index)| is_model(&scanned[index]));
    if is_described(source) || (is_model(source) && !has_models()) {
        let name = source.path.file_name().and_then(OsStr::to_str).unwrap_or("model");
        hub.add_model(root, &[name], 0)?;
        return Ok(hub.folders);
    }
    for (name, index) in named(source) {
        let folder = &scanned[index];
        let is_cached = folder.children.iter().any(|(child, _)| child == "snapshots");
        if names::is_hub_model(name) && is_cached {
            hub.add_cached(root, name, index)?;
        } else if is_model(folder) {
            hub.add_model(root, &[name], index)?;
        } else {
            for (model, index) in named(folder) {
                hub.add_model(root, &[name, model], index)?;
            }
        }
    }
    Ok(hub.folders)
}

/// Folders in `folder` that may be models, by name.
fn named(folder: &Folder) -> impl Iterator<Item = (&str, usize)> {
    let names = folder.children.iter().filter_map(|(name, child)| Some((name.to_str()?, *child)));
    names.filter(|(name, _)| !name.starts_with('.'))
}

/// Whether `folder` has a file that describes a model, as no folder of models has.
fn is_described(folder: &Folder) -> bool {
    ["config.json", "model_index.json"].iter().any(|name| folder.file(name).is_some())
}

/// Whether `folder` holds a model, and not the models of an organization.
fn is_model(folder: &Folder) -> bool {
    let mut files = folder.files.iter().filter_map(|file| file.name.to_str());
    files.any(|name| names::is_weights(name) || name.ends_with(".json"))
        || folder.children.iter().any(|(name, _)| is_twin(name))
}

/// A cache in the making.
struct Hub<'a> {
    scanned: &'a [Folder],
    view: Option<usize>,
    folders: Vec<Folder>,
    models: BTreeSet<String>,
}

impl Hub<'_> {
    /// Adds a folder `name` with no entries of its own, which stands for `of`.
    fn make(&mut self, parent: Option<usize>, name: &OsStr, of: &Folder) -> usize {
        let made = Folder {
            path: of.path.clone(),
            identity: of.identity,
            listed: of.listed,
            made: true,
            ..Folder::default()
        };
        self.add(parent, name, made)
    }

    fn add(&mut self, parent: Option<usize>, name: &OsStr, folder: Folder) -> usize {
        let index = self.folders.len();
        let relative = match parent {
            None => PathBuf::new(),
            Some(parent) => {
                self.folders[parent].children.push((name.to_owned(), index));
                self.folders[parent].children.sort();
                self.folders[parent].relative.join(name)
            }
        };
        self.folders.push(Folder { relative, parent, children: Vec::new(), ..folder });
        index
    }

    /// Adds the folder `index` of the source with all below it, but for those that `skip` names.
    fn copy(&mut self, parent: usize, name: &OsStr, index: usize, skip: &str) -> usize {
        let source = &self.scanned[index];
        let copied = self.add(Some(parent), name, Folder { view: self.view, ..source.clone() });
        for (name, child) in &source.children {
            if name != skip {
                self.copy(copied, name, *child, "");
            }
        }
        copied
    }

    fn add_model(&mut self, root: usize, id: &[&str], index: usize) -> Result<()> {
        let source = &self.scanned[index];
        if !id.iter().all(|name| is_name(name)) {
            let path = shown_path(&source.path);
            tracing::warn!("{path}: not shown: the hub has no models of such a name");
            return Ok(());
        }
        let name = format!("models--{}", id.join("--"));
        self.take_name(&name, source)?;
        let model = self.make(Some(root), name.as_ref(), source);
        let revision = revision(&source.relative);
        let refs = self.make(Some(model), OsStr::new("refs"), source);
        let text: Arc<[u8]> = revision.as_bytes().into();
        self.folders[refs].texts = Arc::new([(OsString::from("main"), text)]);
        let snapshots = self.make(Some(model), OsStr::new("snapshots"), source);
        self.copy(snapshots, revision.as_ref(), index, "");
        Ok(())
    }

    fn add_cached(&mut self, root: usize, name: &str, index: usize) -> Result<()> {
        self.take_name(name, &self.scanned[index])?;
        let model = self.copy(root, name.as_ref(), index, "blobs");
        self.folders[model].made = true;
        Ok(())
    }

    fn take_name(&mut self, name: &str, source: &Folder) -> Result<()> {
        if self.models.insert(name.to_owned()) {
            return Ok(());
        }
        let source = shown_path(&source.path);
        Err(Error::usage(format!(
            "{source}: layout=hub: another folder is {name} too; rename one of them"
        )))
    }
}

/// Whether the hub may have a model or an organization of this name.
fn is_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let at_end = |end: char| name.starts_with(end) || name.ends_with(end);
    name.len() <= NAME_LEN_MAX
        && name.chars().all(is_plain)
        && !name.contains("--")
        && !name.contains("..")
        && !at_end('-')
        && !at_end('.')
}

/// The revision of a model, in the form of a commit: the same for the same path.
fn revision(relative: &Path) -> String {
    let first = Digest::of(relative.as_os_str().as_encoded_bytes()).to_string();
    let second = Digest::of(first.as_bytes()).to_string();
    format!("{first}{}", &second[..8])
}
