//! The sharding note of torch DCP (`DCP_SHARDING_INFO`). For each entry of a shard, the note has
//! the tensor of which the entry is a piece, and the place in that tensor at which the piece
//! begins.
//!
//! A note has three keys for an entry. `saved_offsets` is the first index of the piece.
//! `logical_fqn` is the name of the tensor. This key exists only if the entry has another name,
//! because the shard holds several pieces of that tensor. `global_shape` is the shape of the whole
//! tensor. Releases of torch up to 2.15 write only `saved_offsets`.

use std::collections::{BTreeMap, HashMap};

use serde_json::Value;

use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::description::{PiecePlace, ShardDescription, TensorDescription};
use crate::format::json::{UniqueMap, object};
use crate::format::plain::JsonCursor;
use crate::format::safetensors::METADATA;

/// Metadata key that makes a file a DCP shard.
pub const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// Metadata key of the version of the sharding note.
pub const VERSION: &str = "DCP_VERSION";

/// Key in the sharding note. Its value is the first index of the piece in its tensor.
const SAVED_OFFSETS: &str = "saved_offsets";

/// Key in the sharding note. Its value is the name of the tensor.
const LOGICAL_FQN: &str = "logical_fqn";

/// Key in the sharding note. Its value is the shape of the whole tensor.
const GLOBAL_SHAPE: &str = "global_shape";

/// Whether a file's metadata makes it a DCP shard.
pub fn is_shard(metadata: Option<&BTreeMap<String, String>>) -> bool {
    metadata.is_some_and(|map| map.contains_key(SHARDING_INFO))
}

/// Whether a file holds only whole tensors under their own names, according to its sharding note.
/// `places` are the entries of the note, `tensors` the names and shapes of the tensors.
pub(crate) fn are_whole<'a>(
    places: &[PiecePlace],
    mut tensors: impl Iterator<Item = (&'a str, &'a [u64])>,
) -> bool {
    places.iter().all(|place| {
        tensors.next().is_some_and(|(name, shape)| {
            place.offset.iter().all(|&offset| offset == 0)
                && place.logical_name.as_ref().is_none_or(|logical| logical == name)
                && place.whole_shape.as_ref().is_none_or(|whole| whole == shape)
        })
    })
}

/// The fault of a file whose name is that of a DCP shard, but whose metadata has no sharding note.
pub(crate) fn no_note() -> Fault {
    let message = format!("named like a DCP shard but its metadata has no {SHARDING_INFO}");
    ErrorKind::DcpInfo.fault(message)
}

/// The places of the tensors of a shard according to its sharding note, in the order of the
/// tensors.
///
/// # Errors
/// `dcp_info` if the note is missing or malformed, or has an unknown key or version; `dcp_offsets`
/// if an offset or a shape does not fit the entry.
pub fn placements(shard: &ShardDescription) -> Result<Vec<PiecePlace>, Fault> {
    let metadata = shard.metadata.as_ref();
    let Some(text) = metadata.and_then(|map| map.get(SHARDING_INFO)) else {
        return Err(no_note());
    };
    if let Some(version) = metadata.and_then(|map| map.get(VERSION))
        && version.split('.').next() != Some("1")
    {
        return Err(ErrorKind::DcpInfo
            .fault(format!("{VERSION} is {version:?}, this program knows version 1")));
    }
    let UniqueMap(mut notes) =
        object::<UniqueMap<UniqueMap<Value>>>(text.as_bytes(), ErrorKind::DcpInfo).map_err(
            |fault| Fault {
                kind: ErrorKind::DcpInfo,
                message: format!("{SHARDING_INFO}: {}", fault.message),
                ..fault
            },
        )?;
    let place = |entry: TensorDescription<'_>| {
        let UniqueMap(note) = notes.remove(entry.name).unwrap_or(UniqueMap(BTreeMap::new()));
        placement(&entry, note).map_err(|fault| fault.tensor(entry.name))
    };
    let places = shard.tensors().map(place).collect::<Result<_, _>>()?;
    match notes.first_key_value() {
        None => Ok(places),
        Some((name, _)) => Err(ErrorKind::DcpInfo
            .fault(format!("{SHARDING_INFO} describes it but the file does not hold it"))
            .tensor(name)),
    }
}

