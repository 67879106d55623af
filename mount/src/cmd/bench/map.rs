//! Memory maps of files, and how much of a file the page cache holds.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A whole file, mapped shared and for reading, as safetensors maps it.
#[derive(Debug)]
pub(super) struct Map {
    start: NonNull<c_void>,
    len: usize,
}

impl Map {
    /// Maps all of `file`.
    pub(super) fn new(file: &File) -> io::Result<Map> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let Some(size) = NonZeroUsize::new(len) else {
            return Err(io::Error::other("an empty file cannot be mapped"));
        };
        // SAFETY: the kernel chooses the place, so the mapping replaces nothing; it is unmapped
        // when the `Map` is dropped and not before.
        let start =
            unsafe { mmap(None, size, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file, 0) };
        Ok(Map { start: start?, len })
    }

    /// Copies the bytes at `offset` into `target`. Where they cannot be read the process ends
    /// with SIGBUS, as every reader of a mapping does.
    pub(super) fn copy(&self, offset: usize, target: &mut [u8]) {
        let end = offset.checked_add(target.len()).filter(|end| *end <= self.len);
        assert!(end.is_some(), "{} bytes at {offset} of {}", target.len(), self.len);
        // SAFETY: the bytes lie inside the mapping, as checked, and `target` is memory of our
        // own. No reference to mapped bytes is made, so it does not matter who changes the file.
        unsafe {
            let source = self.start.as_ptr().cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len());
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made, and nothing refers to it any more.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}

/// Number of cachestat(2), the same on all architectures that Rust knows; libc names it only
/// for some.
const CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range`; a length of 0 means to the end.
#[repr(C)]
struct Range {
    offset: u64,
    len: u64,
}

/// `struct cachestat`, in pages.
#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Bytes of `file` in the page cache, in whole pages, where the kernel tells (from 6.5 on, and to
/// those who own the file or may write it).
pub(super) fn cached(file: &File) -> Option<u64> {
    let range = Range { offset: 0, len: 0 };
    let mut stat = Stat::default();
    // SAFETY: both structures are those of the kernel, live, and ours alone during the call.
    let outcome = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0u32)
    };
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??;
    (outcome == 0).then(|| stat.cached * page as u64)
}
