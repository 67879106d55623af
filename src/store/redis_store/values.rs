//! The values of one checkpoint, in the layout of tensorizer: `PREFIX:header:0` has the beginning of the
//! file, `PREFIX:NAME:OFFSET` the header of a tensor or its data. Together they are one file.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest as _, Sha256};

use super::client::RedisClient;
use crate::error::quoted;
use crate::format::RangeReader;
use crate::format::tensorizer::{self, HashedTensor, StoredPlace};
use crate::hash::Digest;
use crate::sync::Mutex;

/// Bytes of a block, of which the checksum is kept once its tensor was checked.
const BLOCK_LEN: u64 = 64 << 10;

/// Bytes that are asked for at a time.
const PART_LEN: u64 = 8 << 20;

/// The mark behind the last tensor, which is not stored.
const END_MARK_LEN: u64 = 8;

/// Maximum number of tensors whose headers are asked for in one round trip.
const HEADERS_MAX: usize = 4096;

fn invalid(why: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

/// A checkpoint as one file.
pub(super) struct RedisFile {
    /// The beginning of the file: the head and the list of tensors.
    description: Vec<u8>,
    /// In the order of their bytes, without gaps.
    tensors: Vec<RedisTensor>,
    pub(super) len: u64,
    /// A number that stands for the description and all headers, which have the hashes of all data. It is odd
    /// if the data is compared with them.
    pub(super) number: u64,
}

/// A tensor of it.
struct RedisTensor {
    place: StoredPlace,
    header: Vec<u8>,
    /// The key of its data.
    key: Vec<u8>,
    /// Its hashes. `None` if its bytes are encrypted: then they have MACs, which readers check.
    hashed: Option<HashedTensor>,
    /// The checksums of its blocks, once all of it was compared with its hashes.
    sums: Mutex<Option<Arc<[Digest]>>>,
}

impl RedisFile {
    /// Reads the list of tensors and their headers below `prefix`.
    ///
    /// # Errors
    /// `NotFound` if nothing is there, `InvalidData` if it is not the layout of tensorizer, and the errors of
    /// the server.
    pub(super) fn load(
        client: &RedisClient,
        prefix: &str,
        deadline: Instant,
    ) -> io::Result<RedisFile> {
        let found = client.value(format!("{prefix}:header:0").as_bytes(), deadline)?;
        let absent = || io::Error::new(ErrorKind::NotFound, "there is no such prefix of keys");
        let description = found.ok_or_else(absent)?;
        let places =
            tensorizer::places(&description).map_err(|fault| invalid(fault.to_string()))?;
        let mut tensors = Vec::with_capacity(places.len());
        for group in places.chunks(HEADERS_MAX) {
            tensors.extend(headers(client, prefix, group, deadline)?);
        }
        RedisFile { description, tensors, len: 0, number: 0 }.with_hashes()
    }

    /// It with the hashes in its headers, after the check that these agree with the list.
    fn with_hashes(self) -> io::Result<RedisFile> {
        let data_end = self.tensors.last().map_or(0, |tensor| tensor.place.data.end);
        let mut file = RedisFile { len: data_end + END_MARK_LEN, ..self };
        let hashed = tensorizer::hashes(&mut DescribedBytes(&file))?
            .map_err(|fault| invalid(fault.to_string()))?;
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
            return Err(invalid(format!("{} {why}", tensor.place.shown_name())));
        }
        let mut all = file.description.clone();
        file.tensors.iter().for_each(|tensor| all.extend_from_slice(&tensor.header));
        let Digest(digest) = Digest::of(&all);
        let number = digest.iter().take(8).fold(0, |all, byte| all << 8 | u64::from(*byte));
        // Encrypted bytes are not compared with hashes.
        file.number = if is_encrypted { number & !1 } else { number | 1 };
        Ok(file)
    }

    /// Fills `buf` with the bytes at `offset`, which it has.
    ///
    /// # Errors
    /// `StaleNetworkFileHandle` if values are not those of the headers any more, and the errors of the
    /// server.
    pub(super) fn read(
        &self,
        client: &RedisClient,
        offset: u64,
        buf: &mut [u8],
        deadline: Instant,
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
                tensor.read(client, within, &mut buf[to], deadline)?;
            }
        }
        Ok(())
    }

    /// Copies what lies in memory of the bytes `wanted` of the file to their places in `buf`. The end mark
    /// is zeros.
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

