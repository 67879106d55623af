//! The encryption section in the header of an encrypted tensor. It says how the key of the tensor
//! is derived, and has the MACs of the pieces.

#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::error::{ErrorKind, Fault};

use super::fields::Fields;
use super::keys::{KeyDerivation, SALT_LEN};
use super::secretbox::{DataKey, MAC_LEN, Mac, NONCE_LEN, PieceNonce, WrongMac};

/// Types of the parts of an encryption section.
const KEY_DERIVATION: u16 = 1;
const PIECES: u16 = 2;
const ONE_PIECE: u16 = 3;

/// The only supported method of key derivation, and its only supported algorithm, Argon2id version
/// 1.3.
const PASSPHRASE_HASH: u16 = 1;
const ARGON2ID: u32 = 2;

/// Minimum length of a piece in bytes. The length of a piece is also a multiple of
/// `PIECE_LEN_STEP`, the block length of the cipher.
pub const PIECE_LEN_MIN: u64 = 1024;
const PIECE_LEN_STEP: u64 = 64;

/// Maximum length of a section in bytes. It is enough for a tensor of 2 TiB in pieces of
/// `PIECE_LEN`.
pub const SECTION_LEN_MAX: u64 = 16 << 20;

/// Maximum length in bytes of all sections of one file together. It is enough for 8 TiB in pieces
/// of `PIECE_LEN`. The limit is needed because the MACs of an open file stay in memory.
pub const SECTIONS_LEN_MAX: u64 = 64 << 20;

/// Length in bytes of the pieces that tensorfs writes.
pub const PIECE_LEN: u64 = 2 << 20;

/// How the data of a tensor is encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encryption {
    /// How the key is derived from a passphrase. `None` if a key is used directly.
    pub derivation: Option<KeyDerivation>,
    /// Length of the data in bytes.
    data_len: u64,
    /// Length in bytes of each piece except the last one, which may be shorter.
    pub piece_len: u64,
    /// Nonce of the first piece.
    nonce: PieceNonce,
    macs: Box<[Mac]>,
    /// Whether the section has the form for a single piece.
    one_piece: bool,
}

impl Encryption {
    /// The encryption of data that is cut into pieces of `PIECE_LEN` bytes. `macs` has the MAC of
    /// each piece.
    ///
    /// # Panics
    /// The number of MACs differs from the number of pieces.
    pub fn new(
        derivation: Option<KeyDerivation>,
        data_len: u64,
        nonce: PieceNonce,
        macs: Vec<Mac>,
    ) -> Encryption {
        assert_eq!(macs.len() as u64, data_len.div_ceil(PIECE_LEN), "one MAC for each piece");
        let macs = macs.into_boxed_slice();
        Encryption { derivation, data_len, piece_len: PIECE_LEN, nonce, macs, one_piece: false }
    }

    /// Nonce of the first piece.
    pub fn nonce(&self) -> PieceNonce {
        self.nonce
    }

    /// Number of pieces.
    pub fn pieces(&self) -> u64 {
        self.macs.len() as u64
    }

    /// The range of the data that is piece `index`.
    pub fn piece(&self, index: u64) -> Range<u64> {
        let start = index.saturating_mul(self.piece_len).min(self.data_len);
        start..start.saturating_add(self.piece_len).min(self.data_len)
    }

