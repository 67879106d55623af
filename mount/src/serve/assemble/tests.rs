//! Tests of assembling with real files: a small checkpoint, its reader, and folders for copies.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};

use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tensorfs::internal::format::safetensors;
use tensorfs::{Checkpoint, Dtype};

use super::*;

/// A checkpoint of two shards, and a folder for copies.
struct Place {
    root: tempfile::TempDir,
}

/// Length in bytes of the tensor in each shard. Both tensors together take more than two steps of
/// the copying.
const TENSOR_LEN: u64 = 9 << 20;

const VERSION: &str = "0123456789abcdef0123456789abcdef";
const OTHER: &str = "fedcba9876543210fedcba9876543210";

fn shard(folder: &Path, number: usize, seed: u8) {
    let name = format!("layer.{number}");
    let entries = [(name.as_str(), Dtype::U8, [TENSOR_LEN].as_slice(), TENSOR_LEN)];
    let mut file = safetensors::encode(&BTreeMap::new(), entries.into_iter(), 8).unwrap();
    let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ seed;
    file.extend((0..TENSOR_LEN).map(byte));
    fs::write(folder.join(format!("model-0000{number}-of-00002.safetensors")), file).unwrap();
}

impl Place {
    fn new() -> Place {
        let place = Place { root: tempfile::tempdir().unwrap() };
        fs::create_dir(place.source()).unwrap();
        shard(&place.source(), 1, 1);
        shard(&place.source(), 2, 2);
        place
    }

    fn source(&self) -> PathBuf {
        self.root.path().join("source")
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("copies")
    }

    fn reader(&self) -> Reader {
        Reader::open(&Checkpoint::open(&self.source()).unwrap().single_file()).unwrap()
    }

    fn start(&self) -> Assembler {
        // Without a limit, nothing would be assembled on a disk that is nine tenths full.
        self.start_limited(1 << 30)
    }

    fn start_limited(&self, limit: u64) -> Assembler {
        let assembler =
            Assembler::open(&self.dir(), Some(limit), Settings::default(), &[&self.source()])
                .unwrap();
        assembler.start().unwrap();
        assembler
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| !name.starts_with('.'));
        names.sort();
        names
    }

    fn copy(&self) -> PathBuf {
        self.dir().join(format!("{VERSION}.safetensors"))
    }
}

fn whole(reader: &Reader) -> Vec<u8> {
    let mut bytes = vec![0; reader.len() as usize];
    reader.read_at(0, &mut bytes).unwrap();
    bytes
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Opens and reads the file until it is hot, which means that it was read often enough for a copy.
fn heat(assembler: &Assembler, version: &str, reader: &Reader) {
    assembler.opened(version, reader);
    assembler.served(version, reader, reader.len());
    assembler.opened(version, reader);
}

fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "not in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn assembled(assembler: &Assembler, version: &str, reader: &Reader) -> Arc<File> {
    heat(assembler, version, reader);
    wait("the copy", || assembler.ready(version, reader))
}

fn state(assembler: &Assembler, version: &str) -> Option<String> {
    let status = assembler.status();
    let file = status.files.into_iter().find(|file| file.version == version)?;
    Some(file.state)
}

fn wait_for_state(assembler: &Assembler, version: &str, wanted: &str) {
    wait(wanted, || (state(assembler, version).as_deref() == Some(wanted)).then_some(()));
}

#[test]
fn a_hot_file_becomes_one_real_file_with_the_same_bytes() {
    let place = Place::new();
    let (assembler, reader) = (place.start(), place.reader());
    assert!(assembler.ready(VERSION, &reader).is_none());
    let file = assembled(&assembler, VERSION, &reader);
    assert!(content(&file) == whole(&reader));
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o7777, 0o400);
    assert_eq!(place.names(), [format!("{VERSION}.json"), format!("{VERSION}.safetensors")]);
    assert_eq!(fs::metadata(place.dir()).unwrap().permissions().mode() & 0o7777, 0o700);
    let status = assembler.status();
    assert_eq!(status.used.unwrap() / TENSOR_LEN, 2);
    assert_eq!(status.files[0].progress.to_string(), "1");
}

