//! The targets of log lines: standard error until the daemon is in the background, then the system
//! log or a file.
//!
//! A command writes its lines itself. A daemon queues them for a thread: a blocked stream (a full
//! pipe, a stopped terminal, a stalled disk) must not block the threads that answer readers.

mod events;
mod journal;
mod line;
mod output;
mod queue;

use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tensorfs::internal::error::{shown, shown_path};

use tracing::Level;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use events::{Events, severity};
use line::Line;
use output::{Destination, Output};
use queue::Queue;

/// Environment variable with tracing directives.
const FILTER: &str = "TENSORFS_LOG";

/// Time limit for writing queued lines at the end of the process or before the stream changes.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The queue of a daemon; a command has none.
static QUEUE: OnceLock<Arc<Queue>> = OnceLock::new();

/// The mount point, for the lines that machines read.
static MOUNT: OnceLock<String> = OnceLock::new();

/// Whether only failures are written.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Whether lines are JSON.
static JSON: AtomicBool = AtomicBool::new(false);

/// Writes all further lines as JSON objects, one a line, or as text.
pub(crate) fn write_json(is_json: bool) {
    JSON.store(is_json, Ordering::Relaxed);
}

/// Names the mount that this process serves.
pub(crate) fn set_mount(target: &Path) {
    let _ = MOUNT.set(tensorfs::internal::error::real_name(target));
}

/// The mount that this process serves, as `set_mount` named it.
pub(crate) fn mount() -> Option<&'static str> {
    MOUNT.get().map(String::as_str)
}

/// Leaves out notes, and warnings on standard error.
pub(crate) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether `be_quiet` was called.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Crates whose log may have secrets: texts that are signed, answers with tokens, signed URLs.
const SILENT: [&str; 7] = [
    "reqsign_aws_core",
    "reqsign_aws_v4",
    "reqsign_azure_storage",
    "reqsign_core",
    "reqsign_google",
    "reqwest",
    "hyper",
];

/// Starts logging to standard error: warnings, more with each `verbose`, or what
/// `TENSORFS_LOG` says; errors only if this process is to be quiet.
pub(crate) fn start(verbose: u8) {
    let default = match verbose {
        _ if is_quiet() => "error",
        // fuser warns of requests that tensorfs does not implement.
        0 => "warn,fuser=error",
        1 => "info,fuser=warn",
        2 => "debug",
        _ => "trace",
    };
    let given = EnvFilter::try_from_env(FILTER).ok().filter(|_| !is_quiet());
    let chosen = given.unwrap_or_else(|| EnvFilter::new(default));
    let silent = SILENT.iter().filter_map(|name| format!("{name}=off").parse().ok());
    let filter = silent.fold(chosen, EnvFilter::add_directive);
    // A second call, as tests make, changes nothing.
    let _ = tracing_subscriber::registry().with(filter).with(Events).try_init();
}

/// Makes the log non-blocking for all threads: lines are queued, or dropped and counted if the
/// queue is full.
///
/// # Errors
/// If the thread that writes them cannot be started.
pub(crate) fn never_wait() -> io::Result<()> {
    let queue = Arc::new(Queue::default());
    queue.write_to(Destination::Stderr, Output::stderr())?;
    if QUEUE.set(queue).is_ok() {
        // The default hook writes to standard error, which may block.
        std::panic::set_hook(Box::new(|panic| {
            send(Line::new(&panic.to_string(), severity(Level::ERROR)), false);
        }));
    }
    Ok(())
}

/// Sends all further lines to standard error.
///
/// # Errors
/// If the thread that writes them cannot be started.
pub(crate) fn to_stderr() -> io::Result<()> {
    write_to(Destination::Stderr)
}

/// Sends all further lines to `file`.
///
/// # Errors
/// If it cannot be opened.
pub(crate) fn to_file(file: &Path) -> io::Result<()> {
    write_to(Destination::File(file.to_owned()))
}

/// Sends all further lines to the journal, with their fields.
///
/// # Errors
/// If there is no journal.
pub(crate) fn to_journal() -> io::Result<()> {
    write_to(Destination::Journal)
}

/// Sends all further lines to the journal if standard error goes there anyway, as that of a service
/// does.
pub(crate) fn to_journal_of_service() {
    if journal::is_stderr() {
        // Otherwise the lines go there as text.
        let _ = to_journal();
    }
}

/// The target of a daemon's log.
#[derive(Debug)]
pub(crate) enum LogTarget {
    /// To the journal or syslog.
    System,
    /// To a fallback file; the text names it, and the files that could not be opened.
    Fallback(String),
    /// To no file until a system log appears; the text says why, and what to do.
    Nowhere(String),
}

