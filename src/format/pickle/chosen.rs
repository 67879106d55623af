//! Chooses which values of a distributed checkpoint are the tensors of a model, and chooses their
//! names.

use std::collections::{BTreeSet, HashSet};

use super::TrainingState;
use super::state_dict::{ALL_SHOWN, MODELS, is_state};
use super::values::NodeId;
use crate::error::quoted;

/// Maximum number of values that a note names.
const NAMED_MAX: usize = 5;

/// Name of the container in which the guides of torch put an application, with its model and its
/// optimizer.
const APP: &str = "app";

/// The nested containers of a value, which torch flattened to one dict. torch joins the names of the containers with
/// dots. The name alone does not show which of its dots come from a container and which are part of a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyPath<'v> {
    /// The end of the name that the parts of the path have not matched yet. `None` if the name differs from the path.
    rest: Option<&'v str>,
    /// Number of parts, and the first two parts. Parts that are numbers are empty texts.
    len: usize,
    first: [&'v str; 2],
}

impl<'v> KeyPath<'v> {
    /// A path for the name `fqn`, without parts so far.
    pub(super) fn new(fqn: &'v str) -> KeyPath<'v> {
        KeyPath { rest: Some(fqn), len: 0, first: [""; 2] }
    }

    /// Adds a part: a text or a number.
    pub(super) fn push(&mut self, text: Option<&'v str>, number: Option<i64>) {
        if let (Some(first), Some(text)) = (self.first.get_mut(self.len), text) {
            *first = text;
        }
        let before = self.rest.filter(|_| self.len > 0).map(|rest| rest.strip_prefix('.'));
        let rest = before.unwrap_or(self.rest);
        self.len += 1;
        self.rest = match (text, number) {
            (Some(text), _) => rest.and_then(|rest| rest.strip_prefix(text)),
            (None, Some(number)) => rest.and_then(|rest| rest.strip_prefix(&number.to_string())),
            (None, None) => None,
        };
    }

    /// Whether the parts, joined with dots, are the name.
    pub(super) fn is_whole(&self) -> bool {
        self.rest == Some("") && self.len > 0
    }

    /// The container at `depth`. `None` if the value itself is at this depth.
    fn container(&self, depth: usize) -> Option<&'v str> {
        self.first.get(depth).copied().filter(|_| depth + 1 < self.len)
    }
}

/// A tensor that is shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShownTensor<'v> {
    /// Its full name in the checkpoint.
    pub(super) fqn: &'v str,
    /// The name under which it is shown, which is the end of `fqn`.
    pub(super) name: &'v str,
    /// Its metadata.
    pub(super) node: NodeId,
}

/// A value of the checkpoint.
#[derive(Clone, Copy, Debug)]
struct KeyedValue<'v> {
    fqn: &'v str,
    path: Option<KeyPath<'v>>,
    /// Its metadata, if it is a tensor.
    tensor: Option<NodeId>,
}

/// The values of a checkpoint, and the tensors that are shown.
#[derive(Debug, Default)]
pub(super) struct Chosen<'v> {
    all: Vec<KeyedValue<'v>>,
    known: HashSet<&'v str>,
    pub(super) shown: Vec<ShownTensor<'v>>,
    /// Text for people about the values that are not shown.
    pub(super) left_out: Option<String>,
}

impl<'v> KeyedValue<'v> {
    fn container(&self, depth: usize) -> Option<&'v str> {
        self.path.and_then(|path| path.container(depth))
    }

    /// Whether the value itself is at `depth`, beside the containers, and has a name without dots. The names of weights
    /// have dots.
    fn is_bare(&self, depth: usize) -> bool {
        let part = match self.path {
            Some(path) if path.len == depth + 1 => path.first[depth],
            None if depth == 0 => self.fqn,
            _ => return false,
        };
        !part.contains('.')
    }

    /// The first word of the dotted name.
    fn first_name(&self) -> &'v str {
        self.fqn.split('.').next().unwrap_or(self.fqn)
    }

    /// Whether the value belongs to the state of a training, according to its container at `depth`,
    /// or to its name if it has no container.
    fn is_state(&self, depth: usize) -> bool {
        match self.container(depth) {
            Some(container) => is_state(container),
            // A tensor of a state_dict has a dotted name, whose first word may be nearly any word.
            None if self.fqn.contains('.') => {
                let first = self.first_name();
                depth == 0 && (first == "optimizer" || first.starts_with("chained_"))
            }
            None => is_state(self.fqn),
        }
    }
}

