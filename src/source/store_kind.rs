//! The operations of a store other than the local file system.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::parts::MemoryParts;
use super::store_probe::StoreProbe;
use crate::version::Version;

/// A read of a file of a store.
#[derive(Clone, Copy, Debug)]
pub struct ObjectRead<'a> {
    /// The path of the file.
    pub path: &'a Path,
    /// The version that the file must have.
    pub version: &'a Version,
    /// Time at which the caller stops waiting. `None` if the caller sets no limit.
    pub until: Option<Instant>,
}

impl ObjectRead<'_> {
    /// The end of the `len` bytes at `offset`. `None` if the file ends before.
    pub(crate) fn end_of(&self, offset: u64, len: usize) -> Option<u64> {
        offset.checked_add(len as u64).filter(|end| *end <= self.version.len)
    }
}

/// A kind of store other than the local file system. Its paths are absolute and contain no `.`, no `..` and no links.
pub trait StoreKind: fmt::Debug + Send + Sync {
    /// Whether a call may wait for another machine, perhaps for ever.
    fn may_block(&self) -> bool {
        true
    }

    /// The current version of the file or folder at `path`. The result may be out of date as soon as the call returns.
    ///
    /// # Errors
    /// `NotFound` if there is no such file or folder.
    fn version(&self, path: &Path) -> io::Result<Version>;

    /// The version of the folder at `path`, and its entries, in any order.
    ///
    /// # Errors
    /// `NotFound` if there is no such folder.
    fn list(&self, path: &Path) -> io::Result<StoreListing>;

    /// The name of the store for messages: a protocol and a host.
    fn name(&self) -> Option<String> {
        None
    }

    /// Number of bytes in flight that keep the connections to the store busy. With fewer bytes in flight, the
    /// connections idle. With more, the bytes wait for each other. `None` if the number was not measured.
    fn wanted_in_flight(&self) -> Option<u64> {
        None
    }

    /// The SHA-256 of the file at `path` in `version`, in hexadecimal, if the store knows it without reading
    /// the file. Sends no request.
    fn sha256(&self, path: &Path, version: &Version) -> Option<String> {
        let _ = (path, version);
        None
    }

    /// Fills `buf` with the bytes at `offset` of the file of `read`.
    ///
    /// # Errors
    /// `StaleNetworkFileHandle` if the file does not have this version any more. `UnexpectedEof` if it ends
    /// before the last of these bytes.
    fn read(&self, read: &ObjectRead<'_>, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Reads like `read`, to memory in several places.
    ///
    /// # Errors
    /// The errors of `read`.
    fn read_parts(
        &self,
        read: &ObjectRead<'_>,
        offset: u64,
        parts: &mut MemoryParts<'_>,
    ) -> io::Result<()> {
        let mut bytes = vec![0; parts.len()];
        self.read(read, offset, &mut bytes)?;
        if parts.write(0, &bytes) { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Fills `buf` like `read`, if the bytes are cached on this machine. Returns whether they are. If not, the
    /// content of `buf` is unspecified. Sends no request.
    fn read_if_cached(&self, read: &ObjectRead<'_>, offset: u64, buf: &mut [u8]) -> bool {
        let _ = (read, offset, buf);
        false
    }

    /// A local copy of the file of `read`, as its path and an open descriptor. The copy has all bytes of the file, and
    /// keeps them while the descriptor, a duplicate of it or a mapping of the copy exists. `None` if there is no local
    /// copy now. Sends no request, and returns in the time of `read`.
    fn local_copy(&self, read: &ObjectRead<'_>) -> Option<(PathBuf, File)> {
        let _ = read;
        None
    }

    /// The source of the credentials that requests carry, in words. `None` if the store uses no credentials.
    fn credentials(&self) -> Option<String> {
        None
    }

    /// Measures how the server serves the file at `path`, which has `version`.
    ///
    /// # Errors
    /// `Unsupported` if there is no server. Also fails if the server refuses a request, or does not answer in time.
    fn probe(&self, path: &Path, version: &Version) -> io::Result<StoreProbe> {
        let _ = (path, version);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Whether `version` identifies the bytes: no other bytes at the path ever had this version. Then a copy
    /// can be kept for other processes.
    fn identifies_bytes(&self, _version: &Version) -> bool {
        false
    }
}

/// A folder of a store.
#[derive(Clone, Debug)]
pub struct StoreListing {
    /// The version of the folder.
    pub version: Version,
    /// Names in the folder. Each has the version of the file, the folder or the link itself.
    pub entries: Vec<(OsString, Version)>,
    /// Whether names are missing because their versions could not be read.
    pub partial: bool,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::source::Source;
    use crate::sync::{Condvar, Mutex};
    use crate::version::QueueKey;
    use std::sync::Arc;
    use std::time::Duration;

    /// A store that has measured how many bytes in flight it needs. Its reads wait until `open` is called, and then
    /// give each byte the number of its MiB.
    #[derive(Debug)]
    pub(crate) struct MeasuredStore {
        wanted_in_flight: Option<u64>,
        is_open: Mutex<bool>,
        opened: Condvar,
    }

    impl MeasuredStore {
        pub(crate) fn new(wanted_in_flight: Option<u64>) -> Arc<MeasuredStore> {
            let (is_open, opened) = (Mutex::default(), Condvar::default());
            Arc::new(MeasuredStore { wanted_in_flight, is_open, opened })
        }

        /// A file of 1 GiB in a store of its own.
        pub(crate) fn file(wanted_in_flight: Option<u64>) -> Arc<Source> {
            MeasuredStore::new(wanted_in_flight).object("s3://b/object")
        }

        /// An object of 1 GiB.
        pub(crate) fn object(self: &Arc<Self>, url: &str) -> Arc<Source> {
            let store: Arc<dyn StoreKind> = self.clone();
            let version = Version::of_tagged_object(QueueKey::Store(1), [1, 1], 1 << 30, None);
            Source::stored(&store, Path::new(url), version)
        }

        pub(crate) fn open(&self) {
            *self.is_open.lock() = true;
            self.opened.notify_all();
        }
    }

    impl StoreKind for MeasuredStore {
        fn version(&self, _: &Path) -> io::Result<Version> {
            Err(io::ErrorKind::NotFound.into())
        }

        fn list(&self, _: &Path) -> io::Result<StoreListing> {
            Err(io::ErrorKind::NotFound.into())
        }

        fn read(&self, _: &ObjectRead<'_>, offset: u64, buf: &mut [u8]) -> io::Result<()> {
            let mut is_open = self.is_open.lock();
            while !*is_open {
                is_open = self.opened.wait_timeout(is_open, Duration::from_secs(30));
            }
            buf.fill((offset >> 20) as u8);
            Ok(())
        }

        fn wanted_in_flight(&self) -> Option<u64> {
            self.wanted_in_flight
        }
    }
}
