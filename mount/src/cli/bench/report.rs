//! The figures of the bench (medians, spread and ratios), as a table and as JSON.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::{Value, json};
use tensorfs::words;

use super::args::Case;
use super::threads::Taken;

words! {
    /// The side of a run.
    pub(super) enum Side {
        Mount = "mount",
        File = "file",
    }
}

/// One run.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) side: Side,
    pub(super) round: u32,
    pub(super) seconds: f64,
    pub(super) bytes: u64,
    /// Checksum of the bytes, if the reader computes one.
    pub(super) digest: Option<String>,
    /// Processor time of the reader.
    pub(super) reader_cpu: Option<f64>,
    /// Processor time of the daemon, and its peak memory.
    pub(super) daemon_cpu: Option<f64>,
    pub(super) daemon_peak: Option<u64>,
    /// Number of reads, for patterns that are measured in reads.
    pub(super) operations: Option<u64>,
    /// Processor time of the daemon's threads, by name.
    pub(super) threads: Vec<Taken>,
    /// The read-ahead counters of the daemon, by name.
    pub(super) read_ahead: BTreeMap<String, u64>,
    /// Fraction of the files that was in the page cache when the run began.
    pub(super) cached: Option<f64>,
}

impl Run {
    fn gb(&self) -> f64 {
        self.bytes as f64 / 1e9
    }

    fn gbps(&self) -> f64 {
        self.gb() / self.seconds.max(1e-9)
    }

    fn ops(&self) -> Option<f64> {
        Some(self.operations? as f64 / self.seconds.max(1e-9))
    }

    fn json(&self) -> Value {
        json!({
            "ops_per_s": self.ops(),
            "threads": self.threads,
            "read_ahead": self.read_ahead,
            "side": self.side.as_str(),
            "round": self.round,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "gb_per_s": self.gbps(),
            "digest": self.digest,
            "reader_cpu_s": self.reader_cpu,
            "daemon_cpu_s": self.daemon_cpu,
            "daemon_peak_bytes": self.daemon_peak,
            "cached_before": self.cached,
        })
    }
}

/// Median and spread of a series of figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
    /// Median of the distances of the figures from their median.
    mad: f64,
}

impl Spread {
    fn of(figures: impl Iterator<Item = f64>) -> Option<Spread> {
        let mut figures: Vec<f64> = figures.collect();
        figures.sort_by(f64::total_cmp);
        let (&min, &max) = (figures.first()?, figures.last()?);
        let middle = median(&figures);
        let mut distances: Vec<f64> =
            figures.iter().map(|figure| (figure - middle).abs()).collect();
        distances.sort_by(f64::total_cmp);
        Some(Spread { median: middle, min, max, mad: median(&distances) })
    }

    fn told(self) -> String {
        format!("{:.2} ({:.2}-{:.2})", self.median, self.min, self.max)
    }

    fn told_in_thousands(self) -> String {
        let [median, min, max] = [self.median, self.min, self.max].map(|figure| figure / 1e3);
        format!("{median:.1}k/s ({min:.1}-{max:.1})")
    }
}

/// The median of `sorted`, which is not empty.
fn median(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 }
}

/// The outcome of a case.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) case: Case,
    pub(super) runs: Vec<Run>,
    pub(super) skipped: Option<String>,
    pub(super) failed: Option<String>,
}