    /// The range of the data that consists of all pieces which `range` touches.
    pub fn cover(&self, range: &Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return range.start..range.start;
        }
        let first = range.start / self.piece_len;
        self.piece(first).start..self.piece((range.end - 1) / self.piece_len).end
    }

    /// Decrypts piece `index` in place if its MAC is right. Otherwise its bytes stay unchanged.
    ///
    /// # Errors
    /// The MAC is wrong, there is no piece `index`, or `piece` does not have its length.
    pub fn open(&self, key: &DataKey, index: u64, piece: &mut [u8]) -> Result<(), WrongMac> {
        let range = self.piece(index);
        let mac = usize::try_from(index).ok().and_then(|index| self.macs.get(index));
        match mac {
            Some(mac) if range.end - range.start == piece.len() as u64 => {
                key.open(&self.nonce.of_piece(index), mac, piece)
            }
            _ => Err(WrongMac),
        }
    }

    /// Maximum length of a section for data of `data_len` bytes, including its length field.
    pub fn section_len_max(data_len: u64) -> u64 {
        let fixed = 8 + 2 + (8 + 2 + 2 + 8 + 8 + 4 + 2 + SALT_LEN) + (8 + 2 + 8 + NONCE_LEN + 8);
        let macs = data_len.div_ceil(PIECE_LEN_MIN).saturating_mul(MAC_LEN as u64);
        SECTION_LEN_MAX.min(macs.saturating_add(fixed as u64))
    }

    /// Appends the section, with its length field first.
    pub fn encode(&self, to: &mut Vec<u8>) {
        let start = to.len();
        to.extend([0; 8]);
        to.extend((1 + u16::from(self.derivation.is_some())).to_le_bytes());
        if let Some(derivation) = &self.derivation {
            part(to, KEY_DERIVATION, |to| {
                to.extend(PASSPHRASE_HASH.to_le_bytes());
                to.extend(derivation.ops_limit.to_le_bytes());
                to.extend(derivation.mem_limit.to_le_bytes());
                to.extend(ARGON2ID.to_le_bytes());
                to.extend((SALT_LEN as u16).to_le_bytes());
                to.extend(derivation.salt);
            });
        }
        if self.one_piece {
            part(to, ONE_PIECE, |to| to.extend([&self.nonce.bytes()[..], &self.macs[0]].concat()));
        } else {
            part(to, PIECES, |to| {
                to.extend(self.piece_len.to_le_bytes());
                to.extend(self.nonce.bytes());
                to.extend((self.macs.len() as u64).to_le_bytes());
                to.extend(self.macs.as_flattened());
            });
        }
        write_len(to, start);
    }

    /// Appends the section of a tensor without data in an encrypted file, with its length field
    /// first.
    pub fn encode_none(to: &mut Vec<u8>) {
        to.extend(2_u64.to_le_bytes());
        to.extend([0; 2]);
    }

    /// Parses a section, including its length field, for data of `data_len` bytes. `None` if the data is empty and
    /// not encrypted.
    ///
    /// # Errors
    /// The fault of the section.
    pub fn parse(section: &[u8], data_len: u64) -> Result<Option<Encryption>, Fault> {
        let mut fields = Fields::new(section, 0);
        let encryption = Encryption::read(&mut fields, data_len)?;
        fields.end("the header")?;
        Ok(encryption)
    }

    /// Reads the section, including its length field, of a tensor with `data_len` bytes. `None` if
    /// the tensor has no data and is not encrypted.
    pub(super) fn read(
        fields: &mut Fields<'_>,
        data_len: u64,
    ) -> Result<Option<Encryption>, Fault> {
        let mut section = fields.section_64("the encryption")?;
        let mut derivation = None;
        let mut encryption = None;
        for _ in 0..section.u16("the number of parts of the encryption")? {
            let mut part = section.section_64("a part of the encryption")?;
            let twice = match part.u16("the type of a part of the encryption")? {
                KEY_DERIVATION => derivation.replace(read_derivation(&mut part)?).is_some(),
                PIECES => encryption.replace(read_pieces(&mut part, data_len)?).is_some(),
                ONE_PIECE => encryption.replace(read_one_piece(&mut part, data_len)?).is_some(),
                code => {
                    let what =
                        format!("a part of the encryption has the type {code}, 1 to 3 expected");
                    return Err(part.bad(&what));
                }
            };
            if twice {
                return Err(part.bad("the encryption has two parts of one kind"));
            }
            part.end("a part of the encryption")?;
        }
        section.end("the encryption")?;
        match encryption {
            Some(encryption) => Ok(Some(Encryption { derivation, ..encryption })),
            None if data_len == 0 => Ok(None),
            None => Err(ErrorKind::HeaderDecode.fault(
                "is without encryption in a file that is encrypted; save the \
                 checkpoint again",
            )),
        }
    }
}

/// Appends a part of a section: its length, its type and its body.
fn part(to: &mut Vec<u8>, kind: u16, body: impl FnOnce(&mut Vec<u8>)) {
    let start = to.len();
    to.extend([0; 8]);
    to.extend(kind.to_le_bytes());
    body(to);
    write_len(to, start);
}

/// Writes the number of bytes that follow the 8 bytes at `start` into these 8 bytes.
fn write_len(to: &mut [u8], start: usize) {
    let len = (to.len() - start - 8) as u64;
    to[start..start + 8].copy_from_slice(&len.to_le_bytes());
}

fn read_derivation(part: &mut Fields<'_>) -> Result<KeyDerivation, Fault> {
    let method = part.u16("the method of the key derivation")?;
    let ops_limit = part.u64("the passes of the key derivation")?;
    let mem_limit = part.u64("the memory of the key derivation")?;
    let algorithm = part.u32("the algorithm of the key derivation")?;
    if (method, algorithm) != (PASSPHRASE_HASH, ARGON2ID) {
        let what = format!(
            "the key derivation has the method {method} and the algorithm {algorithm}, 1 and 2 \
             (Argon2id) expected"
        );
        return Err(part.bad(&what));
    }
    let salt = part.bytes_16("the salt of the key derivation")?;
    let Ok(salt) = salt.try_into() else {
        let what = format!("the salt has {} bytes, {SALT_LEN} expected", salt.len());
        return Err(part.bad(&what));
    };
    Ok(KeyDerivation { ops_limit, mem_limit, salt })
}

fn read_pieces(part: &mut Fields<'_>, data_len: u64) -> Result<Encryption, Fault> {
    let piece_len = part.u64("the length of an encrypted piece")?;
    if piece_len < PIECE_LEN_MIN || !piece_len.is_multiple_of(PIECE_LEN_STEP) {
        let what = format!(
            "the encrypted pieces have {piece_len} bytes, a multiple of {PIECE_LEN_STEP} from \
             {PIECE_LEN_MIN} on expected"
        );
        return Err(part.bad(&what));
    }
    let nonce = PieceNonce::new(part.array("the nonce")?);
    let count = part.u64("the number of MACs")?;
    let expected = data_len.div_ceil(piece_len);
    if count != expected {
        let what = format!(
            "the encryption has {count} MACs, {expected} expected for {data_len} bytes in pieces \
             of {piece_len}"
        );
        return Err(part.bad(&what));
    }
    let macs_len = usize::try_from(count).ok().and_then(|count| count.checked_mul(MAC_LEN));
    let macs = part
        .take(macs_len.unwrap_or(usize::MAX), "the list of MACs")?
        .as_chunks::<MAC_LEN>()
        .0
        .into();
    Ok(Encryption { derivation: None, data_len, piece_len, nonce, macs, one_piece: false })
}

fn read_one_piece(part: &mut Fields<'_>, data_len: u64) -> Result<Encryption, Fault> {
    let nonce = PieceNonce::new(part.array("the nonce")?);
    let macs = Box::new([part.array("a MAC")?]);
    let piece_len = data_len.max(1);
    Ok(Encryption { derivation: None, data_len, piece_len, nonce, macs, one_piece: true })
}
