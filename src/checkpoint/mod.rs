//! Opens checkpoints: finds the files of a folder that belong together, proves that they are whole,
//! and holds them open.

mod away;
mod config;
mod deepspeed;
mod discover;
mod distcp;
mod entries;
mod files;
mod folder;
mod folders;
mod header_memory;
mod hub;
mod indexed;
mod load;
mod nothing;
mod openers;
mod pickles;
mod prove;
mod runs;
mod saved;
mod scan;
mod set;
mod small_files;
mod tree;
mod universal;
mod update;
mod view_records;
mod virtual_file;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::catalog::{Catalog, Shard};
use crate::error::{Error, ErrorKind, Fault, Result, shown_path};
use crate::format::{InputFormat, OutputFormat};
use crate::index::ConfigRecord;
use crate::open_options::OpenOptions;
use crate::source::Source;

pub use away::FolderVersion;
pub use discover::SetKind;
pub use entries::{Content, ERROR_FILE, MountEntry};
pub use folder::{File, Folder, FolderId, Misfit};
pub use indexed::IndexedHeaders;
pub(crate) use load::header_hashes;
pub use pickles::scan_pickles;
pub use scan::LeftOut;
pub use set::{IndexState, Origin, Proved, Set};
pub use tree::Tree;
pub use update::{FolderChange, TreeChange};
use virtual_file::{ArrangedFile, Presented};
pub use virtual_file::{FileSummary, VirtualFile};

words! {
    /// Whether the proof shows that the last pieces of tensors are not missing.
    ///
    /// ```
    /// use tensorfs::{Checkpoint, ErrorKind, OpenOptions, Tail};
    ///
    /// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
    /// // The weight map lists every tensor, so a missing tensor would be noticed.
    /// assert_eq!(checkpoint.tail, Tail::Proven);
    ///
    /// // The files of rank shards do not record the number of shards.
    /// let shards = "tests/fixtures/dcp/col_wise/shards".as_ref();
    /// let checkpoint = Checkpoint::open(shards)?;
    /// assert_eq!(checkpoint.tail, Tail::Unproven);
    /// let error = checkpoint.require_proven_tail().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::UnprovenTail);
    ///
    /// // The number of shards, or a reference, proves that none is missing.
    /// let options = OpenOptions { expect_shards: Some(4), ..OpenOptions::default() };
    /// Checkpoint::open_with(shards, &options)?.require_proven_tail()?;
    /// # Ok::<(), tensorfs::Error>(())
    /// ```
    pub enum Tail {
        /// Shapes, sizes or the number of shards prove that no last piece is missing.
        Proven = "proven",
        /// It is not known whether a last piece is missing: without that piece, the tensor would
        /// only look smaller.
        Unproven = "unproven",
    }
}

/// One checkpoint that is proved and open.
///
/// ```
/// use tensorfs::Checkpoint;
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// println!("{} has {} tensors", checkpoint.name, checkpoint.catalog().len());
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Name of the set. It is also the name of the file that has all its tensors.
    pub name: String,
    /// The reason why its files form a set.
    pub kind: SetKind,
    /// Format of its virtual files.
    pub format: OutputFormat,
    /// The folder of its files.
    pub directory: PathBuf,
    /// Whether the proof shows that the last pieces are not missing.
    pub tail: Tail,
    /// The catalog of its shards, as it was proved.
    proved: Catalog,
    /// The catalog after its view was applied.
    catalog: Catalog,
    /// Whether it is one file that is served unchanged.
    is_whole_file: bool,
    sources: Vec<Arc<Source>>,
    /// The virtual files that its view arranges.
    files: Vec<Arc<ArrangedFile>>,
    /// Its weight map: the name of the file, and the metadata in it.
    map: Option<(String, Map<String, Value>)>,
    /// Whether the manifest beside it has the shapes of all tensors. `None` if no manifest was
    /// compared.
    manifest: Option<bool>,
    /// The `config.json` that its view read.
    config: ConfigRecord,
}

/// A set that was proved, independent of the view that presents it.
struct ProvedSet {
    name: String,
    kind: SetKind,
    format: OutputFormat,
    directory: PathBuf,
    tail: Tail,
    sources: Vec<Arc<Source>>,
    map: Option<(String, Map<String, Value>)>,
    manifest: Option<bool>,
}

impl Checkpoint {
    fn new(set: ProvedSet, presented: Presented) -> Checkpoint {
        let ProvedSet { name, kind, format, directory, tail, sources, map, manifest } = set;
        let Presented { proved, catalog, files, is_whole_file, config } = presented;
        Checkpoint {
            name,
            kind,
            format,
            directory,
            tail,
            proved,
            catalog,
            is_whole_file,
            sources,
            files,
            map,
            manifest,
            config,
        }
    }

