//! Time limits for work on file systems that may never answer, at the start of a mount and in
//! commands.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow};
use tensorfs::internal::asked::Asked;
use tensorfs::internal::format::names::is_weights;

/// Number of files that a probe reads from.
pub(crate) const READ_MANY: usize = 64;
pub(crate) const READ_NONE: usize = 0;
pub(crate) const READ_ONE: usize = 1;

/// Interval between checks for the end of a process.
const PROCESS_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Number of threads that are waiting for something other than a source.
static ELSEWHERE: AtomicUsize = AtomicUsize::new(0);

/// Runs `work`, which may wait for something other than a source, such as a reader of standard output
/// or a disk that is written to. `unless_stalled` does not count this time.
pub(crate) fn elsewhere<T>(work: impl FnOnce() -> T) -> T {
    ELSEWHERE.fetch_add(1, Ordering::SeqCst);
    let done = work();
    ELSEWHERE.fetch_sub(1, Ordering::SeqCst);
    done
}

/// Runs `work` on a thread of its own and returns its result. Without `limit`, the wait has no end.
///
/// It is no error if a file system is slow but continues to answer.
///
/// # Errors
/// A clause with the reason. The error means that for the time `limit`, neither the thread of `work` nor any thread
/// started after it has run, so all of these threads wait for an answer. They continue to wait after the error.
pub(crate) fn unless_stalled<T: Send + 'static>(
    limit: Option<Duration>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    // The thread may remain after an error, so it must not receive the signals that end the mount.
    // The activity of threads that exist already is ignored, because they do other work, for
    // example answer the supervisor.
    let others = activity(&Activity::new());
    let blocked = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
    let started = Asked::on_thread("start", work);
    let _ = blocked.map(|before| before.thread_set_mask());
    let mut asked = started.map_err(|e| format!("cannot start a thread: {e}"))?;
    let tick = limit.map_or(Duration::MAX, |limit| limit / 20);
    let mut idle = Duration::ZERO;
    let mut before = activity(&others);
    loop {
        match asked.within(tick) {
            Ok(done) => return Ok(done),
            Err(RecvTimeoutError::Disconnected) => return Err("failed by a bug".to_owned()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let now = activity(&others);
        if now != before || ELSEWHERE.load(Ordering::SeqCst) > 0 {
            (before, idle) = (now, Duration::ZERO);
            continue;
        }
        // Ticks are counted instead of reading a clock, so that time in which the process was
        // stopped does not count.
        idle += tick;
        if let Some(limit) = limit.filter(|limit| idle >= *limit) {
            return Err(no_answer(limit));
        }
    }
}

fn no_answer(limit: Duration) -> String {
    format!("no answer within {} seconds (io-timeout=)", limit.as_secs_f64())
}

/// Probes `path`, a file or folder that may be missing, from another process, because a process
/// cannot end while one of its threads waits for a file system. In a folder, the first byte of up
/// to `reads` files is read too. Fails only if an answer does not come, or if the probe cannot run.
///
/// # Errors
/// A clause: an answer took longer than `limit`, or the probe could not run.
pub(crate) fn probe_path(path: &Path, reads: usize, limit: Option<Duration>) -> Result<(), String> {
    let mut command = Command::new("/proc/self/exe");
    let reads = format!("--reads={reads}");
    let words = ["internal", "probe-path", &reads, "--"];
    command
        .arg0("tensorfs")
        .args(words)
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let failed = |e: io::Error| format!("cannot be accessed: {e}");
    let mut probe = command.spawn().map_err(failed)?;
    let Some(mut answers) = probe.stdout.take() else { return Ok(()) };
    let timeout =
        limit.map_or(Ok(PollTimeout::NONE), PollTimeout::try_from).unwrap_or(PollTimeout::MAX);
    let mut answer = [0; 64];
    loop {
        let polled = poll(&mut [PollFd::new(answers.as_fd(), PollFlags::POLLIN)], timeout);
        if polled == Ok(0) {
            let _ = probe.kill();
            return Err(no_answer(limit.unwrap_or_default()));
        }
        match answers.read(&mut answer) {
            Ok(0) => return probe.wait().map(|_| ()).map_err(failed),
            Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(failed(e)),
            _ => {}
        }
    }
}

/// Runs `command` until it ends, and kills it at `deadline`. Returns its status and its output, which
/// must fit into a pipe. `None` if it was killed.
///
/// # Errors
/// If the program cannot be started.
pub(crate) fn run_until(mut command: Command, deadline: Instant) -> io::Result<Option<Output>> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            // If the process waits for a file system, it ends only once that file system answers.
            let _ = Asked::on_thread("reap", move || child.wait());
            return Ok(None);
        }
        std::thread::sleep(PROCESS_POLL_INTERVAL);
    }
    child.wait_with_output().map(Some)
}

