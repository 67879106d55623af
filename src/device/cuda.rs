//! Safe wrappers of CUDA's driver interface.
//!
//! All functions are looked up by name when the first GPU is opened. If the driver lacks a function, the result
//! is an error and not a panic. Error codes that are not known here are reported as numbers. Each call binds
//! its context on the calling thread and restores the previous context. Memory that copies use is kept until
//! the copies are complete, even if a call fails.

mod pinned;
mod stream;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

pub use pinned::Pinning;
pub(super) use pinned::{Pinned, Slice};
pub use stream::ForeignStream;
pub(crate) use stream::{CudaStream, Kernels, PitchedRows, Sending, SentCopies};

use super::failed;
use crate::error::{DriverCall, Result};

macro_rules! driver {
    ($($name:ident($($arg:ty),*);)*) => {
        /// The functions of the driver.
        #[allow(non_snake_case, reason = "the names of the interface")]
        struct Driver { $($name: unsafe extern "C" fn($($arg),*) -> c_uint,)* }

        impl Driver {
            /// Loads the driver, or returns why it cannot be used.
            fn load() -> Result<Driver, String> {
                // SAFETY: this runs the initializers of the driver, like in every program that uses it.
                if !unsafe { sys::is_culib_present() } {
                    return Err("there is no NVIDIA driver: libcuda.so.1 cannot be loaded".into());
                }
                // SAFETY: this runs the initializers of the driver, like in every program that uses it. The
                // library was found above, so this does not panic.
                let library = unsafe { sys::culib() };
                Ok(Driver { $($name: {
                    // SAFETY: the type is the one that the interface defines for the function.
                    let symbol = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> c_uint>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        )
                    };
                    *symbol.map_err(|_| {
                        concat!("the NVIDIA driver lacks ", stringify!($name), "; update it")
                            .to_owned()
                    })?
                },)* })
            }
        }
    };
}

driver! {
    cuInit(c_uint);
    cuGetErrorName(c_uint, *mut *const c_char);
    cuGetErrorString(c_uint, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut sys::CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, sys::CUdevice);
    cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice);
    cuDevicePrimaryCtxRelease_v2(sys::CUdevice);
    cuCtxGetCurrent(*mut sys::CUcontext);
    cuCtxSetCurrent(sys::CUcontext);
    cuCtxSynchronize();
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut sys::CUdeviceptr, usize);
    cuMemFree_v2(sys::CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemcpyHtoDAsync_v2(sys::CUdeviceptr, *const c_void, usize, sys::CUstream);
    cuMemcpyDtoH_v2(*mut c_void, sys::CUdeviceptr, usize);
    cuMemcpy2DAsync_v2(*const sys::CUDA_MEMCPY2D_st, sys::CUstream);
    cuStreamCreate(*mut sys::CUstream, c_uint);
    cuStreamDestroy_v2(sys::CUstream);
    cuStreamSynchronize(sys::CUstream);
    cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint);
    cuEventCreate(*mut sys::CUevent, c_uint);
    cuEventDestroy_v2(sys::CUevent);
    cuEventRecord(sys::CUevent, sys::CUstream);
    cuEventSynchronize(sys::CUevent);
    cuModuleLoadData(*mut sys::CUmodule, *const c_void);
    cuModuleUnload(sys::CUmodule);
    cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
    cuLaunchKernel(
        sys::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, sys::CUstream,
        *mut *mut c_void, *mut *mut c_void
    );
}

impl Driver {
    /// The loaded and initialized driver. An error names GPU `ordinal`.
    fn get(ordinal: Option<u32>) -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let driver = DRIVER
            .get_or_init(Driver::load)
            .as_ref()
            .map_err(|why| failed(ordinal, why.clone(), None))?;
        // SAFETY: the only argument is a number. After the first call this does nothing.
        driver.check(ordinal, "cuInit", unsafe { (driver.cuInit)(0) })?;
        Ok(driver)
    }

    /// Converts the result code of a call.
    fn check(&self, ordinal: Option<u32>, function: &'static str, code: c_uint) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = |get: unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint| {
            let mut text: *const c_char = null();
            // SAFETY: the call writes to the pointer, which then is null or points to a static text.
            let known = unsafe { get(code, &mut text) } == 0 && !text.is_null();
            // SAFETY: the text of the driver ends with a zero byte and is never freed.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(self.cuGetErrorName).unwrap_or_else(|| "an unknown error".to_owned());
        let why = text(self.cuGetErrorString).unwrap_or_else(|| "no reason given".to_owned());
        let message = format!("{function} failed: {why} ({name}, {code})");
        Err(failed(ordinal, message, Some(DriverCall { function, code, name })))
    }
}

