//! Sources of bytes: something with a version and ranged reads. Each is a local file, or a file of a
//! store of another kind.

mod copy_mode;
mod descriptors;
mod file_system;
mod local;
mod local_copy;
mod notes;
mod option_files;
pub(crate) mod page_cache;
mod parts;
mod permissions;
mod secret;
mod stat;
mod store_file;
mod store_kind;
mod store_probe;
mod without_proc;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

pub use copy_mode::CopyMode;
pub use descriptors::{Pin, raise_limit};
pub use file_system::FileSystem;
pub use local::{LocalFile, WriteWitness};
pub use local_copy::LocalCopy;
pub use option_files::{read_option_file, read_text};
pub use parts::MemoryParts;
pub use permissions::PathPermissions;
pub use secret::SecretOrigin;
pub use stat::local_version;
pub(crate) use stat::{lacks_statx, version_in_folder, version_now};
pub use store_file::StoreFile;
pub use store_kind::{StoreKind, StoreListing};
pub use store_probe::{StateMark, StoreProbe, StoreSample};

use crate::error::{Error, Result, SourceUri};
use crate::format::tensorizer::decryptor::Decryptor;
use crate::hash::{Digest, Hasher};
use crate::parallel::in_parallel;
use crate::version::{QueueKey, Version};
use crate::zeros::are_zeros;
use notes::Notes;

/// Bytes hashed at a time.
const HASH_CHUNK_LEN: usize = 256 << 10;

/// Maximum number of sources of stores that are asked at the same time.
const ASKED_MAX: usize = 64;

/// Which queue the reads of a source go to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadQueue {
    pub(crate) key: QueueKey,
    /// `None` if the source is no file of this machine.
    pub(crate) file_system: Option<FileSystem>,
    /// Whether a read may wait for another machine or a server, perhaps for ever.
    pub(crate) may_block: bool,
}

/// A source of bytes that must stay what it was when it was opened.
#[derive(Debug)]
pub enum Source {
    /// A regular file.
    Local(LocalFile),
    /// A file of a store that is not the local file system.
    Stored(StoreFile),
}

impl Source {
    /// Opens the regular file at `path`, an absolute path without symbolic links.
    ///
    /// # Errors
    /// `Error::Io` where it cannot be opened, or is no regular file.
    pub(crate) fn open(path: &Path) -> Result<Arc<Source>> {
        LocalFile::open(path).map(|file| Arc::new(Source::Local(file)))
    }

    /// The regular file at `path`, which was `version` when it was looked at; not opened before
    /// it is read. Its bytes are valid only if `check` then finds the same version.
    pub(crate) fn closed(path: &Path, version: Version) -> Arc<Source> {
        Arc::new(Source::Local(LocalFile::closed(path, version)))
    }

    /// The file at `path` of `store`, which was `version` when it was looked at.
    pub(crate) fn stored(store: &Arc<dyn StoreKind>, path: &Path, version: Version) -> Arc<Source> {
        Arc::new(Source::Stored(StoreFile::new(store, path, version)))
    }

    /// The regular file that was open as `file` at `path` in another process, and that was
    /// `version` there. The path may lead to another file by now.
    pub fn adopted(path: &Path, version: Version, file: std::fs::File) -> Arc<Source> {
        Arc::new(Source::Local(LocalFile::adopted(path, version, Arc::new(file))))
    }

    /// The regular file that is open as `file`, called `path`, which need not lead to it. A pin keeps
    /// it open.
    ///
    /// # Errors
    /// `Error::Io` if `fstat` fails or it is no regular file.
    pub fn of_open_file(path: &Path, file: std::fs::File) -> Result<Arc<Source>> {
        LocalFile::of_open_file(path, Arc::new(file)).map(|file| Arc::new(Source::Local(file)))
    }

    /// Sets the known version back to an earlier one of the same file, so that the next check
    /// judges all changes since.
    pub fn set_known(&self, earlier: Version) {
        match self {
            Source::Local(file) => file.set_known(earlier),
            Source::Stored(file) if file.version().content() != earlier.content() => {
                file.set_replaced();
            }
            Source::Stored(_) => {}
        }
    }