/// The places of the tensors of a header, read from the sharding note by the fast parser. `None` if
/// the fast parser cannot read the note. Then `placements` has to be called.
pub(crate) fn plain_placements(shard: &ShardDescription) -> Option<Vec<PiecePlace>> {
    let metadata = shard.metadata.as_ref()?;
    let mut version =
        metadata.get(VERSION).into_iter().flat_map(|version| version.split('.').next());
    version.all(|version| version == "1").then_some(())?;
    let mut notes: Vec<(&str, PiecePlace)> = Vec::with_capacity(shard.len());
    let mut cursor = JsonCursor::new(metadata.get(SHARDING_INFO)?);
    cursor.items(b'{', b'}', |cursor| {
        let name = cursor.string()?;
        cursor.token(b':')?;
        notes.push((name, plain_note(cursor)?));
        Some(())
    })?;
    cursor.end()?;
    // The notes usually have the order of the tensors. Then no map is needed.
    let mut by_name = HashMap::new();
    if !shard.tensors().map(|tensor| tensor.name).eq(notes.iter().map(|(name, _)| *name)) {
        for (index, (name, _)) in notes.iter().enumerate() {
            by_name.insert(*name, index).is_none().then_some(())?;
        }
    }
    (notes.len() == shard.len()).then_some(())?;
    let mut places = Vec::with_capacity(notes.len());
    for (index, tensor) in shard.tensors().enumerate() {
        let TensorDescription { name, facts, shape, .. } = tensor;
        let index = if by_name.is_empty() { index } else { *by_name.get(name)? };
        let place = std::mem::take(&mut notes[index].1);
        let whole = place.whole_shape.as_deref();
        let fits = facts.dtype != Dtype::F4
            && place.offset.len() == shape.len()
            && whole.is_none_or(|whole| whole.len() == shape.len());
        let mut ends = place.offset.iter().zip(shape).enumerate();
        let inside = ends.all(|(dim, (offset, size))| {
            let end = offset.checked_add(*size);
            end.is_some_and(|end| fits && whole.is_none_or(|whole| end <= whole[dim]))
        });
        (fits && inside).then_some(())?;
        places.push(place);
    }
    Some(places)
}

/// Reads the place of one entry from a note, with the fast parser.
fn plain_note(cursor: &mut JsonCursor<'_>) -> Option<PiecePlace> {
    let (mut name, mut offset, mut shape) = (None, None, None);
    cursor.items(b'{', b'}', |cursor| {
        let key = cursor.string()?;
        cursor.token(b':')?;
        let again = match key {
            LOGICAL_FQN => name.replace(cursor.string()?).is_some(),
            SAVED_OFFSETS | GLOBAL_SHAPE => {
                let list = if key == SAVED_OFFSETS { &mut offset } else { &mut shape };
                let mut numbers = Vec::new();
                cursor.numbers(&mut numbers)?;
                list.replace(numbers).is_some()
            }
            _ => true,
        };
        (!again).then_some(())
    })?;
    (name != Some(METADATA)).then_some(())?;
    let logical_name = name.map(str::to_owned);
    Some(PiecePlace { logical_name, offset: offset?, whole_shape: shape })
}

/// The place of `entry` according to `note`.
fn placement(
    entry: &TensorDescription<'_>,
    mut note: BTreeMap<String, Value>,
) -> Result<PiecePlace, Fault> {
    let Some(saved) = note.remove(SAVED_OFFSETS) else {
        let message = format!("{SHARDING_INFO} has no {SAVED_OFFSETS} for it");
        return Err(ErrorKind::DcpInfo.fault(message));
    };
    let (logical, whole) = (note.remove(LOGICAL_FQN), note.remove(GLOBAL_SHAPE));
    if let Some(key) = note.into_keys().next() {
        return Err(ErrorKind::DcpInfo.fault(format!(
            "{SHARDING_INFO} has the key {} for it; this version of tensorfs knows \
             {SAVED_OFFSETS}, {LOGICAL_FQN} and {GLOBAL_SHAPE}, a newer one may know more",
            quoted(&key)
        )));
    }
    let offset = numbers(entry, SAVED_OFFSETS, &saved)?;
    let outside = |offset: &u64, size: &u64| offset.checked_add(*size).is_none();
    if offset.iter().zip(entry.shape).any(|(offset, size)| outside(offset, size)) {
        return Err(unfit(entry, SAVED_OFFSETS, &saved, "offset + size passes 2^64"));
    }
    let Some(whole) = whole else {
        return Ok(PiecePlace { logical_name: logical_name(logical)?, offset, whole_shape: None });
    };
    let shape = numbers(entry, GLOBAL_SHAPE, &whole)?;
    let mut ends = offset.iter().zip(entry.shape).map(|(offset, size)| offset + size);
    if shape.iter().any(|size| ends.next() > Some(*size)) {
        let what = format!("the piece, which begins at {offset:?}, passes it");
        return Err(unfit(entry, GLOBAL_SHAPE, &whole, &what));
    }
    Ok(PiecePlace { logical_name: logical_name(logical)?, offset, whole_shape: Some(shape) })
}

