//! The description of one shard in any format: which tensors the shard holds, and where they lie in
//! the file.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use crate::dtype::TensorFacts;
use crate::format::deepspeed::ZeroPart;
use crate::format::safetensors::Header;
use crate::format::tensorizer::decryptor::EncryptedTensor;

/// The place of a piece in its tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PiecePlace {
    /// Name of the tensor, if the file records it. If it is `None`, the name of the entry is the
    /// name of the tensor.
    pub logical_name: Option<String>,
    /// First index of the piece in each dimension of the tensor, in elements.
    pub offset: Vec<u64>,
    /// Extent of the whole tensor in each dimension, in elements, if the file records it.
    pub whole_shape: Option<Vec<u64>>,
}

/// The number of the rank that saved a file, as the file records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRank {
    /// Number of the rank.
    pub rank: u64,
    /// Number of the ranks among which a tensor is split. The total number of ranks is a multiple of this number.
    pub ranks: u64,
}

/// The tensors of one valid shard, in the order of the file. They are stored in a few large
/// vectors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardDescription {
    /// The metadata of the file, which are strings by name. `None` if the file has no metadata.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The byte ranges of the file that describe its tensors, ascending. All other bytes are data.
    pub described: Vec<Range<u64>>,
    /// The tensors whose data is encrypted, in data order; `None` if the file is not encrypted.
    pub encrypted: Option<Vec<EncryptedTensor>>,
    /// Offset of the first byte of another shard in the same file. That shard is not part of this
    /// description.
    pub next_file: Option<u64>,
    /// Text for people about the values of the file that are not shown.
    pub left_out: Option<String>,
    /// The place of each tensor in its whole tensor, in the order of the tensors. `None` if the
    /// format does not say that the tensors are pieces.
    pub places: Option<Vec<PiecePlace>>,
    /// Tensors whose elements do not follow each other in the file: the number of each tensor, ascending, with its
    /// strides in elements.
    pub strided: Vec<(u32, Vec<u64>)>,
    /// The rank that saved the file. `None` if the file is not that of one rank.
    pub rank: Option<FileRank>,
    /// The CRC of each tensor, in the order of the tensors, if this is the file of a rank. The CRC is 0 if the file has
    /// no CRC that covers exactly the bytes of the tensor.
    pub crcs: Vec<u32>,
    /// The facts about ranges of tensors, if this is a file of DeepSpeed.
    pub zero: Option<Arc<ZeroPart>>,
    names: String,
    tensors: Vec<DescriptionRow>,
    /// The extents of all tensors. Tensors of equal shapes may share their extents.
    numbers: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DescriptionRow {
    name_end: u32,
    /// Range of the indexes of its shape in `numbers`.
    shape: (u32, u32),
    facts: TensorFacts,
    start: u64,
}

/// A tensor, or a piece of one, as a shard describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorDescription<'a> {
    /// Name.
    pub name: &'a str,
    /// Its facts, such as its element type.
    pub facts: TensorFacts,
    /// Extent of each dimension, outermost first.
    pub shape: &'a [u64],
    /// Offset of its first byte in the file. For a tensor without data, it is the offset of zeros
    /// behind the file (`src/zeros.rs`).
    pub start: u64,
}

impl ShardDescription {
    /// A description in which the bytes of the file up to `data_start` describe the tensors.
    /// Reserves memory for `tensors` tensors.
    pub(super) fn with_room(data_start: u64, tensors: usize, names_len: usize) -> Self {
        ShardDescription {
            described: std::iter::once(0..data_start).collect(),
            names: String::with_capacity(names_len),
            tensors: Vec::with_capacity(tensors),
            ..ShardDescription::default()
        }
    }

    /// Adds a tensor. `shape` is a range of indexes into `numbers`.
    pub(super) fn push(&mut self, name: &str, facts: TensorFacts, shape: (u32, u32), start: u64) {
        self.names.push_str(name);
        let name_end = self.names.len() as u32;
        self.tensors.push(DescriptionRow { name_end, shape, facts, start });
    }

    /// Adds a tensor that shares its extents with no other tensor.
    pub(super) fn add(&mut self, name: &str, facts: TensorFacts, shape: &[u64], start: u64) {
        let begin = self.numbers.len() as u32;
        self.numbers.extend_from_slice(shape);
        self.push(name, facts, (begin, self.numbers.len() as u32), start);
    }

    /// Sets the strides of the tensor that was added last.
    pub(super) fn set_strides(&mut self, strides: Option<Vec<u64>>) {
        if let (Some(last), Some(strides)) = (self.tensors.len().checked_sub(1), strides) {
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
        self.tensors.iter().map(move |&DescriptionRow { name_end, shape, facts, start }| {
            let name = &self.names[begin..name_end as usize];
            begin = name_end as usize;
            let shape = &self.numbers[shape.0 as usize..shape.1 as usize];
            TensorDescription { name, facts, shape, start }
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
            let start = data_start + entry.data_offsets.start;
            description.push(&entry.name, entry.facts, shape, start);
        }
        description.numbers = numbers;
        description.metadata = header.metadata;
        description
    }
}
