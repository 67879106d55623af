//! The node service: a supervisor, and one worker process for each mount.

mod channel;
pub(crate) mod config;
mod metrics;
mod mounts;
pub(crate) mod notifier;
pub(crate) mod supervisor;
pub(crate) mod suspension;
pub(crate) mod worker;
mod worker_process;
