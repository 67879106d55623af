//! Reads the `.metadata` of a distributed checkpoint of torch. It lists the tensors and their chunks, and says where
//! in the `.distcp` files each chunk lies.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::chosen::{Chosen, KeyPath, ShownTensor};
use super::globals::dtype;
use super::machine::run_of;
use super::tensors::plain_tuple;
use super::values::{Node, NodeId, Part, PickleSteps, Values};
use super::{TrainingState, wrong};
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::names::is_distcp;
use crate::format::safetensors::METADATA;

/// Maximum length of a `.metadata` in bytes. torch writes about 240 bytes for a chunk.
pub const METADATA_LEN_MAX: u64 = 1 << 30;

/// Maximum number of values per byte of a pickle. torch writes one value in about five bytes.
const VALUES_OF_BYTE: f64 = 0.5;

/// Maximum length of the name of a tensor in bytes, and maximum number of dimensions. torch has the
/// same limits.
const NAME_LEN_MAX: usize = 64 << 10;
const DIMS_MAX: usize = 64;

/// Maximum number of visits of values per byte of the pickle. Visits are counted because a value may be part of many
/// other values, and may therefore be visited many times.
const STEPS_OF_BYTE: usize = 16;

/// Minimum number of bytes of the pickle that a chunk, a value, and the path of a value are assumed
/// to take. torch writes about 240 bytes for all three. Without such a minimum, a hostile pickle could refer to one
/// object many times, with only two bytes for each reference.
const CHUNK_LEN: usize = 64;
const VALUE_LEN: usize = 32;
const PATH_LEN: usize = 16;

/// Major version of the `.metadata` that is read.
const VERSION: &str = "1";

/// The module of the classes of a `.metadata`, and other modules that have, or had in older versions, some of these
/// classes.
const MODULES: [&str; 4] = [
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",
    "megatron.core.dist_checkpointing.strategies.torch",
];

/// The root classes of a `.metadata`: the class of torch and the class of Megatron.
const ROOTS: [&str; 2] = ["Metadata", "MCoreMetadata"];

/// A chunk of a tensor in a `.distcp` file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredChunk {
    /// The tensor to which it belongs.
    pub tensor: Arc<ChunkedTensor>,
    /// First index of the chunk in each dimension of the tensor.
    pub offset: Vec<u64>,
    /// Extent of the chunk in each dimension.
    pub shape: Vec<u64>,
    /// The item that holds the chunk: its offset in the file and its length in bytes.
    pub item: (u64, u64),
}

/// A tensor of a `.metadata`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkedTensor {
    /// Its name in the checkpoint.
    pub fqn: String,
    /// The name under which it is shown.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extent of each dimension.
    pub shape: Vec<u64>,
}

/// The content of a `.metadata`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DistcpMetadata {
    /// The chunks of the shown tensors, by the name of their file.
    pub files: BTreeMap<String, Vec<StoredChunk>>,
    /// Names of all files, including files without shown tensors. For each file its items in the order of their
    /// bytes: offset and length in bytes.
    pub named: BTreeMap<String, Vec<(u64, u64)>>,
    /// Text for people about the values that are not shown.
    pub left_out: Option<String>,
}

impl DistcpMetadata {
    /// Reads the bytes of a `.metadata`. `state` says which tensors are shown.
    ///
    /// # Errors
    /// Why the `.metadata` is refused.
    pub fn parse(bytes: &[u8], state: TrainingState) -> Result<DistcpMetadata, Fault> {
        let values_max = (bytes.len() as f64 * VALUES_OF_BYTE) as usize + 1024;
        let values = run_of(bytes, values_max)?;
        let steps =
            PickleSteps::of(&values, STEPS_OF_BYTE, "its pickle uses the same values too often");
        MetadataReader { values: &values, steps, state }.read()
    }
}

/// Whether the root value of a pickle is a `.metadata`.
pub(super) fn is_metadata(values: &Values<'_>) -> bool {
    let class = values.call(values.root).and_then(|(class, _)| values.global(class));
    class.is_some_and(|(module, name)| MODULES.contains(&module) && ROOTS.contains(&name))
}

