//! Writes a tree of files into a folder.
//!
//! All files are first written into a partial folder. A new folder then gets its name as a whole. If the folder
//! exists, the files get their names one by one after all of them are complete. A killed run leaves the partial
//! folder, and the next run continues in it.

use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::copy::{Copier, NewPlace, Watch};
use super::journal::{Journal, RecordedPart};
use super::outline::{Outline, OutlineContent, OutlineFile};
use super::source_files::{SourceFiles, refuse_url};
use super::{STAT_BLOCK_LEN, WriteOptions, check_space, in_the_way, named, replaceable, taken};
use crate::atomic_file::{
    PartialFolder, folder_below, folder_of, partial_path, rename_new, rename_over,
};
use crate::error::{Error, Result, shown_path};
use crate::format::names::is_of_weights;
use crate::hash::Digest;
use crate::source::CopyMode;

/// If the target folder exists, the partial folder is inside it, and its name is made from this name.
const INNER: &str = "tensorfs";

/// Names in a partial folder. `PARTS` has the files while they are written, under numbers instead of their names, so
/// that no program takes them for complete files. `TREE` has the folders and files under their names.
const PARTS: &str = "parts";
const TREE: &str = "tree";

/// The folder to write to.
#[derive(Clone, Copy)]
struct TargetFolder<'a> {
    out: &'a Path,
    /// Whether the folder existed before.
    exists: bool,
}

/// A file that is written among the parts.
struct NewPart<'a> {
    file: &'a OutlineFile,
    /// Its number among the parts.
    number: usize,
    /// The path that it will get.
    shown: &'a Path,
    /// The file that it replaces.
    replaced: Option<&'a Metadata>,
}

impl Copier {
    /// Writes all folders and files of `outline` to the folder `out`, which is created if necessary. Files with
    /// other names stay in it.
    ///
    /// # Errors
    /// Errors of the sources, of `watch` and of the file system. `Error::Usage` if a file exists and shall not be
    /// replaced, if it is a file of the source, or if other weight files are in the same folder as new weight files.
    /// After an error no new file remains.
    pub fn write_folder(
        &self,
        outline: &Outline,
        out: &Path,
        options: WriteOptions,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        refuse_url(out)?;
        let exists = match std::fs::metadata(out) {
            Ok(meta) if meta.is_dir() => true,
            Ok(_) => return Err(in_the_way(out, "is no folder")),
            Err(_) if std::fs::symlink_metadata(out).is_ok() => {
                return Err(in_the_way(out, "is a link that leads nowhere"));
            }
            Err(_) => false,
        };
        let job = outline.job()?;
        let beside = partial_path(out);
        let mut left = None;
        if exists && std::fs::symlink_metadata(&beside).is_ok() {
            // A killed run has left the partial folder beside `out`. Either `out` is the folder of that run, or someone
            // else has created `out` since.
            let failed = |e| Error::io(out, "write", e);
            let partial = PartialFolder::claim(&beside).map_err(failed)?;
            if Journal::is_of(&partial, job) {
                let parts = Parts::of(partial, job).map_err(failed)?;
                let is_named = |(number, file): (usize, &OutlineFile)| {
                    parts.journal.is_named(number, &out.join(&file.path))
                };
                let are_named = outline.files.iter().enumerate().all(is_named);
                if are_named && !options.verify && !outline.files.is_empty() {
                    return self.all_reused(outline.len_bytes()?, watch);
                }
                left = Some(parts.partial);
            } else {
                left = Some(partial);
            }
        }
        let place = if exists { partial_path(&out.join(INNER)) } else { beside };
        let target = TargetFolder { out, exists };
        let done = self.write_at(outline, &place, job, target, options, watch);
        // The partial folder is kept: the user may remove the folder `out` of someone else, and continue the killed run.
        if let (Err(_), Some(left)) = (&done, &mut left) {
            left.keep();
        }
        done
    }

