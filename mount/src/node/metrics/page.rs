//! The page of metrics, in the text format of Prometheus. It contains names of mounts, but no
//! paths.

use std::fmt::Write;

use tensorfs::internal::counters::{CounterValues, Histogram};
use tensorfs::internal::store::disk_cache::DiskCacheStatus;
use tensorfs::internal::store::{EndpointStatus, RemoteStatus};
use tensorfs::internal::system_memory::of_process;

use super::PostedMount;
use crate::daemon::status::{CounterOf, Status, Told};
use crate::serve::service::ServiceStatus;

/// The content type of the page.
pub(super) const TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Upper bounds of the buckets of a histogram, as exponents of two, in microseconds: 16 us to 67 s.
const BOUNDS: [u32; 12] = [4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26];

/// A metric: its name, its help text, and the function that returns its value from a `T`. The name
/// of a counter ends in `_total`, the name of a gauge does not.
type Row<T> = (&'static str, &'static str, fn(&T) -> u64);

/// Metrics with one value for each mount.
const ROWS: &[Row<ServiceStatus>] = &[
    ("cache_hits_total", "Reads that found all their bytes in memory.", |it| it.counters.hits),
    ("cache_misses_total", "Reads that waited for the source.", |it| it.counters.misses),
    ("cache_bytes", "Memory in use by the cache and by reads.", |it| it.cache.used),
    ("cache_limit_bytes", "Memory that the cache may use.", |it| it.cache.budget),
    ("source_bytes_total", "Bytes read from the source.", |it| it.counters.source_bytes),
    ("source_timeouts_total", "Requests to the source without an answer in time.", |it| {
        it.counters.source_timeouts
    }),
    ("source_requests_in_flight", "Reads of the source under way.", |it| {
        it.counters.source_reads_now
    }),
    (
        "source_requests_stuck",
        "Reads of the source past their deadline that the kernel has not returned.",
        |it| it.counters.source_stuck_now,
    ),
    ("prefetch_bytes_total", "Bytes read ahead of the readers.", |it| it.counters.prefetched_bytes),
    ("prefetch_useful_bytes_total", "Bytes read ahead that were requested later.", |it| {
        it.counters.prefetch_used_bytes
    }),
    ("prefetch_wasted_bytes_total", "Bytes read ahead that were dropped unread.", |it| {
        it.counters.prefetch_wasted_bytes
    }),
    ("reads_queued", "Reads that wait for memory.", |it| it.counters.reads_queued_now),
    ("checksum_mismatches_total", "Tensors and headers that differ from their checksums.", |it| {
        it.counters.checksum_mismatches
    }),
    ("checked_bytes_total", "Bytes that were compared with their checksums.", |it| {
        it.counters.checked_bytes
    }),
    ("log_lines_dropped_total", "Lines that a blocked or full log has lost.", |it| {
        it.log_lines_dropped
    }),
    ("log_lines_limited_total", "Errors of requests that were too many for the log.", |it| {
        it.log_lines_limited
    }),
    ("open_files", "Open handles of files.", |it| it.open_files as u64),
];

/// Counters for each server of a mount with a remote source.
const ENDPOINT_ROWS: &[Row<EndpointStatus>] = &[
    ("remote_requests_total", "Requests to servers.", |it| it.requests),
    ("remote_retries_total", "Requests that were sent again after a failure.", |it| it.retries),
    ("remote_hedges_total", "Requests that were sent twice, because the first was slow.", |it| {
        it.hedges
    }),
    ("remote_received_bytes_total", "Bytes that came from servers.", |it| it.bytes),
];

/// Counters of the disk caches of a mount with a remote source.
const DISK_ROWS: &[Row<DiskCacheStatus>] = &[
    ("disk_cache_found_bytes_total", "Bytes that disk caches had.", |it| it.found_bytes),
    ("disk_cache_missed_bytes_total", "Bytes that disk caches lacked.", |it| it.missed_bytes),
    ("disk_cache_stored_bytes_total", "Bytes stored in disk caches.", |it| it.stored_bytes),
    ("disk_cache_damaged_blocks_total", "Blocks that had not their checksum.", |it| {
        it.damaged_blocks
    }),
];

