//! A CUDA driver without a GPU, for tests: the part of `libcuda.so` that tensorfs calls.
//!
//! The memory of a device is memory of the process, but its addresses cannot be used by host code. Each stream is a
//! thread that does its work in order and with delays. So a program that uses memory again too early gets wrong bytes.
//! Calls whose effect is undefined in the real driver are refused, or reported as violations by `fakecuda_report`.

mod kernels;
mod settings;
mod state;
mod streams;

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use serde_json::{Value, json};

use kernels::Kernel;
use state::{CHANGED, Event, Module, State, code, lock};
use streams::{Rows, Stream, Work};

/// The address of a context is this number plus the ordinal of its device.
const CONTEXTS: u64 = 0x00c0_0000;

thread_local! {
    /// The context of this thread, or zero.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

type Outcome = Result<(), u32>;

/// Carries out a call: counts it, makes it fail if a test wants that, and writes it to the log.
fn entry(name: &'static str, facts: Value, body: impl FnOnce(&mut State) -> Outcome) -> u32 {
    let mut state = lock();
    let injected = state.counted(name);
    let outcome = match injected {
        Some(code) => Err(code),
        None if !state.initialised && name != "cuInit" => Err(code::NOT_INITIALIZED),
        None => body(&mut state),
    };
    let code = outcome.err().unwrap_or(0);
    state.log(name, &facts, code);
    code
}

/// Carries out a call that frees an object. If it has to fail, the object is freed too, and the call returns an error
/// of earlier work, as the real driver does.
fn giving_back(name: &'static str, facts: Value, body: impl FnOnce(&mut State) -> Outcome) -> u32 {
    let mut state = lock();
    let injected = state.counted(name);
    let done = if state.initialised { body(&mut state) } else { Err(code::NOT_INITIALIZED) };
    let code = injected.or(done.err()).unwrap_or(0);
    state.log(name, &facts, code);
    code
}

/// The device whose context is bound to this thread.
fn current(state: &State) -> Result<i32, u32> {
    let ordinal = CURRENT.get().checked_sub(CONTEXTS).ok_or(code::INVALID_CONTEXT)? as i32;
    let held = state.contexts.get(&ordinal).is_some_and(|held| *held > 0);
    if held { Ok(ordinal) } else { Err(code::INVALID_CONTEXT) }
}

/// Writes a result to the address that the caller passed.
fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: callers pass the address of a variable of this type, as the interface of the driver requires.
    unsafe { to.write(value) };
    Ok(())
}

