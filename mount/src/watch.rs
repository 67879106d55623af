//! Seeing that a source changes while it is read: what the kernel has cached of it must not be
//! served beside new bytes, and a reader of the cache does not ask us.
//!
//! Events of the file system tell at once; what they do not tell (a write through a mapping,
//! another machine on a network file system) a look at every open source finds each second.
//! File systems that may not answer are looked at by threads of their own: a source that
//! stalls hides no change of another.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tensorfs::source::Source;

use crate::asks::offload;

/// Time between two looks at all open sources.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Most threads that look at the sources of one file system: one, and one more for each source
/// that stalls.
const LOOKS_MAX: usize = 8;

/// Tells the kernel to forget what it has cached of an inode.
pub(crate) type Forget = Arc<dyn Fn(u64) + Send + Sync>;

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
    /// By device: file systems that may not answer.
    lanes: HashMap<u64, Lane>,
}

/// What to look at on one file system. It has a thread for each source being looked at.
#[derive(Default)]
struct Lane {
    todo: VecDeque<Look>,
    /// The same by watch and source, so that none waits twice.
    queued: HashSet<(u64, usize)>,
    /// Since when which source is being looked at.
    looking: HashMap<usize, Instant>,
}

/// A source to be looked at.
struct Look {
    number: u64,
    ino: u64,
    source: Weak<Source>,
}

impl Look {
    /// The address of the source, which is its own as long as somebody refers to it.
    fn address(&self) -> usize {
        self.source.as_ptr() as usize
    }
}

impl Lane {
    fn push(&mut self, look: Look) {
        if self.queued.insert((look.number, look.address())) {
            self.todo.push_back(look);
        }
    }

    /// Takes what is looked at next, and notes that it is.
    fn begin(&mut self) -> Option<Look> {
        let free = |look: &Look| !self.looking.contains_key(&look.address());
        let at = self.todo.iter().position(free)?;
        let look = self.todo.remove(at)?;
        self.queued.remove(&(look.number, look.address()));
        self.looking.insert(look.address(), Instant::now());
        Some(look)
    }

    /// Whether another thread is wanted: those that there are do not come back.
    fn wants_thread(&self) -> bool {
        self.looking.len() < LOOKS_MAX
            && self.looking.values().all(|since| since.elapsed() >= SWEEP_INTERVAL)
    }
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

    fn run(self: &Arc<Self>) {
        let mut swept = Instant::now();
        loop {
            self.wait(SWEEP_INTERVAL.saturating_sub(swept.elapsed()));
            for path in self.changed_paths() {
                self.check(|_, source| source.path() == path);
            }
            if swept.elapsed() >= SWEEP_INTERVAL {
                self.sweep();
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

    /// Confirms the sources chosen, by inode that shows them, and forgets what shows changed
    /// ones. Does not wait for file systems that may not answer.
    fn check(self: &Arc<Self>, chosen: impl Fn(u64, &Source) -> bool) {
        let open: Vec<_> = self.lock().open.iter().map(|(n, watch)| (*n, watch.clone())).collect();
        for (number, (ino, sources)) in open {
            let mut changed = Vec::new();
            for weak in sources {
                let Some(source) = weak.upgrade().filter(|source| chosen(ino, source)) else {
                    continue;
                };
                if !source.file_system().is_local() {
                    let look = Look { number, ino, source: weak };
                    self.lock().lanes.entry(source.identity().dev).or_default().push(look);
                } else if has_changed(&source) {
                    changed.push(weak);
                }
            }
            self.changed(number, ino, &changed);
        }
        self.look();
    }

    /// Starts the threads that are wanted to look at what waits for it.
    fn look(self: &Arc<Self>) {
        let mut state = self.lock();
        state.lanes.retain(|_, lane| !lane.todo.is_empty() || !lane.looking.is_empty());
        let wanting = state.lanes.iter_mut().filter(|(_, lane)| lane.wants_thread());
        let looks: Vec<_> = wanting.filter_map(|(dev, lane)| Some((*dev, lane.begin()?))).collect();
        drop(state);
        for (dev, look) in looks {
            let (watcher, address) = (self.clone(), look.address());
            if !offload(move || watcher.look_on(dev, look)) {
                self.looked(dev, address);
            }
        }
    }

    /// A thread: looks at one source after the other, until none is left.
    fn look_on(&self, dev: u64, first: Look) {
        let mut next = Some(first);
        while let Some(look) = next {
            let Look { number, ino, source } = &look;
            // Not dropped before it counts as looked at: that may close its file.
            let held = source.upgrade();
            if held.as_ref().is_some_and(has_changed) {
                self.changed(*number, *ino, std::slice::from_ref(source));
            }
            drop(held);
            next = self.looked(dev, look.address());
        }
    }

    /// Notes that a source was looked at; returns what its thread is to look at next.
    fn looked(&self, dev: u64, address: usize) -> Option<Look> {
        let mut state = self.lock();
        let lane = state.lanes.get_mut(&dev)?;
        lane.looking.remove(&address);
        lane.begin()
    }

    /// Forgets what inode `ino` shows of changed sources: once each, since nothing of a changed
    /// source gets into the cache again.
    fn changed(&self, number: u64, ino: u64, changed: &[Weak<Source>]) {
        if changed.is_empty() {
            return;
        }
        // It waits for reads of the inode, and those may wait for a source that stalls.
        if let Some(forget) = self.forget.get() {
            let off_thread = forget.clone();
            if !offload(move || off_thread(ino)) {
                forget(ino);
            }
        }
        if let Some((_, left)) = self.lock().open.get_mut(&number) {
            left.retain(|source| !changed.iter().any(|done| done.ptr_eq(source)));
        }
    }

    /// Looks at the sources of inode `ino` now.
    pub(crate) fn look_at(self: &Arc<Self>, ino: u64) {
        self.check(|shown, _| shown == ino);
    }

    /// Looks at all open sources now, because a read has met a changed one.
    pub(crate) fn sweep(self: &Arc<Self>) {
        self.check(|_, _| true);
    }
}

/// Looks at a source; whether it has changed.
fn has_changed(source: &Arc<Source>) -> bool {
    source.check().is_err() && source.is_changed()
}
