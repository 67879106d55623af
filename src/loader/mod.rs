//! Loads tensors of a checkpoint into memory without the mount. If the layout of the shards allows it, the
//! bytes are read directly into their place.

mod ahead;
mod choice;
#[cfg(feature = "cuda")]
mod cufile;
#[cfg(feature = "cuda")]
mod device;
mod message;
mod page_cache_copy;
mod run;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::catalog::ShardId;
use crate::checkpoint::Checkpoint;
use crate::counters::Counters;
use crate::dtype::Dtype;
use crate::error::{Error, Result, shown_path};
use crate::io::{Engine, LoadedBytes, Region, Settings};
use crate::plan::{self, Plan, PlanLimits, TensorPlacement, TensorRequest};
use crate::sync::{Mutex, MutexGuard};
use crate::system_memory;

use choice::LastChoice;
#[cfg(feature = "cuda")]
pub use device::LoadedDevice;
pub use page_cache_copy::CachedPart;

/// Maximum size in bytes of the staging memory. Reads put bytes there that are moved to their place afterwards.
const STAGING_LEN: u64 = 128 << 20;

/// Maximum size in bytes of the staging memory of a load to a GPU. A GPU takes bytes faster than most disks deliver
/// them.
const STAGING_LEN_DEVICE: u64 = 256 << 20;

/// Number of concurrent reads. This number keeps a disk busy.
const DEPTH: usize = 32;

/// Maximum number of bytes that the calling thread copies from the page cache itself. The start of other threads would
/// take as long as the copy of these bytes.
const INLINE_MAX_BYTES: u64 = 1 << 20;

/// Minimum number of bytes of a load for which threads populate memory and measure which page size costs less.
const POPULATE_MIN_BYTES: u64 = 4 << 20;

/// Minimum number of bytes of a load for which free memory is checked. The check takes as long as a small load.
const MEMORY_CHECK_MIN_BYTES: u64 = 16 << 20;

/// The device file of the kernel module that cuFile uses.
pub const CUFILE_MODULE: &str = "/dev/nvidia-fs0";

/// Settings of a loader.
///
/// ```
/// use tensorfs::{Loader, LoaderConfig};
///
/// let loader = Loader::new(LoaderConfig { depth: 32, ..LoaderConfig::default() });
/// ```
#[derive(Clone, Debug)]
pub struct LoaderConfig {
    /// Settings of the reads of shards.
    #[doc(hidden)]
    pub settings: Settings,
    /// Maximum number of concurrent reads, at least one.
    pub depth: usize,
    /// Maximum size in bytes of the staging memory, for bytes that are moved to their place after the read.
    pub staging: u64,
    /// Maximum number of bytes of a load that the calling thread copies from the page cache itself.
    pub inline_max_bytes: u64,
    /// Minimum number of bytes of a load whose memory is populated ahead of the reads.
    pub populate_min_bytes: u64,
    /// Page size of populated memory. `None` stands for the cheaper size, which the loader finds by measurements.
    pub pages: Option<PageSize>,
    /// Limits of the plans.
    #[doc(hidden)]
    pub limits: PlanLimits,
    /// Device file of the kernel module for cuFile, usually `CUFILE_MODULE`. If it exists, reads to a GPU use
    /// cuFile if possible. `None` turns cuFile off.
    pub cufile: Option<PathBuf>,
}

impl Default for LoaderConfig {
    fn default() -> LoaderConfig {
        LoaderConfig {
            settings: Settings::default(),
            depth: DEPTH,
            staging: STAGING_LEN,
            inline_max_bytes: INLINE_MAX_BYTES,
            populate_min_bytes: POPULATE_MIN_BYTES,
            pages: None,
            limits: PlanLimits::default(),
            cufile: None,
        }
    }
}

impl LoaderConfig {
    /// Settings for loads to a GPU.
    pub fn device() -> LoaderConfig {
        LoaderConfig {
            staging: STAGING_LEN_DEVICE,
            limits: PlanLimits::device(),
            ..LoaderConfig::default()
        }
    }
}

