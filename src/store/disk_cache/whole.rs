//! Objects that are in the cache as a whole. Their data files are served as local files.
//!
//! A process that serves a data file has a shared lock on it. This lock keeps processes that make room from
//! truncating the file. So the bytes stay as long as a descriptor or a mapping of the file exists, even after the name
//! of the file was removed.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::Arc;

use nix::libc;

use super::object::{CachedObject, gone_is_fine};
use crate::error::{real_name, shown};
use crate::source::FileSystem;

impl CachedObject {
    /// Whether this process knows all blocks, and all bytes have reached the disk. If all blocks are known but
    /// not yet on the disk, a thread begins a sync. Never waits.
    pub(super) fn is_whole(self: &Arc<CachedObject>) -> bool {
        if self.known.are_synced() {
            return true;
        }
        if let Some(sync) = self.known.begin_sync() {
            let object = self.clone();
            let thread = std::thread::Builder::new().name("tensorfs-sync".to_owned());
            if thread.spawn(move || object.sync(sync)).is_err() {
                self.known.end_sync(sync, false);
            }
        }
        false
    }

    /// Syncs the data file. If the disk loses bytes, the error appears here, and not in a later read.
    fn sync(&self, sync: u64) {
        let synced = self.data.sync_data();
        if let Err(e) = &synced {
            tracing::warn!("{}: the disk cache has lost bytes: {e}", shown(&self.key().url));
            if self.is_linked() {
                let _ = gone_is_fine(std::fs::remove_file(self.path()));
            }
        }
        self.known.end_sync(sync, synced.is_ok());
    }

    /// Whether the map still has the checksums of all blocks. Other processes remove damaged blocks from it.
    fn has_all_sums(&self) -> bool {
        let mut next = 0;
        let counted = self.each_sum(|block, _| {
            (next..block).for_each(|damaged| self.known.remove(damaged));
            next = block + 1;
        });
        (next..self.blocks().end).for_each(|damaged| self.known.remove(damaged));
        counted.is_ok() && self.known.are_synced()
    }

    /// Opens the data file of the object, for which `is_whole` was true. `None` if the object is damaged or was
    /// removed.
    pub(super) fn whole_file(&self) -> Option<File> {
        if !self.is_linked() {
            return None;
        }
        let path = &self.data_path;
        // A network file system could make page faults wait for another machine without a deadline.
        if !FileSystem::at(path).is_local() {
            return None;
        }
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
        // The lock belongs to the open file description. It ends with the last descriptor or mapping of it.
        file.try_lock_shared().ok()?;
        let (found, own) = (file.metadata().ok()?, self.data.metadata().ok()?);
        // A process that removes the object unlinks the name first, and then truncates the file while it holds its own
        // lock.
        let is_own = (found.dev(), found.ino()) == (own.dev(), own.ino());
        if !is_own || found.nlink() == 0 || found.len() != self.key().len {
            return None;
        }
        if !self.has_all_sums() {
            return None;
        }
        tracing::debug!("{}: served from {}", shown(&self.key().url), real_name(path));
        Some(file)
    }
}
