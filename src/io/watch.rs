//! The thread that keeps the deadlines: it answers what no other thread will.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::lane::Lane;
use crate::sync::{Condvar, Mutex};

#[derive(Default)]
pub(super) struct Watch {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether it looks again by itself before any fetch submitted now is overdue.
    awake: AtomicBool,
}

#[derive(Default)]
struct State {
    lanes: Vec<Arc<Lane>>,
    running: bool,
    called: bool,
    closed: bool,
}

impl Watch {
    /// Watches over one more lane.
    pub(super) fn add(&self, lane: Arc<Lane>) {
        self.state.lock().lanes.push(lane);
    }

    /// Starts the thread unless it runs.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<()> {
        if self.awake.load(Ordering::SeqCst) || self.state.lock().running {
            return Ok(());
        }
        let mut state = self.state.lock();
        if state.running {
            return Ok(());
        }
        let watch = self.clone();
        std::thread::Builder::new().name("tensorfs-watch".to_owned()).spawn(move || watch.run())?;
        state.running = true;
        Ok(())
    }

    /// A fetch was submitted: the thread may have to wake up for it.
    pub(super) fn submitted(&self) {
        if !self.awake.swap(true, Ordering::SeqCst) {
            self.call();
        }
    }

    /// Makes it look at the lanes now.
    pub(super) fn call(&self) {
        self.state.lock().called = true;
        self.changed.notify_one();
    }

    /// Ends the lanes and then the thread.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        if !state.running {
            // Then nothing was ever submitted.
            state.lanes.clear();
        }
        drop(state);
        self.changed.notify_one();
    }

    fn run(&self) {
        loop {
            // From here on a new fetch calls again, unless a deadline is known at the end.
            self.awake.store(false, Ordering::SeqCst);
            let lanes = self.state.lock().lanes.clone();
            let now = Instant::now();
            let next = lanes.iter().filter_map(|lane| lane.expire(now)).min();
            drop(lanes);
            if next.is_some() {
                self.awake.store(true, Ordering::SeqCst);
            }
            let mut state = self.state.lock();
            while !state.called && !state.closed {
                state = match next {
                    None => self.changed.wait(state),
                    Some(next) => {
                        let left = next.saturating_duration_since(Instant::now());
                        if left.is_zero() {
                            break;
                        }
                        self.changed.wait_timeout(state, left)
                    }
                };
            }
            state.called = false;
            if state.closed {
                let lanes = std::mem::take(&mut state.lanes);
                drop(state);
                lanes.iter().for_each(|lane| lane.close());
                return;
            }
        }
    }
}
