//! The orders in which programs take tensors, and which of them a program follows.
//!
//! There are two learners, because their inputs differ. `RequestLearner` gets each tensor as it is
//! requested, by several threads. `ReadLearner` gets ranges of bytes, where one read holds several
//! small tensors and tensors that were read before are passed over. Pure: no I/O, no clock, no
//! threads.

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

/// Catalogs of this many tensors and more are not sorted by the numbers in their names: a million
/// takes a second.
const NATURAL_MAX: usize = 200_000;

/// Maximum number of tensors of a file for which other orders are worth their memory and the time
/// to sort.
const FILE_MAX: usize = 1 << 16;

/// An order of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The order of the merged file.
    File,
    /// The order of the names as strings, which is that of the catalog.
    Name,
    /// The order of the names, with the numbers in them as numbers: layer 2 before layer 10.
    Natural,
    /// The order of the shards, and of the offsets in each.
    Shard,
    /// The order in which the parts of earlier layers were taken. It is learned.
    Layers,
}

impl Order {
    /// All orders; of two with equal scores the first is taken.
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

/// The distinct sequences of the tensors of a catalog or of a file, and for a file the parts of its layers.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    sequences: Vec<Sequence>,
    layers: Layers,
}

impl Orders {
    /// The orders of all tensors of `catalog`, by their positions in it.
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

    /// The orders of the tensors of a file, by their places in it, but for that of the file.
    /// `positions`: where `catalog` has them. Empty if there are too many.
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

    /// Which part of which layer `tensor` is.
    pub fn part(&self, tensor: u32) -> Option<LayerPart> {
        self.layers.part(tensor)
    }

    /// The tensor that is this part.
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

/// The numbers of `positions`, sorted by the names with their numbers as numbers.
fn by_number(catalog: &Catalog, positions: &[u32]) -> Vec<u32> {
    let name = |number: u32| catalog.tensor_at(positions[number as usize] as usize).name;
    let mut numbers: Vec<u32> = (0..positions.len() as u32).collect();
    numbers.sort_by(|&a, &b| natural_cmp(name(a), name(b)));
    numbers
}

/// The numbers of `positions`, sorted by shard and offset.
fn by_shard(catalog: &Catalog, positions: &[u32]) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..positions.len() as u32).collect();
    numbers.sort_by_cached_key(|&number| {
        let piece = catalog.tensor_at(positions[number as usize] as usize).first_piece();
        (piece.shard, piece.range.start, piece.range.end)
    });
    numbers
}
