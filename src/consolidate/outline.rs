//! The folders and files that a mount of a source shows.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::source_files::SourceFiles;
use super::tensorizer::TensorizerFile;
use crate::checkpoint::{
    Checkpoint, Content, ERROR_FILE, File, Folder, FolderId, Proved, Tree, VirtualFile,
};
use crate::error::{Error, ErrorKind, Result, quoted, shown, shown_path};
use crate::format::{InputFormat, OutputFormat, manifest, names};
use crate::hash::{Digest, Hasher};
use crate::reader::Reader;
use crate::source::{Source, read_text};
use crate::version::Version;
use crate::view::FileSpec;

/// The content of a file.
#[derive(Clone, Debug)]
pub enum OutlineContent {
    /// Tensors of a checkpoint after one header.
    Virtual(VirtualFile),
    /// Tensors of a checkpoint, as a tensorizer file.
    Tensorizer(TensorizerFile),
    /// A file of the source, unchanged.
    Whole(Arc<Source>),
    /// Text that is generated for the view, and the sources from which it is generated.
    Text(Arc<[u8]>, Arc<[Arc<Source>]>),
}

impl OutlineContent {
    /// Length in bytes.
    ///
    /// # Errors
    /// The errors of `VirtualFile::layout`.
    pub fn len_bytes(&self) -> Result<u64> {
        Ok(match self {
            OutlineContent::Virtual(file) => file.summary()?.len,
            OutlineContent::Tensorizer(file) => file.len(),
            OutlineContent::Whole(source) => source.len(),
            OutlineContent::Text(text, _) => text.len() as u64,
        })
    }

    /// A reader of the bytes. `None` for text, and for tensorizer files, whose hashes are known only when they
    /// are written.
    ///
    /// # Errors
    /// The errors of `Reader::open`.
    pub fn reader(&self) -> Result<Option<Reader>> {
        Ok(match self {
            OutlineContent::Virtual(file) => Some(Reader::open(file)?),
            OutlineContent::Whole(source) => Some(Reader::whole(source.clone())),
            OutlineContent::Tensorizer(_) | OutlineContent::Text(..) => None,
        })
    }

    /// The sources of the bytes.
    pub fn sources(&self) -> &[Arc<Source>] {
        match self {
            OutlineContent::Virtual(file) => file.sources(),
            OutlineContent::Tensorizer(file) => file.sources(),
            OutlineContent::Whole(source) => std::slice::from_ref(source),
            OutlineContent::Text(..) => &[],
        }
    }
}

/// A file that a mount shows.
#[derive(Clone, Debug)]
pub struct OutlineFile {
    /// Path below the root.
    pub path: PathBuf,
    /// The content of the file.
    pub content: OutlineContent,
}

impl OutlineFile {
    /// Whether the file contains weights, or lists the files that contain weights.
    pub fn is_weights(&self) -> bool {
        matches!(self.content, OutlineContent::Virtual(_)) || names::is_of_weights(&self.path)
    }
}

/// A folder that a mount shows.
#[derive(Clone, Debug)]
pub struct OutlineFolder {
    /// Path below the root.
    pub path: PathBuf,
    /// Permission bits of the source folder.
    pub mode: u32,
}

/// The folders and files that a mount of a source shows. Parents come before their children.
#[derive(Clone, Debug, Default)]
pub struct Outline {
    /// The folders, the root first.
    pub folders: Vec<OutlineFolder>,
    /// The files.
    pub files: Vec<OutlineFile>,
    /// The checkpoints.
    pub checkpoints: Vec<Arc<Checkpoint>>,
    /// Notes on unusual but valid input, a line each.
    pub notes: Vec<String>,
    /// All files that the scan of the source has found.
    pub source_files: SourceFiles,
}

