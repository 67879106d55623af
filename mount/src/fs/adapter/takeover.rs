//! Inodes, lookups and open files of a mount, which one process hands over to the next.
//!
//! An inode number follows from the path and the content version. So a process that proves the same source has the
//! same numbers. Only facts that do not follow from the source are handed over: the number of the kernel's lookups
//! of each inode, the open handles, and the open files whose source may be gone.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::sys::stat::makedev;
use serde::{Deserialize, Serialize};
use tensorfs::internal::cache::CachedFile;
use tensorfs::internal::checkpoint::{Checkpoint, Content, FolderId, Tree};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mountinfo;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::source::Source;
use tensorfs::internal::sync::Mutex;
use tensorfs::internal::version::{QueueKey, Version};

use super::super::backing::Backing;
use super::super::inodes::carried::FileMark;
use super::super::node::Node;
use super::super::open_file::{OpenContent, OpenFile};
use super::adoption_queue::{AdoptionQueue, Devices, Turn};
use super::{FsState, Handle, TensorFs};
use crate::log;
use crate::serve::change_watcher::Forget;

/// Maximum number of descriptors that one mount hands over in addition to its connection. Reads of
/// an open file fail if its source is gone and its descriptor was left out because of this limit.
const FILES_MAX: usize = 200;

/// Maximum number of files that the warning about lost handles lists.
const LOST_NAMED_MAX: usize = 3;

/// Maximum size in bytes of the descriptions of open files.
const CONTENTS_MAX: usize = 64 << 20;

/// The state of a file system, without descriptors and contents.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct CarriedFs {
    next_handle: u64,
    sources: Vec<CarriedSource>,
    nodes: Vec<CarriedNode>,
    /// Handle and inode number.
    handles: Vec<(u64, u64)>,
    /// For each file that the kernel serves by passthrough, its inode number and the number of its
    /// registration.
    backings: Vec<(u64, u32)>,
}

/// A source file that programs have open.
#[derive(Debug, Deserialize, Serialize)]
struct CarriedSource {
    path: OsString,
    known: [u64; 14],
    /// Index of its descriptor in `Carried::files`.
    file: Option<usize>,
}

/// A file or folder that the kernel refers to.
#[derive(Debug, Deserialize, Serialize)]
struct CarriedNode {
    ino: u64,
    lookups: u64,
    path: OsString,
    len: u64,
    mtime: (i64, i64),
    version: String,
    opened: bool,
    outdated: bool,
    last: Option<[u64; 14]>,
    sources: Vec<usize>,
    /// How the bytes of an open file are made from its sources.
    content: Option<CarriedContent>,
}

#[derive(Debug, Deserialize, Serialize)]
enum CarriedContent {
    /// A virtual file: offset and length of the saved checkpoint in `Carried::contents`, the name of the file in
    /// the checkpoint, and the hash of its header.
    Virtual((usize, usize), String, String),
    /// A file of the source, and whether it was proved.
    Whole(bool),
    /// A generated text: offset and length in `Carried::contents`.
    Text((usize, usize)),
}

/// The state of a file system, with descriptors and contents.
#[derive(Debug, Default)]
pub(crate) struct Carried {
    pub(crate) facts: CarriedFs,
    /// Saved checkpoints and texts.
    pub(crate) contents: Vec<u8>,
    /// Descriptors of open source files.
    pub(crate) files: Vec<OwnedFd>,
}

/// The result of a takeover.
struct TakenUp {
    /// Number of open handles that were taken over.
    handles: usize,
    /// Number of handles whose content is gone. Their reads fail.
    lost: usize,
    /// Paths of some files with lost handles.
    lost_files: BTreeSet<PathBuf>,
}

impl TakenUp {
    /// Notes that `handles` handles of the file at `path` lost their content.
    fn lose(&mut self, path: &Path, handles: usize) {
        self.lost += handles;
        if self.lost_files.len() < LOST_NAMED_MAX {
            self.lost_files.insert(path.to_owned());
        }
    }

    /// The warning about lost handles, if there are any.
    fn warning(&self, mount: &str) -> Option<String> {
        let TakenUp { handles, lost, lost_files } = self;
        let files: Vec<String> = lost_files.iter().map(|path| shown_path(path)).collect();
        let all = handles + lost;
        (*lost > 0).then(|| {
            format!(
                "{mount}: {lost} of {all} open handles lost their content: their reads get errors; \
                 files: {}",
                files.join(", ")
            )
        })
    }
}

