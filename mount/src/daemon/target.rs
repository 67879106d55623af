//! The folder that a mount is made on, and the checks of that folder before the mount.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::statvfs::statvfs;
use tensorfs::internal::asked::Asked;
use tensorfs::internal::checkpoint::Tree;
use tensorfs::internal::error::{shown, shown_path};
use tensorfs::internal::mountinfo;
use tensorfs::internal::store::Store;
use tensorfs::internal::version::FileId;

use super::attach::{self, Detach};
use super::client;

/// Maximum time for an existing mount to show that its daemon is dead.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Checks the folder to mount on, and returns its absolute path. If a tensorfs mount is there whose
/// daemon is dead, unmounts it.
///
/// # Errors
/// One line with the reason why nothing can be mounted there.
pub(super) fn check_target(target: &Path) -> Result<PathBuf, String> {
    let fail = |e: io::Error| format!("{}: {e}", shown_path(target));
    let path = mountinfo::absolute_target(target).map_err(fail)?;
    let place = shown_path(&path);
    let mut there = mountinfo::at(&path).map_err(fail)?;
    let is_ours = |mount: &mountinfo::Mount| mount.fstype == mountinfo::FSTYPE;
    match there.pop() {
        Some(on_top) if is_ours(&on_top) => {
            let waits = client::is_killed_but_waits(on_top.owner.unwrap_or_default(), on_top.minor);
            if !waits && !is_dead(&path) {
                return Err(format!("{place}: a tensorfs mount is already there"));
            }
            tracing::info!("{place}: taking off a dead mount");
            let how = if waits { Detach::Force } else { Detach::Lazy };
            attach::detach(&path, how).map_err(fail)?;
        }
        Some(on_top) if there.iter().any(is_ours) => {
            let kind = shown(&on_top.fstype);
            return Err(format!(
                "{place}: a tensorfs mount is already there, below a mount of {kind}; unmount that \
                 one first"
            ));
        }
        _ => {}
    }
    let meta = std::fs::metadata(&path).map_err(fail)?;
    if !meta.is_dir() {
        return Err(format!("{}: not a folder", shown_path(target)));
    }
    Ok(path)
}

/// Logs a warning if the new mount hides files of the folder.
pub(super) fn warn_of_content(target: &Path) {
    if std::fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_some()) {
        tracing::warn!("{}: is not empty; the mount hides what is there", shown_path(target));
    }
}

/// Whether the daemon of the mount on `path` has ended.
///
/// Calls statvfs, because it always reaches the daemon. The kernel may answer stat(2) from its
/// cache for a second. A daemon that is alive but does not answer is not dead.
fn is_dead(path: &Path) -> bool {
    let path = path.to_owned();
    let asked = Asked::on_thread("is-dead", move || statvfs(&path).map(drop));
    let answer = asked.map(|mut asked| asked.within(ANSWER_TIMEOUT));
    matches!(answer, Ok(Ok(Err(Errno::ENOTCONN | Errno::ECONNABORTED))))
}

/// Refuses a mount inside its own source, which would contain itself, and a mount above its source,
/// which would hide the source. Compares inodes, so that the result does not depend on which paths
/// lead to the folders.
///
/// # Errors
/// One line with both paths.
pub(super) fn check_nesting(source: &Path, target: &Path) -> Result<(), String> {
    // If the source cannot be used, the scan reports the reason.
    let Ok(source) = std::fs::canonicalize(source) else { return Ok(()) };
    let source_id = file_id(&source);
    if target.ancestors().any(|above| file_id(above) == source_id) {
        let (target, source) = (shown_path(target), shown_path(&source));
        return Err(format!("{target}: lies inside the source {source}; mount somewhere else"));
    }
    let target_id = file_id(target);
    if source.ancestors().any(|above| file_id(above) == target_id) {
        let (target, source) = (shown_path(target), shown_path(&source));
        return Err(format!("{source}: lies on {target}, which the mount would hide"));
    }
    Ok(())
}

/// Refuses a mount on a folder inside or above its own source, like `check_nesting`, and also a
/// mount on a folder that a link in the source leads to.
///
/// # Errors
/// One line with both paths.
pub(super) fn check_links(tree: &Tree, target: &Path) -> Result<(), String> {
    check_nesting(&tree.source, target)?;
    if file_id(target).is_some_and(|id| tree.reaches(target, id)) {
        let (target, source) = (shown_path(target), shown_path(&tree.source));
        return Err(format!("{source}: has links into {target}, where it is to be mounted"));
    }
    Ok(())
}

fn file_id(path: &Path) -> Option<FileId> {
    Store::of(path).version_behind_links(path).map(|version| version.file()).ok()
}
