//! Reads of a virtual file. The extents of its layout are converted to reads of its sources.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::checkpoint::VirtualFile;
use crate::error::Result;
use crate::io::{SENT_MAX_OF_ONE, read_all, read_all_stored};
use crate::layout::{Extent, ExtentCount, Layout, PlainRun};
use crate::order::{LayerPart, Order, Orders, TensorMap, TensorSpan};
use crate::prefetch::Reach;
use crate::source::Source;
use crate::zeros::are_zeros;

use self::plan::{BLOCK_LEN, BLOCKS_MIN, PARTS_MAX, SPREAD_LEN_MAX, STORE_BLOCK_LEN_MAX};
pub use block::{Block, Done};
pub use plan::BlockPlan;
pub use windows::GatherWindows;

mod block;
mod plan;
#[cfg(test)]
mod tests;
mod windows;

/// Maximum number of bytes read at a time. It limits the memory for gathering.
const WINDOW_LEN_MAX: usize = 8 << 20;

/// Maximum number of parts of a window whose elements are in another order than in the source. Each part has
/// elements of all rows of the window, so a shorter window would have the same number of parts.
const WINDOW_PARTS_MAX: u64 = 32 << 10;

/// Maximum number of parts of a block whose elements are in another order than in the source. Reads with more of these
/// parts go through `GatherWindows`.
const GATHER_PARTS_MAX: u64 = 256;

