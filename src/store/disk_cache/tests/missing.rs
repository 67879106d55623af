//! Tests of the requests for the blocks that the disk cache lacks.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::slice;
use std::time::{Duration, Instant};

use super::{Bench, CountedStore, key_of};
use crate::coalesce::REQUEST_GAP;
use crate::source::{ObjectRead, StoreKind};
use crate::store::disk_cache::cache::{CACHES, cache_in};
use crate::store::disk_cache::claims::{Claim, HeldClaim};
use crate::store::disk_cache::object::{self, BLOCK_LEN, CachedObject};
use crate::store::disk_cache::{CachedStore, JOINED_MAX, REQUESTS_MAX, requests_of};
use crate::sync::Mutex;

/// A bench whose cache has all blocks of an object of `blocks` blocks, except those in `missing`.
fn bench_without(blocks: u64, missing: impl Fn(u64) -> bool) -> Bench {
    let mut bench = Bench::new();
    bench.store = CountedStore::new((blocks * BLOCK_LEN) as usize, 0);
    let len = bench.store.bytes.len() as u64;
    bench.assert_right(0..len);
    let map = fs::OpenOptions::new().write(true).open(bench.file(object::MAP)).unwrap();
    for block in (0..blocks).filter(|block| missing(*block)) {
        map.write_all_at(&[0; 16], 4096 + 16 * block).unwrap();
    }
    bench.store.reads.lock().clear();
    bench
}

#[test]
fn missing_blocks_that_lie_near_each_other_come_with_one_request() {
    let bench = bench_without(512, |block| block % 2 == 1);
    let len = 512 * BLOCK_LEN;
    bench.assert_right(17..len - 17);
    assert_eq!(bench.store.reads.lock().as_slice(), slice::from_ref(&(BLOCK_LEN..len)));
    let status = bench.status();
    assert_eq!((status.missed_bytes, status.stored_bytes), (len / 2, len / 2));
    assert_eq!(bench.kept()[0].bytes, len);
    bench.assert_right(0..len);
    assert_eq!(bench.store.reads.lock().len(), 1);
}

#[test]
fn missing_blocks_that_lie_near_each_other_come_with_one_request_also_if_nothing_is_stored() {
    let bench = bench_without(64, |block| block % 2 == 1);
    CACHES.get_or_init(Mutex::default).lock().remove(&bench.place());
    cache_in(&bench.place()).pause("as the test wants it");
    let found = bench.read_again("s3://b/object", 1, 17..64 * BLOCK_LEN - 17);
    assert!(found == bench.store.bytes[17..64 * BLOCK_LEN as usize - 17]);
    let request = BLOCK_LEN..64 * BLOCK_LEN - 17;
    assert_eq!(bench.store.reads.lock().as_slice(), slice::from_ref(&request));
    assert_eq!(bench.status().missed_bytes, 32 * BLOCK_LEN - 17);
}

#[test]
fn missing_blocks_that_lie_far_from_each_other_come_with_few_requests() {
    let far = REQUEST_GAP / BLOCK_LEN + 2;
    for (count, requests) in [(REQUESTS_MAX as u64, REQUESTS_MAX), (REQUESTS_MAX as u64 + 1, 1)] {
        let bench = bench_without(count * far, |block| block % far == 0);
        bench.assert_right(0..count * far * BLOCK_LEN);
        assert_eq!(bench.store.reads.lock().len(), requests);
    }
    // The bytes between these blocks are worth more than the round trips.
    let very_far: Vec<_> = (0..9).map(|at| at * JOINED_MAX..at * JOINED_MAX + 1).collect();
    assert_eq!(requests_of(&very_far).len(), 9);
}

/// Claims `run` once the threads of the cache have released the claims of earlier reads.
fn claim_when_free(object: &CachedObject, run: Range<u64>) -> Option<HeldClaim> {
    loop {
        match object.claim(&run) {
            Claim::Mine(held) => return held,
            Claim::Busy(_) => std::thread::yield_now(),
        }
    }
}

#[test]
fn a_claim_of_another_reader_amid_missing_blocks_leaves_the_others_with_few_requests() {
    let bench = bench_without(64, |block| block % 2 == 1);
    let key = key_of(&bench);
    let object = CachedObject::open_there(&key.map_in(&bench.place().folder), Some(&key)).unwrap();
    // The range of the claim begins and ends with blocks that are in the cache.
    let held = claim_when_free(&object, 30..33);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| bench.assert_right(0..64 * BLOCK_LEN));
        while bench.store.reads.lock().len() < 2 || bench.status().waits == 0 {
            std::thread::yield_now();
        }
        drop(held);
        reader.join().unwrap();
    });
    let mut reads = bench.store.reads.lock().clone();
    reads.sort_unstable_by_key(|read| read.start);
    let expected = [(1, 30), (31, 32), (33, 64)];
    assert_eq!(reads, expected.map(|(start, end)| start * BLOCK_LEN..end * BLOCK_LEN));
}

#[test]
fn after_one_wait_for_a_claim_in_vain_readers_of_the_object_wait_for_no_claim() {
    let bench = bench_without(64, |_| true);
    let key = key_of(&bench);
    let object = CachedObject::open_there(&key.map_in(&bench.place().folder), Some(&key)).unwrap();
    let _stopped = [0..8, 16..24, 40..48].map(|run| claim_when_free(&object, run));
    let cached = CachedStore::new(bench.store.clone(), &bench.place());
    let version = bench.store.version(1);
    let mut buf = vec![0; 8 * BLOCK_LEN as usize];
    let cache = cache_in(&bench.place());
    while !cache.opened(&key).is_some_and(|object| object.has_stuck_claims()) {
        let until = Instant::now() + Duration::from_secs(2);
        let (path, until) = ("s3://b/object".as_ref(), Some(until));
        cached.read(&ObjectRead { path, version: &version, until }, 0, &mut buf).unwrap();
        assert!(buf == bench.store.bytes[..buf.len()]);
    }
    let waits = bench.status().waits;
    bench.store.reads.lock().clear();
    let found = bench.read_again("s3://b/object", 1, 8 * BLOCK_LEN..64 * BLOCK_LEN);
    assert!(found == bench.store.bytes[8 * BLOCK_LEN as usize..]);
    assert_eq!((bench.status().waits, bench.store.reads.lock().len()), (waits, 1));
    assert!(bench.kept()[0].bytes >= 56 * BLOCK_LEN);
}
