//! Folders for the large files that the bench writes.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tensorfs::internal::error::shown_path;
use tensorfs::internal::size::shown_size;

use super::space_free;
use super::worker::Trouble;

/// Number of bytes that must stay free.
const SPARE: u64 = 256 << 20;

/// A folder that is removed with its contents on drop, unless `keep` is set.
#[derive(Debug)]
pub(super) struct Scratch {
    path: PathBuf,
    keep: bool,
}

impl Scratch {
    /// Creates a folder in `dir`. Fails if fewer than `bytes` plus `SPARE` bytes are free.
    pub(super) fn new(dir: &Path, bytes: u64, keep: bool) -> Result<Scratch, Trouble> {
        let failed = |e: io::Error| Trouble::Failed(format!("{}: {e}", shown_path(dir)));
        let free = space_free(dir).map_err(failed)?;
        if free < bytes + SPARE {
            return Err(Trouble::Failed(format!(
                "{}: {} are free and {} are needed; give another folder with --dir",
                shown_path(dir),
                shown_size(free),
                shown_size(bytes + SPARE)
            )));
        }
        let path = nix::unistd::mkdtemp(&dir.join("tensorfs-bench-XXXXXX"));
        Ok(Scratch { path: path.map_err(|e| failed(e.into()))?, keep })
    }

    /// Creates a folder in `dir`. Without `dir`, in another folder on the file system of the
    /// shards.
    pub(super) fn beside(
        shards: &[PathBuf],
        dir: Option<&Path>,
        bytes: u64,
        keep: bool,
    ) -> Result<Scratch, Trouble> {
        if let Some(dir) = dir {
            return Scratch::new(dir, bytes, keep);
        }
        let device = |path: &Path| std::fs::metadata(path).map(|meta| meta.dev()).ok();
        let first = shards.first().map(PathBuf::as_path).unwrap_or(Path::new("/"));
        // The folder of the shards itself cannot be used, because the mount shows it.
        let above = first.ancestors().nth(2).map(Path::to_owned);
        let candidates = [Some(std::env::temp_dir()), above];
        let mut reasons = Vec::new();
        for candidate in candidates.into_iter().flatten() {
            if device(&candidate) == device(first) {
                match Scratch::new(&candidate, bytes, keep) {
                    Ok(scratch) => return Ok(scratch),
                    Err(Trouble::Failed(reason)) => reasons.push(reason),
                    Err(other) => return Err(other),
                }
            }
        }
        Err(Trouble::Failed(reasons.pop().unwrap_or_else(|| {
            let place = shown_path(first.parent().unwrap_or(first));
            format!("give a folder on the file system of {place} with --dir")
        })))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if let Err(e) = std::fs::remove_dir_all(&self.path) {
            crate::log::say(&format!("{}: {e}", shown_path(&self.path)));
        }
    }
}
