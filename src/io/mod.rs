//! Moving bytes: reads of sources, each from a place in a file to a place in memory.
//!
//! `read_all` reads on the calling thread. An `Engine` reads on threads of its own, a lane of
//! them per device, and answers by callback; each of its reads has a deadline.

mod arena;
mod buffer;
mod cached;
mod lane;
mod pool;
mod queue;
mod region;
#[cfg(test)]
mod tests;
mod transfer;
mod uring;
mod watch;

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde_json::{Value, json};

pub use buffer::{Budget, Buffer, Filled, Lease};
pub use cached::{cached_pages, probe_cachestat};
pub(crate) use lane::guarded;

pub use region::{Memory, Region};
#[cfg(test)]
pub(crate) use uring::tests::refuse;

use crate::counters::Counters;
use crate::error::{Error, Result};
use crate::source::Source;
use crate::sync::Mutex;
use lane::Lane;
use watch::Watch;

/// How long a read may take by default.
const TIMEOUT: Duration = Duration::from_secs(60);

/// One read: `target.len()` bytes at `offset` of `source`.
pub struct Read<'a> {
    /// Where the bytes are.
    pub source: &'a Arc<Source>,
    /// Offset in the source.
    pub offset: u64,
    /// Where they go.
    pub target: &'a mut [u8],
}

/// Carries out all `reads` one after the other on the calling thread, and confirms afterwards
/// that no source changed meanwhile.
///
/// # Errors
/// The first failure; the targets then hold bytes that mean nothing.
pub fn read_all(reads: &mut [Read<'_>]) -> Result<()> {
    for read in reads.iter_mut() {
        read.source.read_exact_at(read.target, read.offset)?;
    }
    for source in distinct(reads) {
        source.check()?;
    }
    Ok(())
}

/// The sources of `reads`; reads of one source mostly follow each other.
fn distinct<'a>(reads: &'a [Read<'_>]) -> impl Iterator<Item = &'a Arc<Source>> {
    let mut last: Option<&Arc<Source>> = None;
    reads
        .iter()
        .map(|read| read.source)
        .filter(move |source| !last.replace(source).is_some_and(|last| Arc::ptr_eq(last, source)))
}

/// Who waits for a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// A reader, now.
    Demand,
    /// No one yet.
    Prefetch,
}

/// How long a callback takes, which decides the thread that it is called on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// It takes notes.
    Short,
    /// It takes notes, and gives the bytes to the readers who wait for them.
    AsAwaited,
    /// It copies the bytes, or computes with them.
    Long,
}

impl Effort {
    /// What it is once a reader waits.
    fn awaited(self) -> Effort {
        if self == Effort::AsAwaited { Effort::Long } else { self }
    }
}

/// How reads are handed to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// io_uring for local file systems where the kernel allows it, else threads.
    #[default]
    Auto,
    /// The same; that it is not to be had is said louder.
    Uring,
    /// Threads with `pread(2)`.
    Pread,
}

/// Whether reads go past the kernel's page cache (O_DIRECT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Those of a local file system that the cache does not hold.
    #[default]
    Auto,
    /// All, unless the file system refuses it.
    Always,
    /// None.
    Never,
}

impl Backend {
    /// Its name, as the mount option has it.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Uring => "uring",
            Backend::Pread => "pread",
        }
    }
}

impl Direct {
    /// Its name, as the mount option has it.
    pub fn name(self) -> &'static str {
        match self {
            Direct::Auto => "auto",
            Direct::Always => "always",
            Direct::Never => "never",
        }
    }
}

/// How an engine reads.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How reads are handed to the kernel.
    pub backend: Backend,
    /// Whether they go past the page cache.
    pub direct: Direct,
    /// How long a fetch may take from when a reader asked for it, or, where none had, from when
    /// it was sent to the source; none: for ever.
    pub timeout: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Settings {
        let (backend, direct) = (Backend::default(), Direct::default());
        Settings { backend, direct, timeout: Some(TIMEOUT) }
    }
}

/// What a fetch calls back.
pub type Done = Box<dyn FnOnce(Result<Filled>) + Send>;

/// Bytes to be read by an engine.
pub struct Fetch {
    /// Where they are.
    pub source: Arc<Source>,
    /// Which ones; not empty.
    pub range: Range<u64>,
    /// Who waits for them.
    pub priority: Priority,
    /// How long `done` takes.
    pub effort: Effort,
    /// The memory for it: at least `Buffer::len_for` the range. It is taken when the read is
    /// sent.
    pub lease: Lease,
    /// Called once, on a thread of the engine.
    pub done: Done,
}

/// Names a fetch under way.
#[derive(Clone)]
pub struct Ticket {
    lane: Weak<Lane>,
    id: u64,
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({})", self.id)
    }
}

/// What reads. Clones are handles of one engine, which ends with the last of them.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    settings: Settings,
    counters: Arc<Counters>,
    /// By device.
    lanes: Mutex<HashMap<u64, Arc<Lane>>>,
    watch: Arc<Watch>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.watch.close();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({:?})", self.0.settings)
    }
}

