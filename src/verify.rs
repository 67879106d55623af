//! Reading every byte of a checkpoint: what the proof cannot see.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::catalog::{Piece, Tensor};
use crate::checkpoint::Checkpoint;
use crate::error::{Class, Fault, Result};
use crate::format::manifest;
use crate::io::{Read, read_all};
use crate::source::Source;

/// Bytes read at a time.
const CHUNK_LEN: u64 = 4 << 20;

/// What was compared while reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Bytes read.
    pub bytes: u64,
    /// Hub blobs whose sha256 is their name.
    pub blobs: u64,
    /// Replicas that hold the bytes of the piece that is used.
    pub replicas: u64,
}

/// Bytes that `verify` will read of `checkpoint`.
pub fn bytes_to_read(checkpoint: &Checkpoint) -> u64 {
    let catalog = checkpoint.catalog();
    let replicas = catalog.tensors.iter().flat_map(|tensor| &tensor.replicas);
    let replicas: u64 = replicas.map(|piece| 2 * (piece.range.end - piece.range.start)).sum();
    catalog.shards.iter().map(|shard| shard.file_len).sum::<u64>() + replicas
}

/// Reads every byte of `checkpoint`, compares hub blobs with the hash that is their name and
/// replicas with each other. Calls `progress` with the bytes read since the last call.
pub fn verify(checkpoint: &Checkpoint, progress: &mut dyn FnMut(u64)) -> Result<Verified> {
    let mut verified = Verified::default();
    let mut buf = vec![0; CHUNK_LEN as usize];
    for (source, shard) in checkpoint.sources().iter().zip(&checkpoint.catalog().shards) {
        let expected = blob_hash(source);
        let mut hash = expected.is_some().then(Sha256::new);
        let mut at = 0;
        while at < shard.file_len {
            let chunk = &mut buf[..CHUNK_LEN.min(shard.file_len - at) as usize];
            read_all(&mut [Read { source, offset: at, target: chunk }])?;
            if let Some(hash) = &mut hash {
                hash.update(&chunk);
            }
            at += chunk.len() as u64;
            progress(chunk.len() as u64);
        }
        verified.bytes += shard.file_len;
        if let (Some(expected), Some(hash)) = (expected, hash) {
            let found = hex(&hash.finalize());
            if found != expected {
                let message = format!(
                    "its bytes have the sha256 {found}, the blob is named {expected}; download it again"
                );
                let fault = Fault::new(Class::HashMismatch, message).in_file(&shard.name);
                return Err(checkpoint.refused(fault));
            }
            verified.blobs += 1;
        }
    }
    for tensor in &checkpoint.catalog().tensors {
        for replica in &tensor.replicas {
            verified.bytes += compare_replica(checkpoint, tensor, replica, progress)?;
            verified.replicas += 1;
        }
    }
    Ok(verified)
}

/// The text of a manifest of `checkpoint`, and the name under which it is found again.
pub fn manifest(checkpoint: &Checkpoint) -> (String, Vec<u8>) {
    let catalog = checkpoint.catalog();
    let shards = catalog.shards.iter().map(|shard| (shard.name.as_str(), shard.file_len));
    let tensors = catalog.tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice()));
    (manifest::file_name(&checkpoint.name), manifest::encode(shards, tensors))
}

fn compare_replica(
    checkpoint: &Checkpoint,
    tensor: &Tensor,
    replica: &Piece,
    progress: &mut dyn FnMut(u64),
) -> Result<u64> {
    let used =
        tensor.pieces.iter().find(|p| (&p.offset, &p.shape) == (&replica.offset, &replica.shape));
    let Some(used) = used else { return Ok(0) };
    let source = |piece: &Piece| &checkpoint.sources()[piece.shard.0 as usize];
    let len = used.range.end - used.range.start;
    let mut at = 0;
    let (mut a, mut b) =
        (vec![0; CHUNK_LEN.min(len) as usize], vec![0; CHUNK_LEN.min(len) as usize]);
    while at < len {
        let chunk = CHUNK_LEN.min(len - at) as usize;
        read_all(&mut [
            Read { source: source(used), offset: used.range.start + at, target: &mut a[..chunk] },
            Read {
                source: source(replica),
                offset: replica.range.start + at,
                target: &mut b[..chunk],
            },
        ])?;
        if let Some(byte) = (0..chunk).find(|&byte| a[byte] != b[byte]) {
            let name = |piece: &Piece| &checkpoint.catalog().shard(piece.shard).name;
            let message = format!(
                "the box at {:?} of shape {:?} lies in {} and in {}, and its byte {} differs",
                used.offset,
                used.shape,
                name(used),
                name(replica),
                at + byte as u64
            );
            let fault = Fault::new(Class::DcpOverlap, message).tensor(&tensor.name);
            return Err(checkpoint.refused(fault));
        }
        at += chunk as u64;
        progress(2 * chunk as u64);
    }
    Ok(2 * len)
}

/// The sha256 that a hub blob has as its name.
fn blob_hash(source: &Arc<Source>) -> Option<String> {
    let path = source.path();
    let name = path.file_name()?.to_str()?;
    let in_blobs = path.parent()?.file_name()? == "blobs";
    let is_hash = name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
    (in_blobs && is_hash).then(|| name.to_ascii_lowercase())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
