//! A disk cache of remote sources: a store that wraps another store, and keeps the blocks that were read in a folder.
//!
//! The cache outlives the process, several processes share it, and each block is compared with its checksum when it is
//! read. The cache never makes a read fail: if it cannot supply the bytes, they are read from the wrapped store.

mod cache;
mod claims;
mod direct;
mod folder;
mod known;
mod lookup;
mod object;
mod pieces;
mod threads;
mod whole;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::coalesce::{REQUEST_GAP, coalesce};
use crate::index::folder_of_user;
use crate::open_options::DiskCachePlace;
use crate::source::{MemoryParts, ObjectRead, StoreKind, StoreListing};
use crate::version::Version;

use cache::{DiskCache, cache_in, joined};
pub use cache::{DiskCacheStatus, statuses};
use claims::{Claim, HeldClaim};
pub use folder::{
    KeptObject, KeptObjects, Pruned, UnusableMap, VerifiedObject, kept_bytes, kept_objects, prune,
    verify,
};
use object::{BLOCK_LEN, CachedObject, LEN_MAX, ObjectKey};
use threads::DiskPatience;

/// Environment variable that names the folder.
pub const CACHE_VARIABLE: &str = "TENSORFS_CACHE_DIR";

/// The value that turns the disk cache off.
pub const NOWHERE: &str = "none";

/// The folder of the disk cache of this user, if the user does not name another one.
pub fn default_folder() -> Option<PathBuf> {
    folder_of_user().map(|folder| folder.join("remote"))
}

/// The folder that the environment variable names, if the variable is set. The inner `None` means that the disk
/// cache is off.
pub fn folder_of_variable() -> Option<Option<PathBuf>> {
    let folder = std::env::var_os(CACHE_VARIABLE).filter(|value| !value.is_empty())?;
    if folder == NOWHERE {
        return Some(None);
    }
    // A daemon changes the working directory, so the path must be absolute.
    Some(std::path::absolute(folder).ok())
}

/// A read stores nothing in the cache if less than 1 / `STORE_PART` of the time up to its deadline is left.
const STORE_PART: u32 = 4;

/// If one read would need more than `REQUESTS_MAX` requests for its missing blocks, it also reads the bytes between
/// these blocks, in requests of at most `JOINED_MAX` bytes. So it needs fewer round trips.
const REQUESTS_MAX: usize = 2;
const JOINED_MAX: u64 = 16 << 20;

/// A claim counts as stuck only after a reader has waited for its blocks for this time. The process that holds the
/// claim may be stopped.
const STUCK_AFTER: Duration = Duration::from_millis(500);

/// Shortest and longest pause between two polls for blocks that another reader fetches.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// A store that keeps the bytes read from the store `inner` in a folder.
#[derive(Debug)]
pub(super) struct CachedStore {
    inner: Arc<dyn StoreKind>,
    place: DiskCachePlace,
}

impl CachedStore {
    pub(super) fn new(inner: Arc<dyn StoreKind>, place: &DiskCachePlace) -> CachedStore {
        CachedStore { inner, place: place.clone() }
    }

    /// The cache key of the file of `read`. `None` if the file cannot be cached.
    fn key(&self, read: &ObjectRead<'_>) -> Option<ObjectKey> {
        let ObjectRead { path, version, .. } = *read;
        if !self.inner.identifies_bytes(version) || !(1..=LEN_MAX).contains(&version.len) {
            return None;
        }
        Some(ObjectKey::new(path.to_str()?, version.content_words()))
    }

