//! Sources of bytes. A source has a version and can be read by ranges. It is a local file, or a file of another store.

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
#[cfg(test)]
pub(crate) use store_kind::tests::MeasuredStore;
pub use store_kind::{ObjectRead, StoreKind, StoreListing};
pub use store_probe::{StateMark, StoreProbe, StoreSample};

use crate::error::{Error, Result, SourceUri};
use crate::format::tensorizer::decryptor::Decryptor;
use crate::hash::{Digest, Hasher};
use crate::parallel::in_parallel;
use crate::version::{QueueKey, Version};
use crate::zeros::are_zeros;
use notes::Notes;

/// Number of bytes that are hashed at a time.
const HASH_CHUNK_LEN: usize = 256 << 10;

/// Maximum number of remote sources that are checked concurrently.
const ASKED_MAX: usize = 64;

/// The queue for the reads of a source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadQueue {
    pub(crate) key: QueueKey,
    /// `None` if the reads do not go to a file of this machine.
    pub(crate) file_system: Option<FileSystem>,
    /// Whether a read may wait for another machine, perhaps for ever.
    pub(crate) may_block: bool,
}

/// A source of bytes that must not change after it was opened.
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
    /// `Error::Io` if it cannot be opened, or is not a regular file.
    pub(crate) fn open(path: &Path) -> Result<Arc<Source>> {
        LocalFile::open(path).map(|file| Arc::new(Source::Local(file)))
    }

    /// The regular file at `path`, which had the version `version` when it was last examined. The first read opens it.
    /// Its bytes are valid only if a later `check` finds the same version.
    pub(crate) fn closed(path: &Path, version: Version) -> Arc<Source> {
        Arc::new(Source::Local(LocalFile::closed(path, version)))
    }

    /// The file at `path` of `store`, which had the version `version` when it was last examined.
    pub(crate) fn stored(store: &Arc<dyn StoreKind>, path: &Path, version: Version) -> Arc<Source> {
        Arc::new(Source::Stored(StoreFile::new(store, path, version)))
    }

    /// The regular file that is open as `file`, taken over from another process that knew it in the version `version`.
    /// `path` may lead to another file now.
    pub fn adopted(path: &Path, version: Version, file: std::fs::File) -> Arc<Source> {
        Arc::new(Source::Local(LocalFile::adopted(path, version, Arc::new(file))))
    }

    /// The regular file that is open as `file`. `path` is its name in messages and may lead to another file. A
    /// pin keeps the file open.
    ///
    /// # Errors
    /// `Error::Io` if fstat(2) fails or the file is not a regular one.
    pub fn of_open_file(path: &Path, file: std::fs::File) -> Result<Arc<Source>> {
        LocalFile::of_open_file(path, Arc::new(file)).map(|file| Arc::new(Source::Local(file)))
    }

    /// Sets the known version back to an earlier version of the same file, so that the next check judges all changes
    /// since that version.
    pub fn set_known(&self, earlier: Version) {
        match self {
            Source::Local(file) => file.set_known(earlier),
            Source::Stored(file) if file.version().content() != earlier.content() => {
                file.set_replaced();
            }
            Source::Stored(_) => {}
        }
    }

    /// A new source for the current state of the file. For a local file, both sources share the descriptor.
    ///
    /// # Errors
    /// `Error::Io` if its version cannot be read.
    pub fn as_it_is_now(&self) -> Result<Arc<Source>> {
        Ok(Arc::new(match self {
            Source::Local(file) => Source::Local(file.as_it_is_now()?),
            Source::Stored(file) => Source::Stored(file.in_version(file.look()?)),
        }))
    }

    /// The same source in closed state. Takes no lock, so a child made by fork(2) can call it whatever other
    /// threads were doing at the fork.
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

    /// The local file, if the source is one. Callers use it to get a descriptor, a path of this machine or the page
    /// cache. They must also work if the source is not a local file.
    pub fn local(&self) -> Option<&LocalFile> {
        match self {
            Source::Local(file) => Some(file),
            Source::Stored(_) => None,
        }
    }

    /// The open local copy of a remote file. Reads that need a descriptor use the copy in place of the store. Its bytes
    /// stay the same while it is open. Never waits for the disk.
    pub fn copy(&self) -> Option<Arc<LocalCopy>> {
        match self {
            Source::Local(_) => None,
            Source::Stored(file) => file.copy(),
        }
    }

    /// Opens the local copy of a remote file, if the store has the whole file now. May wait for the disk.
    pub fn open_local_copy(&self) {
        if let Source::Stored(file) = self {
            file.open_local_copy();
        }
    }

    /// Stops the use of the local copy after a failed read of it. Does nothing if there is no copy.
    pub(crate) fn leave_copy(&self) {
        if let Source::Stored(file) = self
            && file.copy.opened().is_some()
        {
            file.copy.refuse();
        }
    }

    /// An open file with the bytes of the source: the local file or the local copy. The bytes stay while it is open.
    pub fn open_bytes(&self) -> Option<Arc<std::fs::File>> {
        match self {
            Source::Local(file) => file.file().ok(),
            Source::Stored(file) => file.copy().map(|copy| copy.file()),
        }
    }

    /// Whether a read may wait for another machine, perhaps for ever. Reads of a local copy do not wait, but
    /// checks of the source still ask the store.
    pub fn reads_may_block(&self) -> bool {
        self.may_block() && self.copy().is_none()
    }

    /// The queue to which reads of this source belong now. If they read a file of this machine, also its file system.
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

    /// Name of the store for messages. `None` if the source is a local file.
    pub(crate) fn store_name(&self) -> Option<String> {
        match self {
            Source::Local(_) => None,
            Source::Stored(file) => file.store_name(),
        }
    }

    /// The SHA-256 of the source in hexadecimal, if its store knows it.
    pub(crate) fn stored_sha256(&self) -> Option<String> {
        match self {
            Source::Local(_) => None,
            Source::Stored(file) => file.sha256(),
        }
    }

    /// The store of the source. `None` for a local file.
    pub(crate) fn store_kind(&self) -> Option<&Arc<dyn StoreKind>> {
        match self {
            Source::Local(_) => None,
            Source::Stored(file) => Some(file.store()),
        }
    }

    /// Number of bytes in flight that keep the connections to the store busy, if that was measured. `None` if the
    /// bytes are on this machine.
    pub(crate) fn wanted_in_flight(&self) -> Option<u64> {
        self.store_kind().filter(|_| self.copy().is_none())?.wanted_in_flight()
    }

    fn notes(&self) -> &Notes {
        match self {
            Source::Local(file) => &file.notes,
            Source::Stored(file) => &file.notes,
        }
    }

    /// The location of the source, for errors.
    pub fn uri(&self) -> SourceUri {
        self.path().into()
    }

    /// The path in the store by which the source was opened.
    pub fn path(&self) -> &Path {
        match self {
            Source::Local(file) => file.path(),
            Source::Stored(file) => file.path(),
        }
    }

    /// The version at the open. For a local file, it is updated after changes of attributes that do not affect
    /// the bytes.
    pub fn version(&self) -> Version {
        match self {
            Source::Local(file) => file.version(),
            Source::Stored(file) => *file.version(),
        }
    }

    /// The version at the first open. The bytes have not changed since.
    fn first(&self) -> &Version {
        match self {
            Source::Local(file) => file.first(),
            Source::Stored(file) => file.version(),
        }
    }

    /// The queue of the reads of this source.
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

    /// Whether a read or a check may wait for another machine, perhaps for ever.
    pub fn may_block(&self) -> bool {
        match self {
            Source::Local(file) => !file.file_system().is_local(),
            Source::Stored(file) => file.may_block(),
        }
    }

    /// Whether the bytes are in memory only, so that a read waits for nothing.
    pub fn is_in_memory(&self) -> bool {
        self.local().is_some_and(|file| file.file_system().is_in_memory())
    }

    /// Notes whether reads of the source exceed their time limit. Returns the previous value.
    pub fn set_stalled(&self, stalled: bool) -> bool {
        self.notes().set_stalled(stalled)
    }

    /// Keeps the local file or the local copy open until the pin is dropped. The holder of the pin can read the
    /// old bytes even if the file is deleted or replaced meanwhile.
    ///
    /// # Errors
    /// `Error::Io` if the file cannot be opened. `Error::Changed` if another file is at the path now.
    pub fn pin(&self) -> Result<Pin> {
        match self {
            Source::Local(file) => file.pin(),
            Source::Stored(file) => Ok(file.pin()),
        }
    }

    /// Closes the local file or the local copy unless it is pinned. A later read opens it again.
    pub fn release(&self) {
        match self {
            Source::Local(file) => file.release(),
            Source::Stored(file) => file.copy.release(),
        }
    }

    fn is_open_unpinned(&self) -> bool {
        match self {
            Source::Local(file) => file.is_open_unpinned(),
            Source::Stored(file) => file.copy.is_open_unpinned(),
        }
    }

    /// Reads exactly `buf.len()` stored bytes at `offset`, without decryption. The bytes are valid only if a
    /// `check` after the read succeeds.
    ///
    /// # Errors
    /// `Error::Changed` if the source ends before the last of these bytes, `Error::Io` if the read fails.
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.read_until(buf, offset, None)
    }

    /// Reads like `read_exact_at`. A store makes no further attempt after `until`, because the reader has given up by
    /// then.
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

    /// Fills `buf` with the stored bytes at `offset`, if they are cached on this machine. Returns whether they
    /// are. If not, the content of `buf` is unspecified.
    pub(crate) fn read_if_cached(&self, buf: &mut [u8], offset: u64) -> bool {
        match self {
            Source::Local(_) => false,
            Source::Stored(_) if are_zeros(offset) => false,
            Source::Stored(file) => file.read_if_cached(buf, offset),
        }
    }

    /// Sets the decryptor that engines and `read_all` apply to the tensors from now on. Must be called before
    /// the first of these reads.
    pub(crate) fn set_decryptor(&self, decryptor: Arc<Decryptor>) {
        let _ = self.notes().decryptor.set(decryptor);
    }

    /// The decryptor of the tensors. `None` if they are not encrypted.
    pub fn decryptor(&self) -> Option<&Arc<Decryptor>> {
        self.notes().decryptor.get()
    }

    /// Whether the tensors are encrypted. Then the stored bytes must not be returned to a reader who expects
    /// the decrypted bytes that an engine returns.
    pub fn is_encrypted(&self) -> bool {
        self.decryptor().is_some()
    }

    /// The bytes that have to be read for `range`. The result is larger than `range` if `range` begins or ends inside
    /// an encrypted piece, because only whole pieces can be decrypted.
    pub fn cover(&self, range: &Range<u64>) -> Range<u64> {
        self.decryptor().map_or_else(|| range.clone(), |decryptor| decryptor.cover(range))
    }

    /// Decrypts bytes that were read from `start` on. They must consist of whole pieces. Logs the first failure.
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

    /// Fails if the source is known to have changed. Does not access the source.
    ///
    /// # Errors
    /// `Error::Changed`.
    pub fn check_known(&self) -> Result<()> {
        self.notes().check_known(self.path())
    }

    /// Checks that the source is still the one that was opened, with the same bytes.
    ///
    /// Once this check has failed, every later check and read fails too, even if the source is changed back,
    /// because bytes that were read before may be in use. The new state needs a new source.
    ///
    /// # Errors
    /// `Error::Changed` if the bytes may have changed, `Error::Io` if the version cannot be read.
    pub fn check(&self) -> Result<()> {
        match self {
            Source::Local(file) => file.check(),
            Source::Stored(file) => file.check(),
        }
    }

    /// Checks the source like `check`, directly after reads of it. No request is sent for a remote file, because the
    /// store has checked the version with each read.
    ///
    /// # Errors
    /// The errors of `check`.
    pub fn check_after_read(&self) -> Result<()> {
        match self {
            Source::Local(file) => file.check(),
            Source::Stored(_) => self.check_known(),
        }
    }

    /// Like `check`, for a source of which no reader has bytes yet. A local file with a new change time, but the same
    /// length and modification time, passes if its header bytes are the same as at the open.
    ///
    /// # Errors
    /// The errors of `check`. `Error::Io` if the source cannot be opened.
    pub fn settle(&self) -> Result<()> {
        match self {
            Source::Local(file) => file.settle(),
            Source::Stored(file) => file.check(),
        }
    }

    /// Reads the current version, whether or not it has changed. For a local file, this is the version of the
    /// open file.
    ///
    /// # Errors
    /// `Error::Io` if its version cannot be read.
    pub fn look(&self) -> Result<Version> {
        match self {
            Source::Local(file) => file.look(),
            Source::Stored(file) => file.look(),
        }
    }

    /// Whether the path still leads to this file, in any version.
    pub fn is_at_path(&self) -> bool {
        match self {
            Source::Local(file) => file.is_at_path(),
            Source::Stored(file) => {
                file.look().is_ok_and(|now| now.file() == file.version().file())
            }
        }
    }

    /// Whether the path still leads to this version, and the bytes are certainly unchanged. Opens nothing. If
    /// nothing has changed, this takes one access to the path.
    ///
    /// If the change time is new, the result is true only with a witness. Without a witness, the next open could find
    /// old bytes in the page cache.
    pub fn is_current(&self) -> bool {
        match self {
            Source::Local(file) => file.is_current(),
            Source::Stored(file) => file.check().is_ok(),
        }
    }

    /// Whether the source is known to have changed, or a check that cannot block finds that it has.
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

    /// Notes the hash of the header: the bytes in the ranges `described`, which describe the tensors.
    pub(crate) fn set_described(&self, described: Vec<Range<u64>>, hash: Digest) {
        let _ = self.notes().described.set((described, hash));
    }

    /// The hash of the bytes in `ranges`, in this order.
    ///
    /// # Errors
    /// The errors of `read_exact_at`.
    pub(crate) fn hash_ranges(&self, ranges: &[Range<u64>]) -> Result<Digest> {
        hash_of(ranges, |buf, offset| self.read_exact_at(buf, offset))
    }

    /// From now on, changes of the source are expected and are not logged as errors.
    pub fn set_followed(&self) {
        self.notes().followed.store(true, Ordering::Relaxed);
    }
}

/// The hash of the bytes that `read` returns for `ranges`, in this order.
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

/// Whether `holds` is true for each of `sources`. It is called for all of them. The calls for remote sources
/// run concurrently, because each takes a round trip.
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

/// Runs `close`, which closes `sources`. If the close may wait for a server, perhaps for ever, it runs on a
/// thread of its own.
pub fn close_apart(sources: &[Arc<Source>], close: impl FnOnce() + Send + 'static) {
    if !sources.iter().any(|source| source.may_block()) {
        return close();
    }
    if let Err(e) = std::thread::Builder::new().name("close".to_owned()).spawn(close) {
        tracing::error!("cannot start a thread: {e}");
    }
}

/// Closes the open sources among `sources`, except pinned ones. Does not wait.
pub fn release_unpinned(sources: &[Arc<Source>]) {
    let left: Vec<Arc<Source>> =
        sources.iter().filter(|source| source.is_open_unpinned()).cloned().collect();
    let closed = left.clone();
    close_apart(&left, move || closed.iter().for_each(|source| source.release()));
}
