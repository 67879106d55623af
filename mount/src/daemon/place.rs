//! Unmounts a mount wherever it is now: a folder of its path may have been renamed, and another
//! mount may cover it or a folder of its path. Also checks which folders lie in a mount.
//!
//! The mount table says where the mount is. An open descriptor of the mount or of its parent folder
//! would be simpler to use, but would prevent other processes from unmounting that file system.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mountinfo::{self, Mount};
use tensorfs::internal::open_options::OpenOptions;

use super::attach::{self, Detach};
use crate::options::Options;

/// Maximum number of mounts that are moved aside for one unmount.
const COVERS_MAX: usize = 1000;

/// Unmounts the mount with the minor device number `minor` everywhere, including its bind mounts.
/// Open files stay usable. Mounts of other file systems on top of it stay.
///
/// # Errors
/// The first error, if a mount remains.
pub(crate) fn take_off(minor: u32) -> io::Result<()> {
    let mut failure = None;
    let mut tried = Vec::new();
    loop {
        let table = mountinfo::all()?;
        let is_next = |mount: &&Mount| mount.is_ours_of(minor) && !tried.contains(&mount.id);
        let Some(mount) = table.iter().rev().find(is_next) else { break };
        tried.push(mount.id);
        let taken_off = take_one_off(mount, &table);
        // Another process may have unmounted it in the meantime.
        if let Err(e) = taken_off
            && is_there(mount.id)
        {
            failure.get_or_insert(e);
        }
    }
    failure.map_or(Ok(()), Err)
}

fn take_one_off(ours: &Mount, table: &[Mount]) -> io::Result<()> {
    if first_covered_folder(ours, table)?.is_none() {
        return attach::detach(&ours.target, Detach::Lazy);
    }
    unmount_below_covers(ours, table)
        .or_else(|refused| unmount_by_propagation(ours, table).map_err(|_| refused))
}

/// Whether the mount with this id is in the mount table.
fn is_there(id: u32) -> bool {
    mountinfo::all().is_ok_and(|table| table.iter().any(|mount| mount.id == id))
}

/// The first folder on the path of the mount `ours` that another mount covers. The mount point
/// itself counts as part of the path.
fn first_covered_folder(ours: &Mount, table: &[Mount]) -> io::Result<Option<PathBuf>> {
    let parent_of = |mount: &&Mount| table.iter().find(|other| other.id == mount.parent);
    let mut way = vec![ours.id];
    for mount in std::iter::successors(Some(ours), parent_of) {
        // The first mount of a namespace has its own id as the parent.
        if way.contains(&mount.parent) {
            break;
        }
        // If the root of this process is a plain folder, the mount of that folder is not in the
        // table.
        way.push(mount.parent);
    }
    let folders: Vec<&Path> = ours.target.ancestors().collect();
    for folder in folders.into_iter().rev() {
        if !way.contains(&mount_at(folder)?) {
            return Ok(Some(folder.to_owned()));
        }
    }
    let is_ours = mount_at(&ours.target)? == ours.id;
    is_ours.then_some(None).ok_or_else(|| io::Error::other("no path leads to it"))
}

/// Unmounts `ours`, which other mounts cover. Moves these mounts aside, unmounts, and moves them
/// back. Their open files are not affected. The kernel cannot move a mount whose parent is a shared
/// mount.
fn unmount_below_covers(ours: &Mount, table: &[Mount]) -> io::Result<()> {
    let move_mount = |from: &Path, to: &Path| {
        mount(Some(from), to, None::<&str>, MsFlags::MS_MOVE, None::<&str>).map_err(io::Error::from)
    };
    let mut aside: Option<PathBuf> = None;
    let mut moved = Vec::new();
    let uncovered = loop {
        let cover = match first_covered_folder(ours, table) {
            Ok(None) => break Ok(()),
            Ok(Some(_)) if moved.len() == COVERS_MAX => {
                break Err(io::Error::other("too many mounts on top"));
            }
            Ok(Some(cover)) => cover,
            Err(e) => break Err(e),
        };
        // The folder must not be below the cover, because a mount cannot be moved into itself.
        let folder = match aside.take().map_or_else(|| make_folder(&cover), Ok) {
            Ok(folder) => aside.insert(folder),
            Err(e) => break Err(e),
        };
        if let Err(e) = move_mount(&cover, folder) {
            let reason = format!("something is mounted on top that cannot be moved aside: {e}");
            break Err(io::Error::new(e.kind(), reason));
        }
        moved.push(cover);
    };
    let taken_off = uncovered.and_then(|()| attach::detach(&ours.target, Detach::Lazy));
    let Some(aside) = aside else { return taken_off };
    for cover in moved.iter().rev() {
        if let Err(e) = move_mount(&aside, cover) {
            let (aside, path) = (shown_path(&aside), shown_path(cover));
            tracing::error!("{path}: the mount on top of it is at {aside} now: {e}");
            return taken_off;
        }
    }
    let _ = std::fs::remove_dir(&aside);
    taken_off
}

