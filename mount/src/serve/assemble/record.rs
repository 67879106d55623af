//! The record beside an assembled copy: the sources of its bytes, their checksum, and the version
//! of the copy when it was verified.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tensorfs::internal::hash::hex;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::version::Version;

/// Version of the record's format. Other versions are not read.
const FORMAT: u64 = 2;

/// The record of one copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Version of the content.
    pub(super) version: String,
    /// Checksum of all bytes, in hexadecimal, as `sha256sum` prints it.
    pub(super) sha256: String,
    /// State of the sources that the bytes were read from; see `state_of`.
    pub(super) sources: String,
    /// Folder of the sources, for people.
    pub(super) source: String,
    /// Version of the copy at its verification.
    pub(super) copy: Version,
    /// Time of writing in seconds since 1970, for people.
    pub(super) written: u64,
}

impl Record {
    /// The stored form.
    pub(super) fn to_json(&self) -> Value {
        json!({
            "format": FORMAT,
            "version": self.version,
            "len": self.copy.len,
            "checksum": { "kind": "sha256", "value": self.sha256 },
            "sources": self.sources,
            "source": self.source,
            "copy": self.copy.to_words(),
            "written": self.written,
        })
    }

    /// Decodes a record. `None` if `text` is not one.
    pub(super) fn parse(text: &[u8]) -> Option<Record> {
        let value: Value = serde_json::from_slice(text).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let checksum = &value["checksum"];
        if value["format"] != FORMAT || checksum["kind"] != "sha256" {
            return None;
        }
        let copy = serde_json::from_value(value["copy"].clone()).ok()?;
        Some(Record {
            version: text(&value["version"])?,
            sha256: text(&checksum["value"])?,
            sources: text(&value["sources"])?,
            source: text(&value["source"])?,
            copy: Version::from_words(&copy),
            written: value["written"].as_u64()?,
        })
    }
}

/// The state of the sources of a virtual file.
///
/// The version of the content does not cover their change times, since a file keeps its version when only its mode
/// or its links change. But a copy outlives the mount and its watch over the sources: a file that
/// was written and had its times set back must not match the copied one.
///
/// # Errors
/// Errors of the sources; a changed source is an error.
pub(super) fn state_of(reader: &Reader) -> tensorfs::Result<String> {
    let mut hash = Sha256::new();
    for source in reader.sources() {
        source.check()?;
        for word in source.version().lasting().to_words() {
            hash.update(word.to_le_bytes());
        }
    }
    Ok(hex(&hash.finalize()))
}
