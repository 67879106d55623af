//! The inodes of a mount: folders, files, their attributes and their open files.
//!
//! This module is independent of FUSE: `adapter` translates between the two. An inode number
//! identifies a path and a version of its content. A file that is replaced in the source gets a new
//! number, and programs that have the old file open keep the old number. A family is a folder and
//! those of its subfolders whose checkpoints are proved together with its own checkpoints.

mod changes;
mod checks;
mod history;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensorfs::Error;
use tensorfs::internal::checkpoint::{Content, ERROR_FILE, FolderId, MountEntry, Set, Tree};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::sync::{Mutex, RwLock};

pub(crate) use changes::{OutdatedFact, TellKernel};
pub(crate) use history::IndexStatus;

use super::arrival::{Arrivals, Mark, is_unfinished};
use super::node::{Node, file_node, folder_node, renumbered, reversioned, same_file, same_place};
pub(crate) use super::sets::SetOutcome;
use super::sets::SetStates;
use super::sharing::Sharing;
use super::tails::Tails;
use super::verify_policy::{self, ChecksumGates};
use crate::serve::blocking::{BlockingPool, guarded};
use carried::FileMarks;

mod access;
pub(super) mod carried;

/// The entries of a folder, by name.
pub(crate) type Listing = Vec<(OsString, Arc<Node>)>;

/// The readdir position of each entry of a folder, with the index of the entry. An entry keeps its position when
/// other entries are added or removed, so that a reader of the folder misses none.
pub(crate) type Positions = Vec<(u64, usize)>;

/// The entries of a folder.
#[derive(Clone, Debug)]
struct Listed {
    entries: Arc<Listing>,
    positions: Arc<Positions>,
    /// Why sets of the folder are refused. `None` if no set is refused.
    refused: Option<Refusal>,
    /// Time of the last check for refused sets that have become whole.
    asked: Instant,
    /// Names of the sets that are shown.
    shown: Arc<BTreeSet<String>>,
    /// Names of weight files that the folder shows only as part of a set.
    weights: Arc<BTreeSet<String>>,
    /// The state of each set at the last look, and in `held` the names of the sets that are still
    /// arriving.
    marks: Arc<[Mark]>,
    held: Arc<[String]>,
}

/// A folder of the tree.
struct FolderState {
    node: Arc<Node>,
    /// The entries. `None` until the folder is proved.
    listed: Option<Listed>,
}

/// Why sets of a folder are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// The files do not form a valid checkpoint.
    Proved,
    /// A file changed or could not be read during the proof.
    Unsettled,
}

impl Refusal {
    fn of(sets: &[Set]) -> Option<Refusal> {
        let errors = || sets.iter().filter_map(|set| set.outcome.as_ref().err());
        let unsettled = |error: &Error| matches!(error, Error::Changed { .. } | Error::Io { .. });
        let refusal = if errors().any(unsettled) { Refusal::Unsettled } else { Refusal::Proved };
        errors().next().map(|_| refusal)
    }
}

/// A request that waits for a folder to be listed.
type Waiter = Box<dyn FnOnce(&Nodes) + Send>;

/// The state of the proof of a family of folders.
enum Progress {
    Unproved,
    Proving(Vec<Waiter>),
    Proved,
}

/// A running proof of a family. After a panic, or if no thread could start, the proof has no
/// outcome. Then the waiters are dropped, their requests get EIO, and the next request starts a new
/// proof.
struct Proving {
    nodes: Arc<Nodes>,
    top: FolderId,
    ended: bool,
}

impl Proving {
    /// Notes that the proof has an outcome, so that the drop does nothing.
    fn end(&mut self) {
        self.ended = true;
    }
}

