//! Splits Rust source into tokens and paths. This is enough to distinguish code from comments, strings and test items.

/// A word, a punctuation character, or `::`. A string or char literal is the one token `"`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token<'a> {
    pub(crate) text: &'a str,
    pub(crate) line: usize,
}

impl Token<'_> {
    pub(crate) fn is_word(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// Splits Rust source into tokens, without comments and without the content of literals.
pub(crate) fn tokens(text: &str) -> Vec<Token<'_>> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let rest = &text[at..];
        let (len, token) = next_token(rest);
        if let Some(token) = token {
            tokens.push(Token { text: token, line });
        }
        line += rest[..len].matches('\n').count();
        at += len;
    }
    tokens
}

/// The length of the token, comment or space at the start of `rest`, and the token, if it is one.
fn next_token(rest: &str) -> (usize, Option<&str>) {
    let first = rest.chars().next().unwrap_or(' ');
    if rest.starts_with("//") {
        return (rest.find('\n').unwrap_or(rest.len()), None);
    }
    if rest.starts_with("/*") {
        return (block_comment_len(rest), None);
    }
    if first == '"' {
        return (1 + quoted_len(&rest[1..], '"'), Some("\""));
    }
    if first == '\'' {
        return char_or_lifetime(rest);
    }
    if first.is_alphanumeric() || first == '_' {
        let len = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        return prefixed_literal(rest, len).unwrap_or((len, Some(&rest[..len])));
    }
    if rest.starts_with("::") {
        return (2, Some("::"));
    }
    let len = first.len_utf8();
    (len, (!first.is_whitespace()).then(|| &rest[..len]))
}

/// Literals with a prefix, such as `b"..."`, `r#"..."#` and `b'x'`, and raw words such as `r#type`. The prefix has
/// `len` bytes.
fn prefixed_literal(rest: &str, len: usize) -> Option<(usize, Option<&str>)> {
    let (prefix, tail) = rest.split_at(len);
    if prefix == "b" && tail.starts_with('\'') {
        return Some((len + 1 + quoted_len(&tail[1..], '\''), Some("\"")));
    }
    if matches!(prefix, "b" | "c") && tail.starts_with('"') {
        return Some((len + 1 + quoted_len(&tail[1..], '"'), Some("\"")));
    }
    if !matches!(prefix, "r" | "br" | "cr") {
        return None;
    }
    let hashes = tail.bytes().take_while(|byte| *byte == b'#').count();
    let body = &tail[hashes..];
    if let Some(inside) = body.strip_prefix('"') {
        let end = format!("\"{}", "#".repeat(hashes));
        let inside_len = inside.find(&end).map_or(inside.len(), |at| at + end.len());
        return Some((len + hashes + 1 + inside_len, Some("\"")));
    }
    if prefix == "r" && hashes == 1 {
        let word = body.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(body.len());
        return Some((len + 1 + word, Some(&body[..word])));
    }
    None
}

/// Length up to and including the closing quote. Escaped quotes do not close.
fn quoted_len(body: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in body.char_indices() {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == quote {
            return at + 1;
        }
    }
    body.len()
}

fn char_or_lifetime(rest: &str) -> (usize, Option<&str>) {
    let mut inside = rest[1..].chars();
    let first = inside.next().unwrap_or(' ');
    if first == '\\' || inside.next() == Some('\'') {
        (1 + quoted_len(&rest[1..], '\''), Some("\""))
    } else {
        let word = rest[1..].find(|c: char| !c.is_alphanumeric() && c != '_');
        (1 + word.unwrap_or(rest.len() - 1), None)
    }
}

