//! Reads the descriptions of a checkpoint: headers, weight maps and references.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use crate::catalog::{Head, Heads, ShardHeader};
use crate::error::{Error, ErrorKind, Fault, Result, shown_path};
use crate::format::foreign::{Evidence, FIRST_LEN};
use crate::format::manifest::{MANIFEST_LEN_MAX, Reference};
use crate::format::pickle::{StoredChunk, parse_items};
use crate::format::safetensors::Header;
use crate::format::tensorizer::decryptor::{Decryptor, EncryptedTensor};
use crate::format::tensorizer::keys::Secret;
use crate::format::tensorizer::{self, HashedTensor};
use crate::format::weight_map::WEIGHT_MAP_LEN_MAX;
use crate::format::{Detected, InputFormat, RangeReader, ShardDescription, TrainingState, pickle};
use crate::hash::Digest;
use crate::open_options::OpenOptions;
use crate::source::Source;
use crate::store::Store;

use super::folder::{File, Folder};

/// Maximum number of retries for a file that changes while its header is read.
const READ_TRIES: usize = 10;

/// Number of bytes of a text file that are checked before the rest is read.
const TEXT_SNIFF_LEN: u64 = 4096;

/// Number of these bytes for a text file of a remote store. Most texts are shorter, so one read gets the whole text.
const TEXT_SNIFF_LEN_OF_REMOTE: u64 = 1 << 20;

/// Number of bytes in the first read of a weight file of a remote store. Most headers are shorter.
const AHEAD_LEN: u64 = 64 << 10;

/// A key derivation that takes at least this long is logged.
const DERIVATION_SHOWN_MIN: Duration = Duration::from_secs(1);

/// The options that affect how the headers of files are read.
#[derive(Clone, Copy, Default)]
pub(super) struct ReadWith<'a> {
    /// The secret for encrypted files.
    pub(super) secret: Option<&'a Secret>,
    /// Which tensors of pickles are shown.
    pub(super) state: TrainingState,
}

impl<'a> ReadWith<'a> {
    pub(super) fn of(options: &'a OpenOptions) -> ReadWith<'a> {
        ReadWith { secret: options.secret.as_deref(), state: options.state }
    }
}

/// The place of a file: its store and its path.
pub(super) type FilePlace<'a> = (&'a Store, &'a Path);

/// An open shard with its header.
#[derive(Clone, Debug)]
pub(super) struct OpenShard {
    pub(super) source: Arc<Source>,
    pub(super) shard: ShardHeader,
    /// Hash of the bytes that describe the tensors.
    pub(super) hash: Digest,
    pub(super) format: InputFormat,
}

/// A description and the hash of its bytes, or the fault of the description.
type HashedDescription = Result<(ShardDescription, Digest), Fault>;

/// A parsed header, or the fault of the header.
type Parsed = Result<ParsedHeader, Fault>;

/// A parsed header.
#[derive(Clone)]
struct ParsedHeader {
    header: Arc<Head>,
    /// The hash of the bytes of the header.
    hash: Digest,
    format: InputFormat,
    /// `None` if the tensors are not encrypted.
    decryptor: Option<Arc<Decryptor>>,
}

/// An open weight file whose header is not read yet.
pub(super) struct Unread {
    source: Arc<Source>,
    /// Offset of its first byte in the source.
    start: u64,
    /// Its format and the length of its header, or the reason why it has no header.
    detected: Result<Detected, Fault>,
    /// The first bytes of its description, if they were read together with the bytes that show the
    /// format.
    ahead: Vec<u8>,
}

impl Unread {
    /// Opens a weight file that is called `name` in its checkpoint.
    pub(super) fn open(name: &str, place: FilePlace<'_>) -> Result<Unread> {
        let (store, path) = place;
        Unread::of(name, store.open(path)?, 0)
    }

    /// Opens `file` in the version of its listing. If that version does not exist any more, opens the current
    /// version. The checkpoint calls the file `name`.
    pub(super) fn open_listed(name: &str, file: &File) -> Result<Unread> {
        let read = file.open_listed().and_then(|source| Unread::of(name, source, 0));
        match read {
            Err(Error::Changed { .. }) => Unread::open(name, (&file.store, &file.path)),
            read => read,
        }
    }

