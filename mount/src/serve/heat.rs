//! Which tensors are read, how much, how often and by which programs, within bounded memory.
//!
//! Only reads that reach the daemon are seen: the kernel answers reads from its page cache and
//! reads of passthrough files by itself, and its readahead asks for bytes that no program read.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ffi::CStr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::unistd::{Pid, getppid};
use serde_json::{Value, json};
use tensorfs::Checkpoint;
use tensorfs::internal::checkpoint::VirtualFile;
use tensorfs::internal::counters::Counter;
use tensorfs::internal::error::real_name;
use tensorfs::internal::layout::Layout;
use tensorfs::internal::sync::Mutex;

/// Most tensors that are counted; each takes 24 bytes. Files that were read longest ago make room.
const TENSORS_MAX: usize = 1 << 20;

/// Most files that are counted.
const FILES_MAX: usize = 4096;

/// Number of readers that are told apart: one bit each. All others share the last bit.
const READERS_MAX: usize = 64;

/// Name of the processes that ask mounts whether they answer. They are no readers.
pub(crate) const PROBE_NAME: &CStr = c"tensorfs-probe";

/// Most bytes of names in an answer.
const ANSWER_MAX: usize = 4 << 20;

/// Most tensors in an answer, those with most bytes of each file first.
const TENSORS_SHOWN: usize = 60_000;

/// The heat of one mount.
#[derive(Default)]
pub(crate) struct Heat(Mutex<HeatState>);

#[derive(Default)]
struct HeatState {
    /// By inode number, which stands for a path and a version.
    files: HashMap<u64, Arc<FileHeat>>,
    tensors: usize,
    readers: Vec<Arc<HeatReader>>,
    /// Files without counters, because there was no memory for them.
    left_out: u64,
}

/// A user and a program.
struct HeatReader {
    /// `None` stands for all readers beyond the limit.
    who: Option<(u32, String)>,
    opens: Counter,
    bytes: Counter,
}

/// The heat of one version of a file.
struct FileHeat {
    path: PathBuf,
    version: String,
    /// The tensors of a virtual file. Other files are counted as a whole.
    tensors: Option<TensorsHeat>,
    reads: Counter,
    bytes: Counter,
    opens: Counter,
    /// Time of the last open, in seconds.
    opened_unix: AtomicU64,
}

/// The tensors of a virtual file, in its order. They have no names once the file is gone.
struct TensorsHeat {
    described: Mutex<(Weak<Checkpoint>, Weak<Layout>)>,
    counters: Box<[TensorHeat]>,
}

#[derive(Default)]
struct TensorHeat {
    bytes: Counter,
    reads: Counter,
    /// One bit for each reader.
    readers: AtomicU64,
}

/// Notes the reads of one open handle.
pub(crate) struct HandleHeat {
    file: Arc<FileHeat>,
    /// The layout of a virtual file.
    layout: Option<Arc<Layout>>,
    reader: Arc<HeatReader>,
    /// The bit of the reader.
    bit: u64,
}

impl HandleHeat {
    /// Notes that bytes `range` were handed out.
    pub(crate) fn read(&self, range: Range<u64>) {
        let len = range.end - range.start;
        self.file.reads.add(1);
        self.file.bytes.add(len);
        self.reader.bytes.add(len);
        let (Some(layout), Some(tensors)) = (&self.layout, &self.file.tensors) else { return };
        let header_end = layout.header().len() as u64;
        let (place, _) = layout.tensor_at(range.start.max(header_end));
        for place in place.into_iter().flat_map(|first| first..) {
            let Some(tensor) = layout.bytes_at(place) else { return };
            if tensor.start >= range.end {
                return;
            }
            let (start, end) = (tensor.start.max(range.start), tensor.end.min(range.end));
            if let (Some(heat), true) = (tensors.counters.get(place as usize), start < end) {
                heat.bytes.add(end - start);
                heat.reads.add(1);
                if heat.readers.load(Ordering::Relaxed) & self.bit == 0 {
                    heat.readers.fetch_or(self.bit, Ordering::Relaxed);
                }
            }
        }
    }
}

impl Heat {
    /// Notes an open by process `pid` of user `uid`, and returns what notes its reads. `None` if
    /// there is no memory for counters, or if the process is a probe of the service of this mount.
    pub(crate) fn opened(
        &self,
        ino: u64,
        (path, version): (&Path, &str),
        file: Option<&VirtualFile>,
        (uid, pid): (u32, u32),
    ) -> Option<HandleHeat> {
        let program = program_of(pid);
        if program.as_bytes() == PROBE_NAME.to_bytes() && parent_of(pid) == Some(getppid()) {
            return None;
        }
        let checkpoint = file.map(|file| file.checkpoint());
        let layout = file.and_then(|file| file.layout().ok());
        let mut state = self.0.lock();
        let (bit, reader) = state.reader(uid, program);
        let described = checkpoint.zip(layout.as_ref());
        let Some(file) = state.file(ino, path, version, described) else {
            state.left_out += 1;
            return None;
        };
        drop(state);
        reader.opens.add(1);
        file.opens.add(1);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        file.opened_unix.store(now.as_secs(), Ordering::Relaxed);
        Some(HandleHeat { file, layout, reader, bit })
    }

