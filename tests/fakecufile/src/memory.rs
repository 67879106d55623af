//! Reads bytes of files, and writes them to the memory of tests/fakecuda.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use nix::libc;

/// The unit of direct reads, which bypass the page cache, in bytes.
const PAGE: u64 = 4096;

/// The functions of the driver that exist for tests.
#[derive(Clone, Copy)]
pub(crate) struct Device {
    holds: extern "C" fn(u64, usize) -> u32,
    write: extern "C" fn(u64, *const u8, usize) -> u32,
}

impl Device {
    pub(crate) fn get() -> Device {
        static DEVICE: OnceLock<Device> = OnceLock::new();
        *DEVICE.get_or_init(|| {
            // SAFETY: the driver is loaded already, so no initialiser runs.
            let driver =
                unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
            assert!(!driver.is_null(), "the driver of tests/fakecuda is not loaded");
            let find = |name: &CStr| {
                // SAFETY: the library is loaded.
                let found = unsafe { libc::dlsym(driver, name.as_ptr()) };
                assert!(!found.is_null(), "no {name:?} in the driver");
                found
            };
            let (holds, write) = (find(c"fakecuda_holds"), find(c"fakecuda_write"));
            // SAFETY: these are the types of the functions.
            unsafe {
                Device {
                    holds: std::mem::transmute::<*mut c_void, extern "C" fn(u64, usize) -> u32>(
                        holds,
                    ),
                    write: std::mem::transmute::<
                        *mut c_void,
                        extern "C" fn(u64, *const u8, usize) -> u32,
                    >(write),
                }
            }
        })
    }

    /// Whether these bytes are memory of the device whose context is bound.
    pub(crate) fn holds(self, start: u64, len: usize) -> bool {
        (self.holds)(start, len) == 0
    }

    /// Writes bytes to the device whose context is bound. Returns whether they are memory of that device.
    pub(crate) fn write(self, start: u64, bytes: &[u8]) -> bool {
        (self.write)(start, bytes.as_ptr(), bytes.len()) == 0
    }
}

/// Reads `len` bytes of a file, or fewer at its end. An error is the code of the system.
pub(crate) fn read(fd: c_int, offset: u64, len: usize) -> Result<Vec<u8>, c_int> {
    let (start, end) = (offset / PAGE * PAGE, (offset + len as u64).next_multiple_of(PAGE));
    let room = (end - start).max(PAGE) as usize;
    let layout = Layout::from_size_align(room, PAGE as usize).map_err(|_| libc::EINVAL)?;
    // SAFETY: the length is not zero.
    let pages = unsafe { alloc_zeroed(layout) };
    if pages.is_null() {
        return Err(libc::ENOMEM);
    }
    // SAFETY: the memory has `len` bytes.
    let read = unsafe { libc::pread(fd, pages.cast(), room, start as libc::off_t) };
    let outcome = if read < 0 {
        // SAFETY: `__errno_location` returns the address of a variable of this thread.
        Err(unsafe { *libc::__errno_location() })
    } else {
        // SAFETY: the memory has `bytes.len()` bytes.
        let bytes = unsafe { std::slice::from_raw_parts(pages, read as usize) };
        let from = ((offset - start) as usize).min(bytes.len());
        let to = (from + len).min(bytes.len());
        Ok(bytes[from..to].to_vec())
    };
    // SAFETY: allocated above.
    unsafe { dealloc(pages, layout) };
    outcome
}
