//! Computes the hashes of one shard. Its bytes are cut into steps at the bounds of tensors. Each
//! step is read and hashed by one thread, because several threads cannot compute the hash of one
//! tensor together.

use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::blob_hash;
use super::header_hashes::HeaderHashCheck;
use super::stored::{self, StoredPiece};
use crate::catalog::Shard;
use crate::checkpoint::header_hashes;
use crate::error::{Fault, Result};
use crate::format::tensorizer::HashedTensor;
use crate::hash::{Digest, Hasher};
use crate::index::{BlockBoundaries, ChunkHasher, ShardSums, now};
use crate::source::Source;
use crate::sweep::{RANGE_MAX, Sweep};

/// Number of bytes that a thread reads at a time.
const READ_LEN: u64 = RANGE_MAX;

/// Minimum length of a step in bytes. The last step may be shorter.
const STEP_LEN: u64 = 16 << 20;

/// A function that is called with the number of bytes of each read.
pub(super) type ReadProgress<'a> = &'a (dyn Fn(u64) + Sync);

/// The hashes of one shard that was read.
pub(super) struct ShardHashes {
    /// Its checksums. `None` if it has more chunks than can be counted.
    pub(super) sums: Option<ShardSums>,
    /// Digests of the chunks into which the record cuts the shard. `None` if `sums` has the same chunks.
    pub(super) as_recorded: Option<Vec<Digest>>,
    /// The hash of its description.
    pub(super) header: Digest,
    pub(super) sha256: Option<String>,
    /// Number of tensors whose bytes match the hashes in their headers. For an archive, the number of entries that
    /// match their CRC.
    pub(super) hashed: u64,
    /// The first hash in a header that does not match, and the offset of the first byte that it
    /// covers.
    pub(super) differs: Option<(u64, Fault)>,
}

/// A part of a shard that one thread reads.
#[derive(Debug, PartialEq, Eq)]
struct HashStep {
    bytes: Range<u64>,
    /// The indexes of the parts of the boundaries that it contains.
    parts: Range<usize>,
    /// The indexes of the tensors with hashes that it contains.
    tensors: Range<usize>,
}

/// The hashes of a step.
struct StepHashes {
    digests: Option<Vec<Digest>>,
    as_recorded: Option<Vec<Digest>>,
    /// Its bytes that describe the tensors.
    described: Vec<u8>,
    sha256: Option<String>,
    hashed: u64,
    differs: Option<(u64, Fault)>,
}

/// A shard that is being read, and the hashes that have to be computed.
struct ShardRead<'a> {
    sweep: &'a Sweep,
    source: &'a Arc<Source>,
    shard: &'a Shard,
    boundaries: Option<Arc<BlockBoundaries>>,
    recorded: Option<Arc<BlockBoundaries>>,
    tensors: Vec<HashedTensor>,
    sha256: bool,
    progress: ReadProgress<'a>,
}

/// Reads each byte of a shard once, and computes all hashes.
pub(super) fn read_shard(
    sweep: &Sweep,
    source: &Arc<Source>,
    shard: &Shard,
    stored: &[StoredPiece],
    known: Option<&Arc<ShardSums>>,
    sha256: bool,
    progress: ReadProgress<'_>,
) -> Result<ShardHashes> {
    let boundaries = stored::boundaries(shard, stored).map(Arc::new);
    let other = |known: &&Arc<ShardSums>| {
        boundaries.as_deref() != Some(&*known.boundaries)
            && known.boundaries.file_len() == shard.file_len
    };
    let recorded = known.filter(other).map(|known| known.boundaries.clone());
    let tensors = header_hashes(source)?;
    let sha256 = sha256 || blob_hash(source).is_some();
    let read = ShardRead { sweep, source, shard, boundaries, recorded, tensors, sha256, progress };
    let steps = read.steps();
    let (mut digests, mut as_recorded, mut whole) = (Vec::new(), None, None);
    let (mut header, mut hashed, mut differs) = (Hasher::new(), 0, None);
    let work = |number: u64| read.hash(&steps[number as usize]);
    sweep.in_order(steps.len() as u64, &work, &mut |step| {
        digests.extend(step.digests.unwrap_or_default());
        header.update(&step.described);
        hashed += step.hashed;
        differs = differs.take().or(step.differs);
        // Both are set only if there is one step, which has all bytes of the shard.
        (as_recorded, whole) = (step.as_recorded, step.sha256);
        Ok(())
    })?;
    let found = read.boundaries.map(|boundaries| ShardSums {
        name: shard.name.clone(),
        version: source.version().lasting(),
        recorded: now(),
        boundaries,
        digests,
    });
    let sums = found.filter(|sums| sums.digests.len() == sums.boundaries.chunks_len());
    Ok(ShardHashes { sums, as_recorded, header: header.finish(), sha256: whole, hashed, differs })
}

