//! The state of the library: registered files and memory, the calls so far, and the settings of a test.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

/// Codes of the library, as in `cufile.h`. Lower codes are those of the system.
pub(crate) mod code {
    use std::ffi::c_int;

    pub(crate) const FIRST: c_int = 5000;
    pub(crate) const DRIVER_NOT_INITIALIZED: c_int = 5001;
    pub(crate) const INVALID_VALUE: c_int = 5022;
    pub(crate) const INVALID_FILE_TYPE: c_int = 5013;
    pub(crate) const INVALID_FILE_OPEN_FLAG: c_int = 5014;
    pub(crate) const MEMORY_ALREADY_REGISTERED: c_int = 5023;
    pub(crate) const MEMORY_NOT_REGISTERED: c_int = 5024;
    pub(crate) const DRIVER_ALREADY_OPEN: c_int = 5026;
    pub(crate) const HANDLE_NOT_REGISTERED: c_int = 5027;
    pub(crate) const HANDLE_ALREADY_REGISTERED: c_int = 5028;
}

/// The settings of the library.
#[derive(Default)]
pub(crate) struct Settings {
    /// The most bytes that one read returns. 0 means no limit.
    pub(crate) short: usize,
    /// The delay of reads, and of the opening of the driver, in milliseconds.
    pub(crate) late: u64,
    pub(crate) late_open: u64,
    /// Calls that have to fail: name, number of the call from 1 (0 means all calls), and code.
    fail: Vec<(String, u64, c_int)>,
}

impl Settings {
    /// Sets one of the settings. Returns whether it exists and accepts the value.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> bool {
        match (key, value.parse::<u64>()) {
            ("short", Ok(n)) => self.short = n as usize,
            ("late", Ok(n)) => self.late = n,
            ("late_open", Ok(n)) => self.late_open = n,
            ("fail", _) => {
                let failures = value.split(',').filter(|one| !one.is_empty()).map(failure);
                let Some(failures) = failures.collect() else { return false };
                self.fail = failures;
            }
            _ => return false,
        }
        true
    }
}

/// Parses `name:nth:code`.
fn failure(text: &str) -> Option<(String, u64, c_int)> {
    let mut words = text.split(':');
    let (call, nth, code) = (words.next()?, words.next()?, words.next()?);
    Some((call.to_owned(), nth.parse().ok()?, code.parse().ok()?))
}

/// A registered file.
pub(crate) struct File {
    pub(crate) fd: c_int,
    /// Number of reads that are under way.
    pub(crate) readers: u64,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) settings: Settings,
    pub(crate) open: bool,
    pub(crate) files: BTreeMap<usize, File>,
    /// The length of each piece of registered memory, by its address.
    pub(crate) memory: BTreeMap<u64, u64>,
    pub(crate) last_handle: usize,
    calls: BTreeMap<&'static str, u64>,
    violations: Vec<String>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

pub(crate) fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Forgets the calls and the violations so far.
    pub(crate) fn forget(&mut self) {
        self.calls.clear();
        self.violations.clear();
    }

    /// Counts a call. Returns the code with which it has to fail, if it has to.
    pub(crate) fn counted(&mut self, name: &'static str) -> Option<c_int> {
        let nth = self.calls.entry(name).or_default();
        *nth += 1;
        let nth = *nth;
        let mut all = self.settings.fail.iter();
        all.find(|one| one.0 == name && (one.1 == nth || one.1 == 0)).map(|one| one.2)
    }

    /// Records something that no correct program does.
    pub(crate) fn violation(&mut self, what: String) {
        self.violations.push(what);
    }

    /// Records the end of a read of file `key`.
    pub(crate) fn done(&mut self, key: usize) {
        if let Some(file) = self.files.get_mut(&key) {
            file.readers -= 1;
        }
    }

    pub(crate) fn report(&self) -> Value {
        json!({
            "calls": self.calls,
            "violations": self.violations,
            "live": { "files": self.files.len(), "memory": self.memory.len() },
        })
    }
}
