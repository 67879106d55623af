//! Open files: what all who have a file open share, and what becomes of its sources.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use tensorfs::cache::{Cache, CachedFile, OnStorm};
use tensorfs::checkpoint::Content;
use tensorfs::reader::Reader;
use tensorfs::source::{Pin, Source};
use tensorfs::{Error, Result};

use crate::asks::Asks;
use crate::nodes::{Node, NodeKind};
use crate::service::Service;
use crate::watch::{Watched, Watcher};

/// A file as all who have it open share it. Its sources stay open as long.
pub(crate) struct Opened {
    /// What is read. Dropped before what keeps its sources open.
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

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.file.sources().fmt(f)
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
        let mut shared = open.lock().unwrap_or_else(PoisonError::into_inner);
        // A plain file may be written to: who opens it afterwards gets the new bytes, even while
        // somebody still has the old ones open.
        let plain = matches!(content, Content::Whole { proved: None, .. });
        let usable = |opened: &Arc<Opened>| {
            !plain || opened.file.sources().iter().all(|source| source.check().is_ok())
        };
        let opened = match shared.upgrade().filter(usable) {
            Some(opened) => opened,
            None => {
                let file = open_file(content, &service.cache, on_storm)?;
                let pins = file.sources().iter().map(Source::pin).collect::<Result<Vec<_>>>()?;
                let local = file.sources().iter().all(|source| source.file_system().is_local());
                let watched = Some(watcher.watch(self.ino, file.sources()));
                let (path, asks) = (self.path.clone(), service.asks.clone());
                let _held = Held { watched, pins, local, path, asks };
                let opened = Arc::new(Opened { file, _held });
                *shared = Arc::downgrade(&opened);
                opened
            }
        };
        drop(shared);
        let mut unchanged = true;
        for source in opened.file.sources() {
            unchanged &= source.check().is_ok();
        }
        if let OpenFile::Whole(file) = &opened.file {
            let now = file.reader().sources()[0].identity();
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            unchanged &= last.replace(now).is_none_or(|before| before == now);
        }
        Ok((opened, unchanged))
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
            if !source.identity().same_bytes(&file.identity) {
                let detail = "was replaced since it was looked at".to_owned();
                return Err(Error::Changed { path: file.path.clone(), detail });
            }
            whole(source)
        }
        Content::Text(text) => OpenFile::Text(text.clone()),
    })
}
