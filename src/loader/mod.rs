//! Loading: tensors of a checkpoint into memory of their own, past the mount and without a copy in
//! between where the layout of the shards allows it.

mod room;
mod run;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::catalog::ShardId;
use crate::checkpoint::Checkpoint;
use crate::counters::Counters;
use crate::error::{Error, Result, shown_path};
use crate::io::{Engine, Memory, Settings};
use crate::plan::{Limits, Placement, Plan, Want};

/// Memory for reads that do not go to their place at once, in bytes.
const STAGING_LEN: u64 = 128 << 20;

/// Reads under way at a time, which keep a disk busy.
const DEPTH: usize = 32;

/// How tensors are loaded.
#[derive(Clone, Copy, Debug)]
pub struct Tune {
    /// How shards are read.
    pub settings: Settings,
    /// Most reads under way, at least one.
    pub depth: usize,
    /// Most memory for bytes that have to be moved after they were read.
    pub staging: u64,
    /// How bytes are put together.
    pub limits: Limits,
}

impl Default for Tune {
    fn default() -> Tune {
        Tune {
            settings: Settings::default(),
            depth: DEPTH,
            staging: STAGING_LEN,
            limits: Limits::default(),
        }
    }
}

/// What loads. Keeps its threads from one load to the next.
#[derive(Debug)]
pub struct Loader {
    engine: Engine,
    counters: Arc<Counters>,
    tune: Tune,
}

/// How far a load has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes read so far.
    pub read: u64,
    /// Bytes that will have been read in the end.
    pub total: u64,
}

/// What a load took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Wanted bytes.
    pub wanted: u64,
    /// Bytes read for them.
    pub read: u64,
    /// Reads of shards that took.
    pub reads: u64,
    /// Of these, reads past the kernel's page cache.
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
}

/// One read of a load, and when its stages were over, from the beginning of the load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
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

/// Loaded tensors.
#[derive(Debug)]
pub struct Loaded {
    memories: Vec<Memory>,
    placements: Vec<Placement>,
    /// What it took.
    pub stats: Stats,
    /// Its reads, in the order in which they were over.
    pub events: Vec<Event>,
}

impl Loaded {
    /// The bytes of wish `number`, row-major.
    pub fn bytes(&self, number: usize) -> &[u8] {
        let (memory, range) = self.place(number);
        &memory[range]
    }

    /// The memory that holds wish `number`, and where in it; clones of the memory keep it alive.
    pub fn place(&self, number: usize) -> (&Memory, Range<usize>) {
        let placement = &self.placements[number];
        let at = placement.at as usize;
        (&self.memories[placement.region as usize], at..at + placement.len as usize)
    }

    /// Extent of wish `number` in each dimension.
    pub fn shape(&self, number: usize) -> &[u64] {
        &self.placements[number].shape
    }
}

impl Loader {
    /// A loader. Its threads start when they are needed first.
    pub fn new(tune: Tune) -> Loader {
        let counters = Arc::new(Counters::default());
        Loader { engine: Engine::start(tune.settings, counters.clone()), counters, tune }
    }

    /// Loads `wants` of `checkpoint`; calls `progress` as bytes arrive, and stops where that
    /// says `false`.
    ///
    /// # Errors
    /// The first failure; what was read until then is dropped.
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        wants: &[Want],
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Loaded> {
        let started = std::time::Instant::now();
        let plan = Plan::new(checkpoint.catalog(), wants, &self.tune.limits)
            .map_err(|fault| checkpoint.refused(fault))?;
        let planned = started.elapsed();
        let needed = plan.regions.iter().fold(0u64, |sum, len| sum.saturating_add(*len));
        if let Some(available) = room::available().filter(|available| *available < needed) {
            return Err(Error::usage(format!(
                "{}: takes {needed} bytes of memory, {available} are available; load a part of it",
                shown_path(&checkpoint.directory.join(&checkpoint.name)),
            )));
        }
        let mut loaded = run::run(self, checkpoint, plan, progress)?;
        loaded.stats.plan = planned;
        Ok(loaded)
    }

    /// Loads all tensors of `checkpoint`, in the catalog's order.
    ///
    /// # Errors
    /// Those of `load`.
    pub fn load_all(&self, checkpoint: &Checkpoint) -> Result<Loaded> {
        let wants: Vec<Want> =
            (0..checkpoint.catalog().len()).map(|tensor| Want { tensor, part: None }).collect();
        self.load(checkpoint, &wants, &mut |_| true)
    }
}

/// The error of a load that its caller has stopped.
fn stopped() -> Error {
    Error::usage("the load was stopped")
}
