//! Tests of the engine with real files.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::queue::{FetchQueue, FinishedFetch, SENT_MAX, SENT_MAX_OF_ONE, STUCK_MAX_OF_ONE};
use super::*;

mod answers;
mod deadlines;
mod prefetches;

/// Maximum wait for events that must happen.
const PATIENCE: Duration = Duration::from_secs(30);

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng(seed | 1);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(rng.below(u64::MAX).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Folders on a disk and in memory, if the machine has both.
fn folders() -> Vec<TempDir> {
    let shm = Path::new("/dev/shm");
    let mut folders = vec![tempfile::tempdir().unwrap()];
    if shm.is_dir() {
        folders.push(tempfile::tempdir_in(shm).unwrap());
    }
    folders
}

fn file(folder: &TempDir, name: &str, bytes: &[u8]) -> (PathBuf, Arc<Source>) {
    let path = folder.path().canonicalize().unwrap().join(name);
    File::create(&path).unwrap().write_all(bytes).unwrap();
    let source = Source::open(&path).unwrap();
    (path, source)
}

/// Removes a file from the page cache.
fn make_cold(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    nix::fcntl::posix_fadvise(&file, 0, 0, advice).unwrap();
}

fn budget(limit: u64) -> Budget {
    Budget::new(limit, Arc::default())
}

fn engine(backend: Backend, direct: DirectIo) -> (Engine, Arc<Counters>) {
    let counters = Arc::new(Counters::default());
    let settings = Settings { backend, direct, ..Settings::default() };
    (Engine::start(settings, counters.clone()), counters)
}

/// A fetch, and the receiver of its result.
fn fetch(
    source: &Arc<Source>,
    range: Range<u64>,
    priority: Priority,
    budget: &Budget,
) -> (Fetch, Receiver<Result<ReadBuffer>>) {
    let (sender, receiver) = channel();
    let reservation = budget.try_reserve(Buffer::len_for(&range)).expect("within the budget");
    let done: FetchCallback = Box::new(move |result| drop(sender.send(result)));
    let (source, effort) = (source.clone(), Effort::AsAwaited);
    let target = reservation.into();
    (Fetch { source, range, cached: None, priority, effort, stored: false, target, done }, receiver)
}

fn get(engine: &Engine, source: &Arc<Source>, range: Range<u64>) -> Result<ReadBuffer> {
    let (fetch, result) = fetch(source, range, Priority::Demand, &budget(64 << 20));
    engine.submit(fetch);
    result.recv_timeout(PATIENCE).expect("an answer")
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

const BACKENDS: [Backend; 2] = [Backend::Uring, Backend::Pread];
const DIRECTS: [DirectIo; 3] = [DirectIo::Auto, DirectIo::Always, DirectIo::Never];

#[test]
fn every_backend_reads_the_very_bytes_of_any_range() {
    for folder in folders() {
        let contents = bytes(3_000_001, 7);
        let (path, source) = file(&folder, "a", &contents);
        let mut rng = Rng(99);
        for (backend, direct) in BACKENDS.iter().flat_map(|b| DIRECTS.map(|d| (*b, d))) {
            make_cold(&path);
            let (engine, counters) = engine(backend, direct);
            let budget = budget(64 << 20);
            let mut waiting = Vec::new();
            for _ in 0..60 {
                let start = rng.below(contents.len() as u64);
                let most = [1, 100, 5000, 1 << 20][rng.below(4) as usize];
                let end = (start + 1 + rng.below(most)).min(contents.len() as u64);
                let Some(reservation) = budget.try_reserve(Buffer::len_for(&(start..end))) else {
                    continue;
                };
                drop(reservation);
                let (fetch, result) = fetch(&source, start..end, Priority::Prefetch, &budget);
                engine.submit(fetch);
                waiting.push((start..end, result));
            }
            for (range, result) in waiting {
                let filled = result.recv_timeout(PATIENCE).unwrap().unwrap();
                let wanted = &contents[range.start as usize..range.end as usize];
                assert!(*filled == *wanted, "{backend:?} {direct:?} {range:?}");
            }
            if direct == DirectIo::Never {
                assert_eq!(counters.source_reads_direct.get(), 0);
            }
            assert_eq!(counters.source_reads_now.get(), 0);
        }
    }
}

#[test]
fn the_last_bytes_of_a_file_come_past_the_page_cache_too() {
    for folder in folders() {
        for (number, len) in [1, 511, 512, 4095, 4096, 4097, 70_001].into_iter().enumerate() {
            let contents = bytes(len, 3);
            let (path, source) = file(&folder, &number.to_string(), &contents);
            make_cold(&path);
            for backend in BACKENDS {
                let (engine, _) = engine(backend, DirectIo::Always);
                let last = len as u64 - 1..len as u64;
                assert_eq!(*get(&engine, &source, last).unwrap(), contents[len - 1..]);
                assert_eq!(*get(&engine, &source, 0..len as u64).unwrap(), *contents);
            }
        }
    }
}

#[test]
fn cold_bytes_are_read_past_the_page_cache_and_leave_it_cold() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(4 << 20, 5);
    let (path, source) = file(&folder, "a", &contents);
    make_cold(&path);
    let (engine, counters) = engine(Backend::Auto, DirectIo::Auto);
    let range = 0..contents.len() as u64;
    if page_cache::cached_pages(&File::open(&path).unwrap(), &range)
        .is_none_or(|found| found.cached > 0)
    {
        eprintln!("skipped: the kernel keeps or does not tell what it caches");
        return;
    }
    assert!(!engine.is_cached(&source, &range));
    assert_eq!(*get(&engine, &source, range.clone()).unwrap(), *contents);
    if source.local().unwrap().direct_file(&source.local().unwrap().file().unwrap()).is_none() {
        eprintln!("skipped: no O_DIRECT here");
        return;
    }
    assert!(counters.source_reads_direct.get() > 0);
    assert_eq!(
        page_cache::cached_pages(&source.local().unwrap().file().unwrap(), &range),
        Some(CachedPages { cached: 0, all: 1024 })
    );
}

#[test]
fn a_read_goes_by_what_its_caller_was_told_of_the_page_cache() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(1 << 20, 5);
    let (_, source) = file(&folder, "a", &contents);
    let (engine, counters) = engine(Backend::Auto, DirectIo::Auto);
    let open = source.local().unwrap().file().unwrap();
    if source.local().unwrap().direct_file(&open).is_none() {
        eprintln!("skipped: no O_DIRECT here");
        return;
    }
    // The page cache has the whole file, because it was just written. Nevertheless, the value `cached` of the
    // caller decides.
    for (cached, direct) in [(0, 1), (256, 0), (230, 0), (200, 1)] {
        let before = counters.source_reads_direct.get();
        let range = 0..contents.len() as u64;
        let (fetch, receiver) = fetch(&source, range, Priority::Demand, &budget(64 << 20));
        let cached = Some(CachedPages { cached, all: 256 });
        engine.submit(Fetch { cached, ..fetch });
        assert_eq!(*receiver.recv_timeout(PATIENCE).unwrap().unwrap(), *contents);
        assert_eq!(counters.source_reads_direct.get() - before, direct, "{cached:?}");
    }
}

