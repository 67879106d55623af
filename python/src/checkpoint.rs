//! An open checkpoint: its tensors and their places in files.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use tensorfs::internal::catalog::Tensor;
use tensorfs::internal::checkpoint as core;
use tensorfs::internal::error::real_name;
use tensorfs::internal::format::OutputFormat;
use tensorfs::internal::format::names::{is_weight_map, is_weights};
use tensorfs::internal::format::safetensors::Header;
use tensorfs::internal::index::IndexStore;
use tensorfs::internal::mount_origin::{MountOrigin, resolve_mount};
use tensorfs::internal::open_options::{DiskCachePlace, OpenOptions};
use tensorfs::internal::process::{PerProcess, token};
use tensorfs::internal::source::{Pin, SecretOrigin, Source, read_option_file};
use tensorfs::internal::store::{Store, hub_cache};
use tensorfs::internal::view::{Files, MapPolicy, View};
use tensorfs::{RemoteSettings, Secret};
use zeroize::Zeroizing;

use crate::errors::raised;
use crate::waiting::{Doing, beside, beside_with};

/// An open checkpoint. A child of a fork opens it again at the first use.
#[pyclass(frozen, module = "tensorfs._tensorfs")]
pub(crate) struct Checkpoint {
    first: Arc<core::Checkpoint>,
    /// The token of the process that opened the checkpoint.
    process: u64,
    again: PerProcess<Arc<core::Checkpoint>>,
    /// Keeps a file open that has no path.
    _pin: Option<Pin>,
}

/// The files of a checkpoint.
enum PySource {
    /// A single weight file, a weight map with its shards, or a folder with one checkpoint.
    Path(PathBuf),
    /// Files that are one checkpoint.
    Files(Vec<PathBuf>),
    /// For each tensor, the file that has it.
    Map(BTreeMap<String, PathBuf>),
}

impl<'py> FromPyObject<'_, 'py> for PySource {
    type Error = PyErr;

    fn extract(source: Borrowed<'_, 'py, PyAny>) -> PyResult<PySource> {
        if source.is_instance_of::<PyDict>() {
            source.extract().map(PySource::Map)
        } else if source.is_instance_of::<PyList>() {
            source.extract().map(PySource::Files)
        } else {
            Ok(PySource::Path(source.extract()?))
        }
    }
}

impl PySource {
    fn paths(&self) -> Vec<PathBuf> {
        match self {
            PySource::Path(path) => vec![path.clone()],
            PySource::Files(files) => files.clone(),
            PySource::Map(map) => map.values().cloned().collect(),
        }
    }
}

