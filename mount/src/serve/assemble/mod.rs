//! Writes virtual files that are read often into a folder in the background (`-o assemble=DIR`), so that the kernel
//! serves later opens from one real file.
//!
//! A copy is used only after its bytes were read back and compared, and only while the file of the copy is the file
//! that was verified. A failure of a copy never fails a read: the daemon continues to serve the file itself.

mod copy;
mod entry;
mod folder;
mod latest;
mod record;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use tensorfs::Error;
use tensorfs::internal::clock::unix_now;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::io::Settings;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::source::local_version;
use tensorfs::internal::sweep::Sweep;
use tensorfs::internal::sync::{Condvar, Mutex};

use entry::{CopyEntry, CopyFailure, CopyStatus, Stage};
use folder::{CopyFolder, Partial};
use latest::Latest;
use record::{Record, state_of};

/// Time until the next attempt after an error, such as a full disk or a source error.
const BACK_OFF: Duration = Duration::from_secs(5 * 60);

/// Time until the next check of a file that another process writes.
const BUSY_BACK_OFF: Duration = Duration::from_secs(10);

/// Readers count as active, and the assembler yields to them, while the last answer to a reader is
/// younger than this.
const RECENT: Duration = Duration::from_millis(100);

/// Length of the pause after a step, as a multiple of the duration of the step, while readers are active.
const YIELD_FACTOR: u32 = 4;

/// Longest pause after a step.
const YIELD_MAX: Duration = Duration::from_secs(1);

/// Minimum age of the last change of a source. Two changes within one tick of the file system's
/// clock give a file the same times. So after a more recent change, a second change might not show
/// in the times.
const SETTLED: Duration = Duration::from_millis(100);

/// Minimum time between two updates of a record's modification time.
const TOUCH_INTERVAL: Duration = Duration::from_secs(60);

/// How long `status` waits for the folder.
const STATUS_TIMEOUT: Duration = Duration::from_millis(500);

/// How long `stop` waits for the current work.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// A job for the thread that assembles.
enum CopyJob {
    Write { version: String, reader: Reader },
    Verify { record: Record },
    Touch { version: String },
}

#[derive(Default)]
struct State {
    entries: HashMap<String, CopyEntry>,
    queue: VecDeque<CopyJob>,
    stopping: bool,
    /// The copy that is being written.
    partial: Option<PathBuf>,
    /// Time at which the folder is used again after an error.
    backoff: Option<Instant>,
}

impl State {
    /// Removes all writes from the queue. Later reads of the files queue the writes again.
    fn cancel_writes(&mut self) {
        let jobs = std::mem::take(&mut self.queue);
        for job in jobs {
            if let CopyJob::Write { version, .. } = job {
                self.entries.entry(version).and_modify(|entry| entry.stage = Stage::Absent);
            } else {
                self.queue.push_back(job);
            }
        }
    }
}

/// The folder of copies, for `status`. Sizes are in bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct AssembleStatus {
    pub dir: String,
    pub budget: Option<u64>,
    pub used: Option<u64>,
    /// Whether the folder does not answer. `used` may be out of date then.
    pub stalled: bool,
    /// Number of seconds until the folder is used again after an error.
    pub backoff_s: u64,
    pub files: Vec<CopyStatus>,
}

/// Assembles hot files, and keeps track of the copies.
pub(crate) struct Assembler {
    shared: Arc<AssemblerState>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Number of bytes that the folder may contain, and number of bytes that it contains.
    usage: Latest<(u64, u64)>,
}

/// State that callers share with the thread.
struct AssemblerState {
    folder: CopyFolder,
    /// Reads the sources.
    sweep: Sweep,
    started: Instant,
    /// Time of the last answer to a reader, in milliseconds after `started`. It is 0 before the first answer.
    last_served: AtomicU64,
    state: Mutex<State>,
    wake: Condvar,
}

