//! Loading ahead: if the tensors of an open checkpoint are requested in a known order, the next ones are loaded into
//! bounded memory before their requests.
//!
//! Python allocates the memory, and threads of this module fill it. These threads never take the GIL, and end when
//! there is nothing to load. Python objects are dropped only while the state is unlocked, because a drop may run code
//! of the user.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use nix::unistd::{getpid, gettid};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorfs::internal::io::Region;
use tensorfs::internal::loader as core;
use tensorfs::internal::order::{Order, Orders, RequestLearner};
use tensorfs::internal::plan;
use tensorfs::internal::process::{PerProcess, token};
use tensorfs::internal::sync::{Condvar, Mutex};

use crate::checkpoint::Checkpoint;
use crate::errors::raised;
use crate::loading::{Loader, Memory, Plan, facts, run_of};
use crate::waiting::POLL_INTERVAL;

/// Maximum number of bytes that are loaded ahead for one open checkpoint, and for all of them together.
const HELD_MAX: u64 = 256 << 20;
const HELD_MAX_ALL: u64 = 512 << 20;

/// Tensors of fewer bytes than this are small. If the page cache holds a small tensor, it is copied when it is
/// requested, because a copy by another thread would take longer.
const SMALL_MAX: u64 = 1 << 20;

/// Maximum number of small tensors that are loaded ahead. New ones are begun once at most half of this number is left.
const SMALL_HELD_MAX: usize = 2048;

/// Number of expected tensors that are considered for loading ahead, if small tensors are not loaded ahead, and if they
/// are.
const LOOK_AHEAD: usize = 32;
const LOOK_AHEAD_SMALL: usize = 2560;

/// Number of threads that load ahead for one open checkpoint: while one thread finishes a tensor, the other keeps the
/// disk busy.
const THREADS: usize = 2;

/// Number of requests after which a tensor that was expected but not requested is dropped, if its memory is needed.
const STALE: u64 = 24;

/// Number of unexpected requests in a row after which everything that was loaded ahead is dropped.
const LOST: u32 = 4;

/// For checkpoints with more tensors than this, the orders are computed only at the second request.
const ORDERED_AT_ONCE: usize = 4096;

/// Bytes that are loaded ahead for all open checkpoints of this process.
fn held_by_all() -> &'static AtomicU64 {
    static HELD: PerProcess<AtomicU64> = PerProcess::new();
    HELD.get_or_init(AtomicU64::default)
}

/// The last order in this process that predicted requests, as its index in `Order::ALL`. An index past the end of
/// `Order::ALL` means that no order has predicted requests yet.
static USUAL: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Tensors that are loaded together.
struct Job {
    plan: Arc<plan::Plan>,
    /// Memory of the load, until the load is done. After that, its tensors keep the memory alive.
    regions: Mutex<Vec<Arc<Region>>>,
    checkpoint: Arc<tensorfs::Checkpoint>,
    loader: Arc<core::Loader>,
    /// Number of tensors of the job that no request has taken yet. It changes only while the state is locked.
    left: AtomicUsize,
    cancelled: AtomicBool,
    stats: Mutex<Option<core::Stats>>,
    /// The timeout error of the load. It is kept so that no later caller waits for the same source again.
    overdue: Mutex<Option<tensorfs::Error>>,
}

/// The payload of a tensor, and the statistics of its load.
type Taken<'py> = (Py<PyAny>, Option<Bound<'py, PyDict>>);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Waiting,
    Loading,
    Loaded,
    Failed,
}

/// A tensor that is loaded ahead.
struct Entry {
    job: Arc<Job>,
    progress: Progress,
    len: u64,
    /// Whether the job of this tensor loads other tensors too.
    is_with_others: bool,
    /// Number of the request at which the load of this tensor was begun.
    born: u64,
    /// The Python object from which Python code makes the tensor.
    payload: Py<PyAny>,
}

#[derive(Default)]
struct State {
    learner: Option<RequestLearner>,
    entries: HashMap<usize, Entry>,
    /// Tensors whose memory is being allocated, with their length in bytes. A request for such a tensor removes it.
    chosen: HashMap<usize, u64>,
    /// Tensors that are not loaded ahead, because they are mapped.
    mapped: HashSet<usize>,
    queue: VecDeque<Arc<Job>>,
    /// Bytes of all tensors in `entries`.
    held: u64,
    small: usize,
    requests: u64,
    /// Number of unexpected requests in a row.
    lost: u32,
    threads: usize,
    /// Whether loading ahead has ended.
    closed: bool,
    unused: u64,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl State {
    /// Removes a tensor, and cancels its job if no other tensor belongs to it.
    fn remove(&mut self, position: usize) -> Option<Entry> {
        let entry = self.entries.remove(&position)?;
        self.held -= entry.len;
        held_by_all().fetch_sub(entry.len, Ordering::Relaxed);
        self.small -= usize::from(entry.len < SMALL_MAX);
        if entry.job.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.queue.retain(|job| !Arc::ptr_eq(job, &entry.job));
            entry.job.cancelled.store(true, Ordering::Relaxed);
        }
        Some(entry)
    }

