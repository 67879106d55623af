//! The catalog of a checkpoint: every tensor, and the shard and byte range of each of its pieces.
//!
//! Invariant: every `Catalog` is proved. The pieces of each tensor have the same dtype, do not
//! overlap, and cover every element once. There is no way to build an unproved catalog. The module
//! is pure: its input is parsed headers, and it opens no file.

mod build;
mod coverage;
mod deepspeed;
mod flat_range;
mod heads;
mod name_order;
mod project;
pub(crate) mod tensors;
mod tiling;
mod universal;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{ErrorKind, Fault};
use crate::format::manifest::Reference;
use crate::format::weight_map::WeightMap;

pub use heads::{Head, Heads};
pub(crate) use project::{Projected, ProjectedFrom, TensorParts};
use tensors::TensorColumns;
pub use tensors::{Piece, Tensor};

/// Maximum number of bytes of all tensors of a checkpoint that repeat elements. It is limited, because a file of a
/// few bytes may claim any size.
const REPEATED_LEN_MAX: u64 = 64 << 30;

/// Index of a shard in `Catalog::shards`.
///
/// ```
/// use tensorfs::{Checkpoint, ShardId};
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let first = checkpoint.catalog().shard(ShardId(0));
/// assert_eq!(first.name, "model-00001-of-00003.safetensors");
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardId(pub u32);

/// One file of a checkpoint.
///
/// ```
/// use tensorfs::Checkpoint;
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// for shard in &checkpoint.catalog().shards {
///     println!("{}: {} bytes", shard.name, shard.file_len);
/// }
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// File name.
    pub name: String,
    /// Length of the file in bytes.
    pub file_len: u64,
    /// The byte ranges that describe the tensors, ascending. All other bytes of the file are data.
    pub described: Vec<Range<u64>>,
}

impl Shard {
    /// End of the last byte range that describes the tensors.
    pub fn description_end(&self) -> u64 {
        self.described.last().map_or(0, |range| range.end)
    }

    /// Whether `range` contains bytes that describe the tensors.
    #[inline]
    pub fn is_description(&self, range: &Range<u64>) -> bool {
        // In most formats the description is at the beginning of the file.
        if range.start >= self.description_end() {
            return false;
        }
        let next = self.described.partition_point(|own| own.end <= range.start);
        !range.is_empty() && self.described.get(next).is_some_and(|own| own.start < range.end)
    }

    fn of(shard: &ShardHeader) -> Shard {
        let (name, file_len) = (shard.name.clone(), shard.file_len);
        Shard { name, file_len, described: shard.header.described.clone() }
    }
}

/// A proved checkpoint.
///
/// ```
/// use tensorfs::Checkpoint;
///
/// let checkpoint = Checkpoint::open("tests/fixtures/hf/gpt2_tiny".as_ref())?;
/// let catalog = checkpoint.catalog();
/// let bytes: u64 = catalog.tensors().map(|tensor| tensor.len).sum();
/// assert_eq!(bytes, catalog.data_len());
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Catalog {
    /// Its files, sorted by name with numbers as numbers.
    pub shards: Vec<Shard>,
    /// The tensors. Catalogs of files that are links to one inode share them.
    pub(crate) columns: Arc<TensorColumns>,
    /// The metadata of all shards, merged, without the keys of sharding notes. `None` if no shard
    /// has other keys, and no shard has an empty metadata map.
    pub metadata: Option<Arc<BTreeMap<String, String>>>,
    /// Whether the shards record the whole shape of every tensor. If so, the proof notices a missing last piece.
    pub shapes_recorded: bool,
    /// Findings that are unusual but no errors, one line each.
    pub notes: Vec<String>,
}

/// The header of one shard, as input to a catalog.
#[derive(Clone, Debug)]
pub struct ShardHeader {
    /// File name.
    pub name: String,
    /// Length of the file in bytes.
    pub file_len: u64,
    /// Its parsed header.
    pub header: Arc<Head>,
}

