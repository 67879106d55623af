//! Nodes of the previous process that this process takes over.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::UNIX_EPOCH;

use tensorfs::Result;
use tensorfs::internal::checkpoint::{Content, FolderId};
use tensorfs::internal::version::{Time, Version};

use super::super::open_file::{OpenContent, OpenFile};
use super::{Node, NodeFile};
use crate::serve::change_watcher::Watcher;
use crate::serve::service::Service;

impl Node {
    /// A file that no folder of this process shows, with the inode number and version that the
    /// previous process used.
    pub(crate) fn carried(
        ino: u64,
        folder: FolderId,
        path: PathBuf,
        len: u64,
        mtime: Time,
        version: String,
        content: Content,
    ) -> Node {
        let file = Some(NodeFile::unopened(content, version, None));
        let node = Node::new(ino, folder, path, len, mtime, file);
        node.set_outdated();
        node
    }

    /// Notes that the source of the file was found changed or replaced.
    pub(crate) fn set_outdated(&self) {
        self.outdated.store(true, Ordering::SeqCst);
    }

    /// Time of the last change in seconds and nanoseconds.
    pub(crate) fn mtime_parts(&self) -> Time {
        match self.mtime().duration_since(UNIX_EPOCH) {
            Ok(since) => (since.as_secs() as i64, i64::from(since.subsec_nanos())),
            Err(before) => (-(before.duration().as_secs() as i64), 0),
        }
    }

    /// Version of the source at the last open.
    pub(crate) fn last(&self) -> Option<Version> {
        *self.file.as_ref()?.last.lock()
    }

    /// Sets the version of the source at the last open.
    pub(crate) fn set_last(&self, last_version: Version) {
        if let Some(file) = &self.file {
            *file.last.lock() = Some(last_version);
        }
    }

    /// Opens the file with `content`. All later opens share the result.
    ///
    /// # Errors
    /// If a source cannot be opened.
    pub(crate) fn open_with(
        &self,
        content: OpenContent,
        watcher: &Arc<Watcher>,
        service: &Service,
    ) -> Result<Arc<OpenFile>> {
        self.set_opened();
        let opened = Arc::new(OpenFile::new(self.hold(content, watcher, service)?));
        if let Some(file) = &self.file {
            *file.open.lock() = Arc::downgrade(&opened);
        }
        Ok(opened)
    }
}
