//! The virtual files of a checkpoint.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};

use crate::catalog::{Catalog, Projected, ProjectedFrom, Tensor};
use crate::error::{Fault, Result};
use crate::hash::{Digest, Hasher};
use crate::index::{ConfigRecord, PresentedFile, PresentedRecord, VirtualFileRecord};
use crate::layout::Layout;
use crate::source::Source;
use crate::store::Store;
use crate::view::{FileSpec, ReadConfig, View, arrange};

use super::config::with_config_in;
use super::{Checkpoint, SetKind};

/// The facts about a virtual file that are needed for its attributes.
///
/// ```
/// use tensorfs::Checkpoint;
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let summary = checkpoint.single_file().summary()?;
/// assert!(summary.len > checkpoint.catalog().data_len());
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSummary {
    /// Length in bytes.
    pub len: u64,
    /// Hash of its header. If a view selects, renames or casts tensors, the hash also covers the places of the tensors.
    /// Together with the identities of the shards, the hash identifies the content.
    pub header: Digest,
}

/// A virtual file with its layout, which all users of the file share.
#[derive(Debug)]
pub(super) struct ArrangedFile {
    pub(super) spec: FileSpec,
    /// The layout. It is made at its first use.
    layout: OnceLock<Arc<Layout>>,
    /// Length and header hash. They are set from the index or at their first use.
    summary: OnceLock<FileSummary>,
}

impl ArrangedFile {
    pub(super) fn new(spec: FileSpec) -> Arc<ArrangedFile> {
        Arc::new(ArrangedFile { spec, layout: OnceLock::new(), summary: OnceLock::new() })
    }

    /// A file whose length and header hash come from an index.
    pub(super) fn summarized(spec: FileSpec, summary: FileSummary) -> Arc<ArrangedFile> {
        Arc::new(ArrangedFile { spec, layout: OnceLock::new(), summary: summary.into() })
    }

    fn layout(&self, checkpoint: &Checkpoint) -> Result<&Arc<Layout>> {
        if let Some(layout) = self.layout.get() {
            return Ok(layout);
        }
        let layout = Layout::of(&checkpoint.catalog, &self.spec)
            .map_err(|fault| checkpoint.refused(fault))?;
        Ok(self.layout.get_or_init(|| Arc::new(layout)))
    }
}

/// A proved catalog as a view presents it.
pub(super) struct Presented {
    /// The catalog before the view was applied.
    pub(super) proved: Catalog,
    /// The catalog after the view was applied.
    pub(super) catalog: Catalog,
    /// The files into which its tensors are arranged.
    pub(super) files: Vec<Arc<ArrangedFile>>,
    /// Whether it is one file that is served unchanged.
    pub(super) is_whole_file: bool,
    /// The `config.json` that the view read.
    pub(super) config: ConfigRecord,
}

/// The proved catalog of the set `name` as `view` presents it.
///
/// Every catalog is passed to this function, whether it comes from headers or from an index. A step
/// that makes a catalog from a catalog (select, slice, split, fuse, rename, cast) is done before
/// `arrange`.
///
/// # Errors
/// `view` if the view does not fit the catalog.
pub(super) fn present(
    proved: Catalog,
    kind: SetKind,
    name: &str,
    view: &View,
    read_config: ReadConfig<'_>,
) -> Result<Presented, Fault> {
    let config = Cell::new(ConfigRecord::Unread);
    let read = || {
        let text = read_config()?;
        let found = text.as_deref().map(Digest::of);
        config.set(found.map_or(ConfigRecord::Missing, ConfigRecord::Text));
        Ok(text)
    };
    let catalog = view.project(&proved, &read)?;
    let mut specs = arrange(name, &catalog, view)?;
    let is_whole_file = kind.stands_as(view.format)
        && view.keeps_tensors()
        && specs.iter().all(|spec| spec.tensors.is_none());
    if is_whole_file {
        specs.clear();
    }
    let files = specs.into_iter().map(ArrangedFile::new).collect();
    Ok(Presented { proved, catalog, files, is_whole_file, config: config.get() })
}

