//! How many source files are open at once: thousands of shards must not use up the process's
//! file descriptors.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::Source;

/// Descriptors left to everything that is not a shard.
const RESERVED: u64 = 128;

/// Fewest shards kept open, whatever the limit.
const OPEN_MIN: u64 = 32;

/// Raises the soft limit on open files to the hard one, so that all shards of a large
/// checkpoint stay open. Returns the limit in force.
pub fn raise_limit() -> u64 {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, hard)) if soft < hard => match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
            Ok(()) => hard,
            Err(_) => soft,
        },
        Ok((soft, _)) => soft,
        Err(_) => OPEN_MIN + RESERVED,
    }
}

/// Sources with an open descriptor, oldest first.
struct Open {
    sources: Mutex<VecDeque<Weak<Source>>>,
    max: u64,
}

fn open_sources() -> &'static Open {
    static OPEN: OnceLock<Open> = OnceLock::new();
    OPEN.get_or_init(|| {
        let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(RESERVED, |(soft, _)| soft);
        let max = limit.saturating_sub(RESERVED).max(OPEN_MIN);
        Open { sources: Mutex::new(VecDeque::new()), max }
    })
}

/// Notes that `source` was opened, and closes another one where that makes one too many: the
/// one opened longest ago that can be opened again. It is when it is read.
pub(super) fn opened(source: &Arc<Source>) {
    if source.counted.swap(true, Ordering::SeqCst) {
        return;
    }
    let open = open_sources();
    let evicted = {
        let mut sources = open.sources.lock().unwrap_or_else(PoisonError::into_inner);
        sources.push_back(Arc::downgrade(source));
        if sources.len() as u64 <= open.max {
            return;
        }
        sources.retain(|source| {
            let source = source.upgrade();
            let stays = source.as_ref().is_some_and(|source| source.is_open());
            if !stays && let Some(source) = source {
                source.counted.store(false, Ordering::SeqCst);
            }
            stays
        });
        if sources.len() as u64 <= open.max {
            return;
        }
        let last = sources.len() - 1;
        let mut others = sources.range(..last).filter_map(Weak::upgrade);
        let evicted = others.find(|source| source.may_close());
        if let Some(evicted) = &evicted {
            sources.retain(|source| !std::ptr::eq(source.as_ptr(), Arc::as_ptr(evicted)));
            evicted.counted.store(false, Ordering::SeqCst);
        }
        evicted
    };
    if let Some(source) = evicted {
        source.close();
    }
}