/// Length of a block comment. Block comments can be nested in Rust.
fn block_comment_len(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    let bytes = rest.as_bytes();
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" => (depth, at) = (depth + 1, at + 2),
            b"*/" => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// The index after the bracket that closes the one at `open`.
pub(crate) fn after_group(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// The attribute at `at`: the range of its tokens after `#` or `#!`.
pub(crate) fn attribute(tokens: &[Token<'_>], at: usize) -> Option<std::ops::Range<usize>> {
    if tokens[at].text != "#" {
        return None;
    }
    let open = at + 1 + usize::from(tokens.get(at + 1)?.text == "!");
    (tokens.get(open)?.text == "[").then(|| open..after_group(tokens, open))
}

/// Whether the attribute compiles its item for tests only, as `#[test]` and `#[cfg(test)]` do.
pub(crate) fn is_test_attribute(attribute: &[Token<'_>]) -> bool {
    let words: Vec<_> = attribute.iter().filter(|t| t.is_word()).map(|t| t.text).collect();
    match words.as_slice() {
        ["test"] => true,
        // `any(test, ...)` and `not(test)` may be true in a normal build too.
        ["cfg", rest @ ..] => {
            rest.contains(&"test") && !rest.contains(&"not") && !rest.contains(&"any")
        }
        _ => false,
    }
}

/// The tokens without the items that are compiled for tests only.
pub(crate) fn without_test_items<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        match attribute(tokens, at) {
            Some(range) if is_test_attribute(&tokens[range.clone()]) => {
                at = after_item(tokens, range.end);
            }
            _ => {
                kept.push(tokens[at]);
                at += 1;
            }
        }
    }
    kept
}

/// The index after the item at `at`, which ends with its `;`, with its `}`, or with the group that encloses it.
fn after_item(tokens: &[Token<'_>], mut at: usize) -> usize {
    while at < tokens.len() {
        match tokens[at].text {
            ";" => return at + 1,
            "{" => return after_group(tokens, at),
            "(" | "[" => at = after_group(tokens, at),
            ")" | "]" | "}" => return at,
            _ => at += 1,
        }
    }
    at
}

/// A path such as `crate::dtype::Dtype`, or one leaf of a `use` tree.
#[derive(Debug)]
pub(crate) struct CodePath {
    pub(crate) segments: Vec<String>,
    /// The name that a `use` leaf brings in.
    pub(crate) imported_as: Option<String>,
    /// The inline modules around it, below the module of the file.
    inside: Vec<String>,
    pub(crate) line: usize,
}

/// Every path that the tokens name, in order.
pub(crate) fn code_paths(tokens: &[Token<'_>]) -> Vec<CodePath> {
    let mut paths = Vec::new();
    let mut modules: Vec<(String, usize)> = Vec::new();
    let (mut at, mut depth) = (0, 0_usize);
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text);
    while at < tokens.len() {
        let first_new = paths.len();
        match tokens[at].text {
            "{" => (depth, at) = (depth + 1, at + 1),
            "}" => {
                (depth, at) = (depth.saturating_sub(1), at + 1);
                modules.pop_if(|(_, opened_at)| *opened_at == depth);
            }
            "mod" if text(at + 2) == "{" => {
                modules.push((text(at + 1).to_owned(), depth));
                at += 2;
            }
            // `impl Trait + use<'a>` imports nothing.
            "use" if text(at + 1) != "<" => at = use_tree(tokens, at + 1, &[], &mut paths),
            "::" if at > 0 && (tokens[at - 1].is_word() || text(at - 1) == ">") => at += 1,
            "::" => at = plain_path(tokens, at + 1, &mut paths),
            _ if tokens[at].is_word() => at = plain_path(tokens, at, &mut paths),
            _ => at += 1,
        }
        for path in &mut paths[first_new..] {
            path.inside = modules.iter().map(|(name, _)| name.clone()).collect();
        }
    }
    paths
}

fn plain_path(tokens: &[Token<'_>], start: usize, paths: &mut Vec<CodePath>) -> usize {
    let mut segments = Vec::new();
    let mut at = start;
    while at < tokens.len() && tokens[at].is_word() {
        segments.push(tokens[at].text.to_owned());
        at += 1;
        if at + 1 < tokens.len() && tokens[at].text == "::" && tokens[at + 1].is_word() {
            at += 1;
        } else {
            break;
        }
    }
    if !segments.is_empty() {
        let line = tokens[start].line;
        paths.push(CodePath { segments, imported_as: None, inside: Vec::new(), line });
    }
    at.max(start)
}

/// Pushes each leaf of the `use` tree at `at`, below `prefix`; returns the index after the tree.
fn use_tree(
    tokens: &[Token<'_>],
    mut at: usize,
    prefix: &[String],
    paths: &mut Vec<CodePath>,
) -> usize {
    let mut segments = prefix.to_vec();
    while at < tokens.len() {
        let token = tokens[at];
        at += 1;
        match token.text {
            "::" => continue,
            "{" => {
                while at < tokens.len() && tokens[at].text != "}" {
                    at = if tokens[at].text == "," {
                        at + 1
                    } else {
                        // A stray token must not stop the scan.
                        use_tree(tokens, at, &segments, paths).max(at + 1)
                    };
                }
                return at + 1;
            }
            "*" => segments.push("*".to_owned()),
            // `{self}` names the prefix itself.
            "self" if !segments.is_empty() => {}
            _ if token.is_word() => segments.push(token.text.to_owned()),
            _ => return at - 1,
        }
        if tokens.get(at).is_some_and(|next| next.text == "::") {
            continue;
        }
        let mut name = segments.last().cloned();
        if tokens.get(at).is_some_and(|next| next.text == "as") {
            name = tokens.get(at + 1).map(|alias| alias.text.to_owned());
            at += 2;
        }
        let line = token.line;
        paths.push(CodePath { segments, imported_as: name, inside: Vec::new(), line });
        return at;
    }
    at
}

/// The path below the crate root that `path` names from within `module`; `None` if it leaves
/// the crate or is a local name.
pub(crate) fn below_crate_root(path: &CodePath, module: &[String]) -> Option<Vec<String>> {
    let mut base: Vec<String> = module.iter().chain(&path.inside).cloned().collect();
    let mut rest = path.segments.as_slice();
    match rest.first()?.as_str() {
        "crate" | "tensorfs" => {
            base.clear();
            rest = &rest[1..];
        }
        "self" | "super" => {
            while let Some(word @ ("self" | "super")) = rest.first().map(String::as_str) {
                if word == "super" {
                    base.pop();
                }
                rest = &rest[1..];
            }
        }
        _ => return None,
    }
    base.extend_from_slice(rest);
    Some(base)
}