fn logical_name(value: Option<Value>) -> Result<Option<String>, Fault> {
    let name = match value {
        None => return Ok(None),
        // A tensor cannot have the name `__metadata__`, which the header reserves.
        Some(Value::String(name)) if name != METADATA => name,
        Some(other) => {
            let other = quoted(&other.to_string());
            let message = format!("{LOGICAL_FQN} is {other}, the name of a tensor expected");
            return Err(ErrorKind::DcpInfo.fault(message));
        }
    };
    Ok(Some(name))
}

/// The list `value` of the key `key`: one number for each dimension of `entry`, in elements.
fn numbers(entry: &TensorDescription<'_>, key: &str, value: &Value) -> Result<Vec<u64>, Fault> {
    let bad = |what: &str| unfit(entry, key, value, what);
    let Some(list) = value.as_array() else { return Err(bad("a list expected")) };
    if list.len() != entry.shape.len() {
        return Err(bad("one number per dimension expected"));
    }
    let all: Option<Vec<u64>> = list.iter().map(|number| number.as_u64()).collect();
    let mut numbers = all.ok_or_else(|| bad("integers from 0 to 2^64 - 1 expected"))?;
    // torch counts pairs of F4 elements in the last dimension, the header counts single elements.
    if let (Dtype::F4, Some(last)) = (entry.facts.dtype, numbers.last_mut()) {
        *last = last.checked_mul(2).ok_or_else(|| bad("passes 2^64"))?;
    }
    Ok(numbers)
}

