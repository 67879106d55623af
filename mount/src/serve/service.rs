//! The service that answers the reads of a mount: engine, cache and counters, and their part of
//! `status`.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};

use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tensorfs::Secret;
use tensorfs::internal::cache::verify_on_read::{Checker, CheckerStatus, ChecksumGate};
use tensorfs::internal::cache::{Answer, BUDGET_MIN, Cache, CachedFile};
use tensorfs::internal::counters::{CounterValues, Counters};
use tensorfs::internal::error::real_name;
use tensorfs::internal::io::{Budget, DirectIo, Engine, EngineStatus, Settings};
use tensorfs::internal::store::{RemoteStatus, remote_status};
use tensorfs::internal::sync::Mutex;

use super::assemble::{AssembleStatus, Assembler};
use super::blocking::BlockingPool;
use super::heat::Heat;
use super::kernel::{Init, KernelReport, Knob};
use super::requests::{RequestCounts, Requests};
use crate::log;
use crate::options::{CACHE_DEFAULT, Options, Passthrough, Verify};

/// Maximum number of files that `status` lists. The files with the most bytes read come first.
const FILES_SHOWN: usize = 20;

/// The state of a service, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ServiceStatus {
    /// The options in force, as `-o` spells them.
    pub options: Value,
    pub counters: CounterValues,
    /// Counts for each kernel operation.
    pub requests: BTreeMap<String, RequestCounts>,
    pub cache: CacheStatus,
    /// The settings of the kernel. `None` until the mount answers.
    pub kernel: Option<Vec<Knob>>,
    pub engine: EngineStatus,
    /// The servers and the disk caches of a remote source.
    pub remote: Option<RemoteStatus>,
    /// The state of the part that compares checksums.
    pub checksums: Option<CheckerStatus>,
    pub assemble: Option<AssembleStatus>,
    pub log_lines_dropped: u64,
    pub log_lines_limited: u64,
    /// Number of open handles.
    pub open_files: usize,
    /// The files with the most bytes read.
    pub files: Vec<FileStatus>,
}

/// The memory of the cache and of reads, in bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct CacheStatus {
    pub budget: u64,
    pub used: u64,
}

/// A file that is open or was read.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FileStatus {
    pub path: String,
    /// Number of open handles.
    pub open: usize,
    pub bytes_served: u64,
}

/// The parts that serve the reads of one mount.
pub(crate) struct Service {
    pub(crate) counters: Arc<Counters>,
    /// Counters of the kernel's requests, by operation.
    pub(crate) requests: Arc<Requests>,
    /// Counters of the reads of each tensor.
    pub(crate) heat: Heat,
    pub(crate) cache: Cache,
    /// Runs calls to the source other than reads.
    pub(crate) blocking: BlockingPool,
    engine: Engine,
    /// Compares bytes with checksums, with `verify=read`.
    pub(crate) checker: Option<Checker>,
    /// Writes files that are read often as real files.
    pub(crate) assembler: Option<Assembler>,
    /// The options in force.
    options: Value,
    /// Result of the INIT handshake.
    pub(crate) init: OnceLock<Init>,
    kernel: OnceLock<Vec<Knob>>,
    files: Mutex<FileUses>,
}

/// Bytes that were read from the files of a mount, by inode number.
#[derive(Default)]
struct FileUses {
    open: BTreeMap<u64, FileUse>,
    /// Closed files that `status` may list. Other closed files are forgotten, since the number of
    /// files that were ever opened has no limit.
    closed: BTreeMap<u64, FileUse>,
}

/// Bytes that were read from one file.
#[derive(Default)]
struct FileUse {
    path: String,
    /// Number of open handles.
    open: usize,
    /// Number of bytes that reads of earlier opens got.
    bytes_before: u64,
    current: Weak<CachedFile>,
}

impl FileUse {
    fn bytes_served(&self) -> u64 {
        self.bytes_before + self.current.upgrade().map_or(0, |file| file.bytes_served.get())
    }
}

impl FileUses {
    fn opened(&mut self, ino: u64, path: &Path, file: Option<&Arc<CachedFile>>) {
        let closed = &mut self.closed;
        let used = self.open.entry(ino).or_insert_with(|| closed.remove(&ino).unwrap_or_default());
        used.open += 1;
        used.path = real_name(path);
        let Some(file) = file else { return };
        if !std::ptr::eq(used.current.as_ptr(), Arc::as_ptr(file)) {
            used.bytes_before = used.bytes_served();
            used.current = Arc::downgrade(file);
        }
    }

