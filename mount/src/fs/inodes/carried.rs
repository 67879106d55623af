//! Nodes that the kernel refers to, as they are handed over to the next process and taken up there.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tensorfs::internal::checkpoint::FolderId;
use tensorfs::internal::sync::Mutex;
use tensorfs::internal::version::Version;

use super::super::node::Node;
use super::Nodes;

/// Facts about a file of the previous process, until this process lists the file.
#[derive(Debug)]
pub(crate) struct FileMark {
    pub(crate) version: String,
    /// Number of the kernel's lookups.
    pub(crate) lookups: u64,
    /// Whether the file was opened, so that the kernel may have cached pages of it.
    pub(crate) opened: bool,
    /// Whether the source of the file was found changed. If so, this version must not be used
    /// again.
    pub(crate) outdated: bool,
    /// Version of its source at the last open.
    pub(crate) last: Option<Version>,
    /// Versions of its sources.
    pub(crate) known: Vec<Version>,
}

/// The marks by inode number.
#[derive(Debug, Default)]
pub(super) struct FileMarks(Mutex<HashMap<u64, FileMark>>);

impl FileMarks {
    /// Whether the previous process found the version of `node` changed.
    pub(super) fn is_outdated(&self, node: &Node) -> bool {
        let marks = self.0.lock();
        let mark = marks.get(&node.ino);
        mark.is_some_and(|mark| mark.outdated && mark.version == node.listed_version())
    }

    /// Whether the previous process showed this file in this version. Calls `node` only if there are
    /// marks.
    pub(super) fn has(&self, node: impl FnOnce() -> Arc<Node>) -> bool {
        if self.0.lock().is_empty() {
            return false;
        }
        let node = node();
        let marks = self.0.lock();
        let mark = marks.get(&node.ino);
        mark.is_some_and(|mark| !mark.outdated && mark.version == node.listed_version())
    }

    /// Sets a new node to the state that the previous process had recorded for this version. A
    /// change of the source since then is found at the next check.
    pub(super) fn apply(&self, node: &Node) {
        let Some(content) = node.content() else { return };
        let mut marks = self.0.lock();
        if marks.get(&node.ino).is_none_or(|mark| mark.version != node.listed_version()) {
            return;
        }
        let Some(mark) = marks.remove(&node.ino) else { return };
        drop(marks);
        node.lookups.fetch_add(mark.lookups, Ordering::Relaxed);
        if !mark.opened {
            return;
        }
        node.set_opened();
        mark.last.into_iter().for_each(|last| node.set_last(last));
        content
            .sources()
            .iter()
            .zip(mark.known)
            .for_each(|(source, known)| source.set_known(known));
    }

    /// Subtracts `times` from the lookup count of a file that is not listed yet. At 0 the mark is
    /// removed: the kernel has no pages of a file that it has forgotten.
    pub(super) fn forget(&self, ino: u64, times: u64) {
        let mut marks = self.0.lock();
        if let Some(mark) = marks.get_mut(&ino) {
            mark.lookups = mark.lookups.saturating_sub(times);
            if mark.lookups == 0 {
                marks.remove(&ino);
            }
        }
    }
}

impl Nodes {
    /// The nodes that the kernel refers to.
    pub(crate) fn known(&self) -> Vec<Arc<Node>> {
        let by_ino = self.by_ino.read();
        let known = by_ino.values().filter(|node| node.lookups.load(Ordering::Relaxed) > 0);
        known.cloned().collect()
    }

    /// Calls `each` with the marks of files that this process has not listed and that the kernel
    /// refers to.
    pub(crate) fn each_mark(&self, mut each: impl FnMut(u64, &FileMark)) {
        let by_ino = self.by_ino.read();
        let marks = self.marks.0.lock();
        let left = marks.iter().filter(|(ino, mark)| mark.lookups > 0 && !by_ino.contains_key(ino));
        left.for_each(|(ino, mark)| each(*ino, mark));
    }

    /// Stores the mark of a file of the previous process until the file is listed here.
    pub(crate) fn mark(&self, ino: u64, mark: FileMark) {
        self.marks.0.lock().insert(ino, mark);
    }

    /// The folder at `path` in the mount.
    pub(crate) fn folder_at(&self, path: &Path) -> Option<FolderId> {
        path.iter().try_fold(0, |id, name| {
            let folder = self.tree.contains(id).then(|| self.tree.folder(id))?;
            folder.children.iter().find(|(child, _)| child == name).map(|(_, child)| *child)
        })
    }

    /// Adds `lookups` to the lookup count of the folder at `path`, if its inode number is `ino`.
    /// Programs that have this folder as their working directory do not look it up again.
    pub(crate) fn know_folder(&self, path: &Path, ino: u64, lookups: u64) {
        let node = self.folder_at(path).and_then(|id| self.folder(id));
        if let Some(node) = node.filter(|node| node.ino == ino) {
            node.lookups.fetch_add(lookups, Ordering::Relaxed);
        }
    }

    /// Registers a node that the previous process made, by its inode number.
    pub(crate) fn insert_carried(&self, node: Arc<Node>) {
        let mark = self.marks.0.lock().remove(&node.ino);
        node.lookups.fetch_add(mark.map_or(0, |mark| mark.lookups), Ordering::Relaxed);
        self.by_ino.write().insert(node.ino, node);
    }
}
