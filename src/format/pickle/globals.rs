//! The names that pickles of torch use, and what each of them means here. Nothing is imported.

use crate::dtype::Dtype;

/// The function that finds an attribute of a class.
pub(super) const GETATTR: (&str, &str) = ("builtins", "getattr");

/// Modules whose functions run code, open files or find such functions.
const DENIED_MODULES: [&str; 31] = [
    "os",
    "posix",
    "nt",
    "sys",
    "subprocess",
    "runpy",
    "importlib",
    "pty",
    "socket",
    "shutil",
    "webbrowser",
    "operator",
    "ctypes",
    "marshal",
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "code",
    "codeop",
    "multiprocessing",
    "asyncio",
    "pdb",
    "bdb",
    "timeit",
    "commands",
    "pip",
    "imp",
    "types",
    "threading",
    "signal",
];

/// Functions of other modules that do.
const DENIED: [(&str, &str); 6] = [
    ("torch", "load"),
    ("torch", "compile"),
    ("torch.serialization", "load"),
    ("functools", "partial"),
    ("functools", "reduce"),
    ("numpy.testing._private.utils", "runstring"),
];

/// Prefixes of modules that do.
const DENIED_PREFIXES: [&str; 4] =
    ["torch.hub", "torch.jit", "torch.utils.cpp_extension", "numpy.f2py"];

/// The names of `builtins` that only make values; `long`, `unicode` and `xrange` are those of protocol 2.
const HARMLESS_BUILTINS: [&str; 28] = [
    "set",
    "frozenset",
    "bytearray",
    "bytes",
    "complex",
    "slice",
    "range",
    "int",
    "float",
    "bool",
    "str",
    "list",
    "dict",
    "tuple",
    "object",
    "type",
    "Ellipsis",
    "NotImplemented",
    "long",
    "unicode",
    "xrange",
    "len",
    "abs",
    "min",
    "max",
    "sum",
    "round",
    "sorted",
];

