//! The error type of the crate. Every case names the file and the tensor and gives the numbers.
//!
//! A `Fault` is an error that a parser or a proof found in its input. It knows only names inside a checkpoint.
//! Callers get an `Error`: a fault with the path of the checkpoint, or a failed system call.

mod urls;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) use urls::unusable_url;
pub use urls::{SCHEMES, SchemeFact, expect_local_path, is_url, is_url_with_password};
use urls::{parts_of_url, without_secrets};

/// Result of the operations of this crate.
///
/// ```
/// use std::path::Path;
///
/// fn tensors(folder: &Path) -> tensorfs::Result<usize> {
///     Ok(tensorfs::Checkpoint::open(folder)?.catalog().len())
/// }
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

words! {
    /// The kind of an error, in the form in which `--json` prints it.
    ///
    /// ```
    /// use tensorfs::{Checkpoint, ErrorKind};
    ///
    /// let error = Checkpoint::open("tests/fixtures/bad/hf/missing_shard".as_ref()).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::ShardMissing);
    /// ```
    #[derive(Hash)]
    pub enum ErrorKind {
        /// The file has fewer bytes than the fixed part of the format.
        TooShort = "too_short",
        /// The announced header is larger than the format allows.
        HeaderTooLarge = "header_too_large",
        /// The announced header ends past the end of the file.
        HeaderLength = "header_length",
        /// The header is not UTF-8.
        HeaderUtf8 = "header_utf8",
        /// The header is not JSON of the expected form.
        HeaderJson = "header_json",
        /// The header is not the binary form that its format prescribes.
        HeaderDecode = "header_decode",
        /// A key occurs twice in a header, a weight map or a metadata map.
        DuplicateKey = "duplicate_key",
        /// A dtype that the format does not have.
        UnknownDtype = "unknown_dtype",
        /// A tensor, or a piece of a tensor, whose elements are smaller than a byte does not end on a byte.
        Misaligned = "misaligned",
        /// A size or an offset is 2^64 or more.
        Overflow = "overflow",
        /// The bytes of a tensor do not match its dtype and shape.
        SizeMismatch = "size_mismatch",
        /// Bytes between tensors belong to no tensor.
        OffsetGap = "offset_gap",
        /// Tensors share bytes.
        OffsetOverlap = "offset_overlap",
        /// The file is shorter than its header requires.
        DataTruncated = "data_truncated",
        /// The file is longer than its header allows.
        DataTrailing = "data_trailing",
        /// The file is a git-lfs pointer, not the weights.
        LfsPointer = "lfs_pointer",
        /// The file starts with a zip archive.
        ZipPrefix = "zip_prefix",
        /// The tensors of the file are encrypted, and the key or the passphrase for them is missing.
        KeyRequired = "key_required",
        /// A key was passed for a file that is not encrypted, or a checkpoint has both encrypted files and
        /// files that are not encrypted.
        NotEncrypted = "not_encrypted",
        /// Encrypted bytes do not match their MAC: the key is wrong, or the file is damaged.
        DecryptFailed = "decrypt_failed",
        /// The weight map is not JSON of the expected form.
        WeightMap = "index_json",
        /// The weight map contains a name that is not a plain file name of the form `*.safetensors`.
        UnsafePath = "unsafe_path",
        /// A shard is absent or not a regular file.
        ShardMissing = "shard_missing",
        /// A tensor is absent from the shard that should hold it.
        TensorMissing = "tensor_missing",
        /// A shard holds a tensor that the weight map, or another list of tensors, does not list for this shard.
        TensorUnlisted = "tensor_unlisted",
        /// Two shards hold a tensor of the same name.
        DuplicateTensor = "duplicate_tensor",
        /// The DCP sharding information is absent or malformed.
        DcpInfo = "dcp_info",
        /// The offsets of a DCP piece cannot be used.
        DcpOffsets = "dcp_offsets",
        /// Pieces of one tensor differ in the number of dimensions.
        DcpRank = "dcp_rank",
        /// Pieces of one tensor differ in dtype.
        DcpDtype = "dcp_dtype",
        /// Pieces do not fill their tensor.
        DcpHole = "dcp_hole",
        /// Pieces cover the same elements.
        DcpOverlap = "dcp_overlap",
        /// Nothing proves that the last pieces exist, and the caller requires a proof.
        UnprovenTail = "unproven_tail",
        /// The bytes of a file do not match a recorded hash.
        HashMismatch = "hash_mismatch",
        /// A file is to be compared with recorded checksums, but none are recorded for it.
        NotRecorded = "not_recorded",
        /// The requested view does not fit the checkpoint.
        View = "view",
        /// A file changed while it was in use.
        Changed = "changed",
        /// The operating system reported an error.
        Io = "io",
        /// A device is unavailable, or its driver reported an error.
        Device = "device",
        /// The request itself is not valid.
        Usage = "usage",
        /// The caller stopped the operation.
        Cancelled = "cancelled",
        /// The machine has too little memory for the operation.
        OutOfMemory = "out_of_memory",
        /// tensorfs itself is at fault.
        Internal = "internal",
    }
}

