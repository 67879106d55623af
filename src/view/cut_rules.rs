//! Rules for the division of tensors in tensor parallelism. This module parses rule files, which are TOML, and also the
//! built-in rules for families of models.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::families;
use super::rules::{NamePattern, RuleTable, parse_toml};
use crate::error::shown_path;
use crate::hash::Digest;

/// Rules for the part of each tensor that each rank of a tensor-parallel group gets.
///
/// ```
/// use tensorfs::CutRules;
///
/// let text = br#"
///     [[rule]]
///     regex = '\.(q|k|v|gate|up)_proj\.weight$'
///     cut = 0
///     [[rule]]
///     regex = '\.(o|down)_proj\.weight$'
///     cut = 1
/// "#;
/// let rules = CutRules::parse("tp.toml".as_ref(), text)?;
/// assert_eq!(rules.path(), Some("tp.toml".as_ref()));
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug)]
pub struct CutRules {
    /// The file of the rules. `None` for the rules of a family.
    path: Option<PathBuf>,
    digest: Digest,
    /// The name of the rules in messages.
    name: String,
    pub(super) table: RuleTable<CutRule>,
}

/// A rule for the tensors that its pattern matches.
#[derive(Clone, Debug)]
pub(super) struct CutRule {
    pub(super) action: CutAction,
    /// Whether it is allowed that the rule matches no tensor.
    pub(super) is_optional: bool,
}

/// The treatment of the tensors of a rule.
#[derive(Clone, Debug)]
pub(super) enum CutAction {
    /// Each rank gets a part of the tensor.
    Cut(Cut),
    /// Each rank gets the whole tensor.
    Repeat,
    /// The checkpoint is refused, for the reason in the string.
    Refuse(String),
}

/// The division of a dimension among the ranks.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    /// The dimension. A negative number counts from the last dimension.
    pub(super) dim: i64,
    /// The number of equal units in the dimension. Each rank gets the same number of units.
    pub(super) units: Option<Units>,
    /// Whether several ranks get the same unit if there are fewer units than ranks.
    pub(super) replicate: bool,
    /// The consecutive parts of the dimension, each of which is divided separately.
    pub(super) parts: PartSizes,
}

/// Maximum number of equal parts of a dimension.
const PARTS_MAX: u64 = 1 << 16;

/// A number of units.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Units {
    Number(u64),
    /// The number with this key in `config.json`.
    Key(String),
    /// The number with the first of these keys that `config.json` has.
    Keys(Vec<String>),
}

