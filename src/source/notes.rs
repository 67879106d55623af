//! Facts that are noted about an open source, whether local or remote.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};
use crate::format::tensorizer::decryptor::Decryptor;
use crate::hash::Digest;

/// The ranges of the header, which describes the tensors, and the hash of the bytes in them.
pub(super) type Described = (Vec<Range<u64>>, Digest);

/// Facts about one source.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Whether reads of the source exceed their time limit.
    stalled: AtomicBool,
    /// Set when the header was read.
    pub(super) described: OnceLock<Described>,
    /// Decrypts the bytes, if they are encrypted.
    pub(super) decryptor: OnceLock<Arc<Decryptor>>,
    /// Whether changes are expected. Then they are logged at debug level only.
    pub(super) followed: AtomicBool,
    /// Set when the source is known to have changed. From then on this version of it is never read again.
    changed: OnceLock<String>,
}

impl Notes {
    /// Sets whether reads of the source exceed their time limit. Returns the previous value.
    pub(super) fn set_stalled(&self, stalled: bool) -> bool {
        // The value rarely changes. A plain load avoids a write, which would take the cache line from other threads.
        let before = self.stalled.load(Ordering::Relaxed);
        if before == stalled { before } else { self.stalled.swap(stalled, Ordering::Relaxed) }
    }

    /// Whether the source is known to have changed.
    pub(super) fn is_changed(&self) -> bool {
        self.changed.get().is_some()
    }

    /// Fails if the source at `path` is known to have changed. Does not access the source.
    pub(super) fn check_known(&self, path: &Path) -> Result<()> {
        self.changed.get().map_or(Ok(()), |detail| Err(Error::changed(path, detail)))
    }

    /// Marks the source at `path` as changed, and logs that before it returns. `in_use` says whether readers
    /// have it open.
    pub(super) fn set_changed(&self, path: &Path, detail: String, in_use: bool) -> Error {
        let error = Error::changed(path, &detail);
        if self.changed.set(detail).is_err() {
            return self.check_known(path).err().unwrap_or(error);
        }
        if self.followed.load(Ordering::Relaxed) {
            tracing::debug!("{error}");
        } else if in_use {
            tracing::error!("{error}; what has it open gets errors, a new open proves it again");
        } else {
            tracing::info!("{error}; the next open proves it again");
        }
        error
    }
}
