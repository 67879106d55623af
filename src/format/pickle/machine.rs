//! Interprets a pickle as values. The opcodes work on names and numbers, and nothing is imported or called. A call
//! becomes a node with its callable and its arguments. Other modules interpret such nodes.
//!
//! The length of the pickle bounds the memory: each opcode makes at most one node and a few cells of fixed size. No
//! function here is recursive.

mod old_opcodes;

use std::collections::{BTreeSet, HashMap};

use super::globals::{GETATTR, attribute_denied, denied, holds_class};
use super::le;
use super::values::{
    Cell, Cells, EMPTY, ITEM, NONE, Node, NodeId, ObjectParts, Part, STATE, Values,
};
use crate::error::{ErrorKind, Fault};

/// Maximum length of a pickle in bytes.
pub(super) const PICKLE_LEN_MAX: u64 = 100_000_000;

/// Maximum number of nodes of a pickle. torch needs about fifty nodes for a tensor.
const NODES_MAX: usize = 20_000_000;

/// Maximum length of the name of a module or a class, in bytes.
const GLOBAL_LEN_MAX: usize = 512;

/// Maximum length in bytes of an integer whose length is stored in 32 bits.
const LONG_LEN_MAX: usize = 1 << 20;

/// The reason why `getattr` is refused if it does not return a harmless attribute of a class.
const ATTRIBUTE: &str = "it asks for an attribute of a value, as only code does";

fn bad(what: impl std::fmt::Display) -> Fault {
    let message =
        format!("its pickle is not one that torch.save writes: {what}; save or fetch it again");
    ErrorKind::HeaderDecode.fault(message)
}

/// Interprets the pickle that fills all of `bytes`.
///
/// # Errors
/// Why the pickle is refused.
pub(super) fn run(bytes: &[u8]) -> Result<Values<'_>, Fault> {
    run_of(bytes, NODES_MAX)
}

/// Interprets the pickle that fills all of `bytes`, if it has at most `nodes_max` nodes.
///
/// # Errors
/// Why the pickle is refused.
pub(super) fn run_of(bytes: &[u8], nodes_max: usize) -> Result<Values<'_>, Fault> {
    let values = run_first_of(bytes, nodes_max)?;
    match bytes.len() - values.pickle_len() {
        0 => Ok(values),
        more => Err(bad(format_args!("{more} bytes follow its end"))),
    }
}

/// Interprets the pickle at the beginning of `bytes`.
///
/// # Errors
/// Why the pickle is refused.
pub(super) fn run_first(bytes: &[u8]) -> Result<Values<'_>, Fault> {
    run_first_of(bytes, NODES_MAX)
}

fn run_first_of(bytes: &[u8], nodes_max: usize) -> Result<Values<'_>, Fault> {
    let mut machine = Machine::new(bytes, nodes_max);
    machine.run()?;
    machine.values.bytes = &bytes[..machine.at];
    Ok(machine.values)
}

/// The result of a scan of a pickle.
pub(super) struct Scanned<'a> {
    pub(super) values: Values<'a>,
    /// Uses of names that are not visible in the values, each as text.
    pub(super) hidden: BTreeSet<String>,
    /// Why the pickle was not interpreted to its end.
    pub(super) flaw: Option<Fault>,
}

/// Interprets the pickle at the beginning of `bytes`, as far as possible. No name is refused.
/// Opcodes that torch never writes are interpreted too.
pub(super) fn scan_first(bytes: &[u8]) -> Scanned<'_> {
    let mut machine = Machine::new(bytes, NODES_MAX);
    machine.hidden = Some(BTreeSet::new());
    let flaw = machine.run().err();
    machine.values.bytes = &bytes[..machine.at.min(bytes.len())];
    Scanned { values: machine.values, hidden: machine.hidden.unwrap_or_default(), flaw }
}

