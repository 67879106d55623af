//! Memory for reads. It is page-aligned, has one hard limit, and is reused instead of being returned to the system.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::arena::Arena;
use crate::counters::Counters;
pub(in crate::io) use crate::source::page_cache::{ALIGN, pages_around};
use crate::sync::Mutex;

/// Minimum size in bytes of buffers that come from the arena. The arena keeps their memory for later reads.
const KEPT_MIN: usize = 64 << 10;

/// The arena has limit + limit / `SPARE_PART` + `SPARE` bytes. The surplus is for gaps between buffers of
/// different sizes, and for the buffers of overdue reads.
const SPARE_PART: u64 = 4;
const SPARE: u64 = 8 << 20;

/// A bounded amount of memory for reads. Clones share the limit.
#[derive(Clone)]
pub struct Budget(Arc<BudgetInner>);

struct BudgetInner {
    limit: u64,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Total number of reserved bytes.
    used: u64,
    /// The arena. It is created for the first large buffer.
    arena: Option<Arena>,
}

impl BudgetInner {
    fn give_back(&self, bytes: u64) {
        self.state.lock().used -= bytes;
        self.counters.cache_bytes_now.sub(bytes);
    }

    /// Allocates memory from the arena.
    fn take(&self, len: usize) -> Option<NonNull<u8>> {
        let mut state = self.state.lock();
        if state.arena.is_none() {
            let bytes = self.limit.saturating_add(self.limit / SPARE_PART).saturating_add(SPARE);
            state.arena = Arena::new(usize::try_from(bytes).ok()?);
        }
        let arena = state.arena.as_mut()?;
        let start = arena.take(len)?;
        // Free gaps between buffers may still have physical memory, so the touched memory may exceed the limit.
        if arena.touched() as u64 > self.limit {
            arena.trim();
        }
        Some(start)
    }
}

impl Budget {
    /// Creates a budget of `limit` bytes. `counters` show its use.
    pub fn new(limit: u64, counters: Arc<Counters>) -> Budget {
        Budget(Arc::new(BudgetInner { limit, counters, state: Mutex::default() }))
    }

    /// Maximum number of bytes that may be reserved at a time.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Number of bytes that are reserved now.
    pub fn used(&self) -> u64 {
        self.0.state.lock().used
    }

    /// Reserves `bytes` of memory. `None` if that would exceed the limit.
    pub fn try_reserve(&self, bytes: u64) -> Option<Reservation> {
        {
            let mut state = self.0.state.lock();
            state.used = state.used.checked_add(bytes).filter(|used| *used <= self.0.limit)?;
        }
        self.0.counters.cache_bytes_now.add(bytes);
        let share = ReservedBytes { budget: self.0.clone(), bytes: AtomicU64::new(bytes) };
        Some(Reservation(Arc::new(share)))
    }

    /// Returns free memory of the arena to the kernel.
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

/// Reserved bytes of a budget. Dropping the reservation returns them.
#[derive(Debug)]
pub struct Reservation(Arc<ReservedBytes>);

/// The bytes of a reservation. The budget can stop counting them while other code holds the reservation.
pub(in crate::io) struct ReservedBytes {
    budget: Arc<BudgetInner>,
    bytes: AtomicU64,
}

impl ReservedBytes {
    /// Makes the budget stop counting the bytes, although their memory is still in use.
    pub(in crate::io) fn leak(&self) {
        self.budget.give_back(self.bytes.swap(0, Ordering::Relaxed));
    }
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        self.leak();
    }
}

impl fmt::Debug for ReservedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes.load(Ordering::Relaxed))
    }
}

impl Reservation {
    /// Number of reserved bytes.
    pub fn len(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Whether no bytes are reserved.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Moves `bytes` to a new reservation, or all bytes if this one has fewer.
    pub fn split(&mut self, bytes: u64) -> Reservation {
        let bytes = bytes.min(self.len());
        self.0.bytes.fetch_sub(bytes, Ordering::Relaxed);
        let share = ReservedBytes { budget: self.0.budget.clone(), bytes: AtomicU64::new(bytes) };
        Reservation(Arc::new(share))
    }

    /// Returns the bytes beyond `bytes` to the budget.
    fn shrink(&mut self, bytes: u64) {
        let over = self.len().saturating_sub(bytes);
        drop(self.split(over));
    }
}

/// Destination of the bytes of a fetch: new memory, whose bytes are reserved, or existing memory.
#[derive(Debug)]
pub struct ReadTarget {
    reservation: Reservation,
    memory: TargetMemory,
}

#[derive(Debug)]
enum TargetMemory {
    New,
    /// The pages around the bytes. The disk can write to them.
    Pages(GivenMemory),
    /// Only the bytes themselves, at any address. The reservation is for a buffer that a read past the page
    /// cache needs.
    Bytes(GivenMemory),
}

/// Existing memory that only one fetch writes to.
pub(in crate::io) struct GivenMemory {
    start: NonNull<u8>,
    len: usize,
    /// Keeps the memory alive.
    _keep: Arc<dyn Send + Sync>,
}

// SAFETY: only the fetch that has the memory uses it, which `ReadTarget::given` and `ReadTarget::unaligned` require.
unsafe impl Send for GivenMemory {}
// SAFETY: the memory is written through `&mut`, and read through `&Buffer`.
unsafe impl Sync for GivenMemory {}

impl fmt::Debug for GivenMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GivenMemory({} bytes)", self.len)
    }
}

