//! A file or folder of the mount: its content, its version, and whether its source has changed.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use tensorfs::internal::cache::OnStorm;
use tensorfs::internal::cache::verify_on_read::ChecksumGate;
use tensorfs::internal::checkpoint::{Content, FolderId, MountEntry, Tree};
use tensorfs::internal::error::real_name;
use tensorfs::internal::format::{manifest, names};
use tensorfs::internal::hash::hex;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::source::{Source, all_hold};
use tensorfs::internal::sync::{Mutex, RwLock};
use tensorfs::internal::version::{Time, Version};
use tensorfs::{Error, Result};

use super::open_file::{Current, OpenContent, OpenFile, open_file};
use super::sharing::NodeAccess;
use crate::serve::change_watcher::Watcher;
use crate::serve::heat::{HandleHeat, Heat, Opener};
use crate::serve::service::Service;

mod carried;

/// Longest time between the lookup of a name and the open of its file by the same program.
const LOOKUP_TO_OPEN: Duration = Duration::from_millis(50);

/// Inode number of the root.
pub(crate) const ROOT: u64 = 1;

/// A file or folder of the mount.
#[derive(Debug)]
pub(crate) struct Node {
    /// Inode number.
    pub(crate) ino: u64,
    /// The folder of the source that this node is, or that its file lies in. Another folder at the
    /// same path may replace this folder.
    folder: AtomicUsize,
    /// Path in the mount.
    pub(crate) path: PathBuf,
    /// The file. `None` if the node is a folder.
    file: Option<NodeFile>,
    /// Length in bytes, and time of the last change. Both are updated for a file that follows its
    /// source.
    attributes: Mutex<(u64, SystemTime)>,
    /// Number of the kernel's lookups of this inode number, minus those that the kernel has
    /// forgotten.
    pub(crate) lookups: AtomicU64,
    /// Whether the file was ever opened, so that the kernel may have cached pages of it.
    was_opened: AtomicBool,
    /// Whether its source was found changed or replaced.
    outdated: AtomicBool,
    /// The time at which the last check that found the sources unchanged ended. An open removes it,
    /// because only one open may rely on a check.
    last_current: Mutex<Option<Instant>>,
    /// Number of listings that contain the node. It is 1 for a folder of the tree. At 0 the node is
    /// kept only while it is open or the kernel refers to it.
    pub(crate) listings: AtomicUsize,
    /// The users who may see the node. `None` if the mount has no rules, or if they are not
    /// determined yet.
    access: RwLock<Option<Arc<NodeAccess>>>,
}

/// The parts of a node that only a file has.
#[derive(Debug)]
struct NodeFile {
    /// The origin of its bytes.
    content: Content,
    /// Content version in hexadecimal. For a plain file, it is the version at its listing.
    version: String,
    /// The state of the open file, while any program has it open.
    open: Mutex<Weak<OpenFile>>,
    /// Version of its source at the last open.
    last: Mutex<Option<Version>>,
    /// The gate that compares its bytes with checksums before they are served, with `verify=read`.
    gate: Option<Arc<ChecksumGate>>,
}

impl NodeFile {
    /// A file that nobody has opened yet.
    fn unopened(content: Content, version: String, gate: Option<Arc<ChecksumGate>>) -> NodeFile {
        let (open, last) = (Mutex::default(), Mutex::default());
        NodeFile { content, version, open, last, gate }
    }
}

impl Node {
    fn new(
        ino: u64,
        folder: FolderId,
        path: PathBuf,
        len: u64,
        mtime: Time,
        file: Option<NodeFile>,
    ) -> Node {
        Node {
            ino,
            folder: AtomicUsize::new(folder),
            path,
            file,
            attributes: Mutex::new((len, system_time(mtime))),
            lookups: AtomicU64::new(0),
            was_opened: AtomicBool::new(false),
            outdated: AtomicBool::new(false),
            last_current: Mutex::default(),
            listings: AtomicUsize::new(0),
            access: RwLock::default(),
        }
    }

