//! Tests of stored checksums.

use proptest::prelude::*;

use super::*;
use crate::version::tests::version;

/// The checksums of a file with the content `bytes`, which is cut into parts of the lengths `lens`.
fn sums_of(name: &str, bytes: &[u8], lens: &[u64]) -> ShardSums {
    let boundaries = Arc::new(BlockBoundaries::new(lens.iter().copied()).unwrap());
    let mut hasher = ChunkHasher::new(boundaries.clone());
    bytes.chunks(70_001).for_each(|part| hasher.update(part));
    ShardSums {
        name: name.to_owned(),
        version: version(7, bytes.len() as u64, 1_700_000_000, 1_700_000_001),
        recorded: 1_750_000_000,
        boundaries,
        digests: hasher.finish().unwrap(),
    }
}

fn sample() -> Sums {
    let bytes: Vec<u8> = (0..300u32).map(|i| ((i * 31) >> 3) as u8).collect();
    let mut sums = Sums { folder: b"/models/a".to_vec(), shards: Vec::new() };
    sums.put(sums_of("b.safetensors", &bytes, &[100, 120, 80]));
    sums.put(sums_of("a.safetensors", &bytes[..50], &[50]));
    sums
}

#[test]
fn what_is_written_reads_back() {
    let sums = sample();
    assert_eq!(sums.shards[0].name, "a.safetensors");
    assert_eq!(Sums::decode(&sums.encode().unwrap()).unwrap(), sums);
    let none = Sums::default();
    assert_eq!(Sums::decode(&none.encode().unwrap()).unwrap(), none);
}

#[test]
fn every_flipped_byte_and_every_cut_is_noticed() {
    let bytes = sample().encode().unwrap();
    for index in 0..bytes.len() {
        let mut wrong = bytes.clone();
        wrong[index] ^= 1 << (index % 8);
        assert!(Sums::decode(&wrong).is_err(), "byte {index}");
        assert!(Sums::decode(&bytes[..index]).is_err(), "{index} bytes");
    }
    let mut longer = bytes;
    longer.push(0);
    assert!(Sums::decode(&longer).is_err());
}

#[test]
fn content_that_does_not_fit_together_is_refused() {
    let shard = |name: &str, lens: Vec<u64>, digests: usize| ShardContent {
        name: name.to_owned(),
        version: version(7, 30, 5, 6).to_words(),
        recorded: 0,
        lens,
        digests: vec![1; digests],
    };
    let decode = |shards| {
        let content = SumsContent { folder: Vec::new(), shards };
        Sums::decode(&frame::wrap(KIND, content).unwrap()).err()
    };
    assert_eq!(decode(vec![shard("a", vec![10, 20], 32)]), None);
    for bad in [
        vec![shard("a", vec![10, 20], 31)],
        vec![shard("a", vec![10, 20], 48)],
        vec![shard("a", vec![10, 21], 32)],
        vec![shard("a", vec![10, 0, 20], 32)],
        vec![shard("a", vec![u64::MAX, 31], 32)],
        vec![shard("b", vec![30], 16), shard("a", vec![30], 16)],
        vec![shard("a", vec![30], 16), shard("a", vec![30], 16)],
    ] {
        assert!(decode(bad).is_some());
    }
}

#[test]
fn the_layout_of_the_file_does_not_change_unnoticed() {
    // If the encoding changes, the version has to be increased.
    let bytes = sample().encode().unwrap();
    assert_eq!((bytes.len(), Digest::of(&bytes).to_string().as_str()), (207, FROZEN));
}

const FROZEN: &str = "3af2c01cc9e25227d2e200699c8d5514";

