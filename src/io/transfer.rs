//! The execution of one fetch: which system call comes next, and the meaning of its result. A backend only
//! makes the calls.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::libc;
use tracing::{Span, trace, trace_span};

use super::memory::{ALIGN, Buffer, GivenMemory, ReadBuffer, pages_around};
use super::queue::ReadJob;
use super::{CachedPages, DirectIo, page_cache};
use crate::error::{Error, Result, shown_path};
use crate::source::{LocalCopy, LocalFile, Source};
use crate::zeros::are_zeros;

/// Maximum number of EAGAIN results after which a read is retried.
const AGAIN_MAX: u32 = 100;

/// Pause before each retry after the second EAGAIN.
pub(super) const AGAIN_PAUSE: Duration = Duration::from_millis(1);

/// A fetch in execution.
pub(super) struct Transfer {
    source: Arc<Source>,
    /// The local copy that is read in place of a store.
    copy: Option<Arc<LocalCopy>>,
    /// The open file. It stays open even if the source is closed. `None` if a store is read.
    file: Option<Arc<File>>,
    /// A descriptor for O_DIRECT. `None` if the bytes are read through the page cache.
    direct: Option<Arc<File>>,
    buffer: Buffer,
    /// Memory to which the bytes are copied from the buffer at the end. `None` if the disk writes to the destination
    /// directly.
    place: Option<GivenMemory>,
    /// Offset in the file of the first byte of the buffer.
    start: u64,
    /// Number of bytes from the start of the buffer that are filled or are not needed.
    have: usize,
    /// Range of the requested bytes in the buffer.
    wanted: Range<usize>,
    /// Range in the buffer of the bytes that have to be read. For encrypted sources it is extended to whole pieces.
    needed: Range<usize>,
    /// Whether the bytes have to be decrypted.
    pub(super) decrypts: bool,
    /// Whether a read past the page cache was intended but not possible.
    pub(super) refused: bool,
    /// Number of EAGAIN results so far.
    again: u32,
    /// Start of the time limit.
    since: Instant,
    began: Instant,
    span: Span,
}

/// The next step of a transfer.
pub(super) enum Next {
    /// Another read.
    Read,
    /// Another read after `AGAIN_PAUSE`.
    ReadLater,
    /// The end: all bytes have been read, or the read failed.
    End(Result<()>),
}

impl Transfer {
    /// Opens the file if necessary, and decides how to read. May wait for the file system.
    pub(super) fn begin(job: ReadJob, direct: DirectIo) -> Result<Transfer> {
        let ReadJob { source, range, since, stored, target, cached, .. } = job;
        let decrypts = !stored && source.is_encrypted();
        let needed = if decrypts { source.cover(&range) } else { range.clone() };
        let len = range.end - range.start;
        let span = trace_span!("fetch", shard = %source.uri(), offset = range.start, len);
        let entered = span.clone().entered();
        source.check_known()?;
        let copy = source.copy();
        let local = source.local().or_else(|| copy.as_deref().map(LocalCopy::local));
        let file = match &copy {
            Some(copy) => Some(copy.file()),
            None => source.local().map(LocalFile::file).transpose()?,
        };
        let past_cache = match (direct, &file) {
            (_, None) => false,
            _ if are_zeros(range.start) => false,
            (DirectIo::Never, _) => false,
            (DirectIo::Always, _) => true,
            (DirectIo::Auto, _) if copy.is_none() && source.may_block() => false,
            (DirectIo::Auto, Some(file)) => {
                let cached = cached.or_else(|| page_cache::cached_pages(file, &needed));
                !cached.is_some_and(CachedPages::is_most)
            }
        };
        let opened = local.zip(file.as_ref()).filter(|_| past_cache);
        let direct = opened.and_then(|(local, file)| local.direct_file(file));
        let refused = past_cache && direct.is_none();
        let mut target = target;
        let (mut buffer, place, start) = match (target.take_unaligned(), &direct) {
            // If the range consists of whole encrypted pieces, they are decrypted in place.
            (Some(place), None) if needed == range => {
                (Buffer::unaligned(place, target), None, range.start)
            }
            (place, _) => {
                let around = pages_around(&needed);
                let len = (around.end - around.start) as usize;
                let buffer =
                    Buffer::try_new(len, target).map_err(|e| Error::io(source.uri(), "read", e))?;
                (buffer, place, around.start)
            }
        };
        if decrypts {
            buffer.wipe_on_drop();
        }
        let within =
            |range: &Range<u64>| (range.start - start) as usize..(range.end - start) as usize;
        let (wanted, needed) = (within(&range), within(&needed));
        let have = if direct.is_some() { 0 } else { needed.start };
        let began = Instant::now();
        let again = 0;
        drop(entered);
        Ok(Transfer {
            source,
            copy,
            file,
            direct,
            buffer,
            place,
            start,
            have,
            wanted,
            needed,
            decrypts,
            refused,
            again,
            since,
            began,
            span,
        })
    }

