//! The byte layout of one virtual file: the shard and the bytes at each offset.
//!
//! Invariant: the header and the tensors cover `0..len` with no hole and no overlap, and the
//! pieces of a tensor cover it (the catalog's proof). Extents are computed, not stored, so that a
//! tensor cut by columns into millions of runs takes as much memory as one cut by rows. The module
//! is pure: it has no I/O, no clock and no threads. `reader` turns extents into reads.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::cast::Cast;
use crate::catalog::{Catalog, ShardId, Tensor};
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault};
use crate::format::{OutputFormat, bintensors, safetensors};
use crate::strided::{OuterBox, RunRange, StridedCopy};
use crate::view::{FileSpec, TensorOrder};

/// Tensor data of a virtual safetensors file begins at a multiple of this number of bytes. It is a
/// page, so that tensors in a mapping of the file are aligned as in a mapping of the data.
pub const DATA_ALIGN: u64 = 4096;

/// Maximum number of bytes of a shard between two wanted ranges that are read rather than skipped.
pub(crate) const GAP_MAX: u64 = 64 << 10;

/// Maximum number of bytes of a shard from the first to the last of runs that are one extent though
/// they do not follow each other.
const SPAN_MAX: u64 = 8 << 20;

/// Boundary at which data begins in a file of the reference implementation.
const SAVED_ALIGN: u64 = 8;

/// The bytes of one virtual file.
///
/// ```
/// use tensorfs::Checkpoint;
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let layout = checkpoint.single_file().layout()?;
/// for (position, offset) in layout.tensors() {
///     println!("{} at {offset}", checkpoint.catalog().tensor_at(position).name);
/// }
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Debug)]
pub struct Layout {
    header: Vec<u8>,
    tensors: Vec<PlacedTensor>,
    /// The cast of each tensor; empty if there is none. Pieces of a cast tensor are those of the
    /// bytes before the cast.
    casts: Vec<Option<Cast>>,
    /// The pieces of all tensors, one tensor after another; those of a tensor by first byte.
    pieces: Vec<PlacedPiece>,
    /// Whether the elements of a piece stand in another order in their shard.
    has_gathers: bool,
    len: u64,
}

/// A tensor at its place in the file, which ends where the next one begins.
#[derive(Debug)]
struct PlacedTensor {
    /// Position in `Catalog::tensors`.
    tensor: u32,
    /// End of its pieces in `pieces`.
    pieces_end: u32,
    /// Offset in the file.
    start: u64,
}

#[derive(Debug)]
struct PlacedPiece {
    shard: ShardId,
    /// Offset in the shard of the piece's first byte.
    source: u64,
    /// Largest end of this piece and the earlier pieces of its tensor, to find pieces by range.
    reach: u64,
    /// `None` if all bytes of the tensor are one run.
    runs: Option<Arc<StridedCopy>>,
}

/// Some bytes of a virtual file and their source.
#[derive(Debug)]
pub enum Extent<'a> {
    /// Bytes of the header.
    Header {
        /// Offset in the file.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Consecutive bytes of a shard.
    Run {
        /// Offset in the file.
        offset: u64,
        /// The shard.
        shard: ShardId,
        /// The bytes of the shard.
        range: Range<u64>,
    },
    /// Runs of a shard that are spread over a part of the file.
    Scatter {
        /// Offset in the file of the tensor that the runs count from.
        tensor_at: u64,
        /// The shard.
        shard: ShardId,
        /// The bytes of the shard. Some between the runs may not be wanted.
        range: Range<u64>,
        /// The runs of the piece in the tensor.
        runs: Arc<StridedCopy>,
        /// The part of the runs.
        part: RunRange,
    },
    /// Bytes of a shard whose elements are cast.
    Cast {
        /// The shard.
        shard: ShardId,
        /// The bytes of the shard: whole elements. Some results may lie outside the wanted bytes,
        /// and some bytes between runs may not be wanted.
        range: Range<u64>,
        /// The place of the results.
        place: CastPlace,
    },
}

/// How many extents a stretch of a virtual file has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExtentCount {
    /// Their number.
    pub(crate) extents: u64,
    /// About how many bytes are read for those that gather elements in another order than the shard's.
    pub(crate) gathered: u64,
}

