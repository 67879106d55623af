//! Scans of single files with pickles: what they are, and which names they ask for.

use std::path::Path;

use crate::error::{Error, Result, shown_path};
use crate::format::pickle::{self, PickleScan};
use crate::store::Store;

use super::load::SourceReader;

/// Scans the pickles of the file `path`. `None` if it has none. Nothing is imported or called, and not
/// more than a bounded part of the file is read.
///
/// # Errors
/// A failed read, or a path that is no regular file.
pub fn scan_pickles(path: &Path) -> Result<Option<PickleScan>> {
    let open_error = |e| Error::io(path, "open", e);
    let store = Store::of(path);
    let real = store.real_path(path).map_err(open_error)?;
    if !store.version_behind_links(&real).map_err(open_error)?.is_file() {
        return Err(Error::usage(format!("{}: not a regular file", shown_path(path))));
    }
    let source = store.open(&real)?;
    let scanned = SourceReader::at(&source, 0).run(|reader| pickle::scan(reader))?;
    source.check()?;
    Ok(scanned)
}
