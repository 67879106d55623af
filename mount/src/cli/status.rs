//! `tensorfs status`: shows the mounts of tensorfs and the reports of their daemons.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tensorfs::internal::counters::{CounterValues, Waits};
use tensorfs::internal::error::{real_name, shown_path};
use tensorfs::internal::mountinfo;
use tensorfs::internal::size::shown_size;
use tensorfs::internal::store::disk_cache::DiskCacheStatus;
use tensorfs::internal::store::{EndpointStatus, RemoteStatus};

use super::args;
use super::columns::{Column, ColumnKind, TableRow, TextTable, bytes_cell, percent};
use super::output::{Failure, Outcome, print_json, print_text};
use super::seen::{LIMIT, Memory, MountState, Seen, ask, find, look};
use crate::daemon::status::Status;
use crate::fs::sets::NamedSet;
use crate::fs::tails::{REMEDY, TailStatus};
use crate::log;
use crate::options::Options;
use crate::serve::kernel::Knob;
use crate::serve::requests::RequestCounts;
use crate::serve::service::CacheStatus;

pub(super) fn run(args: &args::StatusArgs) -> Outcome {
    let failed = |e: io::Error| Failure::Failed(format!("/proc/self/mountinfo: {e}"));
    let mounts = mountinfo::ours().map_err(failed)?;
    let mut missing = Vec::new();
    let mut chosen = Vec::new();
    for path in &args.targets {
        match find(&mounts, path) {
            Some(mount) => chosen.push(mount),
            None => missing.push(path),
        }
    }
    let seen =
        if args.targets.is_empty() { look(mounts, LIMIT, true) } else { ask(chosen, LIMIT, true) };
    if args.json {
        let missing =
            missing.iter().map(|path| json!({ "target": real_name(path), "state": "not-mounted" }));
        let all = seen.iter().map(|one| json!(one)).chain(missing);
        print_json(&Value::Array(all.collect()))?;
    } else if args.targets.is_empty() && seen.is_empty() {
        print_text("no tensorfs mounts\n")?;
    } else if args.short {
        short(&seen).print()?;
    } else {
        let blocks: Vec<_> = seen.iter().map(block).collect();
        print_text(&blocks.join("\n"))?;
    }
    for path in &missing {
        log::say(&format!("{}: not a tensorfs mount", shown_path(path)));
    }
    let is_bad = |one: &Seen| matches!(one.state, MountState::Dead | MountState::NoAnswer);
    if missing.is_empty() && !seen.iter().any(is_bad) { Ok(()) } else { Err(Failure::Told) }
}

/// A table with one line for each mount.
fn short(seen: &[Seen]) -> TextTable {
    use ColumnKind::{Name, Number, Word};
    let column = |title, rank, kind| Column { title, min: 0, rank, kind };
    let row = |seen: &Seen| {
        let text = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let counters = seen.counters();
        let number =
            |count: fn(&CounterValues) -> u64| text(counters.map(|c| count(c).to_string()));
        TableRow::Cells(vec![
            shown_path(&seen.target),
            seen.state.to_string(),
            number(|c| c.source_reads_now),
            percent(counters.map(|c| c.hits), counters.map(|c| c.misses)),
            text(seen.memory.and_then(|memory| memory.rss).map(bytes_cell)),
            number(|c| c.read_errors),
            text(seen.source.as_ref().map(|source| shown_path(Path::new(source)))),
        ])
    };
    TextTable {
        columns: vec![
            column("MOUNT", 0, Name),
            column("STATE", 1, Word),
            column("FLIGHT", 4, Number),
            column("HITS", 5, Number),
            column("MEMORY", 6, Number),
            column("ERRORS", 2, Number),
            column("SOURCE", 3, Name),
        ],
        rows: seen.iter().map(row).collect(),
    }
}

