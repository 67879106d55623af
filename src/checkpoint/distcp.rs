//! Distributed checkpoints of torch in a folder: `.metadata`, and the `.distcp` files that it names.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::catalog::{Heads, named_some};
use crate::error::{Error, ErrorKind, Fault, Result, counted, quoted};
use crate::format::TrainingState;
use crate::format::names::{self, DISTCP_METADATA};
use crate::format::pickle::{
    DistcpMetadata, FIRST_LEN, METADATA_LEN_MAX, StoredChunk, may_be_torch,
};

use super::folder::{File, Folder};
use super::header_memory::{Reserved, description_max, description_memory};
use super::load::{OpenShard, open_items};
use super::openers::map_files;

/// Bytes of memory that a byte of a `.metadata` may take.
const MEMORY_OF_BYTE: u64 = 8;

/// The files of a checkpoint: each open, or the reason why it cannot be opened.
type OpenedFiles = BTreeMap<String, Result<OpenShard>>;

/// The distributed checkpoint of a folder.
#[derive(Default)]
pub(super) struct Distributed {
    /// Its files with shown tensors, each open, or the reason why it cannot be read. An error of
    /// `.metadata` stands under that name.
    pub(super) files: OpenedFiles,
    /// The reservation for `.metadata` in memory.
    pub(super) reserved: Reserved,
}

impl Folder {
    /// Whether `.distcp` files count as weights: where there are no safetensors or the like, or `only`
    /// is one of them.
    pub(super) fn reads_distcp(&self, only: Option<&str>) -> bool {
        let has_data = || self.names().any(names::is_distcp);
        match only {
            Some(only) if names::is_distcp(only) => {
                self.names().any(|name| name == DISTCP_METADATA)
            }
            Some(only) => only == DISTCP_METADATA && has_data(),
            None => has_data() && !self.names().any(names::is_weights_or_map),
        }
    }
}

/// Opens the distributed checkpoint of `folder`.
pub(super) fn open_distributed(folder: &Folder, state: TrainingState) -> Distributed {
    let refused = |error| OpenedFiles::from([(DISTCP_METADATA.to_owned(), Err(error))]);
    let Some(file) = folder.file(DISTCP_METADATA) else {
        return Distributed { files: refused(no_metadata(folder)), ..Distributed::default() };
    };
    match read_metadata(folder, file, state) {
        Err(error) => Distributed { files: refused(error), ..Distributed::default() },
        Ok((metadata, reserved)) => Distributed { files: open_files(folder, &metadata), reserved },
    }
}

/// The error of a folder of `.distcp` files without `.metadata`.
fn no_metadata(folder: &Folder) -> Error {
    let count = folder.names().filter(|name| names::is_distcp(name)).count();
    let is_there = |test: &dyn Fn(&str) -> bool| folder.names().any(test);
    let why = if is_there(&|name| name == ".metadata.tmp") {
        "the save did not end, because only `.metadata.tmp` is there; take another checkpoint"
    } else if is_there(&|name| name.starts_with("__") && name.ends_with(".metadata")) {
        "each rank has saved its own (`__R.metadata`), which tensorfs does not join; save with \
         `use_collectives=True`"
    } else {
        "it is written last, so the save did not end, or it lies where rank 0 saved; copy it to the \
         others"
    };
    let files = counted(count, "`.distcp` file");
    let message = format!("is missing beside {files} of torch.distributed.checkpoint: {why}");
    let fault = Fault::new(ErrorKind::ShardMissing, message).in_file(DISTCP_METADATA);
    Error::refused(&folder.path, fault)
}

/// Maximum length in bytes of a `.metadata` that is read with the memory of this process.
pub(super) fn metadata_max() -> u64 {
    METADATA_LEN_MAX.min(description_max(MEMORY_OF_BYTE))
}

/// Reads the `.metadata` of `folder`.
fn read_metadata(
    folder: &Folder,
    file: &File,
    state: TrainingState,
) -> Result<(DistcpMetadata, Reserved)> {
    let refused = |fault: Fault| Error::refused(&folder.path, fault.in_file(DISTCP_METADATA));
    let source = file.store.open(&file.path)?;
    let max = metadata_max();
    let len = source.len();
    if len > max {
        let more = match len {
            ..=METADATA_LEN_MAX => {
                let memory = description_memory(len * MEMORY_OF_BYTE).div_ceil(1 << 30);
                format!("; a machine with {memory} GiB reads this one")
            }
            _ => String::new(),
        };
        let message = format!("has {len} bytes, and at most {max} are read with this memory{more}");
        return Err(refused(Fault::new(ErrorKind::HeaderTooLarge, message)));
    }
    let reserved = Reserved::wait(&folder.path, len * MEMORY_OF_BYTE)?;
    let mut bytes = vec![0; len as usize];
    source.read_exact_at(&mut bytes, 0)?;
    source.check()?;
    Ok((DistcpMetadata::parse(&bytes, state).map_err(refused)?, reserved))
}

