//! Writes the content of a mount as real files. A file appears complete under its name, or not at all.
//!
//! `Copier::write_file` writes one file, and `Copier::write_folder` writes a tree of files (`Outline`). Both
//! use a bounded amount of memory, however large the tensors are.

mod contents;
mod copy;
mod folder;
mod journal;
mod outline;
mod source_files;
mod target;
mod tensor_writer;
mod tensorizer;

use std::fs::{Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::statvfs::statvfs;

pub use contents::{Contents, TensorDigests, read_tensor};
pub use copy::{Copier, OnBytes, Watch};
pub use outline::{Outline, OutlineContent, OutlineFile, OutlineFolder};
pub use source_files::{SourceFiles, refuse_url};
pub use tensor_writer::{TensorBytes, TensorWriter, WriteAt, WriteKey};
pub use tensorizer::TensorizerFile;

use self::copy::NewPlace;
use self::target::UnalignedTarget;
use crate::atomic_file::{TemporaryFile, folder_of, sync_folder};
use crate::error::{Error, Result, shown_path};
use crate::reader::Reader;
use crate::source::{CopyMode, Source};

/// Length in bytes of the blocks that stat(2) counts.
const STAT_BLOCK_LEN: u64 = 512;

/// Options for writing files.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteOptions {
    /// Whether existing files are replaced.
    pub replace: bool,
    /// Whether the files are read back from the disk and compared.
    pub verify: bool,
    /// Whether other weight files may be in the folders of the new weight files.
    pub beside_others: bool,
}

/// The content of a new file.
#[derive(Clone, Copy)]
pub enum NewFile<'a> {
    /// All bytes of a reader.
    Bytes(&'a Reader),
    /// Tensors, as a tensorizer file with the hashes of the format.
    Tensorizer(&'a TensorizerFile),
}

impl NewFile<'_> {
    fn len(&self) -> u64 {
        match self {
            NewFile::Bytes(reader) => reader.len(),
            NewFile::Tensorizer(file) => file.len(),
        }
    }

    fn sources(&self) -> &[Arc<Source>] {
        match self {
            NewFile::Bytes(reader) => reader.sources(),
            NewFile::Tensorizer(file) => file.sources(),
        }
    }
}

impl Copier {
    /// Writes `content` to a new file `target`. `watch.bytes` gets no bytes of a tensorizer file, because such
    /// a file is not written in order.
    ///
    /// Only users who can read all sources and the replaced file can read the new file. If the call succeeds, `target`
    /// was the new file at some moment, whatever other processes did.
    ///
    /// # Errors
    /// Errors of the sources, of `watch` and of the file system. `Error::Usage` if `target` exists and shall
    /// not be replaced. After an error, the new file is removed completely.
    pub fn write_file(
        &self,
        content: NewFile<'_>,
        target: &Path,
        options: WriteOptions,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let failed = |e| Error::io(target, "write", e);
        let there = replaceable(target, options.replace)?;
        let folder = folder_of(target);
        check_space(folder, target, content.len())?;
        let mut mode = CopyMode::of(content.sources())?;
        if let Some(there) = &there {
            mode.add(there, target);
        }
        let mut partial =
            TemporaryFile::create_claimed(target, mode.in_folder(folder)).map_err(failed)?;
        mode.narrow(partial.file()).map_err(failed)?;
        let place = NewPlace { file: partial.file(), folder, shown: target };
        self.copy_content(content, place, options.verify, watch)?;
        for source in content.sources() {
            source.check()?;
        }
        if let Some(there) = there {
            // The new file gets the mode of the replaced file, so the present umask is not applied.
            mode.set(partial.file(), there.mode()).map_err(failed)?;
            partial.file().sync_all().map_err(failed)?;
        }
        let published = partial.publish(target, options.replace);
        named(target, published.and_then(|()| sync_folder(folder)))
    }
}

impl Copier {
    /// Writes `content` to the new file at `place`.
    fn copy_content(
        &self,
        content: NewFile<'_>,
        place: NewPlace<'_>,
        verify: bool,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        match content {
            NewFile::Bytes(reader) => self.copy(reader, place, verify, watch, None),
            NewFile::Tensorizer(file) => self.copy_tensors(file, place, verify, watch),
        }
    }
}

