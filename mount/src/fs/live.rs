//! Follows changes of the source while it is mounted.
//!
//! A look compares a folder of the source, or a family of folders, with the state that the mount
//! knows. One thread reads the events of folders and decides which look is next. Other threads take
//! the looks, because a folder may lie on a file system that never answers. A thread takes one look
//! after the other. If all threads have waited for more than `STUCK`, another thread starts.
//! Several events of one folder that arrive before its look begins cause only one look.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::PollTimeout;
use serde::{Deserialize, Serialize};
use tensorfs::internal::checkpoint::{FolderId, TreeChange};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::sync::Mutex;
use tensorfs::internal::version::{QueueKey, Version};

use super::inodes::{Nodes, TellKernel};
use crate::options::{Options, Watch};
use crate::serve::blocking::guarded;
use crate::serve::file_events::writers_are_known;
use crate::serve::folder_events::FolderEvents;

/// Minimum and maximum pause between two looks at the same folder. Between these limits, the pause
/// is a multiple of the time that the look took.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A look that takes longer than this probably waits for a file system that does not answer.
const STUCK: Duration = Duration::from_secs(1);

/// Maximum number of threads that take looks, in total and for one file system that is not local.
const THREADS_MAX: usize = 8;
const STUCK_MAX: usize = 2;

/// Time between two rounds over all folders. The rounds include folders that have events, because
/// mounting another file system on a folder of the source causes no event.
const ROUND: Duration = Duration::from_secs(30);

/// Longest sleep of the thread that reads events.
const SLEEP_MAX: Duration = Duration::from_secs(30);

/// The state of the watch, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct WatchStatus {
    /// The value of `watch=`.
    pub mode: String,
    pub folders_with_events: usize,
    pub folders_polled: usize,
    /// Number of changes that were found.
    pub changes: u64,
    /// Number of times that events were lost.
    pub overflows: u64,
    /// Paths of sets that may not be whole yet.
    pub incomplete: Vec<String>,
    /// Whether the kernel tells which files are being written.
    pub writers_known: bool,
}

/// A place of the source to look at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum StoreLook {
    /// The folder at this real path.
    Folder(PathBuf),
    /// The family with this top folder, in which something is still arriving.
    Family(FolderId),
    /// The path of the source that the user gave.
    Given,
}

/// A look that a thread is taking now.
struct RunningLook {
    look: StoreLook,
    /// The file systems on which the look may wait.
    devices: BTreeSet<QueueKey>,
    since: Instant,
}

#[derive(Default)]
struct State {
    /// Pending looks. The value says whether the folder of the look has certainly changed.
    todo: BTreeMap<StoreLook, bool>,
    /// The times before which folders must not be looked at again.
    not_before: HashMap<StoreLook, Instant>,
    looking: Vec<RunningLook>,
    /// Devices of local file systems. Looks are not expected to stall on them.
    local: HashSet<QueueKey>,
    /// Folders without events, which are polled.
    polled: BTreeSet<PathBuf>,
    /// Versions of folders outside the source that links of the source lead to.
    outside: HashMap<PathBuf, Version>,
    /// Folders whose last look failed.
    failing: BTreeSet<PathBuf>,
    /// The folder to which the user's path led at the last check, if that folder is not the source.
    elsewhere: Option<PathBuf>,
    told_full: bool,
}

impl State {
    fn add(&mut self, look: StoreLook, changed: bool) {
        *self.todo.entry(look).or_default() |= changed;
    }

    /// The first pending look after `last` that may begin: no thread takes it now, and its pause is
    /// over.
    fn next_after(&self, last: Option<&StoreLook>) -> Option<StoreLook> {
        let now = Instant::now();
        let after = last.map_or(Bound::Unbounded, Bound::Excluded);
        let mut pending = self.todo.range((after, Bound::Unbounded)).map(|(look, _)| look);
        pending.find(|look| self.may_begin(look, now)).cloned()
    }

    /// Whether no thread takes this look now and its pause is over.
    fn may_begin(&self, look: &StoreLook, now: Instant) -> bool {
        let runs = self.looking.iter().any(|running| running.look == *look);
        !runs && self.not_before.get(look).is_none_or(|time| *time <= now)
    }

