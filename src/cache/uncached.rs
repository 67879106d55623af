//! Reads without blocks, each on a thread of its own: reads that need too much memory because they
//! are large, or because thousands of shards have a part in them. Only a few run at a time, with a
//! deadline like all others.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{CacheInner, ReadRequest, State, too_late};
use crate::sync::Mutex;

/// Most such reads, including those whose thread still waits for the source after the answer.
const UNCACHED_MAX: usize = 4;

/// A read whose thread has not ended; `None` once it is answered.
pub(super) type UncachedRead = Arc<Mutex<Option<ReadRequest>>>;

impl State {
    /// Takes a read in, or returns it if there are too many.
    pub(super) fn take_uncached(
        &mut self,
        request: ReadRequest,
    ) -> Result<UncachedRead, ReadRequest> {
        if self.uncached.len() >= UNCACHED_MAX {
            return Err(request);
        }
        let uncached = Arc::new(Mutex::new(Some(request)));
        self.uncached.push(uncached.clone());
        Ok(uncached)
    }
}

impl CacheInner {
    /// Starts the thread of a read.
    pub(super) fn read_uncached(self: &Arc<Self>, uncached: UncachedRead) {
        self.deadlines.added();
        let (this, known) = (self.clone(), uncached.clone());
        let read = move || this.answer_uncached(&known);
        // If no thread can be started, the read is dropped, which answers it with an error.
        if let Err(e) = std::thread::Builder::new().name("read".to_owned()).spawn(read) {
            tracing::error!("cannot start a thread: {e}");
            self.strike_out(&uncached);
        }
    }

    fn answer_uncached(self: &Arc<Self>, uncached: &UncachedRead) {
        let asked =
            uncached.lock().as_ref().map(|request| (request.file.clone(), request.range.clone()));
        if let Some((file, range)) = asked {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            let read = || file.reader.read_at(range.start, &mut bytes);
            let outcome = catch_unwind(AssertUnwindSafe(read));
            let request = uncached.lock().take();
            // After a panic the read is dropped, which answers it with an error.
            if let (Some(request), Ok(outcome)) = (request, outcome) {
                self.answer(request, outcome.as_ref().map(|_| bytes.as_slice()));
            }
        }
        self.strike_out(uncached);
        self.pump();
    }

    fn strike_out(&self, uncached: &UncachedRead) {
        self.state.lock().uncached.retain(|other| !Arc::ptr_eq(other, uncached));
    }

    /// Fails the reads that are overdue.
    pub(super) fn expire_uncached(&self) {
        let Some(timeout) = self.timeout else { return };
        let all = self.state.lock().uncached.clone();
        for uncached in all {
            let late = uncached.lock().take_if(|request| request.since.elapsed() >= timeout);
            if let Some(request) = late {
                self.counters.source_timeouts.add(1);
                let error = too_late(&request, "its bytes did not come within the deadline");
                self.answer(request, Err(&error));
            }
        }
    }
}
