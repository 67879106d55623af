//! A new file that is written at any place, past the page cache if that is possible.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};

use crate::source::FileSystem;
use crate::sync::Mutex;

/// Offsets, lengths and memory of writes past the page cache are multiples of this.
pub(super) const ALIGN: usize = 4096;

/// Files below this size are written through the page cache.
const DIRECT_MIN: u64 = 16 << 20;

/// A file that is being written.
pub(super) struct Target<'a> {
    file: &'a File,
    /// Whether writes go past the page cache.
    direct: AtomicBool,
    /// The last bytes of the file, which do not fill a block, and their offset.
    tail: Mutex<Option<(u64, Vec<u8>)>>,
}

impl<'a> Target<'a> {
    /// Prepares `file`, which is in `folder`, for `len` bytes, and reserves their space, so that a
    /// full disk is reported at once.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn new(file: &'a File, folder: &Path, len: u64) -> io::Result<Target<'a>> {
        let file_system = reserve_space(file, folder, len)?;
        let direct = len >= DIRECT_MIN && file_system.is_local() && !file_system.is_in_memory();
        let direct = direct && set_direct(file, true);
        Ok(Target { file, direct: AtomicBool::new(direct), tail: Mutex::default() })
    }

    /// Whether writes go past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Writes `bytes` at `offset`, a multiple of `ALIGN`. Bytes that end within a block are the
    /// last of the file. The bytes are in the file after `finish`.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self.is_direct() && bytes.as_ptr().addr().is_multiple_of(ALIGN) {
            let (blocks, tail) = bytes.split_at(bytes.len() / ALIGN * ALIGN);
            match self.file.write_all_at(blocks, offset) {
                // The device wants larger blocks.
                Err(e) if e.raw_os_error() == Some(Errno::EINVAL as i32) => self.leave_direct()?,
                Err(e) => return Err(e),
                Ok(()) => {
                    if !tail.is_empty() {
                        *self.tail.lock() = Some((offset + blocks.len() as u64, tail.to_vec()));
                    }
                    return Ok(());
                }
            }
        }
        self.file.write_all_at(bytes, offset)
    }

    /// Writes through the page cache from now on.
    fn leave_direct(&self) -> io::Result<()> {
        if self.direct.swap(false, Ordering::Relaxed) && !set_direct(self.file, false) {
            return Err(io::Error::other("the file stays open for direct writes only"));
        }
        Ok(())
    }

    /// Writes the rest, and waits until the disk has the file.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn finish(&self) -> io::Result<()> {
        if let Some((offset, tail)) = self.tail.lock().take() {
            self.leave_direct()?;
            self.file.write_all_at(&tail, offset)?;
        }
        self.file.sync_all()
    }

    /// Prepares reads of the file that come from the disk, not from the page cache, if possible.
    pub(super) fn read_back(&self) {
        let _ = self.leave_direct();
        read_back(self.file);
    }

    /// Reads bytes of the finished file.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }
}

/// Reserves the space of `file`, a new file in `folder`, for `len` bytes, so that a full disk is
/// reported at once.
///
/// # Errors
/// The errors of the file system.
pub(super) fn reserve_space(file: &File, folder: &Path, len: u64) -> io::Result<FileSystem> {
    let file_system = FileSystem::at(folder);
    // Pages that fallocate(2) makes in memory are made before the bytes are there: that costs time,
    // and the check of the free space is exact there.
    if file_system.is_in_memory() {
        file.set_len(len)?;
    } else {
        reserve(file, len)?;
    }
    Ok(file_system)
}

/// Drops the pages of `file`, so that it is read from the disk.
pub(super) fn read_back(file: &File) {
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    let _ = nix::fcntl::posix_fadvise(file, 0, 0, advice);
}

/// Turns writes past the page cache on or off. Returns whether the file system did it.
fn set_direct(file: &File, on: bool) -> bool {
    let Ok(flags) = fcntl(file, FcntlArg::F_GETFL) else { return false };
    let mut flags = OFlag::from_bits_retain(flags);
    flags.set(OFlag::O_DIRECT, on);
    fcntl(file, FcntlArg::F_SETFL(flags)).is_ok()
}

fn reserve(file: &File, len: u64) -> io::Result<()> {
    let signed = i64::try_from(len).map_err(io::Error::other)?;
    if len == 0 {
        return Ok(());
    }
    match fallocate(file, FallocateFlags::empty(), 0, signed) {
        Ok(()) => Ok(()),
        Err(e @ (Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG | Errno::EIO)) => Err(e.into()),
        // Not all file systems support it.
        Err(_) => file.set_len(len),
    }
}
