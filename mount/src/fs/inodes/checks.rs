//! Checks of the folders of a source that is not watched, each at a request about the folder.
//!
//! Such a mount keeps the names that it found at its start. Once one of them is away, or a set is
//! refused, the names of this folder are those of the source, so that what comes back is shown. A
//! check of a folder that has not changed costs one stat(2).

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

/// The last check for changes of each folder of one mount.
#[derive(Default)]
pub(super) struct FolderChecks {
    /// The number of the first folder that came after the start.
    first_new: FolderId,
    folders: Mutex<HashMap<FolderId, Arc<FolderCheck>>>,
    /// Folders that were listed again.
    listings: AtomicU64,
}

/// The facts about one folder.
#[derive(Default)]
struct FolderCheck {
    /// Whether its names are those of the source, not those of the start.
    follows: AtomicBool,
    /// Its version at the last check, and the time of that. Held during a check.
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

    /// Whether the folder came after the start.
    pub(super) fn is_new(&self, id: FolderId) -> bool {
        id >= self.first_new
    }

    pub(super) fn forget(&self, id: FolderId) {
        self.folders.lock().remove(&id);
    }

    /// Folders that were listed again, for `status`.
    pub(super) fn listings(&self) -> u64 {
        self.listings.load(Ordering::Relaxed)
    }
}

impl Nodes {
    /// Finds out what has come, gone or changed in `folder`, unless the source is watched. Accesses
    /// the source, which may be slow.
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

    /// The entry `name` of `folder`, which is listed, as it is now. Accesses the source.
    pub(crate) fn current_entry(&self, folder: FolderId, name: &OsStr) -> Option<Arc<Node>> {
        let mut found = self.entry(folder, name);
        let needs_check = match &found {
            NameEntry::Found(node) if node.is_folder() => self.check_child(folder, node.folder()),
            NameEntry::Found(_) => name == ERROR_FILE || self.tree.folder(folder).has_links(),
            NameEntry::Absent | NameEntry::Stale => true,
        };
        // The next answer may be that it is too early to ask again whether a refused set is whole.
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

    /// The entry `name` of `folder` as it was listed: a folder, or no entry. `None` if the folder is
    /// not listed, or the entry is a file, which may have changed.
    pub(crate) fn listed_entry(&self, folder: FolderId, name: &OsStr) -> Option<NameEntry> {
        match find(&*self.listing(folder)?, name) {
            Some(node) if node.is_folder() => Some(NameEntry::Found(node)),
            Some(_) => None,
            None => Some(NameEntry::Absent),
        }
    }

    /// Whether the folder `child`, which `parent` shows, is gone or another one, so that a check of
    /// the parent finds out more.
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
            // Others may not tell of each change.
            let is_sure = || !partial && (!follows || !tree.store().may_block(&path));
            then.is_settled_as(&now) && (at.elapsed() < ASK_INTERVAL || is_sure())
        });
        // The path of the user may lead elsewhere by now.
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

    /// Lists a folder of the source again, and takes over what has changed.
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

    /// Takes the outcome of listing the folder `id` again, if it is the source. Returns whether the source
    /// could be read before, and cannot now.
    pub(crate) fn note_source(&self, id: FolderId, error: Option<&Error>) -> bool {
        // Models of a hub cache stay as the source does.
        let is_source = || !self.tree.options.hub || self.tree.folder(id).path == self.tree.root();
        self.tree.shows_source(id) && is_source() && self.sets.note_source(error)
    }

    /// Shows nothing of the source at `id`, which cannot be read.
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

    /// Follows the path of the user to another folder once the source is gone. Returns whether it
    /// leads to one.
    pub(crate) fn follow_given(&self) -> bool {
        let before = self.tree.source_now();
        let Some(now) = self.tree.follow_given() else { return false };
        let [given, now, before] = [&self.tree.given, &now, &before].map(|path| shown_path(path));
        tracing::warn!("{given}: leads to {now}, and {before} is gone; the mount shows it now");
        true
    }

    /// Examines the files of a family again, and proves it.
    fn prove_from_source(&self, folder: FolderId) {
        let top = self.tree.family_of(folder);
        let lock = self.family_lock(top);
        let _one_at_a_time = lock.lock();
        self.prove_rescanned(top);
    }

    /// As `prove_from_source`, for a caller that has the lock of the family.
    pub(super) fn prove_rescanned(&self, top: FolderId) {
        self.tree.rescan(top);
        tracing::info!("files have changed in the source; proving them again");
        log_refusals(self.prove(top));
    }
}
