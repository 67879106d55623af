//! The values of one checkpoint, in the layout of tensorizer. `PREFIX:header:0` has the beginning of the file.
//! `PREFIX:NAME:OFFSET` has the header or the data of a tensor. Together, the values make up one file.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest as _, Sha256};

use super::client::RedisCalls;
use super::link::time_left;
use crate::error::{invalid_data, quoted};
use crate::format::RangeReader;
use crate::format::tensorizer::{self, ENTRIES_LEN_MAX, HEAD_LEN, HashedTensor, StoredPlace};
use crate::hash::Digest;
use crate::sync::{Condvar, Mutex};

/// Length of a block in bytes. The checksums of the blocks of a tensor are kept after the tensor
/// was checked.
const BLOCK_LEN: u64 = 64 << 10;

/// Maximum number of bytes of one request.
const PART_LEN: u64 = 8 << 20;

/// Length of the end marker after the last tensor. Redis does not store the marker.
const END_MARK_LEN: u64 = 8;

/// Maximum number of tensors whose headers are requested in one round trip.
const HEADERS_MAX: usize = 4096;

/// Maximum total length of all headers in bytes. They stay in memory.
const HEADERS_LEN_MAX: u64 = 256 << 20;

/// A checkpoint as one file.
pub(super) struct RedisFile {
    /// The beginning of the file: the head and the list of tensors.
    description: Vec<u8>,
    /// The tensors in file order. There are no gaps between them.
    tensors: Vec<RedisTensor>,
    pub(super) len: u64,
    /// A hash of the description and of all headers, which contain the hashes of the data. The number is odd if the
    /// data is compared with the hashes in the headers.
    pub(super) number: u64,
}

/// A tensor of the file.
struct RedisTensor {
    place: StoredPlace,
    header: Vec<u8>,
    /// The Redis key of the data.
    key: Vec<u8>,
    /// The hashes of the tensor. `None` if its bytes are encrypted: then readers check MACs instead.
    hashed: Option<HashedTensor>,
    check: TensorCheck,
    /// The checksums of the blocks that were read. Used only if there are no hashes.
    seen: Mutex<HashMap<u64, Digest>>,
}

/// The comparison of a tensor with its hashes. One reader at a time does the comparison, and the others wait.
/// If this reader runs out of time, the next one continues.
#[derive(Default)]
struct TensorCheck {
    stage: Mutex<CheckStage>,
    changed: Condvar,
}

/// The progress of the comparison.
enum CheckStage {
    /// No reader is comparing. The field has the part that is done.
    Open(HashedStart),
    /// A reader is comparing.
    Busy,
    /// All bytes were compared. The field has the checksums of the blocks.
    Done(Arc<[Digest]>),
}

impl Default for CheckStage {
    fn default() -> CheckStage {
        CheckStage::Open(HashedStart::default())
    }
}

/// The state of the hashes after the header and the first `len` bytes of the data.
#[derive(Default)]
struct HashedStart {
    crc32: crc32fast::Hasher,
    sha256: Sha256,
    /// The checksums of the blocks that were read so far.
    sums: Vec<Digest>,
    len: u64,
}

/// The result of `TensorCheck::turn`.
enum CheckTurn<'a> {
    Mine(CheckWork<'a>),
    Done(Arc<[Digest]>),
}

/// The comparison while one reader does it. When this is dropped, another reader can continue.
struct CheckWork<'a> {
    check: &'a TensorCheck,
    start: HashedStart,
    done: Option<Arc<[Digest]>>,
}

impl TensorCheck {
    /// Begins or continues the comparison, or returns its result. Waits until `deadline` for another reader
    /// that is comparing.
    fn turn(&self, deadline: Instant) -> io::Result<CheckTurn<'_>> {
        let mut stage = self.stage.lock();
        loop {
            match &mut *stage {
                CheckStage::Done(sums) => return Ok(CheckTurn::Done(sums.clone())),
                CheckStage::Open(start) => {
                    let start = std::mem::take(start);
                    *stage = CheckStage::Busy;
                    return Ok(CheckTurn::Mine(CheckWork { check: self, start, done: None }));
                }
                CheckStage::Busy => {
                    stage = self.changed.wait_timeout(stage, time_left(deadline)?);
                }
            }
        }
    }
}

impl Drop for CheckWork<'_> {
    fn drop(&mut self) {
        let stage = match self.done.take() {
            Some(sums) => CheckStage::Done(sums),
            None => CheckStage::Open(std::mem::take(&mut self.start)),
        };
        *self.check.stage.lock() = stage;
        self.check.changed.notify_all();
    }
}

