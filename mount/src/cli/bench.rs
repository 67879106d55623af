//! `tensorfs bench`: measures reads of the same bytes through a mount and from a real consolidated
//! file, in turns.

pub(super) mod args;
mod job;
mod machine;
mod make;
mod map;
mod mounted;
mod page_cache;
mod python;
mod report;
mod rounds;
mod scratch;
mod threads;
mod worker;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use serde_json::{Value, json};
use tensorfs::internal::checkpoint::Tree;
use tensorfs::internal::error::{real_name, shown, shown_path};
use tensorfs::internal::format::OutputFormat;
use tensorfs::internal::mount_origin::resolve_mount;
use tensorfs::internal::open_options::OpenOptions;
use tensorfs::internal::size::shown_size;
use tensorfs::internal::store::Store;
use tensorfs::internal::view::Files;

use super::output::{self, Failure, Outcome, print_json, print_text};
use super::sources::prove_all;
use super::stopping::{clean_up_on_signals, take_signals};
use crate::log;
use crate::options::Options;
use args::BenchArgs;
use mounted::Mounted;
use page_cache::Method;
use report::Measured;
use scratch::Scratch;
use worker::Trouble;

/// Minimum time limit of a run, and the number of bytes for which the limit grows by one second.
const LIMIT_MIN: Duration = Duration::from_secs(60);
const LIMIT_BYTES_PER_SECOND: u64 = 20_000_000;

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Stopped => Failure::Failed("stopped".to_owned()),
            Trouble::Skip(reason) | Trouble::Failed(reason) => Failure::Failed(reason),
        }
    }
}

/// The checkpoint that is measured.
#[derive(Debug)]
struct Subject {
    /// Path of the source.
    source: PathBuf,
    /// Path of the virtual file below the root of the mount.
    shown: PathBuf,
    /// Paths of the shard files.
    shards: Vec<PathBuf>,
    /// Path of the folder with the checkpoint.
    folder: PathBuf,
    bytes: u64,
    tensors: usize,
    kind: &'static str,
    /// Path of the real file with the same bytes.
    file: PathBuf,
    options: Vec<String>,
    limit: Duration,
    method: Method,
    runs: u32,
}

pub(super) fn run(args: &BenchArgs) -> Outcome {
    if let Ok(job) = std::env::var(job::JOB) {
        return if job::run(&job, args) { Ok(()) } else { Err(Failure::Told) };
    }
    in_json(args, bench(args))
}

/// Prints the error of `outcome` as JSON too, if JSON was requested.
pub(super) fn in_json(args: &BenchArgs, outcome: Outcome) -> Outcome {
    output::in_json(args.json, json!({ "cases": [], "notes": [] }), outcome)
}

fn bench(args: &BenchArgs) -> Outcome {
    log::start(0);
    tensorfs::internal::source::raise_limit();
    let options = Options::parse(&args.options, false).map_err(Failure::Usage)?;
    let (path, open) = behind(args, &options)?;
    if open.view.files == Files::Original {
        return Err(Failure::Usage("layout=original shows no single file to measure".to_owned()));
    }
    if open.views.is_some() || open.hub {
        return Err(Failure::Usage(
            "the bench reads one view: give no views= or layout=hub, and rank= with tp=".to_owned(),
        ));
    }
    // This check comes before any file is written and before anything is mounted.
    args.against.as_deref().map_or(Ok(()), check_file)?;
    if open.view.format != OutputFormat::default() {
        return Err(Failure::Usage("the bench reads safetensors; leave format= out".to_owned()));
    }
    let method = Method::choose(args.evict)?;
    take_signals();
    clean_up_on_signals();
    let mut made = None;
    let named = match (&args.source, args.make) {
        (Some(source), _) => source.clone(),
        (None, Some(_)) => made.insert(make_checkpoint(args)?).path().to_owned(),
        (None, None) => return Err(Failure::Usage("no source".to_owned())),
    };
    let source = Store::of(&named)
        .absolute(&named)
        .map_err(|e| Failure::Failed(format!("the working directory is gone: {e}")))?;
    let open =
        OpenOptions { secret: options.open_with_secret().map_err(Failure::Failed)?.secret, ..open };
    let tree = Tree::scan(path.as_deref().unwrap_or(&source), &open)?;
    let mut subject = look(&tree, &source, args, method)?;
    // The drop at the end of this function removes the checkpoint and this file.
    let written = consolidate(&mut subject, args)?;
    let outcome = measure(&subject, args);
    if args.keep {
        let kept = made.iter().chain(&written).map(|scratch| shown_path(scratch.path()));
        for path in kept {
            log::note(&format!("left in {path}"));
        }
    }
    outcome
}

