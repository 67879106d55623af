//! Detects changes of a source while programs read it. Cached reads do not reach the daemon, so the
//! kernel would serve old cached pages together with new bytes.
//!
//! Events of the kernel report changes at once. A check of every open source each second finds
//! changes that cause no event, such as a write through a mapping or a write by another machine to
//! a network file system. File systems that may not answer are checked by separate threads, so that
//! a stalled source does not delay the detection of changes in other sources.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use nix::poll::PollTimeout;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::source::Source;
use tensorfs::internal::sync::Mutex;
use tensorfs::internal::version::QueueKey;

use super::blocking::offload;
use super::file_events::{self, FileEvents, FileWatch};

/// Time between two checks of all open sources.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of threads that check the sources of one file system. One thread checks all
/// sources of the file system, and one more thread starts for each source that stalls.
const LOOKS_MAX: usize = 8;

/// Makes the kernel drop its cached pages of an inode.
pub(crate) type Forget = Arc<dyn Fn(u64) + Send + Sync>;

/// Watches the sources of open files.
pub(crate) struct Watcher {
    /// `None` if inotify is unavailable. Then only the check each second finds changes.
    events: Option<Arc<FileEvents>>,
    state: Mutex<State>,
    forget: OnceLock<Forget>,
}

#[derive(Default)]
struct State {
    /// For the number of each watch: the inode of the file, and its sources.
    open: HashMap<u64, (u64, Vec<Watching>)>,
    next: u64,
    /// Pending checks on file systems that may not answer, by device.
    queues: HashMap<QueueKey, LookQueue>,
}

/// A watched source.
#[derive(Clone)]
struct Watching {
    source: Weak<Source>,
    events: Option<Arc<FileWatch>>,
}

/// Pending checks of the sources of one file system. One thread runs for each source that is being
/// checked.
#[derive(Default)]
struct LookQueue {
    todo: VecDeque<Look>,
    /// Number of the watch and address of the source for each entry of `todo`, so that no source is
    /// queued twice.
    queued: HashSet<(u64, usize)>,
    /// Addresses of the sources that are being checked, with the start time of each check.
    looking: HashMap<usize, Instant>,
}

/// A pending check of a source.
struct Look {
    number: u64,
    ino: u64,
    source: Weak<Source>,
}

impl Look {
    /// The address of the source, which is unique while a reference to it exists.
    fn address(&self) -> usize {
        self.source.as_ptr() as usize
    }
}

impl LookQueue {
    fn push(&mut self, look: Look) {
        if self.queued.insert((look.number, look.address())) {
            self.todo.push_back(look);
        }
    }

    /// Takes the next check from the queue, and marks its source as being checked.
    fn begin(&mut self) -> Option<Look> {
        let free = |look: &Look| !self.looking.contains_key(&look.address());
        let index = self.todo.iter().position(free)?;
        let look = self.todo.remove(index)?;
        self.queued.remove(&(look.number, look.address()));
        self.looking.insert(look.address(), Instant::now());
        Some(look)
    }

    /// Whether another thread is needed: no thread runs, or all have been blocked for at least
    /// `SWEEP_INTERVAL`.
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
        let ended = self
            .watcher
            .state
            .lock()
            .open
            .remove(&self.number)
            .into_iter()
            .flat_map(|(_, sources)| sources);
        ended.filter_map(|watching| watching.events).for_each(|events| events.end());
    }
}

impl Watcher {
    /// Makes a watcher that finds no changes until `start`.
    pub(crate) fn new() -> Arc<Watcher> {
        let events = FileEvents::new().map_err(|e| {
            tracing::warn!("changes of the source are seen within a second only: inotify: {e}");
        });
        let state = Mutex::new(State::default());
        Arc::new(Watcher { events: events.ok(), state, forget: OnceLock::new() })
    }

