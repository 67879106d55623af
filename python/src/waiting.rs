//! Waits for work on other threads. The waiting thread checks for Ctrl-C.

use std::path::Path;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use nix::libc;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTimeoutError};
use pyo3::prelude::*;
use tensorfs::internal::asked::Asked;
use tensorfs::internal::error::real_name;

/// Interval between checks for Ctrl-C.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The state of work on another thread.
pub(crate) enum Doing {
    /// The work computes, for a bounded time that does not count towards the deadline.
    Computing,
    /// The work waits. The text is the reason in the error if the deadline passes.
    Waiting(&'static str),
}

/// Runs `work` on another thread, waits for it until the deadline, and checks for Ctrl-C during the wait. `path` is the
/// file that errors name.
///
/// # Errors
/// `TimeoutError` past the deadline, and the exception of a signal.
pub(crate) fn beside<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    timeout: Option<f64>,
    action: &str,
    path: Option<&Path>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let doing = || Doing::Waiting("the file system does not answer");
    beside_with(py, name, timeout, action, path, &doing, work)
}

/// Does the same as `beside`, for work whose current state `doing` returns.
///
/// # Errors
/// The errors of `beside`.
pub(crate) fn beside_with<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    timeout: Option<f64>,
    action: &str,
    path: Option<&Path>,
    doing: &dyn Fn() -> Doing,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let mut asked = Asked::on_thread(name, work).map_err(|e| {
        PyOSError::new_err((e.raw_os_error(), format!("cannot {action}: start a thread: {e}")))
    })?;
    let (mut looked, mut waited_for) = (Instant::now(), Duration::ZERO);
    loop {
        match py.detach(|| asked.within(POLL_INTERVAL)) {
            Ok(done) => return Ok(done),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                let message = format!("cannot {action}: an error in tensorfs");
                return Err(PyRuntimeError::new_err(message));
            }
        }
        let since = std::mem::replace(&mut looked, Instant::now());
        let Doing::Waiting(reason) = doing() else { continue };
        waited_for += looked - since;
        let over = |limit: &f64| *limit > 0.0 && waited_for.as_secs_f64() > *limit;
        if let Some(limit) = timeout.filter(over) {
            let message = format!("cannot {action}: {reason} within {limit} s (io_timeout)");
            let facts = (libc::ETIMEDOUT, message);
            return Err(match path.map(real_name) {
                Some(path) => PyTimeoutError::new_err((facts.0, facts.1, path)),
                None => PyTimeoutError::new_err(facts),
            });
        }
    }
}
