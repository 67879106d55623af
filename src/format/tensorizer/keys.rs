//! The secret that opens an encrypted file: a key, or a passphrase from which keys are derived.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use argon2::{Algorithm, Argon2, Block, Params, Version};
use zeroize::Zeroizing;

use crate::error::{ErrorKind, Fault};
use crate::sync::Mutex;

use super::secretbox::{DataKey, KEY_LEN};

/// Length of the salt of a passphrase in bytes.
pub const SALT_LEN: usize = 16;

/// Minimum memory of a key derivation in bytes.
const MEM_LIMIT_MIN: u64 = 8 << 10;

/// Maximum memory of a key derivation in bytes. It is the memory of the strongest preset of
/// libsodium.
const MEM_LIMIT_MAX: u64 = 1 << 30;

/// Maximum number of bytes that all passes of a key derivation write together. It is four times the
/// number of the strongest preset of libsodium.
const WORK_MAX: u64 = 16 << 30;

/// Maximum number of derived keys in memory. A file uses one derivation, and repeats its parameters
/// in the header of each tensor.
const KEPT_MAX: usize = 64;

/// How a key is derived from a passphrase: with Argon2id, version 1.3, with one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyDerivation {
    /// Number of passes.
    pub ops_limit: u64,
    /// Memory in bytes, which is rounded down to whole KiB.
    pub mem_limit: u64,
    /// Salt.
    pub salt: [u8; SALT_LEN],
}

impl KeyDerivation {
    /// Refuses parameters that need too much memory or time.
    ///
    /// # Errors
    /// A limit is too large or too small. The text says which limit.
    pub fn check(&self) -> Result<(), String> {
        let &KeyDerivation { ops_limit, mem_limit, .. } = self;
        if !(MEM_LIMIT_MIN..=MEM_LIMIT_MAX).contains(&mem_limit) {
            return Err(format!(
                "takes {mem_limit} bytes of memory, {MEM_LIMIT_MIN} to {MEM_LIMIT_MAX} expected"
            ));
        }
        if ops_limit == 0 || ops_limit > WORK_MAX / mem_limit {
            return Err(format!(
                "makes {ops_limit} passes over {mem_limit} bytes of memory, 1 to {} expected",
                WORK_MAX / mem_limit
            ));
        }
        Ok(())
    }

    /// Derives the key of `passphrase`. Uses `mem_limit` bytes of memory. The time grows with `mem_limit` and
    /// `ops_limit`.
    ///
    /// # Errors
    /// A limit is too large, or the memory cannot be allocated.
    pub fn derive(&self, passphrase: &[u8]) -> Result<DataKey, Fault> {
        // The parameters come from a file, so they have to be checked.
        self.check().map_err(|what| {
            ErrorKind::HeaderDecode.fault(format!(
                "its key derivation {what}; save it again with other limits, or give its key \
                 instead of the passphrase"
            ))
        })?;
        let no_memory = |_| {
            ErrorKind::OutOfMemory.fault(format!(
                "its key derivation takes {} bytes of memory, which the system does not give; \
                 free memory, or give its key instead of the passphrase",
                self.mem_limit
            ))
        };
        let refused = |e: argon2::Error| {
            ErrorKind::Usage
                .fault(format!("no key can be derived from the passphrase: {e}; give another one"))
        };
        // After `check`, both numbers fit into 32 bits.
        let (kib, passes) = ((self.mem_limit >> 10) as u32, self.ops_limit as u32);
        let params = Params::new(kib, passes, 1, Some(KEY_LEN)).map_err(refused)?;
        let mut blocks = Zeroizing::new(Vec::new());
        blocks.try_reserve_exact(params.block_count()).map_err(no_memory)?;
        blocks.resize(params.block_count(), Block::default());
        let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
        DataKey::try_fill(|key| {
            argon2.hash_password_into_with_memory(
                passphrase,
                &self.salt,
                key,
                blocks.as_mut_slice(),
            )
        })
        .map_err(refused)
    }
}

/// The key of encrypted tensorizer files, or the passphrase from which their keys are derived. Its
/// memory is wiped when it is dropped. It is never printed.
///
/// ```
/// use std::sync::Arc;
/// use tensorfs::{Checkpoint, OpenOptions, Secret};
///
/// let passphrase = Secret::passphrase(b"correct horse battery staple".to_vec().into())?;
/// let options = OpenOptions { secret: Some(Arc::new(passphrase)), ..OpenOptions::default() };
/// let file = "tests/fixtures/encrypted/v3_string.tensors".as_ref();
/// assert_eq!(Checkpoint::open_with(file, &options)?.catalog().len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Secret {
    kind: SecretKind,
    /// Whether it may also be used with files that are not encrypted.
    pub(crate) optional: bool,
    /// Keys derived from the passphrase, by their parameters. They are kept because a derivation
    /// takes seconds.
    derived: Mutex<Vec<(KeyDerivation, Arc<DataKey>)>>,
    /// Whether a key is being derived at the moment.
    deriving: AtomicBool,
}