    /// Makes an unread weight file from the bytes of `source` from `start` on.
    fn of(name: &str, source: Arc<Source>, start: u64) -> Result<Unread> {
        let mut reader = SourceReader::at(&source, start);
        let detected = reader.run(|reader| InputFormat::detect(name, reader))?;
        let mut ahead = reader.ahead;
        let description_len = detected.as_ref().map_or(0, |detected| detected.description_len);
        ahead.truncate(usize::try_from(description_len).unwrap_or(usize::MAX));
        ahead.shrink_to_fit();
        Ok(Unread { source, start, detected, ahead })
    }

    /// Length of its description in bytes, including the length prefix. It is 0 if there is no
    /// valid description.
    pub(super) fn description_len(&self) -> u64 {
        self.detected.as_ref().map_or(0, |detected| detected.description_len)
    }

    /// The reason why it is no weight file, according to its first bytes.
    pub(super) fn fault(&self) -> Option<&Fault> {
        self.detected.as_ref().err()
    }

    /// Reads the header of the file called `name`, and adds its tensors to `heads`.
    fn parse(&self, name: &str, heads: &Arc<Heads>, with: ReadWith<'_>) -> Result<Parsed> {
        let detected = match &self.detected {
            Ok(detected) => detected,
            Err(fault) => return Ok(Err(fault.clone())),
        };
        // The headers of an encrypted file may take 64 MiB, so they are read only if there is a
        // secret.
        if detected.is_encrypted && with.secret.is_none() {
            return Ok(Err(key_required()));
        }
        let mut reader = SourceReader::at(&self.source, self.start);
        reader.ahead.clone_from(&self.ahead);
        let parsed = parse(name, reader, detected, with.state)?;
        self.source.check_after_read()?;
        let (mut description, hash) = match parsed {
            Ok(parsed) => parsed,
            Err(fault) => return Ok(Err(fault)),
        };
        let decryptor = match description.encrypted.take() {
            None => None,
            Some(encrypted) => match unlock(&self.source, encrypted, with.secret)? {
                Ok(decryptor) => Some(Arc::new(decryptor)),
                Err(fault) => return Ok(Err(fault)),
            },
        };
        let add = |description| match detected.format {
            // Only safetensors files have sharding notes.
            InputFormat::Safetensors => heads.add(description),
            _ => heads.add_without_note(description),
        };
        let (header, format) = (Arc::new(add(description)), detected.format);
        Ok(Ok(ParsedHeader { header, hash, format, decryptor }))
    }
}

/// Opens a weight file. Its checkpoint is in `folder` and calls it `name`.
pub(super) fn open_shard(
    heads: &Arc<Heads>,
    folder: &Path,
    name: &str,
    file: FilePlace<'_>,
    with: ReadWith<'_>,
) -> Result<OpenShard> {
    let named = |error| named_in(folder, name, error);
    let mut tries = 0;
    loop {
        let read = Unread::open(name, file)
            .and_then(|unread| Ok((unread.parse(name, heads, with)?, unread)));
        match read {
            // If only attributes of the file changed, this also counts as a change, so the read is
            // tried again.
            Err(Error::Changed { .. }) if tries < READ_TRIES => tries += 1,
            Err(error) => return Err(named(error)),
            Ok((parsed, unread)) => return loaded(folder, name, unread.source, parsed),
        }
    }
}

/// Opens a `.distcp` file of the checkpoint in `folder`, and reads the items of `chunks`. `items`
/// is the number of items that `.metadata` places in the file. `note` is the note about values that
/// are not shown.
pub(super) fn open_items(
    heads: &Arc<Heads>,
    folder: &Folder,
    file: &File,
    chunks: &[StoredChunk],
    items: usize,
    note: Option<&str>,
) -> Result<OpenShard> {
    let name = file.name.to_str().unwrap_or_default();
    let mut tries = 0;
    loop {
        match read_items(file, chunks, items) {
            Err(Error::Changed { .. }) if tries < READ_TRIES => tries += 1,
            Err(error) => return Err(named_in(&folder.path, name, error)),
            Ok((source, parsed)) => {
                let parsed = parsed.map(|(mut description, hash)| {
                    description.left_out = note.map(str::to_owned);
                    let header = Arc::new(heads.add_without_note(description));
                    ParsedHeader { header, hash, format: InputFormat::Torch, decryptor: None }
                });
                return loaded(&folder.path, name, source, parsed);
            }
        }
    }
}

/// Opens a `.distcp` file and parses the items of `chunks`. The file has `items` items in all.
fn read_items(
    file: &File,
    chunks: &[StoredChunk],
    items: usize,
) -> Result<(Arc<Source>, HashedDescription)> {
    let source = file.open_listed()?;
    let mut reader = SourceReader::at(&source, 0);
    let parsed = match reader.run(|reader| parse_items(reader, chunks, items))? {
        Ok(description) => {
            let hash = source.hash_ranges(&description.described)?;
            Ok((description, hash))
        }
        Err(fault) => Err(fault),
    };
    source.check()?;
    Ok((source, parsed))
}

/// Reads the header of the weight file in the bytes of `source` from `start` on. `source` stays
/// open. The checkpoint is in `folder` and calls the file `name`.
pub(super) fn open_source(
    heads: &Arc<Heads>,
    folder: &Path,
    name: &str,
    source: Arc<Source>,
    start: u64,
    with: ReadWith<'_>,
) -> Result<OpenShard> {
    let unread = Unread::of(name, source, start)?;
    loaded(folder, name, unread.source.clone(), unread.parse(name, heads, with)?)
}

/// Opens weight files that are links to one inode, and reads their header once. `links` are their names and places.
/// `unread` is the first of these files, which is open already.
pub(super) fn open_links(
    heads: &Arc<Heads>,
    folder: &Path,
    links: &[(&str, FilePlace<'_>)],
    unread: Unread,
    with: ReadWith<'_>,
) -> Vec<(String, Result<OpenShard>)> {
    let mut all = Vec::with_capacity(links.len());
    let Some(((first, _), others)) = links.split_first() else { return all };
    let parsed = match unread.parse(first, heads, with) {
        Ok(parsed) => parsed,
        Err(_) => {
            let open = |name, file| open_shard(heads, folder, name, file, with);
            all.extend(links.iter().map(|(name, file)| ((*name).to_owned(), open(name, *file))));
            return all;
        }
    };
    let version = unread.source.version();
    let link = |name: &str, (store, path): FilePlace<'_>| {
        let source = store.open(path).map_err(|error| named_in(folder, name, error))?;
        // The link leads to another file now, or its name indicates another format than the name of the first link.
        if source.version() != version || InputFormat::of_name(name) != InputFormat::of_name(first)
        {
            return open_shard(heads, folder, name, (store, path), with);
        }
        loaded(folder, name, source, parsed.clone())
    };
    let others: Vec<_> =
        others.iter().map(|(name, file)| ((*name).to_owned(), link(name, *file))).collect();
    all.push(((*first).to_owned(), loaded(folder, first, unread.source, parsed)));
    all.extend(others);
    all
}

fn loaded(folder: &Path, name: &str, source: Arc<Source>, parsed: Parsed) -> Result<OpenShard> {
    let ParsedHeader { header, hash, format, decryptor } =
        parsed.map_err(|fault| Error::refused(folder, fault.in_file(name)))?;
    let shard = ShardHeader { name: name.to_owned(), file_len: source.len(), header };
    source.set_described(shard.header.described.clone(), hash);
    if let Some(decryptor) = decryptor {
        source.set_decryptor(decryptor);
    }
    Ok(OpenShard { source, shard, hash, format })
}

/// The fault of an encrypted file for which there is no secret.
fn key_required() -> Fault {
    let message = "is encrypted; give its key with `key-file=`, in Python `key_file=` or `key=`, or \
                   its passphrase with `passphrase-file=`, in Python `passphrase_file=` or \
                   `passphrase=`";
    ErrorKind::KeyRequired.fault(message)
}

/// Makes the decryptor of a file with these encrypted tensors. Decrypts one piece, so that a wrong key is refused at
/// once.
///
/// # Errors
/// The outer error is a failed read, the inner error is a fault of the file or of the secret.
fn unlock(
    source: &Arc<Source>,
    encrypted: Vec<EncryptedTensor>,
    secret: Option<&Secret>,
) -> Result<Result<Decryptor, Fault>> {
    let Some(secret) = secret else { return Ok(Err(key_required())) };
    let started = Instant::now();
    let decryptor = match Decryptor::new(encrypted, secret) {
        Ok(decryptor) => decryptor,
        Err(fault) => return Ok(Err(fault)),
    };
    let took = started.elapsed();
    if took >= DERIVATION_SHOWN_MIN {
        let path = shown_path(source.path());
        tracing::info!("{path}: deriving the key of the file took {:.1} s", took.as_secs_f64());
    }
    let Some(sample) = decryptor.sample() else { return Ok(Ok(decryptor)) };
    let mut piece = Zeroizing::new(vec![0; (sample.end - sample.start) as usize]);
    source.read_exact_at(&mut piece, sample.start)?;
    source.check()?;
    Ok(decryptor.decrypt(sample.start, &mut piece).map(|()| decryptor))
}

/// Replaces the path in an error by the name in the folder. The user knows this name, and not the
/// target of a link.
pub(super) fn named_in(folder: &Path, name: &str, error: Error) -> Error {
    match error {
        Error::Io { action, source, .. } => Error::io(folder.join(name), action, source),
        other => other,
    }
}

/// Parses the header of a source called `name`, and hashes the bytes of the header.
///
/// # Errors
/// The outer error is a failed read, the inner error is a fault of the header.
fn parse(
    name: &str,
    mut reader: SourceReader<'_>,
    detected: &Detected,
    state: TrainingState,
) -> Result<HashedDescription> {
    let source = reader.source;
    let description = match reader.run(|reader| detected.parse(name, reader, state))? {
        Ok(description) => description,
        Err(fault) => return Ok(Err(fault)),
    };
    let hash = match (&reader.first, description.described.as_slice()) {
        (Some((len, hash)), [described]) if *described == (0..*len) => *hash,
        (_, described) => source.hash_ranges(described)?,
    };
    Ok(Ok((description, hash)))
}

/// The hashes that the shard `source` has of its tensors or entries. Empty if its format has no
/// hashes.
///
/// # Errors
/// A failed read, or a fault of a header that has changed since it was proved.
pub(crate) fn header_hashes(source: &Arc<Source>) -> Result<Vec<HashedTensor>> {
    let mut sniff = vec![0; tensorizer::HEAD_LEN.min(source.len()) as usize];
    source.read_exact_at(&mut sniff, 0)?;
    let mut reader = SourceReader::at(source, 0);
    let hashes = if tensorizer::is_tensorizer(&sniff) {
        reader.run(|reader| tensorizer::hashes(reader))
    } else {
        reader.run(|reader| pickle::entry_hashes(reader))
    };
    hashes?.map_err(|fault| Error::refused(source.path(), fault))
}

/// Reads a source for a parser.
pub(super) struct SourceReader<'a> {
    source: &'a Arc<Source>,
    /// Offset in the source of the first byte of the shard.
    start: u64,
    /// The bytes from `start` on that were read ahead.
    ahead: Vec<u8>,
    /// Length and hash of the bytes of the last read that began at the beginning of the file.
    first: Option<(u64, Digest)>,
    failed: Option<Error>,
}

impl<'a> SourceReader<'a> {
    pub(super) fn at(source: &'a Arc<Source>, start: u64) -> SourceReader<'a> {
        SourceReader { source, start, ahead: Vec::new(), first: None, failed: None }
    }

    /// Fills `buf`. The first read of a remote file also reads the bytes ahead, because each request takes a round
    /// trip.
    fn read_ahead(&mut self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let end = offset + buf.len() as u64;
        let ahead_end = (self.start + AHEAD_LEN).min(self.source.len());
        if self.ahead.is_empty()
            && (self.start..=ahead_end).contains(&offset)
            && end < ahead_end
            && self.source.local().is_none()
        {
            let mut ahead = vec![0; (ahead_end - self.start) as usize];
            self.source.read_exact_at(&mut ahead, self.start)?;
            self.ahead = ahead;
        }
        let there = offset.checked_sub(self.start).and_then(|from| {
            let from = usize::try_from(from).ok()?;
            self.ahead.get(from..from.checked_add(buf.len())?)
        });
        match there {
            Some(there) => {
                buf.copy_from_slice(there);
                Ok(())
            }
            None => self.source.read_exact_at(buf, offset),
        }
    }

    /// Runs a parser. A failed read is the outer error.
    pub(super) fn run<T>(
        &mut self,
        work: impl FnOnce(&mut dyn RangeReader) -> io::Result<T>,
    ) -> Result<T> {
        work(self).map_err(|error| {
            let failed = self.failed.take();
            failed.unwrap_or_else(|| Error::io(self.source.uri(), "read", error))
        })
    }
}

impl RangeReader for SourceReader<'_> {
    fn file_len(&self) -> u64 {
        self.source.len()
    }

