//! Object stores and HTTP servers as stores. Their URLs are `s3://BUCKET/PREFIX`, `https://HOST/FOLDER`,
//! `hf://ORG/NAME` and the like.
//!
//! Only this folder knows HTTP. The calls of a store block the calling thread. Two threads of the process drive
//! the connections. They start with the first remote source.

mod access;
mod azure;
mod client;
mod credentials;
mod dav;
mod endpoint;
mod google;
mod hedging;
mod hub;
mod listing;
mod location;
mod multistatus;
mod netrc;
mod patience;
mod probe;
mod request;
mod s3;
mod shared;
mod state;
mod url;
mod web;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::invalid_input;
use crate::hash::Digest;
use crate::process::PerProcess;
use crate::source::{MemoryParts, ObjectRead, StoreKind, StoreListing, StoreProbe};
use crate::store::remote_settings::StoreSettings;
use crate::sync::Mutex;
use crate::version::{QueueKey, Version};

use access::Access;
use endpoint::Endpoint;
use hub::{PinnedCommit, tree};
use listing::StoreEntry;
use location::Location;
use request::Requests;
use shared::{RemoteProcess, shared_one};
use state::ObjectState;

/// A request ends before the deadline of its reader, by 1 / `REASON_PART` of the time, so that the reader still
/// gets the error message.
const REASON_PART: u32 = 20;

/// The longest time limit. It counts as no limit.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Time in which a folder that was found counts as existing.
const FOLDER_KNOWN: Duration = Duration::from_secs(2);

/// The stores by the roots of their URLs and by their settings.
type RemoteStores = HashMap<(String, StoreSettings), Arc<dyn StoreKind>>;

/// The stores of this process.
static STORES: PerProcess<Mutex<RemoteStores>> = PerProcess::new();

/// The store of the object or folder at `url`. If the URL is not usable, each call to the store returns that error.
pub(super) fn store_of(url: &Path, settings: StoreSettings) -> Arc<dyn StoreKind> {
    let location = match Location::of(url) {
        Ok(location) => location,
        Err(why) => return Arc::new(RefusedUrl(why)),
    };
    let mut stores = STORES.get_or_init(Mutex::default).lock();
    let root = location.root.clone();
    let key = (root, settings.clone());
    shared_one(&mut stores, key, || Arc::new(RemoteStore::new(location, settings)))
}

/// A bucket, an HTTP server, or a repository of the hub.
struct RemoteStore {
    location: Location,
    settings: StoreSettings,
    /// The server. A child made by fork(2) creates its own.
    own: PerProcess<Result<Arc<Endpoint>, (ErrorKind, String)>>,
    /// The last known state of each object, by the number of the object.
    known: PerProcess<Mutex<HashMap<u64, ObjectState>>>,
    /// The resolved commit of a repository.
    pinned: PinnedCommit,
    /// Whether the log has the warning about objects that are identified by their length alone.
    is_unversioned: AtomicBool,
    /// The lookups that threads wait for now, by the key of the object.
    looks: PerProcess<Mutex<HashMap<String, Arc<SharedLook>>>>,
    /// The time at which each folder was last found. Most folders have no state of their own.
    folders: PerProcess<Mutex<HashMap<String, Instant>>>,
}

impl fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteStore({})", self.location.root)
    }
}

impl RemoteStore {
    fn new(location: Location, settings: StoreSettings) -> RemoteStore {
        let (own, known) = (PerProcess::new(), PerProcess::new());
        let (looks, folders) = (PerProcess::new(), PerProcess::new());
        let (pinned, is_unversioned) = (Arc::default(), AtomicBool::new(false));
        RemoteStore { location, settings, own, known, pinned, is_unversioned, looks, folders }
    }

    fn endpoint(&self) -> io::Result<&Arc<Endpoint>> {
        let own = self.own.get_or_init(|| {
            self.new_endpoint().map(Arc::new).map_err(|e| (e.kind(), e.to_string()))
        });
        own.as_ref().map_err(|(kind, why)| io::Error::new(*kind, why.clone()))
    }

    fn new_endpoint(&self) -> io::Result<Endpoint> {
        let clients = RemoteProcess::get()?.clients_of(&self.settings)?;
        let Location { root, authority } = &self.location;
        let (base, access) = Access::of(root, authority, &clients, &self.pinned)?;
        Endpoint::new(base, access, clients)
    }

    /// Runs `work` on this thread until `deadline`.
    fn run<T>(
        &self,
        deadline: Instant,
        work: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        RemoteProcess::get()?.runtime.block_on(async {
            let late = |_| io::Error::new(ErrorKind::TimedOut, "no answer in time");
            // `work` itself ends at the deadline, with an error that gives the reason. So this timeout comes a little
            // later.
            let rest = deadline.saturating_duration_since(Instant::now());
            tokio::time::timeout(rest + rest / (2 * REASON_PART), work).await.map_err(late)?
        })
    }

    /// The time at which the work for a reader with the deadline `until` ends.
    fn deadline(&self, until: Option<Instant>) -> Instant {
        let now = Instant::now();
        let until = until.unwrap_or_else(|| now + self.settings.limit().min(FOREVER));
        until - until.saturating_duration_since(now) / REASON_PART
    }

