//! Formats that shards are read in: from the bytes of a file to its description.

use std::cell::RefCell;
use std::io::{self, Read};

use crate::error::Fault;

use super::description::ShardDescription;
use super::safetensors::{Header, PREFIX_LEN, SLICE_LEN_MAX, SNIFF_LEN, header_len};
use super::{bintensors, flat, names};

/// Bytes per read of a header that is parsed while it is read.
const CHUNK_LEN: usize = 256 << 10;

/// A file that is read by ranges.
pub trait RangeReader {
    /// Length of the file in bytes.
    fn file_len(&self) -> u64;

    /// Fills `buf` with the bytes of the file from `offset` on.
    ///
    /// # Errors
    /// A failed read, also past the end of the file.
    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
}

/// A format that shards are read in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputFormat {
    /// JSON header.
    Safetensors,
    /// Binary header.
    Bintensors,
}

/// A shard that may be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detected {
    /// Its format.
    pub format: InputFormat,
    /// Bytes of its description, most of which `parse` holds in memory.
    pub description_len: u64,
}

/// A parsed file, or what is wrong with it. The outer error is a failed read.
type ParseResult<T> = io::Result<Result<T, Fault>>;

impl InputFormat {
    /// The format of a file called `name`. Users name files of other names too, such as the blobs
    /// of a hub cache: those are safetensors.
    pub fn of_name(name: &str) -> InputFormat {
        match names::is_bintensors(name) {
            true => InputFormat::Bintensors,
            false => InputFormat::Safetensors,
        }
    }

    /// The format of the file called `name`, by its name and its first bytes.
    ///
    /// # Errors
    /// The outer error is a failed read, the inner one says why the file is no shard.
    pub fn detect(name: &str, reader: &mut dyn RangeReader) -> ParseResult<Detected> {
        let file_len = reader.file_len();
        let mut sniff = vec![0; SNIFF_LEN.min(file_len as usize)];
        reader.read_exact_at(0, &mut sniff)?;
        Ok(header_len(&sniff, file_len).map(|header_len| Detected {
            format: InputFormat::of_name(name),
            description_len: PREFIX_LEN + header_len,
        }))
    }
}

impl Detected {
    /// Parses the file that was detected.
    ///
    /// # Errors
    /// The outer error is a failed read, the inner one is the fault of the file.
    pub fn parse(&self, reader: &mut dyn RangeReader) -> ParseResult<ShardDescription> {
        let (end, file_len) = (self.description_len, reader.file_len());
        let header_len = end - PREFIX_LEN;
        if header_len > SLICE_LEN_MAX {
            let reader = RefCell::new(reader);
            let open = || ChunkReader { reader: &reader, offset: PREFIX_LEN, end };
            let parsed = match self.format {
                InputFormat::Safetensors => Header::parse_stream(open(), header_len, file_len)?,
                InputFormat::Bintensors => bintensors::parse_stream(open, header_len, file_len)?,
            };
            return Ok(parsed.map(ShardDescription::from));
        }
        let mut bytes = vec![0; end as usize];
        reader.read_exact_at(0, &mut bytes)?;
        let text = &bytes[PREFIX_LEN as usize..];
        Ok(match self.format {
            InputFormat::Safetensors => match flat::parse(text, file_len) {
                Some(description) => Ok(description),
                None => Header::parse(text, file_len).map(ShardDescription::from),
            },
            InputFormat::Bintensors => {
                bintensors::parse(text, file_len).map(ShardDescription::from)
            }
        })
    }
}

/// Bytes of a file, from `offset` to `end`, as a stream.
struct ChunkReader<'a, 'b> {
    reader: &'a RefCell<&'b mut dyn RangeReader>,
    offset: u64,
    end: u64,
}

impl Read for ChunkReader<'_, '_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = buf.len().min(CHUNK_LEN).min((self.end - self.offset) as usize);
        self.reader.borrow_mut().read_exact_at(self.offset, &mut buf[..len])?;
        self.offset += len as u64;
        Ok(len)
    }
}
