//! Stores of source files. A store lists folders, finds versions and opens sources. It is the local file system
//! or a remote one.

mod bandwidth;
pub mod disk_cache;
pub mod folder;
pub mod hub_cache;
#[cfg(feature = "remote")]
mod redis_store;
#[cfg(feature = "remote")]
mod remote;
mod remote_settings;
mod remote_status;
pub mod resolve;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result, invalid_input, is_url, is_url_with_password, unusable_url};
use crate::open_options::{DiskCachePlace, OpenOptions, RemoteSettings};
use crate::source::{
    FileSystem, Source, StoreKind, StoreListing, StoreProbe, local_version, version_now,
};
use crate::sync::RwLock;
use crate::version::Version;

use disk_cache::CachedStore;
use folder::OpenFolder;
#[cfg(feature = "remote")]
use remote_settings::StoreSettings;
pub use remote_settings::{SERVER_URL, is_server_url};
pub use remote_status::{EndpointStatus, RemoteStatus, remote_status};

/// A store of sources. Clones are handles of the same store.
#[derive(Clone, Debug, Default)]
pub struct Store(Option<Arc<dyn StoreKind>>);

/// The stores registered with `add`, by the common start of the paths of their files.
static OTHERS: RwLock<Vec<(PathBuf, Store)>> = RwLock::new(Vec::new());

impl Store {
    /// The local file systems of this machine.
    pub const LOCAL: Store = Store(None);

    /// Registers `kind` as the store of all paths below the absolute path `root`.
    pub fn add(root: &Path, kind: Arc<dyn StoreKind>) {
        OTHERS.write().push((root.to_owned(), Store(Some(kind))));
    }

    /// The store of the file or folder at `path`.
    pub fn of(path: &Path) -> Store {
        Store::with(path, None)
    }

    /// The store of the file or folder at `path`, with the settings and the disk cache of `options`.
    pub fn for_options(path: &Path, options: &OpenOptions) -> Store {
        Store::with(path, options.remote.as_ref()).cached(options.disk_cache.as_ref())
    }

    /// The store of the file or folder at `path`, with the settings `remote` if it is remote.
    #[cfg_attr(not(feature = "remote"), allow(unused_variables, reason = "there are none then"))]
    pub fn with(path: &Path, remote: Option<&Arc<RemoteSettings>>) -> Store {
        #[cfg(feature = "remote")]
        if redis_store::is_redis(path) {
            return Store(Some(redis_store::store_of(path)));
        }
        #[cfg(feature = "remote")]
        if is_url(path) {
            return Store(Some(remote::store_of(path, StoreSettings::new(remote))));
        }
        let others = OTHERS.read();
        let mut found = others.iter().filter(|(root, _)| path.starts_with(root));
        found.next().map_or(Store::LOCAL, |(_, store)| store.clone())
    }

    /// The store of the first of `sources`. If `sources` is empty, the store of the file or folder at `path`.
    pub fn of_sources(sources: &[Arc<Source>], path: &Path) -> Store {
        let kind = sources.first().and_then(|source| source.store_kind());
        kind.map_or_else(|| Store::of(path), |kind| Store(Some(kind.clone())))
    }

    /// The same store with a disk cache at `place`. The local file systems get no disk cache.
    #[must_use]
    pub fn cached(self, place: Option<&DiskCachePlace>) -> Store {
        match (self.0, place) {
            (Some(kind), Some(place)) => Store(Some(Arc::new(CachedStore::new(kind, place)))),
            (kind, _) => Store(kind),
        }
    }

    /// Whether this is the store of the local file systems. Then its paths are paths of this machine.
    pub fn is_local(&self) -> bool {
        self.0.is_none()
    }

    /// Whether an access to `folder` may wait for another machine, perhaps for ever.
    pub fn may_block(&self, folder: &Path) -> bool {
        match &self.0 {
            None => !FileSystem::of_folder(folder).is_local(),
            Some(kind) => kind.may_block(),
        }
    }

