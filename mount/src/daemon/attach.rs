//! Mounts and unmounts a FUSE connection. This uses mount(2) if the process may call it, and
//! otherwise the setuid program `fusermount3`.
//!
//! fuser is not used for this, for three reasons. It drops the subtype on direct mounts, it does
//! not try fusermount3 if `/dev/fuse` cannot be opened, and it may unmount a folder twice.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{getegid, geteuid};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mountinfo;

use super::descriptors;
use crate::options::{Options, escape};

/// The device of FUSE.
const DEVICE: &str = "/dev/fuse";

/// The setuid program that mounts for users other than root.
const FUSERMOUNT: &str = "fusermount3";

/// The flag MS_NOSYMFOLLOW of mount(2). Kernels before 5.10 ignore it, and `fusermount3` has no
/// option for it.
const NOSYMFOLLOW: MsFlags = MsFlags::from_bits_retain(256);

/// A mount that was just made and is not served yet.
#[derive(Debug)]
pub(crate) struct Attached {
    /// The connection to the kernel.
    pub fd: OwnedFd,
    /// Whether `fusermount3` made the mount.
    pub by_fusermount: bool,
}

/// Makes a mount on `target` that no daemon serves yet. `fsname` is its source in the mount table.
///
/// # Errors
/// One line with the reason and a remedy.
pub(crate) fn attach(target: &Path, fsname: &str, options: &Options) -> Result<Attached, String> {
    if geteuid().is_root() {
        match attach_directly(target, fsname, options) {
            Ok(fd) => return Ok(Attached { fd, by_fusermount: false }),
            Err(Errno::EPERM | Errno::EACCES) => {}
            Err(Errno::ENOENT | Errno::ENODEV | Errno::ENXIO) => {
                return Err(format!(
                    "{DEVICE} cannot be used; load the kernel module with `modprobe fuse`, or \
                     give the container the device"
                ));
            }
            Err(e) => {
                let reason = io::Error::from(e);
                return Err(format!("{}: mount(2) failed: {reason}", shown_path(target)));
            }
        }
    }
    let fd = attach_by_fusermount(target, fsname, options)?;
    Ok(Attached { fd, by_fusermount: true })
}

fn attach_directly(target: &Path, fsname: &str, options: &Options) -> nix::Result<OwnedFd> {
    let device = File::options()
        .read(true)
        .write(true)
        .open(DEVICE)
        .map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO)))?;
    let mut flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    flags.set(MsFlags::MS_NOEXEC, options.noexec);
    flags.set(MsFlags::MS_NOATIME, options.noatime);
    flags.set(NOSYMFOLLOW, options.nosymfollow);
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,subtype=tensorfs",
        device.as_raw_fd(),
        geteuid(),
        getegid()
    );
    if options.allow_other {
        data.push_str(",allow_other");
    }
    // Without SELinux, the kernel refuses a mount with a context as an unknown option.
    if Path::new("/sys/fs/selinux").exists() {
        for context in &options.contexts {
            let (key, value) = context.split_once('=').unwrap_or((context, ""));
            data.push_str(&format!(",{key}=\"{value}\""));
        }
    }
    mount(Some(fsname), target, Some("fuse"), flags, Some(data.as_str()))?;
    Ok(device.into())
}

fn attach_by_fusermount(target: &Path, fsname: &str, options: &Options) -> Result<OwnedFd, String> {
    let fail = |e: io::Error| format!("{}: cannot mount: {e}", shown_path(target));
    let (ours, theirs) = UnixStream::pair().map_err(fail)?;
    fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty())).map_err(|e| fail(e.into()))?;
    let mut list =
        format!("ro,nosuid,nodev,default_permissions,subtype=tensorfs,fsname={}", escape(fsname));
    for (wanted, name) in [
        (options.allow_other, ",allow_other"),
        (options.noexec, ",noexec"),
        (options.noatime, ",noatime"),
    ] {
        if wanted {
            list.push_str(name);
        }
    }
    let run = Command::new(FUSERMOUNT)
        .args(["-o", &list, "--"])
        .arg(target)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .output();
    drop(theirs);
    let output = run.map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => format!(
            "{FUSERMOUNT} is not installed, and only root can mount without it; install the \
             package fuse3"
        ),
        _ => fail(e),
    })?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let said = errors.lines().last().unwrap_or("no reason given").trim();
        let hint = if said.contains("user_allow_other") {
            "; add `user_allow_other` to /etc/fuse.conf or leave out -o allow_other"
        } else if said.contains("open /dev/fuse: Permission denied") {
            "; users may mount where the device has mode 0666, as udev gives it"
        } else {
            ""
        };
        return Err(format!("{}: {said}{hint}", shown_path(target)));
    }
    receive_fd(&ours).map_err(fail)
}

/// Receives the descriptor that fusermount3 sends.
fn receive_fd(socket: &UnixStream) -> io::Result<OwnedFd> {
    let (_, fds) = descriptors::receive(socket, &mut [0], true)?;
    let first = fds.into_iter().next();
    first.ok_or_else(|| io::Error::other(format!("{FUSERMOUNT} sent no descriptor")))
}

/// How to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detach {
    /// Unmounts only if no process uses the mount.
    Clean,
    /// Unmounts at once. Open files stay usable.
    Lazy,
    /// Unmounts at once. Reads of open files fail.
    Force,
}

/// Unmounts the topmost mount on `target`.
///
/// # Errors
/// `EBUSY` if it is in use, or another error of the system.
pub(crate) fn detach(target: &Path, how: Detach) -> io::Result<()> {
    let flags = match how {
        Detach::Clean => MntFlags::empty(),
        Detach::Lazy => MntFlags::MNT_DETACH,
        Detach::Force => MntFlags::MNT_FORCE | MntFlags::MNT_DETACH,
    } | MntFlags::UMOUNT_NOFOLLOW;
    if how == Detach::Force
        && let Ok(Some(mount)) = mountinfo::ours_at(target)
    {
        abort_connection(mount.minor);
    }
    match umount2(target, flags) {
        Ok(()) => Ok(()),
        Err(Errno::EPERM) => detach_by_fusermount(target, how),
        Err(e) => Err(e.into()),
    }
}

/// Ends the FUSE connection of the device with the minor number `minor`, if the control file system
/// of FUSE is mounted. umount2(2) with the flag MNT_FORCE also ends the connection, but it requires
/// root and a path to the mount.
pub(crate) fn abort_connection(minor: u32) {
    let _ = std::fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1");
}

fn detach_by_fusermount(target: &Path, how: Detach) -> io::Result<()> {
    let lazy = if how == Detach::Clean { "-u" } else { "-uz" };
    let output =
        Command::new(FUSERMOUNT).args([lazy, "--"]).arg(target).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if said.contains("busy") {
        return Err(Errno::EBUSY.into());
    }
    Err(io::Error::other(said))
}