    /// A new source for the file as it is now, which shares the descriptor of a local file.
    ///
    /// # Errors
    /// `Error::Io` if its version cannot be read.
    pub fn as_it_is_now(&self) -> Result<Arc<Source>> {
        Ok(Arc::new(match self {
            Source::Local(file) => Source::Local(file.as_it_is_now()?),
            Source::Stored(file) => Source::Stored(file.in_version(file.look()?)),
        }))
    }

    /// The same source, closed. Takes no lock, so that a child made by fork(2) can call it
    /// whatever threads of the parent were doing.
    pub(crate) fn renewed(&self) -> Arc<Source> {
        let renewed = match self {
            Source::Local(file) => Source::Local(file.renewed()),
            Source::Stored(file) => Source::Stored(file.in_version(*file.version())),
        };
        if let Some(decryptor) = self.decryptor() {
            renewed.set_decryptor(decryptor.clone());
        }
        Arc::new(renewed)
    }

    /// The local file, where the source is one. Callers that need a descriptor, a path of this machine or
    /// its page cache ask for it, and cope without.
    pub fn local(&self) -> Option<&LocalFile> {
        match self {
            Source::Local(file) => Some(file),
            Source::Stored(_) => None,
        }
    }

    /// The open local copy of a file of a store. Reads that need a descriptor take it in place of the
    /// store. It has the same bytes for as long as it is open. Never waits for the disk.
    pub fn copy(&self) -> Option<Arc<LocalCopy>> {
        match self {
            Source::Local(_) => None,
            Source::Stored(file) => file.copy(),
        }
    }

    /// Opens the local copy of a file of a store, if the store has all of it now. May wait for the disk.
    pub fn open_local_copy(&self) {
        if let Source::Stored(file) = self {
            file.open_local_copy();
        }
    }

    /// Reads no more from the local copy, which could not be read. Without one it does nothing.
    pub(crate) fn leave_copy(&self) {
        if let Source::Stored(file) = self
            && file.copy_slot().opened().is_some()
        {
            file.copy_slot().refuse();
        }
    }

    /// An open file with its bytes, which keeps them while it is open: the local file, or the local copy.
    pub fn open_bytes(&self) -> Option<Arc<std::fs::File>> {
        match self {
            Source::Local(file) => file.file().ok(),
            Source::Stored(file) => file.copy().map(|copy| copy.file()),
        }
    }

    /// Whether a read may wait for another machine or a server, perhaps for ever. Reads of a local copy
    /// do not, though looks at the store do.
    pub fn reads_may_block(&self) -> bool {
        self.may_block() && self.copy().is_none()
    }

    /// The queue of its reads now, with the kind of file system where they are reads of a file.
    pub(crate) fn read_queue(&self) -> ReadQueue {
        let copy = self.copy();
        let local = self.local().or_else(|| copy.as_deref().map(LocalCopy::local));
        ReadQueue {
            key: copy
                .as_ref()
                .map_or_else(|| self.queue_key(), |copy| copy.local().first().queue_key()),
            file_system: local.map(LocalFile::file_system),
            may_block: copy.is_none() && self.may_block(),
        }
    }

    /// Name of its store, for people, where the source is no local file.
    pub(crate) fn store_name(&self) -> Option<String> {
        match self {
            Source::Local(_) => None,
            Source::Stored(file) => file.store_name(),
        }
    }

    /// Its sha256 in hexadecimal, if its store knows it.
    pub(crate) fn stored_sha256(&self) -> Option<String> {
        match self {
            Source::Local(_) => None,
            Source::Stored(file) => file.sha256(),
        }
    }

    /// The store that it lies in. `None` for files of this machine.
    pub(crate) fn store_kind(&self) -> Option<&Arc<dyn StoreKind>> {
        match self {
            Source::Local(_) => None,
            Source::Stored(file) => Some(file.store()),
        }
    }

