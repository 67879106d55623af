//! Checkpoints of DeepSpeed: the names of their files, and the facts in these files about tensors of which each rank
//! saved a range of elements.

use std::collections::HashSet;

use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault};

/// Name of the file of a run that names the folder of its last checkpoint.
pub const LATEST: &str = "latest";

/// Name of the file of a run that names the folder of its last universal checkpoint.
pub const LATEST_UNIVERSAL: &str = "latest_universal";

/// Name of the folder in a universal checkpoint that has one folder for each tensor.
pub const UNIVERSAL: &str = "zero";

/// Name of the file, in the folder of a tensor, that has the weights of the tensor in F32.
pub const MASTER: &str = "fp32.pt";

/// State of a tensor that is a number and no tensor.
const STEP: &str = "step";

/// Maximum length of a `latest` file, in bytes.
pub const LATEST_LEN_MAX: u64 = 4096;

/// Maximum length of the name of a folder, in bytes.
const FOLDER_LEN_MAX: usize = 255;

/// The kind of a file of a checkpoint, by the name of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StateFile {
    /// The model states of a tensor-parallel rank: the whole model, if there is one such rank.
    Model {
        /// Number of the tensor-parallel rank.
        slice: u64,
    },
    /// The model states of a rank of ZeRO-3.
    ModelOfRank {
        /// Number of the data-parallel rank.
        rank: u64,
        /// Number of the tensor-parallel rank.
        slice: u64,
    },
    /// The optimizer states of a rank.
    Optimizer {
        /// Number of the data-parallel rank.
        rank: u64,
        /// Number of the tensor-parallel rank.
        slice: u64,
    },
    /// One layer of a model that is saved layer by layer.
    Layer,
    /// One expert of a mixture-of-experts model.
    Expert,
}

impl StateFile {
    /// The kind of the file called `name`, `None` for other files.
    pub fn of(name: &str) -> Option<StateFile> {
        let stem = name.strip_suffix(".pt")?;
        if let Some(stem) = stem.strip_suffix("_model_states") {
            if stem.starts_with("layer_") && stem.contains("_expert_") {
                return Some(StateFile::Expert);
            }
            if let Some(slice) = stem.strip_prefix("mp_rank_") {
                return Some(StateFile::Model { slice: number(slice)? });
            }
            let (rank, slice) = ranks(stem.strip_prefix("zero_pp_rank_")?)?;
            return Some(StateFile::ModelOfRank { rank, slice });
        }
        if stem.ends_with("-model_states") && stem.starts_with("layer_") {
            return Some(StateFile::Layer);
        }
        let place = stem.strip_suffix("_optim_states")?;
        if place.starts_with("expert_") {
            return Some(StateFile::Expert);
        }
        let without_dtype =
            ["bf16_", "fp16_"].iter().find_map(|dtype| place.strip_prefix(dtype)).unwrap_or(place);
        let (rank, slice) = ranks(without_dtype.strip_prefix("zero_pp_rank_")?)?;
        Some(StateFile::Optimizer { rank, slice })
    }
}

/// A file of a universal checkpoint. It has one state of one tensor: the weights in F32, or a state
/// of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UniversalFile<'a> {
    /// Name of the tensor.
    pub param: &'a str,
    /// Name of the state.
    pub state: &'a str,
}

