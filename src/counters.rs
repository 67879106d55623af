//! Counters of a running mount: plain atomic numbers that any thread may add to and read while they
//! change.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Number of classes of latency: class `n` counts durations from 2^(n-1) to 2^n microseconds.
const LATENCY_CLASSES: usize = 32;

/// A number that only grows, or goes up and down.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Takes `n` away.
    pub fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Durations, as a histogram with classes of powers of two.
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

    /// The histogram now.
    pub fn histogram(&self) -> Histogram {
        let counts = self.classes.iter().map(Counter::get).enumerate();
        let rows = counts.filter(|(_, count)| *count > 0);
        Histogram {
            sum_us: self.sum_us.get(),
            below_us: rows.map(|(class, count)| (1_u64 << class, count)).collect(),
        }
    }

    /// Its percentiles and the histogram, for `status`.
    pub fn waits(&self) -> Waits {
        Waits {
            p50: self.percentile_us(50),
            p99: self.percentile_us(99),
            max: self.percentile_us(100),
            histogram: self.histogram(),
        }
    }

    /// The least power of two of microseconds that at least `percent` of the durations stay
    /// below; 0 if nothing was counted.
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

/// Durations, as `status` reports them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Histogram {
    /// Sum of all durations, in microseconds.
    pub sum_us: u64,
    /// For each class that is not empty, its upper bound in microseconds and the number of durations
    /// in it.
    pub below_us: Vec<(u64, u64)>,
}

/// Waits, as `status` reports them, in microseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Waits {
    /// Half of them are shorter.
    pub p50: u64,
    /// 99 of 100 are shorter.
    pub p99: u64,
    /// All are shorter.
    pub max: u64,
    /// All of them.
    pub histogram: Histogram,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one mount, or of one reader without a mount. Bytes and numbers since
        /// the start, but for those named "now".
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: Counter,)*
            /// Time from a read's arrival to its answer, if it had to wait for the source.
            pub wait: Latency,
        }

        /// The values of `Counters` at one moment.
        #[derive(Clone, Debug, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub struct CounterValues {
            $($(#[$doc])* pub $name: u64,)*
            /// The times of `wait`.
            pub wait_us: Waits,
        }

        impl Counters {
            /// The values now.
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
    /// Reads answered, with bytes or an error.
    reads,
    /// Reads answered with an error.
    read_errors,
    /// Bytes that were served in answers.
    bytes_served,
    /// Part of `bytes_served`: bytes copied from pages of the source that the kernel had cached.
    bytes_from_page_cache,
    /// Part of `bytes_served`: bytes that were read from the source for the answer, or were being
    /// read.
    bytes_from_source,
    /// Part of `bytes_served`: bytes that had been read ahead, or were left from an earlier read.
    bytes_from_cache,
    /// Reads that found all their bytes in memory.
    hits,
    /// Reads that waited for the source.
    misses,
    /// Bytes read from sources, for whatever reason.
    source_bytes,
    /// Reads of sources.
    source_reads,
    /// Part of `source_reads`: reads past the kernel's page cache (O_DIRECT).
    source_reads_direct,
    /// Reads of sources that failed.
    source_errors,
    /// Reads of sources and other requests to them without an answer within the deadline.
    source_timeouts,
    /// Reads of sources under way now.
    source_reads_now,
    /// Reads of sources past their deadline that the kernel has not returned, now.
    source_stuck_now,
    /// Bytes read ahead of the readers.
    prefetched_bytes,
    /// Part of `prefetched_bytes`: bytes that readers requested afterwards.
    prefetch_used_bytes,
    /// Part of `prefetched_bytes`: bytes that were dropped unread.
    prefetch_wasted_bytes,
    /// Times that read-ahead was cut because there was no memory for it.
    prefetch_cuts,
    /// Opens of files that the daemon serves.
    opens,
    /// Opens of files that the kernel serves by itself (passthrough). Their reads are not counted.
    opens_passthrough,
    /// Bytes put into the kernel's page cache before they were requested.
    stored_bytes,
    /// Bytes of sources that were compared with their checksums (`verify=read`).
    checked_bytes,
    /// Tensors and headers that differ from their checksums.
    checksum_mismatches,
    /// Memory held by the cache and by reads under way, now.
    cache_bytes_now,
    /// Reads that wait for memory, now.
    reads_queued_now,
}
