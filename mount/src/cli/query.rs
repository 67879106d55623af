//! `tensorfs ls` and `tensorfs inspect`: list the tensors of a source and where their data is
//! stored.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

use serde_json::{Value, json};
use tensorfs::Error;
use tensorfs::internal::catalog::{Piece, Tensor};
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::error::{counted, real_name, shown, shown_path};
use tensorfs::internal::size::shown_size;
use tensorfs::internal::strided::{OuterBox, StridedCopy};

use super::args;
use super::columns::{Column, ColumnKind, TableRow, TextTable, bytes_cell};
use super::output::{Failure, Outcome, print_json, print_text, printable, tell_refusals};
use super::sources::{FoundSet, begin_source_command, open_source_with_views, prove_all};

/// A tensor and its position in the file that shows it.
struct TensorPlace<'a> {
    tensor: Tensor<'a>,
    /// Offset of the tensor in that file.
    file_offset: u64,
}

/// A checkpoint and the file that shows it.
struct Shown {
    directory: String,
    checkpoint: Arc<Checkpoint>,
    /// Length of the file in bytes.
    size: u64,
    data_start: u64,
    /// For each tensor in the order of the file: its position in the catalog, and its offset in the
    /// file.
    order: Vec<(usize, u64)>,
}

pub(super) fn ls(args: &args::LsArgs) -> Outcome {
    let ListedSource { shown, notes, refused } = look(&args.source, &args::LS)?;
    if args.source.json {
        let sets: Vec<Value> = shown.iter().map(|set| set.json(&|p| set.tensor_json(p))).collect();
        print_answer(&args.source, sets, notes, &refused)?;
    } else if args.short || (!args.long && shown.len() + refused.len() > 1) {
        short(&shown, &refused).print()?;
        print_text(&text_of(&notes))?;
    } else {
        let mut text = String::new();
        for set in &shown {
            set.write_title(&mut text);
            for TensorPlace { tensor, .. } in set.tensors() {
                let name = printable(tensor.name);
                let shape = format!("{:?}", tensor.shape);
                let _ = writeln!(
                    text,
                    "  {:<11} {shape:<20} {:>10}  {name}",
                    tensor.dtype.name(),
                    shown_size(tensor.len)
                );
            }
        }
        text.push_str(&text_of(&notes));
        print_text(&text)?;
    }
    tell_refusals(refused.iter().map(|(_, _, error)| error))
}

/// A table with one line for each checkpoint.
fn short(shown: &[Shown], refused: &[(String, String, Error)]) -> TextTable {
    use ColumnKind::{Name, Number, Word};
    let column = |title, rank, kind| Column { title, min: 0, rank, kind };
    let of_set = |set: &Shown| {
        let catalog = set.checkpoint.catalog();
        let mut dtypes = Vec::new();
        for tensor in catalog.tensors() {
            if !dtypes.contains(&tensor.dtype) {
                dtypes.push(tensor.dtype);
            }
        }
        let dtype_names: Vec<_> = dtypes.iter().map(|dtype| dtype.name()).collect();
        vec![
            path_of(&set.directory, &set.checkpoint.name),
            catalog.len().to_string(),
            bytes_cell(catalog.data_len()),
            dtype_names.join(","),
            catalog.shards.len().to_string(),
            set.checkpoint.tail.as_str().to_owned(),
        ]
    };
    let of_refused = |(directory, name, _): &(String, String, Error)| {
        let unknown = std::iter::repeat_n("-".to_owned(), 4);
        let path = path_of(directory, name);
        std::iter::once(path).chain(unknown).chain(["refused".to_owned()]).collect()
    };
    let mut rows: Vec<Vec<String>> =
        shown.iter().map(of_set).chain(refused.iter().map(of_refused)).collect();
    rows.sort();
    TextTable {
        columns: vec![
            column("CHECKPOINT", 0, Name),
            column("TENSORS", 3, Number),
            column("BYTES", 1, Number),
            column("DTYPES", 4, Name),
            column("SHARDS", 5, Number),
            column("TAIL", 2, Word),
        ],
        rows: rows.into_iter().map(TableRow::Cells).collect(),
    }
}

/// The path of a checkpoint below the source, as text for people.
fn path_of(directory: &str, name: &str) -> String {
    let slash = if directory.is_empty() { "" } else { "/" };
    format!("{}{slash}{}", shown(directory), shown(name))
}

