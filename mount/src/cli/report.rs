//! `tensorfs report`: writes an HTML page that shows where the tensors of a checkpoint are stored.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use tensorfs::Error;
use tensorfs::internal::atomic_file::TemporaryFile;
use tensorfs::internal::catalog::{Shard, Tensor};
use tensorfs::internal::checkpoint::{Checkpoint, Set, Tree};
use tensorfs::internal::consolidate::{Contents, SourceFiles, refuse_url};
use tensorfs::internal::error::{real_name, shown_path};
use tensorfs::internal::open_options::OpenOptions;
use tensorfs::internal::source::CopyMode;
use tensorfs::internal::view::View;

use super::args;
use super::output::{Failure, Outcome, print_json, print_text, reported, tell_refusals};
use super::sources::{
    FoundSet, begin_source_command, open_source, prove_all, refuse_several_views,
};

/// The page, with placeholders for its parts.
const PAGE: &str = include_str!("report/page.html");
const STYLE: &str = include_str!("report/page.css");
const SCRIPT: &str = include_str!("report/page.js");

/// Number of bytes at the start of every page by which an earlier report is recognized.
const PAGE_START: usize = 96;

pub(super) fn run(args: &args::ReportArgs) -> Outcome {
    let mut options = begin_source_command(&args.source, &args::REPORT)?;
    let mut named: Vec<PathBuf> = options.paths().map(|path| path.clone()).collect();
    named.extend(options.open.view.files_read().map(|(path, _)| path.to_owned()));
    refuse_url(&args.html)?;
    let replaces_report = check_target(args)?;
    refuse_several_views(&args.source)?;
    let tree = open_source(&args.source, options)?;
    if !replaces_report && args.html.exists() {
        SourceFiles::and_beside(&tree).with_origin()?.keep(&args.html)?;
        keep_named(&named, &args.html)?;
    }
    let (found, mut notes) = prove_all(&tree)?;
    let (mut sets, mut refused) = (Vec::new(), Vec::new());
    let mut mode = CopyMode::default();
    for FoundSet { directory, set } in found {
        add_files(&mut mode, &tree, &directory, &set);
        let described = set.outcome.and_then(|checkpoint| {
            let stored = stored_form(&tree, &directory, &checkpoint)?;
            describe(&tree, &directory, &checkpoint, stored.as_deref())
        });
        match described {
            Ok(described) => sets.push(described),
            Err(error) => refused.push(error),
        }
    }
    if sets.is_empty() {
        let error = refused.into_iter().next();
        return Err(error.unwrap_or_else(|| Error::usage(tree.nothing_found())).into());
    }
    notes.extend(refused.iter().map(|error| format!("refused: {error}")));
    let tensors: usize = sets.iter().map(|set| set["names"].as_array().map_or(0, Vec::len)).sum();
    let report = json!({
        "source": real_name(&tree.source),
        "options": args.source.options,
        "sets": sets,
        "notes": notes,
    });
    let page = page(&report);
    let written = write(&args.html, page.as_bytes(), mode);
    written.map_err(|e| Failure::at(&args.html, format_args!("cannot write: {e}")))?;
    let printed = if args.source.json {
        print_json(&json!({
            "source": real_name(&args.source.source),
            "ok": refused.is_empty(),
            "class": refused.first().map(|error| error.kind().as_str()),
            "error": refused.first().map(Error::to_string),
            "path": real_name(&args.html),
            "sets": sets_len(&report),
            "tensors": tensors,
            "bytes": page.len(),
            "notes": notes,
        }))
    } else {
        print_text(&format!("{}: {tensors} tensors\n", shown_path(&args.html)))
    };
    reported(&args.html, printed)?;
    tell_refusals(refused.iter())
}

fn sets_len(report: &Value) -> usize {
    report["sets"].as_array().map_or(0, Vec::len)
}

/// The page with `report` as its data. Names in the data may contain any characters, even the end
/// tag of a script.
fn page(report: &Value) -> String {
    let mut data = String::new();
    for c in report.to_string().chars() {
        match c {
            // In JSON these characters occur only in strings, and there they can be written as
            // escapes.
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                data.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            _ => data.push(c),
        }
    }
    let (before, rest) = PAGE.split_once("@DATA@").unwrap_or((PAGE, ""));
    let fill = |text: &str| text.replace("@STYLE@", STYLE).replace("@SCRIPT@", SCRIPT);
    fill(before) + &data + &fill(rest)
}

/// Refuses to replace a file that is not a report. Returns whether there is a report.
fn check_target(args: &args::ReportArgs) -> Result<bool, Failure> {
    let Ok(meta) = std::fs::metadata(&args.html) else { return Ok(false) };
    let mut start = Vec::new();
    if meta.is_file()
        && let Ok(file) = std::fs::File::open(&args.html)
    {
        let _ = file.take(PAGE_START as u64).read_to_end(&mut start);
    }
    let is_report = !start.is_empty() && PAGE.as_bytes().starts_with(&start);
    if is_report || (args.force && meta.is_file()) {
        return Ok(is_report);
    }
    let advice = if meta.is_file() { "; remove it, or ask to replace it (--force)" } else { "" };
    let shown = shown_path(&args.html);
    Err(Failure::Failed(format!("{shown}: is there already, and is no report{advice}")))
}

