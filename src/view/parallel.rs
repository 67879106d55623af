//! The part of a checkpoint that belongs to one rank of a tensor-parallel group.

use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;

use super::cut_rules::{Cut, CutAction, CutRules, PartSizes, Units};
use super::families;
use super::rules::dim_of;
use crate::catalog::{Catalog, Projected, ProjectedFrom, Tensor, TensorParts};
use crate::error::{ErrorKind, Fault, quoted};

/// A function that reads the `config.json` of a checkpoint. It returns `None` if there is no such file. Its
/// error is a message of one line.
pub type ReadConfig<'a> = &'a dyn Fn() -> Result<Option<Vec<u8>>, String>;

/// Maximum number of ranks of a group.
pub(super) const RANKS_MAX: u32 = 1 << 16;

/// The part of one rank of a tensor-parallel group. The rank has its slices of the tensors that are divided,
/// and all other tensors as a whole.
///
/// ```
/// use std::sync::Arc;
/// use tensorfs::{Checkpoint, CutRules, OpenOptions, TensorParallel, View};
///
/// let text = b"[[rule]]\nregex = 'c_attn.weight$'\ncut = 1\n";
/// let rules = Arc::new(CutRules::parse("tp.toml".as_ref(), text)?);
/// let shard = Some(TensorParallel { ranks: 4, rank: Some(0), rules: Some(rules) });
/// let options = OpenOptions { view: View { shard, ..View::default() }, ..OpenOptions::default() };
/// let checkpoint = Checkpoint::open_with("tests/fixtures/hf/gpt2_tiny".as_ref(), &options)
///     .map_err(|error| error.to_string())?;
/// let tensor = checkpoint.catalog().tensor("transformer.h.0.attn.c_attn.weight").expect("it is there");
/// assert_eq!(tensor.shape, [12, 9]);
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorParallel {
    /// Number of ranks.
    pub ranks: u32,
    /// The number of the rank, which begins at 0. `None` stands for all ranks. Then `NamedViews::of_ranks`
    /// makes a view for each of them.
    pub rank: Option<u32>,
    /// The rules for the division of tensors. If `None`, the rules for the family of models that `config.json` names.
    pub rules: Option<Arc<CutRules>>,
}

/// The number of a rank, and the number of ranks of its group.
pub(super) struct OneRank {
    ranks: u64,
    rank: u64,
}

/// The tensors of a rank.
pub(super) struct RankTensors {
    pub(super) catalog: Catalog,
    /// For each tensor, the dimension that is divided. `None` if the rank has the whole tensor.
    pub(super) cuts: Vec<Option<usize>>,
}

impl TensorParallel {
    /// The number of the rank and of the ranks, after a check.
    ///
    /// # Errors
    /// A message of one line with the options, if the numbers are not valid.
    pub(super) fn one_rank(&self) -> Result<OneRank, String> {
        let TensorParallel { ranks, rank, .. } = self;
        if !(1..=RANKS_MAX).contains(ranks) {
            return Err(format!("option tp= is a number of ranks from 1 to {RANKS_MAX}"));
        }
        match rank.filter(|rank| rank < ranks) {
            Some(rank) => Ok(OneRank { ranks: u64::from(*ranks), rank: u64::from(rank) }),
            None => Err(format!("option tp={ranks} needs rank=, a number from 0 to {}", ranks - 1)),
        }
    }