impl Assembler {
    /// Opens `dir` for copies of up to `limit` bytes in total. The folder is created if it does not exist. It must
    /// not overlap the folders `apart`, which are the source and the mount. The sources are read with `settings`.
    ///
    /// Copies of earlier runs are used if they are unchanged since their verification. Changed copies are verified
    /// again in the background before they are used.
    ///
    /// # Errors
    /// One line with the reason why the folder cannot be used.
    pub(crate) fn open(
        dir: &Path,
        limit: Option<u64>,
        settings: Settings,
        apart: &[&Path],
    ) -> Result<Assembler, String> {
        let folder = CopyFolder::open(dir, limit, apart)?;
        let fail = |why: &dyn std::fmt::Display| format!("assemble={}: {why}", shown_path(dir));
        let shared = Arc::new(AssemblerState {
            folder,
            sweep: Sweep::new(settings),
            started: Instant::now(),
            last_served: AtomicU64::new(0),
            state: Mutex::default(),
            wake: Condvar::new(),
        });
        shared.take_over().map_err(|failure| fail(&failure))?;
        Ok(Assembler { shared, thread: Mutex::default(), usage: Latest::default() })
    }

    /// Starts the thread that assembles.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start(&self) -> Result<(), String> {
        let worker = self.shared.clone();
        let thread = std::thread::Builder::new()
            .name("assemble".to_owned())
            .spawn(move || worker.work())
            .map_err(|e| format!("cannot start a thread: {e}"))?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    /// The open, verified copy of `version`. `reader` reads the same file from the sources.
    ///
    /// A file with an encrypted source gets no copy, because the copy would not be encrypted.
    ///
    /// The copy is not evicted while the file is open, even if only the kernel has it open. Reads metadata only.
    pub(crate) fn ready(&self, version: &str, reader: &Reader) -> Option<Arc<File>> {
        let is_off = reader.is_encrypted() || self.shared.state.lock().stopping;
        if is_off { None } else { self.shared.find(version, reader).ok() }
    }

    /// The open, verified copy of a file that the kernel already serves from its copy to programs. Unlike `ready`,
    /// this still works after `give_up`, because the kernel has accepted this copy.
    ///
    /// # Errors
    /// The reason why the copy cannot be used, as a clause.
    pub(crate) fn in_use(&self, version: &str, reader: &Reader) -> Result<Arc<File>, String> {
        self.shared.find(version, reader)
    }

    /// Counts an open of `version` that the daemon serves.
    pub(crate) fn opened(&self, version: &str, reader: &Reader) {
        if !reader.is_encrypted() {
            self.shared.count(version, reader, 1, 0);
        }
    }

    /// Counts `bytes` of `version` that the daemon served.
    pub(crate) fn served(&self, version: &str, reader: &Reader, bytes: u64) {
        if reader.is_encrypted() {
            return;
        }
        let now = self.shared.started.elapsed().as_millis() as u64;
        self.shared.last_served.store(now.max(1), Ordering::Relaxed);
        self.shared.count(version, reader, 0, bytes);
    }

    /// Stops assembling, because the kernel refuses files of this folder for passthrough.
    pub(crate) fn give_up(&self, why: &io::Error) {
        let mut state = self.shared.state.lock();
        if !std::mem::replace(&mut state.stopping, true) {
            let dir = shown_path(self.shared.folder.path());
            tracing::warn!("{dir}: the kernel does not serve files from here: {why}");
        }
        self.shared.wake.notify_all();
    }

    /// The state for `status`. Waits for the folder for `STATUS_TIMEOUT` at most. If the folder does not answer,
    /// its usage is the last known one.
    pub(crate) fn status(&self) -> AssembleStatus {
        let shared = self.shared.clone();
        let (usage, answered) = self.usage.get(STATUS_TIMEOUT, move || shared.folder.usage().ok());
        self.shared.status(usage, answered)
    }

