//! Decides which values of a pickle are the tensors of a model, and finds their names.

use std::collections::{HashMap, HashSet};

use super::globals::is_dict;
use super::parts::{RANKS_MAX, RankParts, TensorPart};
use super::tensors::{Storages, TensorPlace, tensor_call};
use super::values::{MANY_NAMES, Node, NodeId, Part, PickleSteps, Values};
use super::zero::unknown;
use super::{ReadResult, TrainingState};
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::deepspeed::{ZeroModel, slice_fault};
use crate::format::description::FileRank;
use crate::format::safetensors::METADATA;

/// The last word in the name of a value that a module saves in addition to its weights.
const EXTRA_STATE: &str = "_extra_state";

/// Maximum length of the name of a tensor in bytes.
const NAME_LEN_MAX: usize = 64 << 10;

/// Maximum depth of a container that holds a tensor.
const DEPTH_MAX: usize = 1000;

/// Maximum number of visits of values, and of bytes of names, per byte of the pickle. Visits are counted because a
/// value may have many names.
const STEPS_OF_BYTE: usize = 16;

/// Keys of dicts that hold a model, in files that hold more than a model.
pub(super) const MODELS: [&str; 8] =
    ["state_dict", "model", "module", "model_state_dict", "ema", "ema_state_dict", "net", "params"];

/// Keys of values that are the state of a training and no weights. One of `ENDINGS` may follow such a key.
const STATES: [&str; 14] = [
    "optimizer",
    "optimizers",
    "optim",
    "lr_scheduler",
    "lr_schedulers",
    "scheduler",
    "schedulers",
    "param_schedulers",
    "grad_scaler",
    "rng",
    "dataloader",
    "dataloaders",
    "callbacks",
    "loops",
];

/// Words that count as keys of the state of a training only if one of `ENDINGS` follows. Without an ending, such a word
/// may be the name of a part of a model.
const STATES_WITH_ENDING: [&str; 5] = ["scaler", "train", "training", "trainer", "random"];
const ENDINGS: [&str; 4] = ["_state_dicts", "_state_dict", "_states", "_state"];

/// Maximum number of values that a note names.
const NAMED_MAX: usize = 5;

/// End of a note about hidden tensors, which says how to show them.
pub(super) const ALL_SHOWN: &str = "; state=all shows their tensors";

/// Keys whose value is the number of ranks that share the tensors or the layers of a model.
const SLICES: [&str; 3] =
    ["mp_world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"];

/// A tensor with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelTensor {
    pub(super) name: String,
    pub(super) place: TensorPlace,
    /// If the tensor is a part of a larger tensor: its offset, and the extent of the larger tensor, in each
    /// dimension. `None` if it is whole.
    pub(super) part_of: Option<[Vec<u64>; 2]>,
}

/// The tensors of a model in the order of their bytes.
#[derive(Debug)]
pub(super) struct ModelTensors {
    pub(super) tensors: Vec<ModelTensor>,
    /// Text for people about the values of the pickle that are not shown.
    pub(super) left_out: Option<String>,
    /// The rank that saved the file, if one of the tensors is a part.
    pub(super) rank: Option<FileRank>,
    /// Names of tensors of the model whose elements are in the files of all ranks.
    pub(super) placeholders: Vec<String>,
}

/// Whether the value with this key in the root dict is the state of a training.
pub(super) fn is_state(key: &str) -> bool {
    let first = key.split('.').next().unwrap_or(key);
    // `_all` marks the generators of all GPUs, and a number marks one of several optimizers of an application.
    let name = first.strip_suffix("_all").unwrap_or(first);
    let numbered = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
    let one = numbered.strip_suffix('_').filter(|_| numbered.len() < name.len()).unwrap_or(name);
    let ending = ENDINGS.iter().find_map(|ending| one.strip_suffix(ending));
    let is_rng = |stem: &str| stem == "rng" || stem.ends_with("_rng");
    STATES.contains(&ending.unwrap_or(one))
        || ending.is_some_and(|stem| STATES_WITH_ENDING.contains(&stem) || is_rng(stem))
}

