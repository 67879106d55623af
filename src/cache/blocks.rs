//! The blocks of one file by offset, and the blocks and holes of a range.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::ReadRequest;
use crate::io::Ticket;
use crate::prefetch::Planner;
use crate::reader::Block;
use crate::source::Source;
use crate::sync::Mutex;

/// The blocks of one file.
pub(super) struct FileBlocks {
    /// The blocks by their start.
    pub(super) blocks: BTreeMap<u64, CachedBlock>,
    pub(super) planner: Arc<Mutex<Planner>>,
    /// Time of the last admitted read of the file.
    pub(super) last_read: Instant,
}

/// A block: consecutive bytes of a file.
pub(super) struct CachedBlock {
    pub(super) end: u64,
    /// Number of its bytes that were requested.
    pub(super) asked: u64,
    /// Whether the block is being read, or was read, as read-ahead and not for a waiting reader.
    pub(super) ahead: bool,
    /// Whether the reader of the block continued elsewhere before the block was loaded.
    pub(super) left: bool,
    pub(super) data: Data,
}

pub(super) enum Data {
    /// The block is being read.
    Loading { waiters: Vec<Waiter>, tickets: Vec<Ticket> },
    /// The block was loaded from these sources.
    Ready(Arc<Block>, Arc<[Arc<Source>]>),
}

/// The start of a loaded block, its bytes, and its sources.
pub(super) type Ready = (u64, Arc<Block>, Arc<[Arc<Source>]>);

/// A read that waits for a block, and the number of its piece that comes from the block.
pub(super) struct Waiter {
    pub(super) pending: Arc<Mutex<Pending>>,
    pub(super) piece: usize,
}

/// A read that waits for blocks.
pub(super) struct Pending {
    pub(super) request: Option<ReadRequest>,
    pub(super) pieces: Vec<ReadPiece>,
    /// Number of pieces that are not loaded.
    pub(super) left: usize,
}

/// A part of a read: the bytes `within` of a block.
pub(super) struct ReadPiece {
    pub(super) block: Option<Arc<Block>>,
    pub(super) within: Range<usize>,
}

/// A part of a range: a block that contains it, or a hole.
pub(super) enum Cover {
    /// The start of a block, and the part. Also the bytes of the block if it is loaded, because the cache may
    /// drop the block meanwhile.
    CachedBlock(u64, Range<u64>, Option<Arc<Block>>),
    /// A part that no block covers, and the range of the block that has to be read for it.
    Hole(Range<u64>, Range<u64>),
}

impl Cover {
    /// The range of the block that has to be read, if this is a hole.
    pub(super) fn hole(&self) -> Option<&Range<u64>> {
        match self {
            Cover::Hole(_, block) => Some(block),
            Cover::CachedBlock(..) => None,
        }
    }
}

impl FileBlocks {
    pub(super) fn new(planner: Arc<Mutex<Planner>>) -> FileBlocks {
        FileBlocks { blocks: BTreeMap::new(), planner, last_read: Instant::now() }
    }

    /// End of the first block that overlaps `range`, if there is one.
    pub(super) fn end_of_overlap(&self, range: &Range<u64>) -> Option<u64> {
        let before = self
            .blocks
            .range(..=range.start)
            .next_back()
            .filter(|(_, block)| block.end > range.start);
        let found = before.or_else(|| self.blocks.range(range.clone()).next());
        found.map(|(_, block)| block.end)
    }

    /// Like `end_of_overlap`. Also keeps this block from being dropped, because a request for it is expected.
    pub(super) fn want(&mut self, range: &Range<u64>) -> Option<u64> {
        let over = self.end_of_overlap(range)?;
        if let Some((_, block)) = self.blocks.range_mut(..over).next_back() {
            block.left = false;
        }
        Some(over)
    }

    /// The loaded blocks that overlap `range`, in ascending order.
    pub(super) fn ready(&self, range: &Range<u64>) -> Vec<Ready> {
        let before = self.blocks.range(..=range.start).next_back();
        let first = before.map_or(range.start, |(start, _)| *start);
        let ready = |(start, block): (&u64, &CachedBlock)| match &block.data {
            Data::Ready(loaded, sources) => Some((*start, loaded.clone(), sources.clone())),
            Data::Loading { .. } => None,
        };
        self.blocks.range(first..range.end).filter_map(ready).collect()
    }

    /// Drops the block at `start` if it is loaded and has these bytes. Returns whether it was dropped.
    pub(super) fn remove_ready(&mut self, start: u64, bytes: &Arc<Block>) -> bool {
        let is =
            |block: &CachedBlock| matches!(&block.data, Data::Ready(b, _) if Arc::ptr_eq(b, bytes));
        self.blocks.get(&start).is_some_and(is) && self.blocks.remove(&start).is_some()
    }

    /// The blocks that overlap `range` and the holes between them, in order. `widen` returns the range of the
    /// block for a hole. That range is cut at neighbouring blocks.
    pub(super) fn covers(
        &self,
        range: &Range<u64>,
        widen: impl Fn(&Range<u64>) -> Range<u64>,
    ) -> Vec<Cover> {
        let hole = |part: Range<u64>| {
            let wide = widen(&part);
            let before = self.blocks.range(..part.start).next_back();
            let after = self.blocks.range(part.end..).next();
            let start = before.map_or(wide.start, |(_, block)| wide.start.max(block.end));
            let end = after.map_or(wide.end, |(start, _)| wide.end.min(*start));
            Cover::Hole(part, start..end)
        };
        let mut covers = Vec::new();
        let mut offset = range.start;
        let before = self.blocks.range(..=offset).next_back().map_or(offset, |(start, _)| *start);
        for (&start, block) in self.blocks.range(before..range.end) {
            if block.end <= offset {
                continue;
            }
            if start > offset {
                covers.push(hole(offset..start));
                offset = start;
            }
            let end = block.end.min(range.end);
            let ready = match &block.data {
                Data::Ready(loaded, _) => Some(loaded.clone()),
                Data::Loading { .. } => None,
            };
            covers.push(Cover::CachedBlock(start, offset..end, ready));
            offset = end;
        }
        if offset < range.end {
            covers.push(hole(offset..range.end));
        }
        covers
    }
}
