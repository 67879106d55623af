//! Loads: plans for requests, and the loaders of this process.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lru::LruCache;
use nix::unistd::{getpid, gettid};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use tensorfs::internal::cast::Cast;
use tensorfs::internal::catalog::ShardId;
use tensorfs::internal::device::{DeviceRegion, ForeignStream, Gpu};
use tensorfs::internal::error::quoted;
use tensorfs::internal::io::{Backend, DirectIo, Region, Settings};
use tensorfs::internal::loader::{self as core, CachedPart, LoaderConfig};
use tensorfs::internal::plan::{self, PlanLimits, TensorRequest};
use tensorfs::internal::process::PerProcess;
use tensorfs::internal::sync::{Mutex, MutexGuard};
use tensorfs::{Dtype, Piece};

use crate::checkpoint::Checkpoint;
use crate::errors::raised;
use crate::memory::{Area, PAGE, bytes_at, region_at, start_of};
use crate::waiting::{POLL_INTERVAL, beside};

/// Minimum length of memory, in bytes, for which huge pages are requested.
const HUGE_MIN: usize = 4 << 20;

/// Number of bytes of system memory that must stay free when a tensor is loaded ahead.
const SPARE: u64 = 512 << 20;

/// Settings of a loader. Equal settings share one loader.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct LoaderKey {
    chunk: u64,
    depth: usize,
    staging: u64,
    direct: DirectIo,
    backend: Backend,
    /// Whether reads to a GPU use cuFile if possible.
    cufile: bool,
    timeout: Option<Duration>,
    /// Number of the GPU to load to. `None` for host memory.
    gpu: Option<u32>,
}

/// Maximum number of loaders that are kept for later loads. It is small because each loader has threads.
const LOADERS_MAX: NonZeroUsize = NonZeroUsize::new(8).expect("not zero");

/// The kept loaders, by their settings.
type Loaders = LruCache<LoaderKey, Arc<core::Loader>>;

/// The loaders of this process. A child of a fork starts with none.
fn loaders() -> MutexGuard<'static, Loaders> {
    static LOADERS: PerProcess<Mutex<Loaders>> = PerProcess::new();
    LOADERS.get_or_init(|| Mutex::new(LruCache::new(LOADERS_MAX))).lock()
}

/// A request: position of the tensor, the requested part as (start, end) in each dimension, dtype of the result, and
/// address of the buffer.
type PyRequest = (usize, Option<Vec<(u64, u64)>>, Option<String>, Option<u64>);

/// The settings of a loader. Loads with equal settings share one loader and its threads.
#[pyclass(frozen, module = "tensorfs._tensorfs")]
pub(crate) struct Loader(LoaderKey);

impl Loader {
    pub(crate) fn own(&self) -> Arc<core::Loader> {
        let mut loaders = loaders();
        if let Some(loader) = loaders.get(&self.0) {
            return loader.clone();
        }
        let LoaderKey { chunk, depth, staging, direct, backend, cufile, timeout, gpu } = self.0;
        let settings = Settings::new(backend, direct, timeout);
        let limits = match gpu {
            Some(_) => PlanLimits { chunk, moved: chunk, ..PlanLimits::device() },
            None => PlanLimits { chunk, ..PlanLimits::default() },
        };
        let loader = Arc::new(core::Loader::new(LoaderConfig {
            settings,
            depth,
            staging,
            limits,
            cufile: cufile.then(|| core::CUFILE_MODULE.into()),
            ..LoaderConfig::default()
        }));
        let longest_unused = loaders.push(self.0, loader.clone());
        drop(loaders);
        drop(longest_unused);
        loader
    }

    fn planned(
        &self,
        py: Python<'_>,
        loader: &core::Loader,
        checkpoint: &tensorfs::Checkpoint,
        requests: Vec<TensorRequest>,
    ) -> PyResult<Plan> {
        let outcome = py.detach(|| {
            let check = |needed| match self.0.gpu {
                None => loader.check_memory(checkpoint, needed),
                Some(ordinal) => room_of_gpu(ordinal, needed),
            };
            check(plan::min_new_memory(checkpoint.catalog(), &requests))?;
            let plan = loader.plan(checkpoint, &requests);
            check(plan.as_ref().map_or(0, plan::Plan::new_memory)).map(|()| plan)
        });
        let planned = outcome.map_err(|e: tensorfs::Error| match self.0.gpu {
            None => PyMemoryError::new_err(e.to_string()),
            Some(_) => raised(py, &e, None),
        })?;
        let plan = planned.map_err(|e| raised(py, &e, None))?;
        Ok(self.named(checkpoint, requests, plan))
    }

