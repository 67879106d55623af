//! The fetches of one device: which goes next, which are under way, which are overdue. It decides
//! and counts; its caller reads and calls back.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::limiter::{PerSourceLimiter, SourceKey};
use super::memory::{ReadTarget, ReservedBytes};
use super::{CachedPages, Effort, Fetch, FetchCallback, Priority};
use crate::source::Source;

/// Maximum number of reads of a device that the kernel has at a time, overdue ones included.
pub(super) const SENT_MAX: usize = 64;

/// A device with this many overdue reads gets no more: a source that does not answer keeps
/// no more threads and buffers.
pub(super) const STUCK_MAX: usize = SENT_MAX_OF_ONE;

/// Maximum number of reads of one source that the kernel has at a time, so that a stalled source
/// leaves room for others.
pub(super) const SENT_MAX_OF_ONE: usize = SENT_MAX / 2;

/// A source with this many overdue reads gets no more.
pub(super) const STUCK_MAX_OF_ONE: usize = 4;

/// A fetch for a backend to carry out.
pub(super) struct ReadJob {
    pub(super) id: u64,
    pub(super) source: Arc<Source>,
    pub(super) range: Range<u64>,
    /// The start of its deadline.
    pub(super) since: Instant,
    /// Whether encrypted bytes stay as they are stored.
    pub(super) stored: bool,
    pub(super) target: ReadTarget,
    pub(super) cached: Option<CachedPages>,
}

/// A fetch that is answered with an error.
pub(super) struct Failed {
    pub(super) source: Arc<Source>,
    pub(super) offset: u64,
    pub(super) done: FetchCallback,
}

/// A fetch that has left the kernel.
pub(super) enum FinishedFetch {
    /// Its answer is due.
    Unanswered(FetchCallback),
    /// It was answered before, because it was overdue; with its source.
    Late(Arc<Source>),
}

/// A fetch from its submission until it has left the kernel.
struct Flight {
    source: Arc<Source>,
    range: Range<u64>,
    /// The start of its deadline: when a reader asked for it. Until one does, when it was
    /// submitted, and then when it was sent.
    since: Instant,
    /// Cost of the answer, as far as is known: it may grow once a reader waits.
    effort: Effort,
    stored: bool,
    cached: Option<CachedPages>,
    stage: FlightStage,
    /// `None` if the fetch was answered before its read came back.
    done: Option<FetchCallback>,
}

enum FlightStage {
    Queued(Priority, ReadTarget),
    Sent(Arc<ReservedBytes>),
}

/// The fetches of one source.
#[derive(Default)]
struct OfSource {
    /// The fetches by priority.
    queued: [BTreeSet<u64>; 2],
    /// The one of them that is in `Queue::ready`, by priority.
    ready: [Option<u64>; 2],
}

/// All fetches of a device. Numbers are given in the order of submission.
pub(super) struct FetchQueue {
    next_id: u64,
    flights: BTreeMap<u64, Flight>,
    /// Those that were not sent; their flights keep the sources alive.
    sources: HashMap<SourceKey, OfSource>,
    /// The first fetch of each source that may send one, by priority.
    ready: [BTreeSet<u64>; 2],
    /// Fetches that the kernel has.
    sent: PerSourceLimiter<SourceKey>,
    /// Sent fetches that are overdue.
    stuck: PerSourceLimiter<SourceKey>,
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
        let flight = Flight { source, range, since: now, effort, stored, cached, stage, done };
        self.flights.insert(id, flight);
        self.refresh(key);
        id
    }

    /// Moves a queued prefetch to `Priority::Demand`; its time limit counts from `now`.
    pub(super) fn promote(&mut self, id: u64, now: Instant) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
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
        }
    }

    fn may_send(&self) -> bool {
        self.sent.has_room() && self.stuck.has_room()
    }

    /// Whether `pick` would return a fetch.
    pub(super) fn has_work(&self) -> bool {
        self.may_send() && self.ready.iter().any(|ready| !ready.is_empty())
    }

    /// Returns the fetch to send next, and counts it as sent.
    pub(super) fn pick(&mut self, now: Instant) -> Option<ReadJob> {
        if !self.may_send() {
            return None;
        }
        let id = *self.ready.iter().find_map(|ready| ready.first())?;
        let flight = self.flights.get_mut(&id)?;
        let (source, range, cached) = (flight.source.clone(), flight.range.clone(), flight.cached);
        let stored = flight.stored;
        let (key, priority) = match &flight.stage {
            FlightStage::Queued(priority, _) => (SourceKey::of(&source), *priority),
            FlightStage::Sent(_) => return None,
        };
        if priority == Priority::Prefetch {
            flight.since = now;
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

    /// Whether the answer to a fetch has `Effort::Long`.
    pub(super) fn is_long(&self, id: u64) -> bool {
        self.flights.get(&id).is_some_and(|flight| flight.effort == Effort::Long)
    }

    /// Removes a completed fetch; `None` if there is none with this number.
    pub(super) fn finish(&mut self, id: u64) -> Option<FinishedFetch> {
        let flight = self.flights.remove(&id)?;
        let key = SourceKey::of(&flight.source);
        self.sent.give_back(&key, 1);
        if flight.done.is_none() {
            self.stuck.give_back(&key, 1);
        }
        self.refresh(key);
        Some(flight.done.map_or(FinishedFetch::Late(flight.source), FinishedFetch::Unanswered))
    }

    /// Gives up the fetches whose time limit of `timeout` has passed. Sent ones stay as stuck
    /// fetches, and their memory no longer counts.
    pub(super) fn expire(&mut self, now: Instant, timeout: Duration) -> Vec<Failed> {
        let overdue = |flight: &Flight| now.duration_since(flight.since) >= timeout;
        let unanswered = self.flights.iter().filter(|(_, flight)| flight.done.is_some());
        let ids: Vec<u64> =
            unanswered.filter(|(_, flight)| overdue(flight)).map(|(id, _)| *id).collect();
        ids.into_iter().filter_map(|id| self.give_up(id)).collect()
    }

    /// All fetches that were not answered yet. Sent ones stay, as stuck ones.
    pub(super) fn fail_all(&mut self) -> Vec<Failed> {
        let ids: Vec<u64> = self.flights.keys().copied().collect();
        ids.into_iter().filter_map(|id| self.give_up(id)).collect()
    }

    /// Gives up the fetches that were not sent yet.
    pub(super) fn fail_queued(&mut self) -> Vec<Failed> {
        let queued = |flight: &Flight| matches!(flight.stage, FlightStage::Queued(..));
        let ids: Vec<u64> =
            self.flights.iter().filter(|(_, f)| queued(f)).map(|(id, _)| *id).collect();
        ids.into_iter().filter_map(|id| self.give_up(id)).collect()
    }

    fn give_up(&mut self, id: u64) -> Option<Failed> {
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

    /// Number of fetches that the kernel has, without the stuck ones.
    pub(super) fn in_flight(&self) -> usize {
        (self.sent.total() - self.stuck.total()) as usize
    }

    /// Number of stuck fetches: given up, but not returned by the kernel.
    pub(super) fn stuck(&self) -> usize {
        self.stuck.total() as usize
    }

    /// Updates the fetches of a source in `ready`, after any change of the source.
    fn refresh(&mut self, key: SourceKey) {
        let Some(of_source) = self.sources.get_mut(&key) else {
            return;
        };
        // Only the shares of this source: the room of the device changes without a refresh.
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
