//! Work for GPUs: copies from pinned memory, kernels, and the order between streams.

use std::collections::HashMap;
use std::ffi::{CString, c_uint};
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;

use super::{DeviceMemory, Entered, Gpu, call, failed, sys};
use crate::cast::Cast;
use crate::error::Result;
use crate::io::ReadBuffer;
use crate::sync::Mutex;

/// The kernels as PTX text, which the driver compiles for its GPU. The text ends with a zero byte.
const PTX: &str = concat!(include_str!("../cast.ptx"), "\0");

/// `CU_STREAM_NON_BLOCKING`: the stream and the legacy stream, which other code may use, do not wait for each other.
const NON_BLOCKING: c_uint = 1;

/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: a thread that waits for the event sleeps.
const BLOCKING_EVENT: c_uint = 1 | 2;

/// Maximum distance in bytes between rows that one copy call supports.
const PITCH_MAX: u64 = (1 << 31) - 1;

/// Number of threads per block of a kernel, and maximum number of blocks. If there are more elements than
/// threads, each thread casts several.
const BLOCK: u64 = 256;
const BLOCKS_MAX: u64 = 1 << 15;

/// A stream of the caller, for example the current stream of torch.
#[derive(Clone, Copy, Debug)]
pub struct ForeignStream(u64);

impl ForeignStream {
    /// The stream with this handle. Zero is the legacy stream.
    ///
    /// # Safety
    /// The stream belongs to the primary context of the GPU with which it is used, and lives as long as this value.
    pub unsafe fn from_raw(handle: u64) -> ForeignStream {
        ForeignStream(handle)
    }
}

/// A CUDA stream. The GPU executes the work of a stream in order.
pub(crate) struct CudaStream {
    gpu: Gpu,
    raw: sys::CUstream,
    /// Events that are kept for reuse.
    events: Mutex<Vec<CudaEvent>>,
}

// SAFETY: any thread may use a stream, and several threads may use it at once.
unsafe impl Send for CudaStream {}
// SAFETY: the driver lets any thread use the handle.
unsafe impl Sync for CudaStream {}

/// An event of the driver.
struct CudaEvent {
    gpu: Gpu,
    raw: sys::CUevent,
}

// SAFETY: any thread may use an event.
unsafe impl Send for CudaEvent {}

impl CudaEvent {
    fn new(gpu: &Gpu) -> Result<CudaEvent> {
        let mut raw = null_mut();
        // SAFETY: the call writes to the pointer.
        unsafe { call!(gpu.0, cuEventCreate(&mut raw, BLOCKING_EVENT)) }?;
        Ok(CudaEvent { gpu: gpu.clone(), raw })
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: `new` has created the event, and nothing uses it any more.
        self.gpu.0.give_back(|gpu| unsafe { call!(gpu, cuEventDestroy_v2(self.raw)) });
    }
}

impl CudaStream {
    /// Creates a stream. The legacy stream does not wait for it.
    pub(crate) fn new(gpu: &Gpu) -> Result<Arc<CudaStream>> {
        let _entered = gpu.0.enter()?;
        let mut raw = null_mut();
        // SAFETY: the call writes to the pointer.
        unsafe { call!(gpu.0, cuStreamCreate(&mut raw, NON_BLOCKING)) }?;
        Ok(Arc::new(CudaStream { gpu: gpu.clone(), raw, events: Mutex::default() }))
    }

    /// Binds the context of the stream to this thread until the result is dropped.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        self.gpu.0.enter()
    }

    /// Makes later work of this stream wait for all work that was submitted to `other` before.
    pub(crate) fn wait_for(&self, other: ForeignStream) -> Result<()> {
        let context = &self.gpu.0;
        let _entered = context.enter()?;
        let event = CudaEvent::new(&self.gpu)?;
        // SAFETY: both streams exist. The driver allows that an event is destroyed before it is reached.
        unsafe {
            call!(context, cuEventRecord(event.raw, other.0 as sys::CUstream))?;
            call!(context, cuStreamWaitEvent(self.raw, event.raw, 0))
        }
    }

    /// Begins to submit copies from `source`, which is kept until they are complete.
    pub(crate) fn send(self: &Arc<Self>, source: ReadBuffer) -> Sending {
        let used = Used { source, memory: Vec::new(), kernels: None };
        Sending { stream: self.clone(), used: Some(used) }
    }

    /// Waits until all work of the stream is complete. If that fails, waits for all work of the context. If
    /// that fails too, the device is lost.
    pub(crate) fn drain(&self) -> Result<()> {
        let context = &self.gpu.0;
        let _entered = context.enter().or_else(|_| context.enter())?;
        // SAFETY: the stream exists.
        unsafe { call!(context, cuStreamSynchronize(self.raw)) }
            // SAFETY: the context is bound.
            .or_else(|_| unsafe { call!(context, cuCtxSynchronize()) })
    }

    fn event(&self) -> Result<CudaEvent> {
        let kept = self.events.lock().pop();
        kept.map_or_else(|| CudaEvent::new(&self.gpu), Ok)
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if let Err(e) = self.drain() {
            tracing::warn!("{e}");
        }
        // SAFETY: `new` has created the stream, and nothing uses it any more.
        self.gpu.0.give_back(|gpu| unsafe { call!(gpu, cuStreamDestroy_v2(self.raw)) });
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream of {:?}", self.gpu)
    }
}

