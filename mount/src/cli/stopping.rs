//! How a signal stops a command that has to clean up. The command cleans up and then ends itself
//! with the same signal, so that the shell learns which signal ended it.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tensorfs::{Error, Result};

use crate::daemon::ending::{block_signals, ending_signals};

/// The first signal that told the command to stop. It is 0 until then.
static STOPPED_BY: AtomicI32 = AtomicI32::new(0);

/// Whether there are files to remove.
static CLEANS_UP: AtomicBool = AtomicBool::new(false);

/// Time after the first signal in which a further signal does not count as a second one. timeout(1)
/// sends two signals together: one to the process and one to its process group.
const SAME: Duration = Duration::from_millis(100);

/// Handles the signals that end a command. A signal before `clean_up_on_signals` ends the process
/// at once, and so does a second signal. Must be called before the first thread starts.
pub(super) fn take_signals() {
    block_signals();
    std::thread::spawn(|| {
        let signals = ending_signals();
        while let Ok(signal) = signals.wait() {
            let is_first = STOPPED_BY.swap(signal as i32, Ordering::SeqCst) == 0;
            if !is_first || !CLEANS_UP.load(Ordering::SeqCst) {
                end_by(signal);
            }
            std::thread::sleep(SAME);
            if let Ok(more) = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK) {
                while let Ok(Some(_)) = more.read_signal() {}
            }
        }
    });
}

/// From now on, a signal that would end the process makes `check_stopped` fail instead.
pub(super) fn clean_up_on_signals() {
    CLEANS_UP.store(true, Ordering::SeqCst);
}

/// Whether a signal has told the command to stop.
pub(super) fn is_stopped() -> bool {
    STOPPED_BY.load(Ordering::SeqCst) != 0
}

/// Fails if a signal has told the command to stop. A command that writes files then removes them.
///
/// # Errors
/// `Error::Cancelled`.
pub(super) fn check_stopped() -> Result<()> {
    if is_stopped() {
        return Err(Error::cancelled("stopped; nothing is left of the new files"));
    }
    Ok(())
}

/// If a signal has told the command to stop, ends the process with that signal. Must be called
/// after the command has cleaned up.
pub(super) fn end_if_stopped() {
    if let Ok(signal) = Signal::try_from(STOPPED_BY.load(Ordering::SeqCst)) {
        end_by(signal);
    }
}

/// Ends the process with `signal`, which has its default action.
fn end_by(signal: Signal) {
    let _ = SigSet::from(signal).thread_unblock();
    let _ = raise(signal);
}
