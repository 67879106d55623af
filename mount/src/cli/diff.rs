//! `tensorfs diff`: finds the tensors in which two checkpoints differ.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use tensorfs::Dtype;
use tensorfs::internal::catalog::Tensor;
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::consolidate::{Contents, TensorDigests};
use tensorfs::internal::error::{real_name, shown_path};
use tensorfs::internal::sweep::Sweep;

use super::args;
use super::output::{Failure, Outcome, print_json, print_text, printable};
use super::sources::{begin_source_command, one_checkpoint};
use super::verify::bar;

/// One of the two checkpoints.
struct DiffSide {
    checkpoint: Arc<Checkpoint>,
    contents: Contents,
    /// Hashes of the tensors whose bytes are compared, by position in the catalog.
    digests: HashMap<usize, TensorDigests>,
}

/// A tensor that both checkpoints have.
struct Pair {
    /// Positions of the tensor in the first and in the second catalog.
    first: usize,
    second: usize,
    same_shape: bool,
    same_dtype: bool,
    /// Whether the bytes are equal. `None` if they are not compared.
    same_bytes: Option<bool>,
}

impl Pair {
    fn differs(&self) -> bool {
        !self.same_shape || !self.same_dtype || self.same_bytes == Some(false)
    }
}

/// The differences between the two checkpoints.
#[derive(Default)]
struct Difference {
    pairs: Vec<Pair>,
    /// Positions in the first catalog of tensors that the second one lacks.
    gone: Vec<usize>,
    /// Positions in the second catalog of tensors that the first one lacks.
    added: Vec<usize>,
    /// Positions in both catalogs of tensors that are equal but have different names.
    renamed: Vec<(usize, usize)>,
    /// Number of bytes that were read.
    read: u64,
}

pub(super) fn run(args: &args::DiffArgs) -> Outcome {
    let mut options = begin_source_command(&args.source, &args::DIFF)?;
    options.keep_secret().map_err(Failure::Failed)?;
    let (settings, store) = (options.settings(), options.index_dir.folder());
    let side = |path: &Path, options| -> Result<DiffSide, Failure> {
        let named = args::SourceArgs { source: path.to_owned(), ..args.source.clone() };
        let (checkpoint, ..) = one_checkpoint(&named, options)?;
        let contents = Contents::new(&checkpoint, store.as_deref().filter(|_| !args.bytes));
        Ok(DiffSide { checkpoint, contents, digests: HashMap::new() })
    };
    let mut first = side(&args.source.source, options.clone())?;
    let mut second = side(&args.other, options)?;
    let mut found = by_name(&first, &second);
    if !args.headers {
        compare_bytes(&mut first, &mut second, &mut found, &Sweep::new(settings), args.progress)?;
    }
    let differs = found.pairs.iter().any(Pair::differs)
        || !found.gone.is_empty()
        || !found.added.is_empty()
        || !found.renamed.is_empty();
    if args.source.json {
        print_json(&to_json(args, &first, &second, &found, differs))?;
    } else if differs {
        print_text(&to_text(args, &first, &second, &found))?;
    }
    if differs { Err(Failure::Told) } else { Ok(()) }
}

fn by_name(first: &DiffSide, second: &DiffSide) -> Difference {
    let mut found = Difference::default();
    let (old, new) = (first.checkpoint.catalog(), second.checkpoint.catalog());
    for tensor in old.tensors() {
        match new.tensor(tensor.name) {
            Some(other) => found.pairs.push(Pair {
                first: tensor.position(),
                second: other.position(),
                same_shape: tensor.shape == other.shape,
                same_dtype: tensor.dtype == other.dtype,
                same_bytes: None,
            }),
            None => found.gone.push(tensor.position()),
        }
    }
    let added = new.tensors().filter(|tensor| old.tensor(tensor.name).is_none());
    found.added = added.map(|tensor| tensor.position()).collect();
    found
}

/// Dtype and shape. A renamed tensor has the same form as before.
type Form = (Dtype, Vec<u64>);

fn form_of(tensor: &Tensor<'_>) -> Form {
    (tensor.dtype, tensor.shape.to_vec())
}

