//! Loads the sets of a folder from its index, and writes proved sets into the index.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::{Error, shown_path};
use crate::format::deepspeed::StateFile;
use crate::format::{OutputFormat, TrainingState, manifest, names, pickle};
use crate::hash::{Digest, Hasher};
use crate::index::{
    EXTENSION, FileRecord, Index, IndexStore, PresentedRecord, SETTLED, SetRecord,
    VirtualFileRecord, file_name, now,
};
use crate::open_options::{OpenOptions, Prefer, ZeroWeights};
use crate::version::Version;

use super::config::with_config_of;
use super::discover::{SetKind, Weights, is_noted};
use super::distcp::metadata_max;
use super::folder::{File, Folder, FolderId};
use super::openers::map_files;
use super::set::{IndexState, Origin, Proved, Set, TailEvidence, check_completeness};
use super::tree::Tree;
use super::virtual_file::{FileSummary, VirtualFile, present, presented_as_recorded};
use super::{Checkpoint, ProvedSet};

/// Number of combinations of the options that change the sets of a folder. Each option is one bit: `Prefer::Shards`,
/// bintensors, and for pickles `TrainingState::All` and `ZeroWeights::Fp32`.
const ALL_OPTIONS: u8 = 1 << 4;

/// Maximum number of bytes of headers for which an index is written, because an index is built in memory.
const HEADERS_MAX: u64 = 512 << 20;

/// The byte ranges of a file on which its sets depend, ascending.
type DecidingBytes = Vec<Range<u64>>;

/// The index of one folder: the store of the index, and the current files of the folder.
pub(super) struct FolderIndex<'a> {
    pub(super) store: IndexStore,
    tree: &'a Tree,
    pub(super) folder: &'a Folder,
    /// Start of the work in seconds since 1970. The index does not cover changes after this time.
    started: i64,
}

/// The records of the headers of files, from an index.
#[derive(Clone, Debug)]
pub struct IndexedHeaders {
    /// Time at which the files were examined, in seconds since 1970.
    pub made: i64,
    /// Records of files, sorted by name.
    files: Vec<FileRecord>,
}

impl IndexedHeaders {
    /// The record of the file `name`. `None` if the file may have changed since the index was made.
    /// `now` is its current version.
    pub(crate) fn header(&self, name: &str, now: &Version) -> Option<&FileRecord> {
        let record = self.files.iter().find(|record| record.name == name)?;
        (record.version == *now && is_settled(now, self.made)).then_some(record)
    }
}

/// The version and the hash of each text file of a folder, or why it could not be read. They are
/// read before the text is parsed, so that a change in between is noticed.
pub(super) type TextHashes = BTreeMap<String, Result<(Version, Digest), String>>;

impl Tree {
    /// The records of the headers in the index of `folder`. They may be out of date. `None` if
    /// there is no index.
    pub fn indexed_headers(&self, folder: FolderId) -> Option<IndexedHeaders> {
        let folder = self.folder(folder);
        let index = FolderIndex::of(self, &folder)?;
        let bytes = index.store.read(&index.file_name()).ok()?;
        let Index { made, files, folder, .. } = Index::decode(&bytes).ok()?;
        let own = folder == index.folder.path.as_os_str().as_bytes();
        own.then_some(IndexedHeaders { made, files })
    }

    /// Removes the indexes of `folder` for all combinations of options, and the records of views beside them. Returns
    /// whether there was an index for the options of the tree.
    pub fn forget_index(&self, folder: FolderId) -> bool {
        let folder = self.folder(folder);
        let Some(index) = FolderIndex::of(self, &folder) else { return false };
        let removed = index.remove();
        for name in (0..ALL_OPTIONS).map(|options| index.file_name_of(options)) {
            index.store.remove_views(&name);
            index.store.remove(&name);
        }
        removed
    }
}

