//! The local copy of a file of a store: the disk cache has it as a whole, and it is read in place of the
//! store.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::descriptors::Pinnable;
use super::local::LocalFile;
use super::store_kind::StoreKind;
use crate::error::Result;
use crate::sync::RwLock;
use crate::version::Version;

/// An open local copy. It has the same bytes for as long as it is open.
#[derive(Debug)]
pub struct LocalCopy {
    local: LocalFile,
    /// Its open file, which keeps the bytes. `local` may close it because too many are open.
    file: Arc<File>,
}

impl LocalCopy {
    fn new(path: &Path, file: File) -> Result<LocalCopy> {
        let local = LocalFile::of_open_file(path, file)?;
        Ok(LocalCopy { file: local.file()?, local })
    }

    /// The copy as a local file. Its times say nothing: the disk cache tells which bytes it has.
    pub fn local(&self) -> &LocalFile {
        &self.local
    }

    /// The open file, which keeps the bytes also if the copy loses its name.
    pub fn file(&self) -> Arc<File> {
        self.file.clone()
    }
}

/// The place of the local copy of one file of a store.
#[derive(Debug)]
pub(super) struct CopySlot {
    store: Arc<dyn StoreKind>,
    path: PathBuf,
    version: Version,
    copy: RwLock<Option<Arc<LocalCopy>>>,
    /// Whether a copy could not be read.
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

    /// The copy, which is opened if the store has it.
    pub(super) fn copy(&self) -> Option<Arc<LocalCopy>> {
        if let Some(copy) = &*self.copy.read() {
            return Some(copy.clone());
        }
        if self.is_refused.load(Ordering::Relaxed) {
            return None;
        }
        let (path, file) = self.store.local_copy(&self.path, &self.version)?;
        let copy = Arc::new(LocalCopy::new(&path, file).ok()?);
        Some(self.copy.write().get_or_insert(copy).clone())
    }

    /// Takes no copy from now on: the disk has lost bytes of it.
    pub(super) fn refuse(&self) {
        self.is_refused.store(true, Ordering::Relaxed);
        self.close();
    }

    /// Closes the copy once the last read of it has ended.
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
            // A store that has all bytes by now gets them ready for the next reader.
            drop(self.copy());
            self.release();
        }
    }
}
