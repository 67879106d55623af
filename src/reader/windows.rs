//! Long windows of tensors whose elements are in another order than in their shard, for example transposed tensors.
//!
//! The bytes of a row of such a tensor are scattered over the shard. The bytes of all rows of a window together
//! form runs that are long enough to be read. All reads inside the window are then answered from it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use super::Reader;
use crate::catalog::ShardId;
use crate::error::{Error, Result};
use crate::io::{Budget, Buffer};
use crate::layout::{Extent, Layout};
use crate::parallel::in_parallel;
use crate::source::{Source, page_cache};
use crate::sync::{Condvar, Mutex};
use crate::system_memory;
use crate::zeros::are_zeros;

/// Minimum and maximum length of a window in bytes.
const WINDOW_MIN: u64 = 1 << 20;
const WINDOW_MAX: u64 = 64 << 20;

/// Extra bytes for the pages at the ends of a window.
const WINDOW_ENDS: u64 = 64 << 10;

/// If the reads of the source have at least this mean length in bytes, no window is used, because separate reads are
/// fast enough.
const GOOD_READ: u64 = 64 << 10;

/// Number of bytes of a window that are read separately before the window is read as a whole.
const TRIED_MAX: u64 = 256 << 10;

/// Maximum number of places that are remembered, and maximum number of threads that fill one window.
const PLACES_MAX: usize = 32;
const FILLERS_MAX: usize = 4;

/// Maximum gap in bytes between two ranges of a shard that are requested from the kernel as one.
const AHEAD_GAP: u64 = 64 << 10;

/// Maximum number of bytes of a shard that are requested from the kernel at a time. There is no limit for a
/// sweep, whose reads have no deadline.
const AHEAD_MAX: u64 = 4 << 30;

/// Maximum wait for a window that another thread reads.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Windows of open files, in bounded memory.
pub struct GatherWindows {
    budget: Budget,
    /// Maximum total number of bytes of all windows.
    most: u64,
    /// Whether all reads go forward. If so, a window is read as a whole at the first read inside it.
    is_sweep: bool,
    state: Mutex<WindowList>,
}

#[derive(Default)]
struct WindowList {
    windows: Vec<Arc<GatherWindow>>,
    /// Places that were read recently, the latest at the end.
    tried: Vec<Tried>,
}

/// A place of a file.
struct WindowPlace {
    file: Weak<Layout>,
    range: Range<u64>,
}

struct Tried {
    place: WindowPlace,
    /// Number of bytes that were read there without a window, or `TRIED_MAX` if the window was read.
    bytes: u64,
}

struct GatherWindow {
    place: WindowPlace,
    due: Due,
    /// Number of bytes that were copied from the window.
    taken: AtomicU64,
    /// Time of the last read from the window.
    used: Mutex<Instant>,
    content: Mutex<WindowBytes>,
    filled: Condvar,
}

enum WindowBytes {
    Waiting,
    There(Arc<GatheredBytes>),
    /// The read of the window failed. Threads that wait for it read without a window.
    Failed,
}

struct GatheredBytes {
    bytes: Buffer,
    /// The sources of the bytes.
    sources: Vec<Arc<Source>>,
}

/// Parts of shards, in order and with gaps between them.
type ShardParts = BTreeMap<ShardId, Vec<Range<u64>>>;

/// The reason why a window has to be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Due {
    /// Enough bytes of it were read without a window.
    Tried,
    /// The window in front of this window was read, or all reads go forward.
    GoesOn,
}

impl WindowPlace {
    fn is(&self, layout: &Arc<Layout>, range: &Range<u64>) -> bool {
        self.range == *range && std::ptr::eq(self.file.as_ptr(), Arc::as_ptr(layout))
    }
}

impl GatherWindows {
    /// Windows in memory of `budget`, with at most `most` bytes. `is_sweep` says that all reads go forward.
    pub(crate) fn new(budget: Budget, most: u64, is_sweep: bool) -> GatherWindows {
        GatherWindows { budget, most, is_sweep, state: Mutex::default() }
    }

    /// Reads bytes of a file from `offset` on into `target`. Uses windows if that saves reads. Returns the
    /// number of bytes, which is less than `target.len()` only at the end of the file.
    ///
    /// # Errors
    /// The errors of `Reader::read_at`.
    pub(crate) fn read_at(&self, reader: &Reader, offset: u64, target: &mut [u8]) -> Result<usize> {
        let len = (target.len() as u64).min(reader.len().saturating_sub(offset)) as usize;
        let mut done = 0;
        while done < len {
            let start = offset + done as u64;
            let (place, is_gathered) = self.window_at(reader, start);
            let part = start..place.end.min(offset + len as u64).max(start + 1);
            let bytes = &mut target[done..][..(part.end - part.start) as usize];
            if !is_gathered || !self.take(reader, &place, part.clone(), bytes)? {
                reader.read_at(start, bytes)?;
            }
            done += bytes.len();
        }
        Ok(len)
    }

