//! A shard's identity and its bytes: local files; remote sources arrive beside them.

mod descriptors;
mod file_system;
mod local;
mod mounted;
pub mod mountinfo;
pub mod resolve;

pub use descriptors::raise_limit;
pub use file_system::FileSystem;
pub use local::{Identity, Pin, Source, close_apart, release_unpinned};
pub use mounted::{Behind, XATTR_SOURCE, behind_mount};
