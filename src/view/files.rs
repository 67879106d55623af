//! Division of a catalog into files: their number, and the tensors of each file.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::name_map::NameMap;
use super::{OptionFileContent, ReadFile};
use crate::catalog::{Catalog, named_some};
use crate::error::{ErrorKind, Fault, real_name, shown_path};
use crate::hash::Digest;
use crate::size::parse_size;

/// The division of the tensors of a set into files.
///
/// ```
/// use tensorfs::{Checkpoint, Files, OpenOptions, View};
///
/// // As the hub splits a model into files of at most 20 kB.
/// let view = View { files: Files::ShardSize(20_000), ..View::default() };
/// let options = OpenOptions { view, ..OpenOptions::default() };
/// let checkpoint = Checkpoint::open_with("tests/fixtures/hf/gpt2_tiny".as_ref(), &options)?;
/// for file in checkpoint.virtual_files() {
///     println!("{}", file.spec().name); // model-00001-of-00004.safetensors ...
/// }
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Files {
    /// One virtual file per set.
    #[default]
    Single,
    /// The original shards and weight map.
    Original,
    /// Files with at most this number of tensor bytes each, and as few files as the order of the tensors
    /// allows. A tensor that is larger gets a file of its own.
    ShardSize(u64),
    /// This number of files. The largest of them is as small as the order of the tensors allows.
    ShardCount(u64),
    /// The files that a list assigns to the tensors.
    Map(Arc<FileMap>),
}

/// The number of the file of each tensor.
///
/// ```
/// use tensorfs::{FileMap, Files};
///
/// let text = br#"{"model.embed_tokens.weight": 1, "lm_head.weight": 2}"#;
/// let files = Files::map("mapping.json".as_ref(), text)?;
/// assert_eq!(files.to_string(), "map=mapping.json");
/// assert!(Files::map("mapping.json".as_ref(), b"[1, 2]").is_err());
/// # Ok::<(), String>(())
/// ```
pub type FileMap = NameMap<u64>;

/// The values of `layout=`, for errors.
pub const LAYOUTS: &str = "single, original, shards=N, shards=SIZE like 5GB, or map=FILE";

impl Files {
    /// The division for `word`, a value of the option `layout=`. `read` reads the file of `map=FILE`.
    ///
    /// # Errors
    /// A message of one line without the name of the option.
    pub fn parse(word: &str, read: ReadFile<'_>) -> Result<Files, String> {
        match word.split_once('=') {
            None if word == "single" => Ok(Files::Single),
            None if word == "original" => Ok(Files::Original),
            Some(("shards", size)) => shards(size).ok_or_else(|| {
                "shards=N with a number of files from 1, or shards=SIZE with a size like 5GB, \
                 500MB or 2GiB"
                    .to_owned()
            }),
            Some(("map", "")) => Err("a file: map=FILE".to_owned()),
            Some(("map", path)) => {
                let map = read(Path::new(path), OptionFileContent::Text)
                    .and_then(|(path, text)| Files::map(&path, &text));
                map.map_err(|why| format!("a list of tensors and files; {why}"))
            }
            _ => Err(LAYOUTS.to_owned()),
        }
    }

    /// The division in `text`, a JSON object of tensor names and file numbers. It has the form of
    /// `fqn_to_index_mapping` of torch and NeMo. `path` is the name of the file in errors.
    ///
    /// # Errors
    /// A message of one line with the file and the tensor.
    pub fn map(path: &Path, text: &[u8]) -> Result<Files, String> {
        let form = "expected a JSON object of tensor names and file numbers, {\"NAME\": 1, ...}";
        let numbers = NameMap::parse(path, text, form, |value| match value.as_u64() {
            Some(number @ 1..=NUMBER_MAX) => Ok(number),
            _ => {
                Err(format!("expected the number of a file from 1 to {NUMBER_MAX}, found {value}"))
            }
        })?;
        Ok(Files::Map(Arc::new(numbers)))
    }