    /// The users who may see the node. `None` if the mount has no rules, or if they are not
    /// determined yet.
    pub(crate) fn access(&self) -> Option<Arc<NodeAccess>> {
        self.access.read().clone()
    }

    pub(crate) fn set_access(&self, access: Option<Arc<NodeAccess>>) {
        *self.access.write() = access;
    }

    /// The folder of the source that this node is, or that its file lies in.
    pub(crate) fn folder(&self) -> FolderId {
        self.folder.load(Ordering::Relaxed)
    }

    /// Notes that another folder has replaced the node's folder at the same path.
    pub(crate) fn set_folder(&self, folder: FolderId) {
        self.folder.store(folder, Ordering::Relaxed);
    }

    /// Whether it is a folder.
    pub(crate) fn is_folder(&self) -> bool {
        self.file.is_none()
    }

    /// The origin of the bytes of a file. `None` for a folder.
    pub(crate) fn content(&self) -> Option<&Content> {
        Some(&self.file.as_ref()?.content)
    }

    /// Content version in hexadecimal. `None` for a folder.
    pub(crate) fn version(&self) -> Option<String> {
        let version = &self.file.as_ref()?.version;
        if !self.follows() {
            return Some(version.clone());
        }
        let (len, mtime) = *self.attributes.lock();
        let since = mtime.duration_since(UNIX_EPOCH).unwrap_or_else(|before| before.duration());
        let mut hash = Sha256::new();
        hash.update(version);
        hash.update(len.to_le_bytes());
        hash.update(since.as_nanos().to_le_bytes());
        Some(version_of(&hash.finalize()))
    }

    /// The version that the file had when it was listed. Empty for a folder.
    pub(crate) fn listed_version(&self) -> &str {
        self.file.as_ref().map_or("", |file| &file.version)
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.attributes.lock().0
    }

    /// The gate that compares its bytes with checksums before they are served, with `verify=read`.
    pub(crate) fn gate(&self) -> Option<&Arc<ChecksumGate>> {
        self.file.as_ref()?.gate.as_ref()
    }

    /// Time of the last change.
    pub(crate) fn mtime(&self) -> SystemTime {
        self.attributes.lock().1
    }

    pub(crate) fn set_mtime(&self, mtime: Time) {
        self.attributes.lock().1 = system_time(mtime);
    }

    /// Sets length and time of a file that follows its source to the length and time of `now`.
    pub(crate) fn set_attributes(&self, now: &Version) {
        *self.attributes.lock() = (now.len, system_time(now.shown_time().unwrap_or_default()));
    }

    /// Whether the node is an unproved file of the source. Reads of it always return the current
    /// content.
    pub(crate) fn follows(&self) -> bool {
        matches!(self.content(), Some(Content::Whole { proved: None, .. }))
    }

    /// Whether the node is a file of the source that belongs to no checkpoint.
    pub(crate) fn is_plain(&self) -> bool {
        self.content().is_some_and(is_plain)
    }

    /// The current version of the file at the source path. `None` if the node does not follow its
    /// source, or if another file is at that path.
    pub(crate) fn look(&self) -> Option<Version> {
        let Some(Content::Whole { file, proved: None }) = self.content() else { return None };
        let now = file.version_now().ok()?;
        (now.file() == file.version.file()).then_some(now)
    }

    /// Whether the file was never opened, so that no reader has any of its bytes.
    pub(crate) fn is_unread(&self) -> bool {
        !self.was_opened.load(Ordering::SeqCst)
    }

    /// Notes that it was opened.
    pub(crate) fn set_opened(&self) {
        self.was_opened.store(true, Ordering::SeqCst);
    }

