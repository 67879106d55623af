//! Rules that give tensors other names.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde::Deserialize;

use crate::catalog::Catalog;
use crate::error::{ErrorKind, Fault, quoted, shown_path};
use crate::hash::Digest;

/// The rules of a file that names tensors anew.
///
/// ```
/// use tensorfs::RenameRules;
///
/// let text = br#"
///     [[rename]]
///     from = "lm_head.weight"
///     to = "output.weight"
///     [[rename]]
///     regex = '^model\.layers\.(\d+)\.'
///     to = 'blk.$1.'
/// "#;
/// let rules = RenameRules::parse("rules.toml".as_ref(), text)?;
/// assert_eq!(rules.apply("model.layers.7.input_layernorm.weight"), "blk.7.input_layernorm.weight");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug)]
pub struct RenameRules {
    path: PathBuf,
    digest: Digest,
    rules: Vec<Rule>,
    /// The rule of each exact name.
    exact: HashMap<String, usize>,
}

#[derive(Clone, Debug)]
struct Rule {
    /// Its number in the file, from 1, and what it matches, for messages.
    label: String,
    /// `None` for an exact name.
    regex: Option<Regex>,
    to: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RulesToml {
    rename: Vec<RuleToml>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleToml {
    from: Option<String>,
    regex: Option<String>,
    to: String,
}

impl RenameRules {
    /// The rules in `text`, which is TOML. `path` is its file.
    ///
    /// # Errors
    /// One line with the file and the rule.
    pub fn parse(path: &Path, text: &[u8]) -> Result<RenameRules, String> {
        let fail = |why: String| format!("{}: {why}", shown_path(path));
        let form = "expected TOML with [[rename]] tables, each with from or regex, and to";
        let utf8 = std::str::from_utf8(text)
            .map_err(|e| fail(format!("{form}; not UTF-8 at byte {}", e.valid_up_to())))?;
        let toml: RulesToml = toml::from_str(utf8).map_err(|e| {
            let line = e.span().map_or(1, |span| 1 + utf8[..span.start].matches('\n').count());
            fail(format!("{form}; line {line}: {}", e.message().replace('\n', " ")))
        })?;
        if toml.rename.is_empty() {
            return Err(fail(format!("{form}; it has no rule")));
        }
        let (mut rules, mut exact) = (Vec::with_capacity(toml.rename.len()), HashMap::new());
        for (index, RuleToml { from, regex, to }) in toml.rename.into_iter().enumerate() {
            let number = index + 1;
            let wrong = |why: &str| fail(format!("rule {number}: {why}"));
            let rule = match (from, regex) {
                (Some(from), None) => {
                    let label = format!("rule {number}, from = {}", quoted(&from));
                    if let Some(before) = exact.insert(from, index) {
                        return Err(wrong(&format!("rule {} has the same name", before + 1)));
                    }
                    Rule { label, regex: None, to }
                }
                (None, Some(text)) => {
                    let label = format!("rule {number}, regex = {}", quoted(&text));
                    let regex = Regex::new(&text).map_err(|e| wrong(&one_line(&e)))?;
                    check_groups(&regex, &to).map_err(|why| wrong(&why))?;
                    Rule { label, regex: Some(regex), to }
                }
                _ => return Err(wrong("needs one of from and regex")),
            };
            if rule.to.is_empty() {
                return Err(wrong("to is empty"));
            }
            rules.push(rule);
        }
        Ok(RenameRules { path: path.to_owned(), digest: Digest::of(text), rules, exact })
    }

    /// The file that they were read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Hash of their text.
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// The name of the tensor `name` by these rules: by the rule for this very name, otherwise by
    /// the first regex that matches, otherwise `name` itself.
    pub fn apply(&self, name: &str) -> String {
        self.applied(name).map_or_else(|| name.to_owned(), |(_, renamed)| renamed)
    }

    fn applied(&self, name: &str) -> Option<(usize, String)> {
        if let Some(&rule) = self.exact.get(name) {
            return Some((rule, self.rules[rule].to.clone()));
        }
        self.rules.iter().enumerate().find_map(|(number, rule)| {
            let regex = rule.regex.as_ref()?;
            let is_match = regex.is_match(name);
            is_match.then(|| (number, regex.replace_all(name, rule.to.as_str()).into_owned()))
        })
    }

    /// The new names of the tensors at `positions`, sorted by new name.
    pub(super) fn renamed(
        &self,
        catalog: &Catalog,
        positions: &[u32],
    ) -> Result<Vec<(String, u32)>, Fault> {
        let file = shown_path(&self.path);
        let fault = |message: String| Fault::new(ErrorKind::View, message);
        let mut used = vec![false; self.rules.len()];
        let mut renamed = Vec::with_capacity(positions.len());
        for &position in positions {
            let name = catalog.tensor_at(position as usize).name;
            let new = match self.applied(name) {
                Some((rule, new)) => {
                    used[rule] = true;
                    if new.is_empty() {
                        let label = &self.rules[rule].label;
                        return Err(
                            fault(format!("rename={file}: {label}: leaves no name")).tensor(name)
                        );
                    }
                    new
                }
                None => name.to_owned(),
            };
            renamed.push((new, position));
        }
        if let Some(rule) = used.iter().position(|used| !used) {
            let label = &self.rules[rule].label;
            return Err(fault(format!(
                "rename={file}: {label}: renames none of the {} tensors",
                positions.len()
            )));
        }
        renamed.sort_unstable();
        if let Some([first, second]) = renamed.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let was = |one: &(String, u32)| catalog.tensor_at(one.1 as usize).name;
            let rule = |one: &(String, u32)| match self.applied(was(one)) {
                Some((rule, _)) => format!("by {}", self.rules[rule].label),
                None => "by no rule".to_owned(),
            };
            return Err(fault(format!(
                "rename={file}: is the name of {} ({}) and of {} ({})",
                quoted(was(first)),
                rule(first),
                quoted(was(second)),
                rule(second)
            ))
            .tensor(&first.0));
        }
        Ok(renamed)
    }
}

impl PartialEq for RenameRules {
    fn eq(&self, other: &RenameRules) -> bool {
        (&self.path, self.digest) == (&other.path, other.digest)
    }
}

impl Eq for RenameRules {}

/// The last line of an error of a regex, which says what is wrong; the others draw the place.
fn one_line(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    format!("not a regex: {}", last.trim().trim_start_matches("error: "))
}

/// Refuses a replacement that names a group which the regex lacks: it would be replaced by nothing.
fn check_groups(regex: &Regex, to: &str) -> Result<(), String> {
    let mut rest = to;
    while let Some(dollar) = rest.find('$') {
        let after = &rest[dollar + 1..];
        if let Some(escaped) = after.strip_prefix('$') {
            rest = escaped;
            continue;
        }
        let name = match after.strip_prefix('{').and_then(|braced| braced.split_once('}')) {
            Some((name, _)) => name,
            None => {
                let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
                let end = after.find(|c| !is_word(c)).unwrap_or(after.len());
                &after[..end]
            }
        };
        let known = match name.parse::<usize>() {
            Ok(number) => number < regex.captures_len(),
            Err(_) => regex.capture_names().flatten().any(|known| known == name),
        };
        if !known {
            return Err(format!(
                "to = {} names the group {}, which the regex does not have; write ${{1}} before \
                 letters and digits, and $$ for a dollar sign",
                quoted(to),
                quoted(name)
            ));
        }
        rest = after;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<RenameRules, String> {
        RenameRules::parse(Path::new("r.toml"), text.as_bytes())
    }

    #[test]
    fn exact_names_win_and_then_the_first_regex_that_matches() {
        let rules = parse(
            "[[rename]]\nregex = '^a\\.(\\d+)'\nto = 'b.${1}x'\n\
             [[rename]]\nregex = 'a'\nto = 'c'\n\
             [[rename]]\nfrom = 'a.1'\nto = 'one'\n",
        )
        .unwrap();
        for (name, new) in [("a.1", "one"), ("a.2", "b.2x"), ("a.x.a", "c.x.c"), ("z", "z")] {
            assert_eq!(rules.apply(name), new);
        }
    }

    #[test]
    fn a_file_that_has_no_rules_or_wrong_ones_is_refused_in_one_line_with_the_rule() {
        for (text, said) in [
            ("", "missing field `rename`"),
            ("rename = []", "no rule"),
            ("{\"a\": \"b\"}", "line 1"),
            ("[[rename]]\nto = 'x'", "rule 1: needs one of"),
            ("[[rename]]\nfrom = 'a'\nregex = 'a'\nto = 'x'", "rule 1: needs one of"),
            ("[[rename]]\nfrom = 'a'\nto = ''", "rule 1: to is empty"),
            ("[[rename]]\nfrom = 'a'", "missing field `to`"),
            ("[[rename]]\nform = 'a'\nto = 'x'", "form"),
            ("[[rename]]\nregex = '('\nto = 'x'", "rule 1: not a regex: unclosed group"),
            ("[[rename]]\nregex = '(a)'\nto = '$2'", "the group `2`"),
            ("[[rename]]\nregex = '(a)'\nto = '$1_b'", "the group `1_b`"),
            ("[[rename]]\nregex = '(a)'\nto = '$'", "the group ``"),
            (
                "[[rename]]\nfrom = 'a'\nto = 'x'\n[[rename]]\nfrom = 'a'\nto = 'y'",
                "rule 2: rule 1 has the same name",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with("r.toml: ") && error.contains(said), "{text:?}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        assert!(parse("[[rename]]\nregex = '(?<n>a)'\nto = '$n$$${n}$0'").is_ok());
    }
}