/// One mount, as text for people.
fn block(seen: &Seen) -> String {
    let mut lines = vec![("state", state_text(seen))];
    lines.extend(seen.source.clone().map(|source| ("source", source)));
    lines.extend(seen.models.as_ref().map(|models| ("models", models.join("; "))));
    if let Some(status) = &seen.status {
        lines.extend(status_lines(status));
    }
    lines.push(("memory", memory_text(seen)));
    if let Some(Status { service, index, .. }) = &seen.status {
        lines.extend(rows(&json!(index)).into_iter().map(|row| ("index", row)));
        let knobs = service.kernel.iter().flatten();
        lines.extend(knobs.map(|knob| ("kernel", knob_text(knob))));
        let reports = [("engine", json!(service.engine)), ("assemble", json!(service.assemble))];
        for (label, report) in reports {
            lines.extend(rows(&report).into_iter().map(|row| (label, row)));
        }
        lines.extend(service.remote.iter().flat_map(remote_lines));
        lines.push(("open", format!("{} files", service.open_files)));
        lines.extend(service.files.iter().map(|file| ("", compact(&json!(file)))));
    }
    let mut text = format!("{}\n", shown_path(&seen.target));
    for (label, said) in lines.iter().filter(|(_, said)| !said.is_empty()) {
        // The reply may come from the daemon of another user, so it must not reach the terminal as
        // control characters.
        let _ = writeln!(text, "  {label:<9} {}", shown_path(Path::new(said)));
    }
    text
}

fn state_text(seen: &Seen) -> String {
    let mut text = seen.state.text().to_owned();
    if let Some(pid) = seen.pid {
        let _ = write!(text, ", pid {pid}");
    }
    if let Some(seconds) = seen.uptime_s {
        let _ = write!(text, ", for {}", indicatif::HumanDuration(Duration::from_secs(seconds)));
    }
    text
}

/// The report of a daemon, as lines with labels. Lines may be empty.
fn status_lines(status: &Status) -> Vec<(&'static str, String)> {
    let Status { service, checkpoints, .. } = status;
    let away = checkpoints.source.clone().unwrap_or_default();
    let mut lines = vec![("options", Options::words(&service.options).join(" ")), ("away", away)];
    for (state, sets) in [("refused", &checkpoints.refused), ("absent", &checkpoints.absent)] {
        for NamedSet { name, why } in sets {
            let why = why.as_ref().map_or(String::new(), |why| format!(": {why}"));
            lines.push((state, format!("{name}{why}")));
        }
    }
    lines.push(("tail", tail_text(&status.tail)));
    lines.push(("access", idle_rules_text(&status.idle_rules)));
    lines.push(("requests", requests_text(&service.requests)));
    lines.extend(counter_lines(&service.counters));
    lines
}

/// The sets with an unproven tail. Empty if there are none.
fn tail_text(tail: &TailStatus) -> String {
    let sets = match tail.unproven {
        0 => return String::new(),
        1 => "set",
        _ => "sets",
    };
    format!("unproven in {} {sets}: {}; {REMEDY}", tail.unproven, tail.files.join("; "))
}

/// The rules of `access=` that match nothing. Empty if there are none.
fn idle_rules_text(rules: &[String]) -> String {
    if rules.is_empty() {
        return String::new();
    }
    format!("nothing in the source matches {}: these rules keep nobody out", rules.join(", "))
}

