//! Hashes of the bytes of tensors. They come from records, or from reads of the tensors.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::catalog::Tensor;
use crate::checkpoint::{Checkpoint, VirtualFile};
use crate::error::Result;
use crate::format::OutputFormat;
use crate::hash::Digest;
use crate::index::CHUNK_LEN;
use crate::reader::Reader;
use crate::sweep::{RANGE_MAX, Sweep};
use crate::verify::Recorded;
use crate::view::FileSpec;

/// Maximum number of bytes that a thread reads at a time.
const STEP_LEN: u64 = RANGE_MAX;

/// The hash of each chunk of `CHUNK_LEN` bytes of a tensor.
pub type TensorDigests = Vec<Digest>;

/// Access to the hashes of the tensors of a checkpoint.
pub struct Contents {
    checkpoint: Arc<Checkpoint>,
    /// Recorded checksums of all shards in their present versions. `None` if there are none, or if a shard is
    /// encrypted.
    recorded: Option<Recorded>,
}

/// Consecutive bytes of the merged file that are read together.
struct ReadStep {
    range: Range<u64>,
    /// Parts of tensors: the position in the list of requested tensors, and the range in the file.
    parts: Vec<(usize, Range<u64>)>,
}

impl Contents {
    /// The hashes for `checkpoint`, with recorded checksums from the folder `store`. Checksums of encrypted
    /// shards are not used: they belong to the stored bytes, which differ with each encryption.
    pub fn new(checkpoint: &Arc<Checkpoint>, store: Option<&Path>) -> Contents {
        let recorded = Recorded::load(store, &checkpoint.directory);
        let is_plain = !checkpoint.sources().iter().any(|source| source.is_encrypted());
        let admitted = is_plain && recorded.admit(checkpoint).is_ok();
        Contents { checkpoint: checkpoint.clone(), recorded: admitted.then_some(recorded) }
    }

    /// Whether checksums of the tensors of all shards are recorded.
    pub fn is_recorded(&self) -> bool {
        self.recorded.is_some()
    }

    /// The recorded hashes of a tensor. `None` if no hashes are recorded, for example for zeros that no shard
    /// contains. Also `None` if the tensor has several pieces or is cast, because the hashes of the pieces are
    /// then not the hashes of the tensor.
    pub fn recorded(&self, tensor: &Tensor<'_>) -> Option<TensorDigests> {
        if tensor.len == 0 {
            return Some(Vec::new());
        }
        if tensor.cast().is_some() {
            return None;
        }
        let mut pieces = tensor.pieces().filter(|piece| !piece.is_empty());
        let (piece, None) = (pieces.next()?, pieces.next()) else { return None };
        if piece.is_zeros() {
            return None;
        }
        let shard = &self.checkpoint.catalog().shard(piece.shard).name;
        let sums = self.recorded.as_ref()?.of(shard)?;
        let parts = sums.boundaries.parts_of(&piece.range);
        let whole = parts.len() == 1 && sums.boundaries.part(parts.start) == piece.range;
        (whole && piece.is_contiguous()).then(|| sums.digests_of(piece.range).collect())
    }

