//! Reads of a virtual file: the extents of a layout, turned into reads of its sources.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gather::{Part, Runs};
use crate::io::{Read, read_all};
use crate::layout::{Extent, Layout};
use crate::source::Source;

/// Most bytes read at a time, which bounds the memory that gathering takes.
const WINDOW_LEN_MAX: u64 = 8 << 20;

/// An open virtual file.
#[derive(Debug)]
pub struct Reader {
    layout: Arc<Layout>,
    /// By shard number.
    sources: Vec<Arc<Source>>,
}

/// A read that goes straight to its place: offset in the window, and what to read.
struct Direct<'a> {
    at: u64,
    source: &'a Arc<Source>,
    range: Range<u64>,
}

/// A read whose bytes are spread over the window afterwards.
struct Spread<'a> {
    tensor_at: u64,
    source: &'a Arc<Source>,
    range: Range<u64>,
    runs: &'a Runs,
    part: Part,
}

impl Reader {
    /// A reader of all of `checkpoint` as one file.
    ///
    /// # Errors
    /// Those of `Checkpoint::layout`.
    pub fn open(checkpoint: &Checkpoint) -> Result<Reader> {
        let sources = checkpoint.sources().to_vec();
        Ok(Reader::new(checkpoint.layout()?, sources))
    }

    /// A reader of `layout`, whose shards are `sources` in the catalog's order.
    pub fn new(layout: Arc<Layout>, sources: Vec<Arc<Source>>) -> Reader {
        Reader { layout, sources }
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The sources, in the catalog's order.
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// Reads bytes of the virtual file from `offset` on into `buf`.
    ///
    /// Returns how many: fewer than `buf.len()` only at the end of the file.
    /// # Errors
    /// Those of the sources; `buf` then holds bytes that mean nothing.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let len = (buf.len() as u64).min(self.layout.len().saturating_sub(offset));
        let mut rest = &mut buf[..len as usize];
        let mut at = offset;
        while !rest.is_empty() {
            let (window, after) = rest.split_at_mut(rest.len().min(WINDOW_LEN_MAX as usize));
            self.read_window(at, window)?;
            at += window.len() as u64;
            rest = after;
        }
        Ok(len as usize)
    }

    /// Fills `window`, which lies inside the file at `start`.
    fn read_window(&self, start: u64, window: &mut [u8]) -> Result<()> {
        let mut direct = Vec::new();
        let mut spread = Vec::new();
        let end = start + window.len() as u64;
        self.layout.extents(start..end, &mut |extent| match extent {
            Extent::Header { at, bytes } => {
                window[(at - start) as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            Extent::Run { at, shard, range } => {
                let source = &self.sources[shard.0 as usize];
                direct.push(Direct { at: at - start, source, range });
            }
            Extent::Scatter { tensor_at, shard, range, runs, part } => {
                let source = &self.sources[shard.0 as usize];
                spread.push(Spread { tensor_at, source, range, runs, part });
            }
        });
        let scratch_len: u64 = spread.iter().map(|s| s.range.end - s.range.start).sum();
        let mut scratch = vec![0; scratch_len as usize];
        let mut reads = targets(&mut direct, window);
        let mut free = scratch.as_mut_slice();
        for Spread { source, range, .. } in &spread {
            let (target, rest) = free.split_at_mut((range.end - range.start) as usize);
            reads.push(Read { source, offset: range.start, target });
            free = rest;
        }
        read_all(&mut reads)?;
        drop(reads);
        let mut rest = scratch.as_slice();
        for Spread { tensor_at, range, runs, part, .. } in &spread {
            let (bytes, after) = rest.split_at((range.end - range.start) as usize);
            rest = after;
            // The part of the tensor that the window holds, counted from the tensor's start.
            let (target, target_start) = if *tensor_at >= start {
                (&mut window[(tensor_at - start) as usize..], 0)
            } else {
                (&mut window[..], start - tensor_at)
            };
            runs.scatter(part, bytes, target, target_start);
        }
        Ok(())
    }
}

/// The reads of `direct`, each with its own part of `window`; they do not overlap.
fn targets<'a>(direct: &mut [Direct<'a>], window: &'a mut [u8]) -> Vec<Read<'a>> {
    direct.sort_by_key(|read| read.at);
    let mut reads = Vec::with_capacity(direct.len());
    let (mut rest, mut at) = (window, 0);
    for Direct { at: wanted, source, range } in direct {
        let (_, from) = std::mem::take(&mut rest).split_at_mut((*wanted - at) as usize);
        let (target, after) = from.split_at_mut((range.end - range.start) as usize);
        at = *wanted + target.len() as u64;
        rest = after;
        reads.push(Read { source, offset: range.start, target });
    }
    reads
}
