//! Writes the descriptions of a tensorizer file: the head with the list of tensors, and the header
//! of each tensor. The bytes equal those of the reference implementation (tensorizer 2.12).
//!
//! The hashes in a header depend on the data that follows the header. So the header is first made
//! with zeros in place of the hashes.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, quoted};

use super::crypt::{Encryption, PIECE_LEN};
use super::entries::{DTYPES, F4_PACKED, LONG, SHORT, STATE_DICT};
use super::keys::KeyDerivation;
use super::names::{PATH_MARK, TensorName};
use super::secretbox::{MAC_LEN, Mac, PieceNonce};
use super::{
    ENCRYPTED, ENCRYPTED_VERSION, ENTRIES_LEN_MAX, FLAGS_SINCE, HEAD_LEN, MAGIC, VERSIONED,
    VERSIONED_SINCE,
};

/// Length of the list of tensors in bytes, as in the reference implementation. The length of a
/// longer list is a multiple of it.
pub const ENTRIES_LEN: u64 = 256 << 10;

/// The mark after the last tensor.
pub const END_MARK: [u8; 8] = [0; 8];

/// The file versions: `PLAIN_VERSION` if numpy has all dtypes, `OPAQUE_VERSION` if only torch has one of the dtypes.
const PLAIN_VERSION: u32 = 1;
const OPAQUE_VERSION: u32 = 2;

/// Lengths in bytes of the parts of a hash in a header: type and length, the value of a CRC32, and
/// the value of a SHA-256.
const HASH_PREFIX_LEN: usize = 2;
const CRC32_LEN: usize = 4;
const SHA256_LEN: usize = 32;

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTensor {
    /// Bytes of its name: text, or the byte 0x1e and then a path as a JSON array.
    pub name: Vec<u8>,
    /// 0 for a parameter, 1 for a buffer, 2 for a value of a state dict.
    pub kind: u8,
    /// Number of its module in the model.
    pub module: u16,
    /// Its dtype as the format names it, for example `<f4`.
    pub dtype: String,
    /// Extent of each dimension, in elements of `dtype`.
    pub shape: Vec<u64>,
    /// Length of its data in bytes; `None` for a meta tensor, which has a shape and no data.
    pub data_len: Option<u64>,
}

impl NewTensor {
    /// A value of a state dict, from the name, dtype and shape that other formats have.
    ///
    /// # Errors
    /// `unknown_dtype` and `misaligned` for elements that the format does not have. `header_decode`
    /// for a name that a reader of the format would take for another name.
    pub fn of_state_dict(name: &str, dtype: Dtype, shape: &[u64]) -> Result<NewTensor, Fault> {
        let refused = |kind: ErrorKind, message: &str| kind.fault(message).tensor(name);
        if name.as_bytes().first() == Some(&PATH_MARK) {
            let message = "a name that begins with byte 0x1e is a path in tensorizer files; rename \
                           the tensor (rename=)";
            return Err(refused(ErrorKind::HeaderDecode, message));
        }
        let Some(code) = code_of(dtype) else {
            let message = format!(
                "tensorizer has no dtype {dtype}; keep the checkpoint as safetensors, or cast the \
                 tensor"
            );
            return Err(refused(ErrorKind::UnknownDtype, &message));
        };
        let Some(bits) = dtype.bits_of(shape) else {
            return Err(refused(ErrorKind::Overflow, "the tensor would have 2^64 bits or more"));
        };
        let mut shape = shape.to_vec();
        if dtype == Dtype::F4 {
            let Some(last) = shape.last_mut().filter(|last| last.is_multiple_of(F4_PACKED)) else {
                let message = format!(
                    "tensorizer stores {dtype} in pairs along the last dimension, the shape is \
                     {shape:?}; keep the checkpoint as safetensors"
                );
                return Err(refused(ErrorKind::Misaligned, &message));
            };
            *last /= F4_PACKED;
        }
        Ok(NewTensor {
            name: name.as_bytes().to_vec(),
            kind: STATE_DICT,
            module: 0,
            dtype: code,
            shape,
            data_len: Some(bits / 8),
        })
    }

