//! Memory that reads write to: bounded buffers for bytes that are needed briefly, and regions for bytes that stay.

mod arena;
mod buffer;
mod free_list;
mod region;

pub(super) use buffer::{ALIGN, GivenMemory, ReservedBytes, pages_around};
pub use buffer::{Budget, Buffer, ReadBuffer, ReadTarget, Reservation};
#[cfg(feature = "cuda")]
pub(crate) use free_list::FreeList;
pub use region::{LoadedBytes, Region};