/// One virtual file of a checkpoint: some of its tensors behind one header.
///
/// ```
/// use tensorfs::{Checkpoint, Reader};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// for file in checkpoint.virtual_files() {
///     println!("{}: {} bytes", file.spec().name, Reader::open(&file)?.len());
/// }
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct VirtualFile {
    checkpoint: Arc<Checkpoint>,
    file: Arc<ArrangedFile>,
}

impl VirtualFile {
    /// The virtual file of `checkpoint` that `spec` describes.
    pub fn new(checkpoint: &Arc<Checkpoint>, spec: FileSpec) -> VirtualFile {
        VirtualFile { checkpoint: checkpoint.clone(), file: ArrangedFile::new(spec) }
    }

    /// Its name, format and tensors.
    pub fn spec(&self) -> &FileSpec {
        &self.file.spec
    }

    /// The checkpoint that has its tensors.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// The catalog to which the positions of its tensors refer.
    pub fn catalog(&self) -> &Catalog {
        self.checkpoint.catalog()
    }

    /// The open shards, in the order of the catalog.
    #[doc(hidden)]
    pub fn sources(&self) -> &[Arc<Source>] {
        self.checkpoint.sources()
    }

    /// A checkpoint that has only the tensors of this file. It has the name of the file.
    ///
    /// # Errors
    /// `overflow` if there are too many tensors.
    #[doc(hidden)]
    pub fn as_checkpoint(&self) -> Result<Arc<Checkpoint>> {
        let all = &self.checkpoint;
        let positions = self.spec().positions(all.catalog());
        let tensors = positions.iter().map(|&position| {
            let Tensor { name, dtype, .. } = all.catalog().tensor_at(position as usize);
            Projected { name, from: ProjectedFrom::Whole(position), dtype }
        });
        let catalog = all.catalog.project(tensors).map_err(|fault| all.refused(fault))?;
        Ok(Arc::new(Checkpoint {
            name: self.spec().name.clone(),
            catalog,
            is_whole_file: false,
            files: Vec::new(),
            map: None,
            manifest: None,
            ..Checkpoint::clone(all)
        }))
    }

    /// The byte layout of the file.
    ///
    /// # Errors
    /// The errors of `Layout::of`.
    pub fn layout(&self) -> Result<Arc<Layout>> {
        self.file.layout(&self.checkpoint).cloned()
    }

    /// Length and header hash of the file. If the index has them, no layout is made.
    ///
    /// # Errors
    /// The errors of `layout`.
    pub fn summary(&self) -> Result<FileSummary> {
        if let Some(summary) = self.file.summary.get() {
            return Ok(*summary);
        }
        let layout = self.layout()?;
        let mut header = Hasher::new();
        header.update(layout.header());
        if self.checkpoint.has_other_tensors() {
            // Two views may give the same names to different tensors, with equal headers. So the places of the tensors
            // are hashed too.
            let mut places = Vec::new();
            for tensor in layout.tensors().map(|(position, _)| self.catalog().tensor_at(position)) {
                places.clear();
                places.extend_from_slice(tensor.stored.name().as_bytes());
                places.extend_from_slice(&(tensor.pieces().len() as u64).to_le_bytes());
                for piece in tensor.pieces() {
                    places.extend_from_slice(&piece.shard.0.to_le_bytes());
                    places.extend_from_slice(&piece.range.start.to_le_bytes());
                    let strides = piece.strides.unwrap_or_default();
                    places.push(u8::from(!piece.is_contiguous()));
                    let numbers = [piece.offset, piece.shape, strides].into_iter().flatten();
                    numbers.for_each(|number| places.extend_from_slice(&number.to_le_bytes()));
                }
                header.update(&places);
            }
        }
        let summary = FileSummary { len: layout.len(), header: header.finish() };
        Ok(*self.file.summary.get_or_init(|| summary))
    }
}