/// Collects the state to hand over.
#[derive(Default)]
struct Packer {
    carried: Carried,
    sources: HashMap<usize, usize>,
    /// Offset and length of each saved checkpoint. `None` for a checkpoint that cannot be saved.
    checkpoints: HashMap<usize, Option<(usize, usize)>>,
    /// The device queues of tensorfs mounts.
    mounts: HashSet<QueueKey>,
}

impl Packer {
    fn source(&mut self, source: &Arc<Source>) -> usize {
        let (carried, seen) = (&mut self.carried, self.sources.len());
        *self.sources.entry(Arc::as_ptr(source) as usize).or_insert_with(|| {
            let (path, known) = (source.path().into(), source.version().to_words());
            carried.facts.sources.push(CarriedSource { path, known, file: None });
            seen
        })
    }

    /// Adds the descriptor of an open source. A file on a tensorfs mount is left out, and the next
    /// process opens it by its path. The service manager polls the descriptors that it keeps, and a
    /// poll of such a file would wait for the process that serves that mount. The same restart may
    /// have stopped that process.
    fn file(&mut self, source: &Arc<Source>) {
        let index = self.source(source);
        let slot = &mut self.carried.facts.sources[index].file;
        if slot.is_none() && self.carried.files.len() < FILES_MAX {
            let is_stored = !self.mounts.contains(&source.queue_key());
            let open = source.local().filter(|_| is_stored).and_then(|local| local.open_file());
            if let Some(file) = open.and_then(|file| file.try_clone().ok()) {
                *slot = Some(self.carried.files.len());
                self.carried.files.push(file.into());
            }
        }
    }

    fn content(&mut self, bytes: &[u8]) -> Option<(usize, usize)> {
        let offset = self.carried.contents.len();
        if offset + bytes.len() > CONTENTS_MAX {
            return None;
        }
        self.carried.contents.extend_from_slice(bytes);
        Some((offset, bytes.len()))
    }

    /// Adds the facts in `mark` about a file of the previous process. This process has not listed
    /// that file since it took over the mount.
    fn mark(&mut self, ino: u64, mark: &FileMark) {
        let CarriedFs { sources, nodes, .. } = &mut self.carried.facts;
        let first = sources.len();
        sources.extend(mark.known.iter().map(|known| CarriedSource {
            path: OsString::new(),
            known: known.to_words(),
            file: None,
        }));
        nodes.push(CarriedNode {
            ino,
            lookups: mark.lookups,
            path: OsString::new(),
            len: 0,
            mtime: (0, 0),
            version: mark.version.clone(),
            opened: mark.opened,
            outdated: mark.outdated,
            last: mark.last.map(|last| last.to_words()),
            sources: (first..sources.len()).collect(),
            content: None,
        });
    }

    /// Describes the content of an open file, so that the next process can read it without the paths.
    fn describe(&mut self, node: &Node) -> Option<CarriedContent> {
        Some(match node.content()? {
            Content::Virtual(file) => {
                let checkpoint = file.checkpoint();
                let address = Arc::as_ptr(checkpoint) as usize;
                let place = match self.checkpoints.get(&address) {
                    Some(place) => *place,
                    None => {
                        let place = checkpoint.save().and_then(|bytes| self.content(&bytes));
                        self.checkpoints.insert(address, place);
                        place
                    }
                };
                let header = file.summary().ok()?.header.to_string();
                CarriedContent::Virtual(place?, file.spec().name.clone(), header)
            }
            Content::Whole { proved, .. } => CarriedContent::Whole(proved.is_some()),
            Content::Text(text) => CarriedContent::Text(self.content(text)?),
        })
    }
}

/// Whether a new process may fail to find the content of this open file at its path.
fn may_be_gone(node: &Node, opened: &OpenFile) -> bool {
    let moved = |source: &Arc<Source>| !source.may_block() && !source.is_at_path();
    node.listings.load(Ordering::Relaxed) == 0
        || node.is_known_to_be_outdated()
        || opened.current().file.sources().iter().any(moved)
}

impl TensorFs {
    /// Freezes lookups and handles, or ends the freeze. During the freeze, a request that would
    /// change lookups or handles is answered with ESTALE, which makes the kernel repeat that
    /// request.
    pub(crate) fn set_frozen(&self, frozen: bool) {
        *self.0.frozen.write() = frozen;
    }