/// Makes a temporary folder for the mounts that are moved aside. This folder is not below `cover`.
fn make_folder(cover: &Path) -> io::Result<PathBuf> {
    let name = format!("tensorfs-aside-{}", std::process::id());
    let mut made = Err(io::ErrorKind::NotFound.into());
    for folder in [std::env::temp_dir(), "/run".into(), "/dev/shm".into(), "/".into()] {
        let folder = folder.join(&name);
        if std::fs::canonicalize(folder.parent().unwrap_or(&folder))?.starts_with(cover) {
            continue;
        }
        made = std::fs::DirBuilder::new().mode(0o700).create(&folder).map(|()| folder);
        if made.is_ok() {
            break;
        }
    }
    made
}

/// Unmounts the mount `ours`, which is shared with other mount namespaces. The mounts on top of
/// `ours` stay in place.
///
/// This thread enters a private mount namespace. There it unmounts the mounts on top, which affects
/// no other namespace. Then the parent mount joins the peer group of the original parent, so that
/// the kernel propagates the unmount of `ours` to all namespaces. This needs Linux 5.15.
fn unmount_by_propagation(ours: &Mount, table: &[Mount]) -> io::Result<()> {
    let hidden = || io::Error::other("something is mounted on top, and no path leads below it");
    let below = table.iter().find(|mount| mount.id == ours.parent).ok_or_else(hidden)?;
    let group = open_path(&below.target)?;
    if mount_of(&group)? != below.id {
        return Err(hidden());
    }
    let (target, root, minor) = (ours.target.clone(), below.target.clone(), ours.minor);
    // In the new namespace, the mount has another id.
    let is_copy = move |mount: &&Mount| mount.is_ours_of(minor) && mount.target == target;
    let in_own_namespace = move || -> io::Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
        for _ in 0..COVERS_MAX {
            let table = mountinfo::all()?;
            let ours = table.iter().rev().find(&is_copy).ok_or_else(hidden)?;
            if let Some(cover) = first_covered_folder(ours, &table)? {
                umount2(&cover, MntFlags::MNT_DETACH)?;
                continue;
            }
            join_group(&open_path(&root)?, &group)?;
            return Ok(umount2(&ours.target, MntFlags::MNT_DETACH)?);
        }
        Err(hidden())
    };
    let thread = std::thread::Builder::new().name("unmount".to_owned()).spawn(in_own_namespace)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("unmounting failed by a bug")))?;
    if is_there(ours.id) {
        Err(io::Error::other("the kernel has left it in place"))
    } else {
        Ok(())
    }
}

/// Makes the private mount with root `copy` a peer of the shared mount with root `group`.
fn join_group(copy: &File, group: &File) -> io::Result<()> {
    // MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH and MOVE_MOUNT_SET_GROUP, as in
    // linux/mount.h.
    let flags: libc::c_uint = 0x4 | 0x40 | 0x100;
    let (from, to, here) = (group.as_raw_fd(), copy.as_raw_fd(), c"".as_ptr());
    // SAFETY: both descriptors are open, and the paths are static empty strings. The call writes to
    // no memory.
    let outcome = unsafe { libc::syscall(libc::SYS_move_mount, from, here, to, here, flags) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The id of the mount that `path` leads to. Does not access its file system.
fn mount_at(path: &Path) -> io::Result<u32> {
    mount_of(&open_path(path)?)
}

/// The id of the mount that contains `file`, which `open_path` opened.
fn mount_of(file: &File) -> io::Result<u32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let text = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    let number = text.and_then(|text| text.trim().parse().ok());
    number.ok_or_else(|| io::Error::other("the kernel tells no number of the mount"))
}

fn open_path(folder: &Path) -> io::Result<File> {
    let mut options = File::options();
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    options.read(true).custom_flags(flags).open(folder)
}

/// The folder of indexes. `None` if the folder lies in the mount itself, because the daemon would
/// wait for its own answers.
pub(super) fn index_folder(options: &Options, target: &Path) -> Option<PathBuf> {
    let folder = options.index_dir.folder()?;
    if lies_in(&folder, target) {
        tracing::warn!("{}: lies in the mount; no index is kept", shown_path(&folder));
        return None;
    }
    Some(folder)
}

/// Removes the disk cache from `open` if the cache lies in the mount itself, because the daemon
/// would wait for its own answers.
pub(super) fn check_disk_cache(open: &mut OpenOptions, target: &Path) {
    let within = open.disk_cache.take_if(|place| lies_in(&place.folder, target));
    if let Some(place) = within {
        tracing::warn!("{}: lies in the mount; there is no disk cache", shown_path(&place.folder));
    }
}

/// Refuses a folder for `config=` that lies in the mount itself.
pub(crate) fn check_config(open: &OpenOptions, target: &Path) -> Result<(), String> {
    let Some(config) = open.config.as_ref().filter(|config| lies_in(config, target)) else {
        return Ok(());
    };
    let (config, target) = (shown_path(config), shown_path(target));
    Err(format!("config={config}: lies in the mount {target}: name a folder elsewhere"))
}

/// Whether `path` lies in the mount on `target`. The last components of `path` may be missing in
/// the file system.
fn lies_in(path: &Path, target: &Path) -> bool {
    let there = || path.ancestors().find_map(|path| std::fs::canonicalize(path).ok());
    // The names are compared first, because the mount may not answer now.
    path.starts_with(target) || there().is_some_and(|there| there.starts_with(target))
}
