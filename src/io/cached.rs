//! What the kernel's page cache holds: asked for and copied without a read of the disk and
//! without waiting.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

use nix::libc;

use super::buffer::{ALIGN, pages_around};

/// The number of cachestat(2), the same on all machines but Alpha; Linux 6.5 and later.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range`.
#[repr(C)]
struct CachestatRange {
    off: u64,
    len: u64,
}

/// `struct cachestat`, in pages.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Bytes per page of the page cache.
fn page_len() -> u64 {
    static LEN: OnceLock<u64> = OnceLock::new();
    *LEN.get_or_init(|| {
        // SAFETY: no memory is passed.
        let len = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        u64::try_from(len).unwrap_or(ALIGN)
    })
}

/// How many pages of `range` the cache holds, and of how many; None where the kernel does not
/// say: before 6.5, and of files that are neither the caller's nor open for writing.
pub(super) fn cached_pages(file: &File, range: &Range<u64>) -> Option<(u64, u64)> {
    let page = page_len();
    let around = pages_around(range);
    if around.is_empty() {
        // A length of zero would mean up to the end.
        return Some((0, 0));
    }
    let asked = CachestatRange { off: around.start, len: around.end - around.start };
    let mut found = Cachestat::default();
    // SAFETY: both structures are laid out as the system call wants them and outlive it.
    let rc = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut found, 0)
    };
    let pages = around.end.div_ceil(page) - around.start / page;
    (rc == 0).then_some((found.cached, pages))
}

/// Copies the bytes at `offset` as far as they can be had at once. Returns whether that is all.
pub(super) fn copy_cached(file: &File, offset: u64, target: &mut [u8]) -> bool {
    let mut done = 0;
    while done < target.len() {
        let rest = &mut target[done..];
        let io = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let Ok(at) = libc::off_t::try_from(offset + done as u64) else {
            return false;
        };
        // SAFETY: `io` describes `rest`, which is borrowed for as long as the call lasts.
        let n = unsafe { libc::preadv2(file.as_raw_fd(), &raw const io, 1, at, libc::RWF_NOWAIT) };
        match usize::try_from(n) {
            Ok(n) if n > 0 => done += n,
            _ => return false,
        }
    }
    true
}