/// A tensor whose bytes follow each other in one shard as they are.
pub(crate) struct PlainRun {
    /// Its bytes in the file.
    pub(crate) bytes: Range<u64>,
    /// The shard.
    pub(crate) shard: ShardId,
    /// Offset in the shard of its first byte.
    pub(crate) source: u64,
}

/// The place in a virtual file of elements that are cast.
#[derive(Clone, Debug)]
pub struct CastPlace {
    cast: Cast,
    /// Offset in the file of the tensor.
    tensor_start: u64,
    /// The bytes of the tensor before the cast: where the run begins, or several runs.
    runs: CastRuns,
}

#[derive(Clone, Debug)]
enum CastRuns {
    One(u64),
    Several(Arc<StridedCopy>, RunRange),
}

impl CastPlace {
    /// Casts `bytes`, those of the extent, into `window`, which holds the bytes of the file from
    /// `window_start` on.
    pub fn convert(&self, bytes: &[u8], window: &mut [u8], window_start: u64) {
        let CastPlace { cast, tensor_start, runs } = self;
        let mut convert = |bytes: &[u8], offset: u64| {
            let start = tensor_start + cast.len_after(offset);
            cast.convert_into(bytes, start, window, window_start);
        };
        match runs {
            CastRuns::One(offset) => convert(bytes, *offset),
            CastRuns::Several(runs, part) => runs.each_run(part, |run, offset| {
                convert(&bytes[run.start as usize..run.end as usize], offset);
            }),
        }
    }

    /// Whether the elements are spread over the tensor.
    pub fn is_spread(&self) -> bool {
        matches!(self.runs, CastRuns::Several(..))
    }
}

impl Layout {
    /// The layout of one virtual file of `catalog`.
    ///
    /// In safetensors files of mounts, tensors are sorted by width of their dtype, widest first, so
    /// that each is aligned. Tensors of one width are sorted by shard and offset of their first
    /// piece, which is the order on disk, then by name. Mounts show bintensors files as they are
    /// saved.
    ///
    /// # Errors
    /// `header_too_large` if one file cannot hold all tensors, `misaligned` if rows of sub-byte
    /// elements do not begin on bytes, `unknown_dtype` if the format lacks a dtype.
    pub fn of(catalog: &Catalog, spec: &FileSpec) -> Result<Layout, Fault> {
        let metadata = catalog.metadata.as_deref();
        let (order, header) = match (spec.format, spec.order) {
            (OutputFormat::Safetensors, TensorOrder::Mounted) => {
                let order = sorted(catalog, spec, |tensor| {
                    let first = tensor.first_piece();
                    (Reverse(tensor.dtype.bits()), first.shard, first.range.start)
                });
                let metadata = metadata.filter(|metadata| !metadata.is_empty());
                let header = safetensors_header(catalog, metadata, &order, DATA_ALIGN)?;
                (order, header)
            }
            (OutputFormat::Safetensors, TensorOrder::Saved) => {
                let order = sorted(catalog, spec, |tensor| Reverse(tensor.dtype));
                let header = safetensors_header(catalog, metadata, &order, SAVED_ALIGN)?;
                (order, header)
            }
            (OutputFormat::Bintensors, _) => {
                let number = |tensor: &Tensor<'_>| Reverse(bintensors::number_of(tensor.dtype));
                let order = sorted(catalog, spec, number);
                let header = bintensors::encode(metadata, entries(catalog, &order));
                (order, header.map_err(|fault| located(catalog, fault))?)
            }
        };
        Layout::new(catalog, &order, header)
    }

