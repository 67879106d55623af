//! The last value of a query that a file system may never answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorfs::internal::sync::{Condvar, Mutex};

/// A query that runs on its own thread.
pub(super) struct Latest<T> {
    state: Mutex<State<T>>,
    answered: Condvar,
}

struct State<T> {
    value: Option<T>,
    /// Whether a query is running.
    asking: bool,
    /// Whether the running query has exceeded the time limit of a caller.
    late: bool,
}

impl<T: Copy + Send + 'static> Latest<T> {
    /// A query that has no value yet.
    pub(super) fn new() -> Arc<Latest<T>> {
        let state = Mutex::new(State { value: None, asking: false, late: false });
        Arc::new(Latest { state, answered: Condvar::new() })
    }

    /// The value of `ask`, or the last one if it does not come within `limit`. Also returns whether
    /// it came. While a query is late, calls neither start another nor wait.
    pub(super) fn get(
        self: &Arc<Self>,
        limit: Duration,
        ask: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> (Option<T>, bool) {
        let mut state = self.state.lock();
        if !state.asking {
            let latest = self.clone();
            let answer = move || {
                let value = ask();
                let mut state = latest.state.lock();
                *state = State { value, asking: false, late: false };
                latest.answered.notify_all();
            };
            let thread = std::thread::Builder::new().name("usage".to_owned());
            state.asking = thread.spawn(answer).is_ok();
        }
        let deadline = Instant::now() + limit;
        while state.asking && !state.late {
            let left = deadline.saturating_duration_since(Instant::now());
            state.late = left.is_zero();
            state = self.answered.wait_timeout(state, left);
        }
        (state.value, !state.asking)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_without_an_answer_is_asked_once_and_the_last_answer_stands() {
        let latest = Latest::new();
        let long = Duration::from_secs(30);
        assert_eq!(latest.get(long, || Some(1)), (Some(1), true));
        let held = Arc::new(Mutex::new(()));
        let guard = held.lock();
        let stalls = held.clone();
        let ask = move || {
            drop(stalls.lock());
            Some(2)
        };
        assert_eq!(latest.get(Duration::from_millis(10), ask), (Some(1), false));
        for _ in 0..10 {
            assert_eq!(latest.get(long, || unreachable!()), (Some(1), false));
        }
        drop(guard);
        let started = Instant::now();
        while latest.state.lock().asking {
            assert!(started.elapsed() < long);
            std::thread::yield_now();
        }
        assert_eq!(latest.get(long, || Some(3)), (Some(3), true));
    }
}