    /// Whether the source has changed: another file is at its path, or bytes that were proved are
    /// different. Accesses the source.
    pub(crate) fn is_outdated(&self) -> bool {
        let Some(content) = self.content() else { return false };
        // Once one source has changed, the other sources are not checked, because a server may take
        // the whole deadline for each of them.
        let has_changed = AtomicBool::new(false);
        let is_current = |source: &Arc<Source>| {
            if has_changed.load(Ordering::Relaxed) {
                return false;
            }
            let settles = || {
                let settled = source.is_at_path() && source.settle().is_ok();
                source.release();
                settled
            };
            let is_current = source.is_current() || (self.is_unread() && settles());
            has_changed.fetch_or(!is_current, Ordering::Relaxed);
            is_current
        };
        let outdated = match content {
            Content::Virtual(file) => !all_hold(file.sources(), &is_current),
            Content::Whole { proved: Some(source), .. } => !is_current(source),
            Content::Whole { file, proved: None } => {
                let now = self.look();
                now.inspect(|now| self.set_attributes(now));
                return !now.is_some_and(|now| {
                    is_plain(content) || now.content() == file.version.content()
                });
            }
            Content::Text(_) => false,
        };
        if outdated {
            self.outdated.store(true, Ordering::SeqCst);
        } else {
            *self.last_current.lock() = Some(Instant::now());
        }
        outdated
    }

    /// Like `is_outdated`, for an open. The kernel looks up a name just before it opens the file.
    /// If the sources are on servers and that lookup has just checked them, the servers are not
    /// asked again.
    pub(crate) fn is_outdated_at_open(&self) -> bool {
        let last = self.last_current.lock().take();
        let is_fresh = last.is_some_and(|end| end.elapsed() < LOOKUP_TO_OPEN);
        let is_unchanged_store =
            |source: &Arc<Source>| source.local().is_none() && source.check_after_read().is_ok();
        let is_stored = || match self.content() {
            Some(Content::Virtual(file)) => file.sources().iter().all(is_unchanged_store),
            _ => false,
        };
        if is_fresh && is_stored() {
            return false;
        }
        let is_outdated = self.is_outdated();
        // The next open must not rely on this check, which was made for an open and not for a
        // lookup.
        *self.last_current.lock() = None;
        is_outdated
    }

    /// Whether an earlier check found the proved content changed. Does not access the source.
    pub(crate) fn is_known_to_be_outdated(&self) -> bool {
        self.outdated.load(Ordering::SeqCst)
    }

    /// Whether it is generated text.
    pub(crate) fn is_text(&self) -> bool {
        matches!(self.content(), Some(Content::Text(_)))
    }

    /// Opens the file for reading. All open handles share the result, and `watcher` watches its
    /// sources while any handle is open. Also returns whether the pages that the kernel has cached
    /// are still valid.
    ///
    /// # Errors
    /// `Error::Changed` if another file is at its path.
    pub(crate) fn open(
        &self,
        watcher: &Arc<Watcher>,
        service: &Service,
        on_fault_storm: impl FnOnce() -> OnStorm,
    ) -> Result<(Arc<OpenFile>, bool)> {
        let own = self.file.as_ref().ok_or_else(|| Error::internal("a folder cannot be read"))?;
        // The lock is held during the open, so that simultaneous requests open and watch the file
        // only once.
        let mut shared = own.open.lock();
        let opened = match shared.upgrade() {
            Some(opened) => {
                self.renew(&opened, watcher, service)?;
                opened
            }
            None => {
                let file = open_file(&own.content, &service.cache, on_fault_storm)?;
                let current = self.hold(file, watcher, service)?;
                Arc::new(OpenFile::new(current))
            }
        };
        let current = opened.current();
        let mut unchanged = current.is_unchanged_once_open();
        if !unchanged && !self.follows() {
            let detail = "was changed while it was opened".to_owned();
            return Err(Error::changed(&self.path, detail));
        }
        if let OpenContent::Whole(file) = &current.file {
            let now = file.reader().sources()[0].version();
            unchanged &= own.last.lock().replace(now).is_none_or(|before| before == now);
        }
        *shared = Arc::downgrade(&opened);
        drop(shared);
        self.set_opened();
        Ok((opened, unchanged))
    }

