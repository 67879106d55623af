//! Checksums of all bytes of the shards of a folder. They are recorded when the shards are first
//! read completely.
//!
//! The checksums are in a file beside the index, and not in the index: the index is deleted at any doubt, and the
//! checksums must be kept. For each shard, the file records how the shard is cut into parts, and hashes of every part.
//! The parts are its description, each stored piece of a tensor, and the bytes that no tensor uses. Large parts have a
//! hash for each `CHUNK_LEN` bytes, so that the place of a difference is known to within `CHUNK_LEN` bytes. This module
//! accesses no file.

use std::ops::Range;
use std::sync::Arc;

use bincode::{Decode, Encode};

use crate::hash::{Digest, Hasher};
use crate::version::Version;

use super::frame::{self, FileKind};

/// Extension of files of checksums.
pub const SUMS_EXTENSION: &str = "sums";

/// Maximum number of bytes that one hash covers.
pub const CHUNK_LEN: u64 = 1 << 20;

const KIND: FileKind = FileKind { magic: b"TFS-SUMS", version: 2 };

/// How a file is cut into parts without gaps, and how the parts are cut into chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockBoundaries {
    /// The end of each part.
    ends: Vec<u64>,
    /// Total number of chunks up to the end of each part.
    chunk_ends: Vec<u32>,
}

/// The checksums of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardSums {
    /// Its name in the folder.
    pub name: String,
    /// Its version without the device number, which differs after each mount of a file system.
    pub version: Version,
    /// Time at which the checksums were recorded, in seconds since 1970.
    pub recorded: i64,
    /// The parts of the file. The first part is the description in front of the data.
    pub boundaries: Arc<BlockBoundaries>,
    /// The hash of each chunk.
    pub digests: Vec<Digest>,
}

/// The checksums of the shards of one folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Path of the folder, as bytes.
    pub folder: Vec<u8>,
    /// Checksums of the shards, sorted by name.
    pub shards: Vec<Arc<ShardSums>>,
}

/// A chunk of a file, which has one hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChecksumChunk {
    /// Its bytes.
    pub range: Range<u64>,
    /// Index of its digest.
    pub number: usize,
}

/// The checksums of a folder in the form in which they are encoded.
#[derive(Decode, Encode)]
struct SumsContent {
    folder: Vec<u8>,
    shards: Vec<ShardContent>,
}

#[derive(Decode, Encode)]
struct ShardContent {
    name: String,
    version: [u64; 14],
    recorded: i64,
    /// Length of each part.
    lens: Vec<u64>,
    /// The digests of all chunks, with 16 bytes each.
    digests: Vec<u8>,
}

impl BlockBoundaries {
    /// Makes parts of these lengths, which follow each other in the file. Empty parts are left out.
    /// `None` if the number of bytes or chunks overflows.
    pub fn new(lens: impl IntoIterator<Item = u64>) -> Option<BlockBoundaries> {
        let (mut boundaries, mut end, mut chunks) = (BlockBoundaries::default(), 0u64, 0u32);
        for len in lens.into_iter().filter(|&len| len > 0) {
            end = end.checked_add(len)?;
            chunks = chunks.checked_add(u32::try_from(len.div_ceil(CHUNK_LEN)).ok()?)?;
            boundaries.ends.push(end);
            boundaries.chunk_ends.push(chunks);
        }
        Some(boundaries)
    }

    /// Length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Number of parts.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Number of chunks.
    pub fn chunks_len(&self) -> usize {
        self.chunk_ends.last().map_or(0, |&end| end as usize)
    }

    /// The byte range of a part.
    pub fn part(&self, index: usize) -> Range<u64> {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        start..self.ends[index]
    }

    /// The indexes of the parts that overlap `range`. The part of `range` behind the end of the
    /// file is ignored.
    pub fn parts_of(&self, range: &Range<u64>) -> Range<usize> {
        let end = range.end.min(self.file_len());
        if range.start >= end {
            return 0..0;
        }
        let first = self.ends.partition_point(|&part_end| part_end <= range.start);
        first..self.ends.partition_point(|&part_end| part_end < end) + 1
    }

    /// The index of the part to which a chunk belongs.
    pub fn part_of_chunk(&self, number: usize) -> usize {
        self.chunk_ends.partition_point(|&end| end as usize <= number)
    }

    /// The chunks that overlap `range`.
    pub fn chunks_of(&self, range: Range<u64>) -> impl Iterator<Item = ChecksumChunk> + '_ {
        let wanted = range.clone();
        self.parts_of(&range).flat_map(move |index| {
            let part = self.part(index);
            let before = if index == 0 { 0 } else { self.chunk_ends[index - 1] as usize };
            let first = wanted.start.saturating_sub(part.start) / CHUNK_LEN;
            let last = (wanted.end.min(part.end) - part.start).div_ceil(CHUNK_LEN);
            (first..last).map(move |chunk| {
                let start = part.start + chunk * CHUNK_LEN;
                let range = start..(start + CHUNK_LEN).min(part.end);
                ChecksumChunk { range, number: before + chunk as usize }
            })
        })
    }
}

impl ShardSums {
    /// The digests of the chunks that overlap `range`.
    pub fn digests_of(&self, range: Range<u64>) -> impl Iterator<Item = Digest> + '_ {
        self.boundaries.chunks_of(range).map(|chunk| self.digests[chunk.number])
    }
}

