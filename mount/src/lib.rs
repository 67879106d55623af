//! The `tensorfs` command, the mount(8) helper, and the FUSE side of tensorfs.

mod cli;
mod daemon;
mod fs;
mod log;
mod node;
mod options;
mod serve;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use tensorfs::internal::error::is_url;

pub use options::Options;

/// Runs the program that the process was started as: the `tensorfs` command, the helper of
/// mount(8), or the generator for systemd.
pub fn main() -> ExitCode {
    daemon::inherited::restore_signals();
    daemon::allocator::keep_small();
    let mut args = std::env::args_os();
    let program = args.next();
    let name = program.as_deref().map(Path::new).and_then(Path::file_name);
    let first = args.next();
    // `mount -t fuse.tensorfs` runs `tensorfs SOURCE TARGET -o ...`.
    let called_with_source =
        first.as_ref().is_some_and(|arg| Path::new(arg).is_absolute() || is_url(Path::new(arg)));
    let status = if name == Some(OsStr::new(cli::generator::NAME)) {
        cli::generator::main(std::env::args_os().skip(1))
    } else if name == Some(OsStr::new("mount.tensorfs")) || called_with_source {
        cli::mount_helper::main(std::env::args_os().skip(1))
    } else if first.is_some_and(|arg| arg == cli::internal::WORD) {
        cli::internal::main(std::env::args_os().skip(1))
    } else {
        cli::main()
    };
    log::flush();
    status
}