impl ModelTensors {
    /// The tensors of the model in the pickle, or all tensors if `state` says so. The tensors that `zero` lists may
    /// be placeholders.
    pub(super) fn of(
        storages: &mut Storages<'_, '_>,
        zero: Option<&ZeroModel>,
        state: TrainingState,
    ) -> ReadResult<ModelTensors> {
        let (values, root) = (storages.values, storages.values.root);
        let mut walk = Walk {
            values,
            steps: PickleSteps::of(values, STEPS_OF_BYTE, MANY_NAMES),
            on_path: vec![false; values.node_count()],
            shown: vec![false; values.node_count()],
            opaque: Vec::new(),
            found: Vec::new(),
        };
        let Some(pairs) = walk.pairs(root)? else {
            return Err(not_a_dict(values, root).into());
        };
        let (hidden, rest): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|pair| {
            let is_hidden = |key: &str| is_state(key) && !is_weight(values, key, pair.value);
            state == TrainingState::None && pair.key.text().is_some_and(is_hidden)
        });
        let module = rest.iter().find(|pair| pair.key.text() == Some("module"));
        // If `module` has no tensors, other dicts of tensors in the file would be shown as the model.
        if zero.is_some() && !module.map_or(Ok(false), |module| walk.holds_tensor(module.value))? {
            return Err(unknown("module").into());
        }
        let mut left_out: Vec<String> = hidden.iter().map(|pair| pair.key.shown()).collect();
        let mut hides_tensors = false;
        for pair in &hidden {
            hides_tensors = hides_tensors || walk.holds_tensor(pair.value)?;
        }
        let mut models = Vec::new();
        // A weight has a dotted name. Other tensors in the root dict do not show that it is the model, because a
        // training saves its best loss and similar tensors beside the model.
        let is_flat = rest
            .iter()
            .any(|pair| pair.key.text().is_some_and(|key| is_weight(values, key, pair.value)));
        if state == TrainingState::None && !is_flat {
            for pair in &rest {
                let is_model = pair.key.text().is_some_and(|key| MODELS.contains(&key));
                if is_model && walk.is_dict_value(pair.value) && walk.holds_tensor(pair.value)? {
                    models.push(pair);
                }
            }
        }
        walk.shown[root as usize] = true;
        if let [model] = models.as_slice() {
            for pair in &rest {
                if pair.key != model.key && walk.holds_tensor(pair.value)? {
                    left_out.push(pair.key.shown());
                    hides_tensors = true;
                }
            }
            walk.collect(String::new(), model.value, true)?;
        } else {
            for &DictPair { key, value, .. } in &rest {
                match key {
                    Key::Text(key) => walk.collect(key.to_owned(), value, false)?,
                    Key::Int(number) => walk.collect(number.to_string(), value, false)?,
                    Key::Other(_) => walk.refuse_tensors(value)?,
                }
            }
        }
        walk.check_opaque()?;
        let found = std::mem::take(&mut walk.found);
        check_names(&found)?;
        let (mut tensors, rank) = places(storages, found)?;
        let all: Vec<&DictPair<'_>> = hidden.iter().chain(&rest).collect();
        // A file of one of several ranks is accepted here. The catalog refuses such a file if the files of the other
        // ranks are missing.
        if zero.is_none_or(|zero| zero.slices <= 1) {
            check_whole(values, &all)?;
        }
        let is_deepspeed = all.iter().any(|pair| pair.key.text() == Some("ds_version"));
        let placeholders = take_placeholders(&mut tensors, zero, state);
        let no_data = |tensor: &&ModelTensor| {
            tensor.place.is_placeholder
                || (is_deepspeed && zero.is_none() && tensor.place.shape == [0])
        };
        if let Some(tensor) = tensors.iter().find(no_data) {
            return Err(not_here().tensor(&tensor.name).into());
        }
        tensors.sort_by(|a, b| (a.place.start, &a.name).cmp(&(b.place.start, &b.name)));
        if tensors.is_empty() && placeholders.is_empty() {
            let message = "is a file of torch.save without tensors of a model; name the file of the \
                           weights";
            return Err(ErrorKind::TensorMissing.stop(message));
        }
        let note = note_of(left_out, hides_tensors);
        Ok(ModelTensors { tensors, left_out: note, rank, placeholders })
    }
}

