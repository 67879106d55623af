//! Keeps mounts alive while the supervisor is replaced by a restart of the service or by another
//! version of the program.
//!
//! Each worker stops reading its connection and ends. In the meantime, its connection, its state
//! and the open files of its source are stored. They are stored either in the descriptor store of
//! systemd, or in this process, which then runs the new program. The new supervisor passes them to
//! new workers.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sendmsg, setsockopt,
    socket, sockopt::SendTimeout,
};
use nix::sys::time::TimeVal;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use tensorfs::internal::error::{counted, shown_path};

use super::channel::Order;
use super::worker_process::{End, WorkerProcess};
use crate::daemon::handover::state_version;
use crate::daemon::inherited::HANDED_OVER;
use crate::daemon::stalled::run_until;

/// Number of ticks of one second for each of two steps. In the first step, workers prepare while
/// all mounts are served. In the second step, workers stop and end.
const GIVING_TICKS: u32 = 6;

/// Time limit for an answer of the service manager or of another version of the program. Readers
/// wait during it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for the answer of a program. All mounts are served during it. The limit is long,
/// because the service manager of a busy machine may need much time.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(20);

/// The empty name stands for the service itself, since no mount has an empty name. Its descriptor
/// tells the next process that it continues a service, even if no mount is handed over.
pub(super) const SERVICE: &str = "";

/// The descriptors of mounts that have no worker, by the name of the mount.
#[derive(Debug, Default)]
pub(super) struct Stored(BTreeMap<String, Vec<OwnedFd>>);

impl Stored {
    /// Takes the descriptors that this process got at its start. Must be called only once, before
    /// other threads run.
    pub(super) fn from_environment() -> Stored {
        let number = |name: &str| std::env::var(name).ok()?.parse::<RawFd>().ok();
        let mut found: Vec<(String, RawFd)> = Vec::new();
        if number("LISTEN_PID") == i32::try_from(std::process::id()).ok() {
            let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
            let count = number("LISTEN_FDS").unwrap_or(0);
            let numbers = 3..3_i32.saturating_add(count);
            found.extend(names.split(':').map(str::to_owned).zip(numbers));
            // Otherwise the service manager would pass these descriptors again, and keep ended
            // connections open.
            if let Err(e) = ServiceManager::forget(found.iter().map(|(name, _)| name.as_str())) {
                tracing::error!("the service manager keeps old descriptors: {e}");
            }
        }
        let variable = std::env::var(HANDED_OVER).unwrap_or_default();
        let handed = variable.split(' ').filter_map(|pair| pair.split_once('='));
        found.extend(handed.filter_map(|(name, fd)| Some((name.to_owned(), fd.parse().ok()?))));
        let own = |(name, fd): (String, RawFd)| {
            // SAFETY: the number is used for this call only, which fails if it is not open.
            let open = unsafe { BorrowedFd::borrow_raw(fd) };
            let is_open = fd > 2 && fcntl(open, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).is_ok();
            // SAFETY: the parent process passed the descriptor by these variables. This process did
            // not open it, so nothing else here owns it.
            is_open.then(|| (name, unsafe { OwnedFd::from_raw_fd(fd) }))
        };
        Stored(last_handover(found.into_iter().filter_map(own)))
    }

    /// Removes and returns the descriptors of the mount `name`.
    pub(super) fn take(&mut self, name: &str) -> Vec<OwnedFd> {
        self.0.remove(name).unwrap_or_default()
    }

    /// Names of the mounts whose descriptors are still here.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(super) fn insert(&mut self, name: String, fds: Vec<OwnedFd>) {
        self.0.insert(name, fds);
    }

    /// The descriptors, each with a name that distinguishes this handover from earlier handovers.
    fn named(&self) -> Vec<(String, &OwnedFd)> {
        // This clock does not go back while descriptors are stored.
        let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from);
        let generation = now.unwrap_or_default().as_nanos();
        let mut named = Vec::new();
        for (name, fds) in &self.0 {
            let count = fds.len();
            for (index, fd) in fds.iter().enumerate() {
                named.push((format!("{name}.{generation}.{count}.{index}"), fd));
            }
        }
        named
    }

    /// Stores the descriptors in the service manager until the next start of the service.
    ///
    /// # Errors
    /// If there is no service manager, or if it refuses them.
    fn store(&self) -> io::Result<()> {
        let manager = ServiceManager::connect()?;
        for (name, fd) in self.named() {
            manager.send(&format!("FDSTORE=1\nFDNAME={name}\n"), Some(fd.as_fd()))?;
        }
        // The manager may drop messages of a process that has already ended, so this process waits
        // until all messages are handled.
        manager.wait()
    }

    /// Replaces this process by `program`, with the same arguments. Returns only if that fails.
    fn exec(&self, program: &Path) -> io::Error {
        let mut pairs = Vec::new();
        for (name, fd) in self.named() {
            if let Err(e) = fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty())) {
                return e.into();
            }
            pairs.push(format!("{name}={}", fd.as_raw_fd()));
        }
        let args: Vec<OsString> = std::env::args_os().skip(1).collect();
        let mut command = Command::new(program);
        command.arg0("tensorfs").args(args).env(HANDED_OVER, pairs.join(" "));
        // The pid stays the same, so the new program would believe that these descriptor numbers,
        // which are closed now, are meant for it.
        for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(name);
        }
        let error = command.exec();
        for fd in self.0.values().flatten() {
            // Workers would inherit the descriptor, and keep a connection open that has to end.
            let _ = fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
        }
        error
    }
}