    /// Writes the files with the partial folder at `place`.
    fn write_at(
        &self,
        outline: &Outline,
        place: &Path,
        job: Digest,
        target: TargetFolder<'_>,
        options: WriteOptions,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        if std::fs::symlink_metadata(place).is_err() {
            check_space(folder_of(place), target.out, outline.len_bytes()?)?;
        }
        let mut parts = Parts::open(place, job).map_err(|e| Error::io(target.out, "write", e))?;
        let done = self.write_parts(outline, &mut parts, target, options, watch);
        done.map_err(|error| parts.kept_after(error))
    }

    fn write_parts(
        &self,
        outline: &Outline,
        parts: &mut Parts,
        target: TargetFolder<'_>,
        options: WriteOptions,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let TargetFolder { out, exists } = target;
        let failed = |e| Error::io(out, "write", e);
        if exists {
            check_names(outline, out, options, &parts.journal)?;
        }
        parts.take_back(outline).map_err(failed)?;
        let len = outline.len_bytes()?.saturating_sub(parts.space(outline.files.len()));
        check_space(folder_of(parts.partial.path()), out, len)?;
        for (number, file) in outline.files.iter().enumerate() {
            let shown = out.join(&file.path);
            if exists && !options.verify && parts.was_part_renamed(number, &shown) {
                self.all_reused(file.content.len_bytes()?, watch)?;
                continue;
            }
            let new_part = NewPart { file, number, shown: &shown, replaced: None };
            self.write_part(new_part, parts, options, watch)?;
        }
        for source in outline.files.iter().flat_map(|file| file.content.sources()) {
            source.check()?;
        }
        parts.note_whole(outline.files.len()).map_err(failed)?;
        if exists {
            parts.publish_files(outline, out, options.replace)
        } else {
            parts.publish_whole(outline, out)
        }
    }

    fn all_reused(&self, len: u64, watch: &mut Watch<'_>) -> Result<()> {
        self.add_reused(len);
        (watch.progress)(len)
    }

    /// Writes `file` to a new file `target`, like `write_file`. Continues where a killed run of the same job
    /// has stopped.
    ///
    /// # Errors
    /// The errors of `write_file`. If the disk is full, the written part is kept.
    pub fn write_one(
        &self,
        file: &OutlineFile,
        target: &Path,
        options: WriteOptions,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        refuse_url(target)?;
        if std::fs::symlink_metadata(partial_path(target)).is_err() {
            replaceable(target, options.replace)?;
            check_space(folder_of(target), target, file.content.len_bytes()?)?;
        }
        let job = Outline { files: vec![file.clone()], ..Outline::default() }.job()?;
        let mut parts =
            Parts::open(&partial_path(target), job).map_err(|e| Error::io(target, "write", e))?;
        if parts.was_part_renamed(0, target) && !options.verify {
            return self.all_reused(file.content.len_bytes()?, watch);
        }
        let done = self.write_alone(file, &mut parts, target, options, watch);
        done.map_err(|error| parts.kept_after(error))
    }

    fn write_alone(
        &self,
        file: &OutlineFile,
        parts: &mut Parts,
        target: &Path,
        options: WriteOptions,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let failed = |e| Error::io(target, "write", e);
        let replace = options.replace || parts.has_made(target);
        let there = replaceable(target, replace)?;
        let len = file.content.len_bytes()?.saturating_sub(parts.space(1));
        check_space(folder_of(target), target, len)?;
        let new_part = NewPart { file, number: 0, shown: target, replaced: there.as_ref() };
        let new = self.write_part(new_part, parts, options, watch)?;
        for source in file.content.sources() {
            source.check()?;
        }
        if let Some(there) = there {
            // The new file gets the mode of the replaced file, so the present umask is not applied.
            let mut mode = CopyMode::of(file.content.sources())?;
            mode.add(&there, target);
            mode.set(&new, there.mode()).map_err(failed)?;
            new.sync_all().map_err(failed)?;
        }
        parts.note_whole(1).map_err(failed)?;
        let publish = if replace { rename_over } else { rename_new };
        let (ours, parent) = (parts.partial.folder(), parts.partial.parent());
        let published = publish(ours, &part(0), parent, name_of(target));
        named(target, published.and_then(|()| parent.sync_all()))
    }

