//! The operations of a store that is not the local file system.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::parts::MemoryParts;
use super::store_probe::StoreProbe;
use crate::version::Version;

/// A kind of store beside the local file system. Its paths are absolute. They have no `.`, no `..` and
/// no links.
pub trait StoreKind: fmt::Debug + Send + Sync {
    /// Whether a call may wait for another machine, perhaps for ever.
    fn may_block(&self) -> bool {
        true
    }

    /// The version of the file or folder at `path` now. It need not be current for longer than this
    /// call.
    ///
    /// # Errors
    /// `NotFound` where nothing is there.
    fn version(&self, path: &Path) -> io::Result<Version>;

    /// The version of the folder at `path`, and its entries, in any order.
    ///
    /// # Errors
    /// `NotFound` where no folder is there.
    fn list(&self, path: &Path) -> io::Result<StoreListing>;

    /// Its name for people: a protocol and a host.
    fn name(&self) -> Option<String> {
        None
    }

    /// The sha256 of the file at `path` in this `version`, in hexadecimal, if the store knows it without
    /// reading the file. It asks nobody.
    fn sha256(&self, path: &Path, version: &Version) -> Option<String> {
        let _ = (path, version);
        None
    }

    /// Fills `buf` with the bytes at `offset` of the file at `path`. After `until` nobody waits for them.
    ///
    /// # Errors
    /// `StaleNetworkFileHandle` if the file is not there in this `version`, `UnexpectedEof` if it ends
    /// before.
    fn read(
        &self,
        path: &Path,
        version: &Version,
        offset: u64,
        buf: &mut [u8],
        until: Option<Instant>,
    ) -> io::Result<()>;

    /// Reads like `read`, to memory in several places.
    ///
    /// # Errors
    /// The errors of `read`.
    fn read_parts(
        &self,
        path: &Path,
        version: &Version,
        offset: u64,
        parts: &mut MemoryParts<'_>,
        until: Option<Instant>,
    ) -> io::Result<()> {
        let mut bytes = vec![0; parts.len()];
        self.read(path, version, offset, &mut bytes, until)?;
        if parts.write(0, &bytes) { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Fills `buf` like `read`, if the bytes are kept on this machine. Returns whether they are; if not, the contents of
    /// `buf` are unspecified. It asks no server.
    fn read_kept(
        &self,
        path: &Path,
        version: &Version,
        offset: u64,
        buf: &mut [u8],
        until: Option<Instant>,
    ) -> bool {
        let _ = (path, version, offset, buf, until);
        false
    }

    /// A file of this machine with all bytes of the file at `path` in this `version`, and its path. It has
    /// them for as long as it, a duplicate or a mapping is open. `None` if there is none now. It asks no
    /// server, and answers before `until`.
    fn local_copy(
        &self,
        path: &Path,
        version: &Version,
        until: Option<Instant>,
    ) -> Option<(PathBuf, File)> {
        let _ = (path, version, until);
        None
    }

    /// Which credentials requests carry, by the name of where they come from. `None` if it has none.
    fn credentials(&self) -> Option<String> {
        None
    }

    /// Tries how the file at `path`, which is in `version`, is served.
    ///
    /// # Errors
    /// `Unsupported` if there is no server; its refusal, or no answer in time.
    fn probe(&self, path: &Path, version: &Version) -> io::Result<StoreProbe> {
        let _ = (path, version);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Whether `version` tells the bytes of its file from all others that were ever at its path, so that
    /// a copy of them can be kept for other processes.
    fn tells_bytes(&self, _version: &Version) -> bool {
        false
    }
}

/// A folder of a store.
#[derive(Clone, Debug)]
pub struct StoreListing {
    /// The version of the folder.
    pub version: Version,
    /// Names in it, each with the version of the file or folder, or of the link.
    pub entries: Vec<(OsString, Version)>,
    /// Whether names are left out because the store failed to tell their versions.
    pub partial: bool,
}
