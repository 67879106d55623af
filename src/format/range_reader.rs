//! How parsers read a file: by byte ranges.

use std::io;

use crate::error::{ErrorKind, Fault};

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

/// Why a function that reads a file and interprets its bytes ends early.
pub(super) enum ReadStop {
    Read(io::Error),
    Fault(Fault),
}

/// The result of such a function.
pub(super) type ReadResult<T> = Result<T, ReadStop>;

impl ReadStop {
    /// Adds the tensor `name` to the fault.
    pub(super) fn tensor(self, name: &str) -> ReadStop {
        match self {
            ReadStop::Fault(fault) => ReadStop::Fault(fault.tensor(name)),
            other => other,
        }
    }
}

impl ErrorKind {
    /// A fault of this kind, in a function that also reads.
    pub(super) fn stop(self, message: impl Into<String>) -> ReadStop {
        ReadStop::Fault(self.fault(message))
    }
}

impl From<Fault> for ReadStop {
    fn from(fault: Fault) -> ReadStop {
        ReadStop::Fault(fault)
    }
}

impl From<io::Error> for ReadStop {
    fn from(error: io::Error) -> ReadStop {
        ReadStop::Read(error)
    }
}

/// Converts the result to one whose outer error is a failed read and whose inner error is a fault.
pub(super) fn told<T>(result: ReadResult<T>) -> io::Result<Result<T, Fault>> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(ReadStop::Fault(fault)) => Ok(Err(fault)),
        Err(ReadStop::Read(error)) => Err(error),
    }
}
