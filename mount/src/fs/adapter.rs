//! The FUSE adapter: translates the kernel's requests to calls, and the results of the calls to replies.
//!
//! No handler waits for the source. Another thread answers a request that accesses the source, with EIO if the
//! source takes too long. A panic in a handler is answered with EIO and does not end the thread.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fuser::{
    Errno, FileHandle, Filesystem, Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};
use tensorfs::Error;
use tensorfs::internal::mount_origin::XATTR_LIMITED;
use tensorfs::internal::sync::{Mutex, RwLock};
use tensorfs::internal::version::Version;
use tracing::{Span, trace_span};

use super::access::Caller;
use super::attributes::{self, Common};
use super::backing::Backing;
use super::entries::entries;
use super::inodes::{NameEntry, Nodes};
use super::node::Node;
use super::open_file::{OpenContent, OpenFile};
use super::open_mode::OpenModes;
use super::replies::{
    KnownAttr, ReplyFromListing, TTL, Timed, attr_of, logged, logged_as_eio, reply_xattr,
};
use crate::serve::blocking::{Fail, PendingReply, current_span, guarded, offload};
use crate::serve::change_watcher::Watcher;
use crate::serve::heat::{HandleHeat, Opener};
use crate::serve::kernel::{Feature, Init, MAX_REQUEST};
use crate::serve::page_cache_store::StoreQueue;
use crate::serve::requests::Operation;
use crate::serve::service::Service;

/// Maximum number of source files that getattr requests check at the same time.
const LOOKS_MAX: usize = 8;

/// Maximum number of background requests in flight for one mount. The kernel's default of 12 is too small for
/// readahead.
const MAX_BACKGROUND: u16 = 128;

/// Number of background requests in flight at which the kernel stops reading ahead.
const CONGESTION: u16 = 96;

mod adopting;
mod adoption_queue;
mod opening;
mod passthrough;
pub(crate) mod takeover;

use adopting::Adoptions;

/// One of the `LOOKS_MAX` slots for checks of the source. The drop frees the slot.
struct CheckSlot(Arc<FsState>);

impl CheckSlot {
    fn begin(shared: &Arc<FsState>) -> Option<CheckSlot> {
        let looking = CheckSlot(shared.clone());
        (shared.looks.fetch_add(1, Ordering::Relaxed) < LOOKS_MAX).then_some(looking)
    }
}

