//! Sources of bytes: something with a version and ranged reads. Today each is a local file.

mod copy_mode;
mod descriptors;
mod file_system;
mod identity;
mod local;
mod option_files;
mod secret;
mod without_proc;

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub use copy_mode::CopyMode;
pub use descriptors::{Pin, raise_limit};
pub use file_system::FileSystem;
pub use identity::Identity;
pub(crate) use identity::lacks_statx;
pub use local::{LocalFile, WriteWitness};
pub use option_files::{read_option_file, read_text};
pub use secret::SecretOrigin;

use crate::error::{Error, Result, SourceUri};
use crate::format::tensorizer::decryptor::Decryptor;
use crate::hash::Digest;

/// A source of bytes that must stay what it was when it was opened.
#[derive(Debug)]
pub enum Source {
    /// A regular file.
    Local(LocalFile),
}

/// Tells one state of a source from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// The identity of a local file.
    Inode(Identity),
}

/// The device or service that answers reads: those of one share a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueueKey {
    /// The device, or network mount, of local files.
    Device(u64),
}

impl fmt::Display for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let QueueKey::Device(dev) = *self;
        write!(f, "{}:{}", nix::sys::stat::major(dev), nix::sys::stat::minor(dev))
    }
}

impl Source {
    /// Opens the regular file at `path`, an absolute path without symbolic links.
    ///
    /// # Errors
    /// `Error::Io` where it cannot be opened, or is no regular file.
    pub(crate) fn open(path: &Path) -> Result<Arc<Source>> {
        LocalFile::open(path).map(|file| Arc::new(Source::Local(file)))
    }

    /// The regular file at `path`, which was `identity` when it was looked at; not opened before
    /// it is read. Its bytes count only if `check` then finds that same file.
    pub fn closed(path: &Path, identity: Identity) -> Arc<Source> {
        Arc::new(Source::Local(LocalFile::closed(path, identity)))
    }

    /// The regular file that was open as `file` at `path` in another process, and that was
    /// `identity` there. The path may lead to another file by now.
    pub fn adopted(path: &Path, identity: Identity, file: std::fs::File) -> Arc<Source> {
        Arc::new(Source::Local(LocalFile::adopted(path, identity, file)))
    }

    /// The regular file that is open as `file`, called `path`, which need not lead to it. A pin keeps
    /// it open.
    ///
    /// # Errors
    /// `Error::Io` where it cannot be looked at, or is no regular file.
    pub fn of_open_file(path: &Path, file: std::fs::File) -> Result<Arc<Source>> {
        LocalFile::of_open_file(path, file).map(|file| Arc::new(Source::Local(file)))
    }

    /// Sets the known identity back to an earlier one of the same inode, so that the next check
    /// judges all changes since.
    pub fn set_known(&self, earlier: Identity) {
        let Source::Local(file) = self;
        file.set_known(earlier);
    }

    /// A new source for the file as it is now, which shares the descriptor.
    ///
    /// # Errors
    /// `Error::Io` where it cannot be looked at.
    pub fn as_it_is_now(&self) -> Result<Arc<Source>> {
        let Source::Local(file) = self;
        file.as_it_is_now().map(|file| Arc::new(Source::Local(file)))
    }

    /// The same source, closed. Takes no lock, so that a child made by fork(2) can call it
    /// whatever threads of the parent were doing.
    pub(crate) fn renewed(&self) -> Arc<Source> {
        let Source::Local(file) = self;
        Arc::new(Source::Local(file.renewed()))
    }

    /// The local file, where the source is one.
    pub fn local(&self) -> Option<&LocalFile> {
        let Source::Local(file) = self;
        Some(file)
    }

    /// Where it lies, for errors.
    pub fn uri(&self) -> SourceUri {
        let Source::Local(file) = self;
        file.path().into()
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        let Source::Local(file) = self;
        file.path()
    }

    /// The identity of a local file when it was opened; metadata changes that leave the bytes
    /// alone follow.
    pub fn identity(&self) -> Identity {
        let Source::Local(file) = self;
        file.identity()
    }

    /// The version that was opened.
    pub fn version(&self) -> Version {
        let Source::Local(file) = self;
        Version::Inode(file.identity())
    }