    /// The range of the window that contains byte `offset`, or a range that needs no window. The flag says whether the
    /// range is that of a window.
    fn window_at(&self, reader: &Reader, offset: u64) -> (Range<u64>, bool) {
        let layout = reader.layout.as_ref().filter(|layout| layout.has_gathers);
        let Some(layout) = layout.filter(|_| !reader.is_encrypted()) else {
            return (offset..reader.len(), false);
        };
        let (_, tensor) = layout.tensor_at(offset);
        // While a window is read, the one before it remains in memory, including the pages at its ends.
        let most = (self.most / 2).saturating_sub(WINDOW_ENDS).max(1);
        let longest = WINDOW_MAX.min(most).min(tensor.end - tensor.start);
        let mut len = WINDOW_MIN.min(longest);
        loop {
            let count = layout.extent_count(&(tensor.start..tensor.start + len));
            if count.gathered == 0 && len == longest {
                return (tensor, false);
            }
            let is_good = count.gathered <= 2 * len
                && count.gathered / count.extents.max(1) >= GOOD_READ.min(len);
            if len == longest || is_good {
                break;
            }
            len = (2 * len).min(longest);
        }
        let start = tensor.start + (offset - tensor.start) / len.max(1) * len;
        (start..(start + len).min(tensor.end), true)
    }

    /// Copies the bytes `part` of the file from the window at `range`. Returns `false` if there is no window.
    /// The bytes then have to be read without one.
    fn take(
        &self,
        reader: &Reader,
        range: &Range<u64>,
        part: Range<u64>,
        target: &mut [u8],
    ) -> Result<bool> {
        let Some(layout) = &reader.layout else { return Ok(false) };
        let mut state = self.state.lock();
        let known = state.windows.iter().find(|window| window.place.is(layout, range)).cloned();
        let is_new = known.is_none();
        let window = match known {
            Some(window) => window,
            None => {
                let Some(due) = state.due(layout, range, part.end - part.start, self.is_sweep)
                else {
                    return Ok(false);
                };
                let window = Arc::new(GatherWindow::at(layout, range, due));
                state.windows.push(window.clone());
                window
            }
        };
        drop(state);
        let bytes = if is_new { self.fill(reader, &window)? } else { window.wait(WAIT_MAX) };
        if !is_new && bytes.as_ref().is_none_or(|bytes| bytes.is_changed()) {
            // After this, no other thread waits for the window or uses its bytes.
            self.forget(&window);
            return Ok(false);
        }
        let Some(bytes) = bytes else { return Ok(false) };
        let from = (part.start - range.start) as usize;
        target.copy_from_slice(&bytes.bytes[from..][..target.len()]);
        *window.used.lock() = Instant::now();
        let len = target.len() as u64;
        if window.taken.fetch_add(len, Ordering::Relaxed) + len >= range.end - range.start {
            self.forget(&window);
        }
        Ok(true)
    }

    fn forget(&self, window: &Arc<GatherWindow>) {
        self.state.lock().windows.retain(|other| !Arc::ptr_eq(other, window));
    }

    /// Reads the bytes of a window. `None` if there is no memory for it.
    fn fill(
        &self,
        reader: &Reader,
        window: &Arc<GatherWindow>,
    ) -> Result<Option<Arc<GatheredBytes>>> {
        let range = &window.place.range;
        let unless_filled = FailUnlessFilled { windows: self, window };
        let Some(layout) = &reader.layout else { return Ok(None) };
        let Some(mut bytes) = self.memory(range, window) else { return Ok(None) };
        let parts = shard_parts(layout, range);
        let sources = parts.keys().map(|shard| reader.sources[shard.0 as usize].clone()).collect();
        let longest = if self.is_sweep { u64::MAX } else { AHEAD_MAX };
        read_ahead(reader, parts, window.due == Due::GoesOn, longest);
        fill_in_parts(reader, range.start, &mut bytes)?;
        let bytes = Arc::new(GatheredBytes { bytes, sources });
        *window.content.lock() = WindowBytes::There(bytes.clone());
        drop(unless_filled);
        Ok(Some(bytes))
    }

    /// Allocates memory for a window. If necessary, drops the windows that were not used for longest.
    fn memory(&self, range: &Range<u64>, new: &Arc<GatherWindow>) -> Option<Buffer> {
        let len = Buffer::len_for(range);
        loop {
            let held: u64 = self.state.lock().windows.iter().map(|window| window.held()).sum();
            if held + len <= self.most.max(len)
                && let Some(reserved) = self.budget.try_reserve(len)
            {
                return Some(Buffer::new((range.end - range.start) as usize, reserved));
            }
            self.drop_oldest(new).then_some(())?;
        }
    }

