//! The files that a folder of the mount shows: files of the source, virtual files of its sets, and
//! an error file that says why sets are missing.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::shown;
use crate::format::weight_map::WeightMap;
use crate::format::{OutputFormat, names};
use crate::source::Source;
use crate::view::{Files, MapPolicy};

use super::folder::{File, Folder, FolderId};
use super::set::Proved;
use super::tree::Tree;
use super::{Checkpoint, SetKind, VirtualFile};

/// Name of the file that says why a set is not shown.
pub const ERROR_FILE: &str = "TENSORFS-ERROR.txt";

/// The content of a shown file.
#[derive(Clone, Debug)]
pub enum Content {
    /// A file of the source, byte for byte.
    Whole {
        /// The file.
        file: File,
        /// The open file that was proved. `None` for files without weights.
        proved: Option<Arc<Source>>,
    },
    /// A virtual file: tensors of a checkpoint behind one header.
    Virtual(VirtualFile),
    /// Text that tensorfs has made.
    Text(Arc<[u8]>),
}

impl Content {
    /// The sources of the weights. Empty for files without weights.
    pub fn sources(&self) -> &[Arc<Source>] {
        match self {
            Content::Virtual(file) => file.sources(),
            Content::Whole { proved, .. } => proved.as_slice(),
            Content::Text(_) => &[],
        }
    }
}

/// A file that a folder shows.
#[derive(Clone, Debug)]
pub struct MountEntry {
    /// Its name.
    pub name: OsString,
    /// Its content.
    pub content: Content,
}

impl Tree {
    /// The files that folder `id` shows, sorted by name. Its subfolders are not among them.
    pub fn entries(&self, id: FolderId, proved: &Proved) -> Vec<MountEntry> {
        let folder = self.folder(id);
        let map = self.options_of(&folder).view.map;
        let mut shown = Vec::new();
        let whole = |file: &File, proved| MountEntry {
            name: file.name.clone(),
            content: Content::Whole { file: file.clone(), proved },
        };
        if self.only.is_none() {
            let is_weights =
                |file: &File| file.name.to_str().is_some_and(|name| proved.weights.contains(name));
            let merged = self.merged_blobs(&folder);
            let others =
                folder.files.iter().filter(|f| !is_weights(f) && !merged.contains(&f.path));
            shown.extend(others.map(|file| whole(file, None)));
        }
        for set in proved.sets.iter().filter(|set| set.shown_at_parent.is_none()) {
            let Ok(checkpoint) = &set.outcome else { continue };
            if checkpoint.files.is_empty() {
                let files = set.files.iter().filter(|name| shows_map(map, checkpoint, name));
                shown.extend(files.filter_map(|name| {
                    Some(whole(folder.file(name)?, checkpoint.source(name).cloned()))
                }));
            } else {
                show_virtual(map, checkpoint, &mut shown);
            }
        }
        shown.extend(folder.texts.iter().map(|(name, text)| MountEntry {
            name: name.clone(),
            content: Content::Text(text.clone()),
        }));
        let of_model = self.model_files(&folder, proved);
        shown.extend(of_model.iter().map(|file| whole(file, None)));
        let given = self.config_files(&folder, proved);
        shown.retain(|entry| !given.iter().any(|file| file.name == entry.name));
        shown.extend(given.iter().map(|file| whole(file, None)));
        if let Some(text) = error_text(proved, &folder.lacks) {
            let content = Content::Text(text.into_bytes().into());
            shown.retain(|file| file.name != ERROR_FILE);
            shown.push(MountEntry { name: ERROR_FILE.into(), content });
        }
        shown.sort_by(|a, b| a.name.cmp(&b.name));
        shown.dedup_by(|a, b| a.name == b.name);
        shown
    }

