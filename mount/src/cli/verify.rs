//! `tensorfs verify`: proves checkpoints, and then reads every byte.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use tensorfs::internal::atomic_file::TemporaryFile;
use tensorfs::internal::checkpoint::{Checkpoint, FolderId, Tail, Tree};
use tensorfs::internal::error::{counted, real_name, shown, shown_lines, shown_path};
use tensorfs::internal::io::Settings;
use tensorfs::internal::size::shown_size;
use tensorfs::internal::source::CopyMode;
use tensorfs::internal::verify::{
    Recorded, ShardPlace, Task, Verified, bytes_to_read, manifest, verify,
};
use tensorfs::internal::view::View;
use tensorfs::{Error, ErrorKind};

use super::args::{self, When};
use super::output::{Failure, Outcome, print_bytes, print_json, print_text, speed};
use super::sources::{FoundSet, begin_source_command, open_bytes, prove_family, skipped_notes};
use crate::log;

pub(super) fn run(args: &args::VerifyArgs) -> Outcome {
    let mut options = begin_source_command(&args.source, &args::VERIFY)?;
    if let Some(reference) = &args.reference {
        options.open.reference = Some(reference.clone());
    }
    if args.expect_shards.is_some() && options.open.expect_shards.is_some() {
        return Err(Failure::Usage("--expect-shards and -o expect-shards= are both given".into()));
    }
    options.open.expect_shards = args.expect_shards.or(options.open.expect_shards);
    let settings = options.settings();
    let mut tree = open_bytes("verify", &args.source, options)?;
    tree.options.view = View::default();
    let mut notes = skipped_notes(&tree);
    let bar = bar(args.progress, 0);
    let mut report = VerifyReport::default();
    // Families are verified one after the other, because the headers of a whole tree may not fit
    // into memory.
    for head in tree.families() {
        // The proof does not use the index, because the index is verified too.
        let store = tree.options.index.take();
        let (found, more) = prove_family(&tree, head);
        tree.options.index = store;
        notes.extend(more);
        bar.inc_length(len_of(&found));
        for found in found {
            notes.extend(report.verify(args, settings, &tree, found, &bar)?);
        }
    }
    bar.finish_and_clear();
    if report.sets.is_empty() {
        return Err(Failure::Failed(tree.nothing_found()));
    }
    report.finish(args, &tree, &notes)
}

/// The results for all sets.
#[derive(Default)]
struct VerifyReport {
    sets: Vec<Value>,
    /// The kind and the message of the first error.
    first_refusal: Option<(Value, String)>,
    unproven: bool,
}

impl VerifyReport {
    /// Reads a set and reports it. Returns notes about the set.
    fn verify(
        &mut self,
        args: &args::VerifyArgs,
        settings: Settings,
        tree: &Tree,
        FoundSet { directory, set }: FoundSet,
        bar: &ProgressBar,
    ) -> Result<Vec<String>, Failure> {
        let started = Instant::now();
        let mut line = json!({
            "directory": real_name(&directory),
            "name": set.name,
            "kind": set.kind.as_str(),
        });
        let judged = set.outcome.and_then(|checkpoint| {
            let id = tree.ids().into_iter().find(|&id| tree.folder(id).relative == directory);
            judge(args, settings, tree, id, checkpoint, &mut |bytes| bar.inc(bytes))
        });
        let mut notes = Vec::new();
        match judged {
            Ok(judged) if judged.verified.mismatch.is_none() => {
                self.unproven |= judged.checkpoint.tail == Tail::Unproven;
                let written = write_manifest_if_asked(args, &judged.checkpoint)?;
                judged.describe(&mut line);
                notes = judged.notes(&directory);
                if !args.source.json {
                    let mut text = judged.told(started);
                    if let Some(path) = written {
                        text.push_str(&format!("\n  wrote {}", shown(&path)));
                    }
                    let sums = judged.sha256_lines(&named_source(args, tree).join(&directory));
                    bar.suspend(|| report_text(args, &(text + "\n"), &sums))?;
                }
            }
            Ok(judged) => self.refuse(&mut line, &judged.refusal(), bar, |line| {
                judged.describe_mismatch(line);
            }),
            Err(error) => self.refuse(&mut line, &error, bar, |_| {}),
        }
        self.sets.push(line);
        Ok(notes)
    }

