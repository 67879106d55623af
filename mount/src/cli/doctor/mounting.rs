//! Makes a mount to find out whether mounting works and what the kernel grants.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mountinfo;
use tensorfs::internal::size::shown_size;

use super::Check;
use crate::daemon::attach::{self, Attached, Detach};
use crate::options::Options;
use crate::serve::kernel::{self, KernelPaths, Knob, READAHEAD, reason};

/// Time limit in milliseconds for the first request of a connection from the kernel.
const OFFER_TIMEOUT_MS: u16 = 2000;

/// Folders in which mount(8) searches for helpers.
const HELPER_FOLDERS: [&str; 2] = ["/sbin", "/usr/sbin"];

/// The control file system of FUSE.
const CONTROL: &str = "/sys/fs/fuse/connections";

/// Results of a trial mount.
pub(super) struct Trial {
    by_fusermount: bool,
    offer: Option<Offer>,
    readahead: Knob,
}

/// The features that the kernel offers in INIT, the first request of a connection.
#[derive(Debug, PartialEq, Eq)]
struct Offer {
    /// Version of the protocol.
    version: (u32, u32),
    flags: u64,
}

const FUSE_MAX_PAGES: u64 = 1 << 22;
const FUSE_INIT_EXT: u64 = 1 << 30;
const FUSE_PASSTHROUGH: u64 = 1 << 37;

/// Mounts on a temporary folder without serving the mount, and unmounts it.
///
/// # Errors
/// The reason why a mount is not possible.
pub(super) fn trial() -> Result<Trial, String> {
    let template = std::env::temp_dir().join("tensorfs-doctor-XXXXXX");
    let folder = nix::unistd::mkdtemp(&template)
        .map_err(|e| format!("{}: {}; set TMPDIR", shown_path(&template), e.desc()))?;
    let trial = trial_on(&folder);
    // If the unmount failed, the folder remains. Its name says that it is from the doctor.
    if let Err(e) = std::fs::remove_dir(&folder) {
        crate::log::say(&format!("{}: {e}", shown_path(&folder)));
    }
    trial
}

fn trial_on(folder: &Path) -> Result<Trial, String> {
    let Attached { fd, by_fusermount } =
        attach::attach(folder, "tensorfs-doctor", &Options::default())?;
    let minor = mountinfo::ours_at(folder).ok().flatten().map(|mount| mount.minor);
    let readahead = KernelPaths::real().set_readahead(minor, READAHEAD);
    let offer = first_request(File::from(fd)).ok().as_deref().and_then(Offer::parse);
    // The connection is closed by now, so no program waits for the mount.
    if let Err(e) = attach::detach(folder, Detach::Lazy) {
        crate::log::say(&format!("{}: cannot unmount: {e}", shown_path(folder)));
    }
    Ok(Trial { by_fusermount, offer, readahead })
}

/// Reads the first request of a connection, and then closes the connection.
fn first_request(mut device: File) -> io::Result<Vec<u8>> {
    let mut ready = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
    if poll(&mut ready, PollTimeout::from(OFFER_TIMEOUT_MS))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // The kernel requires a buffer of at least 8 KiB.
    let mut request = vec![0; 64 << 10];
    let len = device.read(&mut request)?;
    request.truncate(len);
    Ok(request)
}

impl Offer {
    /// Parses an INIT request. It has a header of 40 bytes, with the operation in the second word,
    /// and then version, readahead and flags.
    fn parse(request: &[u8]) -> Option<Offer> {
        const INIT: u32 = 26;
        #[expect(clippy::host_endian_bytes, reason = "the kernel speaks as the machine does")]
        let word = |offset: usize| {
            request.get(offset..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
        };
        if word(4)? != INIT {
            return None;
        }
        let mut flags = u64::from(word(52)?);
        if flags & FUSE_INIT_EXT != 0 {
            flags |= u64::from(word(56)?) << 32;
        }
        Some(Offer { version: (word(40)?, word(44)?), flags })
    }

    fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }
}

