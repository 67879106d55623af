//! A disk cache of remote sources: a store around another one that keeps the blocks that were read in a folder.
//!
//! It persists, several processes share it, and every block is compared with its checksum when it is
//! read. It never makes a read fail: where it cannot help, the store behind it is asked.

mod claims;
mod direct;
mod folder;
mod known;
mod lookup;
mod object;
mod whole;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use crate::counters::Counter;
use crate::error::{real_name, shown_path};
use crate::hash::Digest;
use crate::index::folder_of_user;
use crate::open_options::DiskCachePlace;
use crate::process::PerProcess;
use crate::source::{MemoryParts, StoreKind, StoreListing};
use crate::sync::Mutex;
use crate::version::Version;

use claims::Claim;
use folder::{FolderUse, folder_use, make_room};
pub use folder::{KeptObject, Pruned, VerifiedObject, kept_bytes, kept_objects, prune, verify};
use object::{BLOCK_LEN, CachedObject, LEN_MAX, ObjectKey};

/// Environment variable that names the folder.
pub const CACHE_VARIABLE: &str = "TENSORFS_CACHE_DIR";

/// The word for no folder.
pub const NOWHERE: &str = "none";

/// The folder of the disk cache of this user, unless another one is named.
pub fn default_folder() -> Option<PathBuf> {
    folder_of_user().map(|folder| folder.join("remote"))
}

/// The folder that the variable of the environment names, if it is set. The inner `None`: nowhere.
pub fn folder_of_variable() -> Option<Option<PathBuf>> {
    let folder = std::env::var_os(CACHE_VARIABLE).filter(|value| !value.is_empty())?;
    if folder == NOWHERE {
        return Some(None);
    }
    // A daemon changes the working directory, so the path must be absolute.
    Some(std::path::absolute(folder).ok())
}

/// Minimum and maximum number of objects that a process has open.
const OPEN_BOUNDS: (usize, usize) = (8, 256);

/// Maximum number of descriptors of an open object, and 1 / `DESCRIPTORS_PART` of the descriptors of the process for all objects.
const DESCRIPTORS: usize = 4;
const DESCRIPTORS_PART: usize = 8;

/// How long nothing is stored after a failure.
const PAUSE: Duration = Duration::from_secs(30);

/// A store of blocks that takes longer is a failure: the reader waits for it.
const STORE_SLOW: Duration = Duration::from_secs(2);

/// If work in the folder takes longer, its disk may have stopped to answer, and reads go on without it. A read waits
/// no longer than half of its time.
const STUCK: Duration = Duration::from_secs(10);

/// A read with less than 1 / `STORE_PART` of its time left stores nothing.
const STORE_PART: u32 = 4;

/// Longest wait for blocks that another reader fetches. Half of the time of the read at most.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Shortest and longest poll interval for blocks that another reader fetches.
const LOOK_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// Maximum number of bytes that are stored between two looks at the size of the folder.
const UNCHECKED_MAX: u64 = 64 << 20;

/// The caches of this process.
static CACHES: PerProcess<Mutex<HashMap<DiskCachePlace, Arc<DiskCache>>>> = PerProcess::new();

/// A store whose bytes are kept in a folder.
#[derive(Debug)]
pub(super) struct CachedStore {
    inner: Arc<dyn StoreKind>,
    place: DiskCachePlace,
}

impl CachedStore {
    pub(super) fn new(inner: Arc<dyn StoreKind>, place: &DiskCachePlace) -> CachedStore {
        CachedStore { inner, place: place.clone() }
    }

    /// The key of the file at `path`. `None` if it is not kept.
    fn key(&self, path: &Path, version: &Version) -> Option<ObjectKey> {
        if !self.inner.tells_bytes(version) || !(1..=LEN_MAX).contains(&version.len) {
            return None;
        }
        Some(ObjectKey::new(path.to_str()?, version.content_words()))
    }

