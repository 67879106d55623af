//! Reads of mapped pages, which the kernel extends to both sides, and programs that read only the start of each tensor
//! before they load the first one, as `from_pretrained` does: for these the starts of the next tensors are read ahead,
//! and not the rest of the current one.

use std::collections::VecDeque;
use std::ops::Range;

use super::{PAGE, Request, SLACK};
use crate::order::{SMALL, TensorMap, TensorSpan};

/// Number of tensors in a row of which only the start was read, after which the same is expected of the next ones.
const TOUCHED_MIN: u8 = 2;

/// Number of tensors in a row of which only the start was read, from which these reads are a pass of their own.
const PASS_MIN: u8 = 16;

/// Maximum number of tensors whose starts may be read at the same time, by parts of requests or by several threads.
const RECENT_MAX: usize = 16;

/// The bytes around the start of a tensor that a reader requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Around {
    /// Number of bytes before the page of the start.
    before: u64,
    /// Number of bytes from that page on.
    after: u64,
}

impl Around {
    /// The bytes around the start of a tensor on the page `page`, in a file of `len` bytes.
    pub(super) fn of(self, page: u64, len: u64) -> Range<u64> {
        page.saturating_sub(self.before)..(page + self.after).min(len)
    }

    fn max(self, other: Around) -> Around {
        Around { before: self.before.max(other.before), after: self.after.max(other.after) }
    }

    /// Includes the bytes of a read near a tensor that starts at `start`.
    fn include(&mut self, start: u64, read: &Range<u64>) {
        let page = start / PAGE * PAGE;
        self.before = self.before.max(page.saturating_sub(read.start));
        self.after = self.after.max(read.end.saturating_sub(page));
    }
}

/// The tensors of which one reader read only the start.
#[derive(Clone, Debug, Default)]
pub(super) struct Touches {
    /// Tensors whose start was read, with the requested bytes around it so far. The one that was read last is the
    /// first: the kernel requests the bytes around one page in parts, and these arrive between those of the next.
    recent: VecDeque<(TensorSpan, Around)>,
    /// The most bytes that were requested around the start of a tensor.
    widest: Around,
    /// Number of tensors in a row of which only the start was read.
    count: u8,
}

impl Touches {
    /// The bytes that the reader is expected to request around the starts of the next tensors, if it requests no
    /// others.
    pub(super) fn expected(&self) -> Option<Around> {
        (self.count >= TOUCHED_MIN).then_some(self.widest)
    }

    /// Whether the reader reads the starts in a pass of its own. Several threads that load tensors also read a few
    /// starts in a row.
    pub(super) fn is_pass(&self) -> bool {
        self.count >= PASS_MIN
    }

    /// The tensor whose start was read last, if only the start of the tensor before was read.
    pub(super) fn tensor(&self) -> Option<TensorSpan> {
        self.recent.front().filter(|_| self.count > 0).map(|(tensor, _)| tensor.clone())
    }

    /// Notes a read of the reader.
    pub(super) fn read(&mut self, range: &Range<u64>, tensors: &dyn TensorMap) {
        let known = self.recent.iter().position(|(tensor, _)| is_near(range, tensor));
        if let Some((tensor, mut around)) = known.and_then(|known| self.recent.remove(known)) {
            around.include(tensor.range.start, range);
            // Tensors begin at different distances from the start of a page, or behind a short tensor.
            let is_more =
                range.start >= tensor.range.start && around.after / 3 * 2 > self.widest.after;
            // The bytes before the next tensor may be read with that.
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

/// Whether a read is of the bytes around the start of `tensor`.
fn is_near(range: &Range<u64>, tensor: &TensorSpan) -> bool {
    let start = tensor.range.start;
    range.start + SLACK >= start && range.end <= start + SLACK
}

/// The tensor that a read lies in, if it begins a little before the read.
fn begun_near(range: &Range<u64>, tensors: &dyn TensorMap) -> Option<TensorSpan> {
    let tensor = tensors.at(range.start);
    (range.start < tensor.range.start + SLACK / 2).then_some(tensor)
}

/// Whether a tensor is not read as a whole with its start. Most reads of a shorter one are near a start of a tensor.
fn is_long(tensor: &TensorSpan) -> bool {
    tensor.range.end - tensor.range.start >= 3 * SLACK
}

/// The tensor that a read begins at, or a little before: the kernel reads as much before a mapped page as after it.
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

/// The tensor that an unexpected read touches: the one that begins at the start of the read, or in
/// its middle, where the page lies that the kernel reads around.
pub(super) fn touched(request: &Request, tensors: &dyn TensorMap) -> TensorSpan {
    let Range { start, end } = request.range;
    let begins = |offset: u64| {
        let tensor = tensors.at((offset + PAGE - 1).min(end - 1));
        (tensor.range.start >= offset).then_some(tensor)
    };
    let middle = start + (end - start) / 2 / PAGE * PAGE;
    begins(start).or_else(|| begins(middle)).unwrap_or_else(|| tensors.at(end - 1))
}

/// Whether a read ends where a tensor begins, and begins inside another one: the kernel reads as
/// much before a page that is touched as after it.
pub(super) fn reads_around(request: &Request, tensors: &dyn TensorMap) -> bool {
    let Range { start, end } = request.range;
    let begins_in = |offset: u64| {
        let tensor = tensors.at(offset + PAGE - 1);
        tensor.range.start >= offset && tensor.range.start < offset + PAGE
    };
    end - start >= SMALL && start > 0 && begins_in(end) && !begins_in(start)
}
