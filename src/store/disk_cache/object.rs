//! One version of one object in the cache. It has two files: a sparse data file with its bytes, and a map of
//! the blocks that the data file has.
//!
//! The map begins with a header of `HEADER_LEN` bytes. After that it has one checksum for each block, or zeros
//! for a block that is not in the cache. A block is used only if its bytes match its checksum. So after a
//! crash, a lost write or a flipped bit a reader gets the right bytes or none, and no file has to be synced.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::libc;

use super::claims::{Claim, claim};
use super::direct::DirectFile;
use super::known::KnownBlocks;
use crate::atomic_file::TemporaryFile;
use crate::coalesce::CUT;
use crate::error::invalid_data;
use crate::hash::{Digest, Hasher};
use crate::index::is_private;
use crate::source::page_cache::copy_cached;
use crate::sync::Mutex;

/// Length of a block in bytes. Reads from the server are widened to whole blocks.
pub(super) const BLOCK_LEN: u64 = CUT;

/// Length in bytes of the longest object that is cached. A header with a greater length is damaged.
pub(super) const LEN_MAX: u64 = 1 << 44;

/// Length of the header of a map in bytes.
const HEADER_LEN: u64 = 4096;

/// Length of a checksum in a map in bytes.
const SUM_LEN: u64 = 16;

/// Number of checksums that are read at a time when all checksums of a map are read.
const SUMS_AT_ONCE: usize = 1 << 16;

/// The first bytes of a map, with the version of the file format. They are part of the digest in the file names, so
/// another version of the format uses other files.
const MAGIC: &[u8; 8] = b"TFSBLK01";
const MAGIC_WORD: &[u8] = b"TFSBLK";

/// Maximum length of the URL in a header. A longer URL is cut off. The digest in the file name always covers the whole
/// URL.
const URL_LEN_MAX: usize = 3072;

/// Extensions of the files of an object.
pub(super) const MAP: &str = "map";
pub(super) const DATA: &str = "data";

/// Extension of files that are still being written.
pub(super) const TEMPORARY: &str = "tmp";

/// Minimum number of seconds between two updates of the time of last use of an object.
const USE_NOTED: i64 = 5;

/// Time after a stuck claim in which readers of the object do not wait for claims.
const UNAWAITED: Duration = Duration::from_secs(60);

/// The places where a read of blocks may look for the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockReach {
    /// The read uses only the page cache of the kernel, so it never waits.
    Memory,
    /// The read may go to the disk, so it may wait.
    Disk,
}

/// Identifies the bytes of an object: objects with different keys may have different bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectKey {
    pub(super) url: String,
    pub(super) len: u64,
    /// Hash of the URL, the version and the length of the object.
    pub(super) digest: Digest,
}

impl ObjectKey {
    /// The key of the object at `url` in the version that the numbers `content` describe.
    pub(super) fn new(url: &str, content: [u64; 5]) -> ObjectKey {
        let [_, _, len, ..] = content;
        let mut hasher = Hasher::new();
        hasher.update(MAGIC);
        hasher.update(&BLOCK_LEN.to_le_bytes());
        content.iter().for_each(|word| hasher.update(&word.to_le_bytes()));
        hasher.update(url.as_bytes());
        ObjectKey { url: url.to_owned(), len, digest: hasher.finish() }
    }

    fn map_name(&self) -> String {
        format!("{}.{MAP}", self.digest)
    }

    /// The path of the map in `folder`.
    pub(super) fn map_in(&self, folder: &Path) -> PathBuf {
        folder.join(self.map_name())
    }

    fn blocks(&self) -> u64 {
        self.len.div_ceil(BLOCK_LEN)
    }
}

/// An object of the cache whose files are open.
#[derive(Debug)]
pub(super) struct CachedObject {
    key: ObjectKey,
    path: PathBuf,
    map: File,
    pub(super) data: File,
    /// The path of the data file.
    pub(super) data_path: PathBuf,
    /// Whether blocks can be stored in it.
    pub(super) writable: bool,
    /// Time of the last update of the time of last use, in seconds since 1970.
    noted: AtomicI64,
    /// Time until which readers do not wait for claims of others.
    unawaited: Mutex<Option<Instant>>,
    /// Whether a damaged block of it was logged.
    damage_told: AtomicBool,
    pub(super) direct: DirectFile,
    pub(super) known: KnownBlocks,
}

