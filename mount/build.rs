//! Links `mount.tensorfs`, the helper that mount(8) looks for, beside the program: Cargo builds no
//! binary with a dot in its name.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Tests start a debug build thousands of times, and it has 180,000 addresses to relocate each time.
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|found| found == value);
    if is("PROFILE", "debug") && is("CARGO_CFG_TARGET_ENV", "gnu") {
        println!("cargo::rustc-link-arg-bins=-no-pie");
    }
    let Some(out) = std::env::var_os("OUT_DIR") else { return };
    // target/<profile>/build/<package>-<hash>/out
    let Some(profile) = Path::new(&out).ancestors().nth(3) else { return };
    let link = profile.join("mount.tensorfs");
    if std::fs::symlink_metadata(&link).is_err()
        && let Err(error) = std::os::unix::fs::symlink("tensorfs", &link)
    {
        println!("cargo::warning={}: {error}", link.display());
    }
}
