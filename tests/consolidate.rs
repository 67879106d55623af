//! Tests of files that are written from a checkpoint: they are read back and compared, and removed after an
//! error.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use tensorfs::internal::checkpoint::Tree;
use tensorfs::internal::consolidate::{Copier, Outline, Watch, WriteOptions};
use tensorfs::internal::io::Settings;
use tensorfs::internal::open_options::OpenOptions;
use tensorfs::{Error, Result};

const SOURCE: &str = "tests/fixtures/dcp/grid_2d/shards";

fn outline() -> Outline {
    let tree = Tree::scan(SOURCE.as_ref(), &OpenOptions::default()).expect("the fixture is there");
    Outline::of(&tree).expect("the fixture is good")
}

/// Writes the fixture to `out`; `progress` is called as the copy calls it.
fn write(out: &Path, verify: bool, progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
    let options = WriteOptions { verify, ..WriteOptions::default() };
    let mut watch = Watch { progress, bytes: None };
    Copier::new(Settings::default()).write_folder(&outline(), out, options, &mut watch)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("the folder is there");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("it is read").file_name();
    entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect()
}

#[test]
fn bytes_that_change_on_the_disk_are_found_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    write(&out, true, &mut |_| Ok(())).unwrap();
    fs::remove_dir_all(&out).unwrap();
    let part = folder.path().join(".out.tensorfs-partial/parts/0");
    let failed = write(&out, true, &mut |_| {
        // All bytes of the first file are written and not read back yet.
        let file = fs::OpenOptions::new().read(true).write(true).open(&part).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 100).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 100).unwrap();
        Ok(())
    });
    let message = failed.unwrap_err().to_string();
    assert!(message.contains("read back differ"), "{message}");
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_copy_that_its_caller_ends_leaves_nothing_in_a_new_or_an_existing_folder() {
    let folder = tempfile::tempdir().unwrap();
    let existing = folder.path().join("existing");
    fs::create_dir(&existing).unwrap();
    for out in [&folder.path().join("new"), &existing] {
        let stopped = write(out, false, &mut |_| Err(Error::cancelled("stopped")));
        assert_eq!(stopped.unwrap_err().to_string(), "stopped");
        assert_eq!(names(folder.path()), ["existing"]);
        assert!(names(&existing).is_empty());
    }
}
