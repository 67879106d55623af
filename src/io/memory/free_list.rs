//! The free parts of a range of addresses. Adjacent free parts are joined.

use std::collections::BTreeMap;

/// The free parts of a range, as a map from offset to length. Adjacent parts are joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FreeList(BTreeMap<usize, usize>);

impl FreeList {
    /// A range of `len` bytes that is free as a whole.
    pub(crate) fn new(len: usize) -> FreeList {
        FreeList(BTreeMap::from([(0, len)]))
    }

    /// Takes `len` bytes from the free part with the lowest offset that is long enough. Returns their offset.
    pub(crate) fn take(&mut self, len: usize) -> Option<usize> {
        let (&offset, &free) = self.0.iter().find(|(_, free)| **free >= len)?;
        self.0.remove(&offset);
        if free > len {
            self.0.insert(offset + len, free - len);
        }
        Some(offset)
    }

    /// Frees the `len` bytes at `offset`, which were taken before.
    pub(crate) fn give_back(&mut self, mut offset: usize, mut len: usize) {
        if let Some((&before, &free)) = self.0.range(..offset).next_back()
            && before + free == offset
        {
            self.0.remove(&before);
            (offset, len) = (before, free + len);
        }
        if let Some(after) = self.0.remove(&(offset + len)) {
            len += after;
        }
        self.0.insert(offset, len);
    }

    /// Whether all `len` bytes of the range are free.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn is_whole(&self, len: usize) -> bool {
        self.0.get(&0) == Some(&len)
    }

    /// Offset and length of each free part, in ascending order.
    pub(crate) fn stretches(&self) -> impl Iterator<Item = (usize, usize)> {
        self.0.iter().map(|(&offset, &len)| (offset, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_in_any_order_is_whole_again() {
        let mut free = FreeList::new(12);
        let parts: Vec<_> = (0..6).map(|_| free.take(2).unwrap()).collect();
        assert_eq!((parts.as_slice(), free.take(1)), ([0, 2, 4, 6, 8, 10].as_slice(), None));
        for part in [3, 0, 5, 1, 4, 2] {
            assert!(!free.is_whole(12));
            free.give_back(parts[part], 2);
        }
        assert!(free.is_whole(12));
    }

    #[test]
    fn parts_do_not_overlap() {
        let mut free = FreeList::new(12);
        let (a, b) = (free.take(4).unwrap(), free.take(2).unwrap());
        free.give_back(a, 4);
        assert_eq!([free.take(2), free.take(4)], [Some(a), Some(b + 2)]);
    }
}
