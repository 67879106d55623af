//! The open files of sources and the limit on their number. A checkpoint with thousands of shards must not use
//! up the file descriptors of the process.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use nix::fcntl::OFlag;
use nix::libc;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::file_system::FileSystem;
use super::stat::{local_version, stat_now, stat_path};
use super::without_proc::{
    OPEN_TRIES, leads_elsewhere, not_regular, open_regular as open_without_proc,
};
use crate::error::{Error, Result, shown_path};
use crate::process::PerProcess;
use crate::sync::{Mutex, MutexGuard, RwLock};
use crate::version::Version;

/// Number of file descriptors that are left for other uses. One of these uses is reads in flight, which keep
/// the file of a closed shard open until they end.
const RESERVED: u64 = 192;

/// When the limit is exceeded, 1 / `EVICTED_SHARE` of that number of files is closed at once.
const EVICTED_SHARE: u64 = 8;

/// Minimum number of shards that are kept open, whatever the limit is.
const OPEN_MIN: u64 = 32;

/// Raises the soft limit on open files to the hard limit, so that all shards of a large checkpoint can stay
/// open. Returns the limit that is now effective.
pub fn raise_limit() -> u64 {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, hard)) if soft < hard => match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
            Ok(()) => hard,
            Err(_) => soft,
        },
        Ok((soft, _)) => soft,
        Err(_) => OPEN_MIN + RESERVED,
    }
}

/// The descriptors of a file.
#[derive(Debug, Default)]
struct Descriptors {
    file: Option<Arc<File>>,
    /// A second descriptor of the same inode for O_DIRECT. It is open only while `file` is open.
    direct: Option<Arc<File>>,
    /// Whether the last close was due to too many open files.
    evicted: bool,
}

/// A regular file that is closed when there are too few descriptors, and opened again when it is read.
#[derive(Debug)]
pub(super) struct ReopenableFile {
    pub(super) path: PathBuf,
    /// The version at the first open.
    pub(super) first: Version,
    pub(super) file_system: FileSystem,
    descriptors: RwLock<Descriptors>,
    /// Whether the file system is known to refuse O_DIRECT.
    no_direct: AtomicBool,
    /// Whether the file is in the list of open files.
    counted: AtomicBool,
    /// Number of pins.
    pins: AtomicUsize,
}

impl ReopenableFile {
    /// Opens the regular file at `path`.
    pub(super) fn open(path: &Path) -> Result<Arc<ReopenableFile>> {
        let (file, version) = open_regular(path)?;
        let file_system = FileSystem::of(&file, path);
        Ok(ReopenableFile::opened(path, version, file_system, Arc::new(file)))
    }

    /// The file at `path`, with the open descriptor `file`.
    pub(super) fn opened(
        path: &Path,
        version: Version,
        file_system: FileSystem,
        file: Arc<File>,
    ) -> Arc<ReopenableFile> {
        let descriptors = Descriptors { file: Some(file), ..Descriptors::default() };
        let file = Arc::new(ReopenableFile::new(path, version, file_system, descriptors));
        opened(&file);
        file
    }

    /// The file at `path`, which is not open.
    pub(super) fn closed(path: &Path, version: Version, file_system: FileSystem) -> ReopenableFile {
        ReopenableFile::new(path, version, file_system, Descriptors::default())
    }

    fn new(
        path: &Path,
        first: Version,
        file_system: FileSystem,
        descriptors: Descriptors,
    ) -> ReopenableFile {
        ReopenableFile {
            path: path.to_owned(),
            first,
            file_system,
            descriptors: RwLock::new(descriptors),
            no_direct: AtomicBool::new(false),
            counted: AtomicBool::new(false),
            pins: AtomicUsize::new(0),
        }
    }

    /// The open file, if it is open now. Never waits for the file system.
    pub(super) fn open_file(&self) -> Option<Arc<File>> {
        self.descriptors.read().file.clone()
    }

    /// The open file. Opens it again if it was closed.
    pub(super) fn file(self: &Arc<Self>) -> Result<Arc<File>> {
        if let Some(file) = self.open_file() {
            return Ok(file);
        }
        let (file, version) = open_regular(&self.path)?;
        if version.file() != self.first.file() {
            // This error does not mark the source as changed, because the old file may still exist under another name.
            if !self.descriptors.read().evicted {
                return Err(Error::changed(&self.path, "was replaced before it was opened"));
            }
            tracing::error!(
                "{}: replaced while it was closed, because there were too few file descriptors; raise the limit",
                shown_path(&self.path)
            );
            let detail =
                "was replaced while it was closed, because there were too few file descriptors";
            return Err(Error::changed(&self.path, detail));
        }
        let file = Arc::new(file);
        let mut open = self.descriptors.write();
        (open.file, open.evicted) = (Some(file.clone()), false);
        drop(open);
        opened(self);
        Ok(file)
    }