    /// Reads the wanted bytes of the blocks `runs`, which are not in the cache.
    fn fill(
        &self,
        read: &CachedRead<'_>,
        object: &Arc<CachedObject>,
        runs: &[Range<u64>],
        buf: &mut [u8],
    ) -> io::Result<()> {
        let CachedRead { cache, offset, patience, .. } = *read;
        let mut pause = POLL_INTERVALS.0;
        let mut busy_since: Option<Instant> = None;
        let mut todo = requests_of(runs);
        while let Some(NearRuns { span, runs }) = todo.pop() {
            let claim = if cache.may_store(patience.whole) && object.writable {
                cache.claim(object, &span, patience)
            } else {
                None
            };
            match claim {
                None => self.pass(read, &NearRuns { span, runs }, buf)?,
                Some(Claim::Mine(held)) => {
                    let _claim = ClaimOnDisk { cache, held };
                    // An earlier holder of the claim may have stored the blocks.
                    let missing = cache.take(object, &runs, offset, buf, patience);
                    self.fetch(read, object, &missing, buf)?;
                }
                Some(Claim::Busy(_)) if object.has_stuck_claims() => {
                    todo.push(NearRuns { span, runs });
                    break;
                }
                Some(Claim::Busy(busy)) if busy.start > span.start || busy.end < span.end => {
                    let parts = [busy.clone(), span.start..busy.start, busy.end..span.end];
                    todo.extend(parts.iter().flat_map(|part| requests_of(&inside(&runs, part))));
                }
                Some(Claim::Busy(_)) => {
                    cache.counters.waits.add(1);
                    busy_since.get_or_insert_with(Instant::now);
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(POLL_INTERVALS.1);
                    todo.extend(requests_of(&cache.take(object, &runs, offset, buf, patience)));
                    if patience.is_over() {
                        let waited = busy_since.is_some_and(|since| since.elapsed() >= STUCK_AFTER);
                        if !todo.is_empty() && waited {
                            object.note_stuck_claim();
                        }
                        break;
                    }
                }
            }
        }
        // This reader does not wait any longer for the reader that has claimed these blocks. Both may store the blocks,
        // since both have the same bytes.
        let rest = todo.into_iter().flat_map(|near| near.runs).collect();
        self.fetch(read, object, &joined(rest), buf)
    }

    /// Reads the wanted bytes of the blocks `near` from the wrapped store, and stores nothing in the cache.
    fn pass(&self, read: &CachedRead<'_>, near: &NearRuns, buf: &mut [u8]) -> io::Result<()> {
        let CachedRead { cache, offset, .. } = *read;
        let missed = near.runs.iter().map(|run| len_of(read.wanted_of(run))).sum();
        cache.counters.missed_bytes.add(missed);
        let wanted = read.wanted_of(&near.span);
        let place = &mut buf[(wanted.start - offset) as usize..(wanted.end - offset) as usize];
        self.inner.read(&read.object, wanted.start, place)
    }

    /// Reads the blocks `runs` from the wrapped store, and stores them in the cache.
    fn fetch(
        &self,
        read: &CachedRead<'_>,
        object: &Arc<CachedObject>,
        runs: &[Range<u64>],
        buf: &mut [u8],
    ) -> io::Result<()> {
        let CachedRead { cache, offset, .. } = *read;
        for NearRuns { span, runs } in requests_of(runs) {
            let (bytes, wanted) = (read.bytes_of(&span), read.wanted_of(&span));
            let mut before = vec![0; (wanted.start - bytes.start) as usize];
            let mut after = vec![0; (bytes.end - wanted.end) as usize];
            let place = &mut buf[(wanted.start - offset) as usize..(wanted.end - offset) as usize];
            let mut parts = MemoryParts::new(&mut before, place, &mut after);
            let missed = runs.iter().map(|run| len_of(read.bytes_of(run))).sum();
            cache.counters.missed_bytes.add(missed);
            self.inner.read_parts(&read.object, bytes.start, &mut parts)?;
            if read.has_time() {
                cache.store(
                    object,
                    &runs,
                    bytes.start,
                    &parts,
                    DiskPatience::of(read.object.until),
                );
            }
        }
        Ok(())
    }
}

/// Runs of blocks that one request reads, with the blocks between them.
struct NearRuns {
    /// From the first block of the first run to the last block of the last one.
    span: Range<u64>,
    runs: Vec<Range<u64>>,
}

/// The requests that read the blocks `runs`, which are in ascending order. They are sent one after another, so there
/// are few of them.
fn requests_of(runs: &[Range<u64>]) -> Vec<NearRuns> {
    let joined = |gap: u64, max: u64| -> Vec<NearRuns> {
        coalesce(runs, |run| run, |_, _| true, gap / BLOCK_LEN, max / BLOCK_LEN)
            .map(|(span, runs)| NearRuns { span, runs: runs.to_vec() })
            .collect()
    };
    let near = joined(REQUEST_GAP, u64::MAX);
    if near.len() > REQUESTS_MAX { joined(u64::MAX, JOINED_MAX) } else { near }
}

fn len_of(bytes: Range<u64>) -> u64 {
    bytes.end - bytes.start
}

/// The parts of `runs` that lie in `part`.
fn inside(runs: &[Range<u64>], part: &Range<u64>) -> Vec<Range<u64>> {
    let cut = runs.iter().map(|run| run.start.max(part.start)..run.end.min(part.end));
    cut.filter(|run| !run.is_empty()).collect()
}

