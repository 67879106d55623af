//! Finds the sets of files in one folder, and decides which set is shown under each name.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use crate::catalog::Heads;
use crate::error::{Error, ErrorKind, Fault, Result};
use crate::format::names::{self, Numbered};
use crate::format::weight_map::{WEIGHT_MAP_LEN_MAX, WeightMap};
use crate::format::{InputFormat, OutputFormat, pickle};
use crate::open_options::{OpenOptions, Prefer, ZeroWeights};
use crate::store::{Store, resolve::Unusable};
use crate::sync::Mutex;
use crate::version::FileId;

use super::deepspeed::{self, StateFiles};
use super::distcp::open_distributed;
use super::folder::{File, Folder};
use super::header_memory::{Reserved, admitted, folder_max, too_many};
use super::load::{FilePlace, OpenShard, ReadWith, Unread, named_in, open_links, read_listed_text};
use super::openers::map_files;

words! {
    /// The reason why the files of a set belong together, in the order of precedence.
    ///
    /// ```
    /// use tensorfs::{Checkpoint, SetKind};
    ///
    /// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
    /// assert_eq!(checkpoint.kind, SetKind::WeightMap);
    /// # Ok::<(), tensorfs::Error>(())
    /// ```
    #[derive(PartialOrd, Ord)]
    pub enum SetKind {
        /// Shards whose sharding notes say which part of each tensor they hold.
        Dcp = "dcp",
        /// Shards that a weight map lists.
        WeightMap = "weight_map",
        /// Shards whose names have a number and the total.
        Numbered = "numbered",
        /// One file.
        Single = "single",
        /// One file in the bintensors format.
        Bintensors = "bintensors",
        /// One file in the tensorizer format.
        Tensorizer = "tensorizer",
        /// One file of `torch.save`.
        Torch = "torch",
        /// The files that the ranks of a training saved with `torch.save`.
        Ranks = "ranks",
        /// The `.distcp` files that the `.metadata` of a distributed checkpoint of torch names.
        Distributed = "distributed",
        /// A checkpoint of DeepSpeed.
        DeepSpeed = "deepspeed",
    }
}

/// The kinds of sets that are one file, with the format of the file.
const ONE_FILE: [(SetKind, InputFormat); 4] = [
    (SetKind::Single, InputFormat::Safetensors),
    (SetKind::Bintensors, InputFormat::Bintensors),
    (SetKind::Tensorizer, InputFormat::Tensorizer),
    (SetKind::Torch, InputFormat::Torch),
];

impl SetKind {
    /// The kind of a set that consists of one file of this format.
    pub(super) fn of_file(format: InputFormat) -> SetKind {
        let found = ONE_FILE.iter().find(|(_, of_file)| *of_file == format);
        found.expect("ONE_FILE has every format").0
    }

    /// The format of the file, if a set of this kind is one file.
    pub(super) fn one_file_format(self) -> Option<InputFormat> {
        ONE_FILE.iter().find(|(kind, _)| *kind == self).map(|(_, format)| *format)
    }

    /// Whether a set of this kind is one file, in any format.
    pub(super) fn is_one_file(self) -> bool {
        self.one_file_format().is_some()
    }

    /// Whether a set of this kind is one file, in a format that is shown as another format by default.
    pub(super) fn is_converted(self) -> bool {
        self.one_file_format().is_some_and(|format| format != InputFormat::Safetensors)
    }

    /// The format of a file called `name` in a set of this kind.
    pub(super) fn format_of(self, name: &str) -> InputFormat {
        match self {
            SetKind::Ranks | SetKind::Distributed | SetKind::DeepSpeed => InputFormat::Torch,
            SetKind::Dcp => InputFormat::Safetensors,
            SetKind::WeightMap | SetKind::Numbered => InputFormat::of_weights(name),
            SetKind::Single | SetKind::Bintensors | SetKind::Tensorizer | SetKind::Torch => {
                self.one_file_format().unwrap_or(InputFormat::Safetensors)
            }
        }
    }

