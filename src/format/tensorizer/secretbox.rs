//! The cipher of encrypted tensors: `crypto_secretbox` of NaCl, which is XSalsa20 with a MAC of
//! Poly1305.
//!
//! The data of a tensor is cut into pieces. Each piece has a MAC and is encrypted in place, so its
//! length does not change. The nonce of a piece is the nonce of the tensor plus the number of the
//! piece.

use std::fmt;

use crypto_secretbox::aead::{AeadInPlace, KeyInit};
use crypto_secretbox::{Nonce, SecretBox, Tag};
use zeroize::Zeroizing;

use super::salsa::WideSalsa20;

/// Length of a key in bytes.
pub const KEY_LEN: usize = 32;

/// Length of a nonce in bytes.
pub const NONCE_LEN: usize = 24;

/// Length of a MAC in bytes.
pub const MAC_LEN: usize = 16;

/// The MAC of a piece.
pub type Mac = [u8; MAC_LEN];

/// A key for the data of tensors. Its memory is wiped when it is dropped, and it is never printed.
#[derive(PartialEq, Eq)]
pub struct DataKey(Zeroizing<[u8; KEY_LEN]>);

impl DataKey {
    /// A key whose bytes the function `fill` writes.
    ///
    /// # Errors
    /// The error of `fill`.
    pub fn try_fill<E>(
        fill: impl FnOnce(&mut [u8; KEY_LEN]) -> Result<(), E>,
    ) -> Result<DataKey, E> {
        let mut key = DataKey(Zeroizing::new([0; KEY_LEN]));
        fill(&mut key.0)?;
        Ok(key)
    }

    /// The key with these bytes.
    pub fn new(bytes: &[u8; KEY_LEN]) -> DataKey {
        let mut key = DataKey(Zeroizing::new([0; KEY_LEN]));
        key.0.copy_from_slice(bytes);
        key
    }

    /// Its bytes, for programs that store keys themselves.
    pub fn bytes(&self) -> &[u8; KEY_LEN] {
        &self.0
    }

    /// Encrypts `piece` in place and returns its MAC. A nonce must not be used twice with one key.
    pub fn seal(&self, nonce: &PieceNonce, piece: &mut [u8]) -> Mac {
        let nonce = Nonce::from_slice(&nonce.0);
        let sealed = self.cipher().encrypt_in_place_detached(nonce, &[], piece);
        // The cipher fails only because of associated data, and there is none here.
        sealed.unwrap_or_default().into()
    }

    /// Decrypts `piece` in place if `mac` is its MAC. Otherwise `piece` stays unchanged.
    ///
    /// # Errors
    /// The key or the nonce is wrong, or a bit of the piece or of the MAC differs.
    pub fn open(&self, nonce: &PieceNonce, mac: &Mac, piece: &mut [u8]) -> Result<(), WrongMac> {
        let nonce = Nonce::from_slice(&nonce.0);
        let opened =
            self.cipher().decrypt_in_place_detached(nonce, &[], piece, Tag::from_slice(mac));
        opened.map_err(|_| WrongMac)
    }

    /// Makes the cipher. It wipes its copy of the key.
    fn cipher(&self) -> SecretBox<WideSalsa20> {
        SecretBox::new(self.0.as_ref().into())
    }
}

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey(..)")
    }
}

/// The error that a MAC does not match the bytes of its piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongMac;

/// The nonce of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceNonce([u8; NONCE_LEN]);

impl PieceNonce {
    /// The nonce with these bytes.
    pub fn new(bytes: [u8; NONCE_LEN]) -> PieceNonce {
        PieceNonce(bytes)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; NONCE_LEN] {
        &self.0
    }

    /// The nonce of piece number `index`, if `self` is the nonce of the first piece. It is the sum
    /// as a little-endian number, modulo 2^192.
    #[must_use]
    pub fn of_piece(&self, index: u64) -> PieceNonce {
        let mut carry = u128::from(index);
        let bytes = self.0.map(|byte| {
            carry += u128::from(byte);
            let [low, ..] = carry.to_le_bytes();
            carry >>= 8;
            low
        });
        PieceNonce(bytes)
    }
}
