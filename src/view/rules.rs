//! The TOML form of files with rules that rename, split and join tensors.

use std::collections::HashMap;
use std::path::Path;

use regex::Regex;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::catalog::Tensor;
use crate::error::{quoted, shown_path};

/// The rules of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct Rules {
    /// The rules that split tensors, in file order.
    pub(super) splits: RuleTable<SplitRule>,
    /// The rules that rename or join tensors. Those that join come first. Each of the two groups is in file order.
    pub(super) names: RuleTable<NameRule>,
}

/// Rules of which at most one applies to each tensor.
#[derive(Clone, Debug)]
pub(super) struct RuleTable<R> {
    pub(super) rules: Vec<R>,
    /// For each rule its number and its pattern, for messages.
    labels: Vec<String>,
    /// For each exact name, the rule and the operand.
    exact: HashMap<String, (usize, usize)>,
    /// For each regex, the rule and the operand, in order of precedence.
    regexes: Vec<(usize, usize, Regex)>,
}

/// A rule that splits tensors along a dimension.
#[derive(Clone, Debug)]
pub(super) struct SplitRule {
    /// The names of the parts.
    pub(super) to: Vec<String>,
    /// The dimension. A negative number counts from the last dimension.
    pub(super) dim: i64,
    /// The size of each part. `None` if all parts have the same size.
    pub(super) sizes: Option<Vec<u64>>,
}

/// A rule that renames tensors.
#[derive(Clone, Debug)]
pub(super) struct NameRule {
    /// The new name.
    pub(super) to: String,
    /// The number of tensors that the rule joins, and the dimension. `None` if it does not join tensors.
    pub(super) join: Option<(usize, i64)>,
}

