//! Memory of this package, which DLPack exports, and memory of other owners, which is named by its address.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;
use nix::unistd::pipe2;
use pyo3::exceptions::{PyBufferError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use tensorfs::Dtype;
use tensorfs::internal::io::Region;
use tensorfs::internal::source::LocalFile;

use crate::checkpoint::Checkpoint;
use crate::dlpack::{self, CPU};
use crate::errors::raised;
use crate::waiting::beside;

/// Bytes of a page: the alignment of memory that is mapped from files.
pub(crate) const PAGE: usize = 4096;

/// `len` bytes of Python memory at `address`.
///
/// # Safety
/// The bytes exist, were allocated outside of Rust, and no other code uses them meanwhile.
///
/// # Errors
/// `ValueError` if `len` is not 0 and the address is 0. Objects without memory report this address.
pub(crate) unsafe fn bytes_at<'a>(address: usize, len: usize) -> PyResult<&'a mut [u8]> {
    match start_of(address, len)? {
        // SAFETY: the caller's promise.
        Some(start) => Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }),
        None => Ok(&mut []),
    }
}

/// The `len` bytes from `address` on, which is the start of a page. `owner` keeps them alive.
///
/// # Safety
/// The bytes that a load uses exist, and no other code uses them until it is over.
///
/// # Errors
/// `ValueError` if there are bytes at address 0.
pub(crate) unsafe fn region_at(
    address: usize,
    len: usize,
    owner: Py<PyAny>,
) -> PyResult<Arc<Region>> {
    let start = start_of(address, len)?.unwrap_or_else(|| NonNull::<Page>::dangling().cast());
    // SAFETY: the caller promises valid bytes that no other code uses. At the dangling address
    // `len` is 0.
    Ok(unsafe { Region::foreign(start, len, Box::new(owner)) })
}

/// The start of the `len` bytes at `address`. `None` if the address and `len` are both 0.
///
/// # Errors
/// `ValueError` if there are bytes at address 0.
pub(crate) fn start_of(address: usize, len: usize) -> PyResult<Option<NonNull<u8>>> {
    match NonNull::new(address as *mut u8) {
        None if len > 0 => {
            Err(PyValueError::new_err(format!("memory for {len} bytes cannot lie at address 0")))
        }
        start => Ok(start),
    }
}

/// The index of the first region (address, length) that this process must not write to. `None` if it may write to all
/// regions. Tests the first and the last byte of each region without changing them.
///
/// # Errors
/// `OSError` if a pipe cannot be made.
#[pyfunction]
pub(crate) fn unwritable(regions: Vec<(usize, usize)>) -> PyResult<Option<usize>> {
    let failed = |e: io::Error| PyOSError::new_err((e.raw_os_error(), format!("a pipe: {e}")));
    let (output, input) =
        pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).map_err(|e| failed(e.into()))?;
    for (position, &(start, len)) in regions.iter().enumerate() {
        let Some(last) = len.checked_sub(1) else { continue };
        for address in [start, start.wrapping_add(last)] {
            if !is_writable(&output, &input, address).map_err(failed)? {
                return Ok(Some(position));
            }
        }
    }
    Ok(None)
}

/// Whether the byte at `address` is writable: writes it to an empty pipe and reads it back.
fn is_writable(output: &OwnedFd, input: &OwnedFd, address: usize) -> io::Result<bool> {
    let byte = address as *mut c_void;
    // SAFETY: the kernel checks the address and answers EFAULT if the byte is not readable.
    let sent = retried(|| unsafe { libc::write(input.as_raw_fd(), byte, 1) })?;
    // SAFETY: the kernel checks the address and answers EFAULT if the byte is not writable. The
    // byte keeps its value, and the Python caller uses this memory for nothing else until the load
    // is over.
    Ok(sent && retried(|| unsafe { libc::read(output.as_raw_fd(), byte, 1) })?)
}

