//! Counters of servers and disk caches, for `status`.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::bandwidth::Bandwidth;
use super::disk_cache::{DiskCacheStatus, statuses};
use crate::counters::{Counter, Latency, Waits};
use crate::process::PerProcess;
use crate::sync::Mutex;

/// The counters of this process, by host. All stores of one host share them.
static OF_HOSTS: PerProcess<Mutex<BTreeMap<String, Arc<EndpointCounters>>>> = PerProcess::new();

/// Counters of one host.
#[derive(Debug, Default)]
pub(super) struct EndpointCounters {
    /// Requests that were sent, including retries and hedged requests.
    pub(super) requests: Counter,
    /// Requests that were sent again after a failure.
    pub(super) retries: Counter,
    /// Hedged requests: second copies of requests that were not answered in the usual time.
    pub(super) hedges: Counter,
    /// Bytes of answer bodies that were received.
    pub(super) bytes: Counter,
    /// Requests in flight.
    pub(super) now: Counter,
    /// Time from a request to the headers of its answer.
    pub(super) first_byte: Latency,
    /// The rate and latency of its answers with bytes of objects.
    pub(super) bandwidth: Mutex<Bandwidth>,
}

/// The counters of `host`.
pub(super) fn counters_of(host: &str) -> Arc<EndpointCounters> {
    let mut all = OF_HOSTS.get_or_init(Mutex::default).lock();
    all.entry(host.to_owned()).or_default().clone()
}

/// The counters of a server, for `status`. Each counter begins at 0 when the process starts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct EndpointStatus {
    /// Host of the server.
    pub host: String,
    /// Requests that were sent.
    pub requests: u64,
    /// Part of `requests`: those that were sent again after a failure.
    pub retries: u64,
    /// Part of `requests`: second copies of requests that were not answered in the usual time.
    pub hedges: u64,
    /// Bytes that were received.
    pub bytes: u64,
    /// Requests in flight.
    pub requests_now: u64,
    /// Time from a request to the first byte of its answer, in microseconds.
    pub first_byte_us: Waits,
}

/// The state of the remote sources, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RemoteStatus {
    /// The servers.
    pub endpoints: Vec<EndpointStatus>,
    /// The disk caches.
    pub disk_caches: Vec<DiskCacheStatus>,
}

/// The status of the remote sources of this process. `None` if there are none.
pub fn remote_status() -> Option<RemoteStatus> {
    let all = OF_HOSTS.get_or_init(Mutex::default).lock().clone();
    let endpoints = all.into_iter().map(|(host, counters)| EndpointStatus {
        host,
        requests: counters.requests.get(),
        retries: counters.retries.get(),
        hedges: counters.hedges.get(),
        bytes: counters.bytes.get(),
        requests_now: counters.now.get(),
        first_byte_us: counters.first_byte.waits(),
    });
    let status = RemoteStatus { endpoints: endpoints.collect(), disk_caches: statuses() };
    (!status.endpoints.is_empty() || !status.disk_caches.is_empty()).then_some(status)
}
