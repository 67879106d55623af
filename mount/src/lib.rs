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
mod fs;
mod kernel;
mod log;
mod mount_helper;
mod nodes;
mod open;
mod options;
mod push;
mod service;
mod serving;
mod session;
mod watch;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

pub use options::Options;

/// Runs the command that the process was started as.
pub fn main() -> ExitCode {
    allocator::keep_small();
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
    if name == Some(OsStr::new("mount.tensorfs")) || called_with_source {
        mount_helper::main()
    } else {
        cmd::main()
    }
}
