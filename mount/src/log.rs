//! The targets of log lines. Lines go to standard error until the daemon is in the background, and
//! then to the system log or a file.
//!
//! A command writes its lines itself. A daemon queues them for a thread, because a stream that
//! blocks (a full pipe, a stopped terminal, a stalled disk) must not block the threads that answer
//! readers.

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
pub(crate) use queue::start_thread;

/// Environment variable with filter directives of the crate `tracing`.
const FILTER: &str = "TENSORFS_LOG";

/// Time limit for writing queued lines, at the end of the process and before the stream is changed.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The queue of a daemon. A command has no queue.
static QUEUE: OnceLock<Arc<Queue>> = OnceLock::new();

/// The mount point, which is a field of JSON lines and of journal entries.
static MOUNT: OnceLock<String> = OnceLock::new();

/// Whether only errors are written.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Whether lines are JSON.
static JSON: AtomicBool = AtomicBool::new(false);

/// Sets whether all further lines are JSON objects, one on each line, or text.
pub(crate) fn write_json(is_json: bool) {
    JSON.store(is_json, Ordering::Relaxed);
}

/// Sets the mount that this process serves, for log lines.
pub(crate) fn set_mount(target: &Path) {
    let _ = MOUNT.set(tensorfs::internal::error::real_name(target));
}

/// The mount that this process serves, as `set_mount` named it.
pub(crate) fn mount() -> Option<&'static str> {
    MOUNT.get().map(String::as_str)
}

/// Turns off notes, and warnings on standard error.
pub(crate) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether `be_quiet` was called.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Crates whose log lines may contain secrets, such as texts that are signed, answers with tokens,
/// or signed URLs.
const SILENT: [&str; 7] = [
    "reqsign_aws_core",
    "reqsign_aws_v4",
    "reqsign_azure_storage",
    "reqsign_core",
    "reqsign_google",
    "reqwest",
    "hyper",
];

/// Starts logging to standard error. By default, warnings are logged, and each `verbose` adds a
/// level. `TENSORFS_LOG` replaces this default. A quiet process logs only errors.
pub(crate) fn start(verbose: u8) {
    let default = match verbose {
        _ if is_quiet() => "error",
        // fuser warns about requests that tensorfs does not implement, so only its errors are
        // logged.
        0 => "warn,fuser=error",
        1 => "info,fuser=warn",
        2 => "debug",
        _ => "trace",
    };
    let given = EnvFilter::try_from_env(FILTER).ok().filter(|_| !is_quiet());
    let chosen = given.unwrap_or_else(|| EnvFilter::new(default));
    let silent = SILENT.iter().filter_map(|name| format!("{name}=off").parse().ok());
    let filter = silent.fold(chosen, EnvFilter::add_directive);
    // A second call, which tests make, changes nothing.
    let _ = tracing_subscriber::registry().with(filter).with(Events).try_init();
}

/// Makes sure that no thread waits for the log. Lines are queued. If the queue is full, lines are
/// dropped and counted.
///
/// # Errors
/// If the thread that writes them cannot be started.
pub(crate) fn never_wait() -> io::Result<()> {
    let queue = Arc::new(Queue::default());
    queue.write_to(Destination::Stderr, Output::stderr())?;
    if QUEUE.set(queue).is_ok() {
        // The default hook writes panics to standard error, which may block.
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
/// If the file cannot be opened.
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

/// Sends all further lines to the journal if standard error is connected to the journal, as in a
/// service.
pub(crate) fn to_journal_of_service() {
    if journal::is_stderr() {
        // If this fails, the lines go to the journal as text.
        let _ = to_journal();
    }
}

/// The target of a daemon's log.
#[derive(Debug)]
pub(crate) enum LogTarget {
    /// The lines go to the journal or to syslog.
    System,
    /// The lines go to a fallback file. The text has its path, and the paths of files that could
    /// not be opened.
    Fallback(String),
    /// The lines are lost until a system log appears. The text has the reason and a remedy.
    Nowhere(String),
}

/// Sends all further lines to the system log. With `with_fields`, they go to the journal in its native
/// protocol, if there is a journal. If there is no system log, they go to the first fallback file that
/// can be opened. The time limit for each candidate is `limit`. If no candidate works, lines are lost
/// until a system log appears.
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

/// Opens `destination` on another thread. If that takes longer than `limit`, this function returns
/// an error and the thread continues.
fn open_in_time(destination: &Destination, limit: Duration) -> io::Result<Output> {
    let (send, receive) = std::sync::mpsc::channel();
    let destination = destination.clone();
    start_thread("log", move || drop(send.send(destination.open())))?;
    let late = |_| {
        let reason = format!("no answer within {} seconds", limit.as_secs_f64());
        Err(io::Error::new(io::ErrorKind::TimedOut, reason))
    };
    receive.recv_timeout(limit).unwrap_or_else(late)
}

fn switch(destination: Destination, output: Output) -> io::Result<()> {
    let Some(queue) = QUEUE.get() else { return Ok(()) };
    // The queued lines go to the old stream, if it accepts them in time.
    queue.flush(FLUSH_LIMIT);
    queue.write_to(destination, output)
}

/// Closes the log file and opens it again, for example after log rotation. Does not wait until that
/// is done. Does nothing if the log is not a file.
pub(crate) fn reopen() {
    if let Some(queue) = QUEUE.get() {
        queue.reopen();
    }
}

/// Waits until all lines are written. The log may block, so the time limit is `FLUSH_LIMIT`.
pub(crate) fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(FLUSH_LIMIT);
    }
}

/// Number of lines about requests that were left out because the number of these lines in a given
/// time is limited.
pub(crate) fn limited() -> u64 {
    QUEUE.get().map_or(0, |queue| queue.limited())
}

/// Number of lines that were dropped because the queue was full or because writing failed.
pub(crate) fn dropped() -> u64 {
    QUEUE.get().map_or(0, |queue| queue.dropped())
}

/// Writes one line to standard error, even if the log goes elsewhere. In a daemon, and in a command
/// that starts a daemon, the line is dropped if standard error accepts nothing for `FLUSH_LIMIT`.
pub(crate) fn say(message: &str) {
    say_as("tensorfs", message);
}

/// Writes one line that is not an error to standard error, like `say`. A quiet process does not
/// write it.
pub(crate) fn note(message: &str) {
    if !is_quiet() {
        say(message);
    }
}

/// Writes one line to standard error, like `say`, with `name` as the name of the program.
pub(crate) fn say_as(name: &str, message: &str) {
    let line = match as_json(&Line::new(message, severity(Level::ERROR))) {
        Some(json) => format!("{json}\n"),
        None => format!("{name}: {}\n", shown(message)),
    };
    if QUEUE.get().is_some() {
        flush();
        output::write_in_time(&line, FLUSH_LIMIT);
    } else {
        // A failure to write cannot be reported anywhere else.
        let _ = io::stderr().write_all(line.as_bytes());
    }
}

/// Queues a line. Without a queue, writes it to standard error. The number of lines about requests
/// is limited.
fn send(line: Line, is_request: bool) {
    match QUEUE.get() {
        Some(queue) => queue.push(line, is_request),
        None => {
            // A failure to write cannot be reported anywhere else.
            let _ = io::stderr().write_all(output::on_stderr(&line).as_bytes());
        }
    }
}

/// The JSON form of `line`. `None` if lines are text.
fn as_json(line: &Line) -> Option<String> {
    let is_json = JSON.load(Ordering::Relaxed);
    is_json.then(|| line.to_json(&output::now(), MOUNT.get().map(String::as_str)))
}

/// The line in the native protocol of journald.
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
