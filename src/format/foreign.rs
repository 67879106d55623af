//! Files that are not weights in a supported format. Their first bytes, last bytes and name show the kind of file, and
//! the message says what the user can do. The module writes the error message after a file was refused.

use std::borrow::Cow;

use crate::error::{ErrorKind, Fault, quoted};

use super::safetensors::{HEADER_LEN_MAX, Header, PREFIX_LEN};
use super::{names, tensorizer};

/// Number of first bytes that `Evidence` needs.
pub const FIRST_LEN: u64 = 1024;

/// Number of last bytes that `Evidence` needs: the end of a zip archive without a comment.
pub const LAST_LEN: u64 = 22;

/// Maximum number of characters of a line that a message quotes.
const QUOTED_MAX: usize = 60;

/// The parts of a file that show what kind of file it is.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// Name of the file, or an empty one.
    pub name: &'a str,
    /// Its first `FIRST_LEN` bytes, or all.
    pub first: &'a [u8],
    /// Its last `LAST_LEN` bytes, or all.
    pub last: &'a [u8],
    /// Its length in bytes.
    pub len: u64,
}

/// A file that is no safetensors, bintensors or tensorizer file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// No bytes.
    Empty,
    /// Number of zeros at the beginning of the file: all of `Evidence::first`, or at least the 8
    /// bytes of a header length.
    Zeros(usize),
    /// An unfinished download. The value is the suffix of its name.
    Unfinished(&'static str),
    /// A text pointer of git-lfs in place of the real file.
    LfsPointer,
    /// A text pointer of git-xet in place of the real file.
    XetPointer,
    /// A text pointer of git-annex in place of the real file.
    AnnexPointer,
    /// A zip archive of `torch.save`.
    TorchZip,
    /// A file of `torch.save` before torch 1.6, or with its old serialization.
    TorchLegacy,
    /// A file of `torch.distributed.checkpoint` in which entries that are no tensors precede a safetensors file.
    TorchPrefix,
    /// A data file of `torch.distributed.checkpoint`.
    Distcp,
    /// The metadata of `torch.distributed.checkpoint`.
    DistcpMetadata,
    /// A pickle of another kind.
    Pickle,
    /// Arrays of numpy in a zip archive.
    Npz,
    /// One array of numpy.
    Npy,
    /// Another archive, or a compressed file, of this format.
    Packed(&'static str),
    /// The file format of llama.cpp.
    Gguf,
    /// The predecessors of GGUF.
    Ggml,
    /// HDF5, as Keras writes it.
    Hdf5,
    /// A graph of ONNX.
    Onnx,
    /// A model of TensorFlow Lite.
    TfLite,
    /// A part of a checkpoint of TensorFlow.
    TensorFlow,
    /// Weights of flax.
    Flax,
    /// A program or a library.
    Elf,
    /// A weight map of files that are no safetensors.
    WeightMap,
    /// Other JSON text, with its beginning.
    Json(String),
    /// A web page, with its title.
    Html(Option<String>),
    /// XML, such as the error answers of object stores.
    Xml,
    /// Other text, with its first line.
    Text(String),
}

/// Formats that are identified by their first bytes.
const MAGIC: [(&[u8], Foreign); 20] = [
    (b"version https://git-lfs.github.com/spec/", Foreign::LfsPointer),
    (b"# xet version ", Foreign::XetPointer),
    (b"/annex/objects/", Foreign::AnnexPointer),
    // The magic number of torch, which is the first of several pickles in a file.
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", Foreign::TorchLegacy),
    (b"GGUF", Foreign::Gguf),
    (b"lmgg", Foreign::Ggml),
    (b"fmgg", Foreign::Ggml),
    (b"tjgg", Foreign::Ggml),
    (b"\x89HDF\r\n\x1a\n", Foreign::Hdf5),
    (b"\x93NUMPY", Foreign::Npy),
    (b"\x7fELF", Foreign::Elf),
    (b"\x1f\x8b\x08", Foreign::Packed("gzip")),
    (b"\x28\xb5\x2f\xfd", Foreign::Packed("zstd")),
    (b"\xfd7zXZ\0", Foreign::Packed("xz")),
    (b"BZh91AY&SY", Foreign::Packed("bzip2")),
    (b"\x04\x22\x4d\x18", Foreign::Packed("lz4")),
    (b"7z\xbc\xaf\x27\x1c", Foreign::Packed("7z")),
    (b"Rar!\x1a\x07", Foreign::Packed("rar")),
    (b"PK\x05\x06", Foreign::Packed("zip")),
    (b"PK\x07\x08PK\x03\x04", Foreign::Packed("zip")),
];

/// First bytes of an entry of a zip archive, and of the end record of an archive.
const ZIP_ENTRY: &[u8] = b"PK\x03\x04";
const ZIP_END: &[u8] = b"PK\x05\x06";

/// First bytes of pickles of protocols 0 and 1: a dict, a list, or an object of a module.
const OLD_PICKLES: [&[u8]; 10] = [
    b"(dp0\n",
    b"(dp1\n",
    b"(lp0\n",
    b"(lp1\n",
    b"}q\0",
    b"]q\0",
    b"ccopy_reg\n",
    b"ccollections\n",
    b"ctorch",
    b"cnumpy",
];

/// Suffixes of weight files in formats that tensorfs does not read.
const UNREAD_SUFFIXES: [&str; 21] = [
    ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp", ".gguf", ".ggml", ".h5", ".hdf5",
    ".keras", ".msgpack", ".onnx", ".tflite", ".npz", ".npy", ".nemo", ".tar", ".zip", ".tgz",
];

/// A rank by which files are compared: a file with a lower rank is more likely to have the weights that a reader looks
/// for. `None` if the name is not that of a weight file.
pub fn weights_rank(name: &str) -> Option<u32> {
    if name == ".metadata" || name.ends_with(".distcp") {
        return Some(0);
    }
    if name.starts_with('.') {
        return None;
    }
    if unfinished(name).is_some() {
        return Some(1);
    }
    if name.starts_with("pytorch_model") || name.starts_with("model") || name.ends_with(".gguf") {
        let known = is_weights(name) || name.contains(".data-0");
        return known.then_some(2);
    }
    // Files of torch with the state of a trainer often lie beside the weights.
    let is_state = ["training_args", "optimizer", "scheduler", "rng_state"]
        .iter()
        .any(|s| name.starts_with(s));
    is_weights(name).then_some(if is_state { 4 } else { 3 })
}

fn is_weights(name: &str) -> bool {
    UNREAD_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}

/// The suffix of the name, if it is one that programs give to unfinished downloads.
pub fn unfinished(name: &str) -> Option<&'static str> {
    names::UNFINISHED.into_iter().find(|end| name.ends_with(end))
}

