//! The supervisor's view of a worker: its process, its channel, and the checks that the worker has
//! to answer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tensorfs::internal::mountinfo::{self, Mount};

use super::channel::{Channel, Order, Report};
use super::config::MountConfig;
use super::notifier::VARIABLES;
use crate::daemon::client::is_exiting;
use crate::daemon::inherited::HANDED_OVER;

/// Number of ticks of one second between two pings of a worker.
const PING_TICKS: u32 = 5;

/// Number of ticks after which a process that has begun to end counts as stuck.
const EXIT_TICKS: u32 = 2;

/// Number of ticks between two probes of the mount. A separate process makes each probe.
const PROBE_TICKS: u32 = 30;

/// A worker.
pub(super) struct WorkerProcess {
    child: Child,
    channel: Channel,
    /// Whether more messages may arrive on the channel.
    is_open: bool,
    /// The mount point in the config.
    pub place: PathBuf,
    /// The mount point. Once the mount exists, this is its path in the mount table.
    pub target: PathBuf,
    /// Minor number of the mount's device. `None` until the mount exists.
    minor: Option<u32>,
    /// The id of the mount on the target. A bind mount of this mount at another path has another id.
    mount_id: Option<u32>,
    /// Whether the worker has mounted and no other process has unmounted it.
    pub is_mounted: bool,
    /// Whether the worker was started to take over a mount.
    is_takeover: bool,
    /// How the worker ended, according to its own report. `None` if it has sent no such report.
    end: Option<End>,
    /// Whether the worker can hand over its mount without waiting for the source.
    pub is_prepared: bool,
    /// The answer to `Order::HandOver`: the descriptors, or the reason why there are none.
    state: Option<Result<Vec<OwnedFd>, String>>,
    /// Whether the worker has left its mount to the next worker.
    pub has_given: bool,
    /// Ticks since the last check began.
    ticks: Silence,
    /// Number of ticks since the process began to end.
    exiting: u32,
    /// Number of ticks since the last probe of the mount.
    unprobed: u32,
    /// Whether the worker has not answered the last ping yet.
    pinged: bool,
    /// The process that probes the mount.
    probe: Option<Child>,
    /// Whether the first probe, which reads from the mount, has ended.
    has_answered: bool,
}

/// Number of ticks since a check of a worker began.
#[derive(Debug, Default)]
struct Silence {
    total: u32,
    /// Number of ticks in which the worker was not stuck: it ran or waited for a processor.
    excused: u32,
}

impl Silence {
    /// Counts a tick without an answer. Returns the number of all ticks once the worker was stuck
    /// in `limit` of them. At most `limit` ticks are excused, because a worker in an endless loop
    /// runs in every tick.
    fn count(&mut self, limit: u32, has_run: impl FnOnce() -> bool) -> Option<u32> {
        self.total = self.total.saturating_add(1);
        if self.excused < limit && has_run() {
            self.excused += 1;
        }
        (self.total - self.excused >= limit).then_some(self.total)
    }
}

/// Whether any thread of the process runs or waits for a processor. Does not wait for the process.
fn has_thread_to_run(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    threads.filter_map(Result::ok).any(|thread| {
        // The line has the name of the thread in parentheses before the state.
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" R"))
    })
}

/// Where the mount of a worker is now.
pub(super) enum Sight {
    /// The mount is on its mount point.
    There,
    /// Another mount covers the mount.
    Covered(Mount),
    /// The mount is at another path: its folder or a folder above it was renamed.
    Moved(PathBuf),
    /// The mount is in no folder any more. Programs may still have files of it open.
    Off,
}

/// How a worker ended.
pub(super) enum End {
    /// Another process unmounted its mount.
    Unmounted,
    /// The worker ended regularly, after an order or a signal.
    Stopped,
    /// The worker failed, for this reason.
    Failed(String),
}