pub(super) fn inspect(args: &args::InspectArgs) -> Outcome {
    let ListedSource { shown, notes, refused } = look(&args.source, &args::INSPECT)?;
    let wanted =
        |placed: &TensorPlace<'_>| args.tensor.as_ref().is_none_or(|n| n == placed.tensor.name);
    let found = shown.iter().any(|set| set.tensors().any(|placed| wanted(&placed)));
    if let (Some(name), false) = (&args.tensor, found) {
        if let Some((_, _, error)) = refused.into_iter().next() {
            return Err(Failure::Error(error));
        }
        let source = shown_path(&args.source.source);
        return Err(Failure::Failed(format!(
            "{source}: no tensor {}",
            tensorfs::internal::error::quoted(name)
        )));
    }
    if args.source.json {
        let all = args.tensor.is_none();
        let sets: Vec<Value> = shown
            .iter()
            .filter(|set| all || set.tensors().any(|placed| wanted(&placed)))
            .map(|set| {
                let mut json = set.json(&|placed| set.inspected_json(placed));
                if let Some(Value::Array(tensors)) = json.get_mut("tensors") {
                    let name = |t: &Value| t["name"].as_str().map(str::to_owned);
                    tensors.retain(|t| all || name(t) == args.tensor);
                }
                json
            })
            .collect();
        print_answer(&args.source, sets, notes, &refused)?;
    } else {
        let mut text = String::new();
        for set in &shown {
            set.write_title(&mut text);
            let ties = set.ties();
            set.tensors()
                .filter(wanted)
                .for_each(|placed| set.write_pieces(&placed, &ties, &mut text));
        }
        text.push_str(&text_of(&notes));
        print_text(&text)?;
    }
    tell_refusals(refused.iter().map(|(_, _, error)| error))
}

/// The notes as lines of text for people.
fn text_of(notes: &[String]) -> String {
    notes.iter().map(|note| format!("note: {}\n", shown(note))).collect()
}

/// The checkpoints of a source, and notes about them.
struct ListedSource {
    /// The proved sets.
    shown: Vec<Shown>,
    notes: Vec<String>,
    /// The refused sets: folder, name and reason.
    refused: Vec<(String, String, Error)>,
}

fn look(args: &args::SourceArgs, command: &args::SourceCommand) -> Result<ListedSource, Failure> {
    let options = begin_source_command(args, command)?;
    let tree = open_source_with_views(args, options)?;
    let (found, notes) = prove_all(&tree)?;
    let mut looked = ListedSource { shown: Vec::new(), notes, refused: Vec::new() };
    for FoundSet { directory, set } in found {
        let directory = real_name(&directory);
        let shown = set.outcome.and_then(|checkpoint| Shown::new(directory.clone(), checkpoint));
        match shown {
            Ok(shown) => looked.shown.push(shown),
            Err(error) => looked.refused.push((directory, set.name, error)),
        }
    }
    Ok(looked)
}

fn print_answer(
    args: &args::SourceArgs,
    sets: Vec<Value>,
    notes: Vec<String>,
    refused: &[(String, String, Error)],
) -> Outcome {
    let path = std::fs::canonicalize(&args.source).unwrap_or_else(|_| args.source.clone());
    let refused_sets = refused.iter().map(|(directory, name, error)| {
        json!({
            "directory": directory,
            "name": name,
            "ok": false,
            "class": error.kind().as_str(),
            "error": error.to_string(),
            "file": error.path().map(real_name),
            "tensor": error.tensor(),
        })
    });
    let first = refused.first().map(|(_, _, error)| error);
    print_json(&json!({
        "source": real_name(&path),
        "ok": refused.is_empty(),
        "class": first.map(|error| error.kind().as_str()),
        "error": first.map(Error::to_string),
        "sets": sets,
        "refused": refused_sets.collect::<Vec<_>>(),
        "notes": notes,
    }))
}

impl Shown {
    fn new(directory: String, checkpoint: Arc<Checkpoint>) -> Result<Shown, Error> {
        if checkpoint.is_whole_file() {
            let catalog = checkpoint.catalog();
            let tensors = catalog.tensors().enumerate();
            let mut order: Vec<(usize, u64)> =
                tensors.map(|(index, tensor)| (index, tensor.first_piece().range.start)).collect();
            order.sort_by_key(|&(index, offset)| (offset, catalog.tensor_at(index).len));
            let shard = &catalog.shards[0];
            let (size, data_start) = (shard.file_len, shard.description_end());
            return Ok(Shown { directory, size, data_start, order, checkpoint });
        }
        let layout = checkpoint.single_file().layout()?;
        let (size, data_start) = (layout.len(), layout.header().len() as u64);
        Ok(Shown { directory, size, data_start, order: layout.tensors().collect(), checkpoint })
    }

