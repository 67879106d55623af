//! The `tensorfs` command. When it is called as `mount.tensorfs`, it is the helper of mount(8).

use std::process::ExitCode;

fn main() -> ExitCode {
    tensorfs_mount::main()
}
