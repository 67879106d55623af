//! Memory of GPUs, and transfers of bytes to it.
//!
//! The driver is loaded when a GPU is opened. On a machine without a driver, opening a GPU is an error. Only the
//! module `cuda` calls the interface of the driver, and only the module `cufile` calls the interface of cuFile.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cufile;
#[cfg(feature = "cuda")]
mod pinned_pool;

#[cfg(feature = "cuda")]
pub(crate) use cuda::{CudaStream, Entered, Kernels, PitchedRows, Sending, SentCopies};
#[cfg(feature = "cuda")]
pub use cuda::{DeviceMemory, ForeignStream, Gpu, Pinning};
#[cfg(feature = "cuda")]
pub(crate) use cufile::{CuFile, Destination, FileHandle, Registered};
#[cfg(feature = "cuda")]
pub(crate) use pinned_pool::PinnedPool;

use crate::error::{DriverCall, Error};

/// An error of GPU `ordinal`, or of CUDA in general if `ordinal` is `None`.
fn failed(ordinal: Option<u32>, message: String, call: Option<DriverCall>) -> Error {
    let device = ordinal.map_or("cuda".to_owned(), |ordinal| format!("cuda:{ordinal}"));
    Error::Device { device, message, call }
}

/// A GPU. This build cannot open any, because the cargo feature `cuda` is off.
///
/// ```
/// use tensorfs::Gpu;
///
/// match Gpu::open(0) {
///     Ok(gpu) => println!("{gpu:?}"),
///     Err(error) => eprintln!("{error}"),
/// }
/// ```
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Debug)]
pub enum Gpu {}

#[cfg(not(feature = "cuda"))]
impl Gpu {
    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// Always, because this build supports no GPUs.
    pub fn open(ordinal: u32) -> crate::error::Result<Gpu> {
        let message = "this build of tensorfs has no GPUs; build it with the feature `cuda`";
        Err(failed(Some(ordinal), message.to_owned(), None))
    }
}

#[cfg(feature = "cuda")]
mod regions {
    use std::sync::Arc;

    use super::{DeviceMemory, Gpu};
    use crate::error::Result;

    /// Maximum total size in bytes of regions that share an allocation. A longer region has an allocation of its own.
    const TOGETHER: u64 = 256 << 20;

    /// Alignment in bytes of regions in an allocation.
    const ALIGN: u64 = 256;

    /// A part of the memory of a device into which tensors are loaded.
    ///
    /// ```no_run
    /// use tensorfs::{Checkpoint, Gpu, Loader, LoaderConfig, TensorRequest};
    ///
    /// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
    /// let loader = Loader::new(LoaderConfig::device());
    /// let loaded = loader.load_device(&Gpu::open(0)?, &checkpoint, &[TensorRequest::whole(0)], &mut |_| true)?;
    /// println!("{:#x}", loaded.place(0).address());
    /// # Ok::<(), tensorfs::Error>(())
    /// ```
    #[derive(Clone, Debug)]
    pub struct DeviceRegion {
        /// The allocation that contains the region. The region keeps it alive.
        pub memory: Arc<DeviceMemory>,
        /// Offset of the region in the allocation.
        pub offset: u64,
        /// Length in bytes.
        pub len: u64,
    }

    impl DeviceRegion {
        /// All of `memory`.
        pub fn whole(memory: Arc<DeviceMemory>) -> DeviceRegion {
            let len = memory.len();
            DeviceRegion { memory, offset: 0, len }
        }

        /// Address of the first byte on the device.
        pub fn address(&self) -> u64 {
            self.memory.address() + self.offset
        }
    }

    /// Number of bytes that a region of `len` bytes takes in an allocation.
    fn taken(len: &u64) -> u64 {
        len.max(&1).checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX)
    }

    impl Gpu {
        /// Allocates regions of these lengths, in few large allocations. Each allocation lives as long as one
        /// of its regions.
        ///
        /// # Errors
        /// If the device has too little free memory. The message says how much it has.
        pub fn regions(&self, lens: &[u64]) -> Result<Vec<DeviceRegion>> {
            self.check_room(lens)?;
            let mut regions = Vec::with_capacity(lens.len());
            self.each_region(lens, &mut |region| {
                regions.push(region);
                true
            })?;
            Ok(regions)
        }

        /// Refuses regions of these lengths if they take more memory than is free.
        pub(crate) fn check_room(&self, lens: &[u64]) -> Result<()> {
            self.has_room(lens.iter().map(taken).fold(0u64, u64::saturating_add))
        }

        /// Like `regions`, but passes each region to `wanted` as soon as it is allocated. Stops if `wanted`
        /// returns `false`.
        pub(crate) fn each_region(
            &self,
            lens: &[u64],
            wanted: &mut dyn FnMut(DeviceRegion) -> bool,
        ) -> Result<()> {
            let mut rest = lens;
            while !rest.is_empty() {
                let mut sum = 0;
                let together = rest
                    .iter()
                    .take_while(|len| {
                        let fits = sum == 0 || sum + taken(len) <= TOGETHER;
                        sum += if fits { taken(len) } else { 0 };
                        fits
                    })
                    .count();
                let memory = self.allocate(sum)?;
                let mut offset = 0;
                for len in &rest[..together] {
                    if !wanted(DeviceRegion { memory: memory.clone(), offset, len: *len }) {
                        return Ok(());
                    }
                    offset += taken(len);
                }
                rest = &rest[together..];
            }
            Ok(())
        }
    }
}

#[cfg(feature = "cuda")]
pub use regions::DeviceRegion;