    /// The tensors at the positions `selected` of `catalog`, as this rank has them.
    ///
    /// # Errors
    /// `view` with the rule and the tensor if a rule does not fit. `misaligned` if elements of less than a byte
    /// would be divided inside a byte.
    pub(super) fn project(
        &self,
        catalog: &Catalog,
        selected: &[u32],
        read_config: ReadConfig<'_>,
    ) -> Result<RankTensors, Fault> {
        let one = self.one_rank().map_err(|why| ErrorKind::Usage.fault(why))?;
        let mut config =
            Config { read: read_config, parsed: None, has_rules: self.rules.is_some() };
        let rules = match &self.rules {
            Some(rules) => rules.clone(),
            None => Arc::new(config.family().map_err(|why| self.fault(&why))?),
        };
        self.check_used(catalog, &rules)?;
        let mut parts: Vec<(Option<TensorParts>, usize)> = Vec::with_capacity(selected.len());
        for &position in selected {
            let tensor = catalog.tensor_at(position as usize);
            let Some(found) = rules.table.find(tensor.name) else {
                parts.push((None, 0));
                continue;
            };
            let told = rules.told(found.rule);
            let fail = |why: String| self.fault(&format!("{told}: {why}")).tensor(tensor.name);
            let own = match &rules.table.rules[found.rule].action {
                CutAction::Cut(cut) => Some(one.cut(cut, &tensor, &mut config).map_err(fail)?),
                CutAction::Repeat => None,
                CutAction::Refuse(why) => {
                    let hint = "write rules for this model, and give tp-rules=FILE";
                    return Err(fail(format!("{why}; {hint}")));
                }
            };
            parts.push((own, found.rule));
        }
        let tensors = selected.iter().zip(&parts).map(|(&position, (parts, _))| {
            let Tensor { name, dtype, .. } = catalog.tensor_at(position as usize);
            let whole = ProjectedFrom::Whole(position);
            Projected { name, from: parts.as_ref().map_or(whole, ProjectedFrom::Parts), dtype }
        });
        let projected = catalog.project(tensors).map_err(|fault| {
            let name = fault.tensor.clone().unwrap_or_default();
            let is_it = |&position: &u32| catalog.tensor_at(position as usize).name == name;
            let rule = selected.iter().position(is_it).map(|index| rules.told(parts[index].1));
            let told = rule.map_or_else(String::new, |told| format!("{told}: "));
            Fault { message: format!("tp={}: {told}{}", self.ranks, fault.message), ..fault }
        })?;
        let is_cut = |position: u32, TensorParts { dim, parts }: &TensorParts| {
            let own = parts.iter().fold(0, |sum, (_, range)| sum + (range.end - range.start));
            own < catalog.tensor_at(position as usize).shape[*dim]
        };
        let cuts = selected.iter().zip(parts).map(|(&position, (parts, _))| {
            parts.filter(|parts| is_cut(position, parts)).map(|parts| parts.dim)
        });
        Ok(RankTensors { catalog: projected, cuts: cuts.collect() })
    }

    fn fault(&self, why: &str) -> Fault {
        ErrorKind::View.fault(format!("tp={}: {why}", self.ranks))
    }

    /// Refuses rules that match no tensor of the whole catalog, even if the view selects only a part of the catalog.
    /// Rules of a family are for whole models, while a file may be a single shard. So it is enough that one rule of the
    /// family matches.
    fn check_used(&self, catalog: &Catalog, rules: &CutRules) -> Result<(), Fault> {
        let mut used: Vec<bool> = rules.table.rules.iter().map(|rule| rule.is_optional).collect();
        let mut matched = false;
        for tensor in catalog.tensors() {
            if let Some(found) = rules.table.find(tensor.name) {
                used[found.rule] = true;
                matched = true;
            }
        }
        let count = catalog.len();
        if rules.path().is_none() {
            if matched {
                return Ok(());
            }
            let why = format!("{}: they match none of the {count} tensors", rules.name());
            return Err(self.fault(&format!("{why}; give tp-rules=FILE")));
        }
        let Some(rule) = used.iter().position(|used| !used) else { return Ok(()) };
        let told = rules.told(rule);
        Err(self.fault(&format!("{told}: matches none of the {count} tensors")))
    }
}

impl OneRank {
    /// The part of `tensor` that the rank gets.
    fn cut(
        &self,
        cut: &Cut,
        tensor: &Tensor<'_>,
        config: &mut Config<'_>,
    ) -> Result<TensorParts, String> {
        let dim = dim_of(cut.dim, tensor)?;
        let size = tensor.shape[dim];
        let position = tensor.position() as u32;
        let ranges = match &cut.units {
            Some(units) => {
                let (units, name) = config.units(units)?;
                vec![self.unit_range(units, &name, cut.replicate, size, dim)?]
            }
            None => self.part_ranges(&cut.parts, size, dim)?,
        };
        let parts = ranges.into_iter().map(|range| (position, range)).collect();
        Ok(TensorParts { dim, parts })
    }

    /// The indices of the rank in a dimension that has `units` equal units.
    fn unit_range(
        &self,
        units: u64,
        name: &str,
        replicate: bool,
        size: u64,
        dim: usize,
    ) -> Result<Range<u64>, String> {
        let OneRank { ranks, rank } = *self;
        if units == 0 || !size.is_multiple_of(units) {
            return Err(format!(
                "its {size} indices of dimension {dim} are not {units} units{name}"
            ));
        }
        let unit = size / units;
        if units.is_multiple_of(ranks) {
            let own = units / ranks * unit;
            return Ok(rank * own..(rank + 1) * own);
        }
        if replicate && ranks.is_multiple_of(units) {
            let first = rank / (ranks / units) * unit;
            return Ok(first..first + unit);
        }
        let hint = match (replicate, ranks.is_multiple_of(units)) {
            (false, true) => {
                "; a rule with replicate = true gives each to several ranks: write one, and give \
                 tp-rules=FILE"
            }
            _ => "; choose another number of ranks",
        };
        Err(format!("{units} units{name} cannot be given to {ranks} ranks evenly{hint}"))
    }

