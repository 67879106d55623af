//! `tensorfs umount`: unmounts, even if the daemon is dead.

use std::io;

use nix::libc;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::source::mountinfo;

use super::args;
use super::output::{Failure, Outcome};
use crate::daemon::attach::{Detach, detach};

pub(super) fn run(args: &args::UmountArgs) -> Outcome {
    let shown = shown_path(&args.target);
    let failed = |e: io::Error| Failure::Failed(format!("{shown}: {e}"));
    let target = mountinfo::absolute_target(&args.target).map_err(failed)?;
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
