//! Numbered jobs on several threads, with their results in order on one.

use std::sync::mpsc::{Sender, channel};

use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex};

/// The numbers that may be begun.
struct Gate {
    state: Mutex<WindowTurns>,
    moved: Condvar,
    count: u64,
    /// Most jobs that are begun and whose results are not taken.
    ahead: u64,
}

#[derive(Default)]
struct WindowTurns {
    next: u64,
    taken: u64,
    stopped: bool,
}

impl Gate {
    /// The next number, once it may be begun; `None` after the last one and after a stop.
    fn next(&self) -> Option<u64> {
        let mut state = self.state.lock();
        loop {
            if state.stopped || state.next == self.count {
                return None;
            }
            if state.next < state.taken + self.ahead {
                state.next += 1;
                return Some(state.next - 1);
            }
            state = self.moved.wait(state);
        }
    }

    fn take(&self) {
        self.state.lock().taken += 1;
        self.moved.notify_all();
    }

    fn stop(&self) {
        self.state.lock().stopped = true;
        self.moved.notify_all();
    }
}

/// Stops the others when a thread ends, also by a panic.
struct StopAtEnd<'a>(&'a Gate, bool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        if self.1 || std::thread::panicking() {
            self.0.stop();
        }
    }
}

/// Calls `work` with every number below `count`, on as many threads as `threads` says, and `each`
/// with the results in order, on the calling thread. At most `ahead` results exist at a time.
///
/// # Errors
/// The error of the lowest number that failed, or the error of `each`. The other threads end first.
pub(super) fn in_parallel<T: Send>(
    count: u64,
    threads: usize,
    ahead: u64,
    work: &(dyn Fn(u64) -> Result<T> + Sync),
    each: &mut dyn FnMut(T) -> Result<()>,
) -> Result<()> {
    let gate = Gate { state: Mutex::default(), moved: Condvar::new(), count, ahead: ahead.max(1) };
    let (sender, results) = channel();
    std::thread::scope(|scope| {
        // An error or a panic of `each` ends the threads as well.
        let _stop = StopAtEnd(&gate, true);
        let threads = (threads as u64).min(count).max(1);
        let mut started = 0;
        let mut refused = None;
        for _ in 0..threads {
            let (gate, sender) = (&gate, sender.clone());
            let run = move || carry_out(gate, work, &sender);
            match std::thread::Builder::new().name("copy".to_owned()).spawn_scoped(scope, run) {
                Ok(_) => started += 1,
                Err(e) => refused = Some(e),
            }
        }
        drop(sender);
        if let Some(e) = refused.filter(|_| started == 0) {
            return Err(Error::internal(format!("cannot start a thread: {e}")));
        }
        let mut early = std::collections::BTreeMap::new();
        let mut wanted = 0;
        while wanted < count {
            let Ok((number, result)) = results.recv() else {
                return Err(lowest_error(early));
            };
            early.insert(number, result);
            while let Some(result) = early.remove(&wanted) {
                each(result?)?;
                wanted += 1;
                gate.take();
            }
        }
        Ok(())
    })
}

/// The error of the lowest number, after all threads have ended early.
fn lowest_error<T>(results: std::collections::BTreeMap<u64, Result<T>>) -> Error {
    let error = results.into_values().find_map(Result::err);
    error.unwrap_or_else(|| Error::internal("a thread of the copy ended without a result"))
}

fn carry_out<T>(
    gate: &Gate,
    work: &(dyn Fn(u64) -> Result<T> + Sync),
    results: &Sender<(u64, Result<T>)>,
) {
    let mut stop = StopAtEnd(gate, false);
    while let Some(number) = gate.next() {
        let result = work(number);
        stop.1 = result.is_err();
        if results.send((number, result)).is_err() || stop.1 {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn results_come_in_order_and_only_as_many_as_allowed_exist() {
        let begun = AtomicU64::new(0);
        let mut seen = Vec::new();
        let work = |number: u64| {
            begun.fetch_add(1, Ordering::SeqCst);
            if number.is_multiple_of(3) {
                std::thread::yield_now();
            }
            Ok(number)
        };
        in_parallel(500, 5, 7, &work, &mut |number| {
            assert!(begun.load(Ordering::SeqCst) <= seen.len() as u64 + 7);
            seen.push(number);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, (0..500).collect::<Vec<_>>());
        in_parallel(0, 5, 7, &work, &mut |_| panic!("no job")).unwrap();
    }

    #[test]
    fn a_failed_job_or_a_failed_receiver_ends_all_threads_with_its_error() {
        let work = |number: u64| if number < 20 { Ok(()) } else { Err(Error::usage("20")) };
        let failed = in_parallel(1 << 40, 4, 8, &work, &mut |()| Ok(())).unwrap_err();
        assert_eq!(failed.to_string(), "20");
        let mut left = 5;
        let failed = in_parallel(1 << 40, 4, 8, &|_| Ok(()), &mut |()| {
            left -= 1;
            if left == 0 { Err(Error::cancelled("enough")) } else { Ok(()) }
        });
        assert_eq!(failed.unwrap_err().to_string(), "enough");
    }

    #[test]
    fn a_panic_of_a_job_reaches_the_caller() {
        let work = |number: u64| -> Result<()> {
            assert!(number != 3, "as the test wants it");
            Ok(())
        };
        let caught =
            std::panic::catch_unwind(|| in_parallel(1 << 40, 2, 4, &work, &mut |()| Ok(())));
        assert!(caught.is_err());
    }
}