impl Catalog {
    /// Catalog of the shards of a Hugging Face checkpoint, in which every tensor is whole in one
    /// shard.
    ///
    /// If there is a weight map, it decides which shard is used for a tensor. Otherwise no name may
    /// occur in two shards.
    #[doc(hidden)]
    pub fn of_whole_tensors(
        shards: &[&ShardHeader],
        map: Option<&WeightMap>,
    ) -> Result<Catalog, Fault> {
        with_few_repeats(build::of_whole_tensors(shards, map)?)
    }

    /// Catalog of torch DCP shards. Each tensor is merged from boxes.
    ///
    /// If a weight map lists the shards, it has to agree with them.
    #[doc(hidden)]
    pub fn of_dcp_shards(
        shards: &[&ShardHeader],
        map: Option<&WeightMap>,
    ) -> Result<Catalog, Fault> {
        with_few_repeats(build::of_dcp_shards(shards, map)?)
    }

    /// Catalog of the files of all ranks of a training. Each tensor is merged from the parts of the ranks.
    ///
    /// Refuses a file whose content records another rank than its name, a file that lacks a tensor of the other files,
    /// and a file that does not record which part of its tensors it has.
    #[doc(hidden)]
    pub fn of_rank_files(shards: &[&ShardHeader]) -> Result<Catalog, Fault> {
        with_few_repeats(build::of_rank_files(shards)?)
    }

    /// Catalog of a checkpoint of DeepSpeed. Its tensors are those of one file of model states, or are joined from
    /// the ranges of elements in the optimizer states of all ranks, or are those in the files of a universal
    /// checkpoint.
    ///
    /// Refuses a file whose ranks, shapes or ranges contradict the other files or its name.
    #[doc(hidden)]
    pub fn of_deepspeed(shards: &[&ShardHeader]) -> Result<Catalog, Fault> {
        if shards.iter().any(|shard| universal::is_universal(shard)) {
            return with_few_repeats(universal::of_universal(&build::sorted(shards))?);
        }
        with_few_repeats(deepspeed::of_deepspeed(shards)?)
    }

    /// The catalog of a file that is another link to the only shard of this catalog.
    pub(crate) fn of_link(&self, shard: &ShardHeader) -> Catalog {
        let shards = vec![Shard::of(shard)];
        Catalog { shards, notes: Vec::new(), ..self.clone() }
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.columns.len()
    }

