//! inotify events of folders. They tell which folders may have different entries than before.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tensorfs::internal::sync::Mutex;

/// The watched folders of one mount.
pub(crate) struct FolderEvents {
    /// `None` if inotify is unavailable or turned off.
    inotify: Option<Inotify>,
    /// Makes `wait` return early.
    wake: EventFd,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    watches: HashMap<PathBuf, WatchDescriptor>,
    /// The paths of each kernel watch. The kernel watches an inode only once, but a folder has
    /// several paths while it is moved or if it is mounted at two places.
    paths: HashMap<WatchDescriptor, BTreeSet<PathBuf>>,
    /// Number of watches that have ended.
    ends: u64,
    /// Folders that replaced watched folders since the last call of `take`. Changes of these
    /// folders before their new watch began have caused no event.
    replaced: BTreeSet<PathBuf>,
}

/// The folders that had events.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FoldersTouched {
    /// Their paths.
    pub(crate) paths: BTreeSet<PathBuf>,
    /// Whether events were lost. Then any folder may have changed.
    pub(crate) overflow: bool,
}

impl FolderEvents {
    /// Makes the watcher of folders. If `wanted` is false, it has no events.
    ///
    /// # Errors
    /// If the process has no free descriptor.
    pub(crate) fn new(wanted: bool) -> nix::Result<FolderEvents> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let flags = InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK;
        let init = || {
            Inotify::init(flags).inspect_err(|e| {
                tracing::warn!("inotify is unavailable: {e}; the source is polled for changes");
            })
        };
        let inotify = if wanted { init().ok() } else { None };
        Ok(FolderEvents { inotify, wake, state: Mutex::default() })
    }

    /// Whether there are events at all.
    pub(crate) fn is_on(&self) -> bool {
        self.inotify.is_some()
    }

    /// Number of watched folders.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().watches.len()
    }

    /// Watches the folder at `path`. A path that is watched already is watched again, because
    /// another folder may be at this path now.
    ///
    /// # Errors
    /// `ENOSPC` if the user has reached the limit of watches.
    pub(crate) fn watch(&self, path: &Path) -> nix::Result<()> {
        let inotify = self.inotify.as_ref().ok_or(Errno::ENOSYS)?;
        let mask = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR
            | AddWatchFlags::IN_DONT_FOLLOW;
        // The lock is not held during `add_watch`, because the file system of the folder may not
        // answer.
        let (mut state, descriptor) = loop {
            let ends = self.state.lock().ends;
            let descriptor = inotify.add_watch(path, mask)?;
            let state = self.state.lock();
            // Another thread may have ended the watch whose descriptor this call got.
            if state.ends == ends || state.paths.contains_key(&descriptor) {
                break (state, descriptor);
            }
        };
        let before = state.watches.insert(path.to_owned(), descriptor);
        state.paths.entry(descriptor).or_default().insert(path.to_owned());
        if let Some(before) = before.filter(|before| *before != descriptor) {
            state.leave(inotify, path, before);
            state.replaced.insert(path.to_owned());
        }
        Ok(())
    }

    /// Ends the watch of the folder at `path`.
    pub(crate) fn leave(&self, path: &Path) {
        let Some(inotify) = &self.inotify else { return };
        let mut state = self.state.lock();
        if let Some(descriptor) = state.watches.remove(path) {
            state.leave(inotify, path, descriptor);
        }
    }

    /// Waits for an event or for `wake`, at most for `timeout`.
    pub(crate) fn wait(&self, timeout: PollTimeout) {
        let mut fds = vec![PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        let events = self.inotify.as_ref().map(|inotify| inotify.as_fd());
        fds.extend(events.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let _ = poll(&mut fds, timeout);
        let _ = self.wake.read();
    }

    /// Makes `wait` in another thread return.
    pub(crate) fn wake(&self) {
        let _ = self.wake.write(1);
    }

    /// Returns the folders that had events since the last call.
    pub(crate) fn take(&self) -> FoldersTouched {
        let mut touched = FoldersTouched::default();
        let Some(inotify) = &self.inotify else { return touched };
        while let Ok(events) = inotify.read_events() {
            let mut state = self.state.lock();
            for event in events {
                touched.overflow |= event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
                touched.paths.extend(state.paths.get(&event.wd).into_iter().flatten().cloned());
                if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    state.ended(event.wd);
                }
            }
        }
        touched.paths.append(&mut self.state.lock().replaced);
        touched
    }
}

