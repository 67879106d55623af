//! `tensorfs consolidate`: what a mount would show, as real files.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use tensorfs::Error;
use tensorfs::internal::checkpoint::Tail;
use tensorfs::internal::consolidate::{
    Copier, NewFile, Outline, OutlineContent, OutlineFile, TensorizerFile, Watch, WriteOptions,
};
use tensorfs::internal::error::{real_name, shown, shown_path};
use tensorfs::internal::format::{OutputFormat, names};
use tensorfs::internal::view::FileSpec;

use super::args;
use super::output::{Failure, Outcome, UNPROVEN_TAIL, human, print_json, print_text};
use super::sources::{open_source_with_views, query_options};
use super::stopping::{check_stopped, stop_on_signals};
use super::verify::bar;

pub(super) fn run(args: &args::ConsolidateArgs) -> Outcome {
    stop_on_signals();
    let started = Instant::now();
    let options = query_options(&args.source)?;
    let settings = options.settings();
    let tree = open_source_with_views(&args.source, options)?;
    let outline = Outline::of(&tree)?;
    let copier = Copier::new(settings);
    let write = WriteOptions { replace: args.force, verify: args.verify, beside_others: false };
    let single = single(args, &outline)?;
    let (files, bytes) = match &single {
        Some(file) => (1, file.content.len_bytes()?),
        None => (outline.files.len(), outline.len_bytes()?),
    };
    let bar = bar(args.progress, if args.verify { 2 * bytes } else { bytes });
    let mut progress = |bytes| {
        bar.inc(bytes);
        check_stopped()
    };
    let mut watch = Watch { progress: &mut progress, bytes: None };
    match &single {
        Some(file) => {
            let reader = file.content.reader()?;
            let content = match (&file.content, &reader) {
                (OutlineContent::Tensorizer(file), _) => NewFile::Tensorizer(file),
                (_, Some(reader)) => NewFile::Bytes(reader),
                (_, None) => return Err(Error::internal("weights are text").into()),
            };
            copier.write_file(content, &args.out, write, &mut watch)?;
        }
        None => copier.write_folder(&outline, &args.out, write, &mut watch)?,
    }
    bar.finish_and_clear();
    let seconds = started.elapsed().as_secs_f64();
    let rate = (bytes as f64 / seconds.max(1e-9)) as u64;
    let mut notes = outline.notes.clone();
    let unproven = outline.checkpoints.iter().filter(|set| set.tail == Tail::Unproven);
    notes.extend(unproven.map(|set| format!("{}: {UNPROVEN_TAIL}", set.name)));
    if args.source.json {
        return print_json(&json!({
            "source": real_name(&args.source.source),
            "ok": true,
            "class": Value::Null,
            "error": Value::Null,
            "path": real_name(&args.out),
            "files": files,
            "bytes": bytes,
            "seconds": seconds,
            "bytes_per_second": rate,
            "verified": args.verify,
            "notes": notes,
        }));
    }
    let count = if files == 1 { "1 file".to_owned() } else { format!("{files} files") };
    let verified = if args.verify { ", read back and compared" } else { "" };
    let mut text = format!(
        "{}: {count}, {} in {seconds:.1} s, {}/s{verified}\n",
        shown_path(&args.out),
        human(bytes),
        human(rate)
    );
    text.extend(notes.iter().map(|note| format!("  note: {}\n", shown(note))));
    print_text(&text)
}

/// The file to write, if the user named a file and not a folder.
fn single(args: &args::ConsolidateArgs, outline: &Outline) -> Result<Option<OutlineFile>, Failure> {
    let name = args.out.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (named, is_tensorizer) = (OutputFormat::of_name(name), names::is_tensorizer(name));
    if (named.is_none() && !is_tensorizer) || args.out.is_dir() {
        return Ok(None);
    }
    let out = shown_path(&args.out);
    if args.out.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(Failure::Usage(format!("{out}: the name is one of a file, not of a folder")));
    }
    let file = outline.single(&args.source.source)?;
    let format = match &file.content {
        OutlineContent::Virtual(file) => Some(file.spec().format),
        _ => file.path.file_name().and_then(|name| OutputFormat::of_name(name.to_str()?)),
    };
    // A tensorizer file takes the place of the file that is shown without an option.
    let expected = named.unwrap_or_default();
    if let Some(format) = format.filter(|format| *format != expected) {
        let named = named.map_or("tensorizer", OutputFormat::as_str);
        return Err(Failure::Usage(format!(
            "{out}: the name is one of a {named} file, the mount shows a {} file; -o format= chooses \
             it",
            format.as_str()
        )));
    }
    let inode = |path: &Path| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    let there = inode(&args.out);
    let sources = outline.files.iter().flat_map(|file| file.content.sources());
    if there.is_some() && sources.map(|source| inode(source.path())).any(|source| source == there) {
        let message = "is a file of the source; write somewhere else";
        return Err(Failure::Failed(format!("{out}: {message}")));
    }
    let mut file = file.clone();
    if is_tensorizer {
        file.content = OutlineContent::Tensorizer(tensorizer_file(outline, &file)?);
    }
    Ok(Some(file))
}

/// The tensors of `file`, which has all of `outline`, as a tensorizer file.
fn tensorizer_file(outline: &Outline, file: &OutlineFile) -> Result<TensorizerFile, Failure> {
    let OutlineContent::Virtual(file) = &file.content else {
        // A file that is shown as it is has the tensors of its checkpoint.
        let [checkpoint] = outline.checkpoints.as_slice() else {
            return Err(Error::internal("one file of weights has several checkpoints").into());
        };
        let spec = FileSpec::single(&checkpoint.name, OutputFormat::default());
        return Ok(TensorizerFile::new(checkpoint, &spec, None)?);
    };
    Ok(TensorizerFile::new(file.checkpoint(), file.spec(), None)?)
}
