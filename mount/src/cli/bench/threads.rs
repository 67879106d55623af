//! The processor time of the threads of a daemon, by thread name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Serialize;

/// Nanoseconds in a clock tick of /proc/PID/stat. Linux always reports 100 ticks per second there.
const TICK_NS: u64 = 10_000_000;

/// CPU time of the threads of a process so far.
#[derive(Debug, Default)]
pub(super) struct Threads {
    /// For each thread number, the name of the thread and its processor time in nanoseconds.
    all: BTreeMap<u32, (String, u64)>,
}

/// CPU time of the threads of one name between two samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Taken {
    /// The name of the threads, without a number at the end.
    pub(super) name: String,
    /// Number of threads with this name.
    pub(super) threads: usize,
    /// Seconds of processor time of all these threads, and of the busiest of them.
    #[serde(rename = "cpu_s")]
    pub(super) all: f64,
    #[serde(rename = "busiest_cpu_s")]
    pub(super) busiest: f64,
}

impl Threads {
    /// The threads of process `pid`. Empty if `/proc` does not show the process.
    pub(super) fn of(pid: u32) -> Threads {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
        let thread = |entry: fs::DirEntry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            Some((number, (family(name.trim_end()).to_owned(), taken(&entry.path())?)))
        };
        Threads { all: tasks.filter_map(|entry| thread(entry.ok()?)).collect() }
    }

    /// Processor time since `before`, by thread name. Threads that have ended are not included.
    pub(super) fn since(&self, before: &Threads) -> Vec<Taken> {
        let mut by_name: BTreeMap<&str, Taken> = BTreeMap::new();
        for (number, (name, now)) in &self.all {
            let then = before.all.get(number).map_or(0, |(_, then)| *then);
            let seconds = now.saturating_sub(then) as f64 / 1e9;
            let new = || Taken { name: name.clone(), threads: 0, all: 0.0, busiest: 0.0 };
            let taken = by_name.entry(name).or_insert_with(new);
            taken.threads += 1;
            taken.all += seconds;
            taken.busiest = taken.busiest.max(seconds);
        }
        by_name.into_values().collect()
    }
}

/// The name without a dash and a number at the end. For example, `fuser-0` and `fuser-1` do the
/// same work.
fn family(name: &str) -> &str {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    if stem.len() < name.len() { stem.strip_suffix('-').unwrap_or(name) } else { name }
}

/// Processor time of a thread, in nanoseconds.
fn taken(task: &Path) -> Option<u64> {
    let precise = fs::read_to_string(task.join("schedstat")).ok();
    let nanoseconds = precise.and_then(|text| text.split(' ').next()?.parse().ok());
    nanoseconds.or_else(|| in_ticks(&fs::read_to_string(task.join("stat")).ok()?))
}

/// User and system time from the line of `stat`, for kernels without `schedstat`.
fn in_ticks(stat: &str) -> Option<u64> {
    // The line has the name of the thread in parentheses, and the name may contain any characters.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some((user + system) * TICK_NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_one_name_are_one_line_and_numbers_do_not_count() {
        let threads = |all: &[(u32, &str, u64)]| {
            let all = all.iter().map(|&(n, name, ns)| (n, (family(name).to_owned(), ns)));
            Threads { all: all.collect() }
        };
        let before = threads(&[(1, "cache", 500_000_000), (2, "fuser-0", 0), (9, "gone", 7)]);
        let now = threads(&[
            (1, "cache", 750_000_000),
            (2, "fuser-0", 1_000_000_000),
            (3, "fuser-11", 2_000_000_000),
        ]);
        let taken = |name: &str, threads, all, busiest| Taken {
            name: name.to_owned(),
            threads,
            all,
            busiest,
        };
        let expected = [taken("cache", 1, 0.25, 0.25), taken("fuser", 2, 3.0, 2.0)];
        assert_eq!(now.since(&before), expected);
        assert_eq!(["read4", "-1", "a-b-"].map(family), ["read4", "", "a-b-"]);
    }

    #[test]
    fn ticks_are_found_behind_any_name() {
        let stat = "17 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 30 12 0 0 20 0 1 0 99";
        assert_eq!(in_ticks(stat), Some(42 * TICK_NS));
        assert_eq!(in_ticks("17 (a"), None);
    }

    #[test]
    fn the_threads_of_this_process_are_seen() {
        let seen = Threads::of(std::process::id());
        assert!(seen.all.contains_key(&std::process::id()), "{seen:?}");
        assert!(Threads::of(u32::MAX).all.is_empty());
    }
}
