//! The encrypted tensors of a file, with their keys. The module finds the bytes that have to be
//! read together, and decrypts them.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use crate::error::{ErrorKind, Fault};

use super::crypt::Encryption;
use super::keys::Secret;
use super::secretbox::DataKey;

/// Maximum length of an encrypted piece in bytes. A read of one byte needs memory for a whole
/// piece.
const PIECE_LEN_MAX: u64 = 16 << 20;

/// A tensor whose data is encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncryptedTensor {
    /// Its name.
    pub name: String,
    /// The range of its data in the file, which is not empty.
    pub range: Range<u64>,
    /// How it is encrypted.
    pub encryption: Encryption,
}

/// Decrypts the tensors of one file.
#[derive(Debug)]
pub struct Decryptor {
    /// Encrypted tensors with their keys, sorted by the offsets of their data.
    tensors: Box<[(EncryptedTensor, Arc<DataKey>)]>,
}

impl Decryptor {
    /// The decryptor of `tensors`, which are in the order of their data. The keys come from
    /// `secret`.
    ///
    /// # Errors
    /// The secret does not fit the tensors, their pieces are too long, or the tensors have
    /// different key derivations. Different derivations are refused because a derivation takes
    /// seconds, and the tensorizer package uses only one for a file.
    pub fn new(tensors: Vec<EncryptedTensor>, secret: &Secret) -> Result<Decryptor, Fault> {
        let mut derivations =
            tensors.iter().filter_map(|tensor| Some((tensor, tensor.encryption.derivation?)));
        let first = derivations.next();
        if let Some((other, _)) =
            derivations.find(|(_, it)| first.is_some_and(|(_, one)| one != *it))
        {
            let message = "has another salt or other limits of its key derivation than a tensor \
                           before it; save the checkpoint again";
            return Err(ErrorKind::HeaderDecode.fault(message).tensor(&other.name));
        }
        let unlocked = tensors.into_iter().map(|tensor| {
            let EncryptedTensor { name, encryption, .. } = &tensor;
            let longest = encryption.piece(0);
            if longest.end > PIECE_LEN_MAX {
                let message = format!(
                    "is encrypted in pieces of {} bytes, tensorfs reads pieces of up to \
                     {PIECE_LEN_MAX}; save it again with pieces of 2097152",
                    longest.end
                );
                return Err(ErrorKind::HeaderDecode.fault(message).tensor(name));
            }
            let key = secret
                .key_of(encryption.derivation.as_ref())
                .map_err(|fault| fault.tensor(name))?;
            Ok((tensor, key))
        });
        Ok(Decryptor { tensors: unlocked.collect::<Result<_, _>>()? })
    }

    /// The shortest first piece of all tensors. The key can be checked on it with the least work.
    pub fn sample(&self) -> Option<Range<u64>> {
        let firsts = self.tensors.iter().map(|(tensor, _)| {
            let piece = tensor.encryption.piece(0);
            tensor.range.start..tensor.range.start + piece.end
        });
        firsts.min_by_key(|piece| piece.end - piece.start)
    }

    /// The piece that contains the byte at `offset`. `None` if that byte is not encrypted.
    pub fn piece_at(&self, offset: u64) -> Option<Range<u64>> {
        let after = self.tensors.partition_point(|(tensor, _)| tensor.range.start <= offset);
        let (EncryptedTensor { range, encryption, .. }, _) =
            self.tensors.get(after.checked_sub(1)?)?;
        if offset >= range.end {
            return None;
        }
        let piece = encryption.cover(&(offset - range.start..offset - range.start + 1));
        Some(range.start + piece.start..range.start + piece.end)
    }

    /// The bytes that have to be read for `range`: the range, extended to whole pieces at both
    /// ends.
    pub fn cover(&self, range: &Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return range.clone();
        }
        let start = self.piece_at(range.start).map_or(range.start, |piece| piece.start);
        let end = self.piece_at(range.end - 1).map_or(range.end, |piece| piece.end);
        start..end
    }

    /// A good end for a read that begins at the start of `range` and should end near the end of
    /// `range`. Such a read is not empty, and its end lies inside no piece.
    pub fn good_end(&self, range: &Range<u64>) -> u64 {
        match self.piece_at(range.end).filter(|piece| piece.start < range.end) {
            None => range.end,
            Some(piece) if piece.start > range.start => piece.start,
            Some(piece) => piece.end,
        }
    }

    /// Decrypts all pieces in `bytes`, which begin at offset `start` of the file and contain whole
    /// pieces only. After an error, some pieces in `bytes` may be decrypted and others not.
    ///
    /// # Errors
    /// `decrypt_failed`, with the tensor and the byte range of the piece.
    pub fn decrypt(&self, start: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        let end = start + bytes.len() as u64;
        let first = self.tensors.partition_point(|(tensor, _)| tensor.range.end <= start);
        for (tensor, key) in &self.tensors[first..] {
            let EncryptedTensor { name, range, encryption } = tensor;
            if range.start >= end {
                break;
            }
            let wanted = start.max(range.start) - range.start..end.min(range.end) - range.start;
            let mut offset = wanted.start;
            while offset < wanted.end {
                let index = offset / encryption.piece_len;
                let piece = encryption.piece(index);
                let place = range.start + piece.start..range.start + piece.end;
                // A part of a piece cannot be decrypted, because only the whole piece has a MAC.
                let whole = place.start >= start && place.end <= end;
                let opened = whole.then(|| {
                    let within = (place.start - start) as usize..(place.end - start) as usize;
                    encryption.open(key, index, &mut bytes[within]).ok()
                });
                if opened.flatten().is_none() {
                    return Err(failed(name, &place));
                }
                offset = piece.end;
            }
        }
        Ok(())
    }
}

fn failed(name: &str, place: &Range<u64>) -> Fault {
    let message = format!(
        "bytes {} to {} of the file cannot be decrypted: give the key that they were encrypted \
         with, or restore the file from a good copy",
        place.start, place.end
    );
    ErrorKind::DecryptFailed.fault(message).tensor(name)
}