    /// Fills the memory if the requested bytes are zeros that no file contains. Returns whether they are.
    pub(super) fn fill_zeros(&mut self) -> bool {
        let is_zeros = are_zeros(self.start);
        if is_zeros {
            self.buffer[self.wanted.clone()].fill(0);
        }
        is_zeros
    }

    /// Number of requested bytes.
    pub(super) fn len(&self) -> usize {
        self.wanted.len()
    }

    /// Whether the reads go past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// File, offset and memory of the next read. `None` if a store is read.
    pub(super) fn next(&mut self) -> Option<(&File, u64, &mut [u8])> {
        let end = if self.direct.is_some() { self.buffer.len() } else { self.needed.end };
        let file = self.direct.as_ref().or(self.file.as_ref())?;
        Some((file, self.start + self.have as u64, &mut self.buffer[self.have..end]))
    }

    /// Reads all bytes from a store, within the rest of the time limit.
    pub(super) fn read_stored(&mut self, timeout: Option<Duration>) -> Result<()> {
        let offset = self.start + self.needed.start as u64;
        let until = timeout.and_then(|timeout| self.since.checked_add(timeout));
        self.source.read_until(&mut self.buffer[self.needed.clone()], offset, until)
    }

    /// Handles the result of a read, and returns the next step.
    pub(super) fn advance(&mut self, result: io::Result<usize>) -> Next {
        match result {
            Ok(0) if self.have < self.needed.end && self.leave_copy() => Next::Read,
            Ok(0) if self.have < self.needed.end => {
                Next::End(Err(self.source.ends_before(self.start + self.needed.end as u64)))
            }
            Ok(n) => self.take(n),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR) => Next::Read,
                Some(libc::EAGAIN) if self.again < AGAIN_MAX => {
                    self.again += 1;
                    if self.again == 1 { Next::Read } else { Next::ReadLater }
                }
                Some(libc::EINVAL | libc::EOPNOTSUPP) if self.direct.is_some() => {
                    self.leave_direct();
                    Next::Read
                }
                _ if self.leave_copy() => Next::Read,
                _ => Next::End(Err(Error::io(self.source.uri(), "read", e))),
            },
        }
    }

    /// Handles `n` bytes that have arrived.
    fn take(&mut self, n: usize) -> Next {
        self.have += n;
        if self.have >= self.needed.end {
            return Next::End(Ok(()));
        }
        // A direct read cannot begin at this offset, so the rest is read through the page cache.
        if !(self.have as u64).is_multiple_of(ALIGN) {
            self.direct = None;
        }
        Next::Read
    }

    /// Switches from the local copy to the store, because the copy cannot be read. Returns whether there was a copy.
    fn leave_copy(&mut self) -> bool {
        if self.copy.take().is_none() {
            return false;
        }
        self.source.leave_copy();
        (self.file, self.direct, self.have) = (None, None, self.needed.start);
        true
    }

    /// Switches to reads through the page cache, because the file system refuses direct reads.
    fn leave_direct(&mut self) {
        let copy = self.copy.as_deref().map(LocalCopy::local);
        if let Some(local) = self.source.local().or(copy) {
            local.refuse_direct();
        }
        self.direct = None;
        self.refused = true;
        self.have = self.have.max(self.needed.start);
    }

    /// Abandons the memory, because the kernel may still use it.
    pub(super) fn leak_buffer(&self) {
        self.buffer.leak_buffer();
    }

    /// Checks that the file has not changed, and decrypts and returns the bytes. If `place` is set, copies them
    /// there too.
    pub(super) fn finish(mut self) -> Result<ReadBuffer> {
        let _entered = self.span.clone().entered();
        match (self.source.local(), &self.file) {
            (Some(local), Some(file)) => local.check_open(file)?,
            // A store checks the version with each read, and the bytes of a local copy do not change.
            _ => self.source.check_known()?,
        }
        if self.decrypts {
            let start = self.start + self.needed.start as u64;
            self.source.decrypt(start, &mut self.buffer[self.needed.clone()])?;
        }
        if self.source.set_stalled(false) {
            tracing::info!("{}: is read again", shown_path(self.source.path()));
        }
        if let Some(place) = &mut self.place {
            place.fill(&self.buffer[self.wanted.clone()]);
        }
        trace!(direct = self.direct.is_some(), took = ?self.began.elapsed(), "read");
        let mut filled = ReadBuffer::new(self.buffer, self.wanted);
        filled.began = self.began;
        Ok(filled)
    }
}