    fn named(
        &self,
        checkpoint: &tensorfs::Checkpoint,
        requests: Vec<TensorRequest>,
        plan: plan::Plan,
    ) -> Plan {
        let names = named(checkpoint, &requests);
        let tensors = requests.into_iter().map(|request| request.tensor).collect();
        Plan { plan: Arc::new(plan), names, tensors, on_gpu: self.0.gpu.is_some() }
    }

    /// Checks that the files of a tensor are unchanged. If one of the file systems might never answer, the check runs
    /// on another thread, within the deadline.
    ///
    /// # Errors
    /// The errors of a read, and `TimeoutError` past the deadline.
    pub(crate) fn check(
        &self,
        py: Python<'_>,
        checkpoint: &Arc<tensorfs::Checkpoint>,
        position: usize,
    ) -> PyResult<()> {
        let tensor = checkpoint.catalog().tensor_at(position);
        let name = tensor.name;
        let source_of = |piece: Piece<'_>| checkpoint.sources()[piece.shard.0 as usize].clone();
        let sources: Vec<_> = tensor.pieces().map(source_of).collect();
        let checked = if sources.iter().all(|source| !source.may_block()) {
            sources.iter().try_for_each(|source| source.check())
        } else {
            let path = sources[0].path().to_owned();
            let check = move || sources.iter().try_for_each(|source| source.check());
            beside(py, "tensorfs-check", self.timeout(), "check", Some(&path), check)?
        };
        checked.map_err(|e| raised(py, &e, Some(name)))
    }

    /// Copies a part of a tensor to the memory at `address`, if the page cache holds the part. `len` is the length of
    /// the part in bytes. Returns whether it copied.
    pub(crate) fn copy_part(
        &self,
        py: Python<'_>,
        checkpoint: &tensorfs::Checkpoint,
        position: usize,
        part: &CachedPart,
        address: usize,
        len: usize,
    ) -> PyResult<bool> {
        let loader = self.own();
        // SAFETY: the Python caller owns these bytes, and no other code uses them until this
        // returns.
        let into = unsafe { bytes_at(address, len)? };
        let copied = py.detach(|| loader.copy_part(checkpoint, part, into));
        copied.map_err(|e| {
            let name = checkpoint.catalog().tensor_at(position).name;
            raised(py, &e, Some(name))
        })
    }

    /// Drops the loader of these settings, so that its threads end.
    pub(crate) fn forget(&self) {
        // The drop, which ends its threads, comes after the lock is free.
        let forgotten = loaders().pop(&self.0);
        drop(forgotten);
    }
}

#[pymethods]
impl Loader {
    /// Sizes are in bytes, and `timeout` is in seconds. Arguments that are `None` get default values.
    #[new]
    #[pyo3(signature = (*, chunk=None, depth=None, staging=None, source="auto", engine="auto", timeout=None, gpu=None))]
    fn new(
        chunk: Option<u64>,
        depth: Option<usize>,
        staging: Option<u64>,
        source: &str,
        engine: &str,
        timeout: Option<f64>,
        gpu: Option<u32>,
    ) -> PyResult<Loader> {
        let usual = if gpu.is_some() { LoaderConfig::device() } else { LoaderConfig::default() };
        let bad = |word: &str| PyValueError::new_err(format!("there is no {word}"));
        let timeout = match timeout {
            None => usual.settings.timeout,
            Some(0.0) => None,
            Some(seconds) => Some(
                Duration::try_from_secs_f64(seconds)
                    .map_err(|_| PyValueError::new_err("the timeout is no number of seconds"))?,
            ),
        };
        Ok(Loader(LoaderKey {
            chunk: chunk.unwrap_or(usual.limits.chunk),
            depth: depth.unwrap_or(usual.depth),
            staging: staging.unwrap_or(usual.staging),
            direct: match source {
                "auto" => DirectIo::Auto,
                "direct" => DirectIo::Always,
                "buffered" => DirectIo::Never,
                other => return Err(bad(other)),
            },
            backend: match engine {
                "auto" | "cufile" => Backend::Auto,
                "uring" => Backend::Uring,
                "threads" => Backend::Pread,
                other => return Err(bad(other)),
            },
            cufile: engine == "cufile",
            timeout,
            gpu,
        }))
    }

