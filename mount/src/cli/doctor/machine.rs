//! Features of the machine for fast reads: system calls, memory and limits. Also detects the
//! container and the init system.

use std::fs;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{InitFlags, Inotify};
use nix::sys::resource::{Resource, getrlimit};
use tensorfs::internal::size::shown_size;
use tensorfs::internal::system_memory;

use super::Check;
use crate::serve::kernel;

/// Minimum limit of descriptors at which all shards of a large checkpoint can stay open.
const FILES_ENOUGH: u64 = 4096;

/// Memory in bytes below which the amount of read-ahead is reduced.
const MEMORY_ENOUGH: u64 = 512 << 20;

/// Numbers of capabilities, from linux/capability.h.
const CAP_SYS_ADMIN: u32 = 21;
const CAP_LEASE: u32 = 28;

pub(super) fn checks() -> Vec<Check> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    vec![
        Check::ok("kernel", format!("Linux {}", release.trim())),
        io_uring(),
        cachestat(),
        huge_pages(),
        memory(),
        open_files(),
        locked_memory(),
        inotify(),
        leases(),
        systemd(),
        container(),
    ]
}

/// Whether this process has CAP_SYS_ADMIN for the whole machine.
pub(super) fn is_admin() -> bool {
    ProcStatus::of_this_process().has(CAP_SYS_ADMIN) && !in_user_namespace()
}

fn in_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().ne(["0", "0", "4294967295"])
}

/// The text of `/proc/self/status`.
struct ProcStatus(String);

impl ProcStatus {
    fn of_this_process() -> ProcStatus {
        ProcStatus(fs::read_to_string("/proc/self/status").unwrap_or_default())
    }

    fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.0.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim())
    }

    /// Whether the process has the capability with this number in its own namespace.
    fn has(&self, capability: u32) -> bool {
        let set = self.field("CapEff").and_then(|set| u64::from_str_radix(set, 16).ok());
        set.is_some_and(|set| set >> capability & 1 == 1)
    }
}

fn io_uring() -> Check {
    let name = "io_uring";
    let Err(e) = tensorfs::internal::io::probe_uring() else {
        return Check::ok(name, "a ring could be set up: local sources are read by it");
    };
    let disabled = kernel::read(Path::new("/proc/sys/kernel/io_uring_disabled")).unwrap_or(0);
    let hint = if disabled > 0 {
        "sysctl kernel.io_uring_disabled=0, as root"
    } else {
        "allow it in the system call filter of the container or service"
    };
    let found = format!("refused ({}): threads read, which takes more CPU", kernel::reason(&e));
    Check::missing(name, found, hint)
}

fn cachestat() -> Check {
    let name = "cachestat";
    let Err(e) = tensorfs::internal::io::probe_cachestat() else {
        return Check::ok(name, "answers: what is cached is known of files that you may write to");
    };
    let found = format!("refused ({}): mincore tells of your own files only", kernel::reason(&e));
    let hint = "Linux 6.5 has it; allow it in the system call filter of the container or service";
    Check::missing(name, found, hint)
}