    /// Whether a set of this kind, shown in `format`, is one file that is served unchanged.
    pub(super) fn stands_as(self, format: OutputFormat) -> bool {
        self == SetKind::Single && format == OutputFormat::Safetensors
    }
}

/// The weight files of a folder, by name: each is open, or has the reason why it cannot be opened.
pub(super) type Weights = BTreeMap<String, Result<OpenShard>>;

/// Whether the file has a sharding note.
pub(super) fn is_noted(loaded: &OpenShard) -> bool {
    loaded.shard.header.is_noted()
}

/// A set of files that together form one checkpoint, before the proof.
pub(super) struct Candidate {
    /// Name of the file under which it is shown.
    pub(super) output: String,
    pub(super) kind: SetKind,
    /// Names of its weight files.
    pub(super) members: BTreeSet<String>,
    /// Names that no other set may show: its weight maps, and the files that they list.
    pub(super) claims: BTreeSet<String>,
    /// Its weight map: the name of the file and its content.
    pub(super) map: Option<(String, WeightMap)>,
    /// The reason for a refusal that is known before its shards are examined.
    pub(super) refused: Option<Error>,
}

/// The sets of a folder.
pub(super) struct Discovered {
    /// Sets that are shown if their proof succeeds.
    pub(super) winners: Vec<Candidate>,
    /// Sets that are not shown, because another set is shown under their name.
    pub(super) losers: Vec<Candidate>,
    /// A line for each loser, with the name, the winner and the loser.
    pub(super) notes: Vec<String>,
}

/// Opens the weight files of `folder`. If `only` is given, the file of this name counts as a weight file even without a
/// name of weight files, unless it is a weight map. The first result also has the names of weight files that lead to no
/// file, each with the reason. The second result is the memory reservation for the headers.
pub(super) fn open_weights(
    folder: &Folder,
    only: Option<&str>,
    options: &OpenOptions,
) -> (Weights, Reserved) {
    let states = only
        .is_none()
        .then(|| folder.state_files())
        .flatten()
        .map(|states| states.members(options.zero))
        .unwrap_or_default();
    let named = folder.files.iter().filter_map(|file| Some((file.name.to_str()?, file)));
    let reads_torch = folder.reads_torch(only);
    // The files of a distributed checkpoint are opened later, with the places in `.metadata`.
    let is_distributed = folder.reads_distcp(only);
    let is_read_alone =
        |name: &str| !(names::is_weight_map(name) || is_distributed && names::is_of_distcp(name));
    let may_be_with = folder.may_be_with(only);
    let files: Vec<(&str, &File)> = named
        .filter(|(name, file)| {
            (names::is_weights(name) && may_be_with(name))
                || (only == Some(*name) && is_read_alone(name))
                || (reads_torch
                    && (states.contains(*name)
                        || (names::is_torch(name)
                            && may_be_with(name)
                            && is_torch_file(name, file))))
        })
        .collect();
    let (mut weights, mut reserved) =
        open_headers(&folder.path, &files, folder_max(), ReadWith::of(options));
    if is_distributed {
        let distributed = open_distributed(folder, options.state);
        weights.extend(distributed.files);
        reserved.add(distributed.reserved);
    }
    let misfits = weight_misfits(folder).map(|(name, why)| {
        let message = format!("is {}; {}", why.text(), why.advice());
        let fault = ErrorKind::ShardMissing.fault(message).in_file(name);
        (name.to_owned(), Err(Error::refused(&folder.path, fault)))
    });
    weights.extend(misfits);
    (weights, reserved)
}

