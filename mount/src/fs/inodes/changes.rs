//! Passes changes of a watched source from the tree to the nodes, and from the nodes to the kernel.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tensorfs::internal::checkpoint::{
    Content, FolderId, MountEntry, Proved, Set, Tree, TreeChange,
};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::sync::Mutex;

use super::super::arrival::{self, Arrivals};
use super::super::node::{Node, file_node};
use super::{FolderState, Listed, Listing, Nodes, Positions, Progress, log_refusals};

/// Maximum number of paths in `watch.incomplete` of `status`, which lists the sets that are held
/// back.
const NAMED_MAX: usize = 20;

/// A name or attributes that the kernel has cached and that are out of date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OutdatedFact {
    /// The kernel's entry for this name in the folder with this inode number.
    Name(u64, OsString),
    /// The attributes of this inode.
    Attributes(u64),
}

/// Tells the kernel which of its cached facts are out of date. The function must not wait.
pub(crate) type TellKernel = Box<dyn Fn(OutdatedFact) + Send + Sync>;

/// The additional state of a mount whose source is watched.
pub(super) struct SourceWatch {
    /// How long a set that is not whole counts as still arriving.
    grace: Duration,
    /// Time of the next look at each family in which something is still arriving, by its top
    /// folder.
    due: Mutex<BTreeMap<FolderId, Instant>>,
    /// Called when `due` gets an earlier time.
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
    tell_kernel: OnceLock<TellKernel>,
}

impl SourceWatch {
    pub(super) fn new(grace: Duration) -> SourceWatch {
        SourceWatch {
            grace,
            due: Mutex::default(),
            wake: OnceLock::new(),
            tell_kernel: OnceLock::new(),
        }
    }

    /// Sets the time after which the family of `top` must be looked at again. `None` removes it.
    pub(super) fn set_due(&self, top: FolderId, again: Option<Duration>) {
        let mut due = self.due.lock();
        match again {
            Some(time) => drop(due.insert(top, Instant::now() + time)),
            None => drop(due.remove(&top)),
        }
        drop(due);
        if let (Some(_), Some(wake)) = (again, self.wake.get()) {
            wake();
        }
    }

    pub(super) fn forget(&self, top: FolderId) {
        self.due.lock().remove(&top);
    }

    /// Removes from `proved` the sets that are still arriving, and returns them. `before` is the
    /// previous listing of the folder. If there is no such listing, sets that the previous process
    /// showed (`was_shown`) stay.
    pub(super) fn hold_back(
        &self,
        tree: &Tree,
        id: FolderId,
        proved: &mut Proved,
        before: Option<&Listed>,
        was_shown: &dyn Fn(&MountEntry) -> bool,
    ) -> (Arrivals, Vec<Set>) {
        let marks = before.map_or(&[][..], |before| &before.marks);
        let mut arrivals = arrival::judge(tree, id, &proved.sets, marks, self.grace);
        if before.is_none() && !arrivals.held.is_empty() {
            let mut shown = tree.entries(id, proved);
            shown.retain(|entry| was_shown(entry));
            let was_shown = |name: &str| {
                let set = proved.sets.iter().find(|set| set.name == name);
                set.is_some_and(|set| shown.iter().any(|entry| is_of_set(tree, id, set, entry)))
            };
            arrivals.show(was_shown);
        }
        let folder = &tree.folder(id).relative;
        for name in &arrivals.held {
            let known = before.is_some_and(|before| before.held.contains(name));
            if !known {
                let path = shown_path(&folder.join(name));
                tracing::info!("{path}: on its way; it is shown once it is whole");
            }
        }
        let held = proved.sets.extract_if(.., |set| arrivals.held.contains(&set.name)).collect();
        (arrivals, held)
    }

    /// Removes from `shown` the plain files that are still arriving. Returns the time until the
    /// next look. Files in the listing `before` stay. If there is no such listing, files that the
    /// previous process showed (`was_shown`) stay.
    pub(super) fn hold_back_plain(
        &self,
        shown: &mut Vec<MountEntry>,
        before: Option<&Listed>,
        was_shown: &dyn Fn(&MountEntry) -> bool,
    ) -> Option<Duration> {
        let mut again: Option<Duration> = None;
        shown.retain(|entry| {
            if !matches!(entry.content, Content::Whole { proved: None, .. }) {
                return true;
            }
            let known = before.and_then(|before| super::find(&before.entries, &entry.name));
            if arrival::is_unfinished(&entry.name) {
                return false;
            }
            if known.is_some() {
                return true;
            }
            let held_for = arrival::plain_held_for(entry, self.grace);
            let time = held_for.filter(|_| before.is_some() || !was_shown(entry));
            again = again.into_iter().chain(time).min();
            time.is_none()
        });
        again
    }

