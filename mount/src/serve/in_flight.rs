//! The requests of the kernel that are not answered yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time between two looks at requests that others answer.
const TICK: Duration = Duration::from_micros(500);

/// Counts the requests that are not answered yet.
#[derive(Clone, Default)]
pub(crate) struct InFlight(Arc<InFlightCounts>);

#[derive(Default)]
struct InFlightCounts {
    /// Requests that began in even and in odd periods.
    unanswered: [AtomicUsize; 2],
    /// Number of the present period.
    period: AtomicUsize,
}

/// One request that is not answered yet, until this is dropped.
pub(crate) struct Unanswered {
    counts: Arc<InFlightCounts>,
    /// Index of the count that has it.
    index: usize,
}

impl InFlight {
    /// Counts one more request.
    pub(crate) fn begin(&self) -> Unanswered {
        let counts = self.0.clone();
        loop {
            let period = counts.period.load(Ordering::SeqCst);
            let index = period % 2;
            counts.unanswered[index].fetch_add(1, Ordering::SeqCst);
            let begun = Unanswered { counts: counts.clone(), index };
            // Otherwise it might be missed by the wait for the requests of an earlier period.
            if counts.period.load(Ordering::SeqCst) == period {
                return begun;
            }
        }
    }

    /// Waits until no request is without an answer, for `limit` at most. Returns whether none is.
    pub(crate) fn wait_for_all(&self, limit: Duration) -> bool {
        let counts = &self.0.unanswered;
        wait_until(limit, || counts.iter().all(|count| count.load(Ordering::SeqCst) == 0))
    }

    /// Waits until the requests are answered that have begun before, for `limit` at most. Returns
    /// whether they are. Others may begin meanwhile.
    pub(crate) fn wait_for_earlier(&self, limit: Duration) -> bool {
        let started = Instant::now();
        // Each count has requests that began before.
        (0..2).all(|_| {
            let ended = &self.0.unanswered[self.0.period.fetch_add(1, Ordering::SeqCst) % 2];
            let limit = limit.saturating_sub(started.elapsed());
            wait_until(limit, || ended.load(Ordering::SeqCst) == 0)
        })
    }
}

fn wait_until(limit: Duration, condition: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    while !condition() {
        if started.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(TICK);
    }
    true
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.counts.unanswered[self.index].fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_requests_do_not_hold_up_a_wait_for_the_earlier_ones() {
        let in_flight = InFlight::default();
        assert!(in_flight.wait_for_earlier(Duration::ZERO));
        for _ in 0..3 {
            let earlier = in_flight.begin();
            assert!(!in_flight.wait_for_earlier(Duration::from_millis(1)));
            let waiting = in_flight.clone();
            let wait = std::thread::spawn(move || waiting.wait_for_earlier(Duration::MAX));
            let mut last = in_flight.begin();
            drop(earlier);
            while !wait.is_finished() {
                // There is always one, as while programs read.
                let next = in_flight.begin();
                drop(std::mem::replace(&mut last, next));
            }
            assert!(wait.join().unwrap());
            assert!(!in_flight.wait_for_all(Duration::ZERO));
            drop(last);
            assert!(in_flight.wait_for_all(Duration::ZERO));
        }
    }
}