    /// The lowest file number without tensors that is followed by a number with tensors. If there is such a
    /// gap, only a weight map shows which files exist.
    #[doc(hidden)]
    pub fn lowest_gap(&self) -> Option<u64> {
        let Files::Map(map) = self else { return None };
        let given: BTreeSet<u64> = map.values.values().copied().collect();
        (1..).zip(given).find(|(expected, found)| expected != found).map(|(gap, _)| gap)
    }

    /// The file of the list, with the hash of its text.
    pub(crate) fn read_from(&self) -> Option<(&Path, Digest)> {
        match self {
            Files::Map(map) => Some(map.read_from()),
            _ => None,
        }
    }

    /// The tensors of each file of `catalog`: the number of the file, and positions in ascending order. There are no
    /// files without tensors. `None` if all tensors are in one file, or if the view shows the original files.
    pub(super) fn groups(&self, catalog: &Catalog) -> Result<Option<Groups>, Fault> {
        let (total, files) = match self {
            Files::Single | Files::Original => return Ok(None),
            Files::Map(map) => return map.groups(catalog).map(Some),
            Files::ShardSize(most) => {
                let (order, lens) = in_disk_order(catalog);
                let ends = ends_by_size(&lens, *most);
                (ends.len(), cut(&order, &ends))
            }
            Files::ShardCount(count) => {
                let (order, lens) = in_disk_order(catalog);
                let fits = usize::try_from(*count).ok().filter(|count| *count <= order.len());
                let Some(count) = fits else {
                    return Err(ErrorKind::View.fault(format!(
                        "layout=shards={count} needs a tensor for each file, the checkpoint has {}",
                        order.len()
                    )));
                };
                (count, cut(&order, &ends_by_count(&lens, count)))
            }
        };
        Ok((total > 1).then_some(Groups { total: total as u64, files }))
    }
}

/// Largest number that a file can have. In file names, numbers are written with at least five digits.
const NUMBER_MAX: u64 = 999_999_999;

/// The division of a catalog into files.
pub(super) struct Groups {
    /// The total number in each file name.
    pub(super) total: u64,
    /// For each file its number, which begins at 1, and the positions of its tensors in ascending order.
    pub(super) files: Vec<(u64, Vec<u32>)>,
}

impl fmt::Display for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Files::Single => f.write_str("single"),
            Files::Original => f.write_str("original"),
            Files::ShardSize(bytes) => write!(f, "shards={bytes}B"),
            Files::ShardCount(count) => write!(f, "shards={count}"),
            Files::Map(map) => write!(f, "map={}", real_name(&map.path)),
        }
    }
}

impl FileMap {
    fn groups(&self, catalog: &Catalog) -> Result<Groups, Fault> {
        let file = shown_path(&self.path);
        let missing: Vec<&str> = catalog
            .tensors()
            .map(|tensor| tensor.name)
            .filter(|name| !self.values.contains_key(*name))
            .collect();
        if let Some(first) = missing.first() {
            let message = format!(
                "layout=map={file}: the file names {} of the {} tensors; these are missing: {}",
                catalog.len() - missing.len(),
                catalog.len(),
                named_some(missing.iter().copied())
            );
            return Err(ErrorKind::View.fault(message).tensor(first));
        }
        // All tensors of the catalog are in the list, so any other name in the list belongs to no tensor.
        let unknown: Vec<&str> = self
            .values
            .keys()
            .map(String::as_str)
            .filter(|n| catalog.tensor(n).is_none())
            .collect();
        if let Some(first) = unknown.first() {
            let message = format!(
                "layout=map={file}: the file names {} tensors that the checkpoint does not have: {}",
                unknown.len(),
                named_some(unknown.iter().copied())
            );
            return Err(ErrorKind::View.fault(message).tensor(first));
        }
        let mut files: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for (position, number) in self.values.values().enumerate() {
            // The list and the catalog are both sorted by name.
            files.entry(*number).or_default().push(position as u32);
        }
        let total = files.keys().next_back().copied().unwrap_or(1);
        Ok(Groups { total, files: files.into_iter().collect() })
    }
}

