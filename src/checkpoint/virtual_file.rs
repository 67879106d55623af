//! The virtual files of a checkpoint.

use std::sync::{Arc, OnceLock};

use crate::catalog::Catalog;
use crate::error::Result;
use crate::hash::Digest;
use crate::index::VirtualFileRecord;
use crate::layout::Layout;
use crate::source::Source;
use crate::view::{FileSpec, View, arrange};

use super::{Checkpoint, SetKind};

/// The facts about a virtual file that its attributes need.
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
    /// Hash of its header. Together with the identities of the shards it identifies the content.
    pub header: Digest,
}

/// A file that a spec describes. All holders of the file share its layout.
#[derive(Debug)]
pub(super) struct ArrangedFile {
    pub(super) spec: FileSpec,
    /// The layout, set at its first use.
    layout: OnceLock<Arc<Layout>>,
    /// Length and header hash, set by the index or at their first use.
    summary: OnceLock<FileSummary>,
}

impl ArrangedFile {
    pub(super) fn new(spec: FileSpec) -> Arc<ArrangedFile> {
        Arc::new(ArrangedFile { spec, layout: OnceLock::new(), summary: OnceLock::new() })
    }

    fn layout(&self, checkpoint: &Checkpoint) -> Result<&Arc<Layout>> {
        if let Some(layout) = self.layout.get() {
            return Ok(layout);
        }
        let layout = Layout::of(&checkpoint.catalog, &self.spec);
        let layout = layout.map_err(|fault| checkpoint.refused(fault))?;
        Ok(self.layout.get_or_init(|| Arc::new(layout)))
    }
}

/// The proved catalog of the set `name` as `view` presents it, and the files that it is cut into.
///
/// Every catalog passes here, whether it comes from headers or from an index. A step from a
/// catalog to a catalog (select, rename, slice, fuse, cast) goes in front of `arrange`.
pub(super) fn present(
    catalog: Catalog,
    kind: SetKind,
    name: &str,
    view: &View,
) -> (Catalog, Vec<Arc<ArrangedFile>>) {
    if kind.stands_as(view.format) {
        return (catalog, Vec::new());
    }
    let specs = arrange(name, view);
    (catalog, specs.into_iter().map(ArrangedFile::new).collect())
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
    /// The file that `spec` describes.
    pub fn new(checkpoint: &Arc<Checkpoint>, spec: FileSpec) -> VirtualFile {
        VirtualFile { checkpoint: checkpoint.clone(), file: ArrangedFile::new(spec) }
    }

    /// Its name, format and tensors.
    pub fn spec(&self) -> &FileSpec {
        &self.file.spec
    }

    /// The checkpoint whose tensors it holds.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// The catalog in which its tensors have positions.
    pub fn catalog(&self) -> &Catalog {
        self.checkpoint.catalog()
    }

    /// The open shards, in the catalog's order.
    #[doc(hidden)]
    pub fn sources(&self) -> &[Arc<Source>] {
        self.checkpoint.sources()
    }

    /// The byte layout of the file.
    ///
    /// # Errors
    /// The errors of `Layout::of`.
    pub fn layout(&self) -> Result<Arc<Layout>> {
        self.file.layout(&self.checkpoint).cloned()
    }

    /// Length and header hash of the file. If the index has them, the file is not laid out.
    ///
    /// # Errors
    /// The errors of `layout`.
    pub fn summary(&self) -> Result<FileSummary> {
        if let Some(summary) = self.file.summary.get() {
            return Ok(*summary);
        }
        let layout = self.layout()?;
        let summary = FileSummary { len: layout.len(), header: Digest::of(layout.header()) };
        Ok(*self.file.summary.get_or_init(|| summary))
    }
}

impl Checkpoint {
    /// The virtual files that its view arranges, none if its shards are shown unchanged.
    pub fn virtual_files(self: &Arc<Self>) -> impl Iterator<Item = VirtualFile> {
        let file =
            |file: &Arc<ArrangedFile>| VirtualFile { checkpoint: self.clone(), file: file.clone() };
        self.files.iter().map(file)
    }

    /// All its tensors as one file, also if the view arranges them in another way.
    pub fn single_file(self: &Arc<Self>) -> VirtualFile {
        let single = FileSpec::single(&self.name, self.format);
        let own = self.virtual_files().find(|file| *file.spec() == single);
        own.unwrap_or_else(|| VirtualFile::new(self, single))
    }

    /// The layout of its first virtual file, if that is laid out.
    pub(super) fn known_layout(&self) -> Option<Arc<Layout>> {
        self.files.first()?.layout.get().cloned()
    }

    /// Lays out its virtual files, or reuses the layout of another link to the same file. A
    /// checkpoint that cannot be laid out is refused here, not at its first read.
    pub(super) fn lay_out(&self, linked: Option<Arc<Layout>>) -> Result<()> {
        for file in &self.files {
            match &linked {
                Some(layout) => drop(file.layout.set(layout.clone())),
                None => {
                    file.layout(self)?;
                }
            }
        }
        Ok(())
    }

    /// Takes lengths and header hashes of its virtual files from an index, and lays out the other
    /// files.
    pub(super) fn summarize(&self, records: &[VirtualFileRecord]) -> Result<()> {
        for file in &self.files {
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