    fn key(&self, path: &Path) -> io::Result<String> {
        self.location.key(path).ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn queue(&self) -> io::Result<QueueKey> {
        Ok(QueueKey::Store(Digest::of(self.endpoint()?.host.as_bytes()).number()))
    }

    /// The number of the object `key`. It is a hash of the server's address and the URL, so objects of the same
    /// name on other servers have other numbers.
    fn number(&self, key: &str) -> io::Result<u64> {
        let path = self.location.path(key);
        let url = path.as_os_str().as_encoded_bytes();
        Ok(Digest::of(&[self.endpoint()?.address.as_bytes(), url].join(&b' ')).number())
    }

    fn folder_version(&self, key: &str) -> io::Result<Version> {
        Ok(Version::of_object(self.queue()?, [self.number(key)?, 0], true, 0, None))
    }

    /// The version of the object `key`. Its state is kept in `known`.
    fn object_version(&self, key: &str, state: ObjectState) -> io::Result<Version> {
        let number = self.number(key)?;
        if !state.has_mark() && !self.is_unversioned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{}/{key}: the server gives neither an ETag nor a time of the last change: if a file is replaced \
                 by one of the same length while it is read, nothing shows it",
                self.location.root
            );
        }
        let version = state.version(self.queue()?, number);
        self.known.get_or_init(Mutex::default).lock().insert(number, state);
        Ok(version)
    }

    /// The state of the object `key`. `None` if it is a folder.
    async fn look(&self, key: &str, deadline: Instant) -> io::Result<Option<ObjectState>> {
        let endpoint = self.endpoint()?;
        if let Some(hub) = endpoint.access.hub() {
            return tree::look(hub, &**endpoint, key, deadline).await;
        }
        let target = endpoint.access.target(key);
        let name = key.rsplit('/').next().unwrap_or_default();
        let file_first = web::is_file_name(name);
        if file_first {
            match endpoint.look(&target, deadline).await {
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                found => return found.map(Some),
            }
        }
        if self.is_folder(key, deadline).await? {
            return Ok(None);
        }
        if file_first {
            return Err(ErrorKind::NotFound.into());
        }
        endpoint.look(&target, deadline).await.map(Some)
    }

    /// The result of `look`, shared with other threads that ask for the same object.
    fn look_together(&self, key: &str) -> io::Result<Option<ObjectState>> {
        let deadline = self.deadline(None);
        let looks = self.looks.get_or_init(Mutex::default);
        let shared = looks.lock().entry(key.to_owned()).or_default().clone();
        let seen = self.run(deadline, shared.get(|| self.look(key, deadline)));
        let mut all = looks.lock();
        // Only the map and this thread refer to the lookup.
        if Arc::strong_count(&shared) == 2 {
            all.remove(key);
        }
        // This reference is dropped before the lock, because the next thread must not count it.
        drop((shared, all));
        seen
    }

    async fn is_folder(&self, key: &str, deadline: Instant) -> io::Result<bool> {
        if self.was_folder(key) {
            return Ok(true);
        }
        let endpoint = self.endpoint()?;
        Ok(self.note_folder(key, endpoint.access.is_folder(endpoint, key, deadline).await?))
    }

    /// Whether `key` was found to be a folder within the last two seconds. The start of a program checks the
    /// same folder several times.
    fn was_folder(&self, key: &str) -> bool {
        let folders = self.folders.get_or_init(Mutex::default).lock();
        folders.get(key).is_some_and(|seen| seen.elapsed() < FOLDER_KNOWN)
    }

    fn note_folder(&self, key: &str, is_there: bool) -> bool {
        let mut folders = self.folders.get_or_init(Mutex::default).lock();
        if is_there {
            folders.insert(key.to_owned(), Instant::now());
        } else {
            folders.remove(key);
        }
        is_there
    }
}

/// The last lookup of an object. Readers that ask while a lookup is in flight share the next lookup, because the one in
/// flight may return an earlier state.
#[derive(Default)]
struct SharedLook(tokio::sync::Mutex<Option<(Instant, Looked)>>);

/// The state of an object, or `None` for a folder. An error is the kind and the message.
type Looked = Result<Option<ObjectState>, (ErrorKind, String)>;

impl SharedLook {
    /// The result of a lookup that begins now or later.
    async fn get<F: Future<Output = io::Result<Option<ObjectState>>>>(
        &self,
        look: impl FnOnce() -> F,
    ) -> io::Result<Option<ObjectState>> {
        let asked = Instant::now();
        let mut last = self.0.lock().await;
        let seen = match &*last {
            Some((began, seen)) if *began > asked => seen.clone(),
            _ => {
                let began = Instant::now();
                let seen = look().await.map_err(|e| (e.kind(), e.to_string()));
                *last = Some((began, seen.clone()));
                seen
            }
        };
        seen.map_err(|(kind, why)| io::Error::new(kind, why))
    }
}

/// Names with their versions.
type VersionedNames = Vec<(OsString, Version)>;

