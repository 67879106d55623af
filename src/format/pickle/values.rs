//! The values of a pickle: nodes in one vector, which refer to each other by their numbers.

use super::globals::GETATTR;
use crate::error::{ErrorKind, Fault, quoted};

/// The number of a value.
pub(super) type NodeId = u32;

/// The end of a list of cells. On the stack, a mark.
pub(super) const NONE: u32 = u32::MAX;

/// Special keys of a cell: one for an item of a list or a set, and one for the state of an object.
pub(super) const ITEM: u32 = u32::MAX - 1;
pub(super) const STATE: u32 = u32::MAX - 2;

/// A value of a pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// `None`.
    Null,
    /// `True` or `False`.
    Bool(bool),
    /// An integer that fits into 64 bits.
    Int(i64),
    /// An integer that does not fit into 64 bits, or a number that is no integer.
    Number,
    /// Text: the range of its bytes in the pickle.
    Text(u32, u32),
    /// Bytes, whose content is not needed.
    Bytes,
    /// A class or a function: its module and its name.
    Global(NodeId, NodeId),
    /// Items.
    Tuple(Cells),
    /// Items. The pickle may add items later.
    List(Cells),
    /// Pairs. The pickle may add pairs later.
    Dict(Cells),
    /// Items of a set.
    Set(Cells),
    /// A call: the callable, and the index of its other parts.
    Object(NodeId, u32),
    /// The value that a persistent id refers to.
    Persistent(NodeId),
}

/// A linked list of cells: the indexes of the first and the last cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cells {
    pub(super) first: u32,
    pub(super) last: u32,
}

pub(super) const EMPTY: Cells = Cells { first: NONE, last: NONE };

#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) key: u32,
    pub(super) value: NodeId,
    pub(super) next: u32,
}

/// The parts of an object except its callable.
#[derive(Clone, Copy, Debug)]
pub(super) struct ObjectParts {
    pub(super) args: NodeId,
    /// Items, pairs and states, in the order in which the pickle adds them.
    pub(super) cells: Cells,
}

/// A part of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// An item of a list, a tuple or a set, or an argument.
    Item(NodeId),
    /// A pair of a dict: the key, then the value.
    Pair(NodeId, NodeId),
    /// The state of an object.
    State(NodeId),
}

/// The values of a pickle that was interpreted.
#[derive(Debug)]
pub(super) struct Values<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) nodes: Vec<Node>,
    pub(super) cells: Vec<Cell>,
    pub(super) objects: Vec<ObjectParts>,
    /// The root value of the pickle.
    pub(super) root: NodeId,
}

impl<'a> Values<'a> {
    /// The node of a value.
    pub(super) fn node(&self, id: NodeId) -> Node {
        self.nodes[id as usize]
    }

    /// Number of nodes.
    pub(super) fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Length of the pickle in bytes.
    pub(super) fn pickle_len(&self) -> usize {
        self.bytes.len()
    }

    /// The numbers of all values.
    pub(super) fn ids(&self) -> impl Iterator<Item = NodeId> {
        0..self.nodes.len() as u32
    }

    /// The numbers of all objects.
    pub(super) fn objects(&self) -> impl Iterator<Item = NodeId> {
        self.ids().filter(|&id| matches!(self.node(id), Node::Object(..)))
    }

