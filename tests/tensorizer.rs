//! Tensorizer files: the fixtures, files made at random, and files with one fault each.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use serde_json::Value;
use tensorfs::internal::checkpoint::Tree;
use tensorfs::internal::format::ShardDescription;
use tensorfs::internal::format::tensorizer::{hashes, parse_file};
use tensorfs::internal::open_options::{OpenOptions, Prefer};
use tensorfs::{Dtype, ErrorKind, SetKind};

use written::{StoredTensor, TensorizerFile};

#[path = "common/tensorizer.rs"]
mod written;
#[path = "tensorizer/zeros.rs"]
mod zeros;

/// Element types by their text in a file, with the number of elements in a stored one.
const DTYPES: [(Dtype, &str, u64); 20] = [
    (Dtype::Bool, "|b1", 1),
    (Dtype::U8, "|u1", 1),
    (Dtype::I8, "|i1", 1),
    (Dtype::U16, "<u2", 1),
    (Dtype::I16, "<i2", 1),
    (Dtype::F16, "<f2", 1),
    (Dtype::U32, "<u4", 1),
    (Dtype::I32, "<i4", 1),
    (Dtype::F32, "<f4", 1),
    (Dtype::C64, "<c8", 1),
    (Dtype::U64, "<u8", 1),
    (Dtype::I64, "<i8", 1),
    (Dtype::F64, "<f8", 1),
    (Dtype::Bf16, "<V2\0torch.bfloat16", 1),
    (Dtype::F8E4M3, "|V1\0torch.float8_e4m3fn", 1),
    (Dtype::F8E5M2, "|V1\0torch.float8_e5m2", 1),
    (Dtype::F8E4M3Fnuz, "|V1\0torch.float8_e4m3fnuz", 1),
    (Dtype::F8E5M2Fnuz, "|V1\0torch.float8_e5m2fnuz", 1),
    (Dtype::F8E8M0, "|V1\0torch.float8_e8m0fnu", 1),
    (Dtype::F4, "|V1\0torch.float4_e2m1fn_x2", 2),
];

/// Dtype, shape and bytes of each tensor.
type Tensors = BTreeMap<String, (Dtype, Vec<u64>, Vec<u8>)>;

