//! `tensorfs verify`: the proof, then every byte.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use tensorfs::Error;
use tensorfs::checkpoint::{Checkpoint, Tail};
use tensorfs::error::shown_path;
use tensorfs::verify::{Verified, bytes_to_read, manifest, verify};

use super::{
    Failure, Found, Outcome, human, open_source, print_json, print_text, prove_all, query_options,
    say,
};
use crate::args::{self, When};

pub(super) fn run(args: &args::Verify) -> Outcome {
    let mut options = query_options(&args.source)?;
    if let Some(reference) = &args.reference {
        options.view.reference = Some(reference.clone());
    }
    if args.expect_shards.is_some() && options.view.expect_shards.is_some() {
        return Err(Failure::Usage("--expect-shards and -o expect-shards= are both given".into()));
    }
    options.view.expect_shards = args.expect_shards.or(options.view.expect_shards);
    let tree = open_source(&args.source, options)?;
    let (mut found, notes) = prove_all(&tree)?;
    let bar = progress_bar(args, &found);
    let mut sets = Vec::new();
    let mut first_refusal: Option<(Value, String)> = None;
    let mut unproven = false;
    for Found { directory, set } in &mut found {
        let outcome = std::mem::replace(&mut set.outcome, Err(Error::usage("taken")));
        let started = Instant::now();
        let judged = outcome.and_then(|checkpoint| {
            let verified = verify(&checkpoint, &mut |bytes| bar.inc(bytes))?;
            Ok((checkpoint, verified))
        });
        let mut line = json!({
            "directory": shown_path(directory),
            "name": set.name,
            "kind": set.kind.as_str(),
        });
        match judged {
            Ok((checkpoint, verified)) => {
                unproven |= checkpoint.tail == Tail::Unproven;
                let written = write_manifest_if_asked(args, &checkpoint)?;
                describe(&mut line, &checkpoint, verified);
                if !args.source.json {
                    let mut text = told(&checkpoint, verified, started);
                    if let Some(path) = written {
                        text.push_str(&format!("\n  wrote {path}"));
                    }
                    bar.suspend(|| print_text(&(text + "\n")))?;
                }
            }
            Err(error) => {
                describe_refusal(&mut line, &error);
                let message = error.to_string();
                bar.suspend(|| say(&message));
                first_refusal.get_or_insert((line["class"].clone(), message));
            }
        }
        sets.push(line);
    }
    bar.finish_and_clear();
    let strict = args.strict && unproven;
    let ok = first_refusal.is_none() && !strict;
    if args.source.json {
        let (class, error) = first_refusal
            .as_ref()
            .map_or((Value::Null, Value::Null), |(c, e)| (c.clone(), json!(e)));
        print_json(&json!({
            "source": shown_path(&tree.source), "ok": ok, "class": class, "error": error, "sets": sets, "notes": notes,
        }))?;
    } else {
        let lines = notes.iter().map(|note| format!("  note: {note}\n"));
        print_text(&lines.collect::<String>())?;
    }
    if first_refusal.is_none() && strict {
        say(&format!(
            "{}: tail: unproven: nothing tells whether the last pieces are there; give \
             --expect-shards or --reference",
            shown_path(&tree.source)
        ));
    }
    if ok { Ok(()) } else { Err(Failure::Told) }
}

fn describe(line: &mut Value, checkpoint: &Checkpoint, verified: Verified) {
    let catalog = checkpoint.catalog();
    line["ok"] = json!(true);
    for key in ["class", "error", "file", "tensor"] {
        line[key] = Value::Null;
    }
    line["shards"] = json!(catalog.shards.len());
    line["tensors"] = json!(catalog.tensors.len());
    line["bytes"] = json!(catalog.data_len());
    line["tail"] = json!(checkpoint.tail.as_str());
    line["notes"] = json!(catalog.notes);
    line["bytes_read"] = json!(verified.bytes);
    line["sha256_compared"] = json!(verified.blobs);
    line["replicas_compared"] = json!(verified.replicas);
}

fn describe_refusal(line: &mut Value, error: &Error) {
    line["ok"] = json!(false);
    line["class"] = json!(error.class().as_str());
    line["error"] = json!(error.to_string());
    line["file"] = json!(error.path().map(shown_path));
    line["tensor"] = json!(error.tensor());
    line["notes"] = json!([]);
}

fn told(checkpoint: &Checkpoint, verified: Verified, started: Instant) -> String {
    let catalog = checkpoint.catalog();
    let seconds = started.elapsed().as_secs_f64();
    let speed = human((verified.bytes as f64 / seconds.max(1e-9)) as u64);
    let mut text = format!(
        "{}: ok: {} tensors, {} in {} shards, read at {speed}/s",
        shown_path(&checkpoint.directory.join(&checkpoint.name)),
        catalog.tensors.len(),
        human(catalog.data_len()),
        catalog.shards.len(),
    );
    if verified.blobs > 0 {
        text.push_str(&format!("; {} blobs match their sha256", verified.blobs));
    }
    if verified.replicas > 0 {
        text.push_str(&format!("; {} replicas are equal", verified.replicas));
    }
    match checkpoint.tail {
        Tail::Proven => text.push_str("\n  tail: proven"),
        Tail::Unproven => text.push_str(
            "\n  tail: unproven: a lost last piece would not show; --expect-shards or \
             --reference prove it",
        ),
    }
    text
}

fn progress_bar(args: &args::Verify, found: &[Found]) -> ProgressBar {
    let checkpoints = found.iter().filter_map(|found| found.set.outcome.as_ref().ok());
    let total = checkpoints.map(|checkpoint: &Arc<Checkpoint>| bytes_to_read(checkpoint)).sum();
    let drawn = match args.progress {
        When::Always => true,
        When::Never => false,
        When::Auto => std::io::stderr().is_terminal(),
    };
    if !drawn {
        return ProgressBar::hidden();
    }
    let template = "{bar:30} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}";
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(total).with_style(style);
    if args.progress == When::Always && !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::term_like(Box::new(plain::Lines)));
    }
    bar
}

fn write_manifest_if_asked(
    args: &args::Verify,
    checkpoint: &Checkpoint,
) -> Result<Option<String>, Failure> {
    if !args.write_manifest {
        return Ok(None);
    }
    let (name, text) = manifest(checkpoint);
    let path = checkpoint.directory.join(name);
    write_whole(&path, &text)
        .map_err(|e| Failure::Failed(format!("{}: cannot write: {e}", path.display())))?;
    Ok(Some(path.display().to_string()))
}

/// Writes a file so that it is there whole or not at all.
fn write_whole(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let nanos = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    let temporary = path.with_extension(format!("{}-{nanos}.tmp", std::process::id()));
    // Fails where something is there already, a link that somebody left for us too.
    let written = File::create_new(&temporary).and_then(|mut file| {
        file.write_all(text)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    });
    let taken = written.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::AlreadyExists);
    if written.is_err() && !taken {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// Progress where there is no terminal: a line at a time on standard error.
mod plain {
    use std::io::{self, Write};

    use indicatif::TermLike;

    #[derive(Debug)]
    pub(super) struct Lines;

    impl TermLike for Lines {
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
