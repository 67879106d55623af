//! Waits of the calling thread, which look for Ctrl-C.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::libc;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTimeoutError};
use pyo3::prelude::*;

/// Time between two looks for Ctrl-C.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

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
    let (sender, mut done) = channel();
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(move || drop(sender.send(work()))).map_err(|e| {
        PyOSError::new_err((e.raw_os_error(), format!("cannot {action}: start a thread: {e}")))
    })?;
    let began = Instant::now();
    let over = |timeout: f64| timeout > 0.0 && began.elapsed().as_secs_f64() > timeout;
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
        if timeout.is_some_and(over) {
            let message = format!("cannot {action}: the file system does not answer");
            return Err(PyTimeoutError::new_err((libc::ETIMEDOUT, message)));
        }
    }
}
