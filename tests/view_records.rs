//! Tests of the records of views beside an index. A start from a record must show the same files as the first
//! start. A record may be used only while the index, the view and `config.json` are the same.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tensorfs::internal::checkpoint::{Checkpoint, Tree, VirtualFile};
use tensorfs::internal::hash::Digest;
use tensorfs::internal::index::{Index, PresentedFile, ViewRecord};
use tensorfs::internal::reader::Reader;
use tensorfs::{
    Catalog, CutRules, Dtype, DtypeCast, Files, NameGlob, OpenOptions, OutputFormat, RenameRules,
    TensorParallel, View,
};

/// Names of tensors begin with it.
const NAME: &[u8] = b"transformer.";

/// A folder with a copy of a checkpoint of three shards in `model`, and room for an index.
fn home() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    fs::create_dir(&model).unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf/gpt2_tiny");
    for entry in fs::read_dir(fixture).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    home
}

fn rename(text: &str) -> View {
    let rules = RenameRules::parse("rules.toml".as_ref(), text.as_bytes()).unwrap();
    View { rename: Some(Arc::new(rules)), ..View::default() }
}

fn rank(rank: u32, rules: Option<&str>) -> View {
    let rules = rules.map(|text| CutRules::parse("tp.toml".as_ref(), text.as_bytes()).unwrap());
    let shard = Some(TensorParallel { ranks: 2, rank: Some(rank), rules: rules.map(Arc::new) });
    View { shard, ..View::default() }
}

const CUT: &str = "[[rule]]\nregex = 'c_attn.weight$'\ncut = 1\nparts = 3\n";
const UNITS: &str = "[[rule]]\nregex = 'c_proj.weight$'\ncut = 0\nunits = \"n_head\"\n";

/// Views of all kinds.
fn views() -> Vec<View> {
    let cast = |dtype| View { dtype: Some(DtypeCast::To(dtype)), ..View::default() };
    let glob = |text| vec![NameGlob::new(text).unwrap()];
    let split =
        "[[split]]\nregex = '(.*)c_attn.weight$'\nto = ['${1}q', '${1}k', '${1}v']\ndim = 1\n";
    let fuse = "[[fuse]]\nregex = ['(.*)ln_1.weight$', '(.*)ln_1.bias$']\nto = '${1}ln_1'\n";
    let shards = |files| View { files, ..View::default() };
    let map: Vec<String> = Checkpoint::open(&home().path().join("model"))
        .unwrap()
        .catalog()
        .tensors()
        .enumerate()
        .map(|(at, tensor)| format!("{:?}: {}", tensor.name, at % 3 + 1))
        .collect();
    let map = format!("{{{}}}", map.join(", "));
    vec![
        cast(Dtype::F32),
        cast(Dtype::Bf16),
        cast(Dtype::F16),
        View { keep: glob("*ln_*"), ..cast(Dtype::Bf16) },
        View { include: glob("*.weight"), ..View::default() },
        View { exclude: glob("*.weight"), ..View::default() },
        rename("[[rename]]\nregex = '^transformer'\nto = 'model'\n"),
        rename("[[rename]]\nregex = '^transformer'\nto = 'model2'\n"),
        rename(split),
        rename(fuse),
        View { dtype: Some(DtypeCast::To(Dtype::Bf16)), ..rename(&[split, fuse].concat()) },
        rank(0, Some(CUT)),
        rank(1, Some(CUT)),
        rank(1, Some(UNITS)),
        shards(Files::ShardCount(3)),
        shards(Files::ShardCount(2)),
        shards(Files::ShardSize(20_000)),
        shards(Files::map("map.json".as_ref(), map.as_bytes()).unwrap()),
        View { files: Files::ShardCount(3), ..cast(Dtype::Bf16) },
        View { files: Files::ShardCount(3), ..rank(0, Some(CUT)) },
        View { format: OutputFormat::Bintensors, ..cast(Dtype::Bf16) },
        View { format: OutputFormat::Bintensors, ..shards(Files::ShardCount(2)) },
    ]
}

