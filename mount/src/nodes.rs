//! What the mount shows, as inodes: folders, files, their attributes and their open files.
//!
//! Knows nothing of FUSE; `fs` translates. An inode number stands for a path and a version of
//! its content: a file that is replaced in the source gets a new one, and whoever has the old
//! one open keeps it.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use tensorfs::checkpoint::{Content, ERROR_FILE, FolderId, Set, Shown, Tail, Tree};
use tensorfs::error::shown_path;
use tensorfs::format::{manifest, names};
use tensorfs::source::Identity;
use tensorfs::verify::gate::Gate;
use tensorfs::{Class, Error, Fault, Result};

use crate::asks::Asks;
use crate::checked::{self, Gates};
use crate::open::Opened;

/// Inode number of the root.
pub(crate) const ROOT: u64 = 1;

/// A file or folder of the mount.
#[derive(Debug)]
pub(crate) struct Node {
    /// Inode number.
    pub(crate) ino: u64,
    /// Folder of the source that it is, or lies in.
    pub(crate) folder: FolderId,
    /// Path in the mount.
    pub(crate) path: PathBuf,
    /// Length in bytes.
    pub(crate) len: u64,
    /// What it is.
    pub(crate) kind: NodeKind,
    /// Time of the last change.
    mtime: Mutex<SystemTime>,
    /// How often the kernel has learnt the inode number, less how often it has forgotten it.
    lookups: AtomicU64,
    /// Whether a folder shows it; else it lives only for those who have it open.
    listed: AtomicBool,
}

/// What a node is.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all nodes are files")]
pub(crate) enum NodeKind {
    /// A folder.
    Folder,
    /// A file.
    File {
        /// What it is made of.
        content: Content,
        /// Content version in hexadecimal.
        version: String,
        /// The open file, while somebody has it open.
        open: Mutex<Weak<Opened>>,
        /// What its source was when it was opened last.
        last: Mutex<Option<Identity>>,
        /// What its bytes have to pass, where they are compared with checksums.
        gate: Option<Arc<Gate>>,
    },
}

/// The entries of a folder, by name.
pub(crate) type Listing = Vec<(OsString, Arc<Node>)>;

/// What a folder shows.
#[derive(Clone, Debug)]
struct Listed {
    entries: Arc<Listing>,
    /// Whether a set of it is refused.
    refused: bool,
    /// When the source was last asked whether a refused set has become whole.
    asked: Instant,
}

/// What waits for a folder to be listed.
type Waiter = Box<dyn FnOnce(&Nodes) + Send>;

/// How far the proof of a family of folders has come.
enum Progress {
    Unproved,
    Proving(Vec<Waiter>),
    Proved,
}

/// The proof of a family. Where it ends without an outcome, by a panic or for want of a thread,
/// those who wait for it are dropped, which answers EIO, and the next look tries again.
struct Proving {
    nodes: Arc<Nodes>,
    head: FolderId,
}

impl Drop for Proving {
    fn drop(&mut self) {
        let mut progress = lock(&self.nodes.progress);
        let Some(state @ Progress::Proving(_)) = progress.get_mut(&self.head) else { return };
        let waiters = std::mem::replace(state, Progress::Unproved);
        drop(progress);
        drop(waiters);
    }
}

/// What a name in a folder stands for.
#[derive(Debug)]
pub(crate) enum Entry {
    /// This node.
    Found(Arc<Node>),
    /// Nothing.
    Absent,
    /// Something that was replaced in the source since it was proved.
    Stale,
}

/// All nodes of a mount.
pub(crate) struct Nodes {
    tree: RwLock<Arc<Tree>>,
    /// By the folder at the top of a family: held while its replaced files are looked at again.
    refresh: Vec<Mutex<()>>,
    /// Held while what was looked at again becomes part of the tree; never asks the source.
    renewing: Mutex<()>,
    by_ino: RwLock<HashMap<u64, Arc<Node>>>,
    /// Folder nodes by folder.
    folders: Vec<Arc<Node>>,
    /// By folder; `None` until it was proved.
    listings: RwLock<Vec<Option<Listed>>>,
    /// Number of shards of the sets whose last piece nothing proves, by folder and name.
    shards_proved: Mutex<HashMap<(FolderId, String), usize>>,
    /// By the folder at the top of a family.
    progress: Mutex<HashMap<FolderId, Progress>>,
    /// Sets that came from an index, and sets whose headers were read.
    indexed: [AtomicU64; 2],
    /// Whether weights are compared with checksums as they are read.
    checked: bool,
}

