//! Bytes of files, and the memory of tests/fakecuda that they go to.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use nix::libc;

/// Unit in which files are read past the page cache.
const PAGE: u64 = 4096;

/// The driver's own functions for tests.
#[derive(Clone, Copy)]
pub(crate) struct Device {
    holds: extern "C" fn(u64, usize) -> u32,
    write: extern "C" fn(u64, *const u8, usize) -> u32,
}

impl Device {
    pub(crate) fn get() -> Device {
        static DEVICE: OnceLock<Device> = OnceLock::new();
        *DEVICE.get_or_init(|| {
            // SAFETY: it is loaded already.
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
            // SAFETY: the types of the functions.
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

    /// Whether the device whose context is bound has these bytes.
    pub(crate) fn holds(self, start: u64, len: usize) -> bool {
        (self.holds)(start, len) == 0
    }

    /// Writes bytes to it; says whether it has them.
    pub(crate) fn write(self, start: u64, bytes: &[u8]) -> bool {
        (self.write)(start, bytes.as_ptr(), bytes.len()) == 0
    }
}

/// Reads `len` bytes of a file, fewer where it ends, or the code of the system.
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
        // SAFETY: the variable of this thread.
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
