//! `tensorfs consolidate`: writes the files that a mount would show as real files.

use std::time::Instant;

use serde_json::{Value, json};
use tensorfs::Error;
use tensorfs::internal::checkpoint::Tail;
use tensorfs::internal::consolidate::{Copier, Outline, Watch, WriteOptions};
use tensorfs::internal::error::{real_name, shown, shown_path};
use tensorfs::internal::size::shown_size;

use super::args;
use super::output::{Failure, Outcome, UNPROVEN_TAIL, print_json, print_text, reported, speed};
use super::sources::{begin_source_command, open_source_with_views};
use super::stopping::{check_stopped, clean_up_on_signals};
use super::verify::bar;
use crate::daemon::stalled::elsewhere;

pub(super) fn run(args: &args::ConsolidateArgs) -> Outcome {
    let started = Instant::now();
    let options = begin_source_command(&args.source, &args::CONSOLIDATE)?;
    let settings = options.settings();
    let tree = open_source_with_views(&args.source, options)?;
    let outline = Outline::of(&tree)?;
    let copier = Copier::new(settings);
    let write = WriteOptions { replace: args.force, verify: args.verify, beside_others: false };
    let single = outline.file_at(&args.out, &args.source.source).map_err(|error| match error {
        Error::Usage { message } => Failure::Usage(message),
        other => other.into(),
    })?;
    let (files, bytes) = match &single {
        Some(file) => (1, file.content.len_bytes()?),
        None => (outline.files.len(), outline.len_bytes()?),
    };
    let bar = bar(args.progress, if args.verify { 2 * bytes } else { bytes });
    let mut progress = |bytes| {
        bar.inc(bytes);
        check_stopped()
    };
    clean_up_on_signals();
    let mut watch = Watch { progress: &mut progress, bytes: None };
    // Each read of the source has its own deadline, so the whole work needs none.
    elsewhere(|| match &single {
        Some(file) => copier.write_one(file, &args.out, write, &mut watch),
        None => copier.write_folder(&outline, &args.out, write, &mut watch),
    })?;
    bar.finish_and_clear();
    let seconds = started.elapsed().as_secs_f64();
    let rate = (bytes as f64 / seconds.max(1e-9)) as u64;
    let mut notes = outline.notes.clone();
    let unproven = outline.checkpoints.iter().filter(|set| set.tail == Tail::Unproven);
    notes.extend(unproven.map(|set| format!("{}: {UNPROVEN_TAIL}", set.name)));
    if args.source.json {
        let report = json!({
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
            "reused": copier.reused(),
            "notes": notes,
        });
        return reported(&args.out, print_json(&report));
    }
    let count = if files == 1 { "1 file".to_owned() } else { format!("{files} files") };
    let verified = if args.verify { ", read back and compared" } else { "" };
    let reused = match copier.reused() {
        0 => String::new(),
        bytes => format!(", {} reused from a run that was killed", shown_size(bytes)),
    };
    let mut text = format!(
        "{}: {count}, {} in {seconds:.1} s, {}{reused}{verified}\n",
        shown_path(&args.out),
        shown_size(bytes),
        speed(bytes, seconds)
    );
    text.extend(notes.iter().map(|note| format!("  note: {}\n", shown(note))));
    reported(&args.out, print_text(&text))
}
