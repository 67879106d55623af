//! The process behind a mount: it mounts, serves, answers `status`, and ends.

pub(crate) mod allocator;
pub(crate) mod attach;
pub(crate) mod background;
pub(crate) mod client;
pub(crate) mod connection;
pub(crate) mod control;
pub(crate) mod descriptors;
pub(crate) mod ending;
pub(crate) mod handover;
pub(crate) mod inherited;
pub(crate) mod place;
mod read_path;
mod server;
pub(crate) mod session;
pub(crate) mod stalled;
pub(crate) mod status;
mod target;