    /// The text of a value, if it is text in UTF-8.
    pub(super) fn text(&self, id: NodeId) -> Option<&'a str> {
        let Node::Text(start, end) = self.node(id) else { return None };
        std::str::from_utf8(&self.bytes[start as usize..end as usize]).ok()
    }

    /// The value of an integer.
    pub(super) fn int(&self, id: NodeId) -> Option<i64> {
        match self.node(id) {
            Node::Int(number) => Some(number),
            _ => None,
        }
    }

    /// The value of an integer that is not negative.
    pub(super) fn natural(&self, id: NodeId) -> Option<u64> {
        u64::try_from(self.int(id)?).ok()
    }

    /// Module and name of a global, in the spelling of Python 3.
    pub(super) fn global(&self, id: NodeId) -> Option<(&'a str, &'a str)> {
        let Node::Global(module, name) = self.node(id) else { return None };
        let module = match self.text(module)? {
            "__builtin__" => "builtins",
            "copy_reg" => "copyreg",
            module => module,
        };
        Some((module, self.text(name)?))
    }

    /// Module and name of a global, as text for messages.
    pub(super) fn global_name(&self, id: NodeId) -> String {
        if let Some((class, name)) = self.attribute_of(id)
            && let Some((module, outer)) = self.global(class)
        {
            return quoted(&format!("{module}.{outer}.{name}"));
        }
        match self.global(id) {
            Some((module, name)) => quoted(&format!("{module}.{name}")),
            None => "a value".to_owned(),
        }
    }

    /// The class and the name of the attribute, if the value is the result of `getattr`.
    pub(super) fn attribute_of(&self, id: NodeId) -> Option<(NodeId, &'a str)> {
        let (callable, args) = self.call(id)?;
        let [class, name] = self.array::<2>(args)?;
        (self.global(callable) == Some(GETATTR)).then_some((class, self.text(name)?))
    }

    /// The callable and the arguments of an object.
    pub(super) fn call(&self, id: NodeId) -> Option<(NodeId, NodeId)> {
        match self.node(id) {
            Node::Object(callable, parts) => Some((callable, self.objects[parts as usize].args)),
            _ => None,
        }
    }

    /// The items of a tuple.
    pub(super) fn tuple(&self, id: NodeId) -> Option<impl Iterator<Item = NodeId>> {
        match self.node(id) {
            Node::Tuple(cells) => Some(self.parts_of(cells).filter_map(|part| match part {
                Part::Item(item) => Some(item),
                _ => None,
            })),
            _ => None,
        }
    }

    /// The items of a tuple, as an array.
    pub(super) fn array<const N: usize>(&self, id: NodeId) -> Option<[NodeId; N]> {
        let items: Vec<NodeId> = self.tuple(id)?.take(N + 1).collect();
        items.try_into().ok()
    }

    /// The parts of a list, a tuple, a set, a dict or an object. The arguments of an object are not
    /// among them.
    pub(super) fn parts(&self, id: NodeId) -> impl Iterator<Item = Part> {
        let cells = match self.node(id) {
            Node::Tuple(cells) | Node::List(cells) | Node::Dict(cells) | Node::Set(cells) => cells,
            Node::Object(_, parts) => self.objects[parts as usize].cells,
            _ => EMPTY,
        };
        self.parts_of(cells)
    }

    fn parts_of(&self, cells: Cells) -> impl Iterator<Item = Part> {
        let mut next = cells.first;
        std::iter::from_fn(move || {
            let cell = self.cells.get(next as usize)?;
            next = cell.next;
            Some(match cell.key {
                ITEM => Part::Item(cell.value),
                STATE => Part::State(cell.value),
                key => Part::Pair(key, cell.value),
            })
        })
    }
}

/// The message for a pickle whose values lead to each other in more ways than a checkpoint needs.
pub(super) const MANY_NAMES: &str = "its pickle has too many names for the same values";

/// The number of values that may still be visited. A value may be part of many others, so that a small pickle can
/// ask for many visits.
pub(super) struct PickleSteps {
    left: usize,
    message: &'static str,
}

impl PickleSteps {
    /// As many visits as the length of the pickle in bytes allows. `message` says what is wrong with a pickle that
    /// needs more.
    pub(super) fn of(values: &Values<'_>, of_byte: usize, message: &'static str) -> PickleSteps {
        PickleSteps { left: values.pickle_len().saturating_mul(of_byte) + 4096, message }
    }

    pub(super) fn spend(&mut self, steps: usize) -> Result<(), Fault> {
        let left = self.left.checked_sub(steps);
        self.left = left.ok_or_else(|| ErrorKind::HeaderTooLarge.fault(self.message))?;
        Ok(())
    }
}
