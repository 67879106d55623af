//! Copies parts of tensors from the kernel's page cache on the calling thread. For small parts, a plan and
//! other threads would take longer.

use std::ops::Range;

use super::Loader;
use crate::catalog::{ShardId, Tensor};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::strided::{OuterBox, SourceBox, StridedCopy};

/// Maximum number of bytes of a part that is a single run. For a longer run, several threads are faster.
const RUN_MAX: u64 = 4 << 20;

/// Maximum number of bytes of a part of several runs, maximum number of its runs, and maximum distance in bytes from
/// its start to its end. A copy cannot be stopped. With these limits, it takes less than a tenth of a second.
const PART_MAX: u64 = 64 << 20;
const RUNS_MAX: u64 = 4 << 20;
const SPAN_MAX: u64 = 512 << 20;

/// Minimum length in bytes of a gap between two runs that is not copied. The copy of a shorter gap costs less
/// than another system call.
const SKIP_MIN: u64 = 8 << 10;

/// Maximum mean length in bytes of tensors for which a mapping is preferred even if the page cache does not have these
/// tensors, because the kernel's read-ahead reads many of them at once.
const MAPPED_MEAN_MAX: u64 = 64 << 10;

/// Length in bytes of the buffer for runs that are copied together. It fits in the cache of a CPU core.
const SCRATCH_LEN: u64 = 128 << 10;

/// A part of a tensor that can be copied on the calling thread if it is in the page cache.
#[derive(Debug)]
pub struct CachedPart {
    shard: ShardId,
    runs: StridedCopy,
}

impl CachedPart {
    /// The part `part` of tensor `tensor`, or the whole tensor. `None` if the tensor has several pieces, or the
    /// part is too large.
    pub fn of(
        checkpoint: &Checkpoint,
        tensor: usize,
        part: Option<&[Range<u64>]>,
    ) -> Option<CachedPart> {
        let (shard, runs) = runs_of(&checkpoint.catalog().tensor_at(tensor), part)?;
        let (span, count) = (runs.source_span(), runs.count());
        let most = if count == 1 { RUN_MAX } else { PART_MAX };
        let is_small = count <= RUNS_MAX
            && count * runs.run_len() <= most
            && span.end - span.start <= SPAN_MAX;
        is_small.then_some(CachedPart { shard, runs })
    }
}

impl Loader {
    /// Copies a part of tensor `tensor`, or all of it, to `into` in row-major order. This uses only the calling
    /// thread and does not wait. Returns whether the part is a `CachedPart` and was in the kernel's page cache.
    /// If not, the content of `into` is unspecified.
    ///
    /// # Errors
    /// If the shard is no longer the file that was opened.
    pub fn copy_from_page_cache(
        &self,
        checkpoint: &Checkpoint,
        tensor: usize,
        part: Option<&[Range<u64>]>,
        into: &mut [u8],
    ) -> Result<bool> {
        match CachedPart::of(checkpoint, tensor, part) {
            Some(part) => self.copy_part(checkpoint, &part, into),
            None => Ok(false),
        }
    }

    /// Whether a mapping of `range` of a shard costs less than a read past the page cache. It costs less in two cases:
    /// most of the range is in the page cache, or the tensors are so small on average that allocating memory for a
    /// tensor would take longer than reading it. False if access to the shard may wait, or if the stored bytes of the
    /// shard differ from the bytes that a load returns. Never waits.
    pub fn is_better_mapped(
        &self,
        checkpoint: &Checkpoint,
        shard: ShardId,
        range: &Range<u64>,
    ) -> bool {
        let sources = checkpoint.sources();
        let source = &sources[shard.0 as usize];
        // This assumes that all shards have the same length. The sum over all shards would take too long, because each
        // request would need it.
        let len = source.len().saturating_mul(sources.len() as u64);
        let are_small = len <= checkpoint.catalog().len() as u64 * MAPPED_MEAN_MAX;
        let cached = self.engine.cached_pages(source, range);
        cached.is_some_and(|cached| are_small || cached.is_most())
    }

    /// Copies a part of this checkpoint like `copy_from_page_cache`.
    ///
    /// # Errors
    /// The errors of `copy_from_page_cache`.
    pub fn copy_part(
        &self,
        checkpoint: &Checkpoint,
        CachedPart { shard, runs }: &CachedPart,
        into: &mut [u8],
    ) -> Result<bool> {
        if runs.count() * runs.run_len() != into.len() as u64 {
            return Ok(false);
        }
        let source = &checkpoint.sources()[shard.0 as usize];
        self.engine.copy_cached(source, &runs.source_span(), |read| copy(runs, into, read))
    }
}

