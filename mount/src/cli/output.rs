//! How a command ends, and what it prints on standard output.

use std::collections::HashSet;
use std::io::{self, Write};

use serde_json::Value;
use tensorfs::ErrorKind;
use tensorfs::internal::error::{is_hidden, quoted, shown_lines};

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
    use std::io::IsTerminal;
    let mut output = io::stdout().lock();
    let text = if output.is_terminal() { format!("{value:#}") } else { value.to_string() };
    let printed = writeln!(output, "{}", plain_json(&text));
    // A closed pipe is no failure.
    match printed {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Failed(format!("cannot write: {e}")))
        }
        _ => Ok(()),
    }
}

/// Escapes all characters that a terminal would not show as themselves: serde_json escapes only the
/// first 32.
fn plain_json(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) && c != '\n' {
            let mut units = [0; 2];
            let units = c.encode_utf16(&mut units).iter();
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
    match io::stdout().lock().write_all(bytes) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Failed(format!("cannot write: {e}")))
        }
        _ => Ok(()),
    }
}

/// `bytes` with a unit, for people.
pub(super) fn human(bytes: u64) -> String {
    indicatif::DecimalBytes(bytes).to_string()
}

/// A name fit for one line.
pub(super) fn printable(name: &str) -> String {
    if name.is_empty() || name.chars().any(is_hidden) {
        return quoted(name);
    }
    name.to_owned()
}