fn open(home: &Path, view: &View, has_index: bool) -> Arc<Checkpoint> {
    let index = has_index.then(|| home.join("index"));
    let options = OpenOptions { view: view.clone(), index, ..OpenOptions::default() };
    Checkpoint::open_with(&home.join("model"), &options).unwrap()
}

fn kept(home: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(home.join("index")).into_iter().flatten();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|own| own == extension)).collect()
}

/// The bytes of all virtual files.
fn bytes(checkpoint: &Arc<Checkpoint>) -> Vec<(String, Vec<u8>)> {
    let read = |file: VirtualFile| {
        let reader = Reader::open(&file).unwrap();
        assert_eq!(reader.len(), file.summary().unwrap().len);
        let mut bytes = vec![0; reader.len() as usize];
        assert_eq!(reader.read_at(0, &mut bytes).unwrap(), bytes.len());
        (file.spec().name.clone(), bytes)
    };
    checkpoint.virtual_files().map(read).collect()
}

fn assert_same(left: &Arc<Checkpoint>, right: &Arc<Checkpoint>) {
    assert_eq!(left.catalog(), right.catalog());
    assert_eq!(left.source_catalog(), right.source_catalog());
    assert_eq!((left.config(), left.tail), (right.config(), right.tail));
    let files = |checkpoint: &Arc<Checkpoint>| -> Vec<_> {
        let files = checkpoint.virtual_files();
        files.map(|file| (file.spec().clone(), file.summary().unwrap())).collect()
    };
    assert_eq!(files(left), files(right));
    assert_eq!(bytes(left), bytes(right));
}

/// Changes the header hash of the first file in the record of `view`, so that a start from the record
/// shows it.
fn mark(home: &Path, path: &Path, view: &View) {
    let index = fs::read(&kept(home, "index")[0]).unwrap();
    let (checksum, digest) = (Index::checksum(&index).unwrap(), view.digest());
    let sets = Index::decode(&index).unwrap().sets;
    let mut record = ViewRecord::decode(&fs::read(path).unwrap(), checksum, digest, &sets).unwrap();
    record.sets[0].as_mut().unwrap().files[0].file.header = Digest::of(b"mark");
    fs::write(path, record.encode(checksum, digest).unwrap()).unwrap();
}

fn is_marked(checkpoint: &Arc<Checkpoint>) -> bool {
    let first = checkpoint.virtual_files().next().unwrap();
    first.summary().unwrap().header == Digest::of(b"mark")
}

#[test]
fn every_view_is_the_same_from_its_record() {
    for (number, view) in views().iter().enumerate() {
        let home = home();
        let plain = open(home.path(), view, false);
        let first = open(home.path(), view, true);
        let second = open(home.path(), view, true);
        assert_same(&plain, &first);
        assert_same(&plain, &second);
        let [record] = &kept(home.path(), "view")[..] else { panic!("view {number}") };
        mark(home.path(), record, view);
        assert!(is_marked(&open(home.path(), view, true)), "view {number}");
    }
}

#[test]
fn views_of_one_index_have_a_record_each() {
    let home = home();
    for view in &views()[..7] {
        open(home.path(), view, true);
    }
    for view in &views()[..7] {
        assert_same(&open(home.path(), view, false), &open(home.path(), view, true));
    }
    // All views with safetensors files share an index.
    assert_eq!((kept(home.path(), "index").len(), kept(home.path(), "view").len()), (1, 7));
}

#[test]
fn no_two_views_have_the_same_hash() {
    let views = views();
    for (number, view) in views.iter().enumerate() {
        assert_eq!(view.digest(), view.clone().digest());
        for other in &views[..number] {
            assert_ne!(view.digest(), other.digest(), "{view:?} {other:?}");
        }
    }
}

#[test]
fn views_that_an_index_describes_have_no_record() {
    let home = home();
    open(home.path(), &View::default(), true);
    open(home.path(), &View { files: Files::Original, ..View::default() }, true);
    assert_eq!((kept(home.path(), "index").len(), kept(home.path(), "view").len()), (1, 0));
}

