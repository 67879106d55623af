//! Owner, group and permission bits of a path.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The extended attribute with the ACL of a file.
pub(super) const ACL: &str = "system.posix_acl_access";

/// Owner, group and permission bits of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathPermissions {
    /// User ID of the owner.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// Permission bits. If there is an ACL, only the owner's bits, because the other bits then do not say who
    /// has access.
    pub mode: u32,
    /// Whether it is a symbolic link.
    pub is_link: bool,
}

impl PathPermissions {
    /// The permissions of the object at `path`. A symbolic link is not followed.
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
