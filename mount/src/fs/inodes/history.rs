//! Sets that a mount refuses because of the sets that it has shown before, and sets that are gone.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use tensorfs::internal::checkpoint::{FolderId, Proved, Set, Tail, Tree};
use tensorfs::internal::error::real_name;
use tensorfs::{Error, ErrorKind};

use super::super::arrival;
use super::super::sets::SetsStatus;
use super::{Listed, Nodes};

/// The use of the index, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct IndexStatus {
    /// Path of the folder with the index.
    pub folder: Option<String>,
    pub sets_from_index: u64,
    pub sets_from_headers: u64,
}

impl Nodes {
    /// The sets that are shown, refused or gone, for `tensorfs status`. Does not access the source.
    pub(crate) fn sets_status(&self) -> SetsStatus {
        SetsStatus { looks: self.checks.listings(), ..self.sets.status() }
    }

    /// The number of sets that came from an index, for `tensorfs status`.
    pub(crate) fn index_status(&self) -> IndexStatus {
        let [index, headers] = &self.indexed;
        IndexStatus {
            folder: self.tree().options.index.as_deref().map(real_name),
            sets_from_index: index.load(Ordering::Relaxed),
            sets_from_headers: headers.load(Ordering::Relaxed),
        }
    }

    /// The reason why a checkpoint at or below `path` is not shown. `None` if any checkpoint there
    /// is shown, or if programs that read the source itself would find out the reason. Accesses the
    /// source.
    pub(crate) fn missing(&self, path: &Path) -> Option<String> {
        let why = self.sets.missing(path)?;
        let source = self.tree.source_now();
        let away = self.tree.source_error().map(|e| Error::io(&source, "read", e).to_string());
        Some(away.unwrap_or(why))
    }

    /// Refuses the sets that contradict what the mount has shown before. Returns their names.
    pub(super) fn refuse_by_history(
        &self,
        tree: &Tree,
        id: FolderId,
        before: Option<&Listed>,
        sets: &mut [Set],
    ) -> BTreeSet<String> {
        let mut held = BTreeSet::new();
        for set in sets.iter_mut().filter(|set| set.outcome.is_ok()) {
            let is_new = match before {
                Some(before) => !before.shown.contains(&set.name),
                None => self.checks.is_new(id),
            };
            if is_new && self.watched.is_none() {
                self.refuse_arriving(tree, id, set);
            }
            self.refuse_fewer_shards(tree, id, set);
            if set.outcome.is_err() {
                held.insert(set.name.clone());
            }
        }
        held
    }

    /// Refuses a set that appeared after the start of the mount and may not be whole yet.
    fn refuse_arriving(&self, tree: &Tree, id: FolderId, set: &mut Set) {
        let Ok(checkpoint) = &set.outcome else { return };
        let folder = tree.folder(id);
        let now = checkpoint.catalog().shards.len();
        let proved = self.shards_proved.lock();
        let before = proved.get(&folder.relative).and_then(|sets| sets.get(&set.name)).copied();
        drop(proved);
        // `refuse_fewer_shards` handles a set with fewer shards.
        let is_known = before.is_some_and(|before| now <= before);
        if let Some(why) = arrival::why_arriving(&folder, set, checkpoint, is_known) {
            set.outcome = Err(Error::changed(&folder.path, why));
        }
    }

    /// Refuses a set that has fewer shards than this mount has proved before, if the shards
    /// themselves cannot show that a shard is missing.
    fn refuse_fewer_shards(&self, tree: &Tree, folder: FolderId, set: &mut Set) {
        let Ok(checkpoint) = &set.outcome else { return };
        // Recorded shapes show that pieces of a tensor are missing, but not that a whole tensor is
        // missing.
        if checkpoint.tail != Tail::Unproven && !checkpoint.catalog().shapes_recorded {
            return;
        }
        let now = checkpoint.catalog().shards.len();
        let mut proved = self.shards_proved.lock();
        let relative = tree.folder(folder).relative.clone();
        let before = proved.entry(relative).or_default().entry(set.name.clone()).or_insert(now);
        if now >= *before {
            *before = now;
            return;
        }
        let message = format!(
            "has {now} shard files, it had {before} before: whether the rest is the whole \
             checkpoint cannot be seen; put the others back, or mount again"
        );
        let fault = ErrorKind::ShardMissing.fault(message);
        set.outcome = Err(Error::refused(&tree.folder(folder).path, fault));
    }

    /// Forgets the number of shards of each set that is completely gone from the folder.
    pub(super) fn forget_shards(&self, tree: &Tree, id: FolderId, folder: &Proved) {
        if let Some(sets) = self.shards_proved.lock().get_mut(&tree.folder(id).relative) {
            sets.retain(|name, _| folder.sets.iter().any(|set| set.name == *name));
        }
    }
}
