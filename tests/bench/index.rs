//! `cargo bench --bench index` times the opening of large checkpoints from the index. It compares this with parsing
//! their headers by the genuine `safetensors` crate, and with opening them without an index.
//!
//! The three measurements take turns, with a warm page cache. The bench prints medians with minimum and maximum. It
//! checks no limits, because the figures are for people. `-- --runs N` sets the number of runs, and `-- --quick` uses
//! small checkpoints.

#![allow(clippy::unwrap_used, reason = "a bench that panics has failed, as it should")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use safetensors::tensor::{Metadata, SafeTensors};
use tensorfs::Dtype;
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::format::safetensors as format;
use tensorfs::internal::open_options::OpenOptions;
use tensorfs::internal::view::{Files, View};

/// A longer time than that in which the index treats a file as just written.
const SETTLE: Duration = Duration::from_secs(4);

/// The longest time that the mount of the tree and the indexes of all its models may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [word, source, index] = args.as_slice()
        && word == CHILD
    {
        return open_and_tell(Path::new(source), index);
    }
    if !args.iter().any(|arg| arg == "--bench") {
        return println!("run by `cargo bench --bench index`");
    }
    let quick = args.iter().any(|arg| arg == "--quick");
    let after = args.iter().position(|arg| arg == "--runs").map(|at| args[at + 1].parse().unwrap());
    let runs = after.unwrap_or(if quick { 3 } else { 9 });
    let shrink = if quick { 10 } else { 1 };
    let home = tempfile::Builder::new().prefix("tensorfs-bench-").tempdir().unwrap();
    many_tensors(home.path(), 60, 1000 / shrink, runs);
    very_many_tensors(home.path(), 4096 / shrink, 1_000_000 / shrink / shrink, runs);
    tree(home.path(), 200 / shrink, runs);
}

// ---------------------------------------------------------------------------------------------
// Checkpoints: headers as models have them, and data that takes no space on disk.

/// Writes `shards` files that hold `count` tensors together, named like those of a mixture of
/// experts.
fn write_checkpoint(folder: &Path, shards: usize, count: usize) {
    fs::create_dir_all(folder).unwrap();
    let names = tensor_names(count);
    for shard in 0..shards {
        let part = &names[count * shard / shards..count * (shard + 1) / shards];
        let entries = part.iter().enumerate().map(|(at, name)| {
            let (dtype, shape): (_, &[u64]) = match at % 8 {
                0..=3 => (Dtype::F8E4M3, &[256, 512]),
                4 => (Dtype::Bf16, &[512, 64]),
                5 => (Dtype::Bf16, &[512]),
                _ => (Dtype::F32, &[2, 4]),
            };
            (name.as_str(), dtype, shape, shape.iter().product::<u64>() * dtype.bits() / 8)
        });
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let header = format::encode(&metadata, entries.clone(), 8).unwrap();
        let len: u64 = entries.map(|(.., len)| len).sum();
        let name = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        fs::write(folder.join(&name), &header).unwrap();
        let file = File::options().write(true).open(folder.join(&name)).unwrap();
        file.set_len(header.len() as u64 + len).unwrap();
    }
}

fn tensor_names(count: usize) -> Vec<String> {
    let parts = ["gate_proj", "up_proj", "down_proj"];
    let kinds = ["weight", "weight_scale_inv"];
    let name = |at: usize| {
        let (kind, part, expert) = (kinds[at % 2], parts[at / 2 % 3], at / 6 % 256);
        format!("model.layers.{}.mlp.experts.{expert}.{part}.{kind}", at / 6 / 256)
    };
    (0..count).map(name).collect()
}

