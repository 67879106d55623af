//! The results of a trial of a store.

use std::time::Duration;

/// The mark that tells one state of a file of a store from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateMark {
    /// An ETag that is strong, a generation or a commit.
    Strong,
    /// An ETag of the length and the second of the last change.
    LengthAndTime,
    /// An ETag of which the server says that other bytes may have it.
    Weak,
    /// The time of the last change alone.
    Time,
    /// Nothing but the length.
    Length,
}

/// Bytes of a file that were read for a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreSample {
    /// How many.
    pub len: u64,
    /// The time that they took.
    pub took: Duration,
    /// Requests under way at a time.
    pub at_a_time: usize,
}

/// How a store serves one file, by requests that were sent just now.
#[derive(Clone, Debug)]
pub struct StoreProbe {
    /// The mark that tells states of the file apart.
    pub mark: StateMark,
    /// Whether a part of the file comes for a part that is asked for. `None` if the file is empty.
    pub obeys_ranges: Option<bool>,
    /// Whether a request for another state of the file is refused. `None` if there is no such request.
    pub obeys_conditions: Option<bool>,
    /// The usual time to the first byte.
    pub first_byte: Duration,
    /// Bytes that were read, with many requests at a time. `None` if there are none to be read.
    pub sample: Option<StoreSample>,
}
