//! Memory of its own for work in the folder: a thread that the disk keeps may write there for ever, and not to memory of
//! the reader.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

use nix::sys::mman::{MmapAdvise, madvise};

use super::object::BLOCK_LEN;
use crate::sync::Mutex;

/// Bytes of a huge page on most machines.
const HUGE: usize = 2 << 20;

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
pub(super) struct PieceMemory {
    memory: Vec<u8>,
    aligned: usize,
}

impl PieceMemory {
    /// New memory, on a huge page if the system has one: the disk reads into one stretch with one request.
    pub(super) fn new() -> PieceMemory {
        let mut memory = vec![0; 2 * HUGE];
        let aligned = memory.as_ptr().align_offset(HUGE);
        if let Some(page) = memory.get_mut(aligned..aligned + HUGE) {
            // SAFETY: the bytes belong to `memory`, and stay what they are.
            let _ = unsafe { madvise(NonNull::from(page).cast(), HUGE, MmapAdvise::MADV_HUGEPAGE) };
        }
        PieceMemory { memory, aligned }
    }

    /// Its first `len` bytes.
    pub(super) fn bytes(&mut self, len: u64) -> &mut [u8] {
        &mut self.memory[self.aligned..][..len as usize]
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