impl RedisFile {
    /// Reads the list of tensors and the headers below `prefix`.
    ///
    /// # Errors
    /// `NotFound` if there is no such prefix. `InvalidData` if the values do not have the layout of tensorizer.
    /// Also the errors of the server.
    pub(super) fn load(calls: RedisCalls<'_>, prefix: &str) -> io::Result<RedisFile> {
        let key = format!("{prefix}:header:0");
        let most = HEAD_LEN + ENTRIES_LEN_MAX;
        let description = calls.part(key.as_bytes(), &(0..most))?;
        if description.is_empty() {
            let why = "there is no such prefix of keys";
            return Err(io::Error::new(ErrorKind::NotFound, why));
        }
        let places =
            tensorizer::places(&description).map_err(|fault| invalid_data(fault.to_string()))?;
        let len = places.iter().fold(0, |len: u64, place| len.saturating_add(place.header_len()));
        if len > HEADERS_LEN_MAX {
            let why = format!("{len} bytes of headers, tensorfs reads up to {HEADERS_LEN_MAX}");
            return Err(invalid_data(format!("the tensors have {why}")));
        }
        let mut tensors = Vec::new();
        for group in places.chunk_by(in_one_trip()) {
            tensors.extend(headers(calls, prefix, group)?);
        }
        RedisFile { description, tensors, len: 0, number: 0 }.with_hashes()
    }

    /// Adds the hashes in the headers to the tensors, after a check that the headers agree with the list.
    fn with_hashes(self) -> io::Result<RedisFile> {
        let data_end = self.tensors.last().map_or(0, |tensor| tensor.place.data.end);
        let too_long = || invalid_data("its tensors pass 2^64 bytes");
        let len = data_end.checked_add(END_MARK_LEN).ok_or_else(too_long)?;
        let mut file = RedisFile { len, ..self };
        let hashed = tensorizer::hashes(&mut DescribedBytes(&file))?
            .map_err(|fault| invalid_data(fault.to_string()))?;
        let is_encrypted = tensorizer::is_encrypted(&file.description, &(0..file.len));
        for found in hashed.into_iter().filter(|_| !is_encrypted) {
            let start = |tensor: &RedisTensor| tensor.place.header.start;
            if let Ok(at) = file.tensors.binary_search_by_key(&found.range.start, start) {
                file.tensors[at].hashed = Some(found);
            }
        }
        let has_data = |tensor: &&RedisTensor| !tensor.place.data.is_empty();
        let mut with_data = file.tensors.iter().filter(has_data);
        if let Some(tensor) = with_data.find(|tensor| tensor.hashed.is_none() && !is_encrypted) {
            let why = "has no hash, and Redis keeps no versions: save the checkpoint again";
            return Err(invalid_data(format!("{} {why}", tensor.place.shown_name())));
        }
        let mut all = file.description.clone();
        file.tensors.iter().for_each(|tensor| all.extend_from_slice(&tensor.header));
        let number = Digest::of(&all).number();
        // The number of an encrypted file is even, because its data is not compared with hashes.
        file.number = if is_encrypted { number & !1 } else { number | 1 };
        Ok(file)
    }

    /// Fills `buf` with the bytes of the file at `offset`. The file must contain all of them.
    ///
    /// # Errors
    /// `StaleNetworkFileHandle` if the values do not match the headers any more. Also the errors of the server.
    pub(super) fn read(
        &self,
        calls: RedisCalls<'_>,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<()> {
        let wanted = offset..offset + buf.len() as u64;
        self.copy_described(&wanted, buf);
        let first = self.tensors.partition_point(|tensor| tensor.place.data.end <= wanted.start);
        for tensor in &self.tensors[first..] {
            let data = &tensor.place.data;
            let range = data.start.max(wanted.start)..data.end.min(wanted.end);
            if data.start >= wanted.end {
                break;
            }
            if range.start < range.end {
                let to = (range.start - offset) as usize..(range.end - offset) as usize;
                let within = range.start - data.start..range.end - data.start;
                tensor.read(calls, within, &mut buf[to])?;
            }
        }
        Ok(())
    }

    /// Copies to `buf` those bytes of the range `wanted` that need no request: the description, the headers, and the
    /// end marker, which is zeros.
    fn copy_described(&self, wanted: &Range<u64>, buf: &mut [u8]) {
        copy_overlap(0, &self.description, wanted, buf);
        let first = self.tensors.partition_point(|tensor| tensor.place.data.end <= wanted.start);
        for tensor in self.tensors[first..].iter() {
            if tensor.place.header.start >= wanted.end {
                break;
            }
            copy_overlap(tensor.place.header.start, &tensor.header, wanted, buf);
        }
        copy_overlap(self.len - END_MARK_LEN, &[0; END_MARK_LEN as usize], wanted, buf);
    }
}

