//! The progress of the copy of one file, and the reason if the copy failed.

use std::fs::File;
use std::io;
use std::sync::Weak;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tensorfs::Error;

use super::record::Record;

/// A file is copied once it was opened at least this number of times and the number of bytes read
/// from it is at least its length divided by `HOT_PART`.
const HOT_OPENS: u64 = 2;

/// Divisor of the length of a file, for the limit at `HOT_OPENS`. The limit exists because tools
/// read headers often and the other bytes rarely.
const HOT_PART: u64 = 2;

/// The reason why a copy was not made or not used.
#[derive(Debug)]
pub(super) enum CopyFailure {
    /// The daemon is stopping.
    Stopped,
    /// Another process writes the same file.
    Busy,
    /// Another process removed the copy.
    Gone,
    /// The copy is larger than the budget.
    TooLarge { len: u64, budget: u64 },
    /// The space for the copy cannot be freed.
    NoRoom { len: u64, budget: u64 },
    /// A source changed or could not be read.
    Source(Error),
    /// The operation on the folder that failed.
    Folder(&'static str, io::Error),
    /// The bytes of the copy differ from the bytes that were written.
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
    /// The version of the file of the mount.
    pub version: String,
    pub len: u64,
    pub state: String,
    /// The fraction that is done, from 0 to 1.
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
    /// The file is queued to be written, or its copy to be verified again.
    Queued,
    /// The bytes of the copy are being written.
    Writing,
    /// The bytes of the copy are being read back.
    Verifying,
    /// The copy may be used.
    Ready {
        /// Version of the copy when it was verified.
        record: Record,
        /// The open copy, while it is in use.
        open: Weak<File>,
        /// Time of the last update of the record's modification time.
        touched: Option<Instant>,
    },
    /// The copy could not be made. `again` is the time of the next attempt.
    Failed { again: Option<Instant> },
}

/// State of one version of a file.
pub(super) struct CopyEntry {
    pub(super) len: u64,
    pub(super) opens: u64,
    pub(super) served: u64,
    /// Number of bytes written or verified.
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

    /// Whether the file is read often enough for a copy.
    pub(super) fn is_hot(&self) -> bool {
        self.len > 0 && self.opens >= HOT_OPENS && self.served >= self.len.div_ceil(HOT_PART)
    }

    /// Whether the writing of a copy may start now.
    pub(super) fn may_start(&self) -> bool {
        match self.stage {
            Stage::Absent => true,
            Stage::Failed { again } => again.is_some_and(|again| Instant::now() >= again),
            _ => false,
        }
    }

    /// The state for `status`. `None` if there is no copy.
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