/// Facts about a tensor: name, position, dtype, shape and length in bytes.
type Facts = (String, usize, &'static str, Vec<u64>, u64);

/// State of a file: its name, its length in bytes, the seconds and nanoseconds of its last change, and its version as
/// text.
type FileState = (String, u64, Option<i64>, i64, String);

/// Options of a view, and options that `OpenOptions::set_word` accepts, as pairs of name and value.
pub(crate) type ViewWords = Vec<(String, String)>;

impl Checkpoint {
    /// Calls `open` on another thread, because a file system that does not answer must not block this thread, which
    /// checks for Ctrl-C and for the deadline. The time for deriving keys does not count towards the deadline.
    fn opened(
        py: Python<'_>,
        timeout: Option<f64>,
        path: Option<&Path>,
        secret: Option<SecretWord>,
        open: impl FnOnce(Option<Arc<Secret>>) -> tensorfs::Result<Arc<core::Checkpoint>>
        + Send
        + 'static,
    ) -> PyResult<Checkpoint> {
        let known: Arc<OnceLock<Option<Arc<Secret>>>> = Arc::default();
        let read = known.clone();
        let work = move || {
            let secret = secret_of(secret)?;
            open(read.get_or_init(|| secret).clone())
        };
        let doing = || match known.get() {
            None => Doing::Waiting("its key did not come: the file or the command does not end"),
            Some(Some(secret)) if secret.is_deriving() => Doing::Computing,
            Some(_) => Doing::Waiting("the file system does not answer"),
        };
        let first = beside_with(py, "tensorfs-open", timeout, "open", path, &doing, work)?
            .map_err(|e| raised(py, &e, None))?;
        Ok(Checkpoint { first, process: token(), again: PerProcess::new(), _pin: None })
    }

    /// The checkpoint of this process. A child of a fork opens it again when it first uses it.
    pub(crate) fn own(&self) -> Arc<core::Checkpoint> {
        if token() == self.process {
            return self.first.clone();
        }
        self.again.get_or_init(|| self.first.renewed()).clone()
    }

    fn facts(tensor: &Tensor<'_>) -> Facts {
        let (name, dtype) = (tensor.name.to_owned(), tensor.dtype.name());
        (name, tensor.position(), dtype, tensor.shape.to_vec(), tensor.len)
    }
}

#[pymethods]
impl Checkpoint {
    /// Opens `source`. If it is a path on a mount, the source of the mount is opened instead.
    #[staticmethod]
    #[pyo3(signature = (source, timeout, view = Vec::new(), secret = None, demands = (None, None, None, None, None)))]
    fn open(
        py: Python<'_>,
        source: PySource,
        timeout: Option<f64>,
        view: ViewWords,
        secret: Option<SecretWord>,
        demands: Demands,
    ) -> PyResult<Checkpoint> {
        let path = if let PySource::Path(path) = &source { Some(path.clone()) } else { None };
        Checkpoint::opened(py, timeout, path.as_deref(), secret, move |secret| {
            let options = with_tensor_choices(options_with_demands(demands, secret)?, &view)?;
            check_settings(&options, &source.paths())?;
            // The words are parsed before anything is opened.
            let shown = view_of(&view)?;
            let checkpoint = match source {
                PySource::Path(path) => open(&path, &options, &view),
                PySource::Files(files) => core::Checkpoint::of_files_with(&files, None, &options),
                PySource::Map(map) => core::Checkpoint::of_files_with(&[], Some(&map), &options),
            };
            checkpoint?.viewed(&shown)
        })
    }

    /// Opens the regular file of a descriptor. The file need not have a path. Messages use `name` for it. The caller
    /// may close the descriptor afterwards. A child of a fork cannot read the file. If it is a tensorizer file, it may
    /// begin at byte `start` of the open file.
    #[staticmethod]
    #[pyo3(signature = (descriptor, name, timeout, secret = None, start = 0))]
    fn open_descriptor(
        py: Python<'_>,
        descriptor: u32,
        name: String,
        timeout: Option<f64>,
        secret: Option<SecretWord>,
        start: u64,
    ) -> PyResult<Checkpoint> {
        let path = PathBuf::from(&name);
        let mut checkpoint = Checkpoint::opened(py, timeout, Some(&path), secret, move |secret| {
            let file = File::open(format!("/proc/self/fd/{descriptor}"))
                .map_err(|e| tensorfs::Error::io(Path::new(&name), "open", e))?;
            core::Checkpoint::of_open_file(file, &name, start, secret.as_deref())
        })?;
        let pin = checkpoint.first.sources().first().map(|source| source.pin()).transpose();
        checkpoint._pin = pin.map_err(|e| raised(py, &e, None))?;
        Ok(checkpoint)
    }

    /// The facts about all tensors, sorted by name.
    fn tensors(&self) -> Vec<Facts> {
        self.first.catalog().tensors().map(|tensor| Checkpoint::facts(&tensor)).collect()
    }

    /// The facts about the tensor of this name.
    fn tensor(&self, name: &str) -> Option<Facts> {
        self.first.catalog().tensor(name).map(|tensor| Checkpoint::facts(&tensor))
    }

    /// The facts about the tensor at this position.
    fn tensor_at(&self, position: usize) -> PyResult<Facts> {
        let catalog = self.first.catalog();
        if position >= catalog.len() {
            return Err(PyIndexError::new_err(position));
        }
        Ok(Checkpoint::facts(&catalog.tensor_at(position)))
    }

    /// Positions of all tensors, in file order.
    pub(crate) fn file_order(&self) -> Vec<usize> {
        let catalog = self.first.catalog();
        let mut order: Vec<usize> = (0..catalog.len()).collect();
        order.sort_by_key(|&position| {
            let piece = catalog.tensor_at(position).first_piece();
            (piece.shard, piece.range.start, piece.range.end)
        });
        order
    }

    /// All dtypes, each with the name of a tensor that has it.
    fn dtypes(&self) -> BTreeMap<&'static str, &str> {
        let mut dtypes = BTreeMap::new();
        for tensor in self.first.catalog().tensors() {
            dtypes.entry(tensor.dtype.name()).or_insert(tensor.name);
        }
        dtypes
    }

    /// File, first byte and end of each piece of the tensor at this position, except pieces of zeros that no file
    /// holds. If a piece is a part of a larger stored box, other bytes lie between its rows.
    fn pieces(&self, position: usize) -> Vec<(String, u64, u64)> {
        let (checkpoint, catalog) = (&self.first, self.first.catalog());
        let pieces = catalog.tensor_at(position).pieces().filter(|piece| !piece.is_zeros());
        let piece = |piece: tensorfs::internal::catalog::Piece<'_>| {
            let path = checkpoint.sources()[piece.shard.0 as usize].path();
            (real_name(path), piece.range.start, piece.range.end)
        };
        pieces.map(piece).collect()
    }

    /// First byte and end, within the data section, of the tensor at this position. `None` if the checkpoint has
    /// several files or several headers, or if the tensor is not one run of stored bytes that is loaded without a cast.
    fn data_offsets(&self, position: usize) -> Option<(u64, u64)> {
        let catalog = self.first.catalog();
        let [shard] = catalog.shards.as_slice() else { return None };
        let tensor = catalog.tensor_at(position);
        let mut pieces = tensor.pieces();
        let piece = pieces.next().filter(|piece| {
            shard.described.len() == 1
                && pieces.len() == 0
                && tensor.cast().is_none()
                && piece.is_contiguous()
                && !piece.is_zeros()
        })?;
        let start = shard.description_end();
        Some((piece.range.start.checked_sub(start)?, piece.range.end.checked_sub(start)?))
    }

    /// The bytes of each of `ranges` in the file with the number `file`. A range is (first byte, end).
    ///
    /// # Errors
    /// The errors of a read, `TimeoutError` past the deadline, and `IndexError` if there is no such
    /// file.
    fn read_ranges<'py>(
        &self,
        py: Python<'py>,
        file: usize,
        ranges: Vec<(u64, u64)>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let checkpoint = self.own();
        let source =
            checkpoint.sources().get(file).cloned().ok_or_else(|| PyIndexError::new_err(file))?;
        let path = source.path().to_owned();
        let read = beside(py, "tensorfs-read", timeout, "read", Some(&path), move || {
            let read = |&(start, end): &(u64, u64)| {
                if end > source.len() {
                    return Err(source.ends_before(end));
                }
                let mut bytes = vec![0; end.saturating_sub(start) as usize];
                source.read_exact_at(&mut bytes, start).map(|()| bytes)
            };
            let all = ranges.iter().map(read).collect::<tensorfs::Result<Vec<_>>>()?;
            source.check().map(|()| all)
        })?;
        let all = read.map_err(|e| raised(py, &e, None))?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// The metadata of the files, merged.
    fn metadata(&self) -> Option<BTreeMap<String, String>> {
        self.first.catalog().metadata.as_deref().cloned()
    }

    /// Facts by which two states of the checkpoint can be told apart: a hash of its tensors under the view, and the
    /// state of each file. The version of the same file differs between hosts.
    fn state(&self) -> (u64, Vec<FileState>) {
        let checkpoint = &self.first;
        let mut hasher = DefaultHasher::new();
        env!("CARGO_PKG_VERSION").hash(&mut hasher);
        for tensor in checkpoint.catalog().tensors() {
            let pieces: Vec<_> = tensor.pieces().collect();
            let facts = (tensor.name, tensor.dtype, tensor.shape, tensor.cast(), pieces);
            format!("{facts:?}").hash(&mut hasher);
        }
        let file = |source: &Arc<Source>| {
            let (path, version) = (source.path(), source.version());
            let name =
                path.file_name().map_or_else(|| real_name(path), |name| real_name(name.as_ref()));
            let (seconds, nanoseconds) = version.modified().unzip();
            (name, version.len, seconds, nanoseconds.unwrap_or(0), format!("{version:?}"))
        };
        (hasher.finish(), checkpoint.sources().iter().map(file).collect())
    }

    /// The message of the warning that the last pieces of the checkpoint may be missing. `None` if something proves
    /// that none is missing.
    #[getter]
    fn unproven_tail(&self) -> Option<UnprovenTail> {
        unproven_tail(&self.first)
    }

    fn __len__(&self) -> usize {
        self.first.catalog().len()
    }

    /// The reason why the files belong together, in one word.
    #[getter]
    fn kind(&self) -> &'static str {
        self.first.kind.as_str()
    }

    /// The paths of the files.
    #[getter]
    fn files(&self) -> Vec<PathBuf> {
        self.first.sources().iter().map(|source| source.path().to_owned()).collect()
    }
}

