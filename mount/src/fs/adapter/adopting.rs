//! Open files of the previous process that this process has not proved yet.
//!
//! Requests for one of these files wait for its proof, at most for the deadline of a request to its
//! source. All other requests are answered in the meantime.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tensorfs::internal::sync::Mutex;

use super::FsState;
use crate::serve::blocking::{Fail, guarded};

/// The open files of the previous process that are not proved yet.
#[derive(Default)]
pub(super) struct Adoptions {
    /// The files by inode number.
    files: Mutex<HashMap<u64, AdoptedFile>>,
    /// Number of files that count as not proved: those in `files`, and those whose requests are
    /// being continued. At 0, a request takes no lock.
    count: AtomicUsize,
}

struct AdoptedFile {
    /// Path in the mount.
    path: PathBuf,
    /// Requests that wait for the proof of the file.
    waiters: Vec<Box<dyn FnOnce() + Send>>,
}

impl Adoptions {
    /// Notes that the file at `path` in the mount is not proved yet. Must be called before the
    /// first request is read.
    pub(super) fn begin(&self, ino: u64, path: &Path) {
        let file = AdoptedFile { path: path.to_owned(), waiters: Vec::new() };
        if self.files.lock().insert(ino, file).is_none() {
            self.count.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Notes that the proof of the file has ended, and continues the requests that wait for it.
    pub(super) fn end(&self, ino: u64) {
        if self.go_on(ino) {
            self.count_end();
        }
    }

    /// Continues the requests that wait for the file. If this returns true, `count_end` must
    /// follow: until then the file counts as not proved.
    pub(super) fn go_on(&self, ino: u64) -> bool {
        let file = self.files.lock().remove(&ino);
        let is_first = file.is_some();
        file.into_iter().flat_map(|file| file.waiters).for_each(guarded);
        is_first
    }

    /// Counts a file as proved, after `go_on` has returned true for the file.
    pub(super) fn count_end(&self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether all proofs have ended.
    pub(super) fn are_over(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// The path of the file in the mount. `None` if its proof has ended.
    fn path(&self, ino: u64) -> Option<PathBuf> {
        if self.are_over() {
            return None;
        }
        self.files.lock().get(&ino).map(|file| file.path.clone())
    }

    /// Calls `then` once the proof of the file has ended, or at once if it has ended already.
    pub(super) fn when_over(&self, ino: u64, then: impl FnOnce() + Send + 'static) {
        if !self.are_over() {
            let mut files = self.files.lock();
            if let Some(file) = files.get_mut(&ino) {
                return file.waiters.push(Box::new(then));
            }
        }
        then();
    }
}

impl FsState {
    /// Calls `then` once the proof of the file with this inode number has ended. Files that the
    /// previous process did not have open need no proof, so `then` is called at once. `reply` fails
    /// if the proof takes too long.
    pub(super) fn when_adopted<R: Fail>(
        self: &Arc<Self>,
        ino: u64,
        reply: R,
        then: impl FnOnce(Arc<FsState>, R) + Send + 'static,
    ) {
        let Some(path) = self.adoptions.path(ino) else { return then(self.clone(), reply) };
        let (shared, pending) = (self.clone(), self.service.blocking.pending(&path, reply));
        self.adoptions.when_over(ino, move || {
            if let Some(reply) = pending.take() {
                then(shared, reply);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_file_counts_until_the_requests_that_waited_for_it_have_gone_on() {
        let adoptions = Arc::new(Adoptions::default());
        adoptions.begin(7, Path::new("a/model.safetensors"));
        let (send, done) = channel();
        let seen = adoptions.clone();
        adoptions.when_over(7, move || send.send(seen.are_over()).unwrap());
        adoptions.end(7);
        assert_eq!(done.try_iter().collect::<Vec<_>>(), [false]);
        assert!(adoptions.are_over());
    }

    #[test]
    fn requests_wait_for_the_file_that_they_are_about_only() {
        let adoptions = Adoptions::default();
        adoptions.begin(7, Path::new("a/model.safetensors"));
        adoptions.begin(8, Path::new("b/model.safetensors"));
        let (send, done) = channel();
        for ino in [7, 8, 9, 7] {
            let send = send.clone();
            adoptions.when_over(ino, move || send.send(ino).unwrap());
        }
        assert_eq!(done.try_iter().collect::<Vec<_>>(), [9]);
        adoptions.end(7);
        assert_eq!(done.try_iter().collect::<Vec<_>>(), [7, 7]);
        assert!(!adoptions.are_over());
        adoptions.end(7);
        adoptions.end(8);
        assert_eq!(done.try_iter().collect::<Vec<_>>(), [8]);
        assert!(adoptions.are_over());
        assert_eq!(adoptions.path(8), None);
    }
}