/// Removes the tensors whose elements are in the files of all ranks. Returns their names in the model.
fn take_placeholders(
    tensors: &mut Vec<ModelTensor>,
    zero: Option<&ZeroModel>,
    state: TrainingState,
) -> Vec<String> {
    let Some(zero) = zero else { return Vec::new() };
    let (elsewhere, empty) = (zero.names_elsewhere(), zero.names_without_elements());
    // If all tensors are shown, their names are the full names.
    let prefix = if state == TrainingState::All { "module." } else { "" };
    let empty_name = |tensor: &ModelTensor| {
        let name = tensor.name.strip_prefix(prefix).filter(|_| tensor.place.shape == [0]);
        name.map(str::to_owned)
    };
    let is_elsewhere = |name: &String| elsewhere.contains(name.as_str());
    let is_stage_3 = tensors.iter().filter_map(empty_name).any(|name| is_elsewhere(&name));
    // Versions before 0.9 do not record which weights are shared. Also, modules may save a state that has no elements.
    let is_placeholder = |name: &String| {
        let has_none = empty.contains(name.as_str()) || last_word(name) == EXTRA_STATE;
        is_elsewhere(name) || is_stage_3 && !has_none
    };
    let names = |tensor: &ModelTensor| empty_name(tensor).filter(is_placeholder);
    tensors
        .extract_if(.., |tensor| names(tensor).is_some())
        .filter_map(|tensor| names(&tensor))
        .collect()
}

/// The note about values of a file that are not shown. `hides_tensors` says whether some of them have tensors.
fn note_of(mut left_out: Vec<String>, hides_tensors: bool) -> Option<String> {
    let unnamed = left_out.len().saturating_sub(NAMED_MAX);
    left_out.truncate(NAMED_MAX);
    let more = if unnamed > 0 { format!(" and {unnamed} more") } else { String::new() };
    let how = if hides_tensors { ALL_SHOWN } else { "" };
    let is_some = !left_out.is_empty();
    is_some.then(|| format!("{}{more} of the file are not shown{how}", left_out.join(", ")))
}

/// The places of named tensors. Also the rank that saved the file, if one of the tensors is a part.
fn places(
    storages: &mut Storages<'_, '_>,
    found: Vec<(String, NodeId)>,
) -> ReadResult<(Vec<ModelTensor>, Option<FileRank>)> {
    let values = storages.values;
    let mut tensors = Vec::with_capacity(found.len());
    let mut parts = RankParts::new(storages);
    let mut dims_left = values.pickle_len();
    for (name, id) in found {
        let of_ranks = parts.of(id).map_err(|stop| stop.tensor(&name))?;
        if let Some(of_ranks) = of_ranks {
            if matches!(last_word(&name), "_flat_param" | "flat_param") {
                let message = "is a flat parameter of FSDP1, whose local state dicts tensorfs does not \
                               read; save with SHARDED_STATE_DICT or FULL_STATE_DICT";
                return Err(ErrorKind::DcpOffsets.fault(message).tensor(&name).into());
            }
            for TensorPart { place, offset, whole } in of_ranks {
                dims_left = dims_left.checked_sub(3 * whole.len()).ok_or_else(too_many)?;
                let (name, part_of) = (name.clone(), Some([offset, whole]));
                tensors.push(ModelTensor { name, place, part_of });
            }
            continue;
        }
        let call = tensor_call(values, id)
            .ok_or_else(|| ErrorKind::Internal.fault("no call of a tensor"))?;
        let place = call.place(parts.storages).map_err(|stop| stop.tensor(&name))?;
        dims_left = dims_left.checked_sub(place.shape.len()).ok_or_else(too_many)?;
        tensors.push(ModelTensor { name, place, part_of: None });
    }
    if let Some(rank) = parts.rank.filter(|_| parts.has_sharded_tensors) {
        // A tensor with a CRC needs no check here, because different CRCs show that the tensor differs between ranks.
        let unproved = |tensor: &&ModelTensor| {
            tensor.part_of.is_some() || parts.storages.crc_of(&tensor.place) == 0
        };
        check_tied(&tensors.iter().filter(unproved).collect::<Vec<_>>(), rank.ranks)?;
    }
    Ok((tensors, parts.rank))
}

