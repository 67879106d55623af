//! A local file that must not change after it was opened.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::descriptors::{Pin, ReopenableFile};
use super::file_system::FileSystem;
use super::hash_of;
use super::notes::Notes;
use super::stat::{stat_file, stat_path};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::version::{Time, Version};

/// Maximum number of tries to settle a file that keeps changing.
const SETTLE_TRIES: usize = 10;

/// Detects writes to a file if the times of the file do not show whether there was a write.
pub trait WriteWitness: Send + Sync + std::fmt::Debug {
    /// Whether `file` was written to since its source got this witness. `None` if that is unknown.
    fn written(&self, file: &File) -> Option<bool>;
}

/// A regular file that must not change after it was opened.
#[derive(Debug)]
pub struct LocalFile {
    file: Arc<ReopenableFile>,
    version: Mutex<Version>,
    /// The change time that a rename has set. Only the first such change is attributed to a rename and leaves the
    /// source valid.
    moved: OnceLock<Option<Time>>,
    /// Distinguishes writes from changes of attributes. Set while the file is watched.
    witness: Mutex<Option<Arc<dyn WriteWitness>>>,
    /// Whether a new change time was attributed to new attributes or a new name without the help of a witness.
    guessed: AtomicBool,
    pub(super) notes: Notes,
}

impl LocalFile {
    /// Opens the regular file at `path`, an absolute path without symbolic links.
    pub(super) fn open(path: &Path) -> Result<LocalFile> {
        ReopenableFile::open(path).map(LocalFile::new)
    }

    /// The regular file at `path`, which had the version `version` when it was last examined. The first read opens it.
    pub(super) fn closed(path: &Path, version: Version) -> LocalFile {
        let file = ReopenableFile::closed(path, version, FileSystem::at(path));
        LocalFile::new(Arc::new(file))
    }

    /// The regular file that is open as `file`, taken over from another process that knew it in the version `version`.
    /// `path` may lead to another file now.
    pub(super) fn adopted(path: &Path, version: Version, file: Arc<File>) -> LocalFile {
        let file_system = FileSystem::of(&file, path);
        LocalFile::new(ReopenableFile::opened(path, version, file_system, file))
    }

    /// The regular file that is open as `file`. `path` is its name in messages and may lead to another file.
    pub(super) fn of_open_file(path: &Path, file: Arc<File>) -> Result<LocalFile> {
        let file_system = FileSystem::of(&file, path);
        let stated = stat_file(&file, file_system).map_err(|e| Error::io(path, "stat", e))?;
        if !stated.is_file() {
            let message = "is no regular file";
            return Err(Error::io(
                path,
                "open",
                io::Error::new(io::ErrorKind::InvalidInput, message),
            ));
        }
        Ok(LocalFile::adopted(path, stated, file))
    }

    /// Sets the known version back to an earlier version of the same inode, so that the next check judges all changes
    /// since that version.
    pub(super) fn set_known(&self, earlier: Version) {
        if earlier.file() == self.first().file() {
            *self.version.lock() = earlier;
        }
    }

    fn new(file: Arc<ReopenableFile>) -> LocalFile {
        LocalFile {
            version: Mutex::new(file.first),
            moved: OnceLock::new(),
            witness: Mutex::default(),
            guessed: AtomicBool::new(false),
            notes: Notes::default(),
            file,
        }
    }

    pub(super) fn as_it_is_now(&self) -> Result<LocalFile> {
        let version = self.look()?;
        let (path, file_system) = (self.path(), self.file.file_system);
        let file = ReopenableFile::opened(path, version, file_system, self.file()?);
        Ok(LocalFile::new(file))
    }