    fn refuse(
        &mut self,
        line: &mut Value,
        error: &Error,
        bar: &ProgressBar,
        more: impl FnOnce(&mut Value),
    ) {
        describe_refusal(line, error);
        more(line);
        let message = error.to_string();
        bar.suspend(|| log::say(&message));
        self.first_refusal.get_or_insert((line["class"].clone(), message));
    }

    fn finish(self, args: &args::VerifyArgs, tree: &Tree, notes: &[String]) -> Outcome {
        let strict = args.strict && self.unproven;
        let source = shown_path(&tree.source);
        // Parts of the tree that the scan left out are not verified. `open_bytes` has warned about
        // them.
        let left_out = tree.left_out.summary().filter(|_| tree.left_out.is_partial());
        let partial =
            left_out.map(|why| (json!(ErrorKind::Usage.as_str()), format!("{source}: {why}")));
        let refusal = self.first_refusal.as_ref().or(partial.as_ref());
        let ok = refusal.is_none() && !strict;
        if args.source.json {
            let (kind, error) =
                refusal.map_or((Value::Null, Value::Null), |(c, e)| (c.clone(), json!(e)));
            print_json(&json!({
                "source": real_name(&tree.source),
                "ok": ok,
                "class": kind,
                "error": error,
                "sets": self.sets,
                "notes": notes,
            }))?;
        } else {
            let lines = notes.iter().map(|note| format!("  note: {}\n", shown(note)));
            report_text(args, &lines.collect::<String>(), &[])?;
        }
        if self.first_refusal.is_none() && strict {
            log::say(&format!(
                "{source}: tail: unproven: nothing tells whether the last pieces are there; give \
                 --expect-shards or --reference"
            ));
        }
        if ok { Ok(()) } else { Err(Failure::Told) }
    }
}

/// Prints the report of a set, or the lines in the format of sha256sum. With `--sha256`, only these
/// lines go to standard output, so that `sha256sum -c` can read it.
fn report_text(args: &args::VerifyArgs, text: &str, sums: &[u8]) -> Outcome {
    if !args.sha256 {
        return print_text(text);
    }
    let _ = std::io::stderr().lock().write_all(shown_lines(text).as_bytes());
    print_bytes(sums)
}

/// The folder of the source as the user named it, so that relative paths stay valid. If the user
/// named a mount, which does not show the shards, it is the real folder.
fn named_source(args: &args::VerifyArgs, tree: &Tree) -> PathBuf {
    let folder = |path: &Path| match tree.only {
        Some(_) => path.parent().map(Path::to_owned).unwrap_or_default(),
        None => path.to_owned(),
    };
    let named = folder(&args.source.source);
    let there = |path: &Path| {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        std::fs::canonicalize(path).ok()
    };
    if there(&named).as_deref() == Some(&tree.folder(0).path) {
        named
    } else {
        folder(&tree.source)
    }
}

/// A set that was read and compared.
struct Judged {
    checkpoint: Arc<Checkpoint>,
    verified: Verified,
    /// The state of the recorded checksums, as a word.
    checksums: &'static str,
    /// Why the previous file of checksums was not usable.
    doubt: Option<String>,
}

