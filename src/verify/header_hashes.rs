//! Compares the hashes in the headers of tensors with the bytes of a shard, while the shard is
//! read.

use sha2::{Digest as _, Sha256};

use crate::error::{ErrorKind, Fault, quoted};
use crate::format::tensorizer::{HashKind, HashedTensor};
use crate::hash::hex;

/// Zeros, which are hashed in place of the value of a hash. No hash is longer.
const ZEROS: [u8; 32] = [0; 32];

/// Compares the hashes in the headers of some tensors of one shard.
pub(super) struct HeaderHashCheck<'a> {
    tensors: &'a [HashedTensor],
    /// Index in `tensors` of the tensor that is hashed now or next.
    next: usize,
    /// One hasher for each kind of hash that the tensor has.
    hashers: Vec<TensorHasher>,
    /// Number of tensors whose hashes match.
    pub(super) matched: u64,
    /// The first hash that does not match, and the offset of the first byte that it covers.
    pub(super) mismatch: Option<(u64, Fault)>,
}

enum TensorHasher {
    Crc32(crc32fast::Hasher),
    Sha256(Sha256),
}

impl TensorHasher {
    fn new(kind: HashKind) -> TensorHasher {
        match kind {
            HashKind::Crc32 => TensorHasher::Crc32(crc32fast::Hasher::new()),
            HashKind::Sha256 => TensorHasher::Sha256(Sha256::new()),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            TensorHasher::Crc32(hasher) => hasher.update(bytes),
            TensorHasher::Sha256(hasher) => hasher.update(bytes),
        }
    }

    /// The kind of the hash, and its value in the byte order of a header.
    fn finish(self) -> (HashKind, Vec<u8>) {
        match self {
            TensorHasher::Crc32(hasher) => {
                (HashKind::Crc32, hasher.finalize().to_le_bytes().to_vec())
            }
            TensorHasher::Sha256(hasher) => (HashKind::Sha256, hasher.finalize().to_vec()),
        }
    }
}

impl<'a> HeaderHashCheck<'a> {
    /// A check of `tensors`. The caller then passes the bytes of the shard to `update`, one range
    /// after another. They must begin before the first of the tensors.
    pub(super) fn new(tensors: &'a [HashedTensor]) -> HeaderHashCheck<'a> {
        HeaderHashCheck { tensors, next: 0, hashers: Vec::new(), matched: 0, mismatch: None }
    }

    /// Hashes `bytes`, which begin at `offset` in the shard. `offset` must be the end of the bytes
    /// of the previous call.
    pub(super) fn update(&mut self, bytes: &[u8], offset: u64) {
        let end = offset + bytes.len() as u64;
        while let Some(tensor) = self.tensors.get(self.next) {
            let range = tensor.range.start.max(offset)..tensor.range.end.min(end);
            if range.is_empty() {
                return;
            }
            if range.start == tensor.range.start {
                let crc32 = tensor.hashes.crc32.map(|_| TensorHasher::new(HashKind::Crc32));
                let sha256 = tensor.hashes.sha256.map(|_| TensorHasher::new(HashKind::Sha256));
                self.hashers = crc32.into_iter().chain(sha256).collect();
            }
            let within = |place: u64| (place.clamp(range.start, range.end) - offset) as usize;
            let mut hashed = within(range.start);
            for place in tensor.hashes.places() {
                let value = within(place.start)..within(place.end);
                self.hashers.iter_mut().for_each(|hasher| {
                    hasher.update(&bytes[hashed..value.start]);
                    hasher.update(&ZEROS[..value.len()]);
                });
                hashed = value.end;
            }
            let left_out = within(tensor.left_out.start)..within(tensor.left_out.end);
            self.hashers.iter_mut().for_each(|hasher| {
                hasher.update(&bytes[hashed..left_out.start]);
                hasher.update(&bytes[left_out.end..within(range.end)]);
            });
            if tensor.range.end > end {
                return;
            }
            self.compare();
        }
    }

    /// Compares the hashes of the current tensor, whose last byte has been hashed.
    fn compare(&mut self) {
        let HashedTensor { name, range, hashes, is_entry, .. } = &self.tensors[self.next];
        let differs = self.hashers.drain(..).map(TensorHasher::finish).find_map(|(kind, found)| {
            let expected: &[u8] = match kind {
                HashKind::Crc32 => hashes.crc32.as_ref()?,
                HashKind::Sha256 => hashes.sha256.as_ref()?,
            };
            (found != expected).then_some((kind, found, expected))
        });
        match differs {
            None => self.matched += 1,
            Some((kind, found, expected)) if *is_entry => {
                // The bytes of a CRC32 are little-endian. The message shows it as a number.
                let number = |bytes: &[u8]| hex(&bytes.iter().rev().copied().collect::<Vec<u8>>());
                let message = format!(
                    "the bytes of its entry {} at byte {} have the {} {}, its directory says {}; restore \
                     the file from a good copy",
                    quoted(name),
                    range.start,
                    kind.name(),
                    number(&found),
                    number(expected)
                );
                let fault = ErrorKind::HashMismatch.fault(message);
                self.mismatch.get_or_insert((range.start, fault));
            }
            Some((kind, found, expected)) => {
                let message = format!(
                    "its header and its bytes have the {} {}, its header says {}; restore the \
                     file from a good copy",
                    kind.name(),
                    hex(&found),
                    hex(expected)
                );
                let fault = ErrorKind::HashMismatch.fault(message).tensor(name);
                self.mismatch.get_or_insert((range.start, fault));
            }
        }
        self.next += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::tensorizer::{KeptHashes, hashes};

    fn file(name: &str) -> (Vec<u8>, Vec<HashedTensor>) {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let bytes = std::fs::read(folder.join("tensorizer").join(name)).unwrap();
        let tensors = hashes(&mut bytes.as_slice()).unwrap().unwrap();
        (bytes, tensors)
    }

    fn check<'a>(
        bytes: &[u8],
        tensors: &'a [HashedTensor],
        chunk_len: usize,
    ) -> HeaderHashCheck<'a> {
        let mut check = HeaderHashCheck::new(tensors);
        let mut offset = 0;
        for chunk in bytes.chunks(chunk_len) {
            check.update(chunk, offset);
            offset += chunk.len() as u64;
        }
        check
    }

