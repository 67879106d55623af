//! Tests of the bytes of an index: the layout does not change, a damaged index is refused, and the
//! content of an accepted index can be used without further checks.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use tensorfs::internal::catalog::{Catalog, Piece, ShardHeader};
use tensorfs::internal::format::OutputFormat;
use tensorfs::internal::format::dcp::{SHARDING_INFO, VERSION};
use tensorfs::internal::format::safetensors::{Entry, Header};
use tensorfs::internal::hash::Digest;
use tensorfs::internal::index::{FileRecord, Index, SetRecord, VirtualFileRecord};
use tensorfs::internal::layout::{Extent, Layout};
use tensorfs::internal::version::Version;
use tensorfs::internal::view::FileSpec;
use tensorfs::{Dtype, ErrorKind};

/// Bytes before the content: see docs/formats/index.md.
const FRAME_LEN: usize = 40;

/// Why what is believed may still not be shown as one file.
const REFUSALS: [ErrorKind; 4] = [
    ErrorKind::Misaligned,
    ErrorKind::Overflow,
    ErrorKind::HeaderTooLarge,
    ErrorKind::UnknownDtype,
];

/// A tensor, or a piece of one: shard, name, dtype, shape, and for pieces the first index.
type Stored<'a> = (usize, &'a str, Dtype, &'a [u64], Option<&'a [u64]>);

