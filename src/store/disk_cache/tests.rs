//! Tests of the disk cache around a store in memory that counts the reads.

mod missing;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::slice;

use tempfile::TempDir;

use super::cache::{CACHES, FOLDER_CHECKS, open_max_of};
use super::folder::FolderUse;
use super::threads::THREADS_MAX;
use super::*;
use crate::io::{Read, read_all};
use crate::source::Source;
use crate::sync::Mutex;
use crate::version::QueueKey;

/// A store with one object, which counts how often each byte was read.
#[derive(Debug)]
struct CountedStore {
    bytes: Vec<u8>,
    reads: Mutex<Vec<Range<u64>>>,
    is_told: bool,
}

impl CountedStore {
    fn new(len: usize, seed: u8) -> Arc<CountedStore> {
        let bytes = (0..len).map(|at| (at * 31 + at / 251) as u8 ^ seed).collect();
        Arc::new(CountedStore { bytes, reads: Mutex::default(), is_told: true })
    }

    fn version(&self, number: u64) -> Version {
        let len = self.bytes.len() as u64;
        Version::of_tagged_object(QueueKey::Store(1), [7, number], len, None)
    }

    /// How often each block was read.
    fn reads_by_block(&self) -> BTreeMap<u64, usize> {
        let mut counts = BTreeMap::new();
        for range in self.reads.lock().iter() {
            for block in range.start / BLOCK_LEN..range.end.div_ceil(BLOCK_LEN) {
                *counts.entry(block).or_default() += 1;
            }
        }
        counts
    }
}

impl StoreKind for CountedStore {
    fn version(&self, _: &Path) -> io::Result<Version> {
        Ok(self.version(1))
    }

    fn list(&self, _: &Path) -> io::Result<StoreListing> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn read(&self, _: &ObjectRead<'_>, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.lock().push(offset..offset + buf.len() as u64);
        buf.copy_from_slice(&self.bytes[offset as usize..offset as usize + buf.len()]);
        Ok(())
    }

    fn identifies_bytes(&self, _: &Version) -> bool {
        self.is_told
    }
}

/// A store, and the folder of a cache around it.
struct Bench {
    folder: TempDir,
    store: Arc<CountedStore>,
    size: Option<u64>,
}

const LEN: usize = 5 * BLOCK_LEN as usize + 1000;

impl Bench {
    fn new() -> Bench {
        // A fixed size makes the test independent of the free space of the machine.
        let folder = tempfile::tempdir().unwrap();
        Bench { folder, store: CountedStore::new(LEN, 0), size: Some(1 << 30) }
    }

    fn place(&self) -> DiskCachePlace {
        DiskCachePlace::new(self.folder.path().join("a/cache"), self.size)
    }

    /// The bytes that a newly started process reads.
    fn read(&self, range: Range<u64>) -> Vec<u8> {
        self.read_version("s3://b/object", 1, range)
    }

    fn read_version(&self, url: &str, number: u64, range: Range<u64>) -> Vec<u8> {
        CACHES.get_or_init(Mutex::default).lock().remove(&self.place());
        self.read_again(url, number, range)
    }

    fn read_again(&self, url: &str, number: u64, range: Range<u64>) -> Vec<u8> {
        let cached = CachedStore::new(self.store.clone(), &self.place());
        let mut buf = vec![0; (range.end - range.start) as usize];
        let version = self.store.version(number);
        let until = Some(Instant::now() + Duration::from_secs(3600));
        let read = ObjectRead { path: url.as_ref(), version: &version, until };
        cached.read(&read, range.start, &mut buf).unwrap();
        buf
    }

    fn assert_right(&self, range: Range<u64>) {
        let expected = &self.store.bytes[range.start as usize..range.end as usize];
        assert!(self.read(range.clone()) == expected, "{range:?}");
    }

    fn file(&self, extension: &str) -> PathBuf {
        let entries = fs::read_dir(self.place().folder).unwrap();
        let mut paths = entries.map(|entry| entry.unwrap().path());
        paths.find(|path| path.extension().is_some_and(|it| it == extension)).unwrap()
    }

