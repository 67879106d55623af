//! Follows changes of the source while it is mounted.
//!
//! One thread takes the events of folders and decides when to look at which one. Other threads
//! look, since a folder may lie on a file system that never answers: one at a time, and another
//! one when all wait for long. Events of one folder in a row are one look.

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

/// Minimum and maximum time from one look at a folder to the next one. In between it is as long as
/// the look took, several times.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A look at a folder that takes longer may wait for a file system that does not answer.
const STUCK: Duration = Duration::from_secs(1);

/// Most threads that look, and most of them for one file system that is not local.
const THREADS_MAX: usize = 8;
const STUCK_MAX: usize = 2;

/// Time between two looks at all folders, also at those that have events: mounts on folders of the
/// source make none.
const ROUND: Duration = Duration::from_secs(30);

/// Longest sleep of the thread.
const SLEEP_MAX: Duration = Duration::from_secs(30);

/// The part that follows the source, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct WatchStatus {
    /// The word of `watch=`.
    pub mode: String,
    pub folders_with_events: usize,
    pub folders_polled: usize,
    /// Number of changes that were seen.
    pub changes: u64,
    /// How often events were lost.
    pub overflows: u64,
    /// Sets that may not be whole yet.
    pub incomplete: Vec<String>,
    /// Whether the kernel says who writes a file.
    pub writers_known: bool,
}

/// Something to look at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum StoreLook {
    /// The folder at this real path.
    Folder(PathBuf),
    /// The family with this top folder, in which something is on its way.
    Family(FolderId),
    /// The path of the source that the user gave.
    Given,
}

/// A look that a thread takes now.
struct RunningLook {
    look: StoreLook,
    /// The file systems that it may wait for.
    devices: BTreeSet<QueueKey>,
    since: Instant,
}

#[derive(Default)]
struct State {
    /// Pending looks, and whether their folders have certainly changed.
    todo: BTreeMap<StoreLook, bool>,
    /// Times before which folders are not looked at again.
    not_before: HashMap<StoreLook, Instant>,
    looking: Vec<RunningLook>,
    /// Devices of local file systems: a look that waits does not wait for them.
    local: HashSet<QueueKey>,
    /// Folders without events.
    polled: BTreeSet<PathBuf>,
    /// States of folders outside the tree, into which links of the tree lead.
    outside: HashMap<PathBuf, Version>,
    /// Folders whose last look failed.
    failing: BTreeSet<PathBuf>,
    /// Target of the user's path at the last check; `None` if it still is the source.
    elsewhere: Option<PathBuf>,
    told_full: bool,
}

impl State {
    fn add(&mut self, look: StoreLook, changed: bool) {
        *self.todo.entry(look).or_default() |= changed;
    }

    /// The first pending look after `last` that may begin, unless it waits for a file system.
    fn next_after(&self, last: Option<&StoreLook>) -> Option<StoreLook> {
        let now = Instant::now();
        let after = last.map_or(Bound::Unbounded, Bound::Excluded);
        let mut pending = self.todo.range((after, Bound::Unbounded)).map(|(look, _)| look);
        pending.find(|look| self.may_begin(look, now)).cloned()
    }

    /// Whether no thread takes this look now, and its pause is over.
    fn may_begin(&self, look: &StoreLook, now: Instant) -> bool {
        let runs = self.looking.iter().any(|running| running.look == *look);
        !runs && self.not_before.get(look).is_none_or(|time| *time <= now)
    }

    /// Notes that the caller takes this look, which asks `devices`. Returns whether its folder has
    /// certainly changed, and `None` if the look may not begin.
    fn take(&mut self, look: &StoreLook, mut devices: BTreeSet<QueueKey>) -> Option<bool> {
        devices.retain(|device| !self.local.contains(device));
        let (looking, since) = (&self.looking, Instant::now());
        let is_held_up = looking.len() >= STUCK_MAX && is_held_up(&devices, looking);
        // Other threads may have taken it, or all places, while the caller listed the devices.
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
    /// Looks that found something, and changes that were lost to a full queue.
    changes: AtomicU64,
    overflows: AtomicU64,
}

impl Live {
    /// Begins to follow the source of `nodes`, if `options` say so.
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

