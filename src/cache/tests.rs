//! Tests of the cache in states that otherwise need time or luck to occur.

use std::fs::File;
use std::io::Write;
use std::sync::mpsc::{Receiver, channel};

use tempfile::TempDir;

use super::*;
use crate::io::{Buffer, DirectIo, Settings};

const MIB: u64 = 1 << 20;

/// Maximum wait for events that must happen.
const PATIENCE: Duration = Duration::from_secs(30);

struct Fixture {
    folder: TempDir,
    cache: Cache,
    budget: Budget,
    counters: Arc<Counters>,
}

/// A cache of 16 MiB. Its reads take memory even if the kernel has their bytes in the page cache.
fn fixture() -> Fixture {
    let counters = Arc::new(Counters::default());
    let settings = Settings { direct: DirectIo::Always, ..Settings::default() };
    let engine = Engine::start(settings, counters.clone());
    let budget = Budget::new(BUDGET_MIN, counters.clone());
    let cache = Cache::start(engine, budget.clone(), counters.clone(), settings.timeout).unwrap();
    Fixture { folder: tempfile::tempdir().unwrap(), cache, budget, counters }
}

impl Fixture {
    /// Creates a file of `mib` MiB. The bytes of each MiB are its number.
    fn file(&self, name: &str, mib: u8) -> Arc<CachedFile> {
        let path = self.folder.path().canonicalize().unwrap().join(name);
        let bytes: Vec<u8> = (0..mib).flat_map(|n| vec![n; MIB as usize]).collect();
        File::create(&path).unwrap().write_all(&bytes).unwrap();
        self.cache.open(Reader::whole(Source::open(&path).unwrap()), None)
    }

    /// Begins a read. Its answer arrives at the receiver.
    fn read(&self, file: &Arc<CachedFile>, range: Range<u64>) -> Receiver<Vec<u8>> {
        let (send, receive) = channel();
        let answer = move |outcome: std::result::Result<&[u8], &Error>| {
            let _ = send.send(outcome.unwrap().to_vec());
        };
        self.cache.read(file, 0, range, Box::new(answer));
        receive
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.cache.0.state.lock()
    }

    /// Adds the MiB at `start` of a file to the cache, as if it had been read ahead at `since`.
    fn put(&self, file: &Arc<CachedFile>, start: u64, since: Instant) {
        let buffer = Buffer::new(MIB as usize, self.budget.try_reserve(MIB).unwrap());
        let sources = file.reader.sources().into();
        let data = Data::Ready(Arc::new(Block::Gathered(buffer)), sources);
        let block = CachedBlock { end: start + MIB, asked: 0, ahead: true, left: false, data };
        let mut state = self.state();
        state.of(file).last_read = since;
        state.of(file).blocks.insert(start, block);
        state.idle.put((file.id, start), since);
    }
}

// An earlier version had a bug: blocks without further requests left no memory for readahead until they were dropped.
#[test]
fn what_nobody_asks_for_any_more_makes_way_for_what_is_read_ahead() {
    let now = Instant::now();
    let (long_ago, just_now) = (now - Duration::from_secs(3), now + PATIENCE);
    for (since, ahead) in [(long_ago, true), (just_now, false)] {
        let fixture = fixture();
        let (old, new) = (fixture.file("old", 16), fixture.file("new", 16));
        (0..12).for_each(|number| fixture.put(&old, number * MIB, since));
        let bytes = fixture.read(&new, 0..MIB).recv_timeout(PATIENCE).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!(fixture.counters.prefetched_bytes.get() > 0, ahead);
        assert_eq!(fixture.counters.prefetch_cuts.get() == 0, ahead);
        assert!(fixture.counters.cache_bytes_now.get() <= BUDGET_MIN);
    }
}

