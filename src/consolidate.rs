//! Writes a checkpoint as one real file, which appears whole under its name, or not at all.
//!
//! It takes a few windows of memory, however large the tensors are. If the file system supports it,
//! the file has no name until it is whole, so that nothing is left even if the process is killed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use crate::atomic_file::{TemporaryFile, folder_of, sync_folder};
use crate::error::{Error, Result, shown_path};
use crate::reader::Reader;
use crate::source::CopyMode;

/// Bytes read and written at a time.
const WINDOW_LEN: u64 = 8 << 20;

/// Windows that may be read before they are written.
const WINDOWS_AHEAD: usize = 2;

/// Writes all bytes of `reader` to a new file `target`, or replaces an existing one if `replace` is
/// set. Calls `each` with the bytes of every window in turn. An error of `each` ends the work.
///
/// Only users who may read all sources and the replaced file may read the new file.
///
/// # Errors
/// Errors of the sources, of `each` and of the file system, and `Error::Usage` if `target` exists.
/// After an error nothing is left of the file.
pub fn write(
    reader: &Reader,
    target: &Path,
    replace: bool,
    each: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let failed = |e| Error::io(target, "write", e);
    // This early check saves the work. The link checks again.
    let there = std::fs::symlink_metadata(target).ok();
    if let Some(there) = &there {
        if !replace {
            return Err(taken(target));
        }
        // A broken link can be replaced. A link to a device may be intended, so it is refused.
        let leads_to_file = || std::fs::metadata(target).ok().is_none_or(|meta| meta.is_file());
        let replaceable = there.is_file() || (there.is_symlink() && leads_to_file());
        if !replaceable {
            let reason = io::Error::other("neither a regular file nor a link is there");
            return Err(failed(reason));
        }
    }
    let mut mode = CopyMode::of(reader.sources())?;
    let there = there.filter(std::fs::Metadata::is_file);
    if let Some(there) = &there {
        mode.add(there, target);
    }
    let folder = folder_of(target);
    let mut options = OpenOptions::new();
    options.write(true).mode(mode.in_folder(folder));
    let mut partial = TemporaryFile::create_in(folder, &options).map_err(failed)?;
    mode.narrow(partial.file()).map_err(failed)?;
    reserve(partial.file(), reader.len()).map_err(failed)?;
    std::thread::scope(|scope| {
        let (sender, windows) = sync_channel(WINDOWS_AHEAD);
        scope.spawn(move || read_windows(reader, &sender));
        write_windows(&windows, &mut |window| {
            each(window)?;
            partial.file().write_all(window).map_err(failed)
        })
    })?;
    for source in reader.sources() {
        source.check()?;
    }
    if let Some(there) = there {
        // The replaced file had this mode, whatever the umask is now.
        mode.set(partial.file(), there.mode()).map_err(failed)?;
    }
    partial.file().sync_all().map_err(failed)?;
    match partial.publish(target, replace).and_then(|()| sync_folder(folder)) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(taken(target)),
        other => other.map_err(failed),
    }
}

fn taken(target: &Path) -> Error {
    let target = shown_path(target);
    Error::usage(format!("{target}: is there already; remove it, or ask to replace it (--force)"))
}

/// Reads the file window by window until its end, an error, or until the receiver is gone.
fn read_windows(reader: &Reader, windows: &SyncSender<Result<Vec<u8>>>) {
    let mut offset = 0;
    while offset < reader.len() {
        let mut window = vec![0; WINDOW_LEN.min(reader.len() - offset) as usize];
        let read = reader.read_at(offset, &mut window).map(|_| window);
        offset += WINDOW_LEN;
        if read.is_err() {
            offset = reader.len();
        }
        if windows.send(read).is_err() {
            return;
        }
    }
}

fn write_windows(
    windows: &Receiver<Result<Vec<u8>>>,
    each: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    windows.iter().try_for_each(|window| each(&window?))
}

/// Reserves space for `len` bytes, so that a full disk is reported at once.
fn reserve(file: &File, len: u64) -> io::Result<()> {
    let len = i64::try_from(len).map_err(io::Error::other)?;
    match fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, len.max(1)) {
        Err(e @ (Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG)) => Err(e.into()),
        // Not all file systems support it.
        _ => Ok(()),
    }
}
