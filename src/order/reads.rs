//! Learns the order in which a reader reads tensors, from the tensors that it has begun.

use std::collections::VecDeque;
use std::ops::Range;

use super::Order;
use super::layers::{LayerPart, LayerSteps};

/// A tensor or a read of fewer bytes than this says little about the next read.
pub const SMALL: u64 = 64 << 10;

/// A tensor of a file, or its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpan {
    /// Its place in the file: 0 for the header, 1 for the first tensor.
    pub place: u32,
    /// Its bytes.
    pub range: Range<u64>,
}

/// The tensors of a file.
pub trait TensorMap {
    /// The tensor or the header that contains byte `offset`.
    fn at(&self, offset: u64) -> TensorSpan;

    /// The next tensor with data, in `order`, after the tensor at `place`.
    fn after(&self, place: u32, order: Order) -> Option<TensorSpan>;

    /// The layer and the part of the tensor at `place`. `None` if they are not known.
    fn part(&self, _place: u32) -> Option<LayerPart> {
        None
    }

    /// The tensor with this layer and part.
    fn of_part(&self, _part: LayerPart) -> Option<TensorSpan> {
        None
    }
}

/// Highest and lowest score of an order.
const SCORE_MAX: i8 = 8;
const SCORE_MIN: i8 = -8;

/// Maximum trust in the order with the highest score.
const TRUST_MAX: u8 = 8;

/// Maximum number of misses that are counted for a reader.
const MISSES_MAX: u8 = 8;

/// Number of tensors begun last that are remembered. Several threads take turns, so the next tensor
/// may follow any of them.
const RECENT: usize = 8;

/// Maximum number of tensors in a row that are skipped because they were already read.
const STEPS_MAX: usize = 16;

/// The order that was learned from the tensors of one reader.
#[derive(Clone, Debug, Default)]
pub struct ReadLearner {
    /// The score of each order. It changes only at tensors for which the predictions of the orders
    /// differ.
    scores: [i8; Order::ALL.len()],
    /// Trust in the best order. It grows with each tensor that this order predicts.
    pub(crate) trust: u8,
    /// Number of tensors that no order predicted. Each predicted tensor halves this number.
    misses: u8,
    /// Tensors begun last, newest first.
    recent: VecDeque<TensorSpan>,
    steps: LayerSteps,
}

impl ReadLearner {
    /// The learner for a new reader, which is expected to use the same order.
    pub(crate) fn follower(&self) -> ReadLearner {
        ReadLearner { recent: VecDeque::new(), trust: self.trust.min(2), misses: 0, ..self.clone() }
    }

    /// Whether several of the tensors that were begun last were predicted by no order.
    pub(crate) fn is_mistaken(&self) -> bool {
        self.misses > 1
    }

    fn best(&self) -> usize {
        let index = (0..Order::ALL.len()).rev().max_by_key(|&index| self.scores[index]);
        index.unwrap_or(0)
    }

    /// The order that the reader probably follows.
    pub(crate) fn order(&self) -> Order {
        Order::ALL[self.best()]
    }

    /// Notes that the reader begins `tensor`. `passed` returns true for tensors that the reader
    /// would skip, because they were read or are being read.
    pub(crate) fn begins(
        &mut self,
        tensor: &TensorSpan,
        tensors: &dyn TensorMap,
        passed: &dyn Fn(&TensorSpan) -> bool,
    ) {
        if tensor.place == 0 || self.is_recent(tensor) {
            return;
        }
        if !self.recent.is_empty() {
            let foretold = Order::ALL.map(|order| {
                self.has_view(order, tensors).then(|| self.leads_to(tensor, order, tensors, passed))
            });
            self.learn(foretold);
        }
        self.remember(tensor, tensors);
    }

    /// Notes that the reader has moved from `before` into `tensor` without a gap.
    pub(crate) fn goes_on(
        &mut self,
        before: &TensorSpan,
        tensor: &TensorSpan,
        tensors: &dyn TensorMap,
    ) {
        let next = self.after(before.place, self.order(), tensors);
        // One read may hold several small tensors.
        let follows = |next: TensorSpan| match self.order() {
            Order::File => next.place <= tensor.place,
            _ => next.place == tensor.place,
        };
        if before.place != 0 && next.is_some_and(follows) {
            self.trust = (self.trust + 1).min(TRUST_MAX);
            self.misses /= 2;
        }
        self.remember(tensor, tensors);
    }

