//! Tests of the safetensors header: which headers are accepted and refused, and that written
//! headers can be read back.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tensorfs::internal::format::safetensors::{Header, SLICE_LEN_MAX, encode};
use tensorfs::{Dtype, ErrorKind};

fn file(header: &str, data_len: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data_len, 0);
    file
}

fn kind(header: &str, data_len: usize) -> Option<ErrorKind> {
    Header::of_file(&file(header, data_len)).err().map(|fault| fault.kind)
}

#[test]
fn what_the_reference_implementation_accepts_is_accepted() {
    let accepted = [
        (r#"{}"#, 0),
        (r#" {"__metadata__":null} "#, 0),
        (r#"{"a":{"shape":[8],"x":[{}],"data_offsets":[0,8],"dtype":"U8"}}"#, 8),
        (r#"{"":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}"#, 8),
        (r#"{"a":{"dtype":"U8","shape":[0,1099511627776,1099511627776],"data_offsets":[0,0]}}"#, 0),
        (
            r#"{"b":{"dtype":"F4","shape":[2],"data_offsets":[4,5]},"a":{"dtype":"F6_E3M2","shape":[4],"data_offsets":[0,3]},"z":{"dtype":"I8","shape":[1],"data_offsets":[3,4]}}"#,
            5,
        ),
    ];
    for (header, len) in accepted {
        assert_eq!(kind(header, len), None, "{header}");
    }
}

#[test]
fn a_name_that_stands_twice_is_refused_also_when_it_is_escaped() {
    let entry = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    assert_eq!(
        kind(&format!(r#"{{"a":{entry},"\u0061":{entry}}}"#), 0),
        Some(ErrorKind::DuplicateKey)
    );
}

#[test]
fn a_wrong_number_is_refused_as_json_and_a_wrong_sum_as_what_it_is() {
    let with = |shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    for shape in ["[-8]", "[8.0]", "[8e0]", "[-0]", "[\"8\"]", "[08]", "[true]", "[null]"] {
        assert_eq!(kind(&with(shape, "[0,8]"), 8), Some(ErrorKind::HeaderJson), "{shape}");
    }
    assert_eq!(kind(&with("[7]", "[0,8]"), 8), Some(ErrorKind::SizeMismatch));
    assert_eq!(kind(&with("[8]", "[0,8]"), 7), Some(ErrorKind::DataTruncated));
    assert_eq!(kind(&with("[8]", "[0,8]"), 9), Some(ErrorKind::DataTrailing));
    assert_eq!(kind(&with("[8]", "[1,9]"), 9), Some(ErrorKind::OffsetGap));
    let end = u64::MAX;
    assert_eq!(
        kind(&with(&format!("[{end}]"), &format!("[0,{end}]")), 9),
        Some(ErrorKind::Overflow)
    );
}

#[test]
fn a_huge_header_is_parsed_as_it_is_read_with_the_same_result() {
    let text = r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#;
    let padded = text.to_owned() + &" ".repeat(SLICE_LEN_MAX as usize);
    let len = padded.len() as u64;
    let stream = |text: &str, file_len| {
        Header::parse_stream(text.as_bytes(), text.len() as u64, file_len).unwrap()
    };
    assert_eq!(stream(&padded, len + 16), Header::parse(padded.as_bytes(), len + 16));
    assert_eq!(stream(&padded, len + 9).unwrap_err().kind, ErrorKind::DataTruncated);
    let mut bad = padded.clone().into_bytes();
    bad[3] = 0xff;
    let result = Header::parse_stream(bad.as_slice(), len, len + 16).unwrap();
    assert_eq!(result.unwrap_err().kind, ErrorKind::HeaderUtf8);
    // A character that a chunk of the stream cuts in two is whole.
    let name = "\u{e9}".repeat(70_000);
    let text = format!(r#"{{"x{name}":{{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}}}"#);
    assert!(stream(&text, text.len() as u64 + 16).is_ok());
}

#[test]
fn a_failed_read_of_a_huge_header_stays_a_failed_read() {
    struct Broken;
    impl std::io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::from_raw_os_error(5))
        }
    }
    let error = Header::parse_stream(Broken, 100, 200).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
}

fn tensors() -> impl Strategy<Value = BTreeMap<String, (Dtype, Vec<u64>)>> {
    let dtype = (0..Dtype::ALL.len()).prop_map(|at| Dtype::ALL[at]);
    // Multiples of 4 keep sub-byte elements on bytes.
    let shape = prop::collection::vec((0u64..5).prop_map(|n| 4 * n), 1..4);
    prop::collection::btree_map(".*", (dtype, shape), 0..8).prop_map(|mut map| {
        map.remove("__metadata__");
        map
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(
        tensors in tensors(),
        metadata in prop::collection::btree_map(".*", ".*", 0..4),
        align in prop::sample::select(vec![1u64, 8, 4096]),
    ) {
        let len = |dtype: Dtype, shape: &[u64]| shape.iter().product::<u64>() * dtype.bits() / 8;
        let entries = tensors.iter().map(|(name, (dtype, shape))| {
            (name.as_str(), *dtype, shape.as_slice(), len(*dtype, shape))
        });
        let mut file = encode(&metadata, entries, align).unwrap();
        prop_assert_eq!(file.len() as u64 % align, 0);
        let total: u64 = tensors.values().map(|(dtype, shape)| len(*dtype, shape)).sum();
        file.resize(file.len() + total as usize, 0);
        let header = Header::of_file(&file).unwrap();
        prop_assert_eq!(header.metadata.unwrap_or_default(), metadata);
        let mut read: Vec<_> = header.tensors.into_iter().map(|e| (e.name, (e.facts.dtype, e.shape))).collect();
        read.sort();
        prop_assert_eq!(read, tensors.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Header::of_file(&bytes);
        let _ = Header::parse(&bytes, bytes.len() as u64 + 8);
    }
}
