//! The options about the disk cache of remote sources.

use std::path::PathBuf;

use serde_json::{Value, json};
use tensorfs::DiskCachePlace;
use tensorfs::internal::error::real_name;
use tensorfs::internal::store::disk_cache::{NOWHERE, default_folder, folder_of_variable};

/// Where blocks of remote sources are kept, as it was said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskCacheOptions {
    /// The folder; the inner `None` is `cache-dir=none`.
    given: Option<Option<PathBuf>>,
    /// Bytes that it may take.
    pub(super) size: Option<u64>,
    /// Whether there is one unless it is turned off, as for mounts.
    pub(crate) is_default: bool,
}

impl DiskCacheOptions {
    pub(super) fn set(&mut self, folder: PathBuf) {
        self.given = Some((folder.as_os_str() != NOWHERE).then_some(folder));
    }

    /// The options of a mount that says nothing else.
    pub(crate) fn of_mounts() -> DiskCacheOptions {
        DiskCacheOptions { is_default: true, ..DiskCacheOptions::default() }
    }

    /// From now on there is none.
    pub(crate) fn turn_off(&mut self) {
        self.given = Some(None);
    }

    /// The path of the folder, if one was given.
    pub(super) fn path(&mut self) -> Option<&mut PathBuf> {
        self.given.as_mut()?.as_mut()
    }

    /// The folder as it was given, for `status`.
    pub(super) fn shown(&self) -> Value {
        match &self.given {
            None => Value::Null,
            Some(None) => NOWHERE.into(),
            Some(Some(folder)) => json!(real_name(folder)),
        }
    }

    /// The place of the cache in force. `None` if there is none.
    pub(crate) fn place(&self) -> Option<DiskCachePlace> {
        let folder = match &self.given {
            Some(given) => given.clone(),
            None => folder_of_variable()
                .unwrap_or_else(|| self.is_default.then(default_folder).flatten()),
        };
        Some(DiskCachePlace { folder: folder?, size: self.size })
    }
}