    /// Tells the kernel which names differ between two listings of the folder `node`.
    pub(super) fn tell_kernel(&self, node: &Node, before: &Listing, now: &Listing) {
        let Some(tell) = self.tell_kernel.get() else { return };
        let names = differences(before, now);
        if names.is_empty() && before.len() == now.len() {
            return;
        }
        for name in names {
            tell(OutdatedFact::Name(node.ino, name));
        }
        tell(OutdatedFact::Attributes(node.ino));
    }
}

/// Whether an entry of folder `id` has bytes of a file of `set`.
fn is_of_set(tree: &Tree, id: FolderId, set: &Set, entry: &MountEntry) -> bool {
    let folder = tree.folder(id);
    let mut files = set.files.iter().filter_map(|name| folder.file(name));
    files.any(|file| entry.content.sources().iter().any(|source| source.version() == file.version))
}

/// The names in the listing `before` that have another node, or no node, in the listing `now`.
fn differences(before: &Listing, now: &Listing) -> Vec<OsString> {
    let differs = |(name, node): &&(OsString, Arc<Node>)| {
        super::find(now, name).is_none_or(|found| found.ino != node.ino)
    };
    before.iter().filter(differs).map(|(name, _)| name.clone()).collect()
}

/// The positions of the entries `now`. Names of the listing `before` keep their positions, and new
/// names follow after all others.
pub(super) fn positions(before: Option<&Listed>, now: &Listing) -> Positions {
    let mut known: HashMap<&OsStr, u64> = HashMap::new();
    for (position, index) in before.iter().flat_map(|before| before.positions.iter()) {
        let name = before.and_then(|before| before.entries.get(*index));
        known.extend(name.map(|(name, _)| (name.as_os_str(), *position)));
    }
    let mut last = known.values().max().copied().unwrap_or_default();
    let mut positions: Positions = now
        .iter()
        .enumerate()
        .map(|(index, (name, _))| {
            let known = known.get(name.as_os_str()).copied();
            let position = known.unwrap_or_else(|| {
                last += 1;
                last
            });
            (position, index)
        })
        .collect();
    positions.sort_unstable();
    positions
}

impl Nodes {
    /// Sets the functions that are called for changes: `tell_kernel` for changed names, and `wake`
    /// when `next_due` may have become earlier.
    pub(crate) fn set_watcher(
        &self,
        tell_kernel: TellKernel,
        wake: impl Fn() + Send + Sync + 'static,
    ) {
        if let Some(watched) = &self.watched {
            let _ = watched.tell_kernel.set(tell_kernel);
            let _ = watched.wake.set(Box::new(wake));
        }
    }

