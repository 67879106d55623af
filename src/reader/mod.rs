//! Reads of a virtual file: the extents of a layout, turned into reads of its sources.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::checkpoint::VirtualFile;
use crate::error::Result;
use crate::io::{Engine, Read, read_all};
use crate::layout::{Extent, Layout, LayoutOrders};
use crate::prefetch::{ReadOrder, TensorMap, TensorSpan};
use crate::source::Source;
use crate::strided::{RunRange, StridedCopy};

pub use block::{Block, BlockPlan, Done};

mod block;

/// Most bytes read at a time, which bounds the memory that gathering takes.
const WINDOW_LEN_MAX: u64 = 8 << 20;

thread_local! {
    /// Bytes of column pieces on their way to their places.
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// An open virtual file, or a file of the source as it is.
///
/// ```
/// use tensorfs::{Checkpoint, Reader};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let reader = Reader::open(&checkpoint.single_file())?;
/// let mut header_len = [0; 8];
/// assert_eq!(reader.read_at(0, &mut header_len)?, 8);
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Reader {
    /// `None` for a whole file.
    layout: Option<Arc<Layout>>,
    /// The sources by shard number.
    sources: Vec<Arc<Source>>,
    len: u64,
    /// The virtual file, whose tensor names decide in which orders they may be read. `None` for a
    /// whole file.
    file: Option<VirtualFile>,
    /// Set once the tensors are sorted.
    orders: Arc<OnceLock<LayoutOrders>>,
    /// Whether a thread is sorting the orders or has sorted them.
    sorting: Arc<AtomicBool>,
}

/// Carries out reads of sources. Returns `false` if it did not, because that needs the disk.
type Carry<'a> = &'a dyn Fn(&mut [Read<'_>]) -> Result<bool>;

/// A read directly into its place: offset in the window, and the range to read.
struct Direct<'a> {
    offset: u64,
    source: &'a Arc<Source>,
    range: Range<u64>,
}

impl Direct<'_> {
    /// Whether bytes `range` of `source`, at `offset` of the window, follow this read in the source
    /// and in the window.
    fn goes_on(&self, offset: u64, source: &Arc<Source>, range: &Range<u64>) -> bool {
        Arc::ptr_eq(self.source, source)
            && self.range.end == range.start
            && self.offset + (self.range.end - self.range.start) == offset
    }
}

/// A read whose bytes are spread over the window afterwards.
struct SpreadRead<'a> {
    tensor_at: u64,
    source: &'a Arc<Source>,
    range: Range<u64>,
    runs: &'a StridedCopy,
    part: RunRange,
}

impl Reader {
    /// A reader of `file`.
    ///
    /// # Errors
    /// The errors of `VirtualFile::layout`.
    pub fn open(file: &VirtualFile) -> Result<Reader> {
        let layout = file.layout()?;
        Ok(Reader {
            len: layout.len(),
            layout: Some(layout),
            sources: file.sources().to_vec(),
            file: Some(file.clone()),
            orders: Arc::default(),
            sorting: Arc::default(),
        })
    }

    /// A reader of `source` as it is.
    #[doc(hidden)]
    pub fn whole(source: Arc<Source>) -> Reader {
        let len = source.len();
        Reader {
            layout: None,
            sources: vec![source],
            len,
            file: None,
            orders: Arc::default(),
            sorting: Arc::default(),
        }
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The sources, in the catalog's order.
    #[doc(hidden)]
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// At the first call, sorts the tensors in other orders than the file's. Meanwhile only the
    /// file's order is available, so that no other thread waits.
    #[doc(hidden)]
    pub fn sort_orders(&self) {
        let (Some(layout), Some(file)) = (&self.layout, &self.file) else { return };
        if !self.sorting.swap(true, Ordering::Relaxed) {
            let _ = self.orders.set(layout.orders(file.catalog()));
        }
    }

    /// Reads bytes of the virtual file from `offset` on into `buf`, on this thread.
    ///
    /// Returns how many: fewer than `buf.len()` only at the end of the file.
    /// # Errors
    /// The errors of the sources; the content of `buf` is then undefined.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let len = (buf.len() as u64).min(self.len.saturating_sub(offset)) as usize;
        self.read_windows(offset, &mut buf[..len], &|reads| read_all(reads).map(|()| true))?;
        Ok(len)
    }

    /// Like `read_at`, but reads only from the kernel's page cache and never waits. Returns `false`
    /// if the cache does not hold all bytes. `offset` and `buf` lie inside the file.
    ///
    /// # Errors
    /// The errors of the sources; the content of `buf` is then undefined.
    #[doc(hidden)]
    pub fn read_cached(&self, engine: &Engine, offset: u64, buf: &mut [u8]) -> Result<bool> {
        self.read_windows(offset, buf, &|reads| engine.read_cached(reads))
    }

