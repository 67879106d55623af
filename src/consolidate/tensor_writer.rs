//! Writes tensors into a tensorizer file with several threads.
//!
//! Each tensor is hashed while it is written. Its header is written when the hashes are known. The list of
//! tensors at the start of the file is written last.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};
use crate::format::tensorizer::crypt::PIECE_LEN;
use crate::format::tensorizer::encode::{END_MARK, FileEncoder, NewTensor, TensorHeader};
use crate::format::tensorizer::keys::{KeyDerivation, Secret};
use crate::format::tensorizer::secretbox::{DataKey, Mac, NONCE_LEN, PieceNonce};
use crate::hash::{Digest, Hasher};
use crate::parallel::{JobProgress, in_any_order};
use crate::sync::Mutex;

/// Number of threads that hash and write.
pub(super) const THREADS: usize = 6;

/// Maximum number of bytes that a thread reads and writes at a time, a multiple of `PIECE_LEN`. Consecutive
/// tensors that fit into this number are written together.
const STEP_LEN: u64 = 4 << 20;

/// Number of bytes that are hashed with the first function and then with the second one, so that the second function
/// finds the bytes in the CPU cache.
const HASH_STEP_LEN: usize = 128 << 10;

/// Number of passes, and memory in bytes, for deriving a key from a passphrase. The reference implementation
/// uses the same values, the preset "moderate" of libsodium.
const OPS_LIMIT: u64 = 3;
const MEM_LIMIT: u64 = 256 << 20;

/// The source of the bytes of tensors.
pub trait TensorBytes: Sync {
    /// Copies the bytes of the tensor at `index` from `offset` on to `target`.
    ///
    /// # Errors
    /// If the bytes cannot be read.
    fn read(&self, index: usize, offset: u64, target: &mut [u8]) -> Result<()>;

    /// The bytes `range` of the tensor at `index`, if they are in memory.
    fn in_memory(&self, _index: usize, _range: &Range<u64>) -> Option<&[u8]> {
        None
    }
}

/// A file that several threads write at any offset.
pub trait WriteAt: Sync {
    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// If the bytes cannot be written.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Writes the bytes that the target has kept in memory.
    ///
    /// # Errors
    /// If the bytes cannot be written.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Block length of the file in bytes. `None` if writes are not faster from memory that is aligned with the file.
    /// Aligned means that the address and the offset in the file have the same remainder modulo the block length.
    fn block_len(&self) -> Option<usize> {
        None
    }
}

impl WriteAt for File {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }
}

/// A range of the file that was written, and the hash of its bytes.
#[derive(Clone, Debug)]
pub(super) struct WrittenRange {
    pub(super) range: Range<u64>,
    pub(super) digest: Digest,
}

impl WrittenRange {
    /// Refuses bytes that were read back if their hash `digest` differs from the hash of the written bytes.
    pub(super) fn compare(&self, digest: &Digest, shown: &Path) -> Result<()> {
        if *digest == self.digest {
            return Ok(());
        }
        let Range { start, end } = self.range;
        let message = format!("bytes {start}..{end} read back differ from those written");
        Err(Error::io(shown, "verify", std::io::Error::other(message)))
    }
}

/// The key with which a new file is encrypted.
#[derive(Clone, Debug)]
pub struct WriteKey {
    key: Arc<DataKey>,
    /// The derivation of the key from a passphrase. `None` for a plain key.
    derivation: Option<KeyDerivation>,
}

impl WriteKey {
    /// The key `key`. `derivation` says how it was derived from a passphrase, if it was.
    pub fn new(key: DataKey, derivation: Option<KeyDerivation>) -> WriteKey {
        WriteKey { key: Arc::new(key), derivation }
    }

    /// The key of `secret`. For a passphrase, a new salt is made, and the derivation takes `MEM_LIMIT` bytes of
    /// memory.
    ///
    /// # Errors
    /// If the system returns no random bytes, or has too little memory.
    pub fn of_secret(secret: &Secret) -> Result<WriteKey> {
        if let Ok(key) = secret.key_of(None) {
            return Ok(WriteKey { key, derivation: None });
        }
        let derivation =
            KeyDerivation { ops_limit: OPS_LIMIT, mem_limit: MEM_LIMIT, salt: random()? };
        let key = secret.key_of(Some(&derivation)).map_err(|fault| Error::usage(fault.message))?;
        Ok(WriteKey { key, derivation: Some(derivation) })
    }
}

/// Random bytes from the system.
fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = getrandom::fill(&mut bytes);
    filled.map_err(|e| Error::internal(format!("the system gives no random bytes: {e}")))?;
    Ok(bytes)
}

/// Writes the tensors of one file.
#[derive(Debug)]
pub struct TensorWriter {
    encoder: FileEncoder,
    /// The key of an encrypted file.
    key: Option<Arc<DataKey>>,
    /// Whether hashes of the written bytes are kept, to compare the bytes when they are read back.
    keep_digests: bool,
    pub(super) written: Vec<WrittenRange>,
}

/// The hashes of one header.
struct HeaderHashes {
    crc32: Option<crc32fast::Hasher>,
    sha256: Sha256,
}