impl Drop for Proving {
    fn drop(&mut self) {
        // Only a proof without an outcome is reset. After an outcome, the folder may be forgotten, and other
        // requests may have begun a new proof.
        if self.ended {
            return;
        }
        let mut progress = self.nodes.progress.lock();
        let Some(state @ Progress::Proving(_)) = progress.get_mut(&self.top) else { return };
        let waiters = std::mem::replace(state, Progress::Unproved);
        drop(progress);
        drop(waiters);
    }
}

/// The result of a lookup of a name in a folder.
#[derive(Debug)]
pub(crate) enum NameEntry {
    /// The node with this name.
    Found(Arc<Node>),
    /// No node has this name.
    Absent,
    /// The node with this name was replaced in the source since it was proved.
    Stale,
}

/// All nodes of a mount.
pub(crate) struct Nodes {
    tree: Arc<Tree>,
    /// One lock for each family, by its top folder. A thread holds the lock while it proves the family.
    refresh: Mutex<HashMap<FolderId, Arc<Mutex<()>>>>,
    by_ino: RwLock<HashMap<u64, Arc<Node>>>,
    /// The folders that a request has asked for.
    folders: RwLock<HashMap<FolderId, FolderState>>,
    /// Number of shards of each set whose tail is unproven or whose headers record the shapes of
    /// whole tensors. The keys are the path of the folder and the name of the set, so that an
    /// unwatched mount still finds the number after a folder was removed and has come back at its
    /// path.
    shards_proved: Mutex<HashMap<PathBuf, HashMap<String, usize>>>,
    /// Whether the last pieces of each shown set are proved.
    tails: Tails,
    /// The state of each set.
    sets: SetStates,
    /// The state of the proof of each family, by its top folder.
    progress: Mutex<HashMap<FolderId, Progress>>,
    /// Number of sets that came from an index, and number of sets whose headers were read.
    indexed: [AtomicU64; 2],
    /// Whether weights are compared with checksums when they are read.
    checked: bool,
    /// The owner of the mount, and the rules of `access=`.
    sharing: Arc<Sharing>,
    /// Facts about files that the previous process served.
    marks: FileMarks,
    /// The state of the watch, if changes of the source are followed.
    watched: Option<changes::SourceWatch>,
    /// The last checks of folders, for a source that is not watched.
    checks: checks::FolderChecks,
}

/// Minimum time between two checks for refused sets that have become whole.
const ASK_INTERVAL: Duration = Duration::from_millis(500);

impl Nodes {
    /// The nodes of `tree`, with nothing proved yet. `checked` says whether weights are compared
    /// with checksums when they are read. `grace` is `None` if changes of the source are not
    /// followed. Otherwise, it is the time after which a set that is not whole counts as broken.
    pub(crate) fn new(
        tree: Tree,
        checked: bool,
        grace: Option<Duration>,
        sharing: Sharing,
    ) -> Nodes {
        let checks = checks::FolderChecks::of(&tree);
        let nodes = Nodes {
            tree: Arc::new(tree),
            refresh: Mutex::default(),
            by_ino: RwLock::default(),
            folders: RwLock::default(),
            shards_proved: Mutex::default(),
            tails: Tails::default(),
            sets: SetStates::default(),
            progress: Mutex::new(HashMap::new()),
            indexed: Default::default(),
            checked,
            sharing: Arc::new(sharing),
            marks: FileMarks::default(),
            watched: grace.map(changes::SourceWatch::new),
            checks,
        };
        nodes.log_idle_rules();
        // The kernel knows the root folder without a lookup.
        nodes.folder(0);
        nodes
    }

    /// The folders and files of the source. A folder is replaced in the tree when it is scanned again.
    pub(crate) fn tree(&self) -> Arc<Tree> {
        self.tree.clone()
    }

    /// The node of this inode number.
    pub(crate) fn node(&self, ino: u64) -> Option<Arc<Node>> {
        self.by_ino.read().get(&ino).cloned()
    }

