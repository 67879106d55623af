//! An address range on huge pages from which buffers are allocated. The disk reads into few large pieces of
//! memory with far less work than into many small pages. Each page is faulted in only once.

use std::ptr::NonNull;

use nix::sys::mman::{MmapAdvise, madvise};

use super::free_list::FreeList;
use crate::mapping::{HUGE, Mapping};

/// An address range, and which parts of it are free.
pub(super) struct Arena {
    mapping: Mapping,
    free: FreeList,
    /// For each huge page, whether physical memory may be allocated for it.
    touched: Vec<bool>,
    /// Number of touched huge pages.
    touched_pages: usize,
}

impl Arena {
    /// Reserves an address range of at least `bytes`. The kernel allocates memory when a page is first written.
    pub(super) fn new(bytes: usize) -> Option<Arena> {
        let len = bytes.checked_next_multiple_of(HUGE)?;
        let mapping = Mapping::new(len).ok()?;
        mapping.advise(MmapAdvise::MADV_HUGEPAGE);
        // Otherwise a child made by fork(2) would share the pages. At the next write, the kernel would copy them, and
        // the bytes of a read in flight could arrive in the copy of the wrong process.
        mapping.advise(MmapAdvise::MADV_DONTFORK);
        // Core dumps do not contain the bytes of tensors, which may be decrypted.
        mapping.advise(MmapAdvise::MADV_DONTDUMP);
        Some(Arena {
            mapping,
            free: FreeList::new(len),
            touched: vec![false; len / HUGE],
            touched_pages: 0,
        })
    }

    /// Allocates `len` bytes, a multiple of the page size, at the lowest free address. So few huge pages are in use.
    pub(super) fn take(&mut self, len: usize) -> Option<NonNull<u8>> {
        let offset = self.free.take(len)?;
        for touched in &mut self.touched[offset / HUGE..(offset + len).div_ceil(HUGE)] {
            self.touched_pages += usize::from(!std::mem::replace(touched, true));
        }
        // SAFETY: the free list covers the arena, so `offset` lies in it.
        Some(unsafe { self.mapping.start().add(offset) })
    }

    /// Frees bytes that `take` has returned.
    pub(super) fn give_back(&mut self, start: NonNull<u8>, len: usize) {
        self.free.give_back(start.as_ptr() as usize - self.mapping.start().as_ptr() as usize, len);
    }

    /// Number of bytes of huge pages that may have physical memory.
    pub(super) fn touched(&self) -> usize {
        self.touched_pages * HUGE
    }

    /// Returns the memory of unused huge pages to the kernel.
    pub(super) fn trim(&mut self) {
        for (offset, len) in self.free.stretches() {
            let pages = offset.div_ceil(HUGE)..(offset + len) / HUGE;
            for page in pages.filter(|page| self.touched[*page]).collect::<Vec<_>>() {
                // SAFETY: the page lies in a free part of the arena, so there is no reference to it.
                let freed = unsafe {
                    let page = self.mapping.start().add(page * HUGE);
                    madvise(page.cast(), HUGE, MmapAdvise::MADV_DONTNEED)
                };
                if freed.is_ok() {
                    self.touched[page] = false;
                    self.touched_pages -= 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_free_pages_returns_to_the_system() {
        let mut arena = Arena::new(3 * HUGE).unwrap();
        let parts: Vec<_> = (0..6).map(|_| arena.take(HUGE / 2).unwrap()).collect();
        assert!(arena.take(4096).is_none());
        assert_eq!(arena.touched(), 3 * HUGE);
        for part in parts {
            arena.give_back(part, HUGE / 2);
        }
        assert!(arena.free.is_whole(3 * HUGE));
        let most = arena.take(2 * HUGE + 4096).unwrap();
        arena.trim();
        assert_eq!(arena.touched(), 3 * HUGE);
        arena.give_back(most, 2 * HUGE + 4096);
        arena.trim();
        assert_eq!(arena.touched(), 0);
    }
}