impl Evidence<'_> {
    /// The kind of the file. `None` if nothing shows the kind, and for every whole safetensors, bintensors or
    /// tensorizer file.
    pub fn foreign(&self) -> Option<Foreign> {
        let first = self.first;
        if tensorizer::is_tensorizer(first) {
            return None;
        }
        let prefix = first.first_chunk::<8>().map(|prefix| u64::from_le_bytes(*prefix));
        let header = prefix.filter(|&len| len <= HEADER_LEN_MAX);
        // A safetensors header begins with a brace. The length before it may happen to equal the first bytes of gzip.
        let magic = MAGIC
            .iter()
            .find(|(magic, _)| first.starts_with(magic))
            .filter(|_| first.get(PREFIX_LEN as usize) != Some(&b'{'));
        // If the header ends inside the file, the header may be valid.
        let is_inside = |len| len > 0 && PREFIX_LEN + len <= self.len;
        if magic.is_none() && header.is_some_and(is_inside) {
            return None;
        }
        if let Some(end) = unfinished(self.name) {
            return Some(Foreign::Unfinished(end));
        }
        if self.len == 0 {
            return Some(Foreign::Empty);
        }
        let zeros = first.iter().take_while(|&&byte| byte == 0).count();
        if zeros == first.len() || prefix == Some(0) {
            return Some(Foreign::Zeros(zeros));
        }
        if first.starts_with(ZIP_ENTRY) {
            return Some(self.zip());
        }
        if let Some((_, found)) = magic {
            return Some(found.clone());
        }
        // The file ends within its header: it is a truncated weight file, which the parser reports.
        if header.is_some() {
            return None;
        }
        if first.get(257..262) == Some(b"ustar") {
            return Some(Foreign::Packed("tar"));
        }
        self.binary().or_else(|| self.text())
    }

    fn zip(&self) -> Foreign {
        let name = self.zip_entry();
        let is_torch = name.ends_with(b"/data.pkl") || name == b"data.pkl";
        // torch writes an entry of this name if it saves to memory and has no path.
        let in_memory = name.starts_with(b"archive/");
        match () {
            () if is_torch && self.name.ends_with(".distcp") => Foreign::Distcp,
            () if is_torch
                && in_memory
                && names::is_safetensors(self.name)
                && !self.last.starts_with(ZIP_END) =>
            {
                Foreign::TorchPrefix
            }
            () if is_torch || self.name.ends_with(".pt") || self.name.ends_with(".pth") => {
                Foreign::TorchZip
            }
            () if name.ends_with(b".npy") => Foreign::Npz,
            () => Foreign::Packed("zip"),
        }
    }

    /// The name of the first entry of a zip archive.
    fn zip_entry(&self) -> &[u8] {
        let Some(len) = self.first.get(26..28) else { return &[] };
        let len = usize::from(u16::from_le_bytes([len[0], len[1]]));
        self.first.get(30..30 + len).unwrap_or_default()
    }

    /// Binary formats that have no unique magic number.
    fn binary(&self) -> Option<Foreign> {
        let first = self.first;
        let named = |suffix| self.name.ends_with(suffix);
        // Pickles of protocol 2 and later begin with the protocol number. Then follows a frame, an
        // empty dict, tuple or list, a name, a text or a number.
        if let [0x80, 2..=5, opcode, ..] = first
            && b"\x95}]()cXU\x8c\x8aKGM".contains(opcode)
        {
            let is_dcp = self.name == ".metadata"
                || first.windows(31).any(|text| text == b"torch.distributed.checkpoint.me");
            return Some(if is_dcp { Foreign::DistcpMetadata } else { Foreign::Pickle });
        }
        let is_old_pickle = OLD_PICKLES.iter().any(|begin| first.starts_with(begin));
        if is_old_pickle && self.last.last() == Some(&b'.') {
            return Some(Foreign::Pickle);
        }
        if first.get(4..8) == Some(b"TFL3") {
            return Some(Foreign::TfLite);
        }
        // The first field of an ONNX file is the version of the format.
        if named(".onnx") && first.first() == Some(&8) {
            return Some(Foreign::Onnx);
        }
        // The file begins with a msgpack map.
        if named(".msgpack") && matches!(first.first(), Some(0x80..=0x8f | 0xde | 0xdf)) {
            return Some(Foreign::Flax);
        }
        if is_tensorflow(self.name) {
            return Some(Foreign::TensorFlow);
        }
        named(".distcp").then_some(Foreign::Distcp)
    }

    /// Formats of text.
    fn text(&self) -> Option<Foreign> {
        let shown = printable(self.first, self.first.len() as u64 == self.len)?;
        let text = shown.trim_start_matches('\u{feff}').trim();
        let mut begin = text.chars().take(16).collect::<String>();
        begin.make_ascii_lowercase();
        if ["<!doctype html", "<html", "<head", "<body"].iter().any(|tag| begin.starts_with(tag)) {
            return Some(Foreign::Html(title(text)));
        }
        if begin.starts_with("<?xml") {
            return Some(Foreign::Xml);
        }
        let inner = text.strip_prefix(['{', '[']).map(|inner| inner.trim_start().chars().next());
        if inner.is_some_and(|next| next.is_none_or(|c| "\"}]{[0123456789".contains(c))) {
            let is_map = self.name.ends_with(".index.json") || text.contains("\"weight_map\"");
            return Some(if is_map { Foreign::WeightMap } else { Foreign::Json(line(text)) });
        }
        text.contains(char::is_alphabetic).then(|| Foreign::Text(line(text)))
    }
}