    /// Ends the current work and removes its partial file. This takes about one second at most.
    pub(crate) fn stop(&self) {
        self.shared.state.lock().stopping = true;
        self.shared.sweep.stopped().store(true, Ordering::Relaxed);
        self.shared.wake.notify_all();
        // The lock is held until this function ends, because a second caller may end the process as
        // soon as it gets the lock.
        let mut held = self.thread.lock();
        let Some(thread) = held.take() else { return };
        let started = Instant::now();
        while !thread.is_finished() && started.elapsed() < STOP_TIMEOUT {
            std::thread::sleep(Duration::from_millis(2));
        }
        // The thread may be waiting for a disk. Its partial file must not remain.
        let partial = self.shared.state.lock().partial.take();
        if let Some(path) = partial {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for Assembler {
    fn drop(&mut self) {
        self.stop();
    }
}

impl AssemblerState {
    /// Registers the copies that are in the folder.
    fn take_over(&self) -> Result<(), CopyFailure> {
        let locked = self.folder.lock()?;
        let records = locked.sweep().map_err(|e| CopyFailure::Folder("look at", e))?;
        drop(locked);
        let mut state = self.state.lock();
        for record in records {
            let known = self.folder.open_copy(&record.version).map(|(_, copy)| copy);
            let mut entry = CopyEntry::new(record.copy.len);
            let version = record.version.clone();
            match known {
                Ok(copy) if copy == record.copy => {
                    entry.stage = Stage::Ready { record, open: Weak::new(), touched: None };
                }
                _ => {
                    entry.stage = Stage::Queued;
                    state.queue.push_back(CopyJob::Verify { record });
                }
            }
            state.entries.insert(version, entry);
        }
        let (copies, again) = (state.entries.len(), state.queue.len());
        drop(state);
        let dir = shown_path(self.folder.path());
        tracing::info!(
            "assembling in {dir}: {copies} copies, {again} of them to be verified again"
        );
        Ok(())
    }

    /// The open, verified copy of `version`, or the reason why there is none.
    fn find(&self, version: &str, reader: &Reader) -> Result<Arc<File>, String> {
        let state = self.state.lock();
        let known = match state.entries.get(version).map(|entry| &entry.stage) {
            Some(Stage::Ready { record, open, .. }) => Some((record.clone(), open.upgrade())),
            Some(Stage::Queued | Stage::Writing | Stage::Verifying) => {
                return Err("the copy is written or verified now".to_owned());
            }
            Some(Stage::Absent | Stage::Failed { .. }) | None => None,
        };
        drop(state);
        let ours = known.is_some();
        // Another process may have written the copy.
        let (record, open) = match known {
            Some(known) => known,
            None => (self.folder.record(version).ok_or("the copy is gone")?, None),
        };
        match state_of(reader) {
            Ok(sources) if sources == record.sources => {}
            Ok(_) => {
                // The sources were changed after the copy was made, and later everything that the
                // version covers was restored. So the version is the same as before, but the copy
                // may differ from the sources.
                self.forget(version, &record);
                return Err("the copy is of an earlier state of the source".to_owned());
            }
            Err(e) => return Err(format!("the source cannot be compared with the copy: {e}")),
        }
        let found = match open {
            Some(file) => file.metadata().map(|meta| (file, local_version(&meta))),
            None => self.folder.open_copy(version).map(|(file, copy)| (Arc::new(file), copy)),
        };
        match found {
            Ok((file, copy)) if copy == record.copy => {
                self.opened_copy(version, record, &file);
                Ok(file)
            }
            // Another process is evicting the copy or has evicted it.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                Err("another process has locked the copy".to_owned())
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.forget(version, &record);
                Err("the copy was deleted".to_owned())
            }
            Ok(_) if ours => {
                let dir = shown_path(self.folder.path());
                tracing::error!("{dir}: the copy {version} was touched; it is verified again");
                self.verify_again(record);
                Err("the copy was touched and must be verified again".to_owned())
            }
            Ok(_) => Err("the copy was touched".to_owned()),
            Err(e) => {
                let dir = shown_path(self.folder.path());
                tracing::error!("{dir}: cannot open the copy {version}: {e}");
                if !lacks_descriptors(&e) {
                    self.forget(version, &record);
                }
                Err(format!("the copy cannot be opened: {e}"))
            }
        }
    }

    /// Records an open of the copy.
    fn opened_copy(&self, version: &str, record: Record, file: &Arc<File>) {
        let mut locked = self.state.lock();
        let state = &mut *locked;
        let entry = state
            .entries
            .entry(version.to_owned())
            .or_insert_with(|| CopyEntry::new(record.copy.len));
        let before = match &entry.stage {
            Stage::Ready { touched, .. } => *touched,
            Stage::Absent | Stage::Failed { .. } => None,
            // Another thread has just found that the copy changed.
            Stage::Queued | Stage::Writing | Stage::Verifying => return,
        };
        let mut touched = before;
        if before.is_none_or(|before| before.elapsed() >= TOUCH_INTERVAL) {
            touched = Some(Instant::now());
            // The touch writes to the disk, so the thread that assembles does it.
            state.queue.push_back(CopyJob::Touch { version: version.to_owned() });
            self.wake.notify_all();
        }
        entry.stage = Stage::Ready { record, open: Arc::downgrade(file), touched };
    }

    /// Forgets a copy that is gone or has other bytes. The file may be copied again.
    fn forget(&self, version: &str, record: &Record) {
        let mut state = self.state.lock();
        let Some(entry) = state.entries.get_mut(version) else { return };
        if matches!(&entry.stage, Stage::Ready { record: known, .. } if known == record) {
            *entry = CopyEntry::new(entry.len);
        }
    }

    fn verify_again(&self, record: Record) {
        let mut state = self.state.lock();
        let Some(entry) = state.entries.get_mut(&record.version) else { return };
        if matches!(&entry.stage, Stage::Ready { .. }) {
            (entry.stage, entry.done) = (Stage::Queued, 0);
            state.queue.push_back(CopyJob::Verify { record });
            self.wake.notify_all();
        }
    }

    /// Counts opens and served bytes, and queues the file for writing once it is read often enough.
    fn count(&self, version: &str, reader: &Reader, opens: u64, served: u64) {
        let mut locked = self.state.lock();
        let state = &mut *locked;
        if !state.entries.contains_key(version) {
            state.entries.insert(version.to_owned(), CopyEntry::new(reader.len()));
        }
        let Some(entry) = state.entries.get_mut(version) else { return };
        entry.opens += opens;
        entry.served += served;
        let backoff = state.backoff.is_some_and(|until| Instant::now() < until);
        if entry.is_hot() && !state.stopping && !backoff && entry.may_start() {
            (entry.stage, entry.done) = (Stage::Queued, 0);
            let job = CopyJob::Write { version: version.to_owned(), reader: reader.clone() };
            state.queue.push_back(job);
            self.wake.notify_all();
        }
    }

    /// The loop of the thread.
    fn work(&self) {
        while let Some(job) = self.next_job() {
            match job {
                CopyJob::Touch { version } => self.folder.touch(&version),
                CopyJob::Write { version, reader } => {
                    let started = Instant::now();
                    let written = self.write(&version, &reader);
                    if let Ok(record) = &written {
                        self.say_written(record, started.elapsed());
                    }
                    self.finish(&version, written);
                }
                CopyJob::Verify { record } => {
                    let version = record.version.clone();
                    let verified = self.verify(record);
                    self.finish(&version, verified);
                }
            }
        }
    }

    fn next_job(&self) -> Option<CopyJob> {
        let mut state = self.state.lock();
        loop {
            if state.stopping {
                return None;
            }
            match state.queue.pop_front() {
                Some(job) => return Some(job),
                None => state = self.wake.wait(state),
            }
        }
    }

    fn say_written(&self, record: &Record, took: Duration) {
        let Record { source, copy, .. } = record;
        let (dir, seconds) = (shown_path(self.folder.path()), took.as_secs_f64());
        let bytes = copy.len;
        tracing::info!("{source}: assembled in {dir}: {bytes} bytes in {seconds:.1} s");
    }

    /// Writes and verifies the copy of `version`.
    fn write(&self, version: &str, reader: &Reader) -> Result<Record, CopyFailure> {
        // The pins keep the sources open. If a source were closed and replaced in the file system, it could not be
        // opened again.
        let pins: tensorfs::Result<Vec<_>> =
            reader.sources().iter().map(|source| source.pin()).collect();
        let _pins = pins.map_err(CopyFailure::Source)?;
        let sources = state_of(reader).map_err(CopyFailure::Source)?;
        self.settle(reader)?;
        if let Some(record) = self.folder.record(version)
            && record.sources == sources
            && self.folder.open_copy(version).is_ok_and(|(_, copy)| copy == record.copy)
        {
            return Ok(record);
        }
        let partial = self.begin(version, reader.len())?;
        self.set_stage(version, Stage::Writing);
        let pace = |done, took| self.pace(version, done, took);
        let sha256 = copy::fill(&partial, reader, &self.sweep, &pace)?;
        self.set_stage(version, Stage::Verifying);
        if copy::checksum(partial.file(), partial.len, &pace)? != sha256 {
            return Err(CopyFailure::Differs);
        }
        if state_of(reader).map_err(CopyFailure::Source)? != sources {
            let path = reader.sources().first().map(|source| source.path().to_owned());
            let detail = "was touched while it was assembled";
            return Err(CopyFailure::Source(Error::changed(path.unwrap_or_default(), detail)));
        }
        let source = reader
            .sources()
            .first()
            .and_then(|source| source.path().parent())
            .map(|path| path.to_string_lossy().into_owned())
            .unwrap_or_default();
        let locked = self.folder.lock()?;
        let record = locked.publish(partial, |copy| Record {
            version: version.to_owned(),
            sha256,
            sources,
            source,
            copy,
            written: unix_now(),
        });
        record.map_err(|e| CopyFailure::Folder("write to", e))
    }

    /// Frees space and creates the copy.
    fn begin(&self, version: &str, len: u64) -> Result<Partial, CopyFailure> {
        let fail = |e| CopyFailure::Folder("look at", e);
        let locked = self.folder.lock()?;
        locked.sweep().map_err(fail)?;
        if locked.is_being_written(version).map_err(fail)? {
            return Err(CopyFailure::Busy);
        }
        for evicted in locked.make_room(len)? {
            tracing::info!("{}: evicted the copy {evicted}", shown_path(self.folder.path()));
            // An entry that is queued stays, because its job is in the queue.
            let queued = |entry: &CopyEntry| matches!(entry.stage, Stage::Queued);
            let mut state = self.state.lock();
            if state.entries.get(&evicted).is_some_and(|entry| !queued(entry)) {
                state.entries.remove(&evicted);
            }
        }
        // The path is recorded before the file exists, so that `stop` always finds it.
        {
            let mut state = self.state.lock();
            if state.stopping {
                return Err(CopyFailure::Stopped);
            }
            state.partial = Some(self.folder.partial_path(version));
        }
        locked.begin(version, len)
    }

    /// Verifies a copy that has changed since its last verification, by the checksum in its record.
    fn verify(&self, record: Record) -> Result<Record, CopyFailure> {
        self.set_stage(&record.version, Stage::Verifying);
        let fail = |e| CopyFailure::Folder("verify a copy in", e);
        let opened = self.folder.open_copy(&record.version).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::WouldBlock => CopyFailure::Gone,
            _ => fail(e),
        });
        let (file, copy) = opened?;
        let pace = |done, took| self.pace(&record.version, done, took);
        let same = copy.len == record.copy.len
            && copy::checksum(&file, copy.len, &pace)? == record.sha256
            && local_version(&file.metadata().map_err(fail)?) == copy;
        let locked = self.folder.lock()?;
        if !same {
            locked.remove(&record.version).map_err(fail)?;
            return Err(CopyFailure::Differs);
        }
        let record = Record { copy, ..record };
        locked.write_record(&record).map_err(fail)?;
        Ok(record)
    }