    /// If the file follows its source and the source has changed, makes `opened` read the current
    /// content. Returns whether the source had changed. Accesses the source.
    ///
    /// # Errors
    /// Errors of the source.
    pub(crate) fn follow(
        &self,
        opened: &Arc<OpenFile>,
        watcher: &Arc<Watcher>,
        service: &Service,
    ) -> Result<bool> {
        let Some(file) = &self.file else { return Ok(false) };
        let _one_at_a_time = file.open.lock();
        self.renew(opened, watcher, service)
    }

    fn renew(&self, opened: &OpenFile, watcher: &Arc<Watcher>, service: &Service) -> Result<bool> {
        let before = opened.current();
        let OpenContent::Whole(file) = &before.file else { return Ok(false) };
        if !self.follows() || before.is_unchanged() {
            return Ok(false);
        }
        let source = file.reader().sources()[0].as_it_is_now()?;
        source.set_followed();
        self.set_attributes(&source.version());
        let file = OpenContent::Whole(service.cache.open(Reader::whole(source), None));
        let current = self.hold(file, watcher, service)?;
        opened.set_current(current);
        Ok(true)
    }

    /// Keeps the sources of `file` open and watched.
    fn hold(
        &self,
        file: OpenContent,
        watcher: &Arc<Watcher>,
        service: &Service,
    ) -> Result<Arc<Current>> {
        Current::hold(file, &self.path, &service.blocking, |sources| {
            watcher.watch(self.ino, sources, self.is_unread())
        })
    }

    /// The path of the file in the mount and the path of its folder, for the log.
    pub(crate) fn log_names(&self) -> (String, String) {
        let folder = self.path.parent().map(real_name).filter(|folder| !folder.is_empty());
        (real_name(&self.path), folder.unwrap_or_else(|| ".".to_owned()))
    }

    /// Records an open by the process and user of `caller`, and returns the recorder for its reads.
    /// `None` for generated text and for files that belong to no checkpoint.
    pub(crate) fn heat(&self, heat: &Heat, opener: Opener) -> Option<HandleHeat> {
        let own = self.file.as_ref()?;
        let file = match &own.content {
            Content::Virtual(file) => Some(file),
            Content::Whole { proved: Some(_), .. } => None,
            Content::Whole { proved: None, .. } | Content::Text(_) => return None,
        };
        heat.opened(self.ino, &self.path, &own.version, file, opener)
    }

    /// The state of the open file. `None` if no program has it open.
    pub(crate) fn opened(&self) -> Option<Arc<OpenFile>> {
        self.file.as_ref()?.open.lock().upgrade()
    }

    /// Whether it is a virtual file.
    pub(crate) fn is_virtual(&self) -> bool {
        matches!(self.content(), Some(Content::Virtual(_)))
    }
}

fn is_plain(content: &Content) -> bool {
    let Content::Whole { file, proved: None } = content else { return false };
    let name = file.name.to_string_lossy();
    names::weight_map_output(&name).is_none() && !name.ends_with(manifest::SUFFIX)
}

pub(crate) fn folder_node(tree: &Tree, id: FolderId) -> Node {
    let folder = tree.folder(id);
    let mut hash = Sha256::new();
    hash.update(b"folder");
    hash.update(folder.relative.as_os_str().as_encoded_bytes());
    let ino = if id == 0 { ROOT } else { ino_of(&hash.finalize()) };
    Node::new(ino, id, folder.relative.clone(), 4096, folder.newest(), None)
}

