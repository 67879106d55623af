//! The state of the driver: memory of devices, pinned memory, streams, events, modules, and the calls so far. One lock
//! protects the whole state, and every change wakes all waiting threads.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::settings::Settings;
use crate::streams::Stream;

/// A bit that is set in every address of a device. A program that uses such an address on the host crashes at once.
pub(crate) const TAG: u64 = 1 << 62;

/// Content of fresh memory of a device.
const FRESH: u8 = 0xA5;

/// Content of pinned memory after it is freed.
const FREED: u8 = 0xDD;

/// Alignment of memory, on devices and pinned.
const ALIGN: usize = 4096;

/// Codes of the driver, as `cuda.h` has them.
pub(crate) mod code {
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NOT_INITIALIZED: u32 = 3;
    pub(crate) const INVALID_DEVICE: u32 = 101;
    pub(crate) const INVALID_IMAGE: u32 = 200;
    pub(crate) const INVALID_CONTEXT: u32 = 201;
    pub(crate) const INVALID_HANDLE: u32 = 400;
    pub(crate) const NOT_FOUND: u32 = 500;
    pub(crate) const NOT_READY: u32 = 600;
    pub(crate) const ALREADY_REGISTERED: u32 = 712;
    pub(crate) const NOT_REGISTERED: u32 = 713;
}

/// Memory of a device, by its address without the tag.
pub(crate) struct OnDevice {
    pub(crate) len: u64,
    pub(crate) ordinal: i32,
}

/// Memory of the host that a device can access, by address.
pub(crate) struct OnHost {
    pub(crate) len: u64,
    /// Whether the driver has allocated the memory. Otherwise the program has registered it.
    pub(crate) own: bool,
    pub(crate) ordinal: i32,
}

/// An event: how often it was recorded, and how many of these records the streams have reached.
#[derive(Default)]
pub(crate) struct Event {
    pub(crate) recorded: u64,
    pub(crate) reached: u64,
    pub(crate) ordinal: i32,
    /// Whether the program has destroyed the event. The entry stays until all its records are reached, for work that
    /// waits for them.
    pub(crate) given_back: bool,
}

/// A module: names of its kernels.
pub(crate) struct Module {
    pub(crate) kernels: Vec<String>,
    pub(crate) ordinal: i32,
}

pub(crate) struct State {
    pub(crate) settings: Settings,
    pub(crate) initialised: bool,
    /// The number of references to the primary context of each device.
    pub(crate) contexts: BTreeMap<i32, u64>,
    pub(crate) device: BTreeMap<u64, OnDevice>,
    pub(crate) host: BTreeMap<u64, OnHost>,
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) events: BTreeMap<u64, Event>,
    pub(crate) modules: BTreeMap<u64, Module>,
    /// Handles of kernels, each with its module and its number in the module.
    pub(crate) functions: BTreeMap<u64, (u64, usize)>,
    next_handle: u64,
    random: u64,
    calls: BTreeMap<&'static str, u64>,
    /// Bytes copied, by direction.
    copied: BTreeMap<&'static str, u64>,
    violations: Vec<String>,
    log: Option<File>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::new()));

/// Signals every change, to streams without work and to callers that wait for streams.
pub(crate) static CHANGED: Condvar = Condvar::new();