/// Page sizes of memory.
///
/// ```
/// use tensorfs::{Loader, LoaderConfig, PageSize};
///
/// let loader = Loader::new(LoaderConfig { pages: Some(PageSize::Huge), ..LoaderConfig::default() });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSize {
    /// Huge pages, if the system has them.
    Huge,
    /// Pages of the smallest size of the system.
    Small,
}

/// A loader. It keeps its threads and pinned memory for the next load.
///
/// ```
/// use tensorfs::{Checkpoint, Loader, LoaderConfig};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let loader = Loader::new(LoaderConfig::default());
/// let loaded = loader.load_all(&checkpoint)?;
/// for tensor in checkpoint.catalog().tensors() {
///     assert_eq!(loaded.bytes(tensor.position()).len() as u64, tensor.len);
/// }
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Debug)]
pub struct Loader {
    engine: Engine,
    counters: Arc<Counters>,
    config: LoaderConfig,
    /// The choice of page size at the end of the last load.
    choice: Mutex<LastChoice>,
    #[cfg(feature = "cuda")]
    gpus: device::Gpus,
}

/// The progress of a load.
///
/// ```
/// use tensorfs::{Checkpoint, Loader, LoaderConfig, TensorRequest};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let all: Vec<_> = (0..checkpoint.catalog().len()).map(TensorRequest::whole).collect();
/// let mut show = |progress: tensorfs::Progress| {
///     println!("{} of {} bytes", progress.read, progress.total);
///     true // go on
/// };
/// Loader::new(LoaderConfig::default()).load(&checkpoint, &all, &mut show)?;
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of bytes read so far.
    pub read: u64,
    /// Number of bytes that the whole load reads.
    pub total: u64,
}

/// Measurements of a load.
///
/// ```
/// use tensorfs::{Checkpoint, Loader, LoaderConfig};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let stats = Loader::new(LoaderConfig::default()).load_all(&checkpoint)?.report.stats;
/// assert_eq!(stats.wanted, checkpoint.catalog().data_len());
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Number of requested bytes.
    pub wanted: u64,
    /// Number of bytes that were read to get the requested bytes.
    pub read: u64,
    /// Number of reads of shards.
    pub reads: u64,
    /// Number of reads past the kernel's page cache. They are included in `reads`.
    pub reads_direct: u64,
    /// Number of bytes that were read directly into their place. All other bytes were moved once.
    pub placed: u64,
    /// Time to make the plan.
    pub plan: Duration,
    /// Time to execute the plan, until the last byte was in its place.
    pub load: Duration,
    /// Time in which threads moved bytes, summed over the threads.
    pub moving: Duration,
    /// Maximum number of bytes of staging memory that were in use at the same time.
    pub staging_peak: u64,
    /// Population of memory ahead of the reads.
    pub memory: MemoryStats,
    /// Measurements of the GPU, if the load was to a GPU.
    pub device: Option<DeviceStats>,
}

/// Measurements of the population of memory. Times are CPU times, summed over all threads.
///
/// ```
/// use tensorfs::{Checkpoint, Loader, LoaderConfig};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let memory = Loader::new(LoaderConfig::default()).load_all(&checkpoint)?.report.stats.memory;
/// println!("{} bytes on huge pages, {} on small ones", memory.huge, memory.small);
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Number of bytes populated in huge pages.
    pub huge: u64,
    /// Time to populate the bytes in huge pages.
    pub huge_time: Duration,
    /// Number of bytes populated in small pages.
    pub small: u64,
    /// Time to populate the bytes in small pages.
    pub small_time: Duration,
}