/// The secret of encrypted files: its kind, which is `key`, `passphrase`, or the name of a mount option, and its value
/// as bytes.
pub(crate) type SecretWord = (String, Vec<u8>);

/// The secret that `word` names. Without `word`, the secret that the environment names. May read a file or run a
/// command.
pub(crate) fn secret_of(word: Option<SecretWord>) -> tensorfs::Result<Option<Arc<Secret>>> {
    let Some((kind, value)) = word else {
        let secret = SecretOrigin::of_environment().map_err(tensorfs::Error::usage)?;
        return Ok(secret.map(Arc::new));
    };
    let value = Zeroizing::new(value);
    let path = || PathBuf::from(OsStr::from_bytes(&value));
    let secret = match kind.as_str() {
        "key" => Secret::parse_key(&value),
        "passphrase" => Secret::passphrase(value),
        "passphrase-file" => SecretOrigin::PassphraseFile(path()).read(),
        _ => SecretOrigin::KeyFile(path()).read(),
    };
    secret.map(|secret| Some(Arc::new(secret))).map_err(tensorfs::Error::usage)
}

/// Settings of a remote source: the file with the credentials, the profile, the server, the region, and
/// the file of certificates.
type PyRemote = (Option<PathBuf>, Option<String>, Option<String>, Option<String>, Option<PathBuf>);