/// The rule that applies to a tensor.
pub(super) struct RuleMatch<'a> {
    pub(super) rule: usize,
    /// The index of the tensor among those that the rule joins.
    pub(super) operand: usize,
    /// The regex that matched. `None` for an exact name.
    regex: Option<&'a Regex>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RulesToml {
    #[serde(default)]
    rename: Vec<RenameToml>,
    #[serde(default)]
    split: Vec<SplitToml>,
    #[serde(default)]
    fuse: Vec<FuseToml>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RenameToml {
    from: Option<String>,
    regex: Option<String>,
    to: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SplitToml {
    from: Option<String>,
    regex: Option<String>,
    to: Vec<String>,
    #[serde(default)]
    dim: i64,
    sizes: Option<Vec<u64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FuseToml {
    from: Option<Vec<String>>,
    regex: Option<Vec<String>>,
    to: String,
    #[serde(default)]
    dim: i64,
}

impl Rules {
    /// Parses rules from `text`, which is TOML. `path` is the file of the text.
    ///
    /// # Errors
    /// A message of one line with the file and the rule.
    pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Rules, String> {
        let fail = |why: String| format!("{}: {why}", shown_path(path));
        let form = "expected TOML with [[rename]], [[split]] and [[fuse]] tables, each with from or \
                    regex, and to";
        let toml: RulesToml = parse_toml(text).map_err(|why| fail(format!("{form}; {why}")))?;
        if toml.rename.is_empty() && toml.split.is_empty() && toml.fuse.is_empty() {
            return Err(fail(format!("{form}; it has no rule")));
        }
        let mut rules = Rules::default();
        for (index, one) in toml.split.into_iter().enumerate() {
            let number = format!("split rule {}", index + 1);
            rules.add_split(&number, one).map_err(|why| fail(format!("{number}: {why}")))?;
        }
        for (index, one) in toml.fuse.into_iter().enumerate() {
            let number = format!("fuse rule {}", index + 1);
            rules.add_fuse(&number, one).map_err(|why| fail(format!("{number}: {why}")))?;
        }
        for (index, one) in toml.rename.into_iter().enumerate() {
            let number = format!("rule {}", index + 1);
            rules.add_rename(&number, one).map_err(|why| fail(format!("{number}: {why}")))?;
        }
        Ok(rules)
    }

    fn add_split(&mut self, number: &str, split: SplitToml) -> Result<(), String> {
        let SplitToml { from, regex, to, dim, sizes } = split;
        if to.len() < 2 {
            return Err("to needs the names of two parts or more".to_owned());
        }
        if let Some(sizes) = &sizes
            && (sizes.len() != to.len() || sizes.contains(&0))
        {
            return Err(format!("sizes needs {} numbers from 1, one for each part", to.len()));
        }
        let given = NamePattern::one_of(from, regex)?;
        self.splits.add(number, &[given], &to.iter().map(String::as_str).collect::<Vec<_>>())?;
        self.splits.rules.push(SplitRule { to, dim, sizes });
        Ok(())
    }

    fn add_fuse(&mut self, number: &str, fuse: FuseToml) -> Result<(), String> {
        let FuseToml { from, regex, to, dim } = fuse;
        let given: Vec<NamePattern> = match (from, regex) {
            (Some(from), None) => from.into_iter().map(NamePattern::Exact).collect(),
            (None, Some(regex)) => regex.into_iter().map(NamePattern::Regex).collect(),
            _ => return Err("needs one of from and regex".to_owned()),
        };
        if given.len() < 2 {
            return Err("needs two tensors or more".to_owned());
        }
        self.names.add(number, &given, &[&to])?;
        self.names.rules.push(NameRule { to, join: Some((given.len(), dim)) });
        Ok(())
    }

    fn add_rename(&mut self, number: &str, rename: RenameToml) -> Result<(), String> {
        let RenameToml { from, regex, to } = rename;
        let given = NamePattern::one_of(from, regex)?;
        self.names.add(number, &[given], &[&to])?;
        self.names.rules.push(NameRule { to, join: None });
        Ok(())
    }
}

/// Parses a value from `text`, which is TOML.
///
/// # Errors
/// A message with the line and the mistake.
pub(super) fn parse_toml<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    let utf8 =
        std::str::from_utf8(text).map_err(|e| format!("not UTF-8 at byte {}", e.valid_up_to()))?;
    toml::from_str(utf8).map_err(|e| {
        let line = e.span().map_or(1, |span| 1 + utf8[..span.start].matches('\n').count());
        format!("line {line}: {}", e.message().replace('\n', " "))
    })
}

/// The dimension `dim` of a tensor. A negative number counts from the last dimension.
pub(super) fn dim_of(dim: i64, tensor: &Tensor<'_>) -> Result<usize, String> {
    let count = tensor.shape.len() as i64;
    let own = if dim < 0 { count.saturating_add(dim) } else { dim };
    if (0..count).contains(&own) {
        return Ok(own as usize);
    }
    Err(format!("has shape {:?}, which has no dimension {dim}", tensor.shape))
}

/// The tensors to which a rule applies.
pub(super) enum NamePattern {
    Exact(String),
    Regex(String),
}

impl NamePattern {
    /// The pattern from the one argument that is `Some`. Exactly one of the two arguments must be `Some`.
    pub(super) fn one_of(
        from: Option<String>,
        regex: Option<String>,
    ) -> Result<NamePattern, String> {
        match (from, regex) {
            (Some(from), None) => Ok(NamePattern::Exact(from)),
            (None, Some(regex)) => Ok(NamePattern::Regex(regex)),
            _ => Err("needs one of from and regex".to_owned()),
        }
    }
}

impl<R> RuleTable<R> {
    /// Adds the patterns of the next rule, whose new names are `to`. The caller adds the rule itself.
    pub(super) fn add(
        &mut self,
        number: &str,
        given: &[NamePattern],
        to: &[&str],
    ) -> Result<(), String> {
        let rule = self.rules.len();
        let word = match &given[0] {
            NamePattern::Exact(_) => "from",
            NamePattern::Regex(_) => "regex",
        };
        let names: Vec<String> = given
            .iter()
            .map(|one| match one {
                NamePattern::Exact(text) | NamePattern::Regex(text) => quoted(text),
            })
            .collect();
        self.labels.push(format!("{number}, {word} = {}", names.join(", ")));
        for (operand, one) in given.iter().enumerate() {
            match one {
                NamePattern::Exact(_) if to.iter().any(|to| to.is_empty()) => {
                    return Err("to is empty".to_owned());
                }
                NamePattern::Exact(from) => {
                    if let Some((before, _)) = self.exact.insert(from.clone(), (rule, operand)) {
                        let before = self.labels[before].split(',').next().unwrap_or_default();
                        return Err(match before == number {
                            true => format!("names {} twice", quoted(from)),
                            false => format!("{before} has the same name"),
                        });
                    }
                }
                NamePattern::Regex(text) => {
                    let regex = Regex::new(text).map_err(|e| one_line(&e))?;
                    to.iter().try_for_each(|to| check_groups(&regex, to))?;
                    self.regexes.push((rule, operand, regex));
                }
            }
        }
        Ok(())
    }

    /// Whether there are no rules.
    pub(super) fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The number of a rule and its pattern, for messages.
    pub(super) fn label(&self, rule: usize) -> &str {
        &self.labels[rule]
    }

    /// The rule that applies to the tensor `name`: the rule for exactly this name, or else the first rule whose regex
    /// matches.
    pub(super) fn find(&self, name: &str) -> Option<RuleMatch<'_>> {
        if let Some(&(rule, operand)) = self.exact.get(name) {
            return Some(RuleMatch { rule, operand, regex: None });
        }
        let found = self.regexes.iter().find(|(.., regex)| regex.is_match(name));
        found.map(|(rule, operand, regex)| RuleMatch {
            rule: *rule,
            operand: *operand,
            regex: Some(regex),
        })
    }
}

