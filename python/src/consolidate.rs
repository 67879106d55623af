//! Writes a checkpoint as files.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use pyo3::prelude::*;
use tensorfs::Error;
use tensorfs::internal::checkpoint::{Checkpoint, Tree};
use tensorfs::internal::consolidate::{Copier, Outline, Watch, WriteOptions};
use tensorfs::internal::format::{manifest, names};
use tensorfs::internal::index::IndexStore;
use tensorfs::internal::io::Settings;
use tensorfs::internal::mount_origin::resolve_mount;
use tensorfs::internal::open_options::{Links, OpenOptions};
use tensorfs::internal::store::hub_cache;
use tensorfs::internal::view::View;

use crate::checkpoint::{
    Demands, SecretWord, ViewWords, check_settings, of_view, options_with_demands, secret_of,
    unproven_tail, view_of, with_tensor_choices,
};
use crate::errors::raised;
use crate::waiting::beside;

/// The longest wait, after Ctrl-C, for the removal of unfinished files.
const CLEANUP_MAX: Duration = Duration::from_secs(5);

/// Writes a checkpoint as files in the folder `out`, or as one file if `out` is the name of a weight file and there are
/// no `numbers`. `judge` is called before anything is written. It gets the checkpoints whose last pieces may be
/// missing, because nothing proves that they exist. Returns the number of files and their length in bytes.
///
/// `sources` is one path that a mount would accept. With `numbers`, `sources` may be several files of one checkpoint,
/// and the written files are like those of torch's consolidation. `view` has options of a view, and `config` the value
/// of the mount option `config`. `timeout` is the deadline in seconds for opening, and for each read.
#[pyfunction]
#[pyo3(signature = (sources, out, numbers, view, overwrite, verify, secret, demands, config, timeout, judge))]
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
    demands: Demands,
    config: Option<PathBuf>,
    timeout: Option<f64>,
    judge: &Bound<'_, PyAny>,
) -> PyResult<(usize, u64)> {
    let numbered = numbers.is_some();
    let options = WriteOptions { replace: overwrite, verify, beside_others: numbered };
    let (to, path) = (out.clone(), sources.first().cloned());
    let work = move || {
        let demanded =
            with_tensor_choices(options_with_demands(demands, secret_of(secret)?)?, &view)?;
        let given = OpenOptions { config, ..demanded };
        check_settings(&given, &sources)?;
        let sources = match sources.as_slice() {
            [one] => match hub_cache::resolve(one)? {
                folder if numbered && folder.is_dir() => shards_in(folder)?,
                path => vec![path],
            },
            _ => sources,
        };
        let outline = outline_of(&sources, numbers.as_ref(), &view, given)?;
        let single = match (numbered, sources.as_slice()) {
            (false, [source]) => outline.file_at(&to, source)?,
            // Files by number always go into a folder.
            _ => None,
        };
        Ok((outline, single))
    };
    let found = beside(py, "tensorfs-open", timeout, "open", path.as_deref(), work)?;
    let (outline, single) = found.map_err(|error: Error| raised(py, &error, None))?;
    let unproven: Vec<_> =
        outline.checkpoints.iter().filter_map(|checkpoint| unproven_tail(checkpoint)).collect();
    judge.call1((unproven,))?;
    let timeout = timeout.filter(|&limit| limit > 0.0).map(Duration::from_secs_f64);
    let copier = Copier::new(Settings { timeout, ..Settings::default() });
    let stopped = copier.stopped();
    let (ended, wait) = channel::<()>();
    let stop = stopped.clone();
    let work = move || {
        let _ended = ended;
        let mut progress = |_| {
            let is_stopped = stop.load(Ordering::Relaxed);
            if is_stopped { Err(Error::cancelled("interrupted")) } else { Ok(()) }
        };
        let mut watch = Watch { progress: &mut progress, bytes: None };
        if let Some(file) = single {
            copier.write_one(&file, &out, options, &mut watch)?;
            return Ok((1, file.content.len_bytes()?));
        }
        let bytes = outline.len_bytes()?;
        copier.write_folder(&outline, &out, options, &mut watch)?;
        Ok((outline.files.len(), bytes))
    };
    match beside(py, "tensorfs-write", None, "write", None, work) {
        Ok(written) => written.map_err(|error| raised(py, &error, None)),
        Err(interrupted) => {
            // The written files are removed before the exception is raised. If a file system does not answer, they are
            // removed once it answers.
            stopped.store(true, Ordering::Relaxed);
            let _ = py.detach(move || wait.recv_timeout(CLEANUP_MAX));
            Err(interrupted)
        }
    }
}

/// The shards in a folder. Consolidated files that lie beside shards are left out. Returns the folder itself if it has
/// no safetensors files.
fn shards_in(folder: PathBuf) -> tensorfs::Result<Vec<PathBuf>> {
    let entries = folder.read_dir().map_err(|e| Error::io(&folder, "open", e))?;
    let files = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut found: Vec<String> = files.filter(|name| name.ends_with(".safetensors")).collect();
    found.sort();
    let is_written = |name: &String| {
        let output = names::numbered(name).map(|numbered| numbered.output);
        name.starts_with("model-") && output.as_deref() == Some("model.safetensors")
    };
    if !found.iter().all(is_written) {
        found.retain(|name| !is_written(name));
    }
    let paths: Vec<PathBuf> = found.iter().map(|name| folder.join(name)).collect();
    Ok(if paths.is_empty() { vec![folder] } else { paths })
}

/// The files to write.
fn outline_of(
    sources: &[PathBuf],
    numbers: Option<&BTreeMap<String, u64>>,
    words: &ViewWords,
    given: OpenOptions,
) -> tensorfs::Result<Outline> {
    let view = view_of(words)?;
    let Some(numbers) = numbers else {
        return outline(sources, view, !of_view(words).is_empty(), given);
    };
    let checkpoint = match sources {
        // `of_files_with` would open a single file as it is, and ignore its sharding note.
        [one] => Checkpoint::open_with(one, &given)?,
        several => {
            let reference = given.reference.clone().or_else(|| manifest_beside(several));
            Checkpoint::of_files_with(several, None, &OpenOptions { reference, ..given })?
        }
    };
    Outline::numbered(&checkpoint.viewed(&view)?, numbers)
}

/// The manifest beside these shards, if they all lie in one folder.
fn manifest_beside(files: &[PathBuf]) -> Option<PathBuf> {
    let folder = files.first()?.parent()?;
    let manifest = folder.join(manifest::file_name(&names::whole("model")));
    (manifest.is_file() && files.iter().all(|file| file.parent() == Some(folder)))
        .then_some(manifest)
}

/// The files that a mount of the source with this view would show. `has_view` says whether the caller gave any option
/// of a view.
fn outline(
    sources: &[PathBuf],
    view: View,
    has_view: bool,
    given: OpenOptions,
) -> tensorfs::Result<Outline> {
    let [source] = sources else {
        return Err(Error::usage("one source is needed"));
    };
    let index = IndexStore::of_user().map(|store| store.folder().to_owned());
    let given = OpenOptions { links: Links::Inside, view, index, ..given };
    let behind = resolve_mount(source).and_then(|origin| origin.open_with(&given, has_view));
    let (path, options) = behind.unwrap_or_else(|| (source.clone(), given));
    Outline::of(&Tree::scan(&path, &options)?)
}
