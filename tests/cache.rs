//! Tests of reads through the cache: they return the same bytes as direct reads, also with concurrent
//! readers, and never use more memory than allowed.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{byte, write_shard};
use tensorfs::internal::cache::{BUDGET_MIN, Cache, CachedFile};
use tensorfs::internal::checkpoint::{Checkpoint, VirtualFile};
use tensorfs::internal::counters::Counters;
use tensorfs::internal::format::OutputFormat;
use tensorfs::internal::format::safetensors::Header;
use tensorfs::internal::io::{Backend, Budget, DirectIo, Engine, Settings};
use tensorfs::internal::reader::Reader;
use tensorfs::internal::view::FileSpec;
use tensorfs::{CutRules, Dtype, Error, OpenOptions, TensorParallel, View};

const SHARDS: usize = 3;
const TENSORS: usize = 4;
const TENSOR_LEN: u64 = 3_000_001;

/// Numbered shards of uneven tensors; the second half of them are cut by columns.
fn write_rows(folder: &Path) {
    for shard in 0..SHARDS {
        let named: Vec<_> = (0..TENSORS).map(|t| format!("shard{shard}.tensor{t}")).collect();
        let data = |name: &str| {
            let pattern: Vec<u8> = (0..9973).map(|at| byte(name, at)).collect();
            pattern.iter().copied().cycle().take(TENSOR_LEN as usize).collect::<Vec<u8>>()
        };
        let tensors: Vec<_> =
            named.iter().map(|name| (name.as_str(), Dtype::U8, [TENSOR_LEN], data(name))).collect();
        let tensors: Vec<_> =
            tensors.iter().map(|(n, d, s, b)| (*n, *d, s.as_slice(), b.clone())).collect();
        let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1);
        write_shard(&folder.join(name), &BTreeMap::new(), &tensors);
    }
}

/// DCP shards of one tensor cut by columns, with rows of 2 KiB.
fn write_columns(folder: &Path) {
    const ROWS: u64 = 3000;
    const ROW: u64 = 2048;
    for rank in 0..4u64 {
        let offsets = serde_json::json!({ "w": { "saved_offsets": [0, rank * ROW] } });
        let metadata = BTreeMap::from([
            ("DCP_SHARDING_INFO".to_owned(), offsets.to_string()),
            ("DCP_VERSION".to_owned(), "1.0".to_owned()),
        ]);
        let data: Vec<u8> = (0..ROWS * ROW).map(|at| byte("w", at ^ rank << 40)).collect();
        let name = common::dcp_name(rank as usize);
        write_shard(&folder.join(name), &metadata, &[("w", Dtype::U8, &[ROWS, ROW], data)]);
    }
}

struct Fixture {
    _folder: tempfile::TempDir,
    whole: Vec<u8>,
    cache: Cache,
    file: Arc<CachedFile>,
    counters: Arc<Counters>,
}

/// The file of those tensors of `checkpoint` whose position leaves `rest` when halved.
fn half(checkpoint: &Arc<Checkpoint>, rest: u32) -> VirtualFile {
    let tensors = (0..checkpoint.catalog().len() as u32).filter(|at| at % 2 == rest).collect();
    let spec = FileSpec::single(&format!("half-{rest}.safetensors"), OutputFormat::Safetensors);
    VirtualFile::new(checkpoint, FileSpec { tensors: Some(tensors), ..spec })
}

