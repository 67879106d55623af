//! Names of values: a name has one value within a block, and each parameter is one value.
//!
//! If a block has two plain `let x`, the value of the second one must not mention `x`: write one expression, or give
//! the second value its own name. An inner block may bind the name again, for example for a closure that needs a copy.
//! Other patterns are allowed, such as `let Some(x) = x else`.

use std::collections::BTreeMap;

use super::scan::{Token, after_group, tokens};
use super::{SHIPPED, SourceFile};

/// Files and folders that do not follow the rule yet.
pub(crate) const UNMENDED: &[&str] = &[];

/// Names that are bound again from their own value, and functions with a tuple pattern as a parameter. Files below
/// `unmended` are left out.
pub(crate) fn binding_violations(files: &[SourceFile], unmended: &[&str]) -> Vec<String> {
    let shipped = files.iter().filter(|file| file.is_rust() && file.is_under(SHIPPED));
    let mut violations = Vec::new();
    for file in shipped.filter(|file| !file.is_under(unmended)) {
        let tokens = tokens(&file.text);
        for (name, line) in bound_again(&tokens) {
            let what =
                format!("`{name}` is made of the `{name}` of the same block: join or rename");
            violations.push(file.violation(line, &what));
        }
        for (name, line) in tuple_parameters(&tokens) {
            let what = format!("`{name}` has a tuple as a parameter: name its parts");
            violations.push(file.violation(line, &what));
        }
    }
    violations
}

/// The plain bindings whose value mentions an earlier one of that name in the same block.
fn bound_again<'a>(tokens: &[Token<'a>]) -> Vec<(&'a str, usize)> {
    let mut found = Vec::new();
    // For each open brace the names that plain bindings have had so far.
    let mut blocks: Vec<BTreeMap<&str, usize>> = vec![BTreeMap::new()];
    for (at, token) in tokens.iter().enumerate() {
        match token.text {
            "{" => blocks.push(BTreeMap::new()),
            "}" => drop(blocks.pop()),
            "let" => {
                let Some(name_at) = plain_name(tokens, at) else { continue };
                let Token { text: name, line } = tokens[name_at];
                let value = &tokens[name_at + 1..statement_end(tokens, name_at)];
                let earlier = blocks.last_mut().and_then(|names| names.insert(name, line));
                if earlier.is_some() && mentions(value, name) {
                    found.push((name, line));
                }
            }
            _ => {}
        }
    }
    found
}

/// The index of the name that the `let` at `at` binds, if its pattern is only that.
fn plain_name(tokens: &[Token<'_>], at: usize) -> Option<usize> {
    let name_at = at + 1 + usize::from(tokens.get(at + 1)?.text == "mut");
    let follows = tokens.get(name_at + 1)?.text;
    (tokens[name_at].is_word() && matches!(follows, "=" | ":")).then_some(name_at)
}

/// The index of the `;` that ends the statement which has the token at `at`.
fn statement_end(tokens: &[Token<'_>], mut at: usize) -> usize {
    while let Some(token) = tokens.get(at) {
        match token.text {
            ";" => return at,
            "(" | "[" | "{" => at = after_group(tokens, at),
            _ => at += 1,
        }
    }
    tokens.len()
}

/// Whether `value` uses `name` as a value, and not as a field, a method, a path or a label.
fn mentions(value: &[Token<'_>], name: &str) -> bool {
    let text = |at: Option<usize>| at.and_then(|at| value.get(at)).map_or("", |token| token.text);
    (0..value.len()).filter(|&at| value[at].text == name).any(|at| {
        let before = text(at.checked_sub(1));
        // The two dots of a range or of `..rest` are two tokens.
        let is_member = before == "." && text(at.checked_sub(2)) != ".";
        !is_member && before != "::" && !matches!(text(Some(at + 1)), "::" | ":")
    })
}

/// The functions that have a tuple pattern as a parameter.
fn tuple_parameters<'a>(tokens: &[Token<'a>]) -> Vec<(&'a str, usize)> {
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate().filter(|(_, token)| token.text == "fn") {
        // In `fn(u8)`, a type, no name follows.
        let Some(name) = tokens.get(at + 1).filter(|name| name.is_word()) else { continue };
        let open = after_generics(tokens, at + 2);
        if tokens.get(open).is_some_and(|token| token.text == "(") && has_tuple(tokens, open) {
            found.push((name.text, token.line));
        }
    }
    found
}

/// The index after the `<...>` at `at`, or `at` if there is none.
fn after_generics(tokens: &[Token<'_>], at: usize) -> usize {
    let mut depth = 0_usize;
    for index in at..tokens.len() {
        match tokens[index].text {
            "<" => depth += 1,
            // The `>` of an arrow closes no generics.
            ">" if tokens[index - 1].text != "-" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return index + usize::from(index > at);
        }
    }
    tokens.len()
}

/// Whether a parameter in the list that opens at `open` is a tuple pattern, also behind `&`.
fn has_tuple(tokens: &[Token<'_>], open: usize) -> bool {
    let end = after_group(tokens, open) - 1;
    let mut at = open + 1;
    while at < end {
        let is_group = matches!(tokens[at].text, "(" | "[" | "{");
        let next = if is_group { after_group(tokens, at) } else { at + 1 };
        let is_tuple = tokens[at].text == "(" && matches!(tokens[at - 1].text, "(" | "," | "&");
        if is_tuple && tokens[next].text == ":" {
            return true;
        }
        at = next;
    }
    false
}
