//! inotify events of open source files. They tell whether a file had any event since the last call
//! of `take_touched`, and whether it was written.
//!
//! The watch is on the inode of a file, so it finds a write under any name of the file.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use nix::unistd::{Whence, lseek};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::source::WriteWitness;
use tensorfs::internal::sync::Mutex;

/// The command `F_SETSIG` of fcntl(2), which the crate libc lacks.
const F_SETSIG: libc::c_int = 10;

/// The events of one mount.
pub(crate) struct FileEvents {
    inotify: Inotify,
    /// Wakes the watcher thread when another thread has read events.
    wake: EventFd,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The watched files of each kernel watch. Several sources may have the same inode, which the
    /// kernel watches only once.
    watches: HashMap<WatchDescriptor, Vec<Weak<FileWatch>>>,
    /// Numbers of the watches whose files were touched.
    touched: HashSet<u64>,
}

/// The watched files that had events since the last call of `take_touched`.
#[derive(Debug, Default)]
pub(crate) struct Touched(HashSet<u64>);

impl Touched {
    /// Whether the file of `watch` had an event.
    pub(crate) fn contains(&self, watch: &FileWatch) -> bool {
        self.0.contains(&watch.number)
    }

    /// Whether no file had an event.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A watched file.
pub(crate) struct FileWatch {
    number: u64,
    events: Arc<FileEvents>,
    descriptor: WatchDescriptor,
    /// Whether a system call wrote to the file.
    written: AtomicBool,
    /// Whether events are missing, because the watch has ended or events were lost.
    blind: AtomicBool,
    /// `closes` is the number of closes by processes that could have written through a mapping.
    /// `confirmed` is the number of closes at the last check that found the file unchanged.
    closes: AtomicU64,
    confirmed: AtomicU64,
}

impl std::fmt::Debug for FileWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileWatch({})", self.number)
    }
}

impl FileEvents {
    /// # Errors
    /// If this user has reached the limit of inotify instances.
    pub(crate) fn new() -> nix::Result<Arc<FileEvents>> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Arc::new(FileEvents { inotify, wake, state: Mutex::default() }))
    }

    /// Watches the inode of `file` until `FileWatch::end`. `local` says that the file system
    /// answers at once.
    ///
    /// # Errors
    /// If the user has reached the limit of watches, or if `/proc` is missing.
    pub(crate) fn watch(self: &Arc<Self>, file: &File, local: bool) -> nix::Result<Arc<FileWatch>> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let mask =
            AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_CLOSE_WRITE;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        // The kernel has one watch for each inode. Without the lock, another thread could drop its
        // own `FileWatch` of this inode, and with it the kernel's watch, before this `FileWatch` is
        // in the table. A remote file system may be slow, so the lock is not held for a remote
        // file: its watch is no witness, so it may end.
        let locked = local.then(|| self.state.lock());
        let descriptor = self.inotify.add_watch(path.as_str(), mask)?;
        let watch = Arc::new(FileWatch {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            events: self.clone(),
            descriptor,
            written: AtomicBool::new(false),
            blind: AtomicBool::new(false),
            closes: AtomicU64::new(0),
            confirmed: AtomicU64::new(0),
        });
        let mut state = locked.unwrap_or_else(|| self.state.lock());
        state.watches.entry(descriptor).or_default().push(Arc::downgrade(&watch));
        drop(state);
        Ok(watch)
    }

    /// Waits for an event, for `timeout` at most.
    pub(crate) fn wait(&self, timeout: PollTimeout) {
        let mut fds = [&self.inotify.as_fd(), &self.wake.as_fd()]
            .map(|fd| PollFd::new(*fd, PollFlags::POLLIN));
        let _ = poll(&mut fds, timeout);
        let _ = self.wake.read();
    }

    /// Returns the files that were touched since the last call.
    pub(crate) fn take_touched(&self) -> Touched {
        self.read();
        Touched(std::mem::take(&mut self.state.lock().touched))
    }

    /// Reads all pending events.
    fn read(&self) {
        // The lock is held during the whole read. So the next thread that takes the lock finds all
        // events that this thread has read.
        let mut state = self.state.lock();
        while let Ok(events) = self.inotify.read_events() {
            for event in events {
                state.take(event.wd, event.mask);
            }
        }
    }
}