/// The requirements of a mount, and whether each is met.
pub(super) fn checks(trial: &Result<Trial, String>) -> Vec<Check> {
    let mut checks = vec![device(), fusermount(), trial_mount(trial)];
    checks.extend([allow_other(), helper(), control()]);
    if let Ok(trial) = trial {
        checks.extend([protocol(trial), passthrough(trial), readahead(trial)]);
    }
    checks.push(request_limit());
    checks
}

fn device() -> Check {
    let name = "/dev/fuse";
    let open_to_all = "give it mode 0666, as udev does";
    match File::options().read(true).write(true).open(name) {
        // fusermount3 opens the device with the rights of its caller.
        Ok(device) if device.metadata().is_ok_and(|meta| meta.mode() & 0o006 != 0o006) => {
            Check::degraded(name, "can be opened, but not by every user", open_to_all)
        }
        Ok(_) => Check::ok(name, "can be opened by everybody"),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Check::missing(
            name,
            format!("{}: this user cannot mount", reason(&e)),
            format!("{open_to_all}; allow the device in a container"),
        ),
        Err(e) => Check::missing(
            name,
            format!("{}: nothing can be mounted", reason(&e)),
            "modprobe fuse; or start the container with --device /dev/fuse",
        ),
    }
}

fn fusermount() -> Check {
    let name = "fusermount3";
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|folder| folder.join(name));
    let Some((path, meta)) =
        found.filter_map(|p| Some((p.metadata().ok()?, p))).find_map(|(meta, path)| {
            (meta.is_file() && meta.mode() & 0o111 != 0).then_some((path, meta))
        })
    else {
        return Check::missing(
            name,
            "not on PATH: only root can mount",
            "install the package fuse3",
        );
    };
    let asked = Command::new(&path).arg("--version").stdin(Stdio::null()).output();
    let said = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let last = said.ok().and_then(|said| said.split_whitespace().last().map(str::to_owned));
    let version = last.unwrap_or_else(|| "of unknown version".to_owned());
    let place = shown_path(&path);
    if meta.uid() == 0 && meta.mode() & 0o4000 != 0 {
        Check::ok(name, format!("{version}, {place}, setuid root: mounts for users"))
    } else {
        let found = format!("{version}, {place} is not setuid root: it may not help users mount");
        Check::degraded(name, found, format!("chmod u+s {place}, as root"))
    }
}

fn trial_mount(trial: &Result<Trial, String>) -> Check {
    let name = "mount";
    match trial {
        Ok(trial) if trial.by_fusermount => {
            Check::ok(name, "a mount on a temporary folder worked, through fusermount3")
        }
        Ok(_) => Check::ok(name, "a mount on a temporary folder worked, by mount(2)"),
        Err(why) => Check::missing(
            name,
            why.clone(),
            "see the lines above; in a container, allow mounting (CAP_SYS_ADMIN)",
        ),
    }
}

fn allow_other() -> Check {
    let name = "user_allow_other";
    let text = std::fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    if allows_other(&text) {
        return Check::ok(name, "in /etc/fuse.conf: users can let others in");
    }
    let found = "not in /etc/fuse.conf: only root can use -o allow_other";
    Check::missing(name, found, "add the line user_allow_other to /etc/fuse.conf, as root")
}

fn allows_other(conf: &str) -> bool {
    conf.lines().any(|line| line.trim() == "user_allow_other")
}

fn helper() -> Check {
    let name = "mount.tensorfs";
    let paths = HELPER_FOLDERS.map(|folder| Path::new(folder).join(name));
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("tensorfs"));
    let advice = format!("ln -sf {} /sbin/{name}, as root", shown_path(&program));
    let Some(path) = paths.into_iter().find(|path| path.is_symlink() || path.exists()) else {
        let found = "not in /sbin: no mount -t tensorfs, no fstab, no systemd mount units";
        return Check::missing(name, found, advice);
    };
    let shown = shown_path(&path);
    match path.metadata() {
        Ok(meta) if meta.is_file() && meta.mode() & 0o111 != 0 => {
            Check::ok(name, format!("{shown}: mount -t tensorfs and fstab work"))
        }
        Ok(_) => Check::missing(name, format!("{shown} cannot be run"), advice),
        Err(e) => Check::missing(name, format!("{shown}: {}", reason(&e)), advice),
    }
}