/// Calls a driver function in a context.
macro_rules! call {
    ($context:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $context.check(stringify!($name), ($context.driver.$name)($($arg),*))
    };
}
use call;

/// An open GPU. Clones refer to the same GPU.
///
/// ```
/// use tensorfs::Gpu;
///
/// match Gpu::open(0) {
///     Ok(gpu) => println!("{gpu:?}"),
///     Err(error) => eprintln!("{error}"),
/// }
/// ```
#[derive(Clone)]
pub struct Gpu(Arc<Context>);

/// The primary context of a device. All code of the process shares it.
struct Context {
    driver: &'static Driver,
    ordinal: u32,
    device: sys::CUdevice,
    raw: sys::CUcontext,
    name: String,
}

// SAFETY: any thread may use a context, and several threads may use it at once.
unsafe impl Send for Context {}
// SAFETY: the driver lets any thread use a context.
unsafe impl Sync for Context {}

impl Context {
    fn check(&self, function: &'static str, code: c_uint) -> Result<()> {
        self.driver.check(Some(self.ordinal), function, code)
    }

    /// Binds the context to this thread until the result is dropped.
    fn enter(&self) -> Result<Entered<'_>> {
        let mut before = null_mut();
        // SAFETY: the call writes to the pointer.
        unsafe { call!(self, cuCtxGetCurrent(&mut before)) }?;
        if before == self.raw {
            return Ok(Entered { context: self, before: None });
        }
        // SAFETY: the context was retained.
        unsafe { call!(self, cuCtxSetCurrent(self.raw)) }?;
        Ok(Entered { context: self, before: Some(before) })
    }

    /// Calls `give_back`, which frees a resource. An error is only logged, because it usually belongs to earlier work.
    fn give_back(&self, give_back: impl FnOnce(&Context) -> Result<()>) {
        let entered = self.enter().or_else(|_| self.enter());
        if let Err(e) = entered.and_then(|_entered| give_back(self)) {
            tracing::warn!("{e}");
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: `Gpu::open` has retained the context once, and nothing that was created in it is left.
        let released = unsafe { call!(self, cuDevicePrimaryCtxRelease_v2(self.device)) };
        if let Err(e) = released {
            tracing::warn!("{e}");
        }
    }
}

/// A context that is bound to this thread. The drop restores the previous one.
pub(crate) struct Entered<'a> {
    context: &'a Context,
    /// The context that was bound before, if it was another context.
    before: Option<sys::CUcontext>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: this context was bound to this thread before, or is null.
            let bound = unsafe { call!(self.context, cuCtxSetCurrent(before)) };
            if let Err(e) = bound {
                tracing::warn!("{e}");
            }
        }
    }
}