impl HeaderHashes {
    fn of(header: &TensorHeader) -> HeaderHashes {
        let crc32 = header.has_crc32().then(crc32fast::Hasher::new);
        let mut hashes = HeaderHashes { crc32, sha256: Sha256::new() };
        header.hashed_parts().iter().for_each(|part| hashes.update(part));
        hashes
    }

    fn update(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(HASH_STEP_LEN) {
            if let Some(crc32) = &mut self.crc32 {
                crc32.update(part);
            }
            self.sha256.update(part);
        }
    }

    fn set(self, header: &mut TensorHeader) {
        let crc32 = self.crc32.map_or(0, crc32fast::Hasher::finalize);
        header.set_hashes(crc32, self.sha256.finalize().into());
    }
}

/// The data of one call of `TensorWriter::write`.
struct WriteCall<'a> {
    headers: &'a [TensorHeader],
    bytes: &'a dyn TensorBytes,
    key: Option<&'a DataKey>,
    target: &'a dyn WriteAt,
    /// Name of the target for errors.
    shown: &'a Path,
    keep_digests: bool,
    /// Buffers for groups and steps.
    buffers: Mutex<Vec<StepBuffer>>,
}

/// A buffer for the bytes of a step.
#[derive(Default)]
struct StepBuffer(Vec<u8>);

impl StepBuffer {
    /// `len` bytes with unspecified content. Their address modulo `block_len` equals `offset` modulo `block_len`.
    fn bytes(&mut self, len: usize, offset: u64, block_len: usize) -> &mut [u8] {
        let needed = len + block_len - 1;
        if self.0.len() < needed {
            self.0 = vec![0; needed.max(STEP_LEN as usize + block_len)];
        }
        let wanted = (offset % block_len as u64) as usize;
        let skipped = (wanted + block_len - self.0.as_ptr().addr() % block_len) % block_len;
        &mut self.0[skipped..skipped + len]
    }
}

impl TensorWriter {
    /// A writer of a file that begins at byte `start` of its target. `entries_len` is the length of its list of
    /// tensors in bytes.
    pub fn new(start: u64, entries_len: u64) -> TensorWriter {
        let encoder = FileEncoder::new(start, entries_len);
        TensorWriter { encoder, key: None, keep_digests: false, written: Vec::new() }
    }

    /// The same writer with encryption of the data.
    #[must_use]
    pub fn encrypted(self, key: &WriteKey) -> TensorWriter {
        let encoder = self.encoder.encrypted(key.derivation);
        TensorWriter { encoder, key: Some(key.key.clone()), ..self }
    }

    /// The same writer. `keep_digests` says whether it keeps hashes of the bytes that it writes.
    pub(super) fn keeping_digests(self, keep_digests: bool) -> TensorWriter {
        TensorWriter { keep_digests, ..self }
    }

    /// Number of data bytes of the tensors so far.
    pub fn data_len(&self) -> u64 {
        self.encoder.data_len()
    }

    /// The end of the file in its target, including the end mark.
    pub fn end(&self) -> u64 {
        self.encoder.end() + END_MARK.len() as u64
    }

    /// Describes `tensors`, which follow those of earlier calls. They have to be written before the next call.
    ///
    /// # Errors
    /// `Error::Refused` if the format cannot store a tensor, or if a name exists already. The writer is
    /// unchanged then.
    pub fn describe(&mut self, tensors: &[NewTensor], shown: &Path) -> Result<Vec<TensorHeader>> {
        let mut failed = None;
        let mut nonce = || {
            let nonce = random().map(PieceNonce::new);
            nonce.unwrap_or_else(|error| {
                failed = Some(error);
                PieceNonce::new([0; NONCE_LEN])
            })
        };
        let headers = self.encoder.add_all(tensors, &mut nonce);
        match failed {
            Some(error) => Err(error),
            None => headers.map_err(|fault| Error::refused(shown, fault)),
        }
    }

    /// Writes the described tensors with their headers to `target`. `progress` is called with numbers of bytes on the
    /// calling thread. An error of `progress` ends the work. `shown` is the name of the target in errors.
    ///
    /// # Errors
    /// Errors of `bytes`, of the target and of `progress`. The target is then not a complete file.
    pub fn write(
        &mut self,
        headers: &[TensorHeader],
        bytes: &dyn TensorBytes,
        target: &dyn WriteAt,
        shown: &Path,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let (key, keep_digests) = (self.key.as_deref(), self.keep_digests);
        let buffers = Mutex::default();
        let call = WriteCall { headers, bytes, key, target, shown, keep_digests, buffers };
        let groups = groups(headers);
        let work = |number: usize, progress: &JobProgress<'_>| {
            call.write_group(groups[number].clone(), progress)
        };
        let written = in_any_order(groups.len(), THREADS, &work, progress)?;
        self.written.extend(written.into_iter().flatten());
        Ok(())
    }

    /// Writes the list of tensors and the end mark. The target is then a complete file until the next `write`.
    ///
    /// # Errors
    /// Errors of the target.
    pub fn finish(&mut self, target: &dyn WriteAt, shown: &Path) -> Result<()> {
        let failed = |e| Error::io(shown, "write", e);
        let (start, end) = (self.encoder.start(), self.encoder.end());
        for (bytes, offset) in [(&self.encoder.head()[..], start), (&END_MARK[..], end)] {
            target.write_all_at(bytes, offset).map_err(failed)?;
            if self.keep_digests {
                let range = offset..offset + bytes.len() as u64;
                self.written.push(WrittenRange { range, digest: Digest::of(bytes) });
            }
        }
        target.flush().map_err(failed)
    }
}