/// Sends all further lines to the system log, in journald's native protocol if `with_fields`
/// and if there is one. If there is no system log, to the first fallback file that can be opened. Each
/// candidate gets `limit` to answer. If no candidate works, lines are lost until a system log appears.
///
/// # Errors
/// If the thread that writes them cannot be started.
pub(crate) fn to_system_log(limit: Duration, with_fields: bool) -> io::Result<LogTarget> {
    if with_fields && to_journal().is_ok() {
        return Ok(LogTarget::System);
    }
    if write_to(Destination::SystemLog).is_ok() {
        return Ok(LogTarget::System);
    }
    let mut failures = Vec::new();
    for file in output::fallback_files() {
        let path = shown_path(&file.path().unwrap_or_default());
        match open_in_time(&file, limit) {
            Ok(output) => {
                switch(file, output)?;
                failures.push(format!("logging to {path}"));
                let note = format!("no system log here; {}", failures.join("; "));
                return Ok(LogTarget::Fallback(note));
            }
            Err(e) => failures.push(format!("cannot log to {path}: {e}")),
        }
    }
    write_to(Destination::Nowhere)?;
    Ok(LogTarget::Nowhere(format!(
        "no system log here; {}; messages of the daemon are lost; name a file that can be written \
         with -o log=FILE",
        failures.join("; ")
    )))
}

fn write_to(destination: Destination) -> io::Result<()> {
    let output = destination.open()?;
    switch(destination, output)
}

/// Opens `destination` on a thread, which is left running if it takes longer than `limit`.
fn open_in_time(destination: &Destination, limit: Duration) -> io::Result<Output> {
    let (send, receive) = std::sync::mpsc::channel();
    let destination = destination.clone();
    queue::start_thread(move || drop(send.send(destination.open())))?;
    let late = |_| {
        let reason = format!("no answer within {} seconds", limit.as_secs_f64());
        Err(io::Error::new(io::ErrorKind::TimedOut, reason))
    };
    receive.recv_timeout(limit).unwrap_or_else(late)
}

fn switch(destination: Destination, output: Output) -> io::Result<()> {
    let Some(queue) = QUEUE.get() else { return Ok(()) };
    // Queued lines go to the old stream if it accepts them in time.
    queue.flush(FLUSH_LIMIT);
    queue.write_to(destination, output)
}

/// Reopens the log file, for example after its rotation, and does not wait for that. Does nothing
/// if the log is not a file.
pub(crate) fn reopen() {
    if let Some(queue) = QUEUE.get() {
        queue.reopen();
    }
}

/// Waits until all lines are written, for `FLUSH_LIMIT` at most, because the log may block.
pub(crate) fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(FLUSH_LIMIT);
    }
}

/// Number of lines about requests that were not written because there were too many.
pub(crate) fn limited() -> u64 {
    QUEUE.get().map_or(0, |queue| queue.limited())
}

/// Number of lines dropped because the queue was full or writing failed.
pub(crate) fn dropped() -> u64 {
    QUEUE.get().map_or(0, |queue| queue.dropped())
}

/// Writes one line to standard error, also if the log goes elsewhere. A daemon and a command that
/// starts one drop the line if standard error accepts nothing for `FLUSH_LIMIT`.
pub(crate) fn say(message: &str) {
    say_as("tensorfs", message);
}

/// Writes one line like `say`, which is no failure, unless this process is to be quiet.
pub(crate) fn note(message: &str) {
    if !is_quiet() {
        say(message);
    }
}

/// Writes one line like `say`, as the program `name`.
pub(crate) fn say_as(name: &str, message: &str) {
    let line = match as_json(&Line::new(message, severity(Level::ERROR))) {
        Some(json) => format!("{json}\n"),
        None => format!("{name}: {}\n", shown(message)),
    };
    if QUEUE.get().is_some() {
        flush();
        output::write_in_time(&line, FLUSH_LIMIT);
    } else {
        // There is no other place to report a failure.
        let _ = io::stderr().write_all(line.as_bytes());
    }
}

/// Queues a line, or writes it to standard error if there is no queue. Lines about requests are
/// limited in number.
fn send(line: Line, is_request: bool) {
    match QUEUE.get() {
        Some(queue) => queue.push(line, is_request),
        None => {
            // There is no other place to report a failure to write.
            let _ = io::stderr().write_all(output::on_stderr(&line).as_bytes());
        }
    }
}

/// `line` as JSON, if lines are JSON.
fn as_json(line: &Line) -> Option<String> {
    let is_json = JSON.load(Ordering::Relaxed);
    is_json.then(|| line.to_json(&output::now(), MOUNT.get().map(String::as_str)))
}

/// A line in journald's native protocol.
fn for_journal(line: &Line) -> Vec<u8> {
    let message = as_json(line).map(|json| Line::new(&json, line.severity));
    message.as_ref().unwrap_or(line).to_journal(MOUNT.get().map(String::as_str))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_of_every_crate_that_signs_requests_is_off() {
        let manifest = include_str!("../../Cargo.toml");
        let names =
            manifest.lines().filter_map(|line| line.split_once(" = ")).map(|(name, _)| name);
        for name in names.filter(|name| name.starts_with("reqsign")) {
            assert!(SILENT.contains(&name.replace('-', "_").as_str()), "{name} is not in SILENT");
        }
    }
}
