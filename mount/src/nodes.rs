//! What the mount shows, as inodes: folders, files, their attributes and their open files.
//!
//! Knows nothing of FUSE; `fs` translates. An inode number stands for a path and a version of
//! its content: a file that is replaced in the source gets a new one, and whoever has the old
//! one open keeps it.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use tensorfs::checkpoint::{Content, FolderId, Shown, Tree};
use tensorfs::io::{Engine, Read};
use tensorfs::reader::Reader;
use tensorfs::source::{Identity, Source};
use tensorfs::{Error, Result};

/// Inode number of the root.
pub(crate) const ROOT: u64 = 1;

/// A file or folder of the mount.
#[derive(Debug)]
pub(crate) struct Node {
    /// Inode number.
    pub ino: u64,
    /// Folder of the source that it is, or lies in.
    pub folder: FolderId,
    /// Length in bytes.
    pub len: u64,
    /// Time of the last change.
    pub mtime: SystemTime,
    /// What it is.
    pub kind: NodeKind,
}

/// What a node is.
#[derive(Debug)]
pub(crate) enum NodeKind {
    /// A folder.
    Folder,
    /// A file, with its content version in hexadecimal.
    File {
        /// What it is made of.
        content: Content,
        /// Content version in hexadecimal.
        version: String,
        /// The open file, once there is one.
        open: OnceLock<OpenFile>,
    },
}

/// A file that can be read.
#[derive(Clone, Debug)]
pub(crate) enum OpenFile {
    /// The tensors of a checkpoint as one file.
    Virtual(Arc<Reader>),
    /// A file of the source as it is.
    Whole(Arc<Source>),
    /// Text made here.
    Text(Arc<[u8]>),
}

impl OpenFile {
    /// Reads from `offset` on into `buf`; fewer bytes than asked only at the end of the file.
    pub(crate) fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        match self {
            OpenFile::Virtual(reader) => reader.read_at(offset, buf),
            OpenFile::Whole(source) => {
                let len = (buf.len() as u64).min(source.len().saturating_sub(offset)) as usize;
                let target = &mut buf[..len];
                Engine::default().run(&mut [Read { source, offset, target }])?;
                Ok(len)
            }
            OpenFile::Text(text) => {
                let from = text.get(offset.min(text.len() as u64) as usize..).unwrap_or_default();
                let len = buf.len().min(from.len());
                buf[..len].copy_from_slice(&from[..len]);
                Ok(len)
            }
        }
    }

    /// The source files that its bytes come from.
    pub(crate) fn sources(&self) -> &[Arc<Source>] {
        match self {
            OpenFile::Virtual(reader) => reader.sources(),
            OpenFile::Whole(source) => std::slice::from_ref(source),
            OpenFile::Text(_) => &[],
        }
    }
}

/// The entries of a folder, by name.
pub(crate) type Listing = Vec<(OsString, Arc<Node>)>;

/// What waits for a folder to be listed.
type Waiter = Box<dyn FnOnce(&Nodes) + Send>;

/// How far the proof of a family of folders has come.
enum Progress {
    Unproved,
    Proving(Vec<Waiter>),
    Proved,
}

/// All nodes of a mount.
pub(crate) struct Nodes {
    tree: RwLock<Arc<Tree>>,
    /// Held while replaced files are looked at again.
    refresh: Mutex<()>,
    by_ino: RwLock<HashMap<u64, Arc<Node>>>,
    /// Folder nodes by folder.
    folders: Vec<Arc<Node>>,
    /// By folder; `None` until it was proved.
    listings: RwLock<Vec<Option<Arc<Listing>>>>,
    /// By the folder at the top of a family.
    progress: Mutex<HashMap<FolderId, Progress>>,
}

impl Nodes {
    /// The nodes of `tree`; nothing is proved yet.
    pub(crate) fn new(tree: Tree) -> Nodes {
        let folders: Vec<Arc<Node>> =
            (0..tree.folders.len()).map(|id| Arc::new(folder_node(&tree, id))).collect();
        let by_ino = folders.iter().map(|node| (node.ino, node.clone())).collect();
        let listings = vec![None; folders.len()];
        Nodes {
            tree: RwLock::new(Arc::new(tree)),
            refresh: Mutex::new(()),
            by_ino: RwLock::new(by_ino),
            folders,
            listings: RwLock::new(listings),
            progress: Mutex::new(HashMap::new()),
        }
    }

