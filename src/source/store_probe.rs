//! The results of measurements of a store.

use std::time::Duration;

/// The property by which the store tells states of a file apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateMark {
    /// A strong ETag, a generation or a commit.
    Strong,
    /// An ETag made of the length and the time of the last change in seconds.
    LengthAndTime,
    /// A weak ETag: the server says that other bytes may have the same ETag.
    Weak,
    /// Only the time of the last change.
    Time,
    /// The length and nothing else.
    Length,
}

/// A sample of a file that was read for a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreSample {
    /// Number of bytes.
    pub len: u64,
    /// Duration of the reads.
    pub took: Duration,
    /// Number of concurrent requests.
    pub at_a_time: usize,
}

/// How a store serves one file, measured with requests that were sent just now.
#[derive(Clone, Debug)]
pub struct StoreProbe {
    /// The property that tells states of the file apart.
    pub mark: StateMark,
    /// Whether a range request gets exactly the range. `None` if the file is empty.
    pub obeys_ranges: Option<bool>,
    /// Whether the server refuses a request for another state of the file. `None` if the store has no such requests.
    pub obeys_conditions: Option<bool>,
    /// Median time to the first byte.
    pub first_byte: Duration,
    /// A sample read with many concurrent requests. `None` if nothing can be read in parts.
    pub sample: Option<StoreSample>,
}
