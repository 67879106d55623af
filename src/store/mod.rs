//! Where sources lie: a store lists folders, finds versions and opens sources. Today each is the
//! local file system.

pub mod folder;
pub mod resolve;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Result;
use crate::source::{Identity, Source, Version};

use folder::OpenFolder;

/// A place that holds sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Store {
    /// The file systems of this machine.
    #[default]
    Local,
}

impl Store {
    /// `path`, absolute and without links.
    ///
    /// # Errors
    /// Where nothing is there, or a folder on the way cannot be read.
    pub fn real_path(self, path: &Path) -> io::Result<PathBuf> {
        let Store::Local = self;
        fs::canonicalize(path)
    }

    /// The names in a folder, sorted.
    ///
    /// # Errors
    /// Where there is no such folder, or it cannot be read.
    pub fn list(self, folder: &Path) -> io::Result<Vec<OsString>> {
        let Store::Local = self;
        OpenFolder::open(folder, folder)?.list()
    }

    /// The version of the file or folder at `path`, or of the link there.
    ///
    /// # Errors
    /// Where nothing is there, or a folder on the way cannot be read.
    pub fn version(self, path: &Path) -> io::Result<Version> {
        let Store::Local = self;
        fs::symlink_metadata(path).map(|meta| Version::Inode(Identity::of(&meta)))
    }

    /// The version of the file or folder that `path` leads to, through links.
    ///
    /// # Errors
    /// Where nothing is there, or a folder on the way cannot be read.
    pub fn version_behind_links(self, path: &Path) -> io::Result<Version> {
        let Store::Local = self;
        fs::metadata(path).map(|meta| Version::Inode(Identity::of(&meta)))
    }

    /// The version of the file or folder at `path`, or of the link there, as its server has it
    /// now: a client of a network file system may remember an older one.
    ///
    /// # Errors
    /// Where nothing is there, or a folder on the way cannot be read.
    pub fn fresh_version(self, path: &Path) -> io::Result<Version> {
        let Store::Local = self;
        Identity::now(path).map(Version::Inode)
    }

    /// Opens the source at `path`, which is absolute and without links.
    ///
    /// # Errors
    /// `Error::Io` where it cannot be opened, or is no regular file.
    pub fn open(self, path: &Path) -> Result<Arc<Source>> {
        let Store::Local = self;
        Source::open(path)
    }
}