/// The fault of a value whose form is unknown.
fn unknown(what: &str) -> Fault {
    wrong(format!(
        "its {what} has a form that tensorfs does not know; make one file of the checkpoint with `python \
         -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER OUT`"
    ))
}

/// A tensor before its chunks are found in files.
struct MappedTensor<'v> {
    tensor: Arc<ChunkedTensor>,
    fqn: &'v str,
    chunks: Vec<MappedChunk<'v>>,
}

struct MappedChunk<'v> {
    offset: Vec<u64>,
    shape: Vec<u64>,
    stored: Option<ItemPlace<'v>>,
}

/// The place of an item according to a `.metadata`.
#[derive(Clone, Copy)]
struct ItemPlace<'v> {
    file: &'v str,
    offset: u64,
    len: u64,
}

struct MetadataReader<'a, 'v> {
    values: &'a Values<'v>,
    steps: PickleSteps,
    state: TrainingState,
}

impl<'v> MetadataReader<'_, 'v> {
    fn read(mut self) -> Result<DistcpMetadata, Fault> {
        let values = self.values;
        let named =
            ["state_dict_metadata", "planner_data", "storage_data", "version", "mcore_data"];
        let found = self.attributes(values.root, &ROOTS, named)?;
        let [tensors, planner, storage, version, of_megatron] = found;
        self.check_version(version)?;
        let tensors = tensors.ok_or_else(|| unknown("`state_dict_metadata`"))?;
        let storage = storage.ok_or_else(|| unknown("`storage_data`"))?;
        let paths = self.paths(planner)?;
        let chosen = self.choose(tensors, &paths)?;
        self.check_megatron(of_megatron, &chosen)?;
        let mut planned = Vec::with_capacity(chosen.shown.len());
        for shown in &chosen.shown {
            planned.push(self.planned(shown).map_err(|fault| fault.tensor(shown.name))?);
        }
        let named = self.find_items(storage, &mut planned, &chosen)?;
        let mut files: BTreeMap<String, Vec<StoredChunk>> = BTreeMap::new();
        for MappedTensor { tensor, chunks, .. } in planned {
            for MappedChunk { offset, shape, stored } in chunks {
                let Some(ItemPlace { file, offset: start, len }) = stored else {
                    let message = format!(
                        "its chunk at {offset:?} of shape {shape:?} has no place in a file: \
                         `storage_data` lacks it; save the checkpoint again"
                    );
                    return Err(ErrorKind::DcpHole.fault(message).tensor(&tensor.name));
                };
                let chunk =
                    StoredChunk { tensor: tensor.clone(), offset, shape, item: (start, len) };
                match files.get_mut(file) {
                    Some(chunks) => chunks.push(chunk),
                    None => drop(files.insert(file.to_owned(), vec![chunk])),
                }
            }
        }
        files.values_mut().for_each(|chunks| chunks.sort_by_key(|chunk| chunk.item));
        Ok(DistcpMetadata { files, named, left_out: chosen.left_out })
    }

    /// Whether `id` is an object of one of these classes.
    fn is_of(&self, id: NodeId, classes: &[&str]) -> bool {
        let class = self.values.call(id).and_then(|(class, _)| self.values.global(class));
        class.is_some_and(|(module, name)| MODULES.contains(&module) && classes.contains(&name))
    }

    /// The state of an object that has one state and no other parts.
    fn state(&self, id: NodeId) -> Option<NodeId> {
        let mut parts = self.values.parts(id);
        match (parts.next(), parts.next()) {
            (Some(Part::State(state)), None) => Some(state),
            _ => None,
        }
    }

    /// The attributes `names` of an object of one of `classes`.
    fn attributes<const N: usize>(
        &mut self,
        id: NodeId,
        classes: &[&str],
        names: [&str; N],
    ) -> Result<[Option<NodeId>; N], Fault> {
        let class = classes[0];
        if !self.is_of(id, classes) {
            let found = self.values.call(id).map_or(id, |(class, _)| class);
            return Err(wrong(format!(
                "it has {} in place of a `{class}` of torch.distributed.checkpoint",
                self.values.global_name(found)
            )));
        }
        let state = self.state(id).ok_or_else(|| unknown(class))?;
        let mut found = [None; N];
        for (key, value) in self.pairs(state).ok_or_else(|| unknown(class))? {
            self.steps.spend(1)?;
            let key = self.values.text(key);
            if let Some(at) = names.iter().position(|&name| key == Some(name))
                && found[at].replace(value).is_some()
            {
                return Err(unknown(class));
            }
        }
        Ok(found)
    }

    /// The pairs of a dict. `None` if the value is no dict.
    fn pairs(&self, id: NodeId) -> Option<Vec<(NodeId, NodeId)>> {
        let Node::Dict(_) = self.values.node(id) else { return None };
        let pairs = self.values.parts(id).map(|part| match part {
            Part::Pair(key, value) => Some((key, value)),
            _ => None,
        });
        pairs.collect()
    }

    fn check_version(&self, version: Option<NodeId>) -> Result<(), Fault> {
        // The version is absent before torch 2.9.
        let Some(version) = version.filter(|&id| self.values.node(id) != Node::Null) else {
            return Ok(());
        };
        let text = self.values.text(version).ok_or_else(|| unknown("`version`"))?;
        if text.split('.').next() == Some(VERSION) {
            return Ok(());
        }
        Err(wrong(format!(
            "has the version {}, tensorfs reads version {VERSION}; update it",
            quoted(text)
        )))
    }

    /// The numbers of a `torch.Size`, a tuple or a list. They must not be negative.
    fn natural(&mut self, id: NodeId, what: &str) -> Result<Vec<u64>, Fault> {
        let values = self.values;
        let list = plain_tuple(values, id);
        if !matches!(values.node(list), Node::Tuple(_) | Node::List(_)) {
            return Err(unknown(what));
        }
        let mut numbers = Vec::new();
        for part in values.parts(list) {
            self.steps.spend(1)?;
            let Part::Item(item) = part else { return Err(unknown(what)) };
            let Some(number) = values.natural(item) else {
                let shown = values.int(item).map_or("no integer".to_owned(), |n| n.to_string());
                let message = format!("its {what} has {shown}, a number from 0 on expected");
                return Err(ErrorKind::DcpOffsets.fault(message));
            };
            if numbers.len() == DIMS_MAX {
                return Err(wrong(format!("its {what} has more than {DIMS_MAX} dimensions")));
            }
            numbers.push(number);
        }
        Ok(numbers)
    }

    /// For each name, its path in the nested dicts and lists that torch has flattened.
    fn paths(&mut self, planner: Option<NodeId>) -> Result<HashMap<&'v str, KeyPath<'v>>, Fault> {
        let values = self.values;
        let pairs = planner.and_then(|planner| self.pairs(planner)).unwrap_or_default();
        let mut paths = HashMap::new();
        for (key, value) in pairs {
            self.steps.spend(STEPS_OF_BYTE * PATH_LEN)?;
            let (Some(fqn), Some(items)) = (values.text(key), values.tuple(value)) else {
                continue;
            };
            let mut path = KeyPath::new(fqn);
            for item in items {
                self.steps.spend(1)?;
                path.push(values.text(item), values.int(item));
            }
            if path.is_whole() {
                paths.insert(fqn, path);
            }
        }
        Ok(paths)
    }

    /// Chooses the tensors to show among the values of `state_dict_metadata`.
    fn choose(
        &mut self,
        tensors: NodeId,
        paths: &HashMap<&'v str, KeyPath<'v>>,
    ) -> Result<Chosen<'v>, Fault> {
        let pairs = self.pairs(tensors).ok_or_else(|| unknown("`state_dict_metadata`"))?;
        let mut chosen = Chosen::default();
        for (key, value) in pairs {
            let fqn = self.values.text(key).ok_or_else(|| {
                ErrorKind::HeaderUtf8.fault("has a name that is no text in UTF-8")
            })?;
            self.steps.spend(fqn.len() + STEPS_OF_BYTE * VALUE_LEN)?;
            let is_tensor = self.is_of(value, &["TensorStorageMetadata"]);
            if !is_tensor && !self.is_of(value, &["BytesStorageMetadata"]) {
                let class = self.values.call(value).map_or(value, |(class, _)| class);
                let message =
                    format!("has {} in place of metadata", self.values.global_name(class));
                return Err(wrong(message).tensor(fqn));
            }
            if !chosen.add(fqn, paths.get(fqn).copied(), is_tensor.then_some(value)) {
                let message = "stands twice in `state_dict_metadata`";
                return Err(ErrorKind::DuplicateTensor.fault(message).tensor(fqn));
            }
        }
        chosen.settle(self.state);
        if chosen.shown.iter().any(|shown| shown.name == METADATA) {
            let message = "has the name that safetensors has for metadata; give it another one";
            return Err(ErrorKind::DuplicateKey.fault(message).tensor(METADATA));
        }
        if let Some(shown) = chosen.shown.iter().find(|shown| shown.fqn.len() > NAME_LEN_MAX) {
            let message = format!("a name of {} bytes, at most {NAME_LEN_MAX}", shown.fqn.len());
            return Err(ErrorKind::HeaderTooLarge.fault(message));
        }
        if chosen.shown.is_empty() {
            let message = "names no tensors, only other values; save the model in the checkpoint";
            return Err(ErrorKind::TensorMissing.fault(message));
        }
        Ok(chosen)
    }

    /// Refuses shown tensors that Megatron saved in another shape than the shape in the model.
    fn check_megatron(&self, data: Option<NodeId>, chosen: &Chosen<'v>) -> Result<(), Fault> {
        let values = self.values;
        let pairs = data.and_then(|data| self.pairs(data)).unwrap_or_default();
        let reshaped: BTreeSet<&str> = pairs
            .into_iter()
            .filter(|&(_, value)| values.parts(value).next().is_some())
            .filter_map(|(key, _)| values.text(key))
            .collect();
        match chosen.shown.iter().find(|shown| reshaped.contains(shown.fqn)) {
            None => Ok(()),
            Some(shown) => {
                let message = "was saved by Megatron in another shape than it has in the model, which \
                               tensorfs does not read";
                Err(wrong(message).tensor(shown.name))
            }
        }
    }

    /// A tensor with its chunks.
    fn planned(&mut self, shown: &ShownTensor<'v>) -> Result<MappedTensor<'v>, Fault> {
        let &ShownTensor { fqn, name, node: id } = shown;
        let named = ["properties", "size", "chunks"];
        let found = self.attributes(id, &["TensorStorageMetadata"], named)?;
        let [Some(properties), Some(size), Some(chunks)] = found else {
            return Err(unknown("`TensorStorageMetadata`"));
        };
        let element = self.element(properties)?;
        let pack = |numbers: &mut Vec<u64>| -> Result<(), Fault> {
            // torch counts a pair of F4 elements as one element.
            if let (Dtype::F4, Some(last)) = (element, numbers.last_mut()) {
                let doubled = last.checked_mul(2);
                *last = doubled.ok_or_else(|| ErrorKind::Overflow.fault("passes 2^64"))?;
            }
            Ok(())
        };
        let mut shape = self.natural(size, "size")?;
        pack(&mut shape)?;
        let Node::List(_) = self.values.node(chunks) else { return Err(unknown("`chunks`")) };
        let mut planned = Vec::new();
        for part in self.values.parts(chunks) {
            let Part::Item(chunk) = part else { return Err(unknown("`chunks`")) };
            self.steps.spend(STEPS_OF_BYTE * CHUNK_LEN)?;
            let found = self.attributes(chunk, &["ChunkStorageMetadata"], ["offsets", "sizes"])?;
            let [Some(offsets), Some(sizes)] = found else {
                return Err(unknown("`ChunkStorageMetadata`"));
            };
            let mut offset = self.natural(offsets, "list of offsets")?;
            let mut sizes = self.natural(sizes, "list of sizes")?;
            pack(&mut offset)?;
            pack(&mut sizes)?;
            self.steps.spend(name.len() + shape.len())?;
            check_chunk(&shape, &offset, &sizes)?;
            planned.push(MappedChunk { offset, shape: sizes, stored: None });
        }
        planned.sort_by(|a, b| a.offset.cmp(&b.offset));
        // Several ranks without elements may each have an empty chunk at the end of the tensor.
        planned.dedup_by(|next, first| {
            next.offset == first.offset && next.shape == first.shape && next.shape.contains(&0)
        });
        let twice = planned.windows(2).find(|pair| pair[0].offset == pair[1].offset);
        if let Some([first, _]) = twice {
            let message =
                format!("has two chunks at {:?}; save the checkpoint again", first.offset);
            return Err(ErrorKind::DcpOverlap.fault(message));
        }
        if planned.is_empty() {
            return Err(ErrorKind::DcpHole.fault("has no chunks; save the checkpoint again"));
        }
        let (fqn_text, name) = (fqn.to_owned(), name.to_owned());
        let tensor = ChunkedTensor { fqn: fqn_text, name, dtype: element, shape };
        Ok(MappedTensor { tensor: Arc::new(tensor), fqn, chunks: planned })
    }

    /// The element type of tensors with these properties.
    fn element(&self, properties: NodeId) -> Result<Dtype, Fault> {
        let values = self.values;
        let form = || unknown("`TensorProperties`");
        if !self.is_of(properties, &["TensorProperties"]) {
            return Err(form());
        }
        let state = self.state(properties).ok_or_else(form)?;
        let fields: Vec<NodeId> = values.tuple(state).ok_or_else(form)?.take(2).collect();
        let [element, layout] = fields.as_slice() else { return Err(form()) };
        let call = values.call(*layout);
        let args = call
            .filter(|(function, _)| {
                values.global(*function) == Some(("torch.serialization", "_get_layout"))
            })
            .and_then(|(_, args)| values.array::<1>(args));
        let layout = args.and_then(|[name]| values.text(name)).ok_or_else(form)?;
        if layout != "torch.strided" {
            let message = format!("has the layout {}, which has no plain form", quoted(layout));
            return Err(wrong(message));
        }
        let named = values.global(*element).and_then(|(module, name)| dtype(module, name));
        named.ok_or_else(|| {
            let name = values.global_name(*element);
            let message = format!("has the dtype {name}, which safetensors does not have");
            ErrorKind::UnknownDtype.fault(message)
        })
    }

    /// Finds the place of each chunk of `planned` in `storage_data`. Returns the names of all files, with the items
    /// of each file.
    fn find_items(
        &mut self,
        storage: NodeId,
        planned: &mut [MappedTensor<'v>],
        chosen: &Chosen<'v>,
    ) -> Result<BTreeMap<String, Vec<(u64, u64)>>, Fault> {
        let mut by_name: HashMap<&str, &mut MappedTensor<'v>> =
            planned.iter_mut().map(|tensor| (tensor.fqn, tensor)).collect();
        let mut named = BTreeMap::new();
        for (key, value) in self.pairs(storage).ok_or_else(|| unknown("`storage_data`"))? {
            let [fqn, offset] = self.attributes(key, &["MetadataIndex"], ["fqn", "offset"])?;
            let Some(fqn) = fqn.and_then(|fqn| self.values.text(fqn)) else {
                return Err(unknown("`MetadataIndex`"));
            };
            let info = ["relative_path", "offset", "length", "transform_descriptors"];
            let found = self.attributes(value, &["_StorageInfo"], info)?;
            self.note_item(&mut named, found);
            let Some(tensor) = by_name.get_mut(fqn) else {
                if chosen.is_known(fqn) {
                    continue;
                }
                let message = "has data in a file, but `state_dict_metadata` does not describe it; \
                               save the checkpoint again";
                return Err(ErrorKind::TensorUnlisted.fault(message).tensor(fqn));
            };
            let name = tensor.tensor.name.clone();
            let stored = self.stored(found).map_err(|fault| fault.tensor(&name))?;
            let mut offset = match offset {
                Some(offset) => self.natural(offset, "offset"),
                None => Err(unknown("`MetadataIndex`")),
            }
            .map_err(|fault| fault.tensor(&name))?;
            if let (Dtype::F4, Some(last)) = (tensor.tensor.dtype, offset.last_mut()) {
                *last = last.saturating_mul(2);
            }
            let found = tensor.chunks.binary_search_by(|chunk| chunk.offset.cmp(&offset));
            let chunk = found.ok().map(|at| &mut tensor.chunks[at]);
            let place = chunk.filter(|chunk| chunk.stored.is_none()).map(|chunk| &mut chunk.stored);
            let Some(place) = place else {
                let message = format!(
                    "`storage_data` has one chunk more at {offset:?} than `state_dict_metadata`; save \
                     the checkpoint again"
                );
                return Err(ErrorKind::DcpInfo.fault(message).tensor(&name));
            };
            *place = Some(stored);
        }
        named.values_mut().for_each(|items: &mut Vec<(u64, u64)>| items.sort_unstable());
        Ok(named)
    }

    /// Adds an item to the list of its file, from the attributes of its `_StorageInfo`. An item that is not shown may
    /// have any form.
    fn note_item(&self, named: &mut BTreeMap<String, Vec<(u64, u64)>>, found: [Option<NodeId>; 4]) {
        let values = self.values;
        let [path, start, len, _] = found;
        let Some(file) = path.and_then(|path| values.text(path)) else { return };
        let number = |id: Option<NodeId>| id.and_then(|id| values.natural(id)).unwrap_or(0);
        let item = (number(start), number(len));
        match named.get_mut(file) {
            Some(items) => items.push(item),
            None => drop(named.insert(file.to_owned(), vec![item])),
        }
    }

    /// The place of an item, from the attributes of its `_StorageInfo`.
    fn stored(&self, found: [Option<NodeId>; 4]) -> Result<ItemPlace<'v>, Fault> {
        let values = self.values;
        let [path, offset, len, transforms] = found;
        let file = path.and_then(|path| values.text(path)).ok_or_else(|| unknown("place"))?;
        // torch joins this path to the folder of the checkpoint, so it must not lead out of the
        // folder.
        if !is_distcp(file) || file.contains('/') || file.contains('\0') {
            return Err(ErrorKind::UnsafePath.fault(format!(
                "lies in {} by its place, which is no name of a `.distcp` file in this folder",
                quoted(file)
            )));
        }
        let mut transforms = transforms.into_iter().flat_map(|list| values.parts(list));
        if let Some(first) = transforms.next() {
            let name = match first {
                Part::Item(item) => values.text(item).unwrap_or("a value"),
                _ => "a value",
            };
            return Err(wrong(format!(
                "its data is changed by {} in the file, which tensorfs does not undo; save the \
                 checkpoint without extensions",
                quoted(name)
            )));
        }
        let number = |id: Option<NodeId>, what: &str| {
            let natural = id.and_then(|id| values.natural(id));
            natural.ok_or_else(|| {
                let shown = id.and_then(|id| values.int(id)).map_or_else(
                    || "no integer of 64 bits".to_owned(),
                    |number| number.to_string(),
                );
                ErrorKind::DcpOffsets
                    .fault(format!("its {what} in {file} is {shown}, a number from 0 on expected"))
            })
        };
        Ok(ItemPlace { file, offset: number(offset, "offset")?, len: number(len, "length")? })
    }
}

/// Refuses a chunk that extends past its tensor.
fn check_chunk(whole: &[u64], offset: &[u64], shape: &[u64]) -> Result<(), Fault> {
    if offset.len() != whole.len() || shape.len() != whole.len() {
        return Err(ErrorKind::DcpRank.fault(format!(
            "has {} dimensions, its chunk at {offset:?} of shape {shape:?} has {} and {}",
            whole.len(),
            offset.len(),
            shape.len()
        )));
    }
    let mut ends = offset.iter().zip(shape).zip(whole);
    let inside = ends
        .all(|((offset, size), whole)| offset.checked_add(*size).is_some_and(|end| end <= *whole));
    if inside {
        return Ok(());
    }
    Err(ErrorKind::DcpOffsets.fault(format!(
        "its chunk at {offset:?} of shape {shape:?} passes its shape {whole:?}; save the checkpoint \
         again"
    )))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests;
