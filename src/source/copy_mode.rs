//! The mode of a copy of sources: nobody may read it who may not read every one of them.
//!
//! Looks at permission bits and ACLs of the files, as cp(1) and tar(1) do, and not at the folders
//! that they lie in.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use nix::libc;
use nix::unistd::getegid;

use super::Source;
use crate::error::{Error, Result};

/// Extended attribute that holds the ACL of a file which has one.
const ACL: &str = "system.posix_acl_access";

/// The rights of the owner of a copy, who has read the sources to make it.
const OWNER: u32 = 0o600;

/// The files that a copy is made of, as far as it depends on them who may read it.
#[derive(Clone, Debug, Default)]
pub struct CopyMode(Vec<Of>);

/// One file: mode, group, and whether its group bits say nothing, as beside an ACL.
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
            let Source::Local(local) = &**source;
            let file = local.file()?;
            let meta = file.metadata().map_err(|e| Error::io(source.path(), "look at", e))?;
            all.add(&meta, source.path());
        }
        Ok(all)
    }

    /// The copy also replaces the file at `path`, which is `meta`: nobody may read it now who could
    /// not read that one.
    pub fn add(&mut self, meta: &Metadata, path: &Path) {
        // A file system without ACLs refuses to tell of one.
        let has_acl = xattr::get(path, ACL).is_ok_and(|acl| acl.is_some());
        self.0.push(Of { mode: meta.mode(), gid: meta.gid(), has_acl });
    }

    /// The mode to make the copy with in `folder`, of which the umask takes its part.
    pub fn in_folder(&self, folder: &Path) -> u32 {
        let inherits = |meta: &Metadata| meta.mode() & libc::S_ISGID != 0;
        let folder = std::fs::metadata(folder).ok().filter(inherits);
        self.bits(folder.map_or(getegid().as_raw(), |folder| folder.gid()))
    }

    /// Takes from the mode of `file`, which was made with that of `in_folder`, what its group must
    /// not have: on some file systems it is another one than the folder tells.
    ///
    /// # Errors
    /// The errors of fstat(2) and fchmod(2).
    pub fn narrow(&self, file: &File) -> io::Result<()> {
        let meta = file.metadata()?;
        self.set(file, meta.mode())
    }

    /// Gives `file` of `mode` what the copy may have.
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
