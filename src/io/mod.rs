//! Reads of sources. A read moves bytes from a place in a file to a place in memory.
//!
//! `read_all` reads on the calling thread. An `Engine` has a queue for each device. It reads on threads of its
//! own, and passes the bytes to a callback. Each read has a deadline.

mod deadlines;
mod device_queue;
mod limiter;
mod memory;
mod queue;
#[cfg(test)]
mod tests;
mod transfer;
mod uring;

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

pub use deadlines::{Deadlines, NextLook};
pub(crate) use device_queue::guarded;
pub use limiter::{PerSourceLimiter, SourceKey};
#[cfg(feature = "cuda")]
pub(crate) use memory::FreeList;
pub use memory::{Budget, Buffer, LoadedBytes, ReadBuffer, ReadTarget, Region, Reservation};
#[cfg(test)]
pub(crate) use uring::tests::refuse;

use crate::coalesce::{REQUEST_GAP, coalesce};
use crate::counters::Counters;
use crate::error::{Error, Result};
pub use crate::source::page_cache::{CachedPages, cached_pages, probe_cachestat};
use crate::source::{Source, page_cache};
use crate::sync::Mutex;
use crate::version::QueueKey;
use device_queue::DeviceQueue;
pub use device_queue::QueueStatus;
pub(crate) use queue::SENT_MAX_OF_ONE;

/// Default time limit of a read.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum length in bytes of a request that joins several reads. The request takes the same amount of memory.
const REQUEST_MAX: u64 = 4 << 20;

/// One read: `target.len()` bytes at `offset` of `source`.
pub struct Read<'a> {
    /// The source of the bytes.
    pub source: &'a Arc<Source>,
    /// Offset in the source.
    pub offset: u64,
    /// The memory for the bytes.
    pub target: &'a mut [u8],
}

