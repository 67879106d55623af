//! Builds the catalog of a set from the headers of its shards.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::coverage::{self, Covered, FoundPiece};
use super::heads::{HeadTensors, Stored};
use super::name_order::{self, Ref};
use super::tensors::{BoxSlice, Builder, ROWS_MAX};
use super::{Catalog, Shard, ShardHeader, ShardId, named_some};
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::dcp;
use crate::format::names::{self, natural_cmp};
use crate::format::weight_map::{ShardOf, WeightMap};

/// Maximum number of notes of a catalog.
const NOTES_MAX: usize = 20;

pub(super) fn of_whole_tensors(
    shards: &[&ShardHeader],
    map: Option<&WeightMap>,
) -> Result<Catalog, Fault> {
    let shards = sorted(shards);
    for shard in &shards {
        check_whole(shard).map_err(|fault| fault.in_file(&shard.name))?;
    }
    let mut catalog = empty_catalog(&shards)?;
    let tensors: Vec<HeadTensors<'_>> = shards.iter().map(|shard| shard.header.tensors()).collect();
    let name = |one: &Ref| tensors[one.shard as usize].name(one.index as usize);
    let mut refs = refs_by_name(&tensors, &name);
    let wrong = map.and_then(|map| {
        let listed = Listed::new(map, &shards);
        listed.settle(&mut refs, &name, &mut catalog.notes)
    });
    if let Some([first, second]) = refs.windows(2).find(|pair| name(&pair[0]) == name(&pair[1])) {
        let [first_file, second_file] = [first, second].map(|one| &shards[one.shard as usize].name);
        let message = format!("lies in {first_file} and in {second_file}");
        let fault = ErrorKind::DuplicateTensor.fault(message);
        return Err(fault.tensor(name(first)).in_file(second_file));
    }
    wrong.map_or(Ok(()), Err)?;
    let mut columns = Builder::with_room(refs.iter().map(|one| name(one).len()));
    for one in &refs {
        let stored = tensors[one.shard as usize].get(one.index as usize);
        columns.push_stored(stored, ShardId(one.shard));
    }
    catalog.columns = Arc::new(columns.finish());
    catalog.shapes_recorded = shards.iter().all(|shard| shard.header.records_shapes());
    Ok(catalog)
}

pub(super) fn of_dcp_shards(
    shards: &[&ShardHeader],
    map: Option<&WeightMap>,
) -> Result<Catalog, Fault> {
    let shards = sorted(shards);
    let mut catalog = empty_catalog(&shards)?;
    let pieces = shards
        .iter()
        .map(|shard| shard.header.pieces().map_err(|fault| fault.in_file(&shard.name)))
        .collect::<Result<Vec<_>, _>>()?;
    check_names(&shards, &pieces)?;
    let name = |one: &Ref| pieces[one.shard as usize].tensor_name(one.index as usize);
    let refs = refs_by_name(&pieces, &name);
    if let Some(map) = map {
        let wrong = Listed::new(map, &shards).first_wrong(&refs, &name);
        wrong.map_or(Ok(()), Err)?;
    }
    let shard_name = |id: ShardId| shards[id.0 as usize].name.as_str();
    let by_tensor = || refs.chunk_by(|a, b| name(a) == name(b));
    let mut columns = Builder::with_room(by_tensor().map(|same| name(&same[0]).len()));
    let mut shapes_recorded = !refs.is_empty();
    for same in by_tensor() {
        if let Some((whole, recorded)) = alone(same, &pieces) {
            let whole = Stored { name: name(&same[0]), ..whole };
            columns.push_stored(whole, ShardId(same[0].shard));
            shapes_recorded &= recorded;
            continue;
        }
        let found = same.iter().map(|one| found(one, &pieces)).collect();
        let tensor =
            coverage::prove(found, shard_name).map_err(|fault| fault.tensor(name(&same[0])))?;
        shapes_recorded &= tensor.shape_recorded;
        let Covered { facts, shape, pieces, replicas, .. } = &tensor;
        columns.push(name(&same[0]), *facts, shape, pieces, replicas);
    }
    catalog.columns = Arc::new(columns.finish());
    catalog.shapes_recorded = shapes_recorded;
    Ok(catalog)
}

pub(super) fn of_rank_files(shards: &[&ShardHeader]) -> Result<Catalog, Fault> {
    if let [alone] = shards
        && alone.header.rank.is_none()
    {
        return of_whole_tensors(shards, None);
    }
    for shard in shards {
        check_rank(shard, shards[0], shards.len()).map_err(|fault| fault.in_file(&shard.name))?;
    }
    let shards = sorted(shards);
    let first = names_in(shards[0]);
    for shard in &shards[1..] {
        let own = names_in(shard);
        if let Some(name) = first.symmetric_difference(&own).next() {
            let (there, missing) =
                if own.contains(name) { (*shard, shards[0]) } else { (shards[0], *shard) };
            let message = format!("is in {}, but not in {}", there.name, missing.name);
            let fault = ErrorKind::TensorMissing.fault(message);
            return Err(fault.tensor(name).in_file(&missing.name));
        }
    }
    let catalog = of_dcp_shards(&shards, None)?;
    check_replicas(&shards)?;
    Ok(catalog)
}

