//! Open files: the state that all handles of a file share, and its open sources.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tensorfs::internal::cache::{Cache, CachedFile, OnStorm};
use tensorfs::internal::checkpoint::Content;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::source::{Pin, Source, all_hold};
use tensorfs::internal::sync::RwLock;
use tensorfs::{Error, Result};

use crate::serve::blocking::BlockingPool;
use crate::serve::change_watcher::Watched;

/// An open file, shared by all its handles.
pub(crate) struct OpenFile(RwLock<Arc<Current>>);

/// The content of an open file as readers get it now. A file that follows its source gets a new
/// `Current` when the source has changed. The sources stay open until this value is dropped.
pub(crate) struct Current {
    /// This field must be dropped before the sources are closed, so it comes first.
    pub(crate) file: OpenContent,
    _held: SourceGuard,
}

/// Keeps the sources of a file watched and open.
struct SourceGuard {
    watched: Option<Watched>,
    pins: Vec<Pin>,
    /// Whether all sources lie on local file systems, where closing a file does not block.
    local: bool,
    /// Path in the mount.
    path: PathBuf,
    blocking: BlockingPool,
}

impl Drop for SourceGuard {
    fn drop(&mut self) {
        // The watch ends before the pins are dropped. The drop of the pins closes files, which the
        // watch must not reopen.
        self.watched = None;
        let pins = std::mem::take(&mut self.pins);
        if !self.local {
            self.blocking.spawn_detached(&self.path, move || drop(pins));
        }
    }
}

impl OpenFile {
    pub(super) fn new(current: Arc<Current>) -> OpenFile {
        OpenFile(RwLock::new(current))
    }

    /// Makes readers get `current` from now on.
    pub(super) fn set_current(&self, current: Arc<Current>) {
        *self.0.write() = current;
    }

    /// The content that readers get now.
    pub(crate) fn current(&self) -> Arc<Current> {
        self.0.read().clone()
    }
}

impl Current {
    /// Keeps the sources of `file` open, and with `watch` also watched. `path` is the path of the
    /// file in the mount.
    pub(super) fn hold(
        file: OpenContent,
        path: &Path,
        blocking: &BlockingPool,
        watch: impl FnOnce(&[Arc<Source>]) -> Watched,
    ) -> Result<Arc<Current>> {
        let pins = file.sources().iter().map(|source| source.pin()).collect::<Result<Vec<_>>>()?;
        let local = file.sources().iter().all(|source| !source.may_block());
        let watched = Some(watch(file.sources()));
        let _held =
            SourceGuard { watched, pins, local, path: path.to_owned(), blocking: blocking.clone() };
        Ok(Arc::new(Current { file, _held }))
    }

    /// Whether the sources still have the versions that they had when they were opened. Accesses
    /// the sources.
    pub(super) fn is_unchanged(&self) -> bool {
        // Every source is checked, so that each changed one is marked.
        all_hold(self.file.sources(), &|source| source.check().is_ok())
    }

    /// Whether the sources are unchanged, without requests to a server. Each read of a store names
    /// the version that it wants, so a replaced object makes the next read fail. A replaced object
    /// is also found in this way in a mount that is taken over, where the sources have not been
    /// checked yet.
    pub(super) fn is_unchanged_once_open(&self) -> bool {
        match &self.file {
            OpenContent::Virtual(_) => {
                all_hold(self.file.sources(), &|source| source.check_after_read().is_ok())
            }
            OpenContent::Whole(_) | OpenContent::Text(_) => self.is_unchanged(),
        }
    }

    /// Whether `range` of a file that follows its source may contain bytes that did not exist when
    /// the file was opened. Never waits.
    pub(crate) fn may_have_grown(&self, range: &Range<u64>) -> bool {
        let OpenContent::Whole(file) = &self.file else { return false };
        let source = &file.reader().sources()[0];
        let beyond = range.end > file.reader().len();
        source.is_changed_now() || (beyond && source.may_block())
    }

    /// The current bytes of `range` of a source file. There are fewer bytes at the end of the file.
    ///
    /// # Errors
    /// Errors of the source.
    pub(crate) fn read_now(&self, range: &Range<u64>) -> Result<Vec<u8>> {
        let Some(source) = self.file.sources().first() else { return Ok(Vec::new()) };
        let Some(local) = source.local() else {
            let now = source.as_it_is_now()?;
            let mut bytes = vec![0; range.end.min(now.len()).saturating_sub(range.start) as usize];
            now.read_exact_at(&mut bytes, range.start)?;
            return Ok(bytes);
        };
        let file = local.file()?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let mut have = 0;
        while have < bytes.len() {
            match file.read_at(&mut bytes[have..], range.start + have as u64) {
                Ok(0) => break,
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io(source.uri(), "read", e)),
            }
        }
        bytes.truncate(have);
        Ok(bytes)
    }
}

impl std::fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.current().file.sources().fmt(f)
    }
}

/// A file that can be read.
#[derive(Clone)]
pub(crate) enum OpenContent {
    /// The tensors of a checkpoint as one file.
    Virtual(Arc<CachedFile>),
    /// A file of the source, unchanged.
    Whole(Arc<CachedFile>),
    /// Generated text.
    Text(Arc<[u8]>),
}

impl OpenContent {
    /// The file in the cache. `None` for text.
    pub(crate) fn cached(&self) -> Option<&Arc<CachedFile>> {
        match self {
            OpenContent::Virtual(file) | OpenContent::Whole(file) => Some(file),
            OpenContent::Text(_) => None,
        }
    }

    /// The source files that its bytes come from.
    pub(crate) fn sources(&self) -> &[Arc<Source>] {
        match self {
            OpenContent::Virtual(file) | OpenContent::Whole(file) => file.reader().sources(),
            OpenContent::Text(_) => &[],
        }
    }
}

/// Opens `content`. For a virtual file, `on_fault_storm` makes the function that is called when a
/// program reads the file page by page.
///
/// # Errors
/// `Error::Changed` if another file is at its path.
pub(super) fn open_file(
    content: &Content,
    cache: &Cache,
    on_fault_storm: impl FnOnce() -> OnStorm,
) -> Result<OpenContent> {
    let whole = |source| OpenContent::Whole(cache.open(Reader::whole(source), None));
    Ok(match content {
        Content::Virtual(file) => {
            OpenContent::Virtual(cache.open(Reader::open(file)?, Some(on_fault_storm())))
        }
        Content::Whole { proved: Some(source), .. } => whole(source.clone()),
        Content::Whole { file, proved: None } => {
            let source = file.store.open(&file.path)?;
            if source.version().file() != file.version.file() {
                let detail = "was replaced since it was looked at".to_owned();
                return Err(Error::changed(&file.path, detail));
            }
            source.set_followed();
            whole(source)
        }
        Content::Text(text) => OpenContent::Text(text.clone()),
    })
}
