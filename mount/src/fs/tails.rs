//! The sets of a mount with an unproven tail: the warnings about them, and their report in
//! `status`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tensorfs::internal::checkpoint::{FolderId, Proved, Tail, Tree};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::hash::Digest;
use tensorfs::internal::sync::Mutex;

/// Maximum number of sets that `status` lists.
const NAMED_MAX: usize = 20;

/// The remedy for an unproven tail.
pub(crate) const REMEDY: &str =
    "settle it with -o expect-shards=N or reference=FILE, or a manifest (verify --write-manifest)";

/// The numbers of sets with proven and unproven tails, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct TailStatus {
    /// Number of sets whose last pieces are proved.
    pub proven: usize,
    /// Number of sets whose last pieces are not proved.
    pub unproven: usize,
    /// The files of the sets whose last pieces are not proved.
    pub files: Vec<String>,
}

/// For each shown set, whether its last pieces are proved.
#[derive(Default)]
pub(crate) struct Tails(Mutex<BTreeMap<FolderId, FolderTails>>);

/// The sets of one folder.
#[derive(Default)]
struct FolderTails {
    /// Its path in the mount.
    path: PathBuf,
    /// Names of the virtual files of sets with an unproven tail.
    unproven: Vec<String>,
    /// Number of sets of the folder whose tail is proved.
    proven: usize,
    /// For each weight file in the mount, the tail of its set.
    files: BTreeMap<String, Tail>,
    /// Hash of the `config.json` that decides how the tensors of the folder are cut.
    config: Option<Digest>,
}

impl Tails {
    /// Replaces the records about the sets of a folder. Logs one warning for each set with an
    /// unproven tail.
    pub(crate) fn note(&self, tree: &Tree, id: FolderId, proved: &Proved) {
        let source = tree.folder(id);
        let mut folder = FolderTails { path: source.relative.clone(), ..FolderTails::default() };
        for set in proved.sets.iter().filter(|set| set.shown_at_parent.is_none()) {
            let Ok(checkpoint) = &set.outcome else { continue };
            if checkpoint.tail == Tail::Unproven {
                folder.unproven.push(set.name.clone());
            } else {
                folder.proven += 1;
            }
            folder.config = folder.config.or(checkpoint.config());
            let mut files: Vec<String> =
                checkpoint.virtual_files().map(|file| file.spec().name.clone()).collect();
            if files.is_empty() {
                files.extend(set.files.iter().cloned());
            }
            folder.files.extend(files.into_iter().map(|file| (file, checkpoint.tail)));
        }
        let new = {
            let mut folders = self.0.lock();
            let before = folders.get(&id).map_or(&[][..], |before| &before.unproven);
            let new: Vec<String> =
                folder.unproven.iter().filter(|name| !before.contains(name)).cloned().collect();
            folders.insert(id, folder);
            new
        };
        for name in new {
            tracing::warn!("{}", warning(&source.path.join(name)));
        }
    }

    /// Forgets a folder that is gone.
    pub(crate) fn forget(&self, id: FolderId) {
        self.0.lock().remove(&id);
    }

    /// The warnings that were logged so far.
    pub(crate) fn warnings(&self, tree: &Tree) -> Vec<String> {
        let folders = self.0.lock();
        let paths = folders.iter().flat_map(|(id, folder)| {
            let path = tree.folder(*id).path.clone();
            folder.unproven.iter().map(move |name| warning(&path.join(name)))
        });
        paths.collect()
    }

    /// The tail of the set to which the weight file `name` of `folder` belongs.
    pub(crate) fn of(&self, folder: FolderId, name: &str) -> Option<Tail> {
        self.0.lock().get(&folder)?.files.get(name).copied()
    }

    /// Hash of the `config.json` that decides how the tensors of `folder` are cut. `None` if no
    /// config decides.
    pub(crate) fn config_of(&self, folder: FolderId) -> Option<Digest> {
        self.0.lock().get(&folder)?.config
    }

    /// The folders of the source below `path` in the mount whose `config.json` decides how tensors are
    /// cut, with the hash of each text. `path` itself is not included.
    pub(crate) fn configs_below(
        &self,
        tree: &Tree,
        path: &Path,
    ) -> BTreeMap<PathBuf, (FolderId, String)> {
        let folders = self.0.lock();
        let below =
            folders.iter().filter(|(_, own)| own.path != path && own.path.starts_with(path));
        let configs = below.filter_map(|(id, own)| Some((*id, own.config?)));
        let there = configs.filter(|(id, _)| tree.contains(*id));
        there.map(|(id, digest)| (tree.folder(id).path.clone(), (id, digest.to_string()))).collect()
    }

    /// The numbers for `tensorfs status`.
    pub(crate) fn status(&self) -> TailStatus {
        let folders = self.0.lock();
        let unproven: usize = folders.values().map(|folder| folder.unproven.len()).sum();
        let proven: usize = folders.values().map(|folder| folder.proven).sum();
        let named = folders.values().flat_map(|folder| {
            folder.unproven.iter().map(|name| shown_path(&folder.path.join(name)))
        });
        TailStatus { proven, unproven, files: named.take(NAMED_MAX).collect() }
    }
}

fn warning(path: &Path) -> String {
    let path = shown_path(path);
    format!("{path}: tail: unproven: a lost last piece would only make a tensor smaller; {REMEDY}")
}
