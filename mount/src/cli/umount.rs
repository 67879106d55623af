//! `tensorfs umount`: unmounts, even if the daemon is dead.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::libc;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mountinfo;

use super::args;
use super::output::{Failure, Outcome};
use super::status;
use crate::daemon::attach::{Detach, detach};
use crate::node::handover;

/// How long a mount may take to show that it is dead. The kernel answers for a dead one at once.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn run(args: &args::UmountArgs) -> Outcome {
    if args.dead {
        return remove_dead(&args.targets);
    }
    let how = match (args.lazy, args.force) {
        (_, true) => Detach::Force,
        (true, _) => Detach::Lazy,
        _ => Detach::Clean,
    };
    // One that fails does not keep the others mounted.
    let failures = args.targets.iter().filter_map(|target| unmount(target, how).err());
    finish(failures.collect())
}

fn finish(failures: Vec<String>) -> Outcome {
    if failures.is_empty() { Ok(()) } else { Err(Failure::Failed(failures.join("; "))) }
}

fn unmount(target: &Path, how: Detach) -> Result<(), String> {
    let shown = shown_path(target);
    let failed = |e: io::Error| format!("{shown}: {e}");
    let target = mountinfo::absolute_target(target).map_err(failed)?;
    if mountinfo::ours_at(&target).map_err(failed)?.is_none() {
        return Err(format!("{shown}: not a tensorfs mount"));
    }
    detach(&target, how).map_err(|e| match e.raw_os_error() {
        Some(libc::EBUSY) => {
            format!("{shown}: target is busy; close what is open there, or use --lazy")
        }
        _ => failed(e),
    })
}

/// Takes off the dead mounts on `targets`; without targets, all that this user may take off. Other
/// mounts stay.
fn remove_dead(targets: &[PathBuf]) -> Outcome {
    // Nobody serves the mounts of a service that is being restarted, so a probe would wait. The next
    // start removes those that are dead.
    if handover::is_restart() {
        return Ok(());
    }
    let failed = |e: io::Error| Failure::Failed(format!("cannot read the mount table: {e}"));
    let mut mounts = mountinfo::ours().map_err(failed)?;
    if targets.is_empty() {
        let user = nix::unistd::geteuid();
        mounts.retain(|mount| user.is_root() || mount.owner == Some(user.as_raw()));
    } else {
        let place = |target: &PathBuf| {
            let absolute = || std::path::absolute(target);
            mountinfo::absolute_target(target).or_else(|_| absolute()).ok()
        };
        let places: Vec<_> = targets.iter().filter_map(place).collect();
        mounts.retain(|mount| places.contains(&mount.target));
    }
    let mut failures = Vec::new();
    // The mount on top of a place comes last in the table.
    for mount in status::dead(mounts, PROBE_TIMEOUT).iter().rev() {
        // Another process may have put a new mount there meanwhile.
        let on_top = mountinfo::ours_at(&mount.target).ok().flatten();
        if on_top.is_some_and(|on_top| on_top.id == mount.id)
            && let Err(e) = detach(&mount.target, Detach::Lazy)
        {
            failures.push(format!("{}: {e}", shown_path(&mount.target)));
        }
    }
    finish(failures)
}