/// Time between two questions whether a refused set has become whole.
const ASK_INTERVAL: Duration = Duration::from_millis(500);

impl Nodes {
    /// The nodes of `tree`; nothing is proved yet. `checked`: weights are compared with checksums
    /// as they are read.
    pub(crate) fn new(tree: Tree, checked: bool) -> Nodes {
        let folders: Vec<Arc<Node>> =
            (0..tree.folders.len()).map(|id| Arc::new(folder_node(&tree, id))).collect();
        let by_ino = folders.iter().map(|node| (node.ino, node.clone())).collect();
        let listings = vec![None; folders.len()];
        Nodes {
            tree: RwLock::new(Arc::new(tree)),
            refresh: folders.iter().map(|_| Mutex::default()).collect(),
            renewing: Mutex::default(),
            by_ino: RwLock::new(by_ino),
            folders,
            listings: RwLock::new(listings),
            shards_proved: Mutex::default(),
            progress: Mutex::new(HashMap::new()),
            indexed: Default::default(),
            checked,
        }
    }

    /// The source as it was looked at last.
    pub(crate) fn tree(&self) -> Arc<Tree> {
        read(&self.tree).clone()
    }

    /// The node of this inode number.
    pub(crate) fn node(&self, ino: u64) -> Option<Arc<Node>> {
        read(&self.by_ino).get(&ino).cloned()
    }

    /// The node of a folder.
    pub(crate) fn folder(&self, id: FolderId) -> Arc<Node> {
        self.folders[id].clone()
    }

    /// The entries of `folder`, if they are known already.
    pub(crate) fn listing(&self, folder: FolderId) -> Option<Arc<Listing>> {
        read(&self.listings)[folder].as_ref().map(|listed| listed.entries.clone())
    }

    /// Calls `then` once `folder` is listed: at once, or from the thread that proves it, so
    /// that a folder that takes long to prove keeps no other request waiting.
    pub(crate) fn when_listed(
        self: &Arc<Self>,
        asks: &Asks,
        folder: FolderId,
        then: impl FnOnce(&Nodes) + Send + 'static,
    ) {
        if self.listing(folder).is_some() {
            return then(self);
        }
        let head = self.tree().family_of(folder);
        let mut progress = lock(&self.progress);
        match progress.entry(head).or_insert(Progress::Unproved) {
            Progress::Proved => {
                drop(progress);
                then(self);
            }
            Progress::Proving(waiters) => waiters.push(Box::new(then)),
            state @ Progress::Unproved => {
                *state = Progress::Proving(vec![Box::new(then)]);
                drop(progress);
                let proving = Proving { nodes: self.clone(), head };
                asks.later(&self.folders[head].path, move || {
                    log_refusals(proving.nodes.prove(proving.head));
                });
            }
        }
    }

    /// Proves a family and lists its folders, then lets all who wait for it go on. Returns the
    /// name of each set with its refusal, where it is refused.
    pub(crate) fn prove(&self, head: FolderId) -> Vec<(String, Result<()>)> {
        let tree = self.tree();
        let mut outcomes = Vec::new();
        for (id, mut folder) in tree.prove(head) {
            folder.sets.iter_mut().for_each(|set| self.refuse_fewer_shards(&tree, id, set));
            for note in &folder.notes {
                tracing::warn!("{}: {note}", shown_path(&tree.folders[id].path));
            }
            let origin = &self.indexed[usize::from(!folder.from_index())];
            origin.fetch_add(folder.sets.len() as u64, Ordering::Relaxed);
            let gates = self.checked.then(|| checked::admit(&tree, id, &mut folder));
            let shown = tree.shown(id, &folder);
            let refused = folder.sets.iter().any(|set| set.outcome.is_err());
            self.list(&tree, id, (shown, gates.as_ref()), refused);
            for set in folder.sets {
                let outcome = set.outcome.map(|checkpoint| checkpoint.release_files());
                outcomes.push((set.name, outcome));
            }
        }
        let waiters = lock(&self.progress).insert(head, Progress::Proved);
        if let Some(Progress::Proving(waiters)) = waiters {
            waiters.into_iter().for_each(|then| then(self));
        }
        outcomes
    }