impl<'a> FolderIndex<'a> {
    /// The index of `folder`. `None` if the options name no folder for indexes.
    pub(super) fn of(tree: &'a Tree, folder: &'a Folder) -> Option<FolderIndex<'a>> {
        let store = IndexStore::new(tree.options.index.clone()?);
        Some(FolderIndex { store, tree, folder, started: now() })
    }

    /// Name of the index file in the store. The name depends on the options that change the sets of
    /// the folder.
    pub(super) fn file_name(&self) -> String {
        let options = self.options();
        let bintensors = u8::from(options.view.format == OutputFormat::Bintensors);
        let plain = u8::from(options.prefer == Prefer::Shards) | bintensors << 1;
        let (state, zero) = (self.tree.options.state, self.tree.options.zero);
        let of_pickles =
            u8::from(state == TrainingState::All) << 2 | u8::from(zero == ZeroWeights::Fp32) << 3;
        let has_pickles = self.folder.has_pickles(self.tree.only.as_deref());
        self.file_name_of(plain | if has_pickles { of_pickles } else { 0 })
    }

    /// Name of the index file for the options with these bits. `options` is less than
    /// `ALL_OPTIONS`.
    fn file_name_of(&self, options: u8) -> String {
        let folder = self.folder.path.as_os_str().as_bytes();
        let only = self.tree.only.as_deref().unwrap_or_default().as_bytes();
        file_name(&[folder, only, &[options]], EXTENSION)
    }

    /// The options with which the folder is opened.
    pub(super) fn options(&self) -> &OpenOptions {
        self.tree.options_of(self.folder)
    }

    /// Removes the index and the records of views that belong to it. Returns whether there was an
    /// index.
    fn remove(&self) -> bool {
        self.store.remove_views(&self.file_name());
        self.store.remove(&self.file_name())
    }

    /// Loads the sets of the folder from the index. The error is the reason why the index is not
    /// used, or `None` if there is no index.
    pub(super) fn load(&self) -> Result<Proved, Option<String>> {
        let path = self.store.path(&self.file_name());
        let bytes = match self.store.read(&self.file_name()) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(None),
            Err(e) => return Err(self.doubt(format!("cannot be read: {e}"))),
        };
        let mut index = Index::decode(&bytes).map_err(|why| self.doubt(why.to_owned()))?;
        let (mut len, mut checksum) = (bytes.len(), Index::checksum(&bytes));
        drop(bytes);
        if self.compare(&index).map_err(|why| self.doubt(why))? {
            // The headers are unchanged, but their hashes had to be compared. A new index with the current versions of
            // the files makes this unnecessary at the next start.
            let files = index.files.iter().filter_map(|record| self.record_anew(record)).collect();
            index = Index { files, made: self.started, ..index };
            if let Ok(written) = self.write(&index) {
                (len, checksum) = written;
            }
        }
        let made = index.made;
        let view = self.recorded_view(checksum, &index.sets);
        let is_recorded = view.is_some();
        let presented = view.map(|view| view.sets).unwrap_or_default();
        let mut proved = self.proved(index, presented).map_err(|why| self.doubt(why))?;
        if !is_recorded {
            self.keep_view(checksum, &proved);
        }
        proved.index =
            Some(IndexState { path, len: Some(len as u64), made, origin: Origin::Index });
        let folder = shown_path(&self.folder.path);
        tracing::debug!("{folder}: {} sets from the index", proved.sets.len());
        Ok(proved)
    }

    fn doubt(&self, why: String) -> Option<String> {
        let path = self.store.path(&self.file_name());
        tracing::info!("{}: not used: it {why}", shown_path(&path));
        Some(why)
    }

    /// Compares the files of the folder with `index` by their versions. If a version does not show
    /// whether a file has changed, compares the hash of the bytes that describe its tensors.
    /// Returns true if a new index would make that comparison unnecessary at the next start.
    fn compare(&self, index: &Index) -> Result<bool, String> {
        if index.folder != self.folder.path.as_os_str().as_bytes() {
            return Err("is about another folder".to_owned());
        }
        let files = self.files();
        let names = files.iter().map(|(name, _)| *name);
        if !names.eq(index.files.iter().map(|record| record.name.as_str())) {
            return Err("lists other files".to_owned());
        }
        if !self.unusable().eq(index.unusable.iter().map(Vec::as_slice)) {
            return Err("lists other unusable files".to_owned());
        }
        let mut doubtful = Vec::new();
        let mut renew = false;
        for (record, (_, file)) in index.files.iter().zip(files) {
            let now = file.version.lasting();
            if now == record.version && is_settled(&now, index.made) {
                continue;
            }
            // A catalog depends only on the length of each shard and on the bytes that describe its
            // tensors.
            let end = record.described.last().map_or(0, |range| range.end);
            if now.len != record.version.len || end > now.len {
                return Err(not_as_it_is(record));
            }
            doubtful.push((record, file));
            renew |= now != record.version || is_settled(&now, self.started);
        }
        let compared = map_files(&self.folder.store, &doubtful, |(record, file)| {
            (has_head(file, record), *record)
        });
        let others = compared.into_iter().filter(|(same, _)| !same).map(|(_, record)| record);
        let first = others.min_by(|a, b| a.name.cmp(&b.name));
        first.map_or(Ok(renew), |record| Err(not_as_it_is(record)))
    }

    /// Whether the folder has any name that can be part of a set, or that can cause a refusal.
    pub(super) fn has_files(&self) -> bool {
        !self.files().is_empty() || self.unusable().next().is_some()
    }

    /// The files that can be part of a set or that affect a set, by name.
    fn files(&self) -> Vec<(&'a str, &'a File)> {
        let only = self.tree.only.as_deref();
        let (reads_torch, reads_distcp) =
            (self.folder.reads_torch(only), self.folder.reads_distcp(only));
        let may_be_with = self.folder.may_be_with(only);
        // With `TrainingState::All`, a note names the files that have the state of a training.
        let tells_states =
            self.tree.options.state == TrainingState::All && self.folder.has_pickles(only);
        let named = self.folder.files.iter().filter_map(|file| Some((file.name.to_str()?, file)));
        named
            .filter(|(name, _)| {
                (names::is_weights(name) && may_be_with(name))
                    || names::weight_map_output(name).is_some()
                    || name.ends_with(manifest::SUFFIX)
                    || only == Some(*name)
                    || (reads_torch
                        && (names::is_of_torch(name) || StateFile::of(name).is_some())
                        && may_be_with(name))
                    || (reads_distcp && names::is_of_distcp(name))
                    || (tells_states && names::is_torch_state(name))
            })
            .collect()
    }

    fn unusable(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.folder.misfits.iter().map(|misfit| misfit.name.as_bytes())
    }

    /// Makes the sets in the index into the result of a proof. `presented` has, for each set, the
    /// record of its view.
    fn proved(
        &self,
        index: Index,
        presented: Vec<Option<PresentedRecord>>,
    ) -> Result<Proved, String> {
        let mut proved = Proved {
            weights: index.weights.into_iter().collect(),
            notes: index.notes,
            ..Proved::default()
        };
        let one_file = |word: &str| word.parse().is_ok_and(SetKind::is_one_file);
        let alone = index.sets.iter().all(|set| one_file(&set.kind));
        let mut presented = presented.into_iter();
        for mut record in index.sets {
            let presented = presented.next().flatten();
            let kind =
                record.kind.parse::<SetKind>().map_err(|_| "has a set of an unknown kind")?;
            let (name, files) = (record.name.clone(), std::mem::take(&mut record.files));
            let judged = alone || !kind.is_one_file();
            let outcome = self.checkpoint(record, presented, kind, judged, &index.files)?;
            proved.sets.push(Set {
                name,
                kind,
                files: files.into_iter().collect(),
                outcome: outcome.map(Arc::new),
                shown_at_parent: None,
            });
        }
        Ok(proved)
    }

    /// Makes the checkpoint of a record. The outer error is the reason why the index is not used.
    /// The inner error is a refusal that an option causes.
    fn checkpoint(
        &self,
        record: SetRecord,
        presented: Option<PresentedRecord>,
        kind: SetKind,
        judged: bool,
        files: &[FileRecord],
    ) -> Result<crate::Result<Checkpoint>, String> {
        let (catalog, options) = (record.catalog, self.options());
        let mut sources = Vec::with_capacity(catalog.shards.len());
        for shard in &catalog.shards {
            let file = self.folder.file(&shard.name).ok_or("lists a shard that does not exist")?;
            if file.version.len != shard.file_len {
                return Err("lists a shard whose length differs".to_owned());
            }
            let source = file.source();
            let index = files.binary_search_by(|record| record.name.as_str().cmp(&shard.name));
            let record = &files[index.map_err(|_| "does not list one of its shards")?];
            source.set_described(record.described.clone(), record.hash);
            sources.push(source);
        }
        let map = match record.map {
            None => None,
            Some((name, metadata)) => {
                let metadata: Map<String, Value> = serde_json::from_str(&metadata)
                    .map_err(|_| "has a weight map that is no JSON")?;
                Some((name, metadata))
            }
        };
        let total_size =
            map.as_ref().and_then(|(_, metadata)| metadata.get("total_size")?.as_u64());
        let set = TailEvidence {
            name: &record.name,
            kind,
            total_size,
            noted: record.noted,
            judged,
            manifest: record.manifest,
        };
        let (tail, manifest) = match check_completeness(self.folder, &catalog, options, &set) {
            Ok(proved) => proved,
            Err(error) => return Ok(Err(error)),
        };
        let outcome = with_config_of(self.folder, options, |config| {
            let view = &options.view;
            let recorded = presented.and_then(|set| presented_as_recorded(&catalog, set, view));
            recorded.map_or_else(|| present(catalog, kind, &record.name, view, config), Ok)
        });
        let presented = match outcome {
            Ok(presented) => presented,
            Err(fault) => return Ok(Err(Error::refused(&self.folder.path, fault))),
        };
        let set = ProvedSet {
            name: record.name,
            kind,
            format: options.view.format,
            directory: self.folder.path.clone(),
            tail,
            sources,
            map,
            manifest,
        };
        let checkpoint = Checkpoint::new(set, presented);
        Ok(checkpoint.summarize(&record.virtual_files).map(|()| checkpoint))
    }

    /// Hashes the text files of the folder. Has to be called before they are parsed.
    pub(super) fn texts(&self) -> TextHashes {
        let files = self.files().into_iter().filter(|(name, _)| {
            names::is_weight_map(name)
                || name.ends_with(manifest::SUFFIX)
                || *name == names::DISTCP_METADATA
        });
        let look = |file: &File| -> crate::Result<_> {
            let source = file.open_listed()?;
            // A longer text is refused when it is parsed, so its hash does not matter.
            let hashed = 0..Some(source.len()).filter(|&len| len <= metadata_max()).unwrap_or(0);
            let hash = source.hash_ranges(std::slice::from_ref(&hashed))?;
            source.check_after_read()?;
            Ok((source.version().lasting(), hash))
        };
        files
            .map(|(name, file)| (name.to_owned(), look(file).map_err(|error| error.to_string())))
            .collect()
    }

    /// Writes the index if all sets are proved. `before` is the reason why the previous index was
    /// not used. `texts` is the result of `texts`, from before the texts were parsed.
    pub(super) fn keep(
        &self,
        before: Option<String>,
        texts: &TextHashes,
        weights: &Weights,
        proved: &Proved,
    ) -> IndexState {
        let index = match headers_len(weights) {
            len if len > HEADERS_MAX => Err(format!(
                "its weight files have headers of {len} bytes, an index is kept for at most {HEADERS_MAX}"
            )),
            _ => self.index_of(texts, weights, proved),
        };
        if index.is_err() && before.is_some() {
            // The previous index is out of date, so it is removed.
            self.remove();
        }
        let written = index.and_then(|index| self.write(&index));
        if let Ok((_, checksum)) = &written {
            self.keep_view(*checksum, proved);
        }
        IndexState {
            path: self.store.path(&self.file_name()),
            len: written.as_ref().ok().map(|(len, _)| *len as u64),
            made: self.started,
            origin: match written {
                Ok(_) => Origin::Headers(before),
                Err(why) => Origin::NotKept(why),
            },
        }
    }

    /// Writes the index. Returns its length in bytes and its checksum.
    fn write(&self, index: &Index) -> Result<(usize, Option<Digest>), String> {
        let name = self.file_name();
        let path = shown_path(&self.store.path(&name));
        let bytes = index.encode().ok_or_else(|| format!("{path}: the index would be too long"))?;
        let written = self.store.write(&name, &bytes).map_err(|e| format!("{path}: {e}"));
        match &written {
            Ok(()) => tracing::debug!("{path}: written, {} bytes", bytes.len()),
            Err(why) => tracing::info!("the index is not kept: {why}"),
        }
        written.map(|()| (bytes.len(), Index::checksum(&bytes)))
    }

    /// Makes the index of the proved sets. Fails if a set is refused, or if a file has changed
    /// since the folder was scanned.
    fn index_of(
        &self,
        texts: &TextHashes,
        weights: &Weights,
        proved: &Proved,
    ) -> Result<Index, String> {
        let refused = || "a checkpoint in the folder is refused".to_owned();
        let mut files = Vec::new();
        for (name, file) in self.files() {
            let (found, described, hash) = match (weights.get(name), texts.get(name)) {
                (Some(loaded), _) => {
                    let loaded = loaded.as_ref().map_err(|_| refused())?;
                    if loaded.source.is_encrypted() {
                        return Err(format!("{name} is encrypted"));
                    }
                    let described = loaded.shard.header.described.clone();
                    (loaded.source.version().lasting(), described, loaded.hash)
                }
                (None, Some(text)) => {
                    let (found, hash) = text.clone()?;
                    (found, std::iter::once(0..found.len).collect(), hash)
                }
                (None, None) => self.unread(name, file)?,
            };
            let version = file.version.lasting();
            if version != found {
                return Err(format!("{name} has changed since the folder was looked at"));
            }
            files.push(FileRecord { name: name.to_owned(), version, described, hash });
        }
        let sets: Option<_> = proved.sets.iter().map(|set| self.set_record(set, weights)).collect();
        Ok(Index {
            folder: self.folder.path.as_os_str().as_bytes().to_vec(),
            made: self.started,
            files,
            unusable: self.unusable().map(<[u8]>::to_vec).collect(),
            weights: proved.weights.iter().cloned().collect(),
            notes: proved.notes.clone(),
            sets: sets.ok_or_else(refused)?,
        })
    }

    /// For a file of torch that is in no set: its version, the bytes that show why it is in no set, and the hash of
    /// these bytes.
    fn unread(&self, name: &str, file: &File) -> Result<(Version, DecidingBytes, Digest), String> {
        let is_named = StateFile::of(name).is_some() || names::is_torch_state(name);
        if is_named || names::is_distcp(name) {
            // A file with such a name affects the sets only by its name and by whether it is empty, so no bytes are
            // hashed.
            return Ok((file.version.lasting(), Vec::new(), Hasher::new().finish()));
        }
        let look = || -> crate::Result<_> {
            let source = file.open_listed()?;
            let described: DecidingBytes =
                std::iter::once(0..source.len().min(pickle::FIRST_LEN as u64)).collect();
            let mut first = vec![0; described[0].end as usize];
            source.read_exact_at(&mut first, 0)?;
            let hash = source.hash_ranges(&described)?;
            source.check_after_read()?;
            Ok((source.version().lasting(), described, hash, first))
        };
        let (version, described, hash, first) = look().map_err(|error| error.to_string())?;
        if pickle::may_be_torch(&first) {
            return Err(format!("{name} was not looked at"));
        }
        Ok((version, described, hash))
    }

    fn set_record(&self, set: &Set, weights: &Weights) -> Option<SetRecord> {
        let checkpoint = set.outcome.as_ref().ok()?;
        let loaded = |name: &String| weights.get(name).and_then(|loaded| loaded.as_ref().ok());
        // `Files::Original` and `Files::Single` use the same index.
        let mut files: Vec<VirtualFile> = checkpoint.virtual_files().collect();
        if checkpoint.has_other_tensors() {
            files.clear();
        } else if files.is_empty() && !checkpoint.is_whole_file() {
            files.push(checkpoint.single_file());
        }
        let record = |file: &VirtualFile| {
            // A checkpoint without a layout may still be shown unchanged, so this is no error.
            let FileSummary { len, header } = file.summary().ok()?;
            Some(VirtualFileRecord { spec: file.spec().digest(), len, header })
        };
        Some(SetRecord {
            name: set.name.clone(),
            kind: set.kind.as_str().to_owned(),
            files: set.files.iter().cloned().collect(),
            manifest: checkpoint.manifest,
            noted: !set.kind.is_converted() && set.files.iter().filter_map(loaded).any(is_noted),
            map: checkpoint
                .map
                .as_ref()
                .map(|(name, metadata)| (name.clone(), Value::from(metadata.clone()).to_string())),
            virtual_files: files.iter().filter_map(record).collect(),
            catalog: checkpoint.proved.clone(),
        })
    }

    fn record_anew(&self, record: &FileRecord) -> Option<FileRecord> {
        let file = self.folder.file(&record.name)?;
        Some(FileRecord { version: file.version.lasting(), ..record.clone() })
    }
}

/// Number of bytes of the headers of all names. If several links lead to one file, its header is
/// counted for each link, because the index has a record for each.
fn headers_len(weights: &Weights) -> u64 {
    let loaded = weights.values().filter_map(|loaded| loaded.as_ref().ok());
    loaded.fold(0, |sum: u64, loaded| sum.saturating_add(loaded.shard.header.description_len()))
}

fn not_as_it_is(record: &FileRecord) -> String {
    format!("is out of date for {}", record.name)
}

/// Whether the file is unchanged since the scan, and its descriptive bytes have the hash of its
/// record.
fn has_head(file: &File, record: &FileRecord) -> bool {
    let head = || {
        let source = file.open_listed().ok()?;
        let same = source.version() == file.version;
        let hash = source.hash_ranges(&record.described).ok()?;
        source.check_after_read().ok()?;
        same.then_some(hash)
    };
    head() == Some(record.hash)
}

/// Whether the last change of the file was more than `SETTLED` seconds before `made`.
fn is_settled(file: &Version, made: i64) -> bool {
    file.changed().is_none_or(|(seconds, _)| seconds < made.saturating_sub(SETTLED))
}
