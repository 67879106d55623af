//! The description of one shard, whatever its format: which tensors it holds and where.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use crate::dtype::Dtype;
use crate::format::deepspeed::ZeroPart;
use crate::format::safetensors::Header;
use crate::format::tensorizer::decryptor::EncryptedTensor;

/// The place of a piece in its tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PiecePlace {
    /// Name of the tensor, if the file has it. Otherwise the entry has the name of the tensor.
    pub logical_name: Option<String>,
    /// First index of the piece in each dimension of the tensor, in elements.
    pub offset: Vec<u64>,
    /// Extent of the whole tensor in each dimension, in elements, if the file has it.
    pub whole_shape: Option<Vec<u64>>,
}

/// The rank that has saved a file, by the content of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRank {
    /// Its number.
    pub rank: u64,
    /// Number of the ranks among which a tensor is split. The number of all ranks is a multiple of it.
    pub ranks: u64,
}

/// The tensors of one valid shard, in the order of the file, in a few large vectors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardDescription {
    /// The free-form strings, if the file has any.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The bytes of the file that describe the others, ascending. All others are data.
    pub described: Vec<Range<u64>>,
    /// The tensors whose data is encrypted, in data order; `None` if the file is not encrypted.
    pub encrypted: Option<Vec<EncryptedTensor>>,
    /// First byte of another shard that follows in the same file, and is not described.
    pub next_file: Option<u64>,
    /// A note on the values of the file that are not shown.
    pub left_out: Option<String>,
    /// The places of its tensors, in their order, if the format tells that they are pieces.
    pub places: Option<Vec<PiecePlace>>,
    /// The strides, in elements, of tensors whose elements do not follow each other: numbers of tensors,
    /// ascending, with theirs.
    pub strided: Vec<(u32, Vec<u64>)>,
    /// The rank that has saved it, if it is the file of one.
    pub rank: Option<FileRank>,
    /// The CRCs of its tensors, in their order, if it is the file of a rank: 0 where it has none of the
    /// very bytes of the tensor.
    pub crcs: Vec<u32>,
    /// Its facts about ranges of tensors, if it is a file of DeepSpeed.
    pub zero: Option<Arc<ZeroPart>>,
    names: String,
    tensors: Vec<DescriptionRow>,
    /// The extents of all tensors; equal shapes may share theirs.
    numbers: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DescriptionRow {
    name_end: u32,
    /// First and last index of its shape in `numbers`.
    shape: (u32, u32),
    dtype: Dtype,
    start: u64,
}

/// A tensor, or a piece of one, as a shard describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorDescription<'a> {
    /// Name.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Extent of each dimension, outermost first.
    pub shape: &'a [u64],
    /// First byte in the file, or of the zeros behind it (`zeros`).
    pub start: u64,
}

impl ShardDescription {
    /// A description that takes the bytes up to `data_start`, with room for tensors.
    pub(super) fn with_room(data_start: u64, tensors: usize, names_len: usize) -> Self {
        ShardDescription {
            metadata: None,
            described: std::iter::once(0..data_start).collect(),
            encrypted: None,
            next_file: None,
            left_out: None,
            places: None,
            strided: Vec::new(),
            rank: None,
            crcs: Vec::new(),
            zero: None,
            names: String::with_capacity(names_len),
            tensors: Vec::with_capacity(tensors),
            numbers: Vec::new(),
        }
    }

    /// Adds a tensor. `shape` are indexes into the numbers.
    pub(super) fn push(&mut self, name: &str, dtype: Dtype, shape: (u32, u32), start: u64) {
        self.names.push_str(name);
        self.tensors.push(DescriptionRow {
            name_end: self.names.len() as u32,
            shape,
            dtype,
            start,
        });
    }

    /// Gives the tensor that was added last these strides.
    pub(super) fn set_strides(&mut self, strides: Vec<u64>) {
        if let Some(last) = self.tensors.len().checked_sub(1) {
            self.strided.push((last as u32, strides));
        }
    }

    pub(super) fn set_numbers(&mut self, numbers: Vec<u64>) {
        self.numbers = numbers;
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether it has no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Its tensors, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = TensorDescription<'_>> {
        let mut begin = 0;
        self.tensors.iter().map(move |&DescriptionRow { name_end, shape, dtype, start }| {
            let name = &self.names[begin..name_end as usize];
            begin = name_end as usize;
            let shape = &self.numbers[shape.0 as usize..shape.1 as usize];
            TensorDescription { name, dtype, shape, start }
        })
    }
}

impl From<Header> for ShardDescription {
    fn from(header: Header) -> ShardDescription {
        let data_start = header.data_start();
        let names_len = header.tensors.iter().map(|entry| entry.name.len()).sum();
        let mut description =
            ShardDescription::with_room(data_start, header.tensors.len(), names_len);
        let mut numbers = Vec::new();
        let mut known: HashMap<&[u64], (u32, u32)> = HashMap::new();
        for entry in &header.tensors {
            let shape = *known.entry(&entry.shape).or_insert_with(|| {
                let begin = numbers.len() as u32;
                numbers.extend_from_slice(&entry.shape);
                (begin, numbers.len() as u32)
            });
            description.push(
                &entry.name,
                entry.dtype,
                shape,
                data_start + entry.data_offsets.start,
            );
        }
        description.numbers = numbers;
        description.metadata = header.metadata;
        description
    }
}
