//! Tests of the limit of bytes that prefetches have in flight.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{PATIENCE, budget, engine, fetch, wait_until};
use crate::counters::Counters;
use crate::io::{Backend, DirectIo, Engine, Priority, Settings};
use crate::source::{Source, StoreKind, StoreListing};
use crate::sync::{Condvar, Mutex};
use crate::version::{QueueKey, Version};

const MIB: u64 = 1 << 20;

/// A store that needs 32 MiB in flight, and that answers no read before it is opened.
#[derive(Debug, Default)]
struct ClosedStore {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl ClosedStore {
    fn open(&self) {
        *self.is_open.lock() = true;
        self.opened.notify_all();
    }

    fn file(self: &Arc<Self>, name: &str) -> Arc<Source> {
        let store: Arc<dyn StoreKind> = self.clone();
        let version = Version::of_tagged_object(QueueKey::Store(7), [1, 1], 1 << 30, None);
        Source::stored(&store, Path::new(name), version)
    }
}

impl StoreKind for ClosedStore {
    fn version(&self, _: &Path) -> io::Result<Version> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn list(&self, _: &Path) -> io::Result<StoreListing> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn read(
        &self,
        _: &Path,
        _: &Version,
        offset: u64,
        buf: &mut [u8],
        _: Option<Instant>,
    ) -> io::Result<()> {
        let mut is_open = self.is_open.lock();
        while !*is_open {
            is_open = self.opened.wait_timeout(is_open, PATIENCE);
        }
        buf.fill((offset / MIB) as u8);
        Ok(())
    }

    fn wanted_in_flight(&self) -> Option<u64> {
        Some(32 * MIB)
    }
}

#[test]
fn a_server_gets_no_more_prefetches_than_fill_it_but_all_that_readers_wait_for() {
    let store = Arc::new(ClosedStore::default());
    let (engine, counters) = engine(Backend::Auto, DirectIo::Auto);
    let budget = budget(1 << 30);
    let sources = ["s3://b/one", "s3://b/other"].map(|name| store.file(name));
    let submit = |number: u64, priority| {
        let range = 2 * number * MIB..2 * (number + 1) * MIB;
        let source = &sources[number as usize % 2];
        let (fetch, result) = fetch(source, range, priority, &budget);
        (engine.submit(fetch), result)
    };
    let in_flight = |n: u64| {
        wait_until("these reads in flight", || counters.source_reads_now.get() == n);
        // No further prefetch begins.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(counters.source_reads_now.get(), n);
    };
    let mut results: Vec<_> = (0..48).map(|n| submit(n, Priority::Prefetch)).collect();
    in_flight(32);
    engine.promote(&results[40].0);
    in_flight(33);
    results.push(submit(48, Priority::Demand));
    in_flight(34);
    store.open();
    for (n, (_, result)) in results.iter().enumerate() {
        let answer = result.recv_timeout(PATIENCE).expect("an answer").unwrap();
        assert!(answer.iter().all(|byte| usize::from(*byte) == 2 * n));
    }
    wait_until("no read in flight", || counters.source_reads_now.get() == 0);
}

#[test]
fn overdue_prefetches_make_room_for_those_of_other_objects() {
    let store = Arc::new(ClosedStore::default());
    let counters = Arc::new(Counters::default());
    let timeout = Some(Duration::from_secs(2));
    let engine = Engine::start(Settings { timeout, ..Settings::default() }, counters.clone());
    let budget = budget(1 << 30);
    let [stalled, slow, other] =
        ["s3://b/stalled", "s3://b/slow", "s3://b/other"].map(|name| store.file(name));
    let prefetch = |source: &Arc<Source>, number: u64| {
        let range = number * MIB..(number + 1) * MIB;
        let (fetch, result) = fetch(source, range, Priority::Prefetch, &budget);
        engine.submit(fetch);
        result
    };
    let overdue: Vec<_> = (0..8).map(|n| prefetch(&stalled, n)).collect();
    std::thread::sleep(Duration::from_secs(1));
    let others: Vec<_> = (0..24).map(|n| prefetch(&slow, n)).collect();
    wait_until("all in flight", || counters.source_reads_now.get() == 32);
    let held_back = prefetch(&other, 0);
    for result in overdue {
        assert!(result.recv_timeout(PATIENCE).expect("an answer").is_err());
    }
    wait_until("the next one sent", || counters.source_reads_now.get() == 25);
    store.open();
    for result in others.into_iter().chain([held_back]) {
        result.recv_timeout(PATIENCE).expect("an answer").unwrap();
    }
    wait_until("all reads back", || counters.source_stuck_now.get() == 0);
}
