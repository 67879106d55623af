//! The supervisor's state of one mount of the config: waiting, starting, serving or unmounted.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tensorfs::internal::error::{shown, shown_path};
use tensorfs::internal::mountinfo::Mount;

use super::config::MountConfig;
use super::metrics::PostedMount;
use super::worker_process::{End, Sight, WorkerProcess};
use crate::options::Options;

/// Time before the second start after a failure. The time doubles with each further failure.
const BACK_OFF_MIN: Duration = Duration::from_millis(250);

/// Longest time between two starts.
const BACK_OFF_MAX: Duration = Duration::from_secs(60);

/// After a mount has served for this time, the wait after a failure begins with `BACK_OFF_MIN`
/// again.
const STABLE: Duration = Duration::from_secs(60);

/// Minimum and maximum number of seconds in which a worker must take over a mount. Between these
/// limits, the time is `io-timeout=`. Readers of the mount wait during the takeover.
const TAKEOVER_MIN: u32 = 10;
const TAKEOVER_MAX: u32 = 30;

/// Words for the state of mounts that serve, but not on their target.
const COVERED: &str = "covered";
const MOVED: &str = "moved";

/// The current state of a mount.
enum Phase {
    /// The worker starts at this time, if the target is free.
    Waiting(Instant),
    /// The worker has not mounted yet, or the mount has not answered.
    Starting(WorkerProcess),
    /// The mount has answered. The time is the time of the first answer.
    Serving(WorkerProcess, Instant),
    /// Another process unmounted the mount. It stays unmounted until a reload.
    Unmounted,
}

/// A mount of the config.
pub(super) struct ServiceMount {
    pub config: MountConfig,
    phase: Phase,
    /// The mount point. Once the mount exists, this is its path in the mount table.
    target: PathBuf,
    /// Number of failed starts since the mount last served.
    failures: u32,
    /// Number of failures since the mount last served for `STABLE`. This number decides the time
    /// before the next start.
    unstable: u32,
    /// Reason of the last failure.
    failure: Option<String>,
    /// Descriptors of the mount that the previous worker handed over, for the first start.
    handed: Vec<OwnedFd>,
    /// Whether the current worker is taking over a mount.
    is_takeover: bool,
    /// Number of ticks of one second since the current worker began to take over a mount.
    takeover_ticks: u32,
    /// If the mount serves but not on its target: a word for the state, and the reason.
    hidden: Option<(&'static str, String)>,
    /// Whether its last worker failed to take over, so that the mount exists but no process serves it.
    is_abandoned: bool,
    /// Whether the mount has served or failed since it was configured.
    pub has_outcome: bool,
}

impl ServiceMount {
    pub(super) fn new(config: MountConfig) -> ServiceMount {
        let phase = Phase::Waiting(Instant::now());
        let target = config.target.clone();
        ServiceMount {
            config,
            phase,
            target,
            failures: 0,
            unstable: 0,
            failure: None,
            handed: Vec::new(),
            is_takeover: false,
            takeover_ticks: 0,
            hidden: None,
            is_abandoned: false,
            has_outcome: false,
        }
    }

    /// Makes the first worker take over the mount of these descriptors, which the previous worker
    /// handed over.
    pub(super) fn go_on_with(&mut self, handed: Vec<OwnedFd>) {
        self.handed = handed;
    }

    /// The mount point. Once the mount exists, this is its path in the mount table.
    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    /// The worker, if there is one.
    pub(super) fn worker(&self) -> Option<&WorkerProcess> {
        match &self.phase {
            Phase::Starting(worker) | Phase::Serving(worker, _) => Some(worker),
            Phase::Waiting(_) | Phase::Unmounted => None,
        }
    }

    fn worker_mut(&mut self) -> Option<&mut WorkerProcess> {
        match &mut self.phase {
            Phase::Starting(worker) | Phase::Serving(worker, _) => Some(worker),
            Phase::Waiting(_) | Phase::Unmounted => None,
        }
    }

    /// Removes and returns the worker, for the end of the mount.
    pub(super) fn take_worker(&mut self) -> Option<WorkerProcess> {
        match std::mem::replace(&mut self.phase, Phase::Unmounted) {
            Phase::Starting(worker) | Phase::Serving(worker, _) => Some(worker),
            Phase::Waiting(_) | Phase::Unmounted => None,
        }
    }

    /// Whether the mount serves on its target.
    pub(super) fn is_serving(&self) -> bool {
        matches!(self.phase, Phase::Serving(..)) && self.hidden.is_none()
    }

    /// Whether the mount serves at another path, to which its folder was renamed.
    pub(super) fn has_moved(&self) -> bool {
        self.hidden.as_ref().is_some_and(|(word, _)| *word == MOVED)
    }

    /// Whether programs may be reading from the mount. A worker that takes over a mount also takes
    /// over the readers.
    pub(super) fn may_have_readers(&self) -> bool {
        self.worker().is_some_and(WorkerProcess::has_mount)
    }

    /// Whether the previous worker has handed over the mount and the next one has not started yet.
    pub(super) fn is_handed(&self) -> bool {
        !self.handed.is_empty()
    }

