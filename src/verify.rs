//! Reads every byte of a checkpoint, to find errors that the check of its headers cannot find.
//!
//! Each byte is read once, by several threads. All hashes are computed from this one read: the
//! checksums that are compared with recorded ones, the checksums that are compared between
//! replicas, and sha256.

mod header_hashes;
mod mismatch;
mod recorded;
mod shard_hashes;
pub(crate) mod stored;

use std::sync::Arc;
use std::thread::available_parallelism;

use crate::catalog::{Piece, Tensor};
use crate::checkpoint::{Checkpoint, IndexedHeaders};
use crate::error::{ErrorKind, Fault, Result};
use crate::format::{InputFormat, manifest};
use crate::index::ShardSums;
use crate::io::Settings;
use crate::source::Source;
use crate::sweep::{RANGE_MAX, Sweep};
use crate::sync::Mutex;

pub use mismatch::Mismatch;
pub use recorded::Recorded;
use shard_hashes::{ShardHashes, read_shard};
pub use stored::ShardPlace;

/// Maximum number of threads that read and hash a shard.
const THREADS_MAX: usize = 16;

/// Maximum number of these threads if another machine or a server answers the reads.
const THREADS_REMOTE: usize = 2;

/// Options of `verify`: the comparisons and hashes in addition to reading.
#[derive(Clone, Copy, Debug, Default)]
pub struct Task<'a> {
    /// Checksums that were recorded earlier.
    pub recorded: Option<&'a Recorded>,
    /// The records of headers in an index. They are used for shards without recorded checksums.
    pub headers: Option<&'a IndexedHeaders>,
    /// Whether checksums that differ from the recorded ones replace them.
    pub anew: bool,
    /// Whether the sha256 of every shard is computed.
    pub sha256: bool,
    /// Settings of the reads. Only the time limit is used.
    pub settings: Settings,
}

/// The results of the comparisons.
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// Number of bytes that were read.
    pub bytes: u64,
    /// Number of files whose sha256 is the one in the name of their hub blob, or the one that their
    /// store reports.
    pub blobs: u64,
    /// Number of tensors whose bytes match the hashes in their headers.
    pub hashed: u64,
    /// Number of entries of archives whose bytes match their CRC.
    pub entries: u64,
    /// Number of replicas whose bytes equal those of the piece that is used.
    pub replicas: u64,
    /// Number of headers and stored pieces that match their record.
    pub compared: u64,
    /// Number of headers and stored pieces without a record.
    pub unknown: u64,
    /// Checksums that the caller has to record.
    pub fresh: Vec<ShardSums>,
    /// Name and sha256 of each shard. Empty unless `Task::sha256` is set.
    pub sha256: Vec<(String, String)>,
    /// Notes about unusual but valid findings, one line each.
    pub notes: Vec<String>,
    /// The first bytes that differ from their recorded checksum.
    pub mismatch: Option<Mismatch>,
}

/// Number of bytes that `verify` reads of `checkpoint`.
pub fn bytes_to_read(checkpoint: &Checkpoint) -> u64 {
    let lens = checkpoint.source_catalog().shards.iter().map(|shard| shard.file_len);
    lens.fold(0, u64::saturating_add)
}

