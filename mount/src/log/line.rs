//! One line of the log, and the formats in which it is written.

use serde_json::{Map, Value};
use tensorfs::internal::error::shown;

/// Maximum size of a line in bytes. Messages may contain names of any length.
pub(super) const LINE_MAX: usize = 16 << 10;

/// Maximum size of the value of a field, in bytes.
const VALUE_MAX: usize = 4 << 10;

/// Maximum number of fields of a line.
const FIELDS_MAX: usize = 16;

/// A line of the log.
pub(super) struct Line {
    /// The line for people, without the newline.
    pub text: String,
    /// Severity as a number of syslog. 3 is an error.
    pub severity: u32,
    /// The line without the level and the fields. `None` if the whole text is the message.
    pub message: Option<String>,
    /// Facts about the line, such as the operation and the file.
    pub fields: Vec<(&'static str, String)>,
}

impl Line {
    /// `text`, cut off at `LINE_MAX` bytes.
    pub(super) fn new(text: &str, severity: u32) -> Line {
        let text = cut(&shown(text.trim()), LINE_MAX);
        Line { text, severity, message: None, fields: Vec::new() }
    }

    /// This line with `message` and `fields`.
    pub(super) fn with_fields(
        mut self,
        message: &str,
        fields: Vec<(&'static str, String)>,
    ) -> Line {
        self.message = Some(cut(&shown(message.trim()), LINE_MAX));
        let fields = fields.into_iter().take(FIELDS_MAX);
        self.fields = fields.map(|(name, value)| (name, cut(&shown(&value), VALUE_MAX))).collect();
        self
    }

    /// Size of the line in bytes.
    pub(super) fn len(&self) -> usize {
        let fields = self.fields.iter().map(|(name, value)| name.len() + value.len());
        self.text.len() + self.message.as_ref().map_or(0, String::len) + fields.sum::<usize>()
    }

    pub(super) fn message(&self) -> &str {
        self.message.as_deref().unwrap_or(&self.text)
    }

    /// The line as one JSON object, without a line end.
    pub(super) fn to_json(&self, time: &str, mount: Option<&str>) -> String {
        let level = match self.severity {
            ..=3 => "error",
            4 => "warn",
            5 | 6 => "info",
            _ => "debug",
        };
        let mut object = Map::new();
        object.insert("time".to_owned(), time.into());
        object.insert("level".to_owned(), level.into());
        object.insert("message".to_owned(), self.message().into());
        object.insert("pid".to_owned(), std::process::id().into());
        if let Some(mount) = mount {
            object.insert("mount".to_owned(), mount.into());
        }
        for (name, value) in &self.fields {
            object.entry(*name).or_insert_with(|| value.as_str().into());
        }
        Value::Object(object).to_string()
    }

    /// The line in the native protocol of journald.
    pub(super) fn to_journal(&self, mount: Option<&str>) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut field = |name: &str, value: &str| {
            let name = name.to_ascii_uppercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_");
            bytes.extend_from_slice(name.as_bytes());
            if value.contains('\n') {
                bytes.push(b'\n');
                bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
            } else {
                bytes.push(b'=');
            }
            bytes.extend_from_slice(value.as_bytes());
            bytes.push(b'\n');
        };
        field("MESSAGE", self.message());
        field("PRIORITY", &self.severity.to_string());
        field("SYSLOG_IDENTIFIER", "tensorfs");
        if let Some(mount) = mount {
            field("TENSORFS_MOUNT", mount);
        }
        self.fields.iter().for_each(|(name, value)| field(name, value));
        bytes
    }
}

/// `text`, cut off at `most` bytes.
fn cut(text: &str, most: usize) -> String {
    let most = most.min(text.len());
    let end = (0..=most).rev().find(|&end| text.is_char_boundary(end)).unwrap_or_default();
    let dots = if end < text.len() { " ..." } else { "" };
    format!("{}{dots}", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        let fields = vec![("op", "read".to_owned()), ("file", "a/b".to_owned())];
        Line::new("ERROR cannot read", 3).with_fields("cannot read", fields)
    }

    #[test]
    fn the_journal_gets_the_message_and_each_fact_as_a_field() {
        let text = String::from_utf8(line().to_journal(Some("/mnt/a"))).unwrap();
        let wanted = "MESSAGE=cannot read\nPRIORITY=3\nSYSLOG_IDENTIFIER=tensorfs\n\
                      TENSORFS_MOUNT=/mnt/a\nOP=read\nFILE=a/b\n";
        assert_eq!(text, wanted);
        let two = Line { text: "a\nb".to_owned(), severity: 6, message: None, fields: Vec::new() };
        let bytes = two.to_journal(None);
        assert!(bytes.starts_with(b"MESSAGE\n\x03\0\0\0\0\0\0\0a\nb\nPRIORITY=6\n"));
    }

    #[test]
    fn a_line_of_json_is_one_object_on_one_line() {
        let text = line().to_json("2026-01-01T00:00:00Z", None);
        assert!(!text.contains('\n'));
        let object: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&object["level"], &object["op"]), (&"error".into(), &"read".into()));
        assert_eq!(object["message"], "cannot read");
        assert_eq!(object.get("mount"), None);
    }

    #[test]
    fn fields_are_bounded_in_number_and_length() {
        let fields = vec![("file", "x".repeat(1 << 20)); 100];
        let line = Line::new("a", 3).with_fields("a", fields);
        assert!(line.len() < FIELDS_MAX * (VALUE_MAX + 16), "{}", line.len());
    }
}