    /// The state that the next process needs.
    pub(crate) fn carry(&self) -> Carried {
        let shared = &self.0;
        let mounts = mountinfo::ours()
            .unwrap_or_default()
            .into_iter()
            .map(|mount| QueueKey::Device(makedev(0, mount.minor.into())))
            .collect();
        let mut packer = Packer { mounts, ..Packer::default() };
        let handles: Vec<(u64, Arc<Handle>)> =
            shared.handles.read().iter().map(|(fh, handle)| (*fh, handle.clone())).collect();
        let mut open: HashMap<u64, Arc<Handle>> = HashMap::new();
        for (fh, handle) in handles {
            let ino = handle.node.ino;
            packer.carried.facts.handles.push((fh, ino));
            if let Some(backing) = &handle.backing {
                packer.carried.facts.backings.push((ino, backing.id()));
            }
            open.insert(ino, handle);
        }
        let facts = &mut packer.carried.facts;
        facts.next_handle = shared.next_handle.load(Ordering::Relaxed);
        facts.backings.sort_unstable();
        facts.backings.dedup();
        let mut known: HashMap<u64, Arc<Node>> =
            shared.nodes.known().into_iter().map(|node| (node.ino, node)).collect();
        known.extend(open.values().map(|handle| (handle.node.ino, handle.node.clone())));
        // The number of descriptors is limited, so the descriptors of files that may be gone come first.
        let mut nodes: Vec<_> = known.into_values().collect();
        let is_there = |node: &Arc<Node>| {
            open.get(&node.ino).is_none_or(|handle| !may_be_gone(node, &handle.opened))
        };
        nodes.sort_by_cached_key(|node| (is_there(node), node.ino));
        for node in nodes {
            let opened = open.get(&node.ino).map(|handle| handle.opened.current());
            let node = self.pack(&mut packer, &node, opened.as_ref().map(|now| &now.file));
            packer.carried.facts.nodes.push(node);
        }
        shared.nodes.each_mark(|ino, mark| packer.mark(ino, mark));
        packer.carried
    }

    fn pack(&self, packer: &mut Packer, node: &Node, open: Option<&OpenContent>) -> CarriedNode {
        let sources: Vec<Arc<Source>> = match open {
            Some(open) => open.sources().to_vec(),
            None => node.content().map_or_else(Vec::new, |content| content.sources().to_vec()),
        };
        if open.is_some() {
            sources.iter().for_each(|source| packer.file(source));
        }
        CarriedNode {
            ino: node.ino,
            lookups: node.lookups.load(Ordering::Relaxed),
            path: node.path.clone().into(),
            len: node.len(),
            mtime: node.mtime_parts(),
            version: node.listed_version().to_owned(),
            opened: !node.is_unread(),
            outdated: node.is_known_to_be_outdated(),
            last: node.last().map(|last| last.to_words()),
            sources: sources.iter().map(|source| packer.source(source)).collect(),
            content: open.and_then(|_| packer.describe(node)),
        }
    }

    /// Takes over the state of the previous process, before any request is read. Does not access the source:
    /// `Takeover::begin` proves the open files, and lookups prove the other files. `forget` makes the kernel drop
    /// its pages of an inode.
    pub(crate) fn take_up(&self, carried: Carried, forget: Forget) -> Takeover {
        let Carried { facts, contents, files } = carried;
        let shared = &self.0;
        shared.next_handle.store(facts.next_handle, Ordering::Relaxed);
        for carried in &facts.nodes {
            if carried.version.is_empty() {
                shared.nodes.know_folder(Path::new(&carried.path), carried.ino, carried.lookups);
            } else {
                shared.nodes.mark(carried.ino, mark_of(&facts, carried));
            }
        }
        let mut handles: HashMap<u64, Vec<u64>> = HashMap::new();
        facts.handles.iter().for_each(|(fh, ino)| handles.entry(*ino).or_default().push(*fh));
        let mut families: BTreeMap<FolderId, Vec<Adopted>> = BTreeMap::new();
        let mut unlisted = Vec::new();
        for (index, carried) in facts.nodes.iter().enumerate() {
            let Some(handles) = handles.remove(&carried.ino) else { continue };
            let path = Path::new(&carried.path);
            shared.adoptions.begin(carried.ino, path);
            let folder = path.parent().and_then(|parent| shared.nodes.folder_at(parent));
            let adopted = Adopted { index, ino: carried.ino, handles };
            match folder {
                Some(folder) => families.entry(folder).or_default().push(adopted),
                None => unlisted.push(adopted),
            }
        }
        let lost = handles.into_values().map(|handles| handles.len()).sum();
        let files = files.into_iter().map(|file| Some(File::from(file))).collect();
        let made = facts.sources.iter().map(|_| OnceLock::new()).collect();
        let taking = Taking {
            shared: shared.clone(),
            facts,
            contents,
            forget,
            made,
            files: Mutex::new(files),
            result: Mutex::new(TakenUp { handles: 0, lost, lost_files: BTreeSet::new() }),
        };
        Takeover { taking: Arc::new(taking), families, unlisted }
    }