    /// The node of a folder, `None` if the folder is gone.
    pub(crate) fn folder(&self, id: FolderId) -> Option<Arc<Node>> {
        if let Some(known) = self.folders.read().get(&id) {
            return Some(known.node.clone());
        }
        if !self.tree.contains(id) {
            return None;
        }
        let mut folders = self.folders.write();
        let known = folders.entry(id).or_insert_with(|| {
            let node = self.registered_folder(folder_node(&self.tree, id));
            FolderState { node, listed: None }
        });
        let node = known.node.clone();
        drop(folders);
        // The folder may have left the tree between the check above and its insertion. Then
        // `forget_folder` ran before the insertion, so it is forgotten here.
        if !self.tree.contains(id) {
            self.forget_folder(id);
        }
        Some(node)
    }

    /// The entries of `folder`. `None` until it is listed.
    pub(crate) fn listing(&self, folder: FolderId) -> Option<Arc<Listing>> {
        self.listed(folder).map(|listed| listed.entries)
    }

    /// The entries of `folder` and their positions. `None` until it is listed.
    pub(crate) fn positions(&self, folder: FolderId) -> Option<(Arc<Listing>, Arc<Positions>)> {
        self.listed(folder).map(|listed| (listed.entries, listed.positions))
    }

    fn listed(&self, folder: FolderId) -> Option<Listed> {
        self.folders.read().get(&folder)?.listed.clone()
    }

    /// Calls `then` once `folder` is listed. If it is listed already, the calling thread calls
    /// `then`. Otherwise the thread that proves the folder calls `then`, so that a slow proof does
    /// not block other requests.
    pub(crate) fn when_listed(
        self: &Arc<Self>,
        pool: &BlockingPool,
        folder: FolderId,
        then: impl FnOnce(&Nodes) + Send + 'static,
    ) {
        if self.listing(folder).is_some() {
            return then(self);
        }
        let top = self.tree().family_of(folder);
        let mut progress = self.progress.lock();
        match progress.entry(top).or_insert(Progress::Unproved) {
            Progress::Proved => {
                drop(progress);
                then(self);
            }
            Progress::Proving(waiters) => waiters.push(Box::new(then)),
            state @ Progress::Unproved => {
                *state = Progress::Proving(vec![Box::new(then)]);
                drop(progress);
                let mut proving = Proving { nodes: self.clone(), top, ended: false };
                let place = self.tree.folder(top).relative.clone();
                pool.spawn_detached(&place, move || {
                    let lock = proving.nodes.family_lock(top);
                    let _one_at_a_time = lock.lock();
                    log_refusals(proving.nodes.prove(proving.top));
                    proving.end();
                });
            }
        }
    }

