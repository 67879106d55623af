//! Checksum gates. They allow bytes of a file to be served only after the tensors of these bytes were read
//! completely and compared with their checksums.
//!
//! A gate belongs to one version of a file, and remembers the result for each tensor. A tensor is compared once
//! for all reads of it. No thread waits: a read is answered by the thread that compares its last bytes. Bytes
//! that differ are refused from then on. If bytes cannot be read, the next read tries again.

mod checker;
mod job;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::catalog::{Piece, ShardId};
use crate::checkpoint::{Checkpoint, VirtualFile};
use crate::error::{Error, Result};
use crate::hash::Digest;
use crate::index::{ChecksumChunk, ShardSums};
use crate::source::Source;
use crate::sync::Mutex;
use crate::verify::stored::{self, Named};
use crate::verify::{Mismatch, Recorded};

pub use checker::{Checker, CheckerStatus, MEMORY};
use job::ChecksumJob;

/// A callback that is called once. `Ok` means that the bytes may be served.
pub type CheckAnswer = Box<dyn FnOnce(Result<(), &Error>) + Send>;

/// The state of a unit: not compared, equal to its checksum, or different.
const UNKNOWN: u8 = 0;
const GOOD: u8 = 1;
const BAD: u8 = 2;

/// The file that a gate guards.
#[derive(Debug)]
enum Guarded {
    /// A virtual file. A unit is a tensor of its catalog.
    Virtual(VirtualFile),
    /// A whole file, which is this shard. A unit is a part of the shard.
    Shard(ShardId),
}

/// A gate for one version of a file.
pub struct ChecksumGate {
    checkpoint: Arc<Checkpoint>,
    guarded: Guarded,
    /// The checksums of each shard.
    sums: Vec<Arc<ShardSums>>,
    /// `UNKNOWN`, `GOOD` or `BAD` for each unit.
    states: Vec<AtomicU8>,
    inner: Mutex<GateState>,
}

#[derive(Default)]
struct GateState {
    /// The job that compares each unit.
    checking: HashMap<u32, Arc<ChecksumJob>>,
    /// The error of each unit that differs.
    bad: HashMap<u32, Arc<Error>>,
}

/// A request that waits for units to be compared.
struct WaitingRead {
    units: Vec<u32>,
    state: Mutex<Left>,
}

struct Left {
    /// Number of jobs that have not ended.
    jobs: usize,
    /// `None` once it was called.
    answer: Option<CheckAnswer>,
}

impl std::fmt::Debug for ChecksumGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChecksumGate({} units)", self.states.len())
    }
}

impl ChecksumGate {
    /// The gate of a virtual file. `None` if a shard has no checksums.
    pub fn of_file(file: &VirtualFile, recorded: &Recorded) -> Option<ChecksumGate> {
        ChecksumGate::new(file.checkpoint(), Guarded::Virtual(file.clone()), recorded)
    }

    /// The gate of the whole shard `name`.
    pub fn of_shard(
        checkpoint: &Arc<Checkpoint>,
        name: &str,
        recorded: &Recorded,
    ) -> Option<ChecksumGate> {
        let index = checkpoint.catalog().shards.iter().position(|shard| shard.name == name)?;
        ChecksumGate::new(checkpoint, Guarded::Shard(ShardId(index as u32)), recorded)
    }

    fn new(
        checkpoint: &Arc<Checkpoint>,
        guarded: Guarded,
        recorded: &Recorded,
    ) -> Option<ChecksumGate> {
        let shards = checkpoint.catalog().shards.iter();
        let sums = shards
            .map(|shard| {
                let known = recorded.of(&shard.name)?;
                (known.boundaries.file_len() == shard.file_len).then(|| known.clone())
            })
            .collect::<Option<Vec<_>>>()?;
        let units = match &guarded {
            Guarded::Virtual(file) => file.catalog().len(),
            Guarded::Shard(id) => sums[id.0 as usize].boundaries.len(),
        };
        let states = (0..units).map(|_| AtomicU8::new(UNKNOWN)).collect();
        let (checkpoint, inner) = (checkpoint.clone(), Mutex::default());
        Some(ChecksumGate { checkpoint, guarded, sums, states, inner })
    }

