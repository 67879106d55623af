//! Tests of checkpoints of files that are named one by one, also in a child of a fork.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};

use tensorfs::ErrorKind;
use tensorfs::internal::checkpoint::{Checkpoint, SetKind};
use tensorfs::internal::loader::{Loader, LoaderConfig};
use tensorfs::internal::store::Store;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

fn shards(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixture(folder)).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|suffix| suffix == "safetensors"));
    files.sort();
    files
}

/// Every tensor: name, shape, bytes.
fn content(checkpoint: &Arc<Checkpoint>) -> Vec<(String, Vec<u64>, Vec<u8>)> {
    let loaded = Loader::new(LoaderConfig::default()).load_all(checkpoint).unwrap();
    let tensors = checkpoint.catalog().tensors().enumerate();
    tensors
        .map(|(at, t)| (t.name.to_owned(), t.shape.to_vec(), loaded.bytes(at).to_vec()))
        .collect()
}

#[test]
fn one_file_of_a_set_is_opened_alone_and_all_of_them_are_the_set() {
    let files = shards("hf/three_shards");
    let one = Checkpoint::of_files(&files[..1]).unwrap();
    assert_eq!((one.kind, one.catalog().shards.len()), (SetKind::Single, 1));
    let all = Checkpoint::of_files(&files).unwrap();
    let set = Checkpoint::open(&fixture("hf/three_shards")).unwrap();
    assert!(one.catalog().len() < all.catalog().len());
    assert_eq!(content(&all), content(&set));
}

#[test]
fn pieces_stand_as_they_are_alone_and_are_put_together_as_a_list() {
    let files = shards("dcp/row_wise/shards");
    let one = Checkpoint::of_files(&files[..1]).unwrap();
    let metadata = one.catalog().metadata.as_ref().unwrap();
    assert!(metadata.contains_key("DCP_SHARDING_INFO"), "the file's own metadata");
    let all = Checkpoint::of_files(&files).unwrap();
    assert_eq!(all.kind, SetKind::Dcp);
    let set = Checkpoint::open(&fixture("dcp/row_wise/shards")).unwrap();
    assert_eq!(content(&all), content(&set));
    let lost = Checkpoint::of_files(&shards("bad/dcp/hole_middle")).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::DcpHole);
}

#[test]
fn files_of_several_folders_are_one_checkpoint_by_a_map() {
    let root = tempfile::tempdir().unwrap();
    let mut map = BTreeMap::new();
    for (number, file) in shards("hf/three_shards").into_iter().enumerate() {
        let folder = root.path().join(number.to_string());
        std::fs::create_dir(&folder).unwrap();
        let copy = folder.join("model.safetensors");
        std::fs::copy(&file, &copy).unwrap();
        let shard = Checkpoint::of_files(std::slice::from_ref(&copy)).unwrap();
        map.extend(shard.catalog().tensors().map(|t| (t.name.to_owned(), copy.clone())));
    }
    let set = Checkpoint::open(&fixture("hf/three_shards")).unwrap();
    assert_eq!(content(&Checkpoint::of_map(&map).unwrap()), content(&set));
    map.insert("absent".to_owned(), map.values().next().unwrap().clone());
    assert_eq!(Checkpoint::of_map(&map).unwrap_err().kind(), ErrorKind::TensorMissing);
}

#[test]
fn a_list_that_is_empty_or_names_a_file_twice_or_an_absent_one_is_refused() {
    assert_eq!(Checkpoint::of_files(&[]).unwrap_err().kind(), ErrorKind::Usage);
    let file = shards("hf/three_shards").remove(0);
    let twice = Checkpoint::of_files(&[file.clone(), file.clone()]).unwrap_err();
    assert!(twice.to_string().contains("named twice"), "{twice}");
    let absent = file.with_file_name("absent.safetensors");
    let error = Checkpoint::of_files(std::slice::from_ref(&absent)).unwrap_err();
    assert_eq!(error.path(), Some(absent.as_path()));
}

