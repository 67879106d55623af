//! The folder of assembled copies: its checks, its lock, its files and its budget.
//!
//! Several daemons may share the folder. A daemon takes the lock of the folder for a short time
//! whenever it changes the entries. The writer of a copy locks the copy while it writes, and each
//! user of a copy locks it while the copy is open. The locks are made with flock(2), so they end
//! with the process.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FlockArg};
use nix::libc;
use tensorfs::internal::atomic_file::{TemporaryFile, sync_folder};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::source::{FileSystem, local_version};
use tensorfs::internal::version::Version;

use super::entry::CopyFailure;
use super::record::Record;

/// This file marks a folder for copies, so that files of other folders are never treated as copies.
/// The lock of this file is the lock of the folder.
const MARKER: &str = ".tensorfs-assemble";

/// Maximum time to wait for the lock of the folder. Processes hold it only for a short time.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// If the user sets no budget, 1 / `RESERVE_PART` of the file system stays free, and at least
/// `RESERVE_MIN` bytes.
const RESERVE_PART: u64 = 10;

/// Minimum number of bytes of the file system that stay free if the user sets no budget.
const RESERVE_MIN: u64 = 1 << 30;

/// A folder of assembled copies.
#[derive(Debug)]
pub(super) struct CopyFolder {
    path: PathBuf,
    limit: Option<u64>,
}

/// The folder while its lock is held.
pub(super) struct Locked<'a> {
    folder: &'a CopyFolder,
    /// The file whose close releases the lock.
    _lock: File,
}

/// A copy that is being written. The drop removes the file unless it was published.
pub(super) struct Partial {
    version: String,
    /// The file, which is locked while it is open.
    temporary: TemporaryFile,
    pub(super) len: u64,
}

impl Partial {
    pub(super) fn file(&self) -> &File {
        self.temporary.file()
    }
}

/// The kind of a file, by its name in the folder.
#[derive(Debug, PartialEq, Eq)]
enum CopyFileKind {
    Copy,
    Record,
    Partial,
    /// A record that is being written.
    NewRecord,
}

/// A file of the folder whose kind is known.
struct FoundCopy {
    kind: CopyFileKind,
    version: String,
    path: PathBuf,
    len: u64,
}

