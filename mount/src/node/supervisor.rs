//! The supervisor of `tensorfs serve`. It starts a worker for each mount, replaces workers that end, reloads the
//! config, and reports the state to the service manager.
//!
//! The supervisor has one thread, which waits for no worker, no mount and no source. It polls, and other processes
//! access the file systems. So a mount that hangs cannot stop the other mounts.

use std::io::{self, PipeReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tensorfs::internal::error::{counted, shown_path};
use tensorfs::internal::mountinfo;

use super::channel::Order;
use super::config::{Config, ConfigError, MountConfig};
use super::metrics::{Board, Exporter};
use super::mounts::ServiceMount;
use super::notifier::Notifier;
use super::suspension::{self, Purpose, Stored, Suspension};
use super::worker_process::{WorkerProcess, start_abort, start_cleaning};
use crate::daemon::background;
use crate::daemon::ending::{ending_signals, ends_with_terminal, has_terminal};
use crate::log;

/// A tick, which is the time between two checks of the workers.
const TICK: Duration = Duration::from_secs(1);

/// Interval between checks of the mount table while a target is not free.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Number of ticks in which a worker must unmount and finish serving open files. A worker needs up to 11.
const LEAVING_TICKS: u32 = 13;

/// Number of ticks after which the supervisor gives up a killed worker that does not end, because it waits for a file
/// system.
const STUCK_TICKS: u32 = 5;

/// Number of ticks for which the end of the service waits for a program that unmounts. A worker
/// waits for the same time for a program that ends a connection at its mount point.
const HELPER_TICKS: u32 = 5;

/// Number of ticks after which the service counts as ready although mounts are still starting.
const READY_TICKS: u32 = 240;

/// A worker that has been told to end.
struct Leaving {
    worker: WorkerProcess,
    name: String,
    /// Number of ticks since the order to end.
    ticks: u32,
    is_killed: bool,
}

/// Name and worker of a mount that was unmounted while files are open. The worker ends when they are closed.
type Detached = (String, WorkerProcess);
/// A program that unmounts. It may have to wait for the file systems of the mounts.
struct Helper {
    child: Child,
    /// If the program ends a connection: the mount point in the config. No worker starts there before the program has
    /// ended.
    place: Option<PathBuf>,
    ticks: u32,
    /// Whether the end of the service waits for this program.
    is_awaited: bool,
}

/// A running read of the config, which another thread makes.
struct Reading {
    /// This pipe closes when the thread ends.
    done: PipeReader,
    config: Receiver<Result<Config, ConfigError>>,
    /// Whether another reload was requested during the read.
    again: bool,
}

/// The state of the service.
pub(crate) struct Supervisor {
    file: PathBuf,
    config: Config,
    verbose: u8,
    /// Whether the service has to end when its terminal is closed.
    terminal: bool,
    mounts: Vec<ServiceMount>,
    leaving: Vec<Leaving>,
    detached: Vec<Detached>,
    helpers: Vec<Helper>,
    /// Child processes of the program that ran in this process before. Each is removed when it has ended.
    earlier: Vec<Pid>,
    reading: Option<Reading>,
    notifier: Notifier,
    /// The facts for the metrics. `exporter` serves them.
    board: Arc<Board>,
    exporter: Option<Exporter>,
    /// The reason why the last reload was refused.
    refusal: Option<String>,
    /// Number of ticks since the start or the last reload.
    ticks: u32,
    is_ready: bool,
    is_first: bool,
    /// Number of ticks since the signal to end.
    stopping: Option<u32>,
    /// The handover of all mounts, while it runs.
    suspension: Option<Suspension>,
}

/// Blocks the signals that the supervisor reads from the returned descriptor. Must be called before the first
/// thread starts.
///
/// # Errors
/// If the system refuses to block them.
pub(crate) fn take_signals() -> io::Result<SignalFd> {
    let always = [Signal::SIGHUP, Signal::SIGCHLD];
    let signals = SigSet::from_iter(ending_signals().iter().chain(always));
    signals.thread_block()?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    Ok(SignalFd::with_flags(&signals, flags)?)
}

/// The child processes of this thread. Must be called before this program starts a child.
fn children() -> Vec<Pid> {
    let listed = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    let pids = listed.split_whitespace().filter_map(|pid| pid.parse().ok());
    pids.map(Pid::from_raw).collect()
}

impl Supervisor {
    pub(crate) fn new(file: &Path, config: Config, verbose: u8) -> Supervisor {
        let mut stored = Stored::from_environment();
        let mut mounts: Vec<_> = config.mounts.iter().cloned().map(ServiceMount::new).collect();
        for mount in &mut mounts {
            mount.go_on_with(stored.take(&mount.config.name));
        }
        // A service that continues after a restart or an upgrade does not end when no mount can be made.
        let is_first = stored.take(suspension::SERVICE).is_empty();
        for name in stored.names() {
            tracing::info!("mount {name}: not in the config any more; its readers get errors");
        }
        Supervisor {
            file: file.to_owned(),
            config,
            verbose,
            terminal: ends_with_terminal(),
            mounts,
            leaving: Vec::new(),
            detached: Vec::new(),
            helpers: Vec::new(),
            earlier: children(),
            reading: None,
            notifier: Notifier::start(),
            board: Arc::default(),
            exporter: None,
            refusal: None,
            ticks: 0,
            is_ready: false,
            is_first,
            stopping: None,
            suspension: None,
        }
    }

    /// Runs the service until a signal ends it.
    ///
    /// # Errors
    /// If no mount of the config can be made at the start.
    pub(crate) fn run(mut self, signals: &SignalFd) -> Result<(), String> {
        self.remove_dead_mounts();
        self.serve_metrics();
        let mut last_tick = Instant::now();
        loop {
            self.take_signals(signals);
            self.take_config();
            if last_tick.elapsed() >= TICK {
                last_tick = Instant::now();
                self.tick();
            }
            self.advance();
            if self.suspend() {
                return Ok(());
            }
            if self.stopping.is_some() {
                if self.leaving.is_empty() && !self.helpers.iter().any(|helper| helper.is_awaited) {
                    return Ok(());
                }
            } else if self.suspension.is_some() {
                // The next process reports readiness.
            } else if let Some(failure) = self.announce() {
                return Err(failure);
            }
            self.wait(signals, last_tick + TICK);
        }
    }

    /// Starts or stops the server of metrics as the config says. The mounts do not depend on it.
    fn serve_metrics(&mut self) {
        let wanted = self.config.service.metrics.as_ref();
        if self.exporter.as_ref().map(|exporter| &exporter.address) == wanted {
            return;
        }
        self.exporter = None;
        let started = wanted.map(|address| Exporter::start(address, self.board.clone()));
        match started.transpose() {
            Ok(exporter) => self.exporter = exporter,
            Err(e) => tracing::error!("{e}; there are no metrics until a reload"),
        }
    }

    /// Unmounts dead mounts that no worker will replace. An earlier service with another config left these mounts when
    /// it was killed.
    fn remove_dead_mounts(&mut self) {
        let is_config = |target: &Path| self.config.mounts.iter().any(|m| m.target == target);
        let there = mountinfo::ours().unwrap_or_default().into_iter().map(|mount| mount.target);
        let others: Vec<PathBuf> = there.filter(|target| !is_config(target)).collect();
        if !others.is_empty() {
            self.help(start_cleaning(&others), None, false);
        }
    }

    /// Adds a program that unmounts to the list of helpers.
    fn help(&mut self, started: io::Result<Child>, place: Option<PathBuf>, is_awaited: bool) {
        match started {
            Ok(child) => self.helpers.push(Helper { child, place, ticks: 0, is_awaited }),
            Err(e) => tracing::warn!("cannot start a program that unmounts: {e}"),
        }
    }

    /// Kills a worker and ends the connection of its mount.
    fn kill(&mut self, worker: WorkerProcess, name: String) {
        let is_at = |mount: &ServiceMount| mount.config.target == worker.place;
        let has_successor = self.mounts.iter().any(|it| is_at(it) && it.worker().is_some());
        // A successor starts only after this mount is gone. The mount of the successor may then
        // have the same device number, so no connection is ended by that number.
        if worker.has_mount() && !has_successor {
            self.help(worker.abort(), Some(worker.place.clone()), true);
        } else {
            worker.signal(Signal::SIGKILL);
        }
        self.leaving.push(Leaving { worker, name, ticks: 0, is_killed: true });
    }

    /// Ends the connections of mounts that their workers failed to take over.
    fn abort_abandoned(&mut self) {
        for index in 0..self.mounts.len() {
            let place = self.mounts[index].config.target.clone();
            let is_ended = |helper: &Helper| helper.place.as_ref() == Some(&place);
            if self.mounts[index].take_abandoned() && !self.helpers.iter().any(is_ended) {
                self.help(start_abort(&place, None), Some(place), true);
            }
        }
    }

    /// Waits for an event, but at most until `tick`.
    fn wait(&self, signals: &SignalFd, tick: Instant) {
        let giving = self.suspension.iter().flat_map(Suspension::workers);
        let workers = self.mounts.iter().filter_map(ServiceMount::worker).chain(giving);
        let channels = workers.filter_map(WorkerProcess::fd);
        let reading = self.reading.iter().map(|reading| reading.done.as_fd());
        let fds = std::iter::once(signals.as_fd()).chain(channels).chain(reading);
        let mut polled: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let now = Instant::now();
        let can_start = |mount: &&ServiceMount| self.awaited(mount).is_none();
        let due = self.mounts.iter().filter(can_start).filter_map(ServiceMount::starts_at);
        // A mount that is due now waits for its target to become free.
        let starts = due.map(|at| if at <= now { now + POLL_INTERVAL } else { at });
        let next = starts.chain([tick]).min().unwrap_or(tick);
        let rest = next.saturating_duration_since(now) + Duration::from_millis(1);
        let timeout = PollTimeout::try_from(rest).unwrap_or(PollTimeout::ZERO);
        if let Err(e) = poll(&mut polled, timeout)
            && e != Errno::EINTR
        {
            tracing::error!("cannot poll: {e}");
            std::thread::sleep(TICK);
        }
    }

    fn take_signals(&mut self, signals: &SignalFd) {
        while let Ok(Some(info)) = signals.read_signal() {
            match i32::try_from(info.ssi_signo).map(Signal::try_from) {
                Ok(Ok(signal @ Signal::SIGHUP)) if self.terminal && !has_terminal() => {
                    self.stop(signal);
                }
                Ok(Ok(Signal::SIGHUP)) => self.reload(),
                Ok(Ok(signal @ (Signal::SIGTERM | Signal::SIGINT | Signal::SIGQUIT))) => {
                    self.stop(signal);
                }
                // This is SIGCHLD. `advance` finds the child that has ended.
                _ => {}
            }
        }
    }

    /// Stops all mounts. A second signal also ends workers that still serve open files.
    fn stop(&mut self, signal: Signal) {
        if let Some(suspension) = &mut self.suspension {
            suspension.signal = Some(signal);
            return;
        }
        if self.stopping.is_none() && suspension::is_restart() {
            tracing::info!("{signal}: handing over {}", counted(self.mounts.len(), "mount"));
            return self.begin_suspension(Purpose::Restart);
        }
        if self.stopping.is_some() {
            self.leaving.iter().for_each(|leaving| leaving.worker.signal(Signal::SIGTERM));
            return;
        }
        tracing::info!("{signal}: stopping {}", counted(self.mounts.len(), "mount"));
        self.stopping = Some(0);
        self.notifier.stopping();
        self.notifier.status("stopping".to_owned());
        for (name, worker) in std::mem::take(&mut self.detached) {
            self.end_worker(name, worker);
        }
        for mut mount in std::mem::take(&mut self.mounts) {
            self.end_mount(&mut mount);
        }
    }

    /// Orders all workers to hand over their mounts.
    fn begin_suspension(&mut self, purpose: Purpose) {
        self.notifier.status("handing over".to_owned());
        self.look_at_mounts();
        let (mut workers, mut stored) = (Vec::new(), Stored::default());
        for mut mount in std::mem::take(&mut self.mounts) {
            // A mount that was moved is made again on its target.
            let has_moved = mount.has_moved();
            let is_handed = mount.may_have_readers() && !has_moved;
            let name = mount.config.name.clone();
            let handed = mount.take_handed();
            match mount.take_worker() {
                Some(worker) if is_handed => workers.push((name, worker)),
                // This worker unmounts, and serves the readers of its mount for some more seconds.
                Some(worker) if has_moved => worker.order(&Order::Stop),
                // No program reads from this mount yet.
                Some(worker) => worker.signal(Signal::SIGKILL),
                None if !handed.is_empty() => stored.insert(name, handed),
                None => {}
            }
        }
        // The readers of the other mounts wait, so leaving workers get no more time for open files.
        self.leaving.drain(..).for_each(|leaving| leaving.worker.signal(Signal::SIGKILL));
        self.suspension = Some(Suspension::begin(purpose, workers, stored));
    }

    /// Continues the handover of all mounts. Returns whether this process has to end.
    fn suspend(&mut self) -> bool {
        if self.suspension.as_mut().is_none_or(|suspension| !suspension.advance()) {
            return false;
        }
        let Some(mut stored) = self.suspension.take().and_then(Suspension::finish) else {
            return true;
        };
        // The new program could not be started, so this process continues.
        self.mounts = self.config.mounts.iter().cloned().map(ServiceMount::new).collect();
        for mount in &mut self.mounts {
            mount.go_on_with(stored.take(&mount.config.name));
        }
        false
    }

    /// If another version has replaced the executable file, lets it take over. Returns whether it does.
    fn upgrade(&mut self) -> bool {
        let Some(program) = suspension::replaced_program() else { return false };
        match suspension::check_state_version(&program) {
            Ok(()) => {
                tracing::info!("{}: handing over to this version", shown_path(&program));
                self.begin_suspension(Purpose::Upgrade(program));
                true
            }
            Err(reason) => {
                tracing::error!("{reason}; the running version goes on until a restart");
                false
            }
        }
    }

    /// Ends the worker of a mount that is no longer in the config.
    fn end_mount(&mut self, mount: &mut ServiceMount) {
        let name = mount.config.name.clone();
        match mount.take_worker() {
            Some(worker) => self.end_worker(name, worker),
            // A worker that crashed may have left a dead mount. Closing the descriptors of a mount that waited for
            // its next worker makes that mount dead too.
            None => {
                drop(mount.take_handed());
                self.remove_rest_of(mount.target());
            }
        }
    }

    fn end_worker(&mut self, name: String, worker: WorkerProcess) {
        worker.order(&Order::Stop);
        self.leaving.push(Leaving { worker, name, ticks: 0, is_killed: false });
    }

    /// Checks whether the mounts are on their targets.
    fn look_at_mounts(&mut self) {
        // If the mount table cannot be read, no change is known.
        let Ok(table) = mountinfo::all() else { return };
        for mount in &mut self.mounts {
            if let Some(worker) = mount.look(&table) {
                self.detached.push((mount.config.name.clone(), worker));
            }
        }
    }

    /// Unmounts the dead mount on `target`, if there is one.
    fn remove_rest_of(&mut self, target: &Path) {
        if mountinfo::ours_at(target).is_ok_and(|mount| mount.is_some()) {
            self.help(start_cleaning(&[target.to_owned()]), None, true);
        }
    }

    /// Starts to read the config again.
    fn reload(&mut self) {
        if self.stopping.is_some() || self.suspension.is_some() {
            return;
        }
        if let Some(reading) = &mut self.reading {
            reading.again = true;
            return;
        }
        self.notifier.reloading();
        match self.start_reading() {
            Ok(reading) => self.reading = Some(reading),
            Err(e) => self.refuse(format!("cannot start a thread: {e}")),
        }
    }

    /// Starts a thread that reads the config. The file system of the config may not answer.
    fn start_reading(&self) -> io::Result<Reading> {
        let (done, ends) = io::pipe()?;
        let (send, config) = channel();
        let file = self.file.clone();
        log::start_thread("config", move || {
            let _ = send.send(Config::read(&file));
            drop(ends);
        })?;
        Ok(Reading { done, config, again: false })
    }

    /// Applies the config, if the thread has read it.
    fn take_config(&mut self) {
        let Some(reading) = &self.reading else { return };
        let Ok(read) = reading.config.try_recv() else { return };
        let again = reading.again;
        self.reading = None;
        if self.stopping.is_some() || self.suspension.is_some() {
            return;
        }
        match read {
            // A new version of the program reads the config itself.
            Ok(_) if self.upgrade() => return,
            Ok(config) => self.apply(config),
            Err(error) => self.refuse(error.message().to_owned()),
        }
        if again {
            self.reload();
        }
    }

    fn refuse(&mut self, reason: String) {
        tracing::error!("{reason}; the config is not reloaded");
        self.refusal = Some(reason);
        (self.is_ready, self.ticks) = (false, 0);
    }

    /// Ends the mounts that are not in `config`, and adds those that are new in it. A mount with a changed source,
    /// target or option is ended and added again.
    fn apply(&mut self, mut config: Config) {
        let format = config.service.log_format;
        if format != self.config.service.log_format
            && let Err(why) = background::change_log_format(format)
        {
            tracing::error!("{why}; the log keeps its form");
            config.service.log_format = self.config.service.log_format;
        }
        let mut old = std::mem::take(&mut self.mounts);
        let mut find = |wanted: &MountConfig| {
            let index = old.iter().position(|mount| mount.config == *wanted)?;
            Some(old.remove(index))
        };
        let mut mounts = Vec::new();
        let mut kept = 0;
        for wanted in &config.mounts {
            match find(wanted) {
                Some(mut mount) => {
                    kept += 1;
                    mount.worker().into_iter().for_each(WorkerProcess::reopen_log);
                    if mount.has_moved() {
                        self.end_mount(&mut mount);
                    }
                    mount.retry();
                    mounts.push(mount);
                }
                None => mounts.push(ServiceMount::new(wanted.clone())),
            }
        }
        let (ended, new) = (old.len(), mounts.len() - kept);
        tracing::info!("config reloaded; mounts kept: {kept}, new: {new}, ended: {ended}");
        for mut mount in old {
            self.end_mount(&mut mount);
        }
        (self.mounts, self.config, self.refusal) = (mounts, config, None);
        (self.is_ready, self.ticks) = (false, 0);
        self.serve_metrics();
    }

    /// Counts a second. Replaces silent workers, and kills workers that were told to end but do not.
    fn tick(&mut self) {
        self.notifier.alive();
        self.ticks = self.ticks.saturating_add(1);
        self.suspension.iter_mut().for_each(Suspension::tick);
        let limit = self
            .config
            .service
            .watchdog
            .map_or(u32::MAX, |limit| u32::try_from(limit.as_secs()).unwrap_or(u32::MAX));
        self.look_at_mounts();
        let silent: Vec<_> = self
            .mounts
            .iter_mut()
            .filter_map(|mount| Some((mount.tick(limit)?, mount.config.name.clone())))
            .collect();
        for leaving in &mut self.leaving {
            leaving.ticks += 1;
            if leaving.worker.stuck_end().is_some() {
                (leaving.is_killed, leaving.ticks) = (true, STUCK_TICKS);
            }
        }
        let is_late = |it: &mut Leaving| !it.is_killed && it.ticks >= LEAVING_TICKS;
        let late: Vec<_> = self.leaving.extract_if(.., is_late).collect();
        for Leaving { worker, name, .. } in &late {
            tracing::error!("mount {name}: worker {} does not end; killed", worker.pid());
        }
        let overdue = late.into_iter().map(|leaving| (leaving.worker, leaving.name));
        silent.into_iter().chain(overdue).for_each(|(worker, name)| self.kill(worker, name));
        for helper in &mut self.helpers {
            helper.ticks += 1;
            if helper.place.is_some() && helper.ticks > HELPER_TICKS {
                let _ = helper.child.kill();
                (helper.place, helper.is_awaited) = (None, false);
            }
        }
        if let Some(ticks) = &mut self.stopping {
            *ticks += 1;
        }
    }

    /// Reads all workers' messages, handles children that have ended, and starts workers that are due.
    fn advance(&mut self) {
        self.mounts.iter_mut().for_each(ServiceMount::advance);
        self.detached.retain_mut(|(_, worker)| {
            worker.receive();
            worker.ended().is_none()
        });
        self.abort_abandoned();
        self.remove_ended_leaving();
        self.remove_ended_helpers();
        let is_running = |pid: &Pid| {
            matches!(waitpid(*pid, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive))
        };
        self.earlier.retain(is_running);
        self.start_due();
    }

    /// Removes the workers in `leaving` that have ended or cannot end. Unmounts dead mounts that they have left.
    fn remove_ended_leaving(&mut self) {
        let mut ended = Vec::new();
        self.leaving.retain_mut(|Leaving { worker, name, ticks, is_killed }| {
            worker.receive();
            let has_ended = worker.ended().is_some();
            let is_stuck = !has_ended && *is_killed && *ticks >= STUCK_TICKS;
            if is_stuck {
                let pid = worker.pid();
                tracing::error!("mount {name}: killed worker {pid} waits for a file system");
            }
            if has_ended || is_stuck {
                ended.push((worker.place.clone(), worker.target.clone()));
            }
            !has_ended && !is_stuck
        });
        for (place, target) in ended {
            if !self.mounts.iter().any(|mount| mount.config.target == place) {
                self.remove_rest_of(&target);
            }
        }
    }

    /// Removes helpers that have ended. Once the time limit for the end of the service has passed,
    /// kills and removes all helpers.
    fn remove_ended_helpers(&mut self) {
        let out_of_time = self.stopping.is_some_and(|_| self.leaving.is_empty())
            && self
                .stopping
                .is_some_and(|ticks| ticks > LEAVING_TICKS + STUCK_TICKS + HELPER_TICKS);
        self.helpers.retain_mut(|helper| {
            if out_of_time {
                let _ = helper.child.kill();
                return false;
            }
            matches!(helper.child.try_wait(), Ok(None))
        });
    }

    /// Starts the workers that are due, unless their mount waits for another mount.
    fn start_due(&mut self) {
        let now = Instant::now();
        for index in 0..self.mounts.len() {
            let is_due = self.mounts[index].starts_at().is_some_and(|at| at <= now);
            if !is_due || !self.is_free(&self.mounts[index].config.target) {
                continue;
            }
            match self
                .awaited(&self.mounts[index])
                .map(|below| (below.config.name.clone(), below.state().0))
            {
                None => self.mounts[index].start(self.verbose),
                Some((_, "starting")) => {}
                Some((below, _)) => self.mounts[index].hold_back(&below),
            }
        }
    }

    /// The other mount on which the source of `mount` lies, if that other mount does not serve now.
    /// Until it serves, the path of the source leads to the folder that it will cover, which has
    /// other files. A mount that is taken over reads the same path as before, and need not wait.
    fn awaited(&self, mount: &ServiceMount) -> Option<&ServiceMount> {
        let is_below =
            |other: &&ServiceMount| mount.config.lies_on(&other.config) && !other.is_serving();
        self.mounts.iter().find(is_below).filter(|_| !mount.is_handed())
    }

    /// Whether a new worker may mount on `place`: no leaving worker and no helper still needs the place.
    fn is_free(&self, place: &Path) -> bool {
        if self.helpers.iter().any(|helper| helper.place.as_deref() == Some(place)) {
            return false;
        }
        let mut there = self.leaving.iter().map(|leaving| &leaving.worker);
        there.all(|worker| {
            let is_off = || mountinfo::ours_at(&worker.target).is_ok_and(|mount| mount.is_none());
            worker.place != place || (worker.is_mounted && is_off())
        })
    }

    /// Reports the state to the service manager. Returns an error if no mount could be made at the start.
    fn announce(&mut self) -> Option<String> {
        let are_decided = self.mounts.iter().all(|mount| mount.has_outcome);
        let serving = self.mounts.iter().filter(|mount| mount.is_serving()).count();
        let posted = self.mounts.iter().map(ServiceMount::posted).collect();
        self.board.post(posted, self.refusal.is_none());
        let status = self.status(serving);
        if self.notifier.status(status.clone()) {
            tracing::debug!("{status}");
        }
        if self.is_ready || !(are_decided || self.ticks >= READY_TICKS) || self.reading.is_some() {
            return None;
        }
        if self.is_first && are_decided && serving == 0 && !self.mounts.is_empty() {
            let file = shown_path(&self.file);
            return Some(format!("no mount of {file} serves ({})", self.mounts.len()));
        }
        (self.is_ready, self.is_first) = (true, false);
        self.notifier.ready();
        tracing::info!("{status}");
        None
    }

    /// The state as one line.
    fn status(&self, serving: usize) -> String {
        let mut parts = vec![match self.mounts.len() {
            0 => format!("no mounts in {}", shown_path(&self.file)),
            total => format!("serving {serving} of {}", counted(total, "mount")),
        }];
        for mount in &self.mounts {
            let name = &mount.config.name;
            match mount.state() {
                ("serving", _) => {}
                (state, Some(reason)) => parts.push(format!("{name} {state}: {reason}")),
                (state, None) => parts.push(format!("{name} {state}")),
            }
        }
        if let Some(refusal) = &self.refusal {
            parts.push(format!("config not reloaded: {refusal}"));
        }
        parts.join("; ")
    }
}