    fn start(&self) -> u64 {
        self.start
    }

    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if let Err(error) = self.read_ahead(offset, buf) {
            let told = io::Error::other(error.to_string());
            self.failed = Some(error);
            return Err(told);
        }
        if offset == 0 {
            self.first = Some((buf.len() as u64, Digest::of(buf)));
        }
        Ok(())
    }
}

/// Reads a whole text file of at most `max` bytes, in the version of its listing. If that version does not exist any
/// more, reads the current version. Refuses a text that does not begin as a JSON object.
pub(super) fn read_listed_text(file: &File, max: u64) -> Result<Vec<u8>> {
    match file.open_listed().and_then(|source| json_text(&source, max)) {
        Err(Error::Changed { .. }) => read_text((&file.store, &file.path), max),
        read => read,
    }
}

/// Reads a whole text file of at most `max` bytes. Refuses a text that does not begin as a JSON
/// object.
pub(super) fn read_text(place: FilePlace<'_>, max: u64) -> Result<Vec<u8>> {
    let (store, path) = place;
    let source = store.open(path)?;
    json_text(&source, max)
}

fn json_text(source: &Source, max: u64) -> Result<Vec<u8>> {
    let path = source.path();
    if source.len() > max {
        let len = source.len();
        let message = format!("has {len} bytes, more than the {max} that such a file may have");
        return Err(Error::refused(path, ErrorKind::WeightMap.fault(message)));
    }
    let sniff_len =
        if source.local().is_some() { TEXT_SNIFF_LEN } else { TEXT_SNIFF_LEN_OF_REMOTE };
    let mut text = vec![0; sniff_len.min(source.len()) as usize];
    source.read_exact_at(&mut text, 0)?;
    // If the text begins with another character, it is no JSON object, so the rest is not read. A
    // byte order mark may be in front.
    let begin = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text).trim_ascii_start();
    if !begin.is_empty() && !begin.starts_with(b"{") {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let first = &text[..text.len().min(FIRST_LEN as usize)];
        let evidence = Evidence { name, first, last: &[], len: source.len() };
        let found = evidence.foreign().map(|found| format!("; it {}", found.message(&evidence)));
        let message = format!("expected a JSON object{}", found.unwrap_or_default());
        let fault = ErrorKind::WeightMap.fault(message);
        return Err(Error::refused(path, fault));
    }
    let sniffed = text.len();
    text.resize(source.len() as usize, 0);
    if sniffed < text.len() {
        source.read_exact_at(&mut text[sniffed..], sniffed as u64)?;
    }
    source.check_after_read()?;
    Ok(text)
}