    /// Makes the indexes of all families in the background, so that the first look into a folder
    /// finds one.
    pub(crate) fn index_rest(self: &Arc<Self>) {
        let heads = self.tree().families();
        if self.tree().view.index.is_none() || heads.len() < 2 {
            return;
        }
        let nodes = Arc::downgrade(self);
        let index = move || {
            for head in heads {
                let Some(nodes) = nodes.upgrade() else { return };
                let listed = nodes.listing(head).is_some();
                let tree = nodes.tree();
                drop(nodes);
                // What it proves is dropped: only the index stays, whatever the number of models.
                if !listed {
                    drop(tree.prove(head));
                }
            }
        };
        if let Err(e) = std::thread::Builder::new().name("index".to_owned()).spawn(index) {
            tracing::warn!("no index is made in the background: {e}");
        }
    }

    /// How many sets came from an index, for `tensorfs status`.
    pub(crate) fn index_status(&self) -> serde_json::Value {
        let [index, headers] = &self.indexed;
        serde_json::json!({
            "folder": self.tree().view.index.as_deref().map(shown_path),
            "sets_from_index": index.load(Ordering::Relaxed),
            "sets_from_headers": headers.load(Ordering::Relaxed),
        })
    }

    /// Refuses a set that has fewer shards than this mount has proved before, where the shards
    /// themselves cannot tell that one is gone.
    fn refuse_fewer_shards(&self, tree: &Tree, folder: FolderId, set: &mut Set) {
        let Ok(checkpoint) = &set.outcome else { return };
        if checkpoint.tail != Tail::Unproven {
            return;
        }
        let now = checkpoint.catalog().shards.len();
        let mut proved = lock(&self.shards_proved);
        let before = proved.entry((folder, set.name.clone())).or_insert(now);
        if now >= *before {
            *before = now;
            return;
        }
        let message = format!(
            "has {now} shard files, it had {before} before: whether the rest is the whole \
             checkpoint cannot be seen; put the others back, or mount again"
        );
        let fault = Fault::new(Class::ShardMissing, message);
        set.outcome = Err(Error::refused(&tree.folders[folder].path, fault));
    }

    /// Makes the nodes of what `folder` shows. Nodes of what has not changed stay.
    fn list(
        &self,
        tree: &Tree,
        folder: FolderId,
        (shown, gates): (Vec<Shown>, Option<&Gates>),
        refused: bool,
    ) {
        let gate = |file: &Shown| gates.and_then(|gates| gates.get(&file.name)).cloned();
        let made: Vec<(OsString, Arc<Node>)> = shown
            .into_iter()
            .filter(|file| gates.is_none_or(|gates| checked::may_show(file, gates)))
            .map(|file| (file.name.clone(), file_node(tree, folder, gate(&file), file)))
            .collect();
        let mut listing: Listing =
            made.into_iter().map(|(name, node)| (name, self.registered(node))).collect();
        for (name, child) in &tree.folders[folder].children {
            listing.push((name.clone(), self.folders[*child].clone()));
        }
        listing.sort_by(|a, b| a.0.cmp(&b.0));
        listing.dedup_by(|a, b| {
            let same = a.0 == b.0;
            if same {
                tracing::warn!(
                    "{}: a file and a folder of this name; one is hidden",
                    a.0.display()
                );
            }
            same
        });
        *lock(&self.folders[folder].mtime) = system_time(tree.folders[folder].newest());
        let listed = Listed { entries: Arc::new(listing), refused, asked: Instant::now() };
        let before = write(&self.listings)[folder].replace(listed.clone());
        for (_, node) in before.iter().flat_map(|before| before.entries.iter()) {
            let stays = listed.entries.iter().any(|(_, new)| Arc::ptr_eq(new, node));
            if !stays && matches!(node.kind, NodeKind::File { .. }) {
                node.listed.store(false, Ordering::Relaxed);
                self.drop_if_unused(node);
            }
        }
    }