/// Whether the name is that of a file of a TensorFlow checkpoint, such as `model.ckpt.data-00000-of-00001`.
fn is_tensorflow(name: &str) -> bool {
    let number = name.rsplit_once(".data-").and_then(|(_, number)| number.split_once("-of-"));
    number.is_some_and(|(number, total)| {
        [number, total].iter().all(|n| n.len() == 5 && n.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// The bytes as text, if all of them are text: UTF-8, UTF-16 with a byte order mark, or mostly
/// ASCII with letters of Latin-1. Unless the bytes are `whole`, the last character may be cut.
fn printable(bytes: &[u8], whole: bool) -> Option<Cow<'_, str>> {
    let utf16 = |number: fn([u8; 2]) -> u16| {
        let units = bytes.chunks_exact(2).map(|pair| number([pair[0], pair[1]]));
        let decoded = char::decode_utf16(units).map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER));
        Cow::Owned(decoded.collect())
    };
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(e) if !whole && e.error_len().is_none() => {
            Cow::Borrowed(std::str::from_utf8(&bytes[..e.valid_up_to()]).ok()?)
        }
        Err(_) if bytes.starts_with(b"\xff\xfe") => utf16(u16::from_le_bytes),
        Err(_) if bytes.starts_with(b"\xfe\xff") => utf16(u16::from_be_bytes),
        Err(_) if bytes.iter().filter(|byte| !byte.is_ascii()).count() > bytes.len() / 4 => {
            return None;
        }
        Err(_) => Cow::Owned(bytes.iter().copied().map(char::from).collect()),
    };
    let is_text = |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t' | '\u{c}');
    text.chars().all(is_text).then_some(text)
}

