//! Open files: what all who have a file open share, and what becomes of its sources.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use tensorfs::cache::{Cache, CachedFile, OnStorm};
use tensorfs::checkpoint::Content;
use tensorfs::reader::Reader;
use tensorfs::source::{Pin, Source};
use tensorfs::sync::RwLock;
use tensorfs::{Error, Result};

use crate::asks::Asks;
use crate::node::{Node, NodeKind};
use crate::service::Service;
use crate::watch::{Watched, Watcher};

/// A file as all who have it open share it.
pub(crate) struct Opened(RwLock<Arc<Current>>);

/// The version of an open file that readers get. A file that follows its source gets a new one
/// when the source has changed. Its sources stay open as long.
pub(crate) struct Current {
    /// Dropped before what keeps its sources open.
    pub(crate) file: OpenFile,
    _held: Held,
}

/// What keeps the sources of a file watched and open.
struct Held {
    watched: Option<Watched>,
    pins: Vec<Pin>,
    /// Whether all of them lie on file systems that close files at once.
    local: bool,
    /// Path in the mount.
    path: PathBuf,
    asks: Asks,
}

impl Drop for Held {
    fn drop(&mut self) {
        // The watch ends first: it must not open again what the pins close.
        self.watched = None;
        let pins = std::mem::take(&mut self.pins);
        if !self.local {
            self.asks.later(&self.path, move || drop(pins));
        }
    }
}

impl Opened {
    /// The version that readers get now.
    pub(crate) fn current(&self) -> Arc<Current> {
        self.0.read().clone()
    }
}

impl Current {
    /// Whether its sources are what they were when they were opened. Asks them.
    fn is_unchanged(&self) -> bool {
        // All are looked at, so that each that has changed is known to have.
        self.file.sources().iter().filter(|source| source.check().is_err()).count() == 0
    }

    /// Whether `range` of a file that follows its source may hold bytes that were not there when
    /// it was opened. Never waits.
    pub(crate) fn may_have_grown(&self, range: &Range<u64>) -> bool {
        let OpenFile::Whole(file) = &self.file else { return false };
        let source = &file.reader().sources()[0];
        let beyond = range.end > file.reader().len();
        source.is_changed_now() || (beyond && !source.file_system().is_local())
    }

    /// Bytes `range` of a file of the source as they are now; fewer where it ends before.
    ///
    /// # Errors
    /// Those of the source.
    pub(crate) fn read_now(&self, range: &Range<u64>) -> Result<Vec<u8>> {
        let Some(source) = self.file.sources().first() else { return Ok(Vec::new()) };
        let file = source.file()?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let mut have = 0;
        while have < bytes.len() {
            match file.read_at(&mut bytes[have..], range.start + have as u64) {
                Ok(0) => break,
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io(source.path(), "read", e)),
            }
        }
        bytes.truncate(have);
        Ok(bytes)
    }
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.current().file.sources().fmt(f)
    }
}

/// A file that can be read.
#[derive(Clone)]
pub(crate) enum OpenFile {
    /// The tensors of a checkpoint as one file.
    Virtual(Arc<CachedFile>),
    /// A file of the source as it is.
    Whole(Arc<CachedFile>),
    /// Text made here.
    Text(Arc<[u8]>),
}

impl OpenFile {
    /// The file in the cache, but for text.
    pub(crate) fn cached(&self) -> Option<&Arc<CachedFile>> {
        match self {
            OpenFile::Virtual(file) | OpenFile::Whole(file) => Some(file),
            OpenFile::Text(_) => None,
        }
    }

    /// The source files that its bytes come from.
    pub(crate) fn sources(&self) -> &[Arc<Source>] {
        match self {
            OpenFile::Virtual(file) | OpenFile::Whole(file) => file.reader().sources(),
            OpenFile::Text(_) => &[],
        }
    }
}