impl GivenMemory {
    /// Fills the memory with `bytes`, which have the same length.
    pub(in crate::io) fn fill(&mut self, bytes: &[u8]) {
        // SAFETY: the memory has this length. Its bytes are initialized or come from outside of Rust, and
        // nobody else uses them, which `ReadTarget::unaligned` requires.
        let own = unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) };
        own.copy_from_slice(bytes);
    }
}

impl From<Reservation> for ReadTarget {
    fn from(reservation: Reservation) -> ReadTarget {
        ReadTarget { reservation, memory: TargetMemory::New }
    }
}

impl ReadTarget {
    /// The `len` bytes from `start` on as destination. They are whole pages and live as long as `keep`.
    ///
    /// # Safety
    /// The bytes are initialized or come from outside of Rust. Nobody else writes to them from now on, and
    /// nobody reads them before the fetch has completed.
    pub(super) unsafe fn given(
        reservation: Reservation,
        start: NonNull<u8>,
        len: usize,
        keep: Arc<dyn Send + Sync>,
    ) -> ReadTarget {
        let memory = TargetMemory::Pages(GivenMemory { start, len, _keep: keep });
        ReadTarget { reservation, memory }
    }

    /// A target that consists of the `len` bytes from `start` on. The read must have exactly `len` bytes. The
    /// bytes live as long as `keep`.
    ///
    /// # Safety
    /// The same conditions as those of `given`.
    pub(super) unsafe fn unaligned(
        reservation: Reservation,
        start: NonNull<u8>,
        len: usize,
        keep: Arc<dyn Send + Sync>,
    ) -> ReadTarget {
        let memory = TargetMemory::Bytes(GivenMemory { start, len, _keep: keep });
        ReadTarget { reservation, memory }
    }

    /// Takes the existing memory out of the target, if the memory may begin at any address. After that, the target
    /// allocates new memory.
    pub(in crate::io) fn take_unaligned(&mut self) -> Option<GivenMemory> {
        match std::mem::replace(&mut self.memory, TargetMemory::New) {
            TargetMemory::Bytes(memory) => Some(memory),
            memory => {
                self.memory = memory;
                None
            }
        }
    }

    pub(in crate::io) fn reserved(&self) -> Arc<ReservedBytes> {
        self.reservation.0.clone()
    }
}

/// Initialized memory. It is page-aligned, unless it comes from an unaligned target.
struct AlignedPages {
    start: NonNull<u8>,
    len: usize,
    /// Whether the bytes are overwritten with zeros before another buffer gets the memory.
    wiped: bool,
    /// The owner, to which the memory returns on drop.
    home: PageOwner,
}

enum PageOwner {
    /// The arena of this budget. The reference keeps it alive.
    Arena(Arc<BudgetInner>),
    Heap,
    /// The caller of the fetch.
    Given(#[expect(dead_code, reason = "keeps it alive")] GivenMemory),
}

// SAFETY: `AlignedPages` is the only owner of the memory, like a `Box`.
unsafe impl Send for AlignedPages {}
// SAFETY: the memory is written through `&mut` only.
unsafe impl Sync for AlignedPages {}

impl AlignedPages {
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, ALIGN as usize).expect("a length of memory fits")
    }

    /// Allocates `len` bytes. `len` is a multiple of the page size and not zero.
    fn new(len: usize, budget: &Arc<BudgetInner>) -> io::Result<AlignedPages> {
        if len >= KEPT_MIN
            && let Some(start) = budget.take(len)
        {
            let home = PageOwner::Arena(budget.clone());
            return Ok(AlignedPages { start, len, wiped: false, home });
        }
        // SAFETY: the size of the layout is not zero.
        let address = unsafe { alloc_zeroed(AlignedPages::layout(len)) };
        let start = NonNull::new(address).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(AlignedPages { start, len, wiped: false, home: PageOwner::Heap })
    }
}