/// Parses a number of files or a size of each file.
fn shards(text: &str) -> Option<Files> {
    let number = parse_size(text).filter(|number| *number > 0)?;
    let is_count = text.ends_with(|c: char| c.is_ascii_digit());
    Some(if is_count { Files::ShardCount(number) } else { Files::ShardSize(number) })
}

/// Positions of all tensors, sorted by the place of their first bytes on the disk, and their lengths.
fn in_disk_order(catalog: &Catalog) -> (Vec<u32>, Vec<u64>) {
    let mut order: Vec<u32> = (0..catalog.len() as u32).collect();
    order.sort_by_cached_key(|&position| {
        let first = catalog.tensor_at(position as usize).first_piece();
        (first.shard, first.range.start, position)
    });
    let lens = order.iter().map(|&position| catalog.tensor_at(position as usize).len).collect();
    (order, lens)
}

/// Divides tensors of these lengths in the same way as the Python package huggingface_hub. A tensor of more
/// than `most` bytes gets a file of its own at once. A smaller tensor that does not fit into the open file
/// closes that file and opens the next one. So the tensors of a file need not be consecutive. Each element of
/// the result lists the tensors of one file.
fn ends_by_size(lens: &[u64], most: u64) -> Vec<Vec<usize>> {
    let mut files = Vec::new();
    let (mut open, mut bytes) = (Vec::new(), 0_u64);
    for (index, &len) in lens.iter().enumerate() {
        if len > most {
            files.push(vec![index]);
            continue;
        }
        if !open.is_empty() && bytes.saturating_add(len) > most {
            files.push(std::mem::take(&mut open));
            bytes = 0;
        }
        open.push(index);
        bytes += len;
    }
    if !open.is_empty() {
        files.push(open);
    }
    files
}

/// Divides the tensors into `count` files of consecutive tensors, so that the largest file is as small as
/// possible. No file is empty. Each element of the result lists the tensors of one file.
fn ends_by_count(lens: &[u64], count: usize) -> Vec<Vec<usize>> {
    let total = lens.iter().fold(0_u64, |sum, len| sum.saturating_add(*len));
    let needed = |most: u64| {
        let (mut files, mut bytes) = (1, 0_u64);
        for &len in lens {
            if bytes.saturating_add(len) > most {
                files += 1;
                bytes = 0;
            }
            bytes += len;
        }
        files
    };
    let (mut low, mut high) = (lens.iter().copied().max().unwrap_or(0), total);
    while low < high {
        let middle = low + (high - low) / 2;
        if needed(middle) <= count { high = middle } else { low = middle + 1 }
    }
    let mut files: Vec<Vec<usize>> = Vec::with_capacity(count);
    let (mut open, mut bytes) = (Vec::new(), 0_u64);
    for (index, &len) in lens.iter().enumerate() {
        let is_full = bytes.saturating_add(len) > high;
        // Each of the remaining files needs at least one tensor.
        let is_due = lens.len() - index == count - files.len() - 1;
        if !open.is_empty() && (is_full || is_due) {
            files.push(std::mem::take(&mut open));
            bytes = 0;
        }
        open.push(index);
        bytes += len;
    }
    files.push(open);
    files
}

