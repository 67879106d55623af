//! Tests of the limit of bytes that prefetches have in flight.

use std::sync::Arc;
use std::time::Duration;

use super::{PATIENCE, budget, engine, fetch, wait_until};
use crate::counters::Counters;
use crate::io::{Backend, DirectIo, Engine, Priority, Settings};
use crate::source::{MeasuredStore, Source};

const MIB: u64 = 1 << 20;

#[test]
fn a_server_gets_no_more_prefetches_than_fill_it_but_all_that_readers_wait_for() {
    let store = MeasuredStore::new(Some(32 * MIB));
    let (engine, counters) = engine(Backend::Auto, DirectIo::Auto);
    let budget = budget(1 << 30);
    let sources = ["s3://b/one", "s3://b/other"].map(|name| store.object(name));
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
    let store = MeasuredStore::new(Some(32 * MIB));
    let counters = Arc::new(Counters::default());
    let timeout = Some(Duration::from_secs(2));
    let engine = Engine::start(Settings { timeout, ..Settings::default() }, counters.clone());
    let budget = budget(1 << 30);
    let [stalled, slow, other] =
        ["s3://b/stalled", "s3://b/slow", "s3://b/other"].map(|name| store.object(name));
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
