//! Formats that shards are read in: detecting the format of a file, and parsing the file into a
//! description.

use std::cell::RefCell;
use std::io::{self, Read};
use std::ops::Range;

use crate::error::{ErrorKind, Fault};

use super::deepspeed::UniversalFile;
use super::description::ShardDescription;
use super::foreign::{Evidence, FIRST_LEN, LAST_LEN};
use super::range_reader::RangeReader;
use super::safetensors::{Header, PREFIX_LEN, SLICE_LEN_MAX, SNIFF_LEN, header_len};
use super::{OutputFormat, TrainingState, bintensors, flat, names, pickle, tensorizer};

/// Number of bytes per read while a header is parsed as a stream.
const CHUNK_LEN: usize = 256 << 10;

words! {
    /// A format that shards are read in, in the order of precedence.
    #[derive(PartialOrd, Ord)]
    pub enum InputFormat {
        /// JSON header.
        Safetensors = "safetensors",
        /// Binary header.
        Bintensors = "bintensors",
        /// Binary header, and one more in front of each tensor.
        Tensorizer = "tensorizer",
        /// A pickle of `torch.save`, in a zip archive or in the form before torch 1.6.
        Torch = "torch",
    }
}

impl From<OutputFormat> for InputFormat {
    fn from(format: OutputFormat) -> InputFormat {
        match format {
            OutputFormat::Safetensors => InputFormat::Safetensors,
            OutputFormat::Bintensors => InputFormat::Bintensors,
        }
    }
}

/// A file whose format was detected, and which can be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detected {
    /// Its format.
    pub format: InputFormat,
    /// Length of its description in bytes. `parse` holds most of these bytes in memory.
    pub description_len: u64,
    /// Whether its tensors are encrypted, so that a key or passphrase is needed.
    pub is_encrypted: bool,
}

/// A parsed file, or the fault of the file. The outer error is a failed read.
type ParseResult<T> = io::Result<Result<T, Fault>>;

impl InputFormat {
    /// The format that the name of a file indicates. `None` if the name indicates no format, such as the names of
    /// blobs in a hub cache.
    pub fn of_name(name: &str) -> Option<InputFormat> {
        if names::is_bintensors(name) {
            return Some(InputFormat::Bintensors);
        }
        if names::is_tensorizer(name) {
            return Some(InputFormat::Tensorizer);
        }
        names::is_safetensors(name).then_some(InputFormat::Safetensors)
    }

    /// The format that the name of a weight file indicates. Safetensors if the name indicates no
    /// format.
    pub fn of_weights(name: &str) -> InputFormat {
        let torch = names::is_torch(name).then_some(InputFormat::Torch);
        InputFormat::of_name(name).or(torch).unwrap_or(InputFormat::Safetensors)
    }

    /// The format of the file called `name`, by its name and its first bytes.
    ///
    /// # Errors
    /// The outer error is a failed read. The inner error says why the file is no shard.
    pub fn detect(name: &str, reader: &mut dyn RangeReader) -> ParseResult<Detected> {
        let file = reader.start()..reader.file_len();
        let sniff_len = (SNIFF_LEN as u64).max(tensorizer::HEAD_LEN);
        let mut sniff = vec![0; sniff_len.min(file.end.saturating_sub(file.start)) as usize];
        reader.read_exact_at(file.start, &mut sniff)?;
        if is_torch(name, &sniff, reader)? {
            let len = pickle::description_len(reader)?;
            return Ok(len.map(|description_len| Detected {
                format: InputFormat::Torch,
                description_len,
                is_encrypted: false,
            }));
        }
        match detect(InputFormat::of_name(name), &sniff, &file) {
            Err(fault) => Ok(Err(explained(name, reader, fault)?)),
            detected => Ok(detected),
        }
    }
}

/// Whether the file called `name`, which begins with `sniff`, is read as a file of `torch.save`. The name must
/// indicate no other format. Also the first entry of the archive must be the pickle, or the name must end in `.pt` or
/// `.pth`.
fn is_torch(name: &str, sniff: &[u8], reader: &mut dyn RangeReader) -> io::Result<bool> {
    let is_free = InputFormat::of_name(name).is_none() && !name.ends_with(".distcp");
    if !is_free || reader.start() > 0 || !pickle::may_be_torch(sniff) {
        return Ok(false);
    }
    let mut first = vec![0; FIRST_LEN.min(reader.file_len()) as usize];
    reader.read_exact_at(0, &mut first)?;
    Ok(pickle::is_torch(&first) || name.ends_with(".pt") || name.ends_with(".pth"))
}