/// The last word of a dotted name.
fn last_word(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Refuses a weight that two units of FSDP1 share. FSDP1 saves it as a ShardedTensor under one name. Under the other
/// name it saves the elements of this rank as a plain tensor of one dimension.
fn check_tied(tensors: &[&ModelTensor], ranks: u64) -> Result<(), Fault> {
    let numel = |shape: &[u64]| shape.iter().try_fold(1_u64, |all, &size| all.checked_mul(size));
    let shared: HashSet<_> = tensors
        .iter()
        .filter_map(|tensor| {
            let [_, whole] = tensor.part_of.as_ref().filter(|[_, whole]| whole.len() > 1)?;
            Some((last_word(&tensor.name), tensor.place.dtype, numel(whole)?))
        })
        .collect();
    let most = ranks.min(RANKS_MAX);
    let counts: Vec<u64> = (2..=most).filter(|count| ranks.is_multiple_of(*count)).collect();
    for tensor in tensors.iter().filter(|tensor| tensor.part_of.is_none()) {
        let [own] = *tensor.place.shape.as_slice() else { continue };
        let twin = |&count: &u64| {
            let whole = own.checked_mul(count).filter(|_| own > 0);
            let key = |whole| (last_word(&tensor.name), tensor.place.dtype, whole);
            whole.is_some_and(|whole| shared.contains(&key(whole)))
        };
        if let Some(count) = counts.iter().find(|count| twin(count)) {
            let message = format!(
                "has {own} elements of one rank, 1 / {count} of a tensor that is cut: FSDP1 saves so a \
                 weight that two of its units share; wrap them in one unit, or save with \
                 FULL_STATE_DICT"
            );
            return Err(ErrorKind::DcpOffsets.fault(message).tensor(&tensor.name));
        }
    }
    Ok(())
}

fn not_a_dict(values: &Values<'_>, root: NodeId) -> Fault {
    ErrorKind::HeaderDecode.fault(match (tensor_call(values, root), values.call(root)) {
        (Some(_), _) => "holds one tensor without a name; save a dict of tensors".to_owned(),
        (None, Some((class, _))) => format!(
            "holds an object of the class {}, not a dict of tensors; save the state_dict of the model",
            values.global_name(class)
        ),
        _ => "holds no dict of tensors; save the state_dict of the model".to_owned(),
    })
}

/// Refuses the file of one rank of a model that is split by tensors or layers. DeepSpeed and Megatron record the
/// number of ranks in the root dict.
fn check_whole(values: &Values<'_>, root: &[&DictPair<'_>]) -> Result<(), Fault> {
    let of_root = root.iter().filter_map(|pair| Some((pair.key.text()?, pair.value)));
    let args = of_root.clone().filter(|(key, _)| *key == "args").map(|(_, args)| args);
    let states = args.flat_map(|args| values.parts(args)).filter_map(|part| match part {
        Part::State(state) => Some(state),
        _ => None,
    });
    let of_args = states.flat_map(|state| values.parts(state)).filter_map(|part| match part {
        Part::Pair(key, value) => Some((values.text(key)?, value)),
        _ => None,
    });
    for (key, value) in of_root.chain(of_args) {
        let count = values.int(value).filter(|&count| count > 1 && SLICES.contains(&key));
        if let Some(count) = count {
            return Err(slice_fault(count.unsigned_abs(), key));
        }
    }
    Ok(())
}

