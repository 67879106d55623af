//! From the headers of the shards of one set to its catalog.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::coverage::{self, Found};
use super::tensors::{Builder, Cut, ROWS_MAX};
use super::{Catalog, Shard, ShardHeader, ShardId, named_some};
use crate::error::{Class, Fault, quoted};
use crate::format::dcp::{self, Placement};
use crate::format::names::natural_cmp;
use crate::format::safetensors::Entry;
use crate::format::weight_map::WeightMap;

/// Lines of one kind kept in the notes of a catalog.
const NOTES_MAX: usize = 20;

pub(super) fn of_whole_tensors(
    shards: &[&ShardHeader],
    map: Option<&WeightMap>,
) -> Result<Catalog, Fault> {
    let shards = sorted(shards);
    let mut catalog = empty_catalog(&shards)?;
    let mut kept: Vec<(&Entry, usize)> = Vec::new();
    let listed = |name: &str| map.and_then(|map| map.shard_of.get(name));
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
            kept.push((entry, at));
        }
    }
    kept.sort_unstable_by(|a, b| (&a.0.name, a.1).cmp(&(&b.0.name, b.1)));
    if let Some([(entry, first), (_, second)]) =
        kept.windows(2).find(|pair| pair[0].0.name == pair[1].0.name)
    {
        let (first, second) = (&shards[*first].name, &shards[*second].name);
        let message = format!("lies in {first} and in {second}");
        let fault = Fault::new(Class::DuplicateTensor, message);
        return Err(fault.tensor(&entry.name).in_file(second));
    }
    if let Some(map) = map {
        check_map(
            map,
            &shards,
            |name, file| {
                let at = kept.binary_search_by(|(entry, _)| entry.name.as_str().cmp(name));
                at.is_ok_and(|at| shards[kept[at].1].name == file)
            },
            |name, at| shards[at].header.tensors.iter().any(|entry| entry.name == name),
        )?;
    }
    let mut tensors = Builder::default();
    for (entry, at) in kept {
        // In range: the header was validated against the length of its file.
        let start = shards[at].header.data_start() + entry.data_offsets.start;
        tensors.push_whole(&entry.name, entry.dtype, &entry.shape, (ShardId(at as u32), start));
    }
    catalog.columns = Arc::new(tensors.finish());
    catalog.shapes_recorded = shards.iter().all(|shard| dcp::records_shapes(&shard.header));
    Ok(catalog)
}

pub(super) fn of_dcp_shards(
    shards: &[&ShardHeader],
    map: Option<&WeightMap>,
) -> Result<Catalog, Fault> {
    let shards = sorted(shards);
    let mut catalog = empty_catalog(&shards)?;
    let placements = shards
        .iter()
        .map(|shard| dcp::placements(&shard.header).map_err(|fault| fault.in_file(&shard.name)))
        .collect::<Result<Vec<_>, _>>()?;
    check_names(&shards, &placements)?;
    let mut tensors: BTreeMap<&str, Vec<Found>> = BTreeMap::new();
    for (at, (shard, places)) in shards.iter().zip(&placements).enumerate() {
        for (entry, place) in shard.header.tensors.iter().zip(places) {
            // In range: the header was validated against the length of its file.
            let start = shard.header.data_start();
            let range = start + entry.data_offsets.start..start + entry.data_offsets.end;
            let (offset, shape) = (place.offset.clone(), entry.shape.clone());
            let cut = Cut { shard: ShardId(at as u32), range, offset, shape };
            let whole_shape = place.whole_shape.clone();
            let found = Found { dtype: entry.dtype, cut, whole_shape };
            tensors.entry(name_of(entry, place)).or_default().push(found);
        }
    }
    if let Some(map) = map {
        let held = shards.iter().zip(&placements).map(|(shard, places)| {
            let entries = shard.header.tensors.iter().zip(places);
            entries.map(|(entry, place)| name_of(entry, place)).collect()
        });
        let held: Vec<BTreeSet<&str>> = held.collect();
        let lies_in = |name: &str, at: usize| held[at].contains(name);
        let holds = |name: &str, file: &str| {
            let at = shards.iter().position(|shard| shard.name == file);
            at.is_some_and(|at| lies_in(name, at))
        };
        check_map(map, &shards, holds, lies_in)?;
    }
    let shard_name = |id: ShardId| shards[id.0 as usize].name.as_str();
    let mut columns = Builder::default();
    let mut shapes_recorded = !tensors.is_empty();
    for (name, found) in tensors {
        let tensor = coverage::prove(found, shard_name).map_err(|f| f.tensor(name))?;
        shapes_recorded &= tensor.shape_recorded;
        columns.push(name, tensor.dtype, &tensor.shape, &tensor.pieces, &tensor.replicas);
    }
    catalog.columns = Arc::new(columns.finish());
    catalog.shapes_recorded = shapes_recorded;
    Ok(catalog)
}

