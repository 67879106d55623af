//! The kind of file system of a file. A local file system answers by itself. Any other may wait for a server,
//! possibly for ever.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::mountinfo;
use crate::process::PerProcess;
use crate::sync::Mutex;

/// A file system, identified by the magic number that statfs(2) reports. The number is 0 if statfs(2) failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    magic: u64,
    /// For an overlay: whether all its layers are local. True for every other file system.
    local_layers: bool,
}

/// The magic numbers of file systems in memory.
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;

/// Maximum number of folders of overlays in the cache.
const KNOWN_MAX: usize = 1024;

/// The magic number of overlay file systems.
const OVERLAY: u64 = 0x794c_7630;

/// Magic numbers and names of local file systems, which need no other machine or process to answer. An overlay
/// is local if its layers are.
const LOCAL: &[(u64, &str)] = &[
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (TMPFS, "tmpfs"),
    (RAMFS, "ramfs"),
    (0xf2f5_2010, "f2fs"),
    (0x2fc1_2fc1, "zfs"),
    (OVERLAY, "overlay"),
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

/// Magic numbers and names of file systems that may wait for another machine or process.
const REMOTE: &[(u64, &str)] = &[
    (0x6969, "nfs"),
    (0x6573_5546, "fuse"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb2"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "ceph"),
    (0x0bd0_0bd0, "lustre"),
    (0x4750_4653, "gpfs"),
    (0x517b, "smb"),
    (0x5346_414f, "afs"),
    (0x7375_7245, "coda"),
    (0x564c, "ncp"),
];

/// Magic numbers and names of pseudo file systems. The kernel generates the content of their files when they are read.
const MADE_BY_KERNEL: &[(u64, &str)] = &[
    (0x9fa0, "proc"),
    (0x6265_6572, "sysfs"),
    (0x0027_e0eb, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0x7363_6673, "securityfs"),
    (0x6265_6570, "configfs"),
    (0xf97c_ff8c, "selinuxfs"),
    (0x1cd1, "devpts"),
    (0x6165_676c, "pstore"),
    (0xde5e_81e4, "efivarfs"),
    (0xcafe_4a11, "bpf"),
];

impl FileSystem {
    /// The file system of an open file, whose path is `path`.
    pub(super) fn of(file: &File, path: &Path) -> FileSystem {
        // The type of the field differs between architectures, but the magic numbers have 32 bits.
        let found = nix::sys::statfs::fstatfs(file).map_or(0, |stat| stat.filesystem_type().0);
        FileSystem::known(found as u64 & 0xffff_ffff, path)
    }

    /// The file system of the file at `path`.
    pub fn at(path: &Path) -> FileSystem {
        FileSystem::known(magic_at(path), path)
    }

    fn known(magic: u64, path: &Path) -> FileSystem {
        let local_layers = magic != OVERLAY || path.parent().is_none_or(has_local_layers);
        FileSystem { magic, local_layers }
    }

    /// The file system of a folder.
    pub fn of_folder(path: &Path) -> FileSystem {
        let magic = magic_at(path);
        FileSystem { magic, local_layers: magic != OVERLAY || has_local_layers(path) }
    }

    /// Whether the file system answers without another machine or process.
    pub fn is_local(self) -> bool {
        is_local(self.magic) && self.local_layers
    }

    /// Whether it is known that the file system may wait for another machine or process. A file system in
    /// neither list counts as not local and not remote.
    pub fn is_remote(self) -> bool {
        REMOTE.iter().any(|(magic, _)| *magic == self.magic)
    }

    /// Whether the kernel has reported the kind of the file system.
    pub fn is_known(self) -> bool {
        self.magic != 0
    }

    /// Whether it is a pseudo file system such as procfs, whose files the kernel generates.
    pub fn is_pseudo_file_system(self) -> bool {
        MADE_BY_KERNEL.iter().any(|(magic, _)| *magic == self.magic)
    }

    /// Whether the files are in memory only.
    pub fn is_in_memory(self) -> bool {
        [TMPFS, RAMFS].contains(&self.magic)
    }

    /// Whether a write through a memory mapping updates the times of the file.
    pub fn notes_stores(self) -> bool {
        !self.is_in_memory()
    }

    /// The usual name of the file system, or else its magic number.
    pub fn name(self) -> String {
        let named = LOCAL
            .iter()
            .chain(REMOTE)
            .chain(MADE_BY_KERNEL)
            .find(|(magic, _)| *magic == self.magic);
        named.map_or_else(|| format!("{:#x}", self.magic), |(_, name)| (*name).to_owned())
    }
}

fn magic_at(path: &Path) -> u64 {
    let found = nix::sys::statfs::statfs(path).map_or(0, |stat| stat.filesystem_type().0);
    found as u64 & 0xffff_ffff
}

fn is_local(magic: u64) -> bool {
    LOCAL.iter().any(|(local, _)| *local == magic)
}

/// Whether the visible layers of the overlay that contains `folder` are local. Inside a container the layers
/// are not visible, and count as local.
fn has_local_layers(folder: &Path) -> bool {
    /// Results by folder and device number of the overlay. Device numbers are reused, so the folder is part of
    /// the key.
    static KNOWN: PerProcess<Mutex<HashMap<(PathBuf, u64), bool>>> = PerProcess::new();
    let Ok(meta) = std::fs::metadata(folder) else { return true };
    let known = KNOWN.get_or_init(Mutex::default);
    let lock = || known.lock();
    let key = (folder.to_owned(), meta.dev());
    if let Some(local) = lock().get(&key) {
        return *local;
    }
    // The lock is not held here, because a layer may take long to answer.
    let layers = mountinfo::overlay_layers(meta.dev()).into_iter().filter(|layer| layer.exists());
    let local = layers.map(|layer| FileSystem::of_folder(&layer)).all(FileSystem::is_local);
    let mut known = lock();
    // Folders are created and removed over time, so the cache is bounded.
    if known.len() >= KNOWN_MAX {
        known.clear();
    }
    known.insert(key, local);
    local
}
