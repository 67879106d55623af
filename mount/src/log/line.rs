//! One line of the log.

use tensorfs::internal::error::shown;

/// Longest line, in bytes: a message may quote names of any length.
pub(super) const LINE_MAX: usize = 16 << 10;

/// A line of the log.
pub(super) struct Line {
    /// The line, without its end.
    pub text: String,
    /// Severity in syslog's numbers: 3 is an error.
    pub severity: u32,
}

impl Line {
    /// `text`, cut off at `LINE_MAX` bytes.
    pub(super) fn new(text: &str, severity: u32) -> Line {
        let text = shown(text.trim());
        let most = LINE_MAX.min(text.len());
        let cut = (0..=most).rev().find(|&end| text.is_char_boundary(end)).unwrap_or_default();
        let end = if cut < text.len() { " ..." } else { "" };
        Line { text: format!("{}{end}", &text[..cut]), severity }
    }
}