/// Compares the CRCs of the bytes that several ranks have for the same box of a tensor. Different CRCs are an error.
/// Equal CRCs are no proof, so `verify` compares the bytes.
fn check_replicas(shards: &[&ShardHeader]) -> Result<(), Fault> {
    let mut known = HashMap::new();
    for shard in shards {
        let tensors = shard.header.pieces().map_err(|fault| fault.in_file(&shard.name))?;
        let crcs = shard.header.crcs.iter().enumerate().filter(|(_, crc)| **crc != 0);
        for (index, &crc) in crcs {
            let (stored, place) = (tensors.get(index), tensors.place(index));
            let key = (stored.name, place.offset, stored.shape);
            let (first, of) = *known.entry(key).or_insert((crc, shard.name.as_str()));
            if first != crc {
                let message = format!(
                    "its bytes differ from those in {of}, by the CRCs {crc:08x} and {first:08x}: it is \
                     not the same on all ranks, as it has to be; save it again, or restore the files"
                );
                let fault = ErrorKind::DcpOverlap.fault(message);
                return Err(fault.tensor(stored.name).in_file(&shard.name));
            }
        }
    }
    Ok(())
}

/// Refuses the file of a single rank that has parts of tensors, or ranges of their elements.
fn check_whole(shard: &ShardHeader) -> Result<(), Fault> {
    shard.header.check_slices()?;
    if shard.header.is_zero_part() {
        let message = "is one of the files of DeepSpeed ZeRO, of which each has ranges of the weights of \
                       the model; name the folder of all files";
        return Err(ErrorKind::TensorMissing.fault(message));
    }
    let Some(of) = shard.header.rank.filter(|_| !shard.header.is_whole()) else { return Ok(()) };
    Err(ErrorKind::ShardMissing.fault(format!(
        "holds parts of tensors, as rank {} of {}; name the files of all ranks \
         NAME_world_size_N_rank_R.pt in one folder, and name that",
        of.rank, of.ranks
    )))
}

/// The names of the tensors of a shard.
fn names_in(shard: &ShardHeader) -> BTreeSet<&str> {
    let tensors = shard.header.tensors();
    (0..tensors.len()).map(|index| tensors.name(index)).collect()
}

/// Compares the rank in the name of a file with the rank in its content. `count` is the number of files. `first` is
/// the first file, and all files must have the same number of ranks.
fn check_rank(shard: &ShardHeader, first: &ShardHeader, count: usize) -> Result<(), Fault> {
    shard.header.check_slices()?;
    let named = names::rank_file(&shard.name);
    let Some(found) = shard.header.rank else {
        let message = "has no tensor of several ranks, so that nothing tells which part of its tensors it \
                       holds; make one file of the ranks' files with the tools of the framework that \
                       saved them";
        return Err(ErrorKind::HeaderDecode.fault(message));
    };
    let total = named.as_ref().map_or(0, |named| named.total);
    let fits = named.is_some_and(|named| named.number == found.rank);
    let others = first.header.rank.filter(|first| total == 0 && first.ranks != found.ranks);
    if let Some(other) = others {
        return Err(ErrorKind::ShardMissing.fault(format!(
            "is of one of {} ranks by its tensors, {} of one of {}; remove the files of the other run",
            found.ranks, first.name, other.ranks
        )));
    }
    if fits && total == 0 && !(count as u64).is_multiple_of(found.ranks) {
        return Err(ErrorKind::ShardMissing.fault(format!(
            "is of rank {} of {} by its tensors, and files of {count} ranks are here; bring the files of \
             all ranks to one folder",
            found.rank, found.ranks
        )));
    }
    if fits && total.is_multiple_of(found.ranks) {
        return Ok(());
    }
    Err(ErrorKind::ShardMissing.fault(format!(
        "is of rank {} of {} by its tensors, not by its name; restore the files of this checkpoint",
        found.rank, found.ranks
    )))
}

/// All tensors or pieces of the shards, sorted by name. Entries of equal names are sorted by shard,
/// and then by their index in the shard.
fn refs_by_name<'a>(tensors: &[HeadTensors<'a>], name: &impl Fn(&Ref) -> &'a str) -> Vec<Ref> {
    let mut refs = Vec::with_capacity(tensors.iter().map(HeadTensors::len).sum());
    for (shard, tensors) in tensors.iter().enumerate() {
        refs.extend((0..tensors.len()).map(|index| Ref::new(shard, index)));
    }
    name_order::sort(&mut refs, &|one| name(one).as_bytes(), 0);
    refs
}