    /// Writes one file among the parts.
    fn write_part(
        &self,
        new_part: NewPart<'_>,
        parts: &mut Parts,
        options: WriteOptions,
        watch: &mut Watch<'_>,
    ) -> Result<File> {
        let NewPart { file, number, shown, replaced } = new_part;
        let failed = |e| Error::io(shown, "write", e);
        let sources = match &file.content {
            OutlineContent::Text(_, made_of) => made_of,
            content => content.sources(),
        };
        let mut mode = CopyMode::of(sources)?;
        if let Some(replaced) = replaced {
            mode.add(replaced, shown);
        }
        let Parts { partial, journal } = parts;
        let folder = partial.path().to_owned();
        let mut part = RecordedPart { partial, journal, number };
        let mut new = part.begin(&self::part(number), mode.in_folder(&folder)).map_err(failed)?;
        mode.narrow(&new).map_err(failed)?;
        let place = NewPlace { file: &new, folder: &folder, shown };
        let reader = file.content.reader()?;
        let copied = match (&file.content, &reader) {
            (_, Some(reader)) => self.copy(reader, place, options.verify, watch, Some(part)),
            (OutlineContent::Tensorizer(tensors), None) => {
                self.copy_tensors(tensors, place, options.verify, watch)
            }
            (OutlineContent::Text(text, _), None) => {
                new.write_all(text).and_then(|()| new.sync_all()).map_err(failed)?;
                (watch.progress)(text.len() as u64)
            }
            (_, None) => return Err(Error::internal("a file to write has no reader")),
        };
        // A tree may have more files than a process may have open.
        sources.iter().for_each(|source| source.release());
        copied.map(|()| new)
    }
}

/// Refuses to write into `out` if files there would be lost, or mixed with the new files. Files that a killed run has
/// made may be replaced, if they are unchanged since.
fn check_names(
    outline: &Outline,
    out: &Path,
    options: WriteOptions,
    journal: &Journal,
) -> Result<()> {
    // The list of the files of the source may need a scan, and in most cases the list is not needed.
    let mut source_files = None;
    for folder in outline.folders.iter().filter(|folder| folder.path != Path::new("")) {
        let there = out.join(&folder.path);
        if std::fs::symlink_metadata(&there).is_ok_and(|meta| !meta.is_dir()) {
            return Err(in_the_way(&there, "is no folder"));
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
            let may_replace = options.replace || journal.is_ours(&meta);
            check_replaced(&there, &meta, source_files, may_replace)?;
        }
        if file.is_weights() && !options.beside_others {
            folders.insert(folder_of(&there).to_owned());
        }
        new.insert(there);
    }
    folders.iter().try_for_each(|folder| refuse_other_weights(folder, &new))
}

/// Refuses to replace the object at `there`, unless it is a file that may be replaced.
fn check_replaced(
    there: &Path,
    meta: &Metadata,
    source_files: &SourceFiles,
    may_replace: bool,
) -> Result<()> {
    if source_files.contains(there) {
        let message = "is a file of the source; write somewhere else";
        return Err(Error::usage(format!("{}: {message}", shown_path(there))));
    }
    if meta.is_dir() {
        return Err(in_the_way(there, "is a folder"));
    }
    if may_replace { Ok(()) } else { Err(taken(there)) }
}