/// Whether a pickle that uses this name is hostile: the name runs code when the pickle is loaded.
pub(super) fn denied(module: &str, name: &str) -> bool {
    let top = module.split('.').next().unwrap_or_default();
    if module == "builtins" {
        // It is harmless with some arguments, which `holds_class` knows.
        return name != "getattr" && !HARMLESS_BUILTINS.contains(&name);
    }
    DENIED_MODULES.contains(&top)
        || DENIED.contains(&(module, name))
        || DENIED_PREFIXES.iter().any(|prefix| {
            module.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
        // A dotted name leads from the module to another one.
        || name.contains('.')
            && name.split('.').any(|part| DENIED_MODULES.contains(&part) || part.starts_with("__"))
}

/// Whether `getattr` for `name` of `module.outer` may lead to code: to a module that runs it, or to the
/// insides of a class. Else it is a member of an enum, an inner class or a method, which protocol 2 and
/// some versions of Python name so.
pub(super) fn attribute_denied(module: &str, outer: &str, name: &str) -> bool {
    let is_module = |word: &str| DENIED_MODULES.contains(&word) || word == "builtins";
    name.starts_with("__")
        || name.contains('.')
        || outer.split('.').any(is_module)
        || is_module(name)
        || denied(&format!("{module}.{outer}"), name)
}

/// Whether the class `outer` has an inner class, or a value, of this name that torch saves.
pub(super) fn holds_class(module: &str, outer: &str, name: &str) -> bool {
    match (module, outer) {
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor") => {
            name == "ProcessGroupState"
        }
        (
            "torch.distributed._shard.sharded_tensor.metadata"
            | "torch.distributed.checkpoint.metadata",
            "MEM_FORMAT_ENCODING" | "_MEM_FORMAT_ENCODING",
        ) => name.starts_with("TORCH_"),
        _ => false,
    }
}

/// Modules of torch whose classes describe how tensors are placed, without functions that a pickle
/// could call to harm.
const PLACEMENT_MODULES: [&str; 7] = [
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed.device_mesh",
    "torch.distributed._mesh_layout",
    "torch.distributed._shard",
    "torch.distributed.remote_device",
    "torch.distributed.checkpoint.metadata",
];

/// Other names that only make values.
const VALUES: [(&str, &str); 25] = [
    ("torch", "Size"),
    ("torch", "device"),
    ("torch", "Tensor"),
    ("torch", "strided"),
    ("torch._tensor", "Tensor"),
    ("torch.nn", "Parameter"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.serialization", "_get_layout"),
    ("torch.storage", "TypedStorage"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("_codecs", "encode"),
    ("argparse", "Namespace"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.dtypes", "Float64DType"),
    ("decimal", "Decimal"),
];

/// Functions of numpy that make arrays and numbers, in modules that were renamed.
const ARRAYS: [&str; 3] = ["_reconstruct", "scalar", "_frombuffer"];

words! {
    /// The meaning of a name for somebody who loads the pickle with Python.
    #[derive(PartialOrd, Ord)]
    pub enum NameRisk {
        /// It only makes values.
        Safe = "safe",
        /// It is of a package that is not known here: loading the pickle imports it.
        Unknown = "unknown",
        /// It runs code.
        Hostile = "hostile",
    }
}

impl NameRisk {
    /// The risk of a name of a pickle.
    pub(super) fn of(module: &str, name: &str) -> NameRisk {
        if denied(module, name) {
            return NameRisk::Hostile;
        }
        let is_torch = module == "torch" || module == "torch.cuda";
        let is_value = module == "builtins"
            || is_dict((module, name))
            || dtype(module, name).is_some()
            || StorageType::of(module, name).is_some()
            || (is_torch && name.ends_with("Storage") && !name.contains('.'))
            || Rebuild::of(module, name).is_some()
            || VALUES.contains(&(module, name));
        let of_placement = PLACEMENT_MODULES.iter().any(|known| {
            module.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        });
        // Names of functions begin with a small letter.
        let is_class = name.trim_start_matches('_').starts_with(|c: char| c.is_ascii_uppercase());
        let is_array = module.split('.').next() == Some("numpy") && ARRAYS.contains(&name);
        if is_value || is_array || (of_placement && is_class && !name.contains('.')) {
            return NameRisk::Safe;
        }
        NameRisk::Unknown
    }
}

/// The elements of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StorageType {
    /// Elements of a type.
    Typed(Dtype),
    /// Bytes, whose type the tensor tells.
    Untyped,
}

impl StorageType {
    /// The storage of this global, `None` if it has elements that safetensors does not have.
    pub(super) fn of(module: &str, name: &str) -> Option<StorageType> {
        if (module, name) == ("torch.storage", "UntypedStorage") {
            return Some(StorageType::Untyped);
        }
        if module != "torch" && module != "torch.cuda" {
            return None;
        }
        Some(StorageType::Typed(match name {
            "DoubleStorage" => Dtype::F64,
            "FloatStorage" => Dtype::F32,
            "HalfStorage" => Dtype::F16,
            "BFloat16Storage" => Dtype::Bf16,
            "LongStorage" => Dtype::I64,
            "IntStorage" => Dtype::I32,
            "ShortStorage" => Dtype::I16,
            "CharStorage" => Dtype::I8,
            "ByteStorage" => Dtype::U8,
            "BoolStorage" => Dtype::Bool,
            "ComplexFloatStorage" => Dtype::C64,
            _ => return None,
        }))
    }

    /// Bytes of an element.
    pub(super) fn item_len(self) -> u64 {
        match self {
            StorageType::Typed(dtype) => dtype.bits() / 8,
            StorageType::Untyped => 1,
        }
    }
}

/// The dtype of torch with this name.
pub(super) fn dtype(module: &str, name: &str) -> Option<Dtype> {
    if module != "torch" {
        return None;
    }
    Dtype::from_torch(match name {
        "double" => "float64",
        "float" => "float32",
        "half" => "float16",
        "long" => "int64",
        "int" => "int32",
        "short" => "int16",
        "cfloat" => "complex64",
        other => other,
    })
}

/// The functions that make tensors, of which this module knows the arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rebuild {
    /// A storage, offset, size and stride; from `Tensor` on, more that says nothing of the bytes.
    Tensor,
    /// Its arguments are those of `Tensor` with a dtype as the seventh argument, on a storage of bytes.
    TensorOfDtype,
    /// A tensor, which is the first argument.
    Parameter,
    /// Another of these functions, a type, its arguments, and a state.
    FromType,
    /// A tensor of a kind that is not read.
    Other,
}

impl Rebuild {
    /// The function of this name.
    pub(super) fn of(module: &str, name: &str) -> Option<Rebuild> {
        if !["torch._utils", "torch._tensor", "torch.tensor"].contains(&module) {
            return None;
        }
        Some(match name {
            "_rebuild_tensor" | "_rebuild_tensor_v2" => Rebuild::Tensor,
            "_rebuild_tensor_v3" => Rebuild::TensorOfDtype,
            "_rebuild_parameter" | "_rebuild_parameter_with_state" => Rebuild::Parameter,
            "_rebuild_from_type_v2" => Rebuild::FromType,
            _ if name.starts_with("_rebuild") => Rebuild::Other,
            _ => return None,
        })
    }
}

/// Whether a global is a class of dicts that a pickle fills by pairs.
pub(super) fn is_dict(global: (&str, &str)) -> bool {
    let (module, name) = global;
    module == "collections" && ["OrderedDict", "defaultdict", "Counter"].contains(&name)
}