fn fixture(path: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    std::fs::read(folder.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The entries of the manifest that are about tensorizer files.
fn fixtures(section: &str) -> Vec<Value> {
    let manifest: Value =
        serde_json::from_slice(&fixture("manifest.json")).expect("the manifest is JSON");
    let all = manifest[section].as_array().expect("the manifest has this list");
    let found: Vec<Value> = all.iter().filter(|f| f["kind"] == "tensorizer").cloned().collect();
    assert!(!found.is_empty(), "no fixtures");
    found
}

/// The tensors of a file by its description.
fn read(description: &ShardDescription, file: &[u8]) -> Tensors {
    let tensor = |t: tensorfs::internal::format::TensorDescription<'_>| {
        let len = t.facts.dtype.bits_of(t.shape).expect("it was checked") / 8;
        let bytes = if t.start >= ZEROS_START {
            vec![0; len as usize]
        } else {
            file[t.start as usize..(t.start + len) as usize].to_vec()
        };
        (t.name.to_owned(), (t.facts.dtype, t.shape.to_vec(), bytes))
    };
    description.tensors().map(tensor).collect()
}

/// First of the zeros of tensors that have no data in the file.
const ZEROS_START: u64 = 1 << 63;

/// Checks that descriptions and tensors cover the file with its end mark, without overlap.
fn check(description: &ShardDescription, file: &[u8]) {
    let mut ranges = description.described.clone();
    assert_eq!(ranges[0].start, 0);
    assert!(ranges.is_sorted_by(|a, b| a.end < b.start), "{ranges:?}");
    let mut zeros_end = ZEROS_START;
    for tensor in description.tensors() {
        let len = tensor.facts.dtype.bits_of(tensor.shape).expect("it was checked") / 8;
        if tensor.start >= ZEROS_START {
            assert!(tensor.start >= zeros_end, "two tensors of the same zeros");
            zeros_end = tensor.start + len;
            continue;
        }
        ranges.push(tensor.start..tensor.start + len);
    }
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
    let end = ranges.last().expect("a file has a head").end as usize;
    assert!(end == file.len() || file[end - 8..end] == [0; 8]);
}

#[test]
fn good_fixtures_hold_what_the_manifest_says() {
    for entry in fixtures("good") {
        let file = fixture(entry["path"].as_str().unwrap());
        let description = parse_file(&file).unwrap_or_else(|fault| panic!("{entry}: {fault}"));
        check(&description, &file);
        let found: BTreeMap<_, _> = read(&description, &file)
            .into_iter()
            .map(|(name, (dtype, shape, bytes))| {
                let (dtype, nbytes) = (dtype.name(), bytes.len());
                (name, serde_json::json!({ "dtype": dtype, "shape": shape, "nbytes": nbytes }))
            })
            .collect();
        let mut expected = entry["tensors"].clone();
        for tensor in expected.as_object_mut().unwrap().values_mut() {
            tensor.as_object_mut().unwrap().remove("sha256");
        }
        assert_eq!(serde_json::to_value(found).unwrap(), expected, "{}", entry["id"]);
    }
}

#[test]
fn bad_fixtures_are_refused_for_the_reason_in_the_manifest() {
    for entry in fixtures("bad") {
        let file = fixture(entry["path"].as_str().unwrap());
        let found = match parse_file(&file) {
            // Its description tells where it is encrypted. To open the file needs a key.
            Ok(description) if description.encrypted.is_some() => "key_required",
            Ok(_) => panic!("{} is accepted", entry["id"]),
            Err(fault) => fault.kind.as_str(),
        };
        assert_eq!(entry["class"], found, "{entry}");
    }
}

/// Three tensors of a file without faults, one of them without bytes.
fn plain() -> TensorizerFile {
    let tensors = vec![
        StoredTensor::new("a", "<f4", &[2, 3], &[7; 24]),
        StoredTensor::new("none", "|u1", &[0, 5], &[]),
        StoredTensor::new("b.c", "<V2\0torch.bfloat16", &[4], &[9; 8]),
    ];
    TensorizerFile { padding: 40, ..TensorizerFile::new(2, tensors) }
}

/// A file with versioned entries, one of which has dimensions of 64 bits.
fn versioned() -> TensorizerFile {
    let mut file = plain();
    file.version = 5;
    file.flags[0] = 2;
    file.tensors[1].version = 5;
    file.tensors[1].both(|fields| fields.shape = vec![1 << 40, 0]);
    file
}

#[test]
fn files_without_faults_are_read() {
    for file in [plain(), versioned()] {
        let bytes = file.bytes();
        let description = parse_file(&bytes).unwrap();
        check(&description, &bytes);
        let found = read(&description, &bytes);
        let shape = &file.tensors[1].entry.shape;
        assert_eq!(found["a"], (Dtype::F32, vec![2, 3], vec![7; 24]));
        assert_eq!(found["none"], (Dtype::U8, shape.clone(), vec![]));
        assert_eq!(found["b.c"], (Dtype::Bf16, vec![4], vec![9; 8]));
    }
}

#[test]
fn entries_in_another_order_than_the_data_are_the_same_file() {
    let right = parse_file(&plain().bytes()).unwrap();
    for order in [vec![2, 0, 1], vec![1, 2, 0], vec![0, 2, 1]] {
        let bytes = TensorizerFile { order, ..plain() }.bytes();
        assert_eq!(parse_file(&bytes).unwrap(), right);
    }
}

#[test]
fn a_header_may_repeat_a_hash_with_its_value() {
    let mut file = plain();
    let hash = |n: u8| (n % 2, vec![7; 4 + 28 * usize::from(n % 2)]);
    file.tensors[0].hashes = (0..255).map(hash).collect();
    let hashed = hashes(&mut file.bytes().as_slice()).unwrap().unwrap();
    let found = &hashed[0].hashes;
    assert_eq!((found.crc32, found.sha256), (Some([7; 4]), Some([7; 32])));
    let lens: Vec<u64> = found.places().map(|place| place.end - place.start).collect();
    assert_eq!((lens.len(), &lens[..3]), (255, [4, 32, 4].as_slice()));
    for (changed, name) in [(254, "CRC32"), (253, "SHA-256")] {
        let mut file = file.clone();
        file.tensors[0].hashes[changed].1[3] = 8;
        let fault = parse_file(&file.bytes()).unwrap_err();
        assert_eq!(fault.kind, ErrorKind::HeaderDecode, "{fault}");
        assert!(fault.message.contains(&format!("a second {name} has another value")), "{fault}");
    }
}

#[test]
fn bytes_between_the_list_and_the_first_tensor_are_refused_and_not_described() {
    let fault = parse_file(&TensorizerFile { gap: 5, ..plain() }.bytes()).unwrap_err();
    assert_eq!((fault.kind, fault.tensor.as_deref()), (ErrorKind::OffsetGap, Some("a")));
    let expected = "after byte 252, where the list of tensors ends; save";
    assert!(fault.message.contains(expected), "{}", fault.message);
}

#[test]
fn the_end_mark_is_described_as_far_as_the_file_has_it() {
    for len in [0, 3, 8, 20] {
        let bytes = TensorizerFile { end: vec![0; len], ..plain() }.bytes();
        let description = parse_file(&bytes).unwrap();
        let data_end = (bytes.len() - len) as u64;
        let marks = description.described.iter().filter(|range| range.start >= data_end);
        let marks: Vec<_> = marks.cloned().collect();
        let expected = (len > 0).then(|| data_end..data_end + len.min(8) as u64);
        assert_eq!(marks, Vec::from_iter(expected), "{len} bytes behind the data");
    }
}

#[test]
fn another_file_in_the_place_of_the_end_mark_ends_the_first_one() {
    let first = TensorizerFile { end: Vec::new(), ..plain() }.bytes();
    let bytes = [first.clone(), versioned().bytes()].concat();
    let (description, alone) = (parse_file(&bytes).unwrap(), parse_file(&first).unwrap());
    assert_eq!(read(&description, &bytes), read(&alone, &first));
    assert_eq!(description.next_file, Some(first.len() as u64));
    // The bytes in the place of the mark are described, so that an index notices its change.
    let end = first.len() as u64..first.len() as u64 + 5;
    assert_eq!(description.described.last(), Some(&end));
    assert_eq!(alone.next_file, None);
    assert_eq!(parse_file(&plain().bytes()).unwrap().next_file, None);
    for len in 1..5 {
        let fault = parse_file(&bytes[..first.len() + len]).unwrap_err();
        assert_eq!(fault.kind, ErrorKind::DataTrailing, "{len} bytes of the next file");
    }
}

#[test]
fn fields_that_no_reader_uses_may_have_any_value() {
    let accepted = |change: fn(&mut TensorizerFile)| {
        let mut file = plain();
        change(&mut file);
        parse_file(&file.bytes()).map(|_| ()).unwrap_or_else(|fault| panic!("{fault}"));
    };
    accepted(|file| file.end = Vec::new());
    accepted(|file| file.end = vec![0; 3]);
    accepted(|file| file.end.extend(b"ignored"));
    accepted(|file| file.version = 1);
    accepted(|file| file.flags[0] = 1);
    accepted(|file| file.tensors[0].hashes.clear());
    accepted(|file| file.tensors[0].both(|fields| fields.kind = 0));
    let mut bytes = plain().bytes();
    bytes[41..57].fill(0xff);
    assert!(parse_file(&bytes).is_ok());
}

#[test]
fn safetensors_go_before_bintensors_and_both_before_tensorizer_also_before_numbered_files() {
    const NUMBERED: [&str; 2] = ["model-00001-of-00002.tensors", "model-00002-of-00002.tensors"];
    let hidden = |winner: &str, loser: &str, why: &str| {
        format!("model.safetensors: {winner} wins, {loser} is hidden ({why})")
    };
    let formats = "safetensors goes before bintensors, and both before tensorizer";
    let choose = "choose with -o prefer=file|shards";
    let set = "the set of 2 numbered tensorizer files";
    for (file, number, prefer, kind, note) in [
        (
            "model.safetensors",
            2,
            Prefer::File,
            SetKind::Single,
            hidden("the whole file", set, formats),
        ),
        (
            "model.safetensors",
            2,
            Prefer::Shards,
            SetKind::Single,
            hidden("the whole file", set, formats),
        ),
        ("model.bt", 2, Prefer::File, SetKind::Bintensors, hidden("model.bt", set, formats)),
        ("model.bt", 2, Prefer::Shards, SetKind::Bintensors, hidden("model.bt", set, formats)),
        (
            "model.bt",
            1,
            Prefer::File,
            SetKind::Bintensors,
            hidden("model.bt", "the set of 1 numbered tensorizer files", formats),
        ),
        (
            "model.tensors",
            2,
            Prefer::File,
            SetKind::Tensorizer,
            hidden("model.tensors", set, choose),
        ),
        (
            "model.tensors",
            2,
            Prefer::Shards,
            SetKind::Numbered,
            hidden(set, "model.tensors", choose),
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let bytes = match file {
            "model.safetensors" => fixture("safetensors/no_metadata.safetensors"),
            "model.bt" => fixture("bintensors/one.bt"),
            _ => plain().bytes(),
        };
        std::fs::write(folder.path().join(file), bytes).unwrap();
        for (index, name) in NUMBERED.iter().enumerate().take(number) {
            let tensor = StoredTensor::new(&format!("t{index}"), "|u1", &[4], &[5; 4]);
            let bytes = TensorizerFile::new(1, vec![tensor]).bytes();
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        let options = OpenOptions { prefer, ..OpenOptions::default() };
        let tree = Tree::scan(folder.path(), &options).unwrap();
        let mut proved = tree.families().into_iter().flat_map(|head| tree.prove(head));
        let (_, proved) = proved.next().unwrap();
        let kinds: Vec<SetKind> = proved.sets.iter().map(|set| set.kind).collect();
        assert_eq!(kinds, [kind], "{file} {prefer:?}");
        assert!(proved.sets[0].outcome.is_ok(), "{file} {prefer:?}");
        assert_eq!(proved.notes, [note]);
    }
}

/// A file with one fault: its name, the kind of the refusal, and the change that makes it.
type Case = (&'static str, ErrorKind, fn(&mut TensorizerFile));

const DECODE: ErrorKind = ErrorKind::HeaderDecode;
const DTYPE: ErrorKind = ErrorKind::UnknownDtype;

/// Faults of the head and of the file as a whole.
const HEADS: &[Case] = &[
    ("no magic", DECODE, |f| f.magic = b"|TZX|".to_vec()),
    ("magic in small letters", DECODE, |f| f.magic = b"|tzr|".to_vec()),
    ("version 0", DECODE, |f| f.version = 0),
    ("version 6", DECODE, |f| f.version = 6),
    ("version 2^32 - 1", DECODE, |f| f.version = u32::MAX),
    ("version 3 without encryption", DECODE, |f| f.version = 3),
    ("version 4 with bit 0 without encryption", DECODE, |f| (f.version, f.flags[0]) = (4, 1)),
    ("version 5 with bit 0 without encryption", DECODE, |f| (f.version, f.flags[0]) = (5, 1)),
    ("versioned entries in version 1", DECODE, |f| (f.version, f.flags[0]) = (1, 2)),
    ("versioned entries in version 4", DECODE, |f| (f.version, f.flags[0]) = (4, 2)),
    ("flag 2", DECODE, |f| (f.version, f.flags[0]) = (5, 4)),
    ("flag 7", DECODE, |f| (f.version, f.flags[0]) = (5, 0x80)),
    ("flag 8", DECODE, |f| (f.version, f.flags[1]) = (5, 1)),
    ("flag 255", DECODE, |f| (f.version, f.flags[31]) = (5, 0x80)),
    ("flag 255 of version 1", DECODE, |f| (f.version, f.flags[31]) = (1, 0x80)),
    ("count 0", DECODE, |f| f.count = Some(0)),
    ("count 2 of 3", ErrorKind::DataTrailing, |f| f.count = Some(2)),
    ("count 4 of 3", DECODE, |f| f.count = Some(4)),
    ("count 4 in room for it", DECODE, |f| (f.count, f.padding) = (Some(4), 400)),
    ("count 2^32", DECODE, |f| f.count = Some(1 << 32)),
    ("count 2^63", DECODE, |f| f.count = Some(1 << 63)),
    ("count 2^64 - 1", DECODE, |f| f.count = Some(u64::MAX)),
    ("area 0", DECODE, |f| f.area_len = Some(0)),
    ("area 1", DECODE, |f| f.area_len = Some(1)),
    ("area too small", DECODE, |f| f.area_len = Some(100)),
    ("area over headers", ErrorKind::OffsetOverlap, |f| f.area_len = Some(250)),
    ("area past the end", ErrorKind::HeaderLength, |f| f.area_len = Some(1 << 20)),
    ("area 2^63", ErrorKind::HeaderLength, |f| f.area_len = Some(1 << 63)),
    ("area 2^64 - 1", ErrorKind::HeaderLength, |f| f.area_len = Some(u64::MAX)),
    ("a tensor behind the last", ErrorKind::DataTrailing, |f| {
        f.end = vec![90, 0, 0, 0, 0, 0, 0, 0]
    }),
    ("one byte behind the last", ErrorKind::DataTrailing, |f| f.end = vec![1]),
];

/// Faults of entries, and of headers that agree with them.
const TENSORS: &[Case] = &[
    ("no name", DECODE, |f| f.tensors[0].both(|t| t.name = vec![])),
    ("a name that is not UTF-8", ErrorKind::HeaderUtf8, |f| {
        f.tensors[0].both(|t| t.name = b"a\xff".to_vec());
    }),
    ("a name cut within a character", ErrorKind::HeaderUtf8, |f| {
        f.tensors[0].both(|t| t.name = b"a\xc3".to_vec());
    }),
    ("a name longer than the area", DECODE, |f| f.tensors[0].both(|t| t.name_len = Some(u16::MAX))),
    ("a name of another length", DECODE, |f| f.tensors[0].both(|t| t.name_len = Some(2))),
    ("a name twice", ErrorKind::DuplicateKey, |f| f.tensors[0].both(|t| t.name = b"none".to_vec())),
    ("a path without steps", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e[]".to_vec())),
    ("a path of nothing", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e".to_vec())),
    ("a path that is an object", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e{}".to_vec())),
    ("a path that is text", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e\"a\"".to_vec())),
    ("a path that is cut", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e[\"a\"".to_vec())),
    ("a path with more behind it", DECODE, |f| {
        f.tensors[0].both(|t| t.name = b"\x1e[1]x".to_vec())
    }),
    ("a path with space before it", DECODE, |f| {
        f.tensors[0].both(|t| t.name = b"\x1e [1]".to_vec())
    }),
    ("a path that is an empty name", DECODE, |f| {
        f.tensors[0].both(|t| t.name = b"\x1e[\"\"]".to_vec())
    }),
    ("a path with a newline", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e[\n1]".to_vec())),
    ("a path with a return", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e[\r1]".to_vec())),
    ("a step below 0", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e[-1]".to_vec())),
    ("a step with a fraction", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e[1.5]".to_vec())),
    ("a step past 2^64", DECODE, |f| {
        f.tensors[0].both(|t| t.name = b"\x1e[18446744073709551616]".to_vec());
    }),
    ("a step that is true", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e[true]".to_vec())),
    ("a step that is null", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e[null]".to_vec())),
    ("a step that is a path", DECODE, |f| f.tensors[0].both(|t| t.name = b"\x1e[[1]]".to_vec())),
    ("a step with half a character", DECODE, |f| {
        f.tensors[0].both(|t| t.name = b"\x1e[\"\\ud800\"]".to_vec());
    }),
    ("a path that is not UTF-8", DECODE, |f| {
        f.tensors[0].both(|t| t.name = b"\x1e[\"\xff\"]".to_vec());
    }),
    ("a path of many levels", DECODE, |f| f.tensors[0].both(|t| t.name = deep(60_000))),
    ("a path that joins to another name", ErrorKind::DuplicateKey, |f| {
        f.tensors[0].both(|t| t.name = b"\x1e[\"b\",\"c\"]".to_vec());
    }),
    ("numbers and texts that join to one name", ErrorKind::DuplicateKey, |f| {
        f.tensors[0].both(|t| t.name = b"\x1e[\"x\",1]".to_vec());
        f.tensors[2].both(|t| t.name = b"\x1e[\"x\",\"1\"]".to_vec());
    }),
    ("a path through a tensor", ErrorKind::DuplicateKey, |f| {
        f.tensors[2].both(|t| t.name = b"\x1e[\"a\",0]".to_vec());
    }),
    ("a path of a parameter", DECODE, |f| {
        f.tensors[0].both(|t| (t.name, t.kind) = (b"\x1e[\"x\",0]".to_vec(), 0));
    }),
    ("a path of a buffer", DECODE, |f| {
        f.tensors[0].both(|t| (t.name, t.kind) = (b"\x1e[\"x\",0]".to_vec(), 1));
    }),
    ("type 3", DECODE, |f| f.tensors[0].both(|t| t.kind = 3)),
    ("type 255", DECODE, |f| f.tensors[0].both(|t| t.kind = 255)),
    ("no dtype", DTYPE, |f| f.tensors[0].both(|t| t.dtype = vec![])),
    ("a dtype of objects", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"|O8".to_vec())),
    ("a dtype of text", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"<U1".to_vec())),
    ("a dtype of times", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"<M8[s]".to_vec())),
    ("a dtype of big-endian numbers", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b">f4".to_vec())),
    ("a dtype of no byte order", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"=f4".to_vec())),
    ("a dtype without byte order", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"f4".to_vec())),
    ("complex128", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"<c16".to_vec())),
    ("float128", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"<f16".to_vec())),
    ("a dtype of fields", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"[('a','<f4')]".to_vec())),
    ("opaque without a name", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"|V4".to_vec())),
    ("opaque with an empty name", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"|V4\0".to_vec())),
    ("opaque float32", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"|V4\0torch.float32".to_vec())),
    ("complex32", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"|V4\0torch.complex32".to_vec())),
    ("int4", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"|V1\0torch.int4".to_vec())),
    ("quantised", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"|V1\0torch.qint8".to_vec())),
    ("two marks", DTYPE, |f| {
        f.tensors[0].both(|t| t.dtype = b"<V2\0torch.bfloat16\0x".to_vec());
    }),
    ("bfloat16 of 4 bytes", DTYPE, |f| {
        f.tensors[0].both(|t| t.dtype = b"<V4\0torch.bfloat16".to_vec());
    }),
    ("bfloat16 of no bytes", DTYPE, |f| {
        f.tensors[0].both(|t| t.dtype = b"<V\0torch.bfloat16".to_vec());
    }),
    ("bfloat16 as float16", DTYPE, |f| {
        f.tensors[0].both(|t| t.dtype = b"<f2\0torch.bfloat16".to_vec());
    }),
    ("big-endian bfloat16", DTYPE, |f| {
        f.tensors[0].both(|t| t.dtype = b">V2\0torch.bfloat16".to_vec());
    }),
    ("a dtype that is not UTF-8", DTYPE, |f| f.tensors[0].both(|t| t.dtype = b"<f\xff".to_vec())),
    ("one element of 4 bits", ErrorKind::Misaligned, |f| {
        f.tensors[0].both(|t| {
            (t.dtype, t.shape) = (b"|V1\0torch.float4_e2m1fn_x2".to_vec(), vec![]);
        });
    }),
    ("a shape of more bytes", ErrorKind::SizeMismatch, |f| f.tensors[0].both(|t| t.shape[0] = 3)),
    ("a shape of fewer bytes", ErrorKind::SizeMismatch, |f| f.tensors[0].both(|t| t.shape[0] = 1)),
    ("a shape of no bytes", ErrorKind::SizeMismatch, |f| f.tensors[0].both(|t| t.shape[0] = 0)),
    ("a dtype of more bytes", ErrorKind::SizeMismatch, |f| {
        f.tensors[0].both(|t| t.dtype = b"<f8".to_vec());
    }),
    ("a shape past 2^64", ErrorKind::Overflow, |f| {
        f.tensors[0].both(|t| t.shape = vec![1 << 31, 1 << 31, 4]);
    }),
    ("a shape of many dimensions past 2^64", ErrorKind::Overflow, |f| {
        f.tensors[0].both(|t| t.shape = vec![2; 255]);
    }),
    ("a tensor without its data", ErrorKind::SizeMismatch, |f| {
        f.tensors[2].data.clear();
        f.tensors[2].both(|t| t.data_len = 0);
    }),
    ("a tensor without data in version 2", ErrorKind::SizeMismatch, |f| {
        f.tensors[2].data.clear();
        f.tensors[2].both(|t| t.data_len = 0);
    }),
    ("data past the end", ErrorKind::DataTruncated, |f| {
        f.tensors[2].both(|t| t.data_len = 1 << 30)
    }),
    ("data past 2^64", ErrorKind::DataTruncated, |f| {
        f.tensors[2].both(|t| t.data_len = u64::MAX - 4);
    }),
    ("data of negative length", ErrorKind::DataTruncated, |f| {
        f.tensors[2].both(|t| t.data_len = -8_i64 as u64);
    }),
    ("data over the next header", ErrorKind::SizeMismatch, |f| {
        f.tensors[0].both(|t| t.data_len = 20);
    }),
];

