//! Seeing at once that a shard changes: what the kernel has cached of it must not be served
//! beside new bytes, and a reader of the cache would not ask us.
//!
//! A change that is not reported (a network file system) is still seen by the next read that
//! reaches us, which confirms its source.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tensorfs::source::Source;

/// Tells the kernel to forget what it has cached of an inode.
pub(crate) type Forget = Box<dyn Fn(u64) + Send + Sync>;

/// Watches the folders of sources.
pub(crate) struct Watcher {
    inotify: Option<Inotify>,
    state: Mutex<State>,
    forget: OnceLock<Forget>,
}

#[derive(Default)]
struct State {
    folders: HashMap<PathBuf, Option<WatchDescriptor>>,
    files: HashMap<WatchedFile, Vec<(Weak<Source>, u64)>>,
}

/// A watched folder and the name of a file in it. What is known of it: the sources, and the
/// inodes that show their bytes.
type WatchedFile = (WatchDescriptor, OsString);

impl Watcher {
    /// A watcher that does nothing until `start`.
    pub(crate) fn new() -> Arc<Watcher> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC);
        if let Err(e) = &inotify {
            tracing::warn!("changes of the source are only seen by reads: inotify: {e}");
        }
        let state = Mutex::new(State::default());
        Arc::new(Watcher { inotify: inotify.ok(), state, forget: OnceLock::new() })
    }

    /// Starts the thread that handles changes.
    pub(crate) fn start(self: &Arc<Self>, forget: Forget) -> std::io::Result<()> {
        let _ = self.forget.set(forget);
        let watcher = self.clone();
        std::thread::Builder::new().name("watch".to_owned()).spawn(move || watcher.run())?;
        Ok(())
    }

    /// Watches `sources`, whose bytes inode `ino` shows.
    pub(crate) fn watch(&self, ino: u64, sources: &[Arc<Source>]) {
        let Some(inotify) = &self.inotify else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for source in sources {
            let (Some(folder), Some(name)) = (source.path().parent(), source.path().file_name())
            else {
                continue;
            };
            let Some(watch) = state.watch_folder(inotify, folder) else { continue };
            let known = state.files.entry((watch, name.to_owned())).or_default();
            known.retain(|(source, _)| source.strong_count() > 0);
            let new = Arc::downgrade(source);
            if !known.iter().any(|(other, i)| *i == ino && other.ptr_eq(&new)) {
                known.push((new, ino));
            }
        }
    }

    fn run(&self) {
        let Some(inotify) = &self.inotify else { return };
        loop {
            let events = match inotify.read_events() {
                Ok(events) => events,
                Err(nix::errno::Errno::EINTR) => continue,
                Err(e) => {
                    tracing::warn!("changes of the source are only seen by reads: inotify: {e}");
                    return;
                }
            };
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    self.check(|_| true);
                } else if let Some(name) = event.name {
                    let key = (event.wd, name);
                    self.check(|file| *file == key);
                }
            }
        }
    }

    /// Confirms the sources of the files chosen, and forgets what shows changed ones.
    fn check(&self, chosen: impl Fn(&WatchedFile) -> bool) {
        let found: Vec<(Arc<Source>, u64)> = {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let files = state.files.iter().filter(|(file, _)| chosen(file));
            let sources = files.flat_map(|(_, sources)| sources);
            sources.filter_map(|(source, ino)| Some((source.upgrade()?, *ino))).collect()
        };
        for (source, ino) in found {
            if source.check().is_ok() || !source.is_changed() {
                continue;
            }
            if let Some(forget) = self.forget.get() {
                forget(ino);
            }
            // Once is enough: nothing of a changed source gets into the cache again.
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let done = Arc::downgrade(&source);
            for sources in state.files.values_mut() {
                sources.retain(|(source, i)| !(*i == ino && source.ptr_eq(&done)));
            }
        }
    }
}

impl State {
    fn watch_folder(&mut self, inotify: &Inotify, folder: &Path) -> Option<WatchDescriptor> {
        if let Some(known) = self.folders.get(folder) {
            return *known;
        }
        let mask = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ATTRIB;
        let watch = inotify.add_watch(folder, mask);
        if let Err(e) = watch {
            let folder = folder.display();
            tracing::warn!("{folder}: changes are only seen by reads: inotify: {e}");
        }
        self.folders.insert(folder.to_owned(), watch.ok());
        watch.ok()
    }
}