#[test]
fn a_record_is_made_anew_with_its_index() {
    let home = home();
    let view = &views()[0];
    open(home.path(), view, true);
    let record = kept(home.path(), "view").remove(0);
    mark(home.path(), &record, view);
    // A shard that has the same header, but was written anew, gives a new index.
    let shard = home.path().join("model/model-00002-of-00003.safetensors");
    fs::write(&shard, fs::read(&shard).unwrap()).unwrap();
    let again = open(home.path(), view, true);
    assert!(!is_marked(&again));
    assert_same(&open(home.path(), view, false), &again);
    // A header that changed.
    let mut bytes = fs::read(&shard).unwrap();
    let place = bytes.windows(NAME.len()).position(|part| part == NAME).unwrap();
    bytes[place] ^= 1;
    fs::write(&shard, bytes).unwrap();
    fs::remove_file(home.path().join("model/model.safetensors.index.json")).unwrap();
    assert_same(&open(home.path(), view, false), &open(home.path(), view, true));
}

#[test]
fn a_record_is_out_of_date_after_a_change_of_the_config_that_the_view_read() {
    let home = home();
    let config = home.path().join("model/config.json");
    let text = fs::read_to_string(&config).unwrap();
    let with_heads = |heads: u32| {
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["n_head"] = heads.into();
        fs::write(&config, json.to_string()).unwrap();
    };
    with_heads(2);
    let [reads, does_not] = [rank(0, Some(UNITS)), rank(0, Some(CUT))];
    for view in [&reads, &does_not] {
        open(home.path(), view, true);
        let record = kept(home.path(), "view");
        let name = view.digest().to_string();
        let record = record.iter().find(|path| path.to_str().unwrap().contains(&name)).unwrap();
        mark(home.path(), record, view);
        assert!(is_marked(&open(home.path(), view, true)));
    }
    with_heads(4);
    assert!(!is_marked(&open(home.path(), &reads, true)));
    assert_same(&open(home.path(), &reads, false), &open(home.path(), &reads, true));
    assert!(is_marked(&open(home.path(), &does_not, true)));
}

#[test]
fn a_record_that_is_no_good_is_silently_made_anew() {
    let home = home();
    let view = &views()[8];
    let plain = open(home.path(), view, false);
    open(home.path(), view, true);
    let record = kept(home.path(), "view").remove(0);
    let good = fs::read(&record).unwrap();
    let flipped = |place: usize| {
        let mut bytes = good.clone();
        bytes[place] ^= 0x10;
        bytes
    };
    let mut bad: Vec<Vec<u8>> = (0..good.len()).step_by(97).map(flipped).collect();
    bad.extend([Vec::new(), good[..20].to_vec(), good[..good.len() - 1].to_vec()]);
    for bytes in bad {
        fs::write(&record, &bytes).unwrap();
        assert_same(&plain, &open(home.path(), view, true));
        assert_eq!(fs::read(&record).unwrap(), good);
    }
}

#[test]
fn a_record_of_another_view_under_its_name_is_not_used() {
    let home = home();
    let all = views();
    let (view, other) = (&all[6], &all[7]);
    open(home.path(), other, true);
    let wrong = fs::read(kept(home.path(), "view").remove(0)).unwrap();
    fs::remove_file(kept(home.path(), "view").remove(0)).unwrap();
    open(home.path(), view, true);
    fs::write(kept(home.path(), "view").remove(0), wrong).unwrap();
    assert_same(&open(home.path(), view, false), &open(home.path(), view, true));
}

#[test]
fn content_with_any_one_byte_changed_is_refused_or_can_be_used() {
    for view in [&views()[10], &views()[19]] {
        let home = home();
        open(home.path(), view, true);
        let index = fs::read(&kept(home.path(), "index")[0]).unwrap();
        let sets = Index::decode(&index).unwrap().sets;
        let content = fs::read(&kept(home.path(), "view")[0]).unwrap()[40..].to_vec();
        assert!(ViewRecord::decode_unframed(&content, &sets).is_ok());
        for place in 0..content.len() {
            for change in [1, 0x80, 0xff] {
                let mut bytes = content.clone();
                bytes[place] ^= change;
                let Ok(record) = ViewRecord::decode_unframed(&bytes, &sets) else { continue };
                for set in record.sets.iter().flatten() {
                    check(set.catalog.as_ref().unwrap_or(&sets[0].catalog));
                }
            }
        }
    }
}

