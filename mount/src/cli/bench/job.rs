//! The work of the bench's child processes. A child reads a file in one of the measured ways, or
//! copies, compares, makes or evicts files.
//!
//! Only child processes access the mount. A mount that hangs blocks a child, which the bench then
//! kills, but it never blocks the bench.
//!
//! A child that reads prints `ready` and waits for a line on standard input. Every job ends with
//! one line of JSON: its result, `{"error": ...}` or `{"skip": ...}`.

use std::fs::File;
use std::io::{self, BufRead, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::libc;
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tensorfs::internal::format::safetensors::{Header, PREFIX_LEN};

use super::args::{BenchArgs, Pattern};
use super::make;
use super::map::Map;

/// Environment variable that makes the process a child. Its value is the name of the job.
pub(super) const JOB: &str = "TENSORFS_BENCH_JOB";

/// Environment variable with the seed for shuffling the tensors.
pub(super) const SEED: &str = "TENSORFS_BENCH_SEED";

/// The line with which a reader reports that it waits.
pub(super) const READY: &str = "ready";

/// Size in bytes of a buffered read, and of a copy out of a mapping.
const READ_LEN: usize = 1 << 20;

/// Size in bytes of an O_DIRECT read.
const DIRECT_LEN: usize = 8 << 20;

/// Alignment in bytes that O_DIRECT requires for its buffer.
const DIRECT_ALIGN: usize = 4096;

/// Number of threads of the pattern `read4`.
const THREADS: u64 = 4;

/// Size in bytes of a small read, and maximum number of small reads.
const SMALL_LEN: u64 = 4096;
const SMALL_READS_MAX: u64 = 8192;

/// Distance in bytes between the bytes that a digest includes: one in each page.
const DIGEST_STEP: u64 = 4096;

/// Runs the job `name` and prints its result. Returns whether it succeeded.
pub(super) fn run(name: &str, args: &BenchArgs) -> bool {
    let source = args.source.as_deref().unwrap_or(Path::new(""));
    let other = args.against.as_deref().unwrap_or(Path::new(""));
    let done = match (name, args.make) {
        ("make", Some(made)) => {
            let folder = args.dir.as_deref().unwrap_or(Path::new(""));
            make::make(folder, made, args.size).map(|()| json!({}))
        }
        ("copy", _) => copy(source, other),
        ("compare", _) => compare(source, other),
        ("evict", _) => File::open(source).and_then(|file| evict(&file)).map(|()| json!({})),
        (name, _) => match name.parse() {
            Ok(pattern) => measure(pattern, source),
            Err(_) => Err(io::Error::other(format!("no job {name}"))),
        },
    };
    let line = match &done {
        Ok(found) => found.clone(),
        Err(e) if e.kind() == io::ErrorKind::Unsupported => json!({ "skip": e.to_string() }),
        Err(e) => json!({ "error": e.to_string() }),
    };
    // If the bench was stopped, no process reads this line, so an error is ignored.
    let _ = writeln!(io::stdout(), "{line}");
    done.is_ok()
}

/// Drops the clean, unmapped pages of `file` from the page cache.
pub(super) fn evict(file: &File) -> io::Result<()> {
    Ok(posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
}

fn copy(from: &Path, to: &Path) -> io::Result<Value> {
    // Only this user may read the copy, because the mount does not say who may read the shards.
    let to = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    let (mut from, mut to) = (File::open(from)?, to);
    let mut buffer = vec![0; DIRECT_LEN];
    loop {
        let len = from.read(&mut buffer)?;
        if len == 0 {
            // Dirty pages could not be evicted later, so they are written to the disk now.
            to.sync_all()?;
            return Ok(json!({}));
        }
        to.write_all(&buffer[..len])?;
    }
}

fn compare(a: &Path, b: &Path) -> io::Result<Value> {
    let (a, b) = (File::open(a)?, File::open(b)?);
    let (len, other) = (a.metadata()?.len(), b.metadata()?.len());
    if len != other {
        return Ok(json!({ "difference": format!("{len} bytes and {other} bytes") }));
    }
    let (mut ours, mut theirs) = (vec![0; READ_LEN], vec![0; READ_LEN]);
    for start in (0..len).step_by(READ_LEN) {
        let part = (len - start).min(READ_LEN as u64) as usize;
        a.read_exact_at(&mut ours[..part], start)?;
        b.read_exact_at(&mut theirs[..part], start)?;
        if ours[..part] != theirs[..part] {
            let index = ours.iter().zip(&theirs).position(|(a, b)| a != b).unwrap_or(0) as u64;
            return Ok(json!({ "difference": format!("byte {} differs", start + index) }));
        }
    }
    Ok(json!({ "difference": null }))
}

/// A checksum of the bytes that were read. It does not depend on the order of the reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ContentDigest {
    sum: u64,
    bytes: u64,
}

impl ContentDigest {
    /// Adds `bytes`, which come from `offset` of the file.
    fn add(&mut self, offset: u64, bytes: &[u8]) {
        let first = offset.next_multiple_of(DIGEST_STEP) - offset;
        for index in (first..bytes.len() as u64).step_by(DIGEST_STEP as usize) {
            let place = (offset + index).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let byte = u64::from(bytes[index as usize]) + 1;
            self.sum = self.sum.wrapping_add(place.rotate_left(23).wrapping_mul(byte));
        }
        self.bytes += bytes.len() as u64;
    }

    fn merge(self, other: ContentDigest) -> ContentDigest {
        ContentDigest { sum: self.sum.wrapping_add(other.sum), bytes: self.bytes + other.bytes }
    }
}

/// Waits for the line to begin, reads all of `path`, and returns the time that this took.
fn measure(pattern: Pattern, path: &Path) -> io::Result<Value> {
    let mut buffer = vec![1; DIRECT_LEN + DIRECT_ALIGN];
    let seed = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    writeln!(io::stdout(), "{READY}")?;
    if io::stdin().lock().read_line(&mut String::new())? == 0 {
        return Err(io::Error::other("told to end"));
    }
    let (started, cpu) = (Instant::now(), own_cpu()?);
    let digest = match pattern {
        Pattern::Read => read(path, &mut buffer[..READ_LEN])?,
        Pattern::Read4 => read_in_parts(path)?,
        Pattern::Direct => read_direct(path, &mut buffer)?,
        Pattern::Mmap => {
            let map = Map::new(&File::open(path)?)?;
            copy_out(&map, 0, std::fs::metadata(path)?.len(), &mut buffer[..READ_LEN])
        }
        Pattern::MmapShuffled => {
            read_mapped(path, |ranges| shuffle(ranges, seed), &mut buffer[..READ_LEN])?
        }
        Pattern::MmapSorted => {
            let by_name = |tensors: &mut [FileTensor]| tensors.sort_by(|a, b| a.name.cmp(&b.name));
            read_mapped(path, by_name, &mut buffer[..READ_LEN])?
        }
        Pattern::Random4k => read_random(path, seed, &mut buffer[..SMALL_LEN as usize])?,
        Pattern::Load | Pattern::FromPretrained => {
            return Err(io::Error::other("this case is for Python"));
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    Ok(json!({
        "operations": (pattern == Pattern::Random4k).then_some(digest.bytes.div_ceil(SMALL_LEN)),
        "seconds": seconds,
        "bytes": digest.bytes,
        "digest": format!("{:016x}", digest.sum),
        "cpu_seconds": (own_cpu()? - cpu).as_secs_f64(),
    }))
}

fn own_cpu() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}

fn read(path: &Path, buffer: &mut [u8]) -> io::Result<ContentDigest> {
    let mut file = File::open(path)?;
    let mut digest = ContentDigest::default();
    loop {
        match file.read(buffer)? {
            0 => return Ok(digest),
            len => digest.add(digest.bytes, &buffer[..len]),
        }
    }
}

fn read_in_parts(path: &Path) -> io::Result<ContentDigest> {
    let len = std::fs::metadata(path)?.len();
    let part = len.div_ceil(THREADS).next_multiple_of(READ_LEN as u64);
    let read_part = |number: u64| -> io::Result<ContentDigest> {
        let file = File::open(path)?;
        let mut buffer = vec![0; READ_LEN];
        let mut digest = ContentDigest::default();
        let end = len.min((number + 1) * part);
        for start in (number * part..end).step_by(READ_LEN) {
            let bytes = &mut buffer[..(end - start).min(READ_LEN as u64) as usize];
            file.read_exact_at(bytes, start)?;
            digest.add(start, bytes);
        }
        Ok(digest)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..THREADS).map(|number| scope.spawn(move || read_part(number))).collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(digest) => digest,
            Err(_) => Err(io::Error::other("a reader failed by a bug")),
        });
        joined.collect::<io::Result<Vec<_>>>()
    })
    .map(|digests| digests.into_iter().fold(ContentDigest::default(), ContentDigest::merge))
}