impl CopyFolder {
    /// Opens the folder at `path`, and creates it if it does not exist. It must not overlap any of
    /// `others`.
    ///
    /// # Errors
    /// One line with the reason why the folder cannot be used.
    pub(super) fn open(
        path: &Path,
        limit: Option<u64>,
        others: &[&Path],
    ) -> Result<CopyFolder, String> {
        let fail = |why: &dyn std::fmt::Display| format!("assemble={}: {why}", shown_path(path));
        let path = place_of(path).map_err(|why| fail(&why))?;
        // This check comes before the folder is created, so that no folder is created in the
        // source.
        for other in others {
            if lies_in(&path, other) || lies_in(other, &path) {
                let other = shown_path(other);
                return Err(fail(&format!("lies in {other} or contains it; name another folder")));
            }
        }
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(fail(&e)),
            _ => {}
        }
        let meta = std::fs::metadata(&path).map_err(|e| fail(&e))?;
        if !meta.is_dir() {
            return Err(fail(&"not a folder"));
        }
        if meta.uid() != nix::unistd::geteuid().as_raw() {
            return Err(fail(&format!("belongs to user {}, not to us", meta.uid())));
        }
        if meta.mode() & 0o022 != 0 {
            let mode = meta.mode() & 0o7777;
            return Err(fail(&format!("mode {mode:o} lets others write to it; make it 700")));
        }
        let file_system = FileSystem::at(&path);
        if !file_system.is_known() || file_system.is_remote() {
            return Err(fail(&"needs a local disk or a tmpfs, and this is neither"));
        }
        let folder = CopyFolder { path, limit };
        folder.mark().map_err(|e| fail(&e))?;
        Ok(folder)
    }

    /// Creates the marker file. Fails if the folder contains other files.
    fn mark(&self) -> io::Result<()> {
        let marker = self.path.join(MARKER);
        if std::fs::symlink_metadata(&marker).is_ok_and(|meta| meta.is_file()) {
            return Ok(());
        }
        for entry in std::fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            if name != "lost+found" && name != MARKER {
                let why = "holds other files; name an empty folder, or one that does not exist";
                return Err(io::Error::other(why));
            }
        }
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&marker)?;
        Ok(())
    }

    /// The path of the folder.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn copy_path(&self, version: &str) -> PathBuf {
        self.path.join(format!("{version}.safetensors"))
    }

    fn record_path(&self, version: &str) -> PathBuf {
        self.path.join(format!("{version}.json"))
    }

    /// The path at which this process writes the copy of `version`.
    pub(super) fn partial_path(&self, version: &str) -> PathBuf {
        self.path.join(format!("{version}.partial-{}", std::process::id()))
    }

    /// Takes the lock of the folder. Fails after `LOCK_TIMEOUT`.
    pub(super) fn lock(&self) -> Result<Locked<'_>, CopyFailure> {
        let fail = |e| CopyFailure::Folder("lock", e);
        let marker = self.path.join(MARKER);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW).open(marker).map_err(fail)?;
        let started = Instant::now();
        while !flock(&file, FlockArg::LockExclusiveNonblock).map_err(fail)? {
            if started.elapsed() > LOCK_TIMEOUT {
                return Err(fail(io::Error::other("another process keeps it locked")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Locked { folder: self, _lock: file })
    }

    /// The record of the copy of `version`, if there is one.
    pub(super) fn record(&self, version: &str) -> Option<Record> {
        if !is_version(version) {
            return None;
        }
        let record = Record::parse(&std::fs::read(self.record_path(version)).ok()?)?;
        (record.version == version).then_some(record)
    }

    /// Opens the copy of `version`, and prevents its eviction while it is open. Also returns the
    /// version of the copy file.
    pub(super) fn open_copy(&self, version: &str) -> io::Result<(File, Version)> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(self.copy_path(version))?;
        if !flock(&file, FlockArg::LockSharedNonblock)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        Ok((file, local_version(&meta)))
    }

    /// Records the time of an open of the copy of `version`. The least recently opened copies are
    /// evicted first.
    pub(super) fn touch(&self, version: &str) {
        // This fails if the copy was evicted, which does no harm.
        let record = File::open(self.record_path(version));
        let _ = record.and_then(|record| record.set_modified(SystemTime::now()));
    }

    /// Number of bytes that all copies may take, if they take `used` now.
    fn budget(&self, used: u64) -> io::Result<u64> {
        let fs = nix::sys::statvfs::statvfs(&self.path)?;
        let available = used + fs.blocks_available() * fs.fragment_size();
        let reserve = (fs.blocks() * fs.fragment_size() / RESERVE_PART).max(RESERVE_MIN);
        Ok(match self.limit {
            Some(limit) => limit.min(available),
            None => available.saturating_sub(reserve),
        })
    }

    /// Number of bytes that all copies may take, and number of bytes that they take.
    pub(super) fn usage(&self) -> io::Result<(u64, u64)> {
        let used = used(&self.files()?);
        Ok((self.budget(used)?, used))
    }

    /// The files of the folder whose kind is known.
    fn files(&self) -> io::Result<Vec<FoundCopy>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some((kind, version)) = name.to_str().and_then(parse_name) else { continue };
            // Another process may have removed the file in the meantime.
            let Ok(meta) = entry.metadata() else { continue };
            let version = version.to_owned();
            found.push(FoundCopy { kind, version, path: entry.path(), len: meta.len() });
        }
        Ok(found)
    }
}