/// Opens the files of a `.metadata` with shown tensors.
fn open_files(folder: &Folder, metadata: &DistcpMetadata) -> OpenedFiles {
    let heads = Arc::new(Heads::without_notes());
    let note = note_of(folder, metadata);
    let files: Vec<(&String, &Vec<StoredChunk>)> = metadata.files.iter().collect();
    let items_in = |name: &String| metadata.named.get(name).map_or(0, Vec::len);
    let first = metadata.files.keys().next();
    let open = |(name, chunks): &(&String, &Vec<StoredChunk>)| {
        // One file has the note about all of them.
        let own_note = note.as_deref().filter(|_| Some(*name) == first);
        let opened = match folder.file(name) {
            Some(file) => open_items(&heads, folder, file, chunks, items_in(name), own_note),
            None => Err(missing(folder, name, chunks.len())),
        };
        ((*name).clone(), opened)
    };
    let mut opened: OpenedFiles = map_files(&folder.store, &files, open).into_iter().collect();
    for (name, items) in &metadata.named {
        let Some(file) = folder.file(name).filter(|_| names::is_distcp(name)) else { continue };
        // A shown tensor that is cut off, or lies elsewhere, is named by the reader of the items.
        if opened.get(name).is_none_or(Result::is_ok)
            && let Err(error) = check_filled(folder, file, items)
        {
            opened.insert(name.to_owned(), Err(error));
        }
    }
    opened
}

/// Refuses a file that the items of `.metadata`, shown or not, do not fill: torch writes one after the other.
/// A file that ends before was cut off, and one with other bytes is of another save.
fn check_filled(folder: &Folder, file: &File, items: &[(u64, u64)]) -> Result<()> {
    let found = file.version.len;
    let name = file.name.to_string_lossy();
    let refused = |kind, message: String| {
        Err(Error::refused(&folder.path, Fault::new(kind, message).in_file(&name)))
    };
    let mut filled = 0;
    let mut free = None;
    for &(start, len) in items {
        let end = start.saturating_add(len);
        if end > found {
            let message = format!(
                "has {found} bytes, and `{DISTCP_METADATA}` places an item of {len} bytes at byte {start} \
                 in it; fetch or copy the file again"
            );
            return refused(ErrorKind::DataTruncated, message);
        }
        if start > filled {
            free.get_or_insert(filled..start);
        }
        filled = filled.max(end);
    }
    if filled < found {
        free.get_or_insert(filled..found);
    }
    let Some(free) = free else { return Ok(()) };
    // In a file of safetensors all items begin at byte 0. Its reader compares them.
    if items.iter().all(|item| item.0 == 0) && !begins_as_archive(file)? {
        return Ok(());
    }
    let message = format!(
        "has {found} bytes, and no item of `{DISTCP_METADATA}` has the bytes {} to {}, though torch leaves \
         no room between items: the two are of different saves, or the file was changed; take both from \
         one save, or save again",
        free.start, free.end
    );
    refused(ErrorKind::DcpHole, message)
}

/// Whether `file` begins as an item of torch.save.
fn begins_as_archive(file: &File) -> Result<bool> {
    let source = file.open_listed()?;
    let mut first = vec![0; FIRST_LEN.min(source.len() as usize)];
    source.read_exact_at(&mut first, 0)?;
    Ok(may_be_torch(&first))
}

/// The note about what is not shown: values of the checkpoint, and files of another save.
fn note_of(folder: &Folder, metadata: &DistcpMetadata) -> Option<String> {
    let is_other = |name: &&str| {
        // torch makes files without bytes for ranks and threads that have nothing to write.
        let is_empty = folder.file(name).is_some_and(|file| file.version.len == 0);
        names::is_distcp(name) && !metadata.named.contains_key(*name) && !is_empty
    };
    let others: Vec<&str> = folder.names().filter(is_other).collect();
    let files = (!others.is_empty()).then(|| {
        let are = if others.len() == 1 { "is" } else { "are" };
        let named = named_some(others.into_iter());
        format!("{named} {are} not of this save by `{DISTCP_METADATA}` and not shown")
    });
    let is_missing =
        |name: &&String| !metadata.files.contains_key(*name) && folder.file(name).is_none();
    let absent: Vec<String> =
        metadata.named.keys().filter(is_missing).map(|name| quoted(name)).collect();
    let missing = (!absent.is_empty()).then(|| {
        let are = if absent.len() == 1 { "is" } else { "are" };
        let named = named_some(absent.iter().map(String::as_str));
        format!("{named} of this save {are} not here, with none of the shown tensors")
    });
    let notes: Vec<String> =
        metadata.left_out.iter().cloned().chain(files).chain(missing).collect();
    (!notes.is_empty()).then(|| notes.join("; "))
}

fn missing(folder: &Folder, name: &str, chunks: usize) -> Error {
    let misfit = folder.misfits.iter().find(|misfit| misfit.name == name);
    let state = match misfit.map(|misfit| misfit.why) {
        Some(why) => format!("is {}; {}", why.text(), why.advice()),
        None => "is not there; bring the files of all machines to one folder".to_owned(),
    };
    let chunks = counted(chunks, "chunk");
    let message = format!("`{DISTCP_METADATA}` places {chunks} in this file, which {state}");
    Error::refused(&folder.path, Fault::new(ErrorKind::ShardMissing, message).in_file(name))
}
