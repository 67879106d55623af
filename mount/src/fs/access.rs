//! Whether a user may read a path of the source, by its permission bits.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Whether user `uid` of group `gid` may list the folder `path` and pass all folders above it.
///
/// Checks owner, primary group and others only: membership in further groups does not count.
pub(crate) fn may_read_folder(path: &Path, uid: u32, gid: u32) -> bool {
    allowed(path, 0o5, uid, gid) && may_pass(path, uid, gid)
}

/// Whether user `uid` of group `gid` may read the file `path`, in the same sense.
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