impl Node {
    /// Opens the file for reading, once for all who have it open; `watcher` watches its
    /// sources as long. Also returns whether what the kernel may have cached of it is still right.
    ///
    /// # Errors
    /// `Error::Changed` where another file stands in its place.
    pub(crate) fn open(
        &self,
        watcher: &Arc<Watcher>,
        service: &Service,
        on_storm: impl FnOnce() -> OnStorm,
    ) -> Result<(Arc<Opened>, bool)> {
        let NodeKind::File { content, open, last, .. } = &self.kind else {
            return Err(Error::usage("a folder cannot be read"));
        };
        // Held while the file is opened, so that it is opened and watched once.
        let mut shared = open.lock();
        let opened = match shared.upgrade() {
            Some(opened) => {
                self.renew(&opened, watcher, service)?;
                opened
            }
            None => {
                let file = open_file(content, &service.cache, on_storm)?;
                let current = self.hold(file, watcher, service)?;
                Arc::new(Opened(RwLock::new(current)))
            }
        };
        let current = opened.current();
        let mut unchanged = current.is_unchanged();
        if !unchanged && !self.follows() {
            let detail = "was changed while it was opened".to_owned();
            return Err(Error::Changed { path: self.path.clone(), detail });
        }
        if let OpenFile::Whole(file) = &current.file {
            let now = file.reader().sources()[0].identity();
            let mut last = last.lock();
            unchanged &= last.replace(now).is_none_or(|before| before == now);
        }
        *shared = Arc::downgrade(&opened);
        drop(shared);
        self.set_opened();
        Ok((opened, unchanged))
    }

    /// Has `opened`, which is open, read its source as it is now, if it is a file that follows its
    /// source and that has changed. Returns whether it had. Asks the source.
    ///
    /// # Errors
    /// Those of the source.
    pub(crate) fn follow(
        &self,
        opened: &Arc<Opened>,
        watcher: &Arc<Watcher>,
        service: &Service,
    ) -> Result<bool> {
        let NodeKind::File { open, .. } = &self.kind else { return Ok(false) };
        let _one_at_a_time = open.lock();
        self.renew(opened, watcher, service)
    }

    fn renew(&self, opened: &Opened, watcher: &Arc<Watcher>, service: &Service) -> Result<bool> {
        let before = opened.current();
        let OpenFile::Whole(file) = &before.file else { return Ok(false) };
        if !self.follows() || before.is_unchanged() {
            return Ok(false);
        }
        let source = file.reader().sources()[0].as_it_is_now()?;
        source.set_followed();
        self.set_attributes(&source.identity());
        let file = OpenFile::Whole(service.cache.open(Reader::whole(source), None));
        let current = self.hold(file, watcher, service)?;
        *opened.0.write() = current;
        Ok(true)
    }

    /// Keeps the sources of `file` open and watched.
    fn hold(
        &self,
        file: OpenFile,
        watcher: &Arc<Watcher>,
        service: &Service,
    ) -> Result<Arc<Current>> {
        let pins = file.sources().iter().map(Source::pin).collect::<Result<Vec<_>>>()?;
        let local = file.sources().iter().all(|source| source.file_system().is_local());
        let watched = Some(watcher.watch(self.ino, file.sources(), self.is_unread()));
        let (path, asks) = (self.path.clone(), service.asks.clone());
        let _held = Held { watched, pins, local, path, asks };
        Ok(Arc::new(Current { file, _held }))
    }

    /// What somebody has open of it.
    pub(crate) fn opened(&self) -> Option<Arc<Opened>> {
        let NodeKind::File { open, .. } = &self.kind else { return None };
        open.lock().upgrade()
    }
}

fn open_file(
    content: &Content,
    cache: &Cache,
    on_storm: impl FnOnce() -> OnStorm,
) -> Result<OpenFile> {
    let whole = |source| OpenFile::Whole(cache.open(Reader::whole(source), None));
    Ok(match content {
        Content::Virtual(checkpoint) => {
            OpenFile::Virtual(cache.open(Reader::open(checkpoint)?, Some(on_storm())))
        }
        Content::Whole { proved: Some(source), .. } => whole(source.clone()),
        Content::Whole { file, proved: None } => {
            let source = Source::open(&file.path)?;
            if !source.identity().same_inode(&file.identity) {
                let detail = "was replaced since it was looked at".to_owned();
                return Err(Error::Changed { path: file.path.clone(), detail });
            }
            source.set_followed();
            whole(source)
        }
        Content::Text(text) => OpenFile::Text(text.clone()),
    })
}
