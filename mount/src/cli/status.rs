//! `tensorfs status`: the mounts of tensorfs and the reports of their daemons. This process never
//! accesses a mount point: a hanging daemon would block it.

use std::fmt::Write;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::unistd::geteuid;
use serde_json::{Map, Value, json};
use tensorfs::internal::error::{real_name, shown_path};
use tensorfs::internal::mountinfo::{self, Mount};

use super::args;
use super::output::{Failure, Outcome, human, print_json, print_text};
use crate::daemon::control::{self, Question, Reply};
use crate::fs::tails::REMEDY;
use crate::log;

/// How long a daemon may take to answer.
pub(super) const LIMIT: Duration = Duration::from_secs(2);

/// Arguments that make a process ask whether the mount that comes after them is dead.
const PROBE: [&str; 3] = ["internal", "probe-dead", "--"];

/// Exit status of such a process if the mount is dead.
const DEAD: u8 = 3;

/// The state of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MountState {
    /// Its daemon answers.
    Running,
    /// Its daemon answers, but the mount is not in the mount table: unmounted while files are open,
    /// or in another mount namespace.
    Detached,
    /// It has no control socket, but is not dead.
    NoSocket,
    /// Its daemon is there and does not answer.
    NoAnswer,
    /// Its daemon is gone.
    Dead,
    /// It belongs to another user.
    NotYours,
}

impl MountState {
    /// Its name in JSON.
    fn key(self) -> &'static str {
        match self {
            MountState::Running => "running",
            MountState::Detached => "detached",
            MountState::NoSocket => "no-socket",
            MountState::NoAnswer => "no-answer",
            MountState::Dead => "dead",
            MountState::NotYours => "not-yours",
        }
    }

    /// The explanation for people.
    pub(super) fn text(self) -> &'static str {
        match self {
            MountState::Running => "running",
            MountState::Detached => "detached: unmounted with files open, or in another namespace",
            MountState::NoSocket => "mounted; its daemon has no control socket",
            MountState::NoAnswer => "its daemon does not answer",
            MountState::Dead => "dead: its daemon is gone; take it off with `tensorfs umount`",
            MountState::NotYours => "not yours: another user's",
        }
    }
}

/// A mount and the report of its daemon.
pub(super) struct Seen {
    /// Minor number of its device, which is unique.
    pub minor: u32,
    /// The mount point.
    pub target: PathBuf,
    pub state: MountState,
    /// Everything known, as `--json` prints it.
    pub facts: Value,
    /// Time of the daemon's answer.
    pub asked: Instant,
}

