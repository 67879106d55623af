//! Runs numbered jobs on several threads. The calling thread gets the results in order, or reports of their progress.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex};

/// Controls which job may begin next.
struct Gate {
    state: Mutex<WindowTurns>,
    moved: Condvar,
    count: u64,
    /// Maximum number of begun jobs whose results were not passed to the caller yet.
    ahead: u64,
}

#[derive(Default)]
struct WindowTurns {
    next: u64,
    taken: u64,
    stopped: bool,
}

impl Gate {
    /// Waits until the next job may begin, and returns its number. `None` after the last job and after a stop.
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

/// Stops the other threads when it is dropped. If the flag is not set, it stops them only if its thread panics.
struct StopAtEnd<'a>(&'a Gate, bool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        if self.1 || std::thread::panicking() {
            self.0.stop();
        }
    }
}

/// Calls `work` with each number below `count`, on at most `threads` threads. Calls `each` with the results in
/// order, on the calling thread. At most `ahead` results exist at the same time.
///
/// # Errors
/// The error of the lowest number that failed, or the error of `each`. All threads have ended before the error
/// is returned.
pub(crate) fn in_parallel<T: Send>(
    count: u64,
    threads: usize,
    ahead: u64,
    work: &(dyn Fn(u64) -> Result<T> + Sync),
    each: &mut dyn FnMut(T) -> Result<()>,
) -> Result<()> {
    let gate = Gate { state: Mutex::default(), moved: Condvar::new(), count, ahead: ahead.max(1) };
    let (sender, results) = channel();
    std::thread::scope(|scope| {
        // An error or a panic of `each` also stops the threads.
        let _stop = StopAtEnd(&gate, true);
        let threads = (threads as u64).min(count).max(1);
        let mut started = 0;
        let mut refused = None;
        for _ in 0..threads {
            let (gate, sender) = (&gate, sender.clone());
            let run = move || carry_out(gate, work, &sender);
            match std::thread::Builder::new()
                .name("tensorfs-job".to_owned())
                .spawn_scoped(scope, run)
            {
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

/// The error of the lowest number that failed, after all threads have ended early.
fn lowest_error<T>(results: std::collections::BTreeMap<u64, Result<T>>) -> Error {
    let error = results.into_values().find_map(Result::err);
    error.unwrap_or_else(|| Error::internal("a thread ended without a result"))
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

/// A report of the progress of a job, or its end.
enum JobEvent<T> {
    Bytes(u64),
    End(usize, Result<T>),
}

/// Reports the progress of a job to the thread that called `in_any_order`.
pub(crate) struct JobProgress<'a> {
    send: &'a dyn Fn(u64),
    is_stopped: &'a AtomicBool,
}

impl JobProgress<'_> {
    /// Reports that the job has processed another `bytes` bytes.
    ///
    /// # Errors
    /// If another job has failed, or the caller has stopped the work.
    pub(crate) fn add(&self, bytes: u64) -> Result<()> {
        (self.send)(bytes);
        if self.is_stopped.load(Ordering::Relaxed) {
            return Err(Error::cancelled("another part of the work ended it"));
        }
        Ok(())
    }
}

/// Calls `work` with each number below `count`, on at most `threads` threads. Calls `progress` with the numbers
/// of bytes that the jobs report, on the calling thread. Returns the results in the order of the numbers.
///
/// # Errors
/// The first error of a job or of `progress`. All threads have ended before the error is returned.
pub(crate) fn in_any_order<T: Send>(
    count: usize,
    threads: usize,
    work: &(dyn Fn(usize, &JobProgress<'_>) -> Result<T> + Sync),
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Vec<T>> {
    let (next, is_stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, events) = channel();
    let run = |sender: Sender<JobEvent<T>>| {
        let send = |bytes| drop(sender.send(JobEvent::Bytes(bytes)));
        let progress = JobProgress { send: &send, is_stopped: &is_stopped };
        while !is_stopped.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            drop(sender.send(JobEvent::End(number, work(number, &progress))));
        }
    };
    let mut results: Vec<Option<T>> = (0..count).map(|_| None).collect();
    let mut failed = None;
    std::thread::scope(|scope| {
        let mut refused = None;
        for _ in 0..threads.min(count) {
            let (run, sender) = (&run, sender.clone());
            let thread = std::thread::Builder::new().name("copy".to_owned());
            refused = thread.spawn_scoped(scope, move || run(sender)).err();
            if refused.is_some() {
                break;
            }
        }
        drop(sender);
        for event in &events {
            let outcome = match event {
                JobEvent::Bytes(bytes) => progress(bytes),
                JobEvent::End(number, result) => {
                    result.map(|result| results[number] = Some(result))
                }
            };
            if let Err(error) = outcome {
                // Errors after this one come from jobs that end because of it.
                is_stopped.store(true, Ordering::Relaxed);
                failed.get_or_insert(error);
            }
        }
        if let (Some(e), None) = (refused, &failed) {
            failed = results
                .iter()
                .any(Option::is_none)
                .then(|| Error::internal(format!("cannot start a thread: {e}")));
        }
    });
    match failed {
        Some(error) => Err(error),
        None => results
            .into_iter()
            .collect::<Option<_>>()
            .ok_or_else(|| Error::internal("a thread of the copy ended without a result")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn jobs_in_any_order_report_their_bytes_and_give_their_results_by_number() {
        let mut bytes = 0;
        let work = |number: usize, progress: &JobProgress<'_>| {
            progress.add(number as u64)?;
            progress.add(1)?;
            Ok(number * 2)
        };
        let mut count = |more| {
            bytes += more;
            Ok(())
        };
        let results = in_any_order(100, 3, &work, &mut count).unwrap();
        assert_eq!(results, (0..100).map(|number| number * 2).collect::<Vec<_>>());
        assert_eq!(bytes, 99 * 100 / 2 + 100);
        assert!(in_any_order(0, 3, &work, &mut |_| panic!("no job")).unwrap().is_empty());
    }

    #[test]
    fn the_first_error_of_a_job_or_of_the_progress_ends_all_jobs_in_any_order() {
        let endless = usize::MAX >> 40;
        let work = |number: usize, progress: &JobProgress<'_>| {
            if number == 20 { Err(Error::usage("20")) } else { progress.add(1) }
        };
        let failed = in_any_order(endless, 4, &work, &mut |_| Ok(())).unwrap_err();
        assert_eq!(failed.to_string(), "20");
        let work = |_: usize, progress: &JobProgress<'_>| loop {
            progress.add(1)?;
        };
        let mut enough = |_| Err(Error::cancelled("enough"));
        let failed = in_any_order::<()>(endless, 2, &work, &mut enough).unwrap_err();
        assert_eq!(failed.to_string(), "enough");
    }

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
