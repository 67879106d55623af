//! Files of `torch.save`: a zip archive whose pickle names the tensors, and whose other entries hold the data of the
//! tensors.
//!
//! `zip` reads the archive, and `archives` finds several archives in one file. `machine` interprets the pickle as
//! values and runs nothing. `globals` says what names in a pickle mean. `tensors` finds the bytes of a tensor, and
//! `state_dict` names the tensors of a model. `scan` lists the names that a pickle uses. `zero` finds the ranges of
//! elements that the ranks of DeepSpeed saved. `parts` finds the place of each part of a tensor, if each rank saved one
//! part. `legacy` reads the files of torch before 1.6, which are no archives. Distributed checkpoints consist of the
//! same parts: `distcp` reads their `.metadata`, `chosen` names the tensors of a model in it, and `items` reads the
//! `.distcp` files.

mod archives;
mod chosen;
mod distcp;
mod globals;
mod items;
mod legacy;
mod machine;
mod parts;
mod scan;
mod state_dict;
mod tensors;
mod values;
mod zero;
mod zip;

use std::io;
use std::ops::Range;
use std::sync::Arc;

pub use self::globals::NameRisk;
pub use self::scan::{PickleForm, PickleScan, scan};

use crate::error::{ErrorKind, Fault};

use self::machine::PICKLE_LEN_MAX;
use self::state_dict::{ModelTensor, ModelTensors, is_state};
use self::tensors::{StorageData, Storages, TensorPlace, tensor_call};
use self::values::Values;
use self::zip::{Archive, LOCAL_MAGIC};
use super::deepspeed::{UniversalTensor, ZeroModel, ZeroPart};
use super::description::{PiecePlace, ShardDescription};
use super::range_reader::{RangeReader, ReadResult, ReadStop, told};
use super::tensorizer::HashedTensor;

pub use self::distcp::{ChunkedTensor, DistcpMetadata, METADATA_LEN_MAX, StoredChunk};
pub use self::items::parse_items;

words! {
    /// Which tensors of torch pickles are shown. It applies to files of `torch.save` and to distributed checkpoints.
    ///
    /// ```
    /// use tensorfs::{Checkpoint, OpenOptions, TrainingState};
    ///
    /// let file = "tests/fixtures/torch/ckpt_lightning.ckpt".as_ref();
    /// let options = OpenOptions { state: TrainingState::All, ..OpenOptions::default() };
    /// let all = Checkpoint::open_with(file, &options)?;
    /// assert!(all.catalog().len() > Checkpoint::open(file)?.catalog().len());
    /// # Ok::<(), tensorfs::Error>(())
    /// ```
    #[derive(Default)]
    pub enum TrainingState {
        /// The tensors of the model, without the state of the training.
        #[default]
        None = "none",
        /// All tensors, including the state of optimizers, schedulers and random number generators, under their full
        /// names.
        All = "all",
    }
}

/// Name of the entry of an archive that is the pickle.
const PICKLE: &str = "data.pkl";

/// Name of the entry with the byte order, and name of an entry that every archive of TorchScript has.
const BYTE_ORDER: &str = "byteorder";
const TORCHSCRIPT: &str = "constants.pkl";

/// Key of the tensor in a file of a universal checkpoint.
const PARAM: &str = "param";

/// Maximum memory in bytes that the values of a pickle take per byte of the pickle. It is used for
/// the bound on headers in memory.
const MEMORY_OF_BYTE: u64 = 4;

/// Maximum number of bytes of a file that describe its tensors, which are all bytes except the data of its storages.
/// The maximum grows by `DESCRIBED_OF_ITEM` for each item of a `.distcp` file. All these bytes are read when the file
/// is opened. The pickle and the directory have lower limits of their own.
const DESCRIBED_LEN_MAX: u64 = 1 << 30;
const DESCRIBED_OF_ITEM: u64 = 64 << 10;

fn wrong(message: impl Into<String>) -> Fault {
    ErrorKind::HeaderDecode.fault(message)
}

