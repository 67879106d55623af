//! The index: one small file with the content of all headers of a folder. The next start reads it
//! in place of every shard.
//!
//! An index belongs to one folder. It has the proved sets of the folder, and the version of every
//! file that was used for the proof. It is only a copy. In any case of doubt the headers are read
//! again, and the index is written again. Such cases are an index in another format version, a
//! wrong checksum, and a source file whose version and header bytes differ from their record. An
//! index never causes an error.

mod columns;
mod frame;
mod store;
mod sums;
mod view_record;

use std::ops::Range;
use std::sync::Arc;

use bincode::{BorrowDecode, Encode};

use crate::catalog::{Catalog, Shard};
use crate::clock::unix_now;
use crate::hash::Digest;
use crate::version::Version;

use columns::ViewColumns;
use frame::{FileKind, List};
pub use store::{IndexStore, STORE_VARIABLE, folder_of_user};
pub(crate) use store::{check_folder, file_name, is_private};
pub use sums::{
    BlockBoundaries, CHUNK_LEN, ChecksumChunk, ChunkHasher, SUMS_EXTENSION, ShardSums, Sums,
};
pub use view_record::{ConfigRecord, PresentedFile, PresentedRecord, ViewRecord};

/// Extension of index files.
pub const EXTENSION: &str = "index";

/// The version number has to be increased with every change of the content, of the proof, and of
/// the layout of a file, because an index has results of the program version that wrote it.
const KIND: FileKind = FileKind { magic: b"TENSORFS", version: 6 + columns::VERSION };

/// A file that was used to make the sets of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRecord {
    /// Its name in the folder.
    pub name: String,
    /// Its version without the device number, which differs after each mount of a file system.
    pub version: Version,
    /// The byte ranges on which the sets depend: the description of a shard, or the whole of a text
    /// file.
    pub described: Vec<Range<u64>>,
    /// Hash of these bytes.
    pub hash: Digest,
}

/// A virtual file of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtualFileRecord {
    /// Hash of its `FileSpec`.
    pub spec: Digest,
    /// Length in bytes.
    pub len: u64,
    /// Hash of its header.
    pub header: Digest,
}

/// A proved set.
#[derive(Clone, Debug, PartialEq)]
pub struct SetRecord {
    /// Name of the file under which it is shown.
    pub name: String,
    /// The word for the kind of the set (`SetKind`).
    pub kind: String,
    /// Names of its files, including its weight map.
    pub files: Vec<String>,
    /// Whether a shard has a sharding note.
    pub noted: bool,
    /// Whether the manifest beside it has the shapes of all tensors. `None` if no manifest was
    /// compared.
    pub manifest: Option<bool>,
    /// Its weight map: the name of the file, and the metadata in it as JSON.
    pub map: Option<(String, String)>,
    /// Virtual files whose layouts were made.
    pub virtual_files: Vec<VirtualFileRecord>,
    /// Its tensors.
    pub catalog: Catalog,
}

/// The index of one folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Index {
    /// Path of the folder to which the index belongs, as bytes.
    pub folder: Vec<u8>,
    /// Time at which the files were examined, in seconds since 1970.
    pub made: i64,
    /// All files that can be part of a set, sorted by name.
    pub files: Vec<FileRecord>,
    /// Names in the folder that do not lead to a file that may be read.
    pub unusable: Vec<Vec<u8>>,
    /// Names of files that are shown only as part of a set.
    pub weights: Vec<String>,
    /// Notes about unusual but valid input, one line each.
    pub notes: Vec<String>,
    /// Its sets. All of them are proved.
    pub sets: Vec<SetRecord>,
}

/// Minimum time in seconds between the last change of a file and the time at which it is examined.
/// If this time has passed, a later write cannot give the file the same times. Some file systems
/// store times in steps of two seconds.
pub(crate) const SETTLED: i64 = 2;

/// The current time in seconds since 1970, in the form in which indexes and checksums record it.
pub(crate) fn now() -> i64 {
    unix_now() as i64
}

/// An index in the form in which it is encoded. Strings and lists are borrowed, or are a `List`. So
/// decoding reserves no more memory than the bytes can fill.
#[derive(BorrowDecode, Encode)]
struct IndexContent<'a> {
    folder: &'a [u8],
    made: i64,
    files: List<FileContent<'a>>,
    unusable: List<&'a [u8]>,
    weights: List<&'a str>,
    notes: List<&'a str>,
    sets: List<SetContent<'a>>,
}

#[derive(BorrowDecode, Encode)]
struct FileContent<'a> {
    name: &'a str,
    version: [u64; 14],
    described: Ranges,
    hash: [u8; 16],
}

#[derive(BorrowDecode, Encode)]
struct SetContent<'a> {
    name: &'a str,
    kind: &'a str,
    files: List<&'a str>,
    noted: bool,
    manifest: Option<bool>,
    map: Option<(&'a str, &'a str)>,
    /// Hash of the spec, length, and hash of the header.
    virtual_files: List<([u8; 16], u64, [u8; 16])>,
    /// Name, length, and ranges of the description.
    shards: List<(&'a str, u64, Ranges)>,
    metadata: Option<List<(&'a str, &'a str)>>,
    shapes_recorded: bool,
    notes: List<&'a str>,
    columns: ViewColumns<'a>,
}