    /// Removes tensors that were begun before request `born`, except those in `kept`.
    fn remove_older(&mut self, born: u64, kept: &[usize]) -> Vec<Entry> {
        let is_old =
            |(position, entry): &(&usize, &Entry)| entry.born < born && !kept.contains(position);
        let old: Vec<usize> =
            self.entries.iter().filter(is_old).map(|(&position, _)| position).collect();
        let removed: Vec<Entry> =
            old.into_iter().filter_map(|position| self.remove(position)).collect();
        self.unused += removed.iter().map(|entry| entry.len).sum::<u64>();
        removed
    }

    /// Returns the tensors to begin now: the next expected tensors, as far as memory allows. Small tensors are among
    /// them only if `small` is true. Tensors for which `maps` returns true are left out, because mapping them is better
    /// than loading them. `stale` gets the entries that are removed to free memory. `position` is the tensor of the
    /// current request.
    fn next(
        &mut self,
        checkpoint: &tensorfs::Checkpoint,
        position: usize,
        small: bool,
        maps: Option<&core::Loader>,
        stale: &mut Vec<Entry>,
    ) -> Vec<usize> {
        let Some(learner) = self.learner.take() else { return Vec::new() };
        let (mut free, mut wanted) = (self.free(position), Vec::new());
        // Most requests begin no small tensors, because these are begun in large batches.
        let small = small && self.small <= SMALL_HELD_MAX / 2;
        let mut left = if small { SMALL_HELD_MAX - self.small } else { 0 };
        let look = if left > 0 { LOOK_AHEAD_SMALL } else { LOOK_AHEAD };
        for tensor in learner.next().take(look) {
            let found = checkpoint.catalog().tensor_at(tensor);
            let is_small = found.len < SMALL_MAX;
            if found.len == 0 || (is_small && left == 0) {
                continue;
            }
            if self.entries.contains_key(&tensor)
                || self.chosen.contains_key(&tensor)
                || self.mapped.contains(&tensor)
            {
                continue;
            }
            let is_mapped = |loader: &core::Loader| {
                run_of(checkpoint, tensor).is_some_and(|(shard, range)| {
                    loader.is_better_mapped(checkpoint, shard, &range)
                })
            };
            if maps.is_some_and(is_mapped) {
                self.mapped.insert(tensor);
                continue;
            }
            if found.len > free && wanted.is_empty() {
                let mut kept: Vec<usize> = learner.next().take(LOOK_AHEAD_SMALL).collect();
                kept.push(position);
                stale.extend(self.remove_older(self.requests.saturating_sub(STALE), &kept));
                free = self.free(position);
            }
            if found.len > free {
                break;
            }
            left -= usize::from(is_small);
            free -= found.len;
            wanted.push(tensor);
            self.chosen.insert(tensor, found.len);
        }
        self.learner = Some(learner);
        wanted
    }

    fn mark(&mut self, job: &Arc<Job>, progress: Progress) {
        let mine = self.entries.values_mut().filter(|entry| Arc::ptr_eq(&entry.job, job));
        mine.for_each(|entry| entry.progress = progress);
    }

    /// Bytes that may be loaded ahead now. The tensor at `position` does not count, because it is about to be returned.
    fn free(&self, position: usize) -> u64 {
        let taken = self.entries.get(&position).map_or(0, |entry| entry.len);
        let chosen: u64 = self.chosen.values().sum();
        let all = (held_by_all().load(Ordering::Relaxed) + chosen).saturating_sub(taken);
        let held = self.held - taken + chosen;
        HELD_MAX.saturating_sub(held).min(HELD_MAX_ALL.saturating_sub(all))
    }
}

/// The tensors that are loaded ahead for one open checkpoint.
#[pyclass(frozen, module = "tensorfs._tensorfs")]
pub(crate) struct Ahead {
    shared: Arc<Shared>,
    /// Token of the process that made this object. A child of a fork lacks the threads of that process.
    process: u64,
}

#[pymethods]
impl Ahead {
    #[new]
    fn new() -> Ahead {
        Ahead { shared: Arc::default(), process: token() }
    }

