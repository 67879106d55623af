//! Pinned memory: host memory that a GPU can access directly. Reads fill slices of it.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use nix::libc;

use super::{Gpu, call, failed, sys};
use crate::error::Result;
use crate::io::{ReadTarget, Region, Reservation};

/// Number of threads that fault memory in before it is pinned. More threads are not faster.
const TOUCHERS: usize = 4;

/// The way in which host memory was prepared for asynchronous copies, the best way first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pinning {
    /// Memory of this crate that is registered with the driver.
    #[default]
    Registered,
    /// Memory allocated by the driver with cuMemHostAlloc, which takes longer.
    Allocated,
    /// Memory that is not pinned. The driver copies the bytes an additional time, which is slow.
    Pageable,
}

impl Pinning {
    /// The name of the way, for messages and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Pinning::Registered => "registered",
            Pinning::Allocated => "allocated",
            Pinning::Pageable => "pageable",
        }
    }
}

/// Host memory that the GPU can access directly.
pub(in crate::device) struct Pinned {
    gpu: Gpu,
    start: NonNull<u8>,
    len: usize,
    pub(in crate::device) how: Pinning,
    /// Owner of the memory. `None` if the driver allocated it.
    _region: Option<Arc<Region>>,
}

// SAFETY: the memory is accessed only through slices, and no two slices share a byte.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read the address and the length.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Memory of `len` bytes. If it cannot be registered, the driver allocates it. If that fails too and
    /// `first` is true, the memory stays unpinned. `first` says that this is the first memory of a loader; only
    /// then a warning is logged.
    pub(in crate::device) fn new(gpu: &Gpu, len: usize, first: bool) -> Result<Arc<Pinned>> {
        let _entered = gpu.0.enter()?;
        let region = Region::new(len as u64).ok();
        let pinned = |start, how, region| {
            Ok(Arc::new(Pinned { gpu: gpu.clone(), start, len, how, _region: region }))
        };
        let mut why = failed(Some(gpu.0.ordinal), "no memory".to_owned(), None);
        if let Some(region) = &region {
            fault_in(region);
            let start = region.start();
            // SAFETY: the memory is our own, and is kept until it is unregistered.
            let registered = unsafe {
                let portable = sys::CU_MEMHOSTREGISTER_PORTABLE;
                call!(gpu.0, cuMemHostRegister_v2(start.as_ptr().cast(), len, portable))
            };
            match registered {
                Ok(()) => return pinned(start, Pinning::Registered, Some(region.clone())),
                Err(e) => why = e,
            }
        }
        let mut start = null_mut();
        // SAFETY: the call writes to the pointer.
        let allocated =
            unsafe { call!(gpu.0, cuMemHostAlloc(&mut start, len, sys::CU_MEMHOSTALLOC_PORTABLE)) };
        if let (Ok(()), Some(start)) = (allocated, NonNull::new(start.cast())) {
            if first {
                tracing::warn!("{why}; memory of the driver is used instead, which takes longer");
            }
            return pinned(start, Pinning::Allocated, None);
        }
        match region {
            Some(region) if first => {
                tracing::warn!("{why}; copies to the GPU are slow: no memory can be pinned");
                pinned(region.start(), Pinning::Pageable, Some(region))
            }
            _ => Err(why),
        }
    }

    /// Length in bytes.
    pub(in crate::device) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let start: *mut c_void = self.start.as_ptr().cast();
        match self.how {
            Pinning::Registered => self.gpu.0.give_back(|gpu| {
                // SAFETY: `new` has registered the memory. Copies keep it alive, so none is in progress.
                unsafe { call!(gpu, cuMemHostUnregister(start)) }
            }),
            Pinning::Allocated => self.gpu.0.give_back(|gpu| {
                // SAFETY: `new` has allocated the memory. Copies keep it alive, so none is in progress.
                unsafe { call!(gpu, cuMemFreeHost(start)) }
            }),
            Pinning::Pageable => {}
        }
    }
}

/// Faults in the pages of a region on several threads, because the driver would use only one.
fn fault_in(region: &Region) {
    let (start, len) = (region.start().as_ptr().addr(), region.len());
    let each = len.div_ceil(TOUCHERS).next_multiple_of(2 << 20);
    std::thread::scope(|scope| {
        for from in (0..len).step_by(each) {
            let touch = move || {
                let (start, len) = ((start + from) as *mut c_void, each.min(len - from));
                // SAFETY: the bytes lie in the region. If the call fails, the pages are faulted in later.
                unsafe { libc::madvise(start, len, libc::MADV_POPULATE_WRITE) };
            };
            let named = std::thread::Builder::new().name("tensorfs-touch".to_owned());
            if from + each >= len || named.spawn_scoped(scope, touch).is_err() {
                touch();
            }
        }
    });
    // A child made by fork(2) that shared the pages would make the kernel copy them during a read.
    // SAFETY: these are the bytes of the region.
    unsafe { libc::madvise(start as *mut c_void, len, libc::MADV_DONTFORK) };
}

/// A part of pinned memory. No two slices share a byte.
pub(in crate::device) struct Slice {
    /// The memory that contains the slice.
    pub(in crate::device) pinned: Arc<Pinned>,
    /// Offset of the first byte in that memory.
    pub(in crate::device) offset: usize,
    /// Length in bytes.
    pub(in crate::device) len: usize,
}

impl Slice {
    /// The target of a read into these bytes. `give_back` gets the slice when the read has ended and its bytes
    /// have been dropped.
    pub(in crate::device) fn lend(
        self,
        reservation: Reservation,
        give_back: GiveBack,
    ) -> ReadTarget {
        assert!(self.offset + self.len <= self.pinned.len, "a part of the pinned memory");
        // SAFETY: the slice lies in the pinned memory.
        let (start, len) = (unsafe { self.pinned.start.add(self.offset) }, self.len);
        let lent = Lent(Some((self, give_back)));
        // SAFETY: the slice lives as long as `lent`, and no other slice has its bytes. They come from the
        // kernel or the driver.
        let region = unsafe { Region::foreign(start, len, Box::new(lent)) };
        // SAFETY: the region is used for this read only, and nobody else uses its bytes.
        unsafe { region.target(0..len, reservation) }
    }
}

/// Callback to which a slice is returned.
pub(in crate::device) type GiveBack = Box<dyn FnOnce(Slice) + Send + Sync>;

/// A lent slice and the callback to which it is returned.
struct Lent(Option<(Slice, GiveBack)>);

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some((slice, give_back)) = self.0.take() {
            give_back(slice);
        }
    }
}
