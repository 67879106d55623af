//! The sharding note of torch DCP (`DCP_SHARDING_INFO`): where in its tensor each piece of a
//! shard begins.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::dtype::Dtype;
use crate::error::{Class, Fault};
use crate::format::json::{UniqueMap, object};
use crate::format::safetensors::{Entry, Header};

/// Metadata key that makes a file a DCP shard.
pub const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// Metadata key of the note's version.
pub const VERSION: &str = "DCP_VERSION";

#[derive(Deserialize)]
struct PieceJson {
    #[serde(default, deserialize_with = "present")]
    saved_offsets: Option<Value>,
}

/// Any value, `null` too: only an absent key becomes `None`.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Whether a file's metadata makes it a DCP shard.
pub fn is_shard(metadata: Option<&BTreeMap<String, String>>) -> bool {
    metadata.is_some_and(|map| map.contains_key(SHARDING_INFO))
}

/// Whether a file with a sharding note holds whole tensors, as far as offsets tell.
pub fn is_whole(header: &Header) -> bool {
    offsets(header).is_ok_and(|offsets| offsets.iter().flatten().all(|&offset| offset == 0))
}

/// Offset of each tensor of `header` in its whole tensor, in the order of `header.tensors`.
pub fn offsets(header: &Header) -> Result<Vec<Vec<u64>>, Fault> {
    let metadata = header.metadata.as_ref();
    let Some(text) = metadata.and_then(|map| map.get(SHARDING_INFO)) else {
        return Err(Fault::new(
            Class::DcpInfo,
            format!("named like a DCP shard but its metadata has no {SHARDING_INFO}"),
        ));
    };
    if let Some(version) = metadata.and_then(|map| map.get(VERSION))
        && version.split('.').next() != Some("1")
    {
        return Err(Fault::new(
            Class::DcpInfo,
            format!("{VERSION} is {version:?}, this program knows version 1"),
        ));
    }
    let UniqueMap(mut notes) = object::<UniqueMap<PieceJson>>(text.as_bytes(), Class::DcpInfo)
        .map_err(|fault| Fault {
            class: Class::DcpInfo,
            message: format!("{SHARDING_INFO}: {}", fault.message),
            ..fault
        })?;
    let offsets = header
        .tensors
        .iter()
        .map(|entry| {
            let note = notes.remove(&entry.name).and_then(|note| note.saved_offsets);
            let Some(saved) = note else {
                let message = format!("{SHARDING_INFO} has no saved_offsets for it");
                return Err(Fault::new(Class::DcpInfo, message).tensor(&entry.name));
            };
            piece_offset(entry, &saved).map_err(|fault| fault.tensor(&entry.name))
        })
        .collect::<Result<_, _>>()?;
    match notes.first_key_value() {
        None => Ok(offsets),
        Some((name, _)) => Err(Fault::new(
            Class::DcpInfo,
            format!("{SHARDING_INFO} describes it but the file does not hold it"),
        )
        .tensor(name)),
    }
}

fn piece_offset(entry: &Entry, saved: &Value) -> Result<Vec<u64>, Fault> {
    let bad = |what: &str| {
        Fault::new(
            Class::DcpOffsets,
            format!("saved_offsets {saved} of a piece of shape {:?}: {what}", entry.shape),
        )
    };
    let Some(saved) = saved.as_array() else { return Err(bad("a list expected")) };
    if saved.len() != entry.shape.len() {
        return Err(bad("one offset per dimension expected"));
    }
    let mut offset = saved
        .iter()
        .map(|value| value.as_u64().ok_or_else(|| bad("offsets are integers from 0")))
        .collect::<Result<Vec<u64>, _>>()?;
    // torch counts pairs of F4 elements in the last dimension, the header single ones.
    if let (Dtype::F4, Some(last)) = (entry.dtype, offset.last_mut()) {
        *last = last.checked_mul(2).ok_or_else(|| bad("passes 2^64"))?;
    }
    if offset.iter().zip(&entry.shape).any(|(o, size)| o.checked_add(*size).is_none()) {
        return Err(bad("offset + size passes 2^64"));
    }
    Ok(offset)
}
