//! The backend that works everywhere: `pread(2)`, one call per thread.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::Filled;
use super::lane::{Job, Lane};
use super::transfer::{Next, Transfer};
use crate::error::Result;

/// Carries out one fetch, however long the kernel takes.
pub(super) fn begin(lane: &Arc<Lane>, job: Job) -> Result<Filled> {
    carry(lane, Transfer::begin(job, lane.settings.direct)?)
}

/// Likewise what was begun already.
pub(super) fn carry(lane: &Arc<Lane>, mut transfer: Transfer) -> Result<Filled> {
    loop {
        let (file, offset, target) = transfer.next();
        let result = file.read_at(target, offset);
        lane.count_read(&transfer, &result);
        match transfer.advance(result) {
            Next::Read => {}
            Next::End(result) => return result.and_then(|()| transfer.finish()),
        }
    }
}
