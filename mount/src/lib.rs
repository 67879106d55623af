//! The `tensorfs` command, the mount(8) helper, and the FUSE side of tensorfs.

mod access;
mod args;
mod attach;
mod cmd;
mod daemon;
mod fs;
mod log;
mod mount_helper;
mod mountinfo;
mod nodes;
mod options;
mod session;
mod watch;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

pub use options::Options;

/// Runs the command that the process was started as.
pub fn main() -> ExitCode {
    let name = std::env::args_os().next();
    let name = name.as_deref().map(Path::new).and_then(Path::file_name);
    if name == Some(OsStr::new("mount.tensorfs")) { mount_helper::main() } else { cmd::main() }
}