#[test]
fn a_file_is_hot_once_it_was_opened_twice_and_half_of_it_was_read() {
    let place = Place::new();
    let (assembler, reader) = (place.start(), place.reader());
    let len = reader.len();
    assembler.opened(VERSION, &reader);
    assembler.served(VERSION, &reader, 5 * len);
    assert_eq!(state(&assembler, VERSION), None);
    for _ in 0..3 {
        assembler.opened(OTHER, &reader);
        assembler.served(OTHER, &reader, 4096);
    }
    assert_eq!(state(&assembler, OTHER), None);
    assembler.opened(VERSION, &reader);
    assert!(state(&assembler, VERSION).is_some());
}

#[test]
fn a_restart_uses_what_was_assembled_before_without_writing() {
    let place = Place::new();
    let reader = place.reader();
    drop(assembled(&place.start(), VERSION, &reader));
    let before = local_version(&fs::metadata(place.copy()).unwrap());
    let assembler = place.start();
    let file = assembler.ready(VERSION, &reader).unwrap();
    assert_eq!(local_version(&file.metadata().unwrap()), before);
}

#[test]
fn a_copy_with_a_flipped_byte_is_not_used_and_dropped() {
    let place = Place::new();
    let (assembler, reader) = (place.start(), place.reader());
    drop(assembled(&assembler, VERSION, &reader));
    fs::set_permissions(place.copy(), fs::Permissions::from_mode(0o600)).unwrap();
    let copy = fs::OpenOptions::new().write(true).open(place.copy()).unwrap();
    copy.write_all_at(b"\xff\x00\xff", 10_000_000).unwrap();
    assert!(assembler.ready(VERSION, &reader).is_none());
    wait_for_state(&assembler, VERSION, "failed");
    assert!(place.names().is_empty());
    // A daemon that starts later must refuse a damaged copy too.
    let assembler = place.start();
    drop(assembled(&assembler, VERSION, &reader));
    assembler.stop();
    fs::set_permissions(place.copy(), fs::Permissions::from_mode(0o600)).unwrap();
    let copy = fs::OpenOptions::new().write(true).open(place.copy()).unwrap();
    copy.write_all_at(b"\xff\x00\xff", 10_000_000).unwrap();
    let assembler = place.start();
    assert!(assembler.ready(VERSION, &reader).is_none());
    wait_for_state(&assembler, VERSION, "failed");
    assert!(place.names().is_empty());
}

#[test]
fn a_copy_that_the_kernel_serves_is_used_after_it_refused_another_one() {
    let place = Place::new();
    let (assembler, reader) = (place.start(), place.reader());
    let served = assembled(&assembler, VERSION, &reader);
    assembler.give_up(&io::ErrorKind::PermissionDenied.into());
    assert!(assembler.ready(VERSION, &reader).is_none());
    let same = assembler.in_use(VERSION, &reader).unwrap();
    assert_eq!(
        local_version(&same.metadata().unwrap()),
        local_version(&served.metadata().unwrap())
    );
    // The copy is still compared.
    fs::set_permissions(place.copy(), fs::Permissions::from_mode(0o600)).unwrap();
    let why = assembler.in_use(VERSION, &reader).unwrap_err();
    assert!(why.contains("touched"), "{why}");
}

#[test]
fn a_copy_that_cannot_be_used_now_has_a_reason_and_is_not_forgotten() {
    let place = Place::new();
    let (assembler, reader) = (place.start(), place.reader());
    drop(assembled(&assembler, VERSION, &reader));
    let copy = File::open(place.copy()).unwrap();
    let another = Flock::lock(copy, FlockArg::LockExclusiveNonblock).unwrap();
    let why = assembler.in_use(VERSION, &reader).unwrap_err();
    assert_eq!(why, "another process has locked the copy");
    drop(another);
    assert!(assembler.in_use(VERSION, &reader).is_ok());
    let why = assembler.in_use(OTHER, &reader).unwrap_err();
    assert_eq!(why, "the copy is gone");
    for number in [nix::libc::EMFILE, nix::libc::ENFILE] {
        assert!(lacks_descriptors(&io::Error::from_raw_os_error(number)));
    }
    assert!(!lacks_descriptors(&io::Error::from_raw_os_error(nix::libc::EIO)));
}

#[test]
fn a_copy_that_was_only_touched_is_used_again_once_it_was_verified() {
    let place = Place::new();
    let (assembler, reader) = (place.start(), place.reader());
    let held = assembled(&assembler, VERSION, &reader);
    // A file that was restored from a backup has another inode and other times.
    let bytes = fs::read(place.copy()).unwrap();
    fs::remove_file(place.copy()).unwrap();
    fs::write(place.copy(), &bytes).unwrap();
    assert!(assembler.ready(VERSION, &reader).is_none(), "the deleted file has another time");
    drop(held);
    let file = wait("the copy", || assembler.ready(VERSION, &reader));
    assert!(content(&file) == bytes);
    assembler.stop();
    assert!(place.start().ready(VERSION, &reader).is_some());
}

