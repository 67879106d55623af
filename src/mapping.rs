//! New memory of the process. The system provides each page when it is first written to.

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// Size of a huge page on most machines, in bytes. On other machines it is only a unit for calculations.
pub(crate) const HUGE: usize = 2 << 20;

/// A private mapping of zero bytes. It is unmapped when this value is dropped.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    mapped: usize,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: only the owner of this value uses the mapping, and it may do so on any thread.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `len` bytes. If they are at least as long as a huge page, they begin at a multiple of its size.
    ///
    /// # Errors
    /// If the system does not provide the memory.
    pub(crate) fn new(len: usize) -> io::Result<Mapping> {
        let no_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
        let spare = if len >= HUGE { HUGE } else { 0 };
        let mapped = len.checked_add(spare).ok_or_else(no_memory)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        let length = NonZeroUsize::new(mapped).ok_or_else(no_memory)?;
        // SAFETY: this creates a new private mapping and changes no memory in use.
        let base = unsafe { mmap_anonymous(None, length, protection, flags) }?.cast::<u8>();
        let skip = if spare > 0 { base.as_ptr().align_offset(HUGE) } else { 0 };
        // SAFETY: the mapping is `HUGE` longer than `len`, and `skip` is less than `HUGE`.
        let start = unsafe { base.add(skip) };
        Ok(Mapping { base, mapped, start, len })
    }

    /// The first byte of the mapping.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Tells the kernel how the bytes are used. If the kernel does not accept the advice, accesses are only slower.
    pub(crate) fn advise(&self, advice: MmapAdvise) {
        // SAFETY: the range lies in the mapping. The advice concerns pages and changes no bytes.
        let _ = unsafe { madvise(self.start.cast(), self.len, advice) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` created the mapping, and all pointers into it belong to values that keep it alive.
        let _ = unsafe { munmap(self.base.cast(), self.mapped) };
    }
}