impl Engine {
    /// An engine. Its threads start when they are needed first, so the process may still fork.
    pub fn start(settings: Settings, counters: Arc<Counters>) -> Engine {
        let (lanes, watch) = (Mutex::default(), Arc::default());
        Engine(Arc::new(Inner { settings, counters, lanes, watch }))
    }

    /// Reads what the kernel's page cache holds, on the calling thread: never from the disk,
    /// never waiting. Returns whether that was everything; else the targets hold bytes that
    /// mean nothing.
    ///
    /// # Errors
    /// `Error::Changed` where a source is no longer what it was.
    pub fn read_cached(&self, reads: &mut [Read<'_>]) -> Result<bool> {
        if self.0.settings.direct == Direct::Always {
            return Ok(false);
        }
        let mut files = Vec::with_capacity(reads.len());
        for read in reads.iter() {
            read.source.check_known()?;
            let range = read.offset..read.offset + read.target.len() as u64;
            // Asked of all before the first is copied: RWF_NOWAIT by itself starts readahead.
            match open_if_cached(read.source, &range) {
                Some(file) => files.push(file),
                None => return Ok(false),
            }
        }
        for (read, file) in reads.iter_mut().zip(&files) {
            if !cached::copy_cached(file, read.offset, read.target) {
                return Ok(false);
            }
        }
        let mut last: Option<&Arc<Source>> = None;
        for (read, file) in reads.iter().zip(&files) {
            if !last.is_some_and(|last| Arc::ptr_eq(last, read.source)) {
                read.source.check_open(file)?;
                last = Some(read.source);
            }
        }
        Ok(true)
    }

    /// Has `copy` copy bytes of `range` out of the kernel's page cache, if that holds them all, by
    /// what it is given: that takes offset and target, and says whether the cache still held them.
    /// Returns whether it did and `copy` said so; else what was copied means nothing.
    ///
    /// # Errors
    /// `Error::Changed` where the source is no longer what it was.
    pub(crate) fn copy_cached(
        &self,
        source: &Arc<Source>,
        range: &Range<u64>,
        copy: impl FnOnce(&dyn Fn(u64, &mut [u8]) -> bool) -> bool,
    ) -> Result<bool> {
        if self.0.settings.direct == Direct::Always {
            return Ok(false);
        }
        source.check_known()?;
        let Some(file) = open_if_cached(source, range) else { return Ok(false) };
        if !copy(&|offset, target| cached::copy_cached(&file, offset, target)) {
            return Ok(false);
        }
        source.check_open(&file).map(|()| true)
    }

    /// Whether the kernel's page cache holds all of `range`, as far as it says. Never waits.
    pub fn is_cached(&self, source: &Arc<Source>, range: &Range<u64>) -> bool {
        self.0.settings.direct != Direct::Always && open_if_cached(source, range).is_some()
    }

    /// Takes a fetch in. Never waits for a source. `done` is called exactly once, on another
    /// thread, also when the engine ends before; on this one only if the process cannot start
    /// a single thread.
    pub fn submit(&self, fetch: Fetch) -> Ticket {
        if let Err(e) = self.0.watch.start() {
            tracing::error!("cannot start the thread that keeps deadlines: {e}");
            lane::answer(fetch.done, Err(Error::io(fetch.source.path(), "read", e)));
            return Ticket { lane: Weak::new(), id: 0 };
        }
        let lane = self.lane(&fetch.source);
        let id = lane.submit(fetch);
        if self.0.settings.timeout.is_some() {
            self.0.watch.submitted();
        }
        Ticket { lane: Arc::downgrade(&lane), id }
    }

    /// A reader waits for it from now on: a fetch that was not sent yet goes before those that
    /// no one waits for, and its deadline counts from now.
    pub fn promote(&self, ticket: &Ticket) {
        if let Some(lane) = ticket.lane.upgrade() {
            lane.promote(ticket.id);
        }
    }

    /// What is used to read, for people.
    pub fn describe(&self) -> Value {
        let lanes: Vec<Arc<Lane>> = self.0.lanes.lock().values().cloned().collect();
        json!({
            "timeout_s": self.0.settings.timeout.map(|timeout| timeout.as_secs_f64()),
            "lanes": lanes.iter().map(|lane| lane.describe()).collect::<Vec<_>>(),
        })
    }

    fn lane(&self, source: &Arc<Source>) -> Arc<Lane> {
        let mut lanes = self.0.lanes.lock();
        let inner = &self.0;
        let lane = lanes.entry(source.identity().dev).or_insert_with(|| {
            let lane = Lane::new(source, inner.settings, inner.counters.clone(), &inner.watch);
            let lane = Arc::new(lane);
            inner.watch.add(lane.clone());
            lane
        });
        lane.clone()
    }
}

/// Whether io_uring may be used here, found out by setting a ring up.
///
/// # Errors
/// Why not, as the kernel says it.
pub fn probe_uring() -> std::io::Result<()> {
    uring::Ring::new().map(drop)
}

/// The open file of a local source whose `range` the page cache holds.
fn open_if_cached(source: &Arc<Source>, range: &Range<u64>) -> Option<Arc<std::fs::File>> {
    let file = source.file_system().is_local().then(|| source.open_file())??;
    let (cached, pages) = cached::cached_pages(&file, range)?;
    (cached >= pages).then_some(file)
}