/// Nodes that exist once, at fixed indexes.
const NULL: NodeId = 0;
const FALSE: NodeId = 1;
const TRUE: NodeId = 2;
const EMPTY_TUPLE: NodeId = 3;

struct Machine<'a> {
    values: Values<'a>,
    at: usize,
    /// Values, and `NONE` for each mark.
    stack: Vec<u32>,
    /// The memo. `dense` has the indexes from 0 on without a gap, `sparse` has the other indexes.
    dense: Vec<NodeId>,
    sparse: HashMap<u32, NodeId>,
    /// Number of values in the memo.
    memo_len: u32,
    /// Number of pairs that may still be copied from lists into dicts. There is a limit because a pickle may copy one
    /// list many times.
    copies_left: usize,
    nodes_max: usize,
    /// Uses of names that are not visible in the values. `None` if the pickle is parsed and not
    /// scanned.
    hidden: Option<BTreeSet<String>>,
}

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8], nodes_max: usize) -> Machine<'a> {
        let values = Values {
            bytes,
            nodes: vec![Node::Null, Node::Bool(false), Node::Bool(true), Node::Tuple(EMPTY)],
            cells: Vec::new(),
            objects: Vec::new(),
            root: 0,
        };
        Machine {
            values,
            at: 0,
            stack: Vec::new(),
            dense: Vec::new(),
            sparse: HashMap::new(),
            memo_len: 0,
            copies_left: bytes.len(),
            nodes_max,
            hidden: None,
        }
    }

    fn is_scan(&self) -> bool {
        self.hidden.is_some()
    }
}