/// Refuses to replace a file that an option names.
fn keep_named(named: &[PathBuf], target: &Path) -> Result<(), Failure> {
    if !SourceFiles::default().with(named.iter().map(PathBuf::as_path)).contains(target) {
        return Ok(());
    }
    Err(Failure::at(target, "is a file that an option names; write somewhere else"))
}

/// Adds the files of a set to the files whose readers may read the page: the page contains their
/// names and tensors.
fn add_files(mode: &mut CopyMode, tree: &Tree, directory: &Path, set: &Set) {
    let ids = tree.ids().into_iter().map(|id| tree.folder(id));
    for folder in ids.filter(|folder| folder.relative == directory) {
        for file in set.files.iter().filter_map(|name| folder.file(name)) {
            if let Ok(meta) = std::fs::metadata(&file.path) {
                mode.add(&meta, &file.path);
            }
        }
    }
}

/// Writes the page with a mode that lets in only users who may read all of its sources and the page
/// that it replaces.
fn write(path: &Path, page: &[u8], mut mode: CopyMode) -> std::io::Result<()> {
    if let Ok(there) = std::fs::metadata(path) {
        mode.add(&there, path);
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let bits = mode.in_folder(folder.unwrap_or(Path::new(".")));
    let mut file = TemporaryFile::create_beside(path, bits)?;
    mode.narrow(file.file())?;
    file.file().write_all(page)?;
    file.publish(path, true)
}

/// The checkpoint without the view. `None` if there is no view.
fn stored_form(
    tree: &Tree,
    directory: &Path,
    checkpoint: &Checkpoint,
) -> Result<Option<Arc<Checkpoint>>, Error> {
    if tree.options.view == View::default() {
        return Ok(None);
    }
    let options = OpenOptions { view: View::default(), ..tree.options.clone() };
    let tree = Tree::scan(&tree.source, &options)?;
    for head in tree.families() {
        for (id, proved) in tree.prove(head) {
            let mut sets = proved.sets.into_iter().filter_map(|set| set.outcome.ok());
            let same = |set: &Arc<Checkpoint>| {
                set.kind == checkpoint.kind && set.sources().len() == checkpoint.sources().len()
            };
            if tree.folder(id).relative == directory
                && let Some(set) = sets.find(same)
            {
                return Ok(Some(set));
            }
        }
    }
    Ok(None)
}

/// A list of values in which equal values are stored only once.
#[derive(Default)]
struct Table {
    values: Vec<Value>,
    known: HashMap<String, usize>,
}

impl Table {
    fn number(&mut self, value: Value) -> usize {
        let next = self.values.len();
        let number = *self.known.entry(value.to_string()).or_insert(next);
        if number == next {
            self.values.push(value);
        }
        number
    }
}

/// Number of a file, and offset in it.
type FilePlace = (usize, u64);

/// The files that show a checkpoint, and for each tensor its file and offset.
fn files_of(checkpoint: &Arc<Checkpoint>) -> Result<(Vec<Value>, Vec<FilePlace>), Error> {
    let catalog = checkpoint.catalog();
    let mut places = vec![(0, 0); catalog.len()];
    let mut files = Vec::new();
    for file in checkpoint.virtual_files() {
        let layout = file.layout()?;
        let mut tensors = 0;
        for (position, offset) in layout.tensors() {
            places[position] = (files.len(), offset);
            tensors += 1;
        }
        files.push(json!({
            "name": file.spec().name,
            "format": file.spec().format.as_str(),
            "size": layout.len(),
            "header": layout.header().len(),
            "tensors": tensors,
        }));
    }
    if !files.is_empty() {
        return Ok((files, places));
    }
    let mut counts = vec![0; catalog.shards.len()];
    for tensor in catalog.tensors() {
        let piece = tensor.first_piece();
        // Zeros that the file does not contain are addressed behind the end of the file.
        let start = piece.range.start.min(catalog.shard(piece.shard).file_len);
        places[tensor.position()] = (piece.shard.0 as usize, start);
        counts[piece.shard.0 as usize] += 1;
    }
    let shards = catalog.shards.iter().zip(counts).map(|(shard, tensors)| {
        json!({
            "name": shard.name,
            "format": checkpoint.format_of(shard).as_str(),
            "size": shard.file_len,
            "header": header_len(shard),
            "tensors": tensors,
        })
    });
    Ok((shards.collect(), places))
}

/// Number of bytes of a shard that are header and not data.
fn header_len(shard: &Shard) -> u64 {
    shard.described.iter().map(|range| range.end - range.start).sum()
}

/// A set in the format of the page: one column for each property of its tensors.
fn describe(
    tree: &Tree,
    directory: &Path,
    checkpoint: &Arc<Checkpoint>,
    stored: Option<&Checkpoint>,
) -> Result<Value, Error> {
    let catalog = checkpoint.catalog();
    let (files, places) = files_of(checkpoint)?;
    let (mut dtypes, mut shapes, mut boxes) =
        (Table::default(), Table::default(), Table::default());
    let mut widths = Vec::new();
    let [mut dtype, mut shape, mut first] = [Vec::new(), Vec::new(), vec![0]];
    let (mut piece_shard, mut piece_box) = (Vec::new(), Vec::new());
    let [mut piece_start, mut piece_end] = [Vec::new(), Vec::new()];
    let mut parameters = 0.0;
    let mut data = vec![0; catalog.shards.len()];
    for tensor in catalog.tensors() {
        dtype.push(dtypes.number(json!(tensor.dtype.name())));
        if widths.len() < dtypes.values.len() {
            widths.push(tensor.dtype.bits().div_ceil(8));
        }
        shape.push(shapes.number(json!(tensor.shape)));
        parameters += tensor.shape.iter().map(|&n| n as f64).product::<f64>();
        for piece in tensor.pieces().filter(|piece| !piece.is_zeros()) {
            let len = piece.len();
            data[piece.shard.0 as usize] += len;
            piece_shard.push(piece.shard.0);
            piece_start.push(piece.range.start);
            // The range includes the bytes between the rows of the piece.
            piece_end.push(piece.range.end);
            piece_box.push(boxes.number(json!([piece.offset, piece.shape])));
        }
        first.push(piece_shard.len());
    }
    let shards = catalog.shards.iter().zip(data).map(|(shard, data)| {
        json!({
            "name": shard.name, "size": shard.file_len, "header": header_len(shard), "data": data
        })
    });
    let contents = Contents::new(checkpoint, tree.options.index.as_deref());
    Ok(json!({
        "name": checkpoint.name,
        "directory": real_name(directory),
        "kind": checkpoint.kind.as_str(),
        "tail": checkpoint.tail.as_str(),
        "parameters": parameters,
        "files": files,
        "shards": shards.collect::<Vec<_>>(),
        "names": catalog.tensors().map(|tensor| tensor.name).collect::<Vec<_>>(),
        "bytes": catalog.tensors().map(|tensor| tensor.len).collect::<Vec<_>>(),
        "file": places.iter().map(|place| place.0).collect::<Vec<_>>(),
        "offset": places.iter().map(|place| place.1).collect::<Vec<_>>(),
        "dtypes": dtypes.values,
        "widths": widths,
        "dtype": dtype,
        "shapes": shapes.values,
        "shape": shape,
        "first": first,
        "pieceShard": piece_shard,
        "pieceStart": piece_start,
        "pieceEnd": piece_end,
        "pieceBox": piece_box,
        "boxes": boxes.values,
        "recorded": contents.is_recorded(),
        "duplicates": duplicates(checkpoint, &contents),
        "changes": stored.map(|stored| changes(stored, checkpoint)),
    }))
}

/// Groups of tensors with equal recorded checksums, the largest first.
fn duplicates(checkpoint: &Checkpoint, contents: &Contents) -> Vec<Vec<usize>> {
    let mut by_content: HashMap<_, Vec<usize>> = HashMap::new();
    for tensor in checkpoint.catalog().tensors().filter(|tensor| tensor.len > 0) {
        if let Some(digests) = contents.recorded(&tensor) {
            by_content.entry((tensor.len, digests)).or_default().push(tensor.position());
        }
    }
    let mut groups: Vec<(u64, Vec<usize>)> =
        by_content.into_iter().map(|((len, _), group)| (len, group)).collect();
    groups.retain(|(_, group)| group.len() > 1);
    groups.sort_by_key(|(len, group)| (std::cmp::Reverse(len * group.len() as u64), group[0]));
    groups.into_iter().map(|(_, group)| group).collect()
}

/// The tensors that a view changes: name, form as stored, and form as shown.
fn changes(stored: &Checkpoint, presented: &Checkpoint) -> Vec<[String; 3]> {
    let form = |tensor: &Tensor<'_>| format!("{} {:?}", tensor.dtype.name(), tensor.shape);
    let mut changes = Vec::new();
    for tensor in stored.catalog().tensors() {
        let before = form(&tensor);
        let after = presented.catalog().tensor(tensor.name).map(|tensor| form(&tensor));
        if after.as_ref() != Some(&before) {
            let after = after.unwrap_or_else(|| "not shown by this name".to_owned());
            changes.push([tensor.name.to_owned(), before, after]);
        }
    }
    for tensor in presented.catalog().tensors() {
        if stored.catalog().tensor(tensor.name).is_none() {
            let before = "not stored by this name".to_owned();
            changes.push([tensor.name.to_owned(), before, form(&tensor)]);
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_end_the_data_of_the_page() {
        let hostile = "</script><script>alert(1)</script><!-- @SCRIPT@ @STYLE@ \u{2028}&amp;";
        let report = json!({ "sets": [hostile] });
        let page = page(&report);
        let (_, rest) = page.split_once("id=\"data\">").expect("the data begins");
        let (data, _) = rest.split_once("</script>").expect("the data ends");
        assert!(!data.contains(['<', '>', '&', '\u{2028}']));
        assert_eq!(serde_json::from_str::<Value>(data).ok(), Some(report));
        assert_eq!(page.matches("<script").count(), 2);
    }
}
