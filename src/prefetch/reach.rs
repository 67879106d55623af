//! Lengths of the first read-ahead of a reader.

use super::{WINDOW_MAX, WINDOW_MIN};

/// How far is read ahead before a reader has shown its needs.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// First window, in bytes. Also what is read ahead of a reader that is at the end of a tensor.
    pub(super) first: u64,
    /// Maximum number of bytes that are read ahead beyond the current tensor before an order has proved
    /// itself.
    pub(super) trial: u64,
    /// Largest window, in bytes.
    pub(super) longest: u64,
    /// The memory for read-ahead, divided by this number, is what one stream leaves to others.
    left: u64,
}

impl Reach {
    /// For files of this machine.
    pub const NEAR: Reach =
        Reach { first: WINDOW_MIN, trial: 8 << 20, longest: WINDOW_MAX, left: 3 };

    /// For sources with a round trip before each first byte: what is not asked for in time costs one. Its bytes
    /// arrive in any order, and those in flight take memory too.
    pub const FAR: Reach = Reach { first: 8 << 20, trial: 32 << 20, longest: 256 << 20, left: 8 };

    /// Maximum number of bytes for one stream, if all streams together hold at most `most`.
    pub(super) fn share_of(&self, most: u64) -> u64 {
        most - most.div_ceil(self.left)
    }
}
