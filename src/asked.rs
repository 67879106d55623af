//! Runs a call that may never return, such as a call to a file system, on a thread of its own. If the result is
//! late, the caller abandons the thread.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Stack size of the thread in bytes. It is the stack size of the first thread of a process, because the call may do
/// any work.
const STACK: usize = 8 << 20;

/// A call that runs on a thread of its own.
pub struct Asked<T> {
    answer: Receiver<T>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Asked<T> {
    /// Calls `ask` on a new thread named `name`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn on_thread(name: &str, ask: impl FnOnce() -> T + Send + 'static) -> io::Result<Asked<T>> {
        let (send, answer) = channel();
        let thread = Builder::new()
            .name(name.to_owned())
            .stack_size(STACK)
            .spawn(move || drop(send.send(ask())))?;
        Ok(Asked { answer, thread: Some(thread) })
    }

    /// Waits for the result and returns it. Only one call can return it. When this call returns the result, the
    /// thread has ended.
    ///
    /// # Errors
    /// `Timeout` if the result does not arrive within `limit`, `Disconnected` if `ask` panicked.
    pub fn within(&mut self, limit: Duration) -> Result<T, RecvTimeoutError> {
        let answer = self.answer.recv_timeout(limit)?;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_is_not_lost_and_a_panic_is_not_waited_for() {
        let (go, wait) = channel();
        let mut asked = Asked::on_thread("ask", move || wait.recv()).unwrap();
        assert_eq!(asked.within(Duration::ZERO), Err(RecvTimeoutError::Timeout));
        go.send(7).unwrap();
        assert_eq!(asked.within(Duration::MAX), Ok(Ok(7)));
        let mut asked = Asked::on_thread("ask", || panic!("as the test wants it")).unwrap();
        assert_eq!(asked.within(Duration::MAX), Err::<(), _>(RecvTimeoutError::Disconnected));
    }
}