/// Reads a set, and records its checksums if nothing differs.
fn judge(
    args: &args::VerifyArgs,
    settings: Settings,
    tree: &Tree,
    folder: Option<FolderId>,
    checkpoint: Arc<Checkpoint>,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<Judged, Error> {
    let recorded = Recorded::load(tree.options.index.as_deref(), &checkpoint.directory);
    let headers = folder.and_then(|id| tree.indexed_headers(id));
    let task = Task {
        recorded: Some(&recorded),
        headers: headers.as_ref(),
        anew: args.record,
        sha256: args.sha256,
        settings,
    };
    let mut verified = verify(&checkpoint, &task, progress)?;
    let fresh = std::mem::take(&mut verified.fresh);
    let mut checksums = if verified.unknown > 0 { "recorded" } else { "compared" };
    if verified.mismatch.is_none() {
        if let Err(why) = recorded.keep(fresh) {
            tracing::info!("checksums are not recorded: {why}");
            // Known checksums stay valid even if the new times of the files cannot be stored with
            // them.
            if verified.unknown > 0 {
                checksums = "not_recorded";
            }
        }
        if let (Some(id), true) = (folder, args.record) {
            tree.forget_index(id);
        }
    }
    Ok(Judged { checkpoint, verified, checksums, doubt: recorded.doubt() })
}

impl Judged {
    fn describe(&self, line: &mut Value) {
        let (catalog, verified) = (self.checkpoint.source_catalog(), &self.verified);
        line["ok"] = json!(true);
        for key in ["class", "error", "file", "tensor"] {
            line[key] = Value::Null;
        }
        line["shards"] = json!(catalog.shards.len());
        line["tensors"] = json!(catalog.len());
        line["bytes"] = json!(catalog.data_len());
        line["tail"] = json!(self.checkpoint.tail.as_str());
        line["notes"] = json!(catalog.notes);
        line["bytes_read"] = json!(verified.bytes);
        line["sha256_compared"] = json!(verified.blobs);
        line["header_hashes_compared"] = json!(verified.hashed);
        line["archive_entries_compared"] = json!(verified.entries);
        line["replicas_compared"] = json!(verified.replicas);
        line["checksums"] = json!(self.checksums);
        line["checksums_compared"] = json!(verified.compared);
        line["checksums_recorded"] =
            json!(if self.checksums == "recorded" { verified.unknown } else { 0 });
        if !verified.sha256.is_empty() {
            let sums = verified.sha256.iter().map(|(name, sum)| (name.clone(), json!(sum)));
            line["sha256"] = Value::Object(sums.collect());
        }
    }

    /// Adds a description of the bytes that differ.
    fn describe_mismatch(&self, line: &mut Value) {
        let Some(mismatch) = &self.verified.mismatch else { return };
        let digests = mismatch.digests;
        line["part"] = json!(match mismatch.place {
            ShardPlace::Header => "header",
            ShardPlace::Tensor(_) => "tensor",
            ShardPlace::Unused => "unused",
        });
        line["range"] = json!([mismatch.range.start, mismatch.range.end]);
        line["expected"] = json!(digests.map(|(expected, _)| expected.to_string()));
        line["found"] = json!(digests.map(|(_, found)| found.to_string()));
        line["recorded_unix"] = json!(mismatch.recorded);
        line["same_mtime"] = json!(mismatch.same_mtime);
        line["more_differ"] = json!(mismatch.others);
        line["checksums_compared"] = json!(self.verified.compared);
        line["checksums_recorded"] = json!(0);
    }

    fn refusal(&self) -> Error {
        match &self.verified.mismatch {
            Some(mismatch) => self.checkpoint.refused(mismatch.fault()),
            None => Error::internal("nothing differs"),
        }
    }

    fn notes(&self, directory: &Path) -> Vec<String> {
        let folder = shown_path(directory);
        let place = if folder.is_empty() { folder } else { format!("{folder}: ") };
        let notes = self.verified.notes.iter().map(|note| format!("{place}{note}"));
        notes.chain(self.doubt.clone()).collect()
    }

    fn told(&self, started: Instant) -> String {
        let (checkpoint, verified) = (&self.checkpoint, &self.verified);
        let catalog = checkpoint.source_catalog();
        let speed = speed(verified.bytes, started.elapsed().as_secs_f64());
        let mut text = format!(
            "{}: ok: {}, {} in {}, read at {speed}",
            shown_path(&checkpoint.directory.join(&checkpoint.name)),
            counted(catalog.len(), "tensor"),
            shown_size(catalog.data_len()),
            counted(catalog.shards.len(), "shard"),
        );
        if verified.blobs > 0 {
            text.push_str(&format!("; {} blobs match their sha256", verified.blobs));
        }
        if verified.entries > 0 {
            text.push_str(&format!("; {} entries match their CRC-32", verified.entries));
        }
        if verified.hashed > 0 {
            text.push_str(&format!("; {} tensors match their hashes", verified.hashed));
        }
        if verified.replicas > 0 {
            text.push_str(&format!("; {} replicas are equal", verified.replicas));
        }
        let (compared, unknown) = (verified.compared, verified.unknown);
        let mut sums = Vec::new();
        if compared > 0 {
            sums.push(format!("{compared} headers and pieces are as recorded"));
        }
        match self.checksums {
            "recorded" => sums.push(format!("{unknown} headers and pieces recorded")),
            "not_recorded" => sums.push("not recorded".to_owned()),
            _ => {}
        }
        text.push_str(&format!("\n  checksums: {}", sums.join(", ")));
        text.push_str(match checkpoint.tail {
            Tail::Proven => "\n  tail: proven",
            Tail::Unproven => {
                "\n  tail: unproven: a lost last piece would not show; --expect-shards or \
                 --reference prove it"
            }
        });
        text
    }

    /// The sha256 of each shard in `folder`, in the format of sha256sum.
    fn sha256_lines(&self, folder: &Path) -> Vec<u8> {
        let mut lines = Vec::new();
        for (name, sum) in &self.verified.sha256 {
            let joined = folder.join(name);
            let path = joined.as_os_str().as_encoded_bytes();
            let special = |byte: &u8| matches!(byte, b'\\' | b'\n' | b'\r');
            if path.iter().any(special) {
                lines.push(b'\\');
            }
            lines.extend(sum.bytes().chain(*b"  "));
            for &byte in path {
                match byte {
                    b'\\' => lines.extend(b"\\\\"),
                    b'\n' => lines.extend(b"\\n"),
                    b'\r' => lines.extend(b"\\r"),
                    _ => lines.push(byte),
                }
            }
            lines.push(b'\n');
        }
        lines
    }
}

fn describe_refusal(line: &mut Value, error: &Error) {
    line["ok"] = json!(false);
    line["class"] = json!(error.kind().as_str());
    line["error"] = json!(error.to_string());
    line["file"] = json!(error.path().map(real_name));
    line["tensor"] = json!(error.tensor());
    line["notes"] = json!([]);
}

/// Number of bytes that are read to verify these sets.
fn len_of(found: &[FoundSet]) -> u64 {
    let checkpoints = found.iter().filter_map(|found| found.set.outcome.as_ref().ok());
    checkpoints.map(|checkpoint: &Arc<Checkpoint>| bytes_to_read(checkpoint)).sum()
}

/// A progress bar for `total` bytes. `progress` says whether it is drawn.
pub(super) fn bar(progress: When, total: u64) -> ProgressBar {
    let drawn = match progress {
        When::Always => true,
        When::Never => false,
        When::Auto => std::io::stderr().is_terminal() && !log::is_quiet(),
    };
    if !drawn {
        return ProgressBar::hidden();
    }
    let template = "{bar:30} {binary_bytes}/{binary_total_bytes} {decimal_bytes_per_sec} {eta}";
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(total).with_style(style);
    if progress == When::Always && !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::term_like(Box::new(plain::PlainTerm)));
    }
    bar
}