// ---------------------------------------------------------------------------------------------
// The driver, devices and contexts.

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> u32 {
    entry("cuInit", json!({}), |state| {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        state.initialised = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    put(version, 12020).err().unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    entry("cuDeviceGetCount", json!({}), |state| put(count, state.settings.devices))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    entry("cuDeviceGet", json!({ "ordinal": ordinal }), |state| {
        if !(0..state.settings.devices).contains(&ordinal) {
            return Err(code::INVALID_DEVICE);
        }
        put(device, ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> u32 {
    entry("cuDeviceGetName", json!({}), |_| {
        let text = format!("fake {device}\0");
        if (len as usize) < text.len() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller has `len` bytes there, and the text is no longer.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> u32 {
    entry("cuDevicePrimaryCtxRetain", json!({ "device": device }), |state| {
        *state.contexts.entry(device).or_default() += 1;
        put(context, CONTEXTS + device as u64)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> u32 {
    giving_back("cuDevicePrimaryCtxRelease_v2", json!({ "device": device }), |state| {
        let held = state.contexts.get_mut(&device).filter(|held| **held > 0);
        *held.ok_or(code::INVALID_CONTEXT)? -= 1;
        if state.contexts[&device] == 0 {
            let left = [
                state.device.values().filter(|one| one.ordinal == device).count(),
                state.host.values().filter(|one| one.ordinal == device).count(),
                state.streams.values().filter(|one| one.ordinal == device).count(),
                state
                    .events
                    .values()
                    .filter(|one| one.ordinal == device && !one.given_back)
                    .count(),
                state.modules.values().filter(|one| one.ordinal == device).count(),
            ];
            if left != [0; 5] {
                state.violation(format!(
                    "the context of device {device} is let go of with [memory, pinned memory, \
                     streams, events, modules] = {left:?}"
                ));
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: *mut u64) -> u32 {
    entry("cuCtxGetCurrent", json!({}), |_| put(context, CURRENT.get()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: u64) -> u32 {
    entry("cuCtxSetCurrent", json!({}), |_| {
        CURRENT.set(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> u32 {
    waiting("cuCtxSynchronize", json!({}), |state| {
        let ordinal = current(state)?;
        Ok(state.streams.values().filter(|s| s.ordinal == ordinal).all(Stream::is_idle))
    })
}

/// Carries out a call that waits until `done` is true.
fn waiting(
    name: &'static str,
    facts: Value,
    done: impl Fn(&mut State) -> Result<bool, u32>,
) -> u32 {
    let code = entry(name, facts, |_| Ok(()));
    if code != 0 {
        return code;
    }
    let mut state = lock();
    loop {
        match done(&mut state) {
            Ok(true) => return 0,
            Ok(false) => {
                state = CHANGED.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            Err(code) => return code,
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Memory.

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    entry("cuMemGetInfo_v2", json!({}), |state| {
        let used = state.used(current(state)?);
        put(free, (state.settings.capacity.saturating_sub(used)) as usize)?;
        put(total, state.settings.capacity as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> u32 {
    entry("cuMemAlloc_v2", json!({ "len": len }), |state| {
        let ordinal = current(state)?;
        let start = state.allocate_on_device(len as u64, ordinal);
        put(address, start.ok_or(code::OUT_OF_MEMORY)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    giving_back("cuMemFree_v2", json!({}), |state| {
        current(state)?;
        state.free_on_device(address)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostAlloc(address: *mut u64, len: usize, flags: c_uint) -> u32 {
    entry("cuMemHostAlloc", json!({ "len": len, "flags": flags }), |state| {
        let ordinal = current(state)?;
        let start = state.allocate_on_host(len as u64, ordinal);
        put(address, start.ok_or(code::OUT_OF_MEMORY)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: u64) -> u32 {
    giving_back("cuMemFreeHost", json!({}), |state| {
        current(state)?;
        state.free_on_host(address)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(address: u64, len: usize, flags: c_uint) -> u32 {
    entry("cuMemHostRegister_v2", json!({ "len": len, "flags": flags }), |state| {
        let ordinal = current(state)?;
        state.register(address, len as u64, ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(address: u64) -> u32 {
    giving_back("cuMemHostUnregister", json!({}), |state| {
        current(state)?;
        state.unregister(address)
    })
}

// ---------------------------------------------------------------------------------------------
// Copies.

/// A copy of one row of bytes.
fn row(from: u64, to: u64, len: usize) -> Rows {
    let width = len as u64;
    Rows { from, from_pitch: width, to, to_pitch: width, width, height: 1 }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> u32 {
    entry("cuMemcpyHtoDAsync_v2", json!({ "len": len }), |state| {
        let ordinal = current(state)?;
        state.on_host(from, len as u64)?;
        let to = state.on_device(to, len as u64, ordinal)?;
        state.copied("host_to_device", len as u64);
        enqueue(state, stream, Work::Copy(row(from, to, len)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(to: u64, from: u64, len: usize) -> u32 {
    entry("cuMemcpyHtoD_v2", json!({ "len": len }), |state| {
        let to = state.on_device(to, len as u64, current(state)?)?;
        state.copied("host_to_device", len as u64);
        row(from, to, len).copy();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(to: u64, from: u64, len: usize) -> u32 {
    entry("cuMemcpyDtoH_v2", json!({ "len": len }), |state| {
        let from = state.on_device(from, len as u64, current(state)?)?;
        state.copied("device_to_host", len as u64);
        row(from, to, len).copy();
        Ok(())
    })
}

/// `CUDA_MEMCPY2D` of `cuda.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Memcpy2d {
    from_x: usize,
    from_y: usize,
    from_kind: c_uint,
    from_host: u64,
    from_device: u64,
    from_array: u64,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_kind: c_uint,
    to_host: u64,
    to_device: u64,
    to_array: u64,
    to_pitch: usize,
    width: usize,
    height: usize,
}

/// The largest pitch, in bytes, that devices accept.
const PITCH_MAX: usize = (1 << 31) - 1;
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;

impl Memcpy2d {
    /// The rows to copy, and whether they come from a device. The offsets of the structure are not supported.
    fn rows(&self, state: &State, pinned: bool) -> Result<(Rows, bool), u32> {
        let pitches = [self.from_pitch, self.to_pitch];
        let fits = pitches.iter().all(|pitch| (self.width..=PITCH_MAX).contains(pitch));
        let offsets = [self.from_x, self.from_y, self.to_x, self.to_y];
        if !fits || offsets != [0; 4] || self.width == 0 || self.height == 0 {
            return Err(code::INVALID_VALUE);
        }
        let ordinal = current(state)?;
        let mut rows = Rows {
            from: self.from_host,
            from_pitch: self.from_pitch as u64,
            to: self.to_device,
            to_pitch: self.to_pitch as u64,
            width: self.width as u64,
            height: self.height as u64,
        };
        let (from, to) = rows.spans();
        match (self.from_kind, self.to_kind) {
            (HOST, DEVICE) if pinned => state.on_host(rows.from, from)?,
            (HOST, DEVICE) => {}
            (DEVICE, DEVICE) => rows.from = state.on_device(self.from_device, from, ordinal)?,
            _ => return Err(code::INVALID_VALUE),
        }
        rows.to = state.on_device(rows.to, to, ordinal)?;
        Ok((rows, self.from_kind == DEVICE))
    }
}

fn copy_rows(state: &mut State, copy: *const Memcpy2d, pinned: bool) -> Result<Rows, u32> {
    // SAFETY: callers pass the address of such a structure.
    let copy = unsafe { copy.read() };
    let (rows, on_device) = copy.rows(state, pinned)?;
    let direction = if on_device { "device_to_device" } else { "host_to_device" };
    state.copied(direction, rows.width * rows.height);
    Ok(rows)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpy2DAsync_v2(copy: *const Memcpy2d, stream: u64) -> u32 {
    entry("cuMemcpy2DAsync_v2", json!({}), |state| {
        let rows = copy_rows(state, copy, true)?;
        enqueue(state, stream, Work::Copy(rows))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpy2D_v2(copy: *const Memcpy2d) -> u32 {
    entry("cuMemcpy2D_v2", json!({}), |state| {
        copy_rows(state, copy, false)?.copy();
        Ok(())
    })
}

// ---------------------------------------------------------------------------------------------
// Streams and events.

/// Adds work to the queue of a stream. The legacy stream has no handle and no queue: its work is done at once.
fn enqueue(state: &mut State, stream: u64, work: Work) -> Outcome {
    let ordinal = current(state)?;
    match (stream, work) {
        (0, Work::Copy(rows)) => rows.copy(),
        (0, Work::Launch { kernel, from, to, elements }) => kernel.run(from, to, elements),
        (0, Work::Record { event }) => {
            state.reach(event);
            CHANGED.notify_all();
        }
        // Work in the legacy stream is done at once, so it cannot come before the event.
        (0, Work::Wait { .. }) => {}
        (_, work) => {
            let stream = state.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)?;
            if stream.ordinal != ordinal {
                return Err(code::INVALID_HANDLE);
            }
            stream.push(work);
        }
    }
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(stream: *mut u64, _flags: c_uint) -> u32 {
    entry("cuStreamCreate", json!({}), |state| {
        let ordinal = current(state)?;
        put(stream, Stream::start(state, ordinal))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(handle: u64) -> u32 {
    let mut thread = None;
    let code = giving_back("cuStreamDestroy_v2", json!({}), |state| {
        current(state)?;
        let stream = state.streams.get_mut(&handle).ok_or(code::INVALID_HANDLE)?;
        thread = stream.close();
        Ok(())
    });
    if let Some(thread) = thread {
        thread.join().expect("a stream ends");
        lock().streams.remove(&handle);
    }
    code
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> u32 {
    waiting("cuStreamSynchronize", json!({}), |state| {
        current(state)?;
        let stream = state.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
        Ok(stream.is_idle())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> u32 {
    entry("cuStreamWaitEvent", json!({}), |state| {
        let until = state.event(event)?.recorded;
        enqueue(state, stream, Work::Wait { event, until })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(event: *mut u64, _flags: c_uint) -> u32 {
    entry("cuEventCreate", json!({}), |state| {
        let ordinal = current(state)?;
        let handle = state.handle();
        state.events.insert(handle, Event { ordinal, ..Event::default() });
        put(event, handle)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> u32 {
    giving_back("cuEventDestroy_v2", json!({}), |state| {
        current(state)?;
        state.event(event)?.given_back = true;
        state.forget_event(event);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: u64) -> u32 {
    entry("cuEventRecord", json!({}), |state| {
        state.event(event)?.recorded += 1;
        enqueue(state, stream, Work::Record { event })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> u32 {
    entry("cuEventQuery", json!({}), |state| {
        let event = state.event(event)?;
        if event.reached < event.recorded { Err(code::NOT_READY) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> u32 {
    waiting("cuEventSynchronize", json!({}), |state| {
        current(state)?;
        let event = state.event(event)?;
        Ok(event.reached >= event.recorded)
    })
}

// ---------------------------------------------------------------------------------------------
// Modules and kernels.

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(module: *mut u64, image: *const c_char) -> u32 {
    entry("cuModuleLoadData", json!({}), |state| {
        let ordinal = current(state)?;
        // SAFETY: PTX is text that ends with a zero.
        let text = unsafe { CStr::from_ptr(image) }.to_str().map_err(|_| code::INVALID_IMAGE)?;
        if !text.contains(".version") {
            return Err(code::INVALID_IMAGE);
        }
        let entries = text.split(".entry").skip(1);
        let kernels = entries.filter_map(|rest| rest.trim_start().split(['(', ' ', '\n']).next());
        let kernels = kernels.map(str::to_owned).collect();
        let handle = state.handle();
        state.modules.insert(handle, Module { kernels, ordinal });
        put(module, handle)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: u64) -> u32 {
    giving_back("cuModuleUnload", json!({}), |state| {
        current(state)?;
        state.functions.retain(|_, (of, _)| *of != module);
        state.modules.remove(&module).map(drop).ok_or(code::INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) -> u32 {
    entry("cuModuleGetFunction", json!({}), |state| {
        current(state)?;
        // SAFETY: names are text that ends with a zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let kernels = &state.modules.get(&module).ok_or(code::INVALID_HANDLE)?.kernels;
        let at = kernels.iter().position(|kernel| *kernel == name).ok_or(code::NOT_FOUND)?;
        let handle = state.handle();
        state.functions.insert(handle, (module, at));
        put(function, handle)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared: c_uint,
    stream: u64,
    parameters: *const *const u64,
    _extra: *const c_void,
) -> u32 {
    entry("cuLaunchKernel", json!({}), |state| {
        let ordinal = current(state)?;
        let (module, at) = state.functions.get(&function).ok_or(code::INVALID_HANDLE)?;
        let kernel = Kernel::named(&state.modules[module].kernels[*at]).ok_or(code::NOT_FOUND)?;
        let blocks = [grid_x, grid_y, grid_z, block_y, block_z];
        if blocks.contains(&0) || !(1..=1024).contains(&block_x) {
            return Err(code::INVALID_VALUE);
        }
        let parameter = |at: usize| {
            // SAFETY: the kernels here have three parameters of eight bytes each.
            unsafe { parameters.add(at).read().read() }
        };
        let (from, to, elements) = (parameter(0), parameter(1), parameter(2));
        let (from_len, to_len) = kernel.lens(elements);
        let (from_align, to_align) = kernel.aligns();
        if !from.is_multiple_of(from_align) || !to.is_multiple_of(to_align) {
            state.violation(format!("a kernel gets the addresses {from:#x} and {to:#x}"));
        }
        let from = state.on_device(from, from_len, ordinal)?;
        let to = state.on_device(to, to_len, ordinal)?;
        enqueue(state, stream, Work::Launch { kernel, from, to, elements })
    })
}

// ---------------------------------------------------------------------------------------------
// Names of codes.

/// The codes that this driver returns by itself, and the codes with which tests make calls fail.
const NAMES: &[(u32, &CStr, &CStr)] = &[
    (code::INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (code::OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (code::NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (code::INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (code::INVALID_IMAGE, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (code::INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (code::INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (code::NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (code::NOT_READY, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (code::ALREADY_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"registered twice"),
    (code::NOT_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"not registered"),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn name_of(
    error: u32,
    name: *mut *const c_char,
    pick: fn(&(u32, &'static CStr, &'static CStr)) -> &'static CStr,
) -> u32 {
    let found = NAMES.iter().find(|(code, ..)| *code == error);
    let text = found.map_or(std::ptr::null(), |found| pick(found).as_ptr());
    put(name, text).err().unwrap_or(if text.is_null() { code::INVALID_VALUE } else { 0 })
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: u32, name: *mut *const c_char) -> u32 {
    name_of(error, name, |(_, name, _)| name)
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(error: u32, text: *mut *const c_char) -> u32 {
    name_of(error, text, |(_, _, text)| text)
}

// ---------------------------------------------------------------------------------------------
// Entry points for tests.

/// Sets `key` to `value`, both text that ends with a zero. Returns 0, or 1 if there is no such key or value.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_configure(key: *const c_char, value: *const c_char) -> u32 {
    // SAFETY: tests pass text that ends with a zero.
    let text = |at: *const c_char| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned();
    let mut state = lock();
    let set = state.settings.set(&text(key), &text(value));
    state.settled();
    u32::from(!set)
}

/// Forgets the calls and violations so far.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_forget() {
    lock().forget();
}

/// Writes the calls, the violations and the live objects as JSON to `to`, at most `len` bytes. Returns the length of
/// the whole JSON text.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_report(to: *mut u8, len: usize) -> usize {
    let text = lock().report().to_string();
    // SAFETY: the caller has `len` bytes there.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to, text.len().min(len)) };
    text.len()
}

/// For tests/fakecufile: returns 0 if the device whose context is bound has `len` bytes at `address`.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_holds(address: u64, len: usize) -> u32 {
    let state = lock();
    let held = current(&state).and_then(|device| state.on_device(address, len as u64, device));
    held.err().unwrap_or(0)
}

/// For tests/fakecufile: writes `len` bytes to the device whose context is bound, without waiting for a stream. Returns
/// 0 if the device has these bytes.
#[unsafe(no_mangle)]
extern "C" fn fakecuda_write(address: u64, from: u64, len: usize) -> u32 {
    let mut state = lock();
    let held = current(&state).and_then(|device| state.on_device(address, len as u64, device));
    let Ok(to) = held else { return code::INVALID_VALUE };
    if state.in_flight(to, len as u64) {
        state.violation(format!("{len} bytes are read to while work uses them"));
    }
    state.copied("file_to_device", len as u64);
    row(from, to, len).copy();
    0
}
