//! `tensorfs convert`: a checkpoint as one real file, as the package of a format would write it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use tensorfs::internal::checkpoint::{Checkpoint, Tail, VirtualFile};
use tensorfs::internal::consolidate::{Copier, Watch, WriteOptions};
use tensorfs::internal::error::{counted, real_name, shown, shown_path};
use tensorfs::internal::format::OutputFormat;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::view::FileSpec;

use super::args::{self, To};
use super::output::{Failure, Outcome, UNPROVEN_TAIL, human, print_json, print_text};
use super::sources::{one_checkpoint, query_options};
use super::stopping::{check_stopped, stop_on_signals};
use super::verify::bar;

pub(super) fn run(args: &args::ConvertArgs) -> Outcome {
    let format = match args.to {
        To::Bintensors => OutputFormat::Bintensors,
        To::Safetensors => OutputFormat::Safetensors,
    };
    stop_on_signals();
    let options = query_options(&args.source)?;
    let settings = options.settings();
    let (checkpoint, mut notes) = one_checkpoint(&args.source, options)?;
    let target = target(&args.out, &checkpoint.name, format)?;
    keep_source(&checkpoint, &target)?;
    let spec = FileSpec::saved(&checkpoint.name, format);
    let reader = Reader::open(&VirtualFile::new(&checkpoint, spec))?;
    let mut digest = Hash::of(format);
    let bar = bar(args.progress, reader.len());
    let mut progress = |bytes| {
        bar.inc(bytes);
        check_stopped()
    };
    let mut hash = |bytes: &[u8]| digest.update(bytes);
    let mut watch = Watch { progress: &mut progress, bytes: Some(&mut hash) };
    let write = WriteOptions { replace: args.force, ..WriteOptions::default() };
    Copier::new(settings).write_file(&reader, &target, write, &mut watch)?;
    bar.finish_and_clear();
    let (algorithm, digest) = digest.finish();
    let catalog = checkpoint.catalog();
    if checkpoint.tail == Tail::Unproven {
        notes.push(UNPROVEN_TAIL.to_owned());
    }
    if args.source.json {
        return print_json(&json!({
            "source": real_name(&args.source.source),
            "ok": true,
            "class": Value::Null,
            "error": Value::Null,
            "name": checkpoint.name,
            "kind": checkpoint.kind.as_str(),
            "path": real_name(&target),
            "format": format.as_str(),
            "tensors": catalog.len(),
            "shards": catalog.shards.len(),
            "bytes": reader.len(),
            "tail": checkpoint.tail.as_str(),
            "digest_algorithm": algorithm,
            "digest": digest,
            algorithm: digest,
            "notes": notes,
        }));
    }
    let mut text = format!(
        "{}: {}, {}, {algorithm} {digest}\n",
        shown_path(&target),
        counted(catalog.len(), "tensor"),
        human(reader.len())
    );
    text.extend(notes.iter().map(|note| format!("  note: {}\n", shown(note))));
    print_text(&text)
}

/// Refuses to overwrite a file of `checkpoint`. Only a checkpoint of one file may be overwritten by
/// itself.
fn keep_source(checkpoint: &Checkpoint, target: &Path) -> Result<(), Failure> {
    let inode = |path: &Path| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    let Some(there) = inode(target) else { return Ok(()) };
    let sources = checkpoint.sources();
    let map = checkpoint.weight_map().map(|(name, _)| checkpoint.directory.join(name));
    let is_source = sources.iter().any(|source| inode(source.path()) == Some(there));
    let is_map = map.is_some_and(|map| inode(&map) == Some(there));
    if is_map || (is_source && sources.len() > 1) {
        let message = "is a file of the source; write somewhere else";
        return Err(Failure::Failed(format!("{}: {message}", shown_path(target))));
    }
    Ok(())
}

/// The file to write for the checkpoint `name`.
fn target(out: &Path, name: &str, format: OutputFormat) -> Result<PathBuf, Failure> {
    let is_folder = out.as_os_str().as_encoded_bytes().ends_with(b"/");
    if out.is_dir() {
        // A mount may show its source in another format than the stored one.
        let suffix = OutputFormat::of_name(name).map_or("", OutputFormat::suffix);
        let stem = name.strip_suffix(suffix).unwrap_or(name);
        return Ok(out.join(format!("{stem}{}", format.suffix())));
    }
    let shown = shown_path(out);
    if is_folder {
        return Err(Failure::Failed(format!("{shown}: no such folder")));
    }
    match out.file_name().and_then(|name| OutputFormat::of_name(name.to_str()?)) {
        Some(other) if other != format => Err(Failure::Usage(format!(
            "{shown}: the name is one of a {} file, --to says {}",
            other.as_str(),
            format.as_str()
        ))),
        _ => Ok(out.to_owned()),
    }
}

/// The digest that `convert` prints for a format.
enum Hash {
    /// The checksum that `save_with_checksum` of the bintensors package returns by default.
    Sha1(Sha1),
    /// The checksum by which hubs name files.
    Sha256(Sha256),
}

impl Hash {
    fn of(format: OutputFormat) -> Hash {
        match format {
            OutputFormat::Bintensors => Hash::Sha1(Sha1::new()),
            OutputFormat::Safetensors => Hash::Sha256(Sha256::new()),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hash::Sha1(hash) => hash.update(bytes),
            Hash::Sha256(hash) => hash.update(bytes),
        }
    }

    /// The name of the algorithm, and the digest in hexadecimal.
    fn finish(self) -> (&'static str, String) {
        match self {
            Hash::Sha1(hash) => ("sha1", format!("{:x}", hash.finalize())),
            Hash::Sha256(hash) => ("sha256", format!("{:x}", hash.finalize())),
        }
    }
}
