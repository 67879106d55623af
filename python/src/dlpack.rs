//! DLPack: exports tensors to other frameworks, and imports their memory to load into.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyDictMethods};
use tensorfs::Dtype;
use tensorfs::internal::io::Region;

/// The CPU in DLPack: type and number of the device.
pub(crate) const CPU: (i32, i32) = (1, 0);

/// Device type of host memory that GPUs can access too. It is used like memory of the CPU.
const CUDA_HOST: i32 = 3;

/// Flag of read-only memory.
const READ_ONLY: u64 = 1;

const NAME: &CStr = c"dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    device_type: i32,
    device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct ManagedVersioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// Keeps an exported tensor alive. `M` is the structure that the consumer sees.
struct Held<M> {
    managed: M,
    shape: Vec<i64>,
    _region: Arc<Region>,
}

/// Element types that all versions of DLPack have: type code and dtype.
const COMMON: &[(u8, Dtype)] = &[
    (0, Dtype::I8),
    (0, Dtype::I16),
    (0, Dtype::I32),
    (0, Dtype::I64),
    (1, Dtype::U8),
    (1, Dtype::U16),
    (1, Dtype::U32),
    (1, Dtype::U64),
    (2, Dtype::F16),
    (2, Dtype::F32),
    (2, Dtype::F64),
    (4, Dtype::Bf16),
    (5, Dtype::C64),
    (6, Dtype::Bool),
];

/// Element types that only later versions of DLPack have.
const LATER: &[(u8, Dtype)] = &[
    (10, Dtype::F8E4M3),
    (11, Dtype::F8E4M3Fnuz),
    (12, Dtype::F8E5M2),
    (13, Dtype::F8E5M2Fnuz),
    (14, Dtype::F8E8M0),
];

fn exported(dtype: Dtype) -> DlDataType {
    let common = COMMON.iter().find(|(_, other)| *other == dtype);
    match common {
        Some((code, _)) => DlDataType { code: *code, bits: dtype.bits() as u8, lanes: 1 },
        None => DlDataType { code: 1, bits: 8, lanes: 1 },
    }
}

fn imported(found: DlDataType) -> Option<Dtype> {
    let mut known = COMMON.iter().chain(LATER);
    let fits = |&&(code, dtype): &&(u8, Dtype)| {
        (code, dtype.bits(), 1) == (found.code, found.bits.into(), found.lanes)
    };
    known.find(fits).map(|(_, dtype)| *dtype)
}

/// The exported shape: in elements, or in bytes if an element is shorter than a byte.
pub(crate) fn shape_of(dtype: Dtype, shape: &[u64], len: usize) -> PyResult<Vec<i64>> {
    let mut shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
    if !dtype.bits().is_multiple_of(8) {
        let bytes = shape.last().map(|&last| last as u64 * dtype.bits());
        match (bytes, shape.last_mut()) {
            (Some(bits), Some(last)) if bits.is_multiple_of(8) => *last = (bits / 8) as i64,
            // The rows do not end on whole bytes.
            _ => shape = vec![len as i64],
        }
    }
    Ok(shape)
}

/// A capsule with the tensor at `start`, which lies in `region`.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    region: Arc<Region>,
    start: NonNull<u8>,
    dtype: Dtype,
    shape: Vec<i64>,
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let tensor = DlTensor {
        data: start.as_ptr().cast(),
        device: DlDevice { device_type: CPU.0, device_id: CPU.1 },
        ndim: shape.len() as i32,
        dtype: exported(dtype),
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    let context = ptr::null_mut();
    if versioned {
        let deleter: unsafe extern "C" fn(*mut ManagedVersioned) = delete::<ManagedVersioned>;
        let version = Version { major: 1, minor: 0 };
        let managed =
            ManagedVersioned { version, context, deleter: Some(deleter), flags: 0, tensor };
        let held = Box::into_raw(Box::new(Held { managed, shape, _region: region }));
        // SAFETY: no other code has `held` until the capsule is made.
        unsafe {
            (*held).managed.tensor.shape = (*held).shape.as_mut_ptr();
            (*held).managed.context = held.cast();
            made(py, (&raw mut (*held).managed).cast(), NAME_VERSIONED, ended_versioned)
        }
    } else {
        let deleter: unsafe extern "C" fn(*mut Managed) = delete::<Managed>;
        let managed = Managed { tensor, context, deleter: Some(deleter) };
        let held = Box::into_raw(Box::new(Held { managed, shape, _region: region }));
        // SAFETY: no other code has `held` until the capsule is made.
        unsafe {
            (*held).managed.tensor.shape = (*held).shape.as_mut_ptr();
            (*held).managed.context = held.cast();
            made(py, (&raw mut (*held).managed).cast(), NAME, ended)
        }
    }
}

