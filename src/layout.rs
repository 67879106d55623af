//! The byte layout of one virtual file: which bytes of which shard are at each offset of the file.
//!
//! Invariant: the header and the tensors cover `0..len` without a gap or an overlap, and the pieces of a tensor cover
//! the tensor, which the catalog has proved. Extents are computed when they are needed and are not stored. A tensor
//! that is cut by columns into millions of runs therefore takes no more memory than a tensor that is cut by rows. The
//! module is pure: it has no I/O, no clock and no threads. `reader` turns extents into reads.

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

/// Tensor data of a virtual safetensors file begins at a multiple of this number of bytes. It is the size of a page,
/// so that a tensor in a mapping of the whole file has the same alignment as in a mapping of the data alone.
pub const DATA_ALIGN: u64 = 4096;

/// If the gap between two wanted ranges of a shard has at most this number of bytes, the ranges and the gap are read
/// together.
pub(crate) const GAP_MAX: u64 = 64 << 10;

/// Maximum number of bytes of a shard from the first to the last run of an extent whose runs are not adjacent.
const SPAN_MAX: u64 = 8 << 20;

/// Alignment in bytes of the data in a file as the reference implementation of safetensors saves it.
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
    /// The cast of each tensor; empty if no tensor is cast. The pieces of a tensor with a cast refer to its
    /// bytes before the cast.
    casts: Vec<Option<Cast>>,
    /// The pieces of all tensors, grouped by tensor. The pieces of a tensor are sorted by first byte.
    pieces: Vec<PlacedPiece>,
    /// Whether some piece has its elements in another order in its shard than in the tensor.
    pub(crate) has_gathers: bool,
    len: u64,
}

/// A tensor and its place in the file. It ends where the next tensor begins.
#[derive(Debug)]
struct PlacedTensor {
    /// Position in `Catalog::tensors`.
    tensor: u32,
    /// Index in `pieces` after the last piece of the tensor.
    pieces_end: u32,
    /// Offset in the file.
    start: u64,
}

#[derive(Debug)]
struct PlacedPiece {
    shard: ShardId,
    /// Offset in the shard of the first byte of the piece.
    source: u64,
    /// The largest end of this piece and of all earlier pieces of the same tensor. It is used to find pieces by range.
    reach: u64,
    /// `None` if all bytes of the tensor are one run of the shard.
    runs: Option<Arc<StridedCopy>>,
}

/// Bytes of a virtual file, and where they come from.
#[derive(Debug)]
pub enum Extent<'a> {
    /// Bytes of the header.
    Header {
        /// Offset in the file.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Adjacent bytes of a shard.
    Run {
        /// Offset in the file.
        offset: u64,
        /// The shard.
        shard: ShardId,
        /// The bytes of the shard.
        range: Range<u64>,
    },
    /// Runs of a shard that are not adjacent in the file.
    Scatter {
        /// Offset in the file of the tensor. The positions of `runs` count from there.
        tensor_at: u64,
        /// The shard.
        shard: ShardId,
        /// The bytes of the shard. Some of the bytes between the runs may not be wanted.
        range: Range<u64>,
        /// The runs of the whole piece, with their positions in the tensor.
        runs: Arc<StridedCopy>,
        /// The part of `runs` that this extent covers.
        part: RunRange,
    },
    /// Bytes of a shard whose elements are cast.
    Cast {
        /// The shard.
        shard: ShardId,
        /// The bytes of the shard, which are whole elements. Some results may lie outside the wanted bytes, and
        /// some bytes between runs may not be wanted.
        range: Range<u64>,
        /// The place of the results in the file.
        place: CastPlace,
    },
}

/// The number of extents of a byte range of a virtual file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExtentCount {
    /// Number of extents.
    pub(crate) extents: u64,
    /// Approximate number of bytes that are read for the extents whose elements are in another order in the shard than
    /// in the tensor.
    pub(crate) gathered: u64,
}

/// A tensor whose bytes are adjacent in one shard and are not changed.
pub(crate) struct PlainRun {
    /// The bytes of the tensor in the file.
    pub(crate) bytes: Range<u64>,
    /// The shard.
    pub(crate) shard: ShardId,
    /// Offset in the shard of the first byte of the tensor.
    pub(crate) source: u64,
}

/// The place of cast elements in a virtual file.
#[derive(Clone, Debug)]
pub struct CastPlace {
    cast: Cast,
    /// Offset of the tensor in the file.
    tensor_start: u64,
    /// The place of the elements in the tensor before the cast: the first byte of one run, or several runs.
    runs: CastRuns,
}

#[derive(Clone, Debug)]
enum CastRuns {
    One(u64),
    Several(Arc<StridedCopy>, RunRange),
}

impl CastPlace {
    /// Casts `bytes`, which are the bytes of the extent, and writes the results to `window`. `window` holds the
    /// bytes of the file from `window_start` on.
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

    /// Whether the elements are several runs of the tensor.
    pub fn is_spread(&self) -> bool {
        matches!(self.runs, CastRuns::Several(..))
    }
}

impl Layout {
    /// The layout of one virtual file of `catalog`.
    ///
    /// In safetensors files of mounts, tensors are sorted by the width of their dtype, widest first, so that
    /// each tensor is aligned. Tensors of the same width are sorted by the shard and the offset of their first
    /// piece, which is their order on disk, and then by name. Bintensors files are shown with the order in
    /// which the format saves tensors.
    ///
    /// # Errors
    /// `header_too_large` if one file cannot hold all tensors, `misaligned` if rows of elements smaller than a
    /// byte do not begin on bytes, `unknown_dtype` if the format does not have a dtype.
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