    /// Proves a family, lists its folders, and then calls all waiters. Returns the outcome of each set.
    pub(crate) fn prove(&self, top: FolderId) -> Vec<SetOutcome> {
        let tree = self.tree();
        let _span = tracing::debug_span!("prove", folder = ?tree.folder(top).relative).entered();
        let mut outcomes = Vec::new();
        let mut family = Vec::new();
        for (id, mut folder) in tree.prove(top) {
            let before = self.listed(id);
            let held = self.refuse_by_history(&tree, id, before.as_ref(), &mut folder.sets);
            for note in &folder.notes {
                tracing::warn!("{}: {note}", shown_path(&tree.folder(id).path));
            }
            let origin = &self.indexed[usize::from(!folder.from_index())];
            origin.fetch_add(folder.sets.len() as u64, Ordering::Relaxed);
            let mut arrivals = Arrivals::default();
            let was_shown =
                |entry: &MountEntry| self.marks.has(|| file_node(&tree, id, None, entry.clone()));
            if let Some(watched) = &self.watched {
                self.forget_shards(&tree, id, &folder);
                let before = before.as_ref();
                let held;
                (arrivals, held) = watched.hold_back(&tree, id, &mut folder, before, &was_shown);
                let path = &tree.folder(id).path;
                outcomes.extend(held.into_iter().map(|set| SetOutcome::held(path, set)));
            }
            let gates = self.checked.then(|| verify_policy::admit(&tree, id, &mut folder));
            self.sets.note(&tree.folder(id).relative, &folder.sets, &held);
            let mut shown = tree.entries(id, &folder);
            if let Some(watched) = &self.watched {
                let plain = watched.hold_back_plain(&mut shown, before.as_ref(), &was_shown);
                arrivals.again = arrivals.again.into_iter().chain(plain).min();
            }
            family.push((id, folder, shown, gates, arrivals));
        }
        let again = family.iter().filter_map(|(.., arrivals)| arrivals.again).min();
        let emptied =
            tree.emptied(family.iter().map(|(id, folder, shown, ..)| (*id, folder, shown.len())));
        for (id, folder, shown, gates, arrivals) in family {
            self.tails.note(&tree, id, &folder);
            let listed = Listed {
                entries: Arc::default(),
                positions: Arc::default(),
                refused: Refusal::of(&folder.sets),
                asked: Instant::now(),
                shown: Arc::new(names_of_shown(&folder.sets)),
                weights: Arc::new(folder.weights),
                marks: arrivals.marks.into(),
                held: arrivals.held.into(),
            };
            self.list(&tree, id, shown, gates.as_ref(), &emptied, listed);
            for set in folder.sets {
                let outcome = set.outcome.map(|checkpoint| checkpoint.release_files());
                outcomes.push(SetOutcome { name: set.name, outcome, on_its_way: false });
            }
        }
        if let Some(watched) = &self.watched {
            watched.set_due(top, again);
        }
        let waiters = self.progress.lock().insert(top, Progress::Proved);
        if !tree.contains(top) {
            self.forget_folder(top);
        }
        if let Some(Progress::Proving(waiters)) = waiters {
            waiters.into_iter().for_each(|then| then(self));
        }
        outcomes
    }

    /// The lock that a thread holds while it proves the family of `top`.
    pub(super) fn family_lock(&self, top: FolderId) -> Arc<Mutex<()>> {
        self.refresh.lock().entry(top).or_default().clone()
    }

    /// Makes the indexes of all families in the background, so that the first access to a folder finds its index.
    pub(crate) fn index_rest(self: &Arc<Self>) {
        let tree = self.tree();
        let mut tops = tree.families();
        // Several links may lead to the same folder, which has only one index.
        let mut seen = HashSet::new();
        tops.retain(|&top| seen.insert(tree.folder(top).path.clone()));
        if self.tree().options.index.is_none() || tops.len() < 2 {
            return;
        }
        let nodes = Arc::downgrade(self);
        let index = move || {
            for top in tops {
                let Some(nodes) = nodes.upgrade() else { return };
                let listed = nodes.listing(top).is_some();
                let tree = nodes.tree();
                drop(nodes);
                // Only the index is kept. The proof is dropped, so that memory does not grow with each model.
                if !listed {
                    guarded(|| drop(tree.prove(top)));
                }
            }
        };
        if let Err(e) = std::thread::Builder::new().name("index".to_owned()).spawn(index) {
            tracing::warn!("no index is made in the background: {e}");
        }
    }

    /// Whether the last pieces of each shown set are proved.
    pub(crate) fn tails(&self) -> &Tails {
        &self.tails
    }