fn read_direct(path: &Path, buffer: &mut [u8]) -> io::Result<ContentDigest> {
    let opened = File::options().read(true).custom_flags(libc::O_DIRECT).open(path);
    let file = opened.map_err(|e| match e.raw_os_error() {
        Some(libc::EINVAL) => io::Error::new(io::ErrorKind::Unsupported, "O_DIRECT is refused"),
        _ => e,
    })?;
    let aligned = buffer.as_ptr().align_offset(DIRECT_ALIGN);
    let buffer = &mut buffer[aligned..][..DIRECT_LEN];
    let len = file.metadata()?.len();
    let mut digest = ContentDigest::default();
    // With O_DIRECT, a read may be short only at the end of the file, because offsets must be
    // aligned.
    while digest.bytes < len {
        match file.read_at(buffer, digest.bytes)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => digest.add(digest.bytes, &buffer[..read]),
        }
    }
    Ok(digest)
}

/// Copies `len` bytes from offset `start` of a mapping into `buffer`, in pieces.
fn copy_out(map: &Map, start: u64, len: u64, buffer: &mut [u8]) -> ContentDigest {
    let mut digest = ContentDigest::default();
    for offset in (0..len).step_by(buffer.len()) {
        let part = (len - offset).min(buffer.len() as u64) as usize;
        map.copy((start + offset) as usize, &mut buffer[..part]);
        digest.add(start + offset, &buffer[..part]);
    }
    digest
}