impl Measured {
    fn on(&self, side: Side) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(move |run| run.side == side)
    }

    fn gbps(&self, side: Side) -> Option<Spread> {
        Spread::of(self.on(side).map(Run::gbps))
    }

    /// The ratios of mount to file for the two runs of each round.
    fn pairs(&self) -> Option<Spread> {
        let pair = |run: &Run| {
            let other = self.on(Side::File).find(|other| other.round == run.round)?;
            Some(run.gbps() / other.gbps())
        };
        Spread::of(self.on(Side::Mount).filter_map(pair))
    }

    fn ratio(&self) -> Option<f64> {
        Some(self.gbps(Side::Mount)?.median / self.gbps(Side::File)?.median)
    }

    fn noise(&self) -> Option<f64> {
        self.gbps(Side::File).map(|file| (file.max - file.min) / file.median)
    }

    fn daemon_cpu(&self) -> Option<Spread> {
        Spread::of(self.on(Side::Mount).filter_map(|run| Some(run.daemon_cpu? / run.gb())))
    }

    fn ops(&self, side: Side) -> Option<Spread> {
        Spread::of(self.on(side).filter_map(Run::ops))
    }

    /// For each thread name: the processor time per GB of the busiest thread, and whether only one
    /// thread has that name in every run.
    fn threads(&self) -> Vec<Value> {
        let runs =
            || self.on(Side::Mount).flat_map(|run| run.threads.iter().map(move |t| (run, t)));
        let names: BTreeSet<&str> = runs().map(|(_, taken)| taken.name.as_str()).collect();
        let told = |name: &str| {
            let own = || runs().filter(move |(_, taken)| taken.name == name);
            let busiest = Spread::of(own().map(|(run, taken)| taken.busiest / run.gb()));
            json!({
                "name": name,
                "once": own().all(|(_, taken)| taken.threads == 1),
                "busiest_cpu_s_per_gb": busiest,
            })
        };
        names.into_iter().map(told).collect()
    }

    /// The median of each read-ahead counter of the daemon.
    fn read_ahead(&self) -> BTreeMap<&str, f64> {
        let names: BTreeSet<&String> =
            self.on(Side::Mount).flat_map(|run| run.read_ahead.keys()).collect();
        let median = |name: &'_ String| {
            let runs = self.on(Side::Mount).filter_map(|run| run.read_ahead.get(name));
            Spread::of(runs.map(|&count| count as f64)).map(|spread| spread.median)
        };
        names.into_iter().filter_map(|name| Some((name.as_str(), median(name)?))).collect()
    }

    fn daemon_peak(&self) -> Option<u64> {
        self.on(Side::Mount).filter_map(|run| run.daemon_peak).max()
    }

    /// Whether all runs read the same bytes.
    pub(super) fn agrees(&self) -> bool {
        let mut digests = self.runs.iter().map(|run| (run.bytes, &run.digest));
        let first = digests.next();
        digests.all(|other| Some(other) == first)
    }

    pub(super) fn json(&self) -> Value {
        let reader_cpu =
            |side| Spread::of(self.on(side).filter_map(|run| Some(run.reader_cpu? / run.gb())));
        json!({
            "case": self.case.name,
            "pattern": self.case.pattern.as_str(),
            "state": self.case.state.as_str(),
            "skipped": self.skipped,
            "failed": self.failed,
            "mount": {
                "gb_per_s": self.gbps(Side::Mount),
                "ops_per_s": self.ops(Side::Mount),
                "reader_cpu_s_per_gb": reader_cpu(Side::Mount),
            },
            "file": {
                "gb_per_s": self.gbps(Side::File),
                "ops_per_s": self.ops(Side::File),
                "reader_cpu_s_per_gb": reader_cpu(Side::File),
            },
            "ratio_of_medians": self.ratio(),
            "ratio_of_pairs": self.pairs(),
            "noise": self.noise(),
            "daemon_cpu_s_per_gb": self.daemon_cpu(),
            "daemon_peak_bytes": self.daemon_peak(),
            "daemon_threads": self.threads(),
            "read_ahead": self.read_ahead(),
            "runs": self.runs.iter().map(Run::json).collect::<Vec<_>>(),
        })
    }

    /// The line of the case in the table.
    pub(super) fn row(&self) -> String {
        if let Some(reason) = &self.failed {
            return format!("{:<20} failed: {reason}\n", self.case.name);
        }
        if let Some(reason) = &self.skipped {
            return format!("{:<20} skipped: {reason}\n", self.case.name);
        }
        let told = |spread: Option<Spread>| spread.map_or("-".to_owned(), Spread::told);
        let speed = |side| match self.ops(side) {
            Some(ops) => ops.told_in_thousands(),
            None => told(self.gbps(side)),
        };
        let figure = |figure: Option<f64>| figure.map_or("-".to_owned(), |f| format!("{f:.2}"));
        format!(
            "{:<20} {:>18} {:>18} {:>6} {:>18} {:>6} {:>8} {:>9}\n",
            self.case.name,
            speed(Side::Mount),
            speed(Side::File),
            figure(self.ratio()),
            told(self.pairs()),
            self.noise().map_or("-".to_owned(), |noise| format!("{:.0}%", noise * 100.0)),
            figure(self.daemon_cpu().map(|cpu| cpu.median)),
            self.daemon_peak().map_or("-".to_owned(), |peak| format!("{}", peak >> 20)),
        )
    }
}

