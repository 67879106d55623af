//! A cuFile without its kernel module, for tests: the part of `libcufile.so.0` that tensorfs calls.
//!
//! The library reads into the memory of the devices of tests/fakecuda, which has to be loaded first. Calls whose effect
//! is undefined in the real library are refused, or reported as violations by `fakecufile_report`.

mod memory;
mod state;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::Duration;

use nix::libc;

use memory::Device;
use state::{File, State, code, lock};

/// `CUfileError_t`.
#[repr(C)]
struct Status {
    code: c_int,
    cuda: c_int,
}

/// `CUfileDescr_t`: the descriptor is the beginning of a union as wide and aligned as a pointer.
#[repr(C)]
struct Description {
    kind: c_int,
    _before: c_int,
    fd: c_int,
    _rest: c_int,
    operations: *const c_void,
}

const _: () = assert!(size_of::<Description>() == 24);

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const OPAQUE_FD: c_int = 1;

/// Carries out a call: counts it, and makes it fail if a test wants that.
fn entry(name: &'static str, body: impl FnOnce(&mut State) -> Result<(), c_int>) -> Status {
    let mut state = lock();
    let outcome = state.counted(name).map_or_else(|| body(&mut state), Err);
    Status { code: outcome.err().unwrap_or(0), cuda: 0 }
}

#[unsafe(no_mangle)]
extern "C" fn cuFileSetParameterBool(_parameter: c_int, _value: bool) -> Status {
    entry("cuFileSetParameterBool", |state| {
        if state.open { Err(code::DRIVER_ALREADY_OPEN) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverOpen() -> Status {
    let late = lock().settings.late_open;
    std::thread::sleep(Duration::from_millis(late));
    entry("cuFileDriverOpen", |state| {
        state.open = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileHandleRegister(
    handle: *mut *mut c_void,
    description: *const Description,
) -> Status {
    entry("cuFileHandleRegister", |state| {
        if !state.open {
            return Err(code::DRIVER_NOT_INITIALIZED);
        }
        // SAFETY: callers pass the address of such a structure.
        let Description { kind, fd, operations, .. } = unsafe { description.read() };
        // SAFETY: `fcntl` accepts any number, and reports whether it is an open file.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        if kind != OPAQUE_FD || !operations.is_null() || flags < 0 {
            state.violation(format!("descriptor {fd} of kind {kind} is no open file"));
            return Err(code::INVALID_FILE_TYPE);
        }
        if flags & libc::O_DIRECT == 0 {
            state.violation(format!("descriptor {fd} goes by way of the page cache"));
            return Err(code::INVALID_FILE_OPEN_FLAG);
        }
        if state.files.values().any(|file| file.fd == fd) {
            return Err(code::HANDLE_ALREADY_REGISTERED);
        }
        state.last_handle += 0x10;
        let key = state.last_handle;
        state.files.insert(key, File { fd, readers: 0 });
        // SAFETY: callers pass the address of a variable of this type.
        unsafe { handle.write(key as *mut c_void) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileHandleDeregister(handle: *mut c_void) {
    let mut state = lock();
    let _ = state.counted("cuFileHandleDeregister");
    match state.files.remove(&handle.addr()) {
        None => state.violation(format!("{handle:?} is no handle, and is given back")),
        Some(file) if file.readers > 0 => {
            state.violation("a file is given back while it is read".to_owned());
        }
        Some(_) => {}
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBufRegister(start: u64, len: usize, flags: c_int) -> Status {
    entry("cuFileBufRegister", |state| {
        if !state.open {
            return Err(code::DRIVER_NOT_INITIALIZED);
        }
        if flags != 0 || !Device::get().holds(start, len) {
            state.violation(format!("{len} bytes are registered that are not of the device"));
            return Err(code::INVALID_VALUE);
        }
        if state.memory.contains_key(&start) {
            return Err(code::MEMORY_ALREADY_REGISTERED);
        }
        state.memory.insert(start, len as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBufDeregister(start: u64) -> Status {
    // A call that has to fail is carried out too.
    let mut state = lock();
    let injected = state.counted("cuFileBufDeregister");
    let removed = state.memory.remove(&start);
    match removed {
        None => state.violation("memory is given back that is not registered".to_owned()),
        Some(len) if !Device::get().holds(start, len as usize) => {
            state.violation("memory is freed while it is registered".to_owned());
        }
        Some(_) => {}
    }
    let failed = if removed.is_none() { code::MEMORY_NOT_REGISTERED } else { 0 };
    Status { code: injected.unwrap_or(failed), cuda: 0 }
}

#[unsafe(no_mangle)]
extern "C" fn cuFileRead(
    handle: *mut c_void,
    base: u64,
    len: usize,
    offset: libc::off_t,
    from: libc::off_t,
) -> isize {
    let mut state = lock();
    let key = handle.addr();
    let failure = state.counted("cuFileRead").or_else(|| {
        let Some(file) = state.files.get_mut(&key) else {
            state.violation(format!("{handle:?} is no handle, and is read"));
            return Some(code::HANDLE_NOT_REGISTERED);
        };
        file.readers += 1;
        None
    });
    if let Some(code) = failure {
        return failed(code);
    }
    let (fd, start) = (state.files[&key].fd, base + from as u64);
    // Memory that is not registered has no base for offsets.
    let most = state.memory.get(&base).map_or(len as u64, |most| most - from as u64);
    let inside = (from == 0 || state.memory.contains_key(&base)) && len as u64 <= most;
    if !inside || !Device::get().holds(start, len) {
        state.violation(format!("{len} bytes are read to where the device has fewer"));
        state.done(key);
        return failed(code::INVALID_VALUE);
    }
    let wanted = match state.settings.short {
        0 => len,
        short => len.min(short),
    };
    let late = state.settings.late;
    drop(state);
    let read = memory::read(fd, offset as u64, wanted);
    std::thread::sleep(Duration::from_millis(late));
    let mut state = lock();
    state.done(key);
    match read {
        Err(errno) => failed(errno),
        Ok(bytes) => {
            if !Device::get().write(start, &bytes) {
                state.violation("memory is freed while it is read to".to_owned());
            }
            bytes.len() as isize
        }
    }
}

/// Return value of a failed read: -1 with `errno` for a code of the system, or the negated code of cuFile.
fn failed(code: c_int) -> isize {
    if code >= code::FIRST {
        return -(code as isize);
    }
    // SAFETY: `__errno_location` returns the address of a variable of this thread.
    unsafe { *libc::__errno_location() = code };
    -1
}

// ---------------------------------------------------------------------------------------------
// Entry points for tests.

/// Sets `key` to `value`, both text that ends with a zero. Returns 0, or 1 if there is no such key or value.
#[unsafe(no_mangle)]
extern "C" fn fakecufile_configure(key: *const c_char, value: *const c_char) -> u32 {
    // SAFETY: tests pass text that ends with a zero.
    let text = |at: *const c_char| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned();
    u32::from(!lock().settings.set(&text(key), &text(value)))
}

/// Forgets the calls and violations so far.
#[unsafe(no_mangle)]
extern "C" fn fakecufile_forget() {
    lock().forget();
}

/// Writes the calls, the violations and the live objects as JSON to `to`, at most `len` bytes. Returns the length of
/// the whole JSON text.
#[unsafe(no_mangle)]
extern "C" fn fakecufile_report(to: *mut u8, len: usize) -> usize {
    let text = lock().report().to_string();
    // SAFETY: the caller has `len` bytes there.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to, text.len().min(len)) };
    text.len()
}
