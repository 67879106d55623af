//! Applies the rules of a file that rename, split and join tensors.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::rules::{NameRule, RuleTable, Rules, dim_of};
use crate::catalog::{Catalog, Projected, ProjectedFrom, Tensor, TensorParts};
use crate::error::{ErrorKind, Fault, quoted, shown_path};
use crate::hash::Digest;

/// The rules of a file that rename, split and join tensors.
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
///     [[fuse]]
///     regex = ['\.gate_proj\.', '\.up_proj\.']
///     to = '.gate_up_proj.'
/// "#;
/// let rules = RenameRules::parse("rules.toml".as_ref(), text)?;
/// assert_eq!(rules.apply("model.layers.7.input_layernorm.weight"), "blk.7.input_layernorm.weight");
/// assert_eq!(rules.apply("model.mlp.up_proj.weight"), "model.mlp.gate_up_proj.weight");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug)]
pub struct RenameRules {
    path: PathBuf,
    digest: Digest,
    rules: Rules,
}

/// A tensor with its name in the view.
pub(super) struct NamedTensor {
    name: String,
    /// Position of the tensor, or of the tensor of its first part.
    position: u32,
    /// The parts that make up the tensor. `None` if it is a whole tensor of the catalog.
    parts: Option<Box<TensorParts>>,
    /// The number of the rule that was applied. `None` if no rule matched.
    rule: Option<usize>,
}

/// The positions of the tensors that one rule joins to one tensor. An element is `None` until its tensor is found.
type Operands = Vec<Option<u32>>;

impl RenameRules {
    /// Parses rules from `text`, which is TOML. `path` is the file of the text.
    ///
    /// # Errors
    /// A message of one line with the file and the rule.
    pub fn parse(path: &Path, text: &[u8]) -> Result<RenameRules, String> {
        let rules = Rules::parse(path, text)?;
        Ok(RenameRules { path: path.to_owned(), digest: Digest::of(text), rules })
    }

    /// The file of the rules.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Hash of the text of the rules.
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// The new name of the tensor `name`, or the name of the tensor that it is joined into. The rule for
    /// exactly this name has precedence. Otherwise the first regex that matches is used. If no rule matches,
    /// the result is `name`. Rules that split tensors are ignored.
    pub fn apply(&self, name: &str) -> String {
        let names = &self.rules.names;
        let found = names.find(name);
        let renamed = found.map(|found| found.renamed(name, &names.rules[found.rule].to));
        renamed.unwrap_or_else(|| name.to_owned())
    }

    /// The tensors of `catalog` at the positions `selected`, after these rules. For the tensors of a rank, `cuts` has,
    /// for each tensor, the dimension that is already divided among the ranks. For whole tensors, `cuts` is empty.
    ///
    /// # Errors
    /// `view` with the file, the rule and the tensor. `misaligned` if elements of less than a byte would be
    /// divided inside a byte.
    pub(super) fn project(
        &self,
        catalog: &Catalog,
        selected: &[u32],
        cuts: &[Option<usize>],
    ) -> Result<Catalog, Fault> {
        if self.rules.splits.is_empty() {
            let named = self.renamed(catalog, selected)?;
            return self.projected(catalog, &named, &self.rules.names);
        }
        let parts = self.split(catalog, selected, cuts)?;
        let catalog = self.projected(catalog, &parts, &self.rules.splits)?;
        if self.rules.names.is_empty() {
            return Ok(catalog);
        }
        let all: Vec<u32> = (0..catalog.len() as u32).collect();
        self.projected(&catalog, &self.renamed(&catalog, &all)?, &self.rules.names)
    }

    /// The catalog of the tensors `named`. `table` has their rules.
    fn projected<R>(
        &self,
        catalog: &Catalog,
        named: &[NamedTensor],
        table: &RuleTable<R>,
    ) -> Result<Catalog, Fault> {
        let tensors = named.iter().map(|one| {
            let whole = ProjectedFrom::Whole(one.position);
            let dtype = catalog.tensor_at(one.position as usize).dtype;
            let from = one.parts.as_deref().map_or(whole, ProjectedFrom::Parts);
            Projected { name: &one.name, from, dtype }
        });
        catalog.project(tensors).map_err(|fault| {
            let name = fault.tensor.as_deref();
            let rule = named.iter().find(|one| Some(one.name.as_str()) == name);
            match rule.and_then(|one| one.rule) {
                Some(rule) => {
                    let message = format!("{}; {}", self.told(table.label(rule)), fault.message);
                    Fault { message, ..fault }
                }
                None => fault,
            }
        })
    }

