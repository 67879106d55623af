//! How many source files are open at once: thousands of shards must not use up the process's
//! file descriptors.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::Source;
use crate::process::PerProcess;
use crate::sync::{Mutex, MutexGuard};

/// Descriptors left to everything else: also to reads under way, whose file stays open for them
/// when its shard makes way for another.
const RESERVED: u64 = 192;

/// Of the descriptors that there may be, one in so many is closed when there are too many.
const EVICTED_SHARE: u64 = 8;

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

/// What is open, oldest first.
#[derive(Default)]
struct Open {
    /// Sources with an open descriptor.
    sources: VecDeque<Weak<Source>>,
    /// Those with a second one, for O_DIRECT.
    direct: VecDeque<Weak<Source>>,
}

impl Open {
    fn len(&self) -> u64 {
        (self.sources.len() + self.direct.len()) as u64
    }

    /// Strikes out those that were closed in other ways.
    fn tidy(&mut self) {
        self.sources.retain(|source| {
            let source = source.upgrade();
            let stays = source.as_ref().is_some_and(|source| source.is_open());
            if !stays && let Some(source) = source {
                source.counted.store(false, Ordering::SeqCst);
            }
            stays
        });
        self.direct.retain(|source| source.upgrade().is_some_and(|s| s.is_open_direct()));
    }
}

/// Most descriptors of sources.
fn open_max() -> u64 {
    static MAX: OnceLock<u64> = OnceLock::new();
    *MAX.get_or_init(|| {
        let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(RESERVED, |(soft, _)| soft);
        limit.saturating_sub(RESERVED).max(OPEN_MIN)
    })
}

fn open_sources() -> MutexGuard<'static, Open> {
    static OPEN: PerProcess<Mutex<Open>> = PerProcess::new();
    OPEN.get_or_init(Mutex::default).lock()
}

fn is(weak: &Weak<Source>, source: &Arc<Source>) -> bool {
    std::ptr::eq(weak.as_ptr(), Arc::as_ptr(source))
}

/// Notes that `source` was opened, and closes others where that makes too many: a second
/// descriptor first, then the one opened longest ago that can be opened again. It is when it
/// is read.
pub(super) fn opened(source: &Arc<Source>) {
    if source.counted.swap(true, Ordering::SeqCst) {
        return;
    }
    open_sources().sources.push_back(Arc::downgrade(source));
    make_room(source);
}

/// Likewise for a second descriptor, for O_DIRECT.
pub(super) fn opened_direct(source: &Arc<Source>) {
    {
        let mut open = open_sources();
        if open.direct.iter().any(|other| is(other, source)) {
            return;
        }
        open.direct.push_back(Arc::downgrade(source));
    }
    make_room(source);
}

/// Closes descriptors of others than `newest` until the limit is kept, or nothing may go.
fn make_room(newest: &Arc<Source>) {
    let others: Vec<Arc<Source>> = {
        let mut open = open_sources();
        if open.len() <= open_max() {
            return;
        }
        open.tidy();
        while open.len() > open_max()
            && let Some(at) = open.direct.iter().position(|other| !is(other, newest))
        {
            let evicted = open.direct.remove(at).and_then(|source| source.upgrade());
            if let Some(evicted) = evicted {
                evicted.close_direct();
            }
        }
        if open.len() <= open_max() {
            return;
        }
        open.sources.iter().filter(|other| !is(other, newest)).filter_map(Weak::upgrade).collect()
    };
    // Not under the lock: this may ask the file system, and that may never answer. Many at a time:
    // each look at what is open takes as long as there are open files.
    let many = (open_max() / EVICTED_SHARE).max(1) as usize;
    let chosen: HashMap<*const Source, &Arc<Source>> = others
        .iter()
        .filter(|source| source.may_close())
        .take(many)
        .map(|source| (Arc::as_ptr(source), source))
        .collect();
    let mut open = open_sources();
    let mut mine: Vec<&Arc<Source>> = Vec::with_capacity(chosen.len());
    // Whoever strikes one out closes it: threads that look at once close others.
    open.sources.retain(|source| {
        let struck = chosen.get(&source.as_ptr());
        mine.extend(struck);
        struck.is_none()
    });
    drop(open);
    for evicted in mine {
        evicted.counted.store(false, Ordering::SeqCst);
        evicted.close();
    }
}
