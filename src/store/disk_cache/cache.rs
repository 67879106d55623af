//! `DiskCache`: the use of one cache folder by this process. It owns the open objects and the threads that do
//! file work.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use super::claims::Claim;
use super::folder::{FolderUse, folder_use, is_mounted, make_room, mount_point_of};
use super::lookup::{Taken, add_run};
use super::object::{BLOCK_LEN, BlockReach, CachedObject, ObjectKey};
use super::pieces::{SparePieces, pieces_of};
use super::threads::{DiskPatience, FolderThreads, STUCK};
use crate::counters::Counter;
use crate::error::{real_name, shown_path};
use crate::hash::Digest;
use crate::open_options::DiskCachePlace;
use crate::process::PerProcess;
use crate::source::MemoryParts;
use crate::sync::Mutex;

/// Minimum and maximum number of objects that a process has open.
const OPEN_BOUNDS: (usize, usize) = (8, 256);

/// Maximum number of file descriptors of one open object. All open objects together use at most 1 /
/// `DESCRIPTORS_PART` of the descriptors that the process may have.
const DESCRIPTORS: usize = 4;
const DESCRIPTORS_PART: usize = 8;

/// Time after a failure in which nothing is stored.
const PAUSE: Duration = Duration::from_secs(30);

/// Maximum duration of a store of blocks. A reader waits for the store, so a store that takes longer counts as a
/// failure.
const STORE_SLOW: Duration = Duration::from_secs(2);

/// Minimum time between two checks of the folder. It is checked again if it is gone, because a user may remove it at any
/// time.
pub(super) const FOLDER_CHECKS: Duration = Duration::from_secs(1);

/// Maximum number of bytes that are stored between two checks of the size of the folder.
const UNCHECKED_MAX: u64 = 64 << 20;

/// The caches of this process.
pub(super) static CACHES: PerProcess<Mutex<HashMap<DiskCachePlace, Arc<DiskCache>>>> =
    PerProcess::new();

/// The counters of one cache in this process.
#[derive(Debug, Default)]
pub(super) struct CacheCounters {
    found_blocks: Counter,
    found_bytes: Counter,
    pub(super) missed_bytes: Counter,
    stored_bytes: Counter,
    damaged_blocks: Counter,
    pub(super) waits: Counter,
    removed_objects: Counter,
}

/// The state and the counters of a disk cache, for `status`. Each counter begins at 0 when the process starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskCacheStatus {
    /// Path of the folder.
    pub folder: String,
    /// Maximum number of bytes on the disk, if the user has set one.
    pub size: Option<u64>,
    /// Blocks that reads found in the cache.
    pub found_blocks: u64,
    /// Bytes of these blocks.
    pub found_bytes: u64,
    /// Bytes that were read from servers, because the cache did not have them.
    pub missed_bytes: u64,
    /// Bytes that were stored in the cache.
    pub stored_bytes: u64,
    /// Blocks whose bytes did not match their checksum.
    pub damaged_blocks: u64,
    /// Number of times that a read paused to wait for blocks that another reader was fetching.
    pub waits: u64,
    /// Objects that were removed to make room for others.
    pub removed_objects: u64,
    /// The reason why nothing is stored now.
    pub paused: Option<String>,
}

/// The status of each disk cache of this process.
pub fn statuses() -> Vec<DiskCacheStatus> {
    let caches: Vec<_> = CACHES.get_or_init(Mutex::default).lock().values().cloned().collect();
    caches.iter().map(|cache| cache.status()).collect()
}

/// The cache at `place`. The call touches no file, because other threads wait for the lock of `CACHES` meanwhile.
pub(super) fn cache_in(place: &DiskCachePlace) -> Arc<DiskCache> {
    let mut caches = CACHES.get_or_init(Mutex::default).lock();
    if let Some(cache) = caches.get(place) {
        return cache.clone();
    }
    let cache = Arc::new(DiskCache::new(place));
    caches.insert(place.clone(), cache.clone());
    cache
}

