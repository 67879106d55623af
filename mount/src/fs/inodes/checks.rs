//! Checks of the folders of a source that is not watched. A request about a folder causes the check
//! of that folder.
//!
//! An unwatched mount keeps the names that it found at its start. Once one of the names of a folder
//! is gone, or a set of the folder is refused, the folder shows the current names of the source, so
//! that files that come back are shown. The check of an unchanged folder costs one stat(2).

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use tensorfs::Error;
use tensorfs::internal::checkpoint::{ERROR_FILE, FolderId, FolderVersion, Tree};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::sync::Mutex;

use super::super::node::Node;
use super::{ASK_INTERVAL, NameEntry, Nodes, Refusal, find, log_refusals};

/// The last check of each folder of one mount.
#[derive(Default)]
pub(super) struct FolderChecks {
    /// The number of the first folder that was found after the start of the mount.
    first_new: FolderId,
    folders: Mutex<HashMap<FolderId, Arc<FolderCheck>>>,
    /// Number of times that a folder was listed again.
    listings: AtomicU64,
}

/// The state of the checks of one folder.
#[derive(Default)]
struct FolderCheck {
    /// Whether the folder shows the current names of the source, and not the names that the mount found at its start.
    follows: AtomicBool,
    /// Version of the folder at the last check, and the time of that check. The lock is held during
    /// a check.
    last: Mutex<Option<(FolderVersion, Instant)>>,
}

impl FolderChecks {
    pub(super) fn of(tree: &Tree) -> FolderChecks {
        let first_new = tree.ids().last().map_or(0, |last| last + 1);
        FolderChecks { first_new, ..FolderChecks::default() }
    }

    fn at(&self, id: FolderId) -> Arc<FolderCheck> {
        self.folders.lock().entry(id).or_default().clone()
    }

    /// Whether the folder was found after the start of the mount.
    pub(super) fn is_new(&self, id: FolderId) -> bool {
        id >= self.first_new
    }

    pub(super) fn forget(&self, id: FolderId) {
        self.folders.lock().remove(&id);
    }

    /// Number of times that a folder was listed again, for `status`.
    pub(super) fn listings(&self) -> u64 {
        self.listings.load(Ordering::Relaxed)
    }
}

impl Nodes {
    /// Finds entries of `folder` that are new, gone or changed. Does nothing if the source is
    /// watched. Accesses the source, which may be slow.
    pub(crate) fn check_family(&self, folder: FolderId) {
        if self.watched.is_some() || !self.tree.contains(folder) {
            return;
        }
        self.tree.folders_to_check(folder).into_iter().for_each(|id| self.check_folder(id));
        let refused = self.listed(folder).and_then(|listed| listed.refused);
        if let Some(refusal) = refused
            && self.may_ask(folder)
            && (refusal == Refusal::Unsettled || self.tree.is_stale(folder))
        {
            self.prove_from_source(folder);
        }
    }

    /// The current entry `name` of the listed folder `folder`. Accesses the source.
    pub(crate) fn current_entry(&self, folder: FolderId, name: &OsStr) -> Option<Arc<Node>> {
        let mut found = self.entry(folder, name);
        let needs_check = match &found {
            NameEntry::Found(node) if node.is_folder() => self.check_child(folder, node.folder()),
            NameEntry::Found(_) => name == ERROR_FILE || self.tree.folder(folder).has_links(),
            NameEntry::Absent | NameEntry::Stale => true,
        };
        // The second `entry` may answer `Absent` only because the next check of a refused set is
        // not due yet.
        let was_stale = matches!(found, NameEntry::Stale);
        if needs_check && self.watched.is_none() {
            self.check_family(folder);
            found = self.entry(folder, name);
        }
        match found {
            NameEntry::Found(node) => Some(node),
            NameEntry::Absent if !was_stale => None,
            NameEntry::Absent | NameEntry::Stale => self.fresh_entry(folder, name),
        }
    }

    /// The entry `name` of `folder` at its last listing: a folder, or `Absent`. `None` if the folder
    /// is not listed, or if the entry is a file, which may have changed.
    pub(crate) fn listed_entry(&self, folder: FolderId, name: &OsStr) -> Option<NameEntry> {
        match find(&*self.listing(folder)?, name) {
            Some(node) if node.is_folder() => Some(NameEntry::Found(node)),
            Some(_) => None,
            None => Some(NameEntry::Absent),
        }
    }

