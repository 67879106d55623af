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
///
/// ```
/// use tensorfs::{Checkpoint, Files, OpenOptions, View};
///
/// let view = View { files: Files::Original, ..View::default() };
/// let options = OpenOptions { view, ..OpenOptions::default() };
/// let checkpoint = Checkpoint::open_with("tests/fixtures/hf/gpt2_tiny".as_ref(), &options)?;
/// assert_eq!(checkpoint.virtual_files().count(), 0);
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Files {
    /// One virtual file per set.
    #[default]
    Single,
    /// Shards and weight map as they are.
    Original,
}

/// How the weight map is shown.
///
/// ```
/// use tensorfs::{MapPolicy, View};
///
/// let view = View { map: MapPolicy::Hide, ..View::default() };
/// assert_ne!(view, View::default());
/// ```
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
///
/// ```
/// use tensorfs::{Checkpoint, OutputFormat, OpenOptions, View};
///
/// let view = View { format: OutputFormat::Bintensors, ..View::default() };
/// let options = OpenOptions { view, ..OpenOptions::default() };
/// let checkpoint = Checkpoint::open_with("tests/fixtures/hf/gpt2_tiny".as_ref(), &options)?;
/// assert_eq!(checkpoint.single_file().spec().format, OutputFormat::Bintensors);
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// How the tensors become files.
    pub files: Files,
    /// Format of virtual files.
    pub format: OutputFormat,
    /// How the weight map is shown.
    pub map: MapPolicy,
}
