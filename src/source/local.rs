//! A local file that must stay what it was when it was opened.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use nix::fcntl::OFlag;
use nix::libc;

use super::descriptors;
use super::file_system::FileSystem;
use super::identity::{Identity, stat_file, stat_now, stat_path};
use super::without_proc::{
    OPEN_TRIES, leads_elsewhere, not_regular, open_regular as open_without_proc,
};
use crate::error::{Error, Result, shown_path};
use crate::hash::{Digest, Hasher};
use crate::sync::{Mutex, RwLock};

/// Bytes hashed at a time.
const HASH_CHUNK_LEN: usize = 256 << 10;

/// How often a source that is changed while it is looked at is looked at again.
const SETTLE_TRIES: usize = 10;

/// Knows whether the bytes of a file were written to, where its times do not tell.
pub trait WriteWitness: Send + Sync + std::fmt::Debug {
    /// Whether `file` was written to since its source has this witness; `None` where that cannot
    /// be known.
    fn written(&self, file: &File) -> Option<bool>;
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
    /// A rename may change ctime once without invalidating the file.
    moved: OnceLock<(i64, i64)>,
    /// What tells a write from a change of attributes, while the file is watched.
    witness: Mutex<Option<Arc<dyn WriteWitness>>>,
    /// Whether a change time was explained by attributes that differ, without a witness.
    guessed: AtomicBool,
    /// Number and hash of the bytes before the data, once they were read.
    head: OnceLock<(u64, Digest)>,
    /// Whether it is expected to change, so that nobody is told.
    followed: AtomicBool,
    /// Set once the file is known to have changed: this version of it is never read again.
    changed: OnceLock<String>,
}