/// If the argument is a path on a mount: the source behind it, and the options that open that
/// source as the new mount will. Otherwise no path, and the options of the command.
fn behind(args: &BenchArgs, options: &Options) -> Result<(Option<PathBuf>, OpenOptions), Failure> {
    let source = args.source.as_deref();
    let Some((source, origin)) = source.and_then(|path| Some((path, resolve_mount(path)?))) else {
        return Ok((None, options.open.clone()));
    };
    let (path, open) = origin.open_with(&options.open, options.has_view).ok_or_else(|| {
        let source = shown_path(source);
        let why =
            "lies on a mount with a view of its own: name its source, with the options of both";
        Failure::Usage(format!("{source}: {why}"))
    })?;
    Ok((Some(path), open))
}

/// Fails unless `path` is a regular file that can be read.
fn check_file(path: &Path) -> Outcome {
    let failed = |why: &dyn std::fmt::Display| {
        let path = shown_path(path);
        Err(Failure::Failed(format!("--against {path}: {why}; without it, a file is written")))
    };
    // Opening a FIFO would block, so the type is checked first.
    match std::fs::metadata(path).map(|meta| meta.is_file().then(|| File::open(path))) {
        Ok(Some(Ok(_))) => Ok(()),
        Ok(None) => failed(&"not a regular file"),
        Ok(Some(Err(e))) | Err(e) => failed(&e),
    }
}

/// The time limit for reading `bytes` bytes.
fn limit(args: &BenchArgs, bytes: u64) -> Duration {
    let default = LIMIT_MIN + Duration::from_secs(bytes / LIMIT_BYTES_PER_SECOND);
    args.time_limit.map_or(default, Duration::from_secs)
}

fn make_checkpoint(args: &BenchArgs) -> Result<Scratch, Failure> {
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    // The consolidated file will be in the same folder and needs the same space again.
    let scratch = Scratch::new(&dir, 2 * args.size, args.keep)?;
    let made = args.make.as_ref().and_then(ValueEnum::to_possible_value);
    let name = made.as_ref().map_or("", |value| value.get_name());
    let size = args.size.to_string();
    let scratch_path = scratch.path().as_os_str();
    let words = ["--make", name, "--size", &size, "--dir"].map(OsStr::new);
    progress(&format!("making a checkpoint of {}", shown_size(args.size)));
    worker::run("make", &[&words[..], &[scratch_path]].concat(), limit(args, args.size))?;
    Ok(scratch)
}