/// Whether a file is read as one of `torch.save`. Many programs write other files with the same suffixes, so the
/// first bytes are checked. Numbered files and rank files are read in any case.
fn is_torch_file(name: &str, file: &File) -> bool {
    if names::numbered_torch(name).is_some() || names::rank_file(name).is_some() {
        return true;
    }
    let mut first = [0; pickle::FIRST_LEN];
    let source = file.open_listed();
    source.is_ok_and(|source| {
        source.read_exact_at(&mut first, 0).is_ok() && pickle::may_be_torch(&first)
    })
}

/// Opens weight files and reads their headers. Reads one header per inode, and at most `max` bytes of headers in all.
fn open_headers(
    folder: &Path,
    files: &[(&str, &File)],
    max: u64,
    with: ReadWith<'_>,
) -> (Weights, Reserved) {
    // For each file, all its names and their places.
    let mut links: Vec<Vec<(&str, FilePlace<'_>)>> = Vec::new();
    let mut first: Vec<(&str, &File)> = Vec::new();
    let mut by_inode: HashMap<FileId, usize> = HashMap::new();
    for (name, file) in files {
        let index = *by_inode.entry(file.version.file()).or_insert(links.len());
        if index == links.len() {
            links.push(Vec::new());
            first.push((*name, *file));
        }
        links[index].push((name, (&file.store, &file.path)));
    }
    let numbers: Vec<usize> = (0..links.len()).collect();
    let open = |&index: &usize| {
        let (name, file) = first[index];
        (index, Unread::open_listed(name, file).map_err(|error| named_in(folder, name, error)))
    };
    let store = files.first().map_or(Store::LOCAL, |(_, file)| file.store.clone());
    let mut opened = map_files(&store, &numbers, open);
    // The files are sorted by name, so that every run refuses the same files if the headers exceed `max`.
    opened.sort_by_key(|(index, _)| *index);
    let len = |unread: &Result<Unread>| unread.as_ref().map_or(0, Unread::description_len);
    let lens: Vec<u64> = opened.iter().map(|(_, unread)| len(unread)).collect();
    let (count, sum) = admitted(&lens, max);
    let fault = too_many(lens.iter().fold(0, |sum, len| sum.saturating_add(*len)), max);
    let reserved = match Reserved::wait(folder, sum) {
        Ok(reserved) => reserved,
        Err(busy) => {
            let names = files.iter().map(|(name, _)| ((*name).to_owned(), Err(busy.copied())));
            return (names.collect(), Reserved::default());
        }
    };
    opened.truncate(count);
    let refused = links[count..].iter().flatten().map(|(name, _)| {
        let error = Error::refused(folder, fault.clone().in_file(name));
        ((*name).to_owned(), Err(error))
    });
    let mut weights: Weights = refused.collect();
    // Each file is in a lock, so that the thread that reads its header can take it out of the shared list.
    let to_read: Vec<_> =
        opened.into_iter().map(|(index, unread)| (index, Mutex::new(Some(unread)))).collect();
    let heads = Arc::new(Heads::without_notes());
    let read = |(index, unread): &(usize, Mutex<Option<Result<Unread>>>)| {
        let unread = unread.lock().take();
        match unread {
            Some(Ok(unread)) => open_links(&heads, folder, &links[*index], unread, with),
            Some(Err(error)) => {
                let names = links[*index].iter().map(|(name, _)| (*name).to_owned());
                names.map(|name| (name, Err(error.copied()))).collect()
            }
            None => Vec::new(),
        }
    };
    weights.extend(map_files(&store, &to_read, read).into_iter().flatten());
    (weights, reserved)
}

/// The names of weight files that lead to no file, with the reason.
fn weight_misfits(folder: &Folder) -> impl Iterator<Item = (&str, Unusable)> {
    let named =
        folder.misfits.iter().filter_map(|misfit| Some((misfit.name.to_str()?, misfit.why)));
    named.filter(|(name, _)| names::is_weights(name))
}

/// Finds the sets of `folder`, whose weight files are `weights`.
pub(super) fn discover(
    folder: &Folder,
    only: Option<&str>,
    weights: &Weights,
    options: &OpenOptions,
) -> Discovered {
    let mut found = Vec::new();
    let states = folder.state_files().filter(|_| only.is_none() && folder.reads_torch(None));
    found.extend(states.map(|states| deepspeed_set(folder, &states, options.zero)));
    let mut maps = read_maps(folder, only);
    let dcp_members = dcp_members(weights, &maps);
    if !dcp_members.is_empty() {
        found.push(dcp_set(folder, dcp_members, &mut maps));
    }
    found.extend(distcp_set(folder, weights));
    found.extend(maps.into_iter().map(|map| map_set(folder, map)));
    let claimed: BTreeSet<String> =
        found.iter().flat_map(|set| set.members.iter().chain(&set.claims).cloned()).collect();
    let free = || weights.keys().filter(|name| !claimed.contains(*name));
    found.extend(numbered_sets(folder, free()));
    let misfits: BTreeSet<&str> = weight_misfits(folder).map(|(name, _)| name).collect();
    let of_sets = found.len();
    let mut single: Vec<&String> = free().filter(|name| numbered(name).is_none()).collect();
    // A weight file name that leads to no file is a set of its own only if the folder has no other set.
    if of_sets > 0 || single.iter().any(|name| !misfits.contains(name.as_str())) {
        single.retain(|name| !misfits.contains(name.as_str()));
    }
    found.extend(single.into_iter().map(|name| Candidate {
        members: BTreeSet::from([name.clone()]),
        ..single_set(name, weights)
    }));
    settle_names(found, options.prefer)
}

/// The set of files of a checkpoint of DeepSpeed.
fn deepspeed_set(folder: &Folder, states: &StateFiles<'_>, zero: ZeroWeights) -> Candidate {
    let refused = states.fault(zero).map(|fault| Error::refused(&folder.path, fault));
    let (members, claims) = (states.members(zero), states.others());
    let output = names::whole(deepspeed::STEM);
    Candidate { members, claims, refused, ..Candidate::new(output, SetKind::DeepSpeed) }
}

/// The set for the single file called `name`. Its list of members is empty, and the caller fills it. If the file
/// cannot be read, its name decides about the format.
fn single_set(name: &str, weights: &Weights) -> Candidate {
    let read = weights.get(name).and_then(|loaded| Some(loaded.as_ref().ok()?.format));
    let format = read.unwrap_or_else(|| InputFormat::of_weights(name));
    let output = match format {
        InputFormat::Safetensors => None,
        InputFormat::Bintensors => names::bintensors_output(name),
        InputFormat::Tensorizer => Some(names::tensorizer_output(name)),
        InputFormat::Torch => Some(names::torch_output(name)),
    };
    Candidate::new(output.unwrap_or_else(|| name.to_owned()), SetKind::of_file(format))
}

impl Candidate {
    fn new(output: String, kind: SetKind) -> Candidate {
        let (members, claims) = (BTreeSet::new(), BTreeSet::new());
        Candidate { output, kind, members, claims, map: None, refused: None }
    }

    /// The format of its files.
    pub(super) fn format(&self) -> InputFormat {
        self.kind.format_of(self.members.first().map_or("", String::as_str))
    }

    /// The names of its weight files, its weight maps, and the other files that it claims.
    pub(super) fn files(&self) -> impl Iterator<Item = &String> {
        self.members.iter().chain(&self.claims)
    }
}

/// The weight files that hold pieces: files with the name of a DCP shard, and files with `DCP_SHARDING_INFO`. Savers
/// also write this note for whole tensors, with offsets of 0, into numbered files and into files of a weight map. If
/// no note in the folder is about a piece, such files keep the kind that their names indicate.
fn dcp_members(weights: &Weights, maps: &[MapFile]) -> BTreeSet<String> {
    let noted: Vec<(&String, bool)> = weights
        .iter()
        .filter(|(name, _)| !names::is_dcp_shard(name))
        .filter_map(|(name, loaded)| {
            let loaded = loaded.as_ref().ok()?;
            let noted = loaded.format == InputFormat::Safetensors && is_noted(loaded);
            noted.then(|| (name, loaded.shard.header.is_whole()))
        })
        .collect();
    let pieces = noted.iter().any(|(_, whole)| !whole);
    let named = |name: &String| {
        names::numbered(name).is_some() || maps.iter().any(|map| map.names.contains(name))
    };
    let by_note = noted.iter().map(|(name, _)| *name).filter(|name| pieces || !named(name));
    let by_name = weights.keys().filter(|name| names::is_dcp_shard(name));
    by_name.chain(by_note).cloned().collect()
}

/// A weight map file of a folder.
struct MapFile {
    name: String,
    output: String,
    /// The shards that it lists. They are known even if the weight map is refused.
    names: BTreeSet<String>,
    parsed: Result<WeightMap>,
}

fn read_maps(folder: &Folder, only: Option<&str>) -> Vec<MapFile> {
    let reads_torch = folder.reads_torch(only);
    let output_of = |name: &str| {
        let torch = || names::torch_map_output(name).filter(|_| reads_torch);
        names::weight_map_output(name).or_else(torch)
    };
    let named = folder.files.iter().filter_map(|file| Some((file.name.to_str()?, file)));
    let maps = named.filter_map(|(name, file)| {
        let output = output_of(name)?;
        let suffixes: &[&str] = match names::weight_map_output(name) {
            Some(_) => &[names::SUFFIX],
            None => &names::TORCH_SUFFIXES,
        };
        let mut names = BTreeSet::new();
        let parsed = read_listed_text(file, WEIGHT_MAP_LEN_MAX).and_then(|text| {
            let parsed = WeightMap::parse_of(&text, suffixes);
            names = match &parsed {
                Ok(map) => map.shard_of.files().iter().cloned().collect(),
                Err(_) => WeightMap::names_in(&text),
            };
            parsed.map_err(|fault| Error::refused(&folder.path, fault.in_file(name)))
        });
        Some(MapFile { name: name.to_owned(), output, names, parsed })
    });
    // A weight map that cannot be read is treated as an invalid weight map, and not as a missing one.
    let unusable = folder.misfits.iter().filter_map(|misfit| {
        let name = misfit.name.to_str()?;
        let output = output_of(name)?;
        let message = format!("is {}; {}", misfit.why.text(), misfit.why.advice());
        let fault = ErrorKind::WeightMap.fault(message).in_file(name);
        let parsed = Err(Error::refused(&folder.path, fault));
        Some(MapFile { name: name.to_owned(), output, names: BTreeSet::new(), parsed })
    });
    maps.chain(unusable).collect()
}

/// The DCP set of a folder. If a weight map lists any of its shards, it belongs to this set and has to agree with the
/// shards.
fn dcp_set(folder: &Folder, members: BTreeSet<String>, maps: &mut Vec<MapFile>) -> Candidate {
    let (own, others): (Vec<MapFile>, Vec<MapFile>) =
        maps.drain(..).partition(|map| !map.names.is_disjoint(&members));
    *maps = others;
    let output = own.first().map_or_else(|| names::whole("model"), |map| map.output.clone());
    let mut set = Candidate { members, ..Candidate::new(output, SetKind::Dcp) };
    let map_names: Vec<String> = own.iter().map(|map| map.name.clone()).collect();
    for map in own {
        set.claims.insert(map.name.clone());
        set.claims.extend(map.names);
        match map.parsed {
            Ok(parsed) => set.map = Some((map.name, parsed)),
            Err(error) => set.refused = Some(error),
        }
    }
    if let [_, second, ..] = map_names.as_slice() {
        let message = format!("names shards of one DCP checkpoint, and so does {}", map_names[0]);
        let fault = ErrorKind::WeightMap.fault(message).in_file(second);
        set.refused = Some(Error::refused(&folder.path, fault));
    }
    set
}

/// The set of the distributed checkpoint whose files are among `weights`. `None` if there is none.
fn distcp_set(folder: &Folder, weights: &Weights) -> Option<Candidate> {
    let members: BTreeSet<String> =
        weights.keys().filter(|name| names::is_distcp(name)).cloned().collect();
    let refused = match weights.get(names::DISTCP_METADATA) {
        Some(Err(error)) => Some(error.copied()),
        _ => None,
    };
    if members.is_empty() && refused.is_none() {
        return None;
    }
    let mut set = Candidate::new(names::whole("model"), SetKind::Distributed);
    let own = folder.names().filter(|name| names::is_of_distcp(name));
    set.claims = own.map(str::to_owned).chain([names::DISTCP_METADATA.to_owned()]).collect();
    Some(Candidate { members, refused, ..set })
}

fn map_set(folder: &Folder, map: MapFile) -> Candidate {
    let MapFile { name, output, names, parsed } = map;
    let mut set = Candidate { members: names, ..Candidate::new(output, SetKind::WeightMap) };
    set.claims.insert(name.clone());
    match parsed {
        Err(error) => set.refused = Some(error),
        Ok(parsed) => {
            let missing = set.members.iter().find(|shard| folder.file(shard).is_none());
            set.refused = missing.map(|shard| missing_shard(folder, &name, shard, &parsed));
            set.map = Some((name, parsed));
        }
    }
    set
}

fn missing_shard(folder: &Folder, map_name: &str, shard: &str, map: &WeightMap) -> Error {
    let misfit = folder.misfits.iter().find(|misfit| misfit.name == shard);
    let state = match misfit.map(|misfit| misfit.why) {
        Some(why) => format!("is {}; {}", why.text(), why.advice()),
        None if folder.store.version(&folder.path.join(shard)).is_ok() => {
            "is not a regular file".to_owned()
        }
        None => "is not there".to_owned(),
    };
    let tensors = map.shard_of.iter().filter(|(_, file)| *file == shard).count();
    let message = format!("{map_name} sends {tensors} tensors to this shard, which {state}");
    Error::refused(&folder.path, ErrorKind::ShardMissing.fault(message).in_file(shard))
}

/// Numbered names form one set if these facts are equal: the file under which the set is shown, the format, the kind
/// of set, and the number of files.
type NumberedGroup = (String, InputFormat, SetKind, u64);

/// Parses a numbered name. Also returns the format and the kind of set that the name indicates.
fn numbered(name: &str) -> Option<(Numbered, InputFormat, SetKind)> {
    use InputFormat::{Safetensors, Tensorizer, Torch};
    let safetensors = names::numbered(name).map(|found| (found, Safetensors, SetKind::Numbered));
    let tensorizer = || Some((names::numbered_tensorizer(name)?, Tensorizer, SetKind::Numbered));
    let torch = || Some((names::numbered_torch(name)?, Torch, SetKind::Numbered));
    let ranks = || Some((names::rank_file(name)?, Torch, SetKind::Ranks));
    safetensors.or_else(tensorizer).or_else(torch).or_else(ranks)
}

/// Sets of numbered shards without a weight map. An incomplete set is refused.
fn numbered_sets<'a>(folder: &Folder, free: impl Iterator<Item = &'a String>) -> Vec<Candidate> {
    let mut groups: BTreeMap<NumberedGroup, Vec<(u64, &str)>> = BTreeMap::new();
    for name in free {
        if let Some((Numbered { output, number, total }, format, kind)) = numbered(name) {
            groups.entry((output, format, kind, total)).or_default().push((number, name));
        }
    }
    let mut totals: BTreeMap<(&str, InputFormat, SetKind), u32> = BTreeMap::new();
    for (output, format, kind, _) in groups.keys() {
        *totals.entry((output, *format, *kind)).or_default() += 1;
    }
    let sets = groups.iter().map(|((output, format, kind, total), shards)| {
        let fault = if totals[&(output.as_str(), *format, *kind)] > 1 {
            let message = "shards of two numbered sets of this name, with different totals; \
                           remove the old ones";
            Some(ErrorKind::DuplicateTensor.fault(message).in_file(shards[0].1))
        } else {
            // The name of a rank file may lack the number of ranks. The tensors in the file record this number, and it
            // is checked later.
            let last = shards.iter().map(|(number, _)| *number).max().unwrap_or(0);
            let total = if *total == 0 { last.saturating_add(1) } else { *total };
            numbering_fault(u64::from(*kind != SetKind::Ranks), total, shards)
        };
        Candidate {
            members: shards.iter().map(|(_, name)| (*name).to_owned()).collect(),
            refused: fault.map(|fault| Error::refused(&folder.path, fault)),
            ..Candidate::new(output.clone(), *kind)
        }
    });
    sets.collect()
}