    /// The answer to `tensorfs heat`.
    pub(crate) fn to_json(&self) -> Value {
        let state = self.0.lock();
        let (readers, left_out) = (state.readers.clone(), state.left_out);
        let mut files: Vec<_> = state.files.values().cloned().collect();
        drop(state);
        files.sort_by_key(|file| Reverse(file.bytes.get()));
        let mut room = Room { tensors: TENSORS_SHOWN, bytes: ANSWER_MAX, cut: false };
        let files: Vec<Value> = files.iter().filter_map(|file| file.to_json(&mut room)).collect();
        json!({
            "readers": readers.iter().map(|reader| reader.to_json()).collect::<Vec<_>>(),
            "files": files,
            "files_left_out": left_out,
            "cut": room.cut,
        })
    }
}

impl HeatState {
    fn reader(&mut self, uid: u32, program: String) -> (u64, Arc<HeatReader>) {
        let who = Some((uid, program));
        let known = self.readers.iter().position(|reader| reader.who == who);
        let index = known.unwrap_or_else(|| {
            if self.readers.len() < READERS_MAX {
                let is_last = self.readers.len() == READERS_MAX - 1;
                let who = if is_last { None } else { who };
                let reader =
                    HeatReader { who, opens: Counter::default(), bytes: Counter::default() };
                self.readers.push(Arc::new(reader));
            }
            self.readers.len() - 1
        });
        (1 << index, self.readers[index].clone())
    }

    fn file(
        &mut self,
        ino: u64,
        path: &Path,
        version: &str,
        described: Option<(&Arc<Checkpoint>, &Arc<Layout>)>,
    ) -> Option<Arc<FileHeat>> {
        if let Some(known) = self.files.get(&ino) {
            if let (Some(tensors), Some(described)) = (&known.tensors, described) {
                tensors.describe(described);
            }
            return Some(known.clone());
        }
        let count = described.map_or(0, |(_, layout)| layout.tensors().count());
        let is_full = |state: &HeatState| {
            state.tensors + count > TENSORS_MAX || state.files.len() >= FILES_MAX
        };
        if is_full(self) {
            self.files.retain(|_, heat| Arc::strong_count(heat) > 1 || !heat.is_gone());
            self.tensors = self.files.values().map(|heat| heat.tensors_len()).sum();
        }
        while is_full(self) {
            // Nobody else holds the counters of a file that is not open.
            let closed = self.files.iter().filter(|(_, heat)| Arc::strong_count(heat) == 1);
            let oldest = closed.min_by_key(|(_, heat)| heat.opened_unix.load(Ordering::Relaxed));
            let ino = oldest.map(|(ino, _)| *ino)?;
            let dropped = self.files.remove(&ino)?;
            self.tensors -= dropped.tensors_len();
        }
        let tensors = described.map(|(checkpoint, layout)| TensorsHeat {
            described: Mutex::new((Arc::downgrade(checkpoint), Arc::downgrade(layout))),
            counters: (0..count).map(|_| TensorHeat::default()).collect(),
        });
        self.tensors += count;
        let heat = Arc::new(FileHeat {
            path: path.to_owned(),
            version: version.to_owned(),
            tensors,
            reads: Counter::default(),
            bytes: Counter::default(),
            opens: Counter::default(),
            opened_unix: AtomicU64::new(0),
        });
        self.files.insert(ino, heat.clone());
        Some(heat)
    }
}

/// The rest of the bounds of an answer.
struct Room {
    tensors: usize,
    bytes: usize,
    cut: bool,
}

impl FileHeat {
    fn tensors_len(&self) -> usize {
        self.tensors.as_ref().map_or(0, |tensors| tensors.counters.len())
    }

    /// Whether it is a virtual file that the mount no longer has.
    fn is_gone(&self) -> bool {
        self.tensors.as_ref().is_some_and(|tensors| tensors.described().is_none())
    }

