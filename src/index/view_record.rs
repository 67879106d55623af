//! The record of a view: the sets of a folder with the tensors and files that the view makes of them. With it, the
//! next start does not need to select, rename, cut and cast the tensors, and to make the layouts.
//!
//! A record belongs to one index file, which is identified by its checksum, and to one view, which
//! is identified by its hash. Like the index, a record is only a copy: if it is out of date or
//! damaged, it is written again.

use std::collections::HashSet;

use bincode::{BorrowDecode, Encode};

use crate::catalog::Catalog;
use crate::hash::{Digest, Hasher};

use super::columns::{self, ViewColumns};
use super::frame::{self, FileKind, List, Numbers};
use super::store::{IndexStore, VIEW_EXTENSION};
use super::{Index, SetRecord, VirtualFileRecord, is_file_name};

/// The version number has to be increased with every change of the content, of the steps of a view,
/// and of the layout of a file.
const KIND: FileKind = FileKind { magic: b"TFSVIEWS", version: 1 + columns::VERSION };

/// The sets of an index as a view presents them.
#[derive(Clone, Debug, PartialEq)]
pub struct ViewRecord {
    /// Each set, in the order of the index. `None` for a set that the view shows as its original files.
    pub sets: Vec<Option<PresentedRecord>>,
}

/// A set as a view presents it.
#[derive(Clone, Debug, PartialEq)]
pub struct PresentedRecord {
    /// The tensors of the view. `None` if the view keeps the tensors of the set.
    pub catalog: Option<Catalog>,
    /// The virtual files, with their names and tensors.
    pub files: Vec<PresentedFile>,
    /// The `config.json` that the view read.
    pub config: ConfigRecord,
}

/// A virtual file of a view.
#[derive(Clone, Debug, PartialEq)]
pub struct PresentedFile {
    /// Its name.
    pub name: String,
    /// Indexes of its tensors in the catalog, ascending. `None` means all tensors.
    pub tensors: Option<Vec<u32>>,
    /// Hash of its `FileSpec`, its length, and the hash of its header.
    pub file: VirtualFileRecord,
}

/// Whether a view read a `config.json`, and which text it read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConfigRecord {
    /// The view did not attempt to read a `config.json`.
    #[default]
    Unread,
    /// The view found no `config.json`.
    Missing,
    /// The view read a text with this hash.
    Text(Digest),
}

impl ConfigRecord {
    /// The hash of the text. `None` if no text was read.
    pub fn digest(self) -> Option<Digest> {
        match self {
            ConfigRecord::Text(digest) => Some(digest),
            ConfigRecord::Unread | ConfigRecord::Missing => None,
        }
    }
}

#[derive(BorrowDecode, Encode)]
struct ViewContent<'a> {
    /// Hash of the index and of the view to which it belongs.
    owner: [u8; 16],
    sets: List<Option<PresentedContent<'a>>>,
}

#[derive(BorrowDecode, Encode)]
struct PresentedContent<'a> {
    columns: Option<ViewColumns<'a>>,
    files: List<PresentedFileContent<'a>>,
    /// `None` if the view did not attempt to read a `config.json`. The inner value is the hash of the text, or `None`
    /// if there was no file.
    config: Option<Option<[u8; 16]>>,
}

/// Name, indexes of tensors as differences, hash of the spec, length, and hash of the header.
type PresentedFileContent<'a> = (&'a str, Option<(u64, Numbers<'a>)>, [u8; 16], u64, [u8; 16]);

impl ViewRecord {
    /// Encodes the record of the view with the hash `view`. It belongs to the index file with the
    /// checksum `index`. `None` if the record would be too long.
    pub fn encode(&self, index: Digest, view: Digest) -> Option<Vec<u8>> {
        let sets = self.sets.iter().map(|set| set.as_ref().map(PresentedContent::of));
        let content = ViewContent { owner: owner(index, view).0, sets: sets.collect() };
        frame::wrap(KIND, content)
    }

    /// Decodes the record in `bytes`. The error is the reason why it does not belong to this index
    /// and this view. `sets` are the sets of the index.
    pub fn decode(
        bytes: &[u8],
        index: Digest,
        view: Digest,
        sets: &[SetRecord],
    ) -> Result<ViewRecord, &'static str> {
        let content: ViewContent<'_> = frame::unwrap(KIND, bytes)?;
        if content.owner != owner(index, view).0 {
            return Err("was made from another index");
        }
        content.into_record(sets)
    }

    /// Decodes the record in `bytes`, which were found behind an index file with the sets `sets`. The record may be
    /// written by another version of tensorfs.
    pub fn decode_behind(bytes: &[u8], sets: &[SetRecord]) -> Result<ViewRecord, &'static str> {
        frame::unwrap::<ViewContent<'_>>(KIND, bytes)?.into_record(sets)
    }

    /// Decodes content without a frame. The content may be any bytes.
    pub fn decode_unframed(bytes: &[u8], sets: &[SetRecord]) -> Result<ViewRecord, &'static str> {
        frame::content::<ViewContent<'_>>(bytes)?.into_record(sets)
    }
}

impl Index {
    /// Splits `bytes` into the index file at their beginning and the bytes after it. `None` if the
    /// index file is not complete.
    pub(crate) fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
        frame::split_first(bytes)
    }

    /// The checksum that the index file in `bytes` records. It covers all other bytes of the file.
    pub fn checksum(bytes: &[u8]) -> Option<Digest> {
        frame::recorded_checksum(bytes)
    }
}

