//! The FUSE adapter: translate, call, reply.
//!
//! No handler waits for something that other requests can use up: a folder that has to be
//! proved is proved on a thread of its own and answered from there. A panic in a handler is
//! answered with EIO and does not end the thread.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use fuser::{
    BackingId, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyOpen, ReplyStatfs,
    ReplyXattr, Request,
};
use tensorfs::Error;
use tensorfs::checkpoint::Content;

use crate::access;
use crate::nodes::{Entry, Node, NodeKind, Nodes, OpenFile};
use crate::watch::Watcher;

/// How long the kernel keeps names and attributes: files of the source may be replaced.
const TTL: Duration = Duration::from_secs(1);

/// Requests that the kernel keeps in flight for one mount; its default of 12 starves readahead.
const MAX_BACKGROUND: u16 = 128;

/// Extended attribute with the source of a file.
pub(crate) const XATTR_SOURCE: &str = "user.tensorfs.source";

/// Extended attribute with the version of a file's content.
pub(crate) const XATTR_VERSION: &str = "user.tensorfs.version";

/// What the files of a mount have in common.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits taken away.
    pub umask: u32,
    /// Whether the kernel may serve whole files by itself.
    pub passthrough: bool,
    /// The view as JSON, for `user.tensorfs.source`.
    pub view: serde_json::Value,
    /// The source.
    pub source: PathBuf,
}

/// An open file.
struct Handle {
    file: OpenFile,
    /// Kept while the kernel serves the file by itself.
    _backing: Option<Arc<BackingId>>,
}

/// How the kernel serves an inode. It allows one way at a time, so the first open decides.
enum Serving {
    ByKernel(Weak<BackingId>),
    ByUs,
}

/// The file system of one mount.
pub(crate) struct TensorFs {
    nodes: Arc<Nodes>,
    common: Common,
    watcher: Arc<Watcher>,
    passthrough: AtomicBool,
    handles: RwLock<HashMap<u64, Arc<Handle>>>,
    next_handle: AtomicU64,
    serving: Mutex<HashMap<u64, Serving>>,
}

thread_local! {
    /// The reply of the last read on this thread, kept to be used again.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl TensorFs {
    /// A file system that shows `nodes`.
    pub(crate) fn new(nodes: Arc<Nodes>, common: Common, watcher: Arc<Watcher>) -> TensorFs {
        TensorFs {
            nodes,
            passthrough: AtomicBool::new(false),
            common,
            watcher,
            handles: RwLock::new(HashMap::new()),
            next_handle: AtomicU64::new(1),
            serving: Mutex::new(HashMap::new()),
        }
    }

    fn handle(&self, file: OpenFile, backing: Option<Arc<BackingId>>) -> FileHandle {
        let fh = self.next_handle.fetch_add(1, Ordering::Relaxed);
        let handle = Arc::new(Handle { file, _backing: backing });
        self.handles.write().unwrap_or_else(PoisonError::into_inner).insert(fh, handle);
        FileHandle(fh)
    }

    fn open_file(&self, ino: u64, reply: ReplyOpen) {
        let Some(node) = self.nodes.node(ino) else { return reply.error(Errno::ESTALE) };
        // ESTALE makes the kernel look the name up again, which finds the new file.
        if node.is_replaced() {
            return reply.error(Errno::ESTALE);
        }
        let file = match node.open() {
            Ok(file) => file,
            Err(Error::Changed { .. }) => return reply.error(Errno::ESTALE),
            Err(error) => return reply.error(logged(&error)),
        };
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        let by_kernel = match (&file, serving.get(&ino)) {
            (OpenFile::Whole(_), Some(Serving::ByKernel(backing))) => match backing.upgrade() {
                Some(backing) => Some(backing),
                None => self.backing(&file, &reply),
            },
            (OpenFile::Whole(_), None) => self.backing(&file, &reply),
            _ => None,
        };
        match by_kernel {
            Some(backing) => {
                serving.insert(ino, Serving::ByKernel(Arc::downgrade(&backing)));
                let fh = self.handle(file, Some(backing.clone()));
                reply.opened_passthrough(fh, FopenFlags::empty(), &backing);
            }
            None => {
                serving.insert(ino, Serving::ByUs);
                self.watcher.watch(ino, file.sources());
                let fh = self.handle(file, None);
                reply.opened(fh, FopenFlags::FOPEN_KEEP_CACHE);
            }
        }
    }

    /// Registers a whole file with the kernel, where it takes files.
    fn backing(&self, file: &OpenFile, reply: &ReplyOpen) -> Option<Arc<BackingId>> {
        let OpenFile::Whole(source) = file else { return None };
        // An empty file has nothing to serve.
        if !self.passthrough.load(Ordering::Relaxed) || source.is_empty() {
            return None;
        }
        match reply.open_backing(source.file().ok()?) {
            Ok(backing) => Some(Arc::new(backing)),
            Err(e) => {
                if self.passthrough.swap(false, Ordering::Relaxed) {
                    tracing::warn!("the kernel does not serve whole files by itself here: {e}");
                }
                None
            }
        }
    }

    fn read_file(&self, fh: u64, offset: u64, size: u32, reply: ReplyData) {
        let handles = self.handles.read().unwrap_or_else(PoisonError::into_inner);
        let Some(handle) = handles.get(&fh).cloned() else { return reply.error(Errno::EBADF) };
        drop(handles);
        BUFFER.with_borrow_mut(|buffer| {
            if buffer.len() < size as usize {
                buffer.resize(size as usize, 0);
            }
            match handle.file.read_at(offset, &mut buffer[..size as usize]) {
                Ok(len) => reply.data(&buffer[..len]),
                Err(error) => reply.error(logged_as_eio(&error)),
            }
        });
    }

    fn source_xattr(&self, node: &Node) -> String {
        let mut folder = self.nodes.tree().folders[node.folder].path.clone();
        let mut member = None;
        match &node.kind {
            NodeKind::Folder => {
                let tree = self.nodes.tree();
                if tree.only.is_some() {
                    folder = tree.source.clone();
                }
            }
            NodeKind::File { content: Content::Virtual(checkpoint), .. } => {
                member = checkpoint.catalog().shards.first().map(|shard| shard.name.clone());
            }
            NodeKind::File { content: Content::Whole { file, .. }, .. } => {
                member = file.name.to_str().map(str::to_owned);
            }
            NodeKind::File { content: Content::Text(_), .. } => {}
        }
        let view = &self.common.view;
        serde_json::json!({ "source": folder, "file": member, "view": view }).to_string()
    }

    /// The extended attributes of `node` that the caller may see.
    fn xattrs(&self, req: &Request, node: &Node) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        let folder = self.nodes.tree().folders[node.folder].path.clone();
        if access::may_read(&folder, req.uid(), req.gid()) {
            found.push((XATTR_SOURCE, self.source_xattr(node)));
        }
        if let NodeKind::File { version, .. } = &node.kind {
            found.push((XATTR_VERSION, version.clone()));
        }
        found
    }
}

