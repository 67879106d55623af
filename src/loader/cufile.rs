//! Reads with cuFile, directly from the disk to the GPU. The reads with cuFile precede the other reads of a load.
//!
//! If cuFile does not read some bytes for any reason, the other reads of the load read them. So the result is
//! the same. A call of cuFile cannot be cancelled. Therefore the reader threads own everything that they use,
//! and a load that has waited too long for cuFile continues without it.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};
use std::{fs, io};

use super::message::Times;
use super::run::ASK;
use super::{Loader, Progress, ReadEvent, stopped};
use crate::catalog::ShardId;
use crate::checkpoint::Checkpoint;
use crate::device::{CuFile, CudaStream, Destination, DeviceRegion, FileHandle, Gpu, Registered};
use crate::error::{Error, Result, shown_path};
use crate::io::DirectIo;
use crate::plan::{Chunk, ChunkTarget, Move, Plan};
use crate::source::Source;
use crate::sync::Mutex;
use crate::zeros::are_zeros;

/// Maximum number of reader threads. cuFile itself also splits large reads and executes the parts concurrently.
const READERS_MAX: usize = 8;

/// Maximum number of cuFile reads for one chunk. If a chunk has more parts, it is faster to read the chunk into staging
/// memory and to copy each part from there.
const PARTS_MAX: usize = 64;

/// Minimum length in bytes of memory that is registered. Registration takes time too.
const REGISTER_MIN: u64 = 1 << 20;

/// The library, or why it cannot be used. A loader tries to load the library only once, because that may take seconds.
pub(super) type CuFileCell = Arc<OnceLock<Result<&'static CuFile, String>>>;

/// The result of the reads with cuFile, and the part of the plan that is left to the other reads.
#[derive(Default)]
pub(super) struct CuFileResult {
    /// The regions, if this step has allocated them.
    pub(super) regions: Option<Vec<DeviceRegion>>,
    /// The plan without the chunks that were read. `None` if no chunk was read.
    pub(super) rest: Option<Plan>,
    pub(super) events: Vec<ReadEvent>,
    /// Number of bytes of the plan that were read, including gaps between requested bytes.
    pub(super) read: u64,
    /// Number of bytes that cuFile has read, without gaps.
    pub(super) bytes: u64,
    /// The reason, if cuFile has read no bytes.
    pub(super) unused: Option<String>,
    /// Time to allocate the regions.
    pub(super) allocate: Duration,
}

impl CuFileResult {
    fn none(why: impl Into<String>) -> CuFileResult {
        CuFileResult { unused: Some(why.into()), ..CuFileResult::default() }
    }
}

/// The data of a load that is needed for the reads with cuFile, which are the first step of the load.
pub(super) struct CuFileInput<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) plan: &'a Plan,
    /// The regions of the caller, if the caller provides them.
    pub(super) given: Option<&'a [DeviceRegion]>,
    /// A stream that waits for earlier work in the regions.
    pub(super) stream: &'a CudaStream,
    pub(super) started: Instant,
}

/// A chunk that cuFile can read.
struct CuFileJob {
    /// Number of the chunk.
    chunk: usize,
    shard: ShardId,
    source: Arc<Source>,
    parts: Vec<CuFilePart>,
}

/// Bytes that are consecutive both in the shard and in a region.
struct CuFilePart {
    offset: u64,
    len: u64,
    region: u32,
    place: u64,
}

impl CuFileJob {
    fn of(beginning: &CuFileInput<'_>, number: usize, chunk: &Chunk) -> Option<CuFileJob> {
        let CuFileInput { checkpoint, plan, .. } = beginning;
        let source = &checkpoint.sources()[chunk.shard.0 as usize];
        // cuFile would load encrypted bytes without decrypting them.
        let is_local = source.local().is_some() && !source.may_block();
        if !is_local || source.is_encrypted() || are_zeros(chunk.range.start) {
            return None;
        }
        let Chunk { shard, range, target } = chunk;
        let parts = match target {
            ChunkTarget::Place { region, offset: start }
            | ChunkTarget::Unaligned { region, offset: start } => {
                let (offset, len) = (range.start, range.end - range.start);
                vec![CuFilePart { offset, len, region: *region, place: *start }]
            }
            ChunkTarget::Spread(moves) => {
                let moves = &plan.moves[moves.start as usize..moves.end as usize];
                if moves.len() > PARTS_MAX || !moves.iter().all(Move::is_plain) {
                    return None;
                }
                let part = |one: &Move| CuFilePart {
                    offset: range.start + one.from,
                    len: one.run_len,
                    region: one.region,
                    place: one.offset,
                };
                moves.iter().map(part).collect()
            }
        };
        Some(CuFileJob { chunk: number, shard: *shard, source: source.clone(), parts })
    }

    fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len).sum()
    }
}

/// The jobs, and the progress of the readers.
struct CuFileQueue {
    jobs: Vec<CuFileJob>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Whether the preparations for reads have ended.
    ready: bool,
    /// Whether no further job may begin.
    over: bool,
    next: usize,
    /// The current job of each reader, and the time of its start.
    under_way: [Option<(usize, Instant)>; READERS_MAX],
}

impl CuFileQueue {
    /// The next job for a reader that has finished its previous job.
    fn next(&self, reader: usize) -> Option<(usize, Instant)> {
        let mut state = self.state.lock();
        state.ready = true;
        let left = !state.over && state.next < self.jobs.len();
        let mine = left.then(|| (state.next, Instant::now()));
        state.next += usize::from(left);
        state.under_way[reader] = mine;
        mine
    }

    fn end(&self) {
        self.state.lock().over = true;
    }

    /// Whether a reader has requested a job. If not, no job will begin from now on.
    fn starts(&self) -> bool {
        let mut state = self.state.lock();
        state.over |= !state.ready;
        state.ready
    }

    /// A job that has been running for longer than `timeout`.
    fn overdue(&self, timeout: Duration) -> Option<&CuFileJob> {
        let state = self.state.lock();
        let mut late = state.under_way.iter().flatten();
        late.find(|(_, since)| since.elapsed() > timeout).map(|(job, _)| &self.jobs[*job])
    }
}

/// A message from a reader to the thread that loads. The channel closes when all readers have ended.
enum CuFileReport {
    /// A chunk was read to its place.
    Read { job: usize, reader: usize, times: Times },
    /// A file has changed.
    Failed(Error),
    /// cuFile cannot be used at all, or not for this shard.
    Refused(String),
}

/// A shard that is registered with cuFile.
struct Opened {
    handle: FileHandle,
    /// The file, for checks whether the shard has changed.
    file: Arc<fs::File>,
}

#[derive(Default)]
struct Shards {
    /// Shards that readers have open. A shard is closed before it is opened again, because cuFile cannot
    /// register a file twice.
    open: HashMap<ShardId, Weak<Opened>>,
    /// Shards that cuFile cannot read.
    refused: HashSet<ShardId>,
}

/// Everything that the readers need. The last reader drops it.
struct CuFileWork {
    library: &'static CuFile,
    gpu: Gpu,
    queue: Arc<CuFileQueue>,
    shards: Mutex<Shards>,
    regions: Vec<Destination>,
}

impl Loader {
    /// Reads all chunks that cuFile can read, if cuFile is enabled.
    ///
    /// # Errors
    /// Fails if the GPU has too little memory, a shard has changed, a read does not end, or `progress` returns
    /// `false`. After that, only overdue reads still use memory of the caller.
    pub(super) fn read_early(
        &self,
        found: &CuFileCell,
        beginning: &CuFileInput<'_>,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<CuFileResult> {
        let Some(module) = &self.config.cufile else { return Ok(CuFileResult::default()) };
        let CuFileInput { gpu, plan, given, stream, .. } = beginning;
        if let Some(why) = self.refuses(module) {
            return Ok(CuFileResult::none(why));
        }
        let chunks = plan.chunks.iter().enumerate();
        let jobs: Vec<_> =
            chunks.filter_map(|(n, chunk)| CuFileJob::of(beginning, n, chunk)).collect();
        if jobs.is_empty() {
            return Ok(CuFileResult::none(
                "no tensor is both on a local disk and loaded unchanged",
            ));
        }
        let begun = Instant::now();
        let own = if given.is_none() { Some(gpu.regions(&plan.regions)?) } else { None };
        let allocate = if own.is_some() { begun.elapsed() } else { Duration::ZERO };
        let regions = own.as_deref().or(*given).unwrap_or_default();
        // cuFile cannot wait for a stream, so this thread does.
        stream.drain()?;
        let queue = Arc::new(CuFileQueue { jobs, state: Mutex::default() });
        let told =
            start(found.clone(), Gpu::clone(gpu), queue.clone(), destinations(plan, regions));
        let mut early = match told {
            Ok(told) => self.wait(beginning, &queue, &told, progress)?,
            Err(e) => CuFileResult::none(format!("no thread can be started: {e}")),
        };
        early.regions = own;
        early.allocate = allocate;
        Ok(early)
    }

    /// The reason why cuFile is not tried, if there is one.
    fn refuses(&self, module: &Path) -> Option<String> {
        if !CuFile::has_module(module) {
            return Some(format!("no {}", shown_path(module)));
        }
        let never = self.config.settings.direct == DirectIo::Never;
        never.then(|| "shards are to be read through the page cache".to_owned())
    }