/// The only piece of a tensor, if this piece is the whole tensor. Also returns whether the note
/// records the whole shape. `None` if the tensor has several pieces, or if the piece is only a part
/// of the tensor.
fn alone<'a>(same: &[Ref], pieces: &[HeadTensors<'a>]) -> Option<(Stored<'a>, bool)> {
    let [one] = same else { return None };
    let (pieces, index) = (&pieces[one.shard as usize], one.index as usize);
    let (stored, place) = (pieces.get(index), pieces.place(index));
    let whole = place.offset.iter().all(|&offset| offset == 0)
        && place.whole_shape.is_none_or(|shape| shape == stored.shape);
    whole.then_some((stored, place.whole_shape.is_some()))
}

fn found(one: &Ref, pieces: &[HeadTensors<'_>]) -> FoundPiece {
    let (pieces, index) = (&pieces[one.shard as usize], one.index as usize);
    let (stored, place) = (pieces.get(index), pieces.place(index));
    let box_id = BoxSlice::of(stored, ShardId(one.shard), place.offset);
    let whole_shape = place.whole_shape.map(<[u64]>::to_vec);
    FoundPiece { facts: stored.facts, box_id, whole_shape }
}

/// The part of a name before the number at its end. `None` if there is no such number.
fn before_number(name: &str) -> Option<&str> {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    // A dot separates the names of modules, and many modules have a number as their name. A number
    // after a dot is therefore not the number of a piece.
    (stem.len() < name.len() && !stem.ends_with('.')).then_some(stem)
}

/// Refuses an entry whose sharding note has lost the name of the tensor. The name of such an entry
/// ends in a number, like the names of the pieces of a tensor. Without the name in the note, the
/// entry would count as a separate tensor.
fn check_names(shards: &[&ShardHeader], pieces: &[HeadTensors<'_>]) -> Result<(), Fault> {
    let entries = || {
        let shards = shards.iter().zip(pieces);
        shards.flat_map(|(shard, pieces)| {
            (0..pieces.len()).map(move |index| {
                (
                    shard,
                    pieces.name(index),
                    pieces.tensor_name(index),
                    pieces.place(index).logical_name,
                )
            })
        })
    };
    let mut numbered: HashMap<&str, &str> = HashMap::new();
    for (_, name, whole, _) in entries().filter(|(_, name, whole, _)| name != whole) {
        if let Some(stem) = before_number(name).filter(|stem| stem.starts_with(whole)) {
            numbered.insert(stem, whole);
        }
    }
    if numbered.is_empty() {
        return Ok(());
    }
    for (shard, name, ..) in entries().filter(|(.., logical_name)| logical_name.is_none()) {
        if let Some(whole) = before_number(name).and_then(|stem| numbered.get(stem)) {
            let whole = quoted(whole);
            let message = format!(
                "has no logical_fqn, but its name is one of those of the pieces of {whole}"
            );
            return Err(ErrorKind::DcpInfo.fault(message).tensor(name).in_file(&shard.name));
        }
    }
    Ok(())
}

/// A weight map that belongs to the shards.
struct Listed<'a> {
    map: &'a ShardOf,
    shards: &'a [&'a ShardHeader],
    /// For each file that the weight map lists, the index of its shard. `None` if there is no such shard.
    shard_of_file: Vec<Option<u32>>,
}