/// A little-endian number of up to 8 bytes.
fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Whether a file that begins with `first` is a zip archive.
fn is_zip(first: &[u8]) -> bool {
    first.starts_with(LOCAL_MAGIC)
}

/// Whether a file that begins with `first` is a zip archive whose first entry is the pickle of
/// `torch.save`.
fn is_torch_zip(first: &[u8]) -> bool {
    let name = || {
        let len = le(first.get(26..28)?) as usize;
        first.get(30..30 + len)
    };
    is_zip(first) && name().is_some_and(|name| name.ends_with(b"/data.pkl"))
}

/// Whether the first bytes `first` prove that a file is one of `torch.save`.
pub fn is_torch(first: &[u8]) -> bool {
    legacy::is_legacy(first) || is_torch_zip(first)
}

/// Number of first bytes that `may_be_torch` needs.
pub const FIRST_LEN: usize = legacy::FIRST_PICKLE_LEN_MAX;

/// Whether a file that begins with `first` may be one of `torch.save`: a zip archive, or the form before torch 1.6.
pub fn may_be_torch(first: &[u8]) -> bool {
    legacy::is_legacy(first) || is_zip(first)
}

/// Whether the file begins in the form before torch 1.6.
fn reads_legacy(reader: &mut dyn RangeReader) -> io::Result<bool> {
    let mut first = [0; FIRST_LEN];
    let len = reader.file_len().min(first.len() as u64) as usize;
    reader.read_exact_at(0, &mut first[..len])?;
    Ok(legacy::is_legacy(&first))
}

/// Maximum memory in bytes that the description of the file may take.
///
/// # Errors
/// The outer error is a failed read, the inner error is the fault of the file.
pub fn description_len(reader: &mut dyn RangeReader) -> io::Result<Result<u64, Fault>> {
    if reads_legacy(reader)? {
        let pickles = told(legacy::read_pickles(reader))?;
        return Ok(pickles.map(|bytes| bytes.len() as u64 * MEMORY_OF_BYTE));
    }
    let whole = reader.start()..reader.file_len();
    told(
        open(reader, whole)
            .map(|(archive, len)| len * MEMORY_OF_BYTE + (reader.file_len() - archive.directory)),
    )
}

/// Parses a whole file that is already in memory.
///
/// # Errors
/// The fault of the file.
pub fn parse_file(bytes: &[u8]) -> Result<ShardDescription, Fault> {
    // If the parser reads past the end of the bytes, that is an error of the parser and not of the
    // file.
    parse(&mut &*bytes, TrainingState::default())
        .unwrap_or_else(|e| Err(ErrorKind::Io.fault(e.to_string())))
}

/// Parses a file: its directory, its pickle, and the header in front of the data of each storage.
///
/// # Errors
/// The outer error is a failed read, the inner error is the fault of the file.
pub fn parse(
    reader: &mut dyn RangeReader,
    state: TrainingState,
) -> io::Result<Result<ShardDescription, Fault>> {
    if reads_legacy(reader)? {
        return told(legacy::parse(reader, state));
    }
    let whole = reader.start()..reader.file_len();
    told(parse_range(reader, whole, |values, data, range| describe(values, data, range, state)))
}

/// Parses a file of a universal checkpoint of DeepSpeed that has one tensor. The pickle is the tensor, or a dict with
/// the tensor and notes of DeepSpeed about it.
///
/// # Errors
/// The outer error is a failed read, the inner error is the fault of the file.
pub fn parse_universal(
    reader: &mut dyn RangeReader,
) -> io::Result<Result<ShardDescription, Fault>> {
    let whole = reader.start()..reader.file_len();
    told(parse_range(reader, whole, describe_universal))
}

/// The entries with a CRC in the archives of a file, in the order of their bytes. Empty for files that are no
/// archives.
///
/// # Errors
/// The outer error is a failed read, the inner error is the fault of the file.
pub fn entry_hashes(reader: &mut dyn RangeReader) -> io::Result<Result<Vec<HashedTensor>, Fault>> {
    let mut first = [0; FIRST_LEN];
    let len = reader.file_len().min(FIRST_LEN as u64) as usize;
    reader.read_exact_at(0, &mut first[..len])?;
    if !is_zip(&first) {
        return Ok(Ok(Vec::new()));
    }
    told(archives::hashed_entries(reader))
}

