//! Lengths of the first read-ahead of a reader.

use super::WINDOW_MIN;

/// How far is read ahead before a reader has shown its needs.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// First window, in bytes. Also what is read ahead of a reader that is at the end of a tensor.
    pub(super) first: u64,
    /// Maximum number of bytes that are read ahead beyond the current tensor before an order has proved
    /// itself.
    pub(super) trial: u64,
}

impl Reach {
    /// For files of this machine.
    pub const NEAR: Reach = Reach { first: WINDOW_MIN, trial: 8 << 20 };

    /// For sources with a round trip before each first byte: what is not asked for in time costs one.
    pub const FAR: Reach = Reach { first: 8 << 20, trial: 32 << 20 };
}
