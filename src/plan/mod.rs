//! A plan of a load: the reads for a number of tensor requests, and the place of each byte in memory.
//!
//! Requested bytes that are close to each other are read together, if possible directly into their final place. A
//! tensor that is one contiguous range of a shard gets memory with the same offset within a page as in the file,
//! because a disk can write directly only to such memory. All other bytes are read into staging memory in the order of
//! the source, and are moved from there to their place. These other bytes belong to tensors cut into boxes, to parts of
//! tensors, to casts, or to tensors for a device. The module is pure: equal requests give equal plans.

use std::ops::Range;
use std::sync::Arc;

use crate::cast::Cast;
use crate::catalog::{Catalog, ShardId, Tensor};
use crate::coalesce::{coalesce, first_read_end};
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault};
use crate::format::tensorizer::decryptor::Decryptor;
use crate::strided::{OuterBox, RunRange, SourceBox, StridedCopy};

/// Limits for reads and memory. All lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLimits {
    /// Maximum length of a read. It is rounded down to whole pages.
    pub chunk: u64,
    /// Maximum length of a read whose bytes are moved afterwards. It is rounded down to whole pages. It is small
    /// because several shards may fill the same memory in turns. With short reads, this memory is still in the cache of
    /// a core when the next shard fills it.
    pub moved: u64,
    /// Maximum number of unwanted bytes between two ranges that are read together. To read these bytes takes less time
    /// than a second read.
    pub gap: u64,
    /// Minimum length of a tensor that gets memory of its own. The ends of such memory are on small pages. For a
    /// smaller tensor, these pages would cost more time than the separate memory saves.
    pub dedicated_min_bytes: u64,
    /// Minimum length of a tensor that is read directly into the caller's buffer. The tensor and the buffer must have
    /// the same offset within a page. If their offsets differ, this is the minimum length of a run that has reads of
    /// its own.
    pub place: u64,
    /// Maximum length of a read of a run whose place has another offset within a page than the file. It is rounded down
    /// to whole pages.
    pub unaligned: u64,
    /// Maximum length of a region that several smaller tensors share.
    pub slab: u64,
    /// Whether the disk may write into the final memory. If not, all bytes are read into staging memory and moved.
    pub in_place: bool,
    /// Alignment in bytes of tensors that share a region and are moved into it from staging memory.
    pub align: u64,
}

impl Default for PlanLimits {
    fn default() -> PlanLimits {
        PlanLimits {
            chunk: 8 << 20,
            moved: 1 << 20,
            gap: 64 << 10,
            dedicated_min_bytes: 16 << 20,
            place: 1 << 20,
            unaligned: 2 << 20,
            slab: 64 << 20,
            in_place: true,
            align: 64,
        }
    }
}

impl PlanLimits {
    /// Limits for memory into which no disk can write.
    pub fn device() -> PlanLimits {
        let limits = PlanLimits::default();
        let (dedicated_min_bytes, slab, moved) = (1 << 20, 32 << 20, limits.chunk);
        PlanLimits { in_place: false, align: 256, dedicated_min_bytes, slab, moved, ..limits }
    }
}

/// Returns the decryptor of a shard. `None` if the shard is not encrypted.
pub type DecryptorOf<'a> = &'a dyn Fn(ShardId) -> Option<Arc<Decryptor>>;

/// Length of a page in bytes. Direct reads need memory and file offsets that agree within a page.
pub(crate) const PAGE: u64 = 4096;

