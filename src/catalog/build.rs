//! From the headers of the shards of one set to its catalog.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::coverage;
use super::{Catalog, Piece, Shard, ShardHeader, ShardId, Tensor, named_some};
use crate::error::{Class, Fault, quoted};
use crate::format::dcp;
use crate::format::names::natural_cmp;
use crate::format::safetensors::Entry;
use crate::format::weight_map::WeightMap;

/// Lines of one kind kept in the notes of a catalog.
const NOTES_MAX: usize = 20;

pub(super) fn of_whole_tensors(
    mut shards: Vec<ShardHeader>,
    map: Option<&WeightMap>,
) -> Result<Catalog, Fault> {
    sort_shards(&mut shards);
    let mut catalog = empty_catalog(&shards);
    let listed = |name: &str| map.and_then(|map| map.shard_of.get(name));
    let mut holder: HashMap<&str, usize> = HashMap::new();
    for (at, shard) in shards.iter().enumerate() {
        for entry in &shard.header.tensors {
            match listed(&entry.name) {
                Some(file) if *file != shard.name => {
                    note(&mut catalog.notes, || {
                        let (name, other) = (quoted(&entry.name), &shard.name);
                        format!("{name} also lies in {other}; the weight map says {file}")
                    });
                    continue;
                }
                Some(_) => {}
                None if map.is_some() => note(&mut catalog.notes, || {
                    let (name, file) = (quoted(&entry.name), &shard.name);
                    format!("{name} in {file} is not in the weight map; it is kept")
                }),
                None => {}
            }
            if let Some(first) = holder.insert(&entry.name, at) {
                let first = &shards[first].name;
                let message = format!("lies in {first} and in {}", shard.name);
                return Err(Fault::new(Class::DuplicateTensor, message)
                    .tensor(&entry.name)
                    .in_file(&shard.name));
            }
            catalog.tensors.push(whole(entry, ShardId(at as u32), shard));
        }
    }
    if let Some(map) = map {
        check_map(map, &shards, |name, file| {
            holder.get(name).is_some_and(|&at| shards[at].name == file)
        })?;
    }
    catalog.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(catalog)
}

pub(super) fn of_dcp_shards(
    mut shards: Vec<ShardHeader>,
    map: Option<&WeightMap>,
) -> Result<Catalog, Fault> {
    sort_shards(&mut shards);
    let mut catalog = empty_catalog(&shards);
    let mut tensors: BTreeMap<&str, Vec<(&Entry, Piece)>> = BTreeMap::new();
    for (at, shard) in shards.iter().enumerate() {
        let offsets = dcp::offsets(&shard.header).map_err(|f| f.in_file(&shard.name))?;
        for (entry, offset) in shard.header.tensors.iter().zip(offsets) {
            let piece = Piece { offset, ..whole_piece(entry, ShardId(at as u32), shard) };
            tensors.entry(&entry.name).or_default().push((entry, piece));
        }
    }
    if let Some(map) = map {
        let held: Vec<BTreeSet<&str>> = shards
            .iter()
            .map(|shard| shard.header.tensors.iter().map(|e| e.name.as_str()).collect())
            .collect();
        check_map(map, &shards, |name, file| {
            let at = shards.iter().position(|shard| shard.name == file);
            at.is_some_and(|at| held[at].contains(name))
        })?;
    }
    let shard_name = |id: ShardId| shards[id.0 as usize].name.as_str();
    for (name, found) in tensors {
        let tensor = coverage::prove(name, found, shard_name).map_err(|f| f.tensor(name))?;
        catalog.tensors.push(tensor);
    }
    Ok(catalog)
}

/// Refuses a weight map that names a shard or a tensor that is not there.
fn check_map(
    map: &WeightMap,
    shards: &[ShardHeader],
    holds: impl Fn(&str, &str) -> bool,
) -> Result<(), Fault> {
    let files: BTreeSet<&str> = shards.iter().map(|shard| shard.name.as_str()).collect();
    for (name, file) in &map.shard_of {
        if !files.contains(file.as_str()) {
            let message =
                format!("the weight map sends it to {file}, which is no shard of this set");
            return Err(Fault::new(Class::ShardMissing, message).tensor(name).in_file(file));
        }
        if holds(name, file) {
            continue;
        }
        let elsewhere = shards
            .iter()
            .filter(|shard| shard.header.tensors.iter().any(|entry| entry.name == *name))
            .map(|shard| shard.name.as_str());
        let elsewhere = named_some(elsewhere);
        let hint = if elsewhere.is_empty() {
            "no shard of the set holds it".to_owned()
        } else {
            format!("it lies in {elsewhere}")
        };
        let message = format!("the weight map sends it to {file}, which does not hold it; {hint}");
        return Err(Fault::new(Class::TensorMissing, message).tensor(name).in_file(file));
    }
    Ok(())
}

fn sort_shards(shards: &mut [ShardHeader]) {
    shards.sort_by(|a, b| natural_cmp(&a.name, &b.name));
}

/// A catalog with the shards and merged metadata, still without tensors.
fn empty_catalog(shards: &[ShardHeader]) -> Catalog {
    let mut metadata: BTreeMap<String, String> = BTreeMap::new();
    let mut notes = Vec::new();
    for shard in shards.iter() {
        for (key, value) in shard.header.metadata.iter().flatten() {
            if key == dcp::SHARDING_INFO || key == dcp::VERSION {
                continue;
            }
            match metadata.get(key) {
                None => {
                    metadata.insert(key.clone(), value.clone());
                }
                Some(first) if first != value => note(&mut notes, || {
                    let (key, file) = (quoted(key), &shard.name);
                    format!("metadata {key} differs in {file}; the first shard's value is kept")
                }),
                Some(_) => {}
            }
        }
    }
    let shards = shards
        .iter()
        .map(|shard| Shard {
            name: shard.name.clone(),
            file_len: shard.file_len,
            data_start: shard.header.data_start(),
        })
        .collect();
    Catalog { shards, tensors: Vec::new(), metadata, notes }
}

fn note(notes: &mut Vec<String>, line: impl FnOnce() -> String) {
    if notes.len() < NOTES_MAX {
        notes.push(line());
    }
}

fn whole_piece(entry: &Entry, id: ShardId, shard: &ShardHeader) -> Piece {
    // In range: the header was validated against the length of its file.
    let start = shard.header.data_start();
    Piece {
        shard: id,
        range: start + entry.data_offsets.start..start + entry.data_offsets.end,
        offset: vec![0; entry.shape.len()],
        shape: entry.shape.clone(),
    }
}

fn whole(entry: &Entry, id: ShardId, shard: &ShardHeader) -> Tensor {
    Tensor {
        name: entry.name.clone(),
        dtype: entry.dtype,
        shape: entry.shape.clone(),
        len: entry.data_offsets.end - entry.data_offsets.start,
        pieces: vec![whole_piece(entry, id, shard)],
        replicas: Vec::new(),
    }
}
