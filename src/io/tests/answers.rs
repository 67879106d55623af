//! Tests of which thread answers a read. The thread of the ring serves all reads of a device, so it must not
//! call long callbacks. A blocked callback must not block other reads.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::{PATIENCE, budget, bytes, fetch, file, get, wait_until};
use crate::counters::Counters;
use crate::error::Result;
use crate::io::queue::STUCK_MAX;
use crate::io::{Budget, DirectIo, Effort, Engine, Fetch, Priority, ReadBuffer, Settings};
use crate::source::Source;

const MIB: u64 = 1 << 20;

/// A fetch of 1 MiB whose callback takes long. The first receiver gets a message when the callback begins. The callback
/// waits until the sender is dropped. Then its result arrives at the last receiver.
fn long(
    source: &Arc<Source>,
    n: u64,
    budget: &Budget,
) -> (Fetch, Receiver<()>, Sender<()>, Receiver<Result<ReadBuffer>>) {
    let (mut fetch, result) = fetch(source, n * MIB..(n + 1) * MIB, Priority::Prefetch, budget);
    let (begin, begun) = channel();
    let (go, wait) = channel::<()>();
    let done = fetch.done;
    fetch.effort = Effort::Long;
    fetch.done = Box::new(move |result| {
        if result.is_ok() {
            let _ = begin.send(());
            let _ = wait.recv();
        }
        done(result);
    });
    (fetch, begun, go, result)
}

fn always_direct(timeout: Option<Duration>) -> (Engine, Arc<Counters>) {
    let counters = Arc::new(Counters::default());
    let settings = Settings { direct: DirectIo::Always, timeout, ..Settings::default() };
    (Engine::start(settings, counters.clone()), counters)
}

#[test]
fn long_answers_that_are_held_up_hold_up_no_other_read() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(24 << 20, 3);
    let (_, source) = file(&folder, "a", &contents);
    let (engine, _) = always_direct(None);
    let budget = budget(64 << 20);
    // There are more answers than threads for them.
    let held: Vec<_> = (0..16)
        .map(|n| {
            let (fetch, begun, go, result) = long(&source, n, &budget);
            engine.submit(fetch);
            (begun, go, result)
        })
        .collect();
    // Any of the callbacks may begin first.
    wait_until("an answer begins", || held.iter().any(|(begun, ..)| begun.try_recv().is_ok()));
    for n in 16..24 {
        let range = n * MIB..(n + 1) * MIB;
        let (mut fetch, result) = fetch(&source, range.clone(), Priority::Demand, &budget);
        fetch.effort = Effort::Short;
        engine.submit(fetch);
        let filled = result.recv_timeout(PATIENCE).expect("an answer").unwrap();
        assert!(*filled == contents[range.start as usize..range.end as usize]);
    }
    // All callbacks are released, because any of them may have begun.
    let results: Vec<_> = held.into_iter().map(|(_, _, result)| result).collect();
    for (n, result) in results.into_iter().enumerate() {
        let filled = result.recv_timeout(PATIENCE).expect("an answer").unwrap();
        assert!(*filled == contents[n << 20..(n + 1) << 20]);
        assert!(result.recv_timeout(PATIENCE).is_err(), "a second answer");
    }
}

#[test]
fn what_waits_for_a_thread_to_answer_it_fails_at_its_deadline_and_the_device_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(16 << 20, 3);
    let (_, source) = file(&folder, "a", &contents);
    let (_, other) = file(&folder, "b", &contents);
    let (engine, counters) = always_direct(Some(Duration::from_secs(3600)));
    let budget = budget(64 << 20);
    // Enough reads to occupy all threads, but so few that the device still gets further reads.
    let (held, results): (Vec<_>, Vec<_>) = (0..STUCK_MAX as u64 / 2)
        .map(|n| {
            let (fetch, begun, go, result) = long(&source, n, &budget);
            engine.submit(fetch);
            ((begun, go), result)
        })
        .unzip();
    let lane = engine.0.queues.by_device.lock().values().next().cloned().unwrap();
    let mut begun = 0;
    wait_until("all that can begin have begun", || {
        begun += held.iter().filter(|(begun, _)| begun.try_recv().is_ok()).count();
        begun + lane.state.lock().over.len() == held.len()
    });
    let waiting = held.len() - begun;
    if waiting == 0 {
        eprintln!("skipped: without a ring every read has a thread of its own");
        return;
    }
    lane.expire(Instant::now() + Duration::from_secs(4000));
    assert_eq!(counters.source_timeouts.get(), waiting as u64);
    assert_eq!(*get(&engine, &other, 5..50).unwrap(), contents[5..50]);
    drop(held);
    let answers = results.iter().map(|result| result.recv_timeout(PATIENCE).expect("an answer"));
    assert_eq!(answers.filter(|answer| answer.is_err()).count(), waiting);
    assert!(results.iter().all(|result| result.recv_timeout(PATIENCE).is_err()), "a second answer");
    wait_until("all reads back", || counters.source_stuck_now.get() == 0);
    wait_until("all memory back", || budget.used() == 0);
    // A read that completes late leaves no file open that nobody uses.
    assert!(source.local().unwrap().open_file().is_none());
    assert_eq!(*get(&engine, &source, 5..50).unwrap(), contents[5..50]);
}

#[test]
fn when_the_engine_ends_while_answers_are_held_up_every_fetch_is_answered_once() {
    let folder = tempfile::tempdir().unwrap();
    let (_, source) = file(&folder, "a", &bytes(16 << 20, 3));
    let (engine, counters) = always_direct(None);
    let budget = budget(64 << 20);
    let held: Vec<_> = (0..16)
        .map(|n| {
            let (fetch, begun, go, result) = long(&source, n, &budget);
            engine.submit(fetch);
            (begun, go, result)
        })
        .collect();
    wait_until("an answer begins", || held.iter().any(|(begun, ..)| begun.try_recv().is_ok()));
    drop(engine);
    for (begun, go, result) in held {
        drop((begun, go));
        drop(result.recv_timeout(PATIENCE).expect("an answer"));
        assert!(result.recv_timeout(PATIENCE).is_err(), "a second answer");
    }
    wait_until("all memory back", || budget.used() == 0);
    wait_until("no read under way", || counters.source_reads_now.get() == 0);
}
