//! Copies the bytes of a reader to a new file: reads by the engine, writes on several threads,
//! bounded memory.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

use super::target::Target;
use super::tensor_writer;
use crate::counters::Counters;
use crate::error::{Error, Result};
use crate::hash::Digest;
use crate::io::{Budget, Buffer, Engine, Priority, Settings};
use crate::parallel::in_parallel;
use crate::reader::Reader;

/// Bytes that a thread reads and writes at a time, if the page cache takes the writes.
const CACHED_WINDOW_LEN: u64 = 512 << 10;

/// Bytes that a thread reads and writes at a time past the page cache.
const DIRECT_WINDOW_LEN: u64 = 4 << 20;

/// Threads that copy windows.
const THREADS: usize = 4;

/// Windows that are read and not yet passed on.
const AHEAD: u64 = 8;

/// Most memory that the reads of a window may take; windows that need more are read in parts.
const PLAN_MAX: u64 = 24 << 20;

/// Shortest part that the engine reads.
const PART_MIN: usize = 4096;

/// Gets all bytes of a file in order.
pub type OnBytes<'a> = &'a mut dyn FnMut(&[u8]);

/// Receives the progress and the bytes of a copy.
pub struct Watch<'a> {
    /// Called in turn with the number of bytes that were written or read back. Its error ends the
    /// work.
    pub progress: &'a mut dyn FnMut(u64) -> Result<()>,
    /// Called with the bytes of each window in turn.
    pub bytes: Option<OnBytes<'a>>,
}

/// Copies files. Its reads share one engine and one bound of memory.
pub struct Copier {
    engine: Engine,
    budget: Budget,
}

/// A window that was written.
struct Window {
    /// Its bytes, if they are passed on.
    bytes: Option<Buffer>,
    len: u64,
    /// The hash of its bytes, if they are read back.
    digest: Option<Digest>,
}

impl Copier {
    /// A copier that reads by `settings`.
    pub fn new(settings: Settings) -> Copier {
        let counters: Arc<Counters> = Arc::default();
        let threads = THREADS.max(tensor_writer::THREADS) as u64;
        let limit = AHEAD * DIRECT_WINDOW_LEN + threads * PLAN_MAX;
        let budget = Budget::new(limit, counters.clone());
        Copier { engine: Engine::start(settings, counters), budget }
    }

    /// Writes all bytes of `reader` to `file`, a new file in `folder`, and waits until the disk has
    /// them. `verify`: reads them back and compares. `shown` names the file in errors.
    ///
    /// # Errors
    /// Errors of the sources, of the file system and of `watch`, and an I/O error if other bytes
    /// came back.
    pub(super) fn copy(
        &self,
        reader: &Reader,
        (file, folder, shown): (&File, &Path, &Path),
        verify: bool,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let failed = |e| Error::io(shown, "write", e);
        let target = Target::new(file, folder, reader.len()).map_err(failed)?;
        // Each encrypted piece is decrypted for every window that has a part of it.
        let is_long = target.is_direct() || reader.is_encrypted();
        let len = if is_long { DIRECT_WINDOW_LEN } else { CACHED_WINDOW_LEN };
        let windows = Windows { len, file_len: reader.len() };
        let keep = watch.bytes.is_some();
        let mut digests = Vec::new();
        let write = |number| {
            let range = windows.range(number);
            let bytes = self.read(reader, &range)?;
            target.write(&bytes, range.start).map_err(failed)?;
            let digest = verify.then(|| Digest::of(&bytes));
            let len = bytes.len() as u64;
            Ok(Window { bytes: keep.then_some(bytes), len, digest })
        };
        in_parallel(windows.count(), THREADS, AHEAD, &write, &mut |window: Window| {
            if let (Some(bytes), Some(each)) = (&window.bytes, &mut watch.bytes) {
                each(bytes);
            }
            digests.extend(window.digest);
            (watch.progress)(window.len)
        })?;
        target.finish().map_err(failed)?;
        if !verify {
            return Ok(());
        }
        target.read_back();
        let compare = |number| {
            let range = windows.range(number);
            let mut bytes = self.buffer(&range)?;
            target.read(&mut bytes, range.start).map_err(|e| Error::io(shown, "read", e))?;
            if Digest::of(&bytes) == digests[number as usize] {
                return Ok(range.end - range.start);
            }
            let message =
                format!("bytes {}..{} read back differ from those written", range.start, range.end);
            Err(Error::io(shown, "verify", std::io::Error::other(message)))
        };
        in_parallel(windows.count(), THREADS, AHEAD, &compare, &mut |len| (watch.progress)(len))
    }

    /// Reads bytes of `reader`, as many as a window of `copy` has at most.
    pub(super) fn read(&self, reader: &Reader, range: &Range<u64>) -> Result<Buffer> {
        let mut bytes = self.buffer(range)?;
        self.fill(reader, range.start, &mut bytes)?;
        Ok(bytes)
    }

    fn buffer(&self, range: &Range<u64>) -> Result<Buffer> {
        let reserved = self.budget.try_reserve(Buffer::len_for(range));
        let reserved = reserved.ok_or_else(|| Error::internal("the copy ran out of its memory"))?;
        Ok(Buffer::new((range.end - range.start) as usize, reserved))
    }

    /// Reads the bytes of `reader` from `start` on into `target`: on this thread if they are in memory
    /// or in the page cache, else by the engine, which has a deadline for each read.
    pub(super) fn fill(&self, reader: &Reader, start: u64, target: &mut [u8]) -> Result<()> {
        let range = start..start + target.len() as u64;
        let in_memory = reader.sources().iter().all(|source| source.is_in_memory());
        if in_memory || reader.is_scattered(&range) {
            return reader.read_at(start, target).map(drop);
        }
        let mut plan = reader.plan_block(range);
        if plan.read_cached(&self.engine, target)? {
            return Ok(());
        }
        let memory = plan.memory();
        if memory > PLAN_MAX {
            // Thousands of small tensors, each with its own read.
            if target.len() <= PART_MIN {
                return reader.read_at(start, target).map(drop);
            }
            let (first, second) = target.split_at_mut(target.len() / 2);
            self.fill(reader, start, first)?;
            return self.fill(reader, start + first.len() as u64, second);
        }
        let reserved = self.budget.try_reserve(memory);
        let reserved = reserved.ok_or_else(|| Error::internal("the copy ran out of its memory"))?;
        let (sender, outcome) = channel();
        let done = Box::new(move |block| drop(sender.send(block)));
        plan.fetch(&self.engine, Priority::Demand, reserved, done);
        let block =
            outcome.recv().map_err(|_| Error::internal("a read ended without an answer"))?;
        target.copy_from_slice(&block?);
        Ok(())
    }
}

/// How a file is cut into windows.
struct Windows {
    len: u64,
    file_len: u64,
}

impl Windows {
    fn count(&self) -> u64 {
        self.file_len.div_ceil(self.len)
    }

    fn range(&self, number: u64) -> Range<u64> {
        let start = number * self.len;
        start..(start + self.len).min(self.file_len)
    }
}