    /// Drops the window that was not used for longest, except `kept`. Returns whether there was one.
    fn drop_oldest(&self, kept: &Arc<GatherWindow>) -> bool {
        let mut state = self.state.lock();
        let windows = state.windows.iter().enumerate();
        let idle = windows.filter(|(_, other)| !Arc::ptr_eq(other, kept) && other.held() > 0);
        let oldest = idle.min_by_key(|(_, other)| *other.used.lock()).map(|(place, _)| place);
        oldest.map(|place| state.windows.remove(place)).is_some()
    }

    /// Drops the windows that were not used for `age`. Returns whether there were any.
    pub(crate) fn drop_idle(&self, age: Duration) -> bool {
        let mut state = self.state.lock();
        let before = state.windows.len();
        state.windows.retain(|window| window.held() == 0 || window.used.lock().elapsed() < age);
        state.windows.len() < before
    }
}

impl WindowList {
    /// Whether the window at `range` has to be read for a request of `len` bytes in it, and the reason.
    fn due(
        &mut self,
        layout: &Arc<Layout>,
        range: &Range<u64>,
        len: u64,
        is_sweep: bool,
    ) -> Option<Due> {
        let follows = |tried: &Tried| {
            let before = &tried.place;
            before.range.end == range.start
                && tried.bytes >= TRIED_MAX
                && before.is(layout, &before.range)
        };
        let goes_on = is_sweep || self.tried.iter().any(follows);
        let known = self.tried.iter().position(|tried| tried.place.is(layout, range));
        let is_new = known.is_none();
        let mut tried = match known {
            Some(place) => self.tried.remove(place),
            None => Tried { place: WindowPlace::new(layout, range), bytes: 0 },
        };
        // If the window was read before and then dropped, the count starts again.
        tried.bytes = if tried.bytes >= TRIED_MAX { len } else { tried.bytes + len };
        let is_due = tried.bytes >= TRIED_MAX.min(range.end - range.start) || is_new && goes_on;
        if is_due {
            tried.bytes = TRIED_MAX;
        }
        self.tried.push(tried);
        if self.tried.len() > PLACES_MAX {
            self.tried.remove(0);
        }
        is_due.then_some(if goes_on { Due::GoesOn } else { Due::Tried })
    }
}

impl WindowPlace {
    fn new(layout: &Arc<Layout>, range: &Range<u64>) -> WindowPlace {
        WindowPlace { file: Arc::downgrade(layout), range: range.clone() }
    }
}

impl GatherWindow {
    fn at(layout: &Arc<Layout>, range: &Range<u64>, due: Due) -> GatherWindow {
        GatherWindow {
            place: WindowPlace::new(layout, range),
            due,
            taken: AtomicU64::new(0),
            used: Mutex::new(Instant::now()),
            content: Mutex::new(WindowBytes::Waiting),
            filled: Condvar::new(),
        }
    }

    /// Waits for the bytes of a window that another thread reads. `None` if they do not come within `timeout`.
    fn wait(&self, timeout: Duration) -> Option<Arc<GatheredBytes>> {
        let is_waiting = |content: &mut WindowBytes| matches!(content, WindowBytes::Waiting);
        match &*self.filled.wait_timeout_while(self.content.lock(), timeout, is_waiting) {
            WindowBytes::There(bytes) => Some(bytes.clone()),
            WindowBytes::Waiting | WindowBytes::Failed => None,
        }
    }

    /// Number of bytes of memory that the window has.
    fn held(&self) -> u64 {
        match &*self.content.lock() {
            WindowBytes::There(bytes) => bytes.bytes.reserved(),
            WindowBytes::Waiting | WindowBytes::Failed => 0,
        }
    }
}

/// Wakes the threads that wait for a window when the read ends, even if it fails or panics.
struct FailUnlessFilled<'a> {
    windows: &'a GatherWindows,
    window: &'a Arc<GatherWindow>,
}

impl Drop for FailUnlessFilled<'_> {
    fn drop(&mut self) {
        let mut content = self.window.content.lock();
        let is_filled = matches!(*content, WindowBytes::There(_));
        if !is_filled {
            *content = WindowBytes::Failed;
        }
        drop(content);
        if !is_filled {
            self.windows.forget(self.window);
        }
        self.window.filled.notify_all();
    }
}

impl GatheredBytes {
    fn is_changed(&self) -> bool {
        self.sources.iter().any(|source| source.is_changed_now())
    }
}