    /// The option, its file and one of its rules, for messages.
    fn told(&self, label: &str) -> String {
        format!("rename={}: {label}", shown_path(&self.path))
    }

    /// The error of a rule.
    fn fault(&self, label: &str, why: &str) -> Fault {
        ErrorKind::View.fault(format!("{}: {why}", self.told(label)))
    }

    /// The tensors at `positions`, with the parts of a tensor in place of the tensor if a rule splits it.
    /// Sorted by name.
    fn split(
        &self,
        catalog: &Catalog,
        positions: &[u32],
        cuts: &[Option<usize>],
    ) -> Result<Vec<NamedTensor>, Fault> {
        let splits = &self.rules.splits;
        let mut used = vec![false; splits.rules.len()];
        let mut named = Vec::with_capacity(positions.len());
        for &position in positions {
            let tensor = catalog.tensor_at(position as usize);
            let Some(found) = splits.find(tensor.name) else {
                let name = tensor.name.to_owned();
                named.push(NamedTensor { name, position, parts: None, rule: None });
                continue;
            };
            let (label, rule) = (splits.label(found.rule), &splits.rules[found.rule]);
            let fail = |why: &str| self.fault(label, why).tensor(tensor.name);
            used[found.rule] = true;
            let dim = dim_of(rule.dim, &tensor).map_err(|why| fail(&why))?;
            if cuts.get(position as usize) == Some(&Some(dim)) {
                return Err(fail(&format!(
                    "tp= cuts it in dimension {dim}, so its parts lie on several ranks; split the \
                     checkpoint first, with tensorfs consolidate"
                )));
            }
            let sizes = part_sizes(rule.sizes.as_deref(), rule.to.len() as u64, tensor.shape[dim])
                .map_err(|why| fail(&format!("{why} in dimension {dim}")))?;
            let mut start = 0;
            for (to, size) in rule.to.iter().zip(sizes) {
                let name = found.renamed(tensor.name, to);
                if name.is_empty() {
                    return Err(fail("leaves no name"));
                }
                let parts = TensorParts { dim, parts: vec![(position, start..start + size)] };
                let (parts, rule) = (Some(Box::new(parts)), Some(found.rule));
                named.push(NamedTensor { name, position, parts, rule });
                start += size;
            }
        }
        if let Some(rule) = used.iter().position(|used| !used) {
            let why = format!("splits none of the {} tensors", positions.len());
            return Err(self.fault(splits.label(rule), &why));
        }
        self.sorted(catalog, named, splits)
    }

    /// The tensors at `positions` with their new names, and the tensors that are joined from them. Sorted by name.
    fn renamed(&self, catalog: &Catalog, positions: &[u32]) -> Result<Vec<NamedTensor>, Fault> {
        let names = &self.rules.names;
        let mut used = vec![false; names.rules.len()];
        let mut named = Vec::with_capacity(positions.len());
        let mut found_joins: HashMap<(usize, String), Operands> = HashMap::new();
        for &position in positions {
            let tensor = catalog.tensor_at(position as usize);
            let Some(found) = names.find(tensor.name) else {
                let name = tensor.name.to_owned();
                named.push(NamedTensor { name, position, parts: None, rule: None });
                continue;
            };
            let (label, rule) = (names.label(found.rule), &names.rules[found.rule]);
            used[found.rule] = true;
            let name = found.renamed(tensor.name, &rule.to);
            if name.is_empty() {
                return Err(self.fault(label, "leaves no name").tensor(tensor.name));
            }
            let Some((count, _)) = rule.join else {
                let rule = Some(found.rule);
                named.push(NamedTensor { name, position, parts: None, rule });
                continue;
            };
            let operands =
                found_joins.entry((found.rule, name)).or_insert_with(|| vec![None; count]);
            if let Some(before) = operands[found.operand].replace(position) {
                let why = format!(
                    "would join {} and {} in the same place",
                    quoted(catalog.tensor_at(before as usize).name),
                    quoted(tensor.name)
                );
                return Err(self.fault(label, &why).tensor(tensor.name));
            }
        }
        if let Some(rule) = used.iter().position(|used| !used) {
            let verb = if names.rules[rule].join.is_some() { "joins" } else { "renames" };
            let why = format!("{verb} none of the {} tensors", positions.len());
            return Err(self.fault(names.label(rule), &why));
        }
        // Sorted, so that an error always names the same tensor.
        let mut joins: Vec<_> = found_joins.into_iter().collect();
        joins.sort_unstable();
        for ((rule, name), operands) in joins {
            named.push(self.joined(catalog, rule, name, &operands)?);
        }
        self.sorted(catalog, named, names)
    }

