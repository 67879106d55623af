//! What the machine has for reading fast: system calls, memory, limits; and what runs it.

use std::fs;
use std::path::{Path, PathBuf};

use indicatif::BinaryBytes;
use nix::errno::Errno;
use nix::sys::inotify::{InitFlags, Inotify};
use nix::sys::resource::{Resource, getrlimit};

use super::Check;
use crate::kernel;

/// Fewest descriptors that leave large checkpoints open as a whole.
const FILES_ENOUGH: u64 = 4096;

/// Memory below which reading ahead is held back.
const MEMORY_ENOUGH: u64 = 512 << 20;

pub(super) fn checks() -> Vec<Check> {
    let status = Status::of_this_process();
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    vec![
        Check::ok("kernel", format!("Linux {release}")),
        io_uring(&status),
        cachestat(release, &status),
        huge_pages(),
        memory(),
        open_files(),
        locked_memory(),
        inotify(),
        systemd(),
        container(),
    ]
}

/// Whether this process may do what only the administrator of the whole machine may.
pub(super) fn is_admin() -> bool {
    Status::of_this_process().is_admin() && !in_user_namespace()
}

fn in_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().ne(["0", "0", "4294967295"])
}

/// `/proc/self/status`.
struct Status(String);

impl Status {
    fn of_this_process() -> Status {
        Status(fs::read_to_string("/proc/self/status").unwrap_or_default())
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

    /// Whether a filter may refuse system calls; `None` where the kernel does not tell.
    fn is_filtered(&self) -> Option<bool> {
        self.field("Seccomp").map(|mode| mode != "0")
    }

    fn groups(&self) -> impl Iterator<Item = u64> {
        let effective = self.field("Gid").and_then(|ids| ids.split_whitespace().nth(1));
        let more = self.field("Groups").unwrap_or_default().split_whitespace();
        effective.into_iter().chain(more).filter_map(|id| id.parse().ok())
    }
}

fn io_uring(status: &Status) -> Check {
    let sysctl = Path::new("/proc/sys/kernel");
    let disabled = kernel::read(&sysctl.join("io_uring_disabled")).ok();
    // A group of -1, which is no number here, is nobody's.
    let group = kernel::read(&sysctl.join("io_uring_group")).ok();
    io_uring_by(disabled, group, status)
}

fn io_uring_by(disabled: Option<u64>, group: Option<u64>, status: &Status) -> Check {
    let name = "io_uring";
    let allowed = match disabled {
        Some(0) => true,
        Some(1) => status.is_admin() || group.is_some_and(|g| status.groups().any(|id| id == g)),
        Some(_) => false,
        None => {
            let found = "this kernel does not tell whether it may be used; threads read where not";
            return Check::unknown(name, found);
        }
    };
    if !allowed {
        let found = "turned off: threads read the sources, which takes more CPU";
        return Check::missing(name, found, "sysctl kernel.io_uring_disabled=0, as root");
    }
    match status.is_filtered() {
        Some(false) => Check::ok(name, "may be used by this user"),
        _ => Check::unknown(
            name,
            "not turned off, but a system call filter may refuse it; threads read where it does",
        ),
    }
}

fn cachestat(release: &str, status: &Status) -> Check {
    let name = "cachestat";
    match version(release) {
        Some(version) if version < (6, 5) => Check::missing(
            name,
            "too old a kernel: mincore tells what is cached, of your own files only",
            "Linux 6.5 has it",
        ),
        Some(_) if status.is_filtered() == Some(false) => {
            Check::ok(name, "has been in Linux since 6.5")
        }
        Some(_) => Check::unknown(name, "in this kernel, but a system call filter may refuse it"),
        None => Check::unknown(name, format!("the release {release:?} says no version")),
    }
}

/// Major and minor version of a kernel release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
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
        // In a container the path may be that of the host, which is not there; its top is.
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
            Check::ok(name, format!("at most {most}; buffers registered with io_uring count"))
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
    // What sd_booted(3) looks at.
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
    use super::super::State;
    use super::*;

    fn status(text: &str) -> Status {
        Status(text.to_owned())
    }

    #[test]
    fn a_kernel_release_has_a_version() {
        assert_eq!(version("6.18.44-fc-v657"), Some((6, 18)));
        assert_eq!(version("7.0-rc1"), Some((7, 0)));
        assert_eq!(version("weird"), None);
    }

    #[test]
    fn io_uring_is_judged_by_its_switch_the_group_and_the_filter() {
        let root =
            status("Gid:\t0\t0\t0\t0\nGroups:\t0 \nCapEff:\t000001ffffffffff\nSeccomp:\t0\n");
        let user = status("Gid:\t5\t5\t5\t5\nGroups:\t7 8 \nCapEff:\t0\nSeccomp:\t0\n");
        let boxed = status("Gid:\t5\t5\t5\t5\nGroups:\t\nCapEff:\t0\nSeccomp:\t2\n");
        let state = |disabled, group, status| io_uring_by(disabled, group, status).state;
        assert_eq!(state(Some(0), None, &user), State::Ok);
        assert_eq!(state(Some(1), None, &user), State::Missing);
        assert_eq!(state(Some(1), Some(8), &user), State::Ok);
        assert_eq!(state(Some(1), None, &root), State::Ok);
        assert_eq!(state(Some(2), None, &root), State::Missing);
        assert_eq!(state(Some(0), None, &boxed), State::Unknown);
        assert_eq!(state(None, None, &user), State::Unknown);
    }

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
