//! Checksums of all bytes of the shards of a folder, from the time when they were first read whole.
//!
//! A file of its own beside the index, since that is thrown away at any doubt and this is not. It
//! holds for each shard how the file is cut into parts (its description, each stored piece of a
//! tensor, and the bytes that no tensor uses), and a hash of every part. Large parts have a hash for
//! each `CHUNK_LEN` bytes, so that a difference is found to within that. Nothing here touches a
//! file.

use std::ops::Range;
use std::sync::Arc;

use bincode::{Decode, Encode};

use crate::hash::{Digest, Hasher};
use crate::version::Version;

use super::frame::{self, FileKind};

/// Extension of files of checksums.
pub const SUMS_EXTENSION: &str = "sums";

/// Maximum number of bytes per hash.
pub const CHUNK_LEN: u64 = 1 << 20;

const KIND: FileKind = FileKind { magic: b"TFS-SUMS", version: 2 };

/// The cut of a file into parts without gaps, and of the parts into chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockBoundaries {
    /// The end of each part.
    ends: Vec<u64>,
    /// Number of chunks up to the end of each part.
    chunk_ends: Vec<u32>,
}

/// The checksums of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardSums {
    /// Its name in the folder.
    pub name: String,
    /// The lasting part of its version.
    pub version: Version,
    /// Time at which they were recorded, in seconds since 1970.
    pub recorded: i64,
    /// Its parts. The first one is the bytes before the data.
    pub boundaries: Arc<BlockBoundaries>,
    /// The hash of each chunk.
    pub digests: Vec<Digest>,
}

/// The checksums of the shards of one folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// The folder that the checksums belong to.
    pub folder: Vec<u8>,
    /// Checksums of the shards, by name.
    pub shards: Vec<Arc<ShardSums>>,
}

/// A chunk of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChecksumChunk {
    /// Its bytes.
    pub range: Range<u64>,
    /// Number of its digest.
    pub number: usize,
}

/// The checksums of a folder as they are written.
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
    /// 16 bytes for each chunk.
    digests: Vec<u8>,
}

impl BlockBoundaries {
    /// Parts of these lengths, one after another, without the empty ones. `None` if there are too
    /// many bytes or chunks to count.
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

    /// The bytes of a part.
    pub fn part(&self, index: usize) -> Range<u64> {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        start..self.ends[index]
    }

    /// The parts that overlap `range`, which is cut at the end of the file.
    pub fn parts_of(&self, range: &Range<u64>) -> Range<usize> {
        let end = range.end.min(self.file_len());
        if range.start >= end {
            return 0..0;
        }
        let first = self.ends.partition_point(|&part_end| part_end <= range.start);
        first..self.ends.partition_point(|&part_end| part_end < end) + 1
    }

    /// The part that a chunk belongs to.
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

/// Hashes the bytes of a file, or of some of its parts, from their beginning, chunk by chunk.
#[derive(Debug)]
pub struct ChunkHasher {
    boundaries: Arc<BlockBoundaries>,
    digests: Vec<Digest>,
    /// The current part, and the one at which to end.
    part: usize,
    parts_end: usize,
    /// The place of the next byte, and the end of the current chunk.
    offset: u64,
    chunk_end: u64,
    /// The hash of a chunk that is not complete.
    begun: Option<Hasher>,
}

impl ChunkHasher {
    /// A hasher of a file with these boundaries.
    pub fn new(boundaries: Arc<BlockBoundaries>) -> ChunkHasher {
        let parts = 0..boundaries.len();
        ChunkHasher::of_parts(boundaries, parts)
    }

    /// A hasher of these parts of a file with these boundaries.
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

    /// Adds bytes. Bytes after the last part are ignored.
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

    /// The digests of all chunks, `None` if the end of the last part is not reached.
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

    /// The bytes of the file, `None` if it would be too long.
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

    /// The checksums in `bytes`, or the reason why they are invalid.
    pub fn decode(bytes: &[u8]) -> Result<Sums, &'static str> {
        Sums::of_content(frame::unwrap(KIND, bytes)?)
    }

    /// Decodes content without its frame, which may be any bytes.
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
