//! The fetches of one device: which are queued, which are in flight, and which are overdue. This type only
//! decides and counts. Its caller executes the reads and calls the callbacks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::limiter::{PerSourceLimiter, SourceKey};
use super::memory::{ReadTarget, ReservedBytes};
use super::{CachedPages, Effort, Fetch, FetchCallback, Priority};
use crate::source::Source;

/// Maximum number of reads of a device that are in flight in the kernel, including overdue ones. A queue with
/// `has_spare` may have `SPARE` more.
pub(super) const SENT_MAX: usize = 64;

/// A device with this number of overdue reads gets no further reads. So a device that does not answer occupies only a
/// limited number of threads and buffers.
pub(super) const STUCK_MAX: usize = SENT_MAX_OF_ONE;

/// Maximum number of reads of one source that are in flight in the kernel. So a stalled source leaves capacity to other
/// sources.
pub(crate) const SENT_MAX_OF_ONE: usize = SENT_MAX / 2;

/// Number of reads beyond `SENT_MAX` that a queue with `has_spare` may send. A source with `SPARE_OF_ONE` or more reads
/// in flight gets none of them.
const SPARE: u64 = 32;
const SPARE_OF_ONE: u64 = 4;

/// A source with this number of overdue reads gets no further reads.
pub(super) const STUCK_MAX_OF_ONE: usize = 4;

/// Minimum of `FetchQueue::prefetch_bytes_max`. This limit applies only if `SENT_MAX_OF_ONE` or more prefetches are in
/// flight, because a server that limits the rate of each connection needs many requests.
const PREFETCH_MAX_MIN: u64 = 32 << 20;

/// A read for a backend to execute.
pub(super) struct ReadJob {
    pub(super) id: u64,
    pub(super) source: Arc<Source>,
    pub(super) range: Range<u64>,
    /// Start of its time limit.
    pub(super) since: Instant,
    /// Whether encrypted bytes are returned without decryption.
    pub(super) stored: bool,
    pub(super) target: ReadTarget,
    pub(super) cached: Option<CachedPages>,
}

/// A fetch that has to be answered with an error.
pub(super) struct Failed {
    pub(super) source: Arc<Source>,
    pub(super) offset: u64,
    pub(super) done: FetchCallback,
}

/// A fetch whose read has completed.
pub(super) enum FinishedFetch {
    /// The fetch has to be answered.
    Unanswered(FetchCallback),
    /// The fetch was answered with an error before, because it was overdue. The field is its source.
    Late(Arc<Source>),
}

/// A fetch, from its submission until its read has completed.
struct Flight {
    source: Arc<Source>,
    range: Range<u64>,
    /// Start of its time limit. This is the time of a reader's request. For a prefetch, it is the time of
    /// submission while it is queued, and after that the time at which it was sent.
    since: Instant,
    /// Cost of the answer as known so far. It may grow when a reader begins to wait.
    effort: Effort,
    stored: bool,
    cached: Option<CachedPages>,
    stage: FlightStage,
    /// Whether this fetch counts in `FetchQueue::prefetches`.
    is_prefetch_in_flight: bool,
    /// `None` if the fetch was answered before its read completed.
    done: Option<FetchCallback>,
}

enum FlightStage {
    Queued(Priority, ReadTarget),
    Sent(Arc<ReservedBytes>),
}

/// The queued fetches of one source.
#[derive(Default)]
struct OfSource {
    /// Numbers of the queued fetches, by priority.
    queued: [BTreeSet<u64>; 2],
    /// For each priority, the number of the fetch that this source has in `FetchQueue::ready`.
    ready: [Option<u64>; 2],
}

/// All fetches of a device. They are numbered in the order of submission.
pub(super) struct FetchQueue {
    next_id: u64,
    flights: BTreeMap<u64, Flight>,
    /// The sources with queued fetches. Their entries in `flights` keep the sources alive.
    sources: HashMap<SourceKey, OfSource>,
    /// The first queued fetch of each source that may send one, by priority.
    ready: [BTreeSet<u64>; 2],
    /// Fetches in flight in the kernel, including overdue ones.
    sent: PerSourceLimiter<SourceKey>,
    /// Fetches in flight that are overdue.
    stuck: PerSourceLimiter<SourceKey>,
    /// Whether sources with few reads in flight may exceed `SENT_MAX`. A server may be slow for only some of its
    /// objects, and the reads of these objects may take all of `SENT_MAX`.
    pub(super) has_spare: bool,
    /// Number and bytes of the prefetches that are in flight and not overdue.
    prefetches: usize,
    prefetch_bytes: u64,
    /// Number of bytes of prefetches in flight from which no further prefetch is sent. All answers of a server share
    /// its bandwidth: when the prefetches in flight use all of it, another prefetch would delay the bytes that are read
    /// next.
    prefetch_bytes_max: u64,
}