/// The kernel's requests by operation, with the mean time of each operation.
fn requests_text(requests: &BTreeMap<String, RequestCounts>) -> String {
    let parts = requests.iter().filter_map(|(operation, RequestCounts { ok, errors, time })| {
        let mean = time.sum_us.checked_div(ok + errors)?;
        let failed = if *errors > 0 { format!(", {errors} errors") } else { String::new() };
        Some(format!("{ok} {operation} ({}{failed})", duration(mean)))
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// The counters, as text.
fn counter_lines(c: &CounterValues) -> Vec<(&'static str, String)> {
    let asked = c.hits + c.misses;
    let mut lines = vec![
        (
            "served",
            format!(
                "{} in {} reads: {} page cache of the source, {} read from it, {} read ahead; {} errors",
                shown_size(c.bytes_served),
                c.reads,
                shown_size(c.bytes_from_page_cache),
                shown_size(c.bytes_from_source),
                shown_size(c.bytes_from_cache),
                c.read_errors
            ),
        ),
        (
            "read",
            format!(
                "{} in {} reads of the source, {} of them direct; {} errors, {} past the deadline",
                shown_size(c.source_bytes),
                c.source_reads,
                c.source_reads_direct,
                c.source_errors,
                c.source_timeouts
            ),
        ),
        ("hits", format!("{} of {asked} reads{}", c.hits, share(c.hits, asked))),
        (
            "prefetch",
            format!(
                "{} read ahead: {} used, {} wasted{}, cut {} times; {} put into the page cache",
                shown_size(c.prefetched_bytes),
                shown_size(c.prefetch_used_bytes),
                shown_size(c.prefetch_wasted_bytes),
                share(c.prefetch_wasted_bytes, c.prefetched_bytes),
                c.prefetch_cuts,
                shown_size(c.stored_bytes)
            ),
        ),
        (
            "now",
            format!(
                "{} reads in flight, {} queued for memory, {} stuck",
                c.source_reads_now, c.reads_queued_now, c.source_stuck_now
            ),
        ),
    ];
    if c.checked_bytes > 0 {
        let (checked, differ) = (shown_size(c.checked_bytes), c.checksum_mismatches);
        lines
            .push(("checksums", format!("{checked} compared; {differ} tensors or headers differ")));
    }
    if c.wait_us.max > 0 {
        let [half, most, all] = [c.wait_us.p50, c.wait_us.p99, c.wait_us.max].map(duration);
        lines.push(("waits", format!("half below {half}, 99 % below {most}, all below {all}")));
    }
    lines
}

/// Requests to servers, and bytes from and for disk caches.
fn remote_lines(remote: &RemoteStatus) -> Vec<(&'static str, String)> {
    let server = |endpoint: &EndpointStatus| {
        let Waits { p50, p99, .. } = endpoint.first_byte_us;
        let text = format!(
            "{}: {} in {} requests, {} now, {} tried again, {} sent twice; first byte: half below {}, \
             99 % below {}",
            endpoint.host,
            shown_size(endpoint.bytes),
            endpoint.requests,
            endpoint.requests_now,
            endpoint.retries,
            endpoint.hedges,
            duration(p50),
            duration(p99),
        );
        ("server", text)
    };
    let disk = |cache: &DiskCacheStatus| {
        let asked = cache.found_bytes + cache.missed_bytes;
        let mut text = format!(
            "{}: {} found{}, {} stored, {} damaged blocks, {} objects made room",
            cache.folder,
            shown_size(cache.found_bytes),
            share(cache.found_bytes, asked),
            shown_size(cache.stored_bytes),
            cache.damaged_blocks,
            cache.removed_objects,
        );
        if let Some(why) = &cache.paused {
            let _ = write!(text, "; nothing is stored now: {why}");
        }
        ("disk", text)
    };
    let servers = remote.endpoints.iter().map(server);
    servers.chain(remote.disk_caches.iter().map(disk)).collect()
}

fn memory_text(seen: &Seen) -> String {
    let mut parts = Vec::new();
    if let Some(Status { service, .. }) = &seen.status {
        let CacheStatus { used, budget } = service.cache;
        parts.push(format!("{} of {} cache used", shown_size(used), shown_size(budget)));
    }
    if let Some(Memory { rss: Some(rss), peak }) = seen.memory {
        parts.push(format!(
            "{} resident, {} at its peak",
            shown_size(rss),
            shown_size(peak.unwrap_or_default())
        ));
    }
    parts.join("; ")
}

/// The share as text, such as ` (12.3 %)`. Empty if `whole` is 0.
fn share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return String::new();
    }
    format!(" ({:.1} %)", 100.0 * part as f64 / whole as f64)
}

/// A number of microseconds as text for people.
pub(super) fn duration(micros: u64) -> String {
    match micros {
        0..1_000 => format!("{micros} us"),
        1_000..1_000_000 => format!("{:.1} ms", micros as f64 / 1e3),
        _ => format!("{:.1} s", micros as f64 / 1e6),
    }
}

/// A report of any structure, as lines: one for each key of an object, and one for each object in a
/// list.
fn rows(report: &Value) -> Vec<String> {
    match report {
        Value::Null => Vec::new(),
        Value::Object(object) => {
            let known = object.iter().filter(|(_, value)| !value.is_null());
            known.flat_map(|(key, value)| row(key, value)).collect()
        }
        Value::Array(list) if list.iter().all(Value::is_object) => {
            list.iter().map(compact).collect()
        }
        other => vec![compact(other)],
    }
}

fn row(key: &str, value: &Value) -> Vec<String> {
    match value {
        Value::Array(list) if list.iter().all(Value::is_object) => rows(value),
        other => vec![format!("{key}: {}", compact(other))],
    }
}

/// A setting of the kernel: its value, and the requested value if it differs.
fn knob_text(knob: &Knob) -> String {
    let text = |value: &Value| match value.as_u64() {
        Some(bytes) if knob.is_size() => shown_size(bytes),
        _ => compact(value),
    };
    let Knob { name, wanted, got, why_not, .. } = knob;
    let got_text = if got.is_null() { "not known".to_owned() } else { text(got) };
    if wanted == got {
        return format!("{name}: {got_text}");
    }
    let why = why_not.as_ref().map_or(String::new(), |why| format!(": {why}"));
    format!("{name}: {got_text} instead of {}{why}", text(wanted))
}

/// A value of any structure, as short text.
fn compact(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(list) => list.iter().map(compact).collect::<Vec<_>>().join("; "),
        Value::Object(object) => {
            let words = object.iter().filter(|(_, value)| !value.is_null());
            words
                .map(|(key, value)| format!("{key} {}", compact(value)))
                .collect::<Vec<_>>()
                .join(", ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use tensorfs::internal::mountinfo::Mount;

    use super::*;
    use crate::daemon::status::Told;

    #[test]
    fn what_a_daemon_says_is_shown_also_if_it_is_another_version() {
        let said = json!({
            "target": "/mnt/a", "source": "/data", "pid": 7, "started_unix": 1, "uptime_s": 90,
            "a key of a later version": 1,
            "options": { "layout": "single", "follow": ["/a", "/b"], "cache": 256 << 20, "noexec": true },
            "counters": { "hits": 3, "misses": 1, "wait_us": { "p50": 512, "p99": 8192, "max": 3000000 } },
            "cache": { "budget": 64 << 20, "used": 1 << 20 },
            "kernel": [
                { "name": "readahead", "wanted": 4096, "got": 1024, "why_not": "not root" },
                { "name": "splice", "wanted": true, "got": true, "why_not": null },
            ],
            "engine": { "timeout_s": 60.0, "device_queues": [{ "device": "8:1", "in_flight": 2 }, { "device": "8:2" }] },
            "tail": { "proven": 3, "unproven": 1, "files": ["a/model.safetensors"] },
            "checkpoints": { "refused": [{ "name": "b", "why": "too short" }], "absent": [{ "name": "c" }] },
            "open_files": 2,
            "files": [{ "path": "model.safetensors\u{1b}[2J", "open": 1 }],
        });
        let told: Told<Status> = serde_json::from_value(said).unwrap();
        let mount = Mount { target: "/mnt/a".into(), ..Mount::default() };
        let text = block(&Seen::told(mount, MountState::Running, 0, told));
        for part in [
            "running, pid 7, for 2 minutes",
            "cache=256M follow=/a follow=/b layout=single noexec\n",
            "3 of 4 reads (75.0 %)",
            "half below 512 us, 99 % below 8.2 ms, all below 3.0 s",
            "1 MiB of 64 MiB cache used",
            "  refused   b: too short\n  absent    c\n",
            "  kernel    readahead: 1 KiB instead of 4 KiB: not root\n  kernel    splice: true\n",
            "  engine    timeout_s: 60.0\n",
            "device 8:1, direct , direct_refused false, in_flight 2, ",
            "open      2 files",
            "tail      unproven in 1 set: a/model.safetensors; settle it with",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn a_mount_that_says_nothing_is_shown_as_it_is() {
        let mount = Mount { target: "/mnt/a".into(), source: "/data".into(), ..Mount::default() };
        let text = block(&Seen::silent(mount.clone(), MountState::NoSocket, 0));
        let state = "mounted; its daemon has no control socket";
        assert_eq!(text, format!("/mnt/a\n  state     {state}\n  source    /data\n"));
        let text = block(&Seen::silent(mount, MountState::NotYours, 0));
        assert_eq!(text, "/mnt/a\n  state     not yours: another user's\n");
    }
}
