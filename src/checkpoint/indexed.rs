//! Folders whose sets come from the index, and keeping what was proved there.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::shown_path;
use crate::format::{OutputFormat, manifest, names};
use crate::hash::Digest;
use crate::index::{
    EXTENSION, FileRecord, Fingerprint, Index, IndexStore, SetRecord, VirtualFileRecord, file_name,
    now,
};
use crate::open_options::Prefer;
use crate::source::{Identity, Source};

use super::Checkpoint;
use super::discover::{SetKind, Weights, is_noted};
use super::openers::map_files;
use super::set::{IndexState, Origin, Proved, Set, TailEvidence, check_completeness};
use super::tree::{File, Folder, FolderId, Tree};
use super::virtual_file::{FileSummary, VirtualFile, present};

/// Seconds for which a file must have been left alone before the index was made, so that a later
/// write cannot have the same times: some file systems count in twos.
const SETTLED: i64 = 2;

/// Most bytes of headers of which an index is kept: it is put together in memory.
const HEADERS_MAX: u64 = 512 << 20;

/// The index of one folder: where it is kept, and what stands in the folder now.
pub(super) struct FolderIndex<'a> {
    store: IndexStore,
    tree: &'a Tree,
    folder: &'a Folder,
    /// When it was begun, in seconds since 1970: what changes from then on is not known.
    started: i64,
}

/// What an index knows of the first bytes of files.
#[derive(Clone, Debug)]
pub struct IndexedHeads {
    /// When the files were looked at, in seconds since 1970.
    pub made: i64,
    /// By name.
    files: Vec<FileRecord>,
}

impl IndexedHeads {
    /// What it knows of the file `name`, which is `now`, unless it may have changed since.
    pub(crate) fn head(&self, name: &str, now: &Fingerprint) -> Option<&FileRecord> {
        let record = self.files.iter().find(|record| record.name == name)?;
        (record.fingerprint == *now && is_settled(now, self.made)).then_some(record)
    }
}

/// The length and hash of each text file of a folder, or why it could not be read. Taken before
/// the text is parsed: what is changed in between then does not match.
pub(super) type TextHashes = BTreeMap<String, Result<(Fingerprint, Digest), String>>;

impl Tree {
    /// What the index of `folder`, if it is there, knows of the headers, be it fresh or not.
    pub fn indexed_heads(&self, folder: FolderId) -> Option<IndexedHeads> {
        let folder = self.folder(folder);
        let index = FolderIndex::of(self, &folder)?;
        let bytes = index.store.read(&index.file_name()).ok()?;
        let Index { made, files, folder, .. } = Index::decode(&bytes).ok()?;
        let own = folder == index.folder.path.as_os_str().as_bytes();
        own.then_some(IndexedHeads { made, files })
    }

    /// Takes the index of `folder` away. Returns whether there was one.
    pub fn forget_index(&self, folder: FolderId) -> bool {
        let folder = self.folder(folder);
        let index = FolderIndex::of(self, &folder);
        index.is_some_and(|index| index.store.remove(&index.file_name()))
    }
}

