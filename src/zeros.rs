//! Zeros that no file contains. They are the bytes of tensors of which a shard stores only the shape.
//!
//! Linux stores file sizes in signed 64-bit integers, so no file has a byte 2^63. Every shard is treated as if
//! it had zeros from this offset on. The piece of a tensor of zeros lies there, so such a tensor is cut,
//! joined, cast, read and loaded like any other tensor.

/// Offset of the first zero after every shard.
pub(crate) const ZEROS_START: u64 = 1 << 63;

/// Maximum number of bytes of zeros that all tensors of one shard may have.
pub(crate) const ZEROS_LEN_MAX: u64 = 1 << 62;

/// Whether the byte at `offset` of a shard is one of the zeros after the file.
pub(crate) const fn are_zeros(offset: u64) -> bool {
    offset >= ZEROS_START
}