impl<'a> FileContent<'a> {
    fn of(file: &'a FileRecord) -> FileContent<'a> {
        let FileRecord { name, version, described, hash } = file;
        let described = encode_ranges(described);
        FileContent { name, version: version.to_words(), described, hash: hash.0 }
    }

    fn into_record(self) -> Result<FileRecord, &'static str> {
        let FileContent { name, version, described, hash } = self;
        let described = decode_ranges(&described)?;
        let (name, version) = (name.to_owned(), Version::from_words(&version));
        Ok(FileRecord { name, version, described, hash: Digest(hash) })
    }
}

/// Ranges in the form in which they are encoded: first byte and end, ascending.
type Ranges = List<(u64, u64)>;

fn encode_ranges(ranges: &[Range<u64>]) -> Ranges {
    ranges.iter().map(|range| (range.start, range.end)).collect()
}

fn decode_ranges(ranges: &Ranges) -> Result<Vec<Range<u64>>, &'static str> {
    let mut before = 0;
    let range = |&(start, end): &(u64, u64)| {
        let ascends = before <= start && start <= end;
        before = end;
        ascends.then_some(start..end).ok_or("has descriptions out of order")
    };
    ranges.iter().map(range).collect()
}

/// Whether a file in a folder can have this name. The name is checked because commands write files
/// with the names in an index.
fn is_file_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

fn borrowed(strings: &[String]) -> List<&str> {
    strings.iter().map(String::as_str).collect()
}

fn owned(strings: List<&str>) -> Vec<String> {
    strings.iter().map(|string| (*string).to_owned()).collect()
}

impl<'a> SetContent<'a> {
    fn of(set: &'a SetRecord) -> SetContent<'a> {
        let catalog = &set.catalog;
        let shard = |shard: &'a Shard| {
            (shard.name.as_str(), shard.file_len, encode_ranges(&shard.described))
        };
        SetContent {
            name: &set.name,
            kind: &set.kind,
            files: borrowed(&set.files),
            noted: set.noted,
            manifest: set.manifest,
            map: set.map.as_ref().map(|(name, metadata)| (name.as_str(), metadata.as_str())),
            virtual_files: set
                .virtual_files
                .iter()
                .map(|file| (file.spec.0, file.len, file.header.0))
                .collect(),
            shards: catalog.shards.iter().map(shard).collect(),
            metadata: catalog.metadata.as_ref().map(|metadata| {
                metadata.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
            }),
            shapes_recorded: catalog.shapes_recorded,
            notes: borrowed(&catalog.notes),
            columns: columns::encode_view(&catalog.columns, &catalog.shards),
        }
    }

    fn into_record(self) -> Result<SetRecord, &'static str> {
        let shard = |(name, file_len, described): &(&str, u64, Ranges)| {
            let described = decode_ranges(described)?;
            Ok(Shard { name: (*name).to_owned(), file_len: *file_len, described })
        };
        let shards = self.shards.iter().map(shard).collect::<Result<Vec<Shard>, &str>>()?;
        let columns = columns::decode_view(self.columns, &shards)?;
        let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let metadata = self.metadata.map(|metadata| Arc::new(metadata.iter().map(pair).collect()));
        Ok(SetRecord {
            name: self.name.to_owned(),
            kind: self.kind.to_owned(),
            files: owned(self.files),
            noted: self.noted,
            manifest: self.manifest,
            map: self.map.map(|(name, metadata)| (name.to_owned(), metadata.to_owned())),
            virtual_files: self
                .virtual_files
                .iter()
                .map(|&(spec, len, header)| VirtualFileRecord {
                    spec: Digest(spec),
                    len,
                    header: Digest(header),
                })
                .collect(),
            catalog: Catalog {
                shards,
                columns: Arc::new(columns),
                metadata,
                shapes_recorded: self.shapes_recorded,
                notes: owned(self.notes),
            },
        })
    }
}

impl Index {
    /// Encodes the index. `None` if the file would be too long.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let content = IndexContent {
            folder: &self.folder,
            made: self.made,
            files: self.files.iter().map(FileContent::of).collect(),
            unusable: self.unusable.iter().map(Vec::as_slice).collect(),
            weights: borrowed(&self.weights),
            notes: borrowed(&self.notes),
            sets: self.sets.iter().map(SetContent::of).collect(),
        };
        frame::wrap(KIND, content)
    }

    /// Decodes the index in `bytes`. The error is the reason why it is invalid.
    pub fn decode(bytes: &[u8]) -> Result<Index, &'static str> {
        Index::of_content(frame::unwrap(KIND, bytes)?)
    }

    /// Decodes content without a frame. The content may be any bytes.
    pub fn decode_unframed(bytes: &[u8]) -> Result<Index, &'static str> {
        Index::of_content(frame::content(bytes)?)
    }

    fn of_content(content: IndexContent<'_>) -> Result<Index, &'static str> {
        let files = content.files.0.into_iter().map(FileContent::into_record);
        let sets = content
            .sets
            .0
            .into_iter()
            .map(SetContent::into_record)
            .collect::<Result<Vec<SetRecord>, _>>()?;
        if !sets.iter().all(|set| is_file_name(&set.name)) {
            return Err("has a set whose name is no file name");
        }
        Ok(Index {
            folder: content.folder.to_vec(),
            made: content.made,
            files: files.collect::<Result<_, _>>()?,
            unusable: content.unusable.iter().map(|name| name.to_vec()).collect(),
            weights: owned(content.weights),
            notes: owned(content.notes),
            sets,
        })
    }
}