/// The blocks in the first 4 MiB of `file` after its reader has left `range`.
fn left(fixture: &Fixture, file: &Arc<CachedFile>, range: Range<u64>) -> Vec<u64> {
    let mut state = fixture.state();
    fixture.cache.0.leave(&mut state, file, &range);
    state.of(file).blocks.keys().copied().take_while(|&start| start < 4 * MIB).collect()
}

// An earlier version had a bug: blocks with a requested page stayed when their reader continued elsewhere.
#[test]
fn the_rest_of_a_block_that_is_left_goes_with_it_and_no_block_before_it() {
    let fixture = fixture();
    let file = fixture.file("a", 16);
    [0, MIB, 2 * MIB]
        .iter()
        .for_each(|start| fixture.put(&file, *start, Instant::now() + PATIENCE));
    fixture.read(&file, MIB..MIB + 4096).recv_timeout(PATIENCE).unwrap();
    assert_eq!(left(&fixture, &file, MIB + 4096..2 * MIB), [0, 2 * MIB]);
}

/// Plans MiB 1 and 2 of `file` for a reader, and puts MiB 1 to 3 into the cache.
fn plan_two_of_three(fixture: &Fixture, file: &Arc<CachedFile>) {
    (1..4).for_each(|number| fixture.put(file, number * MIB, Instant::now() + PATIENCE));
    let request = crate::prefetch::Request { range: 0..MIB, reader: 0, late: false, now: 0 };
    let advice = file.planner.lock().observe(&request, BUDGET_MIN, &file.reader);
    assert_eq!(advice.ahead.unwrap().1.first(), Some(&(MIB..3 * MIB)));
}

// An earlier version had a bug: a block was dropped if its reader skipped the last part of the block and had requested
// only some bytes of the first part.
#[test]
fn a_block_stays_that_another_reader_still_needs_a_part_of() {
    let fixture = fixture();
    let file = fixture.file("a", 16);
    plan_two_of_three(&fixture, &file);
    fixture.read(&file, MIB..MIB + 4096).recv_timeout(PATIENCE).unwrap();
    let end = 2 * MIB + 4096;
    file.planner.lock().dropped(&(MIB + MIB / 2..end), 0);
    assert_eq!(left(&fixture, &file, MIB + MIB / 2..end), [MIB, 2 * MIB, 3 * MIB]);
    file.planner.lock().dropped(&(MIB..3 * MIB), 0);
    assert_eq!(left(&fixture, &file, MIB + MIB / 2..end), [3 * MIB]);
}

// An earlier version had a bug: the planner took evicted blocks for loaded until their stream ended, and did
// not plan them again.
#[test]
fn the_planner_learns_of_blocks_that_make_way_before_anybody_has_asked_for_them() {
    let fixture = fixture();
    let file = fixture.file("a", 16);
    plan_two_of_three(&fixture, &file);
    assert!(fixture.cache.0.evict(&mut fixture.state()));
    let is_planned = |range| file.planner.lock().is_planned(&range);
    assert!(!is_planned(MIB..2 * MIB) && is_planned(2 * MIB..3 * MIB));
}

/// Reads pages of `file` one after another until one has to wait in the queue behind the read that waits there.
/// That read is kept from getting older than a second. Returns the receiver of the read that has to wait.
fn read_until_one_waits(fixture: &Fixture, file: &Arc<CachedFile>) -> Receiver<Vec<u8>> {
    let end = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < end, "the older read is overtaken again and again");
        fixture.state().queue.age_oldest(Duration::from_secs(1));
        let answer = fixture.read(file, 8 * MIB..8 * MIB + 4096);
        if fixture.counters.reads_queued_now.get() == 2 {
            return answer;
        }
        answer.recv_timeout(PATIENCE).unwrap();
    }
}