    /// A second descriptor for the inode of `file`, which is the open file of this source. Its reads go past
    /// the page cache. `None` if the file system refuses O_DIRECT, or no descriptor is left.
    pub(super) fn direct_file(self: &Arc<Self>, file: &Arc<File>) -> Option<Arc<File>> {
        if self.no_direct.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(direct) = &self.descriptors.read().direct {
            return Some(direct.clone());
        }
        let reopened = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT | libc::O_CLOEXEC)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let direct_file = match reopened {
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.direct_without_proc(file),
            other => other,
        };
        let direct = match direct_file {
            Ok(file) => Arc::new(file),
            Err(e) => {
                if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) {
                    self.refuse_direct();
                }
                return None;
            }
        };
        let mut open = self.descriptors.write();
        // If the source was closed meanwhile, this descriptor is used for one read only.
        if open.file.as_ref().is_some_and(|open| Arc::ptr_eq(open, file)) && open.direct.is_none() {
            open.direct = Some(direct.clone());
            drop(open);
            opened_direct(self);
        }
        Some(direct)
    }

    /// Opens the path again with O_DIRECT, if it still leads to `file`.
    fn direct_without_proc(&self, file: &File) -> io::Result<File> {
        let (direct, meta) = open_without_proc(&self.path, OFlag::O_DIRECT)?;
        let same = local_version(&meta).file() == local_version(&file.metadata()?).file();
        if same { Ok(direct) } else { Err(leads_elsewhere()) }
    }

    /// Notes that the file system does not support O_DIRECT for this file.
    pub(super) fn refuse_direct(&self) {
        self.no_direct.store(true, Ordering::Relaxed);
        self.close_direct();
    }

    /// Closes the file unless it is pinned. A later read opens it again. If it stayed open, a deleted file
    /// would keep its space on the disk.
    pub(super) fn release(&self) {
        // The pins are read while the lock is held. So a pin that is added later finds the file closed, and opens it.
        let mut open = self.descriptors.write();
        if !self.is_pinned() {
            let closed = std::mem::take(&mut *open);
            drop(open);
            drop(closed);
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open_file().is_some()
    }

    fn is_open_direct(&self) -> bool {
        self.descriptors.read().direct.is_some()
    }

    /// Whether the file can be closed without harm: it has no pins, or it can be opened again.
    fn may_close(&self) -> bool {
        !self.is_pinned() || self.is_at_path()
    }

    /// Closes the file, if it is open, because too many files are open.
    fn evict(&self) {
        let mut open = self.descriptors.write();
        let evicted = open.evicted || open.file.is_some();
        let closed =
            std::mem::replace(&mut *open, Descriptors { evicted, ..Descriptors::default() });
        drop(open);
        drop(closed);
    }

    fn close_direct(&self) {
        let closed = self.descriptors.write().direct.take();
        drop(closed);
    }

    /// Whether the path still leads to this file.
    pub(super) fn is_at_path(&self) -> bool {
        let there = stat_path(&self.path, self.file_system);
        there.is_ok_and(|now| now.file() == self.first.file())
    }

    /// Keeps the file open until the pin is dropped. The holder of the pin can read the old bytes even if the
    /// file is deleted or replaced meanwhile.
    pub(super) fn pin(self: &Arc<Self>) -> Result<Pin> {
        let pin = Pin::of(self.clone());
        self.file()?;
        Ok(pin)
    }

    /// Whether it is pinned.
    pub(super) fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::SeqCst) > 0
    }
}

/// A file that a pin keeps open.
pub(super) trait Pinnable: fmt::Debug + Send + Sync {
    fn add_pin(&self);

    /// Removes a pin. A file without pins may be closed.
    fn remove_pin(&self);
}

impl Pinnable for ReopenableFile {
    fn add_pin(&self) {
        self.pins.fetch_add(1, Ordering::SeqCst);
    }

    fn remove_pin(&self) {
        if self.pins.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.release();
        }
    }
}

/// Keeps a local file or a local copy open while it exists.
#[derive(Debug)]
pub struct Pin(Arc<dyn Pinnable>);

impl Pin {
    pub(super) fn of(pinned: Arc<dyn Pinnable>) -> Pin {
        pinned.add_pin();
        Pin(pinned)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.remove_pin();
    }
}

/// The open files, those opened first at the front.
#[derive(Default)]
struct OpenFiles {
    /// Files with an open descriptor.
    files: VecDeque<Weak<ReopenableFile>>,
    /// Files with a second descriptor, for O_DIRECT.
    direct: VecDeque<Weak<ReopenableFile>>,
}

impl OpenFiles {
    fn len(&self) -> u64 {
        (self.files.len() + self.direct.len()) as u64
    }

    /// Removes files that were closed elsewhere from the lists.
    fn tidy(&mut self) {
        self.files.retain(|file| {
            let file = file.upgrade();
            let stays = file.as_ref().is_some_and(|file| file.is_open());
            if !stays && let Some(file) = file {
                file.counted.store(false, Ordering::SeqCst);
            }
            stays
        });
        self.direct.retain(|file| file.upgrade().is_some_and(|s| s.is_open_direct()));
    }
}

/// Maximum number of descriptors of all sources together.
pub(super) fn open_max() -> u64 {
    static MAX: OnceLock<u64> = OnceLock::new();
    *MAX.get_or_init(|| {
        let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(RESERVED, |(soft, _)| soft);
        limit.saturating_sub(RESERVED).max(OPEN_MIN)
    })
}