/// A command that runs this program with `args`.
pub(super) fn program(args: &[&str]) -> Command {
    // This path leads to the version that runs now, even if another version has replaced the
    // executable file.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("tensorfs").args(args).stdin(Stdio::null()).stdout(Stdio::null());
    for name in VARIABLES.into_iter().chain([HANDED_OVER]) {
        command.env_remove(name);
    }
    command
}

impl WorkerProcess {
    /// Starts the worker of `mount`. With `handed`, the worker takes over the mount that these
    /// descriptors belong to.
    ///
    /// # Errors
    /// If no process can be started.
    pub(super) fn start(
        mount: &MountConfig,
        verbose: u8,
        handed: &[OwnedFd],
    ) -> io::Result<WorkerProcess> {
        let (channel, theirs) = Channel::pair()?;
        let MountConfig { source, target, options, .. } = mount.clone();
        let order = Order::Start { source, target: target.clone(), options };
        let handed: Vec<BorrowedFd<'_>> = handed.iter().map(AsFd::as_fd).collect();
        channel.send(&order, &handed)?;
        let mut command = program(&["internal", "worker", &mount.name]);
        command.args((0..verbose).map(|_| "-v"));
        let child = command.stdin(theirs).spawn()?;
        Ok(WorkerProcess {
            child,
            channel,
            is_open: true,
            place: target.clone(),
            target,
            minor: None,
            mount_id: None,
            is_mounted: false,
            is_takeover: !handed.is_empty(),
            end: None,
            is_prepared: false,
            state: None,
            has_given: false,
            ticks: Silence::default(),
            exiting: 0,
            unprobed: 0,
            pinged: false,
            probe: None,
            has_answered: false,
        })
    }