    /// Makes the nodes of the entries of `folder`, without its subfolders in `emptied`. Unchanged files keep their
    /// nodes.
    fn list(
        &self,
        tree: &Tree,
        folder: FolderId,
        shown: Vec<MountEntry>,
        gates: Option<&ChecksumGates>,
        emptied: &HashSet<FolderId>,
        listed: Listed,
    ) {
        let gate = |file: &MountEntry| gates.and_then(|gates| gates.get(&file.name)).cloned();
        let made: Vec<(OsString, Arc<Node>)> = shown
            .into_iter()
            .filter(|file| gates.is_none_or(|gates| verify_policy::may_show(file, gates)))
            .map(|file| (file.name.clone(), file_node(tree, folder, gate(&file), file)))
            .collect();
        let mut listing: Listing =
            made.into_iter().map(|(name, node)| (name, self.registered(node))).collect();
        let found = tree.folder(folder);
        let unfinished = |name: &OsStr| self.watched.is_some() && is_unfinished(name);
        let finished = found.children.iter().filter(|(name, _)| !unfinished(name));
        for (name, child) in finished.filter(|(_, child)| !emptied.contains(child)) {
            listing.extend(self.folder(*child).map(|node| (name.clone(), node)));
        }
        listing.iter().filter(|(_, node)| node.is_folder()).for_each(|(_, node)| {
            self.access_of(node);
        });
        listing.sort_by(|a, b| a.0.cmp(&b.0));
        let mut hidden = Vec::new();
        listing.dedup_by(|a, b| {
            let same = a.0 == b.0;
            if same {
                let name = shown_path(a.0.as_ref());
                tracing::warn!("{name}: a file and a folder of this name; one is hidden");
                hidden.push(a.clone());
            }
            same
        });
        self.unlist(&hidden);
        let entries = Arc::new(listing);
        let listed = Listed { entries: entries.clone(), ..listed };
        let node = self.folder(folder);
        let mut folders = self.folders.write();
        let before = match folders.get_mut(&folder).filter(|_| node.is_some()) {
            Some(state) => {
                state.node.set_mtime(found.newest());
                let positions = Arc::new(changes::positions(state.listed.as_ref(), &entries));
                state.listed.replace(Listed { positions, ..listed })
            }
            // The folder was removed in the meantime.
            None => Some(listed),
        };
        drop(folders);
        if let (Some(watched), Some(node), Some(before)) = (&self.watched, &node, &before) {
            watched.tell_kernel(node, &before.entries, &entries);
        }
        self.unlist(before.iter().flat_map(|before| before.entries.iter()));
        if !tree.contains(folder) {
            self.forget_folder(folder);
        }
    }