/// A request for a tensor, or for a part of one.
///
/// ```
/// use tensorfs::{Checkpoint, Dtype, Loader, LoaderConfig, TensorRequest};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let tensor = checkpoint.catalog().tensor("transformer.h.0.attn.c_attn.weight").expect("it is there");
/// // Its first four rows, as BF16.
/// let request = TensorRequest {
///     part: Some(vec![0..4, 0..tensor.shape[1]]),
///     cast: Some(Dtype::Bf16),
///     ..TensorRequest::whole(tensor.position())
/// };
/// let loaded = Loader::new(LoaderConfig::default()).load(&checkpoint, &[request], &mut |_| true)?;
/// assert_eq!(loaded.shape(0), [4, 36]);
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorRequest {
    /// Index of the tensor in the catalog.
    pub tensor: usize,
    /// The requested indices of each dimension. `None` means all indices.
    pub part: Option<Vec<Range<u64>>>,
    /// The element type of the result. `None` keeps the type of the tensor.
    pub cast: Option<Dtype>,
    /// Address of the caller's buffer. If it is `None`, the loader allocates the memory.
    pub destination: Option<u64>,
}

impl TensorRequest {
    /// A request for the whole tensor at index `tensor` in the catalog, without a cast.
    pub fn whole(tensor: usize) -> TensorRequest {
        TensorRequest { tensor, ..TensorRequest::default() }
    }
}

/// The place in memory of the bytes of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlacement {
    /// Index of the region in `Plan::regions`.
    pub region: u32,
    /// Offset of the first byte of the tensor in the region.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Extent in each dimension.
    pub shape: Vec<u64>,
}

/// One read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The shard that is read.
    pub shard: ShardId,
    /// The byte range of the shard.
    pub range: Range<u64>,
    /// The destination of the bytes.
    pub target: ChunkTarget,
}

/// The target of the bytes of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChunkTarget {
    /// The final place of the bytes in a region. No other data is on the pages of these bytes.
    Place {
        /// Index of the region.
        region: u32,
        /// Offset of the first byte in the region.
        offset: u64,
    },
    /// The final place in a region, with another offset within a page than in the shard. If the bytes are in the page
    /// cache, they are copied from it to this place. If they have to be read from the disk, they go through staging
    /// memory.
    Unaligned {
        /// Index of the region.
        region: u32,
        /// Offset of the first byte in the region.
        offset: u64,
    },
    /// Staging memory. The moves at these indexes in `Plan::moves` copy the bytes from there.
    Spread(Range<u32>),
}

/// Bytes that are copied from a read to their final place. They are runs of equal length, with strides in the read
/// and in the region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Offset in the read at which run number `first` begins.
    pub from: u64,
    /// Index of the region.
    pub region: u32,
    /// Offset in the region at which run number `first` begins.
    pub offset: u64,
    /// Number of the first run of the move, counted in `Plan::copies[copy]`.
    pub first: u64,
    /// Number of runs of the move.
    pub runs: u64,
    /// Length of a run in bytes of the read.
    pub run_len: u64,
    /// The places of the runs of the move: an index in `Plan::copies`. `None` if the move has one run.
    pub copy: Option<u32>,
    /// The cast of the elements, if they are cast.
    pub cast: Option<Cast>,
}

impl Move {
    /// Length of a run in the region, in bytes.
    pub fn placed_len(&self) -> u64 {
        self.cast.map_or(self.run_len, |cast| cast.len_after(self.run_len))
    }

    /// Whether the move is one run whose bytes are copied unchanged. If such moves of a read follow each other, they
    /// are merged.
    pub(crate) fn is_plain(&self) -> bool {
        self.copy.is_none() && self.cast.is_none()
    }
}

/// All reads and moves of a load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The reads, in the order of the memory that they fill.
    pub chunks: Vec<Chunk>,
    /// The moves of reads that go into staging memory.
    pub moves: Vec<Move>,
    /// The places of the runs of moves.
    pub copies: Vec<StridedCopy>,
    /// Length of each region in bytes. Each region begins on a page. If a request has a destination, its region
    /// begins on the page of that address, and only the bytes of the request are used.
    pub regions: Vec<u64>,
    /// For each region, whether it is the caller's buffer.
    pub given: Vec<bool>,
    /// The placement of each request.
    pub placements: Vec<TensorPlacement>,
    /// Number of requested bytes.
    pub wanted: u64,
    /// Number of bytes that are read to get the requested bytes.
    pub read: u64,
    limits: PlanLimits,
}