    /// Whether it has no tensors.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its tensors, in the order of their names.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> + Clone {
        (0..self.len()).map(|index| self.columns.get(index))
    }

    /// The tensor at index `position` in `tensors`.
    #[inline]
    pub fn tensor_at(&self, position: usize) -> Tensor<'_> {
        self.columns.get(position)
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.columns.find(name).map(|index| self.columns.get(index))
    }

    /// The shard at `id`.
    pub fn shard(&self, id: ShardId) -> &Shard {
        &self.shards[id.0 as usize]
    }

    /// Total length of the tensor data in bytes. It is 2^64 - 1 if the sum is larger: the headers of sparse files can
    /// claim more in total.
    pub fn data_len(&self) -> u64 {
        self.columns.data_len()
    }

    /// Whether both catalogs have tensors of the same names, dtypes and shapes.
    pub fn same_tensors(&self, other: &Catalog) -> bool {
        self.len() == other.len()
            && self
                .tensors()
                .zip(other.tensors())
                .all(|(a, b)| (a.name, a.dtype, a.shape) == (b.name, b.dtype, b.shape))
    }

    /// Refuses a catalog whose tensors and files are not exactly those of `reference`.
    #[doc(hidden)]
    pub fn check_reference(&self, reference: &Reference) -> Result<(), Fault> {
        if let Some(shards) = &reference.shards {
            self.check_shard_files(shards)?;
        }
        for (name, known) in &reference.tensors {
            let Some(tensor) = self.tensor(name) else {
                let message = "the reference lists it, no shard holds it; a shard may be missing";
                return Err(ErrorKind::TensorMissing.fault(message).tensor(name));
            };
            let Some((dtype, shape)) = known else { continue };
            coverage::check_known(&tensor, *dtype, shape, |id| &self.shard(id).name)?;
        }
        if let Some(total) = reference.total_size.filter(|&total| total != self.data_len()) {
            return Err(ErrorKind::DcpHole.fault(format!(
                "{} bytes of tensors in the shards, {total} by the total_size of the reference; the \
                 last shards may be missing",
                self.data_len()
            )));
        }
        match self.tensors().find(|t| !reference.tensors.contains_key(t.name)) {
            None => Ok(()),
            Some(tensor) => {
                let message = "the shards hold it, the reference does not list it; is this the \
                               reference of another checkpoint?";
                Err(ErrorKind::TensorUnlisted.fault(message).tensor(tensor.name))
            }
        }
    }

    /// Refuses a catalog whose files are not exactly `expected`, by name and length.
    fn check_shard_files(&self, expected: &BTreeMap<String, u64>) -> Result<(), Fault> {
        let fault =
            |kind: ErrorKind, name: &str, message: String| kind.fault(message).in_file(name);
        let found: BTreeMap<&str, u64> =
            self.shards.iter().map(|shard| (shard.name.as_str(), shard.file_len)).collect();
        for (name, len) in expected {
            match found.get(name.as_str()) {
                Some(found) if found == len => {}
                Some(found) => {
                    let message = format!("has {found} bytes, the manifest says {len}");
                    return Err(fault(ErrorKind::SizeMismatch, name, message));
                }
                None => {
                    let message = format!("is missing; the manifest lists it with {len} bytes");
                    return Err(fault(ErrorKind::ShardMissing, name, message));
                }
            }
        }
        match found.keys().find(|name| !expected.contains_key(**name)) {
            None => Ok(()),
            Some(name) => {
                Err(fault(ErrorKind::TensorUnlisted, name, "is not in the manifest".to_owned()))
            }
        }
    }

    /// Refuses a catalog that does not have `expected` shard files.
    #[doc(hidden)]
    pub fn check_shards(&self, expected: u64) -> Result<(), Fault> {
        if self.shards.len() as u64 == expected {
            return Ok(());
        }
        let names = named_some(self.shards.iter().map(|shard| shard.name.as_str()));
        Err(ErrorKind::ShardMissing.fault(format!(
            "{} shard files found, {expected} expected: {names}",
            self.shards.len()
        )))
    }
}

/// Refuses a catalog in which tensors that repeat elements have more than `REPEATED_LEN_MAX` bytes
/// in total.
fn with_few_repeats(catalog: Catalog) -> Result<Catalog, Fault> {
    let repeats = |piece: Piece<'_>| {
        let mut steps = piece.shape.iter().zip(piece.strides.unwrap_or_default());
        steps.any(|(&size, &stride)| size > 1 && stride == 0)
    };
    let has_strides = !catalog.columns.strides.is_empty();
    let mut repeated = 0_u64;
    for tensor in catalog.tensors().filter(|tensor| has_strides && tensor.pieces().any(repeats)) {
        repeated = repeated.saturating_add(tensor.len);
        if repeated > REPEATED_LEN_MAX {
            let message = format!(
                "with it the tensors that repeat what their storages hold have {repeated} bytes, tensorfs \
                 reads up to {REPEATED_LEN_MAX} of a checkpoint; save what they repeat"
            );
            return Err(ErrorKind::HeaderTooLarge.fault(message).tensor(tensor.name));
        }
    }
    Ok(catalog)
}

/// Maximum number of names in one message.
const NAMED_MAX: usize = 4;

/// The first `NAMED_MAX` of `names` as text, and the number of the other names.
pub(crate) fn named_some<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    let mut text = names[..names.len().min(NAMED_MAX)].join(", ");
    if names.len() > NAMED_MAX {
        text.push_str(&format!(" and {} more", names.len() - NAMED_MAX));
    }
    text
}