    fn closed(&mut self, ino: u64) {
        let Entry::Occupied(mut entry) = self.open.entry(ino) else { return };
        entry.get_mut().open -= 1;
        if entry.get().open > 0 {
            return;
        }
        let mut used = entry.remove();
        used.bytes_before = used.bytes_served();
        used.current = Weak::new();
        self.closed.insert(ino, used);
        if self.closed.len() > FILES_SHOWN {
            let least = self.closed.iter().min_by_key(|(_, used)| used.bytes_before);
            if let Some(ino) = least.map(|(ino, _)| *ino) {
                self.closed.remove(&ino);
            }
        }
    }
}

/// Makes the assembler if `options` ask for one, but does not start it. Its folder must not overlap
/// any of `places`, the source and the mount.
///
/// # Errors
/// One line with the reason why the folder cannot be used.
pub(crate) fn assembler(options: &Options, places: &[&Path]) -> Result<Option<Assembler>, String> {
    let Some(folder) = &options.assemble else { return Ok(None) };
    if options.verify == Verify::Read {
        tracing::warn!("nothing is assembled: with verify=read no copies are used");
        return Ok(None);
    }
    if options.passthrough != Passthrough::Auto || !geteuid().is_root() {
        tracing::warn!("nothing is assembled: only root's mounts use copies");
        return Ok(None);
    }
    Assembler::open(folder, options.assemble_size, options.settings(), places).map(Some)
}

impl Service {
    /// Starts engine, cache and the other parts as `options` say. `secret` is the secret of the
    /// source.
    ///
    /// # Errors
    /// One line with the reason.
    pub(crate) fn start(
        options: &Options,
        assembler: Option<Assembler>,
        secret: Option<Arc<Secret>>,
    ) -> Result<Arc<Service>, String> {
        if let Some(assembler) = &assembler {
            assembler.start()?;
        }
        let counters = Arc::new(Counters::default());
        let settings = options.settings();
        let limit = options.cache.unwrap_or(CACHE_DEFAULT).max(BUDGET_MIN);
        let engine = Engine::start(settings, counters.clone());
        let budget = Budget::new(limit, counters.clone());
        let no_thread = |e| format!("cannot start a thread: {e}");
        let cache = Cache::start(engine.clone(), budget, counters.clone(), options.io_timeout)
            .map_err(no_thread)?;
        let checker = match options.verify {
            Verify::Read => {
                // The checker reads through the page cache, so that the reads of programs find the
                // compared bytes there.
                let always = settings.direct == DirectIo::Always;
                let direct = if always { DirectIo::Always } else { DirectIo::Never };
                let engine = Engine::start(Settings { direct, ..settings }, counters.clone());
                let checker = Checker::start(engine, counters.clone(), options.io_timeout);
                Some(checker.map_err(no_thread)?)
            }
            Verify::None => None,
        };
        let blocking =
            BlockingPool::start(options.io_timeout, counters.clone(), secret).map_err(no_thread)?;
        Ok(Arc::new(Service {
            counters,
            requests: Arc::default(),
            heat: Heat::default(),
            cache,
            blocking,
            engine,
            checker,
            assembler,
            options: options.to_json(),
            init: OnceLock::new(),
            kernel: OnceLock::new(),
            files: Mutex::default(),
        }))
    }

    /// Reads bytes `range` of `file`, which must pass `gate` if there is one. Never waits. `answer`
    /// is called in the same way as by `Cache::read`. Only a bug could drop `answer` without a
    /// call.
    pub(crate) fn read(
        self: &Arc<Self>,
        gate: Option<&Arc<ChecksumGate>>,
        file: &Arc<CachedFile>,
        reader: u64,
        range: Range<u64>,
        answer: Answer,
    ) {
        let Some(gate) = gate else { return self.cache.read(file, reader, range, answer) };
        let Some(checker) = &self.checker else { return };
        let (service, file, wanted) = (self.clone(), file.clone(), range.clone());
        let checked = move |outcome: Result<(), &tensorfs::Error>| match outcome {
            Ok(()) => service.cache.read(&file, reader, wanted, answer),
            Err(error) => {
                service.counters.reads.add(1);
                service.counters.read_errors.add(1);
                answer(Err(error));
            }
        };
        gate.when_checked(checker, range, Box::new(checked));
    }

