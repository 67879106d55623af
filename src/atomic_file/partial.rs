//! A partial folder: the folder beside a file or folder that is being written. It contains the parts until they
//! get their final names.
//!
//! The name of the partial folder is derived from the name of the target, so that a run can take over the
//! partial folder of a run that was killed. The lock in the folder keeps two runs apart. All operations use the
//! descriptor of the folder: a user who can rename the folder can neither add a part nor redirect one.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, Flock, FlockArg, OFlag, RenameFlags, openat, renameat2};
use nix::sys::stat::{Mode, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, geteuid, linkat, unlinkat};

use super::folder_of;
use crate::error::shown_path;
use crate::hash::Digest;

/// Suffix of the name of a partial folder.
const SUFFIX: &str = ".tensorfs-partial";

/// The name of the partial folder begins with at most this number of bytes of the target's name. A name may have at
/// most 255 bytes, and on some file systems at most 143.
const NAME_LEN_MAX: usize = 72;

/// The file that is locked in place of the folder, because network file systems cannot lock folders.
const LOCK: &str = "lock";

/// A file that is created and removed at once, to find out which owner the file system gives to new files.
const PROBE: &str = "probe";

/// The flags with which folders are opened.
const FOLDER: OFlag =
    OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// Interval between attempts to get a lock that another process holds.
const LOCK_INTERVAL: Duration = Duration::from_millis(5);

/// A partial folder that this process has locked. When this value is dropped, the folder is removed, unless
/// `keep` was called.
#[derive(Debug)]
pub struct PartialFolder {
    path: PathBuf,
    parent: File,
    folder: File,
    is_kept: bool,
    _lock: Option<Flock<File>>,
}

impl Drop for PartialFolder {
    fn drop(&mut self) {
        if self.is_kept || remove_all_in(&self.folder, Some(LOCK)).is_err() {
            return;
        }
        // From here on, a process that waits for the folder can create a new lock file and lock it.
        let _ = unlinkat(&self.folder, LOCK, UnlinkatFlags::NoRemoveDir);
        let _ = unlinkat(&self.parent, self.name(), UnlinkatFlags::RemoveDir);
    }
}

impl PartialFolder {
    /// Creates the folder at `path`. If a killed process has left this folder, takes it over with everything in it.
    ///
    /// # Errors
    /// If another process is writing there, or if other users could have put files into the folder.
    pub fn claim(path: &Path) -> io::Result<PartialFolder> {
        let parent = File::open(folder_of(path))?;
        let name = path.file_name().unwrap_or_default();
        loop {
            let is_new = match mkdirat(&parent, name, Mode::from_bits_retain(0o700)) {
                Ok(()) => true,
                Err(Errno::EEXIST) => false,
                Err(e) => return Err(e.into()),
            };
            let folder = match openat(&parent, name, FOLDER, Mode::empty()) {
                Err(Errno::ENOENT) => continue,
                Err(Errno::ENOTDIR | Errno::ELOOP) => {
                    return Err(foreign(path, "is not a folder"));
                }
                Err(Errno::EACCES) => {
                    let why = "is closed to this user";
                    return Err(of_another(path, why));
                }
                other => File::from(other?),
            };
            check_owner(&folder, path)?;
            let lock_flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let file = match openat(&folder, LOCK, lock_flags, Mode::from_bits_retain(0o600)) {
                Err(Errno::ENOENT) => continue,
                other => File::from(other?),
            };
            let held = inode(&file)?;
            let lock = lock(file)?;
            if lock.is_none() && !is_new {
                let why = "is there, and the file system has no locks to tell whether another process \
                           writes it or was killed";
                return Err(foreign(path, why));
            }
            // In the meantime, the previous owner of the lock may have removed or renamed the folder.
            if inode_at(&parent, name) == Some(inode(&folder)?)
                && inode_at(&folder, OsStr::new(LOCK)) == Some(held)
            {
                let path = path.to_owned();
                return Ok(PartialFolder { path, parent, folder, is_kept: false, _lock: lock });
            }
        }
    }