impl IndexStore {
    /// File name of the record of the view with the hash `view`, for the index file `index`.
    pub(crate) fn view_name(index: &str, view: Digest) -> String {
        let stem = index.split('.').next().unwrap_or_default();
        format!("{stem}.{view}.{VIEW_EXTENSION}")
    }
}

/// The hash of an index and a view. It includes the version of tensorfs, so that a version does not
/// use records of another version.
fn owner(index: Digest, view: Digest) -> Digest {
    let mut hasher = Hasher::new();
    hasher.update(&index.0);
    hasher.update(&view.0);
    hasher.update(env!("CARGO_PKG_VERSION").as_bytes());
    hasher.finish()
}

impl ViewContent<'_> {
    fn into_record(self, sets: &[SetRecord]) -> Result<ViewRecord, &'static str> {
        if self.sets.len() != sets.len() {
            return Err("has another number of sets");
        }
        let pairs = self.sets.0.into_iter().zip(sets);
        let set = |(content, set): (Option<PresentedContent<'_>>, &SetRecord)| {
            content.map(|content| content.into_record(&set.catalog)).transpose()
        };
        Ok(ViewRecord { sets: pairs.map(set).collect::<Result<_, _>>()? })
    }
}

impl<'a> PresentedContent<'a> {
    fn of(set: &'a PresentedRecord) -> PresentedContent<'a> {
        let columns = |catalog: &Catalog| columns::encode_view(&catalog.columns, &catalog.shards);
        PresentedContent {
            columns: set.catalog.as_ref().map(columns),
            files: set.files.iter().map(file_content).collect(),
            config: match set.config {
                ConfigRecord::Unread => None,
                ConfigRecord::Missing => Some(None),
                ConfigRecord::Text(digest) => Some(Some(digest.0)),
            },
        }
    }

    fn into_record(self, proved: &Catalog) -> Result<PresentedRecord, &'static str> {
        let decode = |columns| {
            let columns = columns::decode_view(columns, &proved.shards)?;
            Ok::<_, &'static str>(Catalog { columns: columns.into(), ..proved.clone() })
        };
        let catalog = self.columns.map(decode).transpose()?;
        let count = catalog.as_ref().unwrap_or(proved).len();
        let files = self
            .files
            .0
            .into_iter()
            .map(|content| file_of(content, count))
            .collect::<Result<Vec<_>, _>>()?;
        check_files(&files, count)?;
        Ok(PresentedRecord {
            files,
            catalog,
            config: match self.config {
                None => ConfigRecord::Unread,
                Some(None) => ConfigRecord::Missing,
                Some(Some(digest)) => ConfigRecord::Text(Digest(digest)),
            },
        })
    }
}

fn file_content(file: &PresentedFile) -> PresentedFileContent<'_> {
    let PresentedFile { name, tensors, file: VirtualFileRecord { spec, len, header } } = file;
    let positions = tensors.as_ref().map(|tensors| {
        let before = std::iter::once(0).chain(tensors.iter().map(|position| position + 1));
        let steps = tensors.iter().zip(before);
        (tensors.len() as u64, steps.map(|(now, before)| u64::from(now - before)).collect())
    });
    (name, positions, spec.0, *len, header.0)
}

/// Refuses files that cannot be in one folder. Also refuses files that together do not have each of
/// `count` tensors exactly once.
fn check_files(files: &[PresentedFile], count: usize) -> Result<(), &'static str> {
    let mut names = HashSet::new();
    if !files.iter().all(|file| is_file_name(&file.name) && names.insert(file.name.as_str())) {
        return Err("has a file whose name is no file name, or is there twice");
    }
    let mut is_there = vec![false; count];
    let mut found = 0;
    for file in files {
        let Some(tensors) = &file.tensors else {
            found += count;
            continue;
        };
        found += tensors.len();
        tensors.iter().for_each(|&position| is_there[position as usize] = true);
    }
    let are_all = files.iter().any(|file| file.tensors.is_none()) || !is_there.contains(&false);
    // The number of tensors is right, and none is missing, so each occurs exactly once.
    let once = found == count && are_all;
    if once { Ok(()) } else { Err("has files that do not have each tensor once") }
}

/// Decodes a file. `count` is the number of tensors in its catalog.
fn file_of(content: PresentedFileContent<'_>, count: usize) -> Result<PresentedFile, &'static str> {
    let (name, listed, spec, len, header) = content;
    let positions = |(len, steps): (u64, Numbers<'_>)| {
        if !steps.may_be(len) {
            return Err("has a file of fewer tensors than it says");
        }
        let mut steps = steps.reader();
        let mut next = 0u32;
        let position = |_| {
            let position = next.checked_add(steps.next_u32()?)?;
            next = position.checked_add(1)?;
            ((position as usize) < count).then_some(position)
        };
        let positions: Option<Vec<u32>> = (0..len).map(position).collect();
        match positions {
            Some(positions) if steps.is_done() => Ok(positions),
            _ => Err("has a file of tensors that do not exist"),
        }
    };
    let file = VirtualFileRecord { spec: Digest(spec), len, header: Digest(header) };
    let tensors = listed.map(positions).transpose()?;
    Ok(PresentedFile { name: name.to_owned(), tensors, file })
}