/// The fault if the numbers of `shards` are not `total` consecutive numbers from `first` on.
fn numbering_fault(first: u64, total: u64, shards: &[(u64, &str)]) -> Option<Fault> {
    let mut shards = shards.to_vec();
    shards.sort_unstable();
    if let Some(pair) = shards.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let message = format!("has the number {} of {total}, and so has {}", pair[0].0, pair[1].1);
        return Some(ErrorKind::DuplicateTensor.fault(message).in_file(pair[0].1));
    }
    let numbers = shards.iter().map(|(number, _)| *number);
    let last = total.saturating_add(first) - 1;
    if let Some((number, name)) = shards.iter().find(|(number, _)| !(first..=last).contains(number))
    {
        let message = format!("number {number} is not one of {first} to {last}");
        return Some(ErrorKind::ShardMissing.fault(message).in_file(name));
    }
    let missing = (first..=last)
        .zip(numbers.map(Some).chain(std::iter::repeat(None)))
        .find(|(want, got)| Some(*want) != *got);
    let (want, _) = missing?;
    let message = format!(
        "{} of {total} shards found, number {want} is missing; the download may be incomplete",
        shards.len()
    );
    Some(ErrorKind::ShardMissing.fault(message).in_file(shards[0].1))
}

/// Gives each name to one set. Among sets of several formats, the format that comes first in `InputFormat` wins. Among
/// sets of one format, `prefer` decides between one whole file and a sharded set, and the kind that comes first in
/// `SetKind` wins among sharded sets. A set in another format than safetensors may have the name of a member of a
/// sharded set. Then it competes with the sharded set for the name of that set.
fn settle_names(found: Vec<Candidate>, prefer: Prefer) -> Discovered {
    let mut set_of: BTreeMap<String, String> = BTreeMap::new();
    for set in found.iter().filter(|set| !set.kind.is_one_file()) {
        set_of.extend(set.members.iter().map(|member| (member.clone(), set.output.clone())));
    }
    let mut by_output: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
    for set in found {
        let of_set = set_of.get(&set.output).filter(|_| set.format() != InputFormat::Safetensors);
        by_output.entry(of_set.unwrap_or(&set.output).clone()).or_default().push(set);
    }
    let mut settled = Discovered { winners: Vec::new(), losers: Vec::new(), notes: Vec::new() };
    for (output, mut sets) in by_output {
        let is_late = |set: &Candidate| prefer == Prefer::Shards || !set.kind.is_one_file();
        sets.sort_by_key(|set| (set.format(), is_late(set), set.kind));
        let mut sets = sets.into_iter();
        let Some(winner) = sets.next() else { continue };
        for loser in sets {
            settled.notes.push(format!(
                "{output}: {} wins, {} is hidden ({})",
                described(&winner),
                described(&loser),
                if loser.format() != winner.format() {
                    "safetensors goes before bintensors, and both before tensorizer"
                } else if winner.kind.is_one_file() != loser.kind.is_one_file() {
                    "choose with -o prefer=file|shards"
                } else {
                    "one name, one set"
                },
            ));
            settled.losers.push(loser);
        }
        settled.winners.push(winner);
    }
    settled
}

