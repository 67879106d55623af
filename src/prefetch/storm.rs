//! Finds tensors that are requested page by page. A program that maps the file causes such
//! requests.

use std::collections::VecDeque;
use std::ops::Range;

use super::Request;
use crate::order::TensorMap;

/// A storm of page faults: `STORM_READS` reads of a few pages in one tensor within `STORM_TIME`.
const STORM_READS: u32 = 32;
/// Time limit of a storm, in milliseconds.
const STORM_TIME: u64 = 250;
/// Time in milliseconds for which a tensor is not pushed into the page cache again.
const PUSHED_TIME: u64 = 10_000;
/// Maximum number of pushed tensors that are remembered.
const PUSHED_MAX: usize = 16;
/// Maximum number of bytes of a tensor that are pushed at a time.
pub(super) const PUSH_LEN_MAX: u64 = 1 << 30;
/// Largest read that counts for a storm.
const STORM_READ_LEN: u64 = 16 << 10;

/// Small reads of one tensor, close together in time.
#[derive(Clone, Debug)]
struct Storm {
    tensor: Range<u64>,
    since: u64,
    reads: u32,
}

#[derive(Debug, Default)]
pub(super) struct Storms {
    storm: Option<Storm>,
    /// Tensors, or parts of long tensors, that were pushed, each with the time of the push.
    pushed: VecDeque<(Range<u64>, u64)>,
}

impl Storms {
    /// Returns the tensor that is requested page by page, once this is noticed. If the tensor is
    /// longer than `PUSH_LEN_MAX`, returns the part of this length that contains the request.
    pub(super) fn push(
        &mut self,
        request: &Request,
        tensors: &dyn TensorMap,
    ) -> Option<Range<u64>> {
        let Range { start, end } = request.range;
        if end - start > STORM_READ_LEN {
            return None;
        }
        match &mut self.storm {
            Some(storm)
                if storm.tensor.contains(&start)
                    && request.now.saturating_sub(storm.since) <= STORM_TIME =>
            {
                storm.reads += 1;
                if storm.reads == STORM_READS {
                    let Range { start: first, end } = storm.tensor;
                    let first = start - (start - first) % PUSH_LEN_MAX;
                    let part = first..end.min(first.saturating_add(PUSH_LEN_MAX));
                    return self.push_once(part, request.now);
                }
            }
            storm => {
                let tensor = tensors.at(start).range;
                *storm = Some(Storm { tensor, since: request.now, reads: 1 });
            }
        }
        None
    }

    /// Returns `part` of a tensor, unless this part was pushed recently and may still be arriving.
    fn push_once(&mut self, part: Range<u64>, now: u64) -> Option<Range<u64>> {
        self.pushed.retain(|(_, at)| now.saturating_sub(*at) < PUSHED_TIME);
        if self.pushed.iter().any(|(pushed, _)| *pushed == part) {
            return None;
        }
        if self.pushed.len() == PUSHED_MAX {
            self.pushed.pop_front();
        }
        self.pushed.push_back((part.clone(), now));
        Some(part)
    }
}
