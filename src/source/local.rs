//! A local file that must stay what it was when it was opened.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockWriteGuard};
use std::time::SystemTime;

use nix::libc;

use super::descriptors;
use super::file_system::FileSystem;
use crate::error::{Error, Result, shown_path};

/// What tells one state of a file from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Device.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Length in bytes.
    pub len: u64,
    /// When the inode was made, where the file system says: a deleted file's number may go to
    /// the next one.
    born: Option<SystemTime>,
    /// Time of the last change of the bytes, in seconds and nanoseconds.
    pub mtime: (i64, i64),
    ctime: (i64, i64),
    nlink: u64,
    mode: u32,
    owner: (u32, u32),
}

impl Identity {
    /// The identity that a system call reported.
    pub fn of(meta: &std::fs::Metadata) -> Identity {
        Identity {
            dev: meta.dev(),
            ino: meta.ino(),
            len: meta.size(),
            born: meta.created().ok(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
            nlink: meta.nlink(),
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
        }
    }

    /// Time of the last change of bytes or attributes, in seconds and nanoseconds.
    pub fn ctime(&self) -> (i64, i64) {
        self.ctime
    }

    /// When the inode was made, where the file system says, in nanoseconds since 1970.
    pub fn born(&self) -> Option<u128> {
        let born = self.born?.duration_since(SystemTime::UNIX_EPOCH);
        born.ok().map(|since| since.as_nanos())
    }

    /// Whether both are states of one inode.
    pub fn same_inode(&self, other: &Identity) -> bool {
        (self.dev, self.ino, self.born) == (other.dev, other.ino, other.born)
    }

    /// Whether the bytes are the same, as far as size and modification time tell.
    pub fn same_bytes(&self, other: &Identity) -> bool {
        self.same_inode(other) && self.len == other.len && self.mtime == other.mtime
    }
}

/// The descriptors of a source.
#[derive(Debug, Default)]
struct Open {
    file: Option<Arc<File>>,
    /// The same inode past the page cache; never open without `file`.
    direct: Option<Arc<File>>,
}

/// An open regular file, closed and opened again as descriptors allow.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    /// What it was when it was opened first.
    first: Identity,
    file_system: FileSystem,
    open: RwLock<Open>,
    /// Whether the file system is known to refuse O_DIRECT.
    no_direct: AtomicBool,
    /// Whether its reads do not come back in time.
    stalled: AtomicBool,
    identity: Mutex<Identity>,
    /// Whether it stands among the open sources.
    pub(super) counted: AtomicBool,
    /// Number of pins.
    pins: AtomicUsize,
    /// Whether a new name has explained a change time before: it does so once.
    moved: AtomicBool,
    /// Set once the file is known to have changed: it is never read again.
    changed: OnceLock<String>,
}

impl Source {
    /// Opens the regular file at `path`, an absolute path without symbolic links.
    pub fn open(path: &Path) -> Result<Arc<Source>> {
        let (file, identity) = open_regular(path)?;
        let file_system = FileSystem::of(&file);
        let open = Open { file: Some(Arc::new(file)), direct: None };
        let source = Arc::new(Source::new(path, identity, file_system, open));
        descriptors::opened(&source);
        Ok(source)
    }

    /// The regular file at `path`, which was `identity` when it was looked at; not opened before
    /// it is read. Whatever it is then, its bytes count only if `check` finds that same file.
    pub fn closed(path: &Path, identity: Identity) -> Arc<Source> {
        Arc::new(Source::new(path, identity, FileSystem::at(path), Open::default()))
    }

    fn new(path: &Path, identity: Identity, file_system: FileSystem, open: Open) -> Source {
        Source {
            path: path.to_owned(),
            first: identity,
            file_system,
            open: RwLock::new(open),
            no_direct: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            identity: Mutex::new(identity),
            counted: AtomicBool::new(false),
            pins: AtomicUsize::new(0),
            moved: AtomicBool::new(false),
            changed: OnceLock::new(),
        }
    }