    /// The tensor `name` that a rule joins from the tensors `operands`.
    fn joined(
        &self,
        catalog: &Catalog,
        rule: usize,
        name: String,
        operands: &[Option<u32>],
    ) -> Result<NamedTensor, Fault> {
        let (label, NameRule { join, .. }) =
            (self.rules.names.label(rule), &self.rules.names.rules[rule]);
        let fail = |why: String| self.fault(label, &why).tensor(&name);
        let there = || operands.iter().flatten().map(|&at| catalog.tensor_at(at as usize));
        if let Some(missing) = operands.iter().position(Option::is_none) {
            let found: Vec<String> = there().map(|tensor| quoted(tensor.name)).collect();
            return Err(fail(format!(
                "tensor {} of {} is missing; found {}",
                missing + 1,
                operands.len(),
                found.join(", ")
            )));
        }
        let positions: Vec<u32> = operands.iter().flatten().copied().collect();
        let first = catalog.tensor_at(positions[0] as usize);
        let dim = dim_of(join.map_or(0, |(_, dim)| dim), &first)
            .map_err(|why| fail(format!("{} {why}", quoted(first.name))))?;
        if let Some(other) = there().find(|other| !may_join(&first, other, dim)) {
            return Err(fail(format!(
                "{} is {} {:?} and {} is {} {:?}; tensors that are joined in dimension {dim} have \
                 one dtype and the same sizes in all other dimensions",
                quoted(first.name),
                first.dtype,
                first.shape,
                quoted(other.name),
                other.dtype,
                other.shape,
            )));
        }
        let size = |position: u32| catalog.tensor_at(position as usize).shape[dim];
        let total = positions.iter().try_fold(0_u64, |sum, &at| sum.checked_add(size(at)));
        if total.is_none() {
            return Err(fail(format!("the sizes in dimension {dim} pass 2^64")));
        }
        let whole = positions.iter().map(|&position| (position, 0..size(position))).collect();
        let parts = Some(Box::new(TensorParts { dim, parts: whole }));
        Ok(NamedTensor { name, position: positions[0], parts, rule: Some(rule) })
    }

    /// Sorts `named` by name. Refuses two tensors with the same name.
    fn sorted<R>(
        &self,
        catalog: &Catalog,
        mut named: Vec<NamedTensor>,
        table: &RuleTable<R>,
    ) -> Result<Vec<NamedTensor>, Fault> {
        named.sort_unstable_by(|a, b| (&a.name, a.position).cmp(&(&b.name, b.position)));
        if let Some([first, second]) = named.windows(2).find(|pair| pair[0].name == pair[1].name) {
            let was = |one: &NamedTensor| quoted(catalog.tensor_at(one.position as usize).name);
            let rule = |one: &NamedTensor| match one.rule {
                Some(rule) => format!("by {}", table.label(rule)),
                None => "by no rule".to_owned(),
            };
            let message = format!(
                "rename={}: is the name of {} ({}) and of {} ({})",
                shown_path(&self.path),
                was(first),
                rule(first),
                was(second),
                rule(second)
            );
            return Err(ErrorKind::View.fault(message).tensor(&first.name));
        }
        Ok(named)
    }
}

impl PartialEq for RenameRules {
    fn eq(&self, other: &RenameRules) -> bool {
        (&self.path, self.digest) == (&other.path, other.digest)
    }
}

impl Eq for RenameRules {}

/// The sizes of the parts into which a dimension of `size` indices is split.
fn part_sizes(sizes: Option<&[u64]>, count: u64, size: u64) -> Result<Vec<u64>, String> {
    match sizes {
        Some(sizes) => match sizes.iter().try_fold(0_u64, |sum, &one| sum.checked_add(one)) {
            Some(sum) if sum == size => Ok(sizes.to_vec()),
            _ => Err(format!("sizes {sizes:?} do not add up to {size}")),
        },
        None if size.is_multiple_of(count) => Ok(vec![size / count; count as usize]),
        None => Err(format!("{count} equal parts do not add up to {size}")),
    }
}

/// Whether two tensors can be joined along the dimension `dim`.
fn may_join(first: &Tensor<'_>, other: &Tensor<'_>, dim: usize) -> bool {
    let same = |at: usize| at == dim || first.shape[at] == other.shape[at];
    (first.dtype, first.facts()) == (other.dtype, other.facts())
        && first.shape.len() == other.shape.len()
        && (0..first.shape.len()).all(same)
}