#[test]
fn cached_bytes_are_copied_at_once_and_cold_ones_are_neither_read_nor_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(2 << 20, 5);
    let (path, source) = file(&folder, "a", &contents);
    let (engine, counters) = engine(Backend::Auto, DirectIo::Auto);
    let range = 0..contents.len() as u64;
    if !engine.is_cached(&source, &range) {
        eprintln!("skipped: the kernel does not tell what it caches");
        return;
    }
    let (mut a, mut b) = (vec![0; 100_000], vec![0; 4096]);
    let mut reads = [
        Read { source: &source, offset: 12_345, target: &mut a },
        Read { source: &source, offset: 0, target: &mut b },
    ];
    assert!(engine.read_cached(&mut reads).unwrap());
    assert_eq!((&a[..], &b[..]), (&contents[12_345..112_345], &contents[..4096]));
    assert_eq!(counters.source_reads.get(), 0);

    make_cold(&path);
    if engine.is_cached(&source, &(0..1)) {
        eprintln!("skipped: the file system keeps everything cached");
        return;
    }
    let mut reads = [Read { source: &source, offset: 0, target: &mut b }];
    assert!(!engine.read_cached(&mut reads).unwrap());
    let file = source.local().unwrap().file().unwrap();
    assert_eq!(page_cache::cached_pages(&file, &range).unwrap().cached, 0, "readahead was started");
}

