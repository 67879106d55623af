//! Writes a file without a name or under a temporary name. The file gets its own name when it is complete.

mod partial;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::libc;
use nix::unistd::linkat;

pub use partial::{PartialFolder, folder_below, partial_path, rename_new, rename_over};

/// The folder that lists the open files of this process. An open file can be linked by its name in this folder.
const OPEN_FILES: &str = "/proc/self/fd";

/// Name of the complete file in a partial folder.
const WHOLE: &str = "whole";

/// Maximum time that a complete file waits for another process that writes the same file.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(10);

/// A file that is being written. If it is dropped before it was published, the file is removed.
#[derive(Debug)]
pub struct TemporaryFile {
    file: File,
    place: Place,
}

/// The place of a file.
#[derive(Debug)]
enum Place {
    /// The file has no name. A partial folder, if there is one, keeps other writers of the same file out.
    Nameless(Option<PartialFolder>),
    /// The file has a name that no other writer uses.
    Path(PathBuf),
    /// The file is the file `WHOLE` of this folder.
    Partial(PartialFolder),
    /// The file has its own name.
    Published,
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if let Place::Path(path) = &self.place {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl TemporaryFile {
    /// Creates the file `path` with `options`, which must say that the file is created. No other writer may use
    /// this name.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn create(path: PathBuf, options: &OpenOptions) -> io::Result<TemporaryFile> {
        Ok(TemporaryFile { file: options.open(&path)?, place: Place::Path(path) })
    }

    /// Creates the file that will later get the name `target`, with the permission bits `mode`, for reading and
    /// writing. If the file system allows it, the file has no name, so that nothing is left behind even if the
    /// process is killed. Otherwise the file is created in a partial folder. A partial folder that a killed
    /// process has left is removed.
    ///
    /// # Errors
    /// If the file cannot be created, or if another process is writing it.
    pub fn create_beside(target: &Path, mode: u32) -> io::Result<TemporaryFile> {
        if let Some(file) = nameless_in(folder_of(target), mode) {
            return Ok(TemporaryFile { file, place: Place::Nameless(None) });
        }
        TemporaryFile::create_claimed(target, mode)
    }

    /// Like `create_beside`, but keeps other writers of `target` out from now on.
    ///
    /// # Errors
    /// The same errors as those of `create_beside`.
    pub fn create_claimed(target: &Path, mode: u32) -> io::Result<TemporaryFile> {
        let folder = PartialFolder::claim(&partial_path(target))?;
        folder.clear()?;
        if let Some(file) = nameless_in(folder_of(target), mode) {
            return Ok(TemporaryFile { file, place: Place::Nameless(Some(folder)) });
        }
        let file = folder.create(WHOLE.as_ref(), mode)?;
        Ok(TemporaryFile { file, place: Place::Partial(folder) })
    }

    /// The file, for writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Keeps the file under the name with which it was created.
    pub fn keep(mut self) {
        self.place = Place::Published;
    }

    /// Gives the file the name `target` in the same folder. If `replace` is true, the file replaces an existing
    /// file of this name. Otherwise an existing file is an error.
    ///
    /// If this succeeds, `target` was this file at that moment, no matter what other processes do.
    ///
    /// # Errors
    /// If `target` cannot be created. The file is then removed when `self` is dropped.
    pub fn publish(&mut self, target: &Path, replace: bool) -> io::Result<()> {
        match &self.place {
            Place::Nameless(claimed) => {
                self.publish_nameless(claimed.as_ref(), target, replace)?;
            }
            Place::Path(path) if replace => std::fs::rename(path, target)?,
            Place::Path(path) => rename_new(&AT_FDCWD, path, &AT_FDCWD, target)?,
            Place::Partial(folder) => take_name(folder, &self.file, target, replace)?,
            Place::Published => {}
        }
        self.place = Place::Published;
        Ok(())
    }

    fn publish_nameless(
        &self,
        claimed: Option<&PartialFolder>,
        target: &Path,
        replace: bool,
    ) -> io::Result<()> {
        let open = name_of_open(&self.file);
        match linkat(AT_FDCWD, &open, AT_FDCWD, target, AtFlags::AT_SYMLINK_FOLLOW) {
            Err(Errno::EEXIST) if replace => {}
            other => return Ok(other?),
        }
        // `linkat` cannot replace a file, so the new file first gets a temporary name, which is then renamed.
        let own;
        let folder = match claimed {
            Some(claimed) => claimed,
            None => {
                own = PartialFolder::claim_within(&partial_path(target), PUBLISH_TIMEOUT)?;
                &own
            }
        };
        folder.clear()?;
        linkat(AT_FDCWD, &open, folder.folder(), WHOLE, AtFlags::AT_SYMLINK_FOLLOW)?;
        take_name(folder, &self.file, target, replace)
    }
}

/// Creates a file without a name in `folder`. Returns `None` if the file system does not support this.
fn nameless_in(folder: &Path, mode: u32) -> Option<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(mode).custom_flags(libc::O_TMPFILE);
    let file = options.open(folder).ok()?;
    name_of_open(&file).exists().then_some(file)
}

