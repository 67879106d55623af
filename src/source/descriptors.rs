//! How many source files are open at once: thousands of shards must not use up the process's
//! file descriptors.

use std::collections::VecDeque;
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

/// Notes that `source` was opened, and closes the one opened longest ago where that makes one
/// too many. A closed source is opened again when it is read.
pub(super) fn opened(source: &Arc<Source>) {
    let open = open_sources();
    let evicted = {
        let mut sources = open.sources.lock().unwrap_or_else(PoisonError::into_inner);
        sources.push_back(Arc::downgrade(source));
        if sources.len() as u64 > open.max {
            sources.retain(|source| source.strong_count() > 0);
        }
        let excess = sources.len() as u64 > open.max;
        if excess { sources.pop_front() } else { None }
    };
    if let Some(source) = evicted.and_then(|source| source.upgrade()) {
        source.close();
    }
}