/// A byte range of a shard, and its target in memory.
struct ShardRange {
    shard: ShardId,
    range: Range<u64>,
    /// The move of its bytes. Until the request has a place in memory, the offset counts from the start of the request.
    step: Move,
    request: u32,
}

/// A request whose bytes are moved into memory that is not assigned yet. Requests are sorted by the fields in this
/// order.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct UnplacedRequest {
    /// Shard and offset of its first byte.
    first: Option<(ShardId, u64)>,
    request: usize,
    /// Width of its elements in bytes.
    width: u64,
}

/// A request that is one contiguous range of a shard and can be read directly into its place.
struct ContiguousRequest {
    shard: ShardId,
    range: Range<u64>,
    request: u32,
}

impl Plan {
    /// The plan for `requests` of `catalog`.
    ///
    /// # Errors
    /// A part that extends past its tensor, or does not begin and end at whole bytes. A cast that does not exist.
    pub fn new(
        catalog: &Catalog,
        requests: &[TensorRequest],
        limits: &PlanLimits,
    ) -> Result<Plan, Fault> {
        Plan::with_decryptors(catalog, requests, limits, &|_| None)
    }

    /// Makes the plan as `new` does, for shards that may be encrypted. Reads of an encrypted shard cut its encrypted
    /// pieces only where this cannot be avoided.
    ///
    /// # Errors
    /// The errors of `new`.
    pub fn with_decryptors(
        catalog: &Catalog,
        requests: &[TensorRequest],
        limits: &PlanLimits,
        decryptor: DecryptorOf<'_>,
    ) -> Result<Plan, Fault> {
        // A limit below one page would give reads of length 0.
        let pages = |len: u64| (len / PAGE * PAGE).max(PAGE);
        let limits = &PlanLimits {
            chunk: pages(limits.chunk),
            moved: pages(limits.moved),
            unaligned: pages(limits.unaligned),
            ..*limits
        };
        let mut plan = Plan { limits: *limits, ..Plan::default() };
        let mut straight = Vec::new();
        let mut extents = Vec::new();
        let mut placeless = Vec::new();
        for (number, request) in requests.iter().enumerate() {
            let tensor = catalog.tensor_at(request.tensor);
            let before = extents.len();
            let (placement, cast) = plan
                .extents_of(number as u32, &tensor, request, &mut extents)
                .map_err(|fault| fault.tensor(tensor.name))?;
            plan.wanted = plan.wanted.saturating_add(placement.len);
            plan.placements.push(placement);
            let width = (tensor.stored.bits() / 8).max(1);
            match (&extents[before..], request.destination) {
                ([one], None)
                    if limits.in_place
                        && one.is_plain()
                        && one.range.start.is_multiple_of(width)
                        && decryptor(one.shard).is_none() =>
                {
                    let (shard, range) = (one.shard, one.range.clone());
                    straight.push(ContiguousRequest { shard, range, request: number as u32 });
                    extents.truncate(before);
                }
                (mine, None) => {
                    let first = mine.first().map(|one| (one.shard, one.range.start));
                    let width = cast.map_or(width, |cast| cast.to().bits() / 8);
                    placeless.push(UnplacedRequest { first, request: number, width });
                }
                (_, Some(address)) => {
                    plan.assign_destination(number, address, before, decryptor, &mut extents)
                }
            }
        }
        plan.add_contiguous_reads(straight);
        plan.assign_memory(placeless);
        for extent in &mut extents {
            let placement = &plan.placements[extent.request as usize];
            extent.step.region = placement.region;
            extent.step.offset += placement.offset;
        }
        plan.add_staged_reads(extents, decryptor);
        plan.order();
        let lens = plan.chunks.iter().map(|chunk| chunk.range.end - chunk.range.start);
        plan.read = lens.fold(0, u64::saturating_add);
        Ok(plan)
    }