    /// Notes that these entries are no longer in a listing.
    fn unlist<'a>(&self, entries: impl IntoIterator<Item = &'a (OsString, Arc<Node>)>) {
        for (_, node) in entries.into_iter().filter(|(_, node)| !node.is_folder()) {
            node.listings.fetch_sub(1, Ordering::Relaxed);
            self.drop_if_unused(node);
        }
    }

    /// Forgets a folder that the tree no longer has. Its nodes are kept while the kernel refers to them or programs
    /// have them open.
    pub(crate) fn forget_folder(&self, id: FolderId) {
        let state = self.folders.write().remove(&id);
        let mut progress = self.progress.lock();
        // While a proof runs, its state stays in `progress`. The thread that proves the folder
        // first calls the waiters in the state, and then removes the state.
        if matches!(progress.get(&id), Some(Progress::Proved | Progress::Unproved)) {
            progress.remove(&id);
        }
        drop(progress);
        self.refresh.lock().remove(&id);
        self.tails.forget(id);
        self.checks.forget(id);
        self.watched.iter().for_each(|watched| watched.forget(id));
        let Some(FolderState { node, listed }) = state else { return };
        // Another folder may be at this path by now.
        if node.folder() == id {
            self.sets.take_out(&node.path);
            if self.watched.is_some() {
                self.shards_proved.lock().remove(&node.path);
            }
        }
        self.unlist(listed.iter().flat_map(|listed| listed.entries.iter()));
        node.listings.fetch_sub(1, Ordering::Relaxed);
        self.drop_if_unused(&node);
    }

    /// Counts a lookup of `node` by the kernel.
    pub(crate) fn looked_up(&self, node: &Node) {
        node.lookups.fetch_add(1, Ordering::Relaxed);
    }

    /// Subtracts `times` from the kernel's lookup count of an inode number. Returns whether the node was dropped.
    pub(crate) fn forget(&self, ino: u64, times: u64) -> bool {
        let Some(node) = self.node(ino) else {
            self.marks.forget(ino, times);
            return false;
        };
        let left = |lookups: u64| Some(lookups.saturating_sub(times));
        let _ = node.lookups.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left);
        self.drop_if_unused(&node)
    }

    /// Drops a node that is in no listing and that the kernel does not refer to.
    fn drop_if_unused(&self, node: &Node) -> bool {
        // The lock keeps another listing from using this node again during the check.
        let mut by_ino = self.by_ino.write();
        let unused = node.lookups.load(Ordering::Relaxed) == 0
            && node.listings.load(Ordering::Relaxed) == 0
            && by_ino.get(&node.ino).is_some_and(|known| std::ptr::eq(known.as_ref(), node));
        unused && by_ino.remove(&node.ino).is_some()
    }

    /// The entry `name` of `folder`, which is listed. Accesses the source, which may be slow.
    pub(crate) fn entry(&self, folder: FolderId, name: &OsStr) -> NameEntry {
        let Some(listed) = self.listed(folder) else { return NameEntry::Absent };
        match find(&listed.entries, name) {
            Some(node) if node.is_outdated() => {
                // A file that belongs to no checkpoint can disappear and come back independently of
                // the checkpoints.
                let gone = node.is_plain() && self.tree().file_now(folder, name).is_none();
                if gone { NameEntry::Absent } else { NameEntry::Stale }
            }
            // A weight map is made from the headers of its set, so it is outdated when a file of the set is outdated.
            Some(node) if node.is_text() && name != ERROR_FILE => {
                let outdated =
                    listed.entries.iter().any(|(_, node)| node.is_virtual() && node.is_outdated());
                if outdated { NameEntry::Stale } else { NameEntry::Found(node) }
            }
            Some(node) if name != ERROR_FILE => NameEntry::Found(node),
            _ if self.may_be_whole(folder, &listed) => NameEntry::Stale,
            found => found.map_or(NameEntry::Absent, NameEntry::Found),
        }
    }

    /// Whether a refused set of `folder` may have become whole. Checks the source only once in `ASK_INTERVAL`.
    fn may_be_whole(&self, folder: FolderId, listed: &Listed) -> bool {
        match listed.refused {
            None => false,
            Some(Refusal::Proved) => self.may_ask(folder) && self.tree().is_stale(folder),
            Some(Refusal::Unsettled) => self.may_ask(folder),
        }
    }

    /// Whether the next check of a refused set of `folder` is due.
    fn may_ask(&self, folder: FolderId) -> bool {
        let mut folders = self.folders.write();
        let Some(listed) = folders.get_mut(&folder).and_then(|state| state.listed.as_mut()) else {
            return false;
        };
        let due = listed.asked.elapsed() >= ASK_INTERVAL;
        if due {
            listed.asked = Instant::now();
        }
        due
    }

    /// The entry `name` of `folder`. If it is stale, the family of `folder` is first proved again from the source.
    pub(crate) fn fresh_entry(&self, folder: FolderId, name: &OsStr) -> Option<Arc<Node>> {
        let listing = self.listing(folder)?;
        if let Some(node) = find(&listing, name).filter(|node| node.is_plain()) {
            return if node.is_outdated() { self.renew(folder, name) } else { Some(node) };
        }
        let top = self.tree().family_of(folder);
        let lock = self.family_lock(top);
        let _one_at_a_time = lock.lock();
        let listing = self.listing(folder)?;
        let is_outdated = |node: Arc<Node>| {
            node.is_outdated()
                || (node.is_text()
                    && listing.iter().any(|(_, n)| n.is_virtual() && n.is_outdated()))
        };
        let unsettled =
            self.listed(folder).is_some_and(|listed| listed.refused == Some(Refusal::Unsettled));
        let outdated = find(&listing, name).is_some_and(is_outdated);
        if outdated || unsettled || self.tree().is_stale(folder) {
            self.prove_rescanned(top);
        }
        let listing = self.listing(folder)?;
        find(&listing, name)
    }
}

