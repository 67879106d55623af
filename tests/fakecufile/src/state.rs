//! Everything the library knows: files, memory, what was called, and what a test wants of it.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

/// Codes of the library, as `cufile.h` has them; below them are those of the system.
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

/// How the library behaves.
#[derive(Default)]
pub(crate) struct Settings {
    /// Most that one read answers, in bytes; 0: all.
    pub(crate) short: usize,
    /// How late reads are, and the opening of the driver, in milliseconds.
    pub(crate) late: u64,
    pub(crate) late_open: u64,
    /// Calls that fail: name, which one from 1 or 0 for all, code.
    fail: Vec<(String, u64, c_int)>,
}

impl Settings {
    /// Sets one of them; says whether it could.
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

/// `name:nth:code`.
fn failure(text: &str) -> Option<(String, u64, c_int)> {
    let mut words = text.split(':');
    let (call, nth, code) = (words.next()?, words.next()?, words.next()?);
    Some((call.to_owned(), nth.parse().ok()?, code.parse().ok()?))
}

/// A registered file.
pub(crate) struct File {
    pub(crate) fd: c_int,
    /// Reads under way.
    pub(crate) readers: u64,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) settings: Settings,
    pub(crate) open: bool,
    pub(crate) files: BTreeMap<usize, File>,
    /// Registered memory: its length by its address.
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
    /// Forgets what was called so far, and what was wrong with it.
    pub(crate) fn forget(&mut self) {
        self.calls.clear();
        self.violations.clear();
    }

    /// Counts a call; the code to fail with where it is one that is to fail.
    pub(crate) fn counted(&mut self, name: &'static str) -> Option<c_int> {
        let nth = self.calls.entry(name).or_default();
        *nth += 1;
        let nth = *nth;
        let mut all = self.settings.fail.iter();
        all.find(|one| one.0 == name && (one.1 == nth || one.1 == 0)).map(|one| one.2)
    }

    /// Something that no correct program does.
    pub(crate) fn violation(&mut self, what: String) {
        self.violations.push(what);
    }

    /// A read of file `key` is over.
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