/// An open virtual file, or an unchanged file of the source.
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
    /// `None` for an unchanged file.
    layout: Option<Arc<Layout>>,
    /// The sources by shard number.
    sources: Vec<Arc<Source>>,
    len: u64,
    /// The virtual file. The names of its tensors decide in which orders they may be read. `None` for an
    /// unchanged file.
    file: Option<VirtualFile>,
    /// The orders of the tensors. Empty until the tensors have been sorted.
    orders: Arc<OnceLock<Orders>>,
    /// Whether a thread is sorting the orders or has sorted them.
    sorting: Arc<AtomicBool>,
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

    /// A reader of the unchanged file `source`.
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

    /// The maximum readahead for the readers of this file.
    pub(crate) fn reach(&self) -> Reach {
        let is_far =
            |source: &Arc<Source>| source.store_kind().is_some() && source.copy().is_none();
        if self.sources.iter().any(is_far) { Reach::FAR } else { Reach::NEAR }
    }

    /// The sources, in the catalog's order.
    #[doc(hidden)]
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// The source of the first byte of `range` that does not belong to the header.
    pub(crate) fn first_source(&self, range: &Range<u64>) -> Option<&Arc<Source>> {
        let Some(layout) = &self.layout else { return self.sources.first() };
        let start = range.start.max(layout.header().len() as u64);
        let mut first = None;
        layout.extents(start..range.end.min(start + 1), &mut |extent| {
            if let Extent::Run { shard, range, .. }
            | Extent::Scatter { shard, range, .. }
            | Extent::Cast { shard, range, .. } = extent
                && !are_zeros(range.start)
            {
                first = self.sources.get(shard.0 as usize);
            }
        });
        first
    }

    /// Whether the bytes `range` are in no shard. This is the case for tensors of which a file has only the shape.
    #[doc(hidden)]
    pub fn is_unstored(&self, range: Range<u64>) -> bool {
        let Some(layout) = &self.layout else { return false };
        let mut is_unstored = true;
        layout.extents(range, &mut |extent| match extent {
            Extent::Header { .. } => is_unstored = false,
            Extent::Run { range, .. }
            | Extent::Scatter { range, .. }
            | Extent::Cast { range, .. } => is_unstored &= are_zeros(range.start),
        });
        is_unstored
    }

    /// Whether the source has encrypted tensors.
    #[doc(hidden)]
    pub fn is_encrypted(&self) -> bool {
        self.layout.is_some() && self.sources.iter().any(|source| source.is_encrypted())
    }

    /// The range `range`, extended at both ends to whole encrypted pieces, as far as their bytes are consecutive in the
    /// file.
    pub(crate) fn cover(&self, range: &Range<u64>) -> Range<u64> {
        let Some(layout) = self.layout.as_ref().filter(|_| self.is_encrypted()) else {
            return range.clone();
        };
        let piece_at = |offset: u64| {
            let PlainRun { bytes, shard, source } = layout.plain_run_at(offset)?;
            let piece = self.sources[shard.0 as usize]
                .decryptor()?
                .piece_at(source + (offset - bytes.start))?;
            let place = |byte: u64| (bytes.start + byte.saturating_sub(source)).min(bytes.end);
            Some(place(piece.start)..place(piece.end))
        };
        let start = piece_at(range.start).map_or(range.start, |piece| piece.start);
        let last = range.end.saturating_sub(1).max(range.start);
        let end = piece_at(last).map_or(range.end, |piece| piece.end);
        start.min(range.start)..end.max(range.end)
    }

    /// At the first call, sorts the tensors in all orders except the order of the file. Until the sorting has ended,
    /// only the order of the file is available to other threads, so that none of them waits.
    #[doc(hidden)]
    pub fn sort_orders(&self) {
        let (Some(layout), Some(file)) = (&self.layout, &self.file) else { return };
        if !self.sorting.swap(true, Ordering::Relaxed) {
            let positions: Vec<u32> =
                layout.tensors().map(|(position, _)| position as u32).collect();
            let _ = self.orders.set(Orders::of_file(file.catalog(), &positions));
        }
    }

    /// Reads bytes of the file from `offset` on into `buf`, on this thread.
    ///
    /// Returns the number of bytes. It is less than `buf.len()` only at the end of the file.
    /// # Errors
    /// The errors of the sources. The content of `buf` is then undefined.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let len = (buf.len() as u64).min(self.len.saturating_sub(offset)) as usize;
        let mut window_len = WINDOW_LEN_MAX;
        let mut done = 0;
        while done < len {
            let start = offset + done as u64;
            let wanted = start..start + window_len.min(len - done) as u64;
            if self.is_streamed(&wanted) {
                self.read_streamed(start, &mut buf[done..len])?;
                return Ok(len);
            }
            let plan = self.plan_window(wanted);
            let window = &mut buf[done..done + plan.len() as usize];
            let read = if self.layout.is_some() { read_all } else { read_all_stored };
            plan.fill(window, &|reads| read(reads).map(|()| true))?;
            window_len = (2 * window.len()).min(WINDOW_LEN_MAX);
            done += window.len();
        }
        Ok(len)
    }

    /// Reads bytes of the file from `start` on into `target` in small steps. For this read, more bytes have to
    /// be gathered than memory should contain at a time.
    fn read_streamed(&self, start: u64, target: &mut [u8]) -> Result<()> {
        let Some(layout) = &self.layout else { return Ok(()) };
        let range = start..start + target.len() as u64;
        BlockPlan::in_parts(layout, &self.sources, range, &mut |plan| {
            plan.fill(target, &|reads| read_all(reads).map(|()| true)).map(drop)
        })
    }

    /// The plan for the first part of the bytes `range` that takes little memory. The part is all of `range`,
    /// or a half, a quarter and so on, down to one byte. Rows are read together with the bytes between them, so
    /// one byte of the file may take 64 KiB of memory.
    fn plan_window(&self, mut range: Range<u64>) -> BlockPlan {
        loop {
            let half = range.start..range.start + (range.end - range.start) / 2;
            if half.is_empty() || !self.is_scattered_in(&range, WINDOW_PARTS_MAX) {
                let plan = self.plan_block(range);
                if half.is_empty() || plan.spread_len() <= SPREAD_LEN_MAX {
                    return plan;
                }
            }
            range = half;
        }
    }

    /// Whether the bytes `range` are in more parts of shards than are planned at a time, or are gathered from many more
    /// bytes than `range` has. The plan of such a read would take much memory, so it is read in steps with `read_at`.
    #[doc(hidden)]
    pub fn is_scattered(&self, range: &Range<u64>) -> bool {
        self.is_scattered_in(range, GATHER_PARTS_MAX)
    }

    fn is_scattered_in(&self, range: &Range<u64>, parts_max: u64) -> bool {
        self.layout.as_ref().is_some_and(|layout| {
            let count = layout.extent_count(range);
            let allowed = if count.gathered > 0 { parts_max } else { PARTS_MAX };
            count.extents > allowed || is_streamed(&count, range)
        })
    }

    /// Whether a block at the start of the bytes `range` is scattered because its elements are far apart in the
    /// source. Readahead of such a block is not worthwhile.
    pub(crate) fn gathers_far(&self, range: Range<u64>) -> bool {
        let block = range.start..range.end.min(range.start + BLOCK_LEN);
        self.layout.as_ref().is_some_and(|layout| layout.has_gathers) && self.is_scattered(&block)
    }

    /// Whether more bytes have to be gathered for `range` than memory should contain at a time.
    fn is_streamed(&self, range: &Range<u64>) -> bool {
        let layout = self.layout.as_ref().filter(|layout| layout.has_gathers);
        layout.is_some_and(|layout| is_streamed(&layout.extent_count(range), range))
    }

    /// The plan of the reads for the bytes `range`, which have to be inside the file.
    #[doc(hidden)]
    pub fn plan_block(&self, range: Range<u64>) -> BlockPlan {
        match &self.layout {
            Some(layout) => BlockPlan::of_layout(layout, &self.sources, range),
            None => BlockPlan::of_source(&self.sources[0], range),
        }
    }

    /// Usual length of a block at the start of `range`. It is the number of bytes that the source needs in flight,
    /// divided by three quarters of the maximum number of its reads in flight. `most` is the memory of all blocks
    /// together.
    fn usual_block_len(&self, range: &Range<u64>, most: u64) -> u64 {
        let wanted = self.first_source(range).and_then(|source| source.wanted_in_flight());
        let len = (wanted.unwrap_or(0) / (SENT_MAX_OF_ONE / 4 * 3) as u64).min(most / BLOCKS_MIN);
        (len / BLOCK_LEN * BLOCK_LEN).clamp(BLOCK_LEN, STORE_BLOCK_LEN_MAX)
    }

    /// The plan for the first part of the bytes `range`, with a length that is suitable for a block. `most` is the
    /// memory of all blocks together.
    #[doc(hidden)]
    pub fn plan_first_block(&self, range: Range<u64>, most: u64) -> BlockPlan {
        let first = |mut len: u64| {
            let first = |len| range.start..range.end.min(range.start + len);
            while len > 1 && self.is_scattered(&first(len)) {
                len /= 2;
            }
            first(len)
        };
        let usual_len = self.usual_block_len(&range, most);
        let plan = self.plan_block(first(usual_len));
        let gathers = self.layout.as_ref().is_some_and(|layout| layout.has_gathers);
        if gathers && plan.len() < plan.spread_len() {
            // A shorter block would be gathered from the same number of bytes.
            return plan;
        }
        let mut longer = first(plan.good_len(usual_len));
        if self.is_encrypted() {
            // The block ends with an encrypted piece, so that no piece is decrypted for two blocks.
            longer.end = self.cover(&longer).end;
            if self.is_scattered(&longer) {
                longer = range.start..range.start + plan.len();
            }
        }
        // A longer block is worthwhile only for column pieces. Its extents have to be mapped again.
        if longer.end - longer.start == plan.len() { plan } else { self.plan_block(longer) }
    }
}