/// The parts of shards from which the bytes `range` are read.
fn shard_parts(layout: &Layout, range: &Range<u64>) -> ShardParts {
    let mut found = ShardParts::new();
    layout.extents(range.clone(), &mut |extent| {
        if let Extent::Run { shard, range, .. }
        | Extent::Scatter { shard, range, .. }
        | Extent::Cast { shard, range, .. } = extent
            && !are_zeros(range.start)
        {
            add_part(found.entry(shard).or_default(), range);
        }
    });
    for parts in found.values_mut() {
        parts.sort_unstable_by_key(|part| part.start);
        let mut joined = Vec::with_capacity(parts.len());
        parts.drain(..).for_each(|part| add_part(&mut joined, part));
        *parts = joined;
    }
    found
}

/// Adds a part to `parts`. If it is close to the last part, the two become one.
fn add_part(parts: &mut Vec<Range<u64>>, part: Range<u64>) {
    match parts.last_mut() {
        Some(last) if last.start <= part.start && part.start <= last.end + AHEAD_GAP => {
            last.end = last.end.max(part.end);
        }
        _ => parts.push(part),
    }
}

/// The ranges to read ahead for `parts`. The result is the whole range from the first part to the last one in two
/// cases: the parts are at least half of this range, or the reader continues and will need the rest too.
fn ranges_ahead(parts: Vec<Range<u64>>, goes_on: bool, longest: u64) -> Vec<Range<u64>> {
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return parts };
    let span = first.start..last.end;
    let len: u64 = parts.iter().map(|part| part.end - part.start).sum();
    let span_len = span.end - span.start;
    if len >= span_len / 2 || goes_on && span_len <= longest { vec![span] } else { parts }
}

/// Asks the kernel to read the bytes from which a window is gathered, so that the kernel uses long reads. This is done
/// for local shards only, and not if the bytes would fill much of the memory.
fn read_ahead(reader: &Reader, parts: ShardParts, goes_on: bool, longest: u64) {
    let free = system_memory::available().unwrap_or(0) / 2;
    for (shard, parts) in parts {
        let source = &reader.sources[shard.0 as usize];
        let asked = ranges_ahead(parts, goes_on, longest.min(free));
        let len: u64 = asked.iter().map(|part| part.end - part.start).sum();
        if source.may_block() || len > free {
            continue;
        }
        if let Some(file) = source.open_bytes() {
            asked.iter().for_each(|part| page_cache::read_ahead(&file, part));
        }
    }
}

/// Reads bytes from `start` on into `target` with several threads.
fn fill_in_parts(reader: &Reader, start: u64, target: &mut [u8]) -> Result<()> {
    let threads = available_parallelism().map_or(1, |cores| cores.get()).min(FILLERS_MAX);
    let len = target.len().div_ceil(threads).next_multiple_of(4096);
    let parts: Vec<_> = target.chunks_mut(len).map(|part| Mutex::new(Some(part))).collect();
    let fill = |number: u64| {
        let part = parts[number as usize].lock().take();
        let target = part.ok_or_else(|| Error::internal("a part of a window was read twice"))?;
        reader.read_streamed(start + number * len as u64, target)
    };
    in_parallel(parts.len() as u64, threads, threads as u64, &fill, &mut |()| Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    // An earlier version had a bug: all of a cold tensor was requested although a reader needed only a few rows.
    #[test]
    fn a_window_asks_for_its_own_parts_of_a_shard_unless_the_reader_goes_on() {
        const GIB: u64 = 1 << 30;
        let mut parts = Vec::new();
        (0..10).for_each(|at| add_part(&mut parts, at * GIB..at * GIB + 4096));
        assert_eq!(ranges_ahead(parts.clone(), false, u64::MAX), parts);
        let all = 0..9 * GIB + 4096;
        assert_eq!(ranges_ahead(parts.clone(), true, u64::MAX), std::slice::from_ref(&all));
        assert_eq!(ranges_ahead(parts.clone(), true, AHEAD_MAX), parts);
        let mut near = Vec::new();
        add_part(&mut near, 0..GIB);
        add_part(&mut near, GIB + AHEAD_GAP..2 * GIB);
        assert_eq!(near, std::slice::from_ref(&(0..2 * GIB)));
        add_part(&mut near, 3 * GIB..4 * GIB);
        assert_eq!(ranges_ahead(near, false, AHEAD_MAX), std::slice::from_ref(&(0..4 * GIB)));
    }

    // An earlier version had a bug: a read waited for another one that stalled.
    #[test]
    fn a_read_does_not_wait_for_ever_for_the_window_of_another() {
        let checkpoint = crate::Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref()).unwrap();
        let layout = checkpoint.single_file().layout().unwrap();
        let window = GatherWindow::at(&layout, &(0..WINDOW_MIN), Due::Tried);
        assert!(window.wait(Duration::from_millis(1)).is_none());
    }
}
