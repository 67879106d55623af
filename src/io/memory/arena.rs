//! A range of addresses on huge pages, cut into buffers. The disk reads into few large stretches
//! of memory with far less work than into many small pages, and pages are faulted in only once.

use std::ptr::NonNull;

use nix::libc;

use super::free_list::FreeList;

/// Bytes of a huge page on most machines; elsewhere only a unit of reckoning.
pub(super) const HUGE: usize = 2 << 20;

/// An address range and which parts of it are free.
pub(super) struct Arena {
    /// The whole mapping; the arena begins at its first huge page.
    mapping: (NonNull<u8>, usize),
    start: NonNull<u8>,
    free: FreeList,
    /// For each huge page whether there may be memory behind it.
    touched: Vec<bool>,
    /// Number of touched huge pages.
    touched_pages: usize,
}

// SAFETY: the mapping belongs to the arena alone, and is accessed only through pointers that `take`
// returned.
unsafe impl Send for Arena {}

impl Arena {
    /// Reserves addresses for at least `bytes`; the system adds memory when it is written to.
    pub(super) fn new(bytes: usize) -> Option<Arena> {
        let len = bytes.checked_next_multiple_of(HUGE)?;
        let mapped = len.checked_add(HUGE)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping; no memory in use is touched.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = NonNull::new(base.cast::<u8>())?;
        let skip = base.as_ptr().align_offset(HUGE);
        // SAFETY: `skip` is less than HUGE, by which the mapping is longer than `len`.
        let start = unsafe { base.add(skip) };
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
            // SAFETY: the range lies in the mapping just made. Without MADV_HUGEPAGE the arena is
            // slower. Without MADV_DONTFORK a child shares the pages: the kernel copies them, and a
            // read under way ends in the wrong copy.
            unsafe { libc::madvise(start.as_ptr().cast(), len, advice) };
        }
        Some(Arena {
            mapping: (base, mapped),
            start,
            free: FreeList::new(len),
            touched: vec![false; len / HUGE],
            touched_pages: 0,
        })
    }

    /// Allocates `len` bytes, a multiple of the page size, at the lowest free address, so that few
    /// pages are in use.
    pub(super) fn take(&mut self, len: usize) -> Option<NonNull<u8>> {
        let offset = self.free.take(len)?;
        for touched in &mut self.touched[offset / HUGE..(offset + len).div_ceil(HUGE)] {
            self.touched_pages += usize::from(!std::mem::replace(touched, true));
        }
        // SAFETY: the free list covers the arena, so `offset` lies in it.
        Some(unsafe { self.start.add(offset) })
    }

    /// Frees bytes that `take` returned.
    pub(super) fn give_back(&mut self, start: NonNull<u8>, len: usize) {
        self.free.give_back(start.as_ptr() as usize - self.start.as_ptr() as usize, len);
    }

    /// Bytes of huge pages that may have memory behind them.
    pub(super) fn touched(&self) -> usize {
        self.touched_pages * HUGE
    }

    /// Returns the memory of unused huge pages to the system.
    pub(super) fn trim(&mut self) {
        for (offset, len) in self.free.stretches() {
            let pages = offset.div_ceil(HUGE)..(offset + len) / HUGE;
            for page in pages.filter(|page| self.touched[*page]).collect::<Vec<_>>() {
                // SAFETY: the page lies in a free stretch of the arena, so nothing refers to it.
                let rc = unsafe {
                    let page = self.start.as_ptr().add(page * HUGE);
                    libc::madvise(page.cast(), HUGE, libc::MADV_DONTNEED)
                };
                if rc == 0 {
                    self.touched[page] = false;
                    self.touched_pages -= 1;
                }
            }
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `new`. Each buffer in it keeps the arena alive.
        unsafe { libc::munmap(self.mapping.0.as_ptr().cast(), self.mapping.1) };
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
