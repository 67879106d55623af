//! Copies parts of tensors from the kernel's page cache on the calling thread, because a plan and
//! other threads take longer.

use std::ops::Range;

use super::Loader;
use crate::catalog::{ShardId, Tensor};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::strided::{OuterBox, SourceBox, StridedCopy};

/// Longest run that is copied this way. Several threads copy a longer one faster.
const RUN_MAX: u64 = 4 << 20;

/// Maximum bytes of a part, maximum number of its runs, and maximum distance from its first byte to
/// its last. With these limits a copy, which cannot be stopped, takes less than a tenth of a
/// second.
const PART_MAX: u64 = 64 << 20;
const RUNS_MAX: u64 = 4 << 20;
const SPAN_MAX: u64 = 512 << 20;

/// Minimum length of a gap between two runs that is skipped. A shorter gap is copied, because a
/// system call costs as much.
const SKIP_MIN: u64 = 8 << 10;

/// Largest average length of tensors that are mapped whether or not the page cache holds them. The
/// kernel's read-ahead brings many of them at once.
const MAPPED_MEAN_MAX: u64 = 64 << 10;

/// Length of the buffer for runs that are copied together. It stays in a core's cache.
const SCRATCH_LEN: u64 = 128 << 10;

/// A part of a tensor that is copied on the calling thread if the page cache holds it.
#[derive(Debug)]
pub struct CachedPart {
    shard: ShardId,
    runs: StridedCopy,
}

impl CachedPart {
    /// A part of tensor `tensor`, or all of it: `None` unless it lies in one piece and is small.
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
    /// Copies a part of tensor `tensor`, or all of it, to `into`, row-major, on this thread and
    /// without waiting: if it is a `CachedPart`, and the kernel's page cache holds it. Returns
    /// whether it did; else `into` holds bytes that mean nothing.
    ///
    /// # Errors
    /// The shard is no longer the file that was opened.
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

    /// Whether a mapping of `range` of a shard costs less than a read past the page cache: the
    /// kernel reports that the cache holds most of it, or the tensors are so small on average that
    /// own memory for each takes longer than their reads. False where access to the shard may wait,
    /// or its bytes are not stored as they are loaded. Never waits.
    pub fn is_better_mapped(
        &self,
        checkpoint: &Checkpoint,
        shard: ShardId,
        range: &Range<u64>,
    ) -> bool {
        let sources = checkpoint.sources();
        let source = &sources[shard.0 as usize];
        // As if all shards were of one length: a sum takes too long for each request.
        let len = source.len().saturating_mul(sources.len() as u64);
        let are_small = len <= checkpoint.catalog().len() as u64 * MAPPED_MEAN_MAX;
        let cached = self.engine.cached_pages(source, range);
        cached.is_some_and(|cached| are_small || cached.is_most())
    }

    /// Copies a part of this checkpoint, as `copy_from_page_cache` does.
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

/// Shard and runs of the indices `part` of a tensor, or of all of it; they follow each other in the
/// part. `None` if the tensor has several pieces, the part is empty or does not lie in the tensor,
/// a run does not begin and end on bytes, or the tensor is cast.
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
    if let Some(run) = only_run(part, piece.shape, bits).filter(|_| is_row_major) {
        return Some(one_run(run));
    }
    let size: Vec<u64> = part.iter().map(|wanted| wanted.end - wanted.start).collect();
    let offset: Vec<u64> = part.iter().map(|wanted| wanted.start).collect();
    let from = SourceBox { shape: piece.shape, strides: piece.strides, offset: &offset };
    let to = OuterBox { shape: &size, offset: &vec![0; size.len()] };
    let runs = StridedCopy::new(from, to, &size, (bits, bits)).ok()?;
    (runs.run_len() > 0 && runs.is_ascending()).then(|| (shard, runs.behind(start)))
}

/// First byte and length of a part, which is not empty and lies in `shape`, if it is one run of
/// whole bytes. This test is faster than `StridedCopy::new`.
fn only_run(part: &[Range<u64>], shape: &[u64], bits: u64) -> Option<(u64, u64)> {
    let len = |range: &Range<u64>| range.end - range.start;
    // Each dimension before this one has one index. Each dimension after it must have all.
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

/// Copies runs one after the other to `into`. `read` takes an offset and a target, and returns
/// whether it succeeded. Returns whether all reads succeeded.
fn copy(runs: &StridedCopy, into: &mut [u8], read: &dyn Fn(u64, &mut [u8]) -> bool) -> bool {
    let (run_len, total) = (runs.run_len(), runs.count());
    let mut scratch = Vec::new();
    let mut rest = into;
    let (mut first, mut start) = (0, runs.run(0).0);
    while first < total {
        // Runs from `first` to before `next` lie in bytes `start..end`, close to each other.
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

    /// Bits of a part, one after the other, as they lie in a tensor of this shape.
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
                let found = only_run(&part, &shape, bits);
                assert_eq!(found, (is_run && is_whole).then_some(right), "{part:?} {bits}");
                runs += u32::from(found.is_some());
            }
        }
        assert!(runs > 50, "{runs}");
        assert_eq!(only_run(&[], &[], 16), Some((0, 2)));
    }
}