    fn files(&self) -> usize {
        fs::read_dir(self.place().folder).map_or(0, Iterator::count)
    }

    fn kept(&self) -> Vec<KeptObject> {
        kept_objects(&self.place().folder).unwrap().objects
    }

    fn status(&self) -> DiskCacheStatus {
        cache_in(&self.place()).status()
    }
}

fn key_of(bench: &Bench) -> ObjectKey {
    ObjectKey::new("s3://b/object", bench.store.version(1).content_words())
}

#[test]
fn each_block_is_fetched_once_whatever_ranges_are_read() {
    let bench = Bench::new();
    let len = LEN as u64;
    for range in [
        0..8,
        BLOCK_LEN - 1..BLOCK_LEN + 1,
        2 * BLOCK_LEN..3 * BLOCK_LEN,
        len - 1..len,
        0..len,
        17..len - 17,
    ] {
        bench.assert_right(range);
    }
    let counts = bench.store.reads_by_block();
    assert_eq!(
        counts.into_iter().collect::<Vec<_>>(),
        (0..6).map(|it| (it, 1)).collect::<Vec<_>>()
    );
    let status = bench.status();
    assert_eq!((status.found_blocks, status.missed_bytes), (6, 0));
    let kept = bench.kept();
    assert_eq!((kept[0].url.as_str(), kept[0].bytes), ("s3://b/object", len));
}

#[test]
fn kept_bytes_are_those_of_the_version_and_of_the_ranges_also_with_a_long_url() {
    let (bench, url) = (Bench::new(), format!("s3://b/{}", "x".repeat(5000)));
    let kept = |number: u64, ranges: &[Range<u64>]| {
        let folder = &bench.place().folder;
        kept_bytes(folder, url.as_ref(), &bench.store.version(number), ranges).unwrap()
    };
    let (all, absent) = (0..LEN as u64, 2 * BLOCK_LEN..4 * BLOCK_LEN);
    assert_eq!(kept(1, slice::from_ref(&all)), 0);
    bench.read_again(&url, 1, 0..2 * BLOCK_LEN);
    bench.read_again(&url, 1, 4 * BLOCK_LEN..4 * BLOCK_LEN + 1);
    assert_eq!(kept(1, slice::from_ref(&all)), 3 * BLOCK_LEN);
    assert_eq!(kept(1, slice::from_ref(&absent)), 0);
    let parts =
        [5..7, 9..BLOCK_LEN + 1, 2 * BLOCK_LEN - 1..2 * BLOCK_LEN + 5, 4 * BLOCK_LEN..LEN as u64];
    assert_eq!(kept(1, &parts), 2 + BLOCK_LEN - 8 + 1 + BLOCK_LEN);
    assert_eq!(kept(2, slice::from_ref(&all)), 0);
}

#[test]
fn kept_ranges_near_each_other_are_asked_of_nobody_and_the_others_with_one_request() {
    let bench = Bench::new();
    let store: Arc<dyn StoreKind> = Arc::new(CachedStore::new(bench.store.clone(), &bench.place()));
    let source = Source::stored(&store, "s3://b/object".as_ref(), bench.store.version(1));
    let requests = |blocks: &[u64]| {
        bench.store.reads.lock().clear();
        let mut targets = vec![[0; 8]; blocks.len()];
        let mut reads: Vec<_> = blocks
            .iter()
            .zip(&mut targets)
            .map(|(block, target)| Read { source: &source, offset: block * BLOCK_LEN, target })
            .collect();
        read_all(&mut reads).unwrap();
        for (block, target) in blocks.iter().zip(targets) {
            assert_eq!(target, bench.store.bytes[(block * BLOCK_LEN) as usize..][..8]);
        }
        bench.store.reads.lock().clone()
    };
    assert_eq!(requests(&[0]), slice::from_ref(&(0..BLOCK_LEN)));
    assert_eq!(requests(&[2]), slice::from_ref(&(2 * BLOCK_LEN..3 * BLOCK_LEN)));
    assert!(requests(&[0, 2]).is_empty());
    assert_eq!(requests(&[0, 2, 3, 5]), slice::from_ref(&(3 * BLOCK_LEN..LEN as u64)));
}