impl Locked<'_> {
    /// Removes unfinished files of processes that have ended. Then returns the records of all
    /// copies.
    pub(super) fn sweep(&self) -> io::Result<Vec<Record>> {
        let files = self.folder.files()?;
        let mut records = Vec::new();
        for file in &files {
            let stale = match file.kind {
                CopyFileKind::Partial => is_unlocked(&file.path),
                CopyFileKind::NewRecord => true,
                CopyFileKind::Record => !self.folder.copy_path(&file.version).exists(),
                CopyFileKind::Copy => match self.folder.record(&file.version) {
                    Some(record) => {
                        records.push(record);
                        false
                    }
                    // The writer ended before it wrote the record.
                    None => true,
                },
            };
            if stale {
                tracing::info!("removing {}, which is incomplete", shown_path(&file.path));
                std::fs::remove_file(&file.path)?;
            }
        }
        Ok(records)
    }

    /// Whether another process is writing the copy of `version` now.
    pub(super) fn is_being_written(&self, version: &str) -> io::Result<bool> {
        let files = self.folder.files()?;
        let mut partials = files
            .iter()
            .filter(|file| file.kind == CopyFileKind::Partial && file.version == version);
        Ok(partials.any(|file| !is_unlocked(&file.path)))
    }

    /// Frees space for `len` bytes. Removes the least recently opened of the copies that no process
    /// has open. If all of these copies together are too small, removes none. Returns the versions
    /// of the removed copies.
    pub(super) fn make_room(&self, len: u64) -> Result<Vec<String>, CopyFailure> {
        let fail = |e| CopyFailure::Folder("look at", e);
        let files = self.folder.files().map_err(fail)?;
        let used = used(&files);
        let budget = self.folder.budget(used).map_err(fail)?;
        if self.folder.limit.is_some_and(|limit| len > limit) {
            return Err(CopyFailure::TooLarge { len, budget });
        }
        let over = (used + len).saturating_sub(budget);
        let mut copies: Vec<(SystemTime, &FoundCopy)> = files
            .iter()
            .filter(|file| file.kind == CopyFileKind::Copy)
            .map(|file| (self.opened_at(&file.version), file))
            .collect();
        copies.sort_by_key(|(opened, _)| *opened);
        let mut freed = 0;
        let mut evicted = Vec::new();
        for (_, file) in copies {
            if freed >= over {
                break;
            }
            // All of these files stay locked until the search ends. A process that opens one of
            // them in the meantime continues without the copy.
            if let Some(lock) = unopened(&file.path) {
                freed += file.len;
                evicted.push((lock, file.version.clone()));
            }
        }
        if freed < over {
            return Err(CopyFailure::NoRoom { len, budget });
        }
        for (_, version) in &evicted {
            self.remove(version).map_err(|e| CopyFailure::Folder("evict from", e))?;
        }
        Ok(evicted.into_iter().map(|(_, version)| version).collect())
    }

    fn opened_at(&self, version: &str) -> SystemTime {
        let meta = std::fs::metadata(self.folder.record_path(version));
        meta.and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// Creates a file of `len` bytes and allocates its space.
    pub(super) fn begin(&self, version: &str, len: u64) -> Result<Partial, CopyFailure> {
        let fail = |e| CopyFailure::Folder("write to", e);
        if !is_version(version) {
            return Err(fail(io::Error::other("a version that is no file name")));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let path = self.folder.partial_path(version);
        let temporary = TemporaryFile::create(path, &options).map_err(fail)?;
        let partial = Partial { version: version.to_owned(), temporary, len };
        if !flock(partial.file(), FlockArg::LockExclusiveNonblock).map_err(fail)? {
            return Err(CopyFailure::Busy);
        }
        let size = i64::try_from(len).map_err(|_| fail(Errno::EFBIG.into()))?;
        match nix::fcntl::fallocate(partial.file(), FallocateFlags::empty(), 0, size) {
            // On a file system without fallocate, only the length is set. This length counts
            // against the budget.
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => partial.file().set_len(len).map_err(fail)?,
            other => other.map_err(|e| fail(e.into()))?,
        }
        Ok(partial)
    }

    /// Renames a written and verified copy to its final name, and then writes its record.
    pub(super) fn publish(
        &self,
        mut partial: Partial,
        record: impl FnOnce(Version) -> Record,
    ) -> io::Result<Record> {
        partial.file().set_permissions(PermissionsExt::from_mode(0o400))?;
        partial.file().sync_all()?;
        let version = partial.version.clone();
        // The record of an older copy must not be next to the new copy.
        remove_if_there(&self.folder.record_path(&version))?;
        partial.temporary.publish(&self.folder.copy_path(&version), true)?;
        let written = (|| {
            let record = record(local_version(&partial.file().metadata()?));
            self.write_record(&record)?;
            Ok(record)
        })();
        if written.is_err() {
            let _ = self.remove(&version);
        }
        written
    }

    /// Writes a record atomically, so that a loss of power leaves either the old or the new record.
    pub(super) fn write_record(&self, record: &Record) -> io::Result<()> {
        let path = self.folder.path.join(format!("{}.record-new", record.version));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut new = TemporaryFile::create(path, &options)?;
        let mut text = format!("{:#}", record.to_json());
        text.push('\n');
        new.file().write_all(text.as_bytes())?;
        new.file().sync_all()?;
        new.publish(&self.folder.record_path(&record.version), true)?;
        sync_folder(&self.folder.path)
    }

    /// Removes the copy of `version`. The record is removed first, because a copy without a record
    /// is not used.
    pub(super) fn remove(&self, version: &str) -> io::Result<()> {
        remove_if_there(&self.folder.record_path(version))?;
        remove_if_there(&self.folder.copy_path(version))
    }
}

/// The absolute path of `path`, without links. The last component may be missing in the file
/// system.
fn place_of(path: &Path) -> Result<PathBuf, String> {
    match std::fs::canonicalize(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let path = std::path::absolute(path).map_err(|e| e.to_string())?;
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(e.to_string());
            };
            let place = std::fs::canonicalize(parent).map(|parent| parent.join(name));
            place.map_err(|e| {
                let parent = shown_path(parent);
                format!("{parent}: {e}; only the last folder is made, make those before it")
            })
        }
        place => place.map_err(|e| e.to_string()),
    }
}

