//! The targets of log lines: standard error until the daemon is in the background, then the system
//! log or a file.
//!
//! A command writes its lines itself. A daemon queues them for a thread: a blocked stream (a full
//! pipe, a stopped terminal, a stalled disk) must not block the threads that answer readers.

mod line;
mod output;
mod queue;

use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tensorfs::internal::error::{shown, shown_path};

use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use line::Line;
use output::{Destination, Output};
use queue::Queue;

/// Environment variable with tracing directives.
const FILTER: &str = "TENSORFS_LOG";

/// How long the end of the process and a change of the stream wait for queued lines.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The queue of a daemon; a command has none.
static QUEUE: OnceLock<Arc<Queue>> = OnceLock::new();

/// Starts logging to standard error: warnings, more with each `verbose`, or what
/// `TENSORFS_LOG` says.
pub(crate) fn start(verbose: u8) {
    let default = match verbose {
        // fuser warns of requests that tensorfs does not implement.
        0 => "warn,fuser=error",
        1 => "info,fuser=warn",
        2 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env(FILTER).unwrap_or_else(|_| EnvFilter::new(default));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(false)
        .without_time()
        .with_writer(Lines);
    // A second call, as tests make, changes nothing.
    let _ = subscriber.try_init();
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
        std::panic::set_hook(Box::new(|panic| send(&panic.to_string(), severity(Level::ERROR))));
    }
    Ok(())
}

/// Sends all further lines to `file`.
///
/// # Errors
/// If it cannot be opened.
pub(crate) fn to_file(file: &Path) -> io::Result<()> {
    write_to(Destination::File(file.to_owned()))
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

/// Sends all further lines to the system log; if there is none, to the first fallback file that can
/// be opened. Each candidate gets `limit` to answer. If no candidate works, lines are lost until a
/// system log appears.
///
/// # Errors
/// If the thread that writes them cannot be started.
pub(crate) fn to_system_log(limit: Duration) -> io::Result<LogTarget> {
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

/// Number of lines dropped because the queue was full or writing failed.
pub(crate) fn dropped() -> u64 {
    QUEUE.get().map_or(0, |queue| queue.dropped())
}

/// Writes one line to standard error, also if the log goes elsewhere. A daemon and a command that
/// starts one drop the line if standard error accepts nothing for `FLUSH_LIMIT`.
pub(crate) fn say(message: &str) {
    say_as("tensorfs", message);
}

/// Writes one line like `say`, as the program `name`.
pub(crate) fn say_as(name: &str, message: &str) {
    let line = format!("{name}: {}\n", shown(message));
    if QUEUE.get().is_some() {
        flush();
        output::write_in_time(&line, FLUSH_LIMIT);
    } else {
        // There is no other place to report a failure.
        let _ = io::stderr().write_all(line.as_bytes());
    }
}

/// Makes writers of one line each.
struct Lines;

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Collected;

    fn make_writer(&'a self) -> Collected {
        Collected { text: Vec::new(), severity: severity(Level::INFO) }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Collected {
        Collected { text: Vec::new(), severity: severity(*meta.level()) }
    }
}

/// The severity of a level, in the numbers of syslog and the journal.
fn severity(level: Level) -> u32 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// One line, sent when it is dropped.
struct Collected {
    text: Vec<u8>,
    severity: u32,
}

impl Write for Collected {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Collected {
    fn drop(&mut self) {
        send(&String::from_utf8_lossy(&self.text), self.severity);
    }
}

/// Queues a line, or writes it to standard error if there is no queue.
fn send(text: &str, severity: u32) {
    let line = Line::new(text, severity);
    match QUEUE.get() {
        Some(queue) => queue.push(line),
        None => {
            // There is no other place to report a failure to write.
            let _ = io::stderr().write_all(output::on_stderr(&line).as_bytes());
        }
    }
}