pub(crate) fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn new() -> State {
        let mut state = State {
            settings: Settings::from_environment(),
            initialised: false,
            contexts: BTreeMap::new(),
            device: BTreeMap::new(),
            host: BTreeMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            next_handle: 0x1000,
            random: 1,
            calls: BTreeMap::new(),
            copied: BTreeMap::new(),
            violations: Vec::new(),
            log: None,
        };
        state.settled();
        state
    }

    /// Applies changed settings.
    pub(crate) fn settled(&mut self) {
        self.random = self.settings.seed;
        self.log = self.settings.log.as_ref().map(|path| {
            let file = File::options().create(true).append(true).open(path);
            file.unwrap_or_else(|e| panic!("{path}: {e}"))
        });
    }

    /// Forgets the calls and the violations so far.
    pub(crate) fn forget(&mut self) {
        self.calls.clear();
        self.copied.clear();
        self.violations.clear();
    }

    pub(crate) fn handle(&mut self) -> u64 {
        self.next_handle += 0x10;
        self.next_handle
    }

    /// Counts a call. Returns the code with which it has to fail, if it has to.
    pub(crate) fn counted(&mut self, name: &'static str) -> Option<u32> {
        let nth = self.calls.entry(name).or_default();
        *nth += 1;
        let nth = *nth;
        let fails = self.settings.fail.iter().find(|one| one.call == name && one.nth == nth);
        fails.map(|failure| failure.code)
    }

    pub(crate) fn log(&mut self, name: &str, facts: &Value, code: u32) {
        if let Some(log) = &mut self.log {
            let line = json!({ "call": name, "facts": facts, "code": code });
            writeln!(log, "{line}").expect("the log can be written");
        }
    }

    /// Records that the work of a stream has reached `event`.
    pub(crate) fn reach(&mut self, event: u64) {
        if let Some(one) = self.events.get_mut(&event) {
            one.reached += 1;
        }
        self.forget_event(event);
    }

    /// Drops `event` if it was destroyed, and no work can wait for it any more.
    pub(crate) fn forget_event(&mut self, event: u64) {
        let over = |one: &Event| one.given_back && one.reached >= one.recorded;
        if self.events.get(&event).is_some_and(over) {
            self.events.remove(&event);
        }
    }

    /// The event with this handle, unless it was destroyed.
    pub(crate) fn event(&mut self, event: u64) -> Result<&mut Event, u32> {
        let event = self.events.get_mut(&event).filter(|one| !one.given_back);
        event.ok_or(code::INVALID_HANDLE)
    }

    pub(crate) fn copied(&mut self, direction: &'static str, bytes: u64) {
        *self.copied.entry(direction).or_default() += bytes;
    }

    /// Records something that no correct program does.
    pub(crate) fn violation(&mut self, what: String) {
        self.violations.push(what);
    }

    /// The delay of the next piece of work, in microseconds. A third of all work has no delay.
    pub(crate) fn delay(&mut self) -> u64 {
        // Xorshift: the delays depend only on the seed.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        if self.settings.delay == 0 || self.random.is_multiple_of(3) {
            return 0;
        }
        (self.random >> 8) % (self.settings.delay + 1)
    }

    pub(crate) fn report(&self) -> Value {
        let sum = |own: bool| {
            self.host.values().filter(|one| one.own == own).map(|one| one.len).sum::<u64>()
        };
        json!({
            "calls": self.calls,
            "copied": self.copied,
            "violations": self.violations,
            "live": {
                "contexts": self.contexts.values().filter(|held| **held > 0).count(),
                "device_bytes": self.device.values().map(|one| one.len).sum::<u64>(),
                "pinned_bytes": sum(true),
                "registered_bytes": sum(false),
                "streams": self.streams.len(),
                "events": self.events.values().filter(|one| !one.given_back).count(),
                "modules": self.modules.len(),
            },
        })
    }

    /// Bytes of memory of a device that are in use.
    pub(crate) fn used(&self, ordinal: i32) -> u64 {
        self.device.values().filter(|one| one.ordinal == ordinal).map(|one| one.len).sum()
    }

    pub(crate) fn allocate_on_device(&mut self, len: u64, ordinal: i32) -> Option<u64> {
        if len == 0 || self.used(ordinal).checked_add(len)? > self.settings.capacity {
            return None;
        }
        let address = fresh(len, FRESH)?;
        self.device.insert(address, OnDevice { len, ordinal });
        Some(address | TAG)
    }

    pub(crate) fn free_on_device(&mut self, address: u64) -> Result<(), u32> {
        let address = untagged(address)?;
        let one = self.device.get(&address).ok_or(code::INVALID_VALUE)?;
        let len = one.len;
        let used = self.in_flight(address, len);
        self.device.remove(&address);
        match used {
            // The memory stays allocated, so that the late work does not write to memory of another owner.
            true => {
                self.violation(format!("{len} bytes of a device are freed while work uses them"))
            }
            false => release(address, len),
        }
        Ok(())
    }

    pub(crate) fn allocate_on_host(&mut self, len: u64, ordinal: i32) -> Option<u64> {
        let address = if len == 0 { None } else { fresh(len, 0) }?;
        self.host.insert(address, OnHost { len, own: true, ordinal });
        Some(address)
    }

    pub(crate) fn free_on_host(&mut self, address: u64) -> Result<(), u32> {
        let one = self.host.get(&address).filter(|one| one.own).ok_or(code::INVALID_VALUE)?;
        let len = one.len;
        let used = self.in_flight(address, len);
        self.host.remove(&address);
        // SAFETY: the memory was allocated with this length, and no other code uses it any more.
        unsafe { std::ptr::write_bytes(address as *mut u8, FREED, len as usize) };
        match used {
            true => self.violation(format!("{len} pinned bytes are freed while work uses them")),
            false => release(address, len),
        }
        Ok(())
    }

    pub(crate) fn register(&mut self, address: u64, len: u64, ordinal: i32) -> Result<(), u32> {
        if address == 0 || len == 0 {
            return Err(code::INVALID_VALUE);
        }
        let overlaps =
            |(start, one): (&u64, &OnHost)| *start < address + len && address < *start + one.len;
        if self.host.iter().any(overlaps) {
            return Err(code::ALREADY_REGISTERED);
        }
        // The read crashes if the memory does not exist.
        for page in (address..address + len).step_by(ALIGN) {
            // SAFETY: registered memory is memory of the process.
            unsafe { std::ptr::read_volatile(page as *const u8) };
        }
        self.host.insert(address, OnHost { len, own: false, ordinal });
        Ok(())
    }

    pub(crate) fn unregister(&mut self, address: u64) -> Result<(), u32> {
        let one = self.host.get(&address).filter(|one| !one.own).ok_or(code::NOT_REGISTERED)?;
        let len = one.len;
        if self.in_flight(address, len) {
            self.violation(format!("{len} bytes are unregistered while work uses them"));
        }
        self.host.remove(&address);
        Ok(())
    }

    /// Checks that `len` bytes at `address` lie in one allocation of device `ordinal`. Returns the address without its
    /// tag.
    pub(crate) fn on_device(&self, address: u64, len: u64, ordinal: i32) -> Result<u64, u32> {
        let address = untagged(address)?;
        let (start, one) = self.device.range(..=address).next_back().ok_or(code::INVALID_VALUE)?;
        let inside = one.ordinal == ordinal && address - start + len <= one.len;
        if inside { Ok(address) } else { Err(code::INVALID_VALUE) }
    }

    /// Checks that `len` bytes at `address` may be copied asynchronously: all of them lie in one piece of pinned or
    /// registered memory. If `strict` is off, they may also lie completely outside of such memory.
    pub(crate) fn on_host(&self, address: u64, len: u64) -> Result<(), u32> {
        let touched =
            |(start, one): &(&u64, &OnHost)| **start < address + len && address < **start + one.len;
        match self.host.iter().find(touched) {
            None if self.settings.strict => Err(code::INVALID_VALUE),
            None => Ok(()),
            Some((start, one)) if *start <= address && address + len <= start + one.len => Ok(()),
            Some(_) => Err(code::INVALID_VALUE),
        }
    }

    /// Whether work that is not done uses any of these bytes.
    pub(crate) fn in_flight(&self, address: u64, len: u64) -> bool {
        self.streams.values().any(|stream| stream.uses(address, len))
    }
}

fn untagged(address: u64) -> Result<u64, u32> {
    if address & TAG == 0 { Err(code::INVALID_VALUE) } else { Ok(address & !TAG) }
}

fn layout(len: u64) -> Option<Layout> {
    Layout::from_size_align(usize::try_from(len).ok()?, ALIGN).ok()
}

fn fresh(len: u64, value: u8) -> Option<u64> {
    // SAFETY: the length is not zero, which the callers check.
    let start = unsafe { alloc(layout(len)?) };
    if start.is_null() {
        return None;
    }
    // SAFETY: the memory was just allocated with this length.
    unsafe { std::ptr::write_bytes(start, value, len as usize) };
    Some(start as u64)
}

fn release(address: u64, len: u64) {
    let layout = layout(len).expect("memory of this length was allocated");
    // SAFETY: allocated by `fresh` with this layout; its entry is gone, so it is freed once.
    unsafe { dealloc(address as *mut u8, layout) };
}
