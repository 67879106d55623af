//! The progress of the copy of one file, and the reason of its failure.

use std::fs::File;
use std::io;
use std::sync::Weak;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tensorfs::Error;

use super::record::Record;

/// A file is hot once it was opened this often and 1 / `HOT_PART` of its bytes were served.
const HOT_OPENS: u64 = 2;

/// See `HOT_OPENS`: the length of a file divided by this. Tools look at headers often, and read the
/// rest rarely.
const HOT_PART: u64 = 2;

/// The reason why a copy was not made, or not used.
#[derive(Debug)]
pub(super) enum CopyFailure {
    /// The daemon ends.
    Stopped,
    /// Another process writes the same file.
    Busy,
    /// Another process removed the copy.
    Gone,
    /// It is larger than the budget.
    TooLarge { len: u64, budget: u64 },
    /// Not enough room can be made.
    NoRoom { len: u64, budget: u64 },
    /// A source changed or could not be read.
    Source(Error),
    /// The operation on the folder that failed.
    Folder(&'static str, io::Error),
    /// A copy does not hold the bytes that it should.
    Differs,
}

impl std::fmt::Display for CopyFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CopyFailure::Stopped => write!(f, "the daemon ends"),
            CopyFailure::Busy => write!(f, "another process writes it"),
            CopyFailure::Gone => write!(f, "it was removed"),
            CopyFailure::TooLarge { len, budget } => {
                write!(f, "its {len} bytes are more than the budget of {budget}")
            }
            CopyFailure::NoRoom { len, budget } => {
                write!(f, "no room for its {len} bytes in a budget of {budget}")
            }
            CopyFailure::Source(error) => error.fmt(f),
            CopyFailure::Folder(what, error) => write!(f, "cannot {what} the folder: {error}"),
            CopyFailure::Differs => write!(f, "the copy reads back with other bytes"),
        }
    }
}

/// The copy of a file, as `status` reports it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct CopyStatus {
    /// The version of the file.
    pub version: String,
    pub len: u64,
    pub state: String,
    /// The part that is done, up to 1.
    pub progress: f64,
    /// Why there is no copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The stage of the copy of a file.
#[expect(clippy::large_enum_variant, reason = "most files that are counted become copies")]
pub(super) enum Stage {
    /// There is no copy.
    Absent,
    /// It waits to be written, or to be verified again.
    Queued,
    /// Its bytes are being written.
    Writing,
    /// Its bytes are being read back.
    Verifying,
    /// It may be used.
    Ready {
        /// Version of the copy when it was verified.
        record: Record,
        /// The open copy, while it is in use.
        open: Weak<File>,
        /// Time of the last touch of the record.
        touched: Option<Instant>,
    },
    /// It could not be made. `again` is the time of the next attempt.
    Failed { again: Option<Instant> },
}

/// State of one version of a file.
pub(super) struct CopyEntry {
    pub(super) len: u64,
    pub(super) opens: u64,
    pub(super) served: u64,
    /// Bytes written or verified.
    pub(super) done: u64,
    pub(super) stage: Stage,
    /// Reason of the last failure.
    pub(super) failure: String,
}

impl CopyEntry {
    /// A file that was not opened yet.
    pub(super) fn new(len: u64) -> CopyEntry {
        CopyEntry {
            len,
            opens: 0,
            served: 0,
            done: 0,
            stage: Stage::Absent,
            failure: String::new(),
        }
    }

    /// Whether a copy is worth its space.
    pub(super) fn is_hot(&self) -> bool {
        self.len > 0 && self.opens >= HOT_OPENS && self.served >= self.len.div_ceil(HOT_PART)
    }

    /// Whether a copy may be begun now.
    pub(super) fn may_start(&self) -> bool {
        match self.stage {
            Stage::Absent => true,
            Stage::Failed { again } => again.is_some_and(|again| Instant::now() >= again),
            _ => false,
        }
    }

    /// The facts for `status`. `None` if there is no copy.
    pub(super) fn status(&self, version: &str) -> Option<CopyStatus> {
        let state = match self.stage {
            Stage::Absent => return None,
            Stage::Queued => "queued",
            Stage::Writing => "writing",
            Stage::Verifying => "verifying",
            Stage::Ready { .. } => "ready",
            Stage::Failed { .. } => "failed",
        };
        let progress = match self.stage {
            Stage::Ready { .. } => 1.0,
            _ => self.done as f64 / self.len.max(1) as f64,
        };
        let failed = matches!(self.stage, Stage::Failed { .. });
        Some(CopyStatus {
            version: version.to_owned(),
            len: self.len,
            state: state.to_owned(),
            progress,
            error: failed.then(|| self.failure.clone()),
        })
    }
}
