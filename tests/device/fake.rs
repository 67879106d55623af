//! The CUDA driver of tests/fakecuda, which is loaded as the driver of this process.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use nix::libc;
use proptest::prelude::*;
use serde_json::Value;
use tensorfs::internal::device::DeviceRegion;
use tensorfs::internal::plan::{Plan, TensorRequest};

use super::common::Cut;
use super::common::requests::expected;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The driver, for one test at a time. At the end of the test no object may be left in it, and it must not have seen a
/// call that no correct program makes.
pub(crate) struct Fake(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

/// Numbers of calls of the driver, and of objects that are alive.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) calls: BTreeMap<String, u64>,
    pub(crate) copied: BTreeMap<String, u64>,
    pub(crate) live: BTreeMap<String, u64>,
    pub(crate) violations: Vec<String>,
}

impl Report {
    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.calls.get(name).copied().unwrap_or(0)
    }
}

/// A library that cargo has built for this test. It replaces a real library.
pub(crate) struct Library {
    file: &'static str,
    /// File name of the real library, which is also that of this one.
    name: &'static CStr,
    /// Prefix of its functions for tests.
    prefix: &'static str,
    handle: OnceLock<usize>,
}

impl Library {
    pub(crate) const fn new(
        file: &'static str,
        name: &'static CStr,
        prefix: &'static str,
    ) -> Library {
        Library { file, name, prefix, handle: OnceLock::new() }
    }

    pub(crate) fn path(&self) -> PathBuf {
        let path = std::env::current_exe().unwrap().with_file_name(self.file);
        assert!(path.exists(), "{} is not there", path.display());
        path
    }

    /// Loads this library before any code loads the real one. A later load by the same name then gets this library.
    fn handle(&self) -> usize {
        *self.handle.get_or_init(|| {
            let path = CString::new(self.path().to_str().unwrap()).unwrap();
            // SAFETY: the library is one of this repository, whose initialisers do nothing.
            let own = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
            assert!(!own.is_null(), "{} cannot be loaded", self.file);
            // SAFETY: the library is loaded already, so no initialiser runs.
            let found = unsafe { libc::dlopen(self.name.as_ptr(), libc::RTLD_NOW) };
            assert_eq!(own, found, "another {:?} would be used", self.name);
            own as usize
        })
    }

    /// A function of it.
    ///
    /// # Safety
    /// `F` is its type.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> F {
        let text = CString::new(name).unwrap();
        // SAFETY: the library is loaded, the name ends with a zero.
        let symbol = unsafe { libc::dlsym(self.handle() as *mut c_void, text.as_ptr()) };
        assert!(!symbol.is_null() && size_of::<F>() == size_of::<*mut c_void>(), "no {name}");
        // SAFETY: the caller promises that `F` is the type of the function, and both are as wide as a pointer.
        unsafe { std::mem::transmute_copy(&symbol) }
    }

    pub(crate) fn set(&self, key: &str, value: impl ToString) {
        let [key, value] = [key, &value.to_string()].map(|text| CString::new(text).unwrap());
        // SAFETY: this is the type of the function.
        let configure: extern "C" fn(*const c_char, *const c_char) -> u32 =
            unsafe { self.function(&format!("{}_configure", self.prefix)) };
        assert_eq!(configure(key.as_ptr(), value.as_ptr()), 0, "{key:?} = {value:?}");
    }

    /// Makes the library forget all calls so far.
    pub(crate) fn forget(&self) {
        // SAFETY: this is the type of the function.
        let forget: extern "C" fn() = unsafe { self.function(&format!("{}_forget", self.prefix)) };
        forget();
    }

    pub(crate) fn report(&self) -> Report {
        // SAFETY: this is the type of the function.
        let report: extern "C" fn(*mut u8, usize) -> usize =
            unsafe { self.function(&format!("{}_report", self.prefix)) };
        let mut text = vec![0; 1 << 16];
        let len = report(text.as_mut_ptr(), text.len());
        let report: Value = serde_json::from_slice(&text[..len]).unwrap();
        let numbers = |key: &str| {
            let entries = report[key].as_object().into_iter().flatten();
            entries.map(|(name, value)| (name.clone(), value.as_u64().unwrap())).collect()
        };
        let violations = report["violations"].as_array().unwrap().iter();
        Report {
            calls: numbers("calls"),
            copied: numbers("copied"),
            live: numbers("live"),
            violations: violations.map(|text| text.as_str().unwrap().to_owned()).collect(),
        }
    }

    /// Fails if an object is left, or if there was a wrong call. It waits for late reads of a load that has failed,
    /// because their end frees their memory.
    pub(crate) fn assert_clean(&self) {
        let mut report = self.report();
        for _ in 0..1000 {
            if report.live.values().all(|left| *left == 0) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
            report = self.report();
        }
        assert_eq!(report.violations, [""; 0]);
        assert!(report.live.values().all(|left| *left == 0), "left: {:?}", report.live);
    }
}

static DRIVER: Library = Library::new("libfakecuda.so", c"libcuda.so", "fakecuda");

/// File of the driver.
pub(crate) fn library() -> PathBuf {
    DRIVER.path()
}

/// A function of the driver.
///
/// # Safety
/// `F` is its type.
pub(crate) unsafe fn function<F: Copy>(name: &str) -> F {
    // SAFETY: the caller promises that `F` is the type of the function.
    unsafe { DRIVER.function(name) }
}

/// The index in `bytes` at which `part` begins.
pub(crate) fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    let (start, part_start) = (bytes.as_ptr().cast(), part.as_ptr().cast());
    // SAFETY: both have at least `len` bytes.
    let found = unsafe { libc::memmem(start, bytes.len(), part_start, part.len()) };
    (!found.is_null()).then(|| found.addr() - bytes.as_ptr().addr())
}

impl Fake {
    pub(crate) fn new() -> Fake {
        let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let fake = Fake(guard);
        for (key, value) in
            [("devices", "2"), ("capacity", "1073741824"), ("delay", "0"), ("strict", "1")]
        {
            fake.set(key, value);
        }
        fake.set("fail", "");
        fake.forget();
        fake
    }

    pub(crate) fn set(&self, key: &str, value: impl ToString) {
        DRIVER.set(key, value);
    }

    pub(crate) fn forget(&self) {
        DRIVER.forget();
    }

    pub(crate) fn report(&self) -> Report {
        DRIVER.report()
    }

    pub(crate) fn assert_clean(&self) {
        DRIVER.assert_clean();
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_clean();
        }
    }
}

/// Asserts that every request got its bytes, and that no other byte of the memory of the caller was written to.
pub(crate) fn check_filled(
    plan: &Plan,
    regions: &[DeviceRegion],
    tensors: &[Cut],
    tensor_requests: &[TensorRequest],
) -> Result<(), TestCaseError> {
    for (number, tensor_request) in tensor_requests.iter().enumerate() {
        let placement = &plan.placements[number];
        let region = &regions[placement.region as usize];
        let mut bytes = vec![0; placement.len as usize];
        if !bytes.is_empty() {
            region.memory.read(region.offset + placement.offset, &mut bytes).unwrap();
        }
        prop_assert!(
            bytes == expected(&tensors[tensor_request.tensor], tensor_request),
            "other bytes arrived"
        );
        if tensor_request.destination.is_some() {
            // The memory before the tensor belongs to another owner, and must be unchanged.
            let mut before = vec![0; placement.offset as usize];
            region.memory.read(region.offset, &mut before).unwrap();
            prop_assert!(before.iter().all(|&byte| byte == 0xA5));
        }
    }
    Ok(())
}
