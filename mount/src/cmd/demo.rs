//! `tensorfs demo`: makes small checkpoints as savers leave them, mounts them, and compares
//! every byte that the mount shows with what it has to be.
//!
//! What a tensor holds is computed from its number and the place of each byte, so the
//! comparison shares no code with the layout and the gathering that it tests.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tensorfs::Dtype;
use tensorfs::format::safetensors;

use super::{Failure, Outcome, human};
use crate::args;
use crate::attach::{Detach, detach};
use crate::daemon;

/// Prints a line; a reader that has seen enough is no failure.
macro_rules! tell {
    ($($line:tt)*) => {{
        let _ = writeln!(io::stdout(), $($line)*);
    }};
}

/// Name, dtype and shape of the tensors of each checkpoint.
const TENSORS: [(&str, Dtype, &[u64]); 6] = [
    ("model.embed_tokens.weight", Dtype::Bf16, &[2048, 512]),
    ("model.layers.0.mlp.down_proj.weight", Dtype::Bf16, &[512, 1408]),
    ("model.layers.0.mlp.experts.weight", Dtype::F32, &[8, 96, 256]),
    ("model.layers.0.self_attn.q_proj.weight", Dtype::F8E4M3, &[512, 512]),
    ("model.layers.0.self_attn.q_proj.scale", Dtype::F32, &[512]),
    ("model.norm.weight", Dtype::Bf16, &[512]),
];

/// How a checkpoint is cut into shards.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// Whole tensors, spread over three shards with a weight map.
    HuggingFace,
    /// torch DCP: so many parts along the first and the last dimension.
    Dcp(u64, u64),
}

const CHECKPOINTS: [(&str, Cut, &str); 4] = [
    ("hf", Cut::HuggingFace, "3 shards and a weight map, as transformers saves"),
    ("dcp-rows", Cut::Dcp(4, 1), "4 rank shards cut by rows, as FSDP saves with torch DCP"),
    ("dcp-columns", Cut::Dcp(1, 4), "4 rank shards cut by columns, as tensor parallelism does"),
    ("dcp-grid", Cut::Dcp(2, 2), "4 rank shards, a 2 x 2 grid"),
];

pub(super) fn run(args: &args::Demo) -> Outcome {
    crate::log::start(0);
    let template = std::env::temp_dir().join("tensorfs-demo-XXXXXX");
    let root = nix::unistd::mkdtemp(&template)
        .map_err(|e| Failure::Failed(format!("{}: {e}", template.display())))?;
    let outcome = demo(&root);
    if args.keep {
        tell!("\nThe checkpoints stay in {}", root.display());
    } else if let Err(e) = fs::remove_dir_all(&root) {
        super::say(&format!("{}: {e}", root.display()));
    }
    outcome
}

fn demo(root: &Path) -> Outcome {
    let failed = |e: io::Error| Failure::Failed(format!("{}: {e}", root.display()));
    let (models, mount) = (root.join("models"), root.join("mnt"));
    fs::create_dir(&mount).map_err(failed)?;
    tell!("Four small checkpoints in {}:", models.display());
    for (name, cut, what) in CHECKPOINTS {
        let folder = models.join(name);
        fs::create_dir_all(&folder).map_err(failed)?;
        write_checkpoint(&folder, cut).map_err(failed)?;
        tell!("  {name:<12} {what}");
    }
    tell!("\n$ tensorfs mount {} {}", models.display(), mount.display());
    let log = format!("log={}", crate::options::escape(&root.join("log").display().to_string()));
    daemon::run_in_background(&models, &mount, &[log], false, 0).map_err(Failure::Failed)?;
    let compared = CHECKPOINTS.iter().try_for_each(|(name, ..)| show(&mount.join(name)));
    tell!("\n$ tensorfs umount {}", mount.display());
    unmount(&mount).map_err(failed)?;
    compared?;
    tell!("\nEvery byte read through the mount is right, and nothing was copied.");
    Ok(())
}