#[test]
fn two_virtual_files_of_one_checkpoint_are_read_at_once_and_share_no_bytes() {
    for settings in ways() {
        let fixture = fixture(write_rows, settings);
        let checkpoint = Checkpoint::open(fixture._folder.path()).unwrap();
        let files = [0, 1].map(|rest| {
            let reader = Reader::open(&half(&checkpoint, rest)).unwrap();
            let mut whole = vec![0; reader.len() as usize];
            assert_eq!(reader.read_at(0, &mut whole).unwrap(), whole.len());
            (fixture.cache.open(reader, None), whole)
        });
        let mut names = Vec::new();
        for (_, whole) in &files {
            let header = Header::of_file(whole).unwrap();
            for entry in &header.tensors {
                let data = &whole[header.data_start() as usize..];
                let data =
                    &data[entry.data_offsets.start as usize..entry.data_offsets.end as usize];
                assert_eq!(data.len() as u64, TENSOR_LEN);
                let pattern: Vec<u8> = (0..9973).map(|at| byte(&entry.name, at)).collect();
                let is_right = |found: &[u8]| *found == pattern[..found.len()];
                assert!(data.chunks(pattern.len()).all(is_right), "{}", entry.name);
                names.push(entry.name.clone());
            }
        }
        names.sort();
        assert!(names.iter().eq(checkpoint.catalog().tensors().map(|tensor| tensor.name)));
        const STEP: u64 = 1_300_007;
        for offset in (0..files[0].1.len() as u64).step_by(STEP as usize) {
            let begun = files.each_ref().map(|(file, _)| fixture.begin(file, offset, STEP));
            for (answer, (_, whole)) in begun.iter().zip(&files) {
                let range = offset as usize..whole.len().min((offset + STEP) as usize);
                let read = answer.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
                assert!(read == whole[range], "at {offset}");
            }
        }
    }
}

/// A tensor of as many columns in one shard.
fn write_wide<const COLUMNS: u64>(folder: &Path) {
    const ROWS: u64 = 1000;
    let pattern: Vec<u8> = (0..9973).map(|at| byte("w", at)).collect();
    let data = pattern.into_iter().cycle().take((ROWS * COLUMNS) as usize).collect();
    write_shard(
        &folder.join("model.safetensors"),
        &BTreeMap::new(),
        &[("w", Dtype::U8, &[ROWS, COLUMNS], data)],
    );
}

/// The columns of the last of these ranks.
fn columns_of_a_rank(ranks: u32) -> OpenOptions {
    let rules = CutRules::parse("tp.toml".as_ref(), b"[[rule]]\nfrom = 'w'\ncut = 1\n").unwrap();
    let shard = Some(TensorParallel { ranks, rank: Some(ranks - 1), rules: Some(Arc::new(rules)) });
    OpenOptions { view: View { shard, ..View::default() }, ..OpenOptions::default() }
}

/// The function that writes the shards, and the options with which they are opened.
type Kind = (fn(&Path), OpenOptions);

/// Pieces of every kind: all of a tensor, rows of one without gaps, rows of 2 KiB with gaps of 6 KiB.
fn kinds() -> [Kind; 3] {
    let plain = OpenOptions::default;
    [(write_rows, plain()), (write_columns, plain()), (write_wide::<8192>, columns_of_a_rank(4))]
}

fn fixture(write: fn(&Path), settings: Settings) -> Fixture {
    fixture_of(write, &OpenOptions::default(), settings)
}

fn fixture_of(write: fn(&Path), options: &OpenOptions, settings: Settings) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let checkpoint = Checkpoint::open_with(folder.path(), options).unwrap();
    let reader = Reader::open(&checkpoint.single_file()).unwrap();
    let mut whole = vec![0; reader.len() as usize];
    assert_eq!(reader.read_at(0, &mut whole).unwrap(), whole.len());
    let counters = Arc::new(Counters::default());
    let timeout = settings.timeout;
    let engine = Engine::start(settings, counters.clone());
    let budget = Budget::new(BUDGET_MIN, counters.clone());
    let cache = Cache::start(engine, budget, counters.clone(), timeout).unwrap();
    let file = cache.open(reader, None);
    Fixture { _folder: folder, whole, cache, file, counters }
}

/// How the bytes of sources are read: none of them from the page cache where that is possible,
/// so that blocks, waiters and reading ahead are used although the files are fresh.
fn ways() -> Vec<Settings> {
    let of = |backend, direct| Settings { backend, direct, ..Settings::default() };
    vec![
        of(Backend::Auto, DirectIo::Auto),
        of(Backend::Auto, DirectIo::Always),
        of(Backend::Pread, DirectIo::Always),
        of(Backend::Pread, DirectIo::Never),
    ]
}