/// A fault of an input. It names files and tensors by their names in the checkpoint.
///
/// ```
/// use tensorfs::{Checkpoint, Error};
///
/// match Checkpoint::open("tests/fixtures/bad/hf/missing_shard".as_ref()) {
///     Err(Error::Refused { uri, fault }) => eprintln!("{uri}: {}", fault.message),
///     other => panic!("{other:?}"),
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind of fault.
    pub kind: ErrorKind,
    /// Name of the file inside the checkpoint, if it is known.
    pub file: Option<String>,
    /// Name of the tensor, if the fault concerns one.
    pub tensor: Option<String>,
    /// The expected and the found values with their numbers, and advice. It is one line without a final period.
    pub message: String,
}

impl ErrorKind {
    /// A fault of this kind, for which only the message is known.
    pub fn fault(self, message: impl Into<String>) -> Fault {
        Fault { kind: self, file: None, tensor: None, message: message.into() }
    }
}

impl Fault {
    /// The same fault, for tensor `name`.
    pub fn tensor(mut self, name: &str) -> Self {
        self.tensor = Some(name.to_owned());
        self
    }

    /// The same fault, for file `name` of the checkpoint. If the fault names a file already, that name stays.
    pub fn in_file(mut self, name: &str) -> Self {
        self.file.get_or_insert_with(|| name.to_owned());
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.tensor {
            write!(f, "tensor {}: ", quoted(name))?;
        }
        f.write_str(&shortened(&shown(&self.message), MESSAGE_SHOWN_MAX))
    }
}

/// An error for data of another form than expected.
pub(crate) fn invalid_data(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// An error for a name or a setting that cannot be used.
pub(crate) fn invalid_input(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why.into())
}

/// The location of a source of bytes, or of a folder of sources.
///
/// ```
/// use tensorfs::{Checkpoint, Error};
///
/// match Checkpoint::open("tests/fixtures/bad/hf/missing_shard".as_ref()) {
///     Err(Error::Refused { uri, .. }) => eprintln!("{uri} is refused"),
///     other => panic!("{other:?}"),
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceUri {
    /// A file or folder on this machine.
    Path(PathBuf),
    /// An object of a remote store, or a folder of objects.
    Url(String),
}

impl SourceUri {
    /// The path. A URL is returned as a path, in the form that the functions of this crate accept.
    pub fn path(&self) -> Option<&Path> {
        match self {
            SourceUri::Path(path) => Some(path),
            SourceUri::Url(url) => Some(Path::new(url)),
        }
    }
}

impl<P: AsRef<Path>> From<P> for SourceUri {
    fn from(path: P) -> SourceUri {
        let path = path.as_ref();
        if is_url(path) {
            SourceUri::Url(real_name(path))
        } else {
            SourceUri::Path(path.to_owned())
        }
    }
}

impl fmt::Display for SourceUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceUri::Path(path) => f.write_str(&shown_path(path)),
            SourceUri::Url(url) => f.write_str(&shown(url)),
        }
    }
}