impl Source {
    /// Opens the regular file at `path`, an absolute path without symbolic links.
    pub fn open(path: &Path) -> Result<Arc<Source>> {
        let (file, identity) = open_regular(path)?;
        let file_system = FileSystem::of(&file, path);
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
            moved: OnceLock::new(),
            witness: Mutex::default(),
            guessed: AtomicBool::new(false),
            head: OnceLock::new(),
            followed: AtomicBool::new(false),
            changed: OnceLock::new(),
        }
    }

    /// The same file as it is now, as a source of its own that shares the descriptor.
    ///
    /// # Errors
    /// Those of `file`, and `Error::Io` where it cannot be looked at.
    pub fn as_it_is_now(self: &Arc<Self>) -> Result<Arc<Source>> {
        let identity = self.look()?;
        let open = Open { file: Some(self.file()?), direct: None };
        let source = Arc::new(Source::new(&self.path, identity, self.file_system, open));
        descriptors::opened(&source);
        Ok(source)
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
        *self.identity.lock()
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
        self.open.read().file.clone()
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
        self.open.write().file = Some(file.clone());
        descriptors::opened(self);
        Ok(file)
    }

    /// A descriptor of the inode of `file`, which is this source's, that reads past the page
    /// cache. None where the file system refuses that, or no descriptor is to be had now.
    pub fn direct_file(self: &Arc<Self>, file: &Arc<File>) -> Option<Arc<File>> {
        if self.no_direct.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(direct) = &self.open.read().direct {
            return Some(direct.clone());
        }
        let direct = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT | libc::O_CLOEXEC)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let direct = match direct {
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.direct_without_proc(file),
            other => other,
        };
        let direct = match direct {
            Ok(direct) => Arc::new(direct),
            Err(e) => {
                if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) {
                    self.refuse_direct();
                }
                return None;
            }
        };
        let mut open = self.open.write();
        // Closed meanwhile: then this descriptor lasts for one read only.
        if open.file.as_ref().is_some_and(|open| Arc::ptr_eq(open, file)) && open.direct.is_none() {
            open.direct = Some(direct.clone());
            drop(open);
            descriptors::opened_direct(self);
        }
        Some(direct)
    }

    /// Opens the path again past the page cache, if `file` is still there.
    fn direct_without_proc(&self, file: &File) -> io::Result<File> {
        let (direct, meta) = open_without_proc(&self.path, OFlag::O_DIRECT)?;
        let same = Identity::of(&meta).same_inode(&Identity::of(&file.metadata()?));
        if same { Ok(direct) } else { Err(leads_elsewhere()) }
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
        let mut open = self.open.write();
        if self.pins.load(Ordering::SeqCst) == 0 {
            let closed = std::mem::take(&mut *open);
            drop(open);
            drop(closed);
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open_file().is_some()
    }

    pub(super) fn is_open_direct(&self) -> bool {
        self.open.read().direct.is_some()
    }

    /// Whether closing it loses nothing: nobody relies on it, or it can be opened again.
    pub(super) fn may_close(&self) -> bool {
        self.pins.load(Ordering::SeqCst) == 0 || self.is_at_path()
    }

    pub(super) fn close(&self) {
        let closed = std::mem::take(&mut *self.open.write());
        drop(closed);
    }

    pub(super) fn close_direct(&self) {
        let closed = self.open.write().direct.take();
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
    /// Once it is not, this and all reads fail, even if it is changed back: what was read of it
    /// before may be in use. Whoever wants the file as it is now opens another source.
    ///
    /// # Errors
    /// `Error::Changed` where its bytes may have changed, `Error::Io` where it cannot be looked at.
    pub fn check(self: &Arc<Self>) -> Result<()> {
        self.check_known()?;
        self.check_open(&*self.file()?)
    }

    /// Likewise by `file`, an open descriptor of it: opens nothing.
    ///
    /// # Errors
    /// Those of `check`.
    pub fn check_open(&self, file: &File) -> Result<()> {
        let look = || stat_file(file, self.file_system);
        self.check_by(&look, Some(file))
    }

    /// Whether the path still leads to this file, and its bytes are surely what they were. Opens
    /// nothing, and takes one look at the path where nothing has changed.
    ///
    /// A new change time needs a witness: whoever opens the file next may find pages of old bytes.
    pub fn is_current(&self) -> bool {
        let look = || stat_path(&self.path, self.file_system);
        let Ok(now) = look() else { return false };
        let known = self.identity();
        if !now.same_inode(&self.first) {
            return false;
        }
        let same = if known == now {
            !self.is_changed()
        } else if known.same_bytes(&now) && self.witness().is_none() {
            false
        } else {
            self.check_by(&look, self.open_file().as_deref()).is_ok()
        };
        same && !self.guessed.load(Ordering::SeqCst)
    }

    /// Takes note of the hash of the first `len` bytes, which say what the others are.
    pub(crate) fn set_head(&self, len: u64, hash: Digest) {
        let _ = self.head.set((len, hash));
    }

    /// Like `check`, for a source of which nobody has any bytes yet: after a change of nothing but
    /// its change time it is enough that the bytes before its data are those that were proved.
    ///
    /// # Errors
    /// Those of `check`, and of `file`.
    pub fn settle(self: &Arc<Self>) -> Result<()> {
        for _ in 0..SETTLE_TRIES {
            self.check_known()?;
            let known = self.identity();
            let now = self.look()?;
            if known == now {
                return Ok(());
            }
            let head = self.head.get().filter(|_| known.same_bytes(&now));
            let Some((len, hash)) = head else { return self.check() };
            if self.hash_head(*len)? != *hash {
                return Err(self.set_changed("has another header than it had".to_owned()));
            }
            let mut identity = self.identity.lock();
            if *identity == known {
                *identity = now;
            }
        }
        Err(self.changed_error("is changed all the time"))
    }

    /// The hash of the first `len` bytes.
    ///
    /// # Errors
    /// Those of `read_exact_at`.
    pub(crate) fn hash_head(self: &Arc<Self>, len: u64) -> Result<Digest> {
        let mut hasher = Hasher::new();
        let mut buf = vec![0; HASH_CHUNK_LEN.min(len as usize)];
        let mut offset = 0;
        while offset < len {
            let chunk = &mut buf[..HASH_CHUNK_LEN.min((len - offset) as usize)];
            self.read_exact_at(chunk, offset)?;
            hasher.update(chunk);
            offset += chunk.len() as u64;
        }
        Ok(hasher.finish())
    }

    /// From now on a change of it is nothing that anybody has to be told.
    pub fn set_followed(&self) {
        self.followed.store(true, Ordering::Relaxed);
    }

    fn witness(&self) -> Option<Arc<dyn WriteWitness>> {
        self.witness.lock().clone()
    }

    /// What the open file is now, whether or not it is what it was.
    ///
    /// # Errors
    /// Those of `file`, and `Error::Io` where it cannot be looked at.
    pub fn look(self: &Arc<Self>) -> Result<Identity> {
        let file = self.file()?;
        stat_file(&file, self.file_system).map_err(|e| Error::io(&self.path, "stat", e))
    }

    /// Compares what `look` finds with what is known, until both agree. `file` is open, if given.
    fn check_by(&self, look: &dyn Fn() -> io::Result<Identity>, file: Option<&File>) -> Result<()> {
        loop {
            self.check_known()?;
            // Known first: what is found afterwards is never older.
            let known = self.identity();
            let now = look().map_err(|e| Error::io(&self.path, "stat", e))?;
            if known == now {
                return Ok(());
            }
            self.judge(&known, &now, file).map_err(|detail| self.set_changed(detail))?;
            let mut identity = self.identity.lock();
            if *identity == known {
                *identity = now;
                return Ok(());
            }
        }
    }

    /// Decides whether the bytes are the same in both states.
    fn judge(
        &self,
        known: &Identity,
        now: &Identity,
        file: Option<&File>,
    ) -> std::result::Result<(), String> {
        if known.len != now.len {
            return Err(format!("has {} bytes, it had {} when it was opened", now.len, known.len));
        }
        if known.mtime != now.mtime {
            return Err("was written to while it was in use".to_owned());
        }
        let witness = self.witness();
        let written = witness.zip(file).and_then(|(witness, file)| witness.written(file));
        if written == Some(false) {
            return Ok(());
        }
        if written.is_none() && self.explains_ctime(known, now) {
            self.guessed.store(true, Ordering::SeqCst);
            return Ok(());
        }
        Err("was changed while it was in use: its change time is new, its modification time is \
             not, so a write cannot be ruled out"
            .to_owned())
    }

    /// Whether a new change time with old size and modification time has a cause that leaves
    /// the bytes alone: links, mode, owner, or a new name. Otherwise the modification time may
    /// have been set back after a write.
    fn explains_ctime(&self, known: &Identity, now: &Identity) -> bool {
        // Several threads may judge the same change at once.
        known.differs_in_attributes(now)
            || (!self.is_at_path() && *self.moved.get_or_init(|| now.ctime()) == now.ctime())
    }

    /// Has `witness` say from now on whether a new change time comes from a write. It must have
    /// been at work when the source was confirmed last, by `check` or `settle`.
    pub fn set_witness(&self, witness: Arc<dyn WriteWitness>) {
        *self.witness.lock() = Some(witness);
    }

    /// Whether the path still leads to this file.
    pub fn is_at_path(&self) -> bool {
        let there = stat_path(&self.path, self.file_system);
        there.is_ok_and(|now| now.same_inode(&self.first))
    }

    /// Marks this version of the file as changed. The line in the log stands there before this
    /// returns, and nobody waits for it.
    fn set_changed(&self, detail: String) -> Error {
        let error = self.changed_error(&detail);
        if self.changed.set(detail).is_err() {
            return self.check_known().err().unwrap_or(error);
        }
        if self.followed.load(Ordering::Relaxed) {
            tracing::debug!("{error}");
        } else if self.pins.load(Ordering::SeqCst) > 0 {
            tracing::error!("{error}; what has it open gets errors, a new open proves it again");
        } else {
            tracing::info!("{error}; the next open proves it again");
        }
        error
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
        let identity = stat_now(&handle).map_err(open_error)?;
        if !identity.is_file() {
            return Err(open_error(not_regular()));
        }
        let link = format!("/proc/self/fd/{}", handle.as_raw_fd());
        // A folder on the way may have become a link since the path was resolved and found
        // allowed; or the file was replaced this very moment, and the next try meets the new one.
        let Ok(leads_to) = std::fs::read_link(&link) else {
            let (file, meta) = open_without_proc(path, OFlag::empty()).map_err(open_error)?;
            return Ok((file, Identity::of(&meta)));
        };
        if leads_to == path {
            let file = File::open(&link).map_err(open_error)?;
            return Ok((file, identity));
        }
    }
    Err(open_error(leads_elsewhere()))
}
