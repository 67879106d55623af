//! Reading what describes a checkpoint: headers, weight maps, references.

use std::path::Path;
use std::sync::Arc;

use crate::catalog::ShardHeader;
use crate::error::{Class, Error, Fault, Result};
use crate::format::manifest::{MANIFEST_LEN_MAX, Reference};
use crate::format::names;
use crate::format::safetensors::{self, Header, PREFIX_LEN, SLICE_LEN_MAX, SNIFF_LEN};
use crate::format::weight_map::WEIGHT_MAP_LEN_MAX;
use crate::source::Source;

/// Bytes read at a time from a header that is parsed as it is read.
const CHUNK_LEN: usize = 64 << 10;

/// Bytes of a text file that are looked at before the rest is read.
const TEXT_SNIFF_LEN: u64 = 4096;

/// An open shard and its header.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub(super) source: Arc<Source>,
    pub(super) shard: ShardHeader,
}

/// Opens the weight file at `path`, called `name` in its checkpoint in `folder`.
pub(super) fn open_shard(folder: &Path, name: &str, path: &Path) -> Result<Loaded> {
    // The user knows the file by its name in the folder, not by where a link leads.
    let named = |error| match error {
        Error::Io { action, source, .. } => Error::io(&folder.join(name), action, source),
        other => other,
    };
    let source = Source::open(path).map_err(named)?;
    let header = read_header(&source).map_err(named)?;
    let header = header.map_err(|fault| Error::refused(folder, fault.in_file(name)))?;
    source.check()?;
    let shard = ShardHeader { name: name.to_owned(), file_len: source.len(), header };
    Ok(Loaded { source, shard })
}

/// Reads the header of `source`.
///
/// # Errors
/// The outer error is a failed read, the inner one what is wrong with the header.
pub(super) fn read_header(source: &Arc<Source>) -> Result<std::result::Result<Header, Fault>> {
    let file_len = source.len();
    let mut sniff = vec![0; SNIFF_LEN.min(file_len as usize)];
    source.read_exact_at(&mut sniff, 0)?;
    let header_len = match safetensors::header_len(&sniff, file_len) {
        Ok(len) => len,
        Err(fault) => return Ok(Err(fault)),
    };
    if header_len > SLICE_LEN_MAX {
        let reader = ChunkReader { source, at: PREFIX_LEN, end: PREFIX_LEN + header_len };
        return Header::parse_stream(reader, header_len, file_len)
            .map_err(|e| Error::io(source.path(), "read", e));
    }
    let mut text = vec![0; header_len as usize];
    source.read_exact_at(&mut text, PREFIX_LEN)?;
    Ok(Header::parse(&text, file_len))
}

/// A part of a source as a stream.
struct ChunkReader<'a> {
    source: &'a Arc<Source>,
    at: u64,
    end: u64,
}

impl std::io::Read for ChunkReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let len = buf.len().min(CHUNK_LEN).min((self.end - self.at) as usize);
        self.source.read_exact_at(&mut buf[..len], self.at).map_err(std::io::Error::other)?;
        self.at += len as u64;
        Ok(len)
    }
}

/// Reads a whole text file of at most `max` bytes.
pub(super) fn read_text(path: &Path, max: u64) -> Result<Vec<u8>> {
    let source = Source::open(path)?;
    if source.len() > max {
        let len = source.len();
        let message = format!("has {len} bytes, more than the {max} that such a file may have");
        return Err(Error::refused(path, Fault::new(Class::IndexJson, message)));
    }
    let mut text = vec![0; TEXT_SNIFF_LEN.min(source.len()) as usize];
    source.read_exact_at(&mut text, 0)?;
    // What begins with anything else is no JSON object, however long it goes on.
    if !text.trim_ascii_start().is_empty() && !text.trim_ascii_start().starts_with(b"{") {
        let fault = Fault::new(Class::IndexJson, "expected a JSON object");
        return Err(Error::refused(path, fault));
    }
    let sniffed = text.len();
    text.resize(source.len() as usize, 0);
    source.read_exact_at(&mut text[sniffed..], sniffed as u64)?;
    source.check()?;
    Ok(text)
}

/// Reads the file that says what a checkpoint should hold: a safetensors file, a weight map or
/// a manifest.
pub(super) fn read_reference(path: &Path) -> Result<Reference> {
    let real = std::fs::canonicalize(path).map_err(|e| Error::io(path, "open", e))?;
    let refused = |fault: Fault| Error::refused(path, fault);
    if path.to_str().is_some_and(|path| path.ends_with(names::SUFFIX)) {
        let source = Source::open(&real)?;
        let mut sniff = vec![0; SNIFF_LEN.min(source.len() as usize)];
        source.read_exact_at(&mut sniff, 0)?;
        let header_len = safetensors::header_len(&sniff, source.len()).map_err(refused)?;
        let header = if source.len() == PREFIX_LEN + header_len {
            let mut bytes = vec![0; source.len() as usize];
            source.read_exact_at(&mut bytes, 0)?;
            Header::of_description(&bytes).map_err(refused)?
        } else {
            read_header(&source)?.map_err(refused)?
        };
        return Ok(Reference::from_header(header));
    }
    let text = read_text(&real, MANIFEST_LEN_MAX.max(WEIGHT_MAP_LEN_MAX))?;
    Reference::parse_json(&text).map_err(refused)
}
