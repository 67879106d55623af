#![doc = include_str!("../README.md")]

pub mod atomic_file;
pub mod cache;
pub mod cast;
pub mod catalog;
pub mod checkpoint;
pub mod coalesce;
pub mod consolidate;
pub mod counters;
pub mod device;
pub mod dtype;
pub mod error;
pub mod format;
pub mod hash;
pub mod index;
pub mod io;
pub mod layout;
pub mod loader;
pub mod open_options;
pub mod plan;
pub mod prefetch;
pub mod process;
pub mod reader;
pub mod source;
pub mod store;
pub mod strided;
pub mod sync;
pub mod verify;
pub mod view;
pub mod walk;
pub mod words;

pub use checkpoint::Checkpoint;
pub use dtype::Dtype;
pub use error::{Error, ErrorKind, Fault, Result};
