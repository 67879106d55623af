//! Tests that parts of dimensions are cut as torch cuts them.

use proptest::prelude::*;

use super::*;

/// The offset and the length of the part of each rank of a mesh, for a dimension of `size` indices.
fn parts(size: u64, sizes: &[u64], placements: &[Placement]) -> Vec<(u64, u64)> {
    let count: u64 = sizes.iter().product();
    let part = |rank: u64| {
        let mut left = rank;
        let mut at: Vec<u64> = sizes
            .iter()
            .rev()
            .map(|size| {
                let own = left % size;
                left /= size;
                own
            })
            .collect();
        at.reverse();
        let mesh = Mesh { is_part: false, ranks: count, sizes: sizes.to_vec(), at, rank };
        let (offset, shape) = box_of(&mesh, placements, &[size]).unwrap();
        (offset[0], shape[0])
    };
    (0..count).map(part).collect()
}

#[test]
fn a_dimension_is_cut_as_torch_chunk_cuts_it() {
    let shard = [Placement::Shard(0)];
    assert_eq!(parts(7, &[4], &shard), [(0, 2), (2, 2), (4, 2), (6, 1)]);
    assert_eq!(parts(5, &[4], &shard), [(0, 2), (2, 2), (4, 1), (0, 0)]);
    assert_eq!(parts(0, &[2], &shard), [(0, 0), (0, 0)]);
    let replicated = [Placement::Replicate, Placement::Shard(0)];
    assert_eq!(parts(7, &[2, 2], &replicated), [(0, 4), (4, 3), (0, 4), (4, 3)]);
}

#[test]
fn a_strided_shard_is_cut_by_the_later_axis_first() {
    let placements = [Placement::StridedShard(0, 2), Placement::Shard(0)];
    assert_eq!(parts(8, &[2, 2], &placements), [(0, 2), (4, 2), (2, 2), (6, 2)]);
    // Without the second axis of the mesh, the part is not one block.
    let mesh = Mesh { is_part: false, ranks: 2, sizes: vec![2], at: vec![0], rank: 0 };
    let fault = box_of(&mesh, &[Placement::StridedShard(0, 2)], &[8]).unwrap_err();
    assert!(fault.message.contains("[0..2, 4..6]"), "{fault}");
}

proptest! {
    #[test]
    fn the_parts_of_all_ranks_are_the_dimension(
        size in 0_u64..200,
        first in 1_u64..6,
        second in 1_u64..6,
    ) {
        let placements = [Placement::Shard(0), Placement::Shard(0)];
        let mut found = parts(size, &[first, second], &placements);
        found.retain(|(_, len)| *len > 0);
        found.sort_unstable();
        let mut end = 0;
        for (offset, len) in found {
            prop_assert_eq!(offset, end);
            end += len;
        }
        prop_assert_eq!(end, size);
    }
}
