//! `tensorfs convert`: writes a checkpoint as a real file. It has the bytes that the package of its
//! format would write.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::Sha256;
use sha2::digest::DynDigest;
use tensorfs::internal::checkpoint::{Checkpoint, VirtualFile};
use tensorfs::internal::consolidate::{
    Copier, NewFile, OnBytes, Outline, OutlineContent, OutlineFile, OutlineFolder, SourceFiles,
    TensorizerFile, Watch, WriteKey, WriteOptions, refuse_url,
};
use tensorfs::internal::error::{counted, real_name, shown, shown_path};
use tensorfs::internal::format::{OutputFormat, names};
use tensorfs::internal::hash::hex;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::size::shown_size;
use tensorfs::internal::source::SecretOrigin;
use tensorfs::internal::view::{FileSpec, Files, View, arrange};

use super::args::{self, ConvertArgs, To};
use super::output::{Failure, Outcome, print_json, print_text, reported};
use super::sources::{begin_source_command, one_checkpoint};
use super::stopping::{check_stopped, clean_up_on_signals};
use super::verify::bar;
use crate::daemon::stalled::elsewhere;

pub(super) fn run(args: &args::ConvertArgs) -> Outcome {
    let to = format(args)?;
    let options = begin_source_command(&args.source, &args::CONVERT)?;
    check_view(to, &options.open.view)?;
    let (settings, files) = (options.settings(), options.open.view.files.clone());
    let key = write_key(args, to)?;
    let (checkpoint, notes, source_files) = one_checkpoint(&args.source, options)?;
    let copier = Copier::new(settings);
    let target = target(&args.out, &checkpoint.name, to)?;
    let mut conversion = Conversion { args, to, checkpoint, notes, source_files };
    let written = match to {
        To::Tensorizer => conversion.write_tensorizer(&copier, &target, files, key.as_ref())?,
        To::Bintensors => conversion.write_saved(&copier, &target, OutputFormat::Bintensors)?,
        To::Safetensors => conversion.write_saved(&copier, &target, OutputFormat::Safetensors)?,
    };
    conversion.report(&target, &written)
}

/// The format to write: the value of `--to`, or the format that the name of OUT implies.
fn format(args: &args::ConvertArgs) -> Result<To, Failure> {
    let named = args.out.file_name().and_then(|name| To::of_name(name.to_str()?));
    args.to.or(named).ok_or_else(|| {
        let out = shown_path(&args.out);
        Failure::Usage(format!(
            "{out}: the name does not say which format to write; give --to bintensors, safetensors \
             or tensorizer"
        ))
    })
}

/// Refuses view options that `convert` does not support.
fn check_view(to: To, view: &View) -> Result<(), Failure> {
    let (format, files) = (to.as_str(), &view.files);
    let message = match files {
        Files::Original => "option layout=original: shows files as they are, and convert writes \
                            new ones; leave it out"
            .to_owned(),
        Files::Single => return Ok(()),
        _ if to == To::Tensorizer => match files.lowest_gap() {
            None => return Ok(()),
            Some(gap) => format!(
                "option layout={files}: has no file {gap}, and tensorizer files have no weight map that \
                 says so; number the files from 1 without gaps"
            ),
        },
        _ if to == To::Bintensors => {
            format!("option layout={files}: convert writes one {format} file; leave it out")
        }
        _ => format!(
            "option layout={files}: convert writes one {format} file; leave it out, or write \
             several files by consolidate"
        ),
    };
    Err(Failure::Usage(message))
}

/// The key of the new file, if it is to be encrypted. The key is read from a file or derived from a
/// passphrase.
fn write_key(args: &args::ConvertArgs, to: To) -> Result<Option<WriteKey>, Failure> {
    let origin = match (&args.key_file, &args.passphrase_file) {
        (Some(path), _) => SecretOrigin::KeyFile(path.clone()),
        (None, Some(path)) => SecretOrigin::PassphraseFile(path.clone()),
        (None, None) => return Ok(None),
    };
    if to != To::Tensorizer {
        return Err(Failure::Usage(format!(
            "{} files are not encrypted; leave out the key, or write a tensorizer file",
            to.as_str()
        )));
    }
    let secret = origin.read().map_err(Failure::Failed)?;
    Ok(Some(WriteKey::of_secret(&secret)?))
}

impl To {
    /// The format that the name of a file implies.
    fn of_name(name: &str) -> Option<To> {
        match OutputFormat::of_name(name) {
            Some(OutputFormat::Safetensors) => Some(To::Safetensors),
            Some(OutputFormat::Bintensors) => Some(To::Bintensors),
            None => names::is_tensorizer(name).then_some(To::Tensorizer),
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            To::Bintensors => OutputFormat::Bintensors.as_str(),
            To::Safetensors => OutputFormat::Safetensors.as_str(),
            To::Tensorizer => "tensorizer",
        }
    }