/// One read through the cache.
struct CachedRead<'a> {
    cache: &'a Arc<DiskCache>,
    object: ObjectRead<'a>,
    offset: u64,
    end: u64,
    began: Instant,
    /// How long the read waits for the file system of the folder before it turns to the wrapped store.
    patience: DiskPatience,
}

impl CachedRead<'_> {
    /// The byte range of the blocks `run`.
    fn bytes_of(&self, run: &Range<u64>) -> Range<u64> {
        run.start * BLOCK_LEN..(run.end * BLOCK_LEN).min(self.object.version.len)
    }

    /// The bytes of the blocks `run` that the reader wants.
    fn wanted_of(&self, run: &Range<u64>) -> Range<u64> {
        let bytes = self.bytes_of(run);
        bytes.start.max(self.offset)..bytes.end.min(self.end)
    }

    /// Whether enough time is left to store the bytes that were read. The reader waits for the store.
    fn has_time(&self) -> bool {
        let Some(until) = self.object.until else { return true };
        let left = until.saturating_duration_since(Instant::now());
        !left.is_zero() && left >= until.saturating_duration_since(self.began) / STORE_PART
    }
}

/// A claim that is released by a thread of the cache, since the release may wait for the file system.
struct ClaimOnDisk<'a> {
    cache: &'a DiskCache,
    held: Option<HeldClaim>,
}

impl Drop for ClaimOnDisk<'_> {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.cache.threads.post(move || drop(held));
        }
    }
}

impl StoreKind for CachedStore {
    fn may_block(&self) -> bool {
        self.inner.may_block()
    }

    fn version(&self, path: &Path) -> io::Result<Version> {
        self.inner.version(path)
    }

    fn list(&self, path: &Path) -> io::Result<StoreListing> {
        self.inner.list(path)
    }

    fn name(&self) -> Option<String> {
        self.inner.name()
    }

    fn wanted_in_flight(&self) -> Option<u64> {
        self.inner.wanted_in_flight()
    }

    fn read(&self, object: &ObjectRead<'_>, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = object.end_of(offset, buf.len());
        let (Some(end), false, Some(key)) = (end, buf.is_empty(), self.key(object)) else {
            return self.inner.read(object, offset, buf);
        };
        let cache = &cache_in(&self.place);
        let (began, patience) = (Instant::now(), DiskPatience::of(object.until));
        let read = CachedRead { cache, object: *object, offset, end, began, patience };
        let blocks = offset / BLOCK_LEN..end.div_ceil(BLOCK_LEN);
        let Some(left) = cache.take_cached(&key, &blocks, offset, buf) else { return Ok(()) };
        let Some(object) = cache.object(&key, patience) else {
            return requests_of(&left).iter().try_for_each(|near| self.pass(&read, near, buf));
        };
        let missing = cache.take_runs(&object, left, offset, buf, patience);
        self.fill(&read, &object, &missing, buf)
    }

    fn read_if_cached(&self, read: &ObjectRead<'_>, offset: u64, buf: &mut [u8]) -> bool {
        let end = read.end_of(offset, buf.len());
        let (Some(end), Some(key)) = (end, self.key(read)) else { return false };
        let (cache, patience) = (cache_in(&self.place), DiskPatience::of(read.until));
        let object = cache.opened(&key).or_else(|| cache.object(&key, patience));
        let blocks = offset / BLOCK_LEN..end.div_ceil(BLOCK_LEN);
        object.is_some_and(|it| cache.take(&it, &[blocks], offset, buf, patience).is_empty())
    }

    fn local_copy(&self, read: &ObjectRead<'_>) -> Option<(PathBuf, File)> {
        let key = self.key(read)?;
        let cache = cache_in(&self.place);
        let object = cache.opened(&key)?;
        if !object.is_whole() {
            return None;
        }
        cache.threads.ask(DiskPatience::of(read.until), move || {
            let file = object.whole_file()?;
            object.note_use();
            Some((object.data_path.to_owned(), file))
        })?
    }

    fn sha256(&self, path: &Path, version: &Version) -> Option<String> {
        self.inner.sha256(path, version)
    }

    fn identifies_bytes(&self, version: &Version) -> bool {
        self.inner.identifies_bytes(version)
    }
}

#[cfg(test)]
mod tests;
