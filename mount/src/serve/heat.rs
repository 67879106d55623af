//! Counts which tensors are read, how much, how often and by which programs. The memory for the
//! counters is bounded.
//!
//! Only reads that reach the daemon are counted. The kernel answers reads from its page cache and
//! reads of passthrough files without the daemon. The kernel's readahead also requests bytes that
//! no program has read, and these bytes are counted.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ffi::CStr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use nix::unistd::{Pid, getppid};
use serde::{Deserialize, Serialize};
use tensorfs::Checkpoint;
use tensorfs::internal::checkpoint::VirtualFile;
use tensorfs::internal::clock::unix_now;
use tensorfs::internal::counters::Counter;
use tensorfs::internal::error::real_name;
use tensorfs::internal::layout::Layout;
use tensorfs::internal::sync::Mutex;

/// Maximum number of tensors with counters, each of 32 bytes. If there are more, the counters of
/// the least recently opened files are dropped.
const TENSORS_MAX: usize = 1 << 20;

/// Maximum number of files with counters.
const FILES_MAX: usize = 4096;

/// Maximum number of rows of readers, and number of bits for them. All readers that come after the
/// first `READERS_MAX` - 1 readers share the last row and its bit.
const READERS_MAX: usize = 64;

/// Name of the processes that check whether a mount answers. Their opens are not counted.
pub(crate) const PROBE_NAME: &CStr = c"tensorfs-probe";

/// Maximum size in bytes of the names in an answer.
const ANSWER_MAX: usize = 4 << 20;

/// Maximum number of parts of a tensor, with one bit for each, and the minimum length of a part in
/// bytes. Parts are this long so that the kernel's readahead touches only one or two parts of the
/// tensors next to the tensor that a program reads.
const PARTS_MAX: u64 = 64;
const PART_LEN_MIN: u64 = 2 << 20;

/// Estimated size in bytes of a range in an answer.
const RANGE_TEXT_LEN: usize = 24;

/// Maximum number of tensors in an answer. In each file, the tensors with the most bytes read come
/// first.
const TENSORS_SHOWN: usize = 60_000;

/// The report of `tensorfs heat`, which `warm --heat` reads.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct HeatReport {
    pub readers: Vec<ReaderRow>,
    /// The files with the most bytes read come first.
    pub files: Vec<FileRow>,
    /// Number of files without counters, because there was no memory for them.
    pub files_left_out: u64,
    /// Whether some tensors that were read are missing because the answer has limits.
    pub cut: bool,
}

/// A program of a user. All readers without a row of their own are counted in the last of
/// `READERS_MAX` rows, which has no user and no program.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ReaderRow {
    pub uid: Option<u32>,
    /// `None` if the kernel gives no process number, or if the process has ended.
    pub program: Option<String>,
    pub opens: u64,
    pub bytes: u64,
}

/// A file of the mount. Only virtual files have tensors.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FileRow {
    pub path: String,
    pub version: String,
    pub bytes: u64,
    pub reads: u64,
    pub opens: u64,
    pub opened_unix: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensors_total: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensors_read: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensors: Option<Vec<TensorRow>>,
}

/// A tensor that was read.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct TensorRow {
    pub name: String,
    /// The position of its first byte in the file.
    pub offset: u64,
    pub len: u64,
    pub bytes: u64,
    pub reads: u64,
    /// Its readers, as indices into `HeatReport::readers`.
    pub by: Vec<usize>,
    /// Ranges of the parts that were read, in bytes of the tensor. `None` means the whole tensor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranges: Option<Vec<(u64, u64)>>,
}

/// The counts of the reads of one mount.
#[derive(Default)]
pub(crate) struct Heat(Mutex<HeatState>);

#[derive(Default)]
struct HeatState {
    /// The files by inode number, which identifies a path and a version.
    files: HashMap<u64, Arc<FileHeat>>,
    tensors: usize,
    readers: Vec<Arc<HeatReader>>,
    /// Number of files without counters, because there was no memory for them.
    left_out: u64,
}

/// A user and a program.
struct HeatReader {
    /// User and program. `None` in the last row, which counts all readers without a row of their
    /// own.
    who: Option<(u32, String)>,
    opens: Counter,
    bytes: Counter,
}

/// The counts of the reads of one version of a file.
struct FileHeat {
    path: PathBuf,
    version: String,
    /// The tensors of a virtual file. Other files are counted as a whole.
    tensors: Option<TensorsHeat>,
    reads: Counter,
    bytes: Counter,
    opens: Counter,
    /// Time of the last open, in seconds since 1970.
    opened_unix: AtomicU64,
}