    /// The deadline of a read in seconds. `None` means no deadline.
    #[getter]
    pub(crate) fn timeout(&self) -> Option<f64> {
        self.0.timeout.map(|timeout| timeout.as_secs_f64())
    }

    /// Whether the loader loads to host memory.
    #[getter]
    fn on_cpu(&self) -> bool {
        self.0.gpu.is_none()
    }

    /// Shard and first byte of the tensor at `position`. `None` if the tensor is not stored in one run of bytes, if a
    /// view casts it, or if it consists of zeros that no shard holds.
    ///
    /// # Errors
    /// Fails if the shard has changed.
    fn run_of(
        &self,
        py: Python<'_>,
        checkpoint: &Checkpoint,
        position: usize,
    ) -> PyResult<Option<(u32, u64)>> {
        let checkpoint = checkpoint.own();
        let Some((shard, range)) = run_of(&checkpoint, position) else { return Ok(None) };
        self.check(py, &checkpoint, position)?;
        Ok(Some((shard.0, range.start)))
    }

    /// Whether the `len` bytes from `start` on in this shard are better mapped than read. They are if the shard is a
    /// local file, and the page cache holds most of these bytes or the tensors are small on average.
    fn is_better_mapped(
        &self,
        py: Python<'_>,
        checkpoint: &Checkpoint,
        shard: u32,
        start: u64,
        len: u64,
    ) -> bool {
        let (loader, checkpoint) = (self.own(), checkpoint.own());
        py.detach(|| loader.is_better_mapped(&checkpoint, ShardId(shard), &(start..start + len)))
    }

    /// Plans the load of a tensor that is not requested yet. `None` if there is not enough memory.
    fn plan_ahead(
        &self,
        py: Python<'_>,
        checkpoint: &Checkpoint,
        position: usize,
    ) -> PyResult<Option<Plan>> {
        let (loader, checkpoint) = (self.own(), checkpoint.own());
        check_position(&checkpoint, position)?;
        let requests = vec![TensorRequest::whole(position)];
        let needed = plan::min_new_memory(checkpoint.catalog(), &requests).saturating_add(SPARE);
        if py.detach(|| loader.check_memory(&checkpoint, needed).is_err()) {
            return Ok(None);
        }
        let plan = loader.plan(&checkpoint, &requests).map_err(|e| raised(py, &e, None))?;
        Ok(Some(self.named(&checkpoint, requests, plan)))
    }

    /// Plans the load of these tensors.
    fn plan(
        &self,
        py: Python<'_>,
        checkpoint: &Checkpoint,
        requests: Vec<PyRequest>,
    ) -> PyResult<Plan> {
        let (loader, checkpoint) = (self.own(), checkpoint.own());
        let mut native = Vec::with_capacity(requests.len());
        for (tensor, part, cast, destination) in requests {
            check_position(&checkpoint, tensor)?;
            let part = part.map(|part| part.into_iter().map(|(from, to)| from..to).collect());
            let cast = cast.as_deref().map(dtype).transpose()?;
            native.push(TensorRequest { tensor, part, cast, destination });
        }
        self.planned(py, &loader, &checkpoint, native)
    }

    /// Plans the load of all whole tensors, without casts, in file order.
    fn plan_all(&self, py: Python<'_>, checkpoint: &Checkpoint) -> PyResult<Plan> {
        let requests = checkpoint.file_order().into_iter().map(TensorRequest::whole).collect();
        self.planned(py, &self.own(), &checkpoint.own(), requests)
    }

