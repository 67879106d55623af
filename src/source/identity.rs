//! The identity of a local file, which tells one state of it from another.

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

/// Tells one state of a file from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Device.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Length in bytes.
    pub len: u64,
    /// Creation time of the inode, if the file system has it: a new file may reuse the number of a
    /// deleted one.
    born: Option<SystemTime>,
    /// Time of the last change of the bytes, in seconds and nanoseconds.
    pub mtime: (i64, i64),
    ctime: (i64, i64),
    nlink: u64,
    mode: u32,
    owner: (u32, u32),
}

impl Identity {
    /// The identity that a system call reported.
    pub fn of(meta: &std::fs::Metadata) -> Identity {
        Identity {
            dev: meta.dev(),
            ino: meta.ino(),
            len: meta.size(),
            born: meta.created().ok(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
            nlink: meta.nlink(),
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
        }
    }

    /// Time of the last change of bytes or attributes, in seconds and nanoseconds.
    pub fn ctime(&self) -> (i64, i64) {
        self.ctime
    }

    /// Creation time of the inode in nanoseconds since 1970, if the file system has it.
    pub fn born(&self) -> Option<u128> {
        let born = self.born?.duration_since(SystemTime::UNIX_EPOCH);
        born.ok().map(|since| since.as_nanos())
    }

    /// All its numbers, for a process that takes over from this one.
    pub fn to_words(&self) -> [u64; 14] {
        let (born_is_known, born) = self.born().map_or((0, 0), |born| (1, born));
        [
            self.dev,
            self.ino,
            self.len,
            born_is_known,
            (born >> 64) as u64,
            born as u64,
            self.mtime.0 as u64,
            self.mtime.1 as u64,
            self.ctime.0 as u64,
            self.ctime.1 as u64,
            self.nlink,
            u64::from(self.mode),
            u64::from(self.owner.0),
            u64::from(self.owner.1),
        ]
    }

    /// The identity with the numbers of `to_words`.
    pub fn from_words(words: &[u64; 14]) -> Identity {
        let born = u128::from(words[4]) << 64 | u128::from(words[5]);
        let (seconds, nanoseconds) = ((born / 1_000_000_000) as u64, (born % 1_000_000_000) as u32);
        let since = Duration::new(seconds, nanoseconds);
        Identity {
            dev: words[0],
            ino: words[1],
            len: words[2],
            born: (words[3] == 1).then(|| SystemTime::UNIX_EPOCH + since),
            mtime: (words[6] as i64, words[7] as i64),
            ctime: (words[8] as i64, words[9] as i64),
            nlink: words[10],
            mode: words[11] as u32,
            owner: (words[12] as u32, words[13] as u32),
        }
    }

    /// Whether both are states of one inode.
    pub fn same_inode(&self, other: &Identity) -> bool {
        (self.dev, self.ino, self.born) == (other.dev, other.ino, other.born)
    }

    /// Whether the bytes are the same, judged by size and modification time.
    pub fn same_bytes(&self, other: &Identity) -> bool {
        self.same_inode(other) && self.len == other.len && self.mtime == other.mtime
    }

    /// The current identity of the file at `path`, without following links. For a remote file
    /// system the server is asked, not the client's cache.
    ///
    /// # Errors
    /// The errors of statx(2).
    pub fn now(path: &Path) -> io::Result<Identity> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_STATX_FORCE_SYNC;
        match statx(libc::AT_FDCWD, &name, flags) {
            Err(e) if lacks_statx(&e) => {
                std::fs::symlink_metadata(path).map(|meta| Identity::of(&meta))
            }
            outcome => outcome,
        }
    }

    /// The identity of the file of this name in the open `folder`, without following links.
    ///
    /// # Errors
    /// The errors of statx(2).
    pub(crate) fn in_folder(folder: &File, name: &OsStr) -> io::Result<Identity> {
        let name = CString::new(name.as_bytes())?;
        statx(folder.as_raw_fd(), &name, libc::AT_SYMLINK_NOFOLLOW)
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFREG
    }

    /// Whether it is a folder.
    pub fn is_folder(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFDIR
    }

    /// Whether it is a symbolic link.
    pub fn is_link(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFLNK
    }

    /// Whether links, mode or owner differ, which leave the bytes alone.
    pub(super) fn differs_in_attributes(&self, other: &Identity) -> bool {
        (self.nlink, self.mode, self.owner) != (other.nlink, other.mode, other.owner)
    }

    fn of_statx(stat: &libc::statx) -> Identity {
        let time = |time: libc::statx_timestamp| (time.tv_sec, i64::from(time.tv_nsec));
        let birth = stat.stx_btime;
        let born = (stat.stx_mask & libc::STATX_BTIME != 0 && birth.tv_sec >= 0)
            .then(|| SystemTime::UNIX_EPOCH + Duration::new(birth.tv_sec as u64, birth.tv_nsec));
        let device = (u64::from(stat.stx_dev_major), u64::from(stat.stx_dev_minor));
        Identity {
            dev: nix::sys::stat::makedev(device.0, device.1),
            ino: stat.stx_ino,
            len: stat.stx_size,
            born,
            mtime: time(stat.stx_mtime),
            ctime: time(stat.stx_ctime),
            nlink: u64::from(stat.stx_nlink),
            mode: u32::from(stat.stx_mode),
            owner: (stat.stx_uid, stat.stx_gid),
        }
    }
}

/// The identity of an open file, not from the cache of a remote file system's client.
pub(super) fn stat_now(file: &File) -> io::Result<Identity> {
    // A client of NFS may have attributes that are a minute old.
    match statx(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH | libc::AT_STATX_FORCE_SYNC) {
        Err(e) if lacks_statx(&e) => file.metadata().map(|meta| Identity::of(&meta)),
        outcome => outcome,
    }
}

/// The identity of an open file on `file_system`.
pub(super) fn stat_file(file: &File, file_system: FileSystem) -> io::Result<Identity> {
    if file_system.is_local() {
        return file.metadata().map(|meta| Identity::of(&meta));
    }
    stat_now(file)
}

/// The identity of the file at `path` on `file_system`, links not followed.
pub(super) fn stat_path(path: &Path, file_system: FileSystem) -> io::Result<Identity> {
    if file_system.is_local() {
        return std::fs::symlink_metadata(path).map(|meta| Identity::of(&meta));
    }
    Identity::now(path)
}

/// Whether a sandbox hides statx(2): some answer EPERM for system calls that they do not know.
pub(crate) fn lacks_statx(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM))
}

/// The identity of the file `name` in the folder with the descriptor `folder`. With
/// `AT_STATX_FORCE_SYNC` in `flags` the server of a remote file system is asked.
fn statx(folder: i32, name: &CStr, flags: i32) -> io::Result<Identity> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    let mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
    // SAFETY: `name` ends with a zero byte, and the kernel writes one `statx` to `found`, which
    // outlives the call.
    let result = unsafe { libc::statx(folder, name.as_ptr(), flags, mask, found.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zeros are a valid `statx`, and the kernel has written over them.
    Ok(Identity::of_statx(unsafe { found.assume_init_ref() }))
}