    pub(super) fn renewed(&self) -> LocalFile {
        let (path, file_system) = (self.path(), self.file.file_system);
        LocalFile::new(Arc::new(ReopenableFile::closed(path, self.file.first, file_system)))
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// The known version. It is the version at the open, updated after changes of attributes that do not affect
    /// the bytes.
    pub(super) fn version(&self) -> Version {
        *self.version.lock()
    }

    /// The version at the first open.
    pub(super) fn first(&self) -> &Version {
        &self.file.first
    }

    /// The file system of the file.
    pub fn file_system(&self) -> FileSystem {
        self.file.file_system
    }

    /// The open file, if it is open now. Never waits for the file system.
    pub fn open_file(&self) -> Option<Arc<File>> {
        self.file.open_file()
    }

    /// The open file, reopened if it was closed.
    ///
    /// # Errors
    /// `Error::Io` if the file cannot be opened. `Error::Changed` if another file is at the path now.
    pub fn file(&self) -> Result<Arc<File>> {
        self.file.file()
    }

    /// A second descriptor for the inode of `file`, which is the open file of this source. Its reads go past
    /// the page cache. `None` if the file system refuses O_DIRECT, or no descriptor is left.
    pub fn direct_file(&self, file: &Arc<File>) -> Option<Arc<File>> {
        self.file.direct_file(file)
    }

    /// Notes that the file system does not support O_DIRECT for this file.
    pub fn refuse_direct(&self) {
        self.file.refuse_direct();
    }

    pub(super) fn pin(&self) -> Result<Pin> {
        self.file.pin()
    }

    pub(super) fn release(&self) {
        self.file.release();
    }

    pub(super) fn is_open_unpinned(&self) -> bool {
        !self.file.is_pinned() && self.file.is_open()
    }

    /// Reads exactly `buf.len()` bytes at `offset`.
    ///
    /// The bytes are valid only if a `check` after the read succeeds.
    /// # Errors
    /// `Error::Changed` if the file ends before the last of these bytes, `Error::Io` if the read fails.
    pub(super) fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.check_known()?;
        self.file()?.read_exact_at(buf, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.ends_before(offset + buf.len() as u64),
            _ => Error::io(self.path(), "read", e),
        })
    }

    /// Marks the file as changed because it ends before byte `end`.
    pub(super) fn ends_before(&self, end: u64) -> Error {
        let len = self.first().len;
        self.set_changed(format!("ends before byte {end}, it had {len} bytes when it was opened"))
    }

    fn check_known(&self) -> Result<()> {
        self.notes.check_known(self.path())
    }

    /// Checks that the file is still the one that was opened, with the same bytes.
    ///
    /// Once this check has failed, every later check and read fails too, even if the file is changed back,
    /// because bytes that were read before may be in use. The file in its new state needs a new source.
    ///
    /// # Errors
    /// `Error::Changed` if its bytes may have changed, `Error::Io` if stat(2) fails.
    pub(super) fn check(&self) -> Result<()> {
        self.check_known()?;
        self.check_open(&*self.file()?)
    }

    /// Checks the file like `check`, with the open descriptor `file` of it. Opens nothing.
    ///
    /// # Errors
    /// The errors of `check`.
    pub fn check_open(&self, file: &File) -> Result<()> {
        let look = || stat_file(file, self.file.file_system);
        self.check_by(&look, Some(file))
    }

    /// Whether the path still leads to this file, and its bytes are certainly unchanged. Opens nothing. If
    /// nothing has changed, this takes one call of stat(2).
    ///
    /// If the change time is new, the result is true only with a witness. Without a witness, the file may have been
    /// written to, and the next open could find old bytes in the page cache.
    pub(super) fn is_current(&self) -> bool {
        let look = || stat_path(self.path(), self.file.file_system);
        let Ok(now) = look() else { return false };
        let known = self.version();
        if now.file() != self.first().file() {
            return false;
        }
        let same = if known == now {
            !self.notes.is_changed()
        } else if known.content() == now.content() && self.witness().is_none() {
            false
        } else {
            self.check_by(&look, self.open_file().as_deref()).is_ok()
        };
        same && !self.guessed.load(Ordering::SeqCst)
    }

    /// Like `check`, for a source of which no reader has bytes yet. A file with a new change time, but the same length
    /// and modification time, passes if its header bytes are the same as at the open.
    ///
    /// # Errors
    /// The errors of `check` and of `file`.
    pub(super) fn settle(&self) -> Result<()> {
        for _ in 0..SETTLE_TRIES {
            self.check_known()?;
            let known = self.version();
            let now = self.look()?;
            if known == now {
                return Ok(());
            }
            let described = self.notes.described.get().filter(|_| known.content() == now.content());
            let Some((described, hash)) = described else { return self.check() };
            if hash_of(described, |buf, offset| self.read_exact_at(buf, offset))? != *hash {
                return Err(self.set_changed("has another header than it had".to_owned()));
            }
            let mut version = self.version.lock();
            if *version == known {
                *version = now;
            }
        }
        Err(Error::changed(self.path(), "is changed all the time"))
    }

    fn witness(&self) -> Option<Arc<dyn WriteWitness>> {
        self.witness.lock().clone()
    }

    /// Reads the current version of the open file, whether or not it has changed.
    ///
    /// # Errors
    /// The errors of `file`. `Error::Io` if its version cannot be read.
    pub fn look(&self) -> Result<Version> {
        let file = self.file()?;
        stat_file(&file, self.file.file_system).map_err(|e| Error::io(self.path(), "stat", e))
    }

    /// Compares the version that `look` returns with the known version, and judges a difference. If the bytes are
    /// unchanged, the new version becomes the known one. All this is repeated if another thread has changed the known
    /// version meanwhile. `file` is an open descriptor of the file, if there is one.
    fn check_by(&self, look: &dyn Fn() -> io::Result<Version>, file: Option<&File>) -> Result<()> {
        loop {
            self.check_known()?;
            // The known version is read first, so that the result of `look` is never older than it.
            let known = self.version();
            let now = look().map_err(|e| Error::io(self.path(), "stat", e))?;
            if known == now {
                return Ok(());
            }
            self.judge(&known, &now, file).map_err(|detail| self.set_changed(detail))?;
            let mut version = self.version.lock();
            if *version == known {
                *version = now;
                return Ok(());
            }
        }
    }

    /// Decides whether the bytes are the same in both versions. If not, the error says why.
    fn judge(&self, known: &Version, now: &Version, file: Option<&File>) -> Result<(), String> {
        if known.len != now.len {
            return Err(format!("has {} bytes, it had {} when it was opened", now.len, known.len));
        }
        if known.modified != now.modified {
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

    /// Whether a new change time has a harmless cause, given that size and modification time are unchanged.
    /// Harmless causes are new links, mode, owner or name. Otherwise someone may have written to the file and
    /// then set the modification time back.
    fn explains_ctime(&self, known: &Version, now: &Version) -> bool {
        // `moved` may already have this change time, because several threads may judge the same change.
        known.attributes != now.attributes
            || (!self.is_at_path() && *self.moved.get_or_init(|| now.changed) == now.changed)
    }

    /// From now on, `witness` decides whether a new change time comes from a write. It must have been active
    /// already when `check` or `settle` last confirmed the source.
    pub fn set_witness(&self, witness: Arc<dyn WriteWitness>) {
        *self.witness.lock() = Some(witness);
    }

    /// Whether the path still leads to this file.
    pub fn is_at_path(&self) -> bool {
        self.file.is_at_path()
    }

    fn set_changed(&self, detail: String) -> Error {
        self.notes.set_changed(self.path(), detail, self.file.is_pinned())
    }

    /// Whether the file is known to have changed, or a check finds that it has changed. Only files on local
    /// file systems are checked, so this never waits.
    pub(super) fn is_changed_now(&self) -> bool {
        let changed = |file: Arc<File>| self.check_open(&file).is_err();
        self.notes.is_changed()
            || (self.file.file_system.is_local() && self.open_file().is_some_and(changed))
    }
}