/// Compares the bytes of the pairs that have the same form, and finds renamed tensors.
fn compare_bytes(
    first: &mut DiffSide,
    second: &mut DiffSide,
    found: &mut Difference,
    sweep: &Sweep,
    progress: args::When,
) -> Result<(), Failure> {
    let is_known_same = |pair: &Pair| {
        let old = first.checkpoint.catalog().tensor_at(pair.first);
        let new = second.checkpoint.catalog().tensor_at(pair.second);
        let are_zeros = zeros_of(&old).is_some_and(|zeros| zeros_of(&new) == Some(zeros));
        are_zeros || places(&first.checkpoint, &old) == places(&second.checkpoint, &new)
    };
    let (mut old_wanted, mut new_wanted) = (Vec::new(), Vec::new());
    for pair in found.pairs.iter_mut().filter(|pair| pair.same_shape && pair.same_dtype) {
        if is_known_same(pair) {
            pair.same_bytes = Some(true);
        } else {
            old_wanted.push(pair.first);
            new_wanted.push(pair.second);
        }
    }
    found.find_renamed_zeros(first, second);
    let forms = |side: &DiffSide, positions: &[usize]| -> Vec<Form> {
        positions.iter().map(|&at| form_of(&side.checkpoint.catalog().tensor_at(at))).collect()
    };
    let (gone_forms, added_forms) = (forms(first, &found.gone), forms(second, &found.added));
    let fitting = |positions: &[usize], forms: &[Form], others: &[Form]| -> Vec<usize> {
        let others: HashSet<&Form> = others.iter().collect();
        let fits = positions.iter().zip(forms).filter(|(_, form)| others.contains(form));
        fits.map(|(&position, _)| position).collect()
    };
    let gone = fitting(&found.gone, &gone_forms, &added_forms);
    let added = fitting(&found.added, &added_forms, &gone_forms);
    old_wanted.extend(&gone);
    new_wanted.extend(&added);
    let bar = bar(progress, first.unknown(&old_wanted) + second.unknown(&new_wanted));
    let mut advance = |bytes| {
        bar.inc(bytes);
        Ok(())
    };
    found.read = first.hash(sweep, &old_wanted, &mut advance)?;
    found.read += second.hash(sweep, &new_wanted, &mut advance)?;
    bar.finish_and_clear();
    for pair in found.pairs.iter_mut().filter(|pair| pair.same_bytes.is_none()) {
        if let Some(old) = first.digests.get(&pair.first) {
            pair.same_bytes = Some(second.digests.get(&pair.second) == Some(old));
        }
    }
    found.find_renamed(first, second);
    Ok(())
}

/// The stored dtype of a tensor of zeros, of which no shard has bytes. `None` for any other tensor.
/// Two such tensors have the same bytes if they have the same form and the same stored dtype.
fn zeros_of(tensor: &Tensor<'_>) -> Option<Dtype> {
    (tensor.len > 0 && tensor.is_stored_zeros()).then_some(tensor.stored)
}

/// The places of the pieces of a tensor. Hard links and links to the same file have equal places.
fn places(checkpoint: &Checkpoint, tensor: &Tensor<'_>) -> Vec<impl PartialEq + use<>> {
    let place = |piece: tensorfs::Piece<'_>| {
        let version = checkpoint.sources()[piece.shard.0 as usize].version();
        let strides = piece.strides.unwrap_or_default();
        let lists = [piece.offset, piece.shape, strides].map(<[u64]>::to_vec);
        (version.file(), piece.range, lists)
    };
    tensor.pieces().map(place).collect()
}

impl DiffSide {
    /// Number of bytes of the tensors at `positions` that have no recorded hash.
    fn unknown(&self, positions: &[usize]) -> u64 {
        let tensors = positions.iter().map(|&at| self.checkpoint.catalog().tensor_at(at));
        let unknown = tensors.filter(|tensor| self.contents.recorded(tensor).is_none());
        unknown.map(|tensor| tensor.len).sum()
    }

    /// Sets the hashes of the tensors at `positions`: recorded hashes, or hashes of the bytes,
    /// which are read. Returns the number of bytes that were read.
    fn hash(
        &mut self,
        sweep: &Sweep,
        positions: &[usize],
        progress: &mut dyn FnMut(u64) -> tensorfs::Result<()>,
    ) -> Result<u64, Failure> {
        let mut unknown = Vec::new();
        for &position in positions {
            match self.contents.recorded(&self.checkpoint.catalog().tensor_at(position)) {
                Some(digests) => drop(self.digests.insert(position, digests)),
                None => unknown.push(position),
            }
        }
        let read = self.contents.read(sweep, &unknown, progress)?;
        let len = |&position: &usize| self.checkpoint.catalog().tensor_at(position).len;
        let bytes = unknown.iter().map(len).sum();
        self.digests.extend(unknown.into_iter().zip(read));
        Ok(bytes)
    }
}

impl Difference {
    /// Moves zero tensors, which no shard contains, from `gone` and `added` to `renamed` if their
    /// bytes are equal.
    fn find_renamed_zeros(&mut self, first: &DiffSide, second: &DiffSide) {
        let key = |side: &DiffSide, position: usize| {
            let tensor = side.checkpoint.catalog().tensor_at(position);
            zeros_of(&tensor).map(|stored| (form_of(&tensor), stored))
        };
        self.take_renamed(|old| key(first, old), |new| key(second, new));
    }

    /// Moves tensors with equal form and bytes from `gone` and `added` to `renamed`. A tensor
    /// without bytes is equal to any other of its form, so it is not moved.
    fn find_renamed(&mut self, first: &DiffSide, second: &DiffSide) {
        let key = |side: &DiffSide, position: usize| {
            let tensor = side.checkpoint.catalog().tensor_at(position);
            let digests = side.digests.get(&position).filter(|digests| !digests.is_empty());
            digests.map(|digests| (form_of(&tensor), digests.clone()))
        };
        self.take_renamed(|old| key(first, old), |new| key(second, new));
    }

