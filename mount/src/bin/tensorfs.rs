//! The `tensorfs` command; called as `mount.tensorfs`, the mount(8) helper.

use std::process::ExitCode;

fn main() -> ExitCode {
    tensorfs_mount::main()
}