    #[test]
    fn the_hashes_of_the_package_match_in_chunks_of_any_length() {
        for (name, count) in
            [("v1_module.tensors", 5), ("v2_nested.tensors", 25), ("v5_long.tensors", 3)]
        {
            let (bytes, tensors) = file(name);
            assert_eq!(tensors.len(), count);
            assert!(tensors.iter().all(|tensor| tensor.hashes.places().count() == 2));
            for chunk_len in [1, 7, 64, 100, 4096, bytes.len()] {
                let check = check(&bytes, &tensors, chunk_len);
                assert_eq!((check.matched, check.mismatch), (count as u64, None), "{chunk_len}");
            }
        }
    }

    #[test]
    fn a_change_of_any_hashed_byte_is_named_with_its_tensor() {
        let (bytes, tensors) = file("v5_long.tensors");
        for tensor in &tensors {
            let values = |place: &u64| !tensor.hashes.places().any(|value| value.contains(place));
            for place in tensor.range.clone().filter(values) {
                let mut bytes = bytes.clone();
                bytes[place as usize] ^= 1;
                let check = check(&bytes, &tensors, 50);
                let (_, fault) = check.mismatch.unwrap();
                assert_eq!(
                    (fault.kind, fault.tensor),
                    (ErrorKind::HashMismatch, Some(tensor.name.clone()))
                );
                assert!(fault.message.contains("CRC32"), "{}", fault.message);
                assert_eq!(check.matched, 2);
            }
        }
    }

    #[test]
    fn an_entry_of_an_archive_is_compared_and_named_with_its_number() {
        let entry = |crc32| HashedTensor {
            name: "m/data/0".to_owned(),
            range: 3..12,
            left_out: 0..0,
            hashes: KeptHashes::of_crc32(crc32),
            is_entry: true,
        };
        // The standard check value of CRC-32.
        let (bytes, good) = (b"...123456789..", [entry(0xcbf4_3926)]);
        assert_eq!(check(bytes, &good, 4).matched, 1);
        let (byte, fault) = check(bytes, &[entry(1)], 4).mismatch.unwrap();
        assert_eq!(byte, 3);
        let expected = "`m/data/0` at byte 3 have the CRC32 cbf43926";
        assert!(fault.message.contains(expected), "{}", fault.message);
        assert!(fault.message.contains("says 00000001"), "{}", fault.message);
    }

    #[test]
    fn a_hash_that_is_not_that_of_the_bytes_is_named() {
        let (bytes, mut tensors) = file("v5_long.tensors");
        tensors[1].hashes.sha256.as_mut().unwrap()[31] ^= 1;
        let (_, fault) = check(&bytes, &tensors, 64).mismatch.unwrap();
        assert!(fault.message.contains("SHA-256"), "{}", fault.message);
        assert_eq!(fault.tensor.as_ref(), Some(&tensors[1].name));
    }
}
