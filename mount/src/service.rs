//! What a mount serves reads with: engine, cache and counters, and what `status` says of them.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use serde_json::{Value, json};
use tensorfs::cache::{BUDGET_MIN, Cache, CachedFile};
use tensorfs::counters::Counters;
use tensorfs::io::{Budget, Engine, Settings};

use crate::kernel::{Init, Report};
use crate::options::Options;

/// Memory that a mount takes for what is read ahead where `cache=` does not say, in bytes: the
/// kernel's page cache is the cache, this only has to keep the disk busy.
const CACHE_DEFAULT: u64 = 64 << 20;

/// Files that `status` names, those read most first.
const FILES_SHOWN: usize = 20;

/// One for each mount.
pub(crate) struct Service {
    pub(crate) counters: Arc<Counters>,
    pub(crate) cache: Cache,
    engine: Engine,
    /// The options in force.
    options: Value,
    /// What the INIT handshake settled.
    pub(crate) init: OnceLock<Init>,
    kernel: OnceLock<Value>,
    /// By inode number.
    files: Mutex<BTreeMap<u64, FileUse>>,
}

/// What was read of a file.
#[derive(Default)]
struct FileUse {
    path: String,
    /// Number of handles.
    open: usize,
    /// Bytes served to those who had it open before.
    bytes_before: u64,
    current: Weak<CachedFile>,
}

impl FileUse {
    fn bytes_served(&self) -> u64 {
        self.bytes_before + self.current.upgrade().map_or(0, |file| file.bytes_served.get())
    }
}

impl Service {
    /// Starts what `options` ask for.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub(crate) fn start(options: &Options, view: &Value) -> io::Result<Arc<Service>> {
        let counters = Arc::new(Counters::default());
        let settings =
            Settings { backend: options.io, direct: options.direct, timeout: options.io_timeout };
        let limit = options.cache.unwrap_or(CACHE_DEFAULT).max(BUDGET_MIN);
        let engine = Engine::start(settings, counters.clone());
        let budget = Budget::new(limit, counters.clone());
        let cache = Cache::start(engine.clone(), budget, counters.clone(), options.io_timeout)?;
        let seconds = options.io_timeout.map(|timeout: Duration| timeout.as_secs_f64());
        let mut shown = view.clone();
        if let Some(shown) = shown.as_object_mut() {
            shown.insert("cache".to_owned(), json!(limit));
            shown.insert("io-timeout".to_owned(), json!(seconds));
            shown.insert("io".to_owned(), json!(format!("{:?}", options.io).to_lowercase()));
            let direct = format!("{:?}", options.direct).to_lowercase();
            shown.insert("direct".to_owned(), json!(direct));
        }
        Ok(Arc::new(Service {
            counters,
            cache,
            engine,
            options: shown,
            init: OnceLock::new(),
            kernel: OnceLock::new(),
            files: Mutex::default(),
        }))
    }

    /// Takes note of what the kernel has granted.
    pub(crate) fn report(&self, report: &Report) {
        let _ = self.kernel.set(report.to_json());
    }

    /// Takes note that the file `path` of the mount is opened.
    pub(crate) fn opened(&self, ino: u64, path: &Path, file: Option<&Arc<CachedFile>>) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let used = files.entry(ino).or_default();
        used.open += 1;
        used.path = path.display().to_string();
        let Some(file) = file else { return };
        if !std::ptr::eq(used.current.as_ptr(), Arc::as_ptr(file)) {
            used.bytes_before = used.bytes_served();
            used.current = Arc::downgrade(file);
        }
    }

    /// Takes note that a handle of it is closed, while its file still lives.
    pub(crate) fn closed(&self, ino: u64) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(used) = files.get_mut(&ino) else { return };
        used.open = used.open.saturating_sub(1);
        if used.open == 0 {
            used.bytes_before = used.bytes_served();
            used.current = Weak::new();
        }
    }

    /// What `tensorfs status` shows. Never waits for the source.
    pub(crate) fn status(&self) -> Value {
        let (budget, used) = self.cache.memory();
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let open: usize = files.values().map(|used| used.open).sum();
        let mut shown: Vec<_> =
            files.values().map(|used| (used.bytes_served(), used.open, &used.path)).collect();
        shown.sort_by(|a, b| b.cmp(a));
        let shown = shown.iter().take(FILES_SHOWN);
        let shown = shown.map(
            |(bytes, open, path)| json!({ "path": path, "open": open, "bytes_served": bytes }),
        );
        json!({
            "options": self.options,
            "counters": self.counters.to_json(),
            "cache": { "budget": budget, "used": used },
            "kernel": self.kernel.get(),
            "engine": self.engine.describe(),
            "open_files": open,
            "files": shown.collect::<Vec<_>>(),
        })
    }
}