/// Rows of bytes with equal distances.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PitchedRows {
    /// Offset of the first row in the source, and distance between the starts of rows there.
    pub(crate) from: u64,
    pub(crate) from_pitch: u64,
    /// Offset of the first row in the target, and distance between the starts of rows there.
    pub(crate) to: u64,
    pub(crate) to_pitch: u64,
    /// Number of bytes of a row, and number of rows.
    pub(crate) width: u64,
    pub(crate) count: u64,
}

impl PitchedRows {
    /// Number of bytes from the start of the first row to the end of the last one, in the source and in the target.
    fn spans(&self) -> (u64, u64) {
        let steps = self.count - 1;
        (steps * self.from_pitch + self.width, steps * self.to_pitch + self.width)
    }
}

/// Resources that copies use.
struct Used {
    source: ReadBuffer,
    memory: Vec<Arc<DeviceMemory>>,
    kernels: Option<Arc<Kernels>>,
}

/// Copies from the bytes of one read, while they are being submitted to a stream.
pub(crate) struct Sending {
    stream: Arc<CudaStream>,
    /// `None` if the copies are complete.
    used: Option<Used>,
}

impl Sending {
    fn used(&mut self) -> &mut Used {
        self.used.as_mut().expect("the copies are not over")
    }

    /// Submits a copy of `len` bytes of the source, beginning at its byte `from`, to byte `offset` of `to`.
    pub(crate) fn copy(
        &mut self,
        from: u64,
        len: u64,
        to: &Arc<DeviceMemory>,
        offset: u64,
    ) -> Result<()> {
        let source = &self.used().source[from as usize..(from + len) as usize];
        let start = source.as_ptr().cast();
        let target = to.part(offset, len);
        self.keep(to);
        let context = &self.stream.gpu.0;
        let _entered = context.enter()?;
        let raw = self.stream.raw;
        // SAFETY: both sides have `len` bytes, and are kept until the copy is complete.
        unsafe { call!(context, cuMemcpyHtoDAsync_v2(target, start, len as usize, raw)) }
    }

    /// Copies rows of the source to `to`.
    pub(crate) fn copy_rows(&mut self, rows: PitchedRows, to: &Arc<DeviceMemory>) -> Result<()> {
        let end = rows.from + rows.spans().0;
        let rows_of = &self.used().source[rows.from as usize..end as usize];
        let start = rows_of.as_ptr().addr() as u64;
        self.rows(sys::CUmemorytype::CU_MEMORYTYPE_HOST, start, rows, to)
    }

    /// Copies rows from `from` to `to`, after all earlier work of the stream.
    pub(crate) fn spread(
        &mut self,
        from: &Arc<DeviceMemory>,
        rows: PitchedRows,
        to: &Arc<DeviceMemory>,
    ) -> Result<()> {
        let start = from.part(rows.from, rows.spans().0);
        self.keep(from);
        self.rows(sys::CUmemorytype::CU_MEMORYTYPE_DEVICE, start, rows, to)
    }

    fn rows(
        &mut self,
        kind: sys::CUmemorytype,
        start: u64,
        rows: PitchedRows,
        to: &Arc<DeviceMemory>,
    ) -> Result<()> {
        let target = to.part(rows.to, rows.spans().1);
        self.keep(to);
        if rows.count > 1 && rows.from_pitch.max(rows.to_pitch) > PITCH_MAX {
            for k in 0..rows.count {
                let (from, to) = (start + k * rows.from_pitch, target + k * rows.to_pitch);
                self.pitched(kind, from, to, PitchedRows { count: 1, ..rows })?;
            }
            return Ok(());
        }
        self.pitched(kind, start, target, rows)
    }

