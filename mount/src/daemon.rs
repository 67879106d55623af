//! Mounting in the background: a child serves the mount, and the parent returns once the
//! mount answers, with the child's verdict.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::unistd::{dup2_stderr, dup2_stdin, dup2_stdout, setsid};

use crate::log;
use crate::options::Options;
use crate::session;

/// Environment variable that makes a process the child: it serves and reports on its standard
/// output, which is a pipe to the parent.
const CHILD: &str = "TENSORFS_DAEMON";

/// The line by which the child reports that the mount answers.
const READY: &str = "ready";

/// Starts the child and waits until its mount answers.
///
/// # Errors
/// The child's reason; nothing stays mounted.
pub(crate) fn run_in_background(
    source: &Path,
    target: &Path,
    options: &[String],
    sloppy: bool,
    verbose: u8,
) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("cannot start the daemon: {e}");
    let program = std::env::current_exe().map_err(fail)?;
    let mut child = Command::new(program);
    child.arg0("tensorfs").arg("mount").arg("--foreground").env(CHILD, "1");
    child.args((0..verbose).map(|_| "-v"));
    if sloppy {
        child.arg("--sloppy");
    }
    for option in options {
        child.arg("-o").arg(option);
    }
    let child = child.arg("--").arg(source).arg(target);
    let mut child = child.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(fail)?;
    let mut report = String::new();
    if let Some(output) = child.stdout.take() {
        BufReader::new(output).read_line(&mut report).map_err(fail)?;
    }
    match report.trim_end() {
        READY => Ok(()),
        "" => {
            let status = child.wait().map_err(fail)?;
            Err(format!("the daemon ended before the mount answered ({status})"))
        }
        reason => {
            child.wait().map_err(fail)?;
            Err(reason.to_owned())
        }
    }
}

/// Whether this process is the child of `run_in_background`.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Mounts and serves until the mount is taken off; as the child, reports to the parent.
///
/// # Errors
/// One line that says what is wrong; nothing stays mounted.
pub(crate) fn run(source: &Path, target: &Path, mut options: Options) -> Result<(), String> {
    tensorfs::source::raise_limit();
    options.make_absolute().map_err(|e| format!("the working directory is gone: {e}"))?;
    let log_file = options.log.clone();
    if let Some(file) = &log_file {
        log::to_file(file).map_err(|e| format!("{}: cannot log there: {e}", file.display()))?;
    }
    let plan = session::plan(source, target, options)?;
    let place = plan.target.clone();
    // From here on a signal means unmount; until now it ends the process, as it should.
    session::block_signals();
    let running = session::start(plan)?;
    if is_child() {
        detach_from_parent(log_file.is_none()).map_err(|e| {
            let _ = crate::attach::detach(&place, crate::attach::Detach::Force);
            format!("cannot go to the background: {e}")
        })?;
    }
    let status = format!("serving {} on {}", source.display(), place.display());
    let _ = sd_notify::notify(&[
        sd_notify::NotifyState::Ready,
        sd_notify::NotifyState::Status(&status),
    ]);
    running.serve()
}

/// Leaves terminal, session and working directory, tells the parent that all is well, and lets
/// go of its standard streams.
fn detach_from_parent(to_system_log: bool) -> std::io::Result<()> {
    setsid()?;
    std::env::set_current_dir("/")?;
    if to_system_log && let Some(file) = log::to_system_log()? {
        crate::cmd::say(&format!("no system log here; logging to {}", file.display()));
    }
    let mut output = std::io::stdout();
    writeln!(output, "{READY}")?;
    output.flush()?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    Ok(())
}