#[test]
fn a_file_that_was_cut_off_or_written_to_fails_for_good() {
    for (backend, direct) in BACKENDS.iter().flat_map(|b| DIRECTS.map(|d| (*b, d))) {
        let folder = tempfile::tempdir().unwrap();
        let (engine, counters) = engine(backend, direct);
        let (path, source) = file(&folder, "cut", &bytes(100_000, 1));
        File::options().write(true).open(&path).unwrap().set_len(50_000).unwrap();
        let error = get(&engine, &source, 90_000..95_000).unwrap_err();
        assert!(matches!(error, Error::Changed { .. }), "{error}");
        let error = get(&engine, &source, 0..5000).unwrap_err();
        assert!(error.to_string().contains("cut"), "{error}");
        let mut target = [0; 100];
        let mut reads = [Read { source: &source, offset: 0, target: &mut target }];
        assert!(!matches!(engine.read_cached(&mut reads), Ok(true)));

        let (path, source) = file(&folder, "written", &bytes(100_000, 1));
        get(&engine, &source, 0..100).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        File::options().write(true).open(&path).unwrap().write_all_at(b"x", 0).unwrap();
        let error = get(&engine, &source, 5000..5100).unwrap_err();
        assert!(matches!(error, Error::Changed { .. }), "{error}");
        assert_eq!(counters.source_errors.get(), 3);
    }
}

#[test]
fn thousands_of_fetches_are_answered_once_each_and_never_pass_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(8 << 20, 11);
    let sources: Vec<_> = (0..5).map(|n| file(&folder, &n.to_string(), &contents).1).collect();
    for backend in BACKENDS {
        let (engine, _) = engine(backend, DirectIo::Auto);
        let budget = budget(4 << 20);
        let answers: Arc<Vec<AtomicUsize>> =
            Arc::new((0..4000).map(|_| AtomicUsize::new(0)).collect());
        let mut rng = Rng(5);
        for n in 0..answers.len() {
            let start = rng.below(contents.len() as u64 - 70_000);
            let range = start..start + 1 + rng.below(70_000);
            let mut reservation = None;
            wait_until("room in the budget", || {
                reservation = budget.try_reserve(Buffer::len_for(&range));
                reservation.is_some()
            });
            assert!(budget.used() <= budget.limit());
            let wanted = contents[range.start as usize..range.end as usize].to_vec();
            let counts = answers.clone();
            let done: FetchCallback = Box::new(move |result| {
                assert!(*result.unwrap() == *wanted);
                counts[n].fetch_add(1, Ordering::SeqCst);
            });
            let priority = if n % 3 == 0 { Priority::Demand } else { Priority::Prefetch };
            let source = sources[n % sources.len()].clone();
            let target = reservation.expect("just got").into();
            let effort = Effort::AsAwaited;
            let ticket = engine.submit(Fetch {
                source,
                range,
                cached: None,
                priority,
                effort,
                stored: false,
                target,
                done,
            });
            if n % 7 == 0 {
                engine.promote(&ticket);
            }
        }
        let count = |n: &AtomicUsize| n.load(Ordering::SeqCst);
        wait_until("all answers", || answers.iter().all(|n| count(n) > 0));
        wait_until("all memory back", || budget.used() == 0);
        assert!(answers.iter().all(|n| count(n) == 1));
    }
}

#[test]
fn more_fetches_than_can_be_sent_at_a_time_all_come_however_they_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(1 << 20, 2);
    let sources: Vec<_> = (0..4).map(|n| file(&folder, &n.to_string(), &contents).1).collect();
    for (backend, direct) in BACKENDS.iter().flat_map(|b| DIRECTS.map(|d| (*b, d))) {
        let (engine, _) = engine(backend, direct);
        let budget = budget(256 << 20);
        let results: Vec<_> = (0..10 * SENT_MAX)
            .map(|n| {
                let range = n as u64..n as u64 + 200_000;
                let (fetch, result) = fetch(&sources[n % 4], range, Priority::Prefetch, &budget);
                engine.submit(fetch);
                result
            })
            .collect();
        for (n, result) in results.into_iter().enumerate() {
            let filled = result.recv_timeout(PATIENCE).expect("an answer").unwrap();
            assert!(*filled == contents[n..n + 200_000]);
        }
    }
}

#[test]
fn a_source_whose_first_read_comes_while_the_device_is_full_is_read_once_there_is_room() {
    let (mut queue, _sources, budget, folder, _) = queue_of(SENT_MAX, 1);
    let now = Instant::now();
    let jobs: Vec<_> = std::iter::from_fn(|| queue.pick(now)).collect();
    assert_eq!(jobs.len(), SENT_MAX);
    let late = file(&folder, "late", b"x").1;
    let id = queue.push(fetch(&late, 0..1, Priority::Demand, &budget).0, now);
    assert!(!queue.has_work() && queue.pick(now).is_none());
    drop(queue.finish(jobs[0].id));
    assert!(queue.has_work());
    assert_eq!(queue.pick(now).map(|job| job.id), Some(id));
}

