//! Opens checkpoints from files that the caller lists. Other files in their folders are ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::{Catalog, Heads, ShardHeader};
use crate::error::{Error, Fault, Result, shown_path};
use crate::format::names;
use crate::format::tensorizer::keys::Secret;
use crate::format::weight_map::WeightMap;
use crate::open_options::OpenOptions;
use crate::source::Source;
use crate::store::Store;
use crate::view::{ReadConfig, View};

use super::config::with_config_in;
use super::discover::{SetKind, is_noted};
use super::load::{OpenShard, ReadWith, open_shard, open_source};
use super::openers::map_files;
use super::prove::refuse_plain;
use super::set::check_demands;
use super::virtual_file::{ArrangedFile, present};
use super::{Checkpoint, ProvedSet, Tail};

impl Checkpoint {
    /// Opens `files` as one checkpoint. If it is a single file, it is opened as it is, even if it
    /// holds pieces of tensors. If there are several files, pieces in them are merged.
    ///
    /// # Errors
    /// The reason of a refusal, with file and tensor.
    pub fn of_files(files: &[PathBuf]) -> Result<Arc<Checkpoint>> {
        open_files(files, None, &OpenOptions::default())
    }

    /// Opens `files` as `of_files` does. If `map` is given, opens its files as `of_map` does.
    /// Only the number of shards, the reference, the secret and the state of `options` are used.
    ///
    /// # Errors
    /// The reason of a refusal, with file and tensor.
    #[doc(hidden)]
    pub fn of_files_with(
        files: &[PathBuf],
        map: Option<&BTreeMap<String, PathBuf>>,
        options: &OpenOptions,
    ) -> Result<Arc<Checkpoint>> {
        match map {
            None => open_files(files, None, options),
            Some(map) => open_files(&files_of(map), Some(map), options),
        }
    }

    /// Opens the file behind the descriptor `file`, which needs no path. Messages call it `name`. A tensorizer file
    /// may begin at byte `start` of `file`, and its offsets count from the first byte of `file`. The checkpoint can
    /// be read while its source is pinned: see [`Source::pin`]. `secret` is for an encrypted file.
    ///
    /// # Errors
    /// The reason of a refusal, with file and tensor.
    pub fn of_open_file(
        file: File,
        name: &str,
        start: u64,
        secret: Option<&Secret>,
    ) -> Result<Arc<Checkpoint>> {
        let folder = Path::new("");
        let with = ReadWith { secret, ..ReadWith::default() };
        let source = Source::of_open_file(Path::new(name), file)?;
        let shard = open_source(&Arc::new(Heads::default()), folder, name, source, start, with)?;
        check_fit(folder, secret, &shard)?;
        // The folder of the file is unknown, so there is no `config.json`.
        let (folder, options) = (folder.to_owned(), OpenOptions::default());
        of_shards(folder, &[shard], None, name.to_owned(), &options, &|| Ok(None))
    }

    /// Opens the files of `map`, which assigns a file to each tensor.
    ///
    /// # Errors
    /// The reason of a refusal, with file and tensor.
    pub fn of_map(map: &BTreeMap<String, PathBuf>) -> Result<Arc<Checkpoint>> {
        open_files(&files_of(map), Some(map), &OpenOptions::default())
    }

    /// This checkpoint with new, closed files, for a child process that was made by fork(2). In the
    /// child, the locks of the parent's sources may be held by threads that do not exist there. If
    /// a file was replaced in the meantime, its reads fail.
    pub fn renewed(&self) -> Arc<Checkpoint> {
        let sources = self.sources.iter().map(|source| source.renewed());
        Arc::new(Checkpoint {
            sources: sources.collect(),
            files: self.files.iter().map(|file| ArrangedFile::new(file.spec.clone())).collect(),
            ..self.clone()
        })
    }
}

fn files_of(map: &BTreeMap<String, PathBuf>) -> Vec<PathBuf> {
    let files: BTreeSet<&PathBuf> = map.values().collect();
    files.into_iter().cloned().collect()
}

fn open_files(
    files: &[PathBuf],
    map: Option<&BTreeMap<String, PathBuf>>,
    options: &OpenOptions,
) -> Result<Arc<Checkpoint>> {
    let with = ReadWith::of(options);
    let Some(first) = files.first() else {
        return Err(Error::usage("no files: name at least one"));
    };
    let folder = folder_of(first, options)?;
    let mut by_name = BTreeMap::new();
    for file in files {
        let (name, path) = name_in(&folder, file, options)?;
        if by_name.insert(name.clone(), path).is_some() && map.is_none() {
            return Err(Error::usage(format!("{}: is named twice", shown_path(file))));
        }
    }
    let named: Vec<(String, PathBuf)> = by_name.into_iter().collect();
    let heads = Arc::new(Heads::default());
    let store = Store::for_options(&folder, options);
    let open =
        |(name, path): &(String, PathBuf)| open_shard(&heads, &folder, name, (&store, path), with);
    let loaded = map_files(&store, &named, open).into_iter().collect::<Result<Vec<OpenShard>>>()?;
    if let [one] = loaded.as_slice() {
        check_fit(&folder, with.secret, one)?;
    }
    refuse_plain(&loaded).map_err(|fault| Error::refused(&folder, fault))?;
    let map = map.map(|map| weight_map(&folder, map, options)).transpose()?;
    let output = if let [one] = named.as_slice() { one.0.clone() } else { names::whole("model") };
    with_config_in((&store, &folder), |config| {
        of_shards(folder.clone(), &loaded, map, output, options, config)
    })
}

