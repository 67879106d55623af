//! Handles the signals that end a mount, and SIGHUP.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use sd_notify::NotifyState;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::sync::Mutex;

use super::{control, place};
use crate::log;
use crate::serve::service::Service;

/// Time for which open files are still served after a signal.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether a signal has ended the mount that this process serves.
static SIGNALLED: AtomicBool = AtomicBool::new(false);

/// Maximum time for a message to the service manager.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(1);

/// Blocks the signals that end a mount or a command, in this thread and in the threads that it
/// starts.
pub(crate) fn block_signals() {
    let signals = SigSet::from_iter(ending_signals().iter().chain([Signal::SIGHUP]));
    if let Err(e) = signals.thread_block() {
        tracing::warn!("signals cannot be blocked: {e}");
    }
}

/// The signals that end a command. A signal that was ignored when the program started, as SIGHUP is
/// under nohup, is left out, because `wait` would receive that signal nevertheless.
pub(crate) fn ending_signals() -> SigSet {
    let ending = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP];
    SigSet::from_iter(ending.into_iter().filter(|&signal| !is_ignored(signal)))
}

fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    ignored >> (signal as u32 - 1) & 1 == 1
}

/// Sends a message to the service manager, if there is one. Waits for `NOTIFY_TIMEOUT` at most.
pub(crate) fn notify(state: NotifyState<'static>, status: String) {
    let (send, receive) = channel();
    let tell = move || {
        let _ = sd_notify::notify(&[state, NotifyState::Status(&status)]);
        let _ = send.send(());
    };
    if std::thread::Builder::new().name("notify".to_owned()).spawn(tell).is_ok() {
        let _ = receive.recv_timeout(NOTIFY_TIMEOUT);
    }
}

/// A mount that a signal can end.
pub(crate) struct Ending {
    /// The mount point.
    pub target: PathBuf,
    /// Minor number of the mount's device. Another mount may get this number after the connection
    /// has ended.
    pub minor: Option<u32>,
    /// The connection to the kernel.
    pub connection: Arc<OwnedFd>,
    pub service: Arc<Service>,
    /// A lock that is held during the unmount, because the process must not end before the unmount
    /// is done.
    pub taking_off: Arc<Mutex<()>>,
}

impl Ending {
    /// Unmounts at the first signal. Files that are still open are served until the last one is
    /// closed, and then the process ends. After `DRAIN_TIMEOUT` or at a second signal, the process
    /// ends in any case, and readers get errors.
    pub(crate) fn unmount_on_signal(&self) {
        let terminal = ends_with_terminal();
        let Some(signal) = wait_for_end(terminal) else { return };
        SIGNALLED.store(true, Ordering::SeqCst);
        let target = shown_path(&self.target);
        tracing::info!("{signal}: unmounting {target}");
        let held = self.taking_off.lock();
        let minor = self.minor.filter(|_| self.is_connected());
        let taken_off = minor.map_or(Ok(()), place::take_off);
        drop(held);
        let is_off = taken_off.is_ok();
        if let Err(e) = taken_off {
            tracing::error!(
                "{target}: cannot unmount: {e}; once it is in sight take it off with `tensorfs \
                 umount`"
            );
        }
        let done = if is_off { "unmounted" } else { "cannot unmount" };
        notify(NotifyState::Stopping, format!("{done} {target}"));
        let drain = move || {
            // If no file is open, the process has ended by now.
            std::thread::sleep(Duration::from_secs(1));
            let seconds = DRAIN_TIMEOUT.as_secs();
            let used = if is_off { "files are still open; they fail" } else { "all reads fail" };
            let status = format!("{used} after {seconds} seconds");
            tracing::warn!("{status}, or at once after another signal");
            notify(NotifyState::Stopping, status);
            std::thread::sleep(DRAIN_TIMEOUT);
            control::exit();
        };
        let draining = std::thread::Builder::new().name("drain".to_owned()).spawn(drain);
        // `stop` may wait for a disk, so the other thread already runs.
        self.service.stop();
        match draining {
            Ok(_) => drop(wait_for_end(terminal)),
            Err(_) => std::thread::sleep(DRAIN_TIMEOUT),
        }
        control::exit();
    }

    /// Whether the connection to the kernel is open. The kernel closes the connection when nothing
    /// uses the mount any more.
    fn is_connected(&self) -> bool {
        let mut polled = [PollFd::new(self.connection.as_fd(), PollFlags::empty())];
        let ended = poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
        !ended
    }
}

/// Waits for a signal that ends the mount. SIGHUP reopens the log file. SIGHUP ends the mount only
/// if the process had a terminal (`terminal`) that is gone now.
fn wait_for_end(terminal: bool) -> Option<Signal> {
    let awaited = SigSet::from_iter(ending_signals().iter().chain([Signal::SIGHUP]));
    loop {
        match awaited.wait().ok()? {
            Signal::SIGHUP if !terminal || has_terminal() => {
                log::reopen();
            }
            signal => return Some(signal),
        }
    }
}

/// Whether the mount of this process was ended by a signal, and not by an unmount from another
/// process.
pub(crate) fn was_signalled() -> bool {
    SIGNALLED.load(Ordering::SeqCst)
}

/// Whether this process has to end when its terminal is closed: it has a terminal, and SIGHUP was
/// not ignored at its start.
pub(crate) fn ends_with_terminal() -> bool {
    has_terminal() && ending_signals().contains(Signal::SIGHUP)
}

/// Whether the process has a controlling terminal.
pub(crate) fn has_terminal() -> bool {
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK).open("/dev/tty").is_ok()
}
