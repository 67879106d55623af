//! How a command ends, and what it prints on standard output.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::Path;

use serde_json::Value;
use tensorfs::ErrorKind;
use tensorfs::internal::error::{is_hidden, quoted, shown_lines, shown_path};

use crate::daemon::inherited::is_output_closed;
use crate::daemon::stalled::elsewhere;
use crate::log;

/// The note on a checkpoint that may lack its last pieces.
pub(super) const UNPROVEN_TAIL: &str =
    "tail: unproven: a lost last piece would not show; -o expect-shards= or reference= prove it";

/// The reason why a command failed.
pub(super) enum Failure {
    /// The request makes no sense.
    Usage(String),
    /// It could not be done.
    Failed(String),
    /// The library refused, or failed.
    Error(tensorfs::Error),
    /// It could not be done, and the output says why.
    Told,
}

impl Failure {
    pub(super) fn message(&self) -> String {
        match self {
            Failure::Usage(message) | Failure::Failed(message) => message.clone(),
            Failure::Error(error) => error.to_string(),
            Failure::Told => String::new(),
        }
    }

    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Failure::Usage(_) | Failure::Told => ErrorKind::Usage,
            Failure::Failed(_) => ErrorKind::Io,
            Failure::Error(error) => error.kind(),
        }
    }
}

impl From<tensorfs::Error> for Failure {
    fn from(error: tensorfs::Error) -> Self {
        Failure::Error(error)
    }
}

/// Result of a command.
pub(super) type Outcome = Result<(), Failure>;

/// Prints the refusals of sets on standard error, and fails if there are any. Several views may be
/// refused by the same line, which is printed once.
pub(super) fn tell_refusals<'a>(refused: impl Iterator<Item = &'a tensorfs::Error>) -> Outcome {
    let mut told = HashSet::new();
    for line in refused.map(ToString::to_string) {
        if told.insert(line.clone()) {
            log::say(&line);
        }
    }
    if told.is_empty() { Ok(()) } else { Err(Failure::Told) }
}

/// Prints `value` on one line or, for a terminal, indented.
pub(super) fn print_json(value: &Value) -> Outcome {
    let is_terminal = io::stdout().is_terminal();
    let text = if is_terminal { format!("{value:#}\n") } else { format!("{value}\n") };
    print_bytes(plain_json(&text).as_bytes())
}

/// Escapes all characters that a terminal would not show as themselves: serde_json escapes only the
/// first 32.
fn plain_json(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) && c != '\n' {
            let mut room = [0; 2];
            let units = c.encode_utf16(&mut room).iter();
            plain.extend(units.map(|unit| format!("\\u{unit:04x}")));
        } else {
            plain.push(c);
        }
    }
    plain
}

/// Prints lines for people. A closed pipe is no failure. The caller escapes names with `shown`:
/// line ends are not escaped here.
pub(super) fn print_text(text: &str) -> Outcome {
    print_bytes(shown_lines(text).as_bytes())
}

/// Prints bytes unchanged, for programs. A closed pipe is no failure.
pub(super) fn print_bytes(bytes: &[u8]) -> Outcome {
    check_output()?;
    let mut output = io::stdout().lock();
    // The process would not see what a later flush says.
    printed(elsewhere(|| output.write_all(bytes).and_then(|()| output.flush())))
}

/// Fails if there is no standard output.
fn check_output() -> Outcome {
    if is_output_closed() {
        let message = "cannot write to standard output: it is closed";
        return Err(Failure::Failed(message.to_owned()));
    }
    Ok(())
}

/// Prints help or the version, or on standard error what is wrong with the arguments.
pub(super) fn print_clap(message: &clap::Error) -> Outcome {
    let written = message.print().and_then(|()| io::stdout().flush());
    // Nothing can be said where standard error takes nothing.
    if message.use_stderr() { Ok(()) } else { check_output().and_then(|()| printed(written)) }
}

/// The outcome of a command that has written to standard output. A closed pipe is no failure.
fn printed(written: io::Result<()>) -> Outcome {
    match written {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Failed(format!("cannot write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}

/// The outcome of a report that `printed` about the file or folder `out`, which is written.
pub(super) fn reported(out: &Path, printed: Outcome) -> Outcome {
    let of_output = |failure: Failure| {
        let message = failure.message();
        Failure::Failed(format!("{}: is written, but not its report: {message}", shown_path(out)))
    };
    printed.map_err(of_output)
}

/// The width of the terminal on standard output. `None` if that is none.
pub(super) fn terminal_width() -> Option<usize> {
    io::stdout().is_terminal().then(|| console::Term::stdout().size().1.max(1).into())
}

/// Standard output for many bytes, for programs.
pub(super) struct RawOutput {
    file: File,
}

impl RawOutput {
    /// # Errors
    /// If it is a terminal, unless `force`.
    pub(super) fn open(force: bool) -> Result<RawOutput, Failure> {
        check_output()?;
        if !force && io::stdout().is_terminal() {
            let why = "standard output is a terminal: write to a file with `>`, or give --force";
            return Err(Failure::Usage(why.to_owned()));
        }
        // Without the buffer of `stdout`, which looks for ends of lines.
        let copy = io::stdout()
            .as_fd()
            .try_clone_to_owned()
            .map_err(|e| Failure::Failed(format!("standard output: {e}")))?;
        Ok(RawOutput { file: copy.into() })
    }

    /// Writes `bytes`. Returns false if the pipe is closed, which is no failure.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<bool, Failure> {
        match elsewhere(|| self.file.write_all(bytes)) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(e) => Err(Failure::Failed(format!("standard output: cannot write: {e}"))),
        }
    }
}

/// How fast `bytes` were moved, in the decimal units of disks and networks.
pub(super) fn speed(bytes: u64, seconds: f64) -> String {
    format!("{}/s", indicatif::DecimalBytes((bytes as f64 / seconds.max(1e-9)) as u64))
}

/// A name fit for one line.
pub(super) fn printable(name: &str) -> String {
    if name.is_empty() || name.chars().any(is_hidden) {
        return quoted(name);
    }
    name.to_owned()
}
