//! Loading: tensors of a checkpoint into memory of their own, past the mount and without a copy in
//! between where the layout of the shards allows it.

mod ahead;
mod choice;
#[cfg(feature = "cuda")]
mod cufile;
#[cfg(feature = "cuda")]
mod device;
mod memory_limit;
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

use choice::LastChoice;
#[cfg(feature = "cuda")]
pub use device::LoadedDevice;
pub use page_cache_copy::CachedPart;

/// LoadedBytes for reads that do not go to their place at once, in bytes.
const STAGING_LEN: u64 = 128 << 20;

/// The same memory for a load to a GPU, which takes bytes faster than most disks give them.
const STAGING_LEN_DEVICE: u64 = 256 << 20;

/// Reads under way at a time, which keep a disk busy.
const DEPTH: usize = 32;

/// Most that the calling thread copies out of the page cache by itself: to start others takes as
/// long.
const INLINE_MAX_BYTES: u64 = 1 << 20;

/// From this many bytes on a load is worth the threads that ask for its memory, and the trial of
/// which pages cost less.
const POPULATE_MIN_BYTES: u64 = 4 << 20;

/// From this many bytes on a load asks the system whether it has them: to ask takes as long as a
/// small load.
const MEMORY_CHECK_MIN_BYTES: u64 = 16 << 20;

/// The device of the kernel module that cuFile reads by.
pub const CUFILE_MODULE: &str = "/dev/nvidia-fs0";

/// How tensors are loaded.
#[derive(Clone, Debug)]
pub struct LoaderConfig {
    /// How shards are read.
    pub settings: Settings,
    /// Most reads under way, at least one.
    pub depth: usize,
    /// Most memory for bytes that have to be moved after they were read.
    pub staging: u64,
    /// Largest load that the calling thread copies out of the page cache by itself.
    pub inline_max_bytes: u64,
    /// Smallest load whose memory is asked for ahead of the reads.
    pub populate_min_bytes: u64,
    /// Page size of such memory; `None`: the size that costs less, found out by trying.
    pub pages: Option<PageSize>,
    /// How bytes are put together.
    pub limits: PlanLimits,
    /// Reads to a GPU go by cuFile where it can, if the kernel module is there whose device this
    /// is, mostly `CUFILE_MODULE`; none: never.
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
    /// For loads to a GPU.
    pub fn device() -> LoaderConfig {
        LoaderConfig {
            staging: STAGING_LEN_DEVICE,
            limits: PlanLimits::device(),
            ..LoaderConfig::default()
        }
    }
}

/// Sizes of pages of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSize {
    /// Huge ones, where the system has them.
    Huge,
    /// The smallest.
    Small,
}

/// A loader. Keeps its threads from one load to the next, and pinned memory.
#[derive(Debug)]
pub struct Loader {
    engine: Engine,
    counters: Arc<Counters>,
    config: LoaderConfig,
    /// Which pages cost less, as far as loads have found out.
    choice: Mutex<LastChoice>,
    #[cfg(feature = "cuda")]
    gpus: device::Gpus,
}

/// How far a load has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes read so far.
    pub read: u64,
    /// Bytes that will have been read in the end.
    pub total: u64,
}

/// The cost of a load.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Wanted bytes.
    pub wanted: u64,
    /// Bytes read for them.
    pub read: u64,
    /// Reads of shards that took.
    pub reads: u64,
    /// Reads past the kernel's page cache, which `reads` counts too.
    pub reads_direct: u64,
    /// Bytes that were read to their place; the others were moved once.
    pub placed: u64,
    /// Time for the plan.
    pub plan: Duration,
    /// Time from the first read to the last byte in its place.
    pub load: Duration,
    /// Time that threads spent moving bytes, summed.
    pub moving: Duration,
    /// Most memory for bytes on their way.
    pub staging_peak: u64,
    /// How the system was asked for memory, where that was done ahead of the reads.
    pub memory: MemoryStats,
    /// The cost on a GPU, for a load to one.
    pub device: Option<DeviceStats>,
}

/// How the system was asked for memory. Times are those of all threads, summed, while they were on
/// a processor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes asked for in huge pages.
    pub huge: u64,
    /// Time for these.
    pub huge_time: Duration,
    /// Bytes asked for in small pages.
    pub small: u64,
    /// Time for these.
    pub small_time: Duration,
}

/// The cost of a load to a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceStats {
    /// Time for memory of its own on the GPU, while reads were under way already.
    pub allocate: Duration,
    /// LoadedBytes that is pinned now, for this load and the next.
    pub pinned: u64,
    /// How: `registered`, `allocated` by the driver, or `pageable` where it could not be.
    pub pinning: &'static str,
    /// Time for pinning it, while reads were under way already.
    pub pin: Duration,
    /// Time during which bytes were copied to the GPU.
    pub copy: Duration,
    /// Copies from the host that the GPU was given.
    pub copies: u64,
    /// Bytes that cuFile read, past the host.
    pub cufile: u64,
    /// Why it read none, where it was asked for.
    pub cufile_unused: Option<String>,
}