// An earlier version had a bug: small reads overtook a read of half of the memory until its deadline.
#[test]
fn a_read_that_waits_long_for_much_memory_is_no_longer_overtaken_by_small_ones() {
    let fixture = fixture();
    let (large, small) = (fixture.file("large", 16), fixture.file("small", 16));
    let held = fixture.budget.try_reserve(12 * MIB).unwrap();
    let first = fixture.read(&large, 0..8 * MIB);
    // A newer small read may still overtake the large read.
    fixture.read(&small, 0..4096).recv_timeout(PATIENCE).unwrap();
    let second = read_until_one_waits(&fixture, &small);
    drop(held);
    assert_eq!(first.recv_timeout(PATIENCE).unwrap().len() as u64, 8 * MIB);
    assert_eq!(second.recv_timeout(PATIENCE).unwrap(), [8; 4096]);
}

#[test]
fn a_read_that_waits_long_for_its_source_holds_back_others_of_that_one_only() {
    let fixture = fixture();
    let (busy, other) = (fixture.file("busy", 16), fixture.file("other", 16));
    let under_way = busy.reader.plan_block(0..6 * MIB);
    fixture.state().loading.add(&under_way);
    let first = fixture.read(&busy, 4 * MIB..8 * MIB);
    let second = read_until_one_waits(&fixture, &busy);
    fixture.state().queue.age_oldest(Duration::from_secs(1));
    fixture.read(&other, 0..4096).recv_timeout(PATIENCE).unwrap();
    let charges: Vec<_> = under_way.sources().map(|(source, len)| (source.clone(), len)).collect();
    fixture.state().loading.remove(&charges);
    assert_eq!(first.recv_timeout(PATIENCE).unwrap().len() as u64, 4 * MIB);
    assert_eq!(second.recv_timeout(PATIENCE).unwrap(), [8; 4096]);
}

// An earlier version had a bug: a stalled source took all four of these reads, and left none to other sources.
#[test]
fn reads_without_blocks_of_one_source_leave_room_for_those_of_another() {
    let fixture = fixture();
    let (busy, other) = (fixture.file("busy", 1), fixture.file("other", 1));
    let request = |file: &Arc<CachedFile>| ReadRequest {
        file: file.clone(),
        reader: 0,
        range: 0..4096,
        since: Instant::now(),
        answer: Box::new(|_| {}),
    };
    let mut reads = Vec::new();
    let mut is_taken = |file| UncachedRead::take_in(&mut reads, request(file)).is_ok();
    assert_eq!([0; 4].map(|_| is_taken(&busy)), [true, true, true, false]);
    assert!(is_taken(&other) && !is_taken(&other));
}

/// Records for each line of the log whether the cache was locked while the line was written.
struct Log {
    cache: Cache,
    locked: Arc<Mutex<Vec<bool>>>,
}

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO
    }

    fn event(&self, _: &tracing::Event<'_>) {
        // Other threads lock the cache too, but never for long.
        let end = Instant::now() + Duration::from_secs(5);
        let mut locked = true;
        while locked && Instant::now() < end {
            locked = self.cache.0.state.try_lock().is_none();
        }
        self.locked.lock().push(locked);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

// An earlier version had a bug: all sources of a block, perhaps thousands, were checked while other reads
// waited for the lock.
#[test]
fn whether_a_source_has_changed_is_looked_at_without_the_lock() {
    let fixture = fixture();
    let file = fixture.file("a", 2);
    fixture.put(&file, 0, Instant::now() + PATIENCE);
    let path = file.reader.sources()[0].path();
    File::options().write(true).open(path).unwrap().set_len(MIB + 1).unwrap();
    let locked = Arc::new(Mutex::new(Vec::new()));
    let log = Log { cache: fixture.cache.clone(), locked: locked.clone() };
    let (send, receive) = channel();
    let answer = Box::new(move |outcome: std::result::Result<&[u8], &Error>| {
        let _ = send.send(outcome.is_ok());
    });
    tracing::subscriber::with_default(log, || fixture.cache.read(&file, 0, 0..4096, answer));
    assert!(!receive.recv_timeout(PATIENCE).unwrap());
    assert_eq!(*locked.lock(), [false]);
}