    /// Waits until the last change of the sources is at least `SETTLED` ago.
    fn settle(&self, reader: &Reader) -> Result<(), CopyFailure> {
        let ages = reader.sources().iter().filter_map(|source| {
            let (seconds, nanos) = source.version().attributes_changed()?;
            let seconds = Duration::from_secs(u64::try_from(seconds).ok()?);
            let nanos = Duration::from_nanos(u64::try_from(nanos).ok()?);
            // A time in the future is ignored.
            (SystemTime::UNIX_EPOCH + seconds + nanos).elapsed().ok()
        });
        match ages.min() {
            Some(age) if age < SETTLED => self.sleep(SETTLED - age),
            _ => Ok(()),
        }
    }

    /// Records the progress, and pauses if readers are active.
    fn pace(&self, version: &str, done: u64, took: Duration) -> Result<(), CopyFailure> {
        if let Some(entry) = self.state.lock().entries.get_mut(version) {
            entry.done = done;
        }
        let served = Duration::from_millis(self.last_served.load(Ordering::Relaxed));
        let busy = !served.is_zero() && self.started.elapsed().saturating_sub(served) < RECENT;
        let pause = if busy { (took * YIELD_FACTOR).min(YIELD_MAX) } else { Duration::ZERO };
        self.sleep(pause)
    }

