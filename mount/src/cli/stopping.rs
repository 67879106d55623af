//! How a command that writes files is stopped: it cleans up first.

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

/// Fails once the command was told to stop.
///
/// # Errors
/// `Error::Cancelled`.
pub(super) fn check_stopped() -> Result<()> {
    if STOPPED.load(Ordering::Relaxed) {
        return Err(Error::cancelled("stopped; nothing is left of the new files"));
    }
    Ok(())
}
