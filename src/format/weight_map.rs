//! The weight map of Hugging Face checkpoints (`*.safetensors.index.json`), which maps each tensor
//! to its shard file.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::error::{ErrorKind, Fault, quoted};
use crate::format::json::{UniqueMap, object};
use crate::format::names::SUFFIX;

/// Maximum length of a weight map in bytes. This is enough for two million tensors with names of
/// usual length.
pub const WEIGHT_MAP_LEN_MAX: u64 = 256 << 20;

/// A weight map whose shard names are plain file names.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightMap {
    /// The `metadata` object unchanged, empty if the file has none.
    pub metadata: Map<String, Value>,
    /// Shard file by tensor name.
    pub shard_of: ShardOf,
}

/// The shard file of each tensor, by the name of the tensor. The data is stored in columns, because
/// a map may name millions of tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardOf {
    /// All tensor names, one after another.
    names: String,
    /// For each tensor, begin and end of its name in `names`, and the index of its file in `files`.
    rows: Vec<(u32, u32, u32)>,
    /// The files, each once.
    files: Vec<String>,
}

impl ShardOf {
    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether it names no tensor.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Tensor and file at index `row`, in the order of tensor names.
    pub fn get(&self, row: usize) -> (&str, &str) {
        let (begin, end, file) = self.rows[row];
        (&self.names[begin as usize..end as usize], &self.files[file as usize])
    }

    /// Tensors with their files, in the order of tensor names.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> + Clone {
        (0..self.len()).map(|row| self.get(row))
    }

    /// The files, each once.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// Index in `files` of the file of the tensor at index `row`.
    pub(crate) fn file_number(&self, row: usize) -> usize {
        self.rows[row].2 as usize
    }

    /// Sorts the tensors by name. Returns false if two names are equal.
    fn sort(&mut self) -> bool {
        let names = &self.names;
        let name = |row: &(u32, u32, u32)| &names[row.0 as usize..row.1 as usize];
        if !self.rows.is_sorted_by(|a, b| name(a) < name(b)) {
            self.rows.sort_unstable_by(|a, b| name(a).cmp(name(b)));
        }
        self.rows.windows(2).all(|pair| name(&pair[0]) != name(&pair[1]))
    }
}

impl FromIterator<(String, String)> for ShardOf {
    /// If a name occurs several times, its last file is used.
    fn from_iter<I: IntoIterator<Item = (String, String)>>(pairs: I) -> ShardOf {
        let by_name: BTreeMap<String, String> = pairs.into_iter().collect();
        let mut filler = Filler::default();
        for (name, file) in &by_name {
            filler.add(name, file);
        }
        filler.shard_of
    }
}

/// Builder of the columns.
#[derive(Default)]
struct Filler {
    shard_of: ShardOf,
    known: HashMap<String, u32>,
}

impl Filler {
    fn add(&mut self, name: &str, file: &str) {
        let begin = self.shard_of.names.len() as u32;
        self.shard_of.names.push_str(name);
        let end = self.shard_of.names.len() as u32;
        let files = &mut self.shard_of.files;
        let last = self.shard_of.rows.last().map(|row| row.2);
        let number = match last.filter(|&last| files[last as usize] == file) {
            Some(last) => last,
            None => match self.known.get(file) {
                Some(&known) => known,
                None => {
                    files.push(file.to_owned());
                    let number = files.len() as u32 - 1;
                    self.known.insert(file.to_owned(), number);
                    number
                }
            },
        };
        self.shard_of.rows.push((begin, end, number));
    }
}

