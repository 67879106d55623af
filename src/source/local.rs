//! A local file that must stay what it was when it was opened.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::SystemTime;

use nix::libc;

use super::descriptors;
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

    /// Whether both are states of one inode.
    pub fn same_inode(&self, other: &Identity) -> bool {
        (self.dev, self.ino, self.born) == (other.dev, other.ino, other.born)
    }

    /// Whether the bytes are the same, as far as size and modification time tell.
    pub fn same_bytes(&self, other: &Identity) -> bool {
        self.same_inode(other) && self.len == other.len && self.mtime == other.mtime
    }
}

/// An open regular file, closed and opened again as descriptors allow.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    /// What it was when it was opened first.
    first: Identity,
    file: RwLock<Option<Arc<File>>>,
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
        let source = Arc::new(Source {
            path: path.to_owned(),
            first: identity,
            file: RwLock::new(Some(Arc::new(file))),
            identity: Mutex::new(identity),
            counted: AtomicBool::new(false),
            pins: AtomicUsize::new(0),
            moved: AtomicBool::new(false),
            changed: OnceLock::new(),
        });
        descriptors::opened(&source);
        Ok(source)
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

    /// The open file, opened again where it was closed in between.
    pub fn file(self: &Arc<Self>) -> Result<Arc<File>> {
        let open = self.file.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(file) = open {
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
        *self.file.write().unwrap_or_else(PoisonError::into_inner) = Some(file.clone());
        descriptors::opened(self);
        Ok(file)
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
        let mut file = self.file.write().unwrap_or_else(PoisonError::into_inner);
        if self.pins.load(Ordering::SeqCst) == 0 {
            *file = None;
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.file.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Whether closing it loses nothing: nobody relies on it, or it can be opened again.
    pub(super) fn may_close(&self) -> bool {
        self.pins.load(Ordering::SeqCst) == 0 || self.is_at_path()
    }

    pub(super) fn close(&self) {
        *self.file.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Reads exactly `buf.len()` bytes at `offset`.
    ///
    /// The bytes count only once `check` has confirmed the file after the read.
    /// # Errors
    /// `Error::Changed` where the file ends before, `Error::Io` where the read fails.
    pub fn read_exact_at(self: &Arc<Self>, buf: &mut [u8], offset: u64) -> Result<()> {
        if let Some(detail) = self.changed.get() {
            return Err(self.changed_error(detail));
        }
        self.file()?.read_exact_at(buf, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.set_changed(format!(
                "ends before byte {}, it had {} bytes when it was opened",
                offset + buf.len() as u64,
                self.len()
            )),
            _ => Error::io(&self.path, "read", e),
        })
    }

    /// Confirms that the file is still the one that was opened.
    ///
    /// Once it is not, this and all reads fail, even if it is changed back.
    pub fn check(self: &Arc<Self>) -> Result<()> {
        if let Some(detail) = self.changed.get() {
            return Err(self.changed_error(detail));
        }
        let meta = self.file()?.metadata().map_err(|e| Error::io(&self.path, "stat", e))?;
        let now = Identity::of(&meta);
        let mut known = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == now {
            return Ok(());
        }
        if known.len != now.len {
            let detail = format!("has {} bytes, it had {} when it was opened", now.len, known.len);
            return Err(self.set_changed(detail));
        }
        if known.mtime != now.mtime || !self.explains_ctime(&known, &now) {
            return Err(self.set_changed("was written to while it was in use".to_owned()));
        }
        *known = now;
        Ok(())
    }

    /// Whether a new change time with old size and modification time has a cause that leaves
    /// the bytes alone: links, mode, owner, or a new name. Otherwise the modification time was
    /// set back after a write.
    fn explains_ctime(&self, known: &Identity, now: &Identity) -> bool {
        known.nlink != now.nlink
            || known.mode != now.mode
            || known.owner != now.owner
            || (!self.is_at_path() && !self.moved.swap(true, Ordering::Relaxed))
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

    /// Whether the file is known to have changed.
    pub fn is_changed(&self) -> bool {
        self.changed.get().is_some()
    }
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
