//! Opcodes that torch never writes: the opcodes of protocols 0 and 1, of extensions and of buffers. They are
//! interpreted only in scans.

use super::{Machine, bad};
use crate::error::{Fault, quoted};
use crate::format::pickle::values::{Node, NodeId};

/// Maximum number of recorded uses of hidden names, and maximum length of their texts.
const HIDDEN_MAX: usize = 64;

impl Machine<'_> {
    /// Records a use of a name that is not visible in the values.
    pub(super) fn note_hidden(&mut self, name: String) {
        if let Some(hidden) = self.hidden.as_mut().filter(|hidden| hidden.len() < HIDDEN_MAX) {
            hidden.insert(name);
        }
    }

    /// Interprets an opcode that is valid in scans only.
    pub(super) fn old_opcode(&mut self, opcode: u8) -> Result<(), Fault> {
        match opcode {
            b'I' | b'L' | b'F' => {
                self.text_line()?;
                self.push(Node::Number).map(drop)
            }
            b'S' | b'V' => {
                let (start, end) = self.text_line()?;
                let is_quoted = opcode == b'S' && end >= start + 2;
                let (start, end) = if is_quoted { (start + 1, end - 1) } else { (start, end) };
                self.push(Node::Text(start, end)).map(drop)
            }
            b'P' => {
                let (start, end) = self.text_line()?;
                let key = self.push(Node::Text(start, end))?;
                self.stack.pop();
                self.push(Node::Persistent(key)).map(drop)
            }
            b'i' => {
                self.global_lines()?;
                let class = self.pop()?;
                let args = self.marked_tuple(0)?;
                self.object(class, args).map(drop)
            }
            b'o' => {
                let begin = self.mark()?;
                let first = self.stack.get(begin + 1).copied();
                let class = first.ok_or_else(|| bad("its stack has too few values"))?;
                let args = self.marked_tuple(1)?;
                self.object(class, args).map(drop)
            }
            0x82..=0x84 => {
                let code = self.number(1 << (opcode - 0x82))?;
                self.note_hidden(format!("the extension {code} of copyreg"));
                self.push(Node::Null).map(drop)
            }
            b'g' | b'p' => {
                let (start, end) = self.text_line()?;
                let digits = &self.values.bytes[start as usize..end as usize];
                let number = std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok());
                let index = number.ok_or_else(|| {
                    let digits = quoted(&String::from_utf8_lossy(digits));
                    bad(format_args!("it uses the value {digits} again"))
                })?;
                if opcode == b'p' { self.put(index) } else { self.get_value(index) }
            }
            0x97 => self.push(Node::Bytes).map(drop),
            0x98 => Ok(()),
            _ => {
                let at = self.at - 1;
                Err(bad(format_args!("it has the opcode {opcode:#04x} at byte {at}")))
            }
        }
    }

    /// The values above the last mark, except the first `skipped` values, as a tuple. All of them
    /// are popped.
    fn marked_tuple(&mut self, skipped: usize) -> Result<NodeId, Fault> {
        let begin = self.mark()?;
        let cells = self.cells(begin + 1 + skipped, false)?;
        self.stack.truncate(begin);
        let args = self.push(Node::Tuple(cells))?;
        self.stack.pop();
        Ok(args)
    }

    /// The bytes up to the end of the line.
    fn text_line(&mut self) -> Result<(u32, u32), Fault> {
        let rest = self.values.bytes.get(self.at..).unwrap_or_default();
        let newline = rest.iter().position(|&byte| byte == b'\n');
        let len = newline.ok_or_else(|| bad("it ends within an opcode"))?;
        let start = self.at;
        self.at += len + 1;
        Ok((start as u32, (start + len) as u32))
    }
}
