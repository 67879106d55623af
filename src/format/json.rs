//! Strict JSON: a duplicate key in an object is an error.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use crate::error::{ErrorKind, Fault, quoted};

/// First words of JSON error messages about a duplicate key: the words of this module, and those of
/// serde for the fields of a struct.
const DUPLICATE: [&str; 2] = ["duplicate key ", "duplicate field "];

/// The error of a map that holds `key` twice.
pub(crate) fn duplicate<E: de::Error>(key: &str) -> E {
    E::custom(format_args!("{}{}", DUPLICATE[0], quoted(key)))
}

/// The kind of a JSON error: `duplicate_key` for a duplicate key, `otherwise` for every other
/// error.
pub(crate) fn kind_of(error: &serde_json::Error, otherwise: ErrorKind) -> ErrorKind {
    let message = error.to_string();
    if DUPLICATE.iter().any(|start| message.starts_with(start)) {
        ErrorKind::DuplicateKey
    } else {
        otherwise
    }
}

/// The entries of an object with unique keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, V>()? {
            match entries.entry(key) {
                Entry::Vacant(place) => drop(place.insert(value)),
                Entry::Occupied(place) => return Err(duplicate(place.key())),
            }
        }
        Ok(UniqueMap(entries))
    }
}

/// Parses one JSON object. Malformed JSON and other JSON values are errors of the kind `kind`.
pub(crate) fn object<'a, T: Deserialize<'a>>(bytes: &'a [u8], kind: ErrorKind) -> Result<T, Fault> {
    let text = std::str::from_utf8(bytes)
        .map_err(|e| kind.fault(format!("not UTF-8 at byte {}", e.valid_up_to())))?;
    // serde would also accept an array of the fields of a struct in their order.
    if !text.trim_ascii_start().starts_with('{') {
        return Err(kind.fault("expected a JSON object"));
    }
    serde_json::from_str(text).map_err(|e| kind_of(&e, kind).fault(format!("invalid JSON: {e}")))
}
