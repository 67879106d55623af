//! Reading what describes a checkpoint: headers, weight maps, references.

use std::path::Path;
use std::sync::Arc;

use crate::catalog::{Head, Heads, ShardHeader};
use crate::error::{Error, ErrorKind, Fault, Result};
use crate::format::flat::Flat;
use crate::format::manifest::{MANIFEST_LEN_MAX, Reference};
use crate::format::safetensors::{self, Header, PREFIX_LEN, SLICE_LEN_MAX, SNIFF_LEN};
use crate::format::weight_map::WEIGHT_MAP_LEN_MAX;
use crate::format::{Format, bintensors, names};
use crate::hash::Digest;
use crate::source::Source;
use crate::store::Store;

/// Bytes read at a time from a header that is parsed as it is read.
const CHUNK_LEN: usize = 256 << 10;

/// How often a file that is changed while its header is read is read again.
const READ_TRIES: usize = 10;

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

/// A header and the hash of the bytes before the data, or what is wrong with it.
type Parsed = std::result::Result<(Arc<Head>, Digest), Fault>;

/// A weight file that is open, and whose header was not read yet.
pub(super) struct Unread {
    source: Arc<Source>,
    /// Length of the header, or why the file has none.
    header_len: std::result::Result<u64, Fault>,
}

impl Unread {
    /// Opens the weight file at `path`.
    pub(super) fn open(path: &Path) -> Result<Unread> {
        let source = Source::open(path)?;
        let mut sniff = vec![0; SNIFF_LEN.min(source.len() as usize)];
        source.read_exact_at(&mut sniff, 0)?;
        let header_len = safetensors::header_len(&sniff, source.len());
        Ok(Unread { source, header_len })
    }

    /// Bytes of its header that will be read.
    pub(super) fn header_len(&self) -> u64 {
        *self.header_len.as_ref().unwrap_or(&0)
    }

    /// Reads the header; `name` says in which format it is. Its tensors are added to `heads`.
    fn parse(&self, heads: &Arc<Heads>, name: &str) -> Result<Parsed> {
        let header = match &self.header_len {
            Ok(len) => read_head(heads, &self.source, *len, format_of(name))?,
            Err(fault) => return Ok(Err(fault.clone())),
        };
        self.source.check()?;
        Ok(header.map(|(header, head)| (Arc::new(header), head)))
    }
}

/// Opens the weight file at `path`, called `name` in its checkpoint in `folder`.
pub(super) fn open_shard(
    heads: &Arc<Heads>,
    folder: &Path,
    name: &str,
    path: &Path,
) -> Result<Loaded> {
    let named = |error| named_in(folder, name, error);
    let mut tries = 0;
    loop {
        let read = Unread::open(path).and_then(|unread| Ok((unread.parse(heads, name)?, unread)));
        match read {
            // Also new attributes count as a change here, and they come and go.
            Err(Error::Changed { .. }) if tries < READ_TRIES => tries += 1,
            Err(error) => return Err(named(error)),
            Ok((parsed, unread)) => return loaded(folder, name, unread.source, parsed),
        }
    }
}

/// Opens weight files that are links to one inode, by name and path, and reads their header once:
/// `unread` is the first of them.
pub(super) fn open_links(
    heads: &Arc<Heads>,
    folder: &Path,
    links: &[(&str, &Path)],
    unread: Unread,
) -> Vec<(String, Result<Loaded>)> {
    let mut all = Vec::with_capacity(links.len());
    let Some(((first, _), others)) = links.split_first() else { return all };
    let parsed = match unread.parse(heads, first) {
        Ok(parsed) => parsed,
        Err(_) => {
            let open = |name, path| open_shard(heads, folder, name, path);
            all.extend(links.iter().map(|(name, path)| ((*name).to_owned(), open(name, path))));
            return all;
        }
    };
    let identity = unread.source.identity();
    let link = |name: &str, path: &Path| {
        let source = Source::open(path).map_err(|error| named_in(folder, name, error))?;
        // Another file by now, or one that is read in another way.
        if source.identity() != identity || format_of(name) != format_of(first) {
            return open_shard(heads, folder, name, path);
        }
        loaded(folder, name, source, parsed.clone())
    };
    let others = others.iter().map(|(name, path)| ((*name).to_owned(), link(name, path)));
    let others: Vec<_> = others.collect();
    all.push(((*first).to_owned(), loaded(folder, first, unread.source, parsed)));
    all.extend(others);
    all
}