#[test]
fn a_callback_that_panics_ends_neither_its_thread_nor_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(100_000, 1);
    let (_, source) = file(&folder, "a", &contents);
    for backend in BACKENDS {
        let (engine, _) = engine(backend, DirectIo::Auto);
        for _ in 0..100 {
            let (mut fetch, _result) = fetch(&source, 0..10, Priority::Demand, &budget(1 << 20));
            fetch.done = Box::new(|_| panic!("as the test wants it"));
            engine.submit(fetch);
        }
        assert_eq!(*get(&engine, &source, 5..50).unwrap(), contents[5..50]);
    }
}

#[test]
fn when_the_engine_ends_every_fetch_is_answered_and_its_threads_go() {
    let folder = tempfile::tempdir().unwrap();
    let (path, source) = file(&folder, "a", &bytes(32 << 20, 1));
    for backend in BACKENDS {
        make_cold(&path);
        let (engine, _) = engine(backend, DirectIo::Auto);
        let budget = budget(64 << 20);
        let results: Vec<_> = (0..32)
            .map(|n| {
                let range = n << 20..(n + 1) << 20;
                let (fetch, result) = fetch(&source, range, Priority::Prefetch, &budget);
                engine.submit(fetch);
                result
            })
            .collect();
        drop(engine);
        for result in results {
            let answer = result.recv_timeout(PATIENCE).expect("an answer");
            drop(answer);
            assert!(result.recv_timeout(PATIENCE).is_err(), "a second answer");
        }
        wait_until("all memory back", || budget.used() == 0);
    }
}

#[test]
fn an_error_of_the_disk_keeps_its_number_and_file_and_o_direct_is_not_insisted_on() {
    // A regular file of which some parts cannot be read: the addresses that are not mapped.
    let path = PathBuf::from(format!("/proc/{}/mem", std::process::id()));
    let source = Source::open(&path).unwrap();
    let (engine, counters) = engine(Backend::Auto, DirectIo::Always);
    let error = get(&engine, &source, 0..10).unwrap_err();
    assert!(error.to_string().contains("/mem: cannot read"), "{error}");
    let Error::Io { source: reason, .. } = error else { panic!("{error}") };
    assert_eq!(reason.raw_os_error(), Some(nix::libc::EIO));
    assert_eq!(counters.source_errors.get(), 1);

    static BYTES: [u8; 5] = *b"right";
    let address = BYTES.as_ptr() as u64;
    assert_eq!(*get(&engine, &source, address..address + 5).unwrap(), BYTES);
    let queue = &engine.status().device_queues[0];
    assert_eq!((queue.backend.as_str(), queue.local), ("pread", false));
    assert!(queue.direct_refused);
    assert_eq!(counters.source_reads_direct.get(), 0);
}

#[test]
fn a_fetch_past_its_deadline_fails_at_once_and_its_memory_lives_until_it_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(48 << 20, 1);
    let (path, source) = file(&folder, "a", &contents);
    for backend in BACKENDS {
        make_cold(&path);
        let counters = Arc::new(Counters::default());
        // For most reads, the disk is slower than this.
        let timeout = Some(Duration::from_micros(500));
        let settings = Settings { backend, timeout, ..Settings::default() };
        let engine = Engine::start(settings, counters.clone());
        let budget = Budget::new(64 << 20, counters.clone());
        let results: Vec<_> = (0..48_usize)
            .map(|n| {
                let range = (n as u64) << 20..(n as u64 + 1) << 20;
                let (fetch, result) = fetch(&source, range, Priority::Demand, &budget);
                engine.submit(fetch);
                (n, result)
            })
            .collect();
        let mut late = 0;
        for (n, result) in results {
            match result.recv_timeout(PATIENCE).expect("an answer") {
                Ok(filled) => assert!(*filled == contents[n << 20..(n + 1) << 20]),
                Err(Error::Io { source, .. }) => {
                    assert_eq!(source.kind(), std::io::ErrorKind::TimedOut);
                    late += 1;
                }
                Err(e) => panic!("{e}"),
            }
            assert!(result.recv_timeout(PATIENCE).is_err(), "a second answer");
        }
        wait_until("all reads back", || counters.source_stuck_now.get() == 0);
        wait_until("all memory back", || budget.used() == 0);
        assert_eq!((late, counters.source_timeouts.get()), (late, late));
        assert_eq!((counters.source_reads_now.get(), counters.cache_bytes_now.get()), (0, 0));
        assert!(late > 0, "a disk that answers within 500 us");
    }
}