    /// The facts for `tensorfs status`.
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

    /// Waits for events, and until `poll` or the next thing to do at most.
    fn wait(&self, poll: Instant) {
        let state = self.state.lock();
        let next = if state.todo.is_empty() {
            None
        } else if state.looking.is_empty() {
            let ready = |look| state.not_before.get(look).copied().unwrap_or_else(Instant::now);
            state.todo.keys().map(ready).min()
        } else {
            // The threads that look take the next one themselves, unless they are stuck.
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

    /// Looks whether any folder has changed.
    fn look_at_all(&self) {
        let paths = self.nodes.tree().paths();
        let mut state = self.state.lock();
        paths.into_iter().for_each(|path| state.add(StoreLook::Folder(path), false));
    }

    /// Looks whether a folder without events has changed. The source itself is one of them: another
    /// folder may be mounted on it. The links on the way to it have no events either.
    fn poll(&self) {
        let root = self.nodes.tree().folder(0).path.clone();
        let mut state = self.state.lock();
        let polled: Vec<PathBuf> = state.polled.iter().cloned().chain([root]).collect();
        polled.into_iter().for_each(|path| state.add(StoreLook::Folder(path), false));
        state.add(StoreLook::Given, false);
    }

    /// Starts the threads that are needed.
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

    /// Takes the next thing to look at.
    fn begin(&self) -> Option<(StoreLook, bool)> {
        let mut last = None;
        loop {
            let state = self.state.lock();
            if state.looking.len() >= THREADS_MAX {
                return None;
            }
            let look = state.next_after(last.as_ref())?;
            drop(state);
            // This takes long in a large folder, so the lock is not held.
            let devices = self.devices(&look);
            if let Some(changed) = self.state.lock().take(&look, devices) {
                return Some((look, changed));
            }
            last = Some(look);
        }
    }

    /// The devices that a look asks.
    fn devices(&self, look: &StoreLook) -> BTreeSet<QueueKey> {
        let tree = self.nodes.tree();
        match look {
            StoreLook::Folder(path) => tree.devices(path),
            StoreLook::Family(top) => {
                let family = tree.family(*top).into_iter();
                family.flat_map(|id| tree.devices(&tree.folder(id).path)).collect()
            }
            // The file systems of these links are not known. No other look waits for them.
            StoreLook::Given => BTreeSet::new(),
        }
    }

    /// Body of a thread: looks at one thing after the other.
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
                // No event tells when it can be read again.
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

    /// If a link on the way to the source was switched, follows it once the source is gone, and else
    /// says so once.
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

    /// Takes over a change that was found at `path`. Returns the families that were proved again.
    fn took(&self, path: &Path, change: &TreeChange) -> BTreeSet<FolderId> {
        let mut state = self.state.lock();
        for path in &change.leading_here {
            state.add(StoreLook::Folder(path.clone()), true);
        }
        // A folder may have changed between its listing and its watch.
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

    /// Watches the folder, or notes that it must be polled.
    fn watch(&self, path: &Path) {
        let tree = self.nodes.tree();
        let is_local = !tree.store().may_block(path);
        let sees = match self.watch {
            // The kernel tells of changes of its own file systems.
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
        // The tree remembers only its own folders.
        let Ok(now) = tree.store().fresh_version(path) else {
            return self.state.lock().outside.remove(path).is_some();
        };
        self.state.lock().outside.insert(path.to_owned(), now) != Some(now)
    }
}

/// Whether as many of the looks `running` as may wait already wait for one of `devices`.
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
        // Each thread asks a file system of its own, and has found its look before any other thread
        // took one.
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
        // Two folders with links into file system 7, and one with links into 8.
        let looks = [running("/a", &[7]), running("/b", &[7]), running("/c", &[8])];
        let is_held_up = |devices: &[u64]| {
            super::is_held_up(&devices.iter().copied().map(QueueKey::Device).collect(), &looks)
        };
        assert!(is_held_up(&[7]));
        assert!(is_held_up(&[7, 8]));
        assert!(!is_held_up(&[8]));
        // A folder of a local file system without links.
        assert!(!is_held_up(&[]));
    }
}