/// Maximum number of objects that this process has open at a time.
fn open_max() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
    open_max_of(usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Maximum number of open objects if the process may have `limit` file descriptors.
pub(super) fn open_max_of(limit: usize) -> usize {
    (limit / DESCRIPTORS_PART / DESCRIPTORS).clamp(OPEN_BOUNDS.0, OPEN_BOUNDS.1)
}

/// One cache folder, as this process uses it.
#[derive(Debug)]
pub(super) struct DiskCache {
    place: DiskCachePlace,
    /// Whether the folder can be used, and the time of the check. The first access computes this.
    pub(super) folder: Mutex<Option<(Instant, FolderUse)>>,
    /// The mount point of the folder's file system at the first check.
    mount_point: Mutex<Option<PathBuf>>,
    /// Open objects, with the time of their last use.
    pub(super) objects: Mutex<HashMap<Digest, (Instant, Arc<CachedObject>)>>,
    /// The end of the pause in which nothing is stored, and its reason.
    paused: Mutex<Option<(Instant, String)>>,
    /// Whether a failure was logged already.
    told: Mutex<bool>,
    /// Bytes that were stored since the last check of the size of the folder.
    unchecked: AtomicU64,
    /// Threads for the file work that readers wait for.
    pub(super) threads: Arc<FolderThreads>,
    spares: SparePieces,
    pub(super) counters: CacheCounters,
}

impl DiskCache {
    fn new(place: &DiskCachePlace) -> DiskCache {
        DiskCache {
            place: place.clone(),
            folder: Mutex::default(),
            mount_point: Mutex::default(),
            objects: Mutex::default(),
            paused: Mutex::default(),
            told: Mutex::default(),
            // This value makes the first store check the size of the folder.
            unchecked: AtomicU64::new(u64::MAX / 2),
            threads: Arc::default(),
            spares: SparePieces::default(),
            counters: CacheCounters::default(),
        }
    }

    /// Whether the folder can be used.
    pub(super) fn folder(&self) -> FolderUse {
        self.checked_folder().unwrap_or_else(|| self.check_folder())
    }

    /// Whether the folder can be used, if it was checked. Never waits.
    fn checked_folder(&self) -> Option<FolderUse> {
        self.folder.lock().as_ref().map(|(_, found)| found.clone())
    }

    /// Creates the folder if it does not exist, and checks whether it can be used. May wait for the file system.
    fn check_folder(&self) -> FolderUse {
        let found = folder_use(&self.place.folder);
        if let FolderUse::ReadOnly(why) | FolderUse::Unusable(why) = &found {
            self.tell(why);
        }
        *self.mount_point.lock() = mount_point_of(&self.place.folder);
        *self.folder.lock() = Some((Instant::now(), found.clone()));
        found
    }

    /// Creates the folder anew after it was removed. Returns whether objects can be added. Returns `false` without a
    /// check if the last check was less than `FOLDER_CHECKS` ago. If the check fails, nothing is stored for the time
    /// `PAUSE`.
    fn is_usable_again(&self) -> bool {
        let is_due = |(checked, _): &(Instant, FolderUse)| checked.elapsed() >= FOLDER_CHECKS;
        if !self.folder.lock().as_ref().is_none_or(is_due) {
            return false;
        }
        let was_on = self.mount_point.lock().clone();
        let found = match was_on.is_none_or(|point| is_mounted(&point)) {
            true => folder_use(&self.place.folder),
            false => FolderUse::Unusable("its file system is not mounted".to_owned()),
        };
        match &found {
            FolderUse::Usable => *self.folder.lock() = Some((Instant::now(), found)),
            FolderUse::ReadOnly(why) | FolderUse::Unusable(why) => {
                self.pause(why);
                return false;
            }
        }
        true
    }

    /// Logs a failure. The first failure is logged as a warning.
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

    pub(super) fn pause(&self, why: &str) {
        *self.paused.lock() = Some((Instant::now() + PAUSE, why.to_owned()));
        self.tell(why);
    }

    /// The reason why nothing is stored now, if there is one. One possible reason is a job of the folder that has taken
    /// longer than `patience`.
    fn why_paused(&self, patience: Duration) -> Option<String> {
        if self.threads.is_stuck(patience) {
            return Some("its disk does not answer".to_owned());
        }
        if let Some(FolderUse::ReadOnly(why) | FolderUse::Unusable(why)) = self.checked_folder() {
            return Some(why);
        }
        let mut paused = self.paused.lock();
        if paused.as_ref().is_some_and(|(until, _)| *until <= Instant::now()) {
            *paused = None;
        }
        paused.as_ref().map(|(_, why)| why.clone())
    }

    pub(super) fn may_store(&self, patience: Duration) -> bool {
        self.why_paused(patience).is_none()
    }

    /// The object with the key `key`, if it is open. Never waits.
    pub(super) fn opened(&self, key: &ObjectKey) -> Option<Arc<CachedObject>> {
        let mut objects = self.objects.lock();
        let (used, object) = objects.get_mut(&key.digest)?;
        *used = Instant::now();
        (object.key() == key).then(|| object.clone())
    }

    /// Opens or creates the object with the key `key`. `None` if it cannot be used, or if the file system of
    /// the folder does not answer in time.
    pub(super) fn object(
        self: &Arc<Self>,
        key: &ObjectKey,
        patience: DiskPatience,
    ) -> Option<Arc<CachedObject>> {
        let (cache, key) = (self.clone(), key.clone());
        self.threads.ask(patience, move || cache.open_object(&key, patience.whole))?
    }

    /// Opens or creates the object with the key `key`. May wait for the file system.
    fn open_object(&self, key: &ObjectKey, patience: Duration) -> Option<Arc<CachedObject>> {
        if matches!(self.folder(), FolderUse::Unusable(_)) {
            return None;
        }
        if let Some(object) = self.opened(key).filter(|object| object.is_linked()) {
            object.note_use();
            return Some(object);
        }
        let folder = &self.place.folder;
        let may_store = self.may_store(patience);
        let opened = if may_store {
            // If the folder is gone, it is created anew.
            CachedObject::open(folder, key).or_else(|e| match e.kind() {
                io::ErrorKind::NotFound if self.is_usable_again() => {
                    CachedObject::open(folder, key)
                }
                _ => Err(e),
            })
        } else {
            CachedObject::open_there(&key.map_in(folder), Some(key))
        };
        let object = match opened {
            Ok(object) => Arc::new(object),
            Err(e) => {
                if may_store && e.kind() != io::ErrorKind::NotFound {
                    self.pause(&e.to_string());
                }
                let before = self.objects.lock().remove(&key.digest);
                drop(before);
                return None;
            }
        };
        object.note_use();
        drop(self.keep_open(object.clone()));
        Some(object)
    }

    /// Adds `object` to the open objects. Returns objects that were taken out of the map to make room for `object`. The
    /// caller drops them, which closes their files and may wait for the file system.
    fn keep_open(&self, object: Arc<CachedObject>) -> Vec<(Instant, Arc<CachedObject>)> {
        let mut objects = self.objects.lock();
        let before = objects.insert(object.key().digest, (Instant::now(), object));
        let mut closed: Vec<_> = before.into_iter().collect();
        while objects.len() > open_max() {
            let oldest = objects.iter().min_by_key(|(_, (used, _))| *used);
            let Some(digest) = oldest.map(|(digest, _)| *digest) else { break };
            closed.extend(objects.remove(&digest));
        }
        closed
    }

    /// Claims blocks. `None` if the file system does not answer in time.
    pub(super) fn claim(
        &self,
        object: &Arc<CachedObject>,
        run: &Range<u64>,
        patience: DiskPatience,
    ) -> Option<Claim> {
        let (object, run) = (object.clone(), run.clone());
        self.threads.ask(patience, move || object.claim(&run))
    }

    fn count(&self, taken: &Taken) {
        self.counters.found_blocks.add(taken.found);
        self.counters.found_bytes.add(taken.found * BLOCK_LEN);
        self.counters.damaged_blocks.add(taken.damaged);
    }

    /// Copies the blocks `run` of the object `key` from the kernel's page cache to `buf`. Returns the runs that
    /// could not be copied, or `None` if all were copied. Never waits.
    pub(super) fn take_cached(
        &self,
        key: &ObjectKey,
        run: &Range<u64>,
        offset: u64,
        buf: &mut [u8],
    ) -> Option<Vec<Range<u64>>> {
        let Some(object) = self.opened(key) else { return Some(vec![run.clone()]) };
        let taken = object.take(run, offset, buf, BlockReach::Memory);
        self.count(&taken);
        let left = joined([taken.missing, taken.unread].concat());
        if !left.is_empty() {
            return Some(left);
        }
        // The queue of `post` has no bound, and each queued job keeps its object open. So nothing is added
        // while a job is stuck.
        if !self.threads.is_stuck(STUCK) && object.begins_note() {
            self.threads.post(move || object.write_use());
        }
        None
    }

    /// Copies those blocks of `runs` that are in the cache to `buf`, and returns the runs that are not. This thread
    /// tries the page cache first. The threads of the folder read the other blocks, because the disk may not answer.
    pub(super) fn take(
        self: &Arc<Self>,
        object: &Arc<CachedObject>,
        runs: &[Range<u64>],
        offset: u64,
        buf: &mut [u8],
        patience: DiskPatience,
    ) -> Vec<Range<u64>> {
        let (mut missing, mut unread) = (Vec::new(), Vec::new());
        for run in runs {
            let taken = object.take(run, offset, buf, BlockReach::Memory);
            self.count(&taken);
            missing.extend(taken.missing);
            unread.extend(taken.unread);
        }
        missing.extend(self.take_runs(object, unread, offset, buf, patience));
        joined(missing)
    }

    /// Like `take`, without the attempt to read from the page cache: the threads of the folder read all of `runs`.
    pub(super) fn take_runs(
        self: &Arc<Self>,
        object: &Arc<CachedObject>,
        runs: Vec<Range<u64>>,
        offset: u64,
        buf: &mut [u8],
        patience: DiskPatience,
    ) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        for piece in runs.iter().flat_map(pieces_of) {
            let bytes = object.bytes_of(&piece);
            let (start, len) = (bytes.start, bytes.end - bytes.start);
            let (cache, of_thread, run) = (self.clone(), object.clone(), piece.clone());
            let asked = self.threads.ask(patience, move || {
                let mut memory = cache.spares.take();
                let taken = of_thread.take(&run, start, memory.bytes(len), BlockReach::Disk);
                (taken, memory)
            });
            let Some((taken, mut memory)) = asked else {
                missing.push(piece);
                continue;
            };
            self.count(&taken);
            let wanted = bytes.start.max(offset)..bytes.end.min(offset + buf.len() as u64);
            let from = &memory.bytes(len)[(wanted.start - start) as usize..];
            let place = &mut buf[(wanted.start - offset) as usize..(wanted.end - offset) as usize];
            place.copy_from_slice(&from[..place.len()]);
            missing.extend(taken.missing);
            self.spares.give_back(memory);
        }
        joined(missing)
    }

    /// Stores the blocks of `runs`, if there is room or other objects can be removed to make room. The first byte of
    /// `parts` is byte `first` of the object.
    pub(super) fn store(
        self: &Arc<Self>,
        object: &Arc<CachedObject>,
        runs: &[Range<u64>],
        first: u64,
        parts: &MemoryParts<'_>,
        patience: DiskPatience,
    ) {
        let started = Instant::now();
        for piece in runs.iter().flat_map(pieces_of) {
            let bytes = object.bytes_of(&piece);
            let (mut memory, len) = (self.spares.take(), bytes.end - bytes.start);
            let mut place = memory.bytes(len);
            for part in parts.slices(bytes.start - first..bytes.end - first) {
                let (now, later) = place.split_at_mut(part.len());
                now.copy_from_slice(part);
                place = later;
            }
            let (cache, of_thread) = (self.clone(), object.clone());
            let asked = self.threads.ask(patience, move || {
                let is_stored = cache.store_piece(&of_thread, &piece, memory.bytes(len));
                cache.spares.give_back(memory);
                is_stored
            });
            if started.elapsed() > STORE_SLOW {
                self.pause("its disk is slower than the server");
                return;
            }
            if asked != Some(true) {
                return;
            }
        }
    }

    /// Stores the blocks `run` with the content `bytes`. Returns whether that succeeded.
    fn store_piece(&self, object: &CachedObject, run: &Range<u64>, bytes: &[u8]) -> bool {
        let len = bytes.len() as u64;
        let step = self.place.size.map_or(UNCHECKED_MAX, |size| (size / 8).min(UNCHECKED_MAX));
        let unchecked = self.unchecked.fetch_add(len, Ordering::Relaxed).saturating_add(len);
        if unchecked > step {
            self.unchecked.store(len, Ordering::Relaxed);
            if !self.make_room(object, step.max(len)) {
                self.unchecked.store(u64::MAX / 2, Ordering::Relaxed);
                self.pause("there is no room");
                return false;
            }
        }
        let mut stored = object.store(run, bytes);
        if stored.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::StorageFull)
            && self.make_room(object, step.max(len))
        {
            stored = object.store(run, bytes);
        }
        if let Err(e) = &stored {
            self.pause(&e.to_string());
            return false;
        }
        self.counters.stored_bytes.add(len);
        true
    }

    /// Removes the least recently used objects until there is room for `wanted` more bytes of `object`. Returns
    /// whether there is enough room.
    fn make_room(&self, object: &CachedObject, wanted: u64) -> bool {
        let removed = make_room(&self.place, object.key().digest, wanted);
        self.counters.removed_objects.add(removed.objects);
        removed.is_enough
    }

    pub(super) fn status(&self) -> DiskCacheStatus {
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
            paused: self.why_paused(STUCK),
        }
    }
}

/// The blocks of `runs` in ascending order, with adjacent runs joined.
pub(super) fn joined(mut runs: Vec<Range<u64>>) -> Vec<Range<u64>> {
    runs.sort_unstable_by_key(|run| run.start);
    runs.into_iter().fold(Vec::new(), |mut joined, run| {
        add_run(&mut joined, run);
        joined
    })
}