/// The sizes of the parts of a dimension.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum PartSizes {
    /// This number of equal parts.
    Equal(u64),
    Sizes(Vec<u64>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CutRulesToml {
    rule: Vec<CutRuleToml>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CutRuleToml {
    from: Option<String>,
    regex: Option<String>,
    cut: Option<i64>,
    units: Option<Units>,
    #[serde(default)]
    replicate: bool,
    parts: Option<PartSizes>,
    #[serde(default)]
    repeat: bool,
    refuse: Option<String>,
    #[serde(default)]
    optional: bool,
}

impl CutRules {
    /// Parses rules from `text`, which is TOML. `path` is the file of the text.
    ///
    /// # Errors
    /// A message of one line with the file and the rule.
    pub fn parse(path: &Path, text: &[u8]) -> Result<CutRules, String> {
        let table = parse(text).map_err(|why| format!("{}: {why}", shown_path(path)))?;
        let name = format!("tp-rules={}", shown_path(path));
        Ok(CutRules { path: Some(path.to_owned()), digest: Digest::of(text), name, table })
    }

    /// The rules for models with this `model_type` in `config.json`. `None` if there are none.
    pub(super) fn of_family(model_type: &str) -> Option<Result<CutRules, String>> {
        let text = families::rules(model_type)?;
        let name = format!("the rules for {model_type}");
        let rules = parse(text.as_bytes()).map(|table| CutRules {
            path: None,
            digest: Digest::of(text.as_bytes()),
            name,
            table,
        });
        Some(rules)
    }

    /// The file of the rules. `None` for the rules of a family.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Hash of the text of the rules.
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// The name of the rules, for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The description of a rule, for messages.
    pub(super) fn told(&self, rule: usize) -> String {
        format!("{}: {}", self.name, self.table.label(rule))
    }
}

impl PartialEq for CutRules {
    fn eq(&self, other: &CutRules) -> bool {
        (&self.path, self.digest) == (&other.path, other.digest)
    }
}

impl Eq for CutRules {}

fn parse(text: &[u8]) -> Result<RuleTable<CutRule>, String> {
    let form = "expected TOML with [[rule]] tables, each with from or regex, and one of cut, \
                repeat and refuse";
    let toml: CutRulesToml = parse_toml(text).map_err(|why| format!("{form}; {why}"))?;
    if toml.rule.is_empty() {
        return Err(format!("{form}; it has no rule"));
    }
    let mut table = RuleTable::default();
    for (index, rule) in toml.rule.into_iter().enumerate() {
        let number = format!("rule {}", index + 1);
        add(&mut table, &number, rule).map_err(|why| format!("{number}: {why}"))?;
    }
    Ok(table)
}

fn add(table: &mut RuleTable<CutRule>, number: &str, rule: CutRuleToml) -> Result<(), String> {
    let CutRuleToml { from, regex, cut, units, replicate, parts, repeat, refuse, optional } = rule;
    let action = match (cut, repeat, refuse) {
        (Some(dim), false, None) => CutAction::Cut(cut_of(dim, units, replicate, parts)?),
        (None, ..) if units.is_some() || replicate || parts.is_some() => {
            return Err("units, replicate and parts need cut".to_owned());
        }
        (None, true, None) => CutAction::Repeat,
        (None, false, Some(why)) => CutAction::Refuse(why),
        _ => return Err("needs one of cut, repeat and refuse".to_owned()),
    };
    table.add(number, &[NamePattern::one_of(from, regex)?], &[])?;
    table.rules.push(CutRule { action, is_optional: optional });
    Ok(())
}

/// The division that a rule with these keys describes.
fn cut_of(
    dim: i64,
    units: Option<Units>,
    replicate: bool,
    parts: Option<PartSizes>,
) -> Result<Cut, String> {
    if units.is_some() && parts.is_some() {
        return Err("units and parts exclude each other".to_owned());
    }
    if replicate && units.is_none() {
        return Err("replicate needs units".to_owned());
    }
    let parts = parts.unwrap_or(PartSizes::Equal(1));
    match (&units, &parts) {
        (Some(Units::Keys(keys)), _) if keys.is_empty() => {
            Err("units is an empty list: give the keys of config.json".to_owned())
        }
        (_, PartSizes::Sizes(sizes)) if sizes.is_empty() => {
            Err("parts is an empty list: give the size of each part".to_owned())
        }
        (Some(Units::Number(0)), _) | (_, PartSizes::Equal(0)) => {
            Err("units and parts are numbers from 1".to_owned())
        }
        (_, PartSizes::Equal(count)) if *count > PARTS_MAX => {
            Err(format!("parts = {count} is more than {PARTS_MAX} parts"))
        }
        _ => Ok(Cut { dim, units, replicate, parts }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_has_no_rules_or_wrong_ones_is_refused_in_one_line_with_the_rule() {
        for (text, said) in [
            ("", "missing field `rule`"),
            ("rule = []", "no rule"),
            ("[[rule]]\ncut = 0", "rule 1: needs one of from and regex"),
            ("[[rule]]\nfrom = 'a'", "rule 1: needs one of cut, repeat and refuse"),
            ("[[rule]]\nfrom = 'a'\ncut = 0\nrepeat = true", "rule 1: needs one of cut"),
            ("[[rule]]\nfrom = 'a'\nrepeat = true\nunits = 3", "need cut"),
            ("[[rule]]\nfrom = 'a'\ncut = 0\nreplicate = true", "replicate needs units"),
            ("[[rule]]\nfrom = 'a'\ncut = 0\nunits = 2\nparts = 2", "exclude each other"),
            ("[[rule]]\nfrom = 'a'\ncut = 0\nunits = 0", "numbers from 1"),
            ("[[rule]]\nfrom = 'a'\ncut = 0\nparts = 0", "numbers from 1"),
            ("[[rule]]\nfrom = 'a'\ncut = 0\nunits = []", "rule 1: units is an empty list"),
            ("[[rule]]\nfrom = 'a'\ncut = 0\nparts = []", "rule 1: parts is an empty list"),
            ("[[rule]]\nfrom = 'a'\ncut = 0\nparts = 65537", "more than 65536 parts"),
            ("[[rule]]\nfrom = 'a'\ncut = 'x'", "line 3"),
            ("[[rule]]\nregex = '('\ncut = 0", "rule 1: not a regex"),
            ("[[rule]]\nfrom = 'a'\ncut = 0\n[[rule]]\nfrom = 'a'\ncut = 1", "rule 2: rule 1 has"),
            ("[[cut]]\nfrom = 'a'", "cut"),
        ] {
            let error = CutRules::parse(Path::new("tp.toml"), text.as_bytes()).unwrap_err();
            assert!(error.starts_with("tp.toml: ") && error.contains(said), "{text:?}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        assert!(CutRules::parse(Path::new("tp.toml"), b"[[rule]]\nfrom='a'\nrefuse='b'").is_ok());
    }

    #[test]
    fn the_rules_of_every_family_are_rules() {
        for family in families::NAMES {
            assert!(CutRules::of_family(family).unwrap().is_ok(), "{family}");
        }
        assert!(CutRules::of_family("gpt3").is_none());
    }
}