    /// Starts the thread that checks for changes.
    pub(crate) fn start(self: &Arc<Self>, forget: Forget) -> std::io::Result<()> {
        let _ = self.forget.set(forget);
        let watcher = self.clone();
        std::thread::Builder::new().name("watch".to_owned()).spawn(move || watcher.run())?;
        Ok(())
    }

    /// Watches the open `sources` of inode `ino` until the result is dropped. `unread` says that no
    /// reader has any of their bytes yet.
    pub(crate) fn watch(
        self: &Arc<Self>,
        ino: u64,
        sources: &[Arc<Source>],
        unread: bool,
    ) -> Watched {
        let watching = sources
            .iter()
            .map(|source| Watching {
                source: Arc::downgrade(source),
                events: self.events_of(source, unread),
            })
            .collect();
        let mut state = self.state.lock();
        state.next += 1;
        let number = state.next;
        state.open.insert(number, (ino, watching));
        drop(state);
        Watched { watcher: self.clone(), number }
    }

    /// Watches `source` with inotify. The watch becomes the witness that tells the source of
    /// writes.
    fn events_of(&self, source: &Arc<Source>, unread: bool) -> Option<Arc<FileWatch>> {
        let file_source = source.local()?;
        let file = file_source.open_file()?;
        let local = !source.may_block();
        if local {
            file_events::note_stores(&file);
        }
        let watch = self
            .events
            .as_ref()?
            .watch(&file, local)
            .inspect_err(|e| {
                tracing::debug!("{}: not watched: inotify: {e}", shown_path(source.path()));
            })
            .ok()?;
        // For a remote file system, the kernel has events only for changes by this machine, so the
        // watch is no witness.
        if local {
            let confirmed = if unread { source.settle() } else { source.check() };
            if confirmed.is_ok() {
                file_source.set_witness(watch.clone());
            }
        }
        Some(watch)
    }

