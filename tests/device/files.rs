//! The library of tests/fakecufile, which is loaded as the cuFile of this process.

use std::path::PathBuf;

use super::fake::{Fake, Library, Report};

/// The library and the driver, for one test at a time. At the end of the test no object may be left in them, and they
/// must not have seen a call that no correct program makes.
pub(crate) struct CuFile {
    pub(crate) cuda: Fake,
}

static LIBRARY: Library = Library::new("libfakecufile.so", c"libcufile.so.0", "fakecufile");

/// File of the library.
pub(crate) fn library() -> PathBuf {
    LIBRARY.path()
}

/// A function of the library.
///
/// # Safety
/// `F` is its type.
pub(crate) unsafe fn function<F: Copy>(name: &str) -> F {
    // SAFETY: the caller promises that `F` is the type of the function.
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
        LIBRARY.set(key, value);
    }

    /// Makes both forget all calls so far.
    pub(crate) fn forget(&self) {
        self.cuda.forget();
        LIBRARY.forget();
    }

    pub(crate) fn report(&self) -> Report {
        LIBRARY.report()
    }

    pub(crate) fn assert_clean(&self) {
        LIBRARY.assert_clean();
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
