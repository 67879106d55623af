//! Messages to the thread that loads.

use std::ops::Range;
use std::time::Instant;

use super::ReadEvent;
use crate::catalog::ShardId;
use crate::error::Result;

/// Messages to the thread that loads.
pub(super) enum LoadMessage {
    /// A read has ended. Its bytes are in their place, or the read has failed.
    Read { chunk: usize, outcome: Result<Times> },
    /// There is more memory to which reads can write, or the allocation of more memory has failed.
    More(Result<()>),
}

/// Start of a read, arrival of its bytes, and start and end of their move.
pub(super) struct Times {
    pub(super) began: Instant,
    pub(super) came: Instant,
    pub(super) moved: Option<Range<Instant>>,
}

impl Times {
    pub(super) fn event(
        self,
        shard: ShardId,
        range: &Range<u64>,
        slot: usize,
        sent: Instant,
        started: Instant,
    ) -> ReadEvent {
        let since = |instant: Instant| instant.saturating_duration_since(started);
        ReadEvent {
            shard,
            range: range.clone(),
            slot,
            sent: since(sent),
            began: since(self.began),
            came: since(self.came),
            moved: self.moved.map(|moved| since(moved.start)..since(moved.end)),
        }
    }
}