/// Whether `path` is `folder` or lies in it. Inode numbers are compared, so the result does not
/// depend on which paths lead to the folder.
fn lies_in(path: &Path, folder: &Path) -> bool {
    let inode = |meta: Metadata| (meta.dev(), meta.ino());
    let Ok(folder) = std::fs::metadata(folder).map(inode) else { return false };
    path.ancestors().any(|above| std::fs::metadata(above).is_ok_and(|meta| inode(meta) == folder))
}

/// Number of bytes of all copies, including those that are being written. Records are small and do
/// not count.
fn used(files: &[FoundCopy]) -> u64 {
    let copies =
        files.iter().filter(|file| matches!(file.kind, CopyFileKind::Copy | CopyFileKind::Partial));
    copies.map(|file| file.len).sum()
}

/// The kind of file that `name` means, and the version in the name.
fn parse_name(name: &str) -> Option<(CopyFileKind, &str)> {
    let (version, rest) = name.split_once('.')?;
    let kind = match rest {
        "safetensors" => CopyFileKind::Copy,
        "json" => CopyFileKind::Record,
        "record-new" => CopyFileKind::NewRecord,
        _ if rest.starts_with("partial-") => CopyFileKind::Partial,
        _ => return None,
    };
    is_version(version).then_some((kind, version))
}

/// Whether `version` is a valid version. A valid version is also a safe file name.
fn is_version(version: &str) -> bool {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (16..=64).contains(&version.len()) && version.bytes().all(digit)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Whether the writer of the partial file at `path` has ended: the lock of the file is free then.
fn is_unlocked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| {
        flock(&file, FlockArg::LockExclusiveNonblock).is_ok_and(|unlocked| unlocked)
    })
}

/// Opens and locks the file at `path`. `None` if a process has it open as a copy.
fn unopened(path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    flock(&file, FlockArg::LockExclusiveNonblock).ok()?.then_some(file)
}

/// Locks an open file until it is closed. If the kernel serves the file by passthrough, the lock
/// lasts until the kernel closes it too. Returns false if another process has locked the file.
#[expect(deprecated, reason = "its replacement unlocks the file while the kernel still holds it")]
fn flock(file: &File, how: FlockArg) -> io::Result<bool> {
    match nix::fcntl::flock(file.as_raw_fd(), how) {
        Ok(()) => Ok(true),
        Err(Errno::EWOULDBLOCK) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_with_a_version_are_ours() {
        let version = "0123456789abcdef0123456789abcdef";
        let parsed = |rest: &str| parse_name(&format!("{version}{rest}")).map(|(kind, _)| kind);
        assert_eq!(parsed(".safetensors"), Some(CopyFileKind::Copy));
        assert_eq!(parsed(".json"), Some(CopyFileKind::Record));
        assert_eq!(parsed(".partial-17"), Some(CopyFileKind::Partial));
        assert_eq!(parsed(".record-new"), Some(CopyFileKind::NewRecord));
        assert_eq!(parsed(".txt"), None);
        assert_eq!(parse_name("model.safetensors"), None);
        assert_eq!(parse_name("../../../../etc/passwd.json"), None);
    }
}
