//! The element types of a view.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::name_map::NameMap;
use super::select::NameGlob;
use super::{OptionFileContent, ReadFile};
use crate::cast::Cast;
use crate::catalog::{Catalog, Tensor, named_some};
use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, counted, quoted, real_name, shown_path};
use crate::hash::Digest;

/// The element types that the tensors of a view are cast to.
///
/// ```
/// use tensorfs::{Checkpoint, Dtype, DtypeCast, OpenOptions, View};
///
/// let view = View { dtype: Some(DtypeCast::To(Dtype::Bf16)), ..View::default() };
/// let options = OpenOptions { view, ..OpenOptions::default() };
/// let checkpoint = Checkpoint::open_with("tests/fixtures/hf/gpt2_tiny".as_ref(), &options)?;
/// assert!(checkpoint.catalog().tensors().all(|tensor| tensor.dtype == Dtype::Bf16));
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DtypeCast {
    /// Floating point tensors are cast to this type, except quantized tensors and their scales.
    To(Dtype),
    /// The tensors that a list names are cast to the types in the list.
    Map(Arc<DtypeMap>),
    /// All tensors are cast to the types that they have in another checkpoint, except those that the view keeps.
    Like(Arc<DtypeMap>),
}

/// The element types of tensors, by name.
///
/// ```
/// use tensorfs::DtypeCast;
///
/// let cast = DtypeCast::map("dtypes.json".as_ref(), br#"{"lm_head.weight": "torch.bfloat16"}"#)?;
/// assert_eq!(cast.to_string(), "map=dtypes.json");
/// # Ok::<(), String>(())
/// ```
pub type DtypeMap = NameMap<Dtype>;

/// The names in options of the types to which all floating point tensors can be cast.
const WORDS: [(&str, Dtype); 3] = [("bf16", Dtype::Bf16), ("f16", Dtype::F16), ("f32", Dtype::F32)];

impl DtypeCast {
    /// The cast for `word`, a value of the option `dtype=`. `read` reads the file of `map=FILE` or `like:FILE`.
    ///
    /// # Errors
    /// A message of one line without the name of the option.
    pub fn parse(word: &str, read: ReadFile<'_>) -> Result<DtypeCast, String> {
        if let Some((_, dtype)) = WORDS.iter().find(|(known, _)| *known == word) {
            return Ok(DtypeCast::To(*dtype));
        }
        let path_after = |kind: &str| word.strip_prefix(kind).filter(|path| !path.is_empty());
        if let Some(path) = path_after("map=") {
            let map = read(Path::new(path), OptionFileContent::Text)
                .and_then(|(path, text)| DtypeCast::map(&path, &text));
            return map.map_err(|why| format!("a list of tensors and dtypes; {why}"));
        }
        if let Some(path) = path_after("like:") {
            let map = read(Path::new(path), OptionFileContent::Dtypes)
                .and_then(|(path, text)| dtypes_in(&path, &text))
                .map_err(|why| format!("a checkpoint with dtypes; {why}"))?;
            return Ok(DtypeCast::Like(Arc::new(map)));
        }
        Err("bf16, f16, f32, map=FILE or like:FILE".to_owned())
    }

    /// The cast in `text`, a JSON object of tensor names and types. The types have the names of torch or
    /// safetensors. `path` is the name of the file in errors.
    ///
    /// # Errors
    /// A message of one line with the file and the tensor.
    pub fn map(path: &Path, text: &[u8]) -> Result<DtypeCast, String> {
        dtypes_in(path, text).map(|map| DtypeCast::Map(Arc::new(map)))
    }

    /// The file of the list, with the hash of its text.
    pub(crate) fn read_from(&self) -> Option<(&Path, Digest)> {
        match self {
            DtypeCast::To(_) => None,
            DtypeCast::Map(map) | DtypeCast::Like(map) => Some(map.read_from()),
        }
    }

    /// The new types of the tensors at `positions`. Tensors that `keep` matches keep their type.
    pub(super) fn dtypes(
        &self,
        catalog: &Catalog,
        positions: &[u32],
        keep: &[NameGlob],
    ) -> Result<Vec<Dtype>, Fault> {
        let tensors = || positions.iter().map(|&position| catalog.tensor_at(position as usize));
        let unused = keep.iter().find(|glob| !tensors().any(|tensor| glob.matches(tensor.name)));
        if let Some(glob) = unused {
            return Err(ErrorKind::View.fault(format!(
                "keep={} matches none of the {} tensors",
                quoted(&glob.to_string()),
                positions.len()
            )));
        }
        match self {
            DtypeCast::To(_) => {}
            DtypeCast::Map(map) => map.check(tensors())?,
            DtypeCast::Like(map) => {
                let cast = tensors().filter(|tensor| !keep.iter().any(|k| k.matches(tensor.name)));
                map.check_all(cast)?;
            }
        }
        let quantized = Quantized::of(tensors());
        let dtype = |tensor: Tensor<'_>| {
            if keep.iter().any(|glob| glob.matches(tensor.name)) {
                return Ok(tensor.dtype);
            }
            let to = match self {
                DtypeCast::To(_) if !is_wide_float(tensor.dtype) || quantized.owns(&tensor) => {
                    tensor.dtype
                }
                DtypeCast::To(dtype) => *dtype,
                DtypeCast::Map(map) | DtypeCast::Like(map) => {
                    map.values.get(tensor.name).copied().unwrap_or(tensor.dtype)
                }
            };
            check(&tensor, to).map(|()| to).map_err(|fault| {
                match self {
                    DtypeCast::Like(_) => {
                        Fault { message: format!("dtype={self}: {}", fault.message), ..fault }
                    }
                    _ => fault,
                }
                .tensor(tensor.name)
            })
        };
        tensors().map(dtype).collect()
    }
}

