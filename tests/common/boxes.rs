//! Random tensors, cut into random boxes.

use proptest::prelude::*;
use tensorfs::Dtype;

use super::{Box_, Cut};

const DTYPES: [Dtype; 9] = [
    Dtype::Bool,
    Dtype::F4,
    Dtype::F6E2M3,
    Dtype::F8E4M3,
    Dtype::Bf16,
    Dtype::I32,
    Dtype::F32,
    Dtype::C64,
    Dtype::U64,
];

/// A random shape. Its last dimension allows cuts at whole bytes, even if elements are shorter than a byte.
fn shape() -> impl Strategy<Value = Vec<u64>> {
    (prop::collection::vec(1u64..7, 0..4), 0u64..5)
        .prop_map(|(outer, last)| outer.into_iter().chain([4 * last + 4]).collect())
}

/// Cuts `part` into boxes, by repeated cuts in two at the places that `choices` chooses.
fn split(part: Box_, choices: &[(u8, u8)]) -> Vec<Box_> {
    let Some(((dim, at), rest)) = choices.split_first() else { return vec![part] };
    let dim = *dim as usize % part.shape.len();
    // The last dimension is cut only at multiples of 4, which are whole bytes for every dtype.
    let step = if dim + 1 == part.shape.len() { 4 } else { 1 };
    let places = part.shape[dim] / step;
    if places < 2 {
        return split(part, rest);
    }
    let at = step * (1 + u64::from(*at) % (places - 1));
    let (mut low, mut high) = (part.clone(), part);
    low.shape[dim] = at;
    high.shape[dim] -= at;
    high.offset[dim] += at;
    let (left, right) = rest.split_at(rest.len() / 2);
    split(low, left).into_iter().chain(split(high, right)).collect()
}

fn cut(number: usize) -> impl Strategy<Value = Cut> {
    let choices = prop::collection::vec((any::<u8>(), any::<u8>()), 0..12);
    let shards = prop::collection::vec(0usize..6, 13);
    (0..DTYPES.len(), shape(), choices, shards).prop_map(move |(dtype, shape, choices, shards)| {
        let whole = Box_ { offset: vec![0; shape.len()], shape: shape.clone() };
        let mut boxes: Vec<(usize, Box_)> = Vec::new();
        for (at, part) in split(whole, &choices).into_iter().enumerate() {
            // A file holds one piece for each name. If a shard has a piece of this tensor already, another shard gets
            // the piece.
            let mut shard = shards[at];
            while boxes.iter().any(|(other, _)| *other == shard) {
                shard += 1;
            }
            boxes.push((shard, part));
        }
        Cut { name: format!("tensor.{number}"), dtype: DTYPES[dtype], shape, boxes }
    })
}

pub(crate) fn checkpoint() -> impl Strategy<Value = Vec<Cut>> {
    (cut(0), cut(1), cut(2)).prop_map(|(a, b, c)| vec![a, b, c])
}