    /// This tensor as a meta tensor, which has no data. All its elements must be zero. The reference implementation can
    /// read a meta tensor only if it has at least one dimension and a dtype that numpy has. Any other tensor is
    /// returned unchanged.
    pub fn without_zeros(self) -> NewTensor {
        let is_read = !self.shape.is_empty() && !self.dtype.contains('\0');
        NewTensor { data_len: self.data_len.filter(|_| !is_read), ..self }
    }

    /// Whether the size of a dimension needs 64 bits.
    fn is_long(&self) -> bool {
        self.shape.iter().any(|&dim| dim > u32::MAX.into())
    }

    /// The name as text for messages.
    fn shown(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }

    /// Refuses values that the fields of the format cannot hold, and names that are not valid.
    /// Returns the decoded name.
    fn check(&self) -> Result<TensorName, Fault> {
        let bounds = [
            ("its name has a length in bytes of", self.name.len(), 1, usize::from(u16::MAX)),
            ("its dtype has a length in bytes of", self.dtype.len(), 1, usize::from(u8::MAX)),
            ("the number of its dimensions is", self.shape.len(), 0, usize::from(u8::MAX)),
            ("the number of its kind is", self.kind.into(), 0, STATE_DICT.into()),
        ];
        for (what, found, least, most) in bounds {
            if !(least..=most).contains(&found) {
                let message = format!("{what} {found}, the format takes {least} to {most}");
                return Err(ErrorKind::HeaderDecode.fault(message).tensor(&self.shown()));
            }
        }
        let name = TensorName::decode(&self.name).map_err(|fault| fault.tensor(&self.shown()))?;
        let Some(width) = self.element_len() else {
            let code = quoted(&self.dtype);
            let message = format!("dtype {code} is none of tensorizer, such as <f4 was expected");
            return Err(ErrorKind::UnknownDtype.fault(message).tensor(&self.shown()));
        };
        let dims = self.shape.iter().try_fold(width, |len, &dim| len.checked_mul(dim));
        let len = dims.ok_or_else(|| {
            let message = format!("the bytes of shape {:?} pass 2^64", self.shape);
            ErrorKind::Overflow.fault(message).tensor(&self.shown())
        })?;
        match self.data_len.filter(|&found| found != len) {
            None => Ok(name),
            Some(found) => Err(ErrorKind::SizeMismatch
                .fault(format!(
                    "has {found} bytes, shape {:?} of elements of {width} bytes takes {len}",
                    self.shape
                ))
                .tensor(&self.shown())),
        }
    }

    /// Length of an element in bytes, from the dtype. A dtype has byte order, letter and number. For opaque bytes the
    /// name of the torch type follows.
    fn element_len(&self) -> Option<u64> {
        let (storage, torch) = match self.dtype.split_once('\0') {
            Some((storage, torch)) => (storage, Some(torch)),
            None => (self.dtype.as_str(), None),
        };
        let letter = storage.strip_prefix(['<', '|'])?;
        let is_opaque = letter.starts_with('V');
        let is_named = torch.is_some_and(|name| name.starts_with("torch.") && !name.contains('\0'));
        if is_opaque != is_named || is_opaque != torch.is_some() {
            return None;
        }
        let width = letter.strip_prefix(['b', 'u', 'i', 'f', 'c', 'V'])?;
        width.parse().ok().filter(|width| (1..=16).contains(width))
    }

    /// Length of its entry in the list in bytes, without the version field.
    fn entry_len(&self) -> u64 {
        let dim_len = if self.is_long() { 8 } else { 4 };
        (2 + self.name.len() + 2 + self.dtype.len() + 1 + dim_len * self.shape.len() + 24) as u64
    }

