//! Deadlines of work in progress. One thread for each owner watches them.

use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, thread};

/// The next time at which the thread looks for overdue work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextLook {
    /// The thread looks at this time. No deadline is earlier.
    At(Instant),
    /// The thread looks only after it is woken. There is no deadline now.
    WhenCalled,
    /// The thread does not look again. The owner no longer exists, and the thread ends.
    Never,
}

/// A thread that ends overdue work of its owner. Clones are handles of the same thread.
///
/// The function that the thread calls must not keep the owner alive. When the owner no longer exists, the function
/// returns `NextLook::Never`. The owner wakes the thread when it is dropped, so that the thread ends.
#[derive(Clone, Debug, Default)]
pub struct Deadlines(Arc<Clock>);

#[derive(Debug, Default)]
struct Clock {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the thread will check for overdue work before a deadline that begins now can pass.
    awake: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    running: bool,
    woken: bool,
}

impl Deadlines {
    /// Starts the thread, unless it is running. The thread calls `expire`, which ends overdue work.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        &self,
        name: &str,
        expire: impl FnMut() -> NextLook + Send + 'static,
    ) -> io::Result<()> {
        if self.0.awake.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut state = self.0.state.lock();
        if !state.running {
            let clock = self.0.clone();
            let thread = thread::Builder::new().name(name.to_owned());
            thread.spawn(move || clock.run(expire))?;
            state.running = true;
        }
        Ok(())
    }

    /// Starts the thread, unless it is running. The thread calls `tick` with `owner`. If `tick` returns true, the
    /// thread calls it again after `interval`. Otherwise the thread calls `tick` again only after it is woken.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start_ticks<T: Send + Sync + 'static>(
        &self,
        name: &str,
        owner: Weak<T>,
        interval: Duration,
        tick: impl Fn(&Arc<T>) -> bool + Send + 'static,
    ) -> io::Result<()> {
        self.start(name, move || match owner.upgrade() {
            None => NextLook::Never,
            Some(owner) if tick(&owner) => NextLook::At(Instant::now() + interval),
            Some(_) => NextLook::WhenCalled,
        })
    }

    /// Notes that a deadline begins. Wakes the thread, unless the thread will check for overdue work before this
    /// deadline anyway.
    pub fn added(&self) {
        if !self.0.awake.swap(true, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Wakes the thread, which then checks all deadlines.
    pub fn wake(&self) {
        self.0.state.lock().woken = true;
        self.0.changed.notify_one();
    }
}

impl Clock {
    fn run(&self, mut expire: impl FnMut() -> NextLook) {
        loop {
            // From here on a new deadline wakes the thread, until `awake` is set again below.
            self.awake.store(false, Ordering::SeqCst);
            let due = match expire() {
                NextLook::At(due) => Some(due),
                NextLook::WhenCalled => None,
                NextLook::Never => return,
            };
            if due.is_some() {
                self.awake.store(true, Ordering::SeqCst);
            }
            let mut state = self.state.lock();
            while !state.woken {
                let left = due.map(|due| due.saturating_duration_since(Instant::now()));
                state = match left {
                    None => self.changed.wait(state),
                    Some(left) if left.is_zero() => break,
                    Some(left) => self.changed.wait_timeout(state, left),
                };
            }
            state.woken = false;
        }
    }
}
