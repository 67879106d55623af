//! Which thread answers: the ring's thread is there for all reads of a device, so none of the
//! long answers may be given by it, and those that are held up hold up nobody else.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::{PATIENCE, budget, bytes, fetch, file, get, wait_until};
use crate::counters::Counters;
use crate::error::Result;
use crate::io::queue::STUCK_MAX;
use crate::io::{Budget, Class, Direct, Effort, Engine, Fetch, Filled, Settings};
use crate::source::Source;

const MIB: u64 = 1 << 20;

/// A fetch of a MiB whose callback takes long with the bytes: it says that it has begun, and goes
/// on once the sender that comes with it is dropped. Then its result arrives.
fn long(
    source: &Arc<Source>,
    n: u64,
    budget: &Budget,
) -> (Fetch, Receiver<()>, Sender<()>, Receiver<Result<Filled>>) {
    let (mut fetch, result) = fetch(source, n * MIB..(n + 1) * MIB, Class::Prefetch, budget);
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
    let settings = Settings { direct: Direct::Always, timeout, ..Settings::default() };
    (Engine::start(settings, counters.clone()), counters)
}

#[test]
fn long_answers_that_are_held_up_hold_up_no_other_read() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(24 << 20, 3);
    let (_, source) = file(&folder, "a", &contents);
    let (engine, _) = always_direct(None);
    let budget = budget(64 << 20);
    // More than there are threads for them.
    let held: Vec<_> = (0..16)
        .map(|n| {
            let (fetch, begun, go, result) = long(&source, n, &budget);
            engine.submit(fetch);
            (begun, go, result)
        })
        .collect();
    // Some have begun, whichever.
    wait_until("an answer begins", || held.iter().any(|(begun, ..)| begun.try_recv().is_ok()));
    for n in 16..24 {
        let range = n * MIB..(n + 1) * MIB;
        let (mut fetch, result) = fetch(&source, range.clone(), Class::Demand, &budget);
        fetch.effort = Effort::Short;
        engine.submit(fetch);
        let filled = result.recv_timeout(PATIENCE).expect("an answer").unwrap();
        assert!(*filled == contents[range.start as usize..range.end as usize]);
    }
    // All are let go: those that have begun may be any.
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
    // So many that all threads are held, and fewer than make a device give up.
    let (held, results): (Vec<_>, Vec<_>) = (0..STUCK_MAX as u64 / 2)
        .map(|n| {
            let (fetch, begun, go, result) = long(&source, n, &budget);
            engine.submit(fetch);
            ((begun, go), result)
        })
        .unzip();
    let lane = engine.lock_lanes().values().next().cloned().unwrap();
    let mut begun = 0;
    wait_until("all that can begin have begun", || {
        begun += held.iter().filter(|(begun, _)| begun.try_recv().is_ok()).count();
        begun + lane.lock().over.len() == held.len()
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

/// Reads a page as a reader does who may read by itself; the thread that answered.
fn page(engine: &Engine, source: &Arc<Source>, n: u64, contents: &[u8]) -> Receiver<ThreadId> {
    let start = n * 4096;
    let wanted = contents[start as usize..][..4096].to_vec();
    let (mut fetch, _) = fetch(source, start..start + 4096, Class::Demand, &budget(1 << 20));
    let (send, receive) = channel();
    fetch.done = Box::new(move |result| {
        assert!(*result.unwrap() == *wanted);
        let _ = send.send(std::thread::current().id());
    });
    engine.submit_here(fetch);
    receive
}

#[test]
fn pages_asked_for_one_by_one_are_read_by_the_thread_that_asks_unless_another_one_does() {
    let folder = tempfile::tempdir().unwrap();
    let contents = bytes(1 << 20, 3);
    let (_, source) = file(&folder, "a", &contents);
    let (engine, counters) = always_direct(Some(PATIENCE));
    let (here, get) = (std::thread::current().id(), |receiver: Receiver<ThreadId>| {
        receiver.recv_timeout(PATIENCE).expect("an answer")
    });
    // At first it is not known that they come one by one.
    assert_ne!(get(page(&engine, &source, 0, &contents)), here);
    let mut n = 0;
    wait_until("reads of the calling thread", || {
        n += 1;
        get(page(&engine, &source, n % 256, &contents)) == here
    });
    // One that is held up there, as by a disk that does not answer.
    let (mut held, result) = fetch(&source, 0..10, Class::Demand, &budget(1 << 20));
    let (go, wait) = channel::<()>();
    let (begin, begun) = channel();
    let done = held.done;
    held.done = Box::new(move |result| {
        let _ = begin.send(std::thread::current().id());
        let _ = wait.recv();
        done(result);
    });
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            engine.submit_here(held);
        });
        assert_eq!(begun.recv_timeout(PATIENCE).unwrap(), thread.thread().id());
        for n in 0..20 {
            assert_ne!(get(page(&engine, &source, n, &contents)), here);
        }
        drop(go);
    });
    assert_eq!(*result.recv_timeout(PATIENCE).unwrap().unwrap(), contents[..10]);
    assert_eq!(get(page(&engine, &source, 3, &contents)), here);
    // Long reads are never read so.
    let (long, result) = fetch(&source, 0..MIB, Class::Demand, &budget(4 << 20));
    engine.submit_here(long);
    assert!(*result.recv_timeout(PATIENCE).unwrap().unwrap() == *contents);
    wait_until("no read under way", || counters.source_reads_now.get() == 0);
}
