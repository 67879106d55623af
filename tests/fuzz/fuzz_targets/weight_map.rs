//! Parses any bytes as a weight map. An accepted map must name only plain files. The rewritten map
//! must name the merged file for every tensor, and keep all other content.

#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use tensorfs::internal::format::weight_map::WeightMap;

const OUTPUT: &str = "model.safetensors";

fuzz_target!(|data: &[u8]| {
    let named = WeightMap::names_in(data);
    let Ok(map) = WeightMap::parse(data) else { return };
    assert!(!map.shard_of.is_empty());
    assert_eq!(named, map.shard_of.files().iter().cloned().collect());
    for shard in map.shard_of.files() {
        let mut components = Path::new(shard).components();
        assert!(matches!(components.next(), Some(Component::Normal(_))), "{shard:?}");
        assert_eq!(components.next(), None, "{shard:?}");
        assert!(shard.ends_with(".safetensors") && !shard.contains(['\\', '\0']), "{shard:?}");
    }

    let names = map.shard_of.iter().map(|(name, _)| name);
    let text =
        WeightMap::rewritten(&map.metadata, names.map(|name| (name, OUTPUT)), data.len() as u64);
    let again = WeightMap::parse(&text).expect("reads back");
    let names = |map: &WeightMap| -> Vec<String> {
        map.shard_of.iter().map(|(name, _)| name.to_owned()).collect()
    };
    assert_eq!(names(&again), names(&map));
    assert!(again.shard_of.files().iter().all(|file| file == OUTPUT));
    assert_eq!(again.metadata["total_size"], data.len() as u64);
    let kept = |map: &WeightMap| {
        let mut metadata = map.metadata.clone();
        metadata.remove("total_size");
        without_floats(&Value::Object(metadata))
    };
    assert_eq!(kept(&again), kept(&map));
});

/// The value with `null` for floats: their last digit may change when read and written.
fn without_floats(value: &Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => Value::Null,
        Value::Array(values) => values.iter().map(without_floats).collect(),
        Value::Object(map) => {
            map.iter().map(|(key, value)| (key.clone(), without_floats(value))).collect()
        }
        _ => value.clone(),
    }
}
