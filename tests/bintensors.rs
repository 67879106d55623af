//! Tests of the bintensors header, with fixtures, and with random bytes that the genuine crate
//! reads too.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use bintensors::{BinTensors, View};
use proptest::prelude::*;
use serde_json::Value;
use tensorfs::internal::format::bintensors::{encode, number_of, parse, parse_file, parse_stream};
use tensorfs::internal::format::safetensors::{Header, PREFIX_LEN};
use tensorfs::{Dtype, ErrorKind};

/// Element types by their number in the format.
const GENUINE: [bintensors::Dtype; 15] = [
    bintensors::Dtype::BOOL,
    bintensors::Dtype::U8,
    bintensors::Dtype::I8,
    bintensors::Dtype::F8_E5M2,
    bintensors::Dtype::F8_E4M3,
    bintensors::Dtype::I16,
    bintensors::Dtype::U16,
    bintensors::Dtype::F16,
    bintensors::Dtype::BF16,
    bintensors::Dtype::I32,
    bintensors::Dtype::U32,
    bintensors::Dtype::F32,
    bintensors::Dtype::F64,
    bintensors::Dtype::I64,
    bintensors::Dtype::U64,
];

/// A tensor as the genuine writer takes it.
#[derive(Clone, Debug)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<u64>,
    sizes: Vec<usize>,
    data: Vec<u8>,
}

impl View for &Tensor {
    fn dtype(&self) -> bintensors::Dtype {
        GENUINE[usize::from(number_of(self.dtype).expect("a dtype that bintensors has"))]
    }

