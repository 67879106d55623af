//! Writes checkpoints in the formats of common tools: numbered shards as transformers writes them,
//! and rank shards as torch DCP writes them.
//!
//! Each byte of a tensor is computed from the number of the tensor and the position of the byte.
//! The data cannot be compressed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde_json::{Value, json};
use tensorfs::Dtype;
use tensorfs::internal::format::safetensors;

/// Number of bytes that are written to a file at a time.
const BUFFER_LEN: usize = 1 << 20;

/// A tensor of a checkpoint. Its number is its index in the list.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
}

impl Tensor {
    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        len_of(self.dtype, &self.shape)
    }
}

/// How a checkpoint is cut into shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Whole tensors in order, distributed over this number of shards, with a weight map.
    HuggingFace(u64),
    /// torch DCP: number of parts along the first and along the last dimension. These dimensions
    /// must be multiples of the numbers.
    Dcp(u64, u64),
}

/// A part of a tensor: the number of the tensor, and the start index and size in each dimension.
struct Part {
    number: usize,
    offset: Vec<u64>,
    shape: Vec<u64>,
}

/// Writes the shards of a checkpoint and a `config.json` into `folder`.
pub(super) fn write_checkpoint(folder: &Path, tensors: &[Tensor], cut: Cut) -> io::Result<()> {
    fs::write(folder.join("config.json"), "{\n  \"model_type\": \"demo\"\n}\n")?;
    match cut {
        Cut::HuggingFace(shards) => write_hugging_face(folder, tensors, shards),
        Cut::Dcp(rows, columns) => {
            for rank in 0..rows * columns {
                let cell = [rank / columns, rank % columns];
                let parts = tensors.iter().enumerate().filter_map(|(number, tensor)| {
                    dcp_part(number, &tensor.shape, [rows, columns], cell)
                });
                write_dcp_shard(folder, tensors, rank, &parts.collect::<Vec<_>>())?;
            }
            Ok(())
        }
    }
}

/// The byte at `offset` of tensor `number`.
pub(super) fn byte_of(number: usize, offset: u64) -> u8 {
    word_of(number, offset / 8)[(offset % 8) as usize]
}

/// Eight bytes of tensor `number`, which splitmix64 computes from both numbers.
fn word_of(number: usize, word: u64) -> [u8; 8] {
    let mut x = (number as u64) << 48 | word;
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)).to_le_bytes()
}

/// Fills `bytes` with the bytes of tensor `number` from offset `start` on.
fn fill(number: usize, start: u64, bytes: &mut [u8]) {
    let head = (start.next_multiple_of(8) - start).min(bytes.len() as u64) as usize;
    let (head, rest) = bytes.split_at_mut(head);
    for (offset, byte) in (start..).zip(head) {
        *byte = byte_of(number, offset);
    }
    for (word, target) in (start.div_ceil(8)..).zip(rest.chunks_mut(8)) {
        target.copy_from_slice(&word_of(number, word)[..target.len()]);
    }
}

fn len_of(dtype: Dtype, shape: &[u64]) -> u64 {
    shape.iter().product::<u64>() * dtype.bits() / 8
}

fn write_hugging_face(folder: &Path, tensors: &[Tensor], shards: u64) -> io::Result<()> {
    let total: u64 = tensors.iter().map(Tensor::len).sum();
    let mut map = BTreeMap::new();
    for shard in 0..shards {
        let name = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        let (mut start, mut parts) = (0, Vec::new());
        for (number, tensor) in tensors.iter().enumerate() {
            // The middle of a tensor decides its shard. So a long tensor at the start leaves no
            // shard empty.
            if (start + tensor.len() / 2) * shards / total.max(1) == shard {
                let (offset, shape) = (vec![0; tensor.shape.len()], tensor.shape.clone());
                parts.push(Part { number, offset, shape });
                map.insert(&tensor.name, name.clone());
            }
            start += tensor.len();
        }
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        write_shard(&folder.join(name), tensors, &metadata, &parts)?;
    }
    let json = json!({ "metadata": { "total_size": total }, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), format!("{json:#}\n"))
}

/// The part of a tensor that the rank at `cell` of the grid saves. A tensor with one dimension is
/// saved as a whole by the first rank, as DCP does for replicated tensors.
fn dcp_part(number: usize, shape: &[u64], grid: [u64; 2], cell: [u64; 2]) -> Option<Part> {
    let mut part = Part { number, offset: vec![0; shape.len()], shape: shape.to_vec() };
    if shape.len() == 1 {
        return (cell == [0, 0]).then_some(part);
    }
    for (dim, (parts, place)) in [0, shape.len() - 1].into_iter().zip(grid.into_iter().zip(cell)) {
        part.shape[dim] /= parts;
        part.offset[dim] = place * part.shape[dim];
    }
    Some(part)
}

fn write_dcp_shard(folder: &Path, tensors: &[Tensor], rank: u64, parts: &[Part]) -> io::Result<()> {
    let offsets = parts
        .iter()
        .map(|part| (tensors[part.number].name.clone(), json!({ "saved_offsets": part.offset })));
    let info: serde_json::Map<String, Value> = offsets.collect();
    let metadata = BTreeMap::from([
        ("DCP_SHARDING_INFO".to_owned(), Value::from(info).to_string()),
        ("DCP_VERSION".to_owned(), "1.0".to_owned()),
        ("format".to_owned(), "pt".to_owned()),
    ]);
    let name = format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1);
    write_shard(&folder.join(name), tensors, &metadata, parts)
}

fn write_shard(
    path: &Path,
    tensors: &[Tensor],
    metadata: &BTreeMap<String, String>,
    parts: &[Part],
) -> io::Result<()> {
    let entries = parts.iter().map(|part| {
        let Tensor { name, dtype, .. } = &tensors[part.number];
        (name.as_str(), *dtype, part.shape.as_slice(), len_of(*dtype, &part.shape))
    });
    let header = safetensors::encode(metadata, entries, 8)
        .map_err(|len| io::Error::other(format!("a header of {len} bytes")))?;
    let mut file = BufWriter::with_capacity(BUFFER_LEN, File::create(path)?);
    file.write_all(&header)?;
    for part in parts {
        write_part(&mut file, &tensors[part.number], part)?;
    }
    file.into_inner()?.sync_all()
}

/// Writes the bytes of a part row by row.
fn write_part(file: &mut impl Write, tensor: &Tensor, part: &Part) -> io::Result<()> {
    let width = tensor.dtype.bits() / 8;
    let last = tensor.shape.len() - 1;
    let rows: u64 = part.shape[..last].iter().product();
    let mut bytes = vec![0; (part.shape[last] * width) as usize];
    for row in 0..rows {
        // The index in the whole tensor of the element with which this row begins.
        let (mut rest, mut element, mut stride) = (row, part.offset[last], tensor.shape[last]);
        for dim in (0..last).rev() {
            element += (part.offset[dim] + rest % part.shape[dim]) * stride;
            rest /= part.shape[dim];
            stride *= tensor.shape[dim];
        }
        fill(part.number, element * width, &mut bytes);
        file.write_all(&bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_filled_at_once_are_those_computed_one_by_one() {
        for (start, len) in [(0, 40), (3, 2), (5, 30), (8, 8), (16, 5), (7, 0)] {
            let mut bytes = vec![0; len];
            fill(3, start, &mut bytes);
            let single: Vec<u8> = (start..).take(len).map(|offset| byte_of(3, offset)).collect();
            assert_eq!(bytes, single, "{len} bytes from {start}");
        }
    }
}