/// Executes all `reads` one after another on the calling thread and decrypts their bytes. After that, checks
/// that no source has changed.
///
/// # Errors
/// Returns the first failure. The contents of the targets are then unspecified.
pub fn read_all(reads: &mut [Read<'_>]) -> Result<()> {
    if reads.len() > 1 && reads.iter().any(|read| may_join_reads(read.source)) {
        reads.sort_unstable_by_key(|read| (Arc::as_ptr(read.source), read.offset));
        read_together(reads)?;
        return check_all(reads);
    }
    reads.iter_mut().try_for_each(read_one)?;
    check_all(reads)
}

/// Whether a read of `source` is a request to a server, and may be extended by bytes that nobody has requested.
fn may_join_reads(source: &Source) -> bool {
    source.local().is_none() && source.reads_may_block() && !source.is_encrypted()
}

/// Executes `reads`, which are sorted by source and offset. Reads whose bytes are cached on this machine are
/// copied from there. Other reads that are near each other on a server become one request.
fn read_together(reads: &mut [Read<'_>]) -> Result<()> {
    let is_kept = |read: &mut Read<'_>| {
        may_join_reads(read.source) && read.source.read_if_cached(read.target, read.offset)
    };
    let asked: Vec<&mut Read<'_>> =
        reads.iter_mut().filter_map(|read| (!is_kept(read)).then_some(read)).collect();
    let ranges: Vec<(&Arc<Source>, Range<u64>)> = asked
        .iter()
        .map(|read| (read.source, read.offset..read.offset + read.target.len() as u64))
        .collect();
    let may_join = |first: &(&Arc<Source>, Range<u64>), next: &(&Arc<Source>, Range<u64>)| {
        Arc::ptr_eq(first.0, next.0) && may_join_reads(first.0)
    };
    let groups: Vec<(Range<u64>, usize)> =
        coalesce(&ranges, |one| &one.1, may_join, REQUEST_GAP, REQUEST_MAX)
            .map(|(range, group)| (range, group.len()))
            .collect();
    let mut rest = asked.into_iter();
    let mut bytes = Vec::new();
    for (range, count) in groups {
        let mut group = rest.by_ref().take(count);
        let Some(first) = group.next() else { continue };
        if count == 1 {
            read_one(first)?;
            continue;
        }
        bytes.resize((range.end - range.start) as usize, 0);
        first.source.read_exact_at(&mut bytes, range.start)?;
        for Read { offset, target, .. } in std::iter::once(first).chain(group) {
            target.copy_from_slice(&bytes[(*offset - range.start) as usize..][..target.len()]);
        }
    }
    Ok(())
}

fn read_one(Read { source, offset, target }: &mut Read<'_>) -> Result<()> {
    let range = *offset..*offset + target.len() as u64;
    let cover = source.cover(&range);
    if cover == range {
        source.read_exact_at(target, *offset)?;
        return source.decrypt(*offset, target);
    }
    let mut pieces = Zeroizing::new(vec![0; (cover.end - cover.start) as usize]);
    source.read_exact_at(&mut pieces, cover.start)?;
    source.decrypt(cover.start, &mut pieces)?;
    let skipped = (range.start - cover.start) as usize;
    target.copy_from_slice(&pieces[skipped..][..target.len()]);
    Ok(())
}

/// Like `read_all`, but does not decrypt.
///
/// # Errors
/// The errors of `read_all`.
pub fn read_all_stored(reads: &mut [Read<'_>]) -> Result<()> {
    for read in reads.iter_mut() {
        read.source.read_exact_at(read.target, read.offset)?;
    }
    check_all(reads)
}

fn check_all(reads: &[Read<'_>]) -> Result<()> {
    distinct(reads).try_for_each(|source| source.check_after_read())
}

/// The sources of `reads`. A source appears once for consecutive reads of it.
fn distinct<'a>(reads: &'a [Read<'_>]) -> impl Iterator<Item = &'a Arc<Source>> {
    let mut last: Option<&Arc<Source>> = None;
    reads
        .iter()
        .map(|read| read.source)
        .filter(move |source| !last.replace(source).is_some_and(|last| Arc::ptr_eq(last, source)))
}

/// The urgency of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// A reader waits for the bytes.
    Demand,
    /// No reader waits for the bytes yet.
    Prefetch,
}

/// The cost of a callback. It decides which thread calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// The callback only updates bookkeeping.
    Short,
    /// The callback updates bookkeeping, and copies the bytes to the readers that wait for them.
    AsAwaited,
    /// The callback copies the bytes, or computes with them.
    Long,
}

impl Effort {
    /// The effort of the callback once a reader waits for the bytes.
    fn awaited(self) -> Effort {
        if self == Effort::AsAwaited { Effort::Long } else { self }
    }
}

words! {
    /// How reads are passed to the kernel.
    #[derive(Default, Hash)]
    pub enum Backend {
        /// io_uring for local file systems if the kernel allows it, otherwise threads.
        #[default]
        Auto = "auto",
        /// Like `Auto`, but warns if io_uring is unavailable.
        Uring = "uring",
        /// Threads with `pread(2)`.
        Pread = "pread",
    }
}

words! {
    /// Whether reads go past the kernel's page cache (O_DIRECT).
    #[derive(Default, Hash)]
    pub enum DirectIo {
        /// A read goes past the page cache if its file system is local and most of its bytes are not in the page cache.
        #[default]
        Auto = "auto",
        /// All reads go past the page cache, unless the file system refuses O_DIRECT.
        Always = "always",
        /// No reads go past the page cache.
        Never = "never",
    }
}

/// Settings of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How reads are passed to the kernel.
    pub backend: Backend,
    /// Whether reads go past the page cache.
    pub direct: DirectIo,
    /// Time limit of a fetch. It begins with the reader's request. For a prefetch, it begins when the read is
    /// sent to the source. `None` means no limit.
    pub timeout: Option<Duration>,
}

impl Settings {
    /// The settings with these values, and the defaults of any others.
    pub fn new(backend: Backend, direct: DirectIo, timeout: Option<Duration>) -> Settings {
        Settings { backend, direct, timeout }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings::new(Backend::default(), DirectIo::default(), Some(TIMEOUT))
    }
}

/// Number of bytes of memory that a fetch of `range` takes. The range is extended to whole encrypted pieces, if
/// there are any, and to whole pages.
pub fn memory_for(source: &Source, range: &Range<u64>) -> u64 {
    Buffer::len_for(&source.cover(range))
}

/// The callback of a fetch.
pub type FetchCallback = Box<dyn FnOnce(Result<ReadBuffer>) + Send>;

/// A request to an engine for bytes of a source.
pub struct Fetch {
    /// The source of the bytes.
    pub source: Arc<Source>,
    /// The range of the bytes. It must not be empty.
    pub range: Range<u64>,
    /// The part of the range that was in the page cache when the caller checked. It decides whether the read
    /// goes past the page cache. `None` if the caller did not check.
    pub cached: Option<CachedPages>,
    /// The urgency of the fetch.
    pub priority: Priority,
    /// Cost of `done`.
    pub effort: Effort,
    /// Whether encrypted bytes are returned without decryption.
    pub stored: bool,
    /// A reservation of at least `memory_for(source, range)` bytes, or existing memory. New memory is allocated
    /// when the read is sent.
    pub target: ReadTarget,
    /// Called once, on a thread of the engine.
    pub done: FetchCallback,
}

/// Handle of a submitted fetch.
#[derive(Clone)]
pub struct Ticket {
    queue: Weak<DeviceQueue>,
    id: u64,
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({})", self.id)
    }
}