/// The fault of a placeholder of DeepSpeed ZeRO-3 in a file that is read without the files of the other ranks.
fn not_here() -> Fault {
    let message = "has no elements: the weights of DeepSpeed ZeRO-3 lie in the files of all ranks; name \
                   the folder of the checkpoint of DeepSpeed, as global_step100";
    ErrorKind::TensorMissing.fault(message)
}

fn check_names(found: &[(String, NodeId)]) -> Result<(), Fault> {
    let mut names: HashSet<&str> = HashSet::with_capacity(found.len());
    for (name, _) in found {
        if name == METADATA {
            let message = "has the name that safetensors has for metadata; give it another one";
            return Err(ErrorKind::DuplicateKey.fault(message).tensor(name));
        }
        if !names.insert(name) {
            let message = "stands twice in the file: the keys on two paths make the same name";
            return Err(ErrorKind::DuplicateTensor.fault(message).tensor(name));
        }
    }
    Ok(())
}

/// Whether the value of this key in the root dict is a weight. A tensor of a state_dict has a dotted name, whose
/// first word may be any word.
fn is_weight(values: &Values<'_>, key: &str, value: NodeId) -> bool {
    key.contains('.') && is_tensor(values, value)
}

fn is_tensor(values: &Values<'_>, id: NodeId) -> bool {
    tensor_call(values, id).is_some()
}

/// A key of a dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key<'v> {
    Text(&'v str),
    Int(i64),
    /// A value of another type: the number of its node.
    Other(NodeId),
}

impl<'v> Key<'v> {
    /// The part that the key adds to the name of a tensor, if the key is text.
    fn text(&self) -> Option<&'v str> {
        match self {
            Key::Text(text) => Some(text),
            _ => None,
        }
    }

    fn shown(&self) -> String {
        match self {
            Key::Text(text) => quoted(text),
            Key::Int(number) => number.to_string(),
            Key::Other(_) => "a key that is no text".to_owned(),
        }
    }
}

/// A pair of a dict: the key, the number of the key as a value, and the value.
#[derive(Clone, Copy)]
struct DictPair<'v> {
    key: Key<'v>,
    node: NodeId,
    value: NodeId,
}

/// The key for the value `id`.
fn key_of<'v>(values: &Values<'v>, id: NodeId) -> Result<Key<'v>, Fault> {
    Ok(match values.node(id) {
        Node::Text(..) => Key::Text(
            values
                .text(id)
                .ok_or_else(|| ErrorKind::HeaderUtf8.fault("a key of its pickle is not UTF-8"))?,
        ),
        Node::Int(number) => Key::Int(number),
        _ => Key::Other(id),
    })
}

fn too_many() -> Fault {
    ErrorKind::HeaderTooLarge.fault(MANY_NAMES)
}

/// A traversal of the values of a pickle.
struct Walk<'a, 'v> {
    values: &'a Values<'v>,
    steps: PickleSteps,
    /// For each value, whether it is a container on the path to the current value.
    on_path: Vec<bool>,
    /// For each value, whether it is a container or a tensor that is shown.
    shown: Vec<bool>,
    /// Objects of unknown classes that lie beside shown tensors.
    opaque: Vec<NodeId>,
    /// Tensors that were found: the name, and the call that makes the tensor.
    found: Vec<(String, NodeId)>,
}

/// The step from a container to one of its parts: a position, or a key by its number.
#[derive(Clone, Copy)]
enum PartKey {
    Position(u32),
    Key(NodeId),
}

/// A container on the path, with its parts that are not visited yet. The next part is the last one.
struct Level {
    id: NodeId,
    name_len: usize,
    left: Vec<(PartKey, NodeId)>,
}

