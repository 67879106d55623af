//! Calls of the driver by other code in the same process.

use tensorfs::internal::device::{DeviceRegion, Gpu};

use super::fake::function;

pub(crate) fn current() -> u64 {
    let mut context = 0;
    // SAFETY: this is the type of the function.
    let get: extern "C" fn(*mut u64) -> u32 = unsafe { function("cuCtxGetCurrent") };
    assert_eq!(get(&mut context), 0);
    context
}

fn set_current(context: u64) {
    // SAFETY: this is the type of the function.
    let set: extern "C" fn(u64) -> u32 = unsafe { function("cuCtxSetCurrent") };
    assert_eq!(set(context), 0);
}

/// A context that is bound to this thread.
pub(crate) struct Context(i32, u64);

impl Context {
    pub(crate) fn bind(device: i32) -> Context {
        let mut context = 0;
        // SAFETY: this is the type of the function.
        let retain: extern "C" fn(*mut u64, i32) -> u32 =
            unsafe { function("cuDevicePrimaryCtxRetain") };
        assert_eq!(retain(&mut context, device), 0);
        set_current(context);
        Context(device, context)
    }

    pub(crate) fn handle(&self) -> u64 {
        self.1
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        set_current(0);
        // SAFETY: this is the type of the function.
        let release: extern "C" fn(i32) -> u32 =
            unsafe { function("cuDevicePrimaryCtxRelease_v2") };
        assert!(release(self.0) == 0 || std::thread::panicking());
    }
}

/// A stream, in the context of a GPU.
pub(crate) struct Stream(u64, #[expect(dead_code, reason = "bound")] Context);

impl Stream {
    pub(crate) fn new(gpu: &Gpu) -> Stream {
        let context = Context::bind(gpu.ordinal() as i32);
        let mut stream = 0;
        // SAFETY: this is the type of the function.
        let create: extern "C" fn(*mut u64, u32) -> u32 = unsafe { function("cuStreamCreate") };
        assert_eq!(create(&mut stream, 1), 0);
        Stream(stream, context)
    }

    pub(crate) fn handle(&self) -> u64 {
        self.0
    }

    pub(crate) fn copy(&self, from: &Pinned, to: &DeviceRegion) {
        assert!(to.len <= from.1 as u64);
        assert_eq!(copy(to.address(), from.0, to.len as usize, self.0), 0);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: this is the type of the function.
        let destroy: extern "C" fn(u64) -> u32 = unsafe { function("cuStreamDestroy_v2") };
        assert!(destroy(self.0) == 0 || std::thread::panicking());
    }
}

/// Copies bytes in a stream. Returns the result code of the driver.
pub(crate) fn copy(to: u64, from: u64, len: usize, stream: u64) -> u32 {
    // SAFETY: this is the type of the function.
    let copy: extern "C" fn(u64, u64, usize, u64) -> u32 =
        unsafe { function("cuMemcpyHtoDAsync_v2") };
    copy(to, from, len, stream)
}

/// Frees memory of a device. Returns the result code of the driver.
pub(crate) fn free(address: u64) -> u32 {
    // SAFETY: this is the type of the function.
    let free: extern "C" fn(u64) -> u32 = unsafe { function("cuMemFree_v2") };
    free(address)
}

pub(crate) fn allocate(len: usize) -> u64 {
    let mut address = 0;
    // SAFETY: this is the type of the function.
    let allocate: extern "C" fn(*mut u64, usize) -> u32 = unsafe { function("cuMemAlloc_v2") };
    assert_eq!(allocate(&mut address, len), 0);
    address
}

/// Registers memory of the host. Returns the result code of the driver.
pub(crate) fn register(bytes: &[u8]) -> u32 {
    // SAFETY: this is the type of the function.
    let register: extern "C" fn(*const u8, usize, u32) -> u32 =
        unsafe { function("cuMemHostRegister_v2") };
    register(bytes.as_ptr(), bytes.len(), 1)
}

pub(crate) fn unregister(bytes: &[u8]) -> u32 {
    // SAFETY: this is the type of the function.
    let unregister: extern "C" fn(*const u8) -> u32 = unsafe { function("cuMemHostUnregister") };
    unregister(bytes.as_ptr())
}

/// Pinned memory.
pub(crate) struct Pinned(u64, usize);

impl Pinned {
    pub(crate) fn address(&self) -> u64 {
        self.0
    }
}

pub(crate) fn pinned(len: usize) -> Pinned {
    let mut start = 0;
    // SAFETY: this is the type of the function.
    let allocate: extern "C" fn(*mut u64, usize, u32) -> u32 =
        unsafe { function("cuMemHostAlloc") };
    assert_eq!(allocate(&mut start, len, 1), 0);
    Pinned(start, len)
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _context = Context::bind(0);
        // SAFETY: this is the type of the function.
        let free: extern "C" fn(u64) -> u32 = unsafe { function("cuMemFreeHost") };
        assert!(free(self.0) == 0 || std::thread::panicking());
    }
}
