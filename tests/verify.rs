//! Shards that `verify` reads in several steps at once.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::index::{BlockBoundaries, ChunkHasher};
use tensorfs::internal::verify::{Task, Verified, verify};

/// Length of each tensor: more than the shortest step.
const LEN: u64 = (17 << 20) + 13;
const TENSORS: u64 = 3;

/// A file of `TENSORS` tensors, most bytes of which are zeros. Returns the length of its header.
fn write_file(path: &std::path::Path) -> u64 {
    let tensor = |number: u64| {
        let range = [number * LEN, (number + 1) * LEN];
        format!(r#""t{number}":{{"dtype":"U8","shape":[{LEN}],"data_offsets":{range:?}}}"#)
    };
    let tensors: Vec<_> = (0..TENSORS).map(tensor).collect();
    let header = format!("{{{}}}", tensors.join(","));
    let header = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    let file = std::fs::File::create(path).unwrap();
    file.write_all_at(&header, 0).unwrap();
    let len = header.len() as u64 + TENSORS * LEN;
    file.set_len(len).unwrap();
    for byte in (header.len() as u64..len).step_by(500_009) {
        file.write_all_at(&byte.to_le_bytes()[..1], byte).unwrap();
    }
    header.len() as u64
}

/// Verifies, and returns the result with the number of bytes that were reported.
fn verified(checkpoint: &Checkpoint, task: &Task<'_>) -> (Verified, u64) {
    let mut reported = 0;
    let verified = verify(checkpoint, task, &mut |bytes| reported += bytes).unwrap();
    (verified, reported)
}

#[test]
fn the_checksums_of_a_shard_that_is_read_in_steps_are_those_of_its_bytes_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let head = write_file(&path);
    let bytes = std::fs::read(&path).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let parts = std::iter::once(head).chain((0..TENSORS).map(|_| LEN));
    let boundaries = Arc::new(BlockBoundaries::new(parts).unwrap());
    let mut hasher = ChunkHasher::new(boundaries.clone());
    hasher.update(&bytes);
    let digests = hasher.finish().unwrap();
    let mut sha256 = Vec::new();
    for wanted in [false, true] {
        let task = Task { sha256: wanted, ..Task::default() };
        let (verified, reported) = verified(&checkpoint, &task);
        assert_eq!((verified.bytes, reported), (bytes.len() as u64, bytes.len() as u64));
        assert_eq!(verified.fresh.len(), 1);
        assert_eq!(verified.fresh[0].boundaries, boundaries);
        assert_eq!(verified.fresh[0].digests, digests, "sha256: {wanted}");
        sha256.extend(verified.sha256);
    }
    assert_eq!(sha256.len(), 1);

    // A flipped bit of the last tensor changes the checksum of its chunk alone.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let byte = head + 2 * LEN + (3 << 20) + 5;
    file.write_all_at(&[bytes[byte as usize] ^ 4], byte).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let (verified, _) = verified(&checkpoint, &Task::default());
    let found = verified.fresh[0].digests.iter().zip(&digests).enumerate();
    let differ: Vec<_> = found.filter(|(_, (a, b))| a != b).map(|(number, _)| number).collect();
    assert_eq!(differ, [boundaries.chunks_of(byte..byte + 1).next().unwrap().number]);
}