    /// Where the mount is, according to the mount table `table`.
    pub(super) fn sight(&self, table: &[Mount]) -> Sight {
        let Some(minor) = self.minor else { return Sight::There };
        let ours: Vec<&Mount> = table.iter().filter(|mount| mount.is_ours_of(minor)).collect();
        let Some(there) = ours.iter().rev().find(|mount| mount.target == self.target) else {
            let is_it = |mount: &&&Mount| self.mount_id.is_none_or(|id| id == mount.id);
            let moved = ours.iter().find(is_it);
            return moved.map_or(Sight::Off, |mount| Sight::Moved(mount.target.clone()));
        };
        let seen = mountinfo::seen_at(there, table);
        match table.iter().find(|mount| mount.id == seen) {
            Some(cover) if seen != there.id => Sight::Covered(cover.clone()),
            _ => Sight::There,
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the worker has a mount: its own mount, or the mount that it is taking over.
    pub(super) fn has_mount(&self) -> bool {
        self.is_mounted || self.is_takeover
    }

    /// Kills the worker, and starts a program that ends the connection of its mount.
    ///
    /// # Errors
    /// If no process can be started.
    pub(super) fn abort(&self) -> io::Result<Child> {
        self.signal(Signal::SIGKILL);
        start_abort(&self.target, self.minor)
    }

    /// The descriptor of the channel, while messages may arrive.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.is_open.then(|| self.channel.as_fd())
    }

    /// Reads all messages that have arrived.
    pub(super) fn receive(&mut self) {
        while self.is_open {
            match self.channel.receive::<Report>(false) {
                Ok(Some((Report::Ready { target, minor }, _))) => {
                    let at = mountinfo::ours_at(&target).ok().flatten();
                    self.mount_id = at.map(|mount| mount.id);
                    (self.target, self.minor, self.is_mounted) = (target, minor, true);
                }
                Ok(Some((Report::Failed { message }, _))) => self.end = Some(End::Failed(message)),
                Ok(Some((Report::Unmounted, _))) => {
                    self.end = Some(End::Unmounted);
                    (self.is_mounted, self.is_takeover) = (false, false);
                }
                Ok(Some((Report::Pong, _))) => self.pinged = false,
                Ok(Some((Report::Prepared, _))) => self.is_prepared = true,
                Ok(Some((Report::Given, _))) => self.has_given = true,
                Ok(Some((Report::State, fds))) => self.state = Some(Ok(fds)),
                Ok(Some((Report::NotHandedOver { message }, _))) => {
                    self.state = Some(Err(message));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Ok(None) | Err(_) => self.is_open = false,
            }
        }
    }

    /// Whether the probe that reads from the mount has ended. The first call after the mount exists
    /// starts this probe.
    pub(super) fn has_answered(&mut self) -> bool {
        if !self.has_answered && self.is_mounted {
            match &mut self.probe {
                None => self.probe = self.start_probe("probe-read"),
                Some(probe) => {
                    self.has_answered = !matches!(probe.try_wait(), Ok(None));
                }
            }
            if self.has_answered {
                self.probe = None;
            }
        }
        self.has_answered
    }

    fn start_probe(&self, command: &str) -> Option<Child> {
        let mut probe = program(&["internal", command, "--"]);
        let started = probe.arg(&self.target).stderr(Stdio::null()).spawn();
        started.map_err(|e| tracing::warn!("cannot start a process: {e}")).ok()
    }

    /// Counts a second. If the worker or its mount has been silent for `limit` seconds, returns the
    /// length of the silence in seconds. Seconds in which the worker or the probe runs or waits for
    /// a processor are not counted in `limit`. At most `limit` seconds are left out for this
    /// reason.
    ///
    /// Ticks are counted, and no clock is read, because time in which the supervisor itself was
    /// stopped must not count as silence.
    pub(super) fn tick(&mut self, limit: u32) -> Option<u32> {
        self.unprobed += 1;
        let has_probed =
            self.probe.as_mut().is_none_or(|probe| !matches!(probe.try_wait(), Ok(None)));
        if has_probed && self.has_answered {
            self.probe = None;
        }
        let is_waiting = self.pinged || (self.probe.is_some() && self.has_answered);
        if is_waiting {
            let asked = self.probe.as_ref().map(Child::id).into_iter().chain([self.pid()]);
            return self.ticks.count(limit, || asked.into_iter().any(has_thread_to_run));
        }
        self.ticks.total += 1;
        if self.ticks.total >= PING_TICKS.min(limit.div_ceil(2)) {
            self.ticks = Silence::default();
            self.pinged = true;
            // A worker that does not accept the ping does not answer it either, so it counts as
            // silent.
            let _ = self.channel.send(&Order::Ping, &[]);
            if self.has_answered && self.unprobed >= PROBE_TICKS.min(limit) {
                self.unprobed = 0;
                self.probe = self.start_probe("probe-mount");
            }
        }
        None
    }

    /// How the worker ended. `None` if it has not ended.
    pub(super) fn ended(&mut self) -> Option<End> {
        let status = match self.child.try_wait() {
            Ok(None) => return None,
            Ok(Some(status)) => status,
            Err(e) => return Some(End::Failed(format!("cannot wait for the worker: {e}"))),
        };
        self.receive();
        Some(match self.end.take() {
            Some(end) => end,
            None if status.success() => End::Stopped,
            None => End::Failed(format!("worker {} {}", self.pid(), how(status))),
        })
    }

    /// Counts a second. Must be called before `tick`. A process cannot end while one of its threads
    /// waits for a file system. If this has kept the worker from ending for `EXIT_TICKS`, the
    /// worker counts as ended, and the result says how it ended.
    pub(super) fn stuck_end(&mut self) -> Option<End> {
        self.exiting = if is_exiting(self.pid()) { self.exiting + 1 } else { 0 };
        if self.exiting < EXIT_TICKS {
            return None;
        }
        let pid = self.pid();
        let why = || format!("worker {pid} has ended, but a thread of it waits for a file system");
        self.receive();
        Some(self.end.take().unwrap_or_else(|| End::Failed(why())))
    }

    /// Sends an order to the worker. If the worker does not accept it, a signal ends the worker.
    pub(super) fn order(&self, order: &Order) {
        if self.channel.send(order, &[]).is_err() {
            self.signal(if *order == Order::Give { Signal::SIGKILL } else { Signal::SIGTERM });
        }
    }

    /// The answer to [`Order::HandOver`]. It is returned only once.
    pub(super) fn take_state(&mut self) -> Option<Result<Vec<OwnedFd>, String>> {
        self.state.take()
    }

    /// Orders the worker to close its log file and open it again.
    pub(super) fn reopen_log(&self) {
        let _ = self.channel.send(&Order::ReopenLog, &[]);
    }

    /// Sends a signal to the worker. The process must not have been waited for.
    pub(super) fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.pid()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        if let Some(probe) = &mut self.probe {
            // The killed probe ends once the mount is gone, so this process does not wait for it.
            // If the probe remains as a zombie, the system removes it when this process ends.
            let _ = probe.kill();
            let _ = probe.try_wait();
        }
    }
}

/// The end of a process, as text.
fn how(status: ExitStatus) -> String {
    match (status.signal().and_then(|number| Signal::try_from(number).ok()), status.code()) {
        (Some(signal), _) => format!("was killed by {signal}"),
        (None, Some(code)) => format!("ended with status {code}"),
        (None, None) => format!("ended: {status}"),
    }
}

/// Starts a program that unmounts those mounts on `targets` that are dead.
///
/// # Errors
/// If no process can be started.
pub(super) fn start_cleaning(targets: &[PathBuf]) -> io::Result<Child> {
    program(&["umount", "--dead", "--"]).args(targets).spawn()
}

/// Starts a program that ends the connection of the mount on `target`, so that its readers get
/// errors. To kill the process that serves the mount is not enough, because the kernel keeps the
/// connection open while a thread of that process waits for a source. With `minor`, the program
/// ends the connection of the mount with this device number, at any path.
///
/// # Errors
/// If no process can be started.
pub(super) fn start_abort(target: &Path, minor: Option<u32>) -> io::Result<Child> {
    let mut command = program(&["internal", "abort-mount", "--"]);
    command.arg(target).args(minor.map(|minor| minor.to_string())).spawn()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_worker_that_runs_has_twice_the_limit_and_one_that_sleeps_has_it_once() {
        let silent_for = |has_run: fn(u32) -> bool| {
            let mut silence = Silence::default();
            (0..1000).find_map(|tick| silence.count(30, || has_run(tick)))
        };
        assert_eq!(silent_for(|_| false), Some(30));
        assert_eq!(silent_for(|_| true), Some(60));
        // The worker gets a processor again after 20 s, and still does not answer.
        assert_eq!(silent_for(|tick| tick < 20), Some(50));
        let mut endless = Silence::default();
        assert!((0..1000).all(|_| endless.count(u32::MAX, || true).is_none()));
    }

    #[test]
    fn only_a_process_that_runs_or_waits_for_a_processor_has_a_thread_to_run() {
        let start = |script: &str| {
            let child = Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn();
            child.unwrap()
        };
        let (mut runs, mut sleeps) = (start("while :; do :; done"), start("read line"));
        let wait_for = |child: &Child, expected: bool| {
            let started = Instant::now();
            while has_thread_to_run(child.id()) != expected {
                assert!(started.elapsed() < Duration::from_secs(60));
                std::thread::yield_now();
            }
        };
        // Both processes have a thread that runs while they start.
        wait_for(&sleeps, false);
        wait_for(&runs, true);
        kill(Pid::from_raw(i32::try_from(runs.id()).unwrap()), Signal::SIGSTOP).unwrap();
        wait_for(&runs, false);
        for child in [&mut runs, &mut sleeps] {
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(!has_thread_to_run(child.id()));
        }
    }
}
