//! The counters of servers and of disk caches.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::disk_cache::{DiskCacheStatus, statuses};
use crate::counters::{Counter, Latency, Waits};
use crate::process::PerProcess;
use crate::sync::Mutex;

/// The counters of this process, by host. All stores of one host share them.
static OF_HOSTS: PerProcess<Mutex<BTreeMap<String, Arc<EndpointCounters>>>> = PerProcess::new();

/// Counters of one host.
#[derive(Debug, Default)]
pub(super) struct EndpointCounters {
    /// Requests that were sent, tries again and second ones included.
    pub(super) requests: Counter,
    /// Requests that were sent again after a failure.
    pub(super) retries: Counter,
    /// Second requests for what the first did not bring in the usual time.
    pub(super) hedges: Counter,
    /// Bytes of bodies that came.
    pub(super) bytes: Counter,
    /// Requests under way.
    pub(super) now: Counter,
    /// Time from a request to the headers of its answer.
    pub(super) first_byte: Latency,
}

/// The counters of `host`.
pub(super) fn counters_of(host: &str) -> Arc<EndpointCounters> {
    let mut all = OF_HOSTS.get_or_init(Mutex::default).lock();
    all.entry(host.to_owned()).or_default().clone()
}

/// The facts about a server, for `status`. Numbers are those of this process since its start.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct EndpointStatus {
    /// Its host.
    pub host: String,
    /// Requests that were sent.
    pub requests: u64,
    /// Part of `requests`: those that were sent again after a failure.
    pub retries: u64,
    /// Part of `requests`: second ones, because the first did not bring an answer in the usual time.
    pub hedges: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Requests under way.
    pub requests_now: u64,
    /// Time from a request to the first byte of its answer, in microseconds.
    pub first_byte_us: Waits,
}

/// The facts about remote sources, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RemoteStatus {
    /// The servers.
    pub endpoints: Vec<EndpointStatus>,
    /// The disk caches.
    pub disk_caches: Vec<DiskCacheStatus>,
}

/// The facts about the remote sources of this process. `None` if it has none.
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
