//! A call that may never return, such as one to a file system: it runs on a thread of its own, which
//! is abandoned if the result is late.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Stack size of the thread, as for the first thread of a process: the question may be any work.
const STACK: usize = 8 << 20;

/// A question that was asked.
pub struct Asked<T> {
    answer: Receiver<T>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Asked<T> {
    /// Calls `ask` on a thread of this name.
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

    /// The answer, which comes once. The thread has ended then.
    ///
    /// # Errors
    /// `Timeout` if it does not come within `limit`, `Disconnected` if `ask` panicked.
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