/// Faults of one of an entry and a header only, and of the places in entries.
const PLACES: &[Case] = &[
    ("another name in the header", DECODE, |f| f.tensors[0].header.name = b"x".to_vec()),
    ("a longer name in the header", DECODE, |f| f.tensors[0].header.name = b"ab".to_vec()),
    ("another type in the header", DECODE, |f| f.tensors[0].header.kind = 0),
    ("another dtype in the header", DECODE, |f| f.tensors[0].header.dtype = b"<i4".to_vec()),
    ("another shape in the header", DECODE, |f| f.tensors[0].header.shape = vec![3, 2]),
    ("a dimension less in the header", DECODE, |f| f.tensors[0].header.shape = vec![6]),
    ("more dimensions than there are", DECODE, |f| f.tensors[0].header.rank = Some(255)),
    ("another length in the header", DECODE, |f| f.tensors[0].header.data_len = 20),
    ("a negative length in the header", DECODE, |f| {
        f.tensors[0].header.data_len = -24_i64 as u64;
    }),
    ("another length in the entry", DECODE, |f| f.tensors[0].entry.data_len = 20),
    ("another name in the entry", DECODE, |f| f.tensors[0].entry.name = b"x".to_vec()),
    ("another type in the entry", DECODE, |f| f.tensors[0].entry.kind = 1),
    ("another dtype in the entry", DECODE, |f| f.tensors[0].entry.dtype = b"<i4".to_vec()),
    ("another shape in the entry", DECODE, |f| f.tensors[0].entry.shape = vec![3, 2]),
    ("a header of length 0", DECODE, |f| f.tensors[0].header_len = Some(0)),
    ("a header of length 8", DECODE, |f| f.tensors[0].header_len = Some(8)),
    ("a header of length 2^62", DECODE, |f| f.tensors[0].header_len = Some(1 << 62)),
    ("bytes behind the last field", DECODE, |f| f.tensors[0].after = vec![0; 3]),
    ("a header longer than any", DECODE, |f| f.tensors[0].after = vec![0; 1 << 19]),
    ("a header in the head", ErrorKind::OffsetOverlap, |f| f.tensors[0].header_start = Some(0)),
    ("a header in the area", ErrorKind::OffsetOverlap, |f| f.tensors[0].header_start = Some(80)),
    ("a header past the end", ErrorKind::DataTruncated, |f| {
        f.tensors[2].header_start = Some(1 << 40)
    }),
    ("a header at 2^64 - 1", ErrorKind::DataTruncated, |f| {
        f.tensors[2].header_start = Some(u64::MAX)
    }),
    ("two tensors in one place", ErrorKind::OffsetOverlap, |f| {
        // Here the header of the first one begins.
        f.tensors[1].header_start = Some(252);
    }),
    ("data before its header", DECODE, |f| f.tensors[0].data_start = Some(100)),
    ("data one byte late", DECODE, |f| f.tensors[0].data_start = Some(331)),
    ("data past the end", ErrorKind::DataTruncated, |f| f.tensors[0].data_start = Some(1 << 40)),
    ("data at 2^64 - 1", ErrorKind::DataTruncated, |f| f.tensors[0].data_start = Some(u64::MAX)),
    ("a gap between tensors", ErrorKind::OffsetGap, |f| f.tensors[0].data.extend([0; 5])),
    ("less data than listed", ErrorKind::OffsetOverlap, |f| f.tensors[0].data.truncate(20)),
    ("more hashes than there are", DECODE, |f| f.tensors[0].hash_count = Some(3)),
    ("255 hashes", DECODE, |f| f.tensors[0].hash_count = Some(255)),
    ("fewer hashes than there are", DECODE, |f| f.tensors[0].hash_count = Some(1)),
    ("hashes of no length", DECODE, |f| f.tensors[0].hashes_len = Some(0)),
    ("hashes past the header", DECODE, |f| f.tensors[0].hashes_len = Some(u16::MAX)),
    ("a hash of another type", DECODE, |f| f.tensors[0].hashes[0].0 = 2),
    ("a CRC32 of 5 bytes", DECODE, |f| f.tensors[0].hashes[0].1 = vec![0; 5]),
    ("a SHA-256 of 31 bytes", DECODE, |f| f.tensors[0].hashes[1].1 = vec![0; 31]),
    ("a hash without bytes", DECODE, |f| f.tensors[0].hashes[1].1.clear()),
];