/// Shard and runs of the indices `part` of a tensor, or of all of it. In the part, the runs are consecutive.
/// `None` if the tensor has several pieces or is cast, if the part is empty or not inside the tensor, or if a
/// run does not begin and end on whole bytes.
fn runs_of(tensor: &Tensor<'_>, part: Option<&[Range<u64>]>) -> Option<(ShardId, StridedCopy)> {
    let mut pieces = tensor.pieces().take(if tensor.cast().is_some() { 0 } else { 2 });
    let (Some(piece), None) = (pieces.next(), pieces.next()) else { return None };
    let (shard, start, bits) = (piece.shard, piece.range.start, tensor.dtype.bits());
    let one_run = |(skipped, len)| (shard, StridedCopy::one_run(start + skipped, len));
    if piece.is_empty() {
        return None;
    }
    if part.is_none() && piece.is_contiguous() {
        return Some(one_run((0, piece.len())));
    }
    let whole: Vec<Range<u64>>;
    let part = match part {
        Some(part) => part,
        None => {
            whole = tensor.shape.iter().map(|&size| 0..size).collect();
            &whole
        }
    };
    let is_some =
        |(wanted, &size): (&Range<u64>, &u64)| wanted.start < wanted.end && wanted.end <= size;
    if part.len() != tensor.shape.len() || !part.iter().zip(tensor.shape).all(is_some) {
        return None;
    }
    let is_row_major = piece.is_contiguous();
    if let Some(run) = as_single_run(part, piece.shape, bits).filter(|_| is_row_major) {
        return Some(one_run(run));
    }
    let size: Vec<u64> = part.iter().map(|wanted| wanted.end - wanted.start).collect();
    let offset: Vec<u64> = part.iter().map(|wanted| wanted.start).collect();
    let from = SourceBox { shape: piece.shape, strides: piece.strides, offset: &offset };
    let to = OuterBox { shape: &size, offset: &vec![0; size.len()] };
    let runs = StridedCopy::new(from, to, &size, (bits, bits)).ok()?;
    (runs.run_len() > 0 && runs.is_ascending()).then(|| (shard, runs.behind(start)))
}

/// First byte and length of a part, if the part is a single run of whole bytes. The part must not be empty and
/// must lie inside of `shape`. This test is faster than `StridedCopy::new`.
fn as_single_run(part: &[Range<u64>], shape: &[u64], bits: u64) -> Option<(u64, u64)> {
    let len = |range: &Range<u64>| range.end - range.start;
    // The part has one index in each dimension before the dimension `cut`. It must have all indices in each dimension
    // after `cut`.
    let cut = part.iter().position(|range| len(range) > 1).unwrap_or(part.len());
    let after = part.iter().zip(shape).skip(cut + 1);
    if after.into_iter().any(|(range, &size)| len(range) != size) {
        return None;
    }
    let offset =
        part.iter().zip(shape).fold(0, |offset, (range, &size)| offset * size + range.start);
    let (from, run) = (offset * bits, part.iter().map(len).product::<u64>() * bits);
    (from.is_multiple_of(8) && run.is_multiple_of(8)).then_some((from / 8, run / 8))
}

/// Copies runs one after another to `into`. `read` reads from an offset to a target, and returns whether it
/// succeeded. Returns whether all reads succeeded.
fn copy(runs: &StridedCopy, into: &mut [u8], read: &dyn Fn(u64, &mut [u8]) -> bool) -> bool {
    let (run_len, total) = (runs.run_len(), runs.count());
    let mut scratch = Vec::new();
    let mut rest = into;
    let (mut first, mut start) = (0, runs.run(0).0);
    while first < total {
        // The runs from `first` up to `next` lie close together, in bytes `start..end`.
        let (mut next, mut end, mut after) = (first + 1, start + run_len, 0);
        while next < total {
            after = runs.run(next).0;
            if after - end >= SKIP_MIN || after + run_len - start > SCRATCH_LEN {
                break;
            }
            (next, end) = (next + 1, after + run_len);
        }
        let (mine, others) = rest.split_at_mut(((next - first) * run_len) as usize);
        let copied = if next - first == 1 {
            read(start, mine)
        } else {
            scratch.resize((end - start) as usize, 0);
            let copied = read(start, &mut scratch);
            for (k, run) in (first..next).zip(mine.chunks_exact_mut(run_len as usize)) {
                let from = (runs.run(k).0 - start) as usize;
                run.copy_from_slice(&scratch[from..][..run.len()]);
            }
            copied
        };
        if !copied {
            return false;
        }
        (rest, first, start) = (others, next, after);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bits of a part in order, as positions in a tensor of this shape.
    fn bits_of(part: &[Range<u64>], shape: &[u64], bits: u64) -> Vec<u64> {
        let mut elements = vec![0];
        for (range, size) in part.iter().zip(shape) {
            let next = |element: u64| range.clone().map(move |index| element * size + index);
            elements = elements.into_iter().flat_map(next).collect();
        }
        elements.into_iter().flat_map(|element| element * bits..(element + 1) * bits).collect()
    }

    #[test]
    fn a_part_is_one_run_where_its_bits_follow_each_other_on_whole_bytes() {
        let shape = [3, 2, 4];
        let ranges = |size: u64| (0..size).flat_map(move |a| (a + 1..=size).map(move |b| a..b));
        let mut runs = 0;
        for (x, y, z) in ranges(3).flat_map(|x| {
            ranges(2).flat_map(move |y| {
                let x = x.clone();
                ranges(4).map(move |z| (x.clone(), y.clone(), z))
            })
        }) {
            for bits in [4, 16] {
                let part = [x.clone(), y.clone(), z.clone()];
                let bits_in_order = bits_of(&part, &shape, bits);
                let is_run = bits_in_order.windows(2).all(|pair| pair[1] == pair[0] + 1);
                let first = bits_in_order[0];
                let is_whole = first.is_multiple_of(8) && bits_in_order.len().is_multiple_of(8);
                let right = (first / 8, bits_in_order.len() as u64 / 8);
                let found = as_single_run(&part, &shape, bits);
                assert_eq!(found, (is_run && is_whole).then_some(right), "{part:?} {bits}");
                runs += u32::from(found.is_some());
            }
        }
        assert!(runs > 50, "{runs}");
        assert_eq!(as_single_run(&[], &[], 16), Some((0, 2)));
    }
}