    /// Checks the folder `child`, which `parent` shows. If `child` is gone or was replaced, the
    /// parent is listed again. Returns whether the parent was listed again.
    fn check_child(&self, parent: FolderId, child: FolderId) -> bool {
        let tree = &self.tree;
        if self.watched.is_some() || tree.is_there(child) {
            return false;
        }
        if tree.shows_source(child) {
            self.check_folder(child);
        } else {
            self.checks.at(parent).follows.store(true, Ordering::Relaxed);
            self.list_again(parent);
        }
        true
    }

    fn check_folder(&self, id: FolderId) {
        let tree = &self.tree;
        let check = self.checks.at(id);
        let mut last = check.last.lock();
        let now = tree.version_of(id);
        let folder = tree.folder(id);
        let (path, partial) = (folder.path.clone(), folder.partial);
        let follows = check.follows.load(Ordering::Relaxed) || self.checks.is_new(id);
        let same = last.as_ref().is_some_and(|(then, at)| {
            // The version of a remote folder may not change with every change in it.
            let is_sure = || !partial && (!follows || !tree.store().may_block(&path));
            then.is_settled_as(&now) && (at.elapsed() < ASK_INTERVAL || is_sure())
        });
        // The user's path may lead to another folder by now.
        if same && (now.is_there() || !tree.shows_source(id)) {
            return;
        }
        let first = last.is_none();
        *last = Some((now, Instant::now()));
        if first && !self.checks.is_new(id) && !tree.may_have_changed(&path) {
            return;
        }
        let is_refused = || self.listed(id).is_some_and(|listed| listed.refused.is_some());
        if !follows && !partial && !is_refused() && !tree.has_lost(id) {
            return;
        }
        check.follows.store(true, Ordering::Relaxed);
        self.list_again(id);
    }

    /// Lists a folder of the source again and applies the changes.
    fn list_again(&self, id: FolderId) {
        let tree = &self.tree;
        self.checks.listings.fetch_add(1, Ordering::Relaxed);
        self.follow_given();
        match tree.list_again(&tree.folder(id).path) {
            Ok(change) => {
                for changed in &change.changed {
                    self.checks.at(changed.id).follows.store(true, Ordering::Relaxed);
                }
                self.note_source(id, None);
                self.apply(&change);
            }
            Err(error) => self.take_out_source(id, &error),
        }
    }

    /// Records the outcome of listing the folder `id` again, if that folder is the source. Returns
    /// true if the source cannot be read now but could before.
    pub(crate) fn note_source(&self, id: FolderId, error: Option<&Error>) -> bool {
        // In a hub cache, only the root counts as the source, not the folders of its models.
        let is_source = || !self.tree.options.hub || self.tree.folder(id).path == self.tree.root();
        self.tree.shows_source(id) && is_source() && self.sets.note_source(error)
    }

    /// Removes the entries of folder `id` from the mount, because the source cannot be read.
    fn take_out_source(&self, id: FolderId, error: &Error) {
        if self.note_source(id, Some(error)) {
            tracing::warn!("{error}; the mount shows nothing of it until it is back");
        }
        for (_, child) in &self.tree.folder(id).children {
            if let Ok(change) = self.tree.list_again(&self.tree.folder(*child).path) {
                self.apply(&change);
            }
        }
        if self.tree.is_stale(id) {
            self.prove_from_source(id);
        }
    }

    /// Once the source is gone, follows the user's path to another folder. Returns whether the path
    /// now leads to another folder.
    pub(crate) fn follow_given(&self) -> bool {
        let before = self.tree.source_now();
        let Some(now) = self.tree.follow_given() else { return false };
        let [given, now, before] = [&self.tree.given, &now, &before].map(|path| shown_path(path));
        tracing::warn!("{given}: leads to {now}, and {before} is gone; the mount shows it now");
        true
    }

    /// Scans the files of a family again, and proves the family.
    fn prove_from_source(&self, folder: FolderId) {
        let top = self.tree.family_of(folder);
        let lock = self.family_lock(top);
        let _one_at_a_time = lock.lock();
        self.prove_rescanned(top);
    }

    /// Scans the files of a family again, and proves the family. The caller holds the lock of the
    /// family.
    pub(super) fn prove_rescanned(&self, top: FolderId) {
        self.tree.rescan(top);
        tracing::info!("files have changed in the source; proving them again");
        log_refusals(self.prove(top));
    }
}