/// Refuses a folder with weight files that are not in `new`.
fn refuse_other_weights(folder: &Path, new: &HashSet<PathBuf>) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    let mut others = entries.filter_map(|entry| Some(entry.ok()?.path()));
    match others.find(|path| is_of_weights(path) && !new.contains(path)) {
        None => Ok(()),
        Some(other) => Err(Error::usage(format!(
            "{}: other weights are there already, and would be read with the new ones; remove \
             them, or write to another folder",
            shown_path(&other)
        ))),
    }
}

/// The path of file `number` in the partial folder.
fn part(number: usize) -> PathBuf {
    Path::new(PARTS).join(number.to_string())
}

/// The files in a partial folder, before they get their names.
struct Parts {
    partial: PartialFolder,
    journal: Journal,
}

impl Parts {
    /// The parts for `job` in the folder `path`: the parts that a killed run has left, or none.
    fn open(path: &Path, job: Digest) -> io::Result<Parts> {
        Parts::of(PartialFolder::claim(path)?, job)
    }

    fn of(partial: PartialFolder, job: Digest) -> io::Result<Parts> {
        let journal = Journal::open(&partial, job)?;
        match partial.make_folder(PARTS.as_ref(), 0o700) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
            _ => Ok(Parts { partial, journal }),
        }
    }

    /// If a killed run has moved parts into the tree of a new folder, moves these files back to the parts.
    fn take_back(&self, outline: &Outline) -> io::Result<()> {
        let (ours, tree) = (self.partial.folder(), Path::new(TREE));
        if folder_below(ours, tree).is_err() {
            return Ok(());
        }
        for (number, file) in outline.files.iter().enumerate() {
            let _ = rename_new(ours, &tree.join(&file.path), ours, &part(number));
        }
        self.partial.remove(tree)
    }

    /// Number of bytes that the first `count` parts take on the disk.
    fn space(&self, count: usize) -> u64 {
        let metas = (0..count).filter_map(|number| self.meta(number).ok());
        metas.map(|meta| (meta.blocks() * STAT_BLOCK_LEN).min(meta.len())).sum()
    }

    fn meta(&self, number: usize) -> io::Result<Metadata> {
        self.partial.open(&part(number))?.metadata()
    }

    /// Whether a killed run of this job has moved the part to its name, `path`.
    fn was_part_renamed(&self, number: usize, path: &Path) -> bool {
        self.journal.is_named(number, path) && self.meta(number).is_err()
    }

    /// Whether a killed run has created the file at `path`, and the file is unchanged since.
    fn has_made(&self, path: &Path) -> bool {
        std::fs::symlink_metadata(path).is_ok_and(|meta| self.journal.is_ours(&meta))
    }

    /// Records the first `count` parts as complete, before they get their names.
    fn note_whole(&mut self, count: usize) -> io::Result<()> {
        for number in 0..count {
            // A part that is missing in the partial folder has got its name already.
            if let Ok(meta) = self.meta(number) {
                self.journal.add_whole(number, &meta);
            }
        }
        self.journal.sync(&self.partial)
    }

    /// If the disk is full, keeps the parts for a later run, and the error says so. If this run was refused, keeps the
    /// parts of a killed run.
    fn kept_after(&mut self, error: Error) -> Error {
        let kind = match &error {
            Error::Io { source, .. } => source.kind(),
            Error::Usage { .. } if self.journal.is_continued => {
                self.partial.keep();
                return error;
            }
            _ => return error,
        };
        let is_full = matches!(kind, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        if !is_full || !self.journal.has_progress() {
            return error;
        }
        self.partial.keep();
        let Error::Io { uri, action, source } = error else { return error };
        let partial = shown_path(self.partial.path());
        let message = format!(
            "{source}; {partial} keeps what is written: once there is space, the same command goes on \
             from there; or remove it"
        );
        Error::Io { uri, action, source: io::Error::new(kind, message) }
    }

    /// Gives all files their names in a new tree, and then gives the tree the name `out`, which must not exist.
    fn publish_whole(&self, outline: &Outline, out: &Path) -> Result<()> {
        let failed = |e: io::Error| Error::io(out, "write", e);
        let (ours, tree) = (self.partial.folder(), Path::new(TREE));
        for folder in &outline.folders {
            let made = self.partial.make_folder(&in_tree(tree, &folder.path), folder.mode | 0o700);
            made.map_err(failed)?;
        }
        for (number, file) in outline.files.iter().enumerate() {
            rename_new(ours, &part(number), ours, &tree.join(&file.path)).map_err(failed)?;
        }
        for folder in outline.folders.iter().rev() {
            let folder = folder_below(ours, &tree.join(&folder.path));
            folder.and_then(|folder| folder.sync_all()).map_err(failed)?;
        }
        let name = Path::new(out.file_name().unwrap_or_default());
        named(out, rename_new(ours, tree, self.partial.parent(), name))?;
        self.partial.parent().sync_all().map_err(failed)
    }

    /// Moves all files to the folder `out`. Weights are moved last, so that a program that finds them also
    /// finds the other files.
    fn publish_files(&self, outline: &Outline, out: &Path, replace: bool) -> Result<()> {
        let mut made = Vec::new();
        let published = self.move_files(outline, out, replace, &mut made);
        if published.is_err() {
            // Replaced files cannot be restored, but new files are removed.
            for (path, kind) in made.into_iter().rev() {
                let folder = folder_below(self.partial.parent(), folder_of(path));
                let _ = folder.map(|folder| unlinkat(&folder, name_of(path), kind));
            }
        }
        published
    }

    fn move_files<'a>(
        &self,
        outline: &'a Outline,
        out: &Path,
        replace: bool,
        made: &mut Vec<(&'a Path, UnlinkatFlags)>,
    ) -> Result<()> {
        self.make_folders(outline, out, made)?;
        let mut files: Vec<(usize, &OutlineFile)> = outline.files.iter().enumerate().collect();
        files.sort_by_key(|(_, file)| file.is_weights());
        for (number, file) in files {
            let to = out.join(&file.path);
            if self.was_part_renamed(number, &to) {
                continue;
            }
            let is_new = std::fs::symlink_metadata(&to).is_err();
            let may_replace = !is_new && (replace || self.has_made(&to));
            self.move_file(number, file, &to, may_replace)?;
            if is_new {
                made.push((&file.path, UnlinkatFlags::NoRemoveDir));
            }
        }
        for folder in outline.folders.iter().rev() {
            let there = folder_below(self.partial.parent(), &folder.path);
            there
                .and_then(|there| there.sync_all())
                .map_err(|e| Error::io(out.join(&folder.path), "write", e))?;
        }
        Ok(())
    }

    /// Creates the folders that `out` does not have. Each is opened without following links, which another user
    /// may have put there.
    fn make_folders<'a>(
        &self,
        outline: &'a Outline,
        out: &Path,
        made: &mut Vec<(&'a Path, UnlinkatFlags)>,
    ) -> Result<()> {
        let root = self.partial.parent();
        for folder in outline.folders.iter().filter(|folder| folder.path != Path::new("")) {
            let failed = |e| Error::io(out.join(&folder.path), "write", e);
            let above = folder_below(root, folder_of(&folder.path)).map_err(failed)?;
            let mode = Mode::from_bits_retain(folder.mode | 0o700);
            match mkdirat(&above, name_of(&folder.path), mode).map_err(io::Error::from) {
                Ok(()) => made.push((&folder.path, UnlinkatFlags::RemoveDir)),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(failed(e)),
            }
            folder_below(&above, name_of(&folder.path)).map_err(failed)?;
        }
        Ok(())
    }

    /// Moves file `number` to its name `to`. The folder is opened without following links.
    fn move_file(&self, number: usize, file: &OutlineFile, to: &Path, replace: bool) -> Result<()> {
        let failed = |e| Error::io(to, "write", e);
        let folder = folder_below(self.partial.parent(), folder_of(&file.path)).map_err(failed)?;
        let rename = if replace { rename_over } else { rename_new };
        named(to, rename(self.partial.folder(), &part(number), &folder, name_of(&file.path)))
    }
}