/// Reads a file that lists the expected tensors of a checkpoint: a weight file, a weight map or a
/// manifest.
pub(super) fn read_reference(path: &Path, options: &OpenOptions) -> Result<Reference> {
    let store = Store::for_options(path, options);
    let real = store.real_path(path).map_err(|e| Error::io(path, "open", e))?;
    let refused = |fault: Fault| Error::refused(path, fault);
    let name = path.to_str().unwrap_or_default();
    if InputFormat::of_name(name).is_some() {
        let unread = Unread::open(name, (&store, &real))?;
        let (source, detected) = (&unread.source, unread.detected.map_err(refused)?);
        let only_describes = source.len() == detected.description_len;
        if detected.format == InputFormat::Safetensors && only_describes {
            let mut bytes = vec![0; source.len() as usize];
            source.read_exact_at(&mut bytes, 0)?;
            let header = Header::of_description(&bytes).map_err(refused)?;
            return Ok(Reference::from_description(&header.into()));
        }
        let (description, _) =
            parse(name, SourceReader::at(source, 0), &detected, TrainingState::default())?
                .map_err(refused)?;
        return Ok(Reference::from_description(&description));
    }
    let text = read_text((&store, &real), MANIFEST_LEN_MAX.max(WEIGHT_MAP_LEN_MAX))?;
    Reference::parse_json(&text).map_err(refused)
}