    /// If `folder` is the `blobs` folder of a hub cache: the blobs to which the snapshots of the
    /// model link as shards. A snapshot shows one merged file in place of its shards. `blobs` does
    /// not show the shards, so that a copy of the whole mount has their bytes only once.
    fn merged_blobs(&self, folder: &Folder) -> HashSet<PathBuf> {
        let mut merged = HashSet::new();
        let is_named = |path: &Path, test: fn(&str) -> bool| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(test)
        };
        let model = folder.parent.map(|parent| self.folder(parent));
        let Some(model) = model.filter(|model| is_named(&model.path, names::is_hub_model)) else {
            return merged;
        };
        if !is_named(&folder.path, |name| name == "blobs")
            || self.options_of(folder).view.files == Files::Original
        {
            return merged;
        }
        let mut left: Vec<FolderId> = model
            .children
            .iter()
            .filter(|(name, _)| name == "snapshots")
            .map(|&(_, child)| child)
            .collect();
        while let Some(id) = left.pop() {
            let snapshot = self.folder(id);
            left.extend(snapshot.children.iter().map(|&(_, child)| child));
            let shards = snapshot
                .files
                .iter()
                .filter(|file| is_named(Path::new(&file.name), names::is_shard));
            merged.extend(shards.map(|file| file.path.clone()));
        }
        merged
    }

    /// The folders of a family that are not shown, because the parent folder shows their checkpoint
    /// and they hold nothing else. For each folder, `family` has the proved sets and the number of
    /// files that the folder shows. Parents come before children.
    pub fn emptied<'a>(
        &self,
        family: impl DoubleEndedIterator<Item = (FolderId, &'a Proved, usize)>,
    ) -> HashSet<FolderId> {
        let mut emptied = HashSet::new();
        for (id, proved, files) in family.rev() {
            let is_twin = proved.sets.iter().any(|set| set.shown_at_parent.is_some());
            let folder = self.folder(id);
            let mut children = folder.children.iter();
            if is_twin && files == 0 && children.all(|(_, child)| emptied.contains(child)) {
                emptied.insert(id);
            }
        }
        emptied
    }
}

fn shows_map(map: MapPolicy, checkpoint: &Checkpoint, name: &str) -> bool {
    map != MapPolicy::Hide || checkpoint.weight_map().is_none_or(|(file, _)| file != name)
}

fn show_virtual(map: MapPolicy, checkpoint: &Arc<Checkpoint>, shown: &mut Vec<MountEntry>) {
    shown.extend(checkpoint.virtual_files().map(|file| {
        let name = file.spec().name.clone().into();
        MountEntry { name, content: Content::Virtual(file) }
    }));
    // Readers of weight maps expect safetensors files.
    if checkpoint.format != OutputFormat::Safetensors || map != MapPolicy::Rewrite {
        return;
    }
    let (name, metadata) = match checkpoint.weight_map() {
        Some((name, metadata)) => {
            let mut metadata = metadata.clone();
            // A view may change the number of parameters.
            if checkpoint.has_other_tensors() {
                metadata.remove("total_parameters");
            }
            // Programs do not look for the name of a weight map of `torch.save` beside safetensors, so the map gets
            // another name.
            let name = match names::torch_map_output(name) {
                Some(_) => names::weight_map(&checkpoint.name),
                None => name.to_owned(),
            };
            (name, metadata)
        }
        // torch writes a weight map beside the file when it consolidates rank shards, and some readers need the map.
        // Without the map, a number in the name of a file would suggest that other files exist.
        None if checkpoint.kind == SetKind::Dcp
            || checkpoint.files.iter().any(|file| file.spec.name != checkpoint.name) =>
        {
            (names::weight_map(&checkpoint.name), Map::new())
        }
        None => return,
    };
    let text = weight_map_text(checkpoint, &metadata);
    shown.push(MountEntry { name: name.into(), content: Content::Text(text.into()) });
}

/// The text of the weight map for the virtual files of `checkpoint`.
fn weight_map_text(checkpoint: &Arc<Checkpoint>, metadata: &Map<String, Value>) -> Vec<u8> {
    let catalog = checkpoint.catalog();
    let mut file_of = vec![checkpoint.name.as_str(); catalog.len()];
    for file in &checkpoint.files {
        for &position in file.spec.tensors.iter().flat_map(|tensors| tensors.iter()) {
            file_of[position as usize] = &file.spec.name;
        }
    }
    let tensors = catalog.tensors().map(|tensor| (tensor.name, file_of[tensor.position()]));
    WeightMap::rewritten(metadata, tensors, catalog.data_len())
}

/// The text of the error file: the lines of `lacks`, and the reasons why sets of the folder are
/// refused. `None` if there is no such line.
fn error_text(proved: &Proved, lacks: &[String]) -> Option<String> {
    let mut text: String = lacks.iter().map(|line| format!("{}\n", shown(line))).collect();
    for set in &proved.sets {
        if let Err(error) = &set.outcome {
            let name = shown(&set.name);
            text.push_str(&format!("{name} is not shown: {}: {error}\n", error.kind()));
        }
    }
    (!text.is_empty()).then_some(text)
}