    fn notes(&self) -> &Notes {
        match self {
            Source::Local(file) => &file.notes,
            Source::Stored(file) => &file.notes,
        }
    }

    /// Where it lies, for errors.
    pub fn uri(&self) -> SourceUri {
        self.path().into()
    }

    /// The path that was opened, in its store.
    pub fn path(&self) -> &Path {
        match self {
            Source::Local(file) => file.path(),
            Source::Stored(file) => file.path(),
        }
    }

    /// The version that was opened; changes of attributes that leave the bytes alone follow.
    pub fn version(&self) -> Version {
        match self {
            Source::Local(file) => file.version(),
            Source::Stored(file) => *file.version(),
        }
    }

    /// The version that was opened first, which has the same bytes.
    fn first(&self) -> &Version {
        match self {
            Source::Local(file) => file.first(),
            Source::Stored(file) => file.version(),
        }
    }

    /// The queue that its reads belong to.
    pub fn queue_key(&self) -> QueueKey {
        self.first().queue_key()
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.first().len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a read or a look may wait for another machine or a server, perhaps for ever.
    pub fn may_block(&self) -> bool {
        match self {
            Source::Local(file) => !file.file_system().is_local(),
            Source::Stored(file) => file.may_block(),
        }
    }

    /// Whether its bytes lie in memory alone, so that a read of them waits for nothing.
    pub fn is_in_memory(&self) -> bool {
        self.local().is_some_and(|file| file.file_system().is_in_memory())
    }

    /// Notes whether reads of it come back in time; returns what was noted before.
    pub fn set_stalled(&self, stalled: bool) -> bool {
        self.notes().set_stalled(stalled)
    }

    /// Keeps a local file, or a local copy, open until the pin is dropped: the old bytes stay with the
    /// holder, even if the file is deleted or replaced meanwhile.
    ///
    /// # Errors
    /// `Error::Io` where it cannot be opened, `Error::Changed` where another file stands there.
    pub fn pin(&self) -> Result<Pin> {
        match self {
            Source::Local(file) => file.pin(),
            Source::Stored(file) => Ok(file.pin()),
        }
    }

    /// Closes a local file or a local copy unless it is pinned; a later read opens it again.
    pub fn release(&self) {
        match self {
            Source::Local(file) => file.release(),
            Source::Stored(file) => file.copy_slot().release(),
        }
    }

    fn is_open_unpinned(&self) -> bool {
        match self {
            Source::Local(file) => file.is_open_unpinned(),
            Source::Stored(file) => file.copy_slot().is_open_unpinned(),
        }
    }

    /// Reads exactly `buf.len()` bytes at `offset`, as they are stored. The bytes count only once `check` has confirmed
    /// the source after the read.
    ///
    /// # Errors
    /// `Error::Changed` where the source ends before, `Error::Io` where the read fails.
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.read_until(buf, offset, None)
    }

    /// Reads like `read_exact_at`. After `until` nobody waits for the bytes, so that a store stops trying.
    ///
    /// # Errors
    /// The errors of `read_exact_at`.
    pub(crate) fn read_until(
        &self,
        buf: &mut [u8],
        offset: u64,
        until: Option<Instant>,
    ) -> Result<()> {
        if are_zeros(offset) {
            self.check_known()?;
            buf.fill(0);
            return Ok(());
        }
        match self {
            Source::Local(file) => file.read_exact_at(buf, offset),
            Source::Stored(file) => file.read_exact_at(buf, offset, until),
        }
    }

    /// Fills `buf` with the bytes at `offset`, as they are stored, if they are kept on this machine. Returns whether they
    /// are; if not, the contents of `buf` are unspecified.
    pub(crate) fn read_kept(&self, buf: &mut [u8], offset: u64) -> bool {
        match self {
            Source::Local(_) => false,
            Source::Stored(_) if are_zeros(offset) => false,
            Source::Stored(file) => file.read_kept(buf, offset),
        }
    }

