//! How a checkpoint is presented: the files that its catalog is cut into, and their format.
//!
//! Discovery (`open_options`) ends with a proved catalog. The view decides what is shown of it.
//! Layout, reader, cache, verify-on-read and mount take the catalog and the file specs as they
//! come. `checkpoint::present` applies the view.

use crate::format::OutputFormat;
use crate::words;

pub use self::arrange::{FileSpec, TensorOrder, arrange};

mod arrange;

/// How the tensors of a set become files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Files {
    /// One virtual file per set.
    #[default]
    Single,
    /// Shards and weight map as they are.
    Original,
}

/// How the weight map is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MapPolicy {
    /// It assigns every tensor to the virtual file.
    #[default]
    Rewrite,
    /// It is not shown.
    Hide,
}

words!(Files { Single = "single", Original = "original" });

words!(MapPolicy { Rewrite = "rewrite", Hide = "hide" });

/// How a checkpoint is presented.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// How the tensors become files.
    pub files: Files,
    /// OutputFormat of virtual files.
    pub format: OutputFormat,
    /// How the weight map is shown.
    pub map: MapPolicy,
}