/// Reads every byte of `checkpoint`. Compares files with the sha256 in the name of their hub blob
/// or in their store, tensors with the hashes in their headers, replicas with each other, and all
/// bytes with their recorded checksums. Threads call `progress` with the number of bytes of each
/// read.
///
/// # Errors
/// Bytes cannot be read, or files, tensors or replicas differ. If bytes differ from their recorded
/// checksum, this is no error: everything is read, and the result has the bytes in
/// `Verified::mismatch`.
pub fn verify(
    checkpoint: &Checkpoint,
    task: &Task<'_>,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<Verified> {
    let catalog = checkpoint.source_catalog();
    let shared = Mutex::new(progress);
    let progress = |bytes| shared.lock()(bytes);
    let mut verified = Verified::default();
    let mut sums = Vec::with_capacity(catalog.shards.len());
    let stored = stored::by_shard(catalog);
    let cores = available_parallelism().map_or(1, |cores| cores.get().min(THREADS_MAX));
    // A slow server must be able to answer all reads in flight before their deadline, so fewer
    // threads read from it.
    let is_slow = checkpoint.sources().iter().any(|source| source.may_block());
    let threads = if is_slow { cores.min(THREADS_REMOTE) } else { cores };
    let sweep = Sweep::cached(task.settings, threads);
    for ((source, shard), stored) in checkpoint.sources().iter().zip(&catalog.shards).zip(&stored) {
        let known = task.recorded.and_then(|recorded| recorded.of(&shard.name));
        let seen = read_shard(&sweep, source, shard, stored, known, task.sha256, &progress)?;
        verified.bytes += shard.file_len;
        let name_of = |index: u32| catalog.tensor_at(index as usize).name.to_owned();
        let named = stored::Named { shard, stored, name_of: &name_of };
        let mismatched = judge(&mut verified, task, &named, source, &seen);
        let is_archive = checkpoint.format_of(shard) == InputFormat::Torch;
        *(if is_archive { &mut verified.entries } else { &mut verified.hashed }) += seen.hashed;
        // `--record` must not accept a tensor that differs from the hash in its header.
        if let Some((byte, fault)) = seen.differs {
            // The name of an entry of an archive is a number, so the name of its tensor is used.
            let fault = match named.place(&(byte..byte + 1)) {
                ShardPlace::Tensor(name) => fault.tensor(&name),
                _ => fault,
            };
            return Err(checkpoint.refused(fault.in_file(&shard.name)));
        }
        if let Some(expected) = blob_hash(source) {
            match check_blob(source, &expected, seen.sha256.as_deref().unwrap_or_default()) {
                Ok(()) => verified.blobs += 1,
                // The recorded checksums have already found a mismatch in this shard. That mismatch
                // is reported with its place, and the wrong sha256 follows from it.
                Err(_) if mismatched => {}
                Err(fault) => return Err(checkpoint.refused(fault.in_file(&shard.name))),
            }
        }
        if let Some(sha256) = seen.sha256.filter(|_| task.sha256) {
            verified.sha256.push((shard.name.clone(), sha256));
        }
        sums.push(seen.sums);
    }
    if verified.mismatch.is_none() {
        verified.replicas = compare_replicas(checkpoint, &sweep, &sums)?;
    }
    Ok(verified)
}

/// Compares the sha256 of the bytes with the one in the name of a hub blob, or with the one in its
/// store.
fn check_blob(source: &Source, expected: &str, found: &str) -> Result<(), Fault> {
    if found == expected {
        return Ok(());
    }
    let named = match source.local() {
        Some(_) => format!("the blob is named {expected}; download it again"),
        None => format!("its store has listed {expected}"),
    };
    Err(ErrorKind::HashMismatch.fault(format!("its bytes have the sha256 {found}, {named}")))
}

/// Compares all replicas with the pieces that are used. Returns the number of replicas.
fn compare_replicas(
    checkpoint: &Checkpoint,
    sweep: &Sweep,
    sums: &[Option<ShardSums>],
) -> Result<u64> {
    let mut compared = 0;
    for tensor in checkpoint.source_catalog().tensors() {
        for replica in tensor.replicas() {
            compare_replica(checkpoint, sweep, sums, &tensor, &replica)?;
            compared += 1;
        }
    }
    Ok(compared)
}

/// Compares a shard with its record, and collects the checksums that have to be recorded. Returns
/// whether the shard has a mismatch.
fn judge(
    verified: &mut Verified,
    task: &Task<'_>,
    named: &stored::Named<'_>,
    source: &Arc<Source>,
    seen: &ShardHashes,
) -> bool {
    let name = &named.shard.name;
    let known = task.recorded.and_then(|recorded| recorded.of(name));
    let now = source.version().lasting();
    let mismatch = match known {
        Some(known) if recorded::is_another_file(&known.version, &now) => {
            verified.notes.push(format!(
                "{name}: is another file than the one whose checksums were recorded on {}; \
                 recorded anew",
                mismatch::shown_time(known.recorded)
            ));
            None
        }
        Some(known) => {
            let digests = seen
                .as_recorded
                .as_deref()
                .or(seen.sums.as_ref().map(|sums| sums.digests.as_slice()));
            let mismatch = Mismatch::find(named, known, &now, digests.unwrap_or_default());
            if mismatch.is_none() {
                verified.compared += known.boundaries.len() as u64;
                if known.version != now {
                    // The file was copied or touched, but its bytes are unchanged. So only the
                    // version is recorded again.
                    verified.fresh.push(ShardSums { version: now, ..(**known).clone() });
                }
                return false;
            }
            mismatch
        }
        None => task.headers.and_then(|headers| {
            Mismatch::find_in_header(
                named.shard,
                headers.header(name, &now)?,
                headers.made,
                seen.header,
            )
        }),
    };
    match mismatch {
        Some(mismatch) if task.anew => {
            verified.notes.push(format!("{}; recorded anew", mismatch.line()));
        }
        Some(mismatch) => {
            match &mut verified.mismatch {
                Some(first) => first.others += 1 + mismatch.others,
                none => *none = Some(mismatch),
            }
            return true;
        }
        None => {}
    }
    if let Some(sums) = &seen.sums {
        verified.unknown += sums.boundaries.len() as u64;
        verified.fresh.push(sums.clone());
    }
    false
}