#[test]
fn many_readers_at_once_fetch_each_block_once() {
    let bench = Bench::new();
    bench.read(0..0);
    std::thread::scope(|scope| {
        for reader in 0..8_u64 {
            let bench = &bench;
            scope.spawn(move || {
                let from = reader * BLOCK_LEN / 3;
                let found = bench.read_again("s3://b/object", 1, from..LEN as u64);
                assert!(found == bench.store.bytes[from as usize..]);
            });
        }
    });
    assert!(bench.store.reads_by_block().values().all(|count| *count == 1));
}

#[test]
fn no_flipped_bit_reaches_a_reader() {
    let len = BLOCK_LEN as usize + 1000;
    let mut bench = Bench::new();
    bench.store = CountedStore::new(len, 0);
    bench.assert_right(0..len as u64);
    let (map, data) = (bench.file(object::MAP), bench.file(object::DATA));
    let originals = [fs::read(&map).unwrap(), fs::read(&data).unwrap()];
    let header = 4096;
    let positions = (0..80)
        .step_by(5)
        .chain([header - 16, header - 1])
        .chain(header..originals[0].len())
        .map(|at| (0, at))
        .chain([0, len - 1001, len - 1000, len - 1].map(|at| (1, at)));
    for (file, at) in positions {
        for bit in 0..8 {
            fs::write(&map, &originals[0]).unwrap();
            fs::write(&data, &originals[1]).unwrap();
            let path = [&map, &data][file];
            let mut byte = [originals[file][at]];
            byte[0] ^= 1 << bit;
            fs::OpenOptions::new()
                .write(true)
                .open(path)
                .unwrap()
                .write_all_at(&byte, at as u64)
                .unwrap();
            bench.store.reads.lock().clear();
            bench.assert_right(0..len as u64);
            assert!(!bench.store.reads.lock().is_empty(), "bit {bit} of {at} in {path:?}");
            if !map.exists() || !data.exists() {
                // The files were created anew.
                for path in fs::read_dir(bench.place().folder).unwrap() {
                    fs::remove_file(path.unwrap().path()).unwrap();
                }
            }
        }
    }
}

#[test]
fn files_that_are_cut_or_missing_are_made_anew() {
    let bench = Bench::new();
    for extension in [object::DATA, object::MAP] {
        for len in [0, 100, 4096, 4100, 70_000] {
            bench.assert_right(0..LEN as u64);
            let file = fs::OpenOptions::new().write(true).open(bench.file(extension)).unwrap();
            file.set_len(len).unwrap();
            bench.assert_right(0..LEN as u64);
        }
        fs::remove_file(bench.file(extension)).unwrap();
        bench.assert_right(0..LEN as u64);
    }
}

#[test]
fn a_version_has_no_blocks_of_another_one() {
    let mut bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    bench.store = CountedStore::new(LEN, 0xff);
    let found = bench.read_version("s3://b/object", 2, 0..LEN as u64);
    assert!(found == bench.store.bytes);
    let found = bench.read_version("s3://c/object", 2, 0..LEN as u64);
    assert!(found == bench.store.bytes);
    assert_eq!(bench.kept().len(), 3);
}

#[test]
fn nothing_is_kept_of_a_store_that_does_not_tell_versions_apart() {
    let mut bench = Bench::new();
    let bytes = bench.store.bytes.clone();
    bench.store = Arc::new(CountedStore { bytes, reads: Mutex::default(), is_told: false });
    bench.assert_right(0..LEN as u64);
    bench.assert_right(0..LEN as u64);
    assert_eq!((bench.files(), bench.store.reads.lock().len()), (0, 2));
}