    /// The layout of `header` and the tensors at the positions `order`.
    fn new(catalog: &Catalog, order: &[u32], header: Vec<u8>) -> Result<Layout, Fault> {
        let ordered = || order.iter().map(|&index| catalog.tensor_at(index as usize));
        let mut end = header.len() as u64;
        let mut tensors = Vec::with_capacity(order.len());
        let mut pieces = Vec::with_capacity(order.len());
        let mut casts: Vec<Option<Cast>> = ordered().map(|tensor| tensor.cast()).collect();
        if casts.iter().all(Option::is_none) {
            casts = Vec::new();
        }
        for tensor in ordered() {
            place(&tensor, &mut pieces).map_err(|fault| fault.tensor(tensor.name))?;
            let (index, pieces_end) = (tensor.position() as u32, pieces.len() as u32);
            tensors.push(PlacedTensor { tensor: index, pieces_end, start: end });
            let message = "the file would have 2^64 bytes or more";
            end = end
                .checked_add(tensor.len)
                .ok_or_else(|| Fault::new(ErrorKind::Overflow, message))?;
        }
        // Kernel and programs count file sizes in signed 64 bits.
        if i64::try_from(end).is_err() {
            let message = format!("the file would have {end} bytes, more than a file can have");
            return Err(Fault::new(ErrorKind::Overflow, message));
        }
        let is_gather = |piece: &PlacedPiece| piece.runs.iter().any(|runs| !runs.is_ascending());
        let has_gathers = pieces.iter().any(is_gather);
        Ok(Layout { header, tensors, casts, pieces, has_gathers, len: end })
    }

    /// Whether the elements of a piece stand in another order in their shard.
    pub(crate) fn has_gathers(&self) -> bool {
        self.has_gathers
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no bytes. It always has a header, so this is false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The 8 bytes of length and the header text.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Tensors in file order: position in `Catalog::tensors` and offset in the file.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.tensors.iter().map(|placed| (placed.tensor as usize, placed.start))
    }

