//! Memory for reads: page-aligned, under one hard limit, used again instead of returned.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::arena::Arena;
use super::region::Place;
use crate::counters::Counters;
use crate::sync::Mutex;

/// What O_DIRECT asks of offsets, lengths and memory, everywhere where it works at all.
pub(super) const ALIGN: u64 = 4096;

/// From this size on memory comes out of the arena, and is kept for the next read.
const KEPT_MIN: usize = 64 << 10;

/// The arena is larger than the limit by this part of it and so many bytes: buffers of unlike
/// sizes leave gaps, and overdue reads keep theirs.
const SPARE_PART: u64 = 4;
const SPARE: u64 = 8 << 20;

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
    /// Bytes of leases.
    used: u64,
    /// Made for the first large buffer.
    arena: Option<Arena>,
}

impl Shared {
    fn give_back(&self, bytes: u64) {
        self.state.lock().used -= bytes;
        self.counters.cache_bytes_now.sub(bytes);
    }

    /// Memory out of the arena.
    fn take(&self, len: usize) -> Option<NonNull<u8>> {
        let mut state = self.state.lock();
        if state.arena.is_none() {
            let bytes = self.limit.saturating_add(self.limit / SPARE_PART).saturating_add(SPARE);
            state.arena = Arena::new(usize::try_from(bytes).ok()?);
        }
        let arena = state.arena.as_mut()?;
        let start = arena.take(len)?;
        // Gaps between buffers have memory behind them, too.
        if arena.touched() as u64 > self.limit {
            arena.trim();
        }
        Some(start)
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
        self.0.state.lock().used
    }

    /// The right to `bytes` of memory, if the limit allows.
    pub fn try_lease(&self, bytes: u64) -> Option<Lease> {
        {
            let mut state = self.0.state.lock();
            state.used = state.used.checked_add(bytes).filter(|used| *used <= self.0.limit)?;
        }
        self.0.counters.cache_bytes_now.add(bytes);
        let share = Share { budget: self.0.clone(), bytes: AtomicU64::new(bytes) };
        Some(Lease(Arc::new(share), None))
    }

    /// Returns the memory that is kept for reads to come to the system, as far as it is free.
    pub fn trim(&self) {
        if let Some(arena) = &mut self.0.state.lock().arena {
            arena.trim();
        }
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Budget({} of {})", self.used(), self.limit())
    }
}

/// The right to some bytes of memory; it returns to the budget on drop.
#[derive(Debug)]
pub struct Lease(Arc<Share>, Option<Place>);

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
        Lease(Arc::new(share), None)
    }

    /// The lease with memory that is there already: a buffer made with it is these bytes.
    pub(super) fn at(self, place: Place) -> Lease {
        Lease(self.0, Some(place))
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

/// Page-aligned memory, all of it initialised.
struct Pages {
    start: NonNull<u8>,
    len: usize,
    /// Where it goes when it is dropped.
    home: Home,
}

enum Home {
    /// The arena of this budget, which lives at least as long.
    Arena(Arc<Shared>),
    Heap,
    /// Memory of somebody else.
    Place(#[expect(dead_code, reason = "keeps it alive")] Place),
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
    fn new(len: usize, budget: &Arc<Shared>) -> io::Result<Pages> {
        if len >= KEPT_MIN
            && let Some(start) = budget.take(len)
        {
            return Ok(Pages { start, len, home: Home::Arena(budget.clone()) });
        }
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(Pages::layout(len)) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Pages { start, len, home: Home::Heap })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        match &self.home {
            Home::Arena(budget) => {
                if let Some(arena) = &mut budget.state.lock().arena {
                    arena.give_back(self.start, self.len);
                }
            }
            Home::Place(_) => {}
            // SAFETY: allocated with this layout, and dropped once.
            Home::Heap => unsafe { dealloc(self.start.as_ptr(), Pages::layout(self.len)) },
        }
    }
}

/// Page-aligned memory under a budget.
pub struct Buffer {
    /// Dropped before the lease: no one leases bytes that are still in use.
    pages: Pages,
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
        let pages = match lease.1.take() {
            Some(place) => {
                assert!(place.len == wanted, "the place is as long as the read");
                Pages { start: place.start, len: wanted, home: Home::Place(place) }
            }
            None => Pages::new(wanted, &lease.0.budget)?,
        };
        lease.shrink(pages.len as u64);
        Ok(Buffer { pages, lease, len })
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

    /// Writes its memory off: it is never used again, and no longer counts.
    pub(super) fn write_off(&self) {
        self.lease.0.forfeit();
    }
}

/// The pages that hold `range`.
pub(super) fn pages_around(range: &Range<u64>) -> Range<u64> {
    range.start / ALIGN * ALIGN..range.end.next_multiple_of(ALIGN)
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes of the pages, initialised when they were made.
        unsafe { std::slice::from_raw_parts(self.pages.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.pages.start.as_ptr(), self.len) }
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
    /// When the first read for it was made.
    pub(crate) began: Instant,
}

impl Filled {
    /// `bytes` of `buffer`; they lie inside of it.
    pub fn new(buffer: Buffer, bytes: Range<usize>) -> Filled {
        assert!(bytes.start <= bytes.end && bytes.end <= buffer.len, "the bytes lie in the buffer");
        Filled { buffer, bytes, began: Instant::now() }
    }
}

impl Deref for Filled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[self.bytes.clone()]
    }
}
