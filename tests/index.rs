//! Tests that opening from the index gives the same result as opening from the headers, and that an
//! index is used only while nothing has changed.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tensorfs::internal::checkpoint::{Checkpoint, FolderId, Origin, Proved, Tree};
use tensorfs::internal::error::Error;
use tensorfs::internal::format::{OutputFormat, manifest};
use tensorfs::internal::hash::Digest;
use tensorfs::internal::index::Index;
use tensorfs::internal::open_options::{OpenOptions, Prefer};
use tensorfs::internal::store::Store;
use tensorfs::internal::view::{Files, View};

const SHARD: &str = "model-00002-of-00003.safetensors";
const MAP: &str = "model.safetensors.index.json";

fn original() -> View {
    View { files: Files::Original, ..View::default() }
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// A folder with a copy of a checkpoint of three shards in `model`, and room for its index.
fn model() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(fixtures().join("hf/three_shards")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    home
}

fn view(home: &Path) -> OpenOptions {
    OpenOptions { index: Some(home.join("index")), ..OpenOptions::default() }
}

fn prove(source: &Path, view: &OpenOptions) -> (Tree, Vec<(FolderId, Proved)>) {
    let tree = Tree::scan(source, view).unwrap();
    let proved = tree.families().into_iter().flat_map(|head| tree.prove(head)).collect();
    (tree, proved)
}

/// The one folder of `home`, proved with an index.
fn prove_model(home: &Path) -> Proved {
    let (_, mut proved) = prove(&home.join("model"), &view(home));
    assert_eq!(proved.len(), 1);
    proved.remove(0).1
}

fn indexes(home: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(home.join("index")).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

fn the_index(home: &Path) -> PathBuf {
    let mut found = indexes(home);
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

fn decoded(path: &Path) -> Index {
    Index::decode(&fs::read(path).unwrap()).unwrap()
}

/// Makes the index one that was made long after the files were written, as indexes mostly are:
/// then fingerprints alone decide.
fn settle(home: &Path) {
    let path = the_index(home);
    let index = decoded(&path);
    let later = Index { made: index.made + 1000, ..index };
    fs::write(&path, later.encode().unwrap()).unwrap();
}

/// The reason why the headers were read although there was an index.
fn doubt(proved: &Proved) -> &str {
    match &proved.index.as_ref().unwrap().origin {
        Origin::Headers(Some(why)) | Origin::NotKept(why) => why,
        other => panic!("{other:?}"),
    }
}

/// Compares all that a proof says, but for where it comes from.
fn assert_same(left: &Proved, right: &Proved) {
    assert_eq!((&left.weights, &left.notes), (&right.weights, &right.notes));
    assert_eq!(left.sets.len(), right.sets.len());
    for (left, right) in left.sets.iter().zip(&right.sets) {
        assert_eq!((&left.name, left.kind, &left.files), (&right.name, right.kind, &right.files));
        assert_eq!(left.shown_at_parent, right.shown_at_parent);
        match (&left.outcome, &right.outcome) {
            (Ok(left), Ok(right)) => assert_same_checkpoint(left, right),
            (Err(left), Err(right)) => assert_eq!(left.to_string(), right.to_string()),
            (left, right) => panic!("{left:?}\n{right:?}"),
        }
    }
}

fn assert_same_checkpoint(left: &Arc<Checkpoint>, right: &Arc<Checkpoint>) {
    assert_eq!(left.catalog(), right.catalog());
    assert_eq!((&left.name, left.kind, left.tail), (&right.name, right.kind, right.tail));
    assert_eq!(left.directory, right.directory);
    assert_eq!(left.weight_map(), right.weight_map());
    let identities = |checkpoint: &Checkpoint| -> Vec<_> {
        checkpoint.sources().iter().map(|s| (s.path().to_owned(), s.version())).collect()
    };
    assert_eq!(identities(left), identities(right));
    if !left.is_whole_file() {
        let shown = |checkpoint: &Arc<Checkpoint>| {
            checkpoint.single_file().summary().map_err(|e| e.to_string())
        };
        assert_eq!(shown(left), shown(right));
        // The index describes the virtual file as its layout does.
        let layout =
            left.single_file().layout().map(|layout| layout.len()).map_err(|e| e.to_string());
        assert_eq!(layout, shown(left).map(|shown| shown.len));
    }
}

// ---------------------------------------------------------------------------------------------
// The same from the index.

#[test]
fn the_second_open_comes_from_the_index_and_is_the_same() {
    let home = model();
    let first = prove_model(home.path());
    assert!(!first.from_index());
    assert_eq!(first.index.as_ref().unwrap().origin, Origin::Headers(None));
    let second = prove_model(home.path());
    assert!(second.from_index());
    assert_eq!(second.index.as_ref().unwrap().origin, Origin::Index);
    assert_same(&first, &second);
    settle(home.path());
    let third = prove_model(home.path());
    assert!(third.from_index());
    assert_same(&first, &third);
    let model = home.path().join("model");
    let opened = Checkpoint::open_with(&model, &view(home.path())).unwrap();
    assert_same_checkpoint(&opened, &Checkpoint::open(&model).unwrap());
    let source = &opened.sources()[0];
    let mut bytes = vec![0; source.len() as usize];
    source.read_exact_at(&mut bytes, 0).unwrap();
    source.check().unwrap();
    assert_eq!(bytes, fs::read(source.path()).unwrap());
}

// A listing of a large tree wrote an index for each folder of scripts and logs, and these took the
// place of those of checkpoints.
#[test]
fn a_folder_without_weights_has_no_index() {
    let home = model();
    fs::create_dir(home.path().join("logs")).unwrap();
    File::create(home.path().join("logs/train.log")).unwrap();
    let view = view(home.path());
    let tree = Tree::scan(home.path(), &view).unwrap();
    for id in tree.ids() {
        let proved = tree.prove(id);
        let with_sets = tree.folder(id).path.ends_with("model");
        assert_eq!(proved[0].1.sets.len(), usize::from(with_sets));
    }
    the_index(home.path());
}

#[test]
fn every_good_fixture_is_the_same_from_the_index() {
    let home = tempfile::tempdir().unwrap();
    let files = fs::read_dir(fixtures().join("safetensors")).unwrap();
    let sources = files.map(|entry| entry.unwrap().path());
    let folders =
        ["safetensors", "bintensors", "tensorizer", "hf", "dcp"].map(|name| fixtures().join(name));
    let mut from_index = 0;
    for source in sources.chain(folders) {
        for (prefer, format) in [
            (Prefer::File, OutputFormat::Safetensors),
            (Prefer::Shards, OutputFormat::Safetensors),
            (Prefer::File, OutputFormat::Bintensors),
        ] {
            let files = View { format, ..View::default() };
            let plain = OpenOptions { prefer, view: files, ..OpenOptions::default() };
            let view = OpenOptions { index: view(home.path()).index, ..plain.clone() };
            let (tree, headers) = prove(&source, &plain);
            let (_, _) = prove(&source, &view);
            let (_, index) = prove(&source, &view);
            assert_eq!(headers.len(), index.len());
            for ((id, left), (_, right)) in headers.iter().zip(&index) {
                assert_same(left, right);
                let shown = |proved| -> Vec<_> {
                    tree.entries(*id, proved).into_iter().map(|shown| shown.name).collect()
                };
                assert_eq!(shown(left), shown(right));
                let whole = left.sets.iter().all(|set| set.outcome.is_ok());
                assert_eq!(right.from_index(), whole, "{}", tree.folder(*id).path.display());
                from_index += right.sets.len() * usize::from(right.from_index());
            }
        }
    }
    assert!(from_index > 100, "{from_index}");
}

#[test]
fn a_changed_end_mark_of_a_tensorizer_file_is_noticed_with_an_index() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    fs::create_dir(&model).unwrap();
    let path = model.join("module.tensors");
    let mut bytes = fs::read(fixtures().join("tensorizer/module.tensors")).unwrap();
    fs::write(&path, &bytes).unwrap();
    prove_model(home.path());
    assert!(prove_model(home.path()).from_index());
    let last = bytes.len() - 1;
    assert_eq!(bytes[last - 7..], [0; 8]);
    bytes[last] = 1;
    fs::write(&path, &bytes).unwrap();
    let changed = prove_model(home.path());
    assert!(!changed.from_index());
    let error = changed.sets[0].outcome.as_ref().unwrap_err().to_string();
    assert!(error.contains("no end mark follows"), "{error}");
}

#[test]
fn what_options_ask_for_is_judged_anew_at_each_start() {
    let home = model();
    prove_model(home.path());
    let model = home.path().join("model");
    let reference = home.path().join("reference.json");
    fs::write(&reference, r#"{"metadata":{},"weight_map":{"other":"a.safetensors"}}"#).unwrap();
    let views = [
        OpenOptions { expect_shards: Some(4), ..OpenOptions::default() },
        OpenOptions { expect_shards: Some(3), ..OpenOptions::default() },
        OpenOptions { reference: Some(reference), ..OpenOptions::default() },
        OpenOptions { view: original(), ..OpenOptions::default() },
    ];
    for plain in views {
        let view = OpenOptions { index: view(home.path()).index, ..plain.clone() };
        let (_, headers) = prove(&model, &plain);
        let (_, index) = prove(&model, &view);
        assert!(index[0].1.from_index());
        assert_same(&headers[0].1, &index[0].1);
    }
    assert!(prove_model(home.path()).from_index());
}

#[test]
fn an_index_made_by_another_layout_lays_a_single_file_out() {
    let home = model();
    let original = OpenOptions { view: original(), ..view(home.path()) };
    prove(&home.path().join("model"), &original);
    let single = prove_model(home.path());
    assert!(single.from_index());
    assert_same(&single, &prove(&home.path().join("model"), &OpenOptions::default()).1[0].1);
}

#[test]
fn a_folder_with_a_refused_checkpoint_has_no_index() {
    let home = model();
    prove_model(home.path());
    fs::remove_file(home.path().join("model").join(SHARD)).unwrap();
    let refused = prove_model(home.path());
    assert!(!refused.from_index() && refused.sets[0].outcome.is_err());
    assert_eq!(doubt(&refused), "a checkpoint in the folder is refused");
    assert_eq!(indexes(home.path()), Vec::<PathBuf>::new());
}

// ---------------------------------------------------------------------------------------------
// A change is noticed.

/// A change to the checkpoint in a folder.
type Change = fn(&Path);

/// Puts `bytes` in the place of the file at `path`, with the time of the old one.
fn replace(path: &Path, bytes: &[u8]) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let new = path.with_extension("new");
    fs::write(&new, bytes).unwrap();
    File::options().write(true).open(&new).unwrap().set_modified(modified).unwrap();
    fs::rename(&new, path).unwrap();
}

/// A change in the same inode is noticed too.
fn overwrite(path: &Path, bytes: &[u8]) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file.set_modified(modified).unwrap();
}

/// The shard with another name for one of its tensors, as long as the old one.
fn other_header(model: &Path) -> Vec<u8> {
    let mut bytes = fs::read(model.join(SHARD)).unwrap();
    let at = bytes.windows(9).position(|part| part == b"\"format\":").unwrap();
    bytes[at + 1] = b'F';
    bytes
}

fn other_data(model: &Path) -> Vec<u8> {
    let mut bytes = fs::read(model.join(SHARD)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    bytes
}

fn write_manifest(model: &Path, tensors: usize) {
    let checkpoint = Checkpoint::open(model).unwrap();
    let catalog = checkpoint.catalog();
    let shards = catalog.shards.iter().map(|shard| (shard.name.as_str(), shard.file_len));
    let tensors = catalog.tensors().take(tensors).map(|t| (t.name, t.dtype, t.shape));
    let text = manifest::encode(shards, tensors);
    fs::write(model.join(manifest::file_name("model.safetensors")), text).unwrap();
}

/// Changes after which the index does not hold.
const CHANGES: [(&str, Change); 13] = [
    ("a shard with another header, size and time the same", |model| {
        replace(&model.join(SHARD), &other_header(model));
    }),
    ("a header overwritten, size and time the same", |model| {
        overwrite(&model.join(SHARD), &other_header(model));
    }),
    ("a truncated shard", |model| {
        let file = File::options().write(true).open(model.join(SHARD)).unwrap();
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    }),
    ("an empty shard", |model| fs::write(model.join(SHARD), "").unwrap()),
    ("a shard removed", |model| fs::remove_file(model.join(SHARD)).unwrap()),
    ("a shard under another name", |model| {
        fs::rename(model.join(SHARD), model.join("other.safetensors")).unwrap();
    }),
    ("a weight file more", |model| {
        let one = fixtures().join("safetensors/no_metadata.safetensors");
        fs::copy(one, model.join("adapter.safetensors")).unwrap();
    }),
    ("a weight map edited, size and time the same", |model| {
        let text = fs::read_to_string(model.join(MAP)).unwrap();
        let at = text.rfind("00001-of").unwrap();
        let text = text[..at].to_owned() + "00002-of" + &text[at + 8..];
        replace(&model.join(MAP), text.as_bytes());
    }),
    ("no weight map", |model| fs::remove_file(model.join(MAP)).unwrap()),
    ("a manifest added", |model| write_manifest(model, usize::MAX)),
    ("a manifest added that lists less", |model| write_manifest(model, 1)),
    ("a shard that is a link to nowhere", |model| {
        fs::remove_file(model.join(SHARD)).unwrap();
        symlink("nowhere", model.join(SHARD)).unwrap();
    }),
    ("a link to nowhere more", |model| {
        symlink("nowhere", model.join("more.safetensors")).unwrap();
    }),
];

/// Changes after which the headers are what they were.
const HARMLESS: [(&str, Change); 5] = [
    ("a shard with other data, size and time the same", |model| {
        replace(&model.join(SHARD), &other_data(model));
    }),
    ("data overwritten, size and time the same", |model| {
        overwrite(&model.join(SHARD), &other_data(model));
    }),
    ("a shard touched", |model| {
        let file = File::options().write(true).open(model.join(SHARD)).unwrap();
        file.set_modified(SystemTime::now() + Duration::from_secs(3)).unwrap();
    }),
    ("a shard copied to a link", |model| {
        fs::create_dir(model.join("blobs")).unwrap();
        fs::rename(model.join(SHARD), model.join("blobs/a")).unwrap();
        symlink("blobs/a", model.join(SHARD)).unwrap();
    }),
    ("a file that is no part of a set", |model| fs::write(model.join("notes.txt"), "").unwrap()),
];

fn in_every_state(changes: &[(&str, Change)], check: impl Fn(&str, &Path)) {
    for (what, change) in changes {
        for settled in [false, true] {
            let home = model();
            prove_model(home.path());
            // Later than the change time of the files, whose clock goes in steps.
            std::thread::sleep(Duration::from_millis(30));
            if settled {
                settle(home.path());
            }
            assert!(prove_model(home.path()).from_index());
            change(&home.path().join("model"));
            check(&format!("{what} (settled: {settled})"), home.path());
        }
    }
}

#[test]
fn an_index_is_not_believed_after_any_change_of_a_header_or_a_name() {
    in_every_state(&CHANGES, |what, home| {
        let after = prove_model(home);
        assert!(!after.from_index(), "{what}");
        let (_, headers) = prove(&home.join("model"), &OpenOptions::default());
        assert_same(&headers[0].1, &after);
        let again = prove_model(home);
        assert_eq!(again.from_index(), after.sets.iter().all(|set| set.outcome.is_ok()), "{what}");
        assert_same(&after, &again);
    });
}

#[test]
fn an_index_holds_and_is_written_anew_while_the_headers_are_the_same() {
    in_every_state(&HARMLESS, |what, home| {
        let after = prove_model(home);
        assert!(after.from_index(), "{what}");
        let (_, headers) = prove(&home.join("model"), &OpenOptions::default());
        assert_same(&headers[0].1, &after);
        for record in decoded(&the_index(home)).files {
            let now = Store::LOCAL.version_behind_links(&home.join("model").join(&record.name));
            assert_eq!(record.version, now.unwrap().lasting(), "{what}: {}", record.name);
        }
    });
}

#[test]
fn of_many_files_in_doubt_the_one_that_differs_is_named() {
    let home = model();
    let model = home.path().join("model");
    let name = |number: u32| format!("part-{number:02}.safetensors");
    for number in 0..40 {
        fs::copy(model.join(SHARD), model.join(name(number))).unwrap();
    }
    prove_model(home.path());
    assert!(prove_model(home.path()).from_index());
    for number in [30, 17, 38] {
        replace(&model.join(name(number)), &other_header(&model));
    }
    let after = prove_model(home.path());
    assert!(!after.from_index());
    assert_eq!(doubt(&after), "is out of date for part-17.safetensors");
    assert_same(&after, &prove(&model, &OpenOptions::default()).1[0].1);
}

#[test]
fn a_link_to_another_blob_is_noticed() {
    let home = model();
    let model = home.path().join("model");
    fs::create_dir(model.join("blobs")).unwrap();
    fs::write(model.join("blobs/new"), other_header(&model)).unwrap();
    fs::rename(model.join(SHARD), model.join("blobs/old")).unwrap();
    symlink("blobs/old", model.join(SHARD)).unwrap();
    let first = prove_model(home.path());
    settle(home.path());
    fs::remove_file(model.join(SHARD)).unwrap();
    symlink("blobs/new", model.join(SHARD)).unwrap();
    let second = prove_model(home.path());
    assert!(!second.from_index());
    let catalog = |proved: &Proved| proved.sets[0].outcome.as_ref().unwrap().catalog().clone();
    assert_ne!(catalog(&first).metadata, catalog(&second).metadata);
}

#[test]
fn a_manifest_edited_to_disagree_refuses_the_checkpoint() {
    let home = model();
    let model = home.path().join("model");
    write_manifest(&model, usize::MAX);
    assert!(prove_model(home.path()).sets[0].outcome.is_ok());
    settle(home.path());
    assert!(prove_model(home.path()).from_index());
    let path = model.join(manifest::file_name("model.safetensors"));
    let text = fs::read_to_string(&path).unwrap();
    let shape = text.find("\"shape\"").unwrap();
    let digit = shape + text[shape..].find(|c: char| c.is_ascii_digit()).unwrap();
    let other = if &text[digit..=digit] == "9" { "8" } else { "9" };
    replace(&path, (text[..digit].to_owned() + other + &text[digit + 1..]).as_bytes());
    let after = prove_model(home.path());
    assert!(!after.from_index() && after.sets[0].outcome.is_err());
}

/// An index that was made right after a file was written cannot know whether it is written once
/// more with the same times.
#[test]
fn a_young_file_is_looked_at_and_an_old_one_is_not() {
    let home = model();
    prove_model(home.path());
    let looks = |home: &Path| {
        // A look at the first bytes finds that there are fewer than the index says.
        let path = the_index(home);
        let mut index = decoded(&path);
        index.files[0].hash = Digest([0; 16]);
        fs::write(&path, index.encode().unwrap()).unwrap();
        !prove_model(home).from_index()
    };
    assert!(looks(home.path()));
    settle(home.path());
    assert!(!looks(home.path()));
}

// ---------------------------------------------------------------------------------------------
// Indexes that are not used.

#[test]
fn an_index_that_is_no_good_is_silently_made_anew() {
    let spoils: [(&str, Change); 9] = [
        ("empty", |index| fs::write(index, "").unwrap()),
        ("cut off", |index| {
            let bytes = fs::read(index).unwrap();
            fs::write(index, &bytes[..bytes.len() - 1]).unwrap();
        }),
        ("a flipped bit", |index| {
            let mut bytes = fs::read(index).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 8;
            fs::write(index, bytes).unwrap();
        }),
        ("another version", |index| {
            let mut bytes = fs::read(index).unwrap();
            bytes[8] += 1;
            fs::write(index, bytes).unwrap();
        }),
        ("of another folder", |index| {
            let other = Index { folder: b"/other".to_vec(), ..decoded(index) };
            fs::write(index, other.encode().unwrap()).unwrap();
        }),
        ("without a shard of its set", |index| {
            let mut other = decoded(index);
            other.sets[0].catalog.shards[0].name = "not-there.safetensors".to_owned();
            fs::write(index, other.encode().unwrap()).unwrap();
        }),
        ("with a kind that is none", |index| {
            let mut other = decoded(index);
            other.sets[0].kind = "other".to_owned();
            fs::write(index, other.encode().unwrap()).unwrap();
        }),
        ("world-writable", |index| {
            fs::set_permissions(index, fs::Permissions::from_mode(0o666)).unwrap();
        }),
        ("a link", |index| {
            fs::rename(index, index.with_extension("moved")).unwrap();
            symlink(index.with_extension("moved"), index).unwrap();
        }),
    ];
    for (what, spoil) in spoils {
        let home = model();
        let first = prove_model(home.path());
        let index = the_index(home.path());
        spoil(&index);
        let second = prove_model(home.path());
        assert!(!second.from_index(), "{what}");
        assert!(!doubt(&second).is_empty(), "{what}");
        assert_same(&first, &second);
        assert!(prove_model(home.path()).from_index(), "{what}");
    }
}

#[test]
fn an_index_of_another_user_is_not_believed() {
    let home = model();
    if fs::metadata(home.path()).unwrap().uid() != 0 {
        return println!("needs root");
    }
    prove_model(home.path());
    let index = the_index(home.path());
    std::os::unix::fs::chown(&index, Some(65534), None).unwrap();
    let second = prove_model(home.path());
    assert!(!second.from_index());
    assert_eq!(doubt(&second), "cannot be read: others may have written it");
    assert_eq!(fs::metadata(&index).unwrap().uid(), 0);
    assert!(prove_model(home.path()).from_index());
}

#[test]
fn what_cannot_be_read_or_written_is_only_not_kept() {
    let home = model();
    let plain = prove(&home.path().join("model"), &OpenOptions::default()).1;
    // A file where the folder of indexes has to be, and a folder where the index has to be.
    fs::write(home.path().join("index"), "").unwrap();
    for _ in 0..2 {
        let proved = prove_model(home.path());
        assert!(!proved.from_index() && !doubt(&proved).is_empty());
        assert_same(&plain[0].1, &proved);
    }
    fs::remove_file(home.path().join("index")).unwrap();
    prove_model(home.path());
    let index = the_index(home.path());
    fs::remove_file(&index).unwrap();
    fs::create_dir(&index).unwrap();
    fs::write(index.join("full"), "").unwrap();
    let proved = prove_model(home.path());
    assert!(!proved.from_index() && !doubt(&proved).is_empty());
    assert_same(&plain[0].1, &proved);
    assert_eq!(indexes(home.path()), [index], "no temporary file");
}

#[test]
fn a_shard_replaced_after_the_look_at_the_folder_is_not_read_as_the_old_one() {
    let home = model();
    prove_model(home.path());
    settle(home.path());
    let model = home.path().join("model");
    let checkpoint = Checkpoint::open_with(&model, &view(home.path())).unwrap();
    replace(&model.join(SHARD), &other_data(&model));
    let source = checkpoint.source(SHARD).unwrap();
    let mut bytes = vec![0; 16];
    let read = source.read_exact_at(&mut bytes, 0).and_then(|()| source.check());
    assert!(matches!(read, Err(Error::Changed { .. })), "{read:?}");
}
