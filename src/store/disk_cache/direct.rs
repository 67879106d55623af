//! Reads of the files of a disk cache with `O_DIRECT`, past the page cache.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

use crate::source::FileSystem;
use crate::source::page_cache::ALIGN;

/// A second descriptor of a file, opened with `O_DIRECT` at the first read.
#[derive(Debug, Default)]
pub(super) struct DirectFile {
    file: OnceLock<Option<File>>,
    is_refused: AtomicBool,
}

impl DirectFile {
    /// Fills `place` with bytes of `file`, whose path is `path`, past the page cache. Returns whether that was
    /// possible.
    pub(super) fn read(&self, file: &File, path: &Path, at: u64, place: &mut [u8]) -> bool {
        let is_aligned = (place.as_ptr() as usize).is_multiple_of(ALIGN as usize)
            && place.len().is_multiple_of(ALIGN as usize)
            && at.is_multiple_of(ALIGN);
        if !is_aligned || self.is_refused.load(Ordering::Relaxed) {
            return false;
        }
        let Some(direct) = self.file.get_or_init(|| open_again(file, path)) else { return false };
        let read = direct.read_exact_at(place, at);
        if read.as_ref().is_err_and(is_refusal) {
            self.is_refused.store(true, Ordering::Relaxed);
        }
        read.is_ok()
    }
}

fn is_refusal(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Opens `file` with `O_DIRECT`. `None` if this is not possible, or if `O_DIRECT` has no advantage on the file system.
fn open_again(file: &File, path: &Path) -> Option<File> {
    let file_system = FileSystem::at(path);
    if !file_system.is_local() || file_system.is_in_memory() {
        return None;
    }
    let flags = libc::O_DIRECT | libc::O_CLOEXEC;
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(flags).open(again).ok()
}