/// A queue with fetches of `n` sources, and the number of callbacks that were called.
fn queue_of(
    n: usize,
    each: u64,
) -> (FetchQueue, Vec<Arc<Source>>, Budget, TempDir, Arc<AtomicUsize>) {
    let folder = tempfile::tempdir().unwrap();
    let budget = budget(1 << 30);
    let mut queue = FetchQueue::default();
    let sources: Vec<_> = (0..n).map(|n| file(&folder, &n.to_string(), b"x").1).collect();
    let answers = Arc::new(AtomicUsize::new(0));
    for source in &sources {
        for offset in 0..each {
            let (mut fetch, _) = fetch(source, offset..offset + 1, Priority::Prefetch, &budget);
            let answers = answers.clone();
            fetch.done = Box::new(move |_| {
                answers.fetch_add(1, Ordering::SeqCst);
            });
            queue.push(fetch, Instant::now());
        }
    }
    (queue, sources, budget, folder, answers)
}

#[test]
fn what_a_reader_waits_for_goes_first_in_the_order_of_submission() {
    let (mut queue, sources, budget, _folder, _) = queue_of(2, 4);
    let demand = queue.push(fetch(&sources[1], 9..10, Priority::Demand, &budget).0, Instant::now());
    queue.promote(6, Instant::now());
    queue.promote(6, Instant::now());
    let order: Vec<u64> =
        std::iter::from_fn(|| queue.pick(Instant::now()).map(|job| job.id)).collect();
    assert_eq!(order, [6, demand, 0, 1, 2, 3, 4, 5, 7]);
    // The promotion comes too late and has no effect.
    queue.promote(0, Instant::now());
}

#[test]
fn one_source_never_takes_all_of_a_device() {
    let (mut queue, sources, _budget, _folder, _) = queue_of(3, 100);
    let jobs: Vec<_> = std::iter::from_fn(|| queue.pick(Instant::now())).collect();
    assert_eq!(jobs.len(), SENT_MAX);
    for source in &sources[..2] {
        let of_one = jobs.iter().filter(|job| Arc::ptr_eq(&job.source, source)).count();
        assert_eq!(of_one, SENT_MAX_OF_ONE);
    }
    assert!(!queue.has_work());
    assert!(matches!(queue.finish(jobs[0].id), Some(FinishedFetch::Unanswered(_))));
    assert!(queue.has_work());
}

#[test]
fn sources_that_wait_for_a_busy_server_leave_reads_to_others() {
    let (mut queue, _sources, budget, folder, _) = queue_of(2, 100);
    let jobs: Vec<_> = std::iter::from_fn(|| queue.pick(Instant::now())).collect();
    assert_eq!(jobs.len(), SENT_MAX);
    let (_, other) = file(&folder, "other", b"x");
    for offset in 0..10 {
        let (fetch, _) = fetch(&other, offset..offset + 1, Priority::Demand, &budget);
        queue.push(fetch, Instant::now());
    }
    assert!(!queue.has_work());
    queue.has_spare = true;
    let spared: Vec<_> = std::iter::from_fn(|| queue.pick(Instant::now())).collect();
    assert_eq!(spared.len(), 4);
    assert!(spared.iter().all(|job| Arc::ptr_eq(&job.source, &other)));
    assert!(matches!(queue.finish(spared[0].id), Some(FinishedFetch::Unanswered(_))));
    assert!(queue.pick(Instant::now()).is_some() && !queue.has_work());
}