impl<'a> UniversalFile<'a> {
    /// The file at this path, which is relative to the folder of its checkpoint: `zero/NAME/STATE.pt`. `None` for
    /// files that have no tensor.
    pub fn of(path: &'a str) -> Option<UniversalFile<'a>> {
        let (param, file) = path.strip_prefix(UNIVERSAL)?.strip_prefix('/')?.rsplit_once('/')?;
        let state = file.strip_suffix(".pt")?;
        let is_tensor = !state.is_empty() && state != STEP;
        let is_name = !param.is_empty() && !param.contains('/');
        (is_tensor && is_name).then_some(UniversalFile { param, state })
    }

    /// Whether the file has the weights.
    pub fn is_master(&self) -> bool {
        MASTER.strip_suffix(".pt") == Some(self.state)
    }

    /// Name under which the tensor of the file is shown.
    pub fn tensor_name(&self) -> String {
        match self.is_master() {
            true => self.param.to_owned(),
            false => format!("{}.{}", self.param, self.state),
        }
    }
}

/// The fault of a file from one of `count` tensor-parallel or pipeline-parallel ranks, each with a part of the model.
/// `key` is the key under which the file records `count`, for example `mp_world_size`.
pub fn slice_fault(count: u64, key: &str) -> Fault {
    ErrorKind::TensorMissing.fault(format!(
        "is the file of one of {count} ranks, each with a part of the model ({key}), which tensorfs does \
         not join; make one file of them with the tools of the framework that saved them"
    ))
}

/// Parses text such as `3_mp_rank_00` into the numbers of both ranks.
fn ranks(text: &str) -> Option<(u64, u64)> {
    let (rank, slice) = text.split_once("_mp_rank_")?;
    Some((number(rank)?, number(slice)?))
}

fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Name of the folder that the content of a `latest` file names. The folder lies beside the file.
///
/// # Errors
/// Why the content names no folder.
pub fn latest_folder(text: &[u8]) -> Result<&str, String> {
    let text = std::str::from_utf8(text).map_err(|_| "is not UTF-8".to_owned())?;
    let name = text.trim();
    if name.is_empty() {
        return Err("is empty".to_owned());
    }
    let is_folder = name.len() <= FOLDER_LEN_MAX
        && !matches!(name, "." | "..")
        && !name.contains(|c: char| c == '/' || c == '\\' || c.is_control());
    if is_folder {
        Ok(name)
    } else {
        let shown: String = name.chars().take(60).collect();
        Err(format!("names {}, which is no folder beside it", crate::error::quoted(&shown)))
    }
}

/// The facts that a file has about tensors of which its rank saved a range of elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ZeroPart {
    /// A file of model states.
    Model(ZeroModel),
    /// A file of optimizer states.
    Partition(ZeroPartition),
    /// A file with one tensor of a universal checkpoint.
    Universal(UniversalTensor),
}

/// The facts in a file of a universal checkpoint that has one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniversalTensor {
    /// Whether the file has the elements one after another, without the shape of the tensor.
    pub is_flat: bool,
    /// Whether the padding of the first dimension of the tensor was removed.
    pub is_vocabulary: bool,
}

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroParam {
    /// Name.
    pub name: String,
    /// Extent of each dimension.
    pub shape: Vec<u64>,
}

/// Elements that follow each other without gaps in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatRun {
    /// Element type.
    pub dtype: Dtype,
    /// Offset of the first byte in the file.
    pub start: u64,
    /// Number of elements.
    pub numel: u64,
}

/// The part of a tensor in a flat group, according to the file of the rank that saved this part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroSlice {
    /// Name of the tensor.
    pub name: String,
    /// Index of the first element in the partition of the rank.
    pub start: u64,
    /// Number of elements.
    pub numel: u64,
}

/// The facts in a file of model states.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZeroModel {
    /// The trained tensors of each group, in the order of their elements.
    pub groups: Vec<Vec<ZeroParam>>,
    /// Tensors that are not trained, each with the range of elements that this rank saved.
    pub frozen: Vec<(ZeroParam, Option<FlatRun>)>,
    /// Pairs of names for the same tensor: the additional name, and the name that has the elements.
    pub shared: Vec<(String, String)>,
    /// Names of tensors that no optimizer changes. The file of model states holds these tensors whole.
    pub buffers: Vec<String>,
    /// Names of tensors of the model of which this file has no elements.
    pub placeholders: Vec<String>,
    /// Number of data-parallel ranks, if the file records it.
    pub ranks: Option<u64>,
    /// Number of ranks that share each tensor.
    pub slices: u64,
}

