//! The last value of a query to a file system that may never answer.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use tensorfs::internal::asked::Asked;
use tensorfs::internal::sync::Mutex;

/// The last value of a query, which runs on a thread of its own.
pub(super) struct Latest<T>(Mutex<State<T>>);

struct State<T> {
    value: Option<T>,
    /// The query that runs now.
    asked: Option<Asked<Option<T>>>,
    /// Whether the running query has exceeded the time limit of a caller.
    late: bool,
}

impl<T> Default for Latest<T> {
    fn default() -> Latest<T> {
        Latest(Mutex::new(State { value: None, asked: None, late: false }))
    }
}

impl<T: Copy + Send + 'static> Latest<T> {
    /// The value of `ask` if `ask` returns within `limit`, and otherwise the last value. Also
    /// returns whether the value is new. While a query is late, calls neither start another query
    /// nor wait.
    pub(super) fn get(
        &self,
        limit: Duration,
        ask: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> (Option<T>, bool) {
        let mut state = self.0.lock();
        if state.late {
            state.wait(Duration::ZERO);
        }
        if state.asked.is_none() {
            state.asked = Asked::on_thread("usage", ask).ok();
            state.wait(limit);
        }
        (state.value, state.asked.is_none())
    }
}

impl<T: Send + 'static> State<T> {
    /// Waits for the answer of the query that runs.
    fn wait(&mut self, limit: Duration) {
        let Some(asked) = &mut self.asked else { return };
        let answer = asked.within(limit);
        self.late = matches!(answer, Err(RecvTimeoutError::Timeout));
        if !self.late {
            self.asked = None;
            self.value = answer.unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_question_without_an_answer_is_asked_once_and_the_last_answer_stands() {
        let latest = Latest::default();
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
        while latest.get(long, || Some(3)) != (Some(3), true) {
            assert!(started.elapsed() < long);
            std::thread::yield_now();
        }
    }
}
