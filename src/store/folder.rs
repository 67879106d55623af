//! A folder opened by its descriptor. All names and attributes come from this one folder, even if it is renamed
//! or another folder takes its path.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{self, OFlag, OpenHow, ResolveFlag};
use nix::libc;
use nix::sys::stat::Mode;

use crate::source::{StoreListing, lacks_statx, local_version, version_in_folder};
use crate::version::Version;

/// A folder that is open.
#[derive(Debug)]
pub struct OpenFolder {
    folder: File,
    /// The path by which the folder was opened.
    path: PathBuf,
}

const FLAGS: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

impl OpenFolder {
    /// Opens the folder at `path`, which lies in the folder `base`. The path from `base` to the folder must
    /// contain no symbolic link, because someone may have replaced a folder by a link meanwhile.
    ///
    /// # Errors
    /// The errors of open(2). `ELOOP` or `ENOTDIR` if a component of the path is a link.
    pub fn open(base: &Path, path: &Path) -> io::Result<OpenFolder> {
        let rest = path.strip_prefix(base).unwrap_or(path);
        if rest.as_os_str().is_empty() {
            return Ok(OpenFolder::of(fcntl::open(path, FLAGS, Mode::empty())?.into(), path));
        }
        let above = fcntl::open(base, FLAGS.union(OFlag::O_PATH), Mode::empty())?;
        let how = OpenHow::new().flags(FLAGS).resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
        match fcntl::openat2(&above, rest, how) {
            Ok(folder) => Ok(OpenFolder::of(folder.into(), path)),
            // openat2(2) does not exist before Linux 5.6, and some sandboxes forbid it.
            Err(Errno::ENOSYS | Errno::EPERM) => OpenFolder::open_and_compare(base, path),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the folder, and compares its real path with the expected one.
    fn open_and_compare(base: &Path, path: &Path) -> io::Result<OpenFolder> {
        let flags = FLAGS.union(OFlag::O_NOFOLLOW);
        let folder = OpenFolder::of(fcntl::open(path, flags, Mode::empty())?.into(), path);
        let rest = path.strip_prefix(base).unwrap_or(path);
        if fs::canonicalize(folder.here())? == fs::canonicalize(base)?.join(rest) {
            return Ok(folder);
        }
        Err(io::Error::from_raw_os_error(libc::ELOOP))
    }

    fn of(folder: File, path: &Path) -> OpenFolder {
        OpenFolder { folder, path: path.to_owned() }
    }

    /// A path that leads to the open folder wherever the folder is now. In a container without `/proc`, the result is
    /// the path by which the folder was opened.
    fn here(&self) -> PathBuf {
        let here = PathBuf::from(format!("/proc/self/fd/{}", self.folder.as_raw_fd()));
        let inode = |meta: fs::Metadata| local_version(&meta).file();
        let same = fs::metadata(&here)
            .map(inode)
            .is_ok_and(|there| self.folder.metadata().map(inode).is_ok_and(|own| own == there));
        if same { here } else { self.path.clone() }
    }

    /// The version of the folder.
    ///
    /// # Errors
    /// The errors of fstat(2).
    pub fn version(&self) -> io::Result<Version> {
        self.folder.metadata().map(|meta| local_version(&meta))
    }

    /// The names in the folder, sorted.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn list(&self) -> io::Result<Vec<OsString>> {
        // A path in `/proc` would lead to the folder too, but each use of such a path takes the time of several calls.
        let mut folder = Dir::openat(&self.folder, c".", FLAGS, Mode::empty())?;
        let mut names = Vec::new();
        for entry in folder.iter() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(OsStr::from_bytes(name).to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// The version of the folder, and its entries by name. An entry is left out if it was removed meanwhile, or
    /// if its version cannot be read.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn entries(&self) -> io::Result<StoreListing> {
        let (version, names) = (self.version()?, self.list()?);
        let (mut entries, mut partial) = (Vec::with_capacity(names.len()), false);
        for name in names {
            match self.version_of_name(&name) {
                Ok(version) => entries.push((name, version)),
                Err(error) => partial |= error.kind() != io::ErrorKind::NotFound,
            }
        }
        Ok(StoreListing { version, entries, partial })
    }

    /// The version of the entry `name`. If the entry is a link, the version of the link itself.
    ///
    /// # Errors
    /// If there is no such entry.
    pub fn version_of_name(&self, name: &OsStr) -> io::Result<Version> {
        match version_in_folder(&self.folder, name) {
            Err(e) if lacks_statx(&e) => {
                fs::symlink_metadata(self.here().join(name)).map(|meta| local_version(&meta))
            }
            outcome => outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Opening = fn(&Path, &Path) -> io::Result<OpenFolder>;

    #[test]
    fn a_folder_is_opened_unless_a_link_lies_between_it_and_its_base() {
        let temporary = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(temporary.path()).unwrap();
        fs::create_dir_all(root.join("base/a/b")).unwrap();
        fs::write(root.join("base/a/b/file"), "").unwrap();
        std::os::unix::fs::symlink("a", root.join("base/link")).unwrap();
        std::os::unix::fs::symlink("base", root.join("other")).unwrap();
        for open in [OpenFolder::open as Opening, OpenFolder::open_and_compare] {
            for (base, path) in
                [("base", "base/a/b"), ("other", "other/a/b"), ("base/a/b", "base/a/b")]
            {
                let folder = open(&root.join(base), &root.join(path)).unwrap();
                assert_eq!(folder.list().unwrap(), ["file"]);
            }
            for path in ["base/link", "base/link/b", "base/a/b/file", "base/none"] {
                open(&root.join("base"), &root.join(path)).unwrap_err();
            }
        }
    }

    #[test]
    fn an_open_folder_stays_the_same_while_another_takes_its_place() {
        let temporary = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(temporary.path()).unwrap();
        fs::create_dir_all(root.join("a")).unwrap();
        fs::write(root.join("a/file"), "").unwrap();
        let folder = OpenFolder::open(&root, &root.join("a")).unwrap();
        fs::rename(root.join("a"), root.join("b")).unwrap();
        std::os::unix::fs::symlink("/", root.join("a")).unwrap();
        assert_eq!(folder.list().unwrap(), ["file"]);
        assert!(folder.version_of_name("file".as_ref()).unwrap().is_file());
        folder.version_of_name("proc".as_ref()).unwrap_err();
    }
}