#[test]
fn the_objects_that_were_not_used_for_longest_make_room() {
    let mut bench = Bench::new();
    bench.size = Some(20 * BLOCK_LEN);
    let day = Duration::from_secs(86_400);
    for number in 0..8 {
        let url = format!("s3://b/{number}");
        bench.read_version(&url, 1, 0..LEN as u64);
        // Each map is one day younger than the map before.
        let maps = fs::read_dir(bench.place().folder).unwrap().map(|entry| entry.unwrap().path());
        for map in maps.filter(|path| path.extension().is_some_and(|it| it == object::MAP)) {
            let file = fs::File::open(map).unwrap();
            let time = file.metadata().unwrap().modified().unwrap() - day;
            file.set_modified(time).unwrap();
        }
    }
    let kept = bench.kept();
    assert!(kept.iter().map(|object| object.space).sum::<u64>() <= 20 * BLOCK_LEN, "{kept:?}");
    let urls: Vec<&str> = kept.iter().map(|object| object.url.as_str()).collect();
    assert!(urls.len() >= 2 && urls[0] == "s3://b/7" && urls[1] == "s3://b/6", "{urls:?}");
    let pruned = prune(&bench.place().folder, kept[0].space).unwrap();
    assert_eq!((pruned.objects as usize, pruned.left), (kept.len() - 1, kept[0].space));
    assert_eq!(prune(&bench.place().folder, 0).unwrap().objects, 1);
    assert_eq!(bench.files(), 0);
}

#[test]
fn an_object_that_others_removed_is_made_anew() {
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    prune(&bench.place().folder, 0).unwrap();
    let found = bench.read_again("s3://b/object", 1, 0..LEN as u64);
    assert!(found == bench.store.bytes);
    assert_eq!(bench.status().damaged_blocks, 0);
    assert_eq!(bench.kept()[0].bytes, LEN as u64);
}

#[test]
fn a_folder_that_is_removed_is_made_anew_but_not_with_each_read() {
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    let cache = cache_in(&bench.place());
    // An object that is open keeps its bytes, so each read is of another object.
    let read = |url: &str, checked: Instant| {
        let _ = fs::remove_dir_all(bench.folder.path().join("a"));
        *cache.folder.lock() = Some((checked, FolderUse::Usable));
        let found = bench.read_again(url, 1, 0..LEN as u64);
        assert!(found == bench.store.bytes);
        assert_eq!(bench.status().paused, None);
    };
    let now = Instant::now();
    read("s3://b/1", now + Duration::from_secs(3600));
    assert!(!bench.place().folder.exists());
    for url in ["s3://b/2", "s3://b/3"] {
        read(url, now.checked_sub(FOLDER_CHECKS).unwrap());
        let kept = bench.kept();
        assert_eq!((kept[0].url.as_str(), kept[0].bytes), (url, LEN as u64));
    }
    assert_eq!(bench.store.reads_by_block()[&0], 4);
}

#[test]
fn a_folder_that_cannot_be_made_anew_is_a_pause_and_not_the_end() {
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    let cache = cache_in(&bench.place());
    let parent = bench.folder.path().join("a");
    fs::remove_dir_all(&parent).unwrap();
    // No folder can be made behind this link.
    std::os::unix::fs::symlink("nowhere/else", &parent).unwrap();
    let checked = Instant::now().checked_sub(FOLDER_CHECKS).unwrap();
    *cache.folder.lock() = Some((checked, FolderUse::Usable));
    let found = bench.read_again("s3://b/other", 1, 0..LEN as u64);
    assert!(found == bench.store.bytes);
    assert!(bench.status().paused.is_some());
    assert_eq!(cache.folder(), FolderUse::Usable);
}

#[test]
fn a_folder_where_others_may_write_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    let open = fs::Permissions::from_mode(0o777);
    fs::set_permissions(bench.place().folder, open.clone()).unwrap();
    bench.assert_right(0..LEN as u64);
    assert!(bench.status().paused.is_some_and(|why| why.contains("others may write")));
    fs::set_permissions(bench.place().folder, fs::Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(bench.file(object::MAP), open).unwrap();
    bench.assert_right(0..LEN as u64);
    assert_eq!(bench.store.reads_by_block()[&0], 3);
}