    /// Like `claim`, but waits up to `limit` for another process.
    ///
    /// # Errors
    /// The same errors as those of `claim`.
    pub fn claim_within(path: &Path, limit: Duration) -> io::Result<PartialFolder> {
        let started = Instant::now();
        loop {
            match PartialFolder::claim(path) {
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy && started.elapsed() < limit => {
                    std::thread::sleep(LOCK_INTERVAL);
                }
                other => return other,
            }
        }
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The descriptor of the folder.
    pub fn folder(&self) -> &File {
        &self.folder
    }

    /// The folder that contains this folder.
    pub fn parent(&self) -> &File {
        &self.parent
    }

    /// Keeps the folder for a later run when this value is dropped.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Removes everything in the folder except the lock.
    ///
    /// # Errors
    /// The errors of the file system.
    pub fn clear(&self) -> io::Result<()> {
        remove_all_in(&self.folder, Some(LOCK))
    }

    /// Removes the file or folder `name` from the folder, if it exists.
    ///
    /// # Errors
    /// The errors of the file system.
    pub fn remove(&self, name: &Path) -> io::Result<()> {
        remove_at(&self.folder, name)
    }

    /// Waits until the name of the folder and the names in it are on disk.
    ///
    /// # Errors
    /// The errors of the file system.
    pub fn sync(&self) -> io::Result<()> {
        self.folder.sync_all()?;
        self.parent.sync_all()
    }

    /// Creates the folder `name` in this folder.
    ///
    /// # Errors
    /// If the folder cannot be created, or if the name exists already.
    pub fn make_folder(&self, name: &Path, mode: u32) -> io::Result<()> {
        Ok(mkdirat(&self.folder, name, Mode::from_bits_retain(mode))?)
    }

    /// Creates the new file `name` in the folder, for reading and writing.
    ///
    /// # Errors
    /// If the file cannot be created, or if the name exists already.
    pub fn create(&self, name: &Path, mode: u32) -> io::Result<File> {
        self.open_as(name, OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL, mode)
    }

    /// Opens the file `name` in the folder. It must be a regular file without another name.
    ///
    /// # Errors
    /// If there is no such file.
    pub fn open(&self, name: &Path) -> io::Result<File> {
        let file = self.open_as(name, OFlag::O_RDWR | OFlag::O_NONBLOCK, 0)?;
        let meta = file.metadata()?;
        if !meta.is_file() || meta.nlink() != 1 {
            return Err(io::Error::other("not a regular file with one name"));
        }
        Ok(file)
    }

    fn open_as(&self, name: &Path, flags: OFlag, mode: u32) -> io::Result<File> {
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(openat(&self.folder, name, flags, Mode::from_bits_retain(mode))?.into())
    }

    fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }
}

/// The path of the partial folder for `target`, which is beside `target`.
pub fn partial_path(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().as_bytes();
    let mut partial = OsString::from(".");
    partial.push(OsStr::from_bytes(&name[..name.len().min(NAME_LEN_MAX)]));
    if name.len() > NAME_LEN_MAX {
        partial.push(format!("-{}", Digest::of(name)));
    }
    partial.push(SUFFIX);
    folder_of(target).join(partial)
}

/// Renames the file or folder `from` in the folder `from_in` to `to` in the folder `to_in`. The new name must
/// not exist.
///
/// # Errors
/// If the new name exists, and the errors of the file system.
pub fn rename_new(
    from_in: &impl AsFd,
    from: &Path,
    to_in: &impl AsFd,
    to: &Path,
) -> io::Result<()> {
    match renameat2(from_in, from, to_in, to, RenameFlags::RENAME_NOREPLACE) {
        Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => {}
        other => return Ok(other?),
    }
    // The file system does not support a rename that fails if the new name exists. `linkat` fails in this case too.
    match linkat(from_in, from, to_in, to, AtFlags::empty()) {
        Ok(()) => return Ok(unlinkat(from_in, from, UnlinkatFlags::NoRemoveDir)?),
        Err(Errno::EEXIST) => return Err(Errno::EEXIST.into()),
        // `from` is a folder, or the file system does not support links. The name is checked immediately before
        // the rename.
        Err(_) => {}
    }
    if fstatat(to_in, to, AtFlags::AT_SYMLINK_NOFOLLOW).is_ok() {
        return Err(Errno::EEXIST.into());
    }
    rename_over(from_in, from, to_in, to)
}

