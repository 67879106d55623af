//! The byte layout of one virtual file: which bytes of which shard stand at which offset.
//!
//! Invariant: the header and the tensors cover `0..len` with no hole and no overlap, and the
//! pieces of a tensor cover it (the catalog's proof). Extents are found by arithmetic: a
//! tensor cut by columns into millions of runs takes as much memory as one cut by rows.
//! Pure: no I/O, no clock, no threads. `reader` turns extents into reads.

use std::ops::Range;
use std::sync::Arc;

use crate::catalog::{Catalog, ShardId, Tensor};
use crate::error::{Class, Fault};
use crate::format::safetensors;
use crate::gather::{Part, Runs};

/// Tensor data of a virtual file begins at a multiple of this many bytes: a page, so that a
/// mapping of the file has its tensors where a mapping of the data would.
pub const DATA_ALIGN: u64 = 4096;

/// A virtual safetensors file.
#[derive(Debug)]
pub struct Layout {
    header: Arc<[u8]>,
    tensors: Vec<Placed>,
    len: u64,
}

/// A tensor at its place in the file.
#[derive(Debug)]
struct Placed {
    /// Position in `Catalog::tensors`.
    tensor: u32,
    /// Offset in the file.
    start: u64,
    len: u64,
    /// By first byte.
    pieces: Vec<PlacedPiece>,
    /// Largest last byte of this piece and all before it, to find pieces by range.
    reach: Vec<u64>,
}

#[derive(Debug)]
struct PlacedPiece {
    shard: ShardId,
    /// Offset in the shard of the piece's first byte.
    source: u64,
    runs: Runs,
}

/// Some bytes of a virtual file and where they come from.
#[derive(Debug)]
pub enum Extent<'a> {
    /// Bytes of the header.
    Header {
        /// Offset in the file.
        at: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Consecutive bytes of a shard.
    Run {
        /// Offset in the file.
        at: u64,
        /// The shard.
        shard: ShardId,
        /// The bytes of the shard.
        range: Range<u64>,
    },
    /// Consecutive bytes of a shard that are spread over a part of the file.
    Scatter {
        /// Offset in the file of the tensor that the runs count from.
        tensor_at: u64,
        /// The shard.
        shard: ShardId,
        /// The bytes of the shard.
        range: Range<u64>,
        /// How they are spread.
        runs: &'a Runs,
        /// Which of them.
        part: Part,
    },
}