    /// The object of the cache for the file at `path`.
    fn object(
        &self,
        path: &Path,
        version: &Version,
        patience: Duration,
    ) -> Option<(Arc<DiskCache>, Arc<CachedObject>)> {
        let key = self.key(path, version)?;
        let cache = cache_in(&self.place);
        let object = cache.object(&key, patience)?;
        Some((cache, object))
    }

    /// Reads what is wanted of the blocks `runs`, which the cache has not.
    fn fill(&self, read: &CachedRead<'_>, runs: Vec<Range<u64>>, buf: &mut [u8]) -> io::Result<()> {
        let CachedRead { cache, object, offset, until, patience, .. } = *read;
        let now = Instant::now();
        let left = until.map(|until| until.saturating_duration_since(now) / 2);
        let give_up = now + left.unwrap_or(WAIT_MAX).min(WAIT_MAX);
        let mut pause = LOOK_PAUSES.0;
        let mut todo = runs;
        while let Some(run) = todo.pop() {
            if !cache.may_store() || !object.writable {
                self.pass(read, &run, buf)?;
                continue;
            }
            match object.claim(&run) {
                Claim::Mine(_claim) => {
                    // The one who had a claim before may have stored them.
                    for part in cache.take(object, &run, offset, buf, patience) {
                        self.fetch(read, &part, buf)?;
                    }
                }
                Claim::Busy(busy) if busy.start > run.start || busy.end < run.end => {
                    let (before, after) = (run.start..busy.start, busy.end..run.end);
                    todo.push(busy);
                    todo.extend([before, after].into_iter().filter(|run| !run.is_empty()));
                }
                // Both store the same bytes.
                Claim::Busy(_) if Instant::now() >= give_up => self.fetch(read, &run, buf)?,
                Claim::Busy(_) => {
                    cache.counters.waits.add(1);
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(LOOK_PAUSES.1);
                    todo.extend(cache.take(object, &run, offset, buf, patience));
                }
            }
        }
        Ok(())
    }

    /// Reads what is wanted of the blocks `run` from the store, and keeps nothing.
    fn pass(&self, read: &CachedRead<'_>, run: &Range<u64>, buf: &mut [u8]) -> io::Result<()> {
        let CachedRead { cache, object, offset, .. } = *read;
        let bytes = object.bytes_of(run);
        let wanted = bytes.start.max(offset)..bytes.end.min(offset + buf.len() as u64);
        cache.counters.missed_bytes.add(wanted.end - wanted.start);
        let place = &mut buf[(wanted.start - offset) as usize..(wanted.end - offset) as usize];
        self.inner.read(read.path, read.version, wanted.start, place, read.until)
    }

    /// Reads the blocks `run` from the store, and keeps them.
    fn fetch(&self, read: &CachedRead<'_>, run: &Range<u64>, buf: &mut [u8]) -> io::Result<()> {
        let CachedRead { cache, object, offset, .. } = *read;
        let bytes = object.bytes_of(run);
        let end = offset + buf.len() as u64;
        let wanted = bytes.start.max(offset)..bytes.end.min(end);
        let mut before = vec![0; (wanted.start - bytes.start) as usize];
        let mut after = vec![0; (bytes.end - wanted.end) as usize];
        let place = &mut buf[(wanted.start - offset) as usize..(wanted.end - offset) as usize];
        let mut parts = MemoryParts::new(&mut before, place, &mut after);
        cache.counters.missed_bytes.add(parts.len() as u64);
        self.inner.read_parts(read.path, read.version, bytes.start, &mut parts, read.until)?;
        if read.has_time() {
            cache.store(object, run, &parts);
        }
        Ok(())
    }
}

/// One read through the cache.
struct CachedRead<'a> {
    cache: &'a DiskCache,
    object: &'a CachedObject,
    path: &'a Path,
    version: &'a Version,
    offset: u64,
    began: Instant,
    until: Option<Instant>,
    /// How old work in the folder may be.
    patience: Duration,
}

