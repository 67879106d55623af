//! The file system that the kernel sees: inodes, open files, and the FUSE adapter over both.

pub(crate) mod access;
pub(crate) mod adapter;
mod arrival;
pub(crate) mod attributes;
mod backing;
mod entries;
pub(crate) mod inodes;
pub(crate) mod live;
mod node;
mod open_file;
mod open_mode;
mod replies;
pub(crate) mod sets;
pub(crate) mod sharing;
mod survey;
pub(crate) mod tails;
mod verify_policy;
