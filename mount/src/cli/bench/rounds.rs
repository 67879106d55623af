//! The rounds of a case. Each round has one run on each side. The side that goes first alternates.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use tensorfs::internal::error::real_name;
use tensorfs::internal::size::shown_size;
use tensorfs::internal::system_memory::of_machine;

use super::args::{CacheState, Case};
use super::mounted::Mounted;
use super::report::{Measured, Run, Side};
use super::scratch::Scratch;
use super::threads::Threads;
use super::worker::{self, Trouble, Worker};
use super::{Subject, page_cache, progress};
use crate::options::{Options, escape};

/// Maximum processor time in seconds per GB that a daemon uses while the kernel serves the file
/// without the daemon.
const IDLE_CPU_PER_GB: f64 = 0.02;

/// Interval between checks of whether a file is assembled.
const ASSEMBLE_LOOK: Duration = Duration::from_millis(500);

/// Measures `case`. If a side fails, the result says so. The function itself fails only if the
/// bench is stopped.
pub(super) fn measure(
    subject: &Subject,
    case: &Case,
    dir: Option<&Path>,
) -> Result<Measured, Trouble> {
    let mut measured =
        Measured { case: case.clone(), runs: Vec::new(), skipped: None, failed: None };
    match rounds(subject, case, dir, &mut measured.runs) {
        Ok(()) if !measured.agrees() => {
            measured.failed = Some("not all runs saw the same bytes".to_owned());
        }
        Ok(()) => {}
        Err(Trouble::Stopped) => return Err(Trouble::Stopped),
        Err(Trouble::Skip(reason)) => measured.skipped = Some(reason),
        Err(Trouble::Failed(reason)) => measured.failed = Some(reason),
    }
    Ok(measured)
}

fn rounds(
    subject: &Subject,
    case: &Case,
    dir: Option<&Path>,
    runs: &mut Vec<Run>,
) -> Result<(), Trouble> {
    if case.pattern.keeps_all() {
        // All tensors are in memory at the same time.
        let wanted = subject.bytes + subject.bytes / 4;
        if of_machine("MemAvailable").is_some_and(|free| free < wanted) {
            let wanted = shown_size(wanted);
            return Err(Trouble::Skip(format!("needs {wanted} of memory")));
        }
    }
    let assembled = match case.state {
        CacheState::Assembled => Some(Assembled::new(subject, dir)?),
        _ => None,
    };
    for round in 0..subject.runs {
        let mut sides = [Side::Mount, Side::File];
        sides.rotate_left(round as usize % 2);
        for side in sides {
            let (name, of) = (side.as_str(), subject.runs);
            progress(&format!("{}: {name}, {} of {of}", case.name, round + 1));
            let mut run = match side {
                Side::Mount => on_mount(subject, case, round, assembled.as_ref()),
                Side::File => on_file(subject, case, round),
            }
            .map_err(|trouble| match trouble {
                Trouble::Failed(reason) => Trouble::Failed(format!("{name}: {reason}")),
                other => other,
            })?;
            (run.side, run.round) = (side, round);
            runs.push(run);
        }
    }
    Ok(())
}

/// A run that reads the real file.
fn on_file(subject: &Subject, case: &Case, round: u32) -> Result<Run, Trouble> {
    let file = std::slice::from_ref(&subject.file);
    let start =
        || worker::reader(case.pattern, &subject.file, &subject.folder, round, subject.limit);
    match case.state {
        CacheState::Cold | CacheState::Assembled => {
            let reader = start()?;
            subject.method.evict(&all_files(subject, None))?;
            begin(reader, file)
        }
        CacheState::Warm | CacheState::SourceCached => {
            worker::warm(&subject.file, subject.limit)?;
            begin(start()?, file)
        }
    }
}

/// A run that reads the mount. The mount is new, so neither the kernel nor the daemon has cached
/// anything. Only a mount with an assembled file is used again.
fn on_mount(
    subject: &Subject,
    case: &Case,
    round: u32,
    assembled: Option<&Assembled>,
) -> Result<Run, Trouble> {
    let fresh;
    let mounted = match assembled {
        Some(assembled) => &assembled.mounted,
        None => {
            fresh = Mounted::start(&subject.source, &subject.options, subject.limit)?;
            &fresh
        }
    };
    let shown = mounted.path().join(&subject.shown);
    let start = || worker::reader(case.pattern, &shown, &subject.folder, round, subject.limit);
    let reader = match case.state {
        CacheState::Cold | CacheState::Assembled => {
            let reader = start()?;
            if assembled.is_some() {
                worker::run("evict", &[shown.as_os_str()], subject.limit)?;
            }
            subject.method.evict(&all_files(subject, assembled))?;
            reader
        }
        CacheState::Warm => {
            worker::warm(&shown, subject.limit)?;
            start()?
        }
        CacheState::SourceCached => {
            for shard in &subject.shards {
                worker::warm(shard, subject.limit)?;
            }
            start()?
        }
    };
    let reset = mounted.reset_peak();
    let (cpu, counted) = (mounted.cpu(), mounted.read_ahead());
    let before = Threads::of(mounted.pid());
    let read = match assembled {
        Some(assembled) => files_below(assembled.folder.path()),
        None => subject.shards.clone(),
    };
    let mut run = begin(reader, &read)?;
    let taken = mounted.cpu().zip(cpu).map(|(after, before)| after.saturating_sub(before));
    run.daemon_cpu = taken.map(|taken| taken.as_secs_f64());
    run.threads = Threads::of(mounted.pid()).since(&before);
    run.read_ahead = counters_since(mounted.read_ahead(), &counted);
    run.daemon_peak = mounted.peak().filter(|_| reset);
    if case.state == CacheState::Warm {
        // The relevant pages are the pages of the mount, and the kernel does not tell how many of
        // them are cached.
        run.cached = None;
    }
    Ok(run)
}

