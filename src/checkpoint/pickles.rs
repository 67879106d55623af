//! Scans single files with pickles: what kind of file each is, and which names its pickles use.

use std::path::Path;

use crate::error::{Error, Result, shown_path};
use crate::format::TrainingState;
use crate::format::names::{DISTCP_METADATA, is_distcp};
use crate::format::pickle::{self, DistcpMetadata, PickleScan};
use crate::store::Store;

use super::distcp::metadata_max;
use super::load::SourceReader;

/// Scans the pickles of the file `path`. `None` if it has no pickles. Nothing is imported or called. The part of the
/// file that is read is bounded.
///
/// # Errors
/// A failed read, or a path that does not lead to a regular file.
pub fn scan_pickles(path: &Path) -> Result<Option<PickleScan>> {
    let open_error = |e| Error::io(path, "open", e);
    let store = Store::of(path);
    let real = store.real_path(path).map_err(open_error)?;
    if !store.version_behind_links(&real).map_err(open_error)?.is_file() {
        return Err(Error::usage(format!("{}: not a regular file", shown_path(path))));
    }
    let items = items_beside(&store, path);
    let source = store.open(&real)?;
    let scanned =
        SourceReader::at(&source, 0).run(|reader| pickle::scan(reader, items.as_deref()))?;
    source.check()?;
    Ok(scanned)
}

/// The items that a `.metadata` in the same folder places in a `.distcp` file. `None` if there is no `.metadata` that
/// can be read.
fn items_beside(store: &Store, path: &Path) -> Option<Vec<(u64, u64)>> {
    let name = path.file_name()?.to_str().filter(|name| is_distcp(name))?;
    let real = store.real_path(&path.with_file_name(DISTCP_METADATA)).ok()?;
    let source = store.open(&real).ok().filter(|source| source.len() <= metadata_max())?;
    let mut bytes = vec![0; usize::try_from(source.len()).ok()?];
    source.read_exact_at(&mut bytes, 0).ok()?;
    DistcpMetadata::parse(&bytes, TrainingState::All).ok()?.named.remove(name)
}
