//! How a command that has to clean up is stopped: it cleans up, and then ends by the signal, so that
//! the shell sees what ended it.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tensorfs::{Error, Result};

use crate::daemon::ending::{block_signals, ending_signals};

/// The first signal that told the command to stop, 0 until then.
static STOPPED_BY: AtomicI32 = AtomicI32::new(0);

/// Whether there is something to clean up.
static CLEANS_UP: AtomicBool = AtomicBool::new(false);

/// How long after the first signal another one counts as the same: timeout(1) sends two at once, one
/// to the process and one to its group.
const SAME: Duration = Duration::from_millis(100);

/// Takes the signals that end a command. One that comes before `clean_up_on_signals` ends the process at
/// once, as does a second one. Call this before the first thread starts.
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

/// Makes a signal that would end the process fail `check_stopped` from now on.
pub(super) fn clean_up_on_signals() {
    CLEANS_UP.store(true, Ordering::SeqCst);
}

/// Whether the command was told to stop.
pub(super) fn is_stopped() -> bool {
    STOPPED_BY.load(Ordering::SeqCst) != 0
}

/// Fails once the command was told to stop. It writes files, and leaves none of them.
///
/// # Errors
/// `Error::Cancelled`.
pub(super) fn check_stopped() -> Result<()> {
    if is_stopped() {
        return Err(Error::cancelled("stopped; nothing is left of the new files"));
    }
    Ok(())
}

/// Ends the process by the signal that told the command to stop, if one did. Called when the
/// command has cleaned up.
pub(super) fn end_if_stopped() {
    if let Ok(signal) = Signal::try_from(STOPPED_BY.load(Ordering::SeqCst)) {
        end_by(signal);
    }
}

/// Ends the process by `signal`, whose action is the default one.
fn end_by(signal: Signal) {
    let _ = SigSet::from(signal).thread_unblock();
    let _ = raise(signal);
}