    /// `path` as an absolute path without symbolic links.
    ///
    /// # Errors
    /// If nothing is at the path, or a folder of the path cannot be read.
    pub fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        match &self.0 {
            None if is_url(path) => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this build has no remote sources: cargo feature `remote`",
            )),
            None => fs::canonicalize(path).map_err(|e| match unusable_url(path) {
                Some(why) if e.kind() == io::ErrorKind::NotFound => io::Error::new(e.kind(), why),
                _ => e,
            }),
            Some(_) if is_url_with_password(path) => Err(invalid_input(
                "user names and passwords do not belong into a URL, where others see them",
            )),
            Some(kind) => kind.version(path).map(|_| plain(path)),
        }
    }

    /// Refuses a URL that no store accepts. Asks no server.
    ///
    /// # Errors
    /// The refusal that opening the URL would return.
    pub fn check_url(path: &Path) -> Result<()> {
        let store = Store::of(path);
        let asks = store.0.as_ref().is_some_and(|kind| kind.may_block());
        let is_refused = is_url(path) && (!asks || is_url_with_password(path));
        let checked = if is_refused { store.real_path(path).map(drop) } else { Ok(()) };
        checked.map_err(|e| Error::io(path, "open", e))
    }

    /// `path` as an absolute path, which may contain symbolic links. It need not exist.
    ///
    /// # Errors
    /// If the working directory does not exist any more.
    pub fn absolute(&self, path: &Path) -> io::Result<PathBuf> {
        if self.is_local() && !is_url(path) { std::path::absolute(path) } else { Ok(plain(path)) }
    }

    /// The names in a folder, sorted.
    ///
    /// # Errors
    /// If there is no such folder, or it cannot be read.
    pub fn names(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        match &self.0 {
            None => OpenFolder::open(folder, folder)?.list(),
            Some(_) => {
                let entries = self.list(folder, folder)?.entries;
                Ok(entries.into_iter().map(|(name, _)| name).collect())
            }
        }
    }

    /// The entries of a folder by name. `folder` lies in the folder `base`, and the path from `base` to `folder`
    /// contains no symbolic link.
    ///
    /// # Errors
    /// If there is no such folder, or it cannot be read.
    pub fn list(&self, base: &Path, folder: &Path) -> io::Result<StoreListing> {
        let Some(kind) = &self.0 else { return OpenFolder::open(base, folder)?.entries() };
        let mut listing = kind.list(folder)?;
        listing.entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(listing)
    }

    /// The version of the file or folder at `path`. If a link is there, the version of the link itself.
    ///
    /// # Errors
    /// If nothing is at the path, or a folder of the path cannot be read.
    pub fn version(&self, path: &Path) -> io::Result<Version> {
        match &self.0 {
            None => fs::symlink_metadata(path).map(|meta| local_version(&meta)),
            Some(kind) => kind.version(path),
        }
    }

    /// The version of the file or folder at `path`, with links followed.
    ///
    /// # Errors
    /// If nothing is at the path, or a folder of the path cannot be read.
    pub fn version_behind_links(&self, path: &Path) -> io::Result<Version> {
        match &self.0 {
            None => fs::metadata(path).map(|meta| local_version(&meta)),
            Some(kind) => kind.version(path),
        }
    }

    /// Like `version`, but returns the current version on the server. The client of a network file system may have
    /// cached an older version.
    ///
    /// # Errors
    /// If nothing is at the path, or a folder of the path cannot be read.
    pub fn fresh_version(&self, path: &Path) -> io::Result<Version> {
        match &self.0 {
            None => version_now(path),
            Some(kind) => kind.version(path),
        }
    }

    /// Opens the source at `path`, which is absolute and without symbolic links.
    ///
    /// # Errors
    /// `Error::Io` if it cannot be opened, or is not a regular file.
    pub fn open(&self, path: &Path) -> Result<Arc<Source>> {
        let Some(kind) = &self.0 else { return Source::open(path) };
        let failed = |e| Error::io(path, "open", e);
        let version = kind.version(path).map_err(failed)?;
        if !version.is_file() {
            return Err(failed(invalid_input("is no regular file")));
        }
        Ok(Source::stored(kind, path, version))
    }

    /// The name of the store for messages: a protocol and a host. `None` if the store has no server.
    pub fn server(&self) -> Option<String> {
        self.0.as_ref()?.name()
    }

    /// The source of the credentials that requests to the server carry, in words.
    pub fn credentials(&self) -> Option<String> {
        self.0.as_ref()?.credentials()
    }

    /// Measures how the server serves the file at `path`, which has `version`.
    ///
    /// # Errors
    /// `Unsupported` if the store has no server. Also fails if the server refuses a request, or does not answer
    /// in time.
    pub fn probe(&self, path: &Path, version: &Version) -> io::Result<StoreProbe> {
        match &self.0 {
            None => Err(io::ErrorKind::Unsupported.into()),
            Some(kind) => kind.probe(path, version),
        }
    }

    /// The source at `path`, which had the version `version` when it was last examined. The first read opens it. Its
    /// bytes are valid only if a later `check` finds the same version.
    pub fn closed(&self, path: &Path, version: Version) -> Arc<Source> {
        match &self.0 {
            None => Source::closed(path, version),
            Some(kind) => Source::stored(kind, path, version),
        }
    }
}

/// A path of another store without superfluous slashes. The two slashes after the scheme of a URL remain.
fn plain(path: &Path) -> PathBuf {
    let url = path.to_str().filter(|_| is_url(path)).and_then(|url| url.split_once("://"));
    match url {
        None => path.components().collect(),
        Some((scheme, rest)) => {
            let parts: Vec<&str> =
                rest.split('/').filter(|part| !["", "."].contains(part)).collect();
            format!("{scheme}://{}", parts.join("/")).into()
        }
    }
}
