//! A range of addresses on huge pages, cut into buffers. The disk reads into few large stretches
//! of memory with far less work than into many small pages, and pages are faulted in once only.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use nix::libc;

/// Bytes of a huge page on most machines; elsewhere no more than a unit of reckoning.
pub(super) const HUGE: usize = 2 << 20;

/// An address range and which parts of it are free.
pub(super) struct Arena {
    /// The whole mapping; the arena begins at its first huge page.
    mapping: (NonNull<u8>, usize),
    start: NonNull<u8>,
    /// Free stretches: offset to length. Neighbours are joined.
    free: BTreeMap<usize, usize>,
    /// For each huge page whether there may be memory behind it.
    touched: Vec<bool>,
    /// Their number.
    touched_pages: usize,
}

// SAFETY: the mapping belongs to the arena alone, and is reached through what `take` gave out.
unsafe impl Send for Arena {}

impl Arena {
    /// Reserves addresses for at least `bytes`; memory comes when it is written to.
    pub(super) fn new(bytes: usize) -> Option<Arena> {
        let len = bytes.checked_next_multiple_of(HUGE)?;
        let mapped = len.checked_add(HUGE)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping; no memory in use is touched.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        let at = NonNull::new(at.cast::<u8>())?;
        let skip = at.as_ptr().align_offset(HUGE);
        // SAFETY: `skip` is less than HUGE, by which the mapping is longer than `len`.
        let start = unsafe { at.add(skip) };
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
            // Without the first one it is slower. A child that shared the pages would make the
            // kernel copy them, and a read under way would end in the wrong copy.
            // SAFETY: the range lies in the mapping just made.
            unsafe { libc::madvise(start.as_ptr().cast(), len, advice) };
        }
        let free = BTreeMap::from([(0, len)]);
        Some(Arena {
            mapping: (at, mapped),
            start,
            free,
            touched: vec![false; len / HUGE],
            touched_pages: 0,
        })
    }

    /// Takes `len` bytes, a multiple of the page size: the lowest that are free, so that few
    /// pages are in use.
    pub(super) fn take(&mut self, len: usize) -> Option<NonNull<u8>> {
        let (&at, &there) = self.free.iter().find(|(_, there)| **there >= len)?;
        self.free.remove(&at);
        if there > len {
            self.free.insert(at + len, there - len);
        }
        for touched in &mut self.touched[at / HUGE..(at + len).div_ceil(HUGE)] {
            self.touched_pages += usize::from(!std::mem::replace(touched, true));
        }
        // SAFETY: `at` lies in the arena.
        Some(unsafe { self.start.add(at) })
    }

    /// Takes back what `take` gave out.
    pub(super) fn give_back(&mut self, start: NonNull<u8>, mut len: usize) {
        let mut at = start.as_ptr() as usize - self.start.as_ptr() as usize;
        if let Some((&before, &there)) = self.free.range(..at).next_back()
            && before + there == at
        {
            self.free.remove(&before);
            (at, len) = (before, there + len);
        }
        if let Some(after) = self.free.remove(&(at + len)) {
            len += after;
        }
        self.free.insert(at, len);
    }

    /// Bytes behind which there may be memory.
    pub(super) fn touched(&self) -> usize {
        self.touched_pages * HUGE
    }

    /// Returns the memory of huge pages of which nothing is in use.
    pub(super) fn trim(&mut self) {
        for (&at, &len) in &self.free {
            let pages = at.div_ceil(HUGE)..(at + len) / HUGE;
            for page in pages.filter(|page| self.touched[*page]).collect::<Vec<_>>() {
                // SAFETY: a page of the arena that lies in a free stretch: nobody refers to it.
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
        // SAFETY: the mapping made by `new`. Whoever has a part of it keeps the arena alive.
        unsafe { libc::munmap(self.mapping.0.as_ptr().cast(), self.mapping.1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_in_any_order_is_whole_again() {
        let mut arena = Arena::new(3 * HUGE).unwrap();
        let parts: Vec<_> = (0..6).map(|_| arena.take(HUGE / 2).unwrap()).collect();
        assert!(arena.take(4096).is_none());
        assert_eq!(arena.touched(), 3 * HUGE);
        for at in [3, 0, 5, 1, 4, 2] {
            arena.give_back(parts[at], HUGE / 2);
        }
        assert_eq!(arena.free, BTreeMap::from([(0, 3 * HUGE)]));
        let most = arena.take(2 * HUGE + 4096).unwrap();
        arena.trim();
        assert_eq!(arena.touched(), 3 * HUGE);
        arena.give_back(most, 2 * HUGE + 4096);
        arena.trim();
        assert_eq!(arena.touched(), 0);
    }

    #[test]
    fn parts_do_not_overlap() {
        let mut arena = Arena::new(HUGE).unwrap();
        let (a, b) = (arena.take(8192).unwrap(), arena.take(4096).unwrap());
        arena.give_back(a, 8192);
        let (c, d) = (arena.take(4096).unwrap(), arena.take(8192).unwrap());
        assert_eq!(c, a);
        assert_eq!(d.as_ptr() as usize, b.as_ptr() as usize + 4096);
    }
}