pub(crate) fn file_node(
    tree: &Tree,
    folder: FolderId,
    gate: Option<Arc<ChecksumGate>>,
    shown: MountEntry,
) -> Arc<Node> {
    let mut hash = Sha256::new();
    let path = tree.folder(folder).relative.join(&shown.name);
    hash.update(b"file");
    hash.update(path.as_os_str().as_encoded_bytes());
    let mut newest = None;
    let plain = is_plain(&shown.content);
    let mut add = |version: Version| {
        newest = newest.max(version.shown_time());
        let (file, content) = (version.file_words(), version.content_words());
        // A plain file must keep its inode number when it is written to, so only the identity of
        // the source file counts.
        let words = if plain { &file[..] } else { &content[..] };
        words.iter().for_each(|word| hash.update(word.to_le_bytes()));
    };
    let len = match &shown.content {
        Content::Virtual(file) => {
            file.sources().iter().for_each(|source| add(source.version()));
            // A checkpoint without a layout is refused, so this checkpoint has one.
            let summary = file.summary().ok();
            summary.inspect(|summary| hash.update(summary.header.0));
            summary.map_or(0, |summary| summary.len)
        }
        Content::Whole { file, proved } => {
            let version = proved.as_ref().map_or(file.version, |source| source.version());
            add(version);
            version.len
        }
        Content::Text(text) => {
            newest = Some(tree.folder(folder).newest());
            hash.update(text);
            text.len() as u64
        }
    };
    let digest = hash.finalize();
    let version = version_of(&digest);
    let file = Some(NodeFile::unopened(shown.content, version, gate));
    Arc::new(Node::new(ino_of(&digest), folder, path, len, newest.unwrap_or_default(), file))
}

/// Whether both nodes are the same file in the same version. The version covers path and content.
pub(crate) fn same_file(a: &Node, b: &Node) -> bool {
    let both = a.file.as_ref().zip(b.file.as_ref());
    both.is_some_and(|(a, b)| a.version == b.version)
}

/// Whether the bytes of both nodes come from files at the same paths.
pub(crate) fn same_place(a: &Node, b: &Node) -> bool {
    let Some(contents) = a.content().zip(b.content()) else { return false };
    match contents {
        (Content::Whole { file: a, .. }, Content::Whole { file: b, .. }) => a.path == b.path,
        (Content::Virtual(a), Content::Virtual(b)) => {
            let paths = |sources: &[Arc<Source>]| -> Vec<PathBuf> {
                sources.iter().map(|source| source.path().to_owned()).collect()
            };
            paths(a.sources()) == paths(b.sources())
        }
        _ => true,
    }
}

/// Copies the node with the next inode number, because another file has the number of `node`.
pub(crate) fn renumbered(node: &Node) -> Node {
    let version = node.listed_version().to_owned();
    numbered(node, node.ino.wrapping_add(1).max(ROOT + 1), version)
}

/// Copies the node with a new version. The bytes of a version may change although lengths and times
/// stay the same. If that was found, the kernel's pages and the assembled copies of the old version
/// must not be used for this node.
pub(crate) fn reversioned(node: &Node) -> Node {
    let mut hash = Sha256::new();
    hash.update(node.ino.to_le_bytes());
    if let Some(file) = &node.file {
        hash.update(&file.version);
        for source in file.content.sources() {
            for word in source.version().lasting().to_words() {
                hash.update(word.to_le_bytes());
            }
        }
    }
    let digest = hash.finalize();
    numbered(node, ino_of(&digest), version_of(&digest))
}

fn numbered(node: &Node, ino: u64, version: String) -> Node {
    let copy =
        |file: &NodeFile| NodeFile::unopened(file.content.clone(), version, file.gate.clone());
    Node {
        attributes: Mutex::new(*node.attributes.lock()),
        ..Node::new(ino, node.folder(), node.path.clone(), 0, (0, 0), node.file.as_ref().map(copy))
    }
}

/// The part of a digest that is used as the version, in hexadecimal.
fn version_of(digest: &[u8]) -> String {
    hex(&digest[8..24])
}

fn ino_of(digest: &[u8]) -> u64 {
    let bytes = digest.first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(bytes).max(ROOT + 1)
}

fn system_time(time: Time) -> SystemTime {
    let (seconds, nanoseconds) = time;
    let seconds_of = |s: i64| Duration::from_secs(s.unsigned_abs());
    let base = if seconds >= 0 {
        UNIX_EPOCH + seconds_of(seconds)
    } else {
        UNIX_EPOCH - seconds_of(seconds)
    };
    base + Duration::from_nanos(nanoseconds.unsigned_abs())
}
