//! A shard's identity and its bytes: local files; remote sources arrive beside them.

mod copy_mode;
mod descriptors;
mod file_system;
mod identity;
mod local;
mod mounted;
pub mod mountinfo;
pub mod resolve;
mod without_proc;

pub use copy_mode::CopyMode;
pub use descriptors::raise_limit;
pub use file_system::FileSystem;
pub use identity::Identity;
pub use local::{Pin, Source, WriteWitness, close_apart, release_unpinned};
pub use mounted::{Behind, XATTR_SOURCE, behind_mount};