impl Outline {
    /// A hash that identifies the job of writing this outline. Two hashes are equal only if all written bytes are
    /// equal.
    ///
    /// # Errors
    /// The errors of `VirtualFile::summary`.
    pub(super) fn job(&self) -> Result<Digest> {
        let mut hasher = Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        add(env!("CARGO_PKG_VERSION").as_bytes());
        for folder in &self.folders {
            add(folder.path.as_os_str().as_encoded_bytes());
        }
        for OutlineFile { path, content } in &self.files {
            add(path.as_os_str().as_encoded_bytes());
            match content {
                OutlineContent::Virtual(file) => {
                    let summary = file.summary()?;
                    add(file.spec().format.as_str().as_bytes());
                    add(&summary.len.to_le_bytes());
                    add(&summary.header.0);
                }
                OutlineContent::Tensorizer(file) => add(&file.len().to_le_bytes()),
                OutlineContent::Whole(_) => add(b"whole"),
                OutlineContent::Text(text, _) => add(text),
            }
            for source in content.sources() {
                let words = source.version().to_words();
                words.iter().for_each(|word| add(&word.to_le_bytes()));
            }
        }
        Ok(hasher.finish())
    }

    /// Proves all checkpoints in `tree`.
    ///
    /// # Errors
    /// The first refusal of a checkpoint. `Error::Usage` if there is no checkpoint. Also a refusal if the scan
    /// has left out parts of the source.
    pub fn of(tree: &Tree) -> Result<Outline> {
        if let Some(summary) = tree.left_out.summary().filter(|_| tree.left_out.is_partial()) {
            return Err(incomplete_source_error(&tree.source, summary));
        }
        let mut outline = Outline { source_files: SourceFiles::of(tree), ..Outline::default() };
        outline.notes.extend(tree.left_out.lines.iter().cloned());
        let mut hidden = HashSet::new();
        let mut listed = HashSet::new();
        for top in tree.families() {
            let family = tree.prove(top);
            let mut members = Vec::new();
            for (id, proved) in &family {
                listed.insert(*id);
                members.push((*id, proved, outline.add(tree, *id, proved)?));
            }
            hidden.extend(tree.emptied(members.into_iter()));
        }
        if outline.checkpoints.is_empty() {
            return Err(Error::usage(tree.nothing_found()));
        }
        for id in tree.ids() {
            if !listed.contains(&id) {
                // A folder without weights.
                outline.add(tree, id, &Proved::default())?;
            }
            if hidden.contains(&id) {
                continue;
            }
            let folder = tree.folder(id);
            let mode = std::fs::metadata(&folder.path).map_or(0o755, |meta| meta.mode() & 0o777);
            outline.folders.push(OutlineFolder { path: folder.relative.clone(), mode });
        }
        Ok(outline)
    }