/// Measurements of a load to a GPU.
///
/// ```
/// use tensorfs::{Checkpoint, Loader, LoaderConfig};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let loaded = Loader::new(LoaderConfig::default()).load_all(&checkpoint)?;
/// assert!(loaded.report.stats.device.is_none()); // no GPU took part
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceStats {
    /// Time to allocate memory of the GPU. It may overlap with reads.
    pub allocate: Duration,
    /// Number of bytes of host memory that are pinned now, for this load and the next.
    pub pinned: u64,
    /// The way of pinning: `registered`, `allocated` by the driver, or `pageable` if pinning failed.
    pub pinning: &'static str,
    /// Time to pin memory. It may overlap with reads.
    pub pin: Duration,
    /// Time in which bytes were being copied to the GPU.
    pub copy: Duration,
    /// Number of copies from the host to the GPU.
    pub copies: u64,
    /// Number of bytes that cuFile has read, without the use of host memory.
    pub cufile: u64,
    /// If cuFile was enabled but has read no bytes, the reason.
    pub cufile_unused: Option<String>,
}

/// One read of a load. All times are relative to the start of the load.
///
/// ```
/// use tensorfs::{Checkpoint, Loader, LoaderConfig};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let loaded = Loader::new(LoaderConfig::default()).load_all(&checkpoint)?;
/// for read in &loaded.report.events {
///     println!("shard {} bytes {:?} in {:?}", read.shard.0, read.range, read.came - read.began);
/// }
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadEvent {
    /// The shard.
    pub shard: ShardId,
    /// The range of bytes in the shard.
    pub range: Range<u64>,
    /// A number that no concurrent read has.
    pub slot: usize,
    /// Time at which the read was sent to the engine.
    pub sent: Duration,
    /// Time at which the read was sent to the kernel.
    pub began: Duration,
    /// Time at which the bytes had arrived.
    pub came: Duration,
    /// Start and end of the move of the bytes. `None` if they were not moved.
    pub moved: Option<Range<Duration>>,
}

/// The report of a load.
///
/// ```
/// use tensorfs::{Checkpoint, Loader, LoaderConfig};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let report = Loader::new(LoaderConfig::default()).load_all(&checkpoint)?.report;
/// println!("{} reads in {:?}", report.stats.reads, report.stats.load);
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The measurements.
    pub stats: Stats,
    /// The reads of the load, in the order in which they ended.
    pub events: Vec<ReadEvent>,
}

/// Loaded tensors.
///
/// ```
/// use tensorfs::{Checkpoint, Loader, LoaderConfig};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let loaded = Loader::new(LoaderConfig::default()).load_all(&checkpoint)?;
/// println!("{} {:?}: {} bytes", loaded.dtype(0), loaded.shape(0), loaded.bytes(0).len());
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Debug)]
pub struct LoadedTensors {
    memories: Vec<LoadedBytes>,
    placements: Vec<TensorPlacement>,
    /// Report of the load.
    pub report: Report,
}

impl LoadedTensors {
    /// The bytes of request `number`, row-major.
    pub fn bytes(&self, number: usize) -> &[u8] {
        let (memory, range) = self.place(number);
        &memory[range]
    }

    /// The memory that contains the bytes of request `number`, and the range of these bytes in it. Clones of the memory
    /// keep it alive.
    pub fn place(&self, number: usize) -> (&LoadedBytes, Range<usize>) {
        let placement = &self.placements[number];
        let offset = placement.offset as usize;
        (&self.memories[placement.region as usize], offset..offset + placement.len as usize)
    }

    /// Size of request `number` in each dimension.
    pub fn shape(&self, number: usize) -> &[u64] {
        &self.placements[number].shape
    }

    /// Element type of request `number`.
    pub fn dtype(&self, number: usize) -> Dtype {
        self.placements[number].dtype
    }
}

impl Loader {
    /// A new loader. Its threads start when they are first needed.
    pub fn new(config: LoaderConfig) -> Loader {
        let counters = Arc::new(Counters::default());
        let engine = Engine::start(config.settings, counters.clone());
        #[cfg(feature = "cuda")]
        let gpus = device::Gpus::default();
        Loader {
            engine,
            counters,
            config,
            choice: Mutex::default(),
            #[cfg(feature = "cuda")]
            gpus,
        }
    }

