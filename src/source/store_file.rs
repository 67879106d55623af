//! Files of stores other than the local file system.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::descriptors::Pin;
use super::local_copy::{CopySlot, LocalCopy};
use super::notes::Notes;
use super::store_kind::{ObjectRead, StoreKind};
use crate::error::{Error, Result};
use crate::version::Version;

/// A file of a store in one version.
#[derive(Debug)]
pub struct StoreFile {
    store: Arc<dyn StoreKind>,
    path: PathBuf,
    version: Version,
    /// The slot for the local copy.
    pub(super) copy: Arc<CopySlot>,
    pub(super) notes: Notes,
}

impl StoreFile {
    /// The store of the file.
    pub(super) fn store(&self) -> &Arc<dyn StoreKind> {
        &self.store
    }

    pub(super) fn new(store: &Arc<dyn StoreKind>, path: &Path, version: Version) -> StoreFile {
        let copy = Arc::new(CopySlot::new(store, path, version));
        let (store, path) = (store.clone(), path.to_owned());
        StoreFile { store, path, version, copy, notes: Notes::default() }
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

    /// The local copy, if it is open.
    pub(super) fn copy(&self) -> Option<Arc<LocalCopy>> {
        if self.notes.is_changed() { None } else { self.copy.opened() }
    }

    /// Opens the local copy, if the store has the whole file now.
    pub(super) fn open_local_copy(&self) {
        if !self.notes.is_changed() {
            self.copy.open(None);
        }
    }

    pub(super) fn pin(&self) -> Pin {
        Pin::of(self.copy.clone())
    }

    pub(super) fn sha256(&self) -> Option<String> {
        self.store.sha256(&self.path, &self.version)
    }

    /// The current version at the path.
    pub(super) fn look(&self) -> Result<Version> {
        self.store.version(&self.path).map_err(|e| Error::io(&self.path, "stat", e))
    }

    /// The same file with the version `version`.
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
        self.store.read(&self.reading(until), offset, buf).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.ends_before(end),
            io::ErrorKind::StaleNetworkFileHandle => self.set_replaced(),
            _ => Error::io(&self.path, "read", e),
        })?;
        // After this read, the store may have the whole file.
        self.copy.open(until);
        Ok(())
    }

    fn reading(&self, until: Option<Instant>) -> ObjectRead<'_> {
        ObjectRead { path: &self.path, version: &self.version, until }
    }

    pub(super) fn read_if_cached(&self, buf: &mut [u8], offset: u64) -> bool {
        self.store.read_if_cached(&self.reading(None), offset, buf)
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