/// The descriptors of the last handover, by the name of the mount. A mount with a missing
/// descriptor is left out.
fn last_handover<T>(found: impl Iterator<Item = (String, T)>) -> BTreeMap<String, Vec<T>> {
    let mut by_generation: BTreeMap<u128, BTreeMap<_, BTreeMap<usize, T>>> = BTreeMap::new();
    for (name, fd) in found {
        let mut parts = name.rsplitn(4, '.');
        let mut number = || parts.next()?.parse::<u128>().ok();
        let (Some(index), Some(count), Some(generation)) = (number(), number(), number()) else {
            continue;
        };
        let (Ok(index), Some(name)) = (usize::try_from(index), parts.next()) else { continue };
        let sets = by_generation.entry(generation).or_default();
        sets.entry((name.to_owned(), count)).or_default().insert(index, fd);
    }
    let last = by_generation.pop_last().map(|(_, sets)| sets).unwrap_or_default();
    let whole = last.into_iter().filter_map(|((name, count), fds)| {
        let is_whole = fds.len() as u128 == count && fds.keys().copied().eq(0..fds.len());
        is_whole.then(|| (name, fds.into_values().collect()))
    });
    whole.collect()
}

/// The socket of the service manager.
struct ServiceManager {
    socket: OwnedFd,
    address: UnixAddr,
}

impl ServiceManager {
    fn connect() -> io::Result<ServiceManager> {
        let none = || io::Error::other("no service manager keeps descriptors");
        let name = std::env::var_os("NOTIFY_SOCKET").ok_or_else(none)?;
        let address = match name.as_bytes() {
            [b'@', name @ ..] => UnixAddr::new_abstract(name)?,
            name => UnixAddr::new(name)?,
        };
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::Datagram, flags, None)?;
        let limit = TimeVal::new(ANSWER_TIMEOUT.as_secs() as i64, 0);
        setsockopt(&socket, SendTimeout, &limit)?;
        Ok(ServiceManager { socket, address })
    }

    /// Removes the stored descriptors with these names. Does not wait for the manager, because
    /// readers of the mounts wait in the meantime. The manager handles all messages of this process
    /// in order.
    fn forget<'a>(names: impl Iterator<Item = &'a str>) -> io::Result<()> {
        let names: BTreeSet<&str> = names.collect();
        if names.is_empty() {
            return Ok(());
        }
        let manager = ServiceManager::connect()?;
        for name in names {
            manager.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"), None)?;
        }
        Ok(())
    }

    /// Waits until the service manager has handled all messages.
    ///
    /// # Errors
    /// If the service manager does not do so within `ANSWER_TIMEOUT`.
    fn wait(&self) -> io::Result<()> {
        let (read, write) = io::pipe()?;
        self.send("BARRIER=1\n", Some(write.as_fd()))?;
        drop(write);
        let limit = PollTimeout::try_from(ANSWER_TIMEOUT).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(read.as_fd(), PollFlags::empty())], limit)? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    fn send(&self, text: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let fds: Vec<RawFd> = fd.iter().map(AsRawFd::as_raw_fd).collect();
        let with_fds = [ControlMessage::ScmRights(&fds)];
        let rights = if fds.is_empty() { &[][..] } else { &with_fds };
        let data = [IoSlice::new(text.as_bytes())];
        let (socket, flags) = (self.socket.as_raw_fd(), MsgFlags::MSG_NOSIGNAL);
        sendmsg(socket, &data, rights, flags, Some(&self.address))?;
        Ok(())
    }
}