impl<'a> FolderIndex<'a> {
    /// That of `folder`; None where none is to be kept.
    pub(super) fn of(tree: &'a Tree, folder: &'a Folder) -> Option<FolderIndex<'a>> {
        let store = IndexStore::new(tree.options.index.clone()?);
        Some(FolderIndex { store, tree, folder, started: now() })
    }

    /// Name of the file in the store. The same folder may be looked at in ways that make other
    /// sets.
    pub(super) fn file_name(&self) -> String {
        let folder = self.folder.path.as_os_str().as_bytes();
        let only = self.tree.only.as_deref().unwrap_or_default().as_bytes();
        let options = &self.tree.options;
        let bintensors = u8::from(options.view.format == OutputFormat::Bintensors);
        let looked_at = [u8::from(options.prefer == Prefer::Shards) | bintensors << 1];
        file_name(&[folder, only, &looked_at], EXTENSION)
    }

    /// The sets of the folder as the index has them, if nothing speaks against it; else what
    /// does, where there is one.
    pub(super) fn load(&self) -> Result<Proved, Option<String>> {
        let path = self.store.path(&self.file_name());
        let bytes = match self.store.read(&self.file_name()) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(None),
            Err(e) => return Err(self.doubt(format!("cannot be read: {e}"))),
        };
        let mut index = Index::decode(&bytes).map_err(|why| self.doubt(why.to_owned()))?;
        let mut len = bytes.len();
        drop(bytes);
        if self.compare(&index).map_err(|why| self.doubt(why))? {
            // The headers are as they were; the next start need not look at them.
            let files = index.files.iter().filter_map(|record| self.record_anew(record)).collect();
            index = Index { files, made: self.started, ..index };
            len = self.write(&index).unwrap_or(len);
        }
        let made = index.made;
        let mut proved = self.proved(index).map_err(|why| self.doubt(why))?;
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

    /// Whether the files of the folder are those of `index`, as far as fingerprints and, where
    /// these leave a doubt, their first bytes tell. True where writing it anew would spare the
    /// next one that doubt.
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
            let now = fingerprint(&file.identity);
            if now == record.fingerprint && is_settled(&now, index.made) {
                continue;
            }
            // What a catalog says follows from the length of a shard and the bytes before its
            // data.
            let end = record.described.last().map_or(0, |range| range.end);
            if now.len != record.fingerprint.len || end > now.len {
                return Err(not_as_it_is(record));
            }
            doubtful.push((record, file));
            renew |= now != record.fingerprint || is_settled(&now, self.started);
        }
        let compared = map_files(&doubtful, |(record, file)| (has_head(file, record), *record));
        let others = compared.into_iter().filter(|(same, _)| !same).map(|(_, record)| record);
        let first = others.min_by(|a, b| a.name.cmp(&b.name));
        first.map_or(Ok(renew), |record| Err(not_as_it_is(record)))
    }

    /// Whether the folder has any name that can make a set, or refuse one.
    pub(super) fn has_files(&self) -> bool {
        !self.files().is_empty() || self.unusable().next().is_some()
    }

    /// The files that can be part of a set, by name.
    fn files(&self) -> Vec<(&'a str, &'a File)> {
        let only = self.tree.only.as_deref();
        let named = self.folder.files.iter().filter_map(|file| Some((file.name.to_str()?, file)));
        named
            .filter(|(name, _)| {
                names::is_weights(name)
                    || names::weight_map_output(name).is_some()
                    || name.ends_with(manifest::SUFFIX)
                    || only == Some(*name)
            })
            .collect()
    }

    fn unusable(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.folder.misfits.iter().map(|misfit| misfit.name.as_bytes())
    }

    /// What the index says of the folder, as if it had been proved now.
    fn proved(&self, index: Index) -> Result<Proved, String> {
        let mut proved = Proved {
            weights: index.weights.into_iter().collect(),
            notes: index.notes,
            ..Proved::default()
        };
        let one_file = |word: &str| SetKind::from_word(word).is_some_and(SetKind::is_one_file);
        let alone = index.sets.iter().all(|set| one_file(&set.kind));
        for mut record in index.sets {
            let kind = SetKind::from_word(&record.kind).ok_or("knows another kind of set")?;
            let (name, files) = (record.name.clone(), std::mem::take(&mut record.files));
            let judged = alone || !kind.is_one_file();
            let outcome = self.checkpoint(record, kind, judged, &index.files)?;
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

    /// The checkpoint of a record. The outer error is a doubt about the index, the inner one a
    /// refusal that the options ask for.
    fn checkpoint(
        &self,
        record: SetRecord,
        kind: SetKind,
        judged: bool,
        files: &[FileRecord],
    ) -> Result<crate::Result<Checkpoint>, String> {
        let (catalog, options) = (record.catalog, &self.tree.options);
        let mut sources = Vec::with_capacity(catalog.shards.len());
        for shard in &catalog.shards {
            let file = self.folder.file(&shard.name).ok_or("knows a shard that is not there")?;
            if file.identity.len != shard.file_len {
                return Err("knows a shard of another length".to_owned());
            }
            let source = Source::closed(&file.path, file.identity);
            let at = files.binary_search_by(|record| record.name.as_str().cmp(&shard.name));
            let record = &files[at.map_err(|_| "does not list one of its shards")?];
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
        let (catalog, files) = present(catalog, kind, &record.name, &options.view);
        let checkpoint = Checkpoint {
            name: record.name,
            kind,
            format: options.view.format,
            directory: self.folder.path.clone(),
            tail,
            catalog,
            sources,
            files,
            map,
            manifest,
        };
        Ok(checkpoint.summarize(&record.virtual_files).map(|()| checkpoint))
    }

    /// Looks at the text files of the folder, before they are parsed.
    pub(super) fn texts(&self) -> TextHashes {
        let files = self.files().into_iter().filter(|(name, _)| {
            names::weight_map_output(name).is_some() || name.ends_with(manifest::SUFFIX)
        });
        let look = |file: &File| {
            let source = Source::open(&file.path)?;
            let hash = source.hash_ranges(std::slice::from_ref(&(0..source.len())))?;
            source.check()?;
            Ok((fingerprint(&source.identity()), hash))
        };
        let look = |file| look(file).map_err(|e: crate::Error| e.to_string());
        files.map(|(name, file)| (name.to_owned(), look(file))).collect()
    }

    /// Keeps what was proved, where all of it is whole. `before` is what spoke against the index
    /// that was there, `texts` what `texts` returned before anything was parsed.
    pub(super) fn keep(
        &self,
        before: Option<String>,
        texts: &TextHashes,
        weights: &Weights,
        proved: &Proved,
    ) -> IndexState {
        let index = match headers_len(weights) {
            len if len > HEADERS_MAX => Err(format!(
                "its weight files have headers of {len} bytes, an index is kept of {HEADERS_MAX}"
            )),
            _ => self.index_of(texts, weights, proved),
        };
        if index.is_err() && before.is_some() {
            // What it says is no longer so.
            self.store.remove(&self.file_name());
        }
        let written = index.and_then(|index| self.write(&index));
        IndexState {
            path: self.store.path(&self.file_name()),
            len: written.as_ref().ok().map(|len| *len as u64),
            made: self.started,
            origin: match written {
                Ok(_) => Origin::Headers(before),
                Err(why) => Origin::NotKept(why),
            },
        }
    }

    /// Writes the index; returns its length in bytes.
    fn write(&self, index: &Index) -> Result<usize, String> {
        let name = self.file_name();
        let path = shown_path(&self.store.path(&name));
        let bytes = index.encode().ok_or_else(|| format!("{path}: the index would be too long"))?;
        let written = self.store.write(&name, &bytes).map_err(|e| format!("{path}: {e}"));
        match &written {
            Ok(()) => tracing::debug!("{path}: written, {} bytes", bytes.len()),
            Err(why) => tracing::info!("the index is not kept: {why}"),
        }
        written.map(|()| bytes.len())
    }

    /// The index of what was proved; an error where a set is refused, or a file is not what it
    /// was when the folder was looked at.
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
                    let described = loaded.shard.header.described.clone();
                    (fingerprint(&loaded.source.identity()), described, loaded.hash)
                }
                (None, Some(text)) => {
                    let (found, hash) = text.clone()?;
                    (found, std::iter::once(0..found.len).collect(), hash)
                }
                (None, None) => return Err(format!("{name} was not looked at")),
            };
            let fingerprint = fingerprint(&file.identity);
            if fingerprint != found {
                return Err(format!("{name} has changed since the folder was looked at"));
            }
            files.push(FileRecord { name: name.to_owned(), fingerprint, described, hash });
        }
        let sets = proved.sets.iter().map(|set| self.set_record(set, weights));
        let sets: Option<_> = sets.collect();
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

    fn set_record(&self, set: &Set, weights: &Weights) -> Option<SetRecord> {
        let checkpoint = set.outcome.as_ref().ok()?;
        let loaded = |name: &String| weights.get(name).and_then(|loaded| loaded.as_ref().ok());
        // A start with `Files::Original` and one with `Files::Single` share the index.
        let mut files: Vec<VirtualFile> = checkpoint.virtual_files().collect();
        if files.is_empty() && !checkpoint.is_whole_file() {
            files.push(checkpoint.single_file());
        }
        let record = |file: &VirtualFile| {
            // A checkpoint without a layout may still be shown as it is.
            let FileSummary { len, header } = file.summary().ok()?;
            Some(VirtualFileRecord { spec: file.spec().digest(), len, header })
        };
        Some(SetRecord {
            name: set.name.clone(),
            kind: set.kind.as_str().to_owned(),
            files: set.files.iter().cloned().collect(),
            manifest: checkpoint.manifest,
            noted: set.kind != SetKind::Bintensors
                && set.files.iter().filter_map(loaded).any(is_noted),
            map: checkpoint
                .map
                .as_ref()
                .map(|(name, metadata)| (name.clone(), Value::from(metadata.clone()).to_string())),
            virtual_files: files.iter().filter_map(record).collect(),
            catalog: checkpoint.catalog.clone(),
        })
    }

    fn record_anew(&self, record: &FileRecord) -> Option<FileRecord> {
        let file = self.folder.file(&record.name)?;
        Some(FileRecord { fingerprint: fingerprint(&file.identity), ..record.clone() })
    }
}

