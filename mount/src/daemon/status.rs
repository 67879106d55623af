//! The status of a mount, as its daemon answers it at the control socket.

use serde::{Deserialize, Serialize};
use tensorfs::internal::counters::CounterValues;

use crate::fs::inodes::IndexStatus;
use crate::fs::live::WatchStatus;
use crate::fs::sets::SetsStatus;
use crate::fs::tails::TailStatus;
use crate::serve::service::ServiceStatus;

/// An answer to the owner of the mount or to root. It has these facts about the mount, and the
/// requested facts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Told<T> {
    /// The mount point.
    pub target: String,
    pub source: String,
    pub pid: u32,
    /// Start time of the daemon, in seconds since 1970.
    pub started_unix: u64,
    pub uptime_s: u64,
    /// The requested facts.
    #[serde(flatten)]
    pub facts: T,
}

/// A function that returns one of the counters.
pub(crate) type CounterOf = fn(&CounterValues) -> u64;

/// The status of a mount.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Status {
    #[serde(flatten)]
    pub service: ServiceStatus,
    pub index: IndexStatus,
    pub tail: TailStatus,
    pub checkpoints: SetsStatus,
    /// Rules of `access=` that match nothing in the source.
    pub idle_rules: Vec<String>,
    /// `None` if the mount does not follow changes of the source.
    pub watch: Option<WatchStatus>,
}

/// The facts that users who are not trusted may learn about a mount of root.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Listable {
    /// The folders of models that the user may list.
    pub models: Vec<String>,
}