    /// The layout of a file that consists of `header` and the tensors at the positions `order` of the catalog.
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
            end = end.checked_add(tensor.len).ok_or_else(|| ErrorKind::Overflow.fault(message))?;
        }
        // The kernel and programs store file sizes in signed 64-bit integers.
        if i64::try_from(end).is_err() {
            let message = format!("the file would have {end} bytes, more than a file can have");
            return Err(ErrorKind::Overflow.fault(message));
        }
        let is_gather = |piece: &PlacedPiece| piece.runs.iter().any(|runs| !runs.is_ascending());
        let has_gathers = pieces.iter().any(is_gather);
        Ok(Layout { header, tensors, casts, pieces, has_gathers, len: end })
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no bytes. This is always false, because a file always has a header.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The 8 bytes of the header length and the text of the header.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// The tensors in the order of the file: the position in `Catalog::tensors` and the offset in the file.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.tensors.iter().map(|placed| (placed.tensor as usize, placed.start))
    }

    /// The tensors to which bytes `range` belong, as positions in `Catalog::tensors`.
    pub fn tensors_in(&self, range: Range<u64>) -> impl Iterator<Item = usize> + '_ {
        let first = self.first_at(range.start).unwrap_or(self.tensors.len());
        let placed = self.tensors[first..].iter();
        placed
            .take_while(move |placed| placed.start < range.end)
            .map(|placed| placed.tensor as usize)
    }

    /// The index, in the order of the file, of the tensor that contains byte `offset`, and the byte range of this
    /// tensor. If `offset` lies in the header, there is no index, and the range is that of the header.
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

    /// The byte range of the tensor with index `place` in the order of the file. `None` if the file has fewer tensors.
    pub fn bytes_at(&self, place: u32) -> Option<Range<u64>> {
        ((place as usize) < self.tensors.len()).then(|| self.bytes_of(place as usize))
    }

    /// The tensor that contains byte `offset`, if its bytes are adjacent in one shard and are not changed.
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

    /// The first tensor in the file that ends after `offset`.
    fn first_at(&self, offset: u64) -> Option<usize> {
        if offset >= self.len {
            return None;
        }
        // This is the last tensor that begins at or before `offset`. Empty tensors that begin at the same
        // offset come before it.
        let after = self.tensors.partition_point(|placed| placed.start <= offset);
        if after == 0 { (!self.tensors.is_empty()).then_some(0) } else { Some(after - 1) }
    }

    fn bytes_of(&self, index: usize) -> Range<u64> {
        let end = self.tensors.get(index + 1).map_or(self.len, |next| next.start);
        self.tensors[index].start..end
    }

    /// Calls `visit` for each extent of bytes `range`. A range that ends after the file is cut at the end of the file.
    ///
    /// `Header` extents, `Run` extents and the runs of `Scatter` extents cover each byte of the range exactly once.
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

    /// Estimates by arithmetic how many extents bytes `range` have, and how many bytes are read for extents
    /// that gather elements in another order.
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
                found.extents += gather.reads;
                found.gathered = found.gathered.saturating_add(gather.read_len);
            }
        }
        found
    }

    /// The part of bytes `range` of the file that lies in the tensor `index`, whose bytes are `bytes`, and the
    /// pieces of the tensor that end after the start of this part. The part is counted from the start of the
    /// tensor, in bytes before a cast.
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

/// The positions of the tensors of a file, sorted by `key` and then by name.
fn sorted<K: Ord>(catalog: &Catalog, spec: &FileSpec, key: impl Fn(&Tensor<'_>) -> K) -> Vec<u32> {
    let mut order = spec.positions(catalog);
    // The catalog is sorted by name, so positions are in the order of names.
    order.sort_by_cached_key(|&position| (key(&catalog.tensor_at(position as usize)), position));
    order
}

/// The header entries of the tensors at the positions `order` of the catalog.
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
    // Other formats allow a tensor called `__metadata__`, a name that safetensors reserves for the metadata.
    let taken = catalog.tensor(safetensors::METADATA).map(|tensor| tensor.position() as u32);
    if taken.is_some_and(|taken| order.contains(&taken)) {
        let message = "safetensors keeps this name for metadata; rename the tensor, or show the \
                       checkpoint with -o format=bintensors";
        let fault = ErrorKind::HeaderJson.fault(message).tensor(safetensors::METADATA);
        return Err(located(catalog, fault));
    }
    safetensors::encode(metadata, entries(catalog, order), align).map_err(|len| {
        ErrorKind::HeaderTooLarge.fault(format!(
            "the header of one file would have {len} bytes or more, the format allows {}; \
             mount with -o layout=original",
            safetensors::HEADER_LEN_MAX
        ))
    })
}

/// `fault` with the name of the file that contains the tensor.
fn located(catalog: &Catalog, fault: Fault) -> Fault {
    let tensor = fault.tensor.as_deref().and_then(|name| catalog.tensor(name));
    let file = tensor.map(|tensor| catalog.shard(tensor.first_piece().shard).name.as_str());
    file.map_or_else(|| fault.clone(), |file| fault.clone().in_file(file))
}

/// Adds the pieces of `tensor` to `placed`. An empty tensor has none.
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
