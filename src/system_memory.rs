//! The memory of the machine, of a process and of its control groups, as reported by the kernel. The kernel
//! allows any allocation, but kills a process that uses more memory than there is.

use std::path::{Path, PathBuf};

const GROUPS: &str = "/sys/fs/cgroup";

/// The field `key` of /proc/meminfo, in bytes.
pub fn of_machine(key: &str) -> Option<u64> {
    field(&std::fs::read_to_string("/proc/meminfo").ok()?, key)
}

/// The field `key` of /proc/PID/status of process `pid`, in bytes.
pub fn of_process(pid: u32, key: &str) -> Option<u64> {
    field(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?, key)
}

fn field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Maximum number of bytes that this process can still allocate, `None` if the system does not report it.
pub fn available() -> Option<u64> {
    let (memory, swap) = (of_machine("MemAvailable")?, of_machine("SwapFree").unwrap_or(0));
    let groups = groups(&own_groups(), Path::new(GROUPS));
    let left = groups.iter().filter_map(|group| group.left(swap));
    Some(left.fold(memory.saturating_add(swap), u64::min))
}

/// The lowest memory limit of the control groups of this process in bytes, `None` if there is no limit.
pub fn limit() -> Option<u64> {
    groups(&own_groups(), Path::new(GROUPS)).iter().filter_map(Group::limit).min()
}

fn own_groups() -> String {
    std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default()
}

/// The memory control groups that `text` (`/proc/self/cgroup`) names, and the groups above them, as folders below
/// `root`. It does not matter whether version 1 or version 2 is mounted there. In a container, `text` may contain the
/// path of a group on the host. This path does not exist in the container, except for its topmost folder.
fn groups(text: &str, root: &Path) -> Vec<Group> {
    let lines = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let memory = controllers.split(',').any(|name| name == "memory");
        (memory || controllers.is_empty()).then_some((memory, path))
    });
    let groups = lines.flat_map(|(is_v1, path)| {
        let root = if is_v1 { root.join("memory") } else { root.to_owned() };
        let path = root.join(path.trim_start_matches('/'));
        let folders = path.ancestors().take_while(|above| above.starts_with(&root));
        folders.map(|folder| Group { folder: folder.to_owned(), is_v1 }).collect::<Vec<_>>()
    });
    groups.collect()
}

/// A control group (cgroup) whose memory limits are read.
struct Group {
    folder: PathBuf,
    is_v1: bool,
}

impl Group {
    /// The bytes that remain below the limit of the group, if the machine has `swap` bytes of free swap. `None`
    /// if there is no limit.
    fn left(&self, swap: u64) -> Option<u64> {
        if self.is_v1 { self.left_v1(swap) } else { self.left_v2(swap) }
    }

    fn limit(&self) -> Option<u64> {
        self.number(if self.is_v1 { "memory.limit_in_bytes" } else { "memory.max" })
    }

    fn left_v2(&self, swap: u64) -> Option<u64> {
        let memory = self.rest("memory.max", "memory.current")?;
        let own_swap =
            self.rest("memory.swap.max", "memory.swap.current").map_or(swap, |left| left.min(swap));
        let cached = self.cached(["inactive_file", "active_file", "slab_reclaimable"]);
        Some(memory.saturating_add(own_swap).saturating_add(cached))
    }

    /// Version 1 has a limit for memory, and another limit for the sum of memory and swap.
    fn left_v1(&self, swap: u64) -> Option<u64> {
        let memory =
            self.rest("memory.limit_in_bytes", "memory.usage_in_bytes")?.saturating_add(swap);
        let both = self.rest("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes");
        let cached = self.cached(["total_inactive_file", "total_active_file"]);
        Some(memory.min(both.unwrap_or(u64::MAX)).saturating_add(cached))
    }

    /// Bytes that the group uses but that the kernel frees when they are needed. This is mostly the page cache,
    /// without files that exist only in memory such as those of tmpfs.
    fn cached<const N: usize>(&self, keys: [&str; N]) -> u64 {
        let Ok(text) = std::fs::read_to_string(self.folder.join("memory.stat")) else { return 0 };
        let values = text.lines().filter_map(|line| {
            let (key, value) = line.split_once(' ')?;
            if keys.contains(&key) { value.trim().parse::<u64>().ok() } else { None }
        });
        values.fold(0, u64::saturating_add)
    }

    /// The limit in the file `limit` minus the use in the file `used`, in bytes.
    fn rest(&self, limit: &str, used: &str) -> Option<u64> {
        Some(self.number(limit)?.saturating_sub(self.number(used).unwrap_or(0)))
    }

