//! Reads without blocks, each on a thread of its own. They need too much memory for blocks, because they are
//! large or because thousands of shards have a part in them. Only a few of them run at a time. They have a
//! deadline like all reads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::queue::{QueuedRead, WaitReason};
use super::{CacheInner, ReadRequest, State, too_late};
use crate::io::SourceKey;
use crate::sync::{Mutex, MutexGuard};

/// Maximum number of reads without blocks that run at a time. A read that was answered with an error counts until its
/// thread no longer waits for the source.
const UNCACHED_MAX: usize = 4;

/// Maximum number of reads without blocks whose first byte is in the same source. A source that stalls thus leaves some
/// of these reads to other sources.
const UNCACHED_OF_SOURCE_MAX: usize = 3;

/// A read without blocks whose thread has not ended.
#[derive(Clone)]
pub(super) struct UncachedRead {
    /// `None` once the read is answered.
    request: Arc<Mutex<Option<ReadRequest>>>,
    /// The source of the first byte.
    source: Option<SourceKey>,
}

impl UncachedRead {
    /// Adds a read to `others`. If there are too many such reads in total, or of the source of this read, returns the
    /// request instead.
    pub(super) fn take_in(
        others: &mut Vec<UncachedRead>,
        request: ReadRequest,
    ) -> Result<UncachedRead, ReadRequest> {
        let source = request.file.reader.first_source(&request.range).map(SourceKey::of);
        let of_source = others.iter().filter(|other| other.source == source).count();
        if others.len() >= UNCACHED_MAX || source.is_some() && of_source >= UNCACHED_OF_SOURCE_MAX {
            return Err(request);
        }
        let read = UncachedRead { request: Arc::new(Mutex::new(Some(request))), source };
        others.push(read.clone());
        Ok(read)
    }

    /// Begins a read and starts its thread. If there are too many such reads, returns the read, so that it waits in the
    /// queue.
    pub(super) fn begin(
        cache: &Arc<CacheInner>,
        mut state: MutexGuard<'_, State>,
        request: ReadRequest,
    ) -> Option<QueuedRead> {
        let taken = UncachedRead::take_in(&mut state.uncached, request);
        drop(state);
        let refused = taken.map(|uncached| uncached.start(cache)).err();
        refused.map(|request| QueuedRead { request, reason: WaitReason::Fairness })
    }

    /// Starts the thread of the read.
    fn start(self, cache: &Arc<CacheInner>) {
        cache.deadlines.added();
        let (of, this) = (cache.clone(), self.clone());
        let read = move || this.carry_out(&of);
        // If no thread can be started, the read is dropped, and the drop answers it with an error.
        if let Err(e) = std::thread::Builder::new().name("read".to_owned()).spawn(read) {
            tracing::error!("cannot start a thread: {e}");
            self.strike_out(cache);
        }
    }

    fn carry_out(&self, cache: &Arc<CacheInner>) {
        let asked = self
            .request
            .lock()
            .as_ref()
            .map(|request| (request.file.clone(), request.range.clone()));
        if let Some((file, range)) = asked {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            let read = || cache.windows.read_at(&file.reader, range.start, &mut bytes);
            let outcome = catch_unwind(AssertUnwindSafe(read));
            let request = self.request.lock().take();
            // After a panic, the read is dropped, and the drop answers it with an error.
            if let (Some(request), Ok(outcome)) = (request, outcome) {
                cache.answer(request, outcome.as_ref().map(|_| bytes.as_slice()));
            }
        }
        self.strike_out(cache);
        cache.pump();
    }

    fn strike_out(&self, cache: &CacheInner) {
        cache.state.lock().uncached.retain(|other| !Arc::ptr_eq(&other.request, &self.request));
    }

    /// Answers the read with an error if it is overdue.
    pub(super) fn expire(&self, cache: &CacheInner) {
        let Some(timeout) = cache.timeout else { return };
        let late = self.request.lock().take_if(|request| request.since.elapsed() >= timeout);
        if let Some(request) = late {
            cache.counters.source_timeouts.add(1);
            let error = too_late(&request, "its bytes did not come within the deadline");
            cache.answer(request, Err(&error));
        }
    }
}