    /// `None` if the mount no longer has the file.
    fn to_json(&self, room: &mut Room) -> Option<Value> {
        let mut json = json!({
            "path": real_name(&self.path),
            "version": self.version,
            "bytes": self.bytes.get(),
            "reads": self.reads.get(),
            "opens": self.opens.get(),
            "opened_unix": self.opened_unix.load(Ordering::Relaxed),
        });
        if let Some(tensors) = &self.tensors {
            json["tensors_total"] = tensors.counters.len().into();
            tensors.add_to(&mut json, room)?;
        }
        Some(json)
    }
}

impl TensorsHeat {
    /// The checkpoint and the layout, which have the names of the tensors. `None` once the file is gone.
    fn described(&self) -> Option<(Arc<Checkpoint>, Arc<Layout>)> {
        let described = self.described.lock();
        Some((described.0.upgrade()?, described.1.upgrade()?))
    }

    /// Takes a file of the same version, and so with the same tensors, for one that is gone.
    fn describe(&self, (checkpoint, layout): (&Arc<Checkpoint>, &Arc<Layout>)) {
        if self.described().is_none() && layout.tensors().count() == self.counters.len() {
            *self.described.lock() = (Arc::downgrade(checkpoint), Arc::downgrade(layout));
        }
    }

    fn add_to(&self, json: &mut Value, room: &mut Room) -> Option<()> {
        let (checkpoint, layout) = self.described()?;
        let read = self.counters.iter().map(|heat| heat.bytes.get()).zip(0..);
        let mut rows: Vec<(u64, u32)> = read.filter(|(bytes, _)| *bytes > 0).collect();
        rows.sort_by_key(|(bytes, _)| Reverse(*bytes));
        json["tensors_read"] = rows.len().into();
        let mut shown = Vec::new();
        for (bytes, place) in rows {
            let (heat, range) = (self.counters.get(place as usize)?, layout.bytes_at(place)?);
            let position = layout.tensors_in(range.clone()).next()?;
            let name = checkpoint.catalog().tensor_at(position).name;
            if room.tensors == 0 || room.bytes < name.len() {
                room.cut = true;
                break;
            }
            room.tensors -= 1;
            room.bytes -= name.len();
            let readers = heat.readers.load(Ordering::Relaxed);
            let by: Vec<usize> = (0..READERS_MAX).filter(|bit| readers >> bit & 1 == 1).collect();
            shown.push(json!({
                "name": name,
                "offset": range.start,
                "len": range.end - range.start,
                "bytes": bytes,
                "reads": heat.reads.get(),
                "by": by,
            }));
        }
        json["tensors"] = shown.into();
        Some(())
    }
}

impl HeatReader {
    fn to_json(&self) -> Value {
        let (uid, program) = match &self.who {
            Some((uid, program)) => (Some(*uid), Some(program.as_str())),
            None => (None, None),
        };
        let program = program.filter(|program| !program.is_empty());
        json!({
            "uid": uid,
            "program": program,
            "opens": self.opens.get(),
            "bytes": self.bytes.get(),
        })
    }
}

/// The name of process `pid`; empty if the kernel names no process, or it is gone. Names of
/// programs are short and come from /proc, which does not wait.
fn program_of(pid: u32) -> String {
    if pid == 0 {
        return String::new();
    }
    let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned()
}

/// The parent of a process.
fn parent_of(pid: u32) -> Option<Pid> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the process, in parentheses, comes before its state and its parent.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok().map(Pid::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(heat: &Heat, ino: u64, uid: u32) -> Option<HandleHeat> {
        heat.opened(ino, (Path::new("a"), "v"), None, (uid, 0))
    }

    #[test]
    fn files_and_readers_are_bounded_and_open_files_are_kept() {
        let heat = Heat::default();
        let kept = opened(&heat, 0, 7).unwrap();
        kept.read(0..10);
        for ino in 1..=FILES_MAX as u64 {
            opened(&heat, ino, ino as u32).unwrap().read(0..1);
        }
        let state = heat.0.lock();
        assert_eq!((state.files.len(), state.readers.len()), (FILES_MAX, READERS_MAX));
        assert!(state.files.contains_key(&0));
        drop(state);
        let all = heat.to_json();
        assert_eq!((&all["files"][0]["bytes"], &all["files_left_out"]), (&json!(10), &json!(0)));
        let others = &all["readers"][READERS_MAX - 1];
        assert_eq!(others["uid"], Value::Null);
        assert_eq!(others["opens"], json!(FILES_MAX - (READERS_MAX - 1)));
    }

    #[test]
    fn a_file_beyond_the_limits_is_not_counted() {
        let heat = Heat::default();
        let open: Vec<_> = (0..FILES_MAX as u64).map(|ino| opened(&heat, ino, 0)).collect();
        assert!(open.iter().all(Option::is_some));
        assert!(opened(&heat, FILES_MAX as u64, 0).is_none());
        assert_eq!(heat.to_json()["files_left_out"], 1);
    }
}