fn loaded(folder: &Path, name: &str, source: Arc<Source>, parsed: Parsed) -> Result<Loaded> {
    let (header, head) = parsed.map_err(|fault| Error::refused(folder, fault.in_file(name)))?;
    let shard = ShardHeader { name: name.to_owned(), file_len: source.len(), header };
    source.set_head(shard.header.data_start(), head);
    Ok(Loaded { source, shard, head })
}

/// The error with the name in the folder: the user knows a file by that, not by where a link leads.
pub(super) fn named_in(folder: &Path, name: &str, error: Error) -> Error {
    match error {
        Error::Io { action, source, .. } => Error::io(&folder.join(name), action, source),
        other => other,
    }
}

/// Reads the header of `source`, which is in `format`, and hashes the bytes before its data.
///
/// # Errors
/// The outer error is a failed read, the inner one what is wrong with the header.
fn read_header(
    source: &Arc<Source>,
    format: Format,
) -> Result<std::result::Result<(Header, Digest), Fault>> {
    let mut sniff = vec![0; SNIFF_LEN.min(source.len() as usize)];
    source.read_exact_at(&mut sniff, 0)?;
    match safetensors::header_len(&sniff, source.len()) {
        Ok(len) => parse_header(source, len, format),
        Err(fault) => Ok(Err(fault)),
    }
}

/// Reads a header of known length into `heads`, and hashes the bytes before its data.
fn read_head(
    heads: &Arc<Heads>,
    source: &Arc<Source>,
    header_len: u64,
    format: Format,
) -> Result<std::result::Result<(Head, Digest), Fault>> {
    if format == Format::Safetensors && header_len <= SLICE_LEN_MAX {
        let bytes = read_start(source, PREFIX_LEN + header_len)?;
        let text = &bytes[PREFIX_LEN as usize..];
        let plain = Flat::parse(text, source.len()).and_then(|flat| heads.add_flat(flat));
        let head = match plain {
            Some(head) => Ok(head),
            None => Header::parse(text, source.len()).map(|header| heads.add(header)),
        };
        return Ok(head.map(|head| (head, Digest::of(&bytes))));
    }
    let parsed = parse_header(source, header_len, format)?;
    Ok(parsed.map(|(header, head)| (heads.add(header), head)))
}

/// The first `len` bytes.
fn read_start(source: &Arc<Source>, len: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len as usize];
    source.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Reads a header of known length, and hashes the bytes before its data.
fn parse_header(
    source: &Arc<Source>,
    header_len: u64,
    format: Format,
) -> Result<std::result::Result<(Header, Digest), Fault>> {
    let file_len = source.len();
    if header_len > SLICE_LEN_MAX {
        let open = || ChunkReader { source, at: PREFIX_LEN, end: PREFIX_LEN + header_len };
        let header = match format {
            Format::Safetensors => Header::parse_stream(open(), header_len, file_len),
            Format::Bintensors => bintensors::parse_stream(open, header_len, file_len),
        };
        let header = header.map_err(|e| Error::io(source.path(), "read", e))?;
        let Ok(header) = header else { return Ok(header.map(|header| (header, Digest::of(&[])))) };
        return Ok(Ok((header, source.hash_head(PREFIX_LEN + header_len)?)));
    }
    let head = read_start(source, PREFIX_LEN + header_len)?;
    let text = &head[PREFIX_LEN as usize..];
    let header = match format {
        Format::Safetensors => Header::parse(text, file_len),
        Format::Bintensors => bintensors::parse(text, file_len),
    };
    Ok(header.map(|header| (header, Digest::of(&head))))
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
        return Err(Error::refused(path, Fault::new(ErrorKind::IndexJson, message)));
    }
    let mut text = vec![0; TEXT_SNIFF_LEN.min(source.len()) as usize];
    source.read_exact_at(&mut text, 0)?;
    // What begins with anything else is no JSON object, however long it goes on.
    if !text.trim_ascii_start().is_empty() && !text.trim_ascii_start().starts_with(b"{") {
        let fault = Fault::new(ErrorKind::IndexJson, "expected a JSON object");
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
    let real = Store::Local.real_path(path).map_err(|e| Error::io(path, "open", e))?;
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
