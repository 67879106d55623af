//! Fast parser for JSON in the form that programs write. It makes no allocation for each value. A
//! caller that gets `None` calls the strict parser, which words the errors.

/// A position in a text. Every method returns `None` if the text has something other than the
/// method expects.
#[derive(Debug)]
pub(super) struct JsonCursor<'a> {
    text: &'a str,
    offset: usize,
}

impl<'a> JsonCursor<'a> {
    pub(super) fn new(text: &'a str) -> JsonCursor<'a> {
        JsonCursor { text, offset: 0 }
    }

    /// `Some` if only white space follows.
    pub(super) fn end(&mut self) -> Option<()> {
        self.space();
        (self.offset == self.text.len()).then_some(())
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.offset).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\t' | b'\r')) {
            self.offset += 1;
        }
    }

    /// Moves past white space and the byte `wanted`.
    pub(super) fn token(&mut self, wanted: u8) -> Option<()> {
        self.space();
        (self.peek()? == wanted).then(|| self.offset += 1)
    }

    /// Moves past items between `open` and `close` that are separated by commas.
    pub(super) fn items(
        &mut self,
        open: u8,
        close: u8,
        mut item: impl FnMut(&mut Self) -> Option<()>,
    ) -> Option<()> {
        self.token(open)?;
        if self.token(close).is_some() {
            return Some(());
        }
        loop {
            item(self)?;
            if self.token(b',').is_none() {
                return self.token(close);
            }
        }
    }

    /// A string without escapes.
    pub(super) fn string(&mut self) -> Option<&'a str> {
        self.token(b'"')?;
        let bytes = &self.text.as_bytes()[self.offset..];
        let len = bytes.iter().position(|&byte| byte == b'"' || byte == b'\\' || byte < b' ')?;
        let string = &self.text[self.offset..self.offset + len];
        self.offset += len;
        (self.peek()? == b'"').then(|| self.offset += 1)?;
        Some(string)
    }

    /// A number that consists of digits only.
    pub(super) fn number(&mut self) -> Option<u64> {
        self.space();
        let begin = self.offset;
        let mut number = 0_u64;
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            number = number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
            self.offset += 1;
        }
        let digits = self.offset - begin;
        let leads = digits > 1 && self.text.as_bytes()[begin] == b'0';
        (digits > 0 && !leads).then_some(number)
    }

    /// Appends a list of numbers to `numbers`.
    pub(super) fn numbers(&mut self, numbers: &mut Vec<u64>) -> Option<()> {
        self.items(b'[', b']', |cursor| {
            numbers.push(cursor.number()?);
            Some(())
        })
    }

    /// A string with or without escapes.
    pub(super) fn any_string(&mut self) -> Option<String> {
        let before = self.offset;
        if let Some(string) = self.string() {
            return Some(string.to_owned());
        }
        self.offset = before;
        self.token(b'"')?;
        let begin = self.offset - 1;
        loop {
            match self.peek()? {
                b'\\' => self.offset += 2,
                b'"' => break,
                _ => self.offset += 1,
            }
        }
        self.offset += 1;
        serde_json::from_str(self.text.get(begin..self.offset)?).ok()
    }
}
