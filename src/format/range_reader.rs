//! How parsers read a file: by byte ranges.

use std::io;

/// A file that is read by byte ranges.
pub trait RangeReader {
    /// Length of the file in bytes.
    fn file_len(&self) -> u64;

    /// Offset of the first byte of the shard in the file. It is above 0 only for a tensorizer file
    /// behind other bytes.
    fn start(&self) -> u64 {
        0
    }

    /// Fills `buf` with the bytes of the file from `offset` on.
    ///
    /// # Errors
    /// A failed read. A read past the end of the file fails too.
    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
}