/// Whether the service manager stops this service because it is going to start it again.
///
/// If that cannot be determined, the result is false, and the service unmounts when it stops.
pub(crate) fn is_restart() -> bool {
    let Some(unit) = std::env::var_os("TENSORFS_UNIT") else { return false };
    let mut command = Command::new("systemctl");
    command.args(["list-jobs", "--no-legend", "--plain", "--full"]);
    let Some(jobs) = output_in_time(command) else { return false };
    jobs.lines().any(|job| {
        let mut words = job.split_whitespace().skip(1);
        words.next().map(OsString::from).as_ref() == Some(&unit)
            && words.next().is_some_and(|kind| kind.contains("restart"))
    })
}

/// The path of this process's executable, if another file is at this path now.
pub(super) fn replaced_program() -> Option<PathBuf> {
    let running = std::fs::metadata("/proc/self/exe").ok()?;
    let link = std::fs::read_link("/proc/self/exe").ok()?;
    let linked = link.as_os_str().as_bytes();
    let name = linked.strip_suffix(b" (deleted)").unwrap_or(linked);
    let path = PathBuf::from(std::ffi::OsStr::from_bytes(name));
    let now = std::fs::metadata(&path).ok()?;
    ((running.dev(), running.ino()) != (now.dev(), now.ino())).then_some(path)
}

/// Asks the version of the program at the path `program` whether it can take over the mounts of
/// this process.
///
/// # Errors
/// One line with the reason why it cannot.
pub(super) fn check_state_version(program: &Path) -> Result<(), String> {
    let mut command = Command::new(program);
    command.arg0("tensorfs").args(["internal", "state-version"]);
    let (shown, ours) = (shown_path(program), state_version());
    let output = output_in_time(command).unwrap_or_default();
    let said = output.trim();
    if said == ours.to_string() {
        return Ok(());
    }
    Err(match said.parse::<u64>() {
        Ok(theirs) => format!(
            "{shown} cannot take over: it keeps the state of mounts in version {theirs}, the \
             running one in version {ours}"
        ),
        Err(_) => format!("{shown} cannot take over: it does not tell its version"),
    })
}

/// The output of `command`. `None` if it fails, or does not end in time.
fn output_in_time(command: Command) -> Option<String> {
    let output = run_until(command, Instant::now() + PROGRAM_TIMEOUT).ok()??;
    output.status.success().then(|| String::from_utf8(output.stdout).ok()).flatten()
}

/// Why all workers hand over their mounts.
#[derive(Debug)]
pub(super) enum Purpose {
    /// The service manager restarts the service.
    Restart,
    /// The program at this path replaces the running program.
    Upgrade(PathBuf),
}

/// A worker that is handing over its mount.
struct Giving {
    name: String,
    worker: WorkerProcess,
    /// Whether the worker was told to prepare. It accepts no order before it has mounted.
    is_told: bool,
    /// The descriptors that the worker has sent.
    fds: Vec<OwnedFd>,
}

/// The handover of all mounts.
pub(super) struct Suspension {
    purpose: Purpose,
    giving: Vec<Giving>,
    stored: Stored,
    /// Whether the workers have been ordered to stop.
    are_ordered: bool,
    /// Number of ticks since the handover began, and after the order to stop, number of ticks since
    /// that order.
    ticks: u32,
    /// A signal to end that arrived during the handover.
    pub signal: Option<Signal>,
}

impl Suspension {
    /// Makes all `workers` hand over their mounts together. All of them still serve while they
    /// prepare. So a worker that waits for its source delays the handover, but not the readers of
    /// other mounts. The mounts in `stored` have no worker.
    pub(super) fn begin(
        purpose: Purpose,
        workers: Vec<(String, WorkerProcess)>,
        stored: Stored,
    ) -> Suspension {
        let giving = workers
            .into_iter()
            .map(|(name, worker)| Giving { name, worker, is_told: false, fds: Vec::new() })
            .collect();
        Suspension { purpose, giving, stored, are_ordered: false, ticks: 0, signal: None }
    }