    /// The queue that its reads belong to.
    pub fn queue_key(&self) -> QueueKey {
        let Source::Local(file) = self;
        QueueKey::Device(file.identity().dev)
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        let Source::Local(file) = self;
        file.identity().len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a read or a look may wait for another machine or a server, perhaps for ever.
    pub fn may_block(&self) -> bool {
        let Source::Local(file) = self;
        !file.file_system().is_local()
    }

    /// Whether its bytes lie in memory alone, so that a read of them waits for nothing.
    pub fn is_in_memory(&self) -> bool {
        let Source::Local(file) = self;
        file.file_system().is_in_memory()
    }

    /// Notes whether reads of it come back in time; returns what was noted before.
    pub fn set_stalled(&self, stalled: bool) -> bool {
        let Source::Local(file) = self;
        file.set_stalled(stalled)
    }

    /// Keeps the source open until the pin is dropped: the old bytes stay with the holder, even if
    /// the file is deleted or replaced meanwhile.
    ///
    /// # Errors
    /// `Error::Io` where it cannot be opened, `Error::Changed` where another file stands there.
    pub fn pin(&self) -> Result<Pin> {
        let Source::Local(file) = self;
        file.pin()
    }

    /// Closes the source unless it is pinned; a later read opens it again.
    pub fn release(&self) {
        let Source::Local(file) = self;
        file.release();
    }

    /// Reads exactly `buf.len()` bytes at `offset`, as they are stored. The bytes count only once `check` has confirmed
    /// the source after the read.
    ///
    /// # Errors
    /// `Error::Changed` where the source ends before, `Error::Io` where the read fails.
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let Source::Local(file) = self;
        file.read_exact_at(buf, offset)
    }

    /// From now on engines and `read_all` decrypt the tensors in its bytes. Called before the first
    /// of these reads.
    pub(crate) fn set_decryptor(&self, decryptor: Arc<Decryptor>) {
        let Source::Local(file) = self;
        file.set_decryptor(decryptor);
    }

    /// The decryptor of its tensors. `None` if they are not encrypted.
    pub fn decryptor(&self) -> Option<&Arc<Decryptor>> {
        let Source::Local(file) = self;
        file.decryptor()
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
        let Source::Local(file) = self;
        file.decrypt(start, bytes)
    }

    /// Marks the source as changed because it ends before byte `end`.
    pub fn ends_before(&self, end: u64) -> Error {
        let Source::Local(file) = self;
        file.ends_before(end)
    }

    /// Fails if the source is known to have changed; does not look at it.
    ///
    /// # Errors
    /// `Error::Changed`.
    pub fn check_known(&self) -> Result<()> {
        let Source::Local(file) = self;
        file.check_known()
    }

    /// Confirms that the source is still the one that was opened.
    ///
    /// Once it is not, this and all reads fail, even if it is changed back: bytes of it that were
    /// read before may be in use. Its new state is another source.
    ///
    /// # Errors
    /// `Error::Changed` where its bytes may have changed, `Error::Io` where it cannot be looked at.
    pub fn check(&self) -> Result<()> {
        let Source::Local(file) = self;
        file.check()
    }

    /// Like `check`, for a source of which nobody has any bytes yet: after a change of nothing but
    /// its change time it is enough that the bytes before its data are those that were proved.
    ///
    /// # Errors
    /// The errors of `check`, and `Error::Io` where it cannot be opened.
    pub fn settle(&self) -> Result<()> {
        let Source::Local(file) = self;
        file.settle()
    }

    /// Whether the path still leads to this version, and its bytes are surely what they were.
    /// Opens nothing, and takes one look at the path where nothing has changed.
    ///
    /// A new change time needs a witness: the next open may find pages of old bytes.
    pub fn is_current(&self) -> bool {
        let Source::Local(file) = self;
        file.is_current()
    }

    /// Whether the source is known to have changed, or is seen to have if a look cannot block.
    pub fn is_changed_now(&self) -> bool {
        let Source::Local(file) = self;
        file.is_changed_now()
    }

    /// Whether the source is known to have changed.
    pub fn is_changed(&self) -> bool {
        let Source::Local(file) = self;
        file.is_changed()
    }

    /// Notes the hash of the bytes that describe the others.
    pub(crate) fn set_described(&self, described: Vec<Range<u64>>, hash: Digest) {
        let Source::Local(file) = self;
        file.set_described(described, hash);
    }

    /// The hash of the bytes in `ranges`, one after another.
    ///
    /// # Errors
    /// The errors of `read_exact_at`.
    pub(crate) fn hash_ranges(&self, ranges: &[Range<u64>]) -> Result<Digest> {
        let Source::Local(file) = self;
        file.hash_ranges(ranges)
    }

    /// From now on the source is expected to change, and no change of it is logged as an error.
    pub fn set_followed(&self) {
        let Source::Local(file) = self;
        file.set_followed();
    }

    /// Whether it is open now, without a pin.
    fn is_open_unpinned(&self) -> bool {
        let Source::Local(file) = self;
        file.is_open_unpinned()
    }
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
    let left = sources.iter().filter(|source| source.is_open_unpinned());
    let left: Vec<Arc<Source>> = left.cloned().collect();
    let closed = left.clone();
    close_apart(&left, move || closed.iter().for_each(|source| source.release()));
}