    /// Notes that the kernel has learnt of `node`.
    pub(crate) fn looked_up(&self, node: &Node) {
        node.lookups.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that the kernel has forgotten an inode number `times` times. Returns whether the
    /// node is gone with it.
    pub(crate) fn forget(&self, ino: u64, times: u64) -> bool {
        let Some(node) = self.node(ino) else { return false };
        let left = |lookups: u64| Some(lookups.saturating_sub(times));
        let _ = node.lookups.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left);
        self.drop_if_unused(&node)
    }

    /// Drops a node that no folder shows and the kernel does not know.
    fn drop_if_unused(&self, node: &Node) -> bool {
        // Under the lock, so that no listing takes the node up again meanwhile.
        let mut by_ino = write(&self.by_ino);
        let unused = node.lookups.load(Ordering::Relaxed) == 0
            && !node.listed.load(Ordering::Relaxed)
            && matches!(node.kind, NodeKind::File { .. })
            && by_ino.get(&node.ino).is_some_and(|known| std::ptr::eq(known.as_ref(), node));
        unused && by_ino.remove(&node.ino).is_some()
    }

    /// The entry `name` of `folder`, which is listed. Asks the source, which may take long.
    pub(crate) fn entry(&self, folder: FolderId, name: &OsStr) -> Entry {
        let Some(listed) = read(&self.listings)[folder].clone() else { return Entry::Absent };
        let found = find(&listed.entries, name);
        match found {
            Some(node) if node.is_replaced() => {
                // A file that is no part of a checkpoint may go and come back by itself.
                let gone = node.is_plain() && self.tree().file_now(folder, name).is_none();
                if gone { Entry::Absent } else { Entry::Stale }
            }
            Some(node) if name != ERROR_FILE => Entry::Found(node),
            found => {
                if listed.refused && self.may_ask(folder) && self.tree().differs(folder) {
                    return Entry::Stale;
                }
                found.map_or(Entry::Absent, Entry::Found)
            }
        }
    }

    /// Whether it is time to ask again whether a refused set of `folder` has become whole.
    fn may_ask(&self, folder: FolderId) -> bool {
        let mut listings = write(&self.listings);
        let Some(listed) = &mut listings[folder] else { return false };
        let due = listed.asked.elapsed() >= ASK_INTERVAL;
        if due {
            listed.asked = Instant::now();
        }
        due
    }

    /// Proves the family of `folder` again, from what stands in the source now, if `name` is
    /// stale; then the entry.
    pub(crate) fn fresh_entry(&self, folder: FolderId, name: &OsStr) -> Option<Arc<Node>> {
        let listing = self.listing(folder)?;
        if let Some(node) = find(&listing, name).filter(|node| node.is_plain()) {
            return if node.is_replaced() { self.renew(folder, name) } else { Some(node) };
        }
        let head = self.tree().family_of(folder);
        let _one_at_a_time = lock(&self.refresh[head]);
        let listing = self.listing(folder)?;
        let replaced = find(&listing, name).is_some_and(|node| node.is_replaced());
        if replaced || self.tree().differs(folder) {
            self.look_again(head);
            tracing::info!("files were replaced in the source; proving them again");
            log_refusals(self.prove(head));
        }
        let listing = self.listing(folder)?;
        find(&listing, name)
    }
}

impl Nodes {
    /// Looks again at the files of a family. Others go on meanwhile: the source is asked without
    /// a lock on the tree, and they may look at families of theirs.
    fn look_again(&self, head: FolderId) {
        let mut looked = Tree::clone(&self.tree());
        looked.look_again(head);
        let _one_at_a_time = lock(&self.renewing);
        let mut tree = Tree::clone(&self.tree());
        for id in tree.family(head) {
            std::mem::swap(&mut tree.folders[id], &mut looked.folders[id]);
        }
        *write(&self.tree) = Arc::new(tree);
    }