/// The tensors at `places`, with their headers, after the check that their data has its length.
fn headers(
    client: &RedisClient,
    prefix: &str,
    places: &[StoredPlace],
    deadline: Instant,
) -> io::Result<Vec<RedisTensor>> {
    let key = |place: &StoredPlace, offset: u64| {
        let offset = offset.to_string();
        [prefix.as_bytes(), &place.stored_name, offset.as_bytes()].join(&b':')
    };
    let of_headers: Vec<_> = places.iter().map(|place| key(place, place.header.start)).collect();
    let of_data: Vec<_> = places.iter().map(|place| key(place, place.data.start)).collect();
    let (values, lens) = client.values_and_lens(&of_headers, &of_data, deadline)?;
    let mut tensors = Vec::with_capacity(places.len());
    let found = places.iter().zip(values).zip(lens.into_iter().zip(of_data));
    for ((place, value), (found_len, key)) in found {
        let name = place.shown_name();
        let header_len = place.header.end - place.header.start;
        let missing = || invalid(format!("{name} has no header of {header_len} bytes"));
        let fits = |header: &Vec<u8>| header.len() as u64 == header_len;
        let header = value.filter(fits).ok_or_else(missing)?;
        let len = place.data.end - place.data.start;
        if found_len != len {
            let why = format!("the value of {name} has {found_len} bytes, its header says {len}");
            return Err(invalid(why));
        }
        let place = place.clone();
        tensors.push(RedisTensor { place, header, key, hashed: None, sums: Mutex::default() });
    }
    Ok(tensors)
}

/// The described bytes of a file, for the parser.
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

    /// Fills `buf` with the bytes `within` of its data.
    fn read(
        &self,
        client: &RedisClient,
        within: Range<u64>,
        buf: &mut [u8],
        deadline: Instant,
    ) -> io::Result<()> {
        let Some(hashed) = &self.hashed else {
            buf.copy_from_slice(&self.part(client, &within, deadline)?);
            return Ok(());
        };
        let sums = {
            // Readers that come together check it once: the others wait here.
            let mut sums = self.sums.lock();
            match sums.clone() {
                Some(sums) => sums,
                None => {
                    *sums = Some(self.check(client, hashed, &within, buf, deadline)?);
                    return Ok(());
                }
            }
        };
        let first = within.start / BLOCK_LEN;
        let blocks = first * BLOCK_LEN..within.end.next_multiple_of(BLOCK_LEN).min(self.len());
        let bytes = self.part(client, &blocks, deadline)?;
        let mut pairs = bytes.chunks(BLOCK_LEN as usize).zip(&sums[first as usize..]);
        if pairs.any(|(block, sum)| Digest::of(block) != *sum) {
            return Err(ErrorKind::StaleNetworkFileHandle.into());
        }
        copy_overlap(blocks.start, &bytes, &within, buf);
        Ok(())
    }

    /// Reads all of its data and compares it with its hashes. Copies the bytes `within` to `buf`, and
    /// returns the checksums of all blocks.
    fn check(
        &self,
        client: &RedisClient,
        hashed: &HashedTensor,
        within: &Range<u64>,
        buf: &mut [u8],
        deadline: Instant,
    ) -> io::Result<Arc<[Digest]>> {
        let mut header = self.header.clone();
        for place in hashed.hashes.places() {
            let start = self.place.header.start;
            header[(place.start - start) as usize..(place.end - start) as usize].fill(0);
        }
        let (mut crc32, mut sha256) = (crc32fast::Hasher::new(), Sha256::new());
        crc32.update(&header);
        sha256.update(&header);
        let mut sums = Vec::with_capacity(self.len().div_ceil(BLOCK_LEN) as usize);
        let mut start = 0;
        while start < self.len() {
            let range = start..self.len().min(start + PART_LEN);
            let bytes = self.part(client, &range, deadline)?;
            crc32.update(&bytes);
            sha256.update(&bytes);
            sums.extend(bytes.chunks(BLOCK_LEN as usize).map(Digest::of));
            copy_overlap(range.start, &bytes, within, buf);
            start = range.end;
        }
        let crc32 = crc32.finalize().to_le_bytes();
        let sha256: [u8; 32] = sha256.finalize().into();
        let differs = hashed.hashes.crc32.is_some_and(|hash| hash != crc32)
            || hashed.hashes.sha256.is_some_and(|hash| hash != sha256);
        if differs {
            let name = self.place.shown_name();
            let why = "is not what the hash in its header says: it is damaged, or being replaced";
            return Err(invalid(format!("the value of {name} {why}")));
        }
        Ok(sums.into())
    }

    /// The bytes `range` of its data.
    fn part(
        &self,
        client: &RedisClient,
        range: &Range<u64>,
        deadline: Instant,
    ) -> io::Result<Vec<u8>> {
        let bytes = client.part(&self.key, range, deadline)?;
        let is_whole = bytes.len() as u64 == range.end - range.start;
        if is_whole { Ok(bytes) } else { Err(ErrorKind::StaleNetworkFileHandle.into()) }
    }
}

impl StoredPlace {
    /// Its name, for people.
    fn shown_name(&self) -> String {
        quoted(&String::from_utf8_lossy(&self.stored_name))
    }
}

/// Copies what `bytes`, which begin at `start`, have of `wanted` to its place in `buf`.
fn copy_overlap(start: u64, bytes: &[u8], wanted: &Range<u64>, buf: &mut [u8]) {
    let (from, to) = (start.max(wanted.start), (start + bytes.len() as u64).min(wanted.end));
    if from < to {
        let place = (from - wanted.start) as usize..(to - wanted.start) as usize;
        buf[place].copy_from_slice(&bytes[(from - start) as usize..(to - start) as usize]);
    }
}
