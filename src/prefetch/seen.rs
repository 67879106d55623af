//! The tensors of a file that were read.

use std::ops::Range;

use crate::order::{Order, TensorMap};

/// The set of tensors whose middle was read, by their place. The page cache of the kernel should have them.
#[derive(Debug, Default)]
pub(super) struct SeenTensors(Vec<u64>);

/// Maximum number of tensors that one read marks.
const MARKED_MAX: usize = 1024;

impl SeenTensors {
    pub(super) fn contains(&self, place: u32) -> bool {
        let word = self.0.get(place as usize / 64);
        word.is_some_and(|word| word >> (place % 64) & 1 == 1)
    }

    /// Marks the tensors whose middle byte is in `range`. Returns whether one of them was marked
    /// already. In this case the kernel has dropped its pages, so all earlier marks are removed.
    pub(super) fn add(&mut self, range: &Range<u64>, tensors: &dyn TensorMap) -> bool {
        let mut has_forgotten = false;
        let mut tensor = Some(tensors.at(range.start));
        for _ in 0..MARKED_MAX {
            let Some(this) = tensor.filter(|tensor| tensor.range.start < range.end) else { break };
            let middle = this.range.start + (this.range.end - this.range.start) / 2;
            if range.contains(&middle) {
                if self.contains(this.place) {
                    self.0.clear();
                    has_forgotten = true;
                }
                let word = this.place as usize / 64;
                if self.0.len() <= word {
                    self.0.resize(word + 1, 0);
                }
                self.0[word] |= 1 << (this.place % 64);
            }
            tensor = tensors.after(this.place, Order::File);
        }
        has_forgotten
    }
}