    /// Notes the settings that the kernel has granted.
    pub(crate) fn report(&self, report: KernelReport) {
        let _ = self.kernel.set(report.knobs);
    }

    /// The assembled copy of a virtual file in this version. `None` if there is none.
    pub(crate) fn copy_of(&self, version: &str, file: &CachedFile) -> Option<Arc<File>> {
        self.assembler.as_ref()?.ready(version, file.reader())
    }

    /// The assembled copy of a virtual file, while the kernel serves that copy to other programs.
    ///
    /// # Errors
    /// The reason why the copy cannot be used, as a clause.
    pub(crate) fn copy_in_use(
        &self,
        version: &str,
        file: &CachedFile,
    ) -> Result<Arc<File>, String> {
        let assembler = self.assembler.as_ref().ok_or("this mount has no folder of copies")?;
        assembler.in_use(version, file.reader())
    }

    /// Tells the assembler that `served` bytes of a virtual file were read. If `served` is `None`,
    /// tells it that the file was opened.
    pub(crate) fn read_by_us(&self, version: &str, file: &CachedFile, served: Option<usize>) {
        let Some(assembler) = &self.assembler else { return };
        match served {
            Some(bytes) => assembler.served(version, file.reader(), bytes as u64),
            None => assembler.opened(version, file.reader()),
        }
    }

    /// Tells the assembler that the kernel refuses the copy of a virtual file.
    pub(crate) fn copy_refused(&self, error: &io::Error) {
        if let Some(assembler) = &self.assembler {
            assembler.give_up(error);
        }
    }

    /// Counts an open of the file at `path` in the mount.
    pub(crate) fn opened(&self, ino: u64, path: &Path, file: Option<&Arc<CachedFile>>) {
        self.files.lock().opened(ino, path, file);
    }

    /// Counts the close of a handle. The file must still be in the table.
    pub(crate) fn closed(&self, ino: u64) {
        self.files.lock().closed(ino);
    }

    /// Ends the work in the background. No partly written file remains.
    pub(crate) fn stop(&self) {
        if let Some(assembler) = &self.assembler {
            assembler.stop();
        }
    }

    /// The state for `tensorfs status`. Never waits for the source.
    pub(crate) fn status(&self) -> ServiceStatus {
        let (budget, used) = self.cache.memory();
        let files = self.files.lock();
        let open_files = files.open.values().map(|used| used.open).sum();
        let all = files.open.values().chain(files.closed.values());
        let mut used_files: Vec<_> =
            all.map(|used| (used.bytes_served(), used.open, &used.path)).collect();
        used_files.sort_by(|a, b| b.cmp(a));
        let shown = used_files.into_iter().take(FILES_SHOWN);
        let files = shown.map(|(bytes_served, open, path)| FileStatus {
            path: path.clone(),
            open,
            bytes_served,
        });
        ServiceStatus {
            options: self.options.clone(),
            counters: self.counters.values(),
            requests: self.requests.counts(),
            cache: CacheStatus { budget, used },
            kernel: self.kernel.get().cloned(),
            engine: self.engine.status(),
            remote: remote_status(),
            checksums: self.checker.as_ref().map(Checker::status),
            assemble: self.assembler.as_ref().map(Assembler::status),
            log_lines_dropped: log::dropped(),
            log_lines_limited: log::limited(),
            open_files,
            files: files.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_files_that_nobody_has_open_only_those_read_most_are_kept() {
        let mut files = FileUses::default();
        for ino in 0..1000 {
            files.opened(ino, Path::new("/a"), None);
            files.opened(ino, Path::new("/a"), None);
            files.closed(ino);
            files.open.get_mut(&ino).unwrap().bytes_before = ino * 7919 % 1000;
            files.closed(ino);
        }
        assert!(files.open.is_empty());
        let kept: Vec<u64> = files.closed.values().map(|used| used.bytes_before).collect();
        assert_eq!((kept.len(), kept.iter().min()), (FILES_SHOWN, Some(&980)));
        // A file that is opened again keeps its earlier count.
        let ino = files.closed.first_key_value().map(|(ino, _)| *ino).unwrap();
        files.opened(ino, Path::new("/a"), None);
        assert_eq!(files.open[&ino].bytes_before, kept[0]);
        assert_eq!(files.closed.len(), FILES_SHOWN - 1);
    }
}