/// Renames the file `from` in the folder `from_in` to `to` in the folder `to_in`. An existing file of this name
/// is replaced.
///
/// # Errors
/// The errors of the file system.
pub fn rename_over(
    from_in: &impl AsFd,
    from: &Path,
    to_in: &impl AsFd,
    to: &Path,
) -> io::Result<()> {
    Ok(nix::fcntl::renameat(from_in, from, to_in, to)?)
}

/// Opens the folder `path` below `root` without following links.
///
/// # Errors
/// If a part of the path is not a folder, and the errors of the file system.
pub fn folder_below(root: &impl AsFd, path: &Path) -> io::Result<File> {
    let mut folder = openat(root, ".", FOLDER, Mode::empty())?;
    for part in path {
        folder = openat(&folder, part, FOLDER, Mode::empty())?;
    }
    Ok(folder.into())
}

/// Locks `file`, which marks that this process is writing. `None` if the file system has no locks.
fn lock(file: File) -> io::Result<Option<Flock<File>>> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => {
            let busy = "another process is writing it";
            Err(io::Error::new(io::ErrorKind::ResourceBusy, busy))
        }
        Err(_) => Ok(None),
    }
}

/// Returns an error if other users could have put files into the folder.
fn check_owner(folder: &File, path: &Path) -> io::Result<()> {
    let meta = folder.metadata()?;
    let is_open = meta.mode() & 0o022 != 0;
    if meta.uid() == geteuid().as_raw() && !is_open {
        return Ok(());
    }
    // Some file systems show other owners and modes than those that the process sets. So the owner and the mode of a
    // new file are compared with those of the folder. They are read through the descriptor, so nobody can replace the
    // file meanwhile.
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let _ = unlinkat(folder, PROBE, UnlinkatFlags::NoRemoveDir);
    let made = openat(folder, PROBE, flags, Mode::from_bits_retain(0o600));
    let new = made.map(File::from).ok().and_then(|file| file.metadata().ok());
    let _ = unlinkat(folder, PROBE, UnlinkatFlags::NoRemoveDir);
    let has_our_owner = new.as_ref().is_some_and(|new| new.uid() == meta.uid());
    let has_no_modes = new.is_some_and(|new| new.mode() & 0o022 != 0);
    match () {
        () if !has_our_owner => {
            let why = format!("belongs to user {}, not to this one", meta.uid());
            Err(of_another(path, &why))
        }
        () if is_open && !has_no_modes => {
            let mode = meta.mode() & 0o7777;
            let why = format!("has the mode {mode:o}, by which others could have filled it");
            Err(foreign(path, &why))
        }
        () => Ok(()),
    }
}

fn foreign(path: &Path, why: &str) -> io::Error {
    refused(path, why, "remove it, or write somewhere else")
}

/// The error for a folder that this user may not be able to remove, for example in `/tmp`.
fn of_another(path: &Path, why: &str) -> io::Error {
    let advice = "write somewhere else, or under another name; only that user and root may remove it \
                  from a folder like /tmp";
    refused(path, why, advice)
}

fn refused(path: &Path, why: &str, advice: &str) -> io::Error {
    let message = format!("{} {why}; {advice}", shown_path(path));
    io::Error::new(io::ErrorKind::PermissionDenied, message)
}

/// Device number and inode number.
fn inode(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|meta| (meta.dev(), meta.ino()))
}