/// Whether the header of a tensor is requested in the same round trip as the header of the tensor before it.
fn in_one_trip() -> impl FnMut(&StoredPlace, &StoredPlace) -> bool {
    let (mut count, mut len) = (1, 0);
    move |before, place| {
        len += before.header_len();
        let fits = count < HEADERS_MAX && len + place.header_len() <= PART_LEN;
        (count, len) = if fits { (count + 1, len) } else { (1, 0) };
        fits
    }
}

/// Reads the headers of the tensors at `places`, and checks that the data of each has the expected length.
fn headers(
    calls: RedisCalls<'_>,
    prefix: &str,
    places: &[StoredPlace],
) -> io::Result<Vec<RedisTensor>> {
    let key = |place: &StoredPlace, offset: u64| {
        let offset = offset.to_string();
        [prefix.as_bytes(), &place.stored_name, offset.as_bytes()].join(&b':')
    };
    // One byte more is requested, so that a value that is too long is detected.
    let start_of = |place: &StoredPlace| (key(place, place.header.start), place.header_len() + 1);
    let of_headers: Vec<_> = places.iter().map(start_of).collect();
    let of_data: Vec<_> = places.iter().map(|place| key(place, place.data.start)).collect();
    let (values, lens) = calls.starts_and_lens(&of_headers, &of_data)?;
    let mut tensors = Vec::with_capacity(places.len());
    let found = places.iter().zip(values).zip(lens.into_iter().zip(of_data));
    for ((place, value), (found_len, key)) in found {
        let name = place.shown_name();
        let header_len = place.header_len();
        let missing = || invalid_data(format!("{name} has no header of {header_len} bytes"));
        let fits = |header: &Vec<u8>| header.len() as u64 == header_len;
        let header = Some(value).filter(fits).ok_or_else(missing)?;
        let len = place.data.end - place.data.start;
        if found_len != len {
            let why = format!("the value of {name} has {found_len} bytes, its header says {len}");
            return Err(invalid_data(why));
        }
        let place = place.clone();
        let (check, seen) = (TensorCheck::default(), Mutex::default());
        tensors.push(RedisTensor { place, header, key, hashed: None, check, seen });
    }
    Ok(tensors)
}

/// The bytes of a file that are in memory, for the parser.
struct DescribedBytes<'a>(&'a RedisFile);

impl RangeReader for DescribedBytes<'_> {
    fn file_len(&self) -> u64 {
        self.0.len
    }

    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let is_inside = |end: &u64| *end <= self.0.len;
        let Some(end) = offset.checked_add(buf.len() as u64).filter(is_inside) else {
            return Err(ErrorKind::UnexpectedEof.into());
        };
        self.0.copy_described(&(offset..end), buf);
        Ok(())
    }
}

impl RedisTensor {
    fn len(&self) -> u64 {
        self.place.data.end - self.place.data.start
    }

    /// Fills `buf` with the bytes `within` of the data.
    fn read(&self, calls: RedisCalls<'_>, within: Range<u64>, buf: &mut [u8]) -> io::Result<()> {
        let Some(hashed) = &self.hashed else {
            return self.read_blocks(calls, &within, buf, |number, sum| {
                *self.seen.lock().entry(number).or_insert(sum) == sum
            });
        };
        let sums = match self.check.turn(calls.deadline)? {
            CheckTurn::Done(sums) => sums,
            CheckTurn::Mine(work) => {
                let first = work.start.len;
                let sums = self.check(calls, hashed, work, &within, buf)?;
                if first <= within.start {
                    return Ok(());
                }
                sums
            }
        };
        self.read_blocks(calls, &within, buf, |number, sum| sums.get(number as usize) == Some(&sum))
    }

    /// Fills `buf` with the bytes `within` of the data. `is_known` gets the number and the checksum of each block, and
    /// compares the checksum with the known one.
    fn read_blocks(
        &self,
        calls: RedisCalls<'_>,
        within: &Range<u64>,
        buf: &mut [u8],
        is_known: impl Fn(u64, Digest) -> bool,
    ) -> io::Result<()> {
        let mut start = within.start / BLOCK_LEN * BLOCK_LEN;
        while start < within.end {
            let end = within.end.min(start + PART_LEN).next_multiple_of(BLOCK_LEN);
            let blocks = start..end.min(self.len());
            let bytes = self.part(calls, &blocks)?;
            let mut numbered = (start / BLOCK_LEN..).zip(bytes.chunks(BLOCK_LEN as usize));
            if !numbered.all(|(number, block)| is_known(number, Digest::of(block))) {
                return Err(ErrorKind::StaleNetworkFileHandle.into());
            }
            copy_overlap(start, &bytes, within, buf);
            start = blocks.end;
        }
        Ok(())
    }

