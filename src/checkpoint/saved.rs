//! A proved checkpoint as bytes, for a process that takes over from this one: the files may have
//! been replaced or deleted since, so it cannot be proved again from their names.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::config::with_config_beside;
use super::discover::SetKind;
use super::virtual_file::{Presented, present};
use super::{Checkpoint, Tail};
use crate::index::{Index, SetRecord};
use crate::source::Source;
use crate::view::View;

impl Checkpoint {
    /// Its proved content. `None` if that would be too long, if it is encrypted, or if a view changes
    /// its tensors: the other process may have read other rules under the same name.
    pub fn save(&self) -> Option<Vec<u8>> {
        if self.has_other_tensors() {
            return None;
        }
        let text = |(name, metadata): &(String, _)| {
            (name.clone(), Value::from(serde_json::Map::clone(metadata)).to_string())
        };
        let record = SetRecord {
            name: self.name.clone(),
            kind: self.kind.as_str().to_owned(),
            files: Vec::new(),
            noted: self.tail == Tail::Proven,
            manifest: self.manifest,
            map: self.map.as_ref().map(text),
            virtual_files: Vec::new(),
            catalog: self.proved.clone(),
        };
        // The state of a mount does not hold what a decryptor needs.
        if self.sources.iter().any(|source| source.is_encrypted()) {
            return None;
        }
        let index = Index {
            folder: Vec::new(),
            made: 0,
            files: Vec::new(),
            unusable: Vec::new(),
            weights: Vec::new(),
            notes: Vec::new(),
            sets: vec![record],
        };
        index.encode()
    }

    /// The checkpoint that `save` wrote, in the folder `directory`, with its shards in the
    /// catalog's order. `None` if the bytes come from another version.
    pub fn restore(
        bytes: &[u8],
        directory: &Path,
        sources: Vec<Arc<Source>>,
        view: &View,
    ) -> Option<Arc<Checkpoint>> {
        let mut index = Index::decode(bytes).ok()?;
        let record = index.sets.pop()?;
        let kind = SetKind::from_word(&record.kind)?;
        if record.catalog.shards.len() != sources.len() {
            return None;
        }
        let map = match record.map {
            Some((name, metadata)) => Some((name, serde_json::from_str(&metadata).ok()?)),
            None => None,
        };
        let presented = with_config_beside(directory, |config| {
            present(record.catalog, kind, &record.name, view, config)
        });
        let presented = presented.ok()?;
        let Presented { proved, catalog, files, is_whole_file, config } = presented;
        let checkpoint = Checkpoint {
            name: record.name,
            kind,
            format: view.format,
            directory: directory.to_owned(),
            tail: if record.noted { Tail::Proven } else { Tail::Unproven },
            proved,
            catalog,
            is_whole_file,
            sources,
            files,
            map,
            manifest: record.manifest,
            config,
        };
        Some(Arc::new(checkpoint))
    }
}