/// Groups of consecutive tensors that are written together. A group has at most `STEP_LEN` bytes, or is a
/// single tensor.
fn groups(headers: &[TensorHeader]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    for (index, header) in headers.iter().enumerate() {
        match groups.last_mut() {
            Some(last) if header.end() - headers[last.start].start <= STEP_LEN => last.end += 1,
            _ => groups.push(index..index + 1),
        }
    }
    groups
}

impl WriteCall<'_> {
    fn write_group(
        &self,
        group: Range<usize>,
        progress: &JobProgress<'_>,
    ) -> Result<Vec<WrittenRange>> {
        let (start, end) = (self.headers[group.start].start, self.headers[group.end - 1].end());
        if end - start > STEP_LEN {
            return self.write_large(group.start, progress);
        }
        let mut buffer = self.buffer();
        let bytes = buffer.bytes((end - start) as usize, start, self.block_len());
        for index in group {
            let mut header = self.headers[index].clone();
            let data_start = (header.data_start() - start) as usize;
            let (front, data) = bytes.split_at_mut(data_start);
            let data = &mut data[..header.data_len as usize];
            self.bytes.read(index, 0, data)?;
            let mut hashes = HeaderHashes::of(&header);
            hashes.update(data);
            hashes.set(&mut header);
            let macs = self.seal(&header, 0, data);
            header.set_macs(macs);
            front[data_start - header.bytes().len()..].copy_from_slice(header.bytes());
        }
        self.put(bytes, start)?;
        let written = self.keep_digests.then(|| written(start, bytes)).into_iter().collect();
        self.buffers.lock().push(buffer);
        progress.add(end - start)?;
        Ok(written)
    }

    /// Writes a single tensor in steps, and then its header.
    fn write_large(&self, index: usize, progress: &JobProgress<'_>) -> Result<Vec<WrittenRange>> {
        let mut header = self.headers[index].clone();
        let mut hashes = HeaderHashes::of(&header);
        let mut hasher = Hasher::new();
        let mut buffer = self.buffer();
        let mut macs = Vec::new();
        let is_copied = header.encryption().is_some() || self.target.block_len().is_some();
        let mut offset = 0;
        while offset < header.data_len {
            let range = offset..header.data_len.min(offset + STEP_LEN);
            let bytes = match self.bytes.in_memory(index, &range).filter(|_| !is_copied) {
                Some(bytes) => {
                    hashes.update(bytes);
                    bytes
                }
                None => {
                    let len = (range.end - range.start) as usize;
                    let start = header.data_start() + offset;
                    let bytes = buffer.bytes(len, start, self.block_len());
                    self.bytes.read(index, offset, bytes)?;
                    hashes.update(bytes);
                    macs.extend(self.seal(&header, offset, bytes));
                    bytes
                }
            };
            if self.keep_digests {
                hasher.update(bytes);
            }
            self.put(bytes, header.data_start() + offset)?;
            progress.add(range.end - range.start)?;
            offset = range.end;
        }
        self.buffers.lock().push(buffer);
        hashes.set(&mut header);
        header.set_macs(macs);
        self.put(header.bytes(), header.start)?;
        progress.add(header.bytes().len() as u64)?;
        if !self.keep_digests {
            return Ok(Vec::new());
        }
        let range = header.data_start()..header.end();
        let data = WrittenRange { range, digest: hasher.finish() };
        Ok(vec![written(header.start, header.bytes()), data])
    }

    /// Encrypts bytes of a tensor from `offset` on, where a piece must begin. Returns the MACs of the pieces.
    /// Without encryption there are none.
    fn seal(&self, header: &TensorHeader, offset: u64, bytes: &mut [u8]) -> Vec<Mac> {
        let (Some(key), Some(encryption)) = (self.key, header.encryption()) else {
            return Vec::new();
        };
        let first = offset / PIECE_LEN;
        let pieces = bytes.chunks_mut(PIECE_LEN as usize).zip(first..);
        pieces.map(|(piece, index)| key.seal(&encryption.nonce().of_piece(index), piece)).collect()
    }

    fn buffer(&self) -> StepBuffer {
        self.buffers.lock().pop().unwrap_or_default()
    }

    fn block_len(&self) -> usize {
        self.target.block_len().unwrap_or(1)
    }

    fn put(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let put = self.target.write_all_at(bytes, offset);
        put.map_err(|e| Error::io(self.shown, "write", e))
    }
}

fn written(start: u64, bytes: &[u8]) -> WrittenRange {
    WrittenRange { range: start..start + bytes.len() as u64, digest: Digest::of(bytes) }
}
