//! Memory that reads put bytes into for good: on huge pages where they are to be had, faulted in
//! by whoever writes first.

use std::fmt;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use nix::libc;

use super::arena::HUGE;
use super::buffer::{ALIGN, Lease};

/// Memory that is filled by reads and then read only.
pub struct Region {
    mapping: (NonNull<u8>, usize),
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the region alone; see `put` and `lease` for who writes.
unsafe impl Send for Region {}
// SAFETY: likewise. It is read through `Memory` only, which nobody writes to.
unsafe impl Sync for Region {}

impl Region {
    /// Zeros, at least `len` bytes of them.
    ///
    /// # Errors
    /// Where the system has no such memory.
    pub fn new(len: u64) -> io::Result<Arc<Region>> {
        let no_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
        let len = usize::try_from(len).map_err(|_| no_memory())?.max(1);
        let len = len.checked_next_multiple_of(ALIGN as usize).ok_or_else(no_memory)?;
        // Whole huge pages, if it has any: a neighbour on the last one would share it.
        let huge = len >= HUGE;
        let mapped = if huge { len.checked_add(HUGE).ok_or_else(no_memory)? } else { len };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping; no memory in use is touched.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast::<u8>()).ok_or_else(no_memory)?;
        let skip = if huge { at.as_ptr().align_offset(HUGE) } else { 0 };
        // SAFETY: `skip` is less than HUGE, by which the mapping is longer than `len`.
        let start = unsafe { at.add(skip) };
        if huge {
            // SAFETY: the range lies in the mapping just made. It is slower without.
            unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        }
        Ok(Arc::new(Region { mapping: (at, mapped), start, len }))
    }

    /// Its length in bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes; it always has.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Lets a fetch read into bytes `range`, whole pages, instead of memory that `lease` is for.
    ///
    /// # Safety
    /// Nobody else writes to these bytes from now on, and nobody reads them before the fetch has
    /// come back.
    pub(crate) unsafe fn lease(self: &Arc<Self>, range: Range<usize>, lease: Lease) -> Lease {
        let aligned = [range.start, range.end].iter().all(|at| at.is_multiple_of(ALIGN as usize));
        assert!(aligned && range.start < range.end && range.end <= self.len, "pages of the region");
        // SAFETY: `range` lies in the region.
        let start = unsafe { self.start.add(range.start) };
        lease.at(Place { start, len: range.len(), _region: self.clone() })
    }

    /// Copies `bytes` to `at`.
    ///
    /// # Safety
    /// Nobody reads these bytes or writes to them at the same time.
    pub(crate) unsafe fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at <= self.len && bytes.len() <= self.len - at, "bytes of the region");
        // SAFETY: the bytes lie in the region, and nobody else uses them now; it was not lent out
        // as a slice, so that nothing overlaps.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(at), bytes.len());
        }
    }

    /// The region as memory that does not change any more, if no read can still write to it.
    pub fn finish(self: Arc<Self>) -> Option<Memory> {
        Arc::into_inner(self).map(|region| Memory(Arc::new(region)))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `new`, which nobody refers to any more.
        unsafe { libc::munmap(self.mapping.0.as_ptr().cast(), self.mapping.1) };
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.len)
    }
}

/// Pages of a region that one fetch reads into.
pub(super) struct Place {
    pub(super) start: NonNull<u8>,
    pub(super) len: usize,
    /// Lives as long.
    _region: Arc<Region>,
}

// SAFETY: whoever has the place is the only one to write to its bytes: see `Region::lease`.
unsafe impl Send for Place {}
// SAFETY: likewise; they are written through `&mut` only.
unsafe impl Sync for Place {}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Place({} bytes)", self.len)
    }
}

/// Filled memory; clones are the same bytes.
#[derive(Clone, Debug)]
pub struct Memory(Arc<Region>);

impl std::ops::Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes of the mapping, zeros where nothing was written; nobody writes.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }
}
