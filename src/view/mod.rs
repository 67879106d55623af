//! The presentation of a checkpoint: the files into which its catalog is divided, and their format.
//!
//! Discovery (`checkpoint::discover`) results in a proved catalog. The view decides which parts of the catalog are
//! shown, and how. `checkpoint::present` applies the view. Layout, reader, cache, verify-on-read and mount use the
//! resulting catalog and file specs without further changes.

use std::sync::Arc;

use crate::format::OutputFormat;

pub use self::arrange::{FileSpec, TensorOrder, arrange};
pub use self::cast::{DtypeCast, DtypeMap};
pub use self::cut_rules::CutRules;
pub use self::files::{FileMap, Files, LAYOUTS};
pub use self::name_map::NameMap;
pub use self::named::NamedViews;
pub use self::options::{OptionFileContent, ReadFile};
pub use self::parallel::{ReadConfig, TensorParallel};
pub use self::rename::RenameRules;
pub use self::select::NameGlob;

mod arrange;
mod cast;
mod cut_rules;
mod families;
mod files;
mod name_map;
mod named;
mod options;
mod parallel;
mod project;
mod rename;
mod rules;
mod select;

words! {
    /// Presentation of the weight map.
    ///
    /// ```
    /// use tensorfs::{MapPolicy, View};
    ///
    /// let view = View { map: MapPolicy::Hide, ..View::default() };
    /// assert_ne!(view, View::default());
    /// ```
    #[derive(Default)]
    pub enum MapPolicy {
        /// The weight map is shown, and assigns every tensor to its virtual file.
        #[default]
        Rewrite = "rewrite",
        /// The weight map is not shown.
        Hide = "hide",
    }
}

/// The presentation of a checkpoint.
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The division of the tensors into files.
    pub files: Files,
    /// The format of virtual files.
    pub format: OutputFormat,
    /// The presentation of the weight map.
    pub map: MapPolicy,
    /// Globs for the tensors that the view has. If there are none, it has all tensors.
    pub include: Vec<NameGlob>,
    /// Globs for the tensors that the view does not have.
    pub exclude: Vec<NameGlob>,
    /// The rank of a tensor-parallel group whose parts the view has. `None` for whole tensors.
    pub shard: Option<TensorParallel>,
    /// Rules that rename, split and join tensors.
    pub rename: Option<Arc<RenameRules>>,
    /// The element types to which tensors are cast.
    pub dtype: Option<DtypeCast>,
    /// Globs for the tensors that keep their element types. They match names in the view.
    pub keep: Vec<NameGlob>,
}