/// Finds the largest checkpoint that a mount of `source` shows. `tree` is the scan of the source.
fn look(tree: &Tree, source: &Path, args: &BenchArgs, method: Method) -> Result<Subject, Failure> {
    let mut largest: Option<Subject> = None;
    let mut refusal = None;
    for found in prove_all(tree)?.0 {
        let checkpoint = match found.set.outcome {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                refusal.get_or_insert(error);
                continue;
            }
        };
        let catalog = checkpoint.catalog();
        let bytes = match checkpoint.is_whole_file() {
            true => catalog.shards[0].file_len,
            false => checkpoint.single_file().layout()?.len(),
        };
        if largest.as_ref().is_none_or(|largest| largest.bytes < bytes) {
            largest = Some(Subject {
                source: source.to_owned(),
                shown: found.directory.join(&found.set.name),
                shards: checkpoint.sources().iter().map(|s| s.path().to_owned()).collect(),
                folder: checkpoint.directory.clone(),
                bytes,
                tensors: catalog.len(),
                kind: checkpoint.kind.as_str(),
                file: args.against.clone().unwrap_or_default(),
                options: args.options.clone(),
                limit: limit(args, bytes),
                method,
                runs: args.runs,
            });
        }
    }
    match (largest, refusal) {
        (Some(largest), _) => Ok(largest),
        (None, Some(error)) => Err(Failure::Error(error)),
        (None, None) => Err(Failure::at(source, "nothing to measure")),
    }
}

/// Writes the consolidated file, unless the arguments name one. Compares the file with the mounted
/// file.
fn consolidate(subject: &mut Subject, args: &BenchArgs) -> Result<Option<Scratch>, Failure> {
    let mounted = Mounted::start(&subject.source, &subject.options, subject.limit)?;
    let shown = mounted.path().join(&subject.shown);
    let mut scratch = None;
    if args.against.is_none() {
        let folder =
            Scratch::beside(&subject.shards, args.dir.as_deref(), subject.bytes, args.keep)?;
        subject.file = folder.path().join("consolidated.safetensors");
        scratch = Some(folder);
        progress(&format!("writing {}", shown_path(&subject.file)));
        let words = [shown.as_os_str(), "--against".as_ref(), subject.file.as_os_str()];
        worker::run("copy", &words, subject.limit)?;
    }
    progress("comparing the file with what the mount shows");
    let words = [shown.as_os_str(), "--against".as_ref(), subject.file.as_os_str()];
    let compared = worker::run("compare", &words, 2 * subject.limit)?;
    match compared["difference"].as_str() {
        None => Ok(scratch),
        Some(difference) => Err(Failure::Failed(format!(
            "{}: not what the mount shows as {}: {difference}",
            shown_path(&subject.file),
            shown_path(&subject.shown)
        ))),
    }
}

/// Measures the cases and prints the results.
fn measure(subject: &Subject, args: &BenchArgs) -> Outcome {
    let mut facts = facts(subject)?;
    if !args.json {
        print_text(&title(&facts))?;
        print_text(&report::head())?;
    }
    let mut measured = Vec::new();
    for case in &args.cases {
        let result = rounds::measure(subject, case, args.dir.as_deref())?;
        progress("");
        if !args.json {
            print_text(&result.row())?;
        }
        measured.push(result);
    }
    let notes = notes(&measured);
    let failed = measured.iter().any(|measured| measured.failed.is_some());
    if args.json {
        facts["ok"] = json!(!failed);
        facts["class"] = Value::Null;
        facts["error"] = Value::Null;
        facts["notes"] = json!(notes);
        facts["cases"] = measured.iter().map(Measured::json).collect();
        print_json(&facts)?;
    } else {
        print_text(
            &notes.iter().map(|note| format!("note: {}\n", shown(note))).collect::<String>(),
        )?;
    }
    if failed { Err(Failure::Told) } else { Ok(()) }
}

/// Facts about the machine and the build with which the figures were measured.
fn facts(subject: &Subject) -> Result<Value, Failure> {
    let failed = |e: std::io::Error| Failure::at(&subject.file, e);
    let mounted = Mounted::start(&subject.source, &subject.options, subject.limit)?;
    let shards = subject.shards.first().unwrap_or(&subject.file);
    let checked = page_cache::cached_part(&subject.shards).is_some();
    Ok(json!({
        "tensorfs": env!("CARGO_PKG_VERSION"),
        "machine": machine::describe(),
        "source": {
            "path": real_name(&subject.source),
            "file": real_name(&subject.shown),
            "kind": subject.kind,
            "shards": subject.shards.len(),
            "tensors": subject.tensors,
            "on": machine::below(shards).map_err(failed)?,
        },
        "against": {
            "path": real_name(&subject.file),
            "on": machine::below(&subject.file).map_err(failed)?,
        },
        "mount": {
            "options": subject.options,
            "readahead_kib": mounted.readahead_kib(),
        },
        "bytes": subject.bytes,
        "runs": subject.runs,
        "evict": { "method": subject.method.as_str(), "checked": checked },
    }))
}

