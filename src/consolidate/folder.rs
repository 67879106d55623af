//! Writes a tree of files into a folder.
//!
//! All files are written into a partial folder first. A new folder takes its name whole. The files of
//! a folder that exists take their names one by one, once all of them are whole.

use std::collections::HashSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, Flock, RenameFlags, renameat2};
use nix::libc;

use super::copy::{Copier, Watch};
use super::outline::{Outline, OutlineContent, OutlineFile, is_weights};
use super::{NewFile, WriteOptions, check_space, taken};
use crate::atomic_file::{folder_of, lock, partial_name, sync_folder};
use crate::error::{Error, Result, shown_path};
use crate::source::CopyMode;

/// Name of the partial folder in a folder that exists.
const INNER: &str = "tensorfs";

/// Names in a partial folder: the files while they are written, by number, so that nobody takes them
/// for whole ones; the folders and files under their names; the mark that files begin to take their
/// names in a folder that exists.
const PARTS: &str = "parts";
const TREE: &str = "tree";
const PUBLISHING: &str = "publishing";

impl Copier {
    /// Writes all folders and files of `outline` to the folder `out`, which is created if it does not
    /// exist. Files of other names stay in it.
    ///
    /// # Errors
    /// Errors of the sources, of `watch` and of the file system; `Error::Usage` if a file exists and
    /// is not to be replaced, if it is a file of the source, or if other weight files would lie beside
    /// the new ones. After an error nothing new is left.
    pub fn write_folder(
        &self,
        outline: &Outline,
        out: &Path,
        options: WriteOptions,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let exists = match std::fs::metadata(out) {
            Ok(meta) if meta.is_dir() => true,
            Ok(_) => return Err(taken(out)),
            // A broken link.
            Err(_) if std::fs::symlink_metadata(out).is_ok() => return Err(taken(out)),
            Err(_) => false,
        };
        let place = if exists { partial_name(&out.join(INNER)) } else { partial_name(out) };
        let failed = |e| Error::io(out, "write", e);
        let beside = partial_name(out);
        if exists && std::fs::symlink_metadata(&beside).is_ok() {
            // A process was killed after the folder took its name.
            drop(PartialFolder::claim(beside).map_err(failed)?);
        }
        let partial = PartialFolder::claim(place).map_err(failed)?;
        let replace = options.replace || partial.interrupted;
        if exists {
            check_names(outline, out, WriteOptions { replace, ..options })?;
        }
        check_space(folder_of(&partial.path), out, outline.len_bytes()?)?;
        partial.empty().map_err(failed)?;
        for (number, file) in outline.files.iter().enumerate() {
            self.write_part(file, &partial.part(number), &out.join(&file.path), options, watch)?;
        }
        for source in outline.files.iter().flat_map(|file| file.content.sources()) {
            source.check()?;
        }
        if exists {
            partial.publish_files(outline, out, replace)
        } else {
            partial.publish_whole(outline, out)
        }
    }

    /// Writes one file to `place` in the partial folder. `shown` is its later name.
    fn write_part(
        &self,
        file: &OutlineFile,
        place: &Path,
        shown: &Path,
        options: WriteOptions,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let failed = |e| Error::io(shown, "write", e);
        let folder = folder_of(place);
        let mut file_options = OpenOptions::new();
        file_options.read(true).write(true).create_new(true);
        let reader = file.content.reader()?;
        let content = match (&file.content, &reader) {
            (_, Some(reader)) => NewFile::Bytes(reader),
            (OutlineContent::Tensorizer(tensors), None) => NewFile::Tensorizer(tensors),
            (OutlineContent::Text(text), None) => {
                let mut new = file_options.open(place).map_err(failed)?;
                new.write_all(text).and_then(|()| new.sync_all()).map_err(failed)?;
                return (watch.progress)(text.len() as u64);
            }
            (_, None) => return Err(Error::internal("a file to write has no reader")),
        };
        let mode = CopyMode::of(content.sources())?;
        let new = file_options.mode(mode.in_folder(folder)).open(place).map_err(failed)?;
        mode.narrow(&new).map_err(failed)?;
        let copied = self.copy_content(content, (&new, folder, shown), options.verify, watch);
        // A tree may have more files than a process may have open.
        content.sources().iter().for_each(|source| source.release());
        copied
    }
}

/// Refuses to write into `out` if files there would be lost, or would be mixed with the new ones.
fn check_names(outline: &Outline, out: &Path, options: WriteOptions) -> Result<()> {
    // They may have to be scanned, and are mostly not needed.
    let mut source_files = None;
    for folder in outline.folders.iter().filter(|folder| folder.path != Path::new("")) {
        let there = out.join(&folder.path);
        if std::fs::symlink_metadata(&there).is_ok_and(|meta| !meta.is_dir()) {
            return Err(taken(&there));
        }
    }
    let mut new: HashSet<PathBuf> = HashSet::new();
    let mut folders: HashSet<PathBuf> = HashSet::new();
    for file in &outline.files {
        let there = out.join(&file.path);
        if let Ok(meta) = std::fs::symlink_metadata(&there) {
            let source_files = match &mut source_files {
                Some(found) => found,
                none => none.insert(outline.files_to_keep()?),
            };
            if source_files.contains(&there) {
                let there = shown_path(&there);
                let message = "is a file of the source; write somewhere else";
                return Err(Error::usage(format!("{there}: {message}")));
            }
            if meta.is_dir() || !options.replace {
                return Err(taken(&there));
            }
        }
        if file.is_weights() && !options.beside_others {
            folders.insert(folder_of(&there).to_owned());
        }
        new.insert(there);
    }
    for folder in folders {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        let mut others = entries.filter_map(|entry| Some(entry.ok()?.path()));
        if let Some(other) = others.find(|path| is_weights(path) && !new.contains(path)) {
            return Err(Error::usage(format!(
                "{}: other weights are there already, and would be read with the new ones; remove \
                 them, or write to another folder",
                shown_path(&other)
            )));
        }
    }
    Ok(())
}

