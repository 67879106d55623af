//! Memory that reads put bytes into: bounded buffers for bytes in passing, regions for bytes that
//! stay.

mod arena;
mod buffer;
mod free_list;
mod region;

pub(super) use buffer::{ALIGN, GivenMemory, ReservedBytes, pages_around};
pub use buffer::{Budget, Buffer, ReadBuffer, ReadTarget, Reservation};
#[cfg(feature = "cuda")]
pub(crate) use free_list::FreeList;
pub use region::{LoadedBytes, Region};