    /// Waits until the proofs of all open files of the previous process have ended, at most for
    /// `limit`. Returns whether all proofs have ended.
    pub(crate) fn wait_for_adoptions(&self, limit: Duration) -> bool {
        let started = Instant::now();
        while !self.0.adoptions.are_over() {
            if started.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

/// A takeover whose open files are not proved yet.
pub(crate) struct Takeover {
    taking: Arc<Taking>,
    /// The open files by the folder that contains them.
    families: BTreeMap<FolderId, Vec<Adopted>>,
    /// Open files whose folder is gone.
    unlisted: Vec<Adopted>,
}

/// An open file of the previous process.
struct Adopted {
    /// The index of the file in `CarriedFs::nodes`.
    index: usize,
    ino: u64,
    handles: Vec<u64>,
}

impl Takeover {
    /// Starts the proofs of the open files. Each folder, and each file whose folder is gone, is proved on a thread
    /// of its own. Only a few proofs at a time access the same file systems. Requests for a file wait for its
    /// proof.
    pub(crate) fn begin(self) {
        let Takeover { taking, families, unlisted } = self;
        let (nodes, pool) = (taking.shared.nodes.clone(), taking.shared.service.blocking.clone());
        let (tree, queue) = (nodes.tree(), AdoptionQueue::new());
        for adopted in unlisted {
            let (place, devices) = (taking.path(&adopted), taking.devices(&adopted));
            let (taking, pool) = (taking.clone(), pool.clone());
            queue.add(devices, move |turn| {
                let family =
                    AdoptedFamily { taking, folder: None, files: vec![adopted], _turn: turn };
                pool.spawn_detached(&place, move || family.take());
            });
        }
        for (folder, files) in families {
            let place = taking.path(&files[0]);
            // The proof of a folder accesses its whole family.
            let family = tree.family(tree.family_of(folder)).into_iter();
            let devices = family.flat_map(|id| tree.devices(&tree.folder(id).path)).collect();
            let (taking, nodes, pool) = (taking.clone(), nodes.clone(), pool.clone());
            queue.add(devices, move |turn| {
                let family = AdoptedFamily { taking, folder: Some(folder), files, _turn: turn };
                // One thread proves the folder, and another one opens its sources. Requests for other files wait
                // for the first thread only.
                let then = pool.clone();
                nodes.when_listed(&pool, folder, move |_| {
                    then.spawn_detached(&place, move || family.take());
                });
            });
        }
    }
}

/// The open files of one folder, or one file whose folder is gone. The drop fails the requests for the files that
/// are still not proved.
struct AdoptedFamily {
    taking: Arc<Taking>,
    folder: Option<FolderId>,
    files: Vec<Adopted>,
    /// The drop of the turn starts other proofs.
    _turn: Turn,
}

impl AdoptedFamily {
    fn take(mut self) {
        while let Some(adopted) = self.files.pop() {
            let ino = adopted.ino;
            let place = self.taking.path(&adopted);
            let shared = self.taking.shared.clone();
            let _ends = Ends(|| shared.adoptions.end(ino));
            if self.taking.take(self.folder, adopted) || !shared.adoptions.go_on(ino) {
                continue;
            }
            // The kernel has to drop its old pages of the file, and this call waits for reads of
            // the file. So it runs on a thread of its own, and other files do not have to wait.
            let (counted, forget) = (shared.clone(), self.taking.forget.clone());
            let counts = Ends(move || counted.adoptions.count_end());
            shared.service.blocking.spawn_detached(&place, move || {
                let _counts = counts;
                forget(ino);
            });
        }
    }
}

impl Drop for AdoptedFamily {
    fn drop(&mut self) {
        for adopted in &self.files {
            let path = self.taking.path(adopted);
            self.taking.result.lock().lose(&path, adopted.handles.len());
            self.taking.shared.adoptions.end(adopted.ino);
        }
    }
}

/// Calls its function when it is dropped, also after a panic.
struct Ends<F: FnMut()>(F);

impl<F: FnMut()> Drop for Ends<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// The state of a takeover that runs.
struct Taking {
    shared: Arc<FsState>,
    facts: CarriedFs,
    contents: Vec<u8>,
    forget: Forget,
    /// The sources of files that no folder shows any more. Each source is opened only once. Opening may take long,
    /// so no lock is held during it.
    made: Vec<OnceLock<Arc<Source>>>,
    /// Descriptors of source files, until each is used.
    files: Mutex<Vec<Option<File>>>,
    result: Mutex<TakenUp>,
}

impl Drop for Taking {
    fn drop(&mut self) {
        let mount = log::mount().unwrap_or_default();
        if let Some(warning) = self.result.lock().warning(mount) {
            tracing::warn!("{warning}");
        }
    }
}

fn mark_of(facts: &CarriedFs, carried: &CarriedNode) -> FileMark {
    let known = carried.sources.iter().filter_map(|index| facts.sources.get(*index));
    FileMark {
        version: carried.version.clone(),
        lookups: carried.lookups,
        opened: carried.opened,
        outdated: carried.outdated,
        last: carried.last.map(|last| Version::from_words(&last)),
        known: known.map(|source| Version::from_words(&source.known)).collect(),
    }
}

impl Taking {
    /// Takes over one file. Returns whether the pages of the file that the kernel has cached are still valid. Accesses
    /// the source.
    fn take(&self, folder: Option<FolderId>, adopted: Adopted) -> bool {
        let shared = &self.shared;
        let carried = &self.facts.nodes[adopted.index];
        let same = |node: &Arc<Node>| {
            node.listed_version() == carried.version
                && !node.is_known_to_be_outdated()
                && node.path.as_os_str() == carried.path
        };
        let (node, opened, unchanged) = match shared.nodes.node(carried.ino).filter(same) {
            Some(node) => {
                let (opened, unchanged) = self.open(&node);
                (node, opened, unchanged)
            }
            None => match self.gone(folder, carried) {
                Some((node, opened)) => (node, Some(opened), true),
                None => {
                    self.result.lock().lose(&self.path(&adopted), adopted.handles.len());
                    return true;
                }
            },
        };
        self.take_handles(&node, opened, &adopted.handles);
        unchanged
    }

    /// The path of a file in the mount.
    fn path(&self, adopted: &Adopted) -> PathBuf {
        PathBuf::from(&self.facts.nodes[adopted.index].path)
    }

    /// The devices on which the sources of the file were.
    fn devices(&self, adopted: &Adopted) -> Devices {
        let carried = self.facts.nodes[adopted.index].sources.iter();
        let known = carried.filter_map(|index| self.facts.sources.get(*index));
        known.map(|source| Version::from_words(&source.known).queue_key()).collect()
    }

    /// The source with this index in `CarriedFs::sources`. Accesses the source.
    fn source(&self, index: usize) -> Option<Arc<Source>> {
        let carried = self.facts.sources.get(index)?;
        let file = || self.files.lock().get_mut(carried.file?)?.take();
        let adopt = || adopt_source(carried, file(), &self.shared.nodes.tree());
        Some(self.made.get(index)?.get_or_init(adopt).clone())
    }

    /// Opens a file of this process to which handles are taken over. Also returns whether the pages that the kernel
    /// has cached are still valid.
    fn open(&self, node: &Arc<Node>) -> (Option<Arc<OpenFile>>, bool) {
        let shared = &self.shared;
        let storm = || shared.store_queue.on_fault_storm(node.ino, node.gate().cloned());
        match node.open(&shared.watcher, &shared.service, storm) {
            Ok((opened, unchanged)) => (Some(opened), unchanged),
            Err(error) => {
                tracing::error!("{error}; what has it open gets errors");
                (None, false)
            }
        }
    }

    /// A file that no folder shows any more, with the content that the previous process had open.
    fn gone(
        &self,
        folder: Option<FolderId>,
        carried: &CarriedNode,
    ) -> Option<(Arc<Node>, Arc<OpenFile>)> {
        let shared = &self.shared;
        let text = |(offset, len): (usize, usize)| self.contents.get(offset..)?.get(..len);
        let cached =
            |reader, storm| -> Arc<CachedFile> { shared.service.cache.open(reader, storm) };
        let path = PathBuf::from(&carried.path);
        // The bytes of this file cannot be compared with checksums, so with `verify=read` the file is lost, unless it
        // is a generated text.
        let unchecked = shared.service.checker.is_some();
        let (content, open) = match carried.content.as_ref()? {
            CarriedContent::Text(place) => {
                let text: Arc<[u8]> = text(*place)?.into();
                (Content::Text(text.clone()), OpenContent::Text(text))
            }
            _ if unchecked => return None,
            CarriedContent::Virtual(place, name, header) => {
                let sources = carried
                    .sources
                    .iter()
                    .map(|index| self.source(*index))
                    .collect::<Option<Vec<_>>>()?;
                let directory = sources
                    .first()
                    .and_then(|source| source.path().parent())
                    .unwrap_or(Path::new("/"))
                    .to_owned();
                let tree = shared.nodes.tree();
                let view = &tree.options_at(&path).view;
                let checkpoint = Checkpoint::restore(text(*place)?, &directory, sources, view)?;
                let file = checkpoint
                    .virtual_files()
                    .find(|file| file.spec().name == *name)
                    .unwrap_or_else(|| checkpoint.single_file());
                let reader = Reader::open(&file).ok()?;
                // A different version of the program may lay out the same checkpoint differently.
                let found = file.summary().ok()?.header.to_string();
                if reader.len() != carried.len || found != *header {
                    let path = shown_path(&path);
                    tracing::error!(
                        "{path}: this version lays out the file in another way (header {found}, and \
                         {header} before); what has it open gets errors"
                    );
                    return None;
                }
                let storm = shared.store_queue.on_fault_storm(carried.ino, None);
                (Content::Virtual(file), OpenContent::Virtual(cached(reader, Some(storm))))
            }
            CarriedContent::Whole(proved) => {
                let source = self.source(*carried.sources.first()?)?;
                if !proved {
                    source.set_followed();
                }
                let file = tensorfs::internal::checkpoint::File {
                    name: path.file_name()?.to_owned(),
                    store: shared.nodes.tree().store_of(source.path()),
                    path: source.path().to_owned(),
                    version: source.version(),
                };
                let open = OpenContent::Whole(cached(Reader::whole(source.clone()), None));
                (Content::Whole { file, proved: proved.then_some(source) }, open)
            }
        };
        let folder = folder.unwrap_or_default();
        let version = carried.version.clone();
        let (ino, len, mtime) = (carried.ino, carried.len, carried.mtime);
        let node = Arc::new(Node::carried(ino, folder, path, len, mtime, version, content));
        let opened = node
            .open_with(open, &shared.watcher, &shared.service)
            .map_err(|error| tracing::error!("{error}; what has it open gets errors"))
            .ok()?;
        shared.nodes.insert_carried(node.clone());
        Some((node, opened))
    }

    fn take_handles(&self, node: &Arc<Node>, opened: Option<Arc<OpenFile>>, fhs: &[u64]) {
        let shared = &self.shared;
        let id = self.facts.backings.iter().find(|(ino, _)| *ino == node.ino).map(|(_, id)| *id);
        let backing = id.map(|id| Arc::new(Backing::adopted(&shared.connection, id)));
        let opened = match (opened, &backing) {
            (Some(opened), _) => opened,
            // The kernel serves the reads by passthrough, so the daemon needs no content for this
            // handle.
            (None, Some(_)) => {
                let empty = OpenContent::Text(Arc::from([]));
                let Ok(opened) = node.open_with(empty, &shared.watcher, &shared.service) else {
                    return;
                };
                opened
            }
            (None, None) => {
                self.result.lock().lose(&node.path, fhs.len());
                return;
            }
        };
        for fh in fhs {
            let mut serving = shared.serving.lock();
            match &backing {
                Some(backing) => serving.opened_by_kernel(node.ino, backing),
                None => serving.opened_by_us(node.ino),
            }
            drop(serving);
            shared.service.opened(node.ino, &node.path, opened.current().file.cached());
            let (node, opened, backing) = (node.clone(), opened.clone(), backing.clone());
            // The program that opened the handle is not known any more, so `heat` does not count
            // its reads.
            let handle = Handle { node, opened, backing, heat: None };
            shared.handles.write().insert(*fh, Arc::new(handle));
        }
        self.result.lock().handles += fhs.len();
    }
}

/// The source that the previous process had open, with its descriptor if that was handed over.
fn adopt_source(carried: &CarriedSource, file: Option<File>, tree: &Tree) -> Arc<Source> {
    let (path, known) = (Path::new(&carried.path), Version::from_words(&carried.known));
    match file {
        Some(file) => Source::adopted(path, known, file),
        None => tree.store_of(path).closed(path, known),
    }
}