/// The first line of `text`, cut to the length that a message quotes.
fn line(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(QUOTED_MAX).collect()
}

/// The title of a web page.
fn title(text: &str) -> Option<String> {
    // `to_ascii_lowercase` changes only ASCII letters, so that positions in both texts agree.
    let start = text.to_ascii_lowercase().find("<title>")? + "<title>".len();
    let title = line(text[start..].split('<').next()?.trim());
    (!title.is_empty()).then_some(title)
}

/// Advice for files of torch: how to write their tensors as safetensors.
const FROM_TORCH: &str = "write its tensors as safetensors: `save_pretrained` of transformers, or \
                          `safetensors.torch.save_file(torch.load(FILE, weights_only=True), OUT)`";

/// Advice for files that a server sent in place of the weights.
const AGAIN: &str = "fetch the weights again, logged in where that is needed";

impl Foreign {
    /// The kind of the file and advice. A message has it after the name of the file.
    pub fn message(&self, evidence: &Evidence<'_>) -> String {
        let pointer = |program: &str, command: &str| {
            let len = evidence.len;
            format!(
                "is a {program} pointer of {len} bytes, not the weights; fetch them with \
                 {command}"
            )
        };
        let of_framework = |what: &str, saver: &str| {
            format!(
                "is {what}, which tensorfs does not read; load it with its framework, and write the \
                 arrays as safetensors: `safetensors.{saver}.save_file`"
            )
        };
        let of_llama = |format: &str| {
            format!(
                "is a {format} file of llama.cpp, which tensorfs does not read; take the safetensors \
                 files of the model"
            )
        };
        match self {
            Foreign::LfsPointer => pointer("git-lfs", "`git lfs pull`"),
            Foreign::XetPointer => pointer("git-xet", "git-xet"),
            Foreign::AnnexPointer => pointer("git-annex", "`git annex get`"),
            Foreign::Gguf => of_llama("GGUF"),
            Foreign::Ggml => of_llama("GGML"),
            Foreign::Hdf5 => of_framework("an HDF5 file, as Keras writes", "numpy"),
            Foreign::Onnx => of_framework("an ONNX graph", "numpy"),
            Foreign::TfLite => of_framework("a TensorFlow Lite model", "numpy"),
            Foreign::TensorFlow => of_framework("a file of a TensorFlow checkpoint", "tensorflow"),
            Foreign::Flax => of_framework("a msgpack file of flax", "flax"),
            Foreign::Npz => "holds arrays of numpy in a zip archive; write them as safetensors: \
                             `safetensors.numpy.save_file(dict(numpy.load(FILE)), OUT)`"
                .to_owned(),
            Foreign::Npy => "is one array of numpy; write it as safetensors: \
                             `safetensors.numpy.save_file({NAME: numpy.load(FILE)}, OUT)`"
                .to_owned(),
            Foreign::Packed(format) => format!("is packed by {format}; unpack it"),
            Foreign::Empty => "is empty: nothing was saved or fetched into it; save or fetch it \
                               again"
                .to_owned(),
            Foreign::Zeros(zeros) => format!(
                "begins with {zeros} bytes of zeros: a download or a copy took its {} bytes of room \
                 and did not fill it; fetch it again",
                evidence.len
            ),
            Foreign::Elf => "is a program or a library (ELF), not weights; name the file of the \
                             weights"
                .to_owned(),
            Foreign::Unfinished(end) => {
                format!("is an unfinished download by its name, `*{end}`; finish or repeat it")
            }
            _ => self.message_of_torch().unwrap_or_else(|| self.message_of_text(evidence)),
        }
    }

