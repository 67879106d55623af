//! The `config.json` of a checkpoint, which says what family of models it is of.

use std::io;
use std::path::Path;

use crate::error::Error;
use crate::view::ReadConfig;

use super::load::read_text;
use super::tree::Folder;

/// Name of the file.
pub(super) const CONFIG: &str = "config.json";

/// Most bytes that it may have.
const LEN_MAX: u64 = 16 << 20;

/// Calls `act` with a function that reads the file in `folder`.
pub(super) fn with_config_of<T>(folder: &Folder, act: impl FnOnce(ReadConfig<'_>) -> T) -> T {
    match folder.file(CONFIG) {
        Some(file) => act(&|| read(&file.path)),
        // The folder of a single file lists no others.
        None => with_config_beside(&folder.path, act),
    }
}

/// Calls `act` with a function that reads the file in the folder at `directory`.
pub(super) fn with_config_beside<T>(directory: &Path, act: impl FnOnce(ReadConfig<'_>) -> T) -> T {
    act(&|| read(&directory.join(CONFIG)))
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, String> {
    match read_text(path, LEN_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}
