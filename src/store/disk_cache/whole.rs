//! Objects that are in the cache as a whole: their files are served as local files.
//!
//! A shared lock of the file with the bytes keeps those who make room from cutting it. So the bytes
//! stay for as long as a descriptor or a mapping of it is open, also without a name.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::Arc;

use nix::libc;

use super::object::{CachedObject, gone_is_fine};
use crate::error::{real_name, shown};
use crate::source::FileSystem;

impl CachedObject {
    /// Whether this process knows each block, and all have reached the disk. If they have not, it begins to
    /// bring them there. Never waits.
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

    /// Brings the bytes to the disk. A disk that loses them says so here, and not when they are read.
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

    /// Whether the map has all blocks. Other processes take damaged ones out.
    fn has_all_sums(&self) -> bool {
        let mut next = 0;
        let counted = self.each_sum(|block, _| {
            (next..block).for_each(|damaged| self.known.remove(damaged));
            next = block + 1;
        });
        (next..self.blocks().end).for_each(|damaged| self.known.remove(damaged));
        counted.is_ok() && self.known.are_synced()
    }

    /// A file with all bytes of the object, which `is_whole`. `None` if it is damaged or was removed.
    pub(super) fn whole_file(&self) -> Option<File> {
        if !self.is_linked() {
            return None;
        }
        let path = self.data_path();
        // The kernel would wait for another machine, without a deadline.
        if !FileSystem::at(path).is_local() {
            return None;
        }
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
        // The lock belongs to the open file, and ends with its last descriptor or mapping.
        file.try_lock_shared().ok()?;
        let (found, own) = (file.metadata().ok()?, self.data.metadata().ok()?);
        // Those who remove it take the name first and cut it then, with a lock of their own.
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
