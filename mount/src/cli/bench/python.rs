//! The cases that run in Python: loads with safetensors and with transformers.
//!
//! Each program prints `ready` after its imports, waits for a line, and ends with one line of JSON,
//! as every reader does.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use super::args::Pattern;

/// Environment variable with the path of a Python that has safetensors.
const PYTHON: &str = "TENSORFS_PYTHON";

/// The Python to run.
pub(super) fn interpreter() -> OsString {
    std::env::var_os(PYTHON).unwrap_or_else(|| "python3".into())
}

/// The command that runs the Python program for `pattern`. `None` if the pattern is not for Python.
/// `path` is the file to load, and `beside` is a folder with the other files of the checkpoint.
pub(super) fn command(pattern: Pattern, path: &Path, beside: &Path) -> Option<Command> {
    let program = match pattern {
        Pattern::Load => LOAD,
        Pattern::FromPretrained => FROM_PRETRAINED,
        _ => return None,
    };
    let mut command = Command::new(interpreter());
    command.args(["-c", program]).arg(path).arg(beside).env("HF_HUB_OFFLINE", "1");
    Some(command)
}

/// For a dtype that numpy does not have, integers of the same size are used, because only the bytes
/// matter.
const LOAD: &str = r#"
import json, sys, time
try:
    import numpy, safetensors.numpy
except ImportError:
    print(json.dumps({"skip": "no safetensors and numpy"}))
    sys.exit()
try:
    import ml_dtypes
except ImportError:
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        numpy.sctypeDict.setdefault(name, numpy.uint8 if "8_" in name else numpy.uint16)
print("ready", flush=True)
if not sys.stdin.readline():
    sys.exit()
start, cpu = time.perf_counter(), time.process_time()
try:
    tensors = safetensors.numpy.load_file(sys.argv[1])
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    total = sum(tensor.nbytes for tensor in tensors.values())
    print(json.dumps({"seconds": seconds, "bytes": total, "cpu_seconds": cpu}))
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"#;

/// The mounted file and the real file are each loaded through a folder of links, so that both have
/// the same name and config. Every page of every parameter is touched, because parameters may be
/// mapped and not read yet.
const FROM_PRETRAINED: &str = r#"
import json, os, sys, tempfile, time
path, beside = sys.argv[1:]
if not os.path.isfile(os.path.join(beside, "config.json")):
    print(json.dumps({"skip": "no config.json beside the shards"}))
    sys.exit()
try:
    import torch
    from transformers import AutoConfig, AutoModel
except ImportError:
    print(json.dumps({"skip": "no transformers and torch"}))
    sys.exit()
with tempfile.TemporaryDirectory() as folder:
    for name in os.listdir(beside):
        if name.endswith(".json") and not name.endswith(".index.json"):
            os.symlink(os.path.join(beside, name), os.path.join(folder, name))
    os.symlink(path, os.path.join(folder, "model.safetensors"))
    try:
        AutoConfig.from_pretrained(folder)
    except Exception as error:
        print(json.dumps({"skip": f"transformers knows no such model: {type(error).__name__}"}))
        sys.exit()
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit()
    start, cpu = time.perf_counter(), time.process_time()
    try:
        model = AutoModel.from_pretrained(folder, dtype="auto", local_files_only=True)
        total = touched = 0
        for parameter in model.state_dict().values():
            data = parameter.detach().contiguous().flatten().view(torch.uint8)
            total += data.numel()
            touched += int(data[::4096].sum(dtype=torch.int64)) if data.numel() else 0
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        print(json.dumps({"seconds": seconds, "bytes": total, "cpu_seconds": cpu}))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"#;