/// The work of the probe: examines `probed`, and writes one byte after each answer of the file
/// system. For a folder, it writes a byte for each entry, because a long folder takes many answers.
pub(crate) fn answer_probe(probed: &Path, reads: usize) {
    let answered = || drop(io::stdout().write_all(b".").and_then(|()| io::stdout().flush()));
    let read_from = |path: &Path| {
        // The check avoids opening a FIFO with this name, which would block.
        if path.is_file() && reads > 0 {
            answered();
            let _ = File::open(path).and_then(|mut file| file.read(&mut [0]));
            answered();
        }
    };
    read_from(probed);
    answered();
    let entries = std::fs::read_dir(probed)
        .into_iter()
        .inspect(|_| answered())
        .flatten()
        .inspect(|_| answered())
        .filter_map(Result::ok);
    let weights = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_weights));
    weights.take(reads).for_each(|entry| read_from(&entry.path()));
}

/// The activity of each thread of a process: the number of times that it began to wait, and its CPU
/// time in user and system mode in clock ticks.
type Activity = BTreeMap<String, [u64; 3]>;

/// The activity of all threads of this process that are not in `others`.
fn activity(others: &Activity) -> Activity {
    let entries = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let threads = entries.filter_map(|thread| {
        let name = thread.file_name().into_string().ok()?;
        // The thread may have ended in the meantime.
        let read =
            |file: &str| std::fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        let (status, stat) = (read("status"), read("stat"));
        let waits = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        // The line has the name of the thread in parentheses, then the numbered fields.
        let numbered = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let mut fields = numbered.split_whitespace().skip(11);
        let words = [waits, fields.next(), fields.next()];
        let numbers = words.map(|word| word.and_then(|word| word.trim().parse().ok()).unwrap_or(0));
        Some((name, numbers))
    });
    threads.filter(|(name, _)| !others.contains_key(name)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(400);

    /// Runs `work` while another thread, which was started before, wakes up again and again.
    fn beside_a_busy_thread<T: Send + 'static>(
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let over = AtomicBool::new(false);
        let (begun, is_there) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begun.send(()).unwrap();
                while !over.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            is_there.recv().unwrap();
            let done = unless_stalled(Some(LIMIT), work);
            over.store(true, Ordering::Relaxed);
            done
        })
    }

    #[test]
    fn work_that_waits_for_ever_fails_although_other_threads_of_the_process_run() {
        let (held, wait) = channel::<()>();
        let started = Instant::now();
        let failed = beside_a_busy_thread(move || wait.recv());
        assert_eq!(failed.unwrap_err(), no_answer(LIMIT));
        assert!(started.elapsed() >= LIMIT);
        drop(held);
    }

    #[test]
    fn work_that_goes_on_in_threads_of_its_own_is_waited_for() {
        let work = || {
            let steps = || (0..60).for_each(|_| std::thread::sleep(LIMIT / 30));
            std::thread::spawn(steps).join().is_ok()
        };
        assert_eq!(beside_a_busy_thread(work), Ok(true));
    }
}
