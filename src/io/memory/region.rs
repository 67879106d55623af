//! Memory for the bytes of a load, which stay after the load. It is on huge pages if the system has them. Its pages are
//! faulted in by the first write, or earlier on request.

use std::fmt;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use nix::sys::mman::{MmapAdvise, madvise};

use super::buffer::{ALIGN, ReadTarget, Reservation};
use crate::mapping::{HUGE, Mapping};

/// Memory that is first filled by reads and then only read.
pub struct Region {
    home: RegionOwner,
    start: NonNull<u8>,
    len: usize,
}

/// Owner of the memory.
enum RegionOwner {
    /// The region itself.
    Own(#[expect(dead_code, reason = "keeps it alive")] Mapping),
    /// The caller of `foreign`. This value keeps the memory alive.
    Foreign(#[expect(dead_code, reason = "keeps it alive")] Box<dyn Send + Sync>),
}

// SAFETY: the region is the only owner of the mapping. The callers of `target`, `unaligned` and `bytes` promise that no
// other code writes to the same bytes.
unsafe impl Send for Region {}
// SAFETY: shared access is only through `LoadedBytes`, to which nobody writes, and through `bytes`, whose
// caller is the only user.
unsafe impl Sync for Region {}

impl Region {
    /// Maps at least `len` zero bytes.
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub fn new(len: u64) -> io::Result<Arc<Region>> {
        let no_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
        let len = usize::try_from(len)
            .map_err(|_| no_memory())?
            .max(1)
            .checked_next_multiple_of(ALIGN as usize)
            .ok_or_else(no_memory)?;
        let mapping = Mapping::new(len)?;
        if len >= HUGE {
            mapping.advise(MmapAdvise::MADV_HUGEPAGE);
        }
        let start = mapping.start();
        Ok(Arc::new(Region { home: RegionOwner::Own(mapping), start, len }))
    }

    /// Wraps `len` bytes of the caller from `start` on, which is page-aligned. `keep` is dropped once no read
    /// can write there any more. This may happen on any thread.
    ///
    /// # Safety
    /// The memory lives as long as `keep`. The bytes that a plan uses are initialized, or were allocated outside of
    /// Rust. Nobody reads or writes them until `keep` is dropped or a load into the region has succeeded.
    pub unsafe fn foreign(
        start: NonNull<u8>,
        len: usize,
        keep: Box<dyn Send + Sync>,
    ) -> Arc<Region> {
        assert!(start.as_ptr().addr().is_multiple_of(ALIGN as usize), "begins on a page");
        Arc::new(Region { home: RegionOwner::Foreign(keep), start, len })
    }

    /// Advises the kernel to use huge pages wherever the region covers whole ones. Such pages are faulted in faster.
    pub fn on_huge_pages(&self) {
        self.advise(0..self.len, true);
    }

    /// Advises the kernel whether pages that are not present yet shall be huge. This concerns the whole huge
    /// pages in `range`.
    ///
    /// # Panics
    /// If `range` is not inside the region.
    pub(crate) fn advise(&self, range: Range<usize>, huge: bool) {
        assert!(range.start <= range.end && range.end <= self.len, "bytes of the region");
        // SAFETY: the range lies in the region.
        let start = unsafe { self.start.add(range.start) };
        let skip = start.as_ptr().align_offset(HUGE);
        let len = range.len().saturating_sub(skip) / HUGE * HUGE;
        if len > 0 {
            let advice = if huge { MmapAdvise::MADV_HUGEPAGE } else { MmapAdvise::MADV_NOHUGEPAGE };
            // SAFETY: the range lies in the region, and the advice does not change its bytes. If the advice
            // fails, the region is only slower.
            let _ = unsafe { madvise(start.add(skip).cast(), len, advice) };
        }
    }

    /// Faults in the pages of `range` now, so that later reads do not wait for page faults. Returns whether this
    /// succeeded. It needs Linux 5.14.
    ///
    /// # Panics
    /// If `range` is not inside the region.
    pub(crate) fn populate(&self, range: Range<usize>) -> bool {
        assert!(range.start <= range.end && range.end <= self.len, "bytes of the region");
        let start = range.start / ALIGN as usize * ALIGN as usize;
        // SAFETY: the pages lie in the region, and the call does not change their bytes.
        let done = unsafe {
            let page = self.start.add(start).cast();
            madvise(page, range.end - start, MmapAdvise::MADV_POPULATE_WRITE)
        };
        done.is_ok()
    }

    /// The address of the first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The target of a fetch into the bytes `range`, which are whole pages. `reservation` is returned to its
    /// budget when the bytes of the fetch are dropped.
    ///
    /// # Safety
    /// No other code writes to these bytes from now on, or reads them before the fetch has completed.
    pub(crate) unsafe fn target(
        self: &Arc<Self>,
        range: Range<usize>,
        reservation: Reservation,
    ) -> ReadTarget {
        let ends = [range.start, range.end];
        let aligned = ends.iter().all(|end| end.is_multiple_of(ALIGN as usize));
        assert!(aligned && range.start < range.end && range.end <= self.len, "pages of the region");
        // SAFETY: `range` lies in the region, which the target keeps alive. Its bytes are initialized or come
        // from outside of Rust. The caller promises that nobody else uses them.
        unsafe {
            let start = self.start.add(range.start);
            ReadTarget::given(reservation, start, range.len(), self.clone())
        }
    }

    /// The target of a fetch into the bytes `range`, which need not be whole pages. `staging` is for a buffer,
    /// which is needed if the disk cannot write to the bytes directly. `staging` is returned to its budget when the
    /// bytes of the fetch are dropped.
    ///
    /// # Safety
    /// The conditions of `target`.
    pub(crate) unsafe fn unaligned(
        self: &Arc<Self>,
        range: Range<usize>,
        staging: Reservation,
    ) -> ReadTarget {
        assert!(range.start < range.end && range.end <= self.len, "bytes of the region");
        // SAFETY: `range` lies in the region, which the target keeps alive. Its bytes are initialized or come
        // from outside of Rust. The caller promises that nobody else uses them.
        unsafe {
            let start = self.start.add(range.start);
            ReadTarget::unaligned(staging, start, range.len(), self.clone())
        }
    }

    /// The bytes `offset..offset + len` of the region.
    ///
    /// # Safety
    /// No other code reads these bytes or writes to them while the slice is in use.
    #[expect(clippy::mut_from_ref, reason = "the caller alone uses these bytes")]
    pub(crate) unsafe fn bytes(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset <= self.len && len <= self.len - offset, "bytes of the region");
        // SAFETY: the bytes lie in the region and are initialized, and no other code uses them now.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(offset), len) }
    }

    /// Turns a region made by `new` into memory that no longer changes. `None` if a read may still write to it.
    ///
    /// # Panics
    /// If the region was made by `foreign`, because some of its bytes may be uninitialized.
    pub fn into_loaded(self: Arc<Self>) -> Option<LoadedBytes> {
        assert!(matches!(self.home, RegionOwner::Own(_)), "all of it can be read");
        Arc::into_inner(self).map(|region| LoadedBytes(Arc::new(region)))
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.len)
    }
}