/// Prints what `folder` of the mount shows and compares its weights.
fn show(folder: &Path) -> Outcome {
    let failed = |e: io::Error| Failure::Failed(format!("{}: {e}", folder.display()));
    tell!("\n$ ls -l {}", folder.display());
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let len = entry.metadata().map_err(failed)?.len();
        tell!("  {len:>10}  {}", entry.file_name().display());
    }
    let file = folder.join("model.safetensors");
    let started = Instant::now();
    let (tensors, bytes) = compare(&file)?;
    let speed = bytes as f64 / started.elapsed().as_secs_f64().max(1e-9);
    tell!(
        "  {tensors} tensors, {} read at {}/s and compared: all equal",
        human(bytes),
        human(speed as u64)
    );
    Ok(())
}

/// Reads `file` from end to end. Returns how many tensors and bytes it has.
fn compare(file: &Path) -> Result<(usize, u64), Failure> {
    let failed = |e: io::Error| Failure::Failed(format!("{}: {e}", file.display()));
    let wrong = |what: String| Failure::Failed(format!("{}: {what}", file.display()));
    let mut content = Vec::new();
    File::open(file).and_then(|mut f| f.read_to_end(&mut content)).map_err(failed)?;
    let prefix = content.first_chunk().ok_or_else(|| wrong("shorter than 8 bytes".into()))?;
    let start = 8 + u64::from_le_bytes(*prefix) as usize;
    let header = content.get(8..start).ok_or_else(|| wrong("no header".into()))?;
    let header: BTreeMap<String, Value> =
        serde_json::from_slice(header).map_err(|e| wrong(format!("bad header: {e}")))?;
    for (number, (name, dtype, shape)) in TENSORS.iter().enumerate() {
        let entry = header.get(*name).ok_or_else(|| wrong(format!("no tensor {name}")))?;
        if entry["dtype"] != dtype.name() || entry["shape"] != json!(shape) {
            return Err(wrong(format!("{name} is {entry}, expected {dtype} {shape:?}")));
        }
        let offset = |at: usize| start + entry["data_offsets"][at].as_u64().unwrap_or(0) as usize;
        let data = content.get(offset(0)..offset(1)).unwrap_or_default();
        let expected = len_of(*dtype, shape);
        if data.len() as u64 != expected {
            return Err(wrong(format!("{name} has {} bytes, expected {expected}", data.len())));
        }
        let differs = |&at: &usize| data[at] != byte_of(number, at as u64);
        if let Some(at) = (0..data.len()).find(differs) {
            return Err(wrong(format!("{name}: byte {at} differs")));
        }
    }
    Ok((TENSORS.len(), content.len() as u64))
}

fn unmount(mount: &Path) -> io::Result<()> {
    // Somebody who indexes new mounts may have it open for a moment.
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

/// Byte `at` of tensor `number`: a mix of both (splitmix64).
fn byte_of(number: usize, at: u64) -> u8 {
    let mut x = (number as u64) << 48 | at;
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x >> 56) as u8
}

fn len_of(dtype: Dtype, shape: &[u64]) -> u64 {
    shape.iter().product::<u64>() * dtype.bits() / 8
}

/// A part of a tensor: number, first index and extent in each dimension.
struct Part {
    number: usize,
    offset: Vec<u64>,
    shape: Vec<u64>,
}

fn write_checkpoint(folder: &Path, cut: Cut) -> io::Result<()> {
    fs::write(folder.join("config.json"), "{\n  \"model_type\": \"demo\"\n}\n")?;
    match cut {
        Cut::HuggingFace => write_hugging_face(folder),
        Cut::Dcp(rows, columns) => {
            for rank in 0..rows * columns {
                let cell = (rank / columns, rank % columns);
                let parts = TENSORS.iter().enumerate().filter_map(|(number, (_, _, shape))| {
                    dcp_part(number, shape, (rows, columns), cell)
                });
                write_dcp_shard(folder, rank, &parts.collect::<Vec<_>>())?;
            }
            Ok(())
        }
    }
}

