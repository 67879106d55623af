//! `tensorfs run`: mounts in a private folder for one command, and unmounts when the command ends.
//!
//! The command stays in the process group of this process, so that the terminal and pipelines treat it
//! as if there were no mount. This process has the writing end of a pipe open. When it ends for any
//! reason, the pipe closes and the daemon unmounts.

use std::ffi::OsString;
use std::io::{self, ErrorKind, PipeWriter, Read};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};

use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tensorfs::internal::error::{shown, shown_path};
use tensorfs::internal::mountinfo;

use super::output::{Failure, Outcome};
use super::sources::index_option;
use super::{args, mount};
use crate::daemon::attach::{Detach, detach};
use crate::daemon::{background, ending, inherited};
use crate::log;
use crate::options::Options;

/// The placeholder for the mount in the arguments of the command.
const PLACEHOLDER: &[u8] = b"{}";

/// The environment variable with which the command finds the mount.
const VARIABLE: &str = "TENSORFS_MOUNT";

/// Exit statuses, as shells define them: for a command that cannot be run, and for one that does not
/// exist.
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Signals that are passed to the command.
const PASSED: [Signal; 8] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGTSTP,
    Signal::SIGCONT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// The end of the command.
enum CommandEnd {
    Exited(u8),
    Killed(Signal),
}

pub(super) fn run(args: &args::RunArgs) -> Result<ExitCode, Failure> {
    let mut words = args.options.clone();
    words.extend(index_option(args.index_dir.as_deref()));
    Options::parse(&words, false).map_err(Failure::Usage)?;
    log::start(args.verbose);
    let failed = |what: &str, e: io::Error| Failure::Failed(format!("{what}: {e}"));
    // From here on, a signal must not end this process before the folder is removed. Until the
    // command starts, Ctrl-Z stops both this process and the daemon that is mounting.
    let taken = SigSet::from_iter(PASSED.into_iter().chain([Signal::SIGCHLD]));
    let mut ending = taken;
    ending.remove(Signal::SIGTSTP);
    let signals = ending
        .thread_block()
        .and_then(|()| SignalFd::with_flags(&taken, SfdFlags::SFD_CLOEXEC))
        .map_err(|e| failed("cannot take signals", e.into()))?;
    let template = std::path::absolute(std::env::temp_dir().join("tensorfs-run-XXXXXX"))
        .map_err(|e| failed("the working directory is gone", e))?;
    let target = nix::unistd::mkdtemp(&template)
        .map_err(|e| failed(&shown_path(&template), io::Error::from(e)))?;
    let end = RunMount::new(args, &words, target).and_then(|mount| serve(args, &mount, &signals));
    match end {
        Ok(CommandEnd::Exited(code)) => Ok(ExitCode::from(code)),
        Ok(CommandEnd::Killed(signal)) => Ok(end_by(signal)),
        // A signal that stops this process has ended the daemon too.
        Err(failure) => match stopped_by(&signals) {
            Some(signal) => Ok(end_by(signal)),
            None => Err(failure),
        },
    }
}

/// Mounts for a command of `run`. Unmounts when standard input reaches its end.
pub(super) fn daemon(args: &args::MountArgs) -> Outcome {
    let failed = |e: io::Error| Failure::Failed(format!("cannot watch for the end of run: {e}"));
    let mut lifeline =
        std::fs::File::from(io::stdin().as_fd().try_clone_to_owned().map_err(failed)?);
    let target = args.target.clone();
    let watch = move || {
        ending::block_signals();
        let _ = lifeline.read(&mut [0]);
        take_off(&target);
    };
    std::thread::Builder::new().name("lifeline".to_owned()).spawn(watch).map_err(failed)?;
    let outcome = mount::daemon(args);
    let _ = std::fs::remove_dir(&args.target);
    outcome
}

/// Unmounts `target` and removes that folder. Open files are served until they are closed.
fn take_off(target: &Path) {
    if mountinfo::ours_at(target).is_ok_and(|mount| mount.is_some())
        && let Err(e) = detach(target, Detach::Lazy)
    {
        log::say(&format!("{}: cannot unmount: {e}", shown_path(target)));
    }
    match std::fs::remove_dir(target) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            log::say(&format!("{}: {e}", shown_path(target)));
        }
        _ => {}
    }
}

/// The mount of a command. The drop unmounts it.
struct RunMount {
    target: PathBuf,
    /// The pipe closes when this process ends, and then the daemon unmounts.
    _lifeline: PipeWriter,
}

impl RunMount {
    fn new(args: &args::RunArgs, words: &[String], target: PathBuf) -> Result<RunMount, Failure> {
        let mounted = io::pipe().map_err(|e| format!("cannot make a pipe: {e}")).and_then(|pipe| {
            let (lifeline, held) = pipe;
            let lifeline = Some(lifeline);
            background::run_in_background(
                &args.source,
                &target,
                words,
                false,
                args.verbose,
                lifeline,
            )?;
            Ok(held)
        });
        match mounted {
            Ok(held) => Ok(RunMount { target, _lifeline: held }),
            Err(message) => {
                let _ = std::fs::remove_dir(&target);
                Err(Failure::Failed(message))
            }
        }
    }
}

