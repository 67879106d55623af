//! Opening checkpoints: which files of a folder belong together, the proof that they are
//! whole, and the open files.

mod discover;
mod load;
mod prove;
mod show;
mod tree;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::{Catalog, Tensor};
use crate::error::{Error, Fault, Result};
use crate::format::weight_map::WeightMap;
use crate::layout::Layout;
use crate::source::Source;
use crate::view::View;

pub use discover::Kind;
pub use prove::{Proved, Set};
pub use show::{Content, ERROR_FILE, Shown};
pub use tree::{File, Folder, FolderId, Tree};

/// Whether something outside the shards proved that the last pieces are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// Names and shapes, or the number of shards, are known from elsewhere.
    Proven,
    /// A lost last piece would only make the tensor look smaller.
    Unproven,
}

impl Tail {
    /// The word used in output.
    pub fn as_str(self) -> &'static str {
        match self {
            Tail::Proven => "proven",
            Tail::Unproven => "unproven",
        }
    }
}

/// One checkpoint, proved and open.
#[derive(Debug)]
pub struct Checkpoint {
    /// Name of the file that it is shown as.
    pub name: String,
    /// What makes its files a set.
    pub kind: Kind,
    /// The folder of its files.
    pub directory: PathBuf,
    /// Whether the proof reaches the last piece.
    pub tail: Tail,
    catalog: Catalog,
    sources: Vec<Arc<Source>>,
    /// Where it was needed for the proof already.
    layout: Option<Arc<Layout>>,
    /// File name and content.
    map: Option<(String, WeightMap)>,
}

impl Checkpoint {
    /// Opens the one checkpoint at `path`: a folder, or a file of the set.
    ///
    /// # Errors
    /// The reason of a refusal, with file and tensor; `Error::Usage` where `path` holds more
    /// than one checkpoint.
    pub fn open(path: &Path) -> Result<Arc<Checkpoint>> {
        let tree = Tree::scan(path, &View::default())?;
        let mut sets = Vec::new();
        for family in tree.families() {
            let proved = tree.prove(family);
            sets.extend(proved.into_iter().flat_map(|(_, proved)| proved.sets));
        }
        sets.retain(|set| set.shown_at_parent.is_none());
        match <[Set; 1]>::try_from(sets) {
            Ok([set]) => set.outcome,
            Err(sets) => Err(Error::usage(format!(
                "{}: {} checkpoints here, name one of them: {}",
                path.display(),
                sets.len(),
                crate::catalog::named_some(sets.iter().map(|set| set.name.as_str())),
            ))),
        }
    }

    /// What it holds.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Its open files, in the catalog's order.
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// The open file of the shard called `name`.
    pub fn source(&self, name: &str) -> Option<&Arc<Source>> {
        let at = self.catalog.shards.iter().position(|shard| shard.name == name)?;
        Some(&self.sources[at])
    }

    /// Closes its files until they are read again, so that what is deleted gives its space
    /// back.
    pub fn release_files(&self) {
        self.sources.iter().for_each(|source| source.release());
    }

    /// The layout of the whole checkpoint as one file.
    ///
    /// # Errors
    /// `header_too_large` where one file cannot hold all tensors, `misaligned` where rows of
    /// sub-byte elements do not begin on bytes.
    pub fn layout(&self) -> Result<Arc<Layout>> {
        match &self.layout {
            Some(layout) => Ok(layout.clone()),
            None => Layout::single(&self.catalog).map(Arc::new).map_err(|f| self.refused(f)),
        }
    }

    /// Whether it is one file that is served as it stands.
    pub fn is_whole_file(&self) -> bool {
        self.kind == Kind::Single
    }

    /// Offset of `tensor` in its only shard, where it is stored whole.
    pub fn whole_offset(&self, tensor: &Tensor) -> u64 {
        tensor.pieces[0].range.start
    }

    /// The weight map that names its shards: file name and content.
    pub fn weight_map(&self) -> Option<&(String, WeightMap)> {
        self.map.as_ref()
    }

    /// `fault` found in this checkpoint, as an error.
    pub fn refused(&self, fault: Fault) -> Error {
        Error::refused(&self.directory, fault)
    }
}
