//! Reads the `config.json` of a checkpoint, which names its family of models.

use std::io;
use std::path::Path;

use crate::error::shown_path;
use crate::open_options::{Links, OpenOptions};
use crate::store::resolve::{LinkBounds, Unusable};
use crate::view::ReadConfig;

use super::folder::Folder;
use super::load::{FilePlace, read_text};
use super::small_files::{CONFIG, MODEL_FOLDER, small_file};

/// Maximum length of a `config.json` in bytes.
const LEN_MAX: u64 = 16 << 20;

/// Calls `act` with a function that reads the `config.json` of `folder`. `options` are the options
/// with which the folder was opened.
pub(super) fn with_config_of<T>(
    folder: &Folder,
    options: &OpenOptions,
    act: impl FnOnce(ReadConfig<'_>) -> T,
) -> T {
    let given = small_file(options, CONFIG.as_ref());
    match given.as_ref().or_else(|| folder.file(CONFIG)) {
        Some(file) => act(&|| read((&file.store, &file.path)).map(Some)),
        // If the source is a single file, its folder does not list other files.
        None => {
            let real = options.follow.iter().filter_map(|path| folder.store.real_path(path).ok());
            let (store, root) = (folder.store.clone(), folder.path.clone());
            let bounds = LinkBounds::new(store, root, real.collect(), options.links);
            act(&|| read_within(&folder.path, &bounds))
        }
    }
}

/// Calls `act` with a function that reads the `config.json` in the folder at `directory`.
pub(super) fn with_config_in<T>(folder: FilePlace<'_>, act: impl FnOnce(ReadConfig<'_>) -> T) -> T {
    let (store, directory) = folder;
    let bounds = LinkBounds::new(store.clone(), directory.to_owned(), Vec::new(), Links::Anywhere);
    act(&|| read_within(directory, &bounds))
}

/// The text of the `config.json` in `directory`. The file may be a link that stays in `bounds`.
/// `None` if nothing has that name.
fn read_within(directory: &Path, bounds: &LinkBounds) -> Result<Option<Vec<u8>>, String> {
    let path = directory.join(CONFIG);
    match bounds.store().version(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let beside = directory.join(MODEL_FOLDER);
            let is_there = || bounds.store().version(&beside.join(CONFIG)).is_ok();
            // `MODEL_FOLDER` has no second `MODEL_FOLDER` in it.
            let is_own = directory.file_name() != Some(MODEL_FOLDER.as_ref());
            return if is_own && is_there() { read_within(&beside, bounds) } else { Ok(None) };
        }
        _ => {}
    }
    let fail = |why: Unusable| format!("{} is {}; {}", shown_path(&path), why.text(), why.advice());
    match bounds.resolve(&path).map_err(fail)? {
        (real, version) if version.is_file() => read((bounds.store(), &real)).map(Some),
        (_, version) if version.is_folder() => {
            Err(format!("{} is a folder; put a regular file there", shown_path(&path)))
        }
        _ => Err(fail(Unusable::Special)),
    }
}

fn read(file: FilePlace<'_>) -> Result<Vec<u8>, String> {
    read_text(file, LEN_MAX).map_err(|error| error.to_string())
}