    /// Time of the next look at something that is still arriving.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.watched.as_ref()?.due.lock().values().min().copied()
    }

    /// Paths of the sets that are still arriving, for `status`.
    pub(crate) fn incomplete(&self) -> Vec<String> {
        let Some(watched) = &self.watched else { return Vec::new() };
        let tops: Vec<FolderId> = watched.due.lock().keys().copied().collect();
        let members = tops.into_iter().flat_map(|top| self.tree.family(top));
        let held = members.filter_map(|id| Some((id, self.listed(id)?.held)));
        let names = held.flat_map(|(id, held)| {
            let folder = self.tree.folder(id).relative.clone();
            held.iter().map(|name| shown_path(&folder.join(name))).collect::<Vec<_>>()
        });
        names.take(NAMED_MAX).collect()
    }

    /// Removes and returns the families whose next look is due.
    pub(crate) fn take_due(&self) -> Vec<FolderId> {
        let Some(watched) = &self.watched else { return Vec::new() };
        let (mut due, now) = (watched.due.lock(), Instant::now());
        let tops: Vec<FolderId> =
            due.iter().filter(|(_, time)| **time <= now).map(|(top, _)| *top).collect();
        due.retain(|_, time| *time > now);
        tops
    }

    /// Applies a change of the tree to the nodes. The cost grows with the families of the changed
    /// folders. Returns the top folders of the families that were proved again.
    pub(crate) fn apply(&self, change: &TreeChange) -> BTreeSet<FolderId> {
        for &id in &change.removed {
            self.forget_folder(id);
        }
        let tree = self.tree();
        let (mut tops, mut plain) = (BTreeSet::new(), Vec::new());
        for changed in &change.changed {
            let id = changed.id;
            // The blobs of a hub model show the files that its snapshots do not show. So a change
            // of a snapshot changes the listing of the blobs.
            let model = arrival::hub_model(&tree, id).map(|model| tree.folder(model));
            let children = model.iter().flat_map(|model| &model.children);
            let blobs: Vec<FolderId> =
                children.filter(|(name, _)| name == "blobs").map(|&(_, blobs)| blobs).collect();
            if changed.folders || changed.weights || blobs.contains(&id) {
                tops.insert(tree.family_of(id));
                tops.extend(blobs);
            } else {
                plain.push(changed);
            }
        }
        tops.retain(|&top| self.prove_again(top));
        for changed in plain {
            let top = tree.family_of(changed.id);
            if tops.contains(&top) || !self.update_plain(top, changed.id, &changed.plain) {
                continue;
            }
        }
        tops
    }

    /// Proves the family of `top` again if a request has asked for it before. Returns whether the
    /// family was proved again.
    pub(crate) fn prove_again(&self, top: FolderId) -> bool {
        let progress = self.progress.lock();
        if matches!(progress.get(&top), None | Some(Progress::Unproved)) {
            return false;
        }
        drop(progress);
        let lock = self.family_lock(top);
        let _one_at_a_time = lock.lock();
        log_refusals(self.prove(top));
        true
    }

    /// Applies changes of the plain files `names` to folder `id`. Returns whether the folder is
    /// listed.
    fn update_plain(&self, top: FolderId, id: FolderId, names: &[OsString]) -> bool {
        let lock = self.family_lock(top);
        let _one_at_a_time = lock.lock();
        loop {
            let Some(listed) = self.listed(id) else { return false };
            if self.update_plain_of(&listed, top, id, names) {
                return true;
            }
        }
    }

    /// Applies changes of plain files to the entries `listed`. Returns false if another thread has
    /// replaced the listing in the meantime, which `renew` does for an outdated name.
    fn update_plain_of(
        &self,
        listed: &Listed,
        top: FolderId,
        id: FolderId,
        names: &[OsString],
    ) -> bool {
        let tree = self.tree();
        let folder = tree.folder(id);
        let is_plain =
            |name: &OsStr| name.to_str().is_none_or(|name| !listed.weights.contains(name));
        let files = folder.files.iter().filter(|file| names.contains(&file.name));
        let mut shown: Vec<MountEntry> = files
            .filter(|file| is_plain(&file.name))
            .map(|file| MountEntry {
                name: file.name.clone(),
                content: Content::Whole { file: file.clone(), proved: None },
            })
            .collect();
        if let Some(watched) = &self.watched
            && let Some(again) = watched.hold_back_plain(&mut shown, Some(listed), &|_| false)
        {
            watched.set_due(top, Some(again));
        }
        let mut by_name: BTreeMap<OsString, Arc<Node>> = listed.entries.iter().cloned().collect();
        let (mut old, mut added) = (Vec::new(), Vec::new());
        for name in names {
            if by_name.get(name).is_some_and(|node| node.follows()) {
                old.extend(by_name.remove_entry(name));
            }
        }
        for entry in shown {
            if by_name.contains_key(&entry.name) {
                continue;
            }
            let version = match &entry.content {
                Content::Whole { file, .. } => Some(file.version),
                _ => None,
            };
            let name = entry.name.clone();
            let node = self.registered(file_node(&tree, id, None, entry));
            version.inspect(|now| node.set_attributes(now));
            added.push((name.clone(), node.clone()));
            by_name.insert(name, node);
        }
        let entries: Arc<Listing> = Arc::new(by_name.into_iter().collect());
        let taken = |state: &mut FolderState| {
            let now = state.listed.as_mut()?;
            if !Arc::ptr_eq(&now.entries, &listed.entries) {
                return None;
            }
            now.positions = Arc::new(positions(Some(now), &entries));
            now.entries = entries.clone();
            state.node.set_mtime(folder.newest());
            Some(state.node.clone())
        };
        let node = self.folders.write().get_mut(&id).and_then(taken);
        let Some(node) = node else {
            self.unlist(&added);
            return false;
        };
        self.unlist(&old);
        if let Some(watched) = &self.watched {
            watched.tell_kernel(&node, &listed.entries, &entries);
        }
        true
    }
}