    /// The same file, closed. Takes no lock, so that it can be asked for in a child made by fork(2)
    /// whatever threads of the parent were doing.
    pub(crate) fn renewed(&self) -> Arc<Source> {
        let open = Open::default();
        Arc::new(Source::new(&self.path, self.first, self.file_system, open))
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The identity when it was opened; metadata changes that leave the bytes alone follow.
    pub fn identity(&self) -> Identity {
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.identity().len
    }

    /// Whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file system that it lies on.
    pub fn file_system(&self) -> FileSystem {
        self.file_system
    }

    /// The open file, if it is open now. Never waits for the file system.
    pub fn open_file(&self) -> Option<Arc<File>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).file.clone()
    }

    /// The open file, opened again where it was closed in between.
    pub fn file(self: &Arc<Self>) -> Result<Arc<File>> {
        if let Some(file) = self.open_file() {
            return Ok(file);
        }
        let (file, identity) = open_regular(&self.path)?;
        if !identity.same_inode(&self.identity()) {
            // Not marked as changed: the old file may still be whole, only out of reach.
            tracing::error!(
                "{}: replaced while it was closed for want of file descriptors; raise the limit",
                shown_path(&self.path)
            );
            return Err(Error::Changed {
                path: self.path.clone(),
                detail: "was replaced while it was closed for want of file descriptors".to_owned(),
            });
        }
        let file = Arc::new(file);
        self.lock_open().file = Some(file.clone());
        descriptors::opened(self);
        Ok(file)
    }

    /// A descriptor of the inode of `file`, which is this source's, that reads past the page
    /// cache. None where the file system refuses that, or no descriptor is to be had now.
    pub fn direct_file(self: &Arc<Self>, file: &Arc<File>) -> Option<Arc<File>> {
        if self.no_direct.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(direct) = &self.open.read().unwrap_or_else(PoisonError::into_inner).direct {
            return Some(direct.clone());
        }
        let direct = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT | libc::O_CLOEXEC)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let direct = match direct {
            Ok(direct) => Arc::new(direct),
            Err(e) => {
                if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) {
                    self.refuse_direct();
                }
                return None;
            }
        };
        let mut open = self.lock_open();
        // Closed meanwhile: then this descriptor lasts for one read only.
        if open.file.as_ref().is_some_and(|open| Arc::ptr_eq(open, file)) && open.direct.is_none() {
            open.direct = Some(direct.clone());
            drop(open);
            descriptors::opened_direct(self);
        }
        Some(direct)
    }

    /// Notes that the file system refuses O_DIRECT for this file.
    pub fn refuse_direct(&self) {
        self.no_direct.store(true, Ordering::Relaxed);
        self.close_direct();
    }

    /// Notes whether reads of it come back in time; returns what was noted before.
    pub fn set_stalled(&self, stalled: bool) -> bool {
        // Mostly nothing changes, and a load does not take the cache line from others.
        let before = self.stalled.load(Ordering::Relaxed);
        if before == stalled { before } else { self.stalled.swap(stalled, Ordering::Relaxed) }
    }

    /// Keeps the file open until the pin is dropped: whoever deletes or replaces it meanwhile
    /// leaves the old bytes to the holder.
    ///
    /// # Errors
    /// Those of `file`.
    pub fn pin(self: &Arc<Self>) -> Result<Pin> {
        self.pins.fetch_add(1, Ordering::SeqCst);
        let pin = Pin(self.clone());
        self.file()?;
        Ok(pin)
    }

    /// Closes the file unless it is pinned; a later read opens it again. An open file would
    /// keep its space on disk after it is deleted.
    pub fn release(&self) {
        // Under the lock, so that a pin that comes now finds the file closed and opens it.
        let mut open = self.lock_open();
        if self.pins.load(Ordering::SeqCst) == 0 {
            let closed = std::mem::take(&mut *open);
            drop(open);
            drop(closed);
        }
    }

    fn lock_open(&self) -> RwLockWriteGuard<'_, Open> {
        self.open.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_open(&self) -> bool {
        self.open_file().is_some()
    }

    pub(super) fn is_open_direct(&self) -> bool {
        self.open.read().unwrap_or_else(PoisonError::into_inner).direct.is_some()
    }

    /// Whether closing it loses nothing: nobody relies on it, or it can be opened again.
    pub(super) fn may_close(&self) -> bool {
        self.pins.load(Ordering::SeqCst) == 0 || self.is_at_path()
    }

    pub(super) fn close(&self) {
        let closed = std::mem::take(&mut *self.lock_open());
        drop(closed);
    }

    pub(super) fn close_direct(&self) {
        let closed = self.lock_open().direct.take();
        drop(closed);
    }

    /// Reads exactly `buf.len()` bytes at `offset`.
    ///
    /// The bytes count only once `check` has confirmed the file after the read.
    /// # Errors
    /// `Error::Changed` where the file ends before, `Error::Io` where the read fails.
    pub fn read_exact_at(self: &Arc<Self>, buf: &mut [u8], offset: u64) -> Result<()> {
        self.check_known()?;
        self.file()?.read_exact_at(buf, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.ends_before(offset + buf.len() as u64),
            _ => Error::io(&self.path, "read", e),
        })
    }

    /// Marks the file as changed because it ends before byte `end`.
    pub fn ends_before(&self, end: u64) -> Error {
        let len = self.len();
        self.set_changed(format!("ends before byte {end}, it had {len} bytes when it was opened"))
    }

    /// Fails if the file is known to have changed; does not look at it.
    pub fn check_known(&self) -> Result<()> {
        self.changed.get().map_or(Ok(()), |detail| Err(self.changed_error(detail)))
    }

    /// Confirms that the file is still the one that was opened.
    ///
    /// Once it is not, this and all reads fail, even if it is changed back.
    pub fn check(self: &Arc<Self>) -> Result<()> {
        self.check_known()?;
        self.check_open(&*self.file()?)
    }

    /// Likewise by `file`, an open descriptor of it: opens nothing.
    ///
    /// # Errors
    /// Those of `check`.
    pub fn check_open(&self, file: &File) -> Result<()> {
        self.check_known()?;
        let meta = file.metadata().map_err(|e| Error::io(&self.path, "stat", e))?;
        let now = Identity::of(&meta);
        if self.identity() == now {
            return Ok(());
        }
        // Not under the lock: this may wait for the file system.
        let at_path = self.is_at_path();
        let mut known = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == now {
            return Ok(());
        }
        if known.len != now.len {
            let detail = format!("has {} bytes, it had {} when it was opened", now.len, known.len);
            return Err(self.set_changed(detail));
        }
        if known.mtime != now.mtime || !self.explains_ctime(&known, &now, at_path) {
            return Err(self.set_changed("was written to while it was in use".to_owned()));
        }
        *known = now;
        Ok(())
    }

    /// Whether a new change time with old size and modification time has a cause that leaves
    /// the bytes alone: links, mode, owner, or a new name. Otherwise the modification time was
    /// set back after a write.
    fn explains_ctime(&self, known: &Identity, now: &Identity, at_path: bool) -> bool {
        known.nlink != now.nlink
            || known.mode != now.mode
            || known.owner != now.owner
            || (!at_path && !self.moved.swap(true, Ordering::Relaxed))
    }

    /// Whether the path still leads to this file.
    pub fn is_at_path(&self) -> bool {
        let there = std::fs::symlink_metadata(&self.path);
        there.is_ok_and(|meta| Identity::of(&meta).same_inode(&self.first))
    }

    /// Marks the file as changed, for ever. The line in the log stands there before any read
    /// fails for it.
    fn set_changed(&self, detail: String) -> Error {
        let detail = self.changed.get_or_init(|| {
            let path = shown_path(&self.path);
            tracing::error!("{path}: {detail}; reads of it fail from now on");
            detail
        });
        self.changed_error(detail)
    }

    fn changed_error(&self, detail: &str) -> Error {
        Error::Changed { path: self.path.clone(), detail: detail.to_owned() }
    }

    /// Whether the file is known to have changed, or is seen to have on a file system that
    /// answers at once. Never waits.
    pub fn is_changed_now(&self) -> bool {
        let changed = |file: Arc<File>| self.check_open(&file).is_err();
        self.is_changed() || (self.file_system.is_local() && self.open_file().is_some_and(changed))
    }

    /// Whether the file is known to have changed.
    pub fn is_changed(&self) -> bool {
        self.changed.get().is_some()
    }
}

