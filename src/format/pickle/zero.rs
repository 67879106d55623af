//! Reads the parts of DeepSpeed's files that say where the elements of tensors are: shapes in model states, and flat
//! groups in optimizer states.

use std::collections::HashMap;

use super::tensors::{Storages, numbers, tensor_call};
use super::values::{MANY_NAMES, Node, NodeId, Part, PickleSteps, Values};
use super::{ReadResult, ReadStop};
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::deepspeed::{FlatRun, ZeroModel, ZeroParam, ZeroPartition, ZeroSlice};

/// Maximum number of values that are visited per byte of the pickle. A value may be part of many
/// others, so the visits are counted.
const STEPS_OF_BYTE: usize = 4;

/// Reads the values of one file.
struct Reading<'a> {
    values: &'a Values<'a>,
    steps: PickleSteps,
}

pub(super) fn unknown(what: &str) -> Fault {
    ErrorKind::HeaderDecode.fault(format!(
        "its `{what}` has a form that tensorfs does not know; make one file of the checkpoint with \
         zero_to_fp32.py"
    ))
}

/// The facts in a file of model states. `None` if the pickle is not such a file of DeepSpeed, or
/// has no shapes.
pub(super) fn model_of(storages: &mut Storages<'_, '_>) -> ReadResult<Option<ZeroModel>> {
    let values = storages.values;
    let mut reading = Reading::new(values);
    let root = values.root;
    if reading.value(root, "ds_version")?.is_none() {
        return Ok(None);
    }
    let Some(shapes) = reading.some_value(root, "param_shapes")? else { return Ok(None) };
    let mut model = ZeroModel { groups: reading.groups(shapes)?, ..ZeroModel::default() };
    if let Some(shapes) = reading.some_value(root, "frozen_param_shapes")? {
        let named_fragments = match reading.value(root, "frozen_param_fragments")? {
            Some(id) => reading.pairs(id)?,
            None => Vec::new(),
        };
        let fragments: HashMap<&str, NodeId> = named_fragments.into_iter().collect();
        for param in reading.params(shapes)? {
            let run = match fragments.get(param.name.as_str()) {
                Some(&id) => Some(reading.run(storages, id, "frozen_param_fragments")?),
                None => None,
            };
            model.frozen.push((param, run));
        }
    }
    if let Some(shared) = reading.some_value(root, "shared_params")? {
        for (name, of) in reading.pairs(shared)? {
            let of = values.text(of).ok_or_else(|| unknown("shared_params"))?;
            model.shared.push((name.to_owned(), of.to_owned()));
        }
    }
    if let Some(names) = reading.some_value(root, "buffer_names")? {
        for name in reading.items(names, "buffer_names")? {
            let name = values.text(name).ok_or_else(|| unknown("buffer_names"))?;
            model.buffers.push(name.to_owned());
        }
    }
    let ranks = reading.value(root, "dp_world_size")?;
    model.ranks = ranks.and_then(|id| values.natural(id));
    let slices = reading.value(root, "mp_world_size")?;
    model.slices = slices.and_then(|id| values.natural(id)).unwrap_or(1);
    Ok(Some(model))
}

/// The facts in a file of optimizer states. `None` if the pickle is not such a file of ZeRO.
pub(super) fn partition_of(storages: &mut Storages<'_, '_>) -> ReadResult<Option<ZeroPartition>> {
    let values = storages.values;
    let mut reading = Reading::new(values);
    let Some(state) = reading.value(values.root, "optimizer_state_dict")? else { return Ok(None) };
    let Some(stage) = reading.value(state, "zero_stage")? else { return Ok(None) };
    let stage = reading.stage(stage).ok_or_else(|| unknown("zero_stage"))?;
    let count = reading.value(state, "partition_count")?;
    let largest = match count {
        Some(id) => reading.largest(id)?,
        None => None,
    };
    let ranks = largest.ok_or_else(|| unknown("partition_count"))?;
    let key = if stage == 3 { "fp32_flat_groups" } else { "single_partition_of_fp32_groups" };
    let groups = reading.value(state, key)?.ok_or_else(|| unknown(key))?;
    let mut partition = ZeroPartition { stage, ranks, ..ZeroPartition::default() };
    for group in reading.items(groups, key)? {
        partition.groups.push(reading.run(storages, group, key)?);
    }
    let key = "param_slice_mappings";
    if let Some(mappings) = reading.some_value(state, key)? {
        let mut all = Vec::new();
        for mapping in reading.items(mappings, key)? {
            let mut slices = Vec::new();
            for (name, address) in reading.pairs(mapping)? {
                let start = reading.attribute(address, "start")?;
                let numel = reading.attribute(address, "numel")?;
                let (Some(start), Some(numel)) = (start, numel) else {
                    return Err(unknown(key).into());
                };
                slices.push(ZeroSlice { name: name.to_owned(), start, numel });
            }
            all.push(slices);
        }
        partition.slices = Some(all);
    }
    let key = "param_alignment_paddings";
    if let Some(paddings) = reading.some_value(state, key)? {
        for group in reading.items(paddings, key)? {
            let group = reading.items(group, key)?;
            let numbers =
                group.into_iter().map(|id| values.natural(id)).collect::<Option<Vec<u64>>>();
            partition.paddings.push(numbers.ok_or_else(|| unknown(key))?);
        }
    }
    Ok(Some(partition))
}

/// Whether the dict of a tensor of a universal checkpoint says that padding was removed from the
/// tensor.
pub(super) fn is_vocabulary(values: &Values<'_>) -> Result<bool, Fault> {
    let mark = Reading::new(values).value(values.root, "vocab_tensor")?;
    Ok(mark.is_some_and(|id| values.node(id) == Node::Bool(true)))
}

