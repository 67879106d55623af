//! The names of classes and functions in pickles of torch, and their meaning for tensorfs. Nothing
//! is imported.

use crate::dtype::Dtype;

/// The Python function that returns an attribute of a class.
pub(super) const GETATTR: (&str, &str) = ("builtins", "getattr");

/// Modules with functions that run code, open files, or return functions that run code or open files.
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

/// Functions of other modules that run code or open files.
const DENIED: [(&str, &str); 6] = [
    ("torch", "load"),
    ("torch", "compile"),
    ("torch.serialization", "load"),
    ("functools", "partial"),
    ("functools", "reduce"),
    ("numpy.testing._private.utils", "runstring"),
];

/// Prefixes of modules with functions that run code or open files.
const DENIED_PREFIXES: [&str; 4] =
    ["torch.hub", "torch.jit", "torch.utils.cpp_extension", "numpy.f2py"];

/// The names in `builtins` that only make values. `long`, `unicode` and `xrange` are names of Python 2 in pickles of
/// protocol 2.
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

/// Whether a name makes a pickle hostile, because using it runs code when the pickle is loaded.
pub(super) fn denied(module: &str, name: &str) -> bool {
    let top = module.split('.').next().unwrap_or_default();
    if module == "builtins" {
        // `getattr` is harmless with some arguments. `holds_class` decides about the arguments.
        return name != "getattr" && !HARMLESS_BUILTINS.contains(&name);
    }
    DENIED_MODULES.contains(&top)
        || DENIED.contains(&(module, name))
        || DENIED_PREFIXES.iter().any(|prefix| {
            module.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
        // A dotted name may refer to a name in another module.
        || name.contains('.')
            && name.split('.').any(|part| DENIED_MODULES.contains(&part) || part.starts_with("__"))
}

/// Whether `getattr` for `name` of `module.outer` may return something that runs code: a member of a module that runs
/// code, or an internal attribute of a class. Otherwise `name` is a member of an enum, an inner class or a method.
/// Pickles of protocol 2, and of some versions of Python, use `getattr` for such names.
pub(super) fn attribute_denied(module: &str, outer: &str, name: &str) -> bool {
    let is_module = |word: &str| DENIED_MODULES.contains(&word) || word == "builtins";
    name.starts_with("__")
        || name.contains('.')
        || outer.split('.').any(is_module)
        || is_module(name)
        || denied(&format!("{module}.{outer}"), name)
}

/// Whether `outer` has an inner class, or a value, called `name` that torch saves.
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

/// Modules of torch whose classes describe how tensors are placed. They have no function that a
/// pickle could call to do harm.
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

/// Functions of numpy that make arrays and numbers. The modules that have them were renamed, so the
/// modules are not listed.
const ARRAYS: [&str; 3] = ["_reconstruct", "scalar", "_frombuffer"];

words! {
    /// The risk of a name for somebody who loads the pickle with Python.
    #[derive(PartialOrd, Ord)]
    pub enum NameRisk {
        /// The name only makes values.
        Safe = "safe",
        /// The name is of a package that tensorfs does not know. Loading the pickle imports the
        /// package.
        Unknown = "unknown",
        /// The name runs code.
        Hostile = "hostile",
    }
}

impl NameRisk {
    /// The risk of a name that a pickle uses.
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
        // Names of functions begin with a small letter, names of classes with a capital letter.
        let is_class = name.trim_start_matches('_').starts_with(|c: char| c.is_ascii_uppercase());
        let is_array = module.split('.').next() == Some("numpy") && ARRAYS.contains(&name);
        if is_value || is_array || (of_placement && is_class && !name.contains('.')) {
            return NameRisk::Safe;
        }
        NameRisk::Unknown
    }
}

/// The element type of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StorageType {
    /// Elements of this type.
    Typed(Dtype),
    /// Bytes. The element type is an argument of the tensor.
    Untyped,
}

impl StorageType {
    /// The storage type of this class. `None` if safetensors does not have its element type.
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

    /// Length of an element in bytes.
    pub(super) fn item_len(self) -> u64 {
        match self {
            StorageType::Typed(dtype) => dtype.bits() / 8,
            StorageType::Untyped => 1,
        }
    }
}

/// The dtype of torch that has this name.
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

/// The functions that make tensors, with arguments that tensorfs knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rebuild {
    /// The arguments are a storage, offset, size and stride. More arguments may follow, which do
    /// not change the bytes of the tensor.
    Tensor,
    /// The arguments are those of `Tensor`, and a dtype as the seventh argument. The storage is untyped.
    TensorOfDtype,
    /// The first argument is a tensor, which is returned as a parameter.
    Parameter,
    /// The arguments are another of these functions, a class, the arguments of that function, and a
    /// state.
    FromType,
    /// The function makes a kind of tensor that tensorfs does not read.
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

/// Whether a global is a class of dicts that a pickle fills with pairs.
pub(super) fn is_dict(global: (&str, &str)) -> bool {
    let (module, name) = global;
    module == "collections" && ["OrderedDict", "defaultdict", "Counter"].contains(&name)
}
