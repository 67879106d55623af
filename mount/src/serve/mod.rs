//! The services that inodes use: the engine and the cache, copies on a local disk, detection of
//! changes of the source, and the settings of the kernel.

pub(crate) mod assemble;
pub(crate) mod blocking;
pub(crate) mod change_watcher;
pub(crate) mod file_events;
pub(crate) mod folder_events;
pub(crate) mod heat;
pub(crate) mod in_flight;
pub(crate) mod kernel;
pub(crate) mod page_cache_store;
pub(crate) mod requests;
pub(crate) mod service;