fn shard_paths(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Length of the headers of all shards together, in bytes.
fn header_bytes(folder: &Path) -> u64 {
    let len = |path: &PathBuf| {
        let mut prefix = [0; 8];
        File::open(path).unwrap().read_exact(&mut prefix).unwrap();
        8 + u64::from_le_bytes(prefix)
    };
    shard_paths(folder).iter().map(len).sum()
}

// ---------------------------------------------------------------------------------------------
// Ways to learn what a checkpoint holds.

/// Parses the header of one shard by the genuine crate, which needs a slice with the length of the file. Only the pages
/// of the header are touched.
fn parse_genuine(path: &Path) -> Metadata {
    let mut file = File::open(path).unwrap();
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact(&mut bytes[..8]).unwrap();
    let header_len = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    file.read_exact(&mut bytes[8..8 + header_len]).unwrap();
    SafeTensors::read_metadata(&bytes).unwrap().1
}

fn parse_all_genuine(paths: &[PathBuf], threads: usize) -> Vec<Metadata> {
    if threads == 1 {
        return paths.iter().map(|path| parse_genuine(path)).collect();
    }
    let part = paths.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let parse = |paths: &'_ [PathBuf]| paths.iter().map(|p| parse_genuine(p)).collect();
        let threads: Vec<_> = paths
            .chunks(part)
            .map(|paths| scope.spawn(move || -> Vec<_> { parse(paths) }))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

fn view(index: Option<&Path>, files: Files) -> OpenOptions {
    let view = View { files, ..View::default() };
    OpenOptions { index: index.map(Path::to_owned), view, ..OpenOptions::default() }
}

/// Length in bytes of the index in `folder`, which has the index of one checkpoint.
fn index_len(folder: &Path) -> u64 {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

// ---------------------------------------------------------------------------------------------
// Measurements.

fn many_tensors(home: &Path, shards: usize, tensors_each: usize, runs: usize) {
    let (folder, index) = (home.join("many"), home.join("many-index"));
    write_checkpoint(&folder, shards, shards * tensors_each);
    std::thread::sleep(SETTLE);
    let with = view(Some(&index), Files::Single);
    let without = view(None, Files::Single);
    Checkpoint::open_with(&folder, &with).unwrap();
    let paths = shard_paths(&folder);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut times: [Vec<Duration>; 4] = Default::default();
    for _ in 0..runs {
        times[0].push(timed(|| parse_all_genuine(&paths, 1)));
        times[1].push(timed(|| parse_all_genuine(&paths, threads)));
        times[2].push(timed(|| Checkpoint::open_with(&folder, &without).unwrap()));
        times[3].push(timed(|| Checkpoint::open_with(&folder, &with).unwrap()));
    }
    println!(
        "\n{} tensors in {shards} shards, warm page cache, {runs} runs each",
        shards * tensors_each
    );
    let names = [
        "headers by the safetensors crate, 1 thread".to_owned(),
        format!("headers by the safetensors crate, {threads} threads"),
        "open without an index".to_owned(),
        "open from the index".to_owned(),
    ];
    table(&names, &times);
    size_line(&folder, &index);
}

fn very_many_tensors(home: &Path, shards: usize, tensors: usize, runs: usize) {
    let (folder, index) = (home.join("large"), home.join("large-index"));
    write_checkpoint(&folder, shards, tensors);
    std::thread::sleep(SETTLE);
    let none = Path::new(NO_INDEX);
    // Writes the index.
    open_in_child(&folder, &index);
    let ways = [none, index.as_path()];
    let mut times: [Vec<Duration>; 2] = Default::default();
    let mut peaks = [0; 2];
    for _ in 0..runs.min(9) {
        for (way, index) in ways.iter().enumerate() {
            let (time, peak) = open_in_child(&folder, index);
            times[way].push(time);
            peaks[way] = peak.max(peaks[way]);
        }
    }
    println!(
        "\n{tensors} tensors in {shards} shards, layout=original, each run a process of its own"
    );
    let name = |what: &str, peak: u64| format!("{what}, peak {:.0} MB", peak as f64 / 1e6);
    table(
        &[name("open without an index", peaks[0]), name("open from the index", peaks[1])],
        &times,
    );
    size_line(&folder, &index);
}

fn tree(home: &Path, models: usize, runs: usize) {
    let Some(binary) = binary() else {
        return println!(
            "\na tree of models: skipped, needs target/release/tensorfs or TENSORFS_BIN"
        );
    };
    if !Path::new("/dev/fuse").exists() {
        return println!("\na tree of models: skipped, no /dev/fuse");
    }
    let folder = home.join("models");
    for model in 0..models {
        write_checkpoint(&folder.join(format!("model-{model:03}")), 3, 300);
    }
    std::thread::sleep(SETTLE);
    let mut times: [Vec<Duration>; 4] = Default::default();
    for run in 0..runs {
        let index = home.join(format!("tree-index-{run}"));
        times[0].push(mount_tree(&binary, home, &folder, Path::new(NO_INDEX), 0).0);
        let (mounted, indexed) = mount_tree(&binary, home, &folder, &index, models);
        times[1].push(mounted);
        times[2].push(indexed);
        times[3].push(mount_tree(&binary, home, &folder, &index, models).0);
    }
    println!("\na tree of {models} models of 300 tensors: from `mount` to the end of `ls`");
    let names = [
        "without indexes",
        "with no indexes yet",
        "  and until all models are indexed",
        "with all indexes",
    ];
    table(&names.map(str::to_owned), &times);
}

/// The program `tensorfs`: the one in TENSORFS_BIN, or the one that was built.
fn binary() -> Option<PathBuf> {
    if let Some(binary) = std::env::var_os("TENSORFS_BIN") {
        return Some(binary.into());
    }
    let own = std::env::current_exe().ok()?;
    Some(own.parent()?.parent()?.join("tensorfs")).filter(|path| path.exists())
}

/// Mounts the tree, lists it, waits until there are `indexes` indexes, and unmounts. Returns the time until the tree
/// was listed, and the time until the indexes were there.
fn mount_tree(
    binary: &Path,
    home: &Path,
    folder: &Path,
    index: &Path,
    indexes: usize,
) -> (Duration, Duration) {
    let target = home.join("mnt");
    fs::create_dir_all(&target).unwrap();
    let started = Instant::now();
    let log = format!("log={}", home.join("log").display());
    let mut mount = Command::new(binary);
    mount.arg("mount").arg(folder).arg(&target).args(["-o", &log]).arg("--index-dir").arg(index);
    let mounted = mount.stdin(Stdio::null()).status().unwrap().success();
    let listed = fs::read_dir(&target).unwrap().count();
    let answered = started.elapsed();
    let count = || fs::read_dir(index).map_or(0, |entries| entries.count());
    while mounted && count() < indexes && started.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    let indexed = started.elapsed();
    let unmounted = Command::new(binary).arg("umount").arg(&target).status().unwrap().success();
    if !unmounted {
        let _ = Command::new(binary).args(["umount", "--lazy"]).arg(&target).status();
    }
    assert!(mounted && listed > 0 && unmounted, "{mounted} {listed} {unmounted}");
    (answered, indexed)
}

// ---------------------------------------------------------------------------------------------
// A process of its own, so that its peak memory is that of one opening.

const CHILD: &str = "--open";
const NO_INDEX: &str = "none";

fn open_in_child(source: &Path, index: &Path) -> (Duration, u64) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.arg(CHILD).arg(source).arg(index).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<u64> = said.split_whitespace().map(|word| word.parse().unwrap()).collect();
    (Duration::from_nanos(numbers[0]), numbers[1])
}

/// Opens `source`, and prints the nanoseconds that it took and the peak memory in bytes.
fn open_and_tell(source: &Path, index: &str) {
    let index = (index != NO_INDEX).then(|| Path::new(index));
    let view = view(index, Files::Original);
    let started = Instant::now();
    let opened = Checkpoint::open_with(source, &view).unwrap();
    let time = started.elapsed();
    println!("{} {}", time.as_nanos(), peak());
    drop(opened);
}

fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

// ---------------------------------------------------------------------------------------------
// Times.

/// The time that `work` takes, without the drop of its result.
fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let started = Instant::now();
    let made = work();
    let time = started.elapsed();
    drop(made);
    time
}

/// Prints a line for each way: its times, and their ratio to the times of the first way.
fn table(names: &[String], times: &[Vec<Duration>]) {
    let sorted = |times: &Vec<Duration>| {
        let mut ms: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        ms
    };
    let sorted: Vec<Vec<f64>> = times.iter().map(sorted).collect();
    let median = |ms: &[f64]| ms[ms.len() / 2];
    println!("{:<48} {:>8} {:>8} {:>8}  of the first (minima)", "ms", "median", "min", "max");
    for (name, ms) in names.iter().zip(&sorted) {
        let share = median(ms) / median(&sorted[0]);
        let of_minima = ms[0] / sorted[0][0];
        let (median, min, max) = (median(ms), ms[0], ms[ms.len() - 1]);
        println!("{name:<48} {median:>8.2} {min:>8.2} {max:>8.2}  {share:.3} ({of_minima:.3})");
    }
}

fn size_line(folder: &Path, index: &Path) {
    let (json, index) = (header_bytes(folder), index_len(index));
    println!("index {index} bytes, headers {json} bytes: 1/{:.1}", json as f64 / index as f64);
}