fn huge_pages() -> Check {
    let name = "huge pages";
    let modes =
        fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let chosen = modes.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    match chosen.map(|(mode, _)| mode) {
        Some(mode @ ("always" | "madvise")) => Check::ok(name, format!("transparent: {mode}")),
        Some(mode) => Check::degraded(
            name,
            format!("transparent: {mode}; buffers take a little more CPU"),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        ),
        None => Check::missing(
            name,
            "this kernel has no transparent ones; buffers take a little more CPU",
            "a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        ),
    }
}

fn memory() -> Check {
    let name = "memory";
    let field = system_memory::of_machine;
    let (Some(total), Some(available)) = (field("MemTotal"), field("MemAvailable")) else {
        return Check::unknown(name, "/proc/meminfo does not tell");
    };
    let limit = system_memory::limit().filter(|limit| *limit < total);
    let mut found = format!("{} of {} available", shown_size(available), shown_size(total));
    match limit {
        Some(limit) => found
            .push_str(&format!("; the cgroup allows {}, page cache included", shown_size(limit))),
        None => found.push_str("; no cgroup limit seen"),
    }
    if limit.unwrap_or(u64::MAX).min(available) < MEMORY_ENOUGH {
        return Check::degraded(name, found, "more memory lets more be read ahead");
    }
    Check::ok(name, found)
}

fn open_files() -> Check {
    let name = "open files";
    match getrlimit(Resource::RLIMIT_NOFILE) {
        // The daemon raises its soft limit, so only the hard limit counts.
        Ok((_, hard)) if hard < FILES_ENOUGH => Check::degraded(
            name,
            format!("at most {hard}: shards are closed and opened again while they are read"),
            "raise the hard limit: ulimit -Hn, or LimitNOFILE= of a unit",
        ),
        Ok((_, hard)) => Check::ok(name, format!("at most {}", limit(hard, u64::to_string))),
        Err(e) => Check::unknown(name, e.desc()),
    }
}

fn locked_memory() -> Check {
    let name = "locked memory";
    match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok((soft, _)) => {
            let most = limit(soft, |bytes| shown_size(*bytes));
            Check::ok(name, format!("at most {most}; only rings before Linux 5.12 count"))
        }
        Err(e) => Check::unknown(name, e.desc()),
    }
}

fn limit(value: u64, show: impl Fn(&u64) -> String) -> String {
    if value == nix::sys::resource::RLIM_INFINITY { "any number".into() } else { show(&value) }
}

fn inotify() -> Check {
    let name = "inotify";
    let sysctl = |limit: &str| kernel::read(&Path::new("/proc/sys/fs/inotify").join(limit)).ok();
    let later = "changes of a source are seen up to a second late";
    match Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK) {
        Ok(_) => match sysctl("max_user_watches") {
            Some(watches) => Check::ok(name, format!("{watches} files can be watched")),
            None => Check::ok(name, "files can be watched"),
        },
        Err(Errno::EMFILE) => Check::degraded(
            name,
            format!("all {} instances of this user are taken: {later}", {
                sysctl("max_user_instances").map_or("the".to_owned(), |n| n.to_string())
            }),
            "raise the sysctl fs.inotify.max_user_instances, as root",
        ),
        Err(e) => Check::missing(name, format!("{}: {later}", e.desc()), "a kernel with inotify"),
    }
}

/// Checks read leases, with which the kernel tells whether a process writes a file.
fn leases() -> Check {
    let name = "leases";
    let shown = "with watch= the others are shown after a pause of their writer, whole or not";
    if kernel::read(Path::new("/proc/sys/fs/leases-enable")).is_ok_and(|on| on == 0) {
        let found = format!("turned off: nobody knows who writes a file: {shown}");
        return Check::missing(name, found, "sysctl fs.leases-enable=1, as root");
    }
    if ProcStatus::of_this_process().has(CAP_LEASE) && !in_user_namespace() {
        return Check::ok(name, "the kernel tells who writes a file, also one of another user");
    }
    let found = format!("of your own files only, without CAP_LEASE: {shown}");
    let advice = "mount as root; give a unit CAP_LEASE, or a container --cap-add LEASE";
    Check::degraded(name, found, advice)
}

fn systemd() -> Check {
    // sd_booted(3) checks for this folder.
    if Path::new("/run/systemd/system").is_dir() {
        return Check::ok("systemd", "runs this system: units and automounts can be used");
    }
    let found = "does not run this system: no units, no automounts";
    Check::missing("systemd", found, "mount by hand, by mount -a, or from another service manager")
}

fn container() -> Check {
    let name = "container";
    let signs = ["/run/systemd/container", "/run/.containerenv", "/.dockerenv"];
    let sign = signs.into_iter().find(|sign| Path::new(sign).exists());
    let kubernetes = || std::env::var_os("KUBERNETES_SERVICE_HOST").map(|_| "Kubernetes");
    let namespace = || in_user_namespace().then_some("a user namespace");
    match sign.or_else(kubernetes).or_else(namespace) {
        None => Check::ok(name, "no sign of one"),
        Some(sign) => {
            let found = "inside one, a mount is seen outside only if its folder is shared";
            Check::ok(name, format!("{sign} is a sign of one; {found}"))
        }
    }
}
