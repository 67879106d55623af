//! Sorts many names that have long common prefixes.

/// Groups with fewer names than this are sorted by comparing whole names.
const FEW: usize = 24;

/// Number of bytes of a name that are compared at a time.
const KEY_LEN: usize = 8;

/// From this depth in bytes on, whole names are compared. This limits the recursion, whose depth a
/// file could otherwise determine.
const DEPTH_MAX: usize = 2048;

/// A tensor, or a piece of a tensor, of the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ref {
    key: u64,
    /// Index of the shard.
    pub(super) shard: u32,
    /// Index in the shard.
    pub(super) index: u32,
}

impl Ref {
    pub(super) fn new(shard: usize, index: usize) -> Ref {
        Ref { key: 0, shard: shard as u32, index: index as u32 }
    }

    fn place(&self) -> (u32, u32) {
        (self.shard, self.index)
    }
}

/// Sorts `refs` by name, then by shard and by index in the shard. The first `depth` bytes of all
/// names are equal.
pub(super) fn sort<'a>(refs: &mut [Ref], name: &impl Fn(&Ref) -> &'a [u8], depth: usize) {
    if refs.len() < FEW || depth > DEPTH_MAX {
        return compare_whole(refs, name, depth);
    }
    let first = name(&refs[0]);
    let common = refs.iter().fold(first.len(), |common, other| {
        let other = name(other);
        // In most cases the whole common part is equal, so it is compared first.
        let most = common.min(other.len());
        if other[depth..most] == first[depth..most] {
            return most;
        }
        depth + first[depth..most].iter().zip(&other[depth..]).take_while(|(a, b)| a == b).count()
    });
    for one in refs.iter_mut() {
        let rest = &name(one)[common..];
        let mut key = [0; KEY_LEN];
        let len = rest.len().min(KEY_LEN);
        key[..len].copy_from_slice(&rest[..len]);
        one.key = u64::from_be_bytes(key);
    }
    refs.sort_unstable_by_key(|one| (one.key, one.shard, one.index));
    for same in refs.chunk_by_mut(|a, b| a.key == b.key) {
        if same.len() == 1 {
            continue;
        }
        // A name that ends in this key was padded with zeros. Another name may have zero bytes
        // there, so the keys do not decide.
        if same.iter().any(|one| name(one).len() < common + KEY_LEN) {
            compare_whole(same, name, common);
        } else {
            sort(same, name, common + KEY_LEN);
        }
    }
}

fn compare_whole<'a>(refs: &mut [Ref], name: &impl Fn(&Ref) -> &'a [u8], depth: usize) {
    refs.sort_unstable_by(|a, b| {
        name(a)[depth..].cmp(&name(b)[depth..]).then_with(|| a.place().cmp(&b.place()))
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(names: &[Vec<u8>]) {
        let mut refs: Vec<Ref> = (0..names.len()).map(|index| Ref::new(index % 3, index)).collect();
        let mut expected = refs.clone();
        let name = |one: &Ref| names[one.index as usize].as_slice();
        expected.sort_by_key(|one| (names[one.index as usize].clone(), one.place()));
        sort(&mut refs, &name, 0);
        let places = |refs: &[Ref]| refs.iter().map(Ref::place).collect::<Vec<_>>();
        assert_eq!(places(&refs), places(&expected));
    }

    #[test]
    fn names_that_part_at_every_eighth_byte_are_sorted_on_a_small_stack() {
        let name = |n: usize| [vec![b'a'; 8 * n], vec![b'b'; 8]].concat();
        let names: Vec<Vec<u8>> = (0..3000).map(name).collect();
        let thread = std::thread::Builder::new().stack_size(256 << 10);
        thread.spawn(move || check(&names)).unwrap().join().unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn names_come_in_the_order_of_their_bytes_then_of_their_shards(
            names in prop::collection::vec(
                prop::collection::vec(prop::sample::select(vec![0, b'a', b'b', 255]), 0..40), 0..300
            ),
            beginning in 0_usize..20,
        ) {
            let long = |name: &Vec<u8>| [&b"layers.0.experts.1."[..beginning.min(19)], name].concat();
            check(&names.iter().map(long).collect::<Vec<_>>());
        }
    }

    #[test]
    fn names_that_are_each_the_beginning_of_the_next_and_equal_ones_are_sorted() {
        check(&(0..500).rev().map(|len| vec![b'a'; len]).collect::<Vec<_>>());
        check(&vec![vec![b'a'; 50]; 100]);
        check(&(0..100).map(|len| vec![0; len % 50]).collect::<Vec<_>>());
    }
}
