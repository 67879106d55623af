//! The weight map of Hugging Face checkpoints (`*.safetensors.index.json`): tensor to shard.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::error::{Class, Fault, quoted};
use crate::format::json::{UniqueMap, object};

/// Largest weight map read, in bytes: two million tensors with names as long as models have
/// them.
pub const WEIGHT_MAP_LEN_MAX: u64 = 256 << 20;

/// A weight map whose shard names are plain file names.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightMap {
    /// The `metadata` object as it stands, empty where the file has none.
    pub metadata: Map<String, Value>,
    /// Shard file by tensor name.
    pub shard_of: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct WeightMapJson {
    metadata: Option<Value>,
    weight_map: UniqueMap<String>,
}

impl WeightMap {
    /// Parses the text of a weight map.
    pub fn parse(text: &[u8]) -> Result<WeightMap, Fault> {
        let json: WeightMapJson = object(text, Class::IndexJson)?;
        let metadata = match json.metadata {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(map)) => map,
            Some(_) => {
                return Err(Fault::new(Class::IndexJson, "`metadata` is not an object"));
            }
        };
        if json.weight_map.0.is_empty() {
            return Err(Fault::new(Class::IndexJson, "`weight_map` names no tensor"));
        }
        for (tensor, shard) in &json.weight_map.0 {
            check_shard_name(shard).map_err(|fault| fault.tensor(tensor))?;
        }
        Ok(WeightMap { metadata, shard_of: json.weight_map.0 })
    }

    /// The files that a weight map names, as far as they can be read out of `text`: also where
    /// `parse` refuses it, so that nothing that a bad weight map names is taken for a set of
    /// its own.
    pub fn names_in(text: &[u8]) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        // What was read before the error counts.
        let _ = NamesSeed { names: &mut names, inside: false }
            .deserialize(&mut serde_json::Deserializer::from_slice(text));
        names
    }

    /// The text of a weight map that sends every one of `tensors`, which come by name, to `file`.
    ///
    /// Keeps the other keys of `metadata`, which is that of the weight map before; `total_size`
    /// becomes `total_size` bytes, which is the sum over the tensors and what readers expect there.
    pub fn rewritten<'a>(
        metadata: &Map<String, Value>,
        file: &'a str,
        tensors: impl Iterator<Item = &'a str> + Clone,
        total_size: u64,
    ) -> Vec<u8> {
        let mut metadata = metadata.clone();
        metadata.insert("total_size".to_owned(), total_size.into());
        let json = Rewritten { metadata, weight_map: Sent { tensors, file } };
        // Strings and values always serialise, and a Vec takes every write.
        let mut text = serde_json::to_vec_pretty(&json).unwrap_or_default();
        text.push(b'\n');
        text
    }
}

#[derive(Serialize)]
#[serde(bound(serialize = "I: Iterator<Item = &'a str> + Clone"))]
struct Rewritten<'a, I> {
    metadata: Map<String, Value>,
    weight_map: Sent<'a, I>,
}

/// A map that sends each of `tensors` to `file`.
struct Sent<'a, I> {
    tensors: I,
    file: &'a str,
}

impl<'a, I: Iterator<Item = &'a str> + Clone> Serialize for Sent<'a, I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.tensors.clone().map(|name| (name, self.file)))
    }
}

/// Accepts a plain file name only: anything else could leave the checkpoint.
fn check_shard_name(name: &str) -> Result<(), Fault> {
    let plain = !name.contains(['/', '\\', '\0']) && name.ends_with(".safetensors");
    if plain {
        return Ok(());
    }
    Err(Fault::new(
        Class::UnsafePath,
        format!("the weight map sends it to {}, not a plain *.safetensors file name", quoted(name)),
    ))
}

/// Collects the values of the `weight_map` object, whatever else is wrong.
struct NamesSeed<'a> {
    names: &'a mut BTreeSet<String>,
    /// Whether this is the `weight_map` object itself.
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
