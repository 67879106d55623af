//! A proved checkpoint as bytes, for a process that takes over a mount from this process. The files
//! may have been replaced or deleted in the meantime, so the checkpoint cannot be proved again from
//! their names.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::config::with_config_in;
use super::view_records::record_of;
use super::virtual_file::{ArrangedFile, present, presented_as_recorded};
use super::{Checkpoint, ProvedSet, Tail};
use crate::hash::Digest;
use crate::index::{Index, SetRecord, ViewRecord};
use crate::source::Source;
use crate::store::Store;
use crate::view::View;

impl Checkpoint {
    /// Encodes its proved content, and the tensors and files that its view makes of it. `None` if the bytes would be
    /// too long, or if it is encrypted.
    pub fn save(self: &Arc<Self>) -> Option<Vec<u8>> {
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
        // The state of a mount does not include the keys that a decryptor needs.
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
        let mut bytes = index.encode()?;
        // When the other process opens the checkpoint, the `config.json` that the view read may be gone or changed.
        // So the result of the view is encoded.
        if self.has_other_tensors() {
            let view = ViewRecord { sets: vec![Some(record_of(self)?)] };
            bytes.extend(view.encode(Digest([0; 16]), Digest([0; 16]))?);
        }
        Some(bytes)
    }

    /// Decodes the checkpoint that `save` encoded, in the folder `directory`. `sources` are its
    /// shards in the order of the catalog. `None` if the bytes come from another version of
    /// tensorfs.
    pub fn restore(
        bytes: &[u8],
        directory: &Path,
        sources: Vec<Arc<Source>>,
        view: &View,
    ) -> Option<Arc<Checkpoint>> {
        let (index, viewed) = Index::split(bytes)?;
        let mut index = Index::decode(index).ok()?;
        let viewed = match viewed {
            [] => None,
            viewed => Some(ViewRecord::decode_behind(viewed, &index.sets).ok()?.sets.pop()??),
        };
        let record = index.sets.pop()?;
        let kind = record.kind.parse().ok()?;
        if record.catalog.shards.len() != sources.len() {
            return None;
        }
        let map = match record.map {
            Some((name, metadata)) => Some((name, serde_json::from_str(&metadata).ok()?)),
            None => None,
        };
        let mut presented = match viewed {
            Some(viewed) => presented_as_recorded(&record.catalog, viewed, view)?,
            None => {
                let store = Store::of_sources(&sources, directory);
                with_config_in((&store, directory), |config| {
                    present(record.catalog, kind, &record.name, view, config).ok()
                })?
            }
        };
        // This process makes the layouts itself, so that the caller can compare them with those of the other process.
        presented.files.iter_mut().for_each(|file| *file = ArrangedFile::new(file.spec.clone()));
        let set = ProvedSet {
            name: record.name,
            kind,
            format: view.format,
            directory: directory.to_owned(),
            tail: if record.noted { Tail::Proven } else { Tail::Unproven },
            sources,
            map,
            manifest: record.manifest,
        };
        Some(Arc::new(Checkpoint::new(set, presented)))
    }
}