impl Gpu {
    /// Number of GPUs of this machine.
    ///
    /// # Errors
    /// If there is no driver, or it cannot be used.
    pub fn count() -> Result<u32> {
        let driver = Driver::get(None)?;
        let mut count = 0;
        // SAFETY: the call writes to the pointer.
        let code = unsafe { (driver.cuDeviceGetCount)(&mut count) };
        driver.check(None, "cuDeviceGetCount", code)?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Opens GPU `ordinal` in its primary context, which other code of the process may use already.
    ///
    /// # Errors
    /// If there is no driver or no such GPU, or it cannot be used.
    pub fn open(ordinal: u32) -> Result<Gpu> {
        let driver = Driver::get(Some(ordinal))?;
        let count = Gpu::count()?;
        if ordinal >= count {
            let message = format!("there is no such GPU; the driver sees {count}");
            return Err(failed(Some(ordinal), message, None));
        }
        let check = |function, code| driver.check(Some(ordinal), function, code);
        let mut device = 0;
        // SAFETY: the call writes to the pointer.
        check("cuDeviceGet", unsafe { (driver.cuDeviceGet)(&mut device, ordinal as c_int) })?;
        let mut text = [0u8; 256];
        let (start, len) = (text.as_mut_ptr().cast(), text.len() as c_int);
        // SAFETY: the call writes at most `len` bytes, including the final zero.
        check("cuDeviceGetName", unsafe { (driver.cuDeviceGetName)(start, len, device) })?;
        let mut raw = null_mut();
        // SAFETY: the call writes to the pointer. `Context` releases the context of the device.
        let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut raw, device) };
        check("cuDevicePrimaryCtxRetain", code)?;
        let name =
            CStr::from_bytes_until_nul(&text).map_or("".into(), CStr::to_string_lossy).into_owned();
        Ok(Gpu(Arc::new(Context { driver, ordinal, device, raw, name })))
    }

    /// The number of the GPU.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// The name of the GPU, for example `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Binds the context of the GPU to this thread until the result is dropped.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        self.0.enter()
    }

    /// Free and total memory of the GPU in bytes.
    ///
    /// # Errors
    /// The errors of the driver.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let _entered = self.0.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the call writes to the pointers.
        unsafe { call!(self.0, cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free as u64, total as u64))
    }

    /// Fails unless `needed` bytes are free.
    pub(super) fn has_room(&self, needed: u64) -> Result<()> {
        let (free, total) = self.memory()?;
        if needed <= free {
            return Ok(());
        }
        let message = format!(
            "takes {needed} bytes of its memory, {free} of {total} are free; load a part of it"
        );
        Err(failed(Some(self.0.ordinal), message, None))
    }

    /// Allocates `len` bytes. Their content is unspecified.
    ///
    /// # Errors
    /// If the GPU has too little free memory. The message says how much it has.
    pub fn allocate(&self, len: u64) -> Result<Arc<DeviceMemory>> {
        let _entered = self.0.enter()?;
        let mut address = 0;
        // SAFETY: the call writes to the pointer.
        let allocated = unsafe { call!(self.0, cuMemAlloc_v2(&mut address, len as usize)) };
        if let Err(e) = allocated {
            // If memory is short, this error is more precise than the driver's.
            self.has_room(len)?;
            return Err(e);
        }
        Ok(Arc::new(DeviceMemory { gpu: self.clone(), address, len, home: Home::Own }))
    }

    /// Wraps `len` bytes of the caller's memory on this GPU. `keep` is dropped once this crate no longer uses
    /// the memory. This may happen on any thread.
    ///
    /// # Safety
    /// The memory lives as long as `keep`. Nobody uses the bytes that a load writes until the load has ended.
    /// The only exception is work in a `ForeignStream` for which the load waits.
    pub unsafe fn foreign(
        &self,
        address: u64,
        len: u64,
        keep: Box<dyn Send + Sync>,
    ) -> Arc<DeviceMemory> {
        Arc::new(DeviceMemory { gpu: self.clone(), address, len, home: Home::Foreign(keep) })
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}, {})", self.0.ordinal, self.0.name)
    }
}

/// Memory of a GPU.
pub struct DeviceMemory {
    gpu: Gpu,
    address: u64,
    len: u64,
    home: Home,
}

enum Home {
    /// Memory allocated by `Gpu::allocate`.
    Own,
    /// Memory of the caller. This value keeps it alive.
    Foreign(#[expect(dead_code, reason = "keeps it alive")] Box<dyn Send + Sync>),
}

impl DeviceMemory {
    /// The GPU to which the memory belongs.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Address of the first byte on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes from byte `offset` on to the host. Waits for this copy, but not for other work.
    ///
    /// # Errors
    /// The errors of the driver.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let from = self.part(offset, to.len() as u64);
        let context = &self.gpu.0;
        let _entered = context.enter()?;
        // SAFETY: both sides have `to.len()` bytes, and the copy is complete when the call returns.
        unsafe { call!(context, cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, to.len())) }
    }

    /// Address of the `len` bytes from byte `offset` on.
    fn part(&self, offset: u64, len: u64) -> u64 {
        assert!(offset <= self.len && len <= self.len - offset, "bytes of the device's memory");
        self.address + offset
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Home::Own = self.home {
            // SAFETY: `Gpu::allocate` has allocated the memory. Copies keep it alive, so none is in progress.
            self.gpu.0.give_back(|gpu| unsafe { call!(gpu, cuMemFree_v2(self.address)) });
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({} bytes of {:?})", self.len, self.gpu)
    }
}
