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

/// The version that a system call reported.
pub fn local_version(meta: &std::fs::Metadata) -> Version {
    let born =
        meta.created().ok().and_then(|born| born.duration_since(SystemTime::UNIX_EPOCH).ok());
    of_local_file(
        (meta.dev(), meta.ino(), born),
        meta.size(),
        (meta.mtime(), meta.mtime_nsec()),
        (meta.ctime(), meta.ctime_nsec()),
        (meta.nlink(), meta.mode(), meta.uid(), meta.gid()),
    )
}

/// The version of a local file with this inode, length, times of the last change of bytes and of
/// attributes, and attributes.
fn of_local_file(
    (dev, ino, born): (u64, u64, Option<Duration>),
    len: u64,
    modified: Time,
    changed: Time,
    (nlink, mode, uid, gid): (u64, u32, u32, u32),
) -> Version {
    // A new file may get the number of a deleted one, but not its creation time.
    let born = born.map_or(0, |born| born.as_nanos() as u64);
    let kind = match mode & libc::S_IFMT {
        libc::S_IFREG => EntryKind::File,
        libc::S_IFDIR => EntryKind::Folder,
        libc::S_IFLNK => EntryKind::Link,
        _ => EntryKind::Special,
    };
    Version {
        len,
        file: FileId { queue: QueueKey::Device(dev), number: [ino, born] },
        kind,
        modified: Some(modified),
        changed: Some(changed),
        attributes: [nlink << 32 | u64::from(mode), u64::from(uid) << 32 | u64::from(gid)],
    }
}

/// The version of the file at `path` now, without following links. For a remote file system the
/// server is asked, not the client's cache.
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

/// The version of the file of this name in the open `folder`, without following links.
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
    let dev = nix::sys::stat::makedev(stat.stx_dev_major.into(), stat.stx_dev_minor.into());
    of_local_file(
        (dev, stat.stx_ino, born),
        stat.stx_size,
        time(stat.stx_mtime),
        time(stat.stx_ctime),
        (stat.stx_nlink.into(), stat.stx_mode.into(), stat.stx_uid, stat.stx_gid),
    )
}

/// The version of an open file, not from the cache of a remote file system's client.
pub(super) fn stat_now(file: &File) -> io::Result<Version> {
    // A client of NFS may have attributes that are a minute old.
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

/// The version of the file at `path` on `file_system`, links not followed.
pub(super) fn stat_path(path: &Path, file_system: FileSystem) -> io::Result<Version> {
    if file_system.is_local() {
        return std::fs::symlink_metadata(path).map(|meta| local_version(&meta));
    }
    version_now(path)
}

/// Whether a sandbox hides statx(2): some answer EPERM for system calls that they do not know.
pub(crate) fn lacks_statx(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM))
}

/// The version of the file `name` in the folder with the descriptor `folder`. With
/// `AT_STATX_FORCE_SYNC` in `flags` the server of a remote file system is asked.
fn statx(folder: i32, name: &CStr, flags: i32) -> io::Result<Version> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    let mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
    // SAFETY: `name` ends with a zero byte, and the kernel writes one `statx` to `found`, which
    // outlives the call.
    let result = unsafe { libc::statx(folder, name.as_ptr(), flags, mask, found.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zeros are a valid `statx`, and the kernel has written over them.
    Ok(of_statx(unsafe { found.assume_init_ref() }))
}
