//! Moving bytes: a batch of reads, each from a place in a source to a place in memory.

mod pread;

use std::sync::Arc;

use crate::error::Result;
use crate::source::Source;

/// One read: `target.len()` bytes at `offset` of `source`.
pub struct Read<'a> {
    /// Where the bytes are.
    pub source: &'a Arc<Source>,
    /// Offset in the source.
    pub offset: u64,
    /// Where they go.
    pub target: &'a mut [u8],
}

/// What carries out reads.
#[derive(Clone, Copy, Debug, Default)]
pub enum Engine {
    /// One `pread(2)` after the other, on the calling thread.
    #[default]
    Pread,
}

impl Engine {
    /// Carries out all `reads`, and confirms afterwards that no source changed meanwhile.
    ///
    /// # Errors
    /// The first failure; the targets then hold bytes that mean nothing.
    pub fn run(self, reads: &mut [Read<'_>]) -> Result<()> {
        match self {
            Engine::Pread => pread::run(reads)?,
        }
        check_sources(reads)
    }
}

/// A read counts only if its file was still the same after it.
fn check_sources(reads: &[Read<'_>]) -> Result<()> {
    let mut last: Option<&Arc<Source>> = None;
    for read in reads {
        // Reads of one source mostly follow each other; a repeated check is only slower.
        if !last.is_some_and(|last| Arc::ptr_eq(last, read.source)) {
            read.source.check()?;
            last = Some(read.source);
        }
    }
    Ok(())
}