    /// Records a request for the tensor at `position`. Returns whether this tensor is loaded ahead, so that `take`
    /// returns it. Also returns the positions of the tensors whose loads have to begin now. If `maps` is given, loads
    /// of tensors that are better mapped are not begun. If `begins` is false, no loads are begun.
    #[pyo3(signature = (checkpoint, position, small, maps=None, begins=true))]
    fn ask(
        &self,
        py: Python<'_>,
        checkpoint: &Checkpoint,
        position: usize,
        small: bool,
        maps: Option<&Loader>,
        begins: bool,
    ) -> (bool, Vec<usize>) {
        if token() != self.process {
            return (false, Vec::new());
        }
        let checkpoint = checkpoint.own();
        if position >= checkpoint.catalog().len() {
            return (false, Vec::new());
        }
        let mut state = self.shared.state.lock();
        if state.closed {
            return (false, Vec::new());
        }
        state.requests += 1;
        if state.learner.is_none() {
            // Many checkpoints are opened for one tensor only.
            if state.requests == 1 && checkpoint.catalog().len() > ORDERED_AT_ONCE {
                return (false, Vec::new());
            }
            drop(state);
            let orders = py.detach(|| Orders::of_catalog(checkpoint.catalog()));
            state = self.shared.state.lock();
            let usual = Order::ALL.get(USUAL.load(Ordering::Relaxed)).copied();
            state.learner.get_or_insert_with(|| RequestLearner::new(orders, usual));
        }
        let expected =
            state.learner.as_mut().is_some_and(|learner| learner.ask(position, reader()));
        state.chosen.remove(&position);
        let mut stale = Vec::new();
        let mut wanted = Vec::new();
        if expected {
            state.lost = 0;
            if begins {
                let maps = maps.map(Loader::own);
                wanted = state.next(&checkpoint, position, small, maps.as_deref(), &mut stale);
            }
            let order = state.learner.as_ref().and_then(RequestLearner::order);
            if let Some(index) = Order::ALL.iter().position(|other| Some(*other) == order) {
                USUAL.store(index, Ordering::Relaxed);
            }
        } else {
            state.lost += 1;
            if state.lost >= LOST {
                stale = state.remove_older(u64::MAX, &[position]);
            }
        }
        let is_there = state.entries.contains_key(&position);
        drop(state);
        drop(stale);
        (is_there, wanted)
    }

    /// Begins to load `plan` into `memory`, in the background. `tensors` has, for each tensor of the plan, its
    /// position, its length in bytes, and the payload that `take` returns.
    fn begin(
        &self,
        loader: &Loader,
        checkpoint: &Checkpoint,
        plan: &Plan,
        memory: Vec<Memory>,
        tensors: Vec<(usize, u64, Py<PyAny>)>,
    ) -> PyResult<()> {
        if token() != self.process {
            return Ok(());
        }
        let job = Arc::new(Job {
            plan: plan.plan.clone(),
            regions: Mutex::new(plan.regions(memory)?),
            checkpoint: checkpoint.own(),
            loader: loader.own(),
            left: AtomicUsize::new(0),
            cancelled: AtomicBool::new(false),
            stats: Mutex::default(),
            overdue: Mutex::default(),
        });
        let mut unwanted = Vec::new();
        let mut state = self.shared.state.lock();
        if state.closed {
            drop(state);
            return Ok(());
        }
        let (born, is_with_others) = (state.requests, tensors.len() > 1);
        for (position, len, payload) in tensors {
            if state.chosen.remove(&position).is_none() || state.entries.contains_key(&position) {
                unwanted.push(payload);
                continue;
            }
            state.held += len;
            state.small += usize::from(len < SMALL_MAX);
            held_by_all().fetch_add(len, Ordering::Relaxed);
            job.left.fetch_add(1, Ordering::Relaxed);
            let (job, progress) = (job.clone(), Progress::Waiting);
            state
                .entries
                .insert(position, Entry { job, progress, len, is_with_others, born, payload });
        }
        if job.left.load(Ordering::Relaxed) == 0 {
            // All tensors of the job were requested in the meantime.
            drop(state);
            return Ok(());
        }
        state.queue.push_back(job);
        let starts = state.threads < THREADS;
        state.threads += usize::from(starts);
        drop(state);
        drop(unwanted);
        if starts {
            let (shared, process) = (self.shared.clone(), self.process);
            let thread = std::thread::Builder::new().name("tensorfs-ahead".to_owned());
            if thread.spawn(move || work(&shared, process)).is_err() {
                // If no thread can be started, nothing is loaded ahead, and each request loads its own tensor.
                self.shared.state.lock().threads -= 1;
                self.close();
            }
        }
        Ok(())
    }

    /// Records that no load will begin for these tensors. Loads that have begun already are not affected.
    fn drop_choices(&self, positions: Vec<usize>) {
        if token() == self.process {
            let mut state = self.shared.state.lock();
            state.chosen.retain(|position, _| !positions.contains(position));
        }
    }