impl Nodes {
    /// Makes a new node for a replaced file that belongs to no checkpoint.
    fn renew(&self, folder: FolderId, name: &OsStr) -> Option<Arc<Node>> {
        let tree = self.tree();
        let file = tree.file_now(folder, name)?;
        let content = Content::Whole { file, proved: None };
        let shown = MountEntry { name: name.to_owned(), content };
        let node = self.registered(file_node(&tree, folder, None, shown));
        let entry = (name.to_owned(), node.clone());
        let replaced = |folders: &mut HashMap<FolderId, FolderState>| {
            let listed = folders.get_mut(&folder)?.listed.as_mut()?;
            let mut shown: Listing = listed.entries.to_vec();
            let known = shown.iter_mut().find(|(other, _)| other == name)?;
            let old = std::mem::replace(known, entry.clone());
            listed.entries = Arc::new(shown);
            Some(old)
        };
        let old = replaced(&mut self.folders.write());
        let found = old.is_some();
        self.unlist([&old.unwrap_or(entry)]);
        found.then_some(node)
    }

    /// Registers the node of a folder. If a node of the same path is registered already, that node
    /// is returned and represents the new folder, because the kernel may refer to it.
    fn registered_folder(&self, mut node: Node) -> Arc<Node> {
        let access = self.access_without_source(&node);
        let mut by_ino = self.by_ino.write();
        let node = loop {
            match by_ino.get(&node.ino) {
                None => break Arc::new(node),
                Some(other) if other.is_folder() && other.path == node.path => {
                    other.set_folder(node.folder());
                    break other.clone();
                }
                Some(_) => node = renumbered(&node),
            }
        };
        node.set_access(access);
        node.listings.fetch_add(1, Ordering::Relaxed);
        by_ino.insert(node.ino, node.clone());
        node
    }

    /// Registers `node` by its inode number. If the same file in the same version is registered
    /// already, uses that node instead. If the number belongs to another file, `node` gets the next
    /// free number. If the version was found outdated, or if its bytes came from another path,
    /// `node` gets a new version. Counts one more listing of the node that is returned.
    fn registered(&self, mut node: Arc<Node>) -> Arc<Node> {
        let access = self.look_at_access(&node);
        let mut by_ino = self.by_ino.write();
        loop {
            node = match by_ino.get(&node.ino) {
                Some(other) if !same_file(other, &node) => Arc::new(renumbered(&node)),
                Some(other) if other.is_known_to_be_outdated() || !same_place(other, &node) => {
                    Arc::new(reversioned(&node))
                }
                Some(other) => {
                    other.set_folder(node.folder());
                    break node = other.clone();
                }
                None if self.marks.is_outdated(&node) => Arc::new(reversioned(&node)),
                None => {
                    self.marks.apply(&node);
                    break;
                }
            }
        }
        node.set_access(access);
        node.listings.fetch_add(1, Ordering::Relaxed);
        by_ino.insert(node.ino, node.clone());
        node
    }
}

fn names_of_shown(sets: &[Set]) -> BTreeSet<String> {
    let shown = sets.iter().filter(|set| set.outcome.is_ok());
    shown.map(|set| set.name.clone()).collect()
}

fn log_refusals(outcomes: Vec<SetOutcome>) {
    for SetOutcome { name, outcome, .. } in outcomes.into_iter().filter(|one| !one.on_its_way) {
        if let Err(error) = outcome {
            tracing::error!(model = name, "{name} is not shown: {error}");
        }
    }
}

fn find(listing: &Listing, name: &OsStr) -> Option<Arc<Node>> {
    let index = listing.binary_search_by(|(other, _)| other.as_os_str().cmp(name)).ok()?;
    Some(listing[index].1.clone())
}
