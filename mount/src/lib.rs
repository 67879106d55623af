//! The `tensorfs` command, the mount(8) helper, and the FUSE side of tensorfs.

mod cli;
mod daemon;
mod fs;
mod log;
mod options;
mod serve;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

pub use options::Options;

/// Runs the command that the process was started as.
pub fn main() -> ExitCode {
    daemon::inherited::restore_signals();
    daemon::allocator::keep_small();
    if daemon::stalled::probe() {
        return ExitCode::SUCCESS;
    }
    if let Some(answers) = daemon::session::probe() {
        return if answers { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if let Some(found) = cli::status::probe() {
        return found;
    }
    let mut args = std::env::args_os();
    let name = args.next();
    let name = name.as_deref().map(Path::new).and_then(Path::file_name);
    // `mount -t fuse.tensorfs` runs `tensorfs SOURCE TARGET -o ...`.
    let called_with_source = args.next().is_some_and(|arg| Path::new(&arg).is_absolute());
    let status = if name == Some(OsStr::new("mount.tensorfs")) || called_with_source {
        cli::mount_helper::main()
    } else {
        cli::main()
    };
    log::flush();
    status
}
