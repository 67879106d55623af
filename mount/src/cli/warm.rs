//! `tensorfs warm`: reads files, or the tensors that `tensorfs heat` has listed, into the page
//! cache. Shards of a remote source go to the disk cache.

mod fill;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::iter::once;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use indicatif::ProgressBar;
use serde_json::json;
use tensorfs::internal::checkpoint::ERROR_FILE;
use tensorfs::internal::error::{counted, is_url, real_name, shown, shown_path};
use tensorfs::internal::format::{InputFormat, RangeReader};
use tensorfs::internal::mount_origin::is_made;
use tensorfs::internal::mountinfo;
use tensorfs::internal::size::shown_size;
use tensorfs::internal::strided::{OuterBox, StridedCopy};
use tensorfs::internal::sync::Mutex;
use tensorfs::internal::system_memory;
use tensorfs::{Catalog, Checkpoint, Error, Tensor, TrainingState};

use super::args;
use super::output::{Failure, Outcome, print_json, print_text, speed, tell_refusals};
use super::sources::{FoundSet, begin_source_command, open_source, prove_all};
use super::verify::bar;
use crate::log;
use crate::serve::heat::{HeatReport, TensorRow};

/// Number of bytes that a thread reads before it takes the next part.
const PART_LEN: u64 = 8 << 20;

/// Size of one read in bytes.
const READ_LEN: usize = 1 << 20;

/// Number of threads that read.
const THREADS: usize = 4;

/// Maximum gap in bytes between two ranges that are read together.
const GAP: u64 = 64 << 10;

/// Maximum size in bytes of the file for `--heat`.
const HEAT_MAX: u64 = 64 << 20;

/// A file, and the ranges of its bytes to read.
struct WarmFile {
    path: PathBuf,
    ranges: Vec<Range<u64>>,
}

pub(super) fn run(args: &args::WarmArgs) -> Outcome {
    let command = if args.heat.is_some() { &args::WARM } else { &args::WARM_ALL };
    let options = begin_source_command(&args.source, command)?;
    let heat = args.heat.as_deref().map(HeatFile::read).transpose()?;
    let path = &args.source.source;
    if is_url(path) {
        return fill::run(args, options, heat.as_ref());
    }
    let absolute = std::fs::canonicalize(path).map_err(|e| Failure::at(path, e))?;
    let on_mount = mountinfo::ours()
        .map_err(|e| Failure::at(Path::new("/proc/self/mountinfo"), e))?
        .into_iter()
        .map(|mount| mount.target)
        .filter(|target| absolute.starts_with(target))
        .max_by_key(|target| target.components().count());
    if on_mount.is_some() && !args.source.options.is_empty() {
        let why = "lies on a mount, which has options of its own: give -o with the source";
        return Err(Failure::Usage(format!("{}: {why}", shown_path(path))));
    }
    let (mut missing, mut refused, mut not_shown) = (0, Vec::new(), Vec::new());
    let all_bytes = options.open.view.keeps_tensors();
    let files = match (&on_mount, &heat) {
        (Some(_), None) => files_below(&absolute, &mut not_shown)?,
        (Some(mount), Some(heat)) => heat.on_mount(mount, &absolute, &mut missing)?,
        (None, _) => {
            let (found, _) = prove_all(&open_source(&args.source, options)?)?;
            let files = of_source(&found, all_bytes, heat.as_ref(), &mut missing)?;
            let sets = found.len();
            refused.extend(found.into_iter().filter_map(|found| found.set.outcome.err()));
            if refused.len() == sets && !args.source.json {
                return tell_refusals(refused.iter());
            }
            files
        }
    };
    if files.is_empty() && !not_shown.is_empty() && !args.source.json {
        return tell_lines(&not_shown);
    }
    if missing > 0 {
        log::note(&format!(
            "not in {}: {} of the heat",
            shown_path(path),
            counted(missing, "tensor")
        ));
    }
    let total: u64 = files.iter().flat_map(|file| &file.ranges).map(len_of).sum();
    note_if_too_long(total);
    let bar = bar(args.progress, total);
    let started = Instant::now();
    let outcome = read_all(&files, &bar);
    bar.finish_and_clear();
    outcome?;
    let seconds = started.elapsed().as_secs_f64();
    if args.source.json {
        print_json(&json!({
            "ok": refused.is_empty() && not_shown.is_empty(),
            "class": refused.first().map(|error: &Error| error.kind().as_str()),
            "error": refused.first().map(Error::to_string).or_else(|| not_shown.first().cloned()),
            "source": real_name(path),
            "mount": on_mount.is_some(),
            "files": files.len(),
            "bytes": total,
            "tensors_missing": missing,
            "seconds": seconds,
        }))?;
        tell_lines(&not_shown)?;
        return tell_refusals(refused.iter());
    }
    let count = match files.len() {
        1 => "1 file".to_owned(),
        count => format!("{count} files"),
    };
    let (size, speed) = (shown_size(total), speed(total, seconds));
    print_text(&format!("warmed {size} of {count} in {seconds:.3} s at {speed}\n"))?;
    tell_lines(&not_shown)?;
    tell_refusals(refused.iter())
}