    fn choice(&self) -> MutexGuard<'_, LastChoice> {
        self.choice.lock()
    }

    /// Plans the reads for `requests` and the places of their bytes.
    ///
    /// # Errors
    /// Fails if a part is not inside its tensor, if it does not begin and end on whole bytes, or if a type
    /// cannot be cast.
    #[doc(hidden)]
    pub fn plan(&self, checkpoint: &Checkpoint, requests: &[TensorRequest]) -> Result<Plan> {
        self.plan_by(checkpoint, requests, &self.config.limits)
    }

    fn plan_by(
        &self,
        checkpoint: &Checkpoint,
        requests: &[TensorRequest],
        limits: &PlanLimits,
    ) -> Result<Plan> {
        let sources = checkpoint.sources();
        let decryptor = |shard: ShardId| sources[shard.0 as usize].decryptor().cloned();
        Plan::with_decryptors(checkpoint.catalog(), requests, limits, &decryptor)
            .map_err(|fault| checkpoint.refused(fault))
    }

    /// Refuses a load that needs more bytes of memory than are available. Without this check, the kernel would
    /// grant the memory and kill the process when the memory is used. The plan itself takes memory for each
    /// read, so requests are checked before they are planned.
    ///
    /// # Errors
    /// An error that names the needed and the available bytes.
    pub fn check_memory(&self, checkpoint: &Checkpoint, needed: u64) -> Result<()> {
        let available =
            if needed < MEMORY_CHECK_MIN_BYTES { None } else { system_memory::available() };
        match available.filter(|available| *available < needed) {
            None => Ok(()),
            Some(available) => Err(Error::OutOfMemory {
                message: format!(
                    "{}: takes {needed} bytes of memory, {available} are available; load a part of it",
                    shown_path(&checkpoint.path()),
                ),
            }),
        }
    }

    /// Loads `requests` of `checkpoint` into new memory. Calls `progress` several times a second. If it returns
    /// `false`, the load stops.
    ///
    /// # Errors
    /// The first failure. The bytes read so far are dropped.
    ///
    /// # Panics
    /// If a request has a destination. Such requests are for `fill`.
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        requests: &[TensorRequest],
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<LoadedTensors> {
        self.check_memory(checkpoint, plan::min_new_memory(checkpoint.catalog(), requests))?;
        let started = Instant::now();
        let plan = self.plan(checkpoint, requests)?;
        let planned = started.elapsed();
        assert!(!plan.given.contains(&true), "requests with a destination are for `fill`");
        self.check_memory(checkpoint, plan.new_memory())?;
        let no_memory = |e| Error::io(&checkpoint.directory, "load: allocate memory", e);
        let regions = plan
            .regions
            .iter()
            .map(|&len| Region::new(len).map_err(no_memory))
            .collect::<Result<Vec<_>>>()?;
        let mut report = run::run(self, checkpoint, &plan, &regions, progress)?;
        report.stats.plan = planned;
        let finished: Option<Vec<LoadedBytes>> =
            regions.into_iter().map(Region::into_loaded).collect();
        let memories =
            finished.ok_or_else(|| Error::internal("a read still writes to loaded memory"))?;
        Ok(LoadedTensors { memories, placements: plan.placements, report })
    }

    /// Loads all tensors of `checkpoint`, in the order of the catalog.
    ///
    /// # Errors
    /// The errors of `load`.
    pub fn load_all(&self, checkpoint: &Checkpoint) -> Result<LoadedTensors> {
        let requests: Vec<TensorRequest> =
            (0..checkpoint.catalog().len()).map(TensorRequest::whole).collect();
        self.load(checkpoint, &requests, &mut |_| true)
    }
}

/// The tracing span of one load.
fn span_of(checkpoint: &Checkpoint, plan: &Plan) -> tracing::Span {
    let (tensors, bytes) = (plan.placements.len(), plan.wanted);
    let folder = &checkpoint.directory;
    tracing::debug_span!(
        "load",
        folder = shown_path(folder),
        file = checkpoint.name,
        tensors,
        bytes
    )
}

/// The error of a load that its caller has stopped.
fn stopped() -> Error {
    Error::cancelled("the load was stopped")
}