/// One read of a load, and when its stages were over, from the beginning of the load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadEvent {
    /// The shard.
    pub shard: ShardId,
    /// Its bytes.
    pub range: Range<u64>,
    /// No two reads under way have the same.
    pub slot: usize,
    /// When it was handed to the engine.
    pub sent: Duration,
    /// When it was handed to the kernel.
    pub began: Duration,
    /// When its bytes were there.
    pub came: Duration,
    /// From when to when they were moved, where they had to be.
    pub moved: Option<Range<Duration>>,
}

/// How a load went.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The cost.
    pub stats: Stats,
    /// Its reads, in the order in which they were over.
    pub events: Vec<ReadEvent>,
}

/// LoadedTensors tensors.
#[derive(Debug)]
pub struct LoadedTensors {
    memories: Vec<LoadedBytes>,
    placements: Vec<TensorPlacement>,
    /// How it went.
    pub report: Report,
}

impl LoadedTensors {
    /// The bytes of request `number`, row-major.
    pub fn bytes(&self, number: usize) -> &[u8] {
        let (memory, range) = self.place(number);
        &memory[range]
    }

    /// The memory that holds request `number`, and where in it; clones of the memory keep it alive.
    pub fn place(&self, number: usize) -> (&LoadedBytes, Range<usize>) {
        let placement = &self.placements[number];
        let offset = placement.offset as usize;
        (&self.memories[placement.region as usize], offset..offset + placement.len as usize)
    }

    /// Extent of request `number` in each dimension.
    pub fn shape(&self, number: usize) -> &[u64] {
        &self.placements[number].shape
    }

    /// Element type of request `number`.
    pub fn dtype(&self, number: usize) -> Dtype {
        self.placements[number].dtype
    }
}

impl Loader {
    /// A loader. Its threads start when they are needed first.
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

    /// Plans the reads for `requests`, and the places of their bytes.
    ///
    /// # Errors
    /// Where a part lies outside its tensor or does not end on bytes, or a type cannot be cast.
    pub fn plan(&self, checkpoint: &Checkpoint, requests: &[TensorRequest]) -> Result<Plan> {
        Plan::new(checkpoint.catalog(), requests, &self.config.limits)
            .map_err(|fault| checkpoint.refused(fault))
    }

    /// Refuses to load what needs more bytes of memory than are available: the kernel promises any
    /// amount, and ends the process when it is used. A plan takes memory for each read, so requests
    /// are looked at before they are planned.
    ///
    /// # Errors
    /// One that says how much is needed and how much there is.
    pub fn check_memory(&self, checkpoint: &Checkpoint, needed: u64) -> Result<()> {
        let available =
            if needed < MEMORY_CHECK_MIN_BYTES { None } else { memory_limit::available() };
        match available.filter(|available| *available < needed) {
            None => Ok(()),
            Some(available) => Err(Error::OutOfMemory {
                message: format!(
                    "{}: takes {needed} bytes of memory, {available} are available; load a part of it",
                    shown_path(&checkpoint.directory.join(&checkpoint.name)),
                ),
            }),
        }
    }

    /// Loads `requests` of `checkpoint` into memory of its own; calls `progress` several times a
    /// second, and stops where that says `false`.
    ///
    /// # Errors
    /// The first failure; what was read until then is dropped.
    ///
    /// # Panics
    /// If memory waits for a request: that is for `fill`.
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        requests: &[TensorRequest],
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<LoadedTensors> {
        self.check_memory(checkpoint, plan::needed(checkpoint.catalog(), requests))?;
        let started = Instant::now();
        let plan = self.plan(checkpoint, requests)?;
        let planned = started.elapsed();
        assert!(!plan.given.contains(&true), "memory that waits is for `fill`");
        self.check_memory(checkpoint, plan.needed())?;
        let no_memory = |e| Error::io(&checkpoint.directory, "load: allocate memory", e);
        let regions = plan.regions.iter().map(|&len| Region::new(len).map_err(no_memory));
        let regions = regions.collect::<Result<Vec<_>>>()?;
        let mut report = run::run(self, checkpoint, &plan, &regions, progress)?;
        report.stats.plan = planned;
        let memories: Option<Vec<LoadedBytes>> = regions.into_iter().map(Region::finish).collect();
        let memories =
            memories.ok_or_else(|| Error::internal("a read still writes to loaded memory"))?;
        Ok(LoadedTensors { memories, placements: plan.placements, report })
    }

    /// Loads all tensors of `checkpoint`, in the catalog's order.
    ///
    /// # Errors The errors of `load`.
    pub fn load_all(&self, checkpoint: &Checkpoint) -> Result<LoadedTensors> {
        let requests: Vec<TensorRequest> =
            (0..checkpoint.catalog().len()).map(TensorRequest::whole).collect();
        self.load(checkpoint, &requests, &mut |_| true)
    }
}

/// The error of a load that its caller has stopped.
fn stopped() -> Error {
    Error::cancelled("the load was stopped")
}
