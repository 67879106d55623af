//! Threads for the file work of a cache. If the disk stops answering, these threads hang instead of the readers.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

/// Maximum number of threads of one folder.
pub(super) const THREADS_MAX: usize = 16;

/// Idle time after which a thread ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// If a job in the folder takes longer than this, the disk of the folder may have stopped answering, and reads continue
/// without the cache. A read also waits at most half of the time up to its deadline.
pub(super) const STUCK: Duration = Duration::from_secs(10);

/// Maximum wait of a read without a deadline, for example the read of a header. It is bounded because the caller that
/// needs the header may have a deadline.
const WAIT_WITHOUT_DEADLINE: Duration = Duration::from_secs(5);

/// The time that a reader waits for work in the folder, and for blocks that another reader fetches.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskPatience {
    /// If an earlier job runs longer than this, the reader does not use the folder.
    pub(super) whole: Duration,
    /// Time at which the reader stops waiting, whatever the number of its jobs.
    end: Instant,
}

impl DiskPatience {
    /// The patience of a read that begins now and has the deadline `until`.
    pub(super) fn of(until: Option<Instant>) -> DiskPatience {
        let now = Instant::now();
        let half =
            until.map_or(WAIT_WITHOUT_DEADLINE, |until| until.saturating_duration_since(now) / 2);
        let whole = half.min(STUCK);
        DiskPatience { whole, end: now + whole }
    }

    /// Whether the reader waits no longer.
    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// The threads of one folder. The first of them starts with the first job.
#[derive(Default)]
pub(super) struct FolderThreads {
    work: Mutex<FolderWork>,
    added: Condvar,
}

#[derive(Default)]
struct FolderWork {
    next_number: u64,
    queued: VecDeque<(u64, Job)>,
    /// Start time of each running job, by job number.
    under_way: BTreeMap<u64, Instant>,
    threads: usize,
    idle: usize,
}

impl FolderWork {
    /// Whether a running job has taken longer than `patience`.
    fn is_stuck(&self, patience: Duration) -> bool {
        self.under_way.values().any(|began| began.elapsed() > patience)
    }
}

impl fmt::Debug for FolderThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FolderThreads({})", self.work.lock().threads)
    }
}

impl FolderThreads {
    /// Runs `work` on a thread and returns its result. `None` if the result does not arrive in time. If an earlier job
    /// is late already, `work` is not begun.
    pub(super) fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        patience: DiskPatience,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let left = patience.end.saturating_duration_since(Instant::now());
        if left.is_zero() || self.is_stuck(patience.whole) {
            return None;
        }
        let (send, answer) = sync_channel(1);
        let number = self.add(Box::new(move || drop(send.send(work()))))?;
        answer.recv_timeout(left).ok().or_else(|| {
            drop(self.take_back(number));
            answer.try_recv().ok()
        })
    }

    /// Queues `work` and does not wait for it.
    pub(super) fn post(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) {
        self.add(Box::new(work));
    }

    /// Whether a running job has taken longer than `patience`.
    pub(super) fn is_stuck(&self, patience: Duration) -> bool {
        self.work.lock().is_stuck(patience)
    }

    /// Queues `job` and returns its number. `None` if there is no thread and none can be started.
    fn add(self: &Arc<Self>, job: Job) -> Option<u64> {
        let mut work = self.work.lock();
        let number = work.next_number;
        work.next_number += 1;
        work.queued.push_back((number, job));
        if work.queued.len() <= work.idle || work.threads == THREADS_MAX {
            self.added.notify_one();
            return Some(number);
        }
        let threads = self.clone();
        let thread = std::thread::Builder::new().name("tensorfs-cache".to_owned());
        let started = thread.spawn(move || threads.carry_out());
        work.threads += usize::from(started.is_ok());
        if work.threads > 0 {
            return Some(number);
        }
        let refused = work.queued.pop_back();
        drop(work);
        drop(refused);
        None
    }

    /// Takes a job out of the queue. `None` if it has begun already.
    fn take_back(&self, number: u64) -> Option<Job> {
        let mut work = self.work.lock();
        let at = work.queued.iter().position(|(queued, _)| *queued == number)?;
        work.queued.remove(at).map(|(_, job)| job)
    }

    /// The loop of a thread: it runs jobs, and ends after `IDLE_MAX` without one.
    fn carry_out(&self) {
        let mut work = self.work.lock();
        loop {
            if let Some((number, job)) = work.queued.pop_front() {
                work.under_way.insert(number, Instant::now());
                drop(work);
                // If the job panics, its sender is dropped, and the waiting reader gets no result.
                let _ = catch_unwind(AssertUnwindSafe(job));
                work = self.work.lock();
                work.under_way.remove(&number);
                continue;
            }
            work.idle += 1;
            let since = Instant::now();
            work = self.added.wait_timeout(work, IDLE_MAX);
            work.idle -= 1;
            if work.queued.is_empty() && since.elapsed() >= IDLE_MAX {
                work.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn patience(whole: Duration) -> DiskPatience {
        DiskPatience { whole, end: Instant::now() + whole }
    }

    #[test]
    fn half_of_the_time_of_a_read_belongs_to_the_disk() {
        let hour = DiskPatience::of(Some(Instant::now() + Duration::from_secs(3600)));
        assert_eq!((hour.whole, DiskPatience::of(None).whole), (STUCK, WAIT_WITHOUT_DEADLINE));
        let short = DiskPatience::of(Some(Instant::now() + Duration::from_secs(4)));
        assert!(short.whole <= Duration::from_secs(2) && short.whole > Duration::ZERO);
        assert!(DiskPatience::of(Some(Instant::now())).whole.is_zero());
    }

    #[test]
    fn readers_of_stuck_threads_go_on_and_work_that_was_not_begun_never_is() {
        let threads = Arc::new(FolderThreads::default());
        let (release, stuck) = channel::<()>();
        let stuck = Arc::new(Mutex::new(stuck));
        let (begun, begins) = channel();
        for _ in 0..THREADS_MAX {
            let (stuck, begun) = (stuck.clone(), begun.clone());
            threads.post(move || {
                begun.send(()).unwrap();
                let _ = stuck.lock().recv();
            });
        }
        begins.iter().take(THREADS_MAX).for_each(drop);
        // All threads are busy. Since this reader has unlimited patience, no running job counts as late.
        let (count, counted) = channel();
        let late = patience(Duration::from_millis(20));
        let asked = DiskPatience { whole: Duration::MAX, ..late };
        assert_eq!(threads.ask(asked, move || count.send(())), None);
        assert!(threads.is_stuck(Duration::ZERO) && !threads.is_stuck(Duration::MAX));
        assert_eq!(threads.ask(late, || ()), None);
        drop(release);
        assert_eq!(threads.ask(patience(Duration::from_secs(3600)), || 7), Some(7));
        assert!(counted.recv().is_err(), "abandoned work was done");
        assert!(threads.work.lock().threads <= THREADS_MAX);
    }

    #[test]
    fn work_that_panics_answers_nobody_and_other_work_goes_on() {
        let threads = Arc::new(FolderThreads::default());
        let long = patience(Duration::from_secs(3600));
        assert_eq!(threads.ask(long, || panic!("as the test wants it")), None::<()>);
        assert_eq!(threads.ask(long, || 7), Some(7));
    }
}
