//! The requests of the kernel that are not answered yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the requests that are not answered yet.
#[derive(Clone, Default)]
pub(crate) struct InFlight(Arc<AtomicUsize>);

/// One request that is not answered yet, until this is dropped.
pub(crate) struct Unanswered(Arc<AtomicUsize>);

impl InFlight {
    /// Counts one more request.
    pub(crate) fn begin(&self) -> Unanswered {
        self.0.fetch_add(1, Ordering::SeqCst);
        Unanswered(self.0.clone())
    }

    /// Number of requests without an answer.
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
