//! How a command that takes long is stopped: it cleans up first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tensorfs::{Error, Result};

use crate::daemon::ending::{block_signals, ending_signals};

/// Set once the command was told to stop.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// How long a command that was told to stop may take to clean up.
const PATIENCE: Duration = Duration::from_secs(3);

/// Makes a signal that ends the process fail `check_stopped`, so that no half-written file is left.
/// A signal that comes `PATIENCE` later ends the process at once; an earlier one, which `timeout`
/// sends with the first, does not.
pub(super) fn stop_on_signals() {
    block_signals();
    std::thread::spawn(|| {
        while ending_signals().wait().is_ok() {
            let first = !STOPPED.swap(true, Ordering::Relaxed);
            if first {
                std::thread::sleep(PATIENCE);
                let _ = ending_signals().thread_unblock();
            }
        }
    });
}

/// Fails once the command was told to stop. It writes files, and leaves none of them.
///
/// # Errors
/// `Error::Cancelled`.
pub(super) fn check_stopped() -> Result<()> {
    fail_if_stopped("stopped; nothing is left of the new files")
}

/// Fails once the command was told to stop. It writes no files.
///
/// # Errors
/// `Error::Cancelled`.
pub(super) fn check_reading_stopped() -> Result<()> {
    fail_if_stopped("stopped before all was read")
}

fn fail_if_stopped(message: &str) -> Result<()> {
    if STOPPED.load(Ordering::Relaxed) { Err(Error::cancelled(message)) } else { Ok(()) }
}