impl Fixture {
    fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, String> {
        self.begin(&self.file, offset, len)
            .recv_timeout(Duration::from_secs(60))
            .expect("an answer")
    }

    /// Begins a read; its answer comes to the receiver.
    fn begin(
        &self,
        file: &Arc<CachedFile>,
        offset: u64,
        len: u64,
    ) -> Receiver<Result<Vec<u8>, String>> {
        let (send, receive) = channel();
        let answer = move |outcome: Result<&[u8], &Error>| {
            send.send(outcome.map(<[u8]>::to_vec).map_err(ToString::to_string)).unwrap();
        };
        self.cache.read(file, 0, offset..offset + len, Box::new(answer));
        receive
    }

    fn assert_reads(&self, offset: u64, len: u64) {
        let end = (offset + len).min(self.whole.len() as u64);
        let expected = self.whole.get(offset as usize..end as usize).unwrap_or_default();
        let read = self.read(offset, len).expect("bytes");
        assert!(read == expected, "bytes {offset}..{end} differ, {} of them", read.len());
    }
}

#[test]
fn a_file_read_in_order_has_the_right_bytes_and_is_read_ahead_of() {
    for (write, options) in kinds() {
        for settings in ways() {
            let direct = matches!(settings.direct, DirectIo::Always);
            let fixture = fixture_of(write, &options, settings);
            // Lengths that fit no block.
            let mut at = 0;
            while at < fixture.whole.len() as u64 {
                fixture.assert_reads(at, 300_007);
                at += 300_007;
            }
            fixture.assert_reads(at + 5, 10);
            let used = fixture.counters.prefetch_used_bytes.get();
            let read = fixture.counters.bytes_from_page_cache.get();
            assert!(used + read > fixture.whole.len() as u64 / 2, "{used} used, {read} cached");
            assert!(!direct || fixture.counters.source_reads_direct.get() > 0);
        }
    }
}

#[test]
fn readers_at_random_places_all_get_the_right_bytes_within_the_bound() {
    for (write, options) in kinds() {
        for settings in ways() {
            let fixture = fixture_of(write, &options, settings);
            let most = Mutex::new(0);
            std::thread::scope(|scope| {
                for thread in 0..8u64 {
                    let (fixture, most) = (&fixture, &most);
                    scope.spawn(move || {
                        let mut seed = thread + 1;
                        for _ in 0..24 {
                            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(99991);
                            let offset = (seed >> 16) % fixture.whole.len() as u64;
                            let len = [4096, 131_072, 1 << 20][(seed >> 40) as usize % 3];
                            fixture.assert_reads(offset, len);
                            let held = fixture.counters.cache_bytes_now.get();
                            let mut most = most.lock().unwrap();
                            *most = held.max(*most);
                        }
                    });
                }
            });
            let most = *most.lock().unwrap();
            assert!(most <= BUDGET_MIN, "{most} bytes were held");
            assert_eq!(fixture.counters.reads_queued_now.get(), 0);
            assert_eq!(fixture.counters.read_errors.get(), 0);
        }
    }
}

#[test]
fn a_read_that_needs_more_than_half_of_the_memory_gets_its_bytes_too() {
    let narrow: Kind = (write_wide::<32768>, columns_of_a_rank(16));
    for (write, options) in kinds().into_iter().chain([narrow]) {
        let fixture = fixture_of(
            write,
            &options,
            Settings { direct: DirectIo::Always, ..Settings::default() },
        );
        fixture.assert_reads(3, BUDGET_MIN - 4097);
    }
}