impl ZeroModel {
    /// Names of the tensors whose elements may be spread over the files of all ranks.
    pub fn names_elsewhere(&self) -> HashSet<&str> {
        let trained = self.groups.iter().flatten();
        let params = trained.chain(self.frozen.iter().map(|(param, _)| param));
        let with_elements = params.filter(|param| !param.shape.contains(&0));
        let shared = self.shared.iter().map(|(name, _)| name.as_str());
        with_elements.map(|param| param.name.as_str()).chain(shared).collect()
    }

    /// Names of the tensors that have no elements in the files of other ranks: tensors without any element, and
    /// buffers, which the model states have whole.
    pub fn names_without_elements(&self) -> HashSet<&str> {
        let trained = self.groups.iter().flatten();
        let params = trained.chain(self.frozen.iter().map(|(param, _)| param));
        let empty =
            params.filter(|param| param.shape.contains(&0)).map(|param| param.name.as_str());
        empty.chain(self.buffers.iter().map(String::as_str)).collect()
    }
}

/// The facts in a file of optimizer states.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZeroPartition {
    /// The stage of ZeRO.
    pub stage: u64,
    /// Number of ranks.
    pub ranks: u64,
    /// The elements of this rank in each group.
    pub groups: Vec<FlatRun>,
    /// For each group, the tensors of which this rank saved elements, if the file records them.
    pub slices: Option<Vec<Vec<ZeroSlice>>>,
    /// For each tensor of each group, the number of padding elements after it. Empty if there is no
    /// padding.
    pub paddings: Vec<Vec<u64>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_their_names() {
        for (name, file) in [
            ("mp_rank_00_model_states.pt", Some(StateFile::Model { slice: 0 })),
            (
                "zero_pp_rank_12_mp_rank_03_model_states.pt",
                Some(StateFile::ModelOfRank { rank: 12, slice: 3 }),
            ),
            (
                "zero_pp_rank_1_mp_rank_00_optim_states.pt",
                Some(StateFile::Optimizer { rank: 1, slice: 0 }),
            ),
            (
                "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
                Some(StateFile::Optimizer { rank: 1, slice: 0 }),
            ),
            ("layer_01-model_00-model_states.pt", Some(StateFile::Layer)),
            ("layer_0_expert_1_mp_rank_00_model_states.pt", Some(StateFile::Expert)),
            ("expert_1_mp_rank_00_optim_states.pt", Some(StateFile::Expert)),
            ("mp_rank_0x_model_states.pt", None),
            ("model_states.pt", None),
            ("pytorch_model.bin", None),
        ] {
            assert_eq!(StateFile::of(name), file, "{name}");
        }
    }

    #[test]
    fn files_of_universal_checkpoints_are_known_by_their_paths() {
        for (path, found) in [
            ("zero/a.weight/fp32.pt", Some(("a.weight", "fp32", "a.weight"))),
            ("zero/a.weight/exp_avg.pt", Some(("a.weight", "exp_avg", "a.weight.exp_avg"))),
            ("zero/a.weight/step.pt", None),
            ("zero/optimizer_state.pt", None),
            ("zero/a/b/fp32.pt", None),
            ("zero//fp32.pt", None),
            ("zero/a/.pt", None),
            ("zero/a/fp32.bin", None),
            ("other/a/fp32.pt", None),
            ("zeros/a/fp32.pt", None),
        ] {
            let file = UniversalFile::of(path);
            let name = file.map(|file| file.tensor_name());
            let parts = file.map(|file| (file.param, file.state)).zip(name.as_deref());
            assert_eq!(parts.map(|((param, state), name)| (param, state, name)), found, "{path}");
        }
    }

    #[test]
    fn latest_names_a_folder_beside_it_or_nothing() {
        assert_eq!(latest_folder(b"global_step10\n"), Ok("global_step10"));
        for text in ["", " \n", "..", ".", "../../x", "/etc", "a/b", "a\0b", "a\\b"] {
            assert!(latest_folder(text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(latest_folder(&[b'a'; 300]).is_err() && latest_folder(b"\xff").is_err());
    }
}
