//! Parts of tensors that the kernel's page cache holds, copied by the calling thread: to plan them
//! and to call other threads takes longer.

use std::ops::Range;

use super::Loader;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::plan::Rows;

/// Longest run that is copied so: several threads copy a longer one sooner.
const RUN_MAX: u64 = 4 << 20;

/// Most bytes of a part, most runs that these are, and most bytes from its first to its last.
/// Together they keep the thread for less than a tenth of a second, in which it asks nobody
/// whether to go on.
const PART_MAX: u64 = 64 << 20;
const RUNS_MAX: u64 = 4 << 20;
const SPAN_MAX: u64 = 512 << 20;

/// Unwanted bytes between two runs that are copied rather than skipped: a system call costs as
/// much.
const SKIP_MIN: u64 = 8 << 10;

/// Runs that are copied together come through memory that stays in a core's cache.
const SCRATCH_LEN: u64 = 128 << 10;

impl Loader {
    /// Copies a part of tensor `tensor`, or all of it, to `into`, row-major, on this thread and
    /// without waiting: where the tensor is one piece, the part is small, and the kernel's page
    /// cache holds it. Returns whether it did; else `into` holds bytes that mean nothing.
    ///
    /// # Errors
    /// Where the shard is no longer what it was.
    pub fn copy_from_page_cache(
        &self,
        checkpoint: &Checkpoint,
        tensor: usize,
        part: Option<&[Range<u64>]>,
        into: &mut [u8],
    ) -> Result<bool> {
        let Some(rows) = small_rows(checkpoint, tensor, part) else { return Ok(false) };
        if rows.count() * rows.run_len != into.len() as u64 {
            return Ok(false);
        }
        let source = &checkpoint.sources()[rows.shard.0 as usize];
        self.engine.copy_cached(source, &rows.span(), |read| copy(&rows, into, read))
    }

    /// Whether `copy_from_page_cache` would copy this part where the page cache holds it.
    pub fn is_near(checkpoint: &Checkpoint, tensor: usize, part: Option<&[Range<u64>]>) -> bool {
        small_rows(checkpoint, tensor, part).is_some()
    }
}

/// The runs of a part that lies in one piece and is small.
fn small_rows(checkpoint: &Checkpoint, tensor: usize, part: Option<&[Range<u64>]>) -> Option<Rows> {
    let rows = Rows::of(&checkpoint.catalog().tensor_at(tensor), part)?;
    let (span, count) = (rows.span(), rows.count());
    let most = if count == 1 { RUN_MAX } else { PART_MAX };
    let is_small =
        count <= RUNS_MAX && count * rows.run_len <= most && span.end - span.start <= SPAN_MAX;
    is_small.then_some(rows)
}

/// Copies runs one after the other to `into` by `read`, which takes offset and target and says
/// whether it could. Returns whether all could be had.
fn copy(rows: &Rows, into: &mut [u8], read: &dyn Fn(u64, &mut [u8]) -> bool) -> bool {
    let (run_len, total) = (rows.run_len, rows.count());
    let mut scratch = Vec::new();
    let mut rest = into;
    let (mut first, mut start) = (0, 0);
    while first < total {
        // Runs from `first` to before `next` lie in bytes `start..end`, close to each other.
        let (mut next, mut end, mut after) = (first + 1, start + run_len, 0);
        while next < total {
            after = rows.strides.run(next).0;
            if after - end >= SKIP_MIN || after + run_len - start > SCRATCH_LEN {
                break;
            }
            (next, end) = (next + 1, after + run_len);
        }
        let (mine, others) = rest.split_at_mut(((next - first) * run_len) as usize);
        let at = rows.start + start;
        let copied = if next - first == 1 {
            read(at, mine)
        } else {
            scratch.resize((end - start) as usize, 0);
            let copied = read(at, &mut scratch);
            for (k, run) in (first..next).zip(mine.chunks_exact_mut(run_len as usize)) {
                let from = (rows.strides.run(k).0 - start) as usize;
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