/// Faults of files with versioned entries.
const VERSIONED: &[Case] = &[
    ("an entry of version 0", DECODE, |f| f.tensors[0].version = 0),
    ("an entry of version 2", DECODE, |f| f.tensors[0].version = 2),
    ("an entry of version 6", DECODE, |f| f.tensors[0].version = 6),
    ("a flag that is lost", DECODE, |f| f.flags[0] = 0),
    ("a version that is lost", DECODE, |f| f.version = 4),
    ("F4 past 2^64", ErrorKind::Overflow, |f| {
        f.tensors[1].both(|t| {
            (t.dtype, t.shape) = (b"|V1\0torch.float4_e2m1fn_x2".to_vec(), vec![0, u64::MAX]);
        });
    }),
    ("a long shape past 2^64", ErrorKind::Overflow, |f| {
        f.tensors[1].both(|t| t.shape = vec![1 << 33, 1 << 33, 0]);
    }),
    ("bits past 2^64", ErrorKind::Overflow, |f| f.tensors[1].both(|t| t.shape = vec![1 << 62])),
];

/// A path whose only step is an array in an array, and so on.
fn deep(levels: usize) -> Vec<u8> {
    let mut name = vec![0x1e];
    name.resize(1 + levels, b'[');
    name
}

#[test]
fn each_file_with_a_fault_is_refused_for_that_fault() {
    let plain_cases = HEADS.iter().chain(TENSORS).chain(PLACES).map(|case| (plain(), case));
    let all: Vec<_> = plain_cases.chain(VERSIONED.iter().map(|case| (versioned(), case))).collect();
    assert!(all.len() > 140, "{} cases", all.len());
    let mut wrong = Vec::new();
    for (mut file, (name, kind, change)) in all {
        change(&mut file);
        match parse_file(&file.bytes()) {
            Err(fault) if fault.kind == *kind => {
                let text = fault.to_string();
                assert!(!text.contains('\n') && text.len() < 2000, "{name}: {text}");
                let advice = ["save ", "; the download", "; the program", "give it the suffix"];
                assert!(advice.iter().any(|advice| text.contains(advice)), "{name}: {text}");
            }
            other => wrong.push(format!("{name}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    for file in [plain(), versioned()] {
        let bytes = file.bytes();
        let data_end = bytes.len() - file.end.len();
        for len in 0..data_end {
            assert!(parse_file(&bytes[..len]).is_err(), "cut to {len} bytes");
        }
        for len in data_end..=bytes.len() {
            assert!(parse_file(&bytes[..len]).is_ok(), "cut to {len} bytes");
        }
    }
}

#[test]
fn a_changed_byte_never_changes_what_a_file_holds_unnoticed() {
    for file in [plain(), versioned()] {
        let bytes = file.bytes();
        let expected = read(&parse_file(&bytes).unwrap(), &bytes);
        let data: Vec<_> = [[7; 24].as_slice(), &[9; 8]]
            .map(|data| {
                let start = bytes.windows(data.len()).position(|window| window == data).unwrap();
                start..start + data.len()
            })
            .into();
        for place in
            (0..bytes.len()).filter(|place| !data.iter().any(|range| range.contains(place)))
        {
            for change in [1, 2, 4, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[place] ^= change;
                if let Ok(description) = parse_file(&changed) {
                    assert_eq!(read(&description, &changed), expected, "byte {place} ^ {change}");
                }
            }
        }
    }
}

fn tensor() -> impl Strategy<Value = (Dtype, String, Vec<u64>, Vec<u64>)> {
    let dtype = prop::sample::select(DTYPES.as_slice());
    let shape = prop::collection::vec(0..5_u64, 0..4);
    (dtype, shape).prop_map(|((dtype, text, packed), shape)| {
        let mut whole = shape.clone();
        let mut stored = shape;
        if packed > 1 {
            stored.push(3);
            whole.push(3 * packed);
        }
        (dtype, text.to_owned(), stored, whole)
    })
}

proptest! {
    #[test]
    fn files_made_at_random_are_read_as_they_were_made(
        made in prop::collection::btree_map("[a-z.\u{e9}]{1,9}", tensor(), 1..12),
        padding in 0..100_usize,
        seed in any::<u8>(),
    ) {
        let mut expected = Tensors::new();
        let mut stored = Vec::new();
        for (number, (name, (dtype, text, shape, whole))) in made.into_iter().enumerate() {
            let len = dtype.bits_of(&whole).unwrap() / 8;
            let data: Vec<u8> = (0..len).map(|byte| (byte as u8) ^ seed ^ number as u8).collect();
            stored.push(StoredTensor::new(&name, &text, &shape, &data));
            expected.insert(name, (dtype, whole, data));
        }
        let bytes = TensorizerFile { padding, ..TensorizerFile::new(2, stored) }.bytes();
        let description = parse_file(&bytes).unwrap();
        check(&description, &bytes);
        prop_assert_eq!(read(&description, &bytes), expected);
    }

    #[test]
    fn random_changes_of_a_file_are_refused_or_leave_it_valid(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<Option<prop::sample::Index>>(),
    ) {
        let mut bytes = versioned().bytes();
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(description) = parse_file(&bytes) {
            check(&description, &bytes);
        }
    }
}