impl State {
    fn take(&mut self, descriptor: WatchDescriptor, mask: AddWatchFlags) {
        if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            for watch in self.watches.values().flatten().filter_map(Weak::upgrade) {
                watch.blind.store(true, Ordering::SeqCst);
                self.touched.insert(watch.number);
            }
            return;
        }
        let Some(watches) = self.watches.get(&descriptor) else { return };
        for watch in watches.iter().filter_map(Weak::upgrade) {
            self.touched.insert(watch.number);
            if mask.contains(AddWatchFlags::IN_MODIFY) {
                watch.written.store(true, Ordering::SeqCst);
            }
            // A store through a mapping causes no event, but closing the file does.
            if mask.contains(AddWatchFlags::IN_CLOSE_WRITE) {
                watch.closes.fetch_add(1, Ordering::SeqCst);
            }
            if mask.contains(AddWatchFlags::IN_IGNORED) {
                watch.blind.store(true, Ordering::SeqCst);
            }
        }
        if mask.contains(AddWatchFlags::IN_IGNORED) {
            self.watches.remove(&descriptor);
        }
    }
}

impl FileWatch {
    /// Number of closes, in the events read so far, by processes that could have written through a
    /// mapping.
    pub(crate) fn closes(&self) -> u64 {
        self.closes.load(Ordering::SeqCst)
    }

    /// Notes that the times of the file were unchanged after `closes` closes. Up to then, no
    /// process had written through a mapping.
    pub(crate) fn confirm(&self, closes: u64) {
        self.confirmed.fetch_max(closes, Ordering::SeqCst);
    }

    /// Ends the watch.
    pub(crate) fn end(&self) {
        self.blind.store(true, Ordering::SeqCst);
        let mut state = self.events.state.lock();
        let Some(watches) = state.watches.get_mut(&self.descriptor) else { return };
        watches.retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), self));
        if watches.is_empty() {
            state.watches.remove(&self.descriptor);
            let _ = self.events.inotify.rm_watch(self.descriptor);
        }
    }
}

impl WriteWitness for FileWatch {
    fn written(&self, file: &File) -> Option<bool> {
        // The writer is checked before the events are read. The kernel queues IN_CLOSE_WRITE before
        // it decreases the count of writers. So this function finds either the writer or its event.
        let writer = has_writer(file);
        self.events.read();
        if !self.events.state.lock().touched.is_empty() {
            let _ = self.events.wake.write(1);
        }
        if self.written.load(Ordering::SeqCst) {
            return Some(true);
        }
        let unsure = self.closes.load(Ordering::SeqCst) > self.confirmed.load(Ordering::SeqCst);
        let blind = unsure || self.blind.load(Ordering::SeqCst);
        (!blind && writer == Ok(false)).then_some(false)
    }
}

/// Flushes `file` if a process may write to it through a mapping. The kernel changes the time of a
/// file only at the first store to a clean page, so after the flush the next store changes the
/// time. May wait for the disk.
pub(crate) fn note_stores(file: &File) {
    if has_writer(file) != Ok(false) {
        let _ = file.sync_data();
    }
}

/// Whether a process writes a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// A process has it open for writing.
    Present,
    /// No process has it open for writing.
    Absent,
    /// The kernel does not tell. `sparse` says that the file has ranges that were never written, for
    /// example because its length was set before its bytes were written.
    Unknown { sparse: bool },
}

/// Whether the kernel has refused to tell this process about the writers of a file.
static IS_REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether the kernel has answered all questions about the writers of files.
pub(crate) fn writers_are_known() -> bool {
    !IS_REFUSED.load(Ordering::Relaxed)
}

/// Whether any process has the file at `path` open for writing. The kernel is queried only if `ask`
/// is set.
pub(crate) fn writer_of(path: &Path, ask: bool) -> Writer {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let Ok(file) = File::options().read(true).custom_flags(flags).open(path) else {
        return Writer::Unknown { sparse: false };
    };
    if ask {
        match has_writer(&file) {
            Ok(true) => return Writer::Present,
            Ok(false) => return Writer::Absent,
            Err(e) if !IS_REFUSED.swap(true, Ordering::Relaxed) => {
                let lacks = if e == Errno::EACCES { ", and CAP_LEASE is missing" } else { "" };
                tracing::warn!(
                    "{}: the kernel does not tell who writes it ({}{lacks}); such checkpoints are shown \
                     after a pause of their writer",
                    shown_path(path),
                    e.desc()
                );
            }
            Err(_) => {}
        }
    }
    Writer::Unknown { sparse: is_sparse(&file) }
}