impl<'v> Walk<'_, 'v> {
    /// Whether the value is a dict.
    fn is_dict_value(&self, id: NodeId) -> bool {
        match self.values.node(id) {
            Node::Dict(_) => true,
            Node::Object(class, _) => self.values.global(class).is_some_and(is_dict),
            _ => false,
        }
    }

    /// The pairs of a dict. If a key occurs several times, it has its last value. `None` if the value is no dict.
    fn pairs(&mut self, id: NodeId) -> Result<Option<Vec<DictPair<'v>>>, Fault> {
        if !self.is_dict_value(id) {
            return Ok(None);
        }
        let mut pairs: Vec<DictPair<'v>> = Vec::new();
        let mut places: HashMap<Key<'v>, u32> = HashMap::new();
        for part in self.values.parts(id) {
            let Part::Pair(node, value) = part else { continue };
            let key = key_of(self.values, node)?;
            self.steps.spend(1)?;
            match places.get(&key) {
                Some(&place) => pairs[place as usize].value = value,
                None => {
                    places.insert(key, pairs.len() as u32);
                    pairs.push(DictPair { key, node, value });
                }
            }
        }
        Ok(Some(pairs))
    }

    /// The parts of a container that may hold tensors. `None` if the value is no container.
    fn level(&mut self, id: NodeId, name_len: usize) -> Result<Option<Level>, Fault> {
        let values = self.values;
        let is_inner = |id: NodeId| {
            !matches!(
                values.node(id),
                Node::Null
                    | Node::Bool(_)
                    | Node::Int(_)
                    | Node::Number
                    | Node::Text(..)
                    | Node::Bytes
                    | Node::Global(..)
            )
        };
        let mut left: Vec<(PartKey, NodeId)> = Vec::new();
        match values.node(id) {
            Node::List(_) | Node::Tuple(_) | Node::Set(_) => {
                for (position, part) in values.parts(id).enumerate() {
                    self.steps.spend(1)?;
                    if let Part::Item(item) = part
                        && is_inner(item)
                    {
                        left.push((PartKey::Position(position as u32), item));
                    }
                }
            }
            _ => {
                let Some(pairs) = self.pairs(id)? else { return Ok(None) };
                let inner = pairs.iter().filter(|pair| is_inner(pair.value));
                left.extend(inner.map(|pair| (PartKey::Key(pair.node), pair.value)));
            }
        }
        left.reverse();
        Ok(Some(Level { id, name_len, left }))
    }

    /// Collects the tensors in the value `id`. Their names begin with `prefix` and a dot. If `bare` is set, the dot
    /// is left out.
    fn collect(&mut self, prefix: String, id: NodeId, bare: bool) -> Result<(), Fault> {
        let mut name = prefix;
        let mut levels: Vec<Level> = Vec::new();
        self.visit(&name, id, &mut levels)?;
        while let Some(level) = levels.last_mut() {
            let Some((step, value)) = level.left.pop() else {
                self.on_path[level.id as usize] = false;
                levels.pop();
                continue;
            };
            name.truncate(level.name_len);
            if !(bare && levels.len() == 1) {
                name.push('.');
            }
            match step {
                PartKey::Position(position) => name.push_str(&position.to_string()),
                PartKey::Key(key) => match key_of(self.values, key)? {
                    Key::Text(text) => name.push_str(text),
                    Key::Int(number) => name.push_str(&number.to_string()),
                    Key::Other(_) => {
                        self.refuse_tensors(value)?;
                        continue;
                    }
                },
            }
            self.visit(&name, value, &mut levels)?;
        }
        Ok(())
    }

    fn visit(&mut self, name: &str, id: NodeId, levels: &mut Vec<Level>) -> Result<(), Fault> {
        self.steps.spend(1)?;
        if is_tensor(self.values, id) {
            self.steps.spend(name.len())?;
            if name.len() > NAME_LEN_MAX {
                let message = format!("a name of {} bytes, at most {NAME_LEN_MAX}", name.len());
                return Err(ErrorKind::HeaderTooLarge.fault(message));
            }
            // A tensor takes many more than 8 bytes of a pickle. If there are more tensors than that, some have many
            // names.
            if self.found.len() > 64 + self.values.pickle_len() / 8 {
                return Err(too_many());
            }
            self.shown[id as usize] = true;
            self.found.push((name.to_owned(), id));
            return Ok(());
        }
        match self.values.node(id) {
            Node::Persistent(_) => Err(ErrorKind::HeaderDecode
                .fault("is a storage without a tensor; save tensors")
                .tensor(name)),
            Node::List(_) | Node::Tuple(_) | Node::Set(_) | Node::Dict(_) | Node::Object(..) => {
                let Some(level) = self.level(id, name.len())? else {
                    self.opaque.push(id);
                    return Ok(());
                };
                if levels.len() >= DEPTH_MAX {
                    let message =
                        format!("its pickle has more than {DEPTH_MAX} values in each other");
                    return Err(ErrorKind::HeaderTooLarge.fault(message));
                }
                if std::mem::replace(&mut self.on_path[id as usize], true) {
                    let message = "its pickle has a dict or a list that holds itself";
                    return Err(ErrorKind::HeaderDecode.fault(message));
                }
                self.shown[id as usize] = true;
                levels.push(level);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Whether a tensor is in the value `id`, at any depth.
    fn holds_tensor(&mut self, id: NodeId) -> Result<bool, Fault> {
        let mut seen = HashSet::from([id]);
        let mut left = vec![id];
        while let Some(id) = left.pop() {
            self.steps.spend(1)?;
            if is_tensor(self.values, id) {
                return Ok(true);
            }
            left.extend(reached(self.values, id).filter(|&part| seen.insert(part)));
        }
        Ok(false)
    }

    /// Refuses a value with tensors whose key is neither text nor an integer, because the tensors have no names.
    fn refuse_tensors(&mut self, id: NodeId) -> Result<(), Fault> {
        if self.holds_tensor(id)? {
            let message = "a tensor of its pickle has a key that is neither text nor an integer";
            return Err(ErrorKind::HeaderDecode.fault(message));
        }
        Ok(())
    }

    /// Refuses objects of unknown classes that hold tensors without a name, or parts of values that are shown. The
    /// code of such a class may change the values that it gets.
    fn check_opaque(&mut self) -> Result<(), Fault> {
        let values = self.values;
        let mut seen = vec![false; values.node_count()];
        let beside: Vec<NodeId> = std::mem::take(&mut self.opaque);
        let others = values
            .objects()
            .filter(|&id| tensor_call(values, id).is_none() && !self.is_dict_value(id));
        let all: Vec<(NodeId, bool)> =
            beside.iter().map(|&id| (id, true)).chain(others.map(|id| (id, false))).collect();
        for (object, is_beside) in all {
            let mut left = vec![object];
            while let Some(id) = left.pop() {
                self.steps.spend(1)?;
                let is_tensor = tensor_call(values, id).is_some();
                if self.shown[id as usize] || (is_beside && is_tensor) {
                    let class = values.call(object).map_or(object, |(class, _)| class);
                    let what = if is_tensor { "a tensor" } else { "a part of the model" };
                    return Err(ErrorKind::HeaderDecode.fault(format!(
                        "its pickle gives {what} to the class {}, which tensorfs does not know; save \
                         the state_dict of the model",
                        values.global_name(class)
                    )));
                }
                for part in reached(values, id) {
                    if !std::mem::replace(&mut seen[part as usize], true) {
                        left.push(part);
                    }
                }
            }
        }
        Ok(())
    }
}

/// The values of which a value directly consists.
pub(super) fn reached<'a>(values: &'a Values<'_>, id: NodeId) -> impl Iterator<Item = NodeId> + 'a {
    let args = values.call(id).map(|(_, args)| args);
    let persistent = match values.node(id) {
        Node::Persistent(key) => Some(key),
        _ => None,
    };
    let parts = values.parts(id).flat_map(|part| match part {
        Part::Item(item) | Part::State(item) => [Some(item), None],
        Part::Pair(key, value) => [Some(value), Some(key)],
    });
    args.into_iter().chain(persistent).chain(parts.flatten())
}

#[cfg(test)]
mod tests;
