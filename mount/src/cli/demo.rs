//! `tensorfs demo`: writes small checkpoints in the formats of common training tools, mounts them,
//! and compares every byte of the mounted files with its expected value.
//!
//! Each byte of a tensor is computed from the number of the tensor and the position of the byte. So
//! the comparison shares no code with the layout and the gathering that it tests.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::wait::{WaitPidFlag, waitpid};
use serde_json::{Value, json};
use tensorfs::Dtype;
use tensorfs::internal::error::{real_name, shown_path};
use tensorfs::internal::mountinfo;
use tensorfs::internal::size::shown_size;

use super::args;
use super::output::{Failure, Outcome, print_text, speed};
use super::saved::{Cut, Tensor, byte_of, write_checkpoint};
use super::stopping::{clean_up_on_signals, is_stopped, take_signals};
use crate::daemon::attach::{Detach, detach};
use crate::daemon::background;
use crate::log;

/// Time limit for the daemon to exit after the unmount.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Prints a line. Fails if a signal has told the command to stop.
macro_rules! tell {
    ($($line:tt)*) => {
        check_stopped().and_then(|()| print_text(&format!("{}\n", format_args!($($line)*))))
    };
}

/// Name, dtype and shape of the tensors of each checkpoint.
const TENSORS: [(&str, Dtype, &[u64]); 8] = [
    ("model.embed_tokens.weight", Dtype::Bf16, &[2048, 512]),
    ("model.layers.0.input_layernorm.weight", Dtype::Bf16, &[512]),
    ("model.layers.0.mlp.down_proj.weight", Dtype::Bf16, &[512, 1408]),
    ("model.layers.0.mlp.experts.weight", Dtype::F32, &[8, 96, 256]),
    ("model.layers.0.self_attn.k_norm.weight", Dtype::Bf16, &[64]),
    ("model.layers.0.self_attn.q_proj.weight", Dtype::F8E4M3, &[512, 512]),
    ("model.layers.0.self_attn.q_proj.scale", Dtype::F32, &[512]),
    ("model.norm.weight", Dtype::Bf16, &[512]),
];

const CHECKPOINTS: [(&str, Cut, &str); 4] = [
    ("hf", Cut::HuggingFace(4), "4 shards and a weight map, as transformers saves"),
    ("dcp-rows", Cut::Dcp(4, 1), "4 rank shards cut by rows, as FSDP saves with torch DCP"),
    ("dcp-columns", Cut::Dcp(1, 4), "4 rank shards cut by columns, as tensor parallelism does"),
    ("dcp-grid", Cut::Dcp(2, 2), "4 rank shards, a 2 x 2 grid"),
];

pub(super) fn run(args: &args::DemoArgs) -> Outcome {
    log::start(0);
    take_signals();
    clean_up_on_signals();
    let template = std::env::temp_dir().join("tensorfs-demo-XXXXXX");
    let made = nix::unistd::mkdtemp(&template).map_err(|e| Failure::at(&template, e))?;
    // Paths in the mount table contain no links, so this path must not contain any.
    let root = fs::canonicalize(&made).unwrap_or(made);
    let outcome = demo(&root);
    let mount = root.join("mnt");
    if let Err(e) = take_off(&mount) {
        // The folder stays, because removing it would also descend into the mount.
        log::say(&format!("{}: {e}", shown_path(&mount)));
    } else if args.keep {
        let _ = print_text(&format!("\nThe checkpoints stay in {}\n", shown_path(&root)));
    } else if let Err(e) = fs::remove_dir_all(&root) {
        log::say(&format!("{}: {e}", shown_path(&root)));
    }
    outcome
}