#[test]
fn a_copy_that_was_deleted_by_hand_is_made_again() {
    let place = Place::new();
    let (assembler, reader) = (place.start(), place.reader());
    drop(assembled(&assembler, VERSION, &reader));
    fs::remove_file(place.copy()).unwrap();
    assert!(assembler.ready(VERSION, &reader).is_none());
    assert!(content(&assembled(&assembler, VERSION, &reader)) == whole(&reader));
}

#[test]
fn a_source_written_to_with_its_times_set_back_does_not_get_the_old_copy() {
    let place = Place::new();
    drop(assembled(&place.start(), VERSION, &place.reader()));
    let path = place.source().join("model-00002-of-00002.safetensors");
    let mtime = fs::metadata(&path).unwrap().modified().unwrap();
    let shard = fs::OpenOptions::new().write(true).open(&path).unwrap();
    shard.write_all_at(b"new", TENSOR_LEN / 2).unwrap();
    shard.set_modified(mtime).unwrap();
    let (assembler, reader) = (place.start(), place.reader());
    assert!(assembler.ready(VERSION, &reader).is_none());
    assert!(content(&assembled(&assembler, VERSION, &reader)) == whole(&reader));
}

#[test]
fn a_source_that_changes_while_it_is_assembled_leaves_nothing() {
    let place = Place::new();
    let (assembler, reader) = (place.start(), place.reader());
    shard(&place.source(), 2, 3);
    heat(&assembler, VERSION, &reader);
    wait_for_state(&assembler, VERSION, "failed");
    assert!(place.names().is_empty());
    assert!(assembler.ready(VERSION, &reader).is_none());
}

#[test]
fn the_copy_opened_longest_ago_makes_room_and_one_that_is_open_does_not() {
    let place = Place::new();
    let reader = place.reader();
    let len = reader.len();
    let assembler = place.start_limited(2 * len);
    let third = "33333333333333333333333333333333";
    drop(assembled(&assembler, VERSION, &reader));
    drop(assembled(&assembler, OTHER, &reader));
    let old = SystemTime::now() - Duration::from_secs(3600);
    let age = |version: &str, opened| {
        let record = File::open(place.dir().join(format!("{version}.json"))).unwrap();
        record.set_modified(opened).unwrap();
    };
    // This assembler represents another daemon, which has the older copy open.
    let another = place.start_limited(2 * len);
    let held = another.ready(VERSION, &reader).unwrap();
    // The touch of the record by this assembler must not come after the age is set.
    another.stop();
    age(VERSION, old - Duration::from_secs(60));
    age(OTHER, old);
    drop(assembled(&assembler, third, &reader));
    assert!(assembler.ready(OTHER, &reader).is_none());
    assert!(place.copy().exists());
    // A file that programs have closed counts as open while the kernel still has it as a backing
    // file.
    let kernels = held.try_clone().unwrap();
    drop(held);
    let still = assembler.ready(third, &reader);
    heat(&assembler, OTHER, &reader);
    wait_for_state(&assembler, OTHER, "failed");
    assert!(format!("{:?}", assembler.status().files).contains("no room"));
    drop((kernels, still));
    assembler.shared.state.lock().entries.remove(OTHER);
    drop(assembled(&assembler, OTHER, &reader));
}

#[test]
fn a_file_larger_than_the_budget_is_never_begun() {
    let place = Place::new();
    let (assembler, reader) = (place.start_limited(1 << 20), place.reader());
    heat(&assembler, VERSION, &reader);
    wait_for_state(&assembler, VERSION, "failed");
    heat(&assembler, VERSION, &reader);
    assert_eq!(state(&assembler, VERSION).as_deref(), Some("failed"));
    assert!(!assembler.shared.state.lock().entries[VERSION].may_start());
    assert!(place.names().is_empty());
}

#[test]
fn two_daemons_in_one_folder_write_a_file_once_and_both_use_it() {
    let place = Place::new();
    let (first, second) = (place.start(), place.start());
    let (one, two) = (place.reader(), place.reader());
    heat(&first, VERSION, &one);
    heat(&second, VERSION, &two);
    let from_first = wait("the copy", || first.ready(VERSION, &one));
    let from_second = wait("the copy", || second.ready(VERSION, &two));
    let stamp = |file: &File| local_version(&file.metadata().unwrap());
    assert_eq!(stamp(&from_first), stamp(&from_second));
    wait("no partial file", || (place.names().len() == 2).then_some(()));
}