/// A change of the files of a record.
type Change<'a> = dyn Fn(&mut Vec<PresentedFile>) + 'a;

// `consolidate` would write a file of the name, wherever it leads.
#[test]
fn files_of_a_record_have_names_of_files_and_each_tensor_once() {
    let home = home();
    open(home.path(), &views()[15], true);
    let index = fs::read(&kept(home.path(), "index")[0]).unwrap();
    let index = Index::decode(&index).unwrap();
    let content = fs::read(&kept(home.path(), "view")[0]).unwrap()[40..].to_vec();
    let good = ViewRecord::decode_unframed(&content, &index.sets).unwrap();
    let decoded = |change: &Change<'_>| {
        let mut record = good.clone();
        change(&mut record.sets[0].as_mut().unwrap().files);
        let bytes = record.encode(Digest::of(b""), Digest::of(b"")).unwrap();
        ViewRecord::decode_unframed(&bytes[40..], &index.sets)
    };
    assert_eq!(decoded(&|_| {}).unwrap(), good);
    let names = [
        "../../x",
        "/x",
        "a/b",
        "a\0b",
        "",
        ".",
        "..",
        &good.sets[0].as_ref().unwrap().files[1].name,
    ];
    for name in names {
        assert!(decoded(&|files| files[0].name = name.to_owned()).is_err(), "{name:?}");
    }
    let cut: [&Change<'_>; 4] = [
        &|files| drop(files.pop()),
        &|files| files[0].tensors.as_mut().unwrap().truncate(1),
        &|files| files[0].tensors = None,
        &|files| files[0].tensors = files[1].tensors.clone(),
    ];
    for change in cut {
        assert!(decoded(change).is_err());
    }
    let mut sets = index.clone();
    assert!(Index::decode(&sets.encode().unwrap()).is_ok());
    sets.sets[0].name = "../../x".to_owned();
    assert!(Index::decode(&sets.encode().unwrap()).is_err());
}

/// Checks the properties that readers rely on.
fn check(catalog: &Catalog) {
    for tensor in catalog.tensors() {
        assert!(tensor.stored == tensor.dtype || tensor.cast().is_some());
        for piece in tensor.pieces().chain(tensor.replicas()) {
            let shard = catalog.shard(piece.shard);
            let end_max = if piece.is_zeros() { u64::MAX } else { shard.file_len };
            assert!(piece.range.start <= piece.range.end && piece.range.end <= end_max);
            assert!(piece.is_empty() || !shard.is_description(&piece.range));
            // A stride of 0 repeats elements.
            let repeats = piece.strides.is_some_and(|strides| strides.contains(&0));
            assert!(repeats || piece.len() <= piece.range.end - piece.range.start);
            for dim in 0..tensor.shape.len() {
                assert!(piece.offset[dim] + piece.shape[dim] <= tensor.shape[dim]);
                assert!(piece.strides.is_none_or(|strides| dim < strides.len()));
            }
        }
    }
}

#[test]
fn the_records_of_views_go_with_their_index() {
    let home = home();
    let all = views();
    // There is an index for each format.
    for view in all[..3].iter().chain([&all[20]]) {
        open(home.path(), view, true);
    }
    let other = home.path().join("index/0123456789abcdef0123456789abcdef.index");
    fs::write(&other, b"").unwrap();
    assert_eq!(kept(home.path(), "view").len(), 4);
    assert_eq!(kept(home.path(), "index").len(), 3);
    let options = OpenOptions { index: Some(home.path().join("index")), ..OpenOptions::default() };
    let tree = Tree::scan(&home.path().join("model"), &options).unwrap();
    assert!(tree.families().into_iter().any(|id| tree.forget_index(id)));
    assert_eq!(kept(home.path(), "view"), Vec::<PathBuf>::new());
    assert_eq!(kept(home.path(), "index"), [other]);
}