    /// Waits for a tensor that is loaded ahead. Returns the payload of the tensor. Also returns the statistics of its
    /// load, unless an earlier call returned them. `None` if the caller has to load the tensor.
    fn take<'py>(
        &self,
        py: Python<'py>,
        loader: &Loader,
        position: usize,
    ) -> PyResult<Option<Taken<'py>>> {
        if token() != self.process {
            return Ok(None);
        }
        let main = gettid() == getpid();
        loop {
            let mut state = self.shared.state.lock();
            let Some(progress) = state.entries.get(&position).map(|entry| entry.progress) else {
                return Ok(None);
            };
            // If the job of the tensor is still queued and loads no other tensor, the caller loads the tensor, which is
            // faster than to wait for the job.
            let in_turn =
                |entry: &Entry| entry.progress == Progress::Waiting && entry.is_with_others;
            let waits = state.entries.get(&position).is_some_and(in_turn);
            if progress != Progress::Loading && !waits {
                let entry = state.remove(position);
                drop(state);
                let Some(entry) = entry else { return Ok(None) };
                if let Some(e) = entry.job.overdue.lock().take() {
                    return Err(raised(py, &e, None));
                }
                if progress != Progress::Loaded {
                    return Ok(None);
                }
                // The tensor may have been loaded long ago, so the files are checked for changes.
                loader.check(py, &entry.job.checkpoint, position)?;
                let stats = entry.job.stats.lock().take();
                let told = stats.map(|stats| facts(py, &stats)).transpose()?;
                return Ok(Some((entry.payload, told)));
            }
            drop(state);
            py.detach(|| {
                let is_loading = |state: &mut State| {
                    let entry = state.entries.get(&position);
                    let busy = [Progress::Waiting, Progress::Loading];
                    entry.is_some_and(|entry| busy.contains(&entry.progress))
                };
                let waiting = self.shared.changed.wait_timeout_while(
                    self.shared.state.lock(),
                    POLL_INTERVAL,
                    is_loading,
                );
                drop(waiting);
            });
            if main && let Err(interrupted) = py.check_signals() {
                Ahead::drop(self);
                loader.forget();
                return Err(interrupted);
            }
        }
    }

    /// Drops everything that is loaded ahead, and ends loading ahead. Does not wait.
    fn close(&self) {
        if token() != self.process {
            return;
        }
        self.shared.state.lock().closed = true;
        Ahead::drop(self);
    }

    /// Drops everything that is loaded ahead or being loaded. Does not wait.
    fn drop(&self) {
        if token() == self.process {
            let mut state = self.shared.state.lock();
            state.chosen.clear();
            let dropped = state.remove_older(u64::MAX, &[]);
            drop(state);
            drop(dropped);
        }
    }

    /// Number of bytes that are loaded ahead now, and number of bytes that were loaded ahead but never used.
    #[getter]
    fn bytes(&self) -> (u64, u64) {
        if token() != self.process {
            return (0, 0);
        }
        let state = self.shared.state.lock();
        (state.held, state.unused)
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.close();
        if token() != self.process {
            // In a child, the state shared with threads of the parent must stay untouched.
            std::mem::forget(self.shared.clone());
        }
    }
}

/// A number that is unique among living threads.
fn reader() -> u64 {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| (&raw const *here) as u64)
}

/// Body of a thread: loads the queued jobs, and ends when the queue is empty.
fn work(shared: &Shared, process: u64) {
    loop {
        let mut state = shared.state.lock();
        let Some(job) = state.queue.pop_front() else {
            state.threads -= 1;
            return;
        };
        state.mark(&job, Progress::Loading);
        drop(state);
        let loaded = catch_unwind(AssertUnwindSafe(|| load(&job))).unwrap_or(false);
        // If a child is forked during the load, only the parent has this thread.
        debug_assert_eq!(process, token());
        let mut state = shared.state.lock();
        state.mark(&job, if loaded { Progress::Loaded } else { Progress::Failed });
        drop(state);
        shared.changed.notify_all();
        // The memory is freed by the thread that takes the tensor, which holds the GIL.
        drop(job);
    }
}

/// Carries out a job. If it fails, the requests for its tensors load them and report the error.
fn load(job: &Job) -> bool {
    let mut goes_on = |_| !job.cancelled.load(Ordering::Relaxed);
    // The job must not keep the memory after the load: a tensor that is never requested would keep the memory of all
    // tensors of its job.
    let regions = std::mem::take(&mut *job.regions.lock());
    // SAFETY: the caller of `begin` gave the memory to this plan alone, and does not use it before
    // the job is done; the plan is of this checkpoint.
    let filled = unsafe { job.loader.fill(&job.checkpoint, &job.plan, &regions, &mut goes_on) };
    match filled {
        Ok(report) => {
            *job.stats.lock() = Some(report.stats);
            true
        }
        Err(tensorfs::Error::Io { ref source, .. }) if source.kind() == ErrorKind::TimedOut => {
            *job.overdue.lock() = filled.err();
            false
        }
        Err(_) => false,
    }
}