impl CachedRead<'_> {
    /// Whether there is time to store what has come: the reader waits for it.
    fn has_time(&self) -> bool {
        let Some(until) = self.until else { return true };
        let left = until.saturating_duration_since(Instant::now());
        !left.is_zero() && left >= until.saturating_duration_since(self.began) / STORE_PART
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

    fn read(
        &self,
        path: &Path,
        version: &Version,
        offset: u64,
        buf: &mut [u8],
        until: Option<Instant>,
    ) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= version.len);
        let (Some(end), false) = (end, buf.is_empty()) else {
            return self.inner.read(path, version, offset, buf, until);
        };
        let began = Instant::now();
        let half = until.map_or(STUCK, |until| until.saturating_duration_since(began) / 2);
        let patience = half.min(STUCK);
        let Some((cache, object)) = self.object(path, version, patience) else {
            return self.inner.read(path, version, offset, buf, until);
        };
        let (cache, object) = (&*cache, &*object);
        let read = CachedRead { cache, object, path, version, offset, began, until, patience };
        let blocks = offset / BLOCK_LEN..end.div_ceil(BLOCK_LEN);
        let missing = cache.take(object, &blocks, offset, buf, patience);
        self.fill(&read, missing, buf)
    }

    fn local_copy(&self, path: &Path, version: &Version) -> Option<(PathBuf, File)> {
        let key = self.key(path, version)?;
        let cache = cache_in(&self.place);
        let _work = cache.begin_work(STUCK)?;
        let object = cache.open_object(&key)?;
        let file = object.whole_file()?;
        object.note_use();
        Some((object.data_path().to_owned(), file))
    }

    fn sha256(&self, path: &Path, version: &Version) -> Option<String> {
        self.inner.sha256(path, version)
    }

    fn tells_bytes(&self, version: &Version) -> bool {
        self.inner.tells_bytes(version)
    }
}

/// The counters of one cache in this process.
#[derive(Debug, Default)]
struct CacheCounters {
    found_blocks: Counter,
    found_bytes: Counter,
    missed_bytes: Counter,
    stored_bytes: Counter,
    damaged_blocks: Counter,
    waits: Counter,
    removed_objects: Counter,
}

/// The facts about a disk cache, for `status`. Numbers are those of this process since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskCacheStatus {
    /// Its folder.
    pub folder: String,
    /// Bytes that it may take, if it was said.
    pub size: Option<u64>,
    /// Blocks that were in it.
    pub found_blocks: u64,
    /// Bytes of these blocks.
    pub found_bytes: u64,
    /// Bytes that were read from servers.
    pub missed_bytes: u64,
    /// Bytes that were stored.
    pub stored_bytes: u64,
    /// Blocks that had not their checksum.
    pub damaged_blocks: u64,
    /// Looks for blocks that another reader fetches.
    pub waits: u64,
    /// Objects that made room for others.
    pub removed_objects: u64,
    /// Why nothing is stored now.
    pub paused: Option<String>,
}

/// The facts about the caches of this process.
pub fn statuses() -> Vec<DiskCacheStatus> {
    let caches: Vec<_> = CACHES.get_or_init(Mutex::default).lock().values().cloned().collect();
    caches.iter().map(|cache| cache.status()).collect()
}

/// The cache at `place`. It touches no file, since other caches are looked up meanwhile.
fn cache_in(place: &DiskCachePlace) -> Arc<DiskCache> {
    let mut caches = CACHES.get_or_init(Mutex::default).lock();
    if let Some(cache) = caches.get(place) {
        return cache.clone();
    }
    let cache = Arc::new(DiskCache::new(place));
    caches.insert(place.clone(), cache.clone());
    cache
}

