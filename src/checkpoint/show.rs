//! What a folder shows: its files, its sets as whole files, and why a set is missing.

use std::ffi::OsString;
use std::sync::Arc;

use crate::format::Format;
use crate::format::weight_map::WeightMap;
use crate::source::Source;
use crate::view::{Arrangement, MapPolicy};

use super::Checkpoint;
use super::prove::{Proved, Set};
use super::tree::{File, FolderId, Tree};

/// Name of the file that says why a set is not shown.
pub const ERROR_FILE: &str = "TENSORFS-ERROR.txt";

/// What a shown file is made of.
#[derive(Clone, Debug)]
pub enum Content {
    /// A file of the source, byte for byte.
    Whole {
        /// The file.
        file: File,
        /// For weights: the open file that was proved.
        proved: Option<Arc<Source>>,
    },
    /// All tensors of a checkpoint as one file.
    Virtual(Arc<Checkpoint>),
    /// Text made here.
    Text(Arc<[u8]>),
}

/// A file as a folder shows it.
#[derive(Clone, Debug)]
pub struct Shown {
    /// Its name.
    pub name: OsString,
    /// What it is made of.
    pub content: Content,
}

impl Tree {
    /// The files that folder `id` shows, by name; its subfolders are shown beside them.
    pub fn shown(&self, id: FolderId, proved: &Proved) -> Vec<Shown> {
        let folder = &self.folders[id];
        let mut shown = Vec::new();
        let whole = |file: &File, proved| Shown {
            name: file.name.clone(),
            content: Content::Whole { file: file.clone(), proved },
        };
        if self.only.is_none() {
            let is_weights =
                |file: &File| file.name.to_str().is_some_and(|name| proved.weights.contains(name));
            shown.extend(folder.files.iter().filter(|f| !is_weights(f)).map(|f| whole(f, None)));
        }
        for set in proved.sets.iter().filter(|set| set.shown_at_parent.is_none()) {
            let Ok(checkpoint) = &set.outcome else { continue };
            if checkpoint.is_whole_file() || self.view.arrangement == Arrangement::Original {
                let files = set.files.iter().filter(|name| self.shows_map(checkpoint, name));
                shown.extend(files.filter_map(|name| {
                    Some(whole(folder.file(name)?, checkpoint.source(name).cloned()))
                }));
            } else {
                self.show_virtual(set, checkpoint, &mut shown);
            }
        }
        if let Some(text) = error_text(proved) {
            let content = Content::Text(text.into_bytes().into());
            shown.retain(|file| file.name != ERROR_FILE);
            shown.push(Shown { name: ERROR_FILE.into(), content });
        }
        shown.sort_by(|a, b| a.name.cmp(&b.name));
        shown.dedup_by(|a, b| a.name == b.name);
        shown
    }

    fn shows_map(&self, checkpoint: &Checkpoint, name: &str) -> bool {
        self.view.map != MapPolicy::Hide
            || checkpoint.weight_map().is_none_or(|(map, _)| map != name)
    }

    fn show_virtual(&self, set: &Set, checkpoint: &Arc<Checkpoint>, shown: &mut Vec<Shown>) {
        let content = Content::Virtual(checkpoint.clone());
        shown.push(Shown { name: set.name.clone().into(), content });
        // Whoever follows a weight map reads safetensors.
        if checkpoint.format != Format::Safetensors {
            return;
        }
        let Some((name, metadata)) = checkpoint.weight_map() else { return };
        if self.view.map == MapPolicy::Rewrite {
            let catalog = checkpoint.catalog();
            let tensors = catalog.tensors().map(|tensor| tensor.name);
            let text = WeightMap::rewritten(metadata, &set.name, tensors, catalog.data_len());
            shown.push(Shown { name: name.to_owned().into(), content: Content::Text(text.into()) });
        }
    }
}

/// Why sets of the folder are refused, a line each.
fn error_text(proved: &Proved) -> Option<String> {
    let mut text = String::new();
    for set in &proved.sets {
        if let Err(error) = &set.outcome {
            text.push_str(&format!("{} is not shown: {}: {error}\n", set.name, error.class()));
        }
    }
    (!text.is_empty()).then_some(text)
}
