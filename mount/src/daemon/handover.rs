//! The state of a mount, which is handed to the process that takes over the mount.
//!
//! The state is a sealed file in memory. It has a header, facts as JSON, and bytes to which the
//! facts refer. The file is handed over together with the connection and a parcel of the source's
//! open files.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use tensorfs::internal::error::shown_path;

use super::connection::FuseInit;
use super::descriptors::Parcel;
use super::read_path::ReadPath;
use super::server::KernelServer;
use crate::fs::adapter::takeover::{Carried, CarriedFs};
use crate::options::Options;

/// First bytes of a state file.
const MAGIC: &[u8; 8] = b"TFSSTATE";

/// Size in bytes of the header: magic, version and length of the facts.
const HEADER: usize = 24;

/// Version of the state format. It increases with every change of the format.
const VERSION: u64 = 5;

/// Maximum size of a state, in bytes.
const STATE_MAX: u64 = 1 << 30;

/// The version of the state format that this program writes and understands.
pub(crate) fn state_version() -> u64 {
    // Tests use this variable to simulate a program of another version.
    let forced = std::env::var("TENSORFS_STATE_VERSION").ok();
    forced.and_then(|version| version.parse().ok()).unwrap_or(VERSION)
}

/// A mount that is being handed to another process.
#[derive(Debug)]
pub(crate) struct Handed {
    /// The connection to the kernel.
    pub(crate) connection: OwnedFd,
    /// The file with the state.
    pub(crate) state: OwnedFd,
    /// Open files of the source, in the order in which the state refers to them.
    pub(crate) files: Parcel,
}

/// The source, target and options as the user gave them. A process takes over only a mount for
/// which these are equal.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(super) struct MountIdentity {
    source: OsString,
    target: OsString,
    options: String,
}

impl MountIdentity {
    pub(super) fn of(source: &Path, target: &Path, options: &Options) -> MountIdentity {
        let options = options.to_json().to_string();
        MountIdentity { source: source.into(), target: target.into(), options }
    }
}

/// Facts about a mount that stay the same in every process that serves it.
#[derive(Clone, Deserialize, Serialize)]
pub(crate) struct MountRecord {
    pub(super) mount: MountIdentity,
    /// The path that the mount reads.
    pub(super) read: ReadPath,
    /// The mount point, absolute.
    pub(super) target: OsString,
    /// Whether `fusermount3` made the mount.
    pub(super) by_fusermount: bool,
    /// Minor number of the mount's device.
    pub(super) minor: Option<u32>,
}

#[derive(Deserialize, Serialize)]
struct Facts {
    #[serde(flatten)]
    mount: MountRecord,
    handshake: FuseInit,
    fs: CarriedFs,
}

/// The state of a mount that this process is going to take over.
pub(crate) struct Received {
    pub(crate) connection: OwnedFd,
    pub(crate) mount: MountRecord,
    pub(crate) handshake: FuseInit,
    fs: CarriedFs,
    contents: Vec<u8>,
    files: Parcel,
}

/// Hands over a mount that this process serves. All clones refer to the same mount.
#[derive(Clone)]
pub(crate) struct Giver {
    pub(super) server: KernelServer,
    pub(super) mount: MountRecord,
}

impl Giver {
    /// Waits until `stop` and `give` can run without waiting for the source, at most for `limit`.
    /// Returns whether they can.
    pub(crate) fn prepare(&self, limit: Duration) -> bool {
        self.server.prepare_to_stop(limit)
    }

    /// Stops serving, and returns the state for the next process. Requests wait in the kernel until
    /// that process serves or `resume` is called.
    ///
    /// # Errors
    /// If the mount cannot be handed over now. Then this process continues to serve it.
    pub(crate) fn stop(&self) -> io::Result<Handed> {
        self.server.stop()?;
        let handed = self.write(self.server.fs().carry()).and_then(|(state, files)| {
            let connection = self.server.connection().try_clone()?;
            Ok(Handed { connection, state, files: Parcel::pack(files)? })
        });
        if handed.is_err() {
            self.server.resume()?;
        }
        handed
    }

    /// Continues to serve after `stop`, because no other process has taken over.
    ///
    /// # Errors
    /// If the connection has ended.
    pub(crate) fn resume(&self) -> io::Result<()> {
        self.server.resume()
    }

    /// Ends the service after `stop`, because another process serves the mount now. Calls `tell` once
    /// this process may end.
    pub(crate) fn give(&self, tell: impl FnOnce()) {
        self.server.give(tell);
    }

