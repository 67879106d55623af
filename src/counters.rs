//! Counters of a running mount. They are atomic numbers that any thread may increase and read at any time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Number of classes of latency. Class `n` counts durations from 2^(n-1) to 2^n microseconds, and the last
/// class also counts all longer ones.
const LATENCY_CLASSES: usize = 32;

/// A number. Some counters only grow, others also decrease.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Subtracts `n`.
    pub fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A histogram of durations. The bounds of its classes are powers of two.
#[derive(Debug, Default)]
pub struct Latency {
    classes: [Counter; LATENCY_CLASSES],
    /// Sum of all durations, in microseconds.
    sum_us: Counter,
}

impl Latency {
    /// Counts one duration.
    pub fn add(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let class = (u64::BITS - micros.leading_zeros()) as usize;
        self.classes[class.min(LATENCY_CLASSES - 1)].add(1);
        self.sum_us.add(micros);
    }

    /// The current histogram.
    pub fn histogram(&self) -> Histogram {
        let counts = self.classes.iter().map(Counter::get).enumerate();
        let rows = counts.filter(|(_, count)| *count > 0);
        Histogram {
            sum_us: self.sum_us.get(),
            below_us: rows.map(|(class, count)| (1_u64 << class, count)).collect(),
        }
    }

    /// The percentiles and the histogram, for `status`.
    pub fn waits(&self) -> Waits {
        Waits {
            p50: self.percentile_us(50),
            p99: self.percentile_us(99),
            max: self.percentile_us(100),
            histogram: self.histogram(),
        }
    }

    /// The smallest power of two, in microseconds, below which at least `percent` percent of the durations lie;
    /// 0 if nothing was counted.
    pub fn percentile_us(&self, percent: u64) -> u64 {
        let counts = self.classes.each_ref().map(Counter::get);
        let total: u64 = counts.iter().sum();
        let wanted = (total * percent).div_ceil(100);
        let mut seen = 0;
        for (class, count) in counts.iter().enumerate() {
            seen += count;
            if total > 0 && seen >= wanted {
                return 1 << class;
            }
        }
        0
    }
}

/// A histogram of durations, in the form in which `status` reports it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Histogram {
    /// Sum of all durations, in microseconds.
    pub sum_us: u64,
    /// For each class that is not empty, its upper bound in microseconds and the number of durations
    /// in it.
    pub below_us: Vec<(u64, u64)>,
}

/// Waiting times in microseconds, in the form in which `status` reports them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Waits {
    /// Half of the waits are shorter.
    pub p50: u64,
    /// 99 of 100 waits are shorter.
    pub p99: u64,
    /// All waits are shorter.
    pub max: u64,
    /// The histogram of all waits.
    pub histogram: Histogram,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of a mount, or of a reader without a mount. They count bytes and events since the
        /// start, except for the counters whose name ends in "now".
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: Counter,)*
            /// Time from the arrival of a read to its answer, for reads that had to wait for the source.
            pub wait: Latency,
        }

        /// The values of `Counters` at a point in time.
        #[derive(Clone, Debug, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub struct CounterValues {
            $($(#[$doc])* pub $name: u64,)*
            /// The durations of `wait`.
            pub wait_us: Waits,
        }

        impl Counters {
            /// The current values.
            pub fn values(&self) -> CounterValues {
                CounterValues {
                    $($name: self.$name.get(),)*
                    wait_us: self.wait.waits(),
                }
            }
        }
    };
}

counters! {
    /// Reads that were answered, with bytes or with an error.
    reads,
    /// Reads that were answered with an error.
    read_errors,
    /// Bytes that were returned in answers.
    bytes_served,
    /// Part of `bytes_served`: bytes that were copied from the page cache of the kernel.
    bytes_from_page_cache,
    /// Part of `bytes_served`: bytes that were read from the source for this answer, or whose read was in
    /// flight already.
    bytes_from_source,
    /// Part of `bytes_served`: bytes that had been read ahead or that remained from an earlier read.
    bytes_from_cache,
    /// Reads whose bytes were all in memory.
    hits,
    /// Reads that waited for the source.
    misses,
    /// Bytes that were read from sources, for any reason.
    source_bytes,
    /// Reads of sources.
    source_reads,
    /// Part of `source_reads`: reads that bypass the page cache of the kernel (O_DIRECT).
    source_reads_direct,
    /// Failed reads of sources.
    source_errors,
    /// Reads of sources, and other requests to them, that got no answer before the deadline.
    source_timeouts,
    /// Reads of sources that are in flight now.
    source_reads_now,
    /// Reads of sources whose deadline has passed, but which the kernel has not completed yet.
    source_stuck_now,
    /// Bytes that were read ahead.
    prefetched_bytes,
    /// Part of `prefetched_bytes`: bytes that readers requested afterwards.
    prefetch_used_bytes,
    /// Part of `prefetched_bytes`: bytes that were dropped before a reader requested them.
    prefetch_wasted_bytes,
    /// Number of times that read-ahead was shortened because of a lack of memory.
    prefetch_cuts,
    /// Opens of files whose reads the daemon serves.
    opens,
    /// Opens of files whose reads the kernel serves by itself (passthrough). These reads are not counted.
    opens_passthrough,
    /// Bytes that were put into the page cache of the kernel before a reader requested them.
    stored_bytes,
    /// Bytes of sources that were compared with their checksums (`verify=read`).
    checked_bytes,
    /// Tensors and headers that did not match their checksums.
    checksum_mismatches,
    /// Bytes of memory that the cache and the reads in flight use now.
    cache_bytes_now,
    /// Reads that wait for memory now.
    reads_queued_now,
}