enum SecretKind {
    Key(Arc<DataKey>),
    Passphrase(Zeroizing<Vec<u8>>),
}

impl Secret {
    fn new(kind: SecretKind) -> Secret {
        Secret {
            kind,
            optional: false,
            derived: Mutex::default(),
            deriving: AtomicBool::new(false),
        }
    }

    /// Parses a key: 32 raw bytes, or 64 hexadecimal digits, after which white space may follow.
    ///
    /// # Errors
    /// One line with the expected form and the number of bytes that were found.
    pub fn parse_key(bytes: &[u8]) -> Result<Secret, String> {
        let expected = || {
            let len = bytes.len();
            format!("a key has {KEY_LEN} bytes, or 64 hexadecimal digits; {len} bytes were found")
        };
        if let Ok(bytes) = bytes.try_into() {
            return Ok(Secret::new(SecretKind::Key(Arc::new(DataKey::new(bytes)))));
        }
        let digits = bytes.trim_ascii_end();
        if digits.len() != 2 * KEY_LEN {
            return Err(expected());
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let key = DataKey::try_fill(|key| {
            for (byte, pair) in key.iter_mut().zip(digits.chunks(2)) {
                let value = digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low);
                *byte = value.ok_or_else(expected)?;
            }
            Ok(())
        });
        key.map(|key| Secret::new(SecretKind::Key(Arc::new(key))))
    }

    /// A passphrase from the bytes of its text.
    ///
    /// # Errors
    /// The passphrase is empty.
    pub fn passphrase(bytes: Zeroizing<Vec<u8>>) -> Result<Secret, String> {
        if bytes.is_empty() {
            return Err("the passphrase is empty".to_owned());
        }
        Ok(Secret::new(SecretKind::Passphrase(bytes)))
    }

    /// The same secret, which may also be used with files that are not encrypted.
    #[must_use]
    pub fn optional(self) -> Secret {
        Secret { optional: true, ..self }
    }

    /// Whether a key is being derived from it at the moment, which may take a minute of CPU time.
    pub fn is_deriving(&self) -> bool {
        self.deriving.load(Ordering::Relaxed)
    }

    /// The fault of a file that is not encrypted, although this secret was given for it. `None` if
    /// file and secret fit.
    pub(crate) fn misfit(&self, is_encrypted: bool) -> Option<Fault> {
        let message = "is not encrypted, but a key or a passphrase was given; leave it out";
        let refused = !is_encrypted && !self.optional;
        refused.then(|| ErrorKind::NotEncrypted.fault(message))
    }

    /// The key for data that was encrypted with a key of `derivation`, or with a plain key if
    /// `derivation` is `None`.
    ///
    /// # Errors
    /// This is a passphrase, but the data was encrypted with a plain key. Also the errors of `KeyDerivation::derive`.
    pub(crate) fn key_of(&self, derivation: Option<&KeyDerivation>) -> Result<Arc<DataKey>, Fault> {
        let passphrase = match &self.kind {
            SecretKind::Key(key) => return Ok(Arc::clone(key)),
            SecretKind::Passphrase(passphrase) => passphrase,
        };
        let Some(derivation) = derivation else {
            let message = "is encrypted with a key that was not derived from a passphrase; give \
                           the key itself";
            return Err(ErrorKind::KeyRequired.fault(message));
        };
        // The lock is held during the derivation, so that two threads do not derive the same key.
        let mut derived = self.derived.lock();
        if let Some((_, key)) = derived.iter().find(|(known, _)| known == derivation) {
            return Ok(Arc::clone(key));
        }
        self.deriving.store(true, Ordering::Relaxed);
        let outcome = derivation.derive(passphrase);
        self.deriving.store(false, Ordering::Relaxed);
        let key = Arc::new(outcome?);
        if derived.len() == KEPT_MAX {
            derived.remove(0);
        }
        derived.push((*derivation, Arc::clone(&key)));
        Ok(key)
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        let same = match (&self.kind, &other.kind) {
            (SecretKind::Key(own), SecretKind::Key(other)) => own == other,
            (SecretKind::Passphrase(own), SecretKind::Passphrase(other)) => own == other,
            _ => false,
        };
        same && self.optional == other.optional
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            SecretKind::Key(_) => "Secret(key)",
            SecretKind::Passphrase(_) => "Secret(passphrase)",
        })
    }
}