fn described(set: &Candidate) -> String {
    let shards = set.members.len();
    match (set.kind, set.claims.first()) {
        (SetKind::Single, _) => "the whole file".to_owned(),
        (SetKind::Bintensors | SetKind::Tensorizer | SetKind::Torch, _) => {
            set.members.iter().cloned().collect()
        }
        (SetKind::Dcp, _) => format!("the set of {shards} DCP shards"),
        (SetKind::Ranks, _) => format!("the files of {shards} ranks"),
        (SetKind::Distributed, _) => format!("the distributed checkpoint of {shards} files"),
        (SetKind::DeepSpeed, _) => format!("the checkpoint of DeepSpeed in {shards} files"),
        (SetKind::Numbered, _) if set.format() == InputFormat::Tensorizer => {
            format!("the set of {shards} numbered tensorizer files")
        }
        (SetKind::Numbered, _) => format!("the set of {shards} numbered shards"),
        (SetKind::WeightMap, map) => format!("the set of {}", map.map_or("a weight map", |m| m)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;

    fn weight_file(folder: &Path, name: &str, tensor: &str) -> File {
        let header =
            format!("{{\"{tensor}\":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}}}");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.push(7);
        std::fs::write(folder.join(name), bytes).unwrap();
        look_at(folder, name)
    }

    fn look_at(folder: &Path, name: &str) -> File {
        let path = folder.join(name);
        let version = Store::LOCAL.version(&path).unwrap();
        File { name: name.into(), store: Store::LOCAL, path, version }
    }

    #[test]
    fn links_to_one_file_share_its_header_and_others_do_not() {
        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path();
        let first = weight_file(folder, "a.safetensors", "x");
        std::fs::hard_link(&first.path, folder.join("b.safetensors")).unwrap();
        let files = [
            look_at(folder, "a.safetensors"),
            look_at(folder, "b.safetensors"),
            weight_file(folder, "c.safetensors", "x"),
        ];
        let named: Vec<(&str, &File)> =
            files.iter().map(|file| (file.name.to_str().unwrap(), file)).collect();
        let (weights, _reserved) = open_headers(folder, &named, u64::MAX, ReadWith::default());
        let header = |name: &str| &weights[name].as_ref().unwrap().shard.header;
        assert!(std::sync::Arc::ptr_eq(header("a.safetensors"), header("b.safetensors")));
        assert!(!std::sync::Arc::ptr_eq(header("a.safetensors"), header("c.safetensors")));
        assert_eq!(weights["b.safetensors"].as_ref().unwrap().shard.name, "b.safetensors");
    }

    #[test]
    fn headers_that_are_too_many_for_a_folder_are_refused_by_name_and_the_first_are_read() {
        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path();
        let names = ["a.safetensors", "b.safetensors", "c.safetensors"];
        let files = names.map(|name| weight_file(folder, name, "x"));
        let named: Vec<(&str, &File)> = names.into_iter().zip(&files).collect();
        let one = open_headers(folder, &named, u64::MAX, ReadWith::default()).0["a.safetensors"]
            .as_ref()
            .map(|loaded| loaded.shard.header.description_len())
            .unwrap();
        let (weights, _reserved) = open_headers(folder, &named, 2 * one + 1, ReadWith::default());
        assert!(weights["a.safetensors"].is_ok() && weights["b.safetensors"].is_ok());
        let error = weights["c.safetensors"].as_ref().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::HeaderTooLarge);
        let text = error.to_string();
        assert!(text.contains("c.safetensors: the headers of the weight files"), "{text}");
        assert!(
            text.contains(&format!("have {} bytes, {} are read", 3 * one, 2 * one + 1)),
            "{text}"
        );
    }
}