    /// Carries out a plan. `memory` has an item for each region: an area, or the address, length and owner of other
    /// memory. `Plan::rooms` says how long each item must be. If the requests gave the address of a region, its item
    /// begins at that address. GPU memory is written after the work that is in `stream` at the time of the call. Ctrl-C
    /// and `cancel` end the load. After such an end, the memory must not be read. Returns the statistics.
    #[pyo3(signature = (checkpoint, plan, memory, cancel=None, stream=None))]
    fn fill<'py>(
        &self,
        py: Python<'py>,
        checkpoint: &Checkpoint,
        plan: &Plan,
        memory: Vec<Memory>,
        cancel: Option<&Cancel>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let to = match self.0.gpu {
            None => To::Host(plan.regions(memory)?),
            Some(ordinal) => {
                let gpu = py.detach(|| Gpu::open(ordinal)).map_err(|e| raised(py, &e, None))?;
                To::Gpu(plan.device_regions(&gpu, memory)?, gpu)
            }
        };
        let (loader, checkpoint) = (self.own(), checkpoint.own());
        let (mut interrupted, mut cancelled): (Option<PyErr>, bool) = (None, false);
        let mut looked = Instant::now();
        // Only the main thread handles signals. In other threads, the interpreter may be shutting down during the call.
        let main = gettid() == getpid();
        let filled = py.detach(|| {
            let mut goes_on = |_| {
                cancelled = cancel.is_some_and(|cancel| cancel.0.load(Ordering::Relaxed));
                if main && looked.elapsed() >= POLL_INTERVAL {
                    looked = Instant::now();
                    // `None` if the interpreter is ending.
                    let signals = Python::try_attach(|py| py.check_signals());
                    interrupted = signals.and_then(Result::err);
                }
                interrupted.is_none() && !cancelled
            };
            match &to {
                // SAFETY: the Python caller uses the memory for nothing else until the load is
                // over, and the plan is of this checkpoint.
                To::Host(regions) => unsafe {
                    loader.fill(&checkpoint, &plan.plan, regions, &mut goes_on)
                },
                To::Gpu(regions, gpu) => {
                    // SAFETY: the Python caller keeps this stream of the GPU alive, and waits here.
                    let after = stream.map(|handle| unsafe { ForeignStream::from_raw(handle) });
                    loader.fill_device(gpu, &checkpoint, &plan.plan, regions, after, &mut goes_on)
                }
            }
        });
        // The owners of the memory are dropped here, where this thread holds the GIL. Pending reads keep their own
        // references.
        drop(to);
        if interrupted.is_some() || cancelled {
            // The loader may not be needed again soon, so it is dropped and its threads end.
            self.forget();
        }
        py.detach(|| drop(loader));
        if let Some(interrupted) = interrupted {
            return Err(interrupted);
        }
        let report = filled.map_err(|e| raised(py, &e, plan.names.as_deref()))?;
        facts(py, &report.stats)
    }

    /// Copies a tensor, or its part with (start, end) in each dimension, to memory of the same length, if the tensor is
    /// stored in one piece and the page cache holds the requested bytes. Returns whether it copied. If not, the content
    /// of the memory is undefined.
    fn copy_from_page_cache(
        &self,
        py: Python<'_>,
        checkpoint: &Checkpoint,
        position: usize,
        part: Option<Vec<(u64, u64)>>,
        address: usize,
        len: usize,
    ) -> PyResult<bool> {
        let part = part.map(|part| part.into_iter().map(|(from, to)| from..to).collect::<Vec<_>>());
        let checkpoint = checkpoint.own();
        match CachedPart::of(&checkpoint, position, part.as_deref()) {
            Some(part) => self.copy_part(py, &checkpoint, position, &part, address, len),
            None => Ok(false),
        }
    }
}

/// Shard and byte range of a tensor, if it is loaded as one stored run of bytes.
pub(crate) fn run_of(
    checkpoint: &tensorfs::Checkpoint,
    position: usize,
) -> Option<(ShardId, Range<u64>)> {
    let tensor = checkpoint.catalog().tensor_at(position);
    let mut pieces = tensor.pieces();
    let one = pieces.next().filter(|_| pieces.len() == 0 && tensor.cast().is_none());
    let is_run = |piece: &Piece<'_>| piece.is_contiguous() && !piece.is_zeros();
    one.filter(is_run).map(|piece| (piece.shard, piece.range.clone()))
}

/// The regions of a plan: in host memory, or in the memory of a GPU.
enum To {
    Host(Vec<Arc<Region>>),
    Gpu(Vec<DeviceRegion>, Gpu),
}

/// Refuses a load that needs more memory than the GPU has in total. Free memory cannot be checked: the driver counts
/// memory that torch keeps for later as used.
fn room_of_gpu(ordinal: u32, needed: u64) -> tensorfs::Result<()> {
    let (_, total) = Gpu::open(ordinal)?.memory()?;
    if needed <= total {
        return Ok(());
    }
    let message = format!("takes {needed} bytes of its memory, it has {total}; load a part of it");
    Err(tensorfs::Error::Device { device: format!("cuda:{ordinal}"), message, call: None })
}

