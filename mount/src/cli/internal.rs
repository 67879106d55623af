//! Commands that this program runs itself, as `tensorfs internal COMMAND`: the daemon of a mount, and
//! the probes. They are not part of the command line for users.
//!
//! A probe accesses a file system that may never answer. It is a separate process, because a thread
//! that waits for a file system prevents its process from ending.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use nix::sys::prctl::set_name;
use tensorfs::internal::error::shown;

use super::{args, mount, mount_helper, run, seen, serve, umount};
use crate::daemon::{background, handover, session, stalled};
use crate::serve::heat::PROBE_NAME;

/// First argument of an internal command.
pub(crate) const WORD: &str = "internal";

/// The command with which a script calls the helper of mount(8), because a script cannot choose the
/// name of the process. clap parses neither the arguments of this command nor those of a process
/// with the name of the helper.
const MOUNT_HELPER: &str = "mount-helper";

#[derive(Debug, Parser)]
struct InternalCli {
    #[command(subcommand)]
    command: InternalCommand,
}

#[derive(Debug, Subcommand)]
enum InternalCommand {
    /// Serve a mount, and report on standard output once it answers
    Daemon(args::MountArgs),
    /// Serve the mount of a command of `run`, until standard input ends
    RunDaemon(args::MountArgs),
    /// Serve one mount of a config for the supervisor on standard input
    Worker(args::WorkerArgs),
    /// Look at a path, with a byte on standard output for each answer
    ProbePath {
        path: PathBuf,
        /// Number of files to read from
        #[arg(long)]
        reads: usize,
    },
    /// Look at the root of a mount
    ProbeMount { target: PathBuf },
    /// Read from a file of a mount, if there is one
    ProbeRead { target: PathBuf },
    /// Print the version of the state that one process hands to the next
    StateVersion,
    /// Tell by the exit status whether a mount is dead
    ProbeDead { target: PathBuf },
    /// End the connection of a mount and take it off, if there is one
    AbortMount { target: PathBuf, minor: Option<u32> },
}

/// Runs the command in `args`, whose first word is `WORD`.
pub(crate) fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.collect();
    if args.get(1).is_some_and(|command| command == MOUNT_HELPER) {
        return mount_helper::main(args.into_iter().skip(2));
    }
    let command = match InternalCli::try_parse_from(&args) {
        Ok(cli) => cli.command,
        Err(error) => {
            let shown = args.iter().map(|arg| shown(&arg.to_string_lossy()));
            return super::print_usage(&InternalCli::try_parse_from(shown).err().unwrap_or(error));
        }
    };
    // The kernel would name the process `exe`, after the file in `/proc/self/` from which it was
    // started.
    let name = match &command {
        InternalCommand::Daemon(_) | InternalCommand::RunDaemon(_) | InternalCommand::Worker(_) => {
            c"tensorfs"
        }
        _ => PROBE_NAME,
    };
    let _ = set_name(name);
    match command {
        InternalCommand::Daemon(args) => super::finish(mount::daemon(&args), |message| {
            let _ = background::report(message);
        }),
        InternalCommand::RunDaemon(args) => super::finish(run::daemon(&args), |message| {
            let _ = background::report(message);
        }),
        InternalCommand::Worker(args) => super::finish(serve::work(&args), |_| {}),
        InternalCommand::ProbePath { path, reads } => {
            stalled::answer_probe(&path, reads);
            ExitCode::SUCCESS
        }
        InternalCommand::ProbeMount { target } if session::answers(&target) => ExitCode::SUCCESS,
        InternalCommand::ProbeRead { target } if session::answers_read(&target) => {
            ExitCode::SUCCESS
        }
        InternalCommand::ProbeMount { .. } | InternalCommand::ProbeRead { .. } => ExitCode::FAILURE,
        InternalCommand::StateVersion => {
            let version = handover::state_version();
            super::finish(super::output::print_text(&format!("{version}\n")), |_| {})
        }
        InternalCommand::ProbeDead { target } => seen::answer_probe(&target),
        InternalCommand::AbortMount { target, minor } => {
            super::finish(umount::abort(&target, minor), |_| {})
        }
    }
}