impl Checkpoint {
    /// This checkpoint with its tensors as `view` presents them. Files and format of the view are
    /// ignored.
    ///
    /// # Errors
    /// `view` if the view does not fit the checkpoint.
    #[doc(hidden)]
    pub fn viewed(self: &Arc<Self>, view: &View) -> Result<Arc<Checkpoint>> {
        if view.keeps_tensors() {
            return Ok(self.clone());
        }
        let store = Store::of_sources(&self.sources, &self.directory);
        let beside = (&store, self.directory.as_path());
        let catalog = with_config_in(beside, |config| view.project(&self.catalog, config))
            .map_err(|fault| self.refused(fault))?;
        Ok(Arc::new(Checkpoint {
            catalog,
            is_whole_file: false,
            files: Vec::new(),
            map: None,
            ..Checkpoint::clone(self)
        }))
    }

    /// The virtual files into which its view arranges the tensors. Empty if its shards are shown
    /// unchanged.
    pub fn virtual_files(self: &Arc<Self>) -> impl Iterator<Item = VirtualFile> {
        let file =
            |file: &Arc<ArrangedFile>| VirtualFile { checkpoint: self.clone(), file: file.clone() };
        self.files.iter().map(file)
    }

    /// All its tensors as one file, even if the view arranges them in several files.
    pub fn single_file(self: &Arc<Self>) -> VirtualFile {
        let single = FileSpec::single(&self.name, self.format);
        let own = self.virtual_files().find(|file| *file.spec() == single);
        own.unwrap_or_else(|| VirtualFile::new(self, single))
    }

    /// Hash of the `config.json` that its view read. `None` if the view read none.
    #[doc(hidden)]
    pub fn config(&self) -> Option<Digest> {
        self.config.digest()
    }

    /// Whether its view selects, renames or casts tensors.
    pub(super) fn has_other_tensors(&self) -> bool {
        !Arc::ptr_eq(&self.catalog.columns, &self.proved.columns)
    }

    /// For each of its virtual files, the layout if it has been made.
    pub(super) fn known_layouts(&self) -> Vec<Option<Arc<Layout>>> {
        self.files.iter().map(|file| file.layout.get().cloned()).collect()
    }

    /// Makes the layouts of its virtual files, or reuses those in `linked`, which are from another
    /// link to the same file. A checkpoint for which no layout can be made is refused here, and not
    /// at its first read.
    pub(super) fn lay_out(&self, linked: &[Option<Arc<Layout>>]) -> Result<()> {
        for (index, file) in self.files.iter().enumerate() {
            match linked.get(index).and_then(Option::as_ref) {
                Some(layout) => drop(file.layout.set(layout.clone())),
                None => {
                    file.layout(self)?;
                }
            }
        }
        Ok(())
    }

    /// Sets lengths and header hashes of its virtual files from the records of an index, and makes the layouts of the
    /// files that have no record. Records are used only if the view keeps the tensors of the shards.
    pub(super) fn summarize(&self, records: &[VirtualFileRecord]) -> Result<()> {
        let records = if self.has_other_tensors() { &[] } else { records };
        for file in self.files.iter().filter(|file| file.summary.get().is_none()) {
            let spec = file.spec.digest();
            match records.iter().find(|record| record.spec == spec) {
                Some(&VirtualFileRecord { len, header, .. }) => {
                    let _ = file.summary.set(FileSummary { len, header });
                }
                None => {
                    file.layout(self)?;
                }
            }
        }
        Ok(())
    }
}

/// The set with the catalog `proved` as `view` presents it. The catalog of the view and its files come from `record`,
/// and are not computed again. `None` if a file in the record is not one that the view makes.
pub(super) fn presented_as_recorded(
    proved: &Catalog,
    record: PresentedRecord,
    view: &View,
) -> Option<Presented> {
    let file = |file: PresentedFile| {
        let PresentedFile { name, tensors, file: VirtualFileRecord { spec, len, header } } = file;
        let own =
            FileSpec { tensors: tensors.map(Into::into), ..FileSpec::single(&name, view.format) };
        (own.digest() == spec).then(|| ArrangedFile::summarized(own, FileSummary { len, header }))
    };
    Some(Presented {
        files: record.files.into_iter().map(file).collect::<Option<_>>()?,
        catalog: record.catalog.unwrap_or_else(|| proved.clone()),
        proved: proved.clone(),
        is_whole_file: false,
        config: record.config,
    })
}
