//! `tensorfs umount`: unmounts, even if the daemon is dead.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::libc;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mountinfo::{self, Mount};

use super::args;
use super::output::{Failure, Outcome};
use super::seen;
use crate::daemon::attach::{Detach, abort_connection, detach};
use crate::daemon::client;
use crate::log;
use crate::node::suspension;

/// Time limit for the check whether a mount is dead. For a dead mount, the kernel answers at once.
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
    // If one unmount fails, the other mounts are still unmounted.
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
    let Some(ours) = mountinfo::ours_at(&target).map_err(failed)? else {
        return Err(format!("{shown}: not a tensorfs mount"));
    };
    let mut copies = match how {
        Detach::Force => Vec::new(),
        _ => mountinfo::in_all_namespaces(ours.minor),
    };
    copies.retain(|(_, mount)| *mount != ours);
    detach(&target, how).map_err(|e| match e.raw_os_error() {
        Some(libc::EBUSY) => {
            format!("{shown}: target is busy; close what is open there, or use --lazy")
        }
        _ => failed(e),
    })?;
    if copies.is_empty() {
        return Ok(());
    }
    // Copies may have been unmounted together with the mount, and a mount of another program may have got the device
    // number since.
    let was_there = |mount: &Mount| copies.iter().any(|(_, copy)| copy == mount);
    let mut now = mountinfo::in_all_namespaces(ours.minor).into_iter();
    if let Some((process, copy)) = now.find(|(_, mount)| was_there(mount)) {
        let place = shown_path(&copy.target);
        let of = process.map_or(String::new(), |pid| {
            format!(" in the mount namespace of process {pid}, until that one ends or unmounts it")
        });
        log::say(&format!("{shown}: unmounted; its daemon goes on, because it serves {place}{of}"));
    }
    Ok(())
}

/// Ends the connection of the mount on `target`, so that its readers get errors, and unmounts it. With
/// `minor`, this is the mount with that device number, at any path. Does nothing if there is no mount.
pub(super) fn abort(target: &Path, minor: Option<u32>) -> Outcome {
    let failed = |e: io::Error| Failure::at(target, e);
    let mut mounts = mountinfo::ours().map_err(failed)?;
    match minor {
        Some(minor) => {
            abort_connection(minor);
            mounts.retain(|mount| mount.minor == minor);
        }
        None => {
            let place = mountinfo::absolute_target(target).map_err(failed)?;
            let on_top = mounts.into_iter().rfind(|mount| mount.target == place);
            mounts = on_top.into_iter().collect();
        }
    }
    for mount in mounts.iter().rev() {
        // If another mount covers this one, that mount belongs to someone else and stays.
        let on_top = mountinfo::ours_at(&mount.target).map_err(failed)?;
        if on_top.is_some_and(|on_top| on_top.id == mount.id) {
            detach(&mount.target, Detach::Force).map_err(failed)?;
        }
    }
    Ok(())
}

/// Unmounts those mounts on `targets` that are dead. Without targets, all dead mounts that this
/// user may unmount. Other mounts stay.
fn remove_dead(targets: &[PathBuf]) -> Outcome {
    // During a restart of the service, no process serves its mounts, so a probe would wait. The next
    // start unmounts the dead ones.
    if suspension::is_restart() {
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
    // If several mounts are at the same place, the topmost mount comes last in the table.
    for mount in seen::dead(mounts, PROBE_TIMEOUT).iter().rev() {
        // Another process may have mounted there in the meantime.
        let on_top = mountinfo::ours_at(&mount.target).ok().flatten();
        let waits = client::is_killed_but_waits(mount.owner.unwrap_or_default(), mount.minor);
        let how = if waits { Detach::Force } else { Detach::Lazy };
        if on_top.is_some_and(|on_top| on_top.id == mount.id)
            && let Err(e) = detach(&mount.target, how)
        {
            failures.push(format!("{}: {e}", shown_path(&mount.target)));
        }
    }
    finish(failures)
}
