//! The process behind a mount: it mounts, serves, answers `status`, and ends.

pub(crate) mod allocator;
pub(crate) mod attach;
pub(crate) mod background;
pub(crate) mod control;
pub(crate) mod ending;
pub(crate) mod inherited;
mod place;
pub(crate) mod session;
pub(crate) mod stalled;
