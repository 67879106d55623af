//! The folders for `layout=hub`: presents a tree of models as a cache of the Hugging Face hub.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::shown_path;
use crate::format::names;
use crate::hash::Digest;

use super::folder::{Folder, is_twin};

/// Files for which programs look in the folder of a model.
const MODEL_FILES: [&str; 4] =
    ["config.json", "model_index.json", "adapter_config.json", "model.safetensors"];

/// The folders of a hub cache in which each model of `scanned` has one snapshot. `scanned` has all
/// folders of a source, parents before children, which refer to each other by index. The result has
/// the same form. If the source is a hub cache itself, its models keep their snapshots, and their
/// `blobs` are left out. Folders that show a folder of the source get `view`. Logs a warning for
/// each folder and weight file that is not shown.
pub(super) fn as_hub(scanned: &[Folder], view: Option<usize>) -> Vec<Folder> {
    let Some(source) = scanned.first() else { return Vec::new() };
    let mut hub = Hub { scanned, view, folders: Vec::new(), models: BTreeMap::new() };
    let root = hub.make(None, OsStr::new(""), source);
    let own_name = source.path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    if is_cached(own_name, source) {
        hub.add_hub_cache_model(root, own_name, 0);
        return hub.folders;
    }
    let is_many = || named(source).any(|(name, index)| hub.content(name, index).is_some());
    if is_one_model(source) || (has_model_file(source) && !is_many()) {
        let name = source.path.file_name().and_then(OsStr::to_str).unwrap_or("model");
        hub.add_model(root, &[name], 0);
        return hub.folders;
    }
    warn_of_weights(source);
    let contents: Vec<_> =
        named(source).map(|(name, index)| (name, index, hub.content(name, index))).collect();
    // If a model is in a hub cache of the source and in an ordinary folder too, the hub cache is
    // shown.
    for (name, index, _) in contents.iter().filter(|(.., of)| *of == Some(ModelFolderKind::Cached))
    {
        hub.add_hub_cache_model(root, name, *index);
    }
    for (name, index, content) in contents {
        match content {
            Some(ModelFolderKind::Cached) => {}
            Some(ModelFolderKind::Model) => hub.add_model(root, &[name], index),
            Some(ModelFolderKind::Models) => hub.add_organization(root, name, index),
            None => warn_of_no_model(&scanned[index]),
        }
    }
    hub.folders
}

/// The kind of models in a folder of the source.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ModelFolderKind {
    /// A model in the form of a hub cache, with its snapshots.
    Cached,
    Model,
    /// A folder of an organization, which has several models.
    Models,
}

/// The subfolders of `folder` that may be models, by name.
fn named(folder: &Folder) -> impl Iterator<Item = (&str, usize)> {
    let names = folder.children.iter().filter_map(|(name, child)| Some((name.to_str()?, *child)));
    names.filter(|(name, _)| !name.starts_with('.') && !is_twin(OsStr::new(name)))
}

fn file_names(folder: &Folder) -> impl Iterator<Item = &str> {
    folder.files.iter().filter_map(|file| file.name.to_str())
}

/// Whether the folder `name` is a model in the form of a hub cache.
fn is_cached(name: &str, folder: &Folder) -> bool {
    names::is_hub_model(name) && folder.children.iter().any(|(child, _)| child == "snapshots")
}

/// Whether `folder` is certainly one model and no folder of models, because it has a file for which
/// programs look in a model, or a sharded set.
fn is_one_model(folder: &Folder) -> bool {
    let is_of_model = |name: &str| {
        MODEL_FILES.contains(&name)
            || names::weight_map_output(name).is_some()
            || names::is_shard(name)
    };
    file_names(folder).any(is_of_model) || folder.children.iter().any(|(name, _)| is_twin(name))
}

/// Whether `folder` has a file or a folder that may belong to a model.
fn has_model_file(folder: &Folder) -> bool {
    is_one_model(folder)
        || file_names(folder).any(|name| names::is_weights(name) || name.ends_with(".json"))
}