/// A tensor and its range in the file.
struct FileTensor {
    name: String,
    start: u64,
    len: u64,
}

/// Copies the tensors out of a mapping one after the other. `arrange` sets their order.
fn read_mapped(
    path: &Path,
    arrange: impl FnOnce(&mut [FileTensor]),
    buffer: &mut [u8],
) -> io::Result<ContentDigest> {
    let file = File::open(path)?;
    let mut tensors = tensors(&file)?;
    arrange(&mut tensors);
    let map = Map::new(&file)?;
    let copied = tensors.iter().map(|tensor| copy_out(&map, tensor.start, tensor.len, buffer));
    Ok(copied.fold(ContentDigest::default(), ContentDigest::merge))
}

/// Reads pages that are spread over the file, one after the other. All seeds read the same pages,
/// each page once, but in different orders.
fn read_random(path: &Path, seed: u64, buffer: &mut [u8]) -> io::Result<ContentDigest> {
    let file = File::open(path)?;
    let pages = file.metadata()?.len() / SMALL_LEN;
    let step = pages.div_ceil(SMALL_READS_MAX).max(1);
    let mut chosen: Vec<u64> = (0..pages / step)
        .map(|index| index * step + (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % step)
        .collect();
    shuffle(&mut chosen, seed);
    let mut digest = ContentDigest::default();
    for page in chosen {
        file.read_exact_at(buffer, page * SMALL_LEN)?;
        digest.add(page * SMALL_LEN, buffer);
    }
    Ok(digest)
}

/// The tensors of a safetensors file, in the order of their data.
fn tensors(file: &File) -> io::Result<Vec<FileTensor>> {
    let wrong = |what: String| io::Error::other(format!("not a safetensors file: {what}"));
    let mut prefix = [0; PREFIX_LEN as usize];
    file.read_exact_at(&mut prefix, 0)?;
    let len = file.metadata()?.len();
    let header_len = u64::from_le_bytes(prefix);
    if header_len > len {
        return Err(wrong(format!("a header of {header_len} bytes")));
    }
    let mut text = vec![0; header_len as usize];
    file.read_exact_at(&mut text, PREFIX_LEN)?;
    let header = Header::parse(&text, len).map_err(|fault| wrong(format!("{fault:?}")))?;
    let start = header.data_start();
    let placed = header.tensors.into_iter().map(|tensor| FileTensor {
        name: tensor.name,
        start: start + tensor.data_offsets.start,
        len: tensor.data_offsets.end - tensor.data_offsets.start,
    });
    Ok(placed.collect())
}

/// Shuffles `items`. The order depends only on `seed`.
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed;
    for index in (1..items.len()).rev() {
        // This is the generator of Knuth's MMIX. Its upper bits are the most random.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        items.swap(index, ((state >> 33) % (index as u64 + 1)) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn every_way_of_reading_adds_up_to_the_same() {
        let bytes: Vec<u8> = (0..9_000_001u32)
            .map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        let file = file(&bytes);
        let mut buffer = vec![0; DIRECT_LEN + DIRECT_ALIGN];
        let expected = read(file.path(), &mut buffer[..READ_LEN]).unwrap();
        assert_eq!(expected.bytes, bytes.len() as u64);
        assert_eq!(read_in_parts(file.path()).unwrap(), expected);
        let map = Map::new(file.as_file()).unwrap();
        let len = bytes.len() as u64;
        assert_eq!(copy_out(&map, 0, len, &mut buffer[..READ_LEN]), expected);
        let halves = [(5_000_000, len - 5_000_000), (0, 5_000_000)];
        let parts = halves.map(|(start, len)| copy_out(&map, start, len, &mut buffer[..READ_LEN]));
        assert_eq!(parts[0].merge(parts[1]), expected);
        match read_direct(file.path(), &mut buffer) {
            Ok(digest) => assert_eq!(digest, expected),
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::Unsupported),
        }
    }

    #[test]
    fn a_difference_is_found_and_named() {
        let mut bytes = vec![7; 3 * READ_LEN + 5];
        let first = file(&bytes);
        bytes[2 * READ_LEN + 3] = 8;
        let second = file(&bytes);
        let same = compare(first.path(), first.path()).unwrap();
        assert_eq!(same["difference"], Value::Null);
        let other = compare(first.path(), second.path()).unwrap();
        assert_eq!(other["difference"], format!("byte {} differs", 2 * READ_LEN + 3));
        let shorter = compare(first.path(), file(b"x").path()).unwrap();
        assert!(shorter["difference"].as_str().unwrap().contains("1 bytes"), "{shorter}");
    }

    #[test]
    fn shuffling_loses_nothing_and_depends_on_the_seed_only() {
        let shuffled = |seed| {
            let mut items: Vec<u32> = (0..100).collect();
            shuffle(&mut items, seed);
            items
        };
        assert_eq!(shuffled(3), shuffled(3));
        assert_ne!(shuffled(3), shuffled(4));
        let mut sorted = shuffled(3);
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..100));
    }

    #[test]
    fn random_reads_are_of_the_same_pages_in_another_order() {
        let bytes: Vec<u8> = (0..3_000_000u32).map(|index| (index >> 7) as u8).collect();
        let file = file(&bytes);
        let read = |seed| read_random(file.path(), seed, &mut [0; SMALL_LEN as usize]).unwrap();
        assert_eq!(read(1), read(2));
        assert_eq!(read(1).bytes, bytes.len() as u64 / SMALL_LEN * SMALL_LEN);
    }

    #[test]
    fn tensors_are_copied_by_name_and_all_of_them() {
        let header = r#"{"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},
                         "a":{"dtype":"U8","shape":[5000],"data_offsets":[3,5003]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([7; 5003]);
        let file = file(&bytes);
        let mut order = Vec::new();
        let note = |tensors: &mut [FileTensor]| {
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            order.extend(tensors.iter().map(|tensor| (tensor.name.clone(), tensor.len)));
        };
        let digest = read_mapped(file.path(), note, &mut [0; 64]).unwrap();
        assert_eq!(digest.bytes, 5003);
        assert_eq!(order, [("a".to_owned(), 5000), ("b".to_owned(), 3)]);
    }
}
