//! Pinned memory for loads to a GPU. Reads put their bytes into it. Pinning takes time, so the memory grows in steps
//! while reads are in flight. It is kept for the next load.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::cuda::{Gpu, Pinned, Pinning, Slice};
use crate::error::Result;
use crate::io::{FreeList, ReadTarget, Reservation};
use crate::sync::Mutex;

/// Number of bytes that are pinned at a time.
const STEP: u64 = 64 << 20;

/// The size of a step is a multiple of this number of bytes, so that it consists of whole huge pages.
const UNIT: u64 = 2 << 20;

/// The pinned memory of one loader. Clones share it.
#[derive(Clone)]
pub(crate) struct PinnedPool(Arc<PoolInner>);

struct PoolInner {
    gpu: Gpu,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The memory of each step, and the free parts of it.
    steps: Vec<(Arc<Pinned>, FreeList)>,
    /// Total number of bytes of all steps, whether in use or not.
    pinned: u64,
    /// Number of bytes in use, and its maximum.
    used: u64,
    used_peak: u64,
    /// Whether a thread is pinning the next step.
    growing: bool,
    /// Whether the pool could not grow, so that it keeps its size.
    full: bool,
    /// The worst way of pinning among the steps.
    how: Pinning,
    /// Time spent pinning.
    pinning: Duration,
}

/// The use of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PinnedUsage {
    /// Number of pinned bytes.
    pub(crate) pinned: u64,
    /// Maximum number of bytes in use since the last call of `PinnedPool::taken`.
    pub(crate) peak: u64,
    /// Time spent pinning since the last call of `PinnedPool::taken`.
    pub(crate) pinning: Duration,
    /// The way in which the memory is pinned.
    pub(crate) how: Pinning,
}

impl PoolInner {
    fn put_back(&self, slice: &Slice) {
        let mut state = self.state.lock();
        state.used -= slice.len as u64;
        let mut steps = state.steps.iter_mut();
        if let Some((_, free)) = steps.find(|(pinned, _)| Arc::ptr_eq(pinned, &slice.pinned)) {
            free.give_back(slice.offset, slice.len);
        }
    }
}

impl State {
    /// Removes and returns the steps that are free as a whole.
    fn take_unused(&mut self) -> Vec<Arc<Pinned>> {
        let unused: Vec<_> = self
            .steps
            .extract_if(.., |(pinned, free)| free.is_whole(pinned.len()))
            .map(|(pinned, _)| pinned)
            .collect();
        self.pinned -= unused.iter().map(|pinned| pinned.len() as u64).sum::<u64>();
        self.full = false;
        unused
    }

    /// Takes `len` consecutive bytes from the first step that has them free.
    fn take(&mut self, len: usize) -> Option<Slice> {
        let slice = self.steps.iter_mut().find_map(|(pinned, free)| {
            let offset = free.take(len)?;
            Some(Slice { pinned: pinned.clone(), offset, len })
        })?;
        self.used += len as u64;
        self.used_peak = self.used_peak.max(self.used);
        Some(slice)
    }
}

impl PinnedPool {
    pub(crate) fn new(gpu: Gpu) -> PinnedPool {
        PinnedPool(Arc::new(PoolInner { gpu, state: Mutex::default() }))
    }

    /// A target for a read into `len` bytes of pinned memory. The memory returns to the pool when the bytes of the read
    /// are dropped. `None` if other reads leave too few consecutive bytes free.
    pub(crate) fn target(&self, len: u64, reservation: Reservation) -> Option<ReadTarget> {
        let slice = self.0.state.lock().take(usize::try_from(len).ok()?)?;
        let pool: Weak<PoolInner> = Arc::downgrade(&self.0);
        let give_back = move |slice: Slice| {
            // If the pool was dropped, the memory is unpinned when the slice is dropped here.
            if let Some(pool) = pool.upgrade() {
                pool.put_back(&slice);
            }
        };
        Some(slice.lend(reservation, Box::new(give_back)))
    }

    /// Whether the pool should grow. If so, the caller must call `grow`. The limit of the pool is `limit` bytes. The
    /// limit does not apply if `alone` is true, which means that the load has no read in flight. Such a load would
    /// otherwise wait for other loads, which may keep their memory for ever.
    pub(crate) fn begins_to_grow(&self, limit: u64, alone: bool) -> bool {
        let mut state = self.0.state.lock();
        let fits = state.pinned < limit;
        if !state.growing && alone && state.used == 0 && (state.full || !fits) {
            // The pool cannot grow, and no free step is long enough for the read. So the free steps make way for a
            // longer step.
            let free = state.take_unused();
            drop(state);
            drop(free);
            state = self.0.state.lock();
        }
        let grows = !state.growing && !state.full && (alone || fits);
        state.growing |= grows;
        grows
    }

    /// Pins one more step of at least `len` bytes, for a load that needs at most `wanted` bytes at a time.
    ///
    /// # Errors
    /// If no memory can be pinned and the pool is empty.
    pub(crate) fn grow(&self, len: u64, limit: u64, wanted: u64) -> Result<()> {
        let before = self.0.state.lock().pinned;
        let left = limit.saturating_sub(before);
        let step = STEP.min(left).min(wanted).max(len).next_multiple_of(UNIT);
        let started = Instant::now();
        let pinned = Pinned::new(&self.0.gpu, step as usize, before == 0);
        let mut state = self.0.state.lock();
        state.growing = false;
        state.pinning += started.elapsed();
        match pinned {
            Ok(pinned) => {
                state.pinned += step;
                state.how = if before == 0 { pinned.how } else { state.how.max(pinned.how) };
                let free = FreeList::new(pinned.len());
                state.steps.push((pinned, free));
                Ok(())
            }
            Err(e) if state.pinned == 0 => Err(e),
            Err(e) => {
                tracing::warn!("{e}; loading goes on with {} bytes of pinned memory", state.pinned);
                state.full = true;
                Ok(())
            }
        }
    }

    /// Unpins and frees the steps that are not in use.
    pub(crate) fn release(&self) {
        let free = self.0.state.lock().take_unused();
        // Unpinning takes time, so the lock was released before.
        drop(free);
    }

    /// The use of the pool. The maximum and the time are those since the last call.
    pub(crate) fn taken(&self) -> PinnedUsage {
        let mut state = self.0.state.lock();
        let (used, peak) = (state.used, state.used_peak);
        state.used_peak = used;
        let pinning = std::mem::take(&mut state.pinning);
        PinnedUsage { pinned: state.pinned, peak, pinning, how: state.how }
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedPool({} bytes)", self.0.state.lock().pinned)
    }
}