#[test]
fn blocks_are_compared_by_verify_and_damaged_ones_count_no_more() {
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    let data = fs::OpenOptions::new().write(true).open(bench.file(object::DATA)).unwrap();
    data.write_all_at(b"other", 2 * BLOCK_LEN).unwrap();
    let damaged = || {
        let mut damaged = 0;
        verify(&bench.place().folder, |object| damaged += object.damaged).unwrap();
        damaged
    };
    assert_eq!((damaged(), damaged()), (1, 0));
    let kept = bench.kept();
    assert_eq!(kept[0].bytes, LEN as u64 - BLOCK_LEN);
}

#[test]
fn bytes_that_come_at_the_deadline_go_to_the_reader_and_nowhere_else() {
    let bench = Bench::new();
    bench.read(0..0);
    let cached = CachedStore::new(bench.store.clone(), &bench.place());
    let mut buf = vec![0; LEN];
    let version = bench.store.version(1);
    bench.read_again("s3://b/object", 1, 0..1);
    // The wrapped store answers even after the deadline.
    let (path, until) = ("s3://b/object".as_ref(), Some(Instant::now()));
    cached.read(&ObjectRead { path, version: &version, until }, 0, &mut buf).unwrap();
    assert!(buf == bench.store.bytes);
    assert_eq!(bench.kept()[0].bytes, BLOCK_LEN);
}

#[test]
fn reads_go_on_without_a_disk_that_does_not_answer() {
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    let data = fs::File::open(bench.file(object::DATA)).unwrap();
    data.sync_data().unwrap();
    let cache = cache_in(&bench.place());
    let stall = Arc::new(Mutex::new(()));
    let stalled = stall.lock();
    for _ in 0..THREADS_MAX {
        let stall = stall.clone();
        cache.threads.post(move || drop(stall.lock()));
    }
    let url = "s3://b/unknown";
    let read = || {
        let cached = CachedStore::new(bench.store.clone(), &bench.place());
        let (mut buf, version) = (vec![0; LEN], bench.store.version(1));
        let until = Instant::now() + Duration::from_millis(100);
        let read = ObjectRead { path: url.as_ref(), version: &version, until: Some(until) };
        cached.read(&read, 0, &mut buf).unwrap();
        assert!(buf == bench.store.bytes);
    };
    std::thread::scope(|scope| (0..40).for_each(|_| drop(scope.spawn(read))));
    assert_eq!(bench.store.reads_by_block()[&0], 41);
    // Bytes in the page cache can still be read.
    let found = bench.read_again("s3://b/object", 1, 0..LEN as u64);
    assert!(found == bench.store.bytes);
    assert_eq!(bench.store.reads_by_block()[&0], 41);
    drop(stalled);
    bench.read_again(url, 1, 0..LEN as u64);
    bench.read_again(url, 1, 0..LEN as u64);
    assert_eq!(bench.store.reads_by_block()[&0], 42);
}

#[test]
fn a_cache_that_is_looked_up_touches_no_file_before_it_is_used() {
    let bench = Bench::new();
    let cache = cache_in(&bench.place());
    assert!(!bench.place().folder.exists());
    assert!(matches!(cache.folder(), FolderUse::Usable));
    assert!(bench.place().folder.exists());
}

#[test]
fn open_objects_leave_most_descriptors_to_others() {
    for (limit, most) in [(0, 8), (256, 8), (1024, 32), (8192, 256), (1 << 20, 256)] {
        assert_eq!(open_max_of(limit), most, "{limit}");
    }
}

#[test]
fn a_header_with_an_impossible_length_is_damaged() {
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    let key = ObjectKey::new("s3://b/huge", [1, 2, LEN_MAX + 1, 0, 0]);
    fs::write(key.map_in(&bench.place().folder), object::header_of(&key, 3)).unwrap();
    let map = fs::OpenOptions::new().write(true).open(key.map_in(&bench.place().folder)).unwrap();
    map.set_len(4096 + 16 * (LEN_MAX + 1).div_ceil(BLOCK_LEN)).unwrap();
    let data = bench.place().folder.join(object::data_name(&key, 3));
    fs::File::create(data).unwrap();
    let kept = bench.kept();
    assert_eq!(kept.iter().map(|it| it.url.as_str()).collect::<Vec<_>>(), ["s3://b/object"]);
    assert_eq!(prune(&bench.place().folder, u64::MAX).unwrap().objects, 1);
}