#[test]
fn many_reads_of_the_same_bytes_at_once_read_the_source_once() {
    let settings =
        Settings { direct: DirectIo::Always, backend: Backend::Pread, ..Settings::default() };
    let fixture = fixture(write_rows, settings);
    let (send, receive) = channel();
    for _ in 0..100 {
        let send = send.clone();
        let answer = move |outcome: Result<&[u8], &Error>| {
            send.send(outcome.unwrap().to_vec()).unwrap();
        };
        fixture.cache.read(&fixture.file, 0, 5_000_000..6_000_000, Box::new(answer));
    }
    for _ in 0..100 {
        let read = receive.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(read == fixture.whole[5_000_000..6_000_000]);
    }
}

#[test]
fn a_source_cut_short_fails_the_reads_of_it_and_no_others() {
    for settings in ways() {
        let fixture = fixture(write_rows, settings);
        let shard = fixture._folder.path().join("model-00002-of-00003.safetensors");
        let header = safetensors_header_len(&fixture.whole);
        std::fs::OpenOptions::new().write(true).open(shard).unwrap().set_len(1000).unwrap();
        fixture.assert_reads(header, TENSOR_LEN);
        let outcome = fixture.read(header + 6 * TENSOR_LEN, 5000);
        assert!(outcome.unwrap_err().contains("model-00002-of-00003"));
    }
}

fn safetensors_header_len(file: &[u8]) -> u64 {
    8 + u64::from_le_bytes(*file.first_chunk().unwrap())
}

/// A file of which the second MiB of tensors was read ahead and has changed in the source since.
/// Also returns where that begins.
fn changed_behind_what_was_read_ahead() -> (Fixture, u64) {
    let settings = Settings { direct: DirectIo::Always, ..Settings::default() };
    let fixture = fixture(write_rows, settings);
    let from = safetensors_header_len(&fixture.whole);
    fixture.assert_reads(from, 1 << 20);
    while fixture.counters.source_reads_now.get() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let ahead = fixture.counters.prefetched_bytes.get();
    assert!(ahead >= 1 << 20, "{ahead} bytes were read ahead");
    let shard = fixture._folder.path().join("model-00001-of-00003.safetensors");
    let file = std::fs::OpenOptions::new().write(true).open(shard).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"other bytes", 2_000_000).unwrap();
    (fixture, from + (1 << 20))
}

// Bytes read ahead were still served after the daemon had seen that their shard had changed.
#[test]
fn what_was_read_ahead_is_not_served_once_its_source_is_known_to_have_changed() {
    let (fixture, next) = changed_behind_what_was_read_ahead();
    assert!(fixture.file.reader().sources()[0].check().is_err());
    assert!(fixture.read(next, 4096).is_err());
}

// And before it had seen that.
#[test]
fn what_was_read_ahead_is_not_served_once_its_source_has_changed() {
    let (fixture, next) = changed_behind_what_was_read_ahead();
    assert!(fixture.read(next, 4096).is_err());
}

// Reading ahead opened the shards again behind whoever had closed them, and left them open.
#[test]
fn what_is_read_ahead_for_a_closed_file_leaves_no_source_open() {
    for backend in [Backend::Auto, Backend::Pread] {
        let settings = Settings { direct: DirectIo::Always, backend, ..Settings::default() };
        let Fixture { _folder, cache, file, counters, .. } = fixture(write_rows, settings);
        let sources = file.reader().sources().to_vec();
        let is_open = || sources.iter().any(|source| source.local().unwrap().open_file().is_some());
        for round in 0..50 {
            let pins: Vec<_> = sources.iter().map(|source| source.pin()).collect();
            let file = cache.open(file.reader().clone(), None);
            let (send, receive) = channel();
            let answer = move |outcome: Result<&[u8], &Error>| send.send(outcome.is_ok()).unwrap();
            cache.read(&file, 0, 1 << 20..2 << 20, Box::new(answer));
            drop((file, pins));
            assert!(receive.recv_timeout(Duration::from_secs(60)).unwrap());
            let end = Instant::now() + Duration::from_secs(10);
            while counters.cache_bytes_now.get() > 0 || is_open() {
                assert!(Instant::now() < end, "round {round}: a source stays open");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