impl Drop for RunMount {
    fn drop(&mut self) {
        take_off(&self.target);
    }
}

/// Runs the command, unless a signal to stop has arrived already.
fn serve(
    args: &args::RunArgs,
    mount: &RunMount,
    signals: &SignalFd,
) -> Result<CommandEnd, Failure> {
    if let Some(signal) = stopped_by(signals) {
        return Ok(CommandEnd::Killed(signal));
    }
    // With these arguments the call cannot fail.
    let _ = SigSet::from(Signal::SIGTSTP).thread_block();
    let mut words = args.command.iter().map(|word| replaced(word, &mount.target));
    let program = words.next().unwrap_or_default();
    let mut command = Command::new(&program);
    command.args(words).env(VARIABLE, &mount.target);
    let spawned = inherited::unblock_signals_of(&mut command).spawn();
    match spawned {
        Ok(child) => wait(&child, signals)
            .map_err(|e| Failure::Failed(format!("cannot wait for the command: {e}"))),
        Err(e) => {
            let program = shown(&program.to_string_lossy());
            let is_missing = e.kind() == ErrorKind::NotFound;
            let why = if is_missing { "command not found".to_owned() } else { e.to_string() };
            log::say(&format!("{program}: {why}"));
            Ok(CommandEnd::Exited(if is_missing { NOT_FOUND } else { NOT_EXECUTABLE }))
        }
    }
}

/// `word`, in which the path of the mount replaces each `{}`.
fn replaced(word: &OsString, target: &Path) -> OsString {
    let mut text = Vec::new();
    let mut rest = word.as_bytes();
    while let Some(start) = rest.windows(2).position(|pair| pair == PLACEHOLDER) {
        text.extend_from_slice(&rest[..start]);
        text.extend_from_slice(target.as_os_str().as_bytes());
        rest = &rest[start + PLACEHOLDER.len()..];
    }
    text.extend_from_slice(rest);
    OsString::from_vec(text)
}

/// Waits for the end of the command, and passes signals to the command.
fn wait(child: &Child, signals: &SignalFd) -> io::Result<CommandEnd> {
    let pid = Pid::from_raw(child.id().cast_signed());
    loop {
        match waitpid(pid, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED))? {
            WaitStatus::Exited(_, code) => return Ok(CommandEnd::Exited(code as u8)),
            WaitStatus::Signaled(_, signal, _) => return Ok(CommandEnd::Killed(signal)),
            // When the command stops, this process stops too, so that the shell sees a stopped job. The code below
            // passes SIGCONT to the command.
            WaitStatus::Stopped(..) => raise(Signal::SIGSTOP)?,
            _ => {}
        }
        let Some(came) = signals.read_signal()? else { continue };
        let signal = Signal::try_from(came.ssi_signo.cast_signed())?;
        // A signal from the terminal goes to the whole process group, so the command has got it
        // already.
        let is_of_terminal = came.ssi_code > 0 && signal != Signal::SIGCONT;
        if signal != Signal::SIGCHLD && !is_of_terminal {
            // An error means that the command has ended, which does no harm.
            let _ = kill(pid, signal);
        }
    }
}

/// A signal that has arrived and that ends a command.
fn stopped_by(signals: &SignalFd) -> Option<Signal> {
    let ending = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];
    // Only pending signals are read, because a read without a pending signal would wait.
    let mut pending = nix::poll::PollFd::new(signals.as_fd(), nix::poll::PollFlags::POLLIN);
    while nix::poll::poll(std::slice::from_mut(&mut pending), nix::poll::PollTimeout::ZERO)
        .is_ok_and(|ready| ready > 0)
    {
        let came = signals.read_signal().ok()??;
        let signal = Signal::try_from(came.ssi_signo.cast_signed()).ok()?;
        if ending.contains(&signal) {
            return Some(signal);
        }
    }
    None
}

/// Ends this process with the signal that ended the command, but without a second core dump. If the
/// signal does not end it, returns the exit status that shells use for the signal.
fn end_by(signal: Signal) -> ExitCode {
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    inherited::restore(signal);
    let _ = SigSet::from(signal).thread_unblock();
    let _ = raise(signal);
    ExitCode::from(128 + signal as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_stands_wherever_an_argument_has_the_placeholder() {
        let target = Path::new("/tmp/m");
        for (word, expected) in [
            ("{}", "/tmp/m"),
            ("a={}/b:{}", "a=/tmp/m/b:/tmp/m"),
            ("{ }", "{ }"),
            ("{{}}", "{/tmp/m}"),
        ] {
            assert_eq!(replaced(&word.into(), target), expected);
        }
    }
}