    /// Receives the messages of the readers until they have ended.
    fn wait(
        &self,
        beginning: &CuFileInput<'_>,
        queue: &CuFileQueue,
        told: &Receiver<CuFileReport>,
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<CuFileResult> {
        let CuFileInput { plan, given, started, .. } = beginning;
        let (timeout, begun) = (self.config.settings.timeout, Instant::now());
        let mut early = CuFileResult::default();
        let mut done = HashSet::new();
        let mut failed: Option<Error> = None;
        loop {
            match told.recv_timeout(ASK) {
                Ok(CuFileReport::Read { job, reader, times }) => {
                    let job = &queue.jobs[job];
                    let Chunk { shard, range, .. } = &plan.chunks[job.chunk];
                    let sent = times.began;
                    early.events.push(times.event(*shard, range, reader, sent, *started));
                    early.read += range.end - range.start;
                    early.bytes += job.bytes();
                    done.insert(job.chunk);
                    self.counters.source_reads.add(1);
                    self.counters.source_reads_direct.add(1);
                }
                Ok(CuFileReport::Refused(why)) => {
                    tracing::debug!("cuFile: {why}");
                    early.unused.get_or_insert(why);
                }
                Ok(CuFileReport::Failed(e)) => failed = failed.or(Some(e)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            let goes_on = Progress { read: early.read, total: plan.read };
            if failed.is_none() && !progress(goes_on) {
                failed = Some(stopped());
            }
            if failed.is_some() {
                queue.end();
                // If the load itself has allocated the memory, the caller cannot use it after a failure, so this need
                // not wait for the readers.
                if given.is_none() {
                    break;
                }
            }
            let Some(timeout) = timeout else { continue };
            if let Some(job) = queue.overdue(timeout) {
                queue.end();
                self.counters.source_timeouts.add(1);
                return Err(failed.unwrap_or_else(|| overdue(job, timeout)));
            }
            if begun.elapsed() > timeout && !queue.starts() {
                let seconds = timeout.as_secs_f64();
                early.unused = Some(format!("cuFile did not start within {seconds} s"));
                break;
            }
        }
        if let Some(e) = failed {
            return Err(e);
        }
        if early.bytes > 0 {
            let mut rest = Plan::clone(plan);
            let mut number = 0..;
            rest.chunks.retain(|_| number.next().is_some_and(|number| !done.contains(&number)));
            rest.read = plan.read - early.read;
            early.rest = Some(rest);
            early.unused = None;
        }
        Ok(early)
    }
}

/// The timeout error of a read with cuFile. Its text is the same as for any other read that timed out.
fn overdue(job: &CuFileJob, timeout: Duration) -> Error {
    let offset = job.parts.first().map_or(0, |part| part.offset);
    let seconds = timeout.as_secs_f64();
    let message = format!("the bytes at {offset} did not come within {seconds} s");
    Error::io(job.source.uri(), "read", io::Error::new(io::ErrorKind::TimedOut, message))
}

/// The regions, and whether their memory may be registered. Memory of the caller may not be registered, because
/// its pages may contain other data.
fn destinations(plan: &Plan, regions: &[DeviceRegion]) -> Vec<(DeviceRegion, bool)> {
    let all = regions.iter().zip(&plan.given);
    all.map(|(region, given)| (region.clone(), !given)).collect()
}

/// Starts the first reader. The first reader prepares everything that readers need, and then starts the other readers.
fn start(
    found: CuFileCell,
    gpu: Gpu,
    queue: Arc<CuFileQueue>,
    regions: Vec<(DeviceRegion, bool)>,
) -> io::Result<Receiver<CuFileReport>> {
    let (tell, told) = channel();
    let first = move || {
        let work = match CuFileWork::prepare(&found, gpu, queue, regions) {
            Ok(work) => Arc::new(work),
            Err(why) => return drop(tell.send(CuFileReport::Refused(why))),
        };
        for reader in 1..work.queue.jobs.len().min(READERS_MAX) {
            let (work, tell) = (work.clone(), tell.clone());
            // If this fails, there are fewer readers.
            let _ = spawn(move || work.read(reader, tell));
        }
        work.read(0, tell);
    };
    spawn(first)?;
    Ok(told)
}

fn spawn(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    Builder::new().name("tensorfs-cufile".to_owned()).spawn(work).map(drop)
}

impl CuFileWork {
    fn prepare(
        found: &CuFileCell,
        gpu: Gpu,
        queue: Arc<CuFileQueue>,
        regions: Vec<(DeviceRegion, bool)>,
    ) -> Result<CuFileWork, String> {
        let entered = gpu.enter().map_err(|e| e.to_string())?;
        let library = found.get_or_init(CuFile::open).clone()?;
        let mut known: HashMap<u64, Option<Arc<Registered>>> = HashMap::new();
        let register = |(region, may): (DeviceRegion, bool)| {
            let memory = &region.memory;
            let registered = known.entry(memory.address()).or_insert_with(|| {
                let wanted = may && memory.len() >= REGISTER_MIN;
                // Without registration, reads take a little longer.
                if wanted { Registered::new(library, memory).ok() } else { None }
            });
            Destination { registered: registered.clone(), region }
        };
        let regions = regions.into_iter().map(register).collect();
        drop(entered);
        Ok(CuFileWork { library, gpu, queue, shards: Mutex::default(), regions })
    }

    /// Reads until no job is left. Drops its reference to the work before its sender, so the work is dropped
    /// before the channel closes.
    fn read(self: Arc<Self>, reader: usize, tell: Sender<CuFileReport>) {
        if let Err(e) = self.read_all(reader, &tell) {
            let _ = tell.send(e);
        }
        drop(self);
        drop(tell);
    }

    fn read_all(&self, reader: usize, tell: &Sender<CuFileReport>) -> Result<(), CuFileReport> {
        let _entered = self.gpu.enter().map_err(|e| CuFileReport::Refused(e.to_string()))?;
        let mut current: Option<(ShardId, Arc<Opened>)> = None;
        while let Some((number, began)) = self.queue.next(reader) {
            let job = &self.queue.jobs[number];
            let read = self.open(job, &mut current).and_then(|opened| {
                let Some(opened) = opened else { return Ok(false) };
                self.read_parts(job, &opened.handle)?;
                Ok(true)
            });
            let told = match read {
                Ok(false) => continue,
                Ok(true) => {
                    let file = current.as_ref().map(|(_, opened)| &opened.file);
                    let checked = file.map_or(Ok(()), |file| {
                        job.source.local().map_or(Ok(()), |local| local.check_open(file))
                    });
                    let times = Times { began, came: Instant::now(), moved: None };
                    checked.map_or_else(CuFileReport::Failed, |()| CuFileReport::Read {
                        job: number,
                        reader,
                        times,
                    })
                }
                Err(why) => {
                    self.shards.lock().refused.insert(job.shard);
                    CuFileReport::Refused(format!("{}: {why}", shown_path(job.source.path())))
                }
            };
            let _ = tell.send(told);
        }
        self.close(&mut current);
        Ok(())
    }

    /// Closes the shard that a reader has open. Like `open`, this holds the lock of the shards.
    fn close(&self, current: &mut Option<(ShardId, Arc<Opened>)>) {
        let shards = self.shards.lock();
        *current = None;
        drop(shards);
    }

    /// The shard of a job. Opens it if necessary. `None` if cuFile cannot read it.
    fn open<'a>(
        &self,
        job: &CuFileJob,
        current: &'a mut Option<(ShardId, Arc<Opened>)>,
    ) -> Result<Option<&'a Opened>, String> {
        let mut shards = self.shards.lock();
        if shards.refused.contains(&job.shard) {
            return Ok(None);
        }
        if current.as_ref().is_none_or(|(shard, _)| *shard != job.shard) {
            *current = None;
            let opened = match shards.open.get(&job.shard).and_then(Weak::upgrade) {
                Some(opened) => opened,
                None => Arc::new(self.register(&job.source)?),
            };
            shards.open.insert(job.shard, Arc::downgrade(&opened));
            *current = Some((job.shard, opened));
        }
        Ok(current.as_ref().map(|(_, opened)| &**opened))
    }

    fn register(&self, source: &Arc<Source>) -> Result<Opened, String> {
        let local = source.local().ok_or("it is no local file")?;
        let file = local.file().map_err(|e| e.to_string())?;
        // Each load needs a descriptor of its own, because the same one cannot be registered twice.
        let direct = local
            .direct_file(&file)
            .ok_or("it cannot be read past the page cache")?
            .try_clone()
            .map_err(|e| e.to_string())?;
        let handle = FileHandle::register(self.library, direct)?;
        Ok(Opened { handle, file })
    }

    fn read_parts(&self, job: &CuFileJob, handle: &FileHandle) -> Result<(), String> {
        for part in &job.parts {
            let to = &self.regions[part.region as usize];
            let mut have = 0;
            while have < part.len {
                let (offset, left) = (part.offset + have, part.len - have);
                match handle.read(offset, to, part.place + have, left)? {
                    // The next regular read of the shard detects whether the shard has become shorter.
                    0 => return Err(format!("no byte at {offset}")),
                    read => have += read,
                }
            }
        }
        Ok(())
    }
}