    /// Submits a copy of `rows`. The caller has to keep the memory on both sides.
    fn pitched(
        &mut self,
        kind: sys::CUmemorytype,
        from: u64,
        to: u64,
        rows: PitchedRows,
    ) -> Result<()> {
        let pitch = |pitch: u64| if rows.count > 1 { pitch } else { rows.width } as usize;
        let on_host = kind == sys::CUmemorytype::CU_MEMORYTYPE_HOST;
        let copy = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: kind,
            srcHost: if on_host { from as *const _ } else { std::ptr::null() },
            srcDevice: if on_host { 0 } else { from },
            srcArray: null_mut(),
            srcPitch: pitch(rows.from_pitch),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: null_mut(),
            dstDevice: to,
            dstArray: null_mut(),
            dstPitch: pitch(rows.to_pitch),
            WidthInBytes: rows.width as usize,
            Height: rows.count as usize,
        };
        let context = &self.stream.gpu.0;
        let _entered = context.enter()?;
        // SAFETY: the rows lie in memory that is kept until the copy is complete.
        unsafe { call!(context, cuMemcpy2DAsync_v2(&copy, self.stream.raw)) }
    }

    /// Casts elements after all earlier work of the stream. They begin at byte `from.1` of `from.0`, and the
    /// result begins at byte `to.1` of `to.0`.
    pub(crate) fn cast(
        &mut self,
        kernels: &Arc<Kernels>,
        cast: Cast,
        from: (&Arc<DeviceMemory>, u64),
        to: (&Arc<DeviceMemory>, u64),
        elements: u64,
    ) -> Result<()> {
        let mut source = from.0.part(from.1, elements * cast.from().bits() / 8);
        let mut target = to.0.part(to.1, elements * cast.to().bits() / 8);
        self.keep(from.0);
        self.keep(to.0);
        self.used().kernels = Some(kernels.clone());
        let width = (cast.to().bits() / 8).max(1);
        if !target.is_multiple_of(width) {
            let message = format!("{target:#x} is no address for elements of {width} bytes");
            return Err(failed(Some(self.stream.gpu.ordinal()), message, None));
        }
        let context = &self.stream.gpu.0;
        let _entered = context.enter()?;
        let function = kernels.function(cast)?;
        let blocks = elements.div_ceil(BLOCK).min(BLOCKS_MAX) as c_uint;
        let mut elements = elements;
        let mut parameters =
            [(&raw mut source).cast(), (&raw mut target).cast(), (&raw mut elements).cast()];
        let (parameters, extra) = (parameters.as_mut_ptr(), null_mut());
        let (raw, threads) = (self.stream.raw, BLOCK as c_uint);
        // SAFETY: the kernel has these parameters, and reads and writes `elements` elements. The memory and the
        // kernels are kept until it is complete.
        unsafe {
            call!(
                context,
                cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, raw, parameters, extra)
            )
        }
    }

    fn keep(&mut self, memory: &Arc<DeviceMemory>) {
        let kept = &mut self.used().memory;
        // Memory that was added earlier may appear twice in the list, which does no harm.
        if !kept.iter().rev().take(4).any(|kept| Arc::ptr_eq(kept, memory)) {
            kept.push(memory.clone());
        }
    }

    /// Ends the submission. The result can wait for the copies.
    pub(crate) fn commit(self) -> Result<SentCopies> {
        let context = &self.stream.gpu.0;
        let entered = context.enter()?;
        let event = self.stream.event()?;
        // SAFETY: the event and the stream exist.
        unsafe { call!(context, cuEventRecord(event.raw, self.stream.raw)) }?;
        drop(entered);
        Ok(SentCopies { sending: self, event })
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        let Some(used) = self.used.take() else { return };
        if let Err(e) = self.stream.drain() {
            // Copies may still be in progress, so their memory is never freed.
            tracing::error!("{e}; memory that the GPU may use stays as it is");
            std::mem::forget(used);
        }
    }
}

/// Copies that were submitted to a stream.
pub(crate) struct SentCopies {
    sending: Sending,
    /// An event that is reached when the copies are complete.
    event: CudaEvent,
}

impl SentCopies {
    /// Waits until the copies are complete. After that the source is free, even if the wait failed.
    pub(crate) fn wait(self) -> Result<()> {
        let SentCopies { mut sending, event } = self;
        {
            let context = &sending.stream.gpu.0;
            let _entered = context.enter()?;
            // SAFETY: the event exists.
            unsafe { call!(context, cuEventSynchronize(event.raw)) }?;
        }
        drop(sending.used.take());
        sending.stream.events.lock().push(event);
        Ok(())
    }
}

/// The kernels, loaded into a GPU.
pub(crate) struct Kernels {
    gpu: Gpu,
    module: sys::CUmodule,
    /// Kernels that were used, by name.
    functions: Mutex<HashMap<&'static str, sys::CUfunction>>,
}

// SAFETY: any thread may use modules and functions, and several threads may use them at once.
unsafe impl Send for Kernels {}
// SAFETY: the driver lets any thread use the handle.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the kernels. The driver compiles them.
    pub(crate) fn load(gpu: &Gpu) -> Result<Arc<Kernels>> {
        let _entered = gpu.0.enter()?;
        let mut module = null_mut();
        // SAFETY: the text ends with a zero byte. The call writes to the pointer.
        unsafe { call!(gpu.0, cuModuleLoadData(&mut module, PTX.as_ptr().cast())) }?;
        Ok(Arc::new(Kernels { gpu: gpu.clone(), module, functions: Mutex::default() }))
    }

    /// The kernel for `cast`. The context has to be bound.
    fn function(&self, cast: Cast) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock();
        if let Some(function) = functions.get(cast.kernel()) {
            return Ok(*function);
        }
        let name = CString::new(cast.kernel()).expect("names of kernels have no zero");
        let mut function = null_mut();
        // SAFETY: the call writes to the pointer, and the module exists.
        unsafe {
            call!(self.gpu.0, cuModuleGetFunction(&mut function, self.module, name.as_ptr()))
        }?;
        functions.insert(cast.kernel(), function);
        Ok(function)
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernels of {:?}", self.gpu)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: `load` has loaded the module. Work that uses it keeps it alive, so none is in progress.
        self.gpu.0.give_back(|gpu| unsafe { call!(gpu, cuModuleUnload(self.module)) });
    }
}
