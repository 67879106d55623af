//! `tensorfs load`: loads a checkpoint into memory, and reports the time of each step.

use std::fmt::Write;
use std::fs::File;
use std::io::{Read, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::device::Gpu;
use tensorfs::internal::error::{counted, real_name, shown, shown_path};
use tensorfs::internal::loader::{
    CUFILE_MODULE, DeviceStats, Loader, LoaderConfig, MemoryStats, Progress, Report,
};
use tensorfs::internal::plan::TensorRequest;
use tensorfs::internal::size::shown_size;

use super::args;
use super::output::{Failure, Outcome, print_json, print_text, speed};
use super::sources::{begin_source_command, one_checkpoint};
use super::verify::bar;

pub(super) fn run(args: &args::LoadArgs) -> Outcome {
    let options = begin_source_command(&args.source, &args::LOAD)?;
    if let Some(path) = &args.trace {
        check_trace(path)?;
    }
    if args.cufile && args.device == args::Device::Cpu {
        return Err(Failure::Usage("--cufile reads to a GPU: say --device cuda:N".to_owned()));
    }
    let settings = options.settings();
    let started = Instant::now();
    let gpu = match args.device {
        args::Device::Cpu => None,
        args::Device::Cuda(ordinal) => Some((Gpu::open(ordinal)?, started.elapsed())),
    };
    let started = Instant::now();
    let (checkpoint, notes, _) = one_checkpoint(&args.source, options)?;
    let opened = started.elapsed();
    let requests: Vec<TensorRequest> =
        (0..checkpoint.catalog().len()).map(TensorRequest::whole).collect();
    let bar = bar(args.progress, 0);
    let mut progress = |progress: Progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.read);
        true
    };
    let report = match &gpu {
        None => {
            let loader = Loader::new(LoaderConfig { settings, ..LoaderConfig::default() });
            loader.load(&checkpoint, &requests, &mut progress).map(|loaded| loaded.report)
        }
        Some((gpu, _)) => {
            let cufile = args.cufile.then(|| CUFILE_MODULE.into());
            let loader = Loader::new(LoaderConfig { settings, cufile, ..LoaderConfig::device() });
            let loaded = loader.load_device(gpu, &checkpoint, &requests, &mut progress);
            loaded.map(|loaded| loaded.report)
        }
    };
    bar.finish_and_clear();
    let load =
        FinishedLoad { checkpoint: &checkpoint, report: &report?, opened, gpu: gpu.as_ref() };
    if let Some(path) = &args.trace {
        let written = write_trace(path, &checkpoint, load.report);
        written.map_err(|e| Failure::at(path, format_args!("cannot write: {e}")))?;
    }
    if args.source.json {
        let mut json = to_json(&load);
        json["source"] = json!(real_name(&args.source.source));
        json["notes"] = json!(notes);
        return print_json(&json);
    }
    let notes = notes.iter().map(|note| format!("  note: {}\n", shown(note)));
    print_text(&(to_text(&load) + &notes.collect::<String>()))
}

/// A load that has ended.
struct FinishedLoad<'a> {
    checkpoint: &'a Checkpoint,
    report: &'a Report,
    /// Time that opening the checkpoint took.
    opened: Duration,
    /// The GPU that was loaded to, and the time that opening the GPU took.
    gpu: Option<&'a (Gpu, Duration)>,
}

impl FinishedLoad<'_> {
    /// Time from the start of opening the checkpoint until the last byte is loaded. The time to
    /// open the GPU is not included, because a program that uses a GPU has it open already.
    fn total(&self) -> Duration {
        let stats = &self.report.stats;
        self.opened + stats.plan + stats.load
    }
}

/// Bytes per second.
fn rate(bytes: u64, time: Duration) -> u64 {
    (bytes as f64 / time.as_secs_f64().max(1e-9)) as u64
}

fn to_text(load: &FinishedLoad<'_>) -> String {
    let (checkpoint, stats) = (load.checkpoint, &load.report.stats);
    let catalog = checkpoint.catalog();
    let seconds = |time: Duration| format!("{:.3} s", time.as_secs_f64());
    let total = load.total();
    let mut text = format!(
        "{}: {}, {} in {}, loaded in {} at {}\n",
        shown_path(&checkpoint.directory.join(&checkpoint.name)),
        counted(catalog.len(), "tensor"),
        shown_size(stats.wanted),
        counted(catalog.shards.len(), "shard"),
        seconds(total),
        speed(stats.wanted, total.as_secs_f64()),
    );
    let mut line = |label: &str, said: String| {
        let _ = writeln!(text, "  {label:<8} {said}");
    };
    if let Some((gpu, opened)) = load.gpu {
        line("gpu", format!("{}, opened in {} before", gpu.name(), seconds(*opened)));
    }
    line("open", seconds(load.opened));
    line("plan", seconds(stats.plan));
    let direct = format!("{} of {} reads past the page cache", stats.reads_direct, stats.reads);
    line(
        "read",
        format!(
            "{}, {} at {}, {direct}",
            seconds(stats.load),
            shown_size(stats.read),
            speed(stats.read, stats.load.as_secs_f64())
        ),
    );
    match &stats.device {
        Some(device) => {
            let how = format!("{} pinned in {}", shown_size(device.pinned), seconds(device.pin));
            line("allocate", seconds(device.allocate));
            line("pin", format!("{how}, {}", device.pinning));
            line("copy", format!("{} in {} copies", seconds(device.copy), device.copies));
            if let Some(cufile) = cufile_of(device) {
                line("cufile", cufile);
            }
        }
        None => line(
            "move",
            format!(
                "{} of all threads; {} read to their place",
                seconds(stats.moving),
                shown_size(stats.placed)
            ),
        ),
    }
    line("staging", format!("{} at its peak", shown_size(stats.staging_peak)));
    if stats.memory != MemoryStats::default() {
        line("memory", memory_of(&stats.memory));
    }
    text
}

