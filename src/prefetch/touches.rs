//! Reads of mapped pages, which the kernel extends to both sides, and programs that read only the start of each tensor
//! before they load the first one, as `from_pretrained` does: for these the starts of the next tensors are read ahead,
//! and not the rest of the current one.

use std::ops::Range;

use super::{PAGE, Request, SLACK};
use crate::order::{SMALL, TensorMap, TensorSpan};

/// Number of tensors in a row of which only the start was read, after which the same is expected of the next ones.
const TOUCHED_MIN: u8 = 2;

/// The bytes around the start of a tensor that a reader requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Around {
    /// Number of bytes before the page of the start.
    pub(super) before: u64,
    /// Number of bytes from that page on.
    pub(super) after: u64,
}

impl Around {
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
    /// The tensor whose start is read now, and the requested bytes around that start so far.
    current: Option<(TensorSpan, Around)>,
    /// The requested bytes around the start of the previous such tensor.
    last: Around,
    /// Number of such tensors in a row.
    count: u8,
}

impl Touches {
    /// The bytes that the reader is expected to request around the starts of the next tensors, if it requests no
    /// others.
    pub(super) fn expected(&self) -> Option<Around> {
        (self.count >= TOUCHED_MIN).then_some(self.last)
    }

    /// The tensor whose start is read now, if only the start of the previous tensor was read.
    pub(super) fn tensor(&self) -> Option<TensorSpan> {
        self.current.as_ref().filter(|_| self.count > 0).map(|(tensor, _)| tensor.clone())
    }

    /// Notes a read of the reader.
    pub(super) fn read(&mut self, range: &Range<u64>, tensors: &dyn TensorMap) {
        if let Some((tensor, around)) = &mut self.current {
            let start = tensor.range.start;
            if range.start + SLACK >= start && range.end <= start + SLACK {
                around.include(start, range);
                let is_more = range.start >= start && around.after > self.last.after;
                // The bytes before the next tensor may be read with that.
                let is_inside = range.end + self.last.before <= tensor.range.end;
                if self.count > 0 && is_more && is_inside {
                    *self = Touches::default();
                }
                return;
            }
        }
        let Some(tensor) = tensor_near(range, tensors) else {
            *self = Touches::default();
            return;
        };
        let mut around = Around::default();
        around.include(tensor.range.start, range);
        let before = self.current.replace((tensor, around));
        // A short tensor is read as a whole with its start.
        if let Some((before, around)) = before
            && before.range.end - before.range.start >= 2 * SLACK
        {
            self.count = self.count.saturating_add(1);
            self.last = around;
        }
    }
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