    fn tensors(&self) -> impl Iterator<Item = TensorPlace<'_>> {
        let catalog = self.checkpoint.catalog();
        let placed =
            |&(index, file_offset)| TensorPlace { tensor: catalog.tensor_at(index), file_offset };
        self.order.iter().map(placed)
    }

    fn json(&self, tensor: &dyn Fn(&TensorPlace<'_>) -> Value) -> Value {
        let catalog = self.checkpoint.catalog();
        json!({
            "directory": self.directory,
            "name": self.checkpoint.name,
            "kind": self.checkpoint.kind.as_str(),
            "size": self.size,
            "bytes": catalog.data_len(),
            "shards": catalog.shards.iter().map(|shard| &shard.name).collect::<Vec<_>>(),
            "metadata": catalog.metadata.as_deref().cloned().unwrap_or_default(),
            "tail": self.checkpoint.tail.as_str(),
            "tensors": self.tensors().map(|placed| tensor(&placed)).collect::<Vec<_>>(),
        })
    }

    fn tensor_json(&self, placed: &TensorPlace<'_>) -> Value {
        let TensorPlace { tensor, file_offset } = placed;
        let start = file_offset - self.data_start;
        json!({
            "name": tensor.name,
            "dtype": tensor.dtype.name(),
            "shape": tensor.shape,
            "bytes": tensor.len,
            "data_offsets": [start, start + tensor.len],
        })
    }

    fn inspected_json(&self, placed: &TensorPlace<'_>) -> Value {
        let mut json = self.tensor_json(placed);
        json["file_offset"] = json!(placed.file_offset);
        json["pieces"] = self.pieces_json(&placed.tensor, placed.tensor.pieces());
        json["replicas"] = self.pieces_json(&placed.tensor, placed.tensor.replicas());
        json
    }

    fn pieces_json<'a>(
        &self,
        tensor: &Tensor<'_>,
        pieces: impl Iterator<Item = Piece<'a>>,
    ) -> Value {
        let pieces = pieces.map(|piece| {
            let (runs, run_bytes) = runs_of(tensor, &piece);
            json!({
                "shard": self.checkpoint.catalog().shard(piece.shard).name,
                "range": (!piece.is_zeros()).then_some([piece.range.start, piece.range.end]),
                "offset": piece.offset,
                "shape": piece.shape,
                "strides": piece.strides,
                "runs": runs,
                "run_bytes": run_bytes,
            })
        });
        pieces.collect()
    }

    fn write_title(&self, text: &mut String) {
        let catalog = self.checkpoint.catalog();
        let _ = writeln!(
            text,
            "{}: {}, {} in {} ({}), tail {}",
            path_of(&self.directory, &self.checkpoint.name),
            counted(catalog.len(), "tensor"),
            shown_size(catalog.data_len()),
            counted(catalog.shards.len(), "shard"),
            self.checkpoint.kind.as_str(),
            self.checkpoint.tail.as_str(),
        );
    }

    /// The names of tensors that share their bytes with an earlier tensor, each with the name of that
    /// tensor.
    fn ties(&self) -> HashMap<&str, &str> {
        // There may be millions of tensors, so only a few numbers are stored for each.
        let mut places: Vec<_> = self
            .tensors()
            .filter_map(|TensorPlace { tensor, .. }| {
                let piece = tensor.pieces().find(|piece| !piece.is_zeros() && tensor.len > 0)?;
                let place = (piece.shard, piece.range.start, piece.range.end, piece.strides);
                Some((place, tensor.shape, tensor.name))
            })
            .collect();
        places.sort_unstable();
        let same = places.chunk_by(|one, other| (one.0, one.1) == (other.0, other.1));
        let ties = same.flat_map(|same| same[1..].iter().map(|tied| (tied.2, same[0].2)));
        ties.collect()
    }

    fn write_pieces(
        &self,
        placed: &TensorPlace<'_>,
        ties: &HashMap<&str, &str>,
        text: &mut String,
    ) {
        let TensorPlace { tensor, file_offset } = placed;
        let tied = ties.get(tensor.name);
        let _ = writeln!(
            text,
            "  {} {} {:?}, {} bytes at {file_offset}{}",
            printable(tensor.name),
            tensor.dtype,
            tensor.shape,
            tensor.len,
            tied.map_or_else(String::new, |name| format!(", tied to {}", printable(name)))
        );
        let used = tensor.pieces().map(|piece| (piece, ""));
        let copies = tensor.replicas().map(|piece| (piece, ", a copy"));
        for (piece, remark) in used.chain(copies) {
            let (runs, run_bytes) = runs_of(tensor, &piece);
            let stored = match piece.is_contiguous() {
                true => String::new(),
                false => format!(" with strides {:?}", piece.strides.unwrap_or_default()),
            };
            let bytes = match piece.is_zeros() {
                true => "the shape only, read as zeros".to_owned(),
                false => format!("bytes {}..{}", piece.range.start, piece.range.end),
            };
            let _ = writeln!(
                text,
                "    {} {bytes}: box {:?} at {:?}{stored}, {runs} runs of {run_bytes} bytes{remark}",
                shown(&self.checkpoint.catalog().shard(piece.shard).name),
                piece.shape,
                piece.offset,
            );
        }
    }
}

/// Number and length of the contiguous runs of a piece in its tensor.
fn runs_of(tensor: &Tensor<'_>, piece: &Piece<'_>) -> (u64, u64) {
    if piece.shape.contains(&0) {
        return (0, 0);
    }
    let to = OuterBox { shape: tensor.shape, offset: piece.offset };
    match StridedCopy::of_piece(piece.strides, to, piece.shape, tensor.stored.bits()) {
        Ok(runs) => (runs.count(), runs.run_len()),
        // Only a checkpoint with `layout=original` can have pieces that cannot be cut into runs.
        Err(_) => (1, piece.len()),
    }
}