#[test]
fn a_part_longer_than_a_chunk_has_a_hash_for_each() {
    let len = 2 * CHUNK_LEN + 5;
    let bytes: Vec<u8> = (0..10 + len).map(|i| ((i * 7) >> 2) as u8).collect();
    let sums = sums_of("a", &bytes, &[10, len]);
    let expected: Vec<Digest> = [0..10, 10..10 + CHUNK_LEN]
        .into_iter()
        .chain([10 + CHUNK_LEN..10 + 2 * CHUNK_LEN, 10 + 2 * CHUNK_LEN..10 + len])
        .map(|range| Digest::of(&bytes[range.start as usize..range.end as usize]))
        .collect();
    assert_eq!(sums.digests, expected);
    assert_eq!(sums.digests_of(10..10 + len).collect::<Vec<_>>(), expected[1..]);
    let chunks =
        |range| sums.boundaries.chunks_of(range).map(|chunk| chunk.number).collect::<Vec<_>>();
    assert_eq!(chunks(0..10), [0]);
    assert_eq!(chunks(9..11), [0, 1]);
    assert_eq!(chunks(10 + CHUNK_LEN..11 + CHUNK_LEN), [2]);
    assert_eq!(chunks(0..u64::MAX), [0, 1, 2, 3]);
    assert_eq!(chunks(10 + len..u64::MAX), [0; 0]);
    assert_eq!([0, 1, 2, 3].map(|number| sums.boundaries.part_of_chunk(number)), [0, 1, 1, 1]);
}

#[test]
fn a_file_that_ends_early_has_no_checksums() {
    let boundaries = Arc::new(BlockBoundaries::new([10, 20]).unwrap());
    let mut hasher = ChunkHasher::new(boundaries.clone());
    hasher.update(&[1; 29]);
    assert_eq!(hasher.finish(), None);
    let mut hasher = ChunkHasher::new(boundaries);
    hasher.update(&[1; 31]);
    assert_eq!(hasher.finish().map(|digests| digests.len()), Some(2));
}

fn any_cuts() -> impl Strategy<Value = BlockBoundaries> {
    let len = prop_oneof![0..50u64, CHUNK_LEN - 2..CHUNK_LEN + 2, 0..5 * CHUNK_LEN];
    prop::collection::vec(len, 0..8).prop_map(|lens| BlockBoundaries::new(lens).unwrap())
}

proptest! {
    #[test]
    fn chunks_of_any_range_cover_it_and_touch_it(boundaries in any_cuts(), a in any::<u32>(), b in any::<u32>()) {
        let total = boundaries.file_len();
        let offset = |n: u32| u64::from(n) % (total + 3);
        let range = offset(a).min(offset(b))..offset(a).max(offset(b));
        let chunks: Vec<ChecksumChunk> = boundaries.chunks_of(range.clone()).collect();
        let inside = range.start.min(total)..range.end.min(total);
        prop_assert_eq!(chunks.is_empty(), inside.is_empty());
        if let (Some(first), Some(last)) = (chunks.first(), chunks.last()) {
            prop_assert!(first.range.contains(&inside.start));
            prop_assert!(last.range.contains(&(inside.end - 1)));
            prop_assert!(last.range.end <= total && last.number < boundaries.chunks_len());
        }
        for pair in chunks.windows(2) {
            prop_assert_eq!(pair[0].range.end, pair[1].range.start);
            prop_assert_eq!(pair[0].number + 1, pair[1].number);
        }
        for chunk in &chunks {
            let part = boundaries.part(boundaries.part_of_chunk(chunk.number));
            prop_assert!(part.start <= chunk.range.start && chunk.range.end <= part.end);
            prop_assert!(chunk.range.end - chunk.range.start <= CHUNK_LEN);
        }
    }

    #[test]
    fn any_checksums_read_back(
        lens in prop::collection::vec(1..3 * CHUNK_LEN, 0..6),
        names in prop::collection::btree_set("[a-z]{1,4}", 0..4),
        seed in any::<u8>(),
    ) {
        let boundaries = Arc::new(BlockBoundaries::new(lens).unwrap());
        let shards = names.into_iter().map(|name| Arc::new(ShardSums {
            name,
            version: version(7, boundaries.file_len(), 5, 6),
            recorded: i64::from(seed),
            boundaries: boundaries.clone(),
            digests: (0..boundaries.chunks_len()).map(|n| Digest([n as u8 ^ seed; 16])).collect(),
        }));
        let sums = Sums { folder: vec![seed; 3], shards: shards.collect() };
        prop_assert_eq!(Sums::decode(&sums.encode().unwrap()).unwrap(), sums);
    }

    #[test]
    fn any_bytes_are_refused_or_fit_together(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(sums) = Sums::decode_unframed(&bytes) {
            prop_assert_eq!(Sums::decode(&sums.encode().unwrap()).unwrap(), sums);
        }
    }
}