/// The cost of a load, as a dict.
pub(crate) fn facts<'py>(py: Python<'py>, stats: &core::Stats) -> PyResult<Bound<'py, PyDict>> {
    let facts = PyDict::new(py);
    facts.set_item("bytes", stats.wanted)?;
    facts.set_item("bytes_read", stats.read)?;
    facts.set_item("bytes_read_to_place", stats.placed)?;
    facts.set_item("reads", stats.reads)?;
    facts.set_item("reads_direct", stats.reads_direct)?;
    facts.set_item("seconds", stats.load.as_secs_f64())?;
    facts.set_item("move_thread_seconds", stats.moving.as_secs_f64())?;
    facts.set_item("staging_peak", stats.staging_peak)?;
    facts.set_item("huge_bytes", stats.memory.huge)?;
    facts.set_item("huge_thread_seconds", stats.memory.huge_time.as_secs_f64())?;
    facts.set_item("small_bytes", stats.memory.small)?;
    facts.set_item("small_thread_seconds", stats.memory.small_time.as_secs_f64())?;
    if let Some(device) = &stats.device {
        facts.set_item("pinned", device.pinned)?;
        facts.set_item("pinning", device.pinning)?;
        facts.set_item("pin_seconds", device.pin.as_secs_f64())?;
        facts.set_item("copy_seconds", device.copy.as_secs_f64())?;
        facts.set_item("copies", device.copies)?;
        facts.set_item("cufile_bytes", device.cufile)?;
        if let Some(why) = &device.cufile_unused {
            facts.set_item("cufile_unused", why)?;
        }
    }
    Ok(facts)
}

/// Unpins and frees the pinned memory that is kept for later loads to GPUs.
#[pyfunction]
pub(crate) fn release_pinned(py: Python<'_>) {
    py.detach(|| {
        let all: Vec<_> = loaders().iter().map(|(_, loader)| loader.clone()).collect();
        all.iter().for_each(|loader| loader.release());
    });
}

/// Memory to load into, for one region of a plan.
#[derive(FromPyObject)]
pub(crate) enum Memory {
    /// Memory of this package.
    #[pyo3(transparent)]
    Area(Py<Area>),
    /// Other memory: address, length in bytes, and owner.
    Of((usize, usize, Py<PyAny>)),
}

/// Ends loads from another thread.
#[pyclass(frozen, module = "tensorfs._tensorfs")]
pub(crate) struct Cancel(AtomicBool);

#[pymethods]
impl Cancel {
    #[new]
    fn new() -> Cancel {
        Cancel(AtomicBool::new(false))
    }

    /// Ends all current and later loads that use this object.
    fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The reads of a load, and the places of their bytes.
#[pyclass(frozen, module = "tensorfs._tensorfs")]
pub(crate) struct Plan {
    pub(crate) plan: Arc<plan::Plan>,
    /// The names of the tensors, for messages.
    names: Option<String>,
    /// The position of the tensor of each request.
    tensors: Vec<usize>,
    on_gpu: bool,
}

impl Plan {
    fn check_number(&self, memory: &[Memory]) -> PyResult<()> {
        let (given, needed) = (memory.len(), self.plan.regions.len());
        if given == needed {
            return Ok(());
        }
        let message = format!("{given} buffers for a plan with {needed} regions");
        Err(PyValueError::new_err(message))
    }

    fn device_regions(&self, gpu: &Gpu, memory: Vec<Memory>) -> PyResult<Vec<DeviceRegion>> {
        self.check_number(&memory)?;
        let mut regions = Vec::with_capacity(memory.len());
        for (number, memory) in memory.into_iter().enumerate() {
            let Memory::Of((address, len, owner)) = memory else {
                return Err(PyValueError::new_err("memory of the host for a load to a GPU"));
            };
            let skipped = if self.plan.given[number] { address % PAGE } else { 0 };
            let needed = self.plan.regions[number] as usize;
            if skipped + len < needed {
                return Err(too_short(number, len, needed - skipped));
            }
            start_of(address, len)?;
            let (address, owner) = ((address - skipped) as u64, Box::new(owner));
            // SAFETY: only work in the stream that the load waits for uses this memory of `owner`,
            // as the Python caller promises; no byte before a given address is used.
            let memory = unsafe { gpu.foreign(address, needed as u64, owner) };
            regions.push(DeviceRegion::whole(memory));
        }
        Ok(regions)
    }

