//! Writing a checkpoint as files.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use pyo3::prelude::*;
use tensorfs::internal::checkpoint::{Checkpoint, Tree};
use tensorfs::internal::consolidate::{Copier, Outline, Watch, WriteOptions};
use tensorfs::internal::index::IndexStore;
use tensorfs::internal::io::Settings;
use tensorfs::internal::mount_origin::resolve_mount;
use tensorfs::internal::open_options::{Links, OpenOptions};
use tensorfs::internal::view::View;
use tensorfs::{Error, Secret};

use crate::checkpoint::{SecretWord, ViewWords, secret_of, view_of};
use crate::errors::raised;
use crate::waiting::beside;

/// Writes files that show a checkpoint, or one file if `out` is the name of one and there are no
/// `numbers`. Returns the number of files and of bytes.
///
/// `sources` is one path, as a mount takes it; with `numbers` it may be several files of one
/// checkpoint, and the files are those of torch's consolidation. `view` are options of a view.
#[pyfunction]
#[pyo3(signature = (sources, out, numbers, view, overwrite, verify, secret = None))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by position")]
pub(crate) fn consolidate(
    py: Python<'_>,
    sources: Vec<PathBuf>,
    out: PathBuf,
    numbers: Option<BTreeMap<String, u64>>,
    view: ViewWords,
    overwrite: bool,
    verify: bool,
    secret: Option<SecretWord>,
) -> PyResult<(usize, u64)> {
    let options = WriteOptions { replace: overwrite, verify, beside_others: numbers.is_some() };
    let stopped = Arc::new(AtomicBool::new(false));
    let (ended, wait) = channel::<()>();
    let stop = stopped.clone();
    let work = move || {
        let _ended = ended;
        let has_view = !view.is_empty();
        let view = view_of(&view)?;
        let secret = secret_of(secret)?;
        let outline = match &numbers {
            Some(numbers) => {
                let checkpoint = match sources.as_slice() {
                    // One file alone would be taken as it is, without its sharding note.
                    [one] => {
                        let options = OpenOptions { secret, ..OpenOptions::default() };
                        Checkpoint::open_with(one, &options)?
                    }
                    several => Checkpoint::of_files_with(several, None, secret.as_deref())?,
                };
                Outline::numbered(&checkpoint.viewed(&view)?, numbers)?
            }
            None => outline(&sources, (view, has_view), secret)?,
        };
        let mut progress = |_| {
            let is_stopped = stop.load(Ordering::Relaxed);
            if is_stopped { Err(Error::cancelled("interrupted")) } else { Ok(()) }
        };
        let mut watch = Watch { progress: &mut progress, bytes: None };
        let copier = Copier::new(Settings::default());
        let single = match (&numbers, sources.as_slice()) {
            (None, [source]) => outline.file_at(&out, source)?,
            // Files by number always go into a folder.
            _ => None,
        };
        if let Some(file) = single {
            copier.write_one(&file, &out, options, &mut watch)?;
            return Ok((1, file.content.len_bytes()?));
        }
        let bytes = outline.len_bytes()?;
        copier.write_folder(&outline, &out, options, &mut watch)?;
        Ok((outline.files.len(), bytes))
    };
    match beside(py, "tensorfs-write", None, "write", work) {
        Ok(written) => written.map_err(|error| raised(py, &error, None)),
        Err(interrupted) => {
            // The files are gone before the exception is seen.
            stopped.store(true, Ordering::Relaxed);
            let _ = py.detach(move || wait.recv());
            Err(interrupted)
        }
    }
}

/// The files that a mount of the source with this view would show. The flag says whether any option
/// of the view was given.
fn outline(
    sources: &[PathBuf],
    (view, has_view): (View, bool),
    secret: Option<Arc<Secret>>,
) -> tensorfs::Result<Outline> {
    let [source] = sources else {
        return Err(Error::usage("one source is needed"));
    };
    let index = IndexStore::of_user().map(|store| store.folder().to_owned());
    let given = OpenOptions { links: Links::Inside, view, index, secret, ..OpenOptions::default() };
    let behind = resolve_mount(source).and_then(|origin| origin.open_with(&given, has_view));
    let (path, options) = behind.unwrap_or_else(|| (source.clone(), given));
    Outline::of(&Tree::scan(&path, &options)?)
}
