//! Works on several files in parallel. The work on each file uses the disk first, and then a CPU
//! core.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::store::Store;

/// Number of threads that work on files of the local file system.
const OPENERS: usize = 8;

/// Number of threads that work on files of another store. It is larger, because answers of such
/// stores take long.
const OPENERS_OF_REMOTE: usize = 64;

/// The results of `work` for `files`, which are in `store`. They may come in any order.
pub(super) fn map_files<T, R>(store: &Store, files: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R>
where
    T: Sync,
    R: Send,
{
    let (least, openers) =
        if store.is_local() { (OPENERS, OPENERS) } else { (2, OPENERS_OF_REMOTE.min(files.len())) };
    if files.len() < least {
        return files.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let some = || {
        let next = || files.get(next.fetch_add(1, Ordering::Relaxed));
        std::iter::from_fn(next).map(&work).collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..openers)
            .map_while(|_| std::thread::Builder::new().spawn_scoped(scope, some).ok())
            .collect();
        let mut all = some();
        for thread in threads {
            match thread.join() {
                Ok(done) => all.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    })
}