impl Machine<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        if self.values.bytes.first() == Some(&0x80) || !self.is_scan() {
            let [proto, version] = self.take::<2>()?;
            if proto != 0x80 || !(2..=5).contains(&version) && !self.is_scan() {
                return Err(bad("it does not begin with a protocol from 2 to 5"));
            }
        }
        loop {
            let opcode = self.take::<1>()?[0];
            if opcode == b'.' {
                break;
            }
            self.step(opcode)?;
        }
        match self.stack.as_slice() {
            [root] if *root != NONE => self.values.root = *root,
            _ => return Err(bad("it ends with other than one value")),
        }
        Ok(())
    }

    fn step(&mut self, opcode: u8) -> Result<(), Fault> {
        match opcode {
            0x95 => {
                let len = self.number(8)?;
                self.bounded(len)?;
            }
            b'N' => self.stack.push(NULL),
            0x88 => self.stack.push(TRUE),
            0x89 => self.stack.push(FALSE),
            b')' => self.stack.push(EMPTY_TUPLE),
            b'K' => self.uint(1)?,
            b'M' => self.uint(2)?,
            b'J' => {
                let number = i32::from_le_bytes(self.take()?);
                self.push(Node::Int(number.into()))?;
            }
            0x8a | 0x8b => self.long(opcode == 0x8a)?,
            b'G' => {
                self.take::<8>()?;
                self.push(Node::Number)?;
            }
            b'X' => self.bytes(4, true)?,
            0x8c => self.bytes(1, true)?,
            0x8d => self.bytes(8, true)?,
            // `U` and `T` are strings of Python 2, the opcodes after them are bytes.
            b'U' => self.bytes(1, true)?,
            b'T' => self.bytes(4, true)?,
            b'B' => self.bytes(4, false)?,
            b'C' => self.bytes(1, false)?,
            0x8e | 0x96 => self.bytes(8, false)?,
            _ => return self.container(opcode),
        }
        Ok(())
    }

    /// The opcodes of marks and containers.
    fn container(&mut self, opcode: u8) -> Result<(), Fault> {
        match opcode {
            b'(' => self.stack.push(NONE),
            b']' => self.push(Node::List(EMPTY)).map(drop)?,
            b'}' => self.push(Node::Dict(EMPTY)).map(drop)?,
            0x8f => self.push(Node::Set(EMPTY)).map(drop)?,
            0x85..=0x87 => {
                let count = usize::from(opcode - 0x84);
                let begin = self.stack.len().saturating_sub(count);
                if self.stack.len() < count || self.stack[begin..].contains(&NONE) {
                    return Err(bad("its stack is too short for a tuple"));
                }
                let cells = self.cells(begin, false)?;
                self.push(Node::Tuple(cells))?;
            }
            b't' | b'l' | 0x91 => {
                let begin = self.mark()?;
                let cells = self.cells(begin + 1, false)?;
                self.stack.pop();
                self.push(match opcode {
                    b't' => Node::Tuple(cells),
                    b'l' => Node::List(cells),
                    _ => Node::Set(cells),
                })?;
            }
            b'd' => {
                let begin = self.mark()?;
                let cells = self.cells(begin + 1, true)?;
                self.stack.pop();
                self.push(Node::Dict(cells))?;
            }
            b'a' => {
                let item = self.pop()?;
                let target = self.top()?;
                self.add(target, ITEM, item)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                let target = self.top()?;
                self.add(target, key, value)?;
            }
            b'e' | 0x90 | b'u' => self.add_many(opcode == b'u')?,
            _ => return self.reference(opcode),
        }
        Ok(())
    }

    /// The opcodes of the memo, of names and calls, and of the stack.
    fn reference(&mut self, opcode: u8) -> Result<(), Fault> {
        match opcode {
            b'q' => {
                let index = self.number(1)?;
                self.put(index as u32)?;
            }
            b'r' => {
                let index = self.number(4)?;
                self.put(index as u32)?;
            }
            0x94 => self.put(self.memo_len)?,
            b'h' => self.get(1)?,
            b'j' => self.get(4)?,
            b'c' => self.global_lines()?,
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                self.global(module, name)?;
            }
            b'R' | 0x81 => {
                let (args, callable) = (self.pop()?, self.pop()?);
                if opcode == b'R' && self.values.global(callable) == Some(GETATTR) {
                    self.attribute(callable, args)?;
                } else {
                    // `R` calls a function. The other opcode makes an object of a class without
                    // calling it.
                    if opcode == b'R' {
                        self.refuse_attribute(callable)?;
                    }
                    self.object(callable, args)?;
                }
            }
            0x92 => {
                let (named, args, callable) = (self.pop()?, self.pop()?, self.pop()?);
                self.refuse_attribute(callable)?;
                let object = self.object(callable, args)?;
                self.add(object, ITEM, named)?;
            }
            b'b' => {
                let state = self.pop()?;
                let target = self.top()?;
                let has_state = matches!(self.values.node(target), Node::Object(..));
                if !has_state && self.is_scan() {
                    return Ok(());
                }
                if !has_state {
                    return Err(bad("a state is given to a value that has none"));
                }
                self.add(target, STATE, state)?;
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id))?;
            }
            b'0' => {
                self.stack.pop().ok_or_else(|| bad("its stack is empty"))?;
            }
            b'1' => {
                let begin = self.mark()?;
                self.stack.truncate(begin);
            }
            b'2' => self.stack.push(self.top()?),
            _ if self.is_scan() => return self.old_opcode(opcode),
            _ => {
                let at = self.at - 1;
                return Err(bad(format_args!("it has the opcode {opcode:#04x} at byte {at}")));
            }
        }
        Ok(())
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let bytes = self.values.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<N>());
        self.at += N;
        bytes.copied().ok_or_else(|| bad("it ends within an opcode"))
    }

    fn number(&mut self, width: u64) -> Result<u64, Fault> {
        self.bounded(width)?;
        let start = self.at;
        self.at += width as usize;
        Ok(le(&self.values.bytes[start..self.at]))
    }

    /// Checks that at least `len` bytes follow in the pickle.
    fn bounded(&self, len: u64) -> Result<usize, Fault> {
        let left = self.values.bytes.len().saturating_sub(self.at) as u64;
        if len > left {
            return Err(bad(format_args!("{len} bytes announced, {left} are left")));
        }
        Ok(len as usize)
    }

    fn push(&mut self, node: Node) -> Result<NodeId, Fault> {
        if self.values.nodes.len() >= self.nodes_max {
            let message = format!("its pickle has more than {} values", self.nodes_max);
            return Err(ErrorKind::HeaderTooLarge.fault(message));
        }
        let id = self.values.nodes.len() as u32;
        self.values.nodes.push(node);
        self.stack.push(id);
        Ok(id)
    }

    fn pop(&mut self) -> Result<NodeId, Fault> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn top(&self) -> Result<NodeId, Fault> {
        let top = self.stack.last().copied().filter(|&top| top != NONE);
        top.ok_or_else(|| bad("its stack has too few values"))
    }

    /// Position of the last mark on the stack.
    fn mark(&self) -> Result<usize, Fault> {
        self.stack.iter().rposition(|&id| id == NONE).ok_or_else(|| bad("a mark is missing"))
    }

    fn uint(&mut self, width: u64) -> Result<(), Fault> {
        let number = self.number(width)?;
        self.push(Node::Int(number as i64)).map(drop)
    }

    fn long(&mut self, short: bool) -> Result<(), Fault> {
        let announced = self.number(if short { 1 } else { 4 })?;
        let len = self.bounded(announced)?;
        if len > LONG_LEN_MAX {
            return Err(bad(format_args!("an integer of {len} bytes")));
        }
        let digits = &self.values.bytes[self.at..self.at + len];
        self.at += len;
        let negative = digits.last().is_some_and(|last| last & 0x80 != 0);
        let mut all = [if negative { 0xff } else { 0 }; 8];
        let node = match all.get_mut(..len) {
            Some(low) => {
                low.copy_from_slice(digits);
                Node::Int(i64::from_le_bytes(all))
            }
            None => Node::Number,
        };
        self.push(node).map(drop)
    }

    fn bytes(&mut self, width: u64, text: bool) -> Result<(), Fault> {
        let announced = self.number(width)?;
        let len = self.bounded(announced)?;
        let start = self.at;
        self.at += len;
        let node = if text { Node::Text(start as u32, self.at as u32) } else { Node::Bytes };
        self.push(node).map(drop)
    }

    /// Pops the values of the stack from `begin` on, and returns them as items or as pairs.
    fn cells(&mut self, begin: usize, pairs: bool) -> Result<Cells, Fault> {
        let mut cells = EMPTY;
        let width = if pairs { 2 } else { 1 };
        if !(self.stack.len() - begin).is_multiple_of(width) {
            return Err(bad("a dict has a key without a value"));
        }
        for at in (begin..self.stack.len()).step_by(width) {
            let key = if pairs { self.stack[at] } else { ITEM };
            self.append(&mut cells, key, self.stack[at + width - 1]);
        }
        self.stack.truncate(begin);
        Ok(cells)
    }

    fn append(&mut self, cells: &mut Cells, key: u32, value: NodeId) {
        let number = self.values.cells.len() as u32;
        self.values.cells.push(Cell { key, value, next: NONE });
        match self.values.cells.get_mut(cells.last as usize) {
            Some(last) => last.next = number,
            None => cells.first = number,
        }
        cells.last = number;
    }

    /// Adds an item, a pair or a state to `target`.
    fn add(&mut self, target: NodeId, key: u32, value: NodeId) -> Result<(), Fault> {
        self.refuse_attribute(target)?;
        let mut node = self.values.node(target);
        match &mut node {
            Node::List(cells) | Node::Set(cells) if key == ITEM => {
                self.append(cells, key, value);
            }
            Node::Dict(cells) if key < STATE => self.append(cells, key, value),
            Node::Object(_, parts) => {
                let index = *parts as usize;
                let mut cells = self.values.objects[index].cells;
                self.append(&mut cells, key, value);
                self.values.objects[index].cells = cells;
            }
            _ if self.is_scan() => {}
            _ => return Err(bad("something is put into a value that holds nothing")),
        }
        self.values.nodes[target as usize] = node;
        Ok(())
    }

    fn add_many(&mut self, pairs: bool) -> Result<(), Fault> {
        let begin = self.mark()?;
        let below = self.stack[..begin].last().copied().filter(|&id| id != NONE);
        let target = below.ok_or_else(|| bad("its stack has too few values"))?;
        let values = self.stack.split_off(begin);
        let width = if pairs { 2 } else { 1 };
        let groups = values[1..].chunks_exact(width);
        if !groups.remainder().is_empty() {
            return Err(bad("a dict gets a key without a value"));
        }
        for group in groups {
            let key = if pairs { group[0] } else { ITEM };
            self.add(target, key, group[width - 1])?;
        }
        Ok(())
    }

    fn put(&mut self, index: u32) -> Result<(), Fault> {
        let value = self.top()?;
        let place = index as usize;
        if place < self.dense.len() {
            self.dense[place] = value;
            return Ok(());
        }
        // The index may be in `sparse` already, if it was added before `dense` had all lower indexes.
        let before = if place == self.dense.len() {
            self.dense.push(value);
            self.sparse.remove(&index)
        } else {
            self.sparse.insert(index, value)
        };
        self.memo_len += u32::from(before.is_none());
        Ok(())
    }

    fn get(&mut self, width: u64) -> Result<(), Fault> {
        let index = self.number(width)? as u32;
        self.get_value(index)
    }

    fn get_value(&mut self, index: u32) -> Result<(), Fault> {
        let kept = self.dense.get(index as usize).or_else(|| self.sparse.get(&index));
        let value =
            kept.ok_or_else(|| bad(format_args!("it has no value {index} to use again")))?;
        self.stack.push(*value);
        Ok(())
    }

    fn line(&mut self) -> Result<NodeId, Fault> {
        let rest = self.values.bytes.get(self.at..).unwrap_or_default();
        let newline = rest.iter().take(GLOBAL_LEN_MAX + 1).position(|&byte| byte == b'\n');
        let len = newline.ok_or_else(|| bad("the name of a class has no end"))?;
        let start = self.at;
        self.at += len + 1;
        let id = self.push(Node::Text(start as u32, (start + len) as u32))?;
        self.stack.pop();
        Ok(id)
    }

    fn global_lines(&mut self) -> Result<(), Fault> {
        let module = self.line()?;
        let name = self.line()?;
        self.global(module, name)
    }

    fn global(&mut self, module: NodeId, name: NodeId) -> Result<(), Fault> {
        let id = self.push(Node::Global(module, name))?;
        let fits = [module, name]
            .iter()
            .all(|&part| self.values.text(part).is_some_and(|text| text.len() <= GLOBAL_LEN_MAX));
        match self.values.global(id).filter(|_| fits) {
            _ if self.is_scan() => Ok(()),
            None => Err(bad("the name of a class is not text")),
            Some((module, name)) if denied(module, name) => {
                Err(ErrorKind::HeaderDecode.fault(format!(
                    "its pickle asks for {}, which runs code when the file is loaded; no weights \
                     need that: do not load this file, and fetch it from where you trust it",
                    self.values.global_name(id)
                )))
            }
            Some(_) => Ok(()),
        }
    }

    /// Interprets `getattr` for a class. Pickles of protocol 2 use it for inner classes, which they cannot name in
    /// another way. An inner class that tensorfs does not know becomes an opaque object.
    fn attribute(&mut self, getattr: NodeId, args: NodeId) -> Result<(), Fault> {
        let named = self.values.array::<2>(args).and_then(|[class, name]| {
            let (module, outer) = self.values.global(class)?;
            let text = self.values.text(name)?;
            let is_known = holds_class(module, outer, text);
            (is_known || !attribute_denied(module, outer, text)).then_some((class, name, is_known))
        });
        match named.map(|(class, name, is_known)| (self.values.node(class), name, is_known)) {
            Some((Node::Global(module, _), name, true)) => {
                self.push(Node::Global(module, name)).map(drop)
            }
            Some((_, _, false)) => {
                let parts = self.values.objects.len() as u32;
                self.values.objects.push(ObjectParts { args, cells: EMPTY });
                self.push(Node::Object(getattr, parts)).map(drop)
            }
            _ if self.is_scan() => {
                self.note_hidden("builtins.getattr".to_owned());
                self.push(Node::Null).map(drop)
            }
            _ => Err(bad(ATTRIBUTE)),
        }
    }

    /// Refuses to call or to change the value `id`, if `getattr` returned this value.
    fn refuse_attribute(&mut self, id: NodeId) -> Result<(), Fault> {
        if self.values.attribute_of(id).is_none() {
            return Ok(());
        }
        if !self.is_scan() {
            return Err(bad(ATTRIBUTE));
        }
        self.note_hidden(format!("a call or a change of {}", self.values.global_name(id)));
        Ok(())
    }

    fn object(&mut self, callable: NodeId, args: NodeId) -> Result<NodeId, Fault> {
        if self.is_scan() {
            if self.values.global(callable) == Some(GETATTR) {
                self.note_hidden("builtins.getattr".to_owned());
            } else if matches!(self.values.node(callable), Node::Object(..))
                && self.values.attribute_of(callable).is_none()
            {
                self.note_hidden("a call of a value that is no name".to_owned());
            }
            let parts = self.values.objects.len() as u32;
            self.values.objects.push(ObjectParts { args, cells: EMPTY });
            return self.push(Node::Object(callable, parts));
        }
        let is_attribute = self.values.attribute_of(callable).is_some();
        if !is_attribute && !matches!(self.values.node(callable), Node::Global(..)) {
            return Err(bad("it calls a value that is no name"));
        }
        if self.values.global(callable) == Some(GETATTR) {
            return Err(bad(ATTRIBUTE));
        }
        if !matches!(self.values.node(args), Node::Tuple(_)) {
            return Err(bad(format_args!(
                "{} is called without a tuple",
                self.values.global_name(callable)
            )));
        }
        let parts = self.values.objects.len() as u32;
        // An `OrderedDict` that is made of a list gets the pairs that are in the list at this moment.
        let mut cells = EMPTY;
        if self.values.global(callable) == Some(("collections", "OrderedDict"))
            && let Some([list]) = self.values.array::<1>(args)
        {
            let given: Option<Vec<[NodeId; 2]>> = match self.values.node(list) {
                Node::List(_) | Node::Tuple(_) => self.pairs_of(list),
                _ => None,
            };
            let pairs = given.ok_or_else(|| bad("an OrderedDict is made of no list of pairs"))?;
            let left = self.copies_left.checked_sub(pairs.len());
            self.copies_left = left.ok_or_else(|| bad("it copies its lists too often"))?;
            for [key, value] in pairs {
                self.append(&mut cells, key, value);
            }
        }
        self.values.objects.push(ObjectParts { args, cells });
        self.push(Node::Object(callable, parts))
    }

    /// The items of `list` as pairs. `None` if one item is no pair.
    fn pairs_of(&self, list: NodeId) -> Option<Vec<[NodeId; 2]>> {
        let values = &self.values;
        let pair = |part| {
            let Part::Item(item) = part else { return None };
            let parts: Vec<Part> = values.parts(item).take(3).collect();
            match (values.node(item), parts.as_slice()) {
                (Node::Tuple(_) | Node::List(_), [Part::Item(key), Part::Item(value)]) => {
                    Some([*key, *value])
                }
                _ => None,
            }
        };
        // One pair more than the limit is enough for the caller to refuse the list.
        values.parts(list).take(self.copies_left + 1).map(pair).collect()
    }
}
