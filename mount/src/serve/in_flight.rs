//! The requests of the kernel that are not answered yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time between two checks of requests that other threads answer.
const TICK: Duration = Duration::from_micros(500);

/// Counts the requests that are not answered yet.
#[derive(Clone, Default)]
pub(crate) struct InFlight(Arc<InFlightCounts>);

#[derive(Default)]
struct InFlightCounts {
    /// Number of unanswered requests that began in even periods, and number of unanswered requests
    /// that began in odd periods.
    unanswered: [AtomicUsize; 2],
    /// Number of the current period.
    period: AtomicUsize,
}

/// One request that is not answered yet. Its drop counts as the answer.
pub(crate) struct Unanswered {
    counts: Arc<InFlightCounts>,
    /// Index of the counter that includes this request.
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
            // If the period changed in between, a wait for the requests of earlier periods might
            // miss this request.
            if counts.period.load(Ordering::SeqCst) == period {
                return begun;
            }
        }
    }

    /// Waits until all requests are answered, at most for `limit`. Returns whether they are.
    pub(crate) fn wait_for_all(&self, limit: Duration) -> bool {
        let counts = &self.0.unanswered;
        wait_until(limit, || counts.iter().all(|count| count.load(Ordering::SeqCst) == 0))
    }

    /// Waits until all requests are answered that began before this call, at most for `limit`.
    /// Returns whether they are. New requests may begin in the meantime.
    pub(crate) fn wait_for_earlier(&self, limit: Duration) -> bool {
        let started = Instant::now();
        // Both counters may include requests that began before this call.
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
                // At each moment one request is unanswered, as it is while programs read.
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
