//! `tensorfs index`: shows the indexes of a source, and writes those that are missing.

use serde_json::{Value, json};
use tensorfs::internal::checkpoint::{FolderId, IndexState, Origin, Proved, Tree};
use tensorfs::internal::clock::unix_now;
use tensorfs::internal::error::{counted, real_name, shown, shown_path};
use tensorfs::internal::size::shown_size;
use tensorfs::internal::verify::Recorded;
use tensorfs::internal::view::Files;

use super::args;
use super::output::{Failure, Outcome, print_json, print_text};
use super::sources::{begin_source_command, open_bytes};
use crate::log;

/// The index of a folder, and the checkpoints in the folder.
struct IndexReport {
    directory: String,
    /// The state of the index as one word, such as `fresh` or `rebuilt`.
    state: &'static str,
    /// Why the previous index was not usable, or why no index can be stored.
    reason: Option<String>,
    index: IndexState,
    sets: usize,
    tensors: usize,
    shards: usize,
    /// Number of shards with recorded checksums, and the time at which they were recorded.
    checksums: Option<(usize, i64)>,
    /// The errors of the sets that are refused.
    refused: Vec<String>,
}

pub(super) fn run(args: &args::IndexArgs) -> Outcome {
    let options = begin_source_command(&args.source, &args::INDEX)?;
    // Each format of files has an index of its own.
    let mut tree = open_bytes("index", &args.source, options)?;
    // A checkpoint that is too large for one virtual file has an index too.
    tree.options.view.files = Files::Original;
    if tree.options.index.is_none() {
        let message = "no indexes are kept: give --index-dir DIR, or set HOME";
        return Err(Failure::Failed(message.to_owned()));
    }
    let mut reports = Vec::new();
    // Why some sets that were found have no index.
    let mut unkept: Option<String> = None;
    for head in tree.families() {
        let forget = |id: &FolderId| args.rebuild && tree.forget_index(*id);
        let forgotten: Vec<FolderId> = tree.family(head).into_iter().filter(forget).collect();
        for (id, proved) in tree.prove(head) {
            if proved.sets.is_empty() {
                continue;
            }
            let refusal = proved.sets.iter().find_map(|set| set.outcome.as_ref().err());
            let why = refusal.map(ToString::to_string);
            match report(&tree, id, proved, forgotten.contains(&id)) {
                Some(report) => reports.push(report),
                // The folder of a DeepSpeed run does not contain the files of its checkpoint.
                None => unkept = unkept.or(why),
            }
        }
    }
    if reports.is_empty() {
        return Err(Failure::Failed(unkept.unwrap_or_else(|| tree.nothing_found())));
    }
    let ok = reports.iter().all(|report| report.refused.is_empty() && report.state != "not_kept");
    if args.source.json {
        print_json(&json!({
            "source": real_name(&tree.source),
            "ok": ok,
            "folder": tree.options.index.as_deref().map(real_name),
            "indexes": reports.iter().map(IndexReport::to_json).collect::<Vec<_>>(),
        }))?;
    } else {
        print_text(&reports.iter().map(IndexReport::to_text).collect::<String>())?;
    }
    for report in &reports {
        report.refused.iter().for_each(|refusal| log::say(refusal));
        if report.state == "not_kept" {
            let reason = report.reason.as_deref().unwrap_or_default();
            log::say(&format!("{}: the index is not kept: {reason}", report.directory));
        }
    }
    if ok { Ok(()) } else { Err(Failure::Told) }
}

fn report(tree: &Tree, id: FolderId, proved: Proved, forgotten: bool) -> Option<IndexReport> {
    let errors = proved.sets.iter().filter_map(|set| set.outcome.as_ref().err());
    let refused: Vec<String> = errors.map(ToString::to_string).collect();
    let whole = || proved.sets.iter().filter_map(|set| set.outcome.as_ref().ok());
    let index = proved.index?;
    let folder = tree.folder(id);
    let (state, reason) = match &index.origin {
        _ if !refused.is_empty() => ("refused", None),
        Origin::NotKept(why) => ("not_kept", Some(why.clone())),
        Origin::Index => ("fresh", None),
        Origin::Headers(None) if !forgotten => ("built", None),
        Origin::Headers(before) => ("rebuilt", before.clone()),
    };
    Some(IndexReport {
        directory: real_name(&folder.path),
        state,
        reason,
        sets: proved.sets.len(),
        tensors: whole().map(|checkpoint| checkpoint.catalog().len()).sum(),
        shards: whole().map(|checkpoint| checkpoint.catalog().shards.len()).sum(),
        checksums: Recorded::load(tree.options.index.as_deref(), &folder.path).extent(),
        refused,
        index,
    })
}

impl IndexReport {
    fn age(&self) -> Option<u64> {
        let now = unix_now();
        Some(now.saturating_sub(u64::try_from(self.index.made).ok()?))
    }

    /// Whether the index is stored, so that the next start finds it.
    fn is_kept(&self) -> bool {
        self.index.len.is_some()
    }

    fn to_json(&self) -> Value {
        json!({
            "directory": self.directory,
            "state": self.state,
            "fresh": self.is_kept(),
            "reason": self.reason,
            "path": real_name(&self.index.path),
            "size": self.index.len,
            "made_unix": self.is_kept().then_some(self.index.made),
            "age_s": self.age().filter(|_| self.is_kept()),
            "sets": self.sets,
            "shards": self.shards,
            "tensors": self.tensors,
            "checksums": self.checksums.map(|(shards, recorded)| json!({
                "shards": shards,
                "recorded_unix": recorded,
            })),
        })
    }

    fn to_text(&self) -> String {
        let mut text = format!(
            "{}: {} in {}, {}",
            shown(&self.directory),
            counted(self.tensors, "tensor"),
            counted(self.shards, "shard"),
            self.state.replace('_', " ")
        );
        if let Some(reason) = &self.reason {
            text.push_str(&format!(" ({})", shown(reason)));
        }
        if let (Some(len), Some(age)) = (self.index.len, self.age()) {
            let path = shown_path(&self.index.path);
            let age = indicatif::HumanDuration(std::time::Duration::from_secs(age));
            text.push_str(&format!("\n  {path}, {}, {age} old", shown_size(len)));
        }
        if let Some((shards, _)) = self.checksums {
            text.push_str(&format!("\n  checksums of {} are recorded", counted(shards, "shard")));
        }
        text.push('\n');
        text
    }
}