    /// The tensors of `checkpoint` in numbered files. The file names and the weight map are those that the
    /// consolidation of torch makes. There are no other files.
    ///
    /// # Errors
    /// `Error::Usage` if `numbers` lacks a tensor, names one that does not exist, or contains the number 0.
    pub fn numbered(
        checkpoint: &Arc<Checkpoint>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<Outline> {
        let catalog = checkpoint.catalog();
        let wrong = |name: &str, why: &str| {
            Error::usage(format!("the list of files: tensor {}: {why}", quoted(name)))
        };
        if let Some((name, _)) = numbers.iter().find(|(name, _)| catalog.tensor(name).is_none()) {
            return Err(wrong(name, "is not in the checkpoint"));
        }
        if let Some((name, _)) = numbers.iter().find(|&(_, &number)| number == 0) {
            return Err(wrong(name, "expected a number from 1, found 0"));
        }
        let mut groups: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for tensor in catalog.tensors() {
            let number =
                numbers.get(tensor.name).ok_or_else(|| wrong(tensor.name, "is not in the list"))?;
            groups.entry(*number).or_default().push(tensor.position() as u32);
        }
        let last = groups.keys().last().copied().unwrap_or(0);
        let name = |number: u64| format!("model-{number:05}-of-{last:05}.safetensors");
        let mut outline = Outline { checkpoints: vec![checkpoint.clone()], ..Outline::default() };
        outline.folders.push(OutlineFolder { path: PathBuf::new(), mode: 0o777 });
        for (&number, tensors) in &groups {
            let single = FileSpec::single(&name(number), OutputFormat::Safetensors);
            let spec = FileSpec { tensors: Some(tensors.as_slice().into()), ..single };
            let content = OutlineContent::Virtual(VirtualFile::new(checkpoint, spec));
            outline.files.push(OutlineFile { path: name(number).into(), content });
        }
        let files: BTreeMap<&str, String> =
            numbers.iter().map(|(tensor, &number)| (tensor.as_str(), name(number))).collect();
        let map = serde_json::json!({
            "metadata": { "total_size": catalog.data_len() },
            "weight_map": files,
        });
        let text = format!("{map:#}\n").into_bytes().into();
        let content = OutlineContent::Text(text, checkpoint.sources().into());
        outline
            .files
            .push(OutlineFile { path: names::weight_map("model.safetensors").into(), content });
        Ok(outline)
    }

    /// Adds the files of a folder. Returns their number.
    fn add(&mut self, tree: &Tree, id: FolderId, proved: &Proved) -> Result<usize> {
        for set in &proved.sets {
            match &set.outcome {
                Ok(checkpoint) if set.shown_at_parent.is_none() => {
                    self.checkpoints.push(checkpoint.clone());
                }
                Err(error) => return Err(error.copied()),
                Ok(_) => {}
            }
        }
        let folder = tree.folder(id);
        if let Some(lack) = folder.lacks.first() {
            return Err(incomplete_source_error(&folder.path, lack.clone()));
        }
        self.notes.extend(proved.notes.iter().cloned());
        let entries = tree.entries(id, proved);
        let count = entries.len();
        let checkpoints = proved.sets.iter().filter_map(|set| set.outcome.as_ref().ok());
        let configs: Vec<Digest> =
            checkpoints.filter_map(|checkpoint| checkpoint.config()).collect();
        for entry in entries {
            let content = match entry.content {
                Content::Virtual(file) => OutlineContent::Virtual(file),
                Content::Text(_) if entry.name == ERROR_FILE => continue,
                Content::Text(text) => {
                    OutlineContent::Text(text, map_sources(&folder, proved, &entry.name))
                }
                Content::Whole { proved: Some(source), .. } => OutlineContent::Whole(source),
                Content::Whole { file, proved: None } => {
                    let version = version_of(&file);
                    if version != file.version && file.name == "config.json" {
                        check_config(&file.path, &configs)?;
                    }
                    OutlineContent::Whole(file.store.closed(&file.path, version))
                }
            };
            self.files.push(OutlineFile { path: folder.relative.join(entry.name), content });
        }
        Ok(count)
    }

    /// Total length of all files in bytes, or `u64::MAX` if it is more.
    ///
    /// # Errors
    /// The errors of `OutlineContent::len_bytes`.
    pub fn len_bytes(&self) -> Result<u64> {
        let mut lens = self.files.iter().map(|file| file.content.len_bytes());
        lens.try_fold(0, |sum, len| Ok(u64::saturating_add(sum, len?)))
    }

    /// The file that contains all tensors of the only checkpoint.
    ///
    /// # Errors
    /// `Error::Refused` if the view shows several checkpoints, or one checkpoint as several files.
    pub fn single(&self, source: &Path) -> Result<&OutlineFile> {
        let weights: Vec<&OutlineFile> =
            self.files.iter().filter(|file| self.has_tensors(file)).collect();
        match weights.as_slice() {
            [one] => Ok(one),
            several => {
                let some = several.iter().take(4).map(|file| shown_path(&file.path));
                let message = format!(
                    "the mount shows {} weight files ({}{}), which do not go into one file; name \
                     a folder, or one checkpoint",
                    several.len(),
                    some.collect::<Vec<_>>().join(", "),
                    if several.len() > 4 { ", ..." } else { "" }
                );
                Err(Error::refused(source, ErrorKind::Usage.fault(message)))
            }
        }
    }

    /// The only file to write, if `out` is the name of a weights file. It contains all tensors, in the format
    /// of the name. `None` if `out` is a folder. `source` is the name of the source in errors.
    ///
    /// # Errors
    /// `Error::Usage` if the view shows a file in another format. `Error::Refused` if it shows several weight
    /// files, if `out` is a file of the source, or if a tensorizer file cannot store a tensor.
    pub fn file_at(&self, out: &Path, source: &Path) -> Result<Option<OutlineFile>> {
        // Only the suffix matters, even if the name is not UTF-8.
        let name = out.file_name().unwrap_or_default().to_string_lossy();
        let named = match OutputFormat::of_name(&name) {
            Some(format) => InputFormat::from(format),
            None if names::is_tensorizer(&name) => InputFormat::Tensorizer,
            None => return Ok(None),
        };
        if out.is_dir() {
            return Ok(None);
        }
        let wrong = |why: String| Error::usage(format!("{}: {why}", shown_path(out)));
        if out.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(wrong("the name is one of a file, not of a folder".to_owned()));
        }
        let shown = self.single(source)?;
        let (found, virtual_format) = self.formats_of(shown)?;
        // A tensorizer file is written in place of the safetensors file that the view shows by default.
        let is_made = named == InputFormat::Tensorizer && found == InputFormat::Safetensors;
        if found != named && !is_made {
            let advice = if found != virtual_format {
                "leave out layout=original".to_owned()
            } else if named == InputFormat::Tensorizer {
                format!("leave out format={}", found.as_str())
            } else {
                format!("the option format={} chooses it", named.as_str())
            };
            return Err(wrong(format!(
                "the name is one of a {} file, the mount shows a {} file; {advice}",
                named.as_str(),
                found.as_str()
            )));
        }
        if std::fs::metadata(out).is_ok() {
            self.files_to_keep()?.keep(out)?;
        }
        let mut file = shown.clone();
        if is_made {
            file.content = OutlineContent::Tensorizer(self.tensorizer_file(&file)?);
        }
        Ok(Some(file))
    }

