//! Safe wrappers of NVIDIA cuFile, which reads from a file directly into memory of a GPU.
//!
//! cuFile is used only if its kernel module is loaded. Without the module, the library would read into memory of its
//! own and copy from there, and tensorfs can do the same without the library. The library is loaded at the first use.
//! Error codes that are not known here are reported as numbers.

use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use nix::libc;

use super::{DeviceMemory, DeviceRegion};

/// File names of the library. The first one exists in every installation, the second one in those for development.
const NAMES: [&CStr; 2] = [c"libcufile.so.0", c"libcufile.so"];

/// `CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE`: allows reads without the kernel module.
const ALLOW_COMPAT_MODE: c_int = 1;

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`: the kind of file handle that is a file descriptor.
const OPAQUE_FD: c_int = 1;

/// The error code if other code of the process has opened the driver already.
const DRIVER_ALREADY_OPEN: c_int = 5026;

/// `CUfileError_t`: the result of a call, and of the CUDA call inside it.
#[repr(C)]
struct Status {
    code: c_int,
    cuda: c_int,
}

/// `CUfileDescr_t`: describes a file that is to be registered.
#[repr(C)]
struct Description {
    kind: c_int,
    file: Descriptor,
    operations: *const c_void,
}

/// The descriptor of a file. It has the size of a pointer, because file handles of other kinds are pointers.
#[repr(C)]
union Descriptor {
    fd: c_int,
    pointer: *mut c_void,
}

macro_rules! library {
    ($($name:ident($($arg:ty),*) -> $result:ty;)*) => {
        /// The functions of the library.
        #[allow(non_snake_case, reason = "the names of the interface")]
        #[derive(Debug)]
        pub(crate) struct CuFile {
            $($name: unsafe extern "C" fn($($arg),*) -> $result,)*
            /// `None` if the version of the library is too old.
            cuFileSetParameterBool: Option<unsafe extern "C" fn(c_int, bool) -> Status>,
        }

        impl CuFile {
            /// Loads the library, or returns why it cannot be used.
            fn load() -> Result<CuFile, String> {
                let mut libraries = NAMES.iter().map(|name| {
                    // SAFETY: this runs the initializers of the library, like in every program that uses it.
                    unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) }
                });
                let library = libraries
                    .find(|library| !library.is_null())
                    .ok_or("libcufile.so.0 cannot be loaded")?;
                let find = |name: &CStr| {
                    // SAFETY: the library is loaded and never unloaded.
                    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
                    (!found.is_null()).then_some(found)
                };
                Ok(CuFile {
                    $($name: {
                        let found = find(symbol(concat!(stringify!($name), "\0")))
                            .ok_or(concat!("libcufile.so.0 lacks ", stringify!($name)))?;
                        // SAFETY: the type is the one that the interface defines for the function.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) -> $result,
                            >(found)
                        }
                    },)*
                    cuFileSetParameterBool: find(c"cuFileSetParameterBool").map(|found| {
                        // SAFETY: the type is the one that the interface defines for this function.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn(c_int, bool) -> Status,
                            >(found)
                        }
                    }),
                })
            }
        }
    };
}

library! {
    cuFileDriverOpen() -> Status;
    cuFileHandleRegister(*mut *mut c_void, *mut Description) -> Status;
    cuFileHandleDeregister(*mut c_void) -> ();
    cuFileRead(*mut c_void, *mut c_void, usize, libc::off_t, libc::off_t) -> isize;
    cuFileBufRegister(*const c_void, usize, c_int) -> Status;
    cuFileBufDeregister(*const c_void) -> Status;
}

/// `name`, which ends with a zero byte, as a C string.
fn symbol(name: &str) -> &CStr {
    CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or_default()
}

fn check(function: &str, status: &Status) -> Result<(), String> {
    match status {
        Status { code: 0, .. } => Ok(()),
        Status { code, cuda: 0 } => Err(format!("{function} failed with {code}")),
        Status { code, cuda } => Err(format!("{function} failed with {code} (CUDA: {cuda})")),
    }
}

impl CuFile {
    /// Whether the kernel module is loaded. `module` is its device file. Without the module, the driver must
    /// not be opened, because that takes seconds, and some versions then close the standard input.
    pub(crate) fn has_module(module: &Path) -> bool {
        std::fs::metadata(module).is_ok_and(|meta| meta.file_type().is_char_device())
    }

    /// Opens the driver and returns the library, or returns why it cannot be used. May take seconds.
    pub(crate) fn open() -> Result<&'static CuFile, String> {
        static LIBRARY: OnceLock<Result<CuFile, String>> = OnceLock::new();
        let library = LIBRARY.get_or_init(CuFile::load).as_ref().map_err(Clone::clone)?;
        if let Some(set) = library.cuFileSetParameterBool {
            // SAFETY: all arguments are numbers. The call fails if the driver is already open, and nothing
            // depends on its success.
            let _ = unsafe { set(ALLOW_COMPAT_MODE, false) };
        }
        // SAFETY: the call has no arguments, and repeated opens are only counted.
        let status = unsafe { (library.cuFileDriverOpen)() };
        if status.code != DRIVER_ALREADY_OPEN {
            check("cuFileDriverOpen", &status)?;
        }
        Ok(library)
    }
}

/// A file that is registered with cuFile.
#[derive(Debug)]
pub(crate) struct FileHandle {
    library: &'static CuFile,
    raw: *mut c_void,
    /// The descriptor that was registered.
    _file: File,
}

// SAFETY: any thread may use a handle, and several threads may use it at once.
unsafe impl Send for FileHandle {}
// SAFETY: cuFile lets any thread use a handle.
unsafe impl Sync for FileHandle {}

impl FileHandle {
    /// Registers `file`, which must be open with O_DIRECT. A descriptor can be registered only once.
    pub(crate) fn register(library: &'static CuFile, file: File) -> Result<FileHandle, String> {
        let mut descriptor = Descriptor { pointer: null_mut() };
        descriptor.fd = file.as_raw_fd();
        let mut description =
            Description { kind: OPAQUE_FD, file: descriptor, operations: std::ptr::null() };
        let mut raw = null_mut();
        // SAFETY: the call writes to these two pointers at most, and the descriptor is open.
        let status = unsafe { (library.cuFileHandleRegister)(&mut raw, &mut description) };
        check("cuFileHandleRegister", &status)?;
        Ok(FileHandle { library, raw, _file: file })
    }

    /// Reads at most `len` bytes from byte `offset` of the file on to byte `target` of `to`, and waits for them.
    /// Returns the number of bytes read, which is zero at the end of the file. The context of the GPU has to be bound.
    pub(crate) fn read(
        &self,
        offset: u64,
        to: &Destination,
        target: u64,
        len: u64,
    ) -> Result<u64, String> {
        let DeviceRegion { memory, offset: start, len: end } = &to.region;
        assert!(target <= *end && len <= end - target, "bytes of the region");
        assert!(start + target + len <= memory.len(), "bytes of the device's memory");
        // cuFile identifies registered memory by its start address.
        let (base, from) = match &to.registered {
            Some(_) => (memory.address(), start + target),
            None => (memory.address() + start + target, 0),
        };
        let too_far = |_| "cuFileRead reaches no such offset".to_owned();
        let offset = libc::off_t::try_from(offset).map_err(too_far)?;
        let from = libc::off_t::try_from(from).map_err(too_far)?;
        // SAFETY: the memory has `len` bytes at this place, and exists until the call returns.
        let read = unsafe {
            (self.library.cuFileRead)(self.raw, base as *mut c_void, len as usize, offset, from)
        };
        match read {
            0.. if read as u64 <= len => Ok(read as u64),
            0.. => Err(format!("cuFileRead says {read} of {len} bytes")),
            -1 => Err(format!("cuFileRead failed: {}", std::io::Error::last_os_error())),
            _ => Err(format!("cuFileRead failed with {}", read.unsigned_abs())),
        }
    }
}

impl Drop for FileHandle {
    fn drop(&mut self) {
        // SAFETY: `register` has registered the handle once, and no read uses it any more.
        unsafe { (self.library.cuFileHandleDeregister)(self.raw) };
    }
}

/// Memory of a GPU that is registered with cuFile, so that the disk can write to it directly. If memory is not
/// registered, cuFile copies through memory of its own on the GPU.
#[derive(Debug)]
pub(crate) struct Registered {
    library: &'static CuFile,
    memory: Arc<DeviceMemory>,
}

impl Registered {
    /// Registers all of `memory`. Its context has to be bound.
    pub(crate) fn new(
        library: &'static CuFile,
        memory: &Arc<DeviceMemory>,
    ) -> Result<Arc<Registered>, String> {
        let (start, len) = (memory.address() as *const c_void, memory.len() as usize);
        // SAFETY: the memory has `len` bytes, and exists until it is deregistered.
        let status = unsafe { (library.cuFileBufRegister)(start, len, 0) };
        check("cuFileBufRegister", &status)?;
        Ok(Arc::new(Registered { library, memory: memory.clone() }))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // The memory is freed after this, even if the binding of the context fails.
        let _entered = self.memory.gpu().enter();
        // SAFETY: `new` has registered the memory once, and no read uses the registration any more.
        let status =
            unsafe { (self.library.cuFileBufDeregister)(self.memory.address() as *const c_void) };
        if let Err(e) = check("cuFileBufDeregister", &status) {
            tracing::warn!("{e}");
        }
    }
}

/// A region into which cuFile reads.
#[derive(Debug)]
pub(crate) struct Destination {
    /// The region.
    pub(crate) region: DeviceRegion,
    /// The registration of its memory. `None` if the memory is not registered.
    pub(crate) registered: Option<Arc<Registered>>,
}