    /// A new node for a file that is no part of a checkpoint, and was replaced.
    fn renew(&self, folder: FolderId, name: &OsStr) -> Option<Arc<Node>> {
        let tree = self.tree();
        let file = tree.file_now(folder, name)?;
        let content = Content::Whole { file, proved: None };
        let shown = Shown { name: name.to_owned(), content };
        let node = file_node(&tree, folder, None, shown);
        let node = self.registered(node);
        let old = {
            let mut listings = write(&self.listings);
            let listed = listings[folder].as_mut()?;
            let mut shown: Listing = listed.entries.to_vec();
            let entry = shown.iter_mut().find(|(other, _)| other == name)?;
            let old = std::mem::replace(&mut entry.1, node.clone());
            listed.entries = Arc::new(shown);
            old
        };
        if !Arc::ptr_eq(&old, &node) {
            old.listed.store(false, Ordering::Relaxed);
            self.drop_if_unused(&old);
        }
        Some(node)
    }

    /// Makes `node` known by its inode number; where that file in that version is known
    /// already, it is that node, and where another file has the number, the next one.
    fn registered(&self, mut node: Arc<Node>) -> Arc<Node> {
        let mut by_ino = write(&self.by_ino);
        while let Some(other) = by_ino.get(&node.ino) {
            if same_file(other, &node) {
                node = other.clone();
                break;
            }
            node = Arc::new(renumbered(&node));
        }
        node.listed.store(true, Ordering::Relaxed);
        by_ino.insert(node.ino, node.clone());
        node
    }
}