impl<R> Default for RuleTable<R> {
    fn default() -> RuleTable<R> {
        RuleTable {
            rules: Vec::new(),
            labels: Vec::new(),
            exact: HashMap::new(),
            regexes: Vec::new(),
        }
    }
}

impl RuleMatch<'_> {
    /// The name that the template `to` yields for the tensor `name`.
    pub(super) fn renamed(&self, name: &str, to: &str) -> String {
        let regex = self.regex.map(|regex| regex.replace_all(name, to).into_owned());
        regex.unwrap_or_else(|| to.to_owned())
    }
}

/// The last line of the error of a regex, which names the mistake. The other lines only mark the place of the mistake.
fn one_line(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    format!("not a regex: {}", last.trim().trim_start_matches("error: "))
}

/// Refuses a template that names a group which the regex does not have. Such a group would be replaced by an
/// empty text.
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

    fn parse(text: &str) -> Result<Rules, String> {
        Rules::parse(Path::new("r.toml"), text.as_bytes())
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
            let found = rules.names.find(name);
            let renamed = found.map(|found| found.renamed(name, &rules.names.rules[found.rule].to));
            assert_eq!(renamed.as_deref().unwrap_or(name), new);
        }
    }

    #[test]
    fn a_file_that_has_no_rules_or_wrong_ones_is_refused_in_one_line_with_the_rule() {
        for (text, said) in [
            ("", "no rule"),
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
            (
                "[[fuse]]\nfrom = ['a', 'b']\nto = 'x'\n[[rename]]\nfrom = 'b'\nto = 'y'",
                "rule 1: fuse rule 1 has the same name",
            ),
            ("[[fuse]]\nfrom = ['a', 'a']\nto = 'x'", "fuse rule 1: names `a` twice"),
            ("[[fuse]]\nfrom = ['a']\nto = 'x'", "fuse rule 1: needs two tensors"),
            ("[[fuse]]\nto = 'x'", "fuse rule 1: needs one of"),
            ("[[fuse]]\nregex = ['(a)', 'b']\nto = '$1'", "the group `1`"),
            ("[[fuse]]\nregex = ['a', '(']\nto = 'x'", "fuse rule 1: not a regex"),
            ("[[fuse]]\nfrom = 'a'\nto = 'x'", "line 2"),
            ("[[split]]\nfrom = 'a'\nto = ['x']", "split rule 1: to needs"),
            ("[[split]]\nfrom = 'a'\nto = ['x', '']", "split rule 1: to is empty"),
            ("[[split]]\nfrom = 'a'\nto = ['x', 'y']\nsizes = [1]", "sizes needs 2"),
            ("[[split]]\nfrom = 'a'\nto = ['x', 'y']\nsizes = [1, 0]", "sizes needs 2"),
            ("[[split]]\nfrom = 'a'\nto = ['x', 'y']\nsizes = [1, -1]", "line 4"),
            ("[[split]]\nfrom = 'a'\nto = ['x', 'y']\ndim = 1.5", "line 4"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with("r.toml: ") && error.contains(said), "{text:?}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        assert!(parse("[[rename]]\nregex = '(?<n>a)'\nto = '$n$$${n}$0'").is_ok());
    }
}