fn is_streamed(count: &ExtentCount, range: &Range<u64>) -> bool {
    count.gathered > SPREAD_LEN_MAX.max((range.end - range.start).saturating_mul(2))
}

impl TensorMap for Reader {
    fn at(&self, offset: u64) -> TensorSpan {
        // An unchanged file counts as one tensor.
        let (place, range) = match &self.layout {
            Some(layout) => layout.tensor_at(offset),
            None => (Some(0), 0..self.len),
        };
        TensorSpan { place: place.map_or(0, |place| place + 1), range }
    }

    fn after(&self, mut place: u32, order: Order) -> Option<TensorSpan> {
        let layout = self.layout.as_ref()?;
        loop {
            let next = match (order, place.checked_sub(1)) {
                (Order::File, _) | (_, None) => place,
                (_, Some(before)) => self.orders.get()?.after(before, order)?,
            };
            let range = layout.bytes_at(next)?;
            place = next + 1;
            if !range.is_empty() {
                return Some(TensorSpan { place, range });
            }
        }
    }

    fn part(&self, place: u32) -> Option<LayerPart> {
        self.orders.get()?.part(place.checked_sub(1)?)
    }

    fn of_part(&self, part: LayerPart) -> Option<TensorSpan> {
        let tensor = self.orders.get()?.tensor(part)?;
        let range = self.layout.as_ref()?.bytes_at(tensor)?;
        (!range.is_empty()).then_some(TensorSpan { place: tensor + 1, range })
    }
}
