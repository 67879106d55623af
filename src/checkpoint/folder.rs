//! A folder of a tree, and its files.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::Result;
use crate::format::deepspeed::{LATEST, LATEST_UNIVERSAL};
use crate::format::names;
use crate::source::Source;
use crate::store::Store;
use crate::store::resolve::Unusable;
use crate::version::{Time, Version};

use super::deepspeed::StateFiles;

/// Names of subfolders that may hold the checkpoint of their parent folder in another form.
const TWIN_FOLDERS: [&str; 2] = ["sharded", "consolidated"];

/// Number of a folder in its tree. The number is never reused for another folder.
pub type FolderId = usize;

/// A regular file of the source.
#[derive(Clone, Debug)]
pub struct File {
    /// Name in its folder.
    pub name: OsString,
    /// The store in which it is.
    pub store: Store,
    /// Its real path, with symbolic links resolved.
    pub path: PathBuf,
    /// Its version when it was last examined.
    pub version: Version,
}

/// A name in a folder that does not lead to a file that may be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// Name in its folder.
    pub name: OsString,
    /// The reason why it cannot be used.
    pub why: Unusable,
}

/// A folder of the source.
#[derive(Clone, Debug, Default)]
pub struct Folder {
    /// Path below the source, empty for the source itself.
    pub relative: PathBuf,
    /// The store in which it is.
    pub store: Store,
    /// Its real path.
    pub path: PathBuf,
    /// Its version when it was last examined, `None` if it is gone.
    pub version: Option<Version>,
    /// Its parent folder.
    pub parent: Option<FolderId>,
    /// Folders in it, by name.
    pub children: Vec<(OsString, FolderId)>,
    /// Files in it, by name.
    pub files: Arc<[File]>,
    /// Names that do not lead to a file that may be read, such as broken links and devices.
    pub misfits: Arc<[Misfit]>,
    /// Lines about parts of the folder that are left out because a limit is exceeded.
    pub lacks: Vec<String>,
    /// Names of files that existed at the scan and are missing now.
    pub(super) gone: Vec<OsString>,
    /// Whether a link leads to this folder, or to a folder that contains it.
    pub(super) linked: bool,
    /// Real paths of other folders on whose entries the targets of its links depend.
    pub(super) targets: Arc<[PathBuf]>,
    /// Time at which it was listed, in seconds since 1970.
    pub(super) listed: i64,
    /// Whether the listing left out names whose versions could not be read.
    pub partial: bool,
    /// Index of the view that presents its sets. `None` if the source has only one view.
    pub(super) view: Option<usize>,
    /// Whether the tree has made the folder, so that no folder of the source has its entries.
    pub(super) made: bool,
    /// Files that the tree has made, with their names and texts.
    pub(super) texts: Arc<[(OsString, Arc<[u8]>)]>,
}

pub(super) fn is_twin(name: &OsStr) -> bool {
    TWIN_FOLDERS.iter().any(|twin| name == *twin)
}

impl File {
    /// The file in the version that was last examined. It is opened at its first read.
    pub fn source(&self) -> Arc<Source> {
        self.store.closed(&self.path, self.version)
    }

    /// Opens the file. If it is in another store, it is opened in the version of its listing: each read fails if the
    /// store has another version by then.
    ///
    /// # Errors
    /// The errors of `Store::open`.
    pub(super) fn open_listed(&self) -> Result<Arc<Source>> {
        if self.store.is_local() { self.store.open(&self.path) } else { Ok(self.source()) }
    }

    /// Its current version, as its server reports it.
    ///
    /// # Errors
    /// There is no file, or its server does not answer.
    pub fn version_now(&self) -> io::Result<Version> {
        self.store.fresh_version(&self.path)
    }
}

impl Folder {
    /// Whether the tree has made the folder, and it is not the root. Examples are the folders
    /// between the root and the models of `OpenOptions::hub`. The root counts as the folder of the
    /// source.
    pub fn is_made_below_root(&self) -> bool {
        self.made && self.parent.is_some()
    }

    /// Whether the tree has made the folder, so that no folder of the source has its entries.
    pub fn is_made(&self) -> bool {
        self.made
    }

    /// Whether a link leads to this folder, or to a folder that contains it.
    pub fn is_linked(&self) -> bool {
        self.linked
    }

    /// The file of this name.
    pub fn file(&self, name: &str) -> Option<&File> {
        let index = self.files.binary_search_by(|file| file.name.as_os_str().cmp(OsStr::new(name)));
        index.ok().map(|index| &self.files[index])
    }

