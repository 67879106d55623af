//! How much memory a load may take: the kernel promises any amount, and ends the process when the
//! promise is called in.

use std::path::Path;

/// Bytes that this process can get at most, as far as the system says.
pub(super) fn available() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let machine = of_meminfo(&meminfo)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(group_limits(&groups, Path::new("/sys/fs/cgroup")).fold(machine, u64::min))
}

/// What is free, can be freed, or can be swapped out.
fn of_meminfo(text: &str) -> Option<u64> {
    let bytes = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(bytes("MemAvailable:")?.saturating_add(bytes("SwapFree:").unwrap_or(0)))
}

/// The limits of the control groups that `groups` (`/proc/self/cgroup`) names, and of those above
/// them, below `root`. Which kind of hierarchy is mounted there does not matter.
fn group_limits<'a>(groups: &'a str, root: &'a Path) -> impl Iterator<Item = u64> + 'a {
    let lines = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let memory = controllers.split(',').any(|name| name == "memory");
        (memory || controllers.is_empty()).then_some((memory, path))
    });
    lines.flat_map(move |(memory, path)| {
        let (root, file) = match memory {
            true => (root.join("memory"), "memory.limit_in_bytes"),
            false => (root.to_owned(), "memory.max"),
        };
        let group = root.join(path.trim_start_matches('/'));
        let groups = group.ancestors().take_while(|above| above.starts_with(&root));
        let limit =
            |group: &Path| std::fs::read_to_string(group.join(file)).ok()?.trim().parse().ok();
        groups.filter_map(limit).collect::<Vec<u64>>()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_swapped_out_counts_as_available() {
        let text = "MemTotal: 9 kB\nMemAvailable:    5 kB\nSwapFree:   2 kB\n";
        assert_eq!(of_meminfo(text), Some(7 << 10));
        assert_eq!(of_meminfo("MemTotal: 9 kB\n"), None);
        assert!(available().is_some());
    }

    #[test]
    fn the_limits_of_all_groups_above_count_in_both_hierarchies() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/memory.max", "4096\n");
        write("a/b/memory.max", "max\n");
        write("memory/c/memory.limit_in_bytes", "8192\n");
        let limits = |groups: &str| group_limits(groups, root.path()).collect::<Vec<_>>();
        assert_eq!(limits("0::/a/b\n"), [4096]);
        assert_eq!(limits("4:cpu:/x\n3:memory:/c\n0::/\n"), [8192]);
        assert_eq!(limits("nonsense"), [0u64; 0]);
    }
}
