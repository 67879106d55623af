//! Opens files where `/proc` is not mounted, for example in some chroots and sandboxes.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open, openat};
use nix::sys::stat::Mode;

/// Maximum number of tries to open a file that keeps being replaced.
pub(super) const OPEN_TRIES: usize = 10;

pub(super) fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "not a regular file")
}

pub(super) fn leads_elsewhere() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "it leads somewhere else now")
}

/// Opens the regular file at `path` for reading, with additional `flags`. `path` is absolute and without
/// symbolic links. Each folder is opened relative to its parent, and no link is followed. So the file is the
/// one at this path even if others change the path meanwhile.
///
/// With `/proc`, a file is opened through the descriptor that was checked. Without `/proc`, the file is opened a second
/// time, without waiting, and both descriptors are compared. So a FIFO that was put in the place of the file is refused
/// as well.
pub(super) fn open_regular(path: &Path, flags: OFlag) -> io::Result<(File, Metadata)> {
    let here = OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    let (folder, name) = match (path.parent(), path.file_name()) {
        (Some(folder), Some(name)) => (folder_at(folder)?, name),
        _ => return Err(leads_elsewhere()),
    };
    for _ in 0..OPEN_TRIES {
        // While this descriptor is open, no other file can get the inode number.
        let looked_at = File::from(openat(&folder, name, here | OFlag::O_PATH, Mode::empty())?);
        let expected = looked_at.metadata()?;
        if !expected.is_file() {
            return Err(not_regular());
        }
        let reading = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = match openat(&folder, name, here | reading | flags, Mode::empty()) {
            Ok(file) => File::from(file),
            // The file was replaced by a link or a socket, or was deleted.
            Err(Errno::ELOOP | Errno::ENXIO | Errno::ENOENT) => continue,
            Err(e) => return Err(e.into()),
        };
        let opened = file.metadata()?;
        if (opened.dev(), opened.ino()) == (expected.dev(), expected.ino()) {
            // With O_NONBLOCK, io_uring would not wait for the bytes of the file. So the flag is removed.
            fcntl(&file, FcntlArg::F_SETFL(flags))?;
            return Ok((file, opened));
        }
    }
    Err(leads_elsewhere())
}

/// The folder at an absolute path without symbolic links.
fn folder_at(path: &Path) -> io::Result<OwnedFd> {
    let folder = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut components = path.components();
    if components.next() != Some(Component::RootDir) {
        return Err(leads_elsewhere());
    }
    let mut reached = open("/", folder, Mode::empty())?;
    for component in components {
        let Component::Normal(name) = component else { return Err(leads_elsewhere()) };
        reached = match openat(&reached, name, folder, Mode::empty()) {
            // With `O_PATH` and `O_NOFOLLOW` the link itself is opened, and a link is not a folder.
            Err(Errno::ENOTDIR | Errno::ELOOP) => return Err(leads_elsewhere()),
            other => other?,
        };
    }
    Ok(reached)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};

    use nix::libc;

    use super::*;

    #[test]
    fn a_file_is_opened_by_its_path_and_nothing_else_is() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap();
        let folder = root.join("a/b");
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("model.safetensors");
        std::fs::write(&file, b"bytes").unwrap();
        let (opened, meta) = open_regular(&file, OFlag::empty()).unwrap();
        let mut read = [0; 5];
        opened.read_exact_at(&mut read, 0).unwrap();
        assert_eq!((&read, meta.len()), (b"bytes", 5));
        let flags = fcntl(&opened, FcntlArg::F_GETFL).unwrap();
        assert!(!OFlag::from_bits_retain(flags).contains(OFlag::O_NONBLOCK));

        symlink(&folder, root.join("link")).unwrap();
        symlink(&file, folder.join("link.safetensors")).unwrap();
        nix::unistd::mkfifo(&folder.join("fifo.safetensors"), Mode::S_IRWXU).unwrap();
        for (path, why) in [
            (root.join("link/model.safetensors"), "it leads somewhere else now"),
            (folder.join("../b/model.safetensors"), "it leads somewhere else now"),
            (folder.join("link.safetensors"), "not a regular file"),
            (folder.join("fifo.safetensors"), "not a regular file"),
            (folder.clone(), "not a regular file"),
            (folder.join("absent"), "No such file"),
            ("model.safetensors".into(), "it leads somewhere else now"),
        ] {
            let refused = open_regular(&path, OFlag::empty()).unwrap_err();
            assert!(refused.to_string().contains(why), "{}: {refused}", path.display());
        }
    }

    #[test]
    fn flags_for_reads_past_the_page_cache_are_kept() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().canonicalize().unwrap().join("model.safetensors");
        std::fs::write(&file, b"bytes").unwrap();
        let usual = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&file);
        let opened = open_regular(&file, OFlag::O_DIRECT);
        assert_eq!(opened.is_ok(), usual.is_ok());
        if let Ok((opened, _)) = opened {
            let flags = fcntl(&opened, FcntlArg::F_GETFL).unwrap();
            assert!(OFlag::from_bits_retain(flags).contains(OFlag::O_DIRECT));
        }
    }
}
