//! `tensorfs heat`: which tensors of a mount were read, how much, how often and by which programs.

use std::fmt::Write;
use std::path::Path;
use std::time::Instant;

use serde_json::json;
use tensorfs::internal::error::{shown, shown_path};
use tensorfs::internal::mountinfo::{self, Mount};
use tensorfs::internal::size::shown_size;

use super::args;
use super::output::{Failure, Outcome, print_json, print_text};
use super::seen::{LIMIT, find};
use crate::daemon::client::{self, Question, Reply};
use crate::daemon::status::Told;
use crate::serve::heat::{HeatReport, ReaderRow, TensorRow};

/// The note about reads that do not reach the daemon.
const UNSEEN: &str = "reads that the kernel answers from its page cache or by passthrough are not \
                      seen; its readahead counts for the program that has the file open";

pub(super) fn run(args: &args::HeatArgs) -> Outcome {
    let heat = heat_of(&args.target)?;
    if args.json { print_json(&json!(heat)) } else { print_text(&to_text(&heat, args.lines)) }
}

/// The report of the daemon of the mount on `target`.
fn heat_of(target: &Path) -> Result<Told<HeatReport>, Failure> {
    let shown_target = shown_path(target);
    let failed = |e: std::io::Error| Failure::Failed(format!("/proc/self/mountinfo: {e}"));
    let mounts = mountinfo::ours().map_err(failed)?;
    let not_ours = || {
        let real = std::fs::canonicalize(target).unwrap_or_default();
        let above = mounts.iter().filter(|mount| real.starts_with(&mount.target));
        let nearest = above.max_by_key(|mount| mount.target.components().count());
        Failure::Failed(match nearest {
            Some(Mount { target, .. }) => {
                let target = shown_path(target);
                format!("{shown_target}: not a mount point: name the mount point {target}")
            }
            None => format!("{shown_target}: not a tensorfs mount"),
        })
    };
    let Mount { minor, owner, .. } = find(&mounts, target).ok_or_else(not_ours)?;
    let owner = owner.unwrap_or_default();
    let sockets = client::sockets_of(owner).into_iter().filter(|(of, _)| *of == minor);
    let paths: Vec<_> = sockets.map(|(_, path)| path).collect();
    let why = match client::ask(owner, &paths, Question::Heat, Instant::now() + LIMIT) {
        Reply::Answer(_, heat) => return Ok(heat),
        Reply::Refused(why) => {
            return Err(Failure::Failed(format!("{shown_target}: {}", shown(&why))));
        }
        Reply::Silence(_) => "its daemon does not answer",
        Reply::Leftover => "its daemon is gone",
        Reply::Nothing => "only the owner of a mount and root may ask; see `tensorfs status`",
    };
    Err(Failure::Failed(format!("{shown_target}: {why}")))
}

fn to_text(told: &Told<HeatReport>, lines: usize) -> String {
    let heat = &told.facts;
    let mut text = format!("{}\n", shown(&told.target));
    let files: Vec<_> = heat.files.iter().filter(|file| file.bytes > 0).collect();
    if files.is_empty() {
        text.push_str("  nothing was read through the daemon\n");
    }
    for file in files {
        let tensors = file.tensors_total.map_or(String::new(), |total| {
            format!("; {} of {total} tensors", file.tensors_read.unwrap_or_default())
        });
        let _ = writeln!(
            text,
            "  {}  {} in {} reads, {} opens{tensors}",
            shown(&file.path),
            shown_size(file.bytes),
            file.reads,
            file.opens,
        );
        let tensors = file.tensors.as_deref().unwrap_or_default();
        if !tensors.is_empty() {
            let _ = writeln!(text, "    {:>11} {:>6} {:>7}  TENSOR", "BYTES", "TIMES", "READS");
        }
        for TensorRow { name, len, bytes, reads, by, .. } in tensors.iter().take(lines) {
            let times = *bytes as f64 / (*len).max(1) as f64;
            let readers = by.iter().filter_map(|index| heat.readers.get(*index));
            let by: Vec<String> = readers.map(reader_text).collect();
            let _ = writeln!(
                text,
                "    {:>11} {times:>6.1} {reads:>7}  {}  ({})",
                shown_size(*bytes),
                shown(name),
                by.join(", "),
            );
        }
        if tensors.len() > lines {
            let _ =
                writeln!(text, "    and {} more; see --lines and --json", tensors.len() - lines);
        }
    }
    for reader in heat.readers.iter().filter(|reader| reader.bytes > 0) {
        let (who, bytes) = (reader_text(reader), shown_size(reader.bytes));
        let _ = writeln!(text, "  by {who}: {bytes}, {} opens", reader.opens);
    }
    if heat.cut || heat.files_left_out > 0 {
        text.push_str("  more was read than is counted or shown here\n");
    }
    let _ = writeln!(text, "  note: {UNSEEN}");
    text
}

/// A reader, as text for people.
fn reader_text(reader: &ReaderRow) -> String {
    match (reader.uid, &reader.program) {
        (Some(uid), Some(program)) => format!("{} of user {uid}", shown(program)),
        (Some(uid), None) => format!("user {uid}"),
        (None, _) => "others".to_owned(),
    }
}