/// All errors of the operations of this crate.
///
/// ```
/// use tensorfs::{Checkpoint, Error};
///
/// let error = Checkpoint::open("tests/fixtures/bad/hf/missing_shard".as_ref()).unwrap_err();
/// assert!(matches!(error, Error::Refused { .. }));
/// eprintln!("{error}"); // one line: the file, the tensor, expected and found
/// ```
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The input is not a checkpoint that can be served correctly.
    #[error("{uri}: {fault}")]
    Refused {
        /// The file or directory that contains the fault.
        uri: SourceUri,
        /// The fault that was found.
        fault: Fault,
    },
    /// A system call failed.
    #[error("{uri}: cannot {action}: {}", shown(&source.to_string()))]
    Io {
        /// The file or directory.
        uri: SourceUri,
        /// The action that failed, as a verb: `open`, `read`.
        action: &'static str,
        /// The error that the operating system returned.
        source: io::Error,
    },
    /// A file is no longer the file that was opened.
    #[error("{uri}: {}", shown(detail))]
    Changed {
        /// The file.
        uri: SourceUri,
        /// The difference, with the values before and now.
        detail: String,
    },
    /// A device is unavailable, or its driver reported an error.
    #[error("{}: {}", shown(device), shown(message))]
    Device {
        /// The device, for example `cuda:0`.
        device: String,
        /// The fault, with advice.
        message: String,
        /// The driver call that failed, if there was one.
        call: Option<DriverCall>,
    },
    /// The request is not valid, no matter what the input is.
    #[error("{}", shown(message))]
    Usage {
        /// The fault, with advice.
        message: String,
    },
    /// The caller stopped the operation.
    #[error("{}", shown(message))]
    Cancelled {
        /// The operation, and the files that it leaves behind.
        message: String,
    },
    /// The machine has too little memory for the operation.
    #[error("{}", shown(message))]
    OutOfMemory {
        /// The needed amount, the available amount, and advice.
        message: String,
    },
    /// tensorfs itself is at fault.
    #[error("{}", shown(message))]
    Internal {
        /// The step that failed.
        message: String,
    },
}

/// A driver call that failed.
///
/// ```
/// use tensorfs::{Error, Gpu};
///
/// if let Err(Error::Device { call: Some(call), .. }) = Gpu::open(0) {
///     eprintln!("{} returned {} ({})", call.function, call.name, call.code);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverCall {
    /// Name of the function.
    pub function: &'static str,
    /// The code that it returned.
    pub code: u32,
    /// The name of the code in the driver.
    pub name: String,
}

impl Error {
    /// An error for `fault`, which was found in the directory or file `path`. If the fault names a file, its
    /// name is appended to the path.
    pub fn refused(path: &Path, fault: Fault) -> Self {
        let uri = match &fault.file {
            Some(name) => path.join(name).into(),
            None => path.into(),
        };
        Error::Refused { uri, fault }
    }

    /// An error for a failed system call on the file or folder `uri`.
    pub fn io(uri: impl Into<SourceUri>, action: &'static str, source: io::Error) -> Self {
        Error::Io { uri: uri.into(), action, source }
    }

    /// An error that says that the file `uri` is no longer the file that was opened.
    pub fn changed(uri: impl Into<SourceUri>, detail: impl Into<String>) -> Self {
        Error::Changed { uri: uri.into(), detail: detail.into() }
    }

    /// An error for a request that is not valid.
    pub fn usage(message: impl Into<String>) -> Self {
        Error::Usage { message: message.into() }
    }

    /// An error for an operation that the caller stopped.
    pub fn cancelled(message: impl Into<String>) -> Self {
        Error::Cancelled { message: message.into() }
    }

    /// An error for a bug of tensorfs.
    pub fn internal(message: impl Into<String>) -> Self {
        Error::Internal { message: message.into() }
    }

    /// A copy of the error. If several sets share a file, each of them reports the error of this file.
    pub(crate) fn copied(&self) -> Error {
        match self {
            Error::Refused { uri, fault } => {
                Error::Refused { uri: uri.clone(), fault: fault.clone() }
            }
            Error::Io { uri, action, source } => {
                let source = match source.raw_os_error() {
                    Some(errno) => io::Error::from_raw_os_error(errno),
                    None => io::Error::new(source.kind(), source.to_string()),
                };
                Error::Io { uri: uri.clone(), action, source }
            }
            Error::Changed { uri, detail } => {
                Error::Changed { uri: uri.clone(), detail: detail.clone() }
            }
            Error::Device { device, message, call } => Error::Device {
                device: device.clone(),
                message: message.clone(),
                call: call.clone(),
            },
            Error::Usage { message } => Error::Usage { message: message.clone() },
            Error::Cancelled { message } => Error::Cancelled { message: message.clone() },
            Error::OutOfMemory { message } => Error::OutOfMemory { message: message.clone() },
            Error::Internal { message } => Error::Internal { message: message.clone() },
        }
    }