    /// Number of bytes of memory that must be allocated for the plan.
    pub fn new_memory(&self) -> u64 {
        let mine = self.regions.iter().zip(&self.given).filter(|(_, given)| !**given);
        mine.fold(0, |sum, (len, _)| sum.saturating_add(*len))
    }

    /// Sorts the reads by the memory that they fill. For tensors that are whole in one shard, this is also the order
    /// of the shards. Adjacent boxes of a tensor are filled one after another.
    fn order(&mut self) {
        let moves = &self.moves;
        self.chunks.sort_by_key(|chunk| {
            let (region, offset) = match &chunk.target {
                ChunkTarget::Place { region, offset }
                | ChunkTarget::Unaligned { region, offset } => (*region, *offset),
                ChunkTarget::Spread(mine) => {
                    let first = &moves[mine.start as usize];
                    (first.region, first.offset)
                }
            };
            (region, offset, chunk.shard, chunk.range.start)
        });
    }

    fn region(&mut self, len: u64, given: bool) -> u32 {
        self.regions.push(len);
        self.given.push(given);
        self.regions.len() as u32 - 1
    }

    /// Assigns the memory at `address` to request `number`. If the request is one contiguous range with the same
    /// offset within a page as in the file, its whole pages are read directly into the memory. The remaining bytes
    /// are moved.
    fn assign_destination(
        &mut self,
        number: usize,
        address: u64,
        before: usize,
        decryptor: DecryptorOf<'_>,
        extents: &mut Vec<ShardRange>,
    ) {
        let offset = address % PAGE;
        let region = self.region(offset + self.placements[number].len, true);
        let placement = &mut self.placements[number];
        (placement.region, placement.offset) = (region, offset);
        let limits = self.limits;
        let [one] = &extents[before..] else { return };
        let range = one.range.clone();
        let agrees =
            range.start % PAGE == offset && range.end - range.start >= limits.place.max(2 * PAGE);
        if !limits.in_place || !one.is_plain() || !agrees || decryptor(one.shard).is_some() {
            return;
        }
        let pages = range.start.next_multiple_of(PAGE)..range.end / PAGE * PAGE;
        let place = (region, offset + (pages.start - range.start));
        self.read_to(one.shard, pages.clone(), place.0, place.1);
        let (shard, request, step) = (one.shard, one.request, one.step.clone());
        extents.truncate(before);
        for part in [range.start..pages.start, pages.end..range.end] {
            if !part.is_empty() {
                let (offset, run_len) = (part.start - range.start, part.end - part.start);
                let step = Move { offset, run_len, ..step.clone() };
                extents.push(ShardRange { shard, range: part, step, request });
            }
        }
    }

    /// Assigns memory to the requests whose bytes are moved, in the order of the shards. Small requests share a
    /// region.
    fn assign_memory(&mut self, mut requests: Vec<UnplacedRequest>) {
        requests.sort_unstable();
        let limits = self.limits;
        let mut slab: Option<u32> = None;
        for UnplacedRequest { request, width, .. } in requests {
            let len = self.placements[request].len;
            let unit = limits.align.max(width);
            let after = |plan: &Plan, slab| plan.regions[slab as usize].next_multiple_of(unit);
            let (region, offset) = match slab {
                _ if len >= limits.dedicated_min_bytes => (self.region(len, false), 0),
                Some(slab) if after(self, slab) + len <= limits.slab => (slab, after(self, slab)),
                _ => (self.region(0, false), 0),
            };
            let end = &mut self.regions[region as usize];
            *end = (*end).max(offset + len);
            if len < limits.dedicated_min_bytes {
                slab = Some(region);
            }
            let placement = &mut self.placements[request];
            (placement.region, placement.offset) = (region, offset);
        }
    }