    /// The format of `file`, which contains all tensors, and the format of virtual files. The two formats may differ if
    /// the view shows the files of the source.
    fn formats_of(&self, file: &OutlineFile) -> Result<(InputFormat, InputFormat)> {
        if let OutlineContent::Virtual(file) = &file.content {
            let format = file.spec().format.into();
            return Ok((format, format));
        }
        let (checkpoint, number) = self.shard_of(file)?;
        let shards = &checkpoint.catalog().shards;
        let shard =
            shards.get(number).ok_or_else(|| Error::internal("a file of weights is no shard"))?;
        Ok((checkpoint.format_of(shard), checkpoint.format.into()))
    }

    /// The checkpoint and the number of the shard that `file` shows unchanged. If several weight maps name the
    /// same shard, the first checkpoint is returned.
    fn shard_of(&self, file: &OutlineFile) -> Result<(&Arc<Checkpoint>, usize)> {
        let OutlineContent::Whole(source) = &file.content else {
            return Err(Error::internal("a file that is made is no shard"));
        };
        let is_source = |other: &Arc<Source>| Arc::ptr_eq(other, source);
        let mut found = self.checkpoints.iter().filter_map(|checkpoint| {
            Some((checkpoint, checkpoint.sources().iter().position(is_source)?))
        });
        found.next().ok_or_else(|| Error::internal("a file of weights is no shard"))
    }

    /// The files of the source, which are never replaced.
    pub(super) fn files_to_keep(&self) -> Result<SourceFiles> {
        let shown = self.files.iter().flat_map(|file| file.content.sources());
        Ok(self.source_files.with_origin()?.with(shown.map(|source| source.path())))
    }

