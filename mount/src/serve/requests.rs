//! Counts and times the kernel's requests by operation, without a lock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tensorfs::internal::counters::{Counter, Histogram, Latency};
use tensorfs::words;

words! {
    /// A kernel request that gets an answer. Other requests (forget, release, flush) are not
    /// counted.
    pub(crate) enum Operation {
        /// Find a name in a folder.
        Lookup = "lookup",
        /// Ask for attributes.
        Getattr = "getattr",
        /// Open a file.
        Open = "open",
        /// Read bytes.
        Read = "read",
        /// List a folder.
        Readdir = "readdir",
        /// List a folder with attributes.
        Readdirplus = "readdirplus",
        /// Ask for the size of the file system.
        Statfs = "statfs",
        /// Read or list extended attributes.
        Xattr = "xattr",
    }
}

/// The requests of one operation.
#[derive(Debug, Default)]
struct OperationCounters {
    ok: Counter,
    errors: Counter,
    /// Time from the request to its answer.
    time: Latency,
}

/// The requests of one operation, as `status` reports them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RequestCounts {
    pub ok: u64,
    pub errors: u64,
    pub time: Histogram,
}

/// The requests of a mount.
#[derive(Debug, Default)]
pub(crate) struct Requests([OperationCounters; Operation::ALL.len()]);

impl Requests {
    /// Starts the timer of a request.
    pub(crate) fn asked(self: &Arc<Self>, operation: Operation) -> RequestTimer {
        RequestTimer { requests: self.clone(), operation, since: Instant::now(), ok: false }
    }

    /// The current counts, by operation.
    pub(crate) fn counts(&self) -> BTreeMap<String, RequestCounts> {
        let rows = Operation::ALL.iter().zip(&self.0).map(|(operation, counters)| {
            let (ok, errors) = (counters.ok.get(), counters.errors.get());
            (operation.to_string(), RequestCounts { ok, errors, time: counters.time.histogram() })
        });
        rows.collect()
    }
}

/// The timer of one request. A request that is dropped without an answer counts as failed.
pub(crate) struct RequestTimer {
    requests: Arc<Requests>,
    operation: Operation,
    since: Instant,
    ok: bool,
}

impl RequestTimer {
    /// Notes that the request got a regular answer.
    pub(crate) fn succeeded(mut self) {
        self.ok = true;
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        let counters = &self.requests.0[self.operation as usize];
        let outcome = if self.ok { &counters.ok } else { &counters.errors };
        outcome.add(1);
        counters.time.add(self.since.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_counts_once_and_one_without_an_answer_as_an_error() {
        let requests = Arc::new(Requests::default());
        requests.asked(Operation::Read).succeeded();
        drop(requests.asked(Operation::Read));
        let all = requests.counts();
        assert_eq!((all["read"].ok, all["read"].errors), (1, 1));
        assert_eq!(all["read"].time.below_us.iter().map(|(_, count)| count).sum::<u64>(), 2);
        assert_eq!(all["open"].ok, 0);
    }
}
