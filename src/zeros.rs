//! Zeros that no file holds, for tensors of which a shard has the shape only.
//!
//! Linux counts bytes of files in signed 64 bits, so no file has a byte 2^63. Every shard counts as
//! having zeros from there on. Such a tensor has its piece there, and is cut, joined, cast, read and
//! loaded like any other.

/// First of the zeros behind every shard.
pub(crate) const ZEROS_START: u64 = 1 << 63;

/// Maximum number of zeros that the tensors of one shard may have, in bytes.
pub(crate) const ZEROS_LEN_MAX: u64 = 1 << 62;

/// Whether the byte at `offset` of a shard is one of the zeros behind its file.
pub(crate) const fn are_zeros(offset: u64) -> bool {
    offset >= ZEROS_START
}
