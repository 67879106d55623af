//! Finds the zip archives that follow each other in a file. torch writes the items of a `.distcp` file as such
//! archives. A file of `torch.save` is one archive.

use std::io;
use std::ops::Range;

use super::ReadResult;
use super::zip::{Archive, archive_start};
use crate::error::ErrorKind;
use crate::format::range_reader::RangeReader;
use crate::format::tensorizer::{HashedTensor, KeptHashes};

/// Length of a block in bytes, and maximum number of blocks in memory. The blocks at both ends of
/// an archive fit into them.
const BLOCK_LEN: u64 = 32 << 10;
const BLOCKS_MAX: usize = 4;

/// The places of the archives at the end of the file, the first archive first. Also the offset at which the first of
/// these archives begins. It is 0 if the whole file consists of archives.
///
/// The end record of an archive says where the archive begins. An archive may contain other archives as its data, so
/// the archives are found from the end of the file.
pub(super) fn archives_at_end(reader: &mut dyn RangeReader) -> ReadResult<(Vec<Range<u64>>, u64)> {
    let mut end = reader.file_len();
    let mut found = Vec::new();
    while end > 0 {
        let Some(start) = archive_start(reader, end)? else { break };
        found.push(start..end);
        end = start;
    }
    found.reverse();
    Ok((found, end))
}

/// The entries with a CRC of all archives of a file, in the order of their bytes. The archives have to fill the whole
/// file, because bytes in front of the first archive could not be compared with a CRC.
pub(super) fn hashed_entries(reader: &mut dyn RangeReader) -> ReadResult<Vec<HashedTensor>> {
    let mut reader = BlockReader::new(reader);
    let (ranges, begin) = archives_at_end(&mut reader)?;
    if begin > 0 {
        return Err(ErrorKind::HeaderDecode.stop(format!(
            "its bytes 0 to {begin} do not end as a zip archive, so that no CRC can be compared in them; \
             save or fetch it again"
        )));
    }
    let mut hashed = Vec::new();
    for range in ranges {
        add_entries(&mut reader, range, &mut hashed)?;
    }
    Ok(hashed)
}

/// Adds the entries with a CRC of the archive in `range`, in the order of their bytes.
fn add_entries(
    reader: &mut dyn RangeReader,
    range: Range<u64>,
    hashed: &mut Vec<HashedTensor>,
) -> ReadResult<()> {
    let archive = Archive::read(reader, range)?;
    for name in archive.names_in_order() {
        let Some(crc) = archive.crc_of(name) else { continue };
        let Some(range) = archive.data(reader, name)?.filter(|range| !range.is_empty()) else {
            continue;
        };
        hashed.push(HashedTensor {
            name: archive.whole_name(name),
            range,
            left_out: 0..0,
            hashes: KeptHashes::of_crc32(crc),
            is_entry: true,
        });
    }
    Ok(())
}

/// Reads a file in blocks, and keeps the blocks that were read last.
pub(super) struct BlockReader<'r> {
    reader: &'r mut dyn RangeReader,
    /// Offset and bytes of each block. The block that was read last comes last.
    blocks: Vec<(u64, Vec<u8>)>,
}

impl<'r> BlockReader<'r> {
    pub(super) fn new(reader: &'r mut dyn RangeReader) -> BlockReader<'r> {
        BlockReader { reader, blocks: Vec::new() }
    }

    /// The block that begins at `start`.
    fn block(&mut self, start: u64) -> io::Result<&[u8]> {
        let known = self.blocks.iter().position(|(own, _)| *own == start);
        let at = match known {
            Some(at) => at,
            None => {
                let len = BLOCK_LEN.min(self.reader.file_len() - start);
                let mut bytes = vec![0; len as usize];
                self.reader.read_exact_at(start, &mut bytes)?;
                if self.blocks.len() >= BLOCKS_MAX {
                    self.blocks.remove(0);
                }
                self.blocks.push((start, bytes));
                self.blocks.len() - 1
            }
        };
        Ok(&self.blocks[at].1)
    }
}

impl RangeReader for BlockReader<'_> {
    fn file_len(&self) -> u64 {
        self.reader.file_len()
    }

    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset.saturating_add(buf.len() as u64);
        if end > self.reader.file_len() || buf.len() as u64 > BLOCK_LEN {
            return self.reader.read_exact_at(offset, buf);
        }
        let mut at = offset;
        while at < end {
            let start = at - at % BLOCK_LEN;
            let block = self.block(start)?;
            let within = (at - start) as usize..(end.min(start + BLOCK_LEN) - start) as usize;
            let place = (at - offset) as usize;
            buf[place..place + within.len()].copy_from_slice(&block[within.clone()]);
            at += within.len() as u64;
        }
        Ok(())
    }
}