/// What a handler needs to reply from another thread.
fn attr_of(common: &Common, node: &Node) -> FileAttr {
    let (kind, bits) = match node.kind {
        NodeKind::Folder => (FileType::Directory, 0o555),
        NodeKind::File { .. } => (FileType::RegularFile, 0o444),
    };
    FileAttr {
        ino: INodeNo(node.ino),
        size: node.len,
        blocks: node.len.div_ceil(512),
        atime: node.mtime,
        mtime: node.mtime,
        ctime: node.mtime,
        crtime: node.mtime,
        kind,
        perm: (bits & !common.umask) as u16,
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid: common.uid,
        gid: common.gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// The errno of a failed operation, after a line in the log.
fn logged(error: &Error) -> Errno {
    tracing::error!("{error}");
    match error {
        Error::Io { source, .. } => source.raw_os_error().map_or(Errno::EIO, Errno::from_i32),
        Error::Refused { .. } | Error::Changed { .. } => Errno::EIO,
        Error::Usage { .. } => Errno::EINVAL,
    }
}

/// A read fails with EIO whatever the reason; a change was logged when it was first seen.
fn logged_as_eio(error: &Error) -> Errno {
    match error {
        Error::Changed { .. } => tracing::debug!("{error}"),
        Error::Io { .. } | Error::Refused { .. } | Error::Usage { .. } => {
            tracing::error!("{error}");
        }
    }
    Errno::EIO
}

/// Runs a handler; a panic drops its reply, which answers EIO.
fn guarded(handler: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(handler)).is_err() {
        tracing::error!("a request failed by a bug in tensorfs and was answered with EIO");
    }
}

fn reply_entry(common: &Common, node: Option<&Node>, reply: ReplyEntry) {
    match node {
        Some(node) => reply.entry(&TTL, &attr_of(common, node), Generation(0)),
        None => reply.error(Errno::ENOENT),
    }
}

fn reply_xattr(value: Option<&[u8]>, size: u32, reply: ReplyXattr) {
    match value {
        None => reply.error(Errno::NO_XATTR),
        Some(value) if size == 0 => reply.size(value.len() as u32),
        Some(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Some(value) => reply.data(value),
    }
}

impl Filesystem for TensorFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ];
        for flag in wanted {
            // An older kernel does without.
            let _ = config.add_capabilities(flag);
        }
        let _ = config.set_max_background(MAX_BACKGROUND);
        if self.common.passthrough {
            // Depth 1: the files lie on a disk file system, and an overlay may lie on us.
            let can = config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
                && config.set_max_stack_depth(1).is_ok();
            self.passthrough.store(can, Ordering::Relaxed);
            if !can {
                tracing::info!("this kernel cannot serve whole files by itself");
            }
        }
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        guarded(|| {
            let Some(node) = self.nodes.node(parent.0) else { return reply.error(Errno::ESTALE) };
            let (folder, name) = (node.folder, name.to_owned());
            let common = self.common.clone();
            let nodes = self.nodes.clone();
            self.nodes.when_listed(folder, move |known| match known.entry(folder, &name) {
                Entry::Found(node) => reply_entry(&common, Some(&node), reply),
                Entry::Absent => reply_entry(&common, None, reply),
                Entry::Stale => {
                    // Proving a folder takes time, which no other request should wait for.
                    std::thread::spawn(move || {
                        guarded(|| {
                            let node = nodes.fresh_entry(folder, &name);
                            reply_entry(&common, node.as_deref(), reply);
                        });
                    });
                }
            });
        });
    }

    fn forget(&self, _req: &Request, _ino: INodeNo, _nlookup: u64) {}

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        guarded(|| match self.nodes.node(ino.0) {
            Some(node) => reply.attr(&TTL, &attr_of(&self.common, &node)),
            None => reply.error(Errno::ESTALE),
        });
    }

    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        guarded(|| self.open_file(ino.0, reply));
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        guarded(|| self.read_file(fh.0, offset, size, reply));
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Nothing is written, so the kernel need not ask again.
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        // Programs ask every file whether it is a terminal.
        reply.error(Errno::ENOTTY);
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        guarded(|| {
            self.handles.write().unwrap_or_else(PoisonError::into_inner).remove(&fh.0);
            reply.ok();
        });
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        guarded(|| {
            let Some(node) = self.nodes.node(ino.0) else { return reply.error(Errno::ESTALE) };
            let common = self.common.clone();
            self.nodes.when_listed(node.folder, move |nodes| {
                for (at, name, node) in entries(nodes, &node, offset) {
                    let kind = attr_of(&common, &node).kind;
                    if reply.add(INodeNo(node.ino), at, kind, name) {
                        break;
                    }
                }
                reply.ok();
            });
        });
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        guarded(|| {
            let Some(node) = self.nodes.node(ino.0) else { return reply.error(Errno::ESTALE) };
            let common = self.common.clone();
            self.nodes.when_listed(node.folder, move |nodes| {
                for (at, name, node) in entries(nodes, &node, offset) {
                    let attr = attr_of(&common, &node);
                    if reply.add(attr.ino, at, name, &TTL, &attr, Generation(0)) {
                        break;
                    }
                }
                reply.ok();
            });
        });
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        guarded(|| match nix::sys::statvfs::statvfs(&self.common.source) {
            Ok(fs) => {
                // Nothing can be written, so nothing is free.
                let frsize = fs.fragment_size();
                reply.statfs(fs.blocks(), 0, 0, fs.files(), 0, 4096, 255, frsize as u32);
            }
            Err(_) => reply.statfs(0, 0, 0, 0, 0, 4096, 255, 4096),
        });
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        guarded(|| {
            let Some(node) = self.nodes.node(ino.0) else { return reply.error(Errno::ESTALE) };
            let found = self.xattrs(req, &node);
            let value = found.iter().find(|(key, _)| name == *key).map(|(_, v)| v.as_bytes());
            reply_xattr(value, size, reply);
        });
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        guarded(|| {
            let Some(node) = self.nodes.node(ino.0) else { return reply.error(Errno::ESTALE) };
            let found = self.xattrs(req, &node);
            let names: String = found.iter().map(|(key, _)| format!("{key}\0")).collect();
            reply_xattr(Some(names.as_bytes()), size, reply);
        });
    }
}

/// The entries of `folder` from position `offset` on, each with the position after it.
fn entries(
    nodes: &Nodes,
    folder: &Arc<Node>,
    offset: u64,
) -> impl Iterator<Item = (u64, OsString, Arc<Node>)> {
    let listing = nodes.listing(folder.folder).unwrap_or_default();
    let tree = nodes.tree();
    let parent = tree.folders[folder.folder].parent.unwrap_or_default();
    let dots = [(OsString::from("."), folder.clone()), ("..".into(), nodes.folder(parent))];
    (offset..).map_while(move |at| {
        let (name, node) = match dots.get(at as usize) {
            Some(dot) => dot.clone(),
            None => listing.get(at as usize - dots.len())?.clone(),
        };
        Some((at + 1, name, node))
    })
}
