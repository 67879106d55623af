//! Seeing that a source changes while it is read: what the kernel has cached of it must not be
//! served beside new bytes, and a reader of the cache does not ask us.
//!
//! Events of the file system tell at once; what they do not tell (a write through a mapping,
//! another machine on a network file system) a look at every open source finds each second.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tensorfs::source::Source;

/// Time between two looks at all open sources.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Tells the kernel to forget what it has cached of an inode.
pub(crate) type Forget = Box<dyn Fn(u64) + Send + Sync>;

/// Watches the sources of open files.
pub(crate) struct Watcher {
    inotify: Option<Inotify>,
    state: Mutex<State>,
    forget: OnceLock<Forget>,
}

#[derive(Default)]
struct State {
    /// Folder of each watch descriptor.
    folders: HashMap<WatchDescriptor, PathBuf>,
    /// By number of the watch: the inode, and the sources whose bytes it shows.
    open: HashMap<u64, (u64, Vec<Weak<Source>>)>,
    next: u64,
}

/// Ends a watch when it is dropped.
pub(crate) struct Watched {
    watcher: Arc<Watcher>,
    number: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.watcher.lock().open.remove(&self.number);
    }
}

impl Watcher {
    /// A watcher that does nothing until `start`.
    pub(crate) fn new() -> Arc<Watcher> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        if let Err(e) = &inotify {
            tracing::warn!("changes of the source are seen within a second only: inotify: {e}");
        }
        let state = Mutex::new(State::default());
        Arc::new(Watcher { inotify: inotify.ok(), state, forget: OnceLock::new() })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that handles changes.
    pub(crate) fn start(self: &Arc<Self>, forget: Forget) -> std::io::Result<()> {
        let _ = self.forget.set(forget);
        let watcher = self.clone();
        std::thread::Builder::new().name("watch".to_owned()).spawn(move || watcher.run())?;
        Ok(())
    }

    /// Watches `sources`, whose bytes inode `ino` shows, until the result is dropped.
    pub(crate) fn watch(self: &Arc<Self>, ino: u64, sources: &[Arc<Source>]) -> Watched {
        let mut folders: Vec<&Path> = sources.iter().filter_map(|s| s.path().parent()).collect();
        folders.dedup();
        folders.into_iter().for_each(|folder| self.watch_folder(folder));
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        state.open.insert(number, (ino, sources.iter().map(Arc::downgrade).collect()));
        drop(state);
        Watched { watcher: self.clone(), number }
    }

    /// Adds the watch each time: another folder may stand at the path by now, and the kernel
    /// knows those that it watches already.
    fn watch_folder(&self, folder: &Path) {
        let Some(inotify) = &self.inotify else { return };
        let mask =
            AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_CLOSE_WRITE;
        match inotify.add_watch(folder, mask) {
            Ok(watch) => {
                self.lock().folders.insert(watch, folder.to_owned());
            }
            Err(e) => tracing::debug!("{}: not watched: inotify: {e}", folder.display()),
        }
    }

    fn run(&self) {
        let mut swept = Instant::now();
        loop {
            self.wait(SWEEP_INTERVAL.saturating_sub(swept.elapsed()));
            for path in self.changed_paths() {
                self.check(|source| source.path() == path);
            }
            if swept.elapsed() >= SWEEP_INTERVAL {
                self.check(|_| true);
                swept = Instant::now();
            }
        }
    }

    /// Waits for an event, for `time` at most.
    fn wait(&self, time: Duration) {
        let timeout = PollTimeout::try_from(time.as_millis()).unwrap_or(PollTimeout::MAX);
        match &self.inotify {
            Some(inotify) => {
                let _ = poll(&mut [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)], timeout);
            }
            None => std::thread::sleep(time),
        }
    }

    /// The files that events have told of.
    fn changed_paths(&self) -> Vec<PathBuf> {
        let events = self.inotify.as_ref().and_then(|inotify| inotify.read_events().ok());
        let mut state = self.lock();
        let mut paths = Vec::new();
        for event in events.unwrap_or_default() {
            if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                state.folders.remove(&event.wd);
            } else if let (Some(folder), Some(name)) = (state.folders.get(&event.wd), event.name) {
                paths.push(folder.join(name));
            }
        }
        paths.sort();
        paths.dedup();
        paths
    }

    /// Confirms the sources chosen, and forgets what shows changed ones: once each, since
    /// nothing of a changed source gets into the cache again.
    fn check(&self, chosen: impl Fn(&Source) -> bool) {
        let open: Vec<_> = self.lock().open.iter().map(|(n, watch)| (*n, watch.clone())).collect();
        for (number, (ino, sources)) in open {
            let mut changed = Vec::new();
            for weak in &sources {
                let Some(source) = weak.upgrade().filter(|source| chosen(source)) else { continue };
                if source.check().is_err() && source.is_changed() {
                    changed.push(weak);
                }
            }
            if changed.is_empty() {
                continue;
            }
            if let Some(forget) = self.forget.get() {
                forget(ino);
            }
            if let Some((_, left)) = self.lock().open.get_mut(&number) {
                left.retain(|source| !changed.iter().any(|done| done.ptr_eq(source)));
            }
        }
    }

    /// Looks at all open sources now, because a read has met a changed one.
    pub(crate) fn sweep(&self) {
        self.check(|_| true);
    }
}
