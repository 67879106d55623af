//! The order in which a reader takes tensors, learned from the tensors that it has begun.

use std::collections::VecDeque;
use std::ops::Range;

use super::SMALL;

/// Orders in which programs take tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOrder {
    /// The order of the file.
    File,
    /// The order of the names.
    Name,
    /// The order of the names, with numbers compared as numbers: layer 2 before layer 10.
    Natural,
    /// The order of the shards, and of the offsets in each.
    Shard,
}

impl ReadOrder {
    /// All orders; of two with equal scores the first is taken.
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

    /// The next tensor that is not empty after the one at `place` in `order`.
    fn after(&self, place: u32, order: ReadOrder) -> Option<TensorSpan>;
}

/// Best and worst score of an order.
const SCORE_MAX: i8 = 8;
const SCORE_MIN: i8 = -8;

/// Most trust in the order that has proved itself best.
const TRUST_MAX: u8 = 8;

/// Most misses that are counted for a reader.
const MISSES_MAX: u8 = 8;

/// Number of tensors begun last that the next one may follow, because several threads take turns.
const RECENT: usize = 8;

/// Most tensors in a row that are passed over because they were already read.
const STEPS_MAX: usize = 16;

/// The order learned from one reader's tensors.
#[derive(Clone, Debug, Default)]
pub(super) struct OrderReader {
    /// Scores, by order; only tensors on which the orders differ count.
    scores: [i8; ReadOrder::ALL.len()],
    trust: u8,
    /// Number of tensors that no order predicted; each predicted tensor halves it.
    misses: u8,
    /// Tensors begun last, newest first.
    recent: VecDeque<TensorSpan>,
}

impl OrderReader {
    /// Another reader, which is expected to use the same order.
    pub(super) fn follower(&self) -> OrderReader {
        OrderReader { recent: VecDeque::new(), trust: self.trust.min(2), misses: 0, ..self.clone() }
    }

    /// Trust in the best order, which grows with each tensor that it predicts.
    pub(super) fn trust(&self) -> u8 {
        self.trust
    }

    /// Whether no order predicted the tensors begun last.
    pub(super) fn is_mistaken(&self) -> bool {
        self.misses > 1
    }

    fn best(&self) -> usize {
        let index = (0..ReadOrder::ALL.len()).rev().max_by_key(|&index| self.scores[index]);
        index.unwrap_or(0)
    }

    /// The order that the reader probably follows.
    pub(super) fn order(&self) -> ReadOrder {
        ReadOrder::ALL[self.best()]
    }

    /// Notes that the reader begins `tensor`. `passed` says which tensors it would pass over,
    /// because they were read or are being read.
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

    /// Notes that the reader has moved from `before` into `tensor` without a gap.
    pub(super) fn goes_on(
        &mut self,
        before: &TensorSpan,
        tensor: &TensorSpan,
        tensors: &dyn TensorMap,
    ) {
        let next = tensors.after(before.place, self.order());
        // One read may hold several small tensors.
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
                // Small tensors are read along with others.
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
            // Another order takes over if it keeps predicting.
            self.trust = (self.trust / 2).max(1);
            self.misses /= 2;
        } else {
            self.trust = self.trust.saturating_sub(4);
            self.misses = (self.misses + 1).min(MISSES_MAX);
        }
    }

    /// The tensor that the reader is likely to begin after `tensor`, without those that are
    /// `passed`.
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

/// Most tensors of one read that are marked.
const MARKED_MAX: usize = 1024;

impl SeenTensor {
    pub(super) fn contains(&self, place: u32) -> bool {
        let word = self.0.get(place as usize / 64);
        word.is_some_and(|word| word >> (place % 64) & 1 == 1)
    }

    /// Marks the tensors whose middle a read of `range` holds. Returns whether one was already
    /// marked, so that the kernel has dropped its pages: then only tensors of this read stay
    /// marked.
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