/// `path` below `root`, without the slash that `join` adds for an empty path.
fn in_tree(root: &Path, path: &Path) -> PathBuf {
    if path.as_os_str().is_empty() { root.to_owned() } else { root.join(path) }
}

fn name_of(path: &Path) -> &Path {
    Path::new(path.file_name().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Tree;
    use crate::io::Settings;
    use crate::open_options::OpenOptions;

    fn outline() -> Outline {
        let source = Path::new("tests/fixtures/hf/three_shards");
        Outline::of(&Tree::scan(source, &OpenOptions::default()).unwrap()).unwrap()
    }

    /// Leaves the parts of a run that was killed after the first `count` files got their names in `out`.
    fn kill_after(
        count: usize,
        copier: &Copier,
        outline: &Outline,
        out: &Path,
        progress: Progress,
    ) {
        let place = partial_path(&out.join(INNER));
        let mut parts = Parts::open(&place, outline.job().unwrap()).unwrap();
        let mut watch = Watch { progress, bytes: None };
        for (number, file) in outline.files.iter().enumerate() {
            let shown = out.join(&file.path);
            let new_part = NewPart { file, number, shown: &shown, replaced: None };
            copier.write_part(new_part, &mut parts, WriteOptions::default(), &mut watch).unwrap();
        }
        parts.note_whole(outline.files.len()).unwrap();
        for (number, file) in outline.files.iter().enumerate().take(count) {
            let (ours, root) = (parts.partial.folder(), parts.partial.parent());
            rename_new(ours, &part(number), root, &file.path).unwrap();
        }
        parts.partial.keep();
    }

    type Progress<'a> = &'a mut dyn FnMut(u64) -> Result<()>;

    #[test]
    fn a_publication_that_was_killed_is_finished_and_files_that_the_user_made_since_stay() {
        let copier = Copier::new(Settings::default());
        let outline = outline();
        assert!(outline.files.len() > 1);
        let write = |out: &Path, outline: &Outline| {
            let mut watch = Watch { progress: &mut |_| Ok(()), bytes: None };
            copier.write_folder(outline, out, WriteOptions::default(), &mut watch)
        };
        let home = tempfile::tempdir().unwrap();
        let good = home.path().join("good");
        write(&good, &outline).unwrap();
        for count in 0..=outline.files.len() {
            let out = home.path().join(count.to_string());
            std::fs::create_dir(&out).unwrap();
            kill_after(count, &copier, &outline, &out, &mut |_| Ok(()));
            // The user changes a file that has its name already, or makes a file with a name that is still free.
            let mine = out.join(&outline.files[count.saturating_sub(1)].path);
            let theirs = std::fs::read(&mine).ok();
            std::fs::write(&mine, "mine").unwrap();
            for _ in 0..2 {
                let refused = write(&out, &outline).unwrap_err().to_string();
                assert!(refused.contains("is there already"), "{refused}");
                assert_eq!(std::fs::read(&mine).unwrap(), b"mine");
            }
            std::fs::remove_file(&mine).unwrap();
            assert_eq!(theirs.is_some(), count > 0);
            let before = copier.reused();
            write(&out, &outline).unwrap();
            assert!(count > 0 || copier.reused() > before);
            for file in &outline.files {
                let bytes = |folder: &Path| std::fs::read(folder.join(&file.path)).unwrap();
                assert!(bytes(&out) == bytes(&good), "{count}: {}", file.path.display());
            }
            assert!(!partial_path(&out.join(INNER)).exists());
            // Without the journal of that run, the files count as files of the user.
            assert!(write(&out, &outline).is_err());
        }
    }

    #[test]
    fn a_publication_that_was_killed_is_finished_where_its_files_are_written_again_to_verify_them()
    {
        let copier = Copier::new(Settings::default());
        let outline = outline();
        let home = tempfile::tempdir().unwrap();
        for count in 1..=outline.files.len() {
            let out = home.path().join(count.to_string());
            std::fs::create_dir(&out).unwrap();
            kill_after(count, &copier, &outline, &out, &mut |_| Ok(()));
            let mut watch = Watch { progress: &mut |_| Ok(()), bytes: None };
            let options = WriteOptions { verify: true, ..WriteOptions::default() };
            copier.write_folder(&outline, &out, options, &mut watch).unwrap();
        }
    }

    #[test]
    fn files_that_a_killed_run_of_another_job_has_named_are_replaced_without_being_asked() {
        let copier = Copier::new(Settings::default());
        let outline = outline();
        let home = tempfile::tempdir().unwrap();
        kill_after(1, &copier, &outline, home.path(), &mut |_| Ok(()));
        let mut other = outline.clone();
        other.folders.clear();
        let mut watch = Watch { progress: &mut |_| Ok(()), bytes: None };
        let written = copier.write_folder(&other, home.path(), WriteOptions::default(), &mut watch);
        written.unwrap();
        assert_eq!(copier.reused(), 0);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), outline.files.len());
    }

    #[test]
    fn what_a_killed_run_wrote_outlives_a_refusal_of_a_folder_that_was_made_since() {
        let copier = Copier::new(Settings::default());
        let outline = outline();
        let home = tempfile::tempdir().unwrap();
        let out = home.path().join("out");
        let mut watch = Watch { progress: &mut |_| Ok(()), bytes: None };
        let mut parts = Parts::open(&partial_path(&out), outline.job().unwrap()).unwrap();
        let options = WriteOptions::default();
        let new_part = NewPart { file: &outline.files[0], number: 0, shown: &out, replaced: None };
        copier.write_part(new_part, &mut parts, options, &mut watch).unwrap();
        parts.partial.keep();
        drop(parts);
        let mut other = outline.clone();
        other.folders.clear();
        for job in [&outline, &other] {
            std::fs::create_dir(&out).unwrap();
            std::fs::write(out.join("other.safetensors"), "mine").unwrap();
            let refused = copier.write_folder(job, &out, options, &mut watch).unwrap_err();
            assert!(refused.to_string().contains("other weights are there already"), "{refused}");
            std::fs::remove_dir_all(&out).unwrap();
        }
        copier.write_folder(&outline, &out, options, &mut watch).unwrap();
        assert!(copier.reused() > 0 && !partial_path(&out).exists());
        // A folder with these files exists, so the next run removes what is left of the killed one.
        let mut parts = Parts::open(&partial_path(&out), outline.job().unwrap()).unwrap();
        parts.partial.keep();
        drop(parts);
        std::fs::remove_dir_all(&out).unwrap();
        std::fs::create_dir(&out).unwrap();
        copier.write_folder(&outline, &out, options, &mut watch).unwrap();
        assert!(!partial_path(&out).exists());
    }

    #[test]
    fn a_new_folder_that_took_its_name_before_the_kill_is_done() {
        let copier = Copier::new(Settings::default());
        let outline = outline();
        let home = tempfile::tempdir().unwrap();
        let out = home.path().join("out");
        let mut watch = Watch { progress: &mut |_| Ok(()), bytes: None };
        let job = outline.job().unwrap();
        let mut parts = Parts::open(&partial_path(&out), job).unwrap();
        let options = WriteOptions::default();
        let target = TargetFolder { out: &out, exists: false };
        copier.write_parts(&outline, &mut parts, target, options, &mut watch).unwrap();
        parts.partial.keep();
        drop(parts);
        copier.write_folder(&outline, &out, options, &mut watch).unwrap();
        assert!(copier.reused() > 0 && !partial_path(&out).exists());
        assert!(copier.write_folder(&outline, &out, options, &mut watch).is_err());
    }
}
