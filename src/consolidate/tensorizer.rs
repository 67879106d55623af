//! Writes tensors of a checkpoint as a tensorizer file.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use super::copy::{Copier, NewPlace, Watch};
use super::target::{UnalignedTarget, read_back};
use super::tensor_writer::{THREADS, TensorBytes, TensorWriter, WriteKey, WrittenRange};
use crate::checkpoint::{Checkpoint, VirtualFile};
use crate::error::{Error, Result};
use crate::format::tensorizer::encode::{self, NewTensor};
use crate::format::{OutputFormat, names};
use crate::hash::Hasher;
use crate::parallel::{JobProgress, in_any_order};
use crate::reader::Reader;
use crate::source::Source;
use crate::sweep::Sweep;
use crate::view::FileSpec;

/// Number of bytes that are read back at a time.
const STEP_LEN: u64 = 4 << 20;

/// Tensors of a checkpoint that are written as a tensorizer file, in the order of their bytes in the source.
#[derive(Clone, Debug)]
pub struct TensorizerFile {
    /// The same tensors as a safetensors file, from which the bytes are copied.
    file: VirtualFile,
    tensors: Arc<[NewTensor]>,
    /// Offset of the data of each tensor in `file`.
    offsets: Arc<[u64]>,
    entries_len: u64,
    key: Option<WriteKey>,
    len: u64,
}

impl TensorizerFile {
    /// The file of the tensors that `spec` names. It is encrypted with `key`, if there is one.
    ///
    /// # Errors
    /// `Error::Refused` if the format cannot store a tensor, or all of them together.
    pub fn new(
        checkpoint: &Arc<Checkpoint>,
        spec: &FileSpec,
        key: Option<&WriteKey>,
    ) -> Result<TensorizerFile> {
        let refused = |fault| checkpoint.refused(fault);
        let single = FileSpec::single(&spec.name, OutputFormat::Safetensors);
        let spec = FileSpec { tensors: spec.tensors.clone(), ..single };
        let file = VirtualFile::new(checkpoint, spec);
        let catalog = checkpoint.catalog();
        let mut places: Vec<(usize, u64)> = file.layout()?.tensors().collect();
        places.sort_by_key(|&(position, _)| {
            let tensor = catalog.tensor_at(position);
            let first = tensor.first_piece();
            // An empty tensor has the same start as another tensor, so the lengths are compared too.
            (first.shard, first.range.start, tensor.len, position)
        });
        let tensor = |&(position, _): &(usize, u64)| {
            let tensor = catalog.tensor_at(position);
            let new = NewTensor::of_state_dict(tensor.name, tensor.dtype, tensor.shape);
            let is_meta = tensor.len > 0 && tensor.is_stored_zeros() && tensor.cast().is_none();
            new.map(|new| if is_meta { new.without_zeros() } else { new }).map_err(refused)
        };
        let tensors = places.iter().map(tensor).collect::<Result<Arc<[NewTensor]>>>()?;
        if tensors.is_empty() {
            return Err(Error::usage("a tensorizer file has at least one tensor, none is left"));
        }
        let entries_len = encode::entries_len(&tensors).map_err(refused)?;
        let offsets = places.iter().map(|&(_, offset)| offset).collect();
        let key = key.cloned();
        let mut made = TensorizerFile { file, tensors, offsets, entries_len, key, len: 0 };
        let mut writer = made.writer();
        writer.describe(&made.tensors, &checkpoint.path())?;
        made.len = writer.end();
        Ok(made)
    }

    fn writer(&self) -> TensorWriter {
        let writer = TensorWriter::new(0, self.entries_len);
        match &self.key {
            Some(key) => writer.encrypted(key),
            None => writer,
        }
    }

    /// The name of the file.
    pub fn name(&self) -> String {
        let name = &self.file.spec().name;
        let stem = name.strip_suffix(OutputFormat::Safetensors.suffix()).unwrap_or(name);
        format!("{stem}{}", names::TENSORIZER_SUFFIX)
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no bytes. It always has a head, so this is false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of tensors.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The sources of the bytes.
    pub fn sources(&self) -> &[Arc<Source>] {
        self.file.sources()
    }
}

/// The tensors of `reader`, as the source of bytes for a `TensorWriter`.
struct ReaderTensors<'a> {
    sweep: &'a Sweep,
    reader: Reader,
    offsets: &'a [u64],
}

impl TensorBytes for ReaderTensors<'_> {
    fn read(&self, index: usize, offset: u64, target: &mut [u8]) -> Result<()> {
        // Tensors without data are not read.
        if target.is_empty() {
            return Ok(());
        }
        self.sweep.fill(&self.reader, self.offsets[index] + offset, target)
    }
}

impl Copier {
    /// Writes `file` to the new file at `place`, and waits until the disk has it. If `verify` is true, reads it
    /// back and compares it.
    ///
    /// # Errors
    /// Errors of the sources, of the file system and of `watch`. An I/O error if other bytes are read back.
    pub(super) fn copy_tensors(
        &self,
        file: &TensorizerFile,
        place: NewPlace<'_>,
        verify: bool,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let NewPlace { file: target, folder, shown } = place;
        let failed = |e| Error::io(shown, "write", e);
        let mut unaligned = UnalignedTarget::cached(target).map_err(failed)?;
        unaligned.reserve(folder, file.len).map_err(failed)?;
        let mut writer = file.writer().keeping_digests(verify);
        let headers = writer.describe(&file.tensors, shown)?;
        let reader = Reader::open(&file.file)?;
        let bytes = ReaderTensors { sweep: &self.sweep, reader, offsets: &file.offsets };
        writer.write(&headers, &bytes, &unaligned, shown, watch.progress)?;
        writer.finish(&unaligned, shown)?;
        let described = headers.first().map_or(0, |first| first.start);
        (watch.progress)(described)?;
        target.sync_all().map_err(failed)?;
        if !verify {
            return Ok(());
        }
        read_back(target);
        let compare = |number: usize, progress: &JobProgress<'_>| {
            compare(&writer.written[number], target, shown, progress)
        };
        in_any_order(writer.written.len(), THREADS, &compare, watch.progress).map(drop)
    }
}

/// Reads a range back and compares it with the bytes that were written.
fn compare(
    written: &WrittenRange,
    target: &File,
    shown: &Path,
    progress: &JobProgress<'_>,
) -> Result<()> {
    let range = &written.range;
    let mut hasher = Hasher::new();
    let mut buffer = Vec::new();
    let mut offset = range.start;
    while offset < range.end {
        buffer.resize((range.end - offset).min(STEP_LEN) as usize, 0);
        let read = std::os::unix::fs::FileExt::read_exact_at(target, &mut buffer, offset);
        read.map_err(|e| Error::io(shown, "read", e))?;
        hasher.update(&buffer);
        offset += buffer.len() as u64;
        progress.add(buffer.len() as u64)?;
    }
    written.compare(&hasher.finish(), shown)
}
