//! The local copy of a remote file. If the disk cache has the whole file, reads use the file of the cache in
//! place of the store.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use super::descriptors::{Pinnable, open_max};
use super::local::LocalFile;
use super::store_kind::{ObjectRead, StoreKind};
use crate::error::Result;
use crate::sync::RwLock;
use crate::version::Version;

/// An open local copy. Its bytes stay the same while it is open.
#[derive(Debug)]
pub struct LocalCopy {
    local: LocalFile,
    /// An open descriptor, which keeps the bytes. `local` may close its own descriptor when too many are open.
    file: Arc<File>,
}

/// Number of local copies that are open in this process.
static OPEN: AtomicU64 = AtomicU64::new(0);

impl LocalCopy {
    fn new(path: &Path, file: File) -> Result<LocalCopy> {
        let file = Arc::new(file);
        let local = LocalFile::of_open_file(path, file.clone())?;
        OPEN.fetch_add(1, Ordering::Relaxed);
        Ok(LocalCopy { local, file })
    }

    /// The copy as a local file. Its times have no meaning, because the disk cache guarantees the bytes.
    pub fn local(&self) -> &LocalFile {
        &self.local
    }

    /// The open file. The bytes stay even if the file in the cache loses its name.
    pub fn file(&self) -> Arc<File> {
        self.file.clone()
    }
}

impl Drop for LocalCopy {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The slot for the local copy of one remote file.
#[derive(Debug)]
pub(super) struct CopySlot {
    store: Arc<dyn StoreKind>,
    path: PathBuf,
    version: Version,
    copy: RwLock<Option<Arc<LocalCopy>>>,
    /// Whether a read of a copy has failed.
    is_refused: AtomicBool,
    pins: AtomicUsize,
}

impl CopySlot {
    pub(super) fn new(store: &Arc<dyn StoreKind>, path: &Path, version: Version) -> CopySlot {
        CopySlot {
            store: store.clone(),
            path: path.to_owned(),
            version,
            copy: RwLock::default(),
            is_refused: AtomicBool::new(false),
            pins: AtomicUsize::new(0),
        }
    }

    /// The copy, if it is open. Never waits for the disk.
    pub(super) fn opened(&self) -> Option<Arc<LocalCopy>> {
        self.copy.read().clone()
    }

    /// Opens the copy, if the store has one. May wait for the disk, for at most half of the time to `until`.
    pub(super) fn open(&self, until: Option<Instant>) {
        // Each copy has a descriptor that cannot be closed while the copy is in use.
        let has_room = || OPEN.load(Ordering::Relaxed) < open_max() / 2;
        if self.is_refused.load(Ordering::Relaxed) || self.copy.read().is_some() || !has_room() {
            return;
        }
        let read = ObjectRead { path: &self.path, version: &self.version, until };
        let Some((path, file)) = self.store.local_copy(&read) else { return };
        let Ok(copy) = LocalCopy::new(&path, file) else { return };
        let mut open = self.copy.write();
        if !self.is_refused.load(Ordering::Relaxed) {
            open.get_or_insert(Arc::new(copy));
        }
    }

    /// Uses no copy from now on, because the disk has lost bytes of it.
    pub(super) fn refuse(&self) {
        self.is_refused.store(true, Ordering::Relaxed);
        self.close();
    }

    /// Closes the copy. Reads in progress keep its file open until they end.
    fn close(&self) {
        let closed = self.copy.write().take();
        drop(closed);
    }

    pub(super) fn release(&self) {
        if !self.is_pinned() {
            self.close();
        }
    }

    pub(super) fn is_open_unpinned(&self) -> bool {
        !self.is_pinned() && self.copy.read().is_some()
    }

    fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::SeqCst) > 0
    }
}

impl Pinnable for CopySlot {
    fn add_pin(&self) {
        self.pins.fetch_add(1, Ordering::SeqCst);
    }

    fn remove_pin(&self) {
        if self.pins.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.release();
        }
    }
}