/// The container at `depth` that holds a model, if there is exactly one. All of `tensors` must be in containers,
/// except bare tensors. A training saves its step and its best loss as bare tensors beside the model.
fn model_in<'v>(tensors: &[KeyedValue<'v>], depth: usize) -> Option<&'v str> {
    let others = tensors.iter().filter(|value| !value.is_bare(depth));
    let containers =
        others.map(|value| value.container(depth)).collect::<Option<BTreeSet<&str>>>()?;
    let mut models = containers.into_iter().filter(|name| MODELS.contains(name));
    models.next().filter(|_| models.next().is_none())
}

impl<'v> Chosen<'v> {
    /// Adds a value. Returns whether the name is new.
    pub(super) fn add(
        &mut self,
        fqn: &'v str,
        path: Option<KeyPath<'v>>,
        tensor: Option<NodeId>,
    ) -> bool {
        self.all.push(KeyedValue { fqn, path, tensor });
        self.known.insert(fqn)
    }

    /// Whether the checkpoint has a value of this name.
    pub(super) fn is_known(&self, fqn: &str) -> bool {
        self.known.contains(fqn)
    }

    /// Chooses the tensors that are shown.
    pub(super) fn settle(&mut self, state: TrainingState) {
        let tensors: Vec<KeyedValue<'v>> =
            self.all.iter().copied().filter(|value| value.tensor.is_some()).collect();
        if state == TrainingState::All {
            return self.show(tensors, 0);
        }
        let of_model = |depth: usize| -> Vec<KeyedValue<'v>> {
            tensors.iter().copied().filter(|value| !value.is_state(depth)).collect()
        };
        let (mut shown, mut cut) = (of_model(0), 0);
        if let Some(model) = model_in(&shown, 0) {
            shown.retain(|value| value.container(0) == Some(model));
            cut = model.len() + 1;
        } else if !shown.is_empty() && shown.iter().all(|value| value.container(0) == Some(APP)) {
            shown = of_model(1);
            if let Some(model) = model_in(&shown, 1) {
                shown.retain(|value| value.container(1) == Some(model));
                cut = APP.len() + model.len() + 2;
            }
        }
        if shown.is_empty() {
            // This is a checkpoint of an optimizer without a model, so all tensors are shown.
            shown = tensors;
        }
        self.show(shown, cut);
    }

    /// Shows these tensors. Their names are cut, so that they begin at byte `cut`.
    fn show(&mut self, shown: Vec<KeyedValue<'v>>, cut: usize) {
        self.left_out = self.note(&shown);
        let shown = shown.into_iter().filter_map(|KeyedValue { fqn, tensor, .. }| {
            Some(ShownTensor { fqn, name: fqn.get(cut..)?, node: tensor? })
        });
        self.shown = shown.collect();
    }

    /// A note on the values that are not in `shown`.
    fn note(&self, shown: &[KeyedValue<'v>]) -> Option<String> {
        let names: HashSet<&str> = shown.iter().map(|value| value.fqn).collect();
        let containers: HashSet<[Option<&str>; 2]> = shown
            .iter()
            .flat_map(|value| {
                let first = value.container(0);
                [[first, None], [first, value.container(1)]]
            })
            .collect();
        let mut labels: Vec<String> = Vec::new();
        let mut known: HashSet<String> = HashSet::new();
        let mut has_tensors = false;
        for value in self.all.iter().filter(|value| !names.contains(value.fqn)) {
            has_tensors |= value.tensor.is_some();
            let label = match (value.container(0), value.container(1)) {
                (None, _) if value.is_state(0) => value.first_name().to_owned(),
                (Some(first), _) if !containers.contains(&[Some(first), None]) => first.to_owned(),
                (Some(first), Some(second))
                    if !containers.contains(&[Some(first), Some(second)]) =>
                {
                    format!("{first}.{second}")
                }
                _ => value.fqn.to_owned(),
            };
            if known.insert(label.clone()) {
                labels.push(quoted(&label));
            }
        }
        if labels.is_empty() {
            return None;
        }
        let unnamed = labels.len().saturating_sub(NAMED_MAX);
        labels.truncate(NAMED_MAX);
        let more = if unnamed > 0 { format!(" and {unnamed} more") } else { String::new() };
        let how = if has_tensors { ALL_SHOWN } else { "" };
        Some(format!("{}{more} of the checkpoint are not shown{how}", labels.join(", ")))
    }
}