impl Default for FetchQueue {
    fn default() -> FetchQueue {
        FetchQueue {
            next_id: 0,
            flights: BTreeMap::new(),
            sources: HashMap::new(),
            ready: Default::default(),
            sent: PerSourceLimiter::new(SENT_MAX_OF_ONE as u64, SENT_MAX as u64),
            stuck: PerSourceLimiter::new(STUCK_MAX_OF_ONE as u64, STUCK_MAX as u64),
            has_spare: false,
            prefetches: 0,
            prefetch_bytes: 0,
            prefetch_bytes_max: u64::MAX,
        }
    }
}

impl FetchQueue {
    /// Queues a fetch and returns its number.
    pub(super) fn push(&mut self, fetch: Fetch, now: Instant) -> u64 {
        let Fetch { source, range, cached, priority, effort, stored, target, done } = fetch;
        let effort = if priority == Priority::Demand { effort.awaited() } else { effort };
        let id = self.next_id;
        self.next_id += 1;
        let key = SourceKey::of(&source);
        self.sources.entry(key).or_default().queued[priority as usize].insert(id);
        let stage = FlightStage::Queued(priority, target);
        let done = Some(done);
        let (since, is_prefetch_in_flight) = (now, false);
        let flight = Flight {
            source,
            range,
            since,
            effort,
            stored,
            cached,
            stage,
            is_prefetch_in_flight,
            done,
        };
        self.flights.insert(id, flight);
        self.refresh(key);
        id
    }

    /// Changes a queued prefetch to `Priority::Demand`. Its time limit begins at `now`. Returns whether the fetch was a
    /// queued prefetch.
    pub(super) fn promote(&mut self, id: u64, now: Instant) -> bool {
        let Some(flight) = self.flights.get_mut(&id) else {
            return false;
        };
        flight.effort = flight.effort.awaited();
        if let FlightStage::Queued(priority @ Priority::Prefetch, _) = &mut flight.stage {
            *priority = Priority::Demand;
            flight.since = now;
            let key = SourceKey::of(&flight.source);
            let of_source = self.sources.entry(key).or_default();
            of_source.queued[Priority::Prefetch as usize].remove(&id);
            of_source.queued[Priority::Demand as usize].insert(id);
            self.refresh(key);
            return true;
        }
        false
    }

    /// Limits the bytes that prefetches have in flight to `wanted`, the number of bytes that the server needs in
    /// flight. `None` means no limit.
    pub(super) fn limit_prefetches(&mut self, wanted: Option<u64>) {
        self.prefetch_bytes_max = wanted.map_or(u64::MAX, |wanted| wanted.max(PREFETCH_MAX_MIN));
    }

    /// The fetch to send next.
    fn next(&self) -> Option<u64> {
        let [demands, prefetches] = &self.ready;
        if !self.stuck.has_room() {
            return None;
        }
        if !self.sent.has_room() {
            let is_spared = |id: &&u64| {
                let flight = self.flights.get(id);
                flight.is_some_and(|f| self.sent.held(&SourceKey::of(&f.source)) < SPARE_OF_ONE)
            };
            let has_room = self.has_spare && self.sent.total() < SENT_MAX as u64 + SPARE;
            return if has_room { demands.iter().find(is_spared).copied() } else { None };
        }
        let may_prefetch =
            self.prefetches < SENT_MAX_OF_ONE || self.prefetch_bytes < self.prefetch_bytes_max;
        demands.first().or_else(|| prefetches.first().filter(|_| may_prefetch)).copied()
    }

    /// Whether `pick` would return a fetch.
    pub(super) fn has_work(&self) -> bool {
        self.next().is_some()
    }

    /// Returns the read to send next, and counts it as in flight.
    pub(super) fn pick(&mut self, now: Instant) -> Option<ReadJob> {
        let id = self.next()?;
        let flight = self.flights.get_mut(&id)?;
        let (source, range, cached) = (flight.source.clone(), flight.range.clone(), flight.cached);
        let stored = flight.stored;
        let (key, priority) = match &flight.stage {
            FlightStage::Queued(priority, _) => (SourceKey::of(&source), *priority),
            FlightStage::Sent(_) => return None,
        };
        if priority == Priority::Prefetch {
            flight.since = now;
            flight.is_prefetch_in_flight = true;
            self.prefetches += 1;
            self.prefetch_bytes += range.end - range.start;
        }
        let since = flight.since;
        let of_source = self.sources.entry(key).or_default();
        of_source.queued[priority as usize].remove(&id);
        self.sent.take(key, 1);
        let sent = match &flight.stage {
            FlightStage::Queued(_, target) => FlightStage::Sent(target.reserved()),
            FlightStage::Sent(_) => return None,
        };
        let FlightStage::Queued(_, target) = std::mem::replace(&mut flight.stage, sent) else {
            return None;
        };
        self.refresh(key);
        Some(ReadJob { id, source, range, since, stored, target, cached })
    }