impl StoreKind for RemoteStore {
    fn name(&self) -> Option<String> {
        let scheme = self.location.root.split(':').next().unwrap_or_default();
        Some(format!("{scheme} at {}", self.endpoint().ok()?.host))
    }

    fn wanted_in_flight(&self) -> Option<u64> {
        self.endpoint().ok()?.wanted_in_flight()
    }

    fn version(&self, path: &Path) -> io::Result<Version> {
        let key = self.key(path)?;
        if key.is_empty() {
            return self.folder_version(&key);
        }
        match self.look_together(&key)? {
            None => self.folder_version(&key),
            Some(state) => {
                if let Access::Web(web) = &self.endpoint()?.access {
                    web.note_found(&key);
                }
                self.object_version(&key, state)
            }
        }
    }

    fn list(&self, path: &Path) -> io::Result<StoreListing> {
        let (key, deadline) = (self.key(path)?, self.deadline(None));
        let endpoint = self.endpoint()?;
        let below =
            |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}/{name}") };
        let found = self.run(deadline, endpoint.access.list(endpoint, &key, None, deadline))?;
        let version = |(name, entry): (String, StoreEntry)| {
            let version = match entry {
                StoreEntry::Folder => self.folder_version(&below(&name))?,
                StoreEntry::Object(state) => self.object_version(&below(&name), state)?,
            };
            Ok((name.into(), version))
        };
        let entries = found.into_iter().map(version).collect::<io::Result<VersionedNames>>()?;
        // In an object store, a folder exists only through its objects. A WebDAV folder may be empty.
        let is_there = !entries.is_empty() || matches!(endpoint.access, Access::Web(_));
        self.note_folder(&key, is_there);
        if !is_there && !key.is_empty() {
            return Err(ErrorKind::NotFound.into());
        }
        Ok(StoreListing { version: self.folder_version(&key)?, entries, partial: false })
    }

    fn sha256(&self, path: &Path, version: &Version) -> Option<String> {
        let (state, sha256) =
            tree::sha256_of(self.endpoint().ok()?.access.hub()?, &self.key(path).ok()?)?;
        state.is_of(version).then_some(sha256)
    }

    fn read(&self, read: &ObjectRead<'_>, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_parts(read, offset, &mut MemoryParts::one(buf))
    }

    fn credentials(&self) -> Option<String> {
        let (endpoint, process) = (self.endpoint().ok()?, RemoteProcess::get().ok()?);
        Some(process.runtime.block_on(endpoint.access.credentials(&endpoint.clients)))
    }

    fn probe(&self, path: &Path, version: &Version) -> io::Result<StoreProbe> {
        let (key, deadline) = (self.key(path)?, self.deadline(None));
        let known = self.known.get_or_init(Mutex::default).lock().get(&self.number(&key)?).cloned();
        let state = known.filter(|state| state.is_of(version)).ok_or(ErrorKind::NotFound)?;
        let endpoint = self.endpoint()?;
        let target = endpoint.access.target(&key);
        self.run(deadline, probe::probe(endpoint, &target, version, &state, deadline))
    }

    fn identifies_bytes(&self, version: &Version) -> bool {
        // Without a strong ETag, the bytes may change while the length stays the same.
        version.file_words()[1] & 1 == 1
    }

    fn read_parts(
        &self,
        read: &ObjectRead<'_>,
        offset: u64,
        parts: &mut MemoryParts<'_>,
    ) -> io::Result<()> {
        let ObjectRead { path, version, until } = *read;
        read.end_of(offset, parts.len()).ok_or(ErrorKind::UnexpectedEof)?;
        let (key, deadline) = (self.key(path)?, self.deadline(until));
        let endpoint = self.endpoint()?;
        let (target, number) = (endpoint.access.target(&key), self.number(&key)?);
        let known = self.known.get_or_init(Mutex::default);
        let before = known.lock().get(&number).filter(|state| state.is_of(version)).cloned();
        let seen = self.run(deadline, async {
            if let Some(hub) = endpoint.access.hub()
                && tree::read_cached(hub, &**endpoint, &key, version, offset, parts, deadline)
                    .await?
            {
                return Ok(None);
            }
            endpoint.read(&target, version, before.as_ref(), offset, parts, deadline).await
        })?;
        if let Some(seen) = seen.filter(|_| before.is_none()) {
            known.lock().insert(number, seen);
        }
        Ok(())
    }
}

/// The store of a URL that is not usable.
#[derive(Debug)]
struct RefusedUrl(String);

impl RefusedUrl {
    fn refuse<T>(&self) -> io::Result<T> {
        Err(invalid_input(self.0.clone()))
    }
}

impl StoreKind for RefusedUrl {
    fn may_block(&self) -> bool {
        false
    }

    fn version(&self, _: &Path) -> io::Result<Version> {
        self.refuse()
    }

    fn list(&self, _: &Path) -> io::Result<StoreListing> {
        self.refuse()
    }

    fn read(&self, _: &ObjectRead<'_>, _: u64, _: &mut [u8]) -> io::Result<()> {
        self.refuse()
    }
}