    /// The kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Refused { fault, .. } => fault.kind,
            Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                ErrorKind::ShardMissing
            }
            Error::Io { .. } => ErrorKind::Io,
            Error::Changed { .. } => ErrorKind::Changed,
            Error::Device { .. } => ErrorKind::Device,
            Error::Usage { .. } => ErrorKind::Usage,
            Error::Cancelled { .. } => ErrorKind::Cancelled,
            Error::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Error::Internal { .. } => ErrorKind::Internal,
        }
    }

    /// The file or directory that the error concerns, if there is one and if it has a path.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Error::Refused { uri, .. } | Error::Io { uri, .. } | Error::Changed { uri, .. } => {
                uri.path()
            }
            Error::Device { .. }
            | Error::Usage { .. }
            | Error::Cancelled { .. }
            | Error::OutOfMemory { .. }
            | Error::Internal { .. } => None,
        }
    }

    /// The tensor that the error concerns, if there is one.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Error::Refused { fault, .. } => fault.tensor.as_deref(),
            _ => None,
        }
    }
}

/// Maximum length of a name in a message, in characters, because names can have any length.
const NAME_SHOWN_MAX: usize = 200;

/// Maximum length of a message, in characters, because shapes can have any number of dimensions.
const MESSAGE_SHOWN_MAX: usize = 1000;

/// `name` in backquotes for a message of one line: control characters are escaped, and the end of a long name is cut.
pub fn quoted(name: &str) -> String {
    format!("`{}`", shortened(&shown(name), NAME_SHOWN_MAX))
}

/// The count with its noun: `1 shard`, `3 shards`.
pub fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// `path` as text for one line of a message.
pub fn shown_path(path: &Path) -> String {
    shown(&real_name(path))
}

/// An argument or an option for one line of a message: a word, a path, or `NAME=URL`. The secrets in a URL are
/// replaced.
pub fn shown_argument(argument: &str) -> String {
    let name_end = argument.find(":/").and_then(|end| argument[..end].rfind(['=', ':']));
    let (name, value) = argument.split_at(name_end.map_or(0, |end| end + 1));
    format!("{}{}", shown(name), shown_path(Path::new(value)))
}

/// `path` for programs: JSON, options. Nothing is escaped, but the secrets in a URL are replaced. Text for
/// people uses `shown_path`.
pub fn real_name(path: &Path) -> String {
    let name = path.to_string_lossy();
    parts_of_url(&name).map_or_else(|| name.to_string(), without_secrets)
}

/// `text` for one line of a terminal or a log. Characters that could end the line, move the cursor or change
/// the direction of the text are escaped, because names in a source may contain any character.
pub fn shown(text: &str) -> String {
    escaped(text, |_| false)
}

/// Like `shown`, for text of several lines.
pub fn shown_lines(text: &str) -> String {
    escaped(text, |c| c == '\n')
}

fn escaped(text: &str, keep: impl Fn(char) -> bool) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) && !keep(c) { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

/// Whether `c` has no visible form of its own: control characters, marks of text direction, line separators,
/// and characters without width.
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e007f}')
}

fn shortened(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_of_an_error_reaches_a_terminal_raw() {
        let bad = "a\n\u{1b}[2J\u{9b}31m\u{202e}b\u{2066}\u{2028}\u{200b}\u{7f}\r\t";
        let path = PathBuf::from(bad);
        let fault = ErrorKind::HeaderJson.fault(bad).tensor(bad).in_file(bad);
        let errors = [
            Error::refused(&path, fault),
            Error::io(&path, "open", io::Error::other(bad)),
            Error::changed(&path, bad),
            Error::Device { device: bad.to_owned(), message: bad.to_owned(), call: None },
            Error::usage(bad),
            Error::cancelled(bad),
            Error::internal(bad),
            Error::OutOfMemory { message: bad.to_owned() },
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.chars().any(is_hidden), "{text:?}");
            assert!(text.contains("\\u{202e}b") && text.contains("a\\n"), "{text}");
        }
        assert_eq!(
            shown("plain \u{e9}\u{4e2d} name.safetensors"),
            "plain \u{e9}\u{4e2d} name.safetensors"
        );
        assert_eq!(shown_lines("a\nb\u{1b}"), "a\nb\\u{1b}");
    }
}