impl Drop for CheckSlot {
    fn drop(&mut self) {
        self.0.looks.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An open file.
struct Handle {
    node: Arc<Node>,
    opened: Arc<OpenFile>,
    /// The registration of the file with the kernel, while the kernel serves reads by passthrough.
    backing: Option<Arc<Backing>>,
    heat: Option<HandleHeat>,
}

/// The file system of one mount. Clones share it.
#[derive(Clone)]
pub(crate) struct TensorFs(Arc<FsState>);

/// State of the file system, shared by handlers and the threads that answer for them.
struct FsState {
    nodes: Arc<Nodes>,
    common: Arc<Common>,
    watcher: Arc<Watcher>,
    service: Arc<Service>,
    store_queue: StoreQueue,
    passthrough: AtomicBool,
    handles: RwLock<HashMap<u64, Arc<Handle>>>,
    next_handle: AtomicU64,
    serving: Mutex<OpenModes<Backing>>,
    /// The connection to the kernel.
    connection: Arc<OwnedFd>,
    adoptions: Adoptions,
    /// Whether another process takes over this mount. Lookups and handles must not change then.
    frozen: RwLock<bool>,
    /// Whether a thread is checking all open sources, because a read found that one of them changed.
    sweeping: AtomicBool,
    /// Number of source files that getattr requests are checking now.
    looks: AtomicUsize,
}

impl TensorFs {
    /// A file system that shows `nodes`.
    pub(crate) fn new(
        nodes: Arc<Nodes>,
        common: Arc<Common>,
        watcher: Arc<Watcher>,
        service: Arc<Service>,
        store_queue: StoreQueue,
        connection: Arc<OwnedFd>,
    ) -> TensorFs {
        TensorFs(Arc::new(FsState {
            nodes,
            common,
            watcher,
            service,
            store_queue,
            passthrough: AtomicBool::new(false),
            handles: RwLock::new(HashMap::new()),
            next_handle: AtomicU64::new(1),
            serving: Mutex::default(),
            connection,
            adoptions: Adoptions::default(),
            frozen: RwLock::new(false),
            sweeping: AtomicBool::new(false),
            looks: AtomicUsize::new(0),
        }))
    }
}

impl FsState {
    /// Starts the timer of a request.
    fn timed<R>(&self, operation: Operation, reply: R) -> Timed<R> {
        Timed { reply, timer: self.service.requests.asked(operation) }
    }

    fn handle(
        &self,
        node: Arc<Node>,
        opened: Arc<OpenFile>,
        backing: Option<Arc<Backing>>,
        opener: Opener,
    ) -> FileHandle {
        self.service.opened(node.ino, &node.path, opened.current().file.cached());
        let fh = self.next_handle.fetch_add(1, Ordering::Relaxed);
        let (heat, counters) = (node.heat(&self.service.heat, opener), &self.service.counters);
        if backing.is_some() { &counters.opens_passthrough } else { &counters.opens }.add(1);
        let handle = Arc::new(Handle { node, opened, backing, heat });
        self.handles.write().insert(fh, handle);
        FileHandle(fh)
    }

    fn read_file(
        self: &Arc<Self>,
        ino: u64,
        fh: u64,
        offset: u64,
        size: u32,
        reply: Timed<ReplyData>,
    ) {
        let handles = self.handles.read();
        // A handle that could not be taken over from the previous process is not in the table.
        let Some(handle) = handles.get(&fh).cloned() else { return reply.error(Errno::EIO) };
        drop(handles);
        if handle.node.ino != ino {
            // Handle numbers of the previous process may be in use here for other files.
            return reply.error(Errno::EIO);
        }
        let opened = handle.opened.current();
        let file = match &opened.file {
            OpenContent::Virtual(file) | OpenContent::Whole(file) => file.clone(),
            OpenContent::Text(text) => {
                let start = offset.min(text.len() as u64) as usize;
                let end = (start + size as usize).min(text.len());
                return reply.ok().data(&text[start..end]);
            }
        };
        let range = offset..offset.saturating_add(u64::from(size));
        let follows = handle.node.follows();
        if follows && opened.may_have_grown(&range) {
            return self.read_past_cache(handle, range, reply);
        }
        let (shared, gate) = (self.clone(), handle.node.gate().cloned());
        let wanted = range.clone();
        let span = current_span();
        let asked = (!span.is_disabled()).then(Instant::now);
        let unanswered = self.service.blocking.in_flight().begin();
        let answer = move |outcome: Result<&[u8], &Error>| match outcome {
            Ok(bytes) => {
                if let Some(asked) = asked {
                    let waited_us = asked.elapsed().as_micros() as u64;
                    tracing::trace!(parent: &span, waited_us, "answered");
                }
                reply.ok().data(bytes);
                drop(unanswered);
                if let Some(heat) = &handle.heat {
                    heat.read(wanted.start..wanted.start + bytes.len() as u64);
                }
                if let OpenContent::Virtual(file) = &opened.file {
                    let version = handle.node.listed_version();
                    shared.service.read_by_us(version, file, Some(bytes.len()));
                }
            }
            Err(Error::Changed { .. }) if follows => shared.read_past_cache(handle, wanted, reply),
            Err(error) => {
                reply.error(logged_as_eio(&handle.node, error));
                drop(unanswered);
                if matches!(error, Error::Changed { .. }) {
                    shared.sweep();
                }
            }
        };
        self.service.read(gate.as_ref(), &file, fh, range, Box::new(answer));
    }

    /// Reads current bytes past the cache. The file follows its source, and the source has changed or may have changed.
    fn read_past_cache(
        self: &Arc<Self>,
        handle: Arc<Handle>,
        range: Range<u64>,
        reply: Timed<ReplyData>,
    ) {
        let pending = self.service.blocking.pending(&handle.node.path, reply);
        let shared = self.clone();
        self.service.blocking.spawn(pending, move |pending| {
            let read = || {
                let (watcher, service) = (&shared.watcher, &shared.service);
                let changed = handle.node.follow(&handle.opened, watcher, service)?;
                Ok((handle.opened.current().read_now(&range)?, changed))
            };
            let outcome = read();
            let Some(reply) = pending.take() else { return };
            match outcome {
                Ok((bytes, changed)) => {
                    reply.ok().data(&bytes);
                    // `forget` waits until the kernel has this answer, so the answer is sent first.
                    if changed {
                        shared.watcher.forget(handle.node.ino);
                    }
                }
                Err(error) => reply.error(logged(Operation::Read, &handle.node, &error)),
            }
        });
    }

    /// Makes the kernel drop its cached pages of changed sources. This runs on a thread of its own, because it
    /// waits for reads that the calling thread may have to answer.
    fn sweep(self: &Arc<Self>) {
        if !self.sweeping.swap(true, Ordering::Relaxed) {
            let shared = self.clone();
            let started = offload(move || {
                guarded(|| shared.watcher.sweep());
                shared.sweeping.store(false, Ordering::Relaxed);
            });
            if !started {
                self.sweeping.store(false, Ordering::Relaxed);
            }
        }
    }

    /// The current version of the source of a file that follows its source. If the node is open, it
    /// is the version of the open source file, and otherwise the version of the file that is now at
    /// the source path.
    fn look(&self, node: &Node, fh: Option<FileHandle>) -> Option<Version> {
        let handles = self.handles.read();
        let handle = fh.and_then(|fh| handles.get(&fh.0)).cloned();
        drop(handles);
        let opened = handle.map(|handle| handle.opened.clone()).or_else(|| node.opened());
        match opened {
            Some(opened) => opened.current().file.sources().first()?.look().ok(),
            None => node.look(),
        }
    }

    /// Calls `answer` once the folder `node` is listed. At offset 0 the folder is first checked for changes.
    fn answer_listed<R>(
        self: Arc<Self>,
        node: Arc<Node>,
        offset: u64,
        reply: Timed<R>,
        answer: impl FnOnce(Timed<R>) + Send + 'static,
    ) where
        Timed<R>: Fail,
    {
        let (folder, nodes) = (node.folder(), self.nodes.clone());
        let known = ReplyFromListing::new(reply, move |reply: Timed<R>, late| {
            if late && nodes.listing(folder).is_none() { reply.fail() } else { answer(reply) }
        });
        let pool = self.service.blocking.clone();
        let pending = pool.pending(&node.path, known);
        self.nodes.clone().when_listed(&pool.clone(), folder, move |_| {
            let give = |pending: PendingReply<ReplyFromListing<Timed<R>>>| {
                pending.take().into_iter().for_each(ReplyFromListing::give);
            };
            // Stalled folders must not take all threads. If `LOOKS_MAX` checks are running already, the answer is the
            // listing in memory.
            let looking = if offset == 0 { CheckSlot::begin(&self) } else { None };
            let Some(looking) = looking else { return give(pending) };
            pool.spawn(pending, move |pending| {
                self.nodes.check_family(folder);
                drop(looking);
                give(pending);
            });
        });
    }

    fn reply_entry(&self, node: Option<&Node>, caller: &Caller, reply: Timed<ReplyEntry>) {
        match node.filter(|node| self.may_see(node, caller)) {
            Some(node) => {
                let frozen = self.frozen.read();
                if *frozen {
                    // The kernel repeats the lookup, and the process that takes over answers it.
                    return reply.error(Errno::ESTALE);
                }
                self.nodes.looked_up(node);
                reply.ok().entry(&ttl_of(node), &attr_of(&self.common, node), Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    /// Whether the caller may see `node` by the rules of the mount. The kernel has already checked owner, group and
    /// mode of the node. Does not access the source.
    fn may_see(&self, node: &Node, caller: &Caller) -> bool {
        let access = node.access();
        access.map_or(!self.nodes.lacks_access(node), |access| caller.may_see(&access))
    }

    /// Whether the caller may list the folder `node` by the rules of the mount. Does not access the source.
    fn may_list(&self, node: &Node, caller: &Caller) -> bool {
        let access = node.access();
        access.map_or(!self.nodes.lacks_access(node), |access| caller.may_list(&access))
    }

    /// Calls `then` with the extended attributes that the caller may see.
    fn ask_xattrs(
        self: &Arc<Self>,
        req: &Request,
        ino: INodeNo,
        reply: ReplyXattr,
        then: impl FnOnce(&[(&'static str, String)], Timed<ReplyXattr>) + Send + 'static,
    ) {
        let reply = self.timed(Operation::Xattr, reply);
        let caller = caller_of(req);
        let ask = move |shared: Arc<FsState>, reply: Timed<ReplyXattr>| {
            let Some(node) = shared.nodes.node(ino.0) else { return reply.error(Errno::ESTALE) };
            let pool = shared.service.blocking.clone();
            let pending = pool.pending(&node.path, reply);
            pool.spawn(pending, move |pending| {
                shared.nodes.check_family(node.folder());
                let mut found = attributes::of(&shared.nodes, &node, &caller);
                if shared.may_see(&node, &caller) {
                    found.extend(attributes::tail_of(&shared.nodes, &node));
                }
                if let Some(reply) = pending.take() {
                    then(&found, reply);
                }
            });
        };
        traced(trace_span!("xattr", ino = ino.0), || self.when_adopted(ino.0, reply, ask));
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
        let granted = wanted.map(|flag| config.add_capabilities(flag).is_ok());
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(CONGESTION);
        // The limit of a request holds for reads and writes. The kernel may allow more.
        let _ = config.set_max_write(MAX_REQUEST);
        let passthrough = self.0.passthrough(config);
        self.0.passthrough.store(passthrough == Feature::On, Ordering::Relaxed);
        let too_old = || Feature::Refused("the kernel is too old".to_owned());
        let _ = self.0.service.init.set(Init {
            max_background: MAX_BACKGROUND,
            congestion_threshold: CONGESTION,
            async_dio: if granted[0] { Feature::On } else { too_old() },
            clone_fd: Feature::Off,
            passthrough,
        });
        Ok(())
    }

    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let reply = self.0.timed(Operation::Lookup, reply);
        traced(trace_span!("lookup", parent = parent.0, ?name), || {
            let shared = self.0.clone();
            let Some(node) = shared.nodes.node(parent.0) else { return reply.error(Errno::ESTALE) };
            let (folder, name, caller) = (node.folder(), name.to_owned(), caller_of(req));
            let pool = shared.service.blocking.clone();
            let (known, wanted, asker) = (shared.clone(), name.clone(), caller.clone());
            // If the source does not answer, the reply comes from the last listing of the folder: a subfolder, or the
            // error that there is no such entry. A file may have changed since, so the reply for a file is EIO.
            let known = ReplyFromListing::new(reply, move |reply: Timed<ReplyEntry>, _late| {
                match known.nodes.listed_entry(folder, &wanted) {
                    Some(NameEntry::Found(node)) => known.reply_entry(Some(&node), &asker, reply),
                    Some(_) => known.reply_entry(None, &asker, reply),
                    None => reply.error(Errno::EIO),
                }
            });
            let pending = pool.pending(&node.path.join(&name), known);
            self.0.nodes.when_listed(&self.0.service.blocking, folder, move |_| {
                pool.spawn(pending, move |pending| {
                    let node = shared.nodes.current_entry(folder, &name);
                    node.iter().for_each(|node| drop(shared.nodes.access_of(node)));
                    if let Some(reply) = pending.take() {
                        shared.reply_entry(node.as_deref(), &caller, reply.into_reply());
                    }
                });
            });
        });
    }

    fn forget(&self, _req: &Request, ino: INodeNo, nlookup: u64) {
        guarded(|| {
            self.0.nodes.forget(ino.0, nlookup);
        });
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        let reply = self.0.timed(Operation::Getattr, reply);
        let get = move |shared: Arc<FsState>, reply: Timed<ReplyAttr>| {
            let Some(node) = shared.nodes.node(ino.0) else { return reply.error(Errno::ESTALE) };
            if !node.follows() && !shared.nodes.lacks_access(&node) {
                return reply.ok().attr(&TTL, &attr_of(&shared.common, &node));
            }
            let known = attr_of(&shared.common, &node);
            // Stalled files must not take all threads. If `LOOKS_MAX` checks are running already, the attributes in
            // memory are the answer.
            let Some(looking) = CheckSlot::begin(&shared) else {
                return reply.ok().attr(&TTL, &known);
            };
            let pool = shared.service.blocking.clone();
            let pending = pool.pending(&node.path, KnownAttr { reply, known });
            pool.spawn(pending, move |pending| {
                let now = node.follows().then(|| shared.look(&node, fh)).flatten();
                shared.nodes.access_of(&node);
                drop(looking);
                if let Some(now) = now {
                    node.set_attributes(&now);
                }
                if let Some(KnownAttr { reply, .. }) = pending.take() {
                    reply.ok().attr(&TTL, &attr_of(&shared.common, &node));
                }
            });
        };
        traced(trace_span!("getattr", ino = ino.0), || self.0.when_adopted(ino.0, reply, get));
    }

    fn open(&self, req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let reply = self.0.timed(Operation::Open, reply);
        let caller = caller_of(req);
        let open = move |shared: Arc<FsState>, reply: Timed<ReplyOpen>| {
            let Some(node) = shared.nodes.node(ino.0) else { return reply.error(Errno::ESTALE) };
            let pool = shared.service.blocking.clone();
            let pending = pool.pending(&node.path, reply);
            pool.spawn(pending, move |pending| {
                shared.nodes.access_of(&node);
                if shared.may_see(&node, &caller) {
                    shared.reply_open(node, Opener { uid: caller.uid, pid: caller.pid }, pending);
                } else if let Some(reply) = pending.take() {
                    reply.error(Errno::EACCES);
                }
            });
        };
        traced(trace_span!("open", ino = ino.0), || self.0.when_adopted(ino.0, reply, open));
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        traced(trace_span!("read", ino = ino.0, offset, len = size), || {
            let reply = self.0.timed(Operation::Read, reply);
            self.0.when_adopted(ino.0, reply, move |shared, reply| {
                shared.read_file(ino.0, fh.0, offset, size, reply);
            });
        });
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Nothing is written, so there is nothing to flush. Linux before 5.16 sends one flush, although the reply
        // to open has the flag FOPEN_NOFLUSH.
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
        // Programs send every file the ioctl that checks for a terminal.
        reply.error(Errno::ENOTTY);
    }

    fn release(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let shared = self.0.clone();
        let release = move || {
            let mut handles = shared.handles.write();
            let is_of_file = handles.get(&fh.0).is_some_and(|handle| handle.node.ino == ino.0);
            let handle = if is_of_file { handles.remove(&fh.0) } else { None };
            drop(handles);
            if let Some(handle) = &handle {
                shared.service.closed(handle.node.ino);
                if handle.backing.is_none() {
                    shared.serving.lock().closed_by_us(handle.node.ino);
                }
            }
            reply.ok();
            let by_kernel = handle.filter(|handle| handle.backing.is_some());
            if let Some(ino) = by_kernel.map(|handle| handle.node.ino) {
                shared.serving.lock().closed_by_kernel(ino);
            }
        };
        guarded(|| self.0.adoptions.when_over(ino.0, release));
    }

    fn readdir(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        reply: ReplyDirectory,
    ) {
        let reply = self.0.timed(Operation::Readdir, reply);
        traced(trace_span!("readdir", ino = ino.0, offset), || {
            let (shared, caller) = (self.0.clone(), caller_of(req));
            let Some(node) = shared.nodes.node(ino.0) else { return reply.error(Errno::ESTALE) };
            shared.clone().answer_listed(node.clone(), offset, reply, move |reply| {
                let mut reply = reply;
                if !shared.may_list(&node, &caller) {
                    return reply.error(Errno::EACCES);
                }
                for (next, name, node) in entries(&shared.nodes, &node, offset) {
                    if next > 2 && !shared.may_see(&node, &caller) {
                        continue;
                    }
                    let kind = attr_of(&shared.common, &node).kind;
                    if reply.reply.add(INodeNo(node.ino), next, kind, name) {
                        break;
                    }
                }
                reply.ok().ok();
            });
        });
    }

    fn readdirplus(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let reply = self.0.timed(Operation::Readdirplus, reply);
        traced(trace_span!("readdirplus", ino = ino.0, offset), || {
            let (shared, caller) = (self.0.clone(), caller_of(req));
            let Some(node) = shared.nodes.node(ino.0) else { return reply.error(Errno::ESTALE) };
            shared.clone().answer_listed(node.clone(), offset, reply, move |reply| {
                let mut reply = reply;
                if !shared.may_list(&node, &caller) {
                    return reply.error(Errno::EACCES);
                }
                // An answer can come after the state was handed to a process that takes over. That process does not
                // know the lookups of this answer, but it keeps all files that a folder shows. Any other answer would
                // harm the program that reads the folder: with an error its listing would fail, and C libraries leave
                // out entries without inode numbers.
                for (next, name, node) in entries(&shared.nodes, &node, offset) {
                    if next > 2 && !shared.may_see(&node, &caller) {
                        continue;
                    }
                    let (attr, ttl) = (attr_of(&shared.common, &node), ttl_of(&node));
                    if reply.reply.add(attr.ino, next, name, &ttl, &attr, Generation(0)) {
                        break;
                    }
                    // The kernel counts a lookup for every entry but `.` and `..`.
                    if next > 2 {
                        shared.nodes.looked_up(&node);
                    }
                }
                reply.ok().ok();
            });
        });
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let reply = self.0.timed(Operation::Statfs, reply);
        traced(trace_span!("statfs"), || {
            let source = self.0.common.source.clone();
            let pending = self.0.service.blocking.pending(&source, reply);
            self.0.service.blocking.spawn(pending, move |pending| {
                let found = nix::sys::statvfs::statvfs(&source);
                let Some(reply) = pending.take() else { return };
                match found {
                    Ok(fs) => {
                        // The mount is read-only, so it has no free blocks.
                        let frsize = fs.fragment_size();
                        reply.ok().statfs(
                            fs.blocks(),
                            0,
                            0,
                            fs.files(),
                            0,
                            4096,
                            255,
                            frsize as u32,
                        );
                    }
                    Err(_) => reply.ok().statfs(0, 0, 0, 0, 0, 4096, 255, 4096),
                }
            });
        });
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let name = name.to_owned();
        self.0.ask_xattrs(req, ino, reply, move |found, reply| {
            let value = found.iter().find(|(key, _)| name == *key).map(|(_, v)| v.as_bytes());
            reply_xattr(value, size, reply);
        });
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.0.ask_xattrs(req, ino, reply, move |found, reply| {
            // The attribute `XATTR_LIMITED` is for other mounts only: a copy of a file does not need it.
            let listed = found.iter().filter(|(key, _)| *key != XATTR_LIMITED);
            let names: String = listed.map(|(key, _)| format!("{key}\0")).collect();
            reply_xattr(Some(names.as_bytes()), size, reply);
        });
    }
}

/// The user behind a request.
fn caller_of(req: &Request) -> Caller {
    Caller::new(req.uid(), req.gid(), req.pid())
}

/// How long the kernel may cache a name of `node`. Zero if the answer is different for each user.
fn ttl_of(node: &Node) -> Duration {
    if node.access().is_some_and(|access| access.is_limited()) { Duration::ZERO } else { TTL }
}

/// Runs the handler of a request in its span.
fn traced(span: Span, handler: impl FnOnce()) {
    guarded(|| span.in_scope(handler));
}