    fn run(self: &Arc<Self>) {
        let mut swept = Instant::now();
        loop {
            self.wait(SWEEP_INTERVAL.saturating_sub(swept.elapsed()));
            let touched = self.events.as_ref().map(|events| events.take_touched());
            if let Some(touched) = touched.filter(|touched| !touched.is_empty()) {
                let is_touched = |watch: &Arc<FileWatch>| touched.contains(watch);
                self.check(|_, watching| watching.events.as_ref().is_some_and(is_touched));
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
        match &self.events {
            Some(events) => events.wait(timeout),
            None => std::thread::sleep(time),
        }
    }

    /// Checks the sources that `chosen` selects, and drops the cached pages of changed sources.
    /// Does not wait for file systems that may not answer.
    fn check(self: &Arc<Self>, chosen: impl Fn(u64, &Watching) -> bool) {
        let open: Vec<_> =
            self.state.lock().open.iter().map(|(n, watch)| (*n, watch.clone())).collect();
        for (number, (ino, sources)) in open {
            let mut changed = Vec::new();
            for watching in sources.into_iter().filter(|watching| chosen(ino, watching)) {
                let weak = watching.source;
                let Some(source) = weak.upgrade() else { continue };
                if source.may_block() {
                    let look = Look { number, ino, source: weak };
                    self.state.lock().queues.entry(source.queue_key()).or_default().push(look);
                } else if has_changed(&source, watching.events.as_deref()) {
                    changed.push(weak);
                }
            }
            self.drop_pages_of_changed(number, ino, &changed);
        }
        self.look();
    }

    /// Starts the threads that the pending checks need.
    fn look(self: &Arc<Self>) {
        let mut state = self.state.lock();
        state.queues.retain(|_, queue| !queue.todo.is_empty() || !queue.looking.is_empty());
        let wanting = state.queues.iter_mut().filter(|(_, queue)| queue.wants_thread());
        let looks: Vec<_> =
            wanting.filter_map(|(key, queue)| Some((*key, queue.begin()?))).collect();
        drop(state);
        for (key, look) in looks {
            let (watcher, address) = (self.clone(), look.address());
            if !offload(move || watcher.look_on(key, look)) {
                self.looked(key, address);
            }
        }
    }

    /// The body of a thread: checks one source after the other, until no check is pending.
    fn look_on(&self, key: QueueKey, first: Look) {
        let mut next = Some(first);
        while let Some(look) = next {
            let Look { number, ino, source } = &look;
            // Dropping `held` may close the file, so it is dropped before the check counts as done.
            let held = source.upgrade();
            if held.as_ref().is_some_and(|source| has_changed(source, None)) {
                self.drop_pages_of_changed(*number, *ino, std::slice::from_ref(source));
            }
            drop(held);
            next = self.looked(key, look.address());
        }
    }

    /// Notes the end of a check. Returns the next check for the thread.
    fn looked(&self, key: QueueKey, address: usize) -> Option<Look> {
        let mut state = self.state.lock();
        let queue = state.queues.get_mut(&key)?;
        queue.looking.remove(&address);
        queue.begin()
    }

    /// Makes the kernel drop its pages of inode `ino`, because some of its sources have changed.
    /// After that, these sources are not watched any more, because their bytes do not get into the
    /// page cache again.
    fn drop_pages_of_changed(&self, number: u64, ino: u64, changed: &[Weak<Source>]) {
        if changed.is_empty() {
            return;
        }
        self.forget(ino);
        let is_done =
            |watching: &mut Watching| changed.iter().any(|done| done.ptr_eq(&watching.source));
        let mut state = self.state.lock();
        let Some((_, left)) = state.open.get_mut(&number) else { return };
        let done: Vec<Watching> = left.extract_if(.., is_done).collect();
        drop(state);
        done.into_iter().filter_map(|watching| watching.events).for_each(|events| events.end());
    }

    /// Makes the kernel drop its cached pages of inode `ino`.
    pub(crate) fn forget(&self, ino: u64) {
        // The kernel waits for pending reads of the inode, and these may wait for a stalled source.
        // So another thread makes the call.
        if let Some(forget) = self.forget.get() {
            let off_thread = forget.clone();
            if !offload(move || off_thread(ino)) {
                forget(ino);
            }
        }
    }

    /// Checks the sources of inode `ino` now.
    pub(crate) fn look_at(self: &Arc<Self>, ino: u64) {
        self.check(|shown, _| shown == ino);
    }

    /// Checks all open sources now, because a read has found a changed source.
    pub(crate) fn sweep(self: &Arc<Self>) {
        self.check(|_, _| true);
    }
}

/// Checks a source and returns whether it has changed. If its times are unchanged, tells `events`
/// that no process has written through a mapping.
fn has_changed(source: &Arc<Source>, events: Option<&FileWatch>) -> bool {
    let (closes, before) = (events.map(FileWatch::closes), source.version());
    let changed = source.check().is_err() && source.is_changed();
    // The check may have opened a file whose watch ended in the meantime. This call closes the file again.
    source.release();
    let notes_stores = source.local().is_some_and(|local| local.file_system().notes_stores());
    let same = !changed && source.version() == before && notes_stores;
    if let (Some(events), Some(closes), true) = (events, closes, same) {
        events.confirm(closes);
    }
    changed
}

#[cfg(test)]
mod tests {
    use tensorfs::internal::store::Store;

    use super::*;

    // A regression: a file whose watch ended during its check stayed open until the mount ended.
    #[test]
    fn a_check_leaves_no_file_open_that_no_reader_holds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "bytes").unwrap();
        let source = Store::default().open(&path).unwrap();
        let is_open = || source.local().unwrap().open_file().is_some();
        let pin = source.pin().unwrap();
        assert!(!has_changed(&source, None));
        assert!(is_open());
        drop(pin);
        assert!(!is_open());
        assert!(!has_changed(&source, None));
        assert!(!is_open());
    }
}
