//! The bench's view of its child processes. Each child has a time limit, and no child runs longer
//! than the bench.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::Value;
use tensorfs::internal::error::shown_path;

use super::args::Pattern;
use super::{job, python};
use crate::cli::stopping::is_stopped;

/// Interval between checks of whether a signal has told the bench to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Time limit for a killed child to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a job has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// A signal has told the bench to stop.
    Stopped,
    /// The job cannot be done on this machine, for this reason.
    Skip(String),
    /// The job failed, for this reason.
    Failed(String),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Trouble::Failed(error.to_string())
    }
}

/// Fails if a signal has told the bench to stop.
pub(super) fn check_stopped() -> Result<(), Trouble> {
    if is_stopped() { Err(Trouble::Stopped) } else { Ok(()) }
}

/// A child that does a job.
#[derive(Debug)]
pub(super) struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    deadline: Instant,
    limit: Duration,
}

/// Starts this program as the child process for `job`, with `words` as its arguments.
pub(super) fn start(job: &str, words: &[&OsStr], limit: Duration) -> Result<Worker, Trouble> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0("tensorfs").arg("bench").args(words).env(job::JOB, job);
    Worker::spawn(command, limit)
}

/// Runs `job` until it ends, and returns its result.
pub(super) fn run(job: &str, words: &[&OsStr], limit: Duration) -> Result<Value, Trouble> {
    start(job, words, limit)?.outcome()
}

/// Starts a reader of `path` and waits until it is ready. `beside` is a folder with the other files
/// of the checkpoint.
pub(super) fn reader(
    pattern: Pattern,
    path: &Path,
    beside: &Path,
    seed: u32,
    limit: Duration,
) -> Result<Worker, Trouble> {
    let mut worker = if let Some(command) = python::command(pattern, path, beside) {
        let cannot = || format!("cannot run {}", shown_path(python::interpreter().as_ref()));
        Worker::spawn(command, limit).map_err(|_| Trouble::Skip(cannot()))?
    } else {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg0("tensorfs").arg("bench").arg("--").arg(path);
        command.env(job::JOB, pattern.as_str()).env(job::SEED, seed.to_string());
        Worker::spawn(command, limit)?
    };
    match worker.line()?.as_str() {
        job::READY => Ok(worker),
        other => Err(judge(other).err().unwrap_or_else(|| {
            Trouble::Failed(format!("the reader said {other} instead of {}", job::READY))
        })),
    }
}

/// Reads all of `path`, so that it is in the page cache.
pub(super) fn warm(path: &Path, limit: Duration) -> Result<(), Trouble> {
    reader(Pattern::Read, path, path, 0, limit)?.go().map(drop)
}

impl Worker {
    fn spawn(mut command: Command, limit: Duration) -> Result<Worker, Trouble> {
        // The child gets its own process group, so that only the bench receives Ctrl-C.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.process_group(0).spawn()?;
        let input = child.stdin.take();
        let (send, lines) = std::sync::mpsc::channel();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                let lines = BufReader::new(output).lines().map_while(Result::ok);
                lines.for_each(|line| drop(send.send(line)));
            });
        }
        Ok(Worker { child, input, lines, deadline: Instant::now() + limit, limit })
    }

    /// Lets a reader begin and waits for its result.
    pub(super) fn go(mut self) -> Result<Value, Trouble> {
        self.deadline = Instant::now() + self.limit;
        if let Some(input) = &mut self.input {
            input.write_all(b"go\n")?;
        }
        self.outcome()
    }

    fn outcome(mut self) -> Result<Value, Trouble> {
        judge(&self.line()?)
    }

    fn line(&mut self) -> Result<String, Trouble> {
        loop {
            check_stopped()?;
            match self.lines.recv_timeout(POLL_INTERVAL) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Timeout) if Instant::now() > self.deadline => {
                    let seconds = self.limit.as_secs();
                    return Err(Trouble::Failed(format!("not done after {seconds} s; killed")));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let ended = wait(&mut self.child, KILL_TIMEOUT)?;
                    let how = ended.map_or("closed its output".to_owned(), |e| e.to_string());
                    return Err(Trouble::Failed(format!("the reader ended: {how}")));
                }
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        // A child that hangs in the kernel ends only once the mount is gone.
        let _ = wait(&mut self.child, KILL_TIMEOUT);
    }
}

/// The result in a line that a child has printed.
fn judge(line: &str) -> Result<Value, Trouble> {
    let said = |value: &Value, key: &str| value[key].as_str().map(str::to_owned);
    match serde_json::from_str::<Value>(line) {
        Err(_) => Err(Trouble::Failed(format!("the reader said {line}"))),
        Ok(value) => match (said(&value, "skip"), said(&value, "error")) {
            (Some(reason), _) => Err(Trouble::Skip(reason)),
            (_, Some(reason)) => Err(Trouble::Failed(reason)),
            _ => Ok(value),
        },
    }
}

/// Waits until `child` ends, at most for `limit`.
pub(super) fn wait(
    child: &mut Child,
    limit: Duration,
) -> io::Result<Option<std::process::ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        let ended = child.try_wait()?;
        if ended.is_some() || Instant::now() > deadline {
            return Ok(ended);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