fn warn_of_weights(folder: &Folder) {
    for name in file_names(folder).filter(|name| names::is_weights(name)) {
        let path = shown_path(&folder.path.join(name));
        tracing::warn!("{path}: not shown: it lies beside folders of models");
    }
}

fn warn_of_no_model(folder: &Folder) {
    let path = shown_path(&folder.path);
    tracing::warn!(
        "{path}: not shown: no weights and no .json file in it, so it is no model; models are \
         folders NAME or ORG/NAME of the source"
    );
}

/// A hub cache that is being built.
struct Hub<'a> {
    scanned: &'a [Folder],
    view: Option<usize>,
    folders: Vec<Folder>,
    /// The path in the source of each model, by the name of the model.
    models: BTreeMap<String, PathBuf>,
}

impl Hub<'_> {
    /// The kind of models in the folder `index` of the source. `None` if it has no model.
    fn content(&self, name: &str, index: usize) -> Option<ModelFolderKind> {
        let folder = &self.scanned[index];
        let has_models = || named(folder).any(|(_, child)| has_model_file(&self.scanned[child]));
        match () {
            () if is_cached(name, folder) => Some(ModelFolderKind::Cached),
            () if is_one_model(folder) => Some(ModelFolderKind::Model),
            () if has_models() => Some(ModelFolderKind::Models),
            () => has_model_file(folder).then_some(ModelFolderKind::Model),
        }
    }

    /// Adds a folder `name` that the tree makes. It has no entries yet, and gets path and version
    /// of `of`.
    fn make(&mut self, parent: Option<usize>, name: &OsStr, of: &Folder) -> usize {
        let made = Folder {
            store: of.store.clone(),
            path: of.path.clone(),
            version: of.version,
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

    /// Adds the folder `index` of the source and everything below it, except its subfolder `skip`.
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

    fn add_organization(&mut self, root: usize, name: &str, index: usize) {
        let folder = &self.scanned[index];
        warn_of_weights(folder);
        for (model, index) in named(folder) {
            if has_model_file(&self.scanned[index]) {
                self.add_model(root, &[name, model], index);
            } else {
                warn_of_no_model(&self.scanned[index]);
            }
        }
    }

    fn add_model(&mut self, root: usize, id: &[&str], index: usize) {
        let source = &self.scanned[index];
        if !id.iter().all(|name| names::is_hub_name(name)) {
            let path = shown_path(&source.path);
            tracing::warn!("{path}: not shown: the hub has no models of such a name");
            return;
        }
        let name = names::hub_model(id);
        if !self.take_name(&name, source) {
            return;
        }
        let model = self.make(Some(root), name.as_ref(), source);
        let revision = revision(&source.relative);
        let refs = self.make(Some(model), OsStr::new("refs"), source);
        let text: Arc<[u8]> = revision.as_bytes().into();
        self.folders[refs].texts = Arc::new([(OsString::from("main"), text)]);
        let snapshots = self.make(Some(model), OsStr::new("snapshots"), source);
        self.copy(snapshots, revision.as_ref(), index, "");
    }

    fn add_hub_cache_model(&mut self, root: usize, name: &str, index: usize) {
        if self.take_name(name, &self.scanned[index]) {
            let model = self.copy(root, name.as_ref(), index, "blobs");
            self.folders[model].made = true;
        }
    }

    /// Whether the name `name` is free for this model. If another folder has it, logs a warning.
    fn take_name(&mut self, name: &str, source: &Folder) -> bool {
        if let Some(shown) = self.models.get(name) {
            let (path, shown) = (shown_path(&source.path), shown_path(shown));
            tracing::warn!("{path}: not shown: {shown} is {name} too, and is shown");
            return false;
        }
        self.models.insert(name.to_owned(), source.path.clone());
        true
    }
}

/// A revision for a model, in the form of a commit hash. It depends only on the path of the model.
fn revision(relative: &Path) -> String {
    let first = Digest::of(relative.as_os_str().as_encoded_bytes()).to_string();
    let second = Digest::of(first.as_bytes()).to_string();
    format!("{first}{}", &second[..8])
}
