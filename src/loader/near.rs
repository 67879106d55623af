//! Parts of tensors that the kernel's page cache holds, copied by the calling thread: to plan them
//! and to call other threads takes longer.

use std::ops::Range;

use super::Loader;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::io::Copier;
use crate::plan::Rows;

/// Most that is copied so: several threads copy more sooner, but read what lies between runs too.
const RUN_MAX: u64 = 4 << 20;
const ROWS_MAX: u64 = 64 << 20;

/// Unwanted bytes between two runs that are copied rather than skipped: a system call costs more.
const SKIP_MIN: u64 = 8 << 10;

/// Runs so close to each other come through memory that stays in a core's cache.
const SCRATCH_LEN: u64 = 128 << 10;

impl Loader {
    /// Copies a part of tensor `tensor`, or all of it, to `into`, row-major, on this thread and without waiting:
    /// where the tensor is one piece, the kernel's page cache holds it, and that is the fastest.
    /// Returns whether it did; else `into` holds bytes that mean nothing.
    ///
    /// # Errors
    /// Where the shard is no longer what it was.
    pub fn load_cached(
        &self,
        checkpoint: &Checkpoint,
        tensor: usize,
        part: Option<&[Range<u64>]>,
        into: &mut [u8],
    ) -> Result<bool> {
        let Some(rows) = Rows::of(&checkpoint.catalog().tensor_at(tensor), part) else {
            return Ok(false);
        };
        let most = if rows.strides.0.is_empty() { RUN_MAX } else { ROWS_MAX };
        let len = into.len() as u64;
        if rows.count().checked_mul(rows.run_len) != Some(len) || len > most {
            return Ok(false);
        }
        let source = &checkpoint.sources()[rows.shard.0 as usize];
        self.engine.copy_cached(source, &rows.span(), |file| copy(&rows, into, file))
    }
}

/// Copies runs one after the other to `into`. Returns whether all could be had.
fn copy(rows: &Rows, into: &mut [u8], file: &Copier<'_>) -> bool {
    let run_len = rows.run_len as usize;
    let Some(inner) = rows.strides.0.last() else {
        return file.copy(rows.start, into);
    };
    let together = match inner.from - rows.run_len {
        ..SKIP_MIN => (SCRATCH_LEN / inner.from).clamp(1, inner.count),
        _ => 1,
    };
    let mut scratch = vec![0; if together > 1 { (together * inner.from) as usize } else { 0 }];
    let mut rest = into.chunks_exact_mut(run_len);
    for outer in (0..rows.count()).step_by(inner.count as usize) {
        let start = rows.start + rows.strides.run(outer).0;
        for first in (0..inner.count).step_by(together as usize) {
            let start = start + first * inner.from;
            let n = together.min(inner.count - first) as usize;
            let copied = if n == 1 {
                rest.next().is_some_and(|run| file.copy(start, run))
            } else {
                let width = inner.from as usize;
                let bytes = &mut scratch[..(n - 1) * width + run_len];
                let copied = file.copy(start, bytes);
                let runs = rest.by_ref().take(n);
                runs.zip(bytes.chunks(width))
                    .for_each(|(to, row)| to.copy_from_slice(&row[..run_len]));
                copied
            };
            if !copied {
                return false;
            }
        }
    }
    true
}