/// A string of the text. It is copied only if it has escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Deserialize<'de> for ShardOf {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ShardOf, D::Error> {
        struct Pairs;

        impl<'de> Visitor<'de> for Pairs {
            type Value = ShardOf;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ShardOf, A::Error> {
                let mut filler = Filler::default();
                while let Some((Text(name), Text(file))) = map.next_entry()? {
                    filler.add(&name, &file);
                }
                let mut found = filler.shard_of;
                if found.sort() { Ok(found) } else { Err(de::Error::custom("a name twice")) }
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

#[derive(Deserialize)]
struct WeightMapJson<T> {
    metadata: Option<Value>,
    weight_map: T,
}

impl WeightMap {
    /// Parses the text of a weight map.
    pub fn parse(text: &[u8]) -> Result<WeightMap, Fault> {
        WeightMap::parse_of(text, &[SUFFIX])
    }

    /// Parses the text of a weight map of files whose names end in one of `suffixes`.
    pub fn parse_of(text: &[u8], suffixes: &[&str]) -> Result<WeightMap, Fault> {
        // The text is parsed directly into columns. If that fails, it is parsed into the strict
        // map, which decides and words the error.
        let json: WeightMapJson<ShardOf> = match object(text, ErrorKind::WeightMap) {
            Ok(json) => json,
            Err(_) => {
                let strict: WeightMapJson<UniqueMap<String>> = object(text, ErrorKind::WeightMap)?;
                let weight_map = strict.weight_map.0.into_iter().collect();
                WeightMapJson { metadata: strict.metadata, weight_map }
            }
        };
        let metadata = match json.metadata {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(map)) => map,
            Some(_) => {
                return Err(ErrorKind::WeightMap.fault("`metadata` is not an object"));
            }
        };
        let shard_of = json.weight_map;
        if shard_of.is_empty() {
            return Err(ErrorKind::WeightMap.fault("`weight_map` names no tensor"));
        }
        if shard_of.files.iter().any(|file| check_shard_name(file, suffixes).is_err()) {
            for (tensor, file) in shard_of.iter() {
                check_shard_name(file, suffixes).map_err(|fault| fault.tensor(tensor))?;
            }
        }
        Ok(WeightMap { metadata, shard_of })
    }

    /// The files that a weight map names, up to the first error in `text`. This also reads a map
    /// that `parse` refuses, so that the files of an invalid weight map do not become a set of
    /// their own.
    pub fn names_in(text: &[u8]) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        // An error is ignored, and the names before it are returned.
        let _ = NamesSeed { names: &mut names, inside: false }
            .deserialize(&mut serde_json::Deserializer::from_slice(text));
        names
    }

    /// The text of a weight map of `tensors`. They are sorted by name, each with its file.
    ///
    /// `metadata` is that of the previous weight map. Its key `total_size`, which readers expect,
    /// is set to `total_size`, the length of all tensors in bytes. Its other keys are kept.
    pub fn rewritten<'a>(
        metadata: &Map<String, Value>,
        tensors: impl Iterator<Item = (&'a str, &'a str)> + Clone,
        total_size: u64,
    ) -> Vec<u8> {
        let mut metadata = metadata.clone();
        metadata.insert("total_size".to_owned(), total_size.into());
        // Each entry has 12 bytes of indentation and punctuation. If names need escapes, the vector
        // grows.
        let len = tensors.clone().map(|(name, file)| name.len() + file.len() + 12).sum::<usize>();
        let mut text = Vec::with_capacity(len + 1024);
        let json = Rewritten { metadata, weight_map: FileOfTensor { tensors } };
        // Strings and values can always be serialised, and writing to a `Vec` cannot fail.
        let written = serde_json::to_writer_pretty(&mut text, &json);
        debug_assert!(written.is_ok());
        text.push(b'\n');
        text
    }
}

#[derive(Serialize)]
#[serde(bound(serialize = "FileOfTensor<I>: Serialize"))]
struct Rewritten<I> {
    metadata: Map<String, Value>,
    weight_map: FileOfTensor<I>,
}

/// A map of tensors, each with its file.
struct FileOfTensor<I> {
    tensors: I,
}

impl<'a, I: Iterator<Item = (&'a str, &'a str)> + Clone> Serialize for FileOfTensor<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.tensors.clone())
    }
}

/// Accepts only a plain file name, because other paths could lead out of the folder of the
/// checkpoint.
fn check_shard_name(name: &str, suffixes: &[&str]) -> Result<(), Fault> {
    let known = suffixes.iter().any(|suffix| name.ends_with(suffix));
    let plain = !name.contains(['/', '\\', '\0']) && known;
    if plain {
        return Ok(());
    }
    Err(ErrorKind::UnsafePath.fault(format!(
        "the weight map maps it to {}, not a plain *{} file name",
        quoted(name),
        suffixes.first().unwrap_or(&"")
    )))
}

/// Collects the values of the `weight_map` object. Also works for an invalid weight map.
struct NamesSeed<'a> {
    names: &'a mut BTreeSet<String>,
    /// Whether the current object is the `weight_map` object itself.
    inside: bool,
}

impl<'de> DeserializeSeed<'de> for NamesSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for NamesSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if self.inside {
                if let Value::String(name) = map.next_value()? {
                    self.names.insert(name);
                }
            } else if key == "weight_map" {
                map.next_value_seed(NamesSeed { names: &mut *self.names, inside: true })?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}
