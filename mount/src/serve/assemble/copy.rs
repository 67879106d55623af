//! Writing the bytes of a virtual file into a copy, and reading a copy back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use sha2::{Digest, Sha256};
use tensorfs::Error;
use tensorfs::internal::hash::hex;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::sweep::{RANGE_MAX, Sweep};

use super::entry::CopyFailure;
use super::folder::Partial;

/// Number of bytes of a copy that are read back at a time.
const STEP: usize = 8 << 20;

/// Number of dirty bytes after which the copy is flushed to the disk. With more dirty bytes, other
/// writers would wait, and pages of other files would be evicted from the page cache.
const FLUSH: u64 = 64 << 20;

/// Called after every step with the number of bytes done and the duration of the step. The function
/// may wait, or stop the copying by an error.
pub(super) type Throttle<'a> = &'a dyn Fn(u64, Duration) -> Result<(), CopyFailure>;

/// Writes all bytes of `reader` into `partial`. Returns the checksum of the bytes.
pub(super) fn fill(
    partial: &Partial,
    reader: &Reader,
    sweep: &Sweep,
    throttle: Throttle<'_>,
) -> Result<String, CopyFailure> {
    let fail = |e| CopyFailure::Folder("write to", e);
    let mut hash = Sha256::new();
    let (mut offset, mut flushed) = (0, 0);
    while offset < partial.len {
        let started = Instant::now();
        let end = partial.len.min(offset + RANGE_MAX);
        let bytes = sweep.read(reader, &(offset..end)).map_err(|error| match error {
            Error::Cancelled { .. } => CopyFailure::Stopped,
            error => CopyFailure::Source(error),
        })?;
        hash.update(&bytes[..]);
        partial.file().write_all_at(&bytes, offset).map_err(fail)?;
        offset = end;
        if offset - flushed >= FLUSH {
            partial.file().sync_data().map_err(fail)?;
            forget_cached(partial.file());
            flushed = offset;
        }
        throttle(offset, started.elapsed())?;
    }
    partial.file().sync_all().map_err(fail)?;
    Ok(hex(&hash.finalize()))
}

/// The checksum of the first `len` bytes of a file. They are read from the disk if possible.
pub(super) fn checksum(
    file: &File,
    len: u64,
    throttle: Throttle<'_>,
) -> Result<String, CopyFailure> {
    forget_cached(file);
    let mut hash = Sha256::new();
    let mut buffer = vec![0; STEP];
    let mut offset = 0;
    while offset < len {
        let started = Instant::now();
        let wanted = (len - offset).min(STEP as u64) as usize;
        let read = file.read_exact_at(&mut buffer[..wanted], offset);
        read.map_err(|e| CopyFailure::Folder("read back from", e))?;
        hash.update(&buffer[..wanted]);
        offset += wanted as u64;
        throttle(offset, started.elapsed())?;
    }
    Ok(hex(&hash.finalize()))
}

/// Drops the clean pages of a file from the page cache, so that reads come from the disk. A tmpfs
/// has no disk.
fn forget_cached(file: &File) {
    let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    if let Err(e) = posix_fadvise(file, 0, 0, advice) {
        tracing::debug!("the page cache of a copy stays: {e}");
    }
}
