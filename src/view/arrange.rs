//! Divides a catalog into virtual files.

use std::sync::Arc;

use super::{Files, View};
use crate::catalog::Catalog;
use crate::error::Fault;
use crate::format::{OutputFormat, names};
use crate::hash::{Digest, Hasher};

/// The order of the tensors in a file, and the alignment of its data.
///
/// ```
/// use tensorfs::{FileSpec, OutputFormat, TensorOrder};
///
/// let spec = FileSpec::single("model.safetensors", OutputFormat::Safetensors);
/// assert_eq!(spec.order, TensorOrder::Mounted);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorOrder {
    /// The order that mounts show. The data begins on a page boundary. The tensors are in the order of their
    /// bytes on the disk, if their alignment allows it.
    Mounted,
    /// The order in which the reference implementation of the format writes tensors.
    Saved,
}

/// One virtual file of a catalog.
///
/// ```
/// use tensorfs::{Checkpoint, FileSpec, OutputFormat, VirtualFile};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let spec = FileSpec::saved("model.safetensors", OutputFormat::Safetensors);
/// let file = VirtualFile::new(&checkpoint, spec);
/// println!("{} bytes as the safetensors package saves it", file.summary()?.len);
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpec {
    /// Name of the file.
    pub name: String,
    /// Format of the file.
    pub format: OutputFormat,
    /// Order of its tensors.
    pub order: TensorOrder,
    /// Positions of its tensors in the catalog, in ascending order. `None` stands for all tensors.
    pub tensors: Option<Arc<[u32]>>,
}

impl FileSpec {
    /// A file of all tensors, in the order that mounts show.
    pub fn single(name: &str, format: OutputFormat) -> FileSpec {
        FileSpec { name: name.to_owned(), format, order: TensorOrder::Mounted, tensors: None }
    }

    /// A file of all tensors, in the order in which the reference implementation of `format` writes them.
    pub fn saved(name: &str, format: OutputFormat) -> FileSpec {
        FileSpec { order: TensorOrder::Saved, ..FileSpec::single(name, format) }
    }

    /// Positions of its tensors in `catalog`, in ascending order.
    pub fn positions(&self, catalog: &Catalog) -> Vec<u32> {
        match &self.tensors {
            Some(tensors) => tensors.to_vec(),
            None => (0..catalog.len() as u32).collect(),
        }
    }

    /// A hash of the spec. For the same catalog, specs with the same hash result in the same file.
    pub fn digest(&self) -> Digest {
        let FileSpec { name, format, order, tensors } = self;
        let mut hasher = Hasher::new();
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(format.as_str().as_bytes());
        hasher.update(&[u8::from(*order == TensorOrder::Saved), u8::from(tensors.is_some())]);
        for position in tensors.iter().flat_map(|tensors| tensors.iter()) {
            hasher.update(&position.to_le_bytes());
        }
        hasher.finish()
    }
}

/// The virtual files of the set `name`. Empty if the view shows the original shards.
///
/// # Errors
/// `view` if the catalog cannot be divided into the files of the view.
pub fn arrange(name: &str, catalog: &Catalog, view: &View) -> Result<Vec<FileSpec>, Fault> {
    let single = FileSpec::single(name, view.format);
    let Some(groups) = view.files.groups(catalog)? else {
        return Ok(if view.files == Files::Original { Vec::new() } else { vec![single] });
    };
    let spec = |(number, tensors): (u64, Vec<u32>)| FileSpec {
        name: names::numbered_name(name, number, groups.total, view.format),
        tensors: Some(tensors.into()),
        ..single.clone()
    };
    Ok(groups.files.into_iter().map(spec).collect())
}
