//! Memory of its own for work in the folder: a thread that the disk keeps may write there for ever, and not to memory of
//! the reader.

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::ops::Range;

use nix::sys::mman::MmapAdvise;

use super::object::BLOCK_LEN;
use crate::mapping::{HUGE, Mapping};
use crate::sync::Mutex;

/// Most blocks that one piece of work reads or writes: a huge page. Reads of 1 MiB meet one block more.
const PIECE_BLOCKS: u64 = HUGE as u64 / BLOCK_LEN;

/// Maximum number of pieces that are kept for later.
const SPARES_MAX: usize = 8;

/// The blocks `run` in pieces that fit in a `PieceMemory` each.
pub(super) fn pieces_of(run: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = run.end;
    run.clone()
        .step_by(PIECE_BLOCKS as usize)
        .map(move |start| start..(start + PIECE_BLOCKS).min(end))
}

/// Memory for `PIECE_BLOCKS` blocks. A read past the page cache can go to it.
pub(super) struct PieceMemory(Mapping);

impl PieceMemory {
    /// New memory, on a huge page if the system has one: the disk reads into one stretch with one request.
    pub(super) fn new() -> PieceMemory {
        let Ok(mapping) = Mapping::new(HUGE) else {
            handle_alloc_error(Layout::new::<[u8; HUGE]>());
        };
        mapping.advise(MmapAdvise::MADV_HUGEPAGE);
        PieceMemory(mapping)
    }

    /// Its first `len` bytes.
    ///
    /// # Panics
    /// If the memory is shorter than `len`.
    pub(super) fn bytes(&mut self, len: u64) -> &mut [u8] {
        // SAFETY: the mapping has that many bytes, begins with zeros, and is this value's alone.
        let page = unsafe { std::slice::from_raw_parts_mut(self.0.start().as_ptr(), HUGE) };
        &mut page[..len as usize]
    }
}

/// Pieces that are kept for later.
#[derive(Default)]
pub(super) struct SparePieces(Mutex<Vec<PieceMemory>>);

impl fmt::Debug for SparePieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SparePieces({})", self.0.lock().len())
    }
}

impl SparePieces {
    /// A piece with any bytes.
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
