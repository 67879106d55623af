//! `faultfs SRC MNT [SECONDS]`: mirrors a folder and misbehaves on command, as the source of mounts under
//! test.
//!
//! Prints `ready` once it is mounted. After that, each line on stdin is a command, and the answer is one line on
//! stdout:
//!
//! - `stall GLOB`: reads of files whose path below SRC matches are answered after `resume`; `stall GLOB OFFSET`: only
//!   reads from this offset on;
//! - `eio GLOB`: reads fail; `delay GLOB MS`: reads are answered later; `short GLOB`: reads get fewer bytes than they
//!   request;
//! - `stall-open`, `eio-getattr`, `delay-lookup` and so on: the same for other requests;
//! - `no-direct GLOB`: opens with `O_DIRECT` fail;
//! - `resume` ends all stalls, `ok` all faults;
//! - `counts GLOB`, `ranges GLOB`: JSON with the requests since the start or since `reset`;
//! - `parked GLOB`: the number of requests that are held back.
//!
//! For `SECONDS`, the kernel may answer questions about the attributes of a file by itself, as a client of NFS does.
//!
//! It unmounts and ends when stdin ends, on SIGTERM, or when its parent ends.

mod faults;
mod mirror;

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fuser::{Config, MountOption};
use nix::mount::{MntFlags, umount2};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};

use faults::Faults;
use mirror::Mirror;

/// Number of threads that take requests. They wait only for the disk.
const THREADS: usize = 4;

fn main() -> ExitCode {
    let Err(why) = run();
    eprintln!("faultfs: {why}");
    ExitCode::FAILURE
}

fn run() -> Result<std::convert::Infallible, String> {
    let arguments: Vec<_> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let usage = || "usage: faultfs SRC MNT [SECONDS]".to_owned();
    let (source, target, seconds) = match arguments.as_slice() {
        [source, target] => (source, target, 0),
        [source, target, seconds] => {
            let seconds = seconds.to_str().and_then(|seconds| seconds.parse().ok());
            (source, target, seconds.ok_or_else(usage)?)
        }
        _ => return Err(usage()),
    };
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block().map_err(|e| e.to_string())?;
    set_pdeathsig(Signal::SIGTERM).map_err(|e| e.to_string())?;
    let source = source.canonicalize().map_err(|e| format!("{}: {e}", source.display()))?;

    let faults = Arc::new(Faults::default());
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("faultfs".to_owned()),
        MountOption::Subtype("faultfs".to_owned()),
        MountOption::RO,
    ];
    config.n_threads = Some(THREADS);
    let session = fuser::spawn_mount(
        Mirror::new(&source, faults.clone(), Duration::from_secs(seconds)),
        target,
        &config,
    )
    .map_err(|e| format!("{}: cannot mount: {e}", target.display()))?;
    std::thread::spawn({
        let faults = faults.clone();
        move || faults.answer_parked()
    });
    std::thread::spawn({
        let (faults, target) = (faults.clone(), target.clone());
        move || {
            let _ = signals.wait();
            end(&faults, &target);
        }
    });
    serve_commands(&faults);
    // The session has to live until here, because its end unmounts.
    let _session = session;
    end(&faults, target)
}

/// Carries out commands until stdin ends.
fn serve_commands(faults: &Faults) {
    let mut out = std::io::stdout().lock();
    let mut say = |line: &str| writeln!(out, "{line}").and_then(|()| out.flush());
    let mut said = say("ready");
    for line in std::io::stdin().lock().lines() {
        let (Ok(line), Ok(())) = (line, said) else { return };
        said = say(&faults.command(&line).unwrap_or_else(|why| format!("error: {why}")));
    }
}

/// Fails the requests that are held back, unmounts, and ends the process, which closes open files.
fn end(faults: &Faults, target: &Path) -> ! {
    static ENDING: Mutex<()> = Mutex::new(());
    // The lock is never released: a second caller waits until the first one ends the process.
    let _once = ENDING.lock();
    faults.end();
    if umount2(target, MntFlags::MNT_DETACH).is_err() {
        let _ = Command::new("fusermount3").args(["-u", "-z", "--"]).arg(target).status();
    }
    std::process::exit(0);
}