/// The headers of shards that hold `stored`, one after another.
fn headers(stored: &[Stored<'_>]) -> Vec<ShardHeader> {
    let shards = stored.iter().map(|(shard, ..)| shard + 1).max().unwrap_or(1);
    let boxed = stored.iter().any(|(.., offset)| offset.is_some());
    let header = |shard| {
        let mut end = 0;
        let mut notes = serde_json::Map::new();
        let mut tensors = Vec::new();
        for (_, name, dtype, shape, offset) in stored.iter().filter(|(at, ..)| *at == shard) {
            let start = end;
            end += dtype.bits_of(shape).unwrap() / 8;
            tensors.push(Entry {
                name: (*name).to_owned(),
                facts: (*dtype).into(),
                shape: shape.to_vec(),
                data_offsets: start..end,
            });
            if let Some(offset) = offset {
                let mut saved = offset.to_vec();
                // As torch writes them: pairs of F4 elements.
                if let (Dtype::F4, Some(last)) = (dtype, saved.last_mut()) {
                    *last /= 2;
                }
                let note = serde_json::json!({ "saved_offsets": saved });
                notes.insert((*name).to_owned(), note);
            }
        }
        let mut metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        if boxed {
            metadata.insert(SHARDING_INFO.to_owned(), serde_json::Value::from(notes).to_string());
            metadata.insert(VERSION.to_owned(), "1.0".to_owned());
        }
        let header = Header { metadata: Some(metadata), tensors, header_len: 1000 };
        let name = format!("shard-{shard}.safetensors");
        ShardHeader { name, file_len: header.data_start() + end, header: header.into() }
    };
    (0..shards).map(header).collect()
}

fn catalog(stored: &[Stored<'_>]) -> Result<Catalog, tensorfs::Fault> {
    let headers = headers(stored);
    let headers: Vec<&ShardHeader> = headers.iter().collect();
    if stored.iter().any(|(.., offset)| offset.is_some()) {
        Catalog::of_dcp_shards(&headers, None)
    } else {
        Catalog::of_whole_tensors(&headers, None)
    }
}

fn set(name: &str, kind: &str, catalog: Catalog) -> SetRecord {
    let spec = FileSpec::single(name, OutputFormat::Safetensors);
    let layout = Layout::of(&catalog, &spec).unwrap();
    let header = Digest::of(layout.header());
    SetRecord {
        name: name.to_owned(),
        kind: kind.to_owned(),
        files: catalog.shards.iter().map(|shard| shard.name.clone()).collect(),
        noted: kind == "dcp",
        manifest: None,
        map: None,
        virtual_files: vec![VirtualFileRecord { spec: spec.digest(), len: layout.len(), header }],
        catalog,
    }
}

fn index_of(sets: Vec<SetRecord>) -> Index {
    let shards = sets.iter().flat_map(|set| &set.catalog.shards);
    let file = |(at, shard): (usize, &tensorfs::internal::catalog::Shard)| FileRecord {
        name: shard.name.clone(),
        version: Version::from_words(
            &[
                [0, 0, 1000 + at as u64, 0, shard.file_len, 0].as_slice(),
                &[1, 1_700_000_000, 123_456_789, 1, -5_i64 as u64, 0, 7, 0],
            ]
            .concat()
            .try_into()
            .unwrap(),
        ),
        described: shard.described.clone(),
        hash: Digest::of(shard.name.as_bytes()),
    };
    Index {
        folder: b"/models/a".to_vec(),
        made: 1_700_000_100,
        files: shards.enumerate().map(file).collect(),
        unusable: Vec::new(),
        weights: sets.iter().flat_map(|set| set.files.clone()).collect(),
        notes: Vec::new(),
        sets,
    }
}

fn whole_set() -> SetRecord {
    let accented = "model.layers.0.\u{e9}\u{3b1}.weight";
    let long = "model.".repeat(100);
    let (long_a, long_b) = (format!("{long}a"), format!("{long}b"));
    let stored: &[Stored<'_>] = &[
        (0, "model.layers.0.mlp.weight", Dtype::Bf16, &[16, 8], None),
        (0, "model.layers.0.mlp.bias", Dtype::F32, &[16], None),
        (0, accented, Dtype::F6E2M3, &[4], None),
        (0, "", Dtype::F64, &[], None),
        (1, "model.layers.1.mlp.weight", Dtype::Bf16, &[16, 8], None),
        (1, "model.layers.1.mlp.packed", Dtype::F4, &[2, 3], None),
        (1, "empty", Dtype::I64, &[0, 1 << 40], None),
        (1, &long_b, Dtype::U8, &[1], None),
        (1, &long_a, Dtype::U8, &[1], None),
    ];
    SetRecord {
        map: Some(("model.safetensors.index.json".to_owned(), r#"{"total_size":1}"#.to_owned())),
        manifest: Some(true),
        ..set("model.safetensors", "weight_map", catalog(stored).unwrap())
    }
}

/// Boxes: by rows, by columns with replicas, sub-byte ones, and a tensor without elements.
fn boxed_set() -> SetRecord {
    let stored: &[Stored<'_>] = &[
        (0, "a.rows", Dtype::F32, &[2, 4], Some(&[0, 0])),
        (1, "a.rows", Dtype::F32, &[3, 4], Some(&[2, 0])),
        (0, "b.columns", Dtype::Bf16, &[3, 4], Some(&[0, 0])),
        (1, "b.columns", Dtype::Bf16, &[3, 2], Some(&[0, 4])),
        (2, "b.columns", Dtype::Bf16, &[3, 2], Some(&[0, 4])),
        (1, "c.packed", Dtype::F4, &[2, 4], Some(&[0, 0])),
        (2, "c.packed", Dtype::F4, &[2, 4], Some(&[0, 4])),
        (0, "d.everywhere", Dtype::U8, &[5], Some(&[0])),
        (1, "d.everywhere", Dtype::U8, &[5], Some(&[0])),
        (2, "e.empty", Dtype::F32, &[0, 4], Some(&[0, 0])),
    ];
    let mut catalog = catalog(stored).unwrap();
    catalog.shapes_recorded = true;
    set("boxes.safetensors", "dcp", catalog)
}

fn sample() -> Index {
    let whole = whole_set();
    let single = SetRecord {
        map: None,
        manifest: None,
        virtual_files: Vec::new(),
        ..set("one.safetensors", "single", catalog(&[]).unwrap())
    };
    Index {
        unusable: vec![b"gone\xff.safetensors".to_vec(), b"link.safetensors".to_vec()],
        notes: vec!["model.safetensors: a note".to_owned()],
        ..index_of(vec![whole, boxed_set(), single])
    }
}

// ---------------------------------------------------------------------------------------------
// The layout.

/// Where this fails the layout of the file, of what it says of tensors, or of the virtual file
/// has changed: then the version in `src/index/mod.rs` goes up, or for the columns of tensors that
/// in `src/index/columns.rs`, and the new bytes become the fixture.
#[test]
fn version_7_is_laid_out_as_it_was_when_it_was_fixed() {
    let expected = sample();
    let kept = include_bytes!("fixtures/index/v7.index");
    assert_eq!(kept[..16], *b"TENSORFS\x07\0\0\0\0\0\0\0");
    let decoded = Index::decode(kept).unwrap();
    assert_eq!(decoded, expected);
    assert_eq!(expected.encode().unwrap(), kept);
    decoded.sets.iter().for_each(|set| check(&set.catalog));
}

#[test]
fn strides_are_kept() {
    let legacy = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/torch/legacy_views.bin");
    let opened = tensorfs::Checkpoint::open(legacy.as_ref()).unwrap();
    let index = index_of(vec![record(opened.source_catalog().clone())]);
    let decoded = Index::decode(&index.encode().unwrap()).unwrap();
    assert_eq!(decoded, index);
    let has_strides = |tensor: tensorfs::Tensor<'_>| tensor.pieces().any(|it| it.strides.is_some());
    assert!(decoded.sets[0].catalog.tensors().any(has_strides));
}

#[test]
fn another_version_is_not_read() {
    let bytes = sample().encode().unwrap();
    for version in [bytes[8] - 1, bytes[8] + 1] {
        let mut other = bytes.clone();
        other[8] = version;
        assert_eq!(Index::decode(&other).unwrap_err(), "was written by another version");
    }
}

#[test]
fn every_flipped_byte_and_every_truncation_is_noticed() {
    let bytes = index_of(vec![boxed_set()]).encode().unwrap();
    assert!(Index::decode(&bytes).is_ok());
    for at in 0..bytes.len() {
        assert!(Index::decode(&bytes[..at]).is_err(), "cut off at {at}");
        for flip in [0x01, 0x80, 0xff] {
            let mut bad = bytes.clone();
            bad[at] ^= flip;
            assert!(Index::decode(&bad).is_err(), "byte {at} flipped by {flip:02x}");
        }
    }
    let longer = [bytes.as_slice(), &[0]].concat();
    assert!(Index::decode(&longer).is_err(), "a byte more");
}

/// As if the checksum agreed: a forger who computes it must not be able to break anything
/// either.
#[test]
fn content_with_any_one_byte_changed_is_refused_or_can_be_used() {
    for set in [whole_set(), boxed_set()] {
        let content = index_of(vec![set]).encode().unwrap().split_off(FRAME_LEN);
        let mut accepted = 0;
        for at in 0..content.len() {
            assert!(Index::decode_unframed(&content[..at]).is_err(), "cut off at {at}");
            for value in [0, 1, 2, 127, 128, 250, 251, 252, 253, 254, 255, content[at] ^ 1] {
                let mut changed = content.clone();
                changed[at] = value;
                let Ok(index) = Index::decode_unframed(&changed) else { continue };
                accepted += 1;
                index.sets.iter().for_each(|set| check(&set.catalog));
                index.encode().unwrap();
            }
        }
        assert!(accepted > content.len(), "{accepted} of {}", content.len());
    }
}

/// Address space that this process has ever taken, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
}

#[test]
fn an_announced_length_reserves_no_memory_before_the_bytes_are_there() {
    let content = index_of(vec![boxed_set()]).encode().unwrap().split_off(FRAME_LEN);
    let before = peak();
    for at in 0..content.len() {
        // 2^28 as bincode writes it, in the place of whatever stands there: of numbers with 4
        // bytes that is 1 GiB.
        let number: &[u8] = &[252, 0, 0, 0, 16];
        let long = [&content[..at], number, &content[at + 1..]].concat();
        let Ok(index) = Index::decode_unframed(&long) else { continue };
        index.sets.iter().for_each(|set| check(&set.catalog));
    }
    // Other tests run beside this one and need some.
    assert!(peak() - before < 1 << 30, "{} bytes more", peak() - before);
}

/// Uses all that a catalog says, as a mount does.
fn check(catalog: &Catalog) {
    let _ = catalog.data_len();
    let inside = |piece: Piece<'_>| {
        let shard = catalog.shard(piece.shard);
        assert!(!shard.is_description(&piece.range) && piece.range.end <= shard.file_len);
        assert_eq!(piece.shape.len(), piece.offset.len());
        piece.len()
    };
    let mut before: Option<&str> = None;
    for tensor in catalog.tensors() {
        assert!(before.is_none_or(|before| before < tensor.name));
        before = Some(tensor.name);
        assert_eq!(catalog.tensor(tensor.name).unwrap().position(), tensor.position());
        assert_eq!(tensor.pieces().map(inside).sum::<u64>(), tensor.len);
        tensor.replicas().for_each(|piece| assert!(inside(piece) <= tensor.len));
    }
    for format in [OutputFormat::Safetensors, OutputFormat::Bintensors] {
        match Layout::of(catalog, &FileSpec::single("model", format)) {
            Ok(layout) => check_layout(catalog, &layout),
            Err(fault) => assert!(REFUSALS.contains(&fault.kind), "{fault}"),
        }
    }
}

fn check_layout(catalog: &Catalog, layout: &Layout) {
    let middle = layout.len() / 2;
    for range in [0..layout.len(), middle..layout.len(), middle..middle + 1] {
        layout.extents(range, &mut |extent| {
            if let Extent::Run { shard, range, .. } | Extent::Scatter { shard, range, .. } = extent
            {
                let shard = catalog.shard(shard);
                assert!(!shard.is_description(&range) && range.end <= shard.file_len);
            }
        });
    }
}

// ---------------------------------------------------------------------------------------------
// Random catalogs.

fn name() -> impl Strategy<Value = String> {
    let common = prop::sample::select(vec![0usize, 1, 40, 600]);
    prop_oneof![
        ".*",
        (0..40u32, 0..8u32).prop_map(|(layer, part)| format!("model.layers.{layer}.mlp.{part}")),
        (common, ".{0,3}").prop_map(|(len, end)| "\u{e9}".repeat(len) + &end),
    ]
}

fn dtype() -> impl Strategy<Value = Dtype> {
    (0..Dtype::ALL.len()).prop_map(|at| Dtype::ALL[at])
}

/// Whole tensors by name: dtype, shape, shard. Multiples of 4 keep sub-byte elements on bytes.
fn whole() -> impl Strategy<Value = Catalog> {
    let shape = prop::collection::vec((0u64..4).prop_map(|n| 4 * n), 1..4);
    let shape = prop_oneof![4 => shape, 1 => Just(vec![0, u64::MAX / 64])];
    prop::collection::btree_map(name(), (dtype(), shape, 0usize..5), 0..30).prop_map(|tensors| {
        let stored: Vec<Stored<'_>> = tensors
            .iter()
            .map(|(name, (dtype, shape, shard))| (*shard, name.as_str(), *dtype, &**shape, None))
            .collect();
        catalog(&stored).unwrap()
    })
}

/// Tensors of which shard 0 has the upper rows and shard 1 the lower ones or none, and shard 2
/// perhaps another copy of the upper ones.
fn boxed() -> impl Strategy<Value = Catalog> {
    let tensor = (dtype(), (1u64..5, 0u64..5, 0u64..4), any::<bool>());
    prop::collection::btree_map(name(), tensor, 1..20).prop_map(|tensors| {
        let boxes: Vec<_> = tensors
            .iter()
            .map(|(name, (dtype, (upper, lower, columns), copied))| {
                let shapes = [vec![*upper, 4 * columns], vec![*lower, 4 * columns]];
                (name.as_str(), *dtype, shapes, [vec![0, 0], vec![*upper, 0]], *copied)
            })
            .collect();
        let mut stored: Vec<Stored<'_>> = Vec::new();
        for (name, dtype, [upper, lower], [start, below], copied) in &boxes {
            stored.push((0, name, *dtype, upper, Some(start)));
            if lower[0] > 0 {
                stored.push((1, name, *dtype, lower, Some(below)));
            }
            if *copied {
                stored.push((2, name, *dtype, upper, Some(start)));
            }
        }
        catalog(&stored).unwrap()
    })
}

fn record(catalog: Catalog) -> SetRecord {
    SetRecord { virtual_files: Vec::new(), ..set("model.safetensors", "dcp", catalog) }
}

proptest! {
    #[test]
    fn any_catalog_reads_back(whole in whole(), boxed in boxed(), made in any::<i64>()) {
        let sets = vec![record(whole), record(boxed)];
        let index = Index { made, ..index_of(sets) };
        let bytes = index.encode().unwrap();
        let decoded = Index::decode(&bytes).unwrap();
        prop_assert_eq!(&decoded, &index);
        prop_assert_eq!(decoded.encode().unwrap(), bytes);
        decoded.sets.iter().for_each(|set| check(&set.catalog));
    }

    #[test]
    fn any_changed_content_is_refused_or_can_be_used(
        whole in whole(),
        boxed in boxed(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut content =
            index_of(vec![record(whole), record(boxed)]).encode().unwrap().split_off(FRAME_LEN);
        for (at, value) in changes {
            let at = at.index(content.len());
            content[at] = value;
        }
        if let Ok(index) = Index::decode_unframed(&content) {
            index.sets.iter().for_each(|set| check(&set.catalog));
        }
    }

    #[test]
    fn any_bytes_are_refused_or_can_be_used(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Index::decode(&bytes).is_err());
        if let Ok(index) = Index::decode_unframed(&bytes) {
            index.sets.iter().for_each(|set| check(&set.catalog));
        }
    }
}