/// Maximum number of objects that this process has open.
fn open_max() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
    open_max_of(usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Maximum number of open objects where a process may have `limit` descriptors.
fn open_max_of(limit: usize) -> usize {
    (limit / DESCRIPTORS_PART / DESCRIPTORS).clamp(OPEN_BOUNDS.0, OPEN_BOUNDS.1)
}

/// Whether some of the work that began at these times takes longer than `patience`.
fn is_stuck(under_way: &BTreeMap<u64, Instant>, patience: Duration) -> bool {
    under_way.values().any(|began| began.elapsed() > patience)
}

/// A folder as a cache of this process.
#[derive(Debug)]
struct DiskCache {
    place: DiskCachePlace,
    /// Whether the folder can be used. The first use finds out.
    folder: OnceLock<FolderUse>,
    /// Open objects, with the time of their last use.
    objects: Mutex<HashMap<Digest, (Instant, Arc<CachedObject>)>>,
    /// Why nothing is stored, and until when.
    paused: Mutex<Option<(Instant, String)>>,
    /// Whether a failure was logged.
    told: Mutex<bool>,
    /// Bytes that were stored since the last look at the size.
    unchecked: AtomicU64,
    /// When work in the folder began that goes on now, by number.
    under_way: Mutex<BTreeMap<u64, Instant>>,
    counters: CacheCounters,
}

/// Work in the folder of a cache, from its begin to its end.
struct FolderWork<'a> {
    cache: &'a DiskCache,
    number: u64,
}

impl Drop for FolderWork<'_> {
    fn drop(&mut self) {
        self.cache.under_way.lock().remove(&self.number);
    }
}

impl DiskCache {
    fn new(place: &DiskCachePlace) -> DiskCache {
        DiskCache {
            place: place.clone(),
            folder: OnceLock::new(),
            objects: Mutex::default(),
            paused: Mutex::default(),
            told: Mutex::default(),
            // The first store looks at the size.
            unchecked: AtomicU64::new(u64::MAX / 2),
            under_way: Mutex::default(),
            counters: CacheCounters::default(),
        }
    }

    /// Whether the folder can be used.
    fn folder(&self) -> &FolderUse {
        self.folder.get_or_init(|| {
            let found = folder_use(&self.place.folder);
            if let FolderUse::ReadOnly(why) | FolderUse::Unusable(why) = &found {
                self.tell(why);
            }
            found
        })
    }