/// Refuses a secret for a file that is not encrypted.
fn check_fit(folder: &Path, secret: Option<&Secret>, shard: &OpenShard) -> Result<()> {
    match secret.and_then(|secret| secret.misfit(shard.source.is_encrypted())) {
        Some(fault) => Err(Error::refused(folder, fault.in_file(&shard.shard.name))),
        None => Ok(()),
    }
}

/// Makes the checkpoint of open shards. `output` is the name of its virtual file.
fn of_shards(
    folder: PathBuf,
    loaded: &[OpenShard],
    map: Option<WeightMap>,
    output: String,
    options: &OpenOptions,
    read_config: ReadConfig<'_>,
) -> Result<Arc<Checkpoint>> {
    let (kind, catalog) =
        catalog_of(loaded, map.as_ref()).map_err(|fault: Fault| Error::refused(&folder, fault))?;
    // The caller requested exactly these files, so no file is missing. Whether last pieces of tensors are missing is
    // unknown only for DCP shards without recorded shapes.
    let proven = check_demands(&folder, &catalog, options)?
        || kind != SetKind::Dcp
        || catalog.shapes_recorded;
    let source = |name: &str| loaded.iter().find(|file| file.shard.name == name);
    let sources: Vec<Arc<Source>> = catalog
        .shards
        .iter()
        .filter_map(|shard| Some(source(&shard.name)?.source.clone()))
        .collect();
    let view = View::default();
    let presented = present(catalog, kind, &output, &view, read_config)
        .map_err(|fault| Error::refused(&folder, fault))?;
    let set = ProvedSet {
        name: output,
        kind,
        format: view.format,
        directory: folder,
        tail: if proven { Tail::Proven } else { Tail::Unproven },
        sources,
        map: map.map(|map| (names::weight_map(&names::whole("model")), map.metadata)),
        manifest: None,
    };
    Ok(Arc::new(Checkpoint::new(set, presented)))
}

fn catalog_of(loaded: &[OpenShard], map: Option<&WeightMap>) -> Result<(SetKind, Catalog), Fault> {
    let headers: Vec<&ShardHeader> = loaded.iter().map(|file| &file.shard).collect();
    if let [one] = headers.as_slice() {
        let mut catalog = Catalog::of_whole_tensors(&headers, map)?;
        catalog.metadata = one.header.metadata.clone().map(Arc::new);
        return Ok((SetKind::of_file(loaded[0].format), catalog));
    }
    if loaded.iter().any(|file| file.shard.header.rank.is_some()) {
        return Ok((SetKind::Ranks, Catalog::of_rank_files(&headers)?));
    }
    if loaded.iter().any(|file| is_noted(file) && !file.shard.header.is_whole()) {
        return Ok((SetKind::Dcp, Catalog::of_dcp_shards(&headers, map)?));
    }
    let kind = if map.is_some() { SetKind::WeightMap } else { SetKind::Numbered };
    Ok((kind, Catalog::of_whole_tensors(&headers, map)?))
}

/// The folder of `file`, as an absolute path without links.
fn folder_of(file: &Path, options: &OpenOptions) -> Result<PathBuf> {
    let folder = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let store = Store::for_options(folder, options);
    store.real_path(folder).map_err(|e| Error::io(file, "open", e))
}

/// The name of `file` in a checkpoint in `folder`, and its real path. If the file is in another
/// folder, its name is its whole path.
fn name_in(folder: &Path, file: &Path, options: &OpenOptions) -> Result<(String, PathBuf)> {
    let store = Store::for_options(file, options);
    let real = store.real_path(file).map_err(|e| Error::io(file, "open", e))?;
    let own = folder_of(file, options)?;
    let name = match file.file_name().and_then(|name| name.to_str()) {
        Some(name) if own == folder => Some(name.to_owned()),
        Some(name) => own.join(name).to_str().map(str::to_owned),
        None => None,
    }
    .ok_or_else(|| Error::usage(format!("{}: the name is not UTF-8", shown_path(file))))?;
    Ok((name, real))
}

fn weight_map(
    folder: &Path,
    map: &BTreeMap<String, PathBuf>,
    options: &OpenOptions,
) -> Result<WeightMap> {
    let name = |file: &Path| Ok(name_in(folder, file, options)?.0);
    let pairs = map.iter().map(|(tensor, file)| Ok((tensor.clone(), name(file)?)));
    let shard_of = pairs.collect::<Result<_>>()?;
    Ok(WeightMap { metadata: serde_json::Map::new(), shard_of })
}
