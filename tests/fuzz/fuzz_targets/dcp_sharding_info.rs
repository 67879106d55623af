//! Parses any text as the sharding note of a DCP shard. The first bytes choose the dtype and the
//! sizes of the pieces, so that the header often agrees with the note and the checks of the offsets
//! run.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use tensorfs::Dtype;
use tensorfs::internal::error::ErrorKind;
use tensorfs::internal::format::PiecePlace;
use tensorfs::internal::format::dcp::{SHARDING_INFO, VERSION, is_shard, placements};
use tensorfs::internal::format::safetensors::{Entry, Header};

fuzz_target!(|data: &[u8]| {
    let Some((choice, note)) = data.split_first_chunk::<4>() else { return };
    let Ok(note) = std::str::from_utf8(note) else { return };
    let notes = match serde_json::from_str(note) {
        Ok(Value::Object(notes)) => notes,
        _ => serde_json::Map::new(),
    };
    let header = header_for(note, &notes, *choice);
    assert!(is_shard(header.metadata.as_ref()));
    match placements(&header.clone().into()) {
        Ok(places) => check(&header, &notes, &places),
        Err(fault) => assert!(
            matches!(fault.kind, ErrorKind::DcpInfo | ErrorKind::DcpOffsets),
            "{:?}: {fault}",
            fault.kind
        ),
    }
});

/// A header with one piece for each entry of the note.
fn header_for(note: &str, notes: &serde_json::Map<String, Value>, choice: [u8; 4]) -> Header {
    let [dtype, size, missing, version] = choice;
    // Half of the pieces are F4, the one dtype that is read in another way.
    let dtype = if dtype < 128 {
        Dtype::F4
    } else {
        Dtype::ALL[usize::from(dtype - 128) % Dtype::ALL.len()]
    };
    // Sizes near both ends of the range.
    let size = if size < 128 { u64::from(size) } else { u64::MAX - u64::from(size - 128) };
    let tensors = notes.iter().skip(usize::from(missing == u8::MAX)).map(|(name, note)| {
        let rank = note.get("saved_offsets").and_then(Value::as_array).map_or(0, Vec::len);
        Entry {
            name: name.clone(),
            facts: dtype.into(),
            shape: vec![size; rank],
            data_offsets: 0..0,
        }
    });
    let mut metadata = BTreeMap::from([(SHARDING_INFO.to_owned(), note.to_owned())]);
    if version < 192 {
        metadata.insert(VERSION.to_owned(), format!("1.{version}"));
    }
    Header { metadata: Some(metadata), tensors: tensors.collect(), header_len: 0 }
}

fn check(header: &Header, notes: &serde_json::Map<String, Value>, places: &[PiecePlace]) {
    assert_eq!(places.len(), header.tensors.len());
    for (entry, place) in header.tensors.iter().zip(places) {
        let PiecePlace { logical_name, offset, whole_shape } = place;
        assert_eq!(offset.len(), entry.shape.len(), "{entry:?}");
        for (start, size) in offset.iter().zip(&entry.shape) {
            assert!(start.checked_add(*size).is_some(), "{entry:?} at {offset:?}");
        }
        if let Some(shape) = whole_shape {
            let ends = offset.iter().zip(&entry.shape).map(|(start, size)| start + size);
            assert!(shape.len() == offset.len() && ends.zip(shape).all(|(end, size)| end <= *size));
        }
        // As the note says it: pairs of F4 elements in the last dimension.
        let saved = |numbers: &[u64]| {
            let mut saved = numbers.to_vec();
            if let (Dtype::F4, Some(last)) = (entry.facts.dtype, saved.last_mut()) {
                *last /= 2;
            }
            Value::from(saved)
        };
        let mut said = serde_json::Map::from_iter([("saved_offsets".to_owned(), saved(offset))]);
        if let Some(name) = logical_name {
            assert_ne!(name, "__metadata__");
            said.insert("logical_fqn".to_owned(), name.as_str().into());
        }
        if let Some(shape) = whole_shape {
            said.insert("global_shape".to_owned(), saved(shape));
        }
        assert_eq!(notes[&entry.name], Value::Object(said), "{entry:?}");
    }
}
