//! What to read for a number of wanted tensors, and where each byte goes.
//!
//! Wanted bytes that lie together are read together, each into its final place where that is
//! possible: a tensor that is one stretch of a shard gets memory whose addresses agree with the
//! offsets in the file page by page, so that the disk can write there. Tensors cut into boxes, and
//! parts of tensors, are read in stretches of source order and spread from there.
//! Pure: the same wishes give the same plan.

use std::ops::Range;

use crate::catalog::{Catalog, ShardId, Tensor};
use crate::error::{Class, Fault};

/// How bytes are put together, all in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most of one read, rounded to whole pages.
    pub chunk: u64,
    /// Unwanted bytes that are read rather than skipped: a read of its own costs more.
    pub gap: u64,
    /// From this length on a tensor has memory of its own.
    pub own: u64,
    /// Most that smaller tensors have together.
    pub slab: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { chunk: 8 << 20, gap: 64 << 10, own: 1 << 20, slab: 32 << 20 }
    }
}

/// Unit in which memory and file agree.
pub(crate) const PAGE: u64 = 4096;

/// A tensor, or a part of one, that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// Position in the catalog.
    pub tensor: usize,
    /// In each dimension the wanted indices; all without.
    pub part: Option<Vec<Range<u64>>>,
}

/// Where the bytes of a wish are once all is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Number of the region.
    pub region: u32,
    /// First byte in it.
    pub at: u64,
    /// Length in bytes.
    pub len: u64,
    /// Extent in each dimension.
    pub shape: Vec<u64>,
}

/// One read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Of which shard.
    pub shard: ShardId,
    /// Which bytes of it.
    pub range: Range<u64>,
    /// Where they go.
    pub target: Target,
}

/// Where the bytes of a read go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// To their final place: into this region, from this byte on. The pages around them belong
    /// to nobody else.
    Place {
        /// Number of the region.
        region: u32,
        /// First byte in it.
        at: u64,
    },
    /// Elsewhere first; from there these of `Plan::moves` take them.
    Spread(Range<u32>),
}

/// Bytes of a read on their way to their place: runs of equal length, in both at strides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Byte of the read at which run `first` begins.
    pub from: u64,
    /// Number of the region.
    pub region: u32,
    /// Byte in it at which run `first` begins.
    pub at: u64,
    /// Number of the first run, and how many there are.
    pub first: u64,
    /// Number of runs.
    pub runs: u64,
    /// Length of a run in bytes.
    pub run_len: u64,
    /// Number of its strides in `Plan::strides`; none where there is one run.
    pub strides: Option<u32>,
}

/// How runs are spread: dimensions, outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strides(pub Vec<Stride>);

/// One dimension of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stride {
    /// Number of steps.
    pub count: u64,
    /// Bytes of the source per step.
    pub from: u64,
    /// Bytes of the region per step.
    pub to: u64,
}

impl Strides {
    /// Where run `k` begins, in source and region, from the first run of all.
    pub fn run(&self, mut k: u64) -> (u64, u64) {
        let (mut from, mut to) = (0, 0);
        for stride in self.0.iter().rev() {
            from += k % stride.count * stride.from;
            to += k % stride.count * stride.to;
            k /= stride.count;
        }
        (from, to)
    }
}

/// Everything that is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The reads, by shard and offset.
    pub chunks: Vec<Chunk>,
    /// Moves of reads that do not go to their place.
    pub moves: Vec<Move>,
    /// How the runs of moves are spread.
    pub strides: Vec<Strides>,
    /// Lengths of the regions; each begins on a page.
    pub regions: Vec<u64>,
    /// By wish.
    pub placements: Vec<Placement>,
    /// Wanted bytes.
    pub wanted: u64,
    /// Bytes that are read for them.
    pub read: u64,
    limits: Limits,
}

/// Bytes of a shard, and where they go.
struct Extent {
    shard: ShardId,
    range: Range<u64>,
    step: Move,
}

/// A wish that is one stretch of a shard and can be read to its place.
struct Straight {
    shard: ShardId,
    range: Range<u64>,
    want: u32,
}