    /// Sleeps for `pause`. Fails at once when the assembler stops.
    fn sleep(&self, pause: Duration) -> Result<(), CopyFailure> {
        let deadline = Instant::now() + pause;
        let mut state = self.state.lock();
        loop {
            if state.stopping {
                return Err(CopyFailure::Stopped);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            state = self.wake.wait_timeout(state, left);
        }
    }

    fn set_stage(&self, version: &str, stage: Stage) {
        if let Some(entry) = self.state.lock().entries.get_mut(version) {
            (entry.stage, entry.done) = (stage, 0);
        }
    }

    /// Records the outcome of the work on `version`.
    fn finish(&self, version: &str, outcome: Result<Record, CopyFailure>) {
        let mut locked = self.state.lock();
        let state = &mut *locked;
        state.partial = None;
        let Some(entry) = state.entries.get_mut(version) else { return };
        let failure = match outcome {
            Ok(record) => {
                entry.done = entry.len;
                entry.stage = Stage::Ready { record, open: Weak::new(), touched: None };
                return;
            }
            Err(CopyFailure::Stopped | CopyFailure::Gone) => {
                entry.stage = Stage::Absent;
                return;
            }
            Err(failure) => failure,
        };
        let back_off = match failure {
            CopyFailure::TooLarge { .. } => None,
            CopyFailure::Busy => Some(BUSY_BACK_OFF),
            _ => Some(BACK_OFF),
        };
        let again = back_off.map(|time| Instant::now() + time);
        entry.stage = Stage::Failed { again };
        let why = failure.to_string();
        // A reason is logged only once for each file.
        if entry.failure != why && !matches!(failure, CopyFailure::Busy) {
            let dir = shown_path(self.folder.path());
            tracing::warn!("{version} is not assembled in {dir}: {why}");
        }
        entry.failure = why;
        if matches!(failure, CopyFailure::Folder(..) | CopyFailure::Differs) {
            state.backoff = again;
            state.cancel_writes();
        }
    }

    fn status(&self, usage: Option<(u64, u64)>, answered: bool) -> AssembleStatus {
        let state = self.state.lock();
        let known = state.entries.iter();
        let mut files: Vec<CopyStatus> =
            known.filter_map(|(version, entry)| entry.status(version)).collect();
        files.sort_by(|a, b| a.version.cmp(&b.version));
        let (budget, used) = usage.unzip();
        let backoff = state.backoff.map(|until| until.saturating_duration_since(Instant::now()));
        AssembleStatus {
            dir: self.folder.path().to_string_lossy().into_owned(),
            budget,
            used,
            stalled: !answered,
            backoff_s: backoff.map_or(0, |rest| rest.as_secs()),
            files,
        }
    }
}

/// Whether an open failed only because too many files are open. Such an error says nothing about the copy.
fn lacks_descriptors(error: &io::Error) -> bool {
    error
        .raw_os_error()
        .is_some_and(|number| [nix::libc::EMFILE, nix::libc::ENFILE].contains(&number))
}
