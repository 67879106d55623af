//! Names of types: each name has one meaning within a crate.

use std::collections::BTreeMap;

use super::scan::{Token, tokens, without_test_items};
use super::{SHIPPED, SourceFile};

/// The one private type name that every module may use: for the state behind its own lock.
const PER_MODULE: &str = "State";

/// Type names that are defined twice in one crate.
pub(crate) fn doubled_name_violations(files: &[SourceFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for root in SHIPPED {
        let mut first: BTreeMap<String, String> = BTreeMap::new();
        for file in files.iter().filter(|file| file.is_rust() && file.path.starts_with(root)) {
            if file.module().last().is_some_and(|last| last == "tests") {
                continue;
            }
            let tokens = without_test_items(&tokens(&file.text));
            for (name, line, public) in type_names(&tokens) {
                let key = if name == PER_MODULE && !public {
                    format!("{name} in {}", file.path)
                } else {
                    name.to_owned()
                };
                match first.get(&key) {
                    Some(place) => {
                        let what = format!("type `{name}` stands in {place} too: name one meaning");
                        violations.push(file.violation(line, &what));
                    }
                    None => {
                        first.insert(key, format!("{}:{line}", file.path));
                    }
                }
            }
        }
    }
    violations
}

/// The types that `tokens` define: name, line, and whether other modules may name it.
fn type_names<'a>(tokens: &[Token<'a>]) -> Vec<(&'a str, usize, bool)> {
    let mut found = Vec::new();
    // For each open brace: whether it belongs to a module. Only types that are defined in modules count.
    let mut open: Vec<bool> = Vec::new();
    let mut module = false;
    for (index, token) in tokens.iter().enumerate() {
        match token.text {
            "mod" => module = true,
            ";" => module = false,
            "{" => open.push(std::mem::take(&mut module)),
            "}" => {
                open.pop();
            }
            "struct" | "enum" | "union" | "trait" | "type"
                if open.iter().all(|is_module| *is_module) =>
            {
                if stands_in_for_a_feature(&tokens[..index]) {
                    continue;
                }
                let Some(name) = tokens.get(index + 1).filter(|next| next.is_word()) else {
                    continue;
                };
                // `pub` or the `)` of `pub(crate)`, also before `unsafe`.
                let public = tokens[..index]
                    .iter()
                    .rev()
                    .find(|before| before.text != "unsafe")
                    .is_some_and(|before| matches!(before.text, "pub" | ")"));
                found.push((name.text, name.line, public));
            }
            _ => {}
        }
    }
    found
}

/// Whether the item after `before` is compiled only without a feature, in place of an item of the same name.
fn stands_in_for_a_feature(before: &[Token<'_>]) -> bool {
    let item = before.iter().rposition(|token| matches!(token.text, ";" | "}" | "{"));
    let words: Vec<_> = before[item.map_or(0, |end| end + 1)..].iter().map(|t| t.text).collect();
    words.windows(3).any(|three| three == ["not", "(", "feature"])
}