    /// Notes that the calling thread takes this look, which accesses `devices`. Returns whether its
    /// folder has certainly changed. `None` if the look may not begin.
    fn take(&mut self, look: &StoreLook, mut devices: BTreeSet<QueueKey>) -> Option<bool> {
        devices.retain(|device| !self.local.contains(device));
        let (looking, since) = (&self.looking, Instant::now());
        let is_held_up = looking.len() >= STUCK_MAX && is_held_up(&devices, looking);
        // While the caller listed the devices, other threads may have taken this look, or the
        // maximum number of threads may have been reached.
        if is_held_up || looking.len() >= THREADS_MAX || !self.may_begin(look, since) {
            return None;
        }
        let changed = self.todo.remove(look)?;
        self.looking.push(RunningLook { look: look.clone(), devices, since });
        Some(changed)
    }

    fn forget_past_pauses(&mut self) {
        let now = Instant::now();
        self.not_before.retain(|_, time| *time > now);
    }
}

/// Follows changes of the source of one mount.
pub(crate) struct Live {
    nodes: Arc<Nodes>,
    watch: Watch,
    interval: Duration,
    events: FolderEvents,
    state: Mutex<State>,
    /// Number of looks that found a change, and number of times that the event queue overflowed and
    /// lost changes.
    changes: AtomicU64,
    overflows: AtomicU64,
}

