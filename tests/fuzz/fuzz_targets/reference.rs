//! Parses any bytes as a reference for a checkpoint. A manifest must stay the same when it is
//! written and read again, and a weight map must give only names.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorfs::internal::format::manifest::{Reference, encode};

fuzz_target!(|data: &[u8]| {
    check(data);
    // The tensors alone: finding the words around them takes a fuzzer long.
    let mut manifest =
        br#"{"format":"tensorfs-manifest","version":1,"shards":{},"tensors":"#.to_vec();
    manifest.extend_from_slice(data);
    manifest.push(b'}');
    check(&manifest);
});

fn check(text: &[u8]) {
    let Ok(reference) = Reference::parse_json(text) else { return };
    let Some(shards) = &reference.shards else {
        assert!(reference.tensors.values().all(Option::is_none), "a weight map has no shapes");
        return;
    };
    let tensors = reference.tensors.iter().map(|(name, known)| {
        let (dtype, shape) = known.as_ref().expect("a manifest knows every tensor");
        (name.as_str(), *dtype, shape.as_slice())
    });
    let text = encode(shards.iter().map(|(name, len)| (name.as_str(), *len)), tensors);
    assert_eq!(Reference::parse_json(&text).expect("reads back"), reference);
}
