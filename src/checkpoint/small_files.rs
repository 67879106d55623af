//! Implements `OpenOptions::config`: a checkpoint shows small files from another folder beside its weights.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result, shown_path};
use crate::format::{manifest, names};
use crate::open_options::OpenOptions;
use crate::source::FileSystem;
use crate::store::Store;
use crate::store::resolve::LinkBounds;
use crate::version::Version;

use super::discover::SetKind;
use super::folder::{File, Folder, FolderId};
use super::set::Proved;
use super::tree::{Tree, look_at};

/// Maximum length of a small file in bytes. The largest tokenizers have about 40 MB.
const LEN_MAX: u64 = 64 << 20;

/// The file that names the family of models of a checkpoint.
pub(super) const CONFIG: &str = "config.json";

/// The folder that verl and SkyRL write beside the files of ranks. It has the config and the tokenizer.
pub(super) const MODEL_FOLDER: &str = "huggingface";

/// Maximum number of small files.
const FILES_MAX: usize = 1000;

/// Suffixes of weight files in other formats.
const OTHER_WEIGHTS: [&str; 14] = [
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".distcp",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".npy",
    ".npz",
    ".onnx",
    ".pkl",
    ".onnx_data",
];

/// The small files in the folder `options.config`, sorted by name. If `options.config` is a file,
/// that file. Empty without that option, or if nothing can be read.
pub(super) fn small_files(options: &OpenOptions) -> Vec<File> {
    let Some(path) = &options.config else { return Vec::new() };
    let store = Store::for_options(path, options);
    let Ok(real) = store.real_path(path) else { return Vec::new() };
    if is_folder(&store, &real) {
        let names = store.names(&real).unwrap_or_default();
        let files = names.iter().filter_map(|name| file_in(&real, name, options));
        return files.take(FILES_MAX).collect();
    }
    let Some((folder, name)) = path.parent().zip(path.file_name()) else { return Vec::new() };
    let Ok(folder) = store.real_path(folder) else { return Vec::new() };
    file_in(&folder, name, options).into_iter().collect()
}

/// The current version of the small file `name` of `options.config`.
pub(super) fn small_file(options: &OpenOptions, name: &OsStr) -> Option<File> {
    let path = options.config.as_ref()?;
    let store = Store::for_options(path, options);
    let real = store.real_path(path).ok()?;
    if is_folder(&store, &real) {
        return file_in(&real, name, options);
    }
    let folder = path.parent().filter(|_| path.file_name() == Some(name))?;
    file_in(&store.real_path(folder).ok()?, name, options)
}

/// The file `name` of `folder`. `None` if it is too large or has weights, or if its links leave the folders into
/// which links of the source may lead.
fn file_in(folder: &Path, name: &OsStr, options: &OpenOptions) -> Option<File> {
    let text = name.to_str().filter(|name| is_small_name(name))?;
    let follow = options
        .follow
        .iter()
        .filter_map(|path| Store::for_options(path, options).real_path(path).ok());
    let store = Store::for_options(folder, options);
    let bounds = LinkBounds::new(store.clone(), folder.to_owned(), follow.collect(), options.links);
    let (path, _) = bounds.resolve(&folder.join(text)).ok()?;
    let version = store.fresh_version(&path).ok()?;
    let is_small = |version: &Version| version.is_file() && version.len <= LEN_MAX;
    is_small(&version).then(|| File { name: name.to_owned(), store, path, version })
}

fn is_folder(store: &Store, real: &Path) -> bool {
    store.version(real).is_ok_and(|version| version.is_folder())
}

/// Whether this is the name of a small file: neither the name of a file with weights, nor of a file
/// that lists files with weights.
fn is_small_name(name: &str) -> bool {
    let other = OTHER_WEIGHTS.iter().any(|end| name.to_ascii_lowercase().ends_with(end));
    !(name.starts_with('.')
        || names::is_weights(name)
        || name.ends_with(".index.json")
        || names::weight_map_output(name).is_some()
        || name.ends_with(manifest::SUFFIX)
        || other)
}

impl Tree {
    /// The current version of the file `name` of `folder`. `None` if there is no file that may be
    /// read.
    pub fn file_now(&self, folder: FolderId, name: &OsStr) -> Option<File> {
        if let Some(file) = small_file(&self.options, name) {
            return Some(file);
        }
        let folder = self.folder(folder);
        let own = || look_at(&self.bounds, &folder.path.join(name));
        let beside = || {
            name.to_str().filter(|name| is_small_name(name))?;
            self.model_folder(&folder)?;
            look_at(&self.bounds, &folder.path.join(MODEL_FOLDER).join(name))
        };
        let (path, version) = own().or_else(beside)?;
        Some(File { name: name.to_owned(), store: self.store().clone(), path, version })
    }

    /// The subfolder of `folder` that has the config of the model, if there is one.
    fn model_folder(&self, folder: &Folder) -> Option<FolderId> {
        let mut children = folder.children.iter();
        let (_, id) = children.find(|(name, _)| name.as_os_str() == OsStr::new(MODEL_FOLDER))?;
        self.folder(*id).file(CONFIG).map(|_| *id)
    }

