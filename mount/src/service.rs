//! What a mount serves reads with: engine, cache and counters, and what `status` says of them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use nix::unistd::geteuid;
use serde_json::{Value, json};
use tensorfs::cache::{BUDGET_MIN, Cache, CachedFile};
use tensorfs::checkpoint::Content;
use tensorfs::counters::Counters;
use tensorfs::io::{Budget, Engine, Settings};

use crate::asks::Asks;
use crate::assemble::Assembler;
use crate::kernel::{Init, Report};
use crate::nodes::{Node, NodeKind};
use crate::options::{CACHE_DEFAULT, Options, Passthrough};

/// Files that `status` names, those read most first.
const FILES_SHOWN: usize = 20;

/// One for each mount.
pub(crate) struct Service {
    pub(crate) counters: Arc<Counters>,
    pub(crate) cache: Cache,
    /// What the source is asked for besides reads.
    pub(crate) asks: Asks,
    engine: Engine,
    /// Writes hot virtual files as real ones.
    pub(crate) assembler: Option<Assembler>,
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
    /// Starts what `options` ask for. Nothing of ours is to lie in `places`, the source and the
    /// mount.
    ///
    /// # Errors
    /// One line that says what is wrong.
    pub(crate) fn start(
        options: &Options,
        view: &Value,
        places: &[&Path],
    ) -> Result<Arc<Service>, String> {
        let passthrough = options.passthrough == Passthrough::Auto && geteuid().is_root();
        let assembler = match &options.assemble {
            Some(_) if !passthrough => {
                tracing::warn!("nothing is assembled: only root's mounts use copies");
                None
            }
            Some(folder) => Some(Assembler::start(folder, options.assemble_size, places)?),
            None => None,
        };
        let counters = Arc::new(Counters::default());
        let settings =
            Settings { backend: options.io, direct: options.direct, timeout: options.io_timeout };
        let limit = options.cache.unwrap_or(CACHE_DEFAULT).max(BUDGET_MIN);
        let engine = Engine::start(settings, counters.clone());
        let budget = Budget::new(limit, counters.clone());
        let cache = Cache::start(engine.clone(), budget, counters.clone(), options.io_timeout);
        let no_thread = |e| format!("cannot start a thread: {e}");
        let cache = cache.map_err(no_thread)?;
        let asks = Asks::start(options.io_timeout, counters.clone()).map_err(no_thread)?;
        let seconds = options.io_timeout.map(|timeout: Duration| timeout.as_secs_f64());
        let mut shown = view.clone();
        if let Some(shown) = shown.as_object_mut() {
            shown.insert("cache".to_owned(), json!(limit));
            shown.insert("io-timeout".to_owned(), json!(seconds));
            shown.insert("io".to_owned(), json!(options.io.name()));
            shown.insert("direct".to_owned(), json!(options.direct.name()));
        }
        Ok(Arc::new(Service {
            counters,
            cache,
            asks,
            engine,
            assembler,
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

    /// A real file with the bytes of the virtual file `node`, where there is one.
    pub(crate) fn copy_of(&self, node: &Node, file: &CachedFile) -> Option<Arc<File>> {
        self.assembler.as_ref()?.ready(node.version()?, file.reader())
    }

    /// Takes note that the virtual file `node` was opened, or `served` bytes of it were.
    pub(crate) fn read_by_us(&self, node: &Node, file: &CachedFile, served: Option<usize>) {
        let (Some(assembler), Some(version)) = (&self.assembler, node.version()) else { return };
        match served {
            Some(bytes) => assembler.served(version, file.reader(), bytes as u64),
            None => assembler.opened(version, file.reader()),
        }
    }

    /// Takes note that the kernel does not take the copy of `node`.
    pub(crate) fn copy_refused(&self, node: &Node, error: &io::Error) {
        let of_ours = matches!(&node.kind, NodeKind::File { content: Content::Virtual(_), .. });
        if let Some(assembler) = self.assembler.as_ref().filter(|_| of_ours) {
            assembler.give_up(error);
        }
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

    /// Ends what goes on in the background and leaves nothing half-written.
    pub(crate) fn stop(&self) {
        if let Some(assembler) = &self.assembler {
            assembler.stop();
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
            "assemble": self.assembler.as_ref().map(Assembler::status),
            "open_files": open,
            "files": shown.collect::<Vec<_>>(),
        })
    }
}