    /// Removes and returns the descriptors of the mount, if no worker has taken it over yet.
    pub(super) fn take_handed(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.handed)
    }

    /// The time at which the worker must be started. `None` if the mount is not waiting.
    pub(super) fn starts_at(&self) -> Option<Instant> {
        match self.phase {
            Phase::Waiting(at) => Some(at),
            _ => None,
        }
    }

    /// After a reload: starts the worker at once if it is waiting or the mount was unmounted.
    pub(super) fn retry(&mut self) {
        if matches!(self.phase, Phase::Waiting(_) | Phase::Unmounted) {
            let handed = self.take_handed();
            *self = ServiceMount::new(self.config.clone());
            self.go_on_with(handed);
        }
    }

    /// Starts the worker.
    pub(super) fn start(&mut self, verbose: u8) {
        let handed = std::mem::take(&mut self.handed);
        (self.is_takeover, self.takeover_ticks) = (!handed.is_empty(), 0);
        match WorkerProcess::start(&self.config, verbose, &handed) {
            Ok(worker) => self.phase = Phase::Starting(worker),
            Err(e) => self.fail(format!("cannot start a worker: {e}")),
        }
    }

    /// Reads the worker's messages, and updates the state if the worker serves now or has ended.
    pub(super) fn advance(&mut self) {
        let Some(worker) = self.worker_mut() else { return };
        worker.receive();
        match worker.ended() {
            Some(end) => self.end(end),
            None => {
                let answers = worker.has_answered();
                if answers && matches!(self.phase, Phase::Starting(_)) {
                    self.serve();
                }
            }
        }
    }

    /// Handles the end of the worker.
    fn end(&mut self, end: End) {
        match end {
            End::Unmounted => drop(self.unmounted()),
            End::Stopped => self.fail("a signal stopped the worker".to_owned()),
            End::Failed(reason) => self.fail(reason),
        }
    }

    /// Handles an unmount by another process. Returns the worker.
    fn unmounted(&mut self) -> Option<WorkerProcess> {
        let (name, target) = (&self.config.name, shown_path(&self.config.target));
        tracing::warn!("mount {name}: {target} was unmounted; it stays off until a reload");
        (self.hidden, self.has_outcome) = (None, true);
        self.take_worker()
    }

    /// Compares the mount table with the state of the mount. If another process has unmounted it,
    /// returns the worker. That worker still serves the files that are open, and a new worker may
    /// serve the target.
    pub(super) fn look(&mut self, table: &[Mount]) -> Option<WorkerProcess> {
        let Phase::Serving(worker, _) = &self.phase else { return None };
        let target = shown_path(&worker.target);
        let hidden = match worker.sight(table) {
            Sight::There => None,
            Sight::Covered(cover) => {
                let (kind, place) = (shown(&cover.fstype), shown_path(&cover.target));
                Some((COVERED, format!("{kind} is mounted on {place}, on top of it")))
            }
            Sight::Moved(place) => {
                let place = shown_path(&place);
                let todo = format!("rename it back, or reload to mount {target} anew");
                Some((MOVED, format!("its folder was renamed to {place}; {todo}")))
            }
            Sight::Off => return self.unmounted(),
        };
        if self.hidden != hidden {
            let name = &self.config.name;
            match &hidden {
                Some((_, reason)) => tracing::error!("mount {name}: not on {target}: {reason}"),
                None => tracing::info!("mount {name}: on {target} again"),
            }
            self.hidden = hidden;
        }
        None
    }

    fn serve(&mut self) {
        let MountConfig { name, source, target, .. } = &self.config;
        if let Some(worker) = self.worker() {
            let (source, target) = (shown_path(source), shown_path(target));
            tracing::info!("mount {name}: serving {source} on {target}, pid {}", worker.pid());
        }
        if let Some(worker) = self.take_worker() {
            self.target = worker.target.clone();
            self.phase = Phase::Serving(worker, Instant::now());
        }
        (self.has_outcome, self.is_takeover, self.hidden) = (true, false, None);
        (self.failures, self.failure) = (0, None);
    }

    /// Records that the mount cannot start before the mount `below` serves, because its source lies
    /// on that mount.
    pub(super) fn hold_back(&mut self, below: &str) {
        let reason =
            format!("its source lies on mount {below}, which does not serve; it starts after it");
        if self.failure.as_ref() != Some(&reason) {
            tracing::error!("mount {}: {reason}", self.config.name);
        }
        (self.has_outcome, self.failure) = (true, Some(reason));
    }

