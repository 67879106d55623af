//! Access to the kernel's page cache: which pages of a file it has, and copies of them without a read of the
//! disk and without waiting.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

use crate::zeros::are_zeros;

/// Alignment in bytes that O_DIRECT needs for offsets, lengths and memory addresses, on every file system that
/// supports it.
pub(crate) const ALIGN: u64 = 4096;

/// `range`, extended to whole pages.
pub(crate) fn pages_around(range: &Range<u64>) -> Range<u64> {
    range.start / ALIGN * ALIGN..range.end.next_multiple_of(ALIGN)
}

/// The system call number of cachestat(2), which exists since Linux 6.5. It is the same on all architectures
/// except Alpha.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of the kernel.
#[repr(C)]
struct CachestatRange {
    off: u64,
    len: u64,
}

/// `struct cachestat` of the kernel. The fields are numbers of pages.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Length of a page of the page cache in bytes.
fn page_len() -> u64 {
    static LEN: OnceLock<u64> = OnceLock::new();
    *LEN.get_or_init(|| {
        let len = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE);
        len.ok().flatten().and_then(|len| u64::try_from(len).ok()).unwrap_or(ALIGN)
    })
}

/// Set when the kernel has answered that it does not know cachestat(2).
static NO_CACHESTAT: AtomicBool = AtomicBool::new(false);

/// The page cache has most of a range if at most 1 / `CACHED_PARTS` of the pages are missing.
const CACHED_PARTS: u64 = 8;

/// The part of a range that is in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedPages {
    /// Number of pages in the page cache.
    pub cached: u64,
    /// Number of pages of the range, or of the sample of it.
    pub all: u64,
}

impl CachedPages {
    /// Whether the whole range is in the page cache.
    pub fn is_all(self) -> bool {
        self.cached >= self.all
    }

    /// Whether most of the range is in the page cache, so that a read through the page cache is faster than a read past
    /// it.
    pub fn is_most(self) -> bool {
        self.all.saturating_sub(self.cached) * CACHED_PARTS <= self.all
    }
}

/// Number of pages in a sample, if the kernel does not report numbers.
const SAMPLES: u64 = 16;

/// The part of `range` that is in the page cache. For a file that the caller neither owns nor may write, it is
/// estimated from a sample of pages. `None` if the kernel does not report anything.
pub fn cached_pages(file: &File, range: &Range<u64>) -> Option<CachedPages> {
    let page = page_len();
    if are_zeros(range.start) {
        // This range stands for zeros that no file contains, which need no read.
        let all = (range.end - range.start).div_ceil(page);
        return Some(CachedPages { cached: all, all });
    }
    let around = pages_around(range);
    if around.is_empty() {
        // For cachestat(2), the length zero would mean the rest of the file.
        return Some(CachedPages { cached: 0, all: 0 });
    }
    let pages = around.start / page..around.end.div_ceil(page);
    let counted = if NO_CACHESTAT.load(Ordering::Relaxed) {
        mincore_pages(file, &pages)
    } else {
        cachestat_pages(file, &around).or_else(|| mincore_pages(file, &pages))
    };
    let all = pages.end - pages.start;
    match counted {
        Some(cached) => Some(CachedPages { cached, all }),
        None => sampled_pages(file, &pages),
    }
}

/// The number of cached pages that cachestat(2) reports.
fn cachestat_pages(file: &File, around: &Range<u64>) -> Option<u64> {
    let cached = cachestat(file, around);
    if cached.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::ENOSYS)) {
        NO_CACHESTAT.store(true, Ordering::Relaxed);
    }
    cached.ok()
}

/// Checks whether cachestat(2) can be used, by a call of it for a new file in memory.
///
/// # Errors
/// The error of the kernel, if not.
pub fn probe_cachestat() -> io::Result<()> {
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let file = File::from(nix::sys::memfd::memfd_create("tensorfs", flags)?);
    cachestat(&file, &(0..ALIGN)).map(drop)
}

fn cachestat(file: &File, around: &Range<u64>) -> io::Result<u64> {
    let asked = CachestatRange { off: around.start, len: around.end - around.start };
    let mut found = Cachestat::default();
    // SAFETY: both structures have the layout that the system call expects, and outlive the call.
    let rc = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut found, 0)
    };
    if rc == 0 { Ok(found.cached) } else { Err(io::Error::last_os_error()) }
}