    /// Notes that work in the folder begins. `None` if earlier work there takes longer than `patience`.
    fn begin_work(&self, patience: Duration) -> Option<FolderWork<'_>> {
        let mut under_way = self.under_way.lock();
        if is_stuck(&under_way, patience) {
            return None;
        }
        let number = under_way.last_key_value().map_or(0, |(last, _)| last + 1);
        under_way.insert(number, Instant::now());
        Some(FolderWork { cache: self, number })
    }

    /// Logs a failure, the first one as a warning.
    fn tell(&self, why: &str) {
        let folder = shown_path(&self.place.folder);
        if std::mem::replace(&mut *self.told.lock(), true) {
            tracing::debug!("the disk cache in {folder} keeps nothing for now: {why}");
        } else {
            tracing::warn!(
                "the disk cache in {folder} keeps nothing for now: {why}; reads go on without it"
            );
        }
    }

    fn pause(&self, why: &str) {
        *self.paused.lock() = Some((Instant::now() + PAUSE, why.to_owned()));
        self.tell(why);
    }

    /// Why nothing is stored now.
    fn why_paused(&self) -> Option<String> {
        if is_stuck(&self.under_way.lock(), STUCK) {
            return Some("its disk does not answer".to_owned());
        }
        if let Some(FolderUse::ReadOnly(why) | FolderUse::Unusable(why)) = self.folder.get() {
            return Some(why.clone());
        }
        let mut paused = self.paused.lock();
        if paused.as_ref().is_some_and(|(until, _)| *until <= Instant::now()) {
            *paused = None;
        }
        paused.as_ref().map(|(_, why)| why.clone())
    }

    fn may_store(&self) -> bool {
        self.why_paused().is_none()
    }

    /// The object `key`, if it is open and still in the folder.
    fn open_object(&self, key: &ObjectKey) -> Option<Arc<CachedObject>> {
        let object = {
            let mut objects = self.objects.lock();
            let (used, object) = objects.get_mut(&key.digest)?;
            *used = Instant::now();
            object.clone()
        };
        (object.key() == key && object.is_linked()).then_some(object)
    }

    /// The object `key`, which is opened or made.
    fn object(&self, key: &ObjectKey, patience: Duration) -> Option<Arc<CachedObject>> {
        let _work = self.begin_work(patience)?;
        if matches!(self.folder(), FolderUse::Unusable(_)) {
            return None;
        }
        if let Some(object) = self.open_object(key) {
            object.note_use();
            return Some(object);
        }
        let folder = &self.place.folder;
        let opened = if self.may_store() {
            CachedObject::open(folder, key)
        } else {
            CachedObject::open_there(&key.map_in(folder), Some(key))
        };
        let object = match opened {
            Ok(object) => Arc::new(object),
            Err(e) => {
                if self.may_store() {
                    self.pause(&e.to_string());
                }
                self.objects.lock().remove(&key.digest);
                return None;
            }
        };
        object.note_use();
        let mut objects = self.objects.lock();
        objects.insert(key.digest, (Instant::now(), object.clone()));
        while objects.len() > open_max() {
            let oldest = objects.iter().min_by_key(|(_, (used, _))| *used);
            let Some(digest) = oldest.map(|(digest, _)| *digest) else { break };
            objects.remove(&digest);
        }
        Some(object)
    }

    /// Copies what is there of the blocks `run`; returns the runs that are not.
    fn take(
        &self,
        object: &CachedObject,
        run: &Range<u64>,
        offset: u64,
        buf: &mut [u8],
        patience: Duration,
    ) -> Vec<Range<u64>> {
        let Some(_work) = self.begin_work(patience) else { return vec![run.clone()] };
        let taken = object.take(run, offset, buf);
        self.counters.found_blocks.add(taken.found);
        self.counters.found_bytes.add(taken.found * BLOCK_LEN);
        self.counters.damaged_blocks.add(taken.damaged);
        taken.missing
    }

    /// Stores blocks if there is room, or can be made.
    fn store(&self, object: &CachedObject, run: &Range<u64>, parts: &MemoryParts<'_>) {
        let Some(_work) = self.begin_work(STUCK) else { return };
        let started = Instant::now();
        let len = parts.len() as u64;
        let step = self.place.size.map_or(UNCHECKED_MAX, |size| (size / 8).min(UNCHECKED_MAX));
        let unchecked = self.unchecked.fetch_add(len, Ordering::Relaxed).saturating_add(len);
        if unchecked > step {
            self.unchecked.store(len, Ordering::Relaxed);
            if !self.make_room(object, step.max(len)) {
                self.unchecked.store(u64::MAX / 2, Ordering::Relaxed);
                return self.pause("there is no room");
            }
        }
        let mut stored = object.store(run, parts);
        if stored.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::StorageFull)
            && self.make_room(object, step.max(len))
        {
            stored = object.store(run, parts);
        }
        match stored {
            Ok(()) => self.counters.stored_bytes.add(len),
            Err(e) => return self.pause(&e.to_string()),
        }
        if started.elapsed() > STORE_SLOW {
            self.pause("its disk is slower than the server");
        }
    }

    /// Removes objects that were not used for long, so that there is room for `wanted` bytes of `object`.
    /// Returns whether there is.
    fn make_room(&self, object: &CachedObject, wanted: u64) -> bool {
        let removed = make_room(&self.place, object.key().digest, wanted);
        self.counters.removed_objects.add(removed.objects);
        removed.is_enough
    }

    fn status(&self) -> DiskCacheStatus {
        let counters = &self.counters;
        DiskCacheStatus {
            folder: real_name(&self.place.folder),
            size: self.place.size,
            found_blocks: counters.found_blocks.get(),
            found_bytes: counters.found_bytes.get(),
            missed_bytes: counters.missed_bytes.get(),
            stored_bytes: counters.stored_bytes.get(),
            damaged_blocks: counters.damaged_blocks.get(),
            waits: counters.waits.get(),
            removed_objects: counters.removed_objects.get(),
            paused: self.why_paused(),
        }
    }
}

#[cfg(test)]
mod tests;
