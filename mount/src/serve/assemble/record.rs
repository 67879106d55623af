//! The record beside an assembled copy: the sources of its bytes, their checksum, and the identity
//! of the copy when it was verified.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tensorfs::internal::reader::Reader;
use tensorfs::internal::source::Source;

/// Version of the record's format. Other versions are not read.
const FORMAT: u64 = 1;

/// The identity of a copy: two states of it differ in it. Nobody can set the change time back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    dev: u64,
    ino: u64,
    pub(super) len: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl Stamp {
    /// The state in `meta`.
    pub(super) fn of(meta: &Metadata) -> Stamp {
        Stamp {
            dev: meta.dev(),
            ino: meta.ino(),
            len: meta.size(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// The record of one copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Version of the content.
    pub(super) version: String,
    /// Checksum of all bytes, in hexadecimal, as `sha256sum` prints it.
    pub(super) sha256: String,
    /// State of the sources that the bytes were read from; see `fingerprint`.
    pub(super) sources: String,
    /// Folder of the sources, for people.
    pub(super) source: String,
    /// State of the copy at its verification.
    pub(super) stamp: Stamp,
    /// Time of writing in seconds since 1970, for people.
    pub(super) written: u64,
}

impl Record {
    /// The stored form.
    pub(super) fn to_json(&self) -> Value {
        let Stamp { dev, ino, len, mtime, ctime } = self.stamp;
        json!({
            "format": FORMAT,
            "version": self.version,
            "len": len,
            "checksum": { "kind": "sha256", "value": self.sha256 },
            "sources": self.sources,
            "source": self.source,
            "file": { "dev": dev, "ino": ino, "mtime": mtime, "ctime": ctime },
            "written": self.written,
        })
    }

    /// Decodes a record. `None` if `text` is not one.
    pub(super) fn parse(text: &[u8]) -> Option<Record> {
        let value: Value = serde_json::from_slice(text).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let time = |value: &Value| Some((value[0].as_i64()?, value[1].as_i64()?));
        let (file, checksum) = (&value["file"], &value["checksum"]);
        if value["format"] != FORMAT || checksum["kind"] != "sha256" {
            return None;
        }
        Some(Record {
            version: text(&value["version"])?,
            sha256: text(&checksum["value"])?,
            sources: text(&value["sources"])?,
            source: text(&value["source"])?,
            stamp: Stamp {
                dev: file["dev"].as_u64()?,
                ino: file["ino"].as_u64()?,
                len: value["len"].as_u64()?,
                mtime: time(&file["mtime"])?,
                ctime: time(&file["ctime"])?,
            },
            written: value["written"].as_u64()?,
        })
    }
}

/// The state of the sources of a virtual file.
///
/// The version does not cover their change times, since a file keeps its version when only its mode
/// or its links change. But a copy outlives the mount and its watch over the sources: a file that
/// was written and had its times set back must not match the copied one.
///
/// # Errors
/// Errors of the sources; a changed source is an error.
pub(super) fn fingerprint(reader: &Reader) -> tensorfs::Result<String> {
    let mut hash = Sha256::new();
    for source in reader.sources() {
        source.check()?;
        let Source::Local(local) = &**source;
        let meta = local.file()?.metadata();
        let meta = meta.map_err(|e| tensorfs::Error::io(source.uri(), "stat", e))?;
        for number in [meta.size(), meta.ino()] {
            hash.update(number.to_le_bytes());
        }
        for number in [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()] {
            hash.update(number.to_le_bytes());
        }
    }
    Ok(hex(&hash.finalize()))
}

/// Bytes in hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Now, in seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