fn write_hugging_face(folder: &Path) -> io::Result<()> {
    const SHARDS: usize = 3;
    let mut map = BTreeMap::new();
    for shard in 0..SHARDS {
        let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1);
        let numbers = (shard..TENSORS.len()).step_by(SHARDS);
        let parts: Vec<Part> = numbers
            .map(|number| Part {
                number,
                offset: vec![0; TENSORS[number].2.len()],
                shape: TENSORS[number].2.to_vec(),
            })
            .collect();
        map.extend(parts.iter().map(|part| (TENSORS[part.number].0, name.clone())));
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        write_shard(&folder.join(name), &metadata, &parts)?;
    }
    let total: u64 = TENSORS.iter().map(|(_, dtype, shape)| len_of(*dtype, shape)).sum();
    let json = json!({ "metadata": { "total_size": total }, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), format!("{json:#}\n"))
}

/// The part of a tensor that the rank at `cell` of a grid saves. A tensor with one dimension
/// is whole on the first rank, as replicated ones are.
fn dcp_part(
    number: usize,
    shape: &[u64],
    (rows, columns): (u64, u64),
    (row, column): (u64, u64),
) -> Option<Part> {
    let mut part = Part { number, offset: vec![0; shape.len()], shape: shape.to_vec() };
    if shape.len() == 1 {
        return ((row, column) == (0, 0)).then_some(part);
    }
    let last = shape.len() - 1;
    part.shape[0] /= rows;
    part.offset[0] = row * part.shape[0];
    part.shape[last] /= columns;
    part.offset[last] = column * part.shape[last];
    Some(part)
}

fn write_dcp_shard(folder: &Path, rank: u64, parts: &[Part]) -> io::Result<()> {
    let offsets = parts
        .iter()
        .map(|part| (TENSORS[part.number].0.to_owned(), json!({ "saved_offsets": part.offset })));
    let info: serde_json::Map<String, Value> = offsets.collect();
    let metadata = BTreeMap::from([
        ("DCP_SHARDING_INFO".to_owned(), Value::from(info).to_string()),
        ("DCP_VERSION".to_owned(), "1.0".to_owned()),
        ("format".to_owned(), "pt".to_owned()),
    ]);
    let name = format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1);
    write_shard(&folder.join(name), &metadata, parts)
}

fn write_shard(
    path: &PathBuf,
    metadata: &BTreeMap<String, String>,
    parts: &[Part],
) -> io::Result<()> {
    let entries = parts.iter().map(|part| {
        let (name, dtype, _) = TENSORS[part.number];
        (name, dtype, part.shape.as_slice(), len_of(dtype, &part.shape))
    });
    let header = safetensors::encode(metadata, entries, 8)
        .map_err(|len| io::Error::other(format!("a header of {len} bytes")))?;
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&header)?;
    for part in parts {
        write_part(&mut file, part)?;
    }
    file.into_inner()?.sync_all()
}

/// Writes the bytes of a part row by row.
fn write_part(file: &mut impl Write, part: &Part) -> io::Result<()> {
    let (_, dtype, whole) = TENSORS[part.number];
    let width = dtype.bits() / 8;
    let last = whole.len() - 1;
    let rows: u64 = part.shape[..last].iter().product();
    for row in 0..rows {
        // The element of the whole tensor at which this row begins.
        let (mut rest, mut element, mut stride) = (row, part.offset[last], whole[last]);
        for dim in (0..last).rev() {
            element += (part.offset[dim] + rest % part.shape[dim]) * stride;
            rest /= part.shape[dim];
            stride *= whole[dim];
        }
        let start = element * width;
        let bytes: Vec<u8> =
            (start..start + part.shape[last] * width).map(|at| byte_of(part.number, at)).collect();
        file.write_all(&bytes)?;
    }
    Ok(())
}
