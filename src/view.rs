//! What of a checkpoint is shown, and how: the choices a user has.

use std::path::PathBuf;

use crate::format::Format;

/// How shards become files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrangement {
    /// One virtual file per set.
    #[default]
    Single,
    /// Shards and weight map as they are.
    Original,
}

/// What becomes of the weight map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MapPolicy {
    /// Every tensor is sent to the virtual file.
    #[default]
    Rewrite,
    /// It is not shown.
    Hide,
}

/// Which one is shown where a whole file and a sharded set stand for the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// The whole file, as transformers does.
    #[default]
    File,
    /// The sharded set, as diffusers does.
    Index,
}

/// How a checkpoint, or a tree of them, is opened and shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// How shards become files.
    pub arrangement: Arrangement,
    /// What the one file of a set is.
    pub format: Format,
    /// What becomes of the weight map.
    pub map: MapPolicy,
    /// Whole file or sharded set.
    pub prefer: Prefer,
    /// Folders outside the source into which symbolic links may lead.
    pub follow: Vec<PathBuf>,
    /// Number of shard files that a set has to have.
    pub expect_shards: Option<u64>,
    /// File that knows names, dtypes and shapes of all tensors.
    pub reference: Option<PathBuf>,
    /// Folder that indexes are kept in; without one every start reads all headers.
    pub index: Option<PathBuf>,
}