    /// Reads the rest of the data and compares the whole tensor with its hashes. Those bytes of `within` that are among
    /// the bytes read here are copied to `buf`. Returns the checksums of all blocks.
    fn check(
        &self,
        calls: RedisCalls<'_>,
        hashed: &HashedTensor,
        mut work: CheckWork<'_>,
        within: &Range<u64>,
        buf: &mut [u8],
    ) -> io::Result<Arc<[Digest]>> {
        while work.start.len < self.len() {
            time_left(calls.deadline)?;
            let from = work.start.len;
            let bytes = self.part(calls, &(from..self.len().min(from + PART_LEN)))?;
            if from == 0 {
                work.start.add(&self.hashed_header(hashed));
            }
            work.start.add(&bytes);
            work.start.sums.extend(bytes.chunks(BLOCK_LEN as usize).map(Digest::of));
            work.start.len += bytes.len() as u64;
            copy_overlap(from, &bytes, within, buf);
        }
        let HashedStart { crc32, sha256, sums, .. } = std::mem::take(&mut work.start);
        let crc32 = crc32.finalize().to_le_bytes();
        let sha256: [u8; 32] = sha256.finalize().into();
        let differs = hashed.hashes.crc32.is_some_and(|hash| hash != crc32)
            || hashed.hashes.sha256.is_some_and(|hash| hash != sha256);
        if differs {
            let name = self.place.shown_name();
            let why = "is not what the hash in its header says: it is damaged, or being replaced";
            return Err(invalid_data(format!("the value of {name} {why}")));
        }
        let sums: Arc<[Digest]> = sums.into();
        work.done = Some(sums.clone());
        Ok(sums)
    }

    /// The header in the form in which it is hashed: with zeros in place of the hashes.
    fn hashed_header(&self, hashed: &HashedTensor) -> Vec<u8> {
        let mut header = self.header.clone();
        for place in hashed.hashes.places() {
            let start = self.place.header.start;
            header[(place.start - start) as usize..(place.end - start) as usize].fill(0);
        }
        header
    }

    /// Reads the bytes `range` of the data.
    fn part(&self, calls: RedisCalls<'_>, range: &Range<u64>) -> io::Result<Vec<u8>> {
        let bytes = calls.part(&self.key, range)?;
        let is_whole = bytes.len() as u64 == range.end - range.start;
        if is_whole { Ok(bytes) } else { Err(ErrorKind::StaleNetworkFileHandle.into()) }
    }
}

impl HashedStart {
    fn add(&mut self, bytes: &[u8]) {
        self.crc32.update(bytes);
        self.sha256.update(bytes);
    }
}

impl StoredPlace {
    fn header_len(&self) -> u64 {
        self.header.end - self.header.start
    }

    /// The name of the tensor, for messages.
    fn shown_name(&self) -> String {
        quoted(&String::from_utf8_lossy(&self.stored_name))
    }
}

/// Copies those bytes of `bytes` that lie in the range `wanted` to their place in `buf`. `bytes` begins at byte
/// `start` of the file.
fn copy_overlap(start: u64, bytes: &[u8], wanted: &Range<u64>, buf: &mut [u8]) {
    let (from, to) = (start.max(wanted.start), (start + bytes.len() as u64).min(wanted.end));
    if from < to {
        let place = (from - wanted.start) as usize..(to - wanted.start) as usize;
        buf[place].copy_from_slice(&bytes[(from - start) as usize..(to - start) as usize]);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_reader_waits_for_the_check_of_another_until_its_own_deadline() {
        let check = TensorCheck::default();
        let soon = || Instant::now() + Duration::from_millis(20);
        let CheckTurn::Mine(mut work) = check.turn(soon()).unwrap() else { panic!("is done") };
        let late = check.turn(soon()).err().unwrap();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        // Another reader continues where this one has stopped.
        work.start.len = 7;
        drop(work);
        let CheckTurn::Mine(mut work) = check.turn(soon()).unwrap() else { panic!("is done") };
        assert_eq!(work.start.len, 7);
        let later = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| matches!(check.turn(later), Ok(CheckTurn::Done(_))));
            work.done = Some(Vec::new().into());
            drop(work);
            assert!(other.join().unwrap());
        });
    }

    #[test]
    fn headers_are_asked_for_in_groups_of_few_bytes() {
        let place = |len: u64| StoredPlace { stored_name: Vec::new(), header: 0..len, data: 0..0 };
        let lens = |lens: &[u64]| -> Vec<usize> {
            let places: Vec<StoredPlace> = lens.iter().map(|len| place(*len)).collect();
            places.chunk_by(in_one_trip()).map(<[_]>::len).collect()
        };
        assert_eq!(lens(&[PART_LEN / 2; 5]), [2, 2, 1]);
        assert_eq!(lens(&[2 * PART_LEN, 1, 2 * PART_LEN]), [1, 1, 1]);
        assert_eq!(lens(&[1; 5000]), [HEADERS_MAX, 5000 - HEADERS_MAX]);
    }
}