    /// Adds the byte ranges of a request to `extents`. Returns the placement and the cast of the request.
    fn extents_of(
        &mut self,
        number: u32,
        tensor: &Tensor<'_>,
        request: &TensorRequest,
        extents: &mut Vec<ShardRange>,
    ) -> Result<(TensorPlacement, Option<Cast>), Fault> {
        let (part, cast, placement) = outcome_of(tensor, request)?;
        let shape = &placement.shape;
        let bits_each = (tensor.stored.bits(), placement.dtype.bits());
        for piece in tensor.pieces() {
            // The requested box within the piece: first index and extent.
            let (mut first, mut size) = (Vec::new(), Vec::new());
            for (dim, wanted) in part.iter().enumerate() {
                let start = wanted.start.max(piece.offset[dim]);
                let end = wanted.end.min(piece.offset[dim] + piece.shape[dim]);
                first.push(start);
                size.push(end.saturating_sub(start));
            }
            if size.contains(&0) {
                continue;
            }
            let relative = |to: &dyn Fn(usize) -> u64| -> Vec<u64> {
                (0..first.len()).map(|dim| first[dim] - to(dim)).collect()
            };
            let from_offset = relative(&|dim| piece.offset[dim]);
            let to_offset = relative(&|dim| part[dim].start);
            let strides = piece.strides;
            let from = SourceBox { shape: piece.shape, strides, offset: &from_offset };
            let to = OuterBox { shape, offset: &to_offset };
            let copy = StridedCopy::new(from, to, &size, bits_each)?;
            self.cut(copy, piece.shard, piece.range.start, number, cast, extents);
        }
        Ok((placement, cast))
    }

    /// Divides a copy into groups of runs that are each read at once, and adds the byte range of each group to
    /// `extents`.
    fn cut(
        &mut self,
        copy: StridedCopy,
        shard: ShardId,
        base: u64,
        request: u32,
        cast: Option<Cast>,
        extents: &mut Vec<ShardRange>,
    ) {
        let PlanLimits { gap, moved, chunk, .. } = self.limits;
        let number = copy.innermost().map(|_| self.copies.len() as u32);
        let run_len = copy.run_len();
        let mut add = |RunRange { runs, bytes, target }| {
            let (first, runs) = (runs.start, runs.end - runs.start);
            let (from, region, offset) = (0, 0, target);
            let step = Move { from, region, offset, first, runs, run_len, copy: number, cast };
            let range = base + bytes.start..base + bytes.end;
            extents.push(ShardRange { shard, range, step, request });
        };
        // Runs are read in the order of the shard, because they may be written to memory in any order.
        let ordered = if copy.is_ascending() { copy } else { copy.in_source_order() };
        if ordered.is_ascending() {
            ordered.each_near(gap, moved, &mut add);
        } else {
            // A read that covers many columns fills whole cache lines of memory.
            let len = ordered.tile_span().clamp(moved, chunk.max(moved));
            ordered.each_group(gap, len, &mut add);
        }
        if number.is_some() {
            self.copies.push(ordered);
        }
    }

    /// Adds the reads of requests that are read directly into their place. Small adjacent requests share a region.
    fn add_contiguous_reads(&mut self, mut straight: Vec<ContiguousRequest>) {
        straight.sort_by_key(|one| (one.shard, one.range.start, one.range.end, one.request));
        let limits = self.limits;
        let small =
            |one: &ContiguousRequest| one.range.end - one.range.start < limits.dedicated_min_bytes;
        let together = |first: &ContiguousRequest, next: &ContiguousRequest| {
            next.shard == first.shard && small(first) && small(next)
        };
        let reads = coalesce(&straight, |one| &one.range, together, limits.gap, limits.slab);
        for (range, run) in reads {
            self.read_run(run, range);
        }
    }

    fn read_run(&mut self, run: &[ContiguousRequest], range: Range<u64>) {
        let page = range.start / PAGE * PAGE;
        let region = self.region(range.end.next_multiple_of(PAGE) - page, false);
        for one in run {
            let placement = &mut self.placements[one.request as usize];
            (placement.region, placement.offset) = (region, one.range.start - page);
        }
        self.read_to(run[0].shard, range.clone(), region, range.start - page);
    }