impl<'a> Reading<'a> {
    fn new(values: &'a Values<'a>) -> Reading<'a> {
        Reading { values, steps: PickleSteps::of(values, STEPS_OF_BYTE, MANY_NAMES) }
    }

    /// Like `value`, without values that are `None`.
    fn some_value(&mut self, dict: NodeId, key: &str) -> Result<Option<NodeId>, Fault> {
        Ok(self.value(dict, key)?.filter(|&id| self.values.node(id) != Node::Null))
    }

    /// The value of a dict with this key. If the key occurs several times, its last value.
    fn value(&mut self, dict: NodeId, key: &str) -> Result<Option<NodeId>, Fault> {
        let values = self.values;
        let mut found = None;
        for part in values.parts(dict) {
            self.steps.spend(1)?;
            if let Part::Pair(own, value) = part
                && values.text(own) == Some(key)
            {
                found = Some(value);
            }
        }
        Ok(found)
    }

    /// The pairs of a dict whose keys are all text.
    fn pairs(&mut self, dict: NodeId) -> Result<Vec<(&'a str, NodeId)>, Fault> {
        let values = self.values;
        let mut pairs = Vec::new();
        for part in values.parts(dict) {
            let Part::Pair(key, value) = part else { continue };
            let key = values.text(key).ok_or_else(|| unknown("dict"))?;
            self.steps.spend(1 + key.len())?;
            pairs.push((key, value));
        }
        Ok(pairs)
    }

    /// The items of a list or a tuple.
    fn items(&mut self, list: NodeId, what: &str) -> Result<Vec<NodeId>, Fault> {
        let values = self.values;
        if !matches!(values.node(list), Node::List(_) | Node::Tuple(_)) {
            return Err(unknown(what));
        }
        let mut items = Vec::new();
        for part in values.parts(list) {
            self.steps.spend(1)?;
            if let Part::Item(item) = part {
                items.push(item);
            }
        }
        Ok(items)
    }

    /// Names and shapes of the tensors of each group. Older versions have one dict in place of a
    /// list of dicts.
    fn groups(&mut self, id: NodeId) -> Result<Vec<Vec<ZeroParam>>, Fault> {
        if !matches!(self.values.node(id), Node::List(_) | Node::Tuple(_)) {
            return Ok(vec![self.params(id)?]);
        }
        let mut groups = Vec::new();
        for group in self.items(id, "param_shapes")? {
            groups.push(self.params(group)?);
        }
        Ok(groups)
    }

    fn params(&mut self, dict: NodeId) -> Result<Vec<ZeroParam>, Fault> {
        let mut params = Vec::new();
        for (name, size) in self.pairs(dict)? {
            let sizes = numbers(self.values, size).ok_or_else(|| unknown("param_shapes"))?;
            self.steps.spend(sizes.len())?;
            let shape = sizes
                .into_iter()
                .map(|size| u64::try_from(size).ok())
                .collect::<Option<Vec<u64>>>()
                .ok_or_else(|| unknown("param_shapes"))?;
            params.push(ZeroParam { name: name.to_owned(), shape });
        }
        Ok(params)
    }

    /// The range of elements of a flat tensor.
    fn run(
        &mut self,
        storages: &mut Storages<'_, '_>,
        id: NodeId,
        what: &str,
    ) -> ReadResult<FlatRun> {
        self.steps.spend(8)?;
        let call = tensor_call(self.values, id).ok_or_else(|| unknown(what))?;
        let place = call.run(storages).map_err(|stop| match stop {
            ReadStop::Fault(fault) => {
                let message = format!("a tensor of its {} {}", quoted(what), fault.message);
                ReadStop::Fault(Fault { message, ..fault })
            }
            other => other,
        })?;
        // The product cannot overflow, because the place of a tensor was checked against its
        // storage.
        let numel = place.shape.iter().product();
        Ok(FlatRun { dtype: place.dtype, start: place.start, numel })
    }

    /// The stage of ZeRO. It is stored as a number or as a member of an enum.
    fn stage(&self, id: NodeId) -> Option<u64> {
        // Some versions of Python save a member of an enum by its name and not by its number.
        if let Some((_, name)) = self.values.attribute_of(id) {
            let stages = ["disabled", "optimizer_states", "gradients", "weights"];
            return (0..).zip(stages).find(|(_, stage)| *stage == name).map(|(stage, _)| stage);
        }
        let number = match self.values.call(id) {
            Some((_, args)) => {
                let [number] = self.values.array::<1>(args)?;
                number
            }
            None => id,
        };
        self.values.natural(number)
    }

    /// A number, or the largest number of a list.
    fn largest(&mut self, id: NodeId) -> Result<Option<u64>, Fault> {
        if let Some(number) = self.values.natural(id) {
            return Ok(Some(number));
        }
        let items = self.items(id, "partition_count")?;
        let numbers: Option<Vec<u64>> =
            items.into_iter().map(|id| self.values.natural(id)).collect();
        Ok(numbers.and_then(|numbers| numbers.into_iter().max()))
    }

    /// A number among the attributes of an object, or among the fields of a named tuple.
    fn attribute(&mut self, object: NodeId, name: &str) -> Result<Option<u64>, Fault> {
        let values = self.values;
        for part in values.parts(object) {
            self.steps.spend(1)?;
            if let Part::State(state) = part
                && let Some(id) = self.value(state, name)?
            {
                return Ok(values.natural(id));
            }
        }
        Ok(None)
    }
}