/// Gives `file`, which is the file `WHOLE` of `folder`, the name `target` in the folder that contains `folder`.
fn take_name(folder: &PartialFolder, file: &File, target: &Path, replace: bool) -> io::Result<()> {
    let name = Path::new(target.file_name().unwrap_or_default());
    let there = folder.open(WHOLE.as_ref())?.metadata()?;
    let ours = file.metadata()?;
    if (there.dev(), there.ino()) != (ours.dev(), ours.ino()) {
        return Err(io::Error::other("another process has changed the folder of the new file"));
    }
    let publish = if replace { rename_over } else { rename_new };
    publish(folder.folder(), WHOLE.as_ref(), folder.parent(), name)
}

/// Writes the names in `folder` to disk, so that they survive a power failure.
///
/// # Errors
/// If the file system fails.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// The folder that contains `path`.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A path by which an open file can be opened again or linked while it is open.
pub fn name_of_open(file: &File) -> PathBuf {
    Path::new(OPEN_FILES).join(file.as_raw_fd().to_string())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Creates a file of one of the four kinds, which will get the name `target`.
    fn of_kind(kind: usize, target: &Path) -> TemporaryFile {
        match kind {
            0 => TemporaryFile::create_beside(target, 0o600).unwrap(),
            1 => TemporaryFile::create_claimed(target, 0o600).unwrap(),
            2 => {
                let mut options = OpenOptions::new();
                let named = target.with_file_name("new");
                TemporaryFile::create(named, options.write(true).create_new(true)).unwrap()
            }
            _ => {
                let folder = PartialFolder::claim(&partial_path(target)).unwrap();
                let file = folder.create(WHOLE.as_ref(), 0o600).unwrap();
                TemporaryFile { file, place: Place::Partial(folder) }
            }
        }
    }

    #[test]
    fn a_file_has_its_name_once_it_is_published_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        // The longest name that is allowed.
        let target = folder.path().join("a".repeat(255));
        for kind in 0..4 {
            for (number, replace) in [false, false, true].into_iter().enumerate() {
                drop(of_kind(kind, &target));
                let mut file = of_kind(kind, &target);
                file.file().write_all(&[number as u8]).unwrap();
                let published = file.publish(&target, replace);
                let refused = published.err().map(|e| e.kind());
                let taken = number == 1;
                assert_eq!(refused, taken.then_some(io::ErrorKind::AlreadyExists));
                drop(file);
                assert_eq!(names(folder.path()).len(), 1, "kind {kind}");
                let found = std::fs::read(&target).unwrap();
                assert_eq!(found, [if taken { 0 } else { number as u8 }]);
            }
            std::fs::remove_file(&target).unwrap();
        }
    }

    #[test]
    fn writers_of_one_file_at_the_same_time_all_publish_their_own_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        std::thread::scope(|scope| {
            for number in 0..4u8 {
                let target = &target;
                scope.spawn(move || {
                    for _ in 0..50 {
                        let mut file = TemporaryFile::create_beside(target, 0o600).unwrap();
                        file.file().write_all(&[number; 100]).unwrap();
                        file.publish(target, true).unwrap();
                        let found = std::fs::read(target).unwrap();
                        assert!(found.len() == 100 && found.iter().all(|byte| *byte == found[0]));
                    }
                });
            }
        });
        assert_eq!(names(folder.path()), ["out"]);
    }
}