/// The header line of the table.
pub(super) fn head() -> String {
    format!(
        "{:<20} {:>18} {:>18} {:>6} {:>18} {:>6} {:>8} {:>9}\n",
        "case", "mount GB/s", "file GB/s", "ratio", "pairs", "noise", "CPU s/GB", "peak MiB"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::args::{CacheState, Pattern};

    fn measured(speeds: &[(Side, u32, f64)]) -> Measured {
        let run = |&(side, round, gbps): &(Side, u32, f64)| Run {
            side,
            round,
            seconds: 1.0 / gbps,
            bytes: 1_000_000_000,
            digest: Some("1".to_owned()),
            reader_cpu: None,
            daemon_cpu: (side == Side::Mount).then_some(0.5),
            daemon_peak: (side == Side::Mount).then_some(64 << 20),
            operations: None,
            threads: Vec::new(),
            read_ahead: BTreeMap::new(),
            cached: None,
        };
        let case =
            Case { name: "read".to_owned(), pattern: Pattern::Read, state: CacheState::Cold };
        Measured { case, runs: speeds.iter().map(run).collect(), skipped: None, failed: None }
    }

    #[test]
    fn ratios_are_those_of_medians_and_of_runs_that_followed_each_other() {
        use Side::{File, Mount};
        let measured = measured(&[
            (Mount, 0, 1.0),
            (File, 0, 2.0),
            (File, 1, 8.0),
            (Mount, 1, 2.0),
            (Mount, 2, 3.0),
            (File, 2, 4.0),
        ]);
        let json = measured.json();
        let near = |value: &Value, expected: f64| {
            let figure = value.as_f64().unwrap();
            assert!((figure - expected).abs() < 1e-9, "{figure} instead of {expected}");
        };
        near(&json["mount"]["gb_per_s"]["median"], 2.0);
        near(&json["ratio_of_medians"], 0.5);
        near(&json["ratio_of_pairs"]["median"], 0.5);
        near(&json["ratio_of_pairs"]["min"], 0.25);
        near(&json["noise"], 1.5);
        near(&json["daemon_cpu_s_per_gb"]["median"], 0.5);
        assert!(measured.row().contains("2.00 (1.00-3.00)"), "{}", measured.row());
    }

    #[test]
    fn spread_of_an_even_number_lies_between_the_middle_two() {
        let spread = Spread::of([4.0, 1.0, 2.0, 10.0].into_iter()).unwrap();
        assert_eq!(spread, Spread { median: 3.0, min: 1.0, max: 10.0, mad: 1.5 });
        assert_eq!(Spread::of(std::iter::empty()), None);
    }

    #[test]
    fn a_run_that_saw_other_bytes_is_noticed() {
        let mut measured = measured(&[(Side::Mount, 0, 1.0), (Side::File, 0, 1.0)]);
        assert!(measured.agrees());
        measured.runs[1].digest = Some("2".to_owned());
        assert!(!measured.agrees());
    }

    #[test]
    fn a_thread_that_stands_alone_is_told_from_those_that_share_a_name() {
        let mut measured = measured(&[(Side::Mount, 0, 1.0), (Side::Mount, 1, 1.0)]);
        let taken = |name: &str, threads, busiest| Taken {
            name: name.to_owned(),
            threads,
            all: 1.0,
            busiest,
        };
        measured.runs[0].threads = vec![taken("cache", 1, 0.25), taken("read", 1, 0.5)];
        measured.runs[1].threads = vec![taken("cache", 1, 0.75), taken("read", 4, 0.5)];
        measured.runs[0].read_ahead = BTreeMap::from([("prefetch_wasted_bytes".to_owned(), 6)]);
        let json = measured.json();
        let threads = &json["daemon_threads"];
        assert_eq!((&threads[0]["name"], &threads[0]["once"]), (&json!("cache"), &json!(true)));
        assert_eq!(threads[0]["busiest_cpu_s_per_gb"]["median"], 0.5);
        assert_eq!((&threads[1]["name"], &threads[1]["once"]), (&json!("read"), &json!(false)));
        assert_eq!(json["read_ahead"]["prefetch_wasted_bytes"], 6.0);
    }

    #[test]
    fn small_reads_are_told_by_the_second() {
        let mut measured = measured(&[(Side::Mount, 0, 1.0), (Side::File, 0, 2.0)]);
        measured.runs.iter_mut().for_each(|run| run.operations = Some(9_100));
        assert_eq!(measured.json()["file"]["ops_per_s"]["median"], 18_200.0);
        assert!(measured.row().contains("9.1k/s (9.1-9.1)"), "{}", measured.row());
    }
}