/// Prints a note if `total` bytes are more than the page cache can hold.
fn note_if_too_long(total: u64) {
    let available = system_memory::of_machine("MemAvailable");
    if available.is_some_and(|available| total > available) {
        log::note(&format!(
            "{} to read, but only {} of memory are free for the page cache: the first bytes will \
             be dropped again",
            shown_size(total),
            shown_size(available.unwrap_or_default())
        ));
    }
}

/// Prints the lines on standard error. Fails if there are any.
fn tell_lines(lines: &[String]) -> Outcome {
    lines.iter().for_each(|line| log::say(line));
    if lines.is_empty() { Ok(()) } else { Err(Failure::Told) }
}

fn len_of(range: &Range<u64>) -> u64 {
    range.end - range.start
}

/// The file at `path`, or all files below it. `path` is on a mount, and the files are read as a
/// whole.
///
/// `not_shown` gets the lines about checkpoints that the mount refuses.
fn files_below(path: &Path, not_shown: &mut Vec<String>) -> Result<Vec<WarmFile>, Failure> {
    let meta = std::fs::symlink_metadata(path).map_err(|e| Failure::at(path, e))?;
    if meta.is_file() {
        let ranges = Vec::from_iter((meta.len() > 0).then_some(0..meta.len()));
        return Ok(vec![WarmFile { path: path.to_owned(), ranges }]);
    }
    let mut files = Vec::new();
    if meta.is_dir() {
        for entry in std::fs::read_dir(path).map_err(|e| Failure::at(path, e))? {
            let entry = entry.map_err(|e| Failure::at(path, e))?;
            let below = entry.path();
            // A source may contain a file with this name that was copied from a mount.
            if entry.file_name() == ERROR_FILE && is_made(&below) {
                let text = std::fs::read(&below).map_err(|e| Failure::at(&below, e))?;
                let lines = String::from_utf8_lossy(&text);
                let folder = shown_path(path);
                not_shown.extend(lines.lines().map(|line| format!("{folder}: {}", shown(line))));
            } else {
                files.extend(files_below(&below, not_shown)?);
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// For each shard of a checkpoint, the ranges of its bytes to read.
type ShardRanges = Vec<Vec<Range<u64>>>;

/// The shards of `found`, with the ranges to read: all bytes, the tensors of a view, or the tensors
/// that `heat` lists.
fn of_source(
    found: &[FoundSet],
    all_bytes: bool,
    heat: Option<&HeatFile>,
    missing: &mut usize,
) -> Result<Vec<WarmFile>, Failure> {
    let mut files = Vec::new();
    for found_set in found {
        let Ok(checkpoint) = &found_set.set.outcome else { continue };
        let ranges = ranges_of_set(found_set, checkpoint, all_bytes, heat, missing)?;
        for (shard, ranges) in checkpoint.catalog().shards.iter().zip(ranges) {
            let path = checkpoint.directory.join(&shard.name);
            files.extend(WarmFile::joined(path, ranges));
        }
    }
    Ok(files)
}

/// The ranges to read from each shard of `checkpoint`, which is the outcome of `found`: all bytes, the
/// tensors of a view, or the tensors that `heat` lists.
fn ranges_of_set(
    found: &FoundSet,
    checkpoint: &Arc<Checkpoint>,
    all_bytes: bool,
    heat: Option<&HeatFile>,
    missing: &mut usize,
) -> Result<ShardRanges, Failure> {
    let catalog = checkpoint.catalog();
    match heat {
        None if all_bytes => {
            Ok(catalog.shards.iter().map(|shard| once(0..shard.file_len).collect()).collect())
        }
        None => ranges_of_all_tensors(catalog),
        Some(heat) => {
            let shown = checkpoint.virtual_files().map(|file| file.spec().name.clone());
            let names: BTreeSet<String> = shown.chain([found.set.name.clone()]).collect();
            ranges_of_hot_tensors(catalog, &found.directory, &names, heat, missing)
        }
    }
}

/// The ranges of all tensors, and the ranges of the headers of their shards.
fn ranges_of_all_tensors(catalog: &Catalog) -> Result<ShardRanges, Failure> {
    let mut ranges = vec![Vec::new(); catalog.shards.len()];
    for tensor in catalog.tensors() {
        add_tensor(&tensor, None, &mut ranges)?;
    }
    // Every program that reads a shard reads its header.
    for (shard, ranges) in catalog.shards.iter().zip(&mut ranges) {
        if !ranges.is_empty() {
            ranges.extend(shard.described.iter().cloned());
        }
    }
    Ok(ranges)
}

/// The ranges of the tensors that `heat` lists for the files `names` of `directory`, and all bytes of
/// shards that it lists as read whole. `missing` counts listed tensors that the catalog does not have.
fn ranges_of_hot_tensors(
    catalog: &Catalog,
    directory: &Path,
    names: &BTreeSet<String>,
    heat: &HeatFile,
    missing: &mut usize,
) -> Result<ShardRanges, Failure> {
    let mut ranges = vec![Vec::new(); catalog.shards.len()];
    for name in names {
        for hot in heat.tensors_of(&directory.join(name)) {
            match catalog.tensor(&hot.name) {
                Some(tensor) => add_tensor(&tensor, Some(hot), &mut ranges)?,
                None => *missing += 1,
            }
        }
    }
    for (shard, ranges) in catalog.shards.iter().zip(&mut ranges) {
        if heat.is_read_whole(&directory.join(&shard.name)) {
            ranges.push(0..shard.file_len);
        }
    }
    Ok(ranges)
}

/// Adds the bytes of `tensor` to the ranges of its shards: all, or those that `hot` lists. Short
/// gaps between rows are read too.
fn add_tensor(
    tensor: &Tensor<'_>,
    hot: Option<&TensorRow>,
    ranges: &mut [Vec<Range<u64>>],
) -> Result<(), Failure> {
    let shown = hot
        .map_or_else(|| std::iter::once(0..tensor.len).collect(), |hot| ranges_in(hot, tensor.len));
    let stored = |range: Range<u64>| match tensor.cast() {
        Some(cast) => cast.elements_before(&range),
        None => range,
    };
    let wanted: Vec<Range<u64>> = shown.into_iter().map(stored).collect();
    for piece in tensor.pieces().filter(|piece| !piece.is_empty() && !piece.is_zeros()) {
        let ranges = &mut ranges[piece.shard.0 as usize];
        let to = OuterBox { shape: tensor.shape, offset: piece.offset };
        let bits = tensor.stored.bits();
        let rows = StridedCopy::of_piece(piece.strides, to, piece.shape, bits)
            .map_err(|fault| Failure::Failed(format!("{}: {fault}", tensor.name)))?;
        if !rows.is_ascending() {
            // The rows do not ascend in the shard, so a range of the tensor may be spread over the
            // whole piece. The whole piece is read.
            ranges.push(piece.range);
            continue;
        }
        for part in wanted.iter().filter_map(|wanted| rows.inside(wanted)) {
            if piece.is_contiguous() {
                let start = piece.range.start;
                ranges.push(start + part.bytes.start..start + part.bytes.end);
                continue;
            }
            for row in part.runs {
                let start = piece.range.start + rows.run(row).0;
                let end = start + rows.run_len();
                match ranges.last_mut() {
                    Some(last) if (last.start..=last.end.saturating_add(GAP)).contains(&start) => {
                        last.end = last.end.max(end);
                    }
                    _ => ranges.push(start..end),
                }
            }
        }
    }
    Ok(())
}

impl WarmFile {
    /// The file with its ranges, in which close ranges are joined. `None` if there are no bytes to
    /// read.
    fn joined(path: PathBuf, mut ranges: Vec<Range<u64>>) -> Option<WarmFile> {
        ranges.retain(|range| !range.is_empty());
        ranges.sort_by_key(|range| range.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in ranges {
            match joined.last_mut() {
                Some(last) if range.start <= last.end.saturating_add(GAP) => {
                    last.end = last.end.max(range.end);
                }
                _ => joined.push(range),
            }
        }
        (!joined.is_empty()).then_some(WarmFile { path, ranges: joined })
    }
}

/// The output of `tensorfs heat --json`: for each file of the mount, the tensors that were read. A
/// file without tensors was read as a whole.
struct HeatFile(BTreeMap<PathBuf, Vec<TensorRow>>);

/// The ranges of a tensor that a heat list asks for. If the tensor had another length when the list
/// was recorded, the range is all `len` bytes.
fn ranges_in(hot: &TensorRow, len: u64) -> Vec<Range<u64>> {
    match &hot.ranges {
        Some(ranges) if hot.len == len => {
            let inside = ranges.iter().map(|(start, end)| *start.min(&len)..*end.min(&len));
            inside.filter(|range| !range.is_empty()).collect()
        }
        _ => std::iter::once(0..len).collect(),
    }
}

impl HeatFile {
    fn read(path: &Path) -> Result<HeatFile, Failure> {
        let file = File::open(path).map_err(|e| Failure::at(path, e))?;
        let len = file.metadata().map_err(|e| Failure::at(path, e))?.len();
        if len > HEAT_MAX {
            let why = format_args!("has {len} bytes; expected at most {HEAT_MAX}");
            return Err(Failure::at(path, why));
        }
        let read: Result<HeatReport, _> = serde_json::from_reader(io::BufReader::new(file));
        let expected = "expected the output of `tensorfs heat MNT --json`";
        let report = read.map_err(|_| Failure::at(path, expected))?;
        let read = report.files.into_iter().filter(|file| file.bytes > 0);
        let tensors_known = read.filter(|file| file.tensors.as_ref().is_none_or(|t| !t.is_empty()));
        let files = tensors_known.map(|f| (f.path.into(), f.tensors.unwrap_or_default()));
        let heat = HeatFile(files.collect());
        if heat.0.is_empty() {
            return Err(Failure::at(path, "lists no file"));
        }
        Ok(heat)
    }

    fn tensors_of(&self, file: &Path) -> impl Iterator<Item = &TensorRow> {
        self.0.get(file).into_iter().flatten()
    }

    fn is_read_whole(&self, file: &Path) -> bool {
        self.0.get(file).is_some_and(Vec::is_empty)
    }

    /// The listed files of the mount on `mount` that are below `path`.
    fn on_mount(
        &self,
        mount: &Path,
        path: &Path,
        missing: &mut usize,
    ) -> Result<Vec<WarmFile>, Failure> {
        let mut files = Vec::new();
        for (name, tensors) in &self.0 {
            let file_path = mount.join(name);
            let is_inside = name.components().all(|c| matches!(c, std::path::Component::Normal(_)));
            if !is_inside || !file_path.starts_with(path) {
                continue;
            }
            let file = match File::open(&file_path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    *missing += tensors.len();
                    continue;
                }
                Err(e) => return Err(Failure::at(&file_path, e)),
            };
            let len = file.metadata().map_err(|e| Failure::at(&file_path, e))?.len();
            let ranges = match tensors.as_slice() {
                [] => std::iter::once(0..len).collect(),
                tensors => {
                    let found = ranges_of(&file_path, file, len, tensors, missing);
                    found.map_err(|why| Failure::at(&file_path, why))?
                }
            };
            files.extend(WarmFile::joined(file_path, ranges));
        }
        Ok(files)
    }
}

/// The ranges of `tensors` in the weights file at `path`, and the range of its header.
fn ranges_of(
    path: &Path,
    file: File,
    len: u64,
    tensors: &[TensorRow],
    missing: &mut usize,
) -> Result<Vec<Range<u64>>, String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut reader = OpenWeights { file, len };
    let detected = InputFormat::detect(&name, &mut reader).map_err(|e| e.to_string())?;
    let format = detected.map_err(|fault| fault.to_string())?;
    let parsed =
        format.parse(&name, &mut reader, TrainingState::default()).map_err(|e| e.to_string())?;
    let description = parsed.map_err(|fault| fault.to_string())?;
    let mut places: BTreeMap<&str, Range<u64>> = BTreeMap::new();
    let mut all: Vec<_> = description.tensors().map(|tensor| (tensor.start, tensor.name)).collect();
    all.sort_unstable();
    for (index, &(start, tensor)) in all.iter().enumerate() {
        // The range ends at the next tensor. It may include bytes between two tensors, and reading
        // these does no harm.
        let end = all[index..].iter().map(|(next, _)| *next).find(|next| *next > start);
        places.insert(tensor, start..end.unwrap_or(len));
    }
    let mut ranges = description.described.clone();
    for tensor in tensors {
        match places.get(tensor.name.as_str()) {
            Some(place) => {
                let parts = ranges_in(tensor, place.end - place.start);
                ranges.extend(parts.iter().map(|p| place.start + p.start..place.start + p.end));
            }
            None => *missing += 1,
        }
    }
    Ok(ranges)
}

struct OpenWeights {
    file: File,
    len: u64,
}

impl RangeReader for OpenWeights {
    fn file_len(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }
}

/// The parts of `range` of at most `PART_LEN` bytes.
fn parts_of(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = range.end;
    let starts = range.clone().step_by(PART_LEN as usize);
    starts.map(move |start| start..end.min(start.saturating_add(PART_LEN)))
}

/// Passes all parts to at most `threads` threads. `worker` makes the function with which a thread
/// reads parts. The first error ends all threads.
fn in_threads<T: Sync, W: FnMut(&T) -> Outcome>(
    parts: &[T],
    threads: usize,
    worker: impl Fn() -> W + Sync,
) -> Outcome {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let failure: Mutex<Option<Failure>> = Mutex::default();
    let run = || {
        let mut read = worker();
        while !failed.load(Ordering::Relaxed) {
            let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            if let Err(e) = read(part) {
                failed.store(true, Ordering::Relaxed);
                failure.lock().get_or_insert(e);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.min(parts.len()) {
            scope.spawn(run);
        }
    });
    let first_failure = failure.lock().take();
    first_failure.map_or(Ok(()), Err)
}

/// Reads all ranges into the page cache.
fn read_all(files: &[WarmFile], bar: &ProgressBar) -> Outcome {
    let ranges =
        files.iter().flat_map(|file| file.ranges.iter().map(|range| (file.path.as_path(), range)));
    let parts: Vec<(&Path, Range<u64>)> =
        ranges.flat_map(|(path, range)| parts_of(range).map(move |part| (path, part))).collect();
    in_threads(&parts, THREADS, || {
        let mut buffer = vec![0; READ_LEN];
        let mut open: Option<(&Path, File)> = None;
        move |(path, part)| {
            read_part(&mut open, path, part, &mut buffer, bar).map_err(|e| Failure::at(path, e))
        }
    })
}

fn read_part<'a>(
    open: &mut Option<(&'a Path, File)>,
    path: &'a Path,
    range: &Range<u64>,
    buffer: &mut [u8],
    bar: &ProgressBar,
) -> io::Result<()> {
    if open.as_ref().is_none_or(|(opened, _)| *opened != path) {
        *open = Some((path, File::open(path)?));
    }
    let Some((_, file)) = open else { return Ok(()) };
    let mut offset = range.start;
    while offset < range.end {
        let len = buffer.len().min((range.end - offset) as usize);
        match file.read_at(&mut buffer[..len], offset) {
            Ok(0) => {
                let message = format!("ends at {offset}, expected {} bytes", range.end);
                return Err(io::Error::other(message));
            }
            Ok(read) => {
                offset += read as u64;
                bar.inc(read as u64);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