/// The fault of the file called `name`. If the kind of file is known, the fault names the kind.
fn explained(name: &str, reader: &mut dyn RangeReader, fault: Fault) -> io::Result<Fault> {
    let (start, len) = (reader.start(), reader.file_len());
    if start > 0 {
        return Ok(fault);
    }
    let mut read = |range: Range<u64>| {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        reader.read_exact_at(range.start, &mut bytes).map(|()| bytes)
    };
    let first = read(0..FIRST_LEN.min(len))?;
    let last = read(len.saturating_sub(LAST_LEN)..len)?;
    let evidence = Evidence { name, first: &first, last: &last, len };
    Ok(match evidence.foreign() {
        Some(foreign) => foreign.fault(&evidence, fault),
        None => fault,
    })
}

/// The format of the shard in the bytes `file` of a file, by the format `named` that the file name indicates, and by
/// the first bytes `sniff`.
fn detect(named: Option<InputFormat>, sniff: &[u8], file: &Range<u64>) -> Result<Detected, Fault> {
    let file_len = file.end;
    let is_tensorizer = tensorizer::is_tensorizer(sniff);
    let format = match named {
        Some(InputFormat::Safetensors | InputFormat::Bintensors) if is_tensorizer => {
            let message = "is a tensorizer file by its first bytes; call it `*.tensors`";
            return Err(ErrorKind::HeaderDecode.fault(message));
        }
        Some(format) => format,
        None if is_tensorizer => InputFormat::Tensorizer,
        None => InputFormat::Safetensors,
    };
    if format != InputFormat::Tensorizer && file.start > 0 {
        return Err(ErrorKind::HeaderDecode.fault(format!(
            "does not begin with `|TZR|` at byte {}; only tensorizer files are read behind byte 0",
            file.start
        )));
    }
    let description_len = match format {
        InputFormat::Safetensors | InputFormat::Bintensors => {
            PREFIX_LEN + header_len(sniff, file_len)?
        }
        InputFormat::Tensorizer | InputFormat::Torch => tensorizer::description_len(sniff, file)?,
    };
    let is_encrypted = format == InputFormat::Tensorizer && tensorizer::is_encrypted(sniff, file);
    Ok(Detected { format, description_len, is_encrypted })
}

impl Detected {
    /// Parses the file that was detected, which is called `name`. `state` applies to pickles only.
    ///
    /// # Errors
    /// The outer error is a failed read, the inner error is the fault of the file.
    pub fn parse(
        &self,
        name: &str,
        reader: &mut dyn RangeReader,
        state: TrainingState,
    ) -> ParseResult<ShardDescription> {
        match self.parse_valid(name, reader, state)? {
            // The content has shown that this is a file of torch, so the fault needs no
            // explanation.
            Err(fault) if self.format == InputFormat::Torch => Ok(Err(fault)),
            Err(fault) => Ok(Err(explained(name, reader, fault)?)),
            parsed => Ok(parsed),
        }
    }

    fn parse_valid(
        &self,
        name: &str,
        reader: &mut dyn RangeReader,
        state: TrainingState,
    ) -> ParseResult<ShardDescription> {
        let is_safetensors = match self.format {
            InputFormat::Safetensors => true,
            InputFormat::Bintensors => false,
            InputFormat::Tensorizer => return tensorizer::parse(reader),
            InputFormat::Torch if UniversalFile::of(name).is_some() => {
                return pickle::parse_universal(reader);
            }
            InputFormat::Torch => return pickle::parse(reader, state),
        };
        let (end, file_len) = (self.description_len, reader.file_len());
        let header_len = end - PREFIX_LEN;
        if header_len > SLICE_LEN_MAX {
            let reader = RefCell::new(reader);
            let open = || ChunkReader { reader: &reader, offset: PREFIX_LEN, end };
            let parsed = if is_safetensors {
                Header::parse_stream(open(), header_len, file_len)?
            } else {
                bintensors::parse_stream(open, header_len, file_len)?
            };
            return Ok(parsed.map(ShardDescription::from));
        }
        let mut bytes = vec![0; end as usize];
        reader.read_exact_at(0, &mut bytes)?;
        let text = &bytes[PREFIX_LEN as usize..];
        if !is_safetensors {
            return Ok(bintensors::parse(text, file_len).map(ShardDescription::from));
        }
        Ok(match flat::parse(text, file_len) {
            Some(description) => Ok(description),
            None => Header::parse(text, file_len).map(ShardDescription::from),
        })
    }
}

/// The bytes of a file from `offset` to `end`, as a stream.
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

/// A file in memory.
impl RangeReader for &[u8] {
    fn file_len(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = (offset as usize).checked_add(buf.len());
        let bytes = end.and_then(|end| self.get(offset as usize..end));
        buf.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}