    /// Opens the one checkpoint at `path`, which is a folder, or a file of the set. Follows links
    /// to files wherever they lead, with the rights of the caller.
    ///
    /// # Errors
    /// The reason of a refusal, with file and tensor. `Error::Usage` if `path` holds more than one
    /// checkpoint.
    pub fn open(path: &Path) -> Result<Arc<Checkpoint>> {
        Checkpoint::open_with(path, &OpenOptions::default())
    }

    /// Opens the one checkpoint at `path` with `options`. With `OpenOptions::index`, it is loaded
    /// from the index in that folder. A missing or outdated index is written.
    ///
    /// # Errors
    /// The errors of `open`.
    pub fn open_with(path: &Path, options: &OpenOptions) -> Result<Arc<Checkpoint>> {
        let tree = Tree::scan(path, options)?;
        let mut sets = Vec::new();
        for family in tree.families() {
            let proved = tree.prove(family);
            sets.extend(proved.into_iter().flat_map(|(_, proved)| proved.sets));
        }
        sets.retain(|set| set.shown_at_parent.is_none());
        match <[Set; 1]>::try_from(sets) {
            Ok([set]) => set.outcome,
            Err(sets) if sets.is_empty() => Err(Error::usage(tree.nothing_found())),
            Err(sets) => Err(Error::usage(format!(
                "{}: {} checkpoints here, name one of them: {}",
                shown_path(&tree.source),
                sets.len(),
                crate::catalog::named_some(sets.iter().map(|set| set.name.as_str())),
            ))),
        }
    }

    /// The catalog of its shards, before its view is applied.
    pub fn source_catalog(&self) -> &Catalog {
        &self.proved
    }

    /// Its catalog, after its view is applied.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Its open files, in the order of the shards in the catalog.
    #[doc(hidden)]
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// The open file of the shard called `name`.
    #[doc(hidden)]
    pub fn source(&self, name: &str) -> Option<&Arc<Source>> {
        let index = self.catalog.shards.iter().position(|shard| shard.name == name)?;
        Some(&self.sources[index])
    }

    /// Closes its files until the next read, so that the disk space of deleted files is freed.
    pub fn release_files(&self) {
        self.sources.iter().for_each(|source| source.release());
    }

    /// Whether it is one file that is served unchanged.
    pub fn is_whole_file(&self) -> bool {
        self.is_whole_file
    }

    /// The format of its shard `shard`.
    #[doc(hidden)]
    pub fn format_of(&self, shard: &Shard) -> InputFormat {
        self.kind.format_of(&shard.name)
    }

    /// The weight map that lists its shards: the name of the file, and the metadata in it.
    pub fn weight_map(&self) -> Option<(&str, &Map<String, Value>)> {
        self.map.as_ref().map(|(name, metadata)| (name.as_str(), metadata))
    }

    /// Returns an error if it is not known whether a last piece is missing.
    ///
    /// # Errors
    /// `unproven_tail`. The message says what to do.
    pub fn require_proven_tail(&self) -> Result<()> {
        match self.tail {
            Tail::Proven => Ok(()),
            Tail::Unproven => {
                let count = self.proved.shards.len();
                let shards = if count == 1 { "shard" } else { "shards" };
                Err(self.refused(ErrorKind::UnprovenTail.fault(format!(
                        "tail: unproven: {count} {shards} found, and nothing tells whether there were \
                         more: a lost last one would only make tensors smaller; give expect_shards= \
                         or reference=, or a manifest (tensorfs verify --write-manifest)"
                    ))))
            }
        }
    }

    /// Makes an error of `fault`, which was found in this checkpoint. If the set is one file, the
    /// error names the file, otherwise the folder.
    pub fn refused(&self, fault: Fault) -> Error {
        let fault = match self.one_file() {
            Some(file) => fault.in_file(file),
            None => fault,
        };
        Error::refused(&self.directory, fault)
    }

    /// The name of its file, if its set is one file.
    fn one_file(&self) -> Option<&str> {
        let mut shards = self.proved.shards.iter().filter(|_| self.kind.is_one_file());
        shards.next().map(|shard| shard.name.as_str())
    }

    /// The path for messages: its only file, or the folder of its files.
    #[doc(hidden)]
    pub fn path(&self) -> PathBuf {
        self.one_file().map_or_else(|| self.directory.clone(), |file| self.directory.join(file))
    }
}