/// Memory that was filled. Clones share the bytes.
///
/// ```
/// use tensorfs::{Checkpoint, Loader, LoaderConfig};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let loaded = Loader::new(LoaderConfig::default()).load_all(&checkpoint)?;
/// let (memory, range) = loaded.place(0);
/// // A clone keeps the bytes alive without the other tensors' records.
/// let memory = memory.clone();
/// assert_eq!(&memory[range], loaded.bytes(0));
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LoadedBytes(Arc<Region>);

impl std::ops::Deref for LoadedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: these are `len` bytes of the mapping, and they are zeros unless something was written.
        // Nothing writes to them any more.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asking_for_pages_ahead_keeps_the_bytes_that_are_there() {
        for len in [10_000, 5 << 20] {
            let region = Region::new(len).unwrap();
            // SAFETY: nobody else uses these bytes.
            unsafe { region.bytes(5000, 2) }.copy_from_slice(&[1, 2]);
            // The call fails before Linux 5.14.
            region.populate(4999..len as usize);
            let memory = region.into_loaded().unwrap();
            assert_eq!(memory[4999..5003], [0, 1, 2, 0]);
            assert_eq!(memory.iter().map(|&byte| u64::from(byte)).sum::<u64>(), 3);
        }
    }

    #[test]
    fn pages_are_huge_or_small_as_advised_where_there_are_whole_huge_ones() {
        let region = Region::new(8 << 20).unwrap();
        let flags_at = |offset: usize| {
            let address = region.start().as_ptr().addr() + offset;
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut here = false;
            maps.lines().find_map(|line| {
                let ends = line.split(' ').next()?.split_once('-');
                let range = ends.map(|(a, b)| [a, b].map(|n| usize::from_str_radix(n, 16)));
                if let Some([Ok(start), Ok(end)]) = range {
                    here = (start..end).contains(&address);
                }
                line.strip_prefix("VmFlags:").filter(|_| here).map(str::to_owned)
            })
        };
        let is_huge = |offset| {
            let flags = flags_at(offset).unwrap();
            let has = |flag| flags.split(' ').any(|one| one == flag);
            (has("hg"), has("nh"))
        };
        let built = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        if !built {
            eprintln!("skipped: a kernel without huge pages");
            return;
        }
        region.advise(3 << 20..8 << 20, false);
        assert_eq!([0, 3 << 20, 4 << 20, 7 << 20].map(is_huge), {
            [(true, false), (true, false), (false, true), (false, true)]
        });
        region.advise(4 << 20..(6 << 20) + 1, true);
        assert_eq!([4 << 20, 6 << 20].map(is_huge), [(true, false), (false, true)]);
        region.on_huge_pages();
        assert_eq!([0, 4 << 20, 6 << 20].map(is_huge), [(true, false); 3]);
    }

    #[test]
    fn memory_that_cannot_be_asked_for_is_there_when_it_is_used() {
        let bytes = std::thread::spawn(|| {
            crate::io::refuse(nix::libc::SYS_madvise);
            let region = Region::new(5 << 20).unwrap();
            assert!(!region.populate(0..5 << 20));
            // SAFETY: nobody else uses these bytes.
            unsafe { region.bytes(4 << 20, 3) }.fill(7);
            region.into_loaded().unwrap()[(4 << 20) - 1..][..5].to_vec()
        });
        assert_eq!(bytes.join().unwrap(), [0, 7, 7, 7, 0]);
    }
}