#[test]
fn objects_of_another_version_of_the_program_stay_and_are_not_read() {
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    // A different file format has a different magic number and different file names.
    let key = ObjectKey::new("s3://b/other-form", [1, 2, LEN as u64, 0, 0]);
    let mut header = object::header_of(&key, 3);
    header[..8].copy_from_slice(b"TFSBLK99");
    let (map, data) = (key.map_in(&bench.place().folder), object::data_name(&key, 3));
    fs::write(&map, header).unwrap();
    fs::write(bench.place().folder.join(&data), [7; LEN]).unwrap();
    bench.store.reads.lock().clear();
    bench.assert_right(0..LEN as u64);
    assert!(bench.store.reads.lock().is_empty());
    let folder = &bench.place().folder;
    let kept = kept_objects(folder).unwrap();
    assert_eq!(
        kept.objects.iter().map(|it| it.url.as_str()).collect::<Vec<_>>(),
        ["s3://b/object"]
    );
    assert_eq!(kept.of_other_versions, 1);
    assert!(kept.space_of_other_versions >= LEN as u64, "{kept:?}");
    assert!(verify(folder, |_| ()).unwrap().is_empty());
    assert_eq!(prune(folder, u64::MAX).unwrap().objects, 0);
    assert!(map.exists() && folder.join(&data).exists());
    // It makes room like other objects: the one that was not used for longest is the first.
    let day_ago = std::time::SystemTime::now() - Duration::from_secs(86_400);
    fs::File::open(&map).unwrap().set_modified(day_ago).unwrap();
    assert_eq!(prune(folder, kept.objects[0].space).unwrap().objects, 1);
    assert!(!map.exists() && !folder.join(&data).exists());
    bench.assert_right(0..LEN as u64);
    assert!(bench.store.reads.lock().is_empty());
}

#[test]
fn verify_names_maps_that_cannot_be_read_and_prune_removes_those_that_are_files() {
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    let folder = &bench.place().folder;
    let map = fs::OpenOptions::new().write(true).open(bench.file(object::MAP)).unwrap();
    map.write_all_at(b"x", 100).unwrap();
    let irregular = [0, 1, 2].map(|number| {
        ObjectKey::new("s3://b/irregular", [number, 0, LEN as u64, 0, 0]).map_in(folder)
    });
    nix::unistd::mkfifo(&irregular[0], nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::create_dir(&irregular[1]).unwrap();
    std::os::unix::fs::symlink("elsewhere", &irregular[2]).unwrap();
    let unusable = || {
        let maps = verify(folder, |_| panic!("no map can be read")).unwrap();
        maps.into_iter().map(|map| map.path).collect::<std::collections::BTreeSet<_>>()
    };
    let damaged = key_of(&bench).map_in(folder);
    assert_eq!(unusable(), irregular.iter().cloned().chain([damaged.clone()]).collect());
    assert_eq!(prune(folder, u64::MAX).unwrap().objects, 1);
    assert!(!damaged.exists());
    let pruned = prune(folder, 0).unwrap();
    assert_eq!((pruned.objects, pruned.irregular.len()), (0, 3));
    assert_eq!(unusable(), irregular.into_iter().collect());
}

/// The local copy of the object, once its bytes have reached the disk.
fn copy_of(bench: &Bench) -> Option<fs::File> {
    let cached = CachedStore::new(bench.store.clone(), &bench.place());
    let version = bench.store.version(1);
    let read = ObjectRead { path: "s3://b/object".as_ref(), version: &version, until: None };
    let find = || cached.local_copy(&read).map(|(_, file)| file);
    // The first call begins to bring the bytes to the disk.
    find().or_else(|| {
        let cache = cache_in(&bench.place());
        let open: Vec<_> = cache.objects.lock().values().map(|(_, it)| it.clone()).collect();
        while open.iter().any(|object| object.known.is_syncing()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        find()
    })
}

#[test]
fn an_object_is_served_as_a_local_file_once_each_of_its_blocks_is_known() {
    let bench = Bench::new();
    let len = LEN as u64;
    bench.assert_right(0..len - 2000);
    assert!(copy_of(&bench).is_none());
    bench.read_again("s3://b/object", 1, 0..len);
    let file = copy_of(&bench).unwrap();
    let mut bytes = vec![0; LEN];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == bench.store.bytes);
    // The new process has not compared any block with its checksum yet.
    bench.read(0..BLOCK_LEN);
    assert!(copy_of(&bench).is_none());
    bench.read_again("s3://b/object", 1, 0..len);
    assert!(copy_of(&bench).is_some());
}

#[test]
fn an_object_with_a_damaged_block_is_no_local_file_until_the_block_came_anew() {
    let bench = Bench::new();
    let len = LEN as u64;
    bench.assert_right(0..len);
    let data = fs::OpenOptions::new().write(true).open(bench.file(object::DATA)).unwrap();
    data.write_all_at(b"other", 2 * BLOCK_LEN).unwrap();
    bench.read(0..2 * BLOCK_LEN);
    bench.read_again("s3://b/object", 1, 3 * BLOCK_LEN..len);
    assert!(copy_of(&bench).is_none());
    let found = bench.read_again("s3://b/object", 1, 0..len);
    assert!(found == bench.store.bytes);
    let mut bytes = vec![0; LEN];
    copy_of(&bench).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == bench.store.bytes);
}