/// Runs `close`, which closes files of `sources`: on a thread of its own where that may have to
/// wait, for ever perhaps, for whoever serves their file system.
pub fn close_apart(sources: &[Arc<Source>], close: impl FnOnce() + Send + 'static) {
    if sources.iter().all(|source| source.file_system.is_local()) {
        return close();
    }
    if let Err(e) = std::thread::Builder::new().name("close".to_owned()).spawn(close) {
        tracing::error!("cannot start a thread: {e}");
    }
}

/// Closes those of `sources` that are open but not pinned; does not wait for it.
pub fn release_unpinned(sources: &[Arc<Source>]) {
    let left = |source: &&Arc<Source>| source.pins.load(Ordering::SeqCst) == 0 && source.is_open();
    let left: Vec<Arc<Source>> = sources.iter().filter(left).cloned().collect();
    let closed = left.clone();
    close_apart(&left, move || closed.iter().for_each(|source| source.release()));
}

/// Keeps a source open.
#[derive(Debug)]
pub struct Pin(Arc<Source>);

impl Drop for Pin {
    fn drop(&mut self) {
        if self.0.pins.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.release();
        }
    }
}

/// Opens a regular file and nothing else: a FIFO, a device or a symbolic link that stands
/// there now is refused without being opened for reading, which could block or have effects.
fn open_regular(path: &Path) -> Result<(File, Identity)> {
    let open_error = |e| Error::io(path, "open", e);
    for _ in 0..OPEN_TRIES {
        let handle = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)
            .map_err(open_error)?;
        let meta = handle.metadata().map_err(open_error)?;
        if !meta.is_file() {
            let reason = io::Error::new(io::ErrorKind::NotFound, "not a regular file");
            return Err(open_error(reason));
        }
        let link = format!("/proc/self/fd/{}", handle.as_raw_fd());
        // A folder on the way may have become a link since the path was resolved and found
        // allowed; or the file was replaced this very moment, and the next try meets the new one.
        if std::fs::read_link(&link).map_err(open_error)? == path {
            let file = File::open(&link).map_err(open_error)?;
            return Ok((file, Identity::of(&meta)));
        }
    }
    let reason = io::Error::new(io::ErrorKind::NotFound, "it leads somewhere else now");
    Err(open_error(reason))
}

/// How often a file that is replaced while it is opened is tried again.
const OPEN_TRIES: usize = 10;