    /// Records a failure, and sets the time of the next attempt.
    fn fail(&mut self, reason: String) {
        if std::mem::take(&mut self.is_takeover) {
            let name = &self.config.name;
            tracing::error!(
                "mount {name}: {reason}; its readers get errors, and it is mounted anew"
            );
            (self.is_abandoned, self.failure) = (true, Some(reason));
            self.phase = Phase::Waiting(Instant::now());
            return;
        }
        if matches!(&self.phase, Phase::Serving(_, since) if since.elapsed() > STABLE) {
            self.unstable = 0;
        }
        let wait = BACK_OFF_MIN.saturating_mul(1 << self.unstable.min(20)).min(BACK_OFF_MAX);
        self.unstable = self.unstable.saturating_add(1);
        self.failures = self.failures.saturating_add(1);
        let name = &self.config.name;
        let line = format!("mount {name}: {reason}; next try in {} s", wait.as_secs_f64());
        // A reason that stays the same is logged only once as an error.
        if self.failures > 1 && self.failure.as_ref() == Some(&reason) {
            tracing::debug!("{line}");
        } else {
            tracing::error!("{line}");
        }
        (self.has_outcome, self.failure) = (true, Some(reason));
        self.phase = Phase::Waiting(Instant::now() + wait);
    }

    /// Returns whether a worker has failed to take over the mount since the last call of this
    /// function.
    pub(super) fn take_abandoned(&mut self) -> bool {
        std::mem::take(&mut self.is_abandoned)
    }

    /// Counts a second. Removes and returns the worker in three cases. The worker or its mount has
    /// been silent for `limit` seconds, the takeover of the mount takes too long, or the process of
    /// the worker cannot end because one of its threads waits for a file system.
    pub(super) fn tick(&mut self, limit: u32) -> Option<WorkerProcess> {
        self.takeover_ticks = self.takeover_ticks.saturating_add(1);
        let (is_takeover, ticks) = (self.is_takeover, self.takeover_ticks);
        let worker = self.worker_mut()?;
        if let Some(end) = worker.stuck_end() {
            let stuck = self.take_worker();
            self.end(end);
            return stuck;
        }
        if is_takeover && !worker.is_mounted && ticks >= TAKEOVER_MIN {
            let pid = worker.pid();
            let limit = takeover_limit(&self.config.options);
            if ticks >= limit {
                let late = self.take_worker();
                self.fail(format!(
                    "worker {pid} has not listed its source within {limit} s: the source is large, or \
                     does not answer; io-timeout= sets the limit, from {TAKEOVER_MIN} to \
                     {TAKEOVER_MAX} s"
                ));
                return late;
            }
        }
        let worker = self.worker_mut()?;
        let seconds = worker.tick(limit)?;
        let pid = worker.pid();
        let silent = self.take_worker();
        self.fail(format!("worker {pid} did not answer within {seconds} s and is replaced"));
        silent
    }

    /// The facts for the metrics.
    pub(super) fn posted(&self) -> PostedMount {
        PostedMount {
            name: self.config.name.clone(),
            pid: self.worker().map(WorkerProcess::pid),
            is_serving: self.is_serving(),
            state: self.state().0,
            failures: self.failures,
        }
    }

    /// The state as one word, and the reason of the last failure.
    pub(super) fn state(&self) -> (&'static str, Option<&str>) {
        match &self.phase {
            Phase::Serving(..) => match &self.hidden {
                Some((word, reason)) => (word, Some(reason)),
                None => ("serving", None),
            },
            Phase::Unmounted => ("unmounted", None),
            Phase::Waiting(_) | Phase::Starting(_) => match self.failure.as_deref() {
                Some(reason) => ("failed", Some(reason)),
                None => ("starting", None),
            },
        }
    }
}

/// Number of seconds in which a worker with these options must take over its mount.
fn takeover_limit(options: &str) -> u32 {
    let timeout = Options::parse(&[options], false).ok().and_then(|options| options.io_timeout);
    let seconds = timeout
        .map_or(TAKEOVER_MAX, |timeout| u32::try_from(timeout.as_secs()).unwrap_or(TAKEOVER_MAX));
    seconds.clamp(TAKEOVER_MIN, TAKEOVER_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_starts_are_counted_since_the_mount_served_and_the_pauses_grow_on() {
        let config = MountConfig {
            name: "a".to_owned(),
            source: "/s".into(),
            target: "/t".into(),
            options: String::new(),
        };
        let mut mount = ServiceMount::new(config);
        let pause_after_failure = |mount: &mut ServiceMount| {
            let before = Instant::now();
            mount.fail("it failed".to_owned());
            mount.starts_at().unwrap() - before
        };
        let pauses = [(); 3].map(|()| pause_after_failure(&mut mount));
        assert!(pauses.is_sorted() && pauses[2] >= BACK_OFF_MIN * 4, "{pauses:?}");
        assert_eq!(mount.posted().failures, 3);
        mount.serve();
        assert_eq!(mount.posted().failures, 0);
        // The mount served for less than `STABLE`.
        let pause = pause_after_failure(&mut mount);
        assert!(pause >= BACK_OFF_MIN * 8, "{pause:?}");
        assert_eq!(mount.posted().failures, 1);
    }

    #[test]
    fn the_limit_of_a_takeover_follows_the_io_timeout_within_bounds() {
        let limits = ["", "io-timeout=0", "io-timeout=1", "io-timeout=12", "io-timeout=300"];
        assert_eq!(limits.map(takeover_limit), [30, 30, 10, 12, 30]);
    }
}