    fn write(&self, carried: Carried) -> io::Result<(OwnedFd, Vec<OwnedFd>)> {
        let Carried { facts: fs, contents, files } = carried;
        let facts = serde_json::to_vec(&Facts {
            mount: self.mount.clone(),
            handshake: self.server.handshake().clone(),
            fs,
        })?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let mut state = File::from(memfd_create(c"tensorfs-state", flags)?);
        state.write_all(MAGIC)?;
        state.write_all(&state_version().to_le_bytes())?;
        state.write_all(&(facts.len() as u64).to_le_bytes())?;
        state.write_all(&facts)?;
        state.write_all(&contents)?;
        let seals = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
        fcntl(&state, FcntlArg::F_ADD_SEALS(seals))?;
        Ok((state.into(), files))
    }
}

impl Received {
    /// Reads a state that a `Giver` wrote, for a mount of `source` on `target` with `options`.
    ///
    /// # Errors
    /// One line with the reason why the state cannot be used.
    pub(crate) fn read(
        handed: Handed,
        source: &Path,
        target: &Path,
        options: &Options,
    ) -> Result<Received, String> {
        let Handed { connection, state, files } = handed;
        let (facts, contents) = parse(&File::from(state))?;
        let Facts { mount, handshake, fs } = facts;
        if mount.mount != MountIdentity::of(source, target, options) {
            let MountIdentity { source, target, .. } = mount.mount;
            let (source, target) = (shown_path(source.as_ref()), shown_path(target.as_ref()));
            return Err(format!(
                "it was a mount of {source} on {target} with other options or paths"
            ));
        }
        Ok(Received { connection, mount, handshake, fs, contents, files })
    }

    /// Returns the state of the file system with the open files. From now on, this process has
    /// these files open, so its end may wait for their file systems. If this process starts a
    /// program, that start may wait for them too.
    ///
    /// # Errors
    /// If no descriptor is free.
    pub(super) fn unpack(self) -> io::Result<(OwnedFd, FuseInit, Carried)> {
        let Received { connection, handshake, fs, contents, files, .. } = self;
        Ok((connection, handshake, Carried { facts: fs, contents, files: files.unpack()? }))
    }
}

fn parse(state: &File) -> Result<(Facts, Vec<u8>), String> {
    let unreadable = |e: io::Error| format!("the state cannot be read: {e}");
    let len = state.metadata().map_err(unreadable)?.len();
    if !(HEADER as u64..=STATE_MAX).contains(&len) {
        return Err(format!("the state has {len} bytes"));
    }
    // The writer may still have the file open. The seal ensures that the file does not change while
    // it is parsed.
    let seals = fcntl(state, FcntlArg::F_GET_SEALS).unwrap_or(0);
    if !SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_WRITE) {
        return Err("the state is not sealed".to_owned());
    }
    let mut bytes = vec![0; len as usize];
    state.read_exact_at(&mut bytes, 0).map_err(unreadable)?;
    let word =
        |index: usize| bytes[index * 8..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    if &bytes[..8] != MAGIC {
        return Err("the state is not one of tensorfs".to_owned());
    }
    let (found, ours) = (word(1), state_version());
    if found != ours {
        return Err(format!(
            "the running version keeps its state in version {found}, this one reads version {ours}"
        ));
    }
    let facts_len = word(2);
    let end = HEADER.checked_add(facts_len as usize);
    let text = end
        .and_then(|end| bytes.get(HEADER..end))
        .ok_or_else(|| format!("the state has no {facts_len} bytes of facts"))?;
    let facts_end = HEADER + text.len();
    let facts = serde_json::from_slice(text).map_err(|e| format!("the state is wrong: {e}"))?;
    bytes.drain(..facts_end);
    Ok((facts, bytes))
}

impl Handed {
    /// All descriptors: the connection, the state, and the two ends of the parcel.
    pub(crate) fn into_descriptors(self) -> [OwnedFd; 4] {
        let [read, write] = self.files.into_descriptors();
        [self.connection, self.state, read, write]
    }

    /// Restores the value from the descriptors of `into_descriptors`. `None` if there are more or
    /// fewer of them.
    pub(crate) fn from_descriptors(all: Vec<OwnedFd>) -> Option<Handed> {
        let [connection, state, read, write] = all.try_into().ok()?;
        // fuser does not accept the descriptor numbers of the standard streams.
        debug_assert!(connection.as_raw_fd() > 2);
        Some(Handed { connection, state, files: Parcel::from_descriptors([read, write]) })
    }
}
