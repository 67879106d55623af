//! Files that options name: texts, and checkpoints whose element types are used.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::dtype::Dtype;
use crate::error::{expect_local_path, quoted, shown_path};
use crate::format::manifest::Reference;
use crate::format::weight_map::WeightMap;
use crate::format::{InputFormat, RangeReader, TrainingState, names};
use crate::view::OptionFileContent;

/// Maximum length of a text in bytes.
const LEN_MAX: u64 = 256 << 20;

/// The absolute path of the file at `path`, and the part of its content that an option needs.
///
/// # Errors
/// A message of one line with the path.
pub fn read_option_file(
    path: &Path,
    wanted: OptionFileContent,
) -> Result<(PathBuf, Vec<u8>), String> {
    expect_local_path(path)?;
    match wanted {
        OptionFileContent::Text => read_text(path),
        OptionFileContent::Dtypes => {
            let dtypes = Dtypes::of_path(path)?;
            let absolute = std::path::absolute(path).map_err(|e| failed(path, &e))?;
            let names: BTreeMap<&str, &str> =
                dtypes.0.iter().map(|(name, dtype)| (name.as_str(), dtype.name())).collect();
            let text = serde_json::to_vec(&names).map_err(|e| failed(path, &e.into()))?;
            Ok((absolute, text))
        }
    }
}

/// The absolute path of the regular file at `path`, and its bytes.
///
/// # Errors
/// A message of one line with the path.
pub fn read_text(path: &Path) -> Result<(PathBuf, Vec<u8>), String> {
    let (file, meta) = open_regular(path)?;
    let mut text = Vec::new();
    file.take(LEN_MAX + 1).read_to_end(&mut text).map_err(|e| failed(path, &e))?;
    if text.len() as u64 > LEN_MAX {
        let path = shown_path(path);
        return Err(format!("{path}: has {} bytes, at most {LEN_MAX} are read", meta.len()));
    }
    Ok((std::path::absolute(path).map_err(|e| failed(path, &e))?, text))
}

fn open_regular(path: &Path) -> Result<(File, Metadata), String> {
    // With `O_NONBLOCK` the open does not wait, even if the path is a FIFO.
    let nonblock = nix::libc::O_NONBLOCK;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(nonblock)
        .open(path)
        .map_err(|e| failed(path, &e))?;
    let meta = file.metadata().map_err(|e| failed(path, &e))?;
    match meta.is_file() {
        true => Ok((file, meta)),
        false => Err(format!("{}: is not a regular file", shown_path(path))),
    }
}

fn failed(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", shown_path(path))
}

/// The element types of the tensors of a checkpoint, by name.
#[derive(Default)]
struct Dtypes(BTreeMap<String, Dtype>);

impl Dtypes {
    /// The element types at `path`. It may be a weights file, a folder with weights files, a weight map, or a
    /// manifest that lists the types.
    fn of_path(path: &Path) -> Result<Dtypes, String> {
        let meta = std::fs::metadata(path).map_err(|e| failed(path, &e))?;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let mut dtypes = Dtypes::default();
        if meta.is_dir() {
            let entries = std::fs::read_dir(path).map_err(|e| failed(path, &e))?;
            let mut files = entries
                .map(|entry| entry.map(|entry| entry.path()).map_err(|e| failed(path, &e)))
                .collect::<Result<Vec<PathBuf>, _>>()?;
            let file_name = |file: &Path| Some(file.file_name()?.to_str()?.to_owned());
            files.retain(|file| file_name(file).is_some_and(|name| names::is_weights(&name)));
            files.sort();
            if files.is_empty() {
                let form = "no weights files in this folder: name the folder of a checkpoint, a \
                            weights file, a weight map or a manifest";
                return Err(format!("{}: {form}", shown_path(path)));
            }
            files.iter().try_for_each(|file| dtypes.add_file(file, &|_| true))?;
        } else if InputFormat::of_name(name).is_some() || !name.ends_with(".json") {
            dtypes.add_file(path, &|_| true)?;
        } else {
            dtypes.add_listed(path)?;
        }
        Ok(dtypes)
    }

    /// Adds the tensors of the weights file at `path` for which `wanted` is true.
    fn add_file(&mut self, path: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<(), String> {
        let (file, meta) = open_regular(path)?;
        let mut reader = RegularFile { file, len: meta.len() };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let fail = |why: String| format!("{}: {why}", shown_path(path));
        let system = |error: io::Error| failed(path, &error);
        let detected = InputFormat::detect(&name, &mut reader).map_err(system)?;
        let known = detected.map_err(|fault| fail(fault.to_string()))?;
        let parsed = known.parse(&name, &mut reader, TrainingState::default());
        let description = parsed.map_err(system)?.map_err(|fault| fail(fault.to_string()))?;
        for tensor in description.tensors().filter(|tensor| wanted(tensor.name)) {
            let dtype = tensor.facts.dtype;
            let known = self.0.entry(tensor.name.to_owned()).or_insert(dtype);
            if *known != dtype {
                let tensor_name = quoted(tensor.name);
                return Err(fail(format!(
                    "tensor {tensor_name} is {dtype} here, and {known} in another file of the folder; \
                     name one file"
                )));
            }
        }
        Ok(())
    }

    /// Adds the tensors that the weight map or the manifest at `path` lists.
    fn add_listed(&mut self, path: &Path) -> Result<(), String> {
        let (_, text) = read_text(path)?;
        let fail = |why: String| format!("{}: {why}", shown_path(path));
        let listed = Reference::parse_json(&text).map_err(|fault| fail(fault.to_string()))?;
        if listed.shards.is_some() {
            let known = listed.tensors.into_iter();
            self.0.extend(known.filter_map(|(name, known)| Some((name, known?.0))));
            return Ok(());
        }
        let map = WeightMap::parse(&text).map_err(|fault| fail(fault.to_string()))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let file_of: HashMap<&str, &str> = map.shard_of.iter().collect();
        for file in map.shard_of.files() {
            self.add_file(&folder.join(file), &|name| file_of.get(name) == Some(&file.as_str()))?;
        }
        match map.shard_of.iter().find(|(name, _)| !self.0.contains_key(*name)) {
            None => Ok(()),
            Some((name, file)) => {
                Err(fail(format!("tensor {} is not in {}", quoted(name), quoted(file))))
            }
        }
    }
}

/// A regular file whose header is parsed.
struct RegularFile {
    file: File,
    len: u64,
}

impl RangeReader for RegularFile {
    fn file_len(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }
}