fn title(facts: &Value) -> String {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => "unknown".to_owned(),
        other => other.to_string(),
    };
    let on = |on: &Value| {
        let (kind, device) = (text(&on["file_system"]), text(&on["device"]));
        format!("{kind} on {device}, readahead {} KiB", text(&on["readahead_kib"]))
    };
    let (source, against, evict) = (&facts["source"], &facts["against"], &facts["evict"]);
    let given = facts["mount"]["options"].as_array().into_iter().flatten();
    let words: Vec<&str> = given.filter_map(Value::as_str).collect();
    let options = if words.is_empty() { "none".to_owned() } else { shown(&words.join(",")) };
    let checked = if evict["checked"] == true { "checked" } else { "not checked" };
    format!(
        "tensorfs {}, Linux {}, {} cores, {} of memory\n\
         mount: {} of {} ({}, {} shards; {}), options {options}, readahead {} KiB\n\
         file:  {} ({})\n\
         {}, {} runs of each, cold by {} ({checked})\n\n",
        text(&facts["tensorfs"]),
        text(&facts["machine"]["kernel"]),
        facts["machine"]["cores"],
        shown_size(facts["machine"]["memory_bytes"].as_u64().unwrap_or(0)),
        shown(&text(&source["file"])),
        shown(&text(&source["path"])),
        text(&source["kind"]),
        source["shards"],
        on(&source["on"]),
        text(&facts["mount"]["readahead_kib"]),
        shown(&text(&against["path"])),
        on(&against["on"]),
        shown_size(facts["bytes"].as_u64().unwrap_or(0)),
        facts["runs"],
        text(&evict["method"]),
    )
}

/// Remarks on the figures.
fn notes(measured: &[Measured]) -> Vec<String> {
    let mut notes = Vec::new();
    for measured in measured {
        let cold =
            matches!(measured.case.state, args::CacheState::Cold | args::CacheState::Assembled);
        let is_wrong = |part: f64| if cold { part > 0.01 } else { part < 0.99 };
        let parts = measured.runs.iter().filter_map(|run| run.cached);
        let wrong: Vec<f64> = parts.filter(|&part| is_wrong(part)).collect();
        if !wrong.is_empty() {
            let least = wrong.iter().copied().fold(f64::INFINITY, f64::min);
            let most = wrong.iter().copied().fold(0.0, f64::max);
            notes.push(format!(
                "{}: {} of {} runs began with {:.0}% to {:.0}% of their bytes cached instead of {}",
                measured.case.name,
                wrong.len(),
                measured.runs.len(),
                least * 100.0,
                most * 100.0,
                if cold { "none" } else { "all" },
            ));
        }
        if measured
            .runs
            .iter()
            .any(|run| run.side == report::Side::Mount && run.daemon_peak.is_none())
        {
            notes.push(format!("{}: the daemon's memory cannot be read", measured.case.name));
        }
    }
    notes
}

/// Shows progress on a terminal. The next message overwrites the line.
fn progress(what: &str) {
    let mut error = std::io::stderr();
    if error.is_terminal() && !log::is_quiet() {
        let _ = write!(error, "\r\x1b[K{what}");
        let _ = error.flush();
    }
}

/// Number of bytes that this user can still write to the file system of `path`.
fn space_free(path: &Path) -> std::io::Result<u64> {
    let stat = nix::sys::statvfs::statvfs(path)?;
    Ok(stat.blocks_available() * stat.fragment_size())
}