    /// The node of this inode number.
    pub(crate) fn node(&self, ino: u64) -> Option<Arc<Node>> {
        self.by_ino.read().unwrap_or_else(PoisonError::into_inner).get(&ino).cloned()
    }

    /// The node of a folder.
    pub(crate) fn folder(&self, id: FolderId) -> Arc<Node> {
        self.folders[id].clone()
    }

    /// The entries of `folder`, if they are known already.
    pub(crate) fn listing(&self, folder: FolderId) -> Option<Arc<Listing>> {
        self.listings.read().unwrap_or_else(PoisonError::into_inner)[folder].clone()
    }

    /// Calls `then` once `folder` is listed: at once, or from the thread that proves it, so
    /// that a folder that takes long to prove keeps no other request waiting.
    pub(crate) fn when_listed(
        self: &Arc<Self>,
        folder: FolderId,
        then: impl FnOnce(&Nodes) + Send + 'static,
    ) {
        if self.listing(folder).is_some() {
            return then(self);
        }
        let head = self.tree().family_of(folder);
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        match progress.entry(head).or_insert(Progress::Unproved) {
            Progress::Proved => {
                drop(progress);
                then(self);
            }
            Progress::Proving(waiters) => waiters.push(Box::new(then)),
            state @ Progress::Unproved => {
                *state = Progress::Proving(vec![Box::new(then)]);
                drop(progress);
                let nodes = self.clone();
                let prove = move || nodes.prove_or_fail(head);
                if let Err(e) = std::thread::Builder::new().name("prove".to_owned()).spawn(prove) {
                    tracing::warn!("cannot start a thread: {e}");
                    self.prove_or_fail(head);
                }
            }
        }
    }

    /// Proves a family for those who wait for it. After a panic their replies are dropped, which
    /// answers EIO, and the next look tries again.
    fn prove_or_fail(&self, head: FolderId) {
        if catch_unwind(AssertUnwindSafe(|| self.prove(head))).is_err() {
            tracing::error!("a folder could not be proved because of a bug in tensorfs");
            let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
            let waiters = progress.insert(head, Progress::Unproved);
            drop(progress);
            drop(waiters);
        }
    }

    /// Proves a family and lists its folders, then lets all who wait for it go on. Returns the
    /// refusals and what is worth a line in the log.
    pub(crate) fn prove(&self, head: FolderId) -> Vec<Result<()>> {
        let tree = self.tree();
        let proved = tree.prove(head);
        let mut outcomes = Vec::new();
        for (id, folder) in proved {
            for note in &folder.notes {
                tracing::warn!("{}: {note}", tree.folders[id].path.display());
            }
            let shown = tree.shown(id, &folder);
            self.list(&tree, id, shown);
            for set in folder.sets {
                if let Err(error) = &set.outcome {
                    tracing::error!("{} is not shown: {error}", set.name);
                }
                outcomes.push(set.outcome.map(|_| ()));
            }
        }
        let waiters = {
            let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
            progress.insert(head, Progress::Proved)
        };
        if let Some(Progress::Proving(waiters)) = waiters {
            waiters.into_iter().for_each(|then| then(self));
        }
        outcomes
    }

    /// Makes the nodes of what `folder` shows. Nodes of what has not changed stay.
    fn list(&self, tree: &Tree, folder: FolderId, shown: Vec<Shown>) {
        let mut listing: Listing = Vec::new();
        let mut by_ino = self.by_ino.write().unwrap_or_else(PoisonError::into_inner);
        for file in shown {
            let mut node = file_node(tree, folder, file.clone());
            loop {
                match by_ino.get(&node.ino) {
                    None => break,
                    Some(other) if same_file(other, &node) => {
                        node = Arc::clone(other);
                        break;
                    }
                    Some(_) => node = Arc::new(renumbered(&node)),
                }
            }
            by_ino.insert(node.ino, node.clone());
            listing.push((file.name, node));
        }
        for (name, child) in &tree.folders[folder].children {
            listing.push((name.clone(), self.folders[*child].clone()));
        }
        drop(by_ino);
        listing.sort_by(|a, b| a.0.cmp(&b.0));
        listing.dedup_by(|a, b| a.0 == b.0);
        let mut listings = self.listings.write().unwrap_or_else(PoisonError::into_inner);
        listings[folder] = Some(Arc::new(listing));
    }