    /// The indices of the rank in each part of a dimension. A part is divided in the same way as by
    /// `torch.chunk`: the first ranks have equal numbers of indices, and the last ones have fewer or none.
    fn part_ranges(
        &self,
        parts: &PartSizes,
        size: u64,
        dim: usize,
    ) -> Result<Vec<Range<u64>>, String> {
        let wrong = |told: String| format!("{told} do not add up to {size} in dimension {dim}");
        let sizes = match parts {
            PartSizes::Equal(1) => vec![size],
            PartSizes::Equal(count) if size.is_multiple_of(*count) => {
                // If the dimension has no indices, all parts are empty.
                if size == 0 { vec![0] } else { vec![size / count; *count as usize] }
            }
            PartSizes::Equal(count) => return Err(wrong(format!("{count} equal parts"))),
            PartSizes::Sizes(sizes) => sizes.clone(),
        };
        if sizes.iter().try_fold(0_u64, |sum, &one| sum.checked_add(one)) != Some(size) {
            return Err(wrong(format!("parts {sizes:?}")));
        }
        let starts = sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end - size)
        });
        let own = |(start, size): (u64, &u64)| {
            let chunk = size.div_ceil(self.ranks);
            let first = chunk.saturating_mul(self.rank).min(*size);
            start + first..start + first.saturating_add(chunk).min(*size)
        };
        Ok(starts.zip(&sizes).map(own).collect())
    }
}

/// The `config.json` of a checkpoint. It is read when a rule first needs it.
struct Config<'a> {
    read: ReadConfig<'a>,
    parsed: Option<Value>,
    /// Whether the rules come from a file.
    has_rules: bool,
}

impl Config<'_> {
    fn get(&mut self, key: &str) -> Result<Option<&Value>, String> {
        if self.parsed.is_none() {
            let Some(text) = (self.read)()? else {
                return Err(match self.has_rules {
                    true => format!(
                        "there is no config.json beside the shards with the number {}; put it \
                         there, or write the number into the rule",
                        quoted(key)
                    ),
                    false => "there is no config.json beside the shards that says which model \
                              this is; give tp-rules=FILE"
                        .to_owned(),
                });
            };
            self.parsed = Some(parse(&text)?);
        }
        Ok(self.parsed.as_ref().and_then(|config| config.get(key)))
    }

    /// The rules for the family of models that `config.json` names.
    fn family(&mut self) -> Result<CutRules, String> {
        let model_type = self.get("model_type")?.and_then(Value::as_str).unwrap_or_default();
        let known = families::NAMES.join(", ");
        CutRules::of_family(model_type).unwrap_or_else(|| {
            let model_type = quoted(model_type);
            Err(format!(
                "config.json has model_type {model_type}; there are rules for {known}; give \
                 tp-rules=FILE"
            ))
        })
    }

    /// A number of units, and its source for messages.
    fn units(&mut self, units: &Units) -> Result<(u64, String), String> {
        let keys = match units {
            Units::Number(number) => return Ok((*number, String::new())),
            Units::Key(key) => std::slice::from_ref(key),
            Units::Keys(keys) => keys.as_slice(),
        };
        for key in keys {
            if let Some(number) = self.get(key)?.and_then(Value::as_u64) {
                return Ok((number, format!(" ({key})")));
            }
        }
        Err(format!("config.json has no number {}", keys.join(" or ")))
    }
}

/// Parses JSON as Python writes it. The words NaN, Infinity and -Infinity count as null. A byte order mark is skipped.
fn parse(text: &[u8]) -> Result<Value, String> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    serde_json::from_slice(text).or_else(|error| {
        let parsed = serde_json::from_slice(&without_words(text));
        parsed.map_err(|_| format!("config.json is no JSON: {error}"))
    })
}

/// `text` with null in place of the numbers that JSON does not have.
fn without_words(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let (mut rest, mut is_string) = (text, false);
    while let Some((&first, after)) = rest.split_first() {
        let words = [&b"NaN"[..], b"Infinity", b"-Infinity"];
        match (words.iter().find(|word| rest.starts_with(word)), after.split_first()) {
            (Some(word), _) if !is_string => {
                plain.extend(b"null");
                rest = &rest[word.len()..];
            }
            (_, Some((&escaped, behind))) if is_string && first == b'\\' => {
                plain.extend([first, escaped]);
                rest = behind;
            }
            _ => {
                is_string ^= first == b'"';
                plain.push(first);
                rest = after;
            }
        }
    }
    plain
}