fn open_files() -> MutexGuard<'static, OpenFiles> {
    static OPEN: PerProcess<Mutex<OpenFiles>> = PerProcess::new();
    OPEN.get_or_init(Mutex::default).lock()
}

fn is(weak: &Weak<ReopenableFile>, file: &Arc<ReopenableFile>) -> bool {
    std::ptr::eq(weak.as_ptr(), Arc::as_ptr(file))
}

/// Notes that `file` was opened. If too many descriptors are open now, closes those for O_DIRECT first. After
/// that, it closes the files opened longest ago that can be opened again. Their next reads open them.
fn opened(file: &Arc<ReopenableFile>) {
    if file.counted.swap(true, Ordering::SeqCst) {
        return;
    }
    open_files().files.push_back(Arc::downgrade(file));
    make_room(file);
}

/// Notes that `file` has a second descriptor, for O_DIRECT. If too many descriptors are open now, closes those of other
/// files in the same order as `opened`.
fn opened_direct(file: &Arc<ReopenableFile>) {
    {
        let mut open = open_files();
        if open.direct.iter().any(|other| is(other, file)) {
            return;
        }
        open.direct.push_back(Arc::downgrade(file));
    }
    make_room(file);
}

/// Closes descriptors of files other than `newest`, until the limit is met or no other may be closed.
fn make_room(newest: &Arc<ReopenableFile>) {
    let others: Vec<Arc<ReopenableFile>> = {
        let mut open = open_files();
        if open.len() <= open_max() {
            return;
        }
        open.tidy();
        while open.len() > open_max()
            && let Some(index) = open.direct.iter().position(|other| !is(other, newest))
        {
            let evicted = open.direct.remove(index).and_then(|file| file.upgrade());
            if let Some(evicted) = evicted {
                evicted.close_direct();
            }
        }
        if open.len() <= open_max() {
            return;
        }
        open.files.iter().filter(|other| !is(other, newest)).filter_map(Weak::upgrade).collect()
    };
    // The lock is not held, because `may_close` may access a file system that never answers. Several files are
    // closed at once, because each search takes time in proportion to the number of open files.
    let many = (open_max() / EVICTED_SHARE).max(1) as usize;
    let chosen: HashMap<*const ReopenableFile, &Arc<ReopenableFile>> = others
        .iter()
        .filter(|file| file.may_close())
        .take(many)
        .map(|file| (Arc::as_ptr(file), file))
        .collect();
    let mut open = open_files();
    let mut mine: Vec<&Arc<ReopenableFile>> = Vec::with_capacity(chosen.len());
    // A file is closed by the thread that removes it from the list. So threads that do this concurrently close
    // different files.
    open.files.retain(|file| {
        let struck = chosen.get(&file.as_ptr());
        mine.extend(struck);
        struck.is_none()
    });
    drop(open);
    for evicted in mine {
        evicted.counted.store(false, Ordering::SeqCst);
        evicted.evict();
    }
}

/// Opens a regular file. A FIFO, a device or a symbolic link at the path is refused without being opened for
/// reading, since that could block or have side effects.
fn open_regular(path: &Path) -> Result<(File, Version)> {
    let open_error = |e| Error::io(path, "open", e);
    for _ in 0..OPEN_TRIES {
        let handle = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)
            .map_err(open_error)?;
        let version = stat_now(&handle).map_err(open_error)?;
        if !version.is_file() {
            return Err(open_error(not_regular()));
        }
        let link = format!("/proc/self/fd/{}", handle.as_raw_fd());
        // If the paths differ, there are two possible causes. A folder of the path may have become a link since the
        // path was resolved and allowed. Or the file was replaced at this moment, and the next try finds the new file.
        let Ok(leads_to) = std::fs::read_link(&link) else {
            let (file, meta) = open_without_proc(path, OFlag::empty()).map_err(open_error)?;
            return Ok((file, local_version(&meta)));
        };
        if leads_to == path {
            let file = File::open(&link).map_err(open_error)?;
            return Ok((file, version));
        }
    }
    Err(open_error(leads_elsewhere()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_that_was_evicted_is_said_to_lack_descriptors_once_it_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let error_after = |close: fn(&ReopenableFile)| {
            std::fs::write(&path, "old").unwrap();
            let file = ReopenableFile::open(&path).unwrap();
            close(&file);
            // The file was opened again meanwhile, so it counts as not evicted.
            file.file().unwrap();
            close(&file);
            let newer = folder.path().join("newer");
            std::fs::write(&newer, "new").unwrap();
            std::fs::rename(newer, &path).unwrap();
            file.file().unwrap_err().to_string()
        };
        let released = error_after(ReopenableFile::release);
        assert!(released.contains("was replaced before it was opened"), "{released}");
        let evicted = error_after(ReopenableFile::evict);
        assert!(evicted.contains("too few file descriptors"), "{evicted}");
        let both = error_after(|file| (file.evict(), file.release()).1);
        assert!(both.contains("was replaced before it was opened"), "{both}");
    }
}
