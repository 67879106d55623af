//! Files of stores that are not the local file system.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::notes::Notes;
use super::parts::MemoryParts;
use crate::error::{Error, Result};
use crate::version::Version;

/// A kind of store beside the local file system. Its paths are absolute. They have no `.`, no `..` and
/// no links.
pub trait StoreKind: fmt::Debug + Send + Sync {
    /// Whether a call may wait for another machine, perhaps for ever.
    fn may_block(&self) -> bool {
        true
    }

    /// The version of the file or folder at `path` now. It need not be current for longer than this
    /// call.
    ///
    /// # Errors
    /// `NotFound` where nothing is there.
    fn version(&self, path: &Path) -> io::Result<Version>;

    /// The version of the folder at `path`, and its entries, in any order.
    ///
    /// # Errors
    /// `NotFound` where no folder is there.
    fn list(&self, path: &Path) -> io::Result<StoreListing>;

    /// Its name for people: a protocol and a host.
    fn name(&self) -> Option<String> {
        None
    }

    /// The sha256 of the file at `path` in this `version`, in hexadecimal, if the store knows it without
    /// reading the file. It asks nobody.
    fn sha256(&self, path: &Path, version: &Version) -> Option<String> {
        let _ = (path, version);
        None
    }

    /// Fills `buf` with the bytes at `offset` of the file at `path`. After `until` nobody waits for them.
    ///
    /// # Errors
    /// `StaleNetworkFileHandle` if the file is not there in this `version`, `UnexpectedEof` if it ends
    /// before.
    fn read(
        &self,
        path: &Path,
        version: &Version,
        offset: u64,
        buf: &mut [u8],
        until: Option<Instant>,
    ) -> io::Result<()>;

    /// Reads like `read`, to memory in several places.
    ///
    /// # Errors
    /// The errors of `read`.
    fn read_parts(
        &self,
        path: &Path,
        version: &Version,
        offset: u64,
        parts: &mut MemoryParts<'_>,
        until: Option<Instant>,
    ) -> io::Result<()> {
        let mut bytes = vec![0; parts.len()];
        self.read(path, version, offset, &mut bytes, until)?;
        if parts.write(0, &bytes) { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Whether `version` tells the bytes of its file from all others that were ever at its path, so that
    /// a copy of them can be kept for other processes.
    fn tells_bytes(&self, _version: &Version) -> bool {
        false
    }
}

/// A folder of a store.
#[derive(Clone, Debug)]
pub struct StoreListing {
    /// The version of the folder.
    pub version: Version,
    /// Names in it, each with the version of the file or folder, or of the link.
    pub entries: Vec<(OsString, Version)>,
    /// Whether names are left out because the store failed to tell their versions.
    pub partial: bool,
}

/// A file of such a store in one version.
#[derive(Debug)]
pub struct StoreFile {
    store: Arc<dyn StoreKind>,
    path: PathBuf,
    version: Version,
    pub(super) notes: Notes,
}

impl StoreFile {
    pub(super) fn new(store: &Arc<dyn StoreKind>, path: &Path, version: Version) -> StoreFile {
        let (store, path) = (store.clone(), path.to_owned());
        StoreFile { store, path, version, notes: Notes::default() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn version(&self) -> &Version {
        &self.version
    }

    pub(super) fn may_block(&self) -> bool {
        self.store.may_block()
    }

    pub(super) fn store_name(&self) -> Option<String> {
        self.store.name()
    }

    pub(super) fn sha256(&self) -> Option<String> {
        self.store.sha256(&self.path, &self.version)
    }

    /// The version at its path now.
    pub(super) fn look(&self) -> Result<Version> {
        self.store.version(&self.path).map_err(|e| Error::io(&self.path, "look at", e))
    }

    /// The same file in the version `version`.
    pub(super) fn in_version(&self, version: Version) -> StoreFile {
        StoreFile::new(&self.store, &self.path, version)
    }

    pub(super) fn read_exact_at(
        &self,
        buf: &mut [u8],
        offset: u64,
        until: Option<Instant>,
    ) -> Result<()> {
        self.notes.check_known(&self.path)?;
        let end = offset + buf.len() as u64;
        self.store.read(&self.path, &self.version, offset, buf, until).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.ends_before(end),
            io::ErrorKind::StaleNetworkFileHandle => self.set_replaced(),
            _ => Error::io(&self.path, "read", e),
        })
    }

    pub(super) fn ends_before(&self, end: u64) -> Error {
        let len = self.version.len;
        self.set_changed(format!("ends before byte {end}, it had {len} bytes when it was opened"))
    }

    pub(super) fn check(&self) -> Result<()> {
        self.notes.check_known(&self.path)?;
        if self.look()?.content() == self.version.content() {
            Ok(())
        } else {
            Err(self.set_replaced())
        }
    }

    pub(super) fn set_replaced(&self) -> Error {
        self.set_changed("was replaced while it was in use".to_owned())
    }

    fn set_changed(&self, detail: String) -> Error {
        self.notes.set_changed(&self.path, detail, true)
    }
}