    fn shape(&self) -> &[usize] {
        &self.sizes
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (&self.data).into()
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

type Tensors = BTreeMap<String, Tensor>;
type Metadata = BTreeMap<String, String>;

/// The file that the genuine crate writes.
fn genuine(tensors: &Tensors, metadata: Option<&Metadata>) -> Vec<u8> {
    let metadata = metadata.map(|map| map.clone().into_iter().collect::<HashMap<_, _>>());
    bintensors::serialize(tensors, &metadata).expect("the genuine crate writes it")
}

/// The file that we write.
fn ours(tensors: &Tensors, metadata: Option<&Metadata>) -> Vec<u8> {
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_by_key(|(name, tensor)| (Reverse(number_of(tensor.dtype)), *name));
    let entries = sorted
        .iter()
        .map(|(name, t)| (name.as_str(), t.dtype, t.shape.as_slice(), t.data.len() as u64));
    let mut file = encode(metadata, entries).expect("we write it");
    sorted.iter().for_each(|(_, tensor)| file.extend(&tensor.data));
    file
}

fn kind(header: &[u8], file_len: u64) -> Option<ErrorKind> {
    parse(header, file_len).err().map(|fault| fault.kind)
}

fn fixture(path: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    std::fs::read(folder.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The entries of the manifest that are about bintensors.
fn fixtures(section: &str) -> Vec<Value> {
    let manifest: Value =
        serde_json::from_slice(&fixture("manifest.json")).expect("the manifest is JSON");
    let all = manifest[section].as_array().expect("the manifest has this list");
    let found: Vec<Value> = all.iter().filter(|f| f["kind"] == "bintensors").cloned().collect();
    assert!(!found.is_empty(), "no fixtures");
    found
}

#[test]
fn good_fixtures_hold_what_the_manifest_says() {
    for entry in fixtures("good") {
        let id = entry["id"].as_str().unwrap();
        let header = parse_file(&fixture(entry["path"].as_str().unwrap())).unwrap();
        let described = |e: &tensorfs::internal::format::safetensors::Entry| {
            let bytes = e.data_offsets.end - e.data_offsets.start;
            let json = serde_json::json!({ "dtype": e.facts.dtype.name(), "shape": e.shape, "nbytes": bytes });
            (e.name.clone(), json)
        };
        let found: BTreeMap<_, _> = header.tensors.iter().map(described).collect();
        let mut expected = entry["tensors"].clone();
        for tensor in expected.as_object_mut().unwrap().values_mut() {
            tensor.as_object_mut().unwrap().remove("sha256");
        }
        assert_eq!(serde_json::to_value(found).unwrap(), expected, "{id}");
        if let Some(expected) = entry["metadata"].as_object() {
            assert_eq!(&serde_json::json!(header.metadata), &serde_json::json!(expected), "{id}");
        }
    }
}

#[test]
fn bad_fixtures_are_refused_for_the_reason_in_the_manifest() {
    for entry in fixtures("bad") {
        let bytes = fixture(entry["path"].as_str().unwrap());
        let found = parse_file(&bytes).expect_err(entry["id"].as_str().unwrap()).kind.as_str();
        let also = entry["also"].as_array().into_iter().flatten();
        let expected: Vec<&Value> = also.chain([&entry["class"]]).collect();
        assert!(expected.iter().any(|kind| *kind == found), "{entry}: {found}");
    }
}

#[test]
fn each_dtype_has_the_number_of_the_genuine_crate_or_is_refused_by_name() {
    for &dtype in Dtype::ALL {
        let encoded = encode(&Metadata::new(), [("t", dtype, [0u64].as_slice(), 0)].into_iter());
        match number_of(dtype) {
            Some(number) => {
                assert_eq!(GENUINE[usize::from(number)].size() as u64 * 8, dtype.bits());
                let genuine =
                    BinTensors::deserialize(&encoded.unwrap()).unwrap().tensors()[0].1.dtype();
                assert_eq!(format!("{genuine:?}"), dtype.name());
            }
            None => {
                let fault = encoded.unwrap_err();
                assert_eq!(
                    (fault.kind, fault.tensor.as_deref()),
                    (ErrorKind::UnknownDtype, Some("t"))
                );
                assert!(fault.message.contains(dtype.name()), "{fault}");
            }
        }
    }
}

#[test]
fn a_header_that_no_reader_would_take_is_not_written() {
    let name = "n".repeat(50_000_000);
    let kind = |entries: &[(&str, Dtype, &[u64], u64)]| {
        encode(&Metadata::new(), entries.iter().copied()).unwrap_err().kind
    };
    let (first, second) = (format!("{name}1"), format!("{name}2"));
    let entry = |name| (name, Dtype::U8, [].as_slice(), 1u64);
    assert_eq!(kind(&[entry(first.as_str()), entry(second.as_str())]), ErrorKind::HeaderTooLarge);
    let end = u64::MAX;
    assert_eq!(kind(&[("a", Dtype::U8, &[end], end), entry("b")]), ErrorKind::Overflow);
}

#[test]
fn a_header_is_read_as_it_comes_and_a_failed_read_stays_one() {
    struct Broken;
    impl std::io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::from_raw_os_error(5))
        }
    }
    assert_eq!(parse_stream(|| Broken, 100, 200).unwrap_err().raw_os_error(), Some(5));
    // A stream that ends before the header does.
    assert!(parse_stream(|| [0u8].as_slice(), 8, 16).is_err());
    // Bytes behind the values are not even read.
    assert_eq!(kind(&[0, 0], 10), None);
    let header = parse_stream(|| [0u8, 0].as_slice(), 1 << 20, (1 << 20) + 8).unwrap();
    assert_eq!(header.unwrap().tensors, []);
}

#[test]
fn numbers_that_do_not_fit_are_refused_before_memory_is_taken() {
    let huge = [253, 0, 0, 0, 0, 0, 0, 0, 1];
    let with = |start: &[u8]| [start, &huge].concat();
    // Metadata strings, tensors, bytes of a name, dimensions.
    for start in [&[1][..], &[0], &[0, 1], &[0, 1, 1, b'a', 1]] {
        assert_eq!(kind(&with(start), 100), Some(ErrorKind::HeaderDecode), "{start:?}");
    }
    // Shapes and offsets of 64 bits are only wrong together.
    let end = [253, 255, 255, 255, 255, 255, 255, 255, 255];
    let header = [&[0, 1, 1, b'a', 1, 1][..], &end, &[0], &end].concat();
    assert_eq!(kind(&header, 100), Some(ErrorKind::Overflow));
    let header = [&[0, 1, 1, b'a', 1, 2, 0][..], &end, &[0, 0]].concat();
    assert_eq!(kind(&header, 8 + header.len() as u64), None);
}

#[test]
fn the_older_layout_is_read_only_where_the_newer_one_does_not_fit() {
    // Two tensors, then names in another order than theirs.
    let older = [0, 2, 1, 1, 2, 0, 2, 1, 1, 1, 2, 3, 2, 1, b'b', 1, 1, b'a', 0];
    let header = parse(&older, 8 + older.len() as u64 + 3).unwrap();
    let names: Vec<&str> = header.tensors.iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    // One name too few, one position twice, one beyond the end; each with the fault of the newer.
    for bad in
        [[1, 1, b'b', 1, 1, b'a', 0], [2, 1, b'b', 1, 1, b'a', 1], [2, 1, b'b', 2, 1, b'a', 0]]
    {
        let header = [&older[..12], &bad].concat();
        assert!(parse(&header, 8 + header.len() as u64 + 3).is_err(), "{bad:?}");
    }
    // A name for both.
    let header = [&older[..12], &[2, 1, b'a', 1, 1, b'a', 0]].concat();
    assert!(parse(&header, 8 + header.len() as u64 + 3).is_err());
}

fn tensors() -> impl Strategy<Value = Tensors> {
    let known = Dtype::ALL.iter().copied().filter(|dtype| number_of(*dtype).is_some());
    let dtype = prop::sample::select(known.collect::<Vec<_>>());
    let dim =
        prop_oneof![5 => 0u64..4, 1 => prop::sample::select(vec![249u64, 250, 251, 255, 256])];
    let shape = prop::collection::vec(dim, 0..4);
    let tensor = (dtype, shape, any::<u8>()).prop_filter_map("large", |(dtype, shape, seed)| {
        let len = dtype.bits_of(&shape)? / 8;
        let data = (0..len).map(|at| seed.wrapping_add(at as u8)).collect();
        let sizes = shape.iter().map(|&dim| dim as usize).collect();
        (len < 100_000).then_some(Tensor { dtype, shape, sizes, data })
    });
    prop::collection::btree_map(prop_oneof![4 => ".*", 1 => "x{245,255}"], tensor, 0..8)
}

fn metadata() -> impl Strategy<Value = Option<Metadata>> {
    prop::option::of(prop::collection::btree_map(".*", ".*", 0..4))
}

/// The tensors that the genuine crate reads, in the order of the data.
fn read_by_genuine(file: &[u8]) -> Option<Vec<(String, String, Vec<usize>)>> {
    let read = BinTensors::deserialize(file).ok()?;
    let names = read.metadata().offset_keys();
    let described = names.into_iter().map(|name| {
        let view = read.tensor(&name).expect("a name that it lists");
        (name, format!("{:?}", view.dtype()), view.shape().to_vec())
    });
    Some(described.collect())
}

fn described(header: &Header) -> Vec<(String, String, Vec<usize>)> {
    let entry = |e: &tensorfs::internal::format::safetensors::Entry| {
        let shape = e.shape.iter().map(|&dim| dim as usize).collect();
        (e.name.clone(), e.facts.dtype.name().to_owned(), shape)
    };
    header.tensors.iter().map(entry).collect()
}

proptest! {
    #[test]
    fn what_is_written_is_what_the_genuine_crate_writes(tensors in tensors(), metadata in metadata()) {
        let file = genuine(&tensors, metadata.as_ref());
        prop_assert_eq!(&ours(&tensors, metadata.as_ref()), &file);
        let header = parse_file(&file).unwrap();
        prop_assert_eq!(header.metadata.clone(), metadata);
        prop_assert_eq!(Some(described(&header)), read_by_genuine(&file));
    }

    #[test]
    fn a_changed_byte_is_judged_as_the_genuine_crate_judges_it(
        tensors in tensors(),
        metadata in metadata(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut file = genuine(&tensors, metadata.as_ref());
        let header_len = u64::from_le_bytes(*file.first_chunk().unwrap()) + PREFIX_LEN;
        let at = at.index(header_len as usize);
        file[at] = byte;
        let theirs = read_by_genuine(&file);
        match parse_file(&file) {
            Ok(header) => prop_assert_eq!(Some(described(&header)), theirs),
            // The one deliberate difference: keys that stand twice.
            Err(fault) => prop_assert!(theirs.is_none() || fault.kind == ErrorKind::DuplicateKey, "{}", fault),
        }
    }

    #[test]
    fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_file(&bytes);
        let _ = parse(&bytes, bytes.len() as u64 + 8);
    }
}