/// The tensors of a virtual file, in the order of the file. Their names are not available once the
/// file is gone.
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
    /// One bit for each part of which any byte was read.
    parts: AtomicU64,
}

/// Length in bytes of the parts of a tensor of `len` bytes.
fn part_len(len: u64) -> u64 {
    len.div_ceil(PARTS_MAX).max(PART_LEN_MIN)
}

impl TensorHeat {
    /// Counts a read of bytes `read` of a tensor of `len` bytes. `read` is not empty.
    fn read(&self, read: Range<u64>, len: u64, reader: u64) {
        self.bytes.add(read.end - read.start);
        self.reads.add(1);
        let part_len = part_len(len);
        let (first, last) = (read.start / part_len, (read.end - 1) / part_len);
        let parts = (u64::MAX << first) & (u64::MAX >> (PARTS_MAX - 1 - last));
        for (bits, new) in [(&self.readers, reader), (&self.parts, parts)] {
            if bits.load(Ordering::Relaxed) & new != new {
                bits.fetch_or(new, Ordering::Relaxed);
            }
        }
    }

    /// The ranges of a tensor of `len` bytes whose parts were read. Adjacent parts are one range.
    fn ranges(&self, len: u64) -> Vec<Range<u64>> {
        let (parts, part_len) = (self.parts.load(Ordering::Relaxed), part_len(len));
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for part in (0..PARTS_MAX).filter(|part| parts >> part & 1 == 1) {
            let range = part * part_len..len.min((part + 1) * part_len);
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        ranges
    }
}

/// Counts the reads of one open handle.
pub(crate) struct HandleHeat {
    file: Arc<FileHeat>,
    /// The layout of a virtual file.
    layout: Option<Arc<Layout>>,
    reader: Arc<HeatReader>,
    /// The bit of the reader.
    bit: u64,
}

impl HandleHeat {
    /// Counts a read of bytes `range` of the file.
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
                let len = tensor.end - tensor.start;
                heat.read(start - tensor.start..end - tensor.start, len, self.bit);
            }
        }
    }
}

/// The process that opens a file, and its user.
#[derive(Clone, Copy)]
pub(crate) struct Opener {
    pub uid: u32,
    pub pid: u32,
}

impl Heat {
    /// Counts an open by `opener`, and returns the counter for its reads. `None` if there is no
    /// memory for counters, or if the process is a health check by the service of this mount.
    pub(crate) fn opened(
        &self,
        ino: u64,
        path: &Path,
        version: &str,
        file: Option<&VirtualFile>,
        Opener { uid, pid }: Opener,
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
        file.opened_unix.store(unix_now(), Ordering::Relaxed);
        Some(HandleHeat { file, layout, reader, bit })
    }