impl Seen {
    /// The number at `pointer` of the daemon's answer.
    pub(super) fn number(&self, pointer: &str) -> Option<u64> {
        self.facts.pointer(pointer).and_then(Value::as_u64)
    }
}

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
        let all = seen.iter().map(|one| one.facts.clone()).chain(missing);
        print_json(&Value::Array(all.collect()))?;
    } else if args.targets.is_empty() && seen.is_empty() {
        print_text("no tensorfs mounts\n")?;
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

/// The tensorfs mount on `path`, which may be a link to it. Does not access the mount point.
pub(super) fn find(mounts: &[Mount], path: &Path) -> Option<Mount> {
    // `components` drops trailing slashes and dots.
    let mut path = PathBuf::from_iter(std::path::absolute(path).ok()?.components());
    // The kernel follows 40 links too.
    for _ in 0..40 {
        let on = |path: &Path| mounts.iter().rev().find(|mount| mount.target == path).cloned();
        if let Some(mount) = on(&path) {
            return Some(mount);
        }
        let parent = std::fs::canonicalize(path.parent()?).ok()?;
        path = parent.join(path.file_name()?);
        if let Some(mount) = on(&path) {
            return Some(mount);
        }
        path = parent.join(std::fs::read_link(&path).ok()?);
    }
    None
}

/// Asks the daemons of `mounts`, and those of the caller that serve no mount in the table, for
/// `limit` at most. `probe`: also tests whether a mount without a socket is dead.
pub(super) fn look(mounts: Vec<Mount>, limit: Duration, probe: bool) -> Vec<Seen> {
    let owner = geteuid().as_raw();
    let is_known = |minor: u32| mounts.iter().any(|mount| mount.minor == minor);
    let sockets = control::sockets_of(owner).into_iter().filter(|(minor, _)| !is_known(*minor));
    let sockets: Vec<_> = sockets.collect();
    let mut seen = ask(mounts, limit, probe);
    let deadline = Instant::now() + limit;
    for (minor, path) in sockets {
        if let Reply::Status(pid, said) = control::ask(owner, &[path], Question::Status, deadline) {
            let target = said.get("target").and_then(Value::as_str).unwrap_or_default().into();
            let mount = Mount { minor, target, owner: Some(owner), ..Mount::default() };
            seen.push(describe(mount, MountState::Detached, pid, said));
        }
    }
    seen
}

/// Asks the daemons of `mounts`, all at the same time. Leaves out mounts that were unmounted
/// meanwhile.
pub(super) fn ask(mounts: Vec<Mount>, limit: Duration, probe: bool) -> Vec<Seen> {
    let mut seen = ask_each(mounts, limit, probe);
    if seen.iter().any(|one| one.state != MountState::Running) {
        let table = mountinfo::ours().unwrap_or_default();
        seen.retain(|one| {
            one.state == MountState::Running
                || table
                    .iter()
                    .any(|mount| (mount.minor, &mount.target) == (one.minor, &one.target))
        });
    }
    seen
}

fn ask_each(mounts: Vec<Mount>, limit: Duration, probe: bool) -> Vec<Seen> {
    let mut owners: Vec<u32> = mounts.iter().filter_map(|mount| mount.owner).collect();
    owners.sort_unstable();
    owners.dedup();
    let deadline = Instant::now() + limit;
    let sockets = owners.into_iter().flat_map(|owner| {
        control::sockets_of(owner).into_iter().map(move |(minor, path)| (owner, minor, path))
    });
    let sockets: Vec<_> = sockets.collect();
    let ask_one = |mount: Mount| {
        let ours = |(owner, minor, _): &&(u32, u32, PathBuf)| {
            mount.owner == Some(*owner) && mount.minor == *minor
        };
        let paths: Vec<PathBuf> = sockets.iter().filter(ours).map(|s| s.2.clone()).collect();
        inspect(mount, &paths, deadline, probe)
    };
    std::thread::scope(|scope| {
        let asked: Vec<_> =
            mounts.into_iter().map(|mount| scope.spawn(|| ask_one(mount))).collect();
        asked.into_iter().filter_map(|thread| thread.join().ok()).collect()
    })
}

fn inspect(mount: Mount, sockets: &[PathBuf], deadline: Instant, probe: bool) -> Seen {
    let (user, owner) = (geteuid(), mount.owner.unwrap_or_default());
    let is_ours = owner == user.as_raw();
    if !is_ours && !user.is_root() {
        // Its daemon may tell the names of models that this user may list.
        let said = match control::ask(owner, sockets, Question::Status, deadline) {
            Reply::Status(_, said) => said,
            _ => Value::Null,
        };
        return describe(mount, MountState::NotYours, 0, said);
    }
    let state = match control::ask(owner, sockets, Question::Status, deadline) {
        Reply::Status(pid, said) => return describe(mount, MountState::Running, pid, said),
        Reply::Silence(pid) => return describe(mount, MountState::NoAnswer, pid, Value::Null),
        Reply::Leftover => MountState::Dead,
        // Only a user who may access the mount can find out whether it is dead.
        Reply::Nothing if probe && is_ours => probe_from_outside(&mount.target, deadline),
        Reply::Nothing => MountState::NoSocket,
    };
    describe(mount, state, 0, Value::Null)
}

/// Returns the dead ones of `mounts`. A mount that does not answer within `limit` is not dead.
pub(super) fn dead(mounts: Vec<Mount>, limit: Duration) -> Vec<Mount> {
    let deadline = Instant::now() + limit;
    let is_dead = |mount: &Mount| probe_from_outside(&mount.target, deadline) == MountState::Dead;
    std::thread::scope(|scope| {
        let probe = |mount: Mount| scope.spawn(move || is_dead(&mount).then_some(mount));
        let probes: Vec<_> = mounts.into_iter().map(probe).collect();
        probes.into_iter().filter_map(|probe| probe.join().ok().flatten()).collect()
    })
}

/// The work of the probe: its exit status says whether the mount on `target` is dead.
pub(super) fn answer_probe(target: &Path) -> ExitCode {
    // statvfs always asks the daemon: the kernel caches no answer.
    match nix::sys::statvfs::statvfs(target) {
        Err(Errno::ENOTCONN | Errno::ECONNABORTED) => ExitCode::from(DEAD),
        _ => ExitCode::SUCCESS,
    }
}

/// Checks a mount without a socket from another process: a process that waits for a hanging daemon
/// cannot end.
fn probe_from_outside(target: &Path, deadline: Instant) -> MountState {
    let mut command = Command::new("/proc/self/exe");
    let command = command.arg0("tensorfs").args(PROBE).arg(target).stdin(Stdio::null());
    let Ok(mut probe) = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() else {
        return MountState::NoSocket;
    };
    loop {
        match probe.try_wait() {
            Ok(Some(status)) if status.code() == Some(DEAD.into()) => return MountState::Dead,
            Ok(Some(_)) | Err(_) => return MountState::NoSocket,
            Ok(None) if Instant::now() > deadline => {
                let _ = probe.kill();
                return MountState::NoAnswer;
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Combines the facts about a mount.
fn describe(mount: Mount, state: MountState, pid: i32, said: Value) -> Seen {
    let asked = Instant::now();
    let mut facts = match said {
        Value::Object(said) => said,
        _ => Map::new(),
    };
    if state == MountState::NotYours {
        facts.insert("source".into(), Value::Null);
    } else {
        facts.entry("source").or_insert_with(|| mount.source.clone().into());
    }
    facts.insert("target".into(), real_name(&mount.target).into());
    facts.insert("state".into(), state.key().into());
    facts.insert("owner".into(), json!(mount.owner));
    if pid > 0 {
        // The pid that the kernel reports wins over the pid that the daemon reports.
        facts.insert("pid".into(), pid.into());
        facts.insert("memory".into(), memory_of(pid));
    }
    Seen { minor: mount.minor, target: mount.target, state, facts: facts.into(), asked }
}

/// Resident memory of process `pid`, now and at its peak, in bytes.
fn memory_of(pid: i32) -> Value {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let bytes = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
        Some(kib * 1024)
    };
    json!({ "rss": bytes("VmRSS:"), "peak": bytes("VmHWM:") })
}

/// One mount, for people.
fn block(seen: &Seen) -> String {
    let mut text = format!("{}\n", shown_path(&seen.target));
    let mut line = |label: &str, said: String| {
        if !said.is_empty() {
            // The reply of another user's daemon must not reach the terminal as commands.
            let _ = writeln!(text, "  {label:<9} {}", shown_path(Path::new(&said)));
        }
    };
    let facts = &seen.facts;
    let word = |key: &str| facts.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    line("state", state_text(seen));
    line("source", word("source"));
    if let Some(models) = facts.get("models") {
        line("models", compact(models));
    }
    line("options", options_text(facts.get("options")));
    line("tail", tail_text(seen));
    line("requests", requests_text(facts.get("requests")));
    for (label, said) in counter_lines(seen) {
        line(label, said);
    }
    line("memory", memory_text(seen));
    for key in ["index", "kernel", "engine", "assemble"] {
        for row in rows(facts.get(key).unwrap_or(&Value::Null)) {
            line(key, row);
        }
    }
    if let Some(open) = seen.number("/open_files") {
        line("open", format!("{open} files"));
    }
    for file in facts.get("files").and_then(Value::as_array).into_iter().flatten() {
        line("", compact(file));
    }
    text
}

fn state_text(seen: &Seen) -> String {
    let mut text = seen.state.text().to_owned();
    if let Some(pid) = seen.facts.get("pid").and_then(Value::as_i64) {
        let _ = write!(text, ", pid {pid}");
    }
    if let Some(seconds) = seen.number("/uptime_s") {
        let _ = write!(text, ", for {}", indicatif::HumanDuration(Duration::from_secs(seconds)));
    }
    text
}

/// Sets with an unproven tail; empty if there are none.
fn tail_text(seen: &Seen) -> String {
    let count = seen.number("/tail/unproven").unwrap_or_default();
    if count == 0 {
        return String::new();
    }
    let named = seen.facts.pointer("/tail/files").map(compact).unwrap_or_default();
    let sets = if count == 1 { "set" } else { "sets" };
    format!("unproven in {count} {sets}: {named}; {REMEDY}")
}

/// Options as they are given to `-o`.
fn options_text(options: Option<&Value>) -> String {
    let options = options.and_then(Value::as_object).into_iter().flatten();
    let words = options.flat_map(|(key, value)| match value {
        Value::Null | Value::Bool(false) => Vec::new(),
        Value::Bool(true) => vec![key.clone()],
        Value::Array(values) => {
            values.iter().map(|value| format!("{key}={}", compact(value))).collect()
        }
        value => vec![format!("{key}={}", compact(value))],
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Requests of the kernel by operation, with the mean time of each.
fn requests_text(requests: Option<&Value>) -> String {
    let requests = requests.and_then(Value::as_object).into_iter().flatten();
    let parts = requests.filter_map(|(operation, row)| {
        let number = |pointer: &str| row.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
        let (ok, errors) = (number("/ok"), number("/errors"));
        let mean = number("/time/sum_us").checked_div(ok + errors)?;
        let failed = if errors > 0 { format!(", {errors} errors") } else { String::new() };
        Some(format!("{ok} {operation} ({}{failed})", duration(mean)))
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// The counters, in words. Counters that the daemon does not have are left out.
fn counter_lines(seen: &Seen) -> Vec<(&'static str, String)> {
    let Some(_) = seen.facts.get("counters") else { return Vec::new() };
    let count = |key: &str| seen.number(&format!("/counters/{key}")).unwrap_or_default();
    let bytes = |key: &str| human(count(key));
    let (hits, misses) = (count("hits"), count("misses"));
    let mut lines = vec![
        (
            "served",
            format!(
                "{} in {} reads: {} page cache of the source, {} read from it, {} read ahead; {} errors",
                bytes("bytes_served"),
                count("reads"),
                bytes("bytes_from_page_cache"),
                bytes("bytes_from_source"),
                bytes("bytes_from_cache"),
                count("read_errors")
            ),
        ),
        (
            "read",
            format!(
                "{} in {} reads of the source, {} of them direct; {} errors, {} past the deadline",
                bytes("source_bytes"),
                count("source_reads"),
                count("source_reads_direct"),
                count("source_errors"),
                count("source_timeouts")
            ),
        ),
        ("hits", format!("{hits} of {} reads{}", hits + misses, share(hits, hits + misses))),
        (
            "prefetch",
            format!(
                "{} read ahead: {} used, {} wasted{}, cut {} times; {} put into the page cache",
                bytes("prefetched_bytes"),
                bytes("prefetch_used_bytes"),
                bytes("prefetch_wasted_bytes"),
                share(count("prefetch_wasted_bytes"), count("prefetched_bytes")),
                count("prefetch_cuts"),
                bytes("stored_bytes")
            ),
        ),
        (
            "now",
            format!(
                "{} reads in flight, {} queued for memory, {} stuck",
                count("source_reads_now"),
                count("reads_queued_now"),
                count("source_stuck_now")
            ),
        ),
    ];
    if count("checked_bytes") > 0 {
        let (checked, differ) = (bytes("checked_bytes"), count("checksum_mismatches"));
        lines
            .push(("checksums", format!("{checked} compared; {differ} tensors or headers differ")));
    }
    if count("wait_us/max") > 0 {
        let time = |key: &str| duration(count(&format!("wait_us/{key}")));
        let (half, most, all) = (time("p50"), time("p99"), time("max"));
        lines.push(("waits", format!("half below {half}, 99 % below {most}, all below {all}")));
    }
    lines
}

fn memory_text(seen: &Seen) -> String {
    let bytes = |pointer: &str| seen.number(pointer).map(human);
    let mut parts = Vec::new();
    if let Some(budget) = bytes("/cache/budget") {
        parts.push(format!("{} of {budget} cache used", bytes("/cache/used").unwrap_or_default()));
    }
    if let Some(resident) = bytes("/memory/rss") {
        let peak = bytes("/memory/peak").unwrap_or_default();
        parts.push(format!("{resident} resident, {peak} at its peak"));
    }
    parts.join("; ")
}

/// ` (12.3 %)`, or empty if `whole` is 0.
fn share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return String::new();
    }
    format!(" ({:.1} %)", 100.0 * part as f64 / whole as f64)
}

/// Microseconds, for people.
pub(super) fn duration(micros: u64) -> String {
    match micros {
        0..1_000 => format!("{micros} us"),
        1_000..1_000_000 => format!("{:.1} ms", micros as f64 / 1e3),
        _ => format!("{:.1} s", micros as f64 / 1e6),
    }
}

/// A report of any shape, in lines: one for each key of an object, one for each object of a list.
fn rows(report: &Value) -> Vec<String> {
    match report {
        Value::Null => Vec::new(),
        Value::Object(object) => {
            let known = object.iter().filter(|(_, value)| !value.is_null());
            known.flat_map(|(key, value)| row(key, value)).collect()
        }
        Value::Array(list) if list.iter().all(Value::is_object) => list.iter().map(knob).collect(),
        other => vec![compact(other)],
    }
}

fn row(key: &str, value: &Value) -> Vec<String> {
    match value {
        Value::Array(list) if list.iter().all(Value::is_object) => rows(value),
        other => vec![format!("{key}: {}", compact(other))],
    }
}

/// The wanted and the granted value, if the object has them.
fn knob(object: &Value) -> String {
    let text = |key: &str| object.get(key).filter(|value| !value.is_null()).map(compact);
    let Some(name) = text("name") else { return compact(object) };
    let got = text("got").unwrap_or_else(|| "not known".to_owned());
    match (text("wanted").filter(|wanted| *wanted != got), text("why_not")) {
        (Some(wanted), Some(why)) => format!("{name}: {got} instead of {wanted}: {why}"),
        (Some(wanted), None) => format!("{name}: {got} instead of {wanted}"),
        (None, _) => format!("{name}: {got}"),
    }
}

/// A value of any shape, in a few words.
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
    use super::*;

    #[test]
    fn what_a_daemon_says_is_shown_whatever_its_shape() {
        let said = json!({
            "uptime_s": 90,
            "options": { "layout": "single", "follow": ["/a", "/b"], "cache": null, "noexec": true },
            "counters": { "hits": 3, "misses": 1, "wait_us": { "p50": 512, "p99": 8192, "max": 3000000 } },
            "cache": { "budget": 64_000_000, "used": 1_000_000 },
            "kernel": [
                { "name": "readahead", "wanted": 4096, "got": 128, "why_not": "not root" },
                { "name": "splice", "wanted": true, "got": true, "why_not": null },
            ],
            "engine": { "timeout_s": 60, "lanes": [{ "device": "8:1", "in flight": 2 }, { "device": "8:2" }] },
            "tail": { "proven": 3, "unproven": 1, "files": ["a/model.safetensors"] },
            "open_files": 2,
            "files": [{ "path": "model.safetensors\u{1b}[2J", "open": 1 }],
        });
        let mount = Mount { target: "/mnt/a".into(), ..Mount::default() };
        let text = block(&describe(mount, MountState::Running, 0, said));
        for part in [
            "running, for 2 minutes",
            "follow=/a follow=/b layout=single noexec\n",
            "3 of 4 reads (75.0 %)",
            "half below 512 us, 99 % below 8.2 ms, all below 3.0 s",
            "1.00 MB of 64.00 MB cache used",
            "  kernel    readahead: 128 instead of 4096: not root\n  kernel    splice: true\n",
            "  engine    timeout_s: 60\n",
            "  engine    device 8:1, in flight 2\n",
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
        let text = block(&describe(mount.clone(), MountState::NoSocket, 0, Value::Null));
        let state = "mounted; its daemon has no control socket";
        assert_eq!(text, format!("/mnt/a\n  state     {state}\n  source    /data\n"));
        let text = block(&describe(mount, MountState::NotYours, 0, Value::Null));
        assert_eq!(text, "/mnt/a\n  state     not yours: another user's\n");
    }
}
