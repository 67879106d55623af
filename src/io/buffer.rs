//! Memory for reads: page-aligned, under one hard limit, used again instead of returned.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::libc;

use crate::counters::Counters;

/// What O_DIRECT asks of offsets, lengths and memory, everywhere where it works at all.
pub(super) const ALIGN: u64 = 4096;

/// From this size on memory is kept for the next read: mapping it anew means a page fault for
/// every 4 KiB.
const KEPT_MIN: usize = 64 << 10;

/// A kept buffer may be larger than asked for by this part of its size.
const SLACK_PART: usize = 8;

/// Memory for reads, bounded. Clones share the limit.
#[derive(Clone)]
pub struct Budget(Arc<Shared>);

struct Shared {
    limit: u64,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes of leases. Together with `idle_bytes` never over the limit.
    used: u64,
    idle_bytes: u64,
    /// Memory in no one's hands, by its size.
    idle: BTreeMap<usize, Vec<Pages>>,
}

impl State {
    /// Takes idle memory out until no more than `bytes` stay, for the caller to free.
    fn shrink(&mut self, bytes: u64) -> Vec<Pages> {
        let mut taken = Vec::new();
        while self.idle_bytes > bytes
            && let Some(mut largest) = self.idle.last_entry()
        {
            match largest.get_mut().pop() {
                Some(pages) => {
                    self.idle_bytes -= pages.len as u64;
                    taken.push(pages);
                }
                None => {
                    largest.remove();
                }
            }
        }
        taken
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, bytes: u64) {
        self.lock().used -= bytes;
        self.counters.cache_bytes_now.sub(bytes);
    }

    /// Idle memory of at least `len` bytes and not much more. What it has more than `share`
    /// goes over to it, under one lock with the rest: the sum stays.
    fn take_idle(&self, len: usize, share: &Share) -> Option<Pages> {
        let mut state = self.lock();
        let largest = len + len / SLACK_PART;
        let pages = state.idle.range_mut(len..=largest).find_map(|(_, pages)| pages.pop())?;
        let idle = pages.len as u64;
        let more = idle.saturating_sub(share.bytes.load(Ordering::Relaxed));
        share.bytes.fetch_add(more, Ordering::Relaxed);
        state.idle_bytes -= idle;
        state.used += more;
        self.counters.cache_bytes_now.add(more);
        Some(pages)
    }
}

impl Budget {
    /// A budget of `limit` bytes, whose use `counters` show.
    pub fn new(limit: u64, counters: Arc<Counters>) -> Budget {
        Budget(Arc::new(Shared { limit, counters, state: Mutex::default() }))
    }

    /// Most bytes that leases hold at a time.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes that leases hold now.
    pub fn used(&self) -> u64 {
        self.0.lock().used
    }

    /// The right to `bytes` of memory, if the limit allows.
    pub fn try_lease(&self, bytes: u64) -> Option<Lease> {
        let freed = {
            let mut state = self.0.lock();
            let used = state.used.checked_add(bytes).filter(|used| *used <= self.0.limit)?;
            state.used = used;
            state.shrink(self.0.limit - used)
        };
        drop(freed);
        self.0.counters.cache_bytes_now.add(bytes);
        let share = Share { budget: self.0.clone(), bytes: AtomicU64::new(bytes) };
        Some(Lease(Arc::new(share)))
    }

    /// Frees the memory that is kept for reads to come.
    pub fn trim(&self) {
        let freed = self.0.lock().shrink(0);
        drop(freed);
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Budget({} of {})", self.used(), self.limit())
    }
}

/// The right to some bytes of memory; it returns to the budget on drop.
#[derive(Debug)]
pub struct Lease(Arc<Share>);

/// A lease's bytes; they can be written off while someone else holds the lease.
pub(super) struct Share {
    budget: Arc<Shared>,
    bytes: AtomicU64,
}

impl Share {
    /// Writes the bytes off: they no longer count against the budget, although their memory is
    /// still in use.
    pub(super) fn forfeit(&self) {
        self.budget.give_back(self.bytes.swap(0, Ordering::Relaxed));
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.forfeit();
    }
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes.load(Ordering::Relaxed))
    }
}