    /// From now on engines and `read_all` decrypt the tensors in its bytes. Called before the first
    /// of these reads.
    pub(crate) fn set_decryptor(&self, decryptor: Arc<Decryptor>) {
        let _ = self.notes().decryptor.set(decryptor);
    }

    /// The decryptor of its tensors. `None` if they are not encrypted.
    pub fn decryptor(&self) -> Option<&Arc<Decryptor>> {
        self.notes().decryptor.get()
    }

    /// Whether its tensors are encrypted. Then its stored bytes must not be handed out in place of
    /// those that an engine reads.
    pub fn is_encrypted(&self) -> bool {
        self.decryptor().is_some()
    }

    /// The bytes that are read for `range`: more than these if it has a part of an encrypted piece.
    pub fn cover(&self, range: &Range<u64>) -> Range<u64> {
        self.decryptor().map_or_else(|| range.clone(), |decryptor| decryptor.cover(range))
    }

    /// Decrypts bytes that were read from `start` on, and that hold whole pieces. Logs the first
    /// failure.
    ///
    /// # Errors
    /// `decrypt_failed`. The content of `bytes` is then undefined.
    pub(crate) fn decrypt(&self, start: u64, bytes: &mut [u8]) -> Result<()> {
        let Some(decryptor) = self.decryptor() else { return Ok(()) };
        decryptor.decrypt(start, bytes).map_err(|fault| Error::refused(self.path(), fault))
    }

    /// Marks the source as changed because it ends before byte `end`.
    pub fn ends_before(&self, end: u64) -> Error {
        match self {
            Source::Local(file) => file.ends_before(end),
            Source::Stored(file) => file.ends_before(end),
        }
    }

    /// Fails if the source is known to have changed; does not look at it.
    ///
    /// # Errors
    /// `Error::Changed`.
    pub fn check_known(&self) -> Result<()> {
        self.notes().check_known(self.path())
    }

    /// Confirms that the source is still the one that was opened.
    ///
    /// Once it is not, this and all reads fail, even if it is changed back: bytes of it that were
    /// read before may be in use. Its new state is another source.
    ///
    /// # Errors
    /// `Error::Changed` where its bytes may have changed, `Error::Io` if its version cannot be read.
    pub fn check(&self) -> Result<()> {
        match self {
            Source::Local(file) => file.check(),
            Source::Stored(file) => file.check(),
        }
    }

    /// Confirms the source like `check`, right after reads of it. A store answers each read for the version that it names,
    /// so that it need not be asked again.
    ///
    /// # Errors
    /// The errors of `check`.
    pub fn check_after_read(&self) -> Result<()> {
        match self {
            Source::Local(file) => file.check(),
            Source::Stored(_) => self.check_known(),
        }
    }

    /// Like `check`, for a source of which nobody has any bytes yet: after a change of nothing but
    /// its change time it is enough that the bytes before its data are those that were proved.
    ///
    /// # Errors
    /// The errors of `check`, and `Error::Io` where it cannot be opened.
    pub fn settle(&self) -> Result<()> {
        match self {
            Source::Local(file) => file.settle(),
            Source::Stored(file) => file.check(),
        }
    }

    /// The version now, whether or not it has changed: that of the open file where it is a local one.
    ///
    /// # Errors
    /// `Error::Io` if its version cannot be read.
    pub fn look(&self) -> Result<Version> {
        match self {
            Source::Local(file) => file.look(),
            Source::Stored(file) => file.look(),
        }
    }

    /// Whether the path still leads to this file, in whatever version.
    pub fn is_at_path(&self) -> bool {
        match self {
            Source::Local(file) => file.is_at_path(),
            Source::Stored(file) => {
                file.look().is_ok_and(|now| now.file() == file.version().file())
            }
        }
    }

