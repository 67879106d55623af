//! The user behind a request, and checks by permission bits whether a user may read a path of the
//! source.

use std::cell::OnceCell;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::sharing::NodeAccess;

/// The user whose process sent a request to the kernel.
#[derive(Clone)]
pub(crate) struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
    further: OnceCell<Vec<u32>>,
}

impl Caller {
    pub(crate) fn new(uid: u32, gid: u32, pid: u32) -> Caller {
        Caller { uid, gid, pid, further: OnceCell::new() }
    }

    /// Whether `access` lets this user see the file or folder.
    pub(crate) fn may_see(&self, access: &NodeAccess) -> bool {
        access.allows(self.uid, &mut |gid| self.is_in(gid))
    }

    /// Whether `access` lets this user list the folder.
    pub(crate) fn may_list(&self, access: &NodeAccess) -> bool {
        access.allows_list(self.uid, &mut |gid| self.is_in(gid))
    }

    fn is_in(&self, gid: u32) -> bool {
        let further = || supplementary_groups(self.pid as i32, self.uid);
        gid == self.gid || self.further.get_or_init(further).contains(&gid)
    }
}

/// The supplementary groups of a process, from `/proc/PID/status`. The list is empty if the process
/// does not run as user `uid`: its number may belong to another process by now.
pub(crate) fn supplementary_groups(pid: i32, uid: u32) -> Vec<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let numbers = |key: &str| -> Vec<u32> {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        line.split_whitespace().filter_map(|number| number.parse().ok()).collect()
    };
    // The effective user id and the file system user id.
    let uids = numbers("Uid:");
    if [1, 3].iter().any(|nth| uids.get(*nth) == Some(&uid)) {
        numbers("Groups:")
    } else {
        Vec::new()
    }
}

/// Whether user `uid` of group `gid` may list the folder `path` and pass all folders above it.
///
/// Checks owner, primary group and others only. Supplementary groups do not count.
pub(crate) fn may_read_folder(path: &Path, uid: u32, gid: u32) -> bool {
    allowed(path, 0o5, uid, gid) && may_pass(path, uid, gid)
}

/// Whether user `uid` of group `gid` may read the file `path` and pass all folders above it.
/// Supplementary groups do not count.
pub(crate) fn may_read_file(path: &Path, uid: u32, gid: u32) -> bool {
    allowed(path, 0o4, uid, gid) && may_pass(path, uid, gid)
}

fn may_pass(path: &Path, uid: u32, gid: u32) -> bool {
    path.ancestors().skip(1).all(|above| allowed(above, 0o1, uid, gid))
}

fn allowed(path: &Path, wanted: u32, uid: u32, gid: u32) -> bool {
    uid == 0
        || std::fs::metadata(path).is_ok_and(|meta| {
            let shift = match () {
                () if meta.uid() == uid => 6,
                () if meta.gid() == gid => 3,
                () => 0,
            };
            meta.mode() >> shift & wanted == wanted
        })
}
