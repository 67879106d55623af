//! Copies the bytes of a reader to a new file. The engine reads, several threads write, and the memory is bounded.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::journal::RecordedPart;
use super::target::{ALIGN, Target, read_back};
use super::tensor_writer::{self, WrittenRange};
use crate::error::{Error, Result};
use crate::hash::Digest;
use crate::io::{Buffer, Settings};
use crate::reader::Reader;
use crate::sweep::{RANGE_MAX, Sweep};

/// Number of bytes that a thread reads and writes at a time if writes go to the page cache.
const CACHED_WINDOW_LEN: u64 = 512 << 10;

/// Number of bytes that a thread reads and writes at a time if writes go past the page cache.
const DIRECT_WINDOW_LEN: u64 = RANGE_MAX;

/// A callback that gets all bytes of a file in order.
pub type OnBytes<'a> = &'a mut dyn FnMut(&[u8]);

/// Callbacks for the progress and the bytes of a copy.
pub struct Watch<'a> {
    /// Called with numbers of bytes that were written or read back. An error of the callback ends the work.
    pub progress: &'a mut dyn FnMut(u64) -> Result<()>,
    /// Called with the bytes of each window in order.
    pub bytes: Option<OnBytes<'a>>,
}

/// Copies files.
pub struct Copier {
    pub(super) sweep: Sweep,
    reused: AtomicU64,
}

/// The place of a new file.
#[derive(Clone, Copy)]
pub(super) struct NewPlace<'a> {
    pub(super) file: &'a File,
    /// The folder that contains the file.
    pub(super) folder: &'a Path,
    /// The name of the file in errors.
    pub(super) shown: &'a Path,
}

/// A range of a file that was written at a time.
struct Window {
    /// The bytes, if there is a callback for them.
    bytes: Option<Buffer>,
    range: Range<u64>,
    /// The hash of the bytes, if they will be read back or recorded in a journal.
    digest: Option<Digest>,
}

impl Copier {
    /// A copier that reads with `settings`.
    pub fn new(settings: Settings) -> Copier {
        let sweep = Sweep::for_readers(settings, tensor_writer::THREADS);
        Copier { sweep, reused: AtomicU64::new(0) }
    }

    /// A flag that ends waits for a source when it is set. The `progress` callback has to return an error then
    /// as well.
    pub fn stopped(&self) -> Arc<AtomicBool> {
        self.sweep.stopped()
    }

    /// Number of bytes from a killed run that were still there and were not written again.
    pub fn reused(&self) -> u64 {
        self.reused.load(Ordering::Relaxed)
    }

    pub(super) fn add_reused(&self, len: u64) {
        self.reused.fetch_add(len, Ordering::Relaxed);
    }

    /// Writes all bytes of `reader` to the file at `place`, and waits until the disk has them. If `verify` is
    /// true, reads them back and compares them. If there is a `part`, continues where a killed run has stopped,
    /// and writes the journal.
    ///
    /// # Errors
    /// Errors of the sources, of the file system and of `watch`. An I/O error if other bytes are read back.
    pub(super) fn copy(
        &self,
        reader: &Reader,
        place: NewPlace<'_>,
        verify: bool,
        watch: &mut Watch<'_>,
        mut part: Option<RecordedPart<'_>>,
    ) -> Result<()> {
        let NewPlace { file, folder, shown } = place;
        let failed = |e| Error::io(shown, "write", e);
        let mut written = Vec::new();
        if let Some(part) = &part {
            written = self.still_there(part.written(), file, reader.len(), watch)?;
        }
        let start = written.last().map_or(0, |last| last.range.end);
        self.add_reused(start);
        let target = Target::new(file, folder, reader.len()).map_err(failed)?;
        // Each encrypted piece is decrypted for every window that contains a part of it, so long windows are better.
        let is_long = target.is_direct() || reader.is_encrypted();
        let len = if is_long { DIRECT_WINDOW_LEN } else { CACHED_WINDOW_LEN };
        let windows = Windows { start, len, file_len: reader.len() };
        let keep = watch.bytes.is_some();
        let has_digests = verify || part.is_some();
        let write = |number| {
            let range = windows.range(number);
            let bytes = self.sweep.read(reader, &range)?;
            target.write(&bytes, range.start).map_err(failed)?;
            let digest = has_digests.then(|| Digest::of(&bytes));
            Ok(Window { bytes: keep.then_some(bytes), range, digest })
        };
        self.sweep.in_order(windows.count(), &write, &mut |window: Window| {
            if let (Some(bytes), Some(each)) = (&window.bytes, &mut watch.bytes) {
                each(bytes);
            }
            let len = window.range.end - window.range.start;
            if let Some(digest) = window.digest {
                let range = WrittenRange { range: window.range, digest };
                if let Some(part) = &mut part {
                    part.add(file, range.clone()).map_err(failed)?;
                }
                written.push(range);
            }
            (watch.progress)(len)
        })?;
        target.finish().map_err(failed)?;
        if !verify {
            return Ok(());
        }
        target.read_back();
        let compare = |number| {
            let written = &written[number as usize];
            let range = &written.range;
            let mut bytes = self.sweep.buffer(range)?;
            target.read(&mut bytes, range.start).map_err(|e| Error::io(shown, "read", e))?;
            written.compare(&Digest::of(&bytes), shown)?;
            Ok(range.end - range.start)
        };
        self.sweep.in_order(written.len() as u64, &compare, &mut |len| (watch.progress)(len))
    }

    /// The ranges at the start of the list `recorded` whose bytes in `file` have the recorded hash. The result
    /// ends before the first range that differs. `len` is the length that the file will have.
    fn still_there(
        &self,
        mut recorded: Vec<WrittenRange>,
        file: &File,
        len: u64,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<WrittenRange>> {
        let is_window = |range: &Range<u64>| {
            let ends_well =
                range.end == len || (range.end < len && range.end.is_multiple_of(ALIGN as u64));
            ends_well && range.end - range.start <= DIRECT_WINDOW_LEN
        };
        let fitting = recorded.iter().take_while(|written| is_window(&written.range)).count();
        recorded.truncate(fitting);
        let compare = |number| {
            let WrittenRange { range, digest } = &recorded[number as usize];
            let mut bytes = self.sweep.buffer(range)?;
            let read = file.read_exact_at(&mut bytes, range.start);
            let is_same = read.is_ok() && Digest::of(&bytes) == *digest;
            Ok(is_same.then_some(range.end - range.start))
        };
        let (mut kept, mut is_whole) = (0, true);
        self.sweep.in_order(fitting as u64, &compare, &mut |same| match same {
            Some(len) if is_whole => {
                kept += 1;
                (watch.progress)(len)
            }
            _ => {
                is_whole = false;
                Ok(())
            }
        })?;
        recorded.truncate(kept);
        read_back(file);
        Ok(recorded)
    }
}

/// The division of the rest of a file into windows.
struct Windows {
    start: u64,
    len: u64,
    file_len: u64,
}

impl Windows {
    fn count(&self) -> u64 {
        (self.file_len - self.start).div_ceil(self.len)
    }

    fn range(&self, number: u64) -> Range<u64> {
        let start = self.start + number * self.len;
        start..(start + self.len).min(self.file_len)
    }
}
