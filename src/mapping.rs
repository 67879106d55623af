//! New memory of the process, which the system gives page by page when it is written to.

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// Bytes of a huge page on most machines; elsewhere only a unit of reckoning.
pub(crate) const HUGE: usize = 2 << 20;

/// A private mapping of zero bytes, which ends with its owner.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    mapped: usize,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to its owner alone, on whatever thread it is.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `len` bytes, which begin on a huge page if they fill one.
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub(crate) fn new(len: usize) -> io::Result<Mapping> {
        let no_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
        let spare = if len >= HUGE { HUGE } else { 0 };
        let mapped = len.checked_add(spare).ok_or_else(no_memory)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        let length = NonZeroUsize::new(mapped).ok_or_else(no_memory)?;
        // SAFETY: a new private mapping; no memory in use is touched.
        let base = unsafe { mmap_anonymous(None, length, protection, flags) }?.cast::<u8>();
        let skip = if spare > 0 { base.as_ptr().align_offset(HUGE) } else { 0 };
        // SAFETY: `skip` is less than HUGE, by which the mapping is longer than `len`.
        let start = unsafe { base.add(skip) };
        Ok(Mapping { base, mapped, start, len })
    }

    /// Its first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Tells the kernel how the bytes are used. If it takes no advice, they are only slower.
    pub(crate) fn advise(&self, advice: MmapAdvise) {
        // SAFETY: the range lies in the mapping. The advice is about pages, the bytes stay.
        let _ = unsafe { madvise(self.start.cast(), self.len, advice) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, and owners of pointers into it keep it alive.
        let _ = unsafe { munmap(self.base.cast(), self.mapped) };
    }
}