impl Plan {
    /// The plan for `wants` of `catalog`.
    ///
    /// # Errors
    /// Where a part lies outside its tensor, or does not begin and end on bytes.
    pub fn new(catalog: &Catalog, wants: &[Want], limits: &Limits) -> Result<Plan, Fault> {
        // A read that takes no whole page would never come to an end.
        let chunk = (limits.chunk / PAGE * PAGE).max(PAGE);
        let mut plan = Plan { limits: Limits { chunk, ..*limits }, ..Plan::default() };
        let mut straight = Vec::new();
        let mut extents = Vec::new();
        for (number, want) in wants.iter().enumerate() {
            let tensor = catalog.tensor_at(want.tensor);
            let part = part_of(&tensor, want).map_err(|fault| fault.tensor(tensor.name))?;
            let before = extents.len();
            plan.extents_of(&tensor, &part, &mut extents)
                .map_err(|fault| fault.tensor(tensor.name))?;
            let shape: Vec<u64> = part.iter().map(|range| range.end - range.start).collect();
            let len = shape.iter().product::<u64>() * tensor.dtype.bits() / 8;
            plan.wanted = plan.wanted.saturating_add(len);
            plan.placements.push(Placement { region: 0, at: 0, len, shape });
            let width = (tensor.dtype.bits() / 8).max(1);
            match &extents[before..] {
                [Extent { shard, range, step, .. }]
                    if step.strides.is_none() && range.start.is_multiple_of(width) =>
                {
                    straight.push(Straight {
                        shard: *shard,
                        range: range.clone(),
                        want: number as u32,
                    });
                    extents.truncate(before);
                }
                _ => {
                    let region = plan.region(len);
                    plan.placements[number].region = region;
                    extents[before..].iter_mut().for_each(|extent| extent.step.region = region);
                }
            }
        }
        plan.read_straight(straight);
        plan.read_spread(extents);
        plan.chunks.sort_by_key(|chunk| (chunk.shard, chunk.range.start));
        let lens = plan.chunks.iter().map(|chunk| chunk.range.end - chunk.range.start);
        plan.read = lens.fold(0, u64::saturating_add);
        Ok(plan)
    }

    fn region(&mut self, len: u64) -> u32 {
        self.regions.push(len);
        self.regions.len() as u32 - 1
    }

    /// The bytes of shards that make up `part` of a tensor.
    fn extents_of(
        &mut self,
        tensor: &Tensor<'_>,
        part: &[Range<u64>],
        extents: &mut Vec<Extent>,
    ) -> Result<(), Fault> {
        let extent: Vec<u64> = part.iter().map(|range| range.end - range.start).collect();
        if extent.contains(&0) {
            return Ok(());
        }
        for piece in tensor.pieces() {
            // Of the piece, what is wanted of it: first index and extent.
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
            let bits = tensor.dtype.bits();
            let from =
                Whole { shape: piece.shape.to_vec(), offset: relative(&|dim| piece.offset[dim]) };
            let to = Whole { shape: extent.clone(), offset: relative(&|dim| part[dim].start) };
            let runs = Spread::new(&from, &to, &size, bits)?;
            self.cut(&runs, piece.shard, piece.range.start, extents);
        }
        Ok(())
    }

    /// Cuts runs into stretches that are read at once.
    fn cut(&mut self, spread: &Spread, shard: ShardId, base: u64, extents: &mut Vec<Extent>) {
        let run_len = spread.run_len;
        let start = base + spread.from;
        if spread.strides.0.is_empty() {
            let step = Move {
                from: 0,
                region: 0,
                at: spread.to,
                first: 0,
                runs: 1,
                run_len,
                strides: None,
            };
            extents.push(Extent { shard, range: start..start + run_len, step });
            return;
        }
        self.strides.push(spread.strides.clone());
        let strides = Some(self.strides.len() as u32 - 1);
        let total: u64 = spread.strides.0.iter().map(|stride| stride.count).product();
        let mut first = 0;
        while first < total {
            let (from, to) = spread.strides.run(first);
            let mut end = from + run_len;
            let mut next = first + 1;
            while next < total {
                let (following, _) = spread.strides.run(next);
                if following - end > self.limits.gap
                    || following + run_len - from > self.limits.chunk
                {
                    break;
                }
                end = following + run_len;
                next += 1;
            }
            let step = Move {
                from: 0,
                region: 0,
                at: spread.to + to,
                first,
                runs: next - first,
                run_len,
                strides,
            };
            extents.push(Extent { shard, range: start + from..start + end, step });
            first = next;
        }
    }

    /// Reads of wishes that go to their place: neighbours that are small share a region.
    fn read_straight(&mut self, mut straight: Vec<Straight>) {
        straight.sort_by_key(|one| (one.shard, one.range.start, one.range.end, one.want));
        let limits = self.limits;
        let mut rest = straight.as_slice();
        while let Some(first) = rest.first() {
            let mut end = first.range.end;
            let small = |one: &Straight| one.range.end - one.range.start < limits.own;
            let together = rest
                .iter()
                .take_while(|one| {
                    let fits = one.shard == first.shard
                        && small(one)
                        && small(first)
                        && one.range.start <= end + limits.gap
                        && one.range.end - first.range.start <= limits.slab;
                    if fits {
                        end = end.max(one.range.end);
                    }
                    fits
                })
                .count()
                .max(1);
            let (run, after) = rest.split_at(together);
            rest = after;
            self.read_run(run, first.range.start..end);
        }
    }