    /// The number in a file. If there is no limit, version 2 writes `max`, for which this returns `None`.
    fn number(&self, file: &str) -> Option<u64> {
        std::fs::read_to_string(self.folder.join(file)).ok()?.trim().parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Creates a folder with these files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    fn left(root: &tempfile::TempDir, text: &str, swap: u64) -> Vec<u64> {
        groups(text, root.path()).iter().filter_map(|group| group.left(swap)).collect()
    }

    #[test]
    fn what_can_be_swapped_out_counts_as_available() {
        assert!(available() >= of_machine("SwapFree"));
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "MemTotal: 9 kB\nMemAvailable:    5 kB\nHugePages: 2\n";
        assert_eq!((field(text, "MemAvailable"), field(text, "Mem")), (Some(5 << 10), None));
        assert_eq!(field(text, "HugePages"), None);
        assert!(of_process(std::process::id(), "VmRSS").is_some());
    }

    #[test]
    fn the_lowest_limit_of_all_groups_above_counts() {
        let root = tree(&[
            ("a/b/memory.max", "max\n"),
            ("a/memory.max", "5000000\n"),
            ("memory/x/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/memory.limit_in_bytes", "700\n"),
        ]);
        let limit = |text| groups(text, root.path()).iter().filter_map(Group::limit).min();
        assert_eq!(limit("0::/a/b\n"), Some(5_000_000));
        assert_eq!(limit("4:memory:/x\n0::/\n"), Some(700));
        assert_eq!(limit("4:cpu,memory:/host/only\n"), Some(700));
        assert_eq!(limit("3:cpuset:/\n0::/\n"), None);
    }

    #[test]
    fn the_limits_of_all_groups_above_count_in_both_hierarchies() {
        let root = tree(&[
            ("a/memory.max", "4096\n"),
            ("a/memory.current", "0\n"),
            ("a/b/memory.max", "max\n"),
            ("a/b/memory.current", "7\n"),
            ("memory/c/memory.limit_in_bytes", "8192\n"),
            ("memory/c/memory.usage_in_bytes", "0\n"),
        ]);
        assert_eq!(left(&root, "0::/a/b\n", 0), [4096]);
        assert_eq!(left(&root, "4:cpu:/x\n3:memory:/c\n0::/\n", 0), [8192]);
        assert_eq!(left(&root, "nonsense", 0), [0u64; 0]);
    }

    #[test]
    fn what_a_group_already_uses_is_not_left_of_its_limit_but_its_page_cache_is() {
        let stat = format!(
            "anon {}\nfile {}\nshmem {GIB}\ninactive_file {GIB}\nactive_file {GIB}\nslab_reclaimable 4096\n",
            4 * GIB,
            3 * GIB
        );
        let root = tree(&[
            ("pod/memory.max", "10737418240\n"),
            ("pod/memory.current", "8589934592\n"),
            ("pod/memory.stat", &stat),
            // More remains below the limit of this group than below the limit of its parent.
            ("pod/own/memory.max", "9663676416\n"),
            ("pod/own/memory.current", "1073741824\n"),
            ("pod/own/memory.stat", "inactive_file 0\n"),
        ]);
        assert_eq!(left(&root, "0::/pod/own\n", 0), [8 * GIB, 4 * GIB + 4096]);
        let root = tree(&[
            ("memory/pod/memory.limit_in_bytes", "10737418240\n"),
            ("memory/pod/memory.usage_in_bytes", "8589934592\n"),
            // The counters without the prefix `total_` are those of the group itself. The others include all groups
            // below it.
            (
                "memory/pod/memory.stat",
                "inactive_file 1\ntotal_inactive_file 4096\ntotal_active_file 8192\n",
            ),
            // The kernel writes this value if there is no limit.
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/memory.usage_in_bytes", "8589934592\n"),
        ]);
        let found = left(&root, "4:memory:/pod\n", 0);
        assert_eq!(found[0], 2 * GIB + 12288);
        assert!(found[1] > 1 << 60);
    }

    #[test]
    fn a_group_that_uses_more_than_its_limit_has_nothing_left() {
        let root = tree(&[("a/memory.max", "4096\n"), ("a/memory.current", "8192\n")]);
        assert_eq!(left(&root, "0::/a\n", 0), [0]);
    }

    #[test]
    fn a_group_may_swap_out_as_much_as_its_limits_and_the_machine_have_left() {
        let limits = [("a/memory.max", "8192\n"), ("a/memory.current", "4096\n")];
        let with = |swap: &[(&'static str, &'static str)]| tree(&[&limits, swap].concat());
        assert_eq!(left(&with(&[]), "0::/a\n", 1000), [5096]);
        let none = with(&[("a/memory.swap.max", "0\n"), ("a/memory.swap.current", "0\n")]);
        assert_eq!(left(&none, "0::/a\n", 1000), [4096]);
        let some = with(&[("a/memory.swap.max", "700\n"), ("a/memory.swap.current", "600\n")]);
        assert_eq!(left(&some, "0::/a\n", 1000), [4196]);
        let v1 = [
            ("memory/a/memory.limit_in_bytes", "8192\n"),
            ("memory/a/memory.usage_in_bytes", "4096\n"),
            ("memory/a/memory.memsw.limit_in_bytes", "8192\n"),
            ("memory/a/memory.memsw.usage_in_bytes", "4100\n"),
        ];
        assert_eq!(left(&tree(&v1), "4:memory:/a\n", 1000), [4092]);
        assert_eq!(left(&tree(&v1[..2]), "4:memory:/a\n", 1000), [5096]);
    }
}