/// Numbers the files, and converts indices of `order` to positions in ascending order.
fn cut(order: &[u32], files: &[Vec<usize>]) -> Vec<(u64, Vec<u32>)> {
    let positions = |file: &Vec<usize>| {
        let mut positions: Vec<u32> = file.iter().map(|&index| order[index]).collect();
        positions.sort_unstable();
        positions
    };
    files.iter().enumerate().map(|(index, file)| (index as u64 + 1, positions(file))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(word: &str) -> Result<Files, String> {
        Files::parse(word, &mut |path, _| Ok((path.to_owned(), br#"{"a": 2, "b": 1}"#.to_vec())))
    }

    #[test]
    fn words_are_read_and_written_and_others_are_refused() {
        for (word, files) in [
            ("single", Files::Single),
            ("original", Files::Original),
            ("shards=8", Files::ShardCount(8)),
            ("shards=5GB", Files::ShardSize(5_000_000_000)),
            ("shards=5g", Files::ShardSize(5 << 30)),
            ("shards=100kb", Files::ShardSize(100_000)),
            ("shards=2GiB", Files::ShardSize(2 << 30)),
            ("shards=7B", Files::ShardSize(7)),
        ] {
            assert_eq!(parse(word).as_ref(), Ok(&files), "{word}");
            assert_eq!(parse(&files.to_string()), Ok(files), "{word}");
        }
        assert_eq!(parse("map=x.json").unwrap().to_string(), "map=x.json");
        for word in [
            "",
            "double",
            "shards",
            "shards=",
            "shards=0",
            "shards=-1",
            "shards=5XB",
            "shards=0GB",
            "shards=99999999999TB",
            "map",
            "map=",
            "single=1",
            "shards=1.5GB",
        ] {
            assert!(parse(word).is_err(), "{word}");
        }
    }

    #[test]
    fn the_lowest_number_without_a_tensor_is_found() {
        for (text, gap) in [
            (r#"{"a": 1, "b": 2, "c": 1}"#, None),
            (r#"{"a": 1, "b": 4, "c": 3}"#, Some(2)),
            (r#"{"a": 999999999, "b": 999999999}"#, Some(1)),
        ] {
            let files = Files::map(Path::new("m.json"), text.as_bytes()).unwrap();
            assert_eq!(files.lowest_gap(), gap, "{text}");
        }
        assert_eq!(Files::ShardCount(3).lowest_gap(), None);
    }

    #[test]
    fn a_list_with_a_name_twice_or_a_number_that_is_none_is_refused_with_the_tensor() {
        let map = |text: &str| Files::map(Path::new("m.json"), text.as_bytes()).unwrap_err();
        assert!(map(r#"{"a": 1, "a": 2}"#).contains('a'));
        for bad in ["0", "-1", "1.5", "\"1\"", "null", "1000000000"] {
            let error = map(&format!(r#"{{"some": 1, "x.y": {bad}}}"#));
            assert!(error.starts_with("m.json: tensor") && error.contains("x.y"), "{error}");
        }
        for bad in ["", "{}", "[]", "1", "{\"a\"", "{\"a\": 1} x"] {
            assert!(map(bad).starts_with("m.json: expected a JSON object"), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn files_by_number_hold_all_tensors_and_none_is_larger_than_it_must_be(
            lens in proptest::collection::vec(0_u64..50, 1..12), count in 1_usize..12,
        ) {
            let count = count.min(lens.len());
            let files = ends_by_count(&lens, count);
            prop_assert_eq!(files.len(), count);
            prop_assert!(files.iter().all(|file| !file.is_empty()));
            prop_assert_eq!(files.concat(), (0..lens.len()).collect::<Vec<_>>());
            let len = |file: &[usize]| file.iter().map(|&at| lens[at]).sum::<u64>();
            let largest = files.iter().map(|file| len(file)).max();
            // The best of all possible divisions.
            let best = (0_u32..1 << (lens.len() - 1))
                .filter(|ends| ends.count_ones() as usize == count - 1)
                .map(|ends| {
                    let all: Vec<usize> = (0..lens.len()).collect();
                    let cut = |a: &usize, _: &usize| ends >> a & 1 == 0;
                    all.chunk_by(cut).map(len).max()
                })
                .min();
            prop_assert_eq!(Some(largest), best);
        }
    }
}