    fn read_windows(&self, mut offset: u64, buf: &mut [u8], carry: Carry<'_>) -> Result<bool> {
        for window in buf.chunks_mut(WINDOW_LEN_MAX as usize) {
            if !self.read_window(offset, window, carry)? {
                return Ok(false);
            }
            offset += window.len() as u64;
        }
        Ok(true)
    }

    /// Fills `window`, which lies inside the file at `start`.
    fn read_window(&self, start: u64, window: &mut [u8], carry: Carry<'_>) -> Result<bool> {
        let Some(layout) = &self.layout else {
            let source = &self.sources[0];
            return carry(&mut [Read { source, offset: start, target: window }]);
        };
        let mut direct: Vec<Direct<'_>> = Vec::new();
        let mut spread = Vec::new();
        let end = start + window.len() as u64;
        layout.extents(start..end, &mut |extent| match extent {
            Extent::Header { offset, bytes } => {
                window[(offset - start) as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            Extent::Run { offset, shard, range } => {
                let (offset, source) = (offset - start, &self.sources[shard.0 as usize]);
                match direct.last_mut() {
                    Some(last) if last.goes_on(offset, source, &range) => {
                        last.range.end = range.end
                    }
                    _ => direct.push(Direct { offset, source, range }),
                }
            }
            Extent::Scatter { tensor_at, shard, range, runs, part } => {
                let source = &self.sources[shard.0 as usize];
                spread.push(SpreadRead { tensor_at, source, range, runs, part });
            }
        });
        let scratch_len: u64 = spread.iter().map(|s| s.range.end - s.range.start).sum();
        let mut scratch = SCRATCH.take();
        // The buffer never shrinks, because fresh memory costs more than the copies through it.
        if scratch.len() < scratch_len as usize {
            scratch.resize(scratch_len as usize, 0);
        }
        let mut reads = targets(&mut direct, window);
        let mut free = scratch.as_mut_slice();
        for SpreadRead { source, range, .. } in &spread {
            let (target, rest) = free.split_at_mut((range.end - range.start) as usize);
            reads.push(Read { source, offset: range.start, target });
            free = rest;
        }
        let there = reads.is_empty() || carry(&mut reads)?;
        drop(reads);
        if !there {
            SCRATCH.set(scratch);
            return Ok(false);
        }
        let mut rest = scratch.as_slice();
        for SpreadRead { tensor_at, range, runs, part, .. } in &spread {
            let (bytes, after) = rest.split_at((range.end - range.start) as usize);
            rest = after;
            // The part of the tensor that the window holds, counted from the tensor's start.
            let (target, target_start) = if *tensor_at >= start {
                (&mut window[(tensor_at - start) as usize..], 0)
            } else {
                (&mut window[..], start - tensor_at)
            };
            runs.scatter(part, bytes, target, target_start);
        }
        SCRATCH.set(scratch);
        Ok(true)
    }
}

impl TensorMap for Reader {
    fn at(&self, offset: u64) -> TensorSpan {
        // A whole file counts as one tensor.
        let (place, range) = match &self.layout {
            Some(layout) => layout.tensor_at(offset),
            None => (Some(0), 0..self.len),
        };
        TensorSpan { place: place.map_or(0, |place| place + 1), range }
    }

    fn after(&self, place: u32, order: ReadOrder) -> Option<TensorSpan> {
        let layout = self.layout.as_ref()?;
        let mut next = match (order, place.checked_sub(1)) {
            (ReadOrder::File, _) | (_, None) => place,
            (ReadOrder::Name, Some(place)) => self.orders.get()?.by_name.after(place)?,
            (ReadOrder::Natural, Some(place)) => self.orders.get()?.by_number.after(place)?,
            (ReadOrder::Shard, Some(place)) => self.orders.get()?.by_shard.after(place)?,
        };
        let mut range = layout.bytes_at(next)?;
        while range.is_empty() {
            next += 1;
            range = layout.bytes_at(next)?;
        }
        Some(TensorSpan { place: next + 1, range })
    }
}

/// The reads of `direct`, each with its own part of `window`; they do not overlap.
fn targets<'a>(direct: &mut [Direct<'a>], window: &'a mut [u8]) -> Vec<Read<'a>> {
    direct.sort_by_key(|read| read.offset);
    let mut reads = Vec::with_capacity(direct.len());
    let (mut rest, mut offset) = (window, 0);
    for Direct { offset: wanted, source, range } in direct {
        let (_, from) = std::mem::take(&mut rest).split_at_mut((*wanted - offset) as usize);
        let (target, after) = from.split_at_mut((range.end - range.start) as usize);
        offset = *wanted + target.len() as u64;
        rest = after;
        reads.push(Read { source, offset: range.start, target });
    }
    reads
}