    /// The names in it that are UTF-8, including names that lead to no file.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let files = self.files.iter().map(|file| &file.name);
        let names = files.chain(self.misfits.iter().map(|misfit| &misfit.name));
        names.filter_map(|name| name.to_str())
    }

    /// The latest modification time of the folder and its files.
    pub fn newest(&self) -> Time {
        let versions = self.files.iter().map(|file| &file.version).chain(&self.version);
        versions.filter_map(Version::modified).max().unwrap_or_default()
    }

    /// Whether one of its files is a link.
    pub fn has_links(&self) -> bool {
        self.files.iter().any(|file| {
            file.path.parent() != Some(&self.path) || file.path.file_name() != Some(&file.name)
        })
    }

    /// The files of a checkpoint of DeepSpeed in it, if it has any.
    pub(super) fn state_files(&self) -> Option<StateFiles<'_>> {
        StateFiles::of(self.files.iter().filter_map(|file| file.name.to_str()))
    }

    /// Whether it is the folder of a checkpoint, and `run` is the folder of its run of DeepSpeed.
    pub(super) fn is_of_run(&self, run: &Folder) -> bool {
        run.latest().is_some() && self.state_files().is_some()
    }

    /// The `latest` file, which names the folder of the last checkpoint, if this is the folder of a run of DeepSpeed.
    pub(super) fn latest(&self) -> Option<&File> {
        self.file(self.latest_name())
    }

    /// The name of the `latest` file. `latest` takes precedence over the file for universal
    /// checkpoints, because a universal checkpoint is converted from another checkpoint.
    pub(super) fn latest_name(&self) -> &'static str {
        if self.file(LATEST).is_some() { LATEST } else { LATEST_UNIVERSAL }
    }

    /// Whether files of `torch.save` count as weights: if the folder has no weights of other
    /// formats, or `only` is such a file.
    pub(super) fn reads_torch(&self, only: Option<&str>) -> bool {
        match only {
            Some(only) => names::is_of_torch(only),
            None => {
                !self.names().any(|name| names::is_weights_or_map(name) || names::is_distcp(name))
            }
        }
    }

    /// Returns a function that says whether a file may be in one set with `only`, according to its name. If `only` is
    /// a file of `torch.save` or of a distributed checkpoint, files of other sets are not read.
    pub(super) fn may_be_with<'a>(&self, only: Option<&'a str>) -> impl Fn(&str) -> bool + use<'a> {
        let only = only.filter(|only| names::is_of_torch(only) || names::is_of_distcp(only));
        let has_maps = || self.names().any(|name| names::torch_map_output(name).is_some());
        let is_mapped = only.is_some_and(names::is_of_torch) && has_maps();
        move |name| {
            only.is_none_or(|only| {
                names::are_of_one_torch_set(only, name) || (is_mapped && names::is_of_torch(name))
            })
        }
    }

    /// Whether it has pickle files of torch that count as weights, according to their names.
    pub(super) fn has_pickles(&self, only: Option<&str>) -> bool {
        let mut names = self.files.iter().filter_map(|file| file.name.to_str());
        (names.any(names::is_of_torch) && self.reads_torch(only))
            || self.reads_distcp(only)
            || (only.is_none() && self.state_files().is_some())
    }

    /// Whether it has names that can be part of a set. `only` is the name of the file if the source is one file.
    pub(super) fn has_weights(&self, only: Option<&str>) -> bool {
        self.names().any(|name| names::is_weights_or_map(name) || only == Some(name))
            || self.has_pickles(only)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_file_of_torch_may_be_of_one_set_with_its_like_only() {
        let folder = |names: &[&str]| {
            let misfit = |name: &&str| Misfit { name: (*name).into(), why: Unusable::Special };
            Folder { misfits: names.iter().map(misfit).collect(), ..Folder::default() }
        };
        let (plain, mapped) = (folder(&["a.bin"]), folder(&["a.bin", "m.bin.index.json"]));
        for (only, name, in_plain, in_mapped) in [
            (None, "a.bin", true, true),
            (Some("a.safetensors"), "b.safetensors", true, true),
            (Some("x"), "b.safetensors", true, true),
            (Some("a.bin"), "a.bin", true, true),
            (Some("a.bin"), "b.bin", false, true),
            (Some("a.bin"), "b.safetensors", false, false),
            (Some("m-00001-of-00002.bin"), "m-00002-of-00002.bin", true, true),
            (Some("m_world_size_2_rank_0.pt"), "m_world_size_2_rank_1.pt", true, true),
            (Some(".metadata"), "b.safetensors", false, false),
            (Some("__0_0.distcp"), "a.bin", false, false),
        ] {
            assert_eq!(plain.may_be_with(only)(name), in_plain, "{only:?} {name}");
            assert_eq!(mapped.may_be_with(only)(name), in_mapped, "{only:?} {name}");
        }
    }
}