/// Writes the page. `answers` has the answers of the workers of `mounts`, and `None` for a worker
/// that did not answer.
pub(super) fn write(
    mounts: &[PostedMount],
    answers: &[Option<Told<Status>>],
    is_config_good: bool,
) -> String {
    let mut page = Page(String::new());
    page.head("build_info", "gauge", "Version of the service.");
    page.sample("build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    page.head("mounts", "gauge", "Mounts in the config.");
    page.sample("mounts", &[], mounts.len() as f64);
    page.head("config_last_reload_successful", "gauge", "Whether the config on disk is in force.");
    page.sample("config_last_reload_successful", &[], f64::from(u8::from(is_config_good)));
    let rows: Vec<_> = mounts.iter().zip(answers).collect();
    page.head("mount_up", "gauge", "Whether the worker of the mount answers and serves.");
    for (mount, answer) in &rows {
        let is_up = mount.is_serving && answer.is_some();
        page.sample("mount_up", &[("mount", &mount.name)], f64::from(u8::from(is_up)));
    }
    page.head("worker_failed_starts", "gauge", "Starts that failed since the mount served.");
    for (mount, _) in &rows {
        let labels = [("mount", mount.name.as_str())];
        page.sample("worker_failed_starts", &labels, f64::from(mount.failures));
    }
    let answered: Vec<(&str, &Told<Status>)> = rows
        .iter()
        .filter_map(|(mount, answer)| Some((mount.name.as_str(), answer.as_ref()?)))
        .collect();
    page.memory(&rows);
    for (name, help, value) in ROWS {
        page.head(name, kind_of(name), help);
        for (mount, answer) in &answered {
            page.sample(name, &[("mount", mount)], value(&answer.facts.service) as f64);
        }
    }
    let name = "worker_start_time_seconds";
    page.head(name, "gauge", "Start of the worker, in seconds since 1970.");
    for (mount, answer) in &answered {
        page.sample(name, &[("mount", mount)], answer.started_unix as f64);
    }
    page.labelled(
        &answered,
        "read_bytes_total",
        "Bytes of answers, by where they came from.",
        "via",
        &[
            ("page_cache", |c| c.bytes_from_page_cache),
            ("source", |c| c.bytes_from_source),
            ("cache", |c| c.bytes_from_cache),
        ],
    );
    page.labelled(
        &answered,
        "opens_total",
        "Opens of files, by who serves their reads.",
        "via",
        &[("daemon", |c| c.opens), ("passthrough", |c| c.opens_passthrough)],
    );
    page.sources(&answered);
    page.requests(&answered);
    page.remotes(&answered);
    page.head("read_wait_seconds", "histogram", "Time of reads that waited for the source.");
    for (mount, answer) in &answered {
        let histogram = &answer.facts.service.counters.wait_us.histogram;
        page.histogram("read_wait_seconds", &[("mount", mount)], histogram);
    }
    page.0
}

struct Page(String);

fn kind_of(name: &str) -> &'static str {
    if name.ends_with("_total") { "counter" } else { "gauge" }
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP tensorfs_{name} {help}\n# TYPE tensorfs_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let _ = write!(self.0, "tensorfs_{name}");
        for (index, (label, text)) in labels.iter().enumerate() {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{text}\"", if index == 0 { "{" } else { "," });
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    /// Writes several counters as one metric, with a label that distinguishes them.
    fn labelled(
        &mut self,
        answered: &[(&str, &Told<Status>)],
        name: &str,
        help: &str,
        label: &str,
        counts: &[(&str, CounterOf)],
    ) {
        self.head(name, "counter", help);
        for (mount, answer) in answered {
            for (word, count) in counts {
                let value = count(&answer.facts.service.counters) as f64;
                self.sample(name, &[("mount", mount), (label, word)], value);
            }
        }
    }

    fn memory(&mut self, rows: &[(&PostedMount, &Option<Told<Status>>)]) {
        let name = "worker_resident_memory_bytes";
        self.head(name, "gauge", "Resident memory of the worker.");
        for (mount, _) in rows {
            if let Some(bytes) = mount.pid.and_then(|pid| of_process(pid, "VmRSS")) {
                self.sample(name, &[("mount", &mount.name)], bytes as f64);
            }
        }
        self.head(
            "supervisor_resident_memory_bytes",
            "gauge",
            "Resident memory of the supervisor.",
        );
        if let Some(bytes) = of_process(std::process::id(), "VmRSS") {
            self.sample("supervisor_resident_memory_bytes", &[], bytes as f64);
        }
    }

    fn sources(&mut self, answered: &[(&str, &Told<Status>)]) {
        let name = "source_requests_total";
        self.head(name, "counter", "Reads of the source, by their outcome.");
        for (mount, answer) in answered {
            let CounterValues { source_reads, source_errors, .. } = answer.facts.service.counters;
            let ok = source_reads.saturating_sub(source_errors);
            for (code, value) in [("ok", ok), ("error", source_errors)] {
                let labels = [("mount", *mount), ("scheme", "file"), ("code", code)];
                self.sample(name, &labels, value as f64);
            }
        }
    }

    fn requests(&mut self, answered: &[(&str, &Told<Status>)]) {
        let name = "fuse_requests_total";
        self.head(name, "counter", "Requests of the kernel, by operation and result.");
        for (mount, answer) in answered {
            for (op, row) in &answer.facts.service.requests {
                for (result, count) in [("ok", row.ok), ("error", row.errors)] {
                    let labels = [("mount", *mount), ("op", op), ("result", result)];
                    self.sample(name, &labels, count as f64);
                }
            }
        }
        let name = "fuse_request_duration_seconds";
        self.head(name, "histogram", "Time from a request of the kernel to its answer.");
        for (mount, answer) in answered {
            for (op, row) in &answer.facts.service.requests {
                self.histogram(name, &[("mount", mount), ("op", op)], &row.time);
            }
        }
    }

    /// Writes the metrics of servers and disk caches, if any mount has a remote source.
    fn remotes(&mut self, answered: &[(&str, &Told<Status>)]) {
        let remotes: Vec<(&str, &RemoteStatus)> = answered
            .iter()
            .filter_map(|(mount, answer)| Some((*mount, answer.facts.service.remote.as_ref()?)))
            .collect();
        if remotes.is_empty() {
            return;
        }
        for (name, help, count) in ENDPOINT_ROWS {
            self.head(name, "counter", help);
            for (mount, remote) in &remotes {
                for endpoint in &remote.endpoints {
                    let labels = [("mount", *mount), ("host", endpoint.host.as_str())];
                    self.sample(name, &labels, count(endpoint) as f64);
                }
            }
        }
        let name = "remote_first_byte_seconds";
        self.head(name, "histogram", "Time from a request to the first byte of its answer.");
        for (mount, remote) in &remotes {
            for endpoint in &remote.endpoints {
                let labels = [("mount", *mount), ("host", endpoint.host.as_str())];
                self.histogram(name, &labels, &endpoint.first_byte_us.histogram);
            }
        }
        for (name, help, count) in DISK_ROWS {
            self.head(name, "counter", help);
            for (mount, remote) in &remotes {
                let sum: u64 = remote.disk_caches.iter().map(count).sum();
                self.sample(name, &[("mount", mount)], sum as f64);
            }
        }
    }

    /// Writes a histogram of a worker. The counts of its buckets, in microseconds, are not
    /// cumulative.
    fn histogram(&mut self, name: &str, labels: &[(&str, &str)], histogram: &Histogram) {
        let below = |bound: u64| -> u64 {
            let classes = histogram.below_us.iter().filter(|(class, _)| *class <= bound);
            classes.map(|(_, count)| count).sum()
        };
        let total = below(u64::MAX) as f64;
        for power in BOUNDS {
            let bound = 1_u64 << power;
            let le = (bound as f64 / 1e6).to_string();
            let labels: Vec<_> = labels.iter().copied().chain([("le", le.as_str())]).collect();
            self.sample(&format!("{name}_bucket"), &labels, below(bound) as f64);
        }
        let infinite: Vec<_> = labels.iter().copied().chain([("le", "+Inf")]).collect();
        self.sample(&format!("{name}_bucket"), &infinite, total);
        self.sample(&format!("{name}_sum"), labels, histogram.sum_us as f64 / 1e6);
        self.sample(&format!("{name}_count"), labels, total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::requests::RequestCounts;

    fn mount(name: &str) -> PostedMount {
        let name = name.to_owned();
        PostedMount { name, pid: None, is_serving: true, state: "serving", failures: 0 }
    }

    #[test]
    fn classes_are_cumulated_and_a_worker_without_an_answer_is_down() {
        let time = Histogram { sum_us: 3_000_000, below_us: vec![(64, 2), (1 << 30, 1)] };
        let mut answer = Told::<Status>::default();
        answer.facts.service.requests =
            [("read".to_owned(), RequestCounts { ok: 2, errors: 1, time })].into();
        answer.facts.service.counters.hits = 7;
        let page = write(&[mount("a"), mount("b\"\\")], &[Some(answer), None], false);
        for line in [
            "tensorfs_mount_up{mount=\"a\"} 1",
            "tensorfs_mount_up{mount=\"b\\\"\\\\\"} 0",
            "tensorfs_mounts 2",
            "tensorfs_config_last_reload_successful 0",
            "tensorfs_cache_hits_total{mount=\"a\"} 7",
            "tensorfs_fuse_requests_total{mount=\"a\",op=\"read\",result=\"error\"} 1",
            "tensorfs_fuse_request_duration_seconds_bucket{mount=\"a\",op=\"read\",le=\"0.000016\"} 0",
            "tensorfs_fuse_request_duration_seconds_bucket{mount=\"a\",op=\"read\",le=\"0.000064\"} 2",
            "tensorfs_fuse_request_duration_seconds_bucket{mount=\"a\",op=\"read\",le=\"+Inf\"} 3",
            "tensorfs_fuse_request_duration_seconds_sum{mount=\"a\",op=\"read\"} 3",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
    }
}
