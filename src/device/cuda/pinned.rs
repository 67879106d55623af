//! Memory of the host that a GPU reaches by itself, and stretches of it that reads fill.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use nix::libc;

use super::{Gpu, call, failed, sys};
use crate::error::Result;
use crate::io::{Lease, Region};

/// Threads that fault memory in before it is pinned: more are not faster.
const TOUCHERS: usize = 4;

/// How memory was made fit for copies that are not waited for, best first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pinning {
    /// Memory of our own, registered with the driver.
    #[default]
    Registered,
    /// Memory of the driver, which takes longer to be had.
    Allocated,
    /// Not at all: the driver copies it once more, which is slow.
    Pageable,
}

impl Pinning {
    /// Its name, for people and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Pinning::Registered => "registered",
            Pinning::Allocated => "allocated",
            Pinning::Pageable => "pageable",
        }
    }
}

/// Memory of the host that the GPU can reach by itself.
pub(in crate::device) struct Pinned {
    gpu: Gpu,
    start: NonNull<u8>,
    len: usize,
    how: Pinning,
    /// Where it is memory of our own.
    _region: Option<Arc<Region>>,
}

// SAFETY: the memory is reached through slices alone, each of which has bytes of its own.
unsafe impl Send for Pinned {}
// SAFETY: likewise.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` bytes. What cannot be registered is had from the driver, and the `first` of a loader
    /// is not pinned where even that fails. Which it is, is said of the first.
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
            // SAFETY: memory of our own, which stays until it is unregistered.
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
        // SAFETY: the pointer is written to.
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

    pub(in crate::device) fn how(&self) -> Pinning {
        self.how
    }

    /// All of it; asked for once.
    pub(in crate::device) fn whole(self: Arc<Self>) -> Slice {
        let len = self.len;
        Slice { pinned: self, at: 0, len }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let start: *mut c_void = self.start.as_ptr().cast();
        match self.how {
            Pinning::Registered => self.gpu.0.give_back(|gpu| {
                // SAFETY: registered by `new`; who copies out of it keeps it alive.
                unsafe { call!(gpu, cuMemHostUnregister(start)) }
            }),
            Pinning::Allocated => self.gpu.0.give_back(|gpu| {
                // SAFETY: allocated by `new`; who copies out of it keeps it alive.
                unsafe { call!(gpu, cuMemFreeHost(start)) }
            }),
            Pinning::Pageable => {}
        }
    }
}

/// Faults the pages of a region in, on several threads: the driver does it on one.
fn fault_in(region: &Region) {
    let (start, len) = (region.start().as_ptr().addr(), region.len());
    let each = len.div_ceil(TOUCHERS).next_multiple_of(2 << 20);
    std::thread::scope(|scope| {
        for from in (0..len).step_by(each) {
            let touch = move || {
                let (start, len) = ((start + from) as *mut c_void, each.min(len - from));
                // SAFETY: bytes of the region. It may be refused: then they are faulted in later.
                unsafe { libc::madvise(start, len, libc::MADV_POPULATE_WRITE) };
            };
            let named = std::thread::Builder::new().name("tensorfs-touch".to_owned());
            if from + each >= len || named.spawn_scoped(scope, touch).is_err() {
                touch();
            }
        }
    });
    // A child that shared the pages would make the kernel copy them while a read is under way.
    // SAFETY: the bytes of the region.
    unsafe { libc::madvise(start as *mut c_void, len, libc::MADV_DONTFORK) };
}

/// A stretch of pinned memory that nobody else has.
pub(in crate::device) struct Slice {
    pinned: Arc<Pinned>,
    at: usize,
    len: usize,
}

impl Slice {
    pub(in crate::device) fn len(&self) -> usize {
        self.len
    }

    /// Its address.
    pub(in crate::device) fn start(&self) -> usize {
        self.pinned.start.as_ptr().addr() + self.at
    }

    /// Whether it is all of what was pinned together.
    pub(in crate::device) fn is_whole(&self) -> bool {
        self.len == self.pinned.len
    }

    /// Takes the first `len` bytes off, which are fewer than it has.
    pub(in crate::device) fn split(&mut self, len: usize) -> Slice {
        assert!(len < self.len, "fewer than it has");
        let first = Slice { pinned: self.pinned.clone(), at: self.at, len };
        (self.at, self.len) = (self.at + len, self.len - len);
        first
    }

    /// Adds `next` where it follows.
    pub(in crate::device) fn join(&mut self, next: Slice) -> std::result::Result<(), Slice> {
        if !Arc::ptr_eq(&self.pinned, &next.pinned) || self.at + self.len != next.at {
            return Err(next);
        }
        self.len += next.len;
        Ok(())
    }

    /// `lease` for these bytes, which a read then fills. They go to `back` once the read and who
    /// has its bytes are done with them.
    pub(in crate::device) fn lend(
        self,
        lease: Lease,
        back: Box<dyn FnOnce(Slice) + Send + Sync>,
    ) -> Lease {
        // SAFETY: a slice is a part of what was pinned.
        let (start, len) = (unsafe { self.pinned.start.add(self.at) }, self.len);
        let lent = Lent(Some((self, back)));
        // SAFETY: the slice lives as long as `lent`, and nobody else has its bytes, which come
        // from the kernel or the driver.
        let region = unsafe { Region::foreign(start, len, Box::new(lent)) };
        // SAFETY: likewise; the region is used for this alone.
        unsafe { region.lease(0..len, lease) }
    }
}

/// Takes a slice back.
type Back = Box<dyn FnOnce(Slice) + Send + Sync>;

/// A slice that is lent, and who takes it back.
struct Lent(Option<(Slice, Back)>);

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some((slice, back)) = self.0.take() {
            back(slice);
        }
    }
}
