//! The supervisor's side of a worker: its process, its channel, and the checks that it answers.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::channel::{Channel, Order, Report};
use super::config::MountConfig;
use super::notifier::VARIABLES;
use crate::daemon::inherited::HANDED_OVER;

/// Ticks between two pings of a worker.
const PING_TICKS: u32 = 5;

/// Ticks between two questions to its mount, each by a process.
const PROBE_TICKS: u32 = 30;

/// A worker.
pub(super) struct WorkerProcess {
    child: Child,
    channel: Channel,
    /// Whether the channel may have more messages.
    is_open: bool,
    /// The mount point as in the config.
    pub place: PathBuf,
    /// The mount point: as in the mount table once the mount is there.
    pub target: PathBuf,
    /// Whether it has mounted.
    pub is_mounted: bool,
    /// The reason for its end, if it has told one.
    end: Option<End>,
    /// Whether it can hand over its mount without a wait for the source.
    pub is_prepared: bool,
    /// The answer to the order to hand over.
    state: Option<Result<Vec<OwnedFd>, String>>,
    /// Whether it has left its mount to the next worker.
    pub has_given: bool,
    /// Ticks since the last check began.
    ticks: u32,
    /// Ticks since a program last asked the mount.
    unprobed: u32,
    /// Whether a ping waits for its answer.
    pinged: bool,
    /// A process that asks the mount.
    probe: Option<Child>,
    /// Whether a probe has read from the mount.
    has_answered: bool,
}

/// How a worker ended.
pub(super) enum End {
    /// Another process took its mount off.
    Unmounted,
    /// It ended by itself, as an order or a signal told it.
    Stopped,
    /// It failed, for this reason.
    Failed(String),
}

/// A process of this program, with `args`.
pub(super) fn program(args: &[&str]) -> Command {
    // The running version, also after an upgrade of the file.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("tensorfs").args(args).stdin(Stdio::null()).stdout(Stdio::null());
    for name in VARIABLES.into_iter().chain([HANDED_OVER]) {
        command.env_remove(name);
    }
    command
}

impl WorkerProcess {
    /// Starts the worker of `mount`. With `handed` it takes over the mount that these descriptors
    /// are about.
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
            is_mounted: false,
            end: None,
            is_prepared: false,
            state: None,
            has_given: false,
            ticks: 0,
            unprobed: 0,
            pinged: false,
            probe: None,
            has_answered: false,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The channel, while messages may come.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.is_open.then(|| self.channel.as_fd())
    }

    /// Takes all messages that are there.
    pub(super) fn receive(&mut self) {
        while self.is_open {
            match self.channel.receive::<Report>(false) {
                Ok(Some((Report::Ready { target }, _))) => {
                    (self.target, self.is_mounted) = (target, true);
                }
                Ok(Some((Report::Failed { message }, _))) => self.end = Some(End::Failed(message)),
                Ok(Some((Report::Unmounted, _))) => self.end = Some(End::Unmounted),
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

    /// Whether a program has read from the mount. The first call starts that program.
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

    /// Counts a second. Returns whether the worker or its mount has been silent for `limit` seconds.
    ///
    /// Ticks, not a clock: time in which the supervisor was stopped too does not count.
    pub(super) fn tick(&mut self, limit: u32) -> bool {
        self.ticks += 1;
        self.unprobed += 1;
        let has_probed =
            self.probe.as_mut().is_none_or(|probe| !matches!(probe.try_wait(), Ok(None)));
        if has_probed && self.has_answered {
            self.probe = None;
        }
        let is_waiting = self.pinged || (self.probe.is_some() && self.has_answered);
        if is_waiting {
            return self.ticks >= limit;
        }
        if self.ticks >= PING_TICKS.min(limit.div_ceil(2)) {
            self.ticks = 0;
            self.pinged = true;
            // A worker that takes no message is silent, too.
            let _ = self.channel.send(&Order::Ping, &[]);
            if self.has_answered && self.unprobed >= PROBE_TICKS.min(limit) {
                self.unprobed = 0;
                self.probe = self.start_probe("probe-mount");
            }
        }
        false
    }

    /// How it ended, if it has.
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

    /// Orders it to unmount and to end.
    pub(super) fn stop(&self) {
        if self.channel.send(&Order::Stop, &[]).is_err() {
            self.signal(Signal::SIGTERM);
        }
    }

    /// Orders it to tell when it can hand over its mount without a wait for the source.
    pub(super) fn prepare(&self) {
        if self.channel.send(&Order::Prepare, &[]).is_err() {
            self.signal(Signal::SIGTERM);
        }
    }

    /// Orders it to stop reading requests, and to send what another worker needs to go on.
    pub(super) fn hand_over(&self) {
        if self.channel.send(&Order::HandOver, &[]).is_err() {
            self.signal(Signal::SIGTERM);
        }
    }

    /// The answer to `hand_over`, once.
    pub(super) fn take_state(&mut self) -> Option<Result<Vec<OwnedFd>, String>> {
        self.state.take()
    }

    /// Orders it to end without an unmount, after `hand_over`.
    pub(super) fn give(&self) {
        if self.channel.send(&Order::Give, &[]).is_err() {
            self.signal(Signal::SIGKILL);
        }
    }

    /// Orders it to open its log file anew.
    pub(super) fn reopen_log(&self) {
        let _ = self.channel.send(&Order::ReopenLog, &[]);
    }

    /// Sends it a signal. It must not have been waited for.
    pub(super) fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.pid()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        if let Some(probe) = &mut self.probe {
            // It ends once the mount is gone; a process that is not waited for is collected at the
            // end of this one.
            let _ = probe.kill();
            let _ = probe.try_wait();
        }
    }
}

/// The end of a process in words.
fn how(status: ExitStatus) -> String {
    match (status.signal().and_then(|number| Signal::try_from(number).ok()), status.code()) {
        (Some(signal), _) => format!("was killed by {signal}"),
        (None, Some(code)) => format!("ended with status {code}"),
        (None, None) => format!("ended: {status}"),
    }
}

/// Starts `tensorfs umount` on `targets`, with `how`.
///
/// # Errors
/// If no process can be started.
pub(super) fn start_umount(targets: &[PathBuf], how: &str) -> io::Result<Child> {
    program(&["umount", how, "--"]).args(targets).spawn()
}
