//! Reads without blocks, each on a thread of its own: what takes more memory than there is
//! because it is large, or because thousands of shards have a part in it. Few at a time, and
//! with a deadline like all others.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{Ask, Inner, State, too_late};
use crate::sync::Mutex;

/// Most of them, those included whose thread the source does not give back.
const ALONE_MAX: usize = 4;

/// A read whose thread has not come back; empty once it is answered.
pub(super) type Alone = Arc<Mutex<Option<Ask>>>;

impl State {
    /// Takes a read in, or gives it back where there are too many.
    pub(super) fn take_alone(&mut self, ask: Ask) -> Result<Alone, Ask> {
        if self.alone.len() >= ALONE_MAX {
            return Err(ask);
        }
        let alone = Arc::new(Mutex::new(Some(ask)));
        self.alone.push(alone.clone());
        Ok(alone)
    }
}

impl Inner {
    /// Starts the thread of a read.
    pub(super) fn read_alone(self: &Arc<Self>, alone: Alone) {
        self.deadlines.added();
        let (this, known) = (self.clone(), alone.clone());
        let read = move || this.answer_alone(&known);
        // Where no thread can be had the read is dropped, which answers it with an error.
        if let Err(e) = std::thread::Builder::new().name("read".to_owned()).spawn(read) {
            tracing::error!("cannot start a thread: {e}");
            self.strike_out(&alone);
        }
    }

    fn answer_alone(self: &Arc<Self>, alone: &Alone) {
        let asked = alone.lock().as_ref().map(|ask| (ask.file.clone(), ask.range.clone()));
        if let Some((file, range)) = asked {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            let read = || file.reader.read_at(range.start, &mut bytes);
            let outcome = catch_unwind(AssertUnwindSafe(read));
            let ask = alone.lock().take();
            // After a panic it is dropped, which answers it with an error.
            if let (Some(ask), Ok(outcome)) = (ask, outcome) {
                self.answer(ask, outcome.as_ref().map(|_| bytes.as_slice()));
            }
        }
        self.strike_out(alone);
        self.pump();
    }

    fn strike_out(&self, alone: &Alone) {
        self.state.lock().alone.retain(|other| !Arc::ptr_eq(other, alone));
    }

    /// Answers those that are overdue.
    pub(super) fn expire_alone(&self) {
        let Some(timeout) = self.timeout else { return };
        let all = self.state.lock().alone.clone();
        for alone in all {
            let late = alone.lock().take_if(|ask| ask.since.elapsed() >= timeout);
            if let Some(ask) = late {
                self.counters.source_timeouts.add(1);
                let error = too_late(&ask, "its bytes did not come within the deadline");
                self.answer(ask, Err(&error));
            }
        }
    }
}
