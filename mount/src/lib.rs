//! The `tensorfs` command, the mount(8) helper, and the FUSE side of tensorfs.

mod access;
mod allocator;
mod args;
mod asks;
mod assemble;
mod attach;
mod attributes;
mod checked;
mod cmd;
mod control;
mod daemon;
mod ending;
mod file_events;
mod fs;
mod inherited;
mod kernel;
mod log;
mod mount_helper;
mod node;
mod nodes;
mod open;
mod options;
mod place;
mod push;
mod service;
mod serving;
mod session;
mod stalled;
mod tails;
mod watch;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

pub use options::Options;

/// Runs the command that the process was started as.
pub fn main() -> ExitCode {
    inherited::restore_signals();
    allocator::keep_small();
    if stalled::probe() {
        return ExitCode::SUCCESS;
    }
    if let Some(answers) = session::probe() {
        return if answers { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if let Some(found) = cmd::status::probe() {
        return found;
    }
    let mut args = std::env::args_os();
    let name = args.next();
    let name = name.as_deref().map(Path::new).and_then(Path::file_name);
    // `mount -t fuse.tensorfs` runs `tensorfs SOURCE TARGET -o ...`.
    let called_with_source = args.next().is_some_and(|arg| Path::new(&arg).is_absolute());
    let status = if name == Some(OsStr::new("mount.tensorfs")) || called_with_source {
        mount_helper::main()
    } else {
        cmd::main()
    };
    log::flush();
    status
}
