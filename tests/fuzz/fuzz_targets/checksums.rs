//! Parses any bytes as a file of checksums, with and without a frame that fits them. A parsed file
//! must be complete, every function must work on it, and it must stay the same when it is written
//! and read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorfs::internal::index::{ChunkHasher, Sums};

fuzz_target!(|data: &[u8]| {
    assert!(Sums::decode(data).is_err() || data.len() >= 40);
    // A checksum that fits is found by no fuzzer.
    let Ok(sums) = Sums::decode_unframed(data) else { return };
    for shard in &sums.shards {
        assert_eq!(sums.shard(&shard.name), Some(shard));
        assert_eq!(shard.boundaries.file_len(), shard.version.len);
        assert_eq!(shard.digests.len(), shard.boundaries.chunks_len());
        let middle = shard.boundaries.file_len() / 2;
        let parts =
            shard.digests_of(0..middle).count() + shard.digests_of(middle..u64::MAX).count();
        assert!((shard.digests.len()..=shard.digests.len() + 1).contains(&parts));
        let mut hasher = ChunkHasher::new(shard.boundaries.clone());
        hasher.update(data);
        let complete = data.len() as u64 >= shard.boundaries.file_len();
        assert_eq!(hasher.finish().is_some(), complete);
    }
    let again = Sums::decode(&sums.encode().expect("it is no longer than what was read"));
    assert_eq!(again.expect("reads back"), sums);
});