    /// Adds reads of `range` into a region from offset `offset` on. This offset must agree with the range within a
    /// page.
    fn read_to(&mut self, shard: ShardId, range: Range<u64>, region: u32, offset: u64) {
        let mut start = range.start;
        while start < range.end {
            let end = first_read_end(&(start..range.end), self.limits.chunk);
            let target = ChunkTarget::Place { region, offset: offset + (start - range.start) };
            self.chunks.push(Chunk { shard, range: start..end, target });
            start = end;
        }
    }

    /// Adds the reads of a long run that cannot be read directly into its place, because the place has another offset
    /// within a page than the shard, or because encrypted pieces end within pages.
    fn read_unaligned(
        &mut self,
        ShardRange { shard, range, step, .. }: &ShardRange,
        decryptor: DecryptorOf<'_>,
    ) {
        let decryptor = decryptor(*shard);
        let mut start = range.start;
        while start < range.end {
            let mut end = first_read_end(&(start..range.end), self.limits.unaligned);
            if let Some(decryptor) = &decryptor {
                end = decryptor.good_end(&(start..end)).min(range.end);
            }
            let offset = step.offset + (start - range.start);
            let target = ChunkTarget::Unaligned { region: step.region, offset };
            self.chunks.push(Chunk { shard: *shard, range: start..end, target });
            start = end;
        }
    }

    /// Adds the reads of all other bytes. Adjacent ranges are read together.
    fn add_staged_reads(&mut self, extents: Vec<ShardRange>, decryptor: DecryptorOf<'_>) {
        let limits = self.limits;
        let is_long = |one: &ShardRange| {
            let len = one.range.end - one.range.start;
            limits.in_place && one.is_plain() && len >= limits.place.max(2 * PAGE)
        };
        let (long, extents): (Vec<_>, Vec<_>) = extents.into_iter().partition(is_long);
        long.iter().for_each(|run| self.read_unaligned(run, decryptor));
        let split = |extent| split(extent, limits.moved, decryptor);
        let mut parts: Vec<ShardRange> = extents.into_iter().flat_map(split).collect();
        parts.sort_by_key(|part| {
            (part.shard, part.range.start, part.range.end, part.step.region, part.step.offset)
        });
        let same_shard = |first: &ShardRange, next: &ShardRange| first.shard == next.shard;
        let reads = coalesce(&parts, |part| &part.range, same_shard, limits.gap, limits.moved);
        for (range, run) in reads {
            let moves = self.moves.len() as u32;
            for part in run {
                let from = part.range.start - range.start;
                let one = Move { from, ..part.step.clone() };
                match self.moves[moves as usize..].last_mut() {
                    Some(last) if last.has_continuation(&one) => last.run_len += one.run_len,
                    _ => self.moves.push(one),
                }
            }
            self.chunks.push(Chunk {
                shard: run[0].shard,
                range,
                target: ChunkTarget::Spread(moves..self.moves.len() as u32),
            });
        }
    }
}

impl ShardRange {
    /// Whether the range is one run whose bytes are copied unchanged.
    fn is_plain(&self) -> bool {
        self.step.is_plain()
    }
}

impl Move {
    /// Whether `next` is the continuation of this run, in the read and in the region.
    fn has_continuation(&self, next: &Move) -> bool {
        self.is_plain()
            && next.is_plain()
            && self.region == next.region
            && self.from + self.run_len == next.from
            && self.offset + self.run_len == next.offset
    }
}

