//! Pinned memory that reads land in on their way to a GPU. It grows in steps while reads are
//! under way, since pinning takes time, and is kept for the next load.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::cuda::{Gpu, Pinned, Pinning, Slice};
use crate::error::Result;
use crate::io::Lease;
use crate::sync::Mutex;

/// Bytes that are pinned at a time.
const STEP: u64 = 64 << 20;

/// Unit of steps: whole huge pages.
const UNIT: u64 = 2 << 20;

/// Pinned memory in use by one loader. Clones are the same.
#[derive(Clone)]
pub(crate) struct Ring(Arc<Shared>);

struct Shared {
    gpu: Gpu,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is free: by address, neighbours joined.
    free: Vec<Slice>,
    /// All steps, in use or not.
    pinned: u64,
    /// Bytes of them that are in use, and the most there have been.
    used: u64,
    used_peak: u64,
    /// Somebody pins the next step.
    growing: bool,
    /// It could not grow, and stays as it is.
    full: bool,
    /// The worst of them.
    how: Pinning,
    /// Time spent pinning.
    pinning: Duration,
}

/// What a ring has taken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Use {
    /// Bytes pinned.
    pub(crate) pinned: u64,
    /// Most bytes in use since it was asked last.
    pub(crate) peak: u64,
    /// Time spent pinning since.
    pub(crate) pinning: Duration,
    /// How they are pinned.
    pub(crate) how: Pinning,
}

impl Shared {
    fn put_back(&self, slice: Slice) {
        let mut state = self.state.lock();
        state.used -= slice.len() as u64;
        state.insert(slice);
    }
}

impl State {
    fn insert(&mut self, slice: Slice) {
        let at = self.free.partition_point(|other| other.start() < slice.start());
        self.free.insert(at, slice);
        for left in [at, at.wrapping_sub(1)] {
            if left < self.free.len() && left + 1 < self.free.len() {
                let right = self.free.remove(left + 1);
                if let Err(right) = self.free[left].join(right) {
                    self.free.insert(left + 1, right);
                }
            }
        }
    }

    /// Takes the steps out of which nothing is in use.
    fn take_whole(&mut self) -> Vec<Slice> {
        let free = std::mem::take(&mut self.free);
        let (whole, parts): (Vec<_>, Vec<_>) = free.into_iter().partition(Slice::is_whole);
        self.free = parts;
        self.pinned -= whole.iter().map(|slice| slice.len() as u64).sum::<u64>();
        self.full = false;
        whole
    }

    /// The first that is long enough, so that few are cut.
    fn take(&mut self, len: usize) -> Option<Slice> {
        let at = self.free.iter().position(|slice| slice.len() >= len)?;
        let slice = match self.free[at].len() == len {
            true => self.free.remove(at),
            false => self.free[at].split(len),
        };
        self.used += len as u64;
        self.used_peak = self.used_peak.max(self.used);
        Some(slice)
    }
}

impl Ring {
    pub(crate) fn new(gpu: Gpu) -> Ring {
        Ring(Arc::new(Shared { gpu, state: Mutex::default() }))
    }

    /// `lease` with pinned memory behind it, as many bytes as a read of `len_for` needs; none as
    /// long as others have it. It comes back with the last of what is made of it.
    pub(crate) fn lease(&self, len: u64, lease: Lease) -> Option<Lease> {
        let slice = self.0.state.lock().take(usize::try_from(len).ok()?)?;
        let home: Weak<Shared> = Arc::downgrade(&self.0);
        Some(slice.lend(
            lease,
            Box::new(move |slice| {
                // Without a home it is unpinned here and now.
                if let Some(home) = home.upgrade() {
                    home.put_back(slice);
                }
            }),
        ))
    }

    /// Whether `grow` is to be called so that there is more; it has to be called then. There are
    /// at most `limit` bytes in all, unless the load is `alone` with nothing: it would have to
    /// wait for others, which may hold what they have for ever.
    pub(crate) fn begins_to_grow(&self, limit: u64, alone: bool) -> bool {
        let mut state = self.0.state.lock();
        let fits = state.pinned < limit;
        if !state.growing && alone && state.used == 0 && (state.full || !fits) {
            // Too short, all of it.
            let free = state.take_whole();
            drop(state);
            drop(free);
            state = self.0.state.lock();
        }
        let grows = !state.growing && !state.full && (alone || fits);
        state.growing |= grows;
        grows
    }

    /// Pins one step more, for a load that needs `wanted` bytes at a time at most.
    ///
    /// # Errors
    /// Where no memory can be had, and there was none before.
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
                state.how = if before == 0 { pinned.how() } else { state.how.max(pinned.how()) };
                state.insert(pinned.whole());
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

    /// Unpins and frees what is not in use.
    pub(crate) fn release(&self) {
        let free = self.0.state.lock().take_whole();
        // Takes its time, which nobody else has to wait for.
        drop(free);
    }

    /// What it has taken since this was asked last.
    pub(crate) fn taken(&self) -> Use {
        let mut state = self.0.state.lock();
        let (used, peak) = (state.used, state.used_peak);
        state.used_peak = used;
        let pinning = std::mem::take(&mut state.pinning);
        Use { pinned: state.pinned, peak, pinning, how: state.how }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({} bytes)", self.0.state.lock().pinned)
    }
}