    /// Whether the answer to the fetch has `Effort::Long`.
    pub(super) fn is_long(&self, id: u64) -> bool {
        self.flights.get(&id).is_some_and(|flight| flight.effort == Effort::Long)
    }

    /// Removes a fetch whose read has completed. `None` if there is no fetch with this number.
    pub(super) fn finish(&mut self, id: u64) -> Option<FinishedFetch> {
        self.end_prefetch(id);
        let flight = self.flights.remove(&id)?;
        let key = SourceKey::of(&flight.source);
        self.sent.give_back(&key, 1);
        if flight.done.is_none() {
            self.stuck.give_back(&key, 1);
        }
        self.refresh(key);
        Some(flight.done.map_or(FinishedFetch::Late(flight.source), FinishedFetch::Unanswered))
    }

    /// Returns the fetches whose time limit `timeout` has passed. Fetches in flight remain in the queue as stuck
    /// fetches, and their memory no longer counts.
    pub(super) fn expire(&mut self, now: Instant, timeout: Duration) -> Vec<Failed> {
        let overdue = |flight: &Flight| now.duration_since(flight.since) >= timeout;
        let unanswered = self.flights.iter().filter(|(_, flight)| flight.done.is_some());
        let ids: Vec<u64> =
            unanswered.filter(|(_, flight)| overdue(flight)).map(|(id, _)| *id).collect();
        ids.into_iter().filter_map(|id| self.give_up(id)).collect()
    }

    /// Returns all fetches that were not answered yet. Fetches in flight remain in the queue as stuck fetches.
    pub(super) fn fail_all(&mut self) -> Vec<Failed> {
        let ids: Vec<u64> = self.flights.keys().copied().collect();
        ids.into_iter().filter_map(|id| self.give_up(id)).collect()
    }

    /// Returns and removes the fetches that were not sent yet.
    pub(super) fn fail_queued(&mut self) -> Vec<Failed> {
        let queued = |flight: &Flight| matches!(flight.stage, FlightStage::Queued(..));
        let ids: Vec<u64> =
            self.flights.iter().filter(|(_, f)| queued(f)).map(|(id, _)| *id).collect();
        ids.into_iter().filter_map(|id| self.give_up(id)).collect()
    }

    /// Subtracts a fetch that has completed or is overdue from the prefetches in flight, if it is one of them.
    fn end_prefetch(&mut self, id: u64) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        if std::mem::take(&mut flight.is_prefetch_in_flight) {
            self.prefetches -= 1;
            self.prefetch_bytes -= flight.range.end - flight.range.start;
        }
    }

    fn give_up(&mut self, id: u64) -> Option<Failed> {
        self.end_prefetch(id);
        let flight = self.flights.get_mut(&id)?;
        let done = flight.done.take()?;
        let (source, offset) = (flight.source.clone(), flight.range.start);
        let key = SourceKey::of(&source);
        match &flight.stage {
            FlightStage::Sent(reserved) => {
                reserved.leak();
                self.stuck.take(key, 1);
            }
            FlightStage::Queued(priority, _) => {
                let of_source = self.sources.entry(key).or_default();
                of_source.queued[*priority as usize].remove(&id);
                self.flights.remove(&id);
            }
        }
        self.refresh(key);
        Some(Failed { source, offset, done })
    }

    /// Earliest start of the time limit of an unanswered fetch.
    pub(super) fn oldest(&self) -> Option<Instant> {
        let unanswered = self.flights.values().filter(|flight| flight.done.is_some());
        unanswered.map(|flight| flight.since).min()
    }

    /// Number of queued fetches.
    pub(super) fn queued(&self) -> usize {
        self.flights.len() - self.sent.total() as usize
    }

    /// Number of fetches in flight in the kernel, without stuck fetches.
    pub(super) fn in_flight(&self) -> usize {
        (self.sent.total() - self.stuck.total()) as usize
    }

    /// Number of stuck fetches: they were answered with an error, but the kernel has not completed their reads.
    pub(super) fn stuck(&self) -> usize {
        self.stuck.total() as usize
    }

    /// Updates the entries of a source in `ready`. Must be called after each change of the source's fetches.
    fn refresh(&mut self, key: SourceKey) {
        let Some(of_source) = self.sources.get_mut(&key) else {
            return;
        };
        // Only the limits of this source are checked here. The limits of the device change without a call of
        // `refresh`.
        let may_send = self.sent.has_share_for(&key) && self.stuck.has_share_for(&key);
        for priority in 0..self.ready.len() {
            let first = of_source.queued[priority].first().copied().filter(|_| may_send);
            let before = std::mem::replace(&mut of_source.ready[priority], first);
            if before != first {
                if let Some(before) = before {
                    self.ready[priority].remove(&before);
                }
                self.ready[priority].extend(first);
            }
        }
        if of_source.queued.iter().all(BTreeSet::is_empty) {
            self.sources.remove(&key);
        }
    }
}