    /// Appends type, dtype and shape.
    fn put_details(&self, out: &mut Vec<u8>) {
        out.push(self.dtype.len() as u8);
        out.extend_from_slice(self.dtype.as_bytes());
        out.push(self.shape.len() as u8);
        for &dim in &self.shape {
            match u32::try_from(dim) {
                Ok(short) if !self.is_long() => out.extend_from_slice(&short.to_le_bytes()),
                _ => out.extend_from_slice(&dim.to_le_bytes()),
            }
        }
    }
}

/// The text of the format for an element type. `None` if the format does not have the type.
fn code_of(dtype: Dtype) -> Option<String> {
    if let Some((code, _)) = DTYPES.iter().find(|(_, known)| *known == dtype) {
        return Some((*code).to_owned());
    }
    let torch = dtype.torch_name()?;
    // Types of one byte have no byte order.
    let storage = if dtype.bits() > 8 { format!("<V{}", dtype.bits() / 8) } else { "|V1".into() };
    Some(format!("{storage}\0torch.{torch}"))
}

/// Length in bytes of the list that `tensors` need.
///
/// # Errors
/// `header_too_large` if the list would be longer than readers accept.
pub fn entries_len(tensors: &[NewTensor]) -> Result<u64, Fault> {
    let versions = if tensors.iter().any(NewTensor::is_long) { 4 } else { 0 };
    let needed = tensors.iter().map(|tensor| tensor.entry_len() + versions).sum::<u64>();
    if needed > ENTRIES_LEN_MAX {
        return Err(ErrorKind::HeaderTooLarge.fault(format!(
            "the list of {} tensors would take {needed} bytes, at most {ENTRIES_LEN_MAX} are read; \
             write several files (layout=shards=N)",
            tensors.len()
        )));
    }
    Ok(needed.max(1).next_multiple_of(ENTRIES_LEN))
}

/// The header of a tensor and the places of its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    /// Offset of its first byte in the file.
    pub start: u64,
    /// Length in bytes of the data that follows it, 0 for a meta tensor.
    pub data_len: u64,
    bytes: Vec<u8>,
    /// Place in the header of the value of the CRC32. `None` for encrypted tensors.
    crc32: Option<usize>,
    /// Place in the header of the value of the SHA-256.
    sha256: usize,
    /// Place of the encryption section with its length field. Empty in a file without encryption.
    crypt: Range<usize>,
    /// How its data is encrypted. The MACs are zeros until they are set.
    encryption: Option<Encryption>,
}