impl Live {
    /// Starts to follow the source of `nodes`, if `options` say so.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start(
        nodes: Arc<Nodes>,
        options: &Options,
        tell_kernel: TellKernel,
    ) -> io::Result<Option<Arc<Live>>> {
        let watch = options.watch();
        if watch == Watch::Off {
            return Ok(None);
        }
        let live = Arc::new(Live {
            events: FolderEvents::new(watch != Watch::Poll)?,
            nodes,
            watch,
            interval: options.watch_interval,
            state: Mutex::default(),
            changes: AtomicU64::new(0),
            overflows: AtomicU64::new(0),
        });
        let weak = Arc::downgrade(&live);
        let wake = move || drop(weak.upgrade().inspect(|live| live.events.wake()));
        live.nodes.set_watcher(tell_kernel, wake);
        let following = live.clone();
        let thread = std::thread::Builder::new().name("live".to_owned());
        thread.spawn(move || following.run())?;
        Ok(Some(live))
    }

    /// The state for `tensorfs status`.
    pub(crate) fn status(&self) -> WatchStatus {
        let folders_with_events = self.events.len();
        let state = self.state.lock();
        WatchStatus {
            mode: self.watch.to_string(),
            folders_with_events,
            folders_polled: state.polled.len(),
            changes: self.changes.load(Ordering::Relaxed),
            overflows: self.overflows.load(Ordering::Relaxed),
            incomplete: self.nodes.incomplete(),
            writers_known: writers_are_known(),
        }
    }

    fn run(self: &Arc<Self>) {
        let mut round = Instant::now();
        let mut polled = Instant::now();
        self.look_at_all();
        loop {
            self.begin_looks();
            let poll = (polled + self.interval).min(round + ROUND);
            self.wait(poll);
            let touched = self.events.take();
            let mut state = self.state.lock();
            for path in touched.paths {
                state.add(StoreLook::Folder(path), true);
            }
            for top in self.nodes.take_due() {
                state.add(StoreLook::Family(top), true);
            }
            drop(state);
            if touched.overflow {
                self.overflows.fetch_add(1, Ordering::Relaxed);
                tracing::info!("events of the source were lost; every folder is looked at");
            }
            if touched.overflow || round.elapsed() >= ROUND {
                self.look_at_all();
                round = Instant::now();
            }
            if polled.elapsed() >= self.interval {
                self.poll();
                polled = Instant::now();
            }
        }
    }

    /// Waits for events, at most until `poll` or until the next pending look may begin.
    fn wait(&self, poll: Instant) {
        let state = self.state.lock();
        let next = if state.todo.is_empty() {
            None
        } else if state.looking.is_empty() {
            let ready = |look| state.not_before.get(look).copied().unwrap_or_else(Instant::now);
            state.todo.keys().map(ready).min()
        } else {
            // The threads that take looks begin the next pending look themselves, unless all of
            // them are stuck.
            let stuck = state.looking.iter().map(|looking| looking.since + STUCK);
            stuck.filter(|time| *time > Instant::now()).min()
        };
        drop(state);
        let times = [next, self.nodes.next_due(), Some(poll)];
        let now = Instant::now();
        let time = times
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(now)
            .saturating_duration_since(now)
            .clamp(Duration::from_millis(5), SLEEP_MAX);
        self.events.wait(PollTimeout::try_from(time.as_millis()).unwrap_or(PollTimeout::MAX));
    }

    /// Adds a look at every folder, for changes that caused no event.
    fn look_at_all(&self) {
        let paths = self.nodes.tree().paths();
        let mut state = self.state.lock();
        paths.into_iter().for_each(|path| state.add(StoreLook::Folder(path), false));
    }

    /// Adds a look at each folder without events. The root of the source is always among these
    /// folders, since another folder may be mounted on it. A look at the path that the user gave is
    /// always added too, because changes of links in this path cause no events.
    fn poll(&self) {
        let root = self.nodes.tree().folder(0).path.clone();
        let mut state = self.state.lock();
        let polled: Vec<PathBuf> = state.polled.iter().cloned().chain([root]).collect();
        polled.into_iter().for_each(|path| state.add(StoreLook::Folder(path), false));
        state.add(StoreLook::Given, false);
    }

    /// Starts threads for the pending looks.
    fn begin_looks(self: &Arc<Self>) {
        self.state.lock().forget_past_pauses();
        loop {
            let state = self.state.lock();
            let waits = |looking: &RunningLook| looking.since.elapsed() >= STUCK;
            if state.looking.len() >= THREADS_MAX || !state.looking.iter().all(waits) {
                return;
            }
            drop(state);
            let Some((look, changed)) = self.begin() else { return };
            let live = self.clone();
            let thread = std::thread::Builder::new().name("look".to_owned());
            let failed = look.clone();
            if let Err(e) = thread.spawn(move || live.look(look, changed)) {
                tracing::error!("cannot start a thread: {e}");
                self.end(&failed, true, Duration::ZERO);
                self.state.lock().add(failed, true);
                return;
            }
        }
    }

    /// The next pending look that may begin, which the calling thread takes.
    fn begin(&self) -> Option<(StoreLook, bool)> {
        let mut last = None;
        loop {
            let state = self.state.lock();
            if state.looking.len() >= THREADS_MAX {
                return None;
            }
            let look = state.next_after(last.as_ref())?;
            drop(state);
            // Listing the devices of a large folder takes long, so the lock is not held during it.
            let devices = self.devices(&look);
            if let Some(changed) = self.state.lock().take(&look, devices) {
                return Some((look, changed));
            }
            last = Some(look);
        }
    }

    /// The devices that a look accesses.
    fn devices(&self, look: &StoreLook) -> BTreeSet<QueueKey> {
        let tree = self.nodes.tree();
        match look {
            StoreLook::Folder(path) => tree.devices(path),
            StoreLook::Family(top) => {
                let family = tree.family(*top).into_iter();
                family.flat_map(|id| tree.devices(&tree.folder(id).path)).collect()
            }
            // The file systems behind the links in the user's path are not known, so this look
            // counts for no device.
            StoreLook::Given => BTreeSet::new(),
        }
    }

    /// The body of a thread: takes one look after the other.
    fn look(self: &Arc<Self>, look: StoreLook, changed: bool) {
        let mut next = Some((look, changed));
        while let Some((look, changed)) = next {
            let begun = Instant::now();
            guarded(|| match &look {
                StoreLook::Folder(path) => self.rescan_folder(path, changed),
                StoreLook::Family(top) => self.look_at_family(*top),
                StoreLook::Given => self.look_at_given_path(),
            });
            self.end(&look, changed, begun.elapsed());
            next = self.begin();
        }
        self.events.wake();
    }

    fn end(&self, look: &StoreLook, changed: bool, took: Duration) {
        let mut state = self.state.lock();
        state.looking.retain(|looking| looking.look != *look);
        let pause = (took * 4).clamp(PAUSE_MIN, PAUSE_MAX);
        if !changed && pause == PAUSE_MIN {
            return;
        }
        state.not_before.insert(look.clone(), Instant::now() + pause);
    }

    fn rescan_folder(&self, path: &Path, changed: bool) {
        let tree = self.nodes.tree();
        if !tree.matters(path) {
            return self.leave(path);
        }
        self.watch(path);
        let failed = self.state.lock().failing.contains(path);
        if !changed && !failed && !self.may_have_changed(path) {
            return;
        }
        match tree.list_again(path) {
            Ok(change) => {
                self.state.lock().failing.remove(path);
                if *path == tree.folder(0).path {
                    self.nodes.note_source(0, None);
                }
                self.took(path, &change);
            }
            Err(error) => {
                if *path == tree.folder(0).path {
                    self.nodes.note_source(0, Some(&error));
                }
                let mut state = self.state.lock();
                let first = state.failing.insert(path.to_owned());
                // No event will say when the folder can be read again, so it is polled.
                state.polled.insert(path.to_owned());
                drop(state);
                if first {
                    tracing::warn!("{error}; the mount shows what was there before");
                }
            }
        }
    }

    fn look_at_family(&self, top: FolderId) {
        let tree = self.nodes.tree();
        let mut proved = false;
        for id in tree.family(top) {
            let path = tree.folder(id).path.clone();
            if let Ok(change) = tree.list_again(&path) {
                proved |= self.took(&path, &change).contains(&top);
            }
        }
        if !proved && tree.contains(top) {
            self.nodes.prove_again(top);
        }
    }

    /// Handles a link in the user's path that now leads to another folder. If the old folder is
    /// gone, the mount follows the link to the new folder. Otherwise the mount keeps the old
    /// folder, and the log says once that the link has changed.
    fn look_at_given_path(&self) {
        let tree = self.nodes.tree();
        if self.nodes.follow_given() {
            self.state.lock().add(StoreLook::Folder(tree.folder(0).path.clone()), true);
        }
        let now = tree.leads_elsewhere();
        let before = std::mem::replace(&mut self.state.lock().elsewhere, now.clone());
        if let Some(now) = now
            && before.as_ref() != Some(&now)
        {
            let [given, now, source] =
                [&tree.given, &now, &tree.source_now()].map(|path| shown_path(path));
            tracing::warn!(
                "{given}: leads to {now} now; the mount shows {source} as long as it is there"
            );
        }
    }

    /// Applies a change that was found at `path` to the nodes. Returns the top folders of the
    /// families that were proved again.
    fn took(&self, path: &Path, change: &TreeChange) -> BTreeSet<FolderId> {
        let mut state = self.state.lock();
        for path in &change.leading_here {
            state.add(StoreLook::Folder(path.clone()), true);
        }
        // A folder may have changed after its listing and before its watch began.
        for path in &change.to_watch {
            state.add(StoreLook::Folder(path.clone()), false);
        }
        drop(state);
        change.to_leave.iter().for_each(|path| self.leave(path));
        if change.changed.is_empty() && change.removed.is_empty() {
            return BTreeSet::new();
        }
        self.changes.fetch_add(1, Ordering::Relaxed);
        let proved = self.nodes.apply(change);
        let (added, removed) = (change.added.len(), change.removed.len());
        tracing::debug!("{}: {added} folders came, {removed} went", shown_path(path));
        proved
    }

    /// Watches the folder for events, or notes that it must be polled.
    fn watch(&self, path: &Path) {
        let tree = self.nodes.tree();
        let is_local = !tree.store().may_block(path);
        let sees = match self.watch {
            // The kernel has events for its own file systems only, not for other stores.
            _ if !tree.store().is_local() => false,
            Watch::Inotify => true,
            Watch::Auto => is_local,
            Watch::Poll | Watch::Off => false,
        };
        let watched = self.events.is_on() && sees && self.watch_events(path);
        let device = tree.device(path);
        let mut state = self.state.lock();
        if is_local {
            state.local.extend(device);
        }
        if watched {
            state.polled.remove(path);
        } else {
            state.polled.insert(path.to_owned());
        }
    }

    fn watch_events(&self, path: &Path) -> bool {
        let outcome = self.events.watch(path);
        if outcome == Err(Errno::ENOSPC) {
            let with_events = self.events.len();
            let mut state = self.state.lock();
            if !std::mem::replace(&mut state.told_full, true) {
                tracing::warn!(
                    "no inotify watch is left after {} folders; the others are polled each {} s \
                     (sysctl fs.inotify.max_user_watches allows more)",
                    with_events,
                    self.interval.as_secs()
                );
            }
        }
        outcome.is_ok()
    }

    fn leave(&self, path: &Path) {
        self.events.leave(path);
        let mut state = self.state.lock();
        state.polled.remove(path);
        state.outside.remove(path);
        state.failing.remove(path);
    }

    fn may_have_changed(&self, path: &Path) -> bool {
        let tree = self.nodes.tree();
        if tree.device(path).is_some() {
            return tree.may_have_changed(path);
        }
        // The path is outside the tree, which has versions of its own folders only.
        let Ok(now) = tree.store().fresh_version(path) else {
            return self.state.lock().outside.remove(path).is_some();
        };
        self.state.lock().outside.insert(path.to_owned(), now) != Some(now)
    }
}

