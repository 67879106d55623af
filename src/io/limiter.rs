//! Limits for a scarce resource: a source that stalls can hold only a part of it.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use crate::source::Source;

/// Identifies a source by its address. The owner of a key must keep the source alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourceKey(usize);

impl SourceKey {
    /// The key of `source`.
    pub fn of(source: &Arc<Source>) -> SourceKey {
        SourceKey(Arc::as_ptr(source) as usize)
    }
}

/// Counts and limits the units of a resource that each key holds. A key stands for a source.
#[derive(Debug)]
pub struct PerSourceLimiter<K> {
    each_max: u64,
    total_max: u64,
    total: u64,
    held: HashMap<K, u64>,
}

impl<K: Eq + Hash> Default for PerSourceLimiter<K> {
    /// A limiter without limits, for callers that compare the amounts themselves.
    fn default() -> PerSourceLimiter<K> {
        PerSourceLimiter::new(u64::MAX, u64::MAX)
    }
}

impl<K: Eq + Hash> PerSourceLimiter<K> {
    /// A limiter with at most `each_max` units for each key and `total_max` units in total.
    pub fn new(each_max: u64, total_max: u64) -> PerSourceLimiter<K> {
        PerSourceLimiter { each_max, total_max, total: 0, held: HashMap::new() }
    }

    /// Whether the total is below its limit.
    pub fn has_room(&self) -> bool {
        self.total < self.total_max
    }

    /// Whether the amount of `key` is below its limit. The total is not considered.
    pub fn has_share_for<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.held(key) < self.each_max
    }

    /// Whether `key` may take another unit.
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

    /// The amount that all keys hold together.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Adds `amount` to the units that `key` holds. This function does not check the limits. The caller has
    /// checked them, or exceeds them on purpose.
    pub fn take(&mut self, key: K, amount: u64) {
        self.total += amount;
        *self.held.entry(key).or_default() += amount;
    }

    /// Subtracts `amount` units, which `take` added for `key` before.
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