impl ShardRead<'_> {
    /// The steps in which the shard is read. There is only one step if a hash of all bytes is
    /// needed.
    fn steps(&self) -> Vec<HashStep> {
        let (bytes, tensors) = (0..self.shard.file_len, 0..self.tensors.len());
        match &self.boundaries {
            Some(boundaries) if !self.sha256 && self.recorded.is_none() => {
                steps(boundaries, &self.tensors)
            }
            Some(boundaries) => vec![HashStep { bytes, parts: 0..boundaries.len(), tensors }],
            None => vec![HashStep { bytes, parts: 0..0, tensors }],
        }
    }

    fn hash(&self, HashStep { bytes, parts, tensors }: &HashStep) -> Result<StepHashes> {
        let of_parts = |boundaries| ChunkHasher::of_parts(boundaries, parts.clone());
        let mut own = self.boundaries.clone().map(of_parts);
        let mut recorded = self.recorded.clone().map(ChunkHasher::new);
        let mut whole = self.sha256.then(Sha256::new);
        let mut described = Vec::new();
        let mut hashed = HeaderHashCheck::new(&self.tensors[tensors.clone()]);
        let begin = |offset: u64| {
            if offset >= bytes.end {
                return Ok(None);
            }
            let mut end = offset + READ_LEN.min(bytes.end - offset);
            if let Some(decryptor) = self.source.decryptor() {
                end = decryptor.good_end(&(offset..end));
            }
            self.sweep.begin(self.source, offset..end, true).map(Some)
        };
        let mut pending = begin(bytes.start)?;
        while let Some(read) = pending {
            let Range { start: offset, end } = read.range();
            let mut buffer = read.wait()?;
            // The next bytes are read while these bytes are hashed.
            pending = begin(end)?;
            let chunk = &mut *buffer;
            own.as_mut().into_iter().chain(&mut recorded).for_each(|hasher| hasher.update(chunk));
            let first = self.shard.described.partition_point(|range| range.end <= offset);
            let here = self.shard.described[first..].iter();
            for range in here.take_while(|range| range.start < end) {
                let within = |byte: u64| (byte.clamp(offset, end) - offset) as usize;
                described.extend_from_slice(&chunk[within(range.start)..within(range.end)]);
            }
            if let Some(hash) = &mut whole {
                hash.update(&*chunk);
            }
            // The hashes in headers cover the decrypted bytes. All other hashes cover the bytes in the file.
            self.source.decrypt(offset, chunk)?;
            hashed.update(chunk, offset);
            (self.progress)(chunk.len() as u64);
        }
        Ok(StepHashes {
            digests: own.and_then(ChunkHasher::finish),
            as_recorded: recorded.and_then(ChunkHasher::finish),
            described,
            sha256: whole.map(|hash| format!("{:x}", hash.finalize())),
            hashed: hashed.matched,
            differs: hashed.mismatch,
        })
    }
}

/// Cuts a shard into steps of at least `STEP_LEN` bytes. No part of `boundaries` and no tensor of
/// `tensors` is cut. `tensors` are in the order of their bytes.
fn steps(boundaries: &BlockBoundaries, tensors: &[HashedTensor]) -> Vec<HashStep> {
    let mut steps: Vec<HashStep> = Vec::new();
    let (mut start, mut first_part, mut first_tensor, mut tensor) = (0, 0, 0, 0);
    for part in 0..boundaries.len() {
        let end = boundaries.part(part).end;
        tensor += tensors[tensor..].iter().take_while(|tensor| tensor.range.end <= end).count();
        let is_cut = tensors.get(tensor).is_some_and(|tensor| tensor.range.start < end);
        let is_long = end - start >= STEP_LEN && !is_cut;
        if is_long || part + 1 == boundaries.len() {
            let (parts, tensors) = (first_part..part + 1, first_tensor..tensor);
            steps.push(HashStep { bytes: start..end, parts, tensors });
            (start, first_part, first_tensor) = (end, part + 1, tensor);
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::tensorizer::KeptHashes;

    proptest! {
        #[test]
        fn steps_have_each_part_and_each_tensor_once_and_cut_none(
            lens in prop::collection::vec((1u64..9, any::<bool>()), 0..60),
            joined in prop::collection::vec(any::<bool>(), 0..60),
        ) {
            let unit = STEP_LEN / 3;
            let boundaries = BlockBoundaries::new(lens.iter().map(|(len, _)| len * unit)).unwrap();
            // A tensor has one or two parts, and may begin or end inside of a part.
            let mut tensors = Vec::new();
            let mut part = 0;
            for (_, is_hashed) in &lens {
                let last = part + usize::from(joined.get(part).copied().unwrap_or_default());
                if last >= boundaries.len() {
                    break;
                }
                if *is_hashed {
                    let range = boundaries.part(part).start + 7..boundaries.part(last).end;
                    let (name, hashes) = (String::new(), KeptHashes::default());
                    let left_out = 0..0;
                    tensors.push(HashedTensor { name, range, left_out, hashes, is_entry: false });
                }
                part = last + 1;
            }
            let steps = steps(&boundaries, &tensors);
            let (mut end, mut parts, mut hashed) = (0, 0, 0);
            for step in &steps {
                prop_assert_eq!((step.bytes.start, step.parts.start, step.tensors.start), (end, parts, hashed));
                (end, parts, hashed) = (step.bytes.end, step.parts.end, step.tensors.end);
                prop_assert_eq!(boundaries.part(step.parts.end - 1).end, end);
                for tensor in &tensors[step.tensors.clone()] {
                    prop_assert!(step.bytes.start <= tensor.range.start && tensor.range.end <= end);
                }
            }
            prop_assert_eq!((end, parts, hashed), (boundaries.file_len(), boundaries.len(), tensors.len()));
            let short = steps.iter().rev().skip(1).find(|step| step.bytes.end - step.bytes.start < STEP_LEN);
            prop_assert_eq!(short, None);
        }
    }
}