/// The state of an engine, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineStatus {
    /// Time limit of a read, in seconds.
    pub timeout_s: Option<f64>,
    /// One entry for each disk, network mount and store that was read.
    pub device_queues: Vec<QueueStatus>,
}

/// Executes reads. Clones are handles of one engine, which ends when the last of them is dropped.
#[derive(Clone)]
pub struct Engine(Arc<EngineInner>);

struct EngineInner {
    settings: Settings,
    counters: Arc<Counters>,
    queues: Arc<Queues>,
    deadlines: Deadlines,
}

impl Drop for EngineInner {
    fn drop(&mut self) {
        // The thread that watches deadlines answers the remaining reads. If this thread was never started,
        // there are no reads.
        self.queues.closed.store(true, Ordering::SeqCst);
        self.deadlines.wake();
    }
}

/// The queues of an engine. The thread that watches deadlines shares them.
#[derive(Default)]
struct Queues {
    by_device: Mutex<HashMap<QueueKey, Arc<DeviceQueue>>>,
    /// Whether the engine was dropped.
    closed: AtomicBool,
}

impl Queues {
    fn all(&self) -> Vec<Arc<DeviceQueue>> {
        self.by_device.lock().values().cloned().collect()
    }

    /// Answers overdue reads with an error, or all reads if the engine was dropped.
    fn expire(&self) -> NextLook {
        if self.closed.load(Ordering::SeqCst) {
            self.by_device.lock().drain().for_each(|(_, queue)| queue.close());
            return NextLook::Never;
        }
        let now = Instant::now();
        let next = self.all().iter().filter_map(|queue| queue.expire(now)).min();
        next.map_or(NextLook::WhenCalled, NextLook::At)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({:?})", self.0.settings)
    }
}

impl Engine {
    /// Creates an engine. Its threads start with the first fetch, so the process may call fork(2) before that.
    pub fn start(settings: Settings, counters: Arc<Counters>) -> Engine {
        let (queues, deadlines) = (Arc::default(), Deadlines::default());
        Engine(Arc::new(EngineInner { settings, counters, queues, deadlines }))
    }