fn inode_at(folder: &File, name: &OsStr) -> Option<(u64, u64)> {
    let stat = fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Removes everything in `folder` except the file `kept`.
fn remove_all_in(folder: &File, kept: Option<&str>) -> io::Result<()> {
    let mut names = Vec::new();
    for entry in Dir::openat(folder, ".", FOLDER, Mode::empty())?.iter() {
        let name = OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned();
        if name != "." && name != ".." && kept.is_none_or(|kept| name != kept) {
            names.push(name);
        }
    }
    names.iter().try_for_each(|name| remove_at(folder, Path::new(name)))
}

/// Removes the file or folder `name` in `folder`, if it exists.
fn remove_at(folder: &File, name: &Path) -> io::Result<()> {
    match unlinkat(folder, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(Errno::EISDIR | Errno::EPERM) => {
            let inner = openat(folder, name, FOLDER, Mode::empty())?;
            remove_all_in(&inner.into(), None)?;
            Ok(unlinkat(folder, name, UnlinkatFlags::RemoveDir)?)
        }
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn claimed(path: &Path) -> PartialFolder {
        PartialFolder::claim(path).unwrap()
    }

    #[test]
    fn one_process_has_the_folder_and_the_next_one_has_what_it_left() {
        let home = tempfile::tempdir().unwrap();
        let path = partial_path(&home.path().join("out"));
        let mut first = claimed(&path);
        let busy = PartialFolder::claim(&path).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
        drop(first.create(Path::new("part"), 0o600).unwrap());
        first.keep();
        drop(first);
        let second = claimed(&path);
        assert!(second.open(Path::new("part")).is_ok());
        drop(second);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn many_threads_take_turns_and_leave_nothing() {
        let home = tempfile::tempdir().unwrap();
        let path = partial_path(&home.path().join("out"));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let limit = Duration::from_secs(60);
                        let folder = PartialFolder::claim_within(&path, limit).unwrap();
                        // If another thread had the folder too, creating the file would fail.
                        drop(folder.create(Path::new("part"), 0o600).unwrap());
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_others_could_have_filled_is_refused_and_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let path = partial_path(&home.path().join("out"));
        let refused = |why: &str| {
            let error = PartialFolder::claim(&path).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        let make = |mode: u32| {
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("part"), "planted").unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        };
        make(0o770);
        refused("the mode 770, by which others");
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
        if geteuid().is_root() {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
            std::os::unix::fs::chown(&path, Some(5001), None).unwrap();
            refused("belongs to user 5001, not to this one; write somewhere else");
            assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
        }
        std::fs::remove_dir_all(&path).unwrap();
        let other = home.path().join("other");
        std::fs::create_dir(&other).unwrap();
        symlink(&other, &path).unwrap();
        refused("is not a folder");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "file").unwrap();
        refused("is not a folder");
    }

    #[test]
    fn a_part_that_is_a_link_or_has_two_names_is_not_opened() {
        let home = tempfile::tempdir().unwrap();
        let folder = claimed(&partial_path(&home.path().join("out")));
        let victim = home.path().join("victim");
        std::fs::write(&victim, "victim").unwrap();
        symlink(&victim, folder.path().join("link")).unwrap();
        std::fs::hard_link(&victim, folder.path().join("second")).unwrap();
        for name in ["link", "second", "none"] {
            assert!(folder.open(Path::new(name)).is_err(), "{name}");
        }
        for name in ["link", "second"] {
            assert!(folder.create(Path::new(name), 0o600).is_err(), "{name}");
        }
        drop(folder);
        assert_eq!(std::fs::read(&victim).unwrap(), b"victim");
    }

    #[test]
    fn long_names_that_begin_alike_have_folders_of_their_own_with_names_that_fit() {
        let names = ["a".repeat(255), "a".repeat(254), format!("{}b", "a".repeat(254))];
        let mut paths: Vec<PathBuf> =
            names.iter().map(|name| partial_path(name.as_ref())).collect();
        assert!(paths.iter().all(|path| path.file_name().unwrap().len() <= 143));
        paths.dedup();
        assert_eq!(paths.len(), names.len());
        assert_eq!(partial_path("x/out".as_ref()), Path::new("x/.out.tensorfs-partial"));
    }
}