/// The folder that files are written into before they take their names. It is removed when it is
/// dropped.
struct PartialFolder {
    path: PathBuf,
    /// Whether an earlier process was killed while files took their names.
    interrupted: bool,
    _lock: Option<Flock<File>>,
}

impl Drop for PartialFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl PartialFolder {
    /// Makes the folder `path`, empty, or takes over the one that a killed process left.
    fn claim(path: PathBuf) -> io::Result<PartialFolder> {
        loop {
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
            let mut options = OpenOptions::new();
            options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY);
            let folder = match options.open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            };
            let held = folder.metadata()?;
            let lock = lock(folder)?;
            // The process that had the lock may have renamed the folder meanwhile.
            let now = std::fs::symlink_metadata(&path);
            if now.is_ok_and(|now| (now.dev(), now.ino()) == (held.dev(), held.ino())) {
                let interrupted = path.join(PUBLISHING).exists();
                return Ok(PartialFolder { path, interrupted, _lock: lock });
            }
        }
    }

    /// Removes what a killed process left, but for the mark, which stays until its files are
    /// replaced.
    fn empty(&self) -> io::Result<()> {
        for name in [PARTS, TREE] {
            match std::fs::remove_dir_all(self.path.join(name)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        std::fs::create_dir(self.path.join(PARTS))
    }

    /// The place of file `number` while it is written.
    fn part(&self, number: usize) -> PathBuf {
        self.path.join(PARTS).join(number.to_string())
    }

    /// Gives all files their names in a new folder, and that the name `out`, which no file has.
    fn publish_whole(self, outline: &Outline, out: &Path) -> Result<()> {
        let failed = |e| Error::io(out, "write", e);
        let tree = self.path.join(TREE);
        for folder in &outline.folders {
            let mode = folder.mode | 0o700;
            DirBuilder::new().mode(mode).create(in_tree(&tree, &folder.path)).map_err(failed)?;
        }
        for (number, file) in outline.files.iter().enumerate() {
            std::fs::rename(self.part(number), tree.join(&file.path)).map_err(failed)?;
        }
        for folder in outline.folders.iter().rev() {
            sync_folder(&tree.join(&folder.path)).map_err(failed)?;
        }
        match rename_new(&tree, out) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(taken(out)),
            other => other.map_err(failed)?,
        }
        sync_folder(folder_of(out)).map_err(failed)
    }

    /// Moves all files to the folder `out`: weights last, so that
    /// a program that finds the weights finds the other files too.
    fn publish_files(self, outline: &Outline, out: &Path, replace: bool) -> Result<()> {
        let failed = |e| Error::io(out, "write", e);
        let mark = File::create(self.path.join(PUBLISHING));
        mark.and_then(|mark| mark.sync_all()).map_err(failed)?;
        sync_folder(&self.path).map_err(failed)?;
        let mut made = Vec::new();
        let published = self.move_files(outline, out, replace, &mut made);
        if published.is_err() {
            // Replaced files cannot come back; new ones are removed.
            for path in made.iter().rev() {
                let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir(path));
            }
        }
        published
    }

    fn move_files(
        &self,
        outline: &Outline,
        out: &Path,
        replace: bool,
        made: &mut Vec<PathBuf>,
    ) -> Result<()> {
        for folder in outline.folders.iter().filter(|folder| folder.path != Path::new("")) {
            let there = out.join(&folder.path);
            match DirBuilder::new().mode(folder.mode | 0o700).create(&there) {
                Ok(()) => made.push(there),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && there.is_dir() => {}
                Err(e) => return Err(Error::io(&there, "write", e)),
            }
        }
        let mut files: Vec<(usize, &OutlineFile)> = outline.files.iter().enumerate().collect();
        files.sort_by_key(|(_, file)| file.is_weights());
        for (number, file) in files {
            let (from, to) = (self.part(number), out.join(&file.path));
            let is_new = std::fs::symlink_metadata(&to).is_err();
            let moved = if replace && !is_new {
                std::fs::rename(from, &to)
            } else {
                rename_new(&from, &to)
            };
            match moved {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(taken(&to)),
                other => other.map_err(|e| Error::io(&to, "write", e))?,
            }
            if is_new {
                made.push(to);
            }
        }
        for folder in outline.folders.iter().rev() {
            let folder = out.join(&folder.path);
            sync_folder(&folder).map_err(|e| Error::io(&folder, "write", e))?;
        }
        Ok(())
    }
}

/// `path` below `root`, without the slash that joining an empty path adds.
fn in_tree(root: &Path, path: &Path) -> PathBuf {
    if path.as_os_str().is_empty() { root.to_owned() } else { root.join(path) }
}

/// Renames a file or folder to a name that must be free.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        // The file system has no such rename: the check comes just before.
        Err(Errno::EINVAL | Errno::ENOSYS) => {
            if std::fs::symlink_metadata(to).is_ok() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            std::fs::rename(from, to)
        }
        other => Ok(other?),
    }
}
