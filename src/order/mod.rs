//! The orders in which programs read tensors, and the detection of the order that a program follows.
//!
//! There are two learners, because their inputs differ. `RequestLearner` gets each requested tensor, from
//! several threads. `ReadLearner` gets ranges of bytes. One such range may hold several small tensors, and a
//! reader skips tensors that were read before. The module is pure: it has no I/O, no clock and no threads.

mod layers;
mod reads;
mod requests;
#[cfg(test)]
mod tests;

pub use layers::LayerPart;
pub(crate) use layers::Layers;
pub use reads::{ReadLearner, SMALL, TensorMap, TensorSpan};
pub use requests::RequestLearner;

use crate::catalog::Catalog;
use crate::format::names::natural_cmp;

/// If a catalog has this number of tensors or more, its tensors are not sorted by the numbers in their names.
/// Sorting a million tensors takes a second.
const NATURAL_MAX: usize = 200_000;

/// Maximum number of tensors of a file whose tensors are also sorted in other orders than the order of the
/// file. For larger files, these orders would take too much memory and time.
const FILE_MAX: usize = 1 << 16;

/// An order of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The order of the merged file.
    File,
    /// The order of the names as strings. The catalog has the same order.
    Name,
    /// The order of the names, in which numbers are compared as numbers: layer 2 comes before layer 10.
    Natural,
    /// The order of the shards, and of the offsets in each shard.
    Shard,
    /// The order in which the reader read the parts of earlier layers. It is learned.
    Layers,
}

impl Order {
    /// All orders. If two orders have the same score, the earlier one in this list is used.
    pub const ALL: [Order; 5] =
        [Order::File, Order::Name, Order::Natural, Order::Shard, Order::Layers];
}

/// A sequence of tensors.
#[derive(Clone, Debug)]
struct Sequence {
    /// The orders that give this sequence.
    orders: Vec<Order>,
    /// Tensors, by rank.
    tensors: Vec<u32>,
    /// Rank of each tensor.
    ranks: Vec<u32>,
}

/// The distinct sequences of the tensors of a catalog or of a file. For a file, also the parts of its layers.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    sequences: Vec<Sequence>,
    layers: Layers,
}

impl Orders {
    /// The orders of all tensors of `catalog`. A tensor is identified by its position in the catalog.
    pub fn of_catalog(catalog: &Catalog) -> Orders {
        let positions: Vec<u32> = (0..catalog.len() as u32).collect();
        let mut orders = Orders::default();
        orders.add(Order::Shard, by_shard(catalog, &positions));
        if positions.len() < NATURAL_MAX {
            orders.add(Order::Natural, by_number(catalog, &positions));
        }
        orders.add(Order::Name, positions);
        orders
    }

    /// The orders of the tensors of a file, except the order of the file itself. A tensor is identified by
    /// its place in the file. `positions` has the position in `catalog` of each tensor. The result is empty
    /// if the file has more than `FILE_MAX` tensors.
    pub fn of_file(catalog: &Catalog, positions: &[u32]) -> Orders {
        let mut orders = Orders::default();
        if positions.len() <= FILE_MAX {
            let mut by_name: Vec<u32> = (0..positions.len() as u32).collect();
            by_name.sort_by_key(|&place| positions[place as usize]);
            orders.add(Order::Name, by_name);
            orders.add(Order::Natural, by_number(catalog, positions));
            orders.add(Order::Shard, by_shard(catalog, positions));
            let names = positions.iter().map(|&at| catalog.tensor_at(at as usize).name);
            orders.layers = Layers::of(names);
        }
        orders
    }

    /// The layer and the part of `tensor`.
    pub fn part(&self, tensor: u32) -> Option<LayerPart> {
        self.layers.part(tensor)
    }

    /// The tensor with this layer and part.
    pub fn tensor(&self, part: LayerPart) -> Option<u32> {
        self.layers.tensor(part)
    }

    fn add(&mut self, order: Order, tensors: Vec<u32>) {
        if let Some(same) = self.sequences.iter_mut().find(|sequence| sequence.tensors == tensors) {
            return same.orders.push(order);
        }
        let mut ranks = vec![0; tensors.len()];
        for (rank, &tensor) in tensors.iter().enumerate() {
            ranks[tensor as usize] = rank as u32;
        }
        self.sequences.push(Sequence { orders: vec![order], tensors, ranks });
    }

    /// The tensor that follows `tensor` in `order`.
    pub fn after(&self, tensor: u32, order: Order) -> Option<u32> {
        let sequence = self.sequences.iter().find(|sequence| sequence.orders.contains(&order))?;
        let rank = *sequence.ranks.get(tensor as usize)?;
        sequence.tensors.get(rank as usize + 1).copied()
    }
}

/// The indexes of `positions`, sorted by the names of the tensors, in which numbers are compared as numbers.
fn by_number(catalog: &Catalog, positions: &[u32]) -> Vec<u32> {
    let name = |number: u32| catalog.tensor_at(positions[number as usize] as usize).name;
    let mut numbers: Vec<u32> = (0..positions.len() as u32).collect();
    numbers.sort_by(|&a, &b| natural_cmp(name(a), name(b)));
    numbers
}

/// The indexes of `positions`, sorted by the shard and the offset of the tensors.
fn by_shard(catalog: &Catalog, positions: &[u32]) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..positions.len() as u32).collect();
    numbers.sort_by_cached_key(|&number| {
        let piece = catalog.tensor_at(positions[number as usize] as usize).first_piece();
        (piece.shard, piece.range.start, piece.range.end)
    });
    numbers
}