impl<'a> Listed<'a> {
    fn new(map: &'a WeightMap, shards: &'a [&'a ShardHeader]) -> Listed<'a> {
        let by_name: HashMap<&str, u32> =
            shards.iter().enumerate().map(|(index, s)| (s.name.as_str(), index as u32)).collect();
        let map = &map.shard_of;
        let files = map.files().iter();
        let shard_of_file = files.map(|file| by_name.get(file.as_str()).copied()).collect();
        Listed { map, shards, shard_of_file }
    }

    /// Removes from `refs` the tensors that the weight map assigns to another shard. Adds a note for each removed
    /// tensor, and for each tensor that the weight map does not list. `refs` are sorted by name. Returns the first
    /// error of the weight map.
    fn settle<'n>(
        &self,
        refs: &mut Vec<Ref>,
        name: &impl Fn(&Ref) -> &'n str,
        notes: &mut Vec<String>,
    ) -> Option<Fault> {
        let wrong = self.first_wrong(refs, name);
        let mut line = 0;
        // Index of the shard, index of the tensor in the shard, and the line of the weight map that lists the tensor.
        let mut odd: Vec<(u32, u32, Option<usize>)> = Vec::new();
        refs.retain(|one| {
            let own = name(one);
            while line < self.map.len() && self.map.get(line).0 < own {
                line += 1;
            }
            let listed = (line < self.map.len() && self.map.get(line).0 == own).then_some(line);
            let shard = listed.map(|line| self.shard_of_file[self.map.file_number(line)]);
            if shard != Some(Some(one.shard)) {
                odd.push((one.shard, one.index, listed));
            }
            shard.is_none_or(|shard| shard == Some(one.shard))
        });
        odd.sort_unstable();
        for (shard, index, listed) in odd.into_iter().take(NOTES_MAX) {
            let shard = self.shards[shard as usize];
            let (name, file) = (quoted(shard.header.tensors().name(index as usize)), &shard.name);
            note(notes, || match listed.map(|line| self.map.get(line).1) {
                Some(listed) => {
                    format!("{name} also lies in {file}; the weight map says {listed}")
                }
                None => format!("{name} in {file} is not in the weight map; it is kept"),
            });
        }
        wrong
    }

    /// The error of the first line of the weight map, in the order of tensor names, whose shard or tensor does not
    /// exist. `refs` are all tensors, sorted by name.
    fn first_wrong<'n>(&self, refs: &[Ref], name: &impl Fn(&Ref) -> &'n str) -> Option<Fault> {
        let mut rest = refs;
        for (line, (tensor, file)) in self.map.iter().enumerate() {
            let Some(shard) = self.shard_of_file[self.map.file_number(line)] else {
                let message =
                    format!("the weight map maps it to {file}, which is no shard of this set");
                let fault = ErrorKind::ShardMissing.fault(message);
                return Some(fault.tensor(tensor).in_file(file));
            };
            let before = rest.iter().take_while(|one| name(one) < tensor).count();
            rest = &rest[before..];
            let mut holders = rest.iter().take_while(|one| name(one) == tensor);
            if holders.clone().any(|one| one.shard == shard) {
                continue;
            }
            let mut elsewhere: Vec<u32> = holders.by_ref().map(|one| one.shard).collect();
            elsewhere.dedup();
            let names = elsewhere.iter().map(|&index| self.shards[index as usize].name.as_str());
            let elsewhere = named_some(names);
            let hint = if elsewhere.is_empty() {
                "no shard of the set holds it".to_owned()
            } else {
                format!("it lies in {elsewhere}")
            };
            let message =
                format!("the weight map maps it to {file}, which does not hold it; {hint}");
            return Some(ErrorKind::TensorMissing.fault(message).tensor(tensor).in_file(file));
        }
        None
    }
}

pub(super) fn sorted<'a>(shards: &[&'a ShardHeader]) -> Vec<&'a ShardHeader> {
    let mut shards = shards.to_vec();
    shards.sort_by(|a, b| natural_cmp(&a.name, &b.name));
    shards
}

/// A catalog with shards and merged metadata, to which tensors are added later.
pub(super) fn empty_catalog(shards: &[&ShardHeader]) -> Result<Catalog, Fault> {
    let tensors = || shards.iter().map(|shard| shard.header.tensors());
    let numbers = tensors()
        .map(|t| (0..t.len()).map(|index| 1 + 2 * t.rank(index)).sum::<usize>())
        .sum::<usize>();
    if numbers > ROWS_MAX {
        let count: usize = tensors().map(|tensors| tensors.len()).sum();
        return Err(ErrorKind::Overflow.fault(format!("{count} tensors and pieces are too many")));
    }
    let mut notes = Vec::new();
    for shard in shards {
        if let Some(offset) = shard.header.next_file {
            note(&mut notes, || {
                let file = &shard.name;
                format!(
                    "{file}: another tensorizer file begins at its byte {offset}, which is not shown"
                )
            });
        }
        if let Some(left_out) = &shard.header.left_out {
            note(&mut notes, || format!("{}: {left_out}", shard.name));
        }
    }
    let metadata = joined_metadata(shards, &mut notes);
    Ok(Catalog {
        shards: shards.iter().map(|shard| Shard::of(shard)).collect(),
        columns: Arc::default(),
        metadata: metadata.map(Arc::new),
        shapes_recorded: false,
        notes,
    })
}

/// The metadata of all shards. If shards have different values for a key, the first value is used.
/// `None` if no shard has metadata.
fn joined_metadata(
    shards: &[&ShardHeader],
    notes: &mut Vec<String>,
) -> Option<BTreeMap<String, String>> {
    let mut metadata: Option<BTreeMap<String, String>> = None;
    for shard in shards {
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
                Some(first) if first != value => note(notes, || {
                    let (key, file) = (quoted(key), &shard.name);
                    format!("metadata {key} differs in {file}; the first shard's value is kept")
                }),
                Some(_) => {}
            }
        }
    }
    metadata
}

fn note(notes: &mut Vec<String>, line: impl FnOnce() -> String) {
    if notes.len() < NOTES_MAX {
        notes.push(line());
    }
}