/// Repeats a call that moves one byte until it succeeds. Returns `false` if it fails with EFAULT.
fn retried(call: impl Fn() -> isize) -> io::Result<bool> {
    loop {
        match Errno::result(call()) {
            Ok(_) => return Ok(true),
            Err(Errno::EINTR) => {}
            Err(Errno::EFAULT) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
    }
}

/// A type with the alignment of a page.
#[repr(align(4096))]
struct Page;

/// Memory of this package, on huge pages if it is large. A load fills it, and then tensors use it.
#[pyclass(frozen, module = "tensorfs._tensorfs")]
pub(crate) struct Area {
    pub(crate) region: Arc<Region>,
}

#[pymethods]
impl Area {
    /// A shard of a checkpoint, mapped privately: a write copies the page, and does not change the file. `None` if the
    /// system cannot map the shard, or if its tensors are encrypted.
    #[staticmethod]
    fn of_shard(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        shard: usize,
        timeout: Option<f64>,
    ) -> PyResult<Option<Area>> {
        let checkpoint = checkpoint.own();
        let Some(source) = checkpoint.sources().get(shard).cloned() else {
            return Err(PyValueError::new_err(format!("there is no shard {shard}")));
        };
        // The mapping would show the encrypted bytes.
        if source.is_encrypted() {
            return Ok(None);
        }
        let path = source.path().to_owned();
        let map = move || {
            let file = source.local().map(LocalFile::file).transpose()?;
            Ok::<_, tensorfs::Error>(file.and_then(|file| Mapping::of(&file, source.len())))
        };
        let mapping = beside(py, "tensorfs-map", timeout, "map", Some(&path), map)?
            .map_err(|e| raised(py, &e, None))?;
        Ok(mapping.map(|mapping| {
            let (start, len) = (mapping.start, mapping.len);
            // SAFETY: the pages live as long as the mapping, and no load gets this region.
            Area { region: unsafe { Region::foreign(start, len, Box::new(mapping)) } }
        }))
    }

    /// Maps the `len` bytes from `start` on of a file of shared memory. If `private` is true, writes copy the pages, so
    /// that no other process sees them.
    ///
    /// # Errors
    /// `OSError` if the system does not map it.
    #[staticmethod]
    fn of_shared(descriptor: i32, start: u64, len: u64, private: bool) -> PyResult<Area> {
        // SAFETY: the Python caller keeps the descriptor open meanwhile.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let flags =
            if private { libc::MAP_PRIVATE | libc::MAP_NORESERVE } else { libc::MAP_SHARED };
        let mapping = Mapping::with(file, start, len, flags).ok_or_else(|| {
            let e = io::Error::last_os_error();
            PyOSError::new_err((e.raw_os_error(), format!("{len} bytes of shared memory: {e}")))
        })?;
        let (start, len) = (mapping.start, mapping.len);
        // SAFETY: the pages live as long as the mapping. Ranks of a group write to different bytes.
        Ok(Area { region: unsafe { Region::foreign(start, len, Box::new(mapping)) } })
    }

    /// Address of its first byte.
    #[getter]
    fn address(&self) -> usize {
        self.region.start().as_ptr() as usize
    }

    fn __len__(&self) -> usize {
        self.region.len()
    }

    #[new]
    fn new(len: u64) -> PyResult<Area> {
        let region = Region::new(len).map_err(|e| {
            PyOSError::new_err((e.raw_os_error(), format!("{len} bytes of memory: {e}")))
        })?;
        Ok(Area { region })
    }
}

/// A mapping of a file. It has whole pages, and the last page is padded with zeros.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: only the mapping owns the pages, and it does not access them.
unsafe impl Send for Mapping {}
// SAFETY: no method uses the pages through a shared reference.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn of(file: &File, len: u64) -> Option<Mapping> {
        // Only written pages take memory.
        Mapping::with(file.as_fd(), 0, len, libc::MAP_PRIVATE | libc::MAP_NORESERVE)
    }

    fn with(file: BorrowedFd<'_>, first: u64, len: u64, flags: i32) -> Option<Mapping> {
        let first = i64::try_from(first).ok()?;
        let len = usize::try_from(len).ok()?.checked_next_multiple_of(PAGE)?.max(PAGE);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so the mapping replaces no memory in use.
        let address =
            unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, file.as_raw_fd(), first) };
        if address == libc::MAP_FAILED {
            return None;
        }
        NonNull::new(address.cast()).map(|start| Mapping { start, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `of` made the mapping, and nothing refers to it after the drop.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A tensor in memory of this package, for frameworks that accept DLPack.
#[pyclass(frozen, module = "tensorfs", name = "Tensor")]
pub(crate) struct Tensor {
    region: Arc<Region>,
    offset: usize,
    len: usize,
    dtype: Dtype,
    shape: Vec<u64>,
}

impl Tensor {
    fn start(&self) -> NonNull<u8> {
        // SAFETY: `offset` lies in the region, which lives as long as the tensor.
        unsafe { self.region.start().add(self.offset) }
    }
}

#[pymethods]
impl Tensor {
    /// A tensor that begins at byte `offset` of a filled area. Two tensors must not share a byte.
    #[new]
    fn new(
        area: &Area,
        offset: usize,
        len: usize,
        dtype: &str,
        shape: Vec<u64>,
    ) -> PyResult<Tensor> {
        let region = area.region.clone();
        let dtype =
            Dtype::from_name(dtype).ok_or_else(|| PyValueError::new_err("no such dtype"))?;
        let inside = offset <= region.len() && len <= region.len() - offset;
        if !inside || dtype.bits_of(&shape) != Some(len as u64 * 8) {
            return Err(PyValueError::new_err("does not lie in the area"));
        }
        Ok(Tensor { region, offset, len, dtype, shape })
    }

    /// A tensor of zeros, in its own memory.
    #[staticmethod]
    fn empty(dtype: &str, shape: Vec<u64>) -> PyResult<Tensor> {
        let found = Dtype::from_name(dtype).and_then(|found| found.bits_of(&shape));
        let bits = found.ok_or_else(|| PyValueError::new_err("no such dtype or shape"))?;
        Tensor::new(&Area::new(bits / 8)?, 0, (bits / 8) as usize, dtype, shape)
    }

    /// Number of elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Name of its dtype in a header.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len
    }

    /// Address of its first byte.
    #[getter]
    fn data_ptr(&self) -> usize {
        self.start().as_ptr() as usize
    }

    /// A copy of its bytes.
    fn tobytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        // SAFETY: the `len` bytes lie in the region and are initialised. A thread that writes to
        // the tensor meanwhile makes the copy a mixture, as with any memory shared in Python.
        PyBytes::new(py, unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len) })
    }

    fn __repr__(&self) -> String {
        format!("tensorfs.Tensor({}, {:?})", self.dtype.name(), self.shape)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        CPU
    }

    /// A DLPack capsule, by which another framework shares the memory of the tensor. Dtypes that older DLPack versions
    /// lack are exported as bytes. If elements are shorter than a byte, the last dimension counts bytes.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Py<PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // The CPU has no streams.
        drop(stream);
        if dl_device.is_some_and(|device| device != CPU) || copy == Some(true) {
            return Err(PyBufferError::new_err(
                "it lies in the memory of the CPU, and is not copied",
            ));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let shape = dlpack::shape_of(self.dtype, &self.shape, self.len)?;
        dlpack::capsule(py, self.region.clone(), self.start(), self.dtype, shape, versioned)
    }
}