    /// The message about a file of torch.
    fn message_of_torch(&self) -> Option<String> {
        Some(match self {
            Foreign::TorchZip => "is a file of torch.save by its first bytes, a pickle in a zip \
                                  archive; call it `*.pt` or `*.bin`"
                .to_owned(),
            Foreign::TorchLegacy => {
                format!("is a file of torch.save in its form before torch 1.6; {FROM_TORCH}")
            }
            Foreign::TorchPrefix => "starts with a zip archive: torch writes entries that are no \
                                     tensors in front of the header; save the checkpoint without \
                                     them"
                .to_owned(),
            Foreign::Distcp => {
                "holds pieces of torch.distributed.checkpoint, which `.metadata` puts \
                                together; name the folder that has both"
                    .to_owned()
            }
            Foreign::DistcpMetadata => {
                "is the metadata of torch.distributed.checkpoint, whose tensors \
                                        lie in `*.distcp` files; name the folder that has both"
                    .to_owned()
            }
            Foreign::Pickle => {
                format!("is a pickle of Python; if it holds tensors of torch, {FROM_TORCH}")
            }
            _ => return None,
        })
    }

    /// The message about text.
    fn message_of_text(&self, evidence: &Evidence<'_>) -> String {
        match self {
            Foreign::WeightMap => "is a weight map of files that are not safetensors; take the \
                                   safetensors files of the model, or write its tensors as \
                                   safetensors: `save_pretrained` of transformers"
                .to_owned(),
            Foreign::Json(_) if evidence.name.ends_with(".json") => {
                "is JSON text and holds no weights; name the folder of the checkpoint".to_owned()
            }
            Foreign::Json(begin) => format!(
                "is JSON text that begins with {}, not weights, perhaps the error that a server \
                 answered; {AGAIN}",
                quoted(begin)
            ),
            Foreign::Html(Some(title)) => {
                format!("is an HTML page with the title {}, not weights; {AGAIN}", quoted(title))
            }
            Foreign::Html(None) => format!("is an HTML page, not weights; {AGAIN}"),
            Foreign::Xml => {
                format!("is XML, not weights, perhaps the error that a store answered; {AGAIN}")
            }
            Foreign::Text(begin) => format!(
                "is text that begins with {}, not weights; fetch or save the weights again",
                quoted(begin)
            ),
            _ => "is no file of weights".to_owned(),
        }
    }

    /// The fault of a weight file of this kind, which the parser refused with `fault`.
    pub(super) fn fault(&self, evidence: &Evidence<'_>, fault: Fault) -> Fault {
        let kind = match self {
            Foreign::LfsPointer => ErrorKind::LfsPointer,
            _ if evidence.first.starts_with(ZIP_ENTRY) => ErrorKind::ZipPrefix,
            _ => fault.kind,
        };
        Fault { kind, tensor: None, message: self.message(evidence), ..fault }
    }
}

impl Header {
    /// Parses a whole file that is already in memory.
    pub fn of_file(bytes: &[u8]) -> Result<Header, Fault> {
        Header::of_valid_file(bytes).map_err(|fault| explained("", bytes, fault))
    }
}

/// The fault of a file in memory. It says what kind of file it is, if the kind is known.
fn explained(name: &str, bytes: &[u8], fault: Fault) -> Fault {
    let first = &bytes[..bytes.len().min(FIRST_LEN as usize)];
    let last = &bytes[bytes.len().saturating_sub(LAST_LEN as usize)..];
    let evidence = Evidence { name, first, last, len: bytes.len() as u64 };
    match evidence.foreign() {
        Some(foreign) => foreign.fault(&evidence, fault),
        None => fault,
    }
}
