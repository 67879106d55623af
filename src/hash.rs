//! The hash that detects accidental changes: XXH3 with 128 bits.
//!
//! The hash is not cryptographic, because it does not have to resist attacks. It detects a flipped bit, a lost write or
//! a file that was saved again. It does not protect against an attacker, who could also rewrite the record of the
//! hashes. One core computes the hash as fast as it can read memory, so a check takes no more time than the read. With
//! 128 bits, two different contents do not get the same hash by chance. Hashes that other tools use as names are
//! sha256.

use twox_hash::XxHash3_128;

/// A hash of some bytes.
///
/// ```
/// use tensorfs::Digest;
///
/// println!("{}", Digest::of(b"some bytes")); // 32 hexadecimal digits
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 16]);

impl Digest {
    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(XxHash3_128::oneshot(bytes).to_be_bytes())
    }

    /// The first 64 bits.
    #[cfg(feature = "remote")]
    pub(crate) fn number(self) -> u64 {
        (u128::from_be_bytes(self.0) >> 64) as u64
    }
}

/// `bytes` in hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// Computes the hash of bytes that arrive in parts.
#[derive(Clone, Default)]
pub struct Hasher(XxHash3_128);

impl Hasher {
    /// A hasher without bytes.
    pub fn new() -> Hasher {
        Hasher::default()
    }

    /// Adds `bytes` to the input of the hash.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The hash of all bytes that were added so far.
    pub fn finish(&self) -> Digest {
        Digest(self.0.finish_128().to_be_bytes())
    }
}

impl std::fmt::Debug for Hasher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hasher")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_xxh3_of_128_bits_as_other_programs_print_it() {
        // The expected values are those of `xxhsum -H2` for an empty file and for "a".
        assert_eq!(Digest::of(b"").to_string(), "99aa06d3014798d86001c324468d497f");
        assert_eq!(Digest::of(b"a").to_string(), "a96faf705af16834e6c632b61e964e1f");
    }

    #[test]
    fn parts_hash_as_the_whole() {
        let bytes: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
        let mut hasher = Hasher::new();
        bytes.chunks(97).for_each(|part| hasher.update(part));
        assert_eq!(hasher.finish(), Digest::of(&bytes));
    }
}
