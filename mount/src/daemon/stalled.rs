//! Time limits for work at the start of a mount, whose file systems may never answer.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::signal::{SigSet, SigmaskHow};
use tensorfs::internal::format::names::is_weights;

/// Arguments that make a process the probe of the path that comes after them.
const PROBE: [&str; 3] = ["internal", "probe-path", "--"];

/// Most files that a probe reads from.
const PROBED_MAX: usize = 64;

/// Stack size of the worker thread, as for the first thread of a process.
const STACK: usize = 8 << 20;

/// Least CPU time that counts as progress, in microseconds: the error of the two readings is
/// smaller.
const CPU_MIN: i64 = 1000;

/// Runs `work` on its own thread and returns its result. Without `limit` it waits for ever.
///
/// A file system that is slow but keeps answering is no error.
///
/// # Errors
/// Part of a sentence with the reason: for as long as `limit` no other thread of this process ran,
/// so each waits for an answer. The thread is then left running.
pub(crate) fn unless_stalled<T: Send + 'static>(
    limit: Option<Duration>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let (send, receive) = channel();
    let thread = std::thread::Builder::new().name("start".to_owned()).stack_size(STACK);
    // The thread may be left behind, and must not receive the signals that end the mount.
    let blocked = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
    let thread = thread.spawn(move || drop(send.send(work())));
    let _ = blocked.map(|before| before.thread_set_mask());
    let thread = thread.map_err(|e| format!("cannot start a thread: {e}"))?;
    let tick = limit.map_or(Duration::MAX, |limit| limit / 20);
    let mut idle = Duration::ZERO;
    let mut before = Activity::of_others();
    loop {
        match receive.recv_timeout(tick) {
            Ok(done) => {
                let _ = thread.join();
                return Ok(done);
            }
            Err(RecvTimeoutError::Disconnected) => return Err("failed by a bug".to_owned()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let now = Activity::of_others();
        if now.is_progress_since(&before) {
            (before, idle) = (now, Duration::ZERO);
            continue;
        }
        // Ticks, not a clock: time in which the process was stopped does not count.
        idle += tick;
        if let Some(limit) = limit.filter(|limit| idle >= *limit) {
            return Err(no_answer(limit));
        }
    }
}

fn no_answer(limit: Duration) -> String {
    format!("no answer within {} seconds (io-timeout=)", limit.as_secs_f64())
}

/// Probes `path`, a file or folder that need not exist, from another process, because a process
/// cannot end while one of its threads waits for a file system. Fails only if there is no answer.
///
/// # Errors
/// Part of a sentence: an answer took longer than `limit`.
pub(crate) fn probe_path(path: &Path, limit: Option<Duration>) -> Result<(), String> {
    let mut command = Command::new("/proc/self/exe");
    let command = command.arg0("tensorfs").args(PROBE).arg(path);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let failed = |e: io::Error| format!("cannot be accessed: {e}");
    let mut probe = command.spawn().map_err(failed)?;
    let Some(mut answers) = probe.stdout.take() else { return Ok(()) };
    let timeout = limit.map_or(Ok(PollTimeout::NONE), PollTimeout::try_from);
    let timeout = timeout.unwrap_or(PollTimeout::MAX);
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

/// The work of the probe: looks at `probed`, and writes a byte after each answer. It does so for each
/// entry of a folder, because a long folder takes many answers.
pub(crate) fn answer_probe(probed: &Path) {
    let answered = || drop(io::stdout().write_all(b".").and_then(|()| io::stdout().flush()));
    let read_from = |path: &Path| {
        // Opening a FIFO of such a name would block.
        if path.is_file() {
            answered();
            let _ = File::open(path).and_then(|mut file| file.read(&mut [0]));
            answered();
        }
    };
    read_from(probed);
    answered();
    let entries = std::fs::read_dir(probed).into_iter().inspect(|_| answered()).flatten();
    let entries = entries.inspect(|_| answered()).filter_map(Result::ok);
    let weights = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_weights));
    weights.take(PROBED_MAX).for_each(|entry| read_from(&entry.path()));
}

/// Activity of all threads of this process except the calling one.
struct Activity {
    /// Number of times that one of them began to wait.
    waits: i64,
    /// CPU time in microseconds.
    cpu: i64,
}

impl Activity {
    fn of_others() -> Activity {
        let waits = |usage: &Usage| usage.voluntary_context_switches();
        let cpu = |usage: &Usage| {
            let (user, system) = (usage.user_time(), usage.system_time());
            (user.tv_sec() + system.tv_sec()) * 1_000_000 + user.tv_usec() + system.tv_usec()
        };
        let all = getrusage(UsageWho::RUSAGE_SELF);
        let own = getrusage(UsageWho::RUSAGE_THREAD);
        let (Ok(all), Ok(own)) = (all, own) else { return Activity { waits: 0, cpu: 0 } };
        Activity { waits: waits(&all) - waits(&own), cpu: cpu(&all) - cpu(&own) }
    }

    fn is_progress_since(&self, before: &Activity) -> bool {
        self.waits != before.waits || (self.cpu - before.cpu).abs() >= CPU_MIN
    }
}