impl Layout {
    /// The layout of all tensors of `catalog` as one file.
    ///
    /// Tensors stand by width of their dtype, widest first, so that each is aligned; then by
    /// shard and offset of their first piece, so that within a dtype the order of the file is
    /// the order on disk; then by name.
    pub fn single(catalog: &Catalog) -> Result<Layout, Fault> {
        let mut order: Vec<u32> = (0..catalog.tensors.len() as u32).collect();
        order.sort_by_cached_key(|&at| {
            let tensor = &catalog.tensors[at as usize];
            let first = &tensor.pieces[0];
            // `at` is the order by name.
            (std::cmp::Reverse(tensor.dtype.bits()), first.shard, first.range.start, at)
        });
        let ordered = || order.iter().map(|&at| &catalog.tensors[at as usize]);
        let entries = ordered().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice(), t.len));
        let header = safetensors::encode(&catalog.metadata, entries, DATA_ALIGN).map_err(|len| {
            Fault::new(
                Class::HeaderTooLarge,
                format!(
                    "the header of one file would have {len} bytes or more, the format allows {}; \
                     mount with -o layout=original",
                    safetensors::HEADER_LEN_MAX
                ),
            )
        })?;
        let mut end = header.len() as u64;
        let mut tensors = Vec::with_capacity(order.len());
        for (&at, tensor) in order.iter().zip(ordered()) {
            let placed = place(at, end, tensor).map_err(|fault| fault.tensor(&tensor.name))?;
            let message = "the file would have 2^64 bytes or more";
            end =
                end.checked_add(tensor.len).ok_or_else(|| Fault::new(Class::Overflow, message))?;
            tensors.push(placed);
        }
        // Kernel and programs count file sizes in signed 64 bits.
        if i64::try_from(end).is_err() {
            let message = format!("the file would have {end} bytes, more than a file can have");
            return Err(Fault::new(Class::Overflow, message));
        }
        Ok(Layout { header: header.into(), tensors, len: end })
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no bytes; it never has, but `len` wants it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The 8 bytes of length and the header text.
    pub fn header(&self) -> &Arc<[u8]> {
        &self.header
    }

    /// Tensors in file order: position in `Catalog::tensors` and offset in the file.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.tensors.iter().map(|placed| (placed.tensor as usize, placed.start))
    }

    /// The bytes of the tensor that `offset` lies in, or of the header.
    pub fn tensor_at(&self, offset: u64) -> Range<u64> {
        let header_len = self.header.len() as u64;
        let at = self.tensors.partition_point(|placed| placed.start + placed.len <= offset);
        match self.tensors.get(at) {
            Some(placed) if offset >= header_len => placed.start..placed.start + placed.len,
            Some(_) => 0..header_len,
            None => offset.min(header_len)..self.len,
        }
    }

    /// Calls `visit` for the extents of bytes `range`, which is clamped to the file.
    ///
    /// `Header` and `Run` extents and the runs of `Scatter` ones cover the range once.
    pub fn extents<'a>(&'a self, range: Range<u64>, visit: &mut dyn FnMut(Extent<'a>)) {
        let range = range.start.min(self.len)..range.end.min(self.len);
        let header_len = self.header.len() as u64;
        if range.start < header_len.min(range.end) {
            let bytes = &self.header[range.start as usize..range.end.min(header_len) as usize];
            visit(Extent::Header { at: range.start, bytes });
        }
        let first = self.tensors.partition_point(|placed| placed.start + placed.len <= range.start);
        for placed in &self.tensors[first..] {
            if placed.start >= range.end {
                break;
            }
            placed.extents(&range, visit);
        }
    }
}

fn place(at: u32, start: u64, tensor: &Tensor) -> Result<Placed, Fault> {
    let mut pieces = Vec::with_capacity(tensor.pieces.len());
    for piece in tensor.pieces.iter().filter(|_| tensor.len > 0) {
        let runs = if piece.shape == tensor.shape {
            Runs::single(0, tensor.len)
        } else {
            Runs::new(&tensor.shape, &piece.offset, &piece.shape, tensor.dtype.bits())?
        };
        pieces.push(PlacedPiece { shard: piece.shard, source: piece.range.start, runs });
    }
    pieces.sort_by_key(|piece| piece.runs.span().start);
    let mut reach = Vec::with_capacity(pieces.len());
    let mut furthest = 0;
    for piece in &pieces {
        furthest = piece.runs.span().end.max(furthest);
        reach.push(furthest);
    }
    Ok(Placed { tensor: at, start, len: tensor.len, pieces, reach })
}

impl Placed {
    fn extents<'a>(&'a self, range: &Range<u64>, visit: &mut dyn FnMut(Extent<'a>)) {
        let wanted = range.start.saturating_sub(self.start)..(range.end - self.start).min(self.len);
        let first = self.reach.partition_point(|&reach| reach <= wanted.start);
        for piece in &self.pieces[first..] {
            if piece.runs.span().start >= wanted.end {
                break;
            }
            let Some(part) = piece.runs.part(&wanted) else { continue };
            let range = piece.source + part.bytes.start..piece.source + part.bytes.end;
            let shard = piece.shard;
            visit(if part.is_contiguous() {
                Extent::Run { at: self.start + part.at, shard, range }
            } else {
                Extent::Scatter { tensor_at: self.start, shard, range, runs: &piece.runs, part }
            });
        }
    }
}