/// Cuts a range that is one run into ranges of at most `chunk` bytes. `chunk` is a multiple of the width of any
/// element.
fn split(extent: ShardRange, chunk: u64, decryptor: DecryptorOf<'_>) -> Vec<ShardRange> {
    let ShardRange { shard, range, step, request } = extent;
    // `cut` has limited the length of a range of several runs to `chunk`.
    if range.end - range.start <= chunk || step.runs > 1 {
        return vec![ShardRange { shard, range, step, request }];
    }
    let decryptor = decryptor(shard);
    let end_of = |start: u64| {
        let end = start.saturating_add(chunk).min(range.end);
        decryptor.as_ref().map_or(end, |one| one.good_end(&(start..end)).min(range.end))
    };
    let next = |start: &u64| Some(end_of(*start)).filter(|end| *end < range.end);
    std::iter::successors(Some(range.start), next)
        .map(|start| {
            let end = end_of(start);
            let before = start - range.start;
            let offset = step.offset + step.cast.map_or(before, |cast| cast.len_after(before));
            let step = Move {
                offset,
                run_len: end - start,
                copy: None,
                runs: 1,
                first: 0,
                ..step.clone()
            };
            ShardRange { shard, range: start..end, step, request }
        })
        .collect()
}

/// Minimum number of bytes of memory that any plan has to allocate for `requests`. A request that cannot be planned
/// counts as 0.
pub fn min_new_memory(catalog: &Catalog, requests: &[TensorRequest]) -> u64 {
    let mine = requests.iter().filter(|request| request.destination.is_none());
    mine.filter_map(|request| {
        Some(outcome_of(&catalog.tensor_at(request.tensor), request).ok()?.2.len)
    })
    .fold(0, u64::saturating_add)
}

/// The requested indices of each dimension.
type Indices = Vec<Range<u64>>;

/// The requested indices of a tensor, the cast of its elements, and its placement. The region and the offset of the
/// placement are assigned later.
fn outcome_of(
    tensor: &Tensor<'_>,
    request: &TensorRequest,
) -> Result<(Indices, Option<Cast>, TensorPlacement), Fault> {
    let part = part_of(tensor, request)?;
    let cast = cast_of(tensor, request)?;
    let dtype = cast.map_or(tensor.dtype, Cast::to);
    let shape: Vec<u64> = part.iter().map(|range| range.end - range.start).collect();
    // The length of the tensor is proved, but the cast to a wider type may exceed the limit.
    let bits = dtype.bits_of(&shape).ok_or_else(|| {
        ErrorKind::Overflow.fault(format!("shape {shape:?} as {dtype} passes 2^64 bits"))
    })?;
    Ok((part, cast, TensorPlacement { region: 0, offset: 0, len: bits / 8, dtype, shape }))
}

/// The requested indices of a tensor.
fn part_of(tensor: &Tensor<'_>, request: &TensorRequest) -> Result<Indices, Fault> {
    let Some(part) = &request.part else {
        return Ok(tensor.shape.iter().map(|&size| 0..size).collect());
    };
    let inside = part.len() == tensor.shape.len()
        && part.iter().zip(tensor.shape).all(|(p, &size)| p.start <= p.end && p.end <= size);
    if inside {
        return Ok(part.clone());
    }
    let message = format!("the part {part:?} does not lie in its shape {:?}", tensor.shape);
    Err(ErrorKind::Usage.fault(message))
}

/// The cast of the elements of a request, if they are cast.
fn cast_of(tensor: &Tensor<'_>, request: &TensorRequest) -> Result<Option<Cast>, Fault> {
    let Some(to) = request.cast.filter(|&to| to != tensor.dtype) else { return Ok(tensor.cast()) };
    if tensor.cast().is_some() {
        return Err(ErrorKind::Usage.fault(format!(
            "the view casts it from {} to {}, and elements are cast once; ask the view for {to}",
            tensor.stored, tensor.dtype
        )));
    }
    let cast = Cast::new(tensor.dtype, to);
    cast.map(Some).ok_or_else(|| {
        ErrorKind::Usage.fault(format!("{} cannot be cast to {to}; load it as it is", tensor.dtype))
    })
}
