//! Object stores and HTTP servers as stores. Their URLs are `s3://BUCKET/PREFIX`, `https://HOST/FOLDER`,
//! `hf://ORG/NAME` and the like.
//!
//! Only this folder knows HTTP. The calls of a store block the calling thread. Two threads of the process drive
//! the connections. They start with the first remote source.

mod access;
mod azure;
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
mod web;

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::fmt;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use reqwest::header::AUTHORIZATION;

use crate::process::PerProcess;
use crate::source::{MemoryParts, StoreKind, StoreListing, StoreProbe};
use crate::store::hub_cache;
use crate::store::remote_settings::StoreSettings;
use crate::sync::Mutex;
use crate::version::{QueueKey, Version};

use access::Access;
use endpoint::Endpoint;
use hub::{HubAccess, HubRepository, tree};
use listing::StoreEntry;
use location::{Location, Protocol, escaped_key, is_confidential};
use shared::{RemoteClients, RemoteProcess, shared_one};
use state::{ObjectState, hash_of};

/// Time limit of a call for which the caller sets no deadline.
const LIMIT: Duration = Duration::from_secs(60);

/// A request ends before the deadline of its reader, by 1 / `REASON_PART` of the time, so that the reader still
/// gets the error message.
const REASON_PART: u32 = 20;

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
    /// The names of existing files that were requested, by the keys of their folders. They are listed for HTTP
    /// servers that cannot list folders.
    asked: PerProcess<Mutex<HashMap<String, BTreeSet<String>>>>,
    /// The resolved commit of a repository. A child made by fork(2) keeps it.
    pinned: Arc<Mutex<Option<String>>>,
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
        let (own, known, asked) = (PerProcess::new(), PerProcess::new(), PerProcess::new());
        let folders = PerProcess::new();
        let pinned = Arc::default();
        RemoteStore { location, settings, own, known, asked, pinned, folders }
    }

    fn endpoint(&self) -> io::Result<&Arc<Endpoint>> {
        let own = self.own.get_or_init(|| {
            self.new_endpoint().map(Arc::new).map_err(|e| (e.kind(), e.to_string()))
        });
        own.as_ref().map_err(|(kind, why)| io::Error::new(*kind, why.clone()))
    }

    fn new_endpoint(&self) -> io::Result<Endpoint> {
        let clients = RemoteProcess::get()?.clients_of(&self.settings)?;
        let variable = |name: &str| self.settings.variable(name);
        let authority = self.location.authority.as_str();
        let (base, access) = match self.location.protocol {
            Protocol::S3 => s3::access_of(authority, &variable)?,
            Protocol::Google => google::access_of(authority, &variable)?,
            Protocol::Azure => azure::access_of(authority, &variable)?,
            Protocol::Http => (self.location.root.clone(), self.web_access(&clients, &variable)?),
            Protocol::Hub => self.hub_access(&variable)?,
        };
        Endpoint::new(base, access, clients)
    }

    fn web_access(
        &self,
        clients: &RemoteClients,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> io::Result<Access> {
        let authority = self.location.authority.as_str();
        // A login is for a host name without a port.
        let host = match authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
            _ => authority,
        };
        let is_secure = is_confidential(&self.location.root);
        let found = netrc::login_for(host.trim_matches(['[', ']']), is_secure, variable)?;
        let Some(login) = found else { return Ok(Access::Open) };
        let unusable =
            |_| io::Error::new(ErrorKind::InvalidInput, "the login of .netrc is not usable");
        let builder = clients.following.get(&self.location.root);
        let signed = builder.basic_auth(login.user, Some(login.password)).build();
        let header = signed.map_err(unusable)?.headers().get(AUTHORIZATION).cloned();
        Ok(header.map_or(Access::Open, Access::Login))
    }

    fn hub_access(
        &self,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> io::Result<(String, Access)> {
        let invalid = |why| io::Error::new(ErrorKind::InvalidInput, why);
        let (repository, _) = HubRepository::parse(&self.location.authority).map_err(invalid)?;
        let cache = hub_cache::cache_of(&|name| hub_cache::variable(name).map(PathBuf::from));
        let (access, base) = HubAccess::new(repository, variable, cache, self.pinned.clone())?;
        Ok((base, Access::Hub(Box::new(access))))
    }

    /// Runs `work` on this thread until `deadline`.
    fn run<T>(
        &self,
        deadline: Instant,
        work: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        RemoteProcess::get()?.runtime.block_on(async {
            let late = |_| io::Error::new(ErrorKind::TimedOut, "no answer in time");
            tokio::time::timeout_at(deadline.into(), work).await.map_err(late)?
        })
    }

    fn key(&self, path: &Path) -> io::Result<String> {
        self.location.key(path).ok_or_else(|| ErrorKind::NotFound.into())
    }

    /// The path of the object `key` in a URL, escaped.
    fn target(&self, key: &str) -> String {
        match self.location.protocol {
            // The keys of HTTP servers are escaped already.
            Protocol::Http => web::target(key, ""),
            _ => format!("/{}", escaped_key(key)),
        }
    }

    fn queue(&self) -> io::Result<QueueKey> {
        Ok(QueueKey::Store(hash_of(self.endpoint()?.host.as_bytes())))
    }

    /// The number of the object `key`. It is a hash of the server's address and the URL, so objects of the same
    /// name on other servers have other numbers.
    fn number(&self, key: &str) -> io::Result<u64> {
        let path = self.location.path(key);
        let url = path.as_os_str().as_encoded_bytes();
        Ok(hash_of(&[self.endpoint()?.address.as_bytes(), url].join(&b' ')))
    }

    fn folder_version(&self, key: &str) -> io::Result<Version> {
        Ok(Version::of_object(self.queue()?, [self.number(key)?, 0], true, 0, None))
    }

    /// The version of the object `key`. Its state is kept in `known`.
    fn object_version(&self, key: &str, state: ObjectState) -> io::Result<Version> {
        let number = self.number(key)?;
        let version = state.version(self.queue()?, number);
        self.known.get_or_init(Mutex::default).lock().insert(number, state);
        Ok(version)
    }

    /// The state of the object `key`. `None` if it is a folder.
    async fn look(&self, key: &str, deadline: Instant) -> io::Result<Option<ObjectState>> {
        let endpoint = self.endpoint()?;
        if self.location.protocol == Protocol::Hub {
            return tree::look(endpoint, key, deadline).await;
        }
        let name = key.rsplit('/').next().unwrap_or_default();
        let file_first = web::is_file_name(name);
        if file_first {
            match endpoint.look(&self.target(key), deadline).await {
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
        endpoint.look(&self.target(key), deadline).await.map(Some)
    }

    async fn is_folder(&self, key: &str, deadline: Instant) -> io::Result<bool> {
        let endpoint = self.endpoint()?;
        match self.location.protocol {
            Protocol::Hub => Ok(tree::look(endpoint, key, deadline).await?.is_none()),
            _ if self.was_folder(key) => Ok(true),
            Protocol::S3 | Protocol::Google => {
                let found = s3::list(endpoint, key, Some(2), deadline).await?;
                Ok(self.note_folder(key, !found.is_empty()))
            }
            Protocol::Azure => {
                let found = azure::list(endpoint, key, Some(2), deadline).await?;
                Ok(self.note_folder(key, !found.is_empty()))
            }
            Protocol::Http if self.asked_in(key).is_empty() => {
                let found = web::is_folder(endpoint, key, deadline).await?;
                Ok(self.note_folder(key, found))
            }
            Protocol::Http => Ok(true),
        }
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

    fn asked_in(&self, key: &str) -> BTreeSet<String> {
        self.asked.get_or_init(Mutex::default).lock().get(key).cloned().unwrap_or_default()
    }

    fn note_asked(&self, key: &str) {
        if self.location.protocol == Protocol::Http {
            let (folder, name) = key.rsplit_once('/').unwrap_or(("", key));
            let mut asked = self.asked.get_or_init(Mutex::default).lock();
            asked.entry(folder.to_owned()).or_default().insert(name.to_owned());
        }
    }
}

fn deadline_of(until: Option<Instant>) -> Instant {
    let now = Instant::now();
    let until = until.unwrap_or(now + LIMIT);
    until - until.saturating_duration_since(now) / REASON_PART
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
        let deadline = deadline_of(None);
        match self.run(deadline, self.look(&key, deadline))? {
            None => self.folder_version(&key),
            Some(state) => {
                self.note_asked(&key);
                self.object_version(&key, state)
            }
        }
    }

    fn list(&self, path: &Path) -> io::Result<StoreListing> {
        let (key, deadline) = (self.key(path)?, deadline_of(None));
        let endpoint = self.endpoint()?;
        let below =
            |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}/{name}") };
        let found = self.run(deadline, async {
            match self.location.protocol {
                Protocol::S3 | Protocol::Google => s3::list(endpoint, &key, None, deadline).await,
                Protocol::Http => web::list(endpoint, &key, self.asked_in(&key), deadline).await,
                Protocol::Azure => azure::list(endpoint, &key, None, deadline).await,
                Protocol::Hub => tree::list(endpoint, &key, deadline).await,
            }
        })?;
        let version = |(name, entry): (String, StoreEntry)| {
            let version = match entry {
                StoreEntry::Folder => self.folder_version(&below(&name))?,
                StoreEntry::Object(state) => self.object_version(&below(&name), state)?,
            };
            Ok((name.into(), version))
        };
        let entries = found.into_iter().map(version).collect::<io::Result<VersionedNames>>()?;
        // In an object store, a folder exists only through its objects. A WebDAV folder may be empty.
        let is_there = !entries.is_empty() || self.location.protocol == Protocol::Http;
        self.note_folder(&key, is_there);
        if !is_there && !key.is_empty() {
            return Err(ErrorKind::NotFound.into());
        }
        Ok(StoreListing { version: self.folder_version(&key)?, entries, partial: false })
    }

    fn sha256(&self, path: &Path, version: &Version) -> Option<String> {
        let (state, sha256) = tree::sha256_of(self.endpoint().ok()?, &self.key(path).ok()?)?;
        state.is_of(version).then_some(sha256)
    }

    fn read(
        &self,
        path: &Path,
        version: &Version,
        offset: u64,
        buf: &mut [u8],
        until: Option<Instant>,
    ) -> io::Result<()> {
        self.read_parts(path, version, offset, &mut MemoryParts::one(buf), until)
    }

    fn credentials(&self) -> Option<String> {
        let (endpoint, process) = (self.endpoint().ok()?, RemoteProcess::get().ok()?);
        Some(process.runtime.block_on(endpoint.access.credentials(&endpoint.clients)))
    }

    fn probe(&self, path: &Path, version: &Version) -> io::Result<StoreProbe> {
        let (key, deadline) = (self.key(path)?, deadline_of(None));
        let known = self.known.get_or_init(Mutex::default).lock().get(&self.number(&key)?).cloned();
        let state = known.filter(|state| state.is_of(version)).ok_or(ErrorKind::NotFound)?;
        let (endpoint, target) = (self.endpoint()?, self.target(&key));
        self.run(deadline, probe::probe(endpoint, &target, version, &state, deadline))
    }

    fn identifies_bytes(&self, version: &Version) -> bool {
        // Without a strong ETag, the bytes may change while the length stays the same.
        version.file_words()[1] & 1 == 1
    }

    fn read_parts(
        &self,
        path: &Path,
        version: &Version,
        offset: u64,
        parts: &mut MemoryParts<'_>,
        until: Option<Instant>,
    ) -> io::Result<()> {
        let end = offset.checked_add(parts.len() as u64).ok_or(ErrorKind::UnexpectedEof)?;
        if end > version.len {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let (key, deadline) = (self.key(path)?, deadline_of(until));
        let (target, number) = (self.target(&key), self.number(&key)?);
        let known = self.known.get_or_init(Mutex::default);
        let before = known.lock().get(&number).filter(|state| state.is_of(version)).cloned();
        let endpoint = self.endpoint()?;
        let seen = self.run(deadline, async {
            if self.location.protocol == Protocol::Hub
                && tree::read_cached(endpoint, &key, version, offset, parts, deadline).await?
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
        Err(io::Error::new(ErrorKind::InvalidInput, self.0.clone()))
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

    fn read(
        &self,
        _: &Path,
        _: &Version,
        _: u64,
        _: &mut [u8],
        _: Option<Instant>,
    ) -> io::Result<()> {
        self.refuse()
    }
}
