//! Shares of something scarce: a source that stalls holds a limited part of it.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use crate::source::Source;

/// Names a source by its address. The holder of a key keeps the source alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourceKey(usize);

impl SourceKey {
    /// The key of `source`.
    pub fn of(source: &Arc<Source>) -> SourceKey {
        SourceKey(Arc::as_ptr(source) as usize)
    }
}

/// Counts and bounds the units of a resource that each source (key) holds.
#[derive(Debug)]
pub struct PerSourceLimiter<K> {
    each_max: u64,
    total_max: u64,
    total: u64,
    held: HashMap<K, u64>,
}

impl<K: Eq + Hash> Default for PerSourceLimiter<K> {
    /// One without bounds, for callers that compare what each holds themselves.
    fn default() -> PerSourceLimiter<K> {
        PerSourceLimiter::new(u64::MAX, u64::MAX)
    }
}

impl<K: Eq + Hash> PerSourceLimiter<K> {
    /// At most `each_max` for each source, and `total_max` for all together.
    pub fn new(each_max: u64, total_max: u64) -> PerSourceLimiter<K> {
        PerSourceLimiter { each_max, total_max, total: 0, held: HashMap::new() }
    }

    /// Whether all together hold less than their bound.
    pub fn has_room(&self) -> bool {
        self.total < self.total_max
    }

    /// Whether `key` holds less than its share, however much all hold.
    pub fn has_share_for<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.held(key) < self.each_max
    }

    /// Whether `key` may take more.
    pub fn has_room_for<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.has_room() && self.has_share_for(key)
    }

    /// The amount that `key` holds.
    pub fn held<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> u64
    where
        K: Borrow<Q>,
    {
        self.held.get(key).copied().unwrap_or(0)
    }

    /// The amount that all hold.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Notes that `key` holds `amount` more. The caller has looked for room, or goes without.
    pub fn take(&mut self, key: K, amount: u64) {
        self.total += amount;
        *self.held.entry(key).or_default() += amount;
    }

    /// Notes that `key` no longer holds `amount`, which it took.
    pub fn give_back<Q: Eq + Hash + ?Sized>(&mut self, key: &Q, amount: u64)
    where
        K: Borrow<Q>,
    {
        let Some(held) = self.held.get_mut(key) else { return };
        *held -= amount;
        self.total -= amount;
        if *held == 0 {
            self.held.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_holds_its_share_leaves_room_for_others_until_all_hold_the_total() {
        let mut limiter = PerSourceLimiter::new(2, 3);
        limiter.take("a", 1);
        assert!(limiter.has_room_for("a"));
        limiter.take("a", 1);
        assert!(!limiter.has_room_for("a") && limiter.has_room_for("b"));
        limiter.take("b", 1);
        assert!(!limiter.has_room_for("b") && !limiter.has_room());
        assert!(limiter.has_share_for("b") && !limiter.has_share_for("a"));
        limiter.give_back("a", 2);
        assert_eq!((limiter.held("a"), limiter.total()), (0, 1));
        assert!(limiter.has_room_for("a") && limiter.held.len() == 1);
    }
}