impl CachedObject {
    /// Opens the files of the object `key` in `folder`, and creates them if they do not exist.
    ///
    /// # Errors
    /// If the files can neither be opened nor created.
    pub(super) fn open(folder: &Path, key: &ObjectKey) -> io::Result<CachedObject> {
        let path = key.map_in(folder);
        match CachedObject::open_there(&path, Some(key)) {
            Ok(object) => return Ok(object),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) if e.kind() == ErrorKind::InvalidData => {
                // Damaged files would prevent the creation of new ones.
                gone_is_fine(std::fs::remove_file(&path))?;
            }
            Err(e) => return Err(e),
        }
        match CachedObject::create(folder, &path, key) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                CachedObject::open_there(&path, Some(key))
            }
            created => created,
        }
    }

    /// Opens the object whose map is at `path`. If `key` is passed, the map must belong to `key`.
    ///
    /// # Errors
    /// `InvalidData` if the files are damaged or do not belong together. `Unsupported` if no `key` is passed, and the
    /// map has the file format of another version of tensorfs.
    pub(super) fn open_there(path: &Path, key: Option<&ObjectKey>) -> io::Result<CachedObject> {
        let (map, map_writable) = open_private(path)?;
        if key.is_none() && is_of_other_version(&map) {
            return Err(io::Error::new(ErrorKind::Unsupported, "of another version of tensorfs"));
        }
        let mut header = vec![0; HEADER_LEN as usize];
        map.read_exact_at(&mut header, 0).map_err(|_| damaged())?;
        let (found, nonce) = parse_header(&header).ok_or_else(damaged)?;
        let is_named = path.file_name().is_some_and(|name| name == found.map_name().as_str());
        let whole = HEADER_LEN + found.blocks() * SUM_LEN;
        let is_same = key.is_none_or(|key| {
            (key.digest, key.len) == (found.digest, found.len) && key.url.starts_with(&found.url)
        });
        if !is_named || !is_same || map.metadata()?.len() != whole {
            return Err(damaged());
        }
        let data_path = path.with_file_name(data_name(&found, nonce));
        let (data, data_writable) = open_private(&data_path).map_err(|e| match e.kind() {
            ErrorKind::NotFound => damaged(),
            _ => e,
        })?;
        let key = key.cloned().unwrap_or(found);
        // Reads fetch single blocks, so the kernel's readahead is turned off.
        let advice = PosixFadviseAdvice::POSIX_FADV_RANDOM;
        let _ = posix_fadvise(&data, 0, 0, advice);
        Ok(CachedObject {
            known: KnownBlocks::new(key.blocks()),
            key,
            path: path.to_owned(),
            map,
            data,
            data_path,
            writable: map_writable && data_writable,
            noted: AtomicI64::new(0),
            unawaited: Mutex::default(),
            damage_told: AtomicBool::new(false),
            direct: DirectFile::default(),
        })
    }

    fn create(folder: &Path, path: &Path, key: &ObjectKey) -> io::Result<CachedObject> {
        let nonce = getrandom::u64().map_err(|e| io::Error::other(e.to_string()))?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let data_path = folder.join(data_name(key, nonce));
        let data = TemporaryFile::create(data_path.clone(), &options)?;
        let mut map = TemporaryFile::create(folder.join(temporary_name(nonce)), &options)?;
        map.file().write_all_at(&header_of(key, nonce), 0)?;
        map.file().set_len(HEADER_LEN + key.blocks() * SUM_LEN)?;
        map.publish(path, false)?;
        // The data file is kept, because the map has its name now and refers to the data file.
        data.keep();
        CachedObject::open_there(path, Some(key))
    }

    pub(super) fn key(&self) -> &ObjectKey {
        &self.key
    }

    /// All blocks of the object.
    pub(super) fn blocks(&self) -> Range<u64> {
        0..self.key.blocks()
    }

    /// Whether the map still has its name. Other processes remove the names of objects that were not used for long.
    pub(super) fn is_linked(&self) -> bool {
        self.map.metadata().is_ok_and(|meta| meta.nlink() > 0)
    }

    /// Updates the time of last use, if the last update was at least `USE_NOTED` seconds ago.
    pub(super) fn note_use(&self) {
        if self.begins_note() {
            self.write_use();
        }
    }

    /// Whether the time of last use has to be updated now. If so, it counts as updated, and the caller has to call
    /// `write_use`.
    pub(super) fn begins_note(&self) -> bool {
        let now = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs() as i64);
        let before = self.noted.load(Ordering::Relaxed);
        let is_due = !(before..before + USE_NOTED).contains(&now);
        if is_due {
            self.noted.store(now, Ordering::Relaxed);
        }
        is_due
    }

    /// Sets the time of last use, which is the modification time of the map.
    pub(super) fn write_use(&self) {
        let _ = self.map.set_modified(SystemTime::now());
    }

    /// The path of the map.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The byte range of the blocks `run`.
    pub(super) fn bytes_of(&self, run: &Range<u64>) -> Range<u64> {
        run.start * BLOCK_LEN..(run.end * BLOCK_LEN).min(self.key.len)
    }

    /// Claims the blocks `run`. The range in `Claim::Busy` is the blocks that another reader has claimed.
    pub(super) fn claim(&self, run: &Range<u64>) -> Claim {
        match claim(&self.path, &sums_at(run)) {
            Claim::Busy(busy) => {
                let block = |at: u64| at.saturating_sub(HEADER_LEN);
                let (start, end) = (block(busy.start) / SUM_LEN, block(busy.end).div_ceil(SUM_LEN));
                Claim::Busy(start.max(run.start)..end.min(run.end))
            }
            mine @ Claim::Mine(_) => mine,
        }
    }

    /// Notes that a claim is stuck: a reader's wait for its blocks has timed out.
    pub(super) fn note_stuck_claim(&self) {
        *self.unawaited.lock() = Some(Instant::now() + UNAWAITED);
    }

    /// Whether a claim was stuck within the time `UNAWAITED` before now.
    pub(super) fn has_stuck_claims(&self) -> bool {
        self.unawaited.lock().is_some_and(|until| Instant::now() < until)
    }

    /// The checksums of the blocks `run`. A checksum is zeros if the block is not in the cache.
    ///
    /// # Errors
    /// `WouldBlock` if the checksums are not in the page cache and `reach` is `Memory`.
    pub(super) fn sums(&self, run: &Range<u64>, reach: BlockReach) -> io::Result<Vec<[u8; 16]>> {
        let mut bytes = vec![0; ((run.end - run.start) * SUM_LEN) as usize];
        let at = sums_at(run).start;
        match reach {
            BlockReach::Memory if copy_cached(&self.map, at, &mut bytes) => {}
            BlockReach::Memory => return Err(ErrorKind::WouldBlock.into()),
            BlockReach::Disk => self.map.read_exact_at(&mut bytes, at)?,
        }
        Ok(bytes.as_chunks::<16>().0.to_vec())
    }

    /// Calls `act` with the number and the checksum of each block that is in the cache.
    ///
    /// # Errors
    /// If the map cannot be read.
    pub(super) fn each_sum(&self, mut act: impl FnMut(u64, [u8; 16])) -> io::Result<()> {
        let all = self.blocks();
        for start in all.clone().step_by(SUMS_AT_ONCE) {
            let run = start..(start + SUMS_AT_ONCE as u64).min(all.end);
            let sums = self.sums(&run, BlockReach::Disk)?;
            let there = run.zip(sums).filter(|(_, sum)| *sum != [0; 16]);
            there.for_each(|(block, sum)| act(block, sum));
        }
        Ok(())
    }

    /// Removes a block that does not match its checksum from the map. Returns `true` if the block is damaged, and
    /// `false` if the checksum differs only because another process has removed the object.
    pub(super) fn forget(&self, block: u64) -> bool {
        self.known.remove(block);
        if !self.is_linked() {
            return false;
        }
        if self.writable {
            let _ = self.map.write_all_at(&[0; 16], sums_at(&(block..block + 1)).start);
        }
        if !self.damage_told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{}: block {block} in the disk cache is damaged; it is read from the server again",
                crate::error::shown(&self.key.url)
            );
        }
        true
    }

    /// Stores the blocks `run` with the content `bytes`. The bytes are written before the checksums, and a
    /// block is used only once its checksum is written.
    ///
    /// # Errors
    /// If a file cannot be written. Then some of the blocks may have been stored.
    pub(super) fn store(&self, run: &Range<u64>, bytes: &[u8]) -> io::Result<()> {
        let start = self.bytes_of(run).start;
        self.data.write_all_at(bytes, start)?;
        let mut sums = Vec::with_capacity(((run.end - run.start) * SUM_LEN) as usize);
        for (block, bytes) in run.clone().zip(bytes.chunks(BLOCK_LEN as usize)) {
            sums.extend_from_slice(&self.sum_of(block, [bytes]));
        }
        self.map.write_all_at(&sums, sums_at(run).start)?;
        run.clone().for_each(|block| self.known.add(block));
        Ok(())
    }

    /// The checksum of block number `block` of this object, whose bytes are `parts` in sequence. It also covers
    /// the digest of the object and the number of the block.
    pub(super) fn sum_of<'a>(
        &self,
        block: u64,
        parts: impl IntoIterator<Item = &'a [u8]>,
    ) -> [u8; 16] {
        let mut hasher = Hasher::new();
        hasher.update(&self.key.digest.0);
        hasher.update(&block.to_le_bytes());
        parts.into_iter().for_each(|part| hasher.update(part));
        let Digest(sum) = hasher.finish();
        // Zeros stand for a block that is not in the cache.
        if sum == [0; 16] { [1; 16] } else { sum }
    }
}