/// Bytes of the headers of all names, also where several are links to one file: the index holds
/// each.
fn headers_len(weights: &Weights) -> u64 {
    let loaded = weights.values().filter_map(|loaded| loaded.as_ref().ok());
    loaded.fold(0, |sum: u64, loaded| sum.saturating_add(loaded.shard.header.description_len()))
}

fn not_as_it_is(record: &FileRecord) -> String {
    format!("does not know {} as it is", record.name)
}

/// Whether the file, as it was when the folder was looked at, has the first bytes of its record.
fn has_head(file: &File, record: &FileRecord) -> bool {
    let head = || {
        let source = Source::open(&file.path).ok()?;
        let same = source.identity() == file.identity;
        let hash = source.hash_ranges(&record.described).ok()?;
        source.check().ok()?;
        same.then_some(hash)
    };
    head() == Some(record.hash)
}

/// Whether the file had been left alone for long enough at `made`.
fn is_settled(file: &Fingerprint, made: i64) -> bool {
    file.mtime.0.max(file.ctime.0) < made.saturating_sub(SETTLED)
}

/// What is kept of an identity.
pub(crate) fn fingerprint(identity: &Identity) -> Fingerprint {
    Fingerprint {
        ino: identity.ino,
        len: identity.len,
        mtime: identity.mtime,
        ctime: identity.ctime(),
    }
}
