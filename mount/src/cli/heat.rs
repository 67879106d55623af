//! `tensorfs heat`: which tensors of a mount were read, how much, how often and by which programs.

use std::fmt::Write;
use std::path::Path;
use std::time::Instant;

use serde_json::Value;
use tensorfs::internal::error::{shown, shown_path};
use tensorfs::internal::mountinfo::{self, Mount};

use super::args;
use super::output::{Failure, Outcome, human, print_json, print_text};
use super::status::{LIMIT, find};
use crate::daemon::control::{self, Question, Reply};

/// Reads that the daemon cannot see.
const UNSEEN: &str = "reads that the kernel answers from its page cache or by passthrough are not \
                      seen; its readahead counts for the program that has the file open";

pub(super) fn run(args: &args::HeatArgs) -> Outcome {
    let heat = heat_of(&args.target)?;
    if args.json { print_json(&heat) } else { print_text(&to_text(&heat, args.lines)) }
}

/// The heat that the daemon of the mount on `target` reports.
fn heat_of(target: &Path) -> Result<Value, Failure> {
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
    let sockets = control::sockets_of(owner).into_iter().filter(|(of, _)| *of == minor);
    let paths: Vec<_> = sockets.map(|(_, path)| path).collect();
    let why = match control::ask(owner, &paths, Question::Heat, Instant::now() + LIMIT) {
        Reply::Status(_, heat) if heat.get("files").is_some() => return Ok(heat),
        Reply::Status(_, said)
            if said.get("error").is_some_and(|e| e.to_string().contains("owner")) =>
        {
            "only the owner of a mount and root may ask"
        }
        Reply::Status(..) => "its daemon does not count tensors; mount it again with this version",
        Reply::Silence(_) => "its daemon does not answer",
        Reply::Leftover => "its daemon is gone",
        Reply::Nothing => "only the owner of a mount and root may ask; see `tensorfs status`",
    };
    Err(Failure::Failed(format!("{shown_target}: {why}")))
}

fn to_text(heat: &Value, lines: usize) -> String {
    let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or_default();
    let list = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let word = |value: &Value, key: &str| shown(value[key].as_str().unwrap_or_default());
    let readers = list(heat, "readers");
    let mut text = format!("{}\n", word(heat, "target"));
    let files: Vec<Value> =
        list(heat, "files").into_iter().filter(|file| number(file, "bytes") > 0).collect();
    if files.is_empty() {
        text.push_str("  nothing was read through the daemon\n");
    }
    for file in &files {
        let total = file["tensors_total"].as_u64();
        let tensors = total.map_or(String::new(), |total| {
            format!("; {} of {total} tensors", number(file, "tensors_read"))
        });
        let _ = writeln!(
            text,
            "  {}  {} in {} reads, {} opens{tensors}",
            word(file, "path"),
            human(number(file, "bytes")),
            number(file, "reads"),
            number(file, "opens"),
        );
        let tensors = list(file, "tensors");
        if !tensors.is_empty() {
            let _ = writeln!(text, "    {:>11} {:>6} {:>7}  TENSOR", "BYTES", "TIMES", "READS");
        }
        for tensor in tensors.iter().take(lines) {
            let bytes = number(tensor, "bytes");
            let times = bytes as f64 / number(tensor, "len").max(1) as f64;
            let by = list(tensor, "by").into_iter().filter_map(|index| index.as_u64());
            let by: Vec<String> =
                by.filter_map(|index| readers.get(index as usize)).map(reader_text).collect();
            let _ = writeln!(
                text,
                "    {:>11} {times:>6.1} {:>7}  {}  ({})",
                human(bytes),
                number(tensor, "reads"),
                word(tensor, "name"),
                by.join(", "),
            );
        }
        if tensors.len() > lines {
            let _ =
                writeln!(text, "    and {} more; see --lines and --json", tensors.len() - lines);
        }
    }
    for reader in readers.iter().filter(|reader| number(reader, "bytes") > 0) {
        let _ = writeln!(
            text,
            "  by {}: {}, {} opens",
            reader_text(reader),
            human(number(reader, "bytes")),
            number(reader, "opens")
        );
    }
    if heat["cut"] == true || number(heat, "files_left_out") > 0 {
        text.push_str("  more was read than is counted or shown here\n");
    }
    let _ = writeln!(text, "  note: {UNSEEN}");
    text
}

/// A reader, for people.
fn reader_text(reader: &Value) -> String {
    match (reader["uid"].as_u64(), reader["program"].as_str()) {
        (Some(uid), Some(program)) => format!("{} of user {uid}", shown(program)),
        (Some(uid), None) => format!("user {uid}"),
        (None, _) => "others".to_owned(),
    }
}