    /// Reads and hashes the tensors at `positions` of the catalog. `progress` is called with numbers of bytes.
    /// An error of `progress` ends the work.
    ///
    /// # Errors
    /// Errors of the sources and of `progress`.
    pub fn read(
        &self,
        sweep: &Sweep,
        positions: &[usize],
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Vec<TensorDigests>> {
        let mut digests = vec![TensorDigests::new(); positions.len()];
        let spec = FileSpec::single(&self.checkpoint.name, OutputFormat::Safetensors);
        let file = VirtualFile::new(&self.checkpoint, spec);
        let (reader, layout) = (Reader::open(&file)?, file.layout()?);
        let mut offsets = vec![0; self.checkpoint.catalog().len()];
        layout.tensors().for_each(|(position, offset)| offsets[position] = offset);
        let range_of = |position: usize| {
            let start = offsets[position];
            start..start + self.checkpoint.catalog().tensor_at(position).len
        };
        let steps = steps(positions.iter().map(|&position| range_of(position)));
        let read = |number| {
            let step: &ReadStep = &steps[number as usize];
            let bytes = sweep.read(&reader, &step.range)?;
            let part = |(index, range): &(usize, Range<u64>)| {
                let within = |byte: u64| (byte - step.range.start) as usize;
                let bytes = &bytes[within(range.start)..within(range.end)];
                (*index, bytes.chunks(CHUNK_LEN as usize).map(Digest::of).collect::<Vec<_>>())
            };
            let found: Vec<_> = step.parts.iter().map(part).collect();
            Ok((step.range.end - step.range.start, found))
        };
        sweep.in_order(steps.len() as u64, &read, &mut |(len, found)| {
            found.into_iter().for_each(|(index, part)| digests[index].extend(part));
            progress(len)
        })?;
        for source in reader.sources() {
            source.check()?;
        }
        Ok(digests)
    }
}

/// Reads the tensor at `position` of the catalog of `checkpoint`, and passes its bytes to `pass` in order. The
/// memory is bounded. An error of `pass` ends the work.
///
/// # Errors
/// Errors of the sources and of `pass`. It is also an error if a shard changes during the read. This error is
/// returned after all bytes were passed.
pub fn read_tensor(
    checkpoint: &Arc<Checkpoint>,
    sweep: &Sweep,
    position: usize,
    pass: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let spec = FileSpec {
        tensors: Some(Arc::new([position as u32])),
        ..FileSpec::single(&checkpoint.name, OutputFormat::Safetensors)
    };
    let file = VirtualFile::new(checkpoint, spec);
    let (reader, layout) = (Reader::open(&file)?, file.layout()?);
    let start = layout.tensors().next().map_or(0, |(_, offset)| offset);
    let range = start..start + checkpoint.catalog().tensor_at(position).len;
    let steps = steps(std::iter::once(range));
    let read = |number| sweep.read(&reader, &steps[number as usize].range);
    sweep.in_order(steps.len() as u64, &read, &mut |bytes| pass(&bytes))?;
    reader.sources().iter().try_for_each(|source| source.check())
}

/// The reads for tensors at these `ranges` of a file. Adjacent tensors are read together. Long tensors are read in
/// parts, whose lengths are multiples of `CHUNK_LEN`.
fn steps(ranges: impl Iterator<Item = Range<u64>>) -> Vec<ReadStep> {
    let mut ordered: Vec<(usize, Range<u64>)> = ranges.enumerate().collect();
    ordered.retain(|(_, range)| !range.is_empty());
    ordered.sort_by_key(|(_, range)| range.start);
    let mut steps: Vec<ReadStep> = Vec::new();
    for (index, range) in ordered {
        let mut start = range.start;
        while start < range.end {
            let part = start..range.end.min(start + STEP_LEN);
            start = part.end;
            match steps.last_mut() {
                Some(last)
                    if last.range.end == part.start && part.end - last.range.start <= STEP_LEN =>
                {
                    last.range.end = part.end;
                    last.parts.push((index, part));
                }
                _ => steps.push(ReadStep { range: part.clone(), parts: vec![(index, part)] }),
            }
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_read_together_and_long_tensors_in_parts_of_whole_chunks() {
        let long = 3 * STEP_LEN + 5;
        let ranges = [100..300, 10..100, 300..300, 400..400 + long, 400 + long..410 + long];
        let found = steps(ranges.iter().cloned());
        let read: Vec<Range<u64>> = found.iter().map(|step| step.range.clone()).collect();
        assert_eq!(read[0], 10..300);
        assert_eq!(read[1], 400..400 + STEP_LEN);
        assert_eq!(*read.last().unwrap(), 400 + 3 * STEP_LEN..410 + long);
        let mut lens = [0; 5];
        for (index, part) in found.iter().flat_map(|step| &step.parts) {
            assert_eq!(part.start, ranges[*index].start + lens[*index]);
            assert_eq!(lens[*index] % CHUNK_LEN, 0);
            lens[*index] += part.end - part.start;
        }
        assert!(lens.iter().zip(&ranges).all(|(len, range)| *len == range.end - range.start));
    }
}
