//! Lengths of the first read-ahead of a reader.

use super::WINDOW_MIN;

/// Numbers of bytes that are read ahead before a reader has shown its needs.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// First window in bytes. Also the maximum number of bytes that are read ahead for a reader that has read
    /// most of a tensor, before an order has predicted tensors.
    pub(super) first: u64,
    /// Maximum number of bytes that are read ahead beyond the current tensor before an order has predicted
    /// several tensors.
    pub(super) trial: u64,
}

impl Reach {
    /// The lengths for files of this machine.
    pub const NEAR: Reach = Reach { first: WINDOW_MIN, trial: 8 << 20 };

    /// The lengths for sources on a server. The reader waits for a round trip if bytes are not requested before the
    /// reader needs them.
    pub const FAR: Reach = Reach { first: 8 << 20, trial: 32 << 20 };
}