/// The archive in the bytes `range` of a file, and the length of its pickle in bytes.
fn open(reader: &mut dyn RangeReader, range: Range<u64>) -> ReadResult<(Archive, u64)> {
    let archive = Archive::read(reader, range)?;
    if archive.has(TORCHSCRIPT) {
        return Err(ErrorKind::HeaderDecode.stop(
            "is an archive of TorchScript, which holds a program; save the state_dict of the model \
             with torch.save",
        ));
    }
    let Some(len) = archive.len_of(PICKLE) else {
        let message = format!("is a zip archive without {PICKLE}, as torch.save writes it");
        return Err(ErrorKind::HeaderDecode.stop(message));
    };
    if len > PICKLE_LEN_MAX {
        let message = format!("its pickle has {len} bytes, tensorfs reads up to {PICKLE_LEN_MAX}");
        return Err(ErrorKind::HeaderTooLarge.stop(message));
    }
    Ok((archive, len))
}

fn parse_range(
    reader: &mut dyn RangeReader,
    range: Range<u64>,
    describe: impl FnOnce(&Values<'_>, StorageData<'_, '_>, &Range<u64>) -> ReadResult<ShardDescription>,
) -> ReadResult<ShardDescription> {
    let (archive, len) = open(reader, range.clone())?;
    check_byte_order(reader, &archive)?;
    let place = archive.data(reader, PICKLE)?.unwrap_or(0..0);
    let mut pickle = vec![0; len as usize];
    reader.read_exact_at(place.start, &mut pickle)?;
    let values = machine::run(&pickle)?;
    describe(&values, StorageData::Entries { reader, archive: &archive }, &range)
}

/// The description of the one tensor that the pickle holds.
fn describe_universal(
    values: &Values<'_>,
    data: StorageData<'_, '_>,
    range: &Range<u64>,
) -> ReadResult<ShardDescription> {
    let mut storages = Storages::new(values, data);
    let (place, is_flat) = match tensor_call(values, values.root) {
        Some(call) => (call.place(&mut storages)?, true),
        None => {
            let all = TrainingState::All;
            let named = ModelTensors::of(&mut storages, None, all)?.tensors;
            let [tensor] = <[ModelTensor; 1]>::try_from(named).map_err(|_| not_one_param())?;
            if tensor.name != PARAM || tensor.part_of.is_some() {
                return Err(not_one_param().into());
            }
            (tensor.place, false)
        }
    };
    let is_vocabulary = !is_flat && zero::is_vocabulary(values)?;
    let TensorPlace { dtype, shape, start, strides, .. } = place;
    let mut description = description_of(0, 1, PARAM.len());
    description.add(PARAM, dtype.into(), &shape, start);
    description.set_strides(strides);
    description.described = described(range, storages.undescribed());
    check_described(&description.described, 0)?;
    description.zero =
        Some(Arc::new(ZeroPart::Universal(UniversalTensor { is_flat, is_vocabulary })));
    Ok(description)
}

fn not_one_param() -> Fault {
    let message =
        format!("is no file of a universal checkpoint: it does not hold one tensor, `{PARAM}`");
    ErrorKind::HeaderDecode.fault(message)
}

/// The description of the tensors of the model in the pickle. `range` has the bytes of the
/// description and of the data.
fn describe(
    values: &Values<'_>,
    data: StorageData<'_, '_>,
    range: &Range<u64>,
    state: TrainingState,
) -> ReadResult<ShardDescription> {
    let mut storages = Storages::new(values, data);
    if let Some(partition) = zero::partition_of(&mut storages)? {
        let mut description = ShardDescription::with_room(0, 0, 0);
        description.described = described(range, storages.undescribed());
        check_described(&description.described, 0)?;
        description.zero = Some(Arc::new(ZeroPart::Partition(partition)));
        return Ok(description);
    }
    let zero = zero::model_of(&mut storages)?;
    let mut named = ModelTensors::of(&mut storages, zero.as_ref(), state)?;
    let placeholders = std::mem::take(&mut named.placeholders);
    let crcs = match named.rank {
        Some(_) => {
            let crc = |tensor: &ModelTensor| match is_state(&tensor.name) {
                // Each rank has its own state of random numbers, so the CRCs of these tensors must not be compared.
                true => 0,
                false => storages.crc_of(&tensor.place),
            };
            named.tensors.iter().map(crc).collect()
        }
        None => Vec::new(),
    };
    let undescribed = storages.undescribed();
    let names_len = named.tensors.iter().map(|tensor| tensor.name.len()).sum();
    let mut description = description_of(0, named.tensors.len(), names_len);
    for ModelTensor { name, place, .. } in &mut named.tensors {
        description.add(name, place.dtype.into(), &place.shape, place.start);
        description.set_strides(place.strides.take());
    }
    description.described = described(range, undescribed);
    check_described(&description.described, 0)?;
    description.left_out = named.left_out;
    description.rank = named.rank;
    description.crcs = crcs;
    description.zero =
        zero.map(|zero| Arc::new(ZeroPart::Model(ZeroModel { placeholders, ..zero })));
    if named.rank.is_some() {
        description.places = Some(named.tensors.into_iter().map(place_of).collect());
    }
    Ok(description)
}

/// The description of a file of torch, without tensors.
fn description_of(data_start: u64, tensors: usize, names_len: usize) -> ShardDescription {
    let mut description = ShardDescription::with_room(data_start, tensors, names_len);
    // Programs look for the name of the framework in the metadata of a safetensors file.
    let format = ("format".to_owned(), "pt".to_owned());
    description.metadata = Some([format].into());
    description
}

/// The place of a tensor in a file that has parts of tensors. The tensor may be a part or a whole tensor.
fn place_of(tensor: ModelTensor) -> PiecePlace {
    let shape = tensor.place.shape;
    let [offset, whole] = tensor.part_of.unwrap_or_else(|| [vec![0; shape.len()], shape]);
    PiecePlace { logical_name: None, offset, whole_shape: Some(whole) }
}

/// The bytes of `range` without those of `others`, which do not overlap. The last range may be
/// empty.
fn described(range: &Range<u64>, mut others: Vec<Range<u64>>) -> Vec<Range<u64>> {
    others.retain(|range| !range.is_empty());
    others.sort_unstable_by_key(|range| range.start);
    let mut at = range.start;
    let mut described = Vec::with_capacity(others.len() + 1);
    for range in others {
        if range.start > at {
            described.push(at..range.start);
        }
        at = range.end;
    }
    described.push(at..range.end);
    described
}

/// Refuses a file of which too many bytes would be read when it is opened. `items` is the number of its items, if it
/// is a file of a distributed checkpoint.
fn check_described(described: &[Range<u64>], items: u64) -> Result<(), Fault> {
    let len: u64 = described.iter().map(|range| range.end - range.start).sum();
    let most = DESCRIBED_LEN_MAX + items * DESCRIBED_OF_ITEM;
    if len <= most {
        return Ok(());
    }
    Err(ErrorKind::HeaderTooLarge.fault(format!(
        "has {len} bytes that are not the data of tensors, tensorfs reads up to {most}; save it again \
         with the tools of torch"
    )))
}

fn check_byte_order(reader: &mut dyn RangeReader, archive: &Archive) -> ReadResult<()> {
    // The entry is absent before torch 2.1.
    let Some(place) = archive.data(reader, BYTE_ORDER)? else { return Ok(()) };
    let mut order = vec![0; (place.end - place.start).min(16) as usize];
    reader.read_exact_at(place.start, &mut order)?;
    if order == b"little" {
        return Ok(());
    }
    Err(ErrorKind::HeaderDecode.stop(if order == b"big" {
        "was saved by a big-endian machine; load it with torch and save it again on another one"
    } else {
        "does not say whether its bytes are little-endian; save it again"
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests;
