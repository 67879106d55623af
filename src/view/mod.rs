//! How a checkpoint is presented: the files that its catalog is cut into, and their format.
//!
//! Discovery (`open_options`) ends with a proved catalog. The view decides what is shown of it.
//! Layout, reader, cache, verify-on-read and mount take the catalog and the file specs as they
//! come. `checkpoint::present` applies the view.

use std::sync::Arc;

use crate::format::OutputFormat;

pub use self::arrange::{FileSpec, TensorOrder, arrange};
pub use self::cast::{DtypeCast, DtypeMap};
pub use self::cut_rules::CutRules;
pub use self::files::{FileMap, Files, LAYOUTS};
pub use self::name_map::NameMap;
pub use self::named::NamedViews;
pub use self::options::{OptionFile, ReadFile};
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
    /// How the weight map is shown.
    ///
    /// ```
    /// use tensorfs::{MapPolicy, View};
    ///
    /// let view = View { map: MapPolicy::Hide, ..View::default() };
    /// assert_ne!(view, View::default());
    /// ```
    #[derive(Default)]
    pub enum MapPolicy {
        /// It assigns every tensor to its virtual file.
        #[default]
        Rewrite = "rewrite",
        /// It is not shown.
        Hide = "hide",
    }
}

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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// How the tensors become files.
    pub files: Files,
    /// Format of virtual files.
    pub format: OutputFormat,
    /// How the weight map is shown.
    pub map: MapPolicy,
    /// The tensors that it has; all if there is none.
    pub include: Vec<NameGlob>,
    /// The tensors that it does not have.
    pub exclude: Vec<NameGlob>,
    /// The rank of a tensor-parallel group whose slices it has; whole tensors if there is none.
    pub shard: Option<TensorParallel>,
    /// Other names of its tensors, and the tensors that it splits and joins.
    pub rename: Option<Arc<RenameRules>>,
    /// Other element types of its tensors.
    pub dtype: Option<DtypeCast>,
    /// The tensors that keep their element types, by their names in the view.
    pub keep: Vec<NameGlob>,
}