/// The number of cached pages that mincore(2) reports for a new mapping, for kernels before 6.5. The memory of
/// the mapping is never accessed.
fn mincore_pages(file: &File, pages: &Range<u64>) -> Option<u64> {
    // For a file of another user, mincore(2) reports that all pages are cached.
    let user = nix::unistd::geteuid();
    if !user.is_root() && user.as_raw() != file.metadata().ok()?.uid() {
        return None;
    }
    let mut found = vec![0_u8; usize::try_from(pages.end - pages.start).ok()?];
    let len = found.len() * usize::try_from(page_len()).ok()?;
    let file_offset = libc::off_t::try_from(pages.start * page_len()).ok()?;
    let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: the mapping is new, and no reference to its memory exists. `found` has one byte for each of its
    // pages. The mapping is removed with the same address and length.
    let rc = unsafe {
        let start =
            libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), file_offset);
        if start == libc::MAP_FAILED {
            return None;
        }
        let rc = libc::mincore(start, len, found.as_mut_ptr());
        libc::munmap(start, len);
        rc
    };
    (rc == 0).then(|| found.iter().map(|page| u64::from(page & 1)).sum())
}

/// Asks the kernel to read these bytes of a file into the page cache. Does not wait for them.
pub(crate) fn read_ahead(file: &File, bytes: &Range<u64>) {
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_WILLNEED;
    let (start, len) = (bytes.start as libc::off_t, (bytes.end - bytes.start) as libc::off_t);
    let _ = nix::fcntl::posix_fadvise(file, start, len, advice);
}

/// The number of cached pages in a sample of `pages`. Each page is tried with a read of one byte that does not
/// wait. If most of the sample is not cached, the number is 0.
fn sampled_pages(file: &File, pages: &Range<u64>) -> Option<CachedPages> {
    // A read of a missing page starts the kernel's readahead. The new descriptor disables readahead.
    let file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_RANDOM;
    nix::fcntl::posix_fadvise(&file, 0, 0, advice).ok()?;
    let n_pages = pages.end - pages.start;
    let all = n_pages.min(SAMPLES);
    let mut found = CachedPages { cached: all, all };
    for number in 0..all {
        let page = pages.start + (2 * number + 1) * n_pages / (2 * all);
        if !copy_cached(&file, page * page_len(), &mut [0]) {
            found.cached -= 1;
        }
        if !found.is_most() {
            return Some(CachedPages { cached: 0, all });
        }
    }
    Some(found)
}

/// Copies the cached bytes at `offset` to `target` without waiting. Returns whether all of `target` was filled.
pub(crate) fn copy_cached(file: &File, offset: u64, target: &mut [u8]) -> bool {
    if are_zeros(offset) {
        target.fill(0);
        return true;
    }
    let mut done = 0;
    while done < target.len() {
        let rest = &mut target[done..];
        let io = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let Ok(file_offset) = libc::off_t::try_from(offset + done as u64) else {
            return false;
        };
        // SAFETY: `io` describes `rest`, which is borrowed until the call returns.
        let n = unsafe {
            libc::preadv2(file.as_raw_fd(), &raw const io, 1, file_offset, libc::RWF_NOWAIT)
        };
        match usize::try_from(n) {
            Ok(n) if n > 0 => done += n,
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn both_ways_of_asking_say_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        File::create(&path).unwrap().write_all(&[1; 40_000]).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(mincore_pages(&file, &(2..9)), Some(7));
        file.sync_all().unwrap();
        let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        nix::fcntl::posix_fadvise(&file, 0, 0, advice).unwrap();
        let Some(cached) = cachestat_pages(&file, &(0..40_960)) else {
            eprintln!("skipped: no cachestat here");
            return;
        };
        assert_eq!(mincore_pages(&file, &(0..10)), Some(cached));
        file.read_exact_at(&mut [0; 100], 0).unwrap();
        assert_eq!(mincore_pages(&file, &(0..10)), cachestat_pages(&file, &(0..40_960)));
    }

    #[test]
    fn a_sample_finds_what_is_cached_and_reads_nothing_ahead() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        File::create(&path).unwrap().write_all(&[1; 1 << 20]).unwrap();
        let file = File::open(&path).unwrap();
        let sample = |pages| sampled_pages(&file, &pages).unwrap();
        assert_eq!(sample(0..256), CachedPages { cached: 16, all: 16 });
        assert_eq!(sample(3..5), CachedPages { cached: 2, all: 2 });
        file.sync_all().unwrap();
        let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        nix::fcntl::posix_fadvise(&file, 0, 0, advice).unwrap();
        let Some(0) = mincore_pages(&file, &(0..256)) else {
            eprintln!("skipped: the file system keeps everything cached");
            return;
        };
        assert_eq!(sample(0..256), CachedPages { cached: 0, all: 16 });
        let read = mincore_pages(&file, &(0..256)).unwrap();
        assert!(read <= 3, "readahead was started: {read} pages");
    }
}