/// The byte range in a map of the checksums of the blocks `run`.
fn sums_at(run: &Range<u64>) -> Range<u64> {
    HEADER_LEN + run.start * SUM_LEN..HEADER_LEN + run.end * SUM_LEN
}

pub(super) fn data_name(key: &ObjectKey, nonce: u64) -> String {
    format!("{}.{nonce:016x}.{DATA}", key.digest)
}

/// The name of a file that is still being written.
pub(super) fn temporary_name(number: u64) -> String {
    format!(".{number:016x}.{TEMPORARY}")
}

/// The result of a removal. A file that does not exist counts as removed, because another process may have removed it
/// first.
pub(super) fn gone_is_fine(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn damaged() -> io::Error {
    invalid_data("damaged")
}

/// Whether a map has the file format of another version of tensorfs.
fn is_of_other_version(map: &File) -> bool {
    let mut start = *MAGIC;
    let number =
        map.read_exact_at(&mut start, 0).ok().and_then(|()| start.strip_prefix(MAGIC_WORD));
    start != *MAGIC && number.is_some_and(|number| number.iter().all(u8::is_ascii_digit))
}

/// Opens a file, and checks that no other user could have written it. Also returns whether this process can write the
/// file.
fn open_private(path: &Path) -> io::Result<(File, bool)> {
    let open = |write| {
        let mut options = OpenOptions::new();
        options.read(true).write(write);
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)
    };
    let (file, writable) = match open(true) {
        Err(e)
            if matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) =>
        {
            (open(false)?, false)
        }
        opened => (opened?, true),
    };
    let meta = file.metadata()?;
    if meta.is_file() && is_private(&meta) {
        Ok((file, writable))
    } else {
        Err(io::Error::other("others may have written it"))
    }
}