/// Unmounts, if it is still mounted, and waits until the daemon ends.
fn take_off(mount: &Path) -> io::Result<()> {
    if !mountinfo::at(mount)?.is_empty() {
        unmount(mount)?;
    }
    let started = Instant::now();
    while waitpid(None, Some(WaitPidFlag::WNOHANG)).is_ok() && started.elapsed() < END_TIMEOUT {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn check_stopped() -> Outcome {
    if is_stopped() { Err(Failure::Failed("stopped".to_owned())) } else { Ok(()) }
}

fn demo(root: &Path) -> Outcome {
    let failed = |e: io::Error| Failure::at(root, e);
    let (models, mount) = (root.join("models"), root.join("mnt"));
    fs::create_dir(&mount).map_err(failed)?;
    tell!("Four small checkpoints in {}:", shown_path(&models))?;
    let tensors = tensors();
    for (name, cut, what) in CHECKPOINTS {
        let folder = models.join(name);
        fs::create_dir_all(&folder).map_err(failed)?;
        write_checkpoint(&folder, &tensors, cut).map_err(failed)?;
        tell!("  {name:<12} {what}")?;
    }
    // Rank shards alone do not say how many of them there are.
    let shards = "expect-shards=4";
    tell!("\n$ tensorfs mount {} {} -o {shards}", shown_path(&models), shown_path(&mount))?;
    let log = format!("log={}", crate::options::escape(&real_name(&root.join("log"))));
    // A temporary checkpoint needs no index in the user's cache folder.
    let options = [log, "index-dir=none".to_owned(), shards.to_owned()];
    background::run_in_background(&models, &mount, &options, false, 0, None)
        .map_err(Failure::Failed)?;
    let compared = CHECKPOINTS.iter().try_for_each(|(name, ..)| show(&mount.join(name)));
    if compared.is_ok() {
        tell!("\n$ tensorfs umount {}", shown_path(&mount))?;
    }
    unmount(&mount).map_err(failed)?;
    compared?;
    tell!("\nEvery byte read through the mount is right, and nothing was copied.")?;
    Ok(())
}

fn tensors() -> Vec<Tensor> {
    let tensor = |&(name, dtype, shape): &(&str, Dtype, &[u64])| Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
    };
    TENSORS.iter().map(tensor).collect()
}

/// Prints the files that `folder` of the mount shows, and compares the weights with their expected
/// bytes.
fn show(folder: &Path) -> Outcome {
    let failed = |e: io::Error| Failure::at(folder, e);
    tell!("\n$ ls -l {}", shown_path(folder))?;
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let len = entry.metadata().map_err(failed)?.len();
        tell!("  {len:>10}  {}", shown_path(entry.file_name().as_ref()))?;
    }
    let file = folder.join("model.safetensors");
    let started = Instant::now();
    let (tensors, bytes) = compare(&file)?;
    let speed = speed(bytes, started.elapsed().as_secs_f64());
    let size = shown_size(bytes);
    tell!("  {tensors} tensors, {size} read at {speed} and compared: all equal")?;
    Ok(())
}

/// Reads `file` from start to end and compares it. Returns its numbers of tensors and bytes.
fn compare(file: &Path) -> Result<(usize, u64), Failure> {
    let failed = |e: io::Error| Failure::at(file, e);
    let wrong = |what: String| Failure::at(file, what);
    let mut content = Vec::new();
    File::open(file).and_then(|mut f| f.read_to_end(&mut content)).map_err(failed)?;
    let prefix = content.first_chunk().ok_or_else(|| wrong("shorter than 8 bytes".into()))?;
    let start = 8 + u64::from_le_bytes(*prefix) as usize;
    let json = content.get(8..start).ok_or_else(|| wrong("no header".into()))?;
    let header: BTreeMap<String, Value> =
        serde_json::from_slice(json).map_err(|e| wrong(format!("bad header: {e}")))?;
    for (number, tensor) in tensors().iter().enumerate() {
        let Tensor { name, dtype, shape } = tensor;
        let entry = header.get(name).ok_or_else(|| wrong(format!("no tensor {name}")))?;
        if entry["dtype"] != dtype.name() || entry["shape"] != json!(shape) {
            return Err(wrong(format!("{name} is {entry}, expected {dtype} {shape:?}")));
        }
        let offset = |end: usize| start + entry["data_offsets"][end].as_u64().unwrap_or(0) as usize;
        let data = content.get(offset(0)..offset(1)).unwrap_or_default();
        let expected = tensor.len();
        if data.len() as u64 != expected {
            return Err(wrong(format!("{name} has {} bytes, expected {expected}", data.len())));
        }
        let differs = |&index: &usize| data[index] != byte_of(number, index as u64);
        if let Some(index) = (0..data.len()).find(differs) {
            return Err(wrong(format!("{name}: byte {index} differs")));
        }
    }
    Ok((TENSORS.len(), content.len() as u64))
}

fn unmount(mount: &Path) -> io::Result<()> {
    // A file indexer may have the mount open for a moment, so this is repeated.
    for _ in 0..50 {
        match detach(mount, Detach::Clean) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
    detach(mount, Detach::Lazy)
}