    /// Moves tensors with equal keys from `gone` and `added` to `renamed`, in the order of their
    /// positions.
    fn take_renamed<K: Eq + std::hash::Hash>(
        &mut self,
        old_key: impl Fn(usize) -> Option<K>,
        new_key: impl Fn(usize) -> Option<K>,
    ) {
        let mut by_content: HashMap<K, Vec<usize>> = HashMap::new();
        for &position in self.added.iter().rev() {
            if let Some(key) = new_key(position) {
                by_content.entry(key).or_default().push(position);
            }
        }
        for &position in &self.gone {
            let same = old_key(position).and_then(|key| by_content.get_mut(&key)?.pop());
            self.renamed.extend(same.map(|same| (position, same)));
        }
        let (old, new): (HashSet<usize>, HashSet<usize>) = self.renamed.iter().copied().unzip();
        self.gone.retain(|position| !old.contains(position));
        self.added.retain(|position| !new.contains(position));
    }
}

fn described(tensor: &Tensor<'_>) -> String {
    format!("{}  {} {:?}", printable(tensor.name), tensor.dtype.name(), tensor.shape)
}

fn to_text(
    args: &args::DiffArgs,
    first: &DiffSide,
    second: &DiffSide,
    found: &Difference,
) -> String {
    let (old, new) = (first.checkpoint.catalog(), second.checkpoint.catalog());
    let mut text = format!("--- {}\n", shown_path(&args.source.source));
    let _ = writeln!(text, "+++ {}", shown_path(&args.other));
    for &position in &found.gone {
        let _ = writeln!(text, "- {}", described(&old.tensor_at(position)));
    }
    for &position in &found.added {
        let _ = writeln!(text, "+ {}", described(&new.tensor_at(position)));
    }
    for &(before, after) in &found.renamed {
        let (before, after) = (old.tensor_at(before), new.tensor_at(after));
        let _ = writeln!(text, "> {} is now {}", described(&before), printable(after.name));
    }
    for pair in found.pairs.iter().filter(|pair| pair.differs()) {
        let (before, after) = (old.tensor_at(pair.first), new.tensor_at(pair.second));
        let mut changes = Vec::new();
        if !pair.same_dtype {
            changes.push(format!("{} to {}", before.dtype.name(), after.dtype.name()));
        }
        if !pair.same_shape {
            changes.push(format!("{:?} to {:?}", before.shape, after.shape));
        }
        if pair.same_bytes == Some(false) {
            changes.push("other bytes".to_owned());
        }
        let _ = writeln!(text, "! {}  {}", printable(before.name), changes.join(", "));
    }
    let changed = found.pairs.iter().filter(|pair| pair.differs()).count();
    let _ = writeln!(
        text,
        "{} gone, {} added, {} renamed, {changed} changed, {} the same",
        found.gone.len(),
        found.added.len(),
        found.renamed.len(),
        found.pairs.len() - changed
    );
    text
}

fn to_json(
    args: &args::DiffArgs,
    first: &DiffSide,
    second: &DiffSide,
    found: &Difference,
    differs: bool,
) -> Value {
    let (old, new) = (first.checkpoint.catalog(), second.checkpoint.catalog());
    let tensor = |tensor: Tensor<'_>| {
        json!({
            "name": tensor.name,
            "dtype": tensor.dtype.name(),
            "shape": tensor.shape,
            "bytes": tensor.len,
        })
    };
    let renamed = found.renamed.iter().map(|&(before, after)| {
        let mut json = tensor(old.tensor_at(before));
        json["new_name"] = json!(new.tensor_at(after).name);
        json
    });
    let changes = found.pairs.iter().filter(|pair| pair.differs()).map(|pair| {
        let (before, after) =
            (tensor(old.tensor_at(pair.first)), tensor(new.tensor_at(pair.second)));
        json!({
            "name": before["name"],
            "dtype": [before["dtype"], after["dtype"]],
            "shape": [before["shape"], after["shape"]],
            "bytes_differ": pair.same_bytes.map(|same| !same),
        })
    });
    let changed: Vec<Value> = changes.collect();
    json!({
        "source": real_name(&args.source.source),
        "other": real_name(&args.other),
        "ok": true,
        "class": Value::Null,
        "error": Value::Null,
        "same": !differs,
        "same_tensors": found.pairs.len() - changed.len(),
        "gone": found.gone.iter().map(|&at| tensor(old.tensor_at(at))).collect::<Vec<_>>(),
        "added": found.added.iter().map(|&at| tensor(new.tensor_at(at))).collect::<Vec<_>>(),
        "renamed": renamed.collect::<Vec<_>>(),
        "changed": changed,
        "bytes_compared": !args.headers,
        "bytes_read": found.read,
    })
}