/// Describes how much memory was populated before the reads.
fn memory_of(memory: &MemoryStats) -> String {
    let of = |bytes, time: Duration, pages| match bytes {
        0 => format!("none in {pages} pages"),
        _ => {
            let speed = speed(bytes, time.as_secs_f64());
            format!("{} in {pages} pages at {speed} a thread", shown_size(bytes))
        }
    };
    let small = of(memory.small, memory.small_time, "small");
    format!("{}, {small}", of(memory.huge, memory.huge_time, "huge"))
}

/// The result of cuFile, if the user requested it.
fn cufile_of(device: &DeviceStats) -> Option<String> {
    match &device.cufile_unused {
        Some(why) => Some(format!("not used: {why}")),
        None => (device.cufile > 0).then(|| shown_size(device.cufile)),
    }
}

fn to_json(load: &FinishedLoad<'_>) -> Value {
    let (checkpoint, stats) = (load.checkpoint, &load.report.stats);
    let catalog = checkpoint.catalog();
    let total = load.total();
    let device = load.gpu.map_or("cpu".to_owned(), |(gpu, _)| format!("cuda:{}", gpu.ordinal()));
    let gpu = load.gpu.zip(stats.device.as_ref()).map(|((gpu, opened), device)| {
        json!({
            "name": gpu.name(),
            "open_s": opened.as_secs_f64(),
            "allocate_s": device.allocate.as_secs_f64(),
            "pin_s": device.pin.as_secs_f64(),
            "pinned": device.pinned,
            "pinning": device.pinning,
            "copy_s": device.copy.as_secs_f64(),
            "copies": device.copies,
            "cufile_bytes": device.cufile,
            "cufile_unused": device.cufile_unused,
        })
    });
    json!({
        "ok": true,
        "class": Value::Null,
        "error": Value::Null,
        "directory": real_name(&checkpoint.directory),
        "name": checkpoint.name,
        "device": device,
        "gpu": gpu,
        "tensors": catalog.len(),
        "shards": catalog.shards.len(),
        "bytes": stats.wanted,
        "bytes_read": stats.read,
        "bytes_read_to_place": stats.placed,
        "reads": stats.reads,
        "reads_direct": stats.reads_direct,
        "open_s": load.opened.as_secs_f64(),
        "plan_s": stats.plan.as_secs_f64(),
        "read_s": stats.load.as_secs_f64(),
        "move_thread_s": stats.moving.as_secs_f64(),
        "total_s": total.as_secs_f64(),
        "bytes_per_s": rate(stats.wanted, total),
        "read_bytes_per_s": rate(stats.read, stats.load),
        "staging_peak": stats.staging_peak,
        "huge_bytes": stats.memory.huge,
        "huge_thread_s": stats.memory.huge_time.as_secs_f64(),
        "small_bytes": stats.memory.small,
        "small_thread_s": stats.memory.small_time.as_secs_f64(),
    })
}

/// Writes the reads of a load in Chrome's trace format, with one row for each slot.
fn write_trace(path: &Path, checkpoint: &Checkpoint, report: &Report) -> std::io::Result<()> {
    let mut events = Vec::new();
    for event in &report.events {
        let shard = &checkpoint.catalog().shard(event.shard).name;
        let facts = json!({ "shard": shard, "from": event.range.start, "to": event.range.end });
        let mut stage = |name: &str, from: Duration, to: Duration| {
            events.push(json!({
                "name": name,
                "ph": "X",
                "pid": 1,
                "tid": event.slot,
                "ts": from.as_secs_f64() * 1e6,
                "dur": to.saturating_sub(from).as_secs_f64() * 1e6,
                "args": facts,
            }));
        };
        stage("queue", event.sent, event.began);
        stage("read", event.began, event.came);
        if let Some(moved) = &event.moved {
            stage("copy", moved.start, moved.end);
        }
    }
    let trace = json!({ "traceEvents": events, "displayTimeUnit": "ms" });
    let mut text = serde_json::to_vec(&trace)?;
    text.push(b'\n');
    let is_new = std::fs::symlink_metadata(path).is_err();
    let written = File::create(path).and_then(|mut file| file.write_all(&text));
    if written.is_err() && is_new {
        let _ = std::fs::remove_file(path);
    }
    written
}

/// The first bytes of each trace. Keys are written in a fixed order.
const TRACE_START: &[u8] = br#"{"displayTimeUnit":"#;

/// Refuses to overwrite a file that is not a trace.
fn check_trace(path: &Path) -> Outcome {
    let Ok(meta) = std::fs::metadata(path) else { return Ok(()) };
    if !meta.is_file() || meta.len() == 0 {
        return Ok(());
    }
    let mut start = vec![0; TRACE_START.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    if read.is_ok() && start == TRACE_START {
        return Ok(());
    }
    Err(Failure::at(path, "is there already and is no trace; name another file"))
}