/// Arguments of a caller: the number of shards, the reference file, the folder of the disk cache, the size of the disk
/// cache in bytes, and the settings of a remote source.
pub(crate) type Demands =
    (Option<u64>, Option<PathBuf>, Option<PathBuf>, Option<u64>, Option<PyRemote>);

/// The default options, with these demands and this secret.
pub(crate) fn options_with_demands(
    demands: Demands,
    secret: Option<Arc<Secret>>,
) -> tensorfs::Result<OpenOptions> {
    let (expect_shards, reference, folder, size, remote) = demands;
    let disk_cache = folder.map(|folder| DiskCachePlace::new(folder, size));
    let remote = remote.map(settings_of).transpose()?;
    Ok(OpenOptions {
        expect_shards,
        reference,
        disk_cache,
        remote,
        secret,
        ..OpenOptions::default()
    })
}

/// Refuses settings of a remote source that have no meaning for the sources `paths` and for the files that `options`
/// names. A path on a mount is a local path, even if the mount reads a remote source.
pub(crate) fn check_settings(options: &OpenOptions, paths: &[PathBuf]) -> tensorfs::Result<()> {
    let Some(settings) = &options.remote else { return Ok(()) };
    let named = paths.iter().chain(&options.reference).chain(&options.config);
    let sources: Vec<PathBuf> = named.cloned().collect();
    settings.check_use(&sources).map_err(tensorfs::Error::usage)
}

fn settings_of(words: PyRemote) -> tensorfs::Result<Arc<RemoteSettings>> {
    let (credentials_file, profile, endpoint, region, ca_file) = words;
    let settings = RemoteSettings {
        credentials_file,
        profile,
        endpoint,
        region,
        ca_file,
        ..RemoteSettings::default()
    };
    settings.check().map_err(tensorfs::Error::usage)?;
    Ok(Arc::new(settings))
}

/// `options`, with the words that choose which tensors are shown.
pub(crate) fn with_tensor_choices(
    mut options: OpenOptions,
    words: &ViewWords,
) -> tensorfs::Result<OpenOptions> {
    for (key, value) in words {
        options.set_word(key, value).map_err(tensorfs::Error::usage)?;
    }
    Ok(options)
}

/// Filters `words` for the options of a view.
pub(crate) fn of_view(words: &ViewWords) -> ViewWords {
    let is_of_view = |(key, _): &&(String, String)| !OpenOptions::WORDS.contains(&key.as_str());
    words.iter().filter(is_of_view).cloned().collect()
}

/// A checkpoint whose last pieces may be missing, because nothing proves that they exist: its path, the message, and a
/// number that is the same for the same files.
pub(crate) type UnprovenTail = (String, String, u64);