impl TensorHeader {
    /// The header of `tensor` at the offset `start`. `crypt` is its encryption section.
    fn new(tensor: &NewTensor, start: u64, crypt: &CryptSection) -> TensorHeader {
        let data_len = tensor.data_len.unwrap_or(0);
        let mut bytes = vec![0; 8];
        bytes.extend_from_slice(&tensor.module.to_le_bytes());
        bytes.push(tensor.kind);
        bytes.extend_from_slice(&(tensor.name.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&tensor.name);
        tensor.put_details(&mut bytes);
        // For encrypted data the reference implementation writes a SHA-256 only, because a CRC32 would reveal more
        // about the plain data. Meta tensors have no data to protect.
        let has_crc32 = !matches!(crypt, CryptSection::Sealed(_));
        let crc32_len = if has_crc32 { HASH_PREFIX_LEN + CRC32_LEN } else { 0 };
        let section_len = 1 + crc32_len + HASH_PREFIX_LEN + SHA256_LEN;
        bytes.extend_from_slice(&(section_len as u16).to_le_bytes());
        bytes.push(1 + u8::from(has_crc32));
        let mut hash = |kind: u8, len: usize| {
            bytes.extend_from_slice(&[kind, len as u8]);
            bytes.resize(bytes.len() + len, 0);
            bytes.len() - len
        };
        let crc32 = has_crc32.then(|| hash(0, CRC32_LEN));
        let sha256 = hash(1, SHA256_LEN);
        let crypt_start = bytes.len();
        let encryption = match crypt {
            CryptSection::Absent => None,
            CryptSection::Empty => {
                Encryption::encode_none(&mut bytes);
                None
            }
            CryptSection::Sealed(encryption) => {
                encryption.encode(&mut bytes);
                Some(encryption.clone())
            }
        };
        let crypt = crypt_start..bytes.len();
        bytes.extend_from_slice(&data_len.to_le_bytes());
        let len = bytes.len() as u64;
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        TensorHeader { start, data_len, bytes, crc32, sha256, crypt, encryption }
    }

    /// The bytes of the header.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Offset of the data in the file.
    pub fn data_start(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Offset of the end of the data in the file.
    pub fn end(&self) -> u64 {
        self.data_start() + self.data_len
    }

    /// Whether the header has a CRC32.
    pub fn has_crc32(&self) -> bool {
        self.crc32.is_some()
    }

    /// The parts of the header that are hashed before the data. Must be called before the hashes
    /// are set.
    pub fn hashed_parts(&self) -> [&[u8]; 2] {
        [&self.bytes[..self.crypt.start], &self.bytes[self.crypt.end..]]
    }

    /// Sets the hashes, which cover `hashed_parts` and then the plain data.
    pub fn set_hashes(&mut self, crc32: u32, sha256: [u8; SHA256_LEN]) {
        if let Some(start) = self.crc32 {
            self.bytes[start..start + CRC32_LEN].copy_from_slice(&crc32.to_le_bytes());
        }
        self.bytes[self.sha256..self.sha256 + SHA256_LEN].copy_from_slice(&sha256);
    }
}

impl TensorHeader {
    /// How its data is encrypted; `None` for plain data.
    pub fn encryption(&self) -> Option<&Encryption> {
        self.encryption.as_ref()
    }

    /// Sets the MACs of the pieces of encrypted data.
    ///
    /// # Panics
    /// The number of MACs differs from the number of pieces.
    pub fn set_macs(&mut self, macs: Vec<Mac>) {
        let Some(encryption) = &self.encryption else { return };
        let Encryption { derivation, .. } = *encryption;
        let sealed = Encryption::new(derivation, self.data_len, encryption.nonce(), macs);
        let mut section = Vec::new();
        sealed.encode(&mut section);
        self.bytes[self.crypt.clone()].copy_from_slice(&section);
        self.encryption = Some(sealed);
    }
}

/// The encryption section of a header.
enum CryptSection {
    /// The file is not encrypted.
    Absent,
    /// The file is encrypted, and the tensor has no data.
    Empty,
    Sealed(Encryption),
}

/// The names of the tensors that were added so far. Readers could not distinguish two equal names,
/// and could not follow a path that leads through another tensor.
#[derive(Clone, Debug, Default)]
struct TakenNames {
    /// The names as other formats have them.
    joined: HashSet<String>,
    /// Keys of paths. No key begins with another key.
    keys: BTreeSet<String>,
}

impl TakenNames {
    /// Adds a name. Fails if another tensor has the name.
    fn insert(&mut self, name: &TensorName) -> Result<(), String> {
        let key = name.key().into_owned();
        if self.joined.contains(&name.joined) {
            return Err(if self.keys.contains(&key) {
                "is written twice; give each tensor its own name".to_owned()
            } else {
                "is the name of two tensors once the steps of their paths are joined by dots; give \
                 them other names"
                    .to_owned()
            });
        }
        // Keys are sorted, so keys that begin with `key` follow directly after it.
        let before = self.keys.range::<String, _>(..&key).next_back();
        let after = self.keys.range::<String, _>(&key..).next();
        let above = before.filter(|before| key.starts_with(before.as_str()));
        if let Some(other) = above.or(after.filter(|after| after.starts_with(&key))) {
            let other = quoted(&format!("[{}]", other.trim_end_matches(',')));
            return Err(format!(
                "one of its path and the path {other} leads through the other; give them other \
                 names"
            ));
        }
        self.joined.insert(name.joined.clone());
        self.keys.insert(key);
        Ok(())
    }

    /// Removes a name that was added.
    fn remove(&mut self, name: &TensorName) {
        self.joined.remove(&name.joined);
        self.keys.remove(&*name.key());
    }
}

/// Makes the descriptions of the tensors of a file, one tensor after another.
#[derive(Clone, Debug)]
pub struct FileEncoder {
    /// Offset of the first byte of the file.
    start: u64,
    entries_len: u64,
    /// `None` if the file is not encrypted. The inner value is the derivation of the key, or `None` if a key is used
    /// directly.
    encryption: Option<Option<KeyDerivation>>,
    names: TakenNames,
    /// Whether each entry has a version field, because one of the entries has dimensions of 64
    /// bits.
    is_versioned: bool,
    /// File version that the tensors so far need. Encryption is not included.
    version: u32,
    /// Bytes of all entries, without version fields. `ends` has the end of each entry.
    entries: Vec<u8>,
    ends: Vec<(usize, bool)>,
    /// Length in bytes of the data of all tensors.
    data_len: u64,
    /// Offset behind the last tensor.
    end: u64,
}

impl FileEncoder {
    /// A file that begins at offset `start`, with `entries_len` bytes for the list of tensors. The
    /// offsets in the file count from the same origin as `start`.
    pub fn new(start: u64, entries_len: u64) -> FileEncoder {
        FileEncoder {
            start,
            entries_len,
            encryption: None,
            names: TakenNames::default(),
            is_versioned: false,
            version: PLAIN_VERSION,
            entries: Vec::new(),
            ends: Vec::new(),
            data_len: 0,
            end: start + HEAD_LEN + entries_len,
        }
    }

    /// This file with encrypted data. The key is derived as `derivation` says. If `derivation` is `None`, a key is used
    /// directly.
    #[must_use]
    pub fn encrypted(self, derivation: Option<KeyDerivation>) -> FileEncoder {
        FileEncoder { encryption: Some(derivation), ..self }
    }

    /// Offset of the first byte of the file.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Offset behind the last tensor.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Number of tensors.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// Length in bytes of the data of all tensors.
    pub fn data_len(&self) -> u64 {
        self.data_len
    }

    /// Adds tensors after the tensors so far, and returns their headers. `nonce` makes the nonce for the first piece
    /// of each encrypted tensor. It has to be random, because no nonce may be used twice with one key.
    ///
    /// # Errors
    /// The format cannot hold one of the tensors, or a name is taken. The encoder is unchanged in
    /// this case.
    pub fn add_all(
        &mut self,
        tensors: &[NewTensor],
        nonce: &mut dyn FnMut() -> PieceNonce,
    ) -> Result<Vec<TensorHeader>, Fault> {
        let FileEncoder { is_versioned, version, data_len, end, .. } = *self;
        let (count, entries_len) = (self.ends.len(), self.entries.len());
        let mut headers = Vec::with_capacity(tensors.len());
        for (index, tensor) in tensors.iter().enumerate() {
            match self.add(tensor, nonce) {
                Ok(header) => headers.push(header),
                Err(fault) => {
                    for added in &tensors[..index] {
                        self.names.remove(&TensorName::decode(&added.name)?);
                    }
                    self.ends.truncate(count);
                    self.entries.truncate(entries_len);
                    (self.is_versioned, self.version) = (is_versioned, version);
                    (self.data_len, self.end) = (data_len, end);
                    return Err(fault);
                }
            }
        }
        Ok(headers)
    }

    fn add(
        &mut self,
        tensor: &NewTensor,
        nonce: &mut dyn FnMut() -> PieceNonce,
    ) -> Result<TensorHeader, Fault> {
        let name = tensor.check()?;
        let named = |fault: Fault| fault.tensor(&tensor.shown());
        let crypt = match (self.encryption, tensor.data_len) {
            (None, _) => CryptSection::Absent,
            (Some(_), None) => CryptSection::Empty,
            (Some(_), Some(0)) => {
                let message = "has no elements, and the format cannot encrypt a tensor without \
                               bytes; leave it out, or write the file without encryption";
                return Err(named(ErrorKind::SizeMismatch.fault(message)));
            }
            (Some(derivation), Some(len)) => {
                let macs = vec![[0; MAC_LEN]; len.div_ceil(PIECE_LEN) as usize];
                CryptSection::Sealed(Encryption::new(derivation, len, nonce(), macs))
            }
        };
        let header = TensorHeader::new(tensor, self.end, &crypt);
        let overflow = || named(ErrorKind::Overflow.fault("the file would pass 2^63 bytes"));
        let len = (header.bytes.len() as u64).checked_add(header.data_len);
        let end = len
            .and_then(|len| self.end.checked_add(len))
            .filter(|&end| end < 1 << 63)
            .ok_or_else(overflow)?;
        let is_versioned = self.is_versioned || tensor.is_long();
        let versions = if is_versioned { 4 * (self.ends.len() as u64 + 1) } else { 0 };
        let needed = self.entries.len() as u64 + tensor.entry_len() + versions;
        if needed > self.entries_len {
            let message = format!(
                "the list of {} tensors takes {needed} bytes with it, {} were reserved at the \
                 start of the file; write the tensors at once, or several files",
                self.ends.len() + 1,
                self.entries_len
            );
            return Err(named(ErrorKind::HeaderTooLarge.fault(message)));
        }
        let taken = self.names.insert(&name);
        taken.map_err(|message| named(ErrorKind::DuplicateKey.fault(message)))?;
        self.is_versioned = is_versioned;
        let needs = [
            (tensor.is_long(), VERSIONED_SINCE),
            (tensor.data_len.is_none(), FLAGS_SINCE),
            (tensor.dtype.contains('\0'), OPAQUE_VERSION),
        ];
        for (is_needed, version) in needs {
            self.version = self.version.max(if is_needed { version } else { PLAIN_VERSION });
        }
        let out = &mut self.entries;
        out.extend_from_slice(&(tensor.name.len() as u16).to_le_bytes());
        out.extend_from_slice(&tensor.name);
        out.push(tensor.kind);
        tensor.put_details(out);
        for number in [header.start, header.data_start(), header.data_len] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        self.ends.push((out.len(), tensor.is_long()));
        self.data_len += header.data_len;
        self.end = end;
        Ok(header)
    }

    /// The fixed head and the whole list of tensors, with the tensors that were added so far.
    pub fn head(&self) -> Vec<u8> {
        let is_encrypted = self.encryption.is_some();
        let base = if is_encrypted { ENCRYPTED_VERSION } else { PLAIN_VERSION };
        let version = self.version.max(base);
        let mut flags = [0; 32];
        if version >= FLAGS_SINCE {
            flags[0] = if is_encrypted { ENCRYPTED } else { 0 };
            flags[0] |= if self.is_versioned { VERSIONED } else { 0 };
        }
        let mut head = MAGIC.to_vec();
        head.extend_from_slice(&version.to_le_bytes());
        head.extend_from_slice(&flags);
        for number in [self.data_len, 0, self.ends.len() as u64, self.entries_len] {
            head.extend_from_slice(&number.to_le_bytes());
        }
        let mut begin = 0;
        for &(end, is_long) in &self.ends {
            if self.is_versioned {
                let version = if is_long { LONG } else { SHORT };
                head.extend_from_slice(&version.to_le_bytes());
            }
            head.extend_from_slice(&self.entries[begin..end]);
            begin = end;
        }
        head.resize((HEAD_LEN + self.entries_len) as usize, 0);
        head
    }
}