    /// The entry `name` of `folder`, which is listed.
    pub(crate) fn entry(&self, folder: FolderId, name: &OsStr) -> Entry {
        let listing = self.listing(folder);
        match listing.and_then(|listing| find(&listing, name)) {
            Some(node) if node.is_replaced() => Entry::Stale,
            Some(node) => Entry::Found(node),
            None if self.tree().has_returned(folder) => Entry::Stale,
            None => Entry::Absent,
        }
    }

    /// The entry `name` of `folder` after the folder was proved again, from what stands in the
    /// source now.
    pub(crate) fn fresh_entry(&self, folder: FolderId, name: &OsStr) -> Option<Arc<Node>> {
        let _one_at_a_time = self.refresh.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(self.entry(folder, name), Entry::Stale) {
            let head = {
                let mut tree = self.tree.write().unwrap_or_else(PoisonError::into_inner);
                let head = tree.family_of(folder);
                Arc::make_mut(&mut tree).look_again(head);
                head
            };
            tracing::info!("files were replaced in the source; proving them again");
            self.prove(head);
        }
        let listing = self.listing(folder)?;
        find(&listing, name)
    }

    /// The source as it was scanned last.
    pub(crate) fn tree(&self) -> Arc<Tree> {
        self.tree.read().unwrap_or_else(PoisonError::into_inner).clone()
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

fn find(listing: &Listing, name: &OsStr) -> Option<Arc<Node>> {
    let at = listing.binary_search_by(|(other, _)| other.as_os_str().cmp(name)).ok()?;
    Some(listing[at].1.clone())
}

impl Node {
    /// Opens the file for reading, once for all who read it.
    ///
    /// # Errors
    /// `Error::Changed` where it is no longer what the mount shows.
    pub(crate) fn open(&self) -> Result<OpenFile> {
        let NodeKind::File { content, open, .. } = &self.kind else {
            return Err(Error::usage("a folder cannot be read"));
        };
        if let Some(file) = open.get() {
            return Ok(file.clone());
        }
        let file = match content {
            Content::Virtual(checkpoint) => OpenFile::Virtual(Arc::new(Reader::open(checkpoint)?)),
            Content::Whole { proved: Some(source), .. } => OpenFile::Whole(source.clone()),
            Content::Whole { file, proved: None } => {
                let source = Source::open(&file.path)?;
                if !source.identity().same_bytes(&file.identity) {
                    let detail = "was replaced since it was looked at".to_owned();
                    return Err(Error::Changed { path: file.path.clone(), detail });
                }
                OpenFile::Whole(source)
            }
            Content::Text(text) => OpenFile::Text(text.clone()),
        };
        Ok(open.get_or_init(|| file).clone())
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
    Node { ino, folder: id, len: 4096, mtime: system_time(folder.newest()), kind: NodeKind::Folder }
}

fn file_node(tree: &Tree, folder: FolderId, shown: Shown) -> Arc<Node> {
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
    };
    let len = match &shown.content {
        Content::Virtual(checkpoint) => {
            checkpoint.sources().iter().for_each(|source| add(&source.identity()));
            // A checkpoint without a layout is refused, so it has one.
            let layout = checkpoint.layout().ok();
            layout.as_ref().inspect(|layout| hash.update(layout.header()));
            layout.map_or(0, |layout| layout.len())
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
    let kind = NodeKind::File { content: shown.content, version, open: OnceLock::new() };
    Arc::new(Node { ino: ino_of(&digest), folder, len, mtime: system_time(newest), kind })
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
        NodeKind::File { content, version, .. } => NodeKind::File {
            content: content.clone(),
            version: version.clone(),
            open: OnceLock::new(),
        },
    };
    Node { ino: node.ino.wrapping_add(1).max(ROOT + 1), kind, ..*node }
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