pub(crate) fn unproven_tail(checkpoint: &core::Checkpoint) -> Option<UnprovenTail> {
    let error = checkpoint.require_proven_tail().err()?;
    let mut hasher = DefaultHasher::new();
    for source in checkpoint.sources() {
        (source.path(), source.version()).hash(&mut hasher);
    }
    Some((real_name(&checkpoint.directory), error.to_string(), hasher.finish()))
}

/// The view that the options `words` describe.
pub(crate) fn view_of(words: &ViewWords) -> tensorfs::Result<View> {
    let own = of_view(words);
    let pairs = own.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    View::from_words(pairs, &mut read_option_file).map_err(tensorfs::Error::usage)
}

/// Opens `path`. Only the demands, the secret and the choice of tensors in `given` are used. On a mount, the choices
/// in `words` replace those of the mount.
fn open(
    path: &Path,
    given: &OpenOptions,
    words: &ViewWords,
) -> tensorfs::Result<Arc<core::Checkpoint>> {
    let path = &hub_cache::resolve(path)?;
    let Some(MountOrigin { path: source, options, part }) = resolve_mount(path) else {
        return open_source(path, given, given);
    };
    let OpenOptions { expect_shards, reference, disk_cache, remote, secret, .. } = given.clone();
    // The number of shards that the mount expects applies to a set, and not to a file that is opened alone.
    let expect_shards = expect_shards.or(options.expect_shards);
    let asked = OpenOptions { expect_shards, reference, disk_cache, remote, secret, ..options };
    let options = with_tensor_choices(asked, words)?;
    if let Some(part) = part {
        let index = IndexStore::of_user().map(|store| store.folder().to_owned());
        let all = core::Checkpoint::open_with(&source, &OpenOptions { index, ..options.clone() })?;
        return match all.virtual_files().find(|file| file.spec().name == part) {
            Some(file) => file.as_checkpoint(),
            // The source has no such virtual file any more, because it has changed since it was mounted.
            None => core::Checkpoint::of_files_with(&[path.to_owned()], None, given),
        };
    }
    if options.view.files != Files::Original && source.is_file() {
        // The source of the mount is one file. The mount shows the set to which this file belongs.
        return open_set(&source, &options);
    }
    open_source(&source, &options, given)
}

/// Opens `path`: a set with `options`, or a single file with `given`.
fn open_source(
    path: &Path,
    options: &OpenOptions,
    given: &OpenOptions,
) -> tensorfs::Result<Arc<core::Checkpoint>> {
    let name = path.file_name().and_then(|name| name.to_str());
    let map = name.is_some_and(is_weight_map);
    let there = Store::for_options(path, given).version_behind_links(path);
    if there.is_ok_and(|there| there.is_folder()) || (map && !name.is_some_and(is_weights)) {
        return open_set(path, options);
    }
    core::Checkpoint::of_files_with(&[path.to_owned()], None, given)
}

/// Opens the set at `path`, from the index if the index is up to date. Also opens a set that does not fit into one
/// virtual file.
fn open_set(path: &Path, options: &OpenOptions) -> tensorfs::Result<Arc<core::Checkpoint>> {
    let view = View {
        files: Files::Original,
        format: OutputFormat::default(),
        map: MapPolicy::default(),
        ..options.view.clone()
    };
    let index = IndexStore::of_user().map(|store| store.folder().to_owned());
    core::Checkpoint::open_with(path, &OpenOptions { view, index, ..options.clone() })
}

/// A tensor of a file that is in memory: name, dtype, shape, first byte and end.
type Described = (String, &'static str, Vec<u64>, usize, usize);

/// The tensors of a safetensors file that is in memory, in file order.
///
/// # Errors
/// `SafetensorError` if it is not a whole, valid file.
#[pyfunction]
pub(crate) fn describe(py: Python<'_>, data: &[u8]) -> PyResult<Vec<Described>> {
    let refused = |fault| raised(py, &tensorfs::Error::refused(Path::new("<bytes>"), fault), None);
    let header = Header::of_file(data).map_err(refused)?;
    let start = header.data_start() as usize;
    let described = header.tensors.into_iter().map(|entry| {
        let range = entry.data_offsets;
        let (first, end) = (start + range.start as usize, start + range.end as usize);
        (entry.name, entry.facts.dtype.name(), entry.shape, first, end)
    });
    Ok(described.collect())
}
