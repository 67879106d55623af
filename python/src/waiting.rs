//! Waits of the calling thread, which look for Ctrl-C.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::libc;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTimeoutError};
use pyo3::prelude::*;

/// Time between two looks for Ctrl-C.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// The state of work on another thread.
pub(crate) enum Doing {
    /// It computes, for a bounded time that does not count.
    Computing,
    /// It waits. The text is the reason of an error past the deadline.
    Waiting(&'static str),
}

/// Runs `work` on another thread, waits for it until the deadline, and checks for Ctrl-C meanwhile.
///
/// # Errors
/// `TimeoutError` past the deadline, and the exception of a signal.
pub(crate) fn beside<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    timeout: Option<f64>,
    action: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let doing = || Doing::Waiting("the file system does not answer");
    beside_with(py, name, timeout, action, &doing, work)
}

/// As `beside`, for work that `doing` tells about.
///
/// # Errors
/// The errors of `beside`.
pub(crate) fn beside_with<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    timeout: Option<f64>,
    action: &str,
    doing: &dyn Fn() -> Doing,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, mut done) = channel();
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(move || drop(sender.send(work()))).map_err(|e| {
        PyOSError::new_err((e.raw_os_error(), format!("cannot {action}: start a thread: {e}")))
    })?;
    let (mut looked, mut waited_for) = (Instant::now(), Duration::ZERO);
    loop {
        let waited = &mut done;
        match py.detach(move || waited.recv_timeout(LOOK)) {
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
        if timeout.is_some_and(|limit| limit > 0.0 && waited_for.as_secs_f64() > limit) {
            let message = format!("cannot {action}: {reason}");
            return Err(PyTimeoutError::new_err((libc::ETIMEDOUT, message)));
        }
    }
}