fn log_refusals(outcomes: Vec<(String, Result<()>)>) {
    for (name, outcome) in outcomes {
        if let Err(error) = outcome {
            tracing::error!("{name} is not shown: {error}");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

fn find(listing: &Listing, name: &OsStr) -> Option<Arc<Node>> {
    let at = listing.binary_search_by(|(other, _)| other.as_os_str().cmp(name)).ok()?;
    Some(listing[at].1.clone())
}

impl Node {
    fn new(
        ino: u64,
        folder: FolderId,
        path: PathBuf,
        len: u64,
        mtime: (i64, i64),
        kind: NodeKind,
    ) -> Node {
        Node {
            ino,
            folder,
            path,
            len,
            kind,
            mtime: Mutex::new(system_time(mtime)),
            lookups: AtomicU64::new(0),
            listed: AtomicBool::new(false),
        }
    }

    /// Content version; folders have none.
    pub(crate) fn version(&self) -> Option<&str> {
        match &self.kind {
            NodeKind::File { version, .. } => Some(version),
            NodeKind::Folder => None,
        }
    }

    /// What its bytes have to pass, where they are compared with checksums.
    pub(crate) fn gate(&self) -> Option<&Arc<Gate>> {
        match &self.kind {
            NodeKind::File { gate, .. } => gate.as_ref(),
            NodeKind::Folder => None,
        }
    }

    /// Time of the last change.
    pub(crate) fn mtime(&self) -> SystemTime {
        *lock(&self.mtime)
    }

    /// Whether it is a file of the source that no checkpoint depends on.
    fn is_plain(&self) -> bool {
        let NodeKind::File { content: Content::Whole { file, proved: None }, .. } = &self.kind
        else {
            return false;
        };
        let name = file.name.to_string_lossy();
        names::weight_map_output(&name).is_none() && !name.ends_with(manifest::SUFFIX)
    }

    /// Whether the source now holds another file in its place.
    pub(crate) fn is_replaced(&self) -> bool {
        let NodeKind::File { content, .. } = &self.kind else { return false };
        match content {
            Content::Virtual(checkpoint) => {
                checkpoint.sources().iter().any(|source| !source.is_at_path())
            }
            Content::Whole { proved: Some(source), .. } => !source.is_at_path(),
            Content::Whole { file, proved: None } => {
                let now = std::fs::symlink_metadata(&file.path);
                !now.is_ok_and(|meta| Identity::of(&meta).same_bytes(&file.identity))
            }
            Content::Text(_) => false,
        }
    }
}

fn folder_node(tree: &Tree, id: FolderId) -> Node {
    let folder = &tree.folders[id];
    let mut hash = Sha256::new();
    hash.update(b"folder");
    hash.update(folder.relative.as_os_str().as_encoded_bytes());
    let ino = if id == 0 { ROOT } else { ino_of(&hash.finalize()) };
    Node::new(ino, id, folder.relative.clone(), 4096, folder.newest(), NodeKind::Folder)
}

fn file_node(tree: &Tree, folder: FolderId, gate: Option<Arc<Gate>>, shown: Shown) -> Arc<Node> {
    let mut hash = Sha256::new();
    let path = tree.folders[folder].relative.join(&shown.name);
    hash.update(b"file");
    hash.update(path.as_os_str().as_encoded_bytes());
    let mut newest = (0, 0);
    let mut add = |identity: &Identity| {
        newest = newest.max(identity.mtime);
        for number in [identity.len, identity.ino, identity.mtime.0 as u64, identity.mtime.1 as u64]
        {
            hash.update(number.to_le_bytes());
        }
        // The inode number and the time of a deleted file may be those of the next one.
        hash.update(identity.born().unwrap_or_default().to_le_bytes());
    };
    let len = match &shown.content {
        Content::Virtual(checkpoint) => {
            checkpoint.sources().iter().for_each(|source| add(&source.identity()));
            // A checkpoint without a layout is refused, so it has one.
            let file = checkpoint.shown().ok();
            file.inspect(|file| hash.update(file.header.0));
            file.map_or(0, |file| file.len)
        }
        Content::Whole { file, proved } => {
            let identity = proved.as_ref().map_or(file.identity, |source| source.identity());
            add(&identity);
            identity.len
        }
        Content::Text(text) => {
            newest = tree.folders[folder].newest();
            hash.update(text);
            text.len() as u64
        }
    };
    let digest = hash.finalize();
    let version = digest[8..24].iter().map(|byte| format!("{byte:02x}")).collect();
    let kind = NodeKind::File {
        content: shown.content,
        version,
        open: Mutex::default(),
        last: Mutex::default(),
        gate,
    };
    Arc::new(Node::new(ino_of(&digest), folder, path, len, newest, kind))
}

/// Whether both are one file in one version: the version covers path and content.
fn same_file(a: &Node, b: &Node) -> bool {
    match (&a.kind, &b.kind) {
        (NodeKind::File { version: a, .. }, NodeKind::File { version: b, .. }) => a == b,
        _ => false,
    }
}

/// The same file with the next inode number, where another one has its own.
fn renumbered(node: &Node) -> Node {
    let kind = match &node.kind {
        NodeKind::Folder => NodeKind::Folder,
        NodeKind::File { content, version, gate, .. } => NodeKind::File {
            content: content.clone(),
            version: version.clone(),
            open: Mutex::default(),
            last: Mutex::default(),
            gate: gate.clone(),
        },
    };
    let ino = node.ino.wrapping_add(1).max(ROOT + 1);
    Node {
        mtime: Mutex::new(node.mtime()),
        ..Node::new(ino, node.folder, node.path.clone(), node.len, (0, 0), kind)
    }
}

fn ino_of(digest: &[u8]) -> u64 {
    let bytes = digest.first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(bytes).max(ROOT + 1)
}

fn system_time((seconds, nanoseconds): (i64, i64)) -> SystemTime {
    let nanoseconds = Duration::from_nanos(nanoseconds.unsigned_abs());
    let seconds_of = |s: i64| Duration::from_secs(s.unsigned_abs());
    let base = if seconds >= 0 {
        UNIX_EPOCH + seconds_of(seconds)
    } else {
        UNIX_EPOCH - seconds_of(seconds)
    };
    base + nanoseconds
}
