//! Distributed checkpoints of torch in a folder: the `.metadata`, and the `.distcp` files that it lists.

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

/// Maximum memory in bytes for each byte of a `.metadata`.
const MEMORY_OF_BYTE: u64 = 8;

/// The files of a checkpoint, by name: each is open, or has the reason why it cannot be opened.
type OpenedFiles = BTreeMap<String, Result<OpenShard>>;

/// The distributed checkpoint of a folder.
#[derive(Default)]
pub(super) struct Distributed {
    /// Its files that have shown tensors: each is open, or has the reason why it cannot be read. An
    /// error of `.metadata` has the key `.metadata`.
    pub(super) files: OpenedFiles,
    /// The memory reservation for the `.metadata`.
    pub(super) reserved: Reserved,
}

impl Folder {
    /// Whether `.distcp` files count as weights: if the folder has no weight files or weight maps of formats other
    /// than torch, or if `only` is a file of the distributed checkpoint.
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

/// The error of a folder that has `.distcp` files but no `.metadata`.
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
    let fault = ErrorKind::ShardMissing.fault(message).in_file(DISTCP_METADATA);
    Error::refused(&folder.path, fault)
}

/// Maximum length in bytes of a `.metadata`, which depends on the memory that this process may use.
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
        return Err(refused(ErrorKind::HeaderTooLarge.fault(message)));
    }
    let reserved = Reserved::wait(&folder.path, len * MEMORY_OF_BYTE)?;
    let mut bytes = vec![0; len as usize];
    source.read_exact_at(&mut bytes, 0)?;
    source.check()?;
    Ok((DistcpMetadata::parse(&bytes, state).map_err(refused)?, reserved))
}

/// Opens the files in which `.metadata` places shown tensors, and checks the lengths of all files.
fn open_files(folder: &Folder, metadata: &DistcpMetadata) -> OpenedFiles {
    let heads = Arc::new(Heads::without_notes());
    let note = note_of(folder, metadata);
    let files: Vec<(&String, &Vec<StoredChunk>)> = metadata.files.iter().collect();
    let items_in = |name: &String| metadata.named.get(name).map_or(0, Vec::len);
    let first = metadata.files.keys().next();
    let open = |(name, chunks): &(&String, &Vec<StoredChunk>)| {
        // The first file has the note about the whole checkpoint.
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
        // If a shown tensor is cut off or lies elsewhere, the parser of the items has already
        // reported the tensor by name.
        if opened.get(name).is_none_or(Result::is_ok)
            && let Err(error) = check_filled(folder, file, items)
        {
            opened.insert(name.to_owned(), Err(error));
        }
    }
    opened
}

/// Refuses a file that has bytes outside of the items of `.metadata`, or ends before an item ends. All items count,
/// including those that are not shown. torch writes items without gaps. A file that ends early was cut off, and a
/// file with other bytes belongs to another save.
fn check_filled(folder: &Folder, file: &File, items: &[(u64, u64)]) -> Result<()> {
    let found = file.version.len;
    let name = file.name.to_string_lossy();
    let refused = |kind: ErrorKind, message: String| {
        Err(Error::refused(&folder.path, kind.fault(message).in_file(&name)))
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
    // If the items are tensors of a safetensors file, `.metadata` places all of them at byte 0. The
    // parser of that format compares them.
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

/// Whether `file` begins with an item of `torch.save`.
fn begins_as_archive(file: &File) -> Result<bool> {
    let source = file.open_listed()?;
    let mut first = vec![0; FIRST_LEN.min(source.len() as usize)];
    source.read_exact_at(&mut first, 0)?;
    Ok(may_be_torch(&first))
}

/// The note about values of the checkpoint that are not shown, and about files of another save.
fn note_of(folder: &Folder, metadata: &DistcpMetadata) -> Option<String> {
    let is_other = |name: &&str| {
        // torch writes empty files for ranks and threads that have no data.
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
    Error::refused(&folder.path, ErrorKind::ShardMissing.fault(message).in_file(name))
}
