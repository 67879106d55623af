//! The record next to an assembled copy: the sources of its bytes, their checksum, and the version
//! of the copy file when it was verified.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tensorfs::internal::hash::hex;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::version::Version;

/// Version of the format of records. Records of other versions are ignored.
const FORMAT: u64 = 2;

/// The record of one copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Version of the content.
    pub(super) version: String,
    /// Checksum of all bytes, in hexadecimal, as `sha256sum` prints it.
    pub(super) sha256: String,
    /// State of the sources from which the bytes were read, as `state_of` returns it.
    pub(super) sources: String,
    /// Folder of the sources, for people who read the record.
    pub(super) source: String,
    /// Version of the copy file at its verification.
    pub(super) copy: Version,
    /// Time of writing in seconds since 1970, for people who read the record.
    pub(super) written: u64,
}

impl Record {
    /// The record as it is stored.
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

    /// Decodes a record. `None` if `text` is not a valid record.
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
/// The version of the content does not cover the change times of the sources, because a file keeps
/// its version when only its mode or its links change. But a copy is used in later mounts, and
/// between two mounts the sources are not watched. If a source was written between two mounts and
/// its modification time was set back, its state must differ from its state when it was copied.
///
/// # Errors
/// Errors of the sources. A changed source is an error.
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
