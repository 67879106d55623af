//! `tensorfs umount`: unmounts, even if the daemon is dead.

use std::io;
use std::path::Path;
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
    let target = args.target.as_deref();
    if args.dead {
        return remove_dead(target);
    }
    // Without `--dead` the command line has one.
    let target = target.unwrap_or(Path::new(""));
    let shown = shown_path(target);
    let failed = |e: io::Error| Failure::Failed(format!("{shown}: {e}"));
    let target = mountinfo::absolute_target(target).map_err(failed)?;
    if mountinfo::ours_at(&target).map_err(failed)?.is_none() {
        return Err(Failure::Failed(format!("{shown}: not a tensorfs mount")));
    }
    let how = match (args.lazy, args.force) {
        (_, true) => Detach::Force,
        (true, _) => Detach::Lazy,
        _ => Detach::Clean,
    };
    match detach(&target, how) {
        Ok(()) => Ok(()),
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Err(Failure::Failed(format!(
            "{shown}: target is busy; close what is open there, or use --lazy"
        ))),
        Err(e) => Err(failed(e)),
    }
}

/// Takes off the dead mount on `target`, or all that this user may take off. Other mounts stay.
fn remove_dead(target: Option<&Path>) -> Outcome {
    // Nobody serves the mounts of a service that is being restarted, so a probe would wait. The next
    // start removes those that are dead.
    if handover::is_restart() {
        return Ok(());
    }
    let failed = |e: io::Error| Failure::Failed(format!("cannot read the mount table: {e}"));
    let mut mounts = mountinfo::ours().map_err(failed)?;
    if let Some(target) = target {
        let place = std::path::absolute(target).ok();
        let place = mountinfo::absolute_target(target).ok().or(place);
        mounts.retain(|mount| Some(&mount.target) == place.as_ref());
    } else {
        let user = nix::unistd::geteuid();
        mounts.retain(|mount| user.is_root() || mount.owner == Some(user.as_raw()));
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
    if failures.is_empty() { Ok(()) } else { Err(Failure::Failed(failures.join("; "))) }
}
