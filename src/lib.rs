#![doc = include_str!("../README.md")]
// Without the feature `internal`, the parts that only the programs use are dead code.
#![cfg_attr(not(feature = "internal"), allow(dead_code, unreachable_pub, unused_imports))]

// The modules below declare enums with the macro of this module.
#[macro_use]
mod words;

mod asked;
mod atomic_file;
mod cache;
mod cast;
mod catalog;
mod checkpoint;
mod clock;
mod coalesce;
mod consolidate;
mod counters;
mod device;
mod dtype;
mod error;
mod format;
mod hash;
mod index;
mod io;
mod layout;
mod loader;
mod mapping;
mod mount_origin;
mod mountinfo;
mod open_options;
mod order;
mod parallel;
mod plan;
mod prefetch;
mod process;
mod reader;
mod size;
mod source;
mod store;
mod strided;
mod strides;
mod sweep;
mod sync;
mod system_memory;
mod verify;
mod version;
mod view;
mod zeros;

pub use catalog::{Catalog, Piece, Shard, ShardId, Tensor};
pub use checkpoint::{Checkpoint, FileSummary, SetKind, Tail, VirtualFile};
#[cfg(feature = "cuda")]
pub use device::DeviceRegion;
pub use device::Gpu;
pub use dtype::Dtype;
pub use error::{DriverCall, Error, ErrorKind, Fault, Result, SourceUri};
pub use format::tensorizer::keys::Secret;
pub use format::{OutputFormat, TrainingState};
pub use hash::Digest;
pub use io::LoadedBytes;
pub use layout::Layout;
#[cfg(feature = "cuda")]
pub use loader::LoadedDevice;
pub use loader::{
    DeviceStats, LoadedTensors, Loader, LoaderConfig, MemoryStats, PageSize, Progress, ReadEvent,
    Report, Stats,
};
pub use open_options::{DiskCachePlace, Links, OpenOptions, Prefer, RemoteSettings, ZeroWeights};
pub use plan::TensorRequest;
pub use reader::Reader;
pub use view::{
    CutRules, DtypeCast, DtypeMap, FileMap, FileSpec, Files, MapPolicy, NameGlob, NamedViews,
    RenameRules, TensorOrder, TensorParallel, View,
};
pub use words::UnknownWord;

/// All modules, for the programs and the Python package of this repository. They may change in any release.
#[cfg(feature = "internal")]
#[doc(hidden)]
pub mod internal {
    macro_rules! reexport {
        ($($module:ident)*) => { $(pub mod $module { pub use crate::$module::*; })* };
    }
    reexport! { asked atomic_file cache cast catalog checkpoint clock coalesce consolidate counters device dtype error format hash index io layout loader mount_origin mountinfo open_options order plan prefetch process reader size source store strided sweep sync system_memory verify version view words }
}
