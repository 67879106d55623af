//! The library of tests/fakecufile, loaded as the cuFile of this process.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::fake::{Fake, Library};

/// The library and the driver, for one test at a time. At the end nothing may be left in either,
/// nor may anybody have done what no correct program does.
pub(crate) struct CuFile {
    pub(crate) cuda: Fake,
}

/// What it was asked for, and what is alive.
#[derive(Debug)]
pub(crate) struct Report {
    calls: BTreeMap<String, u64>,
    live: BTreeMap<String, u64>,
    pub(crate) violations: Vec<String>,
}

impl Report {
    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.calls.get(name).copied().unwrap_or(0)
    }
}

static LIBRARY: Library = Library::new("libfakecufile.so", c"libcufile.so.0");

/// File of the library.
pub(crate) fn library() -> PathBuf {
    LIBRARY.path()
}

/// A function of the library.
///
/// # Safety
/// `F` is its type.
pub(crate) unsafe fn function<F: Copy>(name: &str) -> F {
    // SAFETY: the caller's.
    unsafe { LIBRARY.function(name) }
}

impl CuFile {
    pub(crate) fn new() -> CuFile {
        let fake = CuFile { cuda: Fake::new() };
        for (key, value) in [("short", "0"), ("late", "0"), ("late_open", "0"), ("fail", "")] {
            fake.set(key, value);
        }
        fake.forget();
        fake
    }

    pub(crate) fn set(&self, key: &str, value: impl ToString) {
        let [key, value] = [key, &value.to_string()].map(|text| CString::new(text).unwrap());
        // SAFETY: the function's type.
        let configure: extern "C" fn(*const c_char, *const c_char) -> u32 =
            unsafe { function("fakecufile_configure") };
        assert_eq!(configure(key.as_ptr(), value.as_ptr()), 0, "{key:?} = {value:?}");
    }

    /// Forgets what both were asked for.
    pub(crate) fn forget(&self) {
        self.cuda.forget();
        // SAFETY: the function's type.
        let forget: extern "C" fn() = unsafe { function("fakecufile_forget") };
        forget();
    }

    pub(crate) fn report(&self) -> Report {
        // SAFETY: the function's type.
        let report: extern "C" fn(*mut u8, usize) -> usize =
            unsafe { function("fakecufile_report") };
        let mut text = vec![0; 1 << 16];
        let len = report(text.as_mut_ptr(), text.len());
        let report: Value = serde_json::from_slice(&text[..len]).unwrap();
        let numbers = |key: &str| {
            let entries = report[key].as_object().unwrap().iter();
            entries.map(|(name, value)| (name.clone(), value.as_u64().unwrap())).collect()
        };
        let violations = report["violations"].as_array().unwrap().iter();
        Report {
            calls: numbers("calls"),
            live: numbers("live"),
            violations: violations.map(|text| text.as_str().unwrap().to_owned()).collect(),
        }
    }

    /// Fails unless nothing is left and all was done as it should be. Reads of a load that has
    /// failed may still end.
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
        self.cuda.assert_clean();
    }
}

impl Drop for CuFile {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_clean();
        }
    }
}
