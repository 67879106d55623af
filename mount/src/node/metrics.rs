//! Metrics and health of the service, served by HTTP.
//!
//! The supervisor posts its facts on a board and never waits. A thread of the exporter reads the
//! board, and sends requests to the control sockets of the workers, with a time limit for each. If
//! a worker does not answer, the page has `mount_up` 0 for its mount.

mod http;
mod page;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use tensorfs::internal::sync::Mutex;

use super::config::MetricsAddress;
use crate::daemon::client::{self, Question, Reply};
use crate::daemon::status::{Status, Told};
use http::{HttpReply, HttpServer};

/// Time limit for the answers of the workers. Prometheus waits for ten seconds.
const LIMIT: Duration = Duration::from_secs(2);

/// Maximum number of workers that are asked at the same time.
const ASKED_MAX: usize = 32;

/// Maximum age of the cached metrics page. With the cached page, clients that come at the same time
/// cause only one set of requests to the workers.
const PAGE_AGE: Duration = Duration::from_millis(500);

/// Time without a post by the supervisor after which the service counts as not healthy.
const STALE: Duration = Duration::from_secs(30);

/// Facts of the supervisor about a mount.
#[derive(Clone, Debug)]
pub(super) struct PostedMount {
    pub name: String,
    /// Pid of its worker.
    pub pid: Option<u32>,
    pub is_serving: bool,
    /// Its state as one word.
    pub state: &'static str,
    /// Number of failed starts since the mount last served.
    pub failures: u32,
}

/// Facts of the supervisor about the service.
#[derive(Clone, Debug)]
struct Posted {
    at: Instant,
    mounts: Vec<PostedMount>,
    /// Whether the config that was read last is in use, and was not refused.
    is_config_good: bool,
}

/// The facts that the supervisor posted last.
pub(super) struct Board(Mutex<Posted>);

impl Default for Board {
    fn default() -> Board {
        let posted = Posted { at: Instant::now(), mounts: Vec::new(), is_config_good: true };
        Board(Mutex::new(posted))
    }
}

impl Board {
    /// Posts the current facts.
    pub(super) fn post(&self, mounts: Vec<PostedMount>, is_config_good: bool) {
        *self.0.lock() = Posted { at: Instant::now(), mounts, is_config_good };
    }
}

/// The server of metrics. The drop stops it.
pub(super) struct Exporter {
    pub address: MetricsAddress,
    _server: HttpServer,
}

impl Exporter {
    /// Starts the server at `address`.
    ///
    /// # Errors
    /// One line with the reason.
    pub(super) fn start(address: &MetricsAddress, board: Arc<Board>) -> Result<Exporter, String> {
        let pages = Pages { board, last: Mutex::default() };
        let server = HttpServer::start(address, move |path| pages.answer(path))
            .map_err(|e| format!("service.metrics: {address}: {e}"))?;
        tracing::info!("metrics at {address}");
        Ok(Exporter { address: address.clone(), _server: server })
    }
}

struct Pages {
    board: Arc<Board>,
    /// The last page of metrics, and the time at which it was made.
    last: Mutex<Option<(Instant, Arc<str>)>>,
}

impl Pages {
    fn answer(&self, path: &str) -> HttpReply {
        match path {
            "/metrics" => HttpReply::new(200, page::TYPE, &self.metrics()),
            "/healthz" => self.health(),
            "/readyz" => self.readiness(),
            "/" => HttpReply::text(200, "tensorfs: /metrics, /healthz and /readyz\n"),
            _ => HttpReply::text(404, "expected /metrics, /healthz or /readyz\n"),
        }
    }

    fn health(&self) -> HttpReply {
        let age = self.board.0.lock().at.elapsed();
        if age < STALE {
            return HttpReply::text(200, "ok\n");
        }
        HttpReply::text(503, &format!("the supervisor is stuck for {} s\n", age.as_secs()))
    }

    /// The reply that says whether all mounts serve. It leaves out the reasons, because they
    /// contain paths of the sources.
    fn readiness(&self) -> HttpReply {
        let posted = self.board.0.lock().clone();
        let missing = posted.mounts.iter().filter(|mount| !mount.is_serving);
        let lines: String =
            missing.map(|mount| format!("{}: {}\n", mount.name, mount.state)).collect();
        match lines.as_str() {
            "" if posted.at.elapsed() < STALE => HttpReply::text(200, "ok\n"),
            "" => HttpReply::text(503, "the supervisor is stuck\n"),
            lines => HttpReply::text(503, lines),
        }
    }

    fn metrics(&self) -> Arc<str> {
        // The lock makes clients that come at the same time wait for one page.
        let mut last = self.last.lock();
        if let Some((made, page)) = &*last
            && made.elapsed() < PAGE_AGE
        {
            return page.clone();
        }
        let posted = self.board.0.lock().clone();
        let answers = ask_all(&posted.mounts);
        let page: Arc<str> = page::write(&posted.mounts, &answers, posted.is_config_good).into();
        *last = Some((Instant::now(), page.clone()));
        page
    }
}

/// The answers of all workers, in the order of `mounts`. `None` for a worker that did not answer in
/// time.
fn ask_all(mounts: &[PostedMount]) -> Vec<Option<Told<Status>>> {
    let owner = geteuid().as_raw();
    let deadline = Instant::now() + LIMIT;
    let sockets: Vec<PathBuf> =
        client::sockets_of(owner).into_iter().map(|(_, path)| path).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let answers: Mutex<Vec<Option<Told<Status>>>> = Mutex::new(vec![None; mounts.len()]);
    let work = || loop {
        let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let Some(mount) = mounts.get(index) else { return };
        let Some(pid) = mount.pid.filter(|_| Instant::now() < deadline) else { continue };
        let ending = format!("-{pid}.sock");
        let of_pid = |path: &&PathBuf| path.to_str().is_some_and(|path| path.ends_with(&ending));
        let paths: Vec<PathBuf> = sockets.iter().filter(of_pid).cloned().collect();
        if let Reply::Answer(_, told) = client::ask(owner, &paths, Question::Status, deadline) {
            answers.lock()[index] = Some(told);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..mounts.len().min(ASKED_MAX) {
            let thread = std::thread::Builder::new().name("scrape".to_owned());
            // If no thread starts, the remaining mounts count as silent.
            let _ = thread.spawn_scoped(scope, work);
        }
    });
    answers.into_inner()
}