    /// The tensors that bytes `range` belong to, as positions in `Catalog::tensors`.
    pub fn tensors_in(&self, range: Range<u64>) -> impl Iterator<Item = usize> + '_ {
        let first = self.first_at(range.start).unwrap_or(self.tensors.len());
        let placed = self.tensors[first..].iter();
        placed
            .take_while(move |placed| placed.start < range.end)
            .map(|placed| placed.tensor as usize)
    }

    /// The place in the file of the tensor at `offset`, and its bytes. For the header, `None` and
    /// the bytes of the header.
    pub fn tensor_at(&self, offset: u64) -> (Option<u32>, Range<u64>) {
        let header_len = self.header.len() as u64;
        if offset < header_len {
            return (None, 0..header_len);
        }
        match self.first_at(offset) {
            Some(index) => (Some(index as u32), self.bytes_of(index)),
            None => (None, offset.min(header_len)..self.len),
        }
    }

    /// The bytes of the tensor at `place` in the file, `None` if there is none.
    pub fn bytes_at(&self, place: u32) -> Option<Range<u64>> {
        ((place as usize) < self.tensors.len()).then(|| self.bytes_of(place as usize))
    }

    /// The tensor at `offset`, if its bytes follow each other in one shard as they are.
    pub(crate) fn plain_run_at(&self, offset: u64) -> Option<PlainRun> {
        let index = self.first_at(offset).filter(|_| offset >= self.header.len() as u64)?;
        let bytes = self.bytes_of(index);
        let (_, pieces) = self.pieces_in(index, &bytes, &bytes);
        let is_cast = self.casts.get(index).is_some_and(Option::is_some);
        match pieces {
            [PlacedPiece { shard, source, runs: None, .. }] if !is_cast => {
                Some(PlainRun { bytes, shard: *shard, source: *source })
            }
            _ => None,
        }
    }

    /// The first tensor that ends after `offset`.
    fn first_at(&self, offset: u64) -> Option<usize> {
        if offset >= self.len {
            return None;
        }
        // It is the last tensor that begins at or before `offset`. Empty tensors at the same start
        // come before it.
        let after = self.tensors.partition_point(|placed| placed.start <= offset);
        if after == 0 { (!self.tensors.is_empty()).then_some(0) } else { Some(after - 1) }
    }

    fn bytes_of(&self, index: usize) -> Range<u64> {
        let end = self.tensors.get(index + 1).map_or(self.len, |next| next.start);
        self.tensors[index].start..end
    }

    /// Calls `visit` for the extents of bytes `range`, which is clamped to the file.
    ///
    /// `Header` and `Run` extents and the runs of `Scatter` ones cover the range once.
    #[doc(hidden)]
    pub fn extents<'a>(&'a self, range: Range<u64>, visit: &mut dyn FnMut(Extent<'a>)) {
        let range = range.start.min(self.len)..range.end.min(self.len);
        let header_len = self.header.len() as u64;
        if range.start < header_len.min(range.end) {
            let bytes = &self.header[range.start as usize..range.end.min(header_len) as usize];
            visit(Extent::Header { offset: range.start, bytes });
        }
        let Some(first) = self.first_at(range.start) else { return };
        for index in first..self.tensors.len() {
            let bytes = self.bytes_of(index);
            if bytes.start >= range.end {
                break;
            }
            self.extents_of(index, bytes, &range, visit);
        }
    }

    /// About how many extents bytes `range` have, and how those are read that gather elements, by
    /// arithmetic.
    pub(crate) fn extent_count(&self, range: &Range<u64>) -> ExtentCount {
        let first = self.first_at(range.start).unwrap_or(self.tensors.len());
        let mut found = ExtentCount::default();
        for index in first..self.tensors.len() {
            let bytes = self.bytes_of(index);
            if bytes.start >= range.end {
                break;
            }
            let (wanted, pieces) = self.pieces_in(index, &bytes, range);
            for piece in pieces {
                let Some(runs) = &piece.runs else {
                    found.extents += 1;
                    break;
                };
                if runs.target_span().start >= wanted.end {
                    break;
                }
                if runs.is_ascending() {
                    let part = runs.inside(&wanted);
                    found.extents += part.map_or(0, |part| runs.reads_in(&part, GAP_MAX));
                    continue;
                }
                let gather = runs.gather(&wanted, SPAN_MAX);
                found.extents += gather.reads();
                found.gathered = found.gathered.saturating_add(gather.read_len());
            }
        }
        found
    }

    /// The part of bytes `range` of the file that lies in a tensor, whose bytes are `bytes`, and
    /// the pieces that end after its start. The part counts from the tensor's start, in bytes
    /// before a cast.
    fn pieces_in(
        &self,
        index: usize,
        bytes: &Range<u64>,
        range: &Range<u64>,
    ) -> (Range<u64>, &[PlacedPiece]) {
        let shown = range.start.max(bytes.start) - bytes.start
            ..range.end.min(bytes.end).saturating_sub(bytes.start);
        let start = if index == 0 { 0 } else { self.tensors[index - 1].pieces_end };
        let pieces = &self.pieces[start as usize..self.tensors[index].pieces_end as usize];
        let cast = self.casts.get(index).copied().flatten();
        let wanted = cast.map_or(shown.clone(), |cast| cast.elements_before(&shown));
        let first = pieces.partition_point(|piece| piece.reach <= wanted.start);
        (wanted, &pieces[first..])
    }

    fn extents_of<'a>(
        &'a self,
        index: usize,
        bytes: Range<u64>,
        range: &Range<u64>,
        visit: &mut dyn FnMut(Extent<'a>),
    ) {
        let cast = self.casts.get(index).copied().flatten();
        let (wanted, pieces) = self.pieces_in(index, &bytes, range);
        for PlacedPiece { shard, source, runs, .. } in pieces {
            let shard = *shard;
            let cast_to = |cast, range, runs| {
                let place = CastPlace { cast, tensor_start: bytes.start, runs };
                Extent::Cast { shard, range, place }
            };
            let Some(runs) = runs else {
                let range = source + wanted.start..source + wanted.end;
                visit(match cast {
                    Some(cast) => cast_to(cast, range, CastRuns::One(wanted.start)),
                    None => Extent::Run { offset: bytes.start + wanted.start, shard, range },
                });
                break;
            };
            if runs.target_span().start >= wanted.end {
                break;
            }
            let mut show = |runs: Option<&Arc<StridedCopy>>, part: RunRange| {
                let range = source + part.bytes.start..source + part.bytes.end;
                let offset = bytes.start + part.target;
                let runs = runs.filter(|_| !part.is_contiguous()).cloned();
                visit(match (cast, runs) {
                    (None, None) => Extent::Run { offset, shard, range },
                    (None, Some(runs)) => {
                        Extent::Scatter { tensor_at: bytes.start, shard, range, runs, part }
                    }
                    (Some(cast), None) => cast_to(cast, range, CastRuns::One(part.target)),
                    (Some(cast), Some(runs)) => cast_to(cast, range, CastRuns::Several(runs, part)),
                });
            };
            if !runs.is_ascending() {
                runs.gather(&wanted, SPAN_MAX).each_read(SPAN_MAX, &mut show);
            } else if let Some(part) = runs.inside(&wanted) {
                runs.each_read(part, GAP_MAX, SPAN_MAX, &mut |part| show(Some(runs), part));
            }
        }
    }
}