fn write_manifest_if_asked(
    args: &args::VerifyArgs,
    checkpoint: &Checkpoint,
) -> Result<Option<String>, Failure> {
    if !args.write_manifest {
        return Ok(None);
    }
    let (name, text) = manifest(checkpoint);
    let path = checkpoint.directory.join(name);
    let mode = CopyMode::of(checkpoint.sources())?;
    let written = write_whole(&path, &text, &mode);
    written.map_err(|e| Failure::at(&path, format_args!("cannot write: {e}")))?;
    Ok(Some(real_name(&path)))
}

/// Writes a file atomically, with the permissions in `mode`.
fn write_whole(path: &Path, text: &[u8], mode: &CopyMode) -> std::io::Result<()> {
    let bits = mode.in_folder(path.parent().unwrap_or(Path::new(".")));
    let mut new = TemporaryFile::create_beside(path, bits)?;
    mode.narrow(new.file())?;
    new.file().write_all(text)?;
    new.file().sync_all()?;
    new.publish(path, true)
}

/// Progress output without a terminal: one line at a time on standard error.
mod plain {
    use std::io::{self, Write};

    use indicatif::TermLike;

    #[derive(Debug)]
    pub(super) struct PlainTerm;

    impl TermLike for PlainTerm {
        fn width(&self) -> u16 {
            100
        }

        fn move_cursor_up(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, line: &str) -> io::Result<()> {
            writeln!(io::stderr(), "{line}")
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            if text.trim().is_empty() { Ok(()) } else { writeln!(io::stderr(), "{}", text.trim()) }
        }

        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            io::stderr().flush()
        }
    }
}