    /// Calls `answer` when all units of the bytes `range` of the file are compared. If all of them are compared
    /// already, `answer` is called at once, and otherwise on the thread that compares the last unit. Never waits.
    pub fn when_checked(
        self: &Arc<Self>,
        checker: &Checker,
        range: Range<u64>,
        answer: CheckAnswer,
    ) {
        let units = match self.units_of(range) {
            Ok(units) => units,
            Err(error) => return answer(Err(&error)),
        };
        let state = |unit: &u32| self.states[*unit as usize].load(Ordering::Acquire);
        if units.iter().all(|unit| state(unit) == GOOD) {
            return answer(Ok(()));
        }
        let mut inner = self.inner.lock();
        if let Some(error) = units.iter().find_map(|unit| inner.bad.get(unit)).cloned() {
            drop(inner);
            return answer(Err(&error));
        }
        let mut jobs: Vec<Arc<ChecksumJob>> = Vec::new();
        let mut fresh = Vec::new();
        for unit in units.iter().filter(|unit| state(unit) != GOOD) {
            match inner.checking.get(unit) {
                Some(job) if jobs.iter().any(|known| Arc::ptr_eq(known, job)) => {}
                Some(job) => jobs.push(job.clone()),
                None => fresh.push(*unit),
            }
        }
        let job = (!fresh.is_empty()).then(|| Arc::new(ChecksumJob::new(self, fresh)));
        for unit in job.iter().flat_map(|job| &job.units) {
            inner.checking.extend(job.iter().map(|job| (*unit, job.clone())));
        }
        jobs.extend(job.clone());
        // The last of the units may have become good between the two checks of their states.
        if jobs.is_empty() {
            drop(inner);
            return answer(Ok(()));
        }
        let left = Left { jobs: jobs.len(), answer: Some(answer) };
        let waiting = Arc::new(WaitingRead { units, state: Mutex::new(left) });
        // Waiters are added while the lock is held, because a job that ends takes its waiters under this lock.
        jobs.iter().for_each(|job| job.add_waiter(waiting.clone()));
        drop(inner);
        if let Some(job) = job {
            checker.submit(job);
        }
    }

    /// Whether all units of the bytes `range` were compared and are equal to their checksums.
    pub fn is_good(&self, range: Range<u64>) -> bool {
        let good = |unit: u32| self.states[unit as usize].load(Ordering::Acquire) == GOOD;
        self.units_of(range).is_ok_and(|units| units.into_iter().all(good))
    }

    fn units_of(&self, range: Range<u64>) -> Result<Vec<u32>> {
        Ok(match &self.guarded {
            Guarded::Virtual(file) => {
                let layout = file.layout()?;
                layout.tensors_in(range).map(|tensor| tensor as u32).collect()
            }
            Guarded::Shard(id) => self.sums[id.0 as usize]
                .boundaries
                .parts_of(&range)
                .map(|part| part as u32)
                .collect(),
        })
    }

    /// The bytes of a unit, as shards and ranges.
    fn bytes_of(&self, unit: u32) -> Vec<(u32, Range<u64>)> {
        match &self.guarded {
            Guarded::Virtual(file) => {
                let tensor = file.catalog().tensor_at(unit as usize);
                let is_stored = |piece: &Piece<'_>| !piece.is_empty() && !piece.is_zeros();
                let pieces = tensor.pieces().filter(is_stored);
                pieces.map(|piece| (piece.shard.0, piece.range)).collect()
            }
            Guarded::Shard(id) => {
                vec![(id.0, self.sums[id.0 as usize].boundaries.part(unit as usize))]
            }
        }
    }

    fn source(&self, shard: u32) -> &Arc<Source> {
        &self.checkpoint.sources()[shard as usize]
    }

    /// The error of bytes that differ from their checksum.
    fn mismatch(&self, shard: u32, chunk: &ChecksumChunk, found: Digest) -> Error {
        let known = &self.sums[shard as usize];
        let catalog = self.checkpoint.source_catalog();
        let stored = stored::by_shard(catalog);
        let name_of = |index: u32| catalog.tensor_at(index as usize).name.to_owned();
        let named = Named {
            shard: catalog.shard(ShardId(shard)),
            stored: &stored[shard as usize],
            name_of: &name_of,
        };
        let now = self.source(shard).version().lasting();
        let digests = Some((known.digests[chunk.number], found));
        let place = named.place(&chunk.range);
        let mismatch = Mismatch::new(known, &now, place, chunk.range.clone(), digests);
        self.checkpoint.refused(mismatch.fault())
    }

    /// Stores the outcome of `job`, and answers the requests that wait for it.
    fn ended(&self, job: &Arc<ChecksumJob>, outcome: job::JobOutcome) {
        let mut inner = self.inner.lock();
        for unit in &job.units {
            inner.checking.remove(unit);
            if let Some(error) = outcome.bad.get(unit) {
                inner.bad.insert(*unit, error.clone());
                self.states[*unit as usize].store(BAD, Ordering::Release);
            } else if outcome.failed.is_none() {
                self.states[*unit as usize].store(GOOD, Ordering::Release);
            }
        }
        let waiters = job.take_waiters();
        drop(inner);
        for waiting in waiters {
            self.answer(&waiting, outcome.failed.as_deref());
        }
    }

    /// Notes that one of the jobs of `waiting` has ended, with its error if it has failed.
    fn answer(&self, waiting: &WaitingRead, failed: Option<&Error>) {
        let mut left = waiting.state.lock();
        left.jobs -= 1;
        if left.jobs > 0 && failed.is_none() {
            return;
        }
        let Some(answer) = left.answer.take() else { return };
        drop(left);
        if let Some(error) = failed {
            return answer(Err(error));
        }
        let inner = self.inner.lock();
        let bad = waiting.units.iter().find_map(|unit| inner.bad.get(unit)).cloned();
        drop(inner);
        match bad {
            Some(error) => answer(Err(&error)),
            None => answer(Ok(())),
        }
    }
}
