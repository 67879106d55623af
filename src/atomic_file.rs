//! A file that is written under another name, or none, and takes its own name once it is whole.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, Flock, FlockArg};
use nix::libc;
use nix::unistd::linkat;

/// Folder with the names of open files, by which they can be linked.
const OPEN_FILES: &str = "/proc/self/fd";

/// End of the name of a file or folder that is being written.
const PARTIAL_SUFFIX: &str = ".tensorfs-partial";

/// Longest part of a name that `partial_name` keeps: a name has at most 255 bytes.
const NAME_LEN_MAX: usize = 200;

/// A file that is being written. It is removed when it is dropped before it was published.
#[derive(Debug)]
pub struct TemporaryFile {
    file: File,
    /// Its temporary name, if it has one.
    path: Option<PathBuf>,
    /// Held while the file is written, if its name is that of `partial_name`.
    _lock: Option<Flock<File>>,
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl TemporaryFile {
    /// Creates the file `path` by `options`, which have to say that it is created.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn create(path: PathBuf, options: &OpenOptions) -> io::Result<TemporaryFile> {
        Ok(TemporaryFile { file: options.open(&path)?, path: Some(path), _lock: None })
    }

    /// Creates the file that will be `target`, by `options`: without a name if the file system can
    /// do that, so that nothing is left even of a process that is killed. Else with the name of
    /// `partial_name`; one that a killed process has left is removed.
    ///
    /// # Errors
    /// If it cannot be created, or another process is writing it.
    pub fn create_beside(target: &Path, options: &OpenOptions) -> io::Result<TemporaryFile> {
        let nameless = options.clone().custom_flags(libc::O_TMPFILE).open(folder_of(target));
        if let Ok(file) = nameless
            && name_of_open(&file).exists()
        {
            return Ok(TemporaryFile { file, path: None, _lock: None });
        }
        let path = partial_name(target);
        remove_unlocked(&path)?;
        let mut temporary = TemporaryFile::create(path, options.clone().create_new(true))?;
        temporary._lock = lock(temporary.file.try_clone()?)?;
        Ok(temporary)
    }

    /// The file, for writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file the name `target` in the same folder. `replace`: in place of a file of that
    /// name; else such a file is an error.
    ///
    /// # Errors
    /// If `target` cannot be made. The file is removed when `self` is dropped then.
    pub fn publish(&mut self, target: &Path, replace: bool) -> io::Result<()> {
        if self.path.is_none() {
            let open = name_of_open(&self.file);
            let link =
                |path: &Path| linkat(AT_FDCWD, &open, AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW);
            if !replace {
                return Ok(link(target)?);
            }
            let path = partial_name(target);
            remove_unlocked(&path)?;
            link(&path)?;
            self.path = Some(path);
        }
        let Some(path) = &self.path else { return Ok(()) };
        if !replace {
            // A link fails if the name is taken. On file systems without links the check comes just
            // before the new name.
            match std::fs::hard_link(path, target) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(e),
                Err(_) if std::fs::symlink_metadata(target).is_ok() => {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                // Dropping removes the temporary name.
                Ok(()) => return Ok(()),
                Err(_) => {}
            }
        }
        std::fs::rename(path, target)?;
        self.path = None;
        Ok(())
    }
}

/// Makes the names in `folder` survive a loss of power.
///
/// # Errors
/// If the file system fails.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// The folder that `path` lies in.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A name by which an open file can be opened again or linked, while it is open.
pub fn name_of_open(file: &File) -> PathBuf {
    Path::new(OPEN_FILES).join(file.as_raw_fd().to_string())
}

/// The name beside `target` of what becomes it. All processes use the same one, so that one removes
/// what another one that was killed has left.
pub fn partial_name(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().as_bytes();
    let name = &name[..name.len().min(NAME_LEN_MAX)];
    let mut partial = std::ffi::OsString::from(".");
    partial.push(std::ffi::OsStr::from_bytes(name));
    partial.push(PARTIAL_SUFFIX);
    folder_of(target).join(partial)
}

/// Takes the lock that marks `file`, a file or a folder, as being written. `None` if the file
/// system has no locks.
///
/// # Errors
/// If another process has it.
pub fn lock(file: File) -> io::Result<Option<Flock<File>>> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => {
            let busy = "another process is writing it";
            Err(io::Error::new(io::ErrorKind::ResourceBusy, busy))
        }
        Err(_) => Ok(None),
    }
}

/// Removes the file `path` unless a process holds its lock.
fn remove_unlocked(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    match options.open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Ok(file) => drop(lock(file)?),
        // A link or a file of another user: if it cannot be removed, that is the error.
        Err(_) => {}
    }
    std::fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_has_its_name_once_it_is_published_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a");
        let mut options = OpenOptions::new();
        options.write(true);
        let named = || {
            let path = folder.path().join("b");
            TemporaryFile::create(path, options.clone().create_new(true)).unwrap()
        };
        let nameless = || TemporaryFile::create_beside(&target, &options).unwrap();
        for replace in [false, true] {
            for make in [&named as &dyn Fn() -> TemporaryFile, &nameless] {
                drop(make());
                let mut file = make();
                file.file().write_all(b"x").unwrap();
                let taken = target.exists();
                let published = file.publish(&target, replace);
                assert_eq!(published.is_err(), taken && !replace);
                drop(file);
                assert_eq!(names(folder.path()), ["a"]);
            }
        }
        let mut file = named();
        let error = file.publish(&target, false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }
}