/// The regular file at `target` that the new file will replace. This is checked again when the new file gets its name.
///
/// # Errors
/// `Error::Usage` if `target` exists and shall not be replaced, or if `target` is neither a file nor a link that can be
/// replaced.
fn replaceable(target: &Path, replace: bool) -> Result<Option<Metadata>> {
    let Ok(there) = std::fs::symlink_metadata(target) else { return Ok(None) };
    if !replace && !there.is_dir() {
        return Err(taken(target));
    }
    // A broken link can be replaced. A link to a device is refused, because the user may have made it on purpose.
    let leads_to_file = || std::fs::metadata(target).ok().is_none_or(|meta| meta.is_file());
    if !(there.is_file() || (there.is_symlink() && leads_to_file())) {
        let what =
            if there.is_dir() { "is a folder" } else { "is neither a regular file nor a link" };
        return Err(in_the_way(target, what));
    }
    Ok(Some(there).filter(Metadata::is_file))
}

/// A new file whose bytes come from memory. It appears complete under its name, or not at all.
#[derive(Debug)]
pub struct MemoryFile {
    target: PathBuf,
    replace: bool,
    partial: TemporaryFile,
    /// The same file, for writes.
    writer: UnalignedTarget,
    /// The mode of the replaced file.
    mode: Option<u32>,
}

impl MemoryFile {
    /// Begins the file `target`. If `replace` is true, it replaces an existing file and gets that file's mode.
    ///
    /// # Errors
    /// Errors of the file system. `Error::Usage` if `target` exists and shall not be replaced.
    pub fn create(target: &Path, replace: bool) -> Result<MemoryFile> {
        let mode = replaceable(target, replace)?.map(|there| there.mode() & 0o7777);
        let failed = |e| Error::io(target, "write", e);
        let partial =
            TemporaryFile::create_beside(target, mode.unwrap_or(0o666) & 0o777).map_err(failed)?;
        let writer = UnalignedTarget::cached(partial.file()).map_err(failed)?;
        Ok(MemoryFile { target: target.to_owned(), replace, partial, writer, mode })
    }

    /// The name that the file will get.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The file, for writes.
    pub fn writer(&self) -> &dyn WriteAt {
        &self.writer
    }

    /// Reserves space for `len` bytes, so that a full disk is reported at once.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn reserve(&mut self, len: u64) -> Result<()> {
        let has = self.partial.file().metadata().map_or(0, |meta| meta.blocks() * STAT_BLOCK_LEN);
        check_space(folder_of(&self.target), &self.target, len.saturating_sub(has))?;
        let reserved = self.writer.reserve(folder_of(&self.target), len);
        reserved.map_err(|e| Error::io(&self.target, "write", e))
    }

    /// Gives the file its name, after its bytes have reached the disk.
    ///
    /// # Errors
    /// Errors of the file system, or `Error::Usage` if the name exists. If the name cannot be given, the new file is
    /// removed. If only the sync of the folder fails, the file keeps its name.
    pub fn publish(mut self) -> Result<()> {
        let MemoryFile { target, replace, partial, mode, .. } = &mut self;
        let set = mode.map(|mode| partial.file().set_permissions(Permissions::from_mode(mode)));
        let synced = set.unwrap_or(Ok(())).and_then(|()| partial.file().sync_all());
        let published = synced.and_then(|()| partial.publish(target, *replace));
        named(target, published.and_then(|()| sync_folder(folder_of(target))))
    }
}

/// The error if a file at `target` exists and shall not be replaced.
fn taken(target: &Path) -> Error {
    let target = shown_path(target);
    Error::usage(format!(
        "{target}: is there already; remove it, or ask to replace it: `--force`, in Python \
         `overwrite=True`"
    ))
}

/// The error if something at `target` exists that can never be replaced.
fn in_the_way(target: &Path, what: &str) -> Error {
    let target = shown_path(target);
    Error::usage(format!("{target}: {what}; remove it, or write somewhere else"))
}

/// Converts the result of giving a file or folder its name. Another program may have taken the name since the
/// last check.
fn named(target: &Path, outcome: io::Result<()>) -> Result<()> {
    outcome.map_err(|e| {
        if e.kind() != io::ErrorKind::AlreadyExists {
            return Error::io(target, "write", e);
        }
        let target = shown_path(target);
        let message = "was made by another program while this one wrote; it is as it was made";
        Error::usage(format!("{target}: {message}"))
    })
}

/// Refuses to write `len` bytes if the file system of `folder` reports less free space.
fn check_space(folder: &Path, target: &Path, len: u64) -> Result<()> {
    let Ok(stat) = statvfs(folder) else { return Ok(()) };
    // Some file systems report no sizes.
    if stat.blocks() == 0 {
        return Ok(());
    }
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    if free >= len {
        return Ok(());
    }
    let message = format!(
        "No space left: {len} bytes are needed, {free} bytes are free, {} bytes are missing",
        len - free
    );
    let error = io::Error::new(io::ErrorKind::StorageFull, message);
    Err(Error::io(target, "write", error))
}
