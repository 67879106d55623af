//! Detects programs that read only the start of each tensor before they load the first tensor, as `from_pretrained`
//! does. For such a program, the starts of the next tensors are read ahead, and not the rest of the current tensor. A
//! read of a start may also have bytes in front of it, because the kernel extends a read of a mapped page to both
//! sides.

use std::collections::VecDeque;
use std::ops::Range;

use super::{PAGE, Request, SLACK};
use crate::order::{SMALL, TensorMap, TensorSpan};

/// If a reader has read only the starts of this number of tensors in a row, it is expected to read only the starts of
/// the next tensors too.
const TOUCHED_MIN: u8 = 2;

/// If a reader has read only the starts of this number of tensors in a row, these reads count as a separate pass.
const PASS_MIN: u8 = 16;

/// Maximum number of tensors whose starts may be read at the same time, by parts of requests or by several threads.
const RECENT_MAX: usize = 16;

/// The requested bytes around the start of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Around {
    /// Number of bytes before the page that contains the start.
    before: u64,
    /// Number of bytes from the beginning of that page on.
    after: u64,
}

impl Around {
    /// The byte range around the start of a tensor, if the page of the start begins at `page`, in a file of `len`
    /// bytes.
    pub(super) fn of(self, page: u64, len: u64) -> Range<u64> {
        page.saturating_sub(self.before)..(page + self.after).min(len)
    }

    fn max(self, other: Around) -> Around {
        Around { before: self.before.max(other.before), after: self.after.max(other.after) }
    }

    /// Adds the bytes of a read near the start of a tensor, which is at `start`.
    fn include(&mut self, start: u64, read: &Range<u64>) {
        let page = start / PAGE * PAGE;
        self.before = self.before.max(page.saturating_sub(read.start));
        self.after = self.after.max(read.end.saturating_sub(page));
    }
}

/// The tensors of which one reader has read only the start.
#[derive(Clone, Debug, Default)]
pub(super) struct Touches {
    /// Tensors whose start was read, with the bytes around the start that were requested so far. The tensor that was
    /// read last comes first. The kernel requests the bytes around one page in parts, and the parts of two tensors may
    /// arrive mixed.
    recent: VecDeque<(TensorSpan, Around)>,
    /// The maximum of the bytes that were requested around the start of a tensor.
    widest: Around,
    /// Number of tensors in a row of which only the start was read.
    count: u8,
}

impl Touches {
    /// The bytes that the reader is expected to request around the starts of the next tensors. `None` if the reader may
    /// also request other bytes.
    pub(super) fn expected(&self) -> Option<Around> {
        (self.count >= TOUCHED_MIN).then_some(self.widest)
    }

    /// Whether the reader reads the starts of all tensors in a separate pass. Only a long series of starts is such a
    /// pass, because several threads that load tensors also read a few starts in a row.
    pub(super) fn is_pass(&self) -> bool {
        self.count >= PASS_MIN
    }

    /// The tensor whose start was read last, if only the start of the tensor before it was read.
    pub(super) fn tensor(&self) -> Option<TensorSpan> {
        self.recent.front().filter(|_| self.count > 0).map(|(tensor, _)| tensor.clone())
    }

    /// Notes a read of the reader.
    pub(super) fn read(&mut self, range: &Range<u64>, tensors: &dyn TensorMap) {
        let known = self.recent.iter().position(|(tensor, _)| is_near(range, tensor));
        if let Some((tensor, mut around)) = known.and_then(|known| self.recent.remove(known)) {
            around.include(tensor.range.start, range);
            // Slightly more bytes than around other starts do not show that the reader reads the tensor itself. Tensors
            // begin at different distances from the start of a page, or behind a short tensor.
            let is_more =
                range.start >= tensor.range.start && around.after / 3 * 2 > self.widest.after;
            // Bytes at the end of the tensor may be requested for the start of the next tensor.
            let is_inside = range.end + self.widest.before <= tensor.range.end;
            if self.expected().is_some() && is_more && is_inside {
                *self = Touches::default();
                return;
            }
            if self.count > 0 && self.expected().is_none() && is_long(&tensor) {
                self.widest = self.widest.max(around);
            }
            return self.recent.push_front((tensor, around));
        }
        // The first part of a request may arrive last.
        let late = || self.expected().and_then(|_| begun_near(range, tensors));
        let Some(tensor) = tensor_near(range, tensors).or_else(late) else {
            *self = Touches::default();
            return;
        };
        if let Some((_, around)) = self.recent.front().filter(|(tensor, _)| is_long(tensor)) {
            self.widest = self.widest.max(*around);
            self.count = self.count.saturating_add(1);
        }
        let mut around = Around::default();
        around.include(tensor.range.start, range);
        self.recent.truncate(RECENT_MAX - 1);
        self.recent.push_front((tensor, around));
    }
}

/// Whether the bytes of a read are near the start of `tensor`.
fn is_near(range: &Range<u64>, tensor: &TensorSpan) -> bool {
    let start = tensor.range.start;
    range.start + SLACK >= start && range.end <= start + SLACK
}

/// The tensor that contains the first byte of a read, if the tensor begins a little before the read.
fn begun_near(range: &Range<u64>, tensors: &dyn TensorMap) -> Option<TensorSpan> {
    let tensor = tensors.at(range.start);
    (range.start < tensor.range.start + SLACK / 2).then_some(tensor)
}

/// Whether a tensor is so long that a read around its start does not cover most of it. Most reads of a shorter tensor
/// are near the start of some tensor.
fn is_long(tensor: &TensorSpan) -> bool {
    tensor.range.end - tensor.range.start >= 3 * SLACK
}

/// The tensor that begins at the start of a read or a little after it. The kernel reads as many bytes before a mapped
/// page as after it.
fn tensor_near(range: &Range<u64>, tensors: &dyn TensorMap) -> Option<TensorSpan> {
    let in_page = |offset: u64| {
        let tensor = tensors.at(offset + PAGE - 1);
        (tensor.range.start >= offset).then_some(tensor)
    };
    let middle = range.start + SLACK / 2;
    in_page(range.start).or_else(|| in_page(middle)).or_else(|| {
        let tensor = tensors.at(middle);
        (tensor.range.start >= range.start).then_some(tensor)
    })
}

/// The tensor for which an unexpected read was sent: the tensor that begins at the start of the read or in its middle,
/// because the kernel reads the bytes around the requested page. Otherwise the tensor at the end of the read.
pub(super) fn touched(request: &Request, tensors: &dyn TensorMap) -> TensorSpan {
    let Range { start, end } = request.range;
    let begins = |offset: u64| {
        let tensor = tensors.at((offset + PAGE - 1).min(end - 1));
        (tensor.range.start >= offset).then_some(tensor)
    };
    let middle = start + (end - start) / 2 / PAGE * PAGE;
    begins(start).or_else(|| begins(middle)).unwrap_or_else(|| tensors.at(end - 1))
}

/// Whether a read ends where a tensor begins, and begins inside another tensor. The kernel sends such a read because it
/// reads as many bytes before a requested page as after it.
pub(super) fn reads_around(request: &Request, tensors: &dyn TensorMap) -> bool {
    let Range { start, end } = request.range;
    let begins_in = |offset: u64| {
        let tensor = tensors.at(offset + PAGE - 1);
        tensor.range.start >= offset && tensor.range.start < offset + PAGE
    };
    end - start >= SMALL && start > 0 && begins_in(end) && !begins_in(start)
}