    fn read_run(&mut self, run: &[Straight], range: Range<u64>) {
        let page = range.start / PAGE * PAGE;
        let region = self.region(range.end.next_multiple_of(PAGE) - page);
        for one in run {
            let placement = &mut self.placements[one.want as usize];
            (placement.region, placement.at) = (region, one.range.start - page);
        }
        let mut start = range.start;
        while start < range.end {
            let end = ((start + self.limits.chunk) / PAGE * PAGE).min(range.end);
            let target = Target::Place { region, at: start - page };
            self.chunks.push(Chunk { shard: run[0].shard, range: start..end, target });
            start = end;
        }
    }

    /// Reads of everything else: neighbours are read together.
    fn read_spread(&mut self, extents: Vec<Extent>) {
        let limits = self.limits;
        let mut parts: Vec<Extent> =
            extents.into_iter().flat_map(|extent| split(extent, limits.chunk)).collect();
        parts.sort_by_key(|part| {
            (part.shard, part.range.start, part.range.end, part.step.region, part.step.at)
        });
        let mut rest = parts.as_slice();
        while let Some(first) = rest.first() {
            let mut end = first.range.end;
            let together = rest
                .iter()
                .take_while(|part| {
                    let fits = part.shard == first.shard
                        && part.range.start <= end + limits.gap
                        && part.range.end.max(end) - first.range.start <= limits.chunk;
                    if fits {
                        end = end.max(part.range.end);
                    }
                    fits
                })
                .count()
                .max(1);
            let (run, after) = rest.split_at(together);
            rest = after;
            let moves = self.moves.len() as u32;
            for part in run {
                let from = part.range.start - first.range.start;
                self.moves.push(Move { from, ..part.step.clone() });
            }
            self.chunks.push(Chunk {
                shard: first.shard,
                range: first.range.start..end,
                target: Target::Spread(moves..self.moves.len() as u32),
            });
        }
    }
}

/// Cuts a stretch that is one run into reads of at most `chunk` bytes.
fn split(extent: Extent, chunk: u64) -> Vec<Extent> {
    let Extent { shard, range, step } = extent;
    // Several runs are never longer: they would not be together.
    if range.end - range.start <= chunk || step.runs > 1 {
        return vec![Extent { shard, range, step }];
    }
    let starts = (range.start..range.end).step_by(chunk as usize);
    starts
        .map(|start| {
            let end = (start + chunk).min(range.end);
            let at = step.at + (start - range.start);
            let step =
                Move { at, run_len: end - start, strides: None, runs: 1, first: 0, ..step.clone() };
            Extent { shard, range: start..end, step }
        })
        .collect()
}

/// The wanted indices of each dimension.
fn part_of(tensor: &Tensor<'_>, want: &Want) -> Result<Vec<Range<u64>>, Fault> {
    let Some(part) = &want.part else {
        return Ok(tensor.shape.iter().map(|&size| 0..size).collect());
    };
    let inside = part.len() == tensor.shape.len()
        && part.iter().zip(tensor.shape).all(|(p, &size)| p.start <= p.end && p.end <= size);
    if inside {
        return Ok(part.clone());
    }
    let message = format!("the part {part:?} does not lie in its shape {:?}", tensor.shape);
    Err(Fault::new(Class::Usage, message))
}

/// A box that holds another one: its extent, and where the other one begins in it.
struct Whole {
    shape: Vec<u64>,
    offset: Vec<u64>,
}

/// A box as runs, in two boxes that hold it.
struct Spread {
    /// Byte at which the first run begins in each.
    from: u64,
    to: u64,
    run_len: u64,
    strides: Strides,
}

impl Spread {
    /// The runs of a box of extent `size`, with elements of `bits` bits.
    fn new(from: &Whole, to: &Whole, size: &[u64], bits: u64) -> Result<Spread, Fault> {
        let (mut from_at, mut to_at, mut run) = (0, 0, bits);
        let (mut from_stride, mut to_stride) = (bits, bits);
        let mut strides = Vec::new();
        let mut spanned = true;
        for dim in (0..size.len()).rev() {
            from_at += from.offset[dim] * from_stride;
            to_at += to.offset[dim] * to_stride;
            if spanned {
                run *= size[dim];
                spanned = size[dim] == from.shape[dim] && size[dim] == to.shape[dim];
            } else if size[dim] > 1 {
                strides.push(Stride { count: size[dim], from: from_stride, to: to_stride });
            }
            from_stride *= from.shape[dim];
            to_stride *= to.shape[dim];
        }
        strides.reverse();
        let steps = strides.iter().flat_map(|stride| [stride.from, stride.to]);
        if !steps.chain([from_at, to_at, run]).all(|bits| bits.is_multiple_of(8)) {
            return Err(Fault::new(
                Class::Misaligned,
                format!("a part of shape {size:?} does not begin and end on bytes"),
            ));
        }
        for stride in &mut strides {
            (stride.from, stride.to) = (stride.from / 8, stride.to / 8);
        }
        let strides = Strides(strides);
        Ok(Spread { from: from_at / 8, to: to_at / 8, run_len: run / 8, strides })
    }
}