    /// Counts a second. Workers that take too long are killed, which ends their mounts.
    pub(super) fn tick(&mut self) {
        self.ticks += 1;
        let (is_late, are_ordered) = (self.ticks == GIVING_TICKS, self.are_ordered);
        let is_stuck = |giving: &Giving| are_ordered || !giving.worker.is_prepared;
        if is_late {
            for giving in self.giving.iter().filter(|giving| is_stuck(giving)) {
                tracing::error!(
                    "mount {}: worker {} cannot hand over, because its source does not answer; its \
                     readers get errors",
                    giving.name,
                    giving.worker.pid()
                );
                if let Err(e) = giving.worker.abort() {
                    tracing::error!("{}: cannot unmount: {e}", shown_path(&giving.worker.target));
                }
            }
        }
        if self.ticks > GIVING_TICKS {
            self.giving.retain(|giving| !is_stuck(giving));
        }
    }

    /// The channels of the workers.
    pub(super) fn workers(&self) -> impl Iterator<Item = &WorkerProcess> {
        self.giving.iter().map(|giving| &giving.worker)
    }

    /// Reads messages of the workers, and handles those that have ended. Returns whether all have
    /// ended.
    pub(super) fn advance(&mut self) -> bool {
        let stored = &mut self.stored;
        self.giving.retain_mut(|Giving { name, worker, is_told, fds }| {
            worker.receive();
            if worker.is_mounted && !*is_told {
                *is_told = true;
                worker.order(&Order::Prepare);
            }
            if let Some(state) = worker.take_state() {
                match state {
                    Ok(state) => {
                        *fds = state;
                        worker.order(&Order::Give);
                    }
                    Err(reason) => {
                        tracing::error!("mount {name}: {reason}; its readers get errors");
                        worker.order(&Order::Stop);
                    }
                }
            }
            match worker.ended() {
                None if worker.has_given && !fds.is_empty() => {
                    stored.insert(name.clone(), std::mem::take(fds));
                }
                None => return true,
                // If the kernel cannot send requests again, the requests that a killed worker has
                // read would wait for ever. So the descriptors are used only if the worker ended
                // regularly.
                Some(End::Unmounted | End::Stopped) if !fds.is_empty() => {
                    stored.insert(name.clone(), std::mem::take(fds));
                }
                Some(End::Unmounted | End::Stopped) => {}
                Some(End::Failed(reason)) => {
                    tracing::error!("mount {name}: not handed over: {reason}");
                }
            }
            false
        });
        if !self.are_ordered && self.giving.iter().all(|giving| giving.worker.is_prepared) {
            (self.are_ordered, self.ticks) = (true, 0);
            self.giving.iter().for_each(|giving| giving.worker.order(&Order::HandOver));
        }
        self.giving.is_empty()
    }

    /// Passes the mounts to the next process. Returns `None` if this process has to end, and the
    /// descriptors if it has to serve the mounts itself. Does not return if another program replaces
    /// this one.
    pub(super) fn finish(mut self) -> Option<Stored> {
        if let Ok(nothing) = File::open("/dev/null") {
            self.stored.insert(SERVICE.to_owned(), vec![nothing.into()]);
        }
        if let (Purpose::Upgrade(_), Some(signal)) = (&self.purpose, self.signal) {
            // The process gets the signal again, and handles it this time.
            let _ = kill(Pid::this(), signal);
            return Some(self.stored);
        }
        match &self.purpose {
            Purpose::Restart => {
                let mounts =
                    counted(self.stored.names().filter(|name| *name != SERVICE).count(), "mount");
                match self.stored.store() {
                    Ok(()) => tracing::info!("{mounts} kept for the next start"),
                    Err(e) => tracing::error!("{mounts} not handed over: {e}"),
                }
                None
            }
            Purpose::Upgrade(program) => {
                tracing::info!("{} goes on", shown_path(program));
                crate::log::flush();
                let e = self.stored.exec(program);
                tracing::error!("{}: cannot run: {e}", shown_path(program));
                Some(self.stored)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::last_handover;

    fn last(names: &[&str]) -> Vec<(String, Vec<usize>)> {
        let found = names.iter().enumerate().map(|(fd, name)| ((*name).to_owned(), fd));
        last_handover(found).into_iter().collect()
    }

    #[test]
    fn only_the_last_handover_counts_in_any_order() {
        let names = ["a.9.2.1", "a.9.2.0", "a.10.2.1", "a.10.2.0", "b.9.1.0", "a.9.2.0"];
        assert_eq!(last(&names), [("a".to_owned(), vec![3, 2])]);
    }

    #[test]
    fn a_set_that_lacks_a_descriptor_is_left_out() {
        let names = ["a.7.3.0", "a.7.3.1", "b.c.7.1.0", "x", "y.0", "z.7.1.1", ""];
        assert_eq!(last(&names), [("b.c".to_owned(), vec![2])]);
    }
}