fn unfit(entry: &TensorDescription<'_>, key: &str, value: &Value, what: &str) -> Fault {
    let message = format!("{key} {value} of a piece of shape {:?}: {what}", entry.shape);
    ErrorKind::DcpOffsets.fault(message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;
    use crate::format::safetensors::{Entry, Header};

    /// A shard with one entry `e` of this dtype and shape, and `note` about it.
    fn shard(dtype: Dtype, shape: &[u64], note: &Value) -> ShardDescription {
        let entry = Entry {
            name: "e".into(),
            facts: dtype.into(),
            shape: shape.to_vec(),
            data_offsets: 0..0,
        };
        let info = serde_json::json!({ "e": note }).to_string();
        let metadata = BTreeMap::from([(SHARDING_INFO.to_owned(), info)]);
        Header { metadata: Some(metadata), tensors: vec![entry], header_len: 0 }.into()
    }

    fn place(dtype: Dtype, shape: &[u64], note: &Value) -> Result<PiecePlace, Fault> {
        placements(&shard(dtype, shape, note)).map(|mut places| places.remove(0))
    }

    #[test]
    fn offsets_and_shapes_of_packed_elements_are_counted_in_elements() {
        let note = serde_json::json!({ "saved_offsets": [1, 2], "global_shape": [2, 4] });
        let found = place(Dtype::F4, &[1, 4], &note).unwrap();
        assert_eq!((found.offset, found.whole_shape), (vec![1, 4], Some(vec![2, 8])));
        let found = place(Dtype::F32, &[1, 2], &note).unwrap();
        assert_eq!((found.offset, found.whole_shape), (vec![1, 2], Some(vec![2, 4])));
        for key in ["saved_offsets", "global_shape"] {
            let mut note = serde_json::json!({ "saved_offsets": [0], "global_shape": [4] });
            note[key] = serde_json::json!([1u64 << 63]);
            let fault = place(Dtype::F4, &[2], &note).unwrap_err();
            assert_eq!(fault.kind, ErrorKind::DcpOffsets);
            assert!(fault.message.contains("passes 2^64"), "{fault}");
        }
    }

    /// The places that the fast parser finds. If the fast parser accepts the note, the strict
    /// parser must find the same places.
    fn plain(note: &str) -> Option<Vec<PiecePlace>> {
        let entry = |name: &str, data_offsets| Entry {
            name: name.into(),
            facts: Dtype::U8.into(),
            shape: vec![1, 2],
            data_offsets,
        };
        let tensors = vec![entry("a", 0..2), entry("b", 2..4)];
        let metadata = BTreeMap::from([(SHARDING_INFO.to_owned(), note.to_owned())]);
        let shard = Header { metadata: Some(metadata), tensors, header_len: 0 }.into();
        let plain = plain_placements(&shard)?;
        assert_eq!(placements(&shard).unwrap(), plain);
        Some(plain)
    }

    #[test]
    fn a_plain_note_is_read_as_by_the_strict_reader_and_any_other_is_left_to_it() {
        let note = r#"{"b": {"saved_offsets": [1, 0], "global_shape": [2, 2]},
                       "a": {"logical_fqn": "w", "saved_offsets": [0, 0]}}"#;
        let places = plain(note).unwrap();
        assert_eq!(places[0].logical_name.as_deref(), Some("w"));
        assert_eq!(
            (&*places[1].offset, places[1].whole_shape.as_deref()),
            (&[1, 0][..], Some(&[2, 2][..]))
        );
        for (from, to) in [
            ("[1, 0]", "[1]"),
            ("[1, 0]", "[1, 1]"),
            ("[1, 0]", "[18446744073709551615, 0]"),
            ("[2, 2]", "[2]"),
            ("\"b\"", "\"a\""),
            ("\"b\"", "\"c\""),
            ("\"w\"", "\"__metadata__\""),
            ("\"w\"", "\"\\u0077\""),
            ("\"w\"", "null"),
            ("\"logical_fqn\"", "\"other\""),
            ("\"logical_fqn\": \"w\", ", "\"saved_offsets\": [0, 0], "),
            ("\"saved_offsets\": [1, 0], ", ""),
            ("}}", "}, \"c\": {\"saved_offsets\": []}}"),
            ("}}", "}"),
            ("}}", "}}x"),
        ] {
            let changed = note.replacen(from, to, 1);
            assert_ne!(changed, note, "{from}");
            assert_eq!(plain(&changed), None, "{to}");
        }
    }

    #[test]
    fn a_key_that_is_not_known_is_named_with_those_that_are() {
        let note = serde_json::json!({ "saved_offsets": [0], "local_strides": [1] });
        let fault = place(Dtype::F32, &[2], &note).unwrap_err();
        assert_eq!((fault.kind, fault.tensor.as_deref()), (ErrorKind::DcpInfo, Some("e")));
        for word in ["`local_strides`", "saved_offsets", "logical_fqn", "global_shape", "version"] {
            assert!(fault.message.contains(word), "{word}: {fault}");
        }
    }

    #[test]
    fn a_file_is_whole_only_if_no_key_of_its_note_says_otherwise() {
        let whole = |note: Value| {
            let shard = shard(Dtype::F32, &[2, 3], &note);
            placements(&shard).is_ok_and(|places| {
                are_whole(&places, shard.tensors().map(|tensor| (tensor.name, tensor.shape)))
            })
        };
        assert!(whole(serde_json::json!({ "saved_offsets": [0, 0] })));
        let all = serde_json::json!({
            "saved_offsets": [0, 0], "logical_fqn": "e", "global_shape": [2, 3],
        });
        assert!(whole(all.clone()));
        for (key, value) in [
            ("saved_offsets", serde_json::json!([1, 0])),
            ("logical_fqn", "f".into()),
            ("global_shape", serde_json::json!([4, 3])),
            ("global_shape", serde_json::json!([2])),
            ("unknown", Value::Null),
        ] {
            let mut note = all.clone();
            note[key] = value;
            assert!(!whole(note.clone()), "{note}");
        }
    }
}