/// Whether the file has a hole, or space that is allocated but not written.
fn is_sparse(file: &File) -> bool {
    let Ok(len) = file.metadata().map(|meta| meta.len()) else { return false };
    let end = lseek(file, 0, Whence::SeekHole);
    end.is_ok_and(|end| u64::try_from(end).is_ok_and(|end| end < len))
}

/// Whether any process has the inode of `file` open for writing.
///
/// The kernel grants a read lease only if there is no writer. The lease is released at once.
///
/// # Errors
/// `EACCES` if the file belongs to another user and this process lacks CAP_LEASE. Other errors if the
/// file system does not support leases.
fn has_writer(file: &File) -> nix::Result<bool> {
    let fd = file.as_raw_fd();
    let set = |command, argument: libc::c_int| {
        // SAFETY: `fd` is open while `file` is borrowed, and the commands take an int.
        Errno::result(unsafe { libc::fcntl(fd, command, argument) })
    };
    // If another process opens the file during the lease, the kernel sends this signal. SIGURG is
    // ignored by default, while SIGIO would end the process.
    set(F_SETSIG, libc::SIGURG)?;
    match set(libc::F_SETLEASE, libc::F_RDLCK as libc::c_int) {
        Ok(_) => {
            let _ = set(libc::F_SETLEASE, libc::F_UNLCK as libc::c_int);
            Ok(false)
        }
        Err(Errno::EAGAIN) => Ok(true),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn watched() -> (tempfile::TempDir, std::path::PathBuf, File, Arc<FileWatch>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"bytes").unwrap();
        let file = File::open(&path).unwrap();
        let watch = FileEvents::new().unwrap().watch(&file, true).unwrap();
        (folder, path, file, watch)
    }

    fn writer(path: &std::path::Path) -> File {
        File::options().write(true).open(path).unwrap()
    }

    #[test]
    fn links_and_modes_are_no_writes() {
        let (_folder, path, file, watch) = watched();
        let other = path.with_extension("link");
        std::fs::hard_link(&path, &other).unwrap();
        std::fs::remove_file(&other).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(watch.written(&file), Some(false));
        assert!(watch.events.take_touched().contains(&watch));
        assert!(watch.events.take_touched().is_empty());
    }

    #[test]
    fn a_write_under_another_name_is_one() {
        let (_folder, path, file, watch) = watched();
        let other = path.with_extension("link");
        std::fs::hard_link(&path, &other).unwrap();
        writer(&other).write_all(b"other").unwrap();
        assert_eq!(watch.written(&file), Some(true));
    }

    #[test]
    fn who_could_write_through_a_mapping_is_not_believed() {
        let (_folder, path, file, watch) = watched();
        let open = writer(&path);
        assert_eq!(watch.written(&file), None);
        drop(open);
        assert_eq!(watch.written(&file), None);
    }

    #[test]
    fn a_watch_that_begins_while_others_end_misses_no_write() {
        let (_folder, path, file, first) = watched();
        let (events, stop) = (first.events.clone(), AtomicBool::new(false));
        first.end();
        let deaf = std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        events.watch(&file, true).unwrap().end();
                    }
                });
            }
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(events.take_touched())
                }
            });
            let written = || {
                let watch = events.watch(&file, true).unwrap();
                writer(&path).write_all(b"other").unwrap();
                let written = watch.written(&file);
                watch.end();
                written
            };
            let deaf = (0..10_000).filter(|_| written() == Some(false)).count();
            stop.store(true, Ordering::Relaxed);
            deaf
        });
        assert_eq!(deaf, 0);
    }

    #[test]
    fn two_watches_of_one_inode_end_by_themselves() {
        let (_folder, path, file, first) = watched();
        let second = first.events.watch(&file, true).unwrap();
        first.end();
        assert_eq!((first.written(&file), second.written(&file)), (None, Some(false)));
        writer(&path).write_all(b"other").unwrap();
        assert_eq!((first.written(&file), second.written(&file)), (None, Some(true)));
        second.end();
        assert!(second.events.state.lock().watches.is_empty());
    }
}
