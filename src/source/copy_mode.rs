//! The permission bits of a file that is copied from sources. Only users who can read all sources may be able to read
//! the copy.
//!
//! Only the permission bits and the ACLs of the files are considered. The folders above the files are not
//! considered. The tools cp(1) and tar(1) follow the same rule.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use nix::libc;
use nix::unistd::getegid;

use super::Source;
use super::permissions::ACL;
use crate::error::{Error, Result};

/// The owner's permissions for a copy. The owner has read the sources to make it.
const OWNER: u32 = 0o600;

/// The permissions of the files from which a copy is made.
#[derive(Clone, Debug, Default)]
pub struct CopyMode(Vec<Of>);

/// Permissions of one file: mode, group, and whether it has an ACL, which makes the group bits meaningless.
#[derive(Clone, Copy, Debug)]
struct Of {
    mode: u32,
    gid: u32,
    has_acl: bool,
}

impl CopyMode {
    /// The permissions for a copy of `sources`.
    ///
    /// # Errors
    /// If a source cannot be opened, or its mode cannot be read.
    pub fn of(sources: &[Arc<Source>]) -> Result<CopyMode> {
        let mut all = CopyMode::default();
        for source in sources {
            let Some(local) = source.local() else {
                // The permissions of a remote file are unknown, so only the owner may read the copy.
                all.0.push(Of { mode: OWNER, gid: 0, has_acl: false });
                continue;
            };
            let file = local.file()?;
            let meta = file.metadata().map_err(|e| Error::io(source.uri(), "stat", e))?;
            all.add(&meta, source.path());
        }
        Ok(all)
    }

    /// Adds a file with metadata `meta` at `path`. The copy is made from this file or replaces it. Users who
    /// cannot read this file must not be able to read the copy.
    pub fn add(&mut self, meta: &Metadata, path: &Path) {
        // A file system without ACLs returns an error.
        let has_acl = xattr::get(path, ACL).is_ok_and(|acl| acl.is_some());
        self.0.push(Of { mode: meta.mode(), gid: meta.gid(), has_acl });
    }

    /// The mode with which the copy is created in `folder`, before the umask is applied.
    pub fn in_folder(&self, folder: &Path) -> u32 {
        let inherits = |meta: &Metadata| meta.mode() & libc::S_ISGID != 0;
        let folder = std::fs::metadata(folder).ok().filter(inherits);
        self.bits(folder.map_or(getegid().as_raw(), |folder| folder.gid()))
    }

    /// Removes permissions that the group of `file` must not have. The file was created with the mode of
    /// `in_folder`, which assumes a certain group. Some file systems give a new file another group.
    ///
    /// # Errors
    /// The errors of fstat(2) and fchmod(2).
    pub fn narrow(&self, file: &File) -> io::Result<()> {
        let meta = file.metadata()?;
        self.set(file, meta.mode())
    }

    /// Sets the mode of `file` to `mode` without the permissions that the copy must not have.
    ///
    /// # Errors
    /// The errors of `narrow`.
    pub fn set(&self, file: &File, mode: u32) -> io::Result<()> {
        let meta = file.metadata()?;
        let mode = mode & 0o777 & (self.bits(meta.gid()) | 0o700);
        if mode == meta.mode() & 0o777 {
            return Ok(());
        }
        file.set_permissions(Permissions::from_mode(mode))
    }

    /// The read and write bits of the owner, and those of the group `gid` and of others if they can read all files. The
    /// group of a file may have other members than the group of the copy. If a file can be read by only one of the
    /// classes group and others, the group of the copy gets access only if both groups are the same.
    fn bits(&self, gid: u32) -> u32 {
        let everyone = |of: &Of| of.mode & 0o044 == 0o044;
        let same_group = |of: &Of| of.mode & 0o040 != 0 && of.gid == gid && !of.has_acl;
        let group = self.0.iter().all(|of| everyone(of) || same_group(of));
        let others = self.0.iter().all(everyone);
        OWNER | if group { 0o060 } else { 0 } | if others { 0o006 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(files: &[(u32, u32, bool)], gid: u32) -> u32 {
        let of = |&(mode, gid, has_acl): &(u32, u32, bool)| Of { mode, gid, has_acl };
        CopyMode(files.iter().map(of).collect()).bits(gid)
    }

    #[test]
    fn a_copy_is_for_those_alone_who_may_read_every_file() {
        assert_eq!(bits(&[(0o644, 7, false)], 1), 0o666);
        assert_eq!(bits(&[(0o600, 7, false)], 7), 0o600);
        assert_eq!(bits(&[(0o644, 7, false), (0o600, 7, false)], 7), 0o600);
        assert_eq!(bits(&[(0o644, 1, false), (0o640, 7, false)], 7), 0o660);
        assert_eq!(bits(&[(0o444, 7, false), (0o440, 7, false)], 7), 0o660);
        assert_eq!(bits(&[(0o640, 7, false), (0o640, 8, false)], 7), 0o600);
        assert_eq!(bits(&[(0o640, 7, false)], 1), 0o600);
        // In a file with an ACL, the group bits are the mask of the ACL.
        assert_eq!(bits(&[(0o640, 7, true)], 7), 0o600);
        assert_eq!(bits(&[(0o644, 7, true)], 7), 0o666);
        // Others can read the file, but its group cannot.
        assert_eq!(bits(&[(0o604, 7, false)], 7), 0o600);
    }
}