    pub(crate) fn regions(&self, memory: Vec<Memory>) -> PyResult<Vec<Arc<Region>>> {
        self.check_number(&memory)?;
        let mut regions = Vec::with_capacity(memory.len());
        for (number, memory) in memory.into_iter().enumerate() {
            let needed = self.plan.regions[number] as usize;
            let region = match memory {
                Memory::Area(area) => area.get().region.clone(),
                Memory::Of((address, len, owner)) if self.plan.given[number] => {
                    let skipped = address % PAGE;
                    if skipped + len < needed {
                        return Err(too_short(number, len, needed - skipped));
                    }
                    // SAFETY: the Python caller uses this memory of `owner` for nothing else until
                    // the load is over; a plan uses no byte before the given address.
                    unsafe { region_at(address - skipped, needed, owner)? }
                }
                Memory::Of((address, len, owner)) => {
                    let start = address.next_multiple_of(PAGE);
                    let needed = needed.next_multiple_of(PAGE);
                    if start - address + needed > len {
                        return Err(too_short(number, len, needed + PAGE));
                    }
                    // SAFETY: the Python caller uses this memory of `owner` for nothing else until
                    // the load is over.
                    let region = unsafe { region_at(start, needed, owner)? };
                    if needed >= HUGE_MIN {
                        region.on_huge_pages();
                    }
                    region
                }
            };
            if (region.len() as u64) < self.plan.regions[number] {
                return Err(too_short(number, region.len(), needed));
            }
            regions.push(region);
        }
        Ok(regions)
    }
}

#[pymethods]
impl Plan {
    /// Required length of the memory for each region, in bytes. For the host it includes the bytes for aligning the
    /// region to a page. `None` for a region whose address the requests gave.
    #[getter]
    fn rooms(&self) -> Vec<Option<usize>> {
        let room = |len: &u64| match self.on_gpu {
            // A multiple of 256 is a multiple of every element size.
            true => (*len as usize).next_multiple_of(256).max(256),
            false => (*len as usize).next_multiple_of(PAGE) + PAGE,
        };
        let regions = self.plan.regions.iter().zip(&self.plan.given);
        regions.map(|(len, given)| (!given).then(|| room(len))).collect()
    }

    /// For each requested tensor: region, first byte in the region, length in bytes, dtype and shape.
    #[getter]
    fn placements(&self) -> Vec<(u32, u64, u64, &'static str, Vec<u64>)> {
        let placements = self.plan.placements.iter();
        placements.map(|p| (p.region, p.offset, p.len, p.dtype.name(), p.shape.clone())).collect()
    }

    /// For each request: name, region, first byte in the region, length in bytes, dtype and shape. They are tuples,
    /// because the garbage collector does not visit such tuples again.
    fn placed<'py>(
        &self,
        py: Python<'py>,
        checkpoint: &Checkpoint,
    ) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let checkpoint = checkpoint.own();
        let entry = |(&tensor, p): (&usize, &plan::TensorPlacement)| {
            let name = checkpoint.catalog().tensor_at(tensor).name;
            let dtype = PyString::intern(py, p.dtype.name());
            (name, p.region, p.offset, p.len, dtype, PyTuple::new(py, &p.shape)?).into_pyobject(py)
        };
        self.tensors.iter().zip(&self.plan.placements).map(entry).collect()
    }

    /// Number of bytes that the load will read.
    #[getter]
    fn read(&self) -> u64 {
        self.plan.read
    }
}

fn check_position(checkpoint: &tensorfs::Checkpoint, position: usize) -> PyResult<()> {
    if position < checkpoint.catalog().len() {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("there is no tensor {position}")))
}

fn too_short(number: usize, len: usize, needed: usize) -> PyErr {
    PyValueError::new_err(format!("memory {number} has {len} bytes, {needed} are needed"))
}

fn dtype(name: &str) -> PyResult<Dtype> {
    Dtype::from_name(name)
        .ok_or_else(|| PyValueError::new_err(format!("there is no dtype {}", quoted(name))))
}

/// Whether there is a cast from elements of a dtype to those of another dtype.
#[pyfunction]
pub(crate) fn can_cast(from: &str, to: &str) -> PyResult<bool> {
    let (from, to) = (dtype(from)?, dtype(to)?);
    Ok(Cast::new(from, to).is_some())
}

/// The requested tensors as a text for messages: the first name, and the number of the others.
fn named(checkpoint: &tensorfs::Checkpoint, requests: &[TensorRequest]) -> Option<String> {
    let first = checkpoint.catalog().tensor_at(requests.first()?.tensor).name;
    Some(match requests.len() {
        1 => first.to_owned(),
        more => format!("{first} and {} more", more - 1),
    })
}
