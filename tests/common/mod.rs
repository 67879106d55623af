//! Makes checkpoints for tests, and reads them in a naive way, so that tests can compare results with these reads.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

pub(crate) mod boxes;
pub(crate) mod dense;
pub(crate) mod requests;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tensorfs::Dtype;
use tensorfs::internal::format::safetensors;

/// A box of a tensor: first index and extent in each dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Box_ {
    pub(crate) offset: Vec<u64>,
    pub(crate) shape: Vec<u64>,
}

/// A tensor with its bytes and the boxes that it is cut into, each with its shard number.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) boxes: Vec<(usize, Box_)>,
}

/// Byte number `at` of tensor `name`.
pub(crate) fn byte(name: &str, at: u64) -> u8 {
    let seed = name.bytes().fold(7u64, |a, b| a.wrapping_mul(31).wrapping_add(b.into()));
    let x = (seed ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x >> 32) as u8 ^ (x >> 57) as u8
}

/// All bytes of a tensor.
pub(crate) fn bytes(name: &str, dtype: Dtype, shape: &[u64]) -> Vec<u8> {
    let len = shape.iter().product::<u64>() * dtype.bits() / 8;
    (0..len).map(|at| byte(name, at)).collect()
}

impl Cut {
    /// The bytes of one box, copied element by element. Elements are copied as bits, which also works for elements that
    /// are shorter than a byte.
    pub(crate) fn piece(&self, part: &Box_) -> Vec<u8> {
        let whole = bytes(&self.name, self.dtype, &self.shape);
        let bits = self.dtype.bits();
        let count: u64 = part.shape.iter().product();
        let mut piece = vec![0u8; (count * bits / 8) as usize];
        for element in 0..count {
            let (mut rest, mut from, mut stride) = (element, 0, 1);
            for dim in (0..self.shape.len()).rev() {
                from += (part.offset[dim] + rest % part.shape[dim]) * stride;
                rest /= part.shape[dim];
                stride *= self.shape[dim];
            }
            for bit in 0..bits {
                let (source, target) = (from * bits + bit, element * bits + bit);
                let value = whole[(source / 8) as usize] >> (source % 8) & 1;
                piece[(target / 8) as usize] |= value << (target % 8);
            }
        }
        piece
    }

    /// Offsets or a shape in the form that torch writes: for F4, the last dimension counts pairs of elements.
    fn saved(&self, numbers: &[u64]) -> Vec<u64> {
        let mut saved = numbers.to_vec();
        if let (Dtype::F4, Some(last)) = (self.dtype, saved.last_mut()) {
            *last /= 2;
        }
        saved
    }
}

/// Name of DCP shard `number`.
pub(crate) fn dcp_name(number: usize) -> String {
    format!("shard-{:05}-model-00001-of-00001.safetensors", number + 1)
}

/// The content of the sharding notes of a DCP shard. Each variant has the content of the one before it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notes {
    /// The offset of each piece, as releases of torch write it. A file has one piece of a tensor.
    Offsets,
    /// Also the name of the tensor, as the main branch of torch writes it. A file may have several pieces of a tensor.
    LogicalNames,
    /// Also the shape of the whole tensor.
    WholeShapes,
}

/// Writes `tensors` as DCP shards into `folder`. A shard without boxes is not written.
pub(crate) fn write_dcp(folder: &Path, tensors: &[Cut]) {
    write_dcp_with(folder, tensors, Notes::Offsets);
}

/// Writes a DCP checkpoint with the given notes.
pub(crate) fn write_dcp_with(folder: &Path, tensors: &[Cut], notes: Notes) {
    let mut shards: BTreeMap<usize, Vec<(&Cut, &Box_)>> = BTreeMap::new();
    for tensor in tensors {
        for (shard, part) in &tensor.boxes {
            shards.entry(*shard).or_default().push((tensor, part));
        }
    }
    for (number, parts) in shards {
        let key = |at: usize| {
            let name = &parts[at].0.name;
            let same = |(t, _): &&(&Cut, &Box_)| t.name == *name;
            let (all, before) =
                (parts.iter().filter(same).count(), parts[..at].iter().filter(same).count());
            if all == 1 { name.clone() } else { format!("{name}.__dcp_shard_{before}") }
        };
        let keys: Vec<String> = (0..parts.len()).map(key).collect();
        let note = |t: &Cut, part: &Box_| {
            let mut note = serde_json::json!({ "saved_offsets": t.saved(&part.offset) });
            if notes != Notes::Offsets {
                note["logical_fqn"] = t.name.clone().into();
            }
            if notes == Notes::WholeShapes {
                note["global_shape"] = t.saved(&t.shape).into();
            }
            note
        };
        let info = keys.iter().zip(&parts).map(|(key, (t, part))| (key.clone(), note(t, part)));
        let info: serde_json::Map<_, _> = info.collect();
        let metadata = BTreeMap::from([
            ("DCP_SHARDING_INFO".to_owned(), serde_json::Value::from(info).to_string()),
            ("DCP_VERSION".to_owned(), "1.0".to_owned()),
            ("format".to_owned(), "pt".to_owned()),
        ]);
        let pieces: Vec<_> = keys
            .iter()
            .zip(&parts)
            .map(|(key, (t, part))| (key.as_str(), t.dtype, part.shape.as_slice(), t.piece(part)))
            .collect();
        write_shard(&folder.join(dcp_name(number)), &metadata, &pieces);
    }
}

/// Writes `tensors` as two DCP shards into `folder`. A shard may have several pieces of a tensor.
pub(crate) fn write_dense_dcp(folder: &Path, tensors: &[Cut]) {
    let mut tensors = tensors.to_vec();
    for (shard, _) in tensors.iter_mut().flat_map(|tensor| &mut tensor.boxes) {
        *shard %= 2;
    }
    write_dcp_with(folder, &tensors, Notes::WholeShapes);
}

/// Writes `tensors` into two numbered shards in `folder`. Each tensor is whole in one shard.
pub(crate) fn write_hf(folder: &Path, tensors: &[Cut]) {
    for number in 0..2 {
        let own = tensors.iter().skip(number).step_by(2);
        let pieces: Vec<_> = own
            .map(|t| (t.name.as_str(), t.dtype, &t.shape[..], bytes(&t.name, t.dtype, &t.shape)))
            .collect();
        let name = format!("model-{:05}-of-00002.safetensors", number + 1);
        write_shard(&folder.join(name), &BTreeMap::new(), &pieces);
    }
}

/// Writes one safetensors file, its tensors in the order given.
pub(crate) fn write_shard(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &[(&str, Dtype, &[u64], Vec<u8>)],
) {
    let entries =
        tensors.iter().map(|(name, dtype, shape, data)| (*name, *dtype, *shape, data.len() as u64));
    let mut file = safetensors::encode(metadata, entries, 8).unwrap();
    tensors.iter().for_each(|(.., data)| file.extend_from_slice(data));
    fs::write(path, file).unwrap();
}

/// The tensors of a safetensors file that is in memory: name to dtype, shape and bytes. The header is parsed by
/// serde_json, without code of tensorfs.
pub(crate) fn read_naively(file: &[u8]) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let start = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&file[8..start]).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    tensors
        .map(|(name, entry)| {
            let number = |v: &serde_json::Value| v.as_u64().unwrap();
            let shape = entry["shape"].as_array().unwrap().iter().map(number).collect();
            let at = |i: usize| start + number(&entry["data_offsets"][i]) as usize;
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            (name, (dtype, shape, file[at(0)..at(1)].to_vec()))
        })
        .collect()
}