    /// The tensors of `file`, which contains all of them, as a tensorizer file.
    fn tensorizer_file(&self, file: &OutlineFile) -> Result<TensorizerFile> {
        let OutlineContent::Virtual(file) = &file.content else {
            // A file that is shown unchanged contains the tensors of its checkpoint.
            let (checkpoint, _) = self.shard_of(file)?;
            let spec = FileSpec::single(&checkpoint.name, OutputFormat::default());
            return TensorizerFile::new(checkpoint, &spec, None);
        };
        TensorizerFile::new(file.checkpoint(), file.spec(), None)
    }

    fn has_tensors(&self, file: &OutlineFile) -> bool {
        match &file.content {
            OutlineContent::Virtual(_) | OutlineContent::Tensorizer(_) => true,
            OutlineContent::Whole(source) => {
                let is_source = |other: &Arc<Source>| Arc::ptr_eq(other, source);
                self.checkpoints.iter().any(|checkpoint| checkpoint.sources().iter().any(is_source))
            }
            OutlineContent::Text(..) => false,
        }
    }
}

/// The shards and the weight map from which the weight map `name` of `folder` is made.
fn map_sources(folder: &Folder, proved: &Proved, name: &OsStr) -> Arc<[Arc<Source>]> {
    let mut sources = Vec::new();
    for set in &proved.sets {
        let Ok(checkpoint) = &set.outcome else { continue };
        let map = checkpoint.weight_map().map(|(map, _)| map.to_owned());
        if name == map.unwrap_or_else(|| names::weight_map(&checkpoint.name)).as_str() {
            let maps = set
                .files
                .iter()
                .filter(|file| names::weight_map_output(file).is_some())
                .filter_map(|file| folder.file(file));
            sources.extend(maps.map(File::source));
            sources.extend_from_slice(checkpoint.sources());
        }
    }
    sources.into()
}

/// The version of a file that the scan has found. The scan may have got outdated attributes of a remote file from the
/// kernel's cache. So the version is read again, unless a proof reads the file.
fn version_of(file: &File) -> Version {
    // The name in the folder counts, because a link may lead to a file with any other name.
    let name = Path::new(&file.name);
    let is_proved = names::is_of_weights(name)
        || name.to_str().is_some_and(|it| it.ends_with(manifest::SUFFIX));
    if is_proved || !file.source().may_block() {
        return file.version;
    }
    file.version_now().ok().filter(Version::is_file).unwrap_or(file.version)
}

/// Checks that the `config.json` at `path` still has the digests `configs`. The text with these digests has decided how
/// the weights next to the file are divided.
///
/// # Errors
/// `Error::Changed` if its text has changed. `Error::Usage` if it cannot be read.
fn check_config(path: &Path, configs: &[Digest]) -> Result<()> {
    if configs.is_empty() {
        return Ok(());
    }
    let (_, text) = read_text(path).map_err(Error::usage)?;
    let found = Digest::of(&text);
    if configs.iter().any(|config| *config != found) {
        let detail = "was changed after it decided how the tensors beside it are cut: try again";
        return Err(Error::changed(path, detail));
    }
    Ok(())
}

fn incomplete_source_error(path: &Path, why: String) -> Error {
    let message = format!("parts of the source would be missing: {}", shown(&why));
    Error::refused(path, ErrorKind::Usage.fault(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_that_decided_how_tensors_are_cut_must_have_its_text_and_another_one_need_not() {
        let path =
            std::env::temp_dir().join(format!("tensorfs-config-{}.json", std::process::id()));
        std::fs::write(&path, "{}\n").unwrap();
        let (old, now) = (Digest::of(b"{}"), Digest::of(b"{}\n"));
        assert!(check_config(&path, &[]).is_ok() && check_config(&path, &[now, now]).is_ok());
        let error = check_config(&path, &[now, old]).unwrap_err();
        assert!(matches!(error, Error::Changed { .. }), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert!(check_config(&path, &[now]).is_err());
    }
}