    /// Reads from the kernel's page cache on the calling thread, without disk reads and without waiting.
    /// Returns whether the page cache had all bytes. If not, the contents of the targets are unspecified.
    ///
    /// # Errors
    /// `Error::Changed` if a source has changed.
    pub fn read_cached(&self, reads: &mut [Read<'_>]) -> Result<bool> {
        // All ranges are checked before the first one is copied, because a read with RWF_NOWAIT can start the
        // kernel's readahead.
        for read in reads.iter() {
            read.source.check_known()?;
            let range = read.offset..read.offset + read.target.len() as u64;
            if !self.is_cached(read.source, &range) {
                return Ok(false);
            }
        }
        self.copy_reads(reads)
    }

    /// Executes reads like `read_cached`, for bytes that were just found in the page cache.
    ///
    /// # Errors
    /// `Error::Changed` if a source has changed.
    pub(crate) fn copy_reads(&self, reads: &mut [Read<'_>]) -> Result<bool> {
        // The page cache has the encrypted bytes only.
        if reads.iter().any(|read| read.source.is_encrypted()) {
            return Ok(false);
        }
        let mut files = Vec::with_capacity(reads.len());
        for Read { source, offset, target } in reads.iter_mut() {
            source.check_known()?;
            let Some(file) = open_file(source) else { return Ok(false) };
            if !page_cache::copy_cached(&file, *offset, target) {
                return Ok(false);
            }
            files.push(file);
        }
        let mut last: Option<&Arc<Source>> = None;
        for (read, file) in reads.iter().zip(&files) {
            if !last.is_some_and(|last| Arc::ptr_eq(last, read.source)) {
                read.source.local().map_or(Ok(()), |local| local.check_open(file))?;
                last = Some(read.source);
            }
        }
        Ok(true)
    }

    /// Calls `copy` if all bytes of `range` are in the kernel's page cache. The argument of `copy` is a function that
    /// copies bytes of `range` from an offset to a target, and returns whether the page cache still had them. The
    /// result is true if `copy` was called and returned true. If not, the copied bytes are unspecified.
    ///
    /// # Errors
    /// `Error::Changed` if the source has changed.
    pub(crate) fn copy_cached(
        &self,
        source: &Arc<Source>,
        range: &Range<u64>,
        copy: impl FnOnce(&dyn Fn(u64, &mut [u8]) -> bool) -> bool,
    ) -> Result<bool> {
        source.check_known()?;
        let file = if self.is_cached(source, range) { open_file(source) } else { None };
        let Some(file) = file else { return Ok(false) };
        if !copy(&|offset, target| page_cache::copy_cached(&file, offset, target)) {
            return Ok(false);
        }
        source.local().map_or(Ok(()), |local| local.check_open(&file)).map(|()| true)
    }

    /// Whether the kernel reports that all of `range` is in the page cache. Never waits.
    pub fn is_cached(&self, source: &Arc<Source>, range: &Range<u64>) -> bool {
        self.cached_pages(source, range).is_some_and(CachedPages::is_all)
    }

    /// The part of `range` that is in the kernel's page cache. `None` if the kernel does not report the part. Also
    /// `None` for reads that do not depend on it: reads with `DirectIo::Always`, reads of encrypted bytes, and reads
    /// that may block. Never waits.
    pub(crate) fn cached_pages(
        &self,
        source: &Arc<Source>,
        range: &Range<u64>,
    ) -> Option<CachedPages> {
        let is_always_direct = self.0.settings.direct == DirectIo::Always;
        if is_always_direct || source.is_encrypted() || source.reads_may_block() {
            return None;
        }
        page_cache::cached_pages(&*open_file(source)?, range)
    }

    /// Queues a fetch. Never waits for a source. `done` is called exactly once, even if the engine ends first.
    /// It is called on another thread, unless the process cannot start any thread.
    pub fn submit(&self, fetch: Fetch) -> Ticket {
        let queues = self.0.queues.clone();
        if let Err(e) = self.0.deadlines.start("tensorfs-watch", move || queues.expire()) {
            tracing::error!("cannot start the thread that keeps deadlines: {e}");
            device_queue::answer(fetch.done, Err(Error::io(fetch.source.uri(), "read", e)));
            return Ticket { queue: Weak::new(), id: 0 };
        }
        let queue = self.queue_of(&fetch.source);
        let id = queue.submit(fetch);
        if self.0.settings.timeout.is_some() {
            self.0.deadlines.added();
        }
        Ticket { queue: Arc::downgrade(&queue), id }
    }

    /// Notes that a reader waits for a fetch from now on. If the fetch is still queued as a prefetch, it is
    /// moved before the other prefetches, and its time limit begins now.
    pub fn promote(&self, ticket: &Ticket) {
        if let Some(queue) = ticket.queue.upgrade() {
            queue.promote(ticket.id);
        }
    }

    /// The state of the engine, for `status`.
    pub fn status(&self) -> EngineStatus {
        EngineStatus {
            timeout_s: self.0.settings.timeout.map(|timeout| timeout.as_secs_f64()),
            device_queues: self.0.queues.all().iter().map(|queue| queue.status()).collect(),
        }
    }

    fn queue_of(&self, source: &Arc<Source>) -> Arc<DeviceQueue> {
        let inner = &self.0;
        let mut queues = inner.queues.by_device.lock();
        let of_source = source.read_queue();
        let queue = queues.entry(of_source.key).or_insert_with(|| {
            let (counters, deadlines) = (inner.counters.clone(), inner.deadlines.clone());
            let store = if of_source.file_system.is_none() { source.store_name() } else { None };
            let (settings, driver) = (inner.settings, uring::drive);
            Arc::new(DeviceQueue::new(of_source, store, settings, counters, deadlines, driver))
        });
        queue.clone()
    }
}

/// The open file with the bytes of `source`. `None` if the file is not open, or if the source is no local file. Never
/// waits.
fn open_file(source: &Source) -> Option<Arc<std::fs::File>> {
    match source.local() {
        Some(local) => local.open_file(),
        None => source.open_bytes(),
    }
}

/// Checks whether io_uring can be used, by setting up a ring.
///
/// # Errors
/// The kernel's error if io_uring cannot be used.
pub fn probe_uring() -> std::io::Result<()> {
    uring::probe()
}