#[test]
fn what_a_killed_daemon_left_is_removed_and_what_a_living_one_writes_is_not() {
    let place = Place::new();
    let reader = place.reader();
    drop(place.start());
    let orphan = place.dir().join(format!("{VERSION}.partial-1"));
    fs::write(&orphan, "half").unwrap();
    // These files remain if the process is killed between renaming the copy and writing its record,
    // or between writing the record and renaming it.
    fs::write(place.dir().join(format!("{OTHER}.safetensors")), "copy").unwrap();
    fs::write(place.dir().join(format!("{OTHER}.record-new")), "{").unwrap();
    fs::write(place.dir().join("3333333333333333.json"), "{}").unwrap();
    let folder = CopyFolder::open(&place.dir(), None, &[]).unwrap();
    let partial = folder.lock().unwrap().begin(OTHER, 100).unwrap();
    let assembler = place.start();
    let left = format!("{OTHER}.partial-{}", std::process::id());
    assert_eq!(place.names(), [left]);
    drop(partial);
    assert!(content(&assembled(&assembler, OTHER, &reader)) == whole(&reader));
}

#[test]
fn a_stop_in_the_middle_leaves_nothing_behind() {
    let place = Place::new();
    let (assembler, reader) = (place.start(), place.reader());
    heat(&assembler, VERSION, &reader);
    wait("the file", || (!place.names().is_empty()).then_some(()));
    assembler.stop();
    assert!(!place.names().iter().any(|name| name.contains("partial")));
    assert!(assembler.ready(VERSION, &reader).is_none());
}

#[test]
fn a_folder_that_is_no_place_for_copies_is_refused() {
    let place = Place::new();
    let start = |dir: &Path| {
        Assembler::open(dir, None, Settings::default(), &[&place.source()]).err().unwrap()
    };
    let inside = place.source().join("copies");
    assert!(start(&inside).contains("lies in"));
    assert!(!inside.exists());
    assert!(start(place.root.path()).contains("lies in"));
    let dir = place.root.path().join("full");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("thesis.tex"), "").unwrap();
    assert!(start(&dir).contains("holds other files"));
    fs::remove_file(dir.join("thesis.tex")).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o770)).unwrap();
    assert!(start(&dir).contains("lets others write"));
    let file = place.root.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(start(&file).contains("not a folder"));
    assert!(start(&place.root.path().join("no/such")).starts_with("assemble="));
}

#[test]
fn a_full_disk_leaves_nothing_and_is_left_alone_for_a_while() {
    let place = Place::new();
    fs::create_dir(place.dir()).unwrap();
    let options = Some("size=24m,mode=0700");
    let flags = MsFlags::empty();
    if let Err(e) = mount(Some("tmpfs"), &place.dir(), Some("tmpfs"), flags, options) {
        eprintln!("not run: a tmpfs cannot be mounted here: {e}");
        return;
    }
    let outcome = std::panic::catch_unwind(|| fill_a_disk(&place));
    umount2(&place.dir(), MntFlags::MNT_DETACH).unwrap();
    outcome.unwrap();
}

fn fill_a_disk(place: &Place) {
    let reader = place.reader();
    let assembler = place.start_limited(1 << 30);
    fs::write(place.dir().join("fill"), vec![0; 20 << 20]).unwrap();
    heat(&assembler, VERSION, &reader);
    wait_for_state(&assembler, VERSION, "failed");
    assert_eq!(place.names(), ["fill"]);
    // The file system may also become full in the middle of a copy.
    let failure = assembler.shared.folder.lock().unwrap().begin(OTHER, 20 << 20).err().unwrap();
    assert!(matches!(failure, CopyFailure::Folder(..)), "{failure}");
    assert_eq!(place.names(), ["fill"]);
    assembler.shared.finish(VERSION, Err(failure));
    heat(&assembler, VERSION, &reader);
    assert_eq!(state(&assembler, VERSION).as_deref(), Some("failed"));
    assert!(assembler.status().backoff_s > 60);
    fs::remove_file(place.dir().join("fill")).unwrap();
    {
        let mut state = assembler.shared.state.lock();
        state.backoff = None;
        state.entries.remove(VERSION);
    }
    assert!(content(&assembled(&assembler, VERSION, &reader)) == whole(&reader));
}
