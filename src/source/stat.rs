//! The versions of local files, as the kernel reports them.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::libc;

use super::file_system::FileSystem;
use crate::version::{EntryKind, FileId, QueueKey, Time, Version};

/// The version in the metadata that a system call returned.
pub fn local_version(meta: &std::fs::Metadata) -> Version {
    let born =
        meta.created().ok().and_then(|born| born.duration_since(SystemTime::UNIX_EPOCH).ok());
    let stat = LocalStat {
        dev: meta.dev(),
        ino: meta.ino(),
        born,
        len: meta.size(),
        modified: (meta.mtime(), meta.mtime_nsec()),
        changed: (meta.ctime(), meta.ctime_nsec()),
        nlink: meta.nlink(),
        mode: meta.mode(),
        uid: meta.uid(),
        gid: meta.gid(),
    };
    stat.version()
}

/// The metadata of a local file.
struct LocalStat {
    dev: u64,
    ino: u64,
    /// Time of creation since 1970, if the file system records it.
    born: Option<Duration>,
    len: u64,
    /// Time of the last change of the bytes.
    modified: Time,
    /// Time of the last change of the attributes.
    changed: Time,
    nlink: u64,
    mode: u32,
    uid: u32,
    gid: u32,
}

impl LocalStat {
    fn version(&self) -> Version {
        // A new file can get the inode number of a deleted file, but not its creation time.
        let born = self.born.map_or(0, |born| born.as_nanos() as u64);
        let kind = match self.mode & libc::S_IFMT {
            libc::S_IFREG => EntryKind::File,
            libc::S_IFDIR => EntryKind::Folder,
            libc::S_IFLNK => EntryKind::Link,
            _ => EntryKind::Special,
        };
        let mode = self.nlink << 32 | u64::from(self.mode);
        let owner = u64::from(self.uid) << 32 | u64::from(self.gid);
        Version {
            len: self.len,
            file: FileId { queue: QueueKey::Device(self.dev), number: [self.ino, born] },
            kind,
            modified: Some(self.modified),
            changed: Some(self.changed),
            attributes: [mode, owner],
        }
    }
}

/// The current version of the file at `path`. Links are not followed. On a remote file system this asks the
/// server and bypasses the client's cache.
///
/// # Errors
/// The errors of statx(2).
pub(crate) fn version_now(path: &Path) -> io::Result<Version> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_STATX_FORCE_SYNC;
    match statx(libc::AT_FDCWD, &name, flags) {
        Err(e) if lacks_statx(&e) => {
            std::fs::symlink_metadata(path).map(|meta| local_version(&meta))
        }
        outcome => outcome,
    }
}

/// The version of the entry `name` of the open `folder`. Links are not followed.
///
/// # Errors
/// The errors of statx(2).
pub(crate) fn version_in_folder(folder: &File, name: &OsStr) -> io::Result<Version> {
    let name = CString::new(name.as_bytes())?;
    statx(folder.as_raw_fd(), &name, libc::AT_SYMLINK_NOFOLLOW)
}

fn of_statx(stat: &libc::statx) -> Version {
    let time = |time: libc::statx_timestamp| (time.tv_sec, i64::from(time.tv_nsec));
    let birth = stat.stx_btime;
    let born = (stat.stx_mask & libc::STATX_BTIME != 0 && birth.tv_sec >= 0)
        .then(|| Duration::new(birth.tv_sec as u64, birth.tv_nsec));
    let local = LocalStat {
        dev: nix::sys::stat::makedev(stat.stx_dev_major.into(), stat.stx_dev_minor.into()),
        ino: stat.stx_ino,
        born,
        len: stat.stx_size,
        modified: time(stat.stx_mtime),
        changed: time(stat.stx_ctime),
        nlink: stat.stx_nlink.into(),
        mode: stat.stx_mode.into(),
        uid: stat.stx_uid,
        gid: stat.stx_gid,
    };
    local.version()
}

/// The current version of an open file. On a remote file system this asks the server and bypasses the client's cache.
pub(super) fn stat_now(file: &File) -> io::Result<Version> {
    // The attributes in the cache of an NFS client can be a minute old.
    match statx(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH | libc::AT_STATX_FORCE_SYNC) {
        Err(e) if lacks_statx(&e) => file.metadata().map(|meta| local_version(&meta)),
        outcome => outcome,
    }
}

/// The version of an open file on `file_system`.
pub(super) fn stat_file(file: &File, file_system: FileSystem) -> io::Result<Version> {
    if file_system.is_local() {
        return file.metadata().map(|meta| local_version(&meta));
    }
    stat_now(file)
}

/// The version of the file at `path` on `file_system`. Links are not followed.
pub(super) fn stat_path(path: &Path, file_system: FileSystem) -> io::Result<Version> {
    if file_system.is_local() {
        return std::fs::symlink_metadata(path).map(|meta| local_version(&meta));
    }
    version_now(path)
}

/// Whether the error means that statx(2) is not available. Old kernels return ENOSYS, and some sandboxes EPERM.
pub(crate) fn lacks_statx(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM))
}

/// The version of the file `name` in the folder with the descriptor `folder`. If `flags` contains
/// `AT_STATX_FORCE_SYNC`, the kernel requests the version from the server of a remote file system.
fn statx(folder: i32, name: &CStr, flags: i32) -> io::Result<Version> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    let mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
    // SAFETY: `name` ends with a zero byte. The kernel writes one `statx` structure to `found`, which outlives
    // the call.
    let result = unsafe { libc::statx(folder, name.as_ptr(), flags, mask, found.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: an all-zero `statx` is valid, and the kernel has filled it.
    Ok(of_statx(unsafe { found.assume_init_ref() }))
}