impl fmt::Display for DtypeCast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DtypeCast::To(dtype) => f.write_str(&dtype.name().to_ascii_lowercase()),
            DtypeCast::Map(map) => write!(f, "map={}", real_name(&map.path)),
            DtypeCast::Like(map) => write!(f, "like:{}", real_name(&map.path)),
        }
    }
}

impl DtypeMap {
    /// Refuses a list that names a tensor which is not among `tensors`.
    fn check<'a>(&self, tensors: impl Iterator<Item = Tensor<'a>>) -> Result<(), Fault> {
        let known: HashSet<&str> = tensors.map(|tensor| tensor.name).collect();
        let names = self.values.keys().map(String::as_str);
        let unknown: Vec<&str> = names.filter(|name| !known.contains(name)).collect();
        let Some(first) = unknown.first() else { return Ok(()) };
        let message = format!(
            "dtype=map={}: the file names {} that the view does not have: {}",
            shown_path(&self.path),
            counted(unknown.len(), "tensor"),
            named_some(unknown.iter().copied())
        );
        Err(ErrorKind::View.fault(message).tensor(first))
    }

    /// Refuses a list that does not name all of `tensors`.
    fn check_all<'a>(&self, tensors: impl Iterator<Item = Tensor<'a>>) -> Result<(), Fault> {
        let names = tensors.map(|tensor| tensor.name);
        let unknown: Vec<&str> = names.filter(|name| !self.values.contains_key(*name)).collect();
        let Some(first) = unknown.first() else { return Ok(()) };
        let message = format!(
            "dtype=like:{}: it does not have {} of the view: {}; keep=GLOB leaves tensors as they are",
            shown_path(&self.path),
            counted(unknown.len(), "tensor"),
            named_some(unknown.iter().copied())
        );
        Err(ErrorKind::View.fault(message).tensor(first))
    }
}

/// The quantized tensors of a set.
struct Quantized<'a> {
    /// Names of tensors whose elements have 8 bits or fewer.
    names: HashSet<&'a str>,
    /// Whether the type of one of them is a floating point type.
    has_floats: bool,
}

impl<'a> Quantized<'a> {
    fn of(tensors: impl Iterator<Item = Tensor<'a>>) -> Quantized<'a> {
        let narrow = tensors.filter(|t| t.stored.bits() <= 8 && t.stored != Dtype::Bool);
        let mut quantized = Quantized { names: HashSet::new(), has_floats: false };
        for tensor in narrow {
            quantized.has_floats |= !matches!(tensor.stored, Dtype::I8 | Dtype::U8);
            quantized.names.insert(tensor.name);
        }
        quantized
    }

    /// Whether `tensor` belongs to the quantization, for example as a scale of other tensors. One sign is a
    /// name that consists of the name of a quantized tensor, then `_` or `.`, and more text. Examples are
    /// `weight_scale_inv` and `weight.absmax`. The other sign is the word `scale` in the last part of the name,
    /// if the set has floats of 8 bits or fewer.
    fn owns(&self, tensor: &Tensor<'_>) -> bool {
        let name = tensor.name;
        let own = name.rsplit('.').next().unwrap_or(name);
        let ends = name.match_indices(['.', '_']).map(|(end, _)| end);
        (self.has_floats && own.contains("scale"))
            || ends.into_iter().any(|end| self.names.contains(&name[..end]))
    }
}

/// The types in the list `text`. `path` is the name of the file in errors.
fn dtypes_in(path: &Path, text: &[u8]) -> Result<DtypeMap, String> {
    let form = "expected a JSON object of tensor names and dtypes, {\"NAME\": \"BF16\", ...}";
    NameMap::parse(path, text, form, |value| {
        value.as_str().and_then(dtype_of).ok_or_else(|| format!("{value} is no dtype"))
    })
}

fn is_wide_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16)
}

fn dtype_of(word: &str) -> Option<Dtype> {
    let torch = word.strip_prefix("torch.").unwrap_or(word);
    Dtype::from_torch(torch).or_else(|| Dtype::from_name(word))
}

/// Refuses a cast that is not supported.
fn check(tensor: &Tensor<'_>, to: Dtype) -> Result<(), Fault> {
    if tensor.dtype == to {
        return Ok(());
    }
    if tensor.stored != tensor.dtype {
        return Err(ErrorKind::View.fault(format!(
            "is cast from {} to {} already, and elements are cast once; ask that view for {to}",
            tensor.stored, tensor.dtype
        )));
    }
    if Cast::new(tensor.stored, to).is_none() {
        let message = format!("{} cannot be cast to {to}; keep it, or leave it out", tensor.stored);
        return Err(ErrorKind::View.fault(message));
    }
    if to.bits_of(tensor.shape).is_none() {
        let message = format!("shape {:?} as {to} passes 2^64 bits", tensor.shape);
        return Err(ErrorKind::Overflow.fault(message));
    }
    Ok(())
}