#[test]
fn a_served_object_keeps_its_bytes_when_it_is_removed_and_makes_no_room() {
    let mut bench = Bench::new();
    bench.size = Some(8 * BLOCK_LEN);
    bench.assert_right(0..LEN as u64);
    let file = copy_of(&bench).unwrap();
    let assert_whole = || {
        let mut bytes = vec![0; LEN];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == bench.store.bytes);
    };
    // There is room for one object only, and the object in the cache is in use.
    bench.read_again("s3://b/other", 1, 0..LEN as u64);
    let kept = bench.kept();
    assert!(kept.iter().any(|it| it.url == "s3://b/object" && it.bytes == LEN as u64), "{kept:?}");
    assert_whole();
    prune(&bench.place().folder, 0).unwrap();
    assert_eq!(bench.files(), 0);
    assert_whole();
    // A file without a name is not served to anyone else.
    assert!(copy_of(&bench).is_none());
}

#[test]
fn blocks_that_the_page_cache_does_not_hold_are_compared_as_well() {
    let bench = Bench::new();
    bench.assert_right(0..LEN as u64);
    let data = fs::OpenOptions::new().write(true).open(bench.file(object::DATA)).unwrap();
    let leave_page_cache = || {
        data.sync_data().unwrap();
        let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        nix::fcntl::posix_fadvise(&data, 0, 0, advice).unwrap();
    };
    // Reads past the page cache need aligned memory.
    let mut memory = vec![0; LEN + 4096];
    let start = memory.as_ptr().align_offset(4096);
    let mut read = |offset: u64| {
        CACHES.get_or_init(Mutex::default).lock().remove(&bench.place());
        let cached = CachedStore::new(bench.store.clone(), &bench.place());
        let (version, at) = (bench.store.version(1), start + offset as usize);
        let buf = &mut memory[at..start + LEN];
        buf.fill(0);
        let read = ObjectRead { path: "s3://b/object".as_ref(), version: &version, until: None };
        cached.read(&read, offset, buf).unwrap();
        assert!(buf == &bench.store.bytes[offset as usize..]);
    };
    for offset in [0, 1000, 4096, BLOCK_LEN, BLOCK_LEN + 4096] {
        leave_page_cache();
        read(offset);
    }
    assert_eq!(bench.store.reads.lock().len(), 1);
    for at in [0, BLOCK_LEN + 1, LEN as u64 - 1] {
        data.write_all_at(&[!bench.store.bytes[at as usize]], at).unwrap();
        leave_page_cache();
        read(0);
        assert_eq!(bench.status().damaged_blocks, 1);
    }
}
