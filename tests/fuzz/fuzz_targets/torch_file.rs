//! Parses any bytes as a file of torch.save, and as a pickle in such a file. An accepted file must have
//! distinct names, and its tensors must lie in the file. The same holds for the file of one tensor of a
//! universal checkpoint.

#![no_main]

#[path = "../shared/extents.rs"]
mod extents;

use std::collections::BTreeSet;

use extents::check_extents;
use libfuzzer_sys::fuzz_target;
use tensorfs::internal::format::ShardDescription;
use tensorfs::internal::format::pickle::{parse_file, parse_universal};

fuzz_target!(|data: &[u8]| {
    check(data);
    check(&archive(data));
});

/// An archive with the pickle and a storage of 16 bytes.
fn archive(pickle: &[u8]) -> Vec<u8> {
    let (mut bytes, mut central) = (Vec::new(), Vec::new());
    for (name, data) in [("m/data.pkl", pickle), ("m/data/0", &[1; 16])] {
        let offset = bytes.len() as u32;
        let mut fixed = vec![20, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        fixed.extend((data.len() as u32).to_le_bytes().repeat(2));
        fixed.extend((name.len() as u32).to_le_bytes());
        bytes.extend([b"PK\x03\x04", fixed.as_slice(), name.as_bytes(), data].concat());
        central.extend([b"PK\x01\x02\x14\0", fixed.as_slice(), &[0; 10]].concat());
        central.extend(offset.to_le_bytes());
        central.extend(name.as_bytes());
    }
    let numbers = [central.len() as u32, bytes.len() as u32];
    bytes.extend(central);
    bytes.extend(b"PK\x05\x06\0\0\0\0\x02\0\x02\0");
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    bytes.extend([0, 0]);
    bytes
}

fn check(file: &[u8]) {
    if let Ok(description) = parse_file(file) {
        check_tensors(file, &description);
    }
    if let Ok(Ok(description)) = parse_universal(&mut &*file) {
        assert_eq!(description.len(), 1);
        check_tensors(file, &description);
    }
}

fn check_tensors(file: &[u8], description: &ShardDescription) {
    let mut names = BTreeSet::new();
    for tensor in description.tensors() {
        assert!(names.insert(tensor.name.to_owned()), "{} stands twice", tensor.name);
    }
    check_extents(file, description);
}