    fn is_recent(&self, tensor: &TensorSpan) -> bool {
        self.recent.iter().any(|recent| recent.place == tensor.place)
    }

    fn remember(&mut self, tensor: &TensorSpan, tensors: &dyn TensorMap) {
        // Two threads may read the halves of one tensor.
        if self.recent.front().is_some_and(|last| last.place == tensor.place) {
            return;
        }
        let before = self.recent.front().and_then(|before| tensors.part(before.place));
        if let (Some(before), Some(after)) = (before, tensors.part(tensor.place)) {
            self.steps.learn(before, after);
        }
        self.recent.truncate(RECENT - 1);
        self.recent.push_front(tensor.clone());
    }

    /// Whether `order` predicts any tensor after the tensor that was begun last. Only the learned order,
    /// `Order::Layers`, may predict none.
    fn has_view(&self, order: Order, tensors: &dyn TensorMap) -> bool {
        let step =
            || tensors.part(self.recent.front()?.place).and_then(|part| self.steps.after(part));
        order != Order::Layers || step().is_some()
    }

    /// The tensor that follows the tensor at `place` in `order`.
    fn after(&self, place: u32, order: Order, tensors: &dyn TensorMap) -> Option<TensorSpan> {
        match order {
            Order::Layers => tensors.of_part(self.steps.after(tensors.part(place)?)?),
            _ => tensors.after(place, order),
        }
    }

    /// Whether `tensor` follows, in `order`, one of the tensors begun last. Small and skipped
    /// tensors may lie between them.
    fn leads_to(
        &self,
        tensor: &TensorSpan,
        order: Order,
        tensors: &dyn TensorMap,
        passed: &dyn Fn(&TensorSpan) -> bool,
    ) -> bool {
        self.recent.iter().any(|recent| {
            let mut place = recent.place;
            for _ in 0..STEPS_MAX {
                let Some(next) = self.after(place, order, tensors) else { return false };
                if next.place == tensor.place {
                    return true;
                }
                // One read covers a small tensor and its neighbours.
                if next.range.end - next.range.start >= SMALL && !passed(&next) {
                    return false;
                }
                place = next.place;
            }
            false
        })
    }

    /// Updates the scores after a tensor was begun. `foretold` says for each order whether it
    /// predicted this tensor, or is `None` if the order predicted nothing.
    fn learn(&mut self, foretold: [Option<bool>; Order::ALL.len()]) {
        let best = self.best();
        let hits = foretold.iter().filter(|&&view| view == Some(true)).count();
        if hits > 0 && hits < foretold.iter().flatten().count() {
            for (score, view) in self.scores.iter_mut().zip(foretold) {
                let step = view.map_or(0, |hit| if hit { 1 } else { -2 });
                *score = (*score + step).clamp(SCORE_MIN, SCORE_MAX);
            }
        }
        if foretold[best] == Some(true) {
            self.trust = (self.trust + 1).min(TRUST_MAX);
            self.misses /= 2;
        } else if hits > 0 {
            // If another order continues to predict tensors, it becomes the best one.
            self.trust = (self.trust / 2).max(1);
            self.misses /= 2;
        } else {
            self.trust = self.trust.saturating_sub(4);
            self.misses = (self.misses + 1).min(MISSES_MAX);
        }
    }

    /// The tensor that the reader is likely to begin after `tensor`. Tensors for which `passed`
    /// returns true are skipped.
    pub(crate) fn next(
        &self,
        tensor: &TensorSpan,
        tensors: &dyn TensorMap,
        passed: &dyn Fn(&TensorSpan) -> bool,
    ) -> Option<TensorSpan> {
        let mut place = tensor.place;
        for _ in 0..STEPS_MAX {
            let next = self.after(place, self.order(), tensors)?;
            if !passed(&next) {
                return Some(next);
            }
            place = next.place;
        }
        None
    }
}