#[test]
fn a_renewed_checkpoint_reads_the_same_bytes_and_refuses_another_file() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("model.safetensors");
    std::fs::copy(fixture("safetensors/many.safetensors"), &file).unwrap();
    let first = Checkpoint::of_files(std::slice::from_ref(&file)).unwrap();
    assert_eq!(content(&first.renewed()), content(&first));
    let before = first.renewed();
    std::fs::remove_file(&file).unwrap();
    std::fs::copy(fixture("safetensors/no_metadata.safetensors"), &file).unwrap();
    let error = Loader::new(LoaderConfig::default()).load_all(&before).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed);
}

#[test]
fn an_open_file_is_read_after_its_name_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("model.safetensors");
    std::fs::copy(fixture("safetensors/many.safetensors"), &file).unwrap();
    let named = Checkpoint::of_files(std::slice::from_ref(&file)).unwrap();
    let right = content(&named);
    let open = std::fs::File::open(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let unnamed = Checkpoint::of_open_file(open, "<memory>", 0, None).unwrap();
    let pin = unnamed.sources()[0].pin().unwrap();
    unnamed.sources()[0].release();
    assert_eq!(content(&unnamed), right);
    drop(pin);
    let error = Loader::new(LoaderConfig::default()).load_all(&unnamed).unwrap_err();
    assert_eq!(error.path(), Some(Path::new("<memory>")));
}

#[test]
fn an_open_folder_or_a_bad_open_file_is_refused_by_the_given_name() {
    for path in ["hf", "../requirements.txt"] {
        let open = std::fs::File::open(fixture(path)).unwrap();
        let error = Checkpoint::of_open_file(open, "<given>", 0, None).unwrap_err();
        assert!(error.to_string().starts_with("<given>: "), "{error}");
    }
}

#[test]
fn what_the_page_cache_holds_is_copied_at_once_and_only_a_whole_piece() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("model.safetensors");
    std::fs::copy(fixture("safetensors/many.safetensors"), &file).unwrap();
    let checkpoint = Checkpoint::of_files(std::slice::from_ref(&file)).unwrap();
    let loader = Loader::new(LoaderConfig::default());
    let mut copied = 0;
    for (at, (_, _, right)) in content(&checkpoint).into_iter().enumerate() {
        let mut bytes = vec![0; right.len()];
        // An empty tensor has nothing to copy; the kernel may not say what it holds.
        if loader.copy_from_page_cache(&checkpoint, at, None, &mut bytes).unwrap() {
            assert_eq!(bytes, right);
            copied += 1;
        }
        assert!(
            !loader
                .copy_from_page_cache(&checkpoint, at, None, &mut vec![0; right.len() + 1])
                .unwrap()
        );
    }
    assert!(copied > 0 || checkpoint.sources()[0].may_block());
    let cut = Checkpoint::open(&fixture("dcp/row_wise/shards")).unwrap();
    let pieces = |at: &usize| cut.catalog().tensor_at(*at).pieces().len() > 1;
    let at = (0..cut.catalog().len()).find(pieces).unwrap();
    let mut bytes = vec![0; cut.catalog().tensor_at(at).len as usize];
    assert!(!loader.copy_from_page_cache(&cut, at, None, &mut bytes).unwrap());
}

// The second caller was told that a write cannot be ruled out.
#[test]
fn a_new_name_is_found_harmless_by_every_thread_that_looks_at_once() {
    let root = tempfile::tempdir().unwrap();
    for round in 0..100 {
        let file = root.path().join(format!("{round}.safetensors"));
        std::fs::write(&file, "weights").unwrap();
        let source = Store::LOCAL.open(&file).unwrap();
        std::fs::rename(&file, root.path().join("elsewhere")).unwrap();
        let start = Barrier::new(8);
        std::thread::scope(|scope| {
            let look = || {
                start.wait();
                source.check()
            };
            let looks: Vec<_> = (0..8).map(|_| scope.spawn(look)).collect();
            for outcome in looks {
                outcome.join().unwrap().unwrap();
            }
        });
    }
}
