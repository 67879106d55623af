//! A store in memory, as a second kind of store. A test can make its answers slow or stall them, shorten or change its
//! objects, and delay changes in its listings.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use tensorfs::internal::source::{ObjectRead, StoreKind, StoreListing};
use tensorfs::internal::store::Store;
use tensorfs::internal::version::{QueueKey, Version};

/// The number of the last store.
static LAST: AtomicU64 = AtomicU64::new(0);

/// A store in memory. Its files are objects, which are only replaced as a whole. It has no folders apart from the paths
/// of objects.
#[derive(Debug)]
pub(crate) struct MemoryStore {
    root: PathBuf,
    number: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<PathBuf, Object>,
    /// Number of the last version.
    last: u64,
    /// Objects that listings do not show yet.
    late: BTreeSet<PathBuf>,
    /// Time that each answer takes.
    slow: Duration,
    /// Whether the store does not answer.
    stalled: bool,
    /// Number of calls of each kind: version, list, read.
    calls: [u64; 3],
}

#[derive(Clone, Debug)]
struct Object {
    bytes: Arc<[u8]>,
    version: u64,
    /// The length that the store reports. It may differ from the length of the bytes.
    len: u64,
}

impl MemoryStore {
    /// A new store, whose paths begin with those of `root`.
    pub(crate) fn add() -> Arc<MemoryStore> {
        let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let root = PathBuf::from(format!("/in-memory:{number}"));
        let (state, changed) = (Mutex::default(), Condvar::new());
        let store = Arc::new(MemoryStore { root, number, state, changed });
        Store::add(&store.root, store.clone());
        store
    }

    /// The path of the object `name`, or of a folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.root.clone() } else { self.root.join(name) }
    }

    fn change(&self) -> MutexGuard<'_, State> {
        self.changed.notify_all();
        self.state.lock().unwrap()
    }

    /// Stores new bytes under `name`.
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) {
        let mut state = self.change();
        state.last += 1;
        let (version, len) = (state.last, bytes.len() as u64);
        state.objects.insert(self.path(name), Object { bytes: bytes.into(), version, len });
    }

    /// Stores the files in `folder` and in its subfolders below `name`.
    pub(crate) fn put_folder(&self, name: &str, folder: &Path) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = self.path(name).join(entry.file_name());
            let name = name.strip_prefix(&self.root).unwrap().to_str().unwrap().to_owned();
            match entry.path() {
                path if path.is_dir() => self.put_folder(&name, &path),
                path => self.put(&name, &std::fs::read(path).unwrap()),
            }
        }
    }

    /// Removes `name`.
    pub(crate) fn remove(&self, name: &str) {
        self.change().objects.remove(&self.path(name));
    }

    /// Drops the bytes of `name` from byte `len` on. The reported length and version do not change.
    pub(crate) fn cut(&self, name: &str, len: usize) {
        let mut state = self.change();
        let object = state.objects.get_mut(&self.path(name)).unwrap();
        object.bytes = object.bytes[..len].into();
    }

    /// Sets whether listings lack `name`.
    pub(crate) fn set_late(&self, name: &str, late: bool) {
        let (mut state, path) = (self.change(), self.path(name));
        if late {
            state.late.insert(path)
        } else {
            state.late.remove(&path)
        };
    }

    /// Sets the time that each answer takes.
    pub(crate) fn set_slow(&self, slow: Duration) {
        self.change().slow = slow;
    }

    /// Sets whether the store does not answer.
    pub(crate) fn set_stalled(&self, stalled: bool) {
        let mut state = self.state.lock().unwrap();
        state.stalled = stalled;
        self.changed.notify_all();
    }

    /// Number of calls for a version, for a listing, and for bytes.
    pub(crate) fn calls(&self) -> [u64; 3] {
        self.state.lock().unwrap().calls
    }

    /// Waits until the store answers, and returns its state for the answer.
    fn answer(&self, kind: usize) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap();
        state.calls[kind] += 1;
        if !state.slow.is_zero() {
            let slow = state.slow;
            drop(state);
            std::thread::sleep(slow);
            state = self.state.lock().unwrap();
        }
        self.changed.wait_while(state, |state| state.stalled).unwrap()
    }

    fn version_of(&self, path: &Path, object: &Object) -> Version {
        let number = [number_of(path), object.version];
        let modified = Some((1_700_000_000 + object.version as i64, 0));
        Version::of_object(QueueKey::Store(self.number), number, false, object.len, modified)
    }

    fn folder_version(&self, path: &Path) -> Version {
        Version::of_object(QueueKey::Store(self.number), [number_of(path), 0], true, 0, None)
    }
}

fn number_of(path: &Path) -> u64 {
    let bytes = path.as_os_str().as_encoded_bytes().iter();
    bytes.fold(5381, |number, byte| number.wrapping_mul(33) ^ u64::from(*byte))
}

fn not_found() -> io::Error {
    ErrorKind::NotFound.into()
}

impl StoreKind for MemoryStore {
    fn version(&self, path: &Path) -> io::Result<Version> {
        let state = self.answer(0);
        if let Some(object) = state.objects.get(path) {
            return Ok(self.version_of(path, object));
        }
        let is_folder = path == self.root || state.objects.keys().any(|key| key.starts_with(path));
        if is_folder { Ok(self.folder_version(path)) } else { Err(not_found()) }
    }

    fn list(&self, path: &Path) -> io::Result<StoreListing> {
        let state = self.answer(1);
        let mut entries: BTreeMap<OsString, Version> = BTreeMap::new();
        for (key, object) in state.objects.iter().filter(|(key, _)| !state.late.contains(*key)) {
            let Ok(rest) = key.strip_prefix(path) else { continue };
            let mut rest = rest.components();
            let Some(name) = rest.next() else { continue };
            let here = path.join(name);
            let version = match rest.next() {
                None => self.version_of(key, object),
                Some(_) => self.folder_version(&here),
            };
            entries.insert(name.as_os_str().to_owned(), version);
        }
        if entries.is_empty() && path != self.root {
            return Err(not_found());
        }
        // The order of a listing differs from the order of names.
        let entries = entries.into_iter().rev().collect();
        Ok(StoreListing { version: self.folder_version(path), entries, partial: false })
    }

    fn read(&self, read: &ObjectRead<'_>, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let ObjectRead { path, version, .. } = *read;
        let state = self.answer(2);
        let object = state.objects.get(path).ok_or_else(not_found)?.clone();
        drop(state);
        if self.version_of(path, &object) != *version {
            return Err(ErrorKind::StaleNetworkFileHandle.into());
        }
        let start = usize::try_from(offset).map_err(|_| ErrorKind::UnexpectedEof)?;
        let found = object.bytes.get(start..).and_then(|rest| rest.get(..buf.len()));
        buf.copy_from_slice(found.ok_or(ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}