/// Lets `reader` begin, and returns its figures. `files` are the files that contain the bytes that
/// it reads.
fn begin(reader: Worker, files: &[PathBuf]) -> Result<Run, Trouble> {
    let cached = page_cache::cached_part(files);
    let found = reader.go()?;
    let (Some(seconds), Some(bytes)) = (found["seconds"].as_f64(), found["bytes"].as_u64()) else {
        return Err(Trouble::Failed(format!("the reader said {found}")));
    };
    Ok(Run {
        side: Side::File,
        round: 0,
        seconds,
        bytes,
        digest: found["digest"].as_str().map(str::to_owned),
        reader_cpu: found["cpu_seconds"].as_f64(),
        operations: found["operations"].as_u64(),
        daemon_cpu: None,
        daemon_peak: None,
        threads: Vec::new(),
        read_ahead: BTreeMap::new(),
        cached,
    })
}

/// The growth of each counter. A counter that is missing in `before` began at 0.
fn counters_since(
    now: BTreeMap<String, u64>,
    before: &BTreeMap<String, u64>,
) -> BTreeMap<String, u64> {
    let since = |(name, now): (String, u64)| {
        let before = before.get(&name).copied().unwrap_or(0);
        (name, now.saturating_sub(before))
    };
    now.into_iter().map(since).collect()
}

/// All files on disks that a run may read.
fn all_files(subject: &Subject, assembled: Option<&Assembled>) -> Vec<PathBuf> {
    let mut files = subject.shards.clone();
    files.push(subject.file.clone());
    files.extend(assembled.into_iter().flat_map(|assembled| files_below(assembled.folder.path())));
    files
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries
        .flat_map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => files_below(&entry.path()),
            Ok(kind) if kind.is_file() => vec![entry.path()],
            _ => Vec::new(),
        })
        .collect()
}

/// A mount that has assembled the file, so that the kernel serves it without the daemon.
#[derive(Debug)]
struct Assembled {
    // The fields are dropped in order: the mount has to end before its folder is removed.
    mounted: Mounted,
    folder: Scratch,
}

impl Assembled {
    /// Mounts with `assemble=` and reads the file until the kernel serves it without the daemon.
    fn new(subject: &Subject, dir: Option<&Path>) -> Result<Assembled, Trouble> {
        if Options::parse(&["assemble=/x"], false).is_err() {
            return Err(Trouble::Skip("this tensorfs has no option assemble=".to_owned()));
        }
        if !geteuid().is_root() {
            return Err(Trouble::Skip("needs root, as the kernel's passthrough does".to_owned()));
        }
        let folder = Scratch::beside(&subject.shards, dir, subject.bytes, false)?;
        let option = format!("assemble={}", escape(&real_name(folder.path())));
        let options = [&subject.options[..], &[option]].concat();
        let mounted = Mounted::start(&subject.source, &options, subject.limit)?;
        let assembled = Assembled { mounted, folder };
        progress("waiting until the file is assembled");
        let deadline = Instant::now() + subject.limit;
        while !assembled.is_served_by_the_kernel(subject)? {
            if Instant::now() > deadline {
                let seconds = subject.limit.as_secs();
                let reason = format!("after {seconds} s the daemon still serves the file");
                return Err(Trouble::Skip(reason));
            }
            std::thread::sleep(ASSEMBLE_LOOK);
        }
        Ok(assembled)
    }

    /// Reads the file once, and checks that the daemon has used almost no processor time.
    fn is_served_by_the_kernel(&self, subject: &Subject) -> Result<bool, Trouble> {
        let shown = self.mounted.path().join(&subject.shown);
        worker::run("evict", &[shown.as_os_str()], subject.limit)?;
        let before = self.mounted.cpu();
        worker::warm(&shown, subject.limit)?;
        let taken = self.mounted.cpu().zip(before).map(|(after, before)| after - before);
        let allowed = IDLE_CPU_PER_GB * subject.bytes as f64 / 1e9 + 0.005;
        Ok(taken.is_some_and(|taken| taken.as_secs_f64() < allowed))
    }
}