    /// The suffix of file names in this format.
    fn suffix(self) -> &'static str {
        match self {
            To::Bintensors => OutputFormat::Bintensors.suffix(),
            To::Safetensors => OutputFormat::Safetensors.suffix(),
            To::Tensorizer => names::TENSORIZER_SUFFIX,
        }
    }
}

/// A conversion of one checkpoint.
struct Conversion<'a> {
    args: &'a args::ConvertArgs,
    to: To,
    checkpoint: Arc<Checkpoint>,
    notes: Vec<String>,
    source_files: SourceFiles,
}

/// The files that were written.
struct WrittenFiles {
    files: usize,
    bytes: u64,
    /// Name of the hash algorithm, and the digest in hexadecimal. `None` for tensorizer files,
    /// which contain hashes.
    digest: Option<(&'static str, String)>,
}

impl Conversion<'_> {
    fn write_options(&self) -> WriteOptions {
        let ConvertArgs { force, verify, .. } = *self.args;
        WriteOptions { replace: force, verify, beside_others: true }
    }

    /// Calls `write` with a progress bar for `bytes` bytes. `hash` gets the bytes of a file that is
    /// written in order.
    fn watched(
        &self,
        bytes: u64,
        hash: OnBytes<'_>,
        write: impl FnOnce(&mut Watch<'_>) -> tensorfs::Result<()>,
    ) -> Result<(), Failure> {
        let bar =
            bar(self.args.progress, if self.args.verify { bytes.saturating_mul(2) } else { bytes });
        let mut progress = |bytes| {
            bar.inc(bytes);
            check_stopped()
        };
        let mut each = |bytes: &[u8]| hash(bytes);
        clean_up_on_signals();
        // Each read of the source has its own deadline, so the whole work needs none.
        elsewhere(|| write(&mut Watch { progress: &mut progress, bytes: Some(&mut each) }))?;
        bar.finish_and_clear();
        Ok(())
    }

    /// Writes one file with the bytes that the package of `format` would write.
    fn write_saved(
        &self,
        copier: &Copier,
        target: &Path,
        format: OutputFormat,
    ) -> Result<WrittenFiles, Failure> {
        self.keep_source(target)?;
        let spec = FileSpec::saved(&self.checkpoint.name, format);
        let reader = Reader::open(&VirtualFile::new(&self.checkpoint, spec))?;
        let (algorithm, mut digest) = digest_of(format);
        let mut hash = |bytes: &[u8]| digest.update(bytes);
        let content = NewFile::Bytes(&reader);
        self.watched(reader.len(), &mut hash, |watch| {
            copier.write_file(content, target, self.write_options(), watch)
        })?;
        Ok(WrittenFiles {
            files: 1,
            bytes: reader.len(),
            digest: Some((algorithm, hex(&digest.finalize()))),
        })
    }

    /// Writes one tensorizer file, or several if the view has several files.
    fn write_tensorizer(
        &mut self,
        copier: &Copier,
        target: &Path,
        files: Files,
        key: Option<&WriteKey>,
    ) -> Result<WrittenFiles, Failure> {
        let checkpoint = self.checkpoint.clone();
        let keys = checkpoint.catalog().metadata.as_ref().map_or(0, |metadata| metadata.len());
        if keys > 0 {
            let note = format!("{keys} metadata entries are left out, tensorizer files have none");
            self.notes.push(note);
        }
        let target_name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let stem = target_name.strip_suffix(self.to.suffix()).unwrap_or(target_name);
        let view = View { files, ..View::default() };
        let arranged = arrange(stem, checkpoint.catalog(), &view)
            .map_err(|fault| checkpoint.refused(fault))?;
        if arranged.len() > 1 && (stem.is_empty() || stem.starts_with('.')) {
            return Err(Failure::Usage(format!(
                "{}: begins with a dot, and several files with hidden names are no checkpoint; give \
                 another name",
                shown_path(target)
            )));
        }
        let specs = match arranged.as_slice() {
            [] | [_] => vec![FileSpec::saved(stem, OutputFormat::default())],
            _ => arranged,
        };
        let files = specs
            .iter()
            .map(|spec| TensorizerFile::new(&checkpoint, spec, key))
            .collect::<tensorfs::Result<Vec<TensorizerFile>>>()?;
        let bytes = files.iter().map(TensorizerFile::len).fold(0, u64::saturating_add);
        let written = WrittenFiles { files: files.len(), bytes, digest: None };
        let options = self.write_options();
        if let [file] = files.as_slice() {
            self.keep_source(target)?;
            self.watched(bytes, &mut |_| (), |watch| {
                copier.write_file(NewFile::Tensorizer(file), target, options, watch)
            })?;
            return Ok(written);
        }
        let source_files = self.source_files.clone();
        let mut outline = Outline { source_files, ..Outline::default() };
        outline.folders.push(OutlineFolder { path: PathBuf::new(), mode: 0o777 });
        outline.files.extend(files.into_iter().map(|file| OutlineFile {
            path: file.name().into(),
            content: OutlineContent::Tensorizer(file),
        }));
        let parent = target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = parent.unwrap_or(Path::new("."));
        self.watched(bytes, &mut |_| (), |watch| {
            copier.write_folder(&outline, folder, options, watch)
        })?;
        Ok(written)
    }

    /// Refuses to overwrite a file of the source, even if the source is behind a mount, and the
    /// file with the key. A checkpoint that is only one file may be overwritten by its own
    /// conversion.
    fn keep_source(&self, target: &Path) -> Result<(), Failure> {
        refuse_url(target)?;
        if std::fs::metadata(target).is_err() {
            return Ok(());
        }
        let checkpoint = &self.checkpoint;
        let map = checkpoint.weight_map().map(|(name, _)| checkpoint.directory.join(name));
        let of = |paths: &mut dyn Iterator<Item = &Path>| {
            SourceFiles::default().with(paths).contains(target)
        };
        let ConvertArgs { key_file, passphrase_file, .. } = self.args;
        if of(&mut key_file.iter().chain(passphrase_file).map(PathBuf::as_path)) {
            return Err(Failure::at(target, "has the key of the new file; write somewhere else"));
        }
        let is_shard = of(&mut checkpoint.sources().iter().map(|source| source.path()));
        let is_itself = is_shard && checkpoint.sources().len() == 1;
        if of(&mut map.as_deref().into_iter())
            || ((is_shard || self.source_files.contains(target)) && !is_itself)
            || SourceFiles::behind(&self.args.source.source)?.contains(target)
        {
            return Err(Failure::at(target, "is a file of the source; write somewhere else"));
        }
        Ok(())
    }

    fn report(self, target: &Path, written: &WrittenFiles) -> Outcome {
        let WrittenFiles { files, bytes, digest } = written;
        let catalog = self.checkpoint.catalog();
        let tensors = catalog.len();
        if self.args.source.json {
            let mut report = json!({
                "source": real_name(&self.args.source.source),
                "ok": true,
                "class": Value::Null,
                "error": Value::Null,
                "name": self.checkpoint.name,
                "kind": self.checkpoint.kind.as_str(),
                "path": real_name(target),
                "format": self.to.as_str(),
                "files": files,
                "tensors": tensors,
                "shards": catalog.shards.len(),
                "bytes": bytes,
                "verified": self.args.verify,
                "tail": self.checkpoint.tail.as_str(),
                "digest_algorithm": digest.as_ref().map(|(algorithm, _)| *algorithm),
                "digest": digest.as_ref().map(|(_, digest)| digest),
                "notes": self.notes,
            });
            if let Some((algorithm, digest)) = digest {
                report[*algorithm] = digest.as_str().into();
            }
            return reported(target, print_json(&report));
        }
        let digest =
            digest.as_ref().map_or(String::new(), |(name, digest)| format!(", {name} {digest}"));
        let verified = if self.args.verify { ", read back and compared" } else { "" };
        let count = if *files == 1 { String::new() } else { format!("{files} files, ") };
        let mut text = format!(
            "{}: {count}{}, {}{digest}{verified}\n",
            shown_path(target),
            counted(tensors, "tensor"),
            shown_size(*bytes)
        );
        text.extend(self.notes.iter().map(|note| format!("  note: {}\n", shown(note))));
        reported(target, print_text(&text))
    }
}

/// The path of the file to write for the checkpoint `name`.
fn target(out: &Path, name: &str, to: To) -> Result<PathBuf, Failure> {
    let is_folder = out.as_os_str().as_encoded_bytes().ends_with(b"/");
    if out.is_dir() {
        // A mount may show its source in a format that is not the format of the source.
        let suffix = OutputFormat::of_name(name).map_or("", OutputFormat::suffix);
        let stem = name.strip_suffix(suffix).unwrap_or(name);
        return Ok(out.join(format!("{stem}{}", to.suffix())));
    }
    let shown = shown_path(out);
    if is_folder {
        return Err(Failure::Failed(format!("{shown}: no such folder")));
    }
    match out.file_name().and_then(|name| To::of_name(name.to_str()?)) {
        Some(other) if other != to => Err(Failure::Usage(format!(
            "{shown}: the name is one of a {} file, --to says {}",
            other.as_str(),
            to.as_str()
        ))),
        _ => Ok(out.to_owned()),
    }
}

/// The hash that `convert` prints for a format, with its name. For bintensors, it is the default of
/// `save_with_checksum` in the bintensors package. For safetensors, it is the hash by which hubs
/// name files.
fn digest_of(format: OutputFormat) -> (&'static str, Box<dyn DynDigest>) {
    match format {
        OutputFormat::Bintensors => ("sha1", Box::<Sha1>::default()),
        OutputFormat::Safetensors => ("sha256", Box::<Sha256>::default()),
    }
}