impl Lease {
    /// Its bytes.
    pub fn len(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes `bytes` off as a lease of their own; at most what this one has.
    pub fn split(&mut self, bytes: u64) -> Lease {
        let bytes = bytes.min(self.len());
        self.0.bytes.fetch_sub(bytes, Ordering::Relaxed);
        let share = Share { budget: self.0.budget.clone(), bytes: AtomicU64::new(bytes) };
        Lease(Arc::new(share))
    }

    pub(super) fn share(&self) -> Arc<Share> {
        self.0.clone()
    }

    /// Gives back what it has over `bytes`.
    fn shrink(&mut self, bytes: u64) {
        let over = self.len().saturating_sub(bytes);
        drop(self.split(over));
    }
}

/// Page-aligned memory, all of it written at least once (with zeros).
struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: memory that `Pages` alone owns, like a Box.
unsafe impl Send for Pages {}
// SAFETY: likewise; it is written through `&mut` only.
unsafe impl Sync for Pages {}

impl Pages {
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, ALIGN as usize).expect("a length of memory fits")
    }

    /// `len` bytes, a multiple of the page size and not zero.
    fn new(len: usize) -> io::Result<Pages> {
        if len < KEPT_MIN {
            // SAFETY: the layout's size is not zero.
            let start = unsafe { alloc_zeroed(Pages::layout(len)) };
            let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
            return Ok(Pages { start, len });
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new private mapping; no memory in use is touched.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Pages { start, len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.len < KEPT_MIN {
            // SAFETY: allocated with this layout, and dropped once.
            unsafe { dealloc(self.start.as_ptr(), Pages::layout(self.len)) };
        } else {
            // SAFETY: the whole mapping made by `new`, which nothing refers to any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

/// Page-aligned memory under a budget.
pub struct Buffer {
    /// None only while it is dropped.
    pages: Option<Pages>,
    lease: Lease,
    len: usize,
}

impl Buffer {
    /// A buffer of `len` bytes, which `lease` is for. Its bytes are zeros or what an earlier
    /// buffer held.
    pub fn new(len: usize, lease: Lease) -> Buffer {
        Buffer::try_new(len, lease).unwrap_or_else(|_| handle_alloc_error(Pages::layout(len)))
    }

    /// Likewise, where the lack of memory is no reason to end the process.
    pub(super) fn try_new(len: usize, mut lease: Lease) -> io::Result<Buffer> {
        let wanted = len.next_multiple_of(ALIGN as usize).max(ALIGN as usize);
        let budget = &lease.0.budget;
        let kept = if wanted < KEPT_MIN { None } else { budget.take_idle(wanted, &lease.0) };
        let pages = match kept {
            Some(pages) => pages,
            None => Pages::new(wanted)?,
        };
        lease.shrink(pages.len as u64);
        Ok(Buffer { pages: Some(pages), lease, len })
    }

    /// Bytes to lease for a read of `range`, wherever it begins: the pages around it.
    pub fn len_for(range: &Range<u64>) -> u64 {
        let pages = pages_around(range);
        (pages.end - pages.start).max(ALIGN)
    }

    /// Bytes that it counts against the budget.
    pub fn leased(&self) -> u64 {
        self.lease.len()
    }

    fn pages(&self) -> &Pages {
        self.pages.as_ref().expect("the pages stay until drop")
    }
}

/// The pages that hold `range`.
pub(super) fn pages_around(range: &Range<u64>) -> Range<u64> {
    range.start / ALIGN * ALIGN..range.end.next_multiple_of(ALIGN)
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes of the pages, initialised when they were mapped or allocated.
        unsafe { std::slice::from_raw_parts(self.pages().start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.pages().start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(pages) = self.pages.take() else {
            return;
        };
        let budget = &self.lease.0.budget;
        let bytes = self.lease.0.bytes.swap(0, Ordering::Relaxed);
        let len = pages.len as u64;
        let freed = {
            let mut state = budget.lock();
            state.used -= bytes;
            let fits = state.used + state.idle_bytes + len <= budget.limit;
            if pages.len >= KEPT_MIN && fits {
                state.idle_bytes += len;
                state.idle.entry(pages.len).or_default().push(pages);
                None
            } else {
                Some(pages)
            }
        };
        drop(freed);
        budget.counters.cache_bytes_now.sub(bytes);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// The bytes of a fetch: a buffer, and where in it they lie.
#[derive(Debug)]
pub struct Filled {
    buffer: Buffer,
    bytes: Range<usize>,
}

impl Filled {
    /// `bytes` of `buffer`; they lie inside of it.
    pub fn new(buffer: Buffer, bytes: Range<usize>) -> Filled {
        assert!(bytes.start <= bytes.end && bytes.end <= buffer.len, "the bytes lie in the buffer");
        Filled { buffer, bytes }
    }

    /// The buffer, and where in it the bytes lie.
    pub fn into_buffer(self) -> (Buffer, Range<usize>) {
        (self.buffer, self.bytes)
    }

    /// Bytes that it counts against the budget.
    pub fn leased(&self) -> u64 {
        self.buffer.leased()
    }
}

impl Deref for Filled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[self.bytes.clone()]
    }
}
