//! The order in which a reader takes tensors, learned from those that it has begun.

use std::collections::VecDeque;
use std::ops::Range;

use super::SMALL;

/// Orders in which programs take tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOrder {
    /// As they stand in the file.
    File,
    /// By name.
    Name,
    /// By name, with numbers as numbers: layer 2 before layer 10.
    Natural,
    /// By shard, and as they stand in that.
    Shard,
}

impl ReadOrder {
    /// All of them; of two that have proved themselves as well, the first is taken.
    pub const ALL: [ReadOrder; 4] =
        [ReadOrder::File, ReadOrder::Name, ReadOrder::Natural, ReadOrder::Shard];
}

/// A tensor, or the header, of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpan {
    /// Its place in the file: 0 for the header, 1 for the first tensor.
    pub place: u32,
    /// Its bytes.
    pub range: Range<u64>,
}

/// The tensors of a file.
pub trait TensorMap {
    /// The tensor, or the header, that `offset` lies in.
    fn at(&self, offset: u64) -> TensorSpan;

    /// The tensor after the one at `place` in `order`, but for empty ones.
    fn after(&self, place: u32, order: ReadOrder) -> Option<TensorSpan>;
}

/// Best and worst score of an order.
const SCORE_MAX: i8 = 8;
const SCORE_MIN: i8 = -8;

/// Most trust in the order that has proved itself best.
const TRUST_MAX: u8 = 8;

/// Most misses that are held against a reader.
const MISSES_MAX: u8 = 8;

/// Tensors begun last that the next one is taken to follow: several threads take turns.
const RECENT: usize = 8;

/// Tensors that were read already are passed over, up to so many.
const STEPS_MAX: usize = 16;

/// What one reader's tensors have taught.
#[derive(Clone, Debug, Default)]
pub(super) struct OrderReader {
    /// By order; only tensors of which the orders differ count.
    scores: [i8; ReadOrder::ALL.len()],
    trust: u8,
    /// Tensors that no order has foretold; those that one has halve it.
    misses: u8,
    /// Begun last, newest first.
    recent: VecDeque<TensorSpan>,
}

impl OrderReader {
    /// Another reader, which is expected to use the same order.
    pub(super) fn follower(&self) -> OrderReader {
        OrderReader { recent: VecDeque::new(), trust: self.trust.min(2), misses: 0, ..self.clone() }
    }

    /// How often the order has foretold the next tensor of late.
    pub(super) fn trust(&self) -> u8 {
        self.trust
    }

    /// Whether no order has foretold the tensors begun last.
    pub(super) fn is_mistaken(&self) -> bool {
        self.misses > 1
    }

    fn best(&self) -> usize {
        let index = (0..ReadOrder::ALL.len()).rev().max_by_key(|&index| self.scores[index]);
        index.unwrap_or(0)
    }

    /// The order that it is taken to follow.
    pub(super) fn order(&self) -> ReadOrder {
        ReadOrder::ALL[self.best()]
    }

    /// Takes note that the reader begins `tensor`. `passed` says which tensors it would pass
    /// over, because they were read or are being read.
    pub(super) fn begins(
        &mut self,
        tensor: &TensorSpan,
        tensors: &dyn TensorMap,
        passed: &dyn Fn(&TensorSpan) -> bool,
    ) {
        if tensor.place == 0 || self.recent.iter().any(|recent| recent.place == tensor.place) {
            return;
        }
        if !self.recent.is_empty() {
            let foretold =
                ReadOrder::ALL.map(|order| self.leads_to(tensor, order, tensors, passed));
            self.learn(foretold);
        }
        self.remember(tensor);
    }

    /// Takes note that the reader has come from `before` into `tensor` without a gap.
    pub(super) fn goes_on(
        &mut self,
        before: &TensorSpan,
        tensor: &TensorSpan,
        tensors: &dyn TensorMap,
    ) {
        let next = tensors.after(before.place, self.order());
        // One read may hold all of several small ones.
        let follows = |next: TensorSpan| match self.order() {
            ReadOrder::File => next.place <= tensor.place,
            _ => next.place == tensor.place,
        };
        if before.place != 0 && next.is_some_and(follows) {
            self.trust = (self.trust + 1).min(TRUST_MAX);
            self.misses /= 2;
        }
        self.remember(tensor);
    }

    fn remember(&mut self, tensor: &TensorSpan) {
        self.recent.truncate(RECENT - 1);
        self.recent.push_front(tensor.clone());
    }

    /// Whether `order` leads from one of the tensors begun last to `tensor`.
    fn leads_to(
        &self,
        tensor: &TensorSpan,
        order: ReadOrder,
        tensors: &dyn TensorMap,
        passed: &dyn Fn(&TensorSpan) -> bool,
    ) -> bool {
        self.recent.iter().any(|recent| {
            let mut place = recent.place;
            for _ in 0..STEPS_MAX {
                let Some(next) = tensors.after(place, order) else { return false };
                if next.place == tensor.place {
                    return true;
                }
                // Small ones come along with what is read around others.
                if next.range.end - next.range.start >= SMALL && !passed(&next) {
                    return false;
                }
                place = next.place;
            }
            false
        })
    }

    fn learn(&mut self, foretold: [bool; ReadOrder::ALL.len()]) {
        let best = self.best();
        let hits = foretold.iter().filter(|&&hit| hit).count();
        if hits > 0 && hits < foretold.len() {
            for (score, hit) in self.scores.iter_mut().zip(foretold) {
                *score = (*score + if hit { 1 } else { -2 }).clamp(SCORE_MIN, SCORE_MAX);
            }
        }
        if foretold[best] {
            self.trust = (self.trust + 1).min(TRUST_MAX);
            self.misses /= 2;
        } else if hits > 0 {
            // Another order takes over, if it goes on so.
            self.trust = (self.trust / 2).max(1);
            self.misses /= 2;
        } else {
            self.trust = self.trust.saturating_sub(4);
            self.misses = (self.misses + 1).min(MISSES_MAX);
        }
    }

    /// The tensor that it is likely to begin after `tensor` and those that are `passed`.
    pub(super) fn next(
        &self,
        tensor: &TensorSpan,
        tensors: &dyn TensorMap,
        passed: &dyn Fn(&TensorSpan) -> bool,
    ) -> Option<TensorSpan> {
        let mut place = tensor.place;
        for _ in 0..STEPS_MAX {
            let next = tensors.after(place, self.order())?;
            if !passed(&next) {
                return Some(next);
            }
            place = next.place;
        }
        None
    }
}

/// Tensors whose middle was read: the kernel has them.
#[derive(Debug, Default)]
pub(super) struct SeenTensor(Vec<u64>);

/// Tensors of one read that are marked, at most.
const MARKED_MAX: usize = 1024;

impl SeenTensor {
    pub(super) fn contains(&self, place: u32) -> bool {
        let word = self.0.get(place as usize / 64);
        word.is_some_and(|word| word >> (place % 64) & 1 == 1)
    }

    /// Marks the tensors whose middle a read of `range` holds. Returns whether the kernel has
    /// forgotten what it had: then only those of this read are marked.
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
            tensor = tensors.after(this.place, ReadOrder::File);
        }
        has_forgotten
    }
}
