//! Reading what describes a checkpoint: headers, weight maps, references.

use std::path::Path;
use std::sync::Arc;

use crate::catalog::ShardHeader;
use crate::error::{Class, Error, Fault, Result};
use crate::format::manifest::{MANIFEST_LEN_MAX, Reference};
use crate::format::safetensors::{self, Header, PREFIX_LEN, SLICE_LEN_MAX, SNIFF_LEN};
use crate::format::weight_map::WEIGHT_MAP_LEN_MAX;
use crate::format::{Format, bintensors, names};
use crate::hash::{Digest, Hasher};
use crate::source::Source;

/// Bytes read at a time from a header that is parsed as it is read.
const CHUNK_LEN: usize = 256 << 10;

/// Bytes of a text file that are looked at before the rest is read.
const TEXT_SNIFF_LEN: u64 = 4096;

/// An open shard and its header.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub(super) source: Arc<Source>,
    pub(super) shard: ShardHeader,
    /// Hash of the bytes before the data.
    pub(super) head: Digest,
}

/// Opens the weight file at `path`, called `name` in its checkpoint in `folder`.
pub(super) fn open_shard(folder: &Path, name: &str, path: &Path) -> Result<Loaded> {
    // The user knows the file by its name in the folder, not by where a link leads.
    let named = |error| match error {
        Error::Io { action, source, .. } => Error::io(&folder.join(name), action, source),
        other => other,
    };
    let source = Source::open(path).map_err(named)?;
    let header = read_header(&source, format_of(name)).map_err(named)?;
    let (header, head) = header.map_err(|fault| Error::refused(folder, fault.in_file(name)))?;
    source.check()?;
    let shard = ShardHeader { name: name.to_owned(), file_len: source.len(), header };
    Ok(Loaded { source, shard, head })
}

/// Reads the header of `source`, which is in `format`, and hashes the bytes before its data.
///
/// # Errors
/// The outer error is a failed read, the inner one what is wrong with the header.
fn read_header(
    source: &Arc<Source>,
    format: Format,
) -> Result<std::result::Result<(Header, Digest), Fault>> {
    let file_len = source.len();
    let mut sniff = vec![0; SNIFF_LEN.min(file_len as usize)];
    source.read_exact_at(&mut sniff, 0)?;
    let header_len = match safetensors::header_len(&sniff, file_len) {
        Ok(len) => len,
        Err(fault) => return Ok(Err(fault)),
    };
    if header_len > SLICE_LEN_MAX {
        let open = || ChunkReader { source, at: PREFIX_LEN, end: PREFIX_LEN + header_len };
        let header = match format {
            Format::Safetensors => Header::parse_stream(open(), header_len, file_len),
            Format::Bintensors => bintensors::parse_stream(open, header_len, file_len),
        };
        let header = header.map_err(|e| Error::io(source.path(), "read", e))?;
        let Ok(header) = header else { return Ok(header.map(|header| (header, Digest::of(&[])))) };
        return Ok(Ok((header, hash_head(source, PREFIX_LEN + header_len)?)));
    }
    let mut head = vec![0; (PREFIX_LEN + header_len) as usize];
    source.read_exact_at(&mut head, 0)?;
    let text = &head[PREFIX_LEN as usize..];
    let header = match format {
        Format::Safetensors => Header::parse(text, file_len),
        Format::Bintensors => bintensors::parse(text, file_len),
    };
    Ok(header.map(|header| (header, Digest::of(&head))))
}

/// The hash of the first `len` bytes of `source`.
pub(super) fn hash_head(source: &Arc<Source>, len: u64) -> Result<Digest> {
    let mut hasher = Hasher::new();
    let mut buf = vec![0; CHUNK_LEN.min(len as usize)];
    let mut at = 0;
    while at < len {
        let chunk = &mut buf[..CHUNK_LEN.min((len - at) as usize)];
        source.read_exact_at(chunk, at)?;
        hasher.update(chunk);
        at += chunk.len() as u64;
    }
    Ok(hasher.finish())
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

/// The format of the weight file `name`. One of another name was named by the user, as blobs of
/// a hub cache are.
fn format_of(name: &str) -> Format {
    Format::of_name(name).unwrap_or_default()
}

/// Reads the file that says what a checkpoint should hold: a safetensors or bintensors file, a
/// weight map or a manifest.
pub(super) fn read_reference(path: &Path) -> Result<Reference> {
    let real = std::fs::canonicalize(path).map_err(|e| Error::io(path, "open", e))?;
    let refused = |fault: Fault| Error::refused(path, fault);
    if path.to_str().and_then(Format::of_name) == Some(Format::Bintensors) {
        let source = Source::open(&real)?;
        let (header, _) = read_header(&source, Format::Bintensors)?.map_err(refused)?;
        return Ok(Reference::from_header(header));
    }
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
            read_header(&source, Format::Safetensors)?.map_err(refused)?.0
        };
        return Ok(Reference::from_header(header));
    }
    let text = read_text(&real, MANIFEST_LEN_MAX.max(WEIGHT_MAP_LEN_MAX))?;
    Reference::parse_json(&text).map_err(refused)
}
