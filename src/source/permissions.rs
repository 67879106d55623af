//! Owner, group and permission bits of a path.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Extended attribute that holds the ACL of a file which has one.
pub(super) const ACL: &str = "system.posix_acl_access";

/// Owner, group and permission bits of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathPermissions {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits. With an ACL, those of the owner only: the others then say nothing certain.
    pub mode: u32,
    /// Whether it is a symbolic link.
    pub is_link: bool,
}

impl PathPermissions {
    /// The permissions of what is at `path`, without following a link there.
    ///
    /// # Errors
    /// The errors of lstat(2).
    pub fn at(path: &Path) -> io::Result<PathPermissions> {
        let meta = std::fs::symlink_metadata(path)?;
        // A file system without ACLs returns an error.
        let has_acl = xattr::get(path, ACL).is_ok_and(|acl| acl.is_some());
        let bits = if has_acl { 0o700 } else { 0o777 };
        Ok(PathPermissions {
            uid: meta.uid(),
            gid: meta.gid(),
            mode: meta.mode() & bits,
            is_link: meta.is_symlink(),
        })
    }
}
