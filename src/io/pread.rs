//! The engine that works everywhere: `pread(2)`.

use super::Read;
use crate::error::Result;

pub(super) fn run(reads: &mut [Read<'_>]) -> Result<()> {
    for read in reads {
        read.source.read_exact_at(read.target, read.offset)?;
    }
    Ok(())
}