impl State {
    fn leave(&mut self, inotify: &Inotify, path: &Path, descriptor: WatchDescriptor) {
        let Some(paths) = self.paths.get_mut(&descriptor) else { return };
        paths.remove(path);
        if paths.is_empty() {
            self.paths.remove(&descriptor);
            self.ends += 1;
            let _ = inotify.rm_watch(descriptor);
        }
    }

    /// Notes that the kernel has ended a watch, because the folder is gone.
    fn ended(&mut self, descriptor: WatchDescriptor) {
        self.ends += 1;
        for path in self.paths.remove(&descriptor).into_iter().flatten() {
            if self.watches.get(&path) == Some(&descriptor) {
                self.watches.remove(&path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folders(tempfile::TempDir, FolderEvents);

    impl Folders {
        fn new(names: &[&str]) -> Folders {
            let folders = Folders(tempfile::tempdir().unwrap(), FolderEvents::new(true).unwrap());
            for name in names {
                std::fs::create_dir(folders.path(name)).unwrap();
                folders.1.watch(&folders.path(name)).unwrap();
            }
            folders
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn write(&self, name: &str) {
            std::fs::write(self.path(name), "").unwrap();
        }

        fn touched(&self) -> Vec<String> {
            let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
            self.1.take().paths.iter().map(name).collect()
        }
    }

    #[test]
    fn a_folder_that_moves_keeps_its_watch_under_its_new_path() {
        let folders = Folders::new(&["a"]);
        std::fs::rename(folders.path("a"), folders.path("b")).unwrap();
        folders.1.watch(&folders.path("b")).unwrap();
        folders.1.leave(&folders.path("a"));
        drop(folders.1.take());
        folders.write("b/file");
        assert_eq!(folders.touched(), ["b"]);
        assert_eq!((folders.1.len(), folders.1.state.lock().paths.len()), (1, 1));
    }

    #[test]
    fn a_folder_that_takes_the_place_of_another_is_watched_in_its_stead() {
        let folders = Folders::new(&["a", "b"]);
        std::fs::rename(folders.path("a"), folders.path("old")).unwrap();
        std::fs::rename(folders.path("b"), folders.path("a")).unwrap();
        folders.1.watch(&folders.path("a")).unwrap();
        folders.1.leave(&folders.path("b"));
        drop(folders.1.take());
        folders.write("old/file");
        assert!(folders.touched().is_empty());
        folders.write("a/file");
        assert_eq!(folders.touched(), ["a"]);
    }

    #[test]
    fn a_link_in_the_place_of_a_folder_is_not_watched() {
        let folders = Folders::new(&["a"]);
        std::os::unix::fs::symlink("a", folders.path("link")).unwrap();
        folders.1.watch(&folders.path("link")).unwrap_err();
        folders.write("file");
        folders.1.watch(&folders.path("file")).unwrap_err();
        assert_eq!(folders.1.len(), 1);
    }

    #[test]
    fn a_folder_that_is_watched_while_its_other_path_is_left_stays_watched() {
        let folders = Folders::new(&["a", "b"]);
        // These are two paths of the same inode, as for a folder that is mounted twice.
        let other = folders.path("b/../a");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2000 {
                    folders.1.watch(&folders.path("a")).unwrap();
                    folders.1.leave(&folders.path("a"));
                }
            });
            for round in 0..200 {
                folders.1.watch(&other).unwrap();
                drop(folders.1.take());
                folders.write(&format!("a/{round}"));
                assert!(folders.1.take().paths.contains(&other));
                folders.1.leave(&other);
            }
        });
    }

    #[test]
    fn nothing_is_kept_of_folders_that_are_gone() {
        let folders = Folders::new(&["a", "b"]);
        std::fs::remove_dir(folders.path("a")).unwrap();
        assert_eq!(folders.touched(), ["a"]);
        folders.1.leave(&folders.path("b"));
        folders.1.leave(&folders.path("b"));
        let state = folders.1.state.lock();
        assert!(state.watches.is_empty() && state.paths.is_empty());
    }

    #[test]
    fn a_folder_that_is_removed_and_made_again_is_watched_again() {
        let folders = Folders::new(&["a"]);
        std::fs::remove_dir(folders.path("a")).unwrap();
        std::fs::create_dir(folders.path("a")).unwrap();
        // The new watch begins before the event for the end of the old watch is read.
        folders.1.watch(&folders.path("a")).unwrap();
        assert_eq!(folders.touched(), ["a"]);
        folders.write("a/file");
        assert_eq!(folders.touched(), ["a"]);
        assert_eq!(folders.1.len(), 1);
    }
}