/// # Safety
/// `managed` is the structure that `name` says, and no other code frees it.
unsafe fn made<'py>(
    py: Python<'py>,
    managed: *mut c_void,
    name: &'static CStr,
    ended: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the name lives for ever; the result is a new reference or null with an error set.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed, name.as_ptr(), Some(ended));
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// Frees an exported tensor. The consumer calls this when it no longer needs the tensor, on any thread.
unsafe extern "C" fn delete<M: HasContext>(managed: *mut M) {
    // SAFETY: the context is the box that `capsule` made, and the deleter is called once.
    drop(unsafe { Box::from_raw((*managed).context().cast::<Held<M>>()) });
}

trait HasContext {
    fn context(&self) -> *mut c_void;
}

impl HasContext for Managed {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

impl HasContext for ManagedVersioned {
    fn context(&self) -> *mut c_void {
        self.context
    }
}

/// Destructor of a capsule. Frees the tensor too, unless a consumer took it and renamed the
/// capsule.
unsafe extern "C" fn ended(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule; under this name it holds a `Managed`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<Managed>());
        }
    }
}

unsafe extern "C" fn ended_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with the capsule; under this name it holds our versioned structure.
    unsafe {
        let name = NAME_VERSIONED.as_ptr();
        if ffi::PyCapsule_IsValid(capsule, name) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, name).cast::<ManagedVersioned>());
        }
    }
}

/// Memory to load into: address, length in bytes, dtype, shape, and the object that keeps the memory alive.
type ImportedMemory<'py> = (usize, usize, &'static str, Vec<u64>, Bound<'py, PyAny>);

/// The writable memory of an object that supports DLPack.
#[pyfunction]
pub(crate) fn memory_of<'py>(object: &Bound<'py, PyAny>) -> PyResult<ImportedMemory<'py>> {
    let py = object.py();
    let (device, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    if device != CPU.0 && device != CUDA_HOST {
        return Err(PyBufferError::new_err("is not in the memory of the CPU"));
    }
    let options = PyDict::new(py);
    options.set_item("max_version", (1, 0))?;
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        Err(e) if e.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__")?,
        other => other?,
    };
    // SAFETY: a DLPack producer made the capsule, so it holds these structures. The capsule is not changed here, and
    // its destructor frees the tensor.
    let (tensor, flags) = unsafe {
        let raw = capsule.as_ptr();
        if ffi::PyCapsule_IsValid(raw, NAME_VERSIONED.as_ptr()) == 1 {
            let managed: *mut ManagedVersioned =
                ffi::PyCapsule_GetPointer(raw, NAME_VERSIONED.as_ptr()).cast();
            (&(*managed).tensor, (*managed).flags)
        } else if ffi::PyCapsule_IsValid(raw, NAME.as_ptr()) == 1 {
            let managed: *mut Managed = ffi::PyCapsule_GetPointer(raw, NAME.as_ptr()).cast();
            (&(*managed).tensor, 0)
        } else {
            return Err(PyTypeError::new_err("its __dlpack__ gives no DLPack capsule"));
        }
    };
    let dtype = imported(tensor.dtype)
        .ok_or_else(|| PyBufferError::new_err("has elements that no checkpoint has"))?;
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |of: *mut i64| match of.is_null() || dimensions == 0 {
        true => &[][..],
        // SAFETY: the producer states this number of extents.
        false => unsafe { std::slice::from_raw_parts(of, dimensions) },
    };
    let shape: Vec<u64> = list(tensor.shape).iter().map(|&size| size.max(0) as u64).collect();
    let strides = list(tensor.strides);
    if flags & READ_ONLY != 0 {
        return Err(PyBufferError::new_err("must not be written to"));
    }
    if !is_contiguous(&shape, strides) {
        return Err(PyBufferError::new_err("is not contiguous"));
    }
    let len = dtype.bits_of(&shape).map_or(0, |bits| bits / 8) as usize;
    if tensor.data.is_null() && len > 0 {
        return Err(PyBufferError::new_err("has no memory"));
    }
    let address = tensor.data as usize + tensor.byte_offset as usize;
    Ok((address, len, dtype.name(), shape, capsule))
}

/// Whether the elements lie in row-major order without gaps.
fn is_contiguous(shape: &[u64], strides: &[i64]) -> bool {
    if strides.is_empty() || shape.contains(&0) {
        return true;
    }
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == expected;
        expected *= size as i64;
        fits
    })
}