    /// The answer to `tensorfs heat`.
    pub(crate) fn report(&self) -> HeatReport {
        let state = self.0.lock();
        let (readers, left_out) = (state.readers.clone(), state.left_out);
        let mut files: Vec<_> = state.files.values().cloned().collect();
        drop(state);
        files.sort_by_key(|file| Reverse(file.bytes.get()));
        let mut room = Room { tensors: TENSORS_SHOWN, bytes: ANSWER_MAX, cut: false };
        HeatReport {
            readers: readers.iter().map(|reader| reader.row()).collect(),
            files: files.iter().filter_map(|file| file.row(&mut room)).collect(),
            files_left_out: left_out,
            cut: room.cut,
        }
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
            if let (Some(tensors), Some((checkpoint, layout))) = (&known.tensors, described) {
                tensors.describe(checkpoint, layout);
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
            // If a file is not open, this map has the only reference to its counters.
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

/// The remaining limits of an answer.
struct Room {
    tensors: usize,
    bytes: usize,
    cut: bool,
}

impl FileHeat {
    fn tensors_len(&self) -> usize {
        self.tensors.as_ref().map_or(0, |tensors| tensors.counters.len())
    }

    /// Whether the mount no longer has this virtual file.
    fn is_gone(&self) -> bool {
        self.tensors.as_ref().is_some_and(|tensors| tensors.described().is_none())
    }

    /// The row of the report. `None` if the mount no longer has the file.
    fn row(&self, room: &mut Room) -> Option<FileRow> {
        let mut row = FileRow {
            path: real_name(&self.path),
            version: self.version.clone(),
            bytes: self.bytes.get(),
            reads: self.reads.get(),
            opens: self.opens.get(),
            opened_unix: self.opened_unix.load(Ordering::Relaxed),
            ..FileRow::default()
        };
        if let Some(tensors) = &self.tensors {
            row.tensors_total = Some(tensors.counters.len());
            tensors.add_to(&mut row, room)?;
        }
        Some(row)
    }
}

impl TensorsHeat {
    /// The checkpoint and the layout, from which the names of the tensors come. `None` once the
    /// file is gone.
    fn described(&self) -> Option<(Arc<Checkpoint>, Arc<Layout>)> {
        let described = self.described.lock();
        Some((described.0.upgrade()?, described.1.upgrade()?))
    }

    /// If the layout is gone, uses the layout of another file of the same version, which has the
    /// same tensors.
    fn describe(&self, checkpoint: &Arc<Checkpoint>, layout: &Arc<Layout>) {
        if self.described().is_none() && layout.tensors().count() == self.counters.len() {
            *self.described.lock() = (Arc::downgrade(checkpoint), Arc::downgrade(layout));
        }
    }

    fn add_to(&self, file: &mut FileRow, room: &mut Room) -> Option<()> {
        let (checkpoint, layout) = self.described()?;
        let read = self.counters.iter().map(|heat| heat.bytes.get()).zip(0..);
        let mut rows: Vec<(u64, u32)> = read.filter(|(bytes, _)| *bytes > 0).collect();
        rows.sort_by_key(|(bytes, _)| Reverse(*bytes));
        file.tensors_read = Some(rows.len());
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
            let len = range.end - range.start;
            let mut row = TensorRow {
                name: name.to_owned(),
                offset: range.start,
                len,
                bytes,
                reads: heat.reads.get(),
                by,
                ranges: None,
            };
            let ranges = heat.ranges(len);
            // A row without ranges means the whole tensor.
            if ranges != std::slice::from_ref(&(0..len))
                && let Some(rest) = room.bytes.checked_sub(ranges.len() * RANGE_TEXT_LEN)
            {
                room.bytes = rest;
                row.ranges = Some(ranges.iter().map(|range| (range.start, range.end)).collect());
            }
            shown.push(row);
        }
        file.tensors = Some(shown);
        Some(())
    }
}

impl HeatReader {
    fn row(&self) -> ReaderRow {
        let (uid, program) = self.who.clone().unzip();
        ReaderRow {
            uid,
            program: program.filter(|program| !program.is_empty()),
            opens: self.opens.get(),
            bytes: self.bytes.get(),
        }
    }
}

/// The name of process `pid`. Empty if the kernel gives no process number, or if the process has
/// ended. The name is read from /proc, which does not block.
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
    // The line has the name of the process in parentheses, then its state, then its parent.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok().map(Pid::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(heat: &Heat, ino: u64, uid: u32) -> Option<HandleHeat> {
        heat.opened(ino, Path::new("a"), "v", None, Opener { uid, pid: 0 })
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
        let all = heat.report();
        assert_eq!((all.files[0].bytes, all.files_left_out), (10, 0));
        let others = &all.readers[READERS_MAX - 1];
        assert_eq!((others.uid, others.opens), (None, (FILES_MAX - (READERS_MAX - 1)) as u64));
    }

    #[test]
    fn parts_of_a_tensor_that_were_read_are_ranges_that_cover_it_once() {
        let len = (64 * PART_LEN_MIN) + 1;
        let part = part_len(len);
        assert_eq!(part, PART_LEN_MIN + 1);
        let heat = TensorHeat::default();
        for read in [part - 1..part + 1, 5 * part..5 * part + 1, len - 1..len] {
            heat.read(read, len, 1);
        }
        let last = len / part * part;
        assert_eq!(heat.ranges(len), [0..2 * part, 5 * part..6 * part, last..len]);
        heat.read(0..len, len, 1);
        assert_eq!(heat.ranges(len), vec![0..len]);
        let small = TensorHeat::default();
        small.read(3..4, 5, 1);
        assert_eq!(small.ranges(5), vec![0..5]);
    }

    #[test]
    fn a_file_beyond_the_limits_is_not_counted() {
        let heat = Heat::default();
        let open: Vec<_> = (0..FILES_MAX as u64).map(|ino| opened(&heat, ino, 0)).collect();
        assert!(open.iter().all(Option::is_some));
        assert!(opened(&heat, FILES_MAX as u64, 0).is_none());
        assert_eq!(heat.report().files_left_out, 1);
    }
}
