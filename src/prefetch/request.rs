//! One read of a file, and the actions after it.

use std::ops::Range;

/// One read of a file.
#[derive(Clone, Debug)]
pub struct Request {
    /// The requested bytes; not empty.
    pub range: Range<u64>,
    /// The open handle through which the request was sent.
    pub reader: u64,
    /// Whether the bytes are still being read ahead.
    pub late: bool,
    /// Milliseconds since any fixed moment.
    pub now: u64,
}

/// Actions after a read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// The stream for which bytes are read ahead, and the ranges to read ahead, in this order.
    pub ahead: Option<(StreamId, Vec<Range<u64>>)>,
    /// Bytes that were read ahead and are no longer expected to be requested.
    pub left: Vec<Range<u64>>,
    /// Bytes to put into the kernel's page cache, because they are requested page by page.
    pub push: Option<Range<u64>>,
}

/// Identifies a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(pub(super) u64);