    /// Whether the path still leads to this version, and its bytes are surely what they were.
    /// Opens nothing, and takes one look at the path where nothing has changed.
    ///
    /// A new change time needs a witness: the next open may find pages of old bytes.
    pub fn is_current(&self) -> bool {
        match self {
            Source::Local(file) => file.is_current(),
            Source::Stored(file) => file.check().is_ok(),
        }
    }

    /// Whether the source is known to have changed, or is seen to have if a look cannot block.
    pub fn is_changed_now(&self) -> bool {
        match self {
            Source::Local(file) => file.is_changed_now(),
            Source::Stored(_) => self.is_changed(),
        }
    }

    /// Whether the source is known to have changed.
    pub fn is_changed(&self) -> bool {
        self.notes().is_changed()
    }

    /// Notes the hash of the bytes that describe the others.
    pub(crate) fn set_described(&self, described: Vec<Range<u64>>, hash: Digest) {
        let _ = self.notes().described.set((described, hash));
    }

    /// The hash of the bytes in `ranges`, one after another.
    ///
    /// # Errors
    /// The errors of `read_exact_at`.
    pub(crate) fn hash_ranges(&self, ranges: &[Range<u64>]) -> Result<Digest> {
        hash_of(ranges, |buf, offset| self.read_exact_at(buf, offset))
    }

    /// From now on the source is expected to change, and no change of it is logged as an error.
    pub fn set_followed(&self) {
        self.notes().followed.store(true, Ordering::Relaxed);
    }
}

/// The hash of the bytes that `read` reads of `ranges`, one after another.
fn hash_of(ranges: &[Range<u64>], read: impl Fn(&mut [u8], u64) -> Result<()>) -> Result<Digest> {
    let mut hasher = Hasher::new();
    let longest = ranges.iter().map(|range| range.end - range.start).max().unwrap_or(0);
    let mut buf = vec![0; HASH_CHUNK_LEN.min(longest as usize)];
    for range in ranges {
        let mut offset = range.start;
        while offset < range.end {
            let chunk = &mut buf[..HASH_CHUNK_LEN.min((range.end - offset) as usize)];
            read(chunk, offset)?;
            hasher.update(chunk);
            offset += chunk.len() as u64;
        }
    }
    Ok(hasher.finish())
}

/// Whether `holds` is true for each of `sources`. All are asked, and those of stores at the same time, because
/// each answer takes a round trip.
pub fn all_hold(sources: &[Arc<Source>], holds: &(dyn Fn(&Arc<Source>) -> bool + Sync)) -> bool {
    let is_stored = |source: &&Arc<Source>| source.store_kind().is_some();
    let (stored, others): (Vec<_>, Vec<_>) = sources.iter().partition(is_stored);
    let (count, mut held) = (stored.len() as u64, 0);
    let ask = |number: u64| Ok(holds(stored[number as usize]));
    let add = &mut |holds: bool| {
        held += u64::from(holds);
        Ok(())
    };
    let asked = count > 1 && in_parallel(count, ASKED_MAX, count, &ask, add).is_ok();
    let all_stored =
        if asked { held == count } else { stored.iter().filter(|s| !holds(s)).count() == 0 };
    all_stored & (others.iter().filter(|source| !holds(source)).count() == 0)
}

/// Runs `close`, which closes `sources`: on a thread of its own where that may have to wait,
/// perhaps for ever, for the server of their file system.
pub fn close_apart(sources: &[Arc<Source>], close: impl FnOnce() + Send + 'static) {
    if !sources.iter().any(|source| source.may_block()) {
        return close();
    }
    if let Err(e) = std::thread::Builder::new().name("close".to_owned()).spawn(close) {
        tracing::error!("cannot start a thread: {e}");
    }
}

/// Closes the open but unpinned ones of `sources`, without waiting.
pub fn release_unpinned(sources: &[Arc<Source>]) {
    let left: Vec<Arc<Source>> =
        sources.iter().filter(|source| source.is_open_unpinned()).cloned().collect();
    let closed = left.clone();
    close_apart(&left, move || closed.iter().for_each(|source| source.release()));
}