pub(super) fn header_of(key: &ObjectKey, nonce: u64) -> Vec<u8> {
    let mut end = key.url.len().min(URL_LEN_MAX);
    while !key.url.is_char_boundary(end) {
        end -= 1;
    }
    let url = &key.url.as_bytes()[..end];
    let mut header = Vec::with_capacity(HEADER_LEN as usize);
    header.extend_from_slice(MAGIC);
    for number in [BLOCK_LEN, key.len, nonce, url.len() as u64] {
        header.extend_from_slice(&number.to_le_bytes());
    }
    header.extend_from_slice(&key.digest.0);
    header.extend_from_slice(url);
    header.resize(HEADER_LEN as usize - 16, 0);
    let Digest(sum) = Digest::of(&header);
    header.extend_from_slice(&sum);
    header
}

fn parse_header(header: &[u8]) -> Option<(ObjectKey, u64)> {
    let (described, sum) = header.split_last_chunk::<16>()?;
    let rest = described.strip_prefix(MAGIC)?;
    if Digest::of(described) != Digest(*sum) {
        return None;
    }
    let (numbers, rest) = rest.split_first_chunk::<32>()?;
    let number =
        |at: usize| numbers.as_chunks::<8>().0.get(at).map(|word| u64::from_le_bytes(*word));
    let (digest, rest) = rest.split_first_chunk::<16>()?;
    let url = std::str::from_utf8(rest.get(..usize::try_from(number(3)?).ok()?)?).ok()?;
    let key = ObjectKey { url: url.to_owned(), len: number(1)?, digest: Digest(*digest) };
    let is_right = number(0)? == BLOCK_LEN && (1..=LEN_MAX).contains(&key.len);
    is_right.then_some((key, number(2)?))
}
