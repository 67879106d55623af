//! The options of the disk cache for remote sources.

use std::path::PathBuf;

use serde_json::{Value, json};
use tensorfs::DiskCachePlace;
use tensorfs::internal::error::real_name;
use tensorfs::internal::store::disk_cache::{NOWHERE, default_folder, folder_of_variable};

/// Where blocks of remote sources are stored, as the options say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskCacheOptions {
    /// The folder that the user gave. The inner `None` means `cache-dir=none`.
    given: Option<Option<PathBuf>>,
    /// Maximum size of the disk cache in bytes.
    pub(super) size: Option<u64>,
    /// Whether there is a disk cache by default, as for mounts.
    pub(crate) is_default: bool,
}

impl DiskCacheOptions {
    pub(super) fn set(&mut self, folder: PathBuf) {
        self.given = Some((folder.as_os_str() != NOWHERE).then_some(folder));
    }

    /// The options of a mount for which the user set none.
    pub(crate) fn of_mounts() -> DiskCacheOptions {
        DiskCacheOptions { is_default: true, ..DiskCacheOptions::default() }
    }

    /// Turns the disk cache off.
    pub(crate) fn turn_off(&mut self) {
        self.given = Some(None);
    }

    /// The path of the folder, if the user gave one.
    pub(super) fn path(&mut self) -> Option<&mut PathBuf> {
        self.given.as_mut()?.as_mut()
    }

    /// The folder as the user gave it, for `status`.
    pub(super) fn shown(&self) -> Value {
        match &self.given {
            None => Value::Null,
            Some(None) => NOWHERE.into(),
            Some(Some(folder)) => json!(real_name(folder)),
        }
    }

    /// The folder and size of the disk cache that is used. `None` if there is no disk cache.
    pub(crate) fn place(&self) -> Option<DiskCachePlace> {
        let folder = match &self.given {
            Some(given) => given.clone(),
            None => folder_of_variable()
                .unwrap_or_else(|| self.is_default.then(default_folder).flatten()),
        };
        Some(DiskCachePlace::new(folder?, self.size))
    }
}
