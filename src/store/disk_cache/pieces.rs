//! Buffers that belong to the cache, for the reads and writes of its threads. If the disk does not answer, a thread may
//! write to its buffer long after the reader has stopped waiting. So the buffer must not be memory of the reader.

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::ops::Range;

use nix::sys::mman::MmapAdvise;

use super::object::BLOCK_LEN;
use crate::mapping::{HUGE, Mapping};
use crate::sync::Mutex;

/// Maximum number of blocks that one job reads or writes: those that fit in a huge page. A read of 1 MiB can
/// overlap one block more than 1 MiB has.
const PIECE_BLOCKS: u64 = HUGE as u64 / BLOCK_LEN;

/// Maximum number of buffers that are kept for reuse.
const SPARES_MAX: usize = 8;

/// The blocks `run`, split into ranges that fit in one `PieceMemory` each.
pub(super) fn pieces_of(run: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = run.end;
    run.clone()
        .step_by(PIECE_BLOCKS as usize)
        .map(move |start| start..(start + PIECE_BLOCKS).min(end))
}

/// A buffer for `PIECE_BLOCKS` blocks. It is aligned, so a read past the page cache can write to it.
pub(super) struct PieceMemory(Mapping);

impl PieceMemory {
    /// A new buffer, on a huge page if the system has one. The disk can fill physically contiguous memory with
    /// a single request.
    pub(super) fn new() -> PieceMemory {
        let Ok(mapping) = Mapping::new(HUGE) else {
            handle_alloc_error(Layout::new::<[u8; HUGE]>());
        };
        mapping.advise(MmapAdvise::MADV_HUGEPAGE);
        PieceMemory(mapping)
    }

    /// The first `len` bytes of the buffer.
    ///
    /// # Panics
    /// If the memory is shorter than `len`.
    pub(super) fn bytes(&mut self, len: u64) -> &mut [u8] {
        // SAFETY: the mapping has `HUGE` bytes, is initialized with zeros, and belongs to this value alone.
        let page = unsafe { std::slice::from_raw_parts_mut(self.0.start().as_ptr(), HUGE) };
        &mut page[..len as usize]
    }
}

/// Buffers that are kept for reuse.
#[derive(Default)]
pub(super) struct SparePieces(Mutex<Vec<PieceMemory>>);

impl fmt::Debug for SparePieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SparePieces({})", self.0.lock().len())
    }
}

impl SparePieces {
    /// A buffer with unspecified content.
    pub(super) fn take(&self) -> PieceMemory {
        let spare = self.0.lock().pop();
        spare.unwrap_or_else(PieceMemory::new)
    }

    pub(super) fn give_back(&self, piece: PieceMemory) {
        let mut spares = self.0.lock();
        if spares.len() < SPARES_MAX {
            spares.push(piece);
        }
    }
}
