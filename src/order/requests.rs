//! Learns the order in which the tensors of a checkpoint are requested, and predicts the next ones.
//!
//! Each order is compared with every request. The order that predicted the last requests best is
//! used to predict the next ones.

use std::collections::VecDeque;

use super::{Order, Orders, Sequence};

/// Maximum number of cursors in an order for each reader, and for all readers together. With more
/// cursors, a random request would more often be near one of them by chance.
const CURSORS_EACH: usize = 2;
const CURSORS_MAX: usize = 8;

/// Maximum number of tensors that a cursor has skipped and still expects, because threads overtake
/// each other.
const PASSED_MAX: usize = 32;

/// Number of last requests whose readers are counted.
const READERS_IN: usize = 16;

/// Minimum score of a trusted order, and the highest score. A hit adds one, a miss halves
/// it.
const TRUSTED_SCORE_MIN: u32 = 2;
const SCORE_MAX: u32 = 16;

/// A place in an order from which a reader may continue.
#[derive(Clone, Debug)]
struct Cursor {
    /// The highest requested rank.
    rank: u32,
    /// Ranks before `rank` that were not requested.
    passed: VecDeque<u32>,
    /// Number of the last request at this cursor.
    last: u64,
}

/// The record of the predictions of one sequence.
#[derive(Clone, Debug, Default)]
struct Track {
    score: u32,
    misses: u32,
    cursors: Vec<Cursor>,
}

impl Track {
    /// Notes request `number`, for the tensor of this rank. Returns whether the request was
    /// expected. `readers` threads may share the order and overtake each other, so a request may
    /// also be a few ranks after a cursor. The first tensor of the order is always expected.
    fn ask(&mut self, rank: u32, readers: usize, number: u64) -> bool {
        let reach = if readers > 1 { 2 * readers as u32 } else { 1 };
        if let Some(cursor) = self.cursors.iter_mut().find(|cursor| cursor.rank == rank) {
            // A repeated request says nothing about the order.
            cursor.last = number;
            return true;
        }
        let expected = self.expected(rank, reach, number);
        if expected || rank == 0 {
            self.score = (self.score + 1).min(SCORE_MAX);
        } else {
            (self.score, self.misses) = (self.score / 2, self.misses.saturating_add(1));
        }
        if !expected {
            let most = (CURSORS_EACH * readers).min(CURSORS_MAX);
            while self.cursors.len() >= most {
                let oldest = (0..self.cursors.len()).min_by_key(|&index| self.cursors[index].last);
                self.cursors.swap_remove(oldest.unwrap_or(0));
            }
            self.cursors.push(Cursor { rank, passed: VecDeque::new(), last: number });
        }
        expected || rank == 0
    }

    /// Moves the cursor that expects this rank. Returns whether there is one.
    fn expected(&mut self, rank: u32, reach: u32, number: u64) -> bool {
        for cursor in &mut self.cursors {
            if let Some(index) = cursor.passed.iter().position(|&passed| passed == rank) {
                cursor.passed.remove(index);
                cursor.last = number;
                return true;
            }
        }
        let near = |cursor: &&mut Cursor| cursor.rank < rank && rank - cursor.rank <= reach;
        let nearest = self.cursors.iter_mut().filter(near).max_by_key(|cursor| cursor.rank);
        let Some(cursor) = nearest else { return false };
        cursor.passed.extend(cursor.rank + 1..rank);
        let dropped = cursor.passed.len().saturating_sub(PASSED_MAX);
        cursor.passed.drain(..dropped);
        (cursor.rank, cursor.last) = (rank, number);
        true
    }
}

/// Learns from the requests for the tensors of one checkpoint.
#[derive(Clone, Debug)]
pub struct RequestLearner {
    pub(super) orders: Orders,
    /// One track for each sequence.
    tracks: Vec<Track>,
    /// Number of requests for each tensor.
    asked: Vec<u16>,
    requests: u64,
    /// The readers that sent the last requests.
    recent: VecDeque<u64>,
    /// Sequence and rank of the last request. `None` if that request was not expected.
    onward: Option<(usize, u32)>,
}

impl RequestLearner {
    /// Creates a learner without requests. The order `usual`, which predicted the requests for
    /// another checkpoint, is trusted sooner.
    pub fn new(orders: Orders, usual: Option<Order>) -> RequestLearner {
        let score =
            |order: &Sequence| u32::from(usual.is_some_and(|usual| order.orders.contains(&usual)));
        let track = |order| Track { score: score(order), ..Track::default() };
        let tracks = orders.sequences.iter().map(track).collect();
        let asked = vec![0; orders.sequences.first().map_or(0, |order| order.tensors.len())];
        let recent = VecDeque::with_capacity(READERS_IN + 1);
        RequestLearner { orders, tracks, asked, requests: 0, recent, onward: None }
    }

    /// Notes a request of `reader` for `tensor`. Returns whether a trusted order expected the
    /// request. If so, `next` returns the tensors that follow.
    ///
    /// # Panics
    /// If the checkpoint has no such tensor.
    pub fn ask(&mut self, tensor: usize, reader: u64) -> bool {
        self.requests += 1;
        self.asked[tensor] = self.asked[tensor].saturating_add(1);
        self.recent.push_back(reader);
        if self.recent.len() > READERS_IN {
            self.recent.pop_front();
        }
        let readers = self.readers();
        let mut best = None;
        for (number, (order, track)) in
            self.orders.sequences.iter().zip(&mut self.tracks).enumerate()
        {
            let rank = order.ranks[tensor];
            let expected = track.ask(rank, readers, self.requests);
            // If two orders have the same score, the order with fewer misses is used.
            let merit = (track.score, u32::MAX - track.misses);
            if expected
                && track.score >= TRUSTED_SCORE_MIN
                && best.is_none_or(|(_, _, other)| merit > other)
            {
                best = Some((number, rank, merit));
            }
        }
        self.onward = best.map(|(number, rank, _)| (number, rank));
        self.onward.is_some()
    }

    /// Number of readers that sent the last requests.
    fn readers(&self) -> usize {
        let first =
            |index: usize| !self.recent.iter().take(index).any(|one| *one == self.recent[index]);
        (0..self.recent.len()).filter(|&index| first(index)).count()
    }

    /// The tensors that follow the last requested tensor, in order. Tensors that were requested at
    /// least as often as the last requested tensor are left out, because another reader has read
    /// them. Empty if the last request was not expected.
    pub fn next(&self) -> impl Iterator<Item = usize> + '_ {
        let (tensors, times) = match self.onward {
            None => (&[][..], 0),
            Some((order, rank)) => {
                let (now, after) =
                    self.orders.sequences[order].tensors[rank as usize..].split_at(1);
                (after, self.asked[now[0] as usize])
            }
        };
        let tensors = tensors.iter().map(|&tensor| tensor as usize);
        tensors.filter(move |&tensor| self.asked[tensor] < times)
    }

    /// The order that is trusted now.
    pub fn order(&self) -> Option<Order> {
        self.onward.map(|(order, _)| self.orders.sequences[order].orders[0])
    }
}