impl Drop for AlignedPages {
    fn drop(&mut self) {
        if self.wiped {
            // SAFETY: all bytes are initialized, and `&mut self` is the only access to them.
            let bytes = unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) };
            bytes.fill(0);
            // Without this, the compiler could remove the writes, because nothing reads the bytes.
            std::hint::black_box(bytes);
        }
        match &self.home {
            PageOwner::Arena(budget) => {
                if let Some(arena) = &mut budget.state.lock().arena {
                    arena.give_back(self.start, self.len);
                }
            }
            PageOwner::Given(_) => {}
            // SAFETY: the memory was allocated with this layout, and is dropped once.
            PageOwner::Heap => unsafe {
                dealloc(self.start.as_ptr(), AlignedPages::layout(self.len))
            },
        }
    }
}

/// Memory that counts against a budget. It is page-aligned, unless it comes from an unaligned target.
pub struct Buffer {
    /// The pages are declared before the reservation, so they are dropped first. Otherwise the budget could give away
    /// bytes that are still in use.
    pages: AlignedPages,
    reservation: Reservation,
    len: usize,
}

impl Buffer {
    /// A buffer of `len` bytes, for which `reservation` was made. The bytes are zeros or contents of an earlier
    /// buffer.
    pub fn new(len: usize, reservation: Reservation) -> Buffer {
        Buffer::try_new(len, reservation.into())
            .unwrap_or_else(|_| handle_alloc_error(AlignedPages::layout(len)))
    }

    /// A buffer of `len` bytes in the memory of `target`. Fails if the system has no memory.
    pub(in crate::io) fn try_new(len: usize, target: ReadTarget) -> io::Result<Buffer> {
        let wanted = len.next_multiple_of(ALIGN as usize).max(ALIGN as usize);
        let ReadTarget { mut reservation, memory } = target;
        let pages = match memory {
            TargetMemory::Pages(given) | TargetMemory::Bytes(given) => {
                assert!(given.len == wanted, "the given pages are as long as the read");
                let start = given.start;
                AlignedPages { start, len: wanted, wiped: false, home: PageOwner::Given(given) }
            }
            TargetMemory::New => AlignedPages::new(wanted, &reservation.0.budget)?,
        };
        reservation.shrink(pages.len as u64);
        Ok(Buffer { pages, reservation, len })
    }

    /// A buffer in the memory `given`, which `take_unaligned` has taken from `target`, for a read through the
    /// page cache. The reservation of the target is returned to its budget.
    pub(in crate::io) fn unaligned(given: GivenMemory, target: ReadTarget) -> Buffer {
        let mut reservation = target.reservation;
        reservation.shrink(0);
        let len = given.len;
        let pages =
            AlignedPages { start: given.start, len, wiped: false, home: PageOwner::Given(given) };
        Buffer { pages, reservation, len }
    }

    /// Number of bytes to reserve for a read of `range`: the length of the pages around it.
    pub fn len_for(range: &Range<u64>) -> u64 {
        let pages = pages_around(range);
        (pages.end - pages.start).max(ALIGN)
    }

    /// Notes that the buffer will have decrypted bytes. These bytes are overwritten with zeros before another buffer
    /// gets the memory. Memory of the caller of a read is not overwritten.
    pub fn wipe_on_drop(&mut self) {
        self.pages.wiped = !matches!(self.pages.home, PageOwner::Given(_));
    }

    /// Number of bytes of the buffer that count against the budget.
    pub fn reserved(&self) -> u64 {
        self.reservation.len()
    }

    /// Abandons the memory: it is never reused, and no longer counts against the budget.
    pub(in crate::io) fn leak_buffer(&self) {
        self.reservation.0.leak();
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: these are `len` bytes of the pages, which were initialized at their creation.
        unsafe { std::slice::from_raw_parts(self.pages.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: these are `len` bytes of the pages, initialized at their creation. `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.pages.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// The bytes of a fetch: a buffer and their range in it.
#[derive(Debug)]
pub struct ReadBuffer {
    buffer: Buffer,
    bytes: Range<usize>,
    /// Start of the first read for the fetch.
    pub(crate) began: Instant,
}

impl ReadBuffer {
    /// The bytes in the range `bytes` of `buffer`. The range has to lie inside of it.
    pub fn new(buffer: Buffer, bytes: Range<usize>) -> ReadBuffer {
        assert!(bytes.start <= bytes.end && bytes.end <= buffer.len, "the bytes lie in the buffer");
        ReadBuffer { buffer, bytes, began: Instant::now() }
    }
}

impl Deref for ReadBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[self.bytes.clone()]
    }
}

impl DerefMut for ReadBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.bytes.clone()]
    }
}
