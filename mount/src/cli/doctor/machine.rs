//! Facilities of the machine for fast reads: system calls, memory and limits; and its container or
//! init system.

use std::fs;
use std::path::{Path, PathBuf};

use indicatif::BinaryBytes;
use nix::errno::Errno;
use nix::sys::inotify::{InitFlags, Inotify};
use nix::sys::resource::{Resource, getrlimit};

use super::Check;
use crate::serve::kernel;

/// Fewest descriptors with which all shards of a large checkpoint stay open.
const FILES_ENOUGH: u64 = 4096;

/// Memory below which read-ahead is reduced.
const MEMORY_ENOUGH: u64 = 512 << 20;

pub(super) fn checks() -> Vec<Check> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    vec![
        Check::ok("kernel", format!("Linux {release}")),
        io_uring(),
        cachestat(),
        huge_pages(),
        memory(),
        open_files(),
        locked_memory(),
        inotify(),
        systemd(),
        container(),
    ]
}

/// Whether this process has CAP_SYS_ADMIN over the whole machine.
pub(super) fn is_admin() -> bool {
    ProcStatus::of_this_process().is_admin() && !in_user_namespace()
}

fn in_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().ne(["0", "0", "4294967295"])
}

/// `/proc/self/status`.
struct ProcStatus(String);

impl ProcStatus {
    fn of_this_process() -> ProcStatus {
        ProcStatus(fs::read_to_string("/proc/self/status").unwrap_or_default())
    }

    fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.0.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim())
    }

    /// CAP_SYS_ADMIN, in the namespace of this process.
    fn is_admin(&self) -> bool {
        let set = self.field("CapEff").and_then(|set| u64::from_str_radix(set, 16).ok());
        set.is_some_and(|set| set >> 21 & 1 == 1)
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
    let modes = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let modes = modes.unwrap_or_default();
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
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        let kib = line.and_then(|line| line.split_whitespace().next())?.parse::<u64>().ok()?;
        Some(kib << 10)
    };
    let (Some(total), Some(available)) = (field("MemTotal:"), field("MemAvailable:")) else {
        return Check::unknown(name, "/proc/meminfo does not tell");
    };
    let cgroup = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = cgroup_limit(Path::new("/sys/fs/cgroup"), &cgroup).filter(|limit| *limit < total);
    let mut found = format!("{} of {} available", BinaryBytes(available), BinaryBytes(total));
    match limit {
        Some(limit) => found
            .push_str(&format!("; the cgroup allows {}, page cache included", BinaryBytes(limit))),
        None => found.push_str("; no cgroup limit seen"),
    }
    if limit.unwrap_or(u64::MAX).min(available) < MEMORY_ENOUGH {
        return Check::degraded(name, found, "more memory lets more be read ahead");
    }
    Check::ok(name, found)
}

/// The lowest memory limit of the cgroups that `cgroup`, the text of `/proc/self/cgroup`, names,
/// and of those above them.
fn cgroup_limit(root: &Path, cgroup: &str) -> Option<u64> {
    let limits = cgroup.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next().unwrap_or_default();
        let path = fields.next().unwrap_or_default().trim_start_matches('/').to_owned();
        let (root, file) = if controllers.is_empty() {
            (root.to_owned(), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (root.join("memory"), "memory.limit_in_bytes")
        } else {
            return Vec::new();
        };
        // In a container the path may be the host's, which does not exist there; only its top does.
        let folders = Path::new(&path).ancestors().map(|above| root.join(above));
        folders.filter_map(|folder: PathBuf| kernel::read(&folder.join(file)).ok()).collect()
    });
    limits.min()
}

fn open_files() -> Check {
    let name = "open files";
    match getrlimit(Resource::RLIMIT_NOFILE) {
        // The daemon raises the soft limit.
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
            let most = limit(soft, |bytes| BinaryBytes(*bytes).to_string());
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

fn systemd() -> Check {
    // sd_booted(3) looks at this folder.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_all_cgroups_above_counts() {
        let folder = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("a/b/memory.max", "max\n");
        put("a/memory.max", "5000000\n");
        put("memory/x/memory.limit_in_bytes", "9223372036854771712\n");
        put("memory/memory.limit_in_bytes", "700\n");
        assert_eq!(cgroup_limit(folder.path(), "0::/a/b\n"), Some(5_000_000));
        assert_eq!(cgroup_limit(folder.path(), "4:memory:/x\n0::/\n"), Some(700));
        assert_eq!(cgroup_limit(folder.path(), "4:cpu,memory:/host/only\n"), Some(700));
        assert_eq!(cgroup_limit(folder.path(), "3:cpuset:/\n0::/\n"), None);
    }
}