fn control() -> Check {
    let name = "fusectl";
    let mounts = mountinfo::at(Path::new(CONTROL)).unwrap_or_default();
    if mounts.iter().any(|mount| mount.fstype == "fusectl") {
        return Check::ok(name, "mounted: the limits of a connection can be seen");
    }
    let found = "not mounted: the limits of a connection cannot be seen";
    Check::missing(name, found, format!("mount -t fusectl none {CONTROL}, as root"))
}

fn protocol(trial: &Trial) -> Check {
    let name = "FUSE protocol";
    let Some(offer) = &trial.offer else {
        return Check::unknown(name, "the kernel sent no request");
    };
    let (major, minor) = offer.version;
    if offer.has(FUSE_MAX_PAGES) {
        return Check::ok(name, format!("{major}.{minor}"));
    }
    let found = format!("{major}.{minor}: requests are 128 KiB at most");
    Check::degraded(name, found, "Linux 4.20 or later reads in larger requests")
}

fn passthrough(trial: &Trial) -> Check {
    let name = "passthrough";
    let Some(offer) = &trial.offer else {
        return Check::unknown(name, "the kernel sent no request");
    };
    if !offer.has(FUSE_PASSTHROUGH) {
        let found = "this kernel does not offer it: whole files are copied by the daemon";
        return Check::missing(name, found, "Linux 6.9 with CONFIG_FUSE_PASSTHROUGH has it");
    }
    if trial.by_fusermount || !super::machine::is_admin() {
        let found = "for root only: whole files are copied by the daemon";
        return Check::degraded(name, found, "mount as root, outside of user namespaces");
    }
    Check::ok(name, "offered: whole files are served by the kernel")
}

fn readahead(trial: &Trial) -> Check {
    match trial.readahead.degraded() {
        None => {
            let size = shown_size(READAHEAD);
            Check::ok("readahead", format!("the window of a mount was set to {size}"))
        }
        Some(found) => {
            let found = found.trim_start_matches("readahead ");
            Check::degraded("readahead", found, "mount as root, with a writable /sys")
        }
    }
}

fn request_limit() -> Check {
    let name = "max_pages_limit";
    let path = Path::new("/proc/sys/fs/fuse/max_pages_limit");
    let limit = match kernel::read(path) {
        Ok(limit) => limit,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Check::unknown(name, "this kernel does not tell");
        }
        Err(e) => return Check::unknown(name, format!("{}: {}", shown_path(path), reason(&e))),
    };
    let size = limit.saturating_mul(kernel::page());
    let found = format!("requests of up to {}", shown_size(size));
    if size < kernel::MAX_REQUEST.into() {
        let advice = "sysctl fs.fuse.max_pages_limit=256, as root";
        return Check::degraded(name, found, advice);
    }
    Check::ok(name, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An INIT request of protocol version 7.45 with these flags.
    fn request(flags: u32, more_flags: u32) -> Vec<u8> {
        let mut words = [0u32; 26];
        (words[1], words[10], words[11]) = (26, 7, 45);
        (words[13], words[14]) = (flags, more_flags);
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn what_the_kernel_offers_is_read_from_its_first_request() {
        let offer = Offer::parse(&request(1 << 30 | 1 << 22, 1 << 5)).unwrap();
        assert_eq!(offer.version, (7, 45));
        assert!(offer.has(FUSE_MAX_PAGES) && offer.has(FUSE_PASSTHROUGH));
        let old = Offer::parse(&request(1 << 22, 1 << 5)).unwrap();
        assert!(!old.has(FUSE_PASSTHROUGH), "without INIT_EXT the second word means nothing");
        assert_eq!(Offer::parse(&request(0, 0)[..50]), None);
        assert_eq!(Offer::parse(&[0; 104]), None);
    }

    #[test]
    fn a_line_that_is_commented_out_allows_nothing() {
        assert!(allows_other("mount_max = 1000\n user_allow_other \n"));
        assert!(!allows_other("#user_allow_other\n# user_allow_other\n"));
    }
}
