//! Orders of the tensors of a file that differ from the order of the file.

use super::Layout;
use crate::catalog::Catalog;

/// Maximum number of tensors of a file for which other orders are worth their memory and the time
/// to sort.
const TENSORS_MAX: usize = 1 << 16;

/// Orders of the tensors of a file, without empty tensors.
#[derive(Debug, Default)]
pub struct LayoutOrders {
    /// The order by name.
    pub by_name: Successors,
    /// The order by name, with numbers compared as numbers.
    pub by_number: Successors,
    /// The order by shard, and by first byte in it.
    pub by_shard: Successors,
}

/// The place of the next tensor in an order, for each tensor by its place in the file.
#[derive(Debug, Default)]
pub struct Successors(Vec<u32>);

/// The successor of the last tensor.
const NONE: u32 = u32::MAX;

impl Successors {
    /// The place of the tensor that follows the one at `place`.
    pub fn after(&self, place: u32) -> Option<u32> {
        self.0.get(place as usize).copied().filter(|&next| next != NONE)
    }
}

impl Layout {
    /// The orders of the tensors, all of which `catalog` holds. Empty if there are too many
    /// tensors.
    pub fn orders(&self, catalog: &Catalog) -> LayoutOrders {
        if self.tensors.len() > TENSORS_MAX {
            return LayoutOrders::default();
        }
        let tensor = |place: u32| catalog.tensor_at(self.tensors[place as usize].tensor as usize);
        LayoutOrders {
            by_name: self.order(|place| self.tensors[place as usize].tensor),
            by_number: self.order(|place| number_key(tensor(place).name)),
            by_shard: self.order(|place| {
                let piece = tensor(place).first_piece();
                (piece.shard, piece.range.start)
            }),
        }
    }

    fn order<K: Ord>(&self, key: impl Fn(u32) -> K) -> Successors {
        let is_empty = |&place: &u32| self.bytes_of(place as usize).is_empty();
        let mut order: Vec<u32> =
            (0..self.tensors.len() as u32).filter(|place| !is_empty(place)).collect();
        order.sort_by_cached_key(|&place| key(place));
        let mut next = vec![NONE; self.tensors.len()];
        for pair in order.windows(2) {
            next[pair[0] as usize] = pair[1];
        }
        Successors(next)
    }
}

/// A sort key that compares the numbers in names as numbers: the count of digits precedes each
/// number.
fn number_key(name: &str) -> Vec<u8> {
    let mut key = Vec::with_capacity(name.len() + 4);
    let mut rest = name.as_bytes();
    while let Some(&first) = rest.first() {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if digits == 0 {
            key.push(first);
            rest = &rest[1..];
            continue;
        }
        let (number, after) = rest.split_at(digits);
        let zeros = number.iter().take_while(|&&digit| digit == b'0').count();
        // The leading digit keeps the order of digits before letters and after most signs.
        key.push(b'0');
        key.push((digits - zeros).min(255) as u8);
        key.extend_from_slice(&number[zeros..]);
        rest = after;
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_sort_as_numbers() {
        let mut names = ["l.10.w", "l.2.b", "l.2.w", "l.1.w", "a", "l.100.w", "l.02.c", "l.w"];
        names.sort_by_key(|name| number_key(name));
        assert_eq!(names, ["a", "l.1.w", "l.2.b", "l.02.c", "l.2.w", "l.10.w", "l.100.w", "l.w"]);
    }
}
