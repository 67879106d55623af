//! Which kind of file system a file lies on: a local one answers by itself, any other may wait
//! for something far away, or for ever.

use std::fs::File;
use std::path::Path;

/// A file system by the number that statfs(2) reports; 0 where it could not be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem(u64);

/// File systems that need no one else to answer, with their magic numbers. An overlay passes for
/// local, although a layer of it need not be.
const LOCAL: &[(u64, &str)] = &[
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58f6, "ramfs"),
    (0xf2f5_2010, "f2fs"),
    (0x2fc1_2fc1, "zfs"),
    (0x794c_7630, "overlay"),
    (0xca45_1a4e, "bcachefs"),
    (0x7371_7368, "squashfs"),
    (0xe0f5_e1e2, "erofs"),
    (0x3153_464a, "jfs"),
    (0x3434, "nilfs2"),
    (0x7366_746e, "ntfs3"),
    (0x2011_bab0, "exfat"),
    (0x4d44, "vfat"),
    (0x9660, "iso9660"),
    (0x1501_3346, "udf"),
];

/// Others, only to name them.
const REMOTE: &[(u64, &str)] = &[
    (0x6969, "nfs"),
    (0x6573_5546, "fuse"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb2"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "ceph"),
    (0x0bd0_0bd0, "lustre"),
    (0x4750_4653, "gpfs"),
];

impl FileSystem {
    /// That of an open file.
    pub(super) fn of(file: &File) -> FileSystem {
        // The width and sign of the field differ between machines; the numbers have 32 bits.
        let found = nix::sys::statfs::fstatfs(file).map_or(0, |stat| stat.filesystem_type().0);
        FileSystem(found as u64 & 0xffff_ffff)
    }

    /// That of the file at `path`.
    pub(super) fn at(path: &Path) -> FileSystem {
        let found = nix::sys::statfs::statfs(path).map_or(0, |stat| stat.filesystem_type().0);
        FileSystem(found as u64 & 0xffff_ffff)
    }

    /// Whether nothing but this machine is needed for an answer.
    pub fn is_local(self) -> bool {
        LOCAL.iter().any(|(magic, _)| *magic == self.0)
    }

    /// Its usual name, else the number.
    pub fn name(self) -> String {
        let named = LOCAL.iter().chain(REMOTE).find(|(magic, _)| *magic == self.0);
        named.map_or_else(|| format!("{:#x}", self.0), |(_, name)| (*name).to_owned())
    }
}
