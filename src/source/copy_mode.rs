//! The mode of a copy of sources: nobody may read it who may not read every one of them.
//!
//! It depends on permission bits and ACLs of the files, as for cp(1) and tar(1), and not on the
//! folders that they lie in.

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

/// The rights of the owner of a copy, who has read the sources to make it.
const OWNER: u32 = 0o600;

/// The permissions of the files that a copy is made of.
#[derive(Clone, Debug, Default)]
pub struct CopyMode(Vec<Of>);

/// Permissions of one file: mode, group, and whether an ACL makes its group bits meaningless.
#[derive(Clone, Copy, Debug)]
struct Of {
    mode: u32,
    gid: u32,
    has_acl: bool,
}

impl CopyMode {
    /// The mode of a copy of `sources`.
    ///
    /// # Errors
    /// The failures of opening a source, and of reading its mode.
    pub fn of(sources: &[Arc<Source>]) -> Result<CopyMode> {
        let mut all = CopyMode::default();
        for source in sources {
            let Some(local) = source.local() else {
                // Nothing says who may read it.
                all.0.push(Of { mode: OWNER, gid: 0, has_acl: false });
                continue;
            };
            let file = local.file()?;
            let meta = file.metadata().map_err(|e| Error::io(source.uri(), "stat", e))?;
            all.add(&meta, source.path());
        }
        Ok(all)
    }

    /// Adds a file that the copy is made of or replaces, at `path` and with metadata `meta`: users
    /// who cannot read that file must not read the copy.
    pub fn add(&mut self, meta: &Metadata, path: &Path) {
        // A file system without ACLs returns an error.
        let has_acl = xattr::get(path, ACL).is_ok_and(|acl| acl.is_some());
        self.0.push(Of { mode: meta.mode(), gid: meta.gid(), has_acl });
    }

    /// The mode for creating the copy in `folder`, before the umask applies.
    pub fn in_folder(&self, folder: &Path) -> u32 {
        let inherits = |meta: &Metadata| meta.mode() & libc::S_ISGID != 0;
        let folder = std::fs::metadata(folder).ok().filter(inherits);
        self.bits(folder.map_or(getegid().as_raw(), |folder| folder.gid()))
    }

    /// Removes permissions that the group of `file` must not have. The file was created with the
    /// mode of `in_folder`, but on some file systems its group is not the folder's.
    ///
    /// # Errors
    /// The errors of fstat(2) and fchmod(2).
    pub fn narrow(&self, file: &File) -> io::Result<()> {
        let meta = file.metadata()?;
        self.set(file, meta.mode())
    }

    /// Sets the mode of `file` to the permissions of `mode` that the copy may have.
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

    /// Read and write for the owner, and for group `gid` and others if they may read all files. A
    /// user in another group now may have been in that of the file, and the other way round: so one
    /// class gets in only where the other one does too, unless the group is the same.
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
        // The group bits of a file with an ACL are its mask.
        assert_eq!(bits(&[(0o640, 7, true)], 7), 0o600);
        assert_eq!(bits(&[(0o644, 7, true)], 7), 0o666);
        // Others may read it, but not its group.
        assert_eq!(bits(&[(0o604, 7, false)], 7), 0o600);
    }
}
