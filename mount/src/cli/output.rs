//! The outcome of a command, and functions that print to standard output.

use std::collections::HashSet;
use std::fmt::Display;
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

/// The note about a checkpoint whose last pieces may be missing.
pub(super) const UNPROVEN_TAIL: &str =
    "tail: unproven: a lost last piece would not show; -o expect-shards= or reference= prove it";

/// The reason why a command failed.
pub(super) enum Failure {
    /// The arguments are wrong.
    Usage(String),
    /// The command could not do its work.
    Failed(String),
    /// An error of the library.
    Error(tensorfs::Error),
    /// The command could not do its work, and its output already has the reason.
    Told,
}

impl Failure {
    /// The command could not do its work because of the file or folder `path`.
    pub(super) fn at(path: &Path, why: impl Display) -> Failure {
        Failure::Failed(format!("{}: {why}", shown_path(path)))
    }

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

/// Prints the errors of refused sets on standard error, and fails if there are any. Several views
/// may be refused with the same message, which is printed only once.
pub(super) fn tell_refusals<'a>(refused: impl Iterator<Item = &'a tensorfs::Error>) -> Outcome {
    let mut told = HashSet::new();
    for line in refused.map(ToString::to_string) {
        if told.insert(line.clone()) {
            log::say(&line);
        }
    }
    if told.is_empty() { Ok(()) } else { Err(Failure::Told) }
}

/// If JSON was requested and nothing is printed yet, prints the error as JSON too. `report` has the
/// other fields.
pub(super) fn in_json(as_json: bool, mut report: Value, outcome: Outcome) -> Outcome {
    if let Err(failure) = &outcome
        && as_json
        && !matches!(failure, Failure::Told)
    {
        report["ok"] = false.into();
        report["class"] = failure.kind().as_str().into();
        report["error"] = failure.message().into();
        // The error also goes to standard error, so a failure to print it here is ignored.
        let _ = print_json(&report);
    }
    outcome
}

/// Prints `value` on one line, or indented if standard output is a terminal.
pub(super) fn print_json(value: &Value) -> Outcome {
    let is_terminal = io::stdout().is_terminal();
    let text = if is_terminal { format!("{value:#}\n") } else { format!("{value}\n") };
    print_bytes(plain_json(&text).as_bytes())
}

/// Escapes all characters that a terminal would not display as they are. serde_json escapes only
/// the first 32 characters of ASCII.
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

/// Prints text for people. It is no error if the pipe is closed. The caller escapes names with
/// `shown`, because this function does not escape newlines.
pub(super) fn print_text(text: &str) -> Outcome {
    print_bytes(shown_lines(text).as_bytes())
}

/// Prints bytes unchanged, for programs. It is no error if the pipe is closed.
pub(super) fn print_bytes(bytes: &[u8]) -> Outcome {
    check_output()?;
    let mut output = io::stdout().lock();
    // This flush reports errors. Errors of the flush at the end of the process would be lost.
    printed(elsewhere(|| output.write_all(bytes).and_then(|()| output.flush())))
}

/// Fails if standard output is closed.
fn check_output() -> Outcome {
    if is_output_closed() {
        return Err(Failure::Failed("cannot write to standard output: it is closed".to_owned()));
    }
    Ok(())
}

/// Prints help or the version on standard output, or the error in the arguments on standard error.
pub(super) fn print_clap(message: &clap::Error) -> Outcome {
    let written = message.print().and_then(|()| io::stdout().flush());
    // If standard error cannot be written, the error cannot be reported anywhere else.
    if message.use_stderr() { Ok(()) } else { check_output().and_then(|()| printed(written)) }
}

/// The outcome of a command that has written to standard output. It is no error if the pipe is
/// closed.
fn printed(written: io::Result<()>) -> Outcome {
    match written {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Failed(format!("cannot write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}

/// The outcome of a command that has written the file or folder `out`. `printed` is the outcome of
/// printing its report.
pub(super) fn reported(out: &Path, printed: Outcome) -> Outcome {
    let of_output = |failure: Failure| {
        let message = failure.message();
        Failure::Failed(format!("{}: is written, but not its report: {message}", shown_path(out)))
    };
    printed.map_err(of_output)
}

/// The width of the terminal on standard output. `None` if standard output is not a terminal.
pub(super) fn terminal_width() -> Option<usize> {
    io::stdout().is_terminal().then(|| console::Term::stdout().size().1.max(1).into())
}

/// Standard output for large amounts of bytes.
pub(super) struct RawOutput {
    file: File,
}

impl RawOutput {
    /// # Errors
    /// If standard output is a terminal and `force` is not set.
    pub(super) fn open(force: bool) -> Result<RawOutput, Failure> {
        check_output()?;
        if !force && io::stdout().is_terminal() {
            let why = "standard output is a terminal: write to a file with `>`, or give --force";
            return Err(Failure::Usage(why.to_owned()));
        }
        // The buffer of `stdout` is not used, because it searches for newlines.
        let copy = io::stdout()
            .as_fd()
            .try_clone_to_owned()
            .map_err(|e| Failure::Failed(format!("standard output: {e}")))?;
        Ok(RawOutput { file: copy.into() })
    }

    /// Writes `bytes`. Returns false if the pipe is closed, which is no error.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<bool, Failure> {
        match elsewhere(|| self.file.write_all(bytes)) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(e) => Err(Failure::Failed(format!("standard output: cannot write: {e}"))),
        }
    }
}

/// The speed at which `bytes` were moved, in decimal units as for disks and networks.
pub(super) fn speed(bytes: u64, seconds: f64) -> String {
    format!("{}/s", indicatif::DecimalBytes((bytes as f64 / seconds.max(1e-9)) as u64))
}

/// A name that fits on one line: quoted if it is empty or has hidden characters.
pub(super) fn printable(name: &str) -> String {
    if name.is_empty() || name.chars().any(is_hidden) {
        return quoted(name);
    }
    name.to_owned()
}