    /// The small files that `folder` shows beside weights that ranks have saved: the small files of the subfolder
    /// with the config of the model. `proved` has the sets of `folder`.
    pub(super) fn model_files(&self, folder: &Folder, proved: &Proved) -> Vec<File> {
        let is_of_ranks = |kind| matches!(kind, SetKind::Ranks | SetKind::Distributed);
        let mut shown = proved.sets.iter().filter(|set| set.shown_at_parent.is_none());
        if !shown.any(|set| set.outcome.is_ok() && is_of_ranks(set.kind)) {
            return Vec::new();
        }
        let Some(id) = self.model_folder(folder) else { return Vec::new() };
        let model = self.folder(id);
        let is_small = |file: &&File| {
            file.version.len <= LEN_MAX
                && file.name.to_str().is_some_and(|name| {
                    is_small_name(name) && folder.names().all(|own| own != name)
                })
        };
        model.files.iter().filter(is_small).take(FILES_MAX).cloned().collect()
    }

    /// Refuses `OpenOptions::config` if it leads to no small file, or if there are several
    /// checkpoints.
    pub(super) fn check_config(&self) -> Result<()> {
        let Some(path) = &self.options.config else { return Ok(()) };
        let shown = shown_path(path);
        if self.options.hub {
            return Err(Error::usage("config= is for one checkpoint, layout=hub shows several"));
        }
        let real = Store::for_options(path, &self.options)
            .real_path(path)
            .map_err(|e| Error::io(path, "open", e))?;
        let found = FileSystem::of_folder(&real);
        if found.is_pseudo_file_system() {
            return Err(Error::usage(format!(
                "config={shown}: lies on {}, which holds no files: expected a folder with files like \
                 config.json or tokenizer.json",
                found.name()
            )));
        }
        if small_files(&self.options).is_empty() {
            return Err(Error::usage(format!(
                "config={shown}: no small file there, like config.json or tokenizer.json: expected \
                 files of at most {} MiB that hold no weights",
                LEN_MAX >> 20
            )));
        }
        match self.config_folders().len() {
            0 | 1 => Ok(()),
            count => Err(Error::usage(format!(
                "config={shown}: is for one checkpoint, and {} has {count} folders with \
                 checkpoints: name one of them",
                shown_path(&self.source)
            ))),
        }
    }

    /// The real paths of all folders that have checkpoints.
    fn config_folders(&self) -> HashSet<PathBuf> {
        self.families().into_iter().map(|top| self.folder(top).path.clone()).collect()
    }

    /// The files of `OpenOptions::config` that `folder` shows. `proved` has the sets of `folder`.
    pub(super) fn config_files(&self, folder: &Folder, proved: &Proved) -> Vec<File> {
        let mut sets = proved.sets.iter().filter(|set| set.shown_at_parent.is_none());
        if self.options.config.is_none() || !sets.any(|set| set.outcome.is_ok()) {
            return Vec::new();
        }
        // Another checkpoint may have been added since the start.
        if self.config_folders().len() > 1 {
            let path = shown_path(&folder.path);
            tracing::warn!("{path}: config= is for one checkpoint, so its files are not shown");
            return Vec::new();
        }
        small_files(&self.options)
    }

    /// Whether the file is one of the files of `OpenOptions::config`.
    pub fn is_config_file(&self, file: &File) -> bool {
        let small = small_file(&self.options, &file.name);
        small.is_some_and(|small| small.path == file.path)
    }

    /// The current versions of the files of `OpenOptions::config`.
    pub fn all_config_files(&self) -> Vec<File> {
        small_files(&self.options)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::open_options::Links;

    #[test]
    fn small_files_are_those_without_weights_and_links_stay_inside() {
        let temporary = tempfile::tempdir().unwrap();
        let base = temporary.path().join("base");
        fs::create_dir_all(base.join("folder")).unwrap();
        let weights = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"];
        let small = ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.model"];
        for name in weights.iter().chain(&small).chain(&[".gitattributes"]) {
            fs::write(base.join(name), "x").unwrap();
        }
        fs::File::create(base.join("large.json")).unwrap().set_len(LEN_MAX + 1).unwrap();
        fs::write(temporary.path().join("secret"), "x").unwrap();
        symlink("../secret", base.join("link.json")).unwrap();
        symlink("config.json", base.join("same.json")).unwrap();
        let options = |config: PathBuf| OpenOptions {
            config: Some(config),
            links: Links::Inside,
            ..OpenOptions::default()
        };
        let names = |config: PathBuf| -> Vec<String> {
            let files = small_files(&options(config));
            files.iter().map(|file| file.name.to_str().unwrap().to_owned()).collect()
        };
        let expected =
            ["chat_template.jinja", "config.json", "merges.txt", "same.json", "tokenizer.model"];
        assert_eq!(names(base.clone()), expected);
        assert_eq!(names(base.join("config.json")), ["config.json"]);
        assert!(names(base.join("model.safetensors")).is_empty());
        assert!(small_file(&options(base.clone()), "merges.txt".as_ref()).is_some());
        assert!(small_file(&options(base), "link.json".as_ref()).is_none());
    }
}