/// The positions of the tensors of a file, sorted by `key`, then by name.
fn sorted<K: Ord>(catalog: &Catalog, spec: &FileSpec, key: impl Fn(&Tensor<'_>) -> K) -> Vec<u32> {
    let mut order = spec.positions(catalog);
    // Positions are in the order of names.
    order.sort_by_cached_key(|&position| (key(&catalog.tensor_at(position as usize)), position));
    order
}

/// The header entries of the tensors at the positions `order`.
fn entries<'a>(
    catalog: &'a Catalog,
    order: &'a [u32],
) -> impl ExactSizeIterator<Item = (&'a str, Dtype, &'a [u64], u64)> {
    order.iter().map(|&index| {
        let tensor = catalog.tensor_at(index as usize);
        (tensor.name, tensor.dtype, tensor.shape, tensor.len)
    })
}

fn safetensors_header(
    catalog: &Catalog,
    metadata: Option<&BTreeMap<String, String>>,
    order: &[u32],
    align: u64,
) -> Result<Vec<u8>, Fault> {
    // Other formats allow tensors of this name.
    let taken = catalog.tensor(safetensors::METADATA).map(|tensor| tensor.position() as u32);
    if taken.is_some_and(|taken| order.contains(&taken)) {
        let message = "safetensors keeps this name for metadata; rename the tensor, or show the \
                       checkpoint with -o format=bintensors";
        let fault = Fault::new(ErrorKind::HeaderJson, message).tensor(safetensors::METADATA);
        return Err(located(catalog, fault));
    }
    safetensors::encode(metadata, entries(catalog, order), align).map_err(|len| {
        Fault::new(
            ErrorKind::HeaderTooLarge,
            format!(
                "the header of one file would have {len} bytes or more, the format allows {}; \
                 mount with -o layout=original",
                safetensors::HEADER_LEN_MAX
            ),
        )
    })
}

/// `fault` with the file that the tensor lies in.
fn located(catalog: &Catalog, fault: Fault) -> Fault {
    let tensor = fault.tensor.as_deref().and_then(|name| catalog.tensor(name));
    let file = tensor.map(|tensor| catalog.shard(tensor.first_piece().shard).name.as_str());
    file.map_or_else(|| fault.clone(), |file| fault.clone().in_file(file))
}

/// Adds the pieces of `tensor` to `placed`, none for an empty tensor.
fn place(tensor: &Tensor<'_>, placed: &mut Vec<PlacedPiece>) -> Result<(), Fault> {
    let first_own = placed.len();
    let stored_len = tensor.cast().map_or(tensor.len, |cast| cast.len_before(tensor.len));
    for piece in tensor.pieces().filter(|_| tensor.len > 0) {
        let (runs, reach) = if piece.shape == tensor.shape && piece.is_contiguous() {
            (None, stored_len)
        } else {
            let to = OuterBox { shape: tensor.shape, offset: piece.offset };
            let bits = tensor.stored.bits();
            let runs = StridedCopy::of_piece(piece.strides, to, piece.shape, bits)?;
            let reach = runs.target_span().end;
            (Some(Arc::new(runs)), reach)
        };
        placed.push(PlacedPiece { shard: piece.shard, source: piece.range.start, reach, runs });
    }
    let own = &mut placed[first_own..];
    own.sort_by_key(|piece| piece.runs.as_ref().map_or(0, |runs| runs.target_span().start));
    let mut furthest = 0;
    for piece in own {
        furthest = piece.reach.max(furthest);
        piece.reach = furthest;
    }
    Ok(())
}
