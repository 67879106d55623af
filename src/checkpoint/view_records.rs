//! Records of views, which are files beside an index: reads and writes them.

use std::sync::Arc;

use crate::error::shown_path;
use crate::hash::Digest;
use crate::index::{
    ConfigRecord, IndexStore, PresentedFile, PresentedRecord, SetRecord, ViewRecord,
    VirtualFileRecord,
};
use crate::view::{FileSpec, Files, ReadConfig};

use super::config::with_config_of;
use super::indexed::FolderIndex;
use super::set::Proved;
use super::virtual_file::FileSummary;
use super::{Checkpoint, VirtualFile};

impl FolderIndex<'_> {
    /// The record of the view on `sets`, which are the sets of the index with this checksum. `None`
    /// if there is no record, or if it is out of date.
    pub(super) fn recorded_view(
        &self,
        checksum: Option<Digest>,
        sets: &[SetRecord],
    ) -> Option<ViewRecord> {
        let (name, view) = self.view_name()?;
        let bytes = self.store.read(&name).ok()?;
        let record = ViewRecord::decode(&bytes, checksum?, view, sets).and_then(|record| {
            let mut configs = record.sets.iter().flatten().map(|set| set.config);
            let same = with_config_of(self.folder, self.options(), |read| {
                configs.all(|config| is_config(config, read))
            });
            if same { Ok(record) } else { Err("was made with another config.json") }
        });
        let doubt = |why: &&str| tracing::debug!("{name}: the view is not used: it {why}");
        record.inspect_err(doubt).ok()
    }

    /// Writes a record of the tensors and files that the view makes of the sets of the index with
    /// this checksum. Writes nothing if the view refuses one of the sets.
    pub(super) fn keep_view(&self, checksum: Option<Digest>, proved: &Proved) {
        let Some(((name, view), checksum)) = self.view_name().zip(checksum) else { return };
        let sets = proved.sets.iter().map(|set| {
            let checkpoint = set.outcome.as_ref().ok()?;
            if checkpoint.files.is_empty() { Some(None) } else { record_of(checkpoint).map(Some) }
        });
        let Some(sets) = sets.collect::<Option<Vec<_>>>() else { return };
        let Some(bytes) = (ViewRecord { sets }).encode(checksum, view) else { return };
        if let Err(why) = self.store.write(&name, &bytes) {
            let path = shown_path(&self.store.path(&name));
            tracing::info!("{path}: is not kept: {why}");
        }
    }

    /// File name of the record of the view, and the hash of the view. `None` if the index has all
    /// facts that the view needs.
    fn view_name(&self) -> Option<(String, Digest)> {
        let view = &self.options().view;
        let is_plain =
            view.keeps_tensors() && matches!(view.files, Files::Single | Files::Original);
        let digest = (!is_plain).then(|| view.digest())?;
        Some((IndexStore::view_name(&self.file_name(), digest), digest))
    }
}

/// The record of the tensors and files that a view makes of a set. `None` if one of its files has
/// no layout.
pub(super) fn record_of(checkpoint: &Arc<Checkpoint>) -> Option<PresentedRecord> {
    let file = |file: VirtualFile| {
        let FileSummary { len, header } = file.summary().ok()?;
        let FileSpec { name, tensors, .. } = file.spec();
        Some(PresentedFile {
            name: name.clone(),
            tensors: tensors.as_ref().map(|tensors| tensors.to_vec()),
            file: VirtualFileRecord { spec: file.spec().digest(), len, header },
        })
    };
    Some(PresentedRecord {
        catalog: checkpoint.has_other_tensors().then(|| checkpoint.catalog().clone()),
        files: checkpoint.virtual_files().map(file).collect::<Option<_>>()?,
        config: checkpoint.config,
    })
}

/// Whether a view that read the `config.json` recorded in `config` would read the same text now.
fn is_config(config: ConfigRecord, read: ReadConfig<'_>) -> bool {
    match config {
        ConfigRecord::Unread => true,
        ConfigRecord::Missing => matches!(read(), Ok(None)),
        ConfigRecord::Text(digest) => {
            matches!(read(), Ok(Some(text)) if Digest::of(&text) == digest)
        }
    }
}