#[test]
fn an_overdue_fetch_is_answered_once_and_its_source_gets_no_more_until_it_comes_back() {
    let (mut queue, _sources, budget, _folder, answers) = queue_of(1, 100);
    let jobs: Vec<_> = std::iter::from_fn(|| queue.pick(Instant::now())).take(6).collect();
    assert_eq!(jobs.len(), 6);
    let used = budget.used();
    assert!(queue.expire(Instant::now(), Duration::from_secs(60)).is_empty());
    let failed = queue.expire(Instant::now(), Duration::ZERO);
    assert_eq!((failed.len(), queue.stuck(), queue.queued()), (100, 6, 0));
    for failed in failed {
        device_queue::answer(failed.done, Err(Error::internal("")));
    }
    assert_eq!(answers.load(Ordering::SeqCst), 100);
    // The memory of queued reads was freed. The memory of stuck reads is still held, but does not count.
    assert_eq!((used > 0, budget.used()), (true, 0));

    let source = jobs[0].source.clone();
    queue.push(fetch(&source, 0..1, Priority::Demand, &budget).0, Instant::now());
    assert!(!queue.has_work());
    for (back, job) in jobs.iter().enumerate() {
        assert!(matches!(queue.finish(job.id), Some(FinishedFetch::Late(_))), "answered twice");
        assert_eq!(queue.has_work(), jobs.len() - back - 1 < STUCK_MAX_OF_ONE);
    }
    assert_eq!((queue.stuck(), queue.in_flight()), (0, 0));
}

// An earlier version had a bug here: a reader that joined a queued prefetch inherited its old deadline.
#[test]
fn the_time_of_what_was_read_ahead_begins_when_a_reader_asks_or_when_it_is_sent() {
    let (mut queue, _sources, _budget, _folder, _) = queue_of(1, 3);
    let start = Instant::now() + Duration::from_secs(1);
    let (after, timeout) = (|n| start + Duration::from_secs(n), Duration::from_secs(60));
    let job = queue.pick(after(40)).unwrap();
    queue.promote(2, after(55));
    // The first fetch was sent, the last one was promoted, and the one between them did not change.
    let mut expired = |now| -> Vec<u64> {
        let failed = queue.expire(now, timeout);
        failed.into_iter().map(|failed| failed.offset).collect()
    };
    let ends = [61, 99, 100, 114, 115].map(|n| expired(after(n)));
    assert_eq!(ends, [vec![1], vec![], vec![0], vec![], vec![2]]);
    assert!(matches!(queue.finish(job.id), Some(FinishedFetch::Late(_))), "answered twice");
}

#[test]
fn the_time_of_what_a_reader_waits_for_includes_the_queue_whoever_joins_it() {
    let (mut queue, sources, budget, _folder, _) = queue_of(1, 0);
    let start = Instant::now();
    let (after, timeout) = (|n| start + Duration::from_secs(n), Duration::from_secs(60));
    for offset in 0..2 {
        queue.push(fetch(&sources[0], offset..offset + 1, Priority::Demand, &budget).0, start);
    }
    assert_eq!(queue.pick(after(50)).map(|job| job.id), Some(0));
    queue.promote(1, after(50));
    assert_eq!(queue.oldest(), Some(start));
    assert!(queue.expire(after(59), timeout).is_empty());
    assert_eq!(queue.expire(after(60), timeout).len(), 2);
}

#[test]
fn a_budget_is_never_passed_and_kept_memory_counts() {
    let counters = Arc::new(Counters::default());
    let budget = Budget::new(1 << 20, counters.clone());
    assert!(budget.try_reserve((1 << 20) + 1).is_none());
    let mut whole = budget.try_reserve(1 << 20).unwrap();
    assert!(budget.try_reserve(1).is_none());
    let part = whole.split(256 << 10);
    assert_eq!((part.len(), whole.len()), (256 << 10, 768 << 10));
    let mut buffer = Buffer::new(200_000, part);
    assert_eq!(buffer.as_ptr() as u64 % 4096, 0);
    assert!(buffer.iter().all(|byte| *byte == 0));
    buffer[199_999] = 1;
    // Reserved bytes that the buffer does not need were returned.
    assert_eq!((buffer.reserved(), budget.used()), (200_704, (768 << 10) + 200_704));
    let start = buffer.as_ptr();
    drop(buffer);
    drop(whole);
    assert_eq!((budget.used(), counters.cache_bytes_now.get()), (0, 0));
    // The new buffer reuses the memory.
    let again = Buffer::new(190_000, budget.try_reserve(192_512).unwrap());
    assert_eq!((again.as_ptr(), again.reserved()), (start, 192_512));
    budget.trim();
    drop(again);
    budget.trim();
    let buffer = Buffer::new(1 << 20, budget.try_reserve(1 << 20).unwrap());
    assert!(buffer.iter().all(|byte| *byte == 0));
    assert_eq!(budget.used(), 1 << 20);
}

#[test]
fn a_lease_covers_the_pages_around_any_range() {
    for (range, len) in [(0..1, 4096), (4095..4097, 8192), (4096..8192, 4096), (1..8193, 12_288)] {
        assert_eq!(Buffer::len_for(&range), len);
    }
}