/// Hashes the bytes of a file, or of consecutive parts of a file, chunk by chunk.
#[derive(Debug)]
pub struct ChunkHasher {
    boundaries: Arc<BlockBoundaries>,
    digests: Vec<Digest>,
    /// Index of the current part, and index of the part before which to stop.
    part: usize,
    parts_end: usize,
    /// Offset of the next byte, and the end of the current chunk.
    offset: u64,
    chunk_end: u64,
    /// The hasher of a chunk that is not complete.
    begun: Option<Hasher>,
}

impl ChunkHasher {
    /// A hasher for a whole file with these boundaries.
    pub fn new(boundaries: Arc<BlockBoundaries>) -> ChunkHasher {
        let parts = 0..boundaries.len();
        ChunkHasher::of_parts(boundaries, parts)
    }

    /// A hasher for the parts with the indexes `parts`.
    pub(crate) fn of_parts(boundaries: Arc<BlockBoundaries>, parts: Range<usize>) -> ChunkHasher {
        let offset = if parts.is_empty() { 0 } else { boundaries.part(parts.start).start };
        let mut hasher = ChunkHasher {
            boundaries,
            digests: Vec::new(),
            part: parts.start,
            parts_end: parts.end,
            offset,
            chunk_end: 0,
            begun: None,
        };
        hasher.chunk_end = hasher.end_of_chunk();
        hasher
    }

    fn end_of_chunk(&self) -> u64 {
        let end = self.boundaries.ends.get(self.part).copied().unwrap_or(u64::MAX);
        end.min(self.offset.saturating_add(CHUNK_LEN))
    }

    /// Adds the next bytes. Bytes after the last part are ignored.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.part < self.parts_end {
            let left = self.chunk_end - self.offset;
            let (own, rest) = bytes.split_at(left.min(bytes.len() as u64) as usize);
            bytes = rest;
            self.offset += own.len() as u64;
            if self.offset < self.chunk_end {
                self.begun.get_or_insert_default().update(own);
                continue;
            }
            self.digests.push(match self.begun.take() {
                None => Digest::of(own),
                Some(mut begun) => {
                    begun.update(own);
                    begun.finish()
                }
            });
            self.part += usize::from(self.offset == self.boundaries.ends[self.part]);
            self.chunk_end = self.end_of_chunk();
        }
    }

    /// The digests of all chunks. `None` if the bytes ended before the last part did.
    pub fn finish(self) -> Option<Vec<Digest>> {
        (self.part == self.parts_end).then_some(self.digests)
    }
}

impl Sums {
    /// The checksums of the shard called `name`.
    pub fn shard(&self, name: &str) -> Option<&Arc<ShardSums>> {
        let index = self.shards.binary_search_by(|shard| shard.name.as_str().cmp(name));
        index.ok().map(|index| &self.shards[index])
    }

    /// Adds the checksums of one shard, or replaces them.
    pub fn put(&mut self, shard: ShardSums) {
        let index = self.shards.binary_search_by(|other| other.name.cmp(&shard.name));
        match index {
            Ok(index) => self.shards[index] = Arc::new(shard),
            Err(index) => self.shards.insert(index, Arc::new(shard)),
        }
    }

    /// The bytes of the file. `None` if the file would be too long.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let shards = self.shards.iter().map(|shard| ShardContent {
            name: shard.name.clone(),
            version: shard.version.to_words(),
            recorded: shard.recorded,
            lens: (0..shard.boundaries.len())
                .map(|index| shard.boundaries.part(index))
                .map(|part| part.end - part.start)
                .collect(),
            digests: shard.digests.iter().flat_map(|digest| digest.0).collect(),
        });
        frame::wrap(KIND, SumsContent { folder: self.folder.clone(), shards: shards.collect() })
    }

    /// Decodes the checksums in `bytes`. The error is the reason why they are invalid.
    pub fn decode(bytes: &[u8]) -> Result<Sums, &'static str> {
        Sums::of_content(frame::unwrap(KIND, bytes)?)
    }

    /// Decodes content without a frame. The content may be any bytes.
    pub fn decode_unframed(bytes: &[u8]) -> Result<Sums, &'static str> {
        Sums::of_content(frame::content(bytes)?)
    }

    fn of_content(content: SumsContent) -> Result<Sums, &'static str> {
        let ordered = content.shards.windows(2).all(|pair| pair[0].name < pair[1].name);
        if !ordered {
            return Err("has shards out of order");
        }
        let shards = content
            .shards
            .into_iter()
            .map(ShardSums::of_content)
            .collect::<Result<_, &'static str>>()?;
        Ok(Sums { folder: content.folder, shards })
    }
}

impl ShardSums {
    fn of_content(content: ShardContent) -> Result<Arc<ShardSums>, &'static str> {
        let ShardContent { name, version, recorded, lens, digests } = content;
        let version = Version::from_words(&version);
        if lens.contains(&0) {
            return Err("has an empty part");
        }
        let boundaries = BlockBoundaries::new(lens).ok_or("has parts that do not end")?;
        if boundaries.file_len() != version.len {
            return Err("has parts that are not the file");
        }
        let (digests, rest) = digests.as_chunks::<16>();
        if !rest.is_empty() || digests.len() != boundaries.chunks_len() {
            return Err("does not have a hash for each chunk");
        }
        let digests = digests.iter().map(|&digest| Digest(digest)).collect();
        Ok(Arc::new(ShardSums {
            name,
            version,
            recorded,
            boundaries: Arc::new(boundaries),
            digests,
        }))
    }
}

#[cfg(test)]
mod tests;