/// The file name and the text of a manifest for `checkpoint`.
pub fn manifest(checkpoint: &Checkpoint) -> (String, Vec<u8>) {
    let catalog = checkpoint.source_catalog();
    let shards = catalog.shards.iter().map(|shard| (shard.name.as_str(), shard.file_len));
    let tensors = catalog.tensors().map(|t| (t.name, t.dtype, t.shape));
    (manifest::file_name(&checkpoint.name), manifest::encode(shards, tensors))
}

/// Compares a replica with the piece that is used. If the checksums of both in `sums` are equal, no
/// bytes are read. Otherwise both are read and compared byte by byte, to find the place of a
/// difference.
fn compare_replica(
    checkpoint: &Checkpoint,
    sweep: &Sweep,
    sums: &[Option<ShardSums>],
    tensor: &Tensor<'_>,
    replica: &Piece<'_>,
) -> Result<()> {
    let used = tensor.pieces().find(|p| (p.offset, p.shape) == (replica.offset, replica.shape));
    let Some(used) = used else { return Ok(()) };
    if used.strides.is_some() || replica.strides.is_some() {
        return Err(checkpoint.refused(strided_replica(checkpoint, tensor, &used, replica)));
    }
    // Both pieces begin at the beginning of a part, so both are cut into the same chunks.
    let digests = |piece: &Piece<'_>| {
        let sums = sums[piece.shard.0 as usize].as_ref()?;
        Some(sums.digests_of(piece.range.clone()).collect::<Vec<_>>())
    };
    if let Some(known) = digests(&used)
        && digests(replica) == Some(known)
    {
        return Ok(());
    }
    let source = |piece: &Piece<'_>| &checkpoint.sources()[piece.shard.0 as usize];
    let len = used.len();
    let mut offset = 0;
    while offset < len {
        let chunk = RANGE_MAX.min(len - offset);
        let begin = |piece: &Piece<'_>| {
            let start = piece.range.start + offset;
            sweep.begin(source(piece), start..start + chunk, false)
        };
        let (a, b) = (begin(&used)?, begin(replica)?);
        let (a, b) = (a.wait()?, b.wait()?);
        if let Some(byte) = a.iter().zip(&*b).position(|(a, b)| a != b) {
            let name = |piece: &Piece<'_>| &checkpoint.source_catalog().shard(piece.shard).name;
            let message = format!(
                "the box at {:?} of shape {:?} lies in {} and in {}, and its byte {} differs",
                used.offset,
                used.shape,
                name(&used),
                name(replica),
                offset + byte as u64
            );
            let fault = ErrorKind::DcpOverlap.fault(message).tensor(tensor.name);
            return Err(checkpoint.refused(fault));
        }
        offset += chunk;
    }
    Ok(())
}

/// The fault of a piece and its replica that cannot be compared byte by byte, because one of them
/// has strides.
fn strided_replica(
    checkpoint: &Checkpoint,
    tensor: &Tensor<'_>,
    used: &Piece<'_>,
    replica: &Piece<'_>,
) -> Fault {
    let name = |piece: &Piece<'_>| &checkpoint.source_catalog().shard(piece.shard).name;
    let message = format!(
        "the box at {:?} of shape {:?} lies in {} and in {} with strides, and verify compares copies \
         without strides only; save `tensor.contiguous()`",
        used.offset,
        used.shape,
        name(used),
        name(replica)
    );
    ErrorKind::DcpOverlap.fault(message).tensor(tensor.name)
}

/// The sha256 of a file that its store reports, or that is the name of a hub blob.
fn blob_hash(source: &Arc<Source>) -> Option<String> {
    if let Some(stored) = source.stored_sha256() {
        return Some(stored);
    }
    let path = source.path();
    let name = path.file_name()?.to_str()?;
    let in_blobs = path.parent()?.file_name()? == "blobs";
    let is_hash = name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
    (in_blobs && is_hash).then(|| name.to_ascii_lowercase())
}