/// Whether `STUCK_MAX` of the looks `running` already wait for one of `devices`.
fn is_held_up(devices: &BTreeSet<QueueKey>, running: &[RunningLook]) -> bool {
    let waiting = |device| running.iter().filter(|look| look.devices.contains(device)).count();
    devices.iter().any(|device| waiting(device) >= STUCK_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pending_looks_are_taken_in_order_without_those_that_run_or_pause() {
        let folder = |path: &str| StoreLook::Folder(path.into());
        let mut state = State::default();
        for path in ["/a", "/b", "/c", "/d"] {
            state.add(folder(path), false);
        }
        let (since, devices) = (Instant::now(), BTreeSet::new());
        state.looking.push(RunningLook { look: folder("/a"), devices, since });
        state.not_before.insert(folder("/c"), since + Duration::from_secs(1000));
        state.not_before.insert(folder("/d"), since);
        let found =
            std::iter::successors(state.next_after(None), |last| state.next_after(Some(last)));
        assert_eq!(found.collect::<Vec<_>>(), [folder("/b"), folder("/d")]);
        state.forget_past_pauses();
        assert_eq!(state.not_before.into_keys().collect::<Vec<_>>(), [folder("/c")]);
    }

    #[test]
    fn threads_that_list_devices_at_the_same_time_take_no_more_looks_than_may_run() {
        let folder = |index: usize| StoreLook::Folder(format!("/{index:02}").into());
        let mut state = State::default();
        (0..=THREADS_MAX).for_each(|index| state.add(folder(index), index == 0));
        // Each thread uses a file system of its own, and has chosen its look before any other
        // thread took one.
        let take = |state: &mut State, index: usize| {
            state.take(&folder(index), BTreeSet::from([QueueKey::Device(index as u64)]))
        };
        assert_eq!(take(&mut state, 0), Some(true));
        assert_eq!(take(&mut state, 0), None, "another thread takes it");
        for index in 1..THREADS_MAX {
            assert_eq!(take(&mut state, index), Some(false));
        }
        assert_eq!(take(&mut state, THREADS_MAX), None);
        assert_eq!(state.next_after(None), Some(folder(THREADS_MAX)), "it stays pending");
        state.looking.pop();
        assert_eq!(take(&mut state, THREADS_MAX), Some(false));
    }

    #[test]
    fn two_looks_that_wait_hold_up_only_those_that_ask_the_same_file_system() {
        let running = |path: &str, devices: &[u64]| RunningLook {
            look: StoreLook::Folder(path.into()),
            devices: devices.iter().copied().map(QueueKey::Device).collect(),
            since: Instant::now(),
        };
        // Two folders have links into file system 7, and one has links into file system 8.
        let looks = [running("/a", &[7]), running("/b", &[7]), running("/c", &[8])];
        let is_held_up = |devices: &[u64]| {
            super::is_held_up(&devices.iter().copied().map(QueueKey::Device).collect(), &looks)
        };
        assert!(is_held_up(&[7]));
        assert!(is_held_up(&[7, 8]));
        assert!(!is_held_up(&[8]));
        // A folder of a local file system without links is never held up.
        assert!(!is_held_up(&[]));
    }
}