/// The name of the tensor that `entry` is a piece of.
fn name_of<'a>(entry: &'a Entry, place: &'a Placement) -> &'a str {
    place.logical_name.as_deref().unwrap_or(&entry.name)
}

/// The beginning of a name that ends in a number and its separator.
fn before_number(name: &str) -> Option<&str> {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    // A point separates the names of modules, of which many are numbers.
    (stem.len() < name.len() && !stem.ends_with('.')).then_some(stem)
}

/// Refuses an entry whose note has lost the name of its tensor: one that is numbered like the
/// pieces of a tensor, but stands for a tensor of its own.
fn check_names(shards: &[&ShardHeader], placements: &[Vec<Placement>]) -> Result<(), Fault> {
    let entries = || {
        let shards = shards.iter().zip(placements);
        shards.flat_map(|(shard, places)| {
            let entries = shard.header.tensors.iter().zip(places);
            entries.map(move |(entry, place)| (shard, entry, place))
        })
    };
    let mut pieces: HashMap<&str, &str> = HashMap::new();
    for (_, entry, place) in entries() {
        let whole = name_of(entry, place);
        let stem = before_number(&entry.name).filter(|stem| stem.starts_with(whole));
        if let Some(stem) = stem.filter(|_| whole != entry.name) {
            pieces.insert(stem, whole);
        }
    }
    if pieces.is_empty() {
        return Ok(());
    }
    for (shard, entry, _) in entries().filter(|(.., place)| place.logical_name.is_none()) {
        if let Some(whole) = before_number(&entry.name).and_then(|stem| pieces.get(stem)) {
            let whole = quoted(whole);
            let message = format!(
                "has no logical_fqn, but its name is one of those of the pieces of {whole}"
            );
            let fault = Fault::new(Class::DcpInfo, message);
            return Err(fault.tensor(&entry.name).in_file(&shard.name));
        }
    }
    Ok(())
}

/// Refuses a weight map that names a shard or a tensor that is not there. `holds` tells whether the
/// file of this name holds a tensor, `lies_in` the same of the shard at this position, and may be
/// slower.
fn check_map(
    map: &WeightMap,
    shards: &[&ShardHeader],
    holds: impl Fn(&str, &str) -> bool,
    lies_in: impl Fn(&str, usize) -> bool,
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
        let elsewhere = shards.iter().enumerate().filter(|(at, _)| lies_in(name, *at));
        let elsewhere = elsewhere.map(|(_, shard)| shard.name.as_str());
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

fn sorted<'a>(shards: &[&'a ShardHeader]) -> Vec<&'a ShardHeader> {
    let mut shards = shards.to_vec();
    shards.sort_by(|a, b| natural_cmp(&a.name, &b.name));
    shards
}

/// A catalog with the shards and merged metadata, still without tensors.
fn empty_catalog(shards: &[&ShardHeader]) -> Result<Catalog, Fault> {
    let entries = || shards.iter().flat_map(|shard| &shard.header.tensors);
    let numbers: usize = entries().map(|entry| 1 + 2 * entry.shape.len()).sum();
    if numbers > ROWS_MAX {
        let message = format!("{} tensors and pieces are too many", entries().count());
        return Err(Fault::new(Class::Overflow, message));
    }
    let mut metadata: Option<BTreeMap<String, String>> = None;
    let mut notes = Vec::new();
    for shard in shards.iter() {
        if shard.header.metadata.as_ref().is_some_and(BTreeMap::is_empty) {
            metadata.get_or_insert_default();
        }
        for (key, value) in shard.header.metadata.iter().flatten() {
            if key == dcp::SHARDING_INFO || key == dcp::VERSION {
                continue;
            }
            let metadata = metadata.get_or_insert_default();
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
    let shards = shards.iter().map(|shard| Shard::of(shard)).collect();
    let metadata = metadata.map(Arc::new);
    Ok(Catalog { shards, columns: Arc::default(), metadata, shapes_recorded: false, notes })
}

fn note(notes: &mut Vec<String>, line: impl FnOnce() -> String) {
    if notes.len() < NOTES_MAX {
        notes.push(line());
    }
}
