//! How parsers read a file: by ranges.

use std::io;

/// A file that is read by ranges.
pub trait RangeReader {
    /// Length of the file in bytes.
    fn file_len(&self) -> u64;

    /// First byte of the shard in the file. Only a tensorizer file may have bytes in front of it.
    fn start(&self) -> u64 {
        0
    }

    /// Fills `buf` with the bytes of the file from `offset` on.
    ///
    /// # Errors
    /// A failed read, also past the end of the file.
    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
}
